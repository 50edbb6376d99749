/* SPDX-License-Identifier: Apache-2.0 */
#include "queries.h"
#include "common/text.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *machine_reason(enum source_state state, const char *why)
{
    static const char *const reasons[] = {[SOURCE_OK] = "",
                                          [SOURCE_ABSENT] = "not there",
                                          [SOURCE_DENIED] = "Permission denied",
                                          [SOURCE_FAILED] = "could not be read",
                                          [SOURCE_NOT_RECORDED] = "the snapshot does not say"};

    return why && *why ? why : reasons[state];
}

long long machine_unit(char letter)
{
    static const char letters[] = "kmgt";
    const char *at = letter ? strchr(letters, tolower((unsigned char)letter)) : NULL;

    return at ? 1024LL << 10 * (at - letters) : 1;
}

const char *machine_env(const struct doctor_machine *machine, const char *name)
{
    const char *value = source_env(machine->source, name);

    return value ? value : "";
}

bool machine_has_gpus(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names names;
    int n_unreadable;
    int64_t vendor;

    if (machine->topo->n_gpus > 0)
        return true;
    names = source_list(machine->source, "/sys/bus/pci/devices");
    n_unreadable = COUNT_OF(i, names.n,
                            source_number(machine->source, &vendor, "/sys/bus/pci/devices/%s/vendor", names.names[i]) !=
                                SOURCE_OK);
    if (names.state != SOURCE_OK && names.state != SOURCE_ABSENT)
        doctor_unknown(result, "whether there is a GPU: /sys/bus/pci/devices: %s",
                       machine_reason(names.state, names.why));
    else if (n_unreadable > 0)
        doctor_unknown(result, "whether there is a GPU: %d of %zu PCI devices cannot be identified", n_unreadable,
                       names.n);
    else
        doctor_not_applicable(result, machine->topo->n_hidden_gpus > 0
                                          ? "no GPU of this machine is given to this process"
                                          : "there is no NVIDIA GPU");
    return false;
}

bool machine_has_driver(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text version;

    if (!machine_has_gpus(machine, result))
        return false;
    if (*machine->software->driver.version)
        return true;
    version = source_line(machine->source, "/proc/driver/nvidia/version");
    if (version.state == SOURCE_ABSENT)
        doctor_not_applicable(result, "the NVIDIA driver is not loaded");
    else
        doctor_unknown(result, "/proc/driver/nvidia/version: %s",
                       version.state == SOURCE_OK ? "no version in it" : machine_reason(version.state, version.why));
    return false;
}

bool machine_has_open_gpu(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;

    return ANY_OF(i, topo->n_gpus,
                  topo->gpus[i].minor >= 0 &&
                      machine_may_open(source_stat(machine->source, "/dev/nvidia%d", topo->gpus[i].minor)));
}

enum doctor_missing machine_missing_nvml(const struct doctor_machine *machine)
{
    struct libs_env env = libs_env_of(machine->source);

    return machine->software->os.in_container &&
                   libs_find(machine->source, &env, "libnvidia-ml.so.1").state == SOURCE_ABSENT
               ? DOCTOR_MISSING_LIBRARY
               : DOCTOR_MISSING_DRIVER;
}

bool machine_knows_port_state(const struct topo_port *port)
{
    return *port->state && (strcmp(port->state, "ACTIVE") != 0 || *port->phys_state);
}

bool machine_is_data_nic(const struct topo *topo, int nic)
{
    return topo->nics[nic].role == TOPO_ROLE_DATA && topo->nics[nic].pci >= 0;
}

int machine_n_data_nics(const struct topo *topo)
{
    return COUNT_OF(i, topo->n_nics, machine_is_data_nic(topo, i));
}

bool machine_nic_serves_gpus(const struct doctor_machine *machine, int nic)
{
    const struct topo *topo = machine->topo;

    if (!machine_is_data_nic(topo, nic))
        return false;
    for (int g = 0; g < machine->map->n; g++) {
        int other = machine->map->choices[g].nic;

        if (other == nic || (other >= 0 && topo->nics[other].pci >= 0 && topo_is_same_model(topo, other, nic) &&
                             machine_gpu_distance(topo, other) == machine_gpu_distance(topo, nic)))
            return true;
    }
    return topo->n_gpus == 0;
}

int machine_ports(const struct doctor_machine *machine, bool serving, enum topo_link_layer layer,
                  struct machine_port ret_ports[MACHINE_PORTS_MAX])
{
    const struct topo *topo = machine->topo;
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports; p++)
            if (topo->nics[i].ports[p].active &&
                (layer == TOPO_LINK_UNKNOWN || topo->nics[i].ports[p].link_layer == layer) &&
                (serving ? machine_nic_serves_gpus(machine, i) : machine_is_data_nic(topo, i)))
                ret_ports[n++] = (struct machine_port){.nic = i, .port = p};
    return n;
}

/* NCCL_IB_DISABLE and NCCL's transport for sockets mean the opposite. */
static bool needs_rdma(const char *name, const char *value)
{
    if (strcmp(name, "NCCL_NET") == 0)
        return *value && strcasecmp(value, "Socket") != 0;
    /* libfabric's RDMA providers for NICs of Amazon, HPE and others; not "tcp" and "shm". */
    if (strcmp(name, "FI_PROVIDER") == 0)
        return strncasecmp(value, "efa", 3) == 0 || strncasecmp(value, "verbs", 5) == 0;
    return strcmp(name, "NCCL_NET_PLUGIN") == 0 || strcmp(name, "UCX_NET_DEVICES") == 0 ||
           (strncmp(name, "NCCL_IB_", 8) == 0 && strcmp(name, "NCCL_IB_DISABLE") != 0);
}

bool machine_uses_rdma(const struct doctor_machine *machine)
{
    struct source_environment environment = source_environment(machine->source);

    return machine_deepep(machine) || machine_sets_nvshmem(machine) ||
           ANY_OF(i, environment.n, needs_rdma(environment.variables[i].name, environment.variables[i].value));
}

bool machine_has_ranks(const struct doctor_machine *machine)
{
    /* torchrun, Open MPI, PMI, Slurm: their manuals */
    return machine->topo->n_gpus > 1 ||
           machine_job_largest(machine, TEXTS("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")) > 1 ||
           machine_uses_rdma(machine);
}

bool machine_has_data_nics(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    struct source_names names;
    int n_unreadable;

    if (machine_n_data_nics(topo) > 0)
        return true;
    names = source_list(machine->source, "/sys/class/infiniband");
    /* Those whose purpose cannot be determined. */
    n_unreadable = COUNT_OF(i, topo->n_nics,
                            topo->nics[i].role == TOPO_ROLE_DOWN &&
                                !ANY_OF(p, topo->nics[i].n_ports, machine_knows_port_state(&topo->nics[i].ports[p])));
    if (names.n > (size_t)topo->n_nics)
        n_unreadable += (int)names.n - topo->n_nics;
    if (names.state != SOURCE_OK && names.state != SOURCE_ABSENT && topo->n_nics == 0)
        doctor_unknown(result, "whether there is an RDMA NIC: /sys/class/infiniband: %s",
                       machine_reason(names.state, names.why));
    else if (names.state == SOURCE_ABSENT && topo->n_nics == 0 &&
             source_stat(machine->source, "/sys/class").state == SOURCE_ABSENT)
        doctor_unknown(result, "whether there is an RDMA NIC: /sys is not mounted here");
    else if (n_unreadable > 0)
        doctor_unknown(result, "whether there is an RDMA NIC for data: the state of %d of %zu is not known",
                       n_unreadable, names.n);
    else
        doctor_not_applicable(result, "there is no RDMA NIC for data");
    return false;
}

bool machine_has_environment(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_environment environment = source_environment(machine->source);

    if (environment.state == SOURCE_OK || environment.state == SOURCE_ABSENT)
        return true;
    doctor_unknown(result, "the environment: %s", machine_reason(environment.state, environment.why));
    return false;
}

enum topo_path machine_gpu_distance(const struct topo *topo, int nic)
{
    enum topo_path best = TOPO_SYS;

    for (int i = 0; i < topo->n_gpus; i++) {
        enum topo_path path = topo_gpu_nic_path(topo, i, nic);

        if (path < best)
            best = path;
    }
    return best;
}

#define CLASS_NETWORK 0x02

bool machine_carries_route(const struct doctor_machine *machine, const char *interface, bool or_lower)
{
    struct source_answer routes = topo_default_routes(machine->source, TOPO_ROUTES);

    FOR_JSON (name, routes.value) {
        const char *route = json_string_value(name);

        if (route && (strcmp(route, interface) == 0 ||
                      (or_lower && source_stat(machine->source, "/sys/class/net/%s/lower_%s", route, interface).state ==
                                       SOURCE_OK)))
            return true;
    }
    return false;
}

/* The bond or bridge of the interfaces of a PCI function; "" if there is none. */
static const char *master_of(struct source *source, const char *address)
{
    FOR_NAMES (name, source_list(source, "/sys/bus/pci/devices/%s/net", address)) {
        struct source_text master = source_resolve(source, "/sys/class/net/%s/master", name);

        if (master.state == SOURCE_OK)
            return master.text;
    }
    return "";
}

/* If two ports of a card are in one bond, mlx5 creates one RDMA device for both. */
static bool is_bonded_with_rdma(const struct doctor_machine *machine, int pci)
{
    const struct topo *topo = machine->topo;
    const char *master = master_of(machine->source, topo->pci[pci].address);

    return *master && ANY_OF(i, topo->n_nics,
                             topo->nics[i].pci >= 0 && topo_is_same_card(topo, topo->nics[i].pci, pci) &&
                                 strcmp(master, master_of(machine->source, topo->pci[topo->nics[i].pci].address)) == 0);
}

bool machine_is_function_without_rdma(const struct doctor_machine *machine, int pci)
{
    const struct topo *topo = machine->topo;
    const struct topo_pci *self = &topo->pci[pci];
    int data = FIRST_OF(i, topo->n_nics, advice_is_mlx5(topo, i));
    unsigned model = data < 0 ? 0 : topo->pci[topo->nics[data].pci].device; /* 0: not known */
    struct source_names names;

    if (self->vendor != PCI_VENDOR_MELLANOX || (self->class_code && self->class_code >> 16 != CLASS_NETWORK) ||
        (model && self->device != model) || strncmp(self->driver, "vfio", 4) == 0 ||
        ANY_OF(i, topo->n_nics, topo->nics[i].pci == pci))
        return false;
    /* Unbound virtual functions are reserved for virtual machines or pods. */
    if ((!*self->driver &&
         source_resolve(machine->source, "/sys/bus/pci/devices/%s/physfn", self->address).state == SOURCE_OK) ||
        is_bonded_with_rdma(machine, pci))
        return false;
    /* One that carries the default route needs no RDMA device. */
    names = source_list(machine->source, "/sys/bus/pci/devices/%s/net", self->address);
    return !ANY_OF(i, names.n, machine_carries_route(machine, names.names[i], true));
}

int machine_functions_without_rdma(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;
    int n = 0, n_data = machine_n_data_nics(topo), n_near = 0;

    /* A pod with some of the NICs has not lost the others. */
    if (ANY_OF(i, topo->n_nics, topo->nics[i].role == TOPO_ROLE_NO_ACCESS) || topo->n_gpus == 0 ||
        n_data >= topo->n_gpus || (topo->n_gpus < 2 && !machine_uses_rdma(machine)))
        return 0;
    for (int p = 0; p < topo->n_pci; p++) {
        if (!machine_is_function_without_rdma(machine, p))
            continue;
        n++;
        n_near += COUNT_OF(g, topo->n_gpus, topo_path(topo, topo->gpus[g].pci, p) <= TOPO_PXB);
    }
    /* A card that is only a network interface needs no RDMA: near a GPU, or something must need it. */
    return n_data > 0 || n_near > 0 || n >= topo->n_gpus || machine_uses_rdma(machine) ? n : 0;
}

const char *machine_gpu_name(const struct doctor_machine *machine, int gpu)
{
    const struct topo *topo = machine->topo;
    const char *address = topo->gpus[gpu].pci >= 0 ? topo->pci[topo->gpus[gpu].pci].address : "";

    if (!*address)
        return source_printf(machine->source, "GPU %d", gpu);
    if (topo->nvml && topo->gpus[gpu].answered)
        return source_printf(machine->source, "GPU %d (%s)", gpu, address);
    return source_printf(machine->source, "the GPU at %s", address);
}

const char *machine_port_name(const struct doctor_machine *machine, int nic, int port)
{
    return source_printf(machine->source, "%s:%d", machine->topo->nics[nic].name,
                         machine->topo->nics[nic].ports[port].number);
}

const char *machine_by_place(const struct doctor_machine *machine, struct by_place words)
{
    const struct os *os = &machine->software->os;

    /* An enroot or Apptainer container of Slurm has the limits and devices of its job. */
    if (source_env(machine->source, "SLURM_JOB_NUM_NODES") || source_env(machine->source, "SLURM_NTASKS"))
        return words.job;
    if (source_env(machine->source, "KUBERNETES_SERVICE_HOST") || (os->family == OS_COS && !os->in_container))
        return words.pod;
    return os->in_container ? words.container : words.host;
}

/* By name or, if the driver does not report it, by PCI device ID (pci.ids: GB100, GB110, GH100, GB10). */
static bool has_gpu_like(const struct topo *topo, const char *const *names, const unsigned *devices)
{
    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_pci *pci = topo->gpus[i].pci >= 0 ? &topo->pci[topo->gpus[i].pci] : NULL;

        for (int k = 0; names[k]; k++)
            if (strstr(topo->gpus[i].name, names[k]))
                return true;
        for (int k = 0; pci && pci->vendor == PCI_VENDOR_NVIDIA && devices[k]; k++)
            if (pci->device == devices[k])
                return true;
    }
    return false;
}

bool machine_is_grace(const struct topo *topo)
{
    return has_gpu_like(topo, TEXTS("GH200", "GB200", "GB300"), (const unsigned[]){0x2342, 0x2348, 0x2941, 0x31c2, 0});
}

bool machine_is_spark(const struct topo *topo)
{
    return has_gpu_like(topo, TEXTS("GB10"), (const unsigned[]){0x2e12, 0});
}

bool machine_has_multinode_nvlink(const struct topo *topo)
{
    return has_gpu_like(topo, TEXTS("GB200", "GB300"), (const unsigned[]){0x2941, 0x31c2, 0});
}

enum topo_link_layer machine_minority_link_layer(const struct doctor_machine *machine)
{
    int n[3] = {0};

    FOR_EACH (choice, machine->map->choices, machine->map->n) {
        const struct topo_port *port = topo_find_port(machine->topo, choice->nic, choice->port);

        if (port)
            n[port->link_layer]++;
    }
    if (n[TOPO_LINK_ETHERNET] == 0 || n[TOPO_LINK_INFINIBAND] == 0)
        return TOPO_LINK_UNKNOWN;
    return n[TOPO_LINK_ETHERNET] < n[TOPO_LINK_INFINIBAND] ? TOPO_LINK_ETHERNET : TOPO_LINK_INFINIBAND;
}

/* On x86, hypervisors set CPUID leaf 1, ECX bit 31: is there a line with the flag? */
READER_BOOL(read_any, *file.text)

enum machine_virtual machine_virtual(struct source *source)
{
    /* Product names that hypervisors use (SMBIOS, type 1). */
    static const char *const products[] = {"Google Compute Engine", "KVM",   "Virtual Machine", "VMware", "HVM domU",
                                           "Standard PC",           "BHYVE", "OpenStack"};
    struct source_text text = source_line(source, "/sys/class/dmi/id/product_name");
    struct source_answer flag;

    if (text.state == SOURCE_OK && ANY_OF(i, COUNT(products), strstr(text.text, products[i])))
        return MACHINE_VIRTUAL;
    flag = source_log_fact(source, "hypervisor", read_any, " hypervisor", "/proc/cpuinfo");
    if (flag.state != SOURCE_OK)
        return MACHINE_VIRTUAL_UNKNOWN;
    return source_fact_bool(flag) ? MACHINE_VIRTUAL : MACHINE_BARE_METAL;
}

/* "none [integrity] confidentiality" */
READER_BOOL(read_lockdown, strstr(file.text, "[integrity]") || strstr(file.text, "[confidentiality]"))

bool machine_is_locked_down(struct source *source)
{
    return source_fact_bool(source_fact(source, "lockdown", read_lockdown, "%s", MACHINE_LOCKDOWN_FILE));
}

static struct machine_visible parse_visible(const struct doctor_machine *machine, const char *word)
{
    struct machine_visible entry = {.text = word, .kind = MACHINE_VISIBLE_INVALID, .gpu = -1};

    if (strncasecmp(word, "GPU-", 4) == 0) {
        entry.kind = MACHINE_VISIBLE_UUID;
        entry.gpu = topo_find_gpu_uuid(machine->topo, word);
    } else if (strncasecmp(word, "MIG-", 4) == 0) {
        entry.kind = MACHINE_VISIBLE_MIG;
        if (strncasecmp(word, "MIG-GPU-", 8) == 0)
            entry.gpu = topo_find_gpu_uuid(
                machine->topo, source_printf(machine->source, "%.*s", (int)strcspn(word + 4, "/"), word + 4));
        else if (topo_usable_gpus(machine->topo) == 1)
            entry.gpu = 0;
    } else if (isdigit((unsigned char)*word) && word[strspn(word, "0123456789")] == '\0' && strlen(word) < 6) {
        entry.kind = MACHINE_VISIBLE_INDEX;
        entry.gpu = atoi(word) < machine->topo->n_gpus ? atoi(word) : -1;
    }
    return entry;
}

int machine_visible(const struct doctor_machine *machine, struct machine_visible *ret_entries)
{
    const char *value = source_env(machine->source, "CUDA_VISIBLE_DEVICES");
    int n = 0;

    if (!value)
        return -1;
    while (*value && n < MACHINE_VISIBLE_MAX) {
        struct piece entry;
        const char *word;

        value += strspn(value, " \t");
        entry = text_take(&value, ",");
        while (entry.n > 0 && isspace((unsigned char)entry.text[entry.n - 1]))
            entry.n--;
        word = source_printf(machine->source, "%.*s", (int)(entry.n < 256 ? entry.n : 256), entry.text);
        /* CUDA C++ programming guide: entries after -1 are not visible. Slurm uses NoDevFiles to hide all GPUs. */
        if (strcmp(word, "-1") == 0 || strcmp(word, "NoDevFiles") == 0 || (*word == '\0' && n == 0))
            break;
        ret_entries[n++] = parse_visible(machine, word);
    }
    return n;
}

int machine_own_gpu(const struct doctor_machine *machine)
{
    struct machine_visible entries[MACHINE_VISIBLE_MAX];
    int gpu = advice_gpu_of(machine->topo, advice_source_env, machine->source), n;

    if (gpu >= 0)
        return gpu;
    n = machine_visible(machine, entries);
    if (n == 1)
        return entries[0].gpu;
    return n < 0 && machine->topo->n_gpus == 1 ? 0 : -1;
}

const char *machine_next_word(const struct doctor_machine *machine, const char **at, const char *separators)
{
    struct piece word;

    if (!*at)
        return NULL;
    *at += strspn(*at, separators);
    word = text_take(at, separators);
    return word.n ? source_printf(machine->source, "%.*s", (int)word.n, word.text) : NULL;
}

const struct software_copy *machine_deepep(const struct doctor_machine *machine)
{
    const struct software_deepep *deepep = &machine->software->deepep;

    return deepep->imported < 0 ? NULL : &deepep->copies[deepep->imported];
}

long machine_job_number(const struct doctor_machine *machine, const char *name, long without)
{
    const char *value = source_env(machine->source, name);
    char *end;
    long number;

    if (!value || !*value)
        return without;
    number = strtol(value, &end, 10);
    return *end || number < 0 ? without : number;
}

int machine_job_gpus(const struct doctor_machine *machine)
{
    struct machine_visible entries[MACHINE_VISIBLE_MAX];
    int n = machine_visible(machine, entries);

    if (advice_gpu_of(machine->topo, advice_source_env, machine->source) >= 0)
        return 1;
    return n < 0 || n > machine->topo->n_gpus ? machine->topo->n_gpus : n;
}

long machine_job_largest(const struct doctor_machine *machine, const char *const *names)
{
    long largest = -1;

    for (; *names; names++) {
        long value = machine_job_number(machine, *names, -1);

        largest = value > largest ? value : largest;
    }
    return largest;
}

/* Slurm, scripts around torchrun, torchrun itself. */
long machine_job_nodes(const struct doctor_machine *machine)
{
    return machine_job_largest(machine, TEXTS("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "GROUP_WORLD_SIZE"));
}
