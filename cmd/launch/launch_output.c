/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch_output.c - the output of the nodes: lines with the node in front, a log for each node, a queue for the reader.
 */
#include "launch_internal.h"

#include "base/clock.h"
#include "common/clean.h"
#include "common/redact.h"
#include "common/write.h"

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
        char *grown = realloc(launch->queue, 2 * needed + 65536);

        if (!grown)
            return;
        launch->queue = grown;
        launch->queue_capacity = 2 * needed + 65536;
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
    *has_failed = true;
    if (!launch->code && !launch->reason) {
        launch->code = LAUNCH_FAILED;
        launch->reason = "log";
    }
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

void line_add(struct line_buffer *buffer, const char *data, size_t bytes,
              void (*on_line)(void *context, const char *text, size_t bytes), void *context)
{
    if (!buffer->text)
        buffer->text = malloc(LINE_MAX_BYTES + 1);
    while (buffer->text && bytes > 0) {
        const char *newline = memchr(data, '\n', bytes);
        size_t length = newline ? (size_t)(newline - data) : bytes;
        size_t room = LINE_MAX_BYTES - buffer->used, taken = length < room ? length : room;
        bool is_line = newline && taken == length;

        memcpy(buffer->text + buffer->used, data, taken);
        buffer->used += taken;
        data += taken + is_line;
        bytes -= taken + is_line;
        if (is_line || buffer->used == LINE_MAX_BYTES) {
            buffer->text[buffer->used] = '\0';
            on_line(context, buffer->text, buffer->used);
            buffer->used = 0;
        }
    }
}

void line_end(struct line_buffer *buffer, void (*on_line)(void *context, const char *text, size_t bytes), void *context)
{
    if (buffer->used)
        line_add(buffer, "\n", 1, on_line, context);
    free(buffer->text);
    *buffer = (struct line_buffer){0};
}

struct rank_line {
    struct node *node;
    int rank;
};

static void write_line(void *context, const char *text, size_t bytes)
{
    struct node *node = ((struct rank_line *)context)->node;
    int rank = ((struct rank_line *)context)->rank;
    char prefix[300];

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

void node_write(struct node *node, int rank, bool is_error, const char *data, size_t bytes)
{
    int at = 2 * rank + is_error;
    struct rank_line line = {node, rank};

    node->output_ns = ep_now_ns();
    node->n_silent = 0;
    if (!node->lines)
        node->lines = calloc((size_t)node->launch->per_node * 2, sizeof(*node->lines));
    if (node->lines)
        line_add(&node->lines[at], data, bytes, write_line, &line);
}

void node_flush_lines(struct node *node)
{
    for (int i = 0; node->lines && i < 2 * node->launch->per_node; i++)
        line_end(&node->lines[i], write_line, &(struct rank_line){node, i / 2});
}
