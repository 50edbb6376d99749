/* SPDX-License-Identifier: Apache-2.0 */
#include "base/segments.h"

#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/*
 * Segments mapped by their owner in this process. Ranks that are threads of one process share the owner's mapping: this
 * halves the page tables, and ThreadSanitizer sees the accesses of all ranks at one address.
 */
struct local_segment {
    struct local_segment *next;
    uint64_t serial;
    void *base;
    size_t mapped;
    int fd;              /* the owner's; -1: the owner has released it, others still borrow the mapping */
    int refs;            /* 0: only its address range is left, reserved */
    bool adopted;        /* the mapping belongs to the program, see ep_shm_adopt() */
    bool range_reserved; /* see ep_segments_reserve_range() */
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

ep_status ep_segments_add(void *base, size_t mapped, int fd, bool adopted, uint64_t *ret_serial)
{
    struct local_segment *segment = malloc(sizeof(*segment));
    struct registry *registry = segment ? lock_registry() : NULL;

    if (!registry) {
        free(segment);
        return ep_fail(EP_E_MEMORY, "shared memory: no memory for the registry");
    }
    *segment = (struct local_segment){.next = registry->first,
                                      .serial = ++registry->last_serial,
                                      .base = base,
                                      .mapped = mapped,
                                      .fd = fd,
                                      .refs = 1,
                                      .adopted = adopted};
    registry->first = segment;
    *ret_serial = segment->serial;
    unlock_registry(registry);
    return EP_OK;
}

static struct local_segment *find_local(struct registry *registry, uint64_t serial)
{
    struct local_segment *segment = registry ? registry->first : NULL;

    while (segment && (segment->serial != serial || !segment->refs))
        segment = segment->next;
    return segment;
}

/* The segment that this process has created at `base`. */
static struct local_segment *find_base(struct registry *registry, const void *base)
{
    struct local_segment *segment = registry ? registry->first : NULL;

    while (segment && (segment->base != base || segment->adopted))
        segment = segment->next;
    return segment;
}

/* Ends a segment that no rank uses and whose range is not kept. */
static void drop_unused(struct registry *registry, struct local_segment *segment)
{
    struct local_segment **at = &registry->first;

    if (segment->refs || segment->range_reserved)
        return;
    while (*at != segment)
        at = &(*at)->next;
    *at = segment->next;
    if (!segment->adopted)
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

bool ep_segments_overlaps(const void *base, size_t bytes, uint64_t serial)
{
    struct registry *registry = lock_registry();
    const struct local_segment *segment = registry ? registry->first : NULL;
    uintptr_t at = (uintptr_t)base;

    for (; segment; segment = segment->next) {
        uintptr_t begin = (uintptr_t)segment->base;

        if (segment->serial != serial && segment->refs && begin < at + bytes && at < begin + segment->mapped)
            break;
    }
    unlock_registry(registry);
    return segment;
}

void ep_segments_set_fd(uint64_t serial, int fd)
{
    struct registry *registry = lock_registry();
    struct local_segment *segment = find_local(registry, serial);

    if (segment)
        segment->fd = fd;
    unlock_registry(registry);
}

int ep_segments_dup(uint64_t serial)
{
    struct registry *registry = lock_registry();
    const struct local_segment *segment = find_local(registry, serial);
    int fd = -1;

    if (segment && segment->fd >= 0)
        fd = fcntl(segment->fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (fd < 0 && errno == EINVAL) /* RLIMIT_NOFILE was lowered to less than the first number */
        errno = EMFILE;
    unlock_registry(registry);
    return fd;
}

void ep_segments_release(uint64_t serial, int fd)
{
    struct registry *registry = lock_registry();
    struct local_segment *segment = find_local(registry, serial);

    if (segment) {
        if (fd >= 0)
            segment->fd = -1;
        /* In one step, so that no other mapping gets the addresses. If it fails, the pages stay, too. */
        if (--segment->refs == 0 && segment->range_reserved)
            (void)mmap(segment->base, segment->mapped, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop_unused(registry, segment);
    }
    unlock_registry(registry);
}

void ep_segments_reserve_range(const void *base)
{
    struct registry *registry = lock_registry();
    struct local_segment *segment = find_base(registry, base);

    if (segment)
        segment->range_reserved = true;
    unlock_registry(registry);
}

void ep_segments_free_range(const void *base)
{
    struct registry *registry = lock_registry();
    struct local_segment *segment = find_base(registry, base);

    if (segment) {
        segment->range_reserved = false;
        drop_unused(registry, segment);
    }
    unlock_registry(registry);
}
