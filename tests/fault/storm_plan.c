/* SPDX-License-Identifier: Apache-2.0 */
#include "storm.h"

#include <signal.h>
#include <stdio.h>

enum {
    PATIENT_MS = 20000, /* no failure is found by a deadline */
    STOPPED_MS = 3000,  /* with long stops, or if ranks that connect to each other may have no descriptors */
    SPREAD_US = 3000,   /* delay after the begin of a call */
    THREADS_PERCENT = 22,
};

static int below(uint64_t *state, int n)
{
    return (int)(fault_draw(state) % (unsigned)n);
}

const char *injection_name(enum injection injection)
{
    static const char *const names[INJECTIONS] = {"kill",  "crash",       "stop",   "pause",     "abort",
                                                  "leave", "descriptors", "memory", "file size", "launcher"};

    return names[injection];
}

const char *call_name(enum call call)
{
    static const char *const names[CALLS] = {"no call",
                                             "ep_comm_new",
                                             "all-gather of ep_comm_new",
                                             "ep_alloc",
                                             "ep_plan_new",
                                             "ep_dispatch",
                                             "ep_combine",
                                             "ep_ll_new",
                                             "low latency",
                                             "ep_comm_barrier",
                                             "ep_comm_allgather",
                                             "the agreement on the next group",
                                             "ep_comm_async_error",
                                             "ep_comm_free"};

    return names[call];
}

static unsigned draw_limits(uint64_t *state, unsigned possible)
{
    static const unsigned limits[] = {LIMIT_PIDFD, LIMIT_OPENAT2, LIMIT_PIDFD | LIMIT_OPENAT2};
    unsigned drawn = possible & limits[below(state, (int)(sizeof(limits) / sizeof(limits[0])))];

    return below(state, 100) < 60 ? 0 : drawn;
}

static enum injection draw_injection(uint64_t *state, enum mode mode)
{
    static const enum injection forked[] = {INJECT_KILL,        INJECT_KILL,   INJECT_KILL,      INJECT_CRASH,
                                            INJECT_CRASH,       INJECT_STOP,   INJECT_PAUSE,     INJECT_PAUSE,
                                            INJECT_PAUSE,       INJECT_ABORT,  INJECT_ABORT,     INJECT_LEAVE,
                                            INJECT_DESCRIPTORS, INJECT_MEMORY, INJECT_FILE_SIZE, INJECT_LAUNCHER};
    static const enum injection threads[] = {INJECT_PAUSE,       INJECT_PAUSE,  INJECT_ABORT,     INJECT_ABORT,
                                             INJECT_ABORT,       INJECT_ABORT,  INJECT_LEAVE,     INJECT_LEAVE,
                                             INJECT_DESCRIPTORS, INJECT_MEMORY, INJECT_FILE_SIZE, INJECT_LAUNCHER};

    if (mode == MODE_THREADS)
        return threads[below(state, (int)(sizeof(threads) / sizeof(threads[0])))];
    return forked[below(state, (int)(sizeof(forked) / sizeof(forked[0])))];
}

static int draw_detail(uint64_t *state, enum injection injection)
{
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE};

    switch (injection) {
    case INJECT_CRASH:
        return crashes[below(state, 4)];
    case INJECT_PAUSE:
        return 20 + below(state, 230);
    case INJECT_DESCRIPTORS:
        return below(state, 3);
    case INJECT_MEMORY:
        return below(state, 512 * 1024);
    case INJECT_FILE_SIZE:
        return below(state, 64 * 1024);
    default:
        return 0;
    }
}

static bool lasts(enum injection injection)
{
    return injection != INJECT_PAUSE && injection != INJECT_ABORT;
}

/* At least one rank has no lasting fault. */
static void keep_one(struct storm *storm)
{
    bool disconnected = false, silent = false;
    unsigned gone = 0;

    for (int i = 0; i < storm->n_faults; i++) {
        struct injection_plan *plan = &storm->faults[i];

        disconnected = disconnected || (storm->linked && plan->injection == INJECT_DESCRIPTORS);
        if (!lasts(plan->injection) || plan->injection == INJECT_LAUNCHER)
            continue;
        if (__builtin_popcount(gone | 1u << plan->rank) == storm->nranks) {
            plan->injection = INJECT_PAUSE;
            plan->detail = 50;
        } else {
            gone |= 1u << plan->rank;
            silent = silent || plan->injection == INJECT_STOP;
        }
    }
    if (silent || disconnected)
        storm->timeout_ms = STOPPED_MS;
}

static void draw_fault(uint64_t *state, const struct storm *storm, int i, struct injection_plan *ret_plan)
{
    int when = below(state, 10);

    *ret_plan =
        (struct injection_plan){.injection = draw_injection(state, storm->mode), .rank = below(state, storm->nranks)};
    /* A sanitizer ends a process that cannot get memory, and one that crashes only after a report, seconds later. */
    if (SANITIZED && ret_plan->injection == INJECT_MEMORY)
        ret_plan->injection = INJECT_FILE_SIZE;
    if (SANITIZED && ret_plan->injection == INJECT_CRASH)
        ret_plan->injection = INJECT_KILL;
    ret_plan->when = i && when < 3 ? WHEN_WITH : i && when < 6 ? WHEN_NEXT : WHEN_CALL;
    /* A quarter of them while the communicator is created: eight all-gathers or so. */
    ret_plan->calls = below(state, 4) == 0 ? below(state, 9) : 9 + below(state, 50);
    ret_plan->delay_us = below(state, 2) ? below(state, SPREAD_US) : below(state, SPREAD_US / 20);
    ret_plan->detail = draw_detail(state, ret_plan->injection);
}

/* Nodes that are hosts of their own. */
static void draw_hosts(uint64_t *state, struct storm *storm)
{
    static const int nodes[] = {2, 2, 2, 3, 3, 4}, ranks[] = {1, 1, 2, 2, 2, 3, 4};

    storm->linked = true;
    storm->nnodes = nodes[below(state, (int)(sizeof(nodes) / sizeof(nodes[0])))];
    storm->nranks = storm->nnodes * ranks[below(state, (int)(sizeof(ranks) / sizeof(ranks[0])))];
}

struct storm storm_plan(uint64_t seed, int number, const struct storm_choice *choice)
{
    uint64_t state = seed ^ (uint64_t)number * UINT64_C(0xd1342543de82ef95);
    uint64_t hosts = ~state; /* of its own: the other storms of a seed do not depend on linked_percent */
    int mode = below(&state, 100), faults = below(&state, 10);
    struct storm storm = {.seed = seed, .number = number, .timeout_ms = PATIENT_MS};

    storm.mode = mode < THREADS_PERCENT ? MODE_THREADS : MODE_FORK;
    if (choice->mode >= 0)
        storm.mode = (enum mode)choice->mode;
    storm.limits = draw_limits(&state, choice->limits);
    storm.nranks = 2 + below(&state, 4);
    storm.nnodes = below(&state, 4) == 0 && storm.nranks % 2 == 0 ? 2 : 1;
    if (below(&hosts, 100) < choice->linked_percent)
        draw_hosts(&hosts, &storm);
    storm.free_early = below(&state, 2);
    storm.n_faults = faults < 3 ? 1 : faults < 6 ? 2 : faults < 8 ? 3 : faults < 9 ? 4 : 5;
    for (int i = 0; i < storm.n_faults; i++)
        draw_fault(&state, &storm, i, &storm.faults[i]);
    keep_one(&storm);
    return storm;
}

void storm_describe(const struct storm *storm, char *ret_text, size_t bytes)
{
    static const char *const modes[MODES] = {"fork", "threads"};
    static const char *const nodes[] = {"", ", 2 nodes", ", 3 nodes", ", 4 nodes"};
    size_t used = (size_t)snprintf(
        ret_text, bytes, "%d ranks (%s%s%s%s%s%s)", storm->nranks, modes[storm->mode], nodes[storm->nnodes - 1],
        storm->linked ? ", tcp" : "", storm->limits & LIMIT_PIDFD ? ", no pidfd" : "",
        storm->limits & LIMIT_OPENAT2 ? ", no openat2" : "", storm->free_early ? ", free early" : "");

    for (int i = 0; i < storm->n_faults && used < bytes; i++) {
        const struct injection_plan *plan = &storm->faults[i];
        const char *with = plan->when == WHEN_WITH ? " with it" : plan->when == WHEN_NEXT ? " in a new group or" : "";

        used += (size_t)snprintf(ret_text + used, bytes - used, "%s%s of rank %d%s at call %d + %d us (%d)",
                                 i ? "; " : ": ", injection_name(plan->injection), plan->rank, with, plan->calls,
                                 plan->delay_us, plan->detail);
    }
}
