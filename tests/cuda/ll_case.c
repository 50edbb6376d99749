/* SPDX-License-Identifier: Apache-2.0 */
#include "ll_case.h"

#include "case.h"

#include <epkit/cuda.h>
#include <stdlib.h>
#include <string.h>

#define SPOILT 0x42 /* all bytes of a weight that is 48.6 */

enum { X, IDX, WEIGHTS, ANSWER, RECV_X, RECV_SCALES, RECV_COUNT, RECV_SOURCE, RECV_RANGE, OUT, N_BUFFERS };

static const char *const names[N_BUFFERS] = {"x",          "topk_idx",    "topk_weights", "the experts' answer",
                                             "recv_x",     "recv_scales", "recv_count",   "recv_source",
                                             "recv_range", "out"};

const char *const spoil_names[N_SPOILS] = {
    [SPOIL_TWICE] = "an expert twice",
    [SPOIL_BEYOND] = "an expert beyond the last",
    [SPOIL_BELOW] = "an expert below -1",
    [SPOIL_WIDE] = "an expert beyond 32 bits",
    [SPOIL_OTHER] = "a combine with other experts than its dispatch",
};

struct exchange {
    uint32_t flags;   /* of the last call: TEST_ASYNC applies to its second half, too */
    uint64_t call[2]; /* number of the dispatch on the host and on the device */
    const struct ll_pair *pair;
    struct ll_round round;
    struct mirror b[N_BUFFERS];
};

int ll_pair_open(const struct group *group, const ep_ll_config *config, struct ll_pair *ret_pair)
{
    ep_ll_config mine = *config;

    *ret_pair = (struct ll_pair){.group = group, .config = *config};
    /* The test stores EP_LL_NO_PARTIAL_REDUCE, a flag of the combine, with the flags of the layout. */
    mine.flags &= ~EP_LL_NO_PARTIAL_REDUCE;
    CALL(ep_ll_new(group->host, &mine, &ret_pair->host));
    CALL(ep_ll_new(group->cuda, &mine, &ret_pair->cuda));
    return 0;
}

void ll_pair_close(struct ll_pair *pair)
{
    ep_ll_free(pair->cuda);
    ep_ll_free(pair->host);
    pair->cuda = pair->host = NULL;
}

/* --- data ------------------------------------------------------------------------------------------------------- */

static bool is_fp8(const struct exchange *x)
{
    return x->round.format != LL_BF16;
}

static int topk_of(const struct exchange *x)
{
    return x->round.topk ? x->round.topk : x->pair->config.topk;
}

/* Rows of one expert, and of all here. */
static size_t rows_of_expert(const struct exchange *x)
{
    return (size_t)x->pair->group->nranks * (size_t)x->pair->config.max_tokens;
}

static int local_experts(const struct exchange *x)
{
    return x->pair->config.n_experts / x->pair->group->nranks;
}

static size_t scale_bytes(const struct exchange *x)
{
    size_t blocks = (size_t)x->pair->config.hidden / EP_SCALE_BLOCK;

    return !is_fp8(x) ? 0 : x->round.format == LL_UE8M0 ? blocks : blocks * 4;
}

static int make_buffers(struct exchange *x)
{
    const struct ll_round *round = &x->round;
    size_t n = (size_t)round->n_tokens, topk = (size_t)topk_of(x), hidden = (size_t)x->pair->config.hidden;
    size_t local = (size_t)local_experts(x), rows = local * rows_of_expert(x);
    const struct {
        size_t n, bytes;
    } sizes[N_BUFFERS] = {
        [X] = {n, hidden * 2},
        [IDX] = {n, topk * ep_dtype_bytes((ep_dtype)round->idx_type)},
        [WEIGHTS] = {n, topk * 4},
        [ANSWER] = {round->echo ? 0 : rows, hidden * 2},
        [RECV_X] = {rows, hidden * (is_fp8(x) ? 1 : 2)},
        [RECV_SCALES] = {rows, scale_bytes(x)},
        [RECV_COUNT] = {local, 4},
        [RECV_SOURCE] = {round->sources ? rows : 0, 4},
        [RECV_RANGE] = {round->sources ? local : 0, 8 * (size_t)x->pair->group->nranks},
        [OUT] = {n, hidden * 2},
    };

    for (int i = 0; i < N_BUFFERS; i++) {
        bool symmetric = round->symmetric && (i == RECV_X || i == RECV_SCALES || i == ANSWER);

        TRY(mirror_new(x->pair->group, names[i], sizes[i].n * sizes[i].bytes, symmetric ? SYMMETRIC : ORDINARY,
                       &x->b[i]));
        x->b[i].row_bytes = sizes[i].bytes;
    }
    return 0;
}

static void fill_inputs(struct exchange *x)
{
    const struct ll_round *round = &x->round;
    const ep_ll_config *config = &x->pair->config;
    uint64_t random = round->seed;
    struct routing routing = {.n_tokens = round->n_tokens,
                              .topk = topk_of(x),
                              .n_experts = config->n_experts,
                              .nranks = x->pair->group->nranks,
                              .idx_type = round->idx_type,
                              .skewed = round->skewed,
                              .holes = round->holes};

    fill_bf16((uint16_t *)(void *)x->b[X].host, x->b[X].bytes / 2, &random);
    for (size_t i = 0; i < x->b[WEIGHTS].bytes / 4; i++)
        ((float *)(void *)x->b[WEIGHTS].host)[i] = (float)(next_random(&random) % 2000) / 999.0f - 1.0f;
    fill_routing(&routing, &random, x->b[IDX].host);
}

/* The experts' results are new rows; after their last row there are only NaNs. */
static void fill_answer(struct exchange *x)
{
    size_t rows = rows_of_expert(x), row = (size_t)x->pair->config.hidden * 2;
    const int32_t *count = (const int32_t *)(const void *)x->b[RECV_COUNT].host;
    uint64_t random = x->round.seed ^ 0x5555;

    memset(x->b[ANSWER].host, 0xff, x->b[ANSWER].bytes);
    for (int e = 0; e < local_experts(x); e++)
        fill_bf16((uint16_t *)(void *)(x->b[ANSWER].host + (size_t)e * rows * row), (size_t)count[e] * row / 2,
                  &random);
}

/* --- calls ------------------------------------------------------------------------------------------------------ */

static ep_stream stream_of(const struct exchange *x, bool device)
{
    return device ? x->pair->group->stream : NULL;
}

static ep_status sync_call(struct exchange *x, bool device, ep_status status, uint32_t flags)
{
    x->flags = flags;
    return test_sync_call(device ? x->pair->group->cuda : x->pair->group->host, status, stream_of(x, device), flags);
}

static ep_status dispatch(struct exchange *x, ep_ll *ll, bool device, uint32_t flags)
{
    const struct ll_round *round = &x->round;
    ep_ll_dispatch_args args;
    unsigned char *at[N_BUFFERS];

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? x->b[i].device : x->b[i].host;
    args = args_ll_dispatch(at[X], at[IDX], round->idx_type, round->n_tokens);
    args.topk = round->topk;
    args.out_dtype = is_fp8(x) ? EP_F8E4M3 : EP_BF16;
    args.recv_x = at[RECV_X];
    if (is_fp8(x)) {
        args.scale_type = round->format == LL_UE8M0 ? EP_UE8M0 : EP_F32;
        args.recv_scales = at[RECV_SCALES];
    }
    args.recv_count = (int32_t *)(void *)at[RECV_COUNT];
    args.recv_source = round->sources ? (int32_t *)(void *)at[RECV_SOURCE] : NULL;
    args.recv_range = round->sources ? (int64_t *)(void *)at[RECV_RANGE] : NULL;
    args.flags = (flags & ~TEST_ASYNC) | (round->format == LL_ROUNDED ? EP_LL_ROUND_SCALE : 0);
    args.ret_call = &x->call[device];
    x->flags = flags;
    if (device && test_waits(stream_of(x, device), flags))
        return ep_ll_dispatch_sync(ll, &args);
    return sync_call(x, device, ep_ll_dispatch(ll, &args, stream_of(x, device)), flags);
}

static ep_status combine(struct exchange *x, ep_ll *ll, bool device, const void *rows, uint32_t flags)
{
    ep_ll_combine_args args;
    unsigned char *at[N_BUFFERS];

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? x->b[i].device : x->b[i].host;
    if (!rows)
        rows = x->round.echo ? at[RECV_X] : at[ANSWER];
    args = args_ll_combine(rows, at[IDX], x->round.idx_type, x->round.n_tokens, at[WEIGHTS], at[OUT]);
    args.topk = x->round.n_tokens % 2 ? x->round.topk : 0; /* the same */
    args.flags = (flags & ~TEST_ASYNC) | (x->pair->config.flags & EP_LL_NO_PARTIAL_REDUCE);
    args.call = x->call[device];
    x->flags = flags;
    if (device && test_waits(stream_of(x, device), flags))
        return ep_ll_combine_sync(ll, &args);
    return sync_call(x, device, ep_ll_combine(ll, &args, stream_of(x, device)), flags);
}

ep_status exchange_dispatch(struct exchange *x, uint32_t flags)
{
    return dispatch(x, x->pair->cuda, true, flags);
}

/* Copies the rows to the library's buffer in the order of the stream, as an expert's kernel would write them. */
ep_status exchange_combine(struct exchange *x, uint32_t flags)
{
    const struct mirror *from = &x->b[x->round.echo ? RECV_X : ANSWER];
    void *buffer = NULL;
    ep_status status;

    if (!(flags & EP_LL_ZERO_COPY))
        return combine(x, x->pair->cuda, true, NULL, flags);
    status = ep_ll_get_combine_buffer(x->pair->cuda, &buffer);
    if (status != EP_OK)
        return status;
    if (cudaMemcpyAsync(buffer, from->device, from->bytes, cudaMemcpyDefault, x->pair->group->stream) != cudaSuccess) {
        test_report("cudaMemcpyAsync into the combine buffer: %s", cudaGetErrorString(cudaGetLastError()));
        return EP_E_DEVICE;
    }
    return combine(x, x->pair->cuda, true, buffer, flags);
}

ep_status exchange_finish(struct exchange *x)
{
    if (test_waits(stream_of(x, true), x->flags))
        return ep_ll_finish_sync(x->pair->cuda, x->call[1]);
    return sync_call(x, true, ep_ll_finish(x->pair->cuda, x->call[1], stream_of(x, true)), x->flags);
}

static int call_dispatch(struct exchange *x)
{
    CALL(exchange_dispatch(x, x->round.dispatch_flags));
    if (x->round.dispatch_flags & EP_LL_RECV_HOOK)
        CALL(exchange_finish(x));
    return 0;
}

static int call_combine(struct exchange *x)
{
    CALL(exchange_combine(x, x->round.combine_flags));
    if (x->round.combine_flags & EP_LL_RECV_HOOK)
        CALL(exchange_finish(x));
    return 0;
}

int exchange_call_all(struct exchange **x, int n, bool overlap)
{
    for (int i = 0; i < n; i++) {
        TRY(call_dispatch(x[i]));
        if (overlap && i > 0)
            TRY(call_combine(x[i - 1]));
        if (!overlap || i == n - 1)
            TRY(call_combine(x[i]));
    }
    return 0;
}

/* --- exchanges -------------------------------------------------------------------------------------------------- */

int exchange_load(struct exchange *x, uint64_t seed)
{
    const struct group *group = x->pair->group;

    x->round.seed = seed;
    fill_inputs(x);
    for (int i = X; i <= WEIGHTS; i++)
        TRY(mirror_push(group, &x->b[i]));
    for (int i = RECV_X; i < N_BUFFERS; i++)
        TRY(mirror_poison(group, &x->b[i]));
    CALL(dispatch(x, x->pair->host, false, 0));
    if (!x->round.echo) {
        fill_answer(x);
        TRY(mirror_push(group, &x->b[ANSWER]));
    }
    CALL(combine(x, x->pair->host, false, NULL, 0));
    CUDA(cudaStreamSynchronize(group->stream));
    /* With several ranks on a device, none may still allocate or copy while another one's kernel waits for it. */
    return group_barrier(group);
}

/* One in eight is an edge value. */
static void fill_edgy_weights(struct exchange *x, uint64_t random)
{
    static const float edges[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e30f, -1e-30f, 1e-41f, -3e-39f};
    float *weights = (float *)(void *)x->b[WEIGHTS].host;

    for (size_t i = 0; i < x->b[WEIGHTS].bytes / sizeof(*weights); i++) {
        uint64_t r = next_random(&random);

        weights[i] = r >> 61 ? (float)(r % 2000) / 999.0f - 1.0f : edges[r % 8];
    }
}

int exchange_reweigh(struct exchange *x, uint64_t seed)
{
    const struct group *group = x->pair->group;

    fill_edgy_weights(x, seed);
    TRY(mirror_push(group, &x->b[WEIGHTS]));
    for (int i = RECV_X; i < N_BUFFERS; i++)
        TRY(mirror_poison(group, &x->b[i]));
    CALL(dispatch(x, x->pair->host, false, 0));
    CALL(combine(x, x->pair->host, false, NULL, 0));
    CUDA(cudaStreamSynchronize(group->stream));
    return group_barrier(group);
}

int exchange_new(const struct ll_pair *pair, const struct ll_round *round, struct exchange **ret_exchange)
{
    struct exchange *x = calloc(1, sizeof(*x));

    *ret_exchange = x;
    EXPECT(x, "no memory");
    x->pair = pair;
    x->round = *round;
    TRY(make_buffers(x));
    return exchange_load(x, round->seed);
}

int exchange_poison(struct exchange *x)
{
    for (int i = RECV_X; i < N_BUFFERS; i++)
        TRY(mirror_poison_device(x->pair->group, &x->b[i]));
    return 0;
}

int exchange_compare(struct exchange *x, const char *phase)
{
    int code = PASSED;

    for (int i = RECV_X; i < N_BUFFERS; i++)
        code |= mirror_compare(x->pair->group, &x->b[i], phase);
    return code;
}

const struct mirror *exchange_weights(const struct exchange *x)
{
    return &x->b[WEIGHTS];
}

const struct mirror *exchange_out(const struct exchange *x)
{
    return &x->b[OUT];
}

int exchange_free(struct exchange *x, bool failed)
{
    int code = PASSED;

    for (int i = 0; x && i < N_BUFFERS; i++)
        code |= mirror_free(x->pair->group, failed, &x->b[i]);
    free(x);
    return code;
}

static void set_choice(struct exchange *x, void *index, size_t at, int64_t expert)
{
    if (x->round.idx_type == EP_I64)
        ((int64_t *)index)[at] = expert;
    else
        ((int32_t *)index)[at] = (int32_t)expert;
}

/* The experts of a token: 0, 1, ... or, if it has these already, those from the middle on. */
static void fill_other_experts(struct exchange *x, void *index, size_t first)
{
    size_t topk = (size_t)topk_of(x), bytes = ep_dtype_bytes((ep_dtype)x->round.idx_type);
    int64_t begin = 0;

    for (int pass = 0; pass < 2; pass++) {
        for (size_t k = 0; k < topk; k++)
            set_choice(x, index, first + k, begin + (int64_t)k);
        if (memcmp((char *)index + first * bytes, x->b[IDX].host + first * bytes, topk * bytes) != 0)
            return;
        begin = x->pair->config.n_experts / 2;
    }
}

int exchange_spoil(struct exchange *x, enum spoil spoil)
{
    const ep_ll_config *config = &x->pair->config;
    size_t topk = (size_t)topk_of(x), first = ((size_t)x->round.n_tokens - 1) * topk;
    const int64_t last[N_SPOILS] = {
        [SPOIL_BEYOND] = config->n_experts, [SPOIL_BELOW] = -2, [SPOIL_WIDE] = INT64_C(1) << 32};
    struct mirror index = x->b[IDX];
    int code;

    EXPECT(x->round.n_tokens > 0 && (int)topk * 2 <= config->n_experts && topk > 1 &&
               (spoil != SPOIL_WIDE || x->round.idx_type == EP_I64),
           "%d tokens, top-%zu of %d experts cannot be spoilt", x->round.n_tokens, topk, config->n_experts);
    CUDA(cudaMemsetAsync(x->b[WEIGHTS].device, SPOILT, x->b[WEIGHTS].bytes, x->pair->group->stream));
    index.host = malloc(index.bytes + GUARD);
    EXPECT(index.host, "no memory for a routing");
    memcpy(index.host, x->b[IDX].host, index.bytes + GUARD);
    fill_other_experts(x, index.host, first);
    if (spoil == SPOIL_TWICE)
        memcpy(index.host + first * ep_dtype_bytes((ep_dtype)x->round.idx_type),
               index.host + (first + 1) * ep_dtype_bytes((ep_dtype)x->round.idx_type),
               ep_dtype_bytes((ep_dtype)x->round.idx_type));
    else if (spoil != SPOIL_OTHER)
        set_choice(x, index.host, first + topk - 1, last[spoil]);
    code = mirror_push(x->pair->group, &index);
    free(index.host);
    return code;
}

int exchange_mend(struct exchange *x)
{
    TRY(mirror_push(x->pair->group, &x->b[IDX]));
    return mirror_push(x->pair->group, &x->b[WEIGHTS]);
}

/* --- cases ------------------------------------------------------------------------------------------------------ */

/* Makes the library's buffer, and a device copy, before any kernel waits for this rank. */
static int prepare_zero_copy(struct ll_pair *pair)
{
    void *buffer;

    CALL(ep_ll_get_combine_buffer(pair->cuda, &buffer));
    CUDA(cudaMemcpyAsync((char *)buffer + 64, buffer, 64, cudaMemcpyDefault, pair->group->stream));
    CUDA(cudaStreamSynchronize(pair->group->stream));
    return group_barrier(pair->group);
}

static int run_rounds(const struct ll_shape *shape, struct ll_pair *pair, struct exchange **x)
{
    int code = PASSED;
    uint32_t flags = 0;

    for (int i = 0; i < shape->n_rounds; i++) {
        TRY(exchange_new(pair, &shape->round[i], &x[i]));
        flags |= shape->round[i].combine_flags;
    }
    if (flags & EP_LL_ZERO_COPY)
        TRY(prepare_zero_copy(pair));
    TRY(exchange_call_all(x, shape->n_rounds, shape->overlap));
    for (int i = 0; i < shape->n_rounds; i++) {
        static const char *const phases[LL_MAX_ROUNDS] = {"first exchange", "second exchange", "third exchange"};

        code |= exchange_compare(x[i], phases[i]);
    }
    return code;
}

int ll_case_run(const struct group *group, const struct ll_shape *shape)
{
    struct exchange *x[LL_MAX_ROUNDS] = {NULL};
    struct ll_pair pair;
    int code = ll_pair_open(group, &shape->config, &pair);

    if (!code)
        code = run_rounds(shape, &pair, x);
    /* Freeing waits for the device, and so for a peer of the same process that still needs this rank. */
    if (!(code & FAILED))
        code |= group_barrier(group);
    for (int i = 0; i < LL_MAX_ROUNDS; i++)
        code |= exchange_free(x[i], code & FAILED);
    ll_pair_close(&pair);
    return code;
}
