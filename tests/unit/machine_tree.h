/* SPDX-License-Identifier: Apache-2.0 */
/* machine_tree.h - a machine as a folder of files, created and removed by a test. */
#ifndef EP_TESTS_MACHINE_TREE_H
#define EP_TESTS_MACHINE_TREE_H

#include "temp.h"

#include <errno.h>
#include <ftw.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tree {
    char path[PATH_MAX];
};

static inline void tree_init(struct tree *tree)
{
    temp_template("tree", tree->path);
    assert_non_null(mkdtemp(tree->path));
}

static inline int tree_remove(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

static inline void tree_done(struct tree *tree)
{
    assert_int_equal(nftw(tree->path, tree_remove, 32, FTW_DEPTH | FTW_PHYS), 0);
}

/* The path of a file of the machine; creates its folders. `path` begins with a slash. */
static inline void tree_path(const struct tree *tree, const char *path, char ret_path[PATH_MAX])
{
    int n = snprintf(ret_path, PATH_MAX, "%s%s", tree->path, path);

    assert_in_range(n, 1, PATH_MAX - 1);
    for (char *slash = strchr(ret_path + strlen(tree->path) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        assert_true(mkdir(ret_path, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
}

static inline void tree_put(const struct tree *tree, const char *path, const char *text)
{
    char full[PATH_MAX];
    FILE *file;

    tree_path(tree, path, full);
    file = fopen(full, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* A link at `path` to the absolute path `target` of the machine, relative as in sysfs. */
static inline void tree_link(const struct tree *tree, const char *path, const char *target)
{
    char full[PATH_MAX], relative[PATH_MAX] = "";

    tree_path(tree, path, full);
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/'))
        strncat(relative, "../", sizeof(relative) - strlen(relative) - 1);
    strncat(relative, target + 1, sizeof(relative) - strlen(relative) - 1);
    assert_int_equal(symlink(relative, full), 0);
}

/* A PCI device: its folder at `path`, the link to it, and the attributes of every device. */
static inline void tree_pci(const struct tree *tree, const char *path, const char *vendor, const char *device,
                            const char *class, int numa_node)
{
    const char *address = strrchr(path, '/') + 1;
    char name[PATH_MAX], number[16];

    snprintf(number, sizeof(number), "%d\n", numa_node);
    snprintf(name, sizeof(name), "/sys/bus/pci/devices/%s", address);
    tree_link(tree, name, path);
#define TREE_PUT(file, text)                                                                                           \
    do {                                                                                                               \
        snprintf(name, sizeof(name), "%.1000s/" file, path);                                                           \
        tree_put(tree, name, text);                                                                                    \
    } while (0)
    TREE_PUT("vendor", vendor);
    TREE_PUT("device", device);
    TREE_PUT("class", class);
    TREE_PUT("numa_node", number);
    TREE_PUT("local_cpulist", "0-3\n");
    TREE_PUT("max_link_width", "16\n");
    TREE_PUT("current_link_width", "16\n");
    TREE_PUT("max_link_speed", "32.0 GT/s PCIe\n");
    TREE_PUT("current_link_speed", "16.0 GT/s PCIe\n");
#undef TREE_PUT
}

static inline void tree_bridge(const struct tree *tree, const char *path, int numa_node)
{
    tree_pci(tree, path, "0x1000\n", "0xc030\n", "0x060400\n", numa_node);
}

static inline void tree_gpu(const struct tree *tree, const char *path, int numa_node)
{
    tree_pci(tree, path, "0x10de\n", "0x2901\n", "0x030200\n", numa_node);
}

/* An RDMA device at a PCI device, without ports. */
static inline void tree_rdma(const struct tree *tree, const char *pci, const char *name)
{
    char link[PATH_MAX], target[PATH_MAX];

    snprintf(link, sizeof(link), "/sys/class/infiniband/%s", name);
    snprintf(target, sizeof(target), "%s/infiniband/%s", pci, name);
    tree_link(tree, link, target);
    strncat(target, "/device", sizeof(target) - strlen(target) - 1);
    tree_link(tree, target, pci);
}

/* A port of it: state "4: ACTIVE" and so on. */
static inline void tree_port(const struct tree *tree, const char *pci, const char *name, int port, const char *state,
                             const char *rate, const char *link_layer)
{
    char path[PATH_MAX];

#define TREE_PUT(file, text)                                                                                           \
    do {                                                                                                               \
        snprintf(path, sizeof(path), "%.1000s/infiniband/%.100s/ports/%d/" file, pci, name, port);                     \
        tree_put(tree, path, text);                                                                                    \
    } while (0)
    TREE_PUT("state", state);
    TREE_PUT("phys_state", strstr(state, "ACTIVE") ? "5: LinkUp\n" : "3: Disabled\n");
    TREE_PUT("rate", rate);
    TREE_PUT("link_layer", link_layer);
#undef TREE_PUT
}

static inline void tree_nic(const struct tree *tree, const char *pci, const char *name, const char *state,
                            const char *rate, const char *link_layer, int numa_node)
{
    tree_pci(tree, pci, "0x15b3\n", "0x1021\n", "0x020000\n", numa_node);
    tree_rdma(tree, pci, name);
    tree_port(tree, pci, name, 1, state, rate, link_layer);
}

#endif
