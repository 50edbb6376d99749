/* SPDX-License-Identifier: Apache-2.0 */
/* checks_topology.c - paths between GPUs, NICs and processors, and the meaning of GPU numbers. */
#include "checks.h"

/* --- imex --- */

#define IMEX "/dev/nvidia-caps-imex-channels"
#define HANDLES "NVSHMEM_CUMEM_HANDLE_TYPE"

/* Reports GPUs that have not joined the fabric of their rack. */
static bool has_joined(const struct doctor_machine *machine, struct doctor_result *result)
{
    int n = 0;

    FOR_EACH (gpu, machine->topo->gpus, machine->topo->n_gpus) {
        if (!gpu->answered || (gpu->fabric != TOPO_FABRIC_STARTING && gpu->fabric != TOPO_FABRIC_FAILED))
            continue;
        n++;
        doctor_evidence(result, machine_gpu_name(machine, gpu->index), "fabric %s",
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

    FOR_EACH (gpu, machine->topo->gpus, machine->topo->n_gpus) {
        bool is_without = gpu->cluster && (!*gpu->cluster || gpu->clique == 0);

        if (!gpu->cluster)
            continue;
        first = first ? first : gpu;
        n_without += is_without;
        n_other += strcmp(gpu->cluster, first->cluster) != 0 || gpu->clique != first->clique;
        doctor_evidence(result, machine_gpu_name(machine, gpu->index), "ClusterUUID %s, CliqueId %lld",
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

void run_imex(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names channels;
    struct source_stat stat;
    const char *kind = machine_env(machine, HANDLES);
    /* Some have no rack fabric (GB200 NVL4, a workstation): the driver says that none of them needs one. */
    bool is_rack = machine_has_multinode_nvlink(machine->topo) &&
                   ANY_OF(i, machine->topo->n_gpus, machine->topo->gpus[i].fabric != TOPO_FABRIC_NONE);

    if (doctor_not_applicable_if(result, !is_rack && strcasecmp(kind, "FABRIC") != 0,
                                 "no GPUs whose NVLinks lead to other nodes") ||
        (is_rack && (!has_joined(machine, result) || !has_domain(machine, result))))
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
    const char *entry;

    while ((entry = machine_next_word(machine, &mapping, ","))) {
        size_t n = strspn(entry, "0123456789");

        if (n > 0 && n < 6 && entry[n] == ':' && atoi(entry) == number)
            return source_printf(machine->source, "%.*s", (int)strcspn(entry + n + 1, ":"), entry + n + 1);
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
    if ((n < 0 && find_renumbered(machine, result, entries, 0)) ||
        doctor_not_applicable_if(result, n <= 0,
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
#define FIX_BYTES 1536 /* of commands, one line per bridge: as many as fit */

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

/*
 * Are there two devices that exchange data directly? IOMMU and ACS do not affect a single GPU. Physical machines only:
 * a guest sees the emulated bridges of its hypervisor.
 */
static bool has_peers(const struct doctor_machine *machine, struct doctor_result *result, const char *on_grace)
{
    const struct topo *topo = machine->topo;
    enum machine_virtual is_virtual = machine_virtual(machine->source);

    return !doctor_not_applicable_if(result, topo->n_gpus < 2 && machine_n_data_nics(topo) == 0,
                                     "one GPU and no NIC that it would talk to directly") &&
           !doctor_not_applicable_if(result, is_virtual == MACHINE_VIRTUAL,
                                     "a virtual machine: its host controls this") &&
           !doctor_unknown_if(result, is_virtual == MACHINE_VIRTUAL_UNKNOWN,
                              "whether this is a virtual machine: /proc/cpuinfo cannot be read") &&
           !doctor_not_applicable_if(result, machine_is_grace(topo) || machine_is_spark(topo), "%s", on_grace);
}

void run_acs(const struct doctor_machine *machine, struct doctor_result *result)
{
    unsigned char marks[TOPO_MAX_PCI] = {0};
    const struct topo *topo = machine->topo;
    int n = 0, n_hidden = 0, n_redirecting = 0;
    const char *fix = "";

    if (!has_peers(machine, result, "boards with Grace processors translate addresses in the device"))
        return;
    for (int i = 0; i < topo->n_gpus; i++)
        mark_bridges(topo, topo->gpus[i].pci, marks);
    for (int i = 0; i < topo->n_nics; i++)
        if (machine_is_data_nic(topo, i))
            mark_bridges(topo, topo->nics[i].pci, marks);
    for (int p = 0; p < topo->n_pci; p++) {
        const char *address = topo->pci[p].address;
        json_int_t acs;

        if (!marks[p])
            continue;
        n++;
        acs = json_integer_value(
            source_fact(machine->source, "acs", read_acs, "/sys/bus/pci/devices/%s/config", address).value);
        n_hidden += acs == ACS_HIDDEN;
        if (acs != ACS_REDIRECTS)
            continue;
        n_redirecting++;
        doctor_evidence(result, address, "ACS redirects requests or completions");
        if (strlen(fix) < FIX_BYTES)
            fix = source_printf(machine->source, "%s%ssudo setpci -s %s ECAP_ACS+0x6.w=0000", fix, *fix ? "\n" : "",
                                shell_word(machine->source, address));
    }
    result->missing = DOCTOR_MISSING_ROOT;
    if (n_redirecting) {
        doctor_found(result, DOCTOR_WARNING,
                     "%d of %d PCIe bridges above GPUs and NICs send traffic between devices through the processor "
                     "(ACS)",
                     n_redirecting, n);
        if (!machine_is_locked_down(machine->source)) {
            doctor_fix(result, false, "%s", fix);
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
    } else if (!doctor_unknown_if(result, n_hidden,
                                  "ACS of %d of %d bridges: only root can read their configuration space", n_hidden, n))
        doctor_not_applicable_if(result, n == 0, "there are no PCIe bridges above GPUs and NICs");
}

/* --- iommu --- */

/* The IOMMU group of a PCI device, "" if it has none. */
static const char *group_of(struct source *source, const struct topo *topo, int pci)
{
    struct source_text link = source_resolve(source, "/sys/bus/pci/devices/%s/iommu_group", topo->pci[pci].address);
    const char *base = link.state == SOURCE_OK ? strrchr(link.text, '/') : NULL;

    if (base)
        return base + 1;
    /* A copy of a machine may contain the groups but not the links to them. */
    FOR_NAMES (group, source_list(source, "/sys/kernel/iommu_groups"))
        FOR_NAMES (device, source_list(source, "/sys/kernel/iommu_groups/%s/devices", group))
            if (strcmp(device, topo->pci[pci].address) == 0)
                return group;
    return "";
}

void run_iommu(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int devices[TOPO_MAX_GPUS + TOPO_MAX_NICS], n_devices = 0, n = 0, n_translated = 0, n_unknown = 0;
    struct source_names groups;
    const char *why = "";

    if (!has_peers(machine, result, "boards with Grace processors need translation"))
        return;
    groups = source_list(machine->source, "/sys/kernel/iommu_groups");
    if (doctor_not_applicable_if(result, groups.state == SOURCE_ABSENT || (groups.state == SOURCE_OK && groups.n == 0),
                                 "the IOMMU is off") ||
        doctor_unreadable_if(result, groups.state != SOURCE_OK, "/sys/kernel/iommu_groups", groups.state, groups.why))
        return;
    for (int i = 0; i < topo->n_gpus; i++)
        devices[n_devices++] = topo->gpus[i].pci;
    for (int i = 0; i < topo->n_nics; i++)
        devices[n_devices++] = machine_is_data_nic(topo, i) ? topo->nics[i].pci : -1;
    for (int i = 0; i < n_devices; i++) {
        const char *group = devices[i] < 0 ? "" : group_of(machine->source, topo, devices[i]),
                   *file = source_printf(machine->source, "/sys/kernel/iommu_groups/%s/type", group);
        struct source_text type = {.text = ""};

        if (!*group)
            continue;
        n++;
        type = source_line(machine->source, "%s", file);
        if (type.state != SOURCE_OK) {
            n_unknown++;
            why = machine_reason(type.state, type.why);
        } else if (text_begins(type.text, "DMA")) {
            n_translated++;
            doctor_evidence(result, file, "%s (%s)", type.text, topo->pci[devices[i]].address);
        }
    }
    if (n_translated) {
        doctor_found(result, DOCTOR_WARNING, "the IOMMU translates the addresses of %d of %d GPUs and NICs",
                     n_translated, n);
        doctor_advise(result, "%s Or switch the IOMMU off in the BIOS.",
                      os_kernel_argument(machine->source, &machine->software->os, true, "iommu=pt"));
    } else
        doctor_unknown_if(result, n_unknown, "the type of %d IOMMU groups: %s", n_unknown, why);
}

/* --- affinity --- */

void run_affinity(const struct doctor_machine *machine, struct doctor_result *result)
{
    uint64_t allowed[TOPO_MAX_CPUS / 64] = {0}, local[TOPO_MAX_CPUS / 64] = {0};
    const struct topo *topo = machine->topo;
    struct source_text status = source_read(machine->source, "/proc/self/status");
    const char *list = source_field(machine->source, status.text, "Cpus_allowed_list");
    int gpu = machine_own_gpu(machine);
    const struct topo_pci *pci = gpu >= 0 && topo->gpus[gpu].pci >= 0 ? &topo->pci[topo->gpus[gpu].pci] : NULL;

    if (doctor_not_applicable_if(result, gpu < 0, "it is not known which GPU this process uses") ||
        doctor_unknown_if(result, !*list || !topo_parse_cpus(list, allowed, TOPO_MAX_CPUS), "/proc/self/status: %s",
                          status.state == SOURCE_OK ? "no Cpus_allowed_list"
                                                    : machine_reason(status.state, status.why)) ||
        doctor_unknown_if(result, !pci || !*pci->local_cpus || !topo_parse_cpus(pci->local_cpus, local, TOPO_MAX_CPUS),
                          "which processors are near %s", machine_gpu_name(machine, gpu)))
        return;
    if (ANY_OF(i, COUNT(allowed), allowed[i] & local[i]))
        return;
    doctor_found(result, DOCTOR_WARNING,
                 "the process may run on processors %s, and none of them is near %s, which it uses", list,
                 machine_gpu_name(machine, gpu));
    doctor_evidence(result, "/proc/self/status", "Cpus_allowed_list: %s", list);
    doctor_evidence(result, source_printf(machine->source, "/sys/bus/pci/devices/%s/local_cpulist", pci->address), "%s",
                    pci->local_cpus);
    doctor_fix(result, false, "taskset -c %s PROGRAM", shell_word(machine->source, pci->local_cpus));
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
        FOR_EACH (numa, topo->numa, topo->n_numa) {
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
}
