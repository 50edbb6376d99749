/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as what a rank says to the launcher: what is handed on is an event, what ends a rank's job has an exit
 * code, and what is neither becomes a problem that can be printed.
 */
#include "common/ranks/events.c"

#include <stdint.h>
#include <sys/mman.h>

enum { NRANKS = 2 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Only listened to here. */
const struct ranks_job ranks_jobs[] = {{0}};

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_event(void *context, const json_t *event)
{
    const char *kind = json_string_value(json_object_get(event, "event"));

    check(kind && strcmp(kind, "exit") != 0);
    ++*(int *)context;
}

/* All of `data` through a descriptor, as from a rank that then ends. */
static void read_events(struct rank_reader *reader, int rank, const uint8_t *data, size_t size)
{
    struct rank_pipe *pipe = &reader->pipes[rank];

    pipe->fds[0] = memfd_create("events", MFD_CLOEXEC);
    pipe->fds[1] = -1;
    check(pipe->fds[0] >= 0 && write(pipe->fds[0], data, size) == (ssize_t)size &&
          lseek(pipe->fds[0], 0, SEEK_SET) == 0);
    rank_reader_read(reader, rank);
    check(pipe->fds[0] == -1);
    /* What is left is a line without an end. */
    check(pipe->used == 0 || !memchr(pipe->text, '\n', pipe->used));
    check(!pipe->finished || (pipe->code >= 0 && pipe->code <= 255));
    free(pipe->text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ranks_spec spec = {.nranks = NRANKS, .timeout_ms = 1000};
    struct rank_pipe pipes[NRANKS + 1] = {0};
    int n_events = 0, n_lines = 0, n_exits = 0;
    struct rank_reader reader = {
        .spec = &spec, .on_event = check_event, .context = &n_events, .pipes = pipes, .problems = json_array()};
    size_t i;

    for (i = 0; i < size; i++)
        n_lines += data[i] == '\n';
    for (int rank = 0; rank < NRANKS; rank++) {
        read_events(&reader, rank, data, size);
        n_exits += pipes[rank].finished;
    }
    check(n_events + n_exits <= NRANKS * n_lines);
    /* Nothing that was said is lost. */
    check(n_lines == 0 || n_events + n_exits > 0 || json_array_size(reader.problems) > 0);
    FOR_JSON (problem, reader.problems) {
        char where[64];

        list_ranks(json_object_get(problem, "ranks"), where, sizeof(where));
        check(strlen(where) > strlen("rank "));
    }
    json_decref(reader.problems);
    return 0;
}
