/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include "ranks_internal.h"

#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#define PCI_VENDOR_NVIDIA 0x10de
#define PCI_CLASS_DISPLAY 0x03 /* upper byte: VGA and 3D controllers */

/* The rest of the first line of a file that begins with `key`, trimmed; NULL without one. The caller frees it. */
static char *read_value(const char *path, const char *key, const char *divider)
{
    FILE *file = fopen(path, "re");
    char line[512], *result = NULL;

    if (!file)
        return NULL;
    while (!result && fgets(line, sizeof(line), file)) {
        char *value = strstr(line, divider);

        if (strncmp(line, key, strlen(key)) != 0 || !value)
            continue;
        value += strlen(divider);
        value += strspn(value, " \t\"");
        value[strcspn(value, "\"\n")] = '\0';
        result = strdup(value);
    }
    fclose(file);
    return result;
}

static json_t *string_or_null(char *text)
{
    json_t *value = text && *text ? json_string(text) : NULL;

    free(text);
    return value ? value : json_null();
}

static json_t *describe_cpu(hwloc_topology_t topology)
{
    hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
    const char *model = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;

    if (model && *model)
        return json_string(model);
    return string_or_null(read_value("/proc/cpuinfo", "model name", ":"));
}

/* As the driver calls it; without the driver its number. The caller frees it. */
static char *gpu_name(const char *address, unsigned device_id)
{
    char path[128], *name;

    snprintf(path, sizeof(path), "/proc/driver/nvidia/gpus/%s/information", address);
    name = read_value(path, "Model:", ":");
    if (!name && asprintf(&name, "NVIDIA device %04x (no driver)", device_id) < 0)
        name = NULL;
    return name;
}

static json_t *describe_gpus(hwloc_topology_t topology)
{
    json_t *gpus = json_array();
    hwloc_obj_t device = NULL;

    while ((device = hwloc_get_next_pcidev(topology, device))) {
        const struct hwloc_pcidev_attr_s *pci = &device->attr->pcidev;
        char address[32];

        if (pci->vendor_id != PCI_VENDOR_NVIDIA || pci->class_id >> 8 != PCI_CLASS_DISPLAY)
            continue;
        snprintf(address, sizeof(address), "%04x:%02x:%02x.%x", pci->domain, pci->bus, pci->dev, pci->func);
        json_array_append_new(
            gpus, json_pack("{s:o, s:s}", "name", string_or_null(gpu_name(address, pci->device_id)), "pci", address));
    }
    return gpus;
}

/* hwloc's components that load drivers and libraries of vendors; what they know beyond sysfs is not asked for here. */
static void stay_light(hwloc_topology_t topology)
{
    static const char *const components[] = {"pci", "opencl", "cuda", "nvml", "rsmi", "levelzero", "gl"};

    for (size_t i = 0; i < sizeof(components) / sizeof(components[0]); i++)
        hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, components[i]);
}

static void describe_topology(json_t *machine)
{
    hwloc_topology_t topology;

    if (hwloc_topology_init(&topology) != 0)
        return;
    stay_light(topology);
    hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_load(topology) == 0) {
        json_object_set_new(machine, "cpu", describe_cpu(topology));
        json_object_set_new(machine, "numa_nodes",
                            json_integer(hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE)));
        json_object_set_new(machine, "gpus", describe_gpus(topology));
    }
    hwloc_topology_destroy(topology);
}

json_t *machine_describe(void)
{
    json_t *machine = json_pack("{s:n, s:i, s:n, s:I, s:n, s:n, s:n, s:[], s:n, s:n, s:n}", "cpu", "cores",
                                machine_cores(), "numa_nodes", "memory_bytes", (json_int_t)machine_memory_bytes(),
                                "kernel", "os", "arch", "gpus", "gpu_driver", "mpi", "mpi_missing");
    const char *mpi = ranks_mpi_version(), *why = NULL;
    struct utsname name;

    if (uname(&name) == 0) {
        json_object_set_new(machine, "kernel", json_string(name.release));
        json_object_set_new(machine, "arch", json_string(name.machine));
    }
    json_object_set_new(machine, "os", string_or_null(read_value("/etc/os-release", "PRETTY_NAME=", "=")));
    json_object_set_new(machine, "gpu_driver",
                        string_or_null(read_value("/proc/driver/nvidia/version", "NVRM version:", ":")));
    if (mpi)
        json_object_set_new(machine, "mpi", json_string(mpi));
    else if (!ranks_mpi_available(&why))
        json_object_set_new(machine, "mpi_missing", json_string(why));
    describe_topology(machine);
    return machine;
}

void machine_sentence(const json_t *machine, char *ret_text, size_t bytes)
{
    const char *cpu = json_string_value(json_object_get(machine, "cpu"));
    size_t n_gpus = json_array_size(json_object_get(machine, "gpus"));
    const json_t *gpu = json_array_get(json_object_get(machine, "gpus"), 0);
    const char *name = json_string_value(json_object_get(gpu, "name"));
    int cores = (int)json_integer_value(json_object_get(machine, "cores"));
    double memory = (double)json_integer_value(json_object_get(machine, "memory_bytes"));
    char gpus[128] = "no NVIDIA GPU";

    if (n_gpus)
        snprintf(gpus, sizeof(gpus), "%zu x %s", n_gpus, name ? name : "NVIDIA GPU");
    snprintf(ret_text, bytes, "%s, %d core%s, %.1f GiB, %s", cpu ? cpu : "unknown CPU", cores, cores == 1 ? "" : "s",
             memory / (1u << 30), gpus);
}
