/* SPDX-License-Identifier: Apache-2.0 */
#include "local_ranks.h"

#include "base/args.h"
#include "base/clock.h"
#include "base/fd.h"
#include "boot/launcher.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define EP_ARGS_LAST_ep_launch_args reserved

#define NO_DEADLINE UINT64_MAX

/* Poll interval of children without a pidfd. */
#define POLL_NS 10000000u

/* A process that SIGKILL does not end within this time hangs in the kernel, and is left to init. */
#define KILL_GRACE_MS 10000

struct group {
    ep_launch_args args;
    ep_boot_shm *rendezvous;
    ep_boot boots[EP_MAX_RANKS];
    ep_rank_exit exits[EP_MAX_RANKS];
    bool returned[EP_MAX_RANKS]; /* the program of the rank has returned or called exit() */
    pid_t pids[EP_MAX_RANKS];    /* 0: reaped, or never started */
    int pidfds[EP_MAX_RANKS];    /* -1: none */
};

/* --- fork --- */

static _Noreturn void run_child(const struct group *group, int rank, pid_t launcher)
{
    int code;

    /* The signal is sent only for deaths after prctl(); after an earlier death, the child already has another parent.
     */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != launcher)
        _exit(255);
    ep_boot_shm_note_start(group->rendezvous, rank);
    code = group->args.run(&group->boots[rank], group->args.argument);
    fflush(NULL);
    _exit(code >= 0 && code <= 255 ? code : 255);
}

/* Sleeps until a child has ended, for `ns` at most, or POLL_NS if a child has no pidfd. Callers check again. */
static void wait_for_children(const struct group *group, uint64_t ns)
{
    struct pollfd polls[EP_MAX_RANKS];
    struct timespec span;
    nfds_t n = 0;

    for (int rank = 0; rank < group->args.nranks; rank++) {
        if (!group->pids[rank])
            continue;
        if (group->pidfds[rank] < 0 && ns > POLL_NS)
            ns = POLL_NS;
        polls[n++] = (struct pollfd){.fd = group->pidfds[rank], .events = POLLIN};
    }
    span = ep_timespec(ns);
    if (ppoll(polls, n, &span, NULL) >= 0 || errno == EINTR)
        return;
    /* ppoll() fails for more descriptors than RLIMIT_NOFILE allows now. */
    span = (struct timespec){.tv_nsec = ns > POLL_NS ? POLL_NS : (long)ns};
    nanosleep(&span, NULL);
}

/* The child is reaped, or no longer ours. */
static void remove_child(struct group *group, int rank)
{
    if (group->pidfds[rank] >= 0)
        close(group->pidfds[rank]);
    group->pidfds[rank] = -1;
    group->pids[rank] = 0;
}

static void record_exit(struct group *group, int rank, int how, bool killed)
{
    ep_rank_exit *mine = &group->exits[rank];

    *mine = (ep_rank_exit){.code = -1};
    group->returned[rank] = WIFEXITED(how);
    if (WIFEXITED(how))
        mine->code = WEXITSTATUS(how);
    else
        mine->signal = WTERMSIG(how);
    mine->late = killed && mine->signal == SIGKILL;
    ep_boot_shm_note_end(group->rendezvous, rank);
    remove_child(group, rank);
}

/* Reaps only this child, if it has ended. */
static ep_status reap(struct group *group, int rank, bool killed)
{
    pid_t pid = group->pids[rank], got;
    int how = 0;

    do
        got = waitpid(pid, &how, WNOHANG);
    while (got < 0 && errno == EINTR);
    if (got == pid)
        record_exit(group, rank, how, killed);
    if (got < 0 && errno == ECHILD) {
        remove_child(group, rank); /* the PID may belong to another process by now */
        return ep_fail(EP_E_STATE, "ep_launch: another thread of this process has waited for rank %d (process %d)",
                       rank, (int)pid);
    }
    if (got < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "ep_launch: waitpid for rank %d (process %d)", rank, (int)pid);
    return EP_OK;
}

/*
 * Reaps children until the deadline, in the order in which they end, because others may wait for a rank that has died.
 * Returns at the first error; with `killed`, when all have ended.
 */
static ep_status reap_all(struct group *group, uint64_t deadline_ns, bool killed)
{
    ep_status status = EP_OK;

    for (;;) {
        uint64_t now = ep_now_ns();
        int left = 0;

        for (int rank = 0; rank < group->args.nranks; rank++) {
            ep_status mine = group->pids[rank] ? reap(group, rank, killed) : EP_OK;

            left += group->pids[rank] != 0;
            if (status == EP_OK)
                status = mine;
        }
        if (!left || now >= deadline_ns || (status != EP_OK && !killed))
            return status;
        wait_for_children(group, deadline_ns - now);
    }
}

/* Kills and reaps the remaining children. */
static ep_status kill_children(struct group *group)
{
    ep_status status;

    for (int rank = 0; rank < group->args.nranks; rank++)
        if (group->pids[rank])
            kill(group->pids[rank], SIGKILL);
    status = reap_all(group, ep_deadline_ns(KILL_GRACE_MS), true);
    for (int rank = 0; status == EP_OK && rank < group->args.nranks; rank++)
        if (group->pids[rank])
            status = ep_fail(EP_E_SYSTEM, "ep_launch: rank %d (process %d) still exists %d ms after SIGKILL", rank,
                             (int)group->pids[rank], KILL_GRACE_MS);
    return status;
}

/* After a failure with its text recorded: ends the started children, and returns the first failure. */
static ep_status give_up(struct group *group, ep_status status)
{
    char text[EP_ERROR_TEXT_BYTES];

    snprintf(text, sizeof(text), "%s", ep_last_error());
    kill_children(group);
    return ep_fail(status, "%s", text);
}

static ep_status check_sigchld(void)
{
    struct sigaction action;

    if (sigaction(SIGCHLD, NULL, &action) == 0 && (action.sa_handler == SIG_IGN || (action.sa_flags & SA_NOCLDWAIT)))
        return ep_fail(EP_E_STATE,
                       "ep_launch: SIGCHLD is ignored in this process, so the exit codes of the ranks would "
                       "be lost: set it to SIG_DFL");
    return EP_OK;
}

static ep_status run_forked(struct group *group)
{
    uint64_t deadline_ns = group->args.timeout_ms ? ep_deadline_ns(group->args.timeout_ms) : NO_DEADLINE;
    pid_t launcher = getpid();
    ep_status status;

    EP_TRY(check_sigchld());
    /* Otherwise the children would write the buffered data again. */
    fflush(NULL);
    for (int rank = 0; rank < group->args.nranks; rank++) {
        pid_t pid = fork();

        if (pid == 0)
            run_child(group, rank, launcher);
        if (pid < 0)
            return give_up(group, ep_fail_errno(EP_E_SYSTEM, errno, "ep_launch: fork of rank %d", rank));
        group->pids[rank] = pid;
        group->pidfds[rank] = -1;
    }
    /* After the last fork, so that no child inherits the pidfds of others. */
    for (int rank = 0; rank < group->args.nranks; rank++)
        group->pidfds[rank] = ep_fd_above_stdio((int)syscall(SYS_pidfd_open, group->pids[rank], 0));
    /* After the deadline it still checks each child once: one that ended in time does not count as killed. */
    status = reap_all(group, deadline_ns, false);
    if (status != EP_OK)
        return give_up(group, status);
    return kill_children(group);
}

/* --- threads --- */

enum gate_state { GATE_SHUT = 0, GATE_OPEN, GATE_CANCELLED };

/* Either all ranks start or none: a rank without the others would wait for them until its own deadline. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum gate_state state;
};

struct thread {
    pthread_t id;
    struct group *group;
    struct gate *gate;
    int rank;
};

static void *thread_main(void *context)
{
    struct thread *thread = context;
    struct gate *gate = thread->gate;
    struct group *group = thread->group;
    enum gate_state state;

    pthread_mutex_lock(&gate->lock);
    while (gate->state == GATE_SHUT)
        pthread_cond_wait(&gate->changed, &gate->lock);
    state = gate->state;
    pthread_mutex_unlock(&gate->lock);
    if (state == GATE_OPEN) {
        group->exits[thread->rank].code = group->args.run(&group->boots[thread->rank], group->args.argument);
        group->returned[thread->rank] = true;
        ep_boot_shm_note_return(group->rendezvous, thread->rank);
    }
    return NULL;
}

static ep_status run_threads(struct group *group)
{
    struct gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct thread *threads = calloc((size_t)group->args.nranks, sizeof(*threads));
    ep_status status = EP_OK;
    int started, error = 0;

    if (!threads)
        return ep_fail(EP_E_MEMORY, "ep_launch: no memory for %d threads", group->args.nranks);
    for (started = 0; started < group->args.nranks; started++) {
        threads[started] = (struct thread){.group = group, .gate = &gate, .rank = started};
        group->exits[started].code = -1;
        error = pthread_create(&threads[started].id, NULL, thread_main, &threads[started]);
        if (error) {
            status = ep_fail_errno(EP_E_SYSTEM, error, "ep_launch: pthread_create of rank %d", started);
            break;
        }
    }
    pthread_mutex_lock(&gate.lock);
    gate.state = status == EP_OK ? GATE_OPEN : GATE_CANCELLED;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
    for (int rank = 0; rank < started; rank++)
        pthread_join(threads[rank].id, NULL);
    free(threads);
    return status;
}

/* --- both --- */

/* A death is reported first: it is the cause of the late ranks. */
static ep_status classify_exits(const struct group *group)
{
    int late = -1, n_late = 0;

    for (int rank = 0; rank < group->args.nranks; rank++) {
        const ep_rank_exit *mine = &group->exits[rank];

        if (mine->late) {
            late = n_late++ ? late : rank;
            continue;
        }
        if (mine->signal)
            return ep_fail(EP_E_PEER_DEAD, "ep_launch: rank %d was killed by signal %d (%s)", rank, mine->signal,
                           strsignal(mine->signal));
        if (!group->returned[rank])
            return ep_fail(EP_E_PEER_DEAD, "ep_launch: rank %d did not return", rank);
    }
    if (n_late)
        return ep_fail(EP_E_TIMEOUT, "ep_launch: %d of %d ranks still ran after %d ms and were killed, rank %d first",
                       n_late, group->args.nranks, group->args.timeout_ms, late);
    return EP_OK;
}

static ep_status check(const ep_launch_args *args)
{
    if (args->mode != EP_LAUNCH_FORK && args->mode != EP_LAUNCH_THREADS)
        return ep_fail(EP_E_ARG, "ep_launch: mode is %d, neither EP_LAUNCH_FORK nor EP_LAUNCH_THREADS", args->mode);
    if (args->nranks < 1 || args->nranks > EP_MAX_RANKS)
        return ep_fail(EP_E_ARG, "ep_launch: nranks is %d, not in 1..%d", args->nranks, EP_MAX_RANKS);
    if (!args->run)
        return ep_fail(EP_E_ARG, "ep_launch: run is NULL");
    if (args->timeout_ms < 0)
        return ep_fail(EP_E_ARG, "ep_launch: timeout_ms is %d", args->timeout_ms);
    if (args->timeout_ms && args->mode == EP_LAUNCH_THREADS)
        return ep_fail(EP_E_ARG, "ep_launch: timeout_ms needs EP_LAUNCH_FORK: a thread cannot be killed");
    if (args->reserved)
        return ep_fail(EP_E_ARG, "ep_launch: reserved is %d, not 0", args->reserved);
    return EP_OK;
}

ep_status ep_launch(const ep_launch_args *args, ep_rank_exit *ret_exits)
{
    struct group *group;
    ep_launch_args mine;
    ep_status status;

    if (!ret_exits)
        return ep_fail(EP_E_ARG, "ep_launch: ret_exits is NULL");
    EP_TRY(ep_args_load(&mine, sizeof(mine), EP_ARGS_FIRST_BYTES(ep_launch_args), args, "ep_launch: args"));
    EP_TRY(check(&mine));
    group = calloc(1, sizeof(*group));
    if (!group)
        return ep_fail(EP_E_MEMORY, "ep_launch: no memory for %d ranks", mine.nranks);
    group->args = mine;
    status = ep_boot_shm_new(mine.nranks, &group->rendezvous);
    for (int rank = 0; status == EP_OK && rank < mine.nranks; rank++)
        status = ep_boot_shm_join(group->rendezvous, rank, &group->boots[rank]);
    if (status == EP_OK)
        status = mine.mode == EP_LAUNCH_FORK ? run_forked(group) : run_threads(group);
    if (status == EP_OK) {
        memcpy(ret_exits, group->exits, (size_t)mine.nranks * sizeof(*ret_exits));
        status = classify_exits(group);
    }
    ep_boot_shm_free(group->rendezvous);
    free(group);
    return status;
}
