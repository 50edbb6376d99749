/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topo_json.c - the topology as JSON. Identifiers of a machine (UUIDs of GPUs, addresses in GIDs) are omitted, so that
 * a document can be shared, and is the same for a machine and its snapshot.
 */
#include "common/output.h"
#include "topo_view.h"

#include <stdio.h>
#include <string.h>

/* --- helpers --- */

static json_t *number_or_null(int64_t number, int64_t unknown)
{
    return number == unknown ? json_null() : json_integer(number);
}

/* Rates and speeds: 0 is unknown. */
static json_t *real_or_null(double number)
{
    return number > 0 ? json_real(number) : json_null();
}

static json_t *truth_or_null(int truth)
{
    return truth < 0 ? json_null() : json_boolean(truth);
}

const char *topo_role_name(enum topo_role role)
{
    static const char *const names[] = {
        [TOPO_ROLE_DATA] = "data",           [TOPO_ROLE_UPLINK] = "uplink",
        [TOPO_ROLE_STORAGE] = "storage",     [TOPO_ROLE_MANAGEMENT] = "management",
        [TOPO_ROLE_NO_ACCESS] = "no-access", [TOPO_ROLE_DOWN] = "down",
        [TOPO_ROLE_VIRTUAL] = "virtual",
    };

    return names[role];
}

const char *topo_link_name(enum topo_link_layer link_layer)
{
    static const char *const names[] = {"", "InfiniBand", "RoCE"};

    return names[link_layer];
}

void topo_gpu_name(const struct topo *topo, const struct topo_gpu *gpu, char *ret_text, size_t bytes)
{
    if (*gpu->name)
        snprintf(ret_text, bytes, "%s", gpu->name);
    else if (topo->pci[gpu->pci].device)
        snprintf(ret_text, bytes, "NVIDIA device %04x", topo->pci[gpu->pci].device);
    else
        snprintf(ret_text, bytes, "NVIDIA GPU");
}

static const char *pci_text(const struct topo *topo, int pci)
{
    return pci >= 0 ? topo->pci[pci].address : "";
}

/* "mlx5_0:1"; null without a NIC. */
static json_t *device_text(const struct topo *topo, const struct map_choice *choice)
{
    if (choice->nic < 0)
        return json_null();
    return json_sprintf("%s:%d", topo->nics[choice->nic].name, choice->port);
}

/* All ports of a GPU, its own first: NCCL uses them all. */
static json_t *devices_json(const struct topo *topo, const struct map_choice *choice)
{
    json_t *devices = json_array();

    if (choice->nic >= 0)
        json_array_append_new(devices, device_text(topo, choice));
    for (int i = 0; i < choice->n_more; i++)
        json_array_append_new(devices,
                              json_sprintf("%s:%d", topo->nics[choice->more[i].nic].name, choice->more[i].port));
    return devices;
}

/* --- tree --- */

static json_t *pci_json(const struct topo *topo, const struct topo_pci *pci)
{
    return json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:o, s:o, s:o, s:o, s:o}", "address", pci->address, "vendor",
        json_sprintf("0x%04x", pci->vendor), "device", json_sprintf("0x%04x", pci->device), "class",
        json_sprintf("0x%06x", pci->class_code), "parent", out_text_or_null(pci_text(topo, pci->parent)), "host_bridge",
        pci->host_bridge >= 0 ? out_text(topo->host_bridge_names[pci->host_bridge]) : json_null(), "numa_node",
        number_or_null(pci->numa_node, -1), "local_cpus", pci->local_cpus, "link_gts", real_or_null(pci->link_gts),
        "link_gts_max", real_or_null(pci->link_gts_max), "link_width", number_or_null(pci->link_width, 0),
        "link_width_max", number_or_null(pci->link_width_max, 0), "driver", out_text_or_null(pci->driver));
}

static json_t *gpu_json(const struct topo *topo, const struct topo_gpu *gpu)
{
    static const char *const fabrics[] = {"none", "starting", "ready", "failed"};
    json_t *peers = json_array();
    char name[256];

    topo_gpu_name(topo, gpu, name, sizeof(name));
    for (int i = 0; i < topo->n_gpus; i++)
        if (gpu->nvlinks_gpu[i])
            json_array_append_new(peers, json_pack("{s:i, s:i}", "gpu", i, "links", gpu->nvlinks_gpu[i]));
    return json_pack("{s:o, s:s, s:s, s:o, s:o, s:b, s:o, s:o, s:o, s:i, s:i, s:i, s:o, s:o}", "index",
                     gpu->index < topo_usable_gpus(topo) ? json_integer(gpu->index) : json_null(), "pci",
                     pci_text(topo, gpu->pci), "name", name, "minor", number_or_null(gpu->minor, -1),
                     "compute_capability",
                     gpu->cc_major ? json_sprintf("%d.%d", gpu->cc_major, gpu->cc_minor) : json_null(), "answered",
                     gpu->answered, "ecc_uncorrected", number_or_null(gpu->ecc_uncorrected, -1), "remap_pending",
                     truth_or_null(gpu->remap_pending), "remap_failed", truth_or_null(gpu->remap_failed), "nvlinks",
                     gpu->nvlinks, "nvlinks_up", gpu->nvlinks_up, "nvlinks_switch", gpu->nvlinks_switch, "nvlink_peers",
                     peers, "fabric", gpu->fabric >= 0 ? out_text(fabrics[gpu->fabric]) : json_null());
}

static void add_tree(const struct topo *topo, json_t *document)
{
    json_t *numa = json_array(), *pci = json_array(), *gpus = json_array();

    for (int i = 0; i < topo->n_numa; i++)
        json_array_append_new(numa,
                              json_pack("{s:i, s:s, s:o}", "number", topo->numa[i].number, "cpus", topo->numa[i].cpus,
                                        "memory_bytes", number_or_null(topo->numa[i].memory_bytes, -1)));
    for (int i = 0; i < topo->n_pci; i++)
        json_array_append_new(pci, pci_json(topo, &topo->pci[i]));
    for (int i = 0; i < topo->n_gpus; i++)
        json_array_append_new(gpus, gpu_json(topo, &topo->gpus[i]));
    json_object_update_new(document,
                           json_pack("{s:{s:o, s:b, s:o}, s:i, s:b, s:o, s:o, s:o}", "driver", "version",
                                     out_text_or_null(topo->driver), "answered", topo->nvml, "why_not",
                                     out_text_or_null(topo->nvml ? "" : topo->nvml_why), "hidden_gpus",
                                     topo->n_hidden_gpus, "cut", topo->cut, "numa", numa, "pci", pci, "gpus", gpus));
}

/* --- matrix --- */

struct device {
    int gpu; /* -1: a NIC */
    int pci;
    char name[80];
};

/* Rows and columns: GPUs, then NICs. Returns their number. */
static int list_devices(const struct topo *topo, struct device ret_devices[TOPO_MAX_GPUS + TOPO_MAX_NICS])
{
    struct device *device = ret_devices;

    for (int gpu = 0; gpu < topo->n_gpus; gpu++, device++) {
        *device = (struct device){.gpu = gpu, .pci = topo->gpus[gpu].pci};
        /* A GPU that has fallen off the bus has no number. */
        if (gpu < topo_usable_gpus(topo))
            snprintf(device->name, sizeof(device->name), "GPU%d", gpu);
        else
            snprintf(device->name, sizeof(device->name), "%s", pci_text(topo, device->pci));
    }
    for (int nic = 0; nic < topo->n_nics; nic++) {
        /* Of virtual functions the physical one is there. */
        if (topo->nics[nic].role == TOPO_ROLE_VIRTUAL || topo->nics[nic].pci < 0)
            continue;
        *device = (struct device){.gpu = -1, .pci = topo->nics[nic].pci};
        snprintf(device++->name, sizeof(device->name), "%s", topo->nics[nic].name);
    }
    return (int)(device - ret_devices);
}

static json_t *path_text(const struct topo *topo, const struct device *a, const struct device *b)
{
    enum topo_path path = topo_path(topo, a->pci, b->pci);
    int links;

    if (a->gpu >= 0 && b->gpu >= 0 && a->gpu != b->gpu) {
        path = topo_gpu_path(topo, a->gpu, b->gpu, &links);
        if (path == TOPO_NVLINK)
            return json_sprintf("NV%d", links);
    }
    return out_text(topo_path_name(path));
}

json_t *topo_matrix_rows(const struct topo_view *view)
{
    const struct topo *topo = view->topo;
    struct device devices[TOPO_MAX_GPUS + TOPO_MAX_NICS];
    json_t *rows = json_array();
    int n = list_devices(topo, devices);

    for (int i = 0; i < n; i++) {
        json_t *paths = json_object();
        const struct topo_pci *pci = &topo->pci[devices[i].pci];

        for (int j = 0; j < n; j++)
            json_object_set_new(paths, devices[j].name, path_text(topo, &devices[i], &devices[j]));
        json_array_append_new(rows, json_pack("{s:s, s:o, s:s, s:o}", "name", devices[i].name, "paths", paths, "cpus",
                                              pci->local_cpus, "numa_node", number_or_null(pci->numa_node, -1)));
    }
    return rows;
}

/* --- map --- */

json_t *topo_map_rows(const struct topo_view *view)
{
    const struct topo *topo = view->topo;
    json_t *rows = json_array();

    for (int i = 0; i < view->best->n; i++) {
        const struct map_choice *choice = &view->best->choices[i];
        const struct topo_port *port = topo_find_port(topo, choice->nic, choice->port);
        int pci = topo->gpus[choice->gpu].pci;

        json_array_append_new(rows, json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:i, s:s}", "gpu", choice->gpu, "device",
                                              device_text(topo, choice), "devices", devices_json(topo, choice), "path",
                                              choice->nic >= 0 ? out_text(topo_path_name(choice->path)) : json_null(),
                                              "numa_node", number_or_null(topo->pci[pci].numa_node, -1), "rate_gbps",
                                              real_or_null(port ? port->rate_gbps : 0), "sharers", choice->sharers,
                                              "why", choice->why));
    }
    return rows;
}

/* One process for each GPU: the local rank is the number of the GPU. */
json_t *topo_rank_rows(const struct topo_view *view)
{
    json_t *rows = json_array();

    for (int i = 0; i < view->best->n; i++)
        if (view->best->choices[i].nic >= 0)
            json_array_append_new(rows, json_pack("{s:i, s:s, s:s}", "rank", i, "NVSHMEM_HCA_LIST",
                                                  map_hca_list(view->topo, view->ibgda, i), "UCX_NET_DEVICES",
                                                  map_hca_list(view->topo, view->best, i)));
    return rows;
}

json_t *topo_nvshmem_rows(const struct topo_view *view)
{
    json_t *rows = json_array();

    for (int i = 0; i < view->nvshmem->n; i++) {
        const struct map_choice *choice = &view->nvshmem->choices[i];

        json_array_append_new(rows, json_pack("{s:i, s:o, s:o, s:i, s:s}", "gpu", choice->gpu, "device",
                                              device_text(view->topo, choice), "path",
                                              choice->nic >= 0 ? out_text(topo_path_name(choice->path)) : json_null(),
                                              "sharers", choice->sharers, "why", choice->why));
    }
    return rows;
}

static void add_map(const struct topo_view *view, json_t *document)
{
    const struct topo *topo = view->topo;
    bool has_map = view->best->n > 0 && view->best->choices[0].nic >= 0;

    json_object_update_new(
        document,
        json_pack("{s:o, s:{s:o, s:o, s:o, s:o}, s:o}", "map", topo_map_rows(view), "forms", "EPKIT_VERBS_DEVICE",
                  has_map && *map_verbs(topo, view->best) ? out_text(map_verbs(topo, view->best)) : json_null(),
                  "DEEP_EP_DEVICE_TO_HCA_MAPPING", has_map ? out_text(map_deepep(topo, view->ibgda)) : json_null(),
                  "NCCL_IB_HCA", has_map ? out_text(map_nccl(topo)) : json_null(), "ranks", topo_rank_rows(view),
                  "nvshmem", topo_nvshmem_rows(view)));
}

/* --- NICs --- */

static json_t *gid_json(const struct topo_gid *gid)
{
    static const char *const types[] = {"IB", "RoCE v1", "RoCE v2", NULL};
    static const char *const kinds[] = {"link-local", "IPv4", "other"};

    return json_pack("{s:i, s:o, s:s}", "index", gid->index, "type",
                     types[gid->type] ? out_text(types[gid->type]) : json_null(), "kind", kinds[gid->kind]);
}

static json_t *port_json(const struct topo_port *port)
{
    static const char *const states[] = {"ok", "absent", "denied", "failed", "unasked"};
    json_t *gids = json_array();

    for (int i = 0; i < port->n_gids; i++)
        json_array_append_new(gids, gid_json(&port->gids[i]));
    return json_pack("{s:i, s:o, s:o, s:b, s:o, s:o, s:o, s:s, s:o}", "number", port->number, "state",
                     out_text_or_null(port->state), "phys_state", out_text_or_null(port->phys_state), "active",
                     port->active, "rate_gbps", real_or_null(port->rate_gbps), "link",
                     out_text_or_null(topo_link_name(port->link_layer)), "netdev", out_text_or_null(port->netdev),
                     "gids_state", states[port->gids_state], "gids", gids);
}

static void add_nics(const struct topo *topo, json_t *document)
{
    json_t *nics = json_array();

    FOR_EACH (nic, topo->nics, topo->n_nics) {
        json_t *ports = json_array();

        for (int j = 0; j < nic->n_ports; j++)
            json_array_append_new(ports, port_json(&nic->ports[j]));
        json_array_append_new(
            nics, json_pack("{s:s, s:o, s:o, s:o, s:o, s:s, s:o, s:o}", "name", nic->name, "pci",
                            out_text_or_null(pci_text(topo, nic->pci)), "hca", out_text_or_null(nic->hca), "firmware",
                            out_text_or_null(nic->firmware), "uverbs", out_text_or_null(nic->uverbs), "role",
                            topo_role_name(nic->role), "role_why", out_text_or_null(nic->role_why), "ports", ports));
    }
    json_object_set_new(document, "nics", nics);
}

/* The GID for RoCE over routed networks; -1 without one. */
static int roce2_ipv4(const struct topo_port *port)
{
    for (int i = 0; i < port->n_gids; i++)
        if (port->gids[i].type == TOPO_GID_ROCE2 && port->gids[i].kind == TOPO_GID_IPV4)
            return port->gids[i].index;
    return -1;
}

json_t *topo_port_rows(const struct topo_view *view)
{
    const struct topo *topo = view->topo;
    json_t *rows = json_array();

    FOR_EACH (nic, topo->nics, topo->n_nics)
        FOR_EACH (port, nic->ports, nic->n_ports)
            json_array_append_new(
                rows, json_pack("{s:o, s:o, s:s, s:o, s:s, s:s, s:o, s:o, s:s}", "device",
                                json_sprintf("%s:%d", nic->name, port->number), "pci",
                                out_text_or_null(pci_text(topo, nic->pci)), "state", port->state, "rate_gbps",
                                port->rate_gbps > 0 ? json_sprintf("%g", port->rate_gbps) : json_null(), "link",
                                topo_link_name(port->link_layer), "netdev", port->netdev, "gid",
                                number_or_null(roce2_ipv4(port), -1), "firmware", out_text_or_null(nic->firmware),
                                "role", topo_role_name(nic->role)));
    return rows;
}

void topo_json(const struct topo_view *view, json_t *document)
{
    char sentence[1024];

    topo_sentence(view, sentence, sizeof(sentence));
    json_object_set_new(document, "verdict", out_text(sentence));
    json_object_set_new(document, "not_read", out_text_or_null(view->topo->not_read));
    if (view->tree)
        add_tree(view->topo, document);
    if (view->matrix)
        json_object_set_new(document, "matrix", topo_matrix_rows(view));
    if (view->map)
        add_map(view, document);
    if (view->nics)
        add_nics(view->topo, document);
}
