/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_mesh.h - connects the ranks of one endpoint of the tcp network with each other. */
#ifndef EP_NET_TCP_MESH_H
#define EP_NET_TCP_MESH_H

#include "net/tcp.h"

/* One connection to a rail peer: channels first, the control link last. */
struct tcp_mesh_conn {
    int fd; /* -1: none */
    struct tcp_address remote;
};

/* Connections to one peer. */
static inline int tcp_mesh_per_peer(const struct ep_net_params *params)
{
    return params->channels + (params->block_ranks ? 0 : 1);
}

/*
 * Connects this rank with its rail peers; succeeds on all ranks or on none. Collective: a rank that has failed already
 * passes its status as `mine`. ret_conns [npeers][tcp_mesh_per_peer()]; `rendezvous` is set on success.
 */
ep_status tcp_mesh_open(const struct ep_net_params *params, const struct ep_net_tcp_context *context, ep_status mine,
                        struct tcp_mesh_conn *ret_conns, struct ep_net_tcp_rendezvous *rendezvous);

#endif
