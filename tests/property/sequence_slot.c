/* SPDX-License-Identifier: Apache-2.0 */
#include "sequence.h"

#include <stdlib.h>
#include <string.h>

enum { MASK_TOPK = 4, STRIDE_GAP = 3 };
enum { CONTIGUOUS, GAP, ROWS_INNERMOST };

static const char *const names[BUFFERS] = {[X] = "x",
                                           [SCALES] = "scales",
                                           [WEIGHTS] = "topk_weights",
                                           [BIAS] = "bias",
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
                                           [SNAPSHOT] = "copy of out",
                                           [SOURCE] = "recv_source",
                                           [PLACE] = "recv_slot",
                                           [N_TOKENS] = "n_recv_tokens",
                                           [PSUM_RANK] = "psum_rank",
                                           [PSUM_EXPERT] = "psum_expert",
                                           [COUNT] = "count_exact",
                                           [PREFIX] = "rank_prefix"};

static const struct format {
    int dtype, scale_type, elements; /* for each word of scales; 0: none, or any number */
} formats[] = {{EP_BF16, 0, 0},
               {EP_BF16, 0, 0},
               {EP_BF16, EP_I32, 0},
               {EP_F8E4M3, EP_F32, 128},
               {EP_F8E4M3, EP_UE8M0, 512},
               {EP_F8E4M3, EP_UE8M0_32, 128},
               {EP_F8E4M3, EP_I32, 0},
               {EP_F4E2M1, EP_I32, 0},
               {EP_F4E2M1, EP_F8E4M3, 64}};
static const float global_scales[] = {1, 448 * 6 / 4.0f, 0.37f};

static void choose_shape(struct rank_state *state, int nnodes, struct slot *slot)
{
    static const int hidden[] = {8, 128, 512, 1024, 7168}, tokens[] = {1, 9, 40, 120};
    struct dice *dice = &state->dice;
    const struct format *format = &formats[draw(dice, sizeof(formats) / sizeof(formats[0]))];
    int kind = draw(dice, 5);

    *slot = (struct slot){.fixed = draw(dice, 2),
                          .expanded = kind < 2,
                          .mask = kind == 4,
                          .weights = kind != 4 && draw(dice, 2),
                          .way = draw_own(dice, 3),
                          .recv_way = draw_own(dice, 3),
                          .dtype = format->dtype,
                          .scale_type = format->scale_type,
                          .quantized = format->elements && draw(dice, 2),
                          .idx_type = draw(dice, 2) ? EP_I32 : EP_I64,
                          .max_tokens = tokens[draw(dice, 4)],
                          .n_bias = draw(dice, 3),
                          .alignment = draw(dice, 2) ? 0 : 1 + draw(dice, 16),
                          .spare_rows = draw_own(dice, 3)};
    slot->hidden = hidden[draw(dice, 10) ? draw(dice, 4) : 4];
    if (slot->hidden < 512 && format->dtype != EP_BF16)
        slot->hidden = 512;
    if (slot->quantized)
        slot->way = 0;
    if (slot->quantized && slot->dtype == EP_F4E2M1 && draw(dice, 4))
        slot->global_scale = &global_scales[draw(dice, 3)];
    slot->scale_words = format->elements ? slot->hidden / format->elements : format->scale_type ? 1 + draw(dice, 9) : 0;
    slot->n_experts = state->nranks * (1 + draw(dice, 8));
    slot->topk = kind == 4 ? 0 : 1 + draw(dice, slot->n_experts < 8 ? slot->n_experts : 8);
    slot->choices_topk = slot->mask ? (slot->n_experts < MASK_TOPK ? slot->n_experts : MASK_TOPK) : slot->topk;
    if (draw(dice, 2))
        slot->combine_flags = EP_COMBINE_BY_CHOICE | (nnodes > 1 || draw(dice, 2) ? EP_COMBINE_ROUND_PARTIAL : 0);
    slot->flags = slot->expanded ? EP_PLAN_EXPANDED | (draw(dice, 2) ? EP_PLAN_ZERO_PADDING : 0) : 0;
    for (int i = 0; i < ROUTINGS; i++)
        slot->n_tokens[i] = draw_own(dice, 8) ? draw_own(dice, slot->max_tokens + 1) : 0;
}

/*
 * Experts in random order, distinct in some routings; some choices are -1, and a skewed routing prefers the first
 * experts.
 */
static void fill_choices(struct dice *dice, const struct slot *slot, bool distinct, int32_t *choices)
{
    bool holes = !draw_own(dice, 3), skewed = !draw_own(dice, 4);
    int topk = slot->choices_topk;

    for (int t = 0; t < slot->max_tokens; t++)
        for (int k = 0; k < topk; k++) {
            int32_t expert = draw_own(dice, slot->n_experts);

            if (skewed && draw_own(dice, 2))
                expert = k;
            for (int i = 0; i < k && distinct; i++)
                if (choices[t * topk + i] == expert) {
                    expert = (expert + 1) % slot->n_experts;
                    i = -1;
                }
            choices[t * topk + k] = expert;
        }
    for (int i = 0; holes && i < slot->max_tokens * topk; i++)
        if (!draw_own(dice, 3))
            choices[i] = -1;
}

static void fill_mask(const struct rank_state *state, struct slot *slot, int number)
{
    unsigned char *mask = slot->b[IDX + number].block[TESTED].at;
    int32_t *experts = (int32_t *)(void *)slot->b[EXPERTS + number].block[TESTED].at;
    int local = slot->n_experts / state->nranks, topk = slot->choices_topk;

    memset(mask, 0, slot->b[IDX + number].bytes);
    memset(experts, 0, slot->b[EXPERTS + number].bytes);
    for (int i = 0; i < slot->n_tokens[number] * topk; i++) {
        int32_t expert = slot->choices[number][i];

        if (expert < 0)
            continue;
        mask[i / topk * state->nranks + expert / local] = 1;
        experts[expert]++;
    }
}

static bool fill_routings(struct rank_state *state, struct slot *slot)
{
    for (int i = 0; i < ROUTINGS; i++) {
        int n = slot->max_tokens * slot->choices_topk;
        void *index = slot->b[IDX + i].block[TESTED].at;

        slot->choices[i] = malloc((size_t)n * sizeof(int32_t) + 1);
        if (!slot->choices[i])
            return fail(state, "no memory");
        fill_choices(&state->dice, slot, sequence_is_distinct(state->sequence), slot->choices[i]);
        if (slot->mask)
            fill_mask(state, slot, i);
        for (int c = 0; !slot->mask && c < n; c++)
            if (slot->idx_type == EP_I32)
                ((int32_t *)index)[c] = slot->choices[i][c];
            else
                ((int64_t *)index)[c] = slot->choices[i][c];
        mirror_copy(&slot->b[IDX + i]);
        mirror_copy(&slot->b[EXPERTS + i]);
    }
    return true;
}

/*
 * Exponents of 2^-10 .. 2^9; one in 16 a zero or a denormal. A third is +-2^27: when two of those cancel out, the
 * values added between them have lost their last bits, which reveals the order. Sums stay finite.
 */
static uint16_t finite_bf16(uint64_t bits)
{
    uint16_t sign = (uint16_t)(bits & 0x8000), mantissa = (uint16_t)(bits & 0x7f);
    unsigned lot = (unsigned)(bits >> 7 & 0xff);

    if (lot < 16)
        return lot < 8 ? sign : sign | mantissa;
    return lot < 176 ? (uint16_t)(sign | (117 + lot % 20) << 7 | mantissa) : (uint16_t)(sign | 154 << 7);
}

void fill_bf16(struct dice *dice, void *memory, size_t bytes)
{
    uint16_t *element = memory;

    for (size_t i = 0; i < bytes / 2; i += 4) {
        uint64_t bits = random_next(&dice->own);

        for (size_t k = i; k < i + 4 && k < bytes / 2; k++, bits >>= 16)
            element[k] = finite_bf16(bits);
    }
}

void slot_load(struct rank_state *state, struct slot *slot)
{
    for (int i = 0; i < BUFFERS; i++) {
        unsigned char *memory = slot->b[i].block[TESTED].at;

        if (i >= IDX && i < EXPERTS + ROUTINGS)
            continue;
        if (i == WEIGHTS || i == ANSWER_WEIGHTS)
            for (size_t k = 0; k < slot->b[i].bytes / 4; k++)
                ((float *)(void *)memory)[k] = (float)draw_own(&state->dice, 1000) / 999.0f;
        else if (i == SCALES || (i == X && slot->dtype != EP_BF16 && !slot->quantized))
            for (size_t k = 0; k < slot->b[i].bytes; k++)
                memory[k] = (unsigned char)random_next(&state->dice.own) & 0x7e; /* no NaN */
        else if (i < IDX || i == ANSWER)
            fill_bf16(&state->dice, memory, slot->b[i].bytes);
        else
            mirror_poison(&slot->b[i]);
        mirror_copy(&slot->b[i]);
    }
}

bool slot_make_plan(struct rank_state *state, ep_comm *comm, const struct slot *slot, int which, int routing,
                    int64_t max_rows, ep_stream stream, ep_plan **ret_plan)
{
    ep_plan_args args =
        args_plan(NULL, slot->mask ? 0 : slot->idx_type, slot->n_tokens[routing], slot->topk, slot->n_experts);
    const void *index = slot->b[IDX + routing].block[which].at;

    args.max_tokens = slot->max_tokens;
    args.flags = slot->flags;
    args.expert_alignment = slot->alignment;
    args.stream = stream;
    if (slot->mask)
        args.tokens_per_expert = (const int32_t *)(const void *)slot->b[EXPERTS + routing].block[which].at;
    if (max_rows < 0)
        CALL(state, ep_plan_get_max_rows(comm, &args, &args.max_recv_tokens));
    else
        args.max_recv_tokens = max_rows;
    if (slot->mask)
        args.token_in_rank = index;
    else
        args.topk_idx = index;
    CALL(state, ep_plan_new(comm, &args, ret_plan));
    return true;
}

static enum memory choose_memory(struct dice *dice, int which)
{
    static const enum memory kinds[] = {ORDINARY, ORDINARY, SYMMETRIC, LOCAL, POOL};
    enum memory memory = kinds[draw(dice, 5)];

    /* Allocations of one rank may differ from those of another. */
    if (memory != SYMMETRIC && !draw_own(dice, 3))
        memory = draw_own(dice, 2) ? LOCAL : ORDINARY;
    return which == X || (which >= RECV_X && which <= ANSWER_WEIGHTS) ? memory : ORDINARY;
}

struct strides slot_strides(const struct slot *slot, bool received)
{
    int way = received ? slot->recv_way : slot->way;
    int64_t rows = received ? slot->out_rows + slot->spare_rows : slot->max_tokens;

    if (way == ROWS_INNERMOST)
        return (struct strides){1, rows + 1};
    return (struct strides){slot->scale_words + (way == GAP ? STRIDE_GAP : 0), 1};
}

static bool make_buffers(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, int begin, int end)
{
    size_t n = (size_t)slot->max_tokens, hidden = (size_t)slot->hidden, topk = (size_t)slot->topk;
    size_t rows = (size_t)(slot->out_rows + slot->spare_rows), ranks = (size_t)state->nranks;
    size_t local = (size_t)slot->n_experts / ranks, words = (size_t)slot->scale_words;
    size_t index = topk * ep_dtype_bytes((ep_dtype)slot->idx_type);
    size_t gap = slot->scale_type && slot->way == GAP ? STRIDE_GAP : 0, one = slot->way == ROWS_INNERMOST;
    size_t recv_gap = slot->scale_type && slot->recv_way == GAP ? STRIDE_GAP : 0;
    size_t row = hidden * ep_dtype_bytes((ep_dtype)slot->dtype) / (slot->dtype == EP_F4E2M1 ? 2 : 1);
    const struct {
        size_t n, bytes;
    } sizes[BUFFERS] = {
        [X] = {n, slot->quantized ? hidden * 2 : row},
        [SCALES] = {n + one, (words + gap) * 4},
        [WEIGHTS] = {n, topk * 4},
        [BIAS] = {2 * n, hidden * 2},
        [IDX] = {n, slot->mask ? ranks : index},
        [IDX + 1] = {n, slot->mask ? ranks : index},
        [IDX + 2] = {n, slot->mask ? ranks : index},
        [EXPERTS] = {slot->mask ? (size_t)slot->n_experts : 0, 4},
        [EXPERTS + 1] = {slot->mask ? (size_t)slot->n_experts : 0, 4},
        [EXPERTS + 2] = {slot->mask ? (size_t)slot->n_experts : 0, 4},
        [RECV_X] = {rows, row},
        [RECV_SCALES] = {rows + (slot->recv_way == ROWS_INNERMOST), (words + recv_gap) * 4},
        [RECV_IDX] = {rows, topk * ep_dtype_bytes((ep_dtype)slot->idx_type)},
        [RECV_WEIGHTS] = {rows, slot->expanded ? 4 : topk * 4},
        [ANSWER] = {rows, hidden * 2},
        [ANSWER_WEIGHTS] = {rows, slot->expanded ? 4 : topk * 4},
        [OUT] = {n, hidden * 2},
        [OUT_WEIGHTS] = {n, topk * 4},
        [SNAPSHOT] = {n, hidden * 2},
        [SOURCE] = {rows, 4},
        [PLACE] = {rows, slot->expanded ? topk * 4 : 0},
        [N_TOKENS] = {1, 4},
        [PSUM_RANK] = {ranks, 4},
        [PSUM_EXPERT] = {local, 4},
        [COUNT] = {local, 4},
        [PREFIX] = {ranks, ranks * 4},
    };

    for (int i = begin; i < end; i++)
        TRY(mirror_new(state, comms, names[i], sizes[i].n, sizes[i].bytes, choose_memory(&state->dice, i),
                       &slot->b[i]));
    return true;
}

bool slot_new(struct rank_state *state, ep_comm *const comms[BOTH], int nnodes, struct slot *ret_slot)
{
    struct slot *slot = ret_slot;
    ep_plan_info info[BOTH] = {EP_PLAN_INFO_INIT, EP_PLAN_INFO_INIT};

    choose_shape(state, nnodes, slot);
    TRY(make_buffers(state, comms, slot, 0, RECV_X));
    TRY(fill_routings(state, slot));
    for (int i = 0; i < BOTH; i++) {
        TRY(slot_make_plan(state, comms[i], slot, i, 0, slot->fixed ? -1 : 0, NULL, &slot->plan[i]));
        CALL(state, ep_plan_get_info(slot->plan[i], &info[i]));
    }
    if (info[TESTED].out_rows != info[BASE].out_rows)
        return fail(state, "plans of %lld and %lld rows", (long long)info[0].out_rows, (long long)info[1].out_rows);
    slot->out_rows = info[0].out_rows;
    TRY(make_buffers(state, comms, slot, RECV_X, BUFFERS));
    slot->used = true;
    slot_load(state, slot);
    return true;
}

bool slot_free(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot)
{
    for (int i = 0; i < BOTH; i++)
        ep_plan_free(slot->plan[i]);
    for (int i = 0; i < BUFFERS; i++)
        TRY(mirror_free(state, comms, &slot->b[i]));
    for (int i = 0; i < ROUTINGS; i++)
        free(slot->choices[i]);
    *slot = (struct slot){.used = false};
    return true;
}

bool slot_compare(struct rank_state *state, const struct slot *slot, const char *what)
{
    if (!slot->used)
        return true;
    for (int i = 0; i < BUFFERS; i++)
        TRY(mirror_compare(state, &slot->b[i], what));
    return true;
}
