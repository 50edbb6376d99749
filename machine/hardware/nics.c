/* SPDX-License-Identifier: Apache-2.0 */
/* nics.c - the RDMA devices in /sys/class/infiniband: ports, their state, rate and GIDs. */
#include "common/text.h"
#include "read_hardware.h"

#include <stdio.h>
#include <string.h>

#define CLASS "/sys/class/infiniband"
#define VERBS_CLASS "/sys/class/infiniband_verbs"
#define NET "/sys/class/net"

void nics_collect_pci(struct source *source, struct pci_set *set)
{
    struct source_names names = source_list(source, CLASS);

    for (size_t i = 0; i < names.n && i < TOPO_MAX_NICS; i++) {
        struct pci_address address;

        if (pci_of_path(source_resolve(source, CLASS "/%s/device", names.names[i]).text, &address))
            pci_set_add(set, &address);
    }
}

/* --- ports --- */

/*
 * sysfs shows all GIDs of a device even if it is shared with a pod that has its own network; /sys/class/net has only
 * the interfaces of that network. A GID of another network cannot be used. Without any interface, this is unknown.
 */
static bool is_foreign(struct topo *topo, const struct topo_nic *nic, int port, int index)
{
    struct source_text ndev =
        source_line(topo->source, CLASS "/%s/ports/%d/gid_attrs/ndevs/%d", nic->name, port, index);

    if (ndev.state != SOURCE_OK || !*ndev.text || strchr(ndev.text, '/'))
        return false;
    return source_stat(topo->source, NET "/%s", ndev.text).state == SOURCE_ABSENT &&
           source_list(topo->source, NET).n > 0;
}

/* Reads the GIDs that are not empty. */
static void read_gids(struct topo *topo, const struct topo_nic *nic, struct topo_port *port)
{
    static const uint8_t empty[16];
    struct source_names names = source_list(topo->source, CLASS "/%s/ports/%d/gids", nic->name, port->number);

    port->gids_state = names.state;
    if (names.n == 0)
        return;
    port->gids = source_alloc(topo->source, TOPO_MAX_GIDS * sizeof(*port->gids));
    for (size_t i = 0; i < names.n && port->n_gids < TOPO_MAX_GIDS; i++) {
        struct topo_gid *gid = &port->gids[port->n_gids];
        struct source_text text;
        uint8_t bytes[16];

        gid->index = text_number(names.names[i], strlen(names.names[i]), 99999);
        if (gid->index < 0)
            continue;
        text = source_line(topo->source, CLASS "/%s/ports/%d/gids/%s", nic->name, port->number, names.names[i]);
        if (text.state == SOURCE_DENIED)
            port->gids_state = SOURCE_DENIED;
        if (!parse_gid(text.text, bytes) || memcmp(bytes, empty, sizeof(empty)) == 0)
            continue;
        if (port->link_layer == TOPO_LINK_ETHERNET && is_foreign(topo, nic, port->number, gid->index)) {
            port->n_foreign_gids++;
            continue;
        }
        gid->kind = gid_kind(bytes);
        gid->type = parse_gid_type(
            source_line(topo->source, CLASS "/%s/ports/%d/gid_attrs/types/%d", nic->name, port->number, gid->index)
                .text,
            port->link_layer);
        port->n_gids++;
    }
}

/*
 * The network interface of a port. The first GID names it, even a bond. In a container without the host's network it
 * does not; then it is one of the interfaces of the device, by its dev_port.
 */
static const char *find_netdev(struct topo *topo, const struct topo_nic *nic, int port)
{
    struct source_text named = source_line(topo->source, CLASS "/%s/ports/%d/gid_attrs/ndevs/0", nic->name, port);
    struct source_names names;

    if (named.state == SOURCE_OK && *named.text)
        return named.text;
    names = source_list(topo->source, CLASS "/%s/device/net", nic->name);
    for (size_t i = 0; i < names.n && names.n > 1; i++) {
        int64_t number;

        if (source_number(topo->source, &number, CLASS "/%s/device/net/%s/dev_port", nic->name, names.names[i]) ==
                SOURCE_OK &&
            number == port - 1)
            return topo_copy_line(topo, names.names[i]);
    }
    return names.n == 1 || (names.n > 1 && port == 1) ? topo_copy_line(topo, names.names[0]) : "";
}

static enum topo_link_layer parse_link_layer(const char *text)
{
    if (strcmp(text, "InfiniBand") == 0)
        return TOPO_LINK_INFINIBAND;
    return strcmp(text, "Ethernet") == 0 ? TOPO_LINK_ETHERNET : TOPO_LINK_UNKNOWN;
}

static void read_port(struct topo *topo, const struct topo_nic *nic, int number, struct topo_port *port)
{
    const char *const *states = TEXTS("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"),
                      *const *phys_states = TEXTS("Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp",
                                                  "LinkErrorRecovery", "Phy Test");
    struct source *source = topo->source;

    port->number = number;
    port->state = parse_state(source_line(source, CLASS "/%s/ports/%d/state", nic->name, number).text, states);
    port->phys_state =
        parse_state(source_line(source, CLASS "/%s/ports/%d/phys_state", nic->name, number).text, phys_states);
    port->active = strcmp(port->state, "ACTIVE") == 0 && strcmp(port->phys_state, "LinkUp") == 0;
    port->rate_gbps = parse_rate(source_line(source, CLASS "/%s/ports/%d/rate", nic->name, number).text);
    port->link_layer = parse_link_layer(source_line(source, CLASS "/%s/ports/%d/link_layer", nic->name, number).text);
    port->netdev = port->link_layer == TOPO_LINK_ETHERNET ? find_netdev(topo, nic, number) : "";
    read_gids(topo, nic, port);
}

/*
 * In switchdev mode each virtual function has a representor port at the RDMA device. The name of its interface's port
 * is "pf0vf2" or "pf0sf1", after "c1" for the controller of a host if a DPU names it
 * (Documentation/networking/representors.rst of Linux). It carries no traffic.
 */
static json_t *read_representor(struct source_text file)
{
    size_t n;

    if (*file.text == 'c')
        file.text += 1 + strspn(file.text + 1, "0123456789");
    n = strncmp(file.text, "pf", 2) == 0 ? 2 + strspn(file.text + 2, "0123456789") : 0;
    return json_boolean(n > 2 && (strncmp(file.text + n, "vf", 2) == 0 || strncmp(file.text + n, "sf", 2) == 0));
}

static bool is_representor(struct topo *topo, const char *netdev)
{
    return *netdev && source_fact_bool(source_fact(topo->source, "representor", read_representor,
                                                   "/sys/class/net/%s/phys_port_name", netdev));
}

static void read_ports(struct topo *topo, struct topo_nic *nic)
{
    FOR_NAMES (name, source_list(topo->source, CLASS "/%s/ports", nic->name)) {
        int number = text_number(name, strlen(name), 999);

        if (number < 1)
            continue;
        if (nic->n_ports == TOPO_MAX_PORTS) {
            topo->cut = true;
            break;
        }
        read_port(topo, nic, number, &nic->ports[nic->n_ports]);
        if (is_representor(topo, nic->ports[nic->n_ports].netdev))
            nic->ports[nic->n_ports] = (struct topo_port){.netdev = ""};
        else
            nic->n_ports++;
    }
}

/* --- devices --- */

/* "/dev/infiniband/uverbs0". If RDMA devices share a PCI device, ibdev names the owner; rxe and siw have no folder. */
static const char *find_uverbs(struct topo *topo, const struct topo_nic *nic)
{
    const char *folder =
        nic->pci < 0 ? VERBS_CLASS : source_printf(topo->source, CLASS "/%s/device/infiniband_verbs", nic->name);
    struct source_names names = source_list(topo->source, "%s", folder);

    for (size_t i = 0; i < names.n; i++)
        if ((names.n == 1 && nic->pci >= 0) ||
            strcmp(source_line(topo->source, "%s/%s/ibdev", folder, names.names[i]).text, nic->name) == 0)
            return source_printf(topo->source, "/dev/infiniband/%s", topo_copy_line(topo, names.names[i]));
    return "";
}

static void read_nic(struct topo *topo, const char *name, struct topo_nic *nic)
{
    struct pci_address address;
    char text[20];

    *nic = (struct topo_nic){.name = topo_copy_line(topo, name), .pci = -1, .role_why = "", .access_why = ""};
    if (pci_of_path(source_resolve(topo->source, CLASS "/%s/device", name).text, &address)) {
        print_pci_address(&address, text);
        nic->pci = topo_find_pci(topo, text);
    }
    nic->hca = source_line(topo->source, CLASS "/%s/hca_type", name).text;
    nic->firmware = source_line(topo->source, CLASS "/%s/fw_ver", name).text;
    nic->uverbs = find_uverbs(topo, nic);
    nic->is_iwarp = strstr(source_line(topo->source, CLASS "/%s/node_type", name).text, "RNIC") != NULL;
    read_ports(topo, nic);
}

/* By PCI address, then by name; software devices last. topo.pci is sorted by address, and names are already sorted. */
static void sort_nics(struct topo *topo)
{
    for (int i = 1; i < topo->n_nics; i++) {
        struct topo_nic nic = topo->nics[i];
        int j = i;

        /* -1 is the largest unsigned number. */
        for (; j > 0 && (unsigned)topo->nics[j - 1].pci > (unsigned)nic.pci; j--)
            topo->nics[j] = topo->nics[j - 1];
        topo->nics[j] = nic;
    }
}

void nics_read(struct topo *topo)
{
    struct source_names names = source_list(topo->source, CLASS);

    topo->nics = source_alloc(topo->source, TOPO_MAX_NICS * sizeof(*topo->nics));
    if (names.n > TOPO_MAX_NICS)
        topo->cut = true;
    for (size_t i = 0; i < names.n && i < TOPO_MAX_NICS; i++)
        read_nic(topo, names.names[i], &topo->nics[topo->n_nics++]);
    sort_nics(topo);
}

/* --- the default routes --- */

#define MAX_INTERFACES 64
#define MAX_STACK 4 /* VLAN on bridge on bond on NIC */

/* Interfaces of default routes, then those below them. */
struct interfaces {
    int n;
    const char *names[MAX_INTERFACES];
};

static void add_interface(struct interfaces *interfaces, const char *name)
{
    for (int i = 0; i < interfaces->n; i++)
        if (strcmp(interfaces->names[i], name) == 0)
            return;
    if (interfaces->n < MAX_INTERFACES && *name && !strchr(name, '/'))
        interfaces->names[interfaces->n++] = name;
}

/*
 * The interfaces of default routes. IPv4: destination and mask are 0. IPv6: 32 zeros with a prefix of 00; on lo such a
 * line rejects what is not routed.
 */
static json_t *read_default_routes(struct source_text file)
{
    json_t *names = json_array();

    for (const char *line = file.text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        char name[32], destination[40], mask[16];

        if ((sscanf(line, "%31s %15s %*s %*s %*s %*s %*s %15s", name, destination, mask) == 3 &&
             strcmp(destination, "00000000") == 0 && strcmp(mask, "00000000") == 0) ||
            (sscanf(line, "%39s %15s %*s %*s %*s %*s %*s %*s %*s %31s", destination, mask, name) == 3 &&
             strspn(destination, "0") == 32 && strcmp(mask, "00") == 0 && strcmp(name, "lo") != 0))
            json_array_append_new(names, json_string(name));
    }
    return names;
}

struct source_answer topo_default_routes(struct source *source, const char *file)
{
    return source_fact(source, "default-routes", read_default_routes, "%s", file);
}

static void add_routes(struct topo *topo, struct interfaces *interfaces, const char *file)
{
    struct source_answer routes = topo_default_routes(topo->source, file);

    FOR_JSON (name, routes.value)
        if (json_is_string(name))
            add_interface(interfaces, topo_copy_line(topo, json_string_value(name)));
}

/* The interfaces below a bond, a bridge or a VLAN: its folder has a link lower_<interface> for each. */
static void add_lower(struct topo *topo, struct interfaces *interfaces)
{
    int begin = 0;

    for (int level = 0; level < MAX_STACK; level++) {
        int end = interfaces->n;

        for (int i = begin; i < end; i++)
            FOR_NAMES (name, source_list(topo->source, NET "/%s", interfaces->names[i]))
                if (text_begins(name, "lower_"))
                    add_interface(interfaces, name + 6);
        begin = end;
    }
}

void nics_find_uplinks(struct topo *topo)
{
    struct interfaces interfaces = {.n = 0};

    add_routes(topo, &interfaces, TOPO_ROUTES);
    add_routes(topo, &interfaces, "/proc/net/ipv6_route");
    add_lower(topo, &interfaces);
    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports; p++)
            for (int k = 0; k < interfaces.n; k++)
                if (strcmp(topo->nics[i].ports[p].netdev, interfaces.names[k]) == 0)
                    topo->nics[i].is_uplink = true;
}

/* --- access --- */

static bool has_gids(const struct topo_nic *nic)
{
    return ANY_OF(p, nic->n_ports,
                  nic->ports[p].active && nic->ports[p].link_layer == TOPO_LINK_ETHERNET && nic->ports[p].n_gids > 0);
}

/*
 * Are all GIDs of all active ports in another network namespace? RoCE needs a GID; InfiniBand does not. Without an
 * interface here the kernel may show them as empty: then others that have some tell.
 */
static bool is_in_other_network(const struct topo *topo, const struct topo_nic *nic)
{
    bool has_other = ANY_OF(i, topo->n_nics, has_gids(&topo->nics[i]));
    int n_active = 0;

    FOR_EACH (port, nic->ports, nic->n_ports) {
        if (!port->active)
            continue;
        n_active++;
        if (port->link_layer != TOPO_LINK_ETHERNET || port->n_gids > 0 ||
            (port->n_foreign_gids == 0 &&
             (!has_other || *port->netdev || nic->is_iwarp || port->gids_state != SOURCE_OK)))
            return false;
    }
    return n_active > 0;
}

static void find_access(struct topo *topo, struct topo_nic *nic)
{
    struct source_stat device = {.state = SOURCE_NOT_RECORDED};

    if (*nic->uverbs)
        device = source_stat(topo->source, "%s", nic->uverbs);
    if (device.state == SOURCE_ABSENT) {
        nic->access = TOPO_ACCESS_NO;
        nic->access_why = source_printf(topo->source, "%s is not here", nic->uverbs);
    } else if (device.state == SOURCE_DENIED ||
               (device.state == SOURCE_OK && (!device.may_read || !device.may_write))) {
        nic->access = TOPO_ACCESS_NO;
        nic->access_why = source_printf(topo->source, "%s may not be opened", nic->uverbs);
    } else if (is_in_other_network(topo, nic)) {
        nic->access = TOPO_ACCESS_NO;
        nic->access_why = "its interface is in another network namespace";
    } else if (device.state == SOURCE_OK) {
        nic->access = TOPO_ACCESS_YES;
    }
}

void nics_find_access(struct topo *topo)
{
    for (int i = 0; i < topo->n_nics; i++)
        find_access(topo, &topo->nics[i]);
}
