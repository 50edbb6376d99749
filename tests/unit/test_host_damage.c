/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One word at a time: rank 1 publishes a value that no rank writes, by the same steps as a valid call, and rank 0 in
 * its valid call gets EP_E_MISMATCH that names rank 1. Ranks are threads. Words that change at any time:
 * test_host_hostile.c.
 */
#include "ranks.h"

#include "backend/host/lowlatency.h"
#include "core/routing.h"
#include "group/collective.h"
#include "group/exchange.h"
#include "group/failure.h"
#include "group/memory.h"
#include "group/peers.h"
#include "group/plan_internal.h"
#include "group/wait.h"

enum { RANKS = 2, TOKENS = 4, TOPK = 2, EXPERTS = 4, HIDDEN = 128 };

struct seen {
    ep_status status;
    char text[256];
};

struct scenario {
    int number; /* of the case */
    int ranks_per_node;
    struct seen seen;
    ep_status (*victim)(struct scenario *scenario, ep_comm *comm);
    void (*hostile)(struct scenario *scenario, ep_comm *comm);
};

/* The status of the first call that fails, and its text, before another call replaces it. */
static ep_status keep(struct scenario *scenario, ep_status status)
{
    if (status != EP_OK && scenario->seen.status == EP_OK) {
        scenario->seen.status = status;
        snprintf(scenario->seen.text, sizeof(scenario->seen.text), "%s", ep_last_error());
    }
    return status;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm;

    if (unit_comm_new(boot, NULL, scenario->ranks_per_node, 60000, &comm) != EP_OK)
        return 1;
    if (boot->rank == 1) {
        scenario->hostile(scenario, comm);
    } else {
        keep(scenario, scenario->victim(scenario, comm));
    }
    ep_comm_free(comm);
    return 0;
}

static void run(struct scenario *scenario, int number)
{
    scenario->number = number;
    scenario->seen = (struct seen){.status = EP_OK};
    unit_run_threads(RANKS, run_rank, scenario);
}

static void expect_damage(struct scenario *scenario, int number, const char *what)
{
    run(scenario, number);
    if (scenario->seen.status != EP_E_MISMATCH ||
        !strstr(scenario->seen.text, "what rank 1 has published is damaged") || !strstr(scenario->seen.text, what))
        fail_msg("case %d: %s \"%s\", expected damage of rank 1: \"%s\"", number, ep_status_name(scenario->seen.status),
                 scenario->seen.text, what);
}

/* Token t has experts t and t + 2: each rank gets each token. */
static const int32_t proper_index[TOKENS * TOPK] = {0, 2, 1, 3, 2, 0, 3, 1};

static ep_plan_args plan_args(void)
{
    return args_plan(proper_index, EP_I32, TOKENS, TOPK, EXPERTS);
}

static ep_status make_plan(struct scenario *scenario, ep_comm *comm)
{
    ep_plan_args args = plan_args();
    ep_plan *plan = NULL;
    ep_status status = ep_plan_new(comm, &args, &plan);

    (void)scenario;
    ep_plan_free(plan);
    return status;
}

/* --- counts of a plan --- */

struct counts {
    /* counts[] is its flexible array. NOLINTNEXTLINE(clang-diagnostic-gnu-variable-sized-type-not-at-end) */
    struct plan_row head;
    int32_t counts[RANKS + RANKS + EXPERTS]; /* as many nodes as ranks at most */
};

static struct counts proper_counts(const ep_comm *comm, size_t *ret_bytes)
{
    struct counts row = {.head = {.n_tokens = TOKENS,
                                  .topk = TOPK,
                                  .n_experts = EXPERTS,
                                  .idx_type = EP_I32,
                                  .expert_alignment = 1,
                                  .max_tokens = TOKENS}};
    int n = 0;

    for (int rank = 0; rank < RANKS; rank++)
        row.counts[n++] = TOKENS;
    for (int node = 0; node < comm->nnodes; node++)
        row.counts[n++] = TOKENS;
    for (int expert = 0; expert < EXPERTS; expert++)
        row.counts[n++] = 2;
    *ret_bytes = offsetof(struct counts, counts) + (size_t)n * sizeof(int32_t);
    return row;
}

static void publish_counts(ep_comm *comm, const struct counts *row, size_t bytes)
{
    struct ep_group *group = ep_group_of(comm);
    uint64_t number;

    if (ep_group_exchange_start(group, EP_GROUP_PLAN_COUNTS, row, bytes, &number) == EP_OK &&
        ep_group_exchange_complete(group, number, EP_GROUP_PLAN_COUNTS, NULL) == EP_OK)
        ep_group_exchange_release(group, number);
}

static const struct {
    size_t offset;
    int32_t value;
    const char *what;
} bad_counts[] = {
    {offsetof(struct counts, head.n_tokens), -1, "its number of tokens"},
    {offsetof(struct counts, head.n_tokens), INT32_MAX, "its number of tokens"},
    {offsetof(struct counts, head.max_recv_tokens) + 4, INT32_MIN, "its max_recv_tokens"},
    {offsetof(struct counts, head.max_tokens), TOKENS - 1, "its max_tokens"},
    {offsetof(struct counts, counts[0]), -1, "its number of tokens for a rank"},
    {offsetof(struct counts, counts[0]), TOKENS + 1, "its number of tokens for a rank"},
    {offsetof(struct counts, counts[1]), INT32_MIN, "its number of tokens for a rank"},
    {offsetof(struct counts, counts[2]), TOKENS + 1, "its number of tokens for a node"},
    {offsetof(struct counts, counts[3]), -2, "its number of choices of an expert"},
    {offsetof(struct counts, counts[4]), TOPK *TOKENS + 1, "its number of choices of an expert"},
    {offsetof(struct counts, counts[3]), 0, "the sum of its choices of the experts of a rank"},
};

static void send_bad_counts(struct scenario *scenario, ep_comm *comm)
{
    size_t bytes;
    struct counts row = proper_counts(comm, &bytes);

    memcpy((char *)&row + bad_counts[scenario->number].offset, &bad_counts[scenario->number].value, sizeof(int32_t));
    publish_counts(comm, &row, bytes);
}

TEST(counts_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = make_plan, .hostile = send_bad_counts};

    for (size_t i = 0; i < sizeof(bad_counts) / sizeof(bad_counts[0]); i++)
        expect_damage(&scenario, (int)i, bad_counts[i].what);
}

/* --- routes between nodes --- */

static const struct {
    int32_t route[2 * TOPK]; /* of its first token: experts, rows */
    const char *what;
} bad_routes[] = {
    {{EXPERTS, 2, 0, 0}, "an expert of its tokens"},
    {{INT32_MAX, 2, 0, 0}, "an expert of its tokens"},
    {{INT32_MIN, 2, 0, 0}, "an expert of its tokens"},
    {{0, 2, -1, 0}, "a row of its tokens"},
    {{0, 2, 2 * TOKENS, 0}, "a row of its tokens"},
    {{0, 2, INT32_MAX, 0}, "a row of its tokens"},
    {{3, 2, 0, 0}, "a token without an expert on this node"},
    {{-1, -1, 0, 0}, "a token without an expert on this node"},
};

/* Valid counts, then routes whose first token is invalid. */
static void send_bad_route(struct scenario *scenario, ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    size_t bytes;
    struct counts row = proper_counts(comm, &bytes);
    struct ep_group_message head = {.kind = EP_GROUP_MESSAGE_ROUTE, .detail = TOKENS, .number = 1};
    struct {
        int32_t expert[TOKENS][TOPK], row[TOKENS][TOPK];
    } routes;
    struct ep_piece piece = {.data = &routes, .bytes = sizeof(routes)};
    bool moved;

    for (int t = 0; t < TOKENS; t++) {
        memcpy(routes.expert[t], (const int32_t[]){t % EXPERTS, (t + 2) % EXPERTS}, sizeof(routes.expert[t]));
        memcpy(routes.row[t], (const int32_t[]){TOKENS + t, TOKENS + t}, sizeof(routes.row[t]));
    }
    memcpy(routes.expert[0], bad_routes[scenario->number].route, sizeof(routes.expert[0]));
    memcpy(routes.row[0], bad_routes[scenario->number].route + TOPK, sizeof(routes.row[0]));
    publish_counts(comm, &row, bytes);
    ep_stream_send(group->streams, 0, 0, &head, sizeof(head), &piece, 1);
    /* Until the other rank has seen it. */
    while (ep_group_check(group) == EP_OK && ep_streams_progress(group->streams, &moved) == EP_OK)
        unit_sleep_ms(1);
}

TEST(routes_are_checked)
{
    struct scenario scenario = {.ranks_per_node = 1, .victim = make_plan, .hostile = send_bad_route};

    for (size_t i = 0; i < sizeof(bad_routes) / sizeof(bad_routes[0]); i++)
        expect_damage(&scenario, (int)i, bad_routes[i].what);
}

/* --- op descriptors --- */

static ep_status dispatch(struct scenario *scenario, ep_comm *comm)
{
    static uint16_t x[TOKENS * HIDDEN];
    ep_plan_args args = plan_args();
    ep_dispatch_args call;
    ep_plan *plan;
    void *out;
    ep_status status;

    EP_TRY(ep_alloc(comm, (size_t)RANKS * TOKENS * HIDDEN * 2, &out));
    EP_TRY(ep_plan_new(comm, &args, &plan));
    call = args_dispatch(EP_BF16, HIDDEN, x, out, RANKS * TOKENS);
    status = keep(scenario, ep_dispatch_sync(plan, &call));
    ep_plan_free(plan);
    return status;
}

enum {
    BAD_SLOT,
    BAD_NOWHERE,
    BAD_GENERATION,
    BAD_OFFSET,
    BAD_END,
    BAD_ALIGNMENT,
    BAD_ROWS,
    BAD_PROCESS,
    BAD_BYTES,
    BAD_DESCS
};

static const char *const desc_texts[BAD_DESCS] = {
    [BAD_SLOT] = "no such allocation",
    [BAD_NOWHERE] = "no such allocation",
    [BAD_GENERATION] = "no such allocation",
    [BAD_OFFSET] = "outside of the allocation",
    [BAD_END] = "outside of the allocation",
    [BAD_ALIGNMENT] = "outside of the allocation",
    [BAD_ROWS] = "the number of rows that it receives",
    [BAD_PROCESS] = "a segment is not of its process",
    [BAD_BYTES] = "outside of the allocation",
};

static void send_bad_desc(struct scenario *scenario, ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    const size_t bytes = (size_t)RANKS * TOKENS * HIDDEN * 2;
    struct ep_group_descriptor record = {
        .phase = EP_GROUP_DISPATCH_READY, .dtype = EP_BF16, .hidden = HIDDEN, .rows = RANKS * TOKENS};
    struct ep_group_address *at = &record.at[EP_GROUP_AT_X];
    ep_plan_args args = plan_args();
    struct ep_shm_name *name;
    ep_plan *plan;
    void *out;

    if (ep_alloc(comm, bytes, &out) != EP_OK || ep_plan_new(comm, &args, &plan) != EP_OK)
        return;
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++)
        record.at[i].slot = EP_GROUP_UNMAPPED;
    record.plan_number = ((struct ep_group_plan *)plan->impl)->number;
    ep_group_find(group, out, bytes, at);
    name = &group->control->slot[at->slot].name;
    switch (scenario->number) {
    case BAD_SLOT:
        at->slot = EP_GROUP_SLOTS;
        break;
    case BAD_NOWHERE:
        at->slot = EP_GROUP_UNMAPPED;
        break;
    case BAD_GENERATION:
        at->generation = 0;
        break;
    case BAD_OFFSET:
        at->offset = UINT64_MAX - 15;
        break;
    case BAD_END:
        at->offset = 16;
        break;
    case BAD_ALIGNMENT:
        at->offset = 8;
        break;
    case BAD_ROWS:
        record.rows = INT64_MAX;
        break;
    case BAD_PROCESS:
        name->process ^= 1;
        break;
    default:
        name->bytes = bytes - 1;
    }
    host_op_begin(group, plan, &record);
    while (ep_group_check(group) == EP_OK)
        unit_sleep_ms(1);
    ep_plan_free(plan);
}

TEST(places_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = dispatch, .hostile = send_bad_desc};

    for (int i = 0; i < BAD_DESCS; i++)
        expect_damage(&scenario, i, desc_texts[i]);
}

/* --- low latency --- */

static ep_status open_ll(ep_comm *comm, ep_ll **ret_ll)
{
    ep_ll_config config = {
        .size = sizeof(config), .max_tokens = TOKENS, .hidden = HIDDEN, .n_experts = EXPERTS, .topk = TOPK};

    return ep_ll_new(comm, &config, ret_ll);
}

/* One dispatch and its combine. `between` runs after the dispatch. */
static ep_status use_ll(struct scenario *scenario, ep_comm *comm, void (*between)(struct scenario *, ep_ll *))
{
    static const uint16_t x[TOKENS * HIDDEN];
    static const float weights[TOKENS * TOPK];
    const size_t rows = (size_t)EXPERTS * TOKENS;
    ep_ll_dispatch_args send = args_ll_dispatch(x, proper_index, EP_I32, TOKENS);
    int32_t counts[EXPERTS / RANKS];
    uint16_t *out = malloc(sizeof(x)), *received = aligned_alloc(16, rows * HIDDEN * 2);
    ep_ll *ll = NULL;
    ep_status status = out && received ? open_ll(comm, &ll) : EP_E_MEMORY;
    ep_ll_combine_args combine = args_ll_combine(received, proper_index, EP_I32, TOKENS, weights, out);

    send.out_dtype = EP_BF16;
    send.recv_x = received;
    send.recv_count = counts;
    if (status == EP_OK)
        status = ep_ll_dispatch_sync(ll, &send);
    if (status == EP_OK && between)
        between(scenario, ll);
    else if (status == EP_OK)
        status = ep_ll_combine_sync(ll, &combine);
    if (!between)
        keep(scenario, status); /* of the victim */
    while (between && ep_group_check(ep_group_of(comm)) == EP_OK)
        unit_sleep_ms(1);
    ep_ll_free(ll);
    free(out);
    free(received);
    return status;
}

static ep_status victim_ll(struct scenario *scenario, ep_comm *comm)
{
    return use_ll(scenario, comm, NULL);
}

/* Words of the counts, the flag of a slot, and what a slot lists. */
enum { BAD_NUMBER, BAD_FORMAT, BAD_MAX_TOKENS, BAD_FLAG, BAD_EXPERT, BAD_INDEX, BAD_TWICE };

static const struct {
    int word;
    int32_t value;
    const char *what;
} bad_slots[] = {
    {BAD_NUMBER, 3, "the number of its dispatch"},
    {BAD_FORMAT, EP_BF16 | 1 << 24, "the format of its rows"},
    {BAD_MAX_TOKENS, 0, "its max_tokens"},
    {BAD_MAX_TOKENS, TOKENS + 1, "its max_tokens"},
    {BAD_MAX_TOKENS, INT32_MIN, "its max_tokens"},
    {BAD_FLAG, 3, "the number of a slot"},
    {BAD_EXPERT, -1, "the number of experts of a token"},
    {BAD_EXPERT, EXPERTS / RANKS, "the number of experts of a token"}, /* of another rank */
    {BAD_EXPERT, EXPERTS, "the number of experts of a token"},
    {BAD_EXPERT, INT32_MAX, "the number of experts of a token"},
    {BAD_INDEX, -1, "the index of a row"},
    {BAD_INDEX, 1, "the index of a row"},
    {BAD_INDEX, INT32_MAX, "the index of a row"},
    {BAD_TWICE, 1, "the index of a row"},
};

/* A dispatch whose tokens go to the experts of rank 0 in turn, with one bad value in the counts or in slot 0. */
static void write_bad_slots(ep_ll *ll, int word, int32_t value)
{
    const struct ll_view to = ll_to(ll, 0);
    uint64_t number = (uint64_t)(word == BAD_NUMBER ? value : 1) << 32;
    int64_t at = ll_wire_counts_at(to.layout, 0, to.source);

    ll_wire_store(to.segment, at, number | (uint32_t)(word == BAD_FORMAT ? value : EP_BF16));
    ll_wire_store(to.segment, at + 8, number | (uint32_t)(word == BAD_MAX_TOKENS ? value : TOKENS));
    for (int t = 0; t < TOKENS; t++) {
        struct ll_choice *choices = (struct ll_choice *)(void *)(to.segment + ll_wire_slot_at(to.layout, to.source, t));

        for (int k = 0; k < TOPK; k++)
            choices[k] = (struct ll_choice){-1, 0};
        choices[0] = (struct ll_choice){t % (EXPERTS / RANKS), t / (EXPERTS / RANKS)};
        if (t == 0 && word == BAD_EXPERT)
            choices[0].expert = value;
        if (t == 0 && word == BAD_INDEX)
            choices[0].index = value;
        if (t == 0 && word == BAD_TWICE)
            choices[1] = (struct ll_choice){0, value};
        ll_wire_store(to.segment, ll_wire_slot_flag_at(to.layout, to.source, t),
                      t == 0 && word == BAD_FLAG ? (uint64_t)value << 1 : 3);
    }
}

/* The word that announces them is the last one that a dispatch writes. */
static void send_bad_slots(struct scenario *scenario, ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    ep_ll *ll;

    if (open_ll(comm, &ll) != EP_OK)
        return;
    write_bad_slots(ll, bad_slots[scenario->number].word, bad_slots[scenario->number].value);
    ll_publish_to(ll, 0, LL_WORD(rows_ready), 1);
    while (ep_group_check(group) == EP_OK)
        unit_sleep_ms(1);
    ep_ll_free(ll);
}

TEST(slots_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = victim_ll, .hostile = send_bad_slots};

    for (size_t i = 0; i < sizeof(bad_slots) / sizeof(bad_slots[0]); i++)
        expect_damage(&scenario, (int)i, bad_slots[i].what);
}

enum { RANGE_BEGIN, RANGE_COUNT, RANGE_SUM, INPUT_SLOT, INPUT_OFFSET, BAD_INPUTS };

static const char *const input_texts[BAD_INPUTS] = {
    "where the rows of this rank are", "where the rows of this rank are", "where the rows of this rank are",
    "no such allocation", "outside of the allocation"};

/* After a valid dispatch: ranges or input of a combine that rank 1 only announces. */
static void publish_bad_input(struct scenario *scenario, ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    struct ll_range *range = &ll_ranges_of(ll, 1, 1)[0];
    struct ep_group_address *offer = &ll_shared_of(inner, 1)->combine_desc[1].address;
    void *buffer;

    if (ep_ll_get_combine_buffer(ll, &buffer) != EP_OK)
        return;
    ll_shared_of(inner, 1)->combine_desc[1].call = 1;
    ep_group_find(inner->group, buffer, 1, offer);
    switch (scenario->number) {
    case RANGE_BEGIN:
        range->begin = -1;
        break;
    case RANGE_COUNT:
        range->count = INT32_MIN;
        break;
    case RANGE_SUM:
        range->begin = INT32_MAX;
        break;
    case INPUT_SLOT:
        offer->slot = UINT32_MAX - 1;
        break;
    default:
        offer->offset += 4096;
    }
    ll_publish_to(ll, 0, LL_WORD(rows_ready), 2);
}

static void send_bad_offer(struct scenario *scenario, ep_comm *comm)
{
    use_ll(scenario, comm, publish_bad_input);
}

TEST(offers_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = victim_ll, .hostile = send_bad_offer};

    for (int i = 0; i < BAD_INPUTS; i++)
        expect_damage(&scenario, i, input_texts[i]);
}

/* --- failures and waits --- */

static ep_status barrier(struct scenario *scenario, ep_comm *comm)
{
    (void)scenario;
    return ep_comm_barrier(comm);
}

static const uint64_t bad_failures[] = {1,
                                        UINT64_MAX,
                                        (uint64_t)9999 << 48,
                                        (uint64_t)EP_E_TIMEOUT << 48 | 7ull << 32,
                                        (uint64_t)EP_E_ABORTED << 48 | 0xffff,
                                        (uint64_t)7 << 48 | 1};

static void publish_failure(ep_comm *comm, uint64_t failure)
{
    atomic_store(&ep_group_arbiter(ep_group_of(comm))->group_failure, failure);
    ep_group_ring_all(ep_group_of(comm));
    while (!atomic_load(&ep_group_of(comm)->peers[0].control->failure))
        unit_sleep_ms(1);
}

static void publish_bad_failure(struct scenario *scenario, ep_comm *comm)
{
    publish_failure(comm, bad_failures[scenario->number]);
}

TEST(failures_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = barrier, .hostile = publish_bad_failure};

    for (size_t i = 0; i < sizeof(bad_failures) / sizeof(bad_failures[0]); i++) {
        run(&scenario, (int)i);
        assert_int_equal(scenario.seen.status, EP_E_MISMATCH);
        /* The rank in whose memory the word is. */
        assert_non_null(strstr(scenario.seen.text, "rank 0 failed with EP_E_MISMATCH"));
    }
}

/* A valid failure, with a reason that is not terminated and contains terminal control characters. */
static void publish_endless_reason(struct scenario *scenario, ep_comm *comm)
{
    struct ep_group_control *control = ep_group_of(comm)->control;
    uint64_t failure = (uint64_t)EP_E_VALUE << 48 | 1ull << 32 | 1;

    (void)scenario;
    memset(control->state.reason, 'x', sizeof(control->state.reason));
    memcpy(control->state.reason, "one\033[2Jtwo\n", 11);
    atomic_store(&control->reason_set, 1);
    atomic_store(&control->state.reason_for, failure);
    publish_failure(comm, failure);
}

TEST(reasons_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = barrier, .hostile = publish_endless_reason};

    run(&scenario, 0);
    assert_int_equal(scenario.seen.status, EP_E_VALUE);
    assert_non_null(strstr(scenario.seen.text, "rank 1 failed with EP_E_VALUE"));
    assert_non_null(strstr(scenario.seen.text, ": one?[2Jtwo?xxx"));
}

/* The result received in a step of creation. */
TEST(results_are_checked)
{
    static const struct {
        int32_t status, rank;
    } bad[] = {{7, 1}, {-1, 1}, {INT32_MAX, 1}, {EP_E_TIMEOUT, -1}, {EP_E_TIMEOUT, RANKS}, {EP_E_PEER_DEAD, INT32_MIN}};
    struct ep_group_result all[RANKS];
    const char *text;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        memset(all, 0, sizeof(all));
        all[1].status = bad[i].status;
        all[1].rank = bad[i].rank;
        assert_fails(ep_group_result_reduce("call", &all[0], RANKS, all, sizeof(all[0])), EP_E_MISMATCH,
                     "call: what rank 1 has published is damaged: status ");
    }
    all[1] = (struct ep_group_result){.status = EP_E_MEMORY, .rank = 1};
    memset(all[1].reason, 0x1b, sizeof(all[1].reason));
    assert_int_equal(ep_group_result_reduce("call", &all[0], RANKS, all, sizeof(all[0])), EP_E_MEMORY);
    text = strstr(ep_last_error(), "call: rank 1 failed: ???");
    assert_non_null(text);
    assert_int_equal(strlen(text), strlen("call: rank 1 failed: ") + EP_GROUP_REASON_BYTES - 1);
    assert_null(strchr(text, 0x1b));
}

/* A failure is recorded first; a rank that tolerates lost peers sees a later abort, and reports the first failure. */
static void an_abort_after_a_failure(struct scenario *scenario, ep_comm *comm)
{
    (void)scenario;
    ep_group_set_failure(ep_group_of(comm), EP_E_TIMEOUT, 1, EP_GROUP_GATHER);
    ep_comm_abort(comm);
}

static ep_status wait_for_abort(struct scenario *scenario, ep_comm *comm)
{
    ep_status status;

    (void)scenario;
    while ((status = ep_group_check_abort(ep_group_of(comm))) == EP_OK)
        unit_sleep_ms(1);
    return status;
}

TEST(aborts_are_seen_after_failures)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = wait_for_abort, .hostile = an_abort_after_a_failure};

    run(&scenario, 0);
    assert_int_equal(scenario.seen.status, EP_E_TIMEOUT);
    assert_non_null(strstr(scenario.seen.text, "rank 1 did not answer"));
}

static void publish_far_counter(struct scenario *scenario, ep_comm *comm)
{
    struct ep_group_control *control = ep_group_of(comm)->control;

    (void)scenario;
    atomic_store(&control->exchange_ready, UINT64_MAX / 2);
    ep_group_ring_all(ep_group_of(comm));
    while (!atomic_load(&ep_group_of(comm)->peers[0].control->failure))
        unit_sleep_ms(1);
}

TEST(counters_are_checked)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = barrier, .hostile = publish_far_counter};

    expect_damage(&scenario, 0, "a counter of its operations");
}

static void wait_for_nobody(struct scenario *scenario, ep_comm *comm)
{
    struct ep_group_control *control = ep_group_of(comm)->control;

    (void)scenario;
    while (!atomic_load(&ep_group_of(comm)->peers[0].control->failure)) {
        atomic_store(&control->state.waiting, UINT32_MAX);
        atomic_store(&control->state.probed_ns, ep_now_ns());
        unit_sleep_ms(1);
    }
}

static ep_status short_barrier(struct scenario *scenario, ep_comm *comm)
{
    (void)scenario;
    comm->config.timeout_ms = 100;
    return ep_comm_barrier(comm);
}

TEST(a_wait_for_nobody_is_its_own_fault)
{
    struct scenario scenario = {.ranks_per_node = RANKS, .victim = short_barrier, .hostile = wait_for_nobody};

    run(&scenario, 0);
    assert_int_equal(scenario.seen.status, EP_E_TIMEOUT);
    assert_non_null(strstr(scenario.seen.text, "rank 1 did not answer"));
}
