/* SPDX-License-Identifier: Apache-2.0 */
/* checks_bond.c - bonds: members that are down, and bonds with fewer members than the others. */
#include "checks.h"
#include "queries.h"

#include <string.h>

#define BONDS "/sys/class/net/bonding_masters"

/* Does RDMA run over this interface? */
static bool carries_rdma(const struct topo *topo, const char *name)
{
    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports; p++)
            if (strcmp(topo->nics[i].ports[p].netdev, name) == 0)
                return true;
    return false;
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

static void found_too_few(const struct doctor_machine *machine, struct doctor_result *result, const char *bond, int n,
                          int n_usual)
{
    if (result->outcome != DOCTOR_FOUND) {
        doctor_found(result, DOCTOR_WARNING, "%s has %d member%s, most other bonds have %d", bond, n, n == 1 ? "" : "s",
                     n_usual);
        doctor_advise(
            result,
            "A port has left the bond, or never joined it: look for the interface without a master (ip link), and whether the card shows all of its ports.");
    }
    doctor_evidence(result, source_printf(machine->source, "/sys/class/net/%s/bonding/slaves", bond), "%s",
                    source_line(machine->source, "/sys/class/net/%s/bonding/slaves", bond).text);
}

/* The number of members of more than half of the RDMA bonds, if there are at least three bonds; otherwise 0. */
static int usual_members(const struct doctor_machine *machine, const char *bonds)
{
    int n_with[17] = {0}, n_bonds = 0;
    const char *bond;

    while ((bond = machine_next_word(machine, &bonds))) {
        const char *slaves = source_line(machine->source, "/sys/class/net/%s/bonding/slaves", bond).text;
        int n = 0;

        if (!carries_rdma(machine->topo, bond))
            continue;
        while (machine_next_word(machine, &slaves))
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
    const char *slaves = source_line(machine->source, "/sys/class/net/%s/bonding/slaves", bond).text;
    bool is_wanted = bond_matters(machine, bond);
    int n = 0, n_dead = 0;
    const char *dead[16], *name;

    while ((name = machine_next_word(machine, &slaves))) {
        struct source_text state = source_line(machine->source, "/sys/class/net/%s/bonding_slave/mii_status", name);

        n++;
        is_wanted = is_wanted || bond_matters(machine, name);
        if (state.state == SOURCE_OK && (strcmp(state.text, "up") != 0 || has_lost_carrier(machine, name)) &&
            n_dead < 16)
            dead[n_dead++] = name;
    }
    if (carries_rdma(machine->topo, bond) && n_dead == 0 && n < n_usual)
        found_too_few(machine, result, bond, n, n_usual);
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
    while ((bond = machine_next_word(machine, &bonds.text)))
        check_one_bond(machine, result, bond, n_usual);
}
