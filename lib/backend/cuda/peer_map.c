/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mappings of the peers' memory: by IPC handle, or by the address itself between ranks of one process. The caller's
 * thread or the monitor maps new allocations of peers and stores their addresses in a table in device memory.
 * Descriptors name memory that every peer maps; a kernel that does not find it in the table yet waits for it. Only
 * unmapping waits for kernels: the CUDA runtime unmaps when the device is idle.
 */
#include "backend/cuda/plan.h"
#include "group/collective.h"
#include "group/memory.h"
#include "group/peers.h"
#include "group/wait.h"

#include <string.h>

/*
 * Time for the monitors of the peers, which poll every 20 ms, to map new memory. A monitor that takes longer is blocked
 * in the driver by a kernel, which may be waiting for this rank.
 */
#define MAP_WAIT_NS 1000000000u

static void unmap(const struct cuda_peer *peer, struct cuda_mapping *mapping)
{
    if (mapping->generation && !peer->same_process)
        cudaIpcCloseMemHandle(mapping->base);
    *mapping = (struct cuda_mapping){.base = NULL};
}

/*
 * Publishes a mapping to the kernels. First in the table in host memory, which a waiting kernel sees at once: a queued
 * copy may have to wait for that kernel, for example while a module is loaded (docs/decisions.md). The table in device
 * memory, which is faster to read, is updated by a copy in the internal stream.
 */
static ep_status publish_mapping(struct cuda_comm *cuda, int rank, int slot, const struct cuda_mapping *mapping)
{
    size_t at = (size_t)(rank - cuda->group.first) * CUDA_SLOTS + (size_t)slot;
    struct cuda_map_entry *entry = &cuda->host_map_entries[at];

    /* An entry with the right generation is complete: the generation is cleared first and written last. */
    __atomic_store_n(&entry->generation, 0, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    entry->base = mapping->base;
    entry->granules = (uint32_t)((mapping->bytes + CUDA_GRANULE - 1) / CUDA_GRANULE);
    __atomic_store_n(&entry->generation, mapping->generation, __ATOMIC_RELEASE);
    return cuda_status(
        cudaMemcpyAsync(&cuda->map_entries[at], entry, sizeof(*entry), cudaMemcpyHostToDevice, cuda->internal_stream),
        "cudaMemcpyAsync");
}

/* Under the lock. */
static ep_status unmap_slot(struct cuda_comm *cuda, int rank, int slot)
{
    ep_status status = publish_mapping(cuda, rank, slot, &(struct cuda_mapping){.base = NULL});

    unmap(&cuda->peers[rank], &cuda->peers[rank].mappings[slot]);
    return status;
}

/* Under the lock. */
static ep_status map_slot(struct cuda_comm *cuda, int rank, int slot, uint32_t generation)
{
    struct cuda_peer *peer = &cuda->peers[rank];
    const struct cuda_slot *published = &peer->ctrl->slot[slot];
    struct cuda_mapping mapping = {.generation = generation};
    cudaIpcMemHandle_t handle;
    ep_status status = EP_OK;

    if (peer->mappings[slot].generation == generation)
        return EP_OK;
    if (cuda->let_go)
        return ep_fail(EP_E_EXCLUDED, "memory of rank %d, whose group goes on without this rank", rank);
    if (peer->mappings[slot].generation)
        EP_TRY(unmap_slot(cuda, rank, slot));
    ep_group_read_shared(&mapping.base, &published->base, sizeof(mapping.base));
    ep_group_read_shared(&mapping.bytes, &published->bytes, sizeof(mapping.bytes));
    ep_group_read_shared(&handle, &published->handle, sizeof(handle));
    if (!peer->same_process)
        status = cuda_status(cudaIpcOpenMemHandle(&mapping.base, handle, cudaIpcMemLazyEnablePeerAccess),
                             "cudaIpcOpenMemHandle");
    if (status != EP_OK)
        return ep_fail_prefix(status, "symmetric memory of rank %d: ", rank);
    peer->mappings[slot] = mapping;
    return publish_mapping(cuda, rank, slot, &mapping);
}

static ep_status map_new_of(struct cuda_comm *cuda, int rank, uint32_t allocations)
{
    struct cuda_peer *peer = &cuda->peers[rank];

    for (int slot = 0; slot < CUDA_SLOTS; slot++) {
        uint32_t generation = atomic_load_explicit(&peer->ctrl->slot[slot].generation, memory_order_acquire);
        ep_status status = generation ? map_slot(cuda, rank, slot, generation) : EP_OK;

        /*
         * The peer has freed it meanwhile, has died or has left: no mapping is needed, and a kernel that waits for it
         * is notified that the rank is lost.
         */
        if (status != EP_OK && (ep_group_dead_or_left(&cuda->group, rank) ||
                                atomic_load(&peer->ctrl->slot[slot].generation) != generation))
            continue;
        EP_TRY(status);
    }
    peer->allocations_seen = allocations;
    atomic_store_explicit(&cuda->ctrl->mapped[rank - cuda->group.first], allocations, memory_order_release);
    return EP_OK;
}

ep_status cuda_map_new(struct cuda_comm *cuda)
{
    ep_status status = EP_OK;

    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda) && status == EP_OK; rank++) {
        struct cuda_peer *peer = &cuda->peers[rank];
        uint32_t allocations;

        if (!cuda_is_peer(cuda, rank))
            continue;
        allocations = atomic_load_explicit(&peer->ctrl->allocations, memory_order_acquire);
        if (__atomic_load_n(&peer->allocations_seen, __ATOMIC_RELAXED) == allocations)
            continue;
        pthread_mutex_lock(&cuda->map_lock);
        status = map_new_of(cuda, rank, allocations);
        pthread_mutex_unlock(&cuda->map_lock);
    }
    return status;
}

ep_status cuda_barrier(ep_comm *comm)
{
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(ep_group_barrier(comm));
    EP_TRY(cuda_scope_begin_uncaptured(cuda_of(comm), &scope));
    status = cuda_map_new(cuda_of(comm));
    cuda_scope_end(&scope);
    return status;
}

/* Waits until `rank` has that much staging, or has reached this rank's last call and so has what it needs for it. */
static ep_status wait_for_stage(struct cuda_comm *cuda, int rank, int which, uint64_t needed, bool captured,
                                enum ep_group_phase phase)
{
    const struct cuda_ctrl *ctrl = cuda->peers[rank].ctrl;
    struct ep_group_wait wait;

    ep_group_wait_begin(&wait, &cuda->group, phase);
    for (;;) {
        uint32_t seen = ep_group_doorbell(&cuda->group);

        if (atomic_load_explicit(&ctrl->stage_bytes[which], memory_order_acquire) >= needed ||
            atomic_load_explicit(&ctrl->called[captured], memory_order_acquire) >= cuda->called[captured])
            break;
        EP_TRY(ep_group_wait(&wait, seen, rank));
    }
    ep_group_wait_end(&wait);
    return EP_OK;
}

/* Rows in the buffers of `rank`. For plans of fixed capacity: this rank's capacity, since programs use one for all. */
static uint64_t rows_of(const ep_plan *plan, int rank)
{
    return (uint64_t)(cuda_has_capacity(plan) ? plan->args.max_recv_tokens
                                              : ((const struct ep_group_plan *)plan->impl)->rows_on[rank]);
}

ep_status cuda_sync_stages(const struct cuda_call *call, const ep_plan *plan, const size_t row_bytes[EP_GROUP_AT_COUNT],
                           enum ep_group_phase phase)
{
    struct cuda_comm *cuda = call->cuda;
    bool captured = call->capture, stale = false;

    atomic_store_explicit(&cuda->ctrl->called[captured], ++cuda->called[captured], memory_order_release);
    for (int i = 0; i < cuda->group.nlocal * EP_GROUP_AT_COUNT; i++) {
        int rank = cuda->group.first + i / EP_GROUP_AT_COUNT, which = i % EP_GROUP_AT_COUNT;
        uint64_t needed = rows_of(plan, rank) * row_bytes[which], there;
        struct cuda_peer *peer = &cuda->peers[rank];

        if (!cuda_is_peer(cuda, rank) || needed <= peer->stage_bytes[which])
            continue;
        there = atomic_load_explicit(&peer->ctrl->stage_bytes[which], memory_order_acquire);
        if (there < needed) {
            /* It may be waiting for this rank. */
            ep_group_ring_rank(&cuda->group, rank);
            EP_TRY(wait_for_stage(cuda, rank, which, needed, captured, phase));
            if (!captured) /* a new member captures alone, so what it has counted says nothing about the next call */
                there = needed;
        }
        peer->stage_bytes[which] = there;
        stale = true;
    }
    return stale ? cuda_map_new(cuda) : EP_OK;
}

static bool is_mapped_by_all(const struct cuda_comm *cuda, uint32_t published)
{
    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++) {
        const struct cuda_ctrl *ctrl = cuda->peers[rank].ctrl;

        if (cuda_is_peer(cuda, rank) &&
            (int32_t)(atomic_load_explicit(&ctrl->mapped[cuda->group.local], memory_order_acquire) - published) < 0)
            return false;
    }
    return true;
}

ep_status cuda_await_mapped(struct cuda_comm *cuda, const uint32_t words[2], bool *ret_mapped)
{
    struct cuda_allocation *allocation = &cuda->allocations[words[0] >> CUDA_GENERATION_BITS];
    struct cuda_backoff backoff = {.begin_ns = 0};
    uint64_t limit = 0;

    *ret_mapped = true;
    if (atomic_load(&allocation->mapped))
        return EP_OK;
    while (!is_mapped_by_all(cuda, allocation->published)) {
        if (!limit)
            limit = ep_now_ns() + MAP_WAIT_NS;
        EP_TRY(cuda_check(cuda));
        *ret_mapped = ep_now_ns() < limit;
        if (!*ret_mapped)
            return EP_OK;
        cuda_backoff(&backoff);
    }
    atomic_store(&allocation->mapped, true);
    return EP_OK;
}

/* The mapping of the allocation in this process. */
static ep_status find_mapping(struct cuda_comm *cuda, int rank, const struct ep_group_address *address,
                              struct cuda_mapping *ret_mapping)
{
    ep_status status;

    if (rank == cuda->group.comm->rank) {
        pthread_mutex_lock(&cuda->memory_lock);
        *ret_mapping = (struct cuda_mapping){.base = cuda->allocations[address->slot].base,
                                             .bytes = cuda->allocations[address->slot].bytes};
        pthread_mutex_unlock(&cuda->memory_lock);
        return EP_OK;
    }
    pthread_mutex_lock(&cuda->map_lock);
    status = map_slot(cuda, rank, (int)address->slot, address->generation);
    *ret_mapping = cuda->peers[rank].mappings[address->slot];
    pthread_mutex_unlock(&cuda->map_lock);
    return status;
}

ep_status cuda_map(struct cuda_comm *cuda, int rank, const struct ep_group_address *address, size_t bytes,
                   void **ret_address)
{
    struct cuda_mapping mapping;
    struct ep_group_address copy;

    ep_group_read_shared(&copy, address, sizeof(copy));
    *ret_address = NULL;
    if (!bytes)
        return EP_OK;
    if (rank < cuda->group.first || rank >= cuda_end_of_node(cuda))
        return ep_fail(EP_E_UNSUPPORTED, "rank %d is of another node: its memory cannot be mapped", rank);
    if (copy.slot >= CUDA_SLOTS || !copy.generation)
        return ep_group_fail_address(rank, &copy, bytes, "no such allocation");
    EP_TRY(find_mapping(cuda, rank, &copy, &mapping));
    if (!mapping.base || copy.offset > mapping.bytes || bytes > mapping.bytes - copy.offset || copy.offset % 16)
        return ep_group_fail_address(rank, &copy, bytes, "outside of the allocation");
    *ret_address = (char *)mapping.base + copy.offset;
    return EP_OK;
}

/*
 * A peer that registers the same memory again names it by the same words, and it may be mapped elsewhere then. Only the
 * sizes are cleared, which makes kernels look up the address: a launched graph may be reading the rest.
 */
static ep_status forget_addresses(struct cuda_comm *cuda)
{
    struct cuda_found *found = &cuda->signals->found[0][0];

    cuda->last_shape[0].blocks = cuda->last_shape[1].blocks = 0; /* repeat_bare() of the module needs them */
    CUDA_TRY(cudaMemset2DAsync(found->bytes, sizeof(*found), 0, sizeof(found->bytes),
                               (size_t)CUDA_KINDS * CUDA_MAX_RANKS, cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(cuda->internal_stream));
    return EP_OK;
}

ep_status cuda_unmap_freed(struct cuda_comm *cuda)
{
    bool unmapped = false;

    pthread_mutex_lock(&cuda->map_lock);
    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++) {
        struct cuda_peer *peer = &cuda->peers[rank];
        uint32_t frees = peer->ctrl ? atomic_load_explicit(&peer->ctrl->frees, memory_order_acquire) : 0;

        if (frees == peer->frees_seen)
            continue;
        peer->frees_seen = frees;
        for (int slot = 0; slot < CUDA_SLOTS; slot++) {
            if (!peer->mappings[slot].generation ||
                peer->mappings[slot].generation == atomic_load(&peer->ctrl->slot[slot].generation))
                continue;
            unmap_slot(cuda, rank, slot);
            unmapped = true;
        }
    }
    pthread_mutex_unlock(&cuda->map_lock);
    return unmapped ? forget_addresses(cuda) : EP_OK;
}

void cuda_unmap_all(struct cuda_comm *cuda)
{
    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++) {
        struct cuda_peer *peer = &cuda->peers[rank];

        for (int slot = 0; slot < CUDA_SLOTS; slot++)
            unmap(peer, &peer->mappings[slot]);
        cuda_set_mapped_by(cuda, rank, false);
    }
}
