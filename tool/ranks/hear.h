/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hear.h - what the ranks of a job say. One pipe a rank carries its events, so that long lines of different ranks
 * cannot mix; under mpirun one more carries what mpirun says on standard error.
 */
#ifndef EP_TOOL_RANKS_HEAR_H
#define EP_TOOL_RANKS_HEAR_H

#include "ranks_internal.h"

struct listener {
    int fds[2]; /* -1 when closed */
    char *text;
    size_t used, room;
    bool finished; /* the rank has said {"event":"exit"} */
    int code;
};

struct hearing {
    const struct ranks_spec *spec;
    ranks_event_fn on_event;
    void *context;
    struct listener *listeners; /* [nranks + 1]: the last one hears mpirun */
    json_t *problems;
    struct ranks_mpirun mpirun;
    bool is_quiet; /* mpirun has been told to end: what it says of that is not passed on */
};

/* Opens the pipes. CMD_FINE, or CMD_FAILED after reporting why; hearing_done() in both cases. */
int hearing_init(const struct ranks_spec *spec, ranks_event_fn on_event, void *context, struct hearing *ret_hearing);
void hearing_done(struct hearing *hearing);

/* Reads what is there. True if a rank has said how it ended. */
bool hearing_read(struct hearing *hearing, int index);

/* Adds a problem to those of the job, and tells of it as of an event. Consumes the reference. */
void hearing_add_problem(struct hearing *hearing, json_t *problem);

#endif
