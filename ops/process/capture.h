/* SPDX-License-Identifier: Apache-2.0 */
/* capture.h - runs other programs side by side, each with a deadline, and keeps what they write. */
#ifndef EP_OPS_CAPTURE_H
#define EP_OPS_CAPTURE_H

#include "process/process.h"

#include <stddef.h>
#include <stdint.h>

#define CAPTURE_BYTES_MAX                                                                                              \
    (1u << 20) /* of one stream unless it says otherwise; what comes behind is read and dropped                        \
                */

struct capture_text {
    char *text; /* NUL-terminated; may hold more NULs */
    size_t bytes;
    bool cut;
};

struct capture {
    char *const *argv; /* for execvp(); ends with NULL; the caller's. NULL: `execute` runs in the child instead */
    process_become execute;
    const void *context; /* of `execute` */
    size_t bytes_max;    /* of one stream; 0: CAPTURE_BYTES_MAX */

    /* Afterwards: */
    int start_error; /* errno of starting it, 0 if it ran */
    bool late;       /* it was killed at its deadline */
    int status;      /* of waitpid(), if it ran and ended by itself */
    int64_t elapsed_ns;
    struct capture_text output, error; /* standard output and standard error */

    /* While it runs: */
    struct process process;
    int pidfd; /* -1: none, and the end is noticed by polling */
    uint64_t started_ns;
};

/*
 * Runs all of them, at most `width` at once, each for at most `timeout_ms`. Standard input is empty. Each is the leader
 * of a process group of its own, which is killed at the deadline, and dies with this process. `on_end` (may be NULL) is
 * called as each ends. 0, or -1 for lack of memory; then none is left running.
 */
int capture_run(struct capture *captures, int n, int width, int64_t timeout_ms,
                void (*on_end)(const struct capture *capture, void *context), void *context);

void capture_done(struct capture *capture);

#endif
