/* SPDX-License-Identifier: Apache-2.0 */
/* boot.h - the inside of ep_boot_mpi, which the boot, the network and the module share. */
#ifndef EP_MPI_BOOT_H
#define EP_MPI_BOOT_H

#include "base/locality.h"
#include "base/process.h"
#include "mpi/call.h"
#include "net/net.h"

#include <epkit/mpi.h>
#include <stdbool.h>

struct gather;

struct ep_mpi_rank {
    struct ep_process_id process; /* a rank of this host that dies is noticed before the deadline */
    struct ep_locality locality;
};

struct ep_boot_mpi {
    ep_boot boot;
    struct ep_net_provider network;
    MPI_Comm comm;
    uint64_t generation;       /* of the process that made it: MPI does not survive a fork */
    struct ep_mpi_rank *ranks; /* [R] */
    /*
     * Tags: all-gathers count through those below first_tag; above it each endpoint of the network has a block of
     * EP_NET_MAX_CHANNELS. What a freed endpoint or an all-gather that was cancelled leaves unread therefore never
     * reaches another one.
     */
    int first_tag;
    uint32_t tag_blocks;
    uint32_t gathers;         /* begun so far */
    uint32_t endpoints;       /* opened so far, on any rank */
    struct gather *cancelled; /* cancelled, but MPI still holds their buffers */
    /* module.c */
    MPI_Datatype unit; /* of alltoallv, MPI_DATATYPE_NULL: none yet */
    size_t unit_bytes;
    bool finalises; /* MPI was initialised by the module */
};

/* net.c: the `open` of the network that the boot brings; provider->context is the boot. */
ep_status ep_net_mpi_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net);

#endif
