/* SPDX-License-Identifier: Apache-2.0 */
/* checks_topology.c - paths between GPUs, NICs and processors, and the meaning of GPU numbers. */
#include "checks.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --- imex --- */

#define IMEX "/dev/nvidia-caps-imex-channels"
#define HANDLES "NVSHMEM_CUMEM_HANDLE_TYPE"

/* Reports GPUs that have not joined the fabric of their rack. */
static bool has_joined(const struct doctor_machine *machine, struct doctor_result *result)
{
    int n = 0;

    for (int i = 0; i < machine->topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &machine->topo->gpus[i];

        if (!gpu->answered || (gpu->fabric != TOPO_FABRIC_STARTING && gpu->fabric != TOPO_FABRIC_FAILED))
            continue;
        n++;
        doctor_evidence(result, machine_gpu_name(machine, i), "fabric %s",
                        gpu->fabric == TOPO_FABRIC_FAILED ? "failed" : "not ready");
    }
    if (n == 0)
        return true;
    doctor_found(result, DOCTOR_ERROR, "%d of %d GPUs have not joined the NVLink fabric of their rack", n,
                 machine->topo->n_gpus);
    doctor_advise(
        result,
        "The fabric manager of the rack's switches sets up the fabric: check it there (nvidia-smi -q, section Fabric). A reset of the GPUs makes them register again.");
    return false;
}

/* GPUs of equal cluster and clique, both not zero, reach each other (NVML, nvmlGpuFabricInfo). */
static bool has_domain(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo_gpu *first = NULL;
    int n_without = 0, n_other = 0;

    for (int i = 0; i < machine->topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &machine->topo->gpus[i];
        bool is_without = gpu->cluster && (!*gpu->cluster || gpu->clique == 0);

        if (!gpu->cluster)
            continue;
        first = first ? first : gpu;
        n_without += is_without;
        n_other += strcmp(gpu->cluster, first->cluster) != 0 || gpu->clique != first->clique;
        doctor_evidence(result, machine_gpu_name(machine, i), "ClusterUUID %s, CliqueId %lld",
                        *gpu->cluster ? gpu->cluster : "zero", (long long)gpu->clique);
    }
    if (n_without == 0 && n_other == 0) {
        result->n_evidence = 0;
        return true;
    }
    doctor_found(result, DOCTOR_ERROR,
                 n_without ? "%d of %d GPUs belong to no NVLink domain"
                           : "%d of %d GPUs belong to another NVLink domain than the first",
                 n_without ? n_without : n_other, machine->topo->n_gpus);
    doctor_advise(result, "The fabric manager of the rack's switches assigns GPUs to partitions: check them there "
                          "(nvidia-smi -q, section Fabric; NMX), and reset the GPUs so that they register again.");
    return false;
}

/* GPUs for racks may have no rack fabric (GB200 NVL4, a workstation): the driver says that none of them needs one. */
static bool has_no_fabric(const struct topo *topo)
{
    return topo->n_gpus > 0 && !ANY_OF(i, topo->n_gpus, topo->gpus[i].fabric != TOPO_FABRIC_NONE);
}

void run_imex(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names channels;
    struct source_stat stat;
    const char *kind = source_env(machine->source, HANDLES);
    bool is_rack = machine_has_multinode_nvlink(machine->topo) && !has_no_fabric(machine->topo);

    if (doctor_not_applicable_if(result, !is_rack && (!kind || strcasecmp(kind, "FABRIC") != 0),
                                 "no GPUs whose NVLinks lead to other nodes"))
        return;
    if (is_rack && (!has_joined(machine, result) || !has_domain(machine, result)))
        return;
    channels = source_list(machine->source, IMEX);
    if (doctor_unreadable_if(result, channels.state != SOURCE_OK && channels.state != SOURCE_ABSENT, IMEX,
                             channels.state, channels.why))
        return;
    if (channels.n == 0) {
        doctor_found(result, DOCTOR_ERROR,
                     is_rack ? "there is no IMEX channel, so GPUs of other nodes cannot be reached by NVLink"
                             : HANDLES "=FABRIC needs an IMEX channel, and there is none");
        doctor_evidence(result, IMEX, channels.state == SOURCE_OK ? "empty" : "not there");
        if (!is_rack)
            doctor_found_value(result, HANDLES);
        doctor_advise(result, "In Kubernetes: give the pods a ComputeDomain of NVIDIA's DRA driver, which creates a "
                              "channel. On hosts: run nvidia-imex with all nodes in /etc/nvidia-imex/nodes_config.cfg, "
                              "and load the driver with NVreg_CreateImexChannel0=1.");
        return;
    }
    stat = source_stat(machine->source, IMEX "/%s", channels.names[0]);
    if (stat.state != SOURCE_OK || machine_may_open(stat))
        return;
    doctor_found(result, DOCTOR_ERROR, "the IMEX channel %s is not accessible", channels.names[0]);
    doctor_evidence(result, source_printf(machine->source, IMEX "/%s", channels.names[0]),
                    "not readable and writable for this user");
    doctor_advise(result, "Give the process the channel: the device belongs to the user who runs the job.");
}

/* --- visible-devices --- */

#define MAPPING "DEEP_EP_DEVICE_TO_HCA_MAPPING"

/* What is wrong with an entry of the list; NULL if nothing is. */
static const char *entry_fault(const struct doctor_machine *machine, const struct machine_visible *entries, int i)
{
    const char *text = entries[i].text;
    int gpu = entries[i].gpu;

    if (entries[i].kind == MACHINE_VISIBLE_INVALID)
        return source_printf(machine->source,
                             "'%s' is neither a number nor a UUID: CUDA ignores it and all entries after it", text);
    if (entries[i].kind == MACHINE_VISIBLE_INDEX && gpu < 0)
        return source_printf(machine->source, "there is no GPU %s: CUDA ignores it and all entries after it", text);
    if (entries[i].kind == MACHINE_VISIBLE_UUID && gpu < 0 && machine->topo->nvml)
        return source_printf(machine->source,
                             "no GPU here has the UUID of entry %d: it and all entries after it are ignored", i);
    return gpu >= 0 && ANY_OF(k, i, entries[k].gpu == gpu)
               ? source_printf(machine->source, "GPU %d is named twice: CUDA then shows no GPU at all", gpu)
               : NULL;
}

/* A mapping by GPU index changes its meaning if the indices are not 0, 1, 2, ... in order. */
static const char *mapping_fault(const struct machine_visible *entries, int n)
{
    if (ANY_OF(i, n, entries[i].kind == MACHINE_VISIBLE_UUID || entries[i].kind == MACHINE_VISIBLE_MIG))
        return "holds UUIDs, which DeepEP cannot look up in " MAPPING;
    return ANY_OF(i, n - 1, entries[i + 1].gpu < entries[i].gpu) ? "lists GPUs in another order than " MAPPING
                                                                   " counts them in"
                                                                 : NULL;
}

/* The number of a GPU among all of the machine, by PCI address, which a mapping for the whole node uses. */
static int number_on_node(const struct topo *topo, int gpu)
{
    int n_hidden = topo->n_hidden_gpus < TOPO_MAX_GPUS ? topo->n_hidden_gpus : TOPO_MAX_GPUS;

    return COUNT_OF(i, topo_usable_gpus(topo), topo->gpus[i].pci < topo->gpus[gpu].pci) +
           COUNT_OF(i, n_hidden, topo->hidden_gpus[i] < topo->gpus[gpu].pci);
}

/* The NIC of entry `number` in a mapping: "mlx5_0" of "0:mlx5_0:1"; "" if there is none. */
static const char *mapped_nic(const struct doctor_machine *machine, const char *mapping, int number)
{
    for (const char *at = mapping; *at; at += strcspn(at, ","), at += *at == ',') {
        size_t n = strspn(at, "0123456789");

        if (n > 0 && n < 6 && at[n] == ':' && atoi(at) == number)
            return source_printf(machine->source, "%.*s", (int)strcspn(at + n + 1, ":,"), at + n + 1);
    }
    return "";
}

/*
 * With one GPU per task, each task calls its GPU 0, and a mapping by number gives all of them the same NIC: DeepEP
 * takes the entry with that number although the GPU is another one of the node. The PCI address shows which GPU it is.
 */
static bool find_renumbered(const struct doctor_machine *machine, struct doctor_result *result,
                            const struct machine_visible *entries, int n)
{
    const char *mapping = source_env(machine->source, MAPPING), *taken, *own;
    const struct topo *topo = machine->topo;
    int n_named = n > 0 ? n : topo_usable_gpus(topo);

    for (int i = 0; i < n_named && mapping && topo->n_hidden_gpus > 0; i++) {
        int gpu = n > 0 ? entries[i].gpu : i, named = n > 0 ? atoi(entries[i].text) : i, best;

        if (gpu < 0 || gpu >= machine->ibgda->n || (n > 0 && entries[i].kind != MACHINE_VISIBLE_INDEX))
            continue;
        taken = mapped_nic(machine, mapping, named);
        own = mapped_nic(machine, mapping, number_on_node(topo, gpu));
        best = machine->ibgda->choices[gpu].nic;
        /* A mapping that is made for this process has the right NIC under the number that the process uses. */
        if (!*taken || strcmp(taken, own) == 0 || (best >= 0 && strcmp(taken, topo->nics[best].name) == 0))
            continue;
        doctor_found(result, DOCTOR_ERROR,
                     "GPU %d of this process is the one at %s, number %d of the node, and " MAPPING
                     " gives it the NIC of another: %s",
                     named, topo->pci[topo->gpus[gpu].pci].address, number_on_node(topo, gpu), taken);
        doctor_evidence(result, MAPPING, "%s", mapping);
        doctor_evidence(result, "CUDA_VISIBLE_DEVICES", "%s", n > 0 ? entries[i].text : "not set");
        doctor_evidence(result, topo->pci[topo->gpus[gpu].pci].address, "its NIC is %s",
                        best >= 0 ? topo->nics[best].name : "none");
        doctor_fix(result, false, "epkit env -- PROGRAM");
        doctor_advise(
            result,
            "Each task sees its own GPU as number 0, so a mapping by number gives all of them one NIC. Started like this (srun ... epkit env -- PROGRAM), each gets its NIC by PCI address.");
        return true;
    }
    return false;
}

void run_visible_devices(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_environment environment = source_environment(machine->source);
    struct machine_visible entries[MACHINE_VISIBLE_MAX];
    bool in_container = machine->software->os.in_container;
    const char *fault = NULL;
    int n;

    if (doctor_unreadable_if(result, environment.state != SOURCE_OK, "the environment", environment.state,
                             environment.why))
        return;
    n = machine_visible(machine, entries);
    if (n < 0 && find_renumbered(machine, result, entries, 0))
        return;
    if (doctor_not_applicable_if(result, n <= 0,
                                 n < 0 ? "CUDA_VISIBLE_DEVICES is not set" : "CUDA_VISIBLE_DEVICES hides all GPUs"))
        return;
    for (int i = 0; i < n && !fault; i++)
        fault = entry_fault(machine, entries, i);
    if (fault) {
        doctor_found(result, DOCTOR_ERROR, "CUDA_VISIBLE_DEVICES: %s", fault);
        doctor_evidence_env(result, "CUDA_VISIBLE_DEVICES");
        if (in_container && n == machine->topo->n_gpus)
            doctor_fix(result, false, "unset CUDA_VISIBLE_DEVICES");
        doctor_advise(result, "%s has GPUs 0 to %d: name each at most once.%s",
                      in_container ? "This container" : "This machine", machine->topo->n_gpus - 1,
                      in_container ? " With ConstrainDevices=yes in cgroup.conf Slurm counts as it does." : "");
        return;
    }
    if (find_renumbered(machine, result, entries, n))
        return;
    fault = source_env(machine->source, MAPPING) ? mapping_fault(entries, n) : NULL;
    if (fault) {
        doctor_found(result, entries[0].kind == MACHINE_VISIBLE_INDEX ? DOCTOR_WARNING : DOCTOR_ERROR,
                     "CUDA_VISIBLE_DEVICES %s", fault);
        doctor_evidence_env(result, "CUDA_VISIBLE_DEVICES");
        doctor_evidence_env(result, MAPPING);
        doctor_advise(result, "Use numbers in ascending order, or give each process NVSHMEM_HCA_LIST with its one NIC "
                              "instead of the mapping (epkit env prints both).");
        return;
    }
    if (doctor_unknown_if(result, ANY_OF(i, n, entries[i].kind == MACHINE_VISIBLE_UUID && entries[i].gpu < 0),
                          "the UUIDs of the GPUs: NVML does not answer: %s", machine->topo->nvml_why))
        result->missing = machine_missing_nvml(machine);
}

/* --- acs --- */

#define CONFIG_EXTENDED 0x100 /* start of the extended capabilities (PCI Express base specification, 7.6) */
#define ACS_CAPABILITY 0x000d
#define ACS_REQUEST_REDIRECT 0x04
#define ACS_COMPLETION_REDIRECT 0x08

enum acs { ACS_HIDDEN, ACS_OFF, ACS_REDIRECTS };

static unsigned word_at(const unsigned char *config, size_t at)
{
    return config[at] | (unsigned)config[at + 1] << 8;
}

/* Of the ACS control register of a bridge. The list of capabilities is data of the machine and may be circular. */
static json_t *read_acs(struct source_text file)
{
    const unsigned char *config = (const unsigned char *)file.text;
    size_t at = CONFIG_EXTENDED;

    /* Without root, only the first 64 bytes are visible. */
    if (file.bytes < CONFIG_EXTENDED + 4)
        return json_integer(ACS_HIDDEN);
    for (int i = 0; i < 64 && at >= CONFIG_EXTENDED && at + 8 <= file.bytes; i++) {
        if (word_at(config, at) == ACS_CAPABILITY)
            return json_integer(
                word_at(config, at + 6) & (ACS_REQUEST_REDIRECT | ACS_COMPLETION_REDIRECT) ? ACS_REDIRECTS : ACS_OFF);
        at = word_at(config, at + 2) >> 4;
    }
    return json_integer(ACS_OFF);
}

/* Marks the bridges between a device and the root. */
static void mark_bridges(const struct topo *topo, int device, unsigned char *marks)
{
    int guard = 0;

    for (int p = device >= 0 ? topo->pci[device].parent : -1; p >= 0 && guard < 64; p = topo->pci[p].parent, guard++)
        marks[p] = 1;
}

/* Physical machines only: a guest sees the emulated bridges of its hypervisor. */
static bool is_bare_metal(const struct doctor_machine *machine, struct doctor_result *result)
{
    enum machine_virtual is_virtual = machine_virtual(machine->source);

    return !doctor_not_applicable_if(result, is_virtual == MACHINE_VIRTUAL,
                                     "a virtual machine: its host controls this") &&
           !doctor_unknown_if(result, is_virtual == MACHINE_VIRTUAL_UNKNOWN,
                              "whether this is a virtual machine: /proc/cpuinfo cannot be read");
}

/* Are there two devices that exchange data directly? IOMMU and ACS do not affect a single GPU. */
static bool has_peers(const struct doctor_machine *machine, struct doctor_result *result)
{
    return !doctor_not_applicable_if(result, machine->topo->n_gpus < 2 && machine_n_data_nics(machine->topo) == 0,
                                     "one GPU and no NIC that it would talk to directly");
}

struct acs_count {
    int n, n_hidden, n_redirecting;
    char fix[1600]; /* one line per bridge, as many as fit */
};

static struct acs_count check_bridges(const struct doctor_machine *machine, struct doctor_result *result,
                                      const unsigned char *marks)
{
    struct acs_count count = {.fix = ""};

    for (int p = 0; p < machine->topo->n_pci; p++) {
        const char *address = machine->topo->pci[p].address;
        struct source_answer acs;

        if (!marks[p])
            continue;
        count.n++;
        acs = source_fact(machine->source, "acs", read_acs, "/sys/bus/pci/devices/%s/config", address);
        count.n_hidden += json_integer_value(acs.value) == ACS_HIDDEN;
        if (json_integer_value(acs.value) != ACS_REDIRECTS)
            continue;
        count.n_redirecting++;
        doctor_evidence(result, address, "ACS redirects requests or completions");
        if (strlen(count.fix) + 64 < sizeof(count.fix))
            text_append(count.fix, sizeof(count.fix), "%ssudo setpci -s %s ECAP_ACS+0x6.w=0000", *count.fix ? "\n" : "",
                        shell_word(machine->source, address));
    }
    return count;
}

void run_acs(const struct doctor_machine *machine, struct doctor_result *result)
{
    unsigned char marks[TOPO_MAX_PCI] = {0};
    const struct topo *topo = machine->topo;
    struct acs_count count;

    if (!has_peers(machine, result) || !is_bare_metal(machine, result))
        return;
    if (doctor_not_applicable_if(result, machine_is_grace(topo) || machine_is_spark(topo),
                                 "boards with Grace processors translate addresses in the device"))
        return;
    for (int i = 0; i < topo->n_gpus; i++)
        mark_bridges(topo, topo->gpus[i].pci, marks);
    for (int i = 0; i < topo->n_nics; i++)
        if (machine_is_data_nic(topo, i))
            mark_bridges(topo, topo->nics[i].pci, marks);
    count = check_bridges(machine, result, marks);
    if (count.n_redirecting) {
        doctor_found(result, DOCTOR_WARNING,
                     "%d of %d PCIe bridges above GPUs and NICs send traffic between devices through the processor "
                     "(ACS)",
                     count.n_redirecting, count.n);
        if (!machine_is_locked_down(machine->source)) {
            doctor_fix(result, false, "%s", count.fix);
            doctor_cost(result, DOCTOR_FIX_SAFE,
                        "It costs isolation: these devices are then no longer isolated from each other, which virtual "
                        "machines need.");
        }
        doctor_advise(
            result, "%s Keep it enabled on a host that passes devices to virtual machines: it isolates them.",
            *result->fix
                ? "Better: switch ACS off in the BIOS, or VT-d with it; setpci lasts until the next reboot."
                : "Switch ACS off in the BIOS, or VT-d with it: the kernel is locked down because of Secure Boot and "
                  "does not allow it to be changed with setpci.");
    } else if (count.n_hidden) {
        doctor_unknown(result, "ACS of %d of %d bridges: only root can read their configuration space", count.n_hidden,
                       count.n);
        result->missing = DOCTOR_MISSING_ROOT;
    } else if (count.n == 0) {
        doctor_not_applicable(result, "there are no PCIe bridges above GPUs and NICs");
    }
}

/* --- iommu --- */

/* The IOMMU group of a PCI device, "" if it has none. */
static const char *group_of(struct source *source, const struct topo *topo, int pci)
{
    struct source_text link = source_resolve(source, "/sys/bus/pci/devices/%s/iommu_group", topo->pci[pci].address);
    const char *base = link.state == SOURCE_OK ? strrchr(link.text, '/') : NULL;
    struct source_names groups;

    if (base)
        return base + 1;
    /* A copy of a machine may contain the groups but not the links to them. */
    groups = source_list(source, "/sys/kernel/iommu_groups");
    for (size_t i = 0; i < groups.n; i++) {
        struct source_names devices = source_list(source, "/sys/kernel/iommu_groups/%s/devices", groups.names[i]);

        if (ANY_OF(k, devices.n, strcmp(devices.names[k], topo->pci[pci].address) == 0))
            return groups.names[i];
    }
    return "";
}

struct iommu_count {
    int n, n_translated, n_unknown;
    const char *why;
};

static void check_group(const struct doctor_machine *machine, struct doctor_result *result, int pci,
                        struct iommu_count *count)
{
    const char *group = group_of(machine->source, machine->topo, pci);
    struct source_text type;

    if (!*group)
        return;
    count->n++;
    type = source_line(machine->source, "/sys/kernel/iommu_groups/%s/type", group);
    if (type.state != SOURCE_OK) {
        count->n_unknown++;
        count->why = machine_reason(type.state, type.why);
    } else if (strncmp(type.text, "DMA", 3) == 0) {
        count->n_translated++;
        doctor_evidence(result, source_printf(machine->source, "/sys/kernel/iommu_groups/%s/type", group), "%s (%s)",
                        type.text, machine->topo->pci[pci].address);
    }
}

void run_iommu(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    struct iommu_count count = {.why = ""};
    struct source_names groups;

    if (!has_peers(machine, result) || !is_bare_metal(machine, result))
        return;
    if (doctor_not_applicable_if(result, machine_is_grace(topo) || machine_is_spark(topo),
                                 "boards with Grace processors need translation"))
        return;
    groups = source_list(machine->source, "/sys/kernel/iommu_groups");
    if (doctor_not_applicable_if(result, groups.state == SOURCE_ABSENT || (groups.state == SOURCE_OK && groups.n == 0),
                                 "the IOMMU is off") ||
        doctor_unreadable_if(result, groups.state != SOURCE_OK, "/sys/kernel/iommu_groups", groups.state, groups.why))
        return;
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].pci >= 0)
            check_group(machine, result, topo->gpus[i].pci, &count);
    for (int i = 0; i < topo->n_nics; i++)
        if (machine_is_data_nic(topo, i))
            check_group(machine, result, topo->nics[i].pci, &count);
    if (count.n_translated) {
        doctor_found(result, DOCTOR_WARNING, "the IOMMU translates the addresses of %d of %d GPUs and NICs",
                     count.n_translated, count.n);
        doctor_advise(result, "%s Or switch the IOMMU off in the BIOS.",
                      os_kernel_argument(machine->source, &machine->software->os, true, "iommu=pt"));
    } else if (count.n_unknown) {
        doctor_unknown(result, "the type of %d IOMMU groups: %s", count.n_unknown, count.why);
    }
}

/* --- affinity --- */

void run_affinity(const struct doctor_machine *machine, struct doctor_result *result)
{
    uint64_t allowed[TOPO_MAX_CPUS / 64] = {0}, local[TOPO_MAX_CPUS / 64] = {0};
    const struct topo *topo = machine->topo;
    struct source_text status;
    const char *list;
    int gpu;

    gpu = machine_own_gpu(machine);
    if (doctor_not_applicable_if(result, gpu < 0, "it is not known which GPU this process uses"))
        return;
    status = source_read(machine->source, "/proc/self/status");
    list = source_field(machine->source, status.text, "Cpus_allowed_list");
    if (doctor_unknown_if(result, !*list || !topo_parse_cpus(list, allowed, TOPO_MAX_CPUS), "/proc/self/status: %s",
                          status.state == SOURCE_OK ? "no Cpus_allowed_list"
                                                    : machine_reason(status.state, status.why)))
        return;
    if (topo->gpus[gpu].pci < 0 || !*topo->pci[topo->gpus[gpu].pci].local_cpus ||
        !topo_parse_cpus(topo->pci[topo->gpus[gpu].pci].local_cpus, local, TOPO_MAX_CPUS)) {
        doctor_unknown(result, "which processors are near %s", machine_gpu_name(machine, gpu));
        return;
    }
    if (ANY_OF(i, COUNT(allowed), allowed[i] & local[i]))
        return;
    doctor_found(result, DOCTOR_WARNING,
                 "the process may run on processors %s, and none of them is near %s, which it uses", list,
                 machine_gpu_name(machine, gpu));
    doctor_evidence(result, "/proc/self/status", "Cpus_allowed_list: %s", list);
    doctor_evidence(
        result,
        source_printf(machine->source, "/sys/bus/pci/devices/%s/local_cpulist", topo->pci[topo->gpus[gpu].pci].address),
        "%s", topo->pci[topo->gpus[gpu].pci].local_cpus);
    doctor_fix(result, false, "taskset -c %s PROGRAM",
               shell_word(machine->source, topo->pci[topo->gpus[gpu].pci].local_cpus));
    doctor_advise_remedy(result);
}

/* --- numa-balancing --- */

#define NUMA_BALANCING "/proc/sys/kernel/numa_balancing"

void run_numa_balancing(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text state = source_line(machine->source, NUMA_BALANCING);

    if (doctor_not_applicable_if(result, COUNT_OF(i, machine->topo->n_numa, *machine->topo->numa[i].cpus) < 2,
                                 "there is a single NUMA node with processors") ||
        doctor_not_applicable_if(result, state.state != SOURCE_OK, "the kernel has no " NUMA_BALANCING) ||
        doctor_not_applicable_if(result, !machine_has_ranks(machine), "one GPU, and nothing needs several ranks") ||
        (strtol(state.text, NULL, 10) & 1) == 0)
        return;
    doctor_found(result, DOCTOR_WARNING, "the kernel moves memory between NUMA nodes by itself");
    doctor_evidence(result, NUMA_BALANCING, "%s", state.text);
    if (!machine->software->os.in_container)
        doctor_fix(result, false, "sudo sysctl -w kernel.numa_balancing=0");
    doctor_advise(result, "%s",
                  machine->software->os.in_container
                      ? "On the node, not in this container: sudo sysctl -w kernel.numa_balancing=0, and "
                        "a file in /etc/sysctl.d so that it stays."
                      : "Write it to a file in /etc/sysctl.d as well, so that it stays.");
}

/* --- numa-memory --- */

/* A GPU whose NUMA node has no memory, or no processors. A GPU's memory may be a node without processors. */
void run_numa_memory(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *lacks = "";
    int n = 0, node = -1;

    for (int g = 0; g < topo->n_gpus; g++) {
        for (int i = 0; i < topo->n_numa; i++) {
            const struct topo_numa *numa = &topo->numa[i];

            if (topo->gpus[g].pci < 0 || numa->number != topo->pci[topo->gpus[g].pci].numa_node ||
                (numa->memory_bytes != 0 && *numa->cpus))
                continue;
            if (n++ == 0) {
                node = numa->number;
                lacks = numa->memory_bytes == 0 ? "memory" : "processors";
            }
            doctor_evidence(result, machine_gpu_name(machine, g), "on NUMA node %d, which has no %s", numa->number,
                            numa->memory_bytes == 0 ? "memory" : "processors");
        }
    }
    if (doctor_not_applicable_if(result, topo->n_numa == 0, "the kernel shows no NUMA nodes") || n == 0)
        return;
    doctor_found(result, DOCTOR_WARNING, "NUMA node %d, next to %d of %d GPUs, has no %s", node, n, topo->n_gpus,
                 lacks);
    doctor_advise_remedy(result);
}
