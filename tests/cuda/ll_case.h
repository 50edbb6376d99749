/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_case.h - low latency on both backends. An exchange is a dispatch and the combine that answers it, with all
 * buffers, so that any number of them can be queued in any order before results are compared. The expected results are
 * those of the host backend, which makes the same calls one by one when the exchange is loaded.
 */
#ifndef EP_TESTS_CUDA_LL_CASE_H
#define EP_TESTS_CUDA_LL_CASE_H

#include "mirror.h"

enum ll_format { LL_BF16, LL_F32, LL_ROUNDED, LL_UE8M0, LL_FORMATS };

struct ll_round {
    int n_tokens; /* this rank's; all else but topk and the seed is the same on all ranks */
    int topk;     /* of the calls of this rank; 0: that of the ep_ll */
    enum ll_format format;
    int idx_type;
    bool sources;   /* recv_source and recv_range are wanted */
    bool symmetric; /* received rows in memory of ep_alloc() */
    bool echo;      /* the combine's input is the dispatch's output, unchanged. bf16 only */
    bool skewed, holes;
    uint32_t dispatch_flags, combine_flags; /* EP_LL_RECV_HOOK, TEST_ASYNC, EP_LL_ZERO_COPY */
    uint64_t seed;                          /* of this rank */
};

/* An ep_ll of each backend. */
struct ll_pair {
    const struct group *group;
    ep_ll_config config;
    ep_ll *host, *cuda;
};

/* Collective. The CUDA backend's stream becomes that of the group. */
int ll_pair_open(const struct group *group, const ep_ll_config *config, struct ll_pair *ret_pair);
void ll_pair_close(struct ll_pair *pair);

struct exchange;

/* Collective: makes the buffers and loads them. *ret_exchange is set in any case, and must be freed. */
int exchange_new(const struct ll_pair *pair, const struct ll_round *round, struct exchange **ret_exchange);
/* Collective. Loads new inputs, poisons outputs and computes the expected results; only the seed of the round changes.
 */
int exchange_load(struct exchange *x, uint64_t seed);
/* Collective: the same with other weights only; the results of the dispatch stay the same. */
int exchange_reweigh(struct exchange *x, uint64_t seed);
/* Poisons the outputs again, in the order of the stream. */
int exchange_poison(struct exchange *x);
int exchange_free(struct exchange *x, bool failed);

/* The calls on the CUDA backend. With EP_LL_RECV_HOOK exchange_finish() has to follow. */
ep_status exchange_dispatch(struct exchange *x, uint32_t flags);
ep_status exchange_combine(struct exchange *x, uint32_t flags);
ep_status exchange_finish(struct exchange *x);

/*
 * Dispatches and combines all n, with the flags of each, and calls ep_ll_finish() where needed. `overlap`: the results
 * of two are in use at a time.
 */
int exchange_call_all(struct exchange **x, int n, bool overlap);

/* Waits for the stream. Compares all that the CUDA backend has written, and what it must not write. */
int exchange_compare(struct exchange *x, const char *phase);

/* Input and output of a combine: weights of this rank's tokens, and their sums. */
const struct mirror *exchange_weights(const struct exchange *x);
const struct mirror *exchange_out(const struct exchange *x);

/* Ways to spoil a routing. */
enum spoil { SPOIL_TWICE, SPOIL_BEYOND, SPOIL_BELOW, SPOIL_WIDE, SPOIL_OTHER, N_SPOILS };
extern const char *const spoil_names[N_SPOILS];

/*
 * Spoils the routing of the last token on the device: SPOIL_OTHER is valid, but not that of the dispatch. Also spoils
 * all weights, since those of a refused call must not be used. Undone by exchange_load() and exchange_mend().
 */
int exchange_spoil(struct exchange *x, enum spoil spoil);
int exchange_mend(struct exchange *x);

/* A case: an ep_ll, its exchanges, and all that goes with them. By all ranks. */
#define LL_MAX_ROUNDS 3
struct ll_shape {
    ep_ll_config config;
    int n_rounds;
    bool overlap;
    struct ll_round round[LL_MAX_ROUNDS];
};

int ll_case_run(const struct group *group, const struct ll_shape *shape);

#endif
