/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd.h - definition of a command.
 *
 * A command is one constant `struct cmd`, defined in cmd_<name>.c and listed as one row in commands.c. Option parsing,
 * help, completion and the man page are generated from it:
 *
 *     struct bench_options {
 *         struct group_options group;
 *         int64_t warmup;
 *         bool json;
 *     };
 *
 *     static const struct opt bench_table[] = {
 *         GROUP_OPTIONS(struct bench_options, group),
 *         {"warmup", 'w', "N", OPT_INT, offsetof(struct bench_options, warmup), .min = 0, .max = 1000, .value = "5",
 *          .help = "runs before the measured ones"},
 *         OPT_JSON_ROW(struct bench_options, json),
 *         {0},
 *     };
 *
 *     static int cmd_bench(const struct cmd *cmd, const struct cmd_call *call);
 *     const struct cmd command_bench = {.name = "bench", .options = bench_table, .run = cmd_bench, ...};
 */
#ifndef EP_COMMON_CMD_H
#define EP_COMMON_CMD_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Exit codes of every command. Above 128: 128 + the signal that interrupted it; callers must return that at once. */
enum cmd_exit { CMD_FINE = 0, CMD_FAILED = 1, CMD_USAGE = 2, CMD_FINDINGS = 3, CMD_UNSUPPORTED = 4, CMD_NOT_KNOWN = 5 };

/* Returns from the function with the exit code of a call, or another result of which 0 is the good one, unless it is 0.
 */
#define CMD_TRY(call)                                                                                                  \
    do {                                                                                                               \
        __auto_type try_ = (call);                                                                                     \
        if (try_ != 0)                                                                                                 \
            return try_;                                                                                               \
    } while (0)

enum opt_type {
    OPT_FLAG,    /* bool */
    OPT_INT,     /* int64_t within min..max, decimal */
    OPT_SIZE,    /* int64_t bytes within min..max; suffixes K, M, G are powers of 1024 */
    OPT_STRING,  /* const char * */
    OPT_FILE,    /* const char *, completed as a file name */
    OPT_DIR,     /* const char *, completed as a folder name */
    OPT_CHOICE,  /* int: index into choices */
    OPT_STRINGS, /* struct opt_strings: may be repeated */
    OPT_LIST     /* struct opt_list, comma-separated: indices into choices if there are any, else integers min..max */
};

#define OPT_LIST_MAX 32

struct opt_list {
    size_t n;
    int64_t values[OPT_LIST_MAX];
};

#define OPT_STRINGS_MAX 128

struct opt_strings {
    size_t n;
    const char *values[OPT_STRINGS_MAX];
};

/* An option. The table ends with a row without name; at most 62 rows. */
struct opt {
    const char *name; /* long name, without dashes */
    char letter;      /* short name or 0 */
    const char *arg;  /* name of its argument in the help; NULL for flags */
    enum opt_type type;
    size_t offset; /* of the field in the command's options struct */
    int64_t min, max;
    const char *const *choices; /* ends with NULL */
    const char *value;          /* default, parsed like an argument; NULL: zero */
    const char *help;           /* a phrase without full stop; the help appends the default */
    const char *heading;        /* starts a new group of options in the help; NULL: same group as the previous row */
};

#define OPT_JSON_ROW(options_type, member)                                                                             \
    {                                                                                                                  \
        .name = "json", .type = OPT_FLAG, .offset = offsetof(options_type, member),                                    \
        .help = "write one JSON document to standard output instead of text"                                           \
    }

struct cmd_example {
    const char *command; /* as typed, starts with "epkit"; NULL after the last one */
    const char *text;
};

struct cmd_exit_text {
    int code;         /* ascending */
    const char *text; /* NULL after the last one */
};

struct cmd_call;

enum {
    CMD_RANKS = 1u << 0,         /* runs jobs on ranks: under mpirun the other ranks run the jobs of rank 0 */
    CMD_TAKES_COMMAND = 1u << 1, /* its argument is the name of a command: for completion */
    CMD_TAKES_PROGRAM = 1u << 2  /* its arguments are a program, whose options come after -- */
};

struct cmd {
    const char *name;
    const char *args; /* positional arguments in the usage line; "" if none */
    int min_args, max_args;
    const char *const *arg_choices;  /* values of the first one, ends with NULL; NULL: anything */
    const char *summary;             /* one line, no full stop */
    const char *description;         /* paragraphs divided by an empty line */
    const struct opt *options;       /* NULL: --help only */
    size_t options_bytes;            /* size of the command's options struct */
    struct cmd_example examples[10]; /* at most nine */
    struct cmd_exit_text exits[10];  /* at most nine */
    int (*run)(const struct cmd *cmd, const struct cmd_call *call);
    unsigned flags;
};

/* A parsed command line. */
struct cmd_call {
    const void *options; /* the command's options struct, defaults filled in; NULL if options_bytes is 0 */
    int n_args;
    char **args;
    uint64_t given; /* bit i: row i of the option table was on the command line */
};

/* Whether the option with this long name was on the command line. */
bool cmd_given(const struct cmd *cmd, const struct cmd_call *call, const char *name);

/* Reports a usage error found after parsing ("epkit test: <text>", and how to get help) and returns CMD_USAGE. */
int cmd_usage(const struct cmd *cmd, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * For a command line that is valid, but cannot be carried out: a file cannot be read or written, or a host, device or
 * environment variable is invalid. Reports "epkit test: WHERE: <text>" (WHERE: the option or the file; NULL: omitted)
 * and returns CMD_USAGE. Unlike after cmd_usage(), --json still writes a document.
 */
int cmd_refuse(const struct cmd *cmd, const char *where, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* --- options.c --- */

/*
 * Parses argv (argv[0], the name of the command, is skipped) by the command's table. CMD_FINE, or CMD_USAGE with the
 * reason in ret_error. *ret_help: --help was given; then nothing else is checked. options_done() frees the result.
 */
int options_parse(const struct cmd *cmd, int argc, char **argv, struct cmd_call *ret_call, bool *ret_help,
                  char *ret_error, size_t error_bytes);
void options_done(struct cmd_call *call);

/* Prints the command line, quoted for a shell, without the options named in `except` (ends with NULL). */
void options_print(const struct cmd *cmd, const struct cmd_call *call, const char *const *except, char *ret_text,
                   size_t bytes);

/* The name that is most similar to `word`, or NULL if none is: the first member of rows, the last of which has NULL. */
#define options_nearest(word, rows) options_nearest_of(word, rows, sizeof(*(rows)))
const char *options_nearest_of(const char *word, const void *rows, size_t row_bytes);

/* --- commands.c --- */

extern const struct cmd *const command_table[]; /* ends with NULL */

const struct cmd *command_find(const char *name);

/* As cmd_usage(), for an unknown name: suggests the most similar command. */
int command_unknown(const char *name);

/* --- help/cmd_help.c: output generated from the table, for help and man pages --- */

/* The overview of all commands. */
void help_all(FILE *stream);
void help_command(FILE *stream, const struct cmd *cmd);

/* --- ports from the environment --- */

/* The port of sshd for nodes without one; 0: that of ssh's configuration. In pods, which may share a node's network. */
#define PORT_OF_SSH "EPKIT_SSH_PORT"
#define PORT_OF_SSH_DEFAULT 222
#define PORT_OF_SSH_TEXT "222"

/* CMD_FINE if the variable is unset, empty, or a port from `least` to 65535; else CMD_USAGE after reporting it. */
int port_check_env(const struct cmd *cmd, const char *name, int least);

/* A variable that port_check_env() has accepted; `otherwise` if it is unset or empty. */
int port_from_env(const char *name, int otherwise);

#endif
