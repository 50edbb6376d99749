/* SPDX-License-Identifier: Apache-2.0 */
/* checks_port.c - ports of NICs: state, link layer. */
#include "checks.h"

/* --- port-down --- */

/* Another function of the same card with an active port. */
static bool has_active_sibling(const struct topo *topo, int nic)
{
    return ANY_OF(i, topo->n_nics,
                  i != nic && machine_is_data_nic(topo, i) &&
                      topo_is_same_card(topo, topo->nics[i].pci, topo->nics[nic].pci));
}

/* Its ports have no link and never had one: there is no cable, or they are disabled. */
static bool is_disabled(const struct topo_nic *nic)
{
    return !ANY_OF(p, nic->n_ports, strcmp(nic->ports[p].phys_state, "Disabled") != 0);
}

/*
 * The second port of a card often has no cable. Its link is expected if another card of this model has both ports
 * active. On a card whose first port has lost its link, it is not expected if other cards have such a port.
 */
static bool is_spare(const struct topo *topo, int nic)
{
    bool has_active = has_active_sibling(topo, nic), is_alike = false;

    /* Or another function with a cable, but also without an active port. */
    if (!has_active &&
        !(is_disabled(&topo->nics[nic]) && ANY_OF(i, topo->n_nics,
                                                  i != nic && topo->nics[i].pci >= 0 && !is_disabled(&topo->nics[i]) &&
                                                      topo_is_same_card(topo, topo->nics[i].pci, topo->nics[nic].pci))))
        return false;
    for (int i = 0; i < topo->n_nics; i++) {
        if (topo->nics[i].pci < 0 || !topo_is_same_model(topo, i, nic) || !has_active_sibling(topo, i))
            continue;
        if (machine_is_data_nic(topo, i))
            return false;
        is_alike = is_alike || topo->nics[i].role == TOPO_ROLE_DOWN;
    }
    return has_active || is_alike;
}

/*
 * Is it a NIC without an active port that GPUs would use: on a switch with a GPU, or of the model of the data NICs? If
 * there are no data NICs, any NIC, unless the machine has a single GPU and nothing needs RDMA.
 */
static bool is_down_rail(const struct doctor_machine *machine, int nic)
{
    const struct topo *topo = machine->topo;
    const struct topo_nic *self = &topo->nics[nic];

    if (self->role != TOPO_ROLE_DOWN || self->pci < 0 || topo->n_gpus == 0 || is_spare(topo, nic))
        return false;
    return ANY_OF(i, topo->n_nics,
                  machine_is_data_nic(topo, i) && topo_is_same_model(topo, i, nic) &&
                      machine_gpu_distance(topo, i) == machine_gpu_distance(topo, nic)) ||
           machine_gpu_distance(topo, nic) <= TOPO_PXB ||
           (machine_n_data_nics(topo) == 0 && (topo->n_gpus > 1 || machine_uses_rdma(machine)));
}

/* A port in state Disabled has no cable or is off, which on a switch with a GPU is never intended. */
static bool is_left_unplugged(const struct topo *topo, int nic)
{
    return is_disabled(&topo->nics[nic]) && machine_gpu_distance(topo, nic) > TOPO_PXB;
}

/* The number of NICs on a switch with this GPU, whatever their state. */
static int nics_near_gpu(const struct topo *topo, int gpu)
{
    return COUNT_OF(i, topo->n_nics,
                    topo->nics[i].pci >= 0 && topo->nics[i].role != TOPO_ROLE_VIRTUAL &&
                        topo_gpu_nic_path(topo, gpu, i) <= TOPO_PXB);
}

/* A GPU with fewer NICs on its switch than most, or -1. Nothing is near a GPU that sysfs does not show. */
static int gpu_without_its_nic(const struct topo *topo, int *ret_has, int *ret_due)
{
    int counts[TOPO_MAX_GPUS];

    for (int i = 0; i < topo->n_gpus; i++)
        counts[i] = nics_near_gpu(topo, i);
    for (int i = 0; i < topo->n_gpus; i++) {
        int gpu;

        if (COUNT_OF(k, topo->n_gpus, counts[k] == counts[i]) * 2 <= topo->n_gpus)
            continue;
        gpu = FIRST_OF(k, topo->n_gpus, counts[k] < counts[i] && topo_is_located(topo, topo->gpus[k].pci));
        if (gpu < 0)
            continue;
        *ret_has = counts[gpu];
        *ret_due = counts[i];
        return gpu;
    }
    return -1;
}

struct down_count {
    int n, n_severe, n_unknown, first;
    int n_unmanaged; /* of n: waiting for a subnet manager */
};

/*
 * InfiniBand Architecture Specification, 14.4: a port whose link is up stays in state INIT until a subnet manager has
 * assigned an address, and in ARMED until it has activated the port. Cable, transceiver and switch port are in order.
 */
static bool is_unmanaged(const struct topo_nic *nic)
{
    return ANY_OF(p, nic->n_ports,
                  nic->ports[p].link_layer == TOPO_LINK_INFINIBAND && strcmp(nic->ports[p].phys_state, "LinkUp") == 0 &&
                      text_is_any(nic->ports[p].state, TEXTS("INIT", "ARMED")));
}

static struct down_count count_down(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    struct down_count count = {.first = -1};

    for (int i = 0; i < topo->n_nics; i++) {
        if (!is_down_rail(machine, i))
            continue;
        if (topo->nics[i].n_ports == 0 ||
            ANY_OF(p, topo->nics[i].n_ports, !machine_knows_port_state(&topo->nics[i].ports[p]))) {
            count.n_unknown++;
            continue;
        }
        if (count.n++ == 0 || (count.n_severe == 0 && !is_left_unplugged(topo, i)))
            count.first = i;
        count.n_severe += !is_left_unplugged(topo, i);
        count.n_unmanaged += is_unmanaged(&topo->nics[i]);
        for (int p = 0; p < topo->nics[i].n_ports; p++)
            doctor_evidence(result, machine_port_name(machine, i, p), "%s, %s", topo->nics[i].ports[p].state,
                            topo->nics[i].ports[p].phys_state);
    }
    return count;
}

/* All present NICs are up. Is one missing? */
static void find_missing(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n_data = machine_n_data_nics(topo), has = 0, due = 0, gpu = gpu_without_its_nic(topo, &has, &due),
        hidden = FIRST_OF(i, topo->n_gpus, !topo_is_located(topo, topo->gpus[i].pci));
    /* If no GPU has a NIC on its switch, only the counts can show that one is missing. */
    bool is_flat = !ANY_OF(i, topo->n_gpus, nics_near_gpu(topo, i) > 0);
    unsigned vendor = PCI_VENDOR_MELLANOX;

    /* NICs on the bus without an RDMA device are reported by rdma-device. */
    if (machine_functions_without_rdma(machine) > 0)
        return;
    if (gpu >= 0)
        doctor_found(result, DOCTOR_ERROR, "%s has %d NIC%s near it, most others have %d",
                     machine_gpu_name(machine, gpu), has, has == 1 ? "" : "s", due);
    else if (is_flat && n_data < topo->n_gpus && n_data * 2 > topo->n_gpus)
        doctor_found(result, DOCTOR_WARNING, "there are %d NICs for %d GPUs", n_data, topo->n_gpus);
    else if (!is_flat && hidden >= 0)
        doctor_unknown(result, "/sys/bus/pci/devices: it does not have %s, so whether its NIC is there cannot be seen",
                       machine_gpu_name(machine, hidden));
    if (result->outcome != DOCTOR_FOUND)
        return;
    for (int i = 0; i < topo->n_nics; i++)
        if (machine_is_data_nic(topo, i) && topo->nics[i].pci >= 0)
            vendor = topo->pci[topo->nics[i].pci].vendor;
    FOR_EACH (pci, topo->pci, topo->n_pci)
        if (pci->vendor == vendor && strncmp(pci->driver, "vfio", 4) == 0)
            doctor_evidence(result, pci->address, "driver %s: passed to a virtual machine", pci->driver);
    doctor_evidence(result, "/sys/class/infiniband", "%d NICs, %d of them for data", topo->n_nics, n_data);
    doctor_advise(result,
                  "A NIC seems to be missing: look for it on the bus (lspci -d %04x:) and in the kernel log; in a pod, "
                  "check its network annotations and devices. In a cloud, take the node out of service.",
                  vendor);
}

/* No NIC at all is a fault only if somebody expected some: a variable names single NICs. */
static void find_all_missing(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[] = {"DEEP_EP_DEVICE_TO_HCA_MAPPING", "NVSHMEM_HCA_LIST", "NCCL_IB_HCA",
                                        "EPKIT_VERBS_DEVICE"};
    struct source_names found = source_list(machine->source, "/sys/class/infiniband");
    const char *first = NULL;

    if (machine_functions_without_rdma(machine) > 0)
        return;
    for (size_t i = 0; i < COUNT(names); i++) {
        const char *value = source_env(machine->source, names[i]);

        /* Without '=' the entries of NCCL_IB_HCA are beginnings of names, which images set for any machine. */
        if (!value || !*value || *value == '^' || (strcmp(names[i], "NCCL_IB_HCA") == 0 && *value != '='))
            continue;
        if (!first)
            doctor_found(result, DOCTOR_ERROR, "there is no RDMA NIC, and %s names some", names[i]);
        first = names[i];
        doctor_evidence(result, names[i], "%s", value);
    }
    if (!first)
        return;
    doctor_evidence(result, "/sys/class/infiniband", "%s",
                    found.state == SOURCE_OK ? "empty" : machine_reason(found.state, found.why));
    doctor_advise(result,
                  "In a pod, check its network annotations and devices; on a node, look for the NICs on the bus (lspci "
                  "-d %04x:) and in the kernel log. If there should be none, unset the variable.",
                  PCI_VENDOR_MELLANOX);
}

void run_port_down(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    struct down_count count;
    const char *name, *tool = "", *shared = "";

    if (topo->n_nics == 0 && !machine_has_data_nics(machine, result)) {
        if (result->outcome == DOCTOR_NOT_APPLICABLE)
            find_all_missing(machine, result);
        return;
    }
    count = count_down(machine, result);
    name = count.n ? topo->nics[count.first].name : "";
    if (count.n && count.n == count.n_unmanaged) {
        doctor_found(result, DOCTOR_ERROR, "%s has a link, but no subnet manager brings it up (%s)%s", name,
                     topo->nics[count.first].ports[0].state, count.n > 1 ? ", and more NICs wait for one" : "");
        doctor_advise(result,
                      "Cable and switch port are in order. Check the subnet manager of this fabric, on a switch, in "
                      "UFM or as opensm on a node (sudo sminfo -C %s), and whether it may reach this port.",
                      shell_word(machine->source, name));
    } else if (count.n) {
        doctor_found(result, count.n_severe ? DOCTOR_ERROR : DOCTOR_WARNING, "%s has no active port%s", name,
                     count.n > 1 ? ", and more NICs have none" : "");
        if (topo->pci[topo->nics[count.first].pci].vendor == PCI_VENDOR_MELLANOX)
            tool = source_printf(machine->source, " (mlxlink -d %s -m)", shell_word(machine->source, name));
        if (ANY_OF(i, topo->n_nics, machine_is_data_nic(topo, i) && topo_is_same_model(topo, i, count.first)))
            shared = " GPUs of this NIC share one with others until it is back.";
        /* Users of virtual machines and pods have no access to cables. */
        if (machine_virtual(machine->source) == MACHINE_VIRTUAL)
            doctor_advise(result,
                          "In a virtual machine, the provider maintains cable and switch: take the node out of "
                          "service. In a pod, check its network annotations.%s",
                          shared);
        else
            doctor_advise(result, "Check cable, transceiver and switch port%s; in a pod, its network annotations.%s",
                          tool, shared);
    } else if (count.n_unknown) {
        doctor_unknown(result, "the state of the ports of %d of %d NICs is not known", count.n_unknown, topo->n_nics);
    } else {
        find_missing(machine, result);
    }
}

/* --- link-layer --- */

static bool is_of_device(const struct topo *topo, int a, int nic)
{
    return machine_is_data_nic(topo, a) && topo->pci[topo->nics[a].pci].device == topo->pci[topo->nics[nic].pci].device;
}

/*
 * Is it certain that the port is a misconfigured rail? The command removes it from its current network; on an uplink,
 * the machine would become unreachable. So the port must be on a switch with a GPU, of the model of at least three
 * others that all have the other link layer, on a card with one function on bare metal, and no address may be assigned
 * to it.
 */
static bool is_certainly_misconfigured(const struct doctor_machine *machine, int nic, enum topo_link_layer odd)
{
    const struct topo *topo = machine->topo;
    const struct topo_nic *self = &topo->nics[nic];
    const struct topo_port *port = &self->ports[0];
    int n_alike = COUNT_OF(i, topo->n_nics, is_of_device(topo, i, nic)),
        n_odd = COUNT_OF(i, topo->n_nics, is_of_device(topo, i, nic) && topo->nics[i].ports[0].link_layer == odd);
    /* The command would name the options of another function of the card by another number. */
    bool has_sibling =
             ANY_OF(i, topo->n_nics,
                    i != nic && topo->nics[i].pci >= 0 && topo_is_same_card(topo, topo->nics[i].pci, self->pci)),
         is_routable =
             port->gids_state != SOURCE_OK || ANY_OF(i, port->n_gids, port->gids[i].kind != TOPO_GID_LINK_LOCAL);

    return !self->is_uplink && self->n_ports == 1 && machine_gpu_distance(topo, nic) <= TOPO_PXB && !has_sibling &&
           machine_virtual(machine->source) == MACHINE_BARE_METAL && !machine->software->os.in_container &&
           !(odd == TOPO_LINK_ETHERNET && is_routable) && n_odd == 1 && n_alike >= 4;
}

void run_link_layer(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[] = {[TOPO_LINK_ETHERNET] = "Ethernet", [TOPO_LINK_INFINIBAND] = "InfiniBand"};
    enum topo_link_layer odd = machine_minority_link_layer(machine);
    struct machine_port ports[MACHINE_PORTS_MAX];
    const struct topo_nic *nic;
    int n;

    if (odd == TOPO_LINK_UNKNOWN)
        return;
    n = machine_ports(machine, false, odd, ports);
    for (int i = 0; i < n; i++)
        doctor_evidence(result, machine_port_name(machine, ports[i].nic, ports[i].port), "link layer %s", names[odd]);
    doctor_found(result, DOCTOR_ERROR, "NICs of GPUs have different link layers: %s is %s, others are %s",
                 n ? machine->topo->nics[ports[0].nic].name : "one", names[odd],
                 names[odd == TOPO_LINK_ETHERNET ? TOPO_LINK_INFINIBAND : TOPO_LINK_ETHERNET]);
    nic = n ? &machine->topo->nics[ports[0].nic] : NULL;
    if (nic && is_certainly_misconfigured(machine, ports[0].nic, odd)) {
        doctor_fix(result, false, "sudo mlxconfig -d %s set LINK_TYPE_P1=%s",
                   shell_word(machine->source, machine->topo->pci[nic->pci].address),
                   odd == TOPO_LINK_ETHERNET ? "IB" : "ETH");
        doctor_cost(result, DOCTOR_FIX_CUTS_OFF, "After the next reboot %s is no longer in its current %s network.",
                    nic->name, names[odd]);
        doctor_advise(result, "The link type of a ConnectX port is an option of its firmware; it takes effect after a "
                              "reboot.");
    } else
        doctor_advise(
            result,
            "If one of these is an uplink or for storage, leave it out of NCCL_IB_HCA and NVSHMEM_HCA_LIST; the link type of a rail is an option of its firmware (mlxconfig, LINK_TYPE). Never change that of the port through which you reach this machine.");
}
