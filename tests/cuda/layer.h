/* SPDX-License-Identifier: Apache-2.0 */
/* layer.h - a layer with the shape of DeepSeek-V3 on the CUDA backend, for programs that measure it. */
#ifndef EP_TESTS_CUDA_LAYER_H
#define EP_TESTS_CUDA_LAYER_H

#include "case.h"

/* 7168 bf16, top-8 of 256 experts, or of as many as the ranks can share equally. */
struct layer {
    ep_plan *plan;
    int64_t n_recv;
    bool symmetric; /* recv is memory of ep_alloc() */
    void *x, *recv, *out;
};

/* By all ranks. */
int layer_open(struct layer *layer, const struct group *group, int n_tokens, bool symmetric, uint64_t seed);
int layer_close(const struct layer *layer, const struct group *group);

/* Queued in the stream of the group: a dispatch, and a combine of what it has received. */
int layer_dispatch(const struct layer *layer, const struct group *group);
int layer_combine(const struct layer *layer, const struct group *group);

#endif
