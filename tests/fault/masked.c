/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EP_LL_MASK_DEAD: the victim dies, stops or leaves, and no call of the others fails. From the next round on its tokens
 * are missing and its experts contribute nothing, and all others report this rank as masked, and no other.
 */
#include "fault.h"

#include <string.h>

enum { ROUNDS_AFTER = 3 };

/* EP_OK: all rounds are done, or the victim leaves. */
static ep_status run_rounds(struct rank_run *run, bool *ret_leave)
{
    const struct track *track = run->cell->point->track;
    ep_status status = EP_OK;

    for (int round = 0; status == EP_OK && !*ret_leave && round <= run->cell->warm + ROUNDS_AFTER; round++) {
        /* A slow rank may still read, in the round before, memory that is freed with the victim. */
        bool going = round == run->cell->warm || round == run->cell->warm - 1;

        run->traffic.dying = going;
        run->traffic.dead_rank = (going || round > run->cell->warm) && !run->victim ? run->cell->victim : -1;
        traffic_fill(&run->traffic);
        for (int i = 0; status == EP_OK && !*ret_leave && i < track->n_steps; i++)
            status = run_step(run, track->steps[i], round, ret_leave);
    }
    return status;
}

/* Returns the mask. */
static unsigned check_mask(struct rank_run *run)
{
    int32_t masked[RANKS];
    unsigned mask = 0;

    if (ep_ll_get_mask(run->traffic.ll, masked) != EP_OK) {
        complain(run->context, FLAW_WRONG, "ep_ll_get_mask: %s", ep_last_error());
        return 0;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        mask |= masked[rank] ? 1u << rank : 0;
        if (masked[rank] != (rank == run->cell->victim))
            complain(run->context, masked[rank] ? FLAW_DEADLINE | FLAW_FOLLOWS : FLAW_WRONG, "rank %d is %smasked",
                     rank, masked[rank] ? "" : "not ");
    }
    return mask;
}

void run_masked(struct rank_run *run)
{
    uint64_t begin_ns = now_ns();
    bool leave = false;
    ep_status status;
    int took_ms;

    run->traffic.masking = true;
    status = traffic_step(&run->traffic, STEP_LL_NEW);
    if (status == EP_OK)
        status = run_rounds(run, &leave);
    /* The results of a rank that was masked while it was stopped are undefined, except that it completes. */
    if (run->victim)
        return;
    took_ms = (int)((now_ns() - begin_ns) / 1000000u);
    if (status != EP_OK)
        complain(run->context, FLAW_FOLLOWS, "%s: %s", ep_status_name(status), ep_last_error());
    if (run->traffic.wrong[0])
        complain(run->context, FLAW_FOLLOWS, "%s", run->traffic.wrong);
    if (took_ms > MARGIN_MS + (run->cell->fault == FAULT_STOP ? 2 * TIMEOUT_MS : 0))
        complain(run->context, FLAW_SLOW, "the rounds took %d ms", took_ms);
    if (ep_comm_async_error(run->comm) != EP_OK)
        complain(run->context, FLAW_FOLLOWS, "the communicator has failed: %s", ep_comm_last_error(run->comm));
    continue_without(run, check_mask(run));
}
