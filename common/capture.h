/* SPDX-License-Identifier: Apache-2.0 */
/* capture.h - runs other programs concurrently, each with a deadline, and keeps their output. */
#ifndef EP_COMMON_CAPTURE_H
#define EP_COMMON_CAPTURE_H

#include "child.h"

#include <stddef.h>
#include <stdint.h>

#define CAPTURE_BYTES_MAX (1u << 20) /* default limit of one stream; the rest is read and discarded */

struct capture_text {
    char *text; /* NUL-terminated; may contain NULs */
    size_t bytes;
    bool cut;
};

struct capture {
    char *const *argv; /* for execvp(); NULL-terminated; borrowed. NULL: the child runs `execute` instead */
    process_execute execute;
    const void *context;          /* argument of `execute` */
    size_t bytes_max;             /* limit of one stream; 0: CAPTURE_BYTES_MAX */
    bool (*is_interrupted)(void); /* when it returns true, the program is killed as at its deadline; NULL: never */

    /* Results: */
    int start_error;                   /* errno of the start; 0: it ran */
    bool late;                         /* killed at its deadline */
    int status;                        /* of waitpid(), if it ran and ended by itself */
    struct capture_text output, error; /* standard output and standard error */

    /* While it runs: */
    struct process process;
    int pidfd; /* -1: none; the end is found by polling */
    uint64_t started_ns;
};

/*
 * Runs all programs, at most `width` at once, each for at most `timeout_ms`. Standard input is empty. Each program
 * leads its own process group, which is killed at the deadline, and dies with this process. `on_end` (may be NULL) is
 * called when a program ends.
 */
void capture_run(struct capture *captures, int n, int width, int64_t timeout_ms,
                 void (*on_end)(const struct capture *capture, void *context), void *context);

void capture_done(struct capture *capture);

#endif
