/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_completion.c - epkit completion SHELL. */
#include "common/cmd.h"
#include "help.h"

static int cmd_completion(const struct cmd *cmd, const struct cmd_call *call)
{
    (void)cmd;
    completion_print(stdout, call->args[0]);
    return CMD_FINE;
}

const struct cmd command_completion = {
    .name = "completion",
    .args = "bash|zsh",
    .min_args = 1,
    .max_args = 1,
    .arg_choices = completion_shells,
    .summary = "print a completion script for a shell",
    .description = "Prints a script that teaches a shell to complete epkit's commands, options and their values.",
    .examples =
        (const struct cmd_example[]){
            {"epkit completion bash > /etc/bash_completion.d/epkit", "Complete in bash, for all users."},
            {"source <(epkit completion zsh)", "Complete in the running zsh, after compinit."},
            {NULL, NULL},
        },
    .exits =
        (const struct cmd_exit_text[]){
            {CMD_FINE, "the script was printed"},
            {CMD_USAGE, "no such shell"},
            {0, NULL},
        },
    .run = cmd_completion,
};
