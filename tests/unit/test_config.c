/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration, environment, and the agreement of the ranks; with a mock backend. */
#include "base/locality.h"
#include "mock_backend.h"
#include "net/net.h"
#include "ranks.h"

#define RANKS 4

/* The locality of the ranks, set by the test: one letter each for the host and the PID namespace. */
static char hosts[RANKS][3];
static _Thread_local int this_rank = -1;

void __real_ep_locality_get_self(struct ep_locality *ret_locality);
void __wrap_ep_locality_get_self(struct ep_locality *ret_locality);

void __wrap_ep_locality_get_self(struct ep_locality *ret_locality)
{
    const char *at = this_rank >= 0 ? hosts[this_rank] : "";

    __real_ep_locality_get_self(ret_locality);
    if (!*at)
        return;
    memset(ret_locality, 0, sizeof(*ret_locality));
    ret_locality->host[0] = at[0] == '?' ? '\0' : at[0];
    ret_locality->pid_namespace = (unsigned char)at[1];
}

static int reset(void **state)
{
    (void)state;
    memset((void *)&mock, 0, sizeof(mock));
    memset(hosts, 0, sizeof(hosts));
    setenv("EPKIT_BACKEND", "host", 1);
    unsetenv("EPKIT_TIMEOUT_MS");
    unsetenv("EPKIT_STRICT_SMS");
    return 0;
}

/* For one of RANKS identical ranks. */
static ep_status create(const ep_comm_config *config, ep_comm **ret_comm)
{
    ep_boot boot = mock_boot(0, RANKS);

    return ep_comm_new(&boot, config, ret_comm);
}

static ep_comm_config defaults(void)
{
    return (ep_comm_config)EP_COMM_CONFIG_INIT;
}

TEST_WITH(defaults_are_filled_in, reset, NULL)
{
    ep_comm *comm;

    ep_fail(EP_OK, "an older error");
    assert_int_equal(create(NULL, &comm), EP_OK);
    assert_string_equal(ep_last_error(), "an older error");
    assert_int_equal(comm->config.timeout_ms, 30000);
    assert_int_equal(comm->config.channels, 4);
    assert_int_equal(comm->config.partial_type, EP_F32);
    assert_int_equal(comm->config.ranks_per_node, RANKS);
    assert_int_equal(comm->nnodes, 1);
    assert_string_equal(comm->config.backend, "host");
    ep_comm_free(comm);
}

/* --- environment --- */

static void *create_on_a_small_stack(void *ret_status)
{
    ep_comm *comm;

    *(ep_status *)ret_status = create(NULL, &comm);
    return NULL;
}

TEST_WITH(a_small_stack_is_refused, reset, NULL)
{
    ep_status status = EP_OK;
    pthread_attr_t attributes;
    pthread_t thread;

    pthread_attr_init(&attributes);
    assert_int_equal(pthread_attr_setstacksize(&attributes, 96 << 10), 0);
    assert_int_equal(pthread_create(&thread, &attributes, create_on_a_small_stack, &status), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_attr_destroy(&attributes);
    assert_int_equal(status, EP_E_SYSTEM);
}

TEST_WITH(strict_sms_come_from_the_environment, reset, NULL)
{
    static const struct {
        const char *text;
        uint32_t flags;
        bool wrong;
    } cases[] = {{"1", EP_COMM_STRICT_SMS, false}, {"0", 0, false}, {"", 0, false}, {"yes", 0, true}, {"10", 0, true}};
    ep_comm *comm;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("EPKIT_STRICT_SMS", cases[i].text, 1);
        if (cases[i].wrong) {
            assert_fails(create(NULL, &comm), EP_E_ARG, "ep_comm_new: $EPKIT_STRICT_SMS is \"");
            continue;
        }
        assert_int_equal(create(NULL, &comm), EP_OK);
        assert_int_equal(comm->config.flags, cases[i].flags);
        ep_comm_free(comm);
    }
    unsetenv("EPKIT_STRICT_SMS");
}

TEST_WITH(timeout_comes_from_the_environment, reset, NULL)
{
    static const struct {
        const char *text;
        int timeout_ms; /* 0: rejected */
    } cases[] = {
        {"1234", 1234}, {"1", 1},          {"2147483647", INT32_MAX},
        {"", 30000},    {"0", 0},          {"-5", 0},
        {"abc", 0},     {"12x", 0},        {" 12", 0},
        {"+12", 0},     {"12 ", 0},        {"1.5", 0},
        {"0x10", 0},    {"2147483648", 0}, {"99999999999999999999", 0},
    };
    ep_comm_config config = defaults();
    ep_comm *comm;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_status status;

        setenv("EPKIT_TIMEOUT_MS", cases[i].text, 1);
        status = create(NULL, &comm);
        if (cases[i].timeout_ms) {
            assert_int_equal(status, EP_OK);
            assert_int_equal(comm->config.timeout_ms, cases[i].timeout_ms);
            ep_comm_free(comm);
        } else {
            assert_fails(status, EP_E_ARG, "ep_comm_new: $EPKIT_TIMEOUT_MS is \"");
            assert_non_null(strstr(ep_last_error(), cases[i].text));
        }
    }
    /* A value in the configuration overrides the environment. */
    config.timeout_ms = 77;
    assert_int_equal(create(&config, &comm), EP_OK);
    assert_int_equal(comm->config.timeout_ms, 77);
    ep_comm_free(comm);
}

TEST_WITH(backend_comes_from_the_environment, reset, NULL)
{
    ep_comm_config config = defaults();
    ep_comm *comm;

    setenv("EPKIT_BACKEND", "opencl", 1);
    assert_int_equal(create(NULL, &comm), EP_E_ARG);
    assert_string_equal(ep_last_error(),
                        "ep_comm_new: $EPKIT_BACKEND: backend \"opencl\" is not one of \"cuda\", \"host\"");
    config.backend = "host";
    assert_int_equal(create(&config, &comm), EP_OK);
    ep_comm_free(comm);
}

/* --- bad configurations --- */

TEST_WITH(bad_configurations_are_refused, reset, NULL)
{
#define CONFIG(...)                                                                                                    \
    {                                                                                                                  \
        .size = sizeof(ep_comm_config), __VA_ARGS__                                                                    \
    }
    static const struct {
        ep_comm_config config;
        ep_status status;
        const char *text;
    } cases[] = {
        {{.size = 3}, EP_E_ABI, "config.size is 3"},
        {CONFIG(.timeout_ms = -1), EP_E_ARG, "timeout_ms is -1"},
        {CONFIG(.ranks_per_node = 3), EP_E_ARG, "ranks_per_node 3 does not divide the 4 ranks"},
        {CONFIG(.ranks_per_node = -2), EP_E_ARG, "ranks_per_node is -2"},
        {CONFIG(.ranks_per_node = 8), EP_E_ARG, "ranks_per_node is 8"},
        {CONFIG(.flags = 6), EP_E_ARG, "flags has unknown bits 0x6"},
        {CONFIG(.channels = 17), EP_E_ARG, "channels is 17"},
        {CONFIG(.channels = -1), EP_E_ARG, "channels is -1"},
        {CONFIG(.partial_type = EP_F8E4M3), EP_E_ARG, "partial_type is 2 (fp8)"},
        {CONFIG(.backend = "rocm"), EP_E_ARG, "backend \"rocm\" is not one of"},
        {CONFIG(.backend = ""), EP_E_ARG, "backend \"\" is not one of"},
        {CONFIG(.network = "mpi"), EP_E_UNSUPPORTED,
         "network \"mpi\" is not one of \"emulated\", \"tcp\", \"verbs\"; the bootstrap provides none"},
        {CONFIG(.network = ""), EP_E_UNSUPPORTED, "network \"\""},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_comm *comm = NULL;

        assert_int_equal(create(&cases[i].config, &comm), cases[i].status);
        if (strncmp(ep_last_error(), "ep_comm_new: ", 13) != 0 || !strstr(ep_last_error(), cases[i].text))
            fail_msg("case %zu: \"%s\", expected \"...%s...\"", i, ep_last_error(), cases[i].text);
        assert_null(comm);
    }
    assert_int_equal(mock.opened, 0);
}

TEST_WITH(bad_bootstraps_are_refused, reset, NULL)
{
    ep_boot good = mock_boot(0, 1), bad;
    ep_comm *comm = NULL;

    assert_int_equal(ep_comm_new(NULL, NULL, &comm), EP_E_ARG);
    assert_string_equal(ep_last_error(), "ep_comm_new: boot is NULL");
    bad = good;
    bad.size = 8;
    assert_int_equal(ep_comm_new(&bad, NULL, &comm), EP_E_ABI);
    bad = good;
    bad.allgather = NULL;
    assert_int_equal(ep_comm_new(&bad, NULL, &comm), EP_E_ARG);
    bad = good;
    bad.rank = 1;
    assert_fails(ep_comm_new(&bad, NULL, &comm), EP_E_ARG, "boot.rank is 1");
    bad.rank = -1;
    assert_int_equal(ep_comm_new(&bad, NULL, &comm), EP_E_ARG);
    bad = good;
    bad.nranks = 0;
    assert_int_equal(ep_comm_new(&bad, NULL, &comm), EP_E_ARG);
    bad.nranks = EP_MAX_RANKS + 1;
    assert_int_equal(ep_comm_new(&bad, NULL, &comm), EP_E_ARG);
    bad = good;
    bad.reserved = 1;
    assert_fails(ep_comm_new(&bad, NULL, &comm), EP_E_ARG, "reserved is 1");
    assert_null(comm);
    assert_int_equal(mock.opened, 0);
}

TEST_WITH(a_bootstrap_may_provide_a_network, reset, NULL)
{
    struct ep_net_provider provider = {.abi = EP_NET_ABI, .name = "pigeons"};
    ep_comm_config config = defaults();
    ep_boot boot = mock_boot(0, RANKS);
    ep_comm *comm;

    boot.network = &provider;
    config.ranks_per_node = 2;
    assert_int_equal(ep_comm_new(&boot, &config, &comm), EP_OK);
    assert_string_equal(comm->config.network, "pigeons");
    ep_comm_free(comm);
    config.network = "emulated";
    assert_int_equal(ep_comm_new(&boot, &config, &comm), EP_OK);
    assert_string_equal(comm->config.network, "emulated");
    ep_comm_free(comm);
    config.network = "mpi";
    assert_fails(ep_comm_new(&boot, &config, &comm), EP_E_UNSUPPORTED, "pigeons");
    assert_null(strstr(ep_last_error(), "$"));
    /* The environment comes before the bootstrap, and after the caller. */
    setenv("EPKIT_NETWORK", "emulated", 1);
    assert_int_equal(ep_comm_new(&boot, &config, &comm), EP_E_UNSUPPORTED);
    config.network = NULL;
    assert_int_equal(ep_comm_new(&boot, &config, &comm), EP_OK);
    assert_string_equal(comm->config.network, "emulated");
    ep_comm_free(comm);
    setenv("EPKIT_NETWORK", "rdma", 1);
    assert_fails(ep_comm_new(&boot, &config, &comm), EP_E_UNSUPPORTED,
                 "ep_comm_new: $EPKIT_NETWORK: network \"rdma\" is not one of");
    unsetenv("EPKIT_NETWORK");
    provider.abi++;
    config.network = NULL;
    assert_int_equal(ep_comm_new(&boot, &config, &comm), EP_E_ABI);
}

/* --- agreement --- */

struct scenario {
    const struct ep_net_provider *network; /* of the bootstrap */
    int boot_nodes[RANKS];                 /* ranks_per_node of each rank's bootstrap */
    ep_comm_config config[RANKS];          /* of each rank */
    ep_comm **ret_comm[RANKS];
    ep_comm *comm[RANKS];
    ep_status status[RANKS];
    char text[RANKS][EP_ERROR_TEXT_BYTES];
};

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_boot mine = *boot;
    int rank = boot->rank;

    this_rank = rank;
    mine.network = scenario->network;
    mine.ranks_per_node = scenario->boot_nodes[rank];
    scenario->status[rank] = ep_comm_new(&mine, &scenario->config[rank], scenario->ret_comm[rank]);
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_last_error());
    return 0;
}

static void init_scenario(struct scenario *scenario)
{
    memset(scenario, 0, sizeof(*scenario));
    for (int rank = 0; rank < RANKS; rank++) {
        scenario->config[rank] = defaults();
        scenario->config[rank].timeout_ms = 60000;
        scenario->ret_comm[rank] = &scenario->comm[rank];
    }
}

static void run_scenario(struct scenario *scenario)
{
    mock.opened = 0;
    unit_run_threads(RANKS, run_rank, scenario);
}

TEST_WITH(ranks_that_agree_get_communicators, reset, NULL)
{
    struct scenario scenario;

    init_scenario(&scenario);
    /* These may differ, and an explicit default equals an unset field. */
    scenario.config[1].timeout_ms = 59000;
    scenario.config[2].device = 7;
    scenario.config[3].ranks_per_node = RANKS;
    scenario.config[3].channels = 4;
    scenario.config[3].partial_type = EP_F32;
    scenario.config[3].backend = "host";
    run_scenario(&scenario);
    assert_int_equal(mock.opened, RANKS);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(scenario.status[rank], EP_OK);
        assert_int_equal(scenario.comm[rank]->rank, rank);
        ep_comm_free(scenario.comm[rank]);
    }
}

static void expect_same_mismatch(struct scenario *scenario, const char *text)
{
    run_scenario(scenario);
    assert_int_equal(mock.opened, 0);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(scenario->status[rank], EP_E_MISMATCH);
        assert_string_equal(scenario->text[rank], text);
        assert_null(scenario->comm[rank]);
    }
}

TEST_WITH(a_mismatch_is_named_on_all_ranks, reset, NULL)
{
    struct scenario scenario;

    init_scenario(&scenario);
    scenario.config[3].ranks_per_node = 2;
    expect_same_mismatch(&scenario,
                         "ep_comm_new: ranks disagree: ranks_per_node is 4 by the hosts on rank 0 and 2 on rank 3");
    init_scenario(&scenario);
    scenario.config[0].flags = EP_COMM_CHECK_VALUES;
    expect_same_mismatch(&scenario, "ep_comm_new: ranks disagree: flags is 0x1 on rank 0 and 0x0 on rank 1");
    init_scenario(&scenario);
    scenario.config[2].channels = 3;
    expect_same_mismatch(&scenario, "ep_comm_new: ranks disagree: channels is 4 on rank 0 and 3 on rank 2");
    init_scenario(&scenario);
    scenario.config[1].partial_type = EP_BF16;
    expect_same_mismatch(&scenario, "ep_comm_new: ranks disagree: partial_type is f32 on rank 0 and bf16 on rank 1");
    /* Several mismatches: all ranks report the same one. */
    init_scenario(&scenario);
    scenario.config[1].channels = 3;
    scenario.config[2].ranks_per_node = 1;
    expect_same_mismatch(&scenario,
                         "ep_comm_new: ranks disagree: ranks_per_node is 4 by the hosts on rank 0 and 1 on rank 2");
}

/* --- nodes from the hosts --- */

static void set_hosts(const char *const places[RANKS])
{
    for (int rank = 0; rank < RANKS; rank++)
        memcpy(hosts[rank], places[rank], sizeof(hosts[rank]));
}

static void expect_nodes(struct scenario *scenario, int ranks_per_node, const char *network)
{
    run_scenario(scenario);
    for (int rank = 0; rank < RANKS; rank++) {
        ep_comm_info info = EP_COMM_INFO_INIT;

        if (scenario->status[rank] != EP_OK)
            fail_msg("rank %d: %s", rank, scenario->text[rank]);
        assert_int_equal(ep_comm_get_info(scenario->comm[rank], &info), EP_OK);
        assert_int_equal(info.ranks_per_node, ranks_per_node);
        assert_int_equal(info.nnodes, RANKS / ranks_per_node);
        assert_int_equal(info.node, rank / ranks_per_node);
        assert_string_equal(info.network, network);
        ep_comm_free(scenario->comm[rank]);
    }
}

static void count_warnings(void *context, ep_log_level level, const char *line)
{
    if (level == EP_LOG_WARNING &&
        strstr(line, "on this machine, but reached by network tcp, since they are in two PID"))
        atomic_fetch_add((_Atomic int *)context, 1);
}

TEST_WITH(nodes_are_found_from_the_hosts, reset, NULL)
{
    static const struct {
        const char *places[RANKS];
        int ranks_per_node;
        const char *network;
        int warnings; /* one for each machine that several nodes share */
    } cases[] = {
        {{"ap", "ap", "ap", "ap"}, 4, "none", 0},
        {{"ap", "ap", "bp", "bp"}, 2, "tcp", 0},
        {{"ap", "bp", "cp", "dp"}, 1, "tcp", 0},
        /* Containers of one machine: they can share memory if they share the PID namespace. */
        {{"aa", "ab", "ac", "ad"}, 1, "tcp", 1},
        {{"ap", "ap", "aq", "aq"}, 2, "tcp", 1},
        {{"ap", "aq", "bp", "cp"}, 1, "tcp", 1},
        /* The host of some rank, or its namespace, is unknown. */
        {{"ap", "ap", "?p", "ap"}, 4, "none", 0},
        {{"?p", "?p", "?p", "?p"}, 4, "none", 0},
        {{"a\0", "a\0", "a\0", "a\0"}, 4, "none", 0},
    };
    _Atomic int warnings;
    struct scenario scenario;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        set_hosts(cases[i].places);
        init_scenario(&scenario);
        atomic_store(&warnings, 0);
        ep_set_log(count_warnings, (void *)&warnings);
        expect_nodes(&scenario, cases[i].ranks_per_node, cases[i].network);
        ep_set_log(NULL, NULL);
        assert_int_equal(warnings, cases[i].warnings);
    }
}

TEST_WITH(nodes_come_from_the_caller_or_the_bootstrap, reset, NULL)
{
    static const char *const two_hosts[RANKS] = {"ap", "ap", "bp", "bp"};
    static const struct ep_net_provider pigeons = {.abi = EP_NET_ABI, .name = "pigeons"};
    struct scenario scenario;

    set_hosts(two_hosts);
    init_scenario(&scenario);
    for (int rank = 0; rank < RANKS; rank++)
        scenario.config[rank].ranks_per_node = 1;
    expect_nodes(&scenario, 1, "tcp");
    /* The bootstrap is used after the configuration and before the hosts. */
    for (int rank = 0; rank < RANKS; rank++)
        scenario.boot_nodes[rank] = 4;
    expect_nodes(&scenario, 1, "tcp");
    for (int rank = 0; rank < RANKS; rank++)
        scenario.config[rank].ranks_per_node = 0;
    expect_nodes(&scenario, 4, "none");
    /* A bootstrap with a network need not give nodes; a configuration need not give a network. */
    init_scenario(&scenario);
    scenario.network = &pigeons;
    expect_nodes(&scenario, 2, "pigeons");
    scenario.config[0].network = "pigeons";
    expect_nodes(&scenario, 2, "pigeons");
    /* All ranks on one host: nodes may be chosen freely, and share memory. */
    memset(hosts, 0, sizeof(hosts));
    init_scenario(&scenario);
    for (int rank = 0; rank < RANKS; rank++)
        scenario.config[rank].ranks_per_node = 2;
    expect_nodes(&scenario, 2, "emulated");
}

TEST_WITH(hosts_without_equal_nodes_are_named, reset, NULL)
{
    static const struct {
        const char *places[RANKS], *why;
    } cases[] = {
        {{"ap", "bp", "bp", "bp"}, "rank 0 has a host and ranks 1 to 3 another one"},
        {{"ap", "ap", "ap", "bp"}, "ranks 0 to 2 share a host and rank 3 another one"},
        {{"ap", "bp", "ap", "bp"}, "ranks 0 and 2 share a host and rank 1 between them is on another one"},
        {{"ap", "bp", "cp", "bp"}, "ranks 1 and 3 share a host and rank 2 between them is on another one"},
        {{"ap", "ap", "?p", "bp"}, "rank 2 cannot identify its host"},
    };
    struct scenario scenario;
    char text[EP_ERROR_TEXT_BYTES];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        set_hosts(cases[i].places);
        init_scenario(&scenario);
        run_scenario(&scenario);
        snprintf(text, sizeof(text),
                 "ep_comm_new: the hosts of the ranks do not form equal nodes: %s: start the same number on each host, "
                 "with consecutive numbers, or set ranks_per_node (1: each rank is its own node)",
                 cases[i].why);
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_equal(scenario.status[rank], EP_E_ARG);
            assert_string_equal(scenario.text[rank], text);
        }
        for (int rank = 0; rank < RANKS; rank++)
            scenario.config[rank].ranks_per_node = 1;
        expect_nodes(&scenario, 1, "tcp");
    }
}

TEST_WITH(mismatched_nodes_name_their_source, reset, NULL)
{
    static const char *const two_hosts[RANKS] = {"ap", "ap", "bp", "bp"};
    struct scenario scenario;

    set_hosts(two_hosts);
    init_scenario(&scenario);
    scenario.config[3].ranks_per_node = 1;
    expect_same_mismatch(&scenario,
                         "ep_comm_new: ranks disagree: ranks_per_node is 2 by the hosts on rank 0 and 1 on rank 3");
    init_scenario(&scenario);
    scenario.boot_nodes[0] = 4;
    expect_same_mismatch(
        &scenario,
        "ep_comm_new: ranks disagree: ranks_per_node is 4 by its bootstrap on rank 0 and 2 by the hosts on rank 1");
    init_scenario(&scenario);
    scenario.config[1].network = "emulated";
    expect_same_mismatch(&scenario, "ep_comm_new: ranks disagree: network is tcp on rank 0 and emulated on rank 1");
}

/* No rank waits (EP_E_TIMEOUT) for a rank with an invalid configuration; that rank reports its own reason. */
TEST_WITH(a_bad_rank_is_named_by_the_others, reset, NULL)
{
    struct scenario scenario;

    init_scenario(&scenario);
    scenario.config[1].channels = 3; /* a mismatch as well, but of lower precedence */
    scenario.config[2].channels = 99;
    scenario.ret_comm[3] = NULL;
    run_scenario(&scenario);
    assert_int_equal(mock.opened, 0);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(scenario.status[rank], EP_E_ARG);
        assert_string_equal(scenario.text[rank],
                            "ep_comm_new: rank 2 failed: ep_comm_new: channels is 99, not in 0..16");
    }
    assert_int_equal(scenario.status[2], EP_E_ARG);
    assert_string_equal(scenario.text[2], "ep_comm_new: channels is 99, not in 0..16");
    assert_int_equal(scenario.status[3], EP_E_ARG);
    assert_string_equal(scenario.text[3], "ep_comm_new: ret_comm is NULL");
}

/* --- bootstraps of the caller --- */

struct tamper {
    size_t offset;
    const void *bytes;
    size_t n;
    ep_status status;
    const char *text;
};

/* Rank 1's block differs: offsets are those of the digest that never change. */
static ep_status tampering_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    const struct tamper *tamper = context;
    const int32_t one = 1;
    char *other = (char *)ret_all + bytes;

    assert_true(timeout_ms > 0);
    if (tamper->status != EP_OK)
        return tamper->text ? ep_fail(tamper->status, "%s", tamper->text) : tamper->status;
    memcpy(ret_all, mine, bytes);
    memcpy(other, mine, bytes);
    memcpy(other + 4, &one, sizeof(one));
    memcpy(other + tamper->offset, tamper->bytes, tamper->n);
    return EP_OK;
}

static void expect_tampered(struct tamper tamper, ep_status status, const char *text)
{
    ep_boot boot = {.size = sizeof(boot), .nranks = 2, .allgather = tampering_allgather, .context = &tamper};
    ep_comm *comm = NULL;

    ep_fail(EP_OK, "an older error");
    assert_int_equal(ep_comm_new(&boot, NULL, &comm), status);
    assert_string_equal(ep_last_error(), text);
    assert_null(comm);
    assert_int_equal(mock.opened, 0);
}

TEST_WITH(other_libraries_and_bad_bootstraps_are_detected, reset, NULL)
{
    const uint32_t format = 99;
    const int32_t rank = 7;
    char text[200];

    snprintf(text, sizeof(text), "ep_comm_new: ranks disagree: library version is %s on rank 0 and 9.9.9 on rank 1",
             ep_version());
    expect_tampered((struct tamper){.offset = 8, .bytes = "9.9.9", .n = 6}, EP_E_MISMATCH, text);
    snprintf(text, sizeof(text), "ep_comm_new: rank 1 has another build of version %s", ep_version());
    expect_tampered((struct tamper){.offset = 0, .bytes = &format, .n = 4}, EP_E_MISMATCH, text);
    expect_tampered((struct tamper){.offset = 4, .bytes = &rank, .n = 4}, EP_E_MISMATCH,
                    "ep_comm_new: the bootstrap's all-gather has the block of rank 7 in place of that of rank 1");
    expect_tampered((struct tamper){.status = EP_E_TIMEOUT, .text = "rank 1 is late"}, EP_E_TIMEOUT,
                    "ep_comm_new: bootstrap: rank 1 is late");
    expect_tampered((struct tamper){.status = EP_E_SYSTEM}, EP_E_SYSTEM,
                    "ep_comm_new: bootstrap: the all-gather failed with EP_E_SYSTEM");
}

/* --- the emulated network, which is not in the public configuration --- */

TEST_WITH(emulations_are_checked, reset, NULL)
{
    static const struct {
        ep_net_emulation emulation;
        const char *text;
    } cases[] = {
        {{.reorder = 2}, "emulation.reorder is 2"},
        {{.ring_bytes = 255}, "emulation.ring_bytes is 255"},
    };
    ep_net_emulation good = {.seed = 7, .delay_us = 5};
    ep_comm *comm;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_net_emulate(&cases[i].emulation);
        assert_fails(create(NULL, &comm), EP_E_ARG, cases[i].text);
    }
    ep_net_emulate(&good);
    assert_int_equal(create(NULL, &comm), EP_OK);
    assert_memory_equal(&comm->emulation, &good, sizeof(good));
    ep_comm_free(comm);
    ep_net_emulate(NULL);
    assert_int_equal(create(NULL, &comm), EP_OK);
    assert_int_equal(comm->emulation.delay_us, 0);
    ep_comm_free(comm);
}
