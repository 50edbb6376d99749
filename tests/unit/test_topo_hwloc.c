/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hwloc as the reference for the PCI tree: bridges, host bridges and NUMA nodes of every pair of devices.
 *
 * hwloc builds its tree from the bus numbers in the configuration space of bridges, not from the paths of sysfs as
 * machine/hardware does. Synthetic machines have no bus numbers there, so hwloc gets a shadow copy: the same devices,
 * with the bus numbers that their addresses imply, and the processors and nodes in the formats that hwloc reads.
 */
#include "machine/hardware/topo.h"
#include "machine_tree.h"

#include <dirent.h>
#include <hwloc.h>

#define MAX_DEVICES 256

struct shadow {
    struct tree tree;
    int n;
    char paths[MAX_DEVICES][512]; /* "/sys/devices/pci0000:00/..." */
};

static const char *address_of(const char *path)
{
    return strrchr(path, '/') + 1;
}

static unsigned bus_of(const char *path)
{
    unsigned domain, bus;

    assert_int_equal(sscanf(address_of(path), "%x:%x:", &domain, &bus), 2);
    return bus;
}

static bool is_below(const char *path, const char *bridge)
{
    size_t n = strlen(bridge);

    return strncmp(path, bridge, n) == 0 && path[n] == '/';
}

static void read_text(const char *root, const char *folder, const char *file, char *ret_text, size_t bytes)
{
    char path[PATH_MAX];
    FILE *stream;
    size_t n = 0;

    snprintf(path, sizeof(path), "%s%s/%s", root, folder, file);
    stream = fopen(path, "r");
    if (stream) {
        n = fread(ret_text, 1, bytes - 1, stream);
        fclose(stream);
    }
    ret_text[n] = '\0';
}

/* "0-3,8" as a mask for hwloc: words of 32 bits, the highest first. */
static void write_mask(struct shadow *shadow, const char *path, const char *list)
{
    uint32_t words[8] = {0};
    char text[128] = "";

    for (const char *at = list; *at >= '0' && *at <= '9';) {
        char *end;
        long first = strtol(at, &end, 10), last = *end == '-' ? strtol(end + 1, &end, 10) : first;

        for (long cpu = first; cpu <= last && cpu < 256; cpu++)
            words[cpu / 32] |= UINT32_C(1) << (cpu % 32);
        at = *end == ',' ? end + 1 : end;
    }
    for (int i = 7; i >= 0; i--)
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%08x%s", words[i], i ? "," : "\n");
    tree_put(&shadow->tree, path, text);
}

static void write_config(struct shadow *shadow, const char *path, bool is_bridge)
{
    unsigned char config[256] = {0};
    char full[PATH_MAX], name[600];
    unsigned first = 255, last = 0;
    FILE *file;

    if (is_bridge) {
        for (int i = 0; i < shadow->n; i++)
            if (is_below(shadow->paths[i], path)) {
                unsigned bus = bus_of(shadow->paths[i]);

                first = bus < first ? bus : first;
                last = bus > last ? bus : last;
            }
        config[0x0e] = 1; /* header type: PCI-to-PCI bridge */
        config[0x18] = (unsigned char)bus_of(path);
        config[0x19] = (unsigned char)first;
        config[0x1a] = (unsigned char)last;
    }
    snprintf(name, sizeof(name), "%s/config", path);
    tree_path(&shadow->tree, name, full);
    file = fopen(full, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(config, 1, sizeof(config), file), sizeof(config));
    fclose(file);
}

static void list_devices(const char *root, struct shadow *shadow)
{
    char folder[PATH_MAX], path[PATH_MAX + 300], real[PATH_MAX], real_root[PATH_MAX];
    struct dirent *entry;
    DIR *dir;

    snprintf(folder, sizeof(folder), "%.3900s/sys/bus/pci/devices", root);
    dir = opendir(folder);
    assert_non_null(dir);
    assert_non_null(realpath(root, real_root));
    while ((entry = readdir(dir))) {
        if (entry->d_name[0] == '.')
            continue;
        assert_true(shadow->n < MAX_DEVICES);
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        assert_non_null(realpath(path, real));
        snprintf(shadow->paths[shadow->n++], sizeof(shadow->paths[0]), "%.500s", real + strlen(real_root));
    }
    closedir(dir);
}

static void cast_devices(const char *root, struct shadow *shadow)
{
    static const char *const files[] = {"class", "vendor", "device", "numa_node"};

    list_devices(root, shadow);
    for (int i = 0; i < shadow->n; i++) {
        const char *path = shadow->paths[i];
        char name[700], text[256];

        for (size_t j = 0; j < sizeof(files) / sizeof(files[0]); j++) {
            read_text(root, path, files[j], text, sizeof(text));
            snprintf(name, sizeof(name), "%s/%s", path, files[j]);
            tree_put(&shadow->tree, name, text);
            if (j == 0)
                write_config(shadow, path, strncmp(text, "0x0604", 6) == 0);
        }
        snprintf(name, sizeof(name), "%s/subsystem_vendor", path);
        tree_put(&shadow->tree, name, "0x0000\n");
        snprintf(name, sizeof(name), "%s/subsystem_device", path);
        tree_put(&shadow->tree, name, "0x0000\n");
        read_text(root, path, "local_cpulist", text, sizeof(text));
        snprintf(name, sizeof(name), "%s/local_cpus", path);
        write_mask(shadow, name, text);
        snprintf(name, sizeof(name), "/sys/bus/pci/devices/%s", address_of(path));
        tree_link(&shadow->tree, name, path);
    }
}

static void cast_processors(const char *root, struct shadow *shadow)
{
    char name[128], folder[64], text[256];

    tree_put(&shadow->tree, "/sys/devices/system/cpu/online", "0-255\n");
    tree_put(&shadow->tree, "/sys/devices/system/cpu/possible", "0-255\n");
    for (int i = 0; i < 256; i++) {
        char one[16];

        snprintf(name, sizeof(name), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings", i);
        snprintf(one, sizeof(one), "%d", i);
        write_mask(shadow, name, one);
    }
    for (int i = 0; i < 8; i++) {
        snprintf(folder, sizeof(folder), "/sys/devices/system/node/node%d", i);
        read_text(root, folder, "cpulist", text, sizeof(text));
        if (!*text)
            continue;
        snprintf(name, sizeof(name), "%s/cpumap", folder);
        write_mask(shadow, name, text);
        snprintf(name, sizeof(name), "%s/cpulist", folder);
        tree_put(&shadow->tree, name, text);
        snprintf(name, sizeof(name), "%s/meminfo", folder);
        tree_put(&shadow->tree, name, "Node 0 MemTotal: 1048576 kB\n");
    }
}

static hwloc_topology_t ask_hwloc(const struct shadow *shadow)
{
    static const char *const components[] = {"pci", "opencl", "cuda", "nvml", "rsmi", "levelzero", "gl", "x86"};
    hwloc_topology_t topology;

    setenv("HWLOC_FSROOT", shadow->tree.path, 1);
    setenv("HWLOC_HIDE_ERRORS", "2", 1);
    assert_int_equal(hwloc_topology_init(&topology), 0);
    for (size_t i = 0; i < sizeof(components) / sizeof(components[0]); i++)
        hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, components[i]);
    hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_ALL);
    assert_int_equal(hwloc_topology_load(topology), 0);
    return topology;
}

/* The bridge above an object in hwloc: a PCI bridge, a host bridge, or NULL. */
static hwloc_obj_t above(hwloc_obj_t object)
{
    return object->parent && object->parent->type == HWLOC_OBJ_BRIDGE ? object->parent : NULL;
}

static bool is_host_bridge(hwloc_obj_t object)
{
    return object->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_HOST;
}

static hwloc_obj_t find_object(hwloc_topology_t topology, const char *address)
{
    unsigned domain, bus, device, function;
    hwloc_obj_t object;

    assert_int_equal(sscanf(address, "%x:%x:%x.%x", &domain, &bus, &device, &function), 4);
    object = hwloc_get_pcidev_by_busid(topology, domain, bus, device, function);
    if (!object)
        fail_msg("hwloc does not have %s", address);
    return object;
}

/* "0000:00:01.0/0000:01:00.0/": the bridges above a device, the topmost first. *ret_host: the host bridge. */
static void way_of(hwloc_obj_t device, hwloc_obj_t *ret_host, char *ret_way, size_t bytes)
{
    ret_way[0] = '\0';
    *ret_host = NULL;
    for (hwloc_obj_t bridge = above(device); bridge; bridge = above(bridge)) {
        const struct hwloc_pcidev_attr_s *pci = &bridge->attr->bridge.upstream.pci;
        char rest[512];

        if (is_host_bridge(bridge)) {
            *ret_host = bridge;
            break;
        }
        snprintf(rest, sizeof(rest), "%s", ret_way);
        assert_in_range(
            snprintf(ret_way, bytes, "%04x:%02x:%02x.%x/%s", pci->domain, pci->bus, pci->dev, pci->func, rest), 0,
            bytes - 1);
    }
}

static void way_of_ours(const struct topo *topo, int device, char *ret_way, size_t bytes)
{
    ret_way[0] = '\0';
    for (int i = topo->pci[device].parent; i >= 0; i = topo->pci[i].parent) {
        char rest[512];

        snprintf(rest, sizeof(rest), "%s", ret_way);
        assert_in_range(snprintf(ret_way, bytes, "%s/%s", topo->pci[i].address, rest), 0, bytes - 1);
    }
}

/* The path by hwloc's tree: the bridges that the two devices do not share. */
static enum topo_path expected_path(const char *way_a, const char *way_b, bool same_host, bool same_node)
{
    size_t shared = 0;
    int a = 0, b = 0;

    if (!same_host)
        return same_node ? TOPO_NODE : TOPO_SYS;
    for (size_t i = 0; way_a[i] && way_a[i] == way_b[i]; i++)
        if (way_a[i] == '/')
            shared = i + 1;
    if (shared == 0)
        return TOPO_PHB;
    for (const char *c = way_a + shared; *c; c++)
        a += *c == '/';
    for (const char *c = way_b + shared; *c; c++)
        b += *c == '/';
    /* One downstream port on either side is still the same switch. */
    return a <= 1 && b <= 1 ? TOPO_PIX : TOPO_PXB;
}

static int node_of(hwloc_obj_t device)
{
    hwloc_obj_t ancestor = device;

    while (ancestor && !ancestor->cpuset)
        ancestor = ancestor->parent;
    if (!ancestor || hwloc_bitmap_weight(ancestor->nodeset) != 1)
        return -1;
    return hwloc_bitmap_first(ancestor->nodeset);
}

static void compare(const char *folder, int *ret_pairs)
{
    static struct shadow shadow;
    hwloc_topology_t topology;
    struct topo *topo;
    struct source *source;

    memset(&shadow, 0, sizeof(shadow));
    tree_init(&shadow.tree);
    cast_devices(folder, &shadow);
    cast_processors(folder, &shadow);
    topology = ask_hwloc(&shadow);
    assert_int_equal(source_open(folder, &source), EP_OK);
    assert_int_equal(topo_read(source, &topo), EP_OK);
    for (int i = 0; i < topo->n_pci; i++) {
        char way_a[512], way_b[512];
        hwloc_obj_t a, host_a, host_b;

        if (topo->pci[i].class_code >> 8 == 0x0604)
            continue;
        a = find_object(topology, topo->pci[i].address);
        way_of(a, &host_a, way_a, sizeof(way_a));
        way_of_ours(topo, i, way_b, sizeof(way_b));
        assert_string_equal(way_b, way_a);
        if (topo->n_numa > 1)
            assert_int_equal(topo->pci[i].numa_node, node_of(a));
        for (int j = 0; j < topo->n_pci; j++) {
            hwloc_obj_t b;

            if (i == j || topo->pci[j].class_code >> 8 == 0x0604)
                continue;
            b = find_object(topology, topo->pci[j].address);
            way_of(b, &host_b, way_b, sizeof(way_b));
            assert_int_equal(host_a == host_b, topo->pci[i].host_bridge == topo->pci[j].host_bridge);
            assert_int_equal(topo_path(topo, i, j), expected_path(way_a, way_b, host_a == host_b,
                                                                  topo->n_numa <= 1 || node_of(a) == node_of(b)));
            ++*ret_pairs;
        }
    }
    topo_free(topo);
    source_free(source);
    hwloc_topology_destroy(topology);
    tree_done(&shadow.tree);
}

/* Nested switches, several functions, separate ports, two host bridges, two nodes. */
TEST(test_made_up)
{
#define HOST_A "/sys/devices/pci0000:10"
#define SWITCH HOST_A "/0000:10:01.0/0000:11:00.0"
    struct tree tree;
    int pairs = 0;

    tree_init(&tree);
    tree_bridge(&tree, HOST_A "/0000:10:01.0", 0);
    tree_bridge(&tree, SWITCH, 0);
    tree_bridge(&tree, SWITCH "/0000:12:00.0", 0);
    tree_bridge(&tree, SWITCH "/0000:12:01.0", 0);
    tree_bridge(&tree, SWITCH "/0000:12:01.0/0000:14:00.0", 0);
    tree_bridge(&tree, SWITCH "/0000:12:01.0/0000:14:00.0/0000:15:00.0", 0);
    tree_bridge(&tree, SWITCH "/0000:12:01.0/0000:14:00.0/0000:15:01.0", 0);
    tree_gpu(&tree, SWITCH "/0000:12:00.0/0000:13:00.0", 0);
    tree_gpu(&tree, SWITCH "/0000:12:01.0/0000:14:00.0/0000:15:00.0/0000:16:00.0", 0);
    tree_gpu(&tree, SWITCH "/0000:12:01.0/0000:14:00.0/0000:15:01.0/0000:17:00.0", 0);
    tree_bridge(&tree, HOST_A "/0000:10:02.0", 0);
    tree_gpu(&tree, HOST_A "/0000:10:02.0/0000:18:00.0", 0);
    tree_gpu(&tree, HOST_A "/0000:10:02.0/0000:18:00.1", 0);
    tree_gpu(&tree, HOST_A "/0000:10:03.0", 0);
    tree_bridge(&tree, "/sys/devices/pci0001:20/0001:20:01.0", 0);
    tree_gpu(&tree, "/sys/devices/pci0001:20/0001:20:01.0/0001:21:00.0", 0);
    tree_put(&tree, "/sys/devices/system/node/node0/cpulist", "0-3\n");
    compare(tree.path, &pairs);
    assert_int_equal(pairs, 7 * 6);
    tree_done(&tree);
}

TEST(test_golden_machines)
{
    static const char *const names[] = {"a4", "h100-16nic", "gb200", "vm-flat", "laptop"};

    if (system("python3 -c '' 2>/dev/null") != 0)
        skip();
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char command[2 * PATH_MAX];
        struct tree tree;
        int pairs = 0;

        tree_init(&tree);
        snprintf(command, sizeof(command), "python3 -B '%s' %s '%s/machine'", MACHINES, names[i], tree.path);
        assert_int_equal(system(command), 0);
        snprintf(command, sizeof(command), "%s/machine", tree.path);
        compare(command, &pairs);
        /* The laptop has a GPU and network controllers; the others have many of both. */
        assert_true(pairs >= 2);
        tree_done(&tree);
    }
}
