/* SPDX-License-Identifier: Apache-2.0 */
/* tail.h - the bytes of a log as they are written: standard input, a FIFO, or a file that may be rotated or truncated.
 */
#ifndef EP_WATCH_TAIL_H
#define EP_WATCH_TAIL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct tail {
    const char *path; /* "-": standard input */
    int fd;           /* -1: there is no such file yet */
    bool is_pipe;
    off_t offset;
    dev_t device;
    ino_t inode;
};

enum tail_event {
    TAIL_BYTES,     /* *ret_n of them */
    TAIL_NOTHING,   /* none were written in this time */
    TAIL_END,       /* no process has the pipe open for writing any more */
    TAIL_REPLACED,  /* another file has its name now; it is read from its start */
    TAIL_TRUNCATED, /* it is shorter than what was read; it is read from its start */
    TAIL_ERROR      /* errno */
};

void tail_open(struct tail *tail, const char *path);
void tail_close(struct tail *tail);

/* Waits up to `wait_ms` for bytes. A signal ends the wait. */
enum tail_event tail_read(struct tail *tail, char *buffer, size_t bytes, int wait_ms, size_t *ret_n);

#endif
