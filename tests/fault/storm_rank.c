/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program of a rank in a storm: works until a call fails, records its status, calls again, agrees with the others
 * on the next group, works in that; until all agree that the storm is over.
 */
#include "storm.h"

#include <ctype.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_DESCRIPTORS = 1024, NOT_KNOWN = -3 };
/* How often a rank is in no call, for how long at most, and how often it polls then. */
enum { IDLE_ONE_IN = 24, IDLE_US = 20000, IDLE_POLL_US = 200 };

struct weather {
    struct storm_table *table;
    struct storm_rank_context *context;
    const ep_boot *boot;
    int first_rank; /* in the first group */
    ep_comm *comm, *older;
    struct traffic traffic;
    int rank, nranks, ranks_per_node, generation, older_generation;
    int per_node;           /* of the first group */
    int first[MAX_RANKS];   /* of each member of this group, its number in the first one */
    unsigned members, gone; /* the same as a mask; those that the next group will not have, as far as known */
    uint64_t random;        /* the same on all ranks of a group */
    uint64_t own_random;
};

/* --- what the controller sees and does -----------------------------------------------------------------------------
 */

/* The communicator that the handler aborts: signals are sent to this very thread. */
static _Thread_local struct {
    struct storm_rank_context *context;
    ep_comm *volatile comm;
} abortable;

static void on_abort_signal(int number)
{
    (void)number;
    if (!abortable.comm)
        return;
    atomic_fetch_add(&abortable.context->aborts, 1);
    ep_comm_abort(abortable.comm);
}

/* The handler never sees a communicator that is being freed. */
static void set_abortable(struct weather *w, ep_comm *comm)
{
    abortable.context = w->context;
    abortable.comm = comm;
}

static void begin_call(struct storm_table *table, struct storm_rank_context *context, enum call call)
{
    uint32_t calls;

    atomic_store(&context->call, call);
    calls = atomic_fetch_add(&context->calls, 1) + 1;
    if (calls != atomic_load(&context->wake))
        return;
    atomic_fetch_add(&table->wake, 1);
    syscall(SYS_futex, &table->wake, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void end_call(struct storm_rank_context *context)
{
    atomic_store(&context->call, CALL_NONE);
}

/* --- what it was told --------------------------------------------------------------------------------------------- */

/* The first rank that a text names, by its number in the group; -1: none. */
static int rank_in(const char *text)
{
    static const char unreached[] = "could not connect to rank ";
    const char *found = strstr(text, unreached);

    /* "rank 5 could not connect to rank 3": it is rank 3 that did not answer. */
    if (found)
        return atoi(found + sizeof(unreached) - 1);
    for (const char *at = strstr(text, "rank"); at; at = strstr(at + 1, "rank")) {
        const char *number = at[4] == 's' ? at + 6 : at + 5;

        if ((at[4] == ' ' || at[4] == 's') && isdigit((unsigned char)*number))
            return atoi(number);
    }
    return -1;
}

static int first_rank_in(const struct weather *w, const char *text)
{
    int rank = rank_in(text);

    return rank >= 0 && rank < w->nranks ? w->first[rank] : rank < 0 ? -1 : -2;
}

/* Ranks of one node share memory; between emulated nodes they do, too. */
static int host_of(const struct weather *w, int rank)
{
    return w->table->storm.linked && rank >= 0 ? rank / w->ranks_per_node : 0;
}

static void note_outcome(struct weather *w, enum call call, uint64_t begin_ns, ep_status status, const char *text)
{
    struct outcome *outcome = &w->context->outcomes[w->context->n_outcomes];
    char copy[sizeof(outcome->text)];

    if (w->context->n_outcomes == STORM_OUTCOMES)
        return;
    /* First: ep_comm_async_error() writes ep_last_error() when it detects another failure. */
    snprintf(copy, sizeof(copy), "%s", text);
    *outcome = (struct outcome){.call = call,
                                .generation = w->generation,
                                .status = status,
                                .async = w->comm ? ep_comm_async_error(w->comm) : status,
                                .named = first_rank_in(w, copy),
                                .host = host_of(w, w->rank),
                                .begin_ns = begin_ns,
                                .end_ns = now_ns()};
    memcpy(outcome->text, copy, sizeof(copy));
    w->context->n_outcomes++;
}

static void note_change(struct weather *w, const char *what, ep_status got, ep_status expected, int named, int before)
{
    if ((got == expected && named == before) || w->context->changed[0])
        return;
    snprintf(w->context->changed, sizeof(w->context->changed),
             "%s: first %s of rank %d, then %s of rank %d (numbers of group %d): %.100s", what,
             ep_status_name(expected), before, ep_status_name(got), named, w->generation, ep_comm_last_error(w->comm));
}

/* Each later call gives the same status and names the same rank. !has_text: the group failed during another failure. */
static void ask_again(struct weather *w, ep_status status, bool has_text)
{
    int before = has_text ? rank_in(ep_comm_last_error(w->comm)) : NOT_KNOWN;
    ep_status got;
    void *memory;

    for (int i = 0; i < 3; i++) {
        begin_call(w->table, w->context, CALL_BARRIER);
        got = i == 0   ? traffic_step(&w->traffic, STEP_BARRIER)
              : i == 1 ? traffic_step(&w->traffic, STEP_PLAN)
                       : ep_alloc(w->comm, 64, &memory);
        end_call(w->context);
        if (before == NOT_KNOWN)
            before = rank_in(ep_comm_last_error(w->comm));
        note_change(w,
                    i == 0   ? "ep_comm_barrier"
                    : i == 1 ? "ep_plan_new"
                             : "ep_alloc",
                    got, status, rank_in(ep_comm_last_error(w->comm)), before);
        note_change(w, "ep_comm_async_error", ep_comm_async_error(w->comm), status, before, before);
    }
}

/* --- work --------------------------------------------------------------------------------------------------------- */

static bool has_lasting_fault(const struct storm_rank_context *context)
{
    for (int injection = 0; injection < INJECTIONS; injection++)
        if (injection != INJECT_PAUSE && injection != INJECT_ABORT && atomic_load(&context->injected_ns[injection]))
            return true;
    return false;
}

/* True if a rank that stays has learnt that this group failed. */
static bool others_know_failure(const struct weather *w)
{
    for (int rank = 0; rank < w->nranks; rank++) {
        const struct storm_rank_context *other = &w->table->ranks[w->first[rank]];

        if (atomic_load(&other->failed[w->generation]) && atomic_load(&other->state) == STORM_RUNS &&
            !has_lasting_fault(other))
            return true;
    }
    return false;
}

/*
 * Sometimes in no call for a while, as an engine that waits for something else: then only polling tells it of a
 * failure. It goes on for as long as others know of one that this rank has not learnt of: if it never does, it hangs.
 */
static ep_status be_idle(struct weather *w, struct outcome *ret_failed)
{
    uint64_t poll_ns = 0, end_ns = now_ns() + fault_draw(&w->own_random) % IDLE_US * 1000u;
    ep_status status = EP_OK;

    if (fault_draw(&w->own_random) % IDLE_ONE_IN)
        return EP_OK;
    atomic_store(&w->context->call, CALL_POLL);
    while (status == EP_OK && !atomic_load(&w->context->leave) && (now_ns() < end_ns || others_know_failure(w))) {
        sleep_us(IDLE_POLL_US);
        poll_ns = now_ns();
        status = ep_comm_async_error(w->comm);
    }
    end_call(w->context);
    if (status != EP_OK)
        *ret_failed = (struct outcome){.call = CALL_POLL, .begin_ns = poll_ns, .status = status};
    return status;
}

static ep_status step(struct weather *w, enum call call, enum step step, struct outcome *ret_failed)
{
    ep_status status = be_idle(w, ret_failed);
    uint64_t begin_ns = now_ns();

    if (status != EP_OK)
        return status;
    begin_call(w->table, w->context, call);
    status = traffic_step(&w->traffic, step);
    end_call(w->context);
    if (w->traffic.wrong[0] && !w->context->wrong[0])
        snprintf(w->context->wrong, sizeof(w->context->wrong), "%.240s", w->traffic.wrong);
    if (status != EP_OK)
        *ret_failed = (struct outcome){.call = call, .begin_ns = begin_ns, .status = status};
    return status;
}

/* Allocates, touches every page, and frees. */
static ep_status use_memory(struct weather *w, struct outcome *ret_failed)
{
    size_t bytes = fault_draw(&w->random) % (256u * 1024);
    uint64_t begin_ns = now_ns();
    void *memory = NULL;
    ep_status status;

    begin_call(w->table, w->context, CALL_ALLOC);
    status = ep_alloc(w->comm, bytes, &memory);
    if (status == EP_OK) {
        memset(memory, w->first_rank + 1, bytes);
        status = ep_free(w->comm, memory);
    }
    end_call(w->context);
    if (status != EP_OK)
        *ret_failed = (struct outcome){.call = CALL_ALLOC, .begin_ns = begin_ns, .status = status};
    return status;
}

/* All ranks leave in the same round, because all decide from the same data. */
static ep_status agree_on_the_end(struct weather *w, struct outcome *ret_failed, bool *ret_end)
{
    int32_t mine = atomic_load(&w->table->end), all[MAX_RANKS] = {0};
    uint64_t begin_ns = now_ns();
    ep_status status;

    begin_call(w->table, w->context, CALL_GATHER);
    status = ep_comm_allgather(w->comm, &mine, sizeof(mine), all);
    end_call(w->context);
    if (status != EP_OK)
        *ret_failed = (struct outcome){.call = CALL_GATHER, .begin_ns = begin_ns, .status = status};
    *ret_end = status == EP_OK;
    for (int rank = 0; rank < w->nranks; rank++)
        *ret_end = *ret_end && all[rank];
    return status;
}

static ep_status work_round(struct weather *w, struct outcome *ret_failed, bool *ret_end)
{
    static const struct {
        enum call call;
        enum step step;
    } lowlatency[] = {
        {CALL_LL_NEW, STEP_LL_NEW}, {CALL_LL, STEP_LL_SEND}, {CALL_LL, STEP_LL_FINISH}, {CALL_LL, STEP_LL_COMBINE}};
    uint64_t random = fault_draw(&w->random);
    bool async = random & 1;

    traffic_fill(&w->traffic);
    TRY(step(w, CALL_PLAN, STEP_PLAN, ret_failed));
    TRY(step(w, CALL_DISPATCH, async ? STEP_ASYNC_DISPATCH : STEP_DISPATCH, ret_failed));
    TRY(step(w, CALL_COMBINE, random & 2 ? STEP_ASYNC_COMBINE : STEP_COMBINE, ret_failed));
    if (random & 4)
        TRY(step(w, CALL_BARRIER, STEP_BARRIER, ret_failed));
    if (random & 8)
        TRY(use_memory(w, ret_failed));
    for (size_t i = 0; (random & 48) == 0 && i < sizeof(lowlatency) / sizeof(lowlatency[0]); i++)
        TRY(step(w, lowlatency[i].call, lowlatency[i].step, ret_failed));
    return agree_on_the_end(w, ret_failed, ret_end);
}

static bool exhausted(const struct storm_rank_context *context)
{
    return atomic_load(&context->injected_ns[INJECT_DESCRIPTORS]) ||
           atomic_load(&context->injected_ns[INJECT_MEMORY]) || atomic_load(&context->injected_ns[INJECT_FILE_SIZE]);
}

/* true: the storm is over, or this rank leaves. False: the communicator has failed, and the failure is recorded. */
static bool work(struct weather *w)
{
    struct outcome failed = {0};
    uint64_t begin_ns = now_ns();
    char text[STORM_TEXT];
    ep_status status, group;
    bool end = false;

    begin_call(w->table, w->context, CALL_ALLOC);
    status = traffic_init(&w->traffic, w->comm);
    end_call(w->context);
    if (status != EP_OK)
        failed = (struct outcome){.call = CALL_ALLOC, .begin_ns = begin_ns, .status = status};
    while (status == EP_OK && !end && !atomic_load(&w->context->leave))
        status = work_round(w, &failed, &end);
    if (status == EP_OK) {
        atomic_store(&w->context->state, end ? STORM_DONE : STORM_GAVE_UP);
        return true;
    }
    /* Before another call, because the group may fail in between. */
    snprintf(text, sizeof(text), "%s", ep_last_error());
    group = ep_comm_async_error(w->comm);
    if (group != EP_OK)
        atomic_store(&w->context->failed[w->generation], 1);
    note_outcome(w, failed.call, failed.begin_ns, status, group == status ? ep_comm_last_error(w->comm) : text);
    /* Refused before anything was sent, for lack of a resource: the others are waiting. */
    if (group != status && exhausted(w->context)) {
        atomic_store(&w->context->state, STORM_GAVE_UP);
        return true;
    }
    if (group != EP_OK)
        ask_again(w, group, group == status);
    return false;
}

/* --- creation, the next group ------------------------------------------------------------------------------------- */

struct counted_boot {
    struct weather *weather;
    const ep_boot *boot;
};

static void note_left(struct weather *w, int generation)
{
    uint64_t none = 0;

    atomic_compare_exchange_strong(&w->context->left_ns[generation], &none, now_ns());
}

/* The all-gathers of the creation are instants for injections. After one that fails, ep_comm_new() leaves the group. */
static ep_status counted_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct counted_boot *counted = context;
    struct weather *w = counted->weather;
    ep_status status;

    atomic_fetch_add(&w->context->gathers, 1);
    begin_call(w->table, w->context, CALL_GATHER_OF_NEW);
    status = counted->boot->allgather(counted->boot->context, mine, bytes, timeout_ms, ret_all);
    if (status != EP_OK)
        note_left(w, w->generation);
    atomic_store(&w->context->call, CALL_NEW);
    return status;
}

/* The members of the new group are those that were agreed on, in the old order. */
static void check_members(struct weather *w)
{
    int32_t mine = w->first_rank, all[MAX_RANKS];
    ep_status status;

    begin_call(w->table, w->context, CALL_GATHER);
    status = ep_comm_allgather(w->comm, &mine, sizeof(mine), all);
    end_call(w->context);
    for (int rank = 0; status == EP_OK && rank < w->nranks; rank++)
        if (all[rank] != w->first[rank])
            snprintf(w->context->other, sizeof(w->context->other), "rank %d of group %d is %d instead of %d", rank,
                     w->generation, all[rank], w->first[rank]);
}

static bool create(struct weather *w)
{
    struct regroup_boot next;
    struct counted_boot counted = {.weather = w, .boot = w->boot};
    ep_boot boot = *w->boot;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    uint64_t begin_ns = now_ns();
    ep_status status;
    int named;

    if (w->generation) {
        regroup_boot(&w->table->regroup, w->generation, w->first_rank, w->per_node, &next);
        counted.boot = &next.boot;
        boot = next.boot;
        w->rank = boot.rank;
        w->nranks = boot.nranks;
        w->ranks_per_node = boot.ranks_per_node;
    }
    boot.allgather = counted_allgather;
    boot.context = &counted;
    config.backend = "host";
    config.network = w->table->storm.linked ? "tcp" : "emulated";
    config.timeout_ms = w->table->storm.timeout_ms;
    config.ranks_per_node = w->ranks_per_node;
    begin_call(w->table, w->context, CALL_NEW);
    status = ep_comm_new(&boot, &config, &w->comm);
    end_call(w->context);
    atomic_store(&w->context->created[w->generation], 1 + (int)status);
    if (status == EP_OK)
        return true;
    named = first_rank_in(w, ep_last_error());
    note_left(w, w->generation);
    note_outcome(w, CALL_NEW, begin_ns, status, ep_last_error());
    if (named >= 0 && (status == EP_E_TIMEOUT || status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT))
        w->gone |= 1u << named;
    return false;
}

static void free_comm(struct weather *w, ep_comm *comm)
{
    begin_call(w->table, w->context, CALL_FREE);
    ep_comm_free(comm);
    end_call(w->context);
}

static void free_older(struct weather *w)
{
    if (w->older) {
        note_left(w, w->older_generation);
        traffic_done(&w->traffic);
        free_comm(w, w->older);
    }
    w->older = NULL;
}

/* False: no group of this rank follows. */
static bool agree(struct weather *w)
{
    uint64_t begin_ns = now_ns();

    if (atomic_load(&w->context->leave) || w->generation + 1 == STORM_GENERATIONS)
        return false;
    begin_call(w->table, w->context, CALL_AGREE);
    w->members = regroup_agree(&w->table->regroup, w->generation + 1, w->members & ~w->gone);
    end_call(w->context);
    if (!(w->members >> w->first_rank & 1)) {
        note_outcome(w, CALL_AGREE, begin_ns, EP_E_EXCLUDED, "the others go on without this rank");
        return false;
    }
    atomic_store(&w->context->generation, ++w->generation);
    for (int first = 0, rank = 0; first < MAX_RANKS; first++)
        if (w->members >> first & 1)
            w->first[rank++] = first;
    w->gone = 0;
    /* All members get the same seed, and a smaller or larger group gets another. */
    w->random = w->table->storm.seed + (uint64_t)(w->generation * 100 + __builtin_popcount(w->members));
    return true;
}

/* The group has failed: creates the next one that works. */
static bool go_on(struct weather *w)
{
    w->gone = regroup_failed(w->comm, w->members);
    set_abortable(w, NULL);
    w->older = w->comm;
    w->older_generation = w->generation;
    w->comm = NULL;
    while (agree(w)) {
        if (create(w)) {
            set_abortable(w, w->comm);
            if (w->table->storm.free_early)
                free_older(w);
            check_members(w);
            free_older(w);
            return true;
        }
        if (exhausted(w->context))
            return false;
    }
    return false;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static void leave(struct weather *w)
{
    set_abortable(w, NULL);
    for (int generation = w->generation; generation < STORM_GENERATIONS; generation++)
        note_left(w, generation);
    if (atomic_load(&w->context->state) == STORM_RUNS)
        atomic_store(&w->context->state, STORM_GAVE_UP);
    atomic_fetch_or(&w->table->regroup.ended, 1u << w->first_rank);
    traffic_done(&w->traffic);
    if (w->older)
        free_comm(w, w->older);
    if (w->comm)
        free_comm(w, w->comm);
}

static void live(struct weather *w)
{
    atomic_store(&w->context->state, STORM_RUNS);
    if (!atomic_load(&w->context->leave)) {
        if (create(w)) {
            set_abortable(w, w->comm);
            while (!work(w) && go_on(w))
                ;
        } else {
            atomic_store(&w->context->state, STORM_NO_GROUP);
        }
    }
    leave(w);
}

/* Number of open descriptors, also without /proc. */
static int count_descriptors(void)
{
    int n = 0;

    for (int fd = 0; fd < MOST_DESCRIPTORS; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Mappings of symmetric memory and control blocks. */
static int count_segments(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int n = 0;

    while (maps && fgets(line, sizeof(line), maps))
        n += strstr(line, "memfd:") != NULL;
    if (maps)
        fclose(maps);
    return n;
}

static void lift_limits(void)
{
    static const int limits[] = {RLIMIT_NOFILE, RLIMIT_AS, RLIMIT_FSIZE};

    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        struct rlimit limit;

        if (getrlimit(limits[i], &limit) == 0) {
            limit.rlim_cur = limit.rlim_max;
            setrlimit(limits[i], &limit);
        }
    }
}

/* ThreadSanitizer adds one of its own when a forked process starts its first. */
static int count_threads(void)
{
#ifdef __SANITIZE_THREAD__
    return 0;
#else
    return count_entries("/proc/self/task");
#endif
}

struct storm_resources storm_resources(void)
{
    return (struct storm_resources){
        .descriptors = count_descriptors(), .threads = count_threads(), .segments = count_segments()};
}

void storm_check_resources(const struct storm_resources *before, char *ret_text, size_t bytes)
{
    struct storm_resources now = {0};

    lift_limits();
    /* The kernel removes a joined thread from /proc some time after the join. */
    for (int i = 0; i < 200; i++) {
        now = storm_resources();
        if (memcmp(&now, before, sizeof(now)) == 0)
            return;
        sleep_us(5000);
    }
    snprintf(ret_text, bytes, "descriptors %d before and %d now, threads %d and %d, segments %d and %d",
             before->descriptors, now.descriptors, before->threads, now.threads, before->segments, now.segments);
}

int storm_rank(const ep_boot *boot, void *argument)
{
    struct storm_table *table = argument;
    struct weather w = {.table = table,
                        .context = &table->ranks[boot->rank],
                        .boot = boot,
                        .first_rank = boot->rank,
                        .rank = boot->rank,
                        .nranks = boot->nranks,
                        .ranks_per_node = boot->nranks / table->storm.nnodes,
                        .per_node = boot->nranks / table->storm.nnodes,
                        .members = (1u << boot->nranks) - 1,
                        .random = table->storm.seed,
                        .own_random =
                            table->storm.seed + (uint64_t)table->storm.number * MAX_RANKS + (uint64_t)boot->rank};
    bool alone = table->storm.mode == MODE_FORK;
    struct sigaction action = {.sa_handler = on_abort_signal, .sa_flags = SA_RESTART};
    struct storm_resources before;

    for (int rank = 0; rank < w.nranks; rank++)
        w.first[rank] = rank;
    sigaction(SIGUSR1, &action, NULL);
    before = storm_resources();
    atomic_store(&w.context->tid, (int)syscall(SYS_gettid));
    atomic_store(&w.context->pid, (int)getpid());
    live(&w);
    if (alone)
        storm_check_resources(&before, w.context->left_behind, sizeof(w.context->left_behind));
    return 0;
}
