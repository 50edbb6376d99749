/* SPDX-License-Identifier: Apache-2.0 */
/* help.c - help texts from the command table, always eighty columns wide, so that they can be compared. */
#include "help.h"
#include "common/variables.h"

#include "common/text.h"

#include <epkit/types.h>
#include <inttypes.h>
#include <string.h>

#define WIDTH 80
#define OPTION_COLUMN 26

/* Prints text from `column` on, wrapped at spaces; `indent` is for the lines after the first. */
static void print_wrapped(FILE *stream, const char *text, int column, int indent)
{
    while (*text) {
        size_t n = strcspn(text, " \n");

        if (column > indent && column + 1 + (int)n > WIDTH) {
            fprintf(stream, "\n%*s", indent, "");
            column = indent;
        }
        if (n && column > indent) {
            fputc(' ', stream);
            column++;
        }
        fwrite(text, 1, n, stream);
        column += (int)n;
        text += n;
        if (*text == '\n') {
            fprintf(stream, "\n%*s", text[1] == '\n' ? 0 : indent, "");
            column = indent;
        }
        if (*text)
            text++;
    }
    fputc('\n', stream);
}

static bool has_range(const struct opt *opt)
{
    return opt->type == OPT_INT || (opt->type == OPT_LIST && !opt->choices);
}

void help_option_facts(const struct opt *opt, char *ret_text, size_t bytes)
{
    *ret_text = '\0';
    if (opt->choices) {
        for (size_t i = 0; opt->choices[i]; i++)
            text_append(ret_text, bytes, "%s%s", i ? ", " : " (", opt->choices[i]);
    } else if (has_range(opt) && opt->max != INT64_MAX) {
        text_append(ret_text, bytes, " (%" PRId64 "..%" PRId64, opt->min, opt->max);
    }
    if (opt->type == OPT_LIST)
        text_append(ret_text, bytes, "%scomma-separated", *ret_text ? "; " : " (");
    if (opt->value)
        text_append(ret_text, bytes, "%sdefault %s", *ret_text ? "; " : " (", opt->value);
    if (*ret_text)
        text_append(ret_text, bytes, ")");
}

static void print_option(FILE *stream, const char *name, char letter, const char *arg, const char *help)
{
    char left[64];
    int column;

    if (letter)
        snprintf(left, sizeof(left), "  -%c, --%s%s%s", letter, name, arg ? " " : "", arg ? arg : "");
    else
        snprintf(left, sizeof(left), "      --%s%s%s", name, arg ? " " : "", arg ? arg : "");
    column = (int)strlen(left);
    fputs(left, stream);
    if (column > OPTION_COLUMN - 2) {
        fputc('\n', stream);
        column = 0;
    }
    fprintf(stream, "%*s", OPTION_COLUMN - column, "");
    print_wrapped(stream, help, OPTION_COLUMN, OPTION_COLUMN);
}

static void print_options(FILE *stream, const struct cmd *cmd)
{
    const struct opt *opt = cmd->options;

    if (!opt || !opt->name || !opt->heading)
        fputs("\nOptions:\n", stream);
    for (; opt && opt->name; opt++) {
        char help[512], facts[256];

        if (opt->heading)
            fprintf(stream, "\n%s:\n", opt->heading);
        help_option_facts(opt, facts, sizeof(facts));
        snprintf(help, sizeof(help), "%s%s", opt->help, facts);
        print_option(stream, opt->name, opt->letter, opt->arg, help);
    }
    print_option(stream, "help", 'h', NULL, "show this help");
}

void help_command(FILE *stream, const struct cmd *cmd)
{
    fprintf(stream, "Usage: epkit %s [OPTIONS]%s%s\n\n", cmd->name, *cmd->args ? " " : "", cmd->args);
    print_wrapped(stream, cmd->description, 0, 0);
    print_options(stream, cmd);
    if (cmd->examples) {
        fputs("\nExamples:\n", stream);
        for (const struct cmd_example *example = cmd->examples; example->command; example++) {
            fprintf(stream, "  %s\n      ", example->command);
            print_wrapped(stream, example->text, 6, 6);
        }
    }
    fputs("\nExit codes:\n", stream);
    for (const struct cmd_exit_text *exit_text = cmd->exits; exit_text->text; exit_text++) {
        fprintf(stream, "  %d  ", exit_text->code);
        print_wrapped(stream, exit_text->text, 5, 5);
    }
}

void help_all(FILE *stream)
{
    fputs("Usage: epkit COMMAND [OPTIONS] ...\n\n", stream);
    print_wrapped(stream,
                  "Expert-parallel dispatch and combine: run, test and measure them here; and see what is wrong with "
                  "the machines that they run on.",
                  0, 0);
    fputs("\nCommands:\n", stream);
    for (size_t i = 0; command_table[i]; i++) {
        fprintf(stream, "  %-12s", command_table[i]->name);
        print_wrapped(stream, command_table[i]->summary, 14, 14);
    }
    fputs("\nEnvironment:\n", stream);
    for (const struct variable *env = variables; env->name; env++) {
        if (!variable_is_epkit(env->name))
            continue;
        fprintf(stream, strlen(env->name) < 18 ? "  %-18s" : "  %s\n                    ", env->name);
        print_wrapped(stream, env->text, 20, 20);
    }
    fputs("\nExit codes: 0 fine, 1 failed, 2 wrong usage, 3 findings, 4 not supported here,\n"
          "5 not known.\n"
          "'epkit help COMMAND' or 'epkit COMMAND --help' explains a command.\n",
          stream);
}
