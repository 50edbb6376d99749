/* SPDX-License-Identifier: Apache-2.0 */
/* Which RDMA device is near a GPU, on a machine with two sockets, PCI switches, and a device that is not on PCI. */
#include "net/verbs_near.h"

#include "tree.h"

static const char *const gpu = "0000:1B:00.0"; /* as CUDA writes it */

static void add_device(const struct tree *tree, const char *path, const char *numa)
{
    char file[PATH_MAX];

    snprintf(file, sizeof(file), "/devices/%s/numa_node", path);
    tree_put(tree, file, numa);
}

static void add_link(const struct tree *tree, const char *at, const char *path)
{
    char target[2 * PATH_MAX];

    snprintf(target, sizeof(target), "%s/devices/%s", tree->place, path);
    tree_link(tree, at, target);
}

static void add_nic(const struct tree *tree, const char *name, const char *path, const char *numa)
{
    char link[PATH_MAX];

    add_device(tree, path, numa);
    snprintf(link, sizeof(link), "/class/infiniband/%s/device", name);
    add_link(tree, link, path);
}

static void make_machine(const struct tree *tree)
{
    add_device(tree, "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:1b:00.0", "0\n");
    add_link(tree, "/bus/pci/devices/0000:1b:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:1b:00.0");
    add_nic(tree, "one_switch", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:1c:00.0", "0\n");
    add_nic(tree, "same_port", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:1b:00.1", "0\n");
    add_nic(tree, "host_bridge", "pci0000:15/0000:15:02.0/0000:20:00.0", "0\n");
    add_nic(tree, "same_socket", "pci0000:37/0000:37:01.0/0000:38:00.0", "0\n");
    add_nic(tree, "other_socket", "pci0000:87/0000:87:01.0/0000:88:00.0", "1\n");
    add_nic(tree, "no_numa", "pci0000:97/0000:97:01.0/0000:98:00.0", "-1\n");
}

TEST(test_machine)
{
    /* From near to far; equal numbers are equally far. */
    static const struct {
        const char *nic;
        int nearness;
    } expected[] = {{"same_port", 5},    {"one_switch", 4}, {"host_bridge", 2}, {"same_socket", 1},
                    {"other_socket", 0}, {"no_numa", 0},    {"absent", 0}};
    struct tree tree;

    tree_init(&tree);
    make_machine(&tree);
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++)
        assert_int_equal(verbs_nearness(tree.place, expected[i].nic, gpu), expected[i].nearness);
    assert_int_equal(verbs_nearness(tree.place, "one_switch", "0000:FF:00.0"), 0);
    assert_int_equal(verbs_nearness(tree.place, "one_switch", ""), 0);
    assert_int_equal(verbs_nearness(tree.place, "one_switch", "0000:1B:00.0 and much more than an address has"), 0);
    tree_done(&tree);
}

static void add_display(const struct tree *tree, const char *address, const char *path, const char *vendor)
{
    char file[PATH_MAX];

    add_device(tree, path, "0\n");
    snprintf(file, sizeof(file), "/devices/%s/vendor", path);
    tree_put(tree, file, vendor);
    snprintf(file, sizeof(file), "/devices/%s/class", path);
    tree_put(tree, file, "0x030200\n");
    snprintf(file, sizeof(file), "/bus/pci/devices/%s", address);
    add_link(tree, file, path);
}

/* Two GPUs and a display of another vendor below the switch of a NIC, one beside another NIC, one elsewhere. */
TEST(test_gpus_of_one_switch)
{
    static const char *const sw = "pci0000:15/0000:15:01.0/0000:16:00.0", *const nics[] = {"mlx5_0", "mlx5_1"};
    struct tree tree;
    char path[256];

    tree_init(&tree);
    snprintf(path, sizeof(path), "%s/0000:17:00.0/0000:1a:00.0", sw);
    add_display(&tree, "0000:1a:00.0", path, "0x1a03\n");
    snprintf(path, sizeof(path), "%s/0000:17:01.0/0000:1b:00.0", sw);
    add_display(&tree, "0000:1b:00.0", path, "0x10de\n");
    snprintf(path, sizeof(path), "%s/0000:17:02.0/0000:1c:00.0", sw);
    add_display(&tree, "0000:1c:00.0", path, "0x10de\n");
    add_display(&tree, "0000:07:00.0", "pci0000:00/0000:07:00.0", "0x10de\n");
    add_display(&tree, "0000:47:00.0", "pci0000:40/0000:47:00.0", "0x10de\n");
    snprintf(path, sizeof(path), "%s/0000:17:03.0/0000:1d:00.0", sw);
    add_nic(&tree, "mlx5_0", path, "0\n");
    add_nic(&tree, "mlx5_1", "pci0000:00/0000:08:00.0", "0\n");
    assert_int_equal(verbs_gpu_index(tree.place, nics, 1, "0000:1B:00.0"), 0);
    assert_int_equal(verbs_gpu_index(tree.place, nics, 1, "0000:1C:00.0"), 1);
    assert_int_equal(verbs_gpu_index(tree.place, nics, 1, "0000:07:00.0"), 0);
    assert_int_equal(verbs_gpu_index(tree.place, nics, 1, "0000:1A:00.0"), -1);
    assert_int_equal(verbs_gpu_index(tree.place, nics, 1, "0000:FF:00.0"), -1);
    assert_int_equal(verbs_gpu_index("/nowhere", nics, 1, "0000:1B:00.0"), -1);
    /* The last GPU is on the NUMA node of both NICs, to one of which each of the others is nearer. */
    assert_int_equal(verbs_gpu_index(tree.place, nics, 2, "0000:47:00.0"), 0);
    tree_done(&tree);
}

/* Host bridges deep below devices of another kind: Hyper-V, and device trees. */
TEST(test_deep_host_bridges)
{
    static const char *const roots[] = {"LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00", "platform/soc@0"};

    for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++) {
        struct tree tree;
        char path[256];

        tree_init(&tree);
        snprintf(path, sizeof(path), "%s/one/pci0001:00/0001:00:00.0", roots[i]);
        add_device(&tree, path, "0\n");
        add_link(&tree, "/bus/pci/devices/0000:1b:00.0", path);
        snprintf(path, sizeof(path), "%s/two/pci0002:00/0002:00:00.0", roots[i]);
        add_nic(&tree, "same_socket", path, "0\n");
        snprintf(path, sizeof(path), "%s/six/pci0101:00/0101:00:00.0", roots[i]);
        add_nic(&tree, "other_socket", path, "1\n");
        assert_int_equal(verbs_nearness(tree.place, "same_socket", gpu), 1);
        assert_int_equal(verbs_nearness(tree.place, "other_socket", gpu), 0);
        tree_done(&tree);
    }
}

/* No PCI tree at all, as in some containers. */
TEST(test_empty)
{
    struct tree tree;

    tree_init(&tree);
    assert_int_equal(verbs_nearness(tree.place, "mlx5_0", gpu), 0);
    assert_int_equal(verbs_nearness("/nowhere", "mlx5_0", gpu), 0);
    tree_done(&tree);
}
