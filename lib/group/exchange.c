/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All-gather of small rows. Within a node each rank reads the boards of the others. Between nodes a rank sends its row
 * to its rail peers, and each rank's board holds its own row and those of its rail peers: so the boards of one node
 * together hold the rows of all ranks.
 */
#include "group/group.h"

#include <stddef.h>
#include <string.h>

/* In front of every row, so that ranks in different calls are told apart instead of reading each other's bytes. */
struct row_head {
    int32_t phase;
    uint32_t bytes;
    uint64_t number;
};

static struct row_head *board_row(const struct host_comm *host, struct host_control *control, uint64_t number, int node)
{
    size_t row = (size_t)(number % HOST_BOARDS) * (size_t)host->comm->nnodes + (size_t)node;

    return (struct row_head *)((char *)(control + 1) + row * host->board_row_bytes);
}

ep_status host_exchange_start(struct host_comm *host, enum host_phase phase, const void *row, size_t bytes,
                              uint64_t *ret_number)
{
    uint64_t number = host->exchange + 1;
    struct row_head *mine;

    EP_TRY(host_check(host));
    if (number > HOST_BOARDS)
        EP_TRY(host_wait_node(host, offsetof(struct host_control, board_read), number - HOST_BOARDS, HOST_PLAN_BOARD));
    host->exchange = number;
    mine = board_row(host, host->control, number, host->comm->node);
    *mine = (struct row_head){.phase = (int32_t)phase, .bytes = (uint32_t)bytes, .number = number};
    if (bytes)
        memcpy(mine + 1, row, bytes);
    if (host->comm->nnodes == 1) {
        atomic_store_explicit(&host->control->board_ready, number, memory_order_release);
        host_ring_node(host);
    }
    *ret_number = number;
    return EP_OK;
}

/* Takes one rail peer's row off its stream. */
static ep_status take_row(struct host_comm *host, uint64_t number, int node, enum host_phase phase, bool *ret_taken)
{
    size_t bytes;
    const struct host_message *message = ep_stream_peek(host->streams, node, 0, &bytes);

    if (!message)
        return EP_OK;
    if (bytes < sizeof(*message) || message->kind != HOST_MESSAGE_BOARD || message->number != number ||
        bytes - sizeof(*message) > host->board_row_bytes)
        return host_raise_own(host,
                              ep_fail(EP_E_MISMATCH,
                                      "ranks are in different calls: rank %d waits for exchange %llu, rank %d sent "
                                      "message kind %u number %llu",
                                      host->comm->rank, (unsigned long long)number, host_rail(host, node),
                                      message->kind, (unsigned long long)message->number),
                              host_rail(host, node), phase);
    memcpy(board_row(host, host->control, number, node), message + 1, bytes - sizeof(*message));
    ep_stream_pop(host->streams, node, 0);
    *ret_taken = true;
    return EP_OK;
}

/* Rows to and from the rail peers. */
static ep_status exchange_rails(struct host_comm *host, uint64_t number, enum host_phase phase)
{
    int nnodes = host->comm->nnodes, node = host->comm->node, left = 2 * (nnodes - 1);
    const struct row_head *mine = board_row(host, host->control, number, node);
    struct host_message head = {.kind = HOST_MESSAGE_BOARD, .detail = mine->bytes, .number = number};
    struct ep_piece piece = {.data = mine, .bytes = sizeof(*mine) + mine->bytes};
    bool sent[EP_MAX_RANKS] = {false}, taken[EP_MAX_RANKS] = {false};
    struct host_pause pause;

    host_pause_begin(&pause, host, phase);
    for (;;) {
        uint32_t seen = host_doorbell(host);
        int waiting_for = -1;
        bool moved;

        EP_TRY(host_net_progress(host, phase, &moved));
        for (int peer = 0; peer < nnodes; peer++) {
            bool was_sent = sent[peer], was_taken = taken[peer];

            if (peer == node)
                continue;
            if (!sent[peer])
                sent[peer] = ep_stream_send(host->streams, peer, 0, &head, sizeof(head), &piece, 1);
            if (!taken[peer])
                EP_TRY(take_row(host, number, peer, phase, &taken[peer]));
            left -= (sent[peer] != was_sent) + (taken[peer] != was_taken);
            moved |= sent[peer] != was_sent || taken[peer] != was_taken;
            if (!sent[peer] || !taken[peer])
                waiting_for = peer;
        }
        if (left == 0 && ep_streams_flushed(host->streams))
            break;
        EP_TRY(host_net_step(host, &pause, seen, moved, waiting_for));
    }
    host_pause_end(&pause);
    return EP_OK;
}

/* The row of any rank, on the board of the rank of this node that has it. */
static const struct row_head *row_of(const struct host_comm *host, uint64_t number, int rank)
{
    int local = rank % host->comm->ranks_per_node, node = rank / host->comm->ranks_per_node;

    return board_row(host, host_control_of(host, host->first + local), number, node);
}

ep_status host_exchange_complete(struct host_comm *host, uint64_t number, enum host_phase phase)
{
    struct row_head mine;

    host_read_shared(&mine, board_row(host, host->control, number, host->comm->node), sizeof(mine));
    if (host->comm->nnodes > 1) {
        EP_TRY(exchange_rails(host, number, phase));
        atomic_store_explicit(&host->control->board_ready, number, memory_order_release);
        host_ring_node(host);
    }
    EP_TRY(host_wait_node(host, offsetof(struct host_control, board_ready), number, phase));
    for (int rank = 0; rank < host->comm->nranks; rank++) {
        struct row_head row;

        host_read_shared(&row, row_of(host, number, rank), sizeof(row));

        if (row.phase != mine.phase)
            return host_raise_own(host,
                                  ep_fail(EP_E_MISMATCH,
                                          "ranks are in different calls: rank %d in \"%s\", rank %d in \"%s\"",
                                          host->comm->rank, host_phase_name((enum host_phase)mine.phase), rank,
                                          host_phase_name((enum host_phase)row.phase)),
                                  rank, phase);
        if (row.bytes != mine.bytes)
            return host_raise_own(host,
                                  ep_fail(EP_E_MISMATCH, "ranks disagree: bytes is %u on rank %d and %u on rank %d",
                                          mine.bytes, host->comm->rank, row.bytes, rank),
                                  rank, phase);
        if (row.number != number)
            return host_raise_damage(host, rank, phase, "the number of its exchange", (int64_t)row.number);
    }
    return EP_OK;
}

void host_exchange_read(const struct host_comm *host, uint64_t number, int rank, void *ret_row, size_t bytes)
{
    host_read_shared(ret_row, row_of(host, number, rank) + 1, bytes);
}

void host_exchange_release(struct host_comm *host, uint64_t number)
{
    host->exchanged = number;
    atomic_store_explicit(&host->control->board_read, number, memory_order_release);
    host_ring_node(host);
}
