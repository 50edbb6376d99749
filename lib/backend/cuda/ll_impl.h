/* SPDX-License-Identifier: Apache-2.0 */
/* ll_impl.h - the state of an ep_ll in the CUDA backend, shared by lowlatency.c and ll_net.c. */
#ifndef EP_CUDA_LL_IMPL_H
#define EP_CUDA_LL_IMPL_H

#include "backend/cuda/lowlatency.h"
#include "backend/cuda/plan.h"
#include "group/collective.h"
#include "group/failure.h"
#include "group/peers.h"
#include "net/ll_wire.h"

struct cuda_ll_net;

struct cuda_ll_impl {
    struct cuda_comm *cuda;
    struct cuda_ll device; /* arguments that all launches share */
    struct cuda_host_block *host_block;
    struct cuda_ll_report *report; /* in it */
    struct cuda_ll_cached_segment *segment;
    struct cuda_ll_net *net;          /* NULL on one node */
    struct cuda_block combine_buffer; /* allocated on first use */
    cudaEvent_t done;
    int blocks;
    int max_blocks;        /* of the sending half of the last combine; 0: any number */
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

/* Sets shape, offsets and sizes, also for the wire between nodes. Returns the size of a segment in bytes. */
size_t cuda_ll_lay_out(const ep_ll *ll, struct cuda_ll *device, struct ll_wire *ret_wire);

/*
 * ll_net.c: between nodes. Each remote rank has an outgoing segment in pinned host memory, into which the
 * kernels write as into the segment of a rank of this node. A landing segment, also pinned, receives what remote ranks
 * send, and the kernels read it as they read their own segment. Each ep_ll has a proxy thread, which sends what the
 * kernels have written and stores what arrives at the same offsets of the landing segment. It learns of calls only from
 * the headers of the segments.
 */
/* Host memory in bytes, in addition to the segment of `bytes` that `device` describes; 0 on one node. */
size_t cuda_ll_net_bytes(const ep_ll *ll, const struct cuda_ll *device, size_t bytes);
/* The part that needs no peer. Sets device->landing. *ret_net must be closed, on failure too. */
ep_status cuda_ll_net_prepare(const ep_ll *ll, struct cuda_ll *device, const struct ll_wire *wire, size_t bytes,
                              struct cuda_ll_report *report, struct cuda_ll_net **ret_net);
/*
 * The outgoing segments: sets ret_segments [R] for remote ranks and leaves the other entries. Does nothing if net is
 * NULL.
 */
void cuda_ll_net_get_segments(const struct cuda_ll_net *net, struct cuda_ll_segment **ret_segments);
/* Collective. Starts the proxy. */
ep_status cuda_ll_net_open(struct cuda_ll_net *net);
/* Ends the proxy and its connections, after which it can be opened again. The segments stay, zeroed. */
void cuda_ll_net_leave(struct cuda_ll_net *net);
/* The same for those of all ep_ll. */
void cuda_ll_nets_leave(struct cuda_comm *cuda);
/*
 * A kernel of the ep_ll was added to a stream or to a graph: from now on the proxy polls at least once per millisecond.
 * Does nothing if net is NULL.
 */
void cuda_ll_net_launched(struct cuda_ll_net *net);
/*
 * Stops the proxy when no kernel of it runs any more. First sends what peers still wait for, until the deadline of the
 * communicator; not if the group has failed.
 */
void cuda_ll_net_stop(struct cuda_ll_net *net);
/* Stops the proxy and frees everything. */
void cuda_ll_net_close(struct cuda_ll_net *net);
/* Stops the proxies of all ep_ll that were not freed. */
void cuda_ll_nets_stop(struct cuda_comm *cuda);

#endif
