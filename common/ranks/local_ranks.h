/* SPDX-License-Identifier: Apache-2.0 */
/*
 * local_ranks.h - starts ranks on this host, as forked processes or as threads, for the tests and the command. Engines
 * start their own processes and provide a bootstrap.
 */
#ifndef EP_COMMON_RANKS_LOCAL_RANKS_H
#define EP_COMMON_RANKS_LOCAL_RANKS_H

#include <epkit/boot.h>

/* The program of a rank. In fork mode its result is the exit code of the rank (0..255). */
typedef int (*ep_rank_fn)(const ep_boot *boot, void *argument);

enum { EP_LAUNCH_FORK = 0, EP_LAUNCH_THREADS = 1 };

typedef struct ep_launch_args {
    size_t size;  /* EP_LAUNCH_ARGS_INIT sets it */
    int32_t mode; /* EP_LAUNCH_* */
    int32_t nranks;
    ep_rank_fn run;
    void *argument;     /* shared by threads, copied by fork */
    int32_t timeout_ms; /* fork: children that still run then are killed; 0: no limit, required for threads */
    int32_t reserved;   /* 0 */
} ep_launch_args;

#define EP_LAUNCH_ARGS_INIT EP_INIT(ep_launch_args)

/* How one rank ended. */
typedef struct ep_rank_exit {
    int32_t code;   /* result of the rank's program, -1 if it did not return */
    int32_t signal; /* the signal that killed it, 0 if none */
    int32_t late;   /* 1: killed by the launcher at the deadline */
} ep_rank_exit;

/*
 * Runs nranks ranks and waits for all of them. Returns EP_OK if all of them ran to completion, whatever their codes;
 * ret_exits [nranks] says how each ended. EP_E_PEER_DEAD if a rank was killed, EP_E_TIMEOUT if ranks were killed at the
 * deadline; ret_exits is filled in both cases. After any other error no rank runs any more, and ret_exits is not
 * written.
 *
 * The bootstrap knows the processes of all ranks, also of those that have not joined an all-gather yet: if one dies,
 * the all-gather fails at once, and if a thread returns without joining, it fails with EP_E_PEER_LEFT.
 *
 * Fork mode. Children are killed when the calling thread ends, also by SIGKILL of the launcher (PR_SET_PDEATHSIG).
 * stdout and stderr are inherited. stdio is flushed before the fork and at the end of a rank, which exits by _exit()
 * without atexit handlers. A result outside of 0..255 counts as 255. Other threads of the caller may use the library
 * meanwhile, but one that blocks in a stdio call delays the flush. EP_E_STATE if the process ignores SIGCHLD, because
 * exit codes cannot be read then. Other children of the caller are not reaped.
 *
 * Threads mode. A rank cannot be killed, so timeout_ms must be 0.
 */
ep_status ep_launch(const ep_launch_args *args, ep_rank_exit *ret_exits);

#endif
