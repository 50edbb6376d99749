/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration of the new group by the survivors. Which ranks may form it: test_host_shrink_votes.c. */
#include "ranks.h"

#include "core/core.h"

#include <sys/resource.h>

#define NRANKS 4

struct verdicts {
    ep_status first[NRANKS], second[NRANKS], barrier[NRANKS];
    char text[NRANKS][256];
    ep_comm_info info[NRANKS];
    int lacking; /* the rank without descriptors */
    _Atomic int done;
};

static int shrink_without_first(const ep_boot *boot, void *argument)
{
    struct verdicts *all = argument;
    ep_comm_config config = {.size = sizeof(config), .device = -1, .timeout_ms = 60000};
    ep_comm *comm, *next = NULL;
    int rank = boot->rank;

    if (ep_comm_new(boot, &config, &comm) != EP_OK)
        return 1;
    config.channels = rank == 2 ? 3 : 5;
    if (rank > 0) {
        all->first[rank] = ep_comm_shrink(comm, &config, &next);
        snprintf(all->text[rank], sizeof(all->text[rank]), "%s", ep_comm_last_error(comm));
    }
    ep_comm_free(comm);
    return 0;
}

/* Rank 1 would be rank 0 of the new group, whose creation fails: the caller knows it as rank 1. */
TEST(ranks_have_the_numbers_that_the_caller_knows)
{
    static struct verdicts all;

    unit_run_threads(NRANKS, shrink_without_first, &all);
    for (int rank = 1; rank < NRANKS; rank++) {
        assert_int_equal(all.first[rank], EP_E_MISMATCH);
        assert_non_null(strstr(all.text[rank], "channels is 5 on rank 1 and 3 on rank 2"));
    }
}

static int shrink_twice(const ep_boot *boot, void *argument)
{
    struct verdicts *all = argument;
    ep_comm_config config = {.size = sizeof(config), .device = -1, .timeout_ms = 60000};
    ep_comm *comm, *next = NULL;
    int rank = boot->rank;

    if (ep_comm_new(boot, &config, &comm) != EP_OK)
        return 1;
    config.ranks_per_node = NRANKS / 2;
    config.channels = rank == 2 ? 3 : 5;
    all->first[rank] = ep_comm_shrink(comm, &config, &next);
    snprintf(all->text[rank], sizeof(all->text[rank]), "%s", ep_comm_last_error(comm));
    config.channels = 5;
    all->second[rank] = ep_comm_shrink(comm, &config, &next);
    all->barrier[rank] = all->second[rank] == EP_OK ? ep_comm_barrier(next) : EP_E_STATE;
    if (all->second[rank] == EP_OK)
        ep_comm_free(next);
    ep_comm_free(comm);
    return 0;
}

/* A mismatch is found before the new group is opened, names the field, and can be corrected. */
TEST(unequal_configurations_are_named_and_can_be_mended)
{
    static struct verdicts all;

    unit_run_threads(NRANKS, shrink_twice, &all);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(all.first[rank], EP_E_MISMATCH);
        assert_non_null(strstr(all.text[rank], "channels is 5 on rank 0 and 3 on rank 2"));
        assert_int_equal(all.second[rank], EP_OK);
        assert_int_equal(all.barrier[rank], EP_OK);
    }
}

static int shrink_linked_pairs(const ep_boot *boot, void *argument)
{
    struct verdicts *all = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm, *next = NULL;
    int rank = boot->rank;

    if (unit_comm_new(boot, "tcp", 2, 60000, &comm) != EP_OK)
        return 1;
    config.timeout_ms = 50000;
    if (rank < NRANKS - 1) {
        all->first[rank] = ep_comm_shrink(comm, &config, &next);
        snprintf(all->text[rank], sizeof(all->text[rank]), "%s", ep_comm_last_error(comm));
        all->info[rank] = (ep_comm_info)EP_COMM_INFO_INIT;
        all->barrier[rank] = all->first[rank] == EP_OK ? ep_comm_barrier(next) : EP_E_STATE;
        if (all->first[rank] == EP_OK)
            ep_comm_get_info(next, &all->info[rank]);
    }
    ep_comm_free(next);
    ep_comm_free(comm);
    return 0;
}

/* Nodes may be hosts: a configuration without nodes must not put all survivors on one. */
TEST(nodes_of_linked_survivors_stay_apart)
{
    static struct verdicts all;

    unit_run_threads(NRANKS, shrink_linked_pairs, &all);
    for (int rank = 0; rank < NRANKS - 1; rank++) {
        assert_int_equal(all.first[rank], EP_OK);
        assert_int_equal(all.barrier[rank], EP_OK);
        assert_int_equal(all.info[rank].ranks_per_node, 1); /* the nodes have 2 survivors and 1 */
        assert_int_equal(all.info[rank].nnodes, NRANKS - 1);
        assert_int_equal(all.info[rank].timeout_ms, 50000);
    }
}

static int shrink_without_descriptors(const ep_boot *boot, void *argument)
{
    struct verdicts *all = argument;
    struct rlimit before, none;
    ep_comm *comm, *next = NULL;

    if (unit_comm_new(boot, "tcp", 2, 60000, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK)
        return 1;
    if (boot->rank != all->lacking)
        unit_await(&all->done, 1);
    if (boot->rank == all->lacking) {
        comm->config.timeout_ms = 100;
        getrlimit(RLIMIT_NOFILE, &before);
        none = (struct rlimit){.rlim_max = before.rlim_max};
        setrlimit(RLIMIT_NOFILE, &none);
        all->first[boot->rank] = ep_comm_shrink(comm, NULL, &next);
        snprintf(all->text[boot->rank], sizeof(all->text[0]), "%s", ep_comm_last_error(comm));
        setrlimit(RLIMIT_NOFILE, &before);
        atomic_store(&all->done, 1);
    }
    ep_comm_free(comm);
    return 0;
}

/* Ranks that it cannot accept are not late. */
TEST(a_leader_without_descriptors_says_so)
{
    static struct verdicts all;

    unit_run_threads(NRANKS, shrink_without_descriptors, &all);
    assert_int_equal(all.first[0], EP_E_SYSTEM);
    assert_non_null(strstr(all.text[0], "rank 0 cannot accept connections: Too many open files"));
}

/* Nor is the leader, if it is this rank that cannot connect. */
TEST(a_rank_without_descriptors_says_so)
{
    static struct verdicts all = {.lacking = 1};

    unit_run_threads(NRANKS, shrink_without_descriptors, &all);
    assert_int_equal(all.first[1], EP_E_SYSTEM);
    assert_non_null(strstr(all.text[1], "rank 1 cannot connect to rank 0: Too many open files"));
}
