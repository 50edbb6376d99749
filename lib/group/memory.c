/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Symmetric memory of the host: each allocation is a segment of its own. Its name is in the slot table of the owner; a
 * peer maps it when an operation first refers to it. So an allocation needs no exchange, a free returns the pages, and
 * no rank maps memory that it does not use.
 */
#include "group/memory.h"
#include "base/array.h"

#include "group/peers.h"
#include "group/queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A process that is exiting loses its descriptors before it is reported dead. */
#define EXIT_MS 1000

/* Publishes a segment in a slot of its own. Under the lock. */
static ep_status publish(struct ep_group *group, const struct ep_shm *shm, enum ep_group_memory kind)
{
    struct ep_group_slot *slot;
    int index;

    for (index = 0; index < EP_GROUP_SLOTS; index++)
        if (!group->allocations[index].shm.base)
            break;
    if (index == EP_GROUP_SLOTS)
        return ep_fail(EP_E_MEMORY, "this rank already has %d allocations", EP_GROUP_SLOTS);
    slot = &group->control->slot[index];
    EP_TRY(ep_shm_get_name(shm, &slot->name));
    group->allocations[index] =
        (struct ep_group_allocation){.shm = *shm, .generation = ++group->next_generation, .kind = kind};
    atomic_store_explicit(&slot->generation, group->next_generation, memory_order_release);
    return EP_OK;
}

static ep_status alloc(struct ep_group *group, size_t bytes, bool sparse, enum ep_group_memory kind, void **ret_memory)
{
    static const char *const calls[] = {[EP_GROUP_MEMORY_INTERNAL] = "internal memory",
                                        [EP_GROUP_MEMORY_SYMMETRIC] = "ep_alloc",
                                        [EP_GROUP_MEMORY_LOCAL] = "ep_alloc_local"};
    struct ep_shm shm;
    ep_status status = sparse ? ep_shm_new_sparse(bytes, &shm) : ep_shm_new(bytes, &shm);

    if (status == EP_OK) {
        pthread_mutex_lock(&group->memory_lock);
        status = publish(group, &shm, kind);
        pthread_mutex_unlock(&group->memory_lock);
        if (status == EP_OK)
            *ret_memory = shm.base;
        else
            ep_shm_done(&shm);
    }
    return status == EP_OK ? EP_OK : ep_fail_prefix(status, "%s: ", calls[kind]);
}

ep_status ep_group_alloc_internal(struct ep_group *group, size_t bytes, void **ret_memory)
{
    return alloc(group, bytes, false, EP_GROUP_MEMORY_INTERNAL, ret_memory);
}

ep_status ep_group_alloc_sparse(struct ep_group *group, size_t bytes, void **ret_memory)
{
    return alloc(group, bytes, true, EP_GROUP_MEMORY_INTERNAL, ret_memory);
}

/* Index of the allocation that begins at `memory`, -1 if there is none. Under the lock. */
static int find_start(struct ep_group *group, const void *memory)
{
    return FIRST_OF(index, EP_GROUP_SLOTS,
                    group->allocations[index].shm.base && group->allocations[index].shm.base == memory);
}

ep_status ep_group_reserve(struct ep_group *group, const void *memory, size_t offset, size_t bytes)
{
    ep_status status = EP_OK;
    int index;

    pthread_mutex_lock(&group->memory_lock);
    index = find_start(group, memory);
    if (index >= 0)
        status = ep_shm_reserve(&group->allocations[index].shm, offset, bytes);
    pthread_mutex_unlock(&group->memory_lock);
    return status;
}

static void release(struct ep_group *group, int index)
{
    atomic_store_explicit(&group->control->slot[index].generation, 0, memory_order_release);
    atomic_fetch_add(&group->control->frees, 1);
    ep_shm_done(&group->allocations[index].shm);
    group->allocations[index] = (struct ep_group_allocation){.generation = 0};
}

/* Frees the allocation of this kind that begins at `memory`; false: there is none. */
static bool free_memory(struct ep_group *group, const void *memory, enum ep_group_memory kind)
{
    bool found;
    int index;

    pthread_mutex_lock(&group->memory_lock);
    index = find_start(group, memory);
    found = index >= 0 && group->allocations[index].kind == kind;
    if (found)
        release(group, index);
    pthread_mutex_unlock(&group->memory_lock);
    return found;
}

void ep_group_free_internal(struct ep_group *group, void *memory)
{
    (void)free_memory(group, memory, EP_GROUP_MEMORY_INTERNAL);
}

ep_status ep_group_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    return alloc(ep_group_of(comm), bytes, false, EP_GROUP_MEMORY_SYMMETRIC, ret_memory);
}

ep_status ep_group_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory)
{
    return alloc(ep_group_of(comm), bytes, false, EP_GROUP_MEMORY_LOCAL, ret_memory);
}

static ep_status free_kind(ep_comm *comm, void *memory, enum ep_group_memory kind, const char *call, const char *origin)
{
    return free_memory(ep_group_of(comm), memory, kind)
               ? EP_OK
               : ep_fail(EP_E_ARG, "%s: memory %p is not from %s of this communicator", call, memory, origin);
}

ep_status ep_group_free(ep_comm *comm, void *memory)
{
    EP_TRY(ep_group_drain(ep_group_of(comm)));
    return free_kind(comm, memory, EP_GROUP_MEMORY_SYMMETRIC, "ep_free", "ep_alloc");
}

ep_status ep_group_free_local(ep_comm *comm, void *memory)
{
    return free_kind(comm, memory, EP_GROUP_MEMORY_LOCAL, "ep_free_local", "ep_alloc_local");
}

bool ep_group_find(struct ep_group *group, const void *memory, size_t bytes, struct ep_group_address *ret_address)
{
    uintptr_t at = (uintptr_t)memory;
    bool found = false;

    pthread_mutex_lock(&group->memory_lock);
    for (int index = 0; index < EP_GROUP_SLOTS && !found; index++) {
        const struct ep_shm *shm = &group->allocations[index].shm;
        uintptr_t base = (uintptr_t)shm->base;

        if (!shm->base || at < base || at - base > shm->bytes || shm->bytes - (at - base) < bytes)
            continue;
        *ret_address = (struct ep_group_address){
            .slot = (uint32_t)index, .generation = group->allocations[index].generation, .offset = at - base};
        found = true;
    }
    pthread_mutex_unlock(&group->memory_lock);
    return found;
}

ep_status ep_group_fail_address(int rank, const struct ep_group_address *address, size_t bytes, const char *what)
{
    return ep_fail(
        EP_E_MISMATCH,
        "what rank %d has published is damaged: %zu bytes at offset %llu of allocation %u, generation %u: %s", rank,
        bytes, (unsigned long long)address->offset, address->slot, address->generation, what);
}

ep_status ep_group_attach_slot(struct ep_group *group, int rank, const struct ep_group_address *address, size_t bytes,
                               struct ep_shm *ret_shm)
{
    const struct ep_group_peer *peer = &group->peers[rank];
    struct ep_shm_name name;

    if (address->slot >= EP_GROUP_SLOTS || !address->generation)
        return ep_group_fail_address(rank, address, bytes, "no such allocation");
    ep_group_read_shared(&name, &peer->control->slot[address->slot].name, sizeof(name));
    if (name.bytes < bytes)
        return ep_group_fail_address(rank, address, bytes, "the segment is too short");
    return ep_group_attach(group, rank, &name, ret_shm);
}

/* The mapping of an allocation of a peer, made again when the slot has another allocation than last time. */
static ep_status map_slot(struct ep_group *group, int rank, const struct ep_group_address *address,
                          struct ep_shm **ret_shm)
{
    struct ep_group_peer *peer = &group->peers[rank];
    struct ep_group_mapping *mapping;

    if (!peer->mappings) {
        peer->mappings = calloc(EP_GROUP_SLOTS, sizeof(*peer->mappings));
        if (!peer->mappings)
            return ep_fail(EP_E_MEMORY, "no memory for mappings of rank %d", rank);
    }
    mapping = &peer->mappings[address->slot];
    if (mapping->generation != address->generation) {
        ep_status status;

        ep_shm_done(&mapping->shm);
        mapping->generation = 0;
        status = ep_group_attach_slot(group, rank, address, 0, &mapping->shm);
        if (status != EP_OK)
            return ep_fail_prefix(status, "symmetric memory of rank %d: ", rank);
        mapping->generation = address->generation;
    }
    *ret_shm = &mapping->shm;
    return EP_OK;
}

ep_status ep_group_map(struct ep_group *group, int rank, const struct ep_group_address *address, size_t bytes,
                       void **ret_address)
{
    struct ep_group_address copy;
    struct ep_shm own, *shm = &own;

    ep_group_read_shared(&copy, address, sizeof(copy));
    *ret_address = NULL;
    if (!bytes)
        return EP_OK;
    if (copy.slot >= EP_GROUP_SLOTS || !copy.generation)
        return ep_group_fail_address(rank, &copy, bytes, "no such allocation");
    if (rank == group->comm->rank) {
        pthread_mutex_lock(&group->memory_lock);
        own = group->allocations[copy.slot].shm;
        pthread_mutex_unlock(&group->memory_lock);
    } else {
        EP_TRY(map_slot(group, rank, &copy, &shm));
    }
    if (!shm->base || copy.offset > shm->bytes || bytes > shm->bytes - copy.offset || copy.offset % 16)
        return ep_group_fail_address(rank, &copy, bytes, "outside of the allocation");
    *ret_address = (char *)shm->base + copy.offset;
    return EP_OK;
}

void ep_group_unmap_stale(struct ep_group *group)
{
    for (int i = 0; i < group->nlocal; i++) {
        struct ep_group_peer *peer = &group->peers[group->first + i];
        uint32_t frees = !peer->control ? 0 : atomic_load_explicit(&peer->control->frees, memory_order_acquire);

        if (!peer->mappings || frees == peer->frees_seen)
            continue;
        peer->frees_seen = frees;
        for (int slot = 0; slot < EP_GROUP_SLOTS; slot++) {
            struct ep_group_mapping *mapping = &peer->mappings[slot];

            if (mapping->generation && mapping->generation != atomic_load(&peer->control->slot[slot].generation)) {
                ep_shm_done(&mapping->shm);
                mapping->generation = 0;
            }
        }
    }
}

ep_status ep_group_stage(struct ep_group *group, int which, size_t bytes, void **ret_memory)
{
    if (group->stage_bytes[which] < bytes) {
        ep_group_free_internal(group, group->stage[which]);
        group->stage[which] = NULL;
        group->stage_bytes[which] = 0;
        EP_TRY(ep_group_alloc_internal(group, bytes, &group->stage[which]));
        group->stage_bytes[which] = bytes;
    }
    *ret_memory = group->stage[which];
    return EP_OK;
}

void ep_group_memory_close(struct ep_group *group)
{
    for (int index = 0; group->control && index < EP_GROUP_SLOTS; index++)
        if (group->allocations[index].shm.base)
            release(group, index);
}

void ep_group_unmap_peers(struct ep_group *group)
{
    for (int rank = 0; group->peers && rank < group->comm->nranks; rank++) {
        struct ep_group_mapping *mappings = group->peers[rank].mappings;

        for (int slot = 0; mappings && slot < EP_GROUP_SLOTS; slot++)
            ep_shm_done(&mappings[slot].shm);
        free(mappings);
        group->peers[rank].mappings = NULL;
    }
}

void ep_group_free_stages(struct ep_group *group)
{
    for (int which = 0; which < EP_GROUP_AT_COUNT; which++) {
        ep_group_free_internal(group, group->stage[which]);
        group->stage[which] = NULL;
        group->stage_bytes[which] = 0;
    }
}

ep_status ep_group_move_memory(struct ep_group *group)
{
    ep_status status = EP_OK;

    pthread_mutex_lock(&group->memory_lock);
    for (int index = 0; status == EP_OK && index < EP_GROUP_SLOTS; index++) {
        struct ep_group_allocation *allocation = &group->allocations[index];

        if (!allocation->shm.base || allocation->kind == EP_GROUP_MEMORY_INTERNAL)
            continue;
        status = ep_shm_move(&allocation->shm);
    }
    pthread_mutex_unlock(&group->memory_lock);
    return status == EP_OK ? EP_OK : ep_fail_prefix(status, "ep_comm_regroup: ");
}

ep_status ep_group_publish_memory(struct ep_group *group)
{
    ep_status status = EP_OK;

    pthread_mutex_lock(&group->memory_lock);
    for (int index = 0; status == EP_OK && index < EP_GROUP_SLOTS; index++) {
        struct ep_group_slot *slot = &group->control->slot[index];

        if (!group->allocations[index].shm.base)
            continue;
        status = ep_shm_get_name(&group->allocations[index].shm, &slot->name);
        atomic_store_explicit(&slot->generation, group->allocations[index].generation, memory_order_release);
    }
    pthread_mutex_unlock(&group->memory_lock);
    return status;
}

size_t ep_group_bytes(const ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    size_t bytes = sizeof(*group) + (size_t)comm->nranks * sizeof(*group->peers) + (size_t)group->object_bytes;
    struct stat control;

    if (fstat(group->shm.fd, &control) == 0)
        bytes += (size_t)control.st_blocks * 512;

    pthread_mutex_lock(&group->memory_lock);
    /* Staging of the low-latency layout is sparse: count the pages that exist. */
    for (int index = 0; index < EP_GROUP_SLOTS; index++) {
        struct stat info;

        if (group->allocations[index].kind == EP_GROUP_MEMORY_INTERNAL &&
            fstat(group->allocations[index].shm.fd, &info) == 0)
            bytes += (size_t)info.st_blocks * 512;
    }
    pthread_mutex_unlock(&group->memory_lock);
    for (int rank = 0; rank < comm->nranks; rank++)
        if (group->peers[rank].mappings)
            bytes += EP_GROUP_SLOTS * sizeof(struct ep_group_mapping);
    if (group->streams)
        bytes += ep_streams_bytes(group->streams);
    return bytes;
}

/* --- segments of the peers -------------------------------------------------------------------------------------- */

/*
 * How a rank ended whose segment cannot be mapped: EP_E_PEER_DEAD, EP_E_PEER_LEFT, or EP_OK if there is no sign of it.
 * Waits up to a second for a process that is exiting.
 */
static ep_status find_peer_exit(const struct ep_group *group, int rank)
{
    const struct ep_group_control *control = group->peers[rank].control;
    uint64_t deadline_ns = ep_deadline_ns(EXIT_MS);
    struct timespec backoff = {.tv_nsec = 1000000};
    bool unreadable = group->peers[rank].process.pidfd < 0 && !group->peers[rank].process.pid && !control;

    for (;;) {
        bool expired = unreadable || ep_now_ns() >= deadline_ns;

        if (ep_group_peer_dead(group, rank))
            return EP_E_PEER_DEAD;
        if (control && ep_group_has_left(group, rank))
            return EP_E_PEER_LEFT;
        /* A failure of the group explains it. */
        if (expired || group->peers[rank].same_process || atomic_load(&ep_group_arbiter(group)->group_failure))
            return EP_OK;
        nanosleep(&backoff, NULL);
    }
}

ep_status ep_group_attach(struct ep_group *group, int rank, const struct ep_shm_name *name, struct ep_shm *ret_shm)
{
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status, peer_exit;

    /* A name of another process would map memory of that process, or of this one. */
    if (name->process != group->peers[rank].key)
        return ep_fail(EP_E_MISMATCH, "what rank %d has published is damaged: a segment is not of its process", rank);
    status = ep_shm_attach(name, group->peers[rank].process.pid, ret_shm);
    /* This does not tell whether the owner lives: it may have released the segment, or be invisible here. */
    if (status != EP_E_STATE && status != EP_E_UNSUPPORTED)
        return status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    peer_exit = find_peer_exit(group, rank);
    if (peer_exit != EP_OK)
        return ep_fail(peer_exit, "rank %d %s: %s", rank, peer_exit == EP_E_PEER_DEAD ? "died" : "left the group",
                       text);
    if (status == EP_E_STATE)
        return ep_fail(EP_E_PEER_LEFT, "rank %d has freed memory that rank %d has not read yet: %s", rank,
                       group->comm->rank, text);
    return ep_fail(status, "%s", text);
}
