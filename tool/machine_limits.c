/* SPDX-License-Identifier: Apache-2.0 */
/*
 * machine_limits.c - how much of the machine this process may use.
 *
 * In a container the machine's own figures mislead: a process that takes what they promise is killed. A control group
 * is bound by its own limits and by those of all groups above it, of which a container sees only some.
 */
#include "machine.h"

#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Version 1 has no word for "no limit" but a number near 2^63. */
#define NO_LIMIT_V1 (UINT64_C(1) << 62)

static bool read_line(const char *folder, const char *file, char *ret_line, int bytes)
{
    char path[4096];
    FILE *stream;
    bool good;

    if (snprintf(path, sizeof(path), "%s/%s", folder, file) >= (int)sizeof(path))
        return false;
    stream = fopen(path, "re");
    if (!stream)
        return false;
    good = fgets(ret_line, bytes, stream) != NULL;
    fclose(stream);
    return good;
}

static void limit_memory(struct machine_limits *limits, const char *folder, const char *file)
{
    char line[64];
    uint64_t bytes;

    /* "max" is no number. */
    if (read_line(folder, file, line, sizeof(line)) && sscanf(line, "%" SCNu64, &bytes) == 1 && bytes < NO_LIMIT_V1 &&
        bytes < limits->memory_bytes)
        limits->memory_bytes = bytes;
}

static void limit_cpus(struct machine_limits *limits, double quota_us, double period_us)
{
    if (quota_us > 0 && period_us > 0 && (limits->cpus <= 0 || quota_us / period_us < limits->cpus))
        limits->cpus = quota_us / period_us;
}

static void look_v2(struct machine_limits *limits, const char *folder)
{
    char line[64];
    double quota_us, period_us;

    limit_memory(limits, folder, "memory.max");
    if (read_line(folder, "cpu.max", line, sizeof(line)) && sscanf(line, "%lf %lf", &quota_us, &period_us) == 2)
        limit_cpus(limits, quota_us, period_us);
}

static void look_v1_memory(struct machine_limits *limits, const char *folder)
{
    limit_memory(limits, folder, "memory.limit_in_bytes");
}

static void look_v1_cpu(struct machine_limits *limits, const char *folder)
{
    char quota[64], period[64];

    if (read_line(folder, "cpu.cfs_quota_us", quota, sizeof(quota)) &&
        read_line(folder, "cpu.cfs_period_us", period, sizeof(period)))
        limit_cpus(limits, strtod(quota, NULL), strtod(period, NULL));
}

typedef void (*look_fn)(struct machine_limits *limits, const char *folder);

/* Looks at the group `path` below the mount point and at all above it. Folders that are not there have no say. */
static void climb(struct machine_limits *limits, const char *root, const char *mount, const char *path, look_fn look)
{
    char folder[4096];
    size_t base = (size_t)snprintf(folder, sizeof(folder), "%s/sys/fs/cgroup%s", root, mount);
    char *slash;

    if (base >= sizeof(folder) ||
        snprintf(folder + base, sizeof(folder) - base, "%s", path) >= (int)(sizeof(folder) - base))
        return;
    look(limits, folder);
    while ((slash = strrchr(folder + base, '/'))) {
        *slash = '\0';
        look(limits, folder);
    }
}

/* Is `name` one of the comma-separated `list`? */
static bool is_listed(const char *name, const char *list)
{
    size_t length = strlen(name);

    for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (strncmp(list, name, length) == 0 && (list[length] == ',' || list[length] == '\0'))
            return true;
    return false;
}

void machine_limits(const char *root, struct machine_limits *ret_limits)
{
    struct machine_limits limits = {.memory_bytes = UINT64_MAX};
    char line[4096];
    FILE *stream;

    snprintf(line, sizeof(line), "%s/proc/self/cgroup", root);
    stream = fopen(line, "re");
    while (stream && fgets(line, sizeof(line), stream)) {
        /* "hierarchy:controllers:path"; version 2 has no controllers there. */
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;

        if (!path)
            continue;
        *controllers++ = '\0';
        *path++ = '\0';
        path[strcspn(path, "\n")] = '\0';
        if (!*controllers)
            climb(&limits, root, "", path, look_v2);
        if (is_listed("memory", controllers))
            climb(&limits, root, "/memory", path, look_v1_memory);
        if (is_listed("cpu", controllers))
            climb(&limits, root, "/cpu", path, look_v1_cpu);
    }
    if (stream)
        fclose(stream);
    *ret_limits = limits;
}

uint64_t machine_memory_bytes(void)
{
    uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    struct machine_limits limits;

    machine_limits("", &limits);
    return limits.memory_bytes < bytes ? limits.memory_bytes : bytes;
}

int machine_cores(void)
{
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    struct machine_limits limits;
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        cores = CPU_COUNT(&set);
    machine_limits("", &limits);
    /* Half a processor more is one more that something can run on. */
    if (limits.cpus > 0 && limits.cpus < cores)
        cores = (int)limits.cpus + (limits.cpus > (int)limits.cpus);
    return cores < 1 ? 1 : cores;
}
