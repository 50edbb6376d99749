/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_traffic.c - compares ports with each other: link errors, packet loss, MTU. Counters count since the driver was
 * loaded, so equal values on all rails are not a fault of one of them.
 */
#include "checks.h"
#include "kernel_log.h"
#include "machine/hardware/counters.h"

#include <stdio.h>

/* --- shared --- */

/* A counter of a port or of its interface, by its name in counters.c; 0 if it does not exist. */
static int64_t rail_counter(const struct doctor_machine *machine, const struct machine_port *rail, const char *file)
{
    const struct topo_nic *nic = &machine->topo->nics[rail->nic];
    const struct topo_port *port = &nic->ports[rail->port];
    struct counter_device device = {.rdma = true, .nic = nic->name, .port = port->number, .netdev = port->netdev};
    char path[COUNTER_PATH_BYTES];
    int64_t value;

    return *counter_path(&device, file, path) && source_number(machine->source, &value, "%s", path) == SOURCE_OK ? value
                                                                                                                 : 0;
}

static const char *rail_name(const struct doctor_machine *machine, const struct machine_port *rail)
{
    return machine_port_name(machine, rail->nic, rail->port);
}

/* --- link-errors --- */

#define HEALTH "health compromised"
#define FLAPS_MANY 10 /* in one log: the restart of a switch is one or two */

/*
 * "Link down", "Link is Down" or "Port: 1 Link DOWN" after a name and ':', and of mlx5_core "0000:18:00.0: poll_health:
 * 835:(pid 0): device's health compromised": [{"interface": "ens1np0", "n": 12}].
 */
static json_t *read_flaps(struct source_text file)
{
    json_t *all = json_object(), *flaps = json_array();

    FOR_PIECES (line, file.text, "\n") {
        char copy[512], last[64] = "", *end, *rest = copy, *word;

        snprintf(copy, sizeof(copy), "%.*s", (int)(line.n < 511 ? line.n : 511), line.text);
        end = strcasestr(copy, "link down");
        end = end ? end : strcasestr(copy, "link is down");
        end = end ? end : strstr(copy, HEALTH);
        if (!end)
            continue;
        *end = '\0';
        while ((word = strsep(&rest, " \t")))
            if (text_ends(word, ":") && !text_ends(word, "):") && strcmp(word, "Port:") != 0)
                snprintf(last, sizeof(last), "%.*s", (int)strlen(word) - 1, word);
        if (*last)
            json_object_set_new(all, last, json_integer(json_integer_value(json_object_get(all, last)) + 1));
    }
    FOR_MEMBERS (name, n, all)
        json_array_append_new(flaps, json_pack("{s:s, s:O}", "interface", name, "n", n));
    json_decref(all);
    return flaps;
}

/* A link that goes down again and again, also where all do: there is no other to compare it with. */
static void find_flaps(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const needles[] = {HEALTH, "Link down", "Link is Down", "Link DOWN"};
    const char *where;

    for (size_t k = 0; k < COUNT(needles) && result->outcome != DOCTOR_FOUND; k++) {
        struct source_answer flaps = kernel_log_fact(machine->source, needles[k], read_flaps, needles[k], &where);

        FOR_JSON (row, flaps.value) {
            long n = (long)json_integer_value(json_object_get(row, "n"));

            if (n < FLAPS_MANY && k > 0)
                continue;
            doctor_found_first(result, DOCTOR_WARNING,
                               k > 0 ? "the link of %s goes down again and again: %ld times"
                                     : "the firmware of the NIC %s has stopped answering its driver",
                               json_text(row, "interface"), n);
            doctor_evidence(result, where, k > 0 ? "%s: link down, %ld times" : "%s: " HEALTH ", %ld times",
                            json_text(row, "interface"), n);
        }
        if (k == 0 && result->outcome == DOCTOR_FOUND)
            doctor_advise(result, "Jobs that use it end with an error. Update its firmware and cool it; if it comes "
                                  "back after a power cycle of the node, replace the NIC.");
    }
    if (result->outcome == DOCTOR_FOUND && !*result->advice)
        doctor_advise(result, "Check cable, transceiver and switch port (mlxlink -m -c on NVIDIA's NICs); if all links "
                              "of the node do so, the switch, or what restarts the driver.");
}

void run_link_errors(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct machine_port rails[MACHINE_PORTS_MAX];
    const struct counter_limit *limits;
    int n = machine_ports(machine, true, TOPO_LINK_UNKNOWN, rails), first = -1;
    size_t n_limits;

    limits = counter_limits(&n_limits);
    for (size_t k = 0; k < n_limits; k++) {
        for (int i = 0; i < n; i++)
            rails[i].value = rail_counter(machine, &rails[i], limits[k].file);
        for (int i = 0; i < n; i++) {
            const char *name = rail_name(machine, &rails[i]);
            int64_t value = rails[i].value, others[MACHINE_PORTS_MAX];
            size_t n_others = 0;
            char text[128];

            for (int other = 0; other < n; other++)
                if (other != i)
                    others[n_others++] = rails[other].value;
            if (!counter_is_outlier(&limits[k], value, counter_median(others, n_others)))
                continue;
            counter_limit_text(&limits[k], value, text, sizeof(text));
            if (first < 0)
                doctor_found(result, DOCTOR_WARNING, "%s has a bad link: %s", name, text);
            first = first < 0 ? i : first;
            doctor_evidence(result, source_printf(machine->source, "%s %s", name, limits[k].file), "%lld",
                            (long long)value);
        }
    }
    if (first < 0)
        find_flaps(machine, result);
    else
        doctor_advise(
            result,
            "Check whether the counters still increase (epkit nics), then cable, transceiver and switch port (mlxlink -d %s -m -c): clean or replace them.",
            shell_word(machine->source, machine->topo->nics[rails[first].nic].name));
}

/* --- roce-loss --- */

/* Lost packets of a port, out of all that it sent or received. */
struct loss {
    bool is_of_received;
    int64_t lost, all;
    double ratio;
};

static struct loss loss_of(const struct doctor_machine *machine, const struct machine_port *rail)
{
    int64_t overtaken = rail_counter(machine, rail, COUNTER_OUT_OF_ORDER),
            again = rail_counter(machine, rail, COUNTER_DUPLICATE);
    struct loss sent = {.lost =
                            rail_counter(machine, rail, COUNTER_LOST) + rail_counter(machine, rail, COUNTER_TIMED_OUT),
                        .all = rail_counter(machine, rail, "port_xmit_packets")};
    struct loss received = {.is_of_received = true,
                            .lost = again < overtaken ? again : overtaken,
                            .all = rail_counter(machine, rail, "port_rcv_packets")};

    sent.ratio = sent.all > 0 ? (double)sent.lost / (double)sent.all : 0;
    received.ratio = received.all > 0 ? (double)received.lost / (double)received.all : 0;
    return received.ratio > sent.ratio ? received : sent;
}

void run_roce_loss(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct machine_port rails[MACHINE_PORTS_MAX];
    static const char *const notices[] = {"hw_counters/np_cnp_sent", "hw_counters/rp_cnp_handled",
                                          "hw_counters/np_ecn_marked_roce_packets"};
    int n = machine_ports(machine, true, TOPO_LINK_ETHERNET, rails), n_lossy = 0;
    bool has_notices = false;
    double worst = 0;

    if (doctor_not_applicable_if(result, n == 0, "no RoCE port is active"))
        return;
    for (int i = 0; i < n; i++) {
        struct loss loss = loss_of(machine, &rails[i]);

        if (loss.lost < COUNTER_LOST_LEAST || loss.ratio < COUNTER_LOST_RATIO)
            continue;
        has_notices = has_notices || ANY_OF(k, COUNT(notices), rail_counter(machine, &rails[i], notices[k]) > 0);
        doctor_evidence(result, rail_name(machine, &rails[i]),
                        "%lld of %lld packets %s; out_of_sequence %lld, local_ack_timeout_err %lld",
                        (long long)loss.lost, (long long)loss.all,
                        loss.is_of_received ? "came again after one was missed" : "were asked for again",
                        (long long)rail_counter(machine, &rails[i], COUNTER_OUT_OF_ORDER),
                        (long long)rail_counter(machine, &rails[i], COUNTER_TIMED_OUT));
        if (n_lossy++ == 0 || loss.ratio > worst * 1.1) {
            worst = loss.ratio;
            doctor_found(result, worst >= COUNTER_LOST_RATIO_SEVERE ? DOCTOR_ERROR : DOCTOR_WARNING,
                         "the network loses packets %s %s: one in %.0f", loss.is_of_received ? "to" : "of",
                         rail_name(machine, &rails[i]), 1 / worst);
        }
    }
    if (n_lossy)
        doctor_advise(
            result,
            "%s The traffic class of the job (NVSHMEM_IB_TRAFFIC_CLASS, NCCL_IB_TC) has to be one for which the "
            "switches do that. %s",
            has_notices
                ? "Congestion notifications are received, so ECN works, but too late or without effect: check the "
                  "thresholds of ECN, and flow control (PFC) for the priority."
                : "Neither an ECN mark nor a congestion notification was ever received: configure ECN (DCQCN) or flow control (PFC) for this priority, on NICs (mlnx_qos -i <interface>) and switches alike.",
            n_lossy == 1 && n > 1 ? "Only one rail is affected: its switch or cable may be at fault." : "");
}

/* --- mtu --- */

/*
 * The RDMA MTU of an interface: the largest power of two from 256 to 4096 that fits with the headers (iboe_get_mtu() of
 * Linux, include/rdma/ib_addr.h: GRH, UDP, BTH, XRC and atomic headers, ICRC: 96 bytes).
 */
static int rdma_mtu(int64_t mtu)
{
    for (int size = 4096; size >= 256; size /= 2)
        if (mtu - 96 >= size)
            return size;
    return 0;
}

/* The members of a bond, in one line; "" if it is none. */
static const char *members_of(const struct doctor_machine *machine, const char *bond)
{
    return source_line(machine->source, "/sys/class/net/%s/bonding/slaves", bond).text;
}

/* A member of a bond may have been set to a smaller MTU than the bond; it then drops larger packets. */
static void compare_members(const struct doctor_machine *machine, struct doctor_result *result,
                            const struct machine_port *rail)
{
    const char *bond = machine->topo->nics[rail->nic].ports[rail->port].netdev,
               *members = *bond ? members_of(machine, bond) : "", *member;

    while ((member = machine_next_word(machine, &members, " "))) {
        int64_t mtu;

        if (source_number(machine->source, &mtu, "/sys/class/net/%s/mtu", member) != SOURCE_OK || mtu >= rail->value)
            continue;
        doctor_found(result, DOCTOR_ERROR,
                     "%s, a member of %s, has an MTU of %lld, and the bond one of %lld: larger packets are lost on it",
                     member, bond, (long long)mtu, (long long)rail->value);
        doctor_evidence(result, source_printf(machine->source, "/sys/class/net/%s/mtu", member), "%lld",
                        (long long)mtu);
        doctor_advise(result,
                      "ip link set dev %s mtu %lld gives it the MTU of the bond; its link goes down for a moment. Set "
                      "it in the network's configuration as well, so that it persists.",
                      shell_word(machine->source, member), (long long)rail->value);
        return;
    }
}

void run_mtu(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct machine_port rails[MACHINE_PORTS_MAX];
    int n = machine_ports(machine, true, TOPO_LINK_ETHERNET, rails), largest = 0, n_known = 0;

    for (int i = 0; i < n; i++) {
        const char *netdev = machine->topo->nics[rails[i].nic].ports[rails[i].port].netdev;

        rails[i].value = 0;
        if (*netdev && source_number(machine->source, &rails[i].value, "/sys/class/net/%s/mtu", netdev) != SOURCE_OK)
            rails[i].value = 0;
        n_known += rails[i].value > 0;
        if (rdma_mtu(rails[i].value) > largest)
            largest = rdma_mtu(rails[i].value);
    }
    for (int i = 0; i < n && result->outcome != DOCTOR_FOUND; i++)
        compare_members(machine, result, &rails[i]);
    if (result->outcome == DOCTOR_FOUND ||
        doctor_not_applicable_if(result, n_known < 2, "fewer than two RoCE ports whose MTU is known"))
        return;
    for (int i = 0; i < n; i++) {
        const char *netdev = machine->topo->nics[rails[i].nic].ports[rails[i].port].netdev;

        if (rails[i].value <= 0 || rdma_mtu(rails[i].value) == largest)
            continue;
        if (result->outcome != DOCTOR_FOUND) {
            doctor_found(result, DOCTOR_WARNING, "%s sends packets of %d bytes, other rails of %d: its MTU is %lld",
                         rail_name(machine, &rails[i]), rdma_mtu(rails[i].value), largest, (long long)rails[i].value);
            doctor_advise(result,
                          "Give all rails one MTU, of 4200 at least, where the switches allow it: ip link set %s mtu "
                          "<MTU of the others>, and the same in the network's configuration, so that it persists. The "
                          "link goes down for a moment.",
                          shell_word(machine->source, netdev));
        }
        doctor_evidence(result, source_printf(machine->source, "/sys/class/net/%s/mtu", netdev), "%lld",
                        (long long)rails[i].value);
    }
}

/* --- bond --- */

#define BONDS "/sys/class/net/bonding_masters"

/* Does RDMA run over this interface? */
static bool carries_rdma(const struct topo *topo, const char *name)
{
    return ANY_OF(i, topo->n_nics, ANY_OF(p, topo->nics[i].n_ports, strcmp(topo->nics[i].ports[p].netdev, name) == 0));
}

/* Does RDMA or the default route use this interface? Other bonds are not checked. */
static bool bond_matters(const struct doctor_machine *machine, const char *name)
{
    return carries_rdma(machine->topo, name) || machine_carries_route(machine, name, false);
}

/* A bond without link monitoring (miimon 0) reports each of its members as up. */
static bool has_lost_carrier(const struct doctor_machine *machine, const char *name)
{
    struct source_text carrier = source_line(machine->source, "/sys/class/net/%s/carrier", name);

    return carrier.state == SOURCE_OK && strcmp(carrier.text, "0") == 0;
}

/* The number of members of more than half of the RDMA bonds, if there are at least three bonds; otherwise 0. */
static int usual_members(const struct doctor_machine *machine, const char *bonds)
{
    int n_with[17] = {0}, n_bonds = 0;
    const char *bond;

    while ((bond = machine_next_word(machine, &bonds, " "))) {
        const char *slaves = members_of(machine, bond);
        int n = 0;

        if (!carries_rdma(machine->topo, bond))
            continue;
        while (machine_next_word(machine, &slaves, " "))
            n++;
        n_with[n < 16 ? n : 16]++;
        n_bonds++;
    }
    for (int n = 0; n < 17 && n_bonds >= 3; n++)
        if (n_with[n] * 2 > n_bonds)
            return n;
    return 0;
}

static void check_one_bond(const struct doctor_machine *machine, struct doctor_result *result, const char *bond,
                           int n_usual)
{
    const char *slaves = members_of(machine, bond);
    bool is_wanted = bond_matters(machine, bond);
    int n = 0, n_dead = 0;
    const char *dead[16], *name;

    while ((name = machine_next_word(machine, &slaves, " "))) {
        struct source_text state = source_line(machine->source, "/sys/class/net/%s/bonding_slave/mii_status", name);

        n++;
        is_wanted = is_wanted || bond_matters(machine, name);
        if (state.state == SOURCE_OK && (strcmp(state.text, "up") != 0 || has_lost_carrier(machine, name)) &&
            n_dead < 16)
            dead[n_dead++] = name;
    }
    if (carries_rdma(machine->topo, bond) && n_dead == 0 && n < n_usual) {
        if (result->outcome != DOCTOR_FOUND) {
            doctor_found(result, DOCTOR_WARNING, "%s has %d member%s, most other bonds have %d", bond, n,
                         n == 1 ? "" : "s", n_usual);
            doctor_advise(
                result,
                "A port has left the bond, or never joined it: look for the interface without a master (ip link), and whether the card shows all of its ports.");
        }
        doctor_evidence(result, source_printf(machine->source, "/sys/class/net/%s/bonding/slaves", bond), "%s",
                        members_of(machine, bond));
    }
    if (!is_wanted || n_dead == 0)
        return;
    if (result->outcome != DOCTOR_FOUND) {
        doctor_found(result, n_dead == n ? DOCTOR_ERROR : DOCTOR_WARNING, "%d of %d members of %s are down: %s", n_dead,
                     n, bond, dead[0]);
        doctor_advise(result,
                      "Check cable, transceiver and switch port of %s, and the configuration of the switch (LACP): "
                      "until it is back, the bond has less bandwidth and less redundancy.",
                      dead[0]);
    }
    for (int i = 0; i < n_dead; i++)
        doctor_evidence(result, source_printf(machine->source, "%s, a member of %s", dead[i], bond), "%s%s",
                        source_line(machine->source, "/sys/class/net/%s/bonding_slave/mii_status", dead[i]).text,
                        has_lost_carrier(machine, dead[i]) ? ", no carrier" : "");
}

void run_bond(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text bonds = source_line(machine->source, BONDS);
    int n_usual = bonds.state == SOURCE_OK ? usual_members(machine, bonds.text) : 0;
    const char *bond;

    if (doctor_not_applicable_if(result, bonds.state != SOURCE_OK || !*bonds.text, "there is no bond"))
        return;
    while ((bond = machine_next_word(machine, &bonds.text, " ")))
        check_one_bond(machine, result, bond, n_usual);
}
