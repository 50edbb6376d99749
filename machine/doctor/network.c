/* SPDX-License-Identifier: Apache-2.0 */
#include "network.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>

#define AMAZON 0x1d0f

/*
 * A rail peer needs four channels, each with a ring of 1 MiB on both sides. With a limit below that, the other buffers
 * do not fit either.
 */
#define PEER_BYTES (8LL << 20)

/* A port of an RDMA device and the library's decision about it. */
struct port {
    const char *device, *name;
    enum network_usable usable;
    const char *why;
};

struct ports {
    const struct doctor_machine *machine;
    int gid_index; /* from EPKIT_VERBS_GID_INDEX; -1: by rule */
    int n;
    struct port all[NETWORK_PORTS_MAX];
};

static enum network_usable network_refuse(const char **ret_why, const char *why)
{
    *ret_why = why;
    return NETWORK_NOT_USABLE;
}

static enum network_usable not_known(const char **ret_why, const char *why)
{
    *ret_why = why;
    return NETWORK_NOT_KNOWN;
}

/* --- ports --- */

static enum network_usable check_gids(const struct ports *ports, const struct topo_port *port, const char **ret_why)
{
    struct source *source = ports->machine->source;

    if (port->gids_state != SOURCE_OK)
        return not_known(ret_why, source_printf(source, "its addresses: %s", machine_reason(port->gids_state, NULL)));
    for (int i = 0; i < port->n_gids; i++)
        if (ports->gid_index >= 0 ? port->gids[i].index == ports->gid_index : port->gids[i].type == TOPO_GID_ROCE2)
            return NETWORK_USABLE;
    if (ports->gid_index >= 0)
        return network_refuse(
            ret_why,
            source_printf(source, "no address at index %d, which EPKIT_VERBS_GID_INDEX names", ports->gid_index));
    return network_refuse(ret_why, "no RoCE v2 address of an interface in this network namespace");
}

static enum network_usable check_port(const struct ports *ports, const struct topo_nic *nic,
                                      const struct topo_port *port, const char **ret_why)
{
    const struct topo *topo = ports->machine->topo;
    struct source *source = ports->machine->source;

    *ret_why = "";
    if (nic->access == TOPO_ACCESS_NO)
        return network_refuse(ret_why, nic->access_why);
    if (nic->pci >= 0 && topo->pci[nic->pci].vendor == AMAZON)
        return network_refuse(ret_why, "EFA has no reliable connections, which verbs is built on");
    if (!port->active && !machine_knows_port_state(port))
        return not_known(ret_why, "the state of the port could not be read");
    if (!port->active)
        return network_refuse(ret_why, source_printf(source, "the port is %s", topo_port_state_name(port->state)));
    if (port->link_layer == TOPO_LINK_UNKNOWN)
        return not_known(ret_why, "its link layer could not be read");
    if (nic->access == TOPO_ACCESS_UNKNOWN)
        return not_known(ret_why, source_printf(source, "whether %s may be opened",
                                                *nic->uverbs ? nic->uverbs : "its device in /dev/infiniband"));
    return port->link_layer == TOPO_LINK_ETHERNET ? check_gids(ports, port, ret_why) : NETWORK_USABLE;
}

static int compare_ports(const void *a, const void *b)
{
    return strverscmp(((const struct port *)a)->name, ((const struct port *)b)->name);
}

static void list_ports(struct ports *ports)
{
    const struct topo *topo = ports->machine->topo;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports; p++) {
            struct port *port = &ports->all[ports->n++];

            port->device = topo->nics[i].name;
            port->name = machine_port_name(ports->machine, i, p);
            port->usable = check_port(ports, &topo->nics[i], &topo->nics[i].ports[p], &port->why);
        }
    qsort(ports->all, (size_t)ports->n, sizeof(ports->all[0]), compare_ports);
}

/* Is it an entry of EPKIT_VERBS_DEVICE, "NAME" or "NAME:PORT"? */
static bool is_named(const struct port *port, const char *list)
{
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        size_t n = strcspn(at, ",");

        if ((strlen(port->device) == n && strncmp(port->device, at, n) == 0) ||
            (strlen(port->name) == n && strncmp(port->name, at, n) == 0))
            return true;
    }
    return false;
}

/* Ports in a list must be usable; without a list, unusable ports are left out. */
static enum network_usable choose_ports(const struct ports *ports, struct network *network, const char **ret_why)
{
    const struct topo *topo = ports->machine->topo;
    struct source *source = ports->machine->source;
    const char *list = source_env(source, "EPKIT_VERBS_DEVICE");
    const struct port *unknown = NULL, *refused = NULL;

    if (list && !*list)
        list = NULL;
    for (int i = 0; i < ports->n; i++) {
        const struct port *port = &ports->all[i];

        if (list && !is_named(port, list))
            continue;
        if (port->usable == NETWORK_USABLE)
            network->ports[network->n_ports++] = port->name;
        else if (port->usable == NETWORK_NOT_KNOWN && !unknown)
            unknown = port;
        else if (port->usable == NETWORK_NOT_USABLE && !refused)
            refused = port;
    }
    if (network->n_ports > 0 && !(list && (refused || unknown)))
        return NETWORK_USABLE;
    if (list && refused)
        return network_refuse(ret_why, source_printf(source, "%s: %s", refused->name, refused->why));
    if (unknown)
        return not_known(ret_why, source_printf(source, "%s: %s", unknown->name, unknown->why));
    if (refused)
        return network_refuse(ret_why, source_printf(source, "%s: %s", refused->name, refused->why));
    if (*topo->not_read)
        return not_known(ret_why, topo->not_read);
    if (list)
        return network_refuse(
            ret_why, source_printf(source, "there is no device \"%.64s\", which EPKIT_VERBS_DEVICE names", list));
    return network_refuse(ret_why, "there is no RDMA device");
}

/* --- other requirements of verbs --- */

static enum network_usable check_library(const struct doctor_machine *machine, const char **ret_why)
{
    const struct software_verbs *verbs = &machine->software->verbs;

    if (verbs->ibverbs.state == SOURCE_ABSENT)
        return network_refuse(ret_why, "libibverbs.so.1 is not installed; it comes with rdma-core");
    if (verbs->ibverbs.state == SOURCE_FAILED)
        return network_refuse(ret_why, source_printf(machine->source, "%s is damaged", verbs->ibverbs.path));
    if (verbs->ibverbs.state != SOURCE_OK)
        return not_known(
            ret_why, source_printf(machine->source, "libibverbs.so.1: %s", machine_reason(verbs->ibverbs.state, NULL)));
    return NETWORK_USABLE;
}

static enum network_usable check_memory(const struct doctor_machine *machine, const char **ret_why)
{
    long long bytes = machine_memlock(machine);

    if (bytes == MACHINE_MEMLOCK_UNLIMITED || bytes > PEER_BYTES)
        return NETWORK_USABLE;
    if (bytes == MACHINE_MEMLOCK_UNKNOWN)
        return not_known(ret_why, "how much memory the process may lock: not in /proc/self/limits");
    return network_refuse(
        ret_why, source_printf(machine->source,
                               "the process may lock %lld KiB of memory (ulimit -l), and a peer takes more than %lld",
                               bytes / 1024, PEER_BYTES / 1024));
}

/* Like the library: 0..255, -1: by rule. The library refuses other values. */
static bool read_gid_index(struct source *source, int *ret_index)
{
    const char *text = source_env(source, "EPKIT_VERBS_GID_INDEX");
    long value;
    char *end;

    *ret_index = -1;
    if (!text || !*text)
        return true;
    value = strtol(text, &end, 10);
    if (end == text || *end || value < -1 || value > 255)
        return false;
    *ret_index = (int)value;
    return true;
}

/* Merges a result: not usable takes precedence over not known; of equal results the first one is kept. */
static void merge_state(struct network *network, enum network_usable usable, const char *why)
{
    if (usable == NETWORK_USABLE || network->verbs == NETWORK_NOT_USABLE ||
        (network->verbs == NETWORK_NOT_KNOWN && usable == NETWORK_NOT_KNOWN))
        return;
    network->verbs = usable;
    network->why = why;
}

static void check_ports(const struct doctor_machine *machine, struct network *network)
{
    struct ports *ports = calloc(1, sizeof(*ports));
    enum network_usable usable;
    const char *why = "";

    if (!ports) {
        merge_state(network, NETWORK_NOT_KNOWN, "no memory");
        return;
    }
    ports->machine = machine;
    if (!read_gid_index(machine->source, &ports->gid_index)) {
        usable = network_refuse(&why, "EPKIT_VERBS_GID_INDEX is no number of 0..255");
    } else {
        list_ports(ports);
        usable = choose_ports(ports, network, &why);
    }
    merge_state(network, usable, why);
    free(ports);
}

static void check_verbs(const struct doctor_machine *machine, struct network *network)
{
    enum network_usable usable;
    const char *why = "";

    network->verbs = NETWORK_USABLE;
    check_ports(machine, network);
    usable = check_library(machine, &why);
    merge_state(network, usable, why);
    usable = check_memory(machine, &why);
    merge_state(network, usable, why);
    if (network->verbs != NETWORK_USABLE)
        network->n_ports = 0;
}

/* --- summary --- */

/* Interfaces other than the loopback. If the driver does not report its state, the interface may be up. */
static bool find_interface(const struct doctor_machine *machine, const char **ret_why)
{
    struct source_names names = source_list(machine->source, "/sys/class/net");
    int n_down = 0;

    *ret_why = "";
    if (names.state != SOURCE_OK)
        return true;
    for (size_t i = 0; i < names.n; i++) {
        struct source_text state;

        if (strcmp(names.names[i], "lo") == 0 || strcmp(names.names[i], "bonding_masters") == 0)
            continue;
        state = source_line(machine->source, "/sys/class/net/%s/operstate", names.names[i]);
        if (state.state != SOURCE_OK || strcmp(state.text, "down") != 0)
            return true;
        n_down++;
    }
    *ret_why = n_down > 0 ? "no interface besides the loopback is up" : "there is no interface besides the loopback";
    return false;
}

/* "mlx5_0:1", or "mlx5_0:1 and 7 more" */
static const char *list_first(struct source *source, const struct network *network)
{
    if (network->n_ports == 1)
        return network->ports[0];
    return source_printf(source, "%s and %d more", network->ports[0], network->n_ports - 1);
}

/* What EPKIT_NETWORK=verbs leads to. */
static const char *describe_verbs(struct source *source, const struct network *network)
{
    if (network->verbs == NETWORK_NOT_USABLE)
        return source_printf(source, "none: EPKIT_NETWORK is verbs (RDMA), which cannot be used: %s", network->why);
    if (network->verbs == NETWORK_NOT_KNOWN)
        return source_printf(source, "verbs (RDMA), by EPKIT_NETWORK; not known whether it can be used: %s",
                             network->why);
    return source_printf(source, "verbs (RDMA), by EPKIT_NETWORK, over %s", list_first(source, network));
}

/* The network that a group would get. */
static const char *find_used(struct source *source, const struct network *network)
{
    const char *requested = source_env(source, "EPKIT_NETWORK");

    if (!requested || !*requested || strcmp(requested, "tcp") == 0)
        return network->has_tcp ? "tcp" : NULL;
    if (strcmp(requested, "verbs") == 0)
        return network->verbs == NETWORK_NOT_USABLE ? NULL : "verbs";
    return strcmp(requested, "emulated") == 0 ? "emulated" : NULL;
}

static const char *network_describe(struct source *source, const struct network *network)
{
    const char *tcp = network->has_tcp ? "tcp (sockets)" : source_printf(source, "none: of tcp, %s", network->tcp);
    const char *requested = source_env(source, "EPKIT_NETWORK");
    bool is_tcp = requested && strcmp(requested, "tcp") == 0;

    if (requested && strcmp(requested, "verbs") == 0)
        return describe_verbs(source, network);
    if (requested && *requested && !is_tcp)
        return network->used
                   ? source_printf(source, "%s, by EPKIT_NETWORK", network->used)
                   : source_printf(source, "none: EPKIT_NETWORK is \"%.32s\", which is no network of epkit", requested);
    if (network->verbs == NETWORK_NOT_USABLE)
        return source_printf(source, "%s; verbs (RDMA), which is faster, cannot be used: %s", tcp, network->why);
    if (network->verbs == NETWORK_NOT_KNOWN)
        return source_printf(source, "%s; not known whether verbs (RDMA), which is faster, can be used: %s", tcp,
                             network->why);
    return source_printf(source,
                         "%s%s; verbs (RDMA), which is faster, can be used: --network verbs or EPKIT_NETWORK=verbs, "
                         "over %s",
                         tcp, is_tcp ? ", by EPKIT_NETWORK" : " unless told", list_first(source, network));
}

void network_read(const struct doctor_machine *machine, struct network *ret_network)
{
    struct network network = {.tcp = "", .why = ""};

    network.has_tcp = find_interface(machine, &network.tcp);
    check_verbs(machine, &network);
    network.used = find_used(machine->source, &network);
    network.text = network_describe(machine->source, &network);
    *ret_network = network;
}
