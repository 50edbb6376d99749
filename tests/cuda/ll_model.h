/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_model.h - low latency on the CUDA backend alone, with missing ranks. The expected data follow from the round and
 * the participating ranks, so each rank computes them alone.
 *
 * The routing changes from round to round: the slot of a choice then belongs to another rank, and writes of a masked
 * rank show. On any number of ranks there are tokens with one row on a rank, and tokens with several that it adds up.
 * Values are small integers and weights are powers of two, so that a sum shows which experts are in it. All sums are
 * exact in bf16, also those of one rank's rows, so they are the same with EP_LL_NO_PARTIAL_REDUCE.
 */
#ifndef EP_TESTS_CUDA_LL_MODEL_H
#define EP_TESTS_CUDA_LL_MODEL_H

#include "group.h"

enum { MODEL_TOPK = 4, MODEL_LOCAL = 4 }; /* experts of a token, of a rank */

struct model {
    const struct group *group;
    ep_ll *ll;
    int max_tokens, hidden, n_tokens; /* n_tokens: this rank's, the same in each round */
    int tokens[MAX_RANKS];            /* of each rank */
    int round;                        /* the loaded one */
    uint32_t sum;                     /* EP_LL_NO_PARTIAL_REDUCE or 0: flag of every combine */
    uint32_t flags;                   /* of the last call */
    void *x, *index, *weights, *recv, *count, *source, *range, *out;
    int64_t *waited; /* [R] of the device: wait_cost_add of all calls; NULL: none */
    /* On the host. */
    unsigned char *copy; /* of rows */
    int64_t *host_index;
    float *host_weights;
    int32_t *host_source;
};

/* Collective. `tokens`: of each rank; NULL: max_tokens for all. To be closed in any case. */
int model_open(const struct group *group, int max_tokens, int hidden, uint32_t ll_flags, const int *tokens,
               struct model *ret_model);
void model_close(struct model *model);

/* Loads the inputs of the round and poisons the outputs. Complete when it returns. */
int model_load(struct model *model, int round);

/* Calls with the flags of lowlatency.h; the combine's input is the dispatch's output, unchanged. */
ep_status model_dispatch(struct model *model, uint32_t flags);
ep_status model_combine(struct model *model, uint32_t flags);
/* The second half of the last call with EP_LL_RECV_HOOK. */
ep_status model_finish(struct model *model);

/*
 * Waits for the stream and checks everything that the dispatch, or the combine, has written and must not write. Returns
 * bit masks of the ranks that took part and of those that did not; ranks with nothing to send are in neither. Of each
 * rank all rows must be here or none, whatever happened to it.
 */
int model_check_dispatch(struct model *model, uint64_t *ret_here, uint64_t *ret_missing);
int model_check_combine(struct model *model, uint64_t *ret_here, uint64_t *ret_missing);

/* Checks both, with exactly these ranks. */
int model_check(struct model *model, uint64_t senders, uint64_t experts);

/* A whole round of calls: load, dispatch, combine, check. */
int model_round(struct model *model, int round, uint32_t flags, uint64_t ranks);

#endif
