/* SPDX-License-Identifier: Apache-2.0 */
/*
 * throughput.h - one case of the throughput matrices: state, and the operations that it runs and verifies.
 */
#ifndef EP_CHECK_THROUGHPUT_H
#define EP_CHECK_THROUGHPUT_H

#include "check/run.h"

struct throughput_case {
    int index; /* from 0 */
    bool previous, async, topk;
    struct data data;
    int n_bias[2];       /* of the combine of unchanged rows, and of the other one */
    int idx_type;        /* EP_I32, EP_I64 */
    int alignment;       /* 0: not asked for */
    bool strided_scales; /* block after block instead of token after token */
    bool symmetric;      /* where outputs of dispatch and inputs of combine lie */
    bool expanded;       /* also run the expanded layout ... */
    bool zero_padding;   /* ... and ask for zeros in its padding */
};

struct throughput {
    struct check_run *run;
    int n_tokens; /* of this rank */
    struct reference_counts counts;
    struct reference_scratch scratch;
    /* What dispatch writes; combine reads the first and the last. [0]: ordinary memory, [1]: symmetric. */
    struct check_buffer rows[2], scales[2], indices[2], weights[2];
    struct check_buffer topk_idx, x, x_scales, x_weights;
    struct check_buffer bias[2], out, out_weights;
    uint16_t *expected; /* one row */
    /* Of the case that runs: */
    struct throughput_case c;
    struct reference_layout rank_layout, expanded_layout;
};

/* A dispatch or a combine on a plan. */
struct throughput_step {
    struct throughput *state;
    ep_plan *plan;
    const struct reference_layout *layout;
    int64_t out_rows; /* dispatch: rows that the outputs hold */
    bool identity;    /* combine: rows come back unchanged, else experts answer something of their own */
    int n_bias;       /* combine */
    ep_event *after, *done;
};

/* Runs the step as the case wants it (sync or async, with or without an event before) and compares what came out. */
ep_status throughput_dispatch(struct throughput_step *step);
ep_status throughput_combine(struct throughput_step *step);

#endif
