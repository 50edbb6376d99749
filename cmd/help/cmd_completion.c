/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_completion.c - epkit completion SHELL: completion scripts for shells, from the command table. */
#include "help.h"

#include <string.h>

static const char *const shells[] = {"bash", "zsh", NULL};

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

/* The values that the argument of a command may have, if they are known. */
static bool has_values(const struct cmd *cmd)
{
    return cmd->flags & CMD_TAKES_COMMAND || cmd->arg_choices;
}

static void print_values(FILE *stream, const struct cmd *cmd)
{
    if (cmd->flags & CMD_TAKES_COMMAND)
        print_commands(stream);
    else if (cmd->arg_choices)
        print_words(stream, cmd->arg_choices);
}

/* Prints text for single quotes. */
static void print_quoted(FILE *stream, const char *text, const char *backslashed)
{
    for (; *text; text++) {
        if (*text == '\'')
            fputs("'\\''", stream);
        else if (strchr(backslashed, *text))
            fprintf(stream, "\\%c", *text);
        else
            fputc(*text, stream);
    }
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

static void zsh_option(FILE *stream, const struct opt *opt)
{
    fprintf(stream, "            '--%s%s[", opt->name, opt->type == OPT_FLAG ? "" : "=");
    print_quoted(stream, opt->help, "[]:\\");
    fputc(']', stream);
    if (opt->type != OPT_FLAG) {
        fprintf(stream, ":%s:", opt->arg ? opt->arg : "value");
        if (opt->choices) {
            fputc('(', stream);
            print_words(stream, opt->choices);
            fputc(')', stream);
        } else if (opt->type == OPT_FILE) {
            fputs("_files", stream);
        } else if (opt->type == OPT_DIR) {
            fputs("_files -/", stream);
        }
    }
    fputs("' \\\n", stream);
}

static void print_zsh(FILE *stream)
{
    fputs("#compdef epkit\n# zsh completion for epkit; written by 'epkit completion zsh'\n"
          "_epkit()\n{\n    local -a commands\n\n    commands=(\n",
          stream);
    for (size_t i = 0; command_table[i]; i++) {
        fprintf(stream, "        '%s:", command_table[i]->name);
        print_quoted(stream, command_table[i]->summary, ":\\");
        fputs("'\n", stream);
    }
    fputs("    )\n    if ((CURRENT == 2)); then\n        _describe command commands\n        return\n    fi\n"
          "    local command=$words[2]\n    shift words\n    ((CURRENT--))\n    case $command in\n",
          stream);
    for (size_t i = 0; command_table[i]; i++) {
        const struct cmd *cmd = command_table[i];

        fprintf(stream, "    %s)\n        _arguments \\\n", cmd->name);
        for (const struct opt *opt = cmd->options; opt && opt->name; opt++)
            zsh_option(stream, opt);
        fputs("            '--help[show the help]'", stream);
        if (has_values(cmd)) {
            fputs(" \\\n            '1:argument:(", stream);
            print_values(stream, cmd);
            fputs(")'", stream);
        }
        fputs("\n        ;;\n", stream);
    }
    /* Run from $fpath the file is the function's body; sourced, it defines and registers it. */
    fputs(
        "    esac\n}\nif [[ $funcstack[1] == _epkit ]]; then\n    _epkit \"$@\"\nelse\n    compdef _epkit epkit\nfi\n",
        stream);
}

static int cmd_completion(const struct cmd *cmd, const struct cmd_call *call)
{
    (void)cmd;
    (strcmp(call->args[0], "bash") == 0 ? print_bash : print_zsh)(stdout);
    return CMD_FINE;
}

const struct cmd command_completion = {
    .name = "completion",
    .args = "bash|zsh",
    .min_args = 1,
    .max_args = 1,
    .arg_choices = shells,
    .summary = "print a completion script for a shell",
    .description = "Prints a script that teaches a shell to complete epkit's commands, options and their values.",
    .examples =
        {
            {"epkit completion bash > /etc/bash_completion.d/epkit", "Complete in bash, for all users."},
            {"source <(epkit completion zsh)", "Complete in the running zsh, after compinit."},
        },
    .exits =
        {
            {CMD_FINE, "the script was printed"},
            {CMD_USAGE, "no such shell"},
        },
    .run = cmd_completion,
};
