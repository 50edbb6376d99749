/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan of no rows between nodes, by which the CUDA backend learns in a capture how many tokens each rank may have:
 * the sizes come, no routes are made, and ranks that disagree hear of it. Ranks are threads on the host backend.
 */
#include "ranks.h"

#include "group/group.h"
#include "group/plan.h"

#define RANKS 4
#define NODES 2
#define TOPK 2
#define EXPERTS 8
#define ROUNDS 10 /* more than there may be exchanges at a time */

struct scenario {
    int other_topk; /* of the last rank; 0: the same */
    char wrong[RANKS][300];
};

static ep_plan make_plan(ep_comm *comm, int n_tokens, int topk)
{
    return (ep_plan){.comm = comm,
                     .args = {.idx_type = EP_I32,
                              .n_tokens = n_tokens,
                              .topk = topk,
                              .n_experts = EXPERTS,
                              .expert_alignment = 1,
                              .max_recv_tokens = 100,
                              .max_tokens = comm->rank == 1 ? 0 : 10 * (comm->rank + 1)}};
}

/* NULL, or what is wrong. Rank 1 says no max_tokens: those that it has count. */
static const char *check_sizes(const ep_plan *plan, int n_tokens)
{
    const struct ep_group_plan *inner = ep_group_plan_of(plan);

    for (int rank = 0; rank < RANKS; rank++) {
        if (inner->max_tokens[rank] != (rank == 1 ? n_tokens : 10 * (rank + 1)))
            return "max_tokens of a rank";
        if (inner->rows_on[rank])
            return "rows on a rank";
    }
    if (plan->info.n_tokens != n_tokens || plan->info.out_rows != 100 || ep_plan_info_now(plan)->n_recv != -1 ||
        plan->info.n_send != -1)
        return "what the plan says of itself";
    for (int node = 0; node < NODES; node++)
        if (inner->rail[node].n_tokens || inner->n_net_tokens[node])
            return "a route";
    return NULL;
}

static const char *run_rounds(ep_comm *comm)
{
    for (int round = 0; round < ROUNDS; round++) {
        ep_plan plan = make_plan(comm, round, TOPK);
        const char *wrong = ep_group_plan_exchange_sizes(&plan) == EP_OK ? check_sizes(&plan, round) : ep_last_error();

        ep_group_plan_close(&plan);
        if (wrong)
            return wrong;
    }
    return NULL;
}

static const char *run_disagree(ep_comm *comm, int other_topk)
{
    ep_plan plan = make_plan(comm, 3, comm->rank == RANKS - 1 ? other_topk : TOPK);
    ep_status status = ep_group_plan_exchange_sizes(&plan);
    bool says = strstr(ep_last_error(), "topk");

    if (status != EP_E_MISMATCH || !says || plan.impl)
        return "no mismatch of topk";
    /* The group goes on. */
    return run_rounds(comm);
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm;
    const char *wrong;

    if (unit_comm_new(boot, NULL, RANKS / NODES, 20000, &comm) != EP_OK)
        return 1;
    wrong = scenario->other_topk ? run_disagree(comm, scenario->other_topk) : run_rounds(comm);
    if (wrong)
        snprintf(scenario->wrong[boot->rank], sizeof(scenario->wrong[0]), "%s", wrong);
    ep_comm_free(comm);
    return 0;
}

static void run_scenario(int other_topk)
{
    struct scenario scenario = {.other_topk = other_topk};

    unit_run_threads(RANKS, run_rank, &scenario);
    for (int rank = 0; rank < RANKS; rank++)
        assert_string_equal(scenario.wrong[rank], "");
}

TEST_CALL(test_sizes_come, run_scenario(0))
TEST_CALL(test_disagreement_is_named, run_scenario(TOPK + 1))
