/* SPDX-License-Identifier: Apache-2.0 */
/* New groups of the ranks, in the middle of a sequence. */
#include "sequence.h"

#include <string.h>
#include <unistd.h>

/* The new communicators replace the old ones, which are still usable until then. */
static bool renew(struct rank *rank, struct pair *pair)
{
    struct rank_state *state = &rank->state;
    ep_comm *comms[BOTH];

    if (draw(&state->dice, 2))
        TRY(compare(state, pair));
    TRY(open_comms(rank, comms));
    TRY(check(state, pair));
    TRY(slot_dispatch(state, &pair->slots[0], any_queue(state, pair)));
    TRY(compare(state, pair));
    TRY(close_pair(state, pair));
    return open_objects(state, pair, comms);
}

static bool open_again(struct rank *rank, struct pair *pair)
{
    ep_comm *comms[BOTH];

    for (int i = 0; i < BOTH; i++) {
        track(&rank->state, pair->comms[i], false);
        ep_comm_free(pair->comms[i]);
    }
    return open_comms(rank, comms) && open_objects(&rank->state, pair, comms);
}

/* One rank leaves; the others continue without it. */
static bool leave(struct rank *rank)
{
    struct rank_state *state = &rank->state;
    struct pair *pair = &rank->pairs[0];
    int leaver = draw(&state->dice, state->nranks);

    TRY(close_pair(state, &rank->pairs[1]));
    TRY(check(state, pair));
    TRY(close_objects(state, pair));
    for (int first = 0, n = 0; first < MAX_RANKS; first++)
        if (rank->members >> first & 1 && n++ == leaver) {
            rank->members &= ~(1u << first);
            break;
        }
    if (state->rank == leaver) {
        rank->left = true;
        for (int i = 0; i < BOTH; i++) {
            track(state, pair->comms[i], false);
            ep_comm_free(pair->comms[i]);
        }
        return true;
    }
    regroup_agree(state->sequence->regroup, ++rank->n_left, rank->members);
    regroup_boot(state->sequence->regroup, rank->n_left, state->first_rank, state->sequence->nranks, &rank->regrouped);
    rank->boots[TESTED] = rank->boots[BASE] = &rank->regrouped.boot;
    state->rank = rank->regrouped.boot.rank;
    state->nranks--;
    return open_again(rank, pair);
}

/* One rank aborts the tested communicator while work is queued. The ranks continue with new ones. */
static bool recover(struct rank *rank, struct pair *pair)
{
    struct rank_state *state = &rank->state;
    int aborter = draw(&state->dice, state->nranks), n = draw(&state->dice, 8);

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
    return open_again(rank, pair);
}

bool change_group(struct rank *rank)
{
    struct rank_state *state = &rank->state;
    struct pair *second = &rank->pairs[1];

    switch (draw(&state->dice, 5)) {
    case 0:
        return state->nranks < 3 || rank->pairs[0].nnodes > 1 || leave(rank);
    case 1:
        return renew(rank, &rank->pairs[0]);
    case 2:
        return recover(rank, &rank->pairs[0]);
    default:
        return second->open ? close_pair(state, second) : open_pair(rank, second);
    }
}
