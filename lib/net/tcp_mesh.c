/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each rank listens on a port of its own and publishes its addresses by the boot's all-gather. The rank of the higher
 * node connects, trying one address after the other, until the handshake with the right rank succeeds. A second
 * all-gather confirms that all ranks have all their connections.
 */
#include "net/tcp_internal.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/fd.h"
#include "base/process.h"
#include "tcp/acceptor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RETRY_NS 50000000u
#define POLL_MOST_MS 50
/* File descriptors in addition to the connections: the listener, and a rejected connection. */
#define DESCRIPTORS 2

struct hello {
    struct ep_net_hello common;
    unsigned char random[32];
    char host[40];
    int32_t n_addresses, unused;
    struct tcp_address addresses[TCP_ADDRESSES];
};

/* A connection that this rank makes. */
struct connector {
    int slot;
    int rank, next; /* the peer, and the index of its address to try next */
    bool under_way, done;
    int lack; /* errno of an attempt that failed because this rank lacks descriptors or memory; 0: none */
    uint64_t retry_ns;
    struct tcp_handshake hs;
    char why[TCP_WHY_BYTES + TCP_ADDRESS_TEXT + 4];
};

struct mesh {
    const struct ep_net_params *params;
    const struct ep_net_tcp_context *context;
    struct tcp_net *t;
    struct tcp_acceptor acceptor;
    struct tcp_key key; /* of this endpoint */
    uint64_t session;
    struct tcp_address from; /* local address of outgoing connections; family 0: any */
    int n_slots, per_peer;   /* connections, also of one peer: channels first, the control link last */
    struct hello *all;       /* [R] */
    int accept_error;        /* errno of the last connection that could not be accepted, 0: none */
    uint64_t deadline_ns;
    struct connector *connectors;
    int n_connectors;
    struct pollfd *polls;
};

static int rank_of_slot(const struct mesh *mesh, int slot)
{
    return ep_net_rail(&mesh->t->net, ep_net_peer(mesh->t->net.node, slot / mesh->per_peer));
}

static bool is_link(const struct mesh *mesh, int slot)
{
    return slot % mesh->per_peer == mesh->params->channels;
}

static int *fd_of_slot(const struct mesh *mesh, int slot)
{
    int peer = slot / mesh->per_peer, channel = slot % mesh->per_peer;

    return is_link(mesh, slot) ? &mesh->t->links[peer] : &mesh->t->conns[peer * mesh->params->channels + channel].fd;
}

static bool is_missing(const struct mesh *mesh, int slot)
{
    return *fd_of_slot(mesh, slot) < 0 && ep_net_is_connected(mesh->params, rank_of_slot(mesh, slot));
}

static void set_conn(struct mesh *mesh, int slot, int fd, const struct tcp_address *remote)
{
    int *old = fd_of_slot(mesh, slot);

    if (*old >= 0)
        close(*old); /* the peer has closed that one and retries */
    *old = fd;
    if (!is_link(mesh, slot))
        mesh->t->conns[slot / mesh->per_peer * mesh->params->channels + slot % mesh->per_peer].remote = *remote;
}

/* --- addresses --- */

static void add_address(struct hello *mine, const struct tcp_address *address, uint16_t port)
{
    struct tcp_address full = *address;

    full.port = port;
    full.scope = 0; /* the index of an interface is valid on its own host only */
    for (int i = 0; i < mine->n_addresses; i++)
        if (tcp_address_same_host(&mine->addresses[i], address))
            return;
    if (mine->n_addresses < TCP_ADDRESSES)
        mine->addresses[mine->n_addresses++] = full;
}

/* The address of the bootstrap is first, because it is known to work; loopback is last, for ranks of this host. */
static ep_status find_addresses(struct mesh *mesh, struct hello *mine)
{
    const char *wanted = *mesh->context->interface ? mesh->context->interface : NULL;
    const struct tcp_address *local = &mesh->context->local;
    struct tcp_address found[TCP_ADDRESSES];
    uint16_t port = 0;
    int n = 0, fd;
    ep_status status;

    /* A host that has only link-local addresses can be reached by the address of the bootstrap. */
    status = tcp_find_interfaces(wanted, tcp_address_is_loopback(local) ? NULL : local, found, &n);
    if (status != EP_OK && (wanted || !local->family))
        return status;
    if (wanted)
        mesh->from = found[0];
    EP_TRY(tcp_listen(wanted && n == 1 ? &found[0] : NULL, 0, &fd, &port));
    tcp_acceptor_open(&mesh->acceptor, fd, &mesh->key);
    if (!wanted && local->family && !tcp_address_is_loopback(local))
        add_address(mine, local, port);
    for (int loopback = 0; loopback < 2; loopback++)
        for (int i = 0; i < n; i++)
            if (tcp_address_is_loopback(&found[i]) == (loopback == 1))
                add_address(mine, &found[i], port);
    return EP_OK;
}

/* --- hellos --- */

static ep_status agree(struct mesh *mesh, struct hello *mine, ep_status status)
{
    EP_TRY(ep_net_exchange_hello(ep_net_tcp.name, mesh->params, status, mine, sizeof(*mine), mesh->all));
    for (int rank = 0; rank < mesh->params->nranks; rank++)
        if (mesh->all[rank].n_addresses < 0 || mesh->all[rank].n_addresses > TCP_ADDRESSES)
            return ep_fail(EP_E_MISMATCH, "network tcp: what rank %d has published is damaged: %d addresses", rank,
                           mesh->all[rank].n_addresses);
    return EP_OK;
}

/* Link-local addresses are on the link of the bootstrap; each host has its own index for that interface. */
static void complete_addresses(struct mesh *mesh)
{
    uint32_t scope = mesh->from.scope ? mesh->from.scope : mesh->context->local.scope;

    for (int rank = 0; rank < mesh->params->nranks; rank++)
        for (int i = 0; i < mesh->all[rank].n_addresses; i++)
            if (tcp_address_is_link_local(&mesh->all[rank].addresses[i]))
                mesh->all[rank].addresses[i].scope = scope;
}

/* Derives the key of this endpoint from random bytes of all ranks, so that connections of another endpoint fail. */
static ep_status make_key(struct mesh *mesh)
{
    size_t n = (size_t)mesh->params->nranks, bytes = sizeof(mesh->all[0].random);
    unsigned char *random = malloc(n * bytes), digest[EP_SHA256_BYTES];
    struct ep_sha256_piece piece = {random, n * bytes};
    struct tcp_key *key = &mesh->key;

    if (!random)
        return ep_fail(EP_E_MEMORY, "network tcp: no memory for %zu ranks", n);
    for (size_t rank = 0; rank < n; rank++)
        memcpy(random + rank * bytes, mesh->all[rank].random, bytes);
    ep_hmac_sha256(mesh->context->key.bytes, sizeof(mesh->context->key.bytes), &piece, 1, key->bytes);
    ep_hmac_sha256(key->bytes, sizeof(key->bytes), &piece, 1, digest);
    memcpy(&mesh->session, digest, sizeof(mesh->session));
    mesh->acceptor.key = *key;
    free(random);
    return EP_OK;
}

/* --- connecting --- */

static ep_status check_conn(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    const struct mesh *mesh = context;
    const struct tcp_hello *hello = &hs->hello;
    const struct ep_net_params *params = mesh->params;

    snprintf(ret_reason, bytes, "rank %d did not expect such a connection of rank %d", params->rank, hello->rank);
    if (hello->session != mesh->session || hello->to != params->rank || hello->rank < 0 ||
        hello->rank >= params->nranks ||
        hello->rank % params->ranks_per_node != params->rank % params->ranks_per_node ||
        hello->rank / params->ranks_per_node <= mesh->t->net.node || !ep_net_is_connected(mesh->params, hello->rank))
        return EP_E_MISMATCH;
    if (hello->kind == TCP_STREAM && hello->detail < (uint32_t)params->channels)
        return EP_OK;
    return hello->kind == TCP_LINK && mesh->per_peer > params->channels && hello->detail == (uint32_t)params->channels
               ? EP_OK
               : EP_E_MISMATCH;
}

static void add_conn(void *context, const struct tcp_handshake *hs, int fd)
{
    struct mesh *mesh = context;
    int peer = ep_net_peer_index(mesh->t->net.node, hs->hello.rank / mesh->params->ranks_per_node);

    set_conn(mesh, peer * mesh->per_peer + (int)hs->hello.detail, fd, &hs->from);
}

/* Loopback is usable only between ranks of one host. */
static bool is_usable_address(const struct mesh *mesh, const struct hello *theirs, const struct tcp_address *address)
{
    const struct hello *mine = &mesh->all[mesh->params->rank];

    return !tcp_address_is_loopback(address) ||
           (mine->host[0] && memcmp(mine->host, theirs->host, sizeof(mine->host)) == 0);
}

static void start_connector(struct mesh *mesh, struct connector *connector)
{
    const struct hello *theirs = &mesh->all[connector->rank];
    uint64_t now = ep_now_ns(), share;
    const struct tcp_hello hello = {.kind = is_link(mesh, connector->slot) ? TCP_LINK : TCP_STREAM,
                                    .rank = mesh->params->rank,
                                    .to = connector->rank,
                                    .detail = (uint32_t)(connector->slot % mesh->per_peer),
                                    .session = mesh->session};
    const struct tcp_address *address;
    int fd;

    if (now < connector->retry_ns)
        return;
    if (connector->next >= theirs->n_addresses) {
        connector->next = 0;
        connector->retry_ns = now + RETRY_NS;
        return;
    }
    address = &theirs->addresses[connector->next++];
    if (!is_usable_address(mesh, theirs, address))
        return;
    share = (mesh->deadline_ns > now ? mesh->deadline_ns - now : 0) / (uint64_t)theirs->n_addresses;
    if (tcp_connect(address, &mesh->from, &fd) != EP_OK) {
        if (tcp_is_exhausted(errno))
            connector->lack = errno;
        snprintf(connector->why, sizeof(connector->why), "%.*s", TCP_WHY_BYTES - 1, ep_last_error());
        return;
    }
    tcp_set_options(fd, mesh->params->timeout_ms);
    tcp_handshake_connect(&connector->hs, fd, &mesh->key, &hello, address, now + share);
    connector->under_way = true;
}

static void step_connector(struct mesh *mesh, struct connector *connector)
{
    enum tcp_handshake_result result;
    char at[TCP_ADDRESS_TEXT];

    if (connector->done)
        return;
    if (!connector->under_way)
        start_connector(mesh, connector);
    if (!connector->under_way)
        return;
    result = tcp_handshake_step(&connector->hs);
    if (result == TCP_HANDSHAKE_PENDING)
        return;
    connector->under_way = false;
    connector->done = result == TCP_HANDSHAKE_DONE;
    if (connector->done) {
        set_conn(mesh, connector->slot, connector->hs.fd, &connector->hs.from);
    } else {
        tcp_address_print(&connector->hs.from, at);
        snprintf(connector->why, sizeof(connector->why), "%s: %s", at, connector->hs.why);
    }
}

static int count_missing(const struct mesh *mesh)
{
    return COUNT_OF(slot, mesh->n_slots, is_missing(mesh, slot));
}

static ep_status fail_late(const struct mesh *mesh)
{
    const struct connector *late = NULL;
    int timeout_ms = mesh->params->timeout_ms / 2;

    /* First what this rank lacks, which is the reason for all else. Peers may be waiting in the backlog. */
    if (mesh->accept_error)
        return ep_fail_errno(EP_E_SYSTEM, mesh->accept_error, "network tcp: rank %d cannot accept connections",
                             mesh->params->rank);
    FOR_EACH (connector, mesh->connectors, mesh->n_connectors) {
        if (!connector->done && connector->lack)
            return ep_fail_errno(EP_E_SYSTEM, connector->lack,
                                 "network tcp: rank %d has no socket to connect to rank %d", mesh->params->rank,
                                 connector->rank);
        if (!connector->done && !late)
            late = connector;
    }
    if (late)
        return ep_fail(EP_E_TIMEOUT, "network tcp: rank %d could not connect to rank %d within %d ms: %s",
                       mesh->params->rank, late->rank, timeout_ms,
                       *late->why ? late->why : "no address of that rank can be reached from here");
    for (int slot = 0; slot < mesh->n_slots; slot++)
        if (is_missing(mesh, slot))
            return ep_fail(EP_E_TIMEOUT, "network tcp: rank %d did not connect to rank %d within %d ms%s%s",
                           rank_of_slot(mesh, slot), mesh->params->rank, timeout_ms,
                           mesh->acceptor.dropped ? "; the last connection that was rejected: " : "",
                           mesh->acceptor.last_drop);
    return EP_OK;
}

/* Not at each call: one check may have to poll as many descriptors as there are ranks. */
ep_status ep_net_tcp_check_ranks(struct ep_net_tcp_watch *watch)
{
    const struct ep_net_tcp_context *context = watch->context;
    uint64_t now = ep_now_ns();

    if (now < watch->next_ns)
        return EP_OK;
    watch->next_ns = now + POLL_MOST_MS * UINT64_C(1000000);
    if (watch->params->check)
        EP_TRY(watch->params->check(watch->params->wake_context));
    return context && context->check ? context->check(context->check_context) : EP_OK;
}

static ep_status connect_all(struct mesh *mesh)
{
    struct ep_net_tcp_watch watch = {.params = mesh->params, .context = mesh->context};

    mesh->deadline_ns = ep_deadline_ns(mesh->params->timeout_ms / 2);
    while (count_missing(mesh) > 0) {
        int n;

        EP_TRY(ep_net_tcp_check_ranks(&watch));
        if (ep_now_ns() >= mesh->deadline_ns)
            return fail_late(mesh);
        for (int i = 0; i < mesh->n_connectors; i++)
            step_connector(mesh, &mesh->connectors[i]);
        tcp_acceptor_step(&mesh->acceptor, check_conn, add_conn, mesh);
        if (mesh->acceptor.error)
            mesh->accept_error = mesh->acceptor.error;
        if (count_missing(mesh) == 0)
            break;
        n = tcp_acceptor_get_polls(&mesh->acceptor, mesh->polls);
        for (int i = 0; i < mesh->n_connectors; i++)
            if (mesh->connectors[i].under_way)
                mesh->polls[n++] = (struct pollfd){.fd = mesh->connectors[i].hs.fd,
                                                   .events = tcp_handshake_events(&mesh->connectors[i].hs)};
        (void)poll(mesh->polls, (nfds_t)n, POLL_MOST_MS);
    }
    return EP_OK;
}

/* The rank of the higher node connects. */
static void plan_connectors(struct mesh *mesh)
{
    for (int slot = 0; slot < mesh->n_slots; slot++)
        if (ep_net_peer(mesh->t->net.node, slot / mesh->per_peer) < mesh->t->net.node && is_missing(mesh, slot))
            mesh->connectors[mesh->n_connectors++] =
                (struct connector){.slot = slot, .rank = rank_of_slot(mesh, slot), .hs.fd = -1};
}

static ep_status prepare(struct mesh *mesh, struct hello *mine)
{
    size_t n = (size_t)mesh->n_slots;

    mesh->connectors = calloc(n, sizeof(*mesh->connectors));
    mesh->polls = calloc(n + TCP_ACCEPTOR_POLLS, sizeof(*mesh->polls));
    if (!mesh->connectors || !mesh->polls)
        return ep_fail(EP_E_MEMORY, "network tcp: no memory for %zu connections", n);
    EP_TRY(ep_fd_reserve("network tcp: an endpoint", count_missing(mesh) + DESCRIPTORS));
    EP_TRY(tcp_random(mine->random, sizeof(mine->random)));
    return find_addresses(mesh, mine);
}

ep_status ep_net_tcp_connect(struct tcp_net *t, const struct ep_net_params *params,
                             const struct ep_net_tcp_context *context, ep_status mine)
{
    int per_peer = params->channels + (params->block_ranks ? 0 : 1);
    struct mesh mesh = {.params = params,
                        .context = context,
                        .t = t,
                        .acceptor.fd = -1,
                        .n_slots = (t->net.nnodes - 1) * per_peer,
                        .per_peer = per_peer};
    struct hello self;
    struct ep_process_id process;
    ep_status status = mine;

    memset(&self, 0, sizeof(self));
    ep_process_get_self(&process);
    memcpy(self.host, process.host, sizeof(self.host));
    mesh.all = calloc((size_t)params->nranks, sizeof(*mesh.all));
    if (!mesh.all)
        return ep_fail(EP_E_MEMORY, "network tcp: no memory for %d ranks", params->nranks);
    if (status == EP_OK)
        status = prepare(&mesh, &self);
    status = agree(&mesh, &self, status);
    if (status == EP_OK && mesh.connectors) { /* agree() keeps a failure, which clang-tidy does not see */
        status = make_key(&mesh);
        complete_addresses(&mesh);
        plan_connectors(&mesh);
        if (status == EP_OK)
            status = connect_all(&mesh);
        status = agree(&mesh, &self, status);
    }
    for (int i = 0; mesh.connectors && i < mesh.n_connectors; i++)
        if (mesh.connectors[i].under_way)
            tcp_handshake_drop(&mesh.connectors[i].hs);
    tcp_acceptor_close(&mesh.acceptor); /* no other connection is expected */
    explicit_bzero(&mesh.acceptor.key, sizeof(mesh.acceptor.key));
    explicit_bzero(&mesh.key, sizeof(mesh.key));
    free(mesh.connectors);
    free(mesh.polls);
    free(mesh.all);
    return status;
}
