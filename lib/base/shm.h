/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm.h - shared memory segments without names.
 *
 * A segment is a memfd of its owner. A peer opens it through /proc/<pid>/fd/<fd> of the owner and maps it; a peer that
 * is a thread of the same process borrows the owner's mapping. There is no file and no name to leave behind, so a kill
 * at any instant leaks nothing: the kernel frees the pages with the last mapping.
 *
 * Pages are zero at first and take memory only when touched.
 */
#ifndef EP_BASE_SHM_H
#define EP_BASE_SHM_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

struct ep_shm {
    void *base;
    size_t bytes;    /* as asked for; the mapping is rounded up to pages */
    uint64_t serial; /* key of the in-process registry; 0: attached from another process */
    int fd;          /* -1 in attached segments */
};

/* What a peer needs to attach. Plain data: send it by any means. */
struct ep_shm_name {
    int32_t pid;
    int32_t fd;
    uint64_t inode; /* tells a reused descriptor number from the segment meant */
    uint64_t serial;
    uint64_t bytes;
};

EP_PRIVATE_API ep_status ep_shm_new(size_t bytes, struct ep_shm *ret_shm);
EP_PRIVATE_API ep_status ep_shm_get_name(const struct ep_shm *shm, struct ep_shm_name *ret_name);

/* EP_E_PEER_DEAD if the owner is gone, EP_E_SYSTEM otherwise (no permission: different user or container). */
EP_PRIVATE_API ep_status ep_shm_attach(const struct ep_shm_name *name, struct ep_shm *ret_shm);

/* For owners and attachers alike; a zeroed struct is fine. Other mappings of the segment stay valid. */
EP_PRIVATE_API void ep_shm_done(struct ep_shm *shm);

#endif
