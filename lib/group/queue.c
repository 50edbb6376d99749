/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queues of a communicator. One worker thread runs all jobs one at a time, in the order of the calls, because that
 * is the order that the ranks agree on; a queue knows its last job and the first failure among its jobs. The thread is
 * started on first use and sleeps when there is no job. What waits for its result anyway runs on the caller's thread.
 *
 * Events carry their own lock, so that any thread may wait on them while the worker completes them.
 */
#include "group/group.h"

#include "base/thread.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How often a wait for an event of the caller looks whether the group has failed. */
#define SLICE_NS 10000000u

struct host_event {
    struct ep_event base;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int refs; /* the owner, the job that completes it, jobs that wait for it */
    bool done, user;
    ep_status status;
    char text[EP_ERROR_TEXT_BYTES];
};

struct host_job {
    struct host_job *next;
    struct host_queue *queue;
    host_job_fn run;
    struct host_event *after, *event; /* NULL: none. To wait for first; to complete */
    alignas(max_align_t) unsigned char arguments[];
};

static ep_status event_new(ep_comm *comm, struct host_event **ret_event)
{
    struct host_event *event = calloc(1, sizeof(*event));

    if (!event)
        return ep_fail(EP_E_MEMORY, "no memory for an event");
    event->base.comm = comm;
    event->refs = 1;
    pthread_mutex_init(&event->lock, NULL);
    ep_cond_init(&event->changed);
    *ret_event = event;
    return EP_OK;
}

static struct host_event *event_ref(struct host_event *event)
{
    if (event) {
        pthread_mutex_lock(&event->lock);
        event->refs++;
        pthread_mutex_unlock(&event->lock);
    }
    return event;
}

static void event_unref(struct host_event *event)
{
    int refs;

    if (!event)
        return;
    pthread_mutex_lock(&event->lock);
    refs = --event->refs;
    pthread_mutex_unlock(&event->lock);
    if (refs)
        return;
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

/* Under the event's lock. */
static void complete_locked(struct host_event *event, ep_status status, const char *text)
{
    event->done = true;
    event->status = status;
    if (status != EP_OK)
        snprintf(event->text, sizeof(event->text), "%s", text);
    pthread_cond_broadcast(&event->changed);
}

/* With what has become of the work before it in its queue, which only the worker changes while there is a job. */
static void complete_event(struct host_event *event, const struct host_queue *queue)
{
    pthread_mutex_lock(&event->lock);
    complete_locked(event, queue->status, queue->text);
    pthread_mutex_unlock(&event->lock);
}

/* Waits for the event of ep_stream_wait(): until the deadline, and no longer than the group is sound. */
static ep_status wait_after(struct host_comm *host, struct host_event *event)
{
    uint64_t deadline = ep_deadline_ns(host->comm->config.timeout_ms);
    ep_status status = EP_OK;

    pthread_mutex_lock(&event->lock);
    while (!event->done && status == EP_OK) {
        uint64_t now = ep_now_ns();
        struct timespec slice = ep_timespec(now + SLICE_NS);

        if (now >= deadline) {
            status = host_raise(host, EP_E_TIMEOUT, host->comm->rank, HOST_AFTER);
            break;
        }
        pthread_cond_timedwait(&event->changed, &event->lock, &slice);
        status = host_check(host);
    }
    if (status == EP_OK && event->status != EP_OK)
        status = ep_fail(event->status, "the event of ep_stream_wait() failed: %s", event->text);
    pthread_mutex_unlock(&event->lock);
    return status;
}

static ep_status run_job(struct host_comm *host, host_job_fn run, void *arguments, struct host_event *after)
{
    EP_TRY(host_check(host));
    if (after)
        EP_TRY(wait_after(host, after));
    return run(arguments);
}

static void finish_job(struct host_comm *host, struct host_job *job, ep_status status)
{
    struct host_queue *queue = job->queue;

    status = ep_comm_record(host->comm, status);
    pthread_mutex_lock(&host->queue_lock);
    if (status != EP_OK && queue->status == EP_OK) {
        queue->status = status;
        snprintf(queue->text, sizeof(queue->text), "%s", ep_last_error());
    }
    if (job->event)
        complete_event(job->event, queue);
    host->head = job->next;
    if (!host->head)
        host->tail = NULL;
    queue->jobs--;
    pthread_cond_broadcast(&host->queue_changed);
}

static void *worker_main(void *argument)
{
    struct host_comm *host = argument;

    pthread_mutex_lock(&host->queue_lock);
    for (;;) {
        struct host_job *job = host->head;

        if (!job) {
            if (host->worker_stop)
                break;
            pthread_cond_wait(&host->queue_changed, &host->queue_lock);
            continue;
        }
        pthread_mutex_unlock(&host->queue_lock);
        host->on_worker = true;
        finish_job(host, job, run_job(host, job->run, job->arguments, job->after));
        host->on_worker = false;
        event_unref(job->event);
        event_unref(job->after);
        free(job);
    }
    pthread_mutex_unlock(&host->queue_lock);
    return NULL;
}

static ep_status start_worker(struct host_comm *host)
{
    int error;

    if (host->worker_started)
        return EP_OK;
    error = ep_thread_start(&host->worker, NULL, worker_main, host);
    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "worker of the queues: pthread_create");
    host->worker_started = true;
    return EP_OK;
}

static ep_status find_queue(struct host_comm *host, ep_stream stream, struct host_queue **ret_queue)
{
    struct host_queue *queue = &host->queue;

    /* Looked for and not looked into: it may be a stream of something else, or freed. */
    while (queue && stream && queue != stream)
        queue = queue->next;
    if (!queue)
        return ep_fail(EP_E_ARG, "stream %p is not a queue of this communicator", stream);
    *ret_queue = queue;
    return EP_OK;
}

/* References to the events become the job's when it is queued. */
static ep_status enqueue(struct host_comm *host, struct host_queue *queue, const struct host_job *what,
                         const void *arguments, size_t bytes)
{
    struct host_job *job;

    EP_TRY(start_worker(host));
    job = malloc(sizeof(*job) + bytes);
    if (!job)
        return ep_fail(EP_E_MEMORY, "no memory for a job of a queue");
    *job = *what;
    job->queue = queue;
    if (bytes)
        memcpy(job->arguments, arguments, bytes);
    pthread_mutex_lock(&host->queue_lock);
    *(host->tail ? &host->tail->next : &host->head) = job;
    host->tail = job;
    queue->jobs++;
    pthread_cond_broadcast(&host->queue_changed);
    pthread_mutex_unlock(&host->queue_lock);
    return EP_OK;
}

ep_status host_submit(struct host_comm *host, ep_stream stream, host_job_fn run, const void *arguments, size_t bytes)
{
    struct host_queue *queue = NULL;

    EP_TRY(find_queue(host, stream, &queue));
    if (host->comm->blocking)
        return host_run(host, run, (void *)(uintptr_t)arguments);
    return enqueue(host, queue, &(struct host_job){.run = run}, arguments, bytes);
}

ep_status host_run(struct host_comm *host, host_job_fn run, void *arguments)
{
    EP_TRY(host_drain(host));
    return run_job(host, run, arguments, NULL);
}

bool host_is_idle(struct host_comm *host)
{
    bool idle;

    pthread_mutex_lock(&host->queue_lock);
    idle = !host->head;
    pthread_mutex_unlock(&host->queue_lock);
    return idle;
}

ep_status host_drain(struct host_comm *host)
{
    /* Every job has its own deadlines, so this ends. */
    pthread_mutex_lock(&host->queue_lock);
    while (host->head)
        pthread_cond_wait(&host->queue_changed, &host->queue_lock);
    pthread_mutex_unlock(&host->queue_lock);
    /* Recorded here, because some callers can only free: the reason must not be lost with them. */
    return ep_comm_record(host->comm, host_check(host));
}

static void wait_for_queue(struct host_comm *host, const struct host_queue *queue)
{
    pthread_mutex_lock(&host->queue_lock);
    while (queue->jobs)
        pthread_cond_wait(&host->queue_changed, &host->queue_lock);
    pthread_mutex_unlock(&host->queue_lock);
}

ep_status host_stream_ready(ep_comm *comm, ep_stream stream)
{
    struct host_queue *queue = NULL;

    EP_TRY(find_queue(host_of(comm), stream, &queue));
    wait_for_queue(host_of(comm), queue);
    return EP_OK;
}

ep_status host_stream_sync(ep_comm *comm, ep_stream stream)
{
    struct host_comm *host = host_of(comm);
    struct host_queue *queue = NULL;
    ep_status status;

    EP_TRY(find_queue(host, stream, &queue));
    wait_for_queue(host, queue);
    /* Without jobs the queue is the caller's alone. */
    status = queue->status;
    queue->status = EP_OK;
    return status == EP_OK ? host_check(host) : ep_fail(status, "%s", queue->text);
}

ep_status host_fail_queued(struct host_comm *host, ep_status status, enum host_phase phase, bool alone)
{
    int none = EP_OK;

    if (status == EP_OK || ep_status_is_fatal(status) || !host->on_worker || atomic_load(&host->comm->failed))
        return status;
    if (!alone)
        return host_raise_own(host, status, host->comm->rank, phase);
    atomic_compare_exchange_strong(&host->comm->failed, &none, (int)status);
    return status;
}

ep_status host_queue_new(ep_comm *comm, ep_queue **ret_queue)
{
    struct host_comm *host = host_of(comm);
    struct host_queue *queue = calloc(1, sizeof(*queue));

    if (!queue)
        return ep_fail(EP_E_MEMORY, "ep_queue_new: no memory");
    queue->base.comm = comm;
    queue->next = host->queue.next;
    host->queue.next = queue;
    *ret_queue = &queue->base;
    return EP_OK;
}

void host_queue_free(ep_queue *base)
{
    struct host_comm *host = host_of(base->comm);
    struct host_queue *queue = (struct host_queue *)base, **link = &host->queue.next;

    wait_for_queue(host, queue);
    while (*link != queue)
        link = &(*link)->next;
    *link = queue->next;
    free(queue);
}

void host_queue_close(struct host_comm *host)
{
    if (!host->worker_started)
        return;
    pthread_mutex_lock(&host->queue_lock);
    host->worker_stop = true;
    pthread_cond_broadcast(&host->queue_changed);
    pthread_mutex_unlock(&host->queue_lock);
    pthread_join(host->worker, NULL);
    host->worker_started = false;
}

ep_status host_event_new(ep_comm *comm, ep_event **ret_event)
{
    struct host_event *event = NULL;

    EP_TRY(event_new(comm, &event));
    event->user = true;
    *ret_event = &event->base;
    return EP_OK;
}

static ep_status nothing(void *arguments)
{
    (void)arguments;
    return EP_OK;
}

ep_status host_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    struct host_comm *host = host_of(comm);
    struct host_event *event = NULL;
    struct host_queue *queue = NULL;
    ep_status status = EP_OK;
    bool busy;

    EP_TRY(find_queue(host, stream, &queue));
    EP_TRY(event_new(comm, &event));
    pthread_mutex_lock(&host->queue_lock);
    busy = queue->jobs > 0;
    pthread_mutex_unlock(&host->queue_lock);
    if (busy)
        status = enqueue(host, queue, &(struct host_job){.run = nothing, .event = event_ref(event)}, NULL, 0);
    else
        complete_event(event, queue);
    if (status != EP_OK) {
        event->refs = 1;
        event_unref(event);
        return status;
    }
    *ret_event = &event->base;
    return EP_OK;
}

ep_status host_stream_wait(ep_comm *comm, ep_stream stream, ep_event *base)
{
    struct host_comm *host = host_of(comm);
    struct host_event *event = (struct host_event *)base;
    struct host_queue *queue = NULL;
    ep_status status;

    EP_TRY(find_queue(host, stream, &queue));
    status = enqueue(host, queue, &(struct host_job){.run = nothing, .after = event_ref(event)}, NULL, 0);
    if (status != EP_OK)
        event_unref(event);
    return status;
}

struct call {
    const ep_comm *comm;
    ep_stream_fn function;
    void *context;
};

static ep_status run_call(void *arguments)
{
    const struct call *call = arguments;
    const ep_comm *outer = ep_comm_note_calling(call->comm);

    call->function(call->context);
    ep_comm_note_calling(outer);
    return EP_OK;
}

ep_status host_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context)
{
    struct call call = {.comm = comm, .function = function, .context = context};

    return host_submit(host_of(comm), stream, run_call, &call, sizeof(call));
}

ep_status host_event_signal(ep_event *base)
{
    struct host_event *event = (struct host_event *)base;
    bool fresh;

    pthread_mutex_lock(&event->lock);
    fresh = event->user && !event->done;
    if (fresh)
        complete_locked(event, EP_OK, NULL);
    pthread_mutex_unlock(&event->lock);
    if (fresh)
        return EP_OK;
    return ep_fail(EP_E_STATE, "ep_event_signal: %s",
                   event->user ? "the event was signalled before" : "the event is not from ep_event_new");
}

static ep_status event_result(const struct host_event *event)
{
    return event->status == EP_OK ? EP_OK : ep_fail(event->status, "%s", event->text);
}

/* An event of the caller: nothing but its signal completes it, so the wait looks for failures of the group itself. */
static ep_status wait_for_signal(struct host_event *event, int timeout_ms)
{
    int limit_ms = timeout_ms >= 0 ? timeout_ms : event->base.comm->config.timeout_ms;
    uint64_t limit = ep_deadline_ns(limit_ms), now;

    while (!event->done && (now = ep_now_ns()) < limit) {
        struct timespec slice = ep_timespec(now + SLICE_NS < limit ? now + SLICE_NS : limit);

        EP_TRY(host_check(host_of(event->base.comm)));
        pthread_cond_timedwait(&event->changed, &event->lock, &slice);
    }
    return event->done ? EP_OK : ep_fail(EP_E_TIMEOUT, "ep_event_wait: not signalled after %d ms", limit_ms);
}

/* An event of an operation, which has deadlines of its own. */
static ep_status wait_for_work(struct host_event *event, int timeout_ms)
{
    uint64_t limit = ep_deadline_ns(timeout_ms);
    struct timespec until = ep_timespec(limit);

    while (!event->done && timeout_ms < 0)
        pthread_cond_wait(&event->changed, &event->lock);
    while (!event->done && ep_now_ns() < limit)
        pthread_cond_timedwait(&event->changed, &event->lock, &until);
    return event->done ? EP_OK : ep_fail(EP_E_TIMEOUT, "ep_event_wait: not complete after %d ms", timeout_ms);
}

ep_status host_event_wait(ep_event *base, int timeout_ms)
{
    struct host_event *event = (struct host_event *)base;
    ep_status status;

    pthread_mutex_lock(&event->lock);
    status = event->user ? wait_for_signal(event, timeout_ms) : wait_for_work(event, timeout_ms);
    if (status == EP_OK)
        status = event_result(event);
    pthread_mutex_unlock(&event->lock);
    return status;
}

ep_status host_event_query(const ep_event *base, int *ret_done)
{
    struct host_event *event = (struct host_event *)(uintptr_t)base;
    ep_status status = EP_OK;

    pthread_mutex_lock(&event->lock);
    *ret_done = event->done;
    if (event->done)
        status = event_result(event);
    pthread_mutex_unlock(&event->lock);
    return status;
}

void host_event_free(ep_event *event)
{
    event_unref((struct host_event *)event);
}
