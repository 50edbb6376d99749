/* SPDX-License-Identifier: Apache-2.0 */
/* Opens an endpoint of the verbs network: local setup, then three all-gathers (addresses; queue pairs connected; a
 * message exchanged with each peer). */
#include "base/clock.h"
#include "net/tcp.h"
#include "net/verbs_net.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* 4.096 us * 2^14 = 67 ms without an acknowledgement, seven times: a dead NIC is detected within seconds. */
#define ACK_TIMEOUT 14
#define RETRIES 7
/* Retry without limit while the receiver has no room: the caller has the deadline, not the NIC. */
#define RNR_RETRY_ALWAYS 7
#define RNR_TIMER_640_US 12
#define HOP_LIMIT 64

/* Published by each rank. */
struct hello {
    struct ep_net_hello common;
    uint64_t region, payload;
    uint32_t key, payload_key;
    uint32_t mtu;
    uint16_t lid;
    uint8_t is_ethernet;
    uint8_t gid[16];
    char device[VERBS_NAME_BYTES];
    struct {
        uint32_t number, psn;
    } addresses[]; /* of each connection */
};

struct opening {
    struct verbs_net *v;
    const struct ep_net_params *params;
    const struct ep_net_tcp_context *context; /* of the bootstrap, or NULL */
    size_t bytes;                             /* of an hello with its addresses */
    struct hello *mine;
    unsigned char *all; /* [R] */
};

static struct hello *hello_of(const struct opening *o, int rank)
{
    return (struct hello *)(o->all + (size_t)rank * o->bytes);
}

/* --- local setup --- */

static ep_status make_queues(struct verbs_net *v)
{
    const struct verbs_library *library = v->device.library;
    int sends = v->n * VERBS_SENDS, receives = v->n * VERBS_RECEIVES;

    if (receives > v->device.limits.max_cqe || v->n > v->device.limits.max_qp)
        return ep_fail(EP_E_UNSUPPORTED,
                       "network verbs: %d rail peers and %d channels need %d queue pairs and a completion queue of %d "
                       "entries, %s has %d and %d: take fewer channels or fewer ranks",
                       v->net.nnodes - 1, v->net.channels, v->n, receives, v->device.name, v->device.limits.max_qp,
                       v->device.limits.max_cqe);
    v->sends = library->create_cq(v->device.context, sends, NULL, NULL, 0);
    v->receives = v->sends ? library->create_cq(v->device.context, receives, NULL, NULL, 0) : NULL;
    if (!v->receives)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network verbs: completion queues of %d and %d entries on %s", sends,
                             receives, v->device.name);
    return EP_OK;
}

/* The queue pair in state INIT, with receives posted. */
static ep_status make_conn(struct verbs_net *v, struct verbs_conn *conn)
{
    const struct verbs_library *library = v->device.library;
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_INIT,
                                     .pkey_index = 0,
                                     .port_num = v->device.port,
                                     .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    struct ibv_qp_init_attr init;
    int error = 0;

    for (uint32_t bytes = VERBS_INLINE_BYTES; !conn->qp; bytes = 0) {
        init = (struct ibv_qp_init_attr){.send_cq = v->sends,
                                         .recv_cq = v->receives,
                                         .qp_type = IBV_QPT_RC,
                                         .cap = {.max_send_wr = VERBS_SENDS,
                                                 .max_recv_wr = VERBS_RECEIVES,
                                                 .max_send_sge = 1,
                                                 .max_recv_sge = 1,
                                                 .max_inline_data = bytes}};
        conn->qp = library->create_qp(v->pd, &init);
        conn->inline_bytes = bytes;
        if (!conn->qp && (bytes == 0 || (errno != EINVAL && errno != ENOMEM)))
            return ep_fail_errno(EP_E_SYSTEM, errno, "network verbs: a queue pair on %s", v->device.name);
    }
    error =
        library->modify_qp(conn->qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    for (unsigned slot = 0; !error && slot < VERBS_RECEIVES; slot++)
        error = verbs_post_receive(v, conn, slot);
    return error ? ep_fail_errno(EP_E_SYSTEM, error, "network verbs: a queue pair of %s", v->device.name) : EP_OK;
}

static ep_status prepare(struct opening *o)
{
    struct verbs_net *v = o->v;
    struct hello *mine = o->mine;
    int ranks_per_node = o->params->block_ranks ? o->params->block_ranks : v->net.ranks_per_node;

    EP_TRY(verbs_device_open(v->net.rank % ranks_per_node, o->params->gpu, &v->device));
    v->pd = v->device.library->alloc_pd(v->device.context);
    if (!v->pd)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network verbs: a protection domain on %s", v->device.name);
    EP_TRY(verbs_memory_open(v, o->params->payload));
    EP_TRY(make_queues(v));
    for (int i = 0; i < v->n; i++) {
        uint32_t *psn = &mine->addresses[i].psn;

        if (!ep_net_is_connected(o->params, ep_net_rail(&v->net, ep_net_index_peer(&v->net, i)))) {
            v->conns[i].bye_received = v->conns[i].bye_sent = v->conns[i].discards = true;
            continue;
        }
        EP_TRY(make_conn(v, &v->conns[i]));
        mine->addresses[i].number = v->conns[i].qp->qp_num;
        if (getrandom(psn, sizeof(*psn), GRND_NONBLOCK) != sizeof(*psn))
            *psn = v->conns[i].qp->qp_num;
        *psn &= 0xffffff;
    }
    mine->region = (uintptr_t)v->net.region;
    mine->key = v->region_mr->rkey;
    mine->payload = (uintptr_t)v->net.payload;
    mine->payload_key = v->payload_mr ? v->payload_mr->rkey : v->region_mr->rkey;
    mine->mtu = (uint32_t)v->device.mtu;
    mine->lid = v->device.lid;
    mine->is_ethernet = v->device.is_ethernet;
    memcpy(mine->gid, v->device.gid.raw, sizeof(mine->gid));
    memcpy(mine->device, v->device.name, sizeof(mine->device));
    return EP_OK;
}

/* --- connecting --- */

static ep_status agree(struct opening *o, ep_status status)
{
    return ep_net_exchange_hello(ep_net_verbs.name, o->params, status, o->mine, o->bytes, o->all);
}

static struct ibv_ah_attr make_path(const struct verbs_device *device, const struct hello *theirs)
{
    struct ibv_ah_attr path = {
        .dlid = theirs->lid,
        .sl = (uint8_t)device->service_level,
        .port_num = device->port,
        .is_global = device->is_ethernet,
        .grh = {.sgid_index = device->gid_index,
                .hop_limit = HOP_LIMIT,
                .traffic_class = (uint8_t)device->traffic_class},
    };

    memcpy(path.grh.dgid.raw, theirs->gid, sizeof(theirs->gid));
    return path;
}

static ep_status connect_conn(struct opening *o, struct verbs_conn *conn, int peer, int channel)
{
    struct verbs_net *v = o->v;
    const struct verbs_library *library = v->device.library;
    int rank = ep_net_rail(&v->net, peer), error;
    struct hello *theirs = hello_of(o, rank);
    int far = ep_net_peer_index(peer, v->net.node) * v->net.channels + channel;
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RTR,
                                     .path_mtu = theirs->mtu < v->device.mtu ? theirs->mtu : v->device.mtu,
                                     .dest_qp_num = theirs->addresses[far].number,
                                     .rq_psn = theirs->addresses[far].psn,
                                     .max_dest_rd_atomic = 1,
                                     .min_rnr_timer = RNR_TIMER_640_US,
                                     .ah_attr = make_path(&v->device, theirs)};

    if (theirs->is_ethernet != v->device.is_ethernet)
        return ep_fail(EP_E_MISMATCH, "network verbs: rank %d is on InfiniBand and rank %d on Ethernet",
                       theirs->is_ethernet ? v->net.rank : rank, theirs->is_ethernet ? rank : v->net.rank);
    conn->remote_region = theirs->region;
    conn->remote_key = theirs->key;
    conn->remote_payload = theirs->payload;
    conn->remote_payload_key = theirs->payload_key;
    error = library->modify_qp(conn->qp, &attributes,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "network verbs: no route from %s to rank %d", v->device.name, rank);
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = ACK_TIMEOUT;
    attributes.retry_cnt = RETRIES;
    attributes.rnr_retry = RNR_RETRY_ALWAYS;
    attributes.sq_psn = o->mine->addresses[conn->index].psn;
    attributes.max_rd_atomic = 1;
    error = library->modify_qp(conn->qp, &attributes,
                               IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                   IBV_QP_MAX_QP_RD_ATOMIC);
    return error
               ? ep_fail_errno(EP_E_SYSTEM, error, "network verbs: a queue pair of %s to rank %d", v->device.name, rank)
               : EP_OK;
}

static ep_status connect_all(struct opening *o)
{
    struct verbs_net *v = o->v;

    for (int i = 0; i < v->n; i++)
        if (v->conns[i].qp)
            EP_TRY(connect_conn(o, &v->conns[i], ep_net_index_peer(&v->net, i), i % v->net.channels));
    return EP_OK;
}

/* Uses half of the timeout: the ranks still have to agree on the result. */
static ep_status exchange_hello(struct opening *o)
{
    struct verbs_net *v = o->v;
    struct ep_net_tcp_watch watch = {.params = o->params, .context = o->context};
    const struct verbs_conn *unverified = NULL;
    int rank;

    EP_TRY(verbs_exchange_hello(v, ep_deadline_ns(o->params->timeout_ms / 2), &watch, &unverified));
    if (!unverified)
        return EP_OK;
    rank = ep_net_rail(&v->net, ep_net_index_peer(&v->net, unverified->index));
    return ep_fail(EP_E_SYSTEM,
                   "network verbs: rank %d with %s and rank %d with %.*s cannot reach each other: %s: check that the "
                   "network connects these ports, or name others in EPKIT_VERBS_DEVICE",
                   v->net.rank, v->device.name, rank, (int)VERBS_NAME_BYTES, hello_of(o, rank)->device,
                   unverified->failed_ns ? v->device.library->wc_status_str(unverified->why)
                                         : "no message arrived before the deadline");
}

/* --- opening --- */

/* Collective, whatever the status of this rank, so that no rank waits for one that has failed. */
static ep_status connect_ranks(struct verbs_net *v, const struct ep_net_params *params,
                               const struct ep_net_tcp_context *context)
{
    struct opening o = {.v = v, .params = params, .context = context, .bytes = sizeof(struct hello)};
    ep_status status;

    /* All ranks send the same size, even if they disagree about the channels. */
    o.bytes += (size_t)(v->net.nnodes - 1) * EP_NET_MAX_CHANNELS * sizeof(o.mine->addresses[0]);
    o.mine = calloc(1, o.bytes);
    o.all = calloc((size_t)params->nranks, o.bytes);
    if (!o.mine || !o.all) {
        status = ep_fail(EP_E_MEMORY, "network verbs: no memory for %d ranks", params->nranks);
        goto free_all;
    }
    status = agree(&o, v->conns ? prepare(&o) : ep_fail(EP_E_MEMORY, "network verbs: no memory"));
    if (status == EP_OK && v->conns)
        status = agree(&o, connect_all(&o));
    if (status == EP_OK && v->conns)
        status = agree(&o, exchange_hello(&o));
free_all:
    free(o.mine);
    free(o.all);
    return status;
}

static ep_status verbs_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                            struct ep_net **ret_net)
{
    const struct ep_net_provider tcp = {.abi = EP_NET_ABI, .name = ep_net_tcp.name, .context = provider->context};
    struct ep_net_params tcp_params = *params;
    struct verbs_net *v;
    ep_status status;

    /* can_sleep stays false: no doorbell when the NIC has a completion. */
    EP_TRY(ep_net_new(&verbs_ops, sizeof(*v), params, ret_net));
    v = (struct verbs_net *)*ret_net;
    tcp_params.channels = 1;
    tcp_params.region_bytes = 64;
    tcp_params.n_signals = 1;
    v->n = (v->net.nnodes - 1) * params->channels;
    v->conns = calloc((size_t)v->n, sizeof(*v->conns));
    for (int i = 0; v->conns && i < v->n; i++)
        v->conns[i].index = i;
    status = ep_net_tcp.open(&tcp, &tcp_params, &v->net.tcp);
    if (status == EP_OK)
        status = connect_ranks(v, params, provider->context);
    return ep_net_opened(status, ret_net);
}

const struct ep_net_provider ep_net_verbs = {
    .abi = EP_NET_ABI, .name = "verbs", .open = verbs_open, .uses_device_memory = verbs_uses_gpu_memory};
