/* SPDX-License-Identifier: Apache-2.0 */
/* topo_text.c - the topology as text. */
#include "common/memory.h"
#include "common/output.h"
#include "topo_view.h"

#include "common/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAMED 4 /* NICs that are named; the rest is counted */

/* --- sentence --- */

/* Length of `name` without the number at its end, which is *ret_number; -1 without one. */
static size_t stem(const char *name, int *ret_number)
{
    size_t n = strlen(name), all = n;

    while (n > 0 && name[n - 1] >= '0' && name[n - 1] <= '9')
        n--;
    *ret_number = n < all && all - n < 6 ? atoi(name + n) : -1;
    return n;
}

static bool follows(const char *name, const char *before)
{
    int number, number_before;
    size_t n = stem(name, &number);

    return n == stem(before, &number_before) && strncmp(name, before, n) == 0 && number_before >= 0 &&
           number == number_before + 1;
}

/* The end of the consecutive names that start with `first`. */
static int end_of_row(const struct topo *topo, const int *nics, int n, int first)
{
    int i = first + 1;

    while (i < n && follows(topo->nics[nics[i]].name, topo->nics[nics[i - 1]].name))
        i++;
    return i;
}

/* "mlx5_0..mlx5_7", or a list with commas; after the fourth the rest is counted. */
static void name_nics(const struct topo *topo, const int *nics, int n, char *ret_text, size_t bytes)
{
    struct text text = text_in(ret_text, bytes);
    int first = 0;

    for (int parts = 0; first < n && (parts < NAMED || n - first == 1); parts++) {
        int end = end_of_row(topo, nics, n, first);
        bool is_row = end - first > 2;

        if (!is_row)
            end = first + 1;
        text_add(&text, "%s%s", first == 0 ? "" : end == n ? " and " : ", ", topo->nics[nics[first]].name);
        if (is_row)
            text_add(&text, "..%s", topo->nics[nics[end - 1]].name);
        first = end;
    }
    if (first < n)
        text_add(&text, " and %d more", n - first);
}

/* "8 x NVIDIA B200", several kinds separated by commas. */
static void add_gpus(struct text *text, const struct topo *topo)
{
    bool counted[TOPO_MAX_GPUS] = {false};

    if (topo->n_gpus == 0)
        text_add(text, "No NVIDIA GPU");
    for (int i = 0; i < topo->n_gpus; i++) {
        char name[256], other[256];
        int n = 0;

        if (counted[i])
            continue;
        topo_gpu_name(topo, &topo->gpus[i], name, sizeof(name));
        for (int j = i; j < topo->n_gpus; j++) {
            topo_gpu_name(topo, &topo->gpus[j], other, sizeof(other));
            if (strcmp(name, other) == 0) {
                counted[j] = true;
                n++;
            }
        }
        text_add(text, "%s%d x %s", i ? ", " : "", n, name);
    }
    if (topo_usable_gpus(topo) < topo->n_gpus)
        text_add(text, " (%d of them the driver does not answer for)", topo->n_gpus - topo_usable_gpus(topo));
    if (topo->n_hidden_gpus)
        text_add(text, " (%d more on the PCI bus %s not offered to this process)", topo->n_hidden_gpus,
                 topo->n_hidden_gpus == 1 ? "is" : "are");
}

static void add_rates(struct text *text, const struct topo *topo, const int *nics, int n)
{
    double slowest = 0, fastest = 0;
    bool kinds[3] = {false};

    for (int i = 0; i < n; i++) {
        const struct topo_nic *nic = &topo->nics[nics[i]];

        FOR_EACH (port, nic->ports, nic->n_ports) {
            if (!port->active)
                continue;
            kinds[port->link_layer] = true;
            if (port->rate_gbps > fastest)
                fastest = port->rate_gbps;
            if (port->rate_gbps > 0 && (slowest <= 0 || port->rate_gbps < slowest))
                slowest = port->rate_gbps;
        }
    }
    if (fastest > slowest)
        text_add(text, ", %g to %g Gb/s", slowest, fastest);
    else if (fastest > 0)
        text_add(text, ", %g Gb/s", fastest);
    for (int i = TOPO_LINK_INFINIBAND, before = 0; i <= TOPO_LINK_ETHERNET; i++)
        if (kinds[i])
            text_add(text, "%s%s", before++ ? " and " : " ", topo_link_name((enum topo_link_layer)i));
}

/* Is an active port of a data NIC nearer to the GPU than its own NIC? */
static bool has_nearer(const struct topo *topo, const struct map_choice *choice)
{
    return ANY_OF(i, topo->n_nics,
                  topo->nics[i].role == TOPO_ROLE_DATA && topo_gpu_nic_path(topo, choice->gpu, i) < choice->path);
}

/* A flat bus: several GPUs and data NICs, all equally far, none sharing a switch. */
static bool is_flat(const struct topo *topo, const struct map *map)
{
    int n_nics = 0;

    for (int i = 0; i < topo->n_nics; i++) {
        if (topo->nics[i].role != TOPO_ROLE_DATA)
            continue;
        n_nics++;
        for (int g = 0; g < map->n; g++)
            if (topo_gpu_nic_path(topo, map->choices[g].gpu, i) != map->choices[0].path)
                return false;
    }
    return map->n > 1 && n_nics > 1 && map->choices[0].path >= TOPO_PHB;
}

static void add_map(struct text *text, const struct topo *topo, const struct map *map)
{
    int n_far = 0, most = 1;

    for (int i = 0; i < map->n; i++) {
        n_far += has_nearer(topo, &map->choices[i]);
        if (map->choices[i].sharers > most)
            most = map->choices[i].sharers;
    }
    if (map->n == 1)
        text_add(text, ", %s", n_far ? "the GPU's NIC is not the nearest one" : "the nearest one for the GPU");
    else if (map->n_shared == 0 && is_flat(topo, map))
        text_add(text, ", each GPU its own NIC, in the order of addresses: the bus shows all of them as near");
    else if (map->n_shared == 0 && n_far == 0)
        text_add(text, ", each GPU its own nearest NIC");
    else if (map->n_shared == 0)
        text_add(text, ", each GPU its own NIC, for %d not the nearest one", n_far);
    else
        text_add(text, ", %d of the NICs shared by up to %d GPUs", map->n_shared, most);
}

/* Does this process have access to any of them, as far as is known? */
static bool has_access(const struct topo *topo, const int *nics, int n)
{
    return ANY_OF(i, n, topo->nics[nics[i]].access != TOPO_ACCESS_NO);
}

void topo_sentence(const struct topo_view *view, char *ret_text, size_t bytes)
{
    const struct topo *topo = view->topo;
    struct text text = text_in(ret_text, bytes);
    int nics[TOPO_MAX_NICS] = {0}, n = 0;
    char names[512];

    for (int i = 0; i < topo->n_nics; i++)
        if (topo->nics[i].role == TOPO_ROLE_DATA)
            nics[n++] = i;
    name_nics(topo, nics, n, names, sizeof(names));
    add_gpus(&text, topo);
    if (n == 0) {
        text_add(&text, topo->n_nics ? " and no NIC that can carry data (%d excluded)." : " and no RDMA NIC.",
                 topo->n_nics);
        return;
    }
    text_add(&text, " and %d NIC%s (%s", n, n == 1 ? "" : "s", names);
    add_rates(&text, topo, nics, n);
    text_add(&text, ")");
    if (!has_access(topo, nics, n))
        text_add(&text, ", none of which this process may use");
    if (view->best->n > 0)
        add_map(&text, topo, view->best);
    text_add(&text, ".");
}

/* --- tree --- */

struct tree {
    const struct topo *topo;
    int *below;    /* by PCI device: GPUs and NICs in it and below it */
    int *branches; /* by PCI device: devices directly below it that have one */
};

static void count(struct tree *tree, int pci)
{
    /* Parents only lead upwards; the bound is for invalid trees. */
    for (int depth = 0; pci >= 0 && depth < 64; depth++) {
        int parent = tree->topo->pci[pci].parent;

        if (tree->below[pci]++ == 0 && parent >= 0)
            tree->branches[parent]++;
        pci = parent;
    }
}

static void add_link(struct text *text, const struct topo_pci *pci)
{
    if (pci->link_gts <= 0 || pci->link_width == 0)
        return;
    text_add(text, "  PCIe %g GT/s x%d", pci->link_gts, pci->link_width);
    if (pci->link_gts < pci->link_gts_max || pci->link_width < pci->link_width_max)
        text_add(text, " (of %g GT/s x%d)", pci->link_gts_max, pci->link_width_max);
}

static void add_nic(struct text *text, const struct topo_nic *nic)
{
    text_add(text, "  %s ", nic->name);
    for (int i = 0; i < nic->n_ports; i++) {
        const struct topo_port *port = &nic->ports[i];

        text_add(text, "%s", i ? ";" : "");
        if (nic->n_ports > 1)
            text_add(text, " port %d:", port->number);
        if (port->active && port->rate_gbps > 0)
            text_add(text, " %g Gb/s", port->rate_gbps);
        text_add(text, "%s%s", *topo_link_name(port->link_layer) ? " " : "", topo_link_name(port->link_layer));
        if (!port->active)
            text_add(text, " %s", *port->state ? port->state : "state not known");
        if (*port->netdev)
            text_add(text, " (%s)", port->netdev);
    }
    if (nic->role != TOPO_ROLE_DATA)
        text_add(text, "  %s", topo_role_name(nic->role));
}

/* The contents of the PCI device itself: a GPU, NICs (one device may have several), or nothing. */
static void print_device(const struct tree *tree, int pci, int indent)
{
    const struct topo *topo = tree->topo;
    char bytes[1024], name[256];
    struct text text = text_in(bytes, sizeof(bytes));

    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].pci == pci) {
            topo_gpu_name(topo, &topo->gpus[i], name, sizeof(name));
            if (i < topo_usable_gpus(topo))
                text_add(&text, "  GPU %d  %s", i, name);
            else
                text_add(&text, "  GPU  %s, the driver does not answer for it", name);
        }
    for (int i = 0; i < topo->n_nics; i++)
        if (topo->nics[i].pci == pci)
            add_nic(&text, &topo->nics[i]);
    if (!bytes[0])
        return;
    add_link(&text, &topo->pci[pci]);
    out_line("%*s%s%s", indent, "", topo->pci[pci].address, bytes);
}

/* Prints a device and those below it. Ports with a single device below them are omitted. */
static void print_branch(const struct tree *tree, int pci, int indent)
{
    if (tree->branches[pci] > 1) {
        out_line("%*s%s  switch", indent, "", tree->topo->pci[pci].address);
        indent += 4;
    }
    print_device(tree, pci, indent);
    for (int i = 0; i < tree->topo->n_pci; i++)
        if (tree->topo->pci[i].parent == pci && tree->below[i])
            print_branch(tree, i, indent);
}

static void print_host_bridge(const struct tree *tree, int bridge)
{
    const struct topo *topo = tree->topo;
    bool has_begun = false;

    for (int i = 0; i < topo->n_pci; i++) {
        const struct topo_pci *pci = &topo->pci[i];

        if (pci->host_bridge != bridge || pci->parent >= 0 || !tree->below[i])
            continue;
        if (!has_begun) {
            char where[300] = "";

            if (pci->numa_node >= 0)
                text_append(where, sizeof(where), "  NUMA node %d", pci->numa_node);
            if (*pci->local_cpus)
                text_append(where, sizeof(where), "%s CPUs %.200s", *where ? "," : " ", pci->local_cpus);
            out_line("%s%s", bridge >= 0 ? topo->host_bridge_names[bridge] : "not in sysfs", where);
            has_begun = true;
        }
        print_branch(tree, i, 4);
    }
}

static int print_tree(const struct topo_view *view)
{
    const struct topo *topo = view->topo;
    struct tree tree = {.topo = topo};
    char bytes[512];

    tree.below = memory_new((size_t)topo->n_pci, sizeof(*tree.below));
    tree.branches = memory_new((size_t)topo->n_pci, sizeof(*tree.branches));
    for (int i = 0; i < topo->n_gpus; i++)
        count(&tree, topo->gpus[i].pci);
    for (int i = 0; i < topo->n_nics; i++)
        count(&tree, topo->nics[i].pci);
    for (int i = 0; i < topo->n_host_bridges; i++)
        print_host_bridge(&tree, i);
    print_host_bridge(&tree, -1);
    free(tree.below);
    free(tree.branches);
    for (int i = 0; i < topo->n_nics; i++) {
        struct text text = text_in(bytes, sizeof(bytes));

        if (topo->nics[i].pci >= 0)
            continue;
        add_nic(&text, &topo->nics[i]);
        out_line("no PCI device%s", bytes);
    }
    if (*topo->driver)
        out_line("NVIDIA driver %s", topo->driver);
    if (*topo->topology_file)
        out_line("Devices that share a PCIe switch on the host: by %s, as the bus does not show it.",
                 topo->topology_file);
    if (!topo->nvml && topo->n_gpus)
        out_line("The driver did not answer (%s): NVLinks and compute capabilities are not known.", topo->nvml_why);
    if (topo->cut)
        out_line("There are more devices than are shown.");
    return 0;
}

/* --- matrix --- */

static int print_matrix(const struct topo_view *view)
{
    json_t *rows = topo_matrix_rows(view), *flat = json_array(), *row;
    size_t n = json_array_size(rows);
    struct out_column *columns = memory_new(n + 3, sizeof(*columns));
    int result;

    columns[0] = (struct out_column){.title = "", .key = "name"};
    for (size_t i = 0; (row = json_array_get(rows, i)); i++) {
        const char *name = json_string_value(json_object_get(row, "name"));
        json_t *line = json_copy(json_object_get(row, "paths"));

        /* Device names contain no space, so these keys cannot collide. */
        json_object_set(line, "name", json_object_get(row, "name"));
        json_object_set(line, " cpus", json_object_get(row, "cpus"));
        json_object_set(line, " numa", json_object_get(row, "numa_node"));
        json_array_append_new(flat, line);
        columns[i + 1] = (struct out_column){.title = name, .key = name};
    }
    columns[n + 1] = (struct out_column){.title = "CPU affinity", .key = " cpus"};
    columns[n + 2] = (struct out_column){.title = "NUMA", .key = " numa"};
    result = out_table(stdout, columns, n + 3, flat, OUT_TABLE);
    out_line("X itself; NV# that many NVLinks; PIX the same PCIe switch; PXB several PCIe switches; PHB the PCIe "
             "host bridge;\nNODE host bridges of one NUMA node; SYS between NUMA nodes");
    free(columns);
    json_decref(rows);
    json_decref(flat);
    return result;
}

/* --- map --- */

static void print_excluded(const struct topo *topo)
{
    bool has_begun = false;

    for (int i = 0; i < topo->n_nics; i++) {
        if (topo->nics[i].role == TOPO_ROLE_DATA)
            continue;
        if (!has_begun)
            out_line("\nNICs that are left out:");
        has_begun = true;
        out_line("    %s  %s: %s", topo->nics[i].name, topo_role_name(topo->nics[i].role), topo->nics[i].role_why);
    }
}

/* "mlx5_0:1, mlx5_1:1" */
static json_t *join_devices(const json_t *devices)
{
    char text[512];
    struct text all = text_in(text, sizeof(text));

    for (size_t i = 0; i < json_array_size(devices); i++)
        text_add(&all, "%s%s", i ? ", " : "", json_string_value(json_array_get(devices, i)));
    return *text ? json_string(text) : json_null();
}

static int print_map_table(const struct topo_view *view)
{
    static const struct out_column columns[] = {
        {.title = "GPU", .key = "gpu"},        {.title = "NIC", .key = "ports"}, {.title = "PATH", .key = "path"},
        {.title = "NUMA", .key = "numa_node"}, {.title = "Gb/s", .key = "rate"}, {.title = "WHY", .key = "why"},
    };
    json_t *rows = topo_map_rows(view);

    FOR_JSON (row, rows) {
        double rate = json_number_value(json_object_get(row, "rate_gbps"));

        json_object_set_new(row, "rate", rate > 0 ? json_sprintf("%g", rate) : json_null());
        json_object_set_new(row, "ports", join_devices(json_object_get(row, "devices")));
    }
    return OUT_PRINT(columns, rows);
}

static int print_forms(const struct topo_view *view)
{
    static const struct out_column columns[] = {
        {.title = "RANK", .key = "rank"},
        {.title = "NVSHMEM_HCA_LIST", .key = "NVSHMEM_HCA_LIST"},
        {.title = "UCX_NET_DEVICES", .key = "UCX_NET_DEVICES"},
    };
    json_t *rows = topo_rank_rows(view);

    out_line("\nFor all processes:\n    DEEP_EP_DEVICE_TO_HCA_MAPPING=%s\n    NCCL_IB_HCA=%s",
             map_deepep(view->topo, view->ibgda), map_nccl(view->topo));
    if (*map_verbs(view->topo, view->best))
        out_line("    EPKIT_VERBS_DEVICE=%s", map_verbs(view->topo, view->best));
    out_line("\nFor each process, one for each GPU:");
    return OUT_PRINT(columns, rows);
}

/* NICs that more than one GPU uses, in order. */
static int list_shared(const struct topo *topo, const struct map *map, int ret_nics[TOPO_MAX_NICS])
{
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++)
        if (COUNT_OF(j, map->n, map->choices[j].nic == i) > 1)
            ret_nics[n++] = i;
    return n;
}

static int print_nvshmem(const struct topo_view *view)
{
    static const struct out_column columns[] = {
        {.title = "GPU", .key = "gpu"},
        {.title = "NIC", .key = "device"},
        {.title = "PATH", .key = "path"},
        {.title = "WHY", .key = "why"},
    };
    const struct map *map = view->nvshmem;
    int shared[TOPO_MAX_NICS] = {0}, n_shared;
    char idle_names[512], shared_names[512];
    json_t *rows;

    n_shared = list_shared(view->topo, map, shared);
    name_nics(view->topo, shared, n_shared, shared_names, sizeof(shared_names));
    name_nics(view->topo, map->idle, map->n_idle, idle_names, sizeof(idle_names));
    if (map->choices[0].nic < 0) {
        out_line("\nWhat NVSHMEM would choose by itself: nothing. %s", map->choices[0].why);
        return 0;
    }
    if (n_shared == 0)
        out_line("\nWhat NVSHMEM would choose by itself: a NIC of its own for each GPU.");
    else
        out_line("\nWhat NVSHMEM would choose by itself: several GPUs would share %s%s%s%s.", shared_names,
                 map->n_idle ? ", and " : "", map->n_idle ? idle_names : "", map->n_idle ? " would be idle" : "");
    rows = topo_nvshmem_rows(view);
    return OUT_PRINT(columns, rows);
}

/* Why NVSHMEM and DeepEP get other NICs than the table says. */
static void print_unsupported(const struct topo_view *view)
{
    int nics[TOPO_MAX_NICS], n = 0;
    char names[512];

    for (int i = 0; i < view->topo->n_nics; i++)
        if (view->topo->nics[i].role == TOPO_ROLE_DATA && !topo_has_ibgda(view->topo, i))
            nics[n++] = i;
    name_nics(view->topo, nics, n, names, sizeof(names));
    for (int gpu = 0; gpu < view->best->n; gpu++)
        if (view->ibgda->choices[gpu].nic != view->best->choices[gpu].nic) {
            out_line("IBGDA does not support %s: NVSHMEM and DeepEP get only NVIDIA's NICs.", names);
            return;
        }
}

static int print_map(const struct topo_view *view)
{
    const struct topo *topo = view->topo;
    char names[512];
    int result = 0;

    if (view->best->n == 0) {
        out_line("There is no NVIDIA GPU that could use a NIC.");
    } else if (view->best->choices[0].nic < 0) {
        out_line("There is no NIC that a GPU could use.");
    } else {
        result = print_map_table(view);
        name_nics(topo, view->best->idle, view->best->n_idle, names, sizeof(names));
        if (view->best->n_idle)
            out_line("No GPU needs %s.", names);
        print_unsupported(view);
        if (result == 0)
            result = print_forms(view);
        if (result == 0)
            result = print_nvshmem(view);
    }
    print_excluded(topo);
    return result;
}

/* --- NICs --- */

static int print_nics(const struct topo_view *view)
{
    static const struct out_column columns[] = {
        {.title = "NIC", .key = "device"},    {.title = "PCI", .key = "pci"},
        {.title = "STATE", .key = "state"},   {.title = "Gb/s", .key = "rate_gbps", .flags = OUT_RIGHT},
        {.title = "LINK", .key = "link"},     {.title = "INTERFACE", .key = "netdev"},
        {.title = "GID", .key = "gid"},       {.title = "FIRMWARE", .key = "firmware"},
        {.title = "USED FOR", .key = "role"},
    };
    json_t *rows = topo_port_rows(view);
    bool has_gid = false;
    int result;

    FOR_JSON (row, rows)
        has_gid = has_gid || json_is_integer(json_object_get(row, "gid"));

    if (json_array_size(rows) == 0) {
        out_line("There is no RDMA NIC with a port.");
        json_decref(rows);
        return 0;
    }
    result = OUT_PRINT(columns, rows);
    if (has_gid && result == 0)
        out_line("GID is the index of the address for RoCE v2 over IPv4.");
    return result;
}

int topo_text(const struct topo_view *view)
{
    const struct {
        bool is_wanted;
        int (*print)(const struct topo_view *view);
    } sections[] = {
        {view->tree, print_tree}, {view->matrix, print_matrix}, {view->map, print_map}, {view->nics, print_nics}};
    bool is_good = view->best->n > 0 && view->best->n_shared == 0 && view->best->choices[0].nic >= 0;
    char sentence[1024];
    int result = 0;

    topo_sentence(view, sentence, sizeof(sentence));
    out_verdict(is_good ? OUT_GOOD : OUT_PLAIN, "%s", sentence);
    if (*view->topo->not_read)
        out_line("Devices may be missing, these could not be read: %s", view->topo->not_read);
    for (size_t i = 0; i < COUNT(sections) && result == 0; i++)
        if (sections[i].is_wanted) {
            out_line("%s", "");
            result = sections[i].print(view);
        }
    return result;
}
