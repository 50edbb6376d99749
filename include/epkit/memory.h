/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/memory.h - symmetric memory: memory that peers of the same node can write and read directly.
 *
 * Outputs of dispatch and inputs of combine that lie in it are used in place (zero copy). Ordinary memory is accepted
 * everywhere, at the price of one local copy and of as much memory of the library's own. On the CUDA backend rows in
 * the rank layout are copied while others are on their way; in the expanded layout the copy takes time of its own.
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
 * The communicator owns it; ep_free() or ep_comm_free() releases it.
 *
 * The host backend takes all pages at once, so that touching the memory never fails: EP_E_MEMORY names the limit that
 * `bytes` do not fit into - a memory cgroup, the machine's memory and swap, the commit limit (vm.overcommit_memory =
 * 2), RLIMIT_FSIZE (shared memory is a file to the kernel), RLIMIT_AS, RLIMIT_MEMLOCK. Taking a page costs about a
 * third of touching it for the first time. A peer that cannot map the memory when it first needs it fails the
 * communicator with its own number and reason.
 *
 * A rank has room for 512 allocations and windows of all kinds in this header, a few of the library's own among them;
 * the next one is EP_E_MEMORY. On the CUDA backend those that ep_free_local() and ep_unregister() have ended count
 * until the next ep_free() or ep_comm_free().
 */
EP_API ep_status ep_alloc(ep_comm *comm, size_t bytes, void **ret_memory);

/*
 * Collective. `memory` must come from ep_alloc of the same communicator; NULL is fine. On the host backend it waits for
 * what is queued on the communicator; on others no operation may be using the memory.
 */
EP_API ep_status ep_free(ep_comm *comm, void *memory);

/*
 * The same, not collective, on any thread, at any time: peers map the memory when an operation first names it, so ranks
 * may allocate differently. When it fails, *ret_memory is as it was and the communicator goes on. free: no
 * operation may be using the memory, also when the communicator has failed.
 *
 * CUDA backend: device memory of the communicator's GPU, in steps of 2 MiB; also during a capture, which it is no part
 * of. What is freed is kept for later calls, because peers have it mapped and unmapping would wait for their kernels.
 * It counts as library_bytes of ep_comm_get_info() until the next ep_free() gives it back.
 */
EP_API ep_status ep_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
EP_API ep_status ep_free_local(ep_comm *comm, void *memory);

/*
 * Makes memory of the caller symmetric: a window that operations use in place. Any rank alone, any thread. It stays the
 * caller's, and mapped, until ep_unregister() with the same address or ep_comm_free(); no operation may be using it
 * then. EP_E_ARG where part of it is registered with this communicator, or is its memory. Memory of another
 * communicator may be registered; unregister it before that one frees it.
 *
 * Host backend: memory of a memfd (MFD_ALLOW_SEALING) that the caller has mapped with MAP_SHARED from its beginning and
 * whose descriptor is still open. Pages that it does not have yet are taken as ep_alloc() takes them (EP_E_MEMORY), and
 * contents are kept; do not punch holes into it afterwards. Then it is sealed against shrinking, because peers map it;
 * what is refused is not sealed. The file must reach to the end of the window's last page (EP_E_ARG), because peers map
 * whole pages. Of a memfd with MFD_HUGETLB `bytes` must be whole huge pages (EP_E_ALIGN). A memfd
 * sealed against writing and all else is EP_E_UNSUPPORTED: other processes cannot map private memory, and
 * operations copy from and to it as they do without a window.
 *
 * CUDA backend: memory of the communicator's GPU (EP_E_ARG on another one) that is from cudaMalloc(), or part of it, as
 * torch's allocator has it by default. Peers map the whole allocation that it is in. EP_E_UNSUPPORTED for memory of the
 * host, managed memory, and what CUDA exports no IPC handle of: cudaMallocAsync() and cuMemCreate(), which torch uses
 * with expandable_segments. Peers keep it mapped until the next ep_free() of all ranks or their ep_comm_free(); CUDA
 * asks that it is not freed before. Registering the same memory again takes no further place.
 */
EP_API ep_status ep_register(ep_comm *comm, void *memory, size_t bytes);
EP_API ep_status ep_unregister(ep_comm *comm, void *memory);

/*
 * ep_alloc_local() and ep_free_local() as callbacks of an allocator, in the form that torch.cuda.MemPool takes
 * (CUDAPluggableAllocator): what is allocated for `device` comes from the communicator that was attached to it last,
 * and free gives it back to the one that it came from, whichever is attached then (`bytes`, `device` and `stream` do
 * not count). alloc gives NULL when it fails, with the reason in ep_last_error(). free takes NULL and what is not from
 * alloc, and does nothing.
 *
 * ep_comm_free() detaches the communicator and takes the memory away. Its addresses stay reserved until free, which
 * gives those back, so that no other memory comes to lie at an address that the allocator still has to free. On the
 * CUDA backend they do not stay reserved: release the pool, which frees what it holds, before ep_comm_free().
 *
 * Any thread, also beside ep_comm_free(), which waits for callbacks under way; attach alone is not to be called beside
 * it. free does not wait for `stream`: no operation may be using the memory. In a forked child nothing is attached, and
 * free does nothing with memory of the parent. attach: EP_E_MEMORY when this process has no memory for its table.
 */
#define EP_MAX_POOLS 64 /* devices */
EP_API ep_status ep_pool_attach(ep_comm *comm, int device);
EP_API void *ep_pool_alloc(ptrdiff_t bytes, int device, ep_stream stream);
EP_API void ep_pool_free(void *memory, ptrdiff_t bytes, int device, ep_stream stream);

#ifdef __cplusplus
}
#endif

#endif
