/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_model.h - low latency on the CUDA backend alone, where ranks go missing. What arrives follows from the round and
 * the ranks that took part, so each rank knows it without asking anybody.
 *
 * The routing changes from round to round: the place of a choice then belongs to another rank, and what a rank writes
 * that the others have given up shows. On any number of ranks there are tokens with one row on a rank, and with several
 * that it adds up. Values are small integers and weights are powers of two, so that a sum tells which experts have
 * answered. All sums are exact in bf16, also those of one rank's rows, so they are the same with
 * EP_LL_NO_PARTIAL_REDUCE.
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
    int round;                        /* that is loaded */
    uint32_t sum;                     /* EP_LL_NO_PARTIAL_REDUCE or 0: flag of every combine */
    uint32_t flags;                   /* of the last call */
    void *x, *index, *weights, *recv, *count, *source, *range, *out;
    /* On the host. */
    unsigned char *copy; /* of rows */
    int64_t *host_index;
    float *host_weights;
    int32_t *host_source;
};

/* All ranks. `tokens`: of each rank; NULL: max_tokens for all. To be closed in each case. */
int model_open(const struct group *group, int max_tokens, int hidden, uint32_t ll_flags, const int *tokens,
               struct model *ret_model);
void model_close(struct model *model);

/* Inputs of the round; outputs hold poison. Complete when it returns. */
int model_load(struct model *model, int round);

/* Calls with the flags of lowlatency.h; the combine is given what the dispatch has received, as it lies there. */
ep_status model_dispatch(struct model *model, uint32_t flags);
ep_status model_combine(struct model *model, uint32_t flags);
/* The second half of the last call with EP_LL_RECV_HOOK. */
ep_status model_finish(struct model *model);

/*
 * Waits for the stream and looks at everything that the dispatch, or the combine, has written and must not have. Which
 * ranks took part and which did not, a bit for each; ranks that had nothing to send are in neither. Of a rank all rows
 * are here or none, whatever happened to it.
 */
int model_check_dispatch(struct model *model, uint64_t *ret_here, uint64_t *ret_missing);
int model_check_combine(struct model *model, uint64_t *ret_here, uint64_t *ret_missing);

/* Both, and exactly these ranks. */
int model_check(struct model *model, uint64_t senders, uint64_t experts);

/* A whole round of calls: load, dispatch, combine, check. */
int model_round(struct model *model, int round, uint32_t flags, uint64_t ranks);

#endif
