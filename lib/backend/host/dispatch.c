/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dispatch within a node: each rank stores its rows directly into their final rows in the outputs of the ranks of its
 * node. A source row is loaded once for all its destinations.
 */
#include "backend/host/host.h"

#include "core/quantize.h"
#include "group/failure.h"
#include "group/plan.h"
#include "group/queue.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Tokens placed between two checks for a failure of the group. */
#define BATCH 64
/* The one code of ue8m0 that is not a power of two. */
#define UE8M0_NAN 0xff
#define E4M3_NAN 0x7f /* without the sign */

/* --- rows with their metadata, of own tokens and of those of rail peers --- */

/* Writes the experts of a token in the numbering of the rank that owns [first, first + n), and their weights. */
static void place_choice(const struct host_move *move, const int32_t *index, const float *weights, int local,
                         int64_t row)
{
    int topk = move->plan->args.topk, n = move->plan->info.n_local_experts;
    int first = (move->group->first + local) * n;
    size_t at = (size_t)row * (size_t)topk;
    unsigned char *out_index = move->out[local][EP_GROUP_AT_INDEX];
    float *out_weights = (float *)(void *)move->out[local][EP_GROUP_AT_WEIGHTS];

    for (int k = 0; k < topk; k++) {
        bool mine = index[k] >= first && index[k] < first + n;

        if (out_index && move->plan->args.idx_type == EP_I64)
            ((int64_t *)(void *)out_index)[at + (size_t)k] = mine ? index[k] - first : -1;
        else if (out_index)
            ((int32_t *)(void *)out_index)[at + (size_t)k] = mine ? index[k] - first : -1;
        if (out_weights && weights)
            out_weights[at + (size_t)k] = mine ? weights[k] : 0.0f;
    }
}

int host_place(const struct host_move *move, const struct ep_group_route *route, int t, const void *row,
               const void *scales, const float *weights)
{
    const struct ep_group_entry *entry = route->entry + route->start[t];
    const int32_t *index = route->index + (size_t)t * (size_t)move->plan->args.topk;
    int n = route->start[t + 1] - route->start[t];
    void *dst[EP_MAX_TOPK];

    if (n <= 0)
        return 0;
    for (int i = 0; i < n; i++)
        dst[i] = move->out[entry[i].local][EP_GROUP_AT_X] + (size_t)entry[i].row * move->row_bytes;
    move->copy(dst, n, row, move->row_bytes);
    for (int i = 0; i < n; i++) {
        unsigned char **out = move->out[entry[i].local];

        if (scales && move->scale_bytes)
            memcpy(out[EP_GROUP_AT_SCALES] + (size_t)entry[i].row * move->scale_bytes, scales, move->scale_bytes);
        if (!(move->plan->args.flags & EP_PLAN_EXPANDED))
            place_choice(move, index, weights, entry[i].local, entry[i].row);
        else if (out[EP_GROUP_AT_WEIGHTS])
            ((float *)(void *)out[EP_GROUP_AT_WEIGHTS])[entry[i].row] = weights[entry[i].k];
    }
    return n;
}

void host_place_own(const struct host_move *move, int begin, int end)
{
    const struct ep_group_route *route = &((struct ep_group_plan *)move->plan->impl)->own;
    const float *weights = move->args->topk_weights;
    size_t topk = (size_t)move->plan->args.topk;

    for (int t = begin; t < end; t++) {
        const unsigned char *row = (const unsigned char *)move->args->x + (size_t)t * move->row_bytes;
        const unsigned char *scales = move->scale_bytes ? move->scales + (size_t)t * move->scale_bytes : NULL;

        host_place(move, route, t, row, scales, weights ? weights + (size_t)t * topk : NULL);
    }
}

static ep_status place_node(const struct host_move *move)
{
    int n = ep_group_plan_of(move->plan)->n_tokens;

    for (int t = 0; t < n; t += BATCH) {
        EP_TRY(ep_group_check(move->group));
        host_place_own(move, t, t + BATCH < n ? t + BATCH : n);
    }
    return EP_OK;
}

/* --- one dispatch ----------------------------------------------------------------------------------------------- */

struct dispatch_job {
    ep_plan *plan;
    ep_dispatch_args args;
};

/* One of the outputs: the buffer of the caller, and the buffer that the peers write. */
struct output {
    void *wanted;
    size_t bytes; /* of one row */
    void *placed;
    int64_t by_row, by_word; /* strides in the buffer of the caller, in elements of 4 bytes; 0: contiguous */
};

struct dispatch {
    struct ep_group *group;
    ep_plan *plan;
    ep_dispatch_args *args;
    struct output output[EP_GROUP_AT_COUNT];
    struct host_move move;
    unsigned char *made; /* gathered scales, or quantised rows with their scales */
    ep_stats stats;
};

static void describe_outputs(struct dispatch *d)
{
    const ep_dispatch_args *args = d->args;
    size_t topk = (size_t)d->plan->args.topk;
    bool expanded = d->plan->args.flags & EP_PLAN_EXPANDED;

    d->move.row_bytes = (size_t)ep_row_bytes(args->dtype, args->hidden);
    d->move.scale_bytes = 4 * (size_t)ep_scale_words(args);
    d->output[EP_GROUP_AT_X] = (struct output){.wanted = args->recv_x, .bytes = d->move.row_bytes};
    d->output[EP_GROUP_AT_SCALES] = (struct output){.wanted = args->recv_scales,
                                                    .bytes = d->move.scale_bytes,
                                                    .by_row = args->recv_scale_stride_token,
                                                    .by_word = args->recv_scale_stride_block};
    d->output[EP_GROUP_AT_INDEX] = (struct output){.wanted = args->recv_topk_idx,
                                                   .bytes = topk * ep_dtype_bytes((ep_dtype)d->plan->args.idx_type)};
    d->output[EP_GROUP_AT_WEIGHTS] =
        (struct output){.wanted = args->recv_topk_weights, .bytes = (expanded ? 1 : topk) * sizeof(float)};
}

/* Where peers write the outputs. They place whole rows. */
static ep_status publish_outputs(struct dispatch *d, struct ep_group_descriptor *descriptor)
{
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++) {
        struct output *output = &d->output[i];

        output->placed = output->wanted;
        EP_TRY(host_publish(d->group, "ep_dispatch", i, !output->by_row, (size_t)d->plan->full.n_recv * output->bytes,
                            &output->placed, &descriptor->at[i]));
    }
    return EP_OK;
}

static bool has_nan_scale(int type, const unsigned char *scales, size_t bytes)
{
    bool found = false;

    if (type == EP_F32)
        return host_has_nan((const float *)(const void *)scales, bytes / 4);
    if (type == EP_UE8M0 || type == EP_UE8M0_32)
        return memchr(scales, UE8M0_NAN, bytes);
    for (size_t i = 0; type == EP_F8E4M3 && i < bytes; i++)
        found |= (scales[i] & E4M3_NAN) == E4M3_NAN;
    return found;
}

static ep_status check_values(const struct dispatch *d)
{
    size_t n = (size_t)ep_group_plan_of(d->plan)->n_tokens, topk = (size_t)d->plan->args.topk;

    if (!(d->group->comm->config.flags & EP_COMM_CHECK_VALUES))
        return EP_OK;
    if (d->args->topk_weights && host_has_nan(d->args->topk_weights, n * topk))
        return ep_fail(EP_E_VALUE, "ep_dispatch: NaN in topk_weights of rank %d", d->group->comm->rank);
    if (n && has_nan_scale(d->args->scale_type, d->move.scales, n * d->move.scale_bytes))
        return ep_fail(EP_E_VALUE, "ep_dispatch: NaN in %s scales of rank %d",
                       ep_dtype_name((ep_dtype)d->args->scale_type), d->group->comm->rank);
    return EP_OK;
}

/* EP_DISPATCH_QUANTIZE: makes the rows and scales that are sent. */
static ep_status quantize_rows(struct dispatch *d)
{
    ep_dispatch_args *args = d->args;
    const ep_ll_dispatch_args format = {
        .out_dtype = args->dtype, .scale_type = args->scale_type, .global_scale = args->global_scale};
    size_t n = (size_t)ep_group_plan_of(d->plan)->n_tokens, hidden = (size_t)args->hidden;
    size_t rows = n * d->move.row_bytes;

    if (!(args->flags & EP_DISPATCH_QUANTIZE))
        return EP_OK;
    d->made = malloc(rows + n * d->move.scale_bytes + 1);
    if (!d->made)
        return ep_fail(EP_E_MEMORY, "ep_dispatch: no memory to quantise %zu tokens", n);
    for (size_t t = 0; t < n; t++)
        ep_quantize((const uint16_t *)args->x + t * hidden, args->hidden, &format, d->made + t * d->move.row_bytes,
                    d->made + rows + t * d->move.scale_bytes);
    args->x = d->made;
    args->scales = d->made + rows;
    return EP_OK;
}

/* Scales may have any strides; rows of them are sent contiguous. They are a few percent of the data. */
static ep_status gather_scales(struct dispatch *d)
{
    const ep_dispatch_args *args = d->args;
    size_t words = d->move.scale_bytes / 4, n = (size_t)ep_group_plan_of(d->plan)->n_tokens;
    int64_t by_token = args->scale_stride_token, by_block = args->scale_stride_block;
    const uint32_t *from = args->scales;
    uint32_t *to;

    d->move.scales = args->scales;
    if (!words || (by_token == 0 && by_block == 0) || (by_token == (int64_t)words && by_block == 1))
        return EP_OK;
    to = calloc(n + 1, d->move.scale_bytes);
    if (!to)
        return ep_fail(EP_E_MEMORY, "ep_dispatch: no memory to gather the scales of %zu tokens", n);
    for (size_t t = 0; t < n; t++)
        for (size_t b = 0; b < words; b++)
            to[t * words + b] = from[(int64_t)t * by_token + (int64_t)b * by_block];
    d->made = (unsigned char *)to;
    d->move.scales = d->made;
    return EP_OK;
}

/* Writes rows with strides from contiguous ones; NULL: zeros. */
static void write_strided(const struct output *output, int64_t begin, int64_t end, const uint32_t *from)
{
    int64_t words = (int64_t)output->bytes / 4;
    uint32_t *to = output->wanted;

    for (int64_t row = begin; row < end; row++)
        for (int64_t word = 0; word < words; word++)
            to[row * output->by_row + word * output->by_word] = from ? from[row * words + word] : 0;
}

static void copy_range(const struct output *output, int64_t begin, int64_t end)
{
    size_t at = (size_t)begin * output->bytes;

    if (!output->wanted || output->placed == output->wanted || end <= begin)
        return;
    if (output->by_row)
        write_strided(output, begin, end, output->placed);
    else
        memcpy((char *)output->wanted + at, (char *)output->placed + at, (size_t)(end - begin) * output->bytes);
}

static void zero_range(const struct output *output, int64_t begin, int64_t end)
{
    if (output->wanted && end > begin && output->by_row)
        write_strided(output, begin, end, NULL);
    else if (output->wanted && end > begin)
        memset((char *)output->wanted + (size_t)begin * output->bytes, 0, (size_t)(end - begin) * output->bytes);
}

/* Copies out of staging, zeroes padding, and marks the rows after the last one. */
static void finish_outputs(struct dispatch *d)
{
    const ep_plan *plan = d->plan;
    const struct ep_group_plan *inner = plan->impl;
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED, zero = plan->args.flags & EP_PLAN_ZERO_PADDING;
    int64_t begin = plan->full.n_recv, capacity = plan->args.max_recv_tokens;
    int64_t end = capacity < d->args->out_rows ? capacity : d->args->out_rows;

    for (int i = 0; i < EP_GROUP_AT_COUNT; i++) {
        if (!expanded)
            copy_range(&d->output[i], 0, plan->full.n_recv);
        for (int local = 0; expanded && local < plan->info.n_local_experts; local++) {
            int64_t start = inner->expert_start[local], last = start + inner->recv_exact[local];

            copy_range(&d->output[i], start, last);
            if (zero)
                zero_range(&d->output[i], last, inner->expert_start[local + 1]);
        }
    }
    zero_range(&d->output[EP_GROUP_AT_WEIGHTS], begin, end);
    if (d->output[EP_GROUP_AT_INDEX].wanted && end > begin)
        memset((char *)d->args->recv_topk_idx + (size_t)begin * d->output[EP_GROUP_AT_INDEX].bytes, 0xff,
               (size_t)(end - begin) * d->output[EP_GROUP_AT_INDEX].bytes);
}

static ep_status move_rows(struct dispatch *d)
{
    struct ep_group *group = d->group;
    size_t total = (size_t)ep_group_plan_of(d->plan)->n_send * d->move.row_bytes * (size_t)group->nlocal;

    d->move.copy = total > EP_ROWS_STREAM_BYTES ? ep_rows_copy_stream : ep_rows_copy;
    return group->comm->nnodes > 1 ? host_internode_dispatch(&d->move) : place_node(&d->move);
}

static ep_status dispatch_body(struct dispatch *d)
{
    struct ep_group_descriptor descriptor = {.phase = EP_GROUP_DISPATCH_READY,
                                             .plan_number = ep_group_plan_of(d->plan)->number,
                                             .dtype = d->args->dtype,
                                             .hidden = d->args->hidden,
                                             .scale_type = d->args->scale_type,
                                             .scale_words = d->args->scale_words,
                                             .outputs = (int32_t)d->move.outputs};
    size_t row_bytes[EP_GROUP_AT_COUNT];
    uint64_t begin = ep_now_ns(), at;
    ep_status status;

    EP_TRY(ep_group_plan_complete(d->group, d->plan));
    describe_outputs(d);
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++)
        row_bytes[i] = d->output[i].wanted ? d->output[i].bytes : 0;
    EP_TRY(quantize_rows(d));
    EP_TRY(gather_scales(d));
    EP_TRY(check_values(d));
    descriptor.rows = d->plan->full.n_recv;
    EP_TRY(publish_outputs(d, &descriptor));
    EP_TRY(host_op_begin(d->group, d->plan, &descriptor));
    EP_TRY(host_op_map(d->group, EP_GROUP_DISPATCH_READY, row_bytes, d->move.out));
    at = ep_now_ns();
    d->stats.ns_wait_ready = at - begin;
    status = move_rows(d);
    if (status != EP_OK)
        return ep_group_set_own_failure(d->group, status, d->group->comm->rank, EP_GROUP_DISPATCH_MOVE);
    d->stats.ns_move = ep_now_ns() - at;
    at = ep_now_ns();
    EP_TRY(host_op_end(d->group, EP_GROUP_DISPATCH_DONE));
    d->stats.ns_wait_done = ep_now_ns() - at;
    at = ep_now_ns();
    finish_outputs(d);
    d->stats.ns_copy = ep_now_ns() - at;
    d->stats.ns_total = ep_now_ns() - begin;
    host_op_set_stats(d->plan, d->move.row_bytes + d->move.scale_bytes, &d->stats);
    return EP_OK;
}

static ep_status run_dispatch(void *arguments)
{
    struct dispatch_job *job = arguments;
    struct ep_group *group = ep_group_of(job->plan->comm);
    ep_dispatch_args *args = &job->args;
    struct dispatch d = {.group = group, .plan = job->plan, .args = args, .stats = {.size = sizeof(ep_stats)}};
    ep_status status;

    d.move = (struct host_move){.group = group,
                                .plan = job->plan,
                                .args = args,
                                .outputs = (args->recv_topk_idx ? EP_GROUP_RECV_INDEX : 0u) |
                                           (args->recv_topk_weights ? EP_GROUP_RECV_WEIGHTS : 0u),
                                .stats = &d.stats};
    d.move.out = calloc((size_t)group->nlocal, sizeof(*d.move.out));
    if (!d.move.out)
        return ep_fail(EP_E_MEMORY, "ep_dispatch: no memory for %d ranks", group->nlocal);
    status = dispatch_body(&d);
    free(d.made);
    free(d.move.out);
    return ep_group_plan_is_refused(job->plan) ? status
                                               : ep_group_fail_queued(group, status, EP_GROUP_DISPATCH_READY, false);
}

ep_status host_dispatch_internal(ep_plan *plan, const ep_dispatch_args *args)
{
    struct dispatch_job job = {.plan = plan, .args = *args};
    ep_stats stats = plan->comm->stats;
    ep_status status = run_dispatch(&job);

    ep_comm_set_stats(plan->comm, &stats);
    return status;
}

ep_status host_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream)
{
    struct dispatch_job job = {.plan = plan, .args = *args};

    return ep_group_submit(ep_group_of(plan->comm), stream, run_dispatch, &job, sizeof(job));
}
