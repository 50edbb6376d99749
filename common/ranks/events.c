/* SPDX-License-Identifier: Apache-2.0 */
/* events.c - reads the events of the ranks; merges and prints their errors. */
#include "ranks_internal.h"

#include "common/child.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* --- errors --- */

void ranks_problem_add(json_t *problems, const json_t *event)
{
    json_t *rank = json_object_get(event, "rank");
    json_t *problem;

    FOR_JSON (known, problems)
        if (strcmp(json_text(known, "what"), json_text(event, "what")) == 0 &&
            strcmp(json_text(known, "text"), json_text(event, "text")) == 0) {
            json_array_append(json_object_get(known, "ranks"), rank);
            return;
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
    const char *divider = " ";

    FOR_JSON (value, ranks)
        if (json_integer_value(value) >= 0 && json_integer_value(value) < EP_MAX_RANKS)
            named[json_integer_value(value)] = true;
    snprintf(ret_text, bytes, "rank%s", json_array_size(ranks) > 1 ? "s" : "");
    for (int first = 0; first < EP_MAX_RANKS; first++) {
        int last = first;

        if (!named[first])
            continue;
        while (named[last + 1])
            last++;
        text_append(ret_text, bytes, "%s%d", divider, first);
        if (last > first)
            text_append(ret_text, bytes, "-%d", last);
        divider = ", ";
        first = last;
    }
}

void ranks_problem_print(const json_t *problems)
{
    FOR_JSON (problem, problems) {
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

    WITH_ARGS(args, format, vsnprintf(raw, sizeof(raw), format, args));
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

/* --- events --- */

static bool is_within(const json_t *value, json_int_t most)
{
    return json_is_integer(value) && json_integer_value(value) >= 0 && json_integer_value(value) <= most;
}

/* Whether the event has the fields that the launcher needs. An exit event without a code must not count as success. */
static bool is_event(const struct rank_reader *reader, const json_t *event)
{
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (!kind)
        return false;
    if (strcmp(kind, "exit") == 0)
        return is_within(json_object_get(event, "code"), 255);
    return strcmp(kind, "error") != 0 || is_within(json_object_get(event, "rank"), reader->spec->nranks - 1);
}

static void refuse_line(struct rank_reader *reader, int rank, const char *line)
{
    json_t *problem = ranks_problem_new(rank, "reading the events of a rank", "", "malformed event: %.80s", line);

    ranks_problem_add(reader->problems, problem);
    json_decref(problem);
}

/* True if it is the exit event of the rank. */
static bool handle_event(struct rank_reader *reader, int rank, const char *line)
{
    json_t *event = json_loads(line, 0, NULL);
    const char *kind = json_string_value(json_object_get(event, "event"));
    bool is_end = false;

    if (!is_event(reader, event)) {
        refuse_line(reader, rank, line);
    } else if (strcmp(kind, "exit") == 0) {
        reader->pipes[rank].finished = true;
        reader->pipes[rank].code = (int)json_integer_value(json_object_get(event, "code"));
        is_end = true;
    } else {
        if (strcmp(kind, "error") == 0)
            ranks_problem_add(reader->problems, event);
        reader->on_event(reader->context, event);
    }
    json_decref(event);
    return is_end;
}

static bool handle_lines(struct rank_reader *reader, int rank)
{
    struct rank_pipe *pipe = &reader->pipes[rank];
    char *line = pipe->text, *end;
    bool has_ended = false;

    while ((end = memchr(line, '\n', pipe->used - (size_t)(line - pipe->text)))) {
        *end = '\0';
        has_ended |= handle_event(reader, rank, line);
        line = end + 1;
    }
    pipe->used -= (size_t)(line - pipe->text);
    memmove(pipe->text, line, pipe->used);
    return has_ended;
}

bool rank_reader_read(struct rank_reader *reader, int rank)
{
    struct rank_pipe *pipe = &reader->pipes[rank];
    bool has_ended = false;

    while (pipe->fds[0] >= 0) {
        ssize_t n;

        if (pipe->room - pipe->used < 4096) {
            pipe->room = pipe->room * 2 + 8192;
            pipe->text = memory_grow(pipe->text, pipe->room);
        }
        n = read(pipe->fds[0], pipe->text + pipe->used, pipe->room - pipe->used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return has_ended;
        if (n <= 0) {
            process_close_fd(&pipe->fds[0]);
            return has_ended;
        }
        pipe->used += (size_t)n;
        has_ended |= handle_lines(reader, rank);
    }
    return has_ended;
}

void rank_reader_add_problem(struct rank_reader *reader, json_t *problem)
{
    ranks_problem_add(reader->problems, problem);
    reader->on_event(reader->context, problem);
    json_decref(problem);
}

/* --- pipes --- */

static void raise_descriptor_limit(int n)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < (rlim_t)n) {
        limit.rlim_cur = limit.rlim_max < (rlim_t)n ? limit.rlim_max : (rlim_t)n;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int rank_reader_init(const struct ranks_spec *spec, ranks_event_fn on_event, void *context,
                     struct rank_reader *ret_reader)
{
    struct rank_reader *reader = ret_reader;
    int n = spec->nranks;

    *reader = (struct rank_reader){.spec = spec, .on_event = on_event, .context = context};
    reader->pipes = memory_new((size_t)n, sizeof(*reader->pipes));
    reader->problems = json_array();
    for (int i = 0; i < n; i++)
        reader->pipes[i].fds[0] = reader->pipes[i].fds[1] = -1;
    raise_descriptor_limit(2 * n + 64);
    for (int i = 0; i < n; i++) {
        if (pipe2(reader->pipes[i].fds, O_CLOEXEC) != 0) {
            int reason = errno;

            out_error("creating a pipe for rank %d: %s", i, strerror(reason));
            if (reason == EMFILE)
                out_hint("raise the limit of open files (ulimit -n)");
            return CMD_FAILED;
        }
        fcntl(reader->pipes[i].fds[0], F_SETFL, O_NONBLOCK);
    }
    return CMD_FINE;
}

void rank_reader_done(struct rank_reader *reader)
{
    for (int i = 0; reader->pipes && i < reader->spec->nranks; i++) {
        for (int end = 0; end < 2; end++)
            process_close_fd(&reader->pipes[i].fds[end]);
        free(reader->pipes[i].text);
    }
    free(reader->pipes);
    json_decref(reader->problems);
}
