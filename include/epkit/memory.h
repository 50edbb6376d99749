/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/memory.h - symmetric memory: memory that peers of the same node can write and read directly.
 *
 * Outputs of dispatch and inputs of combine in symmetric memory are used in place (zero copy). Other memory is accepted
 * everywhere, but costs one local copy and library memory of the same size. On the CUDA backend the copy overlaps with
 * the transfer of other rows in the rank layout; in the expanded layout it does not overlap.
 */
#ifndef EPKIT_MEMORY_H
#define EPKIT_MEMORY_H

#include <epkit/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Allocates `bytes` of symmetric memory on this rank, aligned to 4096. Collective: every rank calls it in the same
 * order, each with its own size (0 is allowed and gives a valid pointer that holds nothing). Contents are undefined.
 * The communicator owns it; ep_free() or ep_comm_free() frees it.
 *
 * The host backend allocates all pages at once, so that an access to the memory never fails. EP_E_MEMORY names the
 * limit that `bytes` exceed: a memory cgroup, the machine's memory and swap, the commit limit (vm.overcommit_memory =
 * 2), RLIMIT_FSIZE (shared memory is a file to the kernel), RLIMIT_AS or RLIMIT_MEMLOCK. Allocating a page costs about
 * a third of its first access. If a peer cannot map the memory when it first needs it, the communicator fails with that
 * peer's rank and reason.
 *
 * A rank can have 512 allocations and windows of all kinds in this header, including a few of the library; the next one
 * is EP_E_MEMORY. On the CUDA backend those freed by ep_free_local() and ep_unregister() count until the next ep_free()
 * or ep_comm_free().
 */
EP_API ep_status ep_alloc(ep_comm *comm, size_t bytes, void **ret_memory);

/*
 * Collective. `memory` must be from ep_alloc of the same communicator; NULL is allowed. The host backend waits for all
 * work queued on the communicator; on other backends no operation may be using the memory.
 */
EP_API ep_status ep_free(ep_comm *comm, void *memory);

/*
 * As ep_alloc() and ep_free(), but not collective; any thread, at any time. Peers map the memory when an operation
 * first uses it, so allocations may differ between ranks. If the call fails, *ret_memory does not change, and the
 * communicator does not fail. free: no operation may be using the memory, even if the communicator has failed.
 *
 * CUDA backend: device memory of the communicator's GPU, in multiples of 2 MiB. Allowed during a capture, but not
 * captured. Freed memory is kept for later calls, because peers have it mapped and unmapping would wait for their
 * kernels. It counts in library_bytes of ep_comm_get_info() until the next ep_free() releases it.
 */
EP_API ep_status ep_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
EP_API ep_status ep_free_local(ep_comm *comm, void *memory);

/*
 * Registers GPU memory of the caller as a window: operations use it in place, as symmetric memory. Not collective; any
 * thread. The caller still owns the memory and must keep it mapped until ep_unregister() with the same address or
 * ep_comm_free(); no operation may be using it at that time. EP_E_ARG if a part of it is already registered with this
 * communicator, or is memory of this communicator. Memory of another communicator may be registered; unregister it
 * before that communicator frees it.
 *
 * Host backend: EP_E_UNSUPPORTED, because other processes cannot map private memory. Operations copy it.
 *
 * CUDA backend: memory of the communicator's GPU (EP_E_ARG for another GPU) that is, or is part of, an allocation of
 * cudaMalloc(), which torch's allocator uses by default. Peers map the whole allocation. EP_E_UNSUPPORTED for host
 * memory, managed memory, and memory that has no CUDA IPC handle: that of cudaMallocAsync() and cuMemCreate(), which
 * torch uses with expandable_segments. Peers keep the memory mapped until the next ep_free() of all ranks or their
 * ep_comm_free() (ep_free(NULL) does nothing); CUDA requires that it is not freed before. Registering the same memory
 * again uses no further entry.
 */
EP_API ep_status ep_register(ep_comm *comm, void *memory, size_t bytes);
EP_API ep_status ep_unregister(ep_comm *comm, void *memory);

/*
 * ep_alloc_local() and ep_free_local() as allocator callbacks, with the signatures of torch.cuda.MemPool
 * (CUDAPluggableAllocator).
 * attach: allocations for `device` come from this communicator from now on. EP_E_MEMORY if this process has no memory
 * for its table.
 * alloc: returns NULL on failure, with the reason in ep_last_error(). `stream` is ignored.
 * free: returns the memory to the communicator that it came from, whichever is attached now; `bytes`, `device` and
 * `stream` are ignored. It does not wait for `stream`: no operation may be using the memory. It does nothing for NULL
 * and for memory that is not from alloc.
 *
 * ep_comm_free() detaches the communicator and frees the memory. Its addresses do not stay reserved: release the pool,
 * which frees its memory, before ep_comm_free().
 *
 * Any thread, also concurrently with ep_comm_free(), which waits for callbacks in progress; but attach must not be
 * called concurrently with it. In a forked child no communicator is attached, and free does nothing for memory of the
 * parent.
 */
#define EP_MAX_POOLS 64 /* devices */
EP_API ep_status ep_pool_attach(ep_comm *comm, int device);
EP_API void *ep_pool_alloc(ptrdiff_t bytes, int device, ep_stream stream);
EP_API void ep_pool_free(void *memory, ptrdiff_t bytes, int device, ep_stream stream);

#ifdef __cplusplus
}
#endif

#endif
