/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0, the leader, dies in each all-gather or vote of a creation and of a shrink. Another rank dies in the first
 * operation of the group that the others form afterwards, and they form one more. Ranks are processes. The linker
 * redirects calls of the library to the wrappers below, which count them.
 */
#include "group/shrink.h"
#include "tcp/star.h"

#include <signal.h>
#include <unistd.h>

#include "free_port.h"
#include "ranks.h"

enum { MOST_RANKS = 8, MOST_PHASES = 40, TIMEOUT_MS = 120000 };

enum dies { IN_CREATION, IN_SHRINK };

struct scenario {
    int nranks, nnodes;
    const char *network;
    enum dies dies;
};

static const struct scenario scenarios[] = {
    {4, 2, "tcp", IN_CREATION},      {8, 4, "tcp", IN_CREATION},    {4, 2, "emulated", IN_CREATION},
    {8, 4, "emulated", IN_CREATION}, {4, 2, "tcp", IN_SHRINK},      {8, 4, "tcp", IN_SHRINK},
    {4, 2, "emulated", IN_SHRINK},   {8, 4, "emulated", IN_SHRINK},
};

/* Shared with the ranks. */
struct table {
    struct scenario scenario;
    int phase, port;
    _Atomic int died;   /* rank 0 has reached that phase */
    _Atomic int formed; /* ranks that have completed their last shrink */
    /* Of the creation or the shrink in which rank 0 dies; of the next call, if that failed. */
    ep_status first[MOST_RANKS], next[MOST_RANKS];
    /* Of the operation in which another rank dies, and of the shrink after it. */
    ep_status operation[MOST_RANKS], last[MOST_RANKS];
    int members[MOST_RANKS], again[MOST_RANKS], deadlines[MOST_RANKS];
    char first_text[MOST_RANKS][256], operation_text[MOST_RANKS][256], text[MOST_RANKS][256];
};

static struct table *counts_in; /* on rank 0, while its calls are counted */
static int n_calls;

ep_status __real_tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms,
                                    void *ret_all);
ep_status __wrap_tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms,
                                    void *ret_all);
struct shrink_outcome __real_shrink_vote(struct shrink *s, bool on_opened, int member, uint32_t vote);
struct shrink_outcome __wrap_shrink_vote(struct shrink *s, bool on_opened, int member, uint32_t vote);

static void count(void)
{
    if (!counts_in || n_calls++ != counts_in->phase)
        return;
    atomic_store(&counts_in->died, 1);
    raise(SIGKILL);
}

ep_status __wrap_tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms,
                                    void *ret_all)
{
    count();
    return __real_tcp_star_allgather(star, mine, bytes, timeout_ms, ret_all);
}

struct shrink_outcome __wrap_shrink_vote(struct shrink *s, bool on_opened, int member, uint32_t vote)
{
    count();
    return __real_shrink_vote(s, on_opened, member, vote);
}

static int members_of(ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;

    return comm && ep_comm_get_info(comm, &info) == EP_OK ? info.nranks : 0;
}

static void keep_text(char text[256])
{
    snprintf(text, 256, "%s", ep_last_error());
}

static void shrink_twice(struct table *table, ep_comm *comm, int rank)
{
    int nranks = table->scenario.nranks;
    ep_comm *next = NULL, *last = NULL;

    counts_in = rank == 0 ? table : NULL;
    table->first[rank] = table->next[rank] = ep_comm_shrink(comm, NULL, &next);
    keep_text(table->first_text[rank]);
    counts_in = NULL;
    if (table->first[rank] != EP_OK)
        table->next[rank] = ep_comm_shrink(comm, NULL, &next);
    keep_text(table->text[rank]);
    table->deadlines[rank] = ep_group_of(comm)->shrink_deadlines;
    table->members[rank] = members_of(next);
    if (table->next[rank] == EP_OK) {
        if (rank == nranks - 1)
            raise(SIGKILL);
        table->operation[rank] = ep_comm_barrier(next);
        keep_text(table->operation_text[rank]);
        table->last[rank] = ep_comm_shrink(next, NULL, &last);
        keep_text(table->text[rank]);
        if (table->last[rank] == EP_OK && ep_comm_barrier(last) == EP_OK)
            table->again[rank] = members_of(last);
    }
    /* A rank that leaves earlier would count as departed in the shrinks of the others. */
    atomic_fetch_add(&table->formed, 1);
    while (atomic_load(&table->formed) < nranks - 1 - atomic_load(&table->died))
        unit_sleep_ms(1);
    ep_comm_free(last);
    ep_comm_free(next);
    ep_comm_free(comm);
}

static int live(const ep_boot *unused, void *argument)
{
    struct table *table = argument;
    const struct scenario *scenario = &table->scenario;
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    int rank = unused->rank;
    ep_boot_tcp *boot = NULL;
    ep_comm *comm = NULL;
    char address[32];
    ep_status status;

    snprintf(address, sizeof(address), "127.0.0.1:%d", table->port);
    args.rank = rank;
    args.nranks = scenario->nranks;
    args.address = address;
    args.secret = "";
    args.timeout_ms = TIMEOUT_MS;
    if (ep_boot_tcp_new(&args, &boot) != EP_OK)
        return 1;
    counts_in = rank == 0 && scenario->dies == IN_CREATION ? table : NULL;
    status =
        unit_comm_new(ep_boot_tcp_get(boot), scenario->network, scenario->nranks / scenario->nnodes, TIMEOUT_MS, &comm);
    counts_in = NULL;
    table->first[rank] = status;
    keep_text(table->first_text[rank]);
    ep_boot_tcp_free(boot);
    if (scenario->dies == IN_CREATION)
        ep_comm_free(comm);
    else if (status == EP_OK && ep_comm_barrier(comm) == EP_OK)
        shrink_twice(table, comm, rank);
    else
        return 2;
    return 0;
}

static void check_created(const struct table *table, int rank)
{
    assert_int_equal(table->first[rank], table->died ? EP_E_PEER_DEAD : EP_OK);
    assert_true(!table->died || strstr(table->first_text[rank], "rank 0"));
}

/* On one host, rank 0 dies in phase 0 before it has voted, so the first call forms the group without it. */
static ep_status expect_first(const struct table *table)
{
    bool counted_out = table->phase == 0 && strcmp(table->scenario.network, "emulated") == 0;

    return table->died && !counted_out ? EP_E_PEER_DEAD : EP_OK;
}

static void check_shrunk(const struct table *table, int rank)
{
    int nranks = table->scenario.nranks;
    char victim[32];

    assert_int_equal(table->first[rank], expect_first(table));
    assert_true(table->first[rank] == EP_OK || strstr(table->first_text[rank], "rank 0 "));
    assert_int_equal(table->next[rank], EP_OK);
    assert_int_equal(table->deadlines[rank], 0); /* all deaths are detected at once */
    assert_int_equal(table->members[rank], nranks - table->died);
    if (rank == nranks - 1)
        return;
    snprintf(victim, sizeof(victim), "rank %d ", nranks - 1 - table->died);
    assert_int_equal(table->operation[rank], EP_E_PEER_DEAD);
    assert_non_null(strstr(table->operation_text[rank], victim));
    assert_int_equal(table->last[rank], EP_OK);
    assert_int_equal(table->again[rank], nranks - 1 - table->died);
}

/* False: rank 0 has fewer phases. */
static bool run_phase(const struct scenario *scenario, int phase)
{
    const struct table wanted = {.scenario = *scenario, .phase = phase, .port = find_port()};
    struct table *table = unit_share(&wanted, sizeof(wanted));
    ep_rank_exit exits[MOST_RANKS];
    bool died;

    /* Fails, because some were killed. */
    (void)unit_fork_ranks(scenario->nranks, live, table, 2 * TIMEOUT_MS, exits);
    died = atomic_load(&table->died);
    for (int rank = died; rank < scenario->nranks; rank++) {
        bool ok = scenario->dies == IN_CREATION
                      ? table->first[rank] == (died ? EP_E_PEER_DEAD : EP_OK)
                      : table->first[rank] == expect_first(table) && table->next[rank] == EP_OK &&
                            (rank == scenario->nranks - 1 || table->last[rank] == EP_OK);

        if (!ok)
            print_error("%d ranks, %d nodes, %s, phase %d: rank %d: %s: %s, then %s\n", scenario->nranks,
                        scenario->nnodes, scenario->network, phase, rank, ep_status_name(table->first[rank]),
                        table->first_text[rank], table->text[rank]);
        assert_int_equal(exits[rank].late, 0);
        if (scenario->dies == IN_CREATION)
            check_created(table, rank);
        else
            check_shrunk(table, rank);
    }
    munmap(table, sizeof(*table));
    return died;
}

static void run_scenarios(enum dies dies)
{
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        int phase = 0;

        while (scenarios[i].dies == dies && phase < MOST_PHASES && run_phase(&scenarios[i], phase))
            phase++;
        assert_true(phase < MOST_PHASES && (phase > 0 || scenarios[i].dies != dies));
    }
}

TEST_CALL(rank_0_dies_in_each_phase_of_a_creation, run_scenarios(IN_CREATION))
TEST_CALL(rank_0_dies_in_each_phase_of_a_shrink_and_another_one_after_it, run_scenarios(IN_SHRINK))
