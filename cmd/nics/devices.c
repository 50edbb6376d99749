/* SPDX-License-Identifier: Apache-2.0 */
/* devices.c - selects the devices to show. */
#include "common/memory.h"
#include "nics.h"

#include "machine/hardware/map.h"

#include "common/text.h"

#include <stdlib.h>
#include <string.h>

static struct nics_device *add(struct nics *nics)
{
    nics->devices = memory_grow(nics->devices, (nics->n + 1) * sizeof(*nics->devices));
    nics->devices[nics->n] = (struct nics_device){.rate_gbps = 0};
    return &nics->devices[nics->n++];
}

static void add_port(const struct topo_nic *nic, const struct topo_port *port, struct nics *nics)
{
    struct nics_device *device = add(nics);
    bool is_only = nic->n_ports == 1;

    snprintf(device->nic, sizeof(device->nic), "%s", nic->name);
    snprintf(device->name, sizeof(device->name), "%s:%d", device->nic, port->number);
    text_clean(is_only ? device->nic : device->name, device->label, sizeof(device->label));
    snprintf(device->netdev, sizeof(device->netdev), "%s", port->netdev);
    device->rate_gbps = port->rate_gbps;
    device->counter.rdma = true;
    device->counter.port = port->number;
}

static void add_interface(const struct topo *topo, const char *name, struct nics *nics)
{
    struct nics_device *device = add(nics);
    int64_t mbps;

    snprintf(device->nic, sizeof(device->nic), "%.63s", name);
    snprintf(device->name, sizeof(device->name), "%.79s", name);
    text_clean(name, device->label, sizeof(device->label));
    /* -1, or not a number, for interfaces without a speed. */
    if (source_number(topo->source, &mbps, "/sys/class/net/%s/speed", name) == SOURCE_OK && mbps > 0)
        device->rate_gbps = (double)mbps / 1000;
}

static void add_data_ports(const struct topo *topo, struct nics *nics)
{
    FOR_EACH (nic, topo->nics, topo->n_nics)
        for (int p = 0; p < nic->n_ports && nic->role == TOPO_ROLE_DATA; p++)
            if (nic->ports[p].active)
                add_port(nic, &nic->ports[p], nics);
}

/* --- names --- */

/* The names that are valid: "mlx5_0, mlx5_1, lo, eth0". */
static void list_known(const struct topo *topo, char *ret_text, size_t bytes)
{
    struct text text = text_in(ret_text, bytes);

    for (int i = 0; i < topo->n_nics; i++)
        text_add(&text, "%s%s", text.n ? ", " : "", topo->nics[i].name);
    FOR_NAMES (interface, source_list(topo->source, "/sys/class/net"))
        text_add(&text, "%s%s", text.n ? ", " : "", interface);
    if (text.n == 0)
        text_add(&text, "none");
}

static int unknown(const struct cmd *cmd, const struct topo *topo, const char *name)
{
    char known[512], clean[128], all[300];

    list_known(topo, known, sizeof(known));
    text_clean(known, all, sizeof(all));
    text_clean(name, clean, sizeof(clean));
    return cmd_refuse(cmd, "--devices", "%s has no device '%s'; it has: %s", source_name(topo->source), clean, all);
}

/* The part after the colon; -1 if it is not a port number. */
static int port_number(const char *text)
{
    char *end;
    long value = strtol(text, &end, 10);

    return *text >= '0' && *text <= '9' && !*end && value <= 255 ? (int)value : -1;
}

static int add_rdma(const struct cmd *cmd, const struct topo_nic *nic, const char *port_text, struct nics *nics)
{
    int wanted = port_text ? port_number(port_text) : 0;
    size_t before = nics->n;

    for (int p = 0; p < nic->n_ports; p++)
        if (!port_text || nic->ports[p].number == wanted)
            add_port(nic, &nic->ports[p], nics);
    if (nics->n == before)
        return cmd_refuse(cmd, "--devices", "%s has no port '%s'; it has %d", nic->name, port_text ? port_text : "",
                          nic->n_ports);
    return CMD_FINE;
}

static int add_named(const struct cmd *cmd, const struct topo *topo, const char *name, struct nics *nics)
{
    char nic_name[64];
    const char *colon = strchr(name, ':');
    size_t length = colon ? (size_t)(colon - name) : strlen(name);
    int nic;

    if (length >= sizeof(nic_name))
        return unknown(cmd, topo, name);
    snprintf(nic_name, sizeof(nic_name), "%.*s", (int)length, name);
    nic = topo_find_nic(topo, nic_name);
    if (nic >= 0)
        return add_rdma(cmd, &topo->nics[nic], colon ? colon + 1 : NULL, nics);
    /* A name is one part of a path, and is not let lead elsewhere. */
    if (strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strlen(name) >= sizeof(nic_name) ||
        !source_is_folder(source_stat(topo->source, "/sys/class/net/%s/statistics", name)))
        return unknown(cmd, topo, name);
    add_interface(topo, name, nics);
    return CMD_FINE;
}

static int add_list(const struct cmd *cmd, const struct topo *topo, const char *list, struct nics *nics)
{
    char name[128];
    int result = CMD_FINE;

    for (const char *at = list; result == CMD_FINE; at++) {
        size_t n = strcspn(at, ",");

        if (n == 0 || n >= sizeof(name))
            return cmd_usage(cmd, "--devices: '%s' is not a comma-separated list of names", list);
        snprintf(name, sizeof(name), "%.*s", (int)n, at);
        result = add_named(cmd, topo, name, nics);
        at += n;
        if (!*at)
            break;
    }
    for (size_t i = 0; i < nics->n && result == CMD_FINE; i++)
        for (size_t k = 0; k < i && result == CMD_FINE; k++)
            if (strcmp(nics->devices[i].name, nics->devices[k].name) == 0)
                result = cmd_usage(cmd, "--devices: %s is named twice", nics->devices[i].label);
    return result;
}

/* --- GPUs --- */

/* A NIC that no GPU uses may be idle with every right, so it does not count when all devices are shown. */
static void add_gpus(const struct topo *topo, bool is_list, struct nics *nics)
{
    struct map *map = map_best(topo);

    FOR_EACH (device, nics->devices, nics->n) {
        device->counter.name = device->name;
        device->counter.nic = device->nic;
        device->counter.netdev = device->netdev;
        for (int gpu = 0; gpu < map->n; gpu++) {
            const struct map_choice *choice = &map->choices[gpu];

            if (choice->nic >= 0 && device->counter.rdma && choice->port == device->counter.port &&
                strcmp(topo->nics[choice->nic].name, device->nic) == 0)
                device->gpus[device->n_gpus++] = gpu;
        }
        device->is_evaluated = is_list || topo->n_gpus == 0 || device->n_gpus > 0;
    }
    map_free(map);
}

int nics_choose(const struct cmd *cmd, const struct topo *topo, const char *list, struct nics *ret_nics)
{
    int result = CMD_FINE;

    *ret_nics = (struct nics){.source = topo->source};
    if (list)
        result = add_list(cmd, topo, list, ret_nics);
    else
        add_data_ports(topo, ret_nics);
    if (result != CMD_FINE) {
        nics_done(ret_nics);
        return result;
    }
    add_gpus(topo, list != NULL, ret_nics);
    ret_nics->tallies = memory_new(ret_nics->n + 1, sizeof(*ret_nics->tallies));
    return CMD_FINE;
}

void nics_done(struct nics *nics)
{
    free(nics->devices);
    free(nics->tallies);
    *nics = (struct nics){0};
}
