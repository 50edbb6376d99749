/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All-gather of small rows. Within a node each rank reads the exchange slots of the others. Between nodes a rank sends
 * its row to its rail peers, and the exchange slot of each rank holds its own row and those of its rail peers: so the
 * slots of one node together hold the rows of all ranks.
 */
#include "group/exchange.h"

#include "group/failure.h"
#include "group/peers.h"
#include "group/wait.h"

#include <stddef.h>
#include <string.h>

/* In front of every row, to detect ranks in different calls. */
struct row_head {
    int32_t phase;
    uint32_t bytes;
    uint64_t number;
};

static struct row_head *slot_row(const struct ep_group *group, struct ep_group_control *control, uint64_t number,
                                 int node)
{
    size_t row = (size_t)(number % EP_GROUP_EXCHANGES) * (size_t)group->comm->nnodes + (size_t)node;

    return (struct row_head *)((char *)(control + 1) + row * group->exchange_row_bytes);
}

ep_status ep_group_exchange_start(struct ep_group *group, enum ep_group_phase phase, const void *row, size_t bytes,
                                  uint64_t *ret_number)
{
    uint64_t number = group->exchange + 1;
    struct row_head *mine;

    EP_TRY(ep_group_check(group));
    if (number > EP_GROUP_EXCHANGES)
        EP_TRY(ep_group_wait_node(group, offsetof(struct ep_group_control, exchange_read), number - EP_GROUP_EXCHANGES,
                                  EP_GROUP_PLAN_SLOT));
    group->exchange = number;
    mine = slot_row(group, group->control, number, group->comm->node);
    *mine = (struct row_head){.phase = (int32_t)phase, .bytes = (uint32_t)bytes, .number = number};
    if (bytes)
        memcpy(mine + 1, row, bytes);
    if (group->comm->nnodes == 1) {
        atomic_store_explicit(&group->control->exchange_ready, number, memory_order_release);
        ep_group_ring_node(group);
    }
    *ret_number = number;
    return EP_OK;
}

/* Receives the row of one rail peer from its stream. */
static ep_status receive_row(struct ep_group *group, uint64_t number, int node, enum ep_group_phase phase,
                             bool *ret_received)
{
    size_t bytes;
    const struct ep_group_message *message = ep_stream_peek(group->streams, node, 0, &bytes);

    if (!message)
        return EP_OK;
    if (bytes < sizeof(*message) || message->kind != EP_GROUP_MESSAGE_EXCHANGE || message->number != number ||
        bytes - sizeof(*message) > group->exchange_row_bytes)
        return ep_group_set_own_failure(
            group,
            ep_fail(EP_E_MISMATCH,
                    "ranks are in different calls: rank %d waits for exchange %llu, rank %d sent "
                    "message kind %u number %llu",
                    group->comm->rank, (unsigned long long)number, ep_group_rail(group, node), message->kind,
                    (unsigned long long)message->number),
            ep_group_rail(group, node), phase);
    memcpy(slot_row(group, group->control, number, node), message + 1, bytes - sizeof(*message));
    ep_stream_pop(group->streams, node, 0);
    *ret_received = true;
    return EP_OK;
}

struct rails {
    struct ep_group *group;
    uint64_t number;
    enum ep_group_phase phase;
    bool sent[EP_MAX_RANKS], received[EP_MAX_RANKS];
};

static ep_status step_rails(void *context, bool *ret_moved, bool *ret_busy, int *ret_node)
{
    struct rails *rails = context;
    struct ep_group *group = rails->group;
    int node = group->comm->node;
    const struct row_head *mine = slot_row(group, group->control, rails->number, node);
    struct ep_group_message head = {.kind = EP_GROUP_MESSAGE_EXCHANGE, .detail = mine->bytes, .number = rails->number};
    struct ep_piece piece = {.data = mine, .bytes = sizeof(*mine) + mine->bytes};

    for (int peer = 0; peer < group->comm->nnodes; peer++) {
        bool was_sent = rails->sent[peer], was_received = rails->received[peer];

        if (peer == node || !ep_group_has_node(group, peer))
            continue;
        if (!was_sent)
            rails->sent[peer] = ep_stream_send(group->streams, peer, 0, &head, sizeof(head), &piece, 1);
        if (!was_received)
            EP_TRY(receive_row(group, rails->number, peer, rails->phase, &rails->received[peer]));
        *ret_moved |= rails->sent[peer] != was_sent || rails->received[peer] != was_received;
        if (!rails->sent[peer] || !rails->received[peer])
            *ret_node = peer;
    }
    *ret_busy = *ret_node >= 0;
    return EP_OK;
}

/* The row of any rank, in the exchange slot of the rank of this node that has it. */
static const struct row_head *row_of(const struct ep_group *group, uint64_t number, int rank)
{
    int local = rank % group->comm->ranks_per_node, node = rank / group->comm->ranks_per_node;

    return slot_row(group, group->peers[group->first + local].control, number, node);
}

static int64_t extent_of(const struct row_head *row, const struct ep_group_extent *extent)
{
    return ((int64_t)row->bytes - (int64_t)extent->fixed) / (int64_t)extent->each;
}

ep_status ep_group_exchange_complete(struct ep_group *group, uint64_t number, enum ep_group_phase phase,
                                     const struct ep_group_extent *extent)
{
    static const struct ep_group_extent bytes = {"bytes", 0, 1};
    const struct ep_group_extent *what = extent ? extent : &bytes;
    int me = group->comm->rank;
    struct row_head mine;

    ep_group_read_shared(&mine, slot_row(group, group->control, number, group->comm->node), sizeof(mine));
    if (group->comm->nnodes > 1) {
        EP_TRY(ep_group_net_run(group, phase, step_rails,
                                &(struct rails){.group = group, .number = number, .phase = phase}));
        atomic_store_explicit(&group->control->exchange_ready, number, memory_order_release);
        ep_group_ring_node(group);
    }
    EP_TRY(ep_group_wait_node(group, offsetof(struct ep_group_control, exchange_ready), number, phase));
    for (int rank = 0; rank < group->comm->nranks; rank++) {
        struct row_head row;

        if (!ep_comm_has(group->comm, rank))
            continue;
        ep_group_read_shared(&row, row_of(group, number, rank), sizeof(row));
        if (row.phase != mine.phase)
            return ep_group_set_own_failure(
                group, ep_group_fail_calls((uint32_t)mine.phase, me, (uint32_t)row.phase, rank), rank, phase);
        if (row.bytes != mine.bytes)
            return ep_group_set_own_failure(
                group, ep_group_fail_disagree("", what->field, extent_of(&mine, what), me, extent_of(&row, what), rank),
                rank, phase);
        if (row.number != number)
            return ep_group_fail_damaged(group, rank, phase, "the number of its exchange", (int64_t)row.number);
    }
    return EP_OK;
}

void ep_group_exchange_read(const struct ep_group *group, uint64_t number, int rank, void *ret_row, size_t bytes)
{
    if (ep_comm_has(group->comm, rank))
        ep_group_read_shared(ret_row, row_of(group, number, rank) + 1, bytes);
    else
        memset(ret_row, 0, bytes);
}

void ep_group_exchange_release(struct ep_group *group, uint64_t number)
{
    atomic_store_explicit(&group->control->exchange_read, number, memory_order_release);
    ep_group_ring_node(group);
}
