/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h - symmetric memory of this rank, and mappings of that of the peers. */
#ifndef EP_CUDA_MEMORY_H
#define EP_CUDA_MEMORY_H

#include "backend/cuda/cuda.h"

/* memory.c */
ep_status cuda_alloc(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status cuda_free(ep_comm *comm, void *memory);
bool cuda_find(struct cuda_comm *cuda, const void *memory, size_t bytes, struct ep_group_address *ret_address);
/*
 * The two descriptor words of a buffer, CUDA_DESC_SLOT() and the offset, for `bytes` at `memory`; false if they are not
 * in symmetric memory.
 */
bool cuda_desc_buffer(struct cuda_comm *cuda, const void *memory, size_t bytes, uint32_t ret_words[2]);
/* For the library or the caller; not collective, and never waits for a peer. */
ep_status cuda_alloc_kind(struct cuda_comm *cuda, size_t bytes, enum cuda_memory kind, void **ret_memory);
/* Stores the allocation in a slot with a new generation and publishes it. Under memory_lock. EP_E_MEMORY: no free slot.
 */
ep_status cuda_add_allocation(struct cuda_comm *cuda, const struct cuda_allocation *allocation,
                              const cudaIpcMemHandle_t *handle);
/* Counts the allocation as published: peers that read the count find its slot. */
void cuda_publish_allocation(struct cuda_comm *cuda, struct cuda_allocation *allocation);
/* The allocation of that kind whose memory or window begins at `memory`; NULL: none. Under memory_lock. */
struct cuda_allocation *cuda_find_allocation(struct cuda_comm *cuda, const void *memory, enum cuda_memory kind);

/* local.c */
ep_status cuda_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status cuda_free_local(ep_comm *comm, void *memory);
ep_status cuda_register(ep_comm *comm, void *memory, size_t bytes);
ep_status cuda_unregister(ep_comm *comm, void *memory);

/*
 * map.c. Maps a remote address that holds `bytes`, as ep_group_map(). The size of a peer's allocation is the one that
 * the peer has published: a CUDA IPC handle carries no size.
 */
ep_status cuda_map(struct cuda_comm *cuda, int rank, const struct ep_group_address *address, size_t bytes,
                   void **ret_address);
/* Maps what the peers have allocated since the last call, for the kernels. Any thread; cheap if there is nothing. */
ep_status cuda_map_new(struct cuda_comm *cuda);
/*
 * Called before a dispatch or combine is launched, once this rank's own staging is allocated. No kernel may be launched
 * that waits for a mapping which its own process has still to make: any driver call may wait for that kernel, and so
 * delay the mapping (bench/README.md).
 *
 * If a peer's rows (of row_bytes[]; 0: not in staging) may need more staging than is mapped here, waits until the peer
 * has reached the same call, and maps what it has allocated. This is the only place where hosts wait for each other,
 * and only when staging grows. Assumes that the peers use staging for the same buffers as this rank.
 */
ep_status cuda_sync_stages(struct cuda_comm *cuda, const ep_plan *plan, const size_t row_bytes[EP_GROUP_AT_COUNT],
                           enum ep_group_phase phase);
/*
 * Have all peers mapped the caller's memory that the words of cuda_desc_buffer() describe? Waits for new memory: the
 * monitors of the peers map it within some milliseconds. false: they are delayed, and the rows must go through staging.
 */
ep_status cuda_await_mapped(struct cuda_comm *cuda, const uint32_t words[2], bool *ret_mapped);
/* Unmaps what the peers have freed. Waits for running kernels. */
ep_status cuda_unmap_freed(struct cuda_comm *cuda);
void cuda_unmap_all(struct cuda_comm *cuda);
/* Returns staging buffer `which` with at least `bytes`. */
ep_status cuda_stage(struct cuda_comm *cuda, int which, size_t bytes, void **ret_memory);
/*
 * Allocates staging for a plan whose counts the hosts exchange, before they do: all ranks then have it mapped when the
 * plan is complete, and its first operation does not synchronise the hosts. For other plans each operation allocates
 * exactly what it needs, as cuda_sync_stages() assumes.
 */
void cuda_reserve_stages(struct cuda_comm *cuda, const ep_plan_args *args);
/* Frees this rank's memory once none of its kernels runs. Frees what peers still have mapped later. */
void cuda_memory_close(struct cuda_comm *cuda);
/* Size of an allocation of symmetric memory for `bytes`. */
static inline size_t cuda_whole_bytes(size_t bytes)
{
    return (bytes + CUDA_GRANULE) / CUDA_GRANULE * CUDA_GRANULE;
}

/* reclaim.c */
/* Publishes to `rank` whether this rank has memory of it mapped. */
void cuda_set_mapped_by(struct cuda_comm *cuda, int rank, bool mapped);
/* Symmetric memory of a communicator that closes: freed once no peer has them mapped. */
void cuda_defer_free(struct cuda_comm *cuda);
/*
 * Frees deferred memory of closed communicators that no peer has mapped: on device `own`, and on devices without an
 * open communicator; CUDA_ALL_DEVICES: on all. Any thread.
 */
#define CUDA_ALL_DEVICES (-1)
void cuda_reclaim(int own);
/* Counts the open communicators of a device: `change` is 1 or -1. */
void cuda_count_open(const struct cuda_comm *cuda, int change);

#endif
