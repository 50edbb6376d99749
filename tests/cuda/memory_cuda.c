/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_cuda [--ranks N] [--rounds N] [--seed N] [--only SCENARIO]: memory that a rank allocates or registers alone.
 * Operations write there directly, and must write what the host backend writes; the library needs no memory for copies.
 *
 *   local     ep_alloc_local(), different sizes on each rank, freed and allocated again in each round, also by a thread
 *   register  a window in memory of cudaMalloc(), registered again in each round
 *   pool      the callbacks of allocators
 *   free      freed memory is cached and reused, and ep_free() releases it; the same for slots of windows
 *   refuse    what cannot be registered or freed, and why
 *   sizes     the sizes reported in advance are those used
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 512, TOPK = 4, ROW = HIDDEN * 2, CHOICE = TOPK * 4, TIMEOUT_MS = 20000, MOST_TOKENS = 900 };
enum { HOST, DEVICE };
enum { RECV_X, RECV_INDEX, RECV_WEIGHTS, N_IN_PLACE, OUT = N_IN_PLACE, OUT_WEIGHTS, N_OUTPUTS };
enum {
    MB = 1 << 20,
    LITTLE = MB,
    AGAIN = 600
}; /* LITTLE: less than any buffer; AGAIN: more often than there are slots */

struct state {
    struct group group;
    uint64_t random;
    int experts, rounds, n_tokens;
    bool concurrent; /* another thread allocates */
    int64_t n_recv;
    ep_plan *plan[2];
    struct mirror x, weights, out[2]; /* ordinary memory */
    struct mirror arena;              /* what is received; its device part is the memory that the scenario is about */
    size_t at[N_IN_PLACE];
};

/* The library's memory, without arenas between nodes, which grow with operations on any memory. */
static int library_bytes(const struct state *s, uint64_t *ret_bytes)
{
    ep_comm_info info = EP_COMM_INFO_INIT;
    size_t arenas;

    CALL(ep_cuda_get_net_memory(s->group.cuda, &arenas, NULL));
    CALL(ep_comm_get_info(s->group.cuda, &info));
    EXPECT(info.library_bytes >= arenas, "%zu bytes of the library's own, %zu of them arenas", info.library_bytes,
           arenas);
    *ret_bytes = info.library_bytes - arenas;
    return 0;
}

static int new_plans(struct state *s)
{
    struct routing routing = {.topk = TOPK, .n_experts = s->experts, .nranks = s->group.nranks, .idx_type = EP_I32};
    ep_plan_args args;
    ep_plan_info info = {.size = sizeof(info)};
    int32_t *index;

    routing.n_tokens = s->n_tokens = (int)(next_random(&s->random) % MOST_TOKENS);
    index = malloc((size_t)s->n_tokens * CHOICE + 1);
    EXPECT(index, "no memory for the routing of %d tokens", s->n_tokens);
    fill_routing(&routing, &s->random, index);
    args = args_plan(index, EP_I32, s->n_tokens, TOPK, s->experts);
    CALL(ep_plan_new(s->group.host, &args, &s->plan[HOST]));
    CALL(ep_plan_new(s->group.cuda, &args, &s->plan[DEVICE]));
    free(index);
    CALL(ep_plan_get_info(s->plan[HOST], &info));
    s->n_recv = info.n_recv;
    return 0;
}

static int new_inputs(struct state *s)
{
    TRY(mirror_new(&s->group, "x", (size_t)s->n_tokens * ROW, ORDINARY, &s->x));
    TRY(mirror_new(&s->group, "topk_weights", (size_t)s->n_tokens * CHOICE, ORDINARY, &s->weights));
    TRY(mirror_new(&s->group, "out", (size_t)s->n_tokens * ROW, ORDINARY, &s->out[0]));
    TRY(mirror_new(&s->group, "out_topk_weights", (size_t)s->n_tokens * CHOICE, ORDINARY, &s->out[1]));
    fill_bf16((uint16_t *)(void *)s->x.host, s->x.bytes / 2, &s->random);
    for (size_t i = 0; i < s->weights.bytes / 4; i++)
        ((float *)(void *)s->weights.host)[i] = (float)(next_random(&s->random) % 1000) / 999.0f;
    TRY(mirror_push(&s->group, &s->x));
    return mirror_push(&s->group, &s->weights);
}

/* Bytes that the arena needs, with gaps that must not be written. */
static size_t lay_arena(struct state *s)
{
    static const size_t row_bytes[N_IN_PLACE] = {ROW, CHOICE, CHOICE};
    size_t used = 0;

    for (int i = 0; i < N_IN_PLACE; i++) {
        s->at[i] = used;
        used += (size_t)s->n_recv * row_bytes[i] + GUARD;
    }
    return used;
}

static unsigned char *memory_on(const struct mirror *mirror, int side)
{
    return side == DEVICE ? mirror->device : mirror->host;
}

static int call_both(struct state *s, int side)
{
    ep_stream stream = side == DEVICE ? s->group.stream : NULL;
    ep_comm *comm = side == DEVICE ? s->group.cuda : s->group.host;
    unsigned char *arena = memory_on(&s->arena, side);
    ep_dispatch_args dispatch =
        args_dispatch(EP_BF16, HIDDEN, memory_on(&s->x, side), arena + s->at[RECV_X], s->n_recv);
    ep_combine_args combine = args_combine(HIDDEN, arena + s->at[RECV_X], memory_on(&s->out[0], side));

    dispatch.topk_weights = (const float *)(const void *)memory_on(&s->weights, side);
    dispatch.recv_topk_idx = arena + s->at[RECV_INDEX];
    dispatch.recv_topk_weights = (float *)(void *)(arena + s->at[RECV_WEIGHTS]);
    CALL(ep_dispatch(s->plan[side], &dispatch, stream));
    combine.topk_weights = (const float *)(const void *)(arena + s->at[RECV_WEIGHTS]);
    combine.out_topk_weights = (float *)(void *)memory_on(&s->out[1], side);
    CALL(ep_combine(s->plan[side], &combine, stream));
    CALL(ep_stream_sync(comm, stream));
    return 0;
}

/* Runs both backends; the device's received rows are in `memory`. Must not allocate staging buffers. */
static int compare_in(struct state *s, void *memory, size_t bytes, int round)
{
    uint64_t before, after;
    int code = PASSED;
    char phase[40];

    s->arena = (struct mirror){
        .name = "received", .device = memory, .bytes = bytes - GUARD, .row_bytes = ROW, .host = malloc(bytes)};
    EXPECT(s->arena.host, "no memory for %zu bytes", bytes);
    TRY(mirror_poison(&s->group, &s->arena));
    TRY(new_inputs(s));
    CUDA(cudaStreamSynchronize(s->group.stream));
    TRY(library_bytes(s, &before));
    TRY(call_both(s, DEVICE));
    TRY(library_bytes(s, &after));
    EXPECT(s->concurrent || after < before + LITTLE, "%llu bytes of the library's own, %llu before",
           (unsigned long long)after, (unsigned long long)before);
    TRY(call_both(s, HOST));
    snprintf(phase, sizeof(phase), "round %d", round);
    code |= mirror_compare(&s->group, &s->arena, phase);
    code |= mirror_compare(&s->group, &s->out[0], phase);
    code |= mirror_compare(&s->group, &s->out[1], phase);
    free(s->arena.host);
    code |= mirror_free(&s->group, code & FAILED, &s->x);
    code |= mirror_free(&s->group, code & FAILED, &s->weights);
    code |= mirror_free(&s->group, code & FAILED, &s->out[0]);
    code |= mirror_free(&s->group, code & FAILED, &s->out[1]);
    ep_plan_free(s->plan[HOST]);
    ep_plan_free(s->plan[DEVICE]);
    return code;
}

/* A collective call that releases what the ranks have freed. */
static int free_freed(const struct state *s)
{
    void *memory;

    CALL(ep_alloc(s->group.cuda, 1, &memory));
    CALL(ep_free(s->group.cuda, memory));
    return 0;
}

/* --- scenarios ------------------------------------------------------------------------------------------------------
 */

struct other {
    ep_comm *comm;
    _Atomic int stop, failed;
    char why[200];
};

/* Runs concurrently with the operations of the caller's thread. */
static void *allocate_concurrently(void *argument)
{
    struct other *other = argument;
    uint64_t random = 17;

    while (!other->stop && !other->failed) {
        void *memory[3] = {NULL};

        for (int i = 0; i < 3; i++)
            other->failed |= ep_alloc_local(other->comm, (size_t)next_random(&random) % (12 * MB), &memory[i]) != EP_OK;
        for (int i = 0; i < 3; i++)
            other->failed |= memory[i] && ep_free_local(other->comm, memory[i]) != EP_OK;
        if (other->failed)
            snprintf(other->why, sizeof(other->why), "%s", ep_last_error());
        sleep_ms(1);
    }
    return NULL;
}

static int run_local(struct state *s)
{
    struct other other = {.comm = s->group.cuda};
    int code = PASSED;
    pthread_t thread;

    for (int round = 0; round < s->rounds && !(code & FAILED); round++) {
        bool concurrent = round % 2;
        size_t bytes;
        void *memory;

        TRY(new_plans(s));
        bytes = lay_arena(s);
        CALL(ep_alloc_local(s->group.cuda, bytes + (size_t)s->group.rank * 3 * MB, &memory));
        s->concurrent = concurrent;
        other.stop = 0;
        EXPECT(!concurrent || pthread_create(&thread, NULL, allocate_concurrently, &other) == 0, "no thread");
        code |= compare_in(s, memory, bytes, round);
        other.stop = 1;
        if (concurrent)
            pthread_join(thread, NULL);
        EXPECT(!other.failed, "the other thread: %s", other.why);
        CALL(ep_free_local(s->group.cuda, memory));
    }
    return code;
}

static int run_register(struct state *s)
{
    /* Windows begin at a multiple of 16 bytes; each rank uses another offset in memory of another size. */
    size_t begin = 4096 + (size_t)s->group.rank * 16, most, bytes;
    int code = PASSED;
    unsigned char *whole;

    most = (size_t)s->group.nranks * MOST_TOKENS * (ROW + 2 * CHOICE) + 4 * GUARD + MB;
    CUDA(cudaMalloc((void **)&whole, most + (size_t)s->group.rank * 100000));
    for (int round = 0; round < s->rounds && !(code & FAILED); round++) {
        TRY(new_plans(s));
        bytes = lay_arena(s);
        if (round == 0)
            CUDA(cudaMemsetAsync(whole, POISON, most, s->group.stream));
        CALL(ep_register(s->group.cuda, whole + begin, bytes));
        code |= compare_in(s, whole + begin, bytes, round);
        CALL(ep_unregister(s->group.cuda, whole + begin));
        begin += 16;
    }
    TRY(free_freed(s));
    CUDA(cudaFree(whole));
    return code;
}

static int run_pool(struct state *s)
{
    int code = PASSED;

    CALL(ep_pool_attach(s->group.cuda, s->group.device));
    for (int round = 0; round < s->rounds && !(code & FAILED); round++) {
        size_t bytes;
        void *memory;

        TRY(new_plans(s));
        bytes = lay_arena(s);
        memory = ep_pool_alloc((ptrdiff_t)bytes, s->group.device, s->group.stream);
        EXPECT(memory, "ep_pool_alloc: %s", ep_last_error());
        code |= compare_in(s, memory, bytes, round);
        ep_pool_free(memory, (ptrdiff_t)bytes, s->group.device, s->group.stream);
    }
    return code;
}

static int run_free(struct state *s)
{
    uint64_t before, after;
    void *memory, *same;

    TRY(free_freed(s));
    TRY(library_bytes(s, &before));
    CALL(ep_alloc_local(s->group.cuda, 5 * MB, &memory));
    for (int i = 0; i < AGAIN; i++) {
        CALL(ep_free_local(s->group.cuda, memory));
        CALL(ep_alloc_local(s->group.cuda, (size_t)(5 * MB - i), &same));
        EXPECT(same == memory, "time %d: another address", i);
    }
    CALL(ep_free_local(s->group.cuda, memory));
    TRY(library_bytes(s, &after));
    EXPECT(after >= before + 5 * MB, "the freed memory is not counted as the library's: %llu bytes",
           (unsigned long long)after);
    CUDA(cudaMalloc(&memory, MB));
    for (int i = 0; i < AGAIN; i++) {
        CALL(ep_register(s->group.cuda, memory, (size_t)(MB - i)));
        CALL(ep_unregister(s->group.cuda, memory));
    }
    TRY(free_freed(s));
    TRY(library_bytes(s, &after));
    EXPECT(after < before + LITTLE, "%llu bytes of the library's own, %llu before", (unsigned long long)after,
           (unsigned long long)before);
    CUDA(cudaFree(memory));
    TRY(new_plans(s));
    CALL(ep_alloc_local(s->group.cuda, lay_arena(s), &memory));
    return compare_in(s, memory, lay_arena(s), 0);
}

static int run_refuse(struct state *s)
{
    static char host[4096];
    ep_comm *comm = s->group.cuda;
    unsigned char *memory;
    void *local, *symmetric, *pooled, *managed, *left = host;

    CALL(ep_alloc(comm, MB, &symmetric));
    CALL(ep_alloc_local(comm, MB, &local));
    CUDA(cudaMalloc((void **)&memory, 8 * MB));
    CUDA(cudaMallocManaged(&managed, MB, cudaMemAttachGlobal));
    CUDA(cudaMallocAsync(&pooled, MB, s->group.stream));
    CUDA(cudaStreamSynchronize(s->group.stream));
    TRY(expect_status("host", ep_register(comm, host, sizeof(host)), EP_E_UNSUPPORTED, "host memory"));
    TRY(expect_status("managed", ep_register(comm, managed, MB), EP_E_UNSUPPORTED, "managed"));
    TRY(expect_status("of a pool", ep_register(comm, pooled, MB), EP_E_UNSUPPORTED, "cudaMallocAsync"));
    TRY(expect_status("too long", ep_register(comm, memory + MB, 8 * MB), EP_E_ARG, "beyond"));
    TRY(expect_status("allocated", ep_register(comm, local, MB), EP_E_ARG, "already"));
    TRY(expect_status("allocated", ep_register(comm, symmetric, MB), EP_E_ARG, "already"));
    CALL(ep_register(comm, memory + MB, MB));
    TRY(expect_status("twice", ep_register(comm, memory + 2 * MB - 1, MB), EP_E_ARG, "already"));
    TRY(expect_status("around", ep_register(comm, memory, 8 * MB), EP_E_ARG, "already"));
    CALL(ep_register(comm, memory + 2 * MB, MB));
    TRY(expect_status("elsewhere", ep_unregister(comm, memory), EP_E_ARG, "not from ep_register"));
    TRY(expect_status("not local", ep_free_local(comm, symmetric), EP_E_ARG, "not from ep_alloc_local"));
    TRY(expect_status("a window", ep_free_local(comm, memory + MB), EP_E_ARG, "not from ep_alloc_local"));
    TRY(expect_status("too much", ep_alloc_local(comm, (size_t)1 << 50, &left), EP_E_MEMORY, "ep_alloc_local"));
    EXPECT(left == host, "what was to be returned has changed");
    CALL(ep_free_local(comm, local));
    TRY(expect_status("again", ep_free_local(comm, local), EP_E_ARG, "not from ep_alloc_local"));
    CALL(ep_unregister(comm, memory + MB));
    CALL(ep_unregister(comm, memory + 2 * MB));
    CALL(ep_comm_async_error(comm)); /* none of this is a failure of the group */
    CALL(ep_free(comm, symmetric));
    CUDA(cudaFree(memory));
    CUDA(cudaFree(managed));
    CUDA(cudaFreeAsync(pooled, s->group.stream));
    return 0;
}

static int run_sizes(struct state *s)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;
    ep_ll_sizes sizes = EP_LL_SIZES_INIT;
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    int64_t host, cuda;
    uint64_t before, after, left, again;
    ep_ll *ll;

    args.topk = TOPK;
    args.n_experts = s->experts;
    args.max_tokens = MOST_TOKENS;
    CALL(ep_plan_get_max_rows(s->group.host, &args, &host));
    CALL(ep_plan_get_max_rows(s->group.cuda, &args, &cuda));
    EXPECT(host == cuda && cuda >= MOST_TOKENS, "%lld rows, not %lld", (long long)cuda, (long long)host);
    config.max_tokens = 64;
    config.hidden = 2048;
    config.n_experts = s->experts;
    config.topk = TOPK;
    CALL(ep_ll_get_sizes(s->group.cuda, &config, &sizes));
    EXPECT(sizes.combine_bytes >= sizes.rows * config.hidden * 2, "combine buffers of %lld bytes for %lld rows",
           (long long)sizes.combine_bytes, (long long)sizes.rows);
    TRY(library_bytes(s, &before));
    CALL(ep_ll_new(s->group.cuda, &config, &ll));
    TRY(library_bytes(s, &after));
    EXPECT(after - before >= (uint64_t)sizes.library_bytes && after - before < (uint64_t)sizes.library_bytes + LITTLE,
           "%llu bytes, not %lld", (unsigned long long)(after - before), (long long)sizes.library_bytes);
    ep_ll_free(ll);
    /* The segment in device memory is cached for the next ep_ll; pinned memory of the network is freed. */
    TRY(library_bytes(s, &left));
    EXPECT(group_division.nodes <= 1 || left < after, "all of %llu bytes stay", (unsigned long long)(after - before));
    CALL(ep_ll_new(s->group.cuda, &config, &ll));
    TRY(library_bytes(s, &again));
    ep_ll_free(ll);
    EXPECT(again == after, "%llu bytes, at first %llu", (unsigned long long)(again - before),
           (unsigned long long)(after - before));
    config.max_tokens = INT32_MAX / config.n_experts + 1;
    config.hidden = 128;
    return expect_status("too many rows", ep_ll_get_sizes(s->group.cuda, &config, &sizes), EP_E_UNSUPPORTED, "indices");
}

/* --- program ----------------------------------------------------------------------------------------------------- */

static const struct scenario {
    const char *name;
    int (*run)(struct state *s);
} scenarios[] = {{"local", run_local}, {"register", run_register}, {"pool", run_pool},
                 {"free", run_free},   {"refuse", run_refuse},     {"sizes", run_sizes}};

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {.group = *group,
                      .random = run->seed * 4096 + (uint64_t)group->rank + 1,
                      .rounds = run->rounds,
                      .experts = group->nranks * 12};

    return scenario->run(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .rounds = 8, .seed = 1};
    struct scenario_run run = {.program = "memory_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 120, .run = run_rank};

    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
