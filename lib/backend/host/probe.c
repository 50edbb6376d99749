/* SPDX-License-Identifier: Apache-2.0 */
/* Bandwidth of the network alone: see net/probe.h. */
#include "net/probe.h"

#include "backend/host/host.h"
#include "net/tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Sleep on sockets between two checks of the group. */
#define POLL_MS 20

/* One plain socket, for the chunks of one channel. */
struct probe_socket {
    int fd, rank, slot, channel;
    size_t bytes;   /* of a round, each way */
    size_t out, in; /* of those: sent and received */
    bool closed;    /* by the peer */
};

struct ep_net_probe {
    struct ep_group *group;
    struct ep_net *net;
    int npeers, channels;
    size_t bytes;
    uint64_t rounds;
    unsigned char *data;
    struct ep_net *lines;         /* only its sockets are used; NULL: no sockets */
    struct probe_socket *sockets; /* [npeers][channels] */
    struct pollfd *polls;
};

/* Chunk number i uses channel i % channels. */
static size_t channel_bytes(size_t bytes, int channel, int channels)
{
    size_t sum = 0;

    for (size_t at = (size_t)channel * EP_NET_PROBE_CHUNK; at < bytes; at += (size_t)channels * EP_NET_PROBE_CHUNK)
        sum += bytes - at < EP_NET_PROBE_CHUNK ? bytes - at : EP_NET_PROBE_CHUNK;
    return sum;
}

/* --- puts --- */

/* A channel to a peer in this round. */
struct flow {
    size_t at;
    bool signalled;
};

/* Issues the next puts of one channel, then the signal; true if any was issued. */
static bool push_flow(struct ep_net_probe *probe, int peer, int channel, struct flow *flow)
{
    struct ep_net *net = probe->net;
    int slot_there = ep_net_peer_index(peer, net->node);
    bool moved = false;

    while (flow->at < probe->bytes) {
        size_t left = probe->bytes - flow->at, bytes = left < EP_NET_PROBE_CHUNK ? left : EP_NET_PROBE_CHUNK;

        if (!net->ops->put(net, peer, channel, (size_t)slot_there * probe->bytes + flow->at, probe->data + flow->at,
                           bytes))
            return moved;
        flow->at += (size_t)probe->channels * EP_NET_PROBE_CHUNK;
        moved = true;
    }
    if (!flow->signalled) {
        flow->signalled = net->ops->signal(net, peer, channel, (uint32_t)(slot_there * probe->channels + channel), 1);
        moved |= flow->signalled;
    }
    return moved;
}

/* One pass over all channels. *ret_waiting: the node of one that is not done, -1: all are. */
static ep_status puts_pass(struct ep_net_probe *probe, struct flow *flows, bool *ret_moved, int *ret_waiting)
{
    struct ep_net *net = probe->net;

    *ret_waiting = -1;
    EP_TRY(net->ops->progress(net, ret_moved));
    for (int i = 0; i < probe->npeers * probe->channels; i++) {
        int peer = ep_net_peer(net->node, i / probe->channels), channel = i % probe->channels;

        if (!flows[i].signalled)
            *ret_moved |= push_flow(probe, peer, channel, &flows[i]);
        if (!flows[i].signalled || !net->ops->flush_test(net, peer, channel) || net->signals[i] < probe->rounds)
            *ret_waiting = peer;
    }
    return EP_OK;
}

/* The peers wait for data that this rank can no longer send: publish the failure. */
static ep_status set_net_failure(struct ep_net_probe *probe, ep_status status)
{
    struct ep_group *group = probe->group;
    int broken_by = probe->net->broken_by;

    return ep_group_set_own_failure(group, status, broken_by ? ep_group_rail(group, broken_by - 1) : group->comm->rank,
                                    EP_GROUP_PROBE_PUTS);
}

ep_status ep_net_probe_puts(struct ep_net_probe *probe)
{
    struct ep_group *group = probe->group;
    struct flow *flows = calloc((size_t)probe->npeers * (size_t)probe->channels, sizeof(*flows));
    struct ep_group_wait wait;
    ep_status status = flows ? EP_OK : ep_fail(EP_E_MEMORY, "network probe: no memory");

    for (int i = 0; flows && i < probe->npeers * probe->channels; i++)
        flows[i].at = (size_t)(i % probe->channels) * EP_NET_PROBE_CHUNK;
    probe->rounds++;
    ep_group_wait_begin(&wait, group, EP_GROUP_PROBE_PUTS);
    while (status == EP_OK) {
        uint32_t seen = ep_group_doorbell(group);
        bool moved = false;
        int node;

        status = puts_pass(probe, flows, &moved, &node);
        if (status != EP_OK)
            status = set_net_failure(probe, status);
        if (status != EP_OK || node < 0)
            break;
        wait.polls = !probe->net->can_sleep;
        if (moved)
            ep_group_wait_reset(&wait);
        else
            status = ep_group_wait(&wait, seen, ep_group_rail(group, node));
    }
    ep_group_wait_end(&wait);
    free(flows);
    return status;
}

/* --- plain sockets --- */

bool ep_net_probe_has_sockets(const struct ep_net_probe *probe)
{
    return probe->lines != NULL;
}

/*
 * Offset in the memory of a round, laid out as for puts, of byte `at` of a channel, and the bytes from there to the end
 * of its chunk. Reusing one piece would keep it in the caches and make sockets look faster than they are.
 */
static size_t find_piece(const struct ep_net_probe *probe, const struct probe_socket *s, size_t at, size_t *ret_bytes)
{
    size_t inside = at % EP_NET_PROBE_CHUNK, left = s->bytes - at;

    *ret_bytes = left < EP_NET_PROBE_CHUNK - inside ? left : EP_NET_PROBE_CHUNK - inside;
    return (at / EP_NET_PROBE_CHUNK * (size_t)probe->channels + (size_t)s->channel) * EP_NET_PROBE_CHUNK + inside;
}

/* Sends or receives what the socket takes or has. */
static ep_status advance_socket(struct ep_net_probe *probe, struct probe_socket *s, bool out, bool *ret_moved)
{
    unsigned char *memory = out ? probe->data : probe->net->region + (size_t)s->slot * probe->bytes;
    size_t *done = out ? &s->out : &s->in;

    while (*done < s->bytes && !(out && s->closed)) {
        size_t bytes, at = find_piece(probe, s, *done, &bytes);
        ssize_t n = out ? send(s->fd, memory + at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                        : recv(s->fd, memory + at, bytes, MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            break;
        /* The peer's control block or control link tells why it closed it: it has died, left or failed. */
        if (n == 0 || (n < 0 && (errno == EPIPE || errno == ECONNRESET))) {
            s->closed = true;
            break;
        }
        if (n < 0)
            return ep_fail_errno(EP_E_SYSTEM, errno, "network probe: the socket to rank %d", s->rank);
        *done += (size_t)n;
        *ret_moved = true;
    }
    return EP_OK;
}

/*
 * One pass over all sockets. *ret_n_polls: the sockets that this round still needs; *ret_waiting: the rank of one of
 * them, -1: all are done.
 */
static ep_status sockets_pass(struct ep_net_probe *probe, bool *ret_moved, int *ret_n_polls, int *ret_waiting)
{
    *ret_n_polls = 0;
    *ret_waiting = -1;
    for (int i = 0; i < probe->npeers * probe->channels; i++) {
        struct probe_socket *s = &probe->sockets[i];
        ep_status status = advance_socket(probe, s, true, ret_moved);

        if (status == EP_OK)
            status = advance_socket(probe, s, false, ret_moved);
        if (status != EP_OK)
            return ep_group_set_own_failure(probe->group, status, probe->group->comm->rank, EP_GROUP_PROBE_SOCKETS);
        if (s->in == s->bytes && s->out == s->bytes)
            continue;
        *ret_waiting = s->rank;
        if (s->closed)
            continue;
        probe->polls[(*ret_n_polls)++] = (struct pollfd){
            .fd = s->fd, .events = (short)((s->in < s->bytes ? POLLIN : 0) | (s->out < s->bytes ? POLLOUT : 0))};
    }
    return EP_OK;
}

ep_status ep_net_probe_sockets(struct ep_net_probe *probe)
{
    struct ep_group *group = probe->group;
    struct ep_group_wait wait;
    ep_status status = EP_OK;

    for (int i = 0; i < probe->npeers * probe->channels; i++)
        probe->sockets[i].out = probe->sockets[i].in = 0;
    ep_group_wait_begin(&wait, group, EP_GROUP_PROBE_SOCKETS);
    while (status == EP_OK) {
        int n_polls, rank;
        bool moved = false;

        status = sockets_pass(probe, &moved, &n_polls, &rank);
        if (status != EP_OK || rank < 0)
            break;
        if (moved) {
            ep_group_wait_reset(&wait);
            continue;
        }
        status = ep_group_wait_check(&wait, rank);
        if (status == EP_OK)
            (void)poll(probe->polls, (nfds_t)n_polls, POLL_MS);
    }
    ep_group_wait_end(&wait);
    return status;
}

/* --- opening and closing --- */

static ep_status prepare(struct ep_net_probe *probe)
{
    size_t n = (size_t)probe->npeers * (size_t)probe->channels;

    probe->data = malloc(probe->bytes);
    probe->sockets = calloc(n, sizeof(*probe->sockets));
    probe->polls = calloc(n, sizeof(*probe->polls));
    if (!probe->data || !probe->sockets || !probe->polls)
        return ep_fail(EP_E_MEMORY, "network probe: no memory for %zu bytes", probe->bytes);
    memset(probe->data, 1, probe->bytes);
    return EP_OK;
}

static ep_status open_sockets(struct ep_net_probe *probe, const struct ep_net_provider *provider,
                              struct ep_net_params params)
{
    params.region_bytes = params.n_signals = 1;
    EP_TRY(provider->open(provider, &params, &probe->lines));
    for (int i = 0; i < probe->npeers * probe->channels; i++) {
        int peer = i / probe->channels, channel = i % probe->channels, node = ep_net_peer(probe->net->node, peer);

        probe->sockets[i] = (struct probe_socket){.fd = ep_net_tcp_get_socket(probe->lines, node, channel),
                                                  .rank = ep_group_rail(probe->group, node),
                                                  .slot = peer,
                                                  .channel = channel,
                                                  .bytes = channel_bytes(probe->bytes, channel, probe->channels)};
    }
    return EP_OK;
}

static ep_status open_probe(struct ep_net_probe *probe, ep_comm *comm)
{
    ep_boot boot = ep_group_boot(comm);
    ep_status status = prepare(probe);
    struct ep_net_provider provider;
    struct ep_net_params params;

    (void)ep_group_get_failed_owner(); /* of an earlier failure */
    ep_group_net_describe(probe->group, &provider, &params);
    params.boot = &boot;
    params.region_bytes = (size_t)probe->npeers * probe->bytes;
    params.n_signals = (uint32_t)(probe->npeers * probe->channels);
    EP_TRY(ep_group_agree_within(comm, "network probe", status));
    EP_TRY(ep_group_agree_within(comm, "network probe", provider.open(&provider, &params, &probe->net)));
    if (provider.open == ep_net_tcp.open)
        return ep_group_agree_within(comm, "network probe", open_sockets(probe, &provider, params));
    return EP_OK;
}

ep_status ep_net_probe_new(ep_comm *comm, size_t bytes, struct ep_net_probe **ret_probe)
{
    struct ep_net_probe *probe;
    ep_status status;

    if (strcmp(comm->ops->name, "host") != 0 || comm->nnodes < 2 || bytes == 0)
        return ep_fail(EP_E_UNSUPPORTED,
                       "network probe: needs the host backend, two or more nodes, and a size above 0");
    probe = calloc(1, sizeof(*probe));
    if (!probe)
        return ep_fail(EP_E_MEMORY, "network probe: no memory");
    probe->group = ep_group_of(comm);
    probe->npeers = comm->nnodes - 1;
    probe->channels = comm->config.channels;
    probe->bytes = bytes;
    status = open_probe(probe, comm);
    if (status != EP_OK) {
        ep_net_probe_free(probe);
        return status;
    }
    *ret_probe = probe;
    return EP_OK;
}

void ep_net_probe_free(struct ep_net_probe *probe)
{
    if (!probe)
        return;
    if (probe->net) {
        probe->net->abandoned = atomic_load(&probe->group->comm->failed) != EP_OK;
        probe->net->ops->free(probe->net);
    }
    if (probe->lines) {
        probe->lines->abandoned = true;
        probe->lines->ops->free(probe->lines);
    }
    free(probe->sockets);
    free(probe->polls);
    free(probe->data);
    free(probe);
}

uint64_t ep_net_probe_count(const ep_comm *comm)
{
    const struct ep_group *group = strcmp(comm->ops->name, "host") == 0 ? ep_group_of(comm) : NULL;

    return group && group->streams ? ep_streams_get_net(group->streams)->n_puts : 0;
}
