/* SPDX-License-Identifier: Apache-2.0 */
#include "stream_traffic.h"
#include "unit.h"

#include "base/clock.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* Longer than an engine waits for the reason of a connection that has ended without a goodbye. */
#define CUT_US 1500000

struct rank_task {
    pthread_t thread;
    ep_boot boot;
    const struct traffic_spec *spec;
    struct traffic_result result;
    int done;
};

static void *rank_main(void *argument)
{
    struct rank_task *task = argument;

    task->done = traffic_run(&task->boot, task->spec, &task->result);
    return NULL;
}

/* All ranks as threads. The counts of *ret_total are sums over the ranks, laps the most. */
static void run_threads(struct traffic_spec spec, int nranks, struct traffic_result *ret_total)
{
    static struct traffic_doorbells bells;
    struct rank_task tasks[TRAFFIC_MAX_RANKS] = {0};
    int nnodes = nranks / spec.ranks_per_node;
    ep_boot_shm *place;

    spec.doorbells = &bells;
    assert_int_equal(ep_boot_shm_new(nranks, &place), EP_OK);
    for (int rank = 0; rank < nranks; rank++) {
        tasks[rank].spec = &spec;
        assert_int_equal(ep_boot_shm_join(place, rank, &tasks[rank].boot), EP_OK);
        assert_int_equal(pthread_create(&tasks[rank].thread, NULL, rank_main, &tasks[rank]), 0);
    }
    *ret_total = (struct traffic_result){.why = ""};
    for (int rank = 0; rank < nranks; rank++) {
        const struct traffic_result *result = &tasks[rank].result;

        pthread_join(tasks[rank].thread, NULL);
        if (tasks[rank].done != 0)
            print_error("%s\n", result->why);
        ret_total->messages += result->messages;
        ret_total->bytes += result->bytes;
        ret_total->refused += result->refused;
        ret_total->sleeps += result->sleeps;
        ret_total->lost_wakeups += result->lost_wakeups;
        if (result->laps > ret_total->laps)
            ret_total->laps = result->laps;
    }
    ep_boot_shm_free(place);
    for (int rank = 0; rank < nranks; rank++)
        assert_int_equal(tasks[rank].done, 0);
    assert_int_equal(ret_total->messages, nranks * (nnodes - 1) * spec.channels * spec.messages);
    assert_int_equal(ret_total->lost_wakeups, 0);
    print_message("    %llu messages, %llu bytes, %llu laps, %llu sends refused, %llu naps\n",
                  (unsigned long long)ret_total->messages, (unsigned long long)ret_total->bytes,
                  (unsigned long long)ret_total->laps, (unsigned long long)ret_total->refused,
                  (unsigned long long)ret_total->sleeps);
}

/* The engine that the cases run on: those that need no misbehaving network run on each. */
static const struct ep_net_provider *engine = &ep_net_emulated;

static int use_tcp(void **state)
{
    (void)state;
    engine = &ep_net_tcp;
    return 0;
}

static int use_verbs(void **state)
{
    (void)state;
    engine = &ep_net_verbs;
    return 0;
}

static struct traffic_spec base_spec(void)
{
    return (struct traffic_spec){.provider = engine,
                                 .ranks_per_node = 1,
                                 .channels = 3,
                                 .ring_bytes = 16384,
                                 .messages = 300,
                                 .seed = 1,
                                 .slow_rank = -1,
                                 .idle_s = 300};
}

/* Where 0, as in base_spec(). */
static const struct {
    const char *name;
    int nranks, ranks_per_node, channels, messages;
    size_t ring_bytes;
    int slow; /* this rank - 1 is slow: it holds its senders back, and loses nothing */
    uint64_t refused;
    bool emulated; /* on the emulated network alone */
    ep_net_emulation emulation;
} traffics[] = {
    {.name = "well behaved", .nranks = 4, .refused = 1},
    {.name = "two ranks a node", .nranks = 6, .ranks_per_node = 2, .channels = 2},
    /* Positions in the ring come round thousands of times, and with all offsets. */
    {.name = "laps", .nranks = 2, .channels = 1, .messages = 12000, .ring_bytes = 4096},
    {.name = "a slow reader", .nranks = 3, .messages = 200, .ring_bytes = 4096, .slow = 1, .refused = 201},
    {.name = "a tiny wire",
     .nranks = 3,
     .messages = 60,
     .refused = 1,
     .emulated = true,
     .emulation.ring_bytes = EP_NET_WIRE_MIN_BYTES},
    {.name = "delay", .nranks = 4, .messages = 60, .emulated = true, .emulation.delay_us = 300},
    {.name = "reorder and split",
     .nranks = 4,
     .messages = 60,
     .emulated = true,
     .emulation = {.reorder = 1, .split_bytes = 100}},
#define EVERYTHING(number)                                                                                             \
    {                                                                                                                  \
        .name = "everything at once", .nranks = 4, .messages = 30, .slow = 3, .emulated = true, .emulation = {         \
            .seed = number,                                                                                            \
            .delay_us = 50,                                                                                            \
            .ring_bytes = 1000 * (number),                                                                             \
            .split_bytes = 77,                                                                                         \
            .reorder = 1                                                                                               \
        }                                                                                                              \
    }
    EVERYTHING(1),
    EVERYTHING(2),
    EVERYTHING(3),
};

static void test_traffic(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(traffics) / sizeof(traffics[0]); i++) {
        struct traffic_spec spec = base_spec();
        struct traffic_result total;

        if (traffics[i].emulated && engine != &ep_net_emulated)
            continue;
        print_message("  %s\n", traffics[i].name);
        spec.seed = traffics[i].emulation.seed ? traffics[i].emulation.seed : spec.seed;
        spec.emulation = traffics[i].emulation;
        spec.ranks_per_node = traffics[i].ranks_per_node ? traffics[i].ranks_per_node : spec.ranks_per_node;
        spec.channels = traffics[i].channels ? traffics[i].channels : spec.channels;
        spec.messages = traffics[i].messages ? traffics[i].messages : spec.messages;
        spec.ring_bytes = traffics[i].ring_bytes ? traffics[i].ring_bytes : spec.ring_bytes;
        spec.slow_rank = traffics[i].slow - 1;
        if (engine == &ep_net_verbs && spec.messages > 1200) /* its devices are emulated */
            spec.messages = 1200;
        run_threads(spec, traffics[i].nranks, &total);
        assert_true(total.refused >= traffics[i].refused);
        assert_true(traffics[i].messages != 12000 || total.laps > (uint64_t)spec.messages / 6);
    }
}

/* Ranks as processes: nothing of the wire may depend on a common address space. */
static void test_processes(void **state)
{
    enum { NRANKS = 3 };
    struct traffic_spec spec = base_spec();
    struct traffic_doorbells *bells =
        mmap(NULL, sizeof(*bells), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ep_boot_shm *place;
    pid_t children[NRANKS];

    (void)state;
    assert_true(bells != MAP_FAILED);
    assert_int_equal(ep_boot_shm_new(NRANKS, &place), EP_OK);
    spec.doorbells = bells;
    for (int rank = 0; rank < NRANKS; rank++) {
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0) {
            struct traffic_result result;
            ep_boot boot;

            alarm(600); /* ends what hangs */
            if (ep_boot_shm_join(place, rank, &boot) != EP_OK || traffic_run(&boot, &spec, &result) != 0 ||
                result.lost_wakeups) {
                fprintf(stderr, "%s\n", result.why);
                _exit(1);
            }
            _exit(0);
        }
    }
    for (int rank = 0; rank < NRANKS; rank++) {
        int code = -1;

        assert_int_equal(waitpid(children[rank], &code, 0), children[rank]);
        assert_int_equal(code, 0);
    }
    ep_boot_shm_free(place);
    munmap(bells, sizeof(*bells));
}

/* --- two ranks opened by threads, then driven by this one --- */

struct opening {
    pthread_t thread;
    ep_boot boot;
    size_t ring_bytes;
    int channels;
    struct ep_streams *streams;
    ep_status status;
    char error[EP_ERROR_TEXT_BYTES];
};

static void *open_rank(void *argument)
{
    struct opening *opening = argument;
    struct ep_net_params params = {.rank = opening->boot.rank,
                                   .nranks = opening->boot.nranks,
                                   .ranks_per_node = 1,
                                   .channels = opening->channels,
                                   .timeout_ms = 10000,
                                   .boot = &opening->boot};

    opening->status = ep_streams_open(engine, &params, opening->ring_bytes, &opening->streams);
    snprintf(opening->error, sizeof(opening->error), "%s", ep_last_error());
    return NULL;
}

static void open_pair(struct opening pair[2], size_t ring_bytes)
{
    ep_boot_shm *place;

    assert_int_equal(ep_boot_shm_new(2, &place), EP_OK);
    for (int rank = 0; rank < 2; rank++) {
        pair[rank] = (struct opening){.ring_bytes = ring_bytes, .channels = 2};
        assert_int_equal(ep_boot_shm_join(place, rank, &pair[rank].boot), EP_OK);
        assert_int_equal(pthread_create(&pair[rank].thread, NULL, open_rank, &pair[rank]), 0);
    }
    for (int rank = 0; rank < 2; rank++) {
        pthread_join(pair[rank].thread, NULL);
        if (pair[rank].status != EP_OK)
            print_error("%s\n", pair[rank].error);
        assert_int_equal(pair[rank].status, EP_OK);
    }
    ep_boot_shm_free(place);
}

static void close_pair(struct opening pair[2])
{
    ep_streams_free(pair[0].streams);
    ep_streams_free(pair[1].streams);
}

/* What has been sent is on its way: sooner or later it moves something. */
static void await_move(struct ep_streams *streams)
{
    uint64_t deadline_ns = ep_deadline_ns(60000);
    bool moved = false;

    while (!moved && ep_now_ns() < deadline_ns) {
        assert_int_equal(ep_streams_progress(streams, &moved), EP_OK);
        if (!moved)
            usleep(100);
    }
    assert_true(moved);
}

/* A message that has been sent is there sooner or later. */
static const void *await_message(struct ep_streams *streams, int peer, int channel, size_t *ret_bytes)
{
    uint64_t deadline_ns = ep_deadline_ns(60000);
    const void *message = ep_stream_peek(streams, peer, channel, ret_bytes);

    while (!message && ep_now_ns() < deadline_ns) {
        bool moved;

        assert_int_equal(ep_streams_progress(streams, &moved), EP_OK);
        message = ep_stream_peek(streams, peer, channel, ret_bytes);
        if (!message)
            usleep(100);
    }
    return message;
}

static void test_credit(void **state)
{
    struct opening pair[2];
    unsigned char head[EP_STREAM_HEAD_BYTES] = {0};
    int sent = 0, received = 0;
    size_t bytes;

    (void)state;
    open_pair(pair, 4096);
    assert_int_equal(ep_streams_get_net(pair[0].streams)->can_sleep, engine == &ep_net_emulated);
    assert_true(ep_streams_bytes(pair[0].streams) >
                2 * (size_t)4096 + (engine == &ep_net_emulated ? 2 * EP_NET_WIRE_BYTES : 0));
    assert_int_equal(ep_streams_max_message(pair[0].streams), 4096 / 2 - 16);

    /* Three messages of 1040 bytes fit into the ring, the fourth must wait until enough was read. */
    while (ep_stream_send(pair[0].streams, 1, 1, head, sizeof(head), NULL, 0))
        sent++;
    assert_int_equal(sent, 3);
    assert_true(ep_streams_flushed(pair[0].streams));
    assert_null(ep_stream_peek(pair[1].streams, 0, 1, &bytes)); /* its progress has not been called */
    ep_stream_pop(pair[1].streams, 0, 1);                       /* nothing was peeked: nothing happens */
    for (received = 0; received < 3; received++) {
        assert_non_null(await_message(pair[1].streams, 0, 1, &bytes));
        assert_int_equal(bytes, sizeof(head));
        assert_null(ep_stream_peek(pair[1].streams, 0, 0, &bytes)); /* another channel */
        ep_stream_pop(pair[1].streams, 0, 1);
    }
    assert_null(ep_stream_peek(pair[1].streams, 0, 1, &bytes));
    assert_false(ep_stream_send(pair[0].streams, 1, 1, head, sizeof(head), NULL, 0)); /* credit is still on the wire */
    await_move(pair[0].streams);
    assert_true(ep_stream_send(pair[0].streams, 1, 1, head, sizeof(head), NULL, 0));
    assert_true(ep_streams_flushed(pair[0].streams)); /* it may have waited for others to leave with */
    assert_non_null(await_message(pair[1].streams, 0, 1, &bytes));
    close_pair(pair);
}

/* What can never be sent is a status of progress, not a message that waits for ever. */
static void test_impossible_messages(void **state)
{
    static unsigned char data[4096];
    struct ep_piece pieces[EP_STREAM_PIECES + 1];
    struct opening pair[2];
    bool moved;

    (void)state;
    for (int i = 0; i < EP_STREAM_PIECES + 1; i++)
        pieces[i] = (struct ep_piece){.data = data, .bytes = 1};

    open_pair(pair, 4096);
    assert_false(ep_stream_send(pair[0].streams, 1, 0, data, EP_STREAM_HEAD_BYTES + 1, NULL, 0));
    assert_fails(ep_streams_progress(pair[0].streams, &moved), EP_E_ARG, "1025");
    assert_int_equal(ep_streams_progress(pair[0].streams, &moved), EP_E_ARG);
    assert_false(ep_stream_send(pair[0].streams, 1, 0, data, 1, NULL, 0)); /* it stays failed */

    assert_false(ep_stream_send(pair[1].streams, 0, 0, data, 0, pieces, EP_STREAM_PIECES + 1));
    assert_int_equal(ep_streams_progress(pair[1].streams, &moved), EP_E_ARG);
    close_pair(pair);

    open_pair(pair, 4096);
    pieces[0].bytes = ep_streams_max_message(pair[0].streams);
    assert_true(ep_stream_send(pair[0].streams, 1, 0, NULL, 0, pieces, 1));
    assert_false(ep_stream_send(pair[0].streams, 1, 1, data, 1, pieces, 1));
    assert_int_equal(ep_streams_progress(pair[0].streams, &moved), EP_E_ARG);
    pieces[0].bytes = SIZE_MAX;
    assert_false(ep_stream_send(pair[1].streams, 0, 1, data, 1, pieces, 1));
    assert_int_equal(ep_streams_progress(pair[1].streams, &moved), EP_E_ARG);
    close_pair(pair);
}

static void test_bad_parameters(void **state)
{
    ep_boot boot = {.size = sizeof(boot), .nranks = 2};
    struct ep_net_params params = {.nranks = 2, .ranks_per_node = 1, .channels = 1, .timeout_ms = 10, .boot = &boot};
    struct ep_streams *streams;

    (void)state;
    assert_int_equal(ep_streams_open(engine, &params, 100, &streams), EP_E_ARG);
    assert_int_equal(ep_streams_open(engine, &params, SIZE_MAX, &streams), EP_E_ARG);
    assert_int_equal(ep_streams_open(engine, &params, SIZE_MAX / 2, &streams), EP_E_ARG);
    params.ranks_per_node = 2;
    assert_int_equal(ep_streams_open(engine, &params, 4096, &streams), EP_E_ARG);
    params.ranks_per_node = 1;
    params.channels = EP_NET_MAX_CHANNELS + 1;
    assert_int_equal(ep_streams_open(engine, &params, 4096, &streams), EP_E_ARG);
    params.channels = 3;
    assert_int_equal(ep_streams_open(engine, &params, SIZE_MAX / 2, &streams), EP_E_OVERFLOW);
    ep_streams_free(NULL);
}

/* Damage in a ring, of every header byte: found when it is read, never followed. */
static void test_damaged_ring(void **state)
{
    (void)state;
    for (unsigned byte = 0; byte < 16; byte++) {
        struct opening pair[2];
        unsigned char head[64] = {0}, *header;
        size_t bytes;
        bool moved;

        open_pair(pair, 4096);
        assert_true(ep_stream_send(pair[0].streams, 1, 0, head, sizeof(head), NULL, 0));
        assert_true(ep_streams_flushed(pair[0].streams));
        header = (unsigned char *)await_message(pair[1].streams, 0, 0, &bytes);
        assert_non_null(header);
        header[(int)byte - 16] ^= 0xff;
        assert_null(ep_stream_peek(pair[1].streams, 0, 0, &bytes));
        assert_fails(ep_streams_progress(pair[1].streams, &moved), EP_E_MISMATCH, "node 0, channel 0");
        close_pair(pair);
    }
}

/* The rank that finds the damage frees its endpoint: it has not died, so its peer continues. */
static void test_damage_is_no_death(void **state)
{
    struct opening pair[2];
    uint64_t deadline_ns = ep_deadline_ns(60000);
    unsigned char head[64] = {0}, *message;
    bool moved;
    size_t bytes;

    (void)state;
    open_pair(pair, 4096);
    assert_true(ep_stream_send(pair[0].streams, 1, 0, head, sizeof(head), NULL, 0));
    assert_true(ep_streams_flushed(pair[0].streams));
    message = (unsigned char *)await_message(pair[1].streams, 0, 0, &bytes);
    assert_non_null(message);
    message[-16] ^= 0xff; /* of its header */
    assert_null(ep_stream_peek(pair[1].streams, 0, 0, &bytes));
    ep_streams_free(pair[1].streams);
    while (!ep_streams_ended(pair[0].streams, 1) && ep_now_ns() < deadline_ns)
        assert_int_equal(ep_streams_progress(pair[0].streams, &moved), EP_OK);
    assert_true(ep_streams_ended(pair[0].streams, 1));
    usleep(CUT_US);
    assert_int_equal(ep_streams_progress(pair[0].streams, &moved), EP_OK);
    ep_streams_free(pair[0].streams);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_processes), /* first: no thread has been there before the fork */
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_credit),
        cmocka_unit_test(test_impossible_messages),
        cmocka_unit_test(test_bad_parameters),
        cmocka_unit_test(test_damaged_ring),
    };

    /* These tests use real connections; what only the emulation can be told to do is left out. */
    const struct CMUnitTest real_tests[] = {
        cmocka_unit_test(test_traffic),
        cmocka_unit_test(test_credit),
        cmocka_unit_test(test_impossible_messages),
        cmocka_unit_test(test_bad_parameters),
        cmocka_unit_test(test_damaged_ring),
        cmocka_unit_test(test_damage_is_no_death),
    };
    int failed;

    /* Where there is an RDMA device: tests/verbs. */
    if (getenv("EPKIT_TEST_VERBS"))
        return cmocka_run_group_tests_name("stream over verbs", real_tests, use_verbs, NULL);
    failed = cmocka_run_group_tests_name("stream", tests, NULL, NULL);
    return failed + cmocka_run_group_tests_name("stream over tcp", real_tests, use_tcp, NULL);
}
