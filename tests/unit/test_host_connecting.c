/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank dies while ranks connect to each other, for a low-latency object or in the creation of a communicator: the
 * others detect this by their communicator or bootstrap, and do not wait for the rank. Ranks are processes. On the
 * network "verbs" if EPKIT_TEST_VERBS is set (tests/verbs), else on "tcp".
 */
#include "base/clock.h"
#include "group/group.h"
#include "net/tcp.h"
#include "tcp/acceptor.h"

#include <epkit/lowlatency.h>
#include <signal.h>
#include <unistd.h>

#include "free_port.h"
#include "ranks.h"

enum { NRANKS = 4, VICTIM = 3, TIMEOUT_MS = 240000, SOON_MS = 60000 };

/* Shared with the ranks. */
enum call { CALL_LL_NEW, CALL_NEW, CALLS };

struct scenario {
    enum call call;
    int port; /* CALL_NEW: of the bootstrap over TCP */
    int ranks_per_node;
    ep_status status[NRANKS];
    uint64_t took_ms[NRANKS];
    char text[NRANKS][256];
};

static const char *network = "tcp";
static bool dies; /* this rank, when it connects */

void __real_tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                  const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns);
void __wrap_tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                  const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns);

static void die_if_due(void)
{
    if (dies)
        raise(SIGKILL);
}

void __wrap_tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                  const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns)
{
    if (hello->kind == TCP_STREAM && strcmp(network, "tcp") == 0)
        die_if_due();
    __real_tcp_handshake_connect(hs, fd, key, hello, to, deadline_ns);
}

ep_status __real_ep_net_exchange_hello(const char *name, const struct ep_net_params *params, ep_status status,
                                       void *mine, size_t bytes, void *ret_all);
ep_status __wrap_ep_net_exchange_hello(const char *name, const struct ep_net_params *params, ep_status status,
                                       void *mine, size_t bytes, void *ret_all);

/* After the second hello the ranks of the network "verbs" wait for messages of each other. */
ep_status __wrap_ep_net_exchange_hello(const char *name, const struct ep_net_params *params, ep_status status,
                                       void *mine, size_t bytes, void *ret_all)
{
    static int n;

    status = __real_ep_net_exchange_hello(name, params, status, mine, bytes, ret_all);
    if (dies && strcmp(name, "verbs") == 0 && ++n == 2)
        die_if_due();
    return status;
}

static ep_status create(const ep_boot *boot, const struct scenario *scenario, ep_comm **ret_comm)
{
    return unit_comm_new(boot, network, scenario->ranks_per_node, TIMEOUT_MS, ret_comm);
}

static ep_status create_over_tcp(const ep_boot *boot, const struct scenario *scenario)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    ep_boot_tcp *tcp = NULL;
    ep_comm *comm = NULL;
    char address[32];
    ep_status status;

    snprintf(address, sizeof(address), "127.0.0.1:%d", scenario->port);
    args.rank = boot->rank;
    args.nranks = boot->nranks;
    args.address = address;
    args.secret = "";
    args.timeout_ms = TIMEOUT_MS;
    status = ep_boot_tcp_new(&args, &tcp);
    dies = boot->rank == VICTIM;
    if (status == EP_OK)
        status = create(ep_boot_tcp_get(tcp), scenario, &comm);
    ep_comm_free(comm);
    ep_boot_tcp_free(tcp);
    return status;
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_ll_config config = {.size = sizeof(config), .max_tokens = 4, .hidden = 128, .n_experts = NRANKS, .topk = 1};
    int rank = boot->rank;
    uint64_t begin_ns;
    ep_comm *comm = NULL;
    ep_ll *ll = NULL;

    if (scenario->call != CALL_NEW && (create(boot, scenario, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK))
        return 1;
    dies = comm && rank == VICTIM;
    begin_ns = ep_now_ns();
    scenario->status[rank] =
        scenario->call == CALL_LL_NEW ? ep_ll_new(comm, &config, &ll) : create_over_tcp(boot, scenario);
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_last_error());
    scenario->took_ms[rank] = (ep_now_ns() - begin_ns) / 1000000u;
    ep_ll_free(ll);
    ep_comm_free(comm);
    return 0;
}

static void run_scenario(const struct scenario *wanted)
{
    struct scenario *scenario = unit_share(wanted, sizeof(*wanted));
    ep_rank_exit exits[NRANKS];

    assert_int_equal(unit_fork_ranks(NRANKS, live, scenario, 2 * TIMEOUT_MS, exits), EP_E_PEER_DEAD);
    for (int rank = 0; rank < VICTIM; rank++) {
        if (scenario->status[rank] != EP_E_PEER_DEAD || scenario->took_ms[rank] > SOON_MS)
            print_error("call %d: rank %d: %s\n", wanted->call, rank, scenario->text[rank]);
        assert_int_equal(exits[rank].code, 0);
        assert_int_equal(scenario->status[rank], EP_E_PEER_DEAD);
        assert_non_null(strstr(scenario->text[rank], "rank 3"));
        assert_in_range(scenario->took_ms[rank], 0, SOON_MS);
    }
    munmap(scenario, sizeof(*scenario));
}

TEST(a_death_while_ranks_connect_is_detected_at_once)
{
    for (enum call call = 0; call < CALLS; call++)
        for (int ranks_per_node = 1; ranks_per_node <= 2; ranks_per_node++)
            run_scenario(&(struct scenario){.call = call, .ranks_per_node = ranks_per_node, .port = find_port()});
}

static int choose_network(void **state)
{
    (void)state;
    if (getenv("EPKIT_TEST_VERBS"))
        network = "verbs";
    return 0;
}

TEST_GROUP(choose_network, NULL)
