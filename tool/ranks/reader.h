/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reader.h - what the ranks of a job say. One pipe a rank carries its events, so that long lines of different ranks
 * cannot mix; under mpirun one more carries what mpirun says on standard error.
 */
#ifndef EP_TOOL_RANKS_READER_H
#define EP_TOOL_RANKS_READER_H

#include "ranks_internal.h"

struct rank_pipe {
    int fds[2]; /* -1 when closed */
    char *text;
    size_t used, room;
    bool finished; /* the rank has said {"event":"exit"} */
    int code;
};

struct rank_reader {
    const struct ranks_spec *spec;
    ranks_event_fn on_event;
    void *context;
    struct rank_pipe *pipes; /* [nranks + 1]: the last one hears mpirun */
    json_t *problems;
    struct ranks_mpirun mpirun;
    bool is_quiet; /* mpirun has been told to end: what it says of that is not passed on */
};

/* Opens the pipes. CMD_FINE, or CMD_FAILED after reporting why; rank_reader_done() in both cases. */
int rank_reader_init(const struct ranks_spec *spec, ranks_event_fn on_event, void *context,
                     struct rank_reader *ret_reader);
void rank_reader_done(struct rank_reader *reader);

/* Reads what is there. True if a rank has said how it ended. */
bool rank_reader_read(struct rank_reader *reader, int index);

/* Adds a problem to those of the job, and tells of it as of an event. Consumes the reference. */
void rank_reader_add_problem(struct rank_reader *reader, json_t *problem);

#endif
