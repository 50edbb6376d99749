/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_nccl.c - compares NCCL's variables with the machine. They are interpreted according to "Environment Variables"
 * in the NCCL user guide: lists contain prefixes of names, a leading '=' requires exact names, '^' excludes names.
 */
#include "checks.h"

#include <ctype.h>
#include <stdio.h>

/* --- shared --- */

/* Variables that disable InfiniBand and RoCE in NCCL; those that disable direct access between GPUs. */
static const char *const without_ib[] = {"NCCL_IB_DISABLE", "NCCL_NET", NULL};
static const char *const without_p2p[] = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", NULL};
/* Those that disable NVLink between the nodes of a rack, which needs memory of the driver's API (cuMem). */
static const char *const without_mnnvl[] = {"NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", NULL};

static bool disables(const struct doctor_machine *machine, const char *name)
{
    const char *value = machine_nccl_value(machine, name, NULL);

    if (text_ends(name, "_DISABLE"))
        return isdigit((unsigned char)*value) && strtol(value, NULL, 10) != 0;
    if (text_ends(name, "_ENABLE"))
        return strcmp(value, "0") == 0;
    return strcmp(name, "NCCL_NET") == 0 ? strcasecmp(value, "Socket") == 0
                                         : strcasecmp(value, "LOC") == 0 || strcmp(value, "0") == 0;
}

/* The first of the variables that disables something; NULL if none does. */
static const char *first_that_disables(const struct doctor_machine *machine, const char *const *names)
{
    while (*names && !disables(machine, *names))
        names++;
    return *names;
}

/* Does NCCL use InfiniBand? If it uses sockets or no network, it does not read the variables of InfiniBand. */
static bool uses_ib(const struct doctor_machine *machine)
{
    return !first_that_disables(machine, without_ib);
}

/* --- nccl-hca --- */

#define HCA "NCCL_IB_HCA"

static bool names_port(const struct doctor_machine *machine, const struct list_names *names,
                       const struct machine_port *port)
{
    const struct topo_nic *nic = &machine->topo->nics[port->nic];

    return list_names_it(names, nic->name, nic->ports[port->port].number);
}

/* The distance from a GPU to the nearest data NIC, of those in the list if there is a list. */
static enum topo_path distance_to(const struct doctor_machine *machine, int gpu, const struct list_names *names)
{
    struct machine_port ports[MACHINE_PORTS_MAX];
    int n = machine_ports(machine, false, TOPO_LINK_UNKNOWN, ports);
    enum topo_path nearest = TOPO_SYS;

    FOR_EACH (port, ports, n)
        if (topo_gpu_nic_path(machine->topo, gpu, port->nic) < nearest && (!names || names_port(machine, names, port)))
            nearest = topo_gpu_nic_path(machine->topo, gpu, port->nic);
    return nearest;
}

/* The number of GPUs of this process (or of its rank) whose NIC on the same switch or socket is not in the list. */
static int count_without(const struct doctor_machine *machine, const struct list_names *names, int *ret_first)
{
    int own = machine_own_gpu(machine), n = 0;

    for (int g = topo_usable_gpus(machine->topo) - 1; g >= 0; g--) {
        enum topo_path best = distance_to(machine, g, NULL), named = distance_to(machine, g, names);

        if ((own >= 0 && g != own) || named == best || named <= TOPO_PXB || (best > TOPO_PXB && named < TOPO_SYS))
            continue;
        n++;
        *ret_first = g;
    }
    return n;
}

/* The number of GPUs of this process that have several NICs of their own, of which the list names a part. */
static int count_halved(const struct doctor_machine *machine, const struct list_names *names, int *ret_first)
{
    const struct topo *topo = machine->topo;
    struct machine_port ports[MACHINE_PORTS_MAX];
    int own = machine_own_gpu(machine), n = 0, n_ports = machine_ports(machine, false, TOPO_LINK_UNKNOWN, ports);

    for (int g = topo_usable_gpus(topo) - 1; g >= 0; g--) {
        enum topo_path nearest = distance_to(machine, g, NULL);
        int n_near = COUNT_OF(i, n_ports, topo_gpu_nic_path(topo, g, ports[i].nic) == nearest);
        int n_named = COUNT_OF(
            i, n_ports, topo_gpu_nic_path(topo, g, ports[i].nic) == nearest && names_port(machine, names, &ports[i]));
        int n_gpus =
            COUNT_OF(k, topo->n_gpus,
                     topo->gpus[k].pci >= 0 && topo_path(topo, topo->gpus[g].pci, topo->gpus[k].pci) <= nearest);

        if ((nearest > TOPO_PXB && !machine_is_spark(topo)) || (own >= 0 && g != own) || n_near < 2 * n_gpus ||
            n_named == 0 || n_named == n_near || n_named >= 2 * n_gpus)
            continue;
        n++;
        *ret_first = g;
    }
    return n;
}

/* Without a list NCCL also uses NICs that are not for data, if there are any: then it needs the right one. */
static void fix_hca(const struct doctor_machine *machine, struct doctor_result *result, const char *advice)
{
    const struct advice_row *row = advice_find(machine->advice, HCA);

    if (!row || row->unset || !*row->value) {
        doctor_found_value(result, HCA);
        doctor_advise(result, "%s", advice);
        return;
    }
    doctor_evidence_env(result, HCA);
    doctor_fix(result, false, "export " HCA "=%s", shell_word(machine->source, row->value));
    doctor_advise(result, "%s", row->reason);
}

void run_nccl_hca(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *value = machine_nccl_value(machine, HCA, NULL);
    struct list_names names = list_names_of(value);
    struct machine_port ports[MACHINE_PORTS_MAX];
    int n = machine_ports(machine, false, TOPO_LINK_UNKNOWN, ports), far = -1, halved = -1,
        n_named = COUNT_OF(i, n, names_port(machine, &names, &ports[i])), n_far = count_without(machine, &names, &far),
        n_halved = count_halved(machine, &names, &halved);
    const char *left_out = "";

    if (doctor_not_applicable_if(result, !*value || !uses_ib(machine),
                                 *value ? "NCCL is told to use sockets" : HCA " is not set"))
        return;
    if (n_named == 0) {
        doctor_found(result, DOCTOR_ERROR, HCA " matches no NIC for data: NCCL uses sockets");
        fix_hca(machine, result,
                "Entries are prefixes of names, separated by ','; '=' in front of the list makes them exact names, and "
                ":1 after one is its port. 'epkit topo' shows the NICs.");
    } else if (n_named < n && n_named < machine_job_gpus(machine)) {
        for (int i = 0; i < n; i++)
            if (!names_port(machine, &names, &ports[i]))
                left_out = machine->topo->nics[ports[i].nic].name;
        doctor_found(result, DOCTOR_WARNING, HCA " leaves out %d of %d NICs for data, %s among them", n - n_named, n,
                     left_out);
        fix_hca(machine, result,
                "By default, NCCL uses the nearest NIC of each GPU; without the list all of them are used.");
    } else if (n_halved > 0) {
        doctor_found(result, DOCTOR_WARNING, HCA " names a part of the NICs of %s%s: the others carry nothing",
                     machine_gpu_name(machine, halved), n_halved > 1 ? ", and of more GPUs" : "");
        fix_hca(machine, result,
                "NCCL uses all NICs that are as near to a GPU; without the list all of them are used.");
    } else if (n_far > 0) {
        doctor_found(result, DOCTOR_WARNING, HCA " leaves out the NICs that are nearest to %s%s",
                     machine_gpu_name(machine, far), n_far > 1 ? ", and to more GPUs" : "");
        fix_hca(machine, result,
                "The traffic of these GPUs crosses host bridges or sockets. Without the list NCCL takes the nearest "
                "NIC of each GPU.");
    }
}

/* --- topology-file --- */

#define TOPOLOGY_FILE "NCCL_TOPO_FILE"
#define GRAPH_FILE "NCCL_GRAPH_FILE"

/* Addresses of the GPUs in a topology file of NCCL, as numbers: domain, bus, device and function. */
static json_t *read_topology_gpus(struct source_text file)
{
    json_t *gpus = json_array();

    for (const char *tag = strstr(file.text, "<pci "); tag; tag = strstr(tag + 1, "<pci ")) {
        const char *end = strchr(tag, '>'), *class = strstr(tag, " class=\"0x03"), *id = strstr(tag, " busid=\"");
        unsigned domain, bus, device, function;

        if (end && class && id && class < end && id < end && json_array_size(gpus) < TOPO_MAX_GPUS &&
            sscanf(id, " busid=\"%x:%x:%x.%x\"", &domain, &bus, &device, &function) == 4)
            json_array_append_new(gpus, json_integer((json_int_t)(domain << 16 | (bus & 0xff) << 8 |
                                                                  (device & 0x1f) << 3 | (function & 7))));
    }
    return gpus;
}

/* The number of GPUs in the rings and trees of a graph file: <gpu dev="3"/>. */
static json_t *read_graph_gpus(struct source_text file)
{
    long most = -1;

    for (const char *tag = strstr(file.text, "<gpu dev=\""); tag; tag = strstr(tag + 1, "<gpu dev=\"")) {
        long dev = strtol(tag + strlen("<gpu dev=\""), NULL, 10);

        most = dev > most && dev < TOPO_MAX_GPUS ? dev : most;
    }
    return json_integer(most + 1);
}

/* The address of a GPU in the file that is not on the bus; "" if all are. */
static const char *foreign_gpu(const struct doctor_machine *machine, const json_t *gpus, int *ret_n)
{
    const char *first = "";

    *ret_n = 0;
    FOR_JSON (gpu, gpus) {
        unsigned id = (unsigned)json_integer_value(gpu);
        const char *address =
            source_printf(machine->source, "%04x:%02x:%02x.%x", id >> 16, id >> 8 & 0xff, id >> 3 & 0x1f, id & 7);

        if (topo_find_pci(machine->topo, address) >= 0)
            continue;
        first = *first ? first : address;
        ++*ret_n;
    }
    return first;
}

/* What is wrong with the file, a sentence without its subject; "" if nothing is. NCCL continues without a topology. */
static const char *topology_fault(const struct doctor_machine *machine, const char *file)
{
    struct source_answer gpus = source_fact(machine->source, "topology-gpus", read_topology_gpus, "%s", file);
    int n_foreign;
    const char *foreign = foreign_gpu(machine, gpus.value, &n_foreign);

    if (gpus.state == SOURCE_ABSENT)
        return "names a file that does not exist";
    return *foreign ? source_printf(machine->source,
                                    "describes another machine: %d of its %zu GPUs, %s among them, are not here",
                                    n_foreign, json_array_size(gpus.value), foreign)
                    : "";
}

static const char *graph_fault(const struct doctor_machine *machine, const char *file)
{
    struct source_answer gpus = source_fact(machine->source, "graph-gpus", read_graph_gpus, "%s", file);
    int n = (int)json_integer_value(gpus.value);

    if (gpus.state == SOURCE_ABSENT)
        return "names a file that does not exist: NCCL does not start";
    return n > machine->topo->n_gpus + machine->topo->n_hidden_gpus
               ? source_printf(machine->source, "has rings for %d GPUs, and there are %d: NCCL does not start", n,
                               machine->topo->n_gpus)
               : "";
}

void run_topology_file(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const struct {
        const char *name;
        const char *(*fault)(const struct doctor_machine *machine, const char *file);
        enum doctor_severity severity;
    } files[] = {{GRAPH_FILE, graph_fault, DOCTOR_ERROR}, {TOPOLOGY_FILE, topology_fault, DOCTOR_WARNING}};
    bool any = false;

    for (size_t i = 0; i < COUNT(files); i++) {
        const char *file = machine_nccl_value(machine, files[i].name, NULL), *why;

        if (*file != '/')
            continue;
        any = true;
        why = files[i].fault(machine, file);
        if (*why && result->outcome != DOCTOR_FOUND)
            doctor_found(result, files[i].severity, "%s %s", files[i].name, why);
        if (*why)
            doctor_found_value(result, files[i].name);
    }
    if (doctor_not_applicable_if(result, !any, TOPOLOGY_FILE " and " GRAPH_FILE " are not set") ||
        result->outcome != DOCTOR_FOUND)
        return;
    doctor_advise(
        result,
        "Without such files NCCL reads the topology from /sys; a virtual machine whose switches are hidden needs the file of its own type.");
}

/* --- nccl-disabled --- */

void run_nccl_disabled(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const struct {
        const char *const *names;
        const char *what, *advice;
    } disabled[] = {
        {without_mnnvl, "keeps NCCL from using the NVLinks between the nodes of the rack",
         "Without it, NCCL uses them where the nodes are in one NVLink domain and have an IMEX channel."},
        {without_ib, "sends everything between nodes over sockets", "This machine has RDMA NICs for data."},
        {without_p2p, "prevents NCCL from using NVLink",
         "It is for machines on which GPUs cannot reach each other over PCIe. Here they have NVLink."},
    };
    const struct topo *topo = machine->topo;
    struct doctor_result unused = {.machine = machine};
    const bool matters[] = {machine_has_multinode_nvlink(topo),
                            topo->n_gpus > 1 && machine_has_data_nics(machine, &unused),
                            COUNT_OF(i, topo->n_gpus, topo->gpus[i].nvlinks_up > 0) > 1};
    bool any = first_that_disables(machine, without_p2p) || first_that_disables(machine, without_ib);

    for (size_t i = 0; i < COUNT(disabled); i++) {
        const char *first = matters[i] ? first_that_disables(machine, disabled[i].names) : NULL;
        bool is_p2p = disabled[i].names == without_p2p;

        if (!first)
            continue;
        doctor_found(result, is_p2p || machine_has_other_nodes(machine) ? DOCTOR_ERROR : DOCTOR_WARNING, "%s=%s %s",
                     first, machine_nccl_value(machine, first, NULL), disabled[i].what);
        for (const char *const *name = disabled[i].names; *name; name++)
            if (disables(machine, *name))
                doctor_found_value(result, *name);
        doctor_advise(result, is_p2p && *result->advice ? "%s %s" : "%s", disabled[i].advice, result->advice);
    }
    doctor_not_applicable_if(result, !any && result->outcome != DOCTOR_FOUND, "nothing is disabled");
}

/* --- nccl-gdr --- */

#define GDR_LEVEL "NCCL_NET_GDR_LEVEL"

/* In NCCL's order: LOC, PIX, PXB, PHB, SYS; older versions used numbers. -1: not known. */
static int gdr_rank(const char *level)
{
    static const char *const names[] = {"LOC", "PIX", "PXB", "PHB", "NODE", "SYS"};

    int i = FIRST_OF(k, COUNT(names), strcasecmp(level, names[k]) == 0);

    if (isdigit((unsigned char)*level) && !level[1])
        return *level - '0';
    return i == 4 ? 3 : i;
}

void run_nccl_gdr(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const int ranks[] = {[TOPO_PIX] = 1, [TOPO_PXB] = 2, [TOPO_PHB] = 3, [TOPO_NODE] = 3, [TOPO_SYS] = 5};
    const char *level = machine_nccl_value(machine, GDR_LEVEL, NULL);
    const struct topo *topo = machine->topo;
    int limit, n_beyond = 0, first = -1, unknown = -1;

    if (doctor_not_applicable_if(result, !*level || !uses_ib(machine) || machine_is_grace(machine->topo), "%s",
                                 *level ? "NCCL is told to use sockets, or the board has its own rule (Grace)"
                                        : GDR_LEVEL " is not set"))
        return;
    limit = gdr_rank(level);
    for (int g = 0; g < machine->map->n && limit >= 0; g++) {
        const struct map_choice *choice = &machine->map->choices[g];

        if (choice->nic < 0 || choice->path < TOPO_PIX || ranks[choice->path] <= limit)
            continue;
        if (!topo_is_located(topo, topo->gpus[choice->gpu].pci) || !topo_is_located(topo, topo->nics[choice->nic].pci))
            unknown = unknown < 0 ? choice->gpu : unknown;
        else
            first = n_beyond++ == 0 ? g : first;
    }
    if (n_beyond == 0 && unknown >= 0)
        doctor_unknown(result, "/sys/bus/pci/devices: it does not have %s and its NIC, so their distance is not known",
                       machine_gpu_name(machine, unknown));
    if (n_beyond == 0)
        return;
    doctor_found(result, DOCTOR_WARNING,
                 GDR_LEVEL "=%s makes %d of %d GPUs send through host memory: their NICs are farther away", level,
                 n_beyond, machine->topo->n_gpus);
    doctor_found_value(result, GDR_LEVEL);
    doctor_evidence(result, source_printf(machine->source, "GPU %d", first), "its NIC %s is %s away",
                    machine->topo->nics[machine->map->choices[first].nic].name,
                    topo_path_name(machine->map->choices[first].path));
    doctor_advise(result, "It is the largest distance at which NCCL lets a NIC read GPU memory. If the distance shown "
                          "is right for this machine, set the level to it.");
}

/* --- traffic-class --- */

static enum topo_link_layer layer_of(const struct doctor_machine *machine, const struct machine_port *port)
{
    return machine->topo->nics[port->nic].ports[port->port].link_layer;
}

/* A traffic class is a field of the IP header of RoCE packets; InfiniBand uses none except between subnets. */
void run_traffic_class(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[][2] = {{"NCCL_IB_TC", "NCCL_IB_SL"}, {"NVSHMEM_IB_TRAFFIC_CLASS", "NVSHMEM_IB_SL"}};

    struct machine_port ports[MACHINE_PORTS_MAX];
    /* Ports in front of the first known one are taken for what it is. */
    int n = machine_ports(machine, false, TOPO_LINK_UNKNOWN, ports),
        known = FIRST_OF(i, n, layer_of(machine, &ports[i]) != TOPO_LINK_UNKNOWN);

    if (doctor_not_applicable_if(
            result, known < 0 || ANY_OF(i, n, i >= known && layer_of(machine, &ports[i]) != TOPO_LINK_INFINIBAND),
            "the NICs for data are not all InfiniBand"))
        return;
    for (size_t i = COUNT(names); i-- > 0;) {
        const char *value = machine_nccl_value(machine, names[i][0], NULL);

        if (strtol(value, NULL, 10) <= 0 || (i == 0 && !uses_ib(machine)))
            continue;
        /* IBGDA puts it into the path of a queue pair, and the NIC refuses that on InfiniBand. */
        if (i == 1)
            doctor_found(result, DOCTOR_ERROR, "%s=%s keeps NVSHMEM from connecting: the NICs are InfiniBand",
                         names[i][0], value);
        else
            doctor_found_first(result, DOCTOR_WARNING, "%s=%s does nothing: the NICs are InfiniBand", names[i][0],
                               value);
        doctor_found_value(result, names[i][0]);
        doctor_advise(result, "On InfiniBand, the service level determines how switches handle traffic: %s.",
                      names[i][1]);
    }
}
