/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pci.c - the PCI tree, from the links in /sys/bus/pci/devices: each resolves to a path that names the host bridge and
 * all bridges above the device.
 *
 * hwloc reads the same, but not from a snapshot, and it follows links out of a root directory.
 */
#include "common/memory.h"
#include "common/text.h"
#include "read_hardware.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HOST_BRIDGES 256
#define MAX_DEPTH 32      /* bridges above a device; PCIe switches are rarely nested more than three deep */
#define MAX_LINK_WIDTH 32 /* the widest PCIe link; 63 and 255 stand for an unreadable register */

/* A device on the path from a host bridge to a wanted device. */
struct tree_node {
    struct pci_address address, parent;
    struct pci_address host_bridge;
    bool has_parent, has_host_bridge;
};

struct tree_nodes {
    int n;
    bool is_full;
    struct tree_node *tree_nodes; /* TOPO_MAX_PCI */
};

/* --- which devices --- */

void pci_set_add(struct pci_set *set, const struct pci_address *address)
{
    if (set->n == TOPO_MAX_PCI)
        set->is_full = true;
    else
        set->addresses[set->n++] = *address;
}

void pci_set_read(struct source *source, struct pci_set *ret_set)
{
    struct source_names names = source_list(source, "/sys/bus/pci/devices");
    struct pci_set set = {.why = names.why, .state = names.state, .n_seen = (int)names.n};

    set.addresses = memory_new(TOPO_MAX_PCI, sizeof(*set.addresses));
    for (size_t i = 0; i < names.n; i++) {
        struct pci_address address;
        int64_t class, vendor;
        bool is_gpu;

        if (!parse_pci_address(names.names[i], &address) ||
            source_number(source, &class, "/sys/bus/pci/devices/%s/class", names.names[i]) != SOURCE_OK)
            continue;
        class = class >> 16 & 0xff;
        is_gpu = class == PCI_CLASS_DISPLAY &&
                 source_number(source, &vendor, "/sys/bus/pci/devices/%s/vendor", names.names[i]) == SOURCE_OK &&
                 vendor == PCI_VENDOR_NVIDIA;
        if (!is_gpu && class != PCI_CLASS_NETWORK)
            continue;
        set.n_gpus += is_gpu;
        pci_set_add(&set, &address);
    }
    *ret_set = set;
}

/* --- where they are --- */

/* Copies the next component of a path and advances it. NULL at the end. */
static const char *next_part(const char **path, char *ret_part, size_t bytes)
{
    size_t n;

    *path += strspn(*path, "/");
    n = strcspn(*path, "/");
    if (n == 0)
        return NULL;
    snprintf(ret_part, bytes, "%.*s", n < bytes ? (int)n : 0, *path);
    *path += n;
    return ret_part;
}

bool pci_of_path(const char *path, struct pci_address *ret_address)
{
    bool found = false;
    char part[32];

    while (next_part(&path, part, sizeof(part)))
        found = parse_pci_address(part, ret_address) || found;
    return found;
}

/* Of several paths to a device the first counts, so cycles cannot occur. */
static void add_node(struct tree_nodes *tree_nodes, const struct tree_node *tree_node)
{
    for (int i = 0; i < tree_nodes->n; i++)
        if (compare_pci_addresses(&tree_nodes->tree_nodes[i].address, &tree_node->address) == 0)
            return;
    if (tree_nodes->n == TOPO_MAX_PCI)
        tree_nodes->is_full = true;
    else
        tree_nodes->tree_nodes[tree_nodes->n++] = *tree_node;
}

/* Adds all devices on the path to one, from the top. */
static void add_path(struct tree_nodes *tree_nodes, const struct pci_address *address, const char *path)
{
    const char *bridge = strstr(path, "/pci"), *next;
    struct tree_node tree_node = {0};
    char part[32];

    /* After a volume management device there is a second host bridge: that one counts. */
    while (bridge && (next = strstr(bridge + 1, "/pci")))
        bridge = next;
    path = bridge ? bridge : "";
    tree_node.has_host_bridge = next_part(&path, part, sizeof(part)) && parse_host_bridge(part, &tree_node.host_bridge);
    for (int depth = 0; tree_node.has_host_bridge && depth < MAX_DEPTH && next_part(&path, part, sizeof(part));) {
        if (!parse_pci_address(part, &tree_node.address))
            continue;
        add_node(tree_nodes, &tree_node);
        if (compare_pci_addresses(&tree_node.address, address) == 0)
            return;
        tree_node.parent = tree_node.address;
        tree_node.has_parent = true;
        depth++;
    }
    /* The path ends elsewhere: the device is known, but not its location. */
    add_node(tree_nodes, &(struct tree_node){.address = *address});
}

static int by_address(const void *a, const void *b)
{
    return compare_pci_addresses(&((const struct tree_node *)a)->address, &((const struct tree_node *)b)->address);
}

static int by_bridge(const void *a, const void *b)
{
    return compare_pci_addresses(a, b);
}

static void list_host_bridges(struct topo *topo, const struct tree_nodes *tree_nodes, struct pci_address *ret_bridges)
{
    int n = 0;

    FOR_EACH (tree_node, tree_nodes->tree_nodes, tree_nodes->n) {
        bool known = !tree_node->has_host_bridge;

        for (int j = 0; j < n && !known; j++)
            known = compare_pci_addresses(&ret_bridges[j], &tree_node->host_bridge) == 0;
        if (known)
            continue;
        if (n == MAX_HOST_BRIDGES)
            topo->cut = true;
        else
            ret_bridges[n++] = tree_node->host_bridge;
    }
    qsort(ret_bridges, (size_t)n, sizeof(*ret_bridges), by_bridge);
    for (int i = 0; i < n; i++)
        topo->host_bridge_names[i] =
            source_printf(topo->source, "pci%04x:%02x", ret_bridges[i].domain, ret_bridges[i].bus);
    topo->n_host_bridges = n;
}

static int is_at(const void *address, const void *tree_node)
{
    return compare_pci_addresses(address, &((const struct tree_node *)tree_node)->address);
}

static int find_node(const struct tree_nodes *tree_nodes, const struct pci_address *address)
{
    const struct tree_node *tree_node =
        bsearch(address, tree_nodes->tree_nodes, (size_t)tree_nodes->n, sizeof(*tree_node), is_at);

    return tree_node ? (int)(tree_node - tree_nodes->tree_nodes) : -1;
}

/* --- what they are --- */

/* A number from 0 to `most`, else `otherwise`. */
static int read_attribute(struct source *source, const char *address, const char *file, int64_t most, int otherwise)
{
    int64_t value;

    if (source_number(source, &value, "/sys/bus/pci/devices/%s/%s", address, file) != SOURCE_OK)
        return otherwise;
    return value >= 0 && value <= most ? (int)value : otherwise;
}

static double read_speed(struct source *source, const char *address, const char *file)
{
    return parse_speed(source_line(source, "/sys/bus/pci/devices/%s/%s", address, file).text);
}

static void pci_describe(struct topo *topo, struct topo_pci *pci)
{
    struct source *source = topo->source;
    const char *address = pci->address, *driver;

    pci->vendor = (unsigned)read_attribute(source, address, "vendor", 0xffffff, 0) & 0xffff;
    pci->device = (unsigned)read_attribute(source, address, "device", 0xffffff, 0) & 0xffff;
    pci->class_code = (unsigned)read_attribute(source, address, "class", 0xffffff, 0);
    pci->numa_node = read_attribute(source, address, "numa_node", INT16_MAX - 1, -1);
    pci->local_cpus = source_line(source, "/sys/bus/pci/devices/%s/local_cpulist", address).text;
    pci->link_gts = read_speed(source, address, "current_link_speed");
    pci->link_gts_max = read_speed(source, address, "max_link_speed");
    pci->link_width = read_attribute(source, address, "current_link_width", MAX_LINK_WIDTH, 0);
    pci->link_width_max = read_attribute(source, address, "max_link_width", MAX_LINK_WIDTH, 0);
    driver = strrchr(source_resolve(source, "/sys/bus/pci/devices/%s/driver", address).text, '/');
    pci->driver = driver ? topo_copy_line(topo, driver + 1) : "";
}

static void make_tree(struct topo *topo, const struct tree_nodes *tree_nodes)
{
    struct pci_address bridges[MAX_HOST_BRIDGES];

    topo->pci = source_alloc(topo->source, ((size_t)tree_nodes->n + 1) * sizeof(*topo->pci));
    topo->n_pci = tree_nodes->n;
    list_host_bridges(topo, tree_nodes, bridges);
    for (int i = 0; i < tree_nodes->n; i++) {
        const struct tree_node *tree_node = &tree_nodes->tree_nodes[i];
        struct topo_pci *pci = &topo->pci[i];

        print_pci_address(&tree_node->address, pci->address);
        pci->parent = tree_node->has_parent ? find_node(tree_nodes, &tree_node->parent) : -1;
        pci->host_bridge = -1;
        for (int j = 0; j < topo->n_host_bridges && tree_node->has_host_bridge; j++)
            if (compare_pci_addresses(&bridges[j], &tree_node->host_bridge) == 0)
                pci->host_bridge = j;
        pci_describe(topo, pci);
    }
}

void pci_read(struct topo *topo, const struct pci_set *set)
{
    struct tree_nodes tree_nodes = {.tree_nodes = memory_new(TOPO_MAX_PCI, sizeof(*tree_nodes.tree_nodes))};

    for (int i = 0; i < set->n; i++) {
        char address[20];

        print_pci_address(&set->addresses[i], address);
        add_path(&tree_nodes, &set->addresses[i],
                 source_resolve(topo->source, "/sys/bus/pci/devices/%s", address).text);
    }
    qsort(tree_nodes.tree_nodes, (size_t)tree_nodes.n, sizeof(*tree_nodes.tree_nodes), by_address);
    topo->cut = topo->cut || set->is_full || tree_nodes.is_full;
    make_tree(topo, &tree_nodes);
    free(tree_nodes.tree_nodes);
}

/* --- NUMA nodes --- */

/* "Node 0 MemTotal:  1056317528 kB" among other lines. */
static int64_t parse_memory(const char *text)
{
    const char *total = strstr(text, "MemTotal:");
    long long kilobytes;

    if (!total || sscanf(total, "MemTotal: %12lld kB", &kilobytes) != 1 || kilobytes < 0)
        return -1;
    return (int64_t)kilobytes * 1024;
}

void numa_read(struct topo *topo)
{
    topo->numa = source_alloc(topo->source, TOPO_MAX_NUMA * sizeof(*topo->numa));
    FOR_NAMES (name, source_list(topo->source, "/sys/devices/system/node")) {
        struct topo_numa node = {.number = -1};

        if (text_begins(name, "node"))
            node.number = text_number(name + 4, strlen(name + 4), 9999);
        if (node.number < 0)
            continue;
        if (topo->n_numa == TOPO_MAX_NUMA) {
            topo->cut = true;
            break;
        }
        node.cpus = source_line(topo->source, "/sys/devices/system/node/node%d/cpulist", node.number).text;
        node.memory_bytes =
            parse_memory(source_read(topo->source, "/sys/devices/system/node/node%d/meminfo", node.number).text);
        topo->numa[topo->n_numa++] = node;
    }
}
