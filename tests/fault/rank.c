/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a rank: the track until a call fails, the checks of that failure, the shrink, traffic in the new group,
 * and the look at what is left.
 */
#include "fault.h"

#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

    return cell->point->step == STEP_SHRINK ? EP_E_PEER_DEAD : by_fault[cell->fault];
}

/* The rank whose failure the others must see in the first place. */
static int culprit(const struct cell *cell)
{
    return cell->point->step == STEP_SHRINK ? first_rank(cell) : cell->victim;
}

static int survivors(const struct cell *cell)
{
    if (cell->point->step == STEP_SHRINK)
        return RANKS - 2;
    return cell->fault == FAULT_ABORT ? RANKS : RANKS - 1;
}

static bool is_lowlatency(const struct life *life)
{
    return life->cell->point->track->steps[0] == STEP_LL_NEW || life->cell->point->track->masking;
}

/* A rank that nobody had struck when it had to come was late for a whole deadline, or was left out for that. */
static void note_deadline(struct life *life, ep_status status, int named)
{
    uint64_t struck_ns = atomic_load(&life->table->struck_ns);
    bool early = !struck_ns || ms_since(struck_ns) < TIMEOUT_MS;

    if (status == EP_E_EXCLUDED || (status == EP_E_TIMEOUT && named >= 0 && (named != culprit(life->cell) || early)))
        atomic_fetch_or(&life->seat->flaws, FLAW_DEADLINE);
}

/* --- creation --------------------------------------------------------------------------------------------------- */

/* The victim's boot: strikes before its all-gather number `left`. */
struct counted_boot {
    const ep_boot *boot;
    int left;
};

static ep_status counted_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct counted_boot *counted = context;

    if (--counted->left == 0)
        strike_now();
    return counted->boot->allgather(counted->boot->context, mine, bytes, timeout_ms, ret_all);
}

static ep_status create(struct life *life, const ep_boot *boot)
{
    const struct point *point = life->cell->point;
    struct counted_boot counted = {.boot = boot, .left = point->percent};
    ep_boot own = *boot;
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    config.backend = "host";
    config.timeout_ms = TIMEOUT_MS;
    config.ranks_per_node = RANKS / point->track->nnodes;
    config.network = point->track->linked ? linked_network : NULL;
    if (life->victim && point->step == STEP_NEW) {
        if (point->where == WHERE_BEFORE) {
            strike_now();
            if (life->cell->fault == FAULT_EXIT)
                return EP_E_PEER_LEFT;
        } else {
            own.allgather = counted_allgather;
            own.context = &counted;
        }
    }
    return ep_comm_new(&own, &config, &life->comm);
}

static void check_creation(struct life *life, ep_status status, uint64_t begin_ns)
{
    bool in_time = ms_since(begin_ns) <= TIMEOUT_MS + MARGIN_MS;

    if (life->victim)
        return;
    if (status != EP_OK && rank_named(ep_last_error()) != life->cell->victim)
        note_deadline(life, status, rank_named(ep_last_error()));
    if (status != EP_E_TIMEOUT && !(status == EP_E_PEER_DEAD && life->cell->point->where == WHERE_MIDDLE))
        complain(life->seat, FLAW_FOLLOWS, "ep_comm_new: %s", ep_status_name(status));
    if (status != EP_OK && rank_named(ep_last_error()) != life->cell->victim)
        complain(life->seat, FLAW_FOLLOWS, "the text does not name rank %d: \"%s\"", life->cell->victim,
                 ep_last_error());
    if (!in_time)
        complain(life->seat, FLAW_SLOW, "ep_comm_new took %d ms", ms_since(begin_ns));
}

/* --- the track until it fails ----------------------------------------------------------------------------------- */

static void prepare_strike(struct life *life)
{
    const struct point *point = life->cell->point;
    void *memory = life->traffic.buffer[point->buffer].memory;
    size_t bytes = life->traffic.buffer[point->buffer].bytes;

    switch (point->where) {
    case WHERE_BEFORE:
        if (life->victim)
            strike_now();
        break;
    case WHERE_MIDDLE:
        if (life->victim)
            strike_trap(memory, bytes, life->cell->percent, life->cell->fault);
        break;
    case WHERE_WAITING:
        if (life->victim)
            strike_later(STRIKE_MS * 1000);
        else
            sleep_us(LATE_MS * 1000);
        break;
    case WHERE_END:
        if (life->victim)
            strike_later(STRIKE_MS * 1000);
        else
            strike_trap(memory, bytes, life->cell->percent, FAULT_DELAY);
        break;
    default:
        break;
    }
}

ep_status run_step(struct life *life, enum step step, int round, bool *ret_leave)
{
    const struct cell *cell = life->cell;
    bool here = round == cell->warm && step == cell->point->step;
    bool concerned = here && (life->victim || life->late);
    ep_status status;

    *ret_leave = here && life->victim && cell->fault == FAULT_EXIT;
    if (life->first && round == cell->warm) {
        atomic_store(&life->table->struck_ns, now_ns());
        kill(getpid(), SIGKILL);
    }
    if (concerned)
        prepare_strike(life);
    if (*ret_leave)
        return EP_OK;
    status = traffic_step(&life->traffic, step);
    if (concerned) {
        strike_join();
        strike_disarm();
    }
    return status;
}

/* EP_OK: the victim leaves. */
static ep_status run_track(struct life *life)
{
    const struct track *track = life->cell->point->track;
    bool leave = false;

    for (int round = 0; round < life->cell->warm + 3; round++) {
        traffic_fill(&life->traffic);
        for (int i = 0; i < track->n_steps; i++) {
            ep_status status = run_step(life, track->steps[i], round, &leave);

            if (status != EP_OK || leave)
                return status;
        }
    }
    complain(life->seat, FLAW_WRONG, "no call has failed");
    return EP_OK;
}

/* --- the failure ------------------------------------------------------------------------------------------------ */

static void check_text(struct life *life)
{
    const char *text = ep_comm_last_error(life->comm);

    if (rank_named(text) != culprit(life->cell))
        complain(life->seat, FLAW_FOLLOWS, "the text does not name rank %d: \"%s\"", culprit(life->cell), text);
    /* Who has called ep_comm_abort() between two calls is told that it was itself. */
    if (!strchr(text, '"') && !(life->victim && life->cell->fault == FAULT_ABORT))
        complain(life->seat, FLAW_WRONG, "the text names no phase: \"%s\"", text);
}

static void check_failure(struct life *life, ep_status status)
{
    const struct cell *cell = life->cell;
    /* Of the low-latency objects, ep_ll_free() may have waited for the stopped reader before the call that fails. */
    int deadlines = cell->fault != FAULT_STOP ? 0 : is_lowlatency(life) ? 2 : 1;
    int limit_ms = LATE_MS + (deadlines ? MARGIN_MS + deadlines * TIMEOUT_MS : NOTICE_MS);
    uint64_t struck_ns = atomic_load(&life->table->struck_ns);
    int took_ms = ms_since(struck_ns);

    if (life->traffic.wrong[0])
        complain(life->seat, FLAW_WRONG, "before the fault: %s", life->traffic.wrong);
    /* The victim sees its own failure with other eyes: from the outside, or late. */
    if (life->victim && cell->fault == FAULT_STOP && cell->point->step != STEP_SHRINK)
        return;
    note_deadline(life, status, rank_named(ep_comm_last_error(life->comm)));
    if (status != expected_status(cell))
        complain(life->seat, FLAW_FOLLOWS, "%s: %s", ep_status_name(status), ep_comm_last_error(life->comm));
    if (!struck_ns)
        complain(life->seat, FLAW_FOLLOWS, "%s before anybody was struck: %s", ep_status_name(status),
                 ep_comm_last_error(life->comm));
    else if (took_ms > limit_ms)
        complain(life->seat, FLAW_SLOW, "the status came after %d ms", took_ms);
    if (ep_comm_async_error(life->comm) != status)
        complain(life->seat, FLAW_WRONG, "ep_comm_async_error gives %s after %s",
                 ep_status_name(ep_comm_async_error(life->comm)), ep_status_name(status));
    check_text(life);
}

static void check_repeat(struct life *life, const char *what, ep_status got, ep_status expected, uint64_t begin_ns)
{
    int took_ms = ms_since(begin_ns);

    if (got != expected)
        complain(life->seat, FLAW_WRONG, "%s gives %s after %s", what, ep_status_name(got), ep_status_name(expected));
    if (took_ms > AT_ONCE_MS)
        complain(life->seat, FLAW_SLOW, "%s took %d ms on a failed communicator", what, took_ms);
}

/* Each later collective call returns the same status at once. */
static void check_repeats(struct life *life, ep_status status)
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
        if (calls[i].plan && !life->traffic.plan)
            continue;
        begin_ns = now_ns();
        check_repeat(life, calls[i].name, traffic_step(&life->traffic, calls[i].step), status, begin_ns);
    }
    begin_ns = now_ns();
    check_repeat(life, "ep_alloc", ep_alloc(life->comm, 64, &memory), status, begin_ns);
    if (!(life->victim && life->cell->fault == FAULT_STOP))
        check_text(life);
}

/* --- the new group ---------------------------------------------------------------------------------------------- */

static void strike_in_shrink(struct life *life)
{
    const struct cell *cell = life->cell;

    if (cell->point->step != STEP_SHRINK)
        return;
    if (life->victim && cell->point->where == WHERE_BEFORE)
        strike_now();
    else if (life->victim)
        strike_later(cell->point->where == WHERE_ANY ? cell->delay_us : STRIKE_MS * 1000);
    else if (life->late && cell->point->where == WHERE_WAITING)
        sleep_us(LATE_MS * 1000);
}

/* Shrinks until the group has the members that it should have. */
static ep_status settle(struct life *life)
{
    ep_comm *comm = life->comm;
    ep_status status = EP_E_STATE;
    int32_t members[RANKS];

    for (int i = 0; i < TRIES; i++) {
        ep_comm_info info = {.size = sizeof(info)};
        ep_comm *next = NULL;

        status = ep_comm_shrink(comm, NULL, &next);
        if (life->victim)
            strike_join();
        /* Somebody has failed during the shrink: once more. */
        if (status == EP_E_PEER_DEAD || status == EP_E_TIMEOUT || status == EP_E_PEER_LEFT)
            continue;
        if (status != EP_OK)
            return status;
        life->newer[life->n_newer++] = comm = next;
        ep_comm_get_info(next, &info);
        status = ep_comm_allgather(next, &life->rank, sizeof(life->rank), members);
        if (status != EP_OK)
            continue;
        for (int r = 0; r < info.nranks; r++)
            if (r > 0 && members[r] <= members[r - 1])
                complain(life->seat, FLAW_WRONG, "rank %d of the new group was %d, rank %d was %d", r - 1,
                         members[r - 1], r, members[r]);
        if (info.nranks != survivors(life->cell) || members[info.rank] != life->rank)
            complain(life->seat, FLAW_FOLLOWS, "the new group has %d members", info.nranks);
        return EP_OK;
    }
    return status;
}

static void shrink(struct life *life, ep_status *ret_status)
{
    const struct cell *cell = life->cell;
    int limit_ms = MARGIN_MS + LATE_MS + (cell->fault == FAULT_STOP ? 3 * TIMEOUT_MS : 0);
    uint64_t begin_ns;

    strike_in_shrink(life);
    begin_ns = now_ns();
    *ret_status = settle(life);
    if (life->victim && cell->fault == FAULT_STOP) {
        /* The clock ran on while the victim stood still, when it stood still in the shrink. */
        if (*ret_status == EP_OK)
            complain(life->seat, FLAW_FOLLOWS, "the stopped rank found a group that works");
        if (cell->point->step != STEP_SHRINK && ms_since(begin_ns) > 2 * TIMEOUT_MS + MARGIN_MS)
            complain(life->seat, FLAW_SLOW, "ep_comm_shrink kept the stopped rank for %d ms", ms_since(begin_ns));
        return;
    }
    /* Where nobody of this group is stopped, it has no other reason to be late. */
    if (*ret_status == EP_E_EXCLUDED || (*ret_status == EP_E_TIMEOUT && cell->fault != FAULT_STOP))
        atomic_fetch_or(&life->seat->flaws, FLAW_DEADLINE);
    if (*ret_status != EP_OK)
        complain(life->seat, FLAW_FOLLOWS, "ep_comm_shrink: %s: %s", ep_status_name(*ret_status), ep_last_error());
    if (ms_since(begin_ns) > limit_ms)
        complain(life->seat, FLAW_SLOW, "ep_comm_shrink took %d ms", ms_since(begin_ns));
}

static void free_old(struct life *life)
{
    traffic_done(&life->traffic);
    ep_comm_free(life->comm);
    life->comm = NULL;
}

/* The victim, if it was only stopped, has seen what became of it. All ranks of the group give the same answer. */
static bool victim_is_done(struct life *life, struct traffic *traffic)
{
    int32_t done = atomic_load(&life->table->seat[life->cell->victim].state) == SEAT_DONE, all[RANKS] = {0};

    if (ep_comm_allgather(traffic->comm, &done, sizeof(done), all) != EP_OK)
        return true;
    for (int rank = 0; rank < traffic->nranks; rank++)
        if (!all[rank])
            return false;
    return true;
}

static void use_new_group(struct life *life)
{
    static const enum step lowlatency[] = {STEP_LL_NEW, STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE};
    struct traffic traffic = {0};
    uint64_t end_ns = now_ns() + (uint64_t)(4 * TIMEOUT_MS + MARGIN_MS) * 1000000u;
    ep_status status = traffic_init(&traffic, life->newer[life->n_newer - 1]);
    bool stopped = life->cell->fault == FAULT_STOP;

    for (int i = 0; status == EP_OK && (i < 2 || stopped); i++) {
        status = traffic_round_trip(&traffic);
        if (status == EP_OK && stopped && (victim_is_done(life, &traffic) || now_ns() > end_ns))
            break;
    }
    for (size_t i = 0; status == EP_OK && is_lowlatency(life) && i < sizeof(lowlatency) / sizeof(lowlatency[0]); i++)
        status = traffic_step(&traffic, lowlatency[i]);
    if (status == EP_OK)
        status = ep_comm_barrier(traffic.comm);
    if (status == EP_E_TIMEOUT)
        atomic_fetch_or(&life->seat->flaws, FLAW_DEADLINE);
    if (status != EP_OK)
        complain(life->seat, FLAW_FOLLOWS, "the new group: %s: %s", ep_status_name(status), ep_last_error());
    if (traffic.wrong[0])
        complain(life->seat, FLAW_WRONG, "the new group: %s", traffic.wrong);
    traffic_done(&traffic);
}

void go_on_without(struct life *life)
{
    ep_status status;

    shrink(life, &status);
    if (status != EP_OK)
        return;
    atomic_store(&life->seat->state, SEAT_SHRUNK);
    if (life->cell->free_early)
        free_old(life);
    use_new_group(life);
}

/* --- all of it -------------------------------------------------------------------------------------------------- */

static void live(struct life *life, const ep_boot *boot)
{
    uint64_t begin_ns = now_ns();
    ep_status status = create(life, boot);

    if (life->cell->point->step == STEP_NEW) {
        check_creation(life, status, begin_ns);
        return;
    }
    if (status == EP_OK)
        status = traffic_init(&life->traffic, life->comm);
    if (status != EP_OK) {
        note_deadline(life, status, rank_named(ep_last_error()));
        complain(life->seat, FLAW_FOLLOWS, "creation: %s: %s", ep_status_name(status), ep_last_error());
        return;
    }
    strike_set_comm(life->comm);
    if (life->cell->point->track->masking) {
        live_masked(life);
        return;
    }
    status = run_track(life);
    if (status == EP_OK)
        return;
    check_failure(life, status);
    check_repeats(life, status);
    if (life->victim && life->cell->fault == FAULT_EXIT) {
        /* Where the others shrink, the victim leaves. */
        strike_in_shrink(life);
        return;
    }
    go_on_without(life);
}

int rank_main(struct table *table, const ep_boot *boot)
{
    struct life life = {.table = table,
                        .cell = &table->cell,
                        .seat = &table->seat[boot->rank],
                        .rank = boot->rank,
                        .victim = boot->rank == table->cell.victim,
                        .late = boot->rank == late_rank(&table->cell),
                        .first = boot->rank == first_rank(&table->cell)};
    struct surroundings before = look_around();
    char why[128];

    if (life.victim)
        strike_init(table, table->cell.fault);
    live(&life, boot);
    if (life.comm)
        free_old(&life);
    while (life.n_newer > 0)
        ep_comm_free(life.newer[--life.n_newer]);
    if (!same_surroundings(&before, why, sizeof(why)))
        complain(life.seat, FLAW_WRONG, "left behind: %s", why);
    atomic_store(&life.seat->state, SEAT_DONE);
    return life.seat->complaint[0] != '\0';
}
