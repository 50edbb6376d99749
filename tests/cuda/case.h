/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case.h - one routing and its data on both backends: the results of the CUDA backend must be those of the host
 * backend, bit for bit.
 */
#ifndef EP_TESTS_CUDA_CASE_H
#define EP_TESTS_CUDA_CASE_H

#include "group.h"

/* Received buffers, a bit for each. */
enum { AT_X = 1, AT_SCALES = 2, AT_INDEX = 4, AT_WEIGHTS = 8, AT_ALL = 15 };

/* Ranks with ordinary memory where the others have symmetric memory. */
enum ordinary_on { NO_RANK, FIRST_RANK, LAST_RANK, ALL_BUT_ONE, N_ORDINARY_ON };

struct shape {
    int n_tokens, hidden, topk, n_experts, alignment, spare_rows;
    int dtype, scale_type, idx_type, n_bias;
    bool expanded, zero_padding, fixed_capacity, choice, async, after, strided, skewed, holes, repeated;
    bool quantized;     /* by the dispatch: EP_DISPATCH_QUANTIZE */
    bool own_stream;    /* the communicator's stream, not the caller's */
    unsigned symmetric; /* received buffers in memory of ep_alloc(): AT_... */
    enum ordinary_on ordinary_on;
    uint64_t seed; /* of this rank's data; the fields above, except n_tokens, are the same on all ranks */
};

/* By all ranks. DIFFERS or FAILED as in call.h, with a message. */
int case_run(const struct group *group, const struct shape *shape);

/* bf16 values: mostly ordinary ones, some signed zeros, infinities, NaNs and tiny values. */
void fill_bf16(uint16_t *values, size_t n, uint64_t *random);

/*
 * A routing, written as `idx_type`: the experts of a token differ, unless they may be `repeated`. `skewed`: almost all
 * tokens go to the experts of rank 0, so that others receive few rows or none. `holes`: some entries are -1.
 */
struct routing {
    int n_tokens, topk, n_experts, nranks, idx_type;
    bool skewed, holes, repeated;
};
void fill_routing(const struct routing *routing, uint64_t *random, void *ret_index);

#endif
