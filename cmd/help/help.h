/* SPDX-License-Identifier: Apache-2.0 */
/* help.h - output generated from the command table: help and man pages. */
#ifndef EP_HELP_HELP_H
#define EP_HELP_HELP_H

#include "common/cmd.h"

#include <stdio.h>

/* The overview of all commands. */
void help_all(FILE *stream);
void help_command(FILE *stream, const struct cmd *cmd);

/* Sources of the man pages epkit(1) and epkit-COMMAND(1), for scdoc. */
void man_all(FILE *stream);
void man_command(FILE *stream, const struct cmd *cmd);

/* Range and default after an option's phrase in the help, such as " (1..64, default 8)". */
void help_option_facts(const struct opt *opt, char *ret_text, size_t bytes);

#endif
