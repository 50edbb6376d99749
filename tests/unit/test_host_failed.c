/* SPDX-License-Identifier: Apache-2.0 */
/* ep_comm_get_failed(): what the ranks of one host, and of several, know of each other. Ranks are processes. */
#include "core/core.h"
#include "ranks.h"

#include <signal.h>
#include <unistd.h>

enum { MOST = 4, PATIENT_MS = 60000, LATE_MS = 200 };

enum fate { STAYS = 0, DIES, LEAVES, ABORTS, LATE };

static const ep_status status_of[] = {EP_OK, EP_E_PEER_DEAD, EP_E_PEER_LEFT, EP_E_ABORTED, EP_E_TIMEOUT};

struct scenario {
    int nranks;
    const char *network;
    int per_node;
    enum fate fates[MOST];
};

/* Of a late rank it is known only if another one waits for it: there are two, so that it is known which one is late. */
static const struct scenario scenarios[] = {
    {3, NULL, 0, {STAYS}},
    {3, NULL, 0, {STAYS, DIES}},
    {3, NULL, 0, {LEAVES}},
    {4, NULL, 0, {STAYS, DIES, LEAVES, DIES}},
    {3, NULL, 0, {STAYS, STAYS, ABORTS}},
    {2, NULL, 0, {STAYS, LATE}},
    {4, "emulated", 2, {STAYS, LEAVES, DIES, DIES}},
    {4, "tcp", 2, {STAYS}},
    {4, "tcp", 2, {STAYS, STAYS, STAYS, DIES}},
    {4, "tcp", 2, {STAYS, STAYS, LEAVES}},
    {4, "tcp", 2, {STAYS, DIES, STAYS, DIES}},
    {4, "tcp", 2, {STAYS, STAYS, ABORTS}},
    {3, "tcp", 1, {DIES, STAYS, LEAVES}},
    {2, "tcp", 1, {STAYS, LATE}},
};

struct table {
    struct scenario scenario;
    _Atomic int ready, knowing;
};

/* Waits until exactly what has happened is known. */
static bool knows_all(const ep_comm *comm, const struct scenario *scenario)
{
    int32_t failed[MOST] = {0};
    bool same = false;

    for (int ms = 0; !same && ms < PATIENT_MS; ms++) {
        same = ep_comm_get_failed(comm, failed) == EP_OK;
        for (int rank = 0; rank < scenario->nranks; rank++)
            same = same && failed[rank] == (int32_t)status_of[scenario->fates[rank]];
        if (!same)
            unit_sleep_ms(1);
    }
    for (int rank = 0; !same && rank < scenario->nranks; rank++)
        fprintf(stderr, "rank %d is thought to be %s\n", rank, ep_status_name((ep_status)failed[rank]));
    return same;
}

static int live(const ep_boot *boot, void *argument)
{
    struct table *table = argument;
    const struct scenario *scenario = &table->scenario;
    enum fate fate = scenario->fates[boot->rank];
    int n_knowing = scenario->nranks;
    ep_comm *comm = NULL;

    for (int rank = 0; rank < scenario->nranks; rank++)
        n_knowing -= scenario->fates[rank] == DIES || scenario->fates[rank] == LEAVES;
    SURE(unit_comm_new(boot, scenario->network, scenario->per_node, PATIENT_MS, &comm) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    unit_count(&table->ready, scenario->nranks);
    if (fate == DIES)
        raise(SIGKILL);
    if (fate == ABORTS)
        ep_comm_abort(comm);
    if (fate == STAYS && scenario->fates[scenario->nranks - 1] == LATE) {
        comm->config.timeout_ms = LATE_MS;
        SURE(ep_comm_barrier(comm) == EP_E_TIMEOUT);
    }
    if (fate != LEAVES) {
        SURE(knows_all(comm, scenario));
        unit_count(&table->knowing, n_knowing);
    }
    ep_comm_free(comm);
    return 0;
}

TEST(each_rank_knows_what_happened_to_the_others)
{
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        const struct scenario *scenario = &scenarios[i];
        struct table *table = unit_share(&(struct table){.scenario = *scenario}, sizeof(*table));
        ep_rank_exit exits[MOST];

        (void)unit_fork_ranks(scenario->nranks, live, table, RANKS_PATIENT_MS, exits);
        for (int rank = 0; rank < scenario->nranks; rank++) {
            if (scenario->fates[rank] == DIES ? exits[rank].signal != SIGKILL : exits[rank].code)
                print_error("scenario %zu: rank %d\n", i, rank);
            assert_int_equal(scenario->fates[rank] == DIES ? exits[rank].signal - SIGKILL : exits[rank].code, 0);
        }
        munmap(table, sizeof(*table));
    }
}
