/* SPDX-License-Identifier: Apache-2.0 */
#include "capture.h"

#include "inherited.h"
#include "supervise.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TICK_MS 20         /* how late the end of a program may be noticed that has closed its output */
#define KILL_GRACE_MS 2000 /* a program in the kernel (a module that loads) cannot be killed at once: it is left */
#define WIDTH_MAX 64
#define DRAIN_READS 64

enum { OUTPUT, ERROR };

static struct capture_text *text_of(struct capture *capture, int which)
{
    return which == OUTPUT ? &capture->output : &capture->error;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static int append(struct capture_text *text, size_t bytes_max, const char *data, size_t bytes)
{
    char *grown;

    if (text->bytes + bytes > bytes_max) {
        text->cut = true;
        bytes = bytes_max - text->bytes;
    }
    grown = realloc(text->text, text->bytes + bytes + 1);
    if (!grown)
        return -1;
    memcpy(grown + text->bytes, data, bytes);
    text->text = grown;
    text->bytes += bytes;
    grown[text->bytes] = '\0';
    return 0;
}

/* What is there to be read; not all of it from one that writes without end, which must meet its deadline. */
static int drain(struct capture *capture, int which)
{
    char data[16384];
    ssize_t n;

    for (int i = 0; capture->fds[which] >= 0 && i < DRAIN_READS; i++) {
        n = read(capture->fds[which], data, sizeof(data));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return 0;
        if (n <= 0) {
            close_fd(&capture->fds[which]);
            return 0;
        }
        if (append(text_of(capture, which), capture->bytes_max ? capture->bytes_max : CAPTURE_BYTES_MAX, data,
                   (size_t)n) != 0)
            return -1;
    }
    return 0;
}

/* In the child; reports through `failure`, which exec closes, why it could not become the program. */
static void __attribute__((noreturn)) become(char *const *argv, int output, int error, int failure)
{
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC), number;
    sigset_t none;

    inherited_restore();
    /* What programs say is read, here and where ssh passes it on. */
    setenv("LC_ALL", "C", 1);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(output, STDOUT_FILENO) >= 0 &&
        dup2(error, STDERR_FILENO) >= 0)
        execvp(argv[0], argv);
    number = errno;
    if (write(failure, &number, sizeof(number)) != sizeof(number))
        _exit(126);
    _exit(127);
}

static void start(struct capture *capture)
{
    int output[2] = {-1, -1}, error[2] = {-1, -1}, failure[2] = {-1, -1}, number;

    capture->started_ns = ep_now_ns();
    if (pipe2(output, O_CLOEXEC) != 0 || pipe2(error, O_CLOEXEC) != 0 || pipe2(failure, O_CLOEXEC) != 0) {
        capture->start_error = errno;
    } else {
        capture->pid = supervise_fork(true, failure[1]);
        if (capture->pid == 0)
            become(capture->argv, output[1], error[1], failure[1]);
        if (capture->pid < 0)
            capture->start_error = errno;
    }
    close_fd(&output[1]);
    close_fd(&error[1]);
    close_fd(&failure[1]);
    if (capture->pid > 0) {
        setpgid(capture->pid, capture->pid);
        if (read(failure[0], &number, sizeof(number)) == sizeof(number)) {
            capture->start_error = number;
            waitpid(capture->pid, NULL, 0);
        }
    }
    close_fd(&failure[0]);
    if (capture->start_error) {
        close_fd(&output[0]);
        close_fd(&error[0]);
        capture->pid = 0;
        return;
    }
    capture->fds[OUTPUT] = output[0];
    capture->fds[ERROR] = error[0];
    fcntl(output[0], F_SETFL, O_NONBLOCK);
    fcntl(error[0], F_SETFL, O_NONBLOCK);
}

static void end(struct capture *capture)
{
    close_fd(&capture->fds[OUTPUT]);
    close_fd(&capture->fds[ERROR]);
    capture->elapsed_ns = (int64_t)(ep_now_ns() - capture->started_ns);
    capture->pid = 0;
}

static void kill_now(struct capture *capture)
{
    uint64_t until_ns = ep_deadline_ns(KILL_GRACE_MS);

    kill(-capture->pid, SIGKILL);
    kill(capture->pid, SIGKILL);
    while (waitpid(capture->pid, NULL, WNOHANG) == 0 && ep_now_ns() < until_ns)
        poll(NULL, 0, TICK_MS / 4);
    end(capture);
}

/* Looks after one that runs. 1 when it has ended, 0 when it goes on, -1 for lack of memory. */
static int look_after(struct capture *capture, int64_t timeout_ms)
{
    pid_t ended = waitpid(capture->pid, &capture->status, WNOHANG);

    if (drain(capture, OUTPUT) != 0 || drain(capture, ERROR) != 0)
        return -1;
    if (ended < 0 && errno == ECHILD)
        capture->status = 255 << 8; /* how it ended is not known, so that it was well is not, either */
    if (ended != 0) {
        /* A child of its own may hold the pipes: what it has to say is not waited for. */
        end(capture);
        return 1;
    }
    if (ep_now_ns() < capture->started_ns + (uint64_t)timeout_ms * 1000000)
        return 0;
    capture->late = true;
    kill_now(capture);
    return 1;
}

/* Those that run now. */
struct crowd {
    struct capture *members[WIDTH_MAX];
    int n;
};

static void wait_for_news(const struct crowd *crowd)
{
    struct pollfd polls[2 * WIDTH_MAX];
    nfds_t n = 0;

    for (int i = 0; i < crowd->n; i++)
        for (int which = OUTPUT; which <= ERROR; which++)
            if (crowd->members[i]->fds[which] >= 0)
                polls[n++] = (struct pollfd){.fd = crowd->members[i]->fds[which], .events = POLLIN};
    poll(polls, n, TICK_MS);
}

int capture_run(struct capture *captures, int n, int width, int64_t timeout_ms,
                void (*on_end)(const struct capture *capture, void *context), void *context)
{
    struct crowd crowd = {.n = 0};
    int next = 0, result = 0;

    if (width > WIDTH_MAX)
        width = WIDTH_MAX;
    for (int i = 0; i < n; i++)
        captures[i].fds[OUTPUT] = captures[i].fds[ERROR] = -1;
    while (result == 0 && (next < n || crowd.n > 0)) {
        while (next < n && crowd.n < width) {
            start(&captures[next]);
            if (captures[next].start_error == 0)
                crowd.members[crowd.n++] = &captures[next];
            else if (on_end)
                on_end(&captures[next], context);
            next++;
        }
        wait_for_news(&crowd);
        for (int i = 0; i < crowd.n && result >= 0;) {
            result = look_after(crowd.members[i], timeout_ms);
            if (result == 1) {
                if (on_end)
                    on_end(crowd.members[i], context);
                crowd.members[i] = crowd.members[--crowd.n];
            } else {
                i++;
            }
        }
        result = result < 0 ? -1 : 0;
    }
    for (int i = 0; i < crowd.n; i++)
        kill_now(crowd.members[i]);
    return result;
}

void capture_done(struct capture *capture)
{
    free(capture->output.text);
    free(capture->error.text);
    capture->output = capture->error = (struct capture_text){0};
}
