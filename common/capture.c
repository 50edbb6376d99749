/* SPDX-License-Identifier: Apache-2.0 */
#include "capture.h"

#include "memory.h"

#include "base/clock.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define TICK_MS 20      /* poll interval for the end of a program where there is no pidfd, and for an interrupt */
#define WAIT_MS 3600000 /* longest single wait */
#define WIDTH_MAX 64
#define DRAIN_READS 64

struct stream {
    const struct capture *capture;
    struct capture_text *text;
};

static void append(void *context, const char *data, size_t bytes)
{
    struct stream *stream = context;
    size_t bytes_max = stream->capture->bytes_max ? stream->capture->bytes_max : CAPTURE_BYTES_MAX;
    struct capture_text *text = stream->text;

    if (text->bytes + bytes > bytes_max) {
        text->cut = true;
        bytes = bytes_max - text->bytes;
    }
    text->text = memory_grow(text->text, text->bytes + bytes + 1);
    memcpy(text->text + text->bytes, data, bytes);
    text->bytes += bytes;
    text->text[text->bytes] = '\0';
}

/* Reads what is available. */
static void drain(struct capture *capture)
{
    struct stream output = {capture, &capture->output}, error = {capture, &capture->error};

    process_read(&capture->process.out, DRAIN_READS, append, &output);
    process_read(&capture->process.err, DRAIN_READS, append, &error);
}

static void start(struct capture *capture)
{
    capture->started_ns = ep_now_ns();
    capture->pidfd = -1;
    if (capture->argv)
        capture->start_error = process_start(capture->argv, &capture->process);
    else
        capture->start_error = process_fork(capture->execute, capture->context, false, &capture->process);
    if (capture->start_error == 0)
        capture->pidfd = (int)syscall(SYS_pidfd_open, capture->process.pid, 0);
}

static void end(struct capture *capture)
{
    process_close(&capture->process);
    process_close_fd(&capture->pidfd);
    capture->process.pid = 0;
}

/* Polls a running program. Has it ended? */
static bool poll_program(struct capture *capture, int64_t timeout_ms)
{
    pid_t ended = process_wait(capture->process.pid, WNOHANG, &capture->status);

    drain(capture);
    if (ended != 0) {
        /* A child of the program may hold the pipes open: its output is not waited for. */
        end(capture);
        return true;
    }
    if (ep_now_ns() < capture->started_ns + (uint64_t)timeout_ms * 1000000 &&
        !(capture->is_interrupted && capture->is_interrupted()))
        return false;
    capture->late = true;
    process_kill(&capture->process);
    end(capture);
    return true;
}

/* The running programs. */
struct poll_set {
    struct capture *members[WIDTH_MAX];
    int n;
};

/* Waits until a program writes, ends or reaches its deadline. */
static void wait_for_event(const struct poll_set *poll_set, int64_t timeout_ms)
{
    struct pollfd polls[3 * WIDTH_MAX];
    uint64_t now_ns = ep_now_ns(), until_ns = now_ns + (poll_set->n ? WAIT_MS * UINT64_C(1000000) : 0);
    nfds_t n = 0;

    for (int i = 0; i < poll_set->n; i++) {
        struct capture *capture = poll_set->members[i];
        uint64_t late_ns = capture->started_ns + (uint64_t)timeout_ms * 1000000;

        if (capture->pidfd < 0 || capture->is_interrupted)
            late_ns = now_ns + TICK_MS * UINT64_C(1000000);
        if (capture->pidfd >= 0)
            polls[n++] = (struct pollfd){.fd = capture->pidfd, .events = POLLIN};
        if (late_ns < until_ns)
            until_ns = late_ns;
        polls[n++] = (struct pollfd){.fd = capture->process.out, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = capture->process.err, .events = POLLIN};
    }
    poll(polls, n, until_ns > now_ns ? (int)((until_ns - now_ns) / 1000000 + 1) : 0);
}

void capture_run(struct capture *captures, int n, int width, int64_t timeout_ms,
                 void (*on_end)(const struct capture *capture, void *context), void *context)
{
    struct poll_set poll_set = {.n = 0};
    int next = 0;

    if (width > WIDTH_MAX)
        width = WIDTH_MAX;
    for (int i = 0; i < n; i++) {
        captures[i].process = (struct process){.in = -1, .out = -1, .err = -1};
        captures[i].pidfd = -1;
    }
    while (next < n || poll_set.n > 0) {
        while (next < n && poll_set.n < width) {
            start(&captures[next]);
            if (captures[next].start_error == 0)
                poll_set.members[poll_set.n++] = &captures[next];
            else if (on_end)
                on_end(&captures[next], context);
            next++;
        }
        wait_for_event(&poll_set, timeout_ms);
        for (int i = 0; i < poll_set.n;) {
            if (poll_program(poll_set.members[i], timeout_ms)) {
                if (on_end)
                    on_end(poll_set.members[i], context);
                poll_set.members[i] = poll_set.members[--poll_set.n];
            } else {
                i++;
            }
        }
    }
}

void capture_done(struct capture *capture)
{
    free(capture->output.text);
    free(capture->error.text);
    capture->output = capture->error = (struct capture_text){0};
}
