/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/cuda.h - calls for communicators of the CUDA backend only. Needs libepkit-cuda; the only header with CUDA
 * types.
 *
 * Each call returns EP_E_ARG on a communicator of another backend. Threads: as the other calls on a communicator.
 *
 * Freeing. Memory is not freed while peers have it mapped: ep_comm_free() also waits for peers in other processes to
 * leave, up to one second. Memory that they or threads of this process can still access then is freed by the
 * ep_comm_free() of the last of them, by a later ep_comm_new() or ep_alloc() on the device, or at the end of the
 * process.
 *
 * Pointers. Host memory that CUDA does not know is refused with EP_E_ARG, except at an address that was device memory
 * in an earlier call: such addresses are not asked about again. There the operation fails on the device.
 *
 * Streams. Operations of a communicator run on its device in the order of the calls, whatever their streams. The stream
 * NULL is the CUDA default stream. If ranks that are threads of one process share a device, NULL is a stream of the
 * communicator instead, because all of them would share the default stream.
 *
 * Graphs. While a stream is being captured, ep_dispatch, ep_combine, ep_plan_update, ep_plan_get_metadata,
 * ep_barrier_on and the calls of lowlatency.h in it are recorded into the graph and return without running.
 *   - All ranks capture the same calls in the same order and launch their graphs the same number of times, in any mix
 *     with other calls. The caller orders launches and calls in other streams: the order must be the same on all ranks.
 *   - Plans are created before the capture, except that a plan of fixed capacity may be created in it, from topk_idx in
 *     device memory. Such a plan reports no counts to the host. It may be freed in the capture after its last use; its
 *     memory is then reused by plans of later captures. Once ep_plan_update() outside of captures has renewed it for
 *     other members (ep_comm_regroup), its graph is not launched again.
 *   - Any device memory may be used. Memory and other plans that a graph uses must not be freed before the graph.
 *   - An operation, captured or not, uses the latest update of its plan that has run. It is for as many tokens as the
 *     plan had when it was called (ep_plan_get_tokens): n_tokens of the last update that was called before it. Calls
 *     outside of captures do not count updates in captures. If the latest update has another number of tokens on a
 *     rank, the communicator fails with EP_E_STATE. So an update that is only captured changes no operation outside of
 *     the graph; but the host's counts of the plan (ep_plan_get_info) are dropped at once.
 *   - Between nodes, a plan whose rows exceed a capacity is not updated in a capture (EP_E_CAPACITY).
 *   - ep_comm_async_error() reports the failure of a launched graph.
 *
 * Between nodes. Supported on nodes of up to 32 ranks: plans, their updates and metadata, ep_dispatch, ep_combine,
 * ep_barrier_on, and waiting for them. A token may have experts on up to 32 other nodes. Low latency supports up to 512
 * ranks in total: see lowlatency.h.
 *   - Blocking. ep_plan_new() waits for its routing and, without max_recv_tokens or in a capture, for the hosts of its
 *     peers, which must make the same call within the deadline. So does the first operation of a plan with
 *     max_recv_tokens, also in a capture.
 *   - Memory. Rows between nodes pass through memory that the communicator holds until it is freed: that of
 *     ep_cuda_set_net_memory(), and rings of 16 MiB for each peer (1 MiB on more than nine nodes). It is pinned host
 *     memory. Over the network "verbs" it is device memory if the NIC can access that ($EPKIT_VERBS_GPU_MEMORY), and
 *     rings of the same size in host memory hold the heads of messages; device memory that turns out not to be
 *     accessible when the communicator is created is freed with it. The network "verbs" also registers 1 MiB of host
 *     memory for each connection. In addition, some kilobytes for each captured operation.
 *   - Thread. After the first captured operation a thread polls for launches; when idle, once per millisecond.
 *   - ep_comm_config.channels applies to plans only.
 *   - ep_comm_free() sends the data that peers still wait for, until one deadline at most.
 */
#ifndef EPKIT_CUDA_H
#define EPKIT_CUDA_H

#include <epkit/comm.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Number of SMs on which a dispatch or combine moves rows, from 1 to those of the device. 0: the default, as many as
 * saturate the links. May differ between ranks.
 *
 * Rows outside memory of ep_alloc() are copied on up to 24 further SMs while the others move, as DeepEP V2 runs its
 * copy and reduction epilogues on all SMs beside num_sms; rows move on fewer SMs than `sms` where that leaves too few.
 * The sums of EP_COMBINE_ROUND_PARTIAL are made on all SMs that the rows leave free while these move. With
 * EP_COMM_STRICT_SMS both are made on these `sms` (such sums on two where it is one): three fifths of them copy, and an
 * operation on ordinary memory takes about twice as long with 12 SMs (docs/decisions.md).
 */
EP_API ep_status ep_cuda_set_sms(ep_comm *comm, int sms);

/* The device of this rank and the number of SMs that an operation occupies. Either may be NULL. */
EP_API ep_status ep_cuda_get_device(ep_comm *comm, int *ret_device, int *ret_sms);

/*
 * Between nodes: memory that holds rows until they are sent, pinned host memory or device memory (see above). Device
 * memory is allocated twice, in multiples of 2 MiB: a limit should be a multiple of 4 MiB. On one node none is
 * allocated, and both values are 0.
 *
 * Size. An operation needs twice the bytes of its chunks. A chunk has up to 32 tokens for one node.
 *   - Bytes per token of a dispatch: hidden (fp8; fp4: half of it) or 2 * hidden (bf16), plus scales and weights.
 *   - Bytes per token of a combine: 4 * hidden, or 2 * hidden if the partial sum is a single row or partial_type is
 *     EP_BF16, plus its weights.
 *   - Tokens of a dispatch: those that this rank sends to other nodes, counted once for each node. For a plan with
 *     max_recv_tokens that was updated or captured, max_tokens times the number of other nodes or of choices, whichever
 *     is smaller.
 *   - Tokens of a combine: those that the rail peers of this rank have sent here. For such a plan max_tokens of each
 *     rail peer.
 *
 * Allocation. Memory is allocated when an operation needs more than there is, before any part of it is launched. This
 * takes some tenths of a second per GB, and the peers wait for this rank meanwhile. A new allocation has some spare
 * room, and earlier ones are kept, because queued and captured work may use them; the total is at most five times the
 * largest need.
 *
 * set: allocates memory now if fewer than `reserve` bytes are held. Operations that would need more than `limit` (0: no
 * limit) are refused with EP_E_MEMORY before anything changes. EP_E_ARG if reserve is larger than the limit.
 * EP_E_MEMORY if the memory cannot be allocated within the limit; the previous limit then stays. Not collective, but if
 * an operation is refused on one rank, the others wait for that rank. get: the bytes held now, and the bytes that the
 * largest operation so far needed, including refused ones. Either may be NULL.
 */
EP_API ep_status ep_cuda_set_net_memory(ep_comm *comm, size_t reserve, size_t limit);
EP_API ep_status ep_cuda_get_net_memory(ep_comm *comm, size_t *ret_held, size_t *ret_needed);

#ifdef __cplusplus
}
#endif

#endif
