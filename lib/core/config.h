/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - from what the caller asked for to a configuration that all ranks share.
 */
#ifndef EP_CORE_CONFIG_H
#define EP_CORE_CONFIG_H

#include "core/core.h"

/*
 * Fills comm->config, and comm->ops unless it is set, from `config` (NULL: all defaults) and the environment. The
 * deadline comes first, so that it holds good whatever else is wrong. comm->nranks 0: not known yet. `network`: what
 * the boot brings, or NULL.
 */
ep_status ep_config_resolve(ep_comm *comm, const ep_comm_config *config, const void *network, const char *call);

/* What the boot says of the ranks of each node (0: nothing) counts unless the configuration says otherwise. */
void ep_config_set_nodes(ep_comm *comm, int ranks_per_node);

/* "none" on one node, else the network in use. */
const char *ep_config_network(const ep_comm *comm);

/*
 * Tells all ranks of `boot` this rank's configuration, or that it failed by itself with `local` (its reason recorded).
 * EP_OK when all agree. This rank's own failure comes first; then that of the lowest rank that failed, its status and
 * its reason; then EP_E_MISMATCH with the same text on every rank.
 *
 * Sets what follows from the hosts of the ranks where it was not given: ranks_per_node, and the network between
 * nodes; then the node of this rank.
 */
EP_PRIVATE_API ep_status ep_config_agree(const ep_boot *boot, ep_comm *comm, ep_status local, const char *call);

#endif
