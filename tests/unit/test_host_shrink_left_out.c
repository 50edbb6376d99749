/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status of a rank that a shrink has excluded, when it calls ep_comm_shrink after the others: EP_E_EXCLUDED, in
 * this and in every later call, whichever rank is left to report it. Ranks are processes; those of its node and its
 * rail peers are killed, so that its control links have ended and only ranks without a connection to it know.
 */
#include "ranks.h"

#include "group/group.h"

#include <signal.h>
#include <unistd.h>

enum { NRANKS = 6, TIMEOUT_MS = 4000 };

/* Shared with the ranks. */
struct scenario {
    const char *network;
    int late;
    bool dies[NRANKS];
    bool frees;   /* the survivors free the old group before the late rank calls */
    bool shrinks; /* they shrink the new group once more, and free that, too */
    int n_survivors;
    _Atomic int begun, formed, told;
    ep_status first[NRANKS], again, later;
    char text[256];
};

static void be_late(struct scenario *scenario, ep_comm *comm)
{
    ep_comm *next = NULL;
    int rank = comm->rank;

    unit_await(&scenario->formed, scenario->n_survivors);
    scenario->first[rank] = ep_comm_shrink(comm, NULL, &next);
    snprintf(scenario->text, sizeof(scenario->text), "%s", ep_comm_last_error(comm));
    ep_comm_free(next);
    next = NULL;
    scenario->again = ep_comm_shrink(comm, NULL, &next);
    ep_comm_free(next);
    next = NULL;
    atomic_store(&scenario->told, 1);
    unit_await(&scenario->formed, 2 * scenario->n_survivors); /* no rank is left to reply */
    scenario->later = ep_comm_shrink(comm, NULL, &next);
    ep_comm_free(next);
    ep_comm_free(comm);
}

static void go_on(struct scenario *scenario, ep_comm *comm)
{
    ep_comm *next = NULL, *third = NULL;
    int rank = comm->rank;

    scenario->first[rank] = ep_comm_shrink(comm, NULL, &next);
    if (scenario->first[rank] == EP_OK && scenario->shrinks) {
        next->config.timeout_ms = 10 * TIMEOUT_MS; /* no rank is late there */
        scenario->first[rank] = ep_comm_shrink(next, NULL, &third);
    }
    if (scenario->frees) {
        ep_comm_free(comm);
        comm = NULL;
    }
    if (scenario->shrinks) {
        ep_comm_free(next);
        next = NULL;
    }
    atomic_fetch_add(&scenario->formed, 1);
    unit_await(&scenario->told, 1);
    ep_comm_free(third);
    ep_comm_free(next);
    ep_comm_free(comm);
    atomic_fetch_add(&scenario->formed, 1);
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int rank = boot->rank;
    ep_comm *comm = NULL;

    /* No rank is late before the shrink. */
    if (unit_comm_new(boot, scenario->network, 2, 120000, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK)
        return 1;
    comm->config.timeout_ms = TIMEOUT_MS;
    unit_count(&scenario->begun, NRANKS);
    if (scenario->dies[rank])
        raise(SIGKILL);
    if (rank == scenario->late)
        be_late(scenario, comm);
    else
        go_on(scenario, comm);
    return 0;
}

static void run(struct scenario of)
{
    struct scenario *scenario = unit_share(&of, sizeof(of));
    ep_rank_exit exits[NRANKS];

    for (int rank = 0; rank < NRANKS; rank++)
        scenario->n_survivors += !scenario->dies[rank] && rank != scenario->late;
    (void)unit_fork_ranks(NRANKS, live, scenario, 600000, exits); /* its status reports the killed ranks */
    for (int rank = 0; rank < NRANKS; rank++) {
        if (scenario->dies[rank])
            continue;
        if (scenario->first[rank] != (rank == scenario->late ? EP_E_EXCLUDED : EP_OK))
            print_message("rank %d: %s (%s)\n", rank, ep_status_name(scenario->first[rank]), scenario->text);
        assert_int_equal(scenario->first[rank], rank == scenario->late ? EP_E_EXCLUDED : EP_OK);
        assert_int_equal(exits[rank].code, 0);
    }
    assert_int_equal(scenario->again, EP_E_EXCLUDED);
    assert_int_equal(scenario->later, EP_E_EXCLUDED);
    munmap(scenario, sizeof(*scenario));
}

/* It joins rank 0, which has continued with rank 2. */
TEST(an_excluded_joiner_learns_it)
{
    for (int frees = 0; frees < 2; frees++)
        run((struct scenario){
            .network = "tcp", .late = 5, .dies = {[1] = true, [3] = true, [4] = true}, .frees = frees});
}

/* It leads, and no rank joins it. */
TEST(an_excluded_leader_learns_it)
{
    for (int frees = 0; frees < 2; frees++)
        run((struct scenario){
            .network = "tcp", .late = 0, .dies = {[1] = true, [2] = true, [4] = true}, .frees = frees});
}

/* The members reply as long as they are in a group that descends from that one. */
TEST(the_group_after_the_next_one_reports_it)
{
    run((struct scenario){
        .network = "tcp", .late = 5, .dies = {[1] = true, [3] = true, [4] = true}, .frees = true, .shrinks = true});
}

TEST(ranks_of_one_host_are_excluded)
{
    for (int frees = 0; frees < 2; frees++)
        run((struct scenario){
            .network = "emulated", .late = 5, .dies = {[1] = true, [3] = true, [4] = true}, .frees = frees});
}
