/* SPDX-License-Identifier: Apache-2.0 */
/* map_why.c - the reasons of an assignment, as text. */
#include "map_internal.h"

#include "common/text.h"

#include <stdio.h>

#define NAMED 3 /* alternatives that are named; the rest is counted */

/* "mlx5_0", or "mlx5_0:2" where the NIC has several ports; safe to print. */
static void map_port_name(const struct topo *topo, int nic, int port, char *ret_text, size_t bytes)
{
    char name[64];

    text_clean(topo->nics[nic].name, name, sizeof(name));
    if (topo->nics[nic].n_ports > 1)
        snprintf(ret_text, bytes, "%s:%d", name, port);
    else
        snprintf(ret_text, bytes, "%s", name);
}

static bool is_own(const struct map_choice *choice, const struct map_port *port)
{
    for (int i = 0; i < choice->n_more; i++)
        if (choice->more[i].nic == port->nic && choice->more[i].port == port->port)
            return true;
    return choice->nic == port->nic && choice->port == port->port;
}

/* First GPU other than `gpu` that has this port, -1 if none. */
static int user_of(const struct map *map, const struct map_port *port, int gpu)
{
    for (int i = 0; i < map->n; i++)
        if (i != gpu && is_own(&map->choices[i], port))
            return i;
    return -1;
}

static bool is_idle(const struct map *map, int nic)
{
    for (int i = 0; i < map->n_idle; i++)
        if (map->idle[i] == nic)
            return true;
    return false;
}

/* The other ports at distance `path`, and their use. Returns their number. */
static int add_others(struct text *text, const struct topo *topo, const struct map *map,
                      const struct map_choice *choice, const struct map_port *ports, int n_ports, enum topo_path path)
{
    int n = 0;

    for (int i = 0; i < n_ports; i++) {
        int user = user_of(map, &ports[i], choice->gpu);
        char name[80];

        if (is_own(choice, &ports[i]) || topo_gpu_nic_path(topo, choice->gpu, ports[i].nic) != path)
            continue;
        n++;
        if (n > NAMED)
            continue;
        map_port_name(topo, ports[i].nic, ports[i].port, name, sizeof(name));
        if (user >= 0)
            text_add(text, "%s%s goes to GPU %d", n > 1 ? ", " : "", name, user);
        else
            text_add(text, "%s%s %s", n > 1 ? ", " : "", name,
                     is_idle(map, ports[i].nic) ? "comes later in order and stays idle"
                                                : "goes to a GPU that this process is not given");
    }
    if (n > NAMED)
        text_add(text, " and %d more", n - NAMED);
    return n;
}

static void add_sharing(struct text *text, const struct map *map, const struct map_choice *choice, int n_ports)
{
    bool is_first = true;

    if (choice->sharers < 2)
        return;
    text_add(text, "; shared with GPU ");
    for (int i = 0; i < map->n; i++) {
        if (i == choice->gpu || map->choices[i].nic != choice->nic || map->choices[i].port != choice->port)
            continue;
        text_add(text, "%s%d", is_first ? "" : ", ", i);
        is_first = false;
    }
    text_add(text, ", because %d GPUs have %d port%s", map->n, n_ports, n_ports == 1 ? "" : "s");
}

static void explain_map(const struct topo *topo, const struct map *map, struct map_choice *choice,
                        const struct map_port *ports, int n_ports)
{
    enum topo_path nearest = TOPO_SYS;
    char room[MAP_WHY_BYTES];
    struct text text = text_in(choice->why, sizeof(choice->why)), others = text_in(room, sizeof(room));
    int n;

    for (int i = 0; i < n_ports; i++) {
        enum topo_path path = topo_gpu_nic_path(topo, choice->gpu, ports[i].nic);

        if (path < nearest)
            nearest = path;
    }
    n = add_others(&others, topo, map, choice, ports, n_ports, nearest);
    if (choice->path == nearest && n == 0) {
        text_add(&text, n_ports == 1 ? "the only one, %s" : "nearest, %s; no other is as near",
                 topo_path_name(nearest));
    } else if (choice->path == nearest) {
        text_add(&text, "nearest, %s; of those as near %s", topo_path_name(nearest), others.bytes);
    } else {
        text_add(&text, "%s, not the nearest: %s (%s); ", topo_path_name(choice->path), others.bytes,
                 topo_path_name(nearest));
        text_add(&text, map->n <= n_ports ? "no port serves two GPUs while another is free"
                                          : "the ports serve equally many GPUs, within one");
    }
    add_sharing(&text, map, choice, n_ports);
    for (int i = 0; i < choice->n_more; i++) {
        char name[80];

        map_port_name(topo, choice->more[i].nic, choice->more[i].port, name, sizeof(name));
        text_add(&text, "%s%s", i ? ", " : "; NCCL also uses ", name);
    }
}

void map_explain_best(const struct topo *topo, struct map *map, const struct map_port *ports, int n_ports)
{
    for (int i = 0; i < map->n; i++) {
        struct map_choice *choice = &map->choices[i];

        if (choice->nic >= 0)
            explain_map(topo, map, choice, ports, n_ports);
        else
            map_explain(choice, topo->n_nics ? "none of the NICs carries data over an active port" : "there is no NIC");
    }
}
