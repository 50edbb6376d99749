/* SPDX-License-Identifier: Apache-2.0 */
#include "local_ranks.h"

#include "base/clock.h"
#include "boot/rank_ends.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define POLL_US 1000

struct group {
    ep_launch_args args;
    ep_boot_shm *rendezvous;
    ep_boot boots[EP_MAX_RANKS];
    ep_rank_exit *exits;
    bool returned[EP_MAX_RANKS]; /* the program of the rank has returned or called exit() */
    pid_t pids[EP_MAX_RANKS];    /* 0: reaped, or never started */
};

/* --- fork --- */

static _Noreturn void run_child(const struct group *group, int rank, pid_t launcher)
{
    int code;

    /* After an earlier death of the launcher the child already has another parent. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != launcher)
        _exit(255);
    ep_boot_shm_note_start(group->rendezvous, rank);
    code = group->args.run(&group->boots[rank], group->args.argument);
    fflush(NULL);
    _exit(code >= 0 && code <= 255 ? code : 255);
}

/* Reaps the children that have ended; the number of the others. */
static int reap(struct group *group, bool killed)
{
    int left = 0;

    for (int rank = 0; rank < group->args.nranks; rank++) {
        ep_rank_exit *mine = &group->exits[rank];
        int how = 0;

        if (!group->pids[rank])
            continue;
        if (waitpid(group->pids[rank], &how, WNOHANG) <= 0) {
            left++;
            continue;
        }
        group->pids[rank] = 0;
        group->returned[rank] = WIFEXITED(how);
        *mine = (ep_rank_exit){.code = WIFEXITED(how) ? WEXITSTATUS(how) : -1,
                               .signal = WIFSIGNALED(how) ? WTERMSIG(how) : 0};
        mine->late = killed && mine->signal == SIGKILL;
        ep_boot_shm_note_end(group->rendezvous, rank);
    }
    return left;
}

/* After the deadline it still reaps once: a child that ended in time does not count as killed. */
static void wait_for_children(struct group *group, uint64_t deadline_ns)
{
    while (reap(group, false) > 0 && ep_now_ns() < deadline_ns)
        usleep(POLL_US);
    for (int rank = 0; rank < group->args.nranks; rank++)
        if (group->pids[rank])
            kill(group->pids[rank], SIGKILL);
    while (reap(group, true) > 0)
        usleep(POLL_US);
}

static ep_status run_forked(struct group *group)
{
    pid_t launcher = getpid();

    /* Otherwise the children would write the buffered data again. */
    fflush(NULL);
    for (int rank = 0; rank < group->args.nranks; rank++) {
        pid_t pid = fork();

        if (pid == 0)
            run_child(group, rank, launcher);
        if (pid < 0) {
            int reason = errno;

            wait_for_children(group, 0);
            return ep_fail_errno(EP_E_SYSTEM, reason, "ep_launch: fork of rank %d", rank);
        }
        group->pids[rank] = pid;
    }
    wait_for_children(group, group->args.timeout_ms ? ep_deadline_ns(group->args.timeout_ms) : UINT64_MAX);
    return EP_OK;
}

/* --- threads --- */

struct thread {
    pthread_t id;
    struct group *group;
    int rank;
};

static void *thread_main(void *context)
{
    const struct thread *thread = context;
    struct group *group = thread->group;

    group->exits[thread->rank].code = group->args.run(&group->boots[thread->rank], group->args.argument);
    group->returned[thread->rank] = true;
    ep_boot_shm_note_return(group->rendezvous, thread->rank);
    return NULL;
}

static ep_status run_threads(struct group *group)
{
    struct thread *threads = calloc((size_t)group->args.nranks, sizeof(*threads));
    ep_status status = threads ? EP_OK : ep_fail(EP_E_MEMORY, "ep_launch: no memory for the threads");
    int started = 0;

    while (status == EP_OK && started < group->args.nranks) {
        struct thread *thread = &threads[started];
        int reason;

        *thread = (struct thread){.group = group, .rank = started};
        group->exits[started] = (ep_rank_exit){.code = -1};
        reason = pthread_create(&thread->id, NULL, thread_main, thread);
        if (reason)
            status = ep_fail_errno(EP_E_SYSTEM, reason, "ep_launch: pthread_create of rank %d", started);
        else
            started++;
    }
    /* The started ranks fail at once, instead of waiting for the others. */
    for (int rank = started; rank < group->args.nranks; rank++)
        ep_boot_shm_note_return(group->rendezvous, rank);
    for (int rank = 0; rank < started; rank++)
        pthread_join(threads[rank].id, NULL);
    free(threads);
    return status;
}

/* --- both --- */

/* A death is reported first: it is the cause of the late ranks. */
static ep_status classify_exits(const struct group *group)
{
    int n_late = 0;

    for (int rank = 0; rank < group->args.nranks; rank++) {
        const ep_rank_exit *mine = &group->exits[rank];

        n_late += mine->late;
        if (mine->signal && !mine->late)
            return ep_fail(EP_E_PEER_DEAD, "ep_launch: rank %d was killed by signal %d (%s)", rank, mine->signal,
                           strsignal(mine->signal));
        if (!mine->late && !group->returned[rank])
            return ep_fail(EP_E_PEER_DEAD, "ep_launch: rank %d did not return", rank);
    }
    if (n_late)
        return ep_fail(EP_E_TIMEOUT, "ep_launch: %d of %d ranks still ran after %d ms and were killed", n_late,
                       group->args.nranks, group->args.timeout_ms);
    return EP_OK;
}

ep_status ep_launch(const ep_launch_args *args, ep_rank_exit *ret_exits)
{
    struct group *group = calloc(1, sizeof(*group));
    ep_status status;

    if (!group)
        return ep_fail(EP_E_MEMORY, "ep_launch: no memory for %d ranks", args->nranks);
    group->args = *args;
    group->exits = ret_exits;
    status = ep_boot_shm_new(args->nranks, &group->rendezvous);
    for (int rank = 0; status == EP_OK && rank < args->nranks; rank++)
        status = ep_boot_shm_join(group->rendezvous, rank, &group->boots[rank]);
    if (status == EP_OK)
        status = args->mode == EP_LAUNCH_FORK ? run_forked(group) : run_threads(group);
    if (status == EP_OK)
        status = classify_exits(group);
    ep_boot_shm_free(group->rendezvous);
    free(group);
    return status;
}
