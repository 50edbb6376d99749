/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch_output.c - the output of the nodes: lines with the node in front, a log for each node, a queue for the reader.
 */
#include "launch_internal.h"

#include "base/clock.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/redact.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIPE_BYTES 4096 /* what a writable pipe accepts without blocking (PIPE_BUF) */

void launch_flush(struct launch *launch)
{
    int fd = launch->options->output_fd;
    size_t done = 0;

    while (done < launch->queued) {
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        size_t bytes = launch->queued - done < PIPE_BYTES ? launch->queued - done : PIPE_BYTES;
        ssize_t n;

        if (poll(&ready, 1, 0) <= 0)
            break;
        n = write(fd, launch->queue + done, bytes);
        if (n > 0) {
            done += (size_t)n;
        } else if (errno == EBADF) {
            /* A caller that starts the command with a closed stream wants no output. */
            done = launch->queued;
        } else if (errno != EAGAIN && errno != EINTR) {
            /* It cannot be reported on this descriptor; the logs have all output. */
            if (!launch->has_output_failed)
                launch_note(launch, "the output cannot be written: %s", strerror(errno));
            launch->has_output_failed = true;
            launch_fail(launch, NULL, LAUNCH_FAILED, "output");
            done = launch->queued;
        } else {
            break;
        }
    }
    memmove(launch->queue, launch->queue + done, launch->queued - done);
    launch->queued -= done;
    launch->pool.is_paused = launch->queued > QUEUE_PAUSE_BYTES;
}

/*
 * Copies a line with the characters that a terminal would interpret replaced. The buffer has room for as many bytes.
 * Returns its end.
 */
static char *show_line(const char *text, size_t bytes, char *ret_text)
{
    for (size_t at = 0; at < bytes;) {
        const char *shown = "?";
        size_t shown_bytes = 1, n = text_printable(text + at, bytes - at, &shown, &shown_bytes);

        memcpy(ret_text, shown, shown_bytes);
        ret_text += shown_bytes;
        at += n ? n : bytes - at;
    }
    return ret_text;
}

/*
 * Queues a line of a node for the output. Characters that a terminal would interpret are replaced by '?'. The logs have
 * the original.
 */
static void launch_queue(struct launch *launch, const char *prefix, const char *text, size_t bytes)
{
    size_t needed = launch->queued + strlen(prefix) + bytes + 1;
    char *end;

    if (launch->options->output_fd < 0)
        return;
    if (needed > launch->queue_capacity) {
        launch->queue_capacity = 2 * needed + 65536;
        launch->queue = memory_grow(launch->queue, launch->queue_capacity);
    }
    memcpy(launch->queue + launch->queued, prefix, strlen(prefix));
    end = show_line(text, bytes, launch->queue + launch->queued + strlen(prefix));
    *end++ = '\n';
    launch->queued = (size_t)(end - launch->queue);
    if (launch->queued > QUEUE_PAUSE_BYTES)
        launch_flush(launch);
}

/* A log that cannot be written is reported once, and the run does not count as complete. */
static void log_failed(struct launch *launch, const char *name, bool *has_failed)
{
    int number = errno;

    if (*has_failed)
        return;
    *has_failed = launch->is_log_lost = true;
    launch_note(launch, "writing the log of %s in %s: %s: later output is not saved", name, launch->folder,
                write_reason(number));
}

void launch_log(struct launch *launch, const char *text)
{
    char *shown = !launch->log || launch->has_log_failed ? NULL : redact_text(text);

    if (shown && (fprintf(launch->log, "%s\n", shown) < 0 || fflush(launch->log) != 0))
        log_failed(launch, "the launcher", &launch->has_log_failed);
    free(shown);
}

static void log_line(struct node *node, const char *text, size_t bytes)
{
    struct launch *launch = node->launch;

    if (!*launch->folder || node->has_log_failed)
        return;
    if (!node->log)
        node->log = folder_create(launch, "worker-%s.log", node->name);
    if (!node->log || (bytes && fwrite(text, 1, bytes, node->log) != bytes) || putc('\n', node->log) == EOF ||
        fflush(node->log) != 0)
        log_failed(launch, node->name, &node->has_log_failed);
}

static void has_written(struct node *node)
{
    node->output_ns = ep_now_ns();
    node->n_silent = 0;
}

void node_keep_part(struct node *node, int rank, const char *text, size_t bytes)
{
    has_written(node);
    node->part_rank = rank;
    node->part_bytes = bytes < sizeof(node->part) ? bytes : sizeof(node->part);
    memcpy(node->part, text, node->part_bytes);
}

void node_write(struct node *node, int rank, const char *text, size_t bytes)
{
    char prefix[300];

    has_written(node);
    if (rank == node->part_rank && bytes >= node->part_bytes && memcmp(text, node->part, node->part_bytes) == 0)
        node->part_bytes = 0;
    if (bytes && text[bytes - 1] == '\r')
        bytes--;
    if (node->launch->per_node > 1)
        snprintf(prefix, sizeof(prefix), "%s/%d: ", node->name, rank);
    else
        snprintf(prefix, sizeof(prefix), "%s: ", node->name);
    log_line(node, text, bytes);
    launch_queue(node->launch, prefix, text, bytes);
    if (node->launch->options->on_line)
        node->launch->options->on_line(node->launch->options->line_context, prefix, text, bytes);
    if (bytes) {
        snprintf(node->last_line, sizeof(node->last_line), "%.*s", (int)(bytes < 100 ? bytes : 100), text);
        node->last_rank = rank;
    }
}
