/* SPDX-License-Identifier: Apache-2.0 */
/* host_ranks.h - communicators of the host backend for tests of its inside, all in one process. */
#ifndef EP_TESTS_UNIT_HOST_RANKS_H
#define EP_TESTS_UNIT_HOST_RANKS_H

#include "backend/host/host.h"
#include "tests/local_ranks.h"

#include <stdlib.h>

#define HOST_RANKS_MOST 4
#define HOST_RANKS_TIMEOUT "2000"   /* ms; with much other work on the machine, less passes before anything is late */
#define HOST_RANKS_PATIENT_MS 60000 /* for the creation, in which nobody is to be late */

/* Creates comm[0..n): each is made by a thread of its own and may then be used by any one thread. */
static inline int host_ranks_join(const ep_boot *boot, void *argument)
{
    ep_comm **comms = argument;
    ep_comm_config config = {
        .size = sizeof(config), .device = -1, .backend = "host", .timeout_ms = HOST_RANKS_PATIENT_MS};

    if (ep_comm_new(boot, &config, &comms[boot->rank]) != EP_OK)
        return 1;
    comms[boot->rank]->config.timeout_ms = atoi(HOST_RANKS_TIMEOUT);
    return 0;
}

static inline bool host_ranks_new(int n, ep_comm **ret_comms)
{
    ep_launch_args args = {.mode = EP_LAUNCH_THREADS, .nranks = n, .run = host_ranks_join, .argument = ret_comms};
    ep_rank_exit exits[HOST_RANKS_MOST];

    if (ep_launch(&args, exits) != EP_OK)
        return false;
    for (int rank = 0; rank < n; rank++)
        if (exits[rank].code)
            return false;
    return true;
}

static inline void host_ranks_free(int n, ep_comm **comms)
{
    for (int rank = 0; rank < n; rank++)
        ep_comm_free(comms[rank]);
}

#endif
