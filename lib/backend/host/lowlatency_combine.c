/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency: the combine. Within a node it pulls: see lowlatency.c. */
#include "backend/host/lowlatency.h"

#include "base/backoff.h"
#include "core/routing.h"

#include <stdio.h>
#include <string.h>

/* Replaces the weight of a choice that is excluded from a combine. */
#define WEIGHT_EXCLUDED UINT32_MAX

/*
 * --- between nodes ---
 *
 * From another node each rank sends one row for each token, the sum of its rows of that token, grouped and rounded as
 * the contract says; this needs the weights of the owner, so a combine lasts until all ranks that are not masked have
 * begun theirs. These functions do nothing on one node.
 */

static bool is_sent_to(const ep_ll *ll, int rank)
{
    return ll_is_remote(ll, rank) && !((const struct host_ll *)ll->impl)->masked[rank];
}

/* --- the owner of the tokens --- */

/* The arguments that must be equal on all ranks. */
static uint32_t detail_of(uint64_t call, bool no_partial_reduce)
{
    return (uint32_t)call << 1 | no_partial_reduce;
}

static bool reduces(const struct ll_combine *combine)
{
    return !(combine->args.flags & EP_LL_NO_PARTIAL_REDUCE);
}

static void send_weights(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    size_t topk = (size_t)combine->args.topk;
    const int32_t *index = inner->index[combine->call & 1];

    for (size_t i = 0; inner->net && i < (size_t)combine->args.n_tokens * topk; i++) {
        int rank = index[i] < 0 ? -1 : index[i] / ll->n_local;
        int64_t entry = (int64_t)(i / topk) * ll->config.topk + (int64_t)(i % topk);
        struct ll_view to;
        uint32_t bits;

        if (rank < 0 || !is_sent_to(ll, rank))
            continue;
        to = ll_to(ll, rank);
        memcpy(&bits, &combine->args.topk_weights[i], sizeof(bits));
        /* One NaN is reserved. */
        bits = combine->index[i] < 0 ? WEIGHT_EXCLUDED : bits == WEIGHT_EXCLUDED ? bits >> 1 : bits;
        ll_wire_store(to.segment, ll_wire_weight_at(to.layout, to.source, entry), combine->serial << 32 | bits);
    }
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_view to;

        if (!is_sent_to(ll, rank))
            continue;
        to = ll_to(ll, rank);
        ll_words_of(&to)->desc[LL_WIRE_DESC_WEIGHTS] =
            (struct ll_wire_desc){.number = combine->serial,
                                  .combine = 1,
                                  .max_tokens = combine->max_tokens,
                                  .parts = 1,
                                  .detail = detail_of(combine->call, !reduces(combine))};
        ll_publish_to(ll, rank, LL_WORD(weights_ready), combine->serial);
    }
}

static ep_status find_sent_row(ep_ll *ll, const struct ll_combine *combine, int rank, int t, size_t k, bool sent,
                               const uint16_t **ret_row)
{
    const struct ll_view from = ll_from(ll, rank);
    int64_t entry = (int64_t)t * ll->config.topk + (int64_t)k;
    uint64_t number = ll_wire_load(from.segment, ll_wire_row_flag_at(from.layout, entry, 1));

    *ret_row = (const uint16_t *)(const void *)(from.segment + ll_wire_row_at(from.layout, entry));
    if (!sent || number == combine->serial)
        return EP_OK;
    return ll_fail_damaged(ll, rank, EP_GROUP_LL_COMBINE, "the number of a row", (int64_t)number);
}

/* --- the rank that has the rows --- */

/* Sends the sum of `n` rows, which is the row itself if there is only one, as the row of an entry. */
static void send_row(ep_ll *ll, const struct ll_combine *combine, int rank, int64_t entry, const uint16_t *const *rows,
                     const float *weights, int n)
{
    const struct ll_view to = ll_to(ll, rank);
    unsigned char *row = to.segment + ll_wire_row_at(to.layout, entry);

    if (n == 1)
        memcpy(row, rows[0], (size_t)ll->config.hidden * 2);
    else
        ep_rows_get()->weighted_sum_bf16((uint16_t *)(void *)row, rows, weights, n, ll->config.hidden);
    ll_wire_store(to.segment, ll_wire_row_flag_at(to.layout, entry, 1), combine->serial);
}

/* Sends the rows of one token of `rank`, in the entries of their first choices. */
static ep_status send_token(ep_ll *ll, const struct ll_combine *combine, int rank, int t)
{
    const struct host_ll *inner = ll->impl;
    const struct ll_choice *choices = ll_choices_of(ll, combine->call, rank, t);
    size_t nranks = (size_t)ll->comm->nranks, rows_of_expert = nranks * (size_t)combine->max_tokens;
    const struct ll_range *ranges = inner->ranges[combine->call & 1] + rank;
    const struct ll_view from = ll_from(ll, rank);
    const uint16_t *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    int64_t first = 0;
    int n = 0;

    for (int k = 0; k < ll->config.topk; k++) {
        int64_t entry = (int64_t)t * ll->config.topk + k;
        size_t expert = (size_t)choices[k].expert;
        uint64_t word;
        uint32_t bits;

        if (choices[k].expert < 0)
            continue;
        word = ll_wire_load(from.segment, ll_wire_weight_at(from.layout, rank, entry));
        bits = (uint32_t)word;
        if (word >> 32 != (uint32_t)combine->serial)
            return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of a weight", (int64_t)(word >> 32));
        if (bits == WEIGHT_EXCLUDED)
            continue;
        first = n ? first : entry;
        memcpy(&weights[n], &bits, sizeof(bits));
        rows[n++] = (const uint16_t *)combine->args.x +
                    (expert * rows_of_expert + (size_t)(ranges[expert * nranks].begin + choices[k].index)) *
                        (size_t)ll->config.hidden;
        if (!reduces(combine)) {
            send_row(ll, combine, rank, first, rows, weights, n);
            n = 0;
        }
    }
    if (n)
        send_row(ll, combine, rank, first, rows, weights, n);
    return EP_OK;
}

static ep_status send_rows_to(ep_ll *ll, const struct ll_combine *combine, int rank)
{
    const struct ll_view from = ll_from(ll, rank), to = ll_to(ll, rank);
    uint32_t theirs = __atomic_load_n(&ll_words_of(&from)->detail[rank], __ATOMIC_RELAXED);
    /* The low bits of the numbers of calls are sent. */
    int32_t ahead = (int32_t)((theirs >> 1) - (detail_of(combine->call, false) >> 1));
    struct ll_combine_desc peer = {.call = combine->call + (uint64_t)ahead, .no_partial_reduce = theirs & 1};
    const struct ll_wire_desc desc = {
        .number = combine->serial, .combine = 1, .max_tokens = combine->max_tokens, .parts = 1};

    EP_TRY(ll_check_combine_desc(ll, combine, rank, &peer));
    for (int t = 0; t < combine->max_tokens; t++)
        EP_TRY(send_token(ll, combine, rank, t));
    ll_words_of(&to)->desc[combine->serial & 1] = desc;
    ll_publish_to(ll, rank, LL_WORD(rows_ready), combine->serial);
    return EP_OK;
}

/* Ranks to which rows were sent. */
struct sent {
    ep_ll *ll;
    const struct ll_combine *combine;
    bool rank[EP_MAX_RANKS];
};

/*
 * Sends to all ranks whose weights have arrived. A rank must not wait until others have sent theirs: it would consider
 * this rank late.
 */
static ep_status send_to_ready(void *context)
{
    struct sent *sent = context;
    ep_ll *ll = sent->ll;

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!is_sent_to(ll, rank) || sent->rank[rank] ||
            ll_load(ll, rank, LL_WORD(weights_ready)) < sent->combine->serial)
            continue;
        EP_TRY(send_rows_to(ll, sent->combine, rank));
        sent->rank[rank] = true;
    }
    return EP_OK;
}

static ep_status send_rows(ep_ll *ll, const struct ll_combine *combine)
{
    struct sent sent = {.ll = ll, .combine = combine};
    const struct ll_wait weights = {LL_WORD(weights_ready),  combine->serial,       EP_GROUP_LL_WEIGHTS,
                                    .ranks = LL_OTHER_NODES, .work = send_to_ready, .context = &sent};

    EP_TRY(ll_wait(ll, &weights));
    return send_to_ready(&sent);
}

/* --- within a node --- */

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

/* Waits until a block of an expert's rows is complete, and meanwhile takes what ranks of other nodes send. */
static ep_status wait_signal(ep_ll *ll, const struct ll_combine *combine, int expert, int64_t block)
{
    const ep_ll_combine_args *args = &combine->args;
    const uint32_t *signal = args->signals + expert * ep_ll_signal_blocks(ll, args, combine->max_tokens) + block;
    struct ep_group *group = ep_group_of(ll->comm);
    uint64_t limit_ns = ep_deadline_ns(ll->comm->config.timeout_ms);
    bool moved;

    for (;;) {
        uint64_t now = ep_now_ns();
        uint32_t value = __atomic_load_n(signal, __ATOMIC_ACQUIRE);

        if (value >= args->signal_value)
            return EP_OK;
        if (now >= limit_ns)
            return ep_group_set_own_failure(group,
                                            ep_ll_fail_signal(ll->comm, expert, block, value, args->signal_value),
                                            ll->comm->rank, EP_GROUP_LL_SIGNALS);
        moved = false;
        EP_TRY(ll_net_progress(ll, EP_GROUP_LL_SIGNALS, ll->comm->rank, NULL, &moved));
        EP_TRY(ll->config.flags & EP_LL_MASK_DEAD ? ep_group_check_abort(group) : ep_group_check(group));
        if (!moved)
            ep_backoff_sleep();
    }
}

static ep_status wait_signals(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    const struct ll_range *ranges = inner->ranges[combine->call & 1];

    for (int expert = 0; combine->args.signals && expert < ll->n_local; expert++) {
        const struct ll_range *last = &ranges[expert * ll->comm->nranks + ll->comm->nranks - 1];

        for (int64_t block = 0; block * combine->args.signal_rows < last->begin + last->count; block++)
            EP_TRY(wait_signal(ll, combine, expert, block));
    }
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
            EP_TRY(find_sent_row(ll, combine, rank, t, k, is_sent(combine, ret_terms, n), &ret_terms->rows[n]));
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
 * Groups the terms by rank, in the order of the first term of each rank, and makes one term of each group: its only
 * row, or the sum of its rows, which a rank of another node has sent as the first of them.
 */
static void reduce_terms(const ep_ll *ll, struct ll_terms *terms)
{
    const struct host_ll *inner = ll->impl;
    int n_groups = 0, n;

    for (int first = 0; first < terms->n; first++) {
        int rank = terms->rank[first];
        const uint16_t *rows[EP_MAX_TOPK];
        float weights[EP_MAX_TOPK];

        n = 0;
        for (int i = first; rank >= 0 && i < terms->n; i++) {
            if (terms->rank[i] != rank)
                continue;
            rows[n] = terms->rows[i];
            weights[n++] = terms->weights[i];
            terms->rank[i] = -1;
        }
        if (!n)
            continue;
        terms->rows[n_groups] = rows[0];
        terms->weights[n_groups] = n > 1 ? 1 : weights[0];
        if (n > 1 && !ll_is_remote(ll, rank)) {
            uint16_t *sum = inner->sums + (size_t)n_groups * (size_t)ll->config.hidden;

            ep_rows_get()->weighted_sum_bf16(sum, rows, weights, n, ll->config.hidden);
            terms->rows[n_groups] = sum;
        }
        n_groups++;
    }
    terms->n = n_groups;
}

/* Weighted sum of the rows of token t. */
static ep_status pull_token(ep_ll *ll, const struct ll_combine *combine, int t, void *const *inputs)
{
    int hidden = ll->config.hidden;
    struct ll_terms terms;

    EP_TRY(find_terms(ll, combine, t, inputs, &terms));
    if (reduces(combine))
        reduce_terms(ll, &terms);
    ep_rows_get()->weighted_sum_bf16((uint16_t *)combine->args.out + (size_t)t * (size_t)hidden, terms.rows,
                                     terms.weights, terms.n, hidden);
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

ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int topk, int max_rows,
                        int32_t *ret_index)
{
    struct ep_routing_shape shape = ep_routing_shape_of(ll->comm, n_tokens, topk, ll->config.n_experts);
    bool drop = ll->config.flags & EP_LL_MASK_DEAD || ll->comm->config.flags & EP_COMM_DROP_ABSENT;
    int64_t n_dropped;

    shape.max_rows = max_rows;
    EP_TRY(ep_routing_check(&shape, topk_idx, idx_type, ret_index));
    return ep_routing_drop_absent(ll->comm, &shape, drop, ret_index, &n_dropped);
}

/* The routing must be that of the dispatch, except for excluded choices. */
static ep_status check_routing(const ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    const ep_ll_combine_args *args = &combine->args;
    const int32_t *sent = inner->index[combine->call & 1], *index = combine->index;
    size_t topk = (size_t)args->topk, entries = (size_t)args->n_tokens * topk;

    EP_TRY(ll_load_index(ll, args->topk_idx, args->idx_type, args->n_tokens, args->topk, 0, combine->index));
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
    EP_TRY(wait_signals(ll, combine));
    EP_TRY(publish_input(ll, combine));
    for (int rank = inner->group->first; rank < inner->group->first + inner->group->nlocal; rank++)
        ll_publish_to(ll, rank, LL_WORD(rows_ready), combine->serial);
    send_weights(ll, combine);
    EP_TRY(send_rows(ll, combine));
    return combine->args.flags & EP_LL_RECV_HOOK ? EP_OK : ll_pull(ll, combine);
}
