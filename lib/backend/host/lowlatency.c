/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency: no plan, and no exchange before the data. A sender does not know the other senders, so it cannot know
 * the final rows; it writes each token once per rank, with the list of its experts there, into a slot of its own, and
 * the receiver packs the slots per expert in the order of (source rank, token). A combine pulls: each rank publishes
 * its packed rows, and each rank reads, weights and adds up those of its tokens, in the groups of the contract. Within
 * a node no sums are transferred: reading a row costs the same from any rank.
 *
 * Dispatches and combines are numbered separately; number n uses buffer n % 2, so a sender may be one result ahead of a
 * receiver. A combine names a dispatch, whose ranges it reads in the segments of the peers: no rank overwrites them
 * before all ranks have sent dispatch n + 2, which they do after their combines of n.
 *
 * Between nodes each block of slots is built here and put where the receiver would have it written; ranks there receive
 * the counters as signals. See lowlatency_net.c, and lowlatency_reply.c for the combine, which does transfer sums.
 */
#include "backend/host/lowlatency.h"

#include "core/quantize.h"

#include <string.h>

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

static ep_status check_format(ep_ll *ll, const ep_ll_dispatch_args *args, int rank, const struct ll_block *head)
{
    static const struct {
        const char *name;
        int shift;
    } fields[] = {{"out_dtype", 0}, {"scale_type", 8}, {"rounding of scales", 16}};
    int32_t mine = ep_ll_format(args), theirs = head->format;

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        int a = mine >> fields[i].shift & 0xff, b = theirs >> fields[i].shift & 0xff;

        if (a != b)
            return ll_fail_disagree(ll, EP_GROUP_LL_RECV, fields[i].name, a, b, rank);
    }
    if (mine != theirs)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_RECV, "the format of its rows", theirs);
    if (head->max_tokens < 1 || head->max_tokens > ll->config.max_tokens)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_RECV, "its max_tokens", head->max_tokens);
    return head->max_tokens == args->max_tokens
               ? EP_OK
               : ll_fail_disagree(ll, EP_GROUP_LL_RECV, "max_tokens", args->max_tokens, head->max_tokens, rank);
}

/* The row as it is sent: unchanged, or quantised once for all destinations. */
static const void *encode_row(ep_ll *ll, const ep_ll_dispatch_args *args, const void *x, const void **ret_scales)
{
    struct host_ll *inner = ll->impl;

    *ret_scales = NULL;
    if (args->out_dtype == EP_BF16)
        return x;
    ep_quantize_row(x, ll->config.hidden, ep_ll_rounds_scales(args), inner->row, inner->scales);
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
    const int32_t *index = inner->index[dispatch->number & 1] + (size_t)t * (size_t)args->topk;
    const void *scales, *row = NULL;
    struct ll_slot *slots[EP_MAX_TOPK];
    int ranks[EP_MAX_TOPK], n_experts[EP_MAX_TOPK], n = 0;

    for (int k = 0; k < args->topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / ll->n_local, i = 0;

        if (rank < 0 || inner->masked[rank])
            continue;
        while (i < n && ranks[i] != rank)
            i++;
        if (i == n) {
            ranks[n] = rank;
            slots[n] = ll_slot_of(inner->block[rank], ll_slot_bytes(ll, args->out_dtype), inner->n_slots[rank]++);
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

/* The block that `source` has sent to this rank. */
static struct ll_block *received_block(const ep_ll *ll, uint64_t number, int source)
{
    return ll_is_remote(ll, source) ? ll_net_get_received(ll, source, number, LL_PAYLOAD_BLOCK)
                                    : ll_local_block(ll, ll->comm->rank, number, source);
}

/* Copies the headers of the slots of one source and checks them: they determine where its rows are written. */
static ep_status read_heads(ep_ll *ll, const struct ll_dispatch *dispatch, int source)
{
    struct host_ll *inner = ll->impl;
    struct ll_block *block = received_block(ll, dispatch->number, source), head;
    size_t slot_bytes = ll_slot_bytes(ll, dispatch->args.out_dtype);
    int max_tokens = dispatch->args.max_tokens;
    int topk = ll->config.topk, last = -1;

    ep_group_read_shared(&head, block, sizeof(head));
    if (head.number != dispatch->number) {
        EP_TRY(ll_check_masks(ll, EP_GROUP_LL_RECV));
        if (!(ll->config.flags & EP_LL_MASK_DEAD))
            return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the number of its dispatch", (int64_t)head.number);
        return ep_fail(EP_E_EXCLUDED, "ep_ll_dispatch: rank %d had masked this rank when it sent dispatch %llu", source,
                       (unsigned long long)dispatch->number);
    }
    EP_TRY(check_format(ll, &dispatch->args, source, &head));
    if (head.count < 0 || head.count > max_tokens)
        return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "its number of tokens", head.count);
    for (int i = 0; i < head.count; i++) {
        struct ll_slot *slot = ll_head_of(ll, source, i);

        ep_group_read_shared(slot, ll_slot_of(block, slot_bytes, i), sizeof(*slot) + (size_t)topk * sizeof(int32_t));
        if (slot->token <= last || slot->token >= max_tokens)
            return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the number of a token", slot->token);
        if (slot->n_experts < 1 || slot->n_experts > topk)
            return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the number of experts of a token", slot->n_experts);
        last = slot->token;
    }
    inner->n_slots[source] = head.count;
    return EP_OK;
}

/* Ranges per (expert, source): counts, then prefix sums within each expert. */
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
                    return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "an expert of a token", expert);
                /* There is no room for rows of an expert that a token has twice. */
                if (++ranges[expert * nranks + source].count > i + 1)
                    return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "a duplicate expert of a token", expert);
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

/* Writes the scales of row `row` of an expert with the strides of the caller. */
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

/* `head` is the copy, `slot` holds the row. */
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

/* Writes the metadata of the rows. `count` [L]. */
static void write_counts(const ep_ll *ll, const ep_ll_dispatch_args *args, const struct ll_range *ranges,
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
    size_t slot_bytes = ll_slot_bytes(ll, args->out_dtype);

    EP_TRY(ll_wait(ll, &(struct ll_wait){LL_SENT, dispatch->number, EP_GROUP_LL_RECV, .add = args->wait_cost_add}));
    EP_TRY(make_ranges(ll, dispatch, ranges));
    memcpy(ll_ranges_of(ll, me, dispatch->number), ranges, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    memset(next, 0, (size_t)ll->n_local * sizeof(*next));
    for (int source = 0; source < nranks; source++) {
        struct ll_block *block = received_block(ll, dispatch->number, source);

        for (int i = 0; i < inner->n_slots[source]; i++)
            pack_slot(ll, args, ll_head_of(ll, source, i), ll_slot_of(block, slot_bytes, i), next);
    }
    write_counts(ll, args, ranges, next);
    ll_publish(ll, LL_PACKED + (dispatch->number & 1), dispatch->number);
    return EP_OK;
}

/*
 * Sets the blocks that this rank writes: at the receiver, or in a send buffer if the receiver is on another node, sized
 * by the number of its slots.
 */
static ep_status find_blocks(ep_ll *ll, const struct ll_dispatch *dispatch)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;
    size_t topk = (size_t)dispatch->args.topk;
    const int32_t *index = inner->index[dispatch->number & 1];
    size_t slot_bytes = ll_slot_bytes(ll, dispatch->args.out_dtype);

    memset(inner->n_slots, 0, (size_t)nranks * sizeof(*inner->n_slots));
    for (int t = 0; inner->net && t < dispatch->args.n_tokens; t++, index += topk)
        for (size_t k = 0; k < topk; k++)
            if (ll_is_first(ll, index, k))
                inner->n_slots[index[k] / ll->n_local]++;
    for (int rank = 0; rank < nranks; rank++) {
        if (inner->masked[rank])
            continue;
        if (!ll_is_remote(ll, rank)) {
            inner->block[rank] = ll_local_block(ll, rank, dispatch->number, ll->comm->rank);
            continue;
        }
        inner->block[rank] =
            ll_net_get_send_buffer(ll, rank, dispatch->number, LL_PAYLOAD_BLOCK,
                                   sizeof(struct ll_block) + (size_t)inner->n_slots[rank] * slot_bytes);
        if (!inner->block[rank])
            return EP_E_MEMORY;
    }
    memset(inner->n_slots, 0, (size_t)nranks * sizeof(*inner->n_slots));
    return EP_OK;
}

static ep_status start_dispatch(ep_ll *ll, const struct ll_dispatch *wanted)
{
    struct host_ll *inner = ll->impl;
    struct ll_dispatch *dispatch = &inner->dispatch[wanted->number & 1];
    const ep_ll_dispatch_args *args = &dispatch->args;
    int32_t *checked = inner->next_index;
    uint64_t number = wanted->number;

    /* Routing that is refused here changes nothing: the dispatch before the last one can still be combined. */
    EP_TRY(ll_load_index(ll, wanted->args.topk_idx, wanted->args.idx_type, wanted->args.n_tokens, wanted->args.topk,
                         checked));
    inner->next_index = inner->index[number & 1];
    inner->index[number & 1] = checked;
    /* The slots of two dispatches ago must have been packed. */
    if (number > 2)
        EP_TRY(ll_wait(ll, &(struct ll_wait){LL_PACKED + (number & 1), number - 2, EP_GROUP_LL_SEND, .ranks = LL_ALL}));
    *dispatch = *wanted;
    EP_TRY(find_blocks(ll, dispatch));
    for (int t = 0; t < args->n_tokens; t++)
        send_token(ll, dispatch, t);
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_block *block = inner->block[rank];

        if (inner->masked[rank])
            continue;
        block->count = inner->n_slots[rank];
        block->format = ep_ll_format(args);
        block->max_tokens = args->max_tokens;
        block->number = number;
        if (ll_is_remote(ll, rank))
            ll_net_send(ll, rank, number, LL_PAYLOAD_BLOCK,
                        sizeof(*block) + (size_t)inner->n_slots[rank] * ll_slot_bytes(ll, args->out_dtype));
    }
    ll_publish(ll, LL_SENT, number);
    return args->flags & EP_LL_RECV_HOOK ? EP_OK : receive(ll, dispatch);
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

enum ll_step { LL_DISPATCH, LL_COMBINE, LL_RECEIVE, LL_PULL, LL_CONTROL };

struct ll_job {
    ep_ll *ll;
    enum ll_step step;
    union {
        struct ll_dispatch dispatch;
        struct ll_combine combine;
        uint64_t number; /* of the dispatch or combine to be finished */
        struct ep_ll_control control;
    };
};

static void merge_mask(ep_ll *ll, const ep_ll *from)
{
    const struct host_ll *other = from->impl;
    struct host_ll *inner = ll->impl;

    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        if (other->masked[rank] && !inner->masked[rank])
            ll_set_mask(ll, rank, true);
        inner->unmasked[rank] = inner->unmasked[rank] && other->unmasked[rank];
    }
}

static ep_status run_control(ep_ll *ll, const struct ep_ll_control *control)
{
    struct host_ll *inner = ll->impl;
    bool on = control->kind == EP_LL_CONTROL_MASK;

    switch (control->kind) {
    case EP_LL_CONTROL_MASK:
    case EP_LL_CONTROL_UNMASK:
        for (int rank = 0; rank < ll->comm->nranks; rank++)
            if (control->rank < 0 || control->rank == rank)
                ll_set_mask(ll, rank, on);
        /* Ranks that synchronise after this may call: they must not see masks that were cleared. */
        return on ? EP_OK : ll_net_flush_masks(ll);
    case EP_LL_CONTROL_MERGE:
        merge_mask(ll, control->from);
        return EP_OK;
    case EP_LL_CONTROL_QUERY:
        memcpy(control->out, inner->masked, (size_t)ll->comm->nranks * sizeof(*control->out));
        return EP_OK;
    case EP_LL_CONTROL_BARRIER:
        ll_publish(ll, LL_BARRIERS, ++inner->barriers);
        return ll_wait(ll, &(struct ll_wait){LL_BARRIERS, inner->barriers, EP_GROUP_LL_BARRIER, .ranks = LL_ALL});
    }
    return EP_OK;
}

static ep_status run_step(const struct ll_job *job)
{
    ep_ll *ll = job->ll;
    struct host_ll *inner = ll->impl;

    switch (job->step) {
    case LL_DISPATCH:
        return start_dispatch(ll, &job->dispatch);
    case LL_COMBINE:
        return ll_start_combine(ll, &job->combine);
    case LL_RECEIVE:
        return receive(ll, &inner->dispatch[job->number & 1]);
    case LL_PULL:
        return ll_pull(ll, &inner->combine[job->number & 1]);
    case LL_CONTROL:
        return run_control(ll, &job->control);
    }
    return EP_OK;
}

static ep_status run_job(void *arguments)
{
    const struct ll_job *job = arguments;
    const struct host_ll *inner = job->ll->impl;
    ep_status status;

    ll_net_set_busy(job->ll, true);
    status = run_step(job);
    ll_net_set_busy(job->ll, false);
    /* With masking a failure of this rank is not one of the group: its peers time out and mask it. */
    return ep_group_fail_queued(inner->group, status, EP_GROUP_LL_SEND, job->ll->config.flags & EP_LL_MASK_DEAD);
}

static ep_status submit(const struct ll_job *job, ep_stream stream)
{
    return ep_group_submit(ep_group_of(job->ll->comm), stream, run_job, job, sizeof(*job));
}

ep_status host_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream)
{
    struct ll_job job = {.ll = ll, .step = LL_DISPATCH, .dispatch = {.number = number, .args = *args}};

    return submit(&job, stream);
}

ep_status host_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream)
{
    struct ll_job job = {.ll = ll,
                         .step = LL_COMBINE,
                         .combine = {.number = ll->combines + 1,
                                     .call = args->call,
                                     .max_tokens = ll->call[args->call & 1].max_tokens,
                                     .args = *args}};

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

ep_status host_ll_control(ep_ll *ll, const struct ep_ll_control *control, ep_stream stream)
{
    struct ll_job job = {.ll = ll, .step = LL_CONTROL, .control = *control};

    return submit(&job, stream);
}

ep_status host_ll_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    struct host_ll *inner = ll->impl;
    uint64_t number = ll->combines + 1;
    int max_tokens = ll->config.max_tokens;
    ep_status status;

    /* The caller may write to it at once. */
    EP_TRY(ep_group_drain(inner->group));
    ll_net_set_busy(ll, true);
    status = ll_wait_unused(ll, number);
    ll_net_set_busy(ll, false);
    EP_TRY(status);
    *ret_buffer = inner->combine_buffer[number & 1];
    /* All of it, for any dispatch. */
    for (int expert = 0; expert < ll->n_local; expert++)
        EP_TRY(ll_reserve_rows(ll, number, max_tokens, expert, ll->comm->nranks * max_tokens));
    return EP_OK;
}

ep_status host_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    const struct host_ll *inner = ll->impl;

    ep_group_drain(inner->group);
    memcpy(ret_masked, inner->masked, (size_t)ll->comm->nranks * sizeof(*ret_masked));
    return EP_OK;
}
