/* SPDX-License-Identifier: Apache-2.0 */
#include "account.h"
#include "bench_case.h"

#include <stdio.h>
#include <string.h>

/* Names of the bits in a mask, lowest bit first. */
static const char *const op_names[] = {"dispatch", "combine", "plan", "ll", NULL};
static const char *const type_names[] = {"bf16", "fp8", NULL};

static json_t *mask_to_json(unsigned mask, const char *const *names)
{
    json_t *array = json_array();

    for (int i = 0; names[i]; i++)
        if (mask & 1u << i)
            json_array_append_new(array, json_string(names[i]));
    return array;
}

static int mask_from_json(const json_t *array, const char *const *names, unsigned *ret_mask)
{
    unsigned mask = 0;
    json_t *name;
    size_t i;

    if (!json_is_array(array))
        return -1;
    json_array_foreach(array, i, name)
    {
        int bit = 0;

        if (!json_is_string(name))
            return -1;
        while (names[bit] && strcmp(names[bit], json_string_value(name)) != 0)
            bit++;
        if (!names[bit])
            return -1;
        mask |= 1u << bit;
    }
    *ret_mask = mask;
    return 0;
}

static const char *routing_to_name(enum routing_kind kind)
{
    for (const struct routing_name *row = routing_names; row->name; row++)
        if (row->kind == kind)
            return row->name;
    return "?";
}

json_t *bench_request_to_json(const struct bench_request *request)
{
    json_t *tokens = json_array();

    for (int i = 0; i < request->n_token_counts; i++)
        json_array_append_new(tokens, json_integer(request->tokens[i]));
    return json_pack("{s:o, s:o, s:s, s:I, s:o, s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:b}", "ops",
                     mask_to_json(request->ops, op_names), "types", mask_to_json(request->types, type_names), "routing",
                     routing_to_name(request->routing), "seed", (json_int_t)request->seed, "tokens", tokens,
                     "ll_tokens", request->ll_tokens, "hidden", request->hidden, "topk", request->topk, "experts",
                     request->experts, "iters", request->iters, "baselines", (int)request->baselines, "sms",
                     request->sms, "sum_once", (int)request->no_partial_reduce);
}

int bench_request_from_json(const json_t *json, struct bench_request *ret_request)
{
    struct bench_request request = {0};
    const struct routing_name *routing;
    json_t *ops, *types, *tokens;
    const char *name;
    json_int_t seed;
    int baselines, no_partial_reduce;

    if (json_unpack((json_t *)json, "{s:o, s:o, s:s, s:I, s:o, s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:b}", "ops", &ops,
                    "types", &types, "routing", &name, "seed", &seed, "tokens", &tokens, "ll_tokens",
                    &request.ll_tokens, "hidden", &request.hidden, "topk", &request.topk, "experts", &request.experts,
                    "iters", &request.iters, "baselines", &baselines, "sms", &request.sms, "sum_once",
                    &no_partial_reduce) != 0)
        return -1;
    routing = routing_find(name);
    if (!routing || mask_from_json(ops, op_names, &request.ops) != 0 ||
        mask_from_json(types, type_names, &request.types) != 0 || !json_is_array(tokens) ||
        json_array_size(tokens) > BENCH_MAX_TOKEN_COUNTS)
        return -1;
    request.routing = routing->kind;
    request.seed = (uint64_t)seed;
    request.baselines = baselines != 0;
    request.no_partial_reduce = no_partial_reduce != 0;
    request.n_token_counts = (int)json_array_size(tokens);
    for (int i = 0; i < request.n_token_counts; i++)
        request.tokens[i] = (int)json_integer_value(json_array_get(tokens, (size_t)i));
    *ret_request = request;
    return 0;
}

const char *bench_check(const struct bench_request *request, int n_ranks, char *buffer, size_t buffer_bytes)
{
    bool low_latency = request->ops & BENCH_LL;
    bool fp8 = request->types & BENCH_FP8;

    if (request->experts % n_ranks)
        snprintf(buffer, buffer_bytes, "%d experts cannot be spread evenly over %d ranks", request->experts, n_ranks);
    else if (request->topk > request->experts)
        snprintf(buffer, buffer_bytes, "a token cannot select %d of %d experts", request->topk, request->experts);
    else if (request->hidden % 8)
        snprintf(buffer, buffer_bytes, "hidden %d is not a multiple of 8", request->hidden);
    else if ((low_latency || fp8) && request->hidden % EP_SCALE_BLOCK)
        snprintf(buffer, buffer_bytes, "hidden %d is not a multiple of %d, which %s needs", request->hidden,
                 EP_SCALE_BLOCK, fp8 ? "fp8" : "low latency");
    else
        return NULL;
    return buffer;
}

uint64_t bench_bytes(const struct bench_request *request, int n_ranks, bool under_mpi)
{
    bool baselines = request->baselines && (request->ops & (BENCH_DISPATCH | BENCH_COMBINE));
    int fan_out = request->topk < n_ranks ? request->topk : n_ranks;
    uint64_t row = 2 * (uint64_t)request->hidden;
    uint64_t most = 0;

    /* Token counts are measured one after the other: the largest counts. */
    for (int i = 0; i < request->n_token_counts; i++) {
        uint64_t tokens = (uint64_t)request->tokens[i] * (uint64_t)n_ranks;
        uint64_t rows = tokens * (uint64_t)fan_out;
        uint64_t bytes = tokens * row * 3 + rows * row * (baselines ? 3 : 1);
        uint64_t routes = request->ops & BENCH_PLAN ? 1 + BENCH_VARIANTS : 1;

        /* Each rank has the choices of all ranks. */
        bytes += routes * (uint64_t)n_ranks * tokens * (uint64_t)request->topk * (sizeof(int32_t) + sizeof(float));
        if (under_mpi && baselines)
            bytes += naive_bytes((int64_t)rows, (int64_t)rows, request->hidden, request->topk);
        most = bytes > most && (request->ops & ~(unsigned)BENCH_LL) ? bytes : most;
    }
    if (request->ops & BENCH_LL) {
        uint64_t rows = (uint64_t)request->ll_tokens * (uint64_t)n_ranks * (uint64_t)request->topk;
        uint64_t bytes = rows * row * 6;

        most = bytes > most ? bytes : most;
    }
    return most;
}
