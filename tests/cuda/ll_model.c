/* SPDX-License-Identifier: Apache-2.0 */
#include "ll_model.h"

#include "mirror.h"

#include <epkit/cuda.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST 15 /* largest value; times the sum of all weights it is still exact in bf16 */

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du ^ d * 0x27d4eb2fu;

    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h = (h ^ h >> 12) * 0x297a2d39u;
    return h ^ h >> 15;
}

/* Value of element i in the row of token t of a rank. */
static uint32_t key_of(int round, int rank, int t)
{
    return mix((uint32_t)round, (uint32_t)rank, (uint32_t)t, 0x555);
}

static int value_of(uint32_t key, int i)
{
    return 1 + (int)((key * (2 * (uint32_t)i + 1) >> 28) % LARGEST);
}

/* bf16 of 0 to 256, which are exact: the upper half of the float. */
static uint16_t bf16_of(int value)
{
    float wide = (float)value;
    uint32_t bits;

    memcpy(&bits, &wide, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/*
 * Choice k of a token, MODEL_TOPK different experts. For one half of the tokens they are adjacent, so that some or all
 * rows are added up on one rank; for the other half each is on a rank of its own if there are enough.
 */
static int expert_of(const struct model *m, int round, int rank, int t, int k)
{
    uint32_t n = (uint32_t)m->group->nranks * MODEL_LOCAL;
    uint32_t first = mix((uint32_t)round, (uint32_t)rank, (uint32_t)t, 0x777);
    uint32_t step = first >> 31 ? 1 : (uint32_t)m->group->nranks;

    return (int)(((first & INT32_MAX) + (uint32_t)k * step) % n);
}

static int rank_of(int expert)
{
    return expert / MODEL_LOCAL;
}

static size_t rows_of_expert(const struct model *m)
{
    return (size_t)m->group->nranks * (size_t)m->max_tokens;
}

int model_open(const struct group *group, int max_tokens, int hidden, uint32_t ll_flags, const int *tokens,
               struct model *ret_model)
{
    struct model *m = ret_model;
    ep_ll_config config;
    size_t n = (size_t)max_tokens, row = (size_t)hidden * 2, rows;

    *m = (struct model){.group = group, .max_tokens = max_tokens, .hidden = hidden};
    for (int rank = 0; rank < group->nranks; rank++)
        m->tokens[rank] = tokens ? tokens[rank] : max_tokens;
    m->n_tokens = m->tokens[group->rank];
    rows = rows_of_expert(m) * MODEL_LOCAL;
    m->copy = malloc((rows + n) * row + GUARD);
    m->host_index = malloc(n * MODEL_TOPK * sizeof(*m->host_index));
    m->host_weights = malloc(n * MODEL_TOPK * sizeof(*m->host_weights));
    m->host_source = malloc(rows * sizeof(*m->host_source));
    EXPECT(m->copy && m->host_index && m->host_weights && m->host_source, "no memory");
    CUDA(cudaMalloc(&m->x, n * row));
    CUDA(cudaMalloc(&m->index, n * MODEL_TOPK * sizeof(int64_t)));
    CUDA(cudaMalloc(&m->weights, n * MODEL_TOPK * sizeof(float)));
    CUDA(cudaMalloc(&m->recv, rows * row + GUARD));
    CUDA(cudaMalloc(&m->count, MODEL_LOCAL * sizeof(int32_t)));
    CUDA(cudaMalloc(&m->source, rows * sizeof(int32_t)));
    CUDA(cudaMalloc(&m->range, (size_t)(MODEL_LOCAL * group->nranks) * sizeof(int64_t)));
    CUDA(cudaMalloc(&m->out, n * row + GUARD));
    config = args_ll(max_tokens, hidden, group->nranks * MODEL_LOCAL, MODEL_TOPK);
    config.flags = ll_flags & ~EP_LL_NO_PARTIAL_REDUCE;
    m->sum = ll_flags & EP_LL_NO_PARTIAL_REDUCE;
    CALL(ep_ll_new(group->cuda, &config, &m->ll));
    return 0;
}

void model_close(struct model *m)
{
    void *memory[] = {m->x, m->index, m->weights, m->recv, m->count, m->source, m->range, m->out};

    ep_ll_free(m->ll);
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++)
        cudaFree(memory[i]);
    free(m->copy);
    free(m->host_index);
    free(m->host_weights);
    free(m->host_source);
    *m = (struct model){.group = m->group};
}

int model_load(struct model *m, int round)
{
    size_t row = (size_t)m->hidden * 2, rows = rows_of_expert(m) * MODEL_LOCAL, n = (size_t)m->n_tokens;
    cudaStream_t stream = m->group->stream;
    uint16_t *x = (uint16_t *)(void *)m->copy;

    m->round = round;
    for (int t = 0; t < m->n_tokens; t++) {
        uint32_t key = key_of(round, m->group->rank, t);

        for (int i = 0; i < m->hidden; i++)
            x[(size_t)t * (size_t)m->hidden + (size_t)i] = bf16_of(value_of(key, i));
        for (int k = 0; k < MODEL_TOPK; k++) {
            m->host_index[t * MODEL_TOPK + k] = expert_of(m, round, m->group->rank, t, k);
            m->host_weights[t * MODEL_TOPK + k] = (float)(1 << k);
        }
    }
    CUDA(cudaMemcpyAsync(m->x, x, n * row, cudaMemcpyDefault, stream));
    CUDA(cudaMemcpyAsync(m->index, m->host_index, n * MODEL_TOPK * sizeof(int64_t), cudaMemcpyDefault, stream));
    CUDA(cudaMemcpyAsync(m->weights, m->host_weights, n * MODEL_TOPK * sizeof(float), cudaMemcpyDefault, stream));
    CUDA(cudaMemsetAsync(m->recv, POISON, rows * row + GUARD, stream));
    CUDA(cudaMemsetAsync(m->count, POISON, MODEL_LOCAL * sizeof(int32_t), stream));
    CUDA(cudaMemsetAsync(m->source, POISON, rows * sizeof(int32_t), stream));
    CUDA(cudaMemsetAsync(m->range, POISON, (size_t)(MODEL_LOCAL * m->group->nranks) * sizeof(int64_t), stream));
    CUDA(cudaMemsetAsync(m->out, POISON, (size_t)m->max_tokens * row + GUARD, stream));
    CUDA(cudaStreamSynchronize(stream));
    return 0;
}

ep_status model_dispatch(struct model *m, uint32_t flags)
{
    ep_ll_dispatch_args args = args_ll_dispatch(m->x, m->index, EP_I64, m->n_tokens);

    args.out_dtype = EP_BF16;
    args.recv_x = m->recv;
    args.recv_count = m->count;
    args.recv_source = m->source;
    args.recv_range = m->range;
    args.wait_cost_add = m->waited;
    args.flags = flags & ~TEST_ASYNC;
    m->flags = flags;
    if (test_waits(m->group->stream, flags))
        return ep_ll_dispatch_sync(m->ll, &args);
    return test_sync_call(m->group->cuda, ep_ll_dispatch(m->ll, &args, m->group->stream), m->group->stream, flags);
}

ep_status model_combine(struct model *m, uint32_t flags)
{
    ep_ll_combine_args args = args_ll_combine(m->recv, m->index, EP_I64, m->n_tokens, m->weights, m->out);

    args.flags = (flags & ~TEST_ASYNC) | m->sum;
    args.wait_cost_add = m->waited;
    m->flags = flags;
    if (test_waits(m->group->stream, flags))
        return ep_ll_combine_sync(m->ll, &args);
    return test_sync_call(m->group->cuda, ep_ll_combine(m->ll, &args, m->group->stream), m->group->stream, flags);
}

ep_status model_finish(struct model *m)
{
    if (test_waits(m->group->stream, m->flags))
        return ep_ll_finish_sync(m->ll, 0);
    return test_sync_call(m->group->cuda, ep_ll_finish(m->ll, 0, m->group->stream), m->group->stream, m->flags);
}

/* --- what has arrived ------------------------------------------------------------------------------------------- */

/* Number of rows that an expert of the group gets from a rank. */
static int count_of(const struct model *m, int rank, int expert)
{
    int n = 0;

    for (int t = 0; t < m->tokens[rank]; t++)
        for (int k = 0; k < MODEL_TOPK; k++)
            n += expert_of(m, m->round, rank, t, k) == expert;
    return n;
}

/* Finds by recv_range which ranks' rows are here; all rows of such a rank must be. recv_count must be the sum. */
static int find_senders(struct model *m, uint64_t *ret_here, uint64_t *ret_missing)
{
    int64_t range[MODEL_LOCAL * MAX_RANKS];
    int32_t count[MODEL_LOCAL];
    int nranks = m->group->nranks, me = m->group->rank;
    uint64_t here = 0, missing = 0;

    CUDA(cudaMemcpy(range, m->range, (size_t)(MODEL_LOCAL * nranks) * sizeof(*range), cudaMemcpyDefault));
    CUDA(cudaMemcpy(count, m->count, sizeof(count), cudaMemcpyDefault));
    for (int e = 0; e < MODEL_LOCAL; e++) {
        int64_t begin = 0;

        for (int rank = 0; rank < nranks; rank++) {
            int expected = count_of(m, rank, me * MODEL_LOCAL + e);
            int64_t got = range[e * nranks + rank] & UINT32_MAX;

            if (expected)
                *(got ? &here : &missing) |= UINT64_C(1) << rank;
            EXPECT((got == 0 || got == expected) && (!got || range[e * nranks + rank] >> 32 == begin),
                   "round %d: expert %d: recv_range of rank %d is %lld from %lld, not %d (or 0) from %lld", m->round, e,
                   rank, (long long)got, (long long)(range[e * nranks + rank] >> 32), expected, (long long)begin);
            begin += got;
        }
        EXPECT(count[e] == begin, "round %d: expert %d: recv_count is %d, and %lld by recv_range", m->round, e,
               count[e], (long long)begin);
    }
    EXPECT(!(here & missing), "round %d: of ranks 0x%llx some rows are here, and some are not", m->round,
           (unsigned long long)(here & missing));
    *ret_here = here;
    *ret_missing = missing;
    return 0;
}

/* Checks that memory is unwritten. */
static int check_poison(const struct model *m, const unsigned char *bytes, size_t n, const char *what)
{
    size_t at = 0;

    if (!n || (bytes[0] == POISON && memcmp(bytes, bytes + 1, n - 1) == 0))
        return 0;
    while (bytes[at] == POISON)
        at++;
    test_report("round %d: %s: byte %zu of the %zu after the last row is 0x%02x, which must not be written", m->round,
                what, at, n, bytes[at]);
    return FAILED;
}

static int check_row(const struct model *m, const uint16_t *row, int expert, int at, int rank, int t)
{
    uint32_t key = key_of(m->round, rank, t);

    for (int i = 0; i < m->hidden; i++) {
        uint16_t expected = bf16_of(value_of(key, i));

        EXPECT(row[i] == expected,
               "round %d: recv_x: expert %d, row %d (token %d of rank %d), element %d is 0x%04x, not 0x%04x", m->round,
               expert, at, t, rank, i, row[i], expected);
    }
    return 0;
}

/* Checks the rows of one expert, in order, and that nothing is written after them. */
static int check_expert(const struct model *m, int e, uint64_t here)
{
    size_t rows = rows_of_expert(m), row = (size_t)m->hidden * 2;
    const unsigned char *begin = m->copy + (size_t)e * rows * row;
    const int32_t *source = m->host_source + (size_t)e * rows;
    int expert = m->group->rank * MODEL_LOCAL + e, at = 0;

    for (int rank = 0; rank < m->group->nranks; rank++)
        for (int t = 0; t < m->tokens[rank] && here >> rank & 1; t++) {
            bool chosen = false;

            for (int k = 0; k < MODEL_TOPK; k++)
                chosen |= expert_of(m, m->round, rank, t, k) == expert;
            if (!chosen)
                continue;
            TRY(check_row(m, (const uint16_t *)(const void *)(begin + (size_t)at * row), e, at, rank, t));
            EXPECT(source[at] == t, "round %d: recv_source of expert %d, row %d is %d, not %d", m->round, e, at,
                   source[at], t);
            at++;
        }
    return check_poison(m, begin + (size_t)at * row, (rows - (size_t)at) * row, "recv_x");
}

int model_check_dispatch(struct model *m, uint64_t *ret_here, uint64_t *ret_missing)
{
    size_t rows = rows_of_expert(m) * MODEL_LOCAL, bytes = rows * (size_t)m->hidden * 2;

    CUDA(cudaStreamSynchronize(m->group->stream));
    TRY(find_senders(m, ret_here, ret_missing));
    CUDA(cudaMemcpy(m->copy, m->recv, bytes + GUARD, cudaMemcpyDefault));
    CUDA(cudaMemcpy(m->host_source, m->source, rows * sizeof(int32_t), cudaMemcpyDefault));
    for (int e = 0; e < MODEL_LOCAL; e++)
        TRY(check_expert(m, e, *ret_here));
    return check_poison(m, m->copy + bytes, GUARD, "recv_x");
}

/* Finds the choices of token t whose results are in the sum: the same ones in each element. */
static int find_answers(const struct model *m, const uint16_t *out, int t, int *ret_choices)
{
    uint32_t key = key_of(m->round, m->group->rank, t);
    float first = ep_bf16_to_f32(out[0]);
    int choices = first >= 0 && first < 1000 ? (int)first / value_of(key, 0) : -1;

    EXPECT(choices >= 0 && choices < 1 << MODEL_TOPK, "round %d: out: token %d begins with %g (0x%04x)", m->round, t,
           (double)first, out[0]);
    for (int i = 0; i < m->hidden; i++) {
        int value = value_of(key, i);

        EXPECT(out[i] == bf16_of(choices * value),
               "round %d: out: token %d, element %d is %g (0x%04x), not %d times %d (choices 0x%x have answered)",
               m->round, t, i, (double)ep_bf16_to_f32(out[i]), out[i], choices, value, choices);
    }
    *ret_choices = choices;
    return 0;
}

int model_check_combine(struct model *m, uint64_t *ret_here, uint64_t *ret_missing)
{
    size_t row = (size_t)m->hidden * 2, used = (size_t)m->n_tokens * row, all = (size_t)m->max_tokens * row + GUARD;
    uint64_t here = 0, missing = 0;

    CUDA(cudaStreamSynchronize(m->group->stream));
    CUDA(cudaMemcpy(m->copy, m->out, all, cudaMemcpyDefault));
    for (int t = 0; t < m->n_tokens; t++) {
        int choices;

        TRY(find_answers(m, (const uint16_t *)(const void *)(m->copy + (size_t)t * row), t, &choices));
        for (int k = 0; k < MODEL_TOPK; k++)
            *(choices >> k & 1 ? &here : &missing) |= UINT64_C(1)
                                                      << rank_of(expert_of(m, m->round, m->group->rank, t, k));
    }
    EXPECT(!(here & missing),
           "round %d: out: experts of ranks 0x%llx have answered for some tokens, and not for others", m->round,
           (unsigned long long)(here & missing));
    *ret_here = here;
    *ret_missing = missing;
    return check_poison(m, m->copy + used, all - used, "out");
}

int model_check(struct model *m, uint64_t senders, uint64_t experts)
{
    uint64_t here, missing;

    TRY(model_check_dispatch(m, &here, &missing));
    EXPECT(!(here & ~senders) && !(missing & senders),
           "round %d: rows of ranks 0x%llx are here and those of 0x%llx missing; "
           "they are to be of 0x%llx",
           m->round, (unsigned long long)here, (unsigned long long)missing, (unsigned long long)senders);
    TRY(model_check_combine(m, &here, &missing));
    EXPECT(!(here & ~experts) && !(missing & experts),
           "round %d: experts of ranks 0x%llx have answered and those of 0x%llx "
           "have not; they are to be of 0x%llx",
           m->round, (unsigned long long)here, (unsigned long long)missing, (unsigned long long)experts);
    return 0;
}

int model_round(struct model *m, int round, uint32_t flags, uint64_t ranks)
{
    TRY(model_load(m, round));
    CALL(model_dispatch(m, flags));
    if (flags & EP_LL_RECV_HOOK)
        CALL(model_finish(m));
    CALL(model_combine(m, flags));
    if (flags & EP_LL_RECV_HOOK)
        CALL(model_finish(m));
    return model_check(m, ranks, ranks);
}
