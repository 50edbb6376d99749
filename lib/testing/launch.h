/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.h - start ranks on this host, as forked processes or as threads: for the tests and the command. Engines have
 * processes of their own and bring a boot.
 */
#ifndef EP_TESTING_LAUNCH_H
#define EP_TESTING_LAUNCH_H

#include <epkit/boot.h>

/* A rank's program. Its result is the rank's exit code (0..255) in fork mode. */
typedef int (*ep_rank_fn)(const ep_boot *boot, void *argument);

enum { EP_LAUNCH_FORK = 0, EP_LAUNCH_THREADS = 1 };

typedef struct ep_launch_args {
    size_t size;  /* EP_LAUNCH_ARGS_INIT sets it */
    int32_t mode; /* EP_LAUNCH_* */
    int32_t nranks;
    ep_rank_fn run;
    void *argument;     /* shared by threads, copied by fork */
    int32_t timeout_ms; /* fork: children that still run then are killed; 0: no limit, the only choice for threads */
    int32_t reserved;   /* 0 */
} ep_launch_args;

#define EP_LAUNCH_ARGS_INIT EP_INIT(ep_launch_args)

/* How one rank ended. */
typedef struct ep_rank_exit {
    int32_t code;   /* result of the rank's program, -1 if it did not return */
    int32_t signal; /* the signal that killed it, 0 if none */
    int32_t late;   /* 1: the launcher killed it at the deadline */
} ep_rank_exit;

/*
 * Runs nranks ranks and waits for all of them. Returns EP_OK when all of them ran to their end, whatever their codes;
 * ret_exits [nranks] says how each ended. Children die with the launcher, also when it is killed by SIGKILL
 * (PR_SET_PDEATHSIG); the calling thread must therefore outlive the call. stdout and stderr are inherited.
 *
 * The boot knows which processes are its ranks, also those that have not come to an all-gather yet: one that dies fails
 * the all-gather at once, and a thread that returns without having come is EP_E_PEER_LEFT.
 *
 * EP_E_PEER_DEAD when a rank was killed, EP_E_TIMEOUT when ranks were killed at the deadline; ret_exits is filled in
 * both cases. With any other error no rank runs any more and ret_exits is untouched. Fork mode: stdio is flushed before
 * the fork and at the end of a rank, which leaves by _exit() without running atexit handlers; a result outside of
 * 0..255 counts as 255; other threads of the caller may use the library meanwhile, but one that blocks inside a call of
 * stdio holds the flush up; EP_E_STATE if the process ignores SIGCHLD, because no exit code could be read then.
 * Children of the caller that are not ranks are left alone. Threads mode: a rank cannot be killed, so timeout_ms must
 * be 0.
 */
ep_status ep_launch(const ep_launch_args *args, ep_rank_exit *ret_exits);

#endif
