/* SPDX-License-Identifier: Apache-2.0 */
/* roles.c - what each NIC is for: data, or one of the reasons why it should carry none. */
#include "hardware/read.h"

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

static void judge_beside(struct topo *topo, struct topo_nic *nic, const struct topo_nic *fastest)
{
    double rate = fastest_port(nic), best = fastest_port(fastest);

    if (nic->pci < 0 && fastest->pci >= 0)
        set_role(nic, TOPO_ROLE_MANAGEMENT,
                 root_printf(topo->root, "a software device, beside hardware such as %s", fastest->name));
    else if (rate > 0 && rate < best * MUCH_SLOWER)
        set_role(nic, TOPO_ROLE_MANAGEMENT,
                 root_printf(topo->root, "%g Gb/s, less than half of the %g Gb/s of %s", rate, best, fastest->name));
}

static void judge_route(struct topo *topo, struct topo_nic *nic, const char *route)
{
    int needed = topo->n_gpus > 0 ? topo->n_gpus : 1, n_others = count_as_fast(topo, nic);

    if (n_others >= needed && carries(topo, nic, route))
        set_role(nic, TOPO_ROLE_MANAGEMENT,
                 root_printf(topo->root, "carries the default route (%s), and %d other%s as fast", route, n_others,
                             n_others == 1 ? " NIC is" : " NICs are"));
}

/* --- NICs for storage and management that are as fast: they show by their place and by what they speak --- */

#define N_LAYERS (TOPO_LINK_ETHERNET + 1)

/* The NICs by their distance to the nearest GPU of the bus. One that is down was bought for the same as its sisters. */
struct places {
    int needed; /* GPUs, also those that this process is not given: NICs are theirs too */
    int n;
    enum topo_path distance[TOPO_MAX_NICS]; /* by index in topo.nics */
    bool counts[TOPO_MAX_NICS];
};

static bool is_gpu_of_bus(const struct topo *topo, int pci)
{
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].pci == pci)
            return true;
    return topo->pci[pci].vendor == PCI_VENDOR_NVIDIA && topo->pci[pci].class_code >> 16 == PCI_CLASS_DISPLAY;
}

static void find_places(const struct topo *topo, struct places *places)
{
    *places = (struct places){0};
    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        places->distance[i] = TOPO_SYS;
        places->counts[i] =
            nic->pci >= 0 && nic->n_ports > 0 && (nic->role == TOPO_ROLE_DATA || nic->role == TOPO_ROLE_DOWN);
        places->n += places->counts[i];
    }
    for (int p = 0; p < topo->n_pci && places->needed < TOPO_MAX_GPUS; p++) {
        if (!is_gpu_of_bus(topo, p))
            continue;
        places->needed++;
        for (int i = 0; i < topo->n_nics; i++) {
            enum topo_path path = topo_path(topo, p, topo->nics[i].pci);

            if (path < places->distance[i])
                places->distance[i] = path;
        }
    }
}

/* Of the first active port, else of the first one. */
static int layer_of(const struct topo_nic *nic)
{
    for (int p = 0; p < nic->n_ports; p++)
        if (nic->ports[p].active)
            return (int)nic->ports[p].link_layer;
    return (int)nic->ports[0].link_layer;
}

/* NICs within a distance; of those that are up where `is_up`, of a link layer where it is not negative. */
static int count_within(const struct topo *topo, const struct places *places, enum topo_path distance, bool is_up,
                        int layer)
{
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++)
        n += places->counts[i] && places->distance[i] <= distance && (!is_up || topo->nics[i].role == TOPO_ROLE_DATA) &&
             (layer < 0 || layer_of(&topo->nics[i]) == layer);
    return n;
}

/* The distance within which there is a NIC for each GPU, at least half of them up. */
static bool find_reach(const struct topo *topo, const struct places *places, enum topo_path *ret_reach)
{
    for (enum topo_path reach = TOPO_PIX; reach <= TOPO_SYS; reach++)
        if (count_within(topo, places, reach, false, -1) >= places->needed) {
            *ret_reach = reach;
            return count_within(topo, places, reach, true, -1) * 2 >= places->needed;
        }
    return false;
}

/* With more NICs than GPUs: one that is farther from every GPU than as many others as there are GPUs. */
static void judge_distance(struct topo *topo, const struct places *places)
{
    enum topo_path reach;
    int n_near;

    if (!find_reach(topo, places, &reach))
        return;
    n_near = count_within(topo, places, reach, false, -1);
    for (int i = 0; i < topo->n_nics; i++)
        if (places->counts[i] && topo->nics[i].role == TOPO_ROLE_DATA && places->distance[i] > reach)
            set_role(&topo->nics[i], TOPO_ROLE_MANAGEMENT,
                     root_printf(topo->root, "%s from the nearest GPU, and %d other NIC%s nearer to one",
                                 topo_path_name(places->distance[i]), n_near, n_near == 1 ? " is" : "s are"));
}

/* The link layer that most NICs near GPUs have. */
static int common_layer(const struct topo *topo, const struct places *places, enum topo_path reach)
{
    int best = 0, most = 0;

    for (int layer = 0; layer < N_LAYERS; layer++) {
        int n = count_within(topo, places, reach, false, layer);

        if (n > most) {
            most = n;
            best = layer;
        }
    }
    return best;
}

/*
 * With more NICs than GPUs: one that speaks something else than most of the NICs nearest to GPUs, when these are enough
 * or when it is farther than all of them. Where there are too few, GPUs may have NICs of both kinds, which is a fault
 * that the doctor tells of.
 */
static void judge_layer(struct topo *topo, const struct places *places)
{
    static const char *const names[N_LAYERS] = {"", "InfiniBand", "Ethernet"};
    enum topo_path reach;
    int common, n_common;

    if (!find_reach(topo, places, &reach))
        return;
    common = common_layer(topo, places, reach);
    n_common = count_within(topo, places, reach, false, common);
    if (count_within(topo, places, reach, true, common) * 2 < places->needed)
        return;
    for (int i = 0; i < topo->n_nics; i++) {
        struct topo_nic *nic = &topo->nics[i];
        int layer = layer_of(nic);

        if (!places->counts[i] || nic->role != TOPO_ROLE_DATA || layer == common || layer == TOPO_LINK_UNKNOWN)
            continue;
        if (n_common >= places->needed ||
            count_within(topo, places, places->distance[i] - 1, false, common) == n_common)
            set_role(nic, TOPO_ROLE_MANAGEMENT,
                     root_printf(topo->root, "%s, and %d other NIC%s as near to a GPU %s", names[layer], n_common,
                                 n_common == 1 ? "" : "s",
                                 common == TOPO_LINK_UNKNOWN ? "speak something else"
                                                             : root_printf(topo->root, "speak %s", names[common])));
    }
}

static void judge_places(struct topo *topo)
{
    struct places places;

    find_places(topo, &places);
    if (places.needed == 0 || places.n <= places.needed)
        return;
    judge_distance(topo, &places);
    find_places(topo, &places);
    if (places.n > places.needed)
        judge_layer(topo, &places);
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
            judge_beside(topo, &topo->nics[i], fastest);
    judge_places(topo);
    for (int i = 0; i < topo->n_nics; i++)
        if (topo->nics[i].role == TOPO_ROLE_DATA)
            judge_route(topo, &topo->nics[i], route);
}
