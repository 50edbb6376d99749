/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map_nvshmem.c - the NICs that NVSHMEM chooses by default.
 *
 * From the public source of NVSHMEM 3.4 (nvshmemi_setup_connections(), nvshmemi_get_devices_by_distance(), the
 * enumeration of devices in the ibgda transport, nvshmemt_parse_hca_list()):
 *
 * - Candidates are the active InfiniBand and Ethernet ports of the devices whose name contains the prefix, in the order
 * of the devices (here: by PCI address, as the kernel finds them). A list filters them by exact name and port; a
 * leading "^" inverts it. The role of a NIC does not matter: a management NIC is a candidate.
 * - A single candidate is used by all. With NVSHMEM_ENABLE_NIC_PE_MAPPING a PE uses candidate number (local PE modulo
 * candidates).
 * - Otherwise the candidates are sorted by path (PIX, PXB, PHB, NODE, SYS), and a PE takes the first. Balancing is
 * among the PEs of one job: DeepEP makes a job for each GPU, so every PE is number 0 of its own, and alone in it.
 */
#include "common/text.h"
#include "read_hardware.h"

#include <stdlib.h>
#include <string.h>

#define MAX_CANDIDATES (TOPO_MAX_NICS * TOPO_MAX_PORTS)

/* --- candidates --- */

/* Does the list name this port? "NAME" or "NAME:PORT", separated by commas; after a second colon is a count. */
static bool list_has(const char *list, const char *name, int port)
{
    size_t length = strlen(name);

    for (const char *entry = list; *entry; entry += strcspn(entry, ","), entry += *entry == ',') {
        size_t n = strcspn(entry, ":,");

        if (n == length && strncmp(entry, name, n) == 0 && (entry[n] != ':' || strtol(entry + n + 1, NULL, 10) == port))
            return true;
    }
    return false;
}

static int find_candidates(const struct topo *topo, const struct map_nvshmem *how,
                           struct map_port ret_ports[MAX_CANDIDATES])
{
    bool is_exclusion = how->hca_list[0] == '^';
    const char *list = how->hca_list + is_exclusion;
    int n = 0;

    for (int i = 0; i < topo->n_nics && i < TOPO_MAX_NICS; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        if (!strstr(nic->name, how->hca_prefix) || nic->role == TOPO_ROLE_NO_ACCESS)
            continue;
        for (int p = 0; p < nic->n_ports && p < TOPO_MAX_PORTS; p++) {
            const struct topo_port *port = &nic->ports[p];

            if (!port->active || port->link_layer == TOPO_LINK_UNKNOWN)
                continue;
            if (how->hca_list[0] && list_has(list, nic->name, port->number) == is_exclusion)
                continue;
            ret_ports[n++] = (struct map_port){i, port->number};
        }
    }
    return n;
}

/* The first of the nearest candidates; NVSHMEM does not read NCCL's topology file. */
static int nearest(const struct topo *topo, int gpu, const struct map_port *ports, int n_ports)
{
    int best = 0;

    for (int c = 1; c < n_ports; c++)
        if (topo_bus_path(topo, topo->gpus[gpu].pci, topo->nics[ports[c].nic].pci) <
            topo_bus_path(topo, topo->gpus[gpu].pci, topo->nics[ports[best].nic].pci))
            best = c;
    return best;
}

/* --- the assignment --- */

static void explain_choice(const struct topo *topo, const struct map_nvshmem *how, int n_ports,
                           struct map_choice *choice)
{
    const char *path = topo_path_name(choice->path);

    if (choice->nic < 0)
        map_explain(choice,
                    topo->n_nics == 0 ? "there is no NIC" : "no active port fits the prefix and the list of HCAs");
    else if (n_ports == 1)
        map_explain(choice, "the only candidate, %s", path);
    else if (how->pe_mapping)
        map_explain(choice, "NVSHMEM_ENABLE_NIC_PE_MAPPING: local PE 0 takes candidate 0 of %d, %s", n_ports, path);
    else
        map_explain(choice, "the first of its nearest, %s; a world of one GPU does not see the others", path);
}

struct map *map_nvshmem(const struct topo *topo, const struct map_nvshmem *how)
{
    struct map_port ports[MAX_CANDIDATES];
    int n_ports = find_candidates(topo, how, ports);
    struct map *map = map_new(topo);

    for (int gpu = 0; gpu < map->n && n_ports > 0; gpu++) {
        const struct map_port *port = &ports[how->pe_mapping ? 0 : nearest(topo, gpu, ports, n_ports)];

        map->choices[gpu].nic = port->nic;
        map->choices[gpu].port = port->port;
    }
    map_finish(topo, map);
    FOR_EACH (choice, map->choices, map->n) {
        if (choice->nic >= 0)
            choice->path = topo_bus_path(topo, topo->gpus[choice->gpu].pci, topo->nics[choice->nic].pci);
        explain_choice(topo, how, n_ports, choice);
    }
    return map;
}
