/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm.h - shared memory segments without names.
 *
 * A segment is a memfd of its owner. A peer gets the descriptor through /proc/<pid>/fd/<fd> of the owner, and maps it.
 * A peer that is a thread of the same process uses the owner's mapping. There is no file and no name, so a kill at any
 * time leaks nothing: the kernel frees the pages with the last mapping.
 *
 * Pages are allocated at creation (base/reserve.h), so that accesses cannot fail, and cleared at the first access. A
 * segment cannot shrink while a peer has it mapped.
 */
#ifndef EP_BASE_SHM_H
#define EP_BASE_SHM_H

#include "base/error.h"
#include "base/process.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ep_shm {
    void *base;
    size_t bytes;    /* as requested; the mapping is rounded up to pages */
    uint64_t serial; /* key of the in-process registry; 0: attached from another process */
    int fd;          /* -1 in attached segments */
};

/* What a peer needs to attach. Plain data: send it by any means. */
struct ep_shm_name {
    uint64_t process; /* the owner's ep_process_id.key */
    int32_t pid;      /* in the owner's PID namespace */
    int32_t fd;
    uint64_t inode; /* distinguishes the segment from a reused descriptor number */
    uint64_t serial;
    uint64_t bytes;
};

/* Rounded up to pages; at least one. */
EP_PRIVATE_API size_t ep_shm_mapped_bytes(size_t bytes);

/* EP_E_MEMORY names the limit that `bytes` exceed. */
EP_PRIVATE_API ep_status ep_shm_new(size_t bytes, struct ep_shm *ret_shm);

/* Without pages: ep_shm_reserve() must be called for every part before any rank accesses it. */
EP_PRIVATE_API ep_status ep_shm_new_sparse(size_t bytes, struct ep_shm *ret_shm);
EP_PRIVATE_API ep_status ep_shm_reserve(const struct ep_shm *shm, size_t offset, size_t bytes);

EP_PRIVATE_API ep_status ep_shm_get_name(const struct ep_shm *shm, struct ep_shm_name *ret_name);

/*
 * Maps a segment of a peer; pid: its owner in this PID namespace, 0: not visible here. A failure does not tell whether
 * the owner is alive; use ep_process_probe().
 *
 *   EP_E_STATE                the owner has released the segment
 *   EP_E_UNSUPPORTED          this machine's settings forbid it; the text names them
 *   EP_E_MISMATCH             the segment is shorter than its name says, or its owner can truncate it
 *   EP_E_MEMORY, EP_E_SYSTEM  this process cannot map it, or has no descriptor left
 */
EP_PRIVATE_API ep_status ep_shm_attach(const struct ep_shm_name *name, int32_t pid, struct ep_shm *ret_shm);

/*
 * Moves the contents of an own segment to new pages at the same address: peers that have mapped it keep the old ones,
 * and may attach it again. No process may write to it meanwhile. Unchanged on failure.
 */
EP_PRIVATE_API ep_status ep_shm_move(struct ep_shm *shm);

/* For owners and peers; a zeroed struct is allowed. Other mappings of the segment stay valid. */
EP_PRIVATE_API void ep_shm_done(struct ep_shm *shm);

#endif
