/* SPDX-License-Identifier: Apache-2.0 */
/* man.c - man pages from the command table, as source for scdoc. */
#include "common/variables.h"
#include "help.h"

#include <string.h>

/* Prints text with the markup characters of scdoc escaped. */
static void print_escaped(FILE *stream, const char *text)
{
    for (const char *at = text; *at; at++) {
        bool line_start = at == text || at[-1] == '\n';

        if (strchr("\\*_", *at) || (line_start && strchr("#-|[].:!\t", *at)))
            fputc('\\', stream);
        fputc(*at, stream);
    }
}

/* Prints a word in bold or underlined: `mark` is '*' or '_'. */
static void print_marked(FILE *stream, char mark, const char *text)
{
    fputc(mark, stream);
    print_escaped(stream, text);
    fputc(mark, stream);
}

static void print_options(FILE *stream, const struct cmd *cmd)
{
    fputs("# OPTIONS\n\n", stream);
    for (const struct opt *opt = cmd->options; opt && opt->name; opt++) {
        char facts[256], name[64];

        if (opt->heading)
            fprintf(stream, "## %s\n\n", opt->heading);
        if (opt->letter)
            fprintf(stream, "*-%c*, ", opt->letter);
        snprintf(name, sizeof(name), "--%s", opt->name);
        print_marked(stream, '*', name);
        if (opt->arg) {
            fputc(' ', stream);
            print_marked(stream, '_', opt->arg);
        }
        help_option_facts(opt, facts, sizeof(facts));
        fputs("\n\t", stream);
        print_escaped(stream, opt->help);
        print_escaped(stream, facts);
        fputs(".\n\n", stream);
    }
    fputs("*-h*, *--help*\n\tShow a summary of this page.\n\n", stream);
}

static void print_environment(FILE *stream)
{
    fputs("# ENVIRONMENT\n\n", stream);
    for (const struct variable *env = variables; env->name; env++) {
        if (!variable_is_epkit(env->name))
            continue;
        print_marked(stream, '*', env->name);
        fputs("\n\t", stream);
        print_escaped(stream, env->text);
        fputs(".\n\n", stream);
    }
}

/* scdoc fails at a '.' or '\'' at the start of a line. Descriptions have none there, commands may. */
static void print_examples(FILE *stream, const struct cmd *cmd)
{
    if (!cmd->examples)
        return;
    fputs("# EXAMPLES\n\n", stream);
    for (const struct cmd_example *example = cmd->examples; example->command; example++) {
        print_escaped(stream, example->text);
        fprintf(stream, "\n\n```\n%s\n```\n\n", example->command);
    }
}

void man_command(FILE *stream, const struct cmd *cmd)
{
    fprintf(stream, "epkit-%s(1)\n\n# NAME\n\nepkit-%s - ", cmd->name, cmd->name);
    print_escaped(stream, cmd->summary);
    fprintf(stream, "\n\n# SYNOPSIS\n\n*epkit %s* [_OPTIONS_]", cmd->name);
    if (*cmd->args) {
        fputc(' ', stream);
        print_escaped(stream, cmd->args);
    }
    fputs("\n\n# DESCRIPTION\n\n", stream);
    print_escaped(stream, cmd->description);
    fputs("\n\n", stream);
    print_options(stream, cmd);
    print_examples(stream, cmd);
    fputs("# EXIT STATUS\n\n", stream);
    for (const struct cmd_exit_text *exit_text = cmd->exits; exit_text->text; exit_text++) {
        fprintf(stream, "*%d*\n\t", exit_text->code);
        print_escaped(stream, exit_text->text);
        fputs(".\n\n", stream);
    }
    print_environment(stream);
    fputs("# SEE ALSO\n\n*epkit*(1)\n", stream);
}

void man_all(FILE *stream)
{
    fputs("epkit(1)\n\n# NAME\n\nepkit - expert-parallel dispatch and combine, and the machines below it\n\n"
          "# SYNOPSIS\n\n*epkit* _COMMAND_ [_OPTIONS_] ...\n\n# DESCRIPTION\n\n"
          "*epkit* runs, tests and measures the expert-parallel communication of mixture-of-experts models on this "
          "machine, with the library libepkit, and diagnoses GPU nodes. Each command has a page of its "
          "own.\n\n"
          "Data is written to standard output, everything else to standard error.\n\n# COMMANDS\n\n",
          stream);
    for (size_t i = 0; command_table[i]; i++) {
        char page[64];

        snprintf(page, sizeof(page), "epkit-%s", command_table[i]->name);
        print_marked(stream, '*', page);
        fputs("(1)\n\t", stream);
        print_escaped(stream, command_table[i]->summary);
        fputs(".\n\n", stream);
    }
    print_environment(stream);
    fputs("# EXIT STATUS\n\n*0*\n\tFine.\n\n*1*\n\tFailed.\n\n*2*\n\tWrong usage; nothing was done.\n\n"
          "*3*\n\tDone, with findings.\n\n"
          "*4*\n\tNot supported on this machine.\n\n"
          "*5*\n\tNot known: nothing was found, and something could not be determined.\n",
          stream);
}
