/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_net.h - low latency between nodes. Each remote rank has an outgoing segment in pinned host memory, into which the
 * kernels write as into the segment of a rank of this node. A landing segment, also pinned, receives what remote ranks
 * send, and the kernels read it as they read their own segment. Each ep_ll has a proxy thread, which sends what the
 * kernels have written and stores what arrives at the same offsets of the landing segment. It learns of calls only from
 * the headers of the segments.
 */
#ifndef EP_CUDA_LL_NET_H
#define EP_CUDA_LL_NET_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/lowlatency.h"

struct cuda_ll_net;

/* Host memory in bytes, in addition to the segment of `bytes` that `device` describes; 0 on one node. */
size_t cuda_ll_net_bytes(const ep_ll *ll, const struct cuda_ll *device, size_t bytes);
/* The part that needs no peer. Sets device->landing. *ret_net must be closed, on failure too. */
ep_status cuda_ll_net_prepare(const ep_ll *ll, struct cuda_ll *device, size_t bytes, struct cuda_ll_report *report,
                              struct cuda_ll_net **ret_net);
/*
 * The outgoing segments: sets ret_segments [R] for remote ranks and leaves the other entries. Does nothing if net is
 * NULL.
 */
void cuda_ll_net_get_segments(const struct cuda_ll_net *net, struct cuda_ll_segment **ret_segments);
/* Collective; `device`, which cuda_ll_net_prepare() was given, must be complete. Starts the proxy. */
ep_status cuda_ll_net_open(struct cuda_ll_net *net);
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
