/* SPDX-License-Identifier: Apache-2.0 */
/* The network "verbs" of a build without the headers of libibverbs. */
#include "net/net.h"

static ep_status open_none(const struct ep_net_provider *provider, const struct ep_net_params *params,
                           struct ep_net **ret_net)
{
    (void)provider;
    (void)params;
    (void)ret_net;
    return ep_fail(EP_E_UNSUPPORTED,
                   "network verbs: epkit was built without it, because libibverbs-dev (the headers of rdma-core) was "
                   "not installed");
}

const struct ep_net_provider ep_net_verbs = {.abi = EP_NET_ABI, .name = "verbs", .open = open_none};
