/* SPDX-License-Identifier: Apache-2.0 */
/* map_machine.h - synthetic machines: a PCI tree with GPUs and NICs, without files. */
#ifndef EP_TESTS_MAP_MACHINE_H
#define EP_TESTS_MAP_MACHINE_H

#include "machine/hardware/topo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct machine {
    struct topo topo;
    struct topo_pci pci[1024];
    struct topo_gpu gpus[TOPO_MAX_GPUS];
    struct topo_nic nics[TOPO_MAX_NICS];
    char names[TOPO_MAX_NICS][24];
};

static inline void machine_init(struct machine *machine)
{
    memset(machine, 0, sizeof(*machine));
    machine->topo.pci = machine->pci;
    machine->topo.gpus = machine->gpus;
    machine->topo.nics = machine->nics;
    machine->topo.n_numa = 2;
}

/* A device below `parent` (-1: the host bridge). Returns its index. */
static inline int machine_pci(struct machine *machine, int parent, int host_bridge, int numa_node)
{
    int i = machine->topo.n_pci++;

    machine->pci[i] = (struct topo_pci){.parent = parent, .host_bridge = host_bridge, .numa_node = numa_node};
    return i;
}

/* A switch: its upstream port below a root port. Returns the upstream port. */
static inline int machine_switch(struct machine *machine, int host_bridge, int numa_node)
{
    int root_port = machine_pci(machine, -1, host_bridge, numa_node);

    return machine_pci(machine, root_port, host_bridge, numa_node);
}

/* A device below a separate downstream port, or directly on the host bridge if `at` is -1. */
static inline int machine_leaf(struct machine *machine, int at, int host_bridge, int numa_node)
{
    return machine_pci(machine, at < 0 ? -1 : machine_pci(machine, at, host_bridge, numa_node), host_bridge, numa_node);
}

static inline int machine_gpu(struct machine *machine, int at, int host_bridge, int numa_node)
{
    int i = machine->topo.n_gpus++;

    machine->gpus[i] = (struct topo_gpu){.index = i, .pci = machine_leaf(machine, at, host_bridge, numa_node)};
    return i;
}

/* An active NIC with role DATA and this many ports. */
static inline struct topo_nic *machine_nic(struct machine *machine, const char *name, int n_ports, int at,
                                           int host_bridge, int numa_node)
{
    int i = machine->topo.n_nics++;
    struct topo_nic *nic = &machine->nics[i];

    snprintf(machine->names[i], sizeof(machine->names[i]), "%s", name);
    *nic = (struct topo_nic){.name = machine->names[i],
                             .pci = machine_leaf(machine, at, host_bridge, numa_node),
                             .n_ports = n_ports,
                             .role = TOPO_ROLE_DATA,
                             .role_why = ""};
    machine->pci[nic->pci].vendor = 0x15b3;
    for (int p = 0; p < n_ports; p++)
        nic->ports[p] = (struct topo_port){.number = p + 1,
                                           .active = true,
                                           .state = "ACTIVE",
                                           .phys_state = "LinkUp",
                                           .rate_gbps = 400,
                                           .link_layer = TOPO_LINK_ETHERNET,
                                           .netdev = ""};
    return nic;
}

#endif
