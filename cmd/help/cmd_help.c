/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_help.c - epkit help [COMMAND]: help texts and man pages (source for scdoc), from the command table. */
#include "common/cmd.h"
#include "common/env_variables.h"
#include "common/text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

/* --- help, always eighty columns wide, so that texts can be compared --- */

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

/* Range and default after an option's phrase in the help, such as " (1..64, default 8)". */
static void help_option_facts(const struct opt *opt, char *ret_text, size_t bytes)
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
    if (cmd->examples[0].command) {
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
    for (const struct variable *env = variables; env->names; env++) {
        if (!variable_is_epkit(env->names))
            continue;
        fprintf(stream, strlen(env->names) < 18 ? "  %-18s" : "  %s\n                    ", env->names);
        print_wrapped(stream, env->text, 20, 20);
    }
    fputs("\nExit codes: 0 fine, 1 failed, 2 wrong usage, 3 findings, 4 not supported here,\n"
          "5 not known.\n"
          "'epkit help COMMAND' or 'epkit COMMAND --help' explains a command.\n",
          stream);
}

/* --- man pages --- */

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

/* As fprintf(), of which it knows %s alone; what it stands for is escaped. */
static void __attribute__((format(printf, 2, 3))) print_man(FILE *stream, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    for (; *format; format++) {
        if (*format == '%')
            print_escaped(stream, va_arg(args, const char *));
        else
            fputc(*format, stream);
        format += *format == '%';
    }
    va_end(args);
}

static void print_man_options(FILE *stream, const struct cmd *cmd)
{
    fputs("# OPTIONS\n\n", stream);
    for (const struct opt *opt = cmd->options; opt && opt->name; opt++) {
        char facts[256], name[64];

        if (opt->heading)
            fprintf(stream, "## %s\n\n", opt->heading);
        if (opt->letter)
            fprintf(stream, "*-%c*, ", opt->letter);
        snprintf(name, sizeof(name), "--%s", opt->name);
        print_man(stream, "*%s*", name);
        if (opt->arg)
            print_man(stream, " _%s_", opt->arg);
        help_option_facts(opt, facts, sizeof(facts));
        print_man(stream, "\n\t%s%s.\n\n", opt->help, facts);
    }
    fputs("*-h*, *--help*\n\tShow a summary of this page.\n\n", stream);
}

static void print_environment(FILE *stream)
{
    fputs("# ENVIRONMENT\n\n", stream);
    for (const struct variable *env = variables; env->names; env++)
        if (variable_is_epkit(env->names))
            print_man(stream, "*%s*\n\t%s.\n\n", env->names, env->text);
}

/* scdoc fails at a '.' or '\'' at the start of a line. Descriptions have none there, commands may. */
static void print_examples(FILE *stream, const struct cmd *cmd)
{
    if (!cmd->examples[0].command)
        return;
    fputs("# EXAMPLES\n\n", stream);
    for (const struct cmd_example *example = cmd->examples; example->command; example++) {
        print_escaped(stream, example->text);
        fprintf(stream, "\n\n```\n%s\n```\n\n", example->command);
    }
}

/* Sources of the man pages epkit(1) and epkit-COMMAND(1), for scdoc. */
static void man_command(FILE *stream, const struct cmd *cmd)
{
    print_man(stream, "epkit-%s(1)\n\n# NAME\n\nepkit-%s - %s\n\n# SYNOPSIS\n\n*epkit %s* [_OPTIONS_]", cmd->name,
              cmd->name, cmd->summary, cmd->name);
    if (*cmd->args)
        print_man(stream, " %s", cmd->args);
    print_man(stream, "\n\n# DESCRIPTION\n\n%s\n\n", cmd->description);
    print_man_options(stream, cmd);
    print_examples(stream, cmd);
    fputs("# EXIT STATUS\n\n", stream);
    for (const struct cmd_exit_text *exit_text = cmd->exits; exit_text->text; exit_text++) {
        fprintf(stream, "*%d*", exit_text->code);
        print_man(stream, "\n\t%s.\n\n", exit_text->text);
    }
    print_environment(stream);
    fputs("# SEE ALSO\n\n*epkit*(1)\n", stream);
}

static void man_all(FILE *stream)
{
    fputs("epkit(1)\n\n# NAME\n\nepkit - expert-parallel dispatch and combine, and the machines below it\n\n"
          "# SYNOPSIS\n\n*epkit* _COMMAND_ [_OPTIONS_] ...\n\n# DESCRIPTION\n\n"
          "*epkit* runs, tests and measures the expert-parallel communication of mixture-of-experts models on this "
          "machine, with the library libepkit, and diagnoses GPU nodes. Each command has a page of its "
          "own.\n\n"
          "Data is written to standard output, everything else to standard error.\n\n# COMMANDS\n\n",
          stream);
    for (size_t i = 0; command_table[i]; i++)
        print_man(stream, "*epkit-%s*(1)\n\t%s.\n\n", command_table[i]->name, command_table[i]->summary);
    print_environment(stream);
    fputs("# EXIT STATUS\n\n*0*\n\tFine.\n\n*1*\n\tFailed.\n\n*2*\n\tWrong usage; nothing was done.\n\n"
          "*3*\n\tDone, with findings.\n\n"
          "*4*\n\tNot supported on this machine.\n\n"
          "*5*\n\tNot known: nothing was found, and something could not be determined.\n",
          stream);
}

/* --- the command --- */

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
        {
            {"epkit help test", "Explain the command test; the same as 'epkit test --help'."},
            {"epkit help --man test | scdoc > epkit-test.1", "Make the man page of the command test."},
        },
    .exits =
        {
            {CMD_FINE, "the help was printed"},
            {CMD_USAGE, "no such command"},
        },
    .run = cmd_help,
    .flags = CMD_TAKES_COMMAND,
};
