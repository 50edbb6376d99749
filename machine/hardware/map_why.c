/* SPDX-License-Identifier: Apache-2.0 */
/* map_why.c - why a GPU has the NIC that it has, in words. */
#include "map_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NAMED 3 /* alternatives that are named; the others are counted */

struct text {
    char bytes[768];
    size_t n;
};

static void __attribute__((format(printf, 2, 3))) add(struct text *text, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(text->bytes + text->n, sizeof(text->bytes) - text->n, format, args);
    va_end(args);
    if (n > 0)
        text->n += (size_t)n;
    if (text->n >= sizeof(text->bytes))
        text->n = sizeof(text->bytes) - 1;
}

void map_port_name(const struct topo *topo, int nic, int port, char *ret_text, size_t bytes)
{
    char name[64];

    root_clean(topo->nics[nic].name, name, sizeof(name));
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

/* The other ports at distance `path`, and what they are used for. The result is their number. */
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
            add(text, "%s%s goes to GPU %d", n > 1 ? ", " : "", name, user);
        else
            add(text, "%s%s %s", n > 1 ? ", " : "", name,
                is_idle(map, ports[i].nic) ? "comes later in order and stays idle"
                                           : "goes to a GPU that this process is not given");
    }
    if (n > NAMED)
        add(text, " and %d more", n - NAMED);
    return n;
}

static void add_sharing(struct text *text, const struct map *map, const struct map_choice *choice, int n_ports)
{
    bool is_first = true;

    if (choice->sharers < 2)
        return;
    add(text, "; shared with GPU ");
    for (int i = 0; i < map->n; i++) {
        if (i == choice->gpu || map->choices[i].nic != choice->nic || map->choices[i].port != choice->port)
            continue;
        add(text, "%s%d", is_first ? "" : ", ", i);
        is_first = false;
    }
    add(text, ", because %d GPUs have %d port%s", map->n, n_ports, n_ports == 1 ? "" : "s");
}

static ep_status explain(const struct topo *topo, struct map *map, struct map_choice *choice,
                         const struct map_port *ports, int n_ports)
{
    enum topo_path nearest = TOPO_SYS;
    struct text text = {.n = 0}, others = {.n = 0};
    int n;

    for (int i = 0; i < n_ports; i++) {
        enum topo_path path = topo_gpu_nic_path(topo, choice->gpu, ports[i].nic);

        if (path < nearest)
            nearest = path;
    }
    n = add_others(&others, topo, map, choice, ports, n_ports, nearest);
    if (choice->path == nearest && n == 0) {
        add(&text, n_ports == 1 ? "the only one, %s" : "nearest, %s; no other is as near", topo_path_name(nearest));
    } else if (choice->path == nearest) {
        add(&text, "nearest, %s; of those as near %s", topo_path_name(nearest), others.bytes);
    } else {
        add(&text, "%s, not the nearest: %s (%s); ", topo_path_name(choice->path), others.bytes,
            topo_path_name(nearest));
        add(&text, map->n <= n_ports ? "no port serves two GPUs while another is free"
                                     : "the ports serve equally many GPUs, within one");
    }
    add_sharing(&text, map, choice, n_ports);
    for (int i = 0; i < choice->n_more; i++) {
        char name[80];

        map_port_name(topo, choice->more[i].nic, choice->more[i].port, name, sizeof(name));
        add(&text, "%s%s", i ? ", " : "; NCCL also uses ", name);
    }
    return map_explain(map, choice->gpu, "%s", text.bytes);
}

ep_status map_explain_best(const struct topo *topo, struct map *map, const struct map_port *ports, int n_ports)
{
    ep_status status = EP_OK;

    for (int i = 0; i < map->n && status == EP_OK; i++) {
        if (map->choices[i].nic < 0)
            status = map_explain(
                map, i, topo->n_nics ? "none of the NICs carries data over an active port" : "there is no NIC");
        else
            status = explain(topo, map, &map->choices[i], ports, n_ports);
    }
    return status;
}
