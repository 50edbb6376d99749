/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency: no plan, and no exchange before the data. A sender does not know the other senders, so it cannot know
 * the final rows; it writes each token once per rank, with its choices, into a slot of its own, and the receiver packs
 * the slots per expert in the order of (source rank, token). A combine pulls: each rank publishes its packed rows, and
 * each rank of its node reads, weights and adds up those of its tokens, in the groups of the contract. Within a node no
 * sums are transferred: reading a row costs the same from any rank. Between nodes they are.
 *
 * Dispatches and combines together are numbered by `serial`. There is one slot for each token of a source, which is
 * reused when the receiver has completed the previous dispatch. A combine names a dispatch, whose ranges it reads in
 * the segments of the peers: no rank overwrites them before all ranks have sent dispatch n + 2, which they do after
 * their combines of n.
 */
#include "backend/host/lowlatency.h"

#include "core/quantize.h"

#include <string.h>

/* --- dispatch --------------------------------------------------------------------------------------------------- */

static size_t out_row_bytes(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    return (size_t)ep_ll_row_bytes(ll, args);
}

/* In a slot. Those of nvfp4 have no room before the row, which leaves some behind it. */
static size_t scales_at(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    const struct host_ll *inner = ll->impl;

    return args->out_dtype == EP_F4E2M1 ? inner->row_at + out_row_bytes(ll, args) : inner->scales_at;
}

static ep_status check_format(ep_ll *ll, const ep_ll_dispatch_args *args, int rank, int32_t theirs, int32_t max_tokens)
{
    static const struct {
        const char *name;
        int shift;
    } fields[] = {{"out_dtype", 0}, {"scale_type", 8}, {"rounding of scales", 16}};
    int32_t mine = ep_ll_format(args);

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        int a = mine >> fields[i].shift & 0xff, b = theirs >> fields[i].shift & 0xff;

        if (a != b)
            return ll_fail_disagree(ll, EP_GROUP_LL_RECV, fields[i].name, a, b, rank);
    }
    if (mine != theirs)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_RECV, "the format of its rows", theirs);
    if (max_tokens < 1 || max_tokens > ll->config.max_tokens)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_RECV, "its max_tokens", max_tokens);
    return max_tokens == args->max_tokens
               ? EP_OK
               : ll_fail_disagree(ll, EP_GROUP_LL_RECV, "max_tokens", args->max_tokens, max_tokens, rank);
}

/* The row as it is sent: unchanged, or quantised once for all destinations. */
static const void *encode_row(ep_ll *ll, const ep_ll_dispatch_args *args, const void *x, const void **ret_scales)
{
    struct host_ll *inner = ll->impl;

    *ret_scales = NULL;
    if (args->out_dtype == EP_BF16)
        return x;
    ep_quantize(x, ll->config.hidden, args, inner->row, inner->scales);
    *ret_scales = inner->scales;
    return inner->row;
}

/* Is entry k the first of a token on the rank of its expert? `index` [K]: the token's experts, -1: none. */
static bool is_first(const ep_ll *ll, const int32_t *index, size_t k)
{
    size_t before = 0;

    while (before < k && (index[before] < 0 || index[before] / ll->n_local != index[k] / ll->n_local))
        before++;
    return index[k] >= 0 && before == k;
}

/* Fills the slots of token t, one on each rank of its experts. */
static void send_token(ep_ll *ll, const struct ll_dispatch *dispatch, int t)
{
    struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &dispatch->args;
    const int32_t *index = inner->index[dispatch->number & 1] + (size_t)t * (size_t)args->topk;
    const void *scales = NULL, *row = NULL;
    struct ll_choice choices[EP_MAX_TOPK];

    for (int k = 0; k < ll->config.topk; k++) {
        choices[k] = (struct ll_choice){.expert = k < args->topk ? index[k] : -1};
        if (choices[k].expert >= 0)
            choices[k].index = inner->seen[choices[k].expert]++;
    }
    for (size_t k = 0; k < (size_t)args->topk; k++) {
        struct ll_view to;
        unsigned char *slot;

        if (!is_first(ll, index, k) || inner->masked[index[k] / ll->n_local])
            continue;
        if (!row)
            row = encode_row(ll, args, (const char *)args->x + (size_t)t * (size_t)ll->config.hidden * 2, &scales);
        to = ll_to(ll, index[k] / ll->n_local);
        slot = to.segment + ll_wire_slot_at(to.layout, to.source, t);
        memcpy(slot, choices, (size_t)ll->config.topk * sizeof(*choices));
        if (scales)
            memcpy(slot + scales_at(ll, args), scales, (size_t)ep_ll_scale_words(ll, args) * 4);
        memcpy(slot + inner->row_at, row, out_row_bytes(ll, args));
        ll_wire_store(to.segment, ll_wire_slot_flag_at(to.layout, to.source, t), dispatch->serial << 1 | 1);
    }
}

/* Marks the slots of this rank on each rank as empty, and describes the dispatch. */
static void begin_slots(const ep_ll *ll, const struct ll_dispatch *dispatch)
{
    const struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &dispatch->args;
    uint64_t number = dispatch->serial << 32;

    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_view to;
        int64_t at;

        if (inner->masked[rank])
            continue;
        to = ll_to(ll, rank);
        at = ll_wire_counts_at(to.layout, 0, to.source);
        ll_wire_store(to.segment, at, number | (uint32_t)ep_ll_format(args));
        ll_wire_store(to.segment, at + 8, number | (uint32_t)args->max_tokens);
        for (int t = 0; t < args->max_tokens; t++)
            ll_wire_store(to.segment, ll_wire_slot_flag_at(to.layout, to.source, t), dispatch->serial << 1);
        if (ll_is_remote(ll, rank))
            ll_words_of(&to)->desc[dispatch->serial & 1] =
                (struct ll_wire_desc){.number = dispatch->serial,
                                      .max_tokens = args->max_tokens,
                                      .image_bytes = (int32_t)ll_slot_bytes(ll, args)};
    }
}

/* Copies the choices of a slot for this rank, with local experts, and checks them: they determine where rows go. */
static ep_status read_slot(ep_ll *ll, const struct ll_dispatch *dispatch, int source, int t)
{
    struct host_ll *inner = ll->impl;
    struct ll_choice *choices = ll_choices_of(ll, dispatch->number, source, t);
    const struct ll_view from = ll_from(ll, source);
    int topk = ll->config.topk, n = 0;

    ep_group_read_shared(choices, from.segment + ll_wire_slot_at(from.layout, from.source, t),
                         (size_t)topk * sizeof(*choices));
    for (int k = 0; k < topk; k++) {
        int32_t expert = choices[k].expert;

        choices[k].expert = expert < 0 || expert / ll->n_local != ll->comm->rank ? -1 : expert % ll->n_local;
        if (choices[k].expert < 0)
            continue;
        if (choices[k].index != inner->seen[choices[k].expert]++ || choices[k].index >= dispatch->args.max_tokens)
            return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the index of a row", choices[k].index);
        n++;
    }
    return n ? EP_OK : ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the number of experts of a token", 0);
}

/* Reads which rows a source has sent, and counts them in inner->seen [L]. */
static ep_status read_slots(ep_ll *ll, const struct ll_dispatch *dispatch, int source)
{
    const struct ll_view from = ll_from(ll, source);
    int64_t at = ll_wire_counts_at(from.layout, 0, from.source);
    uint64_t format = ll_wire_load(from.segment, at), max_tokens = ll_wire_load(from.segment, at + 8);

    if (format >> 32 != (uint32_t)dispatch->serial) {
        EP_TRY(ll_check_masks(ll, EP_GROUP_LL_RECV));
        if (!(ll->config.flags & EP_LL_MASK_DEAD))
            return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the number of its dispatch", (int64_t)(format >> 32));
        return ep_fail(EP_E_EXCLUDED, "ep_ll_dispatch: rank %d had masked this rank when it sent dispatch %llu", source,
                       (unsigned long long)dispatch->number);
    }
    EP_TRY(check_format(ll, &dispatch->args, source, (int32_t)(uint32_t)format, (int32_t)(uint32_t)max_tokens));
    for (int t = 0; t < dispatch->args.max_tokens; t++) {
        uint64_t flag = ll_wire_load(from.segment, ll_wire_slot_flag_at(from.layout, from.source, t));

        if (flag >> 1 != dispatch->serial)
            return ll_fail_damaged(ll, source, EP_GROUP_LL_RECV, "the number of a slot", (int64_t)(flag >> 1));
        if (flag & 1)
            EP_TRY(read_slot(ll, dispatch, source, t));
    }
    return EP_OK;
}

/* Ranges per (expert, source): counts, then prefix sums within each expert. */
static ep_status make_ranges(ep_ll *ll, const struct ll_dispatch *dispatch, struct ll_range *ranges)
{
    struct host_ll *inner = ll->impl;
    int nranks = ll->comm->nranks;

    for (int source = 0; source < nranks; source++) {
        memset(ll_choices_of(ll, dispatch->number, source, 0), 0xff,
               (size_t)ll->config.max_tokens * (size_t)ll->config.topk * sizeof(struct ll_choice));
        memset(inner->seen, 0, (size_t)ll->n_local * sizeof(*inner->seen));
        if (!inner->masked[source])
            EP_TRY(read_slots(ll, dispatch, source));
        for (int expert = 0; expert < ll->n_local; expert++)
            ranges[expert * nranks + source].count = inner->seen[expert];
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

/* Writes the scales of row `row` of an expert, in tiles or with the strides of the caller. */
static void place_scales(const ep_ll *ll, const ep_ll_dispatch_args *args, int expert, int32_t row, const void *scales)
{
    int64_t words = ep_ll_scale_words(ll, args), block = args->recv_scale_stride_block, at;
    uint32_t *out = (uint32_t *)args->recv_scales + expert * ep_ll_scale_rows(ll, args) * words;

    if (args->flags & EP_LL_SWIZZLED_SCALES) {
        at = row / 128 * words * 128 + row % 32 * 4 + row % 128 / 32;
        block = 128;
    } else if (args->recv_scale_stride_token) {
        at = row * args->recv_scale_stride_token;
    } else {
        memcpy(out + row * words, scales, (size_t)words * 4);
        return;
    }
    for (int64_t word = 0; word < words; word++)
        out[at + word * block] = ((const uint32_t *)scales)[word];
}

/* Copies the row of a slot to each of its experts here. */
static void pack_slot(const ep_ll *ll, const struct ll_dispatch *dispatch, int source, int t)
{
    const struct host_ll *inner = ll->impl;
    const ep_ll_dispatch_args *args = &dispatch->args;
    const struct ll_choice *choices = ll_choices_of(ll, dispatch->number, source, t);
    const struct ll_range *ranges = inner->ranges[dispatch->number & 1] + source;
    const struct ll_view from = ll_from(ll, source);
    const unsigned char *slot = from.segment + ll_wire_slot_at(from.layout, from.source, t);
    size_t rows = (size_t)ll->comm->nranks * (size_t)args->max_tokens;

    for (int k = 0; k < ll->config.topk; k++) {
        int32_t expert = choices[k].expert, row;
        size_t at;

        if (expert < 0)
            continue;
        row = ranges[expert * ll->comm->nranks].begin + choices[k].index;
        at = (size_t)expert * rows + (size_t)row;
        memcpy((char *)args->recv_x + at * out_row_bytes(ll, args), slot + inner->row_at, out_row_bytes(ll, args));
        if (args->out_dtype != EP_BF16)
            place_scales(ll, args, expert, row, slot + scales_at(ll, args));
        if (args->recv_source)
            args->recv_source[at] = t;
    }
}

/* Writes the metadata of the rows. */
static void write_counts(const ep_ll *ll, const ep_ll_dispatch_args *args, const struct ll_range *ranges)
{
    int nranks = ll->comm->nranks;

    for (int expert = 0; expert < ll->n_local; expert++) {
        const struct ll_range *last = &ranges[expert * nranks + nranks - 1];

        args->recv_count[expert] = last->begin + last->count;
        if (args->recv_stats_add)
            args->recv_stats_add[expert] += last->begin + last->count;
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

    EP_TRY(ll_wait(
        ll, &(struct ll_wait){LL_WORD(rows_ready), dispatch->serial, EP_GROUP_LL_RECV, .add = args->wait_cost_add}));
    EP_TRY(make_ranges(ll, dispatch, ranges));
    memcpy(ll_ranges_of(ll, me, dispatch->number), ranges, (size_t)ll->n_local * (size_t)nranks * sizeof(*ranges));
    for (int source = 0; source < nranks; source++)
        for (int t = 0; t < args->max_tokens; t++)
            pack_slot(ll, dispatch, source, t);
    write_counts(ll, args, ranges);
    ll_publish_completed(ll, dispatch->serial);
    return EP_OK;
}

static ep_status start_dispatch(ep_ll *ll, const struct ll_dispatch *wanted)
{
    struct host_ll *inner = ll->impl;
    uint64_t number = wanted->number;
    struct ll_dispatch *dispatch = &inner->dispatch[number & 1];
    const ep_ll_dispatch_args *args = &dispatch->args;
    int32_t *checked = inner->next_index;
    /* The slots that this rank is going to write must have been read. */
    const struct ll_wait unused = {LL_WORD(completed), inner->dispatch[(number + 1) & 1].serial, EP_GROUP_LL_SEND,
                                   .ranks = LL_ALL};

    /* Routing that is refused here changes nothing: the dispatch before the last one can still be combined. */
    EP_TRY(ll_load_index(ll, wanted->args.topk_idx, wanted->args.idx_type, wanted->args.n_tokens, wanted->args.topk,
                         wanted->args.max_tokens, checked));
    inner->next_index = inner->index[number & 1];
    inner->index[number & 1] = checked;
    *dispatch = *wanted;
    dispatch->serial = ++inner->serial;
    EP_TRY(ll_wait(ll, &unused));
    memset(inner->seen, 0, (size_t)ll->config.n_experts * sizeof(*inner->seen));
    begin_slots(ll, dispatch);
    for (int t = 0; t < args->n_tokens; t++)
        send_token(ll, dispatch, t);
    /* A masked rank learns from it that it gets no rows. */
    ll_publish(ll, LL_WORD(rows_ready), dispatch->serial);
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
            if (ep_comm_has(ll->comm, rank) && (control->rank < 0 || control->rank == rank))
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
        ll_publish(ll, LL_WORD(barriers), ++inner->barriers);
        return ll_wait(ll, &(struct ll_wait){LL_WORD(barriers), inner->barriers, EP_GROUP_LL_BARRIER, .ranks = LL_ALL});
    }
    return EP_OK;
}

static ep_status finish(ep_ll *ll, bool dispatch, uint64_t number)
{
    struct host_ll *inner = ll->impl;

    EP_TRY(dispatch ? receive(ll, &inner->dispatch[number & 1]) : ll_pull(ll, &inner->combine[number & 1]));
    inner->open.number = 0;
    return EP_OK;
}

/* The first half of a call. */
static ep_status start(ep_ll *ll, const struct ll_job *job)
{
    struct host_ll *inner = ll->impl;
    bool dispatch = job->step == LL_DISPATCH;
    uint32_t flags = dispatch ? job->dispatch.args.flags : job->combine.args.flags;

    if (inner->open.number)
        EP_TRY(finish(ll, inner->open.dispatch, inner->open.number));
    EP_TRY(dispatch ? start_dispatch(ll, &job->dispatch) : ll_start_combine(ll, &job->combine));
    if (flags & EP_LL_RECV_HOOK)
        inner->open = (struct ll_open){dispatch, dispatch ? job->dispatch.number : job->combine.number};
    return EP_OK;
}

static ep_status run_step(const struct ll_job *job)
{
    const struct host_ll *inner = job->ll->impl;
    bool dispatch = job->step == LL_RECEIVE;

    switch (job->step) {
    case LL_DISPATCH:
    case LL_COMBINE:
        return start(job->ll, job);
    case LL_RECEIVE:
    case LL_PULL:
        /* A later call may have finished it. */
        if (inner->open.dispatch != dispatch || inner->open.number != job->number)
            return EP_OK;
        return finish(job->ll, dispatch, job->number);
    case LL_CONTROL:
        return run_control(job->ll, &job->control);
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
    /* Peers may be reading the last combine but one from it. */
    status = ll_wait(ll, &(struct ll_wait){LL_WORD(completed), inner->combine[number & 1].serial,
                                           EP_GROUP_LL_COMBINE_BUFFER, .ranks = LL_THIS_NODE});
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
