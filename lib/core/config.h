/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - resolves the caller's configuration and agrees on it with all ranks.
 */
#ifndef EP_CORE_CONFIG_H
#define EP_CORE_CONFIG_H

#include "core/core.h"

/*
 * Fills comm->config, and comm->ops unless it is set, from `config` (NULL: all defaults) and the environment. The
 * deadline is resolved first, so that it is valid even if another field is not. comm->nranks 0: not known yet.
 * `network`: that of the bootstrap, or NULL.
 */
ep_status ep_config_resolve(ep_comm *comm, const ep_comm_config *config, const void *network, const char *call);

/* "none" on one node, else the network in use. */
const char *ep_config_network(const ep_comm *comm);

/*
 * Exchanges the configurations of all ranks of `boot`, or the failure `local` of this rank (its reason recorded). EP_OK
 * if all agree. In order of precedence: this rank's own failure; the status and reason of the lowest rank that failed;
 * EP_E_MISMATCH with the same text on every rank.
 *
 * Sets ranks_per_node and the network between nodes from the hosts of the ranks, if they are not configured; then the
 * node of this rank.
 */
EP_PRIVATE_API ep_status ep_config_agree(const ep_boot *boot, ep_comm *comm, ep_status local, const char *call);

#endif
