/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency: the combine, which pulls. See lowlatency.c. */
#include "backend/host/lowlatency.h"

#include "core/routing.h"

#include <stdio.h>
#include <string.h>

/*
 * Reserves pages for the first rows of an expert in a combine buffer. It has room for all tokens of all ranks on each
 * expert, of which few arrive: only those take memory, and the call fails here if there is none.
 */
ep_status ll_reserve_rows(ep_ll *ll, uint64_t number, int max_tokens, int expert, int32_t n_rows)
{
    struct host_ll *inner = ll->impl;
    size_t row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)ll->comm->nranks * (size_t)max_tokens;
    size_t at = (size_t)((char *)inner->combine_buffer[number & 1] - (char *)inner->segment);
    int32_t *reserved = &inner->reserved[number & 1][expert];

    /* The experts are at other offsets: reserve again. */
    if (inner->reserved_for[number & 1] != max_tokens)
        memset(inner->reserved[number & 1], 0, (size_t)ll->n_local * sizeof(*reserved));
    inner->reserved_for[number & 1] = max_tokens;
    if (n_rows <= *reserved)
        return EP_OK;
    EP_TRY(ep_group_reserve(inner->group, inner->segment, at + ((size_t)expert * rows + (size_t)*reserved) * row,
                            (size_t)(n_rows - *reserved) * row));
    *reserved = n_rows;
    return EP_OK;
}

/* Copies the received rows to memory that peers can read. */
static ep_status copy_rows(ep_ll *ll, const struct ll_combine *combine, void *buffer)
{
    const struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;
    const struct ll_range *ranges = inner->ranges[combine->call & 1];
    size_t row = (size_t)ll->config.hidden * 2, rows = (size_t)nranks * (size_t)combine->max_tokens;

    for (int expert = 0; expert < ll->n_local; expert++) {
        const struct ll_range *last = &ranges[expert * nranks + nranks - 1];
        size_t at = (size_t)expert * rows * row;

        EP_TRY(ll_reserve_rows(ll, combine->number, combine->max_tokens, expert, last->begin + last->count));
        memcpy((char *)buffer + at, (const char *)combine->args.x + at, (size_t)(last->begin + last->count) * row);
    }
    return EP_OK;
}

static ep_status publish_input(ep_ll *ll, struct ll_combine *combine)
{
    struct host_ll *inner = ll->impl;
    struct ll_combine_desc *mine = &ll_shared_of(inner, ll->comm->rank)->combine_desc[combine->number & 1];
    void *buffer = inner->combine_buffer[combine->number & 1];
    bool zero_copy = combine->args.flags & EP_LL_ZERO_COPY;

    mine->call = combine->call;
    mine->no_partial_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0;
    combine->in_place = !zero_copy && ep_group_find(inner->group, combine->args.x,
                                                    ll_combine_bytes(ll, combine->max_tokens), &mine->address);
    if (combine->in_place)
        return EP_OK;
    if (!zero_copy)
        EP_TRY(copy_rows(ll, combine, buffer));
    mine->address = inner->address[ll->comm->rank];
    mine->address.offset = (uint64_t)((char *)buffer - (char *)inner->segment);
    return EP_OK;
}

/* The rows of a token, and their ranks. Of a rank of another node: where it would send the row of that choice. */
struct ll_terms {
    const uint16_t *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    int rank[EP_MAX_TOPK];
    int n;
};

/* A rank of another node sends its sum as the row of its first term n. */
static bool is_sent(const struct ll_combine *combine, const struct ll_terms *terms, int n)
{
    int first = 0;

    while (terms->rank[first] != terms->rank[n])
        first++;
    return first == n || combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;
}

/* Row i (from 0) of this rank for an expert, which a token needs, is not among the `count` ones. */
static ep_status fail_row_count(ep_ll *ll, int rank, int32_t count, int expert, int token, int32_t i)
{
    EP_TRY(ll_check_masks(ll, EP_GROUP_LL_COMBINE));
    return ep_group_set_own_failure(
        ep_group_of(ll->comm),
        ep_fail(EP_E_MISMATCH, "ep_ll_combine: rank %d has %d rows of rank %d for expert %d, but token %d is number %d",
                rank, count, ll->comm->rank, expert, token, i + 1),
        rank, EP_GROUP_LL_COMBINE);
}

/* In the order of k. */
static ep_status find_terms(ep_ll *ll, const struct ll_combine *combine, int t, void *const *inputs,
                            struct ll_terms *ret_terms)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks, me = ll->comm->rank, n = 0;
    size_t topk = (size_t)combine->args.topk, row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)nranks * (size_t)combine->max_tokens;
    const int32_t *index = inner->index[combine->call & 1] + (size_t)t * topk;
    const int32_t *wanted = combine->index + (size_t)t * topk;

    for (size_t k = 0; k < topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, local = index[k] < 0 ? 0 : index[k] % ll->n_local;
        struct ll_range range;
        int32_t i;

        if (rank < 0)
            continue;
        i = inner->seen[index[k]]++;
        if (inner->masked[rank] || wanted[k] < 0)
            continue;
        ret_terms->weights[n] = combine->args.topk_weights[(size_t)t * topk + k];
        ret_terms->rank[n] = rank;
        if (ll_is_remote(ll, rank)) {
            EP_TRY(ll_find_sent_row(ll, combine, rank, t, k, is_sent(combine, ret_terms, n), &ret_terms->rows[n]));
            n++;
            continue;
        }
        ep_group_read_shared(&range, &ll_ranges_of(ll, rank, combine->call)[local * nranks + me], sizeof(range));
        if (range.begin < 0 || range.count < 0 || (size_t)range.begin + (size_t)range.count > rows)
            return ll_fail_damaged(ll, rank, EP_GROUP_LL_COMBINE, "where the rows of this rank are",
                                   (int64_t)((uint64_t)(uint32_t)range.begin << 32 | (uint32_t)range.count));
        if (i >= range.count)
            return fail_row_count(ll, rank, range.count, index[k], t, i);
        ret_terms->rows[n++] =
            (const uint16_t *)(const void *)((const char *)inputs[rank] +
                                             ((size_t)local * rows + (size_t)(range.begin + i)) * row);
    }
    ret_terms->n = n;
    return EP_OK;
}

/*
 * Groups the terms by rank, in the order of the first term of each rank. ret_sizes: sizes of the groups; returns their
 * number. A group of another node is one row: its sum, or its only row.
 */
static int group_terms(const ep_ll *ll, const struct ll_terms *terms, struct ll_terms *ret_terms, int *ret_sizes)
{
    bool taken[EP_MAX_TOPK] = {false};
    int n_groups = 0, n = 0;

    for (int first = 0; first < terms->n; first++) {
        int start = n;

        if (taken[first])
            continue;
        for (int i = first; i < terms->n; i++) {
            if (terms->rank[i] != terms->rank[first])
                continue;
            ret_terms->rows[n] = terms->rows[i];
            ret_terms->weights[n++] = terms->weights[i];
            taken[i] = true;
        }
        if (ll_is_remote(ll, terms->rank[first]) && n - start > 1) {
            ret_terms->weights[start] = 1;
            n = start + 1;
        }
        ret_sizes[n_groups++] = n - start;
    }
    ret_terms->n = n;
    return n_groups;
}

/* Weighted sum of the rows of token t. */
static ep_status pull_token(ep_ll *ll, const struct ll_combine *combine, int t, void *const *inputs)
{
    const struct ep_rows_ops *ops = ep_rows_get();
    int hidden = ll->config.hidden, n_groups, sizes[EP_MAX_TOPK];
    uint16_t *out = (uint16_t *)combine->args.out + (size_t)t * (size_t)hidden;
    struct ll_terms terms, groups;

    EP_TRY(find_terms(ll, combine, t, inputs, &terms));
    if (combine->args.flags & EP_LL_NO_PARTIAL_REDUCE) {
        ops->weighted_sum_bf16(out, terms.rows, terms.weights, terms.n, hidden);
        return EP_OK;
    }
    n_groups = group_terms(ll, &terms, &groups, sizes);
    if (n_groups == groups.n)
        ops->weighted_sum_bf16(out, groups.rows, groups.weights, groups.n, hidden);
    else
        ops->grouped_sum_bf16(out, groups.rows, groups.weights, sizes, n_groups, hidden);
    return EP_OK;
}

/*
 * Finds a combine buffer, which is mapped with the segment: a rank may exit when it has read all rows of its last
 * combine, and the memory of a process that has exited cannot be mapped. NULL: elsewhere.
 */
static void *find_buffer(const struct host_ll *inner, int rank, const struct ep_group_address *address, size_t bytes)
{
    const struct ep_group_address *segment = &inner->address[rank];

    if (address->slot != segment->slot || address->generation != segment->generation || address->offset % 16 ||
        address->offset > inner->segment_bytes || bytes > inner->segment_bytes - address->offset)
        return NULL;
    return inner->peer[rank] + address->offset;
}

/* Maps the input of a rank of this node. With masking, a rank that has exited is masked. */
static ep_status map_input(ep_ll *ll, const struct ll_combine *combine, int rank, void **ret_input)
{
    struct host_ll *inner = ll->impl;
    size_t bytes = ll_combine_bytes(ll, combine->max_tokens);
    struct ll_combine_desc theirs;
    char reason[EP_ERROR_TEXT_BYTES];
    ep_status status;

    ep_group_read_shared(&theirs, &ll_shared_of(inner, rank)->combine_desc[combine->number & 1], sizeof(theirs));
    EP_TRY(ll_check_combine_desc(ll, combine, rank, &theirs));
    *ret_input = find_buffer(inner, rank, &theirs.address, bytes);
    if (*ret_input)
        return EP_OK;
    status = ep_group_map(inner->group, rank, &theirs.address, bytes, ret_input);
    if (status == EP_OK)
        return EP_OK;
    snprintf(reason, sizeof(reason), "%s", ep_last_error());
    /* A rank that has masked this one may have freed it: no failure of the group. */
    EP_TRY(ll_check_masks(ll, EP_GROUP_LL_COMBINE));
    ep_fail(status, "%s", reason);
    if ((status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT) && (ll->config.flags & EP_LL_MASK_DEAD)) {
        ll_set_mask(ll, rank, true);
        return EP_OK;
    }
    return ep_group_set_own_failure(inner->group, status, rank, EP_GROUP_LL_COMBINE);
}

ep_status ll_pull(ep_ll *ll, const struct ll_combine *combine)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_combine_args *args = &combine->args;
    /* Ranks of other nodes were sent their rows. */
    const struct ll_wait readers = {LL_WORD(completed), combine->serial, EP_GROUP_LL_DONE, .ranks = LL_THIS_NODE};
    int nranks = ll->comm->nranks;
    void *inputs[EP_MAX_RANKS];
    ep_status status = EP_OK;

    EP_TRY(ll_wait(
        ll, &(struct ll_wait){LL_WORD(rows_ready), combine->serial, EP_GROUP_LL_COMBINE, .add = args->wait_cost_add}));
    ep_group_unmap_stale(inner->group);
    for (int rank = 0; rank < nranks; rank++)
        if (!inner->masked[rank] && !ll_is_remote(ll, rank))
            EP_TRY(map_input(ll, combine, rank, &inputs[rank]));
    memset(inner->seen, 0, (size_t)ll->config.n_experts * sizeof(*inner->seen));
    for (int t = 0; status == EP_OK && t < args->n_tokens; t++)
        status = pull_token(ll, combine, t, inputs);
    if (status == EP_OK)
        status = ll_check_masks(ll, EP_GROUP_LL_COMBINE);
    ll_publish_completed(ll, combine->serial);
    return status == EP_OK && combine->in_place ? ll_wait(ll, &readers) : status;
}

ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int topk, int32_t *ret_index)
{
    struct ep_routing_shape shape = ep_routing_shape_of(ll->comm, n_tokens, topk, ll->config.n_experts);

    return ep_routing_check(&shape, topk_idx, idx_type, ret_index);
}

/* The routing must be that of the dispatch, except for excluded choices. */
static ep_status check_routing(const ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    const ep_ll_combine_args *args = &combine->args;
    const int32_t *sent = inner->index[combine->call & 1], *index = combine->index;
    size_t topk = (size_t)args->topk, entries = (size_t)args->n_tokens * topk;

    EP_TRY(ll_load_index(ll, args->topk_idx, args->idx_type, args->n_tokens, args->topk, combine->index));
    for (size_t i = 0; i < entries; i++)
        if (index[i] != sent[i] && index[i] >= 0)
            return ep_fail(EP_E_ROUTING,
                           "ep_ll_combine: token %zu: topk_idx is %d at position %zu, but its dispatch had %d",
                           i / topk, index[i], i % topk, sent[i]);
    return EP_OK;
}

ep_status ll_start_combine(ep_ll *ll, const struct ll_combine *wanted)
{
    struct host_ll *inner = ll->impl;
    struct ll_combine *combine = &inner->combine[wanted->number & 1];
    int32_t *index = combine->index;
    /* The previous combine: rows and weights in segments, descriptor and buffer in this one. */
    const struct ll_wait unused = {LL_WORD(completed), inner->combine[(wanted->number + 1) & 1].serial,
                                   EP_GROUP_LL_COMBINE_BUFFER, .ranks = LL_ALL};

    *combine = *wanted;
    combine->index = index;
    EP_TRY(check_routing(ll, combine));
    if ((ll->comm->config.flags & EP_COMM_CHECK_VALUES) &&
        host_has_nan(combine->args.topk_weights, (size_t)combine->args.n_tokens * (size_t)combine->args.topk))
        return ep_fail(EP_E_VALUE, "ep_ll_combine: NaN in topk_weights of rank %d", ll->comm->rank);
    combine->serial = ++inner->serial;
    EP_TRY(ll_wait(ll, &unused));
    EP_TRY(publish_input(ll, combine));
    for (int rank = inner->group->first; rank < inner->group->first + inner->group->nlocal; rank++)
        ll_publish_to(ll, rank, LL_WORD(rows_ready), combine->serial);
    ll_send_weights(ll, combine);
    EP_TRY(ll_send_rows(ll, combine));
    return combine->args.flags & EP_LL_RECV_HOOK ? EP_OK : ll_pull(ll, combine);
}
