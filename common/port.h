/* SPDX-License-Identifier: Apache-2.0 */
/* port.h - ports from the environment. */
#ifndef EP_COMMON_PORT_H
#define EP_COMMON_PORT_H

#include "cmd.h"

/* The port of sshd for nodes without one; 0: that of ssh's configuration. In pods, which may share a node's network. */
#define PORT_OF_SSH "EPKIT_SSH_PORT"
#define PORT_OF_SSH_DEFAULT 222
#define PORT_OF_SSH_TEXT "222"

/* CMD_FINE if the variable is unset, empty, or a port from `least` to 65535; else CMD_USAGE after reporting it. */
int port_check_env(const struct cmd *cmd, const char *name, int least);

/* A variable that port_check_env() has accepted; `otherwise` if it is unset or empty. */
int port_from_env(const char *name, int otherwise);

#endif
