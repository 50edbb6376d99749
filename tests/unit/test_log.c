/* SPDX-License-Identifier: Apache-2.0 */
/* What the library tells the function of ep_set_log(), and the reason that a callback of the caller's leaves. */
#include "host_ranks.h"

#include "base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define RANKS 3

static struct heard {
    pthread_mutex_t lock;
    int n;
    ep_log_level level[32];
    char line[32][256];
} heard = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void hear(void *context, ep_log_level level, const char *line)
{
    struct heard *into = context;

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

    for (int i = 0; i < heard.n; i++)
        n += heard.level[i] == level && strstr(heard.line[i], text);
    return n;
}

/* Opened once, failed once, by every rank, whatever is called behind that; nothing when nobody listens any more. */
static void communicators_tell_their_life(void **state)
{
    ep_comm *comms[RANKS];

    (void)state;
    heard.n = 0;
    ep_set_log(hear, &heard);
    assert_true(host_ranks_new(RANKS, comms));
    assert_int_equal(heard.n, RANKS);
    assert_int_equal(count(EP_LOG_INFO, "of 3: communicator on backend host, node 0 of 1, network none"), RANKS);
    ep_comm_abort(comms[1]);
    for (int i = 0; i < 2; i++)
        for (int rank = 0; rank < RANKS; rank++)
            assert_int_equal(ep_comm_barrier(comms[rank]), EP_E_ABORTED);
    assert_int_equal(heard.n, 2 * RANKS);
    assert_int_equal(count(EP_LOG_ERROR, "the communicator has failed: EP_E_ABORTED: "), RANKS);
    assert_int_equal(count(EP_LOG_ERROR, "rank 2 of 3: "), 1);
    ep_set_log(NULL, NULL);
    host_ranks_free(RANKS, comms);
    assert_true(host_ranks_new(1, comms));
    host_ranks_free(1, comms);
    assert_int_equal(heard.n, 2 * RANKS);
}

static void a_line_leaves_the_last_error_alone(void **state)
{
    (void)state;
    heard.n = 0;
    ep_fail(EP_E_ARG, "the reason");
    ep_set_log(hear, &heard);
    ep_log(EP_LOG_WARNING, "%d lines", 1);
    ep_set_log(NULL, NULL);
    assert_int_equal(count(EP_LOG_WARNING, "1 lines"), 1);
    assert_string_equal(ep_last_error(), "the reason");
}

/* A function that is taken away while it runs: it has returned when ep_set_log() has. */
static _Atomic int inside, entered, calls_after;
static _Atomic bool gone, stop;

static void dawdle(void *context, ep_log_level level, const char *line)
{
    (void)context;
    (void)level;
    (void)line;
    inside++;
    entered = 1;
    usleep(20000);
    calls_after += gone;
    inside--;
}

static void *talk(void *argument)
{
    (void)argument;
    while (!stop)
        ep_log(EP_LOG_INFO, "again");
    return NULL;
}

static void taking_a_function_away_waits_for_its_calls(void **state)
{
    pthread_t threads[2];

    (void)state;
    ep_set_log(dawdle, NULL);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, talk, NULL), 0);
    while (!entered)
        usleep(1000);
    ep_set_log(NULL, NULL);
    assert_int_equal(inside, 0);
    gone = true;
    usleep(5000);
    stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(calls_after, 0);
}

static ep_status fail_with_words(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)mine;
    (void)bytes;
    (void)timeout_ms;
    (void)ret_all;
    ep_set_last_error(context);
    return EP_E_SYSTEM;
}

/* Also when it is the same as that of the failure before. */
static void a_boot_leaves_its_reason(void **state)
{
    char reason[] = "KeyError: 'rank'";
    ep_boot boot = EP_BOOT_INIT;
    ep_comm *comm;

    (void)state;
    boot.nranks = 1;
    boot.allgather = fail_with_words;
    boot.context = reason;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ep_comm_new(&boot, NULL, &comm), EP_E_SYSTEM);
        assert_non_null(strstr(ep_last_error(), "ep_comm_new: bootstrap: KeyError: 'rank'"));
        ep_set_last_error(reason);
    }
    reason[0] = '\0';
    assert_int_equal(ep_comm_new(&boot, NULL, &comm), EP_E_SYSTEM);
    assert_non_null(strstr(ep_last_error(), "bootstrap: the all-gather failed with EP_E_SYSTEM"));
    ep_set_last_error(NULL);
    assert_string_equal(ep_last_error(), "");
}

static void versions_agree(void **state)
{
    int major, minor, patch;

    (void)state;
    assert_int_equal(sscanf(ep_version(), "%d.%d.%d", &major, &minor, &patch), 3);
    assert_int_equal(ep_version_number(), major * 10000 + minor * 100 + patch);
}

/* No bit has two meanings, so a flag that is given to the wrong call is refused. */
static void flags_share_one_space(void **state)
{
    static const uint32_t flags[] = {
        EP_COMM_CHECK_VALUES, EP_PLAN_EXPANDED, EP_PLAN_ZERO_PADDING, EP_COMBINE_BY_CHOICE, EP_COMBINE_ROUND_PARTIAL,
        EP_LL_MASK_DEAD,      EP_LL_RECV_HOOK,  EP_LL_ROUND_SCALE,    EP_LL_ZERO_COPY,      EP_LL_NO_PARTIAL_REDUCE};
    uint32_t all = 0;

    (void)state;
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        assert_true(flags[i] && !(flags[i] & (flags[i] - 1)));
        assert_false(all & flags[i]);
        all |= flags[i];
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(communicators_tell_their_life),
        cmocka_unit_test(a_line_leaves_the_last_error_alone),
        cmocka_unit_test(taking_a_function_away_waits_for_its_calls),
        cmocka_unit_test(a_boot_leaves_its_reason),
        cmocka_unit_test(versions_agree),
        cmocka_unit_test(flags_share_one_space),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
