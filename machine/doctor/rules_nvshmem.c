/* SPDX-License-Identifier: Apache-2.0 */
/* rules_nvshmem.c - NVSHMEM's heap, registration of GPU memory, and lists of NICs. */
#include "checks.h"
#include "machine/software/variables.h"
#include "machine_nvshmem.h"
#include "queries.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1LL << 20)

/* --- heap-size --- */

/* The minimum for NVSHMEM and the buffers of one DeepEP group: deep_ep/buffer.py uses a granularity of 512 MiB. */
#define HEAP_LITTLE (512 * MIB)

/* Parses a size like NVSHMEM: a number followed by K, M, G or T. -1: not set, or not a size. */
static double size_of(struct source *source, const char *name)
{
    static const char units[] = "kmgt";
    const char *value = source_env(source, name), *unit;
    char *end;
    double size;

    if (!value || !isdigit((unsigned char)*value))
        return -1;
    size = strtod(value, &end);
    unit = *end ? strchr(units, tolower((unsigned char)*end)) : NULL;
    for (ptrdiff_t i = 0; unit && i <= unit - units; i++)
        size *= 1024;
    return size;
}

static double smallest_memory(const struct topo *topo)
{
    double smallest = -1;

    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].memory_bytes > 0 && (smallest < 0 || (double)topo->gpus[i].memory_bytes < smallest))
            smallest = (double)topo->gpus[i].memory_bytes;
    return smallest;
}

static void run_heap_size(const struct doctor_machine *machine, struct doctor_result *result)
{
    bool is_static = variable_is_true(source_env(machine->source, "NVSHMEM_DISABLE_CUDA_VMM"));
    const char *name = is_static ? "NVSHMEM_SYMMETRIC_SIZE" : "NVSHMEM_MAX_MEMORY_PER_GPU";
    double size = size_of(machine->source, name), memory = smallest_memory(machine->topo);

    if (size < 0) {
        doctor_not_applicable(machine, result, "%s is not set", name);
        return;
    }
    if (is_static && memory > 0 && size > memory)
        doctor_found(machine, result, DOCTOR_ERROR, "%s is %.0f MiB, and a GPU has %.0f MiB", name, size / (double)MIB,
                     memory / (double)MIB);
    else if (size < (double)HEAP_LITTLE && machine_has_deepep(machine))
        doctor_found(machine, result, DOCTOR_ERROR, "%s=%s is too little for the buffers of DeepEP", name,
                     source_env(machine->source, name));
    else
        return;
    doctor_evidence(machine, result, name, "%s", source_env(machine->source, name));
    doctor_fix(machine, result, false, is_static ? "export %s=4G" : "unset %s", name);
    doctor_advise(
        machine, result,
        is_static
            ? "A static heap is allocated at the start, in addition to the model: it has to hold DeepEP's buffers and "
              "leave room for the model. Without NVSHMEM_DISABLE_CUDA_VMM=1, the heap grows on demand."
            : "It is only address space: leave it at its default of 128 GiB.");
}

const struct doctor_check check_heap_size = {
    .id = "heap-size",
    .group = "nvshmem",
    .mode = 52,
    .title = "NVSHMEM's heap fits the GPU and the buffers of DeepEP",
    .symptom = "NVSHMEM stops at its start because cudaMalloc fails, or nvshmem_align returns NULL and DeepEP stops.",
    .cause = "The symmetric heap is larger than the GPU's memory, or too small for the buffers that are allocated in "
             "it.",
    .remedy = "Set NVSHMEM_SYMMETRIC_SIZE to what the buffers need, or let the heap grow.",
    .needs = DOCTOR_NEEDS_GPUS | DOCTOR_NEEDS_ENVIRONMENT,
    .links =
        (const char *const[]){"NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_DISABLE_CUDA_VMM", "NVSHMEM_MAX_MEMORY_PER_GPU", NULL},
    .run = run_heap_size,
};

/* --- dmabuf-off --- */

static void run_dmabuf_off(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const char *nccl = source_env(machine->source, "NCCL_DMABUF_ENABLE"), *name = "NVSHMEM_IB_DISABLE_DMABUF";
    bool is_nvshmem = variable_is_true(source_env(machine->source, name));

    if (!is_nvshmem && !(nccl && strcmp(nccl, "0") == 0)) {
        doctor_not_applicable(machine, result, "nothing disables dma-buf");
        return;
    }
    /* With neither of the two, the check peermem reports it. */
    if (driver->peermem == SOURCE_OK || driver->dmabuf == SOURCE_ABSENT)
        return;
    if (driver->peermem != SOURCE_ABSENT) {
        doctor_unknown(machine, result, "/sys/module/nvidia_peermem: %s", machine_reason(driver->peermem, NULL));
        return;
    }
    name = is_nvshmem ? name : "NCCL_DMABUF_ENABLE";
    doctor_found(machine, result, is_nvshmem ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "%s=%s leaves no way for NICs into GPU memory: nvidia_peermem is not loaded", name,
                 source_env(machine->source, name));
    doctor_evidence(machine, result, name, "%s", source_env(machine->source, name));
    doctor_evidence(machine, result, "/sys/module/nvidia_peermem", "not there");
    doctor_fix(machine, result, false, "unset %s", name);
    doctor_advise(machine, result, "Or load nvidia-peermem, the older of the two methods.");
}

const struct doctor_check check_dmabuf_off = {
    .id = "dmabuf-off",
    .group = "nvshmem",
    .mode = 11,
    .title = "dma-buf is not disabled where it is the only way into GPU memory",
    .symptom =
        "NVSHMEM stops with \"neither nv_peer_mem, or nvidia_peermem detected\"; NCCL copies through host memory.",
    .cause = "A variable disables registration by dma-buf, and the module nvidia_peermem is not loaded.",
    .remedy = "Unset the variable, or load nvidia-peermem.",
    .needs = DOCTOR_NEEDS_DRIVER | DOCTOR_NEEDS_DATA_NICS | DOCTOR_NEEDS_ENVIRONMENT,
    .links =
        (const char *const[]){"NVSHMEM_IB_DISABLE_DMABUF", "NCCL_DMABUF_ENABLE", "/sys/module/nvidia_peermem", NULL},
    .run = run_dmabuf_off,
};

/* --- hca-lists --- */

/* Why an entry "NIC:port..." is not valid; "" if it is. */
static const char *entry_fault(const struct doctor_machine *machine, const char *entry)
{
    const struct topo *topo = machine->topo;
    size_t n = strcspn(entry, ":");
    char name[64], *end;
    long port = 1;
    int nic;

    snprintf(name, sizeof(name), "%.*s", (int)(n < sizeof(name) ? n : sizeof(name) - 1), entry);
    if (entry[strcspn(entry, "; |\t")])
        return source_printf(machine->source, "'%s' is not a list separated by ','", entry);
    nic = topo_find_nic(topo, name);
    if (nic < 0)
        return source_printf(machine->source, "there is no NIC %s", name);
    if (entry[n] == ':') {
        port = strtol(entry + n + 1, &end, 10);
        if (end == entry + n + 1 || (*end && *end != ':'))
            return source_printf(machine->source, "'%s' names no port by its number", entry);
    }
    for (int p = 0; p < topo->nics[nic].n_ports; p++)
        if (topo->nics[nic].ports[p].number == port)
            return "";
    return source_printf(machine->source, "%s has no port %ld", name, port);
}

/* The first invalid entry of a list, and why; "" if there is none. A list that begins with '^' excludes NICs. */
static const char *list_fault(const struct doctor_machine *machine, const char *list)
{
    char entry[128];

    if (*list == '^')
        return "";
    while (*list) {
        size_t n = strcspn(list, ",");
        const char *fault;

        snprintf(entry, sizeof(entry), "%.*s", (int)(n < sizeof(entry) ? n : sizeof(entry) - 1), list);
        fault = *entry ? entry_fault(machine, entry) : "";
        if (*fault)
            return fault;
        list += n + (list[n] != '\0');
    }
    return "";
}

/* hca-prefix reports when no NIC is left at all. */
static bool leaves_a_nic(const struct doctor_machine *machine)
{
    struct map *map;
    bool any = false;

    if (machine_nvshmem_map(machine, &map) != EP_OK)
        return true;
    for (int i = 0; i < map->n; i++)
        any = any || map->choices[i].nic >= 0;
    map_free(map);
    return any;
}

static void run_hca_lists(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[] = {"NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING"};
    bool is_mapped = variable_is_true(source_env(machine->source, "NVSHMEM_ENABLE_NIC_PE_MAPPING"));

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char *list = source_env(machine->source, names[i]), *fault;

        /* The mapping by PE is read only if it is enabled; otherwise it does nothing, which the audit reports. */
        if (!list || (i == 1 && !is_mapped))
            continue;
        fault = list_fault(machine, list);
        if (!*fault || !leaves_a_nic(machine))
            continue;
        doctor_found(machine, result, DOCTOR_ERROR, "%s: %s", names[i], fault);
        doctor_evidence(machine, result, names[i], "%s", list);
        doctor_fix(machine, result, false, "unset %s", names[i]);
        doctor_advise(
            machine, result,
            "Entries are NIC:port, with ',' between them%s; 'epkit topo' shows the NICs of this machine. 'epkit env' "
            "prints the right list for each rank.",
            i == 1 ? ", each followed by ':' and the number of PEs" : "");
        return;
    }
}

const struct doctor_check check_hca_lists = {
    .id = "hca-lists",
    .group = "nvshmem",
    .mode = 19,
    .title = "lists of NICs name ports that exist",
    .symptom = "NVSHMEM finds no NIC, or only some of them, and continues without the rest or stops.",
    .cause =
        "A list was written for another machine, names a port that the NIC does not have, or separates its entries by "
        "something other than a comma.",
    .remedy = "Unset the list, or write it for this machine.",
    .needs = DOCTOR_NEEDS_DATA_NICS | DOCTOR_NEEDS_ENVIRONMENT,
    .links = (const char *const[]){"NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING", NULL},
    .run = run_hca_lists,
};
