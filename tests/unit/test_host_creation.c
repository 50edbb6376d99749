/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that dies, leaves, or runs out of a resource while a communicator is created: the others learn it from the
 * next all-gather, with its number and its reason, and not at their deadline.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

#define NRANKS 4
#define VICTIM 2
#define MOST_GATHERS 16

enum harm { KILL, LEAVE, DESCRIPTORS, FILE_SIZE };

/* Shared with the ranks. */
struct scenario {
    enum harm harm;
    int at; /* all-gather before which the fault happens; DESCRIPTORS: how many it may still open */
    int ranks_per_node;
    ep_status status[NRANKS];
    char text[NRANKS][512];
};

struct counting {
    const ep_boot *boot;
    struct scenario *scenario;
    int calls;
};

static void limit(int which, rlim_t value)
{
    struct rlimit now;

    if (getrlimit((__rlimit_resource_t)which, &now) != 0)
        _exit(3);
    now.rlim_cur = value;
    if (setrlimit((__rlimit_resource_t)which, &now) != 0)
        _exit(3);
}

static ep_status count_gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct counting *counting = context;

    if (counting->boot->rank == VICTIM && counting->calls++ == counting->scenario->at) {
        if (counting->scenario->harm == KILL)
            raise(SIGKILL);
        if (counting->scenario->harm == LEAVE)
            _exit(0);
    }
    return counting->boot->allgather(counting->boot->context, mine, bytes, timeout_ms, ret_all);
}

/* Opens descriptors until the lowest numbers are in use: RLIMIT_NOFILE limits the number, not the count. */
static rlim_t first_free_descriptor(void)
{
    int fd = dup(2);

    close(fd);
    return (rlim_t)fd;
}

static int create(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    struct counting counting = {.boot = boot, .scenario = scenario};
    ep_boot mine = *boot;
    ep_comm *comm = NULL;

    alarm(100);
    mine.allgather = count_gather;
    mine.context = &counting;
    if (boot->rank == VICTIM && scenario->harm == DESCRIPTORS)
        limit(RLIMIT_NOFILE, first_free_descriptor() + (rlim_t)scenario->at);
    if (boot->rank == VICTIM && scenario->harm == FILE_SIZE)
        limit(RLIMIT_FSIZE, 4096);
    scenario->status[boot->rank] = unit_comm_new(&mine, NULL, scenario->ranks_per_node, 90000, &comm);
    snprintf(scenario->text[boot->rank], sizeof(scenario->text[0]), "%s", ep_last_error());
    ep_comm_free(comm);
    return 0;
}

/* The failure seen by the ranks other than the victim: the same on all of them. */
static ep_status run(struct scenario *scenario)
{
    ep_rank_exit exits[NRANKS];
    ep_status status;

    memset(scenario->status, 0xff, sizeof(scenario->status));
    memset(scenario->text, 0, sizeof(scenario->text));
    status = unit_fork_ranks(NRANKS, create, scenario, 0, exits);
    assert_true(status == EP_OK || status == EP_E_PEER_DEAD);
    for (int rank = 0; rank < NRANKS; rank++) {
        if (rank == VICTIM)
            continue;
        assert_int_equal(exits[rank].signal, 0);
        if (scenario->status[rank] != scenario->status[0])
            print_error("rank %d: %s\nrank 0: %s\n", rank, scenario->text[rank], scenario->text[0]);
        assert_int_equal(scenario->status[rank], scenario->status[0]);
    }
    return scenario->status[0];
}

static void all_report(const struct scenario *scenario, const char *what, const char *why)
{
    for (int rank = 0; rank < NRANKS; rank++) {
        if (rank == VICTIM)
            continue;
        if (!strstr(scenario->text[rank], what) || !strstr(scenario->text[rank], why))
            print_error("harm %d at %d: rank %d says: %s\n", scenario->harm, scenario->at, rank, scenario->text[rank]);
        assert_non_null(strstr(scenario->text[rank], what));
        assert_non_null(strstr(scenario->text[rank], why));
    }
}

static struct scenario *new_scene(enum harm harm, int ranks_per_node)
{
    const struct scenario scene = {.harm = harm, .ranks_per_node = ranks_per_node};

    return unit_share(&scene, sizeof(scene));
}

static void ends_before_each_gather(enum harm harm, int ranks_per_node, int least)
{
    struct scenario *scenario = new_scene(harm, ranks_per_node);
    ep_status status = EP_E_PEER_DEAD;

    for (scenario->at = 0; scenario->at < MOST_GATHERS; scenario->at++) {
        status = run(scenario);
        if (status == EP_OK)
            break;
        assert_int_equal(status, EP_E_PEER_DEAD);
        all_report(scenario, "rank 2 died", "");
    }
    assert_int_equal(status, EP_OK); /* after the last all-gather */
    assert_true(scenario->at >= least);
    munmap(scenario, sizeof(*scenario));
}

TEST(a_death_is_known_at_each_step)
{
    ends_before_each_gather(KILL, 0, 3);
    ends_before_each_gather(LEAVE, 0, 3);
}

TEST_CALL(a_death_is_known_between_nodes, ends_before_each_gather(KILL, 2, 5))

TEST(no_descriptor_is_known_at_each_step)
{
    static const int nodes[] = {0, 2};

    for (size_t i = 0; i < 2; i++) {
        struct scenario *scenario = new_scene(DESCRIPTORS, nodes[i]);
        ep_status status = EP_E_SYSTEM;

        for (scenario->at = 0; scenario->at < 64; scenario->at++) {
            status = run(scenario);
            if (status == EP_OK)
                break;
            assert_int_equal(status, EP_E_SYSTEM);
            all_report(scenario, "rank 2", "RLIMIT_NOFILE");
        }
        assert_int_equal(status, EP_OK);
        assert_true(scenario->at >= NRANKS);
        munmap(scenario, sizeof(*scenario));
    }
}

TEST(a_limit_of_one_rank_is_reported_to_all)
{
    struct scenario *scenario = new_scene(FILE_SIZE, 0);

    assert_int_equal(run(scenario), EP_E_MEMORY);
    all_report(scenario, "rank 2 failed: ", "RLIMIT_FSIZE (ulimit -f)");
    assert_int_equal(scenario->status[VICTIM], EP_E_MEMORY);
    assert_non_null(strstr(scenario->text[VICTIM], "RLIMIT_FSIZE (ulimit -f)"));
    munmap(scenario, sizeof(*scenario));
}

/* A thread that returns without joining. */
static int join_or_return(const ep_boot *boot, void *argument)
{
    return boot->rank == VICTIM ? 0 : create(boot, argument);
}

TEST(a_thread_that_returned_is_known)
{
    struct scenario *scenario = new_scene(LEAVE, 0);

    unit_run_threads(NRANKS, join_or_return, scenario);
    alarm(0);
    for (int rank = 0; rank < NRANKS; rank++)
        assert_int_equal(scenario->status[rank], rank == VICTIM ? EP_OK : EP_E_PEER_LEFT);
    all_report(scenario, "rank 2 has returned from its program", "");
    munmap(scenario, sizeof(*scenario));
}
