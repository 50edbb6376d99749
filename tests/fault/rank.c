/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program of a rank: the track until a call fails, the checks of that failure, the agreement with the others,
 * traffic in the new group, and the check for leftovers.
 */
#include "fault.h"

#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALL_RANKS = (1 << RANKS) - 1 };

static int ms_since(uint64_t begin_ns)
{
    return (int)((now_ns() - begin_ns) / 1000000u);
}

/* The first rank that a text names; -1: none. */
static int rank_named(const char *text)
{
    for (const char *at = strstr(text, "rank "); at; at = strstr(at + 1, "rank "))
        if (isdigit((unsigned char)at[5]))
            return atoi(at + 5);
    return -1;
}

static ep_status expected_status(const struct cell *cell)
{
    static const ep_status by_fault[FAULTS] = {[FAULT_KILL] = EP_E_PEER_DEAD,
                                               [FAULT_STOP] = EP_E_TIMEOUT,
                                               [FAULT_CRASH] = EP_E_PEER_DEAD,
                                               [FAULT_ABORT] = EP_E_ABORTED,
                                               [FAULT_EXIT] = EP_E_PEER_LEFT};

    return by_fault[cell->fault];
}

static unsigned survivors(const struct cell *cell)
{
    return cell->fault == FAULT_ABORT ? ALL_RANKS : ALL_RANKS & ~(1u << cell->victim);
}

static bool is_lowlatency(const struct rank_run *run)
{
    return run->cell->point->track->steps[0] == STEP_LL_NEW || run->cell->point->track->masking;
}

/* Notes that a rank without an injected fault was late for a whole deadline. */
static void note_deadline(struct rank_run *run, ep_status status, int named)
{
    uint64_t injected_ns = atomic_load(&run->table->injected_ns);
    bool early = !injected_ns || ms_since(injected_ns) < TIMEOUT_MS;

    if (status == EP_E_TIMEOUT && named >= 0 && (named != run->cell->victim || early))
        atomic_fetch_or(&run->context->flaws, FLAW_DEADLINE);
}

/* --- creation --------------------------------------------------------------------------------------------------- */

/* The bootstrap of the victim: injects the fault before its all-gather number `left`. */
struct counted_boot {
    const ep_boot *boot;
    int left;
};

static ep_status counted_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct counted_boot *counted = context;

    if (--counted->left == 0)
        inject_now();
    return counted->boot->allgather(counted->boot->context, mine, bytes, timeout_ms, ret_all);
}

static ep_status create(struct rank_run *run, const ep_boot *boot)
{
    const struct point *point = run->cell->point;
    struct counted_boot counted = {.boot = boot, .left = point->percent};
    ep_boot own = *boot;
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    config.backend = "host";
    config.timeout_ms = TIMEOUT_MS;
    config.ranks_per_node = RANKS / point->track->nnodes;
    config.network = point->track->linked ? linked_network : NULL;
    if (run->victim && point->step == STEP_NEW) {
        if (point->where == WHERE_BEFORE) {
            inject_now();
            if (run->cell->fault == FAULT_EXIT)
                return EP_E_PEER_LEFT;
        } else {
            own.allgather = counted_allgather;
            own.context = &counted;
        }
    }
    return ep_comm_new(&own, &config, &run->comm);
}

static void check_creation(struct rank_run *run, ep_status status, uint64_t begin_ns)
{
    bool in_time = ms_since(begin_ns) <= TIMEOUT_MS + MARGIN_MS;

    if (run->victim)
        return;
    if (status != EP_OK && rank_named(ep_last_error()) != run->cell->victim)
        note_deadline(run, status, rank_named(ep_last_error()));
    if (status != EP_E_TIMEOUT && !(status == EP_E_PEER_DEAD && run->cell->point->where == WHERE_MIDDLE))
        complain(run->context, FLAW_FOLLOWS, "ep_comm_new: %s", ep_status_name(status));
    if (status != EP_OK && rank_named(ep_last_error()) != run->cell->victim)
        complain(run->context, FLAW_FOLLOWS, "the text does not name rank %d: \"%s\"", run->cell->victim,
                 ep_last_error());
    if (!in_time)
        complain(run->context, FLAW_SLOW, "ep_comm_new took %d ms", ms_since(begin_ns));
}

/* --- the track until it fails ----------------------------------------------------------------------------------- */

static void prepare_injection(struct rank_run *run)
{
    const struct point *point = run->cell->point;
    void *memory = run->traffic.buffer[point->buffer].memory;
    size_t bytes = run->traffic.buffer[point->buffer].bytes;

    switch (point->where) {
    case WHERE_BEFORE:
        if (run->victim)
            inject_now();
        break;
    case WHERE_MIDDLE:
        if (run->victim)
            inject_trap(memory, bytes, run->cell->percent, run->cell->fault);
        break;
    case WHERE_WAITING:
        if (run->victim)
            inject_later(INJECT_MS * 1000);
        else
            sleep_us(LATE_MS * 1000);
        break;
    case WHERE_END:
        if (run->victim)
            inject_later(INJECT_MS * 1000);
        else
            inject_trap(memory, bytes, run->cell->percent, FAULT_DELAY);
        break;
    default:
        break;
    }
}

ep_status run_step(struct rank_run *run, enum step step, int round, bool *ret_leave)
{
    const struct cell *cell = run->cell;
    bool here = round == cell->warm && step == cell->point->step;
    bool concerned = here && (run->victim || run->late);
    ep_status status;

    *ret_leave = here && run->victim && cell->fault == FAULT_EXIT;
    if (concerned)
        prepare_injection(run);
    if (*ret_leave)
        return EP_OK;
    status = traffic_step(&run->traffic, step);
    if (concerned) {
        inject_join();
        inject_disarm();
    }
    return status;
}

/* EP_OK: the victim leaves. */
static ep_status run_track(struct rank_run *run)
{
    const struct track *track = run->cell->point->track;
    bool leave = false;

    for (int round = 0; round < run->cell->warm + 3; round++) {
        traffic_fill(&run->traffic);
        for (int i = 0; i < track->n_steps; i++) {
            ep_status status = run_step(run, track->steps[i], round, &leave);

            if (status != EP_OK || leave)
                return status;
        }
    }
    complain(run->context, FLAW_WRONG, "no call has failed");
    return EP_OK;
}

/* --- the failure ------------------------------------------------------------------------------------------------ */

static void check_text(struct rank_run *run)
{
    const char *text = ep_comm_last_error(run->comm);

    if (rank_named(text) != run->cell->victim)
        complain(run->context, FLAW_FOLLOWS, "the text does not name rank %d: \"%s\"", run->cell->victim, text);
    /* A rank that called ep_comm_abort() between two calls is told that it did. */
    if (!strchr(text, '"') && !(run->victim && run->cell->fault == FAULT_ABORT))
        complain(run->context, FLAW_WRONG, "the text names no phase: \"%s\"", text);
}

static void check_failure(struct rank_run *run, ep_status status)
{
    const struct cell *cell = run->cell;
    /* ep_ll_free() may have waited for the stopped reader before the call that fails. */
    int deadlines = cell->fault != FAULT_STOP ? 0 : is_lowlatency(run) ? 2 : 1;
    int limit_ms = LATE_MS + (deadlines ? MARGIN_MS + deadlines * TIMEOUT_MS : NOTICE_MS);
    uint64_t injected_ns = atomic_load(&run->table->injected_ns);
    int took_ms = ms_since(injected_ns);

    if (run->traffic.wrong[0])
        complain(run->context, FLAW_WRONG, "before the fault: %s", run->traffic.wrong);
    /* The victim sees its own failure differently: from the outside, or late. */
    if (run->victim && cell->fault == FAULT_STOP)
        return;
    note_deadline(run, status, rank_named(ep_comm_last_error(run->comm)));
    if (status != expected_status(cell))
        complain(run->context, FLAW_FOLLOWS, "%s: %s", ep_status_name(status), ep_comm_last_error(run->comm));
    if (!injected_ns)
        complain(run->context, FLAW_FOLLOWS, "%s before the fault was injected: %s", ep_status_name(status),
                 ep_comm_last_error(run->comm));
    else if (took_ms > limit_ms)
        complain(run->context, FLAW_SLOW, "the status came after %d ms", took_ms);
    if (ep_comm_async_error(run->comm) != status)
        complain(run->context, FLAW_WRONG, "ep_comm_async_error gives %s after %s",
                 ep_status_name(ep_comm_async_error(run->comm)), ep_status_name(status));
    check_text(run);
}

static void check_repeat(struct rank_run *run, const char *what, ep_status got, ep_status expected, uint64_t begin_ns)
{
    int took_ms = ms_since(begin_ns);

    if (got != expected)
        complain(run->context, FLAW_WRONG, "%s gives %s after %s", what, ep_status_name(got), ep_status_name(expected));
    if (took_ms > AT_ONCE_MS)
        complain(run->context, FLAW_SLOW, "%s took %d ms on a failed communicator", what, took_ms);
}

/* Each later collective call returns the same status at once. */
static void check_repeats(struct rank_run *run, ep_status status)
{
    static const struct {
        enum step step;
        const char *name;
        bool plan;
    } calls[] = {
        {STEP_BARRIER, "ep_comm_barrier", false},
        {STEP_GATHER, "ep_comm_allgather", false},
        {STEP_DISPATCH, "ep_dispatch", true},
        {STEP_COMBINE, "ep_combine", true},
        {STEP_ASYNC_DISPATCH, "ep_dispatch in a stream", true},
        {STEP_PLAN, "ep_plan_new", false},
    };
    void *memory;
    uint64_t begin_ns;

    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        if (calls[i].plan && !run->traffic.plan)
            continue;
        begin_ns = now_ns();
        check_repeat(run, calls[i].name, traffic_step(&run->traffic, calls[i].step), status, begin_ns);
    }
    begin_ns = now_ns();
    check_repeat(run, "ep_alloc", ep_alloc(run->comm, 64, &memory), status, begin_ns);
    if (!(run->victim && run->cell->fault == FAULT_STOP))
        check_text(run);
}

/* --- the new group ---------------------------------------------------------------------------------------------- */

/* Of the victim it is known what happened to it, or at least that it has ended; of the others nothing. */
static void check_failed(struct rank_run *run)
{
    int32_t failed[RANKS];
    ep_status status = ep_comm_get_failed(run->comm, failed);

    if (run->victim && run->cell->fault == FAULT_STOP)
        return;
    if (status != EP_OK)
        complain(run->context, FLAW_WRONG, "ep_comm_get_failed: %s: %s", ep_status_name(status), ep_last_error());
    for (int rank = 0; status == EP_OK && rank < RANKS; rank++) {
        bool ended = failed[rank] == EP_E_PEER_DEAD && run->cell->fault == FAULT_EXIT;

        if (rank == run->cell->victim ? failed[rank] != (int32_t)expected_status(run->cell) && !ended
                                      : failed[rank] != EP_OK)
            complain(run->context, FLAW_FOLLOWS, "ep_comm_get_failed gives %s for rank %d",
                     ep_status_name((ep_status)failed[rank]), rank);
    }
}

/* EP_E_EXCLUDED: the others go on without this rank. */
static ep_status create_next(struct rank_run *run, unsigned gone)
{
    const struct track *track = run->cell->point->track;
    unsigned members = regroup_agree(&run->table->regroup, 1, ALL_RANKS & ~gone);
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    struct regroup_boot boot;
    int32_t all[RANKS];
    int n = 0;

    if (members != survivors(run->cell))
        complain(run->context, FLAW_FOLLOWS, "the ranks of the new group are %#x", members);
    if (!(members >> run->rank & 1))
        return EP_E_EXCLUDED;
    config.backend = "host";
    config.timeout_ms = 3 * TIMEOUT_MS; /* a rank may come a deadline later than the first */
    config.network = track->linked ? linked_network : NULL;
    regroup_boot(&run->table->regroup, 1, run->rank, RANKS / track->nnodes, &boot);
    TRY(ep_comm_new(&boot.boot, &config, &run->next));
    TRY(ep_comm_allgather(run->next, &run->rank, sizeof(run->rank), all));
    for (int rank = 0; rank < RANKS; rank++)
        if (members >> rank & 1 && all[n++] != rank)
            complain(run->context, FLAW_WRONG, "rank %d of the new group was %d", n - 1, all[n - 1]);
    return EP_OK;
}

static void free_old(struct rank_run *run)
{
    traffic_done(&run->traffic);
    ep_comm_free(run->comm);
    run->comm = NULL;
}

static void use_new_group(struct rank_run *run)
{
    static const enum step lowlatency[] = {STEP_LL_NEW, STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE};
    struct traffic traffic = {0};
    ep_status status = traffic_init(&traffic, run->next);

    for (int i = 0; status == EP_OK && i < 2; i++)
        status = traffic_round_trip(&traffic);
    for (size_t i = 0; status == EP_OK && is_lowlatency(run) && i < sizeof(lowlatency) / sizeof(lowlatency[0]); i++)
        status = traffic_step(&traffic, lowlatency[i]);
    if (status == EP_OK)
        status = ep_comm_barrier(traffic.comm);
    if (status == EP_E_TIMEOUT)
        atomic_fetch_or(&run->context->flaws, FLAW_DEADLINE);
    if (status != EP_OK)
        complain(run->context, FLAW_FOLLOWS, "the new group: %s: %s", ep_status_name(status), ep_last_error());
    if (traffic.wrong[0])
        complain(run->context, FLAW_WRONG, "the new group: %s", traffic.wrong);
    traffic_done(&traffic);
}

void continue_without(struct rank_run *run, unsigned gone)
{
    int limit_ms = MARGIN_MS + LATE_MS + (run->cell->fault == FAULT_STOP ? 3 * TIMEOUT_MS : 0);
    bool stopped = run->victim && run->cell->fault == FAULT_STOP;
    uint64_t begin_ns = now_ns();
    ep_status status = create_next(run, gone);

    if (stopped) {
        if (status != EP_E_EXCLUDED)
            complain(run->context, FLAW_FOLLOWS, "the stopped rank goes on");
        return;
    }
    if (status == EP_E_EXCLUDED || status == EP_E_TIMEOUT)
        atomic_fetch_or(&run->context->flaws, FLAW_DEADLINE);
    if (status != EP_OK)
        complain(run->context, FLAW_FOLLOWS, "ep_comm_new: %s: %s", ep_status_name(status), ep_last_error());
    if (ms_since(begin_ns) > limit_ms)
        complain(run->context, FLAW_SLOW, "ep_comm_new took %d ms", ms_since(begin_ns));
    if (status != EP_OK)
        return;
    atomic_store(&run->context->state, RANK_AGREED);
    if (run->cell->free_early)
        free_old(run);
    use_new_group(run);
}

/* --- all of it -------------------------------------------------------------------------------------------------- */

static void live(struct rank_run *run, const ep_boot *boot)
{
    uint64_t begin_ns = now_ns();
    ep_status status = create(run, boot);

    if (run->cell->point->step == STEP_NEW) {
        check_creation(run, status, begin_ns);
        return;
    }
    if (status == EP_OK)
        status = traffic_init(&run->traffic, run->comm);
    if (status != EP_OK) {
        note_deadline(run, status, rank_named(ep_last_error()));
        complain(run->context, FLAW_FOLLOWS, "creation: %s: %s", ep_status_name(status), ep_last_error());
        return;
    }
    inject_set_comm(run->comm);
    if (run->cell->point->track->masking) {
        run_masked(run);
        return;
    }
    status = run_track(run);
    if (status == EP_OK)
        return;
    check_failure(run, status);
    check_repeats(run, status);
    check_failed(run);
    continue_without(run, regroup_failed(run->comm, ALL_RANKS));
}

int rank_main(struct table *table, const ep_boot *boot)
{
    struct rank_run run = {.table = table,
                           .cell = &table->cell,
                           .context = &table->ranks[boot->rank],
                           .rank = boot->rank,
                           .victim = boot->rank == table->cell.victim,
                           .late = boot->rank == late_rank(&table->cell)};
    struct resources before = count_resources();
    char why[128];

    if (run.victim)
        inject_init(table, table->cell.fault);
    live(&run, boot);
    if (run.comm)
        free_old(&run);
    ep_comm_free(run.next);
    if (!check_resources(&before, why, sizeof(why)))
        complain(run.context, FLAW_WRONG, "left behind: %s", why);
    atomic_store(&run.context->state, RANK_DONE);
    return run.context->complaint[0] != '\0';
}
