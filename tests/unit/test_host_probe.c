/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network probe: the rank that is named when it cannot be opened, and the published state of its waits. Two nodes
 * of one rank, which are threads.
 */
#include "ranks.h"

#include "backend/host/host.h"
#include "net/probe.h"

enum { NRANKS = 2, PATIENT_MS = 300000 };

struct scenario {
    const char *network;
    int (*run)(struct scenario *scenario, ep_comm *comm);
    ep_comm *comms[NRANKS];
    _Atomic int ready;
    ep_status status[NRANKS];
    char text[NRANKS][EP_ERROR_TEXT_BYTES];
};

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm = NULL;
    int code;

    config.backend = "host";
    config.timeout_ms = PATIENT_MS;
    config.ranks_per_node = 1;
    config.network = scenario->network;
    if (ep_comm_new(boot, &config, &comm) != EP_OK)
        return 1;
    scenario->comms[boot->rank] = comm;
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

/* --- an earlier failure of a peer -------------------------------------------------------------------------------- */

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

static int open_probe_after_failure(struct scenario *scenario, ep_comm *comm)
{
    struct ep_net_probe *probe = NULL;

    ep_group_of(comm)->provider.open = fail_to_open;
    if (comm->rank == 0 && fail_at_owner(comm) != 0)
        return 3;
    keep(scenario, comm->rank, ep_net_probe_new(comm, 4096, &probe));
    return probe ? 4 : 0;
}

static int open_ll_after_failure(struct scenario *scenario, ep_comm *comm)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;
    ep_ll *ll = NULL;

    config.max_tokens = 4;
    config.hidden = 128;
    config.n_experts = NRANKS;
    config.topk = 1;
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
        {open_probe_after_failure, "network probe: rank 0 failed: no descriptors for the network"},
        {open_ll_after_failure, "ep_ll_new: rank 0 failed: no descriptors for the network"},
        {agree_twice, "second step: rank 0 failed: no descriptors for the network"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct scenario scenario = {.network = "emulated", .run = cases[i].run};

        run_scenario(&scenario);
        for (int rank = 0; rank < NRANKS; rank++)
            assert_int_equal(scenario.status[rank], EP_E_SYSTEM);
        assert_string_equal(scenario.text[1], cases[i].text);
        assert_non_null(strstr(scenario.text[0], "no descriptors for the network"));
        assert_null(strstr(scenario.text[0], "rank 1"));
    }
}

/* --- waits -------------------------------------------------------------------------------------------------------- */

/* Waits until rank 0 publishes that it waits for this rank in that phase. */
static void wait_until_waited_for(const struct scenario *scenario, enum ep_group_phase phase)
{
    const struct ep_group_control *control = ep_group_of(scenario->comms[0])->control;

    while (atomic_load(&control->state.waiting) != (2u << 8 | (uint32_t)phase))
        unit_sleep_ms(1);
}

static int stay_away(struct scenario *scenario, ep_comm *comm, ep_status (*turn)(struct ep_net_probe *probe),
                     enum ep_group_phase phase)
{
    struct ep_net_probe *probe = NULL;

    if (ep_net_probe_new(comm, 1 << 20, &probe) != EP_OK)
        return 3;
    if (turn(probe) != EP_OK)
        return 4;
    if (comm->rank == 0) {
        keep(scenario, 0, turn(probe));
    } else {
        wait_until_waited_for(scenario, phase);
        ep_comm_abort(comm);
        while (atomic_load(&ep_group_of(scenario->comms[0])->control->state.waiting))
            unit_sleep_ms(1);
    }
    ep_net_probe_free(probe);
    return 0;
}

static int stay_away_from_puts(struct scenario *scenario, ep_comm *comm)
{
    return stay_away(scenario, comm, ep_net_probe_puts, EP_GROUP_PROBE_PUTS);
}

static int stay_away_from_sockets(struct scenario *scenario, ep_comm *comm)
{
    return stay_away(scenario, comm, ep_net_probe_sockets, EP_GROUP_PROBE_SOCKETS);
}

/* Its peers see the rank and the phase that it waits for, so that they can follow the chain; and an abort wakes it. */
TEST(waits_publish_rank_and_phase)
{
    for (int sockets = 0; sockets < 2; sockets++) {
        struct scenario scenario = {.network = "tcp", .run = sockets ? stay_away_from_sockets : stay_away_from_puts};

        run_scenario(&scenario);
        assert_int_equal(scenario.status[0], EP_E_ABORTED);
        assert_non_null(strstr(scenario.text[0], "rank 1 called ep_comm_abort"));
    }
}

/* --- closed sockets ----------------------------------------------------------------------------------------------- */

static int close_early(struct scenario *scenario, ep_comm *comm)
{
    struct ep_net_probe *probe = NULL;

    if (ep_net_probe_new(comm, 1 << 20, &probe) != EP_OK)
        return 3;
    if (comm->rank == 0) {
        comm->config.timeout_ms = 1000;
        keep(scenario, 0, ep_net_probe_sockets(probe));
    }
    ep_net_probe_free(probe);
    return 0;
}

/* It lives and has freed its probe. */
TEST(a_closed_socket_is_no_death)
{
    struct scenario scenario = {.network = "tcp", .run = close_early};

    run_scenario(&scenario);
    assert_int_equal(scenario.status[0], EP_E_TIMEOUT);
    assert_string_equal(scenario.text[0], "rank 1 did not answer within 1000 ms in \"network probe: plain sockets\"");
}
