/* SPDX-License-Identifier: Apache-2.0 */
#include "network.h"
#include "queries.h"

#include "common/text.h"

#include <stdlib.h>
#include <string.h>

#define AMAZON 0x1d0f

/* Four channels to a rail peer, each with rings of 1 MiB on both sides; with less, nothing else fits either. */
#define PEER_BYTES (8LL << 20)

/* A decision of the library, and the reason unless it is NETWORK_USABLE. */
struct verdict {
    enum network_usable usable;
    const char *why;
};

static const struct verdict fine = {NETWORK_USABLE, ""};

static struct verdict refused(const char *why)
{
    return (struct verdict){NETWORK_NOT_USABLE, why};
}

static struct verdict not_known(const char *why)
{
    return (struct verdict){NETWORK_NOT_KNOWN, why};
}

/* --- ports --- */

/* `gid_index`: from EPKIT_VERBS_GID_INDEX; -1: by rule. */
static struct verdict check_gids(struct source *source, const struct topo_port *port, int gid_index)
{
    if (port->gids_state != SOURCE_OK)
        return not_known(source_printf(source, "its addresses: %s", machine_reason(port->gids_state, NULL)));
    for (int i = 0; i < port->n_gids; i++)
        if (gid_index >= 0 ? port->gids[i].index == gid_index : port->gids[i].type == TOPO_GID_ROCE2)
            return fine;
    if (gid_index >= 0)
        return refused(source_printf(source, "no address at index %d, which EPKIT_VERBS_GID_INDEX names", gid_index));
    return refused("no RoCE v2 address of an interface in this network namespace");
}

static struct verdict check_port(const struct doctor_machine *machine, const struct topo_nic *nic,
                                 const struct topo_port *port, int gid_index)
{
    struct source *source = machine->source;

    if (nic->access == TOPO_ACCESS_NO)
        return refused(nic->access_why);
    if (nic->pci >= 0 && machine->topo->pci[nic->pci].vendor == AMAZON)
        return refused("EFA has no reliable connections, which verbs is built on");
    if (!port->active && !machine_knows_port_state(port))
        return not_known("the state of the port could not be read");
    if (!port->active)
        return refused(source_printf(source, "the port is %s", topo_port_state_name(port->state)));
    if (port->link_layer == TOPO_LINK_UNKNOWN)
        return not_known("its link layer could not be read");
    if (nic->access == TOPO_ACCESS_UNKNOWN)
        return not_known(source_printf(source, "whether %s may be opened",
                                       *nic->uverbs ? nic->uverbs : "its device in /dev/infiniband"));
    return port->link_layer == TOPO_LINK_ETHERNET ? check_gids(source, port, gid_index) : fine;
}

/* Is a port an entry of EPKIT_VERBS_DEVICE, "NAME" or "NAME:PORT"? */
static bool is_named(const char *device, const char *name, const char *list)
{
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        size_t n = strcspn(at, ",");

        if ((strlen(device) == n && strncmp(device, at, n) == 0) || (strlen(name) == n && strncmp(name, at, n) == 0))
            return true;
    }
    return false;
}

/* The NICs in the order of the library: by name. */
static void order_nics(const struct topo *topo, int ret_order[TOPO_MAX_NICS])
{
    for (int i = 0; i < topo->n_nics; i++) {
        int at = i;

        for (; at > 0 && strverscmp(topo->nics[ret_order[at - 1]].name, topo->nics[i].name) > 0; at--)
            ret_order[at] = ret_order[at - 1];
        ret_order[at] = i;
    }
}

/* Ports in a list must be usable; without a list, unusable ports are left out. */
static struct verdict choose_ports(const struct doctor_machine *machine, int gid_index, struct network *network)
{
    const struct topo *topo = machine->topo;
    const char *list = source_env(machine->source, "EPKIT_VERBS_DEVICE");
    struct verdict first[] = {fine, fine, fine}; /* by `usable` */
    bool has_list = list && *list, has_refused, has_unknown;
    int order[TOPO_MAX_NICS] = {0};

    order_nics(topo, order);
    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[order[i]].n_ports; p++) {
            const struct topo_nic *nic = &topo->nics[order[i]];
            const char *name = machine_port_name(machine, order[i], p);
            struct verdict port = check_port(machine, nic, &nic->ports[p], gid_index);

            if (has_list && !is_named(nic->name, name, list))
                continue;
            if (port.usable == NETWORK_USABLE)
                network->ports[network->n_ports++] = name;
            else if (!*first[port.usable].why)
                first[port.usable] =
                    (struct verdict){port.usable, source_printf(machine->source, "%s: %s", name, port.why)};
        }
    has_refused = *first[NETWORK_NOT_USABLE].why;
    has_unknown = *first[NETWORK_NOT_KNOWN].why;
    if (network->n_ports > 0 && !(has_list && (has_refused || has_unknown)))
        return fine;
    if (has_refused && (has_list || !has_unknown))
        return first[NETWORK_NOT_USABLE];
    if (has_unknown)
        return first[NETWORK_NOT_KNOWN];
    if (*topo->not_read)
        return not_known(topo->not_read);
    return refused(
        has_list ? source_printf(machine->source, "there is no device \"%.64s\", which EPKIT_VERBS_DEVICE names", list)
                 : "there is no RDMA device");
}

/* EPKIT_VERBS_GID_INDEX like the library: 0..255, -1: by rule. The library refuses other values. */
static struct verdict check_ports(const struct doctor_machine *machine, struct network *network)
{
    const char *text = source_env(machine->source, "EPKIT_VERBS_GID_INDEX");
    char *end;
    long index = -1;

    if (text && *text)
        index = strtol(text, &end, 10);
    if ((text && *text && (end == text || *end)) || index < -1 || index > 255)
        return refused("EPKIT_VERBS_GID_INDEX is no number of 0..255");
    return choose_ports(machine, (int)index, network);
}

/* --- other requirements of verbs --- */

static struct verdict check_library(const struct doctor_machine *machine)
{
    const struct software_verbs *verbs = &machine->software->verbs;

    if (verbs->ibverbs.state == SOURCE_OK)
        return fine;
    if (verbs->ibverbs.state == SOURCE_ABSENT)
        return refused("libibverbs.so.1 is not installed; it comes with rdma-core");
    if (verbs->ibverbs.state == SOURCE_FAILED)
        return refused(source_printf(machine->source, "%s is damaged", verbs->ibverbs.path));
    return not_known(source_printf(machine->source, "libibverbs.so.1: %s", machine_reason(verbs->ibverbs.state, NULL)));
}

static struct verdict check_memory(const struct doctor_machine *machine)
{
    long long bytes = machine_memlock(machine);

    if (bytes == MACHINE_MEMLOCK_UNLIMITED || bytes > PEER_BYTES)
        return fine;
    if (bytes == MACHINE_MEMLOCK_UNKNOWN)
        return not_known("how much memory the process may lock: not in /proc/self/limits");
    return refused(source_printf(machine->source,
                                 "the process may lock %lld KiB of memory (ulimit -l), and a peer takes more than %lld",
                                 bytes / 1024, PEER_BYTES / 1024));
}

/* Not usable takes precedence over not known; of equal results the first one counts. */
static void check_verbs(const struct doctor_machine *machine, struct network *network)
{
    const struct verdict verdicts[] = {check_ports(machine, network), check_library(machine), check_memory(machine)};
    struct verdict worst = fine;

    for (size_t i = 0; i < COUNT(verdicts); i++)
        if (worst.usable == NETWORK_USABLE ||
            (worst.usable == NETWORK_NOT_KNOWN && verdicts[i].usable == NETWORK_NOT_USABLE))
            worst = verdicts[i];
    network->verbs = worst.usable;
    network->why = worst.why;
    if (worst.usable != NETWORK_USABLE)
        network->n_ports = 0;
}

/* --- summary --- */

/* Interfaces other than the loopback. If the driver does not report its state, the interface may be up. */
static bool find_interface(const struct doctor_machine *machine, const char **ret_why)
{
    struct source_names names = source_list(machine->source, "/sys/class/net");

    *ret_why = "there is no interface besides the loopback";
    for (size_t i = 0; i < names.n; i++) {
        struct source_text state;

        if (strcmp(names.names[i], "lo") == 0 || strcmp(names.names[i], "bonding_masters") == 0)
            continue;
        state = source_line(machine->source, "/sys/class/net/%s/operstate", names.names[i]);
        if (state.state != SOURCE_OK || strcmp(state.text, "down") != 0)
            return true;
        *ret_why = "no interface besides the loopback is up";
    }
    return names.state != SOURCE_OK;
}

/* "mlx5_0:1", or "mlx5_0:1 and 7 more" */
static const char *list_first(struct source *source, const struct network *network)
{
    if (network->n_ports == 1)
        return network->ports[0];
    return source_printf(source, "%s and %d more", network->ports[0], network->n_ports - 1);
}

/* What EPKIT_NETWORK=verbs leads to. */
static void choose_verbs(struct source *source, struct network *network)
{
    network->used = network->verbs == NETWORK_NOT_USABLE ? NULL : "verbs";
    if (network->verbs == NETWORK_NOT_USABLE)
        network->text =
            source_printf(source, "none: EPKIT_NETWORK is verbs (RDMA), which cannot be used: %s", network->why);
    else if (network->verbs == NETWORK_NOT_KNOWN)
        network->text =
            source_printf(source, "verbs (RDMA), by EPKIT_NETWORK; not known whether it can be used: %s", network->why);
    else
        network->text = source_printf(source, "verbs (RDMA), by EPKIT_NETWORK, over %s", list_first(source, network));
}

static void choose_tcp(const struct doctor_machine *machine, bool is_requested, struct network *network)
{
    struct source *source = machine->source;
    const char *why, *tcp = "tcp (sockets)";

    network->used = find_interface(machine, &why) ? "tcp" : NULL;
    if (!network->used)
        tcp = source_printf(source, "none: of tcp, %s", why);
    if (network->verbs == NETWORK_NOT_USABLE)
        network->text =
            source_printf(source, "%s; verbs (RDMA), which is faster, cannot be used: %s", tcp, network->why);
    else if (network->verbs == NETWORK_NOT_KNOWN)
        network->text = source_printf(source, "%s; not known whether verbs (RDMA), which is faster, can be used: %s",
                                      tcp, network->why);
    else
        network->text =
            source_printf(source,
                          "%s%s; verbs (RDMA), which is faster, can be used: --network verbs or "
                          "EPKIT_NETWORK=verbs, over %s",
                          tcp, is_requested ? ", by EPKIT_NETWORK" : " unless told", list_first(source, network));
}

void network_read(const struct doctor_machine *machine, struct network *ret_network)
{
    struct source *source = machine->source;
    const char *requested = source_env(source, "EPKIT_NETWORK");
    bool is_requested = requested && *requested;
    struct network network = {0};

    check_verbs(machine, &network);
    if (!is_requested || strcmp(requested, "tcp") == 0) {
        choose_tcp(machine, is_requested, &network);
    } else if (strcmp(requested, "verbs") == 0) {
        choose_verbs(source, &network);
    } else if (strcmp(requested, "emulated") == 0) {
        network.used = "emulated";
        network.text = "emulated, by EPKIT_NETWORK";
    } else {
        network.text =
            source_printf(source, "none: EPKIT_NETWORK is \"%.32s\", which is no network of epkit", requested);
    }
    *ret_network = network;
}
