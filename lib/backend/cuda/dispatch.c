/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/plan.h"

#include <string.h>

/* Stages are reduced before warps: more warps hide the stores of a row's metadata (docs/decisions.md). */
static const struct cuda_shape max_shape = {.warps = 8, .stages = 3};
/*
 * With fewer bytes of other ranks' rows the copy is made in stream order. An estimate: the launch of such a copy takes
 * about 3 us, as do a word between ranks and the passage of the last piece through shared memory.
 */
#define OVERLAP_BYTES ((size_t)128 << 10)
#define FILL_SMS 16     /* which only fill the metadata of a few rows */
#define MAX_CHUNK 14336 /* bytes: a row of 7168 bf16; 8 warps have two stages of it each in 227 KiB */

/* One of the outputs: where the caller wants it, and where the peers write it. */
struct output {
    void *wanted;
    size_t bytes; /* of one row */
    void *placed;
};

struct dispatch {
    struct cuda_call call;
    ep_plan *plan;
    const ep_dispatch_args *args;
    ep_dispatch_args quantized; /* EP_DISPATCH_QUANTIZE: `args` with the rows and scales that are sent */
    struct output output[EP_GROUP_AT_COUNT];
    size_t staged[EP_GROUP_AT_COUNT]; /* bytes of a row; 0: not in staging */
    bool copies;                      /* the kernel copies out of staging */
    bool scattered;                   /* scales have strides: they go through staging in any case */
};

static void describe_outputs(struct dispatch *d)
{
    const ep_dispatch_args *args = d->args;
    size_t topk = (size_t)d->plan->args.topk;
    bool expanded = d->plan->args.flags & EP_PLAN_EXPANDED;

    d->scattered = args->recv_scale_stride_token || args->recv_scale_stride_block;
    d->output[EP_GROUP_AT_X] =
        (struct output){.wanted = args->recv_x, .bytes = (size_t)ep_row_bytes(args->dtype, args->hidden)};
    d->output[EP_GROUP_AT_SCALES] =
        (struct output){.wanted = args->recv_scales, .bytes = 4 * (size_t)ep_scale_words(args)};
    d->output[EP_GROUP_AT_INDEX] = (struct output){.wanted = args->recv_topk_idx,
                                                   .bytes = topk * ep_dtype_bytes((ep_dtype)d->plan->args.idx_type)};
    d->output[EP_GROUP_AT_WEIGHTS] =
        (struct output){.wanted = args->recv_topk_weights, .bytes = (expanded ? 1 : topk) * sizeof(float)};
    d->output[EP_GROUP_AT_SOURCE] = (struct output){.wanted = args->recv_source, .bytes = sizeof(*args->recv_source)};
}

static bool is_scattered(const struct dispatch *d, int output)
{
    return d->scattered && output == EP_GROUP_AT_SCALES;
}

/* Describes where the peers write. Metadata is small: the kernel copies it only if it copies the rows, too. */
static ep_status place_outputs(struct dispatch *d, struct cuda_op_desc *desc)
{
    size_t rows = (size_t)cuda_plan_rows(d->plan), known = (size_t)cuda_plan_known_rows(d->plan);

    for (int i = 0; i < EP_GROUP_AT_COUNT; i++) {
        struct output *output = &d->output[i];
        size_t bytes =
            rows * output->bytes; /* the peers expect a capacity of staging also where this host knows more */
        bool direct;

        /* A rank that receives nothing has no outputs, but needs the size of the others' rows and scales. */
        if (!output->wanted && i >= EP_GROUP_AT_INDEX)
            continue;
        desc->row_bytes[i] = (int64_t)output->bytes;
        output->placed = output->wanted;
        if (bytes)
            EP_TRY(cuda_place_buffer(d->call.cuda, desc, i, is_scattered(d, i) ? NULL : output->wanted,
                                     known * output->bytes, bytes, &output->placed));
        direct = bytes && output->placed == output->wanted;
        d->staged[i] = direct ? 0 : output->bytes;
        if (i == EP_GROUP_AT_X && bytes && !direct)
            d->copies = cuda_overlaps_copies(d->call.cuda, d->plan, output->bytes, OVERLAP_BYTES);
    }
    /* Rows of this rank's own tokens bypass staging. */
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++)
        desc->own.at[i] = d->copies && !is_scattered(d, i) ? d->output[i].wanted : d->output[i].placed;
    desc->words[CUDA_DESC_COPIES] = d->copies;
    return EP_OK;
}

static ep_status fill_desc(struct dispatch *d, struct cuda_op_desc *desc)
{
    const ep_dispatch_args *args = d->args;

    desc->kind = CUDA_DISPATCH;
    desc->words[CUDA_DESC_PHASE] = EP_GROUP_DISPATCH_READY;
    desc->words[CUDA_DESC_PLAN] = cuda_plan_word(d->plan);
    desc->words[CUDA_DESC_DTYPE] = (uint32_t)args->dtype;
    desc->words[CUDA_DESC_HIDDEN] = (uint32_t)args->hidden;
    desc->words[CUDA_DESC_SCALE_TYPE] = (uint32_t)args->scale_type;
    desc->words[CUDA_DESC_SCALE_WORDS] = (uint32_t)args->scale_words;
    desc->words[CUDA_DESC_OUTPUTS] =
        (args->recv_topk_idx ? EP_GROUP_RECV_INDEX : 0) | (args->recv_topk_weights ? EP_GROUP_RECV_WEIGHTS : 0) |
        (args->recv_source ? EP_GROUP_RECV_SOURCE : 0) | (uint32_t)args->source_stride << EP_GROUP_OUTPUT_BITS;
    return place_outputs(d, desc);
}

/* Divides a row into chunks, and finds rings of them that fit the shared memory. */
static void fit(const struct cuda_comm *cuda, struct cuda_dispatch *move, struct cuda_shape *ret_shape)
{
    size_t room = cuda->shared_limit - CUDA_BARRIERS_MAX;
    size_t row_bytes = (size_t)move->row_bytes, chunks = (row_bytes + MAX_CHUNK - 1) / MAX_CHUNK, chunk;
    struct cuda_shape shape = max_shape;

    for (;;) {
        chunk = ((row_bytes + chunks - 1) / chunks + 15) / 16 * 16;
        shape.stages = max_shape.stages;
        /* More warps with two stages keep the links busier than fewer with three. */
        if ((size_t)(max_shape.warps * shape.stages) * chunk > room)
            shape.stages = 2;
        shape.warps = (int32_t)(room / ((size_t)shape.stages * chunk));
        if (shape.warps > max_shape.warps)
            shape.warps = max_shape.warps;
        if (shape.warps >= 4 || (shape.warps > 0 && chunk <= 512))
            break;
        chunks *= 2;
    }
    move->chunk_bytes = (int32_t)chunk;
    move->n_chunks = (int32_t)((row_bytes + chunk - 1) / chunk);
    shape.shared_bytes = cuda_shared_bytes(&shape, chunk);
    *ret_shape = shape;
}

static struct cuda_copy copy_of(const struct output *output)
{
    struct cuda_copy copy = {.from = output->placed, .to = output->wanted};

    copy.row_bytes = output->placed == output->wanted ? 0 : (int64_t)output->bytes;
    return copy;
}

/* Only the devices know where the rows of a plan of fixed capacity end: what follows them is filled there. */
static struct cuda_fill fill_of(const struct dispatch *d)
{
    int64_t capacity = d->plan->args.max_recv_tokens, out_rows = d->args->out_rows;

    if (!capacity)
        return (struct cuda_fill){0};
    return (struct cuda_fill){.index = d->output[EP_GROUP_AT_INDEX].wanted,
                              .weights = d->output[EP_GROUP_AT_WEIGHTS].wanted,
                              .source = d->output[EP_GROUP_AT_SOURCE].wanted,
                              .index_bytes = (int64_t)d->output[EP_GROUP_AT_INDEX].bytes,
                              .weight_bytes = (int64_t)d->output[EP_GROUP_AT_WEIGHTS].bytes,
                              /* The rows have room for those that the host knows, if it does. */
                              .capacity = capacity < out_rows ? capacity : out_rows};
}

static ep_status launch(struct dispatch *d, const struct cuda_route *route)
{
    const ep_dispatch_args *args = d->args;
    struct cuda_comm *cuda = d->call.cuda;
    struct cuda_dispatch *move = &cuda->last_dispatch;
    struct cuda_shape *shape = &cuda->last_shape[0];

    *move = (struct cuda_dispatch){.route = *route,
                                   .x = args->x,
                                   .scales = args->scales,
                                   .weights = args->topk_weights,
                                   .scale_stride_token = args->scale_stride_token,
                                   .scale_stride_block = args->scale_stride_block,
                                   .row_bytes = (int64_t)d->output[EP_GROUP_AT_X].bytes,
                                   .scale_words = (int32_t)(d->output[EP_GROUP_AT_SCALES].bytes / 4)};
    if (!move->scale_stride_token && !move->scale_stride_block) {
        move->scale_stride_token = move->scale_words;
        move->scale_stride_block = 1;
    }
    move->has_metadata = move->scale_words || args->recv_topk_idx || args->recv_topk_weights || args->recv_source;
    move->first_source = cuda->group.comm->rank * args->source_stride;
    cuda_fill_waits(cuda, EP_GROUP_DISPATCH_READY, EP_GROUP_DISPATCH_DONE, &move->waits);
    EP_TRY(fill_desc(d, &move->desc));
    EP_TRY(cuda_sync_stages(&d->call, d->plan, d->staged, EP_GROUP_DISPATCH_READY));
    if (cuda_crosses_nodes(cuda))
        return cuda_nodes_dispatch(&d->call, d->plan, move, args->recv_topk_weights ? d->plan->args.topk : 0);
    move->fill = fill_of(d);
    fit(cuda, move, shape);
    cuda_fill_stage(cuda, route->n_tokens, d->copies ? CUDA_WRITES_COPIES : CUDA_WRITES_NOTHING,
                    (size_t)move->chunk_bytes, &move->stage, shape);
    if (d->copies) {
        move->stage.x = copy_of(&d->output[EP_GROUP_AT_X]);
        for (int i = 0; i < CUDA_BUFFERS - 1; i++)
            if (!is_scattered(d, EP_GROUP_AT_SCALES + i))
                move->stage.metadata[i] = copy_of(&d->output[EP_GROUP_AT_SCALES + i]);
    }
    EP_TRY(cuda_status(cuda_launch_dispatch(move, shape, d->call.stream), "dispatch kernel"));
    d->call.queued = true;
    return EP_OK;
}

/*
 * Copies outputs out of staging, zeroes padding rows, and between nodes fills what follows the last row. One kernel for
 * any number of experts: a stream holds a limited number of launches, and the call must return before any of them runs.
 */
static ep_status finish_outputs(const struct dispatch *d)
{
    const struct cuda_plan *device = cuda_plan_of(d->plan);
    bool expanded = device->route.expanded, moves, fills = false;
    struct cuda_rows rows = {.counts = device->route.counts,
                             .expert_start = expanded ? device->expert_start : NULL,
                             .expert_exact = device->expert_exact,
                             .rank = d->call.cuda->group.local,
                             .n_local = d->plan->info.n_local_experts,
                             .zero = d->plan->args.flags & EP_PLAN_ZERO_PADDING ? 1 : 0};

    moves = rows.zero;
    if (cuda_crosses_nodes(d->call.cuda)) {
        rows.fill = fill_of(d);
        fills = rows.fill.index || rows.fill.weights || rows.fill.source;
    }
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++) {
        const struct output *output = &d->output[i];

        if (!output->wanted || !output->placed)
            continue;
        if (is_scattered(d, i)) {
            rows.scatter = (struct cuda_scatter){.from = output->placed,
                                                 .to = output->wanted,
                                                 .words = (int64_t)output->bytes / 4,
                                                 .stride_row = d->args->recv_scale_stride_token,
                                                 .stride_word = d->args->recv_scale_stride_block};
            moves = true;
            continue;
        }
        rows.copy[i] = (struct cuda_copy){.to = output->wanted, .row_bytes = (int64_t)output->bytes};
        if (!d->copies && output->placed != output->wanted)
            rows.copy[i].from = output->placed;
        moves |= rows.copy[i].from != NULL;
    }
    if (!moves && !fills)
        return EP_OK;
    return cuda_status(cuda_launch_rows(&rows, moves ? cuda_side_sms(d->call.cuda) : FILL_SMS, d->call.stream),
                       "rows kernel");
}

/*
 * EP_DISPATCH_QUANTIZE: makes the rows that are sent. A kernel of its own on all SMs, because the few that move rows
 * would take longer to quantise than to send them.
 */
static ep_status quantize(struct dispatch *d, int n_tokens)
{
    struct cuda_comm *cuda = d->call.cuda;
    const ep_dispatch_args *args = d->args;
    size_t row_bytes = d->output[EP_GROUP_AT_X].bytes, scale_bytes = d->output[EP_GROUP_AT_SCALES].bytes;
    size_t n = (size_t)n_tokens, bytes = n * (row_bytes + scale_bytes);
    bool capture = d->call.capture != 0;
    size_t least =
        cuda->quantized[capture].bytes * 3 / 2; /* those before it stay: queued kernels and graphs use them */
    struct cuda_quantize q = {.x = args->x,
                              .row_bytes = (int64_t)row_bytes,
                              .scale_bytes = (int64_t)scale_bytes,
                              .global_scale = args->global_scale,
                              .n_tokens = n_tokens,
                              .hidden = args->hidden,
                              .block = ep_scale_block(args->dtype, args->scale_type),
                              .packed = args->scale_type != EP_F32};

    if (!(args->flags & EP_DISPATCH_QUANTIZE) || !n_tokens)
        return EP_OK;
    if (bytes > cuda->quantized[capture].bytes) {
        bytes = bytes > least ? bytes : least;
        EP_TRY(cuda_keep_device(&cuda->memory, bytes, &cuda->quantized[capture].memory));
        cuda->quantized[capture].bytes = bytes;
    }
    q.rows = cuda->quantized[capture].memory;
    q.scales = q.rows + n * row_bytes;
    d->quantized = *args;
    d->quantized.x = q.rows;
    d->quantized.scales = q.scales;
    d->args = &d->quantized;
    cuda->copied |= !capture;
    return cuda_status(cuda_launch_quantize(&q, cuda_side_sms(cuda), d->call.stream), "quantisation kernel");
}

static ep_status check_pointers(const struct dispatch *d, int n_tokens)
{
    static const char call[] = "ep_dispatch";
    const ep_dispatch_args *args = d->args;
    bool sends = n_tokens, receives = cuda_plan_known_rows(d->plan);

    EP_TRY(cuda_check_pointer(d->call.cuda, call, "x", sends ? args->x : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "scales", sends ? args->scales : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "global_scale", sends ? args->global_scale : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "topk_weights", sends ? args->topk_weights : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "recv_x", receives ? args->recv_x : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "recv_scales", receives ? args->recv_scales : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "recv_topk_idx", receives ? args->recv_topk_idx : NULL));
    EP_TRY(cuda_check_pointer(d->call.cuda, call, "recv_source", receives ? args->recv_source : NULL));
    return cuda_check_pointer(d->call.cuda, call, "recv_topk_weights", receives ? args->recv_topk_weights : NULL);
}

static ep_status dispatch_body(struct dispatch *d)
{
    struct cuda_route route;

    EP_TRY(cuda_plan_ready(&d->call, d->plan, &route));
    EP_TRY(check_pointers(d, route.n_tokens));
    describe_outputs(d);
    EP_TRY(quantize(d, route.n_tokens));
    EP_TRY(launch(d, &route));
    EP_TRY(finish_outputs(d));
    cuda_plan_count(d->plan, d->output[EP_GROUP_AT_X].bytes + d->output[EP_GROUP_AT_SCALES].bytes, false);
    return EP_OK;
}

ep_status cuda_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream)
{
    struct dispatch d = {.plan = plan, .args = args};

    EP_TRY(cuda_call_begin(cuda_of(plan->comm), stream, true, &d.call));
    return cuda_call_end(&d.call, dispatch_body(&d));
}
