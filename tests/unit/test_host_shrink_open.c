/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shrink in which rank 0 is dead fails while the new group opens, in which all ranks have other numbers: texts name
 * ranks by those of the old group. Ranks are processes. The linker redirects calls of the library to the wrapper below.
 */
#include "ranks.h"

#include "group/shrink.h"

#include <signal.h>

enum { NRANKS = 5, TIMEOUT_MS = 120000, CALLER = 3 };

/* What rank CALLER does when it opens the new group. */
enum act { ABORTS, GATHERS_ALONE };

/* Shared with the ranks. */
struct scenario {
    enum act act;
    const char *network; /* NULL: all on one host */
    _Atomic int ready;   /* ranks that have left the first barrier: a death in it would fail it */
    _Atomic int acted;
    ep_status gathered[2], status[NRANKS];
    char gathered_text[2][256], text[NRANKS][256];
};

static struct scenario *shared;

ep_status __real_shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next);
ep_status __wrap_shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next);

/* The others join no all-gather. */
static ep_status gather_alone(struct shrink_group *g)
{
    int32_t mine = 0, all[NRANKS];

    for (int i = 0; i < 2; i++) {
        shared->gathered[i] = g->allgather(g->context, &mine, sizeof(mine), 50 + i, all);
        snprintf(shared->gathered_text[i], sizeof(shared->gathered_text[i]), "%s", ep_last_error());
    }
    atomic_store(&shared->acted, 1);
    return shared->gathered[1];
}

ep_status __wrap_shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next)
{
    if (comm->rank == CALLER && shared->act == GATHERS_ALONE)
        return gather_alone(g);
    while (shared->act == GATHERS_ALONE && !atomic_load(&shared->acted))
        unit_sleep_ms(1);
    if (shared->act == GATHERS_ALONE)
        return ep_fail(EP_E_TIMEOUT, "rank 1 of the old group did not answer");
    if (comm->rank == CALLER)
        ep_comm_abort(comm);
    return __real_shrink_open_next(g, comm, next);
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int rank = boot->rank;
    ep_comm *comm = NULL, *next = NULL;

    shared = scenario;
    if (unit_comm_new(boot, scenario->network, scenario->network ? 1 : 0, TIMEOUT_MS, &comm) != EP_OK ||
        ep_comm_barrier(comm) != EP_OK)
        return 1;
    unit_count(&scenario->ready, NRANKS);
    if (rank == 0)
        raise(SIGKILL);
    (void)ep_comm_barrier(comm); /* fails */
    scenario->status[rank] = ep_comm_shrink(comm, NULL, &next);
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_comm_last_error(comm));
    ep_comm_free(next);
    ep_comm_free(comm);
    return 0;
}

static struct scenario *run_scenario(enum act act, const char *network, ep_status expected, const char *text)
{
    const struct scenario wanted = {.act = act, .network = network};
    struct scenario *scenario = unit_share(&wanted, sizeof(wanted));
    ep_rank_exit exits[NRANKS];

    assert_int_equal(unit_fork_ranks(NRANKS, live, scenario, 2 * TIMEOUT_MS, exits), EP_E_PEER_DEAD);
    for (int rank = 1; rank < NRANKS; rank++) {
        if (scenario->status[rank] != expected || !strstr(scenario->text[rank], text))
            print_error("rank %d: %s\n", rank, scenario->text[rank]);
        assert_int_equal(exits[rank].code, 0);
        assert_int_equal(scenario->status[rank], expected);
        assert_non_null(strstr(scenario->text[rank], text));
    }
    return scenario;
}

TEST(the_rank_that_aborts_has_its_old_number)
{
    munmap(run_scenario(ABORTS, NULL, EP_E_ABORTED, "rank 3 called ep_comm_abort"), sizeof(struct scenario));
    munmap(run_scenario(ABORTS, "tcp", EP_E_ABORTED, "rank 3 called ep_comm_abort"), sizeof(struct scenario));
}

/* Its text would not be the one whose numbers are known to be old ones, and its data would be of another step. */
TEST(no_all_gather_succeeds_after_one_has_failed)
{
    struct scenario *scenario = run_scenario(GATHERS_ALONE, NULL, EP_E_TIMEOUT, "rank 1 ");

    for (int i = 0; i < 2; i++)
        assert_int_equal(scenario->gathered[i], EP_E_TIMEOUT);
    assert_non_null(strstr(scenario->gathered_text[0], "rank 1 of the old group did not answer within 50 ms"));
    assert_string_equal(scenario->gathered_text[1], scenario->gathered_text[0]);
    munmap(scenario, sizeof(*scenario));
}
