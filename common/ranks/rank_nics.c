/* SPDX-License-Identifier: Apache-2.0 */
/* rank_nics.c - the NIC of each rank, by the GPU affinity of `epkit topo`. */
#include "machine/hardware/map.h"
#include "ranks_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define ENV_DEVICE "EPKIT_VERBS_DEVICE"

static void choose(void)
{
    struct source *source = NULL;
    struct topo *topo = NULL;
    struct map *map = NULL;
    const char *ports;

    if (source_open(NULL, &source) != EP_OK || topo_read(source, &topo) != EP_OK || map_best(topo, &map) != EP_OK)
        goto free_all;
    ports = map_verbs(topo, map);
    if (*ports)
        setenv(ENV_DEVICE, ports, 1);
free_all:
    map_free(map);
    topo_free(topo);
    source_free(source);
}

void ranks_choose_nics(const struct ranks_spec *spec)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const char *set = getenv(ENV_DEVICE);

    if (spec->network && strcmp(spec->network, "verbs") == 0 && (!set || !*set))
        pthread_once(&once, choose);
}
