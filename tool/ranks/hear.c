/* SPDX-License-Identifier: Apache-2.0 */
#include "hear.h"

#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* --- events --- */

static bool is_within(const json_t *value, json_int_t most)
{
    return json_is_integer(value) && json_integer_value(value) >= 0 && json_integer_value(value) <= most;
}

/* Has it what the launcher itself needs? An end without an exit code must not pass for a good one. */
static bool is_event(const struct hearing *hearing, const json_t *event)
{
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (!kind)
        return false;
    if (strcmp(kind, "exit") == 0)
        return is_within(json_object_get(event, "code"), 255);
    return strcmp(kind, "error") != 0 || is_within(json_object_get(event, "rank"), hearing->spec->nranks - 1);
}

static void refuse_line(struct hearing *hearing, int rank, const char *line)
{
    char shown[81];
    json_t *problem;
    size_t n;

    /* Half a character, or what is none, would not go into JSON. */
    for (n = 0; line[n] && n + 1 < sizeof(shown); n++)
        shown[n] = line[n] < 0x20 || line[n] > 0x7e ? '?' : line[n];
    shown[n] = '\0';
    problem = ranks_problem_new(rank, "hearing a rank", "", "malformed event: %s", shown);
    ranks_problem_add(hearing->problems, problem);
    json_decref(problem);
}

/* True if it is the end of the rank. */
static bool take_event(struct hearing *hearing, int rank, const char *line)
{
    json_t *event = json_loads(line, 0, NULL);
    const char *kind = json_string_value(json_object_get(event, "event"));
    bool is_end = false;

    if (!is_event(hearing, event)) {
        refuse_line(hearing, rank, line);
    } else if (strcmp(kind, "exit") == 0) {
        hearing->listeners[rank].finished = true;
        hearing->listeners[rank].code = (int)json_integer_value(json_object_get(event, "code"));
        is_end = true;
    } else {
        if (strcmp(kind, "error") == 0)
            ranks_problem_add(hearing->problems, event);
        hearing->on_event(hearing->context, event);
    }
    json_decref(event);
    return is_end;
}

static bool take_lines(struct hearing *hearing, int index)
{
    struct listener *listener = &hearing->listeners[index];
    char *line = listener->text, *end;
    bool has_ended = false;

    while ((end = memchr(line, '\n', listener->used - (size_t)(line - listener->text)))) {
        *end = '\0';
        if (index < hearing->spec->nranks)
            has_ended |= take_event(hearing, index, line);
        else
            ranks_mpirun_line(&hearing->mpirun, line, hearing->is_quiet);
        line = end + 1;
    }
    listener->used -= (size_t)(line - listener->text);
    memmove(listener->text, line, listener->used);
    return has_ended;
}

bool hearing_read(struct hearing *hearing, int index)
{
    struct listener *listener = &hearing->listeners[index];
    bool has_ended = false;

    while (listener->fds[0] >= 0) {
        ssize_t n;

        if (listener->room - listener->used < 4096) {
            char *text = realloc(listener->text, listener->room * 2 + 8192);

            if (!text)
                return has_ended;
            listener->text = text;
            listener->room = listener->room * 2 + 8192;
        }
        n = read(listener->fds[0], listener->text + listener->used, listener->room - listener->used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return has_ended;
        if (n <= 0) {
            close(listener->fds[0]);
            listener->fds[0] = -1;
            return has_ended;
        }
        listener->used += (size_t)n;
        has_ended |= take_lines(hearing, index);
    }
    return has_ended;
}

void hearing_add_problem(struct hearing *hearing, json_t *problem)
{
    ranks_problem_add(hearing->problems, problem);
    hearing->on_event(hearing->context, problem);
    json_decref(problem);
}

/* --- pipes --- */

static void allow_descriptors(int n)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < (rlim_t)n) {
        limit.rlim_cur = limit.rlim_max < (rlim_t)n ? limit.rlim_max : (rlim_t)n;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int hearing_init(const struct ranks_spec *spec, ranks_event_fn on_event, void *context, struct hearing *ret_hearing)
{
    struct hearing *hearing = ret_hearing;
    int n = spec->nranks + 1;

    *hearing = (struct hearing){.spec = spec, .on_event = on_event, .context = context, .mpirun.rank = -1};
    hearing->listeners = calloc((size_t)n, sizeof(*hearing->listeners));
    hearing->problems = json_array();
    if (!hearing->listeners || !hearing->problems) {
        out_error("out of memory");
        return CMD_FAILED;
    }
    for (int i = 0; i < n; i++)
        hearing->listeners[i].fds[0] = hearing->listeners[i].fds[1] = -1;
    allow_descriptors(2 * n + 64);
    for (int i = 0; i < n; i++) {
        if (i == n - 1 && spec->boot != RANKS_MPI)
            break;
        if (pipe2(hearing->listeners[i].fds, O_CLOEXEC) != 0) {
            int reason = errno;

            out_error("creating a pipe for rank %d: %s", i, strerror(reason));
            if (reason == EMFILE)
                out_hint("raise the limit of open files: ulimit -n");
            return CMD_FAILED;
        }
        fcntl(hearing->listeners[i].fds[0], F_SETFL, O_NONBLOCK);
    }
    return CMD_FINE;
}

void hearing_done(struct hearing *hearing)
{
    for (int i = 0; hearing->listeners && i <= hearing->spec->nranks; i++) {
        for (int end = 0; end < 2; end++)
            if (hearing->listeners[i].fds[end] >= 0)
                close(hearing->listeners[i].fds[end]);
        free(hearing->listeners[i].text);
    }
    free(hearing->listeners);
    json_decref(hearing->problems);
}
