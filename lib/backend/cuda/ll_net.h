/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_net.h - low latency between nodes: for each rank of another node a segment in pinned host memory, into which the
 * kernels write as into that of a rank of this node, and a landing segment, which they read as their own. A thread of
 * each ep_ll, its proxy, sends what the kernels have written, and puts what comes at the same offsets of the landing
 * segment. The thread knows calls by the words of the segments alone.
 */
#ifndef EP_CUDA_LL_NET_H
#define EP_CUDA_LL_NET_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/lowlatency.h"

struct cuda_ll_net;

/* Of host memory, besides the segment of `bytes` that `device` describes; 0 on one node. */
size_t cuda_ll_net_bytes(const ep_ll *ll, const struct cuda_ll *device, size_t bytes);
/* What needs no peer. Tells `device` of the landing segment. *ret_net is to be closed in each case. */
ep_status cuda_ll_net_prepare(const ep_ll *ll, struct cuda_ll *device, size_t bytes, struct cuda_ll_report *report,
                              struct cuda_ll_net **ret_net);
/* Where this rank writes for each rank of another node: ret_reach [R], of which nothing else is touched. net NULL:
   nothing. */
void cuda_ll_net_get_segments(const struct cuda_ll_net *net, struct cuda_ll_segment **ret_segments);
/* Collective; `device` of the preparation is complete. Starts the thread. */
ep_status cuda_ll_net_open(struct cuda_ll_net *net);
/*
 * A kernel of the ep_ll is in a stream, or in a graph: from now on the thread looks whether there is something to do,
 * each millisecond at least. net NULL: nothing.
 */
void cuda_ll_net_launched(struct cuda_ll_net *net);
/*
 * No kernel of it runs any more. Ends the thread; what the peers still wait for is sent before, for as long as the
 * deadline of the communicator, unless the group has failed.
 */
void cuda_ll_net_stop(struct cuda_ll_net *net);
/* The same, and frees everything. */
void cuda_ll_net_close(struct cuda_ll_net *net);
/* Of all ep_ll that were not freed. */
void cuda_ll_nets_stop(struct cuda_comm *cuda);

#endif
