/* SPDX-License-Identifier: Apache-2.0 */
/*
 * query.c - questions that a library has to answer, asked in a child process.
 *
 * A driver library may hang in the kernel, crash, print, or leave threads and signal handlers behind. In a child all of
 * that is over at the deadline. The answer comes through a pipe: 8 bytes with its length, then JSON; so the parent
 * knows its end even where the child has started processes that keep the pipe open.
 */
#include "base/clock.h"
#include "source/state.h"

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
#define END_GRACE_MS 200 /* for a child to end after its answer, or when it was killed */
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

/* Nothing of the parent's is left to the library: descriptors, output, signal handlers, a core dump. */
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
    /* Above all of those that are about to be replaced. */
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

static bool write_all(const void *data, size_t bytes)
{
    const char *at = data;

    while (bytes > 0) {
        ssize_t n = write(PIPE_FD, at, bytes);

        if (n < 0 && errno != EINTR)
            return false;
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
        }
    }
    return true;
}

static void __attribute__((noreturn)) run_child(json_t *(*ask)(void *argument), void *argument)
{
    json_t *value = ask(argument), *encoded = value ? snapshot_encode(value) : NULL;
    char *text = encoded ? json_dumps(encoded, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    uint64_t bytes = text ? strlen(text) : 0;

    if (value && !text)
        _exit(2);
    _exit(write_all(&bytes, sizeof(bytes)) && write_all(text, bytes) ? 0 : 1);
}

/* --- in the parent --- */

struct hearing {
    pid_t child;
    int fd;
    uint64_t deadline_ns;
    uint64_t bytes; /* that the child has announced */
    char *text;
};

enum heard { HEARD_ALL, HEARD_END, HEARD_NOTHING_MORE };

/* Reads exactly `bytes`, until the deadline. */
static enum heard hear(const struct hearing *hearing, void *ret_data, size_t bytes)
{
    char *at = ret_data;

    while (bytes > 0) {
        struct pollfd poll_fd = {.fd = hearing->fd, .events = POLLIN};
        uint64_t now = ep_now_ns();
        ssize_t n;

        if (now >= hearing->deadline_ns)
            return HEARD_NOTHING_MORE;
        if (poll(&poll_fd, 1, (int)((hearing->deadline_ns - now + 999999) / 1000000)) <= 0)
            continue;
        n = read(hearing->fd, at, bytes);
        if (n == 0)
            return HEARD_END;
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return HEARD_END;
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
        }
    }
    return HEARD_ALL;
}

/*
 * Waits a moment for the child, which has been killed or is about to end. One that hangs in the kernel cannot die: it
 * is left behind, and init gets it when this process ends. False: its status is not known.
 */
static bool end_child(pid_t child, int *ret_status)
{
    uint64_t deadline_ns = ep_deadline_ns(END_GRACE_MS);
    struct timespec pause = {.tv_nsec = 200000};
    pid_t ended;

    while ((ended = waitpid(child, ret_status, WNOHANG)) != child) {
        if ((ended < 0 && errno != EINTR) || ep_now_ns() >= deadline_ns)
            return false;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < POLL_MS * 1000000)
            pause.tv_nsec *= 2;
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
    return value ? json_pack("{s:o}", "value", value) : cache_failure(SOURCE_FAILED, "the answer cannot be understood");
}

static json_t *hear_answer(struct hearing *hearing, int deadline_ms)
{
    enum heard heard = hear(hearing, &hearing->bytes, sizeof(hearing->bytes));
    char why[WHY_BYTES];

    if (heard == HEARD_ALL && hearing->bytes > ANSWER_MAX)
        return cache_failure(SOURCE_FAILED, "the answer is larger than 4 MiB");
    if (heard == HEARD_ALL && hearing->bytes == 0)
        return cache_failure(SOURCE_FAILED, "the question has no answer here");
    if (heard == HEARD_ALL) {
        hearing->text = malloc(hearing->bytes);
        if (!hearing->text)
            return NULL;
        heard = hear(hearing, hearing->text, hearing->bytes);
    }
    switch (heard) {
    case HEARD_ALL:
        return parse_answer(hearing->text, hearing->bytes);
    case HEARD_END:
        return explain_end(hearing->child);
    default:
        snprintf(why, sizeof(why), "no answer within %d ms", deadline_ms);
        return cache_failure(SOURCE_FAILED, why);
    }
}

static json_t *make_answer(json_t *(*ask)(void *argument), void *argument, int deadline_ms)
{
    struct hearing hearing = {.deadline_ns = ep_deadline_ns(deadline_ms > 0 ? deadline_ms : 0)};
    pid_t parent = getpid();
    json_t *entry;
    int fds[2], status;

    if (pipe2(fds, O_CLOEXEC) < 0)
        return cache_failure_errno(errno);
    hearing.child = fork();
    if (hearing.child < 0) {
        entry = cache_failure_errno(errno);
        close(fds[0]);
        close(fds[1]);
        return entry;
    }
    if (hearing.child == 0) {
        if (!prepare_child(fds[1], parent))
            _exit(3);
        run_child(ask, argument);
    }
    close(fds[1]);
    hearing.fd = fds[0];
    fcntl(hearing.fd, F_SETFL, O_NONBLOCK);
    entry = hear_answer(&hearing, deadline_ms);
    close(hearing.fd);
    free(hearing.text);
    /* explain_end() has waited for it already where the pipe was closed; then the number may belong to nobody. */
    if (waitpid(hearing.child, &status, WNOHANG) == 0) {
        kill(hearing.child, SIGKILL);
        end_child(hearing.child, &status);
    }
    return entry;
}

struct source_answer source_query(struct source *source, const char *name, json_t *(*ask)(void *argument),
                                  void *argument, int deadline_ms)
{
    struct source_answer answer = {0};
    const json_t *entry = cache_get(source, CACHE_ANSWERS, name);

    if (!entry) {
        source_set_current_path(source, name);
        entry = cache_put(source, CACHE_ANSWERS, name, make_answer(ask, argument, deadline_ms));
        live_done(source);
    }
    answer.state = cache_state(entry, &answer.why);
    if (answer.state == SOURCE_OK)
        answer.value = json_object_get(entry, "value");
    return answer;
}
