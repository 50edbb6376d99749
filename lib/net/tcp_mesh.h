/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_mesh.h - the connections of one endpoint of the tcp network, made collectively. */
#ifndef EP_NET_TCP_MESH_H
#define EP_NET_TCP_MESH_H

#include "net/tcp.h"

/* One connection to a rail peer: channels first, the control link last. */
struct tcp_mesh_line {
    int fd; /* -1: none */
    struct tcp_address far;
};

/* Connections to one peer. */
static inline int tcp_mesh_per_peer(const struct ep_net_params *params)
{
    return params->channels + (params->apart ? 0 : 1);
}

/*
 * Connects this rank with its rail peers; succeeds on all ranks or on none. `mine` is this rank's own status so far: a
 * rank that has failed takes part to say so. ret_lines [npeers][tcp_mesh_per_peer()]; `rendezvous` is filled on
 * success.
 */
ep_status tcp_mesh_open(const struct ep_net_params *params, const struct ep_net_tcp_context *context, ep_status mine,
                        struct tcp_mesh_line *ret_lines, struct ep_net_tcp_rendezvous *rendezvous);

#endif
