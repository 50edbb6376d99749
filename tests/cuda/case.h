/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case.h - one routing and its data on both backends: the host backend says what the CUDA backend must give, bit for
 * bit.
 */
#ifndef EP_TESTS_CUDA_CASE_H
#define EP_TESTS_CUDA_CASE_H

#include "group.h"

/* Received buffers, a bit for each. */
enum { AT_X = 1, AT_SCALES = 2, AT_INDEX = 4, AT_WEIGHTS = 8, AT_ALL = 15 };

/* Ranks whose memory is ordinary all the same. */
enum apart { NO_RANK, FIRST_RANK, LAST_RANK, ALL_BUT_ONE, N_APART };

struct shape {
    int n_tokens, hidden, topk, n_experts, alignment, spare_rows;
    int dtype, scale_type, idx_type, n_bias;
    bool expanded, zero_padding, worst, choice, async, after, strided, skewed, holes;
    bool own_stream;    /* that of the communicator, not the caller's */
    unsigned symmetric; /* received buffers in memory of ep_alloc(): AT_... */
    enum apart apart;
    uint64_t seed; /* of this rank's data; the fields above are the same on all ranks but n_tokens */
};

/* By all ranks. DIFFERS and FAILED as in call.h, after saying what is wrong. */
int case_run(const struct group *group, const struct shape *shape);

/* Values of bf16, mostly ordinary; signed zeros, infinities, not-a-numbers and tiny ones among them. */
void fill_bf16(uint16_t *values, size_t n, uint64_t *random);

/*
 * A routing, to be written as `idx_type`: all experts of a token differ. `skewed`: almost all to those of rank 0, so
 * that others receive few rows or none. `holes`: some entries are -1.
 */
struct routing {
    int n_tokens, topk, n_experts, nranks, idx_type;
    bool skewed, holes;
};
void fill_routing(const struct routing *routing, uint64_t *random, void *ret_index);

#endif
