/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a command line, an argument a line: what is accepted lies within its limits and can be typed again from
 * what options_print() says, what is refused has a reason.
 */
#include "common/cmd.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ARGS = 64, MOST_BYTES = 4096 };

struct values {
    bool flag;
    int64_t number, size;
    int choice;
    struct opt_list numbers, choices;
};

static const char *const colours[] = {"red", "green", "blue", NULL};

static const struct opt table[] = {
    {.name = "flag", .letter = 'f', .type = OPT_FLAG, .offset = offsetof(struct values, flag)},
    {.name = "number", .letter = 'n', .type = OPT_INT, .offset = offsetof(struct values, number), .min = -5, .max = 99},
    {.name = "size", .letter = 's', .type = OPT_SIZE, .offset = offsetof(struct values, size), .max = INT64_MAX},
    {.name = "choice", .type = OPT_CHOICE, .offset = offsetof(struct values, choice), .choices = colours},
    {.name = "numbers", .type = OPT_LIST, .offset = offsetof(struct values, numbers), .min = INT64_MIN, .max = 99},
    {.name = "choices", .type = OPT_LIST, .offset = offsetof(struct values, choices), .choices = colours},
    {0},
};

static const struct cmd command = {.name = "command", .options = table, .options_bytes = sizeof(struct values)};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* `text` becomes an argument list, cut at every `divider`. The list ends with NULL. */
static int cut(char *text, char divider, char *ret_argv[MOST_ARGS + 2])
{
    char none[] = {divider, '\0'}, *rest = text, *word;
    int n = 0;

    while (n <= MOST_ARGS && (word = strsep(&rest, none)))
        ret_argv[n++] = word;
    ret_argv[n] = NULL;
    return n;
}

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_list(const struct opt_list *list, int64_t min, int64_t max)
{
    check(list->n <= OPT_LIST_MAX);
    for (size_t i = 0; i < list->n; i++)
        check(list->values[i] >= min && list->values[i] <= max);
}

static bool same_list(const struct opt_list *a, const struct opt_list *b)
{
    return a->n == b->n && !memcmp(a->values, b->values, a->n * sizeof(a->values[0]));
}

static void check_printed(const struct cmd_call *call)
{
    const struct values *values = call->options, *again;
    const char *const nothing[] = {NULL};
    char text[MOST_BYTES], error[512] = "", *argv[MOST_ARGS + 2];
    struct cmd_call second;
    bool help;
    int argc;

    options_print(&command, call, nothing, text, sizeof(text));
    check(strncmp(text, "epkit command", 13) == 0);
    argc = cut(text + strlen("epkit "), ' ', argv);
    check(options_parse(&command, argc, argv, &second, &help, error, sizeof(error)) == CMD_FINE && !help);
    again = second.options;
    check(second.given == call->given && again->flag == values->flag && again->number == values->number &&
          again->size == values->size && again->choice == values->choice &&
          same_list(&again->numbers, &values->numbers) && same_list(&again->choices, &values->choices));
    options_done(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[MOST_BYTES] = "command\n", error[512] = "", *argv[MOST_ARGS + 2];
    size_t used = strlen(text);
    const struct values *values;
    struct cmd_call call;
    bool help;
    int argc;

    if (size >= sizeof(text) - used)
        return 0;
    memcpy(text + used, data, size);
    argc = cut(text, '\n', argv);
    if (options_parse(&command, argc, argv, &call, &help, error, sizeof(error)) != CMD_FINE) {
        check(error[0] && !call.options);
        return 0;
    }
    values = call.options;
    if (!help) {
        check(values->number >= -5 && values->number <= 99 && values->size >= 0);
        check(values->choice >= 0 && values->choice < 3);
        check_list(&values->numbers, INT64_MIN, 99);
        check_list(&values->choices, 0, 2);
        check_printed(&call);
    }
    options_done(&call);
    return 0;
}
