/* SPDX-License-Identifier: Apache-2.0 */
/* checks_gid.c - the GIDs of RoCE ports, and the index that variables select. */
#include "checks.h"

static const char *const gid_variables[] = {"NVSHMEM_IB_GID_INDEX", "NCCL_IB_GID_INDEX", NULL};

static bool has_gid(const struct topo_port *port, enum topo_gid_type type, enum topo_gid_kind kind)
{
    return ANY_OF(i, port->n_gids, port->gids[i].type == type && port->gids[i].kind == kind);
}

/* What is wrong with GID `index` of a port; "" if nothing is. */
static const char *gid_fault(const struct topo_port *port, int index)
{
    int at = FIRST_OF(i, port->n_gids, port->gids[i].index == index);

    if (at < 0)
        return "is empty";
    if (port->gids[at].type == TOPO_GID_UNKNOWN)
        return "";
    if (port->gids[at].type != TOPO_GID_ROCE2)
        return "is of type RoCE v1, which routers do not carry";
    return port->gids[at].kind == TOPO_GID_LINK_LOCAL ? "is a link-local address, which routers do not carry" : "";
}

/* The index in a variable; -1 if it leaves the choice to the library. */
static int gid_index(const struct doctor_machine *machine, const char *name)
{
    const char *value = machine_env(machine, name);
    char *end;
    long index = strtol(value, &end, 10);

    return end == value || *end || index < 0 || index > 65535 ? -1 : (int)index;
}

struct gid_faults {
    int n_ports, n_unreadable, n_none, n_wrong;
    int n_foreign; /* of n_none: with GIDs of interfaces in another network namespace */
    enum source_state why;
    const char *port;                         /* the first one without a GID, or with a wrong one */
    const char *variable, *fault, *variables; /* of n_wrong: the first; all of them, each after ' ' */
    int index;
    int hidden;     /* the index of a routable GID that NCCL does not reach, -1 none, -2 several */
    bool only_ipv6; /* true for all ports in n_none */
};

/*
 * On an IPv6-only network, the libraries find the GID only if a variable selects IPv6 or the index. Returns the missing
 * variables, separated by " ", "" if none. NVSHMEM's matters only if there is an NVSHMEM; gIB's script sets what gIB
 * needs of NCCL.
 */
static const char *family_missing(const struct doctor_machine *machine, const char *value)
{
    static const char *const families[] = {"NVSHMEM_IB_ADDR_FAMILY", "NCCL_IB_ADDR_FAMILY"};
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *missing = "";

    for (int i = 0; i < 2; i++) {
        if (strcmp(machine_env(machine, families[i]), "AF_INET6") == 0 || gid_index(machine, gid_variables[i]) >= 0 ||
            (i == 0 && nvshmem->host.state != SOURCE_OK && !(nvshmem->home && *nvshmem->home)) ||
            (i == 1 && machine->software->nccl.gib && *machine->software->nccl.gib))
            continue;
        missing = source_printf(machine->source, "%s%s%s%s", missing, *missing ? " " : "", families[i], value);
    }
    return missing;
}

static void found_no_gid(struct doctor_result *result, const struct gid_faults *faults)
{
    if (faults->only_ipv6) {
        doctor_found(result, DOCTOR_WARNING,
                     "%s has RoCE v2 GIDs with IPv6 addresses only, and no variable selects them%s", faults->port,
                     faults->n_none > 1 ? "; other ports too" : "");
        doctor_fix(result, false, "export %s", family_missing(result->machine, "=AF_INET6"));
        doctor_advise(result, "NVSHMEM and NCCL look for an IPv4 address by default. Or configure IPv4 addresses.");
        return;
    }
    if (faults->n_foreign == faults->n_none) {
        doctor_found(result, DOCTOR_ERROR, "the interface of %s is in another network namespace%s", faults->port,
                     faults->n_none > 1 ? ", and those of other ports too" : "");
        doctor_advise(
            result,
            "Give the pod hostNetwork, or by its network annotations the interfaces of its NICs (Multus, GKE's multi-networking, DRANET).");
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "%s has no RoCE v2 GID with an IPv4 address%s", faults->port,
                 faults->n_none > 1 ? ", and other ports have none either" : "");
    doctor_advise(
        result,
        "The GID comes with the IPv4 address of the port's network interface: configure one. In a container, use the node's network (docker run --network=host, hostNetwork of a pod), or in a pod the network annotations that bring the interface along.");
}

static void check_indices(struct doctor_result *result, const char *name, const struct topo_port *port,
                          struct gid_faults *faults)
{
    const struct doctor_machine *machine = result->machine;

    for (int i = 0; gid_variables[i]; i++) {
        int index = gid_index(machine, gid_variables[i]);
        const char *fault = index >= 0 ? gid_fault(port, index) : "";

        if (!*fault)
            continue;
        if (!strstr(faults->variables, gid_variables[i]))
            faults->variables = source_printf(machine->source, "%s %s", faults->variables, gid_variables[i]);
        if (faults->n_wrong++ == 0) {
            faults->port = name;
            faults->variable = gid_variables[i];
            faults->index = index;
            faults->fault = fault;
        }
        doctor_evidence(result, name, "%s=%d %s", gid_variables[i], index, fault);
    }
}

/*
 * NCCL 2.21 to 2.25 look at all entries, also at those of other network namespaces, whose type they may not read: they
 * stop there (NVIDIA/nccl#1573). In a pod these come before its own.
 */
static void check_hidden(const struct doctor_machine *machine, struct doctor_result *result, const char *name,
                         const struct topo_port *port, struct gid_faults *faults)
{
    const struct software_nccl *nccl = &machine->software->nccl;
    const char *version = *nccl->bundled_version ? nccl->bundled_version : nccl->version;
    int at = FIRST_OF(i, port->n_gids, port->gids[i].type == TOPO_GID_ROCE2 && port->gids[i].kind == TOPO_GID_IPV4);

    if (at < 0 || ANY_OF(i, port->n_gids, port->gids[i].index == 0) || strverscmp(version, "2.21") < 0 ||
        strverscmp(version, "2.26") >= 0 || gid_index(machine, "NCCL_IB_GID_INDEX") >= 0)
        return;
    faults->port = faults->hidden == -1 ? name : faults->port;
    faults->hidden = faults->hidden == -1 || faults->hidden == port->gids[at].index ? port->gids[at].index : -2;
    doctor_evidence(result, name, "its own GID has index %d, and NCCL is %s", port->gids[at].index, version);
}

static void check_gids(const struct doctor_machine *machine, struct doctor_result *result, int nic, int port,
                       struct gid_faults *faults)
{
    const struct topo_port *self = &machine->topo->nics[nic].ports[port];
    const char *name = machine_port_name(machine, nic, port);
    bool ipv6 = has_gid(self, TOPO_GID_ROCE2, TOPO_GID_OTHER);

    faults->n_ports++;
    if (self->gids_state != SOURCE_OK) {
        faults->n_unreadable++;
        faults->why = self->gids_state;
        return;
    }
    if (has_gid(self, TOPO_GID_ROCE2, TOPO_GID_IPV4) || has_gid(self, TOPO_GID_UNKNOWN, TOPO_GID_IPV4) ||
        (ipv6 && !*family_missing(machine, ""))) {
        check_indices(result, name, self, faults);
        check_hidden(machine, result, name, self, faults);
        return;
    }
    if (faults->n_none++ == 0)
        faults->port = name;
    faults->only_ipv6 = faults->only_ipv6 && ipv6;
    faults->n_foreign += self->n_gids == 0 && self->n_foreign_gids > 0;
    doctor_evidence(result, name, "%d GIDs, %s", self->n_gids + self->n_foreign_gids,
                    self->n_foreign_gids ? "of interfaces that are not in /sys/class/net of this process"
                    : ipv6               ? "of RoCE v2 with an IPv6 address only"
                                         : "none of RoCE v2 with an IPv4 address");
}

void run_gid(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    struct gid_faults faults = {.variables = "", .only_ipv6 = true, .hidden = -1};
    struct machine_port ports[MACHINE_PORTS_MAX];
    int n = 0;
    /* sysfs shows the NICs of the machine also in a container that has none of them. */
    bool may_use_any = ANY_OF(i, topo->n_nics, machine_is_data_nic(topo, i) && topo->nics[i].access != TOPO_ACCESS_NO);

    if (doctor_not_applicable_if(result, !may_use_any && !machine_uses_rdma(machine),
                                 "this process was given none of the NICs, and nothing here needs RDMA"))
        return;
    /* An Ethernet port among InfiniBand ports is reported by link-layer. */
    if (machine_minority_link_layer(machine) != TOPO_LINK_ETHERNET)
        n = machine_ports(machine, true, TOPO_LINK_ETHERNET, ports);
    for (int i = 0; i < n; i++)
        if (!topo->nics[ports[i].nic].is_iwarp)
            check_gids(machine, result, ports[i].nic, ports[i].port, &faults);
    if (faults.n_none) {
        found_no_gid(result, &faults);
    } else if (faults.n_wrong) {
        doctor_found(result, DOCTOR_ERROR, "%s=%d names a GID of %s that %s", faults.variable, faults.index,
                     faults.port, faults.fault);
        doctor_fix(result, false, "unset%s", faults.variables);
        doctor_advise(result, "Without it NVSHMEM and NCCL look for a RoCE v2 GID with an IPv4 address themselves.");
    } else if (faults.hidden != -1) {
        doctor_found(result, DOCTOR_WARNING, "NCCL stops at GIDs of other pods, which come before those of %s",
                     faults.port);
        if (faults.hidden >= 0)
            doctor_fix(result, false, "export NCCL_IB_GID_INDEX=%d", faults.hidden);
        doctor_advise(result, "Later versions of NCCL (2.26) pass over them. The index differs from pod to pod.");
    } else if (faults.n_unreadable) {
        doctor_unknown(result, "GIDs of %d of %d ports: %s", faults.n_unreadable, faults.n_ports,
                       machine_reason(faults.why, NULL));
    } else if (faults.n_ports == 0) {
        doctor_not_applicable(result, "no RoCE port is active");
    }
}
