/* SPDX-License-Identifier: Apache-2.0 */
/* Failures on ranks that are not in a collective call, and values that are refused. Ranks are threads. */
#include "ranks.h"

#include <epkit/epkit.h>
#include <math.h>

#define NRANKS 2
#define HIDDEN 512

/* What each rank saw. */
struct seen {
    ep_status status[NRANKS];
    char text[NRANKS][256];
    double seconds[NRANKS];
};

static double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void run(ep_rank_fn rank, struct seen *seen)
{
    memset(seen, 0, sizeof(*seen));
    unit_run_threads(NRANKS, rank, seen);
}

static ep_comm *open_comm(const ep_boot *boot, uint32_t flags)
{
    ep_comm_config config = {.size = sizeof(config), .device = -1, .timeout_ms = 60000, .flags = flags};
    ep_comm *comm = NULL;

    return ep_comm_new(boot, &config, &comm) == EP_OK ? comm : NULL;
}

/* --- abort --- */

static int wait_for_a_missing_signal(const ep_boot *boot, void *argument)
{
    struct seen *seen = argument;
    ep_comm *comm = open_comm(boot, 0);
    ep_event *event;

    if (!comm || ep_event_new(comm, &event) != EP_OK)
        return 1;
    if (boot->rank == 0) {
        unit_sleep_ms(100);
        ep_comm_abort(comm);
    }
    seen->seconds[boot->rank] = now();
    seen->status[boot->rank] = ep_event_wait(event, -1);
    seen->seconds[boot->rank] = now() - seen->seconds[boot->rank];
    snprintf(seen->text[boot->rank], sizeof(seen->text[0]), "%s", ep_last_error());
    ep_event_free(event);
    ep_comm_free(comm);
    return 0;
}

TEST(abort_wakes_a_wait_for_a_signal)
{
    struct seen seen;

    run(wait_for_a_missing_signal, &seen);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(seen.status[rank], EP_E_ABORTED);
        assert_non_null(strstr(seen.text[rank], "rank 0 called ep_comm_abort"));
        assert_true(seen.seconds[rank] < 60); /* the deadline */
    }
}

static int poll_for_failure(const ep_boot *boot, void *argument)
{
    struct seen *seen = argument;
    ep_comm *comm = open_comm(boot, 0);
    double end = now() + 60;

    if (!comm || ep_comm_barrier(comm) != EP_OK)
        return 1;
    if (boot->rank == 0)
        ep_comm_abort(comm);
    do {
        seen->status[boot->rank] = ep_comm_async_error(comm);
    } while (seen->status[boot->rank] == EP_OK && now() < end);
    /*
     * The communicator keeps the text of a failure found by polling, also on the rank that did not leave one; the next
     * call returns it.
     */
    snprintf(seen->text[boot->rank], sizeof(seen->text[0]), "%s", ep_comm_last_error(comm));
    ep_comm_barrier(comm);
    if (!strstr(ep_last_error(), "rank 0 called ep_comm_abort"))
        return 1;
    ep_comm_free(comm);
    return 0;
}

TEST(async_error_sees_what_a_peer_did)
{
    struct seen seen;

    run(poll_for_failure, &seen);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(seen.status[rank], EP_E_ABORTED);
        assert_non_null(strstr(seen.text[rank], "rank 0 called ep_comm_abort"));
    }
}

/* --- boots --- */

static ep_status silent_gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    int *calls = context;

    (void)timeout_ms;
    if (++*calls == 2)
        return EP_E_TIMEOUT; /* without an error text */
    memcpy(ret_all, mine, bytes);
    return EP_OK;
}

TEST(a_boot_without_words_gets_some)
{
    int calls = 0;
    ep_boot boot = {.size = sizeof(boot), .nranks = 1, .allgather = silent_gather, .context = &calls};
    ep_comm *comm = NULL;

    assert_int_equal(ep_comm_barrier(NULL), EP_E_ARG); /* an older text that must not be taken for the reason */
    assert_fails(ep_comm_new(&boot, NULL, &comm), EP_E_TIMEOUT, "ep_comm_new: bootstrap");
    assert_null(comm);
}

static ep_status number_gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)mine;
    (void)bytes;
    (void)timeout_ms;
    (void)ret_all;
    return (ep_status) * (const int *)context;
}

/* Callers switch over the statuses, so ep_comm_new() must not pass on a number that is none. */
TEST(a_boot_that_returns_no_status_is_named)
{
    static const int numbers[] = {-1, 1, 999};

    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        ep_boot boot = {
            .size = sizeof(boot), .nranks = 1, .allgather = number_gather, .context = (void *)(uintptr_t)&numbers[i]};
        ep_comm *comm = NULL;
        char text[64];

        snprintf(text, sizeof(text), "returned %d, which is no ep_status", numbers[i]);
        assert_fails(ep_comm_new(&boot, NULL, &comm), EP_E_SYSTEM, text);
        assert_null(comm);
    }
}

TEST(a_misspelt_choice_of_loops_is_refused)
{
    ep_boot boot = {.size = sizeof(boot), .nranks = 1, .allgather = unit_gather_alone};
    ep_comm *comm = NULL;

    setenv("EPKIT_HOST_ISA", "avx1024", 1);
    assert_fails(ep_comm_new(&boot, NULL, &comm), EP_E_ARG, "ep_comm_new: backend host: EPKIT_HOST_ISA is \"avx1024\"");
    setenv("EPKIT_HOST_ISA", "", 1); /* as if it were not set */
    assert_int_equal(ep_comm_new(&boot, NULL, &comm), EP_OK);
    ep_comm_free(comm);
    comm = NULL;
    setenv("EPKIT_HOST_ISA", "portable", 1);
    assert_int_equal(ep_comm_new(&boot, NULL, &comm), EP_OK);
    unsetenv("EPKIT_HOST_ISA");
    ep_comm_free(comm);
}

/* --- values --- */

static ep_plan *plan_of_one_token(ep_comm *comm, int rank)
{
    int32_t expert = rank; /* its own */
    ep_plan *plan = NULL;
    ep_plan_args args = args_plan(&expert, EP_I32, 1, 1, NRANKS);

    return ep_plan_new(comm, &args, &plan) == EP_OK ? plan : NULL;
}

/* The last status of a dispatch that is not EP_E_VALUE with a NaN among its scales and EP_OK without, or EP_E_VALUE. */
static ep_status send_bad_scales(ep_plan *plan)
{
    static const int types[][2] = {
        {EP_F8E4M3, EP_F32}, {EP_F8E4M3, EP_UE8M0}, {EP_F8E4M3, EP_UE8M0_32}, {EP_F4E2M1, EP_F8E4M3}};
    _Alignas(16) uint8_t x[HIDDEN] = {0}, out[HIDDEN], scales[HIDDEN / 16], out_scales[HIDDEN / 16];
    ep_status status = EP_E_VALUE;

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]) && status == EP_E_VALUE; i++) {
        ep_dispatch_args dispatch = args_dispatch(types[i][0], HIDDEN, x, out, 1);

        dispatch.scales = scales;
        dispatch.scale_type = types[i][1];
        dispatch.recv_scales = out_scales;
        memset(scales, 0x38, sizeof(scales));
        memset(scales, 0xff, 4);
        status = ep_dispatch_sync(plan, &dispatch);
        memset(scales, 0x38, 4);
        if (status == EP_E_VALUE && ep_dispatch_sync(plan, &dispatch) != EP_OK)
            status = EP_E_STATE;
    }
    return status;
}

static int send_bad_values(const ep_boot *boot, void *argument)
{
    _Alignas(16) uint16_t row[HIDDEN] = {0}, sum[HIDDEN];
    _Alignas(16) float weights[4] = {NAN}, out_weights[4];
    struct seen *seen = argument;
    ep_comm *comm = open_comm(boot, EP_COMM_CHECK_VALUES);
    ep_plan *plan = comm ? plan_of_one_token(comm, boot->rank) : NULL;
    ep_combine_args combine;

    if (!plan)
        return 1;
    seen->status[boot->rank] = send_bad_scales(plan);
    combine = args_combine(HIDDEN, row, sum);
    combine.topk_weights = weights;
    combine.out_topk_weights = out_weights;
    if (ep_combine_sync(plan, &combine) != EP_E_VALUE)
        return 3;
    weights[0] = 1;
    if (ep_combine_sync(plan, &combine) != EP_OK || out_weights[0] != 1)
        return 4;
    ep_plan_free(plan);
    ep_comm_free(comm);
    return 0;
}

/* Refused before anything is sent: the corrected call succeeds. */
TEST(nan_is_refused_where_it_enters)
{
    struct seen seen;

    run(send_bad_values, &seen);
    for (int rank = 0; rank < NRANKS; rank++)
        assert_int_equal(seen.status[rank], EP_E_VALUE);
}
