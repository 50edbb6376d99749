/* SPDX-License-Identifier: Apache-2.0 */
#include "sequence_slot.h"

#include "case.h"

#include <stdlib.h>
#include <string.h>

enum { SOURCE_STRIDE = 4096 };

static const char *const names[BUFFERS] = {[X] = "x",
                                           [SCALES] = "scales",
                                           [WEIGHTS] = "topk_weights",
                                           [IDX] = "first routing",
                                           [IDX + 1] = "second routing",
                                           [IDX + 2] = "third routing",
                                           [EXPERTS] = "first tokens_per_expert",
                                           [EXPERTS + 1] = "second tokens_per_expert",
                                           [EXPERTS + 2] = "third tokens_per_expert",
                                           [RECV_X] = "recv_x",
                                           [RECV_SCALES] = "recv_scales",
                                           [RECV_IDX] = "recv_topk_idx",
                                           [RECV_WEIGHTS] = "recv_topk_weights",
                                           [ANSWER] = "x of the combine",
                                           [ANSWER_WEIGHTS] = "topk_weights of the combine",
                                           [OUT] = "out",
                                           [OUT_WEIGHTS] = "out_topk_weights",
                                           [SOURCE] = "recv_source",
                                           [SLOT] = "recv_slot",
                                           [N_TOKENS] = "n_recv_tokens",
                                           [PSUM_RANK] = "psum_rank",
                                           [PSUM_EXPERT] = "psum_expert",
                                           [COUNT] = "count_exact",
                                           [PREFIX] = "rank_prefix"};

/* --- buffers ----------------------------------------------------------------------------------------------------- */

static enum memory choose_memory(struct dice *dice, enum buffer which)
{
    static const enum memory kinds[] = {ORDINARY, ORDINARY, ORDINARY, SYMMETRIC, ALLOCATED_LOCAL, REGISTERED};
    enum memory memory = kinds[draw(dice, 6)];

    if (which < RECV_X || which > ANSWER_WEIGHTS)
        return ORDINARY;
    return memory == SYMMETRIC && !draw_own(dice, 4) ? ORDINARY_AMONG : memory;
}

static int new_buffer(const struct group *group, struct dice *dice, struct slot *slot, enum buffer which, size_t rows,
                      size_t row_bytes)
{
    TRY(mirror_new(group, names[which], rows * row_bytes, choose_memory(dice, which), &slot->b[which]));
    slot->b[which].row_bytes = row_bytes;
    return 0;
}

static size_t index_bytes(const struct slot *slot)
{
    return ep_dtype_bytes((ep_dtype)slot->idx_type);
}

static const struct format {
    int dtype, scale_type, elements; /* for each word of scales; 0: there are none */
} formats[] = {{EP_BF16, 0, 0},
               {EP_BF16, 0, 0},
               {EP_F8E4M3, EP_F32, 128},
               {EP_F8E4M3, EP_UE8M0, 512},
               {EP_F8E4M3, EP_UE8M0_32, 128},
               {EP_F4E2M1, EP_F8E4M3, 64}};

static size_t row_bytes(const struct slot *slot)
{
    return (size_t)slot->hidden * ep_dtype_bytes((ep_dtype)slot->dtype) / (slot->dtype == EP_F4E2M1 ? 2 : 1);
}

static int make_inputs(const struct group *group, struct dice *dice, struct slot *slot)
{
    size_t n = (size_t)slot->max_tokens, hidden = (size_t)slot->hidden, topk = (size_t)slot->topk;
    size_t ranks = (size_t)group->nranks;

    TRY(new_buffer(group, dice, slot, X, n, slot->quantized ? hidden * 2 : row_bytes(slot)));
    TRY(new_buffer(group, dice, slot, SCALES, n, (size_t)slot->scale_words * 4));
    TRY(new_buffer(group, dice, slot, WEIGHTS, n, topk * 4));
    for (int i = 0; i < ROUTINGS; i++) {
        TRY(new_buffer(group, dice, slot, (enum buffer)(IDX + i), n, slot->mask ? ranks : topk * index_bytes(slot)));
        TRY(new_buffer(group, dice, slot, (enum buffer)(EXPERTS + i), slot->mask ? (size_t)slot->n_experts : 0, 4));
    }
    return 0;
}

static int make_outputs(const struct group *group, struct dice *dice, struct slot *slot)
{
    size_t rows = (size_t)slot->out_rows, n = (size_t)slot->max_tokens, hidden = (size_t)slot->hidden;
    size_t topk = (size_t)slot->topk, ranks = (size_t)group->nranks, local = (size_t)slot->n_experts / ranks;
    const struct {
        size_t n, bytes;
    } sizes[BUFFERS] = {
        [RECV_X] = {rows, row_bytes(slot)},
        [RECV_SCALES] = {rows, slot->b[SCALES].row_bytes},
        [RECV_IDX] = {rows, topk * index_bytes(slot)},
        [RECV_WEIGHTS] = {rows, slot->expanded ? 4 : topk * 4},
        [ANSWER] = {rows, hidden * 2},
        [ANSWER_WEIGHTS] = {rows, slot->expanded ? 4 : topk * 4},
        [OUT] = {n, hidden * 2},
        [OUT_WEIGHTS] = {n, topk * 4},
        [SOURCE] = {rows, 4},
        [SLOT] = {rows, slot->expanded ? topk * 4 : 0},
        [N_TOKENS] = {1, 4},
        [PSUM_RANK] = {ranks, 4},
        [PSUM_EXPERT] = {local, 4},
        [COUNT] = {local, 4},
        [PREFIX] = {ranks, ranks * 4},
    };

    for (int i = RECV_X; i < BUFFERS; i++)
        TRY(new_buffer(group, dice, slot, (enum buffer)i, sizes[i].n, sizes[i].bytes));
    return 0;
}

/* The ranks and experts of a routing, as a mask. */
static void fill_mask(const struct group *group, const struct slot *slot, int number, const int32_t *index, int topk)
{
    unsigned char *mask = slot->b[IDX + number].host;
    int32_t *experts = (int32_t *)(void *)slot->b[EXPERTS + number].host;
    int local = slot->n_experts / group->nranks;

    memset(mask, 0, slot->b[IDX + number].bytes);
    memset(experts, 0, slot->b[EXPERTS + number].bytes);
    for (int i = 0; i < slot->n_tokens[number] * topk; i++) {
        if (index[i] < 0)
            continue;
        mask[i / topk * group->nranks + index[i] / local] = 1;
        experts[index[i]]++;
    }
}

static int fill_routings(const struct group *group, struct dice *dice, struct slot *slot)
{
    int topk = slot->mask ? 1 + draw(dice, 8) : slot->topk;
    int32_t *index = malloc(((size_t)slot->max_tokens * (size_t)topk + 1) * sizeof(*index));

    EXPECT(index, "no memory for a routing");
    for (int i = 0; i < ROUTINGS; i++) {
        struct routing routing = {.n_tokens = slot->n_tokens[i],
                                  .topk = topk,
                                  .n_experts = slot->n_experts,
                                  .nranks = group->nranks,
                                  .idx_type = slot->mask ? EP_I32 : slot->idx_type,
                                  .skewed = !draw_own(dice, 5),
                                  .repeated = !draw_own(dice, 3),
                                  .holes = !draw_own(dice, 3)};

        fill_routing(&routing, &dice->own, slot->mask ? (void *)index : slot->b[IDX + i].host);
        if (slot->mask)
            fill_mask(group, slot, i, index, topk);
    }
    free(index);
    for (int i = IDX; i < EXPERTS + ROUTINGS; i++)
        TRY(mirror_push(group, &slot->b[i]));
    return 0;
}

static void fill(struct dice *dice, struct slot *slot, enum buffer which)
{
    struct mirror *mirror = &slot->b[which];

    if (which == WEIGHTS || which == ANSWER_WEIGHTS)
        for (size_t i = 0; i < mirror->bytes / 4; i++)
            ((float *)(void *)mirror->host)[i] = (float)draw_own(dice, 1000) / 999.0f;
    else if (which == SCALES || (which == X && slot->dtype != EP_BF16 && !slot->quantized))
        for (size_t i = 0; i < mirror->bytes; i++)
            mirror->host[i] = (unsigned char)next_random(&dice->own);
    else
        fill_bf16((uint16_t *)(void *)mirror->host, mirror->bytes / 2, &dice->own);
}

/* The routings stay: a plan with exact counts has no other. */
int slot_load(const struct group *group, struct dice *dice, struct slot *slot)
{
    for (int i = 0; i < BUFFERS; i++) {
        if (i >= IDX && i < EXPERTS + ROUTINGS)
            continue;
        if (i < IDX || i == ANSWER || i == ANSWER_WEIGHTS) {
            fill(dice, slot, (enum buffer)i);
            TRY(mirror_push(group, &slot->b[i]));
        } else {
            TRY(mirror_poison(group, &slot->b[i]));
        }
    }
    CUDA(cudaStreamSynchronize(group->stream));
    return 0;
}

/* --- plans ------------------------------------------------------------------------------------------------------- */

static void choose_shape(const struct group *group, struct dice *dice, struct slot *slot)
{
    static const int hidden[] = {512, 1024, 2560, 7168}, tokens[] = {1, 33, 200, 600};
    const struct format *format = &formats[draw(dice, sizeof(formats) / sizeof(formats[0]))];
    int kind = draw(dice, 5);

    *slot = (struct slot){.fixed = draw(dice, 2),
                          .expanded = kind < 2,
                          .mask = kind == 4,
                          .choice = kind != 4 && draw(dice, 2),
                          .by_choice = draw(dice, 3) == 0,
                          .dtype = format->dtype,
                          .scale_type = format->scale_type,
                          .quantized = format->elements && draw(dice, 2),
                          .idx_type = draw(dice, 2) ? EP_I32 : EP_I64,
                          .hidden = hidden[draw(dice, 4)],
                          .topk = kind == 4 ? 0 : 1 + draw(dice, 8),
                          .max_tokens = tokens[draw(dice, 4)],
                          .alignment = draw(dice, 2) ? 0 : 1 + draw(dice, 16)};
    slot->scale_words = format->elements ? slot->hidden / format->elements : 0;
    slot->flags = slot->expanded ? EP_PLAN_EXPANDED | (draw(dice, 2) ? EP_PLAN_ZERO_PADDING : 0) : 0;
    slot->n_experts = group->nranks * (8 + draw(dice, 12));
    for (int i = 0; i < ROUTINGS; i++)
        slot->n_tokens[i] = draw_own(dice, 8) ? draw_own(dice, slot->max_tokens + 1) : 0;
}

static unsigned char *at(const struct slot *slot, int which, bool device)
{
    return device ? slot->b[which].device : slot->b[which].host;
}

static int make_plan(const struct group *group, const struct slot *slot, int routing, bool device, cudaStream_t stream,
                     ep_plan **ret_plan)
{
    ep_comm *comm = device ? group->cuda : group->host;
    ep_plan_args args =
        args_plan(NULL, slot->mask ? 0 : slot->idx_type, slot->n_tokens[routing], slot->topk, slot->n_experts);

    args.max_tokens = slot->max_tokens;
    args.flags = slot->flags;
    args.expert_alignment = slot->alignment;
    args.stream = device ? (ep_stream)stream : NULL;
    if (slot->mask)
        args.tokens_per_expert = (const int32_t *)(const void *)at(slot, EXPERTS + routing, device);
    if (slot->fixed)
        CALL(ep_plan_get_max_rows(comm, &args, &args.max_recv_tokens));
    if (slot->mask)
        args.token_in_rank = at(slot, IDX + routing, device);
    else
        args.topk_idx = at(slot, IDX + routing, device);
    CALL(ep_plan_new(comm, &args, ret_plan));
    return 0;
}

int slot_new(const struct group *group, struct dice *dice, struct slot *ret_slot)
{
    struct slot *slot = ret_slot;
    ep_plan_info info[2] = {EP_PLAN_INFO_INIT, EP_PLAN_INFO_INIT};

    choose_shape(group, dice, slot);
    TRY(make_inputs(group, dice, slot));
    TRY(fill_routings(group, dice, slot));
    for (int device = 0; device < 2; device++) {
        TRY(make_plan(group, slot, 0, device, group->stream, &slot->plan[device]));
        CALL(ep_plan_get_info(slot->plan[device], &info[device]));
    }
    EXPECT(info[0].out_rows == info[1].out_rows, "a plan of %lld rows, not %lld", (long long)info[1].out_rows,
           (long long)info[0].out_rows);
    slot->out_rows = info[0].out_rows;
    TRY(make_outputs(group, dice, slot));
    slot->used = true;
    return slot_load(group, dice, slot);
}

int slot_free(const struct group *group, int code, struct slot *slot)
{
    for (int device = 0; device < 2; device++)
        ep_plan_free(slot->plan[device]);
    for (int i = 0; i < BUFFERS; i++)
        code |= mirror_free(group, code & FAILED, &slot->b[i]);
    *slot = (struct slot){.used = false};
    return code;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

static ep_status dispatch(const struct slot *slot, ep_plan *plan, bool device, ep_stream stream)
{
    ep_dispatch_args args =
        args_dispatch(slot->dtype, slot->hidden, at(slot, X, device), at(slot, RECV_X, device), slot->out_rows);

    if (slot->scale_type) {
        args.scales = slot->quantized ? NULL : at(slot, SCALES, device);
        args.flags = slot->quantized ? EP_DISPATCH_QUANTIZE : 0;
        args.scale_type = slot->scale_type;
        args.recv_scales = at(slot, RECV_SCALES, device);
    }
    if (slot->choice) {
        args.topk_weights = (const float *)(const void *)at(slot, WEIGHTS, device);
        args.recv_topk_weights = (float *)(void *)at(slot, RECV_WEIGHTS, device);
        args.recv_topk_idx = slot->expanded ? NULL : at(slot, RECV_IDX, device);
    }
    return ep_dispatch(plan, &args, stream);
}

static ep_status combine(const struct slot *slot, ep_plan *plan, bool device, ep_stream stream)
{
    bool echo = slot->dtype == EP_BF16;
    ep_combine_args args = args_combine(slot->hidden, at(slot, echo ? RECV_X : ANSWER, device), at(slot, OUT, device));

    if (slot->by_choice)
        args.flags = EP_COMBINE_BY_CHOICE | (slot->expanded || group_division.nodes > 1 ? EP_COMBINE_ROUND_PARTIAL : 0);
    if (slot->choice) {
        args.topk_weights = (const float *)(const void *)at(slot, ANSWER_WEIGHTS, device);
        args.out_topk_weights = (float *)(void *)at(slot, OUT_WEIGHTS, device);
    }
    return ep_combine(plan, &args, stream);
}

static ep_status update(const struct slot *slot, int routing, bool device, ep_stream stream)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    if (slot->mask) {
        args.token_in_rank = at(slot, IDX + routing, device);
        args.tokens_per_expert = (const int32_t *)(const void *)at(slot, EXPERTS + routing, device);
    } else {
        args.topk_idx = at(slot, IDX + routing, device);
    }
    args.n_tokens = slot->n_tokens[routing];
    return ep_plan_update(slot->plan[device], &args, stream);
}

static ep_status metadata(const struct slot *slot, bool device, ep_stream stream)
{
    ep_plan_metadata dst = EP_PLAN_METADATA_INIT;

    dst.recv_source = (int32_t *)(void *)at(slot, SOURCE, device);
    dst.recv_slot = slot->expanded ? (int32_t *)(void *)at(slot, SLOT, device) : NULL;
    dst.n_recv_tokens = (int32_t *)(void *)at(slot, N_TOKENS, device);
    dst.psum_rank = (int32_t *)(void *)at(slot, PSUM_RANK, device);
    dst.psum_expert = (int32_t *)(void *)at(slot, PSUM_EXPERT, device);
    dst.count_exact = (int32_t *)(void *)at(slot, COUNT, device);
    dst.rank_prefix = (int32_t *)(void *)at(slot, PREFIX, device);
    dst.source_stride = SOURCE_STRIDE;
    return ep_plan_get_metadata(slot->plan[device], &dst, stream);
}

int slot_call(const struct group *group, const struct slot *slot, enum call call, int routing, bool device,
              cudaStream_t stream)
{
    ep_plan *plan = NULL;

    switch (call) {
    case DISPATCH:
        CALL(dispatch(slot, slot->plan[device], device, stream));
        return 0;
    case COMBINE:
        CALL(combine(slot, slot->plan[device], device, stream));
        return 0;
    case UPDATE:
        CALL(update(slot, routing, device, stream));
        return 0;
    case METADATA:
        CALL(metadata(slot, device, stream));
        return 0;
    default:
        TRY(make_plan(group, slot, routing, device, stream, &plan));
        CALL(dispatch(slot, plan, device, stream));
        CALL(combine(slot, plan, device, stream));
        ep_plan_free(plan);
        return 0;
    }
}

/* --- results ----------------------------------------------------------------------------------------------------- */

int slot_compare_sources(const struct slot *slot)
{
    size_t n = (size_t)slot->out_rows + 1;
    int32_t *all = calloc(4 * n, sizeof(*all));
    int code = PASSED;

    EXPECT(all, "no memory for %zu sources", n);
    CALL(ep_plan_get_sources(slot->plan[0], all, all + n));
    CALL(ep_plan_get_sources(slot->plan[1], all + 2 * n, all + 3 * n));
    if (memcmp(all, all + 2 * n, 2 * n * sizeof(*all)) != 0) {
        test_report("ep_plan_get_sources differs");
        code = DIFFERS;
    }
    free(all);
    return code;
}

int slot_compare(const struct group *group, const struct slot *slot, const char *phase)
{
    int code = PASSED;

    for (int i = RECV_X; i < BUFFERS; i++)
        code |= mirror_compare(group, &slot->b[i], phase);
    return code;
}
