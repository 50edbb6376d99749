/* SPDX-License-Identifier: Apache-2.0 */
/* The communication stream and its events, on a group of one rank. */
#include "host_ranks.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST_JOBS = 64 };

/* What the jobs have done, in order. */
static struct {
    int order[MOST_JOBS];
    _Atomic int n;
    pthread_t thread[MOST_JOBS];
} log_of_jobs;

struct job {
    int number, sleep_us;
    ep_status status;
};

static ep_status run_job(void *arguments)
{
    const struct job *job = arguments;

    if (job->sleep_us)
        usleep((useconds_t)job->sleep_us);
    log_of_jobs.thread[log_of_jobs.n] = pthread_self();
    log_of_jobs.order[log_of_jobs.n++] = job->number;
    return job->status == EP_OK ? EP_OK : ep_fail(job->status, "job %d fails", job->number);
}

static ep_status submit(ep_comm *comm, const struct job *job, ep_event *after, ep_event **ret_event)
{
    return host_submit(host_of(comm), run_job, job, sizeof(*job), after, ret_event, false);
}

static int set_up(void **state)
{
    static ep_comm *comm;

    log_of_jobs.n = 0;
    *state = &comm;
    return host_ranks_new(1, &comm) ? 0 : -1;
}

static int tear_down(void **state)
{
    host_ranks_free(1, *state);
    return 0;
}

static void jobs_run_in_order_of_submission(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    ep_event *events[MOST_JOBS];
    int done;

    for (int i = 0; i < MOST_JOBS; i++) {
        struct job job = {.number = i, .sleep_us = i % 8 ? 0 : 300};

        assert_int_equal(submit(comm, &job, NULL, &events[i]), EP_OK);
    }
    for (int i = MOST_JOBS - 1; i >= 0; i--) {
        assert_int_equal(ep_event_wait(events[i], -1), EP_OK);
        /* What comes after it is complete, so it is complete. */
        assert_int_equal(ep_event_query(events[i / 2], &done), EP_OK);
        assert_int_equal(done, 1);
    }
    for (int i = 0; i < MOST_JOBS; i++) {
        assert_int_equal(log_of_jobs.order[i], i);
        host_event_free(events[i]);
    }
}

/* A call that waits for its result anyway runs on the caller's thread, but not before what is queued. */
static void synchronous_jobs_wait_for_the_queue(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job slow = {.number = 1, .sleep_us = 20000}, after = {.number = 2};
    ep_event *event;

    assert_int_equal(submit(comm, &slow, NULL, &event), EP_OK);
    assert_int_equal(submit(comm, &after, NULL, NULL), EP_OK);
    assert_int_equal(log_of_jobs.n, 2);
    assert_int_equal(log_of_jobs.order[0], 1);
    assert_int_equal(log_of_jobs.order[1], 2);
    assert_false(pthread_equal(log_of_jobs.thread[0], pthread_self()));
    assert_true(pthread_equal(log_of_jobs.thread[1], pthread_self()));
    host_event_free(event);
}

static void *signal_later(void *argument)
{
    usleep(30000);
    log_of_jobs.order[log_of_jobs.n++] = 100;
    return (void *)(uintptr_t)ep_event_signal(argument);
}

static void jobs_wait_for_the_users_event(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job first = {.number = 1}, second = {.number = 2};
    ep_event *signal, *event;
    pthread_t thread;
    void *result;
    int done;

    for (int async = 0; async < 2; async++) {
        log_of_jobs.n = 0;
        assert_int_equal(ep_event_new(comm, &signal), EP_OK);
        assert_int_equal(pthread_create(&thread, NULL, signal_later, signal), 0);
        assert_int_equal(submit(comm, &first, signal, async ? &event : NULL), EP_OK);
        if (async) {
            assert_int_equal(ep_event_query(event, &done), EP_OK);
            assert_int_equal(done, 0);
        }
        /* Behind the one that waits, although it waits for nothing itself. */
        assert_int_equal(submit(comm, &second, NULL, NULL), EP_OK);
        assert_int_equal(log_of_jobs.order[0], 100);
        assert_int_equal(log_of_jobs.order[1], 1);
        assert_int_equal(log_of_jobs.order[2], 2);
        pthread_join(thread, &result);
        assert_int_equal((uintptr_t)result, EP_OK);
        if (async)
            host_event_free(event);
        ep_event_free(signal);
        comm->live = 0;
    }
}

static void events_may_be_freed_before_the_work_is_done(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job first = {.number = 1, .sleep_us = 10000}, second = {.number = 2};
    ep_event *event, *other;

    assert_int_equal(submit(comm, &first, NULL, &event), EP_OK);
    assert_int_equal(submit(comm, &second, event, &other), EP_OK);
    host_event_free(event);
    host_event_free(other);
    assert_int_equal(host_drain(host_of(comm)), EP_OK);
    assert_int_equal(log_of_jobs.n, 2);
}

static void failures_pass_on_to_what_waits_for_them(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job bad = {.number = 1, .status = EP_E_VALUE}, dependent = {.number = 2}, other = {.number = 3};
    ep_event *failed, *waiting;

    assert_int_equal(submit(comm, &bad, NULL, &failed), EP_OK);
    assert_int_equal(submit(comm, &dependent, failed, &waiting), EP_OK);
    assert_int_equal(submit(comm, &other, NULL, NULL), EP_OK);
    assert_int_equal(ep_event_wait(waiting, -1), EP_E_VALUE);
    assert_string_equal(ep_last_error(), "the event in .after failed: job 1 fails");
    assert_int_equal(ep_event_wait(failed, -1), EP_E_VALUE);
    assert_string_equal(ep_last_error(), "job 1 fails");
    /* Nobody ran the dependent job; a status of the 1xx kind fails nothing else. */
    assert_int_equal(log_of_jobs.n, 2);
    assert_int_equal(log_of_jobs.order[1], 3);
    assert_int_equal(ep_comm_async_error(comm), EP_OK);
    host_event_free(failed);
    host_event_free(waiting);
}

static void an_event_that_never_comes_fails_the_group(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job first = {.number = 1}, second = {.number = 2};
    ep_event *never, *event, *behind;

    assert_int_equal(ep_event_new(comm, &never), EP_OK);
    assert_int_equal(submit(comm, &first, never, &event), EP_OK);
    assert_int_equal(submit(comm, &second, NULL, &behind), EP_OK);
    assert_int_equal(ep_event_wait(event, 10), EP_E_TIMEOUT);
    assert_string_equal(ep_last_error(), "ep_event_wait: not complete after 10 ms");
    assert_int_equal(ep_event_wait(event, -1), EP_E_TIMEOUT);
    assert_non_null(strstr(ep_last_error(), "rank 0"));
    assert_non_null(strstr(ep_last_error(), ".after"));
    assert_int_equal(ep_event_wait(behind, -1), EP_E_TIMEOUT);
    assert_int_equal(log_of_jobs.n, 0);
    assert_int_equal(ep_comm_async_error(comm), EP_E_TIMEOUT);
    assert_non_null(strstr(ep_comm_last_error(comm), ".after"));
    assert_int_equal(ep_comm_barrier(comm), EP_E_TIMEOUT);
    host_event_free(event);
    host_event_free(behind);
    ep_event_free(never);
}

static void *abort_later(void *argument)
{
    usleep(30000);
    ep_comm_abort(argument);
    return NULL;
}

static void abort_ends_the_wait_for_an_event(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job job = {.number = 1};
    ep_event *never;
    pthread_t thread;

    assert_int_equal(ep_event_new(comm, &never), EP_OK);
    assert_int_equal(pthread_create(&thread, NULL, abort_later, comm), 0);
    /* And not EP_E_TIMEOUT. */
    assert_int_equal(submit(comm, &job, never, NULL), EP_E_ABORTED);
    pthread_join(thread, NULL);
    ep_event_free(never);
}

static void signals_are_for_users_events_and_once(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job job = {.number = 1};
    ep_event *user, *event, *record;
    int done = 0;

    assert_int_equal(ep_event_new(comm, &user), EP_OK);
    assert_int_equal(ep_event_wait(user, 1), EP_E_TIMEOUT);
    assert_int_equal(ep_event_signal(user), EP_OK);
    assert_int_equal(ep_event_signal(user), EP_E_STATE);
    assert_int_equal(ep_event_query(user, &done), EP_OK);
    assert_int_equal(done, 1);
    assert_int_equal(submit(comm, &job, user, &event), EP_OK);
    assert_int_equal(ep_event_signal(event), EP_E_STATE);
    assert_int_equal(ep_event_wait(event, -1), EP_OK);
    assert_int_equal(ep_event_record(comm, &record), EP_OK);
    assert_int_equal(ep_event_wait(record, -1), EP_OK);
    assert_int_equal(ep_event_signal(record), EP_E_STATE);
    ep_event_free(user);
    host_event_free(event);
    ep_event_free(record);
}

static void records_complete_with_what_was_called_before(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job slow = {.number = 1, .sleep_us = 20000};
    ep_event *event, *record, *idle;
    int done;

    assert_int_equal(ep_event_record(comm, &idle), EP_OK);
    assert_int_equal(ep_event_query(idle, &done), EP_OK);
    assert_int_equal(done, 1);
    assert_int_equal(submit(comm, &slow, NULL, &event), EP_OK);
    assert_int_equal(ep_event_record(comm, &record), EP_OK);
    assert_int_equal(ep_event_query(record, &done), EP_OK);
    assert_int_equal(done, 0);
    assert_int_equal(ep_event_wait(record, -1), EP_OK);
    assert_int_equal(log_of_jobs.n, 1);
    host_event_free(event);
    ep_event_free(record);
    ep_event_free(idle);
}

static sigset_t worker_mask;

static ep_status read_mask(void *arguments)
{
    (void)arguments;
    pthread_sigmask(SIG_SETMASK, NULL, &worker_mask);
    return EP_OK;
}

/* Signals go to the application's threads; faults of the worker itself must reach the application's handler. */
static void the_worker_blocks_all_but_its_own_faults(void **state)
{
    ep_comm *comm = *(ep_comm **)*state;
    sigset_t before, after;
    ep_event *event;

    pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(host_submit(host_of(comm), read_mask, NULL, 0, NULL, &event, false), EP_OK);
    assert_int_equal(ep_event_wait(event, -1), EP_OK);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&worker_mask, SIGINT), 1);
    assert_int_equal(sigismember(&worker_mask, SIGCHLD), 1);
    assert_int_equal(sigismember(&worker_mask, SIGSEGV), 0);
    assert_int_equal(sigismember(&worker_mask, SIGBUS), 0);
    assert_int_equal(sigismember(&worker_mask, SIGFPE), 0);
    assert_int_equal(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
    host_event_free(event);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(jobs_run_in_order_of_submission, set_up, tear_down),
        cmocka_unit_test_setup_teardown(synchronous_jobs_wait_for_the_queue, set_up, tear_down),
        cmocka_unit_test_setup_teardown(jobs_wait_for_the_users_event, set_up, tear_down),
        cmocka_unit_test_setup_teardown(events_may_be_freed_before_the_work_is_done, set_up, tear_down),
        cmocka_unit_test_setup_teardown(failures_pass_on_to_what_waits_for_them, set_up, tear_down),
        cmocka_unit_test_setup_teardown(an_event_that_never_comes_fails_the_group, set_up, tear_down),
        cmocka_unit_test_setup_teardown(abort_ends_the_wait_for_an_event, set_up, tear_down),
        cmocka_unit_test_setup_teardown(signals_are_for_users_events_and_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(records_complete_with_what_was_called_before, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_worker_blocks_all_but_its_own_faults, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
