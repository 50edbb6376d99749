/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/cuda.h - what only communicators of the CUDA backend have. Needs libepkit-cuda; the only header with CUDA
 * types.
 *
 * Each returns EP_E_ARG on a communicator of another backend. Threads: as the other calls on a communicator.
 *
 * Memory that peers have mapped is not freed under them: ep_comm_free() waits up to a second for peers in other
 * processes to leave, too. What they or threads of this process still reach then is freed by the ep_comm_free() of the
 * last of them, by a later ep_comm_new() or ep_alloc() on the device, or when the process ends.
 *
 * Streams. Operations of a communicator run on its device in the order of the calls, whatever their streams. The stream
 * NULL is CUDA's default stream; but where ranks that are threads of one process share a device it is a stream of the
 * communicator's, because the default stream would be the same one for all of them.
 *
 * Graphs. While a stream is being captured, ep_dispatch, ep_combine, ep_plan_update, ep_barrier_on and the calls of
 * lowlatency.h in it go into the graph and return without having run; all ranks capture the same calls in the same
 * order and launch their graphs equally often, mixed with other calls as they like. Among a launch and calls in other
 * streams the order is the caller's: the same on all ranks. Plans are made before; one of fixed capacity may be made in
 * the capture, of topk_idx in device memory, reports no counts to the host, and may be freed there when it is no longer
 * named: its memory stays for plans of later captures. Memory is any of the device; other plans and memory that a graph
 * names must not be freed before it. When a launched graph fails, ep_comm_async_error() reports it.
 *
 * Between nodes: plans, their updates and metadata, ep_dispatch, ep_combine, ep_barrier_on and what waits for them, on
 * nodes of up to 32 ranks. A plan waits for its routing and, without max_recv_tokens or in a capture, for the hosts of
 * its peers, which have to come to the same call within the deadline. A token may have experts on up to 32 other nodes.
 * Low latency, of up to 512 ranks in all: see lowlatency.h. The first operation of a plan with max_recv_tokens waits
 * for the hosts of the peers, too, also in a capture. Operations in graphs follow later updates of their plan. Rows
 * between nodes go through pinned host memory that the communicator holds until it is freed: that of
 * ep_cuda_set_net_memory(), and rings of 16 MiB for each peer (1 MiB on more than nine nodes). It also keeps some
 * kilobytes for each captured operation and, once there is one, a thread that wakes up to look for launches, every
 * millisecond when nothing happens. ep_comm_config.channels is for plans alone. ep_comm_free() sends what peers still
 * wait for, for one deadline at most.
 */
#ifndef EPKIT_CUDA_H
#define EPKIT_CUDA_H

#include <epkit/comm.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Multiprocessors that a dispatch or combine occupies, 1 to those that the device has: all of its blocks, those among
 * them that copy rows which are not in memory of ep_alloc(). 0: the default, as many as fill the links, and 24 more
 * where rows are copied. May differ between ranks.
 */
EP_API ep_status ep_cuda_set_sms(ep_comm *comm, int sms);

/* The device of this rank and the multiprocessors that an operation occupies. Either may be NULL. */
EP_API ep_status ep_cuda_get_device(ep_comm *comm, int *ret_device, int *ret_sms);

/*
 * Between nodes: pinned host memory in which rows lie until they have left. An operation needs twice its chunks, which
 * are of up to 32 tokens for one node: of a dispatch hidden bytes (fp8) or 2 * hidden (bf16) a token, its scales and
 * its weights, of a combine 4 * hidden, 2 * hidden where the partial sum is a single row or partial_type is EP_BF16,
 * and its weights. Those of a dispatch are the tokens that this rank sends to other nodes, once for each; those of a
 * combine are the tokens that its rail peers have sent here. Of a plan with max_recv_tokens that was updated, or that a
 * capture has seen, they are what can be: max_tokens for each other node or choice, whichever is fewer, and back
 * max_tokens of each rail peer.
 *
 * It is taken when an operation needs more than there is, before anything of it is launched; that takes some tenths of
 * a second for each GB, in which the peers wait for this rank. Larger memory has room for some more, and what was there
 * before stays, because what is queued and captured may use it: all together are at most five times the largest need.
 *
 * set: takes `reserve` bytes now if there are fewer, and refuses operations that would need more than `limit` (0: none)
 * with EP_E_MEMORY, before anything changes. EP_E_ARG: reserve is more than the limit. EP_E_MEMORY: it is not to be had
 * within the limit, which is the one from before then. Not collective, but an operation that is refused on one
 * rank is waited for by the others. get: the bytes that are held now, and what the largest operation so far needed, if
 * it was refused, too. Either may be NULL. On one node nothing is taken, and both are 0.
 */
EP_API ep_status ep_cuda_set_net_memory(ep_comm *comm, size_t reserve, size_t limit);
EP_API ep_status ep_cuda_get_net_memory(ep_comm *comm, size_t *ret_held, size_t *ret_needed);

#ifdef __cplusplus
}
#endif

#endif
