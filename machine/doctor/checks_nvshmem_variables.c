/* SPDX-License-Identifier: Apache-2.0 */
/* checks_nvshmem_variables.c - whether the variables of NVSHMEM have the intended effect: NICs, heap, registration. */
#include "checks.h"
#include "common/env_variables.h"

#include <ctype.h>

#define MIB (1LL << 20)

/* --- hca-prefix --- */

#define HCA_LIST "NVSHMEM_HCA_LIST"

/* Does NVSHMEM find a NIC for any GPU? */
static bool finds_a_nic(const struct doctor_machine *machine)
{
    struct map *map = machine_nvshmem_map(machine);
    bool any = ANY_OF(i, map->n, map->choices[i].nic >= 0);

    map_free(map);
    return any;
}

static bool is_left_out(const struct topo *topo, int nic, const char *prefix)
{
    return advice_is_mlx5(topo, nic) && !advice_prefix_matches(prefix, topo->nics[nic].name);
}

void run_hca_prefix(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct advice_row *advised = advice_find(machine->advice, "NVSHMEM_HCA_PREFIX");
    const char *set = source_env(machine->source, "NVSHMEM_HCA_PREFIX"), *list = machine_env(machine, HCA_LIST);
    const char *prefix = set ? set : MACHINE_HCA_PREFIX;
    const struct topo *topo = machine->topo;
    int n = COUNT_OF(i, topo->n_nics, advice_is_mlx5(topo, i)),
        n_left_out = COUNT_OF(i, topo->n_nics, is_left_out(topo, i, prefix)),
        first = FIRST_OF(i, topo->n_nics, is_left_out(topo, i, prefix));

    if (!machine_has_mlx5(machine, result) ||
        (!set && !source_env(machine->source, HCA_LIST) && !machine_uses_ibgda(machine, result)))
        return;
    if (n_left_out == 0) {
        if (!*list || topo->n_gpus == 0 || finds_a_nic(machine))
            return;
        doctor_found(result, DOCTOR_ERROR, HCA_LIST " leaves no NIC: none with an active port matches it");
        doctor_evidence(result, HCA_LIST, "%s", list);
        doctor_fix(result, false, "unset " HCA_LIST);
        doctor_advise(result, "Then start each rank with 'epkit env -- PROGRAM', which gives it the NIC of its GPU.");
        return;
    }
    doctor_found(result, n_left_out == n ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "IBGDA leaves out %d of %d NICs: their names do not have '%s' in them", n_left_out, n, prefix);
    doctor_evidence(result, "NVSHMEM_HCA_PREFIX", "%s%s", set ? set : "not set, which is ",
                    set ? "" : MACHINE_HCA_PREFIX);
    doctor_evidence(result, "/sys/class/infiniband", "%s", machine_nic_name(machine, first));
    if (advised && !advised->unset)
        doctor_fix(result, false, "export NVSHMEM_HCA_PREFIX=%s", shell_word(machine->source, advised->value));
    else if (set && strcmp(set, MACHINE_HCA_PREFIX) != 0)
        doctor_fix(result, false, "unset NVSHMEM_HCA_PREFIX");
    else
        doctor_advise(result, "The names have nothing in common: rename the NICs with a udev rule, or set "
                              "NVSHMEM_HCA_PREFIX to a part of the names of those to use.");
}

/* --- hca-lists --- */

/* Is it an entry of UCX_NET_DEVICES: a port, NAME:NUMBER, or an interface? Names are compared as they are. */
static bool is_ucx_device(const struct doctor_machine *machine, const char *entry)
{
    char name[64];
    int nic;

    snprintf(name, sizeof(name), "%.*s", (int)strcspn(entry, ":"), entry);
    nic = strchr(entry, ':') ? topo_find_nic(machine->topo, name) : -1;
    for (int p = 0; nic >= 0 && p < machine->topo->nics[nic].n_ports; p++)
        if (machine->topo->nics[nic].ports[p].number == strtol(entry + strcspn(entry, ":") + 1, NULL, 10))
            return true;
    return strcmp(entry, "lo") == 0 ||
           (nic < 0 && !strchr(entry, '/') &&
            source_stat(machine->source, "/sys/class/net/%s", entry).state != SOURCE_ABSENT);
}

/* What is wrong with the value, a sentence without its subject; "" if nothing is. */
static const char *ucx_fault(const struct doctor_machine *machine, const char *value)
{
    const char *wrong = "", *at = value, *name;
    bool any = false;

    if (*value == '^' || strcmp(value, "all") == 0)
        return "";
    while ((name = machine_next_word(machine, &at, ","))) {
        bool is_device = is_ucx_device(machine, name);

        any = any || is_device;
        wrong = is_device || *wrong ? wrong : name;
    }
    if (!*wrong)
        return "";
    if (topo_find_nic(machine->topo, wrong) >= 0)
        return source_printf(machine->source, "names %s without its port, which UCX knows since 1.21 only: write %s:1",
                             wrong, wrong);
    return source_printf(machine->source, "names %s, which is not here%s", wrong,
                         !any && strchr(value, ',') ? ", and nothing that is" : "");
}

/* DeepEP 2 asks for the rate of this device, and takes one called mlx5_0 where it is not told. */
static const char *nic_name_fault(const struct doctor_machine *machine, const char *value)
{
    return topo_find_nic(machine->topo, value) >= 0
               ? ""
               : source_printf(machine->source, "names %s, and no NIC here has that name", value);
}

/* For variables of NVSHMEM the audit looks: an entry that is no port of this machine. */
static const char *audit_fault(const struct doctor_machine *machine, const char *name)
{
    const struct audit *audit = machine->audit;
    int row = FIRST_OF(i, audit->n, audit->rows[i].kind == AUDIT_HARMFUL && strcmp(audit->rows[i].name, name) == 0);

    /* hca-prefix reports when no NIC is left at all. */
    return row >= 0 && finds_a_nic(machine)
               ? source_printf(machine->source, "is no list of NICs and ports of this machine: %s",
                               audit->rows[row].text)
               : "";
}

static const struct {
    const char *name;
    const char *(*fault)(const struct doctor_machine *machine, const char *value);
} device_variables[] = {
    /* The mapping by PE is read only if it is enabled; otherwise it does nothing, which void-variables reports. */
    {"NVSHMEM_HCA_LIST", NULL},
    {"NVSHMEM_HCA_PE_MAPPING", NULL},
    {"UCX_NET_DEVICES", ucx_fault},
    {"EP_NIC_NAME", nic_name_fault},
};

void run_hca_lists(const struct doctor_machine *machine, struct doctor_result *result)
{
    for (size_t i = 0; i < COUNT(device_variables); i++) {
        const char *name = device_variables[i].name, *value = machine_env(machine, name), *why = "";

        if (*value)
            why = device_variables[i].fault ? device_variables[i].fault(machine, value) : audit_fault(machine, name);
        if (!*why)
            continue;
        doctor_found_first(result, strstr(why, "since 1.21") ? DOCTOR_WARNING : DOCTOR_ERROR, "%s %.*s", name,
                           (int)strcspn(why, ":"), why);
        doctor_evidence(result, name, "%s: it %s", value, why);
        doctor_unset_value(result, name);
    }
    if (result->outcome == DOCTOR_FOUND)
        doctor_advise(
            result,
            "'epkit topo' shows the NICs here. Entries have ',' between them: NIC:port for UCX and NVSHMEM, in a "
            "mapping followed by ':' and the PEs; DeepEP takes one name.");
}

/* --- void-variables --- */

/* Variables that other checks report. */
static bool has_own_check(const struct doctor_machine *machine, const char *name)
{
    const struct advice_row *row = advice_find(machine->advice, name);

    if (text_is_any(name, TEXTS("DEEP_EP_DEVICE_TO_HCA_MAPPING", "NVSHMEM_HCA_PREFIX", "NVSHMEM_ENABLE_NIC_PE_MAPPING",
                                "RDMAV_DRIVERS", "IBV_DRIVERS")))
        return true;
    /* gib-settings compares them with the values that gIB expects. */
    return *machine->software->nccl.gib && row && strncmp(name, "NCCL_", 5) == 0 && !row->unset;
}

void run_void_variables(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *first = "", *names = "";
    int n = 0;

    FOR_EACH (row, machine->audit->rows, machine->audit->n) {
        if ((row->kind != AUDIT_VOID && row->kind != AUDIT_VALUE && row->kind != AUDIT_UNKNOWN) ||
            has_own_check(machine, row->name))
            continue;
        first = n++ == 0 ? row->name : first;
        if (shell_is_name(row->name))
            names = source_printf(machine->source, "%s %s", names, row->name);
        doctor_evidence(result, row->name, "%s: %s", row->value, row->text);
    }
    if (n == 0)
        return;
    if (n == 1)
        doctor_found(result, DOCTOR_WARNING, "%s does not do what it seems to", first);
    else
        doctor_found(result, DOCTOR_WARNING, "%d variables do not do what they seem to, among them %s", n, first);
    if (*names)
        doctor_fix(result, false, "unset%s", names);
    else
        doctor_advise(result, "A shell cannot unset it because it is not a valid name of a variable: remove it where "
                              "the program is started.");
}

/* --- dmabuf-off --- */

void run_dmabuf_off(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const char *name = "NVSHMEM_IB_DISABLE_DMABUF";
    bool is_nvshmem = variable_is_true(source_env(machine->source, name)),
         is_nccl = strcmp(machine_env(machine, "NCCL_DMABUF_ENABLE"), "0") == 0;

    if (doctor_not_applicable_if(result, !is_nvshmem && !is_nccl, "nothing disables dma-buf"))
        return;
    /* With neither of the two, the check peermem reports it. */
    if (driver->peermem == SOURCE_OK || driver->dmabuf == SOURCE_ABSENT ||
        doctor_unreadable_if(result, driver->peermem != SOURCE_ABSENT, "/sys/module/nvidia_peermem", driver->peermem,
                             NULL))
        return;
    name = is_nvshmem ? name : "NCCL_DMABUF_ENABLE";
    doctor_found(result, is_nvshmem ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "%s=%s leaves no way for NICs into GPU memory: nvidia_peermem is not loaded", name,
                 source_env(machine->source, name));
    doctor_evidence_env(result, name);
    doctor_evidence(result, "/sys/module/nvidia_peermem", "not there");
    doctor_fix(result, false, is_nvshmem && is_nccl ? "unset %s NCCL_DMABUF_ENABLE" : "unset %s", name);
    doctor_advise(result, "Or load nvidia-peermem, the older of the two methods.");
}

/* --- heap-size --- */

/* The minimum for NVSHMEM and the buffers of one DeepEP group: deep_ep/buffer.py uses a granularity of 512 MiB. */
#define HEAP_LITTLE (512 * MIB)

/* Parses a size like NVSHMEM: a number followed by K, M, G or T. -1: not set, or not a size. */
static double size_of(const char *value)
{
    char *end;
    double size = strtod(value, &end);

    return isdigit((unsigned char)*value) ? size * (double)machine_unit(*end) : -1;
}

void run_heap_size(const struct doctor_machine *machine, struct doctor_result *result)
{
    bool is_static = variable_is_true(source_env(machine->source, "NVSHMEM_DISABLE_CUDA_VMM"));
    const char *name = is_static ? "NVSHMEM_SYMMETRIC_SIZE" : "NVSHMEM_MAX_MEMORY_PER_GPU";
    double size = size_of(machine_env(machine, name)), memory = -1;

    for (int i = 0; i < machine->topo->n_gpus; i++) {
        double own = (double)machine->topo->gpus[i].memory_bytes;

        memory = own > 0 && (memory < 0 || own < memory) ? own : memory;
    }

    if (doctor_not_applicable_if(result, size < 0, "%s is not set", name))
        return;
    if (is_static && memory > 0 && size > memory)
        doctor_found(result, DOCTOR_ERROR, "%s is %.0f MiB, and a GPU has %.0f MiB", name, size / (double)MIB,
                     memory / (double)MIB);
    else if (size < (double)HEAP_LITTLE && machine_has_deepep(machine))
        doctor_found(result, DOCTOR_ERROR, "%s=%s is too little for the buffers of DeepEP", name,
                     source_env(machine->source, name));
    else
        return;
    doctor_evidence_env(result, name);
    doctor_fix(result, false, is_static ? "export %s=4G" : "unset %s", name);
    doctor_advise(
        result,
        is_static
            ? "A static heap is allocated at the start, in addition to the model: it has to hold DeepEP's buffers and "
              "leave room for the model. Without NVSHMEM_DISABLE_CUDA_VMM=1, the heap grows on demand."
            : "It is only address space: leave it at its default of 128 GiB.");
}
