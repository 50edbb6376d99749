/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_interface.c - interfaces for connections over TCP: those that variables name, each by the rules of its
 * library, the one that the host name leads to, and those of rails that share a subnet.
 */
#include "checks.h"

#include <arpa/inet.h>
#include <stdio.h>

#define GLOO "GLOO_SOCKET_IFNAME"
#define NET "/sys/class/net"

/* --- shared --- */

static bool is_up(const struct doctor_machine *machine, const char *interface)
{
    struct source_text state = source_line(machine->source, NET "/%s/operstate", interface);

    /* The loopback, and interfaces whose driver does not report the state, have the state "unknown". */
    return state.state != SOURCE_OK || strcmp(state.text, "down") != 0;
}

/* The interface of the default route, by which other nodes are reached; "" if there is none. */
static const char *default_interface(const struct doctor_machine *machine, const struct source_names *interfaces)
{
    int at = FIRST_OF(i, interfaces->n, machine_carries_route(machine, interfaces->names[i], false));

    return at < 0 ? "" : interfaces->names[at];
}

/* The names that /etc/hosts gives to the loopback, unless an earlier line has them for another address. */
static json_t *read_loopback_names(struct source_text file)
{
    json_t *names = json_array(), *others = json_object();

    FOR_PIECES (line, file.text, "\n") {
        bool is_loopback = text_begins(line.text, "127.") || text_begins(line.text, "::1");
        const char *at = line.text, *end = line.text + line.n, *comment = memchr(line.text, '#', line.n);
        int n = 0; /* the first word is the address */

        while (at < (comment ? comment : end)) {
            struct piece word = text_take(&at, " \t\r\n#");
            char name[256];

            snprintf(name, sizeof(name), "%.*s", (int)word.n, word.text);
            if (!*name || n++ == 0 || json_object_get(others, name))
                continue;
            if (!is_loopback)
                json_object_set_new(others, name, json_true());
            else if (json_array_size(names) < 32)
                json_array_append_new(names, json_string(name));
        }
    }
    json_decref(others);
    return names;
}

READER(read_host_name, json_stringn(file.text, strcspn(file.text, " \t\r\n")))

/* Does the host name lead to the loopback? Gloo then tells other nodes an address that is theirs. */
static bool host_is_loopback(const struct doctor_machine *machine)
{
    const char *host =
        source_fact_text(source_fact(machine->source, "host-name", read_host_name, "/proc/sys/kernel/hostname"));
    const json_t *names = source_fact(machine->source, "loopback-names", read_loopback_names, "/etc/hosts").value;

    return *host && ANY_OF(i, json_array_size(names), strcmp(json_text_at(names, (size_t)i), host) == 0);
}

/* --- socket-interface --- */

enum syntax {
    SYNTAX_LIST, /* list_names_of() */
    SYNTAX_NAMES /* whole names, divided by ',': neither '^' nor '=' nor beginnings of names */
};

static const struct interface_variable {
    const char *name, *library;
    enum syntax syntax;
    bool uses_host_name; /* without the variable */
} interface_variables[] = {
    {"NCCL_SOCKET_IFNAME", "NCCL", SYNTAX_LIST, false},
    {GLOO, "Gloo", SYNTAX_NAMES, true},
    {"TP_SOCKET_IFNAME", "TensorPipe", SYNTAX_NAMES, true},
    {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM", SYNTAX_LIST, false},
    {"EPKIT_TCP_INTERFACE", "epkit", SYNTAX_LIST, false},
};

/* What is wrong with the value, a sentence without its subject; "" if nothing is. */
static const char *fault_of(const struct doctor_machine *machine, const struct list_names *names,
                            const struct source_names *interfaces)
{
    const char *down = "";
    int n_up = 0, n_loopback = 0;

    FOR_NAMES (interface, *interfaces) {
        if (strcmp(interface, "bonding_masters") == 0 || !list_names_it(names, interface, -1))
            continue;
        if (!is_up(machine, interface))
            down = interface;
        else if (strcmp(interface, "lo") == 0)
            n_loopback++;
        else
            n_up++;
    }
    if (n_up > 0 || (n_loopback > 0 && !machine_has_other_nodes(machine)))
        return "";
    if (n_loopback > 0)
        return "names the loopback, which other nodes cannot reach";
    return *down ? source_printf(machine->source, "names %s, which is down", down)
                 : "matches no interface of this machine";
}

/* Of a list of whole names, each entry has to be right. */
static const char *fault_of_names(const struct doctor_machine *machine, const struct interface_variable *variable,
                                  const char *value, const struct source_names *interfaces)
{
    struct list_names names = {.is_exact = true};
    const char *why = "";

    if (strchr("^=", *value))
        return source_printf(machine->source,
                             "begins with '%c', which %s takes for a part of the name: it knows whole names only",
                             *value, variable->library);
    while (!*why && (names.list = machine_next_word(machine, &value, ",")))
        why = fault_of(machine, &names, interfaces);
    return why;
}

/* A line of if_inet6 ends with the name of the interface. */
static json_t *read_ipv6_interfaces(struct source_text file)
{
    json_t *names = json_array();

    FOR_PIECES (line, file.text, "\n") {
        const char *name = memrchr(line.text, ' ', line.n);

        if (name && line.n - (size_t)(++name - line.text) > 0 && json_array_size(names) < 64)
            json_array_append_new(names, json_stringn(name, line.n - (size_t)(name - line.text)));
    }
    return names;
}

/* AF_INET6 where no interface that the other variable names has such an address. */
static bool find_family(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[][2] = {{"NCCL_SOCKET_FAMILY", "NCCL_SOCKET_IFNAME"},
                                           {"NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"}};
    struct source_answer ipv6 =
        source_fact(machine->source, "ipv6-interfaces", read_ipv6_interfaces, "/proc/net/if_inet6");

    for (size_t i = 0; i < COUNT(names); i++) {
        struct list_names list = list_names_of(machine_nccl_value(machine, names[i][1], NULL));
        const char *value = machine_nccl_value(machine, names[i][0], NULL);

        list.is_exclusion = list.is_exclusion || !*list.list;
        if (ipv6.state != SOURCE_OK || strcmp(value, "AF_INET6") != 0 ||
            ANY_OF(k, json_array_size(ipv6.value),
                   strcmp(json_text_at(ipv6.value, (size_t)k), "lo") != 0 &&
                       list_names_it(&list, json_text_at(ipv6.value, (size_t)k), -1)))
            continue;
        doctor_found_first(result, DOCTOR_ERROR, "%s asks for IPv6, and no interface for it has an address",
                           names[i][0]);
        doctor_found_value(result, names[i][0]);
        doctor_advise(result, "Without it, addresses of both families are taken.");
    }
    return result->outcome == DOCTOR_FOUND;
}

void run_socket_interface(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source *source = machine->source;
    struct source_names interfaces = source_list(source, NET);
    const char *interface = default_interface(machine, &interfaces), *export = "";
    unsigned char address[sizeof(struct in6_addr)];
    bool any = false;

    FOR_EACH (variable, interface_variables, COUNT(interface_variables)) {
        const char *file, *why, *value = machine_nccl_value(machine, variable->name, &file);
        struct list_names names = list_names_of(value);

        /* libepkit takes an address as well. Which interface has it, /sys does not say. */
        if (!*value || inet_pton(AF_INET, value, address) == 1 || inet_pton(AF_INET6, value, address) == 1)
            continue;
        any = true;
        if (doctor_unreadable_if(result, interfaces.state != SOURCE_OK, NET, interfaces.state, interfaces.why))
            return;
        why = variable->syntax == SYNTAX_LIST ? fault_of(machine, &names, &interfaces)
                                              : fault_of_names(machine, variable, value, &interfaces);
        if (!*why)
            continue;
        doctor_found_first(result, DOCTOR_ERROR, "%s %s", variable->name, why);
        doctor_evidence(result, variable->name, *file ? "%s: it %s, from %s" : "%s: it %s%s", value, why, file);
        if (!*file && variable->uses_host_name && host_is_loopback(machine) && *interface)
            export = source_printf(source, "%s\nexport %s=%s", export, variable->name, shell_word(source, interface));
        else
            doctor_unset_value(result, variable->name);
    }
    if (result->outcome != DOCTOR_FOUND && !find_family(machine, result))
        doctor_not_applicable_if(result, !any, "no variable names an interface");
    if (result->outcome != DOCTOR_FOUND || *result->advice)
        return;
    for (size_t i = 0; i < interfaces.n && i < 6; i++)
        if (strcmp(interfaces.names[i], "bonding_masters") != 0)
            doctor_evidence(result, NET, "%s", interfaces.names[i]);
    if (*export)
        doctor_fix(result, false, "%s%s", result->fix, export + !*result->fix);
    doctor_advise(
        result, "%s%s",
        *export ? "Without " GLOO ", Gloo takes the address of the host name, which /etc/hosts gives to "
                  "the loopback here."
                : "Without it, the interface of the default route is used in most cases.",
        strstr(result->fix, "sudoedit")
            ? " NCCL reads the file as if its lines were in the environment, which precedes it: take the line out, or "
              "correct it."
            : "");
}

/* --- host-name --- */

void run_host_name(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names interfaces = source_list(machine->source, NET);
    const char *interface = default_interface(machine, &interfaces), *gloo = source_env(machine->source, GLOO);

    if (doctor_not_applicable_if(result, !machine_has_other_nodes(machine), "the job has no other nodes") ||
        doctor_not_applicable_if(result, gloo && *gloo, GLOO " is set") || !host_is_loopback(machine))
        return;
    doctor_found(result, DOCTOR_WARNING, "the name of this host leads to the loopback, which other nodes cannot reach");
    doctor_evidence(result, "/etc/hosts", "the host name has an address of 127.0.0.0/8 or ::1");
    if (*interface)
        doctor_fix(result, false, "export " GLOO "=%s", shell_word(machine->source, interface));
    doctor_advise_remedy(result);
}

/* --- rails-subnet --- */

/* Interfaces that have a route to the same network without a gateway, in groups of two or more: [["a", "b"]]. */
static json_t *group_routes(const char *text, bool by_metric)
{
    json_t *by_network = json_object(), *groups = json_array();

    FOR_PIECES (line, text, "\n") {
        char copy[256], interface[32], destination[16], gateway[16], metric[16], mask[16], key[60];

        snprintf(copy, sizeof(copy), "%.*s", (int)(line.n < 255 ? line.n : 255), line.text);
        if (sscanf(copy, "%31s %15s %15s %*s %*s %*s %15s %15s", interface, destination, gateway, metric, mask) != 5 ||
            strcmp(gateway, "00000000") != 0 || strcmp(mask, "00000000") == 0 || strcmp(mask, "FFFFFFFF") == 0)
            continue;
        snprintf(key, sizeof(key), "%s/%s %s", destination, mask, by_metric ? metric : "");
        if (!json_object_get(by_network, key))
            json_object_set_new(by_network, key, json_array());
        json_array_append_new(json_object_get(by_network, key), json_string(interface));
    }
    FOR_MEMBERS (network, group, by_network)
        if (json_array_size(group) > 1)
            json_array_append(groups, group);
    json_decref(by_network);
    return groups;
}

READER(read_shared_subnets, group_routes(file.text, false))

/* Of equal metric, so that the order in which the interfaces came up decides. */
READER(read_equal_routes, group_routes(file.text, true))

/* Does the kernel answer ARP requests for its addresses on others? Whoever prevents that has routing rules, too. */
static bool answers_for_others(struct source *source, const char *interface, bool is_rail)
{
    static const char *const names[] = {"arp_ignore", "arp_filter"};

    for (size_t i = 0; i < COUNT(names); i++) {
        int64_t all = 0, own = 0;

        /* The larger of the two counts (Linux, ip-sysctl). */
        if (source_number(source, &own, "/proc/sys/net/ipv4/conf/%s/%s", interface, names[i]) != SOURCE_OK && i == 0 &&
            is_rail)
            return false;
        source_number(source, &all, "/proc/sys/net/ipv4/conf/all/%s", names[i]);
        if (own > 0 || all > 0)
            return false;
    }
    return true;
}

static bool is_rail(const struct doctor_machine *machine, const char *interface)
{
    struct machine_port ports[MACHINE_PORTS_MAX];
    int n = machine_ports(machine, false, TOPO_LINK_ETHERNET, ports);

    return ANY_OF(i, n, strcmp(machine->topo->nics[ports[i].nic].ports[ports[i].port].netdev, interface) == 0);
}

/* Its card; -1: not on the bus. */
static int pci_of(const struct doctor_machine *machine, const char *interface)
{
    struct source_text device = source_resolve(machine->source, NET "/%s/device", interface);

    return device.state == SOURCE_OK ? topo_find_pci(machine->topo, text_base(device.text)) : -1;
}

/* Is it on the card of a rail: IPoIB, which only starts connections, or another port? */
static bool is_of_data_nic(const struct doctor_machine *machine, const char *interface)
{
    const struct topo *topo = machine->topo;
    int pci = pci_of(machine, interface);

    return pci >= 0 &&
           ANY_OF(i, topo->n_nics, machine_is_data_nic(topo, i) && topo_is_same_card(topo, topo->nics[i].pci, pci));
}

/* Of a group, the interfaces that the kernel answers for on any other: the rails, or the others that are up. */
static int count_mixed(const struct doctor_machine *machine, const json_t *group, bool of_rails, const char **ret_names)
{
    const char *names = "";
    int n = 0;

    FOR_JSON (name, group) {
        const char *interface = json_string_value(name);

        if (!interface || is_rail(machine, interface) != of_rails || !is_up(machine, interface) ||
            (!of_rails && is_of_data_nic(machine, interface)) ||
            !answers_for_others(machine->source, interface, of_rails))
            continue;
        names = source_printf(machine->source, "%s%s%s", names, n ? ", " : "", interface);
        n++;
    }
    *ret_names = n > 1 ? names : *ret_names;
    return n;
}

#define RT_TABLES "/etc/iproute2/rt_tables"

/* Does the site have routing tables of its own, "100 rail0", which only rules lead to? */
static json_t *read_own_tables(struct source_text file)
{
    long number = 0;

    while (*file.text && !(number > 0 && number < 253))
        number = strtol(text_take(&file.text, "\n").text, NULL, 10);
    return json_boolean(number > 0 && number < 253);
}

void run_rails_subnet(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_answer subnets =
        source_fact(machine->source, "shared-subnets", read_shared_subnets, "/proc/net/route");
    struct source_answer equal = source_fact(machine->source, "equal-routes", read_equal_routes, "/proc/net/route");
    const char *rails = "", *others = "";
    int n_rails = 0;

    FOR_JSON (group, subnets.value) {
        int n = count_mixed(machine, group, true, &rails);

        n_rails = n > n_rails ? n : n_rails;
    }
    FOR_JSON (group, equal.value)
        count_mixed(machine, group, false, &others);
    if (*rails) {
        doctor_found(result, DOCTOR_WARNING,
                     "%d RoCE interfaces are in one subnet, and the kernel answers for each of them on any other",
                     n_rails);
        doctor_evidence(result, "arp_ignore 0", "%s", rails);
        doctor_fix(result, false,
                   "sudo sysctl -w net.ipv4.conf.all.arp_ignore=1\n"
                   "sudo sysctl -w net.ipv4.conf.all.arp_announce=2");
        doctor_advise(
            result,
            "Other nodes learn the MAC address of a wrong NIC. Write the settings to /etc/sysctl.d as well, with a routing rule for each address; or give each rail a subnet of its own.");
    } else if (*others && !source_fact_bool(source_fact(machine->source, "own-tables", read_own_tables, RT_TABLES)) &&
               (machine_has_other_nodes(machine) || *machine_nccl_value(machine, "NCCL_SOCKET_IFNAME", NULL))) {
        doctor_found(result, DOCTOR_WARNING,
                     "two routes lead to one network, so connections leave by another interface than the named one: %s",
                     others);
        doctor_evidence(result, "/proc/net/route", "%s", others);
        doctor_advise(
            result,
            "Of routes with equal metrics the kernel takes the first, which differs from node to node. Give the interfaces different networks, one of them a larger metric on all nodes, or a routing rule for each address.");
    }
}

/* --- fastrak-interfaces --- */

/* Does a GPU share a PCIe switch with the interface? */
static bool is_near_gpu(const struct doctor_machine *machine, const char *interface)
{
    const struct topo *topo = machine->topo;
    int pci = pci_of(machine, interface);

    return pci >= 0 && ANY_OF(g, topo->n_gpus, topo_path(topo, topo->gpus[g].pci, pci) <= TOPO_PXB);
}

/* Variables of Google's plugins for NCCL over TCP: interfaces by whole names, one for each GPU or pair of GPUs. */
void run_fastrak_interfaces(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[] = {"NCCL_FASTRAK_IFNAME", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"};
    static const char *const others[] = {"NCCL_FASTRAK_CTRL_DEV", "NCCL_SOCKET_IFNAME"};
    const char *value = "", *name = names[0], *near = "", *missing = "", *far = "", *uplink = "", *fix;
    struct list_names list = {.is_exact = true};

    for (size_t i = 0; i < COUNT(names) && !*value; i++)
        value = machine_nccl_value(machine, name = names[i], NULL);
    if (doctor_not_applicable_if(result, !*value, "no variable names interfaces for GPUDirect over TCP"))
        return;
    list.list = value;
    FOR_NAMES (interface, source_list(machine->source, NET)) {
        bool is_named = list_names_it(&list, interface, -1);

        if (is_near_gpu(machine, interface)) {
            near = source_printf(machine->source, "%s%s%s", near, *near ? "," : "", interface);
            missing = is_named || *missing ? missing : interface;
        } else {
            far = is_named && !*far ? interface : far;
            uplink = *uplink || pci_of(machine, interface) < 0 ? uplink : interface;
        }
    }
    if (doctor_not_applicable_if(result, !*near, "no interface shares a switch with a GPU") || !*missing)
        return;
    doctor_found(result, DOCTOR_ERROR, "%s leaves out %s, which shares a switch with a GPU%s%s", name, missing,
                 *far ? ", and names one that shares none: " : "", far);
    doctor_evidence(result, name, "%s", value);
    fix = source_printf(machine->source, "export %s=%s", name, shell_word(machine->source, near));
    for (size_t i = 0; i < COUNT(others) && *uplink; i++) {
        value = machine_env(machine, others[i]);
        if (!*value || !is_near_gpu(machine, value))
            continue;
        doctor_evidence(result, others[i], "%s, which is a GPU's", value);
        fix = source_printf(machine->source, "%s\nexport %s=%s", fix, others[i], shell_word(machine->source, uplink));
    }
    doctor_fix(result, false, "%s", fix);
    doctor_advise(
        result,
        "One network more than the machine type has moves the names of all interfaces that follow. In Kubernetes, the annotation networking.gke.io/interfaces of the pod decides.");
}
