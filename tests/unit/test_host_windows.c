/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that one rank makes symmetric by itself: by ep_alloc_local() and by the callbacks of an allocator; and the
 * sizes that can be queried before an allocation. Ranks are processes and threads.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <pthread.h>
#include <stdalign.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 3
#define TOKENS 5
#define HIDDEN 8192
#define ROWS (RANKS * TOKENS)
#define BYTES ((size_t)ROWS * HIDDEN * sizeof(uint16_t))

/* Returns from the rank with a line number. */
static uint16_t value(int rank, int token, int i)
{
    return (uint16_t)(0x3f80 + rank * 64 + token * 8 + i % 8);
}

static ep_status new_comm(const ep_boot *boot, ep_comm **ret_comm)
{
    return unit_comm_new(boot, NULL, 0, 0, ret_comm);
}

static size_t library_bytes(const ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;

    return ep_comm_get_info(comm, &info) == EP_OK ? info.library_bytes : 0;
}

/* Every token goes to every rank: `recv` receives rows of all ranks, and the combine reads them there. */
static int exchange(ep_comm *comm, int me, uint16_t *recv)
{
    alignas(16) static _Thread_local uint16_t x[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    int32_t experts[TOKENS * RANKS];
    ep_plan_args plan_args;
    ep_dispatch_args dispatch;
    ep_combine_args combine = args_combine(HIDDEN, recv, out);
    ep_plan *plan = NULL;

    for (int i = 0; i < TOKENS * RANKS; i++)
        experts[i] = i % RANKS;
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = value(me, i / HIDDEN, i % HIDDEN);
    plan_args = args_plan(experts, EP_I32, TOKENS, RANKS, RANKS);
    SURE(ep_plan_new(comm, &plan_args, &plan) == EP_OK);
    dispatch = args_dispatch(EP_BF16, HIDDEN, x, recv, ROWS);
    SURE(ep_dispatch_sync(plan, &dispatch) == EP_OK);
    for (int i = 0; i < ROWS * HIDDEN; i++)
        SURE(recv[i] == value(i / HIDDEN / TOKENS, i / HIDDEN % TOKENS, i % HIDDEN));
    SURE(ep_combine_sync(plan, &combine) == EP_OK);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        SURE(out[i] == ep_bf16_from_f32((float)RANKS * ep_bf16_to_f32(x[i])));
    ep_plan_free(plan);
    return 0;
}

static void run_mode(int mode, int (*run)(const ep_boot *, void *))
{
    unit_run_ranks(mode, RANKS, run, NULL);
}

static void run_both(int (*run)(const ep_boot *, void *))
{
    run_mode(EP_LAUNCH_FORK, run);
    run_mode(EP_LAUNCH_THREADS, run);
}

/* --- ep_alloc_local --- */

static int allocates_alone(const ep_boot *boot, void *argument)
{
    void *ordinary = aligned_alloc(64, BYTES), *others[8], *memory = NULL, *foreign = NULL;
    ep_comm *comm = NULL;
    size_t before;

    (void)argument;
    SURE(new_comm(boot, &comm) == EP_OK);
    /* Ranks allocate different sizes, between operations, repeatedly. */
    for (int round = 0; round < 3; round++) {
        int n = (boot->rank + round) % RANKS;

        for (int i = 0; i < n; i++)
            SURE(ep_alloc_local(comm, (size_t)i * 5000, &others[i]) == EP_OK);
        SURE(ep_alloc_local(comm, BYTES, &memory) == EP_OK);
        SURE((uintptr_t)memory % 4096 == 0);
        before = library_bytes(comm);
        SURE(exchange(comm, boot->rank, memory) == 0);
        SURE(round || library_bytes(comm) < before + BYTES); /* in place: no staging */
        SURE(ep_free_local(comm, memory) == EP_OK);
        for (int i = 0; i < n; i++)
            SURE(ep_free_local(comm, others[i]) == EP_OK);
        SURE(exchange(comm, boot->rank, ordinary) == 0);
        SURE(library_bytes(comm) >= BYTES);
    }
    /* Each kind has its own free function. */
    SURE(ep_free_local(comm, memory) == EP_E_ARG && ep_free_local(comm, NULL) == EP_OK);
    SURE(ep_alloc(comm, 100, &foreign) == EP_OK);
    SURE(ep_free_local(comm, foreign) == EP_E_ARG);
    SURE(strstr(ep_last_error(), "is not from ep_alloc_local of this communicator"));
    SURE(ep_free(comm, foreign) == EP_OK);
    SURE(ep_alloc_local(comm, SIZE_MAX, &memory) == EP_E_OVERFLOW);
    /* Peers cannot map memory of the program. */
    SURE(ep_register(comm, ordinary, BYTES) == EP_E_UNSUPPORTED && ep_unregister(comm, NULL) == EP_OK);
    SURE(strcmp(ep_last_error(), "ep_register: backend host does not provide it") == 0);
    SURE(ep_alloc_local(comm, 10, &memory) == EP_OK);
    SURE(ep_free(comm, memory) == EP_E_ARG);
    SURE(ep_comm_async_error(comm) == EP_OK);
    (void)ep_comm_barrier(comm); /* a rank that leaves it first may abort the others in it */
    ep_comm_abort(comm);
    SURE(ep_alloc_local(comm, 10, &foreign) == EP_E_ABORTED);
    SURE(ep_free_local(comm, memory) == EP_OK); /* also after a failure */
    ep_comm_free(comm);
    free(ordinary);
    return 0;
}

TEST_CALL(a_rank_allocates_alone, run_both(allocates_alone))

/* --- callbacks --- */

static void *allocate_and_free(void *argument)
{
    void *memory = ep_pool_alloc(5000, *(int *)argument, NULL);

    if (memory)
        memset(memory, 1, 5000);
    ep_pool_free(memory, 5000, *(int *)argument, NULL);
    return memory;
}

static int pools(const ep_boot *boot, void *argument)
{
    int device = 3 + boot->rank;
    ep_comm *comm = NULL;
    pthread_t thread;
    void *memory;

    (void)argument;
    SURE(!ep_pool_alloc(10, device, NULL));
    SURE(strstr(ep_last_error(), "to which no communicator is attached: see ep_pool_attach()"));
    SURE(!ep_pool_alloc(10, -1, NULL) && !ep_pool_alloc(10, EP_MAX_POOLS, NULL));
    SURE(new_comm(boot, &comm) == EP_OK);
    SURE(ep_pool_attach(NULL, device) == EP_E_ARG && ep_pool_attach(comm, EP_MAX_POOLS) == EP_E_ARG);
    SURE(ep_pool_attach(comm, device) == EP_OK);
    SURE(!ep_pool_alloc(-1, device, NULL));
    memory = ep_pool_alloc((ptrdiff_t)BYTES, device, NULL);
    SURE(memory && ep_comm_barrier(comm) == EP_OK);
    SURE(pthread_create(&thread, NULL, allocate_and_free, &device) == 0);
    SURE(exchange(comm, boot->rank, memory) == 0);
    SURE(pthread_join(thread, &memory) == 0 && memory);
    memory = ep_pool_alloc((ptrdiff_t)BYTES, device, NULL);
    ep_comm_free(comm);
    ep_pool_free(memory, (ptrdiff_t)BYTES, device, NULL);
    SURE(!ep_pool_alloc(10, device, NULL));
    return 0;
}

TEST_CALL(allocators_call_from_any_thread, run_both(pools))

static bool is_mapped(void *memory)
{
    unsigned char resident;

    return mincore(memory, 4096, &resident) == 0;
}

/* The first communicator, whose block is freed when it is no longer the communicator of the device. */
static int freed_late(ep_comm *first, ep_comm *second, int device)
{
    char *early, *late;

    SURE(ep_pool_attach(first, device) == EP_OK);
    early = ep_pool_alloc((ptrdiff_t)BYTES, device, NULL);
    late = ep_pool_alloc((ptrdiff_t)BYTES, device, NULL);
    SURE(early && late && ep_pool_attach(second, device) == EP_OK);
    ep_pool_free(early, (ptrdiff_t)BYTES, device, NULL);
    SURE(ep_free_local(first, early) == EP_E_ARG); /* it was freed already */
    SURE(!is_mapped(early));
    memset(late, 1, BYTES);
    SURE(ep_comm_barrier(first) == EP_OK);
    ep_comm_free(first);
    SURE(!is_mapped(late));
    ep_pool_free(late, (ptrdiff_t)BYTES, device, NULL); /* its memory is gone already */
    return 0;
}

/* A forked child frees nothing of its parent. */
static int freed_by_child(ep_comm *comm, int device)
{
    char *memory = ep_pool_alloc(5000, device, NULL);
    int code = -1;
    pid_t child;

    SURE(memory);
    memory[0] = 7;
    child = fork();
    SURE(child >= 0);
    if (child == 0) {
        ep_pool_free(memory, 5000, device, NULL);
        _exit(memory[0] == 7 && !ep_pool_alloc(10, device, NULL) ? 0 : 1);
    }
    SURE(waitpid(child, &code, 0) == child && code == 0);
    ep_pool_free(memory, 5000, device, NULL);
    SURE(ep_free_local(comm, memory) == EP_E_ARG);
    return 0;
}

static int pools_change(const ep_boot *boot, void *argument)
{
    ep_comm *first = NULL, *second = NULL;

    (void)argument;
    SURE(new_comm(boot, &first) == EP_OK && new_comm(boot, &second) == EP_OK);
    SURE(freed_late(first, second, 0) == 0);
    SURE(freed_by_child(second, 0) == 0);
    ep_comm_free(second);
    return 0;
}

TEST_CALL(blocks_go_back_to_the_communicator_they_are_of, run_mode(EP_LAUNCH_FORK, pools_change))

struct allocator {
    atomic_bool stop;
    int device;
};

/* A thread of an allocator, which caches some blocks and knows nothing of communicators. */
static void *allocate_on(void *argument)
{
    struct allocator *allocator = argument;
    void *kept[4] = {NULL};

    for (size_t i = 0; !atomic_load(&allocator->stop); i++) {
        ep_pool_free(kept[i % 4], 5000, allocator->device, NULL);
        kept[i % 4] = ep_pool_alloc(5000, allocator->device, NULL);
    }
    for (int i = 0; i < 4; i++)
        ep_pool_free(kept[i], 5000, allocator->device, NULL);
    return NULL;
}

static int pools_end(const ep_boot *boot, void *argument)
{
    struct allocator allocator = {.device = boot->rank};
    pthread_t threads[2];

    (void)argument;
    for (int i = 0; i < 2; i++)
        SURE(pthread_create(&threads[i], NULL, allocate_on, &allocator) == 0);
    for (int round = 0; round < 20; round++) {
        ep_comm *comm = NULL;

        SURE(new_comm(boot, &comm) == EP_OK);
        SURE(ep_pool_attach(comm, allocator.device) == EP_OK);
        SURE(ep_comm_barrier(comm) == EP_OK);
        ep_comm_free(comm);
    }
    atomic_store(&allocator.stop, true);
    for (int i = 0; i < 2; i++)
        SURE(pthread_join(threads[i], NULL) == 0);
    return 0;
}

TEST_CALL(a_communicator_ends_concurrently_with_its_allocator, run_both(pools_end))

/* --- sizes --- */

static uint32_t draw(uint32_t *seed)
{
    return (*seed = *seed * 1664525u + 1013904223u) >> 8;
}

/* Distinct choices of each token; `rank` >= 0: as many as possible there. */
static void choose(int32_t *experts, int topk, int n_experts, int rank, uint32_t *seed)
{
    int local = n_experts / RANKS;

    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < topk; k++) {
            int first = (int)(draw(seed) % (uint32_t)n_experts);

            if (rank >= 0)
                experts[t * topk + k] = k < local ? rank * local + (k + t) % local : -1;
            else if (k == 0)
                experts[t * topk] = first;
            else
                experts[t * topk + k] = (experts[t * topk] + k) % n_experts;
        }
}

static int rows_suffice(const ep_boot *boot, void *argument)
{
    static const int alignments[] = {1, 4, 128};
    uint32_t seed = 5; /* the same on all ranks, so that they agree on the loops; choices may repeat */
    ep_comm *comm = NULL;

    (void)argument;
    SURE(new_comm(boot, &comm) == EP_OK);
    for (int round = 0; round < 60; round++) {
        int32_t experts[TOKENS * 8];
        ep_plan_args args = EP_PLAN_ARGS_INIT;
        ep_plan_info info = EP_PLAN_INFO_INIT;
        ep_plan *plan;
        int64_t most = -1;
        bool worst = round % 2;

        args.n_experts = RANKS * (1 + round % 4);
        args.topk = 1 + (int)(draw(&seed) % (uint32_t)(args.n_experts < 8 ? args.n_experts : 8));
        args.flags = round % 3 ? EP_PLAN_EXPANDED : 0;
        args.expert_alignment = alignments[round % 5 % 3];
        args.max_tokens = TOKENS;
        SURE(ep_plan_get_max_rows(comm, &args, &most) == EP_OK);
        choose(experts, args.topk, args.n_experts, worst ? 1 : -1, &seed);
        args.topk_idx = experts;
        args.idx_type = EP_I32;
        args.n_tokens = TOKENS;
        args.max_tokens = 0;
        SURE(ep_plan_new(comm, &args, &plan) == EP_OK);
        SURE(ep_plan_get_info(plan, &info) == EP_OK);
        SURE(info.n_recv <= most);
        /* Exact if every count is a multiple of the alignment, and no token names an expert twice. */
        if (worst && boot->rank == 1 &&
            (!(args.flags & EP_PLAN_EXPANDED) || (args.expert_alignment == 1 && args.topk <= args.n_experts / RANKS)))
            SURE(info.n_recv == most);
        ep_plan_free(plan);
    }
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(rows_can_be_asked_for, run_mode(EP_LAUNCH_THREADS, rows_suffice))

static int ll_sizes(const ep_boot *boot, void *argument)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;
    ep_ll_sizes sizes = EP_LL_SIZES_INIT;
    ep_comm *comm = NULL;
    ep_ll *ll = NULL;
    size_t before;

    (void)argument;
    SURE(new_comm(boot, &comm) == EP_OK);
    config.max_tokens = 64;
    config.hidden = 2048;
    config.n_experts = RANKS * 2;
    config.topk = 4;
    SURE(ep_ll_get_sizes(comm, &config, NULL) == EP_E_ARG && ep_ll_get_sizes(comm, NULL, &sizes) == EP_E_ARG);
    SURE(ep_ll_get_sizes(comm, &config, &sizes) == EP_OK);
    SURE(sizes.rows == 2 * RANKS * 64);
    SURE(sizes.combine_bytes == 2 * sizes.rows * 2048 * 2);
    before = library_bytes(comm);
    SURE(ep_ll_new(comm, &config, &ll) == EP_OK);
    SURE(library_bytes(comm) - before == (size_t)sizes.library_bytes);
    ep_ll_free(ll);
    SURE(library_bytes(comm) == before);
    config.hidden = 100;
    SURE(ep_ll_get_sizes(comm, &config, &sizes) == EP_E_ARG);
    SURE(strstr(ep_last_error(), "ep_ll_get_sizes: hidden 100"));
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(low_latency_sizes_are_those_of_the_object, run_mode(EP_LAUNCH_THREADS, ll_sizes))
