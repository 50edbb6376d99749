/* SPDX-License-Identifier: Apache-2.0 */
/* New groups of the ranks, in the middle of a sequence. */
#include "sequence.h"

#include <string.h>
#include <unistd.h>

/* The new communicators replace the old ones, which are still usable until then. */
static bool shrink(struct rank_state *state, struct pair *pair)
{
    ep_comm *comms[BOTH];

    if (draw(&state->dice, 2))
        TRY(compare(state, pair));
    for (int i = 0; i < BOTH; i++) {
        ep_net_emulate(i == TESTED && !state->sequence->tcp ? &state->sequence->emulation : NULL);
        CALL(state, ep_comm_shrink(pair->comms[i], NULL, &comms[i]));
        track(state, comms[i], true);
    }
    TRY(check(state, pair));
    TRY(slot_dispatch(state, &pair->slots[0], any_queue(state, pair)));
    TRY(compare(state, pair));
    TRY(close_pair(state, pair));
    memset(pair, 0, sizeof(*pair));
    memcpy(pair->comms, comms, sizeof(comms));
    return open_objects(state, pair);
}

/* One rank leaves; the others continue without it. */
static bool leave(struct rank *rank)
{
    struct rank_state *state = &rank->state;
    struct pair *pair = &rank->pairs[0];
    int leaver = draw(&state->dice, state->nranks);
    ep_comm *comms[BOTH];

    TRY(close_pair(state, &rank->pairs[1]));
    TRY(check(state, pair));
    TRY(close_objects(state, pair));
    if (state->rank == leaver) {
        rank->left = true;
        for (int i = 0; i < BOTH; i++) {
            track(state, pair->comms[i], false);
            ep_comm_free(pair->comms[i]);
        }
        return true;
    }
    for (int i = 0; i < BOTH; i++) {
        CALL(state, ep_comm_shrink(pair->comms[i], NULL, &comms[i]));
        track(state, comms[i], true);
        track(state, pair->comms[i], false);
        ep_comm_free(pair->comms[i]);
    }
    state->nranks--;
    state->rank -= state->rank > leaver;
    memset(pair, 0, sizeof(*pair));
    memcpy(pair->comms, comms, sizeof(comms));
    return open_objects(state, pair);
}

/* One rank aborts the tested communicator while work is queued. The ranks continue with new ones. */
static bool recover(struct rank_state *state, struct pair *pair)
{
    int aborter = draw(&state->dice, state->nranks), n = draw(&state->dice, 8);
    ep_comm *comms[BOTH];

    TRY(compare(state, pair));
    for (int i = 0; i < n; i++) {
        if (!draw_own(&state->dice, 3))
            TRY(hold_queue(state, pair));
        TRY(call(state, pair));
    }
    TRY(publication_barrier(state));
    if (state->rank == aborter)
        ep_comm_abort(pair->comms[TESTED]);
    TRY(publication_barrier(state));
    /* It has been called, but it has to arrive at the other nodes. */
    while (ep_comm_async_error(pair->comms[TESTED]) == EP_OK)
        usleep(100);
    for (int i = 0; i < QUEUES; i++) {
        ep_status status = ep_stream_sync(pair->comms[TESTED], pair->queues[i]);

        if (status != EP_E_ABORTED)
            return fail(state, "after an abort: %s: %s", ep_status_name(status), ep_last_error());
    }
    state->broken = true;
    TRY(close_objects(state, pair));
    state->broken = false;
    for (int i = 0; i < BOTH; i++) {
        ep_net_emulate(i == TESTED && !state->sequence->tcp ? &state->sequence->emulation : NULL);
        CALL(state, ep_comm_shrink(pair->comms[i], NULL, &comms[i]));
        track(state, comms[i], true);
        track(state, pair->comms[i], false);
        ep_comm_free(pair->comms[i]);
    }
    memset(pair, 0, sizeof(*pair));
    memcpy(pair->comms, comms, sizeof(comms));
    return open_objects(state, pair);
}

bool change_group(struct rank *rank)
{
    struct rank_state *state = &rank->state;
    struct pair *second = &rank->pairs[1];
    bool complete = state->nranks == state->sequence->nranks;

    switch (draw(&state->dice, 5)) {
    case 0:
        /* The networks divide the remaining ranks of several nodes in different ways. */
        return state->nranks < 3 || rank->pairs[0].nnodes > 1 || leave(rank);
    case 1:
        return shrink(state, &rank->pairs[0]);
    case 2:
        return recover(state, &rank->pairs[0]);
    default:
        if (second->open)
            return close_pair(state, second);
        return !complete || open_pair(rank, second);
    }
}
