/* SPDX-License-Identifier: Apache-2.0 */
/*
 * process.h - identity and liveness of processes.
 *
 * A process is alive, dead, or its state is unknown. A missing entry in /proc proves nothing: with hidepid, another
 * user, another PID namespace or an unmounted /proc, a live process has none either.
 */
#ifndef EP_BASE_PROCESS_H
#define EP_BASE_PROCESS_H

#include "base/error.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Identity of a process, sent to its peers. Plain data: send it by any means. */
struct ep_process_id {
    char host[40];           /* the kernel's boot ID: the same in all containers of a host; "": unknown */
    uint64_t key;            /* random; the same key is the same process, in any PID namespace */
    uint64_t pid_namespace;  /* inode; 0: unknown */
    uint64_t time_namespace; /* inode; 0: unknown */
    uint64_t start;          /* field 22 of /proc/PID/stat, to detect a reused PID; 0: unknown */
    int32_t pid;             /* in its own PID namespace */
    int32_t unused;
};

/* Another process as visible from this one. All zero with pidfd = -1: nothing is known. */
struct ep_process {
    int pidfd;      /* -1: none */
    int32_t pid;    /* in this PID namespace; 0: not visible here */
    uint64_t start; /* 0: not comparable here */
};

enum ep_process_state { EP_PROCESS_ALIVE = 0, EP_PROCESS_DEAD, EP_PROCESS_UNKNOWN };

/* Also correct if this process was forked since the last call. Async-signal-safe after the first call. */
EP_PRIVATE_API void ep_process_get_self(struct ep_process_id *ret_id);

/*
 * The key of this process, which a forked child does not share with its parent, however it was forked. Never 0. Any
 * thread; async-signal-safe after the first call.
 */
EP_PRIVATE_API uint64_t ep_process_generation(void);

/*
 * First member of a struct that exists once in a process. A forked child makes its own: another thread of the parent
 * may have held the lock at the fork, and no thread of the child would ever release it.
 */
struct ep_process_own {
    uint64_t generation; /* of the process that made it */
    pthread_mutex_t lock;
    struct ep_process_own *inherited; /* that of the parent, never read: kept reachable for leak checkers */
};

/*
 * That of this process: *current, or, if that is NULL or the parent's, a new one of `bytes`, zeroed. init(): NULL, or
 * sets its other members; what it makes may be dropped. NULL: no memory.
 */
void *ep_process_get_own(_Atomic(struct ep_process_own *) *current, size_t bytes, void (*init)(void *own));

/*
 * Opens at most one descriptor, a pidfd. EP_OK also if the kernel or a sandbox has no pidfd, or if the process is not
 * visible: fields of *ret_process are then unset. EP_E_SYSTEM if there is no descriptor left.
 */
EP_PRIVATE_API ep_status ep_process_open(const struct ep_process_id *id, struct ep_process *ret_process);
EP_PRIVATE_API void ep_process_close(struct ep_process *process);

/* Never blocks; async-signal-safe. EP_PROCESS_DEAD is certain. */
EP_PRIVATE_API enum ep_process_state ep_process_probe(const struct ep_process *process);

/* One check of a process that is not opened; EP_PROCESS_UNKNOWN if it is on another host. */
enum ep_process_state ep_process_probe_once(const struct ep_process_id *id);

/* Does /proc show the PID namespace of this process? Only then is /proc/PID the process with that PID here. */
bool ep_process_proc_is_ours(void);

#endif
