/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency: no plan, no exchange before the data. A sender knows nothing of the other senders, so it cannot know the
 * final rows; it writes each token once per rank, with the list of experts there, into a slot that belongs to it alone,
 * and the receiver packs the slots per expert in the order of (source rank, token). Combine pulls: the packed rows are
 * offered, and each rank reads and weighs those of its tokens.
 *
 * Dispatches and combines are numbered; number n uses buffer n % 2, so a sender may be one result ahead of a receiver.
 */
#include "backend/host/host.h"
#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

/* Where the rows of one source lie in the packed rows of one expert. */
struct ll_range {
    int32_t begin, count;
};

/* Head of a rank's shared segment. Then: ranges [2][L*R], then blocks [2][R]. */
struct ll_shared {
    alignas(HOST_CACHE_LINE) _Atomic uint64_t sent; /* dispatches whose rows this rank has sent */
    _Atomic uint64_t taken;                         /* dispatches that this rank has packed: their buffer is free */
    _Atomic uint64_t offered;                       /* combines whose input this rank has offered */
    _Atomic uint64_t pulled;                        /* combines that this rank has read from all */
    struct host_where offer[2];
};

/* Slots of one source in a receiver's segment: count, then max_tokens slots. */
struct ll_block {
    int32_t count;
    int32_t unused[15];
};

struct ll_slot {
    int32_t token;
    int32_t n_experts;
    int32_t expert[]; /* local numbers, topk of them at most; then scales, then the row, each aligned to 16 */
};

struct host_ll {
    struct host_comm *host;
    unsigned char **peer;     /* [R] segments */
    struct host_where *where; /* [R] */
    void *segment;
    void *combine_buffer[2]; /* [L, R*M, H] bf16, made on first use */
    uint64_t dispatches, combines;
    size_t scales_at, row_at, slot_bytes, block_bytes, ranges_at, blocks_at;
    int32_t *masked; /* [R] */
    int32_t *index;  /* [M,K] */
    int32_t *seen;   /* [E] tokens of this rank so far, per expert */
    uint8_t *row;    /* one quantised row */
    float *scales;
    int32_t *packed_scales;
    bool in_dispatch;
    bool in_place; /* the open combine reads the caller's memory, which it gets back only when all have read it */
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;
};

static size_t align16(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

static struct ll_shared *shared_of(const struct host_ll *inner, int rank)
{
    return (struct ll_shared *)(void *)inner->peer[rank];
}

static struct ll_range *ranges_of(const ep_ll *ll, int rank, uint64_t number)
{
    const struct host_ll *inner = ll->impl;
    size_t n = (size_t)ll->n_local * (size_t)ll->comm->nranks;

    return (struct ll_range *)(void *)(inner->peer[rank] + inner->ranges_at) + (number & 1) * n;
}

static struct ll_block *block_of(const ep_ll *ll, int receiver, uint64_t number, int source)
{
    const struct host_ll *inner = ll->impl;
    size_t block = (size_t)(number & 1) * (size_t)ll->comm->nranks + (size_t)source;

    return (struct ll_block *)(void *)(inner->peer[receiver] + inner->blocks_at + block * inner->block_bytes);
}

static struct ll_slot *slot_of(const struct host_ll *inner, struct ll_block *block, int i)
{
    return (struct ll_slot *)(void *)((unsigned char *)(block + 1) + (size_t)i * inner->slot_bytes);
}

/* --- creation --------------------------------------------------------------------------------------------------- */

static void lay_out(const ep_ll *ll, struct host_ll *inner)
{
    size_t hidden = (size_t)ll->config.hidden, n_ranges = (size_t)ll->n_local * (size_t)ll->comm->nranks;

    inner->scales_at = align16(sizeof(struct ll_slot) + (size_t)ll->config.topk * sizeof(int32_t));
    inner->row_at = align16(inner->scales_at + hidden / EP_SCALE_BLOCK * sizeof(float));
    inner->slot_bytes = inner->row_at + align16(2 * hidden);
    inner->block_bytes = sizeof(struct ll_block) + (size_t)ll->config.max_tokens * inner->slot_bytes;
    inner->ranges_at = sizeof(struct ll_shared);
    inner->blocks_at = (inner->ranges_at + 2 * n_ranges * sizeof(struct ll_range) + 63) / 64 * 64;
}

/* What must agree, and where the segment is. */
struct ll_hello {
    ep_ll_config config;
    struct host_where where;
    int32_t status;
};

static ep_status compare_configs(const ep_ll *ll, const struct ll_hello *all)
{
    static const struct {
        const char *name;
        size_t at;
    } fields[] = {
        {"max_tokens", offsetof(ep_ll_config, max_tokens)}, {"hidden", offsetof(ep_ll_config, hidden)},
        {"n_experts", offsetof(ep_ll_config, n_experts)},   {"topk", offsetof(ep_ll_config, topk)},
        {"flags", offsetof(ep_ll_config, flags)},
    };

    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        if (all[rank].status != EP_OK)
            return ep_fail((ep_status)all[rank].status, "ep_ll_new: rank %d failed with %s", rank,
                           ep_status_name((ep_status)all[rank].status));
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            int32_t first = *(const int32_t *)((const char *)&all[0].config + fields[i].at);
            int32_t other = *(const int32_t *)((const char *)&all[rank].config + fields[i].at);

            if (first != other)
                return ep_fail(EP_E_MISMATCH, "ep_ll_new: ranks disagree: %s is %d on rank 0 and %d on rank %d",
                               fields[i].name, first, other, rank);
        }
    }
    return EP_OK;
}

static ep_status meet_peers(ep_ll *ll, struct host_ll *inner, ep_status mine)
{
    struct ll_hello hello = {.config = ll->config, .status = (int32_t)mine};
    int nranks = ll->comm->nranks;
    struct ll_hello *all = calloc((size_t)nranks, sizeof(*all));
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory for %d ranks", nranks);
    if (mine == EP_OK)
        host_find(inner->host, inner->segment, 1, &hello.where);
    status = host_allgather(ll->comm, &hello, sizeof(hello), all);
    if (status == EP_OK)
        status = compare_configs(ll, all);
    for (int rank = 0; status == EP_OK && rank < nranks; rank++) {
        void *base;

        inner->where[rank] = all[rank].where;
        status = host_map(inner->host, rank, &inner->where[rank], &base);
        inner->peer[rank] = base;
    }
    free(all);
    return status;
}

static void free_inner(struct host_ll *inner)
{
    host_free_internal(inner->host, inner->segment);
    host_free_internal(inner->host, inner->combine_buffer[0]);
    host_free_internal(inner->host, inner->combine_buffer[1]);
    free(inner->peer);
    free(inner->where);
    free(inner->masked);
    free(inner->index);
    free(inner->seen);
    free(inner->row);
    free(inner->scales);
    free(inner->packed_scales);
    free(inner);
}

ep_status host_ll_open(ep_ll *ll)
{
    struct host_comm *host = host_of(ll->comm);
    struct host_ll *inner;
    size_t nranks = (size_t)ll->comm->nranks, entries = (size_t)ll->config.max_tokens * (size_t)ll->config.topk;
    size_t blocks = (size_t)ll->config.hidden / EP_SCALE_BLOCK;
    ep_status status = EP_OK;

    if (ll->comm->nnodes > 1)
        return ep_fail(EP_E_UNSUPPORTED,
                       "ep_ll_new: the host backend has no low-latency path between nodes (this group has "
                       "%d); use ep_plan_new and ep_dispatch",
                       ll->comm->nnodes);
    inner = calloc(1, sizeof(*inner));
    if (!inner)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    inner->host = host;
    ll->impl = inner;
    lay_out(ll, inner);
    inner->peer = calloc(nranks, sizeof(*inner->peer));
    inner->where = calloc(nranks, sizeof(*inner->where));
    inner->masked = calloc(nranks, sizeof(*inner->masked));
    inner->index = malloc((entries + 1) * sizeof(*inner->index));
    inner->seen = malloc((size_t)ll->config.n_experts * sizeof(*inner->seen));
    inner->row = aligned_alloc(16, align16((size_t)ll->config.hidden));
    inner->scales = malloc((blocks + 1) * sizeof(*inner->scales));
    inner->packed_scales = malloc((blocks + 4) * sizeof(*inner->packed_scales));
    if (!inner->peer || !inner->where || !inner->masked || !inner->index || !inner->seen || !inner->row ||
        !inner->scales || !inner->packed_scales)
        status = ep_fail(EP_E_MEMORY, "ep_ll_new: no memory for %zu entries", entries);
    else
        status = host_alloc_internal(host, inner->blocks_at + 2 * nranks * inner->block_bytes, &inner->segment);
    status = meet_peers(ll, inner, status);
    if (status != EP_OK) {
        free_inner(inner);
        ll->impl = NULL;
    }
    return status;
}

void host_ll_close(ep_ll *ll)
{
    if (ll->impl)
        free_inner(ll->impl);
    ll->impl = NULL;
}

/* --- waiting, with or without masks ------------------------------------------------------------------------------ */

/* Waits until the counter at `word` of each rank's head has reached `value`; masks who does not come, if allowed. */
static ep_status wait_all(ep_ll *ll, size_t word, uint64_t value, enum host_phase phase)
{
    struct host_ll *inner = ll->impl;
    struct host_comm *host = inner->host;
    bool mask = ll->config.flags & EP_LL_MASK_DEAD;
    struct host_pause pause;

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;
        _Atomic uint64_t *counter = (_Atomic uint64_t *)(void *)((char *)shared_of(inner, rank) + word);

        host_pause_begin(&pause, host, phase);
        pause.tolerant = mask;
        while (!inner->masked[rank]) {
            uint32_t seen = host_doorbell(host);
            ep_status status;

            if (atomic_load_explicit(counter, memory_order_acquire) >= value)
                break;
            status = host_pause(&pause, seen, rank);
            if (status != EP_OK && (!mask || status == EP_E_ABORTED))
                return status;
            if (status != EP_OK)
                inner->masked[rank] = 1;
        }
        host_pause_end(&pause);
    }
    return EP_OK;
}

static void publish(ep_ll *ll, _Atomic uint64_t *counter, uint64_t value)
{
    ep_rows_stream_end();
    atomic_store_explicit(counter, value, memory_order_release);
    host_ring_node(((struct host_ll *)ll->impl)->host);
}

static ep_status load_index(ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens)
{
    struct host_ll *inner = ll->impl;
    struct ep_routing_shape shape = {.n_tokens = n_tokens,
                                     .topk = ll->config.topk,
                                     .n_experts = ll->config.n_experts,
                                     .nranks = ll->comm->nranks,
                                     .ranks_per_node = ll->comm->ranks_per_node};

    return ep_routing_check(&shape, topk_idx, idx_type, inner->index);
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

/* The row as it travels: as it is, or quantised once for all destinations. */
static const void *encode_row(ep_ll *ll, const ep_ll_dispatch_args *args, const void *x, const void **ret_scales)
{
    struct host_ll *inner = ll->impl;
    bool round = args->scale_type == EP_UE8M0 || (args->flags & EP_LL_ROUND_SCALE);

    *ret_scales = NULL;
    if (args->out_dtype == EP_BF16)
        return x;
    ep_quantize_row(x, ll->config.hidden, round, inner->row, inner->scales);
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
    const int32_t *index = inner->index + (size_t)t * (size_t)ll->config.topk;
    const void *scales, *row = NULL;
    struct ll_slot *slots[EP_MAX_TOPK];
    int ranks[EP_MAX_TOPK], n = 0;

    for (int k = 0; k < ll->config.topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, i = 0;

        if (rank < 0 || inner->masked[rank])
            continue;
        while (i < n && ranks[i] != rank)
            i++;
        if (i == n) {
            struct ll_block *block = block_of(ll, rank, inner->dispatches, ll->comm->rank);

            ranks[n] = rank;
            slots[n] = slot_of(inner, block, block->count++);
            slots[n]->token = t;
            slots[n]->n_experts = 0;
            n++;
        }
        slots[i]->expert[slots[i]->n_experts++] = index[k] % ll->n_local;
    }
    if (n > 0)
        row = encode_row(ll, args, (const char *)args->x + (size_t)t * (size_t)ll->config.hidden * 2, &scales);
    for (int i = 0; i < n; i++) {
        if (scales)
            memcpy((char *)slots[i] + inner->scales_at, scales, out_scale_bytes(ll, args));
        memcpy((char *)slots[i] + inner->row_at, row, out_row_bytes(ll, args));
    }
}

/* First rows per (expert, source): counts, then prefix sums within each expert. */
static void make_ranges(ep_ll *ll, struct ll_range *ranges)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks, me = ll->comm->rank;

    memset(ranges, 0, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    for (int source = 0; source < nranks; source++) {
        struct ll_block *block = block_of(ll, me, inner->dispatches, source);

        for (int i = 0; !inner->masked[source] && i < block->count; i++) {
            const struct ll_slot *slot = slot_of(inner, block, i);

            for (int e = 0; e < slot->n_experts; e++)
                ranges[slot->expert[e] * nranks + source].count++;
        }
    }
    for (int expert = 0; expert < ll->n_local; expert++) {
        int32_t begin = 0;

        for (int source = 0; source < nranks; source++) {
            ranges[expert * nranks + source].begin = begin;
            begin += ranges[expert * nranks + source].count;
        }
    }
}

static void pack_slot(ep_ll *ll, const ep_ll_dispatch_args *args, const struct ll_slot *slot, int32_t *next)
{
    const struct host_ll *inner = ll->impl;
    size_t rows = (size_t)ll->comm->nranks * (size_t)ll->config.max_tokens;

    for (int e = 0; e < slot->n_experts; e++) {
        size_t at = (size_t)slot->expert[e] * rows + (size_t)next[slot->expert[e]]++;

        memcpy((char *)args->recv_x + at * out_row_bytes(ll, args), (const char *)slot + inner->row_at,
               out_row_bytes(ll, args));
        if (args->out_dtype != EP_BF16)
            memcpy((char *)args->recv_scales + at * out_scale_bytes(ll, args), (const char *)slot + inner->scales_at,
                   out_scale_bytes(ll, args));
        if (args->recv_source)
            args->recv_source[at] = slot->token;
    }
}

static ep_status receive(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &inner->dispatch;
    int nranks = ll->comm->nranks, me = ll->comm->rank;
    struct ll_range *ranges = ranges_of(ll, me, inner->dispatches);
    int32_t *next = inner->seen; /* [L] used here */

    EP_TRY(wait_all(ll, offsetof(struct ll_shared, sent), inner->dispatches, HOST_LL_RECV));
    make_ranges(ll, ranges);
    memset(next, 0, (size_t)ll->n_local * sizeof(*next));
    for (int source = 0; source < nranks; source++) {
        struct ll_block *block = block_of(ll, me, inner->dispatches, source);

        for (int i = 0; !inner->masked[source] && i < block->count; i++)
            pack_slot(ll, args, slot_of(inner, block, i), next);
    }
    for (int expert = 0; expert < ll->n_local; expert++) {
        args->recv_count[expert] = next[expert];
        for (int source = 0; args->recv_range && source < nranks; source++) {
            const struct ll_range *range = &ranges[expert * nranks + source];

            args->recv_range[expert * nranks + source] = (int64_t)range->begin << 32 | (uint32_t)range->count;
        }
    }
    publish(ll, &shared_of(inner, me)->taken, inner->dispatches);
    return EP_OK;
}

ep_status host_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args)
{
    struct host_ll *inner = ll->impl;

    EP_TRY(host_drain(inner->host));
    EP_TRY(load_index(ll, args->topk_idx, args->idx_type, args->n_tokens));
    /* The slots of two dispatches ago must have been packed. */
    if (inner->dispatches >= 2)
        EP_TRY(wait_all(ll, offsetof(struct ll_shared, taken), inner->dispatches - 1, HOST_LL_SEND));
    inner->dispatches++;
    inner->dispatch = *args;
    inner->in_dispatch = true;
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        if (!inner->masked[rank])
            block_of(ll, rank, inner->dispatches, ll->comm->rank)->count = 0;
    for (int t = 0; t < args->n_tokens; t++)
        send_token(ll, args, t);
    publish(ll, &shared_of(inner, ll->comm->rank)->sent, inner->dispatches);
    return args->flags & EP_LL_RECV_HOOK ? EP_OK : receive(ll);
}

/* --- combine ---------------------------------------------------------------------------------------------------- */

static size_t combine_bytes(const ep_ll *ll)
{
    return (size_t)ll->config.n_experts * (size_t)ll->config.max_tokens * (size_t)ll->config.hidden * 2;
}

/* Library's buffer for combine number n, once nobody reads the one before in it. */
static ep_status combine_buffer(ep_ll *ll, uint64_t number, void **ret_buffer)
{
    struct host_ll *inner = ll->impl;

    if (!inner->combine_buffer[number & 1])
        EP_TRY(host_alloc_internal(inner->host, combine_bytes(ll), &inner->combine_buffer[number & 1]));
    if (number > 2)
        EP_TRY(wait_all(ll, offsetof(struct ll_shared, pulled), number - 2, HOST_LL_OFFER));
    *ret_buffer = inner->combine_buffer[number & 1];
    return EP_OK;
}

/* The rows that were received, copied to where peers can read them. */
static void copy_rows(const ep_ll *ll, const void *x, void *buffer)
{
    const struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;
    const struct ll_range *ranges = ranges_of(ll, ll->comm->rank, inner->combines);
    size_t row = (size_t)ll->config.hidden * 2, rows = (size_t)nranks * (size_t)ll->config.max_tokens;

    for (int expert = 0; expert < ll->n_local; expert++) {
        const struct ll_range *last = &ranges[expert * nranks + nranks - 1];
        size_t at = (size_t)expert * rows * row;

        memcpy((char *)buffer + at, (const char *)x + at, (size_t)(last->begin + last->count) * row);
    }
}

static ep_status offer(ep_ll *ll, const ep_ll_combine_args *args)
{
    struct host_ll *inner = ll->impl;
    struct host_where *where = &shared_of(inner, ll->comm->rank)->offer[inner->combines & 1];
    void *buffer;

    if (args->flags & EP_LL_ZERO_COPY) {
        if (!inner->combine_buffer[inner->combines & 1] || args->x != inner->combine_buffer[inner->combines & 1])
            return ep_fail(EP_E_ARG, "ep_ll_combine: with EP_LL_ZERO_COPY x must be the buffer that "
                                     "ep_ll_get_combine_buffer gave for this combine");
        buffer = inner->combine_buffer[inner->combines & 1];
    } else if (host_find(inner->host, args->x, combine_bytes(ll), where)) {
        inner->in_place = true;
        return EP_OK;
    } else {
        EP_TRY(combine_buffer(ll, inner->combines, &buffer));
        copy_rows(ll, args->x, buffer);
    }
    if (!host_find(inner->host, buffer, combine_bytes(ll), where))
        return ep_fail(EP_E_STATE, "ep_ll_combine: the combine buffer is not where it was");
    return EP_OK;
}

/* Weighted sum of the rows of token t. */
static ep_status pull_token(ep_ll *ll, const ep_ll_combine_args *args, int t, void *const *offers)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks, me = ll->comm->rank, n = 0;
    size_t topk = (size_t)ll->config.topk, row = (size_t)ll->config.hidden * 2;
    size_t rows = (size_t)nranks * (size_t)ll->config.max_tokens;
    const int32_t *index = inner->index + (size_t)t * topk;
    const uint16_t *terms[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];

    for (size_t k = 0; k < topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, local = index[k] < 0 ? 0 : index[k] % ll->n_local;
        const struct ll_range *range;
        int32_t i;

        if (rank < 0)
            continue;
        i = inner->seen[index[k]]++;
        if (inner->masked[rank])
            continue;
        range = &ranges_of(ll, rank, inner->combines)[local * nranks + me];
        if (i >= range->count)
            return ep_fail(EP_E_ROUTING,
                           "ep_ll_combine: token %d: expert %d did not get it: topk_idx is not that of the dispatch", t,
                           index[k]);
        terms[n] = (const uint16_t *)(const void *)((const char *)offers[rank] +
                                                    ((size_t)local * rows + (size_t)(range->begin + i)) * row);
        weights[n++] = args->topk_weights[(size_t)t * topk + k];
    }
    inner->host->rows->weighted_sum_bf16((uint16_t *)(void *)((char *)args->out + (size_t)t * row), terms, weights, n,
                                         ll->config.hidden);
    return EP_OK;
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
            EP_TRY(host_map(inner->host, rank, &shared_of(inner, rank)->offer[inner->combines & 1], &offers[rank]));
    memset(inner->seen, 0, (size_t)ll->config.n_experts * sizeof(*inner->seen));
    for (int t = 0; status == EP_OK && t < args->n_tokens; t++)
        status = pull_token(ll, args, t, offers);
    publish(ll, &shared_of(inner, ll->comm->rank)->pulled, inner->combines);
    if (status == EP_OK && inner->in_place)
        status = wait_all(ll, offsetof(struct ll_shared, pulled), inner->combines, HOST_LL_DONE);
    return status;
}

ep_status host_ll_combine(ep_ll *ll, const ep_ll_combine_args *args)
{
    struct host_ll *inner = ll->impl;
    ep_status status;

    EP_TRY(host_drain(inner->host));
    EP_TRY(load_index(ll, args->topk_idx, args->idx_type, args->n_tokens));
    inner->combines++;
    inner->combine = *args;
    inner->in_dispatch = false;
    inner->in_place = false;
    status = offer(ll, args);
    if (status != EP_OK) {
        inner->combines--;
        return status;
    }
    publish(ll, &shared_of(inner, ll->comm->rank)->offered, inner->combines);
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

    return combine_buffer(ll, inner->combines + 1, ret_buffer);
}

ep_status host_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    const struct host_ll *inner = ll->impl;

    memcpy(ret_masked, inner->masked, (size_t)ll->comm->nranks * sizeof(*ret_masked));
    return EP_OK;
}
