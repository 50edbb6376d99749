/* SPDX-License-Identifier: Apache-2.0 */
/* throughput.h - one case of the throughput matrices: its state, and operations that are run and verified. */
#ifndef EP_TEST_CHECK_THROUGHPUT_H
#define EP_TEST_CHECK_THROUGHPUT_H

#include "check_run.h"

struct throughput_case {
    bool previous, async, topk;
    struct data data;
    int n_bias[2];       /* of the combine of unchanged rows, and of the other one */
    int idx_type;        /* EP_I32, EP_I64 */
    int alignment;       /* 0: none */
    bool strided_scales; /* block after block instead of token after token */
    bool symmetric;      /* memory of the outputs of dispatch and inputs of combine */
    bool expanded;       /* also run the expanded layout ... */
    bool zero_padding;   /* ... with EP_PLAN_ZERO_PADDING */
};

struct throughput {
    struct check_run *run;
    int n_tokens; /* of this rank */
    struct reference_counts counts;
    struct reference_scratch scratch;
    /* Outputs of dispatch; rows and weights are also inputs of combine. [0]: ordinary memory, [1]: symmetric. */
    unsigned char *rows[2], *scales[2], *indices[2], *weights[2];
    unsigned char *topk_idx, *x;
    int32_t *x_scales;
    float *x_weights, *out_weights;
    uint16_t *bias[2], *out;
    uint16_t expected[EP_MAX_HIDDEN]; /* one row */
    /* Of the current case: */
    struct throughput_case c;
    struct reference_layout rank_layout, expanded_layout;
};

/* A dispatch or a combine on a plan. */
struct throughput_step {
    struct throughput *state;
    ep_plan *plan;
    const struct reference_layout *layout;
    int64_t out_rows; /* dispatch: capacity of the outputs in rows */
    bool identity;    /* combine: rows are returned unchanged, else experts reply different rows */
    int n_bias;       /* combine */
    ep_event *after, *done;
};

/* Runs the step as specified by the case (sync or async, with or without a previous event) and verifies its outputs. */
ep_status throughput_dispatch(struct throughput_step *step);
ep_status throughput_combine(struct throughput_step *step);

#endif
