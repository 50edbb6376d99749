/* SPDX-License-Identifier: Apache-2.0 */
/*
 * process.h - which process is which, and whether another one still lives.
 *
 * There are three answers: it lives, it is dead, or not known. /proc decides nothing by being silent: hidepid,
 * another user, another PID namespace and a folder without /proc all look like a process that is not there.
 */
#ifndef EP_BASE_PROCESS_H
#define EP_BASE_PROCESS_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

/* What a process sends its peers about itself. Plain data: send it by any means. */
struct ep_process_id {
    char host[40];           /* the kernel's boot id: the same in all containers of a host; "": not known here */
    uint64_t key;            /* random; the same key is the same process, whatever PID namespaces say */
    uint64_t pid_namespace;  /* inode; 0: not known here */
    uint64_t time_namespace; /* inode; 0: not known here */
    uint64_t start;          /* field 22 of /proc/PID/stat, which shows that a number was reused; 0: not known here */
    int32_t pid;             /* in its own PID namespace */
    int32_t unused;
};

/* Another process as this one can see it. All zero with pidfd = -1: nothing is known of it. */
struct ep_process {
    int pidfd;      /* -1: none */
    int32_t pid;    /* in this PID namespace; 0: not visible here */
    uint64_t start; /* 0: not comparable here */
};

enum ep_process_state { EP_PROCESS_ALIVE = 0, EP_PROCESS_DEAD, EP_PROCESS_UNKNOWN };

/* This process, which may have been forked since the last call. Async-signal-safe after the first call. */
EP_PRIVATE_API void ep_process_get_self(struct ep_process_id *ret_id);

/* Process `pid` of this PID namespace, a child of this one: without a key. */
void ep_process_get_child(int32_t pid, struct ep_process_id *ret_id);

/*
 * A number that a forked child does not share with its parent, however it was forked. Never 0. Any thread;
 * async-signal-safe after the first call.
 */
EP_PRIVATE_API uint64_t ep_process_generation(void);

/*
 * Takes up to one descriptor, which watches the process. EP_OK also where the kernel or a sandbox has no pidfd, or
 * where the process is not visible: `ret_process` then holds less. EP_E_SYSTEM when there is no descriptor left.
 */
EP_PRIVATE_API ep_status ep_process_open(const struct ep_process_id *id, struct ep_process *ret_process);
EP_PRIVATE_API void ep_process_close(struct ep_process *process);

/* Never blocks; async-signal-safe. EP_PROCESS_DEAD is certain. */
EP_PRIVATE_API enum ep_process_state ep_process_look(const struct ep_process *process);

/* For one check of a process that is not watched, on whatever host it is. */
EP_PRIVATE_API enum ep_process_state ep_process_look_once(const struct ep_process_id *id);

/* /proc shows this PID namespace, so /proc/PID is the process that this one means by PID. */
bool ep_process_proc_is_ours(void);

#endif
