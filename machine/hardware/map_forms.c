/* SPDX-License-Identifier: Apache-2.0 */
/* map_forms.c - maps as other programs write and read them. */
#include "read_hardware.h"

#include "base/error.h"

#include "common/text.h"

#include <stdio.h>
#include <string.h>

/* --- reading --- */

#define ENTRY_BYTES 96

/* Without a number it is the first active port, as NVSHMEM takes it; without an active one the first. */
static int first_port(const struct topo_nic *nic)
{
    for (int i = 0; i < nic->n_ports && i < TOPO_MAX_PORTS; i++)
        if (nic->ports[i].active)
            return nic->ports[i].number;
    return nic->n_ports > 0 ? nic->ports[0].number : 1;
}

/* "GPU:NIC" or "GPU:NIC:PORT", at most ENTRY_BYTES long. Entries for GPUs of other processes are ignored. */
static ep_status parse_entry(const struct topo *topo, const char *entry, int n, struct map *map)
{
    size_t gpu_length = strcspn(entry, ":");
    const char *name = entry + gpu_length + (entry[gpu_length] == ':');
    size_t name_length = strcspn(name, ":");
    const char *port_text = name[name_length] ? name + name_length + 1 : NULL;
    int gpu = text_number(entry, gpu_length, topo->n_gpus + topo->n_hidden_gpus - 1), nic, port;
    char nic_name[ENTRY_BYTES], clean[ENTRY_BYTES];

    text_clean(entry, clean, sizeof(clean));
    if (!entry[gpu_length] || name_length == 0)
        return ep_fail(EP_E_ARG, "entry %d, '%s', is not GPU:NIC or GPU:NIC:PORT", n, clean);
    if (strchr(entry, ';'))
        return ep_fail(EP_E_ARG, "entry %d, '%s': entries are divided by ',' and by nothing else", n, clean);
    if (gpu < 0)
        return ep_fail(EP_E_ARG, "entry %d, '%s': no GPU has the number before the colon; there %s %d", n, clean,
                       topo->n_gpus == 1 ? "is" : "are", topo->n_gpus);
    if (gpu >= topo->n_gpus)
        return EP_OK;
    if (map->choices[gpu].nic >= 0)
        return ep_fail(EP_E_ARG, "entry %d, '%s': GPU %d has a NIC from an entry before", n, clean, gpu);
    snprintf(nic_name, sizeof(nic_name), "%.*s", (int)name_length, name);
    nic = topo_find_nic(topo, nic_name);
    if (nic < 0)
        return ep_fail(EP_E_ARG, "entry %d, '%s': no NIC has that name", n, clean);
    port = port_text ? text_number(port_text, strlen(port_text), 255) : first_port(&topo->nics[nic]);
    if (port_text && (port < 0 || !topo_find_port(topo, nic, port)))
        return ep_fail(EP_E_ARG, "entry %d, '%s': the NIC has no such port; it has %d", n, clean,
                       topo->nics[nic].n_ports);
    map->choices[gpu].nic = nic;
    map->choices[gpu].port = port;
    map_explain(&map->choices[gpu], "entry %d of the text: %s", n, clean);
    return EP_OK;
}

static ep_status parse_form(const struct topo *topo, const char *text, struct map *map)
{
    char entry[ENTRY_BYTES];
    int n = 0;

    for (const char *at = text;; at++) {
        size_t length = strcspn(at, ",");

        n++;
        if (length >= sizeof(entry))
            return ep_fail(EP_E_ARG, "entry %d is longer than %d characters", n, ENTRY_BYTES - 1);
        memcpy(entry, at, length);
        entry[length] = '\0';
        EP_TRY(parse_entry(topo, entry, n, map));
        at += length;
        if (!*at)
            break;
    }
    for (int gpu = 0; gpu < map->n; gpu++)
        if (map->choices[gpu].nic < 0)
            map_explain(&map->choices[gpu], "the text does not name this GPU");
    map_finish(topo, map);
    return EP_OK;
}

ep_status map_parse(const struct topo *topo, const char *text, struct map **ret_map)
{
    struct map *map = map_new(topo);
    ep_status status = parse_form(topo, text, map);

    if (status != EP_OK) {
        map_free(map);
        return status;
    }
    *ret_map = map;
    return EP_OK;
}

/* --- writing --- */

const char *map_deepep(const struct topo *topo, const struct map *map)
{
    const char *text = "";

    for (int i = 0; i < map->n; i++)
        if (map->choices[i].nic >= 0)
            text = source_printf(topo->source, "%s%s%d:%s", text, *text ? "," : "", i, map_hca_list(topo, map, i));
    return text;
}

const char *map_hca_list(const struct topo *topo, const struct map *map, int gpu)
{
    const struct map_choice *choice = &map->choices[gpu];
    char name[64];

    if (choice->nic < 0)
        return "";
    text_clean(topo->nics[choice->nic].name, name, sizeof(name));
    return source_printf(topo->source, "%s:%d", name, choice->port);
}

const char *map_nccl(const struct topo *topo)
{
    struct map_port ports[TOPO_MAX_NICS * TOPO_MAX_PORTS];
    int n = map_data_ports(topo, ports);
    const char *text = "";
    char name[64];

    for (int i = 0; i < n; i++) {
        text_clean(topo->nics[ports[i].nic].name, name, sizeof(name));
        text = source_printf(topo->source, "%s%s%s:%d", text, *text ? "," : "=", name, ports[i].port);
    }
    return text;
}

const char *map_verbs(const struct topo *topo, const struct map *map)
{
    const char *text = "";

    for (int i = 0; i < map->n; i++) {
        if (map->choices[i].nic < 0)
            return "";
        text = source_printf(topo->source, "%s%s%s", text, i ? "," : "", map_hca_list(topo, map, i));
    }
    return text;
}
