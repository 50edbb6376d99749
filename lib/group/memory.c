/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Symmetric memory of the host: each allocation is a segment of its own. Its name goes into the owner's slot
 * table; a peer maps it when an operation first names it. So nothing has to be exchanged at allocation, a freed
 * allocation really gives its pages back, and no rank maps what it never touches.
 */
#include "group/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* An owner that does not answer is asked again, after a look at the group. */
#define ASK_MS 100

/* A process that is being ended has no descriptors some time before it is dead. */
#define ENDING_MS 1000

static _Thread_local int failed_owner = -1;

/* Tells the peers of a segment, in a slot of its own. Under the lock. */
static ep_status publish(struct host_comm *host, const struct ep_shm *shm, enum host_memory kind)
{
    struct host_slot *slot;
    int index;

    for (index = 0; index < HOST_SLOTS; index++)
        if (!host->allocations[index].shm.base)
            break;
    if (index == HOST_SLOTS)
        return ep_fail(EP_E_MEMORY, "this rank already has %d allocations", HOST_SLOTS);
    slot = &host->control->slot[index];
    EP_TRY(ep_shm_get_name(shm, &slot->name));
    host->allocations[index] =
        (struct host_allocation){.shm = *shm, .generation = ++host->next_generation, .kind = kind};
    atomic_store_explicit(&slot->generation, host->next_generation, memory_order_release);
    return EP_OK;
}

static ep_status alloc(struct host_comm *host, size_t bytes, bool sparse, enum host_memory kind, void **ret_memory)
{
    static const char *const calls[] = {[HOST_MEMORY_INTERNAL] = "memory of the library",
                                        [HOST_MEMORY_SYMMETRIC] = "ep_alloc",
                                        [HOST_MEMORY_LOCAL] = "ep_alloc_local"};
    struct ep_shm shm;
    ep_status status = sparse ? ep_shm_new_sparse(bytes, &shm) : ep_shm_new(bytes, &shm);

    if (status != EP_OK)
        return ep_fail_prefix(status, "%s: ", calls[kind]);
    pthread_mutex_lock(&host->memory_lock);
    status = publish(host, &shm, kind);
    pthread_mutex_unlock(&host->memory_lock);
    if (status != EP_OK) {
        ep_shm_done(&shm);
        return ep_fail_prefix(status, "%s: ", calls[kind]);
    }
    *ret_memory = shm.base;
    return EP_OK;
}

ep_status host_alloc_internal(struct host_comm *host, size_t bytes, void **ret_memory)
{
    return alloc(host, bytes, false, HOST_MEMORY_INTERNAL, ret_memory);
}

ep_status host_alloc_sparse(struct host_comm *host, size_t bytes, void **ret_memory)
{
    return alloc(host, bytes, true, HOST_MEMORY_INTERNAL, ret_memory);
}

/* Index of the allocation that begins at `memory`, -1 if there is none. Under the lock. */
static int find_start(struct host_comm *host, const void *memory)
{
    for (int index = 0; index < HOST_SLOTS; index++)
        if (host->allocations[index].shm.base && host->allocations[index].shm.base == memory)
            return index;
    return -1;
}

ep_status host_reserve(struct host_comm *host, const void *memory, size_t offset, size_t bytes)
{
    ep_status status = EP_OK;
    int index;

    pthread_mutex_lock(&host->memory_lock);
    index = find_start(host, memory);
    if (index >= 0)
        status = ep_shm_reserve(&host->allocations[index].shm, offset, bytes);
    pthread_mutex_unlock(&host->memory_lock);
    return status;
}

static void release(struct host_comm *host, int index)
{
    atomic_store_explicit(&host->control->slot[index].generation, 0, memory_order_release);
    atomic_fetch_add(&host->control->frees, 1);
    ep_shm_done(&host->allocations[index].shm);
    host->allocations[index] = (struct host_allocation){.generation = 0};
}

void host_free_internal(struct host_comm *host, void *memory)
{
    int index;

    if (!memory)
        return;
    pthread_mutex_lock(&host->memory_lock);
    index = find_start(host, memory);
    if (index >= 0)
        release(host, index);
    pthread_mutex_unlock(&host->memory_lock);
}

ep_status host_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    return alloc(host_of(comm), bytes, false, HOST_MEMORY_SYMMETRIC, ret_memory);
}

ep_status host_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory)
{
    return alloc(host_of(comm), bytes, false, HOST_MEMORY_LOCAL, ret_memory);
}

static ep_status free_kind(ep_comm *comm, void *memory, enum host_memory kind, const char *call, const char *origin)
{
    struct host_comm *host = host_of(comm);
    int index;

    pthread_mutex_lock(&host->memory_lock);
    index = find_start(host, memory);
    if (index >= 0 && host->allocations[index].kind == kind)
        release(host, index);
    else
        index = -1;
    pthread_mutex_unlock(&host->memory_lock);
    if (index < 0)
        return ep_fail(EP_E_ARG, "%s: memory %p is not from %s of this communicator", call, memory, origin);
    return EP_OK;
}

ep_status host_free(ep_comm *comm, void *memory)
{
    EP_TRY(host_drain(host_of(comm)));
    return free_kind(comm, memory, HOST_MEMORY_SYMMETRIC, "ep_free", "ep_alloc");
}

ep_status host_free_local(ep_comm *comm, void *memory)
{
    return free_kind(comm, memory, HOST_MEMORY_LOCAL, "ep_free_local", "ep_alloc_local");
}

/* Is a byte of it in a page of an allocation? Under the lock. */
static bool is_taken(const struct host_comm *host, const void *memory, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)memory;

    for (int index = 0; index < HOST_SLOTS; index++) {
        const struct ep_shm *shm = &host->allocations[index].shm;
        uintptr_t base = (uintptr_t)shm->base;
        size_t pages = shm->bytes / page + (shm->bytes % page || !shm->bytes);

        if (base && (at < base ? base - at < bytes : (at - base) / page < pages))
            return true;
    }
    return false;
}

/* Under the lock. */
static ep_status check_free(const struct host_comm *host, const void *memory, size_t bytes)
{
    return is_taken(host, memory, bytes) ? ep_fail(EP_E_ARG, "part of it is registered or allocated already") : EP_OK;
}

ep_status host_register(ep_comm *comm, void *memory, size_t bytes)
{
    struct host_comm *host = host_of(comm);
    struct ep_shm shm;
    ep_status status;

    /* Before it is looked at, so that it is not sealed in vain; and again, because that is done without the lock. */
    pthread_mutex_lock(&host->memory_lock);
    status = check_free(host, memory, bytes);
    pthread_mutex_unlock(&host->memory_lock);
    if (status == EP_OK)
        status = ep_shm_adopt(memory, bytes, &shm);
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_register: memory %p: ", memory);
    pthread_mutex_lock(&host->memory_lock);
    status = check_free(host, memory, bytes);
    if (status == EP_OK)
        status = publish(host, &shm, HOST_MEMORY_REGISTERED);
    pthread_mutex_unlock(&host->memory_lock);
    if (status == EP_OK)
        return EP_OK;
    ep_shm_done(&shm);
    return ep_fail_prefix(status, "ep_register: memory %p: ", memory);
}

ep_status host_unregister(ep_comm *comm, void *memory)
{
    return free_kind(comm, memory, HOST_MEMORY_REGISTERED, "ep_unregister", "ep_register");
}

bool host_find(struct host_comm *host, const void *memory, size_t bytes, struct host_where *ret_where)
{
    uintptr_t at = (uintptr_t)memory;
    bool found = false;

    pthread_mutex_lock(&host->memory_lock);
    for (int index = 0; index < HOST_SLOTS && !found; index++) {
        const struct ep_shm *shm = &host->allocations[index].shm;
        uintptr_t base = (uintptr_t)shm->base;

        if (!shm->base || at < base || at - base > shm->bytes || shm->bytes - (at - base) < bytes)
            continue;
        *ret_where = (struct host_where){
            .slot = (uint32_t)index, .generation = host->allocations[index].generation, .offset = at - base};
        found = true;
    }
    pthread_mutex_unlock(&host->memory_lock);
    return found;
}

static ep_status fail_place(int rank, const struct host_where *where, size_t bytes, const char *what)
{
    return ep_fail(
        EP_E_MISMATCH,
        "what rank %d has published is damaged: %zu bytes at offset %llu of allocation %u, generation %u: %s", rank,
        bytes, (unsigned long long)where->offset, where->slot, where->generation, what);
}

ep_status host_attach_slot(struct host_comm *host, int rank, const struct host_where *where, size_t bytes,
                           struct ep_shm *ret_shm)
{
    const struct host_peer *peer = &host->peers[rank];
    struct ep_shm_name name;

    if (where->slot >= HOST_SLOTS || !where->generation)
        return fail_place(rank, where, bytes, "there is no such allocation");
    host_read_shared(&name, &peer->control->slot[where->slot].name, sizeof(name));
    if (name.bytes < bytes)
        return fail_place(rank, where, bytes, "the segment is shorter");
    return host_attach(host, rank, &name, host->comm->config.timeout_ms, ret_shm);
}

/* The mapping of a peer's allocation, made anew when the slot has another one than last time. */
static ep_status map_slot(struct host_comm *host, int rank, const struct host_where *where, struct ep_shm **ret_shm)
{
    struct host_peer *peer = &host->peers[rank];
    struct host_mapping *mapping;

    if (!peer->mappings) {
        peer->mappings = calloc(HOST_SLOTS, sizeof(*peer->mappings));
        if (!peer->mappings)
            return ep_fail(EP_E_MEMORY, "mappings of rank %d", rank);
    }
    mapping = &peer->mappings[where->slot];
    if (mapping->generation != where->generation) {
        ep_status status;

        ep_shm_done(&mapping->shm);
        mapping->generation = 0;
        status = host_attach_slot(host, rank, where, 0, &mapping->shm);
        if (status != EP_OK)
            return ep_fail_prefix(status, "symmetric memory of rank %d: ", rank);
        mapping->generation = where->generation;
    }
    *ret_shm = &mapping->shm;
    return EP_OK;
}

ep_status host_map(struct host_comm *host, int rank, const struct host_where *where, size_t bytes, void **ret_address)
{
    struct host_where place;
    struct ep_shm own, *shm = &own;

    host_read_shared(&place, where, sizeof(place));
    *ret_address = NULL;
    failed_owner = -1;
    if (!bytes)
        return EP_OK;
    if (place.slot >= HOST_SLOTS || !place.generation)
        return fail_place(rank, &place, bytes, "there is no such allocation");
    if (rank == host->comm->rank) {
        pthread_mutex_lock(&host->memory_lock);
        own = host->allocations[place.slot].shm;
        pthread_mutex_unlock(&host->memory_lock);
    } else {
        EP_TRY(map_slot(host, rank, &place, &shm));
    }
    if (!shm->base || place.offset > shm->bytes || bytes > shm->bytes - place.offset || place.offset % 16)
        return fail_place(rank, &place, bytes, "it is not inside");
    *ret_address = (char *)shm->base + place.offset;
    return EP_OK;
}

void host_sweep(struct host_comm *host)
{
    for (int i = 0; i < host->nlocal; i++) {
        struct host_peer *peer = &host->peers[host->first + i];
        uint32_t frees = atomic_load_explicit(&peer->control->frees, memory_order_acquire);

        if (!peer->mappings || frees == peer->frees_seen)
            continue;
        peer->frees_seen = frees;
        for (int slot = 0; slot < HOST_SLOTS; slot++) {
            struct host_mapping *mapping = &peer->mappings[slot];

            if (mapping->generation && mapping->generation != atomic_load(&peer->control->slot[slot].generation)) {
                ep_shm_done(&mapping->shm);
                mapping->generation = 0;
            }
        }
    }
}

ep_status host_stage(struct host_comm *host, int which, size_t bytes, void **ret_memory)
{
    if (host->stage_bytes[which] < bytes) {
        host_free_internal(host, host->stage[which]);
        host->stage[which] = NULL;
        host->stage_bytes[which] = 0;
        EP_TRY(host_alloc_internal(host, bytes, &host->stage[which]));
        host->stage_bytes[which] = bytes;
    }
    *ret_memory = host->stage[which];
    return EP_OK;
}

void host_memory_close(struct host_comm *host)
{
    for (int index = 0; host->control && index < HOST_SLOTS; index++)
        if (host->allocations[index].shm.base)
            release(host, index);
    for (int rank = 0; host->peers && rank < host->comm->nranks; rank++) {
        struct host_mapping *mappings = host->peers[rank].mappings;

        for (int slot = 0; mappings && slot < HOST_SLOTS; slot++)
            ep_shm_done(&mappings[slot].shm);
        free(mappings);
        host->peers[rank].mappings = NULL;
    }
}

size_t host_comm_bytes(const ep_comm *comm)
{
    struct host_comm *host = host_of(comm);
    size_t bytes = sizeof(*host) + (size_t)comm->nranks * sizeof(*host->peers) + (size_t)host->object_bytes;
    struct stat control;

    if (fstat(host->shm.fd, &control) == 0)
        bytes += (size_t)control.st_blocks * 512;

    pthread_mutex_lock(&host->memory_lock);
    /* Staging of the low-latency layout is sparse: what counts is the pages that exist. */
    for (int index = 0; index < HOST_SLOTS; index++) {
        struct stat info;

        if (host->allocations[index].kind == HOST_MEMORY_INTERNAL && fstat(host->allocations[index].shm.fd, &info) == 0)
            bytes += (size_t)info.st_blocks * 512;
    }
    pthread_mutex_unlock(&host->memory_lock);
    for (int rank = 0; rank < comm->nranks; rank++)
        if (host->peers[rank].mappings)
            bytes += HOST_SLOTS * sizeof(struct host_mapping);
    if (host->streams)
        bytes += ep_streams_bytes(host->streams);
    return bytes;
}

/* --- segments of the peers -------------------------------------------------------------------------------------- */

int host_take_failed_owner(void)
{
    int owner = failed_owner;

    failed_owner = -1;
    return owner;
}

static void find_owner(const struct host_comm *host, int rank, struct ep_shm_owner *ret_owner)
{
    static const struct ep_shm_address none;
    const struct host_peer *peer = &host->peers[rank];

    *ret_owner = (struct ep_shm_owner){.process = &peer->process, .timeout_ms = host->comm->config.timeout_ms};
    if (memcmp(&peer->address, &none, sizeof(none)) != 0)
        ret_owner->address = &peer->address;
}

ep_status host_find_fate(const struct host_comm *host, int rank)
{
    const struct host_control *control = host->peers[rank].control;
    uint64_t deadline_ns = ep_deadline_ns(ENDING_MS);
    struct timespec backoff = {.tv_nsec = 1000000};
    bool unseen = host->peers[rank].process.pidfd < 0 && !host->peers[rank].process.pid && !control;

    for (;;) {
        bool over = unseen || ep_now_ns() >= deadline_ns;

        if (host_peer_dead(host, rank))
            return EP_E_PEER_DEAD;
        if (control && atomic_load(&control->left))
            return EP_E_PEER_LEFT;
        /* Where the group has failed already, that explains it. */
        if (over || host->peers[rank].same_process || atomic_load(&host_arbiter(host)->group_failure))
            return EP_OK;
        nanosleep(&backoff, NULL);
    }
}

ep_status host_attach(struct host_comm *host, int rank, const struct ep_shm_name *name, int timeout_ms,
                      struct ep_shm *ret_shm)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    char text[EP_ERROR_TEXT_BYTES];
    struct ep_shm_owner owner;
    ep_status status, fate;
    bool at_owner = false;

    failed_owner = -1;
    /* A name of another process would be memory of that one, or of this. */
    if (name->process != host->peers[rank].key)
        return ep_fail(EP_E_MISMATCH, "what rank %d has published is damaged: a segment is not of its process", rank);
    find_owner(host, rank, &owner);
    owner.ret_at_owner = &at_owner;
    if (owner.timeout_ms > ASK_MS)
        owner.timeout_ms = ASK_MS;
    do {
        /* The owner may have to answer, and may have stopped: who waits for us shall not take us for it. */
        host_note_wait(host, rank, HOST_ATTACH);
        status = ep_shm_attach(name, &owner, ret_shm);
    } while (status == EP_E_TIMEOUT && ep_now_ns() < deadline_ns && !host_peer_dead(host, rank) &&
             !atomic_load(&host_arbiter(host)->group_failure));
    host_note_wait_end(host);
    if (status != EP_OK && at_owner)
        failed_owner = rank;
    /* The segment says nothing about its owner: a rank may live and have released it, or be out of sight. */
    if (status != EP_E_STATE && status != EP_E_UNSUPPORTED && status != EP_E_TIMEOUT)
        return status != EP_OK && at_owner ? ep_fail_prefix(status, "rank %d: ", rank) : status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    fate = host_find_fate(host, rank);
    if (fate != EP_OK)
        return ep_fail(fate, "rank %d %s: %s", rank, fate == EP_E_PEER_DEAD ? "died" : "left the group", text);
    if (status == EP_E_STATE)
        return ep_fail(EP_E_PEER_LEFT, "rank %d has freed memory that rank %d has not read yet: %s", rank,
                       host->comm->rank, text);
    if (status == EP_E_TIMEOUT)
        return ep_fail(EP_E_TIMEOUT, "rank %d did not hand out its memory within %d ms%s", rank, timeout_ms,
                       host_blindness(host, rank));
    return ep_fail(status, "%s", text);
}
