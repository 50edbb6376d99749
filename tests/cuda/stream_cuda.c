/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream_cuda [--ranks N] [--seed N] [--only SCENARIO]: calls launch in their stream and return, whatever the hosts of
 * the peers do, and the results are those of the host backend.
 *
 *   legal      one rank dispatches and then starts a collective in another stream, the others wait for that collective
 *              before they dispatch. Hosts that wait for each other would deadlock.
 *   ahead      all ranks but one queue all of their calls before that one makes its first
 *   streams    calls alternate between three streams that nothing else orders
 *   events     events of the library and of the caller between two streams; a barrier in a stream
 *   handles    calls in two streams with the same handle: cudaStreamPerThread of two threads, and a stream that is
 *              created after another one was destroyed while work was queued in it
 *   disagree   ranks with different arguments, or in different calls, get an error after the calls
 *   other-gpu  a stream of another GPU is refused, and the next call works; where there are two GPUs
 *   graph      dispatch and combine of ordinary memory in a graph, launched again with new data
 *   time       how long a call takes on the host (printed, not checked)
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "group/plan.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 1024, TOPK = 4, ROW = HIDDEN * 2, TOKENS = 700, TIMEOUT_MS = 20000, PATIENCE_MS = 15000 };
enum { ROUNDS = 5, PAIRS = 40, STREAMS = 3, CALLS = 400, LAUNCHES = 5 };

enum { X, RECV, OUT, N_BUFFERS };

/* Words that all ranks share. */
struct shared {
    _Atomic int entered[2 * ROUNDS]; /* ranks that have entered each collective */
    _Atomic int queued;              /* ranks that have made all of their calls */
};

struct state {
    struct group group;
    struct shared *shared;
    uint64_t seed;
    ep_plan *ep_group_plan, *plan;
    int64_t n_recv;
    struct mirror b[N_BUFFERS];
    cudaStream_t streams[STREAMS];
};

/* --- calls ------------------------------------------------------------------------------------------------------- */

static int make_plans(struct state *s)
{
    struct routing routing = {.n_tokens = TOKENS,
                              .topk = TOPK,
                              .n_experts = s->group.nranks * 12,
                              .nranks = s->group.nranks,
                              .idx_type = EP_I32};
    uint64_t random = s->seed * 4096 + (uint64_t)s->group.rank;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan_args args;
    int32_t *index = malloc(sizeof(*index) * TOKENS * TOPK);

    EXPECT(index, "no memory for the routing");
    fill_routing(&routing, &random, index);
    args = args_plan(index, EP_I32, TOKENS, TOPK, routing.n_experts);
    CALL(ep_plan_new(s->group.host, &args, &s->ep_group_plan));
    CALL(ep_plan_new(s->group.cuda, &args, &s->plan));
    free(index);
    CALL(ep_plan_get_info(s->ep_group_plan, &info));
    s->n_recv = info.n_recv;
    return 0;
}

static int make_buffers(struct state *s, enum memory memory)
{
    TRY(mirror_new(&s->group, "x", TOKENS * ROW, ORDINARY, &s->b[X]));
    TRY(mirror_new(&s->group, "recv_x", (size_t)s->n_recv * ROW, memory, &s->b[RECV]));
    TRY(mirror_new(&s->group, "out", TOKENS * ROW, ORDINARY, &s->b[OUT]));
    return 0;
}

static int free_all(struct state *s, int code)
{
    for (int i = 0; i < N_BUFFERS; i++)
        code |= mirror_free(&s->group, code & FAILED, &s->b[i]);
    ep_plan_free(s->plan);
    ep_plan_free(s->ep_group_plan);
    return code;
}

static int new_data(struct state *s, uint64_t seed)
{
    uint64_t random = (s->seed * 977 + seed) * 64 + (uint64_t)s->group.rank;

    fill_bf16((uint16_t *)(void *)s->b[X].host, (size_t)TOKENS * HIDDEN, &random);
    TRY(mirror_push(&s->group, &s->b[X]));
    TRY(mirror_poison(&s->group, &s->b[RECV]));
    TRY(mirror_poison(&s->group, &s->b[OUT]));
    CUDA(cudaStreamSynchronize(s->group.stream));
    return 0;
}

static ep_dispatch_args dispatch_args(const struct state *s, bool device)
{
    return args_dispatch(EP_BF16, HIDDEN, device ? s->b[X].device : s->b[X].host,
                         device ? s->b[RECV].device : s->b[RECV].host, s->n_recv);
}

static ep_combine_args combine_args(const struct state *s, bool device)
{
    ep_combine_args args =
        args_combine(HIDDEN, device ? s->b[RECV].device : s->b[RECV].host, device ? s->b[OUT].device : s->b[OUT].host);

    return args;
}

static int call_dispatch(struct state *s, cudaStream_t stream)
{
    const ep_dispatch_args args = dispatch_args(s, true);

    CALL(ep_dispatch(s->plan, &args, stream));
    return 0;
}

static int call_combine(struct state *s, cudaStream_t stream)
{
    const ep_combine_args args = combine_args(s, true);

    CALL(ep_combine(s->plan, &args, stream));
    return 0;
}

/* Runs the host backend on the same data, and compares the results. */
static int check(struct state *s, const char *phase)
{
    const ep_dispatch_args dispatch = dispatch_args(s, false);
    const ep_combine_args combine = combine_args(s, false);

    CALL(ep_dispatch_sync(s->ep_group_plan, &dispatch));
    CALL(ep_combine_sync(s->ep_group_plan, &combine));
    return mirror_compare(&s->group, &s->b[RECV], phase) | mirror_compare(&s->group, &s->b[OUT], phase);
}

/* --- legal ------------------------------------------------------------------------------------------------------- */

/* Stands for a collective of another library: it ends when all ranks have entered. */
struct collective {
    _Atomic int *entered;
    int nranks;
    _Atomic int failed;
};

static void CUDART_CB sync_in_stream(void *argument)
{
    struct collective *c = argument;
    double limit = now_ms() + PATIENCE_MS;

    atomic_fetch_add(c->entered, 1);
    while (atomic_load(c->entered) < c->nranks && now_ms() < limit)
        sleep_ms(1);
    atomic_store(&c->failed, atomic_load(c->entered) < c->nranks);
}

static int legal_round(struct state *s, int round)
{
    static struct collective collectives[2 * ROUNDS]; /* static: outlive a failure */
    cudaStream_t stream = s->streams[0], other = s->streams[1];

    TRY(new_data(s, (uint64_t)round));
    TRY(group_barrier(&s->group));
    for (int combines = 0; combines < 2; combines++) {
        struct collective *c = &collectives[2 * round + combines];
        bool early = s->group.rank == (round + combines) % s->group.nranks;

        *c = (struct collective){.entered = &s->shared->entered[2 * round + combines], .nranks = s->group.nranks};
        if (early)
            TRY(combines ? call_combine(s, stream) : call_dispatch(s, stream));
        CUDA(cudaLaunchHostFunc(other, sync_in_stream, c));
        CUDA(cudaStreamSynchronize(other));
        EXPECT(!atomic_load(&c->failed), "round %d: not all ranks came to the collective within %d ms", round,
               PATIENCE_MS);
        if (!early)
            TRY(combines ? call_combine(s, stream) : call_dispatch(s, stream));
    }
    CALL(ep_stream_sync(s->group.cuda, stream));
    return check(s, "legal");
}

static int run_legal(struct state *s)
{
    int code = PASSED;

    for (int memory = 0; memory < 2 && !(code & FAILED); memory++) {
        TRY(make_plans(s));
        TRY(make_buffers(s, memory ? SYMMETRIC : ORDINARY));
        for (int round = 0; round < ROUNDS && !(code & FAILED); round++)
            code |= legal_round(s, round);
        TRY(group_barrier(&s->group));
        for (int i = 0; i < 2 * ROUNDS; i++)
            atomic_store(&s->shared->entered[i], 0);
        code = free_all(s, code);
    }
    return code;
}

/* --- ahead ------------------------------------------------------------------------------------------------------- */

static int run_ahead(struct state *s)
{
    int code;

    TRY(make_plans(s));
    TRY(make_buffers(s, ORDINARY));
    TRY(new_data(s, 0));
    /* Allocates the staging memory and maps it. */
    TRY(call_dispatch(s, NULL));
    TRY(call_combine(s, NULL));
    CALL(ep_stream_sync(s->group.cuda, NULL));
    TRY(new_data(s, 1));
    TRY(group_barrier(&s->group));
    if (s->group.rank == s->group.nranks - 1)
        TRY(await(&s->shared->queued, s->group.nranks - 1, PATIENCE_MS, "the other ranks' calls"));
    for (int i = 0; i < PAIRS; i++) {
        TRY(call_dispatch(s, s->streams[0]));
        TRY(call_combine(s, s->streams[0]));
    }
    atomic_fetch_add(&s->shared->queued, 1);
    CALL(ep_stream_sync(s->group.cuda, s->streams[0]));
    code = check(s, "ahead");
    return free_all(s, code);
}

/* --- streams, events --------------------------------------------------------------------------------------------- */

static int run_streams(struct state *s)
{
    int code = PASSED;

    TRY(make_plans(s));
    TRY(make_buffers(s, ORDINARY));
    for (int round = 0; round < ROUNDS && !(code & FAILED); round++) {
        TRY(new_data(s, (uint64_t)round));
        for (int i = 0; i < PAIRS; i++) {
            TRY(call_dispatch(s, s->streams[2 * i % STREAMS]));
            TRY(call_combine(s, s->streams[(2 * i + 1) % STREAMS]));
        }
        for (int i = 0; i < STREAMS; i++)
            CALL(ep_stream_sync(s->group.cuda, s->streams[i]));
        code |= check(s, "streams");
    }
    return free_all(s, code);
}

static int run_events(struct state *s)
{
    ep_event *data, *end;
    int code, done = 1;

    TRY(make_plans(s));
    TRY(make_buffers(s, SYMMETRIC));
    TRY(new_data(s, 0));
    CALL(ep_event_new(s->group.cuda, &data));
    CALL(ep_stream_wait(s->group.cuda, s->streams[0], data));
    TRY(call_dispatch(s, s->streams[0]));
    CALL(ep_barrier_on(s->group.cuda, s->streams[0]));
    TRY(call_combine(s, s->streams[0]));
    CALL(ep_event_record(s->group.cuda, s->streams[0], &end));
    CALL(ep_event_query(end, &done));
    EXPECT(!done, "%d: a call is complete before the event that it waits for", done);
    TRY(expect_status("ep_event_wait", ep_event_wait(end, 50), EP_E_TIMEOUT, NULL));
    CALL(ep_event_signal(data));
    CALL(ep_stream_wait(s->group.cuda, s->streams[1], end));
    CALL(ep_stream_sync(s->group.cuda, s->streams[1]));
    CALL(ep_event_wait(end, -1));
    ep_event_free(data);
    ep_event_free(end);
    code = check(s, "events");
    return free_all(s, code);
}

/* --- handles ----------------------------------------------------------------------------------------------------- */

struct combine_job {
    struct state *s;
    cudaStream_t stream;
    ep_event *dispatch_may_start;
    int code;
};

/* A combine whose dispatch waits, in another stream, for the event. */
static void *combine_after(void *argument)
{
    struct combine_job *job = argument;

    job->code = call_combine(job->s, job->stream);
    if (ep_event_signal(job->dispatch_may_start) != EP_OK || ep_stream_sync(job->s->group.cuda, job->stream) != EP_OK)
        job->code |= FAILED;
    return NULL;
}

static int begin_dispatch(struct state *s, uint64_t seed, cudaStream_t stream, struct combine_job *ret_job)
{
    *ret_job = (struct combine_job){.s = s, .stream = stream};
    TRY(new_data(s, seed));
    CALL(ep_event_new(s->group.cuda, &ret_job->dispatch_may_start));
    CALL(ep_stream_wait(s->group.cuda, stream, ret_job->dispatch_may_start));
    return call_dispatch(s, stream);
}

static int end_combine(struct state *s, struct combine_job *job, const char *what)
{
    ep_event_free(job->dispatch_may_start);
    return job->code | check(s, what);
}

static int run_handles(struct state *s)
{
    struct combine_job job;
    cudaStream_t first;
    pthread_t thread;
    int code;

    TRY(make_plans(s));
    TRY(make_buffers(s, SYMMETRIC));
    TRY(begin_dispatch(s, 0, cudaStreamPerThread, &job));
    EXPECT(!pthread_create(&thread, NULL, combine_after, &job), "no thread");
    pthread_join(thread, NULL);
    code = end_combine(s, &job, "cudaStreamPerThread of two threads");
    /* CUDA may give the second stream the handle of the first. */
    CUDA(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    TRY(begin_dispatch(s, 1, first, &job));
    CUDA(cudaStreamDestroy(first));
    CUDA(cudaStreamCreateWithFlags(&job.stream, cudaStreamNonBlocking));
    printf("rank %d: the handle of a destroyed stream is %s again\n", s->group.rank,
           job.stream == first ? "used" : "not used");
    combine_after(&job);
    code |= end_combine(s, &job, "a stream after a destroyed one");
    CUDA(cudaStreamDestroy(job.stream));
    return free_all(s, code);
}

/* --- disagree ---------------------------------------------------------------------------------------------------- */

/* The communicator fails in this scenario, so it is not used afterwards. */
static int run_disagree(struct state *s, bool phase)
{
    ep_dispatch_args args;
    ep_combine_args sum;
    ep_status status;

    TRY(make_plans(s));
    TRY(make_buffers(s, SYMMETRIC));
    TRY(new_data(s, 0));
    sum = combine_args(s, true);
    args = dispatch_args(s, true);
    args.hidden = !phase && s->group.rank == 0 ? HIDDEN / 2 : HIDDEN;
    if (phase && s->group.rank == 0)
        status = ep_combine(s->plan, &sum, NULL);
    else
        status = ep_dispatch(s->plan, &args, NULL);
    if (status == EP_OK) /* a rank that comes later gets the failure of the others at once */
        status = ep_stream_sync(s->group.cuda, NULL);
    TRY(expect_status("ep_dispatch or ep_stream_sync", status, EP_E_MISMATCH, NULL));
    EXPECT(strstr(ep_comm_last_error(s->group.cuda), phase ? "in different calls" : "hidden is"), "%s",
           ep_comm_last_error(s->group.cuda));
    TRY(expect_status("ep_comm_async_error", ep_comm_async_error(s->group.cuda), EP_E_MISMATCH, NULL));
    TRY(group_barrier(&s->group));
    return free_all(s, FAILED) & ~FAILED;
}

static int run_different_arguments(struct state *s)
{
    return s->group.nranks > 1 ? run_disagree(s, false) : 0;
}

static int run_different_calls(struct state *s)
{
    return s->group.nranks > 1 ? run_disagree(s, true) : 0;
}

/* --- other-gpu --------------------------------------------------------------------------------------------------- */

static int run_other_gpu(struct state *s)
{
    cudaStream_t elsewhere;
    int device, n;

    CUDA(cudaGetDeviceCount(&n));
    if (n < 2 || CUDART_VERSION < 12080)
        return 0;
    TRY(make_plans(s));
    TRY(make_buffers(s, SYMMETRIC));
    TRY(new_data(s, 0));
    CALL(ep_cuda_get_device(s->group.cuda, &device, NULL));
    CUDA(cudaSetDevice((device + 1) % n));
    CUDA(cudaStreamCreateWithFlags(&elsewhere, cudaStreamNonBlocking));
    CUDA(cudaSetDevice(device));
    TRY(expect_status("ep_barrier_on", ep_barrier_on(s->group.cuda, elsewhere), EP_E_ARG, "the stream is of GPU"));
    TRY(call_dispatch(s, s->streams[0]));
    TRY(call_combine(s, s->streams[0]));
    CALL(ep_stream_sync(s->group.cuda, s->streams[0]));
    CUDA(cudaStreamDestroy(elsewhere));
    return free_all(s, check(s, "after a stream of another GPU"));
}

/* --- graph ------------------------------------------------------------------------------------------------------- */

static int run_graph(struct state *s)
{
    cudaGraphExec_t exec;
    int code = PASSED;

    TRY(make_plans(s));
    TRY(make_buffers(s, ORDINARY));
    /* The first call: staging is allocated in the capture. */
    TRY(capture_begin(&s->group));
    TRY(call_dispatch(s, s->group.stream));
    TRY(call_combine(s, s->group.stream));
    TRY(capture_end(&s->group, &exec));
    for (int launch = 0; launch < LAUNCHES && !(code & FAILED); launch++) {
        TRY(new_data(s, (uint64_t)launch));
        for (int i = 0; i <= launch; i++)
            CUDA(cudaGraphLaunch(exec, s->group.stream));
        CALL(ep_stream_sync(s->group.cuda, s->group.stream));
        code |= check(s, "graph");
        TRY(new_data(s, (uint64_t)(100 + launch)));
        TRY(call_dispatch(s, s->group.stream));
        CUDA(cudaGraphLaunch(exec, s->group.stream));
        TRY(call_combine(s, s->group.stream));
        CALL(ep_stream_sync(s->group.cuda, s->group.stream));
        code |= check(s, "graph among calls");
    }
    CUDA(cudaGraphExecDestroy(exec));
    return free_all(s, code);
}

/* --- time -------------------------------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static int run_time(struct state *s)
{
    static double us[2][CALLS];

    for (int memory = 0; memory < 2; memory++) {
        TRY(make_plans(s));
        TRY(make_buffers(s, memory ? SYMMETRIC : ORDINARY));
        TRY(new_data(s, 0));
        for (int i = 0; i < CALLS; i++) {
            double begin = now_ms(), middle;

            TRY(call_dispatch(s, s->streams[0]));
            middle = now_ms();
            TRY(call_combine(s, s->streams[0]));
            us[0][i] = (middle - begin) * 1e3;
            us[1][i] = (now_ms() - middle) * 1e3;
            /* The queue of a stream has room for this many. */
            if (i % 50 == 49)
                CALL(ep_stream_sync(s->group.cuda, s->streams[0]));
        }
        for (int i = 0; i < 2; i++)
            qsort(us[i], CALLS, sizeof(us[i][0]), compare_doubles);
        printf("rank %d: host time of a call on %s memory: dispatch %.1f us (p90 %.1f), combine %.1f us (p90 %.1f)\n",
               s->group.rank, memory ? "symmetric" : "ordinary", us[0][CALLS / 2], us[0][CALLS * 9 / 10],
               us[1][CALLS / 2], us[1][CALLS * 9 / 10]);
        TRY(free_all(s, PASSED));
    }
    return 0;
}

/* --- program ----------------------------------------------------------------------------------------------------- */

static const struct scenario {
    const char *name;
    int (*run)(struct state *s);
} scenarios[] = {{"legal", run_legal},
                 {"ahead", run_ahead},
                 {"streams", run_streams},
                 {"events", run_events},
                 {"handles", run_handles},
                 {"other-gpu", run_other_gpu},
                 {"graph", run_graph},
                 {"time", run_time},
                 {"disagree-arguments", run_different_arguments},
                 {"disagree-calls", run_different_calls}};

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {.group = *group, .seed = run->seed, .shared = run->shared};

    for (int i = 0; i < STREAMS; i++)
        if (cudaStreamCreateWithFlags(&s.streams[i], cudaStreamNonBlocking) != cudaSuccess)
            return FAILED;
    return scenario->run(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};
    struct scenario_run run = {.program = "stream_cuda",
                               .timeout_ms = TIMEOUT_MS,
                               .seconds = 60,
                               .shared_bytes = sizeof(struct shared),
                               .run = run_rank};

    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
