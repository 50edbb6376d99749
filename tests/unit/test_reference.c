/* SPDX-License-Identifier: Apache-2.0 */
/* The reference against examples that were worked out by hand. */
#include "unit.h"

#include "cmd/test/check/data.h"
#include "cmd/test/check/number_formats.h"
#include "cmd/test/check/reference.h"

#include <epkit/types.h>

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

/*
 * Three ranks with two experts each (0 1 | 2 3 | 4 5), two selections a token:
 *   rank 0   token 0: 0 1   token 1: 2 5   token 2: - 3
 *   rank 1   token 0: 4 0   token 1: - -
 *   rank 2   token 0: 5 1
 */
static int three_tokens[] = {3, 2, 1};
static int32_t three_experts_0[] = {0, 1, 2, 5, -1, 3};
static int32_t three_experts_1[] = {4, 0, -1, -1};
static int32_t three_experts_2[] = {5, 1};
static int32_t *three_experts[] = {three_experts_0, three_experts_1, three_experts_2};
static float three_weights_0[] = {0.5f, 0.25f, 0.75f, 0.125f, 9.0f, 1.0f};
static float three_weights_1[] = {0.375f, 0.625f, 8.0f, 7.0f};
static float three_weights_2[] = {2.0f, 3.0f};
static float *three_weights[] = {three_weights_0, three_weights_1, three_weights_2};

static struct reference_group three_ranks(int n_nodes)
{
    return (struct reference_group){.n_ranks = 3,
                                    .n_nodes = n_nodes,
                                    .ranks_per_node = 3 / n_nodes,
                                    .topk = 2,
                                    .n_experts = 6,
                                    .n_local = 2,
                                    .n_tokens = three_tokens,
                                    .experts = three_experts,
                                    .weights = three_weights};
}

static void assert_rows(const struct reference_layout *layout, const struct reference_row *rows, int n)
{
    assert_int_equal(layout->n_rows, n);
    for (int i = 0; i < n; i++) {
        assert_int_equal(layout->rows[i].rank, rows[i].rank);
        assert_int_equal(layout->rows[i].token, rows[i].token);
        assert_int_equal(layout->rows[i].k, rows[i].k);
    }
}

TEST(test_rank_layout)
{
    static const struct {
        struct reference_row rows[3];
        int n;
        int32_t per_expert[2];
        int64_t from_rank[4];
        int64_t n_send, n_wire, n_net; /* n_net with a node for each rank */
    } expected[3] = {
        {{{0, 0, -1}, {1, 0, -1}, {2, 0, -1}}, 3, {2, 2}, {0, 1, 2, 3}, 4, 3, 3},
        {{{0, 1, -1}, {0, 2, -1}}, 2, {1, 1}, {0, 2, 2, 2}, 2, 2, 2},
        {{{0, 1, -1}, {1, 0, -1}, {2, 0, -1}}, 3, {1, 2}, {0, 1, 2, 3}, 2, 1, 1},
    };

    for (int n_nodes = 1; n_nodes <= 3; n_nodes += 2)
        for (int rank = 0; rank < 3; rank++) {
            struct reference_group group = three_ranks(n_nodes);
            struct reference_layout layout;

            reference_layout_init(&group, rank, false, 1, &layout);
            assert_rows(&layout, expected[rank].rows, expected[rank].n);
            assert_memory_equal(layout.recv_per_expert, expected[rank].per_expert, sizeof(expected[rank].per_expert));
            assert_memory_equal(layout.recv_from_rank, expected[rank].from_rank, sizeof(expected[rank].from_rank));
            assert_null(layout.expert_start);
            assert_int_equal(layout.n_send, expected[rank].n_send);
            assert_int_equal(layout.n_wire, expected[rank].n_wire);
            assert_int_equal(layout.n_net, n_nodes == 1 ? 0 : expected[rank].n_net);
            reference_layout_done(&layout);
        }
}

/* The counts are rounded up, the rows are not. */
TEST(test_rank_layout_aligned)
{
    struct reference_group group = three_ranks(1);
    struct reference_layout layout;

    reference_layout_init(&group, 2, false, 4, &layout);
    assert_int_equal(layout.n_rows, 3);
    assert_int_equal(layout.recv_per_expert[0], 4);
    assert_int_equal(layout.recv_per_expert[1], 4);
    reference_layout_done(&layout);
}

TEST(test_expanded_layout)
{
    static const struct reference_row plain_0[] = {{0, 0, 0}, {1, 0, 1}, {0, 0, 1}, {2, 0, 1}};
    static const struct reference_row aligned_2[] = {{1, 0, 0}, {-1, -1, -1}, {-1, -1, -1},
                                                     {0, 1, 1}, {2, 0, 0},    {-1, -1, -1}};
    static const int64_t start_0[] = {0, 2, 4}, start_2[] = {0, 3, 6};
    static const int32_t count_0[] = {2, 2}, count_2[] = {3, 3};
    struct reference_group group = three_ranks(1);
    struct reference_layout layout;

    reference_layout_init(&group, 0, true, 1, &layout);
    assert_rows(&layout, plain_0, COUNT(plain_0));
    assert_memory_equal(layout.expert_start, start_0, sizeof(start_0));
    assert_memory_equal(layout.recv_per_expert, count_0, sizeof(count_0));
    assert_null(layout.recv_from_rank);
    assert_int_equal(layout.n_send, 5);
    assert_int_equal(layout.n_wire, 3);
    reference_layout_done(&layout);

    reference_layout_init(&group, 2, true, 3, &layout);
    assert_rows(&layout, aligned_2, COUNT(aligned_2));
    assert_memory_equal(layout.expert_start, start_2, sizeof(start_2));
    assert_memory_equal(layout.recv_per_expert, count_2, sizeof(count_2));
    assert_true(reference_row_weight(&group, &layout.rows[0]) == 0.375f);
    assert_true(reference_row_weight(&group, &layout.rows[1]) == 0);
    assert_true(reference_row_weight(&group, &layout.rows[3]) == 0.125f);
    assert_true(reference_row_weight(&group, &layout.rows[4]) == 2.0f);
    reference_layout_done(&layout);
}

TEST(test_selections)
{
    static const int32_t experts_0[3][2] = {{0, 1}, {-1, 0}, {-1, 1}}, experts_1[2][2] = {{0, -1}, {-1, 1}};
    static const float weights_0[3][2] = {{0.5f, 0.25f}, {0, 0.625f}, {0, 3.0f}},
                       weights_1[2][2] = {{0.75f, 0}, {0, 1}};
    struct reference_group group = three_ranks(1);
    struct reference_layout layout;
    int32_t experts[2];
    float weights[2];

    reference_layout_init(&group, 0, false, 1, &layout);
    for (int i = 0; i < 3; i++) {
        reference_row_selections(&group, layout.rank, &layout.rows[i], experts, weights);
        assert_memory_equal(experts, experts_0[i], sizeof(experts));
        assert_memory_equal(weights, weights_0[i], sizeof(weights));
    }
    reference_layout_done(&layout);
    reference_layout_init(&group, 1, false, 1, &layout);
    for (int i = 0; i < 2; i++) {
        reference_row_selections(&group, layout.rank, &layout.rows[i], experts, weights);
        assert_memory_equal(experts, experts_1[i], sizeof(experts));
        assert_memory_equal(weights, weights_1[i], sizeof(weights)); /* the hole's weight of 9 does not travel */
    }
    reference_layout_done(&layout);
}

/* Four ranks of one expert on two nodes; tokens 0: ranks 0 1 2, 1: rank 3, 2: nobody. */
TEST(test_counts)
{
    static const int32_t per_rank[] = {1, 1, 1, 1}, per_node[] = {1, 2};
    static const uint8_t in_rank[] = {1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0};
    static int n_tokens[] = {3, 0, 0, 0};
    static int32_t experts_0[] = {2, 0, 1, -1, 3, -1, -1, -1, -1};
    static int32_t *experts[] = {experts_0, NULL, NULL, NULL};
    struct reference_group group = {.n_ranks = 4,
                                    .n_nodes = 2,
                                    .ranks_per_node = 2,
                                    .topk = 3,
                                    .n_experts = 4,
                                    .n_local = 1,
                                    .n_tokens = n_tokens,
                                    .experts = experts};
    struct reference_counts counts;

    reference_counts_init(&group, 0, &counts);
    assert_memory_equal(counts.tokens_per_rank, per_rank, sizeof(per_rank));
    assert_memory_equal(counts.tokens_per_node, per_node, sizeof(per_node));
    assert_memory_equal(counts.tokens_per_expert, per_rank, sizeof(per_rank));
    assert_memory_equal(counts.token_in_rank, in_rank, sizeof(in_rank));
    reference_counts_done(&counts);
}

/* --- sums --- */

#define HIDDEN 128
#define BIG 16777216.0f /* 2^24: adding 1 changes nothing */

/* One token of `rank` that selects these experts in this order; 4 ranks of `n_local` experts. */
struct example {
    int n_nodes, rank, n_local;
    int topk;
    int32_t experts[4];
    float values[8];  /* replies of ranks or experts */
    float weights[4]; /* low latency */
    int n_biases;
    float biases[2];
    uint16_t expected;
    bool expanded, bf16_partials, no_partial_reduce;
};

/* What each rank replies, or for each selection its expert: rows of one value. */
static void reply_value(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct example *example = context;

    (void)source;
    (void)token;
    for (int i = 0; i < HIDDEN; i++)
        ret_row[i] = format_to_bf16(example->values[k < 0 ? rank : example->experts[k]]);
}

static uint16_t combine(const struct example *example, bool low_latency)
{
    int n_tokens[] = {1, 1, 1, 1};
    int32_t selected[4];
    int32_t *experts[] = {selected, selected, selected, selected};
    float chosen[4];
    float *weights[] = {chosen, chosen, chosen, chosen};
    struct reference_group group = {.n_ranks = 4,
                                    .n_nodes = example->n_nodes,
                                    .ranks_per_node = 4 / example->n_nodes,
                                    .topk = example->topk,
                                    .n_experts = 4 * example->n_local,
                                    .n_local = example->n_local,
                                    .n_tokens = n_tokens,
                                    .experts = experts,
                                    .weights = weights};
    struct reference_combine rule = {.hidden = HIDDEN,
                                     .expanded = example->expanded,
                                     .bf16_partials = example->bf16_partials,
                                     .no_partial_reduce = example->no_partial_reduce,
                                     .reply = reply_value,
                                     .context = (void *)(uintptr_t)example};
    static struct reference_scratch scratch;
    uint16_t row[HIDDEN], bias_row[2][HIDDEN];
    const uint16_t *bias[2] = {NULL, NULL};

    memcpy(selected, example->experts, sizeof(selected));
    memcpy(chosen, example->weights, sizeof(chosen));
    for (int which = 0; which < example->n_biases; which++) {
        for (int i = 0; i < HIDDEN; i++)
            bias_row[which][i] = format_to_bf16(example->biases[which]);
        bias[which] = bias_row[which];
    }
    memset(row, 0xee, sizeof(row));
    if (low_latency)
        reference_ll_combine_row(&group, &rule, example->rank, 0, &scratch, row);
    else
        reference_combine_row(&group, &rule, example->rank, 0, bias, &scratch, row);
    for (int i = 1; i < HIDDEN; i++)
        assert_int_equal(row[i], row[0]);
    return row[0];
}

TEST(test_combine)
{
    static const struct example examples[] = {
        /* 1 + 2 + 3 + 4 */
        {1, 0, 1, .topk = 4, .experts = {3, 1, 0, 2}, .values = {1, 2, 3, 4}, .expected = 0x4120},
        /* A rank with two of the experts answers once. */
        {1, 0, 2, .topk = 3, .experts = {0, 1, 6}, .values = {1, 100, 100, 4}, .expected = 0x40a0},
        /* Nobody: zeros. The first term as it is: minus zero stays. */
        {1, 0, 1, .topk = 2, .experts = {-1, -1}, .expected = 0},
        {1, 0, 1, .topk = 2, .experts = {-1, 1}, .values = {0, -0.0f}, .expected = 0x8000},
        {2, 3, 1, .topk = 2, .experts = {-1, 1}, .values = {0, -0.0f}, .expected = 0x8000},
        {1, 0, 1, .topk = 2, .experts = {0, 1}, .values = {-0.0f, -0.0f}, .expected = 0x8000},
        /* Rank order, not the order of selection: (2^24 + 1) - 2^24 = 0, but (2^24 - 2^24) + 1 = 1. */
        {1, 0, 1, .topk = 3, .experts = {0, 2, 1}, .values = {BIG, 1, -BIG}, .expected = 0},
        {1, 0, 1, .topk = 3, .experts = {0, 1, 2}, .values = {BIG, -BIG, 1}, .expected = 0x3f80},
        /* fp32 sums: 1 + 2^-8 + 2^-8 = 1 + 2^-7; rounding to bf16 on the way would lose both. */
        {1, 0, 1, .topk = 3, .experts = {0, 1, 2}, .values = {1, 1 / 256.0f, 1 / 256.0f}, .expected = 0x3f81},
        /* Rounded once to nearest even: 1 + 2^-8 is halfway to 1 + 2^-7, 1 + 3 * 2^-8 halfway to 1 + 2^-6. */
        {1, 0, 1, .topk = 2, .experts = {0, 1}, .values = {1, 1 / 256.0f}, .expected = 0x3f80},
        {1, 0, 1, .topk = 2, .experts = {0, 1}, .values = {1, 3 / 256.0f}, .expected = 0x3f82},
        /* Biases come first: (1 + 2^24) - 2^24 = 0, but after the rows it would be 1. */
        {1, 0, 1, .topk = 1, .experts = {3}, .values = {0, 0, 0, -BIG}, .n_biases = 2, .biases = {1, BIG},
         .expected = 0},
        {1, 0, 1, .topk = 1, .experts = {-1}, .n_biases = 2, .biases = {2, 3}, .expected = 0x40a0},
        {1, 0, 1, .topk = 1, .experts = {0}, .values = {1}, .n_biases = 1, .biases = {2}, .expected = 0x4040},
        /* Nodes {0 1} {2 3}, rows -2^24, 0, 2^24, 1. On node 0 the partial sum 2^24 + 1 loses the 1 ... */
        {2, 0, 1, .topk = 4, .experts = {0, 1, 2, 3}, .values = {-BIG, 0, BIG, 1}, .expected = 0},
        {2, 1, 1, .topk = 4, .experts = {0, 1, 2, 3}, .values = {-BIG, 0, BIG, 1}, .expected = 0},
        /* ... on node 1 the rows are added one by one to -2^24, as on a single node. */
        {2, 2, 1, .topk = 4, .experts = {0, 1, 2, 3}, .values = {-BIG, 0, BIG, 1}, .expected = 0x3f80},
        {1, 0, 1, .topk = 4, .experts = {0, 1, 2, 3}, .values = {-BIG, 0, BIG, 1}, .expected = 0x3f80},
        /* Nodes in ascending order, also before the own one: node 0's 2^24 + 1 first, then -2^24. */
        {2, 3, 1, .topk = 3, .experts = {2, 1, 0}, .values = {BIG, 1, -BIG}, .expected = 0},
        /* bf16 partials: 1 + 2^-8 becomes 1 on the way; 2^-8 + 1 is then rounded to 1. */
        {2, 2, 1, .topk = 2, .experts = {0, 1}, .values = {1, 1 / 256.0f}, .n_biases = 1, .biases = {1 / 256.0f},
         .expected = 0x3f81},
        {2, 2, 1, .bf16_partials = true, .topk = 2, .experts = {0, 1}, .values = {1, 1 / 256.0f}, .n_biases = 1,
         .biases = {1 / 256.0f}, .expected = 0x3f80},
        /* The own node's rows are no partial sum: not rounded. */
        {2, 0, 1, .bf16_partials = true, .topk = 2, .experts = {0, 1}, .values = {1, 1 / 256.0f}, .n_biases = 1,
         .biases = {1 / 256.0f}, .expected = 0x3f81},
        /* Expanded: each expert answers, in the order of the experts. */
        {1, 0, 2, .expanded = true, .topk = 3, .experts = {2, 0, 1}, .values = {1, 2, 4}, .expected = 0x40e0},
        {1, 0, 2, .expanded = true, .topk = 3, .experts = {2, 0, 1}, .values = {BIG, 1, -BIG}, .expected = 0},
        {2, 0, 2, .expanded = true, .topk = 3, .experts = {4, 5, 0}, .values = {-BIG, 0, 0, 0, BIG, 1}, .expected = 0},
        /* An expert that is selected twice answers twice. In rank layout its rank answers once. */
        {1, 0, 2, .expanded = true, .topk = 3, .experts = {2, 0, 2}, .values = {1, 0, 4}, .expected = 0x4110},
        {1, 0, 2, .topk = 3, .experts = {2, 0, 2}, .values = {1, 4}, .expected = 0x40a0},
    };

    for (int i = 0; i < COUNT(examples); i++) {
        uint16_t got = combine(&examples[i], false);

        if (got != examples[i].expected)
            fail_msg("example %d: expected 0x%04x, got 0x%04x", i, examples[i].expected, got);
    }
}

TEST(test_ll_combine)
{
    static const struct example examples[] = {
        /* 0.5 * 2 + 0.25 * 8; the hole's weight does not matter. */
        {1, 0, 1, .topk = 3, .experts = {1, -1, 3}, .values = {0, 2, 0, 8}, .weights = {0.5f, 9, 0.25f},
         .expected = 0x4040},
        {1, 0, 1, .topk = 1, .experts = {-1}, .weights = {1}, .expected = 0},
        /* In the order of selection: (2^24 + 1) - 2^24. */
        {1, 0, 2, .topk = 3, .experts = {6, 3, 0}, .values = {-BIG, 0, 0, 1, 0, 0, BIG}, .weights = {1, 1, 1},
         .expected = 0},
        {1, 0, 2, .topk = 3, .experts = {0, 6, 3}, .values = {-BIG, 0, 0, 1, 0, 0, BIG}, .weights = {1, 1, 1},
         .expected = 0x3f80},
        /* Fused: -129/128 + (1 + 2^-23) * 129/128 = 129 * 2^-30; a product rounded on its own would leave 2^-23. */
        {1, 0, 1, .topk = 2, .experts = {0, 1}, .values = {-129 / 128.0f, 129 / 128.0f},
         .weights = {1, 1 + 1 / 8388608.0f}, .expected = 0x3401},
        /* Two of one rank: 1 + 2^-8 becomes 1 on the way, and again with the third; added up once it is 1 + 2^-7. */
        {1, 0, 2, .topk = 3, .experts = {0, 1, 2}, .values = {1, 1 / 256.0f, 1 / 256.0f}, .weights = {1, 1, 1},
         .expected = 0x3f80},
        {1, 0, 2, .no_partial_reduce = true, .topk = 3, .experts = {0, 1, 2}, .values = {1, 1 / 256.0f, 1 / 256.0f},
         .weights = {1, 1, 1}, .expected = 0x3f81},
        /* The partial sum is where its first choice is: (2^24 + 1) - 2^24, but 2^24 - 2^24 + 1 choice by choice. */
        {1, 0, 2, .topk = 3, .experts = {0, 2, 1}, .values = {BIG, 1, -BIG}, .weights = {1, 1, 1}, .expected = 0},
        {1, 0, 2, .topk = 3, .experts = {2, 0, 1}, .values = {BIG, 1, -BIG}, .weights = {1, 1, 1}, .expected = 0},
        /* ... and not where its last one is, or its rank: (2^24 + 1) - 2^24, (1 + 2^24) - 2^24. */
        {1, 0, 2, .topk = 4, .experts = {0, 4, 2, 1}, .values = {BIG, 0, -BIG, 0, 1}, .weights = {1, 1, 1, 1},
         .expected = 0},
        {1, 0, 2, .topk = 4, .experts = {4, 0, 1, 2}, .values = {BIG, 0, -BIG, 0, 1}, .weights = {1, 1, 1, 1},
         .expected = 0},
        {1, 0, 2, .no_partial_reduce = true, .topk = 3, .experts = {0, 2, 1}, .values = {BIG, 1, -BIG},
         .weights = {1, 1, 1}, .expected = 0x3f80},
        /* In ascending k within the rank, too, with the weights: 2 * 2^24 - 2^25 + 1. */
        {1, 0, 4, .topk = 3, .experts = {3, 0, 1}, .values = {-2 * BIG, 1, 0, BIG}, .weights = {2, 1, 1},
         .expected = 0x3f80},
        {1, 0, 4, .topk = 3, .experts = {3, 1, 0}, .values = {-2 * BIG, 1, 0, BIG}, .weights = {2, 1, 1},
         .expected = 0},
        /* A row with the weight 0 makes a group of two, whose sum is rounded: 1.5 * (1 + 2^-7) is halfway. */
        {1, 0, 2, .topk = 3, .experts = {0, -1, 2}, .values = {129 / 128.0f, 7, -1 / 256.0f}, .weights = {1.5f, 0, 1},
         .expected = 0x3fc1},
        {1, 0, 2, .topk = 3, .experts = {0, 1, 2}, .values = {129 / 128.0f, 7, -1 / 256.0f}, .weights = {1.5f, 0, 1},
         .expected = 0x3fc2},
    };

    for (int i = 0; i < COUNT(examples); i++) {
        uint16_t got = combine(&examples[i], true);

        if (got != examples[i].expected)
            fail_msg("example %d: expected 0x%04x, got 0x%04x", i, examples[i].expected, got);
    }
}

/* --- quantisation --- */

TEST(test_quantize)
{
    /* factor 1 by the first value. 17 and 19 lie halfway, between 16, 18 and 20; 2^-10 halfway to the smallest code. */
    static const struct {
        float value;
        uint8_t code;
    } cases[] = {{448, 0x7e},        {1, 0x38},           {-1, 0xb8},          {17, 0x58},
                 {19, 0x5a},         {18, 0x59},          {-448, 0xfe},        {0.015625f, 0x08},
                 {1 / 512.0f, 0x01}, {1 / 1024.0f, 0x00}, {3 / 1024.0f, 0x02}, {-1 / 1024.0f, 0x80},
                 {0, 0x00},          {-0.0f, 0x80},       {7 / 512.0f, 0x07},  {15 / 1024.0f, 0x08}};
    uint16_t row[HIDDEN] = {0}, again[HIDDEN];
    uint8_t codes[HIDDEN];
    float factor;

    for (int i = 0; i < COUNT(cases); i++)
        row[i] = format_to_bf16(cases[i].value);
    reference_quantize(row, HIDDEN, false, codes, &factor);
    assert_true(factor == 1);
    for (int i = 0; i < COUNT(cases); i++)
        assert_int_equal(codes[i], cases[i].code);
    reference_quantize(row, HIDDEN, true, codes, &factor);
    assert_true(factor == 1); /* a power of two already */

    row[0] = format_to_bf16(450); /* 450 / 448 is rounded up to 2; 225 is nearest to 224 */
    reference_quantize(row, HIDDEN, true, codes, &factor);
    assert_true(factor == 2);
    assert_int_equal(codes[0], 0x76);
    assert_int_equal(codes[1], 0x30);
    reference_dequantize(codes, &factor, HIDDEN, again);
    assert_int_equal(again[0], format_to_bf16(448));
    assert_int_equal(again[1], format_to_bf16(1));
    reference_quantize(row, HIDDEN, false, codes, &factor);
    assert_true(factor == 450.0f / 448.0f);
    assert_int_equal(codes[0], 0x7e);

    memset(row, 0, sizeof(row));
    reference_quantize(row, HIDDEN, false, codes, &factor);
    assert_true(factor == 1e-4f / 448.0f);
    for (int i = 0; i < HIDDEN; i++)
        assert_int_equal(codes[i], 0);
    /* 1e-4 / 448 = 2.23e-7 lies between 2^-23 and 2^-22 */
    reference_quantize(row, HIDDEN, true, codes, &factor);
    assert_true(factor == 1 / 4194304.0f);
}

TEST(test_pack_ue8m0)
{
    static const float factors[] = {1, 2, 0.5f, 4, 1 / 4194304.0f, 1, 1, 1};
    int32_t packed[2];

    reference_pack_ue8m0(factors, 8, packed);
    assert_true((uint32_t)packed[0] == 0x817e807fu);
    assert_true((uint32_t)packed[1] == 0x7f7f7f69u);
}

/* --- formats --- */

TEST(test_bf16)
{
    static const struct {
        uint32_t single;
        uint16_t bf16;
    } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82}, {0x3f817fff, 0x3f81},
        {0xbf818000, 0xbf82}, {0x7f7fffff, 0x7f80}, {0x7f7f7fff, 0x7f7f}, {0x00008000, 0x0000}, {0x00018000, 0x0002},
        {0x80000000, 0x8000}, {0x7f800000, 0x7f80}, {0x7f800001, 0x7fc0}, {0xffc12345, 0xffc1},
    };

    for (int i = 0; i < COUNT(cases); i++)
        assert_int_equal(format_to_bf16(format_float(cases[i].single)), cases[i].bf16);
    for (uint32_t bits = 0; bits < 65536; bits++)
        if ((bits & 0x7fff) <= 0x7f80)
            assert_int_equal(format_to_bf16(format_from_bf16((uint16_t)bits)), bits);
}

/* Every bf16 value against a search of all codes for the nearest one, and of two equally near ones the even one. */
TEST(test_e4m3)
{
    assert_true(format_from_e4m3(0x7e) == 448);
    assert_true(format_from_e4m3(0x01) == 1 / 512.0f);
    assert_true(format_from_e4m3(0x08) == 1 / 64.0f);
    assert_true(format_from_e4m3(0xb8) == -1);
    assert_int_equal(format_to_e4m3(format_float(0x7fc00000)), 0x7f);
    assert_int_equal(format_to_e4m3(format_float(0xff800000)), 0xfe);
    for (uint32_t bits = 0; bits <= 0x7f80; bits++) {
        double value = format_from_bf16((uint16_t)bits), best_distance = 1e300;
        int best = 0;

        for (int code = 0; code < 0x7f; code++) {
            double distance = fabs(value - format_from_e4m3((uint8_t)code));

            if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
                best_distance = distance;
                best = code;
            }
        }
        if (isinf(value))
            best = 0x7e;
        assert_int_equal(format_to_e4m3((float)value), best);
        assert_int_equal(format_to_e4m3((float)-value), best | 0x80);
    }
}

TEST(test_power_of_two)
{
    assert_true(format_power_of_two(1.0f) == 1);
    assert_true(format_power_of_two(1.0000001f) == 2);
    assert_true(format_power_of_two(0.75f) == 1);
    assert_true(format_power_of_two(0.5f) == 0.5f);
    assert_true(format_from_ue8m0(127) == 1);
    assert_true(format_from_ue8m0(1) == 0x1p-126f);
    assert_true(isnan(format_from_ue8m0(255)));
}

/* --- data --- */

TEST(test_data)
{
    struct data data = {.kind = DATA_FP8_RANDOM, .seed = 3, .hidden = 512, .scale_type = EP_F32};
    uint8_t codes[512], others[512];
    bool seen[256] = {false};
    uint16_t row[512], other[512];
    float factors[4];
    int32_t packed;

    for (int token = 0; token < 100; token++) {
        data_row(&data, 1, token, codes);
        for (int i = 0; i < 512; i++)
            seen[codes[i]] = true;
        data_row(&data, 1, token + 1, others);
        assert_memory_not_equal(codes, others, sizeof(codes));
        data_row(&data, 2, token, others);
        assert_memory_not_equal(codes, others, sizeof(codes));
    }
    for (int code = 0; code < 256; code++)
        assert_int_equal(seen[code], (code & 0x7f) != 0x7f);

    /* The expert's view: code times factor. */
    data_row(&data, 1, 5, codes);
    data_scales(&data, 1, 5, factors);
    data_bf16_row(&data, 1, 5, row);
    for (int i = 0; i < 512; i++)
        assert_int_equal(row[i], format_to_bf16(format_from_e4m3(codes[i]) * factors[i / 128]));
    data.scale_type = EP_UE8M0;
    assert_int_equal(data_scale_bytes(&data), 4);
    data_scales(&data, 1, 5, &packed);
    data_bf16_row(&data, 1, 5, row);
    for (int i = 0; i < 512; i++) {
        uint8_t scale = (uint8_t)((uint32_t)packed >> 8 * (i / 128));

        assert_int_equal(row[i], format_to_bf16(format_from_e4m3(codes[i]) * format_from_ue8m0(scale)));
    }

    data = (struct data){.kind = DATA_BF16_RANDOM, .seed = 3, .hidden = 512};
    assert_int_equal(data_scale_bytes(&data), 0);
    data_row(&data, 0, 0, row);
    for (int i = 0; i < 512; i++)
        assert_true(fabsf(format_from_bf16(row[i])) >= 1 / 16.0f && fabsf(format_from_bf16(row[i])) < 16);
    data_bias(&data, 0, 0, 0, other);
    for (int i = 0; i < 512; i++)
        assert_true(fabsf(format_from_bf16(other[i])) >= 1 / 1024.0f && fabsf(format_from_bf16(other[i])) < 0.25f);
    data_reply(&data, 0, 0, 0, row);
    data_reply(&data, 1, 0, 0, other);
    assert_memory_not_equal(row, other, sizeof(row));

    data.kind = DATA_BF16_CONSTANT;
    data_row(&data, 4, 9, row);
    for (int i = 0; i < 512; i++)
        assert_int_equal(row[i], 0x40a0); /* rank + 1 */
}

TEST(test_group_from_routing)
{
    struct routing_spec spec = {
        .kind = ROUTING_EMPTY, .seed = 5, .n_ranks = 4, .n_tokens = 6, .topk = 2, .n_experts = 8};
    struct routing *routing;
    struct reference_group group;
    struct check_error error;
    int32_t experts[2];
    float weights[2];

    assert_true(routing_new(&spec, &routing, &error));
    assert_false(reference_group_init(routing, 3, &group, &error));
    assert_string_equal(error.text, "4 ranks do not divide among 3 nodes");
    assert_true(reference_group_init(routing, 2, &group, &error));
    assert_int_equal(group.ranks_per_node, 2);
    assert_int_equal(group.n_local, 2);
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(group.n_tokens[rank], routing_tokens(routing, rank));
        for (int token = 0; token < group.n_tokens[rank]; token++) {
            routing_token(routing, rank, token, experts, weights);
            assert_memory_equal(experts, group.experts[rank] + 2 * token, sizeof(experts));
            assert_memory_equal(weights, group.weights[rank] + 2 * token, sizeof(weights));
        }
    }
    reference_group_done(&group);
    routing_free(routing);
}
