/* SPDX-License-Identifier: Apache-2.0 */
/* core/routing.c against a reference that computes every (token, rank, position) separately. */
#include "unit.h"

#include "core/routing.h"

#include <limits.h>

/* xorshift64*: the same numbers everywhere for a seed. */
static uint64_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 2685821657736338717u) >> 33) % below;
}

/* $EPKIT_TEST_SEED repeats a run. */
static int seed_random(void **state)
{
    const char *given = getenv("EPKIT_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)(getenv("EPKIT_TEST_LONG") ? time(NULL) : 7001);

    (void)state;
    printf("EPKIT_TEST_SEED=%llu\n", (unsigned long long)seed);
    random_state = seed * 2 + 1;
    return 0;
}

struct sample {
    struct ep_routing_shape shape;
    int idx_type;
    int32_t *idx; /* expected result */
    void *given;  /* as the caller has it, of idx_type */
};

static struct ep_routing_shape draw_shape(void)
{
    static const int most_ranks = 24, most_local = 12, most_topk = 10;
    struct ep_routing_shape shape = {.n_tokens = (int)draw(60), .topk = 1 + (int)draw((uint32_t)most_topk)};
    int nodes = 1 + (int)draw(4);

    shape.ranks_per_node = 1 + (int)draw((uint32_t)(most_ranks / nodes));
    shape.nranks = nodes * shape.ranks_per_node;
    shape.n_experts = shape.nranks * (1 + (int)draw((uint32_t)most_local));
    return shape;
}

static size_t entries(const struct ep_routing_shape *shape)
{
    return (size_t)shape->n_tokens * (size_t)shape->topk;
}

static int holds(const int32_t *row, int n, int expert)
{
    for (int k = 0; k < n; k++)
        if (row[k] == expert)
            return 1;
    return 0;
}

static void put(struct sample *sample, size_t at, int64_t value)
{
    if (sample->idx_type == EP_I64)
        ((int64_t *)sample->given)[at] = value;
    else
        ((int32_t *)sample->given)[at] = (int32_t)value;
}

static struct sample new_sample(struct ep_routing_shape shape, int idx_type)
{
    struct sample sample = {.shape = shape, .idx_type = idx_type};

    sample.idx = calloc(entries(&shape) + 1, sizeof(*sample.idx));
    sample.given = calloc(entries(&shape) + 1, sizeof(int64_t));
    assert_non_null(sample.idx);
    assert_non_null(sample.given);
    for (int token = 0; token < shape.n_tokens; token++) {
        int32_t *row = sample.idx + (size_t)token * (size_t)shape.topk;

        for (int k = 0; k < shape.topk; k++) {
            int expert = (int)draw((uint32_t)shape.n_experts);

            row[k] = draw(5) && !holds(row, k, expert) ? expert : -1;
        }
    }
    for (size_t i = 0; i < entries(&shape); i++)
        put(&sample, i, sample.idx[i]);
    return sample;
}

static void free_sample(struct sample *sample)
{
    free(sample->idx);
    free(sample->given);
}

/* Does the token have an expert in [first, end)? O(K) each time: slow and obvious. */
static int goes_to(const struct sample *sample, int token, int first, int end)
{
    const int32_t *row = sample->idx + (size_t)token * (size_t)sample->shape.topk;

    for (int expert = first; expert < end; expert++)
        if (holds(row, sample->shape.topk, expert))
            return 1;
    return 0;
}

static int count_tokens(const struct sample *sample, int first, int end)
{
    int n = 0;

    for (int token = 0; token < sample->shape.n_tokens; token++)
        n += goes_to(sample, token, first, end);
    return n;
}

static void compare_counts(const struct sample *sample, const struct ep_routing_counts *counts)
{
    const struct ep_routing_shape *shape = &sample->shape;
    int local = shape->n_experts / shape->nranks, node = local * shape->ranks_per_node;

    for (int rank = 0; counts->per_rank && rank < shape->nranks; rank++)
        assert_int_equal(counts->per_rank[rank], count_tokens(sample, rank * local, (rank + 1) * local));
    for (int i = 0; counts->per_node && i < shape->nranks / shape->ranks_per_node; i++)
        assert_int_equal(counts->per_node[i], count_tokens(sample, i * node, (i + 1) * node));
    for (int expert = 0; counts->per_expert && expert < shape->n_experts; expert++)
        assert_int_equal(counts->per_expert[expert], count_tokens(sample, expert, expert + 1));
    for (int token = 0; counts->in_rank && token < shape->n_tokens; token++)
        for (int rank = 0; rank < shape->nranks; rank++)
            assert_int_equal(counts->in_rank[token * shape->nranks + rank],
                             goes_to(sample, token, rank * local, (rank + 1) * local));
}

/* Outputs initially hold random data, have their exact size (ASan checks), and each may be NULL. */
static void check_sample(const struct sample *sample, unsigned wanted)
{
    const struct ep_routing_shape *shape = &sample->shape;
    size_t ranks = (size_t)shape->nranks, nodes = ranks / (size_t)shape->ranks_per_node;
    size_t experts = (size_t)shape->n_experts, cells = (size_t)shape->n_tokens * ranks;
    int32_t *idx = malloc((entries(shape) ? entries(shape) : 1) * sizeof(*idx));
    struct ep_routing_counts counts = {0};

    if (wanted & 1)
        counts.per_rank = memset(malloc(ranks * sizeof(int32_t)), 0x5a, ranks * sizeof(int32_t));
    if (wanted & 2)
        counts.per_node = memset(malloc(nodes * sizeof(int32_t)), 0x5a, nodes * sizeof(int32_t));
    if (wanted & 4)
        counts.per_expert = memset(malloc(experts * sizeof(int32_t)), 0x5a, experts * sizeof(int32_t));
    if (wanted & 8)
        counts.in_rank = memset(malloc(cells ? cells : 1), 0x5a, cells);
    assert_int_equal(ep_routing_check(shape, sample->given, sample->idx_type, idx), EP_OK);
    assert_memory_equal(idx, sample->idx, entries(shape) * sizeof(*idx));
    assert_int_equal(ep_routing_count(shape, idx, &counts), EP_OK);
    compare_counts(sample, &counts);
    free(counts.per_rank);
    free(counts.per_node);
    free(counts.per_expert);
    free(counts.in_rank);
    free(idx);
}

TEST(random_routings_count_as_the_reference)
{
    for (unsigned round = 0; round < 160; round++) {
        struct sample sample = new_sample(draw_shape(), round & 1 ? EP_I64 : EP_I32);

        check_sample(&sample, round < 128 ? 15 : round % 16);
        free_sample(&sample);
    }
}

TEST(limits_count_as_the_reference)
{
    struct ep_routing_shape shapes[] = {
        {.n_tokens = 0, .topk = 1, .n_experts = 1, .nranks = 1, .ranks_per_node = 1},
        {.n_tokens = 3, .topk = 64, .n_experts = 64, .nranks = 1, .ranks_per_node = 1},
        {.n_tokens = 5, .topk = 8, .n_experts = 1024, .nranks = 1024, .ranks_per_node = 1},
        {.n_tokens = 5, .topk = 8, .n_experts = 4096, .nranks = 1024, .ranks_per_node = 8},
    };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct sample sample = new_sample(shapes[i], EP_I64);

        check_sample(&sample, 15);
        free_sample(&sample);
    }
}

static void expect_refused(struct sample *sample, const char *text)
{
    int32_t *idx = malloc((entries(&sample->shape) + 1) * sizeof(*idx));

    assert_int_equal(ep_routing_check(&sample->shape, sample->given, sample->idx_type, idx), EP_E_ROUTING);
    assert_string_equal(ep_last_error(), text);
    free(idx);
}

/* One invalid entry in a valid routing is reported with token, position and value, wherever it is. */
TEST(out_of_range_is_named)
{
    static const int64_t bad_i64[] = {-2, INT64_MIN, INT64_MAX, 1ll << 32, (1ll << 32) + 1, -(1ll << 32)};
    char text[200];

    for (int round = 0; round < 100; round++) {
        struct ep_routing_shape shape = draw_shape();
        int idx_type = round & 1 ? EP_I64 : EP_I32;
        int64_t value = shape.n_experts + (int64_t)draw(3);
        struct sample sample;
        size_t at;

        shape.n_tokens++;
        sample = new_sample(shape, idx_type);
        at = draw((uint32_t)entries(&shape));
        if (draw(2))
            value = idx_type == EP_I64 ? bad_i64[draw(6)] : draw(2) ? INT32_MIN : -2;
        put(&sample, at, value);
        if (value < 0)
            snprintf(text, sizeof(text), "routing: token %zu: expert %lld at position %zu is below -1",
                     at / (size_t)shape.topk, (long long)value, at % (size_t)shape.topk);
        else
            snprintf(text, sizeof(text), "routing: token %zu: expert %lld at position %zu is not below n_experts %d",
                     at / (size_t)shape.topk, (long long)value, at % (size_t)shape.topk, shape.n_experts);
        expect_refused(&sample, text);
        free_sample(&sample);
    }
}

TEST(expert_twice_is_named)
{
    char text[200];

    for (int round = 0; round < 100; round++) {
        struct ep_routing_shape shape = draw_shape();
        struct sample sample;
        int token, first, second, expert;
        int32_t *row;

        shape.n_tokens++;
        shape.topk++;
        shape.distinct = true;
        sample = new_sample(shape, round & 1 ? EP_I64 : EP_I32);
        token = (int)draw((uint32_t)shape.n_tokens);
        second = 1 + (int)draw((uint32_t)shape.topk - 1);
        first = (int)draw((uint32_t)second);
        /* The row keeps its other experts, if they are not the chosen one by chance. */
        expert = (int)draw((uint32_t)shape.n_experts);
        row = sample.idx + (size_t)token * (size_t)shape.topk;
        for (int k = 0; k < shape.topk; k++)
            if (row[k] == expert)
                put(&sample, (size_t)token * (size_t)shape.topk + (size_t)k, -1);
        put(&sample, (size_t)token * (size_t)shape.topk + (size_t)first, expert);
        put(&sample, (size_t)token * (size_t)shape.topk + (size_t)second, expert);
        snprintf(text, sizeof(text), "routing: token %d: expert %d twice, at positions %d and %d", token, expert, first,
                 second);
        expect_refused(&sample, text);
        free_sample(&sample);
    }
}

/* Each choice counts for its expert, and each rank and node once; a limit of rows names the first choice beyond it. */
TEST(an_expert_twice_counts_twice)
{
    struct ep_routing_shape shape = {
        .n_tokens = 3, .topk = 3, .n_experts = 4, .nranks = 2, .ranks_per_node = 1, .max_rows = 3};
    const int32_t given[] = {0, 1, 0, 3, 3, 3, 0, -1, 2};
    const int32_t want_expert[] = {3, 1, 1, 3}, want_rank[] = {2, 2};
    int32_t idx[9], per_rank[2], per_expert[4];
    struct ep_routing_counts counts = {.per_rank = per_rank, .per_expert = per_expert};

    assert_int_equal(ep_routing_check(&shape, given, EP_I32, idx), EP_OK);
    assert_int_equal(ep_routing_count(&shape, idx, &counts), EP_OK);
    assert_memory_equal(per_expert, want_expert, sizeof(want_expert));
    assert_memory_equal(per_rank, want_rank, sizeof(want_rank));
    shape.max_rows = 2;
    assert_int_equal(ep_routing_check(&shape, given, EP_I32, idx), EP_E_ROUTING);
    assert_string_equal(ep_last_error(), "routing: token 1: expert 3 at position 2 is choice 3 of this expert, which "
                                         "has room for 2 rows of each rank (max_tokens)");
}

/* -1 may be at any position, any number of times, and adjacent tokens may choose the same expert. */
TEST(none_is_no_expert)
{
    struct ep_routing_shape shape = {.n_tokens = 4, .topk = 3, .n_experts = 2, .nranks = 2, .ranks_per_node = 2};
    const int32_t given[] = {-1, -1, -1, 0, -1, -1, -1, 0, -1, 1, -1, 0};
    int32_t idx[12], per_rank[2], per_node[1];
    struct ep_routing_counts counts = {.per_rank = per_rank, .per_node = per_node};

    assert_int_equal(ep_routing_check(&shape, given, EP_I32, idx), EP_OK);
    assert_int_equal(ep_routing_count(&shape, idx, &counts), EP_OK);
    assert_int_equal(per_rank[0], 3);
    assert_int_equal(per_rank[1], 1);
    assert_int_equal(per_node[0], 3);
}

TEST(layout_fills_what_is_asked_for)
{
    ep_comm comm = {.nranks = 4, .n_members = 4, .ranks_per_node = 2};
    int64_t topk_idx[] = {0, 7, 7, -1, 2, 3};
    ep_plan_args args = {.topk_idx = topk_idx, .idx_type = EP_I64, .n_tokens = 3, .topk = 2, .n_experts = 8};
    int32_t per_rank[4], per_node[2], per_expert[8];
    uint8_t in_rank[12];
    const int32_t want_rank[] = {1, 1, 0, 2}, want_node[] = {2, 2}, want_expert[] = {1, 0, 1, 1, 0, 0, 0, 2};
    const uint8_t want_in[] = {1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0};
    ep_layout layout = EP_LAYOUT_INIT;

    assert_int_equal(ep_routing_layout(&comm, &args, &layout), EP_OK);
    layout.tokens_per_rank = per_rank;
    layout.tokens_per_node = per_node;
    layout.tokens_per_expert = per_expert;
    layout.token_in_rank = in_rank;
    assert_int_equal(ep_routing_layout(&comm, &args, &layout), EP_OK);
    assert_memory_equal(per_rank, want_rank, sizeof(want_rank));
    assert_memory_equal(per_node, want_node, sizeof(want_node));
    assert_memory_equal(per_expert, want_expert, sizeof(want_expert));
    assert_memory_equal(in_rank, want_in, sizeof(want_in));
    topk_idx[5] = 8;
    memset(per_rank, 0x5a, sizeof(per_rank));
    assert_int_equal(ep_routing_layout(&comm, &args, &layout), EP_E_ROUTING);
    assert_int_equal(per_rank[0], 0x5a5a5a5a);
}

TEST_GROUP(seed_random, NULL)
