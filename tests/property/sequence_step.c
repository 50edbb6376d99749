/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of a sequence. */
#include "sequence.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STRAY_BYTES = 1 << 16, HOLD_US = 4000 };

ep_stream any_queue(struct rank_state *state, struct pair *pair)
{
    return pair->queues[draw_own(&state->dice, QUEUES)];
}

bool compare(struct rank_state *state, struct pair *pair)
{
    char what[80];

    for (int i = 0; i < LLS; i++)
        TRY(ll_finish_all(state, &pair->lls[i], any_queue(state, pair)));
    TRY(sync_queues(state, pair));
    for (int i = 0; i < SLOTS; i++) {
        const struct slot *slot = &pair->slots[i];

        snprintf(what, sizeof(what), "plan %d%s%s%s%s", i, slot->fixed ? ", fixed capacity" : "",
                 slot->expanded ? ", expanded" : "", slot->mask ? ", mask" : "",
                 slot->combine_flags ? ", by choice" : "");
        TRY(slot_compare(state, slot, what));
    }
    for (int i = 0; i < LLS; i++)
        TRY(ll_compare(state, &pair->lls[i], i ? "second ep_ll" : "first ep_ll"));
    return true;
}

bool check(struct rank_state *state, struct pair *pair)
{
    TRY(compare(state, pair));
    for (int i = 0; i < SLOTS; i++)
        slot_load(state, &pair->slots[i]);
    for (int i = 0; i < LLS; i++)
        ll_load(state, &pair->lls[i]);
    return true;
}

/* With the reference, a plan or an ep_ll. */
static bool check_one(struct rank_state *state, struct pair *pair)
{
    struct slot *slot = &pair->slots[draw(&state->dice, SLOTS)];
    struct ll *ll = &pair->lls[draw(&state->dice, LLS)];
    int number = (int)(ll->n_dispatches % EXCHANGES);

    TRY(check(state, pair));
    if (draw(&state->dice, 4)) {
        TRY(slot_dispatch(state, slot, any_queue(state, pair)));
        TRY(slot_combine(state, slot, any_queue(state, pair)));
        TRY(slot_metadata(state, pair->comms, slot, any_queue(state, pair)));
        TRY(compare(state, pair));
        return check_slot(state, pair->nnodes, slot);
    }
    TRY(ll_dispatch(state, ll, draw(&state->dice, 2), any_queue(state, pair)));
    TRY(ll_finish_all(state, ll, any_queue(state, pair)));
    TRY(ll_combine(state, ll, number, draw(&state->dice, 2), any_queue(state, pair)));
    TRY(compare(state, pair));
    return check_exchange(state, ll, number);
}

static bool replace(struct rank_state *state, struct pair *pair)
{
    struct slot *slot = &pair->slots[draw(&state->dice, SLOTS)];
    struct ll *ll = &pair->lls[draw(&state->dice, LLS)];

    if (draw(&state->dice, 3)) {
        if (draw(&state->dice, 2))
            TRY(sync_queues(state, pair));
        return slot_free(state, pair->comms, slot) && slot_new(state, pair->comms, pair->nnodes, slot);
    }
    TRY(ll_finish_all(state, ll, any_queue(state, pair)));
    if (draw(&state->dice, 2))
        TRY(sync_queues(state, pair));
    return ll_free(state, pair->comms, ll) && ll_new(state, pair->comms, ll);
}

static void write_block(void *context)
{
    const struct written *written = context;

    memset(written->at, UNTOUCHED, written->bytes);
}

/* ep_free() waits for this. */
static bool write_stray(struct rank_state *state, struct pair *pair, int which)
{
    struct written *written = &pair->written[which];

    *written = (struct written){pair->strays[which].block[TESTED].at, pair->strays[which].bytes};
    TRY(hold_queue(state, pair));
    CALL(state, ep_stream_call(pair->comms[TESTED], any_queue(state, pair), write_block, written));
    return true;
}

static bool change_stray(struct rank_state *state, struct pair *pair)
{
    int which = draw(&state->dice, STRAYS);

    pair->has_stray[which] = !pair->has_stray[which];
    if (!pair->has_stray[which] && pair->strays[which].block[TESTED].kind == SYMMETRIC)
        TRY(write_stray(state, pair, which));
    if (!pair->has_stray[which])
        return mirror_free(state, pair->comms, &pair->strays[which]);
    return mirror_new(state, pair->comms, "other memory", (size_t)draw_own(&state->dice, STRAY_BYTES), 1,
                      (enum memory)draw(&state->dice, MEMORIES), &pair->strays[which]);
}

static void *run_hold(void *context)
{
    struct hold *hold = context;

    usleep(hold->us);
    ep_event_signal(hold->event);
    return NULL;
}

bool hold_queue(struct rank_state *state, struct pair *pair)
{
    struct hold *hold = &pair->holds[pair->n_holds];

    if (pair->n_holds == HOLDS)
        return sync_queues(state, pair);
    hold->us = (unsigned)draw_own(&state->dice, HOLD_US);
    CALL(state, ep_event_new(pair->comms[TESTED], &hold->event));
    CALL(state, ep_stream_wait(pair->comms[TESTED], any_queue(state, pair), hold->event));
    if (pthread_create(&hold->thread, NULL, run_hold, hold) != 0)
        return fail(state, "no thread");
    pair->n_holds++;
    return true;
}

/* What changes no result. */
static bool disturb(struct rank_state *state, struct pair *pair)
{
    ep_comm *comm = pair->comms[TESTED];
    int which = 1 + draw_own(&state->dice, QUEUES - 1), is_done = 0;
    ep_event *event;

    switch (draw_own(&state->dice, 5)) {
    case 0:
        CALL(state, ep_event_record(comm, any_queue(state, pair), &event));
        CALL(state, ep_stream_wait(comm, any_queue(state, pair), event));
        if (draw_own(&state->dice, 2)) {
            CALL(state, ep_event_wait(event, -1));
            CALL(state, ep_event_query(event, &is_done));
            if (!is_done)
                return fail(state, "an event that was waited for is not complete");
        }
        ep_event_free(event);
        return true;
    case 1:
        usleep((unsigned)draw_own(&state->dice, HOLD_US));
        return true;
    case 2:
        ep_queue_free(pair->queues[which]);
        CALL(state, ep_queue_new(comm, &pair->queues[which]));
        return true;
    case 3:
        CALL(state, ep_stream_sync(comm, any_queue(state, pair)));
        return true;
    default:
        return hold_queue(state, pair);
    }
}

/* A child that uses nothing of its parent, or tries to. */
static bool fork_child(struct rank_state *state, struct pair *pair)
{
    bool tries = draw_own(&state->dice, 2);
    int status = 0;
    pid_t child;

    if (draw_own(&state->dice, 3))
        return true;
    child = fork();
    if (child == 0) {
        bool ok = !tries || ep_comm_barrier(pair->comms[TESTED]) == EP_E_STATE;

        if (tries) {
            ep_dispatch_args args = slot_dispatch_args(&pair->slots[0], TESTED);

            ok = ok && ep_dispatch(pair->slots[0].plan[TESTED], &args, NULL) == EP_E_STATE;
            ep_plan_free(pair->slots[0].plan[TESTED]);
            ep_ll_free(pair->lls[0].ll[TESTED]);
            ep_queue_free(pair->queues[1]);
            ep_comm_free(pair->comms[TESTED]);
        }
        _exit(ok ? 0 : 1);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        return fail(state, "a forked child ended with the status %d", status);
    return true;
}

static bool gather(struct rank_state *state, struct pair *pair)
{
    uint64_t mine[40], all[MAX_RANKS * 40];
    size_t n = (size_t)draw(&state->dice, 41);

    switch (draw(&state->dice, 3)) {
    case 0:
        CALL(state, ep_comm_barrier(pair->comms[TESTED]));
        return true;
    case 1:
        CALL(state, ep_barrier_on(pair->comms[TESTED], any_queue(state, pair)));
        return true;
    default:
        break;
    }
    for (size_t i = 0; i < n; i++)
        mine[i] = random_at(state->sequence->seed + (uint64_t)(state->step * MAX_RANKS + state->rank), i);
    CALL(state, ep_comm_allgather(pair->comms[TESTED], mine, n * 8, all));
    for (size_t i = 0; i < n * (size_t)state->nranks; i++)
        if (all[i] != random_at(state->sequence->seed + (uint64_t)state->step * MAX_RANKS + i / n, i % n))
            return fail(state, "all-gather: word %zu of rank %zu", i % n, i / n);
    return true;
}

static bool query(struct rank_state *state, struct pair *pair)
{
    const struct slot *slot = &pair->slots[draw(&state->dice, SLOTS)];

    if (draw(&state->dice, 2) || slot->updated || (slot->fixed && !slot->dispatched))
        return slot->updated || slot_compare_info(state, slot);
    if (slot->fixed)
        TRY(sync_queues(state, pair));
    return slot_compare_sources(state, slot);
}

bool call(struct rank_state *state, struct pair *pair)
{
    struct slot *slot = &pair->slots[draw(&state->dice, SLOTS)];
    ep_stream stream = any_queue(state, pair);
    int lot = draw(&state->dice, 20), routing = draw(&state->dice, ROUTINGS);

    if (lot < 5)
        return slot_dispatch(state, slot, stream);
    if (lot < 9)
        return slot_combine(state, slot, stream);
    if (lot < 10)
        return slot_echo(state, pair->comms[TESTED], slot, stream);
    if (lot < 11)
        return slot_snapshot(state, pair->comms[TESTED], slot, stream);
    if (lot < 12)
        return slot_metadata(state, pair->comms, slot, stream);
    if (lot < 14)
        return !slot->fixed || slot_update(state, slot, routing, stream);
    if (lot < 15)
        return !slot->fixed || slot_once(state, pair->comms, slot, routing, stream);
    return ll_step(state, pair->comms[TESTED], &pair->lls[draw(&state->dice, LLS)], stream);
}

/* --- the program of a rank --------------------------------------------------------------------------------------- */

static bool run_step(struct rank *rank)
{
    struct rank_state *state = &rank->state;
    struct pair *pair = &rank->pairs[rank->pairs[1].open ? draw(&state->dice, PAIRS) : 0];
    int lot = draw(&state->dice, 200);

    if (lot < 5)
        return change_group(rank);
    if (lot < 15)
        return replace(state, pair);
    if (lot < 22)
        return check(state, pair);
    if (lot < 42)
        return check_one(state, pair);
    if (lot < 56)
        return disturb(state, pair);
    if (lot < 66)
        return refused_call(state, pair->comms, &pair->slots[draw(&state->dice, SLOTS)],
                            &pair->lls[draw(&state->dice, LLS)]);
    if (lot < 71)
        return capacity_call(state, pair->comms, &pair->slots[draw(&state->dice, SLOTS)], any_queue(state, pair));
    if (lot < 73)
        return values_call(state, pair->comms, &pair->slots[draw(&state->dice, SLOTS)], any_queue(state, pair));
    if (lot < 78)
        return change_stray(state, pair);
    if (lot < 80)
        return fork_child(state, pair);
    if (lot < 86)
        return gather(state, pair);
    if (lot < 91)
        return query(state, pair);
    return call(state, pair);
}

static bool run_steps(struct rank *rank)
{
    struct rank_state *state = &rank->state;

    TRY(open_pair(rank, &rank->pairs[0]));
    for (state->step = 0; state->step < state->sequence->steps && !rank->left; state->step++)
        TRY(run_step(rank));
    if (rank->left)
        return true;
    for (int i = 0; i < PAIRS; i++)
        if (rank->pairs[i].open && draw(&state->dice, 2))
            TRY(check(state, &rank->pairs[i]));
    return close_pair(state, &rank->pairs[0]) && close_pair(state, &rank->pairs[1]);
}

int run_sequence(const ep_boot *boot, void *argument)
{
    const struct sequence *sequence = argument;
    struct rank *rank = calloc(1, sizeof(*rank));
    ep_boot base = EP_BOOT_INIT;
    bool ok;

    if (!rank)
        return 1;
    rank->state = (struct rank_state){
        .sequence = sequence, .rank = boot->rank, .nranks = boot->nranks, .first_rank = boot->rank, .step = -1};
    rank->state.dice.shared.key = random_key(sequence->seed, 1, 0, 0);
    rank->state.dice.own.key = random_key(sequence->seed, 2, (uint64_t)boot->rank, 0);
    ok = passed(&rank->state, ep_boot_shm_join(sequence->base_boot, boot->rank, &base), "ep_boot_shm_join");
    rank->boots[TESTED] = boot;
    rank->boots[BASE] = &base;
    rank->members = (1u << boot->nranks) - 1;
    ok = ok && run_steps(rank);
    /* After an error threads may still use what it has. */
    if (ok) {
        copies_free(&rank->state);
        free(rank);
    }
    return !ok;
}
