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
#include <sys/mman.h>
#include <unistd.h>

#include "ranks.h"

enum { MOST_RANKS = 4, PATIENT_MS = 60000, BYTES = 4096, CHANGES = 200 };

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

static void free_scenario(struct scenario *scenario)
{
    munmap(scenario, sizeof(*scenario));
}

static void decide(struct scenario *scenario, int number, unsigned members)
{
    atomic_store(&scenario->regroup.groups[number].members, members);
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
        SURE(ep_comm_barrier(comm) == EP_E_PEER_LEFT);
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

TEST(a_rank_that_is_left_out_cannot_write)
{
    struct scenario *scenario = new_scenario(2, 2);

    decide(scenario, 0, 3);
    decide(scenario, 1, 1);
    run(scenario, 2, write_after_eviction);
    free_scenario(scenario);
}

/* The bootstrap of a rank that agrees, in the first all-gather, and is held up before it leaves the group of before. */
struct part {
    struct scenario *scenario;
    const ep_boot *boot;
    unsigned char *theirs;
    int n;
};

static ep_status gather_once(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct part *part = context;

    if (part->n++)
        return EP_E_STATE;
    if (part->boot->allgather(part->boot->context, mine, bytes, timeout_ms, ret_all) != EP_OK)
        return EP_E_STATE;
    atomic_store(&part->scenario->regroup.ended, 2); /* to the others */
    unit_await(&part->scenario->at, 2);
    memset(part->theirs, 9, BYTES);
    atomic_store(&part->scenario->at, 3);
    return EP_OK;
}

static int stay_away(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    struct regroup_boot next;
    unsigned char *memory;
    ep_comm *comm = NULL;
    void *made;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    SURE(ep_alloc(comm, BYTES, &made) == EP_OK);
    memory = made;
    SURE(exchange(comm, memory) == 0);
    if (boot->rank == 1) {
        struct part part = {.scenario = scenario, .boot = &next.boot, .theirs = mapped(comm)};
        ep_boot own;

        SURE(part.theirs);
        regroup_boot(&scenario->regroup, 1, 1, scenario->slots, &next);
        own = next.boot;
        own.allgather = gather_once;
        own.context = &part;
        SURE(ep_comm_regroup(comm, &own) == EP_E_STATE);
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
    struct scenario *scenario = new_scenario(2, 2);

    decide(scenario, 0, 3);
    decide(scenario, 1, 3);
    decide(scenario, 2, 1);
    run(scenario, 2, stay_away);
    free_scenario(scenario);
}

/* Memory of the program cannot move: the rank must have left, and until then nothing but the failure changes. */
static int registered(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int fd = memfd_create("of the program", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    ep_comm *comm = NULL;
    void *memory;

    SURE(fd >= 0 && ftruncate(fd, BYTES) == 0);
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    SURE(memory != MAP_FAILED);
    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    SURE(ep_register(comm, memory, BYTES) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    if (boot->rank == 2) {
        unit_await(&scenario->at, 2);
        ep_comm_free(comm);
        atomic_store(&scenario->at, 3);
        return 0;
    }
    for (int number = 1; number <= 2; number++) { /* however often: the rank still lives */
        keep(scenario, boot->rank, make(scenario, number, boot->rank, &comm));
        SURE(ep_comm_async_error(comm) == EP_E_STATE);
    }
    atomic_fetch_add(&scenario->at, 1);
    unit_await(&scenario->at, 3);
    SURE(make(scenario, 3, boot->rank, &comm) == EP_OK);
    SURE(ep_comm_async_error(comm) == EP_OK && ep_comm_barrier(comm) == EP_OK);
    SURE(ep_unregister(comm, memory) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST(registered_memory_is_fenced_by_name)
{
    struct scenario *scenario = new_scenario(3, 3);

    decide(scenario, 0, 7);
    for (int number = 1; number <= 3; number++)
        decide(scenario, number, 3);
    run(scenario, 3, registered);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(scenario->status[rank], EP_E_STATE);
        assert_non_null(strstr(scenario->text[rank], "rank 2 lives, and may still write to memory of ep_register()"));
    }
    free_scenario(scenario);
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
    struct scenario *scenario = new_scenario(2, 2);

    decide(scenario, 0, 3);
    decide(scenario, 1, 1);
    unit_run_threads(2, leave_out_thread, scenario);
    assert_int_equal(scenario->status[0], EP_E_STATE);
    assert_non_null(strstr(scenario->text[0], "rank 1 is a thread of this process"));
    free_scenario(scenario);
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
    struct scenario *scenario = new_scenario(4, 2);

    decide(scenario, 0, 7);
    run(scenario, 4, create_only);
    for (int rank = 0; rank < 3; rank++) {
        assert_int_equal(scenario->status[rank], EP_E_UNSUPPORTED);
        assert_non_null(strstr(scenario->text[rank],
                               "of the ranks 1 and 3, which have the same place on their nodes, one "
                               "is absent"));
    }
    free_scenario(scenario);
}

/* Nothing changes if the members do not agree: here another one does not come. */
static int not_all_come(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    struct regroup_boot next;
    ep_comm *comm = NULL;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    if (boot->rank == 0) {
        ep_boot alone;

        regroup_boot(&scenario->regroup, 1, 0, scenario->slots, &next);
        alone = next.boot;
        atomic_store(&scenario->regroup.ended, 2); /* to the bootstrap rank 1 has ended */
        SURE(ep_comm_regroup(comm, &alone) == EP_E_PEER_DEAD);
        SURE(strstr(ep_last_error(), "rank 1 has ended"));
    }
    SURE(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST(a_meeting_that_fails_changes_nothing)
{
    struct scenario *scenario = new_scenario(2, 2);

    decide(scenario, 0, 3);
    decide(scenario, 1, 3);
    run(scenario, 2, not_all_come);
    free_scenario(scenario);
}

/* An abort from another thread, or a handler, while the members agree: it is not lost with the group of before. */
struct aborting {
    const ep_boot *boot;
    ep_comm *comm;
};

static ep_status gather_and_abort(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct aborting *aborting = context;

    ep_comm_abort(aborting->comm);
    return aborting->boot->allgather(aborting->boot->context, mine, bytes, timeout_ms, ret_all);
}

static int abort_meanwhile(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    struct regroup_boot next;
    struct aborting aborting = {.boot = &next.boot};
    ep_comm *comm = NULL;
    ep_boot own;

    SURE(make(scenario, 0, boot->rank, &comm) == EP_OK);
    regroup_boot(&scenario->regroup, 1, boot->rank, scenario->slots, &next);
    own = next.boot;
    aborting.comm = comm;
    if (boot->rank == 0) {
        own.allgather = gather_and_abort;
        own.context = &aborting;
    }
    SURE(ep_comm_regroup(comm, &own) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_E_ABORTED);
    SURE(make(scenario, 2, boot->rank, &comm) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST(an_abort_during_the_call_takes_effect_after_it)
{
    struct scenario *scenario = new_scenario(2, 2);

    for (int number = 0; number < 3; number++)
        decide(scenario, number, 3);
    run(scenario, 2, abort_meanwhile);
    free_scenario(scenario);
}

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

TEST(other_threads_may_call_meanwhile)
{
    struct scenario *scenario = new_scenario(2, 2);

    for (int number = 0; number < REGROUP_GROUPS; number++)
        decide(scenario, number, 3);
    run(scenario, 2, change_beside_threads);
    free_scenario(scenario);
}

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
    SURE(ep_plan_update(plan, &(ep_plan_update_args)EP_PLAN_UPDATE_ARGS_INIT, NULL) == EP_E_STATE);
    SURE(strstr(ep_last_error(), "the members have changed since it was made"));
    ep_plan_free(plan);
    SURE(ep_plan_new(comm, &args, &plan) == EP_OK);
    ep_plan_free(plan);
    ep_comm_free(comm);
    return 0;
}

TEST(experts_of_absent_ranks_and_plans_of_before_are_refused)
{
    struct scenario *scenario = new_scenario(3, 3);

    decide(scenario, 0, 3);
    decide(scenario, 1, 3);
    run(scenario, 3, use_absent);
    free_scenario(scenario);
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

TEST(two_hundred_changes_leave_nothing_behind)
{
    for (int ranks_per_node = 3; ranks_per_node > 0; ranks_per_node -= 2) {
        struct scenario *scenario = new_scenario(3, ranks_per_node);

        reset(scenario, 0);
        run(scenario, 3, change_often);
        free_scenario(scenario);
    }
}
