/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_WATCH_WATCH_H
#define EP_WATCH_WATCH_H

#include "cmd/parse/parse.h"

#include <sys/types.h>

/* --- tail.c: the bytes of a log as they are written: standard input, a FIFO, or a file --- */

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

/* --- standing.c: where the runs of a growing log stand, in one line, and what is late --- */

#define LATE_S 10 /* without a line, before it is mentioned */

struct standing {
    bool is_over;     /* a run has begun, and all are complete */
    bool may_be_over; /* the same, but another case may follow */
    bool has_failed;  /* a line reports a failure */
    char where[200];  /* "test_internode: case 12 of 32" */
    char late[200];   /* "node-1 silent for 40 s"; "": none is */
};

/* Brings it up to date with the parser. */
void standing_update(struct standing *standing, struct parser *parser, uint64_t now_ns);

#endif
