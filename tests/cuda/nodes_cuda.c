/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes_cuda [--ranks N] [--nodes N] [--network NAME] [--seed N] [--only SCENARIO]: operations between
 * nodes, in addition to test_cuda, which compares the bits. Plans that cannot be made in a capture are refused by name
 * and change nothing; barriers hold across nodes; no memory of a rank of another node is mapped; a thousand operations
 * are queued ahead of the network; pinned memory has a limit, and can be reserved; ranks that disagree get the name of
 * the rank. Exit 77 if there is no GPU.
 */
#include "backend/cuda/cuda.h"
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 1024, TOPK = 4, TOKENS = 700, EXPERTS = 24, TIMEOUT_MS = 8000, BARRIERS = 100, AHEAD = 500 };

struct shared {
    _Atomic int arrived[MAX_RANKS];
};

struct state {
    const struct group *group;
    struct shared *shared;
    uint64_t random;
    int64_t *index; /* [TOKENS, TOPK] */
    ep_plan *plan;
    int64_t n_recv;
    void *x[2], *recv, *out[2];
};

static int make_index(struct state *s)
{
    struct routing routing = {.n_tokens = TOKENS,
                              .topk = TOPK,
                              .n_experts = EXPERTS * s->group->nranks,
                              .nranks = s->group->nranks,
                              .idx_type = EP_I64,
                              .holes = true};

    s->index = malloc((size_t)TOKENS * TOPK * sizeof(*s->index));
    EXPECT(s->index, "no memory for the routing");
    fill_routing(&routing, &s->random, s->index);
    return 0;
}

static ep_plan_args plan_args(const struct state *s)
{
    return args_plan(s->index, EP_I64, TOKENS, TOPK, EXPERTS * s->group->nranks);
}

static int make_plan(struct state *s)
{
    ep_plan_info info = {.size = sizeof(info)};
    ep_plan_args args = plan_args(s);

    CALL(ep_plan_new(s->group->cuda, &args, &s->plan));
    CALL(ep_plan_get_info(s->plan, &info));
    s->n_recv = info.n_recv;
    return 0;
}

static int make_buffers(struct state *s)
{
    size_t row = HIDDEN * 2, bytes = TOKENS * row;
    uint16_t *values = malloc(bytes);

    EXPECT(values, "no memory for rows");
    for (int i = 0; i < 2; i++) {
        fill_bf16(values, bytes / 2, &s->random);
        CUDA(cudaMalloc(&s->x[i], bytes));
        CUDA(cudaMemcpy(s->x[i], values, bytes, cudaMemcpyDefault));
        CUDA(cudaMalloc(&s->out[i], bytes));
    }
    free(values);
    CALL(ep_alloc(s->group->cuda, ((size_t)s->n_recv + 1) * row, &s->recv));
    return 0;
}

static int free_all(struct state *s)
{
    for (int i = 0; i < 2; i++) {
        CUDA(cudaFree(s->x[i]));
        CUDA(cudaFree(s->out[i]));
    }
    if (s->recv)
        CALL(ep_free(s->group->cuda, s->recv));
    ep_plan_free(s->plan);
    free(s->index);
    return 0;
}

static ep_status dispatch(const struct state *s, int which, int hidden)
{
    ep_dispatch_args args = args_dispatch(EP_BF16, hidden, s->x[which], s->recv, s->n_recv);

    return ep_dispatch(s->plan, &args, s->group->stream);
}

static ep_status combine(const struct state *s, int which, uint32_t flags)
{
    ep_combine_args args = args_combine(HIDDEN, s->recv, s->out[which]);

    args.flags = flags;
    return ep_combine(s->plan, &args, s->group->stream);
}

/* --- scenarios -------------------------------------------------------------------------------------------------------
 */

/* A case of the comparison with the host backend: the group still works. */
static int check_valid(const struct state *s)
{
    struct shape shape = {.n_tokens = 90 + s->group->rank,
                          .hidden = 512,
                          .topk = TOPK,
                          .n_experts = EXPERTS * s->group->nranks,
                          .dtype = EP_BF16,
                          .idx_type = EP_I64,
                          .choice = true,
                          .seed = s->random};

    return case_run(s->group, &shape);
}

/* In a capture a plan needs a capacity, and routing in device memory that exists when the graph runs. */
static int check_captures(struct state *s)
{
    ep_plan_args args = plan_args(s);
    cudaGraph_t graph;
    ep_plan *plan = NULL;
    ep_status exact, host;

    args.stream = s->group->stream;
    CUDA(cudaStreamBeginCapture(s->group->stream, cudaStreamCaptureModeRelaxed));
    exact = ep_plan_new(s->group->cuda, &args, &plan);
    args.max_recv_tokens = TOKENS * TOPK * s->group->nranks;
    host = ep_plan_new(s->group->cuda, &args, &plan);
    CUDA(cudaStreamEndCapture(s->group->stream, &graph));
    CUDA(cudaGraphDestroy(graph));
    TRY(expect_status("ep_plan_new in a capture", exact, EP_E_STATE, NULL));
    return expect_status("ep_plan_new in a capture, of host memory", host, EP_E_ARG, "host memory");
}

static int run_refused(struct state *s)
{
    TRY(make_plan(s));
    TRY(make_buffers(s));
    CALL(dispatch(s, 0, HIDDEN));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    TRY(check_captures(s));
    return check_valid(s);
}

/* A rank that leaves barrier i must see that all ranks have entered it. One rank, a different one each time, is late.
 */
static int run_barrier(struct state *s)
{
    const struct group *g = s->group;

    for (int i = 1; i <= BARRIERS; i++) {
        if (i % g->nranks == g->rank)
            sleep_ms(i % 7);
        atomic_store(&s->shared->arrived[g->rank], i);
        CALL(ep_barrier_on(g->cuda, g->stream));
        CALL(ep_stream_sync(g->cuda, g->stream));
        for (int rank = 0; rank < g->nranks; rank++)
            EXPECT(atomic_load(&s->shared->arrived[rank]) >= i, "rank %d is not in barrier %d", rank, i);
    }
    return 0;
}

/* Far more chunks than the network holds, and no host waits. Two inputs alternate. */
static int run_ahead(struct state *s)
{
    size_t bytes = (size_t)TOKENS * HIDDEN * 2;
    unsigned char *first = malloc(2 * bytes), *last = malloc(bytes);
    int code = 0;

    EXPECT(first && last, "no memory for rows");
    TRY(make_plan(s));
    TRY(make_buffers(s));
    for (int i = 0; i < 2; i++) {
        CALL(dispatch(s, i, HIDDEN));
        CALL(combine(s, i, 0));
        CALL(ep_stream_sync(s->group->cuda, s->group->stream));
        CUDA(cudaMemcpy(first + (size_t)i * bytes, s->out[i], bytes, cudaMemcpyDefault));
    }
    EXPECT(memcmp(first, first + bytes, bytes) != 0, "both inputs gave the same: they should differ");
    for (int i = 0; i < AHEAD; i++) {
        CUDA(cudaMemsetAsync(s->out[i % 2], POISON, bytes, s->group->stream));
        CALL(dispatch(s, i % 2, HIDDEN));
        CALL(combine(s, i % 2, 0));
    }
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    for (int i = 0; i < 2; i++) {
        CUDA(cudaMemcpy(last, s->out[i], bytes, cudaMemcpyDefault));
        if (memcmp(first + (size_t)i * bytes, last, bytes) != 0)
            test_report("input %d: after %d operations the sums differ from the first ones", i, 2 * AHEAD),
                code = DIFFERS;
    }
    free(first);
    free(last);
    return code;
}

enum disagreement { ARGUMENTS, CALLS, ROUNDINGS };

/* The last rank, alone on its node or not, passes a different row size or sum, or makes a different call. */
static int run_disagree(struct state *s, enum disagreement which)
{
    static const char roundings[] = "EP_COMBINE_ROUND_PARTIAL is set on rank";
    bool other = s->group->rank == s->group->nranks - 1;
    ep_status status;

    TRY(make_plan(s));
    TRY(make_buffers(s));
    CALL(dispatch(s, 0, HIDDEN));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    TRY(group_barrier(s->group));
    if (which == ROUNDINGS)
        status = combine(s, 0, other ? EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL : 0);
    else
        status = which == CALLS && other ? combine(s, 0, 0) : dispatch(s, 0, other ? HIDDEN / 2 : HIDDEN);
    if (status == EP_OK)
        status = ep_stream_sync(s->group->cuda, s->group->stream);
    /* Ranks of a node of several may learn of it from another one. */
    TRY(expect_status("the call", status, EP_E_MISMATCH,
                      which == ROUNDINGS && s->group->nranks == group_division.nodes ? roundings : NULL));
    EXPECT(names_rank(ep_last_error(), s->group->nranks - 1) ||
               names_rank(ep_last_error(), s->group->nranks - 1 - s->group->nranks / group_division.nodes),
           "neither the rank nor its rail peer is named: %s", ep_last_error());
    /* The memory is freed with the communicator. */
    s->recv = NULL;
    return 0;
}

static int run_different_arguments(struct state *s)
{
    return run_disagree(s, ARGUMENTS);
}

static int run_different_calls(struct state *s)
{
    return run_disagree(s, CALLS);
}

static int run_different_roundings(struct state *s)
{
    return run_disagree(s, ROUNDINGS);
}

/* A limit refuses a call that needs more, by name; with a higher limit it succeeds, and again without new memory. */
static int run_memory(struct state *s)
{
    ep_comm *comm = s->group->cuda;
    size_t held, needed, before;

    TRY(make_plan(s));
    TRY(make_buffers(s));
    CALL(ep_cuda_get_net_memory(comm, &before, NULL));
    CALL(ep_cuda_set_net_memory(comm, 0, before + 1));
    TRY(expect_status("ep_dispatch", dispatch(s, 0, HIDDEN), EP_E_MEMORY, "ep_cuda_set_net_memory"));
    CALL(ep_cuda_get_net_memory(comm, &held, &needed));
    EXPECT(held == before && needed > before, "%zu bytes are held and %zu needed", held, needed);
    TRY(group_barrier(s->group));
    CALL(ep_cuda_set_net_memory(comm, 4 * needed, 0));
    CALL(ep_cuda_get_net_memory(comm, &before, NULL));
    EXPECT(before >= 4 * needed, "%zu bytes were reserved, not %zu", before, 4 * needed);
    TRY(group_barrier(s->group));
    CALL(dispatch(s, 0, HIDDEN));
    CALL(combine(s, 0, 0));
    CALL(ep_stream_sync(comm, s->group->stream));
    CALL(ep_cuda_get_net_memory(comm, &held, &needed));
    EXPECT(held == before && needed <= held, "%zu bytes are held of %zu, %zu needed", held, before, needed);
    TRY(expect_status("ep_cuda_set_net_memory", ep_cuda_set_net_memory(comm, 2, 1), EP_E_ARG, "reserve"));
    return check_valid(s);
}

static int count_mappings(const struct cuda_peer *peer)
{
    int n = 0;

    for (int slot = 0; slot < CUDA_SLOTS; slot++)
        n += peer->mappings[slot].generation != 0;
    return n;
}

/*
 * Mappings of device memory exist for ranks of the same node alone, also with those of low latency. Over sockets and
 * verbs the control blocks of other nodes are not mapped either.
 */
static int check_mappings(const struct group *g)
{
    const struct cuda_comm *cuda = cuda_of(g->cuda);
    bool one_host = !group_division.network || strcmp(group_division.network, "tcp") != 0;

    for (int rank = 0; rank < g->nranks; rank++) {
        bool own_node = rank >= cuda->group.first && rank < cuda_end_of_node(cuda);
        int n = count_mappings(&cuda->peers[rank]);

        if (own_node && rank != g->rank)
            EXPECT(n > 1, "rank %d of this node has %d mappings here: the check sees none", rank, n);
        EXPECT(own_node || n == 0, "%d allocations of rank %d of another node are mapped", n, rank);
        EXPECT(own_node || one_host || (!cuda->peers[rank].ctrl && !cuda->group.peers[rank].control),
               "the control block of rank %d of another node is mapped", rank);
    }
    return 0;
}

static int run_mappings(struct state *s)
{
    ep_ll_config config;
    ep_ll *ll;
    int code;

    TRY(make_plan(s));
    TRY(make_buffers(s));
    CALL(dispatch(s, 0, HIDDEN));
    CALL(combine(s, 0, 0));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    config = args_ll(TOKENS, HIDDEN, EXPERTS * s->group->nranks, TOPK);
    CALL(ep_ll_new(s->group->cuda, &config, &ll));
    TRY(group_barrier(s->group));
    code = check_mappings(s->group);
    TRY(group_barrier(s->group));
    ep_ll_free(ll);
    return code;
}

static const struct scenario {
    const char *name;
    int (*run)(struct state *s);
} scenarios[] = {{"refused", run_refused},
                 {"barrier", run_barrier},
                 {"mappings", run_mappings},
                 {"ahead", run_ahead},
                 {"memory", run_memory},
                 {"disagree-arguments", run_different_arguments},
                 {"disagree-calls", run_different_calls},
                 {"disagree-roundings", run_different_roundings}};

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {.group = group, .shared = run->shared, .random = run->seed * 1000 + (uint64_t)group->rank};
    int code;

    TRY(make_index(&s));
    code = scenario->run(&s);
    return code & FAILED ? code : code | free_all(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};

    if (!options_read(argc, argv, 2, &options))
        return 2;
    if (group_division.nodes < 2)
        group_division.nodes = 2;
    return run_group_scenarios(&options,
                               (struct scenario_run){.program = "nodes_cuda",
                                                     .timeout_ms = TIMEOUT_MS,
                                                     .seconds = 60,
                                                     .shared_bytes = sizeof(struct shared),
                                                     .run = run_rank},
                               scenarios, sizeof(scenarios) / sizeof(scenarios[0]), sizeof(scenarios[0]));
}
