/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks the statuses of the ranks of a storm. The only inputs are which faults were injected into which rank before a
 * call returned, and which calls began after another one had failed.
 */
#include "storm.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

enum {
    STARVED_PART = 8 /* fraction of the deadline: a rank that was runnable but not scheduled for so long is excused for
                        being late */
};

struct checker {
    const struct storm_table *table;
    const struct storm *storm;
    const struct storm_watch *watch;
    struct storm_result *result;
};

static uint64_t injected_at(const struct checker *j, int rank, enum injection injection)
{
    return atomic_load(&j->table->ranks[rank].injected_ns[injection]);
}

static bool injected_before(const struct checker *j, int rank, enum injection injection, uint64_t ns)
{
    uint64_t at = injected_at(j, rank, injection);

    return at && at <= ns;
}

static bool exhausted_before(const struct checker *j, int rank, uint64_t ns)
{
    return injected_before(j, rank, INJECT_DESCRIPTORS, ns) || injected_before(j, rank, INJECT_MEMORY, ns) ||
           injected_before(j, rank, INJECT_FILE_SIZE, ns);
}

static bool died_before(const struct checker *j, int rank, uint64_t ns)
{
    return injected_before(j, rank, INJECT_KILL, ns) || injected_before(j, rank, INJECT_CRASH, ns) ||
           injected_before(j, rank, INJECT_LAUNCHER, ns) ||
           /* check_exit() reports that. */
           (exhausted_before(j, rank, ns) && j->table->exit_signal[rank]);
}

static bool left_before(const struct checker *j, int rank, const struct outcome *outcome)
{
    uint64_t at = atomic_load(&j->table->ranks[rank].left_ns[outcome->generation]);

    return at && at <= outcome->end_ns;
}

static uint64_t timeout_ns(const struct checker *j)
{
    return (uint64_t)j->storm->timeout_ms * 1000000u;
}

/*
 * How long the thread of these samples was not scheduled, from the last sample before a span to the first one after it.
 */
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

/* True if a rank without an injected fault was not scheduled, or the controller was not scheduled to end its pause. */
static bool was_starved(const struct checker *j, int rank, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t least_ns = timeout_ns(j) / STARVED_PART;

    return delay_within(&j->watch->delays[rank], from_ns, to_ns) > least_ns ||
           (injected_before(j, rank, INJECT_PAUSE, to_ns) &&
            delay_within(&j->watch->own_delays, from_ns, to_ns) > least_ns);
}

/*
 * True if a rank was left out or waited in vain while the machine did not schedule the ranks concerned, during that
 * call; if it was left out, during the call of any other rank that called it late.
 */
static bool is_excused(const struct checker *j, int rank, const struct outcome *outcome)
{
    uint64_t to_ns = outcome->end_ns, from_ns = to_ns - timeout_ns(j);
    bool all = outcome->call == CALL_AGREE;

    if (outcome->status != EP_E_EXCLUDED && outcome->status != EP_E_TIMEOUT)
        return false;
    if (all)
        from_ns -= timeout_ns(j);
    if (outcome->begin_ns < from_ns)
        from_ns = outcome->begin_ns;
    for (int other = 0; other < j->storm->nranks; other++)
        if ((all || other == rank || other == outcome->named) && was_starved(j, other, from_ns, to_ns))
            return true;
    return false;
}

static const struct outcome *last_outcome(const struct checker *j, int rank)
{
    const struct storm_rank_context *context = &j->table->ranks[rank];

    return context->n_outcomes ? &context->outcomes[context->n_outcomes - 1] : NULL;
}

/* Dead and departed ranks are not late; one that ended without making the call is. */
static bool can_be_late(const struct checker *j, int rank, uint64_t ns)
{
    return injected_before(j, rank, INJECT_STOP, ns) ||
           (injected_before(j, rank, INJECT_LEAVE, ns) && !atomic_load(&j->table->ranks[rank].created[0]));
}

/* True if it had no lasting fault. */
static bool is_well(const struct checker *j, int rank)
{
    for (int injection = 0; injection < INJECTIONS; injection++)
        if (injection != INJECT_PAUSE && injection != INJECT_ABORT && injected_at(j, rank, (enum injection)injection))
            return false;
    return true;
}

static void complain_of(const struct checker *j, enum storm_kind kind, int rank, const struct outcome *outcome,
                        const char *why)
{
    storm_complain(j->result, kind, "rank %d, group %d, %s: %s: %s: \"%.280s\"", rank, outcome->generation,
                   call_name(outcome->call), why, ep_status_name(outcome->status), outcome->text);
}

/* NULL: the status matches the faults of the rank that it names. */
static const char *misfit(const struct checker *j, int rank, const struct outcome *outcome)
{
    int named = outcome->named;
    uint64_t ns = outcome->end_ns;

    if (named == -2)
        return NULL;
    switch (outcome->status) {
    case EP_E_TIMEOUT:
        if (named < 0)
            return "names no rank";
        if (can_be_late(j, named, ns))
            return NULL;
        /* ep_launch() reports each exit to its ranks. */
        if (died_before(j, named, ns) && j->storm->mode != MODE_FORK && atomic_load(&j->table->ranks[named].unseen)) {
            j->result->unseen++;
            return NULL;
        }
        if (died_before(j, named, ns))
            return "a dead rank is called late";
        if (is_excused(j, rank, outcome)) {
            j->result->starved++;
            return NULL;
        }
        /* It cannot accept connections, or make them: to the others it does not answer. */
        if (outcome->call == CALL_NEW && injected_before(j, named, INJECT_DESCRIPTORS, ns))
            return NULL;
        return left_before(j, named, outcome) ? "a rank that left is called late" : "a healthy rank is called late";
    case EP_E_PEER_DEAD:
        if (named < 0)
            return "names no rank";
        /* Before there is a communicator, a rank cannot publish that it leaves. */
        if (!died_before(j, named, ns) && !(outcome->call == CALL_NEW && left_before(j, named, outcome)))
            return "a living rank is called dead";
        /* Of a rank of another host it may be known only that the connection was cut. */
        if (outcome->call != CALL_NEW && outcome->call != CALL_AGREE && !strstr(outcome->text, "died") &&
            !strstr(outcome->text, "cannot be reached"))
            return "says neither that it died nor that it cannot be reached";
        return NULL;
    case EP_E_PEER_LEFT:
        return named < 0                        ? "names no rank"
               : left_before(j, named, outcome) ? NULL
                                                : "a rank that stays is said to have left";
    case EP_E_ABORTED:
        return named < 0                                     ? "names no rank"
               : atomic_load(&j->table->ranks[named].aborts) ? NULL
                                                             : "a rank that did not abort is said to have";
    case EP_E_EXCLUDED:
        if (outcome->call != CALL_AGREE)
            return "no call of the library excludes a rank";
        j->result->exclusions++;
        if (!is_well(j, rank))
            return NULL;
        if (is_excused(j, rank, outcome)) {
            j->result->excused++;
            return NULL;
        }
        return "a healthy rank is left out, and the machine let it run";
    case EP_E_SYSTEM:
    case EP_E_MEMORY:
        if (exhausted_before(j, named < 0 ? rank : named, ns) || exhausted_before(j, rank, ns))
            return NULL;
        return "nothing was taken from that rank";
    case EP_E_UNSUPPORTED: /* with the setting that forbids it */
        return j->storm->limits ? NULL : "nothing is missing";
    default:
        return "no status of what happened";
    }
}

/* --- one rank ----------------------------------------------------------------------------------------------------- */

static void check_outcomes(const struct checker *j, int rank)
{
    const struct storm_rank_context *context = &j->table->ranks[rank];

    for (int i = 0; i < context->n_outcomes; i++) {
        const struct outcome *outcome = &context->outcomes[i];
        const char *why = misfit(j, rank, outcome);

        if (why)
            complain_of(j, WRONG_NAME, rank, outcome, why);
        /* A call refused before anything is sent (1xx, 2xx) does not fail the group; a peer may have, meanwhile. */
        if (outcome->call != CALL_NEW && outcome->call != CALL_AGREE && outcome->status >= EP_E_TIMEOUT &&
            outcome->async != outcome->status)
            storm_complain(j->result, WRONG_CHANGE, "rank %d: ep_comm_async_error gives %s after %s", rank,
                           ep_status_name(outcome->async), ep_status_name(outcome->status));
    }
    if (context->changed[0])
        storm_complain(j->result, WRONG_CHANGE, "rank %d: %s", rank, context->changed);
    if (context->wrong[0])
        storm_complain(j->result, WRONG_RESULT, "rank %d: %s", rank, context->wrong);
    if (context->left_behind[0])
        storm_complain(j->result, WRONG_LEFTOVER, "rank %d: %s", rank, context->left_behind);
    if (context->other[0])
        storm_complain(j->result, WRONG_OTHER, "rank %d: %s", rank, context->other);
}

static bool no_group(const struct checker *j)
{
    for (int rank = 0; rank < j->storm->nranks; rank++)
        if (atomic_load(&j->table->ranks[rank].state) == STORM_NO_GROUP)
            return true;
    return false;
}

/* A rank without a lasting fault ends with the others, in a working group. */
static void check_end(const struct checker *j, int rank)
{
    const struct storm_rank_context *context = &j->table->ranks[rank];
    int state = atomic_load(&context->state);
    const struct outcome *last = last_outcome(j, rank);

    if (!is_well(j, rank) || state == STORM_DONE || no_group(j))
        return;
    if (last && is_excused(j, rank, last)) {
        j->result->starved += last->status == EP_E_TIMEOUT;
        return;
    }
    storm_complain(j->result, WRONG_OTHER, "rank %d, which had no lasting fault, did not finish: %s: %s", rank,
                   last ? ep_status_name(last->status) : "no failure", last ? last->text : "");
}

static void check_exit(const struct checker *j, int rank)
{
    int died = j->table->exit_signal[rank];
    bool killed = injected_at(j, rank, INJECT_KILL) || injected_at(j, rank, INJECT_CRASH);

    if (j->storm->mode != MODE_FORK || j->watch->launcher_killed || !atomic_load(&j->table->launched))
        return;
    if (died && !killed)
        storm_complain(j->result, WRONG_OTHER, "rank %d died of signal %d in %s%s", rank, died,
                       call_name((enum call)atomic_load(&j->table->ranks[rank].call)),
                       died == SIGXFSZ ? " (the library did not look at the limit)" : "");
}

/* --- all ranks ---------------------------------------------------------------------------------------------------- */

/* Creation succeeds on all ranks or on none; dead ones do not count. */
static void check_creation(const struct checker *j, int generation)
{
    int with = -1, without = -1;
    bool excused = false;

    for (int rank = 0; rank < j->storm->nranks; rank++) {
        const struct storm_rank_context *context = &j->table->ranks[rank];
        int created = atomic_load(&context->created[generation]);

        if (!is_well(j, rank) || !created)
            continue;
        if (created == 1 + EP_OK)
            with = rank;
        else
            without = rank;
        /* The others may have received that this rank gave up. */
        for (int i = 0; i < context->n_outcomes; i++)
            excused =
                excused || (context->outcomes[i].call == CALL_NEW && context->outcomes[i].generation == generation &&
                            is_excused(j, rank, &context->outcomes[i]));
    }
    if (with >= 0 && without >= 0 && !excused)
        storm_complain(j->result, WRONG_OTHER, "ep_comm_new of group %d: rank %d has it and rank %d has not",
                       generation, with, without);
}

static bool is_failure_of_group(const struct outcome *outcome, int generation)
{
    return outcome->generation == generation && outcome->call != CALL_AGREE && outcome->call != CALL_NEW &&
           outcome->async == outcome->status;
}

/* The rank named by a failure; a rank that lacks a resource reports that instead. */
static int named_by(const struct checker *j, int rank, const struct outcome *outcome)
{
    bool own = (outcome->status == EP_E_SYSTEM || outcome->status == EP_E_MEMORY) &&
               exhausted_before(j, rank, outcome->end_ns) &&
               (outcome->named < 0 || !exhausted_before(j, outcome->named, outcome->end_ns));

    return own ? rank : outcome->named;
}

/*
 * On one host, a call that began after another rank had returned the failure must return a status of a call that had
 * begun before: later failures are consequences. Ranks of other hosts may have found another failure first.
 */
static void check_first(const struct checker *j, int generation, int host)
{
    const struct outcome *of[MAX_RANKS] = {0};
    uint64_t first_end = UINT64_MAX;

    for (int rank = 0; rank < j->storm->nranks; rank++) {
        const struct storm_rank_context *context = &j->table->ranks[rank];

        for (int i = 0; i < context->n_outcomes && !of[rank]; i++)
            if (is_failure_of_group(&context->outcomes[i], generation) && context->outcomes[i].host == host)
                of[rank] = &context->outcomes[i];
        if (of[rank] && of[rank]->end_ns < first_end)
            first_end = of[rank]->end_ns;
    }
    for (int rank = 0; rank < j->storm->nranks; rank++) {
        /* It had failed the group itself between two calls. */
        bool same = of[rank] && of[rank]->status == EP_E_ABORTED && of[rank]->named == rank &&
                    injected_before(j, rank, INJECT_ABORT, first_end);

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

void storm_check(const struct storm_table *table, const struct storm_watch *watch, struct storm_result *result)
{
    struct checker j = {.table = table, .storm = &table->storm, .watch = watch, .result = result};

    for (int rank = 0; rank < j.storm->nranks; rank++) {
        check_outcomes(&j, rank);
        check_exit(&j, rank);
    }
    for (int generation = 0; generation < STORM_GENERATIONS; generation++)
        for (int host = 0; host < j.storm->nranks; host++)
            check_first(&j, generation, host);
    if (table->launcher_left_behind[0])
        storm_complain(result, WRONG_LEFTOVER, "launcher: %s", table->launcher_left_behind);
    if (watch->launcher_killed)
        return;
    for (int generation = 0; generation < STORM_GENERATIONS; generation++)
        check_creation(&j, generation);
    for (int rank = 0; rank < j.storm->nranks; rank++)
        check_end(&j, rank);
}

static uint64_t first_instant(const struct storm_table *table)
{
    uint64_t first = UINT64_MAX;

    for (int rank = 0; rank < table->storm.nranks; rank++) {
        const struct storm_rank_context *context = &table->ranks[rank];

        for (int injection = 0; injection < INJECTIONS; injection++)
            if (atomic_load(&context->injected_ns[injection]) && atomic_load(&context->injected_ns[injection]) < first)
                first = atomic_load(&context->injected_ns[injection]);
        if (context->n_outcomes && context->outcomes[0].begin_ns < first)
            first = context->outcomes[0].begin_ns;
    }
    return first;
}

static double ms_since(uint64_t from_ns, uint64_t ns)
{
    return (double)(int64_t)(ns - from_ns) / 1e6;
}

void storm_list_outcomes(const struct storm_table *table, const struct storm_watch *watch, char *ret_text, size_t bytes)
{
    static const char *const states[] = {"was not started", "was still running", "finished", "gave up", "has no group"};
    uint64_t first = first_instant(table);
    size_t used = 0;

    ret_text[0] = '\0';
    for (int rank = 0; rank < table->storm.nranks && used < bytes; rank++) {
        const struct storm_rank_context *context = &table->ranks[rank];
        int generation = atomic_load(&context->generation);

        used += (size_t)snprintf(ret_text + used, bytes - used, "       rank %d, not let run for %.1f ms:", rank,
                                 (double)delay_within(&watch->delays[rank], 0, UINT64_MAX) / 1e6);
        for (int injection = 0; injection < INJECTIONS && used < bytes; injection++)
            if (atomic_load(&context->injected_ns[injection]))
                used += (size_t)snprintf(ret_text + used, bytes - used, " %s at %.3f ms",
                                         injection_name((enum injection)injection),
                                         ms_since(first, atomic_load(&context->injected_ns[injection])));
        for (int i = 0; i < context->n_outcomes && used < bytes; i++) {
            const struct outcome *outcome = &context->outcomes[i];

            used += (size_t)snprintf(ret_text + used, bytes - used,
                                     "\n         group %d, %.3f to %.3f ms, %s: %s, then %s: \"%s\"",
                                     outcome->generation, ms_since(first, outcome->begin_ns),
                                     ms_since(first, outcome->end_ns), call_name(outcome->call),
                                     ep_status_name(outcome->status), ep_status_name(outcome->async), outcome->text);
        }
        if (used < bytes)
            used += (size_t)snprintf(ret_text + used, bytes - used, "\n         %s in group %d, of %#x\n",
                                     states[atomic_load(&context->state)], generation,
                                     atomic_load(&table->regroup.groups[generation].members));
    }
}
