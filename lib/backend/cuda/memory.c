/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Symmetric memory of the CUDA backend. As on the host, an allocation is put into the owner's slot table, and a peer
 * maps it when an operation first names it: by its IPC handle, or as it is when both are of one process.
 */
#include "backend/cuda/cuda.h"

#include <string.h>

void cuda_publish_slot(struct cuda_slot *slot, const struct cuda_mapping *allocation, const cudaIpcMemHandle_t *handle)
{
    slot->base = allocation->base;
    slot->bytes = allocation->bytes;
    slot->handle = *handle;
    atomic_store_explicit(&slot->generation, allocation->generation, memory_order_release);
}

static ep_status alloc_symmetric(struct cuda_comm *cuda, size_t bytes, bool internal, void **ret_memory)
{
    size_t whole = (bytes + CUDA_GRANULE) / CUDA_GRANULE * CUDA_GRANULE;
    cudaIpcMemHandle_t handle;
    void *base = NULL;
    cudaError_t error;
    ep_status status;
    int slot;

    cuda_settle(cuda->device);
    error = cudaMalloc(&base, whole);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        cuda_settle(CUDA_ALL_DEVICES);
        error = cudaMalloc(&base, whole);
    }
    status = cuda_status(error, "cudaMalloc");
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_alloc: %zu bytes: ", whole);
    status = cuda_status(cudaIpcGetMemHandle(&handle, base), "cudaIpcGetMemHandle");
    if (status != EP_OK)
        goto free_base;
    pthread_mutex_lock(&cuda->memory_lock);
    for (slot = 0; slot < CUDA_SLOTS; slot++)
        if (!cuda->allocations[slot].base)
            break;
    if (slot == CUDA_SLOTS) {
        status = ep_fail(EP_E_MEMORY, "ep_alloc: this rank already has %d allocations", CUDA_SLOTS);
    } else {
        cuda->allocations[slot] = (struct cuda_allocation){
            .base = base, .bytes = whole, .generation = ++cuda->next_generation, .internal = internal};
        cuda_publish_slot(&cuda->board->slot[slot],
                          &(struct cuda_mapping){.base = base, .bytes = whole, .generation = cuda->next_generation},
                          &handle);
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    if (status == EP_OK) {
        *ret_memory = base;
        return EP_OK;
    }
free_base:
    cudaFree(base);
    return status;
}

ep_status cuda_alloc_internal(struct cuda_comm *cuda, size_t bytes, void **ret_memory)
{
    return alloc_symmetric(cuda, bytes, true, ret_memory);
}

ep_status cuda_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(cuda_enter(cuda, &scope));
    status = alloc_symmetric(cuda, bytes, false, ret_memory);
    cuda_leave(&scope);
    return status;
}

/* Takes the allocation that begins at `memory` out of the table; false if there is none of that kind. */
static bool withdraw(struct cuda_comm *cuda, const void *memory, bool internal)
{
    bool found = false;

    pthread_mutex_lock(&cuda->memory_lock);
    for (int slot = 0; slot < CUDA_SLOTS && !found; slot++) {
        if (!cuda->allocations[slot].base || cuda->allocations[slot].base != memory ||
            cuda->allocations[slot].internal != internal)
            continue;
        atomic_store_explicit(&cuda->board->slot[slot].generation, 0, memory_order_release);
        cuda->allocations[slot] = (struct cuda_allocation){.base = NULL};
        found = true;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    if (found)
        atomic_fetch_add(&cuda->board->frees, 1);
    return found;
}

static void unmap(const struct cuda_peer *peer, struct cuda_mapping *mapping)
{
    if (mapping->generation && !peer->same_process)
        cudaIpcCloseMemHandle(mapping->base);
    *mapping = (struct cuda_mapping){.base = NULL};
}

static void unmap_stale(struct cuda_comm *cuda)
{
    for (int rank = 0; rank < cuda->host.comm->nranks; rank++) {
        struct cuda_peer *peer = &cuda->peers[rank];
        uint32_t frees = atomic_load_explicit(&peer->board->frees, memory_order_acquire);

        if (frees == peer->frees_seen)
            continue;
        peer->frees_seen = frees;
        for (int slot = 0; slot < CUDA_SLOTS; slot++)
            if (peer->mappings[slot].generation &&
                peer->mappings[slot].generation != atomic_load(&peer->board->slot[slot].generation))
                unmap(peer, &peer->mappings[slot]);
    }
}

ep_status cuda_free(ep_comm *comm, void *memory)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    if (!withdraw(cuda, memory, false))
        return ep_fail(EP_E_ARG, "ep_free: memory %p is not from ep_alloc of this communicator", memory);
    EP_TRY(cuda_enter(cuda, &scope));
    /* An exported allocation may be freed only when nobody has it mapped. */
    status = host_barrier(comm);
    unmap_stale(cuda);
    if (status == EP_OK)
        status = host_barrier(comm);
    if (status == EP_OK)
        status = cuda_status(cudaFree(memory), "cudaFree");
    cuda_leave(&scope);
    return status;
}

bool cuda_find(struct cuda_comm *cuda, const void *memory, size_t bytes, struct host_where *ret_where)
{
    uintptr_t at = (uintptr_t)memory;
    bool found = false;

    pthread_mutex_lock(&cuda->memory_lock);
    for (int slot = 0; slot < CUDA_SLOTS && !found; slot++) {
        const struct cuda_allocation *allocation = &cuda->allocations[slot];
        uintptr_t base = (uintptr_t)allocation->base;

        if (!base || at < base || at - base > allocation->bytes || allocation->bytes - (at - base) < bytes)
            continue;
        *ret_where =
            (struct host_where){.slot = (uint32_t)slot, .generation = allocation->generation, .offset = at - base};
        found = true;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    return found;
}

ep_status cuda_map_slot(struct cuda_comm *cuda, int rank, const struct cuda_slot *slot, uint32_t generation,
                        struct cuda_mapping *mapping)
{
    struct cuda_peer *peer = &cuda->peers[rank];
    ep_status status = EP_OK;
    cudaIpcMemHandle_t handle;
    uint64_t bytes;
    void *base;

    if (mapping->generation == generation)
        return EP_OK;
    host_read_shared(&base, &slot->base, sizeof(base));
    host_read_shared(&bytes, &slot->bytes, sizeof(bytes));
    host_read_shared(&handle, &slot->handle, sizeof(handle));
    unmap(peer, mapping);
    if (!peer->same_process)
        status =
            cuda_status(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    if (status != EP_OK)
        return ep_fail_prefix(status, "symmetric memory of rank %d: ", rank);
    *mapping = (struct cuda_mapping){.base = base, .bytes = bytes, .generation = generation};
    return EP_OK;
}

static ep_status fail_place(int rank, const struct host_where *where, size_t bytes)
{
    return ep_fail(EP_E_MISMATCH,
                   "what rank %d has published is damaged: %zu bytes at offset %llu of allocation %u, generation %u",
                   rank, bytes, (unsigned long long)where->offset, where->slot, where->generation);
}

ep_status cuda_map(struct cuda_comm *cuda, int rank, const struct host_where *where, size_t bytes, void **ret_address)
{
    struct cuda_peer *peer = &cuda->peers[rank];
    struct cuda_mapping own, *mapping = &own;
    struct host_where place;

    host_read_shared(&place, where, sizeof(place));
    *ret_address = NULL;
    if (!bytes)
        return EP_OK;
    if (place.slot >= CUDA_SLOTS || !place.generation)
        return fail_place(rank, &place, bytes);
    if (rank == cuda->host.comm->rank) {
        pthread_mutex_lock(&cuda->memory_lock);
        own = (struct cuda_mapping){.base = cuda->allocations[place.slot].base,
                                    .bytes = cuda->allocations[place.slot].bytes};
        pthread_mutex_unlock(&cuda->memory_lock);
    } else {
        mapping = &peer->mappings[place.slot];
        EP_TRY(cuda_map_slot(cuda, rank, &peer->board->slot[place.slot], place.generation, mapping));
    }
    if (!mapping->base || place.offset > mapping->bytes || bytes > mapping->bytes - place.offset || place.offset % 16)
        return fail_place(rank, &place, bytes);
    *ret_address = (char *)mapping->base + place.offset;
    return EP_OK;
}

void cuda_sweep(struct cuda_comm *cuda)
{
    /* A graph that is being made may name what would go. */
    if (cuda_is_capturing(cuda))
        return;
    unmap_stale(cuda);
    /* Everybody has swept in the operation after the one in which staging was replaced. */
    if (!cuda->retired_at || cuda->host.operation < cuda->retired_at + 1)
        return;
    for (int which = 0; which < HOST_AT_COUNT; which++) {
        cudaFree(cuda->retired[which]);
        cuda->retired[which] = NULL;
    }
    cuda->retired_at = 0;
}

ep_status cuda_stage(struct cuda_comm *cuda, int which, size_t bytes, void **ret_memory)
{
    if (cuda_is_capturing(cuda))
        return ep_fail(EP_E_ARG,
                       "the stream is being captured: outputs of ep_dispatch and inputs of ep_combine must be "
                       "memory of ep_alloc(), because staging memory may move before the graph is launched");
    if (cuda->stage_bytes[which] < bytes) {
        void *old = cuda->stage[which];

        cuda->stage[which] = NULL;
        cuda->stage_bytes[which] = 0;
        if (old) {
            withdraw(cuda, old, true);
            /* What waits there already is older, so it may wait no longer than this. */
            cudaFree(cuda->retired[which]);
            cuda->retired[which] = old;
            cuda->retired_at = cuda->host.operation + 1;
        }
        EP_TRY(alloc_symmetric(cuda, bytes, true, &cuda->stage[which]));
        cuda->stage_bytes[which] = bytes;
    }
    *ret_memory = cuda->stage[which];
    return EP_OK;
}

ep_status cuda_take(struct cuda_comm *cuda, size_t bytes, struct cuda_block *ret_block)
{
    int best = -1;

    pthread_mutex_lock(&cuda->memory_lock);
    for (int i = 0; i < CUDA_POOL; i++)
        if (cuda->pool[i].bytes >= bytes && (best < 0 || cuda->pool[i].bytes < cuda->pool[best].bytes))
            best = i;
    if (best >= 0) {
        *ret_block = cuda->pool[best];
        cuda->pool[best] = (struct cuda_block){.bytes = 0};
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    if (best >= 0)
        return EP_OK;
    ret_block->bytes = bytes + bytes / 4 + 4096;
    CUDA_TRY(cudaMalloc(&ret_block->memory, ret_block->bytes));
    return EP_OK;
}

void cuda_give(struct cuda_comm *cuda, const struct cuda_block *block)
{
    struct cuda_block out = *block;

    if (!block->memory)
        return;
    pthread_mutex_lock(&cuda->memory_lock);
    for (int i = 0; i < CUDA_POOL && out.memory; i++)
        if (!cuda->pool[i].memory) {
            cuda->pool[i] = out;
            out.memory = NULL;
        }
    pthread_mutex_unlock(&cuda->memory_lock);
    cudaFree(out.memory);
}

void cuda_memory_close(struct cuda_comm *cuda)
{
    for (int rank = 0; rank < cuda->host.comm->nranks; rank++) {
        struct cuda_peer *peer = &cuda->peers[rank];

        for (int slot = 0; slot < CUDA_SLOTS; slot++)
            unmap(peer, &peer->mappings[slot]);
        unmap(peer, &peer->signals);
        cuda_note_reach(cuda, rank, false);
    }
    for (int i = 0; i < CUDA_POOL; i++)
        cudaFree(cuda->pool[i].memory);
    cuda_leave_memory(cuda);
}
