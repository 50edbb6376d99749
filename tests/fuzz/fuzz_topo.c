/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as the snapshot of a machine, the driver's answer included: what is read of it is a tree without circles,
 * within its bounds, and has a map.
 */
#include "machine/hardware/map.h"
#include "machine/hardware/topo.h"
#include "tests/unit/load_snapshot.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_pci(const struct topo *topo)
{
    check(topo->n_pci >= 0 && topo->n_pci <= TOPO_MAX_PCI && topo->n_host_bridges <= 256);
    for (int i = 0; i < topo->n_pci; i++) {
        const struct topo_pci *pci = &topo->pci[i];
        int steps = 0;

        check(pci->parent >= -1 && pci->parent < topo->n_pci && pci->host_bridge < topo->n_host_bridges);
        for (int above = pci->parent; above >= 0; above = topo->pci[above].parent)
            check(++steps <= topo->n_pci);
        check(topo_find_pci(topo, pci->address) == i);
        check(pci->local_cpus && pci->driver && pci->numa_node >= -1);
        check(topo_path(topo, i, 0) == topo_path(topo, 0, i));
    }
}

static void check_devices(const struct topo *topo)
{
    int links;

    check(topo->n_gpus <= TOPO_MAX_GPUS && topo->n_nics <= TOPO_MAX_NICS && topo->n_numa <= TOPO_MAX_NUMA);
    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &topo->gpus[i];

        check(gpu->index == i && gpu->pci >= 0 && gpu->pci < topo->n_pci && gpu->name && gpu->uuid);
        check(gpu->nvlinks_up <= gpu->nvlinks && gpu->nvlinks <= TOPO_MAX_NVLINKS);
        for (int j = 0; j < i; j++) /* in the driver's order, each once */
            check(topo->gpus[j].pci != gpu->pci);
        topo_gpu_path(topo, i, 0, &links);
        check(links >= 0 && links <= TOPO_MAX_NVLINKS);
    }
    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        check(nic->n_ports <= TOPO_MAX_PORTS && nic->pci < topo->n_pci && nic->role_why);
        for (int j = 0; j < nic->n_ports; j++)
            check(nic->ports[j].n_gids <= TOPO_MAX_GIDS && nic->ports[j].netdev);
    }
    check((topo->n_gpus + topo->n_nics > 0) == (*topo->why_empty == '\0'));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct source *source;
    struct topo *topo;
    struct map *map;

    if (load_snapshot("fuzz", (const char *)data, size, &source) != EP_OK)
        return 0;
    topo = topo_read(source);
    check_pci(topo);
    check_devices(topo);
    map = map_best(topo);
    map_free(map);
    map = map_ibgda(topo);
    map_free(map);
    source_free(source);
    return 0;
}
