/* SPDX-License-Identifier: Apache-2.0 */
/*
 * No output of a call may overlap an input or another output of it. Tables hold the fields of each call with their
 * sizes, computed manually from the shapes in the headers. Every pair is placed next to each other on both sides: the
 * last overlapping address is rejected with both names, the first address without overlap is accepted.
 */
#include "bad_args.h"

#define MOST_ARGS_BYTES 256

struct buffer {
    const char *name;
    size_t offset; /* of the pointer in the arguments */
    size_t bytes;
    size_t align;
};

#define FIELD(type, field, bytes, align)                                                                               \
    {                                                                                                                  \
#field, offsetof(type, field), bytes, align                                                                    \
    }

static uintptr_t round_up(uintptr_t value, size_t align)
{
    return (value + align - 1) / align * align;
}

static void expect(const char *call, ep_status (*run)(const void *args), const void *args, const struct buffer *a,
                   const struct buffer *b, bool refused)
{
    char text[128], reversed[128];
    ep_status status;

    mock.calls = 0;
    status = run(args);
    if (!refused) {
        if (status != EP_OK)
            fail_msg("%s: %s and %s are apart, but: %s", call, a->name, b->name, ep_last_error());
        return;
    }
    snprintf(text, sizeof(text), "%s: %s overlaps %s", call, a->name, b->name);
    snprintf(reversed, sizeof(reversed), "%s: %s overlaps %s", call, b->name, a->name);
    if (status != EP_E_ARG || (strcmp(ep_last_error(), text) != 0 && strcmp(ep_last_error(), reversed) != 0))
        fail_msg("%s instead of \"%s\": %s", ep_status_name(status), text, ep_last_error());
    assert_int_equal(mock.calls, 0);
}

/* Moves b to `at` while everything else stays far away. */
static void put(unsigned char *args, const struct buffer *b, uintptr_t at)
{
    memcpy(args + b->offset, &at, sizeof(at));
}

/* Outputs come first. */
static void try_pairs(const char *call, ep_status (*run)(const void *args), const void *good, size_t bytes,
                      const struct buffer *buffers, int n_outputs, int n)
{
    const uintptr_t base = 0x7000000000;
    unsigned char args[MOST_ARGS_BYTES];

    assert_true(bytes <= sizeof(args));
    for (int i = 0; i < n; i++)
        for (int j = i + 1; j < n; j++) {
            const struct buffer *a = &buffers[i], *b = &buffers[j];
            uintptr_t behind = round_up(base + a->bytes, b->align), before = base - round_up(b->bytes, b->align);
            bool refused = i < n_outputs;

            memcpy(args, good, bytes);
            put(args, a, base);
            put(args, b, base);
            expect(call, run, args, a, b, refused);
            put(args, b, behind - b->align); /* holds the last byte of a, or more */
            expect(call, run, args, a, b, refused);
            put(args, b, behind);
            expect(call, run, args, a, b, false);
            put(args, b, before + b->align);
            expect(call, run, args, a, b, refused);
            put(args, b, before);
            expect(call, run, args, a, b, false);
        }
}

#define TRY_PAIRS(call, run, good, buffers, n_outputs)                                                                 \
    try_pairs(call, run, good, sizeof(*(good)), buffers, n_outputs, sizeof(buffers) / sizeof((buffers)[0]))

static ep_status run_dispatch(const void *args)
{
    return ep_dispatch(plan, args, NULL);
}

#define D(field, bytes, align) FIELD(ep_dispatch_args, field, bytes, align)

/* 10 tokens of 1024 fp8, K = 8, 20 rows out; out_rows counts where it is more than the plan needs. */
TEST_WITH(dispatch_buffers_are_apart, open_comm, close_comm)
{
    const struct buffer rank[] = {
        D(recv_x, 20 * 1024, 16),
        D(recv_scales, 20 * 8 * 4, 16),
        D(recv_topk_idx, 20 * 8 * 8, 16),
        D(recv_topk_weights, 20 * 8 * 4, 16),
        D(x, 10 * 1024, 16),
        D(scales, 10 * 8 * 4, 16),
        D(topk_weights, 10 * 8 * 4, 16),
    };
    const struct buffer expanded[] = {
        D(recv_x, 30 * 1024, 16), D(recv_scales, 30 * 2 * 4, 16), D(recv_topk_weights, 30 * 4, 16),
        D(x, 10 * 1024, 16),      D(scales, 10 * 2 * 4, 16),      D(topk_weights, 10 * 8 * 4, 16),
    };
    ep_dispatch_args good = good_dispatch();

    open_plan(0, 10, 20, 20);
    TRY_PAIRS("ep_dispatch", run_dispatch, &good, rank, 4);
    open_plan(EP_PLAN_EXPANDED, 10, 20, 20);
    good.recv_topk_idx = NULL;
    good.scale_type = EP_UE8M0;
    good.out_rows = 30;
    TRY_PAIRS("ep_dispatch", run_dispatch, &good, expanded, 3);
}

/* Scales are compared one by one: an output may lie in a gap between them. Scales may be before the pointer. */
TEST_WITH(strided_scales_count_without_gaps, open_comm, close_comm)
{
    const uintptr_t at = 0x200000;
    ep_dispatch_args args = good_dispatch();
    struct {
        int64_t by_token, by_block;
        intptr_t place;
        bool refused;
    } cases[] = {
        {1, 10, 0, true},                   /* by columns: 10 tokens and 8 blocks next to each other */
        {1, 10, 80 * 4 - 16, true},         /* the last of them */
        {1, 10, 80 * 4, false},             /* behind it */
        {1024, 1, 32, false},               /* the gap behind the first row is 4064 bytes */
        {1024, 1, 4096 - 640, false},       /* the end of the gap */
        {1024, 1, 4096 - 640 + 16, true},   /* the second row */
        {1024, 1, 9 * 4096 + 16, true},     /* the last row */
        {1024, 1, 9 * 4096 + 32, false},    /* behind it */
        {-1024, 1, -9 * 4096, true},        /* the last row of a table that is read backwards */
        {-1024, 1, -9 * 4096 - 640, false}, /* in front of it */
        {-1024, 1, 16, true},               /* the first row is the highest one */
        {-1024, 1, 32, false},              /* behind it */
        {0, 1, 16, true},                   /* one row for all tokens */
        {0, 1, 32, false},                  /* behind it */
    };

    open_plan(0, 10, 20, 20);
    args.scales = (const void *)at;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ep_status status;

        args.scale_stride_token = cases[i].by_token;
        args.scale_stride_block = cases[i].by_block;
        args.recv_scales = (void *)(at + (uintptr_t)cases[i].place); /* 640 bytes */
        status = run_dispatch(&args);
        if (status != (cases[i].refused ? EP_E_ARG : EP_OK))
            fail_msg("case %zu: %s (%s)", i, ep_status_name(status), ep_last_error());
        if (cases[i].refused)
            assert_string_equal(ep_last_error(), "ep_dispatch: recv_scales overlaps scales");
    }
}

/* Outputs that are not wanted, or have no rows, overlap nothing. */
TEST_WITH(empty_buffers_overlap_nothing, open_comm, close_comm)
{
    ep_dispatch_args args = good_dispatch();
    ep_combine_args combine = good_combine();

    open_plan(0, 10, 0, 0);
    args.out_rows = 0;
    args.recv_x = args.recv_scales = args.recv_topk_idx = args.recv_topk_weights = (void *)(uintptr_t)args.x;
    assert_int_equal(run_dispatch(&args), EP_OK);
    open_plan(0, 0, 20, 20);
    combine.out = (void *)(uintptr_t)combine.x;
    combine.out_topk_weights = (float *)(uintptr_t)combine.topk_weights;
    assert_int_equal(ep_combine(plan, &combine, NULL), EP_OK);
}

static ep_status run_combine(const void *args)
{
    return ep_combine(plan, args, NULL);
}

#define C(field, bytes) FIELD(ep_combine_args, field, bytes, 16)

/* 20 rows of 1024 bf16 become 10, K = 8. */
TEST_WITH(combine_buffers_are_apart, open_comm, close_comm)
{
    const struct buffer rank[] = {C(out, 10 * 2048),           C(out_topk_weights, 10 * 8 * 4), C(x, 20 * 2048),
                                  C(topk_weights, 20 * 8 * 4), C(bias[0], 10 * 2048),           C(bias[1], 10 * 2048)};
    const struct buffer expanded[] = {C(out, 10 * 2048),       C(out_topk_weights, 10 * 8 * 4), C(x, 20 * 2048),
                                      C(topk_weights, 20 * 4), C(bias[0], 10 * 2048),           C(bias[1], 10 * 2048)};
    ep_combine_args good = good_combine();

    open_plan(0, 10, 20, 20);
    TRY_PAIRS("ep_combine", run_combine, &good, rank, 2);
    /* The counts are known and smaller than out_rows of the dispatch. */
    open_plan(EP_PLAN_EXPANDED, 10, 20, 99);
    TRY_PAIRS("ep_combine", run_combine, &good, expanded, 2);
}

static ep_status run_ll_dispatch(const void *args)
{
    ep_status status = ep_ll_dispatch(ll, args, NULL);

    ll->dispatches = 0;
    memset(ll->call, 0, sizeof(ll->call));
    return status;
}

#define LD(field, bytes, align) FIELD(ep_ll_dispatch_args, field, bytes, align)

/* [L, R*M, H] = [4, 4 * 128, 640], 100 tokens, K = 4. */
TEST_WITH(ll_dispatch_buffers_are_apart, open_comm, close_comm)
{
    const struct buffer fp8[] = {
        LD(recv_x, 2048 * 640, 16),   LD(recv_scales, 2048 * 5 * 4, 16), LD(recv_count, 4 * 4, 4),
        LD(recv_source, 2048 * 4, 4), LD(recv_range, 4 * 4 * 8, 8),      LD(x, 100 * 640 * 2, 16),
        LD(topk_idx, 100 * 4 * 8, 8),
    };
    const struct buffer bf16[] = {
        LD(recv_x, 2048 * 640 * 2, 16), LD(recv_count, 4 * 4, 4), LD(recv_source, 2048 * 4, 4),
        LD(recv_range, 4 * 4 * 8, 8),   LD(x, 100 * 640 * 2, 16), LD(topk_idx, 100 * 2 * 4, 4),
    };
    ep_ll_config config = good_ll();
    ep_ll_dispatch_args good = good_ll_dispatch();

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    TRY_PAIRS("ep_ll_dispatch", run_ll_dispatch, &good, fp8, 5);
    good.flags = EP_LL_RECV_HOOK;
    good.idx_type = EP_I32;
    good.topk = 2;
    good.out_dtype = EP_BF16;
    good.scale_type = 0;
    good.recv_scales = NULL;
    TRY_PAIRS("ep_ll_dispatch", run_ll_dispatch, &good, bf16, 4);
}

/* UE8M0: one byte for 128 elements, [4, 512, 1024]. */
TEST_WITH(packed_scales_are_a_quarter, open_comm, close_comm)
{
    const struct buffer buffers[] = {LD(recv_scales, 2048 * 8, 16), LD(recv_x, 2048 * 1024, 16),
                                     LD(x, 100 * 1024 * 2, 16)};
    ep_ll_config config = good_ll();
    ep_ll_dispatch_args good = good_ll_dispatch();

    config.hidden = 1024;
    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    good.scale_type = EP_UE8M0;
    TRY_PAIRS("ep_ll_dispatch", run_ll_dispatch, &good, buffers, 2);
}

static ep_status run_ll_combine(const void *args)
{
    ep_status status;

    ll->dispatches = 1;
    ll->call[1] = (struct ep_ll_call){.number = 1, .n_tokens = 100, .max_tokens = 128, .topk = 3};
    status = ep_ll_combine(ll, args, NULL);
    return status;
}

#define LC(field, bytes, align) FIELD(ep_ll_combine_args, field, bytes, align)

TEST_WITH(ll_combine_buffers_are_apart, open_comm, close_comm)
{
    const struct buffer buffers[] = {LC(out, 100 * 640 * 2, 16), LC(x, 2048 * 640 * 2, 16),
                                     LC(topk_idx, 100 * 3 * 4, 4), LC(topk_weights, 100 * 3 * 4, 4)};
    ep_ll_config config = good_ll();
    ep_ll_combine_args good = good_ll_combine();

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    TRY_PAIRS("ep_ll_combine", run_ll_combine, &good, buffers, 1);
    good.flags = EP_LL_RECV_HOOK;
    TRY_PAIRS("ep_ll_combine", run_ll_combine, &good, buffers, 1);
}

/* --- calls on plans --- */

struct layout_call {
    ep_plan_args args;
    ep_layout layout;
};

static ep_status run_layout(const void *call)
{
    struct layout_call mine;

    memcpy(&mine, call, sizeof(mine));
    return ep_plan_layout(comm, &mine.args, &mine.layout);
}

#define LAYOUT(field, bytes, align)                                                                                    \
    {                                                                                                                  \
#field, offsetof(struct layout_call, layout) + offsetof(ep_layout, field), bytes, align                        \
    }

/* R = 4, 2 nodes, E = 256, N = 10, K = 8. */
TEST_WITH(layout_buffers_are_apart, open_comm, close_comm)
{
    const struct buffer buffers[] = {
        LAYOUT(tokens_per_rank, 4 * 4, 4),
        LAYOUT(tokens_per_node, 2 * 4, 4),
        LAYOUT(tokens_per_expert, 256 * 4, 4),
        LAYOUT(token_in_rank, 10 * 4, 1),
        {"topk_idx", offsetof(struct layout_call, args) + offsetof(ep_plan_args, topk_idx), 10 * 8 * 8, 8},
    };
    struct layout_call call = {.args = good_plan(), .layout = EP_LAYOUT_INIT};

    comm->nnodes = 2;
    TRY_PAIRS("ep_plan_layout", run_layout, &call, buffers, 4);
    comm->nnodes = 1;
}

struct sources_call {
    int32_t *ret_rank, *ret_token;
};

static ep_status run_sources(const void *call)
{
    const struct sources_call *mine = call;

    return ep_plan_get_sources(plan, mine->ret_rank, mine->ret_token);
}

TEST_WITH(source_arrays_are_apart, open_comm, close_comm)
{
    const struct buffer buffers[] = {FIELD(struct sources_call, ret_rank, 20 * 4, 4),
                                     FIELD(struct sources_call, ret_token, 20 * 4, 4)};
    struct sources_call call = {NULL, NULL};

    open_plan(0, 10, 20, 30);
    TRY_PAIRS("ep_plan_get_sources", run_sources, &call, buffers, 2);
}
