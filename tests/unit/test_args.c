/* SPDX-License-Identifier: Apache-2.0 */
/* Versions of argument structs, NULL handles, plans, and backends that lack operations. The mock backend must not be
 * called with bad input. */
#include "bad_args.h"
#include "base/process.h"

#include <limits.h>

/* --- args.c --- */

struct versioned {
    size_t size;
    int32_t first, second;
    int64_t grown; /* not in the first release */
};

#define VERSIONED_FIRST (offsetof(struct versioned, second) + sizeof(int32_t))

static ep_status load(struct versioned *ret_args, const void *args)
{
    return ep_args_load(ret_args, sizeof(*ret_args), VERSIONED_FIRST, args, "args");
}

TEST(structs_may_be_older_or_newer)
{
    struct {
        struct versioned known;
        int64_t newer[2];
    } given = {.known = {.first = 1, .second = 2, .grown = 3}};
    struct versioned got;

    given.known.size = sizeof(given.known);
    assert_int_equal(load(&got, &given), EP_OK);
    assert_int_equal(got.grown, 3);

    given.known.size = VERSIONED_FIRST;
    assert_int_equal(load(&got, &given), EP_OK);
    assert_int_equal(got.size, sizeof(got));
    assert_int_equal(got.first, 1);
    assert_int_equal(got.second, 2);
    assert_int_equal(got.grown, 0);

    given.known.size = sizeof(given);
    assert_int_equal(load(&got, &given), EP_OK);
    assert_int_equal(got.grown, 3);
    given.newer[1] = 1ll << 56;
    got.first = 77;
    assert_int_equal(load(&got, &given), EP_E_ABI);
    assert_int_equal(got.first, 77);
    assert_non_null(strstr(ep_last_error(), "byte 39"));
}

TEST(structs_of_impossible_sizes_are_refused)
{
    static const size_t sizes[] = {0, 1, 8, VERSIONED_FIRST - 1, 4097, SIZE_MAX, (size_t)1 << 63};
    struct versioned given = {0}, got;

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        given.size = sizes[i];
        assert_int_equal(load(&got, &given), EP_E_ABI);
        assert_int_equal(ep_args_store(&given, &got, sizeof(got), VERSIONED_FIRST, "args"), EP_E_ABI);
    }
    assert_int_equal(load(&got, NULL), EP_E_ARG);
    assert_string_equal(ep_last_error(), "args is NULL");
    assert_int_equal(ep_args_store(NULL, &got, sizeof(got), VERSIONED_FIRST, "args"), EP_E_ARG);
}

TEST(outputs_fit_older_and_newer_callers)
{
    struct versioned ours = {.size = sizeof(ours), .first = 1, .second = 2, .grown = 3};
    struct {
        struct versioned known;
        int64_t newer[2];
    } theirs;

    memset(&theirs, 0x5a, sizeof(theirs));
    theirs.known.size = VERSIONED_FIRST;
    assert_int_equal(ep_args_store(&theirs, &ours, sizeof(ours), VERSIONED_FIRST, "info"), EP_OK);
    assert_int_equal(theirs.known.size, VERSIONED_FIRST);
    assert_int_equal(theirs.known.second, 2);
    assert_true(theirs.known.grown == 0x5a5a5a5a5a5a5a5a);
    theirs.known.size = sizeof(theirs);
    assert_int_equal(ep_args_store(&theirs, &ours, sizeof(ours), VERSIONED_FIRST, "info"), EP_OK);
    assert_int_equal(theirs.known.grown, 3);
    assert_int_equal(theirs.known.size, sizeof(theirs));
    assert_true(theirs.newer[0] == 0 && theirs.newer[1] == 0);
}

/* --- handles --- */

TEST_WITH(null_handles_are_named, open_comm, close_comm)
{
    void *memory = NULL;
    ep_event *event = NULL;
    int done = 0;
    ep_queue *queue;
    int32_t mask[RANKS];

#define EXPECT_NULL(call, text)                                                                                        \
    do {                                                                                                               \
        assert_int_equal((call), EP_E_ARG);                                                                            \
        assert_string_equal(ep_last_error(), text " is NULL");                                                         \
    } while (0)
    EXPECT_NULL(ep_comm_get_info(NULL, NULL), "ep_comm_get_info: comm");
    EXPECT_NULL(ep_comm_get_info(comm, NULL), "ep_comm_get_info: ret_info");
    EXPECT_NULL(ep_comm_get_stats(NULL, NULL), "ep_comm_get_stats: comm");
    EXPECT_NULL(ep_comm_get_stats(comm, NULL), "ep_comm_get_stats: ret_stats");
    EXPECT_NULL(ep_comm_barrier(NULL), "ep_comm_barrier: comm");
    EXPECT_NULL(ep_comm_allgather(NULL, "", 1, memory), "ep_comm_allgather: comm");
    EXPECT_NULL(ep_comm_allgather(comm, NULL, 1, mask), "ep_comm_allgather: mine");
    EXPECT_NULL(ep_comm_allgather(comm, "", 1, NULL), "ep_comm_allgather: ret_all");
    EXPECT_NULL(ep_comm_async_error(NULL), "ep_comm_async_error: comm");
    EXPECT_NULL(ep_comm_get_failed(NULL, mask), "ep_comm_get_failed: comm");
    EXPECT_NULL(ep_comm_get_failed(comm, NULL), "ep_comm_get_failed: ret_failed");
    EXPECT_NULL(ep_alloc(NULL, 1, &memory), "ep_alloc: comm");
    EXPECT_NULL(ep_alloc(comm, 1, NULL), "ep_alloc: ret_memory");
    EXPECT_NULL(ep_free(NULL, NULL), "ep_free: comm");
    EXPECT_NULL(ep_event_new(NULL, &event), "ep_event_new: comm");
    EXPECT_NULL(ep_barrier_on(NULL, NULL), "ep_barrier_on: comm");
    EXPECT_NULL(ep_queue_new(NULL, &queue), "ep_queue_new: comm");
    EXPECT_NULL(ep_queue_new(comm, NULL), "ep_queue_new: ret_queue");
    EXPECT_NULL(ep_stream_sync(NULL, NULL), "ep_stream_sync: comm");
    EXPECT_NULL(ep_stream_wait(NULL, NULL, event), "ep_stream_wait: comm");
    EXPECT_NULL(ep_stream_wait(comm, NULL, NULL), "ep_stream_wait: event");
    EXPECT_NULL(ep_stream_call(NULL, NULL, free, NULL), "ep_stream_call: comm");
    EXPECT_NULL(ep_stream_call(comm, NULL, NULL, NULL), "ep_stream_call: function");
    EXPECT_NULL(ep_event_new(comm, NULL), "ep_event_new: ret_event");
    EXPECT_NULL(ep_event_record(NULL, NULL, &event), "ep_event_record: comm");
    EXPECT_NULL(ep_event_record(comm, NULL, NULL), "ep_event_record: ret_event");
    EXPECT_NULL(ep_event_signal(NULL), "ep_event_signal: event");
    EXPECT_NULL(ep_event_wait(NULL, 0), "ep_event_wait: event");
    EXPECT_NULL(ep_event_query(NULL, &done), "ep_event_query: event");
    EXPECT_NULL(ep_plan_new(NULL, NULL, NULL), "ep_plan_new: comm");
    EXPECT_NULL(ep_plan_new(comm, NULL, NULL), "ep_plan_new: ret_plan");
    EXPECT_NULL(ep_plan_new(comm, NULL, &plan), "ep_plan_new: args");
    EXPECT_NULL(ep_plan_get_info(NULL, NULL), "ep_plan_get_info: plan");
    EXPECT_NULL(ep_plan_get_tokens(NULL, NULL, &done), "ep_plan_get_tokens: plan");
    EXPECT_NULL(ep_plan_get_sources(NULL, NULL, NULL), "ep_plan_get_sources: plan");
    EXPECT_NULL(ep_plan_layout(NULL, NULL, NULL), "ep_plan_layout: comm");
    EXPECT_NULL(ep_plan_layout(comm, NULL, NULL), "ep_plan_layout: args");
    EXPECT_NULL(ep_dispatch(NULL, NULL, NULL), "ep_dispatch: plan");
    EXPECT_NULL(ep_combine(NULL, NULL, NULL), "ep_combine: plan");
    EXPECT_NULL(ep_ll_new(NULL, NULL, NULL), "ep_ll_new: comm");
    EXPECT_NULL(ep_ll_new(comm, NULL, NULL), "ep_ll_new: ret_ll");
    EXPECT_NULL(ep_ll_new(comm, NULL, &ll), "ep_ll_new: config");
    EXPECT_NULL(ep_ll_dispatch(NULL, NULL, NULL), "ep_ll_dispatch: ll");
    EXPECT_NULL(ep_ll_combine(NULL, NULL, NULL), "ep_ll_combine: ll");
    EXPECT_NULL(ep_ll_finish(NULL, 0, NULL), "ep_ll_finish: ll");
    EXPECT_NULL(ep_dispatch_sync(NULL, NULL), "ep_dispatch_sync: plan");
    EXPECT_NULL(ep_combine_sync(NULL, NULL), "ep_combine_sync: plan");
    EXPECT_NULL(ep_ll_dispatch_sync(NULL, NULL), "ep_ll_dispatch_sync: ll");
    EXPECT_NULL(ep_ll_combine_sync(NULL, NULL), "ep_ll_combine_sync: ll");
    EXPECT_NULL(ep_ll_finish_sync(NULL, 0), "ep_ll_finish_sync: ll");
    EXPECT_NULL(ep_ll_set_mask(NULL, 0, 1, NULL), "ep_ll_set_mask: ll");
    EXPECT_NULL(ep_ll_clear_mask(NULL, NULL), "ep_ll_clear_mask: ll");
    EXPECT_NULL(ep_ll_query_mask(NULL, mask, NULL), "ep_ll_query_mask: ll");
    EXPECT_NULL(ep_ll_merge_mask(NULL, NULL, NULL), "ep_ll_merge_mask: ll");
    EXPECT_NULL(ep_ll_barrier(NULL, NULL), "ep_ll_barrier: ll");
    EXPECT_NULL(ep_ll_get_combine_buffer(NULL, &memory), "ep_ll_get_combine_buffer: ll");
    EXPECT_NULL(ep_ll_get_mask(NULL, mask), "ep_ll_get_mask: ll");
    assert_non_null(strstr(ep_comm_last_error(NULL), "NULL"));
    assert_int_equal(mock.calls, 0);
    /* These accept NULL. */
    assert_int_equal(ep_free(comm, NULL), EP_OK);
    ep_comm_free(NULL);
    ep_comm_abort(NULL);
    ep_event_free(NULL);
    ep_plan_free(NULL);
    ep_ll_free(NULL);
    assert_int_equal(mock.calls, 0);
}

TEST_WITH(small_calls_check_sizes, open_comm, close_comm)
{
    unsigned char block[32] = {0};
    void *memory;

    assert_fails(ep_comm_allgather(comm, block, 4097, block), EP_E_ARG, "bytes is 4097");
    assert_int_equal(ep_alloc(comm, (size_t)INT64_MAX + 1, &memory), EP_E_OVERFLOW);
    assert_int_equal(mock.calls, 0);
    assert_int_equal(ep_comm_allgather(comm, block, 4, block), EP_E_ARG);
    assert_string_equal(ep_last_error(), "ep_comm_allgather: ret_all overlaps mine");
    assert_int_equal(ep_comm_allgather(comm, block + 15, 4, block), EP_E_ARG);
    assert_int_equal(mock.calls, 0);
    assert_int_equal(ep_comm_allgather(comm, block + 16, 4, block), EP_OK);
    assert_int_equal(ep_comm_allgather(comm, NULL, 0, NULL), EP_OK);
    assert_int_equal(ep_alloc(comm, 0, &memory), EP_OK);
    assert_int_equal(mock.calls, 3);
}

/* --- plan --- */

static ep_status run_plan_new(const void *args)
{
    ep_plan *made = NULL;
    ep_status status = ep_plan_new(comm, args, &made);

    assert_int_equal(made != NULL, status == EP_OK);
    ep_plan_free(made);
    return status;
}

static ep_status run_plan_layout(const void *args)
{
    ep_layout layout = EP_LAYOUT_INIT;

    return ep_plan_layout(comm, args, &layout);
}

TEST_WITH(plans_refuse_bad_arguments, open_comm, close_comm)
{
#define P(field, value) SET(ep_plan_args, field, value)
    const struct bad cases[] = {
        {{P(size, 0)}, EP_E_ABI, "size is 0"},
        {{P(size, 24)}, EP_E_ABI, "size is 24"},
        {{P(size, SIZE_MAX)}, EP_E_ABI, "size is"},
        {{P(topk_idx, 0)}, EP_E_ARG, "topk_idx is NULL"},
        {{P(topk_idx, 0x10004)}, EP_E_ALIGN, "topk_idx"},
        {{P(topk_idx, 0x10002), P(idx_type, EP_I32)}, EP_E_ALIGN, "topk_idx"},
        {{P(idx_type, 0)}, EP_E_ARG, "idx_type is 0"},
        {{P(idx_type, EP_F32)}, EP_E_ARG, "idx_type is 3 (f32)"},
        {{P(idx_type, 99)}, EP_E_ARG, "idx_type is 99"},
        {{P(n_tokens, -1)}, EP_E_ARG, "n_tokens is -1"},
        {{P(n_tokens, INT32_MAX)}, EP_E_OVERFLOW, "int32"},
        {{P(n_tokens, INT32_MAX / RANKS), P(expert_alignment, 16)}, EP_E_OVERFLOW, "int32"},
        {{P(topk, 0)}, EP_E_ARG, "topk is 0, not in 1..64"},
        {{P(topk, -3)}, EP_E_ARG, "topk is -3"},
        {{P(topk, EP_MAX_TOPK + 1)}, EP_E_ARG, "topk is 65"},
        {{P(n_experts, 0)}, EP_E_ARG, "n_experts is 0"},
        {{P(n_experts, -4)}, EP_E_ARG, "n_experts is -4"},
        {{P(n_experts, EP_MAX_EXPERTS + RANKS)}, EP_E_ARG, "n_experts is 4100"},
        {{P(n_experts, 255)}, EP_E_ARG, "n_experts 255 is not a multiple of the 4 ranks"},
        {{P(flags, 8)}, EP_E_ARG, "flags has unknown bits 0x8"},
        {{P(flags, 1u << 31 | EP_PLAN_EXPANDED)}, EP_E_ARG, "flags has unknown bits 0x80000000"},
        {{P(flags, EP_PLAN_ZERO_PADDING)}, EP_E_ARG, "EP_PLAN_ZERO_PADDING without EP_PLAN_EXPANDED"},
        {{P(expert_alignment, -1)}, EP_E_ARG, "expert_alignment is -1"},
        {{P(expert_alignment, 65537)}, EP_E_ARG, "expert_alignment is 65537, not in 0..65536"},
        {{P(max_recv_tokens, -1)}, EP_E_ARG, "max_recv_tokens is -1"},
        {{P(max_recv_tokens, INT64_MIN)}, EP_E_ARG, "max_recv_tokens"},
    };
    ep_plan_args good = good_plan();

    RUN_CASES("ep_plan_new", run_plan_new, &good, cases);
    RUN_CASES("ep_plan_layout", run_plan_layout, &good, cases);
    assert_int_equal(mock.plan.expert_alignment, 1);
    assert_null(mock.plan.topk_idx);
    /* Without tokens no array is needed. The limits themselves are valid. */
    good.topk_idx = NULL;
    good.n_tokens = 0;
    good.topk = EP_MAX_TOPK;
    good.n_experts = EP_MAX_EXPERTS;
    good.flags = EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING;
    good.expert_alignment = 128;
    good.max_recv_tokens = 1;
    assert_int_equal(run_plan_new(&good), EP_OK);
    assert_int_equal(mock.plan.expert_alignment, 128);
}

TEST_WITH(layouts_check_their_outputs, open_comm, close_comm)
{
    ep_plan_args args = good_plan();
    ep_layout layout = {.size = 8};

    assert_fails(ep_plan_layout(comm, &args, &layout), EP_E_ABI, "ep_plan_layout: layout.size is 8");
    assert_int_equal(ep_plan_layout(comm, &args, NULL), EP_E_ARG);
    assert_int_equal(mock.calls, 0);
}

TEST_WITH(plans_report_known_counts, open_comm, close_comm)
{
    ep_plan_info info = {.size = sizeof(info)};
    int32_t source;

    open_plan(0, 10, -1, 99);
    assert_int_equal(ep_plan_get_info(plan, &info), EP_OK);
    assert_int_equal(info.out_rows, 99);
    mock.calls = 0;
    assert_int_equal(ep_plan_get_sources(plan, &source, &source), EP_E_STATE);
    assert_int_equal(mock.calls, 0);
    plan->info.n_recv = 5;
    assert_int_equal(ep_plan_get_sources(plan, NULL, NULL), EP_OK);
    assert_int_equal(mock.calls, 1);
    info.size = 1;
    assert_int_equal(ep_plan_get_info(plan, &info), EP_E_ABI);
}

/* --- operations that a backend does not have --- */

TEST_WITH(missing_operations_are_named, open_comm, close_comm)
{
    ep_comm bare = {.ops = &mock_backend_empty,
                    .process = ep_process_generation(),
                    .nranks = RANKS,
                    .ranks_per_node = RANKS,
                    .nnodes = 1};
    ep_plan bare_plan = {.comm = &bare, .args = {.idx_type = EP_I64, .topk = 8, .n_tokens = 10}};
    ep_ll bare_ll = {.comm = &bare, .config = good_ll(), .n_local = 4};
    ep_event bare_event = {.comm = &bare}, *event;
    ep_queue *queue;
    ep_plan_args plan_args = good_plan();
    ep_dispatch_args dispatch = good_dispatch();
    ep_combine_args combine = good_combine();
    ep_ll_config config = good_ll();
    ep_ll_dispatch_args ll_dispatch = good_ll_dispatch();
    ep_ll_combine_args ll_combine = good_ll_combine();
    ep_layout layout = EP_LAYOUT_INIT;
    ep_plan *made;
    ep_ll *made_ll;
    void *memory;
    int done;
    int32_t mask[RANKS];

#define EXPECT_MISSING(call, name)                                                                                     \
    do {                                                                                                               \
        assert_int_equal((call), EP_E_UNSUPPORTED);                                                                    \
        assert_string_equal(ep_last_error(), name ": backend empty does not provide it");                              \
    } while (0)
    pthread_mutex_init(&bare.error_lock, NULL);
    EXPECT_MISSING(ep_comm_barrier(&bare), "ep_comm_barrier");
    EXPECT_MISSING(ep_comm_allgather(&bare, "four", 4, mask), "ep_comm_allgather");
    EXPECT_MISSING(ep_comm_get_failed(&bare, mask), "ep_comm_get_failed");
    EXPECT_MISSING(ep_alloc(&bare, 1, &memory), "ep_alloc");
    EXPECT_MISSING(ep_free(&bare, mask), "ep_free");
    EXPECT_MISSING(ep_barrier_on(&bare, NULL), "ep_barrier_on");
    EXPECT_MISSING(ep_queue_new(&bare, &queue), "ep_queue_new");
    EXPECT_MISSING(ep_stream_sync(&bare, NULL), "ep_stream_sync");
    EXPECT_MISSING(ep_stream_wait(&bare, NULL, &bare_event), "ep_stream_wait");
    EXPECT_MISSING(ep_stream_call(&bare, NULL, free, NULL), "ep_stream_call");
    EXPECT_MISSING(ep_event_new(&bare, &event), "ep_event_new");
    EXPECT_MISSING(ep_event_record(&bare, NULL, &event), "ep_event_record");
    EXPECT_MISSING(ep_event_signal(&bare_event), "ep_event_signal");
    EXPECT_MISSING(ep_event_wait(&bare_event, 1), "ep_event_wait");
    EXPECT_MISSING(ep_event_query(&bare_event, &done), "ep_event_query");
    EXPECT_MISSING(ep_plan_new(&bare, &plan_args, &made), "ep_plan_new");
    EXPECT_MISSING(ep_plan_layout(&bare, &plan_args, &layout), "ep_plan_layout");
    EXPECT_MISSING(ep_plan_get_sources(&bare_plan, NULL, NULL), "ep_plan_get_sources");
    EXPECT_MISSING(ep_dispatch(&bare_plan, &dispatch, NULL), "ep_dispatch");
    EXPECT_MISSING(ep_combine(&bare_plan, &combine, NULL), "ep_combine");
    EXPECT_MISSING(ep_ll_new(&bare, &config, &made_ll), "ep_ll_new");
    bare_ll.dispatches = 1;
    bare_ll.call[1] = (struct ep_ll_call){
        .number = 1, .n_tokens = ll_combine.n_tokens, .max_tokens = 128, .open = EP_LL_OPEN_DISPATCH};
    EXPECT_MISSING(ep_ll_finish(&bare_ll, 0, NULL), "ep_ll_finish");
    bare_ll.call[1].open = EP_LL_CLOSED;
    EXPECT_MISSING(ep_ll_dispatch(&bare_ll, &ll_dispatch, NULL), "ep_ll_dispatch");
    EXPECT_MISSING(ep_ll_combine(&bare_ll, &ll_combine, NULL), "ep_ll_combine");
    EXPECT_MISSING(ep_ll_get_combine_buffer(&bare_ll, &memory), "ep_ll_get_combine_buffer");
    EXPECT_MISSING(ep_ll_get_mask(&bare_ll, mask), "ep_ll_get_mask");
    assert_string_equal(ep_comm_last_error(&bare), "ep_ll_get_mask: backend empty does not provide it");
    assert_int_equal(ep_comm_async_error(&bare), EP_OK);
    ep_comm_abort(&bare);
    pthread_mutex_destroy(&bare.error_lock);
}

/* --- plans from masks, updates, metadata --- */

static ep_status run_mask(const void *args)
{
    ep_plan *made = NULL;
    ep_status status = ep_plan_new(comm, args, &made);

    ep_plan_free(made);
    return status;
}

TEST_WITH(masks_refuse_bad_arguments, open_comm, close_comm)
{
    const struct bad cases[] = {
        {{P(topk_idx, 0x100000)}, EP_E_ARG, "both topk_idx and tokens_per_expert"},
        {{P(token_in_rank, 0)}, EP_E_ARG, "token_in_rank is NULL"},
        {{P(tokens_per_expert, 0x300002)}, EP_E_ALIGN, "tokens_per_expert"},
        {{P(topk, 8)}, EP_E_ARG, "topk is 8 with token_in_rank"},
        {{P(idx_type, EP_I64)}, EP_E_ARG, "idx_type is 5 with token_in_rank"},
        {{P(flags, EP_PLAN_EXPANDED)}, EP_E_ARG, "EP_PLAN_EXPANDED with token_in_rank"},
        {{P(tokens_per_expert, 0), P(topk, 8), P(idx_type, EP_I64)}, EP_E_ARG, "token_in_rank without"},
        {{P(max_tokens, 9)}, EP_E_ARG, "max_tokens is 9, not in 10.."},
        {{P(max_tokens, INT32_MAX)}, EP_E_OVERFLOW, "do not fit an int32"},
        {{P(reserved, 1)}, EP_E_ARG, "reserved is 1"},
    };
    ep_plan_args good = good_plan();
    ep_layout layout = EP_LAYOUT_INIT;

    good.topk_idx = NULL;
    good.topk = good.idx_type = 0;
    good.flags = 0;
    good.n_tokens = 10;
    good.token_in_rank = (const uint8_t *)AT(0x200001);
    good.tokens_per_expert = (const int32_t *)AT(0x300000);
    RUN_CASES("ep_plan_new", run_mask, &good, cases);
    assert_int_equal(mock.plan.topk, RANKS);
    assert_int_equal(ep_plan_layout(comm, &good, &layout), EP_E_ARG);
}

TEST_WITH(updates_refuse_bad_arguments, open_comm, close_comm)
{
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;
    ep_plan_info info = EP_PLAN_INFO_INIT;

    open_plan(0, 10, -1, 20);
    plan->info.n_tokens = 10;
    update.topk_idx = (const void *)AT(0x100000);
    update.n_tokens = 11;
    assert_int_equal(ep_plan_update(NULL, &update, NULL), EP_E_ARG);
    assert_int_equal(ep_plan_update(plan, &update, NULL), EP_E_STATE);
    plan->args.max_recv_tokens = 20;
    assert_fails(ep_plan_update(plan, &update, NULL), EP_E_ARG, "n_tokens is 11, not in 0..10");
    plan->args.max_tokens = 12;
    update.tokens_per_expert = (const int32_t *)AT(0x300000);
    assert_int_equal(ep_plan_update(plan, &update, NULL), EP_E_ARG);
    update.tokens_per_expert = NULL;
    update.topk_idx = NULL;
    assert_int_equal(ep_plan_update(plan, &update, NULL), EP_E_ARG);
    update.topk_idx = (const void *)AT(0x100000);
    update.reserved = 1;
    assert_int_equal(ep_plan_update(plan, &update, NULL), EP_E_ARG);
    update.reserved = 0;
    /* Rejected and unsupported calls do not change the plan. */
    assert_int_equal(ep_plan_update(plan, &update, NULL), EP_E_UNSUPPORTED);
    assert_int_equal(ep_plan_get_info(plan, &info), EP_OK);
    assert_int_equal(info.n_tokens, 10);
}

static ep_status accept_update(ep_plan *updated, const ep_plan_update_args *args, ep_stream stream)
{
    (void)updated;
    (void)args;
    (void)stream;
    return EP_OK;
}

/* All streams but NULL are being captured. */
static bool is_capturing(ep_comm *captured, ep_stream stream)
{
    (void)captured;
    return stream != NULL;
}

static void expect_tokens(uintptr_t stream, int32_t n_tokens)
{
    ep_combine_args combine = good_combine();
    int32_t found;

    assert_int_equal(ep_plan_get_tokens(plan, (ep_stream)AT(stream), &found), EP_OK);
    assert_int_equal(found, n_tokens);
    /* Without tokens there need not be an output. */
    combine.out = NULL;
    combine.topk_weights = NULL;
    combine.out_topk_weights = NULL;
    combine.bias[0] = combine.bias[1] = NULL;
    assert_int_equal(ep_combine(plan, &combine, (ep_stream)AT(stream)), n_tokens ? EP_E_ARG : EP_OK);
}

TEST_WITH(updates_in_captures_change_no_call_outside, open_comm, close_comm)
{
    const struct ep_backend_ops *mock_ops = comm->ops;
    struct ep_backend_ops ops = *mock_ops;
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;

    open_plan(0, 10, -1, 20);
    plan->info.n_tokens = 10;
    plan->args.max_recv_tokens = 20;
    ops.plan_update = accept_update;
    ops.is_capturing = is_capturing;
    comm->ops = &ops;
    expect_tokens(0, 10);
    expect_tokens(1, 10);
    assert_int_equal(ep_plan_update(plan, &update, (ep_stream)AT(1)), EP_OK);
    expect_tokens(0, 10);
    expect_tokens(1, 0);
    expect_tokens(2, 0);
    update.topk_idx = (const void *)AT(0x100000);
    update.n_tokens = 3;
    assert_int_equal(ep_plan_update(plan, &update, NULL), EP_OK);
    expect_tokens(0, 3);
    expect_tokens(1, 3);
    update.n_tokens = 7;
    assert_int_equal(ep_plan_update(plan, &update, (ep_stream)AT(2)), EP_OK);
    expect_tokens(0, 3);
    expect_tokens(1, 7);
    assert_int_equal(ep_plan_get_tokens(plan, NULL, NULL), EP_E_ARG);
    comm->ops = mock_ops;
}

TEST_WITH(metadata_refuse_bad_arguments, open_comm, close_comm)
{
    ep_plan_metadata metadata = EP_PLAN_METADATA_INIT;

    open_plan(0, 10, 20, 20);
    assert_int_equal(ep_plan_get_metadata(NULL, &metadata, NULL), EP_E_ARG);
    metadata.recv_source = (int32_t *)AT(0x100000);
    assert_fails(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_ARG, "source_stride is 0");
    metadata.source_stride = 9;
    assert_int_equal(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_ARG);
    metadata.source_stride = INT32_MAX;
    assert_int_equal(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_OVERFLOW);
    metadata.source_stride = 10;
    metadata.recv_slot = (int32_t *)AT(0x200000);
    assert_fails(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_ARG, "rank layout");
    metadata.recv_slot = NULL;
    metadata.psum_rank = (int32_t *)AT(0x100000 + 76);
    assert_fails(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_ARG, "recv_source overlaps psum_rank");
    metadata.psum_rank = (int32_t *)AT(0x100000 + 82);
    assert_int_equal(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_ALIGN);
    metadata.psum_rank = (int32_t *)AT(0x100000 + 80);
    assert_int_equal(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_UNSUPPORTED);
    open_plan(0, 10, 20, INT64_MAX);
    assert_fails(ep_plan_get_metadata(plan, &metadata, NULL), EP_E_OVERFLOW, "recv_source has 9223372036854775807 * 4");
}

/* A mask has no choices, so no indices or weights can be sent or returned. */
TEST_WITH(masks_have_no_choices, open_comm, close_comm)
{
    ep_dispatch_args dispatch = good_dispatch();
    ep_combine_args combine = good_combine();

    open_plan(0, 10, 20, 20);
    plan->from_mask = true;
    assert_fails(ep_dispatch(plan, &dispatch, NULL), EP_E_ARG, "recv_topk_idx, but a plan from a mask");
    dispatch.recv_topk_idx = NULL;
    assert_int_equal(ep_dispatch(plan, &dispatch, NULL), EP_E_ARG);
    dispatch.topk_weights = NULL;
    assert_int_equal(ep_dispatch(plan, &dispatch, NULL), EP_E_ARG);
    dispatch.recv_topk_weights = NULL;
    assert_int_equal(ep_dispatch(plan, &dispatch, NULL), EP_OK);
    assert_int_equal(ep_combine(plan, &combine, NULL), EP_E_ARG);
    combine.topk_weights = NULL;
    combine.out_topk_weights = NULL;
    assert_int_equal(ep_combine(plan, &combine, NULL), EP_OK);
}
