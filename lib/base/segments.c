/* SPDX-License-Identifier: Apache-2.0 */
#include "base/segments.h"

#include "base/process.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

/*
 * Segments mapped by their owner in this process. Ranks that are threads of one process share the owner's mapping: this
 * halves the page tables, and ThreadSanitizer sees the accesses of all ranks at one address.
 */
struct local_segment {
    struct local_segment *next;
    uint64_t serial;
    void *base;
    size_t mapped;
    int refs;
};

/* A forked child does not use the parent's segments. */
struct registry {
    struct ep_process_own own;
    struct local_segment *first;
    uint64_t last_serial;
};

static _Atomic(struct ep_process_own *) current;

/* NULL: no memory. The functions below take it as if there were no segments. */
static struct registry *lock_registry(void)
{
    struct registry *registry = ep_process_get_own(&current, sizeof(*registry), NULL);

    if (registry)
        pthread_mutex_lock(&registry->own.lock);
    return registry;
}

static void unlock_registry(struct registry *registry)
{
    if (registry)
        pthread_mutex_unlock(&registry->own.lock);
}

ep_status ep_segments_add(void *base, size_t mapped, uint64_t *ret_serial)
{
    struct local_segment *segment = malloc(sizeof(*segment));
    struct registry *registry = segment ? lock_registry() : NULL;

    if (!registry) {
        free(segment);
        return ep_fail(EP_E_MEMORY, "shared memory: no memory for the registry");
    }
    *segment = (struct local_segment){
        .next = registry->first, .serial = ++registry->last_serial, .base = base, .mapped = mapped, .refs = 1};
    registry->first = segment;
    *ret_serial = segment->serial;
    unlock_registry(registry);
    return EP_OK;
}

static struct local_segment *find_local(struct registry *registry, uint64_t serial)
{
    struct local_segment *segment = registry ? registry->first : NULL;

    while (segment && segment->serial != serial)
        segment = segment->next;
    return segment;
}

/* Ends a segment that no rank uses any more. */
static void drop(struct registry *registry, struct local_segment *segment)
{
    struct local_segment **at = &registry->first;

    while (*at != segment)
        at = &(*at)->next;
    *at = segment->next;
    munmap(segment->base, segment->mapped);
    free(segment);
}

size_t ep_segments_borrow(uint64_t serial, uint64_t bytes, struct ep_shm *ret_shm)
{
    struct registry *registry = lock_registry();
    struct local_segment *segment = find_local(registry, serial);
    size_t mapped = segment ? segment->mapped : 0;

    if (segment && bytes <= mapped) {
        segment->refs++;
        *ret_shm = (struct ep_shm){.base = segment->base, .bytes = bytes, .serial = serial, .fd = -1};
    }
    unlock_registry(registry);
    return mapped;
}

void ep_segments_release(uint64_t serial)
{
    struct registry *registry = lock_registry();
    struct local_segment *segment = find_local(registry, serial);

    if (segment && --segment->refs == 0)
        drop(registry, segment);
    unlock_registry(registry);
}
