/* SPDX-License-Identifier: Apache-2.0 */
/* checks_nic.c - compares NICs with each other: links, access, firmware, the path to the processor. */
#include "checks.h"

/* --- slow-link --- */

static double nic_rate(const struct topo_nic *nic)
{
    double sum = 0;

    for (int p = 0; p < nic->n_ports; p++)
        if (nic->ports[p].active)
            sum += nic->ports[p].rate_gbps;
    return sum;
}

/* Data NICs, and NICs of the same model, as near to a GPU, so slow that they look like management NICs. */
static bool is_compared(const struct topo *topo, int nic)
{
    const struct topo_nic *self = &topo->nics[nic];

    if (machine_is_data_nic(topo, nic))
        return true;
    return self->role == TOPO_ROLE_MANAGEMENT && self->pci >= 0 && machine_gpu_distance(topo, nic) <= TOPO_PXB &&
           ANY_OF(i, topo->n_nics,
                  machine_is_data_nic(topo, i) && strcmp(topo->nics[i].hca, self->hca) == 0 &&
                      machine_gpu_distance(topo, i) <= TOPO_PXB);
}

/* The same model, and equally near to a GPU: a storage NIC may have another speed than rails. */
static bool are_siblings(const struct topo *topo, int a, int b)
{
    enum topo_path distance_a = machine_gpu_distance(topo, a), distance_b = machine_gpu_distance(topo, b);

    return topo_is_same_model(topo, a, b) &&
           (distance_a == distance_b || (distance_a <= TOPO_PXB && distance_b <= TOPO_PXB));
}

/* The rate of the fastest port of a NIC and its siblings. */
static double best_rate(const struct topo *topo, int nic)
{
    double best = 0;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; is_compared(topo, i) && are_siblings(topo, nic, i) && p < topo->nics[i].n_ports; p++)
            if (topo->nics[i].ports[p].active && topo->nics[i].ports[p].rate_gbps > best)
                best = topo->nics[i].ports[p].rate_gbps;
    return best;
}

/* The bandwidth of a PCIe link in one direction in Gb/s: 8b/10b encoding up to PCIe 2, 128b/130b since. */
static double pci_rate(const struct topo_pci *pci)
{
    return pci->link_gts * pci->link_width * (pci->link_gts > 5.5 ? 128.0 / 130 : 0.8);
}

static bool is_below_maximum(const struct topo_pci *pci)
{
    return (pci->link_gts > 0 && pci->link_gts < pci->link_gts_max) ||
           (pci->link_width > 0 && pci->link_width < pci->link_width_max);
}

struct slow_links {
    int n, n_severe;
    const char *first, *what;
};

static void record_slow(struct doctor_result *result, struct slow_links *slow, bool is_severe, const char *where,
                        const char *what)
{
    if (slow->n == 0 || (is_severe && slow->n_severe == 0)) {
        slow->first = where;
        slow->what = what;
    }
    slow->n++;
    slow->n_severe += is_severe;
    doctor_evidence(result, where, "%s", what);
}

static void find_slow_ports(const struct doctor_machine *machine, struct doctor_result *result, struct slow_links *slow)
{
    const struct topo *topo = machine->topo;

    for (int i = 0; i < topo->n_nics; i++) {
        double best = is_compared(topo, i) ? best_rate(topo, i) : 0;

        for (int p = 0; is_compared(topo, i) && p < topo->nics[i].n_ports; p++) {
            const struct topo_port *port = &topo->nics[i].ports[p];

            if (port->active && port->rate_gbps > 0 && port->rate_gbps < best * 0.99)
                record_slow(
                    result, slow, true, machine_port_name(machine, i, p),
                    source_printf(machine->source, "runs at %g Gb/s, its siblings at %g", port->rate_gbps, best));
        }
    }
}

/*
 * A link below its maximum is a fault if a sibling is faster or if it is slower than the port. An older slot generation
 * that all of them share and that is fast enough is the design of the machine.
 */
static void find_slow_buses(const struct doctor_machine *machine, struct doctor_result *result, struct slow_links *slow)
{
    const struct topo *topo = machine->topo;

    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_pci *pci = is_compared(topo, i) ? &topo->pci[topo->nics[i].pci] : NULL;
        bool is_tight;

        if (!pci || !is_below_maximum(pci))
            continue;
        is_tight = pci_rate(pci) > 0 && pci_rate(pci) < nic_rate(&topo->nics[i]);
        if (is_tight || ANY_OF(k, topo->n_nics,
                               is_compared(topo, k) && are_siblings(topo, i, k) &&
                                   pci_rate(&topo->pci[topo->nics[k].pci]) > pci_rate(pci) * 1.01))
            record_slow(result, slow, is_tight, topo->nics[i].name,
                        source_printf(machine->source, "PCIe link at %g GT/s x%d, its maximum is %g GT/s x%d",
                                      pci->link_gts, pci->link_width, pci->link_gts_max, pci->link_width_max));
    }
}

/* For a GPU only the width counts: the speed drops when it is idle. Laptop GPUs have fewer lanes by design. */
static void find_narrow_gpus(const struct doctor_machine *machine, struct doctor_result *result,
                             struct slow_links *slow)
{
    const struct topo *topo = machine->topo;
    int best = 0;

    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].pci >= 0 && topo->pci[topo->gpus[i].pci].link_width > best)
            best = topo->pci[topo->gpus[i].pci].link_width;
    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_pci *pci = topo->gpus[i].pci >= 0 ? &topo->pci[topo->gpus[i].pci] : NULL;

        if (pci && pci->link_width > 0 && pci->link_width < pci->link_width_max &&
            (pci->link_width < best || topo->n_gpus >= 4))
            record_slow(result, slow, false, machine_gpu_name(machine, i),
                        source_printf(machine->source, "PCIe link x%d, its maximum is x%d", pci->link_width,
                                      pci->link_width_max));
    }
}

void run_slow_link(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct slow_links slow = {.first = "", .what = ""};

    if (machine->topo->n_gpus == 0 && !machine_has_data_nics(machine, result))
        return;
    find_slow_ports(machine, result, &slow);
    find_slow_buses(machine, result, &slow);
    find_narrow_gpus(machine, result, &slow);
    if (slow.n == 0)
        return;
    doctor_found(result, slow.n_severe ? DOCTOR_ERROR : DOCTOR_WARNING, "%s: %s%s", slow.first, slow.what,
                 slow.n > 1 ? ", and more links are slow" : "");
}

/* --- pci-uplink --- */

#define CLASS_BRIDGE 0x0604 /* PCI Code and ID Assignment Specification */

/* Is the link slower than its maximum while another one of the same model and maximum is not? */
static bool is_degraded(const struct topo *topo, int device)
{
    const struct topo_pci *self = &topo->pci[device], *all = topo->pci;

    return self->link_width > 0 && self->link_gts > 0 && is_below_maximum(self) &&
           ANY_OF(i, topo->n_pci,
                  i != device && all[i].vendor == self->vendor && all[i].device == self->device &&
                      all[i].link_width_max == self->link_width_max && all[i].link_gts_max == self->link_gts_max &&
                      (all[i].link_width > self->link_width || pci_rate(&all[i]) > pci_rate(self)));
}

/* The links above switches; slow-link checks that of the device itself, which its upstream port reports as well. */
static void check_uplinks(struct doctor_result *result, int device, unsigned char *seen)
{
    const struct topo *topo = result->machine->topo;
    int guard = 0;

    for (int p = device >= 0 ? topo->pci[device].parent : -1; p >= 0 && guard < 64; p = topo->pci[p].parent, guard++) {
        const struct topo_pci *pci = &topo->pci[p];

        if (seen[p])
            continue;
        seen[p] = 1;
        if (!ANY_OF(i, topo->n_pci, topo->pci[i].parent == p && topo->pci[i].class_code >> 8 == CLASS_BRIDGE) ||
            !is_degraded(topo, p))
            continue;
        doctor_found_first(result, DOCTOR_ERROR,
                           "the PCIe link of the bridge at %s has %d of %d lanes at %g of %g GT/s", pci->address,
                           pci->link_width, pci->link_width_max, pci->link_gts, pci->link_gts_max);
        doctor_evidence(result, pci->address, "%d lanes at %g GT/s; its maximum is %d at %g", pci->link_width,
                        pci->link_gts, pci->link_width_max, pci->link_gts_max);
    }
}

void run_pci_uplink(const struct doctor_machine *machine, struct doctor_result *result)
{
    unsigned char seen[TOPO_MAX_PCI] = {0};
    const struct topo *topo = machine->topo;

    if (doctor_not_applicable_if(result, topo->n_gpus < 2, "a single GPU: there is no other to compare it with"))
        return;
    for (int i = 0; i < topo->n_gpus; i++)
        check_uplinks(result, topo->gpus[i].pci, seen);
    for (int i = 0; i < topo->n_nics; i++)
        if (machine_nic_serves_gpus(machine, i))
            check_uplinks(result, topo->nics[i].pci, seen);
}

/* --- firmware --- */

/* Are both of the same model, serve GPUs, and does the driver say what firmware the first has? */
static bool is_alike(const struct doctor_machine *machine, int nic, int other)
{
    return machine_nic_serves_gpus(machine, nic) && topo_is_same_model(machine->topo, nic, other) &&
           *machine->topo->nics[nic].firmware;
}

static int n_with(const struct doctor_machine *machine, int nic, const char *firmware)
{
    return COUNT_OF(i, machine->topo->n_nics,
                    is_alike(machine, i, nic) && strcmp(machine->topo->nics[i].firmware, firmware) == 0);
}

/* The version of more than half of the NICs of this model; NULL if there is none. */
static const char *usual_firmware(const struct doctor_machine *machine, int nic)
{
    const struct topo *topo = machine->topo;
    int n = COUNT_OF(i, topo->n_nics, is_alike(machine, i, nic)),
        usual = n < 3 ? -1
                      : FIRST_OF(i, topo->n_nics,
                                 is_alike(machine, i, nic) && n_with(machine, nic, topo->nics[i].firmware) * 2 > n);

    return usual < 0 ? NULL : topo->nics[usual].firmware;
}

/* Reports versions without a majority, where it cannot be said which one is wrong. */
static void find_divided(const struct doctor_machine *machine, struct doctor_result *result, int nic)
{
    const struct topo *topo = machine->topo;
    const char *firmware = topo->nics[nic].firmware;
    int n = COUNT_OF(i, topo->n_nics, is_alike(machine, i, nic)),
        other = FIRST_OF(i, topo->n_nics, is_alike(machine, i, nic) && strcmp(topo->nics[i].firmware, firmware) != 0);

    if (n < 3 || other < 0)
        return;
    doctor_found(result, DOCTOR_WARNING, "NICs of one model have different firmware: %s has %s, %s has %s",
                 topo->nics[nic].name, firmware, topo->nics[other].name, topo->nics[other].firmware);
    for (int k = 0; k < topo->n_nics; k++)
        if (is_alike(machine, k, nic))
            doctor_evidence(result, topo->pci[topo->nics[k].pci].address, "%s: firmware %s", topo->nics[k].name,
                            topo->nics[k].firmware);
    doctor_advise(
        result,
        "Bring all of them to one version (mlxfwmanager, or the vendor's tool) when the node is drained: it runs after a reset of the NIC, which ends its links.");
}

void run_firmware(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;

    for (int i = 0; i < topo->n_nics; i++) {
        const char *usual, *place = topo->nics[i].pci >= 0 ? topo->pci[topo->nics[i].pci].address : "";

        if (!machine_nic_serves_gpus(machine, i) || !*topo->nics[i].firmware)
            continue;
        usual = usual_firmware(machine, i);
        if (!usual && result->outcome != DOCTOR_FOUND)
            find_divided(machine, result, i);
        if (!usual || strcmp(usual, topo->nics[i].firmware) == 0)
            continue;
        if (result->outcome != DOCTOR_FOUND) {
            doctor_found(result, DOCTOR_WARNING, "%s has firmware %s, others of its model have %s", topo->nics[i].name,
                         topo->nics[i].firmware, usual);
            doctor_advise(result,
                          "Bring the NIC at %s to the version of the others (mlxfwmanager, or the vendor's tool) when "
                          "the node is drained: the new firmware runs after a reset of the NIC, which ends its links.",
                          place);
        }
        doctor_evidence(result, place, "%s: firmware %s", topo->nics[i].name, topo->nics[i].firmware);
    }
}

/* --- nic-access --- */

struct access_count {
    int n_unknown, n_denied, n_absent, n_nameless;
    const char *first, *why;
};

static void check_uverbs(struct doctor_result *result, const struct topo_nic *nic, struct access_count *count)
{
    struct source_stat stat;

    if (!*nic->uverbs) {
        count->n_nameless++;
        count->first = *count->first ? count->first : nic->name;
        doctor_evidence(result, nic->name, "no uverbs device");
        return;
    }
    stat = source_stat(result->machine->source, "%s", nic->uverbs);
    if (stat.state == SOURCE_FAILED || stat.state == SOURCE_NOT_RECORDED) {
        count->n_unknown++;
        count->why = machine_reason(stat.state, stat.why);
        return;
    }
    if (machine_may_open(stat))
        return;
    count->n_absent += stat.state == SOURCE_ABSENT;
    count->n_denied += stat.state != SOURCE_ABSENT;
    count->first = *count->first ? count->first : nic->uverbs;
    doctor_evidence(result, nic->uverbs, "%s (%s)",
                    stat.state == SOURCE_ABSENT ? "not there" : "not readable and writable for this user", nic->name);
}

/* Is a NIC that this process may use near a GPU that it may not use? */
static bool has_others_nic(const struct topo *topo)
{
    int n_hidden = topo->n_hidden_gpus < TOPO_MAX_GPUS ? topo->n_hidden_gpus : TOPO_MAX_GPUS;

    return ANY_OF(i, topo->n_nics,
                  machine_is_data_nic(topo, i) &&
                      ANY_OF(h, n_hidden, topo_path(topo, topo->hidden_gpus[h], topo->nics[i].pci) <= TOPO_PXB) &&
                      !ANY_OF(g, topo_usable_gpus(topo), topo_gpu_nic_path(topo, g, i) <= TOPO_PXB));
}

/* Does a NIC with this role share a switch with the GPU? */
static bool is_near(const struct topo *topo, int gpu, enum topo_role role)
{
    return ANY_OF(i, topo->n_nics,
                  (role == TOPO_ROLE_DATA ? machine_is_data_nic(topo, i) : topo->nics[i].role == role) &&
                      topo_gpu_nic_path(topo, gpu, i) <= TOPO_PXB);
}

/*
 * The process may use some NICs and not others: a pod with a part of the machine. That is correct as long as it has as
 * many NICs as GPUs, and none of its GPUs is near NICs none of which it has.
 */
static void check_share(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n = machine_n_data_nics(topo),
        gpu = FIRST_OF(g, topo_usable_gpus(topo),
                       is_near(topo, g, TOPO_ROLE_NO_ACCESS) && !is_near(topo, g, TOPO_ROLE_DATA));

    /* If no GPU is near a NIC, only the counts can be compared. */
    if ((n >= topo_usable_gpus(topo) && (gpu < 0 || !has_others_nic(topo))) ||
        (gpu < 0 && n * 2 <= topo_usable_gpus(topo)))
        return;
    for (int i = 0; i < topo->n_nics; i++)
        if (topo->nics[i].role == TOPO_ROLE_NO_ACCESS)
            doctor_evidence(result, topo->nics[i].name, "%s", topo->nics[i].access_why);
    if (result->n_evidence == 0)
        return;
    if (n >= topo_usable_gpus(topo)) {
        doctor_found(result, DOCTOR_WARNING, "the process may use NICs of other GPUs, but none near %s",
                     machine_gpu_name(machine, gpu));
        doctor_advise(
            result,
            "Give the process the NICs near its GPUs: in Kubernetes by the topology manager (policy restricted or single-numa-node) or DRA, in Slurm by binding to the GPUs.");
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "the process may use only %d NICs for %d GPUs%s%s", n, topo_usable_gpus(topo),
                 gpu >= 0 ? "; none near " : "", gpu >= 0 ? machine_gpu_name(machine, gpu) : "");
    doctor_advise(result, "Give the process as many NICs as GPUs: their devices in /dev/infiniband, and in a pod "
                          "without the host's network their interfaces.");
}

/*
 * RDMA devices of the node that a container may open beside its own, and whose interfaces it does not have: a pod with
 * functions or networks of its own, and all of /dev/infiniband. NCCL takes every device that opens.
 */
static void find_too_many(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct advice_row *advised = advice_find(machine->advice, "NCCL_IB_HCA");
    const char *list = machine_nccl_value(machine, "NCCL_IB_HCA", NULL);
    struct list_names names = list_names_of(list);
    int n = 0, n_own = machine_n_data_nics(machine->topo);

    for (int i = 0; i < machine->topo->n_nics && n_own > 0; i++) {
        const struct topo_nic *nic = &machine->topo->nics[i];

        if (nic->role != TOPO_ROLE_NO_ACCESS || !*nic->uverbs ||
            !machine_may_open(source_stat(machine->source, "%s", nic->uverbs)) ||
            (*list && !list_names_it(&names, nic->name, -1)))
            continue;
        doctor_evidence(result, nic->uverbs, "%s: %s", nic->name, nic->access_why);
        n++;
    }
    if (n == 0)
        return;
    doctor_found(result, DOCTOR_ERROR,
                 "%d RDMA device%s of the node can be opened beside the %d of this container, without their interfaces",
                 n, n == 1 ? "" : "s", n_own);
    if (advised && !advised->unset)
        doctor_fix(result, false, "export NCCL_IB_HCA=%s", shell_word(machine->source, advised->value));
    doctor_advise(
        result,
        "NCCL takes every device that opens. Give the container its own only, by the device plugin and not by a mount of /dev/infiniband or privileged.");
}

static const struct by_place how_to_get_uverbs = {
    .pod = "Ask for them from the RDMA device plugin, in the limits of the container.",
    .container = "Start the container with --device /dev/infiniband.",
    .job = "Have the container of the job mount /dev/infiniband; enroot does with MELLANOX_VISIBLE_DEVICES=all.",
    .host = "sudo modprobe ib_uverbs creates them."};

void run_nic_access(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct access_count count = {.first = "", .why = ""};
    bool in_container = machine->software->os.in_container;
    int n;

    for (int i = 0; i < machine->topo->n_nics; i++)
        if (machine_is_data_nic(machine->topo, i))
            check_uverbs(result, &machine->topo->nics[i], &count);
    n = count.n_absent + count.n_denied + count.n_nameless;
    if (n == 0) {
        if (count.n_unknown)
            doctor_unknown(result, "%d uverbs devices: %s", count.n_unknown, count.why);
        else
            check_share(machine, result);
        if (result->outcome == DOCTOR_FINE)
            find_too_many(machine, result);
        return;
    }
    /* sysfs shows the NICs of the machine in each container; a container without RDMA devices has lost none. */
    if (doctor_not_applicable_if(result,
                                 count.n_absent == machine_n_data_nics(machine->topo) && !machine_uses_rdma(machine),
                                 "there is no RDMA device in /dev/infiniband, and nothing needs one"))
        return;
    doctor_found(result, DOCTOR_ERROR, "%s %s%s", count.first,
                 count.n_nameless ? "has no uverbs device"
                 : count.n_absent ? "is not there"
                                  : "is not accessible",
                 n > 1 ? ", and more are not" : "");
    if (count.n_nameless)
        doctor_fix(result, true, "sudo modprobe ib_uverbs");
    else if (count.n_denied && !in_container)
        doctor_fix(result, false, "sudo chmod 666 /dev/infiniband/uverbs*");
    doctor_evidence_env(result, "MELLANOX_VISIBLE_DEVICES");
    doctor_advise(result, "%s",
                  !count.n_absent && !in_container
                      ? "On a host the rules of rdma-core make these devices accessible for all."
                      : machine_by_place(machine, how_to_get_uverbs));
}
