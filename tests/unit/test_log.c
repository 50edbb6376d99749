/* SPDX-License-Identifier: Apache-2.0 */
/* The lines that the callback of ep_set_log() gets, and the reason that a callback of the caller sets. */
#include "host_ranks.h"
#include "unit.h"

#include "base/log.h"

#include <unistd.h>

#define RANKS 3

static struct lines {
    pthread_mutex_t lock;
    int n;
    ep_log_level level[32];
    char line[32][256];
} lines = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void record_line(void *context, ep_log_level level, const char *line)
{
    struct lines *into = context;

    pthread_mutex_lock(&into->lock);
    if (into->n < 32) {
        into->level[into->n] = level;
        snprintf(into->line[into->n++], sizeof(into->line[0]), "%s", line);
    }
    pthread_mutex_unlock(&into->lock);
}

static int count(ep_log_level level, const char *text)
{
    int n = 0;

    for (int i = 0; i < lines.n; i++)
        n += lines.level[i] == level && strstr(lines.line[i], text);
    return n;
}

/* Every rank logs one creation and one failure, whatever is called later; nothing after the callback is removed. */
TEST(communicators_log_creation_and_failure)
{
    ep_comm *comms[RANKS];

    lines.n = 0;
    ep_set_log(record_line, &lines);
    assert_true(host_ranks_new(RANKS, comms));
    assert_int_equal(lines.n, RANKS);
    assert_int_equal(count(EP_LOG_INFO, "of 3: communicator on backend host, node 0 of 1, network none"), RANKS);
    ep_comm_abort(comms[1]);
    for (int i = 0; i < 2; i++)
        for (int rank = 0; rank < RANKS; rank++)
            assert_int_equal(ep_comm_barrier(comms[rank]), EP_E_ABORTED);
    assert_int_equal(lines.n, 2 * RANKS);
    assert_int_equal(count(EP_LOG_ERROR, "the communicator has failed: EP_E_ABORTED: "), RANKS);
    assert_int_equal(count(EP_LOG_ERROR, "rank 2 of 3: "), 1);
    ep_set_log(NULL, NULL);
    host_ranks_free(RANKS, comms);
    assert_true(host_ranks_new(1, comms));
    host_ranks_free(1, comms);
    assert_int_equal(lines.n, 2 * RANKS);
}

TEST(a_line_does_not_change_the_last_error)
{
    lines.n = 0;
    ep_fail(EP_E_ARG, "the reason");
    ep_set_log(record_line, &lines);
    ep_log(EP_LOG_WARNING, "%d lines", 1);
    ep_set_log(NULL, NULL);
    assert_int_equal(count(EP_LOG_WARNING, "1 lines"), 1);
    assert_string_equal(ep_last_error(), "the reason");
}

/* A callback that is removed while it runs has returned when ep_set_log() returns. */
static _Atomic int inside, entered, calls_after;
static _Atomic bool removed, stop;

static void slow_callback(void *context, ep_log_level level, const char *line)
{
    (void)context;
    (void)level;
    (void)line;
    inside++;
    entered = 1;
    usleep(20000);
    calls_after += removed;
    inside--;
}

static void *log_often(void *argument)
{
    (void)argument;
    while (!stop)
        ep_log(EP_LOG_INFO, "again");
    return NULL;
}

TEST(removing_a_callback_waits_for_its_calls)
{
    pthread_t threads[2];

    ep_set_log(slow_callback, NULL);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, log_often, NULL), 0);
    while (!entered)
        usleep(1000);
    ep_set_log(NULL, NULL);
    assert_int_equal(inside, 0);
    removed = true;
    usleep(5000);
    stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(calls_after, 0);
}

static ep_status fail_with_reason(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)mine;
    (void)bytes;
    (void)timeout_ms;
    (void)ret_all;
    ep_set_last_error(context);
    return EP_E_SYSTEM;
}

/* Also if it equals the previous reason. */
TEST(a_bootstrap_may_set_a_reason)
{
    char reason[] = "KeyError: 'rank'";
    ep_boot boot = {.size = sizeof(boot), .nranks = 1, .allgather = fail_with_reason, .context = reason};
    ep_comm *comm;

    for (int i = 0; i < 2; i++) {
        assert_fails(ep_comm_new(&boot, NULL, &comm), EP_E_SYSTEM, "ep_comm_new: bootstrap: KeyError: 'rank'");
        ep_set_last_error(reason);
    }
    reason[0] = '\0';
    assert_fails(ep_comm_new(&boot, NULL, &comm), EP_E_SYSTEM, "bootstrap: the all-gather failed with EP_E_SYSTEM");
    ep_set_last_error(NULL);
    assert_string_equal(ep_last_error(), "");
}

TEST(versions_agree)
{
    int major, minor, patch;

    assert_int_equal(sscanf(ep_version(), "%d.%d.%d", &major, &minor, &patch), 3);
    assert_int_equal(ep_version_number(), major * 10000 + minor * 100 + patch);
}

/* No bit has two meanings, so a flag passed to the wrong call is rejected. */
TEST(flags_share_one_space)
{
    static const uint32_t flags[] = {EP_COMM_CHECK_VALUES, EP_COMM_CHECK_DISTINCT,  EP_PLAN_EXPANDED,
                                     EP_PLAN_ZERO_PADDING, EP_COMBINE_BY_CHOICE,    EP_COMBINE_ROUND_PARTIAL,
                                     EP_LL_MASK_DEAD,      EP_LL_RECV_HOOK,         EP_LL_ROUND_SCALE,
                                     EP_LL_ZERO_COPY,      EP_LL_NO_PARTIAL_REDUCE, EP_LL_SWIZZLED_SCALES,
                                     EP_DISPATCH_QUANTIZE};
    uint32_t all = 0;

    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        assert_true(flags[i] && !(flags[i] & (flags[i] - 1)));
        assert_false(all & flags[i]);
        all |= flags[i];
    }
}
