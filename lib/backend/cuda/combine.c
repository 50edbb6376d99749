/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/plan.h"

/*
 * Measured on H200 (docs/decisions.md): adding takes most of a multiprocessor, and more warps with two stages do it
 * faster than fewer with three. Larger slots are slower, too.
 */
#define WARPS 24
#define STAGES 2
#define MAX_SLOT 4096u
#define MIN_WARPS 4
#define MIN_PIECE 512u /* bytes */
#define MIN_PART 1024u /* bytes */
#define PARTS 4        /* of each of the last tokens */
#define END_TILES 4    /* parts for each warp at the end: more than it claims ahead */
#define LINE 128
#define ORDER_REDUCES 0x80000000u /* beside the flags of a combine: entries of its sums only */
#define PART_PIECES 2             /* of each warp in a part: a combine waits for the first part before it begins */

/*
 * Fewer bytes of other ranks' rows are copied by all SMs before the kernel: measured on two H200, copying beside the
 * rows costs a combine 15 to 20 us whatever its size; the copy of 15 MB takes 11, that of 29 MB 20 (docs/decisions.md).
 */
#define OVERLAP_BYTES ((size_t)24 << 20)

struct combine {
    struct cuda_call call;
    ep_plan *plan;
    const ep_combine_args *args;
    size_t row_bytes, weight_bytes; /* of one row */
    bool copies;                    /* the kernel writes into staging */
    bool reduces;                   /* each rank adds up its own rows into staging first; the kernel does so */
    bool rounds;                    /* a rank rounds sums that others read: all of them do, or none */
    struct cuda_copy copy[EP_GROUP_AT_COUNT];
    size_t staged[EP_GROUP_AT_COUNT]; /* bytes of a row; 0: not in staging */
};

/* Copies to staging in stream order, before the kernel, which reads this rank's own rows in place. */
static ep_status copy_before(const struct combine *c, const struct cuda_copy *copy)
{
    const struct cuda_route *route = &cuda_plan_of(c->plan)->route;
    struct cuda_rows rows = {.counts = route->counts,
                             .rank = c->call.cuda->group.local,
                             .skips_own = !route->expanded && !cuda_crosses_nodes(c->call.cuda),
                             .copy = {*copy}};

    return cuda_status(cuda_launch_rows(&rows, cuda_side_sms(c->call.cuda), c->call.stream), "rows kernel");
}

/* Describes where the peers read one input. A copy in staging is made by the kernel if it copies the rows. */
static ep_status place_input(struct combine *c, int which, const void *input, size_t row_bytes,
                             struct cuda_op_desc *desc)
{
    size_t bytes = (size_t)cuda_plan_rows(c->plan) * row_bytes;
    void *placed;

    desc->row_bytes[which] = (int64_t)row_bytes;
    desc->own.at[which] = (unsigned char *)(uintptr_t)input;
    c->staged[which] = row_bytes;
    if (!bytes)
        return EP_OK;
    if (c->reduces) {
        c->copies = true;
        EP_TRY(cuda_place_buffer(c->call.cuda, desc, which, NULL, bytes, bytes, &placed));
        desc->own.at[which] = placed;
        return EP_OK;
    }
    EP_TRY(cuda_place_buffer(c->call.cuda, desc, which, desc->own.at[which],
                             (size_t)cuda_plan_known_rows(c->plan) * row_bytes, bytes, &placed));
    if (placed == input) {
        c->staged[which] = 0;
        return EP_OK;
    }
    if (which == EP_GROUP_AT_X)
        c->copies = cuda_overlaps_copies(c->call.cuda, c->plan, row_bytes, OVERLAP_BYTES);
    c->copy[which] = (struct cuda_copy){.from = input, .to = placed, .row_bytes = (int64_t)row_bytes};
    return c->copies ? EP_OK : copy_before(c, &c->copy[which]);
}

/* A rank that has received nothing has no input, but compares its arguments with the others' all the same. */
static ep_status fill_desc(struct combine *c, struct cuda_op_desc *desc)
{
    const ep_combine_args *args = c->args;

    desc->kind = CUDA_COMBINE;
    desc->words[CUDA_DESC_PHASE] = EP_GROUP_COMBINE_READY;
    desc->words[CUDA_DESC_PLAN] = cuda_plan_word(c->plan);
    desc->words[CUDA_DESC_DTYPE] = (uint32_t)args->dtype;
    desc->words[CUDA_DESC_HIDDEN] = (uint32_t)args->hidden;
    desc->words[CUDA_DESC_OUTPUTS] =
        (args->out_topk_weights ? EP_GROUP_OUT_WEIGHTS : 0) | (c->rounds ? EP_GROUP_ROUND_PARTIAL : 0);
    EP_TRY(place_input(c, EP_GROUP_AT_X, args->x, c->row_bytes, desc));
    if (args->out_topk_weights)
        EP_TRY(place_input(c, EP_GROUP_AT_WEIGHTS, args->topk_weights, c->weight_bytes, desc));
    desc->words[CUDA_DESC_COPIES] = c->copies;
    return EP_OK;
}

/* Finds slots that fill the shared memory; `width`: the largest number of rows of a token. */
static struct cuda_shape fit(const struct cuda_comm *cuda, uint32_t row_bytes, uint32_t width, int32_t *ret_slot_bytes)
{
    uint32_t room = (uint32_t)cuda->shared_limit - CUDA_BARRIERS_MAX;
    uint32_t piece = row_bytes < MIN_PIECE ? row_bytes : MIN_PIECE, slot;
    struct cuda_shape shape = {.warps = WARPS, .stages = STAGES};

    while (shape.warps > MIN_WARPS && room / (uint32_t)(shape.warps * shape.stages) < width * piece)
        shape.warps--;
    slot = room / (uint32_t)(shape.warps * shape.stages) / 16 * 16;
    if (slot > width * row_bytes)
        slot = width * row_bytes;
    if (slot > MAX_SLOT && width * piece <= MAX_SLOT)
        slot = MAX_SLOT;
    *ret_slot_bytes = (int32_t)slot;
    shape.shared_bytes = cuda_shared_bytes(&shape, slot);
    return shape;
}

static uint32_t divide_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/*
 * Divides the tokens into tiles: whole tokens, the last of them in parts. Warps claim tiles ahead, so there are at
 * least as many parts as they have claimed at the end of the tokens, and in a small batch enough for every warp.
 */
static void divide(struct cuda_combine *sum, const struct cuda_shape *shape)
{
    uint32_t row = (uint32_t)sum->row_bytes, n = (uint32_t)sum->route.n_tokens;
    uint32_t wanted = (uint32_t)(shape->blocks * shape->warps) * END_TILES, parts = PARTS, tail;

    if (n && parts < divide_up(wanted, n))
        parts = divide_up(wanted, n);
    if (parts > divide_up(row, MIN_PART))
        parts = divide_up(row, MIN_PART);
    sum->part_bytes = (int32_t)(divide_up(divide_up(row, parts), LINE) * LINE);
    sum->parts = (int32_t)divide_up(row, (uint32_t)sum->part_bytes);
    tail = divide_up(wanted, (uint32_t)sum->parts);
    sum->whole_tokens = (int32_t)(tail < n ? n - tail : 0);
    sum->tiles = (uint32_t)sum->whole_tokens + (n - (uint32_t)sum->whole_tokens) * (uint32_t)sum->parts;
}

/* Parts of a copy of `bytes`, which runs ahead of the rows. */
static int32_t count_parts(const struct cuda_stage *stage, const struct cuda_shape *shape, int64_t bytes)
{
    int64_t part = (int64_t)stage->copy_blocks * shape->warps * stage->slot_bytes * PART_PIECES, parts = bytes / part;

    return (int32_t)(parts < 1 ? 1 : parts > CUDA_MAX_PARTS ? CUDA_MAX_PARTS : parts);
}

/* What an order of the sum depends on besides the routing; not 0. */
static uint32_t order_flags(const struct combine *c)
{
    return c->args->flags | (c->reduces ? ORDER_REDUCES : 0);
}

/* Makes the order of the sum in memory of the plan, unless it is there from an earlier combine. */
static ep_status order_by_choice(struct combine *c, struct cuda_combine *sum)
{
    struct cuda_plan *device = cuda_plan_of(c->plan);
    size_t tokens = (size_t)(device->on_device ? device->max_tokens : sum->route.n_tokens);
    struct cuda_order order = {.route = sum->route};
    size_t bytes;

    if (!(c->args->flags & EP_COMBINE_BY_CHOICE))
        return EP_OK;
    sum->by_choice = 1;
    /* Those kernels order the terms themselves: between nodes also of other ranks' tokens, which only devices may know.
     */
    if (cuda_crosses_nodes(c->call.cuda) || !sum->route.expanded)
        return EP_OK;
    order.by_rank = c->args->flags & EP_COMBINE_ROUND_PARTIAL ? 1 : 0;
    sum->rounds_partial = order.by_rank && !c->reduces;
    bytes = (tokens * (size_t)sum->route.width + 1) * sizeof(struct cuda_entry);
    if (!device->ordered.memory)
        EP_TRY(cuda_pool_alloc(c->call.cuda, bytes + tokens * sizeof(int32_t), cuda_plan_block_use(c->plan),
                               &device->ordered));
    order.ret_entry = device->ordered.memory;
    if (c->reduces)
        sum->route.count = order.ret_count = (int32_t *)((char *)device->ordered.memory + bytes);
    sum->route.entry = order.ret_entry;
    device->ordered_in_graph |= c->call.capture != 0;
    if (device->order == order_flags(c) && !device->ordered_in_graph && !device->updated_in_graph)
        return EP_OK;
    /* No other combine relies on the order before this one is queued, and later calls come behind its kernel anyway. */
    device->order = 0;
    c->call.cuda->copied |= !c->call.capture;
    return cuda_status(cuda_launch_order(&order, c->call.stream), "order kernel");
}

/*
 * Whether each rank adds up its own rows first: the same on all ranks, since it follows from what they must agree on. A
 * lane of the kernel has one choice.
 */
static bool reduces(const struct combine *c)
{
    return c->args->flags & EP_COMBINE_ROUND_PARTIAL && c->plan->args.flags & EP_PLAN_EXPANDED && !c->plan->from_mask &&
           c->plan->args.topk <= 32 && !c->args->out_topk_weights && !cuda_crosses_nodes(c->call.cuda);
}

/* What the blocks that write into staging do there, and in how many parts. */
static void fill_writes(const struct combine *c, const struct cuda_shape *shape, struct cuda_combine *sum)
{
    struct cuda_stage *stage = &sum->stage;

    if (!c->copies)
        return;
    if (!c->reduces) {
        stage->x = c->copy[EP_GROUP_AT_X];
        stage->metadata[0] = c->copy[EP_GROUP_AT_WEIGHTS];
        stage->parts = count_parts(stage, shape, cuda_rows_of_others(c->call.cuda, c->plan) * sum->row_bytes);
        return;
    }
    sum->reduce.from = c->args->x;
    sum->reduce.to = sum->desc.own.at[EP_GROUP_AT_X];
    stage->slot_bytes = CUDA_REDUCE_BYTES;
    /* As if each rank sent as many tokens as this one, and each of them here. */
    stage->parts = count_parts(stage, shape, (int64_t)sum->route.n_tokens * sum->waits.nranks * sum->row_bytes);
}

static ep_status launch(struct combine *c, const struct cuda_route *route)
{
    const ep_combine_args *args = c->args;
    struct cuda_comm *cuda = c->call.cuda;
    struct cuda_combine *sum = &cuda->last_combine;
    struct cuda_shape *shape = &cuda->last_shape[1];
    enum cuda_writes writes;

    *sum = (struct cuda_combine){.route = *route,
                                 .by_rank = route->entry,
                                 .bias = {args->bias[0], args->bias[1]},
                                 .out = args->out,
                                 .out_weights = args->out_topk_weights,
                                 .row_bytes = (int64_t)c->row_bytes};
    c->reduces = reduces(c);
    sum->reduces = c->reduces;
    c->rounds = c->reduces || (args->flags && cuda_crosses_nodes(cuda));
    if (c->reduces)
        EP_TRY(cuda_plan_slots(&c->call, c->plan, &sum->reduce));
    cuda_fill_waits(cuda, EP_GROUP_COMBINE_READY, EP_GROUP_COMBINE_DONE, &sum->waits);
    EP_TRY(order_by_choice(c, sum));
    EP_TRY(fill_desc(c, &sum->desc));
    EP_TRY(cuda_sync_stages(&c->call, c->plan, c->staged, EP_GROUP_COMBINE_READY));
    if (cuda_crosses_nodes(cuda))
        return cuda_nodes_combine(&c->call, c->plan, sum);
    *shape = fit(cuda, (uint32_t)c->row_bytes, (uint32_t)route->width, &sum->slot_bytes);
    writes = !c->copies ? CUDA_WRITES_NOTHING : c->reduces ? CUDA_WRITES_SUMS : CUDA_WRITES_COPIES;
    cuda_fill_stage(cuda, route->n_tokens, writes, (size_t)sum->slot_bytes, &sum->stage, shape);
    divide(sum, shape);
    fill_writes(c, shape, sum);
    EP_TRY(cuda_status(cuda_launch_combine(sum, shape, c->call.stream), "combine kernel"));
    c->call.queued = true;
    if (sum->by_choice)
        cuda_plan_of(c->plan)->order = order_flags(c);
    return EP_OK;
}

static ep_status check_pointers(const struct combine *c, int n_tokens)
{
    static const char call[] = "ep_combine";
    const ep_combine_args *args = c->args;

    if (cuda_plan_known_rows(c->plan)) {
        EP_TRY(cuda_check_pointer(c->call.cuda, call, "x", args->x));
        EP_TRY(cuda_check_pointer(c->call.cuda, call, "topk_weights", args->topk_weights));
    }
    if (!n_tokens)
        return EP_OK;
    EP_TRY(cuda_check_pointer(c->call.cuda, call, "bias[0]", args->bias[0]));
    EP_TRY(cuda_check_pointer(c->call.cuda, call, "bias[1]", args->bias[1]));
    EP_TRY(cuda_check_pointer(c->call.cuda, call, "out", args->out));
    return cuda_check_pointer(c->call.cuda, call, "out_topk_weights", args->out_topk_weights);
}

static ep_status combine_body(struct combine *c)
{
    struct cuda_route route;

    EP_TRY(cuda_plan_ready(&c->call, c->plan, &route));
    EP_TRY(check_pointers(c, route.n_tokens));
    c->weight_bytes = (route.expanded ? 1 : (size_t)c->plan->args.topk) * sizeof(float);
    c->row_bytes = (size_t)c->args->hidden * sizeof(uint16_t);
    EP_TRY(launch(c, &route));
    cuda_plan_count(c->plan, c->row_bytes, c->reduces);
    return EP_OK;
}

ep_status cuda_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream)
{
    struct combine c = {.plan = plan, .args = args};

    EP_TRY(cuda_call_begin(cuda_of(plan->comm), stream, true, &c.call));
    return cuda_call_end(&c.call, combine_body(&c));
}
