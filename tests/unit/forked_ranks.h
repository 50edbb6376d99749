/* SPDX-License-Identifier: Apache-2.0 */
/* forked_ranks.h - ranks of the host backend that are processes and share a struct with the test. */
#ifndef EP_TESTS_UNIT_FORKED_RANKS_H
#define EP_TESTS_UNIT_FORKED_RANKS_H

#include "common/ranks/local_ranks.h"

#include <epkit/comm.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define FORKED_RANKS_PATIENT_MS 250000 /* of a run: only ends ranks that hang */

/* A copy of `bytes` at `from` that the test shares with the ranks; munmap() frees it. */
static inline void *forked_ranks_share(const void *from, size_t bytes)
{
    void *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(shared != MAP_FAILED);
    memcpy(shared, from, bytes);
    return shared;
}

/* As ep_launch(), which ends ranks that still run after timeout_ms. */
static inline ep_status forked_ranks_run(int nranks, ep_rank_fn live, void *shared, int timeout_ms,
                                         ep_rank_exit *ret_exits)
{
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;

    args.nranks = nranks;
    args.run = live;
    args.argument = shared;
    args.timeout_ms = timeout_ms;
    return ep_launch(&args, ret_exits);
}

/* Called by a rank: adds 1 to a shared number, and waits until it has reached `n`. */
static inline void forked_ranks_count(_Atomic int *number, int n)
{
    atomic_fetch_add(number, 1);
    while (atomic_load(number) < n)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Called by a rank. `network` NULL: that of the bootstrap; ranks_per_node 0: as the ranks share hosts. */
static inline ep_status forked_ranks_new(const ep_boot *boot, const char *network, int ranks_per_node, int timeout_ms,
                                         ep_comm **ret_comm)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    config.backend = "host";
    config.network = network;
    config.ranks_per_node = ranks_per_node;
    config.timeout_ms = timeout_ms;
    return ep_comm_new(boot, &config, ret_comm);
}

#endif
