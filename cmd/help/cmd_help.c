/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_help.c - epkit help [COMMAND]. */
#include "common/cmd.h"
#include "help.h"

#include <string.h>

struct help_options {
    bool man;
};

static const struct opt help_table[] = {
    {.name = "man",
     .type = OPT_FLAG,
     .offset = offsetof(struct help_options, man),
     .help = "print the source of the man page instead, for scdoc; 'epkit' names the page of all commands"},
    {0},
};

static int cmd_help(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct help_options *options = call->options;
    const char *name = call->n_args ? call->args[0] : "epkit";
    const struct cmd *command = command_find(name);

    (void)cmd;
    if (!command && strcmp(name, "epkit") != 0)
        return command_unknown(name);
    if (command && options->man)
        man_command(stdout, command);
    else if (command)
        help_command(stdout, command);
    else if (options->man)
        man_all(stdout);
    else
        help_all(stdout);
    return CMD_FINE;
}

const struct cmd command_help = {
    .name = "help",
    .args = "[COMMAND]",
    .max_args = 1,
    .summary = "explain epkit or one of its commands",
    .description =
        "Explains a command: what it does, its options, examples, and what its exit codes mean. Without a command it "
        "lists them all.",
    .options = help_table,
    .options_bytes = sizeof(struct help_options),
    .examples =
        (const struct cmd_example[]){
            {"epkit help test", "Explain the command test; the same as 'epkit test --help'."},
            {"epkit help --man test | scdoc > epkit-test.1", "Make the man page of the command test."},
            {NULL, NULL},
        },
    .exits =
        (const struct cmd_exit_text[]){
            {CMD_FINE, "the help was printed"},
            {CMD_USAGE, "no such command"},
            {0, NULL},
        },
    .run = cmd_help,
    .flags = CMD_TAKES_COMMAND,
};
