/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mirror.h - a buffer on the host and its mirror on the device. The host backend writes the one and the CUDA backend
 * the other; then all bytes must be equal, including those that must not be written.
 */
#ifndef EP_TESTS_CUDA_MIRROR_H
#define EP_TESTS_CUDA_MIRROR_H

#include "group.h"

#define POISON 0xa5 /* content of an output before the call */
#define GUARD 4096  /* bytes after the end, which must stay poisoned */

enum memory {
    ORDINARY,
    SYMMETRIC,       /* of ep_alloc() */
    ORDINARY_AMONG,  /* ordinary, but others have symmetric memory: takes part in the collective calls */
    ALLOCATED_LOCAL, /* of ep_alloc_local() */
    REGISTERED       /* registered. Collective as SYMMETRIC, because the peers must unmap it before it is freed */
};

struct mirror {
    const char *name;
    unsigned char *host, *device;
    size_t bytes, row_bytes; /* row_bytes: for messages about differences; 0: it has no rows */
    enum memory memory;
    void *shared; /* of ep_alloc(): the device buffer, or unused memory; NULL: none. Frees are collective with it */
};

/* Poisons both, the host's at once and the device's in the order of the group's stream. Collective. */
int mirror_new(const struct group *group, const char *name, size_t bytes, enum memory memory,
               struct mirror *ret_mirror);
int mirror_poison(const struct group *group, const struct mirror *mirror);
int mirror_poison_device(const struct group *group, const struct mirror *mirror);

/* Copies the host's bytes and guard to the device. Complete when it returns. */
int mirror_push(const struct group *group, const struct mirror *mirror);

/* Waits for the group's stream. DIFFERS, with a message about the first difference and their number. */
int mirror_compare(const struct group *group, const struct mirror *mirror, const char *phase);

/* Collective if the memory is; after a failure it is not, and the communicator frees symmetric memory. */
int mirror_free(const struct group *group, bool failed, struct mirror *mirror);

static inline unsigned char *mirror_at(const struct mirror *mirror, int device)
{
    return device ? mirror->device : mirror->host;
}

#endif
