/* SPDX-License-Identifier: Apache-2.0 */
/* Queues of a communicator and events, on a group of one rank. */
#include "group/queue.h"
#include "host_ranks.h"
#include "unit.h"

#include <signal.h>
#include <unistd.h>

enum { MOST_JOBS = 64 };

/* The actions of the jobs, in order. */
static struct {
    int order[MOST_JOBS];
    _Atomic int n;
    pthread_t thread[MOST_JOBS];
} log_of_jobs;

struct job {
    int number, sleep_us;
    ep_status status;
    _Atomic int *gate; /* waits until this is not 0 */
};

static ep_status run_job(void *arguments)
{
    const struct job *job = arguments;

    if (job->sleep_us)
        usleep((useconds_t)job->sleep_us);
    while (job->gate && !atomic_load(job->gate))
        usleep(1000);
    log_of_jobs.thread[log_of_jobs.n] = pthread_self();
    log_of_jobs.order[log_of_jobs.n++] = job->number;
    return job->status == EP_OK ? EP_OK : ep_fail(job->status, "job %d fails", job->number);
}

/* Queues a job and, after it, a record of it. */
static ep_status submit_in(ep_comm *comm, ep_stream stream, const struct job *job, ep_event **ret_event)
{
    if (ret_event)
        *ret_event = NULL;
    EP_TRY(ep_group_submit(ep_group_of(comm), stream, run_job, job, sizeof(*job)));
    return ret_event ? ep_event_record(comm, stream, ret_event) : EP_OK;
}

static ep_status submit(ep_comm *comm, const struct job *job, ep_event **ret_event)
{
    return submit_in(comm, NULL, job, ret_event);
}

/* Like a call of a _sync form. */
static ep_status submit_sync(ep_comm *comm, const struct job *job)
{
    ep_status status;

    comm->blocking = true;
    status = submit(comm, job, NULL);
    comm->blocking = false;
    return status == EP_OK ? ep_stream_sync(comm, NULL) : status;
}

static int set_up(void **state)
{
    static ep_comm *comm;

    log_of_jobs.n = 0;
    *state = &comm;
    if (!host_ranks_new(1, &comm))
        return -1;
    comm->config.timeout_ms = HOST_RANKS_PATIENT_MS;
    return 0;
}

static int tear_down(void **state)
{
    host_ranks_free(1, *state);
    return 0;
}

/* A call that waits for its result runs on the caller's thread, after all that is queued. */
TEST_WITH(synchronous_jobs_wait_for_the_queue, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job slow = {.number = 1, .sleep_us = 20000}, after = {.number = 2};
    ep_event *event;

    assert_int_equal(submit(comm, &slow, &event), EP_OK);
    assert_int_equal(submit_sync(comm, &after), EP_OK);
    assert_int_equal(log_of_jobs.n, 2);
    assert_int_equal(log_of_jobs.order[0], 1);
    assert_int_equal(log_of_jobs.order[1], 2);
    assert_false(pthread_equal(log_of_jobs.thread[0], pthread_self()));
    assert_true(pthread_equal(log_of_jobs.thread[1], pthread_self()));
    ep_event_free(event);
}

static void *signal_later(void *argument)
{
    usleep(30000);
    log_of_jobs.order[log_of_jobs.n++] = 100;
    return (void *)(uintptr_t)ep_event_signal(argument);
}

/* Also jobs of other queues: the order of the calls is the same on all ranks, and is kept. */
TEST_WITH(jobs_wait_for_the_users_event, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job first = {.number = 1}, second = {.number = 2}, third = {.number = 3};
    ep_event *signal, *event;
    ep_queue *queue;
    pthread_t thread;
    void *result;
    int done;

    assert_int_equal(ep_queue_new(comm, &queue), EP_OK);
    assert_int_equal(ep_event_new(comm, &signal), EP_OK);
    assert_int_equal(ep_stream_wait(comm, queue, signal), EP_OK);
    assert_int_equal(submit_in(comm, queue, &first, &event), EP_OK);
    assert_int_equal(submit(comm, &second, NULL), EP_OK);
    assert_int_equal(ep_event_query(event, &done), EP_OK);
    assert_int_equal(done, 0);
    assert_int_equal(pthread_create(&thread, NULL, signal_later, signal), 0);
    assert_int_equal(submit_sync(comm, &third), EP_OK);
    assert_int_equal(log_of_jobs.order[0], 100);
    for (int i = 1; i < 4; i++)
        assert_int_equal(log_of_jobs.order[i], i);
    pthread_join(thread, &result);
    assert_int_equal((uintptr_t)result, EP_OK);
    assert_int_equal(ep_event_query(event, &done), EP_OK);
    assert_int_equal(done, 1);
    ep_event_free(event);
    ep_event_free(signal);
    ep_queue_free(queue);
    assert_int_equal(comm->live, 0);
}

/* The first failure of a queue is its status until it is read; other queues are not affected. */
TEST_WITH(failures_are_those_of_the_queue, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job bad = {.number = 1, .status = EP_E_VALUE}, worse = {.number = 2, .status = EP_E_MEMORY},
               good = {.number = 3};
    ep_event *failed, *waiting;
    ep_queue *queue;

    assert_int_equal(ep_queue_new(comm, &queue), EP_OK);
    assert_int_equal(submit_in(comm, queue, &bad, NULL), EP_OK);
    assert_int_equal(submit_in(comm, queue, &worse, &failed), EP_OK);
    assert_int_equal(submit(comm, &good, NULL), EP_OK);
    assert_int_equal(ep_stream_sync(comm, NULL), EP_OK);
    assert_int_equal(ep_event_wait(failed, -1), EP_E_VALUE);
    assert_string_equal(ep_last_error(), "job 1 fails");
    /* Work that waits for it fails with the reason, but still runs: the other ranks depend on it. */
    assert_int_equal(ep_stream_wait(comm, NULL, failed), EP_OK);
    assert_int_equal(submit(comm, &good, &waiting), EP_OK);
    assert_int_equal(ep_stream_sync(comm, NULL), EP_E_VALUE);
    assert_string_equal(ep_last_error(), "the event of ep_stream_wait() failed: job 1 fails");
    assert_int_equal(ep_event_wait(waiting, -1), EP_E_VALUE);
    assert_int_equal(log_of_jobs.n, 4);
    /* Reported once. */
    assert_int_equal(ep_stream_sync(comm, NULL), EP_OK);
    assert_int_equal(ep_stream_sync(comm, queue), EP_E_VALUE);
    assert_int_equal(ep_stream_sync(comm, queue), EP_OK);
    assert_int_equal(ep_comm_async_error(comm), EP_OK);
    ep_event_free(failed);
    ep_event_free(waiting);
    ep_queue_free(queue);
}

TEST_WITH(an_unsignalled_event_fails_the_group, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job first = {.number = 1}, second = {.number = 2};
    ep_event *never, *event, *behind;
    ep_queue *queue;

    comm->config.timeout_ms = 500;
    assert_int_equal(ep_queue_new(comm, &queue), EP_OK);
    assert_int_equal(ep_event_new(comm, &never), EP_OK);
    assert_int_equal(ep_stream_wait(comm, NULL, never), EP_OK);
    assert_int_equal(submit(comm, &first, &event), EP_OK);
    assert_int_equal(submit_in(comm, queue, &second, &behind), EP_OK);
    assert_int_equal(ep_event_wait(event, 10), EP_E_TIMEOUT);
    assert_string_equal(ep_last_error(), "ep_event_wait: not complete after 10 ms");
    assert_fails(ep_event_wait(event, -1), EP_E_TIMEOUT, "rank 0");
    assert_non_null(strstr(ep_last_error(), "the event of ep_stream_wait"));
    assert_int_equal(ep_event_wait(behind, -1), EP_E_TIMEOUT);
    assert_int_equal(ep_stream_sync(comm, queue), EP_E_TIMEOUT);
    assert_int_equal(log_of_jobs.n, 0);
    assert_int_equal(ep_comm_async_error(comm), EP_E_TIMEOUT);
    assert_non_null(strstr(ep_comm_last_error(comm), "ep_stream_wait"));
    assert_int_equal(ep_comm_barrier(comm), EP_E_TIMEOUT);
    ep_event_free(event);
    ep_event_free(behind);
    ep_event_free(never);
    ep_queue_free(queue);
}

static void *abort_later(void *argument)
{
    usleep(30000);
    ep_comm_abort(argument);
    return NULL;
}

TEST_WITH(abort_ends_the_wait_for_an_event, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job job = {.number = 1};
    ep_event *never;
    pthread_t thread;

    assert_int_equal(ep_event_new(comm, &never), EP_OK);
    assert_int_equal(ep_stream_wait(comm, NULL, never), EP_OK);
    assert_int_equal(pthread_create(&thread, NULL, abort_later, comm), 0);
    /* Not EP_E_TIMEOUT. */
    assert_int_equal(submit_sync(comm, &job), EP_E_ABORTED);
    pthread_join(thread, NULL);
    ep_event_free(never);
}

TEST_WITH(signals_are_for_users_events_and_once, set_up, tear_down)
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
    assert_int_equal(ep_stream_wait(comm, NULL, user), EP_OK);
    assert_int_equal(submit(comm, &job, &event), EP_OK);
    assert_int_equal(ep_event_signal(event), EP_E_STATE);
    assert_int_equal(ep_event_wait(event, -1), EP_OK);
    assert_int_equal(ep_event_record(comm, NULL, &record), EP_OK);
    assert_int_equal(ep_event_wait(record, -1), EP_OK);
    assert_int_equal(ep_event_signal(record), EP_E_STATE);
    ep_event_free(user);
    ep_event_free(event);
    ep_event_free(record);
}

TEST_WITH(records_complete_with_what_was_called_before, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    _Atomic int gate = 0;
    struct job slow = {.number = 1, .gate = &gate};
    ep_event *event, *record, *idle;
    int done;

    assert_int_equal(ep_event_record(comm, NULL, &idle), EP_OK);
    assert_int_equal(ep_event_query(idle, &done), EP_OK);
    assert_int_equal(done, 1);
    assert_int_equal(submit(comm, &slow, &event), EP_OK);
    assert_int_equal(ep_event_record(comm, NULL, &record), EP_OK);
    assert_int_equal(ep_event_query(record, &done), EP_OK);
    assert_int_equal(done, 0);
    atomic_store(&gate, 1);
    assert_int_equal(ep_event_wait(record, -1), EP_OK);
    assert_int_equal(log_of_jobs.n, 1);
    ep_event_free(event);
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

/*
 * Signals are delivered to threads of the application; faults of the worker itself must reach the application's
 * handler.
 */
TEST_WITH(the_worker_blocks_all_but_its_own_faults, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    sigset_t before, after;

    pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(ep_group_submit(ep_group_of(comm), NULL, read_mask, NULL, 0), EP_OK);
    assert_int_equal(ep_stream_sync(comm, NULL), EP_OK);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&worker_mask, SIGINT), 1);
    assert_int_equal(sigismember(&worker_mask, SIGCHLD), 1);
    assert_int_equal(sigismember(&worker_mask, SIGSEGV), 0);
    assert_int_equal(sigismember(&worker_mask, SIGBUS), 0);
    assert_int_equal(sigismember(&worker_mask, SIGFPE), 0);
    assert_int_equal(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
}

static void add_number(void *context)
{
    log_of_jobs.order[log_of_jobs.n++] = *(const int *)context;
}

/* A function of the caller, in stream order: later work sees its writes. */
TEST_WITH(calls_run_in_the_order_of_the_stream, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job first = {.number = 1, .sleep_us = 3000}, last = {.number = 3};
    int two = 2;

    assert_int_equal(submit(comm, &first, NULL), EP_OK);
    assert_int_equal(ep_stream_call(comm, NULL, add_number, &two), EP_OK);
    assert_int_equal(submit(comm, &last, NULL), EP_OK);
    assert_int_equal(ep_barrier_on(comm, NULL), EP_OK);
    assert_int_equal(ep_stream_sync(comm, NULL), EP_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(log_of_jobs.order[i], i + 1);
}

static void write_late(void *context)
{
    usleep(20000);
    memset(context, 1, 4096);
    log_of_jobs.n++;
}

/* Like cudaFree(): queued work may still use the memory. */
TEST_WITH(memory_is_freed_after_queued_work, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    void *memory;

    assert_int_equal(ep_alloc(comm, 4096, &memory), EP_OK);
    assert_int_equal(ep_stream_call(comm, NULL, write_late, memory), EP_OK);
    assert_int_equal(ep_free(comm, memory), EP_OK);
    assert_int_equal(log_of_jobs.n, 1);
}

/* An idle worker, a worker whose job waits, and a thread that waits for it use no processor time. */
TEST_WITH(nobody_spins, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job job = {.number = 1, .sleep_us = 300000};
    ep_event *signal;
    double begin;

    assert_int_equal(submit(comm, &(struct job){.number = 0}, NULL), EP_OK);
    assert_int_equal(ep_stream_sync(comm, NULL), EP_OK);
    begin = unit_processor_seconds();
    usleep(300000);
    assert_int_equal(ep_event_new(comm, &signal), EP_OK);
    assert_int_equal(ep_stream_wait(comm, NULL, signal), EP_OK);
    usleep(300000);
    assert_int_equal(ep_event_signal(signal), EP_OK);
    assert_int_equal(submit(comm, &job, NULL), EP_OK);
    assert_int_equal(ep_stream_sync(comm, NULL), EP_OK);
    assert_true(unit_processor_seconds() - begin < 0.2);
    ep_event_free(signal);
}

TEST_WITH(queues_belong_to_their_communicator, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state, *other;
    struct job job = {.number = 1};
    ep_event *event;
    ep_queue *queue;

    assert_true(host_ranks_new(1, &other));
    assert_int_equal(ep_queue_new(other, &queue), EP_OK);
    assert_fails(submit_in(comm, queue, &job, NULL), EP_E_ARG, "is not a queue of this communicator");
    assert_int_equal(ep_stream_sync(comm, queue), EP_E_ARG);
    assert_int_equal(ep_event_record(comm, queue, &event), EP_E_ARG);
    assert_int_equal(ep_event_new(comm, &event), EP_OK);
    assert_int_equal(ep_stream_wait(comm, queue, event), EP_E_ARG);
    assert_int_equal(log_of_jobs.n, 0);
    ep_event_free(event);
    ep_queue_free(queue);
    ep_queue_free(NULL);
    ep_comm_free(other);
}

/* A stream is not dereferenced before it is known: it may belong to a device, or be freed. */
TEST_WITH(unknown_streams_are_not_dereferenced, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    ep_queue *queue, *other;

    assert_int_equal(ep_stream_sync(comm, (ep_stream)1), EP_E_ARG); /* cudaStreamLegacy */
    assert_string_equal(ep_last_error(), "stream 0x1 is not a queue of this communicator");
    assert_int_equal(ep_barrier_on(comm, state), EP_E_ARG);
    assert_int_equal(ep_queue_new(comm, &queue), EP_OK);
    assert_int_equal(ep_queue_new(comm, &other), EP_OK);
    ep_queue_free(queue);
    assert_int_equal(ep_stream_sync(comm, queue), EP_E_ARG);
    assert_int_equal(ep_stream_sync(comm, other), EP_OK);
    ep_queue_free(other);
}

/* --- functions of ep_stream_call() that do what they may not --- */

struct misuse {
    ep_comm *comm;
    ep_event *event;
    ep_queue *queue;
    ep_status sync, wait, barrier, query, signal, error;
    char text[EP_ERROR_TEXT_BYTES];
};

static void misuse(void *context)
{
    struct misuse *m = context;
    int done;

    m->sync = ep_stream_sync(m->comm, NULL);
    snprintf(m->text, sizeof(m->text), "%s", ep_last_error());
    m->barrier = ep_comm_barrier(m->comm);
    m->wait = ep_event_wait(m->event, -1);
    ep_queue_free(m->queue);
    ep_comm_free(m->comm);
    m->query = ep_event_query(m->event, &done);
    m->error = ep_comm_async_error(m->comm);
    m->signal = ep_event_signal(m->event);
}

/* A call that would wait for the function itself is refused. */
TEST_WITH(functions_of_a_stream_may_not_wait, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct misuse m = {.comm = comm};

    assert_int_equal(ep_event_new(comm, &m.event), EP_OK);
    assert_int_equal(ep_queue_new(comm, &m.queue), EP_OK);
    assert_int_equal(ep_stream_call(comm, m.queue, misuse, &m), EP_OK);
    assert_int_equal(ep_stream_wait(comm, m.queue, m.event), EP_OK);
    assert_int_equal(ep_stream_sync(comm, m.queue), EP_OK);
    assert_int_equal(m.sync, EP_E_STATE);
    assert_string_equal(m.text, "ep_stream_sync: called in a function of ep_stream_call()");
    assert_int_equal(m.barrier, EP_E_STATE);
    assert_int_equal(m.wait, EP_E_STATE);
    assert_int_equal(m.query, EP_OK);
    assert_int_equal(m.error, EP_OK);
    assert_int_equal(m.signal, EP_OK);
    assert_int_equal(ep_comm_barrier(comm), EP_OK);
    ep_event_free(m.event);
    ep_queue_free(m.queue);
}

struct nested {
    ep_comm *outer, *inner;
    ep_status call, sync;
    int number;
};

/* The call on the other communicator runs on this thread, inside of this function. */
static void call_another(void *context)
{
    struct nested *n = context;

    n->inner->blocking = true;
    n->call = ep_stream_call(n->inner, NULL, add_number, &n->number);
    n->inner->blocking = false;
    n->sync = ep_stream_sync(n->outer, NULL);
}

TEST_WITH(functions_may_not_wait_after_a_call_on_another_communicator, set_up, tear_down)
{
    struct nested n = {.outer = *(ep_comm **)*state, .number = 7};

    assert_true(host_ranks_new(1, &n.inner));
    assert_int_equal(ep_stream_call(n.outer, NULL, call_another, &n), EP_OK);
    assert_int_equal(ep_stream_sync(n.outer, NULL), EP_OK);
    assert_int_equal(n.call, EP_OK);
    assert_int_equal(log_of_jobs.order[0], n.number);
    assert_int_equal(n.sync, EP_E_STATE);
    ep_comm_free(n.inner);
}

/* Freeing a queue waits for its work; work in other queues continues. */
TEST_WITH(a_queue_is_freed_when_its_work_is_done, set_up, tear_down)
{
    ep_comm *comm = *(ep_comm **)*state;
    struct job slow = {.number = 1, .sleep_us = 20000};
    ep_queue *queue;

    assert_int_equal(ep_queue_new(comm, &queue), EP_OK);
    assert_int_equal(submit_in(comm, queue, &slow, NULL), EP_OK);
    ep_queue_free(queue);
    assert_int_equal(log_of_jobs.n, 1);
    assert_int_equal(comm->live, 0);
}
