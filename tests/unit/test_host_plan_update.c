/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans that get new routing in stream order, plans from a mask, and the results of ep_plan_get_metadata(), on the host
 * backend. All results are compared with values computed from the routing of all ranks, which every rank knows, and
 * with a separate plan. Ranks are threads.
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
#define ROUNDS 40
#define QUEUED 4

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

enum kind { CHOICES, EXPANDED, MASK, KINDS };

/* Outputs of a dispatch and a combine. */
struct result {
    alignas(16) uint16_t x[CAPACITY * HIDDEN], out[MOST * HIDDEN];
    alignas(16) int64_t index[CAPACITY * TOPK];
    alignas(16) float weights[CAPACITY * TOPK];
    int32_t source[CAPACITY], with_rows[CAPACITY], slot[CAPACITY * TOPK], n, psum_rank[RANKS], psum_expert[LOCAL],
        exact[LOCAL], prefix[RANKS * RANKS];
};

struct member {
    ep_comm *comm;
    int rank;
    enum kind kind;
    alignas(16) uint16_t x[QUEUED][MOST * HIDDEN];
    alignas(16) float weights[MOST * TOPK];
    struct routing routing[QUEUED];
    struct result queued[QUEUED], fresh;
};

struct scenario {
    int (*run_rank)(struct member *m);
    enum kind kind;
    int timeout_ms;
};

static ep_plan_args plan_args(const struct member *m, const struct routing *routing, int64_t capacity)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    if (m->kind == MASK) {
        args.token_in_rank = routing->in_rank;
        args.tokens_per_expert = routing->per_expert;
    } else {
        args.topk_idx = routing->index;
        args.idx_type = EP_I64;
        args.topk = TOPK;
    }
    args.n_tokens = routing->n_tokens;
    args.n_experts = EXPERTS;
    args.flags = m->kind == EXPANDED ? EP_PLAN_EXPANDED : 0;
    args.expert_alignment = ALIGNMENT;
    args.max_recv_tokens = capacity;
    args.max_tokens = MOST;
    return args;
}

static ep_plan_update_args update_args(const struct member *m, const struct routing *routing)
{
    ep_plan_update_args args = {.size = sizeof(args), .n_tokens = routing->n_tokens};

    if (m->kind == MASK) {
        args.token_in_rank = routing->in_rank;
        args.tokens_per_expert = routing->per_expert;
    } else {
        args.topk_idx = routing->index;
    }
    return args;
}

static void fill(struct member *m, uint32_t seed, int which)
{
    for (int t = 0; t < MOST; t++)
        for (int i = 0; i < HIDDEN; i++)
            m->x[which][t * HIDDEN + i] = (uint16_t)(mix(seed, (uint32_t)(m->rank * MOST + t), (uint32_t)i) & 0x3fff);
    make_routing(seed, m->rank, &m->routing[which]);
}

/* Dispatch, combine and metadata, queued. Only a plan from choices knows which choice a row belongs to. */
static ep_status queue_all(struct member *m, ep_plan *plan, int64_t out_rows, int which, struct result *result,
                           ep_stream stream)
{
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    ep_plan_metadata metadata = EP_PLAN_METADATA_INIT;

    memset(result, 0x11, sizeof(*result));
    dispatch = args_dispatch(EP_BF16, HIDDEN, m->x[which], result->x, out_rows);
    if (m->kind != MASK) {
        dispatch.topk_weights = m->weights;
        dispatch.recv_topk_weights = result->weights;
        dispatch.recv_topk_idx = m->kind == CHOICES ? result->index : NULL;
    }
    if (m->kind != EXPANDED) {
        dispatch.recv_source = result->with_rows;
        dispatch.source_stride = MOST;
    }
    EP_TRY(ep_dispatch(plan, &dispatch, stream));
    combine = args_combine(HIDDEN, result->x, result->out);
    EP_TRY(ep_combine(plan, &combine, stream));
    metadata.recv_source = result->source;
    metadata.recv_slot = m->kind == EXPANDED ? result->slot : NULL;
    metadata.n_recv_tokens = &result->n;
    metadata.psum_rank = result->psum_rank;
    metadata.psum_expert = result->psum_expert;
    metadata.count_exact = result->exact;
    metadata.rank_prefix = result->prefix;
    return ep_plan_get_metadata(plan, &metadata, stream);
}

/* The tokens that this rank receives, computed from the routing of all. */
static int check_tokens(const struct member *m, uint32_t seed, const struct result *result)
{
    int n = 0, start = 0, sums[RANKS] = {0};

    for (int rank = 0; rank < RANKS; rank++) {
        for (int to = 0; to < RANKS; to++) {
            for (int t = 0; t < tokens_of(seed, rank); t++)
                sums[to] += goes_to(seed, rank, t, to);
            SURE(result->prefix[rank * RANKS + to] == sums[to]);
        }
        SURE(result->psum_rank[rank] == sums[m->rank]);
        for (int t = 0; t < tokens_of(seed, rank); t++)
            if (goes_to(seed, rank, t, m->rank)) {
                SURE(m->kind == EXPANDED || result->with_rows[n] == rank * MOST + t);
                SURE(result->source[n++] == rank * MOST + t);
            }
    }
    SURE(result->n == n);
    for (int local = 0; local < LOCAL; local++) {
        int count = 0;

        for (int rank = 0; rank < RANKS; rank++)
            for (int t = 0; t < tokens_of(seed, rank); t++)
                for (int k = 0; k < TOPK; k++)
                    count += expert_of(seed, rank, t, k) == m->rank * LOCAL + local;
        SURE(result->exact[local] == count);
        SURE(m->kind != EXPANDED || result->psum_expert[local] == start + count);
        start += (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        SURE(m->kind == EXPANDED || result->psum_expert[local] == start);
    }
    return 0;
}

/*
 * Each choice of a received token has its row where the metadata say: the row contains the token, the weight contains
 * k.
 */
static int check_slots(const struct member *m, uint32_t seed, const struct result *result)
{
    for (int i = 0; i < result->n; i++) {
        int rank = result->source[i] / MOST, token = result->source[i] % MOST;

        for (int k = 0; k < TOPK; k++) {
            int32_t expert = expert_of(seed, rank, token, k), row = result->slot[i * TOPK + k];

            SURE((row >= 0) == (expert >= 0 && expert / LOCAL == m->rank));
            if (row < 0)
                continue;
            SURE(row < result->psum_expert[expert % LOCAL]);
            SURE(result->weights[row] == (float)(token * TOPK + k + 1));
            SURE(result->x[row * HIDDEN] == (mix(seed, (uint32_t)(rank * MOST + token), 0) & 0x3fff));
        }
    }
    return 0;
}

/* A separate plan gives the same bits; the marks follow its rows. */
static int check_rows(struct member *m, int which, const struct result *result)
{
    ep_plan_args args = plan_args(m, &m->routing[which], 0);
    ep_plan_info info = EP_PLAN_INFO_INIT;
    size_t n_out = (size_t)m->routing[which].n_tokens * HIDDEN * 2;
    ep_plan *plan;

    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    SURE(ep_plan_get_info(plan, &info) == EP_OK);
    SURE(queue_all(m, plan, info.out_rows, which, &m->fresh, NULL) == EP_OK);
    SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
    SURE(memcmp(result->x, m->fresh.x, (size_t)info.n_recv * HIDDEN * 2) == 0);
    SURE(memcmp(result->out, m->fresh.out, n_out) == 0);
    if (m->kind == CHOICES) {
        SURE(memcmp(result->index, m->fresh.index, (size_t)info.n_recv * TOPK * 8) == 0);
        SURE(memcmp(result->weights, m->fresh.weights, (size_t)info.n_recv * TOPK * 4) == 0);
        for (int64_t i = info.n_recv * TOPK; i < CAPACITY * TOPK; i++)
            SURE(result->index[i] == -1 && result->weights[i] == 0);
    }
    SURE(result->x[info.n_recv * HIDDEN] == 0x1111);
    ep_plan_free(plan);
    return 0;
}

/* Updates and operations, several of them before any wait, in two streams. */
static int update_often(struct member *m)
{
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan_args args;
    ep_queue *queue;
    ep_plan *plan;

    fill(m, 0, 0);
    args = plan_args(m, &m->routing[0], CAPACITY);
    SURE(ep_queue_new(m->comm, &queue) == EP_OK);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    for (uint32_t round = 0; round < ROUNDS; round += QUEUED) {
        for (uint32_t i = 0; i < QUEUED; i++) {
            ep_stream stream = i % 2 ? queue : NULL;
            ep_plan_update_args update;

            fill(m, round + i, (int)i);
            update = update_args(m, &m->routing[i]);
            if (round + i)
                SURE(ep_plan_update(plan, &update, stream) == EP_OK);
            SURE(queue_all(m, plan, CAPACITY, (int)i, &m->queued[i], stream) == EP_OK);
        }
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, queue) == EP_OK);
        SURE(ep_plan_get_info(plan, &info) == EP_OK);
        SURE(info.n_recv == -1 && info.n_send == -1 && !info.recv_per_expert && info.out_rows == CAPACITY);
        SURE(info.n_tokens == m->routing[QUEUED - 1].n_tokens);
        for (uint32_t i = 0; i < QUEUED; i++) {
            SURE(!check_tokens(m, round + i, &m->queued[i]));
            SURE(m->kind != EXPANDED || !check_slots(m, round + i, &m->queued[i]));
            SURE(!check_rows(m, (int)i, &m->queued[i]));
        }
    }
    SURE(ep_plan_get_sources(plan, NULL, NULL) == EP_E_STATE);
    ep_plan_free(plan);
    ep_queue_free(queue);
    return 0;
}

/* The host waits for the counts of a fixed capacity; outputs need no more rows then. */
static int wait_for_counts(struct member *m)
{
    ep_plan_info exact = EP_PLAN_INFO_INIT, info = EP_PLAN_INFO_INIT;
    ep_plan_update_args update;
    ep_plan_args args;
    ep_plan *plan, *other;

    fill(m, 2, 0);
    args = plan_args(m, &m->routing[0], 0);
    SURE(ep_plan_new(m->comm, &args, &other) == EP_OK);
    SURE(ep_plan_wait(other) == EP_OK && ep_plan_get_info(other, &exact) == EP_OK);
    args.max_recv_tokens = CAPACITY;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    SURE(ep_plan_wait(plan) == EP_E_STATE && strstr(ep_last_error(), "before its first operation"));
    SURE(queue_all(m, plan, CAPACITY - 1, 0, &m->queued[0], NULL) == EP_E_CAPACITY);
    SURE(queue_all(m, plan, CAPACITY, 0, &m->queued[0], NULL) == EP_OK);
    SURE(ep_plan_wait(plan) == EP_OK && ep_plan_get_info(plan, &info) == EP_OK);
    SURE(info.n_recv == exact.n_recv && info.out_rows == CAPACITY);
    SURE(!memcmp(info.recv_per_expert, exact.recv_per_expert, LOCAL * sizeof(*info.recv_per_expert)));
    SURE(queue_all(m, plan, info.n_recv - 1, 0, &m->queued[1], NULL) == EP_E_CAPACITY);
    SURE(queue_all(m, plan, info.n_recv, 0, &m->queued[1], NULL) == EP_OK);
    SURE(ep_stream_sync(m->comm, NULL) == EP_OK && !check_tokens(m, 2, &m->queued[1]));
    SURE(m->queued[1].x[info.n_recv * HIDDEN] == 0x1111 &&
         m->queued[1].index[info.n_recv * TOPK] == 0x1111111111111111);
    update = update_args(m, &m->routing[0]);
    SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
    SURE(ep_plan_wait(plan) == EP_E_STATE && strstr(ep_last_error(), "since it was updated"));
    ep_plan_free(plan);
    ep_plan_free(other);
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
    m->kind = scenario->kind;
    for (int i = 0; i < MOST * TOPK; i++)
        m->weights[i] = (float)(i + 1);
    SURE(unit_comm_new(boot, NULL, 0, scenario->timeout_ms ? scenario->timeout_ms : 60000, &m->comm) == EP_OK);
    code = scenario->run_rank(m);
    ep_comm_free(m->comm);
    return code;
}

static void run(struct scenario scenario)
{
    unit_run_threads(RANKS, run_rank, &scenario);
}

TEST(counts_are_waited_for)
{
    run((struct scenario){.run_rank = wait_for_counts, .kind = CHOICES});
}

TEST(updates_are_plans_of_their_own)
{
    for (int kind = 0; kind < KINDS; kind++)
        run((struct scenario){.run_rank = update_often, .kind = (enum kind)kind});
}

/* A mask gives the rows and sums of the choices that it was made from. */
static int mask_choices(struct member *m)
{
    ep_plan_info infos[2] = {EP_PLAN_INFO_INIT, EP_PLAN_INFO_INIT};
    ep_plan *plans[2];

    for (uint32_t seed = 0; seed < 8; seed++) {
        fill(m, seed, 0);
        for (int i = 0; i < 2; i++) {
            ep_plan_args args;

            m->kind = i ? MASK : CHOICES;
            args = plan_args(m, &m->routing[0], 0);
            SURE(ep_plan_new(m->comm, &args, &plans[i]) == EP_OK);
            SURE(ep_plan_get_info(plans[i], &infos[i]) == EP_OK);
            SURE(queue_all(m, plans[i], infos[i].out_rows, 0, &m->queued[i], NULL) == EP_OK);
        }
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(infos[0].n_recv == infos[1].n_recv && infos[0].n_send == infos[1].n_send);
        SURE(infos[0].n_wire == infos[1].n_wire);
        SURE(memcmp(infos[0].recv_per_expert, infos[1].recv_per_expert, LOCAL * 4) == 0);
        SURE(memcmp(infos[0].recv_from_rank, infos[1].recv_from_rank, (RANKS + 1) * 8) == 0);
        SURE(memcmp(m->queued[0].x, m->queued[1].x, sizeof(m->queued[0].x)) == 0);
        SURE(memcmp(m->queued[0].out, m->queued[1].out, sizeof(m->queued[0].out)) == 0);
        ep_plan_free(plans[0]);
        ep_plan_free(plans[1]);
    }
    return 0;
}

TEST_CALL(a_mask_is_as_good_as_the_choices, run((struct scenario){.run_rank = mask_choices}))

/*
 * Too many rows for one rank: every rank learns it in the next operation, and the plan is usable again after the next
 * update.
 */
static int overflow(struct member *m)
{
    ep_plan_args args;
    ep_plan_update_args update;
    ep_plan *plan;

    fill(m, 1, 0);
    args = plan_args(m, &m->routing[0], m->rank == 2 ? 1 : CAPACITY);
    args.n_tokens = 0;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    update = update_args(m, &m->routing[0]);
    for (int round = 0; round < 2; round++) {
        update.n_tokens = m->routing[0].n_tokens;
        SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        m->fresh.n = m->fresh.source[0] = m->fresh.psum_rank[RANKS - 1] = m->fresh.exact[LOCAL - 1] = 77;
        SURE(queue_all(m, plan, CAPACITY, 0, &m->fresh, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_E_CAPACITY);
        SURE(!m->fresh.n && !m->fresh.source[0] && !m->fresh.psum_rank[RANKS - 1] && !m->fresh.exact[LOCAL - 1]);
        SURE(strstr(ep_last_error(), "rank 2 receives "));
        SURE(ep_comm_async_error(m->comm) == EP_OK);
        update.n_tokens = 0;
        SURE(ep_plan_update(plan, &update, NULL) == EP_OK);
        SURE(queue_all(m, plan, CAPACITY, 0, &m->fresh, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(m->fresh.n == 0);
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

    fill(m, 1, 0);
    m->routing[0].n_tokens = 2;
    for (int i = 0; i < 2 * TOPK; i++)
        m->routing[0].index[i] = i;
    args = plan_args(m, &m->routing[0], CAPACITY);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    if (m->rank == 1)
        m->routing[0].index[TOPK] = EXPERTS;
    update = update_args(m, &m->routing[0]);
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

    fill(m, 2, 0);
    m->kind = MASK;
    args = plan_args(m, &m->routing[0], 0);
    args.n_tokens = 1;
    memset(m->routing[0].in_rank, 0, RANKS);
    memset(m->routing[0].per_expert, 0, sizeof(m->routing[0].per_expert));
    m->routing[0].in_rank[1] = 2;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "token 0: token_in_rank is 2 for rank 1"));
    m->routing[0].in_rank[1] = 1;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "tokens_per_expert is 0 for the experts of rank 1 together, but 1 tokens go there"));
    m->routing[0].per_expert[LOCAL] = EP_MAX_TOPK + 1;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "tokens_per_expert is 65 for expert 4, but 1 tokens go to its rank 1"));
    /* Two choices of one token. */
    m->routing[0].per_expert[LOCAL] = 2;
    m->routing[0].per_expert[0] = -1;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_ROUTING);
    m->routing[0].per_expert[0] = 0;
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    ep_plan_free(plan);
    return 0;
}

static int mix_masks_and_choices(struct member *m)
{
    ep_plan_args args;
    ep_plan *plan;

    fill(m, 2, 0);
    m->kind = m->rank == 1 ? MASK : CHOICES;
    args = plan_args(m, &m->routing[0], 0);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_E_MISMATCH);
    return 0;
}

TEST(masks_are_checked)
{
    run((struct scenario){.run_rank = mask_badly});
    run((struct scenario){.run_rank = mix_masks_and_choices});
}

/* Routing that is read in stream order: a function in the stream writes it. */
static void write_routing(void *context)
{
    struct member *m = context;

    make_routing(9, m->rank, &m->routing[0]);
}

static int plan_in_stream_order(struct member *m)
{
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan_args args;
    ep_queue *queue;
    ep_plan *plan;

    fill(m, 1, 0);
    SURE(ep_queue_new(m->comm, &queue) == EP_OK);
    args = plan_args(m, &m->routing[0], 0);
    args.n_tokens = tokens_of(9, m->rank);
    args.stream = queue;
    SURE(ep_stream_call(m->comm, queue, write_routing, m) == EP_OK);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    SURE(ep_plan_get_info(plan, &info) == EP_OK);
    SURE(queue_all(m, plan, info.out_rows, 0, &m->fresh, queue) == EP_OK);
    SURE(ep_stream_sync(m->comm, queue) == EP_OK);
    SURE(!check_tokens(m, 9, &m->fresh));
    ep_plan_free(plan);
    ep_queue_free(queue);
    return 0;
}

TEST_CALL(plans_are_read_in_stream_order, run((struct scenario){.run_rank = plan_in_stream_order}))

/* More plans than exchanges can be in flight, each freed before its first use: the peers wait for all of them. */
static int free_unused(struct member *m)
{
    ep_plan_args args;
    ep_plan *plan;

    fill(m, 5, 0);
    args = plan_args(m, &m->routing[0], CAPACITY);
    for (int i = 0; i < 3 * EP_GROUP_EXCHANGES; i++) {
        SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
        if (i % 5 == 4)
            SURE(queue_all(m, plan, CAPACITY, 0, &m->fresh, NULL) == EP_OK);
        ep_plan_free(plan);
    }
    SURE(!check_tokens(m, 5, &m->fresh));
    return 0;
}

TEST_CALL(plans_are_freed_before_their_use, run((struct scenario){.run_rank = free_unused}))

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

    fill(m, 4, 0);
    args = plan_args(m, &m->routing[0], 0);
    SURE(ep_plan_new(m->comm, &args, &plan) == EP_OK);
    SURE(ep_plan_get_info(plan, &info) == EP_OK);
    for (int round = 0; round < 3; round++) {
        if (m->rank != round)
            pthread_barrier_wait(&elsewhere);
        SURE(queue_all(m, plan, info.out_rows, 0, &m->fresh, NULL) == EP_OK);
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
