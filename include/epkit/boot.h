/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/boot.h - how the ranks of a group meet.
 *
 * A communicator needs one thing of its surroundings while it is created: an all-gather of small blocks. Three ways:
 *   - ep_boot_shm_*:   ranks that are threads of one process or forked children of it (below);
 *   - epkit/mpi.h:     ranks that mpirun started;
 *   - your own:        fill an ep_boot with a callback over whatever your engine already has (a TCP store, a key-value
 *                      service, torch.distributed).
 */
#ifndef EPKIT_BOOT_H
#define EPKIT_BOOT_H

#include <epkit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Gather `bytes` from every rank: rank r's block lands at ret_all + r * bytes on every rank. Called by all ranks in the
 * same order, from one thread a rank, only inside ep_comm_new(). Must return within timeout_ms, with EP_E_TIMEOUT if
 * not all ranks came. A boot that notices the end of a rank should return EP_E_PEER_DEAD at once, because
 * ep_comm_new() itself notices it no earlier than the deadline. May be called several times. Its reason for a failure
 * becomes part of that of ep_comm_new() when it leaves one with ep_set_last_error().
 */
typedef ep_status (*ep_allgather_fn)(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all);

typedef struct ep_boot {
    size_t size; /* EP_BOOT_INIT sets it */
    int32_t rank;
    int32_t nranks;
    ep_allgather_fn allgather;
    void *context;       /* handed to allgather */
    const void *network; /* NULL; a boot that brings its own network between hosts (epkit/mpi.h) sets it */
} ep_boot;

#define EP_BOOT_INIT EP_INIT(ep_boot)

/*
 * A meeting place in shared anonymous memory. Create it once before the ranks exist (before fork(), before the threads
 * start), then every rank joins it. Leaves no file and no name behind, however the ranks end.
 */
typedef struct ep_boot_shm ep_boot_shm;

EP_API ep_status ep_boot_shm_new(int nranks, ep_boot_shm **ret_place);

/*
 * Fills *ret_boot for `rank`. Once a rank: EP_E_STATE for the second. The boot borrows `place`, which must live until
 * ep_comm_new() has returned. An all-gather that fails on any rank makes the place void: the others fail at once or
 * with their next one, because nobody could tell any more which all-gather a rank is in.
 *
 * A rank that dies before it has come to an all-gather fails it at once, from its first all-gather on, with
 * EP_E_PEER_DEAD and its number. Ranks in PID namespaces of their own or without /proc cannot be watched: the others
 * meet their deadline.
 */
EP_API ep_status ep_boot_shm_join(ep_boot_shm *place, int rank, ep_boot *ret_boot);

/* NULL is fine. In a forked child it frees the child's mapping only. */
EP_API void ep_boot_shm_free(ep_boot_shm *place);

#ifdef __cplusplus
}
#endif

#endif
