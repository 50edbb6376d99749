/* SPDX-License-Identifier: Apache-2.0 */
/*
 * query.c - queries of libraries, made in a child process.
 *
 * A driver library may hang in the kernel, crash, print, or leave threads and signal handlers behind. The child ends at
 * the deadline at the latest. It sends its answer through a pipe: 8 bytes with the length, then JSON. So the parent
 * knows the end of the answer even if the child has started processes that keep the pipe open.
 */
#include "base/clock.h"
#include "common/write.h"
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANSWER_MAX (4u << 20)
#define PIPE_FD 3
#define END_GRACE_MS 200 /* for the child to exit after its answer, or after it was killed */
#define POLL_MS 5
#define WHY_BYTES 160

/* --- in the child --- */

static void close_from(int first)
{
    struct rlimit limit;

    if (syscall(SYS_close_range, (unsigned)first, ~0u, 0u) == 0)
        return;
    /* Before Linux 5.9. */
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur > 65536)
        limit.rlim_cur = 65536;
    for (int fd = first; fd < (int)limit.rlim_cur; fd++)
        close(fd);
}

/* The library inherits nothing of the parent: no descriptors, output, signal handlers or core dump. */
static bool prepare_child(int pipe_fd, pid_t parent)
{
    struct rlimit no_core = {0};
    sigset_t none;
    int null;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        return false;
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP)
            signal(number, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setrlimit(RLIMIT_CORE, &no_core);
    null = open("/dev/null", O_RDWR);
    /* Above all descriptors that are replaced below. */
    pipe_fd = fcntl(pipe_fd, F_DUPFD, 16);
    if (null < 0 || pipe_fd < 0)
        return false;
    for (int fd = 0; fd <= 2; fd++)
        if (dup2(null, fd) < 0)
            return false;
    if (dup3(pipe_fd, PIPE_FD, O_CLOEXEC) < 0)
        return false;
    close_from(PIPE_FD + 1);
    return true;
}

static void __attribute__((noreturn)) run_child(json_t *(*query)(void *argument), void *argument)
{
    json_t *value = query(argument), *encoded = value ? snapshot_encode(value) : NULL;
    char *text = encoded ? json_dumps(encoded, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    uint64_t bytes = text ? strlen(text) : 0;

    if (value && !text)
        _exit(2);
    _exit(write_all(PIPE_FD, &bytes, sizeof(bytes)) || write_all(PIPE_FD, text, bytes) ? 1 : 0);
}

/* --- in the parent --- */

struct reader {
    pid_t child;
    int fd;
    uint64_t deadline_ns;
    uint64_t bytes; /* length that the child has announced */
    char *text;
};

enum read_result { READ_COMPLETE, READ_CLOSED, READ_TIMED_OUT };

/* Reads exactly `bytes`, until the deadline. */
static enum read_result read_exactly(const struct reader *reader, void *ret_data, size_t bytes)
{
    char *at = ret_data;

    while (bytes > 0) {
        struct pollfd poll_fd = {.fd = reader->fd, .events = POLLIN};
        uint64_t now = ep_now_ns();
        ssize_t n;

        if (now >= reader->deadline_ns)
            return READ_TIMED_OUT;
        if (poll(&poll_fd, 1, (int)((reader->deadline_ns - now + 999999) / 1000000)) <= 0)
            continue;
        n = read(reader->fd, at, bytes);
        if (n == 0)
            return READ_CLOSED;
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return READ_CLOSED;
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
        }
    }
    return READ_COMPLETE;
}

/*
 * Waits briefly for a child that has been killed or is about to exit. A child that hangs in the kernel cannot die: it
 * is left behind, and init reaps it after this process has exited. False: its status is unknown.
 */
static bool end_child(pid_t child, int *ret_status)
{
    uint64_t deadline_ns = ep_deadline_ns(END_GRACE_MS);
    struct timespec backoff = {.tv_nsec = 200000};
    pid_t ended;

    while ((ended = waitpid(child, ret_status, WNOHANG)) != child) {
        if ((ended < 0 && errno != EINTR) || ep_now_ns() >= deadline_ns)
            return false;
        nanosleep(&backoff, NULL);
        if (backoff.tv_nsec < POLL_MS * 1000000)
            backoff.tv_nsec *= 2;
    }
    return true;
}

/* The pipe was closed before the answer was complete. */
static json_t *explain_end(pid_t child)
{
    char why[WHY_BYTES];
    int status;

    if (!end_child(child, &status)) {
        kill(child, SIGKILL);
        return cache_failure(SOURCE_FAILED, "ended without an answer");
    }
    if (WIFSIGNALED(status))
        snprintf(why, sizeof(why), "killed by signal %d (%s)", WTERMSIG(status), sigdescr_np(WTERMSIG(status)));
    else
        snprintf(why, sizeof(why), "ended with exit status %d and without an answer", WEXITSTATUS(status));
    return cache_failure(SOURCE_FAILED, why);
}

static json_t *parse_answer(const char *text, size_t bytes)
{
    json_t *document, *value;

    document = snapshot_is_bounded(text, bytes)
                   ? json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, NULL)
                   : NULL;
    value = document ? snapshot_decode(document) : NULL;
    json_decref(document);
    return value ? json_pack("{s:o}", "value", value) : cache_failure(SOURCE_FAILED, "the answer is malformed");
}

static json_t *read_answer(struct reader *reader, int deadline_ms)
{
    enum read_result result = read_exactly(reader, &reader->bytes, sizeof(reader->bytes));
    char why[WHY_BYTES];

    if (result == READ_COMPLETE && reader->bytes > ANSWER_MAX)
        return cache_failure(SOURCE_FAILED, "the answer is larger than 4 MiB");
    if (result == READ_COMPLETE && reader->bytes == 0)
        return cache_failure(SOURCE_FAILED, "the query has no answer here");
    if (result == READ_COMPLETE) {
        reader->text = malloc(reader->bytes);
        if (!reader->text)
            return NULL;
        result = read_exactly(reader, reader->text, reader->bytes);
    }
    switch (result) {
    case READ_COMPLETE:
        return parse_answer(reader->text, reader->bytes);
    case READ_CLOSED:
        return explain_end(reader->child);
    default:
        snprintf(why, sizeof(why), "no answer within %d ms", deadline_ms);
        return cache_failure(SOURCE_FAILED, why);
    }
}

static json_t *make_answer(json_t *(*query)(void *argument), void *argument, int deadline_ms)
{
    struct reader reader = {.deadline_ns = ep_deadline_ns(deadline_ms > 0 ? deadline_ms : 0)};
    pid_t parent = getpid();
    json_t *entry;
    int fds[2], status;

    if (pipe2(fds, O_CLOEXEC) < 0)
        return cache_failure_errno(errno);
    reader.child = fork();
    if (reader.child < 0) {
        entry = cache_failure_errno(errno);
        close(fds[0]);
        close(fds[1]);
        return entry;
    }
    if (reader.child == 0) {
        if (!prepare_child(fds[1], parent))
            _exit(3);
        run_child(query, argument);
    }
    close(fds[1]);
    reader.fd = fds[0];
    fcntl(reader.fd, F_SETFL, O_NONBLOCK);
    entry = read_answer(&reader, deadline_ms);
    close(reader.fd);
    free(reader.text);
    /* explain_end() has already waited for it if the pipe was closed; then the process number may be free. */
    if (waitpid(reader.child, &status, WNOHANG) == 0) {
        kill(reader.child, SIGKILL);
        end_child(reader.child, &status);
    }
    return entry;
}

struct source_answer source_query(struct source *source, const char *name, json_t *(*query)(void *argument),
                                  void *argument, int deadline_ms)
{
    struct source_answer answer = {0};
    const json_t *entry = cache_get(source, CACHE_ANSWERS, name);

    if (!entry) {
        source_set_current_path(source, name);
        entry = cache_put(source, CACHE_ANSWERS, name, make_answer(query, argument, deadline_ms));
        live_done(source);
    }
    answer.state = cache_state(entry, &answer.why);
    if (answer.state == SOURCE_OK)
        answer.value = json_object_get(entry, "value");
    return answer;
}
