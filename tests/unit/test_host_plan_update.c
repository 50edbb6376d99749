/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans that get new routing, and plans from a mask: what is refused, the order in which routing is read, plans that
 * are freed unused. Random plans and updates are compared with the reference in tests/property/sequence_host. Ranks are
 * threads.
 */
#include "ranks.h"

#include "backend/host/host.h"

#define RANKS 3
#define LOCAL 4
#define EXPERTS (RANKS * LOCAL)
#define TOPK 3
#define MOST 24 /* tokens */
#define HIDDEN 16
#define ALIGNMENT 4
#define CAPACITY (RANKS * MOST * TOPK + LOCAL * ALIGNMENT)

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t h = a * 2654435761u ^ (b + 77) * 2246822519u ^ (c + 3) * 3266489917u;

    h = (h ^ h >> 15) * 2654435761u;
    return h ^ h >> 13;
}

/* Round `seed`: the tokens of a rank, and their choices: distinct, some -1. */
static int tokens_of(uint32_t seed, int rank)
{
    return seed % 7 == 3 && rank == 1 ? 0 : (int)(mix(seed, (uint32_t)rank, 1000) % (MOST + 1));
}

static int32_t expert_of(uint32_t seed, int rank, int token, int k)
{
    uint32_t draw = mix(seed, (uint32_t)(rank * MOST + token), 5);

    if (mix(seed, (uint32_t)(rank * MOST + token), (uint32_t)(k + 50)) % 5 == 0)
        return -1;
    return (int32_t)((draw % EXPERTS + (uint32_t)k * (1 + 4 * (draw >> 8 & 1))) % EXPERTS);
}

static bool goes_to(uint32_t seed, int rank, int token, int to)
{
    for (int k = 0; k < TOPK; k++) {
        int32_t expert = expert_of(seed, rank, token, k);

        if (expert >= 0 && expert / LOCAL == to)
            return true;
    }
    return false;
}

struct routing {
    int n_tokens;
    int64_t index[MOST * TOPK];
    uint8_t in_rank[MOST * RANKS];
    int32_t per_expert[EXPERTS];
};

static void make_routing(uint32_t seed, int rank, struct routing *ret)
{
    memset(ret, 0, sizeof(*ret));
    ret->n_tokens = tokens_of(seed, rank);
    for (int t = 0; t < ret->n_tokens; t++) {
        for (int k = 0; k < TOPK; k++) {
            int32_t expert = expert_of(seed, rank, t, k);

            ret->index[t * TOPK + k] = expert;
            if (expert >= 0)
                ret->per_expert[expert]++;
        }
        for (int to = 0; to < RANKS; to++)
            ret->in_rank[t * RANKS + to] = goes_to(seed, rank, t, to);
    }
}

/* --- one rank ---------------------------------------------------------------------------------------------------- */

/* Outputs of a dispatch and a combine. */
struct result {
    alignas(16) uint16_t x[CAPACITY * HIDDEN], out[MOST * HIDDEN];
    int32_t source[CAPACITY], with_rows[CAPACITY], n, psum_rank[RANKS], exact[LOCAL];
};

struct member {
    ep_comm *comm;
    int rank;
    bool mask;
    alignas(16) uint16_t x[MOST * HIDDEN];
    struct routing routing;
    struct result fresh;
};

struct scenario {
    int (*run_rank)(struct member *m);
    int timeout_ms;
};

static ep_plan_args plan_args(const struct member *m, const struct routing *routing, int64_t capacity)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    if (m->mask) {
        args.token_in_rank = routing->in_rank;
        args.tokens_per_expert = routing->per_expert;
    } else {
        args.topk_idx = routing->index;
        args.idx_type = EP_I64;
        args.topk = TOPK;
    }
    args.n_tokens = routing->n_tokens;
    args.n_experts = EXPERTS;
    args.expert_alignment = ALIGNMENT;
    args.max_recv_tokens = capacity;
    args.max_tokens = MOST;
    return args;
}

static ep_plan_update_args update_args(const struct routing *routing)
{
    return (ep_plan_update_args){
        .size = sizeof(ep_plan_update_args), .topk_idx = routing->index, .n_tokens = routing->n_tokens};
}

static void fill(struct member *m, uint32_t seed)
{
    for (int t = 0; t < MOST; t++)
        for (int i = 0; i < HIDDEN; i++)
            m->x[t * HIDDEN + i] = (uint16_t)(mix(seed, (uint32_t)(m->rank * MOST + t), (uint32_t)i) & 0x3fff);
    make_routing(seed, m->rank, &m->routing);
}

/* Dispatch, combine and metadata, queued. */
static ep_status queue_all(struct member *m, ep_plan *plan, int64_t out_rows, struct result *result, ep_stream stream)
{
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    ep_plan_metadata metadata = EP_PLAN_METADATA_INIT;
    bool sources = out_rows >= CAPACITY; /* with the rows; fewer are too few for them */

    memset(result, 0x11, sizeof(*result));
    dispatch = args_dispatch(EP_BF16, HIDDEN, m->x, result->x, out_rows);
    dispatch.recv_source = sources ? result->with_rows : NULL;
    dispatch.source_stride = sources ? MOST : 0;
    EP_TRY(ep_dispatch(plan, &dispatch, stream));
    combine = args_combine(HIDDEN, result->x, result->out);
    EP_TRY(ep_combine(plan, &combine, stream));
    metadata.recv_source = result->source;
    metadata.n_recv_tokens = &result->n;
    metadata.psum_rank = result->psum_rank;
    metadata.count_exact = result->exact;
    return ep_plan_get_metadata(plan, &metadata, stream);
}

/* The tokens that a rank receives, computed from the routing of all. */
static int list_tokens(uint32_t seed, int to, int32_t *ret_source)
{
    int n = 0;

    for (int rank = 0; rank < RANKS; rank++)
        for (int t = 0; t < tokens_of(seed, rank); t++)
            if (goes_to(seed, rank, t, to))
                ret_source[n++] = rank * MOST + t;
    return n;
}

static int check_tokens(const struct member *m, uint32_t seed, const struct result *result)
{
    int32_t source[CAPACITY];
    int n = list_tokens(seed, m->rank, source);

    SURE(result->n == n && memcmp(result->source, source, (size_t)n * sizeof(source[0])) == 0);
    return 0;
}

/* --- running ----------------------------------------------------------------------------------------------------- */

static int run_rank(const ep_boot *boot, void *argument)
{
    static struct member members[RANKS];
    struct member *m = &members[boot->rank];
    struct scenario *scenario = argument;
    int code;

    m->rank = boot->rank;
    m->mask = false;
    SURE(unit_comm_new(boot, NULL, 0, scenario->timeout_ms ? scenario->timeout_ms : 60000, &m->comm) == EP_OK);
    code = scenario->run_rank(m);
    ep_comm_free(m->comm);
    return code;
}

static void run(struct scenario scenario)
{
    unit_run_threads(RANKS, run_rank, &scenario);
}

/* A plan of fixed capacity becomes one of exact counts: outputs need no more rows, and there are no updates. */
static int settle(struct member *m)
{
    ep_plan_info exact = EP_PLAN_INFO_INIT, info = EP_PLAN_INFO_INIT;
    struct result *result = &m->fresh;
    ep_plan_update_args update;
    ep_plan_args args;
    ep_plan *plan, *other;

    fill(m, 2);
    args = plan_args(m, &m->routing, 0);
    SURE(ep_plan_new(m->comm, &args, &other) == EP_OK);
    SURE(ep_plan_settle(other) == EP_OK && ep_plan_get_info(other, &exact) == EP_OK);
    SURE(exact.most_recv >= exact.n_recv && exact.out_rows == exact.n_recv);
    args.max_recv_tokens = CAPACITY;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    SURE(ep_plan_settle(plan) == EP_E_STATE && strstr(ep_last_error(), "before its first operation"));
    SURE(ep_plan_get_info(plan, &info) == EP_OK && info.most_recv == -1);
    SURE(queue_all(m, plan, CAPACITY - 1, result, NULL) == EP_E_CAPACITY);
    SURE(queue_all(m, plan, CAPACITY, result, NULL) == EP_OK);
    SURE(ep_plan_settle(plan) == EP_OK && ep_plan_get_info(plan, &info) == EP_OK);
    SURE(info.n_recv == exact.n_recv && info.out_rows == exact.n_recv && info.most_recv == exact.most_recv);
    SURE(!result->source[CAPACITY - 1]); /* what was queued before has filled its outputs */
    SURE(!memcmp(info.recv_per_expert, exact.recv_per_expert, LOCAL * sizeof(*info.recv_per_expert)));
    SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
    SURE(!memcmp(result->with_rows, result->source, sizeof(result->source)));
    SURE(queue_all(m, plan, info.n_recv - 1, result, NULL) == EP_E_CAPACITY);
    SURE(queue_all(m, plan, info.n_recv, result, NULL) == EP_OK);
    SURE(ep_stream_sync(m->comm, NULL) == EP_OK && !check_tokens(m, 2, result));
    SURE(result->x[info.n_recv * HIDDEN] == 0x1111);
    update = update_args(&m->routing);
    SURE(ep_plan_update(plan, &update, NULL) == EP_E_STATE && strstr(ep_last_error(), "settled"));
    ep_plan_free(plan);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK && ep_plan_update(plan, &update, NULL) == EP_OK);
    SURE(ep_plan_settle(plan) == EP_E_STATE && strstr(ep_last_error(), "since it was updated"));
    ep_plan_free(plan);
    ep_plan_free(other);
    return 0;
}

TEST_CALL(plans_are_settled, run((struct scenario){.run_rank = settle}))

/*
 * One row too many for one rank: every rank learns it in the next operation, and the plan is usable again after an
 * update whose rows fit exactly.
 */
static int overflow(struct member *m)
{
    ep_plan_args args;
    ep_plan_update_args update;
    ep_plan *plan;

    static struct routing fitting[RANKS];
    int32_t source[CAPACITY];
    uint32_t seed = 1;
    int fits = list_tokens(0, 2, source);

    while (list_tokens(seed, 2, source) != fits + 1)
        seed++;
    make_routing(0, m->rank, &fitting[m->rank]);
    fill(m, seed);
    args = plan_args(m, &m->routing, m->rank == 2 ? fits : CAPACITY);
    args.n_tokens = 0;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    for (int round = 0; round < 2; round++) {
        update = update_args(&m->routing);
        SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        m->fresh.n = m->fresh.source[0] = m->fresh.psum_rank[RANKS - 1] = m->fresh.exact[LOCAL - 1] = 77;
        SURE(queue_all(m, plan, CAPACITY, &m->fresh, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_E_CAPACITY);
        SURE(!m->fresh.n && !m->fresh.source[0] && !m->fresh.psum_rank[RANKS - 1] && !m->fresh.exact[LOCAL - 1]);
        SURE(strstr(ep_last_error(), "rank 2 receives "));
        SURE(ep_comm_async_error(m->comm) == EP_OK);
        update = update_args(&fitting[m->rank]);
        SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
        SURE(queue_all(m, plan, CAPACITY, &m->fresh, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(!check_tokens(m, 0, &m->fresh));
    }
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    ep_plan_free(plan);
    return 0;
}

TEST_CALL(an_update_beyond_the_capacity_is_refused_by_all, run((struct scenario){.run_rank = overflow}))

static int update_badly(struct member *m)
{
    ep_plan_args args;
    ep_plan_update_args update;
    ep_plan *plan;
    ep_status status;

    fill(m, 1);
    m->routing.n_tokens = 2;
    for (int i = 0; i < 2 * TOPK; i++)
        m->routing.index[i] = i;
    args = plan_args(m, &m->routing, CAPACITY);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    if (m->rank == 1)
        m->routing.index[TOPK] = EXPERTS;
    update = update_args(&m->routing);
    SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
    status = ep_stream_sync(m->comm, NULL);
    SURE(status == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "token 1: expert 12 at position 0 is not below n_experts 12"));
    SURE(ep_comm_barrier(m->comm) == EP_E_ROUTING);
    ep_plan_free(plan);
    return 0;
}

TEST_CALL(bad_routing_of_an_update_fails_all, run((struct scenario){.run_rank = update_badly, .timeout_ms = 600000}))

/* Masks that no choice of experts can produce; a valid plan follows. */
static int mask_badly(struct member *m)
{
    ep_plan_args args;
    ep_plan *plan;

    fill(m, 2);
    m->mask = true;
    args = plan_args(m, &m->routing, 0);
    args.n_tokens = 1;
    memset(m->routing.in_rank, 0, RANKS);
    memset(m->routing.per_expert, 0, sizeof(m->routing.per_expert));
    m->routing.in_rank[1] = 2;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "token 0: token_in_rank is 2 for rank 1"));
    m->routing.in_rank[1] = 1;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "tokens_per_expert is 0 for the experts of rank 1 together, but 1 tokens go there"));
    m->routing.per_expert[LOCAL] = EP_MAX_TOPK + 1;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "tokens_per_expert is 65 for expert 4, but 1 tokens go to its rank 1"));
    /* Two choices of one token. */
    m->routing.per_expert[LOCAL] = 2;
    m->routing.per_expert[0] = -1;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    m->routing.per_expert[0] = 0;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    ep_plan_free(plan);
    return 0;
}

TEST_CALL(masks_are_checked, run((struct scenario){.run_rank = mask_badly}))

/* Routing that is read in stream order: a function in the stream writes it. */
static void write_routing(void *context)
{
    struct member *m = context;

    make_routing(9, m->rank, &m->routing);
}

static int read_in_stream_order(struct member *m)
{
    ep_plan_update_args update;
    ep_plan_args args;
    ep_queue *queue;
    ep_plan *plan;

    SURE(ep_queue_new(m->comm, &queue) == EP_OK);
    for (int updates = 0; updates < 2; updates++) {
        fill(m, 1);
        m->routing.n_tokens = tokens_of(9, m->rank);
        args = plan_args(m, &m->routing, CAPACITY);
        args.stream = queue;
        if (!updates)
            SURE(ep_stream_call(m->comm, queue, write_routing, m) == EP_OK);
        SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
        if (updates) {
            update = update_args(&m->routing);
            SURE(ep_stream_call(m->comm, queue, write_routing, m) == EP_OK);
            SURE(ep_plan_update(plan, &update, queue) == EP_OK);
        }
        SURE(queue_all(m, plan, CAPACITY, &m->fresh, queue) == EP_OK);
        SURE(ep_stream_sync(m->comm, queue) == EP_OK);
        SURE(!check_tokens(m, 9, &m->fresh));
        ep_plan_free(plan);
    }
    ep_queue_free(queue);
    return 0;
}

TEST_CALL(routing_is_read_in_stream_order, run((struct scenario){.run_rank = read_in_stream_order}))

/*
 * More plans than exchanges can be in flight, each freed before its first use: the peers wait for all of them. From a
 * mask: of tokens that name an expert repeatedly.
 */
static int free_unused(struct member *m)
{
    ep_plan_args args;
    ep_plan *plan;

    fill(m, 5);
    for (int i = 0; i < EXPERTS; i++)
        m->routing.per_expert[i] *= 16;
    args = plan_args(m, &m->routing, CAPACITY);
    for (int i = 0; i < 3 * EP_GROUP_EXCHANGES; i++) {
        SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
        if (i % 5 == 4)
            SURE(queue_all(m, plan, CAPACITY, &m->fresh, NULL) == EP_OK);
        ep_plan_free(plan);
    }
    SURE(!check_tokens(m, 5, &m->fresh));
    return 0;
}

static int free_unused_masks(struct member *m)
{
    m->mask = true;
    return free_unused(m);
}

TEST(plans_are_freed_before_their_use)
{
    run((struct scenario){.run_rank = free_unused});
    run((struct scenario){.run_rank = free_unused_masks});
}

/*
 * Rank 0 queues a dispatch and then synchronises with the others outside of the library; they synchronise first and
 * dispatch afterwards. No host waits for another one in a call, so this is no deadlock. (It is valid with DeepEP, too.)
 */
static pthread_barrier_t elsewhere;

static int synchronise_outside(struct member *m)
{
    ep_plan_args args;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan *plan;

    fill(m, 4);
    args = plan_args(m, &m->routing, 0);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    SURE(ep_plan_get_info(plan, &info) == EP_OK);
    for (int round = 0; round < 3; round++) {
        if (m->rank != round)
            pthread_barrier_wait(&elsewhere);
        SURE(queue_all(m, plan, info.out_rows, &m->fresh, NULL) == EP_OK);
        if (m->rank == round)
            pthread_barrier_wait(&elsewhere);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(!check_tokens(m, 4, &m->fresh));
    }
    ep_plan_free(plan);
    return 0;
}

TEST(hosts_do_not_wait_for_each_other_in_a_call)
{
    assert_int_equal(pthread_barrier_init(&elsewhere, NULL, RANKS), 0);
    run((struct scenario){.run_rank = synchronise_outside, .timeout_ms = 30000});
    pthread_barrier_destroy(&elsewhere);
}
