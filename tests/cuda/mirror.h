/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mirror.h - a buffer on the host and its mirror on the device. The host backend writes the one and the CUDA backend
 * the other; then they must be the same to the last byte, the bytes that nobody may write included.
 */
#ifndef EP_TESTS_CUDA_MIRROR_H
#define EP_TESTS_CUDA_MIRROR_H

#include "group.h"

#define POISON 0xa5 /* what an output holds before */
#define GUARD 4096  /* bytes behind the end that stay so */

enum memory {
    ORDINARY,
    SYMMETRIC,     /* of ep_alloc() */
    ORDINARY_AMONG /* ordinary where others have symmetric memory: makes the collective calls with them */
};

struct mirror {
    const char *name;
    unsigned char *host, *device;
    size_t bytes, row_bytes; /* row_bytes: for what is said of a difference; 0: it has no rows */
    void *shared;            /* of ep_alloc(): the device's, or memory that nobody uses; NULL: none */
};

/* Both hold the poison, the host's at once and the device's in the order of the group's stream. Collective. */
int mirror_new(const struct group *group, const char *name, size_t bytes, enum memory memory,
               struct mirror *ret_mirror);
int mirror_poison(const struct group *group, const struct mirror *mirror);
int mirror_poison_device(const struct group *group, const struct mirror *mirror);

/* The host's bytes and guard to the device. Complete when it returns. */
int mirror_push(const struct group *group, const struct mirror *mirror);

/* Waits for the group's stream. DIFFERS after saying what differs first, and how much. */
int mirror_compare(const struct group *group, const struct mirror *mirror, const char *phase);

/* Collective where it was made so; not after a failure: then the communicator frees what is symmetric. */
int mirror_free(const struct group *group, bool failed, struct mirror *mirror);

#endif
