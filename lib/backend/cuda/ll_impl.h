/* SPDX-License-Identifier: Apache-2.0 */
/* ll_impl.h - an ep_ll of the CUDA backend: ll_open.c makes it, lowlatency.c has its calls. */
#ifndef EP_CUDA_LL_IMPL_H
#define EP_CUDA_LL_IMPL_H

#include "backend/cuda/ll_net.h"

struct cuda_ll_impl {
    struct cuda_comm *cuda;
    struct cuda_ll device; /* what every launch is told */
    struct cuda_ll_report *report;
    struct cuda_ll_cached_segment *place;
    struct cuda_ll_net *net;          /* NULL on one node */
    struct cuda_block combine_buffer; /* made on first use */
    bool handed_out;                  /* ... for the combine that is next */
    cudaEvent_t done;
    int blocks;
    size_t bytes;          /* of each rank's segment */
    bool in_dispatch;      /* the call that ep_ll_finish() completes */
    bool open;             /* it is to be completed, */
    uint64_t number;       /* ... the dispatch that it is, or answers, */
    uint64_t open_capture; /* ... and the capture that it was made in; 0: none */
    struct cuda_ll_dispatch dispatch;
    struct cuda_ll_combine combine;
    cudaStream_t stream; /* of the call under way, */
    uint64_t capture;    /* ... its capture; 0: none */
    bool blocking;       /* ... which the host waits for */
};

/* Sets shape, offsets and sizes. Returns the bytes of a segment. */
size_t cuda_ll_lay_out(const ep_ll *ll, struct cuda_ll *device);

/* Of the buffer that a combine reads without a copy. */
size_t cuda_ll_combine_buffer_bytes(const ep_ll_config *config);

#endif
