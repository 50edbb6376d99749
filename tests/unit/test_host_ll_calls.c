/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency calls by number, on the host backend: combined again, dropped, in parts, halves of two calls open at a
 * time, with fewer tokens and choices than the maximum, masked explicitly. Ranks are threads.
 *
 * Token t of rank r is 1 + t in all elements and goes to expert (t + k) % R, k < 2, which returns (expert + 1) times
 * its input. All sums are exact.
 */
#include "ranks.h"

#include "backend/host/host.h"

#define RANKS 3
#define MOST 6
#define HIDDEN 128
#define TOPK 2
#define ROWS (RANKS * MOST)
#define HELD_UP_MS 4000 /* deadline, half of which passes before a wait begins */

struct member {
    ep_comm *comm;
    ep_ll *ll;
    int rank, n_tokens, topk; /* of its calls */
    alignas(16) uint16_t x[MOST * HIDDEN], out[MOST * HIDDEN], recv[ROWS * HIDDEN];
    int64_t index[MOST * TOPK];
    float weights[MOST * TOPK];
    int32_t count, source[ROWS], stats;
    int64_t cost[RANKS];
    uint64_t call;
};

struct scenario {
    int (*run_rank)(struct member *m);
    uint32_t ll_flags;
    int timeout_ms, n_tokens;
};

static ep_ll_dispatch_args dispatch_of(struct member *m)
{
    ep_ll_dispatch_args args = args_ll_dispatch(m->x, m->index, EP_I64, m->n_tokens);

    args.topk = m->topk;
    args.out_dtype = EP_BF16;
    args.recv_x = m->recv;
    args.recv_count = &m->count;
    args.recv_source = m->source;
    args.ret_call = &m->call;
    return args;
}

static ep_ll_combine_args combine_of(struct member *m, uint64_t call)
{
    ep_ll_combine_args args = args_ll_combine(m->recv, m->index, EP_I64, m->n_tokens, m->weights, m->out);

    args.call = call;
    memset(m->out, 0xee, sizeof(m->out));
    return args;
}

static void answer(struct member *m)
{
    for (int i = 0; i < m->count * HIDDEN; i++)
        m->recv[i] = ep_bf16_from_f32(ep_bf16_to_f32(m->recv[i]) * (float)(m->rank + 1));
}

/* Experts in `masked` have returned nothing. */
static bool is_answered(const struct member *m, unsigned masked)
{
    for (int t = 0; t < m->n_tokens; t++) {
        float sum = 0;

        for (int k = 0; k < m->topk; k++) {
            int64_t expert = m->index[t * m->topk + k];

            if (expert >= 0 && !(masked >> expert & 1))
                sum += (float)(1 + t) * (float)(expert + 1) * m->weights[t * m->topk + k];
        }
        for (int i = 0; i < HIDDEN; i++)
            if (ep_bf16_to_f32(m->out[t * HIDDEN + i]) != sum)
                return false;
    }
    return true;
}

static void choose(struct member *m, int topk)
{
    m->topk = topk;
    for (int t = 0; t < m->n_tokens; t++)
        for (int k = 0; k < topk; k++) {
            m->index[t * topk + k] = (t + k) % RANKS;
            m->weights[t * topk + k] = (float)(1 + k);
        }
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_ll_config ll;
    static struct member members[RANKS];
    struct member *m = &members[boot->rank];
    int code;

    *m = (struct member){.rank = boot->rank, .n_tokens = scenario->n_tokens, .topk = TOPK};
    ll = args_ll(MOST, HIDDEN, RANKS, TOPK);
    ll.flags = scenario->ll_flags;
    SURE(unit_comm_new(boot, NULL, 0, scenario->timeout_ms, &m->comm) == EP_OK);
    SURE(ep_ll_new(m->comm, &ll, &m->ll) == EP_OK);
    for (int i = 0; i < m->n_tokens * HIDDEN; i++) {
        int token = i / HIDDEN;

        m->x[i] = ep_bf16_from_f32((float)(1 + token));
    }
    choose(m, TOPK);
    code = scenario->run_rank(m);
    ep_ll_free(m->ll);
    ep_comm_free(m->comm);
    return code;
}

static void run(struct scenario scenario)
{
    scenario.timeout_ms = scenario.timeout_ms ? scenario.timeout_ms : 60000;
    unit_run_threads(RANKS, run_rank, &scenario);
}

/* --- handles ----------------------------------------------------------------------------------------------------- */

/* The first of two dispatches after the second one. */
static int combine_the_one_before(struct member *m)
{
    static uint16_t later[RANKS][ROWS * HIDDEN];
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_combine_args combine;

    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    answer(m);
    dispatch.recv_x = later[m->rank];
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    combine = combine_of(m, 1);
    SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
    SURE(is_answered(m, 0));
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    SURE(ep_ll_combine_sync(m->ll, &combine) == EP_E_STATE);
    return 0;
}

TEST(the_dispatch_before_the_last_is_combined)
{
    run((struct scenario){.run_rank = combine_the_one_before, .n_tokens = 4});
}

/* Partial combines: some choices excluded, all choices of a token excluded; then the complete combine. */
static int leave_out(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_combine_args combine;
    int64_t all[MOST * TOPK];

    memcpy(all, m->index, sizeof(all));
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    answer(m);
    m->index[0] = m->index[3] = m->index[4] = m->index[5] = -1;
    for (uint32_t flags = 0; flags <= EP_LL_NO_PARTIAL_REDUCE; flags += EP_LL_NO_PARTIAL_REDUCE) {
        combine = combine_of(m, 0);
        combine.flags = flags;
        SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
        SURE(is_answered(m, 0));
    }
    /* An expert that the dispatch did not have is still refused. */
    m->index[0] = 2;
    combine = combine_of(m, 0);
    SURE(ep_ll_combine_sync(m->ll, &combine) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "topk_idx is 2 at position 0, but its dispatch had 0"));
    memcpy(m->index, all, sizeof(all));
    combine = combine_of(m, 0);
    SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
    SURE(is_answered(m, 0));
    return 0;
}

TEST_CALL(a_combine_leaves_choices_out, run((struct scenario){.run_rank = leave_out, .n_tokens = 4}))

/* --- what a call says ---------------------------------------------------------------------------------------------*/

static int use_fewer_tokens(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_combine_args combine;

    for (int most = MOST; most >= m->n_tokens; most -= 2) {
        dispatch.max_tokens = most == MOST ? 0 : most;
        m->stats = 100;
        memset(m->cost, 0, sizeof(m->cost));
        dispatch.recv_stats_add = &m->stats;
        dispatch.wait_cost_add = m->cost;
        memset(m->recv, 0xee, sizeof(m->recv));
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
        /* Rows of the one local expert: of every source the tokens that chose it. */
        SURE(m->count > 0 && m->stats == 100 + m->count);
        SURE(m->recv[(RANKS * most) * HIDDEN - (most == MOST ? 1 : 0)] == 0xeeee);
        for (int rank = 0; rank < RANKS; rank++)
            SURE(rank == m->rank ? m->cost[rank] == 0 : m->cost[rank] >= 0);
        answer(m);
        for (int i = 0; i < 2; i++) {
            combine = combine_of(m, 0);
            combine.wait_cost_add = m->cost;
            SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
            SURE(is_answered(m, 0));
        }
    }
    dispatch.max_tokens = m->n_tokens - 1;
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_E_ARG);
    return 0;
}

TEST_CALL(calls_have_their_own_most_tokens, run((struct scenario){.run_rank = use_fewer_tokens, .n_tokens = 2}))

/* The number of rows of this rank's expert, if the ranks have these K. */
static int count_rows(const struct member *m, int round)
{
    int n = 0;

    for (int rank = 0; rank < RANKS; rank++)
        for (int t = 0; t < m->n_tokens; t++)
            for (int k = 0; k < 1 + (rank + round) % TOPK; k++)
                n += (t + k) % RANKS == m->rank;
    return n;
}

/* In each round another K on each rank; each combine is of the dispatch before the last one, which had another K. */
static int use_fewer_choices(struct member *m)
{
    static uint16_t before[RANKS][ROWS * HIDDEN];
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;

    for (int round = 0; round < 6; round++) {
        choose(m, 1 + (m->rank + round) % TOPK);
        dispatch = dispatch_of(m);
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
        SURE(m->count == count_rows(m, round));
        answer(m);
        if (round) {
            memcpy(before[m->rank], m->recv, sizeof(m->recv));
            dispatch.topk = 3 - m->topk;
            dispatch.recv_x = before[m->rank];
            choose(m, dispatch.topk);
            SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
            SURE(m->count == count_rows(m, round + 1));
            choose(m, 3 - m->topk);
        }
        for (int i = 0; i < 4; i++) {
            combine = combine_of(m, round ? m->call - 1 : 0);
            combine.flags = i % 2 ? EP_LL_NO_PARTIAL_REDUCE : 0;
            combine.topk = i / 2 ? m->topk : 0;
            SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
            SURE(is_answered(m, 0));
        }
        combine.topk = 3 - m->topk;
        SURE(ep_ll_combine_sync(m->ll, &combine) == EP_E_ARG);
        SURE(strstr(ep_last_error(),
                    m->topk == 1 ? "topk is 2, but its dispatch had 1" : "topk is 1, but its dispatch had 2"));
    }
    /* With one column, position 1 is of token 1. */
    choose(m, 1);
    m->index[1] = RANKS;
    dispatch = dispatch_of(m);
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "token 1"));
    return 0;
}

TEST_CALL(calls_have_their_own_topk, run((struct scenario){.run_rank = use_fewer_choices, .n_tokens = 5}))

/* The time spent waiting for a rank is added to the previous value. */
static int wait_for_the_late_rank(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    int rounds_waited = 0;
    int64_t before;

    dispatch.wait_cost_add = m->cost;
    /* On a loaded machine another rank may arrive even later: then there was no wait for this one. */
    for (int round = 0; round < 8; round++) {
        before = m->cost[1];
        if (m->rank == 1)
            nanosleep(&(struct timespec){.tv_nsec = 3000000L << round}, NULL);
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
        SURE(m->rank == 1 ? m->cost[1] == 0 : m->cost[1] >= before);
        rounds_waited += m->cost[1] > before;
    }
    SURE(m->rank == 1 || rounds_waited >= 2);
    return 0;
}

TEST(waiting_is_counted_for_the_rank_waited_for)
{
    run((struct scenario){.run_rank = wait_for_the_late_rank, .n_tokens = 2});
}

/* Nobody can correct the routing of a queued call: all ranks learn it, long before the deadline. */
static int queue_bad_routing(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_status status;

    if (m->rank == 1)
        m->index[1] = RANKS;
    SURE(ep_ll_dispatch(m->ll, &dispatch, NULL) == EP_OK);
    status = ep_stream_sync(m->comm, NULL);
    SURE(status == EP_E_ROUTING);
    SURE(strstr(ep_last_error(), "is not below n_experts"));
    SURE(m->rank == 1 || strstr(ep_last_error(), "rank 1"));
    SURE(ep_comm_async_error(m->comm) == EP_E_ROUTING);
    SURE(ep_comm_barrier(m->comm) == EP_E_ROUTING);
    return 0;
}

TEST(bad_routing_of_a_queued_call_fails_all)
{
    run((struct scenario){.run_rank = queue_bad_routing, .n_tokens = 2, .timeout_ms = 600000});
}

/* A dispatch that is refused has changed nothing: the two before it are still combined. */
static int refuse_bad_routing(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_combine_args combine;
    uint64_t first;

    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    first = m->call;
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    for (int i = 0; i < 2; i++) {
        int64_t bad[MOST * TOPK] = {1, -2};

        dispatch.topk_idx = bad;
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_E_ROUTING);
        SURE(m->call == first + 1);
    }
    answer(m);
    for (uint64_t call = first; call < first + 2; call++) {
        combine = combine_of(m, call);
        SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
        SURE(is_answered(m, 0));
    }
    return 0;
}

TEST(a_dispatch_that_is_refused_changes_nothing)
{
    run((struct scenario){.run_rank = refuse_bad_routing, .n_tokens = 4});
}

/* --- masks ------------------------------------------------------------------------------------------------------- */

static int mask_explicitly(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_combine_args combine;
    int32_t mask[RANKS];

    /* Rank 2 does not join the calls in between, and no rank waits for it. */
    if (m->rank != 2) {
        SURE(ep_ll_set_mask(m->ll, 2, 1, NULL) == EP_OK);
        SURE(ep_ll_query_mask(m->ll, mask, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(!mask[0] && !mask[1] && mask[2] == 1);
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
        answer(m);
        combine = combine_of(m, 0);
        SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
        SURE(is_answered(m, 1u << 2));
        SURE(ep_ll_barrier(m->ll, NULL) == EP_OK);
        SURE(ep_ll_set_mask(m->ll, 2, 0, NULL) == EP_OK);
        SURE(ep_ll_set_mask(m->ll, 2, 1, NULL) == EP_OK);
        SURE(ep_ll_clear_mask(m->ll, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(ep_ll_get_mask(m->ll, mask) == EP_OK);
        SURE(!mask[0] && !mask[1] && !mask[2]);
    }
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    return 0;
}

/*
 * Rank 0 masks rank 1 for one dispatch only. Its counter continues, and its rows of an earlier dispatch are still in
 * the memory that rank 1 reads: rank 1 must learn that it was masked, whenever it checks.
 */
static int mask_for_one_dispatch(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);

    for (int i = 0; i < 2; i++)
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    /* Rank 1 has finished with them: it checks masks at the end of a call. */
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    dispatch.flags = EP_LL_RECV_HOOK;
    if (m->rank == 0) {
        SURE(ep_ll_set_mask(m->ll, 1, 1, NULL) == EP_OK);
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
        SURE(ep_ll_set_mask(m->ll, 1, 0, NULL) == EP_OK);
    }
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    if (m->rank != 0)
        SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    if (m->rank == 1) {
        SURE(ep_ll_finish_sync(m->ll, 0) == EP_E_EXCLUDED);
        SURE(strstr(ep_last_error(), "rank 0"));
    }
    return 0;
}

TEST(a_masked_rank_learns_it)
{
    run((struct scenario){
        .run_rank = mask_for_one_dispatch, .n_tokens = 4, .ll_flags = EP_LL_MASK_DEAD, .timeout_ms = 600000});
}

TEST(masks_are_set_and_cleared_in_order)
{
    run((struct scenario){
        .run_rank = mask_explicitly, .n_tokens = 4, .ll_flags = EP_LL_MASK_DEAD, .timeout_ms = 600000});
}

/*
 * Rank 2 never calls. Rank 0 has masked it explicitly and waits in the combine for rank 1, which began its wait for
 * rank 2 half a deadline later: the deadline of rank 0 expires first, and rank 1 must not be masked because of rank 2.
 */
static int wait_while_masking(struct member *m)
{
    struct timespec half = {HELD_UP_MS / 2000, HELD_UP_MS / 2 % 1000 * 1000000L};
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_combine_args combine;
    int32_t mask[RANKS];

    if (m->rank == 0)
        SURE(ep_ll_set_mask(m->ll, 2, 1, NULL) == EP_OK);
    dispatch.flags = m->rank ? EP_LL_RECV_HOOK : 0;
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    if (m->rank == 1) {
        nanosleep(&half, NULL);
        SURE(ep_ll_finish_sync(m->ll, 0) == EP_OK);
    }
    answer(m);
    combine = combine_of(m, 0);
    SURE(ep_ll_combine_sync(m->ll, &combine) == EP_OK);
    SURE(is_answered(m, 1u << 2));
    SURE(ep_ll_get_mask(m->ll, mask) == EP_OK);
    SURE(!mask[0] && !mask[1] && mask[2]);
    return 0;
}

static int wait_for_one_that_waits(struct member *m)
{
    static _Atomic int done;
    int code = 0;

    if (m->rank != 2) {
        code = wait_while_masking(m);
        done++;
    }
    /* A rank that leaves is masked at once. */
    while (done < 2)
        unit_sleep_ms(10);
    return code;
}

TEST(a_rank_that_waits_for_another_is_not_masked)
{
    run((struct scenario){
        .run_rank = wait_for_one_that_waits, .n_tokens = 4, .ll_flags = EP_LL_MASK_DEAD, .timeout_ms = HELD_UP_MS});
}

/* True as soon as `rank` has published that it waits for `awaited` in a dispatch; false after a minute. */
static bool sees_wait(const ep_comm *comm, int rank, int awaited)
{
    for (int i = 0; i < 60000; i++) {
        uint32_t waiting = atomic_load(&ep_group_of(comm)->peers[rank].control->state.waiting);
        uint32_t phase = waiting & 0xff;

        if ((int)(waiting >> 8) == awaited + 1 && (phase == EP_GROUP_LL_SEND || phase == EP_GROUP_LL_RECV))
            return true;
        unit_sleep_ms(1);
    }
    return false;
}

/* Ranks 1 and 2 have masked each other. Rank 1 has unmasked rank 2, and its next call waits until rank 2 does the same.
 */
static int wait_to_be_unmasked(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    int other = 3 - m->rank;

    if (m->rank != 0)
        SURE(ep_ll_set_mask(m->ll, other, 1, NULL) == EP_OK && ep_stream_sync(m->comm, NULL) == EP_OK);
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    if (m->rank == 1)
        SURE(ep_ll_set_mask(m->ll, other, 0, NULL) == EP_OK && ep_stream_sync(m->comm, NULL) == EP_OK);
    if (m->rank == 2) {
        SURE(sees_wait(m->comm, other, m->rank));
        SURE(ep_ll_set_mask(m->ll, other, 0, NULL) == EP_OK && ep_stream_sync(m->comm, NULL) == EP_OK);
    }
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    SURE(atomic_load(&ep_group_of(m->comm)->control->state.waiting) == 0);
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    return 0;
}

TEST(a_rank_that_waits_to_be_unmasked_publishes_it)
{
    run((struct scenario){
        .run_rank = wait_to_be_unmasked, .n_tokens = 4, .ll_flags = EP_LL_MASK_DEAD, .timeout_ms = 120000});
}

/* All ranks join the first barrier; rank 2 misses the second one, which then reports it. */
static int miss_a_barrier(struct member *m)
{
    int32_t mask[RANKS];

    SURE(ep_ll_barrier(m->ll, NULL) == EP_OK);
    SURE(ep_ll_query_mask(m->ll, mask, NULL) == EP_OK);
    SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
    SURE(!mask[0] && !mask[1] && !mask[2]);
    if (m->rank == 2)
        return 0;
    SURE(ep_ll_barrier(m->ll, NULL) == EP_OK);
    SURE(ep_ll_query_mask(m->ll, mask, NULL) == EP_OK);
    SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
    SURE(!mask[0] && !mask[1] && mask[2]);
    return 0;
}

TEST(a_barrier_masks_an_absent_rank)
{
    run((struct scenario){.run_rank = miss_a_barrier, .ll_flags = EP_LL_MASK_DEAD, .timeout_ms = 60000});
}

/* Two ep_ll that are used as one: masks, and what is known of cleared masks, are those of both. */
static int merge_masks(struct member *m)
{
    ep_ll_dispatch_args dispatch = dispatch_of(m);
    ep_ll_config config = m->ll->config;
    int32_t mask[RANKS];
    uint64_t begin_ns;
    ep_ll *other;

    SURE(ep_ll_new(m->comm, &config, &other) == EP_OK);
    SURE(ep_ll_clear_mask(m->ll, NULL) == EP_OK);
    SURE(ep_ll_clear_mask(other, NULL) == EP_OK);
    SURE(ep_ll_dispatch_sync(m->ll, &dispatch) == EP_OK);
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    if (m->rank == 0) {
        SURE(ep_ll_set_mask(m->ll, 1, 1, NULL) == EP_OK);
        SURE(ep_ll_merge_mask(other, m->ll, NULL) == EP_OK);
        SURE(ep_ll_query_mask(other, mask, NULL) == EP_OK);
        SURE(ep_stream_sync(m->comm, NULL) == EP_OK);
        SURE(!mask[0] && mask[1] && !mask[2]);
    }
    SURE(ep_comm_barrier(m->comm) == EP_OK);
    if (m->rank == 1) {
        /* Not after a deadline: rank 0 had cleared its mask of before. */
        begin_ns = ep_now_ns();
        SURE(ep_ll_merge_mask(other, m->ll, NULL) == EP_OK);
        SURE(ep_ll_set_mask(other, 2, 1, NULL) == EP_OK); /* which does not call */
        SURE(ep_ll_dispatch_sync(other, &dispatch) == EP_E_EXCLUDED);
        SURE(strstr(ep_last_error(), "rank 0"));
        SURE(ep_now_ns() - begin_ns < UINT64_C(60000000000));
    }
    ep_ll_free(other);
    return 0;
}

TEST(masks_are_those_of_both)
{
    run((struct scenario){.run_rank = merge_masks, .n_tokens = 4, .ll_flags = EP_LL_MASK_DEAD, .timeout_ms = 120000});
}
