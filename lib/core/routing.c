/* SPDX-License-Identifier: Apache-2.0 */
#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

/* For a routing that is known to be invalid: finds the first entry out of range. */
static ep_status fail_range(const struct ep_routing_shape *shape, const void *topk_idx, int idx_type)
{
    size_t n = (size_t)shape->n_tokens * (size_t)shape->topk;

    for (size_t i = 0; i < n; i++) {
        long long expert = idx_type == EP_I64 ? ((const int64_t *)topk_idx)[i] : ((const int32_t *)topk_idx)[i];
        size_t token = i / (size_t)shape->topk, position = i % (size_t)shape->topk;

        if (expert < -1)
            return ep_fail(EP_E_ROUTING, "routing: token %zu: expert %lld at position %zu is below -1", token, expert,
                           position);
        if (expert >= shape->n_experts)
            return ep_fail(EP_E_ROUTING, "routing: token %zu: expert %lld at position %zu is not below n_experts %d",
                           token, expert, position, shape->n_experts);
    }
    return ep_fail(EP_E_ROUTING, "routing: topk_idx changed while it was checked");
}

/* Two passes, because the range check vectorises only if nothing else in its loop depends on the value. */
static ep_status check_range(const struct ep_routing_shape *shape, const void *topk_idx, int idx_type, int32_t *ret_idx)
{
    size_t n = (size_t)shape->n_tokens * (size_t)shape->topk;
    unsigned bad = 0;

    /* Unsigned: -1 + 1 is 0, and other negative values become huge. */
    if (idx_type == EP_I64) {
        const int64_t *idx = topk_idx;

        for (size_t i = 0; i < n; i++) {
            bad |= (uint64_t)idx[i] + 1 > (uint64_t)shape->n_experts;
            ret_idx[i] = (int32_t)idx[i];
        }
    } else {
        const int32_t *idx = topk_idx;

        for (size_t i = 0; i < n; i++) {
            bad |= (uint32_t)idx[i] + 1 > (uint32_t)shape->n_experts;
            ret_idx[i] = idx[i];
        }
    }
    return bad ? fail_range(shape, topk_idx, idx_type) : EP_OK;
}

static ep_status fail_twice(int token, const int32_t *row, int topk)
{
    for (int second = 1; second < topk; second++)
        for (int first = 0; first < second; first++)
            if (row[second] >= 0 && row[first] == row[second])
                return ep_fail(EP_E_ROUTING, "routing: token %d: expert %d twice, at positions %d and %d", token,
                               row[second], first, second);
    return ep_fail(EP_E_ROUTING, "routing: token %d: topk_idx changed while it was checked", token);
}

/* `last_token` [E + 1], zeroed: 1 + the last token that chose the expert; entry 0 stands for "none". */
static ep_status check_distinct(const struct ep_routing_shape *shape, const int32_t *idx, uint32_t *last_token)
{
    for (int token = 0; token < shape->n_tokens; token++) {
        const int32_t *row = idx + (size_t)token * (size_t)shape->topk;
        uint32_t mark = (uint32_t)token + 1;
        bool twice = false;

        for (int k = 0; k < shape->topk; k++) {
            uint32_t *last = &last_token[row[k] + 1];

            twice |= (*last == mark) & (row[k] >= 0);
            *last = mark;
        }
        if (twice)
            return fail_twice(token, row, shape->topk);
    }
    return EP_OK;
}

/* `rows` [E + 1], zeroed: the choices of each expert; entry 0 stands for "none". */
static ep_status check_rows(const struct ep_routing_shape *shape, const int32_t *idx, uint32_t *rows)
{
    size_t n = (size_t)shape->n_tokens * (size_t)shape->topk, topk = (size_t)shape->topk;

    for (size_t i = 0; i < n; i++)
        if (++rows[idx[i] + 1] > (uint32_t)shape->max_rows && idx[i] >= 0)
            return ep_fail(EP_E_ROUTING,
                           "routing: token %zu: expert %d at position %zu is choice %d of this expert, which has room "
                           "for %d rows of each rank (max_tokens)",
                           i / topk, idx[i], i % topk, shape->max_rows + 1, shape->max_rows);
    return EP_OK;
}

ep_status ep_routing_check(const struct ep_routing_shape *shape, const void *topk_idx, int idx_type, int32_t *ret_idx)
{
    bool limited = shape->max_rows > 0 && (int64_t)shape->n_tokens * shape->topk > shape->max_rows;
    ep_status status;
    uint32_t *scratch;

    EP_TRY(check_range(shape, topk_idx, idx_type, ret_idx));
    if (!shape->distinct && !limited)
        return EP_OK;
    scratch = calloc((size_t)shape->n_experts + 1, sizeof(*scratch));
    if (!scratch)
        return ep_fail(EP_E_MEMORY, "routing: no memory to check %d experts", shape->n_experts);
    /* Distinct choices of a token need at most one row of an expert. */
    status = shape->distinct ? check_distinct(shape, ret_idx, scratch) : check_rows(shape, ret_idx, scratch);
    free(scratch);
    return status;
}

/* The rank and node of an expert. From a table, because a division per entry costs more than the counting itself. */
struct location {
    int32_t rank, node;
};

struct count_scratch {
    struct location *locations;                /* [E] */
    uint32_t *rank_last, *node_last;           /* [R], [nodes]: 1 + the last token counted there */
    int32_t *per_rank, *per_node, *per_expert; /* for counts that the caller does not want */
};

static bool new_scratch(const struct ep_routing_shape *shape, struct count_scratch *ret_scratch)
{
    size_t experts = (size_t)shape->n_experts, ranks = (size_t)shape->nranks;
    int local = shape->n_experts / shape->nranks;
    char *memory;

    /* There are never more nodes than ranks. */
    memory = calloc(1, experts * (sizeof(struct location) + sizeof(int32_t)) + 4 * ranks * sizeof(int32_t));
    if (!memory)
        return false;
    ret_scratch->locations = (struct location *)memory;
    ret_scratch->per_expert = (int32_t *)(ret_scratch->locations + experts);
    ret_scratch->per_rank = ret_scratch->per_expert + experts;
    ret_scratch->per_node = ret_scratch->per_rank + ranks;
    ret_scratch->rank_last = (uint32_t *)(ret_scratch->per_node + ranks);
    ret_scratch->node_last = ret_scratch->rank_last + ranks;
    for (int expert = 0; expert < shape->n_experts; expert++) {
        int rank = expert / local;

        ret_scratch->locations[expert] = (struct location){.rank = rank, .node = rank / shape->ranks_per_node};
    }
    return true;
}

ep_status ep_routing_drop_absent(const ep_comm *comm, const struct ep_routing_shape *shape, bool drop, int32_t *idx,
                                 int64_t *ret_dropped)
{
    int n_local = shape->n_experts / shape->nranks;
    size_t topk = (size_t)shape->topk, n = (size_t)shape->n_tokens * topk;

    *ret_dropped = 0;
    for (size_t i = 0; comm->n_members < comm->nranks && i < n; i++) {
        int rank = idx[i] < 0 ? -1 : idx[i] / n_local;

        if (rank < 0 || ep_comm_has(comm, rank))
            continue;
        if (!drop)
            return ep_fail(
                EP_E_ROUTING,
                "routing: token %zu: expert %d at position %zu is of rank %d, which is absent: choose another "
                "one, or set EP_COMM_DROP_ABSENT",
                i / topk, idx[i], i % topk, rank);
        idx[i] = -1;
        ++*ret_dropped;
    }
    return EP_OK;
}

ep_status ep_routing_count(const struct ep_routing_shape *shape, const int32_t *idx,
                           const struct ep_routing_counts *counts)
{
    size_t ranks = (size_t)shape->nranks, nodes = ranks / (size_t)shape->ranks_per_node;
    struct count_scratch scratch;
    int32_t *per_rank, *per_node, *per_expert;

    if (!new_scratch(shape, &scratch))
        return ep_fail(EP_E_MEMORY, "routing: no memory to count %d experts on %d ranks", shape->n_experts,
                       shape->nranks);
    per_rank = counts->per_rank ? counts->per_rank : scratch.per_rank;
    per_node = counts->per_node ? counts->per_node : scratch.per_node;
    per_expert = counts->per_expert ? counts->per_expert : scratch.per_expert;
    memset(per_rank, 0, ranks * sizeof(*per_rank));
    memset(per_node, 0, nodes * sizeof(*per_node));
    memset(per_expert, 0, (size_t)shape->n_experts * sizeof(*per_expert));
    if (counts->in_rank)
        memset(counts->in_rank, 0, (size_t)shape->n_tokens * ranks);

    for (int token = 0; token < shape->n_tokens; token++) {
        const int32_t *row = idx + (size_t)token * (size_t)shape->topk;
        uint8_t *in_rank = counts->in_rank ? counts->in_rank + (size_t)token * ranks : NULL;
        uint32_t mark = (uint32_t)token + 1;

        for (int k = 0; k < shape->topk; k++) {
            struct location location;

            if (row[k] < 0)
                continue;
            location = scratch.locations[row[k]];
            per_expert[row[k]]++;
            /* Add the comparison instead of branching: whether a rank is new to a token is unpredictable. */
            per_rank[location.rank] += scratch.rank_last[location.rank] != mark;
            scratch.rank_last[location.rank] = mark;
            per_node[location.node] += scratch.node_last[location.node] != mark;
            scratch.node_last[location.node] = mark;
            if (in_rank)
                in_rank[location.rank] = 1;
        }
    }
    free(scratch.locations);
    return EP_OK;
}

ep_status ep_routing_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    struct ep_routing_shape shape = ep_routing_shape_of(comm, args->n_tokens, args->topk, args->n_experts);
    struct ep_routing_counts counts = {.per_rank = layout->tokens_per_rank,
                                       .per_node = layout->tokens_per_node,
                                       .per_expert = layout->tokens_per_expert,
                                       .in_rank = layout->token_in_rank};
    size_t entries = (size_t)args->n_tokens * (size_t)args->topk;
    int32_t *idx = malloc((entries ? entries : 1) * sizeof(*idx));
    int64_t n_dropped;
    ep_status status;

    if (!idx)
        return ep_fail(EP_E_MEMORY, "routing: no memory for %zu top-k entries", entries);
    status = ep_routing_check(&shape, args->topk_idx, args->idx_type, idx);
    if (status == EP_OK)
        status = ep_routing_drop_absent(comm, &shape, comm->config.flags & EP_COMM_DROP_ABSENT, idx, &n_dropped);
    if (status == EP_OK)
        status = ep_routing_count(&shape, idx, &counts);
    free(idx);
    return status;
}
