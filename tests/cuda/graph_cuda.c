/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graph_cuda [--ranks N]: dispatch, combine and the low-latency calls in a captured CUDA graph give the same results as
 * calls, also with new data, launched again and mixed with calls. What must be refused: plans in a capture, host
 * memory, memory of another GPU.
 */
#include "group.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 100, HIDDEN = 1024, TOPK = 4, LAUNCHES = 6, POISON = 0xa5 };

enum { X, IDX, WEIGHTS, RECV, OUT, LL_RECV, LL_SCALES, LL_COUNT, LL_OUT, LL_ONCE_OUT, N_BUFFERS };

static const char *const names[N_BUFFERS] = {"x",
                                             "topk_idx",
                                             "topk_weights",
                                             "recv_x",
                                             "out",
                                             "recv_x of ll",
                                             "scales of ll",
                                             "count of ll",
                                             "out of ll",
                                             "out of ll that sums once"};

struct state {
    struct group group;
    int experts;
    ep_plan *plan;
    ep_ll *ll[2]; /* the second is combined with EP_LL_NO_PARTIAL_REDUCE */
    int64_t n_recv;
    void *at[N_BUFFERS];
    size_t bytes[N_BUFFERS];
    unsigned char *expected[N_BUFFERS];
};

static int fill(struct state *s, uint64_t seed)
{
    uint16_t *x = malloc(s->bytes[X]);
    uint64_t random = seed * 977 + (uint64_t)s->group.rank;

    EXPECT(x, "no memory");
    for (size_t i = 0; i < s->bytes[X] / 2; i++)
        x[i] = ep_bf16_from_f32((float)(next_random(&random) % 4096) / 512.0f - 4.0f);
    CUDA(cudaMemcpyAsync(s->at[X], x, s->bytes[X], cudaMemcpyDefault, s->group.stream));
    for (int i = RECV; i < N_BUFFERS; i++)
        CUDA(cudaMemsetAsync(s->at[i], POISON, s->bytes[i], s->group.stream));
    CUDA(cudaStreamSynchronize(s->group.stream));
    free(x);
    return 0;
}

static ep_ll_dispatch_args dispatch_of(const struct state *s, const void *topk_idx)
{
    ep_ll_dispatch_args args = args_ll_dispatch(s->at[X], topk_idx, EP_I64, TOKENS);

    args.out_dtype = EP_F8E4M3;
    args.scale_type = EP_F32;
    args.recv_x = s->at[LL_RECV];
    args.recv_scales = s->at[LL_SCALES];
    args.recv_count = s->at[LL_COUNT];
    return args;
}

static int call_low_latency(struct state *s, ep_ll *ll, void *out)
{
    const ep_ll_dispatch_args dispatch = dispatch_of(s, s->at[IDX]);
    ep_ll_combine_args combine;

    CALL(ep_ll_dispatch(ll, &dispatch, s->group.stream));
    combine = args_ll_combine(s->at[LL_RECV], s->at[IDX], EP_I64, TOKENS, s->at[WEIGHTS], out);
    combine.flags = ll == s->ll[1] ? EP_LL_NO_PARTIAL_REDUCE : 0;
    CALL(ep_ll_combine(ll, &combine, s->group.stream));
    return 0;
}

/* The received rows of either layout are combined unchanged; the low-latency ones were quantised, so their bits differ.
 */
static int call_all(struct state *s)
{
    ep_dispatch_args dispatch = args_dispatch(EP_BF16, HIDDEN, s->at[X], s->at[RECV], s->n_recv);
    ep_combine_args combine;

    CALL(ep_dispatch(s->plan, &dispatch, s->group.stream));
    combine = args_combine(HIDDEN, s->at[RECV], s->at[OUT]);
    CALL(ep_combine(s->plan, &combine, s->group.stream));
    TRY(call_low_latency(s, s->ll[0], s->at[LL_OUT]));
    return call_low_latency(s, s->ll[1], s->at[LL_ONCE_OUT]);
}

static int make_plan(struct state *s, const void *topk_idx, ep_plan **ret_plan, ep_status *ret_status)
{
    ep_plan_args args = args_plan(topk_idx, EP_I64, TOKENS, TOPK, s->experts);

    args.stream = s->group.stream;
    *ret_status = ep_plan_new(s->group.cuda, &args, ret_plan);
    return 0;
}

static int new_buffers(struct state *s)
{
    int64_t index[TOKENS * TOPK];
    float weights[TOKENS * TOPK];
    uint64_t random = 31u + (uint64_t)s->group.rank;
    size_t row = HIDDEN * 2, slots = (size_t)s->experts * TOKENS, most = (size_t)s->group.nranks * TOKENS;
    const size_t bytes[N_BUFFERS] = {[X] = TOKENS * row,
                                     [IDX] = sizeof(index),
                                     [WEIGHTS] = sizeof(weights),
                                     [RECV] = most * row,
                                     [OUT] = TOKENS * row,
                                     [LL_RECV] = slots * row,
                                     [LL_SCALES] = slots * HIDDEN / 32,
                                     [LL_COUNT] = (size_t)(s->experts / s->group.nranks) * 4,
                                     [LL_OUT] = TOKENS * row,
                                     [LL_ONCE_OUT] = TOKENS * row};

    for (int i = 0; i < TOKENS * TOPK; i++) {
        /* Distinct within a token. */
        index[i] = (int64_t)((next_random(&random) % (uint64_t)(s->experts / TOPK)) * TOPK + (uint64_t)(i % TOPK));
        weights[i] = (float)(next_random(&random) % 1000) / 999.0f;
    }
    for (int i = 0; i < N_BUFFERS; i++) {
        s->bytes[i] = bytes[i];
        if (i == RECV)
            CALL(ep_alloc(s->group.cuda, bytes[i], &s->at[i]));
        else
            CUDA(cudaMalloc(&s->at[i], bytes[i]));
        s->expected[i] = malloc(bytes[i]);
        EXPECT(s->expected[i], "no memory");
    }
    CUDA(cudaMemcpy(s->at[IDX], index, sizeof(index), cudaMemcpyDefault));
    CUDA(cudaMemcpy(s->at[WEIGHTS], weights, sizeof(weights), cudaMemcpyDefault));
    return 0;
}

static int fetch(struct state *s, int which, unsigned char *to)
{
    CUDA(cudaMemcpyAsync(to, s->at[which], s->bytes[which], cudaMemcpyDefault, s->group.stream));
    CUDA(cudaStreamSynchronize(s->group.stream));
    return 0;
}

static int compare(struct state *s, int launch)
{
    int code = PASSED;

    for (int i = RECV; i < N_BUFFERS; i++) {
        unsigned char *got = malloc(s->bytes[i]);
        size_t at = 0;

        EXPECT(got, "no memory");
        TRY(fetch(s, i, got));
        while (at < s->bytes[i] && got[at] == s->expected[i][at])
            at++;
        if (at < s->bytes[i]) {
            test_report("launch %d: %s: byte %zu of %zu is 0x%02x, and 0x%02x by calls", launch, names[i], at,
                        s->bytes[i], got[at], s->expected[i][at]);
            code = DIFFERS;
        }
        free(got);
    }
    return code;
}

static int check_refusals(struct state *s)
{
    cudaGraph_t graph;
    ep_plan *plan;
    ep_status status;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    char ep_group_memory[64];

    combine.x = s->at[RECV];
    combine.dtype = EP_BF16;
    combine.hidden = HIDDEN;
    CUDA(cudaStreamBeginCapture(s->group.stream, cudaStreamCaptureModeGlobal));
    TRY(make_plan(s, s->at[IDX], &plan, &status));
    TRY(expect_status("ep_plan_new in a capture", status, EP_E_STATE, NULL));
    CUDA(cudaStreamEndCapture(s->group.stream, &graph));
    CUDA(cudaGraphDestroy(graph));
    combine.out = (void *)((uintptr_t)(ep_group_memory + 15) / 16 * 16);
    TRY(expect_status("ep_combine into host memory", ep_combine(s->plan, &combine, s->group.stream), EP_E_ARG,
                      "host memory"));
    return 0;
}

static int check_other_gpu(struct state *s)
{
    ep_combine_args combine;
    ep_plan *plan = NULL;
    ep_status status;
    int n, device;
    void *elsewhere;

    CALL(ep_cuda_get_device(s->group.cuda, &device, NULL));
    CUDA(cudaGetDeviceCount(&n));
    if (n < 2)
        return 0;
    CUDA(cudaSetDevice((device + 1) % n));
    CUDA(cudaMalloc(&elsewhere, s->bytes[OUT]));
    CUDA(cudaSetDevice(device));
    combine = args_combine(HIDDEN, s->at[RECV], elsewhere);
    TRY(expect_status("ep_combine into another GPU", ep_combine(s->plan, &combine, s->group.stream), EP_E_ARG,
                      "is memory of GPU"));
    TRY(make_plan(s, elsewhere, &plan, &status));
    TRY(expect_status("ep_plan_new of a routing on another GPU", status, EP_E_ARG, "is memory of GPU"));
    CUDA(cudaFree(elsewhere));
    return 0;
}

static int check_routing(struct state *s)
{
    int64_t index[TOKENS * TOPK];
    ep_ll_dispatch_args args;
    void *bad;

    CUDA(cudaMemcpy(index, s->at[IDX], sizeof(index), cudaMemcpyDefault));
    index[5 * TOPK + 2] = index[5 * TOPK + 1];
    CUDA(cudaMalloc(&bad, sizeof(index)));
    CUDA(cudaMemcpy(bad, index, sizeof(index), cudaMemcpyDefault));
    args = dispatch_of(s, bad);
    TRY(expect_status("ep_ll_dispatch of an expert twice", ep_ll_dispatch_sync(s->ll[0], &args), EP_E_ROUTING,
                      "token 5"));
    CUDA(cudaFree(bad));
    return 0;
}

static int run_all(struct state *s)
{
    ep_ll_config config;
    ep_plan_info info = {.size = sizeof(info)};
    cudaGraphExec_t exec;
    ep_status status;

    TRY(new_buffers(s));
    TRY(make_plan(s, s->at[IDX], &s->plan, &status));
    CALL(status);
    CALL(ep_plan_get_info(s->plan, &info));
    s->n_recv = info.n_recv;
    config = args_ll(TOKENS, HIDDEN, s->experts, TOPK);
    CALL(ep_ll_new(s->group.cuda, &config, &s->ll[0]));
    CALL(ep_ll_new(s->group.cuda, &config, &s->ll[1]));
    TRY(capture_begin(&s->group));
    TRY(call_all(s));
    TRY(capture_end(&s->group, &exec));
    for (int launch = 0; launch < LAUNCHES; launch++) {
        TRY(fill(s, (uint64_t)launch));
        TRY(call_all(s));
        CALL(ep_stream_sync(s->group.cuda, s->group.stream));
        for (int i = RECV; i < N_BUFFERS; i++)
            TRY(fetch(s, i, s->expected[i]));
        TRY(fill(s, (uint64_t)launch));
        for (int again = 0; again <= launch % 3; again++)
            CUDA(cudaGraphLaunch(exec, s->group.stream));
        TRY(compare(s, launch));
        CALL(ep_comm_async_error(s->group.cuda));
    }
    TRY(check_refusals(s));
    TRY(check_other_gpu(s));
    TRY(check_routing(s));
    /* The group still works. */
    TRY(fill(s, LAUNCHES - 1));
    TRY(call_all(s));
    TRY(compare(s, LAUNCHES));
    CUDA(cudaGraphExecDestroy(exec));
    for (int i = 0; i < 2; i++)
        ep_ll_free(s->ll[i]);
    ep_plan_free(s->plan);
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct state s = {.experts = boot->nranks * 8};
    int code = group_open(boot, NULL, 10000, &s.group);

    (void)argument;
    if (!code)
        code = run_all(&s);
    for (int i = 0; i < N_BUFFERS; i++)
        free(s.expected[i]);
    group_close(&s.group, code);
    return code;
}

int main(int argc, char **argv)
{
    struct launch launch = {.name = "graph_cuda", .seconds = 100, .victim = -1, .run = run_rank};
    struct options options = {.ranks = 2};
    int code;

    if (!options_read(argc, argv, 1, &options))
        return 2;
    group_flags = EP_COMM_CHECK_DISTINCT;
    launch.ranks = options.ranks;
    code = launch_ranks(&launch);
    printf("graph_cuda: %d ranks: %s\n", options.ranks, result_name(code));
    return code;
}
