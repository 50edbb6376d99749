/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locality.h - where a rank runs, as it sends it to its peers: which ranks can share memory, and the nodes that follow.
 *
 * Shared memory passes between processes of one kernel as a descriptor: by /proc/PID/fd or pidfd_getfd(), which take
 * one PID namespace, or over a socket with an abstract name, which takes one network namespace. So two containers of
 * one machine that share neither are two hosts. Mount and IPC namespaces do not matter.
 */
#ifndef EP_BASE_LOCALITY_H
#define EP_BASE_LOCALITY_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

/* Plain data: send it by any means. */
struct ep_locality {
    char host[40];                         /* the kernel's boot id; "": not known here */
    uint64_t pid_namespace, net_namespace; /* inodes; 0: not known here */
};

EP_PRIVATE_API void ep_locality_get_self(struct ep_locality *ret_locality);

/* Without /proc, or with one that hides namespaces, a process does not know with whom it shares memory. */
static inline bool ep_locality_is_known(const struct ep_locality *locality)
{
    return locality->host[0] && (locality->pid_namespace || locality->net_namespace);
}

/* Can both share memory? One of which that is not known shares with none. */
bool ep_locality_is_shared(const struct ep_locality *a, const struct ep_locality *b);

/*
 * Ranks of each node, if every host has equally many ranks, with numbers in a row; else, or where a rank does not know
 * its host, 0, and ret_why says which ranks are in the way. `all` has the locality of a rank every `stride` bytes.
 * ret_why may be NULL.
 */
EP_PRIVATE_API int ep_locality_find_nodes(const void *all, size_t stride, int nranks,
                                          char ret_why[EP_ERROR_TEXT_BYTES]);

#endif
