/* SPDX-License-Identifier: Apache-2.0 */
/* What readers of results are told about a machine, of machines made of files. */
#include "cmd/bench/bench_host.h"

#include "machine_tree.h"

#define HOST "/sys/devices/pci0000:00"

static struct tree tree;
static json_t *machine;

static int setup(void **state)
{
    (void)state;
    tree_init(&tree);
    machine = json_object();
    return machine ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    json_decref(machine);
    tree_done(&tree);
    return 0;
}

static void read_machine(void)
{
    struct source *source;

    assert_int_equal(source_open(tree.path, &source), EP_OK);
    machine_read(source, machine);
    source_free(source);
}

/* The value of `key` as JSON. */
static void expect(const char *key, const char *json)
{
    char *text = json_dumps(json_object_get(machine, key), JSON_COMPACT | JSON_ENCODE_ANY);

    assert_non_null(text);
    assert_string_equal(text, json);
    free(text);
}

/* NVIDIA's, and no other function or vendor; by the driver's name, and by number where it says none. */
TEST_WITH(test_gpus, setup, teardown)
{
    tree_pci(&tree, HOST "/0000:00:05.0", "0x10de\n", "0x2330\n", "0x030200\n", 0);
    tree_pci(&tree, HOST "/0000:00:05.1", "0x10de\n", "0x22ba\n", "0x040300\n", 0);
    tree_pci(&tree, HOST "/0000:00:06.0", "0x1002\n", "0x744c\n", "0x030000\n", 0);
    tree_pci(&tree, HOST "/0000:00:07.0", "0x10de\n", "0x2684\n", "0x030000\n", 0);
    tree_put(&tree, "/proc/driver/nvidia/gpus/0000:00:05.0/information", "Model: \t\t NVIDIA H100\nIRQ:   \t\t 17\n");
    read_machine();
    expect("gpus", "[{\"name\":\"NVIDIA H100\",\"pci\":\"0000:00:05.0\"},"
                   "{\"name\":\"NVIDIA device 2684 (no driver)\",\"pci\":\"0000:00:07.0\"}]");
}

TEST_WITH(test_driver, setup, teardown)
{
    tree_put(&tree, "/proc/driver/nvidia/version",
             "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (builder@host)\n");
    read_machine();
    expect("gpu_driver", "\"570.124.06\"");
    expect("gpus", "[]");
}

TEST_WITH(test_processors_and_system, setup, teardown)
{
    tree_put(&tree, "/proc/cpuinfo",
             "processor\t: 0\nmodel\t\t: 143\nmodel name\t: A CPU @ 2.50GHz\nprocessor\t: 1\nmodel name\t: Another\n");
    tree_put(&tree, "/etc/os-release", "NAME=\"Some\"\nPRETTY_NAME=\"Some Linux 12 (thing)\"\nID=some\n");
    tree_put(&tree, "/sys/devices/system/node/node0/cpulist", "0\n");
    tree_put(&tree, "/sys/devices/system/node/node1/cpulist", "1\n");
    tree_put(&tree, "/sys/devices/system/node/has_cpu", "0-1\n");
    read_machine();
    expect("cpu", "\"A CPU @ 2.50GHz\"");
    expect("os", "\"Some Linux 12 (thing)\"");
    expect("numa_nodes", "2");
}

/* A value that is not quoted; a key that another one begins with; a value that is empty. */
TEST_WITH(test_lines, setup, teardown)
{
    tree_put(&tree, "/proc/cpuinfo", "model name\t:\n");
    tree_put(&tree, "/etc/os-release", "ID=x\nXPRETTY_NAME=Wrong\nPRETTY_NAME=Right\n");
    read_machine();
    expect("cpu", "null");
    expect("os", "\"Right\"");
}

TEST_WITH(test_empty, setup, teardown)
{
    read_machine();
    expect("cpu", "null");
    expect("os", "null");
    expect("numa_nodes", "1");
    expect("gpus", "[]");
    expect("gpu_driver", "null");
}
