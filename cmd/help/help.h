/* SPDX-License-Identifier: Apache-2.0 */
/* help.h - output generated from the command table: help and man pages. */
#ifndef EP_HELP_HELP_H
#define EP_HELP_HELP_H

#include "common/cmd.h"

#include <stdio.h>

/* The overview of all commands. */
void help_all(FILE *stream);
void help_command(FILE *stream, const struct cmd *cmd);

#endif
