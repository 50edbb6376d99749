/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is wrong with what the ranks of a storm were told. All that counts here is which rank had been struck by what
 * before a call returned, and which call had begun after another one had failed.
 */
#include "storm.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

enum { STARVED_PART = 8 /* of the deadline: a rank that could have run for so long and was not let is late indeed */ };

struct judge {
    const struct storm_table *table;
    const struct storm *storm;
    const struct storm_watch *watch;
    struct storm_verdict *verdict;
};

static uint64_t struck_at(const struct judge *j, int rank, enum strike strike)
{
    return atomic_load(&j->table->seat[rank].struck_ns[strike]);
}

static bool struck_before(const struct judge *j, int rank, enum strike strike, uint64_t ns)
{
    uint64_t at = struck_at(j, rank, strike);

    return at && at <= ns;
}

static bool exhausted_before(const struct judge *j, int rank, uint64_t ns)
{
    return struck_before(j, rank, STRIKE_DESCRIPTORS, ns) || struck_before(j, rank, STRIKE_MEMORY, ns) ||
           struck_before(j, rank, STRIKE_FILE_SIZE, ns);
}

static bool died_before(const struct judge *j, int rank, uint64_t ns)
{
    /* mpirun ends all ranks when one has died. */
    for (int other = 0; j->storm->mode == MODE_MPI && other < j->storm->nranks; other++)
        if (struck_before(j, other, STRIKE_KILL, ns) || struck_before(j, other, STRIKE_CRASH, ns))
            return true;
    return struck_before(j, rank, STRIKE_KILL, ns) || struck_before(j, rank, STRIKE_CRASH, ns) ||
           struck_before(j, rank, STRIKE_LAUNCHER, ns) ||
           /* judge_exit() complains of that; of mpirun's ranks nobody tells how they ended. */
           (exhausted_before(j, rank, ns) && (j->table->exit_signal[rank] || j->storm->mode == MODE_MPI));
}

static bool left_before(const struct judge *j, int rank, uint64_t ns)
{
    uint64_t at = atomic_load(&j->table->seat[rank].left_ns);

    return at && at <= ns;
}

static uint64_t timeout_ns(const struct judge *j)
{
    return (uint64_t)j->storm->timeout_ms * 1000000u;
}

/* How long was not let run whom these are the delays of, from the last look before a span to the first one after it. */
static uint64_t delay_within(const struct storm_delays *delays, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t before_ns = 0, after_ns = 0;

    for (int i = 0; i < delays->n; i++) {
        if (delays->sample[i].at_ns <= from_ns)
            before_ns = delays->sample[i].delay_ns;
        after_ns = delays->sample[i].delay_ns;
        if (delays->sample[i].at_ns >= to_ns)
            break;
    }
    return after_ns - before_ns;
}

/* The machine did not let a rank run, although nobody had struck it; or did not let the conductor end its pause. */
static bool was_starved(const struct judge *j, int rank, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t least_ns = timeout_ns(j) / STARVED_PART;

    return delay_within(&j->watch->delays[rank], from_ns, to_ns) > least_ns ||
           (struck_before(j, rank, STRIKE_PAUSE, to_ns) &&
            delay_within(&j->watch->own_delays, from_ns, to_ns) > least_ns);
}

static uint64_t came_at(const struct judge *j, int rank, int generation)
{
    return generation < STORM_GENERATIONS ? atomic_load(&j->table->seat[rank].came_ns[generation]) : 0;
}

/* When the first one came to shrink that group; UINT64_MAX: nobody has. */
static uint64_t first_came_at(const struct judge *j, int generation)
{
    uint64_t first_ns = UINT64_MAX;

    for (int rank = 0; rank < j->storm->nranks; rank++)
        if (came_at(j, rank, generation) && came_at(j, rank, generation) < first_ns)
            first_ns = came_at(j, rank, generation);
    return first_ns;
}

/* A rank that was left out or waited in vain: while that call lasted, the machine had not let those run whom it is
 * about. Whoever came to that shrink may have made the others late. */
static bool is_excused(const struct judge *j, int rank, const struct outcome *outcome)
{
    uint64_t to_ns = outcome->end_ns, from_ns = to_ns - timeout_ns(j);
    bool all = outcome->call == CALL_SHRINK && outcome->named < 0;

    if (outcome->status != EP_E_EXCLUDED && outcome->status != EP_E_TIMEOUT)
        return false;
    if (outcome->begin_ns < from_ns)
        from_ns = outcome->begin_ns;
    if (outcome->call == CALL_SHRINK && first_came_at(j, outcome->generation) < to_ns)
        from_ns = first_came_at(j, outcome->generation);
    for (int other = 0; other < j->storm->nranks; other++) {
        bool concerned =
            other == rank || other == outcome->named ||
            (all && came_at(j, other, outcome->generation) && came_at(j, other, outcome->generation) < to_ns);

        if (concerned && was_starved(j, other, from_ns, to_ns))
            return true;
    }
    return false;
}

static const struct outcome *last_outcome(const struct judge *j, int rank)
{
    const struct storm_seat *seat = &j->table->seat[rank];

    return seat->n_outcomes ? &seat->outcomes[seat->n_outcomes - 1] : NULL;
}

/* Each of these ranks was told at last that it, or somebody else, was too late, and could not help it. */
static bool all_excused(const struct judge *j, unsigned ranks)
{
    for (int rank = 0; rank < j->storm->nranks; rank++)
        if (ranks >> rank & 1 && (!last_outcome(j, rank) || !is_excused(j, rank, last_outcome(j, rank))))
            return false;
    return true;
}

/*
 * "Each waits for the others within the deadline. Who has not come then is left out" (ep_comm_shrink): so much time at
 * least lies between the first that came and the answer to one that is excluded.
 */
static bool deadline_passed(const struct judge *j, const struct outcome *outcome)
{
    uint64_t first_ns = first_came_at(j, outcome->generation);

    return first_ns <= outcome->end_ns && outcome->end_ns - first_ns >= timeout_ns(j);
}

/* Dead and gone ranks are not late; one that ended without ever making the call is. */
static bool can_be_late(const struct judge *j, int rank, uint64_t ns)
{
    return struck_before(j, rank, STRIKE_STOP, ns) ||
           (struck_before(j, rank, STRIKE_LEAVE, ns) && !atomic_load(&j->table->seat[rank].created));
}

/* Nothing lasting has struck it. */
static bool is_well(const struct judge *j, int rank)
{
    for (int strike = 0; strike < STRIKES; strike++)
        if (strike != STRIKE_PAUSE && strike != STRIKE_ABORT && struck_at(j, rank, (enum strike)strike))
            return false;
    return true;
}

static void complain_of(const struct judge *j, enum storm_kind kind, int rank, const struct outcome *outcome,
                        const char *why)
{
    storm_complain(j->verdict, kind, "rank %d, group %d, %s: %s: %s: \"%.280s\"", rank, outcome->generation,
                   call_name(outcome->call), why, ep_status_name(outcome->status), outcome->text);
}

/* NULL: the status fits what happened to the rank that it names. */
static const char *misfit(const struct judge *j, int rank, const struct outcome *outcome)
{
    int named = outcome->named;
    uint64_t ns = outcome->end_ns;

    if (named == -2)
        return NULL;
    switch (outcome->status) {
    case EP_E_TIMEOUT:
        if (named < 0)
            return outcome->call == CALL_SHRINK ? NULL : "names no rank";
        if (can_be_late(j, named, ns))
            return NULL;
        /* ep_launch() tells its ranks of each that ends. */
        if (died_before(j, named, ns) && j->storm->mode != MODE_FORK && atomic_load(&j->table->seat[named].unseen)) {
            j->verdict->unseen++;
            return NULL;
        }
        /* Neither pidfd nor /proc: a process that nobody has waited for looks like one that lives, and the text says
         * so. */
        if (died_before(j, named, ns) && j->storm->limits & LIMIT_PROC && j->storm->limits & LIMIT_PIDFD &&
            strstr(outcome->text, "cannot be read"))
            return NULL;
        if (died_before(j, named, ns))
            return "a dead rank is called late";
        /*
         * "While a communicator is created, a rank of the same host that has died is noticed at once" (epkit/mpi.h):
         * one that lives and has given up has no communicator yet by which it could say so. ep_launch() tells its
         * ranks.
         */
        if (left_before(j, named, ns) && j->storm->mode == MODE_MPI && outcome->call == CALL_NEW)
            return NULL;
        if (left_before(j, named, ns))
            return "a rank that left is called late";
        if (is_excused(j, rank, outcome)) {
            j->verdict->starved++;
            return NULL;
        }
        return "a healthy rank is called late";
    case EP_E_PEER_DEAD:
        if (named < 0)
            return "names no rank";
        /* Before there is a communicator, nobody can say that it leaves. */
        if (died_before(j, named, ns) || (outcome->call == CALL_NEW && left_before(j, named, ns)))
            return NULL;
        return "a living rank is called dead";
    case EP_E_PEER_LEFT:
        return named < 0                   ? "names no rank"
               : left_before(j, named, ns) ? NULL
                                           : "a rank that stays is said to have left";
    case EP_E_ABORTED:
        return named < 0                                    ? "names no rank"
               : atomic_load(&j->table->seat[named].aborts) ? NULL
                                                            : "a rank that did not abort is said to have";
    case EP_E_EXCLUDED:
        if (outcome->call != CALL_SHRINK)
            return "excluded by another call than ep_comm_shrink";
        if (!deadline_passed(j, outcome))
            return "a rank is excluded before the deadline has passed";
        j->verdict->exclusions++;
        if (!is_well(j, rank))
            return NULL;
        if (is_excused(j, rank, outcome)) {
            j->verdict->excused++;
            return NULL;
        }
        return "a healthy rank is excluded, and the machine let it run";
    case EP_E_SYSTEM:
    case EP_E_MEMORY:
        if (exhausted_before(j, named < 0 ? rank : named, ns) || exhausted_before(j, rank, ns))
            return NULL;
        return "nothing was taken from that rank";
    case EP_E_UNSUPPORTED: /* with which setting forbids it */
        return j->storm->limits ? NULL : "nothing is missing";
    default:
        return "no status of what happened";
    }
}

/* Where the group cannot be had because of what the storm took from all ranks, and the status says so. */
static bool forbidden_here(const struct judge *j, const struct outcome *outcome)
{
    return outcome->call == CALL_NEW && j->storm->limits & (LIMIT_PROC | LIMIT_USERS) &&
           (outcome->status == EP_E_SYSTEM || outcome->status == EP_E_UNSUPPORTED) &&
           (strstr(outcome->text, "/proc") || strstr(outcome->text, "user"));
}

/* --- one rank ----------------------------------------------------------------------------------------------------- */

static void judge_outcomes(const struct judge *j, int rank)
{
    const struct storm_seat *seat = &j->table->seat[rank];

    for (int i = 0; i < seat->n_outcomes; i++) {
        const struct outcome *outcome = &seat->outcomes[i];
        const char *why = forbidden_here(j, outcome) ? NULL : misfit(j, rank, outcome);

        if (why)
            complain_of(j, WRONG_NAME, rank, outcome, why);
        /* What is refused before anything is sent (1xx, 2xx) does not fail the group; a peer may have, meanwhile. */
        if (outcome->call != CALL_NEW && outcome->call != CALL_SHRINK && outcome->status >= EP_E_TIMEOUT &&
            outcome->async != outcome->status)
            storm_complain(j->verdict, WRONG_CHANGE, "rank %d: ep_comm_async_error gives %s after %s", rank,
                           ep_status_name(outcome->async), ep_status_name(outcome->status));
    }
    if (seat->changed[0])
        storm_complain(j->verdict, WRONG_CHANGE, "rank %d: %s", rank, seat->changed);
    if (seat->wrong[0])
        storm_complain(j->verdict, WRONG_RESULT, "rank %d: %s", rank, seat->wrong);
    if (seat->left_behind[0])
        storm_complain(j->verdict, WRONG_LEFTOVER, "rank %d: %s", rank, seat->left_behind);
    if (seat->other[0])
        storm_complain(j->verdict, WRONG_OTHER, "rank %d: %s", rank, seat->other);
}

static bool no_group(const struct judge *j)
{
    for (int rank = 0; rank < j->storm->nranks; rank++)
        if (atomic_load(&j->table->seat[rank].state) == STORM_NO_GROUP)
            return true;
    return false;
}

/* A rank that nothing lasting has struck ends with the others, in a group that works. */
static void judge_end(const struct judge *j, int rank)
{
    const struct storm_seat *seat = &j->table->seat[rank];
    int state = atomic_load(&seat->state);
    const struct outcome *last = last_outcome(j, rank);

    if (!is_well(j, rank) || state == STORM_DONE || no_group(j))
        return;
    if (last && is_excused(j, rank, last)) {
        j->verdict->starved += last->status == EP_E_TIMEOUT;
        return;
    }
    storm_complain(j->verdict, WRONG_OTHER,
                   "rank %d, which nothing lasting has struck, did not come to the end: %s: %s", rank,
                   last ? ep_status_name(last->status) : "no failure", last ? last->text : "");
}

static void judge_exit(const struct judge *j, int rank)
{
    int died = j->table->exit_signal[rank];
    bool killed = struck_at(j, rank, STRIKE_KILL) || struck_at(j, rank, STRIKE_CRASH);

    if (j->storm->mode != MODE_FORK || j->watch->launcher_killed || !atomic_load(&j->table->launched))
        return;
    if (died && !killed)
        storm_complain(j->verdict, WRONG_OTHER, "rank %d died of signal %d in %s%s", rank, died,
                       call_name((enum call)atomic_load(&j->table->seat[rank].call)),
                       died == SIGXFSZ ? " (the library did not look at the limit)" : "");
}

/* --- all ranks ---------------------------------------------------------------------------------------------------- */

/* Creation succeeds on all ranks or on none; dead ones do not count. */
static void judge_creation(const struct judge *j)
{
    int with = -1, without = -1;
    bool excused = false;

    for (int rank = 0; rank < j->storm->nranks; rank++) {
        int created = atomic_load(&j->table->seat[rank].created);

        if (!is_well(j, rank) || !created)
            continue;
        if (created == 1 + EP_OK)
            with = rank;
        else
            without = rank;
        /* The others may have been told that this one gave up. */
        excused = excused || (created != 1 + EP_OK && all_excused(j, 1u << rank));
    }
    if (with >= 0 && without >= 0 && !excused)
        storm_complain(j->verdict, WRONG_OTHER, "ep_comm_new: rank %d has a group and rank %d has none", with, without);
}

/* Healthy ranks are in the same groups. */
static void judge_members(const struct judge *j)
{
    unsigned well = 0;

    for (int rank = 0; rank < j->storm->nranks; rank++)
        well |= (unsigned)is_well(j, rank) << rank;
    for (int rank = 0; rank < j->storm->nranks; rank++) {
        const struct storm_seat *seat = &j->table->seat[rank];
        int generation = atomic_load(&seat->generation);
        unsigned members = generation < STORM_GENERATIONS ? seat->members[generation] : 0;

        if (!is_well(j, rank) || atomic_load(&seat->state) != STORM_DONE || !members)
            continue;
        if (!all_excused(j, well & ~members))
            storm_complain(j->verdict, WRONG_OTHER, "rank %d ends in a group of %#x, but the healthy ranks are %#x",
                           rank, members, well);
        if (members >> j->storm->nranks || !(members >> rank & 1))
            storm_complain(j->verdict, WRONG_OTHER, "rank %d ends in a group of %#x", rank, members);
    }
    /* Who was stopped for longer than a deadline does not make a group of its own. */
    for (int rank = 0; rank < j->storm->nranks; rank++)
        if (struck_at(j, rank, STRIKE_STOP) && atomic_load(&j->table->seat[rank].state) == STORM_DONE &&
            atomic_load(&j->table->seat[rank].generation) > 0 && well) {
            const struct storm_seat *seat = &j->table->seat[rank];
            unsigned members = seat->members[atomic_load(&seat->generation) % STORM_GENERATIONS];

            if (!all_excused(j, well & ~members))
                storm_complain(j->verdict, WRONG_OTHER, "rank %d, which was stopped, ends in a group of %#x", rank,
                               members);
        }
}

static bool is_failure_of_group(const struct outcome *outcome, int generation)
{
    return outcome->generation == generation && outcome->call != CALL_SHRINK && outcome->call != CALL_NEW &&
           outcome->async == outcome->status;
}

/* Whom a failure names; a rank that has failed for want of something tells what it was instead. */
static int named_by(const struct judge *j, int rank, const struct outcome *outcome)
{
    bool own = (outcome->status == EP_E_SYSTEM || outcome->status == EP_E_MEMORY) &&
               exhausted_before(j, rank, outcome->end_ns) &&
               (outcome->named < 0 || !exhausted_before(j, outcome->named, outcome->end_ns));

    return own ? rank : outcome->named;
}

/*
 * A call that began after another rank had returned the failure must return one that a call returned which had begun
 * before: what fails later is a consequence.
 */
static void judge_first(const struct judge *j, int generation)
{
    const struct outcome *of[MOST_RANKS] = {0};
    uint64_t first_end = UINT64_MAX;

    for (int rank = 0; rank < j->storm->nranks; rank++) {
        const struct storm_seat *seat = &j->table->seat[rank];

        for (int i = 0; i < seat->n_outcomes && !of[rank]; i++)
            if (is_failure_of_group(&seat->outcomes[i], generation))
                of[rank] = &seat->outcomes[i];
        if (of[rank] && of[rank]->end_ns < first_end)
            first_end = of[rank]->end_ns;
    }
    for (int rank = 0; rank < j->storm->nranks; rank++) {
        /* It had failed the group itself by then, between two calls. */
        bool same = of[rank] && of[rank]->status == EP_E_ABORTED && of[rank]->named == rank &&
                    struck_before(j, rank, STRIKE_ABORT, first_end);

        if (!of[rank] || of[rank]->begin_ns <= first_end || of[rank]->named == -2)
            continue;
        for (int other = 0; other < j->storm->nranks; other++)
            same = same || (other != rank && of[other] && of[other]->begin_ns <= first_end &&
                            of[other]->status == of[rank]->status &&
                            (named_by(j, other, of[other]) == named_by(j, rank, of[rank]) || of[other]->named == -2));
        if (!same)
            complain_of(j, WRONG_NAME, rank, of[rank], "not what failed first");
    }
}

void storm_judge(const struct storm_table *table, const struct storm_watch *watch, struct storm_verdict *verdict)
{
    struct judge j = {.table = table, .storm = &table->storm, .watch = watch, .verdict = verdict};
    /* mpirun ends all ranks when one has died. */
    bool broken = watch->launcher_killed;

    for (int rank = 0; rank < j.storm->nranks; rank++) {
        if (j.storm->mode == MODE_MPI && (struck_at(&j, rank, STRIKE_KILL) || struck_at(&j, rank, STRIKE_CRASH)))
            broken = true;
        judge_outcomes(&j, rank);
        judge_exit(&j, rank);
    }
    for (int generation = 0; generation < STORM_GENERATIONS; generation++)
        judge_first(&j, generation);
    if (table->launcher_left_behind[0])
        storm_complain(verdict, WRONG_LEFTOVER, "launcher: %s", table->launcher_left_behind);
    if (broken)
        return;
    judge_creation(&j);
    judge_members(&j);
    for (int rank = 0; rank < j.storm->nranks; rank++)
        judge_end(&j, rank);
}

static uint64_t first_instant(const struct storm_table *table)
{
    uint64_t first = UINT64_MAX;

    for (int rank = 0; rank < table->storm.nranks; rank++) {
        const struct storm_seat *seat = &table->seat[rank];

        for (int strike = 0; strike < STRIKES; strike++)
            if (atomic_load(&seat->struck_ns[strike]) && atomic_load(&seat->struck_ns[strike]) < first)
                first = atomic_load(&seat->struck_ns[strike]);
        if (seat->n_outcomes && seat->outcomes[0].begin_ns < first)
            first = seat->outcomes[0].begin_ns;
    }
    return first;
}

static double ms_since(uint64_t from_ns, uint64_t ns)
{
    return (double)(int64_t)(ns - from_ns) / 1e6;
}

void storm_list_outcomes(const struct storm_table *table, const struct storm_watch *watch, char *ret_text, size_t bytes)
{
    uint64_t first = first_instant(table);
    size_t used = 0;

    ret_text[0] = '\0';
    for (int rank = 0; rank < table->storm.nranks && used < bytes; rank++) {
        const struct storm_seat *seat = &table->seat[rank];

        used += (size_t)snprintf(ret_text + used, bytes - used, "       rank %d, not let run for %.1f ms:", rank,
                                 (double)delay_within(&watch->delays[rank], 0, UINT64_MAX) / 1e6);
        for (int strike = 0; strike < STRIKES && used < bytes; strike++)
            if (atomic_load(&seat->struck_ns[strike]))
                used +=
                    (size_t)snprintf(ret_text + used, bytes - used, " %s at %.3f ms", strike_name((enum strike)strike),
                                     ms_since(first, atomic_load(&seat->struck_ns[strike])));
        for (int i = 0; i < seat->n_outcomes && used < bytes; i++) {
            const struct outcome *outcome = &seat->outcomes[i];

            used += (size_t)snprintf(ret_text + used, bytes - used,
                                     "\n         group %d, %.3f to %.3f ms, %s: %s, then %s: \"%s\"",
                                     outcome->generation, ms_since(first, outcome->begin_ns),
                                     ms_since(first, outcome->end_ns), call_name(outcome->call),
                                     ep_status_name(outcome->status), ep_status_name(outcome->async), outcome->text);
        }
        if (used < bytes)
            used += (size_t)snprintf(ret_text + used, bytes - used, "\n");
    }
    if (atomic_load(&table->orphans) && used < bytes)
        snprintf(ret_text + used, bytes - used, "       kept after mpirun's end by %s\n", table->orphan_stack);
}
