/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h - symmetric memory of the host: allocations of this rank, and mappings of those of the peers. */
#ifndef EP_GROUP_MEMORY_H
#define EP_GROUP_MEMORY_H

#include "group/group.h"

ep_status ep_group_alloc(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status ep_group_free(ep_comm *comm, void *memory);
ep_status ep_group_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status ep_group_free_local(ep_comm *comm, void *memory);
ep_status ep_group_alloc_internal(struct ep_group *group, size_t bytes, void **ret_memory);
/* Without pages: call ep_group_reserve() for each part before it is touched. */
ep_status ep_group_alloc_sparse(struct ep_group *group, size_t bytes, void **ret_memory);
ep_status ep_group_reserve(struct ep_group *group, const void *memory, size_t offset, size_t bytes);
void ep_group_free_internal(struct ep_group *group, void *memory);
/* Finds `bytes` at `memory` in the symmetric memory of this rank; false if they are not in it. */
bool ep_group_find(struct ep_group *group, const void *memory, size_t bytes, struct ep_group_address *ret_address);
/*
 * Maps `bytes` at an address in the memory of a peer, aligned to 16. EP_E_MISMATCH if they are not inside the
 * allocation: then nothing of it may be used. 0 bytes: NULL, whatever the address is.
 */
ep_status ep_group_map(struct ep_group *group, int rank, const struct ep_group_address *address, size_t bytes,
                       void **ret_address);
/* EP_E_MISMATCH: `what` is wrong with the address of `bytes` that `rank` has published. */
ep_status ep_group_fail_address(int rank, const struct ep_group_address *address, size_t bytes, const char *what);
/* Attaches the segment in a slot of a peer, if it belongs to that peer and has at least `bytes`. */
ep_status ep_group_attach_slot(struct ep_group *group, int rank, const struct ep_group_address *address, size_t bytes,
                               struct ep_shm *ret_shm);
/*
 * Maps a segment of a peer. EP_E_PEER_DEAD when it has died, EP_E_PEER_LEFT when it lives and has left the group or
 * released the segment, EP_E_MISMATCH when the name is not of a segment of its process. `name` is a private copy.
 */
ep_status ep_group_attach(struct ep_group *group, int rank, const struct ep_shm_name *name, struct ep_shm *ret_shm);
/* Unmaps allocations that the peers have freed. */
void ep_group_unmap_stale(struct ep_group *group);
void ep_group_memory_close(struct ep_group *group);
/* Unmaps all that this rank has mapped of the peers. */
void ep_group_unmap_peers(struct ep_group *group);
/* Frees all staging; the next operations allocate it again. */
void ep_group_free_stages(struct ep_group *group);
/* Moves the allocations to new pages at the same addresses, which no other rank has mapped. */
ep_status ep_group_move_memory(struct ep_group *group);
/* Writes the allocations into the slot table of a new control block. */
ep_status ep_group_publish_memory(struct ep_group *group);
/* Staging buffer number `which` of at least `bytes`. */
ep_status ep_group_stage(struct ep_group *group, int which, size_t bytes, void **ret_memory);

#endif
