/* SPDX-License-Identifier: Apache-2.0 */
#include "core/config.h"
#include "base/error.h"
#include "base/locality.h"
#include "base/log.h"

#include "core/check.h"
#include "net/net.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TIMEOUT_MS 30000
#define DEFAULT_CHANNELS 4
#define NO_NETWORK "none"

/* The value of an environment variable, NULL when it is unset or empty. */
static const char *read_env(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

static ep_status resolve_timeout(ep_comm_config *config, const char *call)
{
    const char *text = read_env("EPKIT_TIMEOUT_MS");
    int32_t requested = config->timeout_ms;
    char *end;
    long value;

    config->timeout_ms = DEFAULT_TIMEOUT_MS;
    if (requested < 0)
        return ep_fail(EP_E_ARG, "%s: timeout_ms is %d", call, requested);
    if (requested > 0) {
        config->timeout_ms = requested;
        return EP_OK;
    }
    if (!text)
        return EP_OK;
    errno = 0;
    value = strtol(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value < 1 || value > INT32_MAX)
        return ep_fail(EP_E_ARG, "%s: $EPKIT_TIMEOUT_MS is \"%.32s\", not a number of milliseconds in 1..%d", call,
                       text, INT32_MAX);
    config->timeout_ms = (int32_t)value;
    return EP_OK;
}

static ep_status resolve_flags(ep_comm_config *config, const char *call)
{
    const char *strict = read_env("EPKIT_STRICT_SMS");

    if (strict && strcmp(strict, "0") != 0 && strcmp(strict, "1") != 0)
        return ep_fail(EP_E_ARG, "%s: $EPKIT_STRICT_SMS is \"%.32s\", neither 0 nor 1", call, strict);
    if (strict && *strict == '1')
        config->flags |= EP_COMM_STRICT_SMS;
    return ep_check_flags(call, config->flags,
                          EP_COMM_CHECK_VALUES | EP_COMM_CHECK_DISTINCT | EP_COMM_STRICT_SMS | EP_COMM_DROP_ABSENT);
}

static ep_status resolve_backend(ep_comm *comm, const char *call)
{
    const char *requested = comm->config.backend;
    const char *env = read_env("EPKIT_BACKEND");

    ep_status status = ep_backend_find(requested ? requested : env, &comm->ops);

    if (status != EP_OK)
        return ep_fail_prefix(status, "%s: %s", call, !requested && env ? "$EPKIT_BACKEND: " : "");
    comm->config.backend = comm->ops->name;
    return EP_OK;
}

static ep_status resolve_network(ep_comm_config *config, const char *env, const struct ep_net_provider *brought,
                                 const char *call)
{
    const char *requested = config->network ? config->network : env;
    const struct ep_net_provider *own = requested ? ep_net_find(requested) : NULL;

    if (brought && brought->abi != EP_NET_ABI)
        return ep_fail(EP_E_ABI, "%s: the network of the bootstrap is of another build (abi %u, this library has %u)",
                       call, brought->abi, EP_NET_ABI);
    /* Static strings, because the caller's may not outlive the call. */
    if (brought && (!requested || strcmp(requested, brought->name) == 0))
        config->network = brought->name;
    else if (!requested)
        config->network = NULL; /* follows from the hosts */
    else if (own)
        config->network = own->name;
    else
        return ep_fail(
            EP_E_UNSUPPORTED,
            "%s: %snetwork \"%.32s\" is not one of \"emulated\", \"tcp\", \"verbs\"%s%s%s; the bootstrap provides %s",
            call, config->network ? "" : "$EPKIT_NETWORK: ", requested, brought ? ", \"" : "",
            brought ? brought->name : "", brought ? "\"" : "", brought ? "no other" : "none");
    return EP_OK;
}

static _Thread_local ep_net_emulation emulation_of_thread;

void ep_net_emulate(const ep_net_emulation *emulation)
{
    emulation_of_thread = emulation ? *emulation : (ep_net_emulation){.seed = 0};
}

static ep_status check_emulation(const ep_net_emulation *emulation, const char *call)
{
    EP_TRY(ep_check_range(call, "emulation.reorder", emulation->reorder, 0, 1));
    if (emulation->ring_bytes)
        EP_TRY(ep_check_range(call, "emulation.ring_bytes", emulation->ring_bytes, EP_NET_WIRE_MIN_BYTES, UINT32_MAX));
    return EP_OK;
}

static ep_status resolve_numbers(ep_comm_config *config, int nranks, const char *call)
{
    if (config->slots) {
        EP_TRY(ep_check_range(call, "slots", config->slots, nranks, EP_MAX_RANKS));
        EP_TRY(ep_check_range(call, "slot", config->slot, 0, config->slots - 1));
        nranks = config->slots;
    }
    EP_TRY(ep_check_range(call, "ranks_per_node", config->ranks_per_node, 0, nranks));
    if (config->ranks_per_node && nranks % config->ranks_per_node)
        return ep_fail(EP_E_ARG, "%s: ranks_per_node %d does not divide the %d ranks", call, config->ranks_per_node,
                       nranks);
    EP_TRY(resolve_flags(config, call));
    EP_TRY(ep_check_range(call, "channels", config->channels, 0, EP_NET_MAX_CHANNELS));
    if (!config->channels)
        config->channels = DEFAULT_CHANNELS;
    if (!config->partial_type)
        config->partial_type = EP_F32;
    if (config->partial_type != EP_F32 && config->partial_type != EP_BF16)
        return ep_fail(EP_E_ARG, "%s: partial_type is %d (%s), neither EP_F32 nor EP_BF16", call, config->partial_type,
                       ep_dtype_name((ep_dtype)config->partial_type));
    return EP_OK;
}

ep_status ep_config_resolve(ep_comm *comm, const ep_comm_config *config, const void *network, const char *call)
{
    ep_status status = EP_OK;

    comm->config = (ep_comm_config)EP_COMM_CONFIG_INIT;
    if (config)
        status =
            ep_args_load(&comm->config, sizeof(comm->config), EP_ARGS_FIRST_BYTES(ep_comm_config), config, "config");
    if (status != EP_OK) {
        comm->config.timeout_ms = DEFAULT_TIMEOUT_MS;
        return ep_fail_prefix(status, "%s: ", call);
    }
    EP_TRY(resolve_timeout(&comm->config, call));
    EP_TRY(resolve_numbers(&comm->config, comm->nranks, call));
    comm->emulation = emulation_of_thread;
    EP_TRY(check_emulation(&comm->emulation, call));
    EP_TRY(resolve_network(&comm->config, read_env("EPKIT_NETWORK"), network, call));
    return resolve_backend(comm, call);
}

const char *ep_config_network(const ep_comm *comm)
{
    return comm->nnodes > 1 ? comm->config.network : NO_NETWORK;
}

/*
 * The first data that ranks exchange. Its size and the offset of `version` never change, so that ranks with different
 * libraries can compare versions; a library that changes the rest, or the rows between nodes, changes `format`.
 */
struct digest {
    uint32_t format;
    int32_t rank;
    char version[32];
    int32_t status;         /* of this rank; unless it is EP_OK, only `reason` is valid below */
    int32_t ranks_per_node; /* 0: from the hosts */
    uint32_t flags;
    int32_t channels, partial_type;
    char backend[16], network[16]; /* network "": from the hosts */
    int32_t nodes_from;            /* NODES_*: source of ranks_per_node */
    int32_t slots, slot;           /* number of slots, and that of this rank; -1: `rank` */
    uint64_t id;                   /* of the communicator */
    union {
        char reason[400]; /* of a failure */
        struct ep_locality locality;
    };
};

enum { NODES_FROM_CONFIG, NODES_FROM_BOOT, NODES_FROM_HOSTS, NODES_FROM_GROUP };

#define DIGEST_FORMAT 4u

_Static_assert(sizeof(struct digest) == 512, "the size of the digest never changes");

static void copy_text(char *to, size_t bytes, const char *from)
{
    snprintf(to, bytes, "%s", from);
}

static void make_digest(struct digest *digest, const ep_boot *boot, const ep_comm *comm, ep_status local)
{
    *digest = (struct digest){.format = DIGEST_FORMAT, .rank = boot->rank, .status = (int32_t)local};
    digest->slot = comm && comm->config.slots ? comm->config.slot : -1;
    copy_text(digest->version, sizeof(digest->version), ep_version());
    if (local != EP_OK || !comm) {
        copy_text(digest->reason, sizeof(digest->reason), ep_last_error());
        return;
    }
    digest->slots = comm->config.slots ? comm->config.slots : boot->nranks;
    digest->id = comm->id;
    digest->ranks_per_node = comm->config.ranks_per_node;
    digest->nodes_from = comm->is_next ? NODES_FROM_GROUP : comm->boot_has_nodes ? NODES_FROM_BOOT : NODES_FROM_CONFIG;
    ep_locality_get_self(&digest->locality);
    digest->flags = comm->config.flags;
    digest->channels = comm->config.channels;
    digest->partial_type = comm->config.partial_type;
    copy_text(digest->backend, sizeof(digest->backend), comm->ops->name);
    copy_text(digest->network, sizeof(digest->network), comm->config.network ? comm->config.network : "");
}

static int slot_of(const struct digest *digest)
{
    return digest->slot < 0 ? digest->rank : digest->slot;
}

enum value_kind { VALUE_TEXT, VALUE_NUMBER, VALUE_BITS, VALUE_DTYPE };

static const struct field {
    const char *name;
    size_t offset;
    enum value_kind kind;
} fields[] = {
    {"library version", offsetof(struct digest, version), VALUE_TEXT},
    {"backend", offsetof(struct digest, backend), VALUE_TEXT},
    {"network", offsetof(struct digest, network), VALUE_TEXT},
    {"flags", offsetof(struct digest, flags), VALUE_BITS},
    {"channels", offsetof(struct digest, channels), VALUE_NUMBER},
    {"partial_type", offsetof(struct digest, partial_type), VALUE_DTYPE},
    {"slots", offsetof(struct digest, slots), VALUE_NUMBER},
};

enum { N_FIELDS = sizeof(fields) / sizeof(fields[0]) }; /* the last one before all that depends on it */

/* Values are compared by their text. */
static void print_value(const struct field *field, const struct digest *digest, char text[40])
{
    const char *value = (const char *)digest + field->offset;
    int32_t number = 0;

    if (field->kind == VALUE_TEXT) {
        snprintf(text, 40, "%.32s", value);
        return;
    }
    memcpy(&number, value, sizeof(number));
    if (field->kind == VALUE_NUMBER)
        snprintf(text, 40, "%d", number);
    else if (field->kind == VALUE_BITS)
        snprintf(text, 40, "0x%x", (uint32_t)number);
    else
        snprintf(text, 40, "%s", ep_dtype_name((ep_dtype)number));
}

/* All ranks find the first field, and in it the first rank, that differs from the first: so all have the same text. */
static ep_status compare_field(const struct field *field, const struct digest *all, int nranks, const char *call)
{
    char first[40], other[40];

    print_value(field, &all[0], first);
    for (int rank = 1; rank < nranks; rank++) {
        print_value(field, &all[rank], other);
        if (strcmp(first, other) != 0)
            return ep_fail(EP_E_MISMATCH, "%s: ranks disagree: %s is %s on rank %d and %s on rank %d", call,
                           field->name, first, slot_of(&all[0]), other, slot_of(&all[rank]));
    }
    return EP_OK;
}

static ep_status compare_nodes(const struct digest *all, int nranks, const char *call)
{
    static const char *const from[] = {"", " by its bootstrap", " by the hosts", " in its group"};

    for (int rank = 1; rank < nranks; rank++)
        if (all[rank].ranks_per_node != all[0].ranks_per_node)
            return ep_fail(EP_E_MISMATCH, "%s: ranks disagree: ranks_per_node is %d%s on rank %d and %d%s on rank %d",
                           call, all[0].ranks_per_node, from[all[0].nodes_from], slot_of(&all[0]),
                           all[rank].ranks_per_node, from[all[rank].nodes_from], slot_of(&all[rank]));
    return EP_OK;
}

static bool are_apart(const struct ep_locality *a, const struct ep_locality *b)
{
    return ep_locality_is_known(a) && ep_locality_is_known(b) && !ep_locality_is_shared(a, b);
}

/* Do all ranks share one host, as far as is known? */
static bool is_one_host(const struct digest *all, int nranks)
{
    for (int a = 0; a < nranks; a++)
        for (int b = a + 1; b < nranks; b++)
            if (are_apart(&all[a].locality, &all[b].locality))
                return false;
    return true;
}

/* New members take what those have that are members already. */
static void take_from_group(struct digest *all, int nranks)
{
    const struct digest *member = NULL;

    for (int rank = 0; rank < nranks && !member; rank++)
        if (all[rank].nodes_from == NODES_FROM_GROUP)
            member = &all[rank];
    for (int rank = 0; member && rank < nranks; rank++) {
        if (!all[rank].ranks_per_node)
            all[rank].ranks_per_node = member->ranks_per_node;
        if (!all[rank].network[0])
            memcpy(all[rank].network, member->network, sizeof(all[rank].network));
    }
}

/* Fills in what follows from the hosts, with the same result on all ranks. The hosts of absent ranks are not known. */
static ep_status find_nodes(struct digest *all, int nranks, const char *call)
{
    bool one_host = is_one_host(all, nranks), all_present = all[0].slots == nranks;
    char why[EP_ERROR_TEXT_BYTES];
    int found = 0;

    take_from_group(all, nranks);
    for (int rank = 0; rank < nranks; rank++) {
        if (all[rank].ranks_per_node)
            continue;
        if (!found)
            found = one_host      ? all[0].slots
                    : all_present ? ep_locality_find_nodes(&all[0].locality, sizeof(all[0]), nranks, why)
                                  : 0;
        if (!found && !all_present)
            return ep_fail(EP_E_UNSUPPORTED, "%s: of %d slots on several hosts %d have members: set ranks_per_node",
                           call, all[0].slots, nranks);
        if (!found)
            return ep_fail(
                EP_E_ARG,
                "%s: the hosts of the ranks do not form equal nodes: %s: start the same number on each host, "
                "with consecutive numbers, or set ranks_per_node (1: each rank is its own node)",
                call, why);
        all[rank].ranks_per_node = found;
        all[rank].nodes_from = NODES_FROM_HOSTS;
    }
    EP_TRY(compare_nodes(all, nranks, call));
    for (int rank = 0; rank < nranks; rank++)
        if (all[rank].ranks_per_node == all[rank].slots)
            copy_text(all[rank].network, sizeof(all[rank].network), NO_NETWORK);
        else if (!all[rank].network[0])
            copy_text(all[rank].network, sizeof(all[rank].network), one_host ? ep_net_emulated.name : ep_net_tcp.name);
    return EP_OK;
}

/* Each slot has one member at most. The text is the same on all ranks. */
static ep_status check_slots(const struct digest *all, int nranks, const char *call)
{
    int member[EP_MAX_RANKS] = {0};

    for (int rank = 0; rank < nranks; rank++) {
        int slot = slot_of(&all[rank]);

        if (slot < 0 || slot >= all[rank].slots || all[rank].slots > EP_MAX_RANKS)
            return ep_fail(EP_E_MISMATCH, "%s: what rank %d of the bootstrap has published is damaged: slot %d of %d",
                           call, rank, slot, all[rank].slots);
        if (member[slot])
            return ep_fail(EP_E_MISMATCH, "%s: ranks %d and %d of the bootstrap both have slot %d", call,
                           member[slot] - 1, rank, slot);
        member[slot] = 1 + rank;
    }
    return EP_OK;
}

/*
 * Rows travel between nodes from each rank to the rank with the same place on the other node, which places them there:
 * so each node that has members must have them at the same places.
 */
static ep_status check_rails(const struct digest *all, int nranks, const char *call)
{
    int per_node = all[0].ranks_per_node, nnodes = all[0].slots / per_node, first = slot_of(&all[0]) / per_node;
    bool present[EP_MAX_RANKS] = {false}, used[EP_MAX_RANKS] = {false};

    if (all[0].slots % per_node)
        return ep_fail(EP_E_ARG, "%s: ranks_per_node %d does not divide the %d slots", call, per_node, all[0].slots);
    for (int rank = 0; rank < nranks; rank++) {
        present[slot_of(&all[rank])] = true;
        used[slot_of(&all[rank]) / per_node] = true;
    }
    for (int node = 0; node < nnodes; node++)
        for (int place = 0; used[node] && place < per_node; place++)
            if (present[node * per_node + place] != present[first * per_node + place])
                return ep_fail(EP_E_UNSUPPORTED,
                               "%s: of the ranks %d and %d, which have the same place on their nodes, one is absent: "
                               "leave out both, or use ranks_per_node 1",
                               call, first * per_node + place, node * per_node + place);
    return EP_OK;
}

static int by_slot(const void *a, const void *b)
{
    return slot_of(a) - slot_of(b);
}

/* All that agree: sorted by their slots afterwards. */
static ep_status compare(struct digest *all, int nranks, const char *call)
{
    EP_TRY(compare_field(&fields[0], all, nranks, call));
    for (int rank = 0; rank < nranks; rank++) {
        if (all[rank].format != DIGEST_FORMAT)
            return ep_fail(EP_E_MISMATCH, "%s: rank %d has another build of version %s", call, rank, ep_version());
        if (all[rank].rank != rank)
            return ep_fail(EP_E_MISMATCH,
                           "%s: the bootstrap's all-gather has the block of rank %d in place of that of rank %d", call,
                           all[rank].rank, rank);
    }
    for (int rank = 0; rank < nranks; rank++)
        if (all[rank].status != EP_OK && !ep_status_is_failure(all[rank].status))
            return ep_fail(EP_E_MISMATCH, "%s: what rank %d has published is damaged: status %d", call, rank,
                           all[rank].status);
        else if (all[rank].status != EP_OK)
            return ep_fail((ep_status)all[rank].status, "%s: rank %d failed: %.*s", call, slot_of(&all[rank]),
                           (int)sizeof(all[rank].reason), all[rank].reason);
        else if (all[rank].nodes_from < NODES_FROM_CONFIG || all[rank].nodes_from > NODES_FROM_GROUP ||
                 all[rank].ranks_per_node < 0 || all[rank].ranks_per_node > EP_MAX_RANKS)
            return ep_fail(EP_E_MISMATCH, "%s: what rank %d has published is damaged: ranks_per_node %d", call, rank,
                           all[rank].ranks_per_node);
    EP_TRY(compare_field(&fields[1], all, nranks, call));
    EP_TRY(compare_field(&fields[N_FIELDS - 1], all, nranks, call));
    EP_TRY(check_slots(all, nranks, call));
    qsort(all, (size_t)nranks, sizeof(*all), by_slot); /* nodes are slots that follow each other */
    EP_TRY(find_nodes(all, nranks, call));
    EP_TRY(check_rails(all, nranks, call));
    for (size_t i = 2; i < N_FIELDS - 1; i++)
        EP_TRY(compare_field(&fields[i], all, nranks, call));
    return EP_OK;
}

/* Copies the agreed values into this rank's communicator. */
static void apply_agreed(ep_comm *comm, const struct digest *all, const ep_boot *boot)
{
    const struct digest *agreed = all;
    int rank, nranks = all[0].slots;

    while (agreed->rank != boot->rank)
        agreed++;
    rank = slot_of(agreed);
    comm->rank = comm->config.slot = rank;
    comm->nranks = comm->config.slots = nranks;
    comm->n_members = boot->nranks;
    memset(comm->members, 0, sizeof(comm->members));
    for (int i = 0; i < boot->nranks; i++) {
        int slot = slot_of(&all[i]);

        comm->slot_of[all[i].rank] = (int16_t)slot;
        comm->id_of[slot] = all[i].id;
        comm->members[slot / 64] |= UINT64_C(1) << (slot % 64);
    }
    comm->ranks_per_node = comm->config.ranks_per_node = agreed->ranks_per_node;
    comm->node = rank / comm->ranks_per_node;
    comm->nnodes = nranks / comm->ranks_per_node;
    if (!comm->config.network) {
        const struct ep_net_provider *found = ep_net_find(agreed->network);

        comm->config.network = found ? found->name : ep_net_emulated.name;
    }
}

/* Containers of one machine that each have a PID namespace: the lowest rank there says it, since no status tells it. */
static void warn_if_apart(const ep_comm *comm, const struct digest *all, const struct ep_locality *mine)
{
    int apart = -1;

    for (int i = 0; i < comm->n_members; i++) {
        int slot = slot_of(&all[i]);

        if (memcmp(mine->host, all[i].locality.host, sizeof(mine->host)) != 0)
            continue;
        if (slot < comm->rank)
            return;
        if (apart < 0 && are_apart(mine, &all[i].locality) && slot / comm->ranks_per_node != comm->node)
            apart = slot;
    }
    if (apart >= 0)
        ep_log(EP_LOG_WARNING,
               "rank %d of %d: rank %d is on this machine, but reached by network %s, since they are in two PID "
               "namespaces: in one (hostPID; in one pod shareProcessNamespace) they can share memory, as one node",
               comm->rank, comm->nranks, apart, ep_config_network(comm));
}

ep_status ep_config_agree(const ep_boot *boot, ep_comm *comm, ep_status local, const char *call)
{
    struct digest mine, *all;
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status;

    copy_text(text, sizeof(text), ep_last_error());
    make_digest(&mine, boot, comm, local);
    all = calloc((size_t)boot->nranks, sizeof(*all));
    if (!all)
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d ranks", call, boot->nranks);
    status =
        boot->allgather(boot->context, &mine, sizeof(mine), comm ? comm->config.timeout_ms : DEFAULT_TIMEOUT_MS, all);
    if (status == EP_OK)
        status = compare(all, boot->nranks, call);
    if (local == EP_OK && status == EP_OK) {
        apply_agreed(comm, all, boot);
        warn_if_apart(comm, all, &mine.locality);
    }
    if (local != EP_OK || status == EP_OK)
        status = ep_fail(local, "%s", text);
    free(all);
    return status;
}
