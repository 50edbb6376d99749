/* SPDX-License-Identifier: Apache-2.0 */
/* path.c - the path between two devices of the PCI tree. */
#include "topo.h"

#include <string.h>

/* Bounds a cycle of parents; no tree is this deep. */
#define MAX_DEPTH 64

static int pci_depth(const struct topo *topo, int device)
{
    int n = 0;

    for (; device >= 0 && n < MAX_DEPTH; n++)
        device = topo->pci[device].parent;
    return n;
}

/*
 * Both devices climb to their common bridge. A PCIe switch is one bridge in the terms of NVML, though its upstream port
 * and each of its downstream ports are bridges in the PCI tree: below one switch each side passes at most its own
 * downstream port before the upstream port. One more bridge on either side is another switch.
 */
static enum topo_path pci_climb(const struct topo *topo, int a, int b)
{
    int depth_a = pci_depth(topo, a), depth_b = pci_depth(topo, b), steps_a = 0, steps_b = 0;

    for (; depth_a > depth_b; depth_a--, steps_a++)
        a = topo->pci[a].parent;
    for (; depth_b > depth_a; depth_b--, steps_b++)
        b = topo->pci[b].parent;
    for (; a != b && depth_a > 0; depth_a--, steps_a++, steps_b++) {
        a = topo->pci[a].parent;
        b = topo->pci[b].parent;
    }
    /* Different root ports: the host bridge is between them. */
    if (a < 0 || a != b)
        return TOPO_PHB;
    /* The first step leads from the device to the bridge above it. */
    return steps_a <= 2 && steps_b <= 2 ? TOPO_PIX : TOPO_PXB;
}

int topo_usable_gpus(const struct topo *topo)
{
    int n = topo->n_gpus;

    while (n > 0 && topo->nvml && !topo->gpus[n - 1].answered)
        n--;
    return n;
}

bool topo_is_located(const struct topo *topo, int pci)
{
    return pci >= 0 && topo->pci[pci].host_bridge >= 0;
}

enum topo_path topo_bus_path(const struct topo *topo, int a, int b)
{
    const struct topo_pci *pci_a, *pci_b;

    if (a < 0 || b < 0)
        return TOPO_SYS;
    if (a == b)
        return TOPO_SELF;
    pci_a = &topo->pci[a];
    pci_b = &topo->pci[b];
    if (pci_a->host_bridge < 0 || pci_b->host_bridge < 0)
        return TOPO_SYS;
    if (pci_a->host_bridge == pci_b->host_bridge)
        return pci_climb(topo, a, b);
    /* Without NUMA information the machine counts as one NUMA node. */
    return pci_a->numa_node == pci_b->numa_node || topo->n_numa <= 1 ? TOPO_NODE : TOPO_SYS;
}

enum topo_path topo_path(const struct topo *topo, int a, int b)
{
    enum topo_path path = topo_bus_path(topo, a, b);

    return path > TOPO_PXB && a >= 0 && b >= 0 && topo->pci[a].declared_switch &&
                   topo->pci[a].declared_switch == topo->pci[b].declared_switch
               ? TOPO_PIX
               : path;
}

enum topo_path topo_gpu_nic_path(const struct topo *topo, int gpu, int nic)
{
    return topo_path(topo, topo->gpus[gpu].pci, topo->nics[nic].pci);
}

enum topo_path topo_gpu_path(const struct topo *topo, int a, int b, int *ret_links)
{
    const struct topo_gpu *gpu_a = &topo->gpus[a], *gpu_b = &topo->gpus[b];
    int links = gpu_a->nvlinks_gpu[b];

    if (links == 0)
        links = gpu_a->nvlinks_switch < gpu_b->nvlinks_switch ? gpu_a->nvlinks_switch : gpu_b->nvlinks_switch;
    *ret_links = a == b ? 0 : links;
    return *ret_links ? TOPO_NVLINK : topo_path(topo, gpu_a->pci, gpu_b->pci);
}

bool topo_is_same_card(const struct topo *topo, int a, int b)
{
    const char *address = topo->pci[a].address, *dot = strrchr(address, '.');

    return dot && strncmp(address, topo->pci[b].address, (size_t)(dot + 1 - address)) == 0;
}

const char *topo_path_name(enum topo_path path)
{
    static const char *const names[] = {"X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS"};

    return names[path];
}
