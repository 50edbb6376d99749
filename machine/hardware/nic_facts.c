/* SPDX-License-Identifier: Apache-2.0 */
/* nic_facts.c - facts about a NIC other than its ports: does the default route use it, may this process use it? */
#include "read_hardware.h"

#include <stdio.h>
#include <string.h>

#define NET "/sys/class/net"

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
    json_t *name;
    size_t i;

    json_array_foreach ((json_t *)routes.value, i, name)
        if (json_is_string(name))
            add_interface(interfaces, topo_copy_line(topo, json_string_value(name)));
}

/* The interfaces below a bond, a bridge or a VLAN: its folder has a link lower_<interface> for each. */
static void add_lower(struct topo *topo, struct interfaces *interfaces)
{
    int begin = 0;

    for (int level = 0; level < MAX_STACK; level++) {
        int end = interfaces->n;

        for (int i = begin; i < end; i++) {
            struct source_names names = source_list(topo->source, NET "/%s", interfaces->names[i]);

            for (size_t k = 0; k < names.n; k++)
                if (strncmp(names.names[k], "lower_", 6) == 0)
                    add_interface(interfaces, names.names[k] + 6);
        }
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
    for (int p = 0; p < nic->n_ports; p++)
        if (nic->ports[p].active && nic->ports[p].link_layer == TOPO_LINK_ETHERNET && nic->ports[p].n_gids > 0)
            return true;
    return false;
}

/*
 * Are all GIDs of all active ports in another network namespace? RoCE needs a GID; InfiniBand does not. Without an
 * interface here the kernel may show them as empty: then others that have some tell.
 */
static bool is_in_other_network(const struct topo *topo, const struct topo_nic *nic)
{
    int n_active = 0;
    bool has_other = false;

    for (int i = 0; i < topo->n_nics; i++)
        has_other = has_other || has_gids(&topo->nics[i]);

    for (int p = 0; p < nic->n_ports; p++) {
        const struct topo_port *port = &nic->ports[p];

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
