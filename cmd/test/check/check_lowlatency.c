/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_lowlatency.c - the low-latency matrix.
 *
 * Each case uses both buffers of the double buffering: two dispatches, then their two combines in order. The reply to
 * each selection of a token is a row of its own, so that a wrong row is detected.
 */
#include "check_run.h"
#include "common/memory.h"
#include "number_formats.h"
#include "random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum ll_format { LL_BF16 = 0, LL_FP8_F32, LL_FP8_ROUNDED, LL_FP8_UE8M0, LL_NVFP4, LL_MXFP8 };

static const struct {
    const char *name;
    int dtype, scale_type;                 /* scale_type 0: no scales */
    unsigned short row_bytes, scale_bytes; /* of EP_SCALE_BLOCK elements */
    unsigned short block;                  /* elements with a scale, where these are fewer; 0: EP_SCALE_BLOCK */
    bool rounded;                          /* scales are powers of two */
} ll_formats[] = {
    [LL_BF16] = {"bf16", EP_BF16, 0, 2 * EP_SCALE_BLOCK, 0, 0, false},
    [LL_FP8_F32] = {"fp8 f32 scales", EP_F8E4M3, EP_F32, EP_SCALE_BLOCK, 4, 0, false},
    [LL_FP8_ROUNDED] = {"fp8 rounded f32 scales", EP_F8E4M3, EP_F32, EP_SCALE_BLOCK, 4, 0, true},
    [LL_FP8_UE8M0] = {"fp8 ue8m0", EP_F8E4M3, EP_UE8M0, EP_SCALE_BLOCK, 1, 0, true},
    [LL_NVFP4] = {"nvfp4", EP_F4E2M1, EP_F8E4M3, EP_SCALE_BLOCK / 2, 8, 16, false},
    [LL_MXFP8] = {"mxfp8", EP_F8E4M3, EP_UE8M0_32, EP_SCALE_BLOCK, 4, 32, false},
};

#define GLOBAL_SCALE 37.5f

struct ll_case {
    enum data_kind kind;
    bool hook, zero_copy;
    enum ll_format format;
    bool sources;  /* recv_source and recv_range are requested; and a global scale */
    bool swizzled; /* scales in tiles */
    int idx_type;
    bool symmetric;
    uint64_t seed;
};

struct ll_state {
    struct check_run *run;
    ep_ll *ll;
    int n_tokens;  /* of this rank */
    int64_t slots; /* rows of one expert, R*M */
    struct reference_layout layout;
    struct reference_scratch scratch;
    /* [0]: ordinary memory, [1]: symmetric. */
    unsigned char *rows[2], *scales[2];
    int32_t *counts, *sources;
    int64_t *ranges;
    void *topk_idx;
    float *x_weights;
    float *global_scale;
    uint16_t *x, *out;
    uint16_t expected[EP_MAX_HIDDEN], input[EP_MAX_HIDDEN]; /* one row each */
    float factors[EP_MAX_HIDDEN / EP_SCALE_BLOCK];          /* of one row */
    struct ll_case c;
};

/* One dispatch and its combine. */
struct ll_step {
    struct ll_state *state;
    struct data data;
    uint16_t *x;  /* combine: input in host memory ... */
    void *offers; /* ... and as passed to the library */
};

static struct ll_case make_case(const struct check_run *run, int index)
{
    static const enum ll_format formats[2][4] = {{LL_BF16, LL_FP8_F32, LL_FP8_ROUNDED, LL_FP8_UE8M0},
                                                 {LL_BF16, LL_NVFP4, LL_MXFP8, LL_FP8_UE8M0}};
    enum ll_format format = formats[index / 16][index / 2 % 4];
    bool blocks = ll_formats[format].block;

    return (struct ll_case){
        .zero_copy = index % 2 == 1,
        .format = format,
        .hook = index / 8 % 2 == 1,
        .swizzled = blocks && index % 3 != 0,
        .kind = index / 16 && !blocks ? DATA_BF16_CONSTANT : DATA_BF16_RANDOM,
        .sources = index % 5 != 4,
        .idx_type = index / 3 % 2 ? EP_I64 : EP_I32,
        .symmetric = check_is_symmetric(run, index),
        .seed = random_key(run->parameters.seed, 1, (uint64_t)index, 0),
    };
}

static bool describe(const struct check_run *run, int index, char ret_name[CHECK_NAME_BYTES])
{
    struct ll_case c = make_case(run, index);

    snprintf(ret_name, CHECK_NAME_BYTES, "%s, %s%s%s, %s", c.kind == DATA_BF16_RANDOM ? "random" : "constant",
             ll_formats[c.format].name, c.swizzled ? " in tiles" : "", c.hook ? ", hook" : "",
             c.zero_copy ? "zero copy" : "copy");
    return c.format == LL_BF16 ? run->parameters.bf16 : run->parameters.fp8;
}

static const char *validate(const struct check_run *run)
{
    if (run->parameters.hidden % EP_SCALE_BLOCK)
        return "hidden must be a multiple of 128 for low latency";
    if (run->parameters.fp8 && run->parameters.hidden % (4 * EP_SCALE_BLOCK))
        return "hidden must be a multiple of 512 for packed ue8m0 scales; choose dtype bf16 or another hidden size";
    return NULL;
}

/* --- state of the job --- */

static ep_status new_buffers(struct ll_state *state, int max_tokens)
{
    struct check_run *run = state->run;
    size_t hidden = (size_t)run->parameters.hidden, topk = (size_t)run->group.topk;
    int64_t n_local = run->group.n_local, n_slots = n_local * state->slots, n_tiles = (state->slots + 127) / 128;

    for (int where = CHECK_SYMMETRIC; where >= CHECK_ORDINARY; where--)
        if (run->parameters.memory == CHECK_ALTERNATE || (int)run->parameters.memory == where) {
            state->rows[where] = check_alloc(run, n_slots, hidden * sizeof(uint16_t), where == CHECK_SYMMETRIC);
            state->scales[where] =
                check_alloc(run, n_local * n_tiles * 128, hidden / 16, where == CHECK_SYMMETRIC); /* those of nvfp4 */
        }
    state->counts = check_alloc(run, n_local, sizeof(int32_t), false);
    state->sources = check_alloc(run, n_slots, sizeof(int32_t), false);
    state->ranges = check_alloc(run, n_local * run->group.n_ranks, sizeof(int64_t), false);
    state->global_scale = check_alloc(run, 1, sizeof(float), false);
    state->topk_idx = check_alloc(run, max_tokens, topk * sizeof(int64_t), false);
    state->x = check_alloc(run, max_tokens, hidden * sizeof(uint16_t), false);
    state->x_weights = check_alloc(run, max_tokens, topk * sizeof(float), false);
    state->out = check_alloc(run, max_tokens, hidden * sizeof(uint16_t), false);
    return check_buffers(run);
}

/* The room of an expert for a rank's rows: its tokens, or more where tokens select an expert more than once. */
static int most_rows(const struct check_run *run)
{
    const struct reference_group *group = &run->group;
    int most = run->n_tokens ? run->n_tokens : 1;

    for (int rank = 0; rank < group->n_ranks; rank++) {
        size_t n = (size_t)group->n_tokens[rank] * (size_t)group->topk;
        int rows[EP_MAX_EXPERTS] = {0};

        for (size_t i = 0; i < n; i++)
            if (group->experts[rank][i] >= 0 && ++rows[group->experts[rank][i]] > most)
                most++;
    }
    return most;
}

static ep_status begin(struct check_run *run, void **ret_state)
{
    struct ll_state *state = memory_new(1, sizeof(*state));
    const struct reference_group *group = &run->group;
    ep_ll_config config = EP_LL_CONFIG_INIT;
    int rank = run->ctx->rank, hidden = run->parameters.hidden;
    int max_tokens = most_rows(run);

    *ret_state = state;
    state->run = run;
    state->n_tokens = group->n_tokens[rank];
    state->slots = (int64_t)group->n_ranks * max_tokens;
    reference_layout_init(group, rank, true, 1, &state->layout);
    config.max_tokens = max_tokens;
    config.hidden = hidden;
    config.n_experts = group->n_experts;
    config.topk = group->topk;
    CHECK_CALL(run, ep_ll_new, run->ctx->comm, &config, &state->ll);
    return new_buffers(state, max_tokens);
}

static void end(void *opaque)
{
    struct ll_state *state = opaque;

    ep_ll_free(state->ll);
    reference_layout_done(&state->layout);
    free(state);
}

/* --- data --- */

/* The row of a token. One in eight has a block of zeros, one in eight a block below the smallest amax. */
static void input_row(const struct data *data, int rank, int token, uint16_t *ret_row)
{
    data_bf16_row(data, rank, token, ret_row);
    if (token % 8 == 7)
        memset(ret_row, 0, EP_SCALE_BLOCK * sizeof(*ret_row));
    for (int i = 0; token % 8 == 3 && i < EP_SCALE_BLOCK; i++)
        ret_row[i] = format_to_bf16(ldexpf(format_from_bf16(ret_row[i]), -20));
}

static size_t row_bytes_of(const struct ll_state *state)
{
    return (size_t)state->run->parameters.hidden / EP_SCALE_BLOCK * ll_formats[state->c.format].row_bytes;
}

static size_t scale_bytes_of(const struct ll_state *state)
{
    return (size_t)state->run->parameters.hidden / EP_SCALE_BLOCK * ll_formats[state->c.format].scale_bytes;
}

/* Bytes of all scales. */
static size_t all_scales_of(const struct ll_state *state)
{
    size_t rows = (size_t)state->slots, n_local = (size_t)state->run->group.n_local;

    return n_local * (state->c.swizzled ? (rows + 127) / 128 * 128 : rows) * scale_bytes_of(state);
}

/* Index of the first row of a local expert in the output of dispatch. */
static int64_t first_slot(const struct ll_state *state, int local)
{
    return local * state->slots;
}

static int64_t count_of(const struct ll_state *state, int local)
{
    return state->layout.expert_start[local + 1] - state->layout.expert_start[local];
}

static const struct reference_row *row_of(const struct ll_state *state, int local, int64_t i)
{
    return &state->layout.rows[state->layout.expert_start[local] + i];
}

/* --- dispatch --- */

typedef void (*part_fn)(struct mirrors *mirrors, void *host, size_t bytes);

/* Calls `act` for the received rows of each expert and one row more, and the guard: all R*M rows would take too long.
 */
static void each_part(struct ll_state *state, unsigned char *buffer, size_t row_bytes, part_fn act)
{
    struct mirrors *mirrors = &state->run->mirrors;
    int n_local = state->run->group.n_local;

    for (int local = 0; local < n_local; local++) {
        size_t n = (size_t)(count_of(state, local) + 1 < state->slots ? count_of(state, local) + 1 : state->slots);

        act(mirrors, buffer + (size_t)first_slot(state, local) * row_bytes, n * row_bytes);
    }
    act(mirrors, buffer + (size_t)first_slot(state, n_local) * row_bytes, CHECK_GUARD_BYTES);
}

/* Calls `act` for all outputs of a dispatch, to poison or to pull them. */
static void each_output(struct ll_state *state, part_fn act)
{
    struct mirrors *mirrors = &state->run->mirrors;
    size_t n_local = (size_t)state->run->group.n_local;

    each_part(state, state->rows[state->c.symmetric], row_bytes_of(state), act);
    if (state->c.swizzled)
        act(mirrors, state->scales[state->c.symmetric], all_scales_of(state) + CHECK_GUARD_BYTES);
    else
        each_part(state, state->scales[state->c.symmetric], scale_bytes_of(state), act);
    act(mirrors, state->counts, n_local * sizeof(int32_t) + CHECK_GUARD_BYTES);
    act(mirrors, state->sources, n_local * (size_t)state->slots * sizeof(int32_t) + CHECK_GUARD_BYTES);
    act(mirrors, state->ranges, n_local * (size_t)state->run->group.n_ranks * sizeof(int64_t) + CHECK_GUARD_BYTES);
}

static void load_dispatch(const struct ll_step *step)
{
    struct ll_state *state = step->state;
    const struct reference_group *group = &state->run->group;
    int rank = state->run->ctx->rank;
    size_t n = (size_t)state->n_tokens * (size_t)group->topk, hidden = (size_t)step->data.hidden;

    if (n)
        memcpy(state->x_weights, group->weights[rank], n * sizeof(float));
    for (int token = 0; token < state->n_tokens; token++)
        input_row(&step->data, rank, token, state->x + (size_t)token * hidden);
    *state->global_scale = GLOBAL_SCALE;
    mirrors_push(&state->run->mirrors, state->global_scale, sizeof(float));
    check_load_choices(state->run, state->c.idx_type, state->topk_idx);
    mirrors_push(&state->run->mirrors, state->x_weights, n * sizeof(float));
    mirrors_push(&state->run->mirrors, state->x, (size_t)state->n_tokens * hidden * sizeof(uint16_t));
}

static ep_status start_dispatch(const struct ll_step *step)
{
    struct ll_state *state = step->state;
    const struct ll_case *c = &state->c;
    ep_ll_dispatch_args args = EP_LL_DISPATCH_ARGS_INIT;

    args.x = check_address(state->run, state->x);
    args.topk_idx = check_address(state->run, state->topk_idx);
    args.idx_type = c->idx_type;
    args.n_tokens = state->n_tokens;
    args.out_dtype = ll_formats[c->format].dtype;
    args.scale_type = ll_formats[c->format].scale_type;
    args.recv_x = check_address(state->run, state->rows[c->symmetric]);
    if (args.scale_type)
        args.recv_scales = check_address(state->run, state->scales[c->symmetric]);
    args.recv_count = check_address(state->run, state->counts);
    args.recv_source = c->sources ? check_address(state->run, state->sources) : NULL;
    args.recv_range = c->sources ? check_address(state->run, state->ranges) : NULL;
    /* ue8m0 scales are powers of two even without the flag. */
    args.flags = (c->hook ? EP_LL_RECV_HOOK : 0) | (c->format == LL_FP8_ROUNDED ? EP_LL_ROUND_SCALE : 0) |
                 (c->swizzled ? EP_LL_SWIZZLED_SCALES : 0);
    args.global_scale = c->format == LL_NVFP4 && c->sources ? check_address(state->run, state->global_scale) : NULL;
    CHECK_CALL(state->run, ep_ll_dispatch_sync, state->ll, &args);
    if (c->hook)
        CHECK_CALL(state->run, ep_ll_finish_sync, state->ll, 0);
    return EP_OK;
}

/* nvfp4 and mxfp8. */
static void verify_blocks(const struct ll_step *step, int64_t slot, const struct reference_row *row)
{
    struct ll_state *state = step->state;
    const struct ll_case *c = &state->c;
    uint8_t expected[EP_MAX_HIDDEN / 16], gathered[EP_MAX_HIDDEN / 16];
    size_t row_bytes = row_bytes_of(state), scale_bytes = scale_bytes_of(state), words = scale_bytes / 4;
    size_t expert = (size_t)(slot / state->slots), at = (size_t)(slot % state->slots);
    size_t tiles = ((size_t)state->slots + 127) / 128;
    const unsigned char *scales = state->scales[c->symmetric] + (size_t)slot * scale_bytes;

    reference_quantize_blocks(state->input, step->data.hidden, ll_formats[c->format].block,
                              c->sources ? GLOBAL_SCALE : 1, (uint8_t *)state->expected, expected);
    check_row(state->run, "recv_x", slot, row, 1, row_bytes, state->expected,
              state->rows[c->symmetric] + (size_t)slot * row_bytes);
    for (size_t word = 0; c->swizzled && word < words; word++)
        memcpy(gathered + 4 * word,
               state->scales[c->symmetric] +
                   ((((expert * tiles + at / 128) * words + word) * 32 + at % 32) * 4 + at % 128 / 32) * 4,
               4);
    check_row(state->run, "recv_scales", slot, row, 1, scale_bytes, expected, c->swizzled ? gathered : scales);
}

static void verify_row(const struct ll_step *step, int64_t slot, const struct reference_row *row)
{
    struct ll_state *state = step->state;
    const struct ll_case *c = &state->c;
    struct check_run *run = state->run;
    size_t row_bytes = row_bytes_of(state), scale_bytes = scale_bytes_of(state);
    const unsigned char *got = state->rows[c->symmetric] + (size_t)slot * row_bytes;
    int32_t packed[EP_MAX_HIDDEN / EP_SCALE_BLOCK / 4];
    bool is_packed = c->format == LL_FP8_UE8M0;

    input_row(&step->data, row->rank, row->token, state->input);
    if (c->format == LL_BF16) {
        check_row(run, "recv_x", slot, row, sizeof(uint16_t), row_bytes, state->input, got);
        return;
    }
    if (ll_formats[c->format].block) {
        verify_blocks(step, slot, row);
        return;
    }
    reference_quantize(state->input, step->data.hidden, ll_formats[c->format].rounded, (uint8_t *)state->expected,
                       state->factors);
    check_row(run, "recv_x", slot, row, 1, row_bytes, state->expected, got);
    if (is_packed)
        reference_pack_ue8m0(state->factors, step->data.hidden / EP_SCALE_BLOCK, packed);
    check_row(run, "recv_scales", slot, row, 4, scale_bytes, is_packed ? (void *)packed : (void *)state->factors,
              state->scales[c->symmetric] + (size_t)slot * scale_bytes);
}

/* Verifies recv_source and recv_range of one expert. */
static void verify_sources(struct ll_state *state, int local)
{
    struct check_run *run = state->run;
    const int32_t *token = state->sources + first_slot(state, local);
    const int64_t *range = state->ranges + (int64_t)local * run->group.n_ranks;
    int64_t begin = 0;

    for (int64_t i = 0; i < count_of(state, local); i++)
        if (token[i] != row_of(state, local, i)->token) {
            check_mismatch(run, "recv_source of expert %d row %" PRId64 ": expected %d, got %d", local, i,
                           row_of(state, local, i)->token, token[i]);
            return;
        }
    for (int rank = 0; rank < run->group.n_ranks; rank++) {
        int64_t n = 0;

        while (begin + n < count_of(state, local) && row_of(state, local, begin + n)->rank == rank)
            n++;
        if ((range[rank] & UINT32_MAX) != n || (n > 0 && range[rank] >> 32 != begin)) {
            check_mismatch(run,
                           "recv_range of expert %d from rank %d: expected %" PRId64 " rows from %" PRId64
                           ", got %" PRId64 " from %" PRId64,
                           local, rank, n, begin, range[rank] & UINT32_MAX, range[rank] >> 32);
            return;
        }
        begin += n;
    }
}

static void verify_dispatch(const struct ll_step *step)
{
    struct ll_state *state = step->state;
    const struct ll_case *c = &state->c;
    struct check_run *run = state->run;
    int n_local = run->group.n_local;
    size_t all = (size_t)first_slot(state, n_local);

    check_equal_array(run, "recv_count", n_local, 4, state->layout.recv_per_expert, state->counts);
    for (int local = 0; local < n_local; local++) {
        for (int64_t i = 0; i < count_of(state, local); i++)
            verify_row(step, first_slot(state, local) + i, row_of(state, local, i));
        if (c->sources)
            verify_sources(state, local);
    }
    check_guard(run, "recv_x", state->rows[c->symmetric], all * row_bytes_of(state));
    check_guard(run, "recv_scales", state->scales[c->symmetric], all_scales_of(state));
    check_guard(run, "recv_count", state->counts, (size_t)n_local * sizeof(int32_t));
    check_guard(run, "recv_source", state->sources, c->sources ? all * sizeof(int32_t) : 0);
    check_guard(run, "recv_range", state->ranges,
                c->sources ? (size_t)n_local * (size_t)run->group.n_ranks * sizeof(int64_t) : 0);
}

static ep_status dispatch(const struct ll_step *step)
{
    struct ll_state *state = step->state;

    each_output(state, mirrors_poison);
    load_dispatch(step);
    CHECK_TRY(start_dispatch(step));
    each_output(state, mirrors_pull);
    verify_dispatch(step);
    return check_buffers(state->run);
}

/* --- combine --- */

/* The input row of combine: a reference_reply_fn for a step. */
static void reply_row(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct ll_step *step = context;

    (void)rank;
    data_reply(&step->data, k, source, token, ret_row);
}

/* Writes the rows of the experts. The row after the last of each expert is NaN, to detect its use in a sum. */
static void load_combine(struct ll_step *step)
{
    struct ll_state *state = step->state;
    const struct reference_group *group = &state->run->group;
    int rank = state->run->ctx->rank;
    size_t hidden = (size_t)step->data.hidden;

    for (int local = 0; local < group->n_local; local++) {
        size_t row_bytes = hidden * sizeof(uint16_t), at = (size_t)first_slot(state, local) * row_bytes;
        uint16_t *out = step->x + (size_t)first_slot(state, local) * hidden;
        int64_t n = count_of(state, local);

        for (int64_t i = 0; i < n; i++) {
            const struct reference_row *row = row_of(state, local, i);

            reply_row(step, rank, row->k, row->rank, row->token, out + (size_t)i * hidden);
        }
        if (n < state->slots)
            memset(out + (size_t)n * hidden, 0xff, hidden * sizeof(*out));
        n += n < state->slots;
        mirrors_push_to(&state->run->mirrors, (char *)step->offers + at, out, (size_t)n * row_bytes);
    }
}

static ep_status start_combine(const struct ll_step *step)
{
    struct ll_state *state = step->state;
    const struct ll_case *c = &state->c;
    ep_ll_combine_args args = EP_LL_COMBINE_ARGS_INIT;

    args.x = step->offers;
    args.topk_idx = check_address(state->run, state->topk_idx);
    args.idx_type = c->idx_type;
    args.n_tokens = state->n_tokens;
    args.topk_weights = check_address(state->run, state->x_weights);
    args.out = check_address(state->run, state->out);
    args.flags = (c->hook ? EP_LL_RECV_HOOK : 0) | (c->zero_copy ? EP_LL_ZERO_COPY : 0) |
                 (state->run->parameters.no_partial_reduce ? EP_LL_NO_PARTIAL_REDUCE : 0);
    CHECK_CALL(state->run, ep_ll_combine_sync, state->ll, &args);
    if (c->hook)
        CHECK_CALL(state->run, ep_ll_finish_sync, state->ll, 0);
    return EP_OK;
}

static void verify_combine(struct ll_step *step)
{
    struct ll_state *state = step->state;
    struct check_run *run = state->run;
    struct reference_combine combine = {.hidden = step->data.hidden,
                                        .no_partial_reduce = run->parameters.no_partial_reduce,
                                        .reply = reply_row,
                                        .context = step};
    size_t hidden = (size_t)step->data.hidden;

    for (int token = 0; token < state->n_tokens; token++) {
        const uint16_t *out = state->out + (size_t)token * hidden;
        const struct reference_row row = {.rank = run->ctx->rank, .token = token};

        reference_ll_combine_row(&run->group, &combine, run->ctx->rank, token, &state->scratch, state->expected);
        check_row(run, "out", token, &row, sizeof(*out), hidden * sizeof(*out), state->expected, out);
    }
    check_guard(run, "out", state->out, (size_t)state->n_tokens * hidden * sizeof(uint16_t));
}

static ep_status combine_step(struct ll_step *step)
{
    struct ll_state *state = step->state;
    unsigned char *rows = state->rows[state->c.symmetric];
    size_t used = (size_t)state->n_tokens * (size_t)step->data.hidden * sizeof(uint16_t);
    void *buffer = check_address(state->run, rows);

    if (state->c.zero_copy)
        CHECK_CALL(state->run, ep_ll_get_combine_buffer, state->ll, &buffer);
    step->offers = buffer;
    /* With device memory, the mirror of the received rows serves as the host copy of either buffer. */
    step->x = state->run->ctx->memory ? (void *)rows : buffer;
    load_combine(step);
    check_poison(state->run, state->out, used);
    CHECK_TRY(start_combine(step));
    check_pull(state->run, state->out, used);
    verify_combine(step);
    return check_buffers(state->run);
}

static ep_status run_case(struct check_run *run, void *opaque, int index)
{
    struct ll_state *state = opaque;
    static const char *const phases[] = {"dispatch", "second dispatch", "combine", "second combine"};
    struct ll_step steps[2];
    ep_status status = EP_OK;

    state->c = make_case(run, index);
    for (int i = 0; i < 2; i++)
        steps[i] = (struct ll_step){
            .state = state,
            .data = {.kind = state->c.kind, .seed = state->c.seed + (uint64_t)i, .hidden = run->parameters.hidden},
        };
    for (int i = 0; i < 4 && status == EP_OK; i++) {
        run->phase = phases[i];
        status = i < 2 ? dispatch(&steps[i]) : combine_step(&steps[i - 2]);
    }
    return status;
}

const struct check_matrix check_matrix_lowlatency = {
    .name = "lowlatency",
    .count = 32,
    .describe = describe,
    .validate = validate,
    .begin = begin,
    .run = run_case,
    .end = end,
};
