/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_nccl.c - compares NCCL's variables with the machine. They are interpreted according to "Environment Variables"
 * in the NCCL user guide: lists contain prefixes of names, a leading '=' requires exact names, '^' excludes names.
 */
#include "checks.h"
#include "machine_nvshmem.h"
#include "queries.h"
#include "shell.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --- shared --- */

static bool is_on(const struct doctor_machine *machine, const char *name)
{
    const char *value = source_env(machine->source, name);

    return value && isdigit((unsigned char)*value) && strtol(value, NULL, 10) != 0;
}

/* The variable that disables InfiniBand and RoCE in NCCL, NULL if there is none. */
static const char *ib_switched_off_by(const struct doctor_machine *machine)
{
    const char *net = source_env(machine->source, "NCCL_NET");

    if (is_on(machine, "NCCL_IB_DISABLE"))
        return "NCCL_IB_DISABLE";
    return net && strcasecmp(net, "Socket") == 0 ? "NCCL_NET" : NULL;
}

/* Does NCCL use InfiniBand? If it uses sockets or no network, it does not read the variables of InfiniBand. */
static bool uses_ib(const struct doctor_machine *machine)
{
    return !ib_switched_off_by(machine);
}

/* Do the launcher's variables say that the job has other nodes? */
static bool has_other_nodes(const struct doctor_machine *machine)
{
    return machine_job_nodes(machine) > 1 ||
           machine_job_number(machine, "WORLD_SIZE", 0) > machine_job_number(machine, "LOCAL_WORLD_SIZE", 1 << 20) ||
           machine_job_number(machine, "OMPI_COMM_WORLD_SIZE", 0) >
               machine_job_number(machine, "OMPI_COMM_WORLD_LOCAL_SIZE", 1 << 20);
}

struct names {
    bool is_exclusion, is_exact;
    const char *list;
};

static struct names parse_names(const char *value)
{
    struct names names = {.list = value ? value : ""};

    names.is_exclusion = *names.list == '^';
    names.list += names.is_exclusion;
    names.is_exact = *names.list == '=';
    names.list += names.is_exact;
    return names;
}

/* Does an entry of the list, "name" or "name:port", match this device? Interfaces have port -1. */
static bool stands_for(const char *entry, size_t n, bool is_exact, const char *name, int port)
{
    const char *colon = memchr(entry, ':', n);
    size_t n_name = colon ? (size_t)(colon - entry) : n;

    if (n_name == 0 || strncmp(name, entry, n_name) != 0 || (is_exact && name[n_name]))
        return false;
    return !colon || port < 0 || strtol(colon + 1, NULL, 10) == port;
}

static bool names_it(const struct names *names, const char *name, int port)
{
    for (const char *at = names->list; *at;) {
        size_t n = strcspn(at, ",");

        if (stands_for(at, n, names->is_exact, name, port))
            return !names->is_exclusion;
        at += n + (at[n] != '\0');
    }
    return names->is_exclusion;
}

static void found_value(struct doctor_result *result, const char *name)
{
    doctor_evidence_env(result, name);
    doctor_fix(result, false, "unset %s", name);
}

/* --- nccl-hca --- */

#define HCA "NCCL_IB_HCA"

/* The number of data ports that match the list, and of all data ports. */
static int count_named(const struct topo *topo, const struct names *names, int *ret_n, int *ret_left_out)
{
    int n_named = 0;

    *ret_n = 0;
    for (int i = 0; i < topo->n_nics; i++) {
        for (int p = 0; p < topo->nics[i].n_ports; p++) {
            if (!machine_is_data_nic(topo, i) || !topo->nics[i].ports[p].active)
                continue;
            ++*ret_n;
            if (names_it(names, topo->nics[i].name, topo->nics[i].ports[p].number))
                n_named++;
            else
                *ret_left_out = i;
        }
    }
    return n_named;
}

/* The distance from a GPU to the nearest data NIC, of those in the list if there is a list. */
static enum topo_path distance_to(const struct topo *topo, int gpu, const struct names *names)
{
    enum topo_path nearest = TOPO_SYS;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports; p++)
            if (machine_is_data_nic(topo, i) && topo->nics[i].ports[p].active &&
                topo_gpu_nic_path(topo, gpu, i) < nearest &&
                (!names || names_it(names, topo->nics[i].name, topo->nics[i].ports[p].number)))
                nearest = topo_gpu_nic_path(topo, gpu, i);
    return nearest;
}

/* The number of GPUs of this process (or of its rank) whose NIC on the same switch or socket is not in the list. */
static int count_without(const struct doctor_machine *machine, const struct names *names, int *ret_first)
{
    int own = machine_own_gpu(machine), n = 0;

    for (int g = topo_usable_gpus(machine->topo) - 1; g >= 0; g--) {
        enum topo_path best = distance_to(machine->topo, g, NULL), named = distance_to(machine->topo, g, names);

        if ((own >= 0 && g != own) || named == best || named <= TOPO_PXB || (best > TOPO_PXB && named < TOPO_SYS))
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
        found_value(result, HCA);
        doctor_advise(result, "%s", advice);
        return;
    }
    doctor_evidence_env(result, HCA);
    doctor_fix(result, false, "export " HCA "=%s", shell_word(machine->source, row->value));
    doctor_advise(result, "%s", row->reason);
}

static void run_nccl_hca(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *value = source_env(machine->source, HCA);
    int n, n_named, n_far, left_out = -1, far = -1, n_gpus = machine_job_gpus(machine);
    struct names names;

    if (doctor_not_applicable_if(result, !value || !*value || !uses_ib(machine),
                                 value && *value ? "NCCL is told to use sockets" : HCA " is not set"))
        return;
    names = parse_names(value);
    n_named = count_named(machine->topo, &names, &n, &left_out);
    n_far = count_without(machine, &names, &far);
    if (n_named == 0) {
        doctor_found(result, DOCTOR_ERROR, HCA " matches no NIC for data: NCCL uses sockets");
        fix_hca(machine, result,
                "Entries are prefixes of names, separated by ','; '=' in front of the list makes them exact names, and "
                ":1 after one is its port. 'epkit topo' shows the NICs.");
    } else if (n_named < n && n_named < n_gpus) {
        doctor_found(result, DOCTOR_WARNING, HCA " leaves out %d of %d NICs for data, %s among them", n - n_named, n,
                     machine->topo->nics[left_out].name);
        fix_hca(machine, result,
                "By default, NCCL uses the nearest NIC of each GPU; without the list all of them are used.");
    } else if (n_far > 0) {
        doctor_found(result, DOCTOR_WARNING, HCA " leaves out the NICs that are nearest to %s%s",
                     machine_gpu_name(machine, far), n_far > 1 ? ", and to more GPUs" : "");
        fix_hca(machine, result,
                "The traffic of these GPUs crosses host bridges or sockets. Without the list NCCL takes the nearest "
                "NIC of each GPU.");
    }
}

const struct doctor_check check_nccl_hca = {
    DOCTOR_CHECK("nccl-hca", "nccl", 51, NEEDS_GPUS | NEEDS_DATA_NICS | NEEDS_ENVIRONMENT, run_nccl_hca),
    .title = "NCCL_IB_HCA matches the NICs of the GPUs",
    .symptom = "NCCL says \"No device found\" and uses sockets, or some NICs carry nothing.",
    .cause = "The list was written for names of another machine, or for fewer NICs.",
    .remedy = "Unset it, or write it for this machine.",
    .links = TEXTS(HCA),
};

/* --- socket-interface --- */

/* Variables that select the bootstrap interfaces of NCCL, Gloo and NVSHMEM. */
static const char *const interface_variables[] = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
                                                  "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", NULL};

static bool is_up(const struct doctor_machine *machine, const char *interface)
{
    struct source_text state = source_line(machine->source, "/sys/class/net/%s/operstate", interface);

    /* The loopback, and interfaces whose driver does not report the state, have the state "unknown". */
    return state.state != SOURCE_OK || strcmp(state.text, "down") != 0;
}

static void check_interfaces(const struct doctor_machine *machine, struct doctor_result *result, const char *name,
                             const struct source_names *interfaces)
{
    struct names names = parse_names(source_env(machine->source, name));
    const char *down = "";
    int n_up = 0, n_loopback = 0;

    for (size_t i = 0; i < interfaces->n; i++) {
        const char *interface = interfaces->names[i];

        if (strcmp(interface, "bonding_masters") == 0 || !names_it(&names, interface, -1))
            continue;
        if (!is_up(machine, interface))
            down = interface;
        else if (strcmp(interface, "lo") == 0)
            n_loopback++;
        else
            n_up++;
    }
    if (n_up > 0 || (n_loopback > 0 && !has_other_nodes(machine)))
        return;
    if (n_loopback > 0)
        doctor_found(result, DOCTOR_ERROR, "%s names the loopback, which other nodes cannot reach", name);
    else if (*down)
        doctor_found(result, DOCTOR_ERROR, "%s names %s, which is down", name, down);
    else
        doctor_found(result, DOCTOR_ERROR, "%s matches no interface of this machine", name);
    found_value(result, name);
    for (size_t i = 0; i < interfaces->n && i < 6; i++)
        if (strcmp(interfaces->names[i], "bonding_masters") != 0)
            doctor_evidence(result, "/sys/class/net", "%s", interfaces->names[i]);
    doctor_advise(result, "Without it, the interface of the default route is used in most cases.");
}

static void run_socket_interface(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names interfaces = source_list(machine->source, "/sys/class/net");
    bool any = false;

    for (int i = 0; interface_variables[i]; i++) {
        const char *value = source_env(machine->source, interface_variables[i]);

        if (!value || !*value)
            continue;
        any = true;
        if (doctor_unknown_if(result, interfaces.state != SOURCE_OK, "/sys/class/net: %s",
                              machine_reason(interfaces.state, interfaces.why)))
            return;
        check_interfaces(machine, result, interface_variables[i], &interfaces);
        if (result->outcome == DOCTOR_FOUND)
            return;
    }
    if (!any)
        doctor_not_applicable(result, "no variable names an interface");
}

const struct doctor_check check_socket_interface = {
    DOCTOR_CHECK("socket-interface", "nccl", 51, NEEDS_GPUS | NEEDS_ENVIRONMENT, run_socket_interface),
    .title = "variables name interfaces that exist and are up",
    .symptom = "\"Bootstrap: no socket interface found\", or the start of a job hangs.",
    .cause = "NCCL_SOCKET_IFNAME or a similar variable names an interface of another machine, one that is down, or the "
             "loopback.",
    .remedy = "Unset it, or name the interface that other nodes reach.",
    .links = TEXTS("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"),
};

/* --- nccl-disabled --- */

static bool has_nvlink(const struct topo *topo)
{
    int n = 0;

    for (int i = 0; i < topo->n_gpus; i++)
        n += topo->gpus[i].nvlinks_up > 0;
    return n > 1;
}

static void run_nccl_disabled(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *level = source_env(machine->source, "NCCL_P2P_LEVEL");
    bool no_p2p =
        is_on(machine, "NCCL_P2P_DISABLE") || (level && (strcasecmp(level, "LOC") == 0 || strcmp(level, "0") == 0));
    const char *no_ib = ib_switched_off_by(machine);
    struct doctor_result unused = {.machine = machine};

    if (no_p2p && has_nvlink(machine->topo)) {
        const char *name = is_on(machine, "NCCL_P2P_DISABLE") ? "NCCL_P2P_DISABLE" : "NCCL_P2P_LEVEL";

        doctor_found(result, DOCTOR_ERROR, "%s=%s prevents NCCL from using NVLink", name,
                     source_env(machine->source, name));
        found_value(result, name);
        doctor_advise(result, "It is for machines on which GPUs cannot reach each other over PCIe. Here they have "
                              "NVLink.");
    } else if (no_ib && machine_has_data_nics(machine, &unused) && machine->topo->n_gpus > 1) {
        doctor_found(result, has_other_nodes(machine) ? DOCTOR_ERROR : DOCTOR_WARNING,
                     "%s=%s sends everything between nodes over sockets", no_ib, source_env(machine->source, no_ib));
        found_value(result, no_ib);
        doctor_advise(result, "This machine has RDMA NICs for data.");
    } else if (!no_p2p && !no_ib) {
        doctor_not_applicable(result, "nothing is disabled");
    }
}

const struct doctor_check check_nccl_disabled = {
    DOCTOR_CHECK("nccl-disabled", "nccl", 51, NEEDS_GPUS | NEEDS_ENVIRONMENT, run_nccl_disabled),
    .title = "NCCL may use the NVLinks and NICs of the machine",
    .symptom = "Collectives run at a small part of what NVLink or the NICs carry.",
    .cause = "A variable that helps on other machines, or was used to debug a problem, is still set.",
    .remedy = "Unset it.",
    .links = TEXTS("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_NET"),
};

/* --- nccl-gdr --- */

#define GDR_LEVEL "NCCL_NET_GDR_LEVEL"

/* In NCCL's order: LOC, PIX, PXB, PHB, SYS; older versions used numbers. -1: not known. */
static int gdr_rank(const char *level)
{
    static const char *const names[] = {"LOC", "PIX", "PXB", "PHB", "NODE", "SYS"};

    if (isdigit((unsigned char)*level) && !level[1])
        return *level - '0';
    for (int i = 0; i < 6; i++)
        if (strcasecmp(level, names[i]) == 0)
            return i == 4 ? 3 : i;
    return -1;
}

static int path_rank(enum topo_path path)
{
    static const int ranks[] = {[TOPO_PIX] = 1, [TOPO_PXB] = 2, [TOPO_PHB] = 3, [TOPO_NODE] = 3, [TOPO_SYS] = 5};

    return path < TOPO_PIX ? 0 : ranks[path];
}

static void run_nccl_gdr(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *level = source_env(machine->source, GDR_LEVEL);
    const struct topo *topo = machine->topo;
    int limit, n_beyond = 0, first = -1, unknown = -1;

    if (doctor_not_applicable_if(result, !level || !*level || !uses_ib(machine) || machine_is_grace(machine->topo),
                                 "%s",
                                 level && *level ? "NCCL is told to use sockets, or the board has its own rule (Grace)"
                                                 : GDR_LEVEL " is not set"))
        return;
    limit = gdr_rank(level);
    for (int g = 0; g < machine->map->n && limit >= 0; g++) {
        const struct map_choice *choice = &machine->map->choices[g];

        if (choice->nic < 0 || path_rank(choice->path) <= limit)
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
    found_value(result, GDR_LEVEL);
    doctor_evidence(result, source_printf(machine->source, "GPU %d", first), "its NIC %s is %s away",
                    machine->topo->nics[machine->map->choices[first].nic].name,
                    topo_path_name(machine->map->choices[first].path));
    doctor_advise(result, "It is the largest distance at which NCCL lets a NIC read GPU memory. If the distance shown "
                          "is right for this machine, set the level to it.");
}

const struct doctor_check check_nccl_gdr = {
    DOCTOR_CHECK("nccl-gdr", "nccl", 51, NEEDS_GPUS | NEEDS_DATA_NICS | NEEDS_ENVIRONMENT, run_nccl_gdr),
    .title = "NCCL_NET_GDR_LEVEL reaches the NICs of the GPUs",
    .symptom = "Collectives between nodes use host memory and reach a part of the bandwidth; NCCL says \"GDR 0\".",
    .cause = "The level is lower than the distance between GPUs and NICs on this machine.",
    .remedy = "Unset it, or set it to the distance that 'epkit topo' shows.",
    .links = TEXTS(GDR_LEVEL),
};

/* --- traffic-class --- */

/* The common link layer of all data NICs; unknown if there are both. */
static enum topo_link_layer common_layer(const struct topo *topo)
{
    enum topo_link_layer layer = TOPO_LINK_UNKNOWN;

    for (int i = 0; i < topo->n_nics; i++) {
        for (int p = 0; p < topo->nics[i].n_ports; p++) {
            if (!machine_is_data_nic(topo, i) || !topo->nics[i].ports[p].active)
                continue;
            if (layer != TOPO_LINK_UNKNOWN && topo->nics[i].ports[p].link_layer != layer)
                return TOPO_LINK_UNKNOWN;
            layer = topo->nics[i].ports[p].link_layer;
        }
    }
    return layer;
}

/* A traffic class is a field of the IP header of RoCE packets; InfiniBand uses none except between subnets. */
static void run_traffic_class(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[][2] = {{"NCCL_IB_TC", "NCCL_IB_SL"}, {"NVSHMEM_IB_TRAFFIC_CLASS", "NVSHMEM_IB_SL"}};

    if (doctor_not_applicable_if(result, common_layer(machine->topo) != TOPO_LINK_INFINIBAND,
                                 "the NICs for data are not all InfiniBand"))
        return;
    for (size_t i = 0; i < 2; i++) {
        if (machine_job_number(machine, names[i][0], 0) <= 0 || (i == 0 && !uses_ib(machine)))
            continue;
        doctor_found(result, DOCTOR_WARNING, "%s=%s does nothing: the NICs are InfiniBand", names[i][0],
                     source_env(machine->source, names[i][0]));
        found_value(result, names[i][0]);
        doctor_advise(result, "On InfiniBand, the service level determines how switches handle traffic: %s.",
                      names[i][1]);
        return;
    }
}

const struct doctor_check check_traffic_class = {
    DOCTOR_CHECK("traffic-class", "nccl", 51, NEEDS_DATA_NICS | NEEDS_ENVIRONMENT, run_traffic_class),
    .title = "traffic classes are not set on InfiniBand",
    .symptom = "Traffic does not get the priority that was asked for, and is dropped or delayed by other traffic.",
    .cause = "The traffic class is for RoCE; InfiniBand has service levels.",
    .remedy = "Unset it, or set the service level.",
    .links = TEXTS("NCCL_IB_TC", "NCCL_IB_SL", "NVSHMEM_IB_TRAFFIC_CLASS", "NVSHMEM_IB_SL"),
};
