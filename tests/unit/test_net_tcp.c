/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network over TCP with faults of connections, injected by a relay: the boot replaces the addresses of the ranks by
 * those of the relay. Ranks are threads; each node is a separate host.
 */
#include "ranks.h"
#include "relay.h"
#include "stream_traffic.h"

#include "net/tcp_wire.h"

/* A copy of its own, for struct hello. */
#include "net/tcp_mesh.c"

#include <epkit/epkit.h>
#include <pthread.h>
#include <sys/resource.h>

enum { RANKS = 4, PER_NODE = 2 };
#define TIMEOUT_MS 2000 /* first deadline of tests that reach it */
#define PATIENT_MS 60000

struct rank {
    pthread_t thread;
    ep_boot shm, boot;
    struct relay *relay;
    struct group *group;
    ep_status status;
    char text[EP_ERROR_TEXT_BYTES];
    struct traffic_result result;
    int done;
};

struct group {
    struct rank ranks[RANKS];
    struct traffic_spec spec; /* of the traffic */
    int timeout_ms;
    bool unconnected;   /* no rank connects to another one */
    _Atomic int rounds; /* barriers completed by rank 0 */
};

/* Replaces the addresses of all ranks of the other node by those of the relay. */
static ep_status relayed_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct rank *rank = context;
    struct hello *all = ret_all;

    EP_TRY(rank->shm.allgather(rank->shm.context, mine, bytes, timeout_ms, ret_all));
    if (bytes != sizeof(*all))
        return EP_OK;
    for (int i = 0; i < rank->shm.nranks; i++) {
        if (all[i].n_addresses)
            relay_set_target(rank->relay, i, all[i].addresses[0].port);
        if (i / PER_NODE == rank->shm.rank / PER_NODE)
            continue;
        all[i].n_addresses = 1;
        all[i].addresses[0] =
            (struct tcp_address){.family = AF_INET, .port = relay_port(rank->relay, i), .bytes = {127, 0, 0, 1}};
    }
    return EP_OK;
}

static void run_ranks(struct group *group, void *(*run)(void *))
{
    struct relay *relay = relay_new(RANKS);
    ep_boot_shm *boot_shm;

    assert_non_null(relay);
    assert_int_equal(ep_boot_shm_new(RANKS, &boot_shm), EP_OK);
    for (int i = 0; i < RANKS; i++) {
        struct rank *rank = &group->ranks[i];

        rank->relay = relay;
        rank->group = group;
        assert_int_equal(ep_boot_shm_join(boot_shm, i, &rank->shm), EP_OK);
        rank->boot = rank->shm;
        rank->boot.allgather = relayed_allgather;
        rank->boot.context = rank;
        assert_int_equal(pthread_create(&rank->thread, NULL, run, rank), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(group->ranks[i].thread, NULL);
    assert_true(relay_bytes(relay) > 0 || group->unconnected);
    relay_free(relay);
    ep_boot_shm_free(boot_shm);
}

/* --- faults without effect --- */

static void *run_traffic(void *argument)
{
    struct rank *rank = argument;

    rank->done = traffic_run(&rank->boot, &rank->group->spec, &rank->result);
    return NULL;
}

static void *run_traffic_split(void *argument)
{
    struct rank *rank = argument;

    relay_set_mode(rank->relay, RELAY_SPLIT, -1);
    return run_traffic(rank);
}

static void *run_traffic_delayed(void *argument)
{
    struct rank *rank = argument;

    relay_set_mode(rank->relay, RELAY_DELAY, -1);
    return run_traffic(rank);
}

static void check_traffic(void *(*run)(void *), int messages)
{
    struct group group = {.spec = {.provider = &ep_net_tcp,
                                   .ranks_per_node = PER_NODE,
                                   .channels = 2,
                                   .ring_bytes = 8192,
                                   .messages = messages,
                                   .seed = 11,
                                   .slow_rank = 1,
                                   .idle_s = 300}};

    run_ranks(&group, run);
    for (int i = 0; i < RANKS; i++) {
        if (group.ranks[i].done != 0)
            print_error("%s\n", group.ranks[i].result.why);
        assert_int_equal(group.ranks[i].done, 0);
    }
}

TEST(test_split_and_delayed_streams)
{
    check_traffic(run_traffic_split, 15);
    check_traffic(run_traffic_delayed, 60);
}

/* --- hosts that are cut off --- */

static void record(struct rank *rank, ep_status status)
{
    rank->status = status;
    snprintf(rank->text, sizeof(rank->text), "%s", ep_last_error());
}

static ep_status new_comm(const struct rank *rank, ep_comm **ret_comm)
{
    return unit_comm_new(&rank->boot, "tcp", PER_NODE, rank->group->timeout_ms, ret_comm);
}

/* Barriers until one fails; rank 0 injects the fault after the tenth. */
static void run_barriers(struct rank *rank, enum relay_mode mode, int victim)
{
    ep_comm *comm;
    ep_status status = new_comm(rank, &comm);

    record(rank, status);
    if (status != EP_OK)
        return;
    for (int i = 0; status == EP_OK; i++) {
        if (i == 10 && rank->boot.rank == 0)
            relay_set_mode(rank->relay, mode, victim);
        status = ep_comm_barrier(comm);
        if (status == EP_OK && rank->boot.rank == 0)
            atomic_fetch_add(&rank->group->rounds, 1);
    }
    record(rank, status);
    ep_comm_free(comm);
}

static void *run_stall(void *argument)
{
    run_barriers(argument, RELAY_STALL, -1);
    return NULL;
}

static void *run_cut(void *argument)
{
    run_barriers(argument, RELAY_CUT, -1);
    return NULL;
}

/* The first rank that a text names; -1: none. */
static int rank_named(const char *text)
{
    const char *at = strstr(text, "rank ");

    return at ? atoi(at + 5) : -1;
}

/*
 * Each rank names one of the other node, as either node may be the one that is cut off. On a loaded machine a deadline
 * may expire before the fault is injected: then it is repeated with a longer one.
 */
static void check_barriers(void *(*run)(void *), ep_status first, ep_status second)
{
    struct group group = {0};
    bool injected = false;

    for (int timeout_ms = TIMEOUT_MS; !injected && timeout_ms < PATIENT_MS; timeout_ms *= 3) {
        group = (struct group){.timeout_ms = timeout_ms};
        run_ranks(&group, run);
        injected = atomic_load(&group.rounds) >= 10;
    }
    assert_true(injected);
    for (int i = 0; i < RANKS; i++) {
        const struct rank *rank = &group.ranks[i];

        print_message("    rank %d: %s\n", i, rank->text);
        assert_true(rank->status == first || rank->status == second);
        assert_int_not_equal(rank_named(rank->text), -1);
        assert_int_not_equal(rank_named(rank->text) / PER_NODE, i / PER_NODE);
    }
}

/* Half-open connections: no data, no end. */
TEST_CALL(test_stalled_connections, check_barriers(run_stall, EP_E_TIMEOUT, EP_E_TIMEOUT))
TEST_CALL(test_cut_connections, check_barriers(run_cut, EP_E_PEER_DEAD, EP_E_PEER_DEAD))

/* --- connections that cannot be established --- */

static void *run_refused(void *argument)
{
    struct rank *rank = argument;
    ep_comm *comm;

    relay_set_mode(rank->relay, RELAY_CUT, 1);
    record(rank, new_comm(rank, &comm));
    if (rank->status == EP_OK)
        ep_comm_free(comm);
    return NULL;
}

/* Rank 3 cannot reach rank 1: creation fails on all ranks, and all errors name both. */
TEST(test_unreachable_rank)
{
    struct group group = {0};
    bool all_name_both = false;

    /* On a loaded machine other ranks may miss the first deadline as well. */
    for (int timeout_ms = TIMEOUT_MS; !all_name_both && timeout_ms < PATIENT_MS; timeout_ms *= 3) {
        group = (struct group){.timeout_ms = timeout_ms};
        run_ranks(&group, run_refused);
        all_name_both = true;
        for (int i = 0; i < RANKS; i++)
            all_name_both =
                all_name_both && strstr(group.ranks[i].text, "rank 3") && strstr(group.ranks[i].text, "rank 1");
    }
    for (int i = 0; i < RANKS; i++) {
        print_message("    rank %d: %s\n", i, group.ranks[i].text);
        assert_int_equal(group.ranks[i].status, EP_E_TIMEOUT);
        assert_non_null(strstr(group.ranks[i].text, "rank 3"));
        assert_non_null(strstr(group.ranks[i].text, "rank 1"));
    }
}

/* --- a lack of descriptors --- */

static struct rlimit descriptors;

/* Once the ranks have reserved what they need, other users of the process take all descriptors. */
static ep_status exhausting_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    const struct rlimit none = {.rlim_cur = 3, .rlim_max = descriptors.rlim_max};

    EP_TRY(relayed_allgather(context, mine, bytes, timeout_ms, ret_all));
    if (bytes == sizeof(struct hello))
        setrlimit(RLIMIT_NOFILE, &none);
    return EP_OK;
}

static void *run_exhausted(void *argument)
{
    struct rank *rank = argument;

    rank->boot.allgather = exhausting_allgather;
    return run_refused(rank);
}

/* Not a timeout: no peer is late. */
TEST(test_no_descriptors_to_connect)
{
    struct group group = {.timeout_ms = TIMEOUT_MS, .unconnected = true};

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &descriptors), 0);
    run_ranks(&group, run_exhausted);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &descriptors), 0);
    for (int i = 0; i < RANKS; i++) {
        print_message("    rank %d: %s\n", i, group.ranks[i].text);
        assert_int_equal(group.ranks[i].status, EP_E_SYSTEM);
        assert_non_null(strstr(group.ranks[i].text, "RLIMIT_NOFILE"));
    }
}

/* --- a peer that reads late --- */

enum { LATE_PUTS = 16, LATE_BYTES = 1 << 20, LATE_MS = 2600 }; /* more bytes than sockets hold */

struct late_pair {
    ep_boot boots[2];
    pthread_t threads[2];
    _Atomic bool freed;
    bool freed_before, arrived;
};

static struct ep_net *open_late(const ep_boot *boot)
{
    struct ep_net_params params = {.rank = boot->rank,
                                   .nranks = 2,
                                   .ranks_per_node = 1,
                                   .channels = 1,
                                   .region_bytes = LATE_BYTES,
                                   .n_signals = 2,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = boot};
    struct ep_net *net = NULL;

    if (ep_net_tcp.open(&ep_net_tcp, &params, &net) != EP_OK)
        print_error("%s\n", ep_last_error());
    return net;
}

static void *put_and_free(void *argument)
{
    static const unsigned char data[LATE_BYTES] = {1};
    struct late_pair *pair = argument;
    struct ep_net *net = open_late(&pair->boots[0]);

    for (int i = 0; net && i < LATE_PUTS; i++)
        (void)net->ops->put(net, 1, 0, 0, data, sizeof(data));
    if (net) {
        (void)net->ops->signal(net, 1, 0, 0, 1);
        net->ops->free(net);
    }
    atomic_store(&pair->freed, true);
    return NULL;
}

/* Answers what it receives, as a stream does with credit: if the socket of the other rank were closed, it would reset
 * the connection. */
static void *read_late(void *argument)
{
    struct late_pair *pair = argument;
    struct ep_net *net = open_late(&pair->boots[1]);
    uint64_t deadline_ns;
    bool moved = true;

    unit_sleep_ms(LATE_MS);
    pair->freed_before = atomic_load(&pair->freed);
    deadline_ns = ep_deadline_ns(PATIENT_MS);
    while (net && !net->signals[0] && ep_now_ns() < deadline_ns && net->ops->progress(net, &moved) == EP_OK)
        (void)net->ops->signal(net, 0, 0, 1, 1);
    pair->arrived = net && net->signals[0] == 1;
    if (net)
        net->ops->free(net);
    return NULL;
}

/* Later than FREE_MS. */
TEST(test_free_waits_for_a_late_reader)
{
    static void *(*const run[2])(void *) = {put_and_free, read_late};
    struct late_pair pair = {0};
    ep_boot_shm *shm;

    assert_int_equal(ep_boot_shm_new(2, &shm), EP_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(ep_boot_shm_join(shm, i, &pair.boots[i]), EP_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&pair.threads[i], NULL, run[i], &pair), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(pair.threads[i], NULL);
    ep_boot_shm_free(shm);
    assert_false(pair.freed_before);
    assert_true(pair.arrived);
}

/* --- a socket that the program has closed --- */

struct opened {
    ep_boot boot;
    pthread_t thread;
    struct ep_net *net;
};

static void *open_one(void *argument)
{
    struct opened *opened = argument;

    opened->net = open_late(&opened->boot);
    return NULL;
}

static void *free_one(void *argument)
{
    struct ep_net *net = ((struct opened *)argument)->net;

    net->ops->free(net);
    return NULL;
}

/* Between the look at a descriptor and the read its number may become that of a pipe, which would block. */
TEST(test_a_pipe_at_the_number_of_a_socket)
{
    struct opened ranks[2] = {0};
    struct tcp_conn *conn;
    bool moved = true;
    int pipes[2], kept;
    ep_boot_shm *shm;

    assert_int_equal(ep_boot_shm_new(2, &shm), EP_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ep_boot_shm_join(shm, i, &ranks[i].boot), EP_OK);
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, open_one, &ranks[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(ranks[i].thread, NULL);
        assert_non_null(ranks[i].net);
    }
    conn = &((struct tcp_net *)ranks[0].net)->conns[0];
    assert_int_equal(pipe(pipes), 0);
    kept = dup(conn->fd);
    assert_int_equal(dup2(pipes[0], conn->fd), conn->fd);
    conn->readable = true;
    alarm(PATIENT_MS / 1000); /* ends a test that waits for ever */
    assert_int_equal(ranks[0].net->ops->progress(ranks[0].net, &moved), EP_OK);
    alarm(0);
    assert_true(conn->ended);
    assert_int_equal(dup2(kept, conn->fd), conn->fd);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, free_one, &ranks[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(ranks[i].thread, NULL);
    close(kept);
    close(pipes[0]);
    close(pipes[1]);
    ep_boot_shm_free(shm);
}

/* --- the reason among several failures --- */

struct hellos {
    ep_status status, others[RANKS];
    int rank;
};

static ep_status copy_hellos(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    const struct hellos *hellos = context;
    struct ep_net_hello *all = ret_all;

    (void)timeout_ms;
    if (hellos->status != EP_OK)
        return ep_fail(hellos->status, "rank 3 did not arrive");
    for (int i = 0; i < RANKS; i++) {
        memcpy(&all[i], mine, bytes);
        if (i == hellos->rank)
            continue;
        all[i].status = (uint64_t)hellos->others[i];
        snprintf(all[i].reason, sizeof(all[i].reason), "a reason");
    }
    return EP_OK;
}

static ep_status exchange_hello(struct hellos *hellos, ep_status own)
{
    const ep_boot boot = {.allgather = copy_hellos, .context = hellos, .nranks = RANKS};
    const struct ep_net_params params = {
        .rank = hellos->rank, .nranks = RANKS, .ranks_per_node = PER_NODE, .boot = &boot};
    struct ep_net_hello mine, all[RANKS];

    return ep_net_exchange_hello("tcp", &params, own == EP_OK ? EP_OK : ep_fail(own, "it failed"), &mine, sizeof(mine),
                                 all);
}

/* A rank that could not reach another one is a consequence of what that one lacks, or of its absence. */
TEST(test_timeouts_are_consequences)
{
    struct hellos lacks = {.others = {EP_E_TIMEOUT, EP_OK, EP_E_SYSTEM, EP_E_TIMEOUT}, .rank = 1};
    struct hellos late = {.others = {EP_E_TIMEOUT, EP_OK, EP_OK, EP_OK}, .rank = 1};
    struct hellos absent = {.status = EP_E_TIMEOUT, .rank = 1};

    for (int own_late = 0; own_late < 2; own_late++) {
        assert_fails(exchange_hello(&lacks, own_late ? EP_E_TIMEOUT : EP_OK), EP_E_SYSTEM,
                     "rank 2 could not open its endpoint: a reason");
        assert_fails(exchange_hello(&late, own_late ? EP_E_TIMEOUT : EP_OK), EP_E_TIMEOUT,
                     own_late ? "it failed" : "rank 0");
        assert_fails(exchange_hello(&absent, own_late ? EP_E_TIMEOUT : EP_OK), EP_E_TIMEOUT, "rank 3 did not arrive");
    }
    assert_int_equal(exchange_hello(&lacks, EP_E_MEMORY), EP_E_MEMORY);
}

/* --- received bytes --- */

TEST(test_records_are_checked)
{
    unsigned char region[64];
    uint64_t signals[2] = {0};
    struct {
        struct tcp_wire_record head;
        unsigned char data[8];
    } good = {.head = {.kind = TCP_WIRE_PUT, .target = 56, .amount = 8}, .data = "payload"};
    struct tcp_wire wire = {.region = region, .region_bytes = sizeof(region), .signals = signals, .n_signals = 2};
    const struct tcp_wire_record bad[] = {
        {.kind = TCP_WIRE_PUT, .number = 1, .target = 57, .amount = 8},
        {.kind = TCP_WIRE_PUT, .number = 1, .target = 8, .amount = UINT64_MAX},
        {.kind = TCP_WIRE_SIGNAL, .number = 1, .target = 2, .amount = 1},
        {.kind = TCP_WIRE_SIGNAL, .number = 2, .target = 0, .amount = 1},
        {.kind = 7, .number = 1},
    };

    /* In pieces of every size. */
    for (size_t step = 1; step <= sizeof(good); step++) {
        struct tcp_wire once = wire;

        memset(region, 0, sizeof(region));
        for (size_t at = 0; at < sizeof(good); at += step)
            assert_null(tcp_wire_consume(&once, (unsigned char *)&good + at,
                                         sizeof(good) - at < step ? sizeof(good) - at : step));
        assert_memory_equal(region + 56, "payload", 8);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct tcp_wire once = wire;

        assert_null(tcp_wire_consume(&once, (unsigned char *)&good, sizeof(good)));
        assert_non_null(tcp_wire_consume(&once, (const unsigned char *)&bad[i], sizeof(bad[i])));
    }
}
