/* SPDX-License-Identifier: Apache-2.0 */
/* boot.h - struct ep_boot_mpi, shared by the bootstrap, the network and the module. */
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
    struct ep_process_id process; /* to detect the death of a rank of this host before the deadline */
    struct ep_locality locality;
};

struct ep_boot_mpi {
    ep_boot boot;
    struct ep_net_provider network;
    MPI_Comm comm;
    uint64_t generation;       /* of the process that created it: MPI does not survive a fork */
    struct ep_mpi_rank *ranks; /* [R] */
    /*
     * Tags: all-gathers use those below first_tag in turn; above it each endpoint of the network has a block of
     * EP_NET_MAX_CHANNELS. So unread messages of a freed endpoint or of an all-gather that failed are never received by
     * another one.
     */
    int first_tag;
    uint32_t tag_blocks;
    uint32_t gathers;          /* started so far */
    uint32_t endpoints;        /* opened so far, on any rank */
    struct gather *unfinished; /* all-gathers that have returned, but MPI still holds their buffers */
    /* module.c */
    MPI_Datatype unit; /* of alltoallv; MPI_DATATYPE_NULL: none yet */
    size_t unit_bytes;
    bool finalises; /* the module has initialised MPI, and finalises it */
};

/* net.c: `open` of the network that the bootstrap provides; provider->context is the bootstrap. */
ep_status ep_net_mpi_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net);

#endif
