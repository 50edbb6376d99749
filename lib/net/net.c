/* SPDX-License-Identifier: Apache-2.0 */
#include "net/net.h"

#include "net/verbs.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ep_status ep_net_check_params(const char *name, const struct ep_net_params *params)
{
    if (params->ranks_per_node < 1 || params->nranks < 2 * params->ranks_per_node ||
        params->nranks % params->ranks_per_node || params->rank < 0 || params->rank >= params->nranks)
        return ep_fail(EP_E_ARG, "network %s: rank %d of %d with %d ranks per node", name, params->rank, params->nranks,
                       params->ranks_per_node);
    if (params->channels < 1 || params->channels > EP_NET_MAX_CHANNELS)
        return ep_fail(EP_E_ARG, "network %s: %d channels, of 1..%d", name, params->channels, EP_NET_MAX_CHANNELS);
    if (params->region_bytes == 0 || params->region_bytes > SIZE_MAX / 2 || params->n_signals == 0)
        return ep_fail(EP_E_ARG, "network %s: region of %zu bytes, %u signals", name, params->region_bytes,
                       params->n_signals);
    return EP_OK;
}

size_t ep_net_whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), rest = bytes % page;

    return rest == 0 ? bytes : __builtin_add_overflow(bytes, page - rest, &bytes) ? SIZE_MAX : bytes;
}

static void *new_pages(size_t bytes)
{
    size_t whole = ep_net_whole_pages(bytes);
    void *memory = whole == SIZE_MAX ? NULL : aligned_alloc((size_t)sysconf(_SC_PAGESIZE), whole);

    return memory ? memset(memory, 0, whole) : NULL;
}

ep_status ep_net_memory_new(struct ep_net *net)
{
    size_t bytes = (size_t)net->n_signals * sizeof(*net->signals);

    net->signals = new_pages(bytes);
    net->region = net->signals ? new_pages(net->region_bytes) : NULL;
    if (net->region)
        return EP_OK;
    ep_net_memory_free(net);
    return ep_fail(EP_E_MEMORY, "network %s: no memory for a region of %zu bytes and %u signals", net->ops->name,
                   net->region_bytes, net->n_signals);
}

void ep_net_memory_free(struct ep_net *net)
{
    free(net->region);
    free(net->signals);
    net->region = NULL;
    net->signals = NULL;
}

const struct ep_net_provider *ep_net_find(const char *name)
{
    static const struct ep_net_provider *const providers[] = {&ep_net_emulated, &ep_net_tcp, &ep_net_verbs};

    for (size_t i = 0; i < sizeof(providers) / sizeof(providers[0]); i++)
        if (strcmp(name, providers[i]->name) == 0)
            return providers[i];
    return NULL;
}

bool ep_net_is_linked(const char *name)
{
    return strcmp(name, ep_net_tcp.name) == 0 || strcmp(name, ep_net_verbs.name) == 0;
}

struct ep_net *ep_net_get_tcp(struct ep_net *net)
{
    if (strcmp(net->ops->name, ep_net_tcp.name) == 0)
        return net;
    return strcmp(net->ops->name, ep_net_verbs.name) == 0 ? ep_net_verbs_get_tcp(net) : NULL;
}
