/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_completion.c - epkit completion SHELL: a completion script for bash, from the command table. */
#include "common/cmd.h"

static const char *const shells[] = {"bash", NULL};

static void print_words(FILE *stream, const char *const *words)
{
    for (size_t i = 0; words[i]; i++)
        fprintf(stream, "%s%s", i ? " " : "", words[i]);
}

static void print_commands(FILE *stream)
{
    for (size_t i = 0; command_table[i]; i++)
        fprintf(stream, "%s%s", i ? " " : "", command_table[i]->name);
}

static void print_values(FILE *stream, const struct cmd *cmd)
{
    if (cmd->flags & CMD_TAKES_COMMAND)
        print_commands(stream);
    else if (cmd->arg_choices)
        print_words(stream, cmd->arg_choices);
}

static void bash_option(FILE *stream, const struct cmd *cmd, const struct opt *opt)
{
    if (opt->type == OPT_FLAG)
        return;
    fprintf(stream, "    %s:--%s", cmd->name, opt->name);
    if (opt->letter)
        fprintf(stream, "|%s:-%c", cmd->name, opt->letter);
    if (opt->choices) {
        fputs(")\n        words='", stream);
        print_words(stream, opt->choices);
        fputs("'\n        ;;\n", stream);
    } else if (opt->type == OPT_FILE || opt->type == OPT_DIR) {
        fprintf(stream, ")\n        mapfile -t COMPREPLY < <(compgen -%c -- \"$cur\")\n        return\n        ;;\n",
                opt->type == OPT_FILE ? 'f' : 'd');
    } else {
        fputs(")\n        return\n        ;;\n", stream);
    }
}

static void bash_command_words(FILE *stream, const struct cmd *cmd)
{
    fprintf(stream, "    %s:-*)\n        words='", cmd->name);
    for (const struct opt *opt = cmd->options; opt && opt->name; opt++)
        fprintf(stream, "--%s ", opt->name);
    fprintf(stream, "--help'\n        ;;\n    %s:*)\n        words='", cmd->name);
    print_values(stream, cmd);
    fputs("'\n        ;;\n", stream);
}

static void print_bash(FILE *stream)
{
    fputs("# bash completion for epkit; written by 'epkit completion bash'\n"
          "_epkit()\n{\n    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}\n"
          "    local words='' command=''\n\n"
          "    COMPREPLY=()\n    if ((COMP_CWORD > 1)); then\n        command=${COMP_WORDS[1]}\n    fi\n"
          "    case $command:$prev in\n",
          stream);
    for (size_t i = 0; command_table[i]; i++)
        for (const struct opt *opt = command_table[i]->options; opt && opt->name; opt++)
            bash_option(stream, command_table[i], opt);
    fputs("    *)\n        words=-\n        ;;\n    esac\n    if [[ $words == - ]]; then\n        words=''\n"
          "        case $command:$cur in\n",
          stream);
    for (size_t i = 0; command_table[i]; i++)
        bash_command_words(stream, command_table[i]);
    fputs("        :*)\n            words='", stream);
    print_commands(stream);
    fputs(" --help --version'\n            ;;\n        esac\n    fi\n"
          "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n}\ncomplete -F _epkit epkit\n",
          stream);
}

static int cmd_completion(const struct cmd *cmd, const struct cmd_call *call)
{
    (void)cmd;
    (void)call;
    print_bash(stdout);
    return CMD_FINE;
}

const struct cmd command_completion = {
    .name = "completion",
    .args = "bash",
    .min_args = 1,
    .max_args = 1,
    .arg_choices = shells,
    .summary = "print a completion script for a shell",
    .description = "Prints a script that teaches a shell to complete epkit's commands, options and their values.",
    .examples =
        {
            {"epkit completion bash > /etc/bash_completion.d/epkit", "Complete in bash, for all users."},
            {"source <(epkit completion bash)", "Complete in the running shell."},
        },
    .exits =
        {
            {CMD_FINE, "the script was printed"},
            {CMD_USAGE, "no such shell"},
        },
    .run = cmd_completion,
};
