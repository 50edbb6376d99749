/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case.h - one routing and its data on both backends: the host backend says what the CUDA backend must give, bit for
 * bit.
 */
#ifndef EP_TEST_CUDA_CASE_H
#define EP_TEST_CUDA_CASE_H

#include <epkit/epkit.h>

struct shape {
    int n_tokens, hidden, topk, n_experts, alignment, spare_rows;
    int dtype, scale_type, idx_type, n_bias;
    bool expanded, zero_padding, symmetric, worst, choice, async, after, strided, skewed, holes;
    uint64_t seed; /* of this rank's data; the fields above are the same on all ranks but n_tokens */
};

/* Both communicators are of the same group. Returns 0, or 1 after saying on stderr what differs. */
int case_run(ep_comm *host, ep_comm *cuda, const struct shape *shape);

#endif
