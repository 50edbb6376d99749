/* SPDX-License-Identifier: Apache-2.0 */
/* standing.h - where the runs of a growing log stand, in one line, and what is late. */
#ifndef EP_WATCH_STANDING_H
#define EP_WATCH_STANDING_H

#include "cmd/parse/parse.h"

#define LATE_S 10 /* without a line, before it is mentioned */

struct standing {
    bool is_over;     /* a run has begun, and all are complete */
    bool may_be_over; /* the same, but another case may follow */
    bool has_failed;  /* a line reports a failure */
    char where[200];  /* "test_internode: case 12 of 32" */
    char late[200];   /* "node-1 silent for 40 s"; "": none is */
};

/* Brings it up to date with the parser. false: out of memory. */
bool standing_update(struct standing *standing, struct parser *parser, uint64_t now_ns);

#endif
