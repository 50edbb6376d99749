/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between nodes: two hops. A token that has rows on another node is sent once, to the rank with the same local index
 * there (its rail peer), which places the row on its node exactly as it places its own. In a combine the rail peer adds
 * up the rows on its node and sends one partial sum back.
 *
 * Token i of the list for a node uses channel i % channels, so within a channel tokens arrive in order, and no order is
 * assumed between channels. One thread interleaves all work - own tokens, sending, receiving - and never waits for one
 * of them while another could proceed: this prevents deadlock between two ranks that send to each other.
 */
#include "backend/host/host.h"
#include "base/array.h"

#include "group/exchange.h"
#include "group/failure.h"
#include "group/plan.h"
#include "group/wait.h"

#include <stdlib.h>
#include <string.h>

#define BATCH 16
/* Partial sums in flight; the network reads them in place until it is flushed. */
#define ARENA_SLOTS 32
/* The bits of a shape that say which outputs there are. */
#define OUTPUTS 0x1fu

/* Next token per (node, channel), for sending and for receiving. */
struct cursors {
    int next[EP_NET_MAX_CHANNELS];
};

struct internode {
    struct ep_group *group;
    struct ep_group_plan *inner;
    int nnodes, node, channels;
    uint32_t shape;      /* to detect ranks with other arguments: internode_init() */
    int32_t scale_words; /* of a dispatch with EP_I32 scales, else 0 */
    size_t weight_bytes; /* weights that follow a row */
    struct cursors *out, *in;
    int own_done;                 /* tokens of this rank that are done */
    const struct host_move *move; /* of a dispatch */
};

/*
 * `outputs`: EP_GROUP_*. What all ranks must agree on is folded into one word: hidden size, element types, and which
 * outputs there are. scale_words follows from the size of the message.
 */
static ep_status internode_init(struct internode *net, struct ep_group *group, const ep_plan *plan, int hidden,
                                int dtype, int scale_type, uint32_t outputs)
{
    bool has_weights = outputs & (EP_GROUP_RECV_WEIGHTS | EP_GROUP_OUT_WEIGHTS);

    *net =
        (struct internode){.group = group,
                           .inner = plan->impl,
                           .nnodes = group->comm->nnodes,
                           .node = group->comm->node,
                           .channels = group->comm->config.channels,
                           .shape = (uint32_t)hidden << 12 | (uint32_t)dtype << 9 | (uint32_t)scale_type << 5 | outputs,
                           .weight_bytes = has_weights ? (size_t)plan->args.topk * sizeof(float) : 0};
    net->out = calloc((size_t)net->nnodes, sizeof(*net->out));
    net->in = calloc((size_t)net->nnodes, sizeof(*net->in));
    if (!net->out || !net->in)
        return ep_fail(EP_E_MEMORY, "no memory for %d nodes", net->nnodes);
    for (int node = 0; node < net->nnodes; node++)
        for (int channel = 0; channel < net->channels; channel++)
            net->out[node].next[channel] = net->in[node].next[channel] = channel;
    return EP_OK;
}

static void internode_done(struct internode *net)
{
    free(net->out);
    free(net->in);
}

/* True if all channels of `cursors` have passed token n. */
static bool is_done(const struct internode *net, const struct cursors *cursors, int n)
{
    return !ANY_OF(channel, net->channels, cursors->next[channel] < n);
}

static struct ep_group_message make_head(const struct internode *net, uint32_t kind, int token)
{
    return (struct ep_group_message){.kind = kind,
                                     .detail = net->shape,
                                     .number = net->group->operation,
                                     .index = (uint64_t)token,
                                     .plan = (uint64_t)net->inner->number};
}

static bool is_head(const struct internode *net, const struct ep_group_message *message, uint32_t kind, int token)
{
    struct ep_group_message expected = make_head(net, kind, token);

    return memcmp(message, &expected, sizeof(expected)) == 0;
}

/* `third`: the name of what a dispatch or a combine has in the place of scale_type. */
static ep_status fail_shape(const char *third, uint32_t mine, int me, uint32_t theirs, int rank)
{
    const struct {
        const char *name;
        int shift;
        uint32_t mask;
    } fields[] = {{"dtype", 9, 7}, {"hidden", 12, UINT32_MAX >> 12}, {third, 5, 15}};

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        uint32_t here = mine >> fields[i].shift & fields[i].mask, there = theirs >> fields[i].shift & fields[i].mask;

        if (here != there)
            return ep_group_fail_disagree("", fields[i].name, here, me, there, rank);
    }
    return ep_group_fail_outputs(mine & OUTPUTS, me, theirs & OUTPUTS, rank);
}

/* `expected`: bytes of a message of this call. */
static ep_status fail_mismatch(struct internode *net, int node, const struct ep_group_message *message, size_t bytes,
                               size_t expected, enum ep_group_phase phase)
{
    int rank = ep_group_rail(net->group, node), me = net->group->comm->rank;
    enum ep_group_phase theirs = message->kind == EP_GROUP_MESSAGE_ROW ? EP_GROUP_DISPATCH_MOVE : EP_GROUP_COMBINE_MOVE;
    bool operates = message->kind >= EP_GROUP_MESSAGE_ROW && message->kind <= EP_GROUP_MESSAGE_PARTIAL_F32;
    ep_status status;

    if (message->number != net->group->operation || !operates)
        status =
            ep_fail(EP_E_MISMATCH,
                    "ranks disagree: rank %d sent message kind %u of call %llu, and rank %d is in operation %llu", rank,
                    message->kind, (unsigned long long)message->number, me, (unsigned long long)net->group->operation);
    else if (theirs != phase)
        status = ep_group_fail_calls((uint32_t)phase, me, (uint32_t)theirs, rank);
    else if (message->plan != (uint64_t)net->inner->number)
        status = ep_group_fail_disagree("", "the plan (in order of creation)", net->inner->number, me,
                                        (int64_t)message->plan, rank);
    else if (message->detail != net->shape)
        status = fail_shape(phase == EP_GROUP_DISPATCH_MOVE ? "scale_type" : "flags / 8", net->shape, me,
                            message->detail, rank);
    else if (bytes != expected && net->scale_words)
        status = ep_group_fail_disagree(
            "", "scale_words", net->scale_words, me,
            net->scale_words + ((int64_t)bytes - (int64_t)expected) / (int64_t)sizeof(int32_t), rank);
    else
        status = ep_fail(EP_E_MISMATCH, "rank %d sent token %llu in %zu bytes, not the expected one in %zu bytes", rank,
                         (unsigned long long)message->index, bytes, expected);
    return ep_group_set_own_failure(net->group, status, rank, phase);
}

/* --- dispatch --------------------------------------------------------------------------------------------------- */

/* Sends rows to `node` until its channels are full. */
static bool send_rows(struct internode *net, int node)
{
    const struct host_move *move = net->move;
    bool moved = false;

    for (int channel = 0; channel < net->channels; channel++) {
        int *next = &net->out[node].next[channel];

        while (*next < net->inner->n_net_tokens[node]) {
            size_t t = (size_t)net->inner->net_tokens[node][*next];
            struct ep_group_message head = make_head(net, EP_GROUP_MESSAGE_ROW, *next);
            struct ep_piece pieces[3];
            int n = 0;

            pieces[n++] = (struct ep_piece){(const char *)move->args->x + t * move->row_bytes, move->row_bytes};
            if (move->scale_bytes)
                pieces[n++] = (struct ep_piece){move->scales + t * move->scale_bytes, move->scale_bytes};
            if (net->weight_bytes)
                pieces[n++] = (struct ep_piece){(const char *)move->args->topk_weights + t * net->weight_bytes,
                                                net->weight_bytes};
            if (!ep_stream_send(net->group->streams, node, channel, &head, sizeof(head), pieces, n))
                break;
            move->stats->rows_net++;
            move->stats->bytes_net += sizeof(head) + move->row_bytes + move->scale_bytes + net->weight_bytes;
            *next += net->channels;
            moved = true;
        }
    }
    return moved;
}

/* Places the rows that have arrived from `node`. */
static ep_status forward_rows(struct internode *net, int node, bool *ret_moved)
{
    const struct host_move *move = net->move;
    const struct ep_group_route *route = &net->inner->rail[node];
    size_t expected = sizeof(struct ep_group_message) + move->row_bytes + move->scale_bytes + net->weight_bytes;

    for (int channel = 0; channel < net->channels; channel++) {
        int *next = &net->in[node].next[channel];

        for (int i = 0; i < BATCH && *next < route->n_tokens; i++) {
            size_t bytes;
            const struct ep_group_message *message = ep_stream_peek(net->group->streams, node, channel, &bytes);
            const unsigned char *row;
            int n;

            if (!message)
                break;
            if (bytes != expected || !is_head(net, message, EP_GROUP_MESSAGE_ROW, *next))
                return fail_mismatch(net, node, message, bytes, expected, EP_GROUP_DISPATCH_MOVE);
            row = (const unsigned char *)(message + 1);
            n = host_place(move, route, *next, row, row + move->row_bytes,
                           (const float *)(const void *)(row + move->row_bytes + move->scale_bytes));
            move->stats->rows_forward += (uint64_t)n;
            move->stats->bytes_forward += (uint64_t)n * (move->row_bytes + move->scale_bytes);
            ep_stream_pop(net->group->streams, node, channel);
            *next += net->channels;
            *ret_moved = true;
        }
    }
    return EP_OK;
}

static ep_status dispatch_pass(void *context, bool *ret_moved, bool *ret_busy, int *ret_node)
{
    struct internode *net = context;
    int n = net->inner->n_tokens;

    if (net->own_done < n) {
        int end = net->own_done + BATCH < n ? net->own_done + BATCH : n;

        host_place_own(net->move, net->own_done, end);
        net->own_done = end;
        *ret_moved = true;
    }
    *ret_busy = net->own_done < n;
    for (int node = 0; node < net->nnodes; node++) {
        if (node == net->node)
            continue;
        *ret_moved |= send_rows(net, node);
        EP_TRY(forward_rows(net, node, ret_moved));
        if (!is_done(net, &net->out[node], net->inner->n_net_tokens[node]) ||
            !is_done(net, &net->in[node], net->inner->rail[node].n_tokens)) {
            *ret_busy = true;
            *ret_node = node;
        }
    }
    return EP_OK;
}

ep_status host_internode_dispatch(const struct host_move *move)
{
    const ep_dispatch_args *args = move->args;
    struct internode net;
    ep_status status =
        internode_init(&net, move->group, move->plan, args->hidden, args->dtype, args->scale_type, move->outputs);

    net.move = move;
    net.scale_words = args->scale_words;
    if (status == EP_OK)
        status = ep_group_net_run(move->group, EP_GROUP_DISPATCH_MOVE, dispatch_pass, &net);
    internode_done(&net);
    return status;
}

/* --- combine ---------------------------------------------------------------------------------------------------- */

struct internode_combine {
    struct internode net;
    const struct host_sum *sum;
    unsigned char *arena; /* ARENA_SLOTS slots: a partial row and the sums of its weights */
    size_t slot_bytes;
    int slots_used;
    int *n_added; /* [nnodes] partial sums of each node added so far */
};

/* A slot for a partial sum, or NULL while the network still reads all of them. */
static unsigned char *alloc_slot(struct internode_combine *ic)
{
    if (ic->slots_used == ARENA_SLOTS) {
        if (!ep_streams_flushed(ic->net.group->streams))
            return NULL;
        ic->slots_used = 0;
    }
    return ic->arena + (size_t)ic->slots_used * ic->slot_bytes;
}

/* EP_COMBINE_BY_CHOICE: the sum of a token's terms on this node, on top of 0, rounded. */
static void sum_by_choice(const struct host_sum *sum, const struct ep_group_route *route, int t, uint16_t *ret_row)
{
    struct ep_row_term terms[EP_MAX_TOPK + 1] = {{.row = sum->scratch}};
    int n = 1 + host_choice_terms(sum, route, t, terms + 1);

    ep_rows_get()->sum_bf16(ret_row, terms, n, sum->args->hidden);
}

/* The last choice of this rank's token t that is on the node; -1: none. */
static int last_choice_on(const struct internode *net, const struct host_sum *sum, int t, int node)
{
    const int32_t *index = net->inner->own.index + (size_t)t * (size_t)sum->plan->args.topk;
    int per_node = sum->plan->info.n_local_experts * net->group->comm->ranks_per_node, k = sum->plan->args.topk - 1;

    while (k >= 0 && (index[k] < 0 || index[k] / per_node != node))
        k--;
    return k;
}

/* EP_COMBINE_BY_CHOICE: the sums of the nodes in the order of each node's last choice. Returns their number. */
static int node_terms(const struct internode *net, const struct host_sum *sum, int t,
                      const struct ep_group_message *const *partials, struct ep_row_term *ret_terms)
{
    uint16_t *own = sum->scratch + (size_t)(sum->plan->args.topk + 1) * (size_t)sum->args->hidden;
    int last[EP_MAX_TOPK], n = 0;

    for (int node = 0; node < net->nnodes; node++) {
        const void *row = node == net->node ? (const void *)own : partials[node] ? partials[node] + 1 : NULL;
        int k = last_choice_on(net, sum, t, node), at = n;

        if (k < 0 || !row)
            continue;
        if (node == net->node)
            sum_by_choice(sum, &net->inner->own, t, own);
        for (n++; at > 0 && last[at - 1] > k; at--) {
            last[at] = last[at - 1];
            ret_terms[at] = ret_terms[at - 1];
        }
        last[at] = k;
        ret_terms[at] = (struct ep_row_term){.row = row};
    }
    return n;
}

/*
 * Partial sum of token t of a rail peer: a single row is sent as it is (bf16, exact, without a copy), several rows are
 * added up. Returns the kind of message.
 */
static uint32_t make_partial(const struct internode_combine *ic, const struct ep_group_route *route, int t,
                             unsigned char *slot, struct ep_piece *ret_piece)
{
    const struct host_sum *sum = ic->sum;
    struct ep_row_term terms[EP_MAX_TOPK];
    int n;

    if (sum->args->flags & EP_COMBINE_BY_CHOICE) {
        sum_by_choice(sum, route, t, (uint16_t *)(void *)slot);
        *ret_piece = (struct ep_piece){slot, sum->row_bytes};
        return EP_GROUP_MESSAGE_PARTIAL_BF16;
    }
    n = host_row_terms(sum, route, t, terms);
    if (n == 1) {
        *ret_piece = (struct ep_piece){terms[0].row, sum->row_bytes};
        return EP_GROUP_MESSAGE_PARTIAL_BF16;
    }
    if (sum->group->comm->config.partial_type == EP_BF16) {
        ep_rows_get()->sum_bf16((uint16_t *)(void *)slot, terms, n, sum->args->hidden);
        *ret_piece = (struct ep_piece){slot, sum->row_bytes};
        return EP_GROUP_MESSAGE_PARTIAL_BF16;
    }
    ep_rows_get()->sum_f32((float *)(void *)slot, terms, n, sum->args->hidden);
    *ret_piece = (struct ep_piece){slot, 2 * sum->row_bytes};
    return EP_GROUP_MESSAGE_PARTIAL_F32;
}

static bool send_partials(struct internode_combine *ic, int node)
{
    struct internode *net = &ic->net;
    const struct host_sum *sum = ic->sum;
    const struct ep_group_route *route = &net->inner->rail[node];
    bool moved = false;

    for (int channel = 0; channel < net->channels; channel++) {
        int *next = &net->out[node].next[channel];

        for (int i = 0; i < BATCH && *next < route->n_tokens; i++) {
            unsigned char *slot = alloc_slot(ic);
            int n_rows = route->start[*next + 1] - route->start[*next];
            struct ep_group_message head;
            struct ep_piece pieces[2];
            float *weights;

            if (!slot)
                return moved;
            head = make_head(net, make_partial(ic, route, *next, slot, &pieces[0]), *next);
            weights = (float *)(void *)(slot + 2 * sum->row_bytes);
            pieces[1] = (struct ep_piece){weights, net->weight_bytes};
            if (pieces[1].bytes) {
                memset(weights, 0, pieces[1].bytes);
                host_sum_weights(sum, route, *next, weights);
            }
            if (!ep_stream_send(net->group->streams, node, channel, &head, sizeof(head), pieces,
                                pieces[1].bytes ? 2 : 1))
                break;
            ic->slots_used++;
            sum->stats->rows_net++;
            sum->stats->bytes_net += sizeof(head) + pieces[0].bytes + pieces[1].bytes;
            sum->stats->rows_forward += (uint64_t)n_rows;
            sum->stats->bytes_forward += (uint64_t)n_rows * sum->row_bytes;
            *next += net->channels;
            moved = true;
        }
    }
    return moved;
}

/*
 * Finds the partial sum of this rank's token t from `node`, if the token has rows there. Sets *ret_missing to the node
 * if it has not arrived.
 */
static ep_status find_partial(struct internode_combine *ic, int node, int t,
                              const struct ep_group_message **ret_message, int *ret_missing)
{
    struct internode *net = &ic->net;
    int i = ic->n_added[node];
    size_t bytes, expected;
    const struct ep_group_message *message;
    bool is_f32;

    *ret_message = NULL;
    if (i >= net->inner->n_net_tokens[node] || net->inner->net_tokens[node][i] != t)
        return EP_OK;
    message = ep_stream_peek(net->group->streams, node, i % net->channels, &bytes);
    if (!message) {
        *ret_missing = node;
        return EP_OK;
    }
    is_f32 = message->kind == EP_GROUP_MESSAGE_PARTIAL_F32;
    expected = sizeof(*message) + (is_f32 ? 2 : 1) * ic->sum->row_bytes + net->weight_bytes;
    if (bytes != expected ||
        !is_head(net, message, is_f32 ? EP_GROUP_MESSAGE_PARTIAL_F32 : EP_GROUP_MESSAGE_PARTIAL_BF16, i))
        return fail_mismatch(net, node, message, bytes, expected, EP_GROUP_COMBINE_MOVE);
    *ret_message = message;
    return EP_OK;
}

/* Adds up token t when all its partial sums have arrived. */
static void add_token(struct internode_combine *ic, int t, const struct ep_group_message *const *partials)
{
    const struct host_sum *sum = ic->sum;
    struct internode *net = &ic->net;
    const struct ep_group_route *own = &net->inner->own;
    size_t topk = (size_t)sum->plan->args.topk;
    struct ep_row_term terms[EP_MAX_TOPK + 2 + EP_MAX_RANKS];
    float *weights = sum->args->out_topk_weights ? sum->args->out_topk_weights + (size_t)t * topk : NULL;
    bool by_choice = sum->args->flags & EP_COMBINE_BY_CHOICE;
    int n = host_bias_terms(sum, t, terms);

    if (weights)
        memset(weights, 0, topk * sizeof(*weights));
    if (by_choice && n == 0)
        terms[n++] = (struct ep_row_term){.row = sum->scratch};
    if (by_choice)
        n += node_terms(net, sum, t, partials, terms + n);
    for (int node = 0; node < net->nnodes; node++) {
        const struct ep_group_message *message = partials[node];

        if (node == net->node && !by_choice)
            n += host_row_terms(sum, own, t, terms + n);
        if (node == net->node && weights)
            host_sum_weights(sum, own, t, weights);
        if (!message)
            continue;
        bool is_f32 = message->kind == EP_GROUP_MESSAGE_PARTIAL_F32;
        const float *part = (const float *)((const char *)(message + 1) + (is_f32 ? 2 : 1) * sum->row_bytes);

        if (!by_choice)
            terms[n++] = (struct ep_row_term){message + 1, is_f32};
        for (size_t k = 0; weights && k < topk; k++)
            weights[k] += part[k];
    }
    host_sum_terms(sum, t, terms, n);
}

static ep_status finish_tokens(struct internode_combine *ic, bool *ret_moved, int *ret_node)
{
    struct internode *net = &ic->net;
    const struct ep_group_message *partials[EP_MAX_RANKS] = {NULL};
    int end = net->own_done + BATCH;

    while (net->own_done < net->inner->n_tokens && net->own_done < end) {
        int missing = -1;

        for (int node = 0; node < net->nnodes; node++) {
            partials[node] = NULL;
            if (node != net->node)
                EP_TRY(find_partial(ic, node, net->own_done, &partials[node], &missing));
        }
        if (missing >= 0) {
            *ret_node = missing;
            return EP_OK;
        }
        add_token(ic, net->own_done, partials);
        for (int node = 0; node < net->nnodes; node++)
            if (partials[node])
                ep_stream_pop(net->group->streams, node, ic->n_added[node]++ % net->channels);
        net->own_done++;
        *ret_moved = true;
    }
    return EP_OK;
}

static ep_status combine_pass(void *context, bool *ret_moved, bool *ret_busy, int *ret_node)
{
    struct internode_combine *ic = context;
    struct internode *net = &ic->net;

    EP_TRY(finish_tokens(ic, ret_moved, ret_node));
    *ret_busy = net->own_done < net->inner->n_tokens;
    for (int node = 0; node < net->nnodes; node++) {
        if (node == net->node)
            continue;
        *ret_moved |= send_partials(ic, node);
        if (!is_done(net, &net->out[node], net->inner->rail[node].n_tokens)) {
            *ret_busy = true;
            *ret_node = node;
        }
    }
    return EP_OK;
}

ep_status host_internode_combine(const struct host_sum *sum)
{
    struct internode_combine ic = {.sum = sum};
    const ep_combine_args *args = sum->args;
    ep_status status =
        internode_init(&ic.net, sum->group, sum->plan, args->hidden, args->dtype,
                       (int)(args->flags / EP_COMBINE_BY_CHOICE), args->out_topk_weights ? EP_GROUP_OUT_WEIGHTS : 0u);

    ic.slot_bytes = 2 * sum->row_bytes + (ic.net.weight_bytes + 15) / 16 * 16;
    ic.arena = aligned_alloc(EP_GROUP_CACHE_LINE, (ARENA_SLOTS * ic.slot_bytes + EP_GROUP_CACHE_LINE - 1) /
                                                      EP_GROUP_CACHE_LINE * EP_GROUP_CACHE_LINE);
    ic.n_added = calloc((size_t)ic.net.nnodes, sizeof(*ic.n_added));
    if (status == EP_OK && (!ic.arena || !ic.n_added))
        status = ep_fail(EP_E_MEMORY, "ep_combine: no memory for partial sums of %zu bytes", ic.slot_bytes);
    if (status == EP_OK)
        status = ep_group_net_run(sum->group, EP_GROUP_COMBINE_MOVE, combine_pass, &ic);
    free(ic.arena);
    free(ic.n_added);
    internode_done(&ic.net);
    return status;
}
