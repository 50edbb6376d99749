/* SPDX-License-Identifier: Apache-2.0 */
/*
 * locality.h - the host and namespaces of a rank, as it sends them to its peers: which ranks can share memory, and so
 * the nodes.
 *
 * Processes of one kernel share memory by a descriptor, through /proc/PID/fd, which needs a common PID namespace. So
 * two containers of one machine that do not share it count as two hosts. Other namespaces do not matter.
 */
#ifndef EP_BASE_LOCALITY_H
#define EP_BASE_LOCALITY_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

/* Plain data: send it by any means. */
struct ep_locality {
    char host[40];          /* the kernel's boot ID; "": unknown */
    uint64_t pid_namespace; /* inode; 0: unknown */
};

void ep_locality_get_self(struct ep_locality *ret_locality);

/* false without /proc, or if it hides the namespace: then it is unknown which ranks can share memory with this one. */
static inline bool ep_locality_is_known(const struct ep_locality *locality)
{
    return locality->host[0] && locality->pid_namespace;
}

/* Can both share memory? false if one of them is not known. */
bool ep_locality_is_shared(const struct ep_locality *a, const struct ep_locality *b);

/*
 * The ranks per node, if every host has the same number of ranks, with consecutive numbers. Otherwise, or if a rank
 * does not know its host, 0; ret_why (may be NULL) names the ranks that violate this. `all` has the locality of a rank
 * every `stride` bytes.
 */
int ep_locality_find_nodes(const void *all, size_t stride, int nranks, char ret_why[EP_ERROR_TEXT_BYTES]);

#endif
