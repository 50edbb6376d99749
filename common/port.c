/* SPDX-License-Identifier: Apache-2.0 */
/* port.c - ports from the environment. */
#include "port.h"

#include <stdlib.h>
#include <string.h>

int port_check_env(const struct cmd *cmd, const char *name, int least)
{
    const char *text = getenv(name);

    if (!text || !*text ||
        (strlen(text) < 6 && strspn(text, "0123456789") == strlen(text) && atoi(text) >= least && atoi(text) < 65536))
        return CMD_FINE;
    return cmd_refuse(cmd, NULL, "the variable %s is '%.40s', not a port from %d to 65535", name, text, least);
}

int port_from_env(const char *name, int otherwise)
{
    const char *text = getenv(name);

    return text && *text ? atoi(text) : otherwise;
}
