/* SPDX-License-Identifier: Apache-2.0 */
/* ll_impl.h - the state of an ep_ll in the CUDA backend, shared by ll_open.c and lowlatency.c. */
#ifndef EP_CUDA_LL_IMPL_H
#define EP_CUDA_LL_IMPL_H

#include "backend/cuda/ll_net.h"

struct cuda_ll_impl {
    struct cuda_comm *cuda;
    struct cuda_ll device; /* arguments that all launches share */
    struct cuda_host_block *host_block;
    struct cuda_ll_report *report; /* in it */
    struct cuda_ll_cached_segment *segment;
    struct cuda_ll_net *net;          /* NULL on one node */
    struct cuda_block combine_buffer; /* allocated on first use */
    bool handed_out;                  /* returned by ep_ll_get_combine_buffer() for the next combine */
    cudaEvent_t done;
    int blocks;
    size_t bytes;          /* of each rank's segment */
    bool in_dispatch;      /* kind of the last call */
    bool open;             /* the last call has been sent and not received: ep_ll_finish() completes it */
    uint64_t number;       /* of the last call's dispatch: its own number, or that of the one that it answers */
    uint64_t open_capture; /* the capture in which the open call was made; 0: none */
    struct cuda_ll_dispatch dispatch;
    struct cuda_ll_combine combine;
    cudaStream_t stream; /* of the current call */
    uint64_t capture;    /* of the current call; 0: not captured */
    bool blocking;       /* the host waits for the current call */
};

/* Sets shape, offsets and sizes. Returns the size of a segment in bytes. */
size_t cuda_ll_lay_out(const ep_ll *ll, struct cuda_ll *device);

/* Size of the buffer that a combine reads without a copy. */
size_t cuda_ll_combine_buffer_bytes(const ep_ll_config *config);

#endif
