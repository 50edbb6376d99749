/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency on the host backend: ranks that miss a deadline or pass other arguments. Ranks are threads; each keeps
 * its results, which the test checks afterwards.
 */
#include "ranks.h"

#include "backend/host/host.h"
#include "group/queue.h"

#include <math.h>

#define MAX_RANKS 3
#define TOKENS 2
#define HIDDEN 512
#define PATIENT_MS 60000
#define SHORT_MS 1500 /* deadline of scenarios in which none expires */

/* One rank's low-latency object with one expert per rank; each token goes to all of them. */
struct member {
    ep_comm *comm;
    ep_ll *ll;
    int nranks;
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;
    alignas(16) uint16_t x[TOKENS * HIDDEN];
    alignas(16) uint16_t out[TOKENS * HIDDEN];
    alignas(16) uint16_t recv[MAX_RANKS * TOKENS * HIDDEN];
    alignas(16) float scales[MAX_RANKS * TOKENS * HIDDEN / EP_SCALE_BLOCK];
    int32_t index[TOKENS * MAX_RANKS], count;
    float weights[TOKENS * MAX_RANKS];
};

static bool member_init(struct member *member, const ep_boot *boot, int timeout_ms, uint32_t comm_flags,
                        uint32_t ll_flags)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_ll_config ll_config;

    *member = (struct member){.nranks = boot->nranks};
    config.backend = "host";
    config.timeout_ms = timeout_ms;
    config.flags = comm_flags;
    if (ep_comm_new(boot, &config, &member->comm) != EP_OK)
        return false;
    ll_config = args_ll(TOKENS, HIDDEN, boot->nranks, boot->nranks);
    ll_config.flags = ll_flags;
    if (ep_ll_new(member->comm, &ll_config, &member->ll) != EP_OK) {
        ep_comm_free(member->comm);
        return false;
    }
    for (int i = 0; i < TOKENS * boot->nranks; i++) {
        member->index[i] = i % boot->nranks;
        member->weights[i] = 1;
    }
    member->dispatch = (ep_ll_dispatch_args)EP_LL_DISPATCH_ARGS_INIT;
    member->dispatch.x = member->x;
    member->dispatch.topk_idx = member->index;
    member->dispatch.idx_type = EP_I32;
    member->dispatch.n_tokens = TOKENS;
    member->dispatch.out_dtype = EP_BF16;
    member->dispatch.recv_x = member->recv;
    member->dispatch.recv_count = &member->count;
    member->combine = (ep_ll_combine_args)EP_LL_COMBINE_ARGS_INIT;
    member->combine.x = member->recv;
    member->combine.topk_idx = member->index;
    member->combine.idx_type = EP_I32;
    member->combine.n_tokens = TOKENS;
    member->combine.topk_weights = member->weights;
    member->combine.out = member->out;
    return true;
}

static void member_done(struct member *member)
{
    ep_ll_free(member->ll);
    ep_comm_free(member->comm);
}

/* A dispatch and its combine; rows hold `value` in all elements (bf16). */
static ep_status member_round(struct member *member, uint16_t value)
{
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        member->x[i] = value;
    EP_TRY(ep_ll_dispatch_sync(member->ll, &member->dispatch));
    return ep_ll_combine_sync(member->ll, &member->combine);
}

static void run_ranks(ep_rank_fn run, int nranks, void *argument)
{
    unit_run_threads(nranks, run, argument);
}

/* --- masks ------------------------------------------------------------------------------------------------------ */

#define SLEEPER 1

struct sleep_scenario {
    _Atomic int ahead; /* ranks that have continued without the sleeper */
    ep_status status;  /* of the sleeper after its sleep */
    ep_status others[MAX_RANKS];
    char text[256];
    int32_t mask[MAX_RANKS];
};

static int oversleep(const ep_boot *boot, void *argument)
{
    struct sleep_scenario *scenario = argument;
    struct member member;
    int rank = boot->rank;

    if (!member_init(&member, boot, PATIENT_MS, 0, EP_LL_MASK_DEAD))
        return 1;
    for (int round = 0; round < 3; round++)
        if (member_round(&member, (uint16_t)(0x3f80 + round)) != EP_OK)
            return 2;
    if (rank != SLEEPER) {
        member.comm->config.timeout_ms = SHORT_MS;
        /* Two rounds without it: the second one reuses the buffers that the sleeper has not read. */
        for (int round = 3; round < 5 && scenario->others[rank] == EP_OK; round++)
            scenario->others[rank] = member_round(&member, (uint16_t)(0x3f80 + round));
        if (rank == 0)
            ep_ll_get_mask(member.ll, scenario->mask);
        atomic_fetch_add(&scenario->ahead, 1);
    } else {
        for (int i = 0; i < PATIENT_MS && atomic_load(&scenario->ahead) < boot->nranks - 1; i++)
            unit_sleep_ms(1);
        scenario->status = member_round(&member, 0x4000);
        snprintf(scenario->text, sizeof(scenario->text), "%s", ep_comm_last_error(member.comm));
    }
    member_done(&member);
    return 0;
}

/* Rows and counts of earlier dispatches remain where no rank has written for a masked rank: it must not use them. */
TEST(a_rank_that_was_masked_learns_it)
{
    static struct sleep_scenario scenario;

    run_ranks(oversleep, 3, &scenario);
    assert_int_equal(scenario.others[0], EP_OK);
    assert_int_equal(scenario.others[2], EP_OK);
    assert_int_equal(scenario.mask[SLEEPER], 1);
    assert_int_equal(scenario.mask[0] + scenario.mask[2], 0);
    assert_int_equal(scenario.status, EP_E_EXCLUDED);
    assert_non_null(strstr(scenario.text, "has masked this rank in \"low-latency dispatch: "));
}

struct half_scenario {
    _Atomic int gone; /* ranks that have left */
    ep_status status, again;
    int wrong; /* elements */
    char text[256];
};

/* Rank 0 sends its half of a combine and finishes it only when its peers have masked it. */
static int be_late_for_the_second_half(const ep_boot *boot, void *argument)
{
    struct half_scenario *scenario = argument;
    struct member member;

    if (!member_init(&member, boot, PATIENT_MS, 0, 0))
        return 1;
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        member.x[i] = 0x3f80; /* 1.0, of which three ranks send one row each */
    if (ep_ll_dispatch_sync(member.ll, &member.dispatch) != EP_OK)
        return 2;
    member.comm->config.timeout_ms = SHORT_MS;
    member.combine.flags = boot->rank == 0 ? EP_LL_RECV_HOOK : 0;
    if (ep_ll_combine_sync(member.ll, &member.combine) != EP_OK)
        return 3;
    if (boot->rank != 0) {
        member_done(&member);
        atomic_fetch_add(&scenario->gone, 1);
        return 0;
    }
    for (int i = 0; i < 60000 && atomic_load(&scenario->gone) < boot->nranks - 1; i++)
        unit_sleep_ms(1);
    scenario->status = ep_ll_finish_sync(member.ll, 0);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        scenario->wrong += member.out[i] != 0x4040;
    scenario->again = ep_comm_barrier(member.comm);
    snprintf(scenario->text, sizeof(scenario->text), "%s", ep_comm_last_error(member.comm));
    member_done(&member);
    return 0;
}

/* It can read the inputs of its peers after they have left: only the next call fails. */
TEST(a_rank_late_between_two_halves_has_its_rows)
{
    static struct half_scenario scenario;

    run_ranks(be_late_for_the_second_half, 3, &scenario);
    assert_int_equal(scenario.status, EP_OK);
    assert_int_equal(scenario.wrong, 0);
    assert_int_equal(scenario.again, EP_E_PEER_LEFT);
    assert_non_null(strstr(scenario.text, "left the group"));
    assert_null(strstr(scenario.text, "died"));
}

/* --- input that the backend refuses ----------------------------------------------------------------------------- */

/* One bad combine of rank 1, between good rounds: nothing of it may have been sent. */
struct refusal {
    void (*spoil)(struct member *member);
    void (*mend)(struct member *member);
    uint32_t comm_flags, combine_flags;
    ep_status status;
    char text[256];
};

static int refuse(const ep_boot *boot, void *argument)
{
    struct refusal *refusal = argument;
    struct member member;
    int code = 0;

    if (!member_init(&member, boot, 3000, refusal->comm_flags, 0))
        return 1;
    member.combine.flags = refusal->combine_flags;
    for (int round = 0; round < 4 && !code; round++) {
        for (int i = 0; i < TOKENS * HIDDEN; i++)
            member.x[i] = 0x3f80;
        if (ep_ll_dispatch_sync(member.ll, &member.dispatch) != EP_OK)
            code = 2;
        if (boot->rank == 1 && round == 1) {
            refusal->spoil(&member);
            refusal->status = ep_ll_combine_sync(member.ll, &member.combine);
            snprintf(refusal->text, sizeof(refusal->text), "%s", ep_comm_last_error(member.comm));
            refusal->mend(&member);
        }
        if (!code && ep_ll_combine_sync(member.ll, &member.combine) != EP_OK)
            code = 3;
        if (!code && (member.combine.flags & EP_LL_RECV_HOOK) && ep_ll_finish_sync(member.ll, 0) != EP_OK)
            code = 4;
        /* The experts return the rows unchanged: each element is 1.0 from each of two ranks. */
        for (int i = 0; i < TOKENS * HIDDEN && !code; i++)
            if (member.out[i] != 0x4000)
                code = 5;
    }
    member_done(&member);
    return code;
}

/* Token 1 of rank 1: the same experts in another order, so that weights would go to the wrong rows. */
static void use_other_routing(struct member *member)
{
    member->index[2] = 1;
    member->index[3] = 0;
}

static void use_own_routing(struct member *member)
{
    member->index[2] = 0;
    member->index[3] = 1;
}

TEST(routing_of_another_dispatch_is_refused_before_anything_is_offered)
{
    const uint32_t flags[] = {0, EP_LL_RECV_HOOK};

    for (int i = 0; i < 2; i++) {
        struct refusal refusal = {.spoil = use_other_routing, .mend = use_own_routing, .combine_flags = flags[i]};

        run_ranks(refuse, 2, &refusal);
        assert_int_equal(refusal.status, EP_E_ROUTING);
        assert_non_null(strstr(refusal.text, "token 1: topk_idx is 1 at position 0, but its dispatch had 0"));
    }
}

static void use_nan(struct member *member)
{
    member->weights[3] = NAN;
}

static void use_numbers(struct member *member)
{
    member->weights[3] = 1;
}

TEST(nan_in_weights_is_refused_before_anything_is_offered)
{
    struct refusal refusal = {.spoil = use_nan, .mend = use_numbers, .comm_flags = EP_COMM_CHECK_VALUES};

    run_ranks(refuse, 2, &refusal);
    assert_int_equal(refusal.status, EP_E_VALUE);
    assert_non_null(strstr(refusal.text, "NaN in topk_weights of rank 1"));
}

/* A combine that requests a row that the dispatch has not sent. */
static int ask_for_more(const ep_boot *boot, void *argument)
{
    struct refusal *refusal = argument;
    struct member member;
    ep_status status;

    if (!member_init(&member, boot, PATIENT_MS, 0, 0))
        return 1;
    member.index[3] = -1;
    status = ep_ll_dispatch_sync(member.ll, &member.dispatch);
    if (boot->rank == 1) {
        member.index[3] = 1;
        refusal->status = ep_ll_combine_sync(member.ll, &member.combine);
        member.index[3] = -1;
    }
    if (status == EP_OK)
        status = ep_ll_combine_sync(member.ll, &member.combine);
    member_done(&member);
    return status == EP_OK ? 0 : 2;
}

TEST(dispatch_with_fewer_rows_is_not_answered_by_more)
{
    struct refusal refusal = {.status = EP_OK};

    run_ranks(ask_for_more, 2, &refusal);
    assert_int_equal(refusal.status, EP_E_ROUTING);
}

/* Combine 1 and combine 3 use the same buffer, but only after its readers were waited for. */
static int keep_buffer(const ep_boot *boot, void *argument)
{
    struct member member;
    void *buffers[3] = {NULL};
    int code = 0;

    (void)argument;
    if (!member_init(&member, boot, PATIENT_MS, 0, 0))
        return 1;
    member.combine.flags = EP_LL_ZERO_COPY;
    for (int round = 0; round < 3 && !code; round++) {
        if (ep_ll_dispatch_sync(member.ll, &member.dispatch) != EP_OK)
            code = 2;
        member.combine.x = buffers[0];
        if (!code && round == 2 && ep_ll_combine_sync(member.ll, &member.combine) != EP_E_ARG)
            code = 3;
        if (!code && ep_ll_get_combine_buffer(member.ll, &buffers[round]) != EP_OK)
            code = 4;
        member.combine.x = buffers[round];
        if (!code && ep_ll_combine_sync(member.ll, &member.combine) != EP_OK)
            code = 5;
    }
    if (!code && buffers[0] != buffers[2])
        code = 6;
    member_done(&member);
    return code;
}

TEST_CALL(combine_buffer_has_to_be_asked_for_each_time, run_ranks(keep_buffer, 2, NULL))

/* --- leaving ---------------------------------------------------------------------------------------------------- */

static ep_status slow_job(void *arguments)
{
    _Atomic int *done = *(_Atomic int **)arguments;

    unit_sleep_ms(50);
    atomic_store(done, 1);
    return EP_OK;
}

static int free_with_queued_job(const ep_boot *boot, void *argument)
{
    struct member member;
    _Atomic int done = 0, *job = &done;
    int seen;

    (void)argument;
    if (!member_init(&member, boot, PATIENT_MS, 0, 0))
        return 1;
    if (ep_group_submit(ep_group_of(member.comm), NULL, slow_job, &job, sizeof(job)) != EP_OK)
        return 2;
    ep_ll_free(member.ll);
    seen = atomic_load(&done);
    ep_comm_free(member.comm);
    return seen ? 0 : 3;
}

TEST_CALL(leaving_waits_for_the_queue, run_ranks(free_with_queued_job, 2, NULL))
