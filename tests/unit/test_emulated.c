/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam itself, and that the emulated network misbehaves as it was asked to. Two endpoints, opened by threads as a
 * group must be, are then driven by one thread, so that every step is known.
 */
#include "unit.h"

#include "net/net.h"

/* The limit is the same on every machine and under every sanitizer. */
static ep_status new_memory_up_to_1m(struct ep_net *net)
{
    return net->region_bytes > 1 << 20 ? ep_fail(EP_E_MEMORY, "network emulated: no memory for more than 1 MiB")
                                       : ep_net_memory_new(net);
}

#define ep_net_memory_new new_memory_up_to_1m
extern const struct ep_net_provider tested_emulated;
#define ep_net_emulated tested_emulated /* the copy below, whose wires this test can reach and damage */
#include "net/emulated.c"
#undef ep_net_memory_new

#include <epkit/boot.h>
#include <pthread.h>

#define HANG_NS 300000000000u /* only ends what hangs */

enum { CHANNELS = 3, REGION = 1 << 16, N_SIGNALS = 8 };

struct side {
    pthread_t thread;
    struct ep_net_params params;
    ep_boot boot;
    struct ep_net *net;
    ep_status status;
    int woken;
    char error[EP_ERROR_TEXT_BYTES];
};

static void *open_side(void *argument)
{
    struct side *side = argument;

    side->status = tested_emulated.open(&tested_emulated, &side->params, &side->net);
    snprintf(side->error, sizeof(side->error), "%s", ep_last_error());
    return NULL;
}

static void count_wake(void *context, int rank)
{
    struct side *sides = context;

    sides[rank].woken++;
}

static void prepare_sides(struct side sides[2], const ep_net_emulation *emulation)
{
    for (int rank = 0; rank < 2; rank++) {
        sides[rank] = (struct side){.params = {.rank = rank,
                                               .nranks = 2,
                                               .ranks_per_node = 1,
                                               .channels = CHANNELS,
                                               .region_bytes = REGION,
                                               .n_signals = N_SIGNALS,
                                               .timeout_ms = 60000,
                                               .wake = count_wake,
                                               .wake_context = sides}};
        if (emulation)
            sides[rank].params.emulation = *emulation;
    }
}

static void open_sides(struct side sides[2])
{
    ep_boot_shm *place;

    assert_int_equal(ep_boot_shm_new(2, &place), EP_OK);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(ep_boot_shm_join(place, rank, &sides[rank].boot), EP_OK);
        sides[rank].params.boot = &sides[rank].boot;
        assert_int_equal(pthread_create(&sides[rank].thread, NULL, open_side, &sides[rank]), 0);
    }
    for (int rank = 0; rank < 2; rank++)
        pthread_join(sides[rank].thread, NULL);
    ep_boot_shm_free(place);
}

static void open_ok(struct side sides[2], const ep_net_emulation *emulation)
{
    prepare_sides(sides, emulation);
    open_sides(sides);
    for (int rank = 0; rank < 2; rank++) {
        if (sides[rank].status != EP_OK)
            print_error("%s\n", sides[rank].error);
        assert_int_equal(sides[rank].status, EP_OK);
    }
}

static void close_sides(struct side sides[2])
{
    for (int rank = 0; rank < 2; rank++)
        if (sides[rank].net)
            sides[rank].net->ops->free(sides[rank].net);
}

static bool put(struct side *side, int channel, uint64_t offset, const void *src, size_t bytes)
{
    return side->net->ops->put(side->net, 1 - side->net->node, channel, offset, src, bytes);
}

static bool add(struct side *side, int channel, uint32_t index, uint64_t value)
{
    return side->net->ops->signal(side->net, 1 - side->net->node, channel, index, value);
}

static bool left(struct side *side, int channel)
{
    return side->net->ops->flush_test(side->net, 1 - side->net->node, channel);
}

static bool progress(struct side *side)
{
    bool moved = false;

    assert_int_equal(side->net->ops->progress(side->net, &moved), EP_OK);
    return moved;
}

static size_t count_bytes(const unsigned char *data, size_t bytes, unsigned char value)
{
    size_t n = 0;

    for (size_t i = 0; i < bytes; i++)
        n += data[i] == value;
    return n;
}

/* --- the seam --- */

TEST(test_put_and_signal)
{
    struct side sides[2];
    unsigned char data[1000];

    open_ok(sides, NULL);
    memset(data, 7, sizeof(data));
    memset(sides[1].net->region, 0, REGION);
    assert_true(sides[0].net->can_sleep);
    assert_int_equal(sides[1].woken, 0);
    assert_true(put(&sides[0], 0, REGION - 1000, data, sizeof(data)));
    assert_int_equal(sides[1].woken, 1);
    assert_true(add(&sides[0], 0, N_SIGNALS - 1, 5));
    assert_int_equal(sides[1].woken, 2);
    assert_true(add(&sides[0], 0, N_SIGNALS - 1, 1ull << 60));
    assert_true(put(&sides[0], 0, REGION, data, 0));
    assert_true(left(&sides[0], 0));
    memset(data, 9, sizeof(data)); /* it has left */
    assert_int_equal(sides[1].net->signals[N_SIGNALS - 1], 0);
    assert_true(progress(&sides[1]));
    assert_int_equal(count_bytes(sides[1].net->region, REGION, 7), 1000);
    assert_int_equal(count_bytes(sides[1].net->region + REGION - 1000, 1000, 7), 1000);
    assert_true(sides[1].net->signals[N_SIGNALS - 1] == 5 + (1ull << 60));
    assert_false(progress(&sides[1]));
    assert_true(sides[1].net->can_sleep);
    assert_int_equal(sides[0].net->signals[N_SIGNALS - 1], 0);
    close_sides(sides);
}

/* --- room --- */

TEST(test_full_wire)
{
    struct side sides[2];
    unsigned char data[100];
    int sent = 0;

    open_ok(sides, &(ep_net_emulation){.ring_bytes = 1000}); /* rounded up to 1024 */
    memset(data, 1, sizeof(data));
    while (put(&sides[0], 0, 0, data, sizeof(data)))
        sent++;
    assert_int_equal(sent, 1024 / (32 + 112));
    assert_false(put(&sides[0], 0, 0, data, sizeof(data)));
    assert_true(put(&sides[0], 1, 0, data, sizeof(data))); /* another channel, another wire */
    assert_int_equal(sides[0].woken, 0);
    assert_true(progress(&sides[1]));
    assert_int_equal(sides[0].woken, 1); /* there is room again */
    assert_true(put(&sides[0], 0, 0, data, sizeof(data)));
    assert_true(progress(&sides[1]));
    assert_int_equal(sides[0].woken, 1); /* nobody was waiting */
    for (int i = 0; i < 1024 / 32; i++)
        assert_true(add(&sides[0], 2, 0, 1));
    assert_false(add(&sides[0], 2, 0, 1));
    close_sides(sides);
}

/* A put that fits the wire is taken whole or not at all; one that does not fit is taken and leaves bit by bit. */
TEST(test_put_larger_than_wire)
{
    struct side sides[2];
    static unsigned char data[20000];
    int rounds = 0;

    open_ok(sides, &(ep_net_emulation){.ring_bytes = 1024});
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (unsigned char)(i * 31 >> 3);
    assert_true(put(&sides[0], 0, 16, data, 400));
    assert_false(put(&sides[0], 0, 16, data, 700)); /* has to wait for an empty wire */
    assert_true(progress(&sides[1]));
    assert_true(put(&sides[0], 0, 16, data, 700));
    assert_true(progress(&sides[1]));
    assert_int_equal(memcmp(sides[1].net->region + 16, data, 700), 0);

    assert_true(put(&sides[0], 0, 100, data, sizeof(data)));
    assert_false(left(&sides[0], 0));
    assert_true(left(&sides[0], 1));
    assert_false(put(&sides[0], 0, 0, data, 1)); /* would overtake the rest */
    assert_false(add(&sides[0], 0, 0, 1));
    assert_true(add(&sides[0], 1, 0, 1));
    while (!left(&sides[0], 0)) {
        progress(&sides[1]);
        assert_false(add(&sides[0], 0, 0, 1)); /* there is room, but not for what comes behind the rest */
        assert_false(put(&sides[0], 0, 0, data, 1));
        assert_true(progress(&sides[0]));
        rounds++;
    }
    assert_true(rounds > 10);
    assert_true(add(&sides[0], 0, 1, 1) || (progress(&sides[1]) && add(&sides[0], 0, 1, 1)));
    progress(&sides[1]);
    assert_int_equal(sides[1].net->signals[1], 1);
    assert_int_equal(memcmp(sides[1].net->region + 100, data, sizeof(data)), 0);
    close_sides(sides);
}

/* A rank that has freed its endpoint reads nothing more: who still sends to it must not wait for room. */
TEST(test_peer_that_has_freed_its_endpoint)
{
    struct side sides[2];
    static unsigned char data[20000];
    struct ep_net *net;

    open_ok(sides, &(ep_net_emulation){.ring_bytes = 1024});
    net = sides[0].net;
    assert_true(put(&sides[0], 0, 0, data, sizeof(data)));
    assert_true(put(&sides[1], 0, 0, "last", 4));
    assert_false(left(&sides[0], 0));
    assert_false(net->ops->ended(net, 1));
    sides[0].woken = 0;
    sides[1].net->ops->free(sides[1].net);
    sides[1].net = NULL;
    assert_true(sides[0].woken > 0);
    assert_false(net->ops->ended(net, 1)); /* what it has put has not arrived */
    assert_true(left(&sides[0], 0));
    assert_true(progress(&sides[0]));
    assert_memory_equal(net->region, "last", 4);
    assert_true(net->ops->ended(net, 1));
    for (int i = 0; i < 100; i++)
        assert_true(put(&sides[0], 1, 0, data, 1000) && add(&sides[0], 1, 0, 1) && left(&sides[0], 1));
    close_sides(sides);
}

/* --- misbehaviour --- */

/* The record at the head of a wire, to look at the time that was drawn for it, and to make that time come. */
static void *due_of(struct side *side, int channel)
{
    struct incoming *in = &emulated_of(side->net)->incoming[channel];

    return in->wire->ring + in->head % emulated_of(side->net)->capacity + offsetof(struct wire_record, due_ns);
}

/* With this seed the delays drawn are 2.2, 2.2 and 1.2 s: long enough for a test on a busy machine. */
TEST(test_delay)
{
    enum { DELAY_S = 3 };
    struct side sides[2];
    uint64_t begin = ep_now_ns(), due[CHANNELS], past = 1;
    const uint64_t *signals;

    open_ok(sides, &(ep_net_emulation){.seed = 1, .delay_us = DELAY_S * 1000000});
    signals = sides[1].net->signals;
    for (int c = 0; c < CHANNELS; c++) {
        assert_true(add(&sides[0], c, (uint32_t)c, 1));
        memcpy(&due[c], due_of(&sides[1], c), sizeof(due[c]));
        assert_true(due[c] > begin + 1000000000u && due[c] <= ep_now_ns() + DELAY_S * 1000000000ull);
    }
    assert_true(due[0] != due[1] && due[1] != due[2]); /* drawn anew for each */
    progress(&sides[1]);
    assert_true(signals[0] + signals[1] + signals[2] == 0 || ep_now_ns() >= due[2]);
    assert_false(sides[1].net->can_sleep); /* nobody will announce that their time has come */

    memcpy(due_of(&sides[1], 0), &past, sizeof(past));
    memcpy(due_of(&sides[1], 1), &past, sizeof(past));
    assert_true(progress(&sides[1]));
    assert_true(signals[0] == 1 && signals[1] == 1);
    while (signals[2] == 0 && ep_now_ns() < begin + 60 * 1000000000ull) {
        unit_sleep_ms(1);
        progress(&sides[1]);
        assert_true(signals[2] == 0 || ep_now_ns() >= due[2]);
    }
    assert_int_equal(signals[2], 1);
    assert_true(sides[1].net->can_sleep);
    close_sides(sides);
}

TEST(test_split)
{
    struct side sides[2];
    unsigned char data[100];

    open_ok(sides, &(ep_net_emulation){.split_bytes = 30});
    memset(data, 1, sizeof(data));
    memset(sides[1].net->region, 0, REGION);
    assert_true(put(&sides[0], 0, 0, data, sizeof(data)));
    assert_true(add(&sides[0], 0, 0, 1));
    for (size_t there = 30; there <= 120; there += 30) {
        assert_int_equal(sides[1].net->signals[0], 0);
        assert_true(progress(&sides[1]));
        assert_int_equal(count_bytes(sides[1].net->region, REGION, 1), there < 100 ? there : 100);
        assert_false(sides[1].net->can_sleep);
    }
    assert_true(progress(&sides[1]));
    assert_int_equal(sides[1].net->signals[0], 1);
    assert_true(sides[1].net->can_sleep);
    close_sides(sides);
}

/* How far channel 1 was behind channel 0 at each step, one letter a step; sent strictly in turn. */
static void reorder_trace(uint64_t seed, char *ret_trace, size_t steps)
{
    struct side sides[2];

    open_ok(sides, &(ep_net_emulation){.seed = seed, .reorder = 1});
    for (size_t i = 0; i < steps; i++) {
        assert_true(add(&sides[0], 0, 0, 1));
        assert_true(add(&sides[0], 1, 1, 1));
        progress(&sides[1]);
        ret_trace[i] = (char)('m' + sides[1].net->signals[0] - sides[1].net->signals[1]);
    }
    ret_trace[steps] = '\0';
    close_sides(sides);
}

TEST(test_reorder)
{
    char one[101], again[101], other[101];

    reorder_trace(1, one, 100);
    reorder_trace(1, again, 100);
    reorder_trace(2, other, 100);
    assert_string_equal(one, again);
    assert_string_not_equal(one, other);
    assert_int_equal(strspn(one, "m") == 100, 0);
    assert_true(strpbrk(one, "abcdefghijkl") != NULL); /* the later one came first */
}

/* --- damage and disagreement --- */

static void expect_broken(struct side *side, const char *text)
{
    bool moved;

    for (int i = 0; i < 2; i++) {
        assert_fails(side->net->ops->progress(side->net, &moved), EP_E_MISMATCH, "rank 0, channel 2");
        if (!strstr(ep_last_error(), text))
            print_error("\"%s\" instead of \"%s\"\n", ep_last_error(), text);
        assert_non_null(strstr(ep_last_error(), text));
    }
}

TEST(test_out_of_range)
{
    static const struct {
        uint64_t offset;
        size_t bytes;
    } bad[] = {{REGION, 1}, {REGION - 7, 8}, {UINT64_MAX, 1}, {UINT64_MAX - 3, 8}, {0, REGION + 16}};
    static unsigned char data[REGION + 16];
    struct side sides[2];

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        open_ok(sides, NULL);
        assert_true(put(&sides[0], 2, bad[i].offset, data, bad[i].bytes));
        expect_broken(&sides[1], "a put beyond the end of the region");
        close_sides(sides);
    }
    open_ok(sides, NULL);
    assert_true(add(&sides[0], 2, N_SIGNALS, 1));
    expect_broken(&sides[1], "a signal that does not exist");
    close_sides(sides);
}

/* Random damage on the wire: a status or wrong data, but never a write outside (the sanitizers watch) or a hang. */
TEST(test_damaged_wire)
{
    uint64_t random = 42;
    int found = 0;

    for (int round = 0; round < 300; round++) {
        struct side sides[2];
        unsigned char data[200] = {0};
        struct wire *wire;
        ep_status status = EP_OK;
        bool moved;

        open_ok(sides, &(ep_net_emulation){.ring_bytes = 1024});
        assert_true(put(&sides[0], 2, (uint64_t)round, data, sizeof(data)));
        assert_true(add(&sides[0], 2, 1, 1));
        wire = emulated_of(sides[1].net)->incoming[2].wire;
        for (uint64_t n = next_random(&random) % 4 + 1; n; n--)
            wire->ring[next_random(&random) % 300] ^= (unsigned char)(1u << next_random(&random) % 8);
        if (round % 8 == 0)
            atomic_fetch_add(&wire->tail, next_random(&random) >> next_random(&random) % 64);
        for (int i = 0; i < 3 && status == EP_OK; i++)
            status = sides[1].net->ops->progress(sides[1].net, &moved);
        assert_true(status == EP_OK || status == EP_E_MISMATCH);
        found += status != EP_OK;
        if (round % 8 == 1) { /* a head that runs ahead of the tail: no room, for ever, but no damage */
            atomic_store(&wire->head, UINT64_MAX / 2);
            assert_false(put(&sides[0], 2, 0, data, sizeof(data)));
            assert_false(add(&sides[0], 2, 0, 1));
        }
        close_sides(sides);
    }
    assert_true(found > 50);
}

TEST(test_disagreement)
{
    struct side sides[2];

    prepare_sides(sides, NULL);
    sides[1].params.region_bytes = REGION / 2;
    open_sides(sides);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(sides[rank].status, EP_E_MISMATCH);
        assert_non_null(strstr(sides[rank].error, "region_bytes"));
        assert_non_null(strstr(sides[rank].error, "65536"));
        assert_non_null(strstr(sides[rank].error, "32768"));
    }
    close_sides(sides);

    prepare_sides(sides, NULL);
    sides[0].params.channels = 1;
    open_sides(sides);
    assert_int_equal(sides[0].status, EP_E_MISMATCH);
    assert_int_equal(sides[1].status, EP_E_MISMATCH);
    close_sides(sides);

    /* Rings need not be of one size. */
    prepare_sides(sides, NULL);
    sides[0].params.emulation.ring_bytes = 512;
    open_sides(sides);
    assert_int_equal(sides[0].status, EP_OK);
    assert_int_equal(sides[1].status, EP_OK);
    for (int i = 0; i < 512 / 32; i++)
        assert_true(add(&sides[1], 0, 0, 1));
    assert_false(add(&sides[1], 0, 0, 1));
    for (int i = 0; i < 1024; i++)
        assert_true(add(&sides[0], 0, 0, 1));
    close_sides(sides);
}

/* A rank that cannot open its endpoint takes part all the same: the other one learns why, and does not wait for it
 * until EP_E_TIMEOUT. */
TEST(test_one_rank_without_memory)
{
    struct side sides[2];

    prepare_sides(sides, NULL);
    sides[1].params.region_bytes = 2 << 20;
    sides[0].params.region_bytes = REGION;
    open_sides(sides);
    assert_int_equal(sides[1].status, EP_E_MEMORY);
    assert_int_equal(sides[0].status, EP_E_MEMORY);
    assert_non_null(strstr(sides[0].error, "rank 1"));
    close_sides(sides);
}

TEST(test_bad_parameters)
{
    struct side sides[2];

    prepare_sides(sides, NULL);
    sides[0].params.emulation.ring_bytes = EP_NET_WIRE_MIN_BYTES - 1;
    open_side(&sides[0]);
    assert_int_equal(sides[0].status, EP_E_ARG);
    assert_non_null(strstr(sides[0].error, "ring_bytes"));
    sides[1].params.ranks_per_node = 2;
    open_side(&sides[1]);
    assert_int_equal(sides[1].status, EP_E_ARG);
    assert_null(sides[1].net);
}
