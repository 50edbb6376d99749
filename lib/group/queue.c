/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queues of a communicator. One worker thread runs all jobs one at a time, in the order of the calls, because that
 * is the order that the ranks agree on; a queue knows its last job and the first failure among its jobs. The thread is
 * started on first use and sleeps while there is no job. Jobs whose result is needed at once run on the caller's
 * thread.
 *
 * Events have their own lock, so that any thread may wait for them while the worker completes them.
 */
#include "group/queue.h"

#include "base/thread.h"
#include "group/failure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Interval at which a wait for an event of the caller checks whether the group has failed. */
#define CHECK_NS 10000000u

struct ep_group_event {
    struct ep_event base;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    _Atomic int refs; /* the owner, the job that completes it, jobs that wait for it */
    bool done, user;
    ep_status status;
    char text[EP_ERROR_TEXT_BYTES];
};

struct ep_group_job {
    struct ep_group_job *next;
    struct ep_group_queue *queue;
    ep_group_job_fn run;                       /* NULL: only the following */
    struct ep_group_event *dependency, *event; /* NULL: none. Waited for before the job runs; completed by it */
    alignas(max_align_t) unsigned char arguments[];
};

static ep_status event_new(ep_comm *comm, struct ep_group_event **ret_event)
{
    struct ep_group_event *event = calloc(1, sizeof(*event));

    if (!event)
        return ep_fail(EP_E_MEMORY, "no memory for an event");
    event->base.comm = comm;
    event->refs = 1;
    pthread_mutex_init(&event->lock, NULL);
    ep_cond_init(&event->changed);
    *ret_event = event;
    return EP_OK;
}

static struct ep_group_event *event_ref(struct ep_group_event *event)
{
    atomic_fetch_add(&event->refs, 1);
    return event;
}

static void event_unref(struct ep_group_event *event)
{
    if (!event || atomic_fetch_sub(&event->refs, 1) > 1)
        return;
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

/* Under the event's lock. */
static void complete_locked(struct ep_group_event *event, ep_status status, const char *text)
{
    event->done = true;
    event->status = status;
    if (status != EP_OK)
        snprintf(event->text, sizeof(event->text), "%s", text);
    pthread_cond_broadcast(&event->changed);
}

/* With the status of the work before it in its queue, which only the worker changes while there is a job. */
static void complete_event(struct ep_group_event *event, const struct ep_group_queue *queue)
{
    pthread_mutex_lock(&event->lock);
    complete_locked(event, queue->status, queue->text);
    pthread_mutex_unlock(&event->lock);
}

/* Waits until the event is done, the time is `limit_ns`, or `group`, NULL: none, has failed. Under the event's lock. */
static ep_status wait_done(struct ep_group_event *event, struct ep_group *group, uint64_t limit_ns)
{
    uint64_t now;

    while (!event->done && (now = ep_now_ns()) < limit_ns) {
        struct timespec until = ep_timespec(group && now + CHECK_NS < limit_ns ? now + CHECK_NS : limit_ns);

        if (group && ep_comm_enter(group->comm)) {
            ep_status status = ep_group_check(group);

            ep_comm_exit(group->comm);
            EP_TRY(status);
        }
        pthread_cond_timedwait(&event->changed, &event->lock, &until);
    }
    return EP_OK;
}

/* Waits for the event of ep_stream_wait(). */
static ep_status wait_event(struct ep_group *group, struct ep_group_event *event)
{
    ep_status status;

    pthread_mutex_lock(&event->lock);
    status = wait_done(event, group, ep_deadline_ns(group->comm->config.timeout_ms));
    if (status == EP_OK && !event->done)
        status = ep_group_set_failure(group, EP_E_TIMEOUT, group->comm->rank, EP_GROUP_STREAM_WAIT);
    if (status == EP_OK && event->status != EP_OK)
        status = ep_fail(event->status, "the event of ep_stream_wait() failed: %s", event->text);
    pthread_mutex_unlock(&event->lock);
    return status;
}

static ep_status run_job(struct ep_group *group, ep_group_job_fn run, void *arguments,
                         struct ep_group_event *dependency)
{
    EP_TRY(ep_group_check(group));
    if (dependency)
        EP_TRY(wait_event(group, dependency));
    return run ? run(arguments) : EP_OK;
}

static void finish_job(struct ep_group *group, struct ep_group_job *job, ep_status status)
{
    struct ep_group_queue *queue = job->queue;

    status = ep_comm_record(group->comm, status);
    pthread_mutex_lock(&group->queue_lock);
    if (status != EP_OK && queue->status == EP_OK) {
        queue->status = status;
        snprintf(queue->text, sizeof(queue->text), "%s", ep_last_error());
    }
    if (job->event)
        complete_event(job->event, queue);
    group->head = job->next;
    if (!group->head)
        group->tail = NULL;
    queue->jobs--;
    pthread_cond_broadcast(&group->queue_changed);
}

static void *worker_main(void *argument)
{
    struct ep_group *group = argument;

    pthread_mutex_lock(&group->queue_lock);
    for (;;) {
        struct ep_group_job *job = group->head;

        if (!job) {
            if (group->worker_stop)
                break;
            pthread_cond_wait(&group->queue_changed, &group->queue_lock);
            continue;
        }
        pthread_mutex_unlock(&group->queue_lock);
        group->on_worker = true;
        finish_job(group, job, run_job(group, job->run, job->arguments, job->dependency));
        group->on_worker = false;
        event_unref(job->event);
        event_unref(job->dependency);
        free(job);
    }
    pthread_mutex_unlock(&group->queue_lock);
    return NULL;
}

static ep_status find_queue(struct ep_group *group, ep_stream stream, struct ep_group_queue **ret_queue)
{
    struct ep_group_queue *queue = &group->queue;

    /* Compared only, never dereferenced: it may be another kind of stream, or freed. */
    while (queue && stream && queue != stream)
        queue = queue->next;
    if (!queue)
        return ep_fail(EP_E_ARG, "stream %p is not a queue of this communicator", stream);
    *ret_queue = queue;
    return EP_OK;
}

/* The job takes over the references to its events when it is queued. */
static ep_status enqueue(struct ep_group *group, struct ep_group_queue *queue, const struct ep_group_job *what,
                         const void *arguments, size_t bytes)
{
    struct ep_group_job *job;

    if (!group->worker_started)
        EP_TRY(ep_thread_begin(&group->worker, &group->worker_started, worker_main, group,
                               "worker of the queues: pthread_create"));
    job = malloc(sizeof(*job) + bytes);
    if (!job)
        return ep_fail(EP_E_MEMORY, "no memory for a job of a queue");
    *job = *what;
    job->queue = queue;
    if (bytes)
        memcpy(job->arguments, arguments, bytes);
    pthread_mutex_lock(&group->queue_lock);
    *(group->tail ? &group->tail->next : &group->head) = job;
    group->tail = job;
    queue->jobs++;
    pthread_cond_broadcast(&group->queue_changed);
    pthread_mutex_unlock(&group->queue_lock);
    return EP_OK;
}

ep_status ep_group_submit(struct ep_group *group, ep_stream stream, ep_group_job_fn run, const void *arguments,
                          size_t bytes)
{
    struct ep_group_queue *queue = NULL;

    EP_TRY(find_queue(group, stream, &queue));
    if (group->comm->blocking)
        return ep_group_run(group, run, (void *)(uintptr_t)arguments);
    return enqueue(group, queue, &(struct ep_group_job){.run = run}, arguments, bytes);
}

ep_status ep_group_run(struct ep_group *group, ep_group_job_fn run, void *arguments)
{
    EP_TRY(ep_group_drain(group));
    return run_job(group, run, arguments, NULL);
}

bool ep_group_is_idle(struct ep_group *group)
{
    bool idle;

    pthread_mutex_lock(&group->queue_lock);
    idle = !group->head;
    pthread_mutex_unlock(&group->queue_lock);
    return idle;
}

/* Waits until no job of a queue is left, NULL: of any. Every job has its own deadlines, so this ends. */
static void wait_for_queue(struct ep_group *group, const struct ep_group_queue *queue)
{
    pthread_mutex_lock(&group->queue_lock);
    while (queue ? queue->jobs > 0 : group->head != NULL)
        pthread_cond_wait(&group->queue_changed, &group->queue_lock);
    pthread_mutex_unlock(&group->queue_lock);
}

ep_status ep_group_drain(struct ep_group *group)
{
    wait_for_queue(group, NULL);
    /* Recorded here, because some callers can only free the communicator: the reason must not be lost. */
    return ep_comm_record(group->comm, ep_group_check(group));
}

ep_status ep_group_stream_ready(ep_comm *comm, ep_stream stream)
{
    struct ep_group_queue *queue = NULL;

    EP_TRY(find_queue(ep_group_of(comm), stream, &queue));
    wait_for_queue(ep_group_of(comm), queue);
    return EP_OK;
}

ep_status ep_group_stream_sync(ep_comm *comm, ep_stream stream)
{
    struct ep_group *group = ep_group_of(comm);
    struct ep_group_queue *queue = NULL;
    ep_status status;

    EP_TRY(find_queue(group, stream, &queue));
    wait_for_queue(group, queue);
    /* Without jobs only the caller uses the queue. */
    status = queue->status;
    queue->status = EP_OK;
    return status == EP_OK ? ep_group_check(group) : ep_fail(status, "%s", queue->text);
}

ep_status ep_group_fail_queued(struct ep_group *group, ep_status status, enum ep_group_phase phase, bool alone)
{
    int none = EP_OK;

    if (status == EP_OK || ep_status_is_fatal(status) || !group->on_worker || atomic_load(&group->comm->failed))
        return status;
    if (!alone)
        return ep_group_set_own_failure(group, status, group->comm->rank, phase);
    atomic_compare_exchange_strong(&group->comm->failed, &none, (int)status);
    return status;
}

ep_status ep_group_queue_new(ep_comm *comm, ep_queue **ret_queue)
{
    struct ep_group *group = ep_group_of(comm);
    struct ep_group_queue *queue = calloc(1, sizeof(*queue));

    if (!queue)
        return ep_fail(EP_E_MEMORY, "ep_queue_new: no memory");
    queue->base.comm = comm;
    queue->next = group->queue.next;
    group->queue.next = queue;
    *ret_queue = &queue->base;
    return EP_OK;
}

void ep_group_queue_free(ep_queue *base)
{
    struct ep_group *group = ep_group_of(base->comm);
    struct ep_group_queue *queue = (struct ep_group_queue *)base, **link = &group->queue.next;

    wait_for_queue(group, queue);
    while (*link != queue)
        link = &(*link)->next;
    *link = queue->next;
    free(queue);
}

void ep_group_queue_close(struct ep_group *group)
{
    if (!group->worker_started)
        return;
    pthread_mutex_lock(&group->queue_lock);
    group->worker_stop = true;
    pthread_cond_broadcast(&group->queue_changed);
    pthread_mutex_unlock(&group->queue_lock);
    pthread_join(group->worker, NULL);
    group->worker_started = false;
}

ep_status ep_group_event_new(ep_comm *comm, ep_event **ret_event)
{
    struct ep_group_event *event = NULL;

    EP_TRY(event_new(comm, &event));
    event->user = true;
    *ret_event = &event->base;
    return EP_OK;
}

ep_status ep_group_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    struct ep_group *group = ep_group_of(comm);
    struct ep_group_event *event = NULL;
    struct ep_group_queue *queue = NULL;
    ep_status status = EP_OK;
    bool busy;

    EP_TRY(find_queue(group, stream, &queue));
    EP_TRY(event_new(comm, &event));
    pthread_mutex_lock(&group->queue_lock);
    busy = queue->jobs > 0;
    pthread_mutex_unlock(&group->queue_lock);
    if (busy)
        status = enqueue(group, queue, &(struct ep_group_job){.event = event_ref(event)}, NULL, 0);
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

ep_status ep_group_stream_wait(ep_comm *comm, ep_stream stream, ep_event *base)
{
    struct ep_group *group = ep_group_of(comm);
    struct ep_group_event *event = (struct ep_group_event *)base;
    struct ep_group_queue *queue = NULL;
    ep_status status;

    EP_TRY(find_queue(group, stream, &queue));
    status = enqueue(group, queue, &(struct ep_group_job){.dependency = event_ref(event)}, NULL, 0);
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

ep_status ep_group_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context)
{
    struct call call = {.comm = comm, .function = function, .context = context};

    return ep_group_submit(ep_group_of(comm), stream, run_call, &call, sizeof(call));
}

ep_status ep_group_event_signal(ep_event *base)
{
    struct ep_group_event *event = (struct ep_group_event *)base;
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

static ep_status event_result(const struct ep_group_event *event)
{
    return event->status == EP_OK ? EP_OK : ep_fail(event->status, "%s", event->text);
}

ep_status ep_group_event_wait(ep_event *base, int timeout_ms)
{
    struct ep_group_event *event = (struct ep_group_event *)base;
    int limit_ms = event->user && timeout_ms < 0 ? base->comm->config.timeout_ms : timeout_ms;
    ep_status status;

    pthread_mutex_lock(&event->lock);
    /* An operation has deadlines of its own. Only its signal completes an event of the caller: watch the group. */
    status = wait_done(event, event->user ? ep_group_of(base->comm) : NULL,
                       limit_ms < 0 ? INT64_MAX : ep_deadline_ns(limit_ms));
    if (status == EP_OK)
        status = event->done ? event_result(event)
                             : ep_fail(EP_E_TIMEOUT, "ep_event_wait: not %s after %d ms",
                                       event->user ? "signalled" : "complete", limit_ms);
    pthread_mutex_unlock(&event->lock);
    return status;
}

ep_status ep_group_event_query(const ep_event *base, int *ret_done)
{
    struct ep_group_event *event = (struct ep_group_event *)(uintptr_t)base;
    ep_status status = EP_OK;

    pthread_mutex_lock(&event->lock);
    *ret_done = event->done;
    if (event->done)
        status = event_result(event);
    pthread_mutex_unlock(&event->lock);
    return status;
}

void ep_group_event_free(ep_event *event)
{
    event_unref((struct ep_group_event *)event);
}
