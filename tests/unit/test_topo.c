/* SPDX-License-Identifier: Apache-2.0 */
/* Synthetic machines: the PCI tree, GPUs, NICs and their roles. */
#include "machine/hardware/topo.h"
#include "machine_tree.h"

#include <time.h>

#define HOST_A "/sys/devices/pci0000:10"
#define HOST_B "/sys/devices/pci0000:20"
#define PORT_A HOST_A "/0000:10:01.0"
#define SWITCH_A PORT_A "/0000:11:00.0"

static struct tree tree;
static struct source *source;
static struct topo *topo;

static int setup(void **state)
{
    (void)state;
    tree_init(&tree);
    source = NULL;
    topo = NULL;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    source_free(source);
    tree_done(&tree);
    return 0;
}

static void read_tree(void)
{
    assert_int_equal(source_open(tree.path, &source), EP_OK);
    topo = topo_read(source);
}

static int pci(const char *address)
{
    int index = topo_find_pci(topo, address);

    assert_true(index >= 0);
    return index;
}

static enum topo_path path(const char *a, const char *b)
{
    enum topo_path there = topo_path(topo, pci(a), pci(b));

    assert_int_equal(topo_path(topo, pci(b), pci(a)), there);
    return there;
}

static const struct topo_nic *nic(const char *name)
{
    int index = topo_find_nic(topo, name);

    assert_true(index >= 0);
    return &topo->nics[index];
}

/* Devices below one switch, below nested switches, on ports of their own, on other host bridges. */
TEST_WITH(test_paths, setup, teardown)
{
    tree_bridge(&tree, PORT_A, 0);
    tree_bridge(&tree, SWITCH_A, 0);
    tree_bridge(&tree, SWITCH_A "/0000:12:00.0", 0);
    tree_bridge(&tree, SWITCH_A "/0000:12:01.0", 0);
    tree_bridge(&tree, SWITCH_A "/0000:12:02.0", 0);
    tree_bridge(&tree, SWITCH_A "/0000:12:02.0/0000:15:00.0", 0);
    tree_bridge(&tree, SWITCH_A "/0000:12:02.0/0000:15:00.0/0000:16:00.0", 0);
    tree_gpu(&tree, SWITCH_A "/0000:12:00.0/0000:13:00.0", 0);
    tree_gpu(&tree, SWITCH_A "/0000:12:01.0/0000:14:00.0", 0);
    tree_gpu(&tree, SWITCH_A "/0000:12:02.0/0000:15:00.0/0000:16:00.0/0000:17:00.0", 0);
    tree_gpu(&tree, SWITCH_A "/0000:12:02.0/0000:15:00.0/0000:1a:00.0", 0);
    tree_bridge(&tree, HOST_A "/0000:10:02.0", 0);
    tree_gpu(&tree, HOST_A "/0000:10:02.0/0000:18:00.0", 0);
    tree_pci(&tree, HOST_A "/0000:10:02.0/0000:18:00.1", "0x15b3\n", "0x1021\n", "0x020000\n", 0);
    tree_gpu(&tree, HOST_B "/0000:20:00.0", 0);
    tree_gpu(&tree, "/sys/devices/pci0001:00/0001:00:00.0", 1);
    tree_put(&tree, "/sys/devices/system/node/node0/cpulist", "0-3\n");
    tree_put(&tree, "/sys/devices/system/node/node1/cpulist", "4-7\n");
    read_tree();
    assert_int_equal(topo->n_gpus, 7);
    assert_int_equal(topo->n_host_bridges, 3);
    assert_string_equal(topo->host_bridge_names[2], "pci0001:00");
    assert_int_equal(path("0000:13:00.0", "0000:13:00.0"), TOPO_SELF);
    assert_int_equal(path("0000:13:00.0", "0000:14:00.0"), TOPO_PIX);
    assert_int_equal(path("0000:18:00.0", "0000:18:00.1"), TOPO_PIX);
    assert_int_equal(path("0000:13:00.0", "0000:17:00.0"), TOPO_PXB);
    assert_int_equal(path("0000:13:00.0", "0000:1a:00.0"), TOPO_PXB);
    assert_int_equal(path("0000:13:00.0", "0000:18:00.0"), TOPO_PHB);
    assert_int_equal(path("0000:13:00.0", "0000:20:00.0"), TOPO_NODE);
    assert_int_equal(path("0000:13:00.0", "0001:00:00.0"), TOPO_SYS);
    assert_int_equal(topo_path(topo, -1, 0), TOPO_SYS);
    assert_int_equal(topo->pci[pci("0000:13:00.0")].parent, pci("0000:12:00.0"));
    assert_int_equal(topo->pci[pci("0000:10:01.0")].parent, -1);
    assert_int_equal(topo->pci[pci("0000:20:00.0")].parent, -1);
}

/* With one NUMA node, or without NUMA information, nothing is farther than NODE. */
TEST_WITH(test_paths_without_numa, setup, teardown)
{
    tree_gpu(&tree, HOST_A "/0000:10:00.0", -1);
    tree_gpu(&tree, HOST_B "/0000:20:00.0", 0);
    read_tree();
    assert_int_equal(path("0000:10:00.0", "0000:20:00.0"), TOPO_NODE);
}

TEST_WITH(test_pci_facts, setup, teardown)
{
    const struct topo_pci *device;

    tree_bridge(&tree, PORT_A, 1);
    tree_gpu(&tree, PORT_A "/0000:11:00.0", 1);
    tree_link(&tree, PORT_A "/0000:11:00.0/driver", "/sys/bus/pci/drivers/nvidia");
    tree_put(&tree, "/sys/bus/pci/drivers/nvidia/bind", "");
    /* Not part of the topology: an NVMe disk, a VGA device of another vendor, the audio function of a GPU. */
    tree_pci(&tree, HOST_B "/0000:20:01.0", "0x144d\n", "0xa80a\n", "0x010802\n", 0);
    tree_pci(&tree, HOST_B "/0000:20:02.0", "0x1a03\n", "0x2000\n", "0x030000\n", 0);
    tree_pci(&tree, HOST_B "/0000:20:03.0", "0x10de\n", "0x22ba\n", "0x040300\n", 0);
    read_tree();
    assert_int_equal(topo->n_pci, 2);
    assert_int_equal(topo->n_gpus, 1);
    device = &topo->pci[topo->gpus[0].pci];
    assert_string_equal(device->address, "0000:11:00.0");
    assert_int_equal(device->vendor, 0x10de);
    assert_int_equal(device->device, 0x2901);
    assert_int_equal(device->class_code, 0x030200);
    assert_int_equal(device->numa_node, 1);
    assert_string_equal(device->local_cpus, "0-3");
    assert_string_equal(device->driver, "nvidia");
    assert_true(device->link_gts > 15.9 && device->link_gts < 16.1 && device->link_gts_max > 31.9);
    assert_int_equal(device->link_width, 16);
    assert_false(topo->nvml);
    assert_string_not_equal(topo->nvml_why, "");
}

/* After a volume management device the second host bridge counts. */
TEST_WITH(test_second_domain, setup, teardown)
{
    tree_gpu(&tree, "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0", 0);
    tree_gpu(&tree, "/sys/devices/LNXSYSTM:00/bus/pci0002:00/0002:00:00.0", 0);
    read_tree();
    assert_int_equal(topo->n_gpus, 2);
    assert_string_equal(topo->host_bridge_names[0], "pci0002:00");
    assert_string_equal(topo->host_bridge_names[1], "pci10000:e0");
    assert_int_equal(topo->pci[pci("10000:e1:00.0")].host_bridge, 1);
    assert_int_equal(topo->pci[pci("10000:e1:00.0")].parent, pci("10000:e0:06.0"));
    assert_int_equal(topo_find_pci(topo, "0000:00:0e.0"), -1);
}

/* --- the driver --- */

#define OVERLAY(answer) "{\"epkit_snapshot\": 1, \"answers\": {\"nvml\": {\"value\": " answer "}}}"

static void three_gpus(void)
{
    tree_gpu(&tree, HOST_A "/0000:10:00.0", 0);
    tree_gpu(&tree, HOST_A "/0000:10:01.0", 0);
    tree_gpu(&tree, HOST_A "/0000:10:02.0", 0);
}

TEST_WITH(test_nvml, setup, teardown)
{
    const struct topo_gpu *gpu;
    int links;

    three_gpus();
    tree_put(&tree, "/epkit-overlay.json",
             OVERLAY("{\"driver\": \"570.1\", \"gpus\": ["
                     "{\"pci\": \"0000:10:00.0\", \"nvlinks\": [\"switch\"],"
                     " \"uuid\": \"GPU-00000000-0000-0000-0000-000000000001\"},"
                     "{\"pci\": \"00000000:10:01.0\", \"name\": \"NVIDIA B200\", \"minor\": 7, \"cc\": [10, 3],"
                     " \"uuid\": \"GPU-00000000-0000-0000-0000-000000000002\", \"ecc_uncorrected\": 4,"
                     " \"slowdown\": {\"hardware\": true, \"power_brake\": true, \"hw_thermal\": 1},"
                     " \"remap_pending\": true, \"remap_failed\": false, \"fabric\": \"failed\","
                     " \"nvlinks\": [\"switch\", \"switch\", \"down\", \"0000:10:02.0\", \"up\"]},"
                     "{\"pci\": \"0000:10:02.0\"}]}"));
    read_tree();
    assert_true(topo->nvml);
    assert_string_equal(topo->driver, "570.1");
    assert_int_equal(topo->n_gpus, 3);
    gpu = &topo->gpus[1];
    assert_string_equal(gpu->name, "NVIDIA B200");
    assert_int_equal(gpu->minor, 7);
    assert_int_equal(gpu->cc_major * 100 + gpu->cc_minor, 1003);
    assert_true(gpu->answered);
    assert_int_equal(gpu->ecc_uncorrected, 4);
    assert_int_equal(gpu->slowdown, TOPO_SLOW_HARDWARE | TOPO_SLOW_POWER_BRAKE);
    assert_int_equal(gpu->remap_pending, 1);
    assert_int_equal(gpu->remap_failed, 0);
    assert_int_equal(gpu->fabric, TOPO_FABRIC_FAILED);
    assert_int_equal(gpu->nvlinks, 5);
    assert_int_equal(gpu->nvlinks_up, 4);
    assert_int_equal(gpu->nvlinks_switch, 2);
    /* Missing values are unknown. */
    gpu = &topo->gpus[2];
    assert_int_equal(gpu->ecc_uncorrected, -1);
    assert_int_equal(gpu->slowdown, -1);
    assert_int_equal(gpu->remap_pending, -1);
    assert_int_equal(gpu->fabric, TOPO_FABRIC_UNKNOWN);
    assert_int_equal(gpu->minor, -1);
    /* Direct links; through a switch the number of the GPU with fewer; otherwise the PCIe path. */
    assert_int_equal(topo_gpu_path(topo, 1, 2, &links), TOPO_NVLINK);
    assert_int_equal(links, 1);
    assert_int_equal(topo_gpu_path(topo, 0, 1, &links), TOPO_NVLINK);
    assert_int_equal(links, 1);
    assert_int_equal(topo_gpu_path(topo, 0, 2, &links), TOPO_PHB);
    assert_int_equal(links, 0);
    assert_int_equal(topo_gpu_path(topo, 1, 1, &links), TOPO_SELF);
    assert_int_equal(topo_find_gpu_uuid(topo, "GPU-00000000-0000-0000-0000-000000000002"), 1);
    assert_int_equal(topo_find_gpu_uuid(topo, "GPU-00000000-0000-0000-0000-0000000000"), -1);
    assert_int_equal(topo_find_gpu_uuid(topo, "GPU-"), -1);
    assert_int_equal(topo_find_gpu_uuid(topo, "0"), -1);
}

#define INFORMATION(minor) "Model: \t\t NVIDIA B200\nDevice Minor: \t " minor "\n"

/* A container with one of three GPUs: CUDA numbers it 0. */
TEST_WITH(test_nvml_of_a_container, setup, teardown)
{
    three_gpus();
    tree_put(&tree, "/epkit-overlay.json", OVERLAY("{\"gpus\": [{\"pci\": \"0000:10:01.0\"}]}"));
    /* NVML does not report it, though this process may open it: broken, not hidden. It changes no number. */
    tree_put(&tree, "/proc/driver/nvidia/gpus/0000:10:00.0/information", INFORMATION("0"));
    tree_put(&tree, "/dev/nvidia0", "");
    read_tree();
    assert_int_equal(topo->n_gpus, 2);
    assert_int_equal(topo->n_hidden_gpus, 1);
    assert_int_equal(topo->gpus[0].pci, pci("0000:10:01.0"));
    assert_true(topo->gpus[0].answered);
    assert_int_equal(topo->gpus[1].pci, pci("0000:10:00.0"));
    assert_int_equal(topo->gpus[1].index, 1);
    assert_false(topo->gpus[1].answered);
}

/* Slurm's device cgroup denies device files, but the driver's folder in /proc lists all GPUs. */
TEST_WITH(test_nvml_of_a_job, setup, teardown)
{
    three_gpus();
    tree_put(&tree, "/epkit-overlay.json",
             "{\"epkit_snapshot\": 1, \"answers\": {\"nvml\": {\"value\":"
             " {\"gpus\": [{\"pci\": \"0000:10:02.0\"}, {\"pci\": \"0000:10:01.0\"}]}}},"
             " \"stats\": {\"/dev/nvidia0\": {\"kind\": \"char\", \"bytes\": 0, \"access\": \"---\"}}}");
    for (int i = 0; i < 3; i++) {
        char name[64];

        snprintf(name, sizeof(name), "/proc/driver/nvidia/gpus/0000:10:0%d.0/information", i);
        tree_put(&tree, name, i == 0 ? INFORMATION("0") : i == 1 ? INFORMATION("1") : INFORMATION("2"));
        snprintf(name, sizeof(name), "/dev/nvidia%d", i);
        tree_put(&tree, name, "");
    }
    read_tree();
    assert_int_equal(topo->n_gpus, 2);
    assert_int_equal(topo->n_hidden_gpus, 1);
    assert_int_equal(topo->gpus[0].pci, pci("0000:10:02.0"));
    assert_int_equal(topo->gpus[1].pci, pci("0000:10:01.0"));
    assert_int_equal(topo->gpus[1].index, 1);
}

/* NVreg_ExcludeDevices: no process can use it, and nothing is broken. */
TEST_WITH(test_nvml_without_an_excluded_gpu, setup, teardown)
{
    three_gpus();
    tree_put(&tree, "/epkit-overlay.json", OVERLAY("{\"gpus\": [{\"pci\": \"0000:10:01.0\"}]}"));
    tree_put(&tree, "/proc/driver/nvidia/gpus/0000:10:00.0/information", INFORMATION("0") "GPU Excluded:\t Yes\n");
    tree_put(&tree, "/dev/nvidia0", "");
    read_tree();
    assert_int_equal(topo->n_gpus, 1);
    assert_int_equal(topo->n_hidden_gpus, 2);
}

/* A sandbox with the driver but without the PCI bus. */
TEST_WITH(test_nvml_without_sysfs, setup, teardown)
{
    tree_put(&tree, "/proc/driver/nvidia/version",
             "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  today\n");
    tree_put(&tree, "/epkit-overlay.json", OVERLAY("{\"gpus\": [{\"pci\": \"0000:10:01.0\"}, {\"pci\": \"none\"}]}"));
    read_tree();
    assert_int_equal(topo->n_gpus, 1);
    assert_string_equal(topo->driver, "570.86.15");
    assert_int_equal(topo->pci[topo->gpus[0].pci].host_bridge, -1);
}

TEST_WITH(test_nvml_that_failed, setup, teardown)
{
    three_gpus();
    tree_put(&tree, "/epkit-overlay.json", OVERLAY("{\"error\": \"NVML: Driver/library version mismatch\"}"));
    read_tree();
    assert_false(topo->nvml);
    assert_string_equal(topo->nvml_why, "NVML: Driver/library version mismatch");
    assert_int_equal(topo->n_gpus, 3);
}

TEST_WITH(test_nvml_answers_of_anybody, setup, teardown)
{
    three_gpus();
    tree_put(&tree, "/epkit-overlay.json",
             OVERLAY("{\"driver\": 3, \"gpus\": [null, [], 7, {}, {\"pci\": 1},"
                     "{\"pci\": \"0000:10:00.0\", \"name\": [1], \"uuid\": {}, \"minor\": -5, \"cc\": \"10\","
                     " \"ecc_uncorrected\": -1, \"remap_pending\": 1, \"nvlinks\": [1, null, \"x\", \"0000:10:00.0\"],"
                     " \"fabric\": \"\\u0007\"},"
                     "{\"pci\": \"0000:10:01.0\", \"name\": \"a\\u001b[31mb\\nc\", \"minor\": 1e9, \"cc\": [],"
                     " \"nvlinks\": {\"a\": 1}},"
                     "{\"pci\": \"0000:10:01.0\", \"name\": \"second\"}, {\"pci\": \"0000:10:02.0\"}]}"));
    read_tree();
    assert_int_equal(topo->n_gpus, 3);
    assert_string_equal(topo->gpus[0].name, "");
    assert_int_equal(topo->gpus[0].minor, -1);
    assert_int_equal(topo->gpus[0].nvlinks, 2);
    assert_string_equal(topo->gpus[1].name, "a?[31mb");
    assert_int_equal(topo->gpus[1].minor, -1);
}

/* What was made up takes no longer than a machine: the GPUs of an answer are compared with each other. */
TEST_WITH(test_nvml_answers_of_any_length, setup, teardown)
{
    size_t bytes;
    char *answer;
    FILE *file = open_memstream(&answer, &bytes);
    clock_t start;

    fputs("{\"epkit_snapshot\": 1, \"answers\": {\"nvml\": {\"value\": {\"gpus\": [{\"pci\": \"0000:10:00.0\"}", file);
    for (int i = 0; i < 40000; i++)
        fprintf(file, ", {\"pci\": \"%s\"}", i < 20000 ? "" : "0000:10:01.0");
    fputs("]}}}}", file);
    fclose(file);
    tree_put(&tree, "/proc/driver/nvidia/version", "NVRM version: x 570.86.15 y\n");
    tree_put(&tree, "/epkit-overlay.json", answer);
    free(answer);
    start = clock();
    read_tree();
    assert_true(clock() - start < 5 * CLOCKS_PER_SEC);
    assert_int_equal(topo->n_gpus, 1);
}

TEST_WITH(test_driver_files, setup, teardown)
{
    three_gpus();
    tree_put(&tree, "/proc/driver/nvidia/version",
             "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build  (builder@host)\n"
             "GCC version:  gcc version 12.3.0\n");
    tree_put(&tree, "/proc/driver/nvidia/gpus/0000:10:01.0/information",
             "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n"
             "GPU UUID: \t GPU-00000000-0000-0000-0000-000000000003\nDevice Minor: \t 5\n");
    tree_put(&tree, "/proc/driver/nvidia/gpus/0000:10:02.0/information",
             "Model: \t\t Unknown\nGPU UUID: \t GPU-?\nDevice Minor: \t x\n");
    read_tree();
    assert_string_equal(topo->driver, "580.126.09");
    assert_string_equal(topo->gpus[0].name, "");
    assert_string_equal(topo->gpus[1].name, "NVIDIA H100 80GB HBM3");
    assert_string_equal(topo->gpus[1].uuid, "GPU-00000000-0000-0000-0000-000000000003");
    assert_int_equal(topo->gpus[1].minor, 5);
    assert_string_equal(topo->gpus[2].uuid, "");
    assert_int_equal(topo->gpus[2].minor, -1);
}

/* --- NICs --- */

#define NDR "400 Gb/sec (4X NDR)\n"
#define SLOW "100 Gb/sec (4X EDR)\n"

TEST_WITH(test_nic_facts, setup, teardown)
{
    const struct topo_port *port;

    tree_nic(&tree, HOST_A "/0000:10:00.0", "rocep16s0", "4: ACTIVE\n", NDR, "Ethernet\n", 0);
#define IB HOST_A "/0000:10:00.0/infiniband/rocep16s0"
    tree_put(&tree, IB "/hca_type", "MT4129\n");
    tree_put(&tree, IB "/fw_ver", "28.43.2026\n");
    tree_put(&tree, HOST_A "/0000:10:00.0/infiniband_verbs/uverbs3/dev", "231:195\n");
    tree_put(&tree, IB "/ports/1/gids/0", "fe80:0000:0000:0000:0200:5eff:fe00:5301\n");
    tree_put(&tree, IB "/ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n");
    tree_put(&tree, IB "/ports/1/gids/2", "no gid\n");
    tree_put(&tree, IB "/ports/1/gids/10", "0000:0000:0000:0000:0000:ffff:c000:0201\n");
    tree_put(&tree, IB "/ports/1/gids/x", "fe80:0000:0000:0000:0200:5eff:fe00:5301\n");
    tree_put(&tree, IB "/ports/1/gid_attrs/types/0", "IB/RoCE v1\n");
    tree_put(&tree, IB "/ports/1/gid_attrs/types/10", "RoCE v2\n");
    tree_put(&tree, IB "/ports/1/gid_attrs/ndevs/0", "ens1\n");
    read_tree();
    assert_int_equal(topo->n_nics, 1);
    assert_string_equal(topo->nics[0].hca, "MT4129");
    assert_string_equal(topo->nics[0].firmware, "28.43.2026");
    assert_string_equal(topo->nics[0].uverbs, "/dev/infiniband/uverbs3");
    assert_int_equal(topo->nics[0].pci, pci("0000:10:00.0"));
    assert_int_equal(topo->nics[0].n_ports, 1);
    port = &topo->nics[0].ports[0];
    assert_int_equal(port->number, 1);
    assert_string_equal(port->state, "ACTIVE");
    assert_string_equal(port->phys_state, "LinkUp");
    assert_true(port->active && port->rate_gbps > 399 && port->rate_gbps < 401);
    assert_int_equal(port->link_layer, TOPO_LINK_ETHERNET);
    assert_string_equal(port->netdev, "ens1");
    assert_int_equal(port->gids_state, SOURCE_OK);
    assert_int_equal(port->n_gids, 2);
    assert_int_equal(port->gids[0].index, 0);
    assert_int_equal(port->gids[0].type, TOPO_GID_ROCE1);
    assert_int_equal(port->gids[0].kind, TOPO_GID_LINK_LOCAL);
    assert_int_equal(port->gids[1].index, 10);
    assert_int_equal(port->gids[1].type, TOPO_GID_ROCE2);
    assert_int_equal(port->gids[1].kind, TOPO_GID_IPV4);
    assert_int_equal(topo_find_nic(topo, "rocep16s0:1"), -1);
}

/* Two ports on one PCI device: dev_port identifies their interfaces if the GIDs do not. */
TEST_WITH(test_two_ports, setup, teardown)
{
    tree_nic(&tree, HOST_A "/0000:10:00.0", "mlx4_0", "1: DOWN\n", SLOW, "Ethernet\n", 0);
    tree_port(&tree, HOST_A "/0000:10:00.0", "mlx4_0", 2, "4: ACTIVE\n", SLOW, "Ethernet\n");
    tree_put(&tree, HOST_A "/0000:10:00.0/net/eth4/dev_port", "1\n");
    tree_put(&tree, HOST_A "/0000:10:00.0/net/eth7/dev_port", "0\n");
    read_tree();
    assert_int_equal(topo->nics[0].n_ports, 2);
    assert_string_equal(topo->nics[0].ports[0].netdev, "eth7");
    assert_string_equal(topo->nics[0].ports[1].netdev, "eth4");
    assert_int_equal(topo->nics[0].role, TOPO_ROLE_DATA);
}

TEST_WITH(test_order_of_nics, setup, teardown)
{
    tree_nic(&tree, HOST_A "/0000:10:02.0", "mlx5_2", "4: ACTIVE\n", NDR, "Ethernet\n", 0);
    tree_nic(&tree, HOST_A "/0000:10:00.0", "mlx5_10", "4: ACTIVE\n", NDR, "Ethernet\n", 0);
    tree_rdma(&tree, HOST_A "/0000:10:00.0", "mlx5_9");
    tree_put(&tree, "/sys/class/infiniband/arxe/fw_ver", "\n");
    read_tree();
    assert_int_equal(topo->n_nics, 4);
    assert_string_equal(topo->nics[0].name, "mlx5_9");
    assert_string_equal(topo->nics[1].name, "mlx5_10");
    assert_string_equal(topo->nics[2].name, "mlx5_2");
    assert_string_equal(topo->nics[3].name, "arxe");
    assert_int_equal(topo->nics[3].pci, -1);
}

TEST_WITH(test_slow_and_down_and_virtual, setup, teardown)
{
    tree_nic(&tree, HOST_A "/0000:10:00.0", "mlx5_0", "4: ACTIVE\n", NDR, "InfiniBand\n", 0);
    tree_nic(&tree, HOST_A "/0000:10:01.0", "mlx5_1", "4: ACTIVE\n", SLOW, "Ethernet\n", 0);
    tree_nic(&tree, HOST_A "/0000:10:02.0", "mlx5_2", "1: DOWN\n", NDR, "InfiniBand\n", 0);
    tree_nic(&tree, HOST_A "/0000:10:00.1", "mlx5_3", "4: ACTIVE\n", NDR, "InfiniBand\n", 0);
    tree_link(&tree, HOST_A "/0000:10:00.1/physfn", HOST_A "/0000:10:00.0");
    tree_nic(&tree, HOST_A "/0000:10:03.0", "mlx5_4", "4: ACTIVE\n", "200 Gb/sec (4X HDR)\n", "InfiniBand\n", 0);
    tree_put(&tree, "/sys/devices/virtual/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
    tree_put(&tree, "/sys/devices/virtual/infiniband/rxe0/ports/1/phys_state", "5: LinkUp\n");
    tree_put(&tree, "/sys/devices/virtual/infiniband/rxe0/ports/1/rate", "800 Gb/sec (4X XDR)\n");
    tree_link(&tree, "/sys/class/infiniband/rxe0", "/sys/devices/virtual/infiniband/rxe0");
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_string_equal(nic("mlx5_0")->role_why, "");
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_MANAGEMENT);
    assert_string_equal(nic("mlx5_1")->role_why, "100 Gb/s, less than half of the 400 Gb/s of mlx5_0");
    assert_int_equal(nic("mlx5_2")->role, TOPO_ROLE_DOWN);
    assert_string_equal(nic("mlx5_2")->role_why, "port 1 is DOWN (Disabled)");
    assert_int_equal(nic("mlx5_3")->role, TOPO_ROLE_VIRTUAL);
    assert_string_equal(nic("mlx5_3")->role_why, "a virtual function of mlx5_0");
    /* Half as fast is not less than half. */
    assert_int_equal(nic("mlx5_4")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("rxe0")->role, TOPO_ROLE_MANAGEMENT);
}

/* In a virtual machine the physical function is not present: the virtual functions count. */
TEST_WITH(test_virtual_function_alone, setup, teardown)
{
    tree_nic(&tree, HOST_A "/0000:10:00.1", "mlx5_0", "4: ACTIVE\n", NDR, "Ethernet\n", 0);
    tree_link(&tree, HOST_A "/0000:10:00.1/physfn", HOST_A "/0000:10:00.0");
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
}

TEST_WITH(test_software_alone, setup, teardown)
{
    tree_put(&tree, "/sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
    tree_put(&tree, "/sys/class/infiniband/rxe0/ports/1/phys_state", "5: LinkUp\n");
    tree_put(&tree, "/sys/class/infiniband_verbs/abi_version", "6\n");
    tree_put(&tree, "/sys/class/infiniband_verbs/uverbs0/ibdev", "rxe1\n");
    tree_put(&tree, "/sys/class/infiniband_verbs/uverbs1/ibdev", "rxe0\n");
    read_tree();
    assert_int_equal(nic("rxe0")->role, TOPO_ROLE_DATA);
    assert_string_equal(nic("rxe0")->uverbs, "/dev/infiniband/uverbs1");
}

#define ROUTES(interface)                                                                                              \
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"                            \
    "eth9\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n" interface "\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"

static void nics_with_route(const char *routes, int n_gpus)
{
    static const char *const gpus[] = {HOST_B "/0000:20:00.0", HOST_B "/0000:20:01.0"};

    for (int i = 0; i < n_gpus; i++)
        tree_gpu(&tree, gpus[i], 0);
    tree_nic(&tree, HOST_A "/0000:10:00.0", "mlx5_0", "4: ACTIVE\n", NDR, "Ethernet\n", 0);
    tree_put(&tree, HOST_A "/0000:10:00.0/net/eth0/dev_port", "0\n");
    tree_nic(&tree, HOST_A "/0000:10:01.0", "mlx5_1", "4: ACTIVE\n", NDR, "Ethernet\n", 0);
    tree_put(&tree, HOST_A "/0000:10:01.0/net/eth1/dev_port", "0\n");
    tree_put(&tree, "/proc/net/route", routes);
}

TEST_WITH(test_default_route, setup, teardown)
{
    nics_with_route(ROUTES("eth0"), 1);
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_UPLINK);
    assert_string_equal(nic("mlx5_0")->role_why, "the default route goes over it, and 1 other NIC is as fast");
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_DATA);
}

/* If every GPU needs a NIC, the one with the default route is a data NIC as well. */
TEST_WITH(test_default_route_of_a_needed_nic, setup, teardown)
{
    nics_with_route(ROUTES("eth0"), 2);
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
}

TEST_WITH(test_default_route_over_a_bond, setup, teardown)
{
    nics_with_route(ROUTES("bond0"), 1);
    tree_put(&tree, "/sys/class/net/bond0/lower_eth1", "");
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_UPLINK);
}

/* Two GPUs, each with its NIC on a switch, and two more NICs elsewhere, equally fast. `storage` is their link layer. */
static void nics_beside_two_gpus(const char *storage)
{
    for (int i = 0; i < 2; i++) {
        static const char *const ports[] = {SWITCH_A "/0000:12:00.0", SWITCH_A "/0000:12:01.0"};
        static const char *const gpus[] = {SWITCH_A "/0000:12:00.0/0000:13:00.0",
                                           SWITCH_A "/0000:12:01.0/0000:14:00.0"};
        static const char *const nics[] = {SWITCH_A "/0000:12:00.0/0000:13:00.1",
                                           SWITCH_A "/0000:12:01.0/0000:14:00.1"};
        static const char *const far[] = {HOST_B "/0000:20:00.0", HOST_B "/0000:20:00.1"};
        static const char *const names[] = {"mlx5_0", "mlx5_1", "mlx5_8", "mlx5_9"};

        if (i == 0) {
            tree_bridge(&tree, PORT_A, 0);
            tree_bridge(&tree, SWITCH_A, 0);
        }
        tree_bridge(&tree, ports[i], 0);
        tree_gpu(&tree, gpus[i], 0);
        tree_nic(&tree, nics[i], names[i], "4: ACTIVE\n", NDR, "InfiniBand\n", 0);
        tree_nic(&tree, far[i], names[i + 2], "4: ACTIVE\n", NDR, storage, 0);
    }
}

TEST_WITH(test_storage_shows_by_its_place, setup, teardown)
{
    nics_beside_two_gpus("InfiniBand\n");
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_8")->role, TOPO_ROLE_STORAGE);
    assert_string_equal(nic("mlx5_9")->role_why, "NODE from the nearest GPU, and 2 other NICs are nearer to one");
}

/* A NIC that is down keeps its role: a storage NIC does not become a data NIC instead. */
TEST_WITH(test_a_nic_that_is_down_counts, setup, teardown)
{
    nics_beside_two_gpus("InfiniBand\n");
    tree_put(&tree, SWITCH_A "/0000:12:01.0/0000:14:00.1/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
    read_tree();
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_DOWN);
    assert_int_equal(nic("mlx5_8")->role, TOPO_ROLE_STORAGE);
}

/* If all near NICs are down, the others are better than none. */
TEST_WITH(test_all_near_ones_down, setup, teardown)
{
    nics_beside_two_gpus("InfiniBand\n");
    tree_put(&tree, SWITCH_A "/0000:12:00.0/0000:13:00.1/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    tree_put(&tree, SWITCH_A "/0000:12:01.0/0000:14:00.1/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
    read_tree();
    assert_int_equal(nic("mlx5_8")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_9")->role, TOPO_ROLE_DATA);
}

/* NICs of GPUs that this process may not use are data NICs, though they are far from its own GPU. */
TEST_WITH(test_nics_of_hidden_gpus, setup, teardown)
{
    nics_beside_two_gpus("InfiniBand\n");
    tree_gpu(&tree, HOST_B "/0000:20:01.0", 0);
    tree_gpu(&tree, HOST_B "/0000:20:02.0", 0);
    tree_put(&tree, "/epkit-overlay.json", OVERLAY("{\"gpus\": [{\"pci\": \"0000:13:00.0\"}]}"));
    read_tree();
    assert_int_equal(topo->n_gpus, 1);
    assert_int_equal(topo->n_hidden_gpus, 3);
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_8")->role, TOPO_ROLE_DATA);
}

/* All on one bus: only the link layer distinguishes them. */
static void flat_nics(int n_infiniband, int n_ethernet)
{
    char path_of[64], name[24];

    for (int i = 0; i < 2; i++) {
        snprintf(path_of, sizeof(path_of), HOST_A "/0000:10:0%d.0", i);
        tree_gpu(&tree, path_of, 0);
    }
    for (int i = 0; i < n_infiniband + n_ethernet; i++) {
        snprintf(path_of, sizeof(path_of), HOST_A "/0000:10:1%d.0", i);
        snprintf(name, sizeof(name), "mlx5_%d", i);
        tree_nic(&tree, path_of, name, "4: ACTIVE\n", NDR, i < n_infiniband ? "InfiniBand\n" : "Ethernet\n", 0);
    }
    read_tree();
}

TEST_WITH(test_storage_shows_by_its_link_layer, setup, teardown)
{
    flat_nics(2, 1);
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_2")->role, TOPO_ROLE_STORAGE);
    assert_string_equal(nic("mlx5_2")->role_why, "Ethernet, and 2 other NICs as near to a GPU speak InfiniBand");
}

/* As many NICs as GPUs: one of another link layer is a fault, not a storage NIC. */
TEST_WITH(test_an_odd_nic_of_a_gpu, setup, teardown)
{
    flat_nics(1, 1);
    assert_int_equal(nic("mlx5_0")->role, TOPO_ROLE_DATA);
    assert_int_equal(nic("mlx5_1")->role, TOPO_ROLE_DATA);
}

/* --- the rest --- */

TEST_WITH(test_numa, setup, teardown)
{
    tree_put(&tree, "/sys/devices/system/node/node0/cpulist", "0-55,112-167\n");
    tree_put(&tree, "/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       2048 kB\nNode 0 MemFree: 1 kB\n");
    tree_put(&tree, "/sys/devices/system/node/node10/cpulist", "\n");
    tree_put(&tree, "/sys/devices/system/node/node10/meminfo", "garbage");
    tree_put(&tree, "/sys/devices/system/node/nodes/cpulist", "1\n");
    tree_put(&tree, "/sys/devices/system/node/online", "0,10\n");
    read_tree();
    assert_int_equal(topo->n_numa, 2);
    assert_string_equal(topo->numa[0].cpus, "0-55,112-167");
    assert_int_equal(topo->numa[0].memory_bytes, 2048 * 1024);
    assert_int_equal(topo->numa[1].number, 10);
    assert_int_equal(topo->numa[1].memory_bytes, -1);
}

TEST_WITH(test_empty, setup, teardown)
{
    read_tree();
    assert_int_equal(topo->n_gpus + topo->n_nics + topo->n_pci + topo->n_numa, 0);
    assert_non_null(strstr(topo->why_empty, "/sys/bus/pci/devices is not there"));
    assert_non_null(strstr(topo->why_empty, "/sys/class/infiniband is not there"));
}
