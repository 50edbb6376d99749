/* SPDX-License-Identifier: Apache-2.0 */
/* local_ranks.h - starts ranks on this host for tests, as forked processes or as threads. */
#ifndef EP_TESTS_LOCAL_RANKS_H
#define EP_TESTS_LOCAL_RANKS_H

#include <epkit/boot.h>

/* The program of a rank. In fork mode its result is the exit code of the rank (0..255). */
typedef int (*ep_rank_fn)(const ep_boot *boot, void *argument);

enum { EP_LAUNCH_FORK = 0, EP_LAUNCH_THREADS = 1 };

typedef struct ep_launch_args {
    int32_t mode; /* EP_LAUNCH_* */
    int32_t nranks;
    ep_rank_fn run;
    void *argument;     /* shared by threads, copied by fork */
    int32_t timeout_ms; /* fork: children that still run then are killed; 0: no limit */
} ep_launch_args;

#define EP_LAUNCH_ARGS_INIT                                                                                            \
    {                                                                                                                  \
        .mode = EP_LAUNCH_FORK                                                                                         \
    }

/* How one rank ended. */
typedef struct ep_rank_exit {
    int32_t code;   /* result of the rank's program, -1 if it did not return */
    int32_t signal; /* the signal that killed it, 0 if none */
    int32_t late;   /* 1: killed at the deadline */
} ep_rank_exit;

/*
 * Runs nranks ranks and waits for all of them. EP_OK if all ran to completion, whatever their codes. EP_E_PEER_DEAD if
 * a rank was killed, EP_E_TIMEOUT if ranks were killed at the deadline. After any other error no rank runs any more.
 *
 * Children are killed when the calling thread ends. They share its stdout and stderr, and exit by _exit(). Other
 * children of the caller are not reaped.
 */
ep_status ep_launch(const ep_launch_args *args, ep_rank_exit *ret_exits);

#endif
