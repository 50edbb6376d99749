/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/cuda.h"

#include <stdlib.h>

/*
 * Measured on H200 (bench/NOTES.md): adding takes most of a multiprocessor, and more warps with two stages do it faster
 * than fewer with three. Larger slots are slower, too.
 */
#define WARPS 24
#define STAGES 2
#define MOST_SLOT 4096u
#define LEAST_WARPS 4
#define LEAST_PIECE 512u /* bytes */
#define LEAST_PART 1024u /* bytes */
#define PARTS 4          /* of a token at the end */
#define ENDING 4         /* units of that kind for each warp: more than it takes ahead */
#define LINE 128

struct combine {
    struct cuda_comm *cuda;
    ep_plan *plan;
    const ep_combine_args *args;
    size_t row_bytes, weight_bytes; /* of one row */
    bool copies;                    /* the kernel copies into staging */
    struct cuda_copy copy[HOST_AT_COUNT];
    struct cuda_pending *pending;
};

/*
 * Publishes one input: in place if it is symmetric memory, else a copy in staging, which the kernel makes if that of
 * the rows is worth it.
 */
static ep_status publish_input(struct combine *c, int which, const void *input, size_t row_bytes,
                               struct host_where *ret_where)
{
    size_t bytes = (size_t)c->plan->full.n_recv * row_bytes;
    void *staged;

    ret_where->slot = HOST_NOWHERE;
    if (!input || !bytes || cuda_find(c->cuda, input, bytes, ret_where))
        return EP_OK;
    EP_TRY(cuda_stage(c->cuda, which, bytes, &staged));
    if (which == HOST_AT_X)
        c->copies = cuda_copies_along(c->cuda, c->plan, row_bytes);
    if (c->copies)
        c->copy[which] = (struct cuda_copy){.from = input, .to = staged, .row_bytes = (int64_t)row_bytes};
    else
        CUDA_TRY(cudaMemcpyAsync(staged, input, bytes, cudaMemcpyDeviceToDevice, c->cuda->stream));
    if (!cuda_find(c->cuda, staged, bytes, ret_where))
        return ep_fail(EP_E_STATE, "combine: staging buffer of %zu bytes is not where it was", bytes);
    return EP_OK;
}

static ep_status map_inputs(struct combine *c, struct cuda_combine *sum)
{
    struct host_comm *host = &c->cuda->host;

    for (int rank = 0; rank < host->comm->nranks; rank++) {
        const struct host_record *record = &host->records[rank];
        size_t rows = (size_t)record->rows;
        void *x, *weights = NULL;
        ep_status status = cuda_map(c->cuda, rank, &record->at[HOST_AT_X], rows * c->row_bytes, &x);

        if (status == EP_OK && c->args->out_topk_weights)
            status = cuda_map(c->cuda, rank, &record->at[HOST_AT_WEIGHTS], rows * c->weight_bytes, &weights);
        if (status != EP_OK)
            return host_raise_own(host, status, rank, HOST_COMBINE_READY);
        /* Own rows need no detour. */
        if (rank == host->comm->rank && c->copies) {
            sum->x[rank] = c->args->x;
            sum->weights[rank] = c->args->topk_weights;
            continue;
        }
        sum->x[rank] = x;
        sum->weights[rank] = weights;
    }
    return EP_OK;
}

/* Slots that fill the shared memory; `width`: the most rows that a token has. */
static struct cuda_shape fit(const struct cuda_comm *cuda, uint32_t row_bytes, uint32_t width, int32_t *ret_slot_bytes)
{
    uint32_t room = (uint32_t)cuda->shared_limit - CUDA_BARRIERS_MOST;
    uint32_t piece = row_bytes < LEAST_PIECE ? row_bytes : LEAST_PIECE, slot;
    struct cuda_shape shape = {.blocks = cuda->sms, .warps = WARPS, .stages = STAGES};

    while (shape.warps > LEAST_WARPS && room / (uint32_t)(shape.warps * shape.stages) < width * piece)
        shape.warps--;
    slot = room / (uint32_t)(shape.warps * shape.stages) / 16 * 16;
    if (slot > width * row_bytes)
        slot = width * row_bytes;
    if (slot > MOST_SLOT && width * piece <= MOST_SLOT)
        slot = MOST_SLOT;
    *ret_slot_bytes = (int32_t)slot;
    shape.shared_bytes = cuda_shared_bytes(&shape, slot);
    return shape;
}

static uint32_t divide_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/*
 * Tokens, the last of them in parts. A warp takes its units ahead, so there are enough parts for all that it has taken
 * when the tokens are at their end; and in a small batch enough for every warp.
 */
static void divide(struct cuda_combine *sum, const struct cuda_shape *shape)
{
    uint32_t row = (uint32_t)sum->row_bytes, n = (uint32_t)sum->route.n_tokens;
    uint32_t wanted = (uint32_t)(shape->blocks * shape->warps) * ENDING, parts = PARTS, tail;

    if (n && parts < divide_up(wanted, n))
        parts = divide_up(wanted, n);
    if (parts > divide_up(row, LEAST_PART))
        parts = divide_up(row, LEAST_PART);
    sum->part_bytes = (int32_t)(divide_up(divide_up(row, parts), LINE) * LINE);
    sum->parts = (int32_t)divide_up(row, (uint32_t)sum->part_bytes);
    tail = divide_up(wanted, (uint32_t)sum->parts);
    sum->whole = (int32_t)(tail < n ? n - tail : 0);
    sum->units = (uint32_t)sum->whole + (n - (uint32_t)sum->whole) * (uint32_t)sum->parts;
}

static ep_status launch(struct combine *c, const struct cuda_route *route)
{
    const ep_combine_args *args = c->args;
    struct cuda_comm *cuda = c->cuda;
    struct cuda_combine *sum = &cuda->last_combine;
    struct cuda_shape *shape = &cuda->last_shape[1];

    *sum = (struct cuda_combine){.route = *route,
                                 .bias = {args->bias[0], args->bias[1]},
                                 .out = args->out,
                                 .out_weights = args->out_topk_weights,
                                 .row_bytes = (int64_t)c->row_bytes};
    cuda_fill_waits(cuda, HOST_COMBINE_READY, HOST_COMBINE_DONE, &sum->waits);
    EP_TRY(map_inputs(c, sum));
    *shape = fit(cuda, (uint32_t)c->row_bytes, (uint32_t)route->width, &sum->slot_bytes);
    divide(sum, shape);
    cuda_fill_stage(cuda, c->plan, c->copies, &sum->stage);
    if (c->copies) {
        cuda_fit_copiers(cuda, (size_t)sum->slot_bytes, &sum->stage, shape);
        sum->stage.x = c->copy[HOST_AT_X];
        sum->stage.beside[0] = c->copy[HOST_AT_WEIGHTS];
        sum->stage.parts = cuda_parts_ahead(&sum->stage, shape);
    }
    return cuda_status(cuda_launch_combine(sum, shape, cuda->stream), "combine kernel");
}

static ep_status check_pointers(const struct combine *c)
{
    static const char call[] = "ep_combine";
    const ep_combine_args *args = c->args;

    if (c->plan->full.n_recv) {
        EP_TRY(cuda_check_pointer(c->cuda, call, "x", args->x));
        EP_TRY(cuda_check_pointer(c->cuda, call, "topk_weights", args->topk_weights));
    }
    if (!c->plan->args.n_tokens)
        return EP_OK;
    EP_TRY(cuda_check_pointer(c->cuda, call, "bias[0]", args->bias[0]));
    EP_TRY(cuda_check_pointer(c->cuda, call, "bias[1]", args->bias[1]));
    EP_TRY(cuda_check_pointer(c->cuda, call, "out", args->out));
    return cuda_check_pointer(c->cuda, call, "out_topk_weights", args->out_topk_weights);
}

static ep_status combine_body(struct combine *c)
{
    const ep_combine_args *args = c->args;
    struct host_record record = {.phase = HOST_COMBINE_READY, .dtype = args->dtype, .hidden = args->hidden};
    struct host_comm *host = &c->cuda->host;
    const struct cuda_route *route;

    EP_TRY(cuda_plan_ready(c->cuda, c->plan, &route));
    EP_TRY(check_pointers(c));
    c->weight_bytes = (route->expanded ? 1 : (size_t)c->plan->args.topk) * sizeof(float);
    c->row_bytes = (size_t)args->hidden * sizeof(uint16_t);
    cuda_sweep(c->cuda);
    record.plan_number = ((struct host_plan *)c->plan->impl)->number;
    record.outputs = args->out_topk_weights ? 1 : 0;
    for (int i = 0; i < HOST_AT_COUNT; i++)
        record.at[i].slot = HOST_NOWHERE;
    EP_TRY(publish_input(c, HOST_AT_X, args->x, c->row_bytes, &record.at[HOST_AT_X]));
    EP_TRY(publish_input(c, HOST_AT_WEIGHTS, args->topk_weights, c->weight_bytes, &record.at[HOST_AT_WEIGHTS]));
    record.copies = c->copies;
    record.rows = c->plan->full.n_recv;
    EP_TRY(host_enter(host, c->plan, &record));
    c->pending->phase = HOST_COMBINE_DONE;
    c->pending->operation = host->operation;
    c->pending->stats.ns_wait_ready = ep_now_ns() - c->pending->begin_ns;
    EP_TRY(launch(c, route));
    cuda_plan_count(c->plan, c->row_bytes, &c->pending->stats);
    return cuda_queued(c->pending, false);
}

static ep_status start_combine(ep_plan *plan, const void *args, struct cuda_pending *ret_pending)
{
    struct combine c = {.cuda = cuda_of(plan->comm), .plan = plan, .args = args, .pending = ret_pending};

    return combine_body(&c);
}

ep_status cuda_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream)
{
    if (args->flags)
        return ep_fail(EP_E_UNSUPPORTED, "ep_combine: the CUDA backend has no EP_COMBINE_BY_CHOICE");
    EP_TRY(cuda_use_stream(cuda_of(plan->comm), stream));
    return cuda_submit(plan, start_combine, args);
}
