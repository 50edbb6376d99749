/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups whose ranks cannot look at each other: other users behind hidepid, no /proc, no pidfds, PID namespaces of
 * their own, few descriptors. They work, or the status names what forbids it; a rank that lives is never called dead.
 */
#include "sandbox.h"
#include "testing/launch.h"

#include <epkit/epkit.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include <cmocka.h>

#define NRANKS 3
#define VICTIM 1
#define HIDDEN 64
#define SHORT_MS 2000 /* the deadline where one has to pass; longer where the group is not created within it */
#define LONG_MS 60000

enum what { WORK, DIE, LATE };

/* Shared with the ranks. */
struct scene {
    bool (*enter)(int rank); /* the sandbox; false: this machine has none */
    bool forks;              /* enter() has made a PID namespace, which begins with the next child */
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

/* One token from each rank to each, straight into symmetric memory. `forbids`: this rank may open nothing any more. */
static ep_status exchange(ep_comm *comm, int me, bool forbids)
{
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
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
    plan_args.topk_idx = experts;
    plan_args.idx_type = EP_I32;
    plan_args.n_tokens = plan_args.n_experts = NRANKS;
    plan_args.topk = 1;
    status = ep_alloc(comm, NRANKS * HIDDEN * 2, &memory);
    if (status == EP_OK)
        status = ep_plan_new(comm, &plan_args, &plan);
    if (forbids)
        forbid_descriptors();
    args.x = x;
    args.dtype = EP_BF16;
    args.hidden = HIDDEN;
    args.recv_x = memory;
    args.out_rows = NRANKS;
    if (status == EP_OK)
        status = ep_dispatch_sync(plan, &args);
    for (int from = 0; status == EP_OK && from < NRANKS; from++)
        for (int i = 0; i < HIDDEN; i++)
            if (((uint16_t *)memory)[from * HIDDEN + i] != pattern(from, me, i))
                status = EP_E_VALUE;
    ep_plan_free(plan);
    return status == EP_OK ? ep_free(comm, memory) : status;
}

static void nap_ms(long ms)
{
    struct timespec span = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    nanosleep(&span, NULL);
}

/* The first process of a PID namespace cannot kill itself by a signal. */
static void die(const struct scene *scene)
{
    if (scene->forks)
        _exit(0);
    raise(SIGKILL);
}

/* What hides ranks from each other does not make them hosts of their own. */
static bool is_one_node(const ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;

    return ep_comm_get_info(comm, &info) == EP_OK && info.nnodes == 1;
}

static int work(const ep_boot *boot, struct scene *scene)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    int me = boot->rank;
    ep_comm *comm = NULL;
    ep_status status;

    config.backend = "host";
    config.timeout_ms = scene->timeout_ms;
    config.ranks_per_node = scene->ranks_per_node;
    status = ep_comm_new(boot, &config, &comm);
    if (status == EP_OK && !scene->ranks_per_node && !is_one_node(comm))
        status = EP_E_STATE;
    for (int i = 0; status == EP_OK && i < 3; i++)
        status = exchange(comm, me, false);
    scene->created[me] = status == EP_OK;
    if (status == EP_OK && me == VICTIM && scene->what == DIE)
        die(scene);
    if (status == EP_OK && me == VICTIM && scene->what == LATE)
        while (atomic_load(&scene->done) < NRANKS - 1)
            nap_ms(10);
    if (status == EP_OK)
        status = ep_comm_barrier(comm);
    scene->status[me] = status;
    snprintf(scene->text[me], sizeof(scene->text[0]), "%s", ep_last_error());
    atomic_fetch_add(&scene->done, 1);
    /* A victim that lives takes part once more before the others go. */
    while (scene->what == LATE && atomic_load(&scene->done) < NRANKS)
        nap_ms(10);
    scene->again[me] = comm ? ep_comm_barrier(comm) : status;
    ep_comm_free(comm);
    return 0;
}

static int enter_and_work(const ep_boot *boot, void *argument)
{
    struct scene *scene = argument;
    int how = 0;
    pid_t pid;

    alarm(100);
    if (scene->enter && !scene->enter(boot->rank))
        return SANDBOX_SKIP;
    if (!scene->forks)
        return work(boot, scene);
    pid = fork();
    if (pid == 0) {
        alarm(100);
        _exit(work(boot, scene));
    }
    waitpid(pid, &how, 0);
    return WIFEXITED(how) ? WEXITSTATUS(how) : 0;
}

static struct scene *new_scene(bool (*enter)(int rank), enum what what)
{
    struct scene *scene = mmap(NULL, sizeof(*scene), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(scene != MAP_FAILED);
    scene->enter = enter;
    scene->what = what;
    scene->timeout_ms = what == LATE ? SHORT_MS : LONG_MS;
    return scene;
}

/* False: this machine has no such sandbox. */
static bool run(struct scene *scene)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[NRANKS];
    ep_status status;

    launch.nranks = NRANKS;
    launch.run = enter_and_work;
    launch.argument = scene;
    status = ep_launch(&launch, exits);
    assert_true(status == EP_OK || (status == EP_E_PEER_DEAD && scene->what == DIE));
    for (int rank = 0; rank < NRANKS; rank++) {
        if (exits[rank].code == SANDBOX_SKIP)
            return false;
        assert_int_equal(exits[rank].code, rank == VICTIM && exits[rank].signal ? -1 : 0);
    }
    return true;
}

/* On a busy machine a short deadline may pass before all ranks have done their work: then once more with a longer one.
 */
static bool was_too_short(const struct scene *scene)
{
    bool created = true;

    for (int rank = 0; rank < NRANKS; rank++)
        created = created && scene->created[rank];
    return !created && scene->timeout_ms < LONG_MS;
}

/* As run(). */
static bool run_until_created(struct scene *scene)
{
    const struct scene first = *scene;

    while (run(scene)) {
        if (!was_too_short(scene))
            return true;
        *scene = (struct scene){.enter = first.enter,
                                .forks = first.forks,
                                .what = first.what,
                                .ranks_per_node = first.ranks_per_node,
                                .timeout_ms = 2 * scene->timeout_ms};
    }
    return false;
}

static void expect_all(const struct scene *scene, ep_status expected, const char *words)
{
    for (int rank = 0; rank < NRANKS; rank++) {
        if (rank == VICTIM && scene->what == DIE)
            continue;
        if (scene->status[rank] != expected || !strstr(scene->text[rank], words))
            print_error("rank %d: %d: %s\n", rank, (int)scene->status[rank], scene->text[rank]);
        assert_int_equal(scene->status[rank], expected);
        assert_non_null(strstr(scene->text[rank], expected == EP_OK ? "" : words));
        if (expected != EP_OK)
            assert_int_equal(scene->again[rank], expected);
    }
}

#define SKIP_IF(missing)                                                                                               \
    do {                                                                                                               \
        if (missing) {                                                                                                 \
            print_message("SKIP: this machine does not let a test make the sandbox (not root?)\n");                    \
            skip();                                                                                                    \
        }                                                                                                              \
    } while (0)

/* Works; a death is seen where `sees_death`; a late rank is late. */
static void all_of_it(bool (*enter)(int rank), bool forks, bool sees_death)
{
    static const enum what kinds[] = {WORK, DIE, LATE};

    for (size_t i = 0; i < 3; i++) {
        struct scene *scene = new_scene(enter, kinds[i]);

        scene->forks = forks;
        if (kinds[i] == DIE && !sees_death)
            scene->timeout_ms = SHORT_MS;
        if (!run_until_created(scene)) {
            munmap(scene, sizeof(*scene));
            SKIP_IF(true);
        }
        if (kinds[i] == WORK)
            expect_all(scene, EP_OK, "");
        else if (kinds[i] == DIE && sees_death)
            expect_all(scene, EP_E_PEER_DEAD, "rank 1 died");
        else
            expect_all(scene, EP_E_TIMEOUT, "rank 1 did not answer");
        if (kinds[i] == DIE && !sees_death)
            assert_non_null(strstr(scene->text[0], "its state cannot be read here"));
        munmap(scene, sizeof(*scene));
    }
}

static bool be_another_user(int rank)
{
    return setgid((gid_t)(65000 + rank)) == 0 && setuid((uid_t)(65000 + rank)) == 0;
}

static bool other_users(int rank)
{
    return sandbox_hide_proc() && be_another_user(rank);
}

static void other_users_behind_hidepid(void **state)
{
    (void)state;
    all_of_it(other_users, false, true);
}

static bool other_users_without_pidfd(int rank)
{
    return sandbox_hide_proc() && sandbox_forbid_pidfd(EPERM) && be_another_user(rank);
}

static void nobody_can_see_anybody(void **state)
{
    (void)state;
    /* The number of a process that has ended is free once its parent, ep_launch(), has waited for it. */
    all_of_it(other_users_without_pidfd, false, true);
}

static bool without_proc_and_pidfd(int rank)
{
    (void)rank;
    return sandbox_cover_proc() && sandbox_forbid_pidfd(ENOSYS);
}

static void neither_proc_nor_pidfd(void **state)
{
    (void)state;
    all_of_it(without_proc_and_pidfd, false, false);
}

static bool without_pidfd(int rank)
{
    (void)rank;
    return sandbox_forbid_pidfd(ENOSYS);
}

static void a_kernel_without_pidfd(void **state)
{
    (void)state;
    all_of_it(without_pidfd, false, true);
}

static bool without_proc(int rank)
{
    (void)rank;
    return sandbox_cover_proc();
}

static void no_proc_at_all(void **state)
{
    (void)state;
    all_of_it(without_proc, false, true);
}

static bool one_without_proc(int rank)
{
    return rank != VICTIM || sandbox_cover_proc();
}

static void one_rank_without_proc(void **state)
{
    (void)state;
    all_of_it(one_without_proc, false, true);
}

static bool own_pid_namespace(int rank)
{
    (void)rank;
    return unshare(CLONE_NEWPID) == 0;
}

static void pid_namespaces_of_their_own(void **state)
{
    (void)state;
    all_of_it(own_pid_namespace, true, true);
}

static bool own_ipc_and_mounts(int rank)
{
    (void)rank;
    return unshare(CLONE_NEWIPC | CLONE_NEWNS | CLONE_NEWUTS) == 0;
}

static void namespaces_that_do_not_matter(void **state)
{
    struct scene *scene = new_scene(own_ipc_and_mounts, WORK);

    (void)state;
    SKIP_IF(!run(scene));
    expect_all(scene, EP_OK, "");
    munmap(scene, sizeof(*scene));
}

static bool own_namespaces(int rank)
{
    (void)rank;
    return unshare(CLONE_NEWPID | CLONE_NEWNET) == 0;
}

/* Nothing leads from one to the other: refused when the group is created, and the reason says so. */
static void no_way_is_named(void **state)
{
    struct scene *scene = new_scene(own_namespaces, WORK);

    (void)state;
    scene->forks = true;
    scene->ranks_per_node = NRANKS;
    SKIP_IF(!run(scene));
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_true(scene->status[rank] == EP_E_ARG);
        assert_non_null(strstr(scene->text[rank], "must share the PID or the network namespace"));
        /* whole, although a peer's reason is cut at EP_GROUP_REASON_BYTES */
        assert_non_null(strstr(scene->text[rank], "(errno 111)"));
    }
    /* Left to themselves they are nodes over TCP, of which there is none in a new network namespace. */
    scene->ranks_per_node = 0;
    assert_true(run(scene));
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(scene->status[rank], EP_E_ARG);
        assert_string_equal(scene->text[rank], "ep_comm_new: network tcp: no interface that is up and has an address");
    }
    munmap(scene, sizeof(*scene));
}

/* --- between nodes --- */

static void nodes_behind_hidepid(void **state)
{
    struct scene *scene = new_scene(other_users, WORK);

    (void)state;
    scene->ranks_per_node = 1;
    SKIP_IF(!run(scene));
    expect_all(scene, EP_OK, "");
    munmap(scene, sizeof(*scene));
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

static void closed_standard_streams(void **state)
{
    struct scene *scene = new_scene(closed_streams, WORK);

    (void)state;
    assert_true(run(scene));
    expect_all(scene, EP_OK, "");
    munmap(scene, sizeof(*scene));
}

/* --- RLIMIT_NOFILE lowered when the group is there --- */

static int lower_and_wait(const ep_boot *boot, void *argument)
{
    struct scene *scene = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm = NULL;

    alarm(100);
    config.backend = "host";
    config.timeout_ms = 60000;
    if (ep_comm_new(boot, &config, &comm) != EP_OK || exchange(comm, boot->rank, false) != EP_OK)
        return 1;
    forbid_descriptors();
    atomic_fetch_add(&scene->done, 1);
    /* The others are through with the exchange: it must not meet this death. */
    while (boot->rank == VICTIM && atomic_load(&scene->done) < NRANKS)
        nap_ms(10);
    if (boot->rank == VICTIM)
        raise(SIGKILL);
    scene->status[boot->rank] = ep_comm_barrier(comm);
    snprintf(scene->text[boot->rank], sizeof(scene->text[0]), "%s", ep_last_error());
    scene->again[boot->rank] = ep_comm_barrier(comm);
    ep_comm_free(comm);
    return 0;
}

static void descriptors_forbidden_later(void **state)
{
    struct scene *scene = new_scene(NULL, DIE);
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[NRANKS];

    (void)state;
    launch.nranks = NRANKS;
    launch.run = lower_and_wait;
    launch.argument = scene;
    assert_int_equal(ep_launch(&launch, exits), EP_E_PEER_DEAD);
    expect_all(scene, EP_E_PEER_DEAD, "rank 1 died");
    munmap(scene, sizeof(*scene));
}

static int forbid_and_exchange(const ep_boot *boot, void *argument)
{
    struct scene *scene = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm = NULL;
    int me = boot->rank;

    alarm(100);
    if (scene->enter && !scene->enter(me))
        return SANDBOX_SKIP;
    config.backend = "host";
    config.timeout_ms = LONG_MS;
    if (ep_comm_new(boot, &config, &comm) != EP_OK)
        return 1;
    scene->status[me] = exchange(comm, me, me == VICTIM);
    snprintf(scene->text[me], sizeof(scene->text[0]), "%s", ep_last_error());
    scene->again[me] = ep_comm_barrier(comm);
    ep_comm_free(comm);
    return 0;
}

/*
 * It can neither map a peer's memory nor, where only sockets lead there, hand out its own. Whoever finds that first,
 * all name the rank that has no descriptors before they name another one, itself as well.
 */
static void run_out(bool (*enter)(int rank))
{
    struct scene *scene = new_scene(enter, WORK);
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[NRANKS];

    launch.nranks = NRANKS;
    launch.run = forbid_and_exchange;
    launch.argument = scene;
    assert_int_equal(ep_launch(&launch, exits), EP_OK);
    if (exits[0].code == SANDBOX_SKIP) {
        munmap(scene, sizeof(*scene));
        SKIP_IF(true);
    }
    expect_all(scene, EP_E_SYSTEM, "RLIMIT_NOFILE");
    for (int rank = 0; rank < NRANKS; rank++) {
        const char *named = strstr(scene->text[rank], "rank ");

        assert_non_null(named);
        if (strncmp(named, "rank 1", 6) != 0)
            fail_msg("rank %d says: %s", rank, scene->text[rank]);
    }
    munmap(scene, sizeof(*scene));
}

static void who_runs_out_of_descriptors_is_named(void **state)
{
    (void)state;
    run_out(NULL);
}

static void who_runs_out_of_descriptors_is_named_over_sockets(void **state)
{
    (void)state;
    run_out(without_proc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_users_behind_hidepid),
        cmocka_unit_test(nobody_can_see_anybody),
        cmocka_unit_test(neither_proc_nor_pidfd),
        cmocka_unit_test(a_kernel_without_pidfd),
        cmocka_unit_test(no_proc_at_all),
        cmocka_unit_test(one_rank_without_proc),
        cmocka_unit_test(pid_namespaces_of_their_own),
        cmocka_unit_test(no_way_is_named),
        cmocka_unit_test(namespaces_that_do_not_matter),
        cmocka_unit_test(nodes_behind_hidepid),
        cmocka_unit_test(closed_standard_streams),
        cmocka_unit_test(descriptors_forbidden_later),
        cmocka_unit_test(who_runs_out_of_descriptors_is_named),
        cmocka_unit_test(who_runs_out_of_descriptors_is_named_over_sockets),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
