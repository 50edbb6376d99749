/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_comm_regroup: what is refused and named, what a rank that is left out can still do, and that nothing leaks. The
 * ranks are processes, which agree by tests/regroup.h. Random changes with faults: tests/property/elastic_host.
 */
#include "group/group.h"
#include "tests/regroup.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "ranks.h"

enum { MOST_RANKS = 4, PATIENT_MS = 60000, BYTES = 4096 };
/* What changes leave behind is counted in processes of one thread, where ThreadSanitizer sees no more than in a few. */
#if defined(__SANITIZE_THREAD__)
enum { CHANGES = 40 };
#else
enum { CHANGES = 200 };
#endif

struct scenario {
    struct regroup regroup;
    _Atomic int at; /* a stage of the test */
    int slots, ranks_per_node;
    bool registers;
    char text[MOST_RANKS][256];
    ep_status status[MOST_RANKS];
};

static struct scenario *new_scenario(int slots, int ranks_per_node)
{
    static const struct scenario empty;
    struct scenario *scenario = unit_share(&empty, sizeof(empty));

    scenario->slots = slots;
    scenario->ranks_per_node = ranks_per_node;
    return scenario;
}

/* Makes a group of the ranks that are decided, by ep_comm_new() or in place. */
static ep_status make(struct scenario *scenario, int number, int rank, ep_comm **comm)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    struct regroup_boot boot;

    regroup_boot(&scenario->regroup, number, rank, scenario->slots, &boot);
    config.backend = "host";
    config.timeout_ms = PATIENT_MS;
    config.slots = scenario->slots;
    config.slot = rank;
    config.ranks_per_node = scenario->ranks_per_node;
    return *comm ? ep_comm_regroup(*comm, &boot.boot) : ep_comm_new(&boot.boot, &config, comm);
}

static void keep(struct scenario *scenario, int rank, ep_status status)
{
    scenario->status[rank] = status;
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", status == EP_OK ? "" : ep_last_error());
}

static void run(struct scenario *scenario, int nranks, ep_rank_fn program)
{
    ep_rank_exit exits[MOST_RANKS];

    assert_int_equal(unit_fork_ranks(nranks, program, scenario, RANKS_PATIENT_MS, exits), EP_OK);
    for (int rank = 0; rank < nranks; rank++)
        assert_int_equal(exits[rank].code, 0);
}

struct trial {
    int slots, ranks_per_node;
    ep_rank_fn program;
    unsigned members[4]; /* of each group; 0: those of the group before */
    bool threads;
    int n_refused; /* the first ranks, with this status and text */
    ep_status status;
    const char *text;
};

static void try_groups(struct trial trial)
{
    struct scenario *scenario = new_scenario(trial.slots, trial.ranks_per_node);
    unsigned members = 0;

    for (int number = 0; number < REGROUP_GROUPS; number++) {
        if (number < 4 && trial.members[number])
            members = trial.members[number];
        atomic_store(&scenario->regroup.groups[number].members, members);
    }
    if (trial.threads)
        unit_run_threads(trial.slots, trial.program, scenario);
    else
        run(scenario, trial.slots, trial.program);
    for (int rank = 0; rank < trial.n_refused; rank++) {
        assert_int_equal(scenario->status[rank], trial.status);
        assert_non_null(strstr(scenario->text[rank], trial.text));
    }
    munmap(scenario, sizeof(*scenario));
}

/* --- a rank that is left out, and lives ----------------------------------------------------------------------------
 */

/* Each rank maps the memory of the other one. */
static int exchange(ep_comm *comm, void *memory)
{
    static const int32_t index[2] = {0, 1};
    ep_plan_args args = args_plan(index, EP_I32, 2, 1, 2);
    static alignas(16) uint16_t x[2 * 64];
    ep_dispatch_args dispatch = args_dispatch(EP_BF16, 64, x, memory, 2);
    ep_plan *plan;

    SURE(ep_plan_new(comm, &args, &plan) == EP_OK);
    SURE(ep_dispatch_sync(plan, &dispatch) == EP_OK);
    ep_plan_free(plan);
    return 0;
}

/* Where this rank has mapped the memory of rank 0; NULL: it has not. */
static unsigned char *mapped(ep_comm *comm)
{
    const struct ep_group_mapping *mappings = ep_group_of(comm)->peers[0].mappings;

    for (int slot = 0; mappings && slot < EP_GROUP_SLOTS; slot++)
        if (mappings[slot].generation)
            return mappings[slot].shm.base;
    return NULL;
}

static int write_after_eviction(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    unsigned char *memory;
    ep_comm *comm = NULL;
    void *made;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    SURE(ep_alloc(comm, BYTES, &made) == EP_OK);
    memory = made;
    SURE(exchange(comm, memory) == 0);
    if (boot->rank == 1) {
        unsigned char *theirs = mapped(comm);

        SURE(theirs);
        theirs[BYTES - 1] = 7; /* it can, as long as it is a member */
        atomic_store(&scenario->at, 1);
        unit_await(&scenario->at, 2);
        memset(theirs, 9, BYTES);
        SURE(ep_comm_barrier(comm) == EP_E_EXCLUDED && strstr(ep_last_error(), "rank 0 goes on"));
        atomic_store(&scenario->at, 3);
        ep_comm_free(comm);
        return 0;
    }
    unit_await(&scenario->at, 1);
    SURE(memory[BYTES - 1] == 7);
    memset(memory, 5, BYTES);
    SURE(make(scenario, 1, 0, &comm) == EP_OK);
    atomic_store(&scenario->at, 2);
    unit_await(&scenario->at, 3);
    for (int i = 0; i < BYTES; i++)
        SURE(memory[i] == 5);
    SURE(ep_free(comm, memory) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(a_rank_that_is_left_out_cannot_write,
          try_groups((struct trial){
              .slots = 2, .ranks_per_node = 2, .program = write_after_eviction, .members = {3, 1}}))

/* A bootstrap that does something in its first all-gather. */
struct wrapped {
    struct regroup_boot next;
    ep_boot boot;
    struct scenario *scenario;
    unsigned char *theirs;
    ep_comm *comm;
    int n;
};

static ep_status regroup_wrapped(struct wrapped *wrapped, int rank,
                                 ep_status (*gather)(void *context, const void *mine, size_t bytes, int timeout_ms,
                                                     void *ret_all))
{
    regroup_boot(&wrapped->scenario->regroup, 1, rank, wrapped->scenario->slots, &wrapped->next);
    wrapped->boot = wrapped->next.boot;
    if (gather) {
        wrapped->boot.allgather = gather;
        wrapped->boot.context = wrapped;
    }
    return ep_comm_regroup(wrapped->comm, &wrapped->boot);
}

static ep_status gather_of(const struct wrapped *wrapped, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    return wrapped->next.boot.allgather(wrapped->next.boot.context, mine, bytes, timeout_ms, ret_all);
}

/* It agrees, and is held up before it leaves the group of before. */
static ep_status gather_once(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct wrapped *wrapped = context;

    if (wrapped->n++ || gather_of(wrapped, mine, bytes, timeout_ms, ret_all) != EP_OK)
        return EP_E_STATE;
    atomic_store(&wrapped->scenario->regroup.ended, 2); /* to the others */
    unit_await(&wrapped->scenario->at, 2);
    memset(wrapped->theirs, 9, BYTES);
    atomic_store(&wrapped->scenario->at, 3);
    return EP_OK;
}

static int stay_away(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    unsigned char *memory;
    ep_comm *comm = NULL;
    void *made;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    SURE(ep_alloc(comm, BYTES, &made) == EP_OK);
    memory = made;
    SURE(exchange(comm, memory) == 0);
    if (boot->rank == 1) {
        struct wrapped wrapped = {.scenario = scenario, .theirs = mapped(comm), .comm = comm};

        SURE(wrapped.theirs && regroup_wrapped(&wrapped, 1, gather_once) == EP_E_STATE);
        ep_comm_free(comm);
        return 0;
    }
    memset(memory, 5, BYTES);
    SURE(make(scenario, 1, 0, &comm) == EP_E_PEER_DEAD);
    SURE(make(scenario, 2, 0, &comm) == EP_OK);
    atomic_store(&scenario->at, 2);
    unit_await(&scenario->at, 3);
    for (int i = 0; i < BYTES; i++)
        SURE(memory[i] == 5);
    ep_comm_free(comm);
    return 0;
}

TEST(a_rank_that_agrees_and_stays_away_is_fenced_off_by_the_next_call)
{
    try_groups((struct trial){.slots = 2, .ranks_per_node = 2, .program = stay_away, .members = {3, 3, 1}});
}

static int leave_out_thread(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    if (boot->rank == 0)
        keep(scenario, 0, make(scenario, 1, 0, &comm));
    unit_count(&scenario->at, 2);
    ep_comm_free(comm);
    return 0;
}

TEST(a_thread_of_this_process_is_not_left_out_while_it_lives)
{
    try_groups((struct trial){.slots = 2,
                              .ranks_per_node = 2,
                              .program = leave_out_thread,
                              .members = {3, 1},
                              .threads = true,
                              .n_refused = 1,
                              .status = EP_E_STATE,
                              .text = "rank 1 is a thread of this process"});
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

static int create_only(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;

    if (!(atomic_load(&scenario->regroup.groups[0].members) >> boot->rank & 1))
        return 0;
    keep(scenario, boot->rank, make(scenario, 0, boot->rank, &comm));
    ep_comm_free(comm);
    return 0;
}

TEST(nodes_have_their_members_at_the_same_places)
{
    try_groups((struct trial){.slots = 4,
                              .ranks_per_node = 2,
                              .program = create_only,
                              .members = {7},
                              .n_refused = 3,
                              .status = EP_E_UNSUPPORTED,
                              .text = "of the ranks 1 and 3, which have the same place on their nodes, one is absent"});
}

/* Nothing changes if the members do not agree: here another one does not come. */
static int not_all_come(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    if (boot->rank == 0) {
        atomic_store(&scenario->regroup.ended, 2); /* to the bootstrap rank 1 has ended */
        SURE(make(scenario, 1, 0, &comm) == EP_E_PEER_DEAD);
        SURE(strstr(ep_last_error(), "rank 1 has ended"));
    }
    SURE(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(a_meeting_that_fails_changes_nothing,
          try_groups((struct trial){.slots = 2, .ranks_per_node = 2, .program = not_all_come, .members = {3}}))

/* An abort from another thread, or a handler, while the members agree: it is not lost with the group of before. */
static ep_status gather_and_abort(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct wrapped *wrapped = context;

    ep_comm_abort(wrapped->comm);
    return gather_of(wrapped, mine, bytes, timeout_ms, ret_all);
}

static int abort_meanwhile(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    struct wrapped wrapped = {.scenario = scenario};
    ep_comm *comm = NULL;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    wrapped.comm = comm;
    SURE(regroup_wrapped(&wrapped, boot->rank, boot->rank == 0 ? gather_and_abort : NULL) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_E_ABORTED);
    SURE(make(scenario, 2, boot->rank, &comm) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(an_abort_during_the_call_takes_effect_after_it,
          try_groups((struct trial){.slots = 2, .ranks_per_node = 2, .program = abort_meanwhile, .members = {3}}))

/* The same, with calls of other threads all the time. */
static void *alloc_all_the_time(void *argument)
{
    ep_comm *comm = argument;
    void *memory;

    for (;;) /* until the process ends */
        if (ep_alloc_local(comm, 64, &memory) == EP_OK)
            ep_free_local(comm, memory);
    return NULL;
}

static int change_beside_threads(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    pthread_t thread;
    ep_comm *comm = NULL;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    SURE(pthread_create(&thread, NULL, alloc_all_the_time, comm) == 0);
    for (int number = 1; number < REGROUP_GROUPS; number++) {
        if (number % 2 && boot->rank == 1)
            ep_comm_abort(comm);
        SURE(make(scenario, number, boot->rank, &comm) == EP_OK);
        SURE(ep_comm_barrier(comm) == EP_OK);
    }
    if (boot->rank == 1) {
        unit_await(&scenario->at, 1);
        _exit(0); /* with its thread */
    }
    atomic_store(&scenario->at, 1);
    while (ep_comm_barrier(comm) == EP_OK)
        continue;
    _exit(ep_comm_async_error(comm) == EP_E_PEER_DEAD ? 0 : 1);
}

TEST_CALL(other_threads_may_call_meanwhile,
          try_groups((struct trial){.slots = 2, .ranks_per_node = 2, .program = change_beside_threads, .members = {3}}))

static int use_absent(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    static const int32_t index[3] = {0, 1, 5};
    ep_plan_args args = args_plan(index, EP_I32, 3, 1, 6);
    ep_comm_info info = EP_COMM_INFO_INIT;
    int32_t failed[3], per_rank[3];
    ep_layout layout = EP_LAYOUT_INIT;
    ep_comm *comm = NULL;
    ep_plan *plan;

    layout.tokens_per_rank = per_rank;
    if (boot->rank == 2)
        return 0;
    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    SURE(ep_plan_new(comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "token 2: expert 5 at position 0 is of rank 2, which is absent"));
    SURE(ep_plan_layout(comm, &args, &layout) == EP_E_ROUTING);
    SURE(ep_comm_get_failed(comm, failed) == EP_OK);
    SURE(failed[0] == EP_OK && failed[1] == EP_OK && failed[2] == EP_E_EXCLUDED);
    SURE(ep_comm_get_info(comm, &info) == EP_OK && info.nranks == 3 && info.n_members == 2);
    args.n_tokens = 2;
    SURE(ep_plan_new(comm, &args, &plan) == EP_OK);
    SURE(make(scenario, 1, boot->rank, &comm) == EP_OK);
    SURE(ep_plan_settle(plan) == EP_E_STATE);
    SURE(strstr(ep_last_error(), "the members have changed since it was made"));
    SURE(ep_plan_update(plan, &(ep_plan_update_args)EP_PLAN_UPDATE_ARGS_INIT, NULL) == EP_E_STATE);
    ep_plan_free(plan);
    SURE(ep_plan_new(comm, &args, &plan) == EP_OK);
    ep_plan_free(plan);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(experts_of_absent_ranks_and_plans_of_before_are_refused,
          try_groups((struct trial){.slots = 3, .ranks_per_node = 3, .program = use_absent, .members = {3}}))

/* Each rank has a token for each expert, one on each of the ranks 0..members-1. */
static int use_plan(ep_plan *plan, int rank, int members)
{
    static alignas(16) uint16_t x[3 * 64], recv[9 * 64];
    ep_dispatch_args dispatch = args_dispatch(EP_BF16, 64, x, recv, 9);

    for (int i = 0; i < 3 * 64; i++)
        x[i] = (uint16_t)(10 * rank + i / 64);
    SURE(ep_dispatch_sync(plan, &dispatch) == EP_OK);
    for (int source = 0; source < members; source++)
        SURE(recv[64 * source] == 10 * source + rank);
    return 0;
}

/* Rank 2 is new in the second group. */
static int renew_plan(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    static const int32_t index[3] = {0, 1, 2};
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;
    ep_plan_args args = args_plan(index, EP_I32, 3, 1, 3);
    bool is_new = boot->rank == 2;
    ep_plan *plan, *other;
    ep_comm *comm = NULL;

    args.max_tokens = 3;
    args.max_recv_tokens = 9;
    if (!is_new) {
        args.n_tokens = 2;
        SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
        SURE(ep_plan_new(comm, &args, &other) == EP_OK); /* so the new member has other numbers */
        SURE(ep_plan_new(comm, &args, &plan) == EP_OK);
        SURE(use_plan(plan, boot->rank, 2) == 0);
        ep_plan_free(other);
    }
    SURE(make(scenario, 1, boot->rank, &comm) == EP_OK);
    update.topk_idx = index;
    update.n_tokens = 3;
    SURE(is_new || (ep_plan_settle(plan) == EP_E_STATE && strstr(ep_last_error(), "ep_plan_update()")));
    SURE((is_new ? ep_plan_new(comm, &args, &plan) : ep_plan_update(plan, &update, NULL)) == EP_OK);
    SURE(use_plan(plan, boot->rank, 3) == 0);
    SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
    SURE(use_plan(plan, boot->rank, 3) == 0);
    ep_plan_free(plan);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(an_update_makes_a_plan_of_fixed_capacity_that_of_the_members_of_now,
          try_groups((struct trial){.slots = 3, .ranks_per_node = 3, .program = renew_plan, .members = {3, 7}}))

/* --- low latency is renewed --------------------------------------------------------------------------------------- */

/* One round: each rank has a token for each expert, one on each rank; it gets back what the members make of it. */
static int decode(const struct scenario *scenario, ep_ll *ll, unsigned members)
{
    static const int32_t index[4] = {0, 1, 2, 3};
    static const float weights[4] = {1, 1, 1, 1};
    static alignas(16) uint16_t x[4 * 128], recv[4 * 4 * 128], out[4 * 128];
    int32_t count = -1;
    ep_ll_dispatch_args dispatch = args_ll_dispatch(x, index, EP_I32, scenario->slots);
    ep_ll_combine_args combine = args_ll_combine(recv, index, EP_I32, scenario->slots, weights, out);
    uint64_t call;

    for (int i = 0; i < 4 * 128; i++)
        x[i] = 0x3f80;
    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = recv;
    dispatch.recv_count = &count;
    dispatch.ret_call = &call;
    SURE(ep_ll_dispatch_sync(ll, &dispatch) == EP_OK && call == 1);
    SURE(count == __builtin_popcount(members));
    memset(out, 0x55, sizeof(out));
    SURE(ep_ll_combine_sync(ll, &combine) == EP_OK);
    for (int t = 0; t < scenario->slots; t++)
        SURE(out[t * 128] == (members >> t & 1 ? 0x3f80 : 0));
    return 0;
}

static int renew_low_latency(const ep_boot *boot, void *argument)
{
    static const unsigned members[] = {7, 3, 7, 6};
    struct scenario *scenario = argument;
    ep_ll_config config = args_ll(4, 128, 3, 1), other = args_ll(4, 256, 3, 1);
    ep_comm *comm = NULL;
    ep_ll *ll = NULL;

    config.flags = EP_LL_MASK_DEAD; /* choices of absent ranks count as -1 */
    for (int number = 0; number < 4; number++) {
        if (!(members[number] >> boot->rank & 1)) {
            ep_ll_free(ll);
            ep_comm_free(comm);
            comm = NULL;
            ll = NULL;
            continue;
        }
        SURE(make(scenario, number, boot->rank, &comm) == EP_OK);
        if (ll) {
            SURE(ep_ll_barrier(ll, NULL) == EP_E_STATE && strstr(ep_last_error(), "ep_ll_renew()"));
            SURE(ep_ll_renew(ll) == EP_OK);
        } else {
            SURE(ep_ll_new(comm, &config, &ll) == EP_OK);
        }
        SURE(ep_ll_renew(ll) == EP_OK); /* of the members of now: nothing to do, and no other rank is needed */
        SURE(decode(scenario, ll, members[number]) == 0);
    }
    if (boot->rank == 2) {
        ep_ll_free(ll);
        SURE(make(scenario, 4, 2, &comm) == EP_OK);
        SURE(ep_ll_new(comm, &other, &ll) == EP_E_MISMATCH && strstr(ep_last_error(), "ep_ll_new: ranks disagree: "));
        ll = NULL;
    } else if (boot->rank == 1) {
        SURE(make(scenario, 4, 1, &comm) == EP_OK);
        SURE(ep_ll_renew(ll) == EP_E_MISMATCH && strstr(ep_last_error(), "ep_ll_renew: ranks disagree: "));
    }
    ep_ll_free(ll);
    ep_comm_free(comm);
    return 0;
}

TEST(low_latency_is_renewed_where_a_new_rank_makes_it)
{
    for (int ranks_per_node = 3; ranks_per_node > 0; ranks_per_node -= 2)
        try_groups((struct trial){
            .slots = 3, .ranks_per_node = ranks_per_node, .program = renew_low_latency, .members = {7, 3, 7, 6}});
}

/* --- many changes ------------------------------------------------------------------------------------------------- */

static int count_entries(const char *path)
{
    DIR *folder = opendir(path);
    int n = 0;

    while (folder && readdir(folder))
        n++;
    if (folder)
        closedir(folder);
    return n;
}

/* The numbers of the groups are used again and again. */
static void reset(struct scenario *scenario, int number)
{
    struct regroup_group *group = &scenario->regroup.groups[number % REGROUP_GROUPS];

    memset(group->rounds, 0, sizeof(group->rounds));
    atomic_store(&group->members, number % 2 ? 3 : 7);
}

static int change_often(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm_info info = EP_COMM_INFO_INIT;
    int descriptors = 0;
    size_t bytes = 0;
    ep_comm *comm = NULL;
    void *memory = NULL;

    for (int number = 0; number < CHANGES; number++) {
        if (boot->rank == 0)
            reset(scenario, number + 1); /* no rank is in that one yet, and all have left its last use */
        unit_count(&scenario->at, 3 * (number + 1));
        if (boot->rank == 2 && number % 2) {
            ep_comm_free(comm);
            comm = NULL;
            continue;
        }
        SURE(make(scenario, number % REGROUP_GROUPS, boot->rank, &comm) == EP_OK);
        if (!number)
            SURE(ep_alloc_local(comm, BYTES, &memory) == EP_OK);
        SURE(ep_comm_barrier(comm) == EP_OK);
        if (number == 10) {
            descriptors = count_entries("/proc/self/fd");
            SURE(ep_comm_get_info(comm, &info) == EP_OK);
            bytes = info.library_bytes;
        }
        if (number == CHANGES - 2) {
            SURE(ep_comm_get_info(comm, &info) == EP_OK);
            SURE(count_entries("/proc/self/fd") == descriptors);
            SURE(info.library_bytes == bytes);
        }
    }
    ep_comm_free(comm);
    return 0;
}

TEST(many_changes_leave_nothing_behind)
{
    for (int ranks_per_node = 3; ranks_per_node > 0; ranks_per_node -= 2) {
        struct scenario *scenario = new_scenario(3, ranks_per_node);

        reset(scenario, 0);
        run(scenario, 3, change_often);
        munmap(scenario, sizeof(*scenario));
    }
}
