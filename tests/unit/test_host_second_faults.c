/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0 dies in each all-gather of a creation: the others detect it at once, in that or in the next step. Ranks are
 * processes. The linker redirects the all-gathers to the wrapper below, which counts them.
 */
#include "tcp/star.h"

#include <signal.h>
#include <unistd.h>

#include "free_port.h"
#include "ranks.h"

enum { MOST_RANKS = 8, MOST_PHASES = 40, TIMEOUT_MS = 120000 };

struct scenario {
    int nranks, nnodes;
    const char *network;
};

static const struct scenario scenarios[] = {{4, 2, "tcp"}, {8, 4, "tcp"}, {4, 2, "emulated"}, {8, 4, "emulated"}};

/* Shared with the ranks. */
struct table {
    struct scenario scenario;
    int phase, port;
    _Atomic int died; /* rank 0 has reached that phase */
    ep_status status[MOST_RANKS];
    char text[MOST_RANKS][256];
};

static struct table *counts_in; /* on rank 0, while its calls are counted */
static int n_calls;

ep_status __real_tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms,
                                    void *ret_all);
ep_status __wrap_tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms,
                                    void *ret_all);

ep_status __wrap_tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms,
                                    void *ret_all)
{
    if (counts_in && n_calls++ == counts_in->phase) {
        atomic_store(&counts_in->died, 1);
        raise(SIGKILL);
    }
    return __real_tcp_star_allgather(star, mine, bytes, timeout_ms, ret_all);
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

    snprintf(address, sizeof(address), "127.0.0.1:%d", table->port);
    args.rank = rank;
    args.nranks = scenario->nranks;
    args.address = address;
    args.secret = "";
    args.timeout_ms = TIMEOUT_MS;
    if (ep_boot_tcp_new(&args, &boot) != EP_OK)
        return 1;
    counts_in = rank == 0 ? table : NULL;
    table->status[rank] =
        unit_comm_new(ep_boot_tcp_get(boot), scenario->network, scenario->nranks / scenario->nnodes, TIMEOUT_MS, &comm);
    counts_in = NULL;
    snprintf(table->text[rank], sizeof(table->text[rank]), "%s", ep_last_error());
    ep_boot_tcp_free(boot);
    ep_comm_free(comm);
    return 0;
}

/* False: rank 0 has fewer phases. */
static bool run_phase(const struct scenario *scenario, int phase)
{
    const struct table wanted = {.scenario = *scenario, .phase = phase, .port = find_port()};
    struct table *table = unit_share(&wanted, sizeof(wanted));
    ep_rank_exit exits[MOST_RANKS];
    bool died;

    /* Fails, because one was killed. */
    (void)unit_fork_ranks(scenario->nranks, live, table, 2 * TIMEOUT_MS, exits);
    died = atomic_load(&table->died);
    for (int rank = died; rank < scenario->nranks; rank++) {
        ep_status expected = died ? EP_E_PEER_DEAD : EP_OK;

        if (table->status[rank] != expected)
            print_error("%d ranks, %d nodes, %s, phase %d: rank %d: %s\n", scenario->nranks, scenario->nnodes,
                        scenario->network, phase, rank, table->text[rank]);
        assert_int_equal(exits[rank].late, 0);
        assert_int_equal(table->status[rank], expected);
        assert_true(!died || strstr(table->text[rank], "rank 0"));
    }
    munmap(table, sizeof(*table));
    return died;
}

TEST(rank_0_dies_in_each_phase_of_a_creation)
{
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        int phase = 0;

        while (phase < MOST_PHASES && run_phase(&scenarios[i], phase))
            phase++;
        assert_in_range(phase, 1, MOST_PHASES - 1);
    }
}
