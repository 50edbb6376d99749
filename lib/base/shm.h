/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm.h - shared memory segments without names.
 *
 * A segment is a memfd of its owner. A peer gets the descriptor through /proc/<pid>/fd/<fd> of the owner, by
 * pidfd_getfd(), or over a socket from a thread of the owner (ep_shm_serve), whichever the machine allows, and maps it;
 * a peer that is a thread of the same process borrows the owner's mapping. There is no file and no name to leave
 * behind, so a kill at any instant leaks nothing: the kernel frees the pages with the last mapping.
 *
 * Pages exist from the beginning (base/reserve.h), so that touching them cannot fail, but are cleared when they are
 * first touched. A segment cannot shrink while a peer has it mapped.
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
    size_t bytes;    /* as asked for; the mapping is rounded up to pages */
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

/* Where a process hands out its segments. Plain data; who knows it may map all segments of the process. */
struct ep_shm_address {
    unsigned char secret[16]; /* all zero: it does not */
    char name[24];            /* of an abstract socket: one network namespace */
};

/* How the owner of a name can be reached: of what is known, the first that works. */
struct ep_shm_owner {
    const struct ep_process *process;     /* with a pid: /proc; with a pidfd: pidfd_getfd(). NULL: neither */
    const struct ep_shm_address *address; /* NULL: no socket */
    int timeout_ms;                       /* for an answer on the socket */
    bool *ret_at_owner;                   /* set when it is the owner that has failed; NULL: not wanted */
};

/* Rounded up to pages; at least one. */
EP_PRIVATE_API size_t ep_shm_mapped_bytes(size_t bytes);

/* EP_E_MEMORY names the limit that `bytes` do not fit into. */
EP_PRIVATE_API ep_status ep_shm_new(size_t bytes, struct ep_shm *ret_shm);

/* Without pages: ep_shm_reserve() has to be called for every part before anybody touches it. */
EP_PRIVATE_API ep_status ep_shm_new_sparse(size_t bytes, struct ep_shm *ret_shm);
EP_PRIVATE_API ep_status ep_shm_reserve(const struct ep_shm *shm, size_t offset, size_t bytes);

/*
 * Memory that this process has mapped itself, at a page, from the beginning of a memfd whose descriptor is still open.
 * Makes its missing pages exist (EP_E_MEMORY names the limit), and seals it against shrinking, last of all: what is
 * refused is not sealed. The mapping stays the caller's: ep_shm_done() lets it be. EP_E_UNSUPPORTED says what such
 * memory would have to be.
 */
EP_PRIVATE_API ep_status ep_shm_adopt(void *memory, size_t bytes, struct ep_shm *ret_shm);

EP_PRIVATE_API ep_status ep_shm_get_name(const struct ep_shm *shm, struct ep_shm_name *ret_name);

/*
 * Maps a segment of a peer. `owner` NULL: a process of this PID namespace. What fails says nothing about whether the
 * owner lives; ask ep_process_look().
 *
 *   EP_E_STATE                the owner has released the segment
 *   EP_E_UNSUPPORTED          this machine's settings forbid each way to it; the text names them
 *   EP_E_TIMEOUT              the owner's thread does not answer
 *   EP_E_MISMATCH             the segment is shorter than the name says, or its owner can cut it off
 *   EP_E_MEMORY, EP_E_SYSTEM  this process cannot map it, or has no descriptor left
 */
EP_PRIVATE_API ep_status ep_shm_attach(const struct ep_shm_name *name, const struct ep_shm_owner *owner,
                                       struct ep_shm *ret_shm);

/* For owners and attachers alike; a zeroed struct is fine. Other mappings of the segment stay valid. */
EP_PRIVATE_API void ep_shm_done(struct ep_shm *shm);

/*
 * Starts the thread of this process that hands out its segments, or counts one more user of it. The thread takes no
 * signals. ep_shm_serve_end() for each; the last one ends it.
 */
EP_PRIVATE_API ep_status ep_shm_serve(struct ep_shm_address *ret_address);
EP_PRIVATE_API void ep_shm_serve_end(void);

/*
 * A pidfd of the process behind owner->address, for process->pidfd where pidfd_open() does not reach it. Statuses as
 * ep_shm_attach(); EP_E_UNSUPPORTED with *owner->ret_at_owner: its kernel or a filter of system calls has none.
 */
EP_PRIVATE_API ep_status ep_shm_request_pidfd(const struct ep_shm_owner *owner, int *ret_fd);

/* The descriptor of a segment over the socket, 0: a pidfd. Statuses as ep_shm_attach(). */
ep_status ep_shm_request(const struct ep_shm_owner *owner, uint64_t serial, int *ret_fd);

#endif
