/* SPDX-License-Identifier: Apache-2.0 */
/* rank_errors.c - merges and prints the errors of many ranks. */
#include "ranks_internal.h"

#include "common/output.h"

#include "common/clean.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool same_text(const json_t *a, const json_t *b, const char *key)
{
    const char *text_a = json_string_value(json_object_get(a, key));
    const char *text_b = json_string_value(json_object_get(b, key));

    return strcmp(text_a ? text_a : "", text_b ? text_b : "") == 0;
}

void ranks_problem_add(json_t *problems, const json_t *event)
{
    json_t *rank = json_object_get(event, "rank");
    json_t *problem;
    size_t i;

    json_array_foreach (problems, i, problem) {
        if (same_text(problem, event, "what") && same_text(problem, event, "text")) {
            json_array_append(json_object_get(problem, "ranks"), rank);
            return;
        }
    }
    problem = json_pack("{s:O?, s:O?, s:O?, s:O?, s:[O]}", "status", json_object_get(event, "status"), "what",
                        json_object_get(event, "what"), "text", json_object_get(event, "text"), "hint",
                        json_object_get(event, "hint"), "ranks", rank);
    if (problem)
        json_array_append_new(problems, problem);
}

/* "ranks 0-3, 7", from an array of rank numbers in any order. */
static void list_ranks(const json_t *ranks, char *ret_text, size_t bytes)
{
    bool named[EP_MAX_RANKS + 1] = {false};
    size_t used, n = json_array_size(ranks), i;
    json_t *value;
    const char *divider = " ";

    json_array_foreach (ranks, i, value) {
        if (json_integer_value(value) >= 0 && json_integer_value(value) < EP_MAX_RANKS)
            named[json_integer_value(value)] = true;
    }
    used = (size_t)snprintf(ret_text, bytes, "rank%s", n > 1 ? "s" : "");
    for (int first = 0; first < EP_MAX_RANKS && used < bytes; first++) {
        int last = first;

        if (!named[first])
            continue;
        while (named[last + 1])
            last++;
        if (last > first)
            used += (size_t)snprintf(ret_text + used, bytes - used, "%s%d-%d", divider, first, last);
        else
            used += (size_t)snprintf(ret_text + used, bytes - used, "%s%d", divider, first);
        divider = ", ";
        first = last;
    }
}

void ranks_problem_print(const json_t *problems)
{
    json_t *problem;
    size_t i;

    json_array_foreach (problems, i, problem) {
        const char *what = json_string_value(json_object_get(problem, "what"));
        char where[256];

        list_ranks(json_object_get(problem, "ranks"), where, sizeof(where));
        out_problem(what ? what : "a rank failed", where, json_string_value(json_object_get(problem, "text")),
                    json_string_value(json_object_get(problem, "hint")));
    }
}

json_t *ranks_problem_new(int rank, const char *what, const char *hint, const char *format, ...)
{
    char raw[512], text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(raw, sizeof(raw), format, args);
    va_end(args);
    /* Invalid UTF-8, for example a truncated name, cannot be put into JSON. */
    text_clean(raw, text, sizeof(text));
    return json_pack("{s:s, s:i, s:s, s:s, s:s}", "event", "error", "rank", rank, "what", what, "text", text, "hint",
                     hint);
}

json_t *ranks_problem_signal(int rank, int signal_number)
{
    const char *name = sigabbrev_np(signal_number);
    const char *hint = "";

    switch (signal_number) {
    case SIGKILL:
        hint = "it was killed by a user or by the kernel for lack of memory: check 'dmesg | tail'";
        break;
    case SIGBUS:
        hint = "no pages were left for shared memory: free memory, or raise the container's limit";
        break;
    case SIGSEGV:
    case SIGABRT:
    case SIGFPE:
    case SIGILL:
        hint = "this is a bug in epkit: please report it with the command line and the seed";
        break;
    default:
        break;
    }
    return ranks_problem_new(rank, "a rank died", hint, "killed by SIG%s (%s)", name ? name : "?",
                             strsignal(signal_number));
}
