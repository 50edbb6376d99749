/* SPDX-License-Identifier: Apache-2.0 */
/* Steps that succeed on all ranks or on none: the rank that they name. Two nodes of one rank, which are threads. */
#include "ranks.h"

#include "backend/host/host.h"
#include "group/collective.h"
#include "group/memory.h"

enum { NRANKS = 2, PATIENT_MS = 300000 };

struct scenario {
    int (*run)(struct scenario *scenario, ep_comm *comm);
    _Atomic int ready;
    ep_status status[NRANKS];
    char text[NRANKS][EP_ERROR_TEXT_BYTES];
};

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;
    int code;

    if (unit_comm_new(boot, "emulated", 1, PATIENT_MS, &comm) != EP_OK)
        return 1;
    if (ep_comm_barrier(comm) != EP_OK)
        return 2;
    code = scenario->run(scenario, comm);
    /* The peers still read the state of this rank. */
    atomic_fetch_add(&scenario->ready, 1);
    while (atomic_load(&scenario->ready) < NRANKS)
        unit_sleep_ms(1);
    ep_comm_free(comm);
    return code;
}

static void run_scenario(struct scenario *scenario)
{
    unit_run_threads(NRANKS, run_rank, scenario);
}

static void keep(struct scenario *scenario, int rank, ep_status status)
{
    scenario->status[rank] = status;
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_last_error());
}

/* Rank 1 replies that it cannot serve its segment: it has released it. */
static int fail_at_owner(ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    struct ep_group_peer *peer = &group->peers[1];
    struct ep_shm_name name = {.process = peer->key ^ 1, .serial = UINT64_MAX, .bytes = 4096};
    struct ep_shm shm;
    ep_status status;

    if (ep_shm_serve(&peer->address) != EP_OK)
        return 3;
    group->serves = true;
    peer->key ^= 1; /* as of another process, which must be requested */
    status = ep_group_attach(group, 1, &name, PATIENT_MS, NULL, &shm);
    peer->key ^= 1;
    group->serves = false;
    memset(&peer->address, 0, sizeof(peer->address));
    ep_shm_serve_end();
    return status == EP_E_PEER_LEFT ? 0 : 4;
}

/* After the last agreement of the engine itself. */
static ep_status fail_to_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                              struct ep_net **ret_net)
{
    EP_TRY(ep_net_emulated.open(provider, params, ret_net));
    if (params->rank != 0)
        return EP_OK;
    (*ret_net)->ops->free(*ret_net);
    *ret_net = NULL;
    return ep_fail(EP_E_SYSTEM, "no descriptors for the network");
}

static int open_ll_after_failure(struct scenario *scenario, ep_comm *comm)
{
    ep_ll_config config = {.size = sizeof(config), .max_tokens = 4, .hidden = 128, .n_experts = NRANKS, .topk = 1};
    ep_ll *ll = NULL;

    ep_group_of(comm)->provider.open = fail_to_open;
    if (comm->rank == 0 && fail_at_owner(comm) != 0)
        return 3;
    keep(scenario, comm->rank, ep_ll_new(comm, &config, &ll));
    return ll ? 4 : 0;
}

/* The steps of an agreement: a failure is agreed on in the call in which it was found. */
static int agree_twice(struct scenario *scenario, ep_comm *comm)
{
    ep_status status = EP_OK;

    if (comm->rank == 0 && fail_at_owner(comm) != 0)
        return 3;
    if (comm->rank == 0)
        status = ep_fail(EP_E_MEMORY, "what rank 1 could not hand out");
    if (ep_group_agree_within(comm, "first step", status) != EP_E_MEMORY)
        return 4;
    status = comm->rank == 0 ? ep_fail(EP_E_SYSTEM, "no descriptors for the network") : EP_OK;
    keep(scenario, comm->rank, ep_group_agree_within(comm, "second step", status));
    return 0;
}

TEST(an_earlier_failure_of_a_peer_is_not_reported_again)
{
    static const struct {
        int (*run)(struct scenario *scenario, ep_comm *comm);
        const char *text;
    } cases[] = {
        {open_ll_after_failure, "ep_ll_new: rank 0 failed: no descriptors for the network"},
        {agree_twice, "second step: rank 0 failed: no descriptors for the network"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct scenario scenario = {.run = cases[i].run};

        run_scenario(&scenario);
        for (int rank = 0; rank < NRANKS; rank++)
            assert_int_equal(scenario.status[rank], EP_E_SYSTEM);
        assert_string_equal(scenario.text[1], cases[i].text);
        assert_non_null(strstr(scenario.text[0], "no descriptors for the network"));
        assert_null(strstr(scenario.text[0], "rank 1"));
    }
}
