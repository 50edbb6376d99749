/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency: no plan, no exchange before the data. A sender knows nothing of the other senders, so it cannot know the
 * final rows; it writes each token once per rank, with the list of experts there, into a slot that belongs to it alone,
 * and the receiver packs the slots per expert in the order of (source rank, token). Combine pulls: the packed rows are
 * offered, and each rank reads, weighs and adds up those of its tokens, in the groups that the contract wants. No sum
 * travels here: reading a row costs the same wherever it is.
 *
 * Dispatches and combines are numbered, each by themselves; number n uses buffer n % 2, so a sender may be one result
 * ahead of a receiver. A combine names a dispatch, whose ranges it reads in the peers' segments: nobody overwrites them
 * before all ranks have sent dispatch n + 2, and they do that behind their combines of n.
 */
#include "backend/host/lowlatency.h"

#include "base/log.h"
#include "core/quantize.h"
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

    if (!inner->masked[rank])
        ep_log(EP_LOG_WARNING, "rank %d of %d: low latency goes on without rank %d", ll->comm->rank, ll->comm->nranks,
               rank);
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

/* When each rank came to what is waited for. */
struct ll_cost {
    uint64_t begin_ns;
    int64_t *add; /* [R] NULL: nobody wants to know */
    bool came[EP_MAX_RANKS];
};

static _Atomic uint64_t *counter_of(const ep_ll *ll, int rank, size_t word)
{
    return (_Atomic uint64_t *)(void *)((char *)ll_shared_of(ll->impl, rank) + word);
}

static void note_arrivals(const ep_ll *ll, size_t word, uint64_t value, struct ll_cost *cost)
{
    const struct host_ll *inner = ll->impl;

    for (int rank = 0; cost && rank < ll->comm->nranks; rank++) {
        if (cost->came[rank] || inner->masked[rank] || rank == ll->comm->rank ||
            atomic_load_explicit(counter_of(ll, rank, word), memory_order_acquire) < value)
            continue;
        cost->came[rank] = true;
        cost->add[rank] += (int64_t)(ep_now_ns() - cost->begin_ns);
    }
}

/* Waits until the counter at `word` of a rank's head has reached `value`; masks it if it does not come, if allowed. */
static ep_status wait_one(ep_ll *ll, int rank, size_t word, uint64_t value, enum host_phase phase, struct ll_cost *cost)
{
    struct host_ll *inner = ll->impl;
    _Atomic uint64_t *counter = counter_of(ll, rank, word);
    bool mask = ll->config.flags & EP_LL_MASK_DEAD;
    struct host_pause pause;
    uint64_t at = 0;
    ep_status status = EP_OK;

    host_pause_begin(&pause, inner->host, phase);
    pause.tolerant = mask;
    while (status == EP_OK) {
        uint32_t seen = host_doorbell(inner->host);

        at = atomic_load_explicit(counter, memory_order_acquire);
        note_arrivals(ll, word, value, cost);
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

/* The same for all ranks that are not masked. `add` [R]: NULL, or nanoseconds until each of them came are added to it.
 */
static ep_status wait_timed(ep_ll *ll, size_t word, uint64_t value, enum host_phase phase, int64_t *add)
{
    const struct host_ll *inner = ll->impl;
    struct ll_cost cost = {.add = add};

    if (add)
        cost.begin_ns = ep_now_ns();

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!inner->masked[rank])
            EP_TRY(wait_one(ll, rank, word, value, phase, add ? &cost : NULL));
    }
    return EP_OK;
}

static ep_status wait_all(ep_ll *ll, size_t word, uint64_t value, enum host_phase phase)
{
    return wait_timed(ll, word, value, phase, NULL);
}

/* Words of the calls of a parity. */
static size_t taken_word(uint64_t number)
{
    return offsetof(struct ll_shared, taken) + (number & 1) * sizeof(_Atomic uint64_t);
}

static size_t pulled_word(uint64_t number)
{
    return offsetof(struct ll_shared, pulled) + (number & 1) * sizeof(_Atomic uint64_t);
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

static ep_status fail_field(ep_ll *ll, int rank, const char *field, int mine, int theirs)
{
    return ep_fail(host_raise(((struct host_ll *)ll->impl)->host, EP_E_MISMATCH, rank, HOST_LL_RECV),
                   "ep_ll_dispatch: ranks disagree: %s is %d on rank %d and %d on rank %d", field, mine, ll->comm->rank,
                   theirs, rank);
}

static ep_status check_format(ep_ll *ll, const ep_ll_dispatch_args *args, int rank, const struct ll_block *head)
{
    static const struct {
        const char *name;
        int shift;
    } fields[] = {{"out_dtype", 0}, {"scale_type", 8}, {"rounding of scales", 16}};
    int32_t mine = format_of(args), theirs = head->format;

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        int a = mine >> fields[i].shift & 0xff, b = theirs >> fields[i].shift & 0xff;

        if (a != b)
            return fail_field(ll, rank, fields[i].name, a, b);
    }
    if (mine != theirs)
        return damaged(ll, rank, HOST_LL_RECV, "the format of its rows", theirs);
    if (head->max_tokens < 1 || head->max_tokens > ll->config.max_tokens)
        return damaged(ll, rank, HOST_LL_RECV, "its max_tokens", head->max_tokens);
    return head->max_tokens == args->max_tokens
               ? EP_OK
               : fail_field(ll, rank, "max_tokens", args->max_tokens, head->max_tokens);
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

static void send_token(ep_ll *ll, const struct ll_dispatch *dispatch, int t)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &dispatch->args;
    const int32_t *index = inner->index[dispatch->number & 1] + (size_t)t * (size_t)ll->config.topk;
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
            struct ll_block *block = ll_block_of(ll, rank, dispatch->number, ll->comm->rank);

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
static ep_status read_heads(ep_ll *ll, const struct ll_dispatch *dispatch, int source)
{
    struct host_ll *inner = ll->impl;
    struct ll_block *block = ll_block_of(ll, ll->comm->rank, dispatch->number, source), head;
    int max_tokens = dispatch->args.max_tokens;
    int topk = ll->config.topk, last = -1;

    host_read_shared(&head, block, sizeof(head));
    EP_TRY(check_format(ll, &dispatch->args, source, &head));
    if (head.count < 0 || head.count > max_tokens)
        return damaged(ll, source, HOST_LL_RECV, "its number of tokens", head.count);
    for (int i = 0; i < head.count; i++) {
        struct ll_slot *slot = ll_head_of(ll, source, i);

        host_read_shared(slot, ll_slot_of(inner, block, i), sizeof(*slot) + (size_t)topk * sizeof(int32_t));
        if (slot->token <= last || slot->token >= max_tokens)
            return damaged(ll, source, HOST_LL_RECV, "the number of a token", slot->token);
        if (slot->n_experts < 1 || slot->n_experts > topk)
            return damaged(ll, source, HOST_LL_RECV, "the number of experts of a token", slot->n_experts);
        last = slot->token;
    }
    inner->n_slots[source] = head.count;
    return EP_OK;
}

/* First rows per (expert, source): counts, then prefix sums within each expert. */
static ep_status make_ranges(ep_ll *ll, const struct ll_dispatch *dispatch, struct ll_range *ranges)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;

    memset(ranges, 0, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    for (int source = 0; source < nranks; source++) {
        inner->n_slots[source] = 0;
        if (!inner->masked[source])
            EP_TRY(read_heads(ll, dispatch, source));
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

/* The scales of row `row` of an expert, wherever the caller wants each. */
static void place_scales(const ep_ll *ll, const ep_ll_dispatch_args *args, int expert, int32_t row, const void *scales)
{
    size_t bytes = out_scale_bytes(ll, args), rows = (size_t)ll->comm->nranks * (size_t)args->max_tokens;
    uint32_t *out = (uint32_t *)args->recv_scales + (size_t)expert * rows * (bytes / 4);

    if (!args->recv_scale_stride_token) {
        memcpy(out + (size_t)row * (bytes / 4), scales, bytes);
        return;
    }
    for (size_t word = 0; word < bytes / 4; word++)
        out[row * args->recv_scale_stride_token + (int64_t)word * args->recv_scale_stride_block] =
            ((const uint32_t *)scales)[word];
}

/* `head` is the copy, `slot` where the row is. */
static void pack_slot(ep_ll *ll, const ep_ll_dispatch_args *args, const struct ll_slot *head,
                      const struct ll_slot *slot, int32_t *next)
{
    const struct host_ll *inner = ll->impl;
    size_t rows = (size_t)ll->comm->nranks * (size_t)args->max_tokens;

    for (int e = 0; e < head->n_experts; e++) {
        int32_t row = next[head->expert[e]]++;
        size_t at = (size_t)head->expert[e] * rows + (size_t)row;

        memcpy((char *)args->recv_x + at * out_row_bytes(ll, args), (const char *)slot + inner->row_at,
               out_row_bytes(ll, args));
        if (args->out_dtype != EP_BF16)
            place_scales(ll, args, head->expert[e], row, (const char *)slot + inner->scales_at);
        if (args->recv_source)
            args->recv_source[at] = head->token;
    }
}

/* What is told of the rows besides them. `count` [L]. */
static void tell_counts(const ep_ll *ll, const ep_ll_dispatch_args *args, const struct ll_range *ranges,
                        const int32_t *count)
{
    int nranks = ll->comm->nranks;

    for (int expert = 0; expert < ll->n_local; expert++) {
        args->recv_count[expert] = count[expert];
        if (args->recv_stats_add)
            args->recv_stats_add[expert] += count[expert];
        for (int source = 0; args->recv_range && source < nranks; source++) {
            const struct ll_range *range = &ranges[expert * nranks + source];

            args->recv_range[expert * nranks + source] = (int64_t)range->begin << 32 | (uint32_t)range->count;
        }
    }
}

static ep_status receive(ep_ll *ll, const struct ll_dispatch *dispatch)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &dispatch->args;
    int nranks = ll->comm->nranks, me = ll->comm->rank;
    struct ll_range *ranges = inner->ranges[dispatch->number & 1];
    int32_t *next = inner->seen; /* [L] used here */

    EP_TRY(wait_timed(ll, offsetof(struct ll_shared, sent), dispatch->number, HOST_LL_RECV, args->wait_cost_add));
    EP_TRY(make_ranges(ll, dispatch, ranges));
    memcpy(ll_ranges_of(ll, me, dispatch->number), ranges, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    memset(next, 0, (size_t)ll->n_local * sizeof(*next));
    for (int source = 0; source < nranks; source++) {
        struct ll_block *block = ll_block_of(ll, me, dispatch->number, source);

        for (int i = 0; i < inner->n_slots[source]; i++)
            pack_slot(ll, args, ll_head_of(ll, source, i), ll_slot_of(inner, block, i), next);
    }
    tell_counts(ll, args, ranges, next);
    publish(ll, counter_of(ll, me, taken_word(dispatch->number)), dispatch->number);
    return EP_OK;
}

static ep_status start_dispatch(ep_ll *ll, const struct ll_dispatch *wanted)
{
    struct host_ll *inner = ll->impl;
    struct ll_dispatch *dispatch = &inner->dispatch[wanted->number & 1];
    const ep_ll_dispatch_args *args = &dispatch->args;
    uint64_t number = wanted->number;

    EP_TRY(
        load_index(ll, wanted->args.topk_idx, wanted->args.idx_type, wanted->args.n_tokens, inner->index[number & 1]));
    /* The slots of two dispatches ago must have been packed. */
    if (number > 2)
        EP_TRY(wait_all(ll, taken_word(number), number - 2, HOST_LL_SEND));
    *dispatch = *wanted;
    memset(inner->n_slots, 0, (size_t)ll->comm->nranks * sizeof(*inner->n_slots));
    for (int t = 0; t < args->n_tokens; t++)
        send_token(ll, dispatch, t);
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_block *block = ll_block_of(ll, rank, number, ll->comm->rank);

        if (inner->masked[rank])
            continue;
        block->count = inner->n_slots[rank];
        block->format = format_of(args);
        block->max_tokens = args->max_tokens;
    }
    publish(ll, &ll_shared_of(inner, ll->comm->rank)->sent, number);
    return args->flags & EP_LL_RECV_HOOK ? EP_OK : receive(ll, dispatch);
}

/* --- combine ---------------------------------------------------------------------------------------------------- */

static size_t combine_bytes(const ep_ll *ll, int max_tokens)
{
    return (size_t)ll->config.n_experts * (size_t)max_tokens * (size_t)ll->config.hidden * 2;
}

/*
 * Pages for the first rows of an expert in a combine buffer. It has room for all tokens of all ranks on each expert, of
 * which few come: only those that do take memory, and are refused here if there is none.
 */
static ep_status reserve_rows(ep_ll *ll, uint64_t number, int max_tokens, int expert, int32_t n_rows)
{
    struct host_ll *inner = ll->impl;
    size_t row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)ll->comm->nranks * (size_t)max_tokens;
    int32_t *reserved = &inner->reserved[number & 1][expert];

    /* Experts are elsewhere: what has its pages is asked for once more. */
    if (inner->reserved_for[number & 1] != max_tokens)
        memset(inner->reserved[number & 1], 0, (size_t)ll->n_local * sizeof(*reserved));
    inner->reserved_for[number & 1] = max_tokens;
    if (n_rows <= *reserved)
        return EP_OK;
    EP_TRY(host_reserve(inner->host, inner->combine_buffer[number & 1],
                        ((size_t)expert * rows + (size_t)*reserved) * row, (size_t)(n_rows - *reserved) * row));
    *reserved = n_rows;
    return EP_OK;
}

/* Library's buffer for combine number n. Nobody reads the one before in it any more. */
static ep_status combine_buffer(ep_ll *ll, uint64_t number, void **ret_buffer)
{
    struct host_ll *inner = ll->impl;

    if (!inner->combine_buffer[number & 1])
        EP_TRY(host_alloc_sparse(inner->host, combine_bytes(ll, ll->config.max_tokens),
                                 &inner->combine_buffer[number & 1]));
    *ret_buffer = inner->combine_buffer[number & 1];
    return EP_OK;
}

/* Until what combine number n uses is no longer read by the one before it there. */
static ep_status wait_unused(ep_ll *ll, uint64_t number)
{
    return number > 2 ? wait_all(ll, pulled_word(number), number - 2, HOST_LL_OFFER) : EP_OK;
}

/* The rows that were received, copied to where peers can read them. */
static ep_status copy_rows(ep_ll *ll, const struct ll_combine *combine, void *buffer)
{
    const struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;
    const struct ll_range *ranges = inner->ranges[combine->call & 1];
    size_t row = (size_t)ll->config.hidden * 2, rows = (size_t)nranks * (size_t)combine->max_tokens;

    for (int expert = 0; expert < ll->n_local; expert++) {
        const struct ll_range *last = &ranges[expert * nranks + nranks - 1];
        size_t at = (size_t)expert * rows * row;

        EP_TRY(reserve_rows(ll, combine->number, combine->max_tokens, expert, last->begin + last->count));
        memcpy((char *)buffer + at, (const char *)combine->args.x + at, (size_t)(last->begin + last->count) * row);
    }
    return EP_OK;
}

static ep_status offer(ep_ll *ll, struct ll_combine *combine)
{
    struct host_ll *inner = ll->impl;
    struct ll_offer *mine = &ll_shared_of(inner, ll->comm->rank)->offer[combine->number & 1];
    size_t bytes = combine_bytes(ll, combine->max_tokens);
    void *buffer;

    mine->call = combine->call;
    mine->no_partial_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0;
    if (combine->args.flags & EP_LL_ZERO_COPY) {
        buffer = inner->combine_buffer[combine->number & 1];
    } else if (host_find(inner->host, combine->args.x, bytes, &mine->where)) {
        combine->in_place = true;
        return EP_OK;
    } else {
        EP_TRY(combine_buffer(ll, combine->number, &buffer));
        EP_TRY(copy_rows(ll, combine, buffer));
    }
    if (!host_find(inner->host, buffer, bytes, &mine->where))
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
static ep_status find_terms(ep_ll *ll, const struct ll_combine *combine, int t, void *const *offers,
                            struct ll_terms *ret_terms)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks, me = ll->comm->rank, n = 0;
    size_t topk = (size_t)ll->config.topk, row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)nranks * (size_t)combine->max_tokens;
    const int32_t *index = inner->index[combine->call & 1] + (size_t)t * topk;
    const int32_t *given = combine->given + (size_t)t * topk;

    for (size_t k = 0; k < topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, local = index[k] < 0 ? 0 : index[k] % ll->n_local;
        struct ll_range range;
        int32_t i;

        if (rank < 0)
            continue;
        i = inner->seen[index[k]]++;
        if (inner->masked[rank] || given[k] < 0)
            continue;
        host_read_shared(&range, &ll_ranges_of(ll, rank, combine->call)[local * nranks + me], sizeof(range));
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
        ret_terms->weights[n] = combine->args.topk_weights[(size_t)t * topk + k];
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
static ep_status pull_token(ep_ll *ll, const struct ll_combine *combine, int t, void *const *offers)
{
    const struct ep_rows_ops *ops = ((struct host_ll *)ll->impl)->host->rows;
    int hidden = ll->config.hidden, n_groups, sizes[EP_MAX_TOPK];
    uint16_t *out = (uint16_t *)combine->args.out + (size_t)t * (size_t)hidden;
    struct ll_terms terms, groups;

    EP_TRY(find_terms(ll, combine, t, offers, &terms));
    n_groups = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE ? terms.n : group_terms(&terms, &groups, sizes);
    if (n_groups == terms.n)
        ops->weighted_sum_bf16(out, terms.rows, terms.weights, terms.n, hidden);
    else
        ops->grouped_sum_bf16(out, groups.rows, groups.weights, sizes, n_groups, hidden);
    return EP_OK;
}

/* Ranks must be in the same call, and it is the same in all ranks' arguments. */
static ep_status check_offer(ep_ll *ll, const struct ll_combine *combine, int rank, const struct ll_offer *theirs)
{
    struct host_comm *host = ((struct host_ll *)ll->impl)->host;
    bool once = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;

    if (theirs->call == combine->call && theirs->no_partial_reduce == (once ? 1 : 0))
        return EP_OK;
    EP_TRY(check_masks(ll, HOST_LL_COMBINE));
    if (theirs->call != combine->call)
        return ep_fail(host_raise(host, EP_E_MISMATCH, rank, HOST_LL_COMBINE),
                       "ep_ll_combine: ranks disagree: call is %llu on rank %d and %llu on rank %d",
                       (unsigned long long)combine->call, ll->comm->rank, (unsigned long long)theirs->call, rank);
    return ep_fail(host_raise(host, EP_E_MISMATCH, rank, HOST_LL_COMBINE),
                   "ep_ll_combine: ranks disagree: EP_LL_NO_PARTIAL_REDUCE is %d on rank %d and %u on rank %d", once,
                   ll->comm->rank, theirs->no_partial_reduce, rank);
}

/* Where the rows of `rank` are. With masking, a rank that is no longer there is masked. */
static ep_status map_offer(ep_ll *ll, const struct ll_combine *combine, int rank, void **ret_offer)
{
    struct host_ll *inner = ll->impl;
    struct ll_offer theirs;
    char reason[EP_ERROR_TEXT_BYTES];
    ep_status status;

    host_read_shared(&theirs, &ll_shared_of(inner, rank)->offer[combine->number & 1], sizeof(theirs));
    EP_TRY(check_offer(ll, combine, rank, &theirs));
    status = host_map(inner->host, rank, &theirs.where, combine_bytes(ll, combine->max_tokens), ret_offer);
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

static ep_status pull(ep_ll *ll, const struct ll_combine *combine)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_combine_args *args = &combine->args;
    int nranks = ll->comm->nranks;
    void *offers[EP_MAX_RANKS];
    ep_status status = EP_OK;

    EP_TRY(wait_timed(ll, offsetof(struct ll_shared, offered), combine->number, HOST_LL_COMBINE, args->wait_cost_add));
    host_sweep(inner->host);
    for (int rank = 0; rank < nranks; rank++)
        if (!inner->masked[rank])
            EP_TRY(map_offer(ll, combine, rank, &offers[rank]));
    memset(inner->seen, 0, (size_t)ll->config.n_experts * sizeof(*inner->seen));
    for (int t = 0; status == EP_OK && t < args->n_tokens; t++)
        status = pull_token(ll, combine, t, offers);
    if (status == EP_OK)
        status = check_masks(ll, HOST_LL_COMBINE);
    publish(ll, counter_of(ll, ll->comm->rank, pulled_word(combine->number)), combine->number);
    if (status == EP_OK && combine->in_place)
        status = wait_all(ll, pulled_word(combine->number), combine->number, HOST_LL_DONE);
    return status;
}

static ep_status check_weights(const ep_ll *ll, const ep_ll_combine_args *args)
{
    if ((ll->comm->config.flags & EP_COMM_CHECK_VALUES) &&
        host_has_nan(args->topk_weights, (size_t)args->n_tokens * (size_t)ll->config.topk))
        return ep_fail(EP_E_VALUE, "ep_ll_combine: NaN in topk_weights of rank %d", ll->comm->rank);
    return EP_OK;
}

/* The choices of the dispatch that it answers, less those that it leaves out. */
static ep_status check_answer(const ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    const ep_ll_combine_args *args = &combine->args;
    const int32_t *sent = inner->index[combine->call & 1], *given = combine->given;
    size_t topk = (size_t)ll->config.topk, entries = (size_t)args->n_tokens * topk;

    EP_TRY(load_index(ll, args->topk_idx, args->idx_type, args->n_tokens, combine->given));
    for (size_t i = 0; i < entries; i++)
        if (given[i] != sent[i] && given[i] >= 0)
            return ep_fail(
                EP_E_ROUTING,
                "ep_ll_combine: token %zu: topk_idx is %d at position %zu, but the dispatch that it answers had %d",
                i / topk, given[i], i % topk, sent[i]);
    return EP_OK;
}

static ep_status start_combine(ep_ll *ll, const struct ll_combine *wanted)
{
    struct host_ll *inner = ll->impl;
    struct ll_combine *combine = &inner->combine[wanted->number & 1];
    int32_t *given = combine->given;

    *combine = *wanted;
    combine->given = given;
    EP_TRY(check_answer(ll, combine));
    EP_TRY(check_weights(ll, &combine->args));
    EP_TRY(wait_unused(ll, combine->number));
    EP_TRY(offer(ll, combine));
    publish(ll, &ll_shared_of(inner, ll->comm->rank)->offered, combine->number);
    return combine->args.flags & EP_LL_RECV_HOOK ? EP_OK : pull(ll, combine);
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

enum ll_step { LL_DISPATCH, LL_COMBINE, LL_RECEIVE, LL_PULL, LL_SET_MASK, LL_QUERY_MASK, LL_BARRIER };

struct ll_job {
    ep_ll *ll;
    enum ll_step step;
    union {
        struct ll_dispatch dispatch;
        struct ll_combine combine;
        uint64_t number; /* of the dispatch or combine to be finished */
        struct {
            int rank; /* -1: all */
            bool on;
        } mask;
        int32_t *out;
    };
};

static void set_mask(ep_ll *ll, int rank, bool on)
{
    struct host_ll *inner = ll->impl;
    _Atomic uint64_t *masks = ll_shared_of(inner, ll->comm->rank)->masks;

    if (on) {
        mask_rank(ll, rank);
        return;
    }
    inner->masked[rank] = 0;
    atomic_fetch_and_explicit(&masks[rank / 64], ~(UINT64_C(1) << rank % 64), memory_order_acq_rel);
}

static ep_status run_barrier(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    uint64_t number = ++inner->barriers;

    publish(ll, &ll_shared_of(inner, ll->comm->rank)->barriers, number);
    return wait_all(ll, offsetof(struct ll_shared, barriers), number, HOST_LL_BARRIER);
}

static ep_status run_step(const struct ll_job *job)
{
    ep_ll *ll = job->ll;
    struct host_ll *inner = ll->impl;

    switch (job->step) {
    case LL_DISPATCH:
        return start_dispatch(ll, &job->dispatch);
    case LL_COMBINE:
        return start_combine(ll, &job->combine);
    case LL_RECEIVE:
        return receive(ll, &inner->dispatch[job->number & 1]);
    case LL_PULL:
        return pull(ll, &inner->combine[job->number & 1]);
    case LL_SET_MASK:
        for (int rank = 0; rank < ll->comm->nranks; rank++)
            if (job->mask.rank < 0 || job->mask.rank == rank)
                set_mask(ll, rank, job->mask.on);
        return EP_OK;
    case LL_QUERY_MASK:
        memcpy(job->out, inner->masked, (size_t)ll->comm->nranks * sizeof(*job->out));
        return EP_OK;
    case LL_BARRIER:
        return run_barrier(ll);
    }
    return EP_OK;
}

static ep_status run_job(void *arguments)
{
    const struct ll_job *job = arguments;
    const struct host_ll *inner = job->ll->impl;

    /* With masking this rank's own failure is not one of the group: it is missed, and masked. */
    return host_fail_queued(inner->host, run_step(job), HOST_LL_SEND, job->ll->config.flags & EP_LL_MASK_DEAD);
}

static ep_status submit(const struct ll_job *job, ep_stream stream)
{
    return host_submit(host_of(job->ll->comm), stream, run_job, job, sizeof(*job));
}

ep_status host_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream)
{
    struct ll_job job = {.ll = ll, .step = LL_DISPATCH, .dispatch = {.number = number, .args = *args}};

    return submit(&job, stream);
}

ep_status host_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream)
{
    const struct host_ll *inner = ll->impl;
    uint64_t number = ll->combines + 1;
    struct ll_job job = {
        .ll = ll,
        .step = LL_COMBINE,
        .combine = {
            .number = number, .call = args->call, .max_tokens = ll->call[args->call & 1].max_tokens, .args = *args}};

    /* The buffer is the same every second time, but only asking for it waits for those who still read it. */
    if ((args->flags & EP_LL_ZERO_COPY) &&
        (inner->handed_out != number || args->x != inner->combine_buffer[number & 1]))
        return ep_fail(EP_E_ARG, "ep_ll_combine: with EP_LL_ZERO_COPY x must be the buffer that "
                                 "ep_ll_get_combine_buffer gave for this combine");
    return submit(&job, stream);
}

ep_status host_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream)
{
    const struct ep_ll_call *open = &ll->call[call & 1];
    struct ll_job job = {.ll = ll};

    job.step = open->open == EP_LL_OPEN_DISPATCH ? LL_RECEIVE : LL_PULL;
    job.number = open->open == EP_LL_OPEN_DISPATCH ? call : open->combine;
    return submit(&job, stream);
}

ep_status host_ll_set_mask(ep_ll *ll, int rank, bool on, ep_stream stream)
{
    struct ll_job job = {.ll = ll, .step = LL_SET_MASK, .mask = {.rank = rank, .on = on}};

    return submit(&job, stream);
}

ep_status host_ll_query_mask(ep_ll *ll, int32_t *out, ep_stream stream)
{
    struct ll_job job = {.ll = ll, .step = LL_QUERY_MASK, .out = out};

    return submit(&job, stream);
}

ep_status host_ll_barrier(ep_ll *ll, ep_stream stream)
{
    struct ll_job job = {.ll = ll, .step = LL_BARRIER};

    return submit(&job, stream);
}

ep_status host_ll_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    struct host_ll *inner = ll->impl;
    uint64_t number = ll->combines + 1;
    int max_tokens = ll->config.max_tokens;

    /* The caller may write to it at once. */
    EP_TRY(host_drain(inner->host));
    EP_TRY(wait_unused(ll, number));
    EP_TRY(combine_buffer(ll, number, ret_buffer));
    /* All of it: whichever dispatch is answered. */
    for (int expert = 0; expert < ll->n_local; expert++)
        EP_TRY(reserve_rows(ll, number, max_tokens, expert, ll->comm->nranks * max_tokens));
    inner->handed_out = number;
    return EP_OK;
}

ep_status host_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    const struct host_ll *inner = ll->impl;

    host_drain(inner->host);
    memcpy(ret_masked, inner->masked, (size_t)ll->comm->nranks * sizeof(*ret_masked));
    return EP_OK;
}
