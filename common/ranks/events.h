/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.h - reads the events of the ranks of a job. Each rank has its own pipe, so that long lines of different ranks
 * do not mix.
 */
#ifndef EP_COMMON_RANKS_EVENTS_H
#define EP_COMMON_RANKS_EVENTS_H

#include "ranks_internal.h"

struct rank_pipe {
    int fds[2]; /* -1 when closed */
    char *text;
    size_t used, room;
    bool finished; /* {"event":"exit"} was received */
    int code;
};

struct rank_reader {
    const struct ranks_spec *spec;
    ranks_event_fn on_event;
    void *context;
    struct rank_pipe *pipes; /* [nranks] */
    json_t *problems;
};

/* Opens the pipes. CMD_FINE, or CMD_FAILED after reporting why. rank_reader_done() is needed in both cases. */
int rank_reader_init(const struct ranks_spec *spec, ranks_event_fn on_event, void *context,
                     struct rank_reader *ret_reader);
void rank_reader_done(struct rank_reader *reader);

/* Reads what is available. True if the exit event of a rank was among it. */
bool rank_reader_read(struct rank_reader *reader, int rank);

/* Adds an error event to the problems of the job and passes it to on_event. Consumes the reference. */
void rank_reader_add_problem(struct rank_reader *reader, json_t *problem);

#endif
