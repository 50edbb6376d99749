/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_help.c - epkit help [VERB]. */
#include "cmd.h"
#include "help.h"

#include <string.h>

struct help_options {
    bool man;
};

static const struct opt help_table[] = {
    {.name = "man",
     .type = OPT_FLAG,
     .offset = offsetof(struct help_options, man),
     .help = "print the source of the man page instead, for scdoc; 'epkit' names the page of all verbs"},
    {0},
};

static int cmd_help(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct help_options *options = call->options;
    const char *name = call->n_args ? call->args[0] : "epkit";
    const struct cmd *verb = command_find(name);

    (void)cmd;
    if (!verb && strcmp(name, "epkit") != 0)
        return command_unknown(name);
    if (verb && options->man)
        man_verb(stdout, verb);
    else if (verb)
        help_command(stdout, verb);
    else if (options->man)
        man_all(stdout);
    else
        help_all(stdout);
    return CMD_FINE;
}

const struct cmd command_help = {
    .name = "help",
    .args = "[VERB]",
    .max_args = 1,
    .summary = "explain epkit or one of its verbs",
    .description =
        "Explains a verb: what it does, its options, examples, and what its exit codes mean. Without a verb it "
        "lists them all.",
    .options = help_table,
    .options_bytes = sizeof(struct help_options),
    .examples =
        (const struct cmd_example[]){
            {"epkit help test", "Explain the verb test; the same as 'epkit test --help'."},
            {"epkit help --man test | scdoc > epkit-test.1", "Make the man page of the verb test."},
            {NULL, NULL},
        },
    .exits =
        (const struct cmd_exit_text[]){
            {CMD_FINE, "the help was printed"},
            {CMD_USAGE, "no such verb"},
            {0, NULL},
        },
    .run = cmd_help,
    .flags = CMD_TAKES_COMMAND,
};
