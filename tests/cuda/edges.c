/* SPDX-License-Identifier: Apache-2.0 */
/* Edge cases of dispatch and combine. The number of experts is rounded up to a multiple of the ranks. */
#include "shapes.h"

/* Tokens, their elements, choices, experts and the type of indices; of fp8 also the type of scales. */
#define BF16(tokens, elements, choices, experts, index)                                                                \
    .n_tokens = (tokens), .hidden = (elements), .topk = (choices), .n_experts = (experts), .dtype = EP_BF16,           \
    .idx_type = EP_##index
#define FP8(tokens, elements, choices, experts, index, scale)                                                          \
    .n_tokens = (tokens), .hidden = (elements), .topk = (choices), .n_experts = (experts), .dtype = EP_F8E4M3,         \
    .idx_type = EP_##index, .scale_type = EP_##scale
/* Quantised by the dispatch. */
#define FP4(tokens, elements, choices, experts, index)                                                                 \
    .n_tokens = (tokens), .hidden = (elements), .topk = (choices), .n_experts = (experts), .dtype = EP_F4E2M1,         \
    .idx_type = EP_##index, .scale_type = EP_F8E4M3, .quantized = true

static const struct shape edges[] = {
    {BF16(128, 2048, 8, 96, I64), .symmetric = AT_ALL, .choice = true},
    {FP8(128, 2048, 8, 96, I32, F32), .choice = true, .n_bias = 2},
    {FP8(100, 2048, 8, 96, I64, UE8M0), .symmetric = AT_ALL, .strided = true, .n_bias = 1},
    {BF16(0, 512, 2, 24, I32), .choice = true},
    {BF16(1, 8, 1, 12, I32), .symmetric = AT_ALL, .choice = true},
    {BF16(77, 8192, 8, 96, I64), .choice = true, .symmetric = AT_ALL, .n_bias = 2},
    {BF16(33, 16384, 32, 384, I64), .choice = true, .symmetric = AT_ALL, .n_bias = 1},
    {BF16(300, 1032, 6, 96, I32), .choice = true, .skewed = true, .holes = true},
    {BF16(300, 1024, 6, 96, I64), .alignment = 16, .choice = true, .expanded = true, .zero_padding = true,
     .symmetric = AT_ALL, .holes = true},
    {FP8(300, 1024, 6, 96, I64, F32), .alignment = 8, .choice = true, .expanded = true, .n_bias = 2},
    {BF16(300, 1024, 6, 96, I64), .choice = true, .fixed_capacity = true, .spare_rows = 9, .symmetric = AT_ALL,
     .async = true},
    {BF16(64, 65536, 4, 48, I64), .symmetric = AT_ALL},
    {BF16(700, 7168, 8, 2016, I64), .symmetric = AT_ALL, .choice = true},
    {BF16(50, 256, 32, 2048, I32), .choice = true, .expanded = true, .alignment = 128},
    {FP4(100, 64, 4, 96, I64), .choice = true, .n_bias = 1},
    {FP4(130, 2112, 8, 96, I32), .expanded = true, .alignment = 8, .zero_padding = true, .symmetric = AT_ALL},
    {FP8(100, 1152, 8, 96, I64, UE8M0_32), .quantized = true, .choice = true, .fixed_capacity = true, .spare_rows = 5},
    {FP8(60, 640, 6, 96, I32, F32), .quantized = true, .strided = true, .holes = true},
    /* All on one rank: see shape_edge(). */
    {BF16(EDGE_LONE, 1024, 8, 256, I64), .symmetric = AT_ALL, .choice = true, .n_bias = 1},
    /* Ordinary memory, enough that the kernels copy; not reduced by --small. */
    {BF16(EDGE_KEPT, 512, 4, 48, I64), .choice = true, .n_bias = 1},
};

/*
 * Larger amounts of ordinary memory: rows are copied while others move, part by part, or after all of them. Some ranks
 * or some buffers use symmetric memory. Smaller ones would test nothing.
 */
static const struct shape large_edges[] = {
    {BF16(600, 1024, 4, 96, I64), .choice = true, .symmetric = AT_ALL, .ordinary_on = FIRST_RANK, .n_bias = 1},
    {FP8(600, 2048, 6, 96, I64, F32), .choice = true, .symmetric = AT_ALL, .ordinary_on = LAST_RANK},
    {BF16(600, 1024, 5, 96, I32), .choice = true, .symmetric = AT_ALL, .ordinary_on = ALL_BUT_ONE, .n_bias = 2},
    {FP8(600, 2048, 8, 96, I64, F32), .choice = true, .symmetric = AT_SCALES | AT_INDEX | AT_WEIGHTS},
    {FP8(600, 2048, 8, 96, I64, F32), .choice = true, .symmetric = AT_X},
    {FP8(600, 2048, 3, 96, I64, F32), .choice = true, .symmetric = AT_X | AT_SCALES | AT_INDEX,
     .ordinary_on = LAST_RANK, .n_bias = 1},
    {FP8(600, 2048, 3, 96, I64, F32), .choice = true, .symmetric = AT_INDEX},
    {BF16(600, 1024, 4, 96, I32), .choice = true, .symmetric = AT_WEIGHTS, .n_bias = 1},
    {BF16(600, 1024, 4, 96, I64), .choice = true, .symmetric = AT_X | AT_INDEX, .n_bias = 1},
    {BF16(600, 1024, 4, 96, I64), .choice = true, .symmetric = AT_WEIGHTS, .ordinary_on = FIRST_RANK},
    {BF16(1500, 7168, 8, 96, I64), .choice = true, .n_bias = 2},
    /* The metadata of a row is 12 bytes. */
    {FP8(4096, 1024, 3, 96, I32, F32), .choice = true},
    /* One token more than a part. */
    {BF16(257, 2048, 2, 96, I64), .choice = true},
    /* More than 64 blocks of 256 tokens: a part has several of them. */
    {BF16(20000, 256, 4, 96, I32), .choice = true},
    /* All on one rank: see shape_edge(). */
    {BF16(EDGE_LONE, 1024, 8, 256, I64), .choice = true},
    {BF16(700, 16384, 8, 96, I64), .choice = true, .n_bias = 1},
    {FP4(2000, 7168, 8, 96, I64), .choice = true, .async = true, .after = true},
    {BF16(1500, 1024, 6, 96, I64), .choice = true, .fixed_capacity = true, .spare_rows = 300, .async = true},
    {BF16(1500, 1024, 6, 96, I32), .choice = true, .alignment = 16, .expanded = true, .zero_padding = true,
     .fixed_capacity = true, .spare_rows = 200},
    {FP8(1500, 1024, 6, 96, I64, F32), .choice = true, .alignment = 8, .expanded = true},
    /* Rows of 16 bytes. */
    {BF16(20000, 8, 4, 96, I64), .choice = true},
    /* Few rows for most ranks, many for the first. */
    {BF16(3000, 1024, 4, 96, I64), .choice = true, .skewed = true, .holes = true, .n_bias = 1},
    {FP8(2000, 512, 5, 96, I32, UE8M0), .choice = true, .strided = true, .async = true, .after = true},
};

#define N_EDGES ((int)(sizeof(edges) / sizeof(edges[0])))
#define N_LARGE ((int)(sizeof(large_edges) / sizeof(large_edges[0])))

int shapes_edges(bool small)
{
    return small ? N_EDGES : N_EDGES + N_LARGE;
}

const struct shape *shape_edge_of_all(int index)
{
    return index < N_EDGES ? &edges[index] : &large_edges[index - N_EDGES];
}
