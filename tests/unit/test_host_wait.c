/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waits: which rank is named as failed, and the effect of a failure. Rank 0 of four waits; the test writes the control
 * blocks of the others.
 */
#include "host_ranks.h"
#include "unit.h"

#include "base/backoff.h"
#include "group/failure.h"
#include "group/peers.h"
#include "group/wait.h"

#include <unistd.h>

enum { RANKS = 4 };

struct group {
    ep_comm *comms[RANKS];
    pthread_t sender;
    _Atomic bool beating;
    bool heartbeats[RANKS];
};

static struct ep_group_control *control_of(struct group *group, int rank)
{
    return ep_group_of(group->comms[rank])->control;
}

/* Waiting ranks probe all the time. */
static void *send_heartbeat(void *argument)
{
    struct group *group = argument;

    while (atomic_load(&group->beating)) {
        for (int rank = 0; rank < RANKS; rank++)
            if (group->heartbeats[rank])
                atomic_store(&control_of(group, rank)->state.probed_ns, ep_now_ns());
        usleep(5000);
    }
    return NULL;
}

static int set_up(void **state)
{
    static struct group group;

    memset(&group, 0, sizeof(group));
    *state = &group;
    return host_ranks_new(RANKS, group.comms) ? 0 : -1;
}

static int tear_down(void **state)
{
    struct group *group = *state;

    if (atomic_exchange(&group->beating, false))
        pthread_join(group->sender, NULL);
    host_ranks_free(RANKS, group->comms);
    return 0;
}

static void pretend_to_wait(struct group *group, int rank, int for_rank)
{
    atomic_store(&control_of(group, rank)->state.probed_ns, ep_now_ns());
    atomic_store(&control_of(group, rank)->state.waiting, (uint32_t)(for_rank + 1) << 8 | EP_GROUP_BARRIER);
    group->heartbeats[rank] = true;
}

static void start_beating(struct group *group)
{
    atomic_store(&group->beating, true);
    assert_int_equal(pthread_create(&group->sender, NULL, send_heartbeat, group), 0);
}

/* Rank 0 waits for `rank` until the wait ends. */
static ep_status wait_for(struct group *group, int rank)
{
    struct ep_group_wait wait;
    ep_status status;

    ep_group_wait_begin(&wait, ep_group_of(group->comms[0]), EP_GROUP_DISPATCH_DONE);
    do
        status = ep_group_wait(&wait, ep_group_doorbell(ep_group_of(group->comms[0])), rank);
    while (status == EP_OK);
    return status;
}

TEST_WITH(an_absent_rank_is_named, set_up, tear_down)
{
    struct group *group = *state;
    uint64_t begin = ep_now_ns(), took;

    assert_int_equal(wait_for(group, 1), EP_E_TIMEOUT);
    took = (ep_now_ns() - begin) / 1000000;
    assert_true(took >= (uint64_t)atoi(HOST_RANKS_TIMEOUT));
    assert_string_equal(ep_last_error(),
                        "rank 1 did not answer within " HOST_RANKS_TIMEOUT " ms in \"dispatch: rows placed\"");
    assert_int_equal(group->comms[0]->failed, EP_E_TIMEOUT);
}

TEST_WITH(a_rank_that_waits_for_another_is_not_named, set_up, tear_down)
{
    struct group *group = *state;

    pretend_to_wait(group, 1, 2);
    pretend_to_wait(group, 2, 3);
    start_beating(group);
    assert_fails(wait_for(group, 1), EP_E_TIMEOUT, "rank 3 did not answer");
    /* All others report it in their next call. */
    assert_int_equal(ep_comm_barrier(group->comms[2]), EP_E_TIMEOUT);
    assert_string_equal(ep_comm_last_error(group->comms[2]), "rank 3 did not answer within " HOST_RANKS_TIMEOUT
                                                             " ms in \"dispatch: rows placed\" (seen by rank 0)");
}

/* It was waiting when it was stopped: its last probe is old. */
TEST_WITH(a_rank_stopped_while_waiting_is_named, set_up, tear_down)
{
    struct group *group = *state;

    pretend_to_wait(group, 1, 2);
    pretend_to_wait(group, 2, 3);
    group->heartbeats[2] = false;
    start_beating(group);
    assert_fails(wait_for(group, 1), EP_E_TIMEOUT, "rank 2 did not answer");
}

/* The deadline of rank 0 has passed when rank 1 has just ended a wait. */
static struct ep_group_wait pause_past_deadline(struct group *group)
{
    struct ep_group *host = ep_group_of(group->comms[0]);
    struct ep_group_wait wait;

    host->comm->config.timeout_ms = HOST_RANKS_PATIENT_MS;
    ep_group_wait_begin(&wait, host, EP_GROUP_BARRIER);
    wait.spins = 1 << 20;
    wait.deadline_ns = ep_now_ns();
    atomic_store(&control_of(group, 1)->state.probed_ns, ep_now_ns());
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 1), EP_OK);
    assert_int_equal(group->comms[0]->failed, EP_OK);
    return wait;
}

/* It waits for the rank that is late soon after. */
TEST_WITH(a_rank_between_two_waits_is_not_named, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group_wait wait = pause_past_deadline(group);

    pretend_to_wait(group, 1, 2);
    wait.next_probe_ns = 0;
    assert_fails(ep_group_wait(&wait, ep_group_doorbell(wait.group), 1), EP_E_TIMEOUT, "rank 2 did not answer");
}

/* A rank that keeps ending waits is late all the same. */
TEST_WITH(a_rank_that_stays_between_two_waits_is_named, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group_wait wait = pause_past_deadline(group);

    wait.next_probe_ns = 0;
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(wait.group), 1), EP_OK);
    wait.grace_ns = ep_now_ns();
    atomic_store(&control_of(group, 1)->state.probed_ns, ep_now_ns());
    assert_fails(ep_group_wait(&wait, ep_group_doorbell(wait.group), 1), EP_E_TIMEOUT, "rank 1 did not answer");
}

/* A rank probes while its last probe is compared with an older time. */
TEST_WITH(a_probe_after_ours_is_not_old, set_up, tear_down)
{
    struct group *group = *state;

    pretend_to_wait(group, 1, 2);
    group->heartbeats[1] = false;
    atomic_store(&control_of(group, 1)->state.probed_ns, ep_now_ns() + 10000000000u);
    assert_fails(wait_for(group, 1), EP_E_TIMEOUT, "rank 2 did not answer");
}

TEST_WITH(a_rank_that_waits_for_us_is_only_late, set_up, tear_down)
{
    struct group *group = *state;

    pretend_to_wait(group, 1, 2);
    pretend_to_wait(group, 2, 0);
    start_beating(group);
    assert_fails(wait_for(group, 1), EP_E_TIMEOUT, "rank 2 did not answer");
}

TEST_WITH(a_circle_ends, set_up, tear_down)
{
    struct group *group = *state;

    pretend_to_wait(group, 1, 2);
    pretend_to_wait(group, 2, 3);
    pretend_to_wait(group, 3, 1);
    start_beating(group);
    assert_int_equal(wait_for(group, 1), EP_E_TIMEOUT);
}

/* Between the check of its counter and the probe of its process a rank may have finished and left. */
TEST_WITH(the_condition_is_checked_again_when_a_rank_has_left, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group *host = ep_group_of(group->comms[0]);
    struct ep_group_wait wait;

    ep_group_wait_begin(&wait, host, EP_GROUP_BARRIER);
    wait.spins = 1 << 20;
    atomic_store(&control_of(group, 1)->state.left, 1);
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 1), EP_OK);
    assert_int_equal(group->comms[0]->failed, EP_OK);
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 1), EP_E_PEER_LEFT);
    assert_string_equal(ep_last_error(), "rank 1 left the group while others waited for it in \"barrier\"");
}

/* Separately for each rank: a second check of one says nothing about another. */
TEST_WITH(the_condition_is_checked_again_for_another_rank_that_has_left, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group *host = ep_group_of(group->comms[0]);
    struct ep_group_wait wait;

    ep_group_wait_begin(&wait, host, EP_GROUP_BARRIER);
    wait.spins = 1 << 20;
    atomic_store(&control_of(group, 1)->state.left, 1);
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 1), EP_OK);
    atomic_store(&control_of(group, 2)->state.left, 1);
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 2), EP_OK);
    assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 2), EP_E_PEER_LEFT);
}

/* Its last messages may still be in flight. */
TEST_WITH(the_network_may_deliver_after_a_rank_has_left, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group *host = ep_group_of(group->comms[0]);
    struct ep_group_wait wait;
    ep_status status = EP_OK;

    ep_group_wait_begin(&wait, host, EP_GROUP_DISPATCH_MOVE);
    wait.spins = 1 << 20;
    wait.polls = true;
    atomic_store(&control_of(group, 1)->state.left, 1);
    for (int i = 0; i < 20; i++)
        assert_int_equal(ep_group_wait(&wait, ep_group_doorbell(host), 1), EP_OK);
    while (status == EP_OK)
        status = ep_group_wait(&wait, ep_group_doorbell(host), 1);
    assert_int_equal(status, EP_E_PEER_LEFT);
    assert_true(ep_now_ns() >= wait.deadline_ns);
}

TEST_WITH(tolerant_waits_fail_nobody, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group *host = ep_group_of(group->comms[0]);
    struct ep_group_wait wait;
    ep_status status;

    ep_group_wait_begin(&wait, host, EP_GROUP_LL_RECV);
    wait.tolerant = true;
    do
        status = ep_group_wait(&wait, ep_group_doorbell(host), 2);
    while (status == EP_OK);
    assert_int_equal(status, EP_E_TIMEOUT);
    assert_string_equal(ep_last_error(), "rank 2 in \"low-latency dispatch: rows\"");
    assert_int_equal(group->comms[0]->failed, EP_OK);
    assert_int_equal(atomic_load(&host->control->failure), 0);
    assert_int_equal(ep_group_check(host), EP_OK);
}

TEST_WITH(the_first_failure_stays, set_up, tear_down)
{
    struct group *group = *state;
    struct ep_group *host = ep_group_of(group->comms[0]);

    assert_int_equal(ep_group_set_failure(ep_group_of(group->comms[1]), EP_E_TIMEOUT, 2, EP_GROUP_BARRIER),
                     EP_E_TIMEOUT);
    ep_fail(EP_E_SYSTEM, "something of our own");
    assert_fails(ep_group_set_own_failure(host, EP_E_SYSTEM, 0, EP_GROUP_GATHER), EP_E_TIMEOUT,
                 "rank 2 did not answer");
    assert_int_equal(ep_group_set_failure(host, EP_E_PEER_DEAD, 3, EP_GROUP_GATHER), EP_E_TIMEOUT);
    assert_int_equal(ep_group_check(host), EP_E_TIMEOUT);
}

/* Two ranks that find different failures at the same time. */
struct finder {
    pthread_t thread;
    pthread_barrier_t *start;
    ep_comm *comm;
    int failed_rank;
    ep_status status;
};

static void *find_a_reason(void *argument)
{
    struct finder *finder = argument;

    pthread_barrier_wait(finder->start);
    ep_group_set_failure(ep_group_of(finder->comm), finder->status, finder->failed_rank, EP_GROUP_BARRIER);
    return NULL;
}

TEST(all_ranks_report_one_failure)
{
    for (int round = 0; round < 40; round++) {
        static const ep_status reasons[] = {EP_E_PEER_DEAD, EP_E_TIMEOUT, EP_E_PEER_LEFT};
        struct finder finders[3];
        pthread_barrier_t start;
        ep_comm *comms[RANKS];
        char first[64];

        assert_true(host_ranks_new(RANKS, comms));
        pthread_barrier_init(&start, NULL, 3);
        for (int i = 0; i < 3; i++) {
            finders[i] = (struct finder){.start = &start, .comm = comms[i], .failed_rank = i, .status = reasons[i]};
            assert_int_equal(pthread_create(&finders[i].thread, NULL, find_a_reason, &finders[i]), 0);
        }
        for (int i = 0; i < 3; i++)
            pthread_join(finders[i].thread, NULL);
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_equal(ep_comm_barrier(comms[rank]), ep_comm_async_error(comms[0]));
            if (rank == 0)
                snprintf(first, sizeof(first), "%.6s", strstr(ep_comm_last_error(comms[0]), "rank "));
            assert_non_null(strstr(ep_comm_last_error(comms[rank]), first));
        }
        pthread_barrier_destroy(&start);
        host_ranks_free(RANKS, comms);
    }
}

/* The peers get the reason and the rank that reported it. */
TEST_WITH(reasons_reach_the_peers, set_up, tear_down)
{
    struct group *group = *state;

    ep_fail(EP_E_MEMORY, "mmap: RLIMIT_AS is 4096");
    assert_int_equal(ep_group_set_own_failure(ep_group_of(group->comms[2]), EP_E_MEMORY, 1, EP_GROUP_COMBINE_READY),
                     EP_E_MEMORY);
    assert_int_equal(ep_group_check(ep_group_of(group->comms[3])), EP_E_MEMORY);
    assert_string_equal(ep_last_error(), "rank 2 failed with EP_E_MEMORY in \"combine: inputs ready\": mmap: RLIMIT_AS "
                                         "is 4096");
}

TEST_WITH(own_words_are_kept, set_up, tear_down)
{
    struct group *group = *state;

    ep_fail(EP_E_SYSTEM, "open: too many files");
    assert_int_equal(ep_group_set_own_failure(ep_group_of(group->comms[0]), EP_E_SYSTEM, 1, EP_GROUP_COMBINE_READY),
                     EP_E_SYSTEM);
    assert_string_equal(ep_last_error(), "rank 0 failed: open: too many files (in \"combine: inputs ready\")");
    assert_int_equal(ep_group_check(ep_group_of(group->comms[3])), EP_E_SYSTEM);
}

static void *abort_later(void *argument)
{
    usleep(20000);
    ep_comm_abort(argument);
    return NULL;
}

TEST_WITH(abort_wakes_a_sleeper, set_up, tear_down)
{
    struct group *group = *state;
    pthread_t thread;

    ep_group_of(group->comms[0])->comm->config.timeout_ms = HOST_RANKS_PATIENT_MS;
    assert_int_equal(pthread_create(&thread, NULL, abort_later, group->comms[2]), 0);
    /* Not EP_E_TIMEOUT. */
    assert_fails(wait_for(group, 1), EP_E_ABORTED, "rank 2 called ep_comm_abort");
    pthread_join(thread, NULL);
}

static _Atomic int slow_yields, yields; /* each takes a millisecond; number of calls */

int __real_sched_yield(void);
int __wrap_sched_yield(void);

int __wrap_sched_yield(void)
{
    atomic_fetch_add(&yields, 1);
    if (atomic_load(&slow_yields))
        unit_sleep_ms(1);
    return __real_sched_yield();
}

/* With too few processors a waiting rank sleeps instead, so that the others can run. */
TEST_WITH(a_slow_yield_is_the_last_one, set_up, tear_down)
{
    struct group *group = *state;
    unsigned tries = 0;

    ep_group_of(group->comms[0])->spin = false;
    atomic_store(&slow_yields, 1);
    atomic_store(&yields, 0);
    assert_int_equal(wait_for(group, 1), EP_E_TIMEOUT);
    assert_int_equal(atomic_load(&yields), 1);
    for (int i = 0; i < 100; i++)
        ep_backoff(&tries);
    assert_int_equal(atomic_load(&yields), 2);
    atomic_store(&slow_yields, 0);
}

TEST(unknown_phases_have_a_name)
{
    assert_string_equal(ep_group_phase_name(EP_GROUP_BARRIER), "barrier");
    assert_string_equal(ep_group_phase_name((enum ep_group_phase)200), "?");
}

/* The first of two aborts counts, also in the text on the rank that called the second. */
TEST_WITH(the_first_abort_is_named, set_up, tear_down)
{
    struct group *group = *state;

    ep_comm_abort(group->comms[2]);
    ep_comm_abort(group->comms[1]);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_fails(ep_comm_barrier(group->comms[rank]), EP_E_ABORTED, "rank 2 called ep_comm_abort");
    }
}
