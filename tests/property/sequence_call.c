/* SPDX-License-Identifier: Apache-2.0 */
/* The calls on a plan: queued on one communicator, made one by one on the other. */
#include "sequence.h"

#include <stdlib.h>
#include <string.h>

static void *at(const struct slot *slot, int buffer, int which)
{
    return slot->b[buffer].block[which].at;
}

static float *floats(const struct slot *slot, int buffer, int which)
{
    return (float *)at(slot, buffer, which);
}

static int32_t *ints(const struct slot *slot, int buffer, int which)
{
    return (int32_t *)at(slot, buffer, which);
}

ep_dispatch_args slot_dispatch_args(const struct slot *slot, int which)
{
    ep_dispatch_args args = {
        .size = sizeof(args), .x = at(slot, X, which), .dtype = slot->dtype, .hidden = slot->hidden};

    if (slot->scale_type) {
        args.scales = slot->quantized ? NULL : at(slot, SCALES, which);
        args.flags = slot->quantized ? EP_DISPATCH_QUANTIZE : 0;
        args.global_scale = slot->global_scale;
        args.scale_type = slot->scale_type;
        args.recv_scales = at(slot, RECV_SCALES, which);
        if (slot->scale_type == EP_I32)
            args.scale_words = slot->scale_words;
        /* Contiguous ones need none. */
        if (slot->way) {
            args.scale_stride_token = slot_strides(slot, false).token;
            args.scale_stride_block = slot_strides(slot, false).block;
        }
        if (slot->recv_way) {
            args.recv_scale_stride_token = slot_strides(slot, true).token;
            args.recv_scale_stride_block = slot_strides(slot, true).block;
        }
    }
    args.recv_x = at(slot, RECV_X, which);
    if (slot->weights) {
        args.topk_weights = floats(slot, WEIGHTS, which);
        args.recv_topk_weights = floats(slot, RECV_WEIGHTS, which);
    }
    if (!slot->mask && !slot->expanded)
        args.recv_topk_idx = at(slot, RECV_IDX, which);
    args.out_rows = slot->out_rows + slot->spare_rows;
    return args;
}

ep_combine_args slot_combine_args(const struct slot *slot, int which)
{
    ep_combine_args args = {
        .size = sizeof(args), .x = at(slot, ANSWER, which), .dtype = EP_BF16, .hidden = slot->hidden};

    if (slot->weights) {
        args.topk_weights = floats(slot, ANSWER_WEIGHTS, which);
        args.out_topk_weights = floats(slot, OUT_WEIGHTS, which);
    }
    /* One bias may be the second one. */
    for (int i = 0; i < slot->n_bias; i++)
        args.bias[i + (slot->n_bias == 1 && slot->way)] =
            (unsigned char *)at(slot, BIAS, which) + (size_t)i * slot->b[BIAS].bytes / 2;
    args.out = at(slot, OUT, which);
    args.flags = slot->combine_flags;
    return args;
}

bool slot_dispatch(struct rank_state *state, struct slot *slot, ep_stream stream)
{
    ep_dispatch_args tested = slot_dispatch_args(slot, TESTED), base = slot_dispatch_args(slot, BASE);

    CALL(state, ep_dispatch(slot->plan[TESTED], &tested, stream));
    CALL(state, ep_dispatch_sync(slot->plan[BASE], &base));
    slot->dispatched = true;
    return true;
}

bool slot_combine(struct rank_state *state, struct slot *slot, ep_stream stream)
{
    ep_combine_args tested = slot_combine_args(slot, TESTED), base = slot_combine_args(slot, BASE);

    CALL(state, ep_combine(slot->plan[TESTED], &tested, stream));
    CALL(state, ep_combine_sync(slot->plan[BASE], &base));
    return true;
}

bool slot_update(struct rank_state *state, struct slot *slot, int routing, ep_stream stream)
{
    for (int i = 0; i < BOTH; i++) {
        ep_plan_update_args args = {.size = sizeof(args), .n_tokens = slot->n_tokens[routing]};

        if (slot->mask) {
            args.token_in_rank = at(slot, IDX + routing, i);
            args.tokens_per_expert = ints(slot, EXPERTS + routing, i);
        } else {
            args.topk_idx = at(slot, IDX + routing, i);
        }
        CALL(state, ep_plan_update(slot->plan[i], &args, i == TESTED ? stream : NULL));
    }
    slot->routing = routing;
    slot->updated = true;
    return true;
}

bool slot_metadata(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, ep_stream stream)
{
    for (int i = 0; i < BOTH; i++) {
        ep_plan_metadata args = EP_PLAN_METADATA_INIT;

        args.recv_source = ints(slot, SOURCE, i);
        args.recv_slot = slot->expanded ? ints(slot, PLACE, i) : NULL;
        args.n_recv_tokens = ints(slot, N_TOKENS, i);
        args.psum_rank = ints(slot, PSUM_RANK, i);
        args.psum_expert = ints(slot, PSUM_EXPERT, i);
        args.count_exact = ints(slot, COUNT, i);
        args.rank_prefix = ints(slot, PREFIX, i);
        args.source_stride = slot->max_tokens + 1;
        CALL(state, ep_plan_get_metadata(slot->plan[i], &args, i == TESTED ? stream : NULL));
    }
    CALL(state, ep_stream_sync(comms[BASE], NULL));
    return true;
}

bool slot_once(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, int routing, ep_stream stream)
{
    struct slot once = *slot;

    for (int i = 0; i < BOTH; i++)
        TRY(slot_make_plan(state, comms[i], slot, i, routing, -1, i == TESTED ? stream : NULL, &once.plan[i]));
    TRY(slot_dispatch(state, &once, stream));
    TRY(slot_combine(state, &once, stream));
    for (int i = 0; i < BOTH; i++)
        ep_plan_free(once.plan[i]);
    return true;
}

/* --- copies in stream order -------------------------------------------------------------------------------------- */

/* A sum of poison is finite, too. */
bool slot_echo(struct rank_state *state, ep_comm *comm, struct slot *slot, ep_stream stream)
{
    return slot->dtype != EP_BF16 || mirror_queue_copy(state, comm, &slot->b[ANSWER], &slot->b[RECV_X], stream);
}

bool slot_snapshot(struct rank_state *state, ep_comm *comm, struct slot *slot, ep_stream stream)
{
    return mirror_queue_copy(state, comm, &slot->b[SNAPSHOT], &slot->b[OUT], stream);
}

/* --- what a plan knows ------------------------------------------------------------------------------------------- */

bool slot_compare_sources(struct rank_state *state, const struct slot *slot)
{
    ep_plan_info info = EP_PLAN_INFO_INIT;
    int32_t *all;
    size_t n;

    CALL(state, ep_plan_get_info(slot->plan[BASE], &info));
    if (info.n_recv < 0)
        return fail(state, "a plan without counts");
    n = (size_t)info.n_recv;
    all = calloc(4 * n + 1, sizeof(*all));
    if (!all)
        return fail(state, "no memory");
    CALL(state, ep_plan_get_sources(slot->plan[TESTED], all, all + n));
    CALL(state, ep_plan_get_sources(slot->plan[BASE], all + 2 * n, all + 3 * n));
    if (memcmp(all, all + 2 * n, 2 * n * sizeof(*all)) != 0)
        return fail(state, "ep_plan_get_sources differs");
    free(all);
    return true;
}

static bool same(const void *a, const void *b, size_t bytes)
{
    return !a == !b && (!a || memcmp(a, b, bytes) == 0);
}

bool slot_compare_info(struct rank_state *state, const struct slot *slot)
{
    ep_plan_info a = EP_PLAN_INFO_INIT, b = EP_PLAN_INFO_INIT;
    int32_t n[BOTH];
    size_t local;

    CALL(state, ep_plan_get_info(slot->plan[TESTED], &a));
    CALL(state, ep_plan_get_info(slot->plan[BASE], &b));
    CALL(state, ep_plan_get_tokens(slot->plan[TESTED], NULL, &n[TESTED]));
    CALL(state, ep_plan_get_tokens(slot->plan[BASE], NULL, &n[BASE]));
    local = (size_t)a.n_local_experts;
    /* Its first use is still queued, or there was none, and more plans that await theirs made it known. */
    if (slot->fixed && (a.n_recv < 0 || b.n_recv < 0))
        a.n_recv = b.n_recv = -1;
    if (a.n_recv != b.n_recv || a.out_rows != b.out_rows || a.n_tokens != b.n_tokens || n[TESTED] != n[BASE] ||
        n[TESTED] != slot->n_tokens[slot->routing] || a.topk != b.topk || a.n_experts != b.n_experts ||
        a.n_local_experts != b.n_local_experts || a.flags != b.flags)
        return fail(state, "ep_plan_get_info differs: rows %lld of %lld and %lld of %lld, tokens %d (%d) and %d (%d)",
                    (long long)a.n_recv, (long long)a.out_rows, (long long)b.n_recv, (long long)b.out_rows, a.n_tokens,
                    n[TESTED], b.n_tokens, n[BASE]);
    if (a.n_recv >= 0 && (a.n_send != b.n_send || a.n_wire != b.n_wire || a.n_net != b.n_net ||
                          !same(a.recv_per_expert, b.recv_per_expert, local * sizeof(int32_t)) ||
                          !same(a.recv_from_rank, b.recv_from_rank, (size_t)(state->nranks + 1) * sizeof(int64_t)) ||
                          !same(a.expert_start, b.expert_start, (local + 1) * sizeof(int64_t))))
        return fail(state, "the counts of ep_plan_get_info differ");
    return true;
}
