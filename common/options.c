/* SPDX-License-Identifier: Apache-2.0 */
/* options.c - parses a command line by the option table of its command. */
#include "cmd.h"

#include "memory.h"
#include "shell.h"
#include "text.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS 62
#define HELP_VALUE 256 /* getopt_long's value of --help */
#define ROW_VALUE(row) (257 + (row))

struct parser {
    const struct cmd *cmd;
    struct cmd_call *call;
    unsigned char *fields; /* the options struct */
    char *error;
    size_t error_bytes;
};

static int __attribute__((format(printf, 2, 3))) reject(struct parser *parser, const char *format, ...)
{
    WITH_ARGS(args, format, vsnprintf(parser->error, parser->error_bytes, format, args));
    return CMD_USAGE;
}

const char *options_nearest_of(const char *word, const void *rows, size_t row_bytes)
{
    size_t length = strlen(word);
    const char *best = NULL, *name;
    int best_distance = INT_MAX;

    for (const char *row = rows; length && (name = *(const char *const *)(const void *)row); row += row_bytes) {
        size_t n = strlen(name);
        /* At most one letter in three may differ, so that bash is not suggested for tcsh. */
        int allowed = (int)(n > length ? n : length) / 3;
        int d = text_distance(word, name);

        if (allowed == 0)
            allowed = 1;
        /* A prefix of a longer name is a good match although many letters are missing. */
        if (length >= 2 && strncmp(word, name, length) == 0)
            d = 1;
        if (d <= allowed && d < best_distance) {
            best = name;
            best_distance = d;
        }
    }
    return best;
}

static int parse_number(struct parser *parser, const struct opt *opt, const char *text, int64_t *ret_value)
{
    int64_t scale = 1;
    char *end;
    long long value;

    errno = 0;
    value = strtoll(text, &end, 10);
    if (opt->type == OPT_SIZE && end != text) {
        const char *const suffixes = "KMG";
        const char *suffix = *end ? strchr(suffixes, *end & ~0x20) : NULL;

        if (suffix) {
            scale = INT64_C(1) << (10 * (suffix - suffixes + 1));
            end++;
        }
    }
    /* strtoll() also accepts leading spaces and a plus sign, which are errors here. */
    if (end == text || *end || !(*text == '-' || (*text >= '0' && *text <= '9')))
        return reject(parser, "--%s: '%s' is not a %s (%" PRId64 "..%" PRId64 ")", opt->name, text,
                      opt->type == OPT_SIZE ? "size in bytes, optionally with suffix K, M or G" : "whole number",
                      opt->min, opt->max);
    if (errno == ERANGE || __builtin_mul_overflow((int64_t)value, scale, ret_value) || *ret_value < opt->min ||
        *ret_value > opt->max)
        return reject(parser, "--%s: %s is out of range %" PRId64 "..%" PRId64, opt->name, text, opt->min, opt->max);
    return CMD_FINE;
}

/* "a, b, c" */
static void list_words(const char *const *words, char *ret_text, size_t bytes)
{
    *ret_text = '\0';
    for (size_t i = 0; words[i]; i++)
        text_append(ret_text, bytes, "%s%s", i ? ", " : "", words[i]);
}

static int parse_choice(struct parser *parser, const struct opt *opt, const char *text, int64_t *ret_index)
{
    const char *near;
    char known[256];

    for (*ret_index = 0; opt->choices[*ret_index]; ++*ret_index)
        if (strcmp(opt->choices[*ret_index], text) == 0)
            return CMD_FINE;
    list_words(opt->choices, known, sizeof(known));
    near = options_nearest(text, opt->choices);
    if (near)
        return reject(parser, "--%s: '%s' is none of %s; did you mean '%s'?", opt->name, text, known, near);
    return reject(parser, "--%s: '%s' is none of %s", opt->name, text, known);
}

static int parse_list(struct parser *parser, const struct opt *opt, const char *text, struct opt_list *ret_list)
{
    char item[64];

    ret_list->n = 0;
    for (const char *at = text;;) {
        size_t n = strcspn(at, ",");
        int64_t value;
        int result;

        if (n == 0 || n >= sizeof(item))
            return reject(parser, "--%s: '%s' is not a comma-separated list", opt->name, text);
        if (ret_list->n == OPT_LIST_MAX)
            return reject(parser, "--%s: more than %d entries", opt->name, OPT_LIST_MAX);
        memcpy(item, at, n);
        item[n] = '\0';
        result = opt->choices ? parse_choice(parser, opt, item, &value) : parse_number(parser, opt, item, &value);
        if (result != CMD_FINE)
            return result;
        ret_list->values[ret_list->n++] = value;
        if (!at[n])
            return CMD_FINE;
        at += n + 1;
    }
}

static int store_another(struct parser *parser, const struct opt *opt, const char *text, struct opt_strings *strings)
{
    if (!*text)
        return reject(parser, "--%s: empty argument", opt->name);
    if (strings->n == OPT_STRINGS_MAX)
        return reject(parser, "--%s: given more than %d times", opt->name, OPT_STRINGS_MAX);
    strings->values[strings->n++] = text;
    return CMD_FINE;
}

/* Stores the value `text` (NULL for a flag) in the field of `opt`. */
static int store(struct parser *parser, const struct opt *opt, const char *text)
{
    void *field = parser->fields + opt->offset;
    int64_t value;
    int result;

    switch (opt->type) {
    case OPT_FLAG:
        *(bool *)field = true;
        return CMD_FINE;
    case OPT_INT:
    case OPT_SIZE:
        return parse_number(parser, opt, text, field);
    case OPT_STRING:
    case OPT_FILE:
    case OPT_DIR:
        if (!*text)
            return reject(parser, "--%s: empty argument", opt->name);
        *(const char **)field = text;
        return CMD_FINE;
    case OPT_CHOICE:
        result = parse_choice(parser, opt, text, &value);
        if (result == CMD_FINE)
            *(int *)field = (int)value;
        return result;
    case OPT_STRINGS:
        return store_another(parser, opt, text, field);
    case OPT_LIST:
        return parse_list(parser, opt, text, field);
    }
    return reject(parser, "--%s: unknown type of option", opt->name);
}

static const char *hint_program(const struct parser *parser)
{
    return parser->cmd->flags & CMD_TAKES_PROGRAM ? "; if it is for the program, put -- in front of the program" : "";
}

static int reject_unknown(struct parser *parser, const char *word)
{
    const char *names[MAX_ROWS + 2];
    char name[64];
    const char *near;
    size_t n = 0;

    for (const struct opt *opt = parser->cmd->options; opt && opt->name && n < MAX_ROWS; opt++)
        names[n++] = opt->name;
    names[n++] = "help";
    names[n] = NULL;
    word += strspn(word, "-");
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(word, "="), word);
    near = options_nearest(name, names);
    if (near)
        return reject(parser, "unknown option '--%s'; did you mean '--%s'?", name, near);
    return reject(parser, "unknown option '--%s'%s", name, hint_program(parser));
}

static const struct opt *row_of(const struct cmd *cmd, int value)
{
    for (int row = 0; cmd->options && cmd->options[row].name; row++)
        if (value == ROW_VALUE(row) || (cmd->options[row].letter && value == cmd->options[row].letter))
            return &cmd->options[row];
    return NULL;
}

static bool starts_several(const struct option *longs, const char *word)
{
    size_t length = strcspn(word, "=");
    int n = 0;

    for (; longs->name; longs++)
        n += strncmp(longs->name, word, length) == 0;
    return n > 1;
}

/* Reports an error of getopt_long(). `word`: the argument that it was parsing, if that was a long option. */
static int reject_option(struct parser *parser, const struct option *longs, const char *word)
{
    const struct opt *opt = row_of(parser->cmd, optopt);

    if (optopt == 0 && starts_several(longs, word + 2))
        return reject(parser, "option '%s' is ambiguous: write it in full", word);
    if (optopt == 0)
        return reject_unknown(parser, word);
    if (optopt >= HELP_VALUE)
        return reject(parser, "--%s takes no argument", opt ? opt->name : "help");
    return reject(parser, "unknown option '-%c'%s", optopt, hint_program(parser));
}

static void fill_getopt(const struct cmd *cmd, struct option *longs, char *shorts)
{
    int row;

    *shorts++ = ':';
    *shorts++ = 'h';
    for (row = 0; cmd->options && cmd->options[row].name && row < MAX_ROWS; row++) {
        const struct opt *opt = &cmd->options[row];
        bool takes = opt->type != OPT_FLAG;

        longs[row] = (struct option){opt->name, takes ? required_argument : no_argument, NULL, ROW_VALUE(row)};
        if (opt->letter)
            *shorts++ = opt->letter;
        if (opt->letter && takes)
            *shorts++ = ':';
    }
    *shorts = '\0';
    longs[row] = (struct option){"help", no_argument, NULL, HELP_VALUE};
    longs[row + 1] = (struct option){0};
}

/* Allows options after arguments, as the help shows them, even if POSIXLY_CORRECT is set. */
static int next_option(int argc, char **argv, const char *shorts, const struct option *longs)
{
    const char *name = "POSIXLY_CORRECT", *value = getenv(name);
    char *kept = value ? strdup(value) : NULL;
    int result;

    unsetenv(name);
    result = getopt_long(argc, argv, shorts, longs, NULL);
    if (kept)
        setenv(name, kept, 1);
    free(kept);
    return result;
}

static int parse_options(struct parser *parser, int argc, char **argv, bool *ret_help)
{
    struct option longs[MAX_ROWS + 2];
    char shorts[2 * MAX_ROWS + 3];
    int value;

    fill_getopt(parser->cmd, longs, shorts);
    opterr = 0;
    optind = 0; /* glibc: also resets its internal state */
    while ((value = next_option(argc, argv, shorts, longs)) != -1) {
        const struct opt *opt;

        if (value == 'h' || value == HELP_VALUE) {
            *ret_help = true;
            return CMD_FINE;
        }
        if (value == '?')
            return reject_option(parser, longs, argv[optind - 1]);
        opt = row_of(parser->cmd, value == ':' ? optopt : value);
        if (value == ':')
            return reject(parser, "--%s needs an argument (%s)", opt->name, opt->arg ? opt->arg : "VALUE");
        if (store(parser, opt, optarg) != CMD_FINE)
            return CMD_USAGE;
        parser->call->given |= UINT64_C(1) << (opt - parser->cmd->options);
    }
    return CMD_FINE;
}

static int check_args(struct parser *parser)
{
    const struct cmd *cmd = parser->cmd;
    const struct cmd_call *call = parser->call;
    const char *near;
    char list[512];

    if (call->n_args < cmd->min_args)
        return reject(parser, "missing argument: %s", cmd->args);
    if (call->n_args > cmd->max_args)
        return reject(parser, "unexpected argument '%s'", call->args[cmd->max_args]);
    if (!cmd->arg_choices || call->n_args == 0 || text_is_any(call->args[0], cmd->arg_choices))
        return CMD_FINE;
    near = options_nearest(call->args[0], cmd->arg_choices);
    if (near)
        return reject(parser, "unknown argument '%s'; did you mean '%s'?", call->args[0], near);
    list_words(cmd->arg_choices, list, sizeof(list));
    return reject(parser, "unknown argument '%s': it must be one of %s", call->args[0], list);
}

int options_parse(const struct cmd *cmd, int argc, char **argv, struct cmd_call *ret_call, bool *ret_help,
                  char *ret_error, size_t error_bytes)
{
    struct parser parser = {cmd, ret_call, NULL, ret_error, error_bytes};
    int result = CMD_FINE;

    *ret_call = (struct cmd_call){0};
    *ret_help = false;
    if (cmd->options_bytes)
        parser.fields = memory_new(1, cmd->options_bytes);
    ret_call->options = parser.fields;
    for (const struct opt *opt = cmd->options; opt && opt->name && result == CMD_FINE; opt++)
        if (opt->value)
            result = store(&parser, opt, opt->value);
    if (result == CMD_FINE)
        result = parse_options(&parser, argc, argv, ret_help);
    if (result == CMD_FINE && !*ret_help) {
        ret_call->n_args = argc - optind;
        ret_call->args = argv + optind;
        result = check_args(&parser);
    }
    if (result != CMD_FINE)
        options_done(ret_call);
    return result;
}

void options_done(struct cmd_call *call)
{
    free((void *)call->options);
    call->options = NULL;
}

bool cmd_given(const struct cmd *cmd, const struct cmd_call *call, const char *name)
{
    for (int row = 0; cmd->options && cmd->options[row].name; row++)
        if (strcmp(cmd->options[row].name, name) == 0)
            return call->given >> row & 1;
    return false;
}

/* --- printing the command line --- */

/* The value of the option as it would be typed; in `buffer` if it has to be formatted. */
static const char *value_of(const struct opt *opt, const void *field, char *buffer, size_t bytes)
{
    const struct opt_list *list = field;

    buffer[0] = '\0';
    switch (opt->type) {
    case OPT_INT:
    case OPT_SIZE:
        snprintf(buffer, bytes, "%" PRId64, *(const int64_t *)field);
        break;
    case OPT_STRING:
    case OPT_FILE:
    case OPT_DIR:
        return *(const char *const *)field;
    case OPT_CHOICE:
        return opt->choices[*(const int *)field];
    case OPT_LIST:
        for (size_t i = 0; i < list->n; i++)
            if (opt->choices)
                text_append(buffer, bytes, "%s%s", i ? "," : "", opt->choices[list->values[i]]);
            else
                text_append(buffer, bytes, "%s%" PRId64, i ? "," : "", list->values[i]);
        break;
    case OPT_FLAG:
    case OPT_STRINGS:
        break;
    }
    return buffer;
}

/* Appends a space and a word, quoted for a shell where necessary; never a part of one, whose quote would stay open. */
static void print_word(const char *word, char *ret_text, size_t bytes)
{
    size_t left = bytes - strlen(ret_text);
    char quoted[4096];

    if (left > sizeof(" '...'"))
        text_append(ret_text, bytes, " %s",
                    shell_quote(word, quoted, left - 1 < sizeof(quoted) ? left - 1 : sizeof(quoted)));
}

static void print_args(const struct cmd_call *call, char *ret_text, size_t bytes)
{
    for (int i = 0; i < call->n_args; i++)
        print_word(call->args[i], ret_text, bytes);
}

static void print_option(const struct opt *opt, const void *field, char *ret_text, size_t bytes)
{
    const struct opt_strings *strings = field;
    size_t n = opt->type == OPT_STRINGS ? strings->n : 1;
    char name[128], room[1024];

    snprintf(name, sizeof(name), "--%s", opt->name);
    for (size_t i = 0; i < n; i++) {
        print_word(name, ret_text, bytes);
        if (opt->type == OPT_STRINGS)
            print_word(strings->values[i], ret_text, bytes);
        else if (opt->type != OPT_FLAG)
            print_word(value_of(opt, field, room, sizeof(room)), ret_text, bytes);
    }
}

void options_print(const struct cmd *cmd, const struct cmd_call *call, const char *const *except, char *ret_text,
                   size_t bytes)
{
    bool is_after = ANY_OF(i, call->n_args, call->args[i][0] == '-');

    snprintf(ret_text, bytes, "epkit %s", cmd->name);
    if (!is_after)
        print_args(call, ret_text, bytes);
    for (int row = 0; cmd->options && cmd->options[row].name; row++) {
        const struct opt *opt = &cmd->options[row];

        if (call->given >> row & 1 && !text_is_any(opt->name, except))
            print_option(opt, (const unsigned char *)call->options + opt->offset, ret_text, bytes);
    }
    if (is_after) {
        print_word("--", ret_text, bytes);
        print_args(call, ret_text, bytes);
    }
}
