/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events that the control links send without waiting for the next heartbeat: two nodes of two processes, whose
 * heartbeats are an hour apart, and which are in no call.
 */
#include "base/thread.h"

#include <pthread.h>

static int start_patient(pthread_t *thread, const pthread_attr_t *attributes, void *(*loop)(void *), void *link);

#define ep_thread_start start_patient
#include "group/link.c"
#undef ep_thread_start

#include "testing/launch.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <time.h>

#include <cmocka.h>

enum { NRANKS = 4, PER_NODE = 2, VICTIM = 3, HOUR_S = 3600, PATIENCE_S = 60 };

struct scenario {
    _Atomic int heard; /* ranks of the other node that have received the first heartbeat, and receive no periodic one
                          any more */
    bool fails;        /* a rank of the other node finds the death in a call */
};

static int start_patient(pthread_t *thread, const pthread_attr_t *attributes, void *(*loop)(void *), void *context)
{
    struct ep_group_link *link = context;

    link->heartbeat_ns = (uint64_t)HOUR_S * 1000000000u;
    return ep_thread_start(thread, attributes, loop, context);
}

static bool await_death(const struct ep_group *group, int rank)
{
    uint64_t limit_ns = ep_now_ns() + (uint64_t)PATIENCE_S * 1000000000u;

    while (ep_now_ns() < limit_ns) {
        if (ep_group_peer_dead(group, rank))
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return false;
}

/* The rail peer of the victim finds the death; its node has no other connection to the other node of that rank. */
static bool await_failure(ep_comm *comm)
{
    uint64_t limit_ns = ep_now_ns() + (uint64_t)PATIENCE_S * 1000000000u;
    ep_status status = comm->rank == VICTIM - PER_NODE ? ep_comm_barrier(comm) : EP_OK;

    while (status == EP_OK && ep_now_ns() < limit_ns) {
        status = ep_comm_async_error(comm);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return status == EP_E_PEER_DEAD && strstr(ep_comm_last_error(comm), "rank 3 died");
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm = NULL;
    struct ep_group *group;
    bool seen;

    config.backend = "host";
    config.network = "tcp";
    config.ranks_per_node = PER_NODE;
    if (ep_comm_new(boot, &config, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK)
        return 1;
    group = ep_group_of(comm);
    while (boot->rank < PER_NODE && !atomic_load(&group->remote[VICTIM].probed_ns))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    atomic_fetch_add(&scenario->heard, boot->rank < PER_NODE);
    while (atomic_load(&scenario->heard) < PER_NODE)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (boot->rank == VICTIM)
        raise(SIGKILL);
    seen = scenario->fails ? await_failure(comm) : await_death(group, VICTIM);
    ep_comm_free(comm);
    return seen ? 0 : 2;
}

static void run_scenario(bool fails)
{
    struct scenario *scenario =
        mmap(NULL, sizeof(*scenario), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[NRANKS];

    assert_true(scenario != MAP_FAILED);
    scenario->fails = fails;
    launch.mode = EP_LAUNCH_FORK;
    launch.nranks = NRANKS;
    launch.run = live;
    launch.argument = scenario;
    assert_int_equal(ep_launch(&launch, exits), EP_E_PEER_DEAD);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(exits[rank].signal, rank == VICTIM ? SIGKILL : 0);
        if (rank != VICTIM)
            assert_int_equal(exits[rank].code, 0);
    }
    munmap(scenario, sizeof(*scenario));
}

/* Rank 0 has no connection to it: a rank of its node reports it. */
static void a_death_is_reported_at_once(void **state)
{
    (void)state;
    run_scenario(false);
}

static void a_failure_reaches_a_node_whose_rail_peer_has_died(void **state)
{
    (void)state;
    run_scenario(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_death_is_reported_at_once),
        cmocka_unit_test(a_failure_reaches_a_node_whose_rail_peer_has_died),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
