/* SPDX-License-Identifier: Apache-2.0 */
/* path.c - how two devices of the PCI tree reach each other. */
#include "topo/topo.h"

/* A tree is never this deep; a parent that leads in a circle ends here. */
#define MAX_DEPTH 64

static int depth(const struct topo *topo, int device)
{
    int n = 0;

    for (; device >= 0 && n < MAX_DEPTH; n++)
        device = topo->pci[device].parent;
    return n;
}

/* Both climb until they meet. Bridges between two devices are those on the way to the meeting point, it included. */
static enum topo_path climb(const struct topo *topo, int a, int b)
{
    int depth_a = depth(topo, a), depth_b = depth(topo, b), bridges = 0;

    for (; depth_a > depth_b; depth_a--, bridges++)
        a = topo->pci[a].parent;
    for (; depth_b > depth_a; depth_b--, bridges++)
        b = topo->pci[b].parent;
    for (; a != b && depth_a > 0; depth_a--, bridges += 2) {
        a = topo->pci[a].parent;
        b = topo->pci[b].parent;
    }
    /* Each side that climbed counted the device where it began; the meeting point was counted at most twice. */
    if (a < 0 || a != b)
        return TOPO_PHB;
    return bridges <= 2 ? TOPO_PIX : TOPO_PXB;
}

enum topo_path topo_path(const struct topo *topo, int a, int b)
{
    const struct topo_pci *pci_a, *pci_b;

    if (a < 0 || b < 0)
        return TOPO_SYS;
    if (a == b)
        return TOPO_SELF;
    pci_a = &topo->pci[a];
    pci_b = &topo->pci[b];
    if (pci_a->host_bridge == pci_b->host_bridge)
        return climb(topo, a, b);
    /* A machine that does not say where its devices are has one NUMA node, as far as anybody can tell. */
    return pci_a->numa_node == pci_b->numa_node ? TOPO_NODE : TOPO_SYS;
}

enum topo_path topo_gpu_nic_path(const struct topo *topo, int gpu, int nic)
{
    return topo_path(topo, topo->gpus[gpu].pci, topo->nics[nic].pci);
}

const char *topo_path_name(enum topo_path path)
{
    static const char *const names[] = {"X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS"};

    return names[path];
}
