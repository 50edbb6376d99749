/* SPDX-License-Identifier: Apache-2.0 */
/* roles.c - what each NIC is for: data, or one of the reasons why it should carry none. */
#include "topo/read.h"

#include <stdio.h>
#include <string.h>

/* Of the fastest NIC: one below that was bought for something else. */
#define MUCH_SLOWER 0.5

/* Rate of the fastest active port; 0 when it has none, or none that says its rate. */
static double fastest_port(const struct topo_nic *nic)
{
    double rate = 0;

    for (int i = 0; i < nic->n_ports; i++)
        if (nic->ports[i].active && nic->ports[i].rate_gbps > rate)
            rate = nic->ports[i].rate_gbps;
    return rate;
}

static bool has_active_port(const struct topo_nic *nic)
{
    for (int i = 0; i < nic->n_ports; i++)
        if (nic->ports[i].active)
            return true;
    return false;
}

/* The RDMA device of the physical function, "" if this one is no virtual function or the other is not here. */
static const char *physical_function(const struct topo *topo, const struct topo_nic *nic)
{
    struct pci_address address;
    const char *path;
    int pci = -1;
    char text[20];

    if (nic->pci < 0)
        return "";
    path = root_resolve(topo->root, "/sys/bus/pci/devices/%s/physfn", topo->pci[nic->pci].address).text;
    if (pci_of_path(path, &address)) {
        print_pci_address(&address, text);
        pci = topo_find_pci(topo, text);
    }
    for (int i = 0; i < topo->n_nics && pci >= 0; i++)
        if (topo->nics[i].pci == pci && pci != nic->pci)
            return topo->nics[i].name;
    return "";
}

/* The interface of the IPv4 default route in /proc/net/route: destination and mask are 0 there. "" without one. */
static const char *default_route(struct topo *topo)
{
    const char *line = root_read(topo->root, "/proc/net/route").text;

    for (; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        char name[32], destination[16], mask[16];

        if (sscanf(line, "%31s %15s %*s %*s %*s %*s %*s %15s", name, destination, mask) == 3 &&
            strcmp(destination, "00000000") == 0 && strcmp(mask, "00000000") == 0)
            return topo_keep(topo, name);
    }
    return "";
}

/* Does the interface `route` run over this NIC, itself or as a bond, bridge or VLAN above it? */
static bool carries(struct topo *topo, const struct topo_nic *nic, const char *route)
{
    if (!*route)
        return false;
    for (int i = 0; i < nic->n_ports; i++) {
        const char *netdev = nic->ports[i].netdev;

        if (*netdev && (strcmp(netdev, route) == 0 ||
                        root_stat(topo->root, "/sys/class/net/%s/lower_%s", route, netdev).state == ROOT_OK))
            return true;
    }
    return false;
}

static void set_role(struct topo_nic *nic, enum topo_role role, const char *why)
{
    nic->role = role;
    nic->role_why = why;
}

/* Roles that a NIC has by itself. */
static void judge_alone(struct topo *topo, struct topo_nic *nic)
{
    const char *physical = physical_function(topo, nic);

    if (*physical)
        set_role(nic, TOPO_ROLE_VIRTUAL, root_printf(topo->root, "a virtual function of %s", physical));
    else if (nic->n_ports == 0)
        set_role(nic, TOPO_ROLE_DOWN, "no port can be read");
    else if (!has_active_port(nic))
        set_role(nic, TOPO_ROLE_DOWN,
                 nic->n_ports > 1 ? "no port is active"
                                  : root_printf(topo->root, "port %d is %s (%s)", nic->ports[0].number,
                                                *nic->ports[0].state ? nic->ports[0].state : "in an unknown state",
                                                *nic->ports[0].phys_state ? nic->ports[0].phys_state : "link unknown"));
    else
        set_role(nic, TOPO_ROLE_DATA, "");
}

/* Other data NICs at least as fast. */
static int count_as_fast(const struct topo *topo, const struct topo_nic *nic)
{
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *other = &topo->nics[i];

        n += other != nic && other->role == TOPO_ROLE_DATA && other->pci >= 0 &&
             fastest_port(other) >= fastest_port(nic);
    }
    return n;
}

static void judge_beside(struct topo *topo, struct topo_nic *nic, const struct topo_nic *fastest, const char *route)
{
    double rate = fastest_port(nic), best = fastest_port(fastest);
    int needed = topo->n_gpus > 0 ? topo->n_gpus : 1, n_others = count_as_fast(topo, nic);

    if (nic->pci < 0 && fastest->pci >= 0)
        set_role(nic, TOPO_ROLE_MANAGEMENT,
                 root_printf(topo->root, "a software device, beside hardware such as %s", fastest->name));
    else if (rate > 0 && rate < best * MUCH_SLOWER)
        set_role(nic, TOPO_ROLE_MANAGEMENT,
                 root_printf(topo->root, "%g Gb/s, less than half of the %g Gb/s of %s", rate, best, fastest->name));
    else if (n_others >= needed && carries(topo, nic, route))
        set_role(nic, TOPO_ROLE_MANAGEMENT,
                 root_printf(topo->root, "carries the default route (%s), and %d other%s as fast", route, n_others,
                             n_others == 1 ? " NIC is" : " NICs are"));
}

void nics_judge(struct topo *topo)
{
    const char *route = default_route(topo);
    const struct topo_nic *fastest = NULL;

    for (int i = 0; i < topo->n_nics; i++)
        judge_alone(topo, &topo->nics[i]);
    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        if (nic->role != TOPO_ROLE_DATA)
            continue;
        /* Hardware before software, whatever a software device says of its rate. */
        if (!fastest || (nic->pci >= 0) > (fastest->pci >= 0) ||
            ((nic->pci >= 0) == (fastest->pci >= 0) && fastest_port(nic) > fastest_port(fastest)))
            fastest = nic;
    }
    for (int i = 0; i < topo->n_nics; i++)
        if (topo->nics[i].role == TOPO_ROLE_DATA)
            judge_beside(topo, &topo->nics[i], fastest, route);
}
