/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_host.h"

#include "common/text.h"
#include "machine/hardware/topo.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void machine_print_bytes(double bytes, char ret_text[MACHINE_BYTES_TEXT])
{
    if (bytes < (1 << 30))
        snprintf(ret_text, MACHINE_BYTES_TEXT, "%.0f MiB", bytes / (1 << 20));
    else
        snprintf(ret_text, MACHINE_BYTES_TEXT, "%.1f GiB", bytes / (1 << 30));
}

void machine_summary(const json_t *machine, char *ret_text, size_t bytes)
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

/*
 * --- the memory and cores that this process may use ---
 *
 * In a container the totals of the machine are too large: a process that relies on them is killed. The limits of all
 * ancestors of a control group (version 2) apply, of which a container sees only some.
 */
#define MOUNT "/sys/fs/cgroup"

static void read_group(struct source *source, const char *folder, struct machine_limits *limits)
{
    double quota_us, period_us;
    int64_t bytes;

    /* "max" (no limit) is not a number and fails here. */
    if (source_number(source, &bytes, "%s/memory.max", folder) == SOURCE_OK && bytes >= 0 &&
        (uint64_t)bytes < limits->memory_bytes)
        limits->memory_bytes = (uint64_t)bytes;
    if (sscanf(source_line(source, "%s/cpu.max", folder).text, "%lf %lf", &quota_us, &period_us) == 2 && quota_us > 0 &&
        period_us > 0 && (limits->cpus <= 0 || quota_us / period_us < limits->cpus))
        limits->cpus = quota_us / period_us;
}

/* The group below the mount point and all its ancestors. Ignores missing folders. */
void machine_limits(struct source *source, struct machine_limits *ret_limits)
{
    /* "0::/path" */
    const char *path = source_field(source, source_read(source, "/proc/self/cgroup").text, "0");
    char folder[4096], *slash;

    *ret_limits = (struct machine_limits){.memory_bytes = UINT64_MAX};
    if (path[0] != ':' || path[1] != '/')
        return;
    snprintf(folder, sizeof(folder), MOUNT "%s", path + 1);
    read_group(source, folder, ret_limits);
    while ((slash = strrchr(folder + strlen(MOUNT), '/'))) {
        *slash = '\0';
        read_group(source, folder, ret_limits);
    }
}

static struct machine_limits own_limits(void)
{
    struct machine_limits limits = {.memory_bytes = UINT64_MAX};
    struct source *source;

    if (source_open(NULL, &source) == EP_OK) {
        machine_limits(source, &limits);
        source_free(source);
    }
    return limits;
}

uint64_t machine_memory_bytes(void)
{
    uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t limit = own_limits().memory_bytes;

    return limit < bytes ? limit : bytes;
}

int machine_cores(void)
{
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    double limit = own_limits().cpus;
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        cores = CPU_COUNT(&set);
    /* Round up: a fraction of a CPU still allows one more thread to run. */
    if (limit > 0 && limit < cores)
        cores = (int)limit + (limit > (int)limit);
    return cores < 1 ? 1 : cores;
}

/* --- the parts of a description that come from files and the driver --- */

/* The value after `key` in the first line that begins with it, without quotes; null if there is none. */
static json_t *value_of_key(const char *text, const char *key)
{
    size_t n = strlen(key);
    const char *line = text;

    while (line && strncmp(line, key, n) != 0) {
        line = strchr(line, '\n');
        line = line ? line + 1 : NULL;
    }
    if (!line)
        return json_null();
    line += n;
    line += strspn(line, " \t:=\"");
    n = strcspn(line, "\"\n");
    return n ? json_stringn(line, n) : json_null();
}

static json_t *describe_gpus(const struct topo *topo)
{
    json_t *gpus = json_array();

    FOR_EACH (gpu, topo->gpus, topo->n_gpus) {
        const struct topo_pci *pci = &topo->pci[gpu->pci];
        json_t *name =
            *gpu->name ? json_string(gpu->name) : json_sprintf("NVIDIA device %04x (no driver)", pci->device);

        json_array_append_new(gpus, json_pack("{s:o, s:s}", "name", name, "pci", pci->address));
    }
    return gpus;
}

void machine_read(struct source *source, json_t *machine)
{
    const struct topo *topo = topo_read(source);

    json_object_set_new(machine, "cpu", value_of_key(source_read(source, "/proc/cpuinfo").text, "model name"));
    json_object_set_new(machine, "os", value_of_key(source_read(source, "/etc/os-release").text, "PRETTY_NAME"));
    /* A kernel without NUMA lists no nodes. */
    json_object_set_new(machine, "numa_nodes", json_integer(topo->n_numa ? topo->n_numa : 1));
    json_object_set_new(machine, "gpus", describe_gpus(topo));
    json_object_set_new(machine, "gpu_driver", *topo->driver ? json_string(topo->driver) : json_null());
}
