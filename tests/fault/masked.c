/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EP_LL_MASK_DEAD: the victim dies, stops or leaves, and no call of the others fails. From the round after on its
 * tokens are missing and its experts contribute nothing, and all others say so of it and of nobody else.
 */
#include "fault.h"

#include <string.h>

enum { ROUNDS_AFTER = 3 };

/* EP_OK: all rounds are done, or the victim leaves. */
static ep_status run_rounds(struct life *life, bool *ret_leave)
{
    const struct track *track = life->cell->point->track;
    ep_status status = EP_OK;

    for (int round = 0; status == EP_OK && !*ret_leave && round <= life->cell->warm + ROUNDS_AFTER; round++) {
        /* Who is slow may still read, for the round before, what the victim takes along. */
        bool going = round == life->cell->warm || round == life->cell->warm - 1;

        life->traffic.going = going;
        life->traffic.gone = (going || round > life->cell->warm) && !life->victim ? life->cell->victim : -1;
        traffic_fill(&life->traffic);
        for (int i = 0; status == EP_OK && !*ret_leave && i < track->n_steps; i++)
            status = run_step(life, track->steps[i], round, ret_leave);
    }
    return status;
}

static void check_mask(struct life *life)
{
    int32_t masked[RANKS];

    if (ep_ll_get_mask(life->traffic.ll, masked) != EP_OK) {
        complain(life->seat, FLAW_WRONG, "ep_ll_get_mask: %s", ep_last_error());
        return;
    }
    for (int rank = 0; rank < RANKS; rank++)
        if (masked[rank] != (rank == life->cell->victim))
            complain(life->seat, masked[rank] ? FLAW_DEADLINE | FLAW_FOLLOWS : FLAW_WRONG, "rank %d is %smasked", rank,
                     masked[rank] ? "" : "not ");
}

void live_masked(struct life *life)
{
    uint64_t begin_ns = now_ns();
    bool leave = false;
    ep_status status;
    int took_ms;

    life->traffic.masking = true;
    status = traffic_step(&life->traffic, STEP_LL_NEW);
    if (status == EP_OK)
        status = run_rounds(life, &leave);
    /* What a rank sees that was masked while it stood still is not defined, except that it gets to the end. */
    if (life->victim)
        return;
    took_ms = (int)((now_ns() - begin_ns) / 1000000u);
    if (status != EP_OK)
        complain(life->seat, FLAW_FOLLOWS, "%s: %s", ep_status_name(status), ep_last_error());
    if (life->traffic.wrong[0])
        complain(life->seat, FLAW_FOLLOWS, "%s", life->traffic.wrong);
    if (took_ms > MARGIN_MS + (life->cell->fault == FAULT_STOP ? 2 * TIMEOUT_MS : 0))
        complain(life->seat, FLAW_SLOW, "the rounds took %d ms", took_ms);
    if (ep_comm_async_error(life->comm) != EP_OK)
        complain(life->seat, FLAW_FOLLOWS, "the communicator has failed: %s", ep_comm_last_error(life->comm));
    check_mask(life);
    go_on_without(life);
}
