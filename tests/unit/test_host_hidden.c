/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups whose ranks cannot see each other's processes: other users, no /proc, no pidfds, PID namespaces of their own,
 * few descriptors. They work, or the status names the setting that prevents it; a live rank is never reported dead.
 */
#include "ranks.h"
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

#define NRANKS 3
#define VICTIM 1
#define HIDDEN 64
#define SHORT_MS 2000 /* deadline of the tests that let it expire; longer if the group is not created within it */
#define LONG_MS 60000

enum what { WORK, DIE, LATE };

/* Shared with the ranks. */
struct scenario {
    bool (*enter)(int rank); /* the sandbox; false: this machine has none */
    bool forks;              /* enter() has made a PID namespace, which applies to the next child */
    enum what what;
    int ranks_per_node;
    int timeout_ms;
    bool created[NRANKS];
    ep_status status[NRANKS], again[NRANKS];
    char text[NRANKS][512];
    _Atomic int done;
};

static uint16_t pattern(int from, int to, int i)
{
    return (uint16_t)(0x3f80 + from * 16 + to * 4 + i % 4);
}

static void forbid_descriptors(void)
{
    struct rlimit limit;

    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 1;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/*
 * One token from each rank to each, directly into symmetric memory. `forbids`: this rank may open no more descriptors.
 */
static ep_status exchange(ep_comm *comm, int me, bool forbids)
{
    ep_plan_args plan_args;
    ep_dispatch_args args;
    _Alignas(16) uint16_t x[NRANKS][HIDDEN];
    int32_t experts[NRANKS];
    void *memory = NULL;
    ep_plan *plan = NULL;
    ep_status status;

    for (int to = 0; to < NRANKS; to++) {
        experts[to] = to;
        for (int i = 0; i < HIDDEN; i++)
            x[to][i] = pattern(me, to, i);
    }
    plan_args = args_plan(experts, EP_I32, NRANKS, 1, NRANKS);
    status = ep_alloc(comm, NRANKS * HIDDEN * 2, &memory);
    if (status == EP_OK)
        status = ep_plan_new(comm, &plan_args, &plan);
    if (forbids)
        forbid_descriptors();
    args = args_dispatch(EP_BF16, HIDDEN, x, memory, NRANKS);
    if (status == EP_OK)
        status = ep_dispatch_sync(plan, &args);
    for (int from = 0; status == EP_OK && from < NRANKS; from++)
        for (int i = 0; i < HIDDEN; i++)
            if (((uint16_t *)memory)[from * HIDDEN + i] != pattern(from, me, i))
                status = EP_E_VALUE;
    ep_plan_free(plan);
    return status == EP_OK ? ep_free(comm, memory) : status;
}

/* The first process of a PID namespace cannot kill itself by a signal. */
static void die(const struct scenario *scenario)
{
    if (scenario->forks)
        _exit(0);
    raise(SIGKILL);
}

/* Ranks that cannot see each other are still on one host. */
static bool is_one_node(const ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;

    return ep_comm_get_info(comm, &info) == EP_OK && info.nnodes == 1;
}

static int work(const ep_boot *boot, struct scenario *scenario)
{
    int me = boot->rank;
    ep_comm *comm = NULL;
    ep_status status = unit_comm_new(boot, NULL, scenario->ranks_per_node, scenario->timeout_ms, &comm);

    if (status == EP_OK && !scenario->ranks_per_node && !is_one_node(comm))
        status = EP_E_STATE;
    for (int i = 0; status == EP_OK && i < 3; i++)
        status = exchange(comm, me, false);
    scenario->created[me] = status == EP_OK;
    if (status == EP_OK && me == VICTIM && scenario->what == DIE)
        die(scenario);
    if (status == EP_OK && me == VICTIM && scenario->what == LATE)
        while (atomic_load(&scenario->done) < NRANKS - 1)
            unit_sleep_ms(10);
    if (status == EP_OK)
        status = ep_comm_barrier(comm);
    scenario->status[me] = status;
    snprintf(scenario->text[me], sizeof(scenario->text[0]), "%s", ep_last_error());
    atomic_fetch_add(&scenario->done, 1);
    /* A live victim takes part once more before the others leave. */
    while (scenario->what == LATE && atomic_load(&scenario->done) < NRANKS)
        unit_sleep_ms(10);
    scenario->again[me] = comm ? ep_comm_barrier(comm) : status;
    ep_comm_free(comm);
    return 0;
}

static int enter_and_work(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int how = 0;
    pid_t pid;

    alarm(100);
    if (scenario->enter && !scenario->enter(boot->rank))
        return SANDBOX_SKIP;
    if (!scenario->forks)
        return work(boot, scenario);
    pid = fork();
    if (pid == 0) {
        alarm(100);
        _exit(work(boot, scenario));
    }
    waitpid(pid, &how, 0);
    return WIFEXITED(how) ? WEXITSTATUS(how) : 0;
}

static struct scenario *new_scene(bool (*enter)(int rank), enum what what)
{
    const struct scenario scene = {.enter = enter, .what = what, .timeout_ms = what == LATE ? SHORT_MS : LONG_MS};

    return unit_share(&scene, sizeof(scene));
}

/* False: this machine has no such sandbox. */
static bool run(struct scenario *scenario)
{
    ep_rank_exit exits[NRANKS];
    ep_status status = unit_fork_ranks(NRANKS, enter_and_work, scenario, 0, exits);

    assert_true(status == EP_OK || (status == EP_E_PEER_DEAD && scenario->what == DIE));
    for (int rank = 0; rank < NRANKS; rank++) {
        if (exits[rank].code == SANDBOX_SKIP)
            return false;
        assert_int_equal(exits[rank].code, rank == VICTIM && exits[rank].signal ? -1 : 0);
    }
    return true;
}

/* On a loaded machine a short deadline may expire before all ranks have finished: repeat with a longer one. */
static bool was_too_short(const struct scenario *scenario)
{
    bool created = true;

    for (int rank = 0; rank < NRANKS; rank++)
        created = created && scenario->created[rank];
    return !created && scenario->timeout_ms < LONG_MS;
}

/* As run(). */
static bool run_until_created(struct scenario *scenario)
{
    const struct scenario first = *scenario;

    while (run(scenario)) {
        if (!was_too_short(scenario))
            return true;
        *scenario = (struct scenario){.enter = first.enter,
                                      .forks = first.forks,
                                      .what = first.what,
                                      .ranks_per_node = first.ranks_per_node,
                                      .timeout_ms = 2 * scenario->timeout_ms};
    }
    return false;
}

static void expect_all(const struct scenario *scenario, ep_status expected, const char *words)
{
    for (int rank = 0; rank < NRANKS; rank++) {
        if (rank == VICTIM && scenario->what == DIE)
            continue;
        if (scenario->status[rank] != expected || !strstr(scenario->text[rank], words))
            print_error("rank %d: %d: %s\n", rank, (int)scenario->status[rank], scenario->text[rank]);
        assert_int_equal(scenario->status[rank], expected);
        assert_non_null(strstr(scenario->text[rank], expected == EP_OK ? "" : words));
        if (expected != EP_OK)
            assert_int_equal(scenario->again[rank], expected);
    }
}

#define SKIP_IF(missing)                                                                                               \
    do {                                                                                                               \
        if (missing) {                                                                                                 \
            print_message("SKIP: this machine does not let a test make the sandbox (not root?)\n");                    \
            skip();                                                                                                    \
        }                                                                                                              \
    } while (0)

/* The group works; a death is detected; a late rank is reported late. */
static void all_of_it(bool (*enter)(int rank))
{
    static const enum what kinds[] = {WORK, DIE, LATE};

    for (size_t i = 0; i < 3; i++) {
        struct scenario *scenario = new_scene(enter, kinds[i]);

        if (!run_until_created(scenario)) {
            munmap(scenario, sizeof(*scenario));
            SKIP_IF(true);
        }
        if (kinds[i] == WORK)
            expect_all(scenario, EP_OK, "");
        else if (kinds[i] == DIE)
            expect_all(scenario, EP_E_PEER_DEAD, "rank 1 died");
        else
            expect_all(scenario, EP_E_TIMEOUT, "rank 1 did not answer");
        munmap(scenario, sizeof(*scenario));
    }
}

static bool without_pidfd(int rank)
{
    (void)rank;
    return sandbox_forbid_pidfd(ENOSYS);
}

TEST_CALL(a_kernel_without_pidfd, all_of_it(without_pidfd))

static bool own_ipc_and_mounts(int rank)
{
    (void)rank;
    return unshare(CLONE_NEWIPC | CLONE_NEWNS | CLONE_NEWUTS) == 0;
}

TEST(namespaces_that_do_not_matter)
{
    struct scenario *scenario = new_scene(own_ipc_and_mounts, WORK);

    SKIP_IF(!run(scenario));
    expect_all(scenario, EP_OK, "");
    munmap(scenario, sizeof(*scenario));
}

static bool own_pid_namespace(int rank)
{
    (void)rank;
    return unshare(CLONE_NEWPID | CLONE_NEWNET) == 0;
}

static bool other_users(int rank)
{
    return setgid((gid_t)(65000 + rank)) == 0 && setuid((uid_t)(65000 + rank)) == 0;
}

static bool without_proc(int rank)
{
    (void)rank;
    return sandbox_cover_proc();
}

static bool one_without_proc(int rank)
{
    return rank != VICTIM || sandbox_cover_proc();
}

/* No means to map memory of the other: creation fails with the reason. */
TEST(no_way_is_named)
{
    static const struct {
        bool (*enter)(int rank);
        bool forks;
    } cases[] = {{own_pid_namespace, true}, {other_users, false}, {without_proc, false}, {one_without_proc, false}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct scenario *scenario = new_scene(cases[i].enter, WORK);

        scenario->forks = cases[i].forks;
        scenario->ranks_per_node = NRANKS;
        SKIP_IF(!run(scenario));
        for (int rank = 0; rank < NRANKS; rank++) {
            assert_int_equal(scenario->status[rank], EP_E_ARG);
            assert_non_null(strstr(scenario->text[rank], "another PID namespace"));
        }
        munmap(scenario, sizeof(*scenario));
    }
}

/* By default they become nodes over TCP, which a new network namespace does not have. */
TEST(pid_namespaces_of_their_own_are_nodes)
{
    struct scenario *scenario = new_scene(own_pid_namespace, WORK);

    scenario->forks = true;
    SKIP_IF(!run(scenario));
    expect_all(scenario, EP_E_ARG, "ep_comm_new: network tcp: no interface that is up and has an address");
    munmap(scenario, sizeof(*scenario));
}

/* --- what the program does to itself --- */

static bool closed_streams(int rank)
{
    (void)rank;
    close(0);
    close(1);
    close(2);
    return true;
}

TEST(closed_standard_streams)
{
    struct scenario *scenario = new_scene(closed_streams, WORK);

    assert_true(run(scenario));
    expect_all(scenario, EP_OK, "");
    munmap(scenario, sizeof(*scenario));
}

/* --- RLIMIT_NOFILE lowered when the group is there --- */

static int lower_and_wait(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;

    alarm(100);
    if (unit_comm_new(boot, NULL, 0, 60000, &comm) != EP_OK || exchange(comm, boot->rank, false) != EP_OK)
        return 1;
    forbid_descriptors();
    atomic_fetch_add(&scenario->done, 1);
    /* The others have finished the exchange: it must not see this death. */
    while (boot->rank == VICTIM && atomic_load(&scenario->done) < NRANKS)
        unit_sleep_ms(10);
    if (boot->rank == VICTIM)
        raise(SIGKILL);
    scenario->status[boot->rank] = ep_comm_barrier(comm);
    snprintf(scenario->text[boot->rank], sizeof(scenario->text[0]), "%s", ep_last_error());
    scenario->again[boot->rank] = ep_comm_barrier(comm);
    ep_comm_free(comm);
    return 0;
}

TEST(descriptors_forbidden_later)
{
    struct scenario *scenario = new_scene(NULL, DIE);
    ep_rank_exit exits[NRANKS];

    assert_int_equal(unit_fork_ranks(NRANKS, lower_and_wait, scenario, 0, exits), EP_E_PEER_DEAD);
    expect_all(scenario, EP_E_PEER_DEAD, "rank 1 died");
    munmap(scenario, sizeof(*scenario));
}

static int forbid_and_exchange(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;
    int me = boot->rank;

    alarm(100);
    if (unit_comm_new(boot, NULL, 0, LONG_MS, &comm) != EP_OK)
        return 1;
    scenario->status[me] = exchange(comm, me, me == VICTIM);
    snprintf(scenario->text[me], sizeof(scenario->text[0]), "%s", ep_last_error());
    scenario->again[me] = ep_comm_barrier(comm);
    ep_comm_free(comm);
    return 0;
}

/* Whichever rank finds that first, all name the rank that has no descriptors, itself included. */
TEST(a_rank_out_of_descriptors_is_named)
{
    struct scenario *scenario = new_scene(NULL, WORK);
    ep_rank_exit exits[NRANKS];

    assert_int_equal(unit_fork_ranks(NRANKS, forbid_and_exchange, scenario, 0, exits), EP_OK);
    expect_all(scenario, EP_E_SYSTEM, "RLIMIT_NOFILE");
    for (int rank = 0; rank < NRANKS; rank++) {
        const char *named = strstr(scenario->text[rank], "rank ");

        assert_non_null(named);
        if (strncmp(named, "rank 1", 6) != 0)
            fail_msg("rank %d says: %s", rank, scenario->text[rank]);
    }
    munmap(scenario, sizeof(*scenario));
}
