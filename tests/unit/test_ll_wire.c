/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What low latency between nodes on GPUs sends and takes, without a GPU: the test writes the segment that stands for
 * rank 1 on rank 0 as kernels do, and reads the landing segment of rank 1 as kernels do. Over the emulated network,
 * whose ring is shorter than a call.
 */
#include "ranks.h"

#include "net/ll_wire.c"

enum {
    TOKENS = 6,
    HIDDEN = 1024,
    TOPK = 2,
    LOCAL = 3,
    RANKS = 2,
    SLOT = 128 + 2 * HIDDEN,
    RING = 16384,
    POISON = 0xa5
};

struct pair {
    struct ll_wire wire[RANKS];
    unsigned char *out, *landing; /* of rank 0 for rank 1; of rank 1 */
    size_t bytes;
    struct ll_sender sender;
    uint64_t finished; /* on rank 1 */
    int damaged;
};

static int open_streams(const ep_boot *boot, void *argument)
{
    struct pair *p = argument;
    struct ep_net_params params = {
        .rank = boot->rank, .nranks = RANKS, .ranks_per_node = 1, .channels = 1, .timeout_ms = 60000, .boot = boot};

    return ep_streams_open(&ep_net_emulated, &params, RING, &p->wire[boot->rank].streams) != EP_OK;
}

static int make_pair(void **state)
{
    struct ll_wire wire = {.nranks = RANKS,
                           .segment_tokens = TOKENS,
                           .hidden = HIDDEN,
                           .topk = TOPK,
                           .n_counts = LOCAL + 1,
                           .slot_bytes = SLOT};
    struct pair *p = calloc(1, sizeof(*p));

    assert_non_null(p);
    p->bytes = ll_wire_lay_out(&wire, sizeof(struct ll_wire_segment), LL_WIRE_MAX_PARTS);
    for (int rank = 0; rank < RANKS; rank++) {
        p->wire[rank] = wire;
        p->wire[rank].me = rank;
    }
    p->out = aligned_alloc(128, p->bytes);
    p->landing = aligned_alloc(128, p->bytes);
    assert_true(p->out && p->landing);
    memset(p->out, 0, p->bytes);
    memset(p->landing, 0, p->bytes);
    p->wire[1].landing = p->landing;
    p->sender = (struct ll_sender){.rank = 1, .segment = p->out};
    unit_run_threads(RANKS, open_streams, p);
    *state = p;
    return 0;
}

static int free_pair(void **state)
{
    struct pair *p = *state;

    for (int rank = 0; rank < RANKS; rank++)
        ep_streams_free(p->wire[rank].streams);
    free(p->out);
    free(p->landing);
    free(p);
    return 0;
}

/* Until nothing has moved for some rounds: what is given back takes one or two. */
static void run(struct pair *p)
{
    for (int quiet = 0; quiet < 100; quiet++) {
        const void *message;
        size_t bytes;
        bool sent, came;

        assert_int_equal(ep_streams_progress(p->wire[0].streams, &sent), EP_OK);
        assert_int_equal(ep_streams_progress(p->wire[1].streams, &came), EP_OK);
        if (ll_wire_send(&p->wire[0], &p->sender) || sent || came)
            quiet = 0;
        while ((message = ep_stream_peek(p->wire[1].streams, 0, 0, &bytes))) {
            p->damaged += !ll_wire_deliver(&p->wire[1], 0, message, bytes, p->finished);
            ep_stream_pop(p->wire[1].streams, 0, 0);
            quiet = 0;
        }
    }
    assert_int_equal(p->damaged, 0);
    assert_false(ll_wire_is_pending(&p->wire[0], &p->sender));
    assert_true(ep_streams_flushed_to(p->wire[0].streams, 1));
}

/* All that rank 0 has sent has come to rank 1, which has taken nothing of it. */
static bool are_flushed(struct pair *p)
{
    bool moved, came;

    assert_int_equal(ep_streams_progress(p->wire[0].streams, &moved), EP_OK);
    assert_int_equal(ep_streams_progress(p->wire[1].streams, &came), EP_OK);
    return ep_streams_flushed_to(p->wire[0].streams, 1) && !moved && !came;
}

/* --- as kernels write and read --------------------------------------------------------------------------------------
 */

static struct ll_wire_segment *words_of(unsigned char *segment)
{
    return (struct ll_wire_segment *)(void *)segment;
}

static bool has_row(uint64_t number, int i)
{
    return (number + (uint64_t)i) % 3 != 0;
}

static unsigned char byte_of(uint64_t number, int i, int64_t at)
{
    return (unsigned char)(number * 31 + (uint64_t)i * 7 + (uint64_t)at % 251);
}

static void fill(unsigned char *to, uint64_t number, int i, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at++)
        to[at] = byte_of(number, i, at);
}

static bool is_filled(const unsigned char *from, uint64_t number, int i, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at++)
        if (from[at] != byte_of(number, i, at))
            return false;
    return true;
}

static void publish(struct pair *p, const struct ll_wire_desc *desc, int which)
{
    struct ll_wire_segment *out = words_of(p->out);

    out->desc[which] = *desc;
    store(which == LL_WIRE_DESC_WEIGHTS ? &out->weights_ready[0] : &out->rows_ready[0], desc->number);
}

/* A dispatch of rank 0 with a row of `image` bytes for every token but each third. */
static void write_dispatch(struct pair *p, uint64_t number, int max_tokens, int image)
{
    const struct ll_wire *wire = &p->wire[0];
    struct ll_wire_desc desc = {
        .number = number, .max_tokens = max_tokens, .image_bytes = image, .parity = (int32_t)(number / 2 & 1)};
    uint64_t *counts = words_at(p->out, ll_wire_counts_at(wire, desc.parity, 0));

    for (int i = 0; i <= LOCAL; i++)
        counts[i] = number << 32 | (uint32_t)i;
    for (int token = 0; token < max_tokens; token++) {
        if (has_row(number, token))
            fill(p->out + ll_wire_slot_at(wire, 0, token), number, token, image);
        *words_at(p->out, ll_wire_slot_flag_at(wire, 0, token)) = number << 1 | has_row(number, token);
    }
    publish(p, &desc, (int)(number & 1));
}

static void check_dispatch(struct pair *p, uint64_t number, int max_tokens, int image)
{
    const struct ll_wire *wire = &p->wire[1];
    const uint64_t *counts = words_at(p->landing, ll_wire_counts_at(wire, (int)(number / 2 & 1), 0));

    for (int i = 0; i <= LOCAL; i++)
        assert_int_equal(counts[i], number << 32 | (uint32_t)i);
    for (int token = 0; token < max_tokens; token++) {
        assert_int_equal(*words_at(p->landing, ll_wire_slot_flag_at(wire, 0, token)),
                         number << 1 | has_row(number, token));
        if (has_row(number, token))
            assert_true(is_filled(p->landing + ll_wire_slot_at(wire, 0, token), number, token, image));
    }
    assert_int_equal(words_of(p->landing)->rows_ready[0], number);
}

static void write_weights(struct pair *p, uint64_t number, int max_tokens)
{
    const struct ll_wire_desc desc = {.number = number, .combine = 1, .max_tokens = max_tokens, .detail = 77};

    for (int i = 0; i < max_tokens * TOPK; i++)
        if (has_row(number, i))
            *words_at(p->out, ll_wire_weight_at(&p->wire[0], 0, i)) = number << 32 | (uint32_t)(i + 1);
    publish(p, &desc, LL_WIRE_DESC_WEIGHTS);
}

static void write_rows(struct pair *p, uint64_t number, int max_tokens, int parts)
{
    const struct ll_wire *wire = &p->wire[0];
    const struct ll_wire_desc desc = {.number = number, .combine = 1, .max_tokens = max_tokens, .parts = parts};

    for (int place = 0; place < max_tokens * TOPK; place++) {
        if (!has_row(number, place))
            continue;
        fill(p->out + wire->rows_at + place * row_bytes(wire), number, place, row_bytes(wire));
        for (int part = 0; part < parts; part++)
            words_at(p->out, ll_wire_row_flag_at(wire, place, parts))[part] = number;
    }
    publish(p, &desc, (int)(number & 1));
}

static void check_rows(struct pair *p, uint64_t number, int max_tokens, int parts)
{
    const struct ll_wire *wire = &p->wire[1];

    for (int place = 0; place < max_tokens * TOPK; place++) {
        const uint64_t *flags = words_at(p->landing, ll_wire_row_flag_at(wire, place, parts));

        for (int part = 0; part < parts; part++)
            assert_int_equal(flags[part] == number, has_row(number, place));
        if (has_row(number, place))
            assert_true(
                is_filled(p->landing + wire->rows_at + place * row_bytes(wire), number, place, row_bytes(wire)));
    }
}

/* --- cases ----------------------------------------------------------------------------------------------------------
 */

TEST_WITH(every_row_of_a_dispatch_lands, make_pair, free_pair)
{
    struct pair *p = *state;

    for (uint64_t number = 1; number <= 6; number++) {
        int tokens = number % 2 ? TOKENS : TOKENS - 2, image = number % 2 ? SLOT : 128 + HIDDEN;

        write_dispatch(p, number, tokens, image);
        run(p);
        check_dispatch(p, number, tokens, image);
        p->finished = number;
    }
}

TEST_WITH(weights_come_before_the_rows_are_there, make_pair, free_pair)
{
    struct pair *p = *state;

    write_weights(p, 1, TOKENS);
    run(p);
    for (int i = 0; i < TOKENS * TOPK; i++)
        assert_int_equal(*words_at(p->landing, ll_wire_weight_at(&p->wire[1], 0, i)),
                         has_row(1, i) ? UINT64_C(1) << 32 | (uint32_t)(i + 1) : 0);
    assert_int_equal(words_of(p->landing)->weights_ready[0], 1);
    assert_int_equal(words_of(p->landing)->detail[0], 77);
    assert_int_equal(words_of(p->landing)->rows_ready[0], 0);
    write_rows(p, 1, TOKENS, LL_WIRE_MAX_PARTS);
    run(p);
    check_rows(p, 1, TOKENS, LL_WIRE_MAX_PARTS);
    assert_int_equal(words_of(p->landing)->rows_ready[0], 1);
}

/* The proxy may see the second call before it has sent anything of the first. */
TEST_WITH(two_calls_are_published_at_once, make_pair, free_pair)
{
    struct pair *p = *state;

    write_dispatch(p, 1, TOKENS, SLOT);
    write_rows(p, 2, TOKENS, 3);
    run(p);
    assert_int_equal(words_of(p->landing)->rows_ready[0], 2);
    words_of(p->landing)->rows_ready[0] = 1;
    check_dispatch(p, 1, TOKENS, SLOT);
    check_rows(p, 2, TOKENS, 3);
}

/* Calls 2 to 9 had the rank masked: kernels have written nothing for it, and told nothing. */
TEST_WITH(calls_without_the_rank_are_passed_over, make_pair, free_pair)
{
    struct pair *p = *state;

    write_dispatch(p, 1, TOKENS, SLOT);
    run(p);
    write_dispatch(p, 10, TOKENS, SLOT);
    run(p);
    check_dispatch(p, 10, TOKENS, SLOT);
}

TEST_WITH(what_comes_late_changes_nothing, make_pair, free_pair)
{
    struct pair *p = *state;

    p->finished = 4;
    write_rows(p, 4, TOKENS, 2);
    run(p);
    for (int place = 0; place < TOKENS * TOPK; place++)
        assert_int_equal(*words_at(p->landing, ll_wire_row_flag_at(&p->wire[1], place, 2)), 0);
    assert_int_equal(p->landing[p->wire[1].rows_at + row_bytes(&p->wire[1])], 0);
    write_rows(p, 5, TOKENS, 2);
    run(p);
    check_rows(p, 5, TOKENS, 2);
}

TEST_WITH(words_only_grow, make_pair, free_pair)
{
    struct pair *p = *state;
    struct ll_wire_segment *out = words_of(p->out), *landing = words_of(p->landing);

    out->completed[0] = 7;
    out->barriers[0] = 3;
    out->masked_by[0] = 1;
    run(p);
    assert_int_equal(landing->completed[0], 7);
    assert_int_equal(landing->barriers[0], 3);
    assert_int_equal(landing->masked_by[0], 1);
    assert_int_equal(landing->received[0], 1);
    assert_int_equal(landing->events, LL_WIRE_EVENT);
    out->completed[0] = 6;
    out->masked_by[0] = 0;
    run(p);
    assert_int_equal(landing->completed[0], 7);
    assert_int_equal(landing->masked_by[0], 0);
    assert_int_equal(landing->received[0], 2);
    assert_int_equal(landing->events, 2 * LL_WIRE_EVENT);
}

/* Kernels look at what has arrived when the count has changed: with each message, and with a rank that is lost. */
TEST_WITH(each_change_is_counted, make_pair, free_pair)
{
    struct pair *p = *state;
    struct ll_wire_segment *landing = words_of(p->landing);

    write_rows(p, 1, TOKENS, 1);
    run(p);
    assert_true(landing->received[0] > 1);
    assert_int_equal(landing->events, landing->received[0] * LL_WIRE_EVENT);
    ll_wire_add_event(landing, LL_WIRE_EVENT_LOST);
    assert_int_equal(landing->events, (landing->received[0] + 1) * LL_WIRE_EVENT | LL_WIRE_EVENT_LOST);
    write_rows(p, 2, TOKENS, 1);
    run(p);
    assert_int_equal(landing->events, (landing->received[0] + 1) * LL_WIRE_EVENT | LL_WIRE_EVENT_LOST);
}

/* More messages than are taken at once: who looks for the last word is told that it is not there yet. */
TEST_WITH(messages_that_are_left_are_reported, make_pair, free_pair)
{
    struct pair *p = *state;
    struct ll_wire_segment *out = words_of(p->out), *landing = words_of(p->landing);
    struct ll_received received;
    uint64_t barriers = LL_WIRE_BATCH + 10;

    for (out->barriers[0] = 1; out->barriers[0] <= barriers; out->barriers[0]++) {
        /* Each message leaves by itself, and nothing is taken meanwhile. */
        for (bool sent = ll_wire_send(&p->wire[0], &p->sender); !sent || !are_flushed(p);)
            sent |= ll_wire_send(&p->wire[0], &p->sender);
    }
    assert_true(ll_wire_receive(&p->wire[1], 0, 0, &received));
    assert_int_equal(received.n, LL_WIRE_BATCH);
    assert_true(received.more);
    assert_int_equal(landing->barriers[0], LL_WIRE_BATCH);
    assert_true(ll_wire_receive(&p->wire[1], 0, 0, &received));
    assert_int_equal(received.n, 10);
    assert_false(received.more);
    assert_int_equal(landing->barriers[0], barriers);
}

/* A ring of large rows is taken in one turn, and what its sender had no room for comes later: `more` says nothing of
 * it. */
TEST_WITH(what_a_full_ring_holds_back_comes_later, make_pair, free_pair)
{
    struct pair *p = *state;
    struct ll_received received;

    write_rows(p, 5, TOKENS, 2);
    for (bool sent = true; sent || !are_flushed(p);)
        sent = ll_wire_send(&p->wire[0], &p->sender);
    assert_true(ll_wire_is_pending(&p->wire[0], &p->sender));
    assert_true(ll_wire_receive(&p->wire[1], 0, 0, &received));
    assert_in_range(received.n, 1, LL_WIRE_BATCH - 1);
    assert_false(received.more);
    run(p);
    check_rows(p, 5, TOKENS, 2);
}

TEST_WITH(what_no_rank_sends_is_refused, make_pair, free_pair)
{
    static const struct {
        struct ll_message head;
        size_t payload;
    } damaged[] = {
        {{.kind = 0, .max_tokens = 1}, 0},
        {{.kind = MESSAGE_ROW + 1, .max_tokens = 1}, 0},
        {{.kind = MESSAGE_WORDS}, sizeof(struct ll_words) - 8},
        {{.kind = MESSAGE_EMPTY, .max_tokens = 0}, 0},
        {{.kind = MESSAGE_EMPTY, .max_tokens = TOKENS + 1}, 0},
        {{.kind = MESSAGE_EMPTY, .at = 1, .n = TOKENS, .max_tokens = TOKENS}, 0},
        {{.kind = MESSAGE_EMPTY, .at = UINT32_MAX, .n = 2, .max_tokens = TOKENS}, 0},
        {{.kind = MESSAGE_COUNTS, .at = 2, .n = LOCAL + 1, .max_tokens = 1}, (LOCAL + 1) * 8},
        {{.kind = MESSAGE_COUNTS, .n = LOCAL, .max_tokens = 1}, LOCAL * 8},
        {{.kind = MESSAGE_SLOT, .at = 1, .n = 64, .max_tokens = 1}, 64},
        {{.kind = MESSAGE_SLOT, .n = SLOT + 8, .max_tokens = 1}, SLOT + 8},
        {{.kind = MESSAGE_SLOT, .n = 64, .max_tokens = 1}, 72},
        {{.kind = MESSAGE_WEIGHTS, .at = TOPK, .n = 1, .max_tokens = 1}, 8},
        {{.kind = MESSAGE_WEIGHTS, .n = 1, .max_tokens = 1}, 16},
        {{.kind = MESSAGE_ROW, .at = TOPK, .parts = 1, .max_tokens = 1}, HIDDEN * 2},
        {{.kind = MESSAGE_ROW, .parts = 0, .max_tokens = 1}, HIDDEN * 2},
        {{.kind = MESSAGE_ROW, .parts = LL_WIRE_MAX_PARTS + 1, .max_tokens = 1}, HIDDEN * 2},
        {{.kind = MESSAGE_ROW, .parts = 1, .max_tokens = 1}, HIDDEN},
    };
    struct pair *p = *state;
    unsigned char *message = calloc(1, sizeof(struct ll_message) + 2 * SLOT), *before = malloc(p->bytes);

    assert_true(message && before);
    memset(p->landing, POISON, p->bytes);
    memcpy(before, p->landing, p->bytes);
    for (size_t i = 0; i < sizeof(damaged) / sizeof(damaged[0]); i++) {
        struct ll_message head = damaged[i].head;

        head.number = 9;
        memcpy(message, &head, sizeof(head));
        assert_false(ll_wire_deliver(&p->wire[1], 0, message, sizeof(head) + damaged[i].payload, 0));
    }
    assert_false(ll_wire_deliver(&p->wire[1], 0, message, sizeof(struct ll_message) - 1, 0));
    assert_memory_equal(p->landing, before, p->bytes);
    free(message);
    free(before);
}
