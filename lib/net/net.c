/* SPDX-License-Identifier: Apache-2.0 */
#include "net/net.h"

#include <string.h>

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
