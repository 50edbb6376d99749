/* SPDX-License-Identifier: Apache-2.0 */
/* A pair of communicators with everything on it. */
#include "sequence.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- errors ------------------------------------------------------------------------------------------------------ */

bool fail(struct rank_state *state, const char *format, ...)
{
    char text[600];
    va_list args;

    if (state->wrong)
        return false;
    state->wrong = true;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "seed %llu, step %d, rank %d of %d: %s\n", (unsigned long long)state->sequence->seed, state->step,
            state->rank, state->nranks, text);
    publication_abort(state->sequence->publication);
    for (size_t i = 0; i < sizeof(state->comms) / sizeof(state->comms[0]); i++)
        if (state->comms[i])
            ep_comm_abort(state->comms[i]);
    return false;
}

bool passed(struct rank_state *state, ep_status status, const char *what)
{
    return status == EP_OK || fail(state, "%.40s: %s: %s", what, ep_status_name(status), ep_last_error());
}

void track(struct rank_state *state, ep_comm *comm, bool add)
{
    for (size_t i = 0; i < sizeof(state->comms) / sizeof(state->comms[0]); i++)
        if (state->comms[i] == (add ? NULL : comm)) {
            state->comms[i] = add ? comm : NULL;
            return;
        }
}

/* --- a pair ------------------------------------------------------------------------------------------------------ */

bool open_objects(struct rank_state *state, struct pair *pair, ep_comm *const comms[BOTH])
{
    ep_comm_info info[BOTH] = {EP_COMM_INFO_INIT, EP_COMM_INFO_INIT};

    *pair = (struct pair){.comms = {comms[TESTED], comms[BASE]}};
    for (int i = 0; i < BOTH; i++)
        CALL(state, ep_comm_get_info(pair->comms[i], &info[i]));
    if (info[TESTED].nnodes != info[BASE].nnodes || info[TESTED].nranks != state->nranks ||
        info[BASE].nranks != state->nranks)
        return fail(state, "communicators of %d and %d ranks, %d and %d nodes", info[TESTED].nranks, info[BASE].nranks,
                    info[TESTED].nnodes, info[BASE].nnodes);
    pair->open = true;
    pair->nnodes = info[TESTED].nnodes;
    for (int i = 1; i < QUEUES; i++)
        CALL(state, ep_queue_new(pair->comms[TESTED], &pair->queues[i]));
    for (int i = 0; i < SLOTS; i++)
        TRY(slot_new(state, pair->comms, pair->nnodes, &pair->slots[i]));
    for (int i = 0; i < LLS; i++)
        TRY(ll_new(state, pair->comms, &pair->lls[i]));
    pair->noise = noise_start(pair->comms[TESTED], random_next(&state->dice.own));
    return true;
}

bool open_comms(struct rank *rank, ep_comm *ret_comms[BOTH])
{
    struct rank_state *state = &rank->state;
    const struct sequence *sequence = state->sequence;
    ep_comm_config config = sequence->config;

    config.ranks_per_node = state->nranks / sequence->nnodes;
    ep_net_emulate(sequence->tcp ? NULL : &sequence->emulation);
    config.network = sequence->nnodes > 1 && sequence->tcp ? "tcp" : NULL;
    CALL(state, ep_comm_new(rank->boots[TESTED], &config, &ret_comms[TESTED]));
    track(state, ret_comms[TESTED], true);
    ep_net_emulate(NULL);
    config.network = NULL;
    CALL(state, ep_comm_new(rank->boots[BASE], &config, &ret_comms[BASE]));
    track(state, ret_comms[BASE], true);
    return true;
}

bool open_pair(struct rank *rank, struct pair *pair)
{
    ep_comm *comms[BOTH];

    return open_comms(rank, comms) && open_objects(&rank->state, pair, comms);
}

void join_holds(struct pair *pair)
{
    for (int i = 0; i < pair->n_holds; i++) {
        pthread_join(pair->holds[i].thread, NULL);
        ep_event_free(pair->holds[i].event);
    }
    pair->n_holds = 0;
}

bool sync_queues(struct rank_state *state, struct pair *pair)
{
    for (int i = 0; i < QUEUES; i++)
        CALL(state, ep_stream_sync(pair->comms[TESTED], pair->queues[i]));
    join_holds(pair);
    return true;
}

bool close_objects(struct rank_state *state, struct pair *pair)
{
    int first = draw_own(&state->dice, 2);

    for (int i = 0; i < LLS && !state->broken; i++)
        TRY(ll_finish_all(state, &pair->lls[i], NULL));
    TRY(noise_stop(state, pair->noise));
    pair->noise = NULL;
    for (int i = 1; first && i < QUEUES; i++)
        ep_queue_free(pair->queues[i]);
    for (int i = 0; i < SLOTS; i++)
        TRY(slot_free(state, pair->comms, &pair->slots[i]));
    for (int i = 0; i < LLS; i++)
        TRY(ll_free(state, pair->comms, &pair->lls[i]));
    for (int i = 0; i < STRAYS; i++)
        if (pair->has_stray[i])
            TRY(mirror_free(state, pair->comms, &pair->strays[i]));
    memset(pair->has_stray, 0, sizeof(pair->has_stray));
    for (int i = 1; !first && i < QUEUES; i++)
        ep_queue_free(pair->queues[i]);
    join_holds(pair);
    return true;
}

static void count_call(void *context)
{
    ++*(int *)context;
}

/* ep_comm_free() waits for the work that is still queued. */
static bool free_comms(struct rank_state *state, ep_comm *const comms[BOTH])
{
    for (int i = 0; i < BOTH; i++) {
        int calls = 0, n = draw(&state->dice, 3);

        for (int k = 0; k < n; k++) {
            CALL(state, ep_barrier_on(comms[i], NULL));
            CALL(state, ep_stream_call(comms[i], NULL, count_call, &calls));
        }
        track(state, comms[i], false);
        ep_comm_free(comms[i]);
        if (calls != n)
            return fail(state, "ep_comm_free: %d of %d queued calls have run", calls, n);
    }
    return true;
}

bool close_pair(struct rank_state *state, struct pair *pair)
{
    if (!pair->open)
        return true;
    pair->open = false;
    return close_objects(state, pair) && free_comms(state, pair->comms);
}
