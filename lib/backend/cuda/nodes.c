/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations between nodes. The routes are made on the host, as for the host backend; a plan's lists say which of this
 * rank's tokens go to each node, and where the tokens of its rail peers go on this one.
 */
#include "backend/cuda/proxy.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Blocks for each multiprocessor that an operation may take: theirs wait for memory across PCIe. */
#define BLOCKS_OF_SM 4

/* Of a plan. Everything is in the block, at the same places in its copy on the host. */
struct cuda_lists {
    struct cuda_block block;
    char *copy;
    struct cuda_rail *net, *rail; /* [nnodes] own tokens, rail peers' */
    int32_t *token;               /* [own] */
    int32_t *net_units;           /* [own + 1] */
    int32_t *rail_units;          /* [rails + 1] */
    int32_t *start;               /* [rails + 1] of `entry` */
    int32_t *index;               /* [rails,K] */
    struct cuda_entry *entry;
    int32_t *far_start; /* [N + 1] of `far` */
    struct cuda_far_term *far;
    uint64_t rows_self, rows_node, rows_forward; /* own tokens here and on the rest of the node; rail peers' */
};

static struct cuda_lists *lists_of(const ep_plan *plan)
{
    return cuda_plan_of(plan)->lists;
}

/* Of a pointer into the copy. */
static void *on_device(const struct cuda_lists *lists, const void *pointer)
{
    return (char *)lists->block.memory + ((const char *)pointer - lists->copy);
}

/* --- the lists of a plan -------------------------------------------------------------------------------------------
 */

static size_t lay_out(const ep_plan *plan, struct cuda_lists *lists)
{
    const struct host_plan *inner = plan->impl;
    size_t nnodes = (size_t)plan->comm->nnodes, topk = (size_t)plan->args.topk, own = 0, rails = 0, entries = 0, at = 0;
    size_t word = sizeof(int32_t);

    for (size_t node = 0; node < nnodes; node++) {
        own += (size_t)inner->n_net_tokens[node];
        rails += (size_t)inner->rail[node].n_tokens;
        entries += (size_t)inner->rail[node].n_entries;
    }
    lists->net = (void *)(lists->copy + cuda_carve(&at, nnodes * sizeof(*lists->net)));
    lists->rail = (void *)(lists->copy + cuda_carve(&at, nnodes * sizeof(*lists->rail)));
    lists->token = (void *)(lists->copy + cuda_carve(&at, own * word));
    lists->net_units = (void *)(lists->copy + cuda_carve(&at, (own + 1) * word));
    lists->rail_units = (void *)(lists->copy + cuda_carve(&at, (rails + 1) * word));
    lists->start = (void *)(lists->copy + cuda_carve(&at, (rails + 1) * word));
    lists->index = (void *)(lists->copy + cuda_carve(&at, rails * topk * word));
    lists->entry = (void *)(lists->copy + cuda_carve(&at, entries * sizeof(*lists->entry)));
    lists->far_start = (void *)(lists->copy + cuda_carve(&at, ((size_t)inner->n_tokens + 1) * word));
    lists->far = (void *)(lists->copy + cuda_carve(&at, own * sizeof(*lists->far)));
    return at;
}

/* Rows that a token of this rank has on `node`. */
static int rows_there(const ep_plan *plan, int token, int node)
{
    const int32_t *index = ((const struct host_plan *)plan->impl)->own.index + (size_t)token * (size_t)plan->args.topk;
    int per_rank = plan->info.n_local_experts, per_node = plan->comm->ranks_per_node, n = 0;
    uint64_t ranks = 0;

    for (int k = 0; k < plan->args.topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / per_rank;

        if (rank < 0 || rank / per_node != node)
            continue;
        ranks |= UINT64_C(1) << rank % per_node;
        n++;
    }
    return plan->args.flags & EP_PLAN_EXPANDED ? n : __builtin_popcountll(ranks);
}

/* Rows of bf16 that the sum of so many takes. */
static int units_of(const ep_plan *plan, int rows)
{
    return rows == 1 || plan->comm->config.partial_type == EP_BF16 ? 1 : 2;
}

static void fill_own(const ep_plan *plan, struct cuda_lists *lists)
{
    const struct host_plan *inner = plan->impl;
    int n = 0;

    lists->net_units[0] = 0;
    memset(lists->far_start, 0, ((size_t)inner->n_tokens + 1) * sizeof(int32_t));
    for (int node = 0; node < plan->comm->nnodes; node++) {
        lists->net[node] = (struct cuda_rail){n, inner->n_net_tokens[node]};
        for (int i = 0; i < inner->n_net_tokens[node]; i++, n++) {
            int token = inner->net_tokens[node][i];

            lists->token[n] = token;
            lists->net_units[n + 1] = lists->net_units[n] + units_of(plan, rows_there(plan, token, node));
            lists->far_start[token + 1]++;
        }
    }
    for (int64_t i = 0; i < inner->own.n_entries; i++)
        (*(inner->own.entry[i].local == plan->comm->rank % plan->comm->ranks_per_node ? &lists->rows_self
                                                                                      : &lists->rows_node))++;
    for (int token = 0; token < inner->n_tokens; token++)
        lists->far_start[token + 1] += lists->far_start[token];
    /* Ascending nodes, since the lists are gone through in that order; far_start moves on, and is put back. */
    for (int node = 0; node < plan->comm->nnodes; node++)
        for (int i = 0; i < lists->net[node].n; i++) {
            int at = lists->net[node].first + i;

            lists->far[lists->far_start[lists->token[at]]++] = (struct cuda_far_term){node, at};
        }
    memmove(lists->far_start + 1, lists->far_start, (size_t)inner->n_tokens * sizeof(int32_t));
    lists->far_start[0] = 0;
}

static void fill_rails(const ep_plan *plan, struct cuda_lists *lists)
{
    const struct host_plan *inner = plan->impl;
    size_t topk = (size_t)plan->args.topk;
    int n = 0, entries = 0;

    lists->rail_units[0] = lists->start[0] = 0;
    for (int node = 0; node < plan->comm->nnodes; node++) {
        const struct host_route *route = &inner->rail[node];

        lists->rail[node] = (struct cuda_rail){n, route->n_tokens};
        if (route->n_tokens)
            memcpy(lists->index + (size_t)n * topk, route->index, (size_t)route->n_tokens * topk * sizeof(int32_t));
        for (int i = 0; i < route->n_tokens; i++, n++) {
            int rows = route->start[i + 1] - route->start[i];

            lists->start[n + 1] = lists->start[n] + rows;
            lists->rail_units[n + 1] = lists->rail_units[n] + units_of(plan, rows);
        }
        for (int64_t i = 0; i < route->n_entries; i++, entries++)
            lists->entry[entries] =
                (struct cuda_entry){.row = route->entry[i].row, .local = route->entry[i].local, .k = route->entry[i].k};
    }
}

static ep_status upload(struct cuda_comm *cuda, const struct cuda_lists *lists, size_t bytes)
{
    CUDA_TRY(cudaMemcpyAsync(lists->block.memory, lists->copy, bytes, cudaMemcpyHostToDevice, cuda->own));
    CUDA_TRY(cudaStreamSynchronize(cuda->own));
    return EP_OK;
}

static void free_lists(struct cuda_comm *cuda, struct cuda_lists *lists)
{
    cuda_give(cuda, &lists->block);
    free(lists->copy);
    free(lists);
}

/* Positions in the lists are 32 bits wide, and a token's sum takes two units at most. */
static ep_status check_sizes(const ep_plan *plan)
{
    const struct host_plan *inner = plan->impl;
    int64_t own = 0, rails = 0, entries = 0;

    for (int node = 0; node < plan->comm->nnodes; node++) {
        own += inner->n_net_tokens[node];
        rails += inner->rail[node].n_tokens;
        entries += inner->rail[node].n_entries;
    }
    if (own < INT32_MAX / 2 && rails < INT32_MAX / 2 && entries < INT32_MAX)
        return EP_OK;
    return ep_fail(EP_E_UNSUPPORTED,
                   "plan: rank %d sends %lld tokens to other nodes and places %lld of theirs in %lld rows; "
                   "the CUDA backend has room for %d tokens and %d rows",
                   plan->comm->rank, (long long)own, (long long)rails, (long long)entries, INT32_MAX / 2, INT32_MAX);
}

ep_status cuda_lists_place(struct cuda_comm *cuda, ep_plan *plan)
{
    struct cuda_lists *lists;
    size_t bytes;
    ep_status status = EP_E_MEMORY;

    EP_TRY(check_sizes(plan));
    lists = calloc(1, sizeof(*lists));
    if (!lists)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the routes between nodes");
    bytes = lay_out(plan, lists);
    lists->copy = malloc(bytes);
    if (lists->copy) {
        lay_out(plan, lists);
        fill_own(plan, lists);
        fill_rails(plan, lists);
        status = cuda_take(cuda, bytes, &lists->block);
        if (status == EP_OK)
            status = upload(cuda, lists, bytes);
    } else {
        ep_fail(status, "plan: no memory for the routes between nodes");
    }
    /* A plan that has none makes them with its next operation. */
    if (status == EP_OK)
        cuda_plan_of(plan)->lists = lists;
    else
        free_lists(cuda, lists);
    return status;
}

void cuda_lists_free(struct cuda_comm *cuda, ep_plan *plan)
{
    struct cuda_lists *lists = lists_of(plan);

    if (lists)
        free_lists(cuda, lists);
    cuda_plan_of(plan)->lists = NULL;
}

void cuda_lists_count(const ep_plan *plan, uint64_t row_bytes, ep_stats *stats)
{
    const struct cuda_lists *lists = lists_of(plan);

    stats->rows_self = lists->rows_self;
    stats->rows_node = lists->rows_node;
    stats->rows_forward = lists->rows_forward;
    stats->bytes_forward = stats->rows_forward * row_bytes;
    stats->rows_net = cuda_of(plan->comm)->net_rows;
    stats->bytes_net = cuda_of(plan->comm)->net_bytes;
}

/* --- operations -----------------------------------------------------------------------------------------------------
 */

static int32_t chunk_tokens(const struct cuda_comm *cuda, size_t token_bytes)
{
    size_t most = cuda_proxy_most(cuda) / token_bytes;

    return (int32_t)(most > CUDA_CHUNK_TOKENS ? CUDA_CHUNK_TOKENS : most);
}

static struct cuda_rail_route rail_route(const struct cuda_lists *lists)
{
    return (struct cuda_rail_route){.entry = on_device(lists, lists->entry),
                                    .start = on_device(lists, lists->start),
                                    .index = on_device(lists, lists->index)};
}

static struct cuda_hop_side side_of(const struct cuda_lists *lists, const struct cuda_rail *rail)
{
    return (struct cuda_hop_side){.rail = rail, .device = on_device(lists, rail)};
}

/* After a failure behind the first launch the peers are to hear of it: cuda_call_end() does that. */
static ep_status queue_hop(struct cuda_comm *cuda, struct cuda_hop *hop, ep_status status, bool queued)
{
    if (status == EP_OK || queued)
        cuda_hop_queue(cuda, hop);
    else
        cuda_hop_discard(hop);
    return status;
}

ep_status cuda_nodes_dispatch(struct cuda_comm *cuda, ep_plan *plan, const struct cuda_dispatch *own, int weight_words,
                              cudaStream_t stream, bool *ret_queued)
{
    const struct cuda_lists *lists = lists_of(plan);
    size_t token_bytes = (size_t)own->row_bytes + ((size_t)own->scale_words + (size_t)weight_words) * 4;
    struct cuda_hop_args args = {.call = "ep_dispatch",
                                 .phase = HOST_DISPATCH_MOVE,
                                 .tell = own->terms.tell,
                                 .out = side_of(lists, lists->net),
                                 .in = side_of(lists, lists->rail)};
    struct cuda_nodes_dispatch place = {.own = *own, .beside = {own->scale_words, weight_words}};
    struct cuda_pack pack = {.waits = own->waits,
                             .words = cuda_proxy_words(cuda),
                             .token = on_device(lists, lists->token),
                             .x = own->x,
                             .scales = own->scales,
                             .weights = own->weights,
                             .scale_stride_token = own->scale_stride_token,
                             .scale_stride_block = own->scale_stride_block,
                             .row_bytes = own->row_bytes,
                             .beside = place.beside};
    struct cuda_hop *hop;
    ep_status status;

    args.out.tokens = args.in.tokens = chunk_tokens(cuda, token_bytes);
    args.out.token_bytes = args.in.token_bytes = token_bytes;
    args.slot_bytes = ((size_t)args.out.tokens * token_bytes + 63) / 64 * 64;
    EP_TRY(cuda_hop_prepare(cuda, &args, &pack.out, &place.in, &pack.reused, &hop));
    place.rail = rail_route(lists);
    pack.blocks = place.blocks = cuda->sms * BLOCKS_OF_SM;
    status = cuda_status(cuda_launch_pack(&pack, stream), "pack kernel");
    if (status == EP_OK) {
        *ret_queued = true;
        status = cuda_status(cuda_launch_nodes_dispatch(&place, stream), "dispatch kernel");
    }
    return queue_hop(cuda, hop, status, *ret_queued);
}

ep_status cuda_nodes_combine(struct cuda_comm *cuda, ep_plan *plan, const struct cuda_combine *own, cudaStream_t stream,
                             bool *ret_queued)
{
    const struct cuda_lists *lists = lists_of(plan);
    int weight_words = own->out_weights ? plan->args.topk : 0;
    size_t units = cuda->host.comm->config.partial_type == EP_BF16 ? 1 : 2;
    size_t token_bytes = units * (size_t)own->row_bytes + (size_t)weight_words * 4;
    struct cuda_hop_args args = {.call = "ep_combine",
                                 .phase = HOST_COMBINE_MOVE,
                                 .tell = own->terms.tell,
                                 .out = side_of(lists, lists->rail),
                                 .in = side_of(lists, lists->net)};
    struct cuda_nodes_combine sum = {.own = *own,
                                     .words = cuda_proxy_words(cuda),
                                     .rail = rail_route(lists),
                                     .rail_units = on_device(lists, lists->rail_units),
                                     .net_units = on_device(lists, lists->net_units),
                                     .far_start = on_device(lists, lists->far_start),
                                     .far = on_device(lists, lists->far),
                                     .weight_words = weight_words,
                                     .blocks = cuda->sms * BLOCKS_OF_SM};
    struct cuda_hop *hop;
    ep_status status;

    args.out.tokens = args.in.tokens = chunk_tokens(cuda, token_bytes);
    args.out.token_bytes = args.in.token_bytes = (size_t)weight_words * 4;
    args.out.unit_bytes = args.in.unit_bytes = (size_t)own->row_bytes;
    args.out.units = lists->rail_units;
    args.in.units = lists->net_units;
    args.slot_bytes = ((size_t)args.out.tokens * token_bytes + 63) / 64 * 64;
    EP_TRY(cuda_hop_prepare(cuda, &args, &sum.out, &sum.in, &sum.reused, &hop));
    status = cuda_status(cuda_launch_nodes_combine(&sum, stream), "combine kernel");
    *ret_queued = status == EP_OK;
    return queue_hop(cuda, hop, status, *ret_queued);
}

ep_status cuda_nodes_barrier(struct cuda_comm *cuda, cudaStream_t stream)
{
    const ep_comm *comm = cuda->host.comm;
    const uint32_t tell[CUDA_TELL_COMPARED] = {[CUDA_TELL_PHASE] = HOST_BARRIER};
    struct cuda_rail rail[EP_MAX_RANKS];
    struct cuda_hop_args args = {.call = "ep_barrier_on",
                                 .phase = HOST_BARRIER,
                                 .tell = tell,
                                 .slot_bytes = 16,
                                 .out = {.rail = rail, .tokens = 1}};
    struct cuda_nodes_barrier barrier;
    struct cuda_chunks in;
    struct cuda_hop *hop;
    uint64_t reused;

    for (int node = 0; node < comm->nnodes; node++)
        rail[node] = (struct cuda_rail){.first = node, .n = node != comm->node};
    args.in = args.out;
    cuda_fill_waits(cuda, HOST_BARRIER, HOST_BARRIER, &barrier.waits);
    EP_TRY(cuda_hop_prepare(cuda, &args, &barrier.chunks, &in, &reused, &hop));
    barrier.chunks.landed = in.landed;
    barrier.chunks.used = in.used;
    return queue_hop(cuda, hop, cuda_status(cuda_launch_nodes_barrier(&barrier, stream), "barrier kernel"), false);
}
