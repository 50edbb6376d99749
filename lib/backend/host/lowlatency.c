/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency: no plan, no exchange before the data. A sender knows nothing of the other senders, so it cannot know the
 * final rows; it writes each token once per rank, with the list of experts there, into a slot that belongs to it alone,
 * and the receiver packs the slots per expert in the order of (source rank, token). Combine pulls: the packed rows are
 * offered, and each rank reads, weighs and adds up those of its tokens, in the groups that the contract wants. No sum
 * travels here: reading a row costs the same wherever it is.
 *
 * Dispatches and combines are numbered; number n uses buffer n % 2, so a sender may be one result ahead of a receiver.
 */
#include "backend/host/lowlatency.h"

#include "core/routing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Calls by which a counter may be ahead of who waits for it: less would do, more is damage. */
#define MOST_AHEAD 8

/* --- waiting, with or without masks ------------------------------------------------------------------------------ */

/*
 * A masked rank may merely have overslept. It gets no rows any more, and buffers are reused without waiting for it, but
 * the counters go on; so the mask is published before any of that happens, and who finds itself masked leaves.
 */
static void mask_rank(ep_ll *ll, int rank)
{
    struct host_ll *inner = ll->impl;

    inner->masked[rank] = 1;
    atomic_fetch_or_explicit(&ll_shared_of(inner, ll->comm->rank)->masks[rank / 64], UINT64_C(1) << rank % 64,
                             memory_order_acq_rel);
}

static ep_status fail_excluded(int rank, enum host_phase phase)
{
    return ep_fail(EP_E_EXCLUDED, "rank %d has masked this rank in \"%s\"", rank, host_phase_name(phase));
}

static bool is_masked_by(const ep_ll *ll, int rank)
{
    const _Atomic uint64_t *masks = ll_shared_of(ll->impl, rank)->masks;

    return atomic_load_explicit(&masks[ll->comm->rank / 64], memory_order_acquire) >> ll->comm->rank % 64 & 1;
}

/* To be called when what other ranks have has been read: has one of them masked this rank meanwhile? */
static ep_status check_masks(const ep_ll *ll, enum host_phase phase)
{
    const struct host_ll *inner = ll->impl;
    int me = ll->comm->rank;

    for (int rank = 0; (ll->config.flags & EP_LL_MASK_DEAD) && rank < ll->comm->nranks; rank++) {
        _Atomic uint64_t *masks = ll_shared_of(inner, rank)->masks;

        /* Written back unchanged, because only a write can order our reads before what the peer does once it masks. */
        if (!inner->masked[rank] && atomic_fetch_or_explicit(&masks[me / 64], 0, memory_order_acq_rel) >> me % 64 & 1)
            return fail_excluded(rank, phase);
    }
    return EP_OK;
}

/* Waits until the counter at `word` of a rank's head has reached `value`; masks it if it does not come, if allowed. */
static ep_status wait_one(ep_ll *ll, int rank, size_t word, uint64_t value, enum host_phase phase)
{
    struct host_ll *inner = ll->impl;
    _Atomic uint64_t *counter = (_Atomic uint64_t *)(void *)((char *)ll_shared_of(inner, rank) + word);
    bool mask = ll->config.flags & EP_LL_MASK_DEAD;
    struct host_pause pause;
    uint64_t at = 0;
    ep_status status = EP_OK;

    host_pause_begin(&pause, inner->host, phase);
    pause.tolerant = mask;
    while (status == EP_OK) {
        uint32_t seen = host_doorbell(inner->host);

        at = atomic_load_explicit(counter, memory_order_acquire);
        if (at >= value)
            break;
        status = host_pause(&pause, seen, rank);
    }
    host_pause_end(&pause);
    if (status != EP_OK && (!mask || status == EP_E_ABORTED))
        return status;
    /* Two results at a time: without masking nobody is further ahead. */
    if (!mask && at - value > MOST_AHEAD)
        return host_raise_damage(inner->host, rank, phase, "a counter of its calls", (int64_t)at);
    if (mask && is_masked_by(ll, rank))
        return fail_excluded(rank, phase);
    if (status != EP_OK)
        mask_rank(ll, rank);
    return EP_OK;
}

/* The same for all ranks that are not masked. */
static ep_status wait_all(ep_ll *ll, size_t word, uint64_t value, enum host_phase phase)
{
    const struct host_ll *inner = ll->impl;

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!inner->masked[rank])
            EP_TRY(wait_one(ll, rank, word, value, phase));
    }
    return EP_OK;
}

static void publish(ep_ll *ll, _Atomic uint64_t *counter, uint64_t value)
{
    ep_rows_stream_end();
    atomic_store_explicit(counter, value, memory_order_release);
    host_ring_node(((struct host_ll *)ll->impl)->host);
}

static ep_status load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int32_t *ret_index)
{
    struct ep_routing_shape shape = {.n_tokens = n_tokens,
                                     .topk = ll->config.topk,
                                     .n_experts = ll->config.n_experts,
                                     .nranks = ll->comm->nranks,
                                     .ranks_per_node = ll->comm->ranks_per_node};

    return ep_routing_check(&shape, topk_idx, idx_type, ret_index);
}

/* --- dispatch --------------------------------------------------------------------------------------------------- */

static size_t out_row_bytes(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    return (size_t)ll->config.hidden * ep_dtype_bytes((ep_dtype)args->out_dtype);
}

static size_t out_scale_bytes(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    size_t blocks = (size_t)ll->config.hidden / EP_SCALE_BLOCK;

    return args->out_dtype == EP_BF16 ? 0 : args->scale_type == EP_UE8M0 ? blocks : blocks * sizeof(float);
}

static bool rounds_scales(const ep_ll_dispatch_args *args)
{
    return args->scale_type == EP_UE8M0 || (args->flags & EP_LL_ROUND_SCALE);
}

/* What all ranks must want alike, in one word that travels with the rows. */
static int32_t format_of(const ep_ll_dispatch_args *args)
{
    return args->out_dtype | args->scale_type << 8 | (int32_t)rounds_scales(args) << 16;
}

/* Who has masked this rank writes to its memory without waiting for it: no failure of the group. */
static ep_status damaged(ep_ll *ll, int rank, enum host_phase phase, const char *what, int64_t value)
{
    EP_TRY(check_masks(ll, phase));
    return host_raise_damage(((struct host_ll *)ll->impl)->host, rank, phase, what, value);
}

static ep_status check_format(ep_ll *ll, int rank, int32_t theirs)
{
    static const struct {
        const char *name;
        int shift;
    } fields[] = {{"out_dtype", 0}, {"scale_type", 8}, {"rounding of scales", 16}};
    const struct host_ll *inner = ll->impl;
    int32_t mine = format_of(&inner->dispatch);

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        int a = mine >> fields[i].shift & 0xff, b = theirs >> fields[i].shift & 0xff;

        if (a != b)
            return ep_fail(host_raise(inner->host, EP_E_MISMATCH, rank, HOST_LL_RECV),
                           "ep_ll_dispatch: ranks disagree: %s is %d on rank %d and %d on rank %d", fields[i].name, a,
                           ll->comm->rank, b, rank);
    }
    return mine == theirs ? EP_OK : damaged(ll, rank, HOST_LL_RECV, "the format of its rows", theirs);
}

/* The row as it travels: as it is, or quantised once for all destinations. */
static const void *encode_row(ep_ll *ll, const ep_ll_dispatch_args *args, const void *x, const void **ret_scales)
{
    struct host_ll *inner = ll->impl;

    *ret_scales = NULL;
    if (args->out_dtype == EP_BF16)
        return x;
    ep_quantize_row(x, ll->config.hidden, rounds_scales(args), inner->row, inner->scales);
    *ret_scales = inner->scales;
    if (args->scale_type == EP_UE8M0) {
        ep_pack_ue8m0(inner->scales, ll->config.hidden / EP_SCALE_BLOCK, inner->packed_scales);
        *ret_scales = inner->packed_scales;
    }
    return inner->row;
}

static void send_token(ep_ll *ll, const ep_ll_dispatch_args *args, int t)
{
    struct host_ll *inner = ll->impl;
    const int32_t *index = inner->index[inner->dispatches & 1] + (size_t)t * (size_t)ll->config.topk;
    const void *scales, *row = NULL;
    struct ll_slot *slots[EP_MAX_TOPK];
    int ranks[EP_MAX_TOPK], n_experts[EP_MAX_TOPK], n = 0;

    for (int k = 0; k < ll->config.topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, i = 0;

        if (rank < 0 || inner->masked[rank])
            continue;
        while (i < n && ranks[i] != rank)
            i++;
        if (i == n) {
            struct ll_block *block = ll_block_of(ll, rank, inner->dispatches, ll->comm->rank);

            ranks[n] = rank;
            slots[n] = ll_slot_of(inner, block, inner->n_slots[rank]++);
            n_experts[n++] = 0;
        }
        slots[i]->expert[n_experts[i]++] = index[k] % ll->n_local;
    }
    if (n > 0)
        row = encode_row(ll, args, (const char *)args->x + (size_t)t * (size_t)ll->config.hidden * 2, &scales);
    for (int i = 0; i < n; i++) {
        slots[i]->token = t;
        slots[i]->n_experts = n_experts[i];
        if (scales)
            memcpy((char *)slots[i] + inner->scales_at, scales, out_scale_bytes(ll, args));
        memcpy((char *)slots[i] + inner->row_at, row, out_row_bytes(ll, args));
    }
}

/* Copies the heads of the slots of one source and checks them: they say where its rows will be written. */
static ep_status read_heads(ep_ll *ll, int source)
{
    struct host_ll *inner = ll->impl;
    struct ll_block *block = ll_block_of(ll, ll->comm->rank, inner->dispatches, source), head;
    int topk = ll->config.topk, last = -1;

    host_read_shared(&head, block, sizeof(head));
    EP_TRY(check_format(ll, source, head.format));
    if (head.count < 0 || head.count > ll->config.max_tokens)
        return damaged(ll, source, HOST_LL_RECV, "its number of tokens", head.count);
    for (int i = 0; i < head.count; i++) {
        struct ll_slot *slot = ll_head_of(ll, source, i);

        host_read_shared(slot, ll_slot_of(inner, block, i), sizeof(*slot) + (size_t)topk * sizeof(int32_t));
        if (slot->token <= last || slot->token >= ll->config.max_tokens)
            return damaged(ll, source, HOST_LL_RECV, "the number of a token", slot->token);
        if (slot->n_experts < 1 || slot->n_experts > topk)
            return damaged(ll, source, HOST_LL_RECV, "the number of experts of a token", slot->n_experts);
        last = slot->token;
    }
    inner->n_slots[source] = head.count;
    return EP_OK;
}

/* First rows per (expert, source): counts, then prefix sums within each expert. */
static ep_status make_ranges(ep_ll *ll, struct ll_range *ranges)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;

    memset(ranges, 0, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    for (int source = 0; source < nranks; source++) {
        inner->n_slots[source] = 0;
        if (!inner->masked[source])
            EP_TRY(read_heads(ll, source));
        for (int i = 0; i < inner->n_slots[source]; i++) {
            const struct ll_slot *slot = ll_head_of(ll, source, i);

            for (int e = 0; e < slot->n_experts; e++) {
                int32_t expert = slot->expert[e];

                if (expert < 0 || expert >= ll->n_local)
                    return damaged(ll, source, HOST_LL_RECV, "an expert of a token", expert);
                /* An expert twice in one token would be rows for which there is no room. */
                if (++ranges[expert * nranks + source].count > i + 1)
                    return damaged(ll, source, HOST_LL_RECV, "an expert that a token has twice", expert);
            }
        }
    }
    for (int expert = 0; expert < ll->n_local; expert++) {
        int32_t begin = 0;

        for (int source = 0; source < nranks; source++) {
            ranges[expert * nranks + source].begin = begin;
            begin += ranges[expert * nranks + source].count;
        }
    }
    return EP_OK;
}

/* `head` is the copy, `slot` where the row is. */
static void pack_slot(ep_ll *ll, const ep_ll_dispatch_args *args, const struct ll_slot *head,
                      const struct ll_slot *slot, int32_t *next)
{
    const struct host_ll *inner = ll->impl;
    size_t rows = (size_t)ll->comm->nranks * (size_t)ll->config.max_tokens;

    for (int e = 0; e < head->n_experts; e++) {
        size_t at = (size_t)head->expert[e] * rows + (size_t)next[head->expert[e]]++;

        memcpy((char *)args->recv_x + at * out_row_bytes(ll, args), (const char *)slot + inner->row_at,
               out_row_bytes(ll, args));
        if (args->out_dtype != EP_BF16)
            memcpy((char *)args->recv_scales + at * out_scale_bytes(ll, args), (const char *)slot + inner->scales_at,
                   out_scale_bytes(ll, args));
        if (args->recv_source)
            args->recv_source[at] = head->token;
    }
}

static ep_status receive(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &inner->dispatch;
    int nranks = ll->comm->nranks, me = ll->comm->rank;
    struct ll_range *ranges = inner->ranges[inner->dispatches & 1];
    int32_t *next = inner->seen; /* [L] used here */

    EP_TRY(wait_all(ll, offsetof(struct ll_shared, sent), inner->dispatches, HOST_LL_RECV));
    EP_TRY(make_ranges(ll, ranges));
    memcpy(ll_ranges_of(ll, me, inner->dispatches), ranges, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    memset(next, 0, (size_t)ll->n_local * sizeof(*next));
    for (int source = 0; source < nranks; source++) {
        struct ll_block *block = ll_block_of(ll, me, inner->dispatches, source);

        for (int i = 0; i < inner->n_slots[source]; i++)
            pack_slot(ll, args, ll_head_of(ll, source, i), ll_slot_of(inner, block, i), next);
    }
    for (int expert = 0; expert < ll->n_local; expert++) {
        args->recv_count[expert] = next[expert];
        for (int source = 0; args->recv_range && source < nranks; source++) {
            const struct ll_range *range = &ranges[expert * nranks + source];

            args->recv_range[expert * nranks + source] = (int64_t)range->begin << 32 | (uint32_t)range->count;
        }
    }
    publish(ll, &ll_shared_of(inner, me)->taken, inner->dispatches);
    return EP_OK;
}

ep_status host_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args)
{
    struct host_ll *inner = ll->impl;

    EP_TRY(host_drain(inner->host));
    EP_TRY(load_index(ll, args->topk_idx, args->idx_type, args->n_tokens, inner->index[(inner->dispatches + 1) & 1]));
    /* The slots of two dispatches ago must have been packed. */
    if (inner->dispatches >= 2)
        EP_TRY(wait_all(ll, offsetof(struct ll_shared, taken), inner->dispatches - 1, HOST_LL_SEND));
    inner->dispatches++;
    inner->dispatch = *args;
    inner->in_dispatch = true;
    memset(inner->n_slots, 0, (size_t)ll->comm->nranks * sizeof(*inner->n_slots));
    for (int t = 0; t < args->n_tokens; t++)
        send_token(ll, args, t);
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_block *block = ll_block_of(ll, rank, inner->dispatches, ll->comm->rank);

        if (inner->masked[rank])
            continue;
        block->count = inner->n_slots[rank];
        block->format = format_of(args);
    }
    publish(ll, &ll_shared_of(inner, ll->comm->rank)->sent, inner->dispatches);
    return args->flags & EP_LL_RECV_HOOK ? EP_OK : receive(ll);
}

/* --- combine ---------------------------------------------------------------------------------------------------- */

static size_t combine_bytes(const ep_ll *ll)
{
    return (size_t)ll->config.n_experts * (size_t)ll->config.max_tokens * (size_t)ll->config.hidden * 2;
}

/*
 * Pages for the first rows of an expert in a combine buffer. It has room for all tokens of all ranks on each expert, of
 * which few come: only those that do take memory, and are refused here if there is none.
 */
static ep_status reserve_rows(ep_ll *ll, uint64_t number, int expert, int32_t n_rows)
{
    struct host_ll *inner = ll->impl;
    size_t row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)ll->comm->nranks * (size_t)ll->config.max_tokens;
    int32_t *reserved = &inner->reserved[number & 1][expert];

    if (n_rows <= *reserved)
        return EP_OK;
    EP_TRY(host_reserve(inner->host, inner->combine_buffer[number & 1],
                        ((size_t)expert * rows + (size_t)*reserved) * row, (size_t)(n_rows - *reserved) * row));
    *reserved = n_rows;
    return EP_OK;
}

/* Library's buffer for combine number n, once nobody reads the one before in it. */
static ep_status combine_buffer(ep_ll *ll, uint64_t number, void **ret_buffer)
{
    struct host_ll *inner = ll->impl;

    if (!inner->combine_buffer[number & 1])
        EP_TRY(host_alloc_sparse(inner->host, combine_bytes(ll), &inner->combine_buffer[number & 1]));
    if (number > 2)
        EP_TRY(wait_all(ll, offsetof(struct ll_shared, pulled), number - 2, HOST_LL_OFFER));
    *ret_buffer = inner->combine_buffer[number & 1];
    return EP_OK;
}

/* The rows that were received, copied to where peers can read them. */
static ep_status copy_rows(ep_ll *ll, const void *x, void *buffer)
{
    const struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;
    const struct ll_range *ranges = inner->ranges[inner->combines & 1];
    size_t row = (size_t)ll->config.hidden * 2, rows = (size_t)nranks * (size_t)ll->config.max_tokens;

    for (int expert = 0; expert < ll->n_local; expert++) {
        const struct ll_range *last = &ranges[expert * nranks + nranks - 1];
        size_t at = (size_t)expert * rows * row;

        EP_TRY(reserve_rows(ll, inner->combines, expert, last->begin + last->count));
        memcpy((char *)buffer + at, (const char *)x + at, (size_t)(last->begin + last->count) * row);
    }
    return EP_OK;
}

static ep_status offer(ep_ll *ll, const ep_ll_combine_args *args)
{
    struct host_ll *inner = ll->impl;
    struct host_where *where = &ll_shared_of(inner, ll->comm->rank)->offer[inner->combines & 1];
    void *buffer;

    if (args->flags & EP_LL_ZERO_COPY) {
        /* The buffer is the same every second time, but only asking for it waits for those who still read it. */
        if (inner->handed_out != inner->combines || args->x != inner->combine_buffer[inner->combines & 1])
            return ep_fail(EP_E_ARG, "ep_ll_combine: with EP_LL_ZERO_COPY x must be the buffer that "
                                     "ep_ll_get_combine_buffer gave for this combine");
        buffer = inner->combine_buffer[inner->combines & 1];
    } else if (host_find(inner->host, args->x, combine_bytes(ll), where)) {
        inner->in_place = true;
        return EP_OK;
    } else {
        EP_TRY(combine_buffer(ll, inner->combines, &buffer));
        EP_TRY(copy_rows(ll, args->x, buffer));
    }
    if (!host_find(inner->host, buffer, combine_bytes(ll), where))
        return ep_fail(EP_E_STATE, "ep_ll_combine: the combine buffer is not where it was");
    return EP_OK;
}

/* The rows of a token, and the ranks that they are on. */
struct ll_terms {
    const uint16_t *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    int rank[EP_MAX_TOPK];
    int n;
};

/* In the order of k. */
static ep_status find_terms(ep_ll *ll, const ep_ll_combine_args *args, int t, void *const *offers,
                            struct ll_terms *ret_terms)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks, me = ll->comm->rank, n = 0;
    size_t topk = (size_t)ll->config.topk, row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)nranks * (size_t)ll->config.max_tokens;
    const int32_t *index = inner->index[inner->combines & 1] + (size_t)t * topk;

    for (size_t k = 0; k < topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, local = index[k] < 0 ? 0 : index[k] % ll->n_local;
        struct ll_range range;
        int32_t i;

        if (rank < 0)
            continue;
        i = inner->seen[index[k]]++;
        if (inner->masked[rank])
            continue;
        host_read_shared(&range, &ll_ranges_of(ll, rank, inner->combines)[local * nranks + me], sizeof(range));
        if (range.begin < 0 || range.count < 0 || (size_t)range.begin + (size_t)range.count > rows)
            return damaged(ll, rank, HOST_LL_COMBINE, "where the rows of this rank are",
                           (int64_t)((uint64_t)(uint32_t)range.begin << 32 | (uint32_t)range.count));
        if (i >= range.count) {
            EP_TRY(check_masks(ll, HOST_LL_COMBINE));
            return ep_fail(host_raise(inner->host, EP_E_MISMATCH, rank, HOST_LL_COMBINE),
                           "ep_ll_combine: rank %d has %d rows of this rank for expert %d, but token %d is number %d",
                           rank, range.count, index[k], t, i + 1);
        }
        ret_terms->rows[n] = (const uint16_t *)(const void *)((const char *)offers[rank] +
                                                              ((size_t)local * rows + (size_t)(range.begin + i)) * row);
        ret_terms->weights[n] = args->topk_weights[(size_t)t * topk + k];
        ret_terms->rank[n++] = rank;
    }
    ret_terms->n = n;
    return EP_OK;
}

/* The same terms rank by rank, in the order of each rank's first. ret_sizes: of the groups, whose number it returns. */
static int group_terms(const struct ll_terms *terms, struct ll_terms *ret_terms, int *ret_sizes)
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
        ret_sizes[n_groups++] = n - start;
    }
    return n_groups;
}

/* Weighted sum of the rows of token t. */
static ep_status pull_token(ep_ll *ll, const ep_ll_combine_args *args, int t, void *const *offers)
{
    const struct ep_rows_ops *ops = ((struct host_ll *)ll->impl)->host->rows;
    int hidden = ll->config.hidden, n_groups, sizes[EP_MAX_TOPK];
    uint16_t *out = (uint16_t *)args->out + (size_t)t * (size_t)hidden;
    struct ll_terms terms, groups;

    EP_TRY(find_terms(ll, args, t, offers, &terms));
    n_groups = ll->config.flags & EP_LL_SUM_ONCE ? terms.n : group_terms(&terms, &groups, sizes);
    if (n_groups == terms.n)
        ops->weighted_sum_bf16(out, terms.rows, terms.weights, terms.n, hidden);
    else
        ops->grouped_sum_bf16(out, groups.rows, groups.weights, sizes, n_groups, hidden);
    return EP_OK;
}

/* Where the rows of `rank` are. With masking, a rank that is no longer there is masked. */
static ep_status map_offer(ep_ll *ll, int rank, void **ret_offer)
{
    struct host_ll *inner = ll->impl;
    ep_status status = host_map(inner->host, rank, &ll_shared_of(inner, rank)->offer[inner->combines & 1],
                                combine_bytes(ll), ret_offer);
    char reason[EP_ERROR_TEXT_BYTES];

    if (status == EP_OK)
        return EP_OK;
    snprintf(reason, sizeof(reason), "%s", ep_last_error());
    /* Who has masked this rank may have freed it: no failure of the group. */
    EP_TRY(check_masks(ll, HOST_LL_COMBINE));
    ep_fail(status, "%s", reason);
    if ((status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT) && (ll->config.flags & EP_LL_MASK_DEAD)) {
        mask_rank(ll, rank);
        return EP_OK;
    }
    return host_raise_own(inner->host, status, rank, HOST_LL_COMBINE);
}

static ep_status pull(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_combine_args *args = &inner->combine;
    int nranks = ll->comm->nranks;
    void *offers[EP_MAX_RANKS];
    ep_status status = EP_OK;

    EP_TRY(wait_all(ll, offsetof(struct ll_shared, offered), inner->combines, HOST_LL_COMBINE));
    host_sweep(inner->host);
    for (int rank = 0; rank < nranks; rank++)
        if (!inner->masked[rank])
            EP_TRY(map_offer(ll, rank, &offers[rank]));
    memset(inner->seen, 0, (size_t)ll->config.n_experts * sizeof(*inner->seen));
    for (int t = 0; status == EP_OK && t < args->n_tokens; t++)
        status = pull_token(ll, args, t, offers);
    if (status == EP_OK)
        status = check_masks(ll, HOST_LL_COMBINE);
    publish(ll, &ll_shared_of(inner, ll->comm->rank)->pulled, inner->combines);
    if (status == EP_OK && inner->in_place)
        status = wait_all(ll, offsetof(struct ll_shared, pulled), inner->combines, HOST_LL_DONE);
    return status;
}

static ep_status check_weights(const ep_ll *ll, const ep_ll_combine_args *args)
{
    if ((ll->comm->config.flags & EP_COMM_CHECK_VALUES) &&
        host_has_nan(args->topk_weights, (size_t)args->n_tokens * (size_t)ll->config.topk))
        return ep_fail(EP_E_VALUE, "ep_ll_combine: NaN in topk_weights of rank %d", ll->comm->rank);
    return EP_OK;
}

/* Combine number n answers dispatch number n. */
static ep_status check_answer(const ep_ll *ll, const ep_ll_combine_args *args)
{
    const struct host_ll *inner = ll->impl;
    const int32_t *sent = inner->index[(inner->combines + 1) & 1];
    size_t topk = (size_t)ll->config.topk, entries = (size_t)args->n_tokens * topk, i = 0;

    EP_TRY(load_index(ll, args->topk_idx, args->idx_type, args->n_tokens, inner->given));
    if (memcmp(inner->given, sent, entries * sizeof(*sent)) == 0)
        return EP_OK;
    while (inner->given[i] == sent[i])
        i++;
    return ep_fail(EP_E_ROUTING,
                   "ep_ll_combine: token %zu: topk_idx is %d at position %zu, but the dispatch that it answers had %d",
                   i / topk, inner->given[i], i % topk, sent[i]);
}

ep_status host_ll_combine(ep_ll *ll, const ep_ll_combine_args *args)
{
    struct host_ll *inner = ll->impl;
    ep_status status;

    EP_TRY(host_drain(inner->host));
    EP_TRY(check_answer(ll, args));
    EP_TRY(check_weights(ll, args));
    inner->combines++;
    inner->combine = *args;
    inner->in_dispatch = false;
    inner->in_place = false;
    status = offer(ll, args);
    if (status != EP_OK) {
        inner->combines--;
        return status;
    }
    publish(ll, &ll_shared_of(inner, ll->comm->rank)->offered, inner->combines);
    return args->flags & EP_LL_RECV_HOOK ? EP_OK : pull(ll);
}

ep_status host_ll_finish(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;

    return inner->in_dispatch ? receive(ll) : pull(ll);
}

ep_status host_ll_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    struct host_ll *inner = ll->impl;

    EP_TRY(combine_buffer(ll, inner->combines + 1, ret_buffer));
    /* The caller may write all of it. */
    for (int expert = 0; expert < ll->n_local; expert++)
        EP_TRY(reserve_rows(ll, inner->combines + 1, expert, ll->comm->nranks * ll->config.max_tokens));
    inner->handed_out = inner->combines + 1;
    return EP_OK;
}

ep_status host_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    const struct host_ll *inner = ll->impl;

    memcpy(ret_masked, inner->masked, (size_t)ll->comm->nranks * sizeof(*ret_masked));
    return EP_OK;
}
