/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The communication stream. Jobs run one at a time in the order of submission: on the caller's thread when nothing is
 * queued and the caller waits for the result anyway, else on a worker thread that is started on first use.
 *
 * Events carry their own lock, so that any thread may wait on them while the worker completes them.
 */
#include "backend/host/host.h"

#include <errno.h>
#include <signal.h>
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
    host_job_fn run;
    struct host_event *after, *event;
    alignas(max_align_t) unsigned char arguments[];
};

static ep_status event_new(ep_comm *comm, struct host_event **ret_event)
{
    struct host_event *event = calloc(1, sizeof(*event));
    pthread_condattr_t attributes;

    if (!event)
        return ep_fail(EP_E_MEMORY, "no memory for an event");
    event->base.comm = comm;
    event->refs = 1;
    pthread_mutex_init(&event->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&event->changed, &attributes);
    pthread_condattr_destroy(&attributes);
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
static void complete_locked(struct host_event *event, ep_status status)
{
    event->done = true;
    event->status = status;
    if (status != EP_OK)
        snprintf(event->text, sizeof(event->text), "%s", ep_last_error());
    pthread_cond_broadcast(&event->changed);
}

static void event_complete(struct host_event *event, ep_status status)
{
    if (!event)
        return;
    pthread_mutex_lock(&event->lock);
    complete_locked(event, status);
    pthread_mutex_unlock(&event->lock);
}

static struct timespec to_timespec(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

/* Waits for the event of .after before a job: until the deadline, and no longer than the group is sound. */
static ep_status wait_after(struct host_comm *host, struct host_event *event)
{
    uint64_t deadline = ep_deadline_ns(host->comm->config.timeout_ms);
    ep_status status = EP_OK;

    pthread_mutex_lock(&event->lock);
    while (!event->done && status == EP_OK) {
        uint64_t now = ep_now_ns();
        struct timespec slice = to_timespec(now + SLICE_NS);

        if (now >= deadline) {
            status = host_raise(host, EP_E_TIMEOUT, host->comm->rank, HOST_AFTER);
            break;
        }
        pthread_cond_timedwait(&event->changed, &event->lock, &slice);
        status = host_check(host);
    }
    if (status == EP_OK && event->status != EP_OK)
        status = ep_fail(event->status, "the event in .after failed: %s", event->text);
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
        event_complete(job->event, ep_comm_record(host->comm, run_job(host, job->run, job->arguments, job->after)));
        pthread_mutex_lock(&host->queue_lock);
        host->head = job->next;
        if (!host->head)
            host->tail = NULL;
        pthread_cond_broadcast(&host->queue_changed);
        event_unref(job->event);
        event_unref(job->after);
        free(job);
    }
    pthread_mutex_unlock(&host->queue_lock);
    return NULL;
}

/*
 * Signals are the application's: the worker takes none, except those that its own instructions cause. These would kill
 * the process past the application's handler if they were blocked.
 */
static ep_status start_worker(struct host_comm *host)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t all, old;
    int error;

    if (host->worker_started)
        return EP_OK;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    error = pthread_create(&host->worker, NULL, worker_main, host);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "communication stream: pthread_create");
    host->worker_started = true;
    return EP_OK;
}

ep_status host_submit(struct host_comm *host, host_job_fn run, const void *arguments, size_t bytes, ep_event *after,
                      ep_event **ret_event, bool detached)
{
    struct host_event *event = NULL;
    struct host_job *job;
    ep_status status;
    bool idle;

    pthread_mutex_lock(&host->queue_lock);
    idle = !host->head;
    pthread_mutex_unlock(&host->queue_lock);
    if (!ret_event && (idle || !detached)) {
        EP_TRY(host_drain(host));
        return run_job(host, run, (void *)(uintptr_t)arguments, (struct host_event *)after);
    }
    EP_TRY(start_worker(host));
    job = malloc(sizeof(*job) + bytes);
    if (!job)
        return ep_fail(EP_E_MEMORY, "communication stream: no memory for a job");
    if (ret_event) {
        status = event_new(host->comm, &event);
        if (status != EP_OK) {
            free(job);
            return status;
        }
    }
    *job = (struct host_job){.run = run, .after = event_ref((struct host_event *)after), .event = event_ref(event)};
    if (bytes)
        memcpy(job->arguments, arguments, bytes);
    if (ret_event)
        *ret_event = &event->base;
    pthread_mutex_lock(&host->queue_lock);
    *(host->tail ? &host->tail->next : &host->head) = job;
    host->tail = job;
    pthread_cond_broadcast(&host->queue_changed);
    pthread_mutex_unlock(&host->queue_lock);
    return EP_OK;
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

ep_status host_event_record(ep_comm *comm, ep_event **ret_event)
{
    struct host_comm *host = host_of(comm);
    struct host_event *event = NULL;
    bool idle;

    pthread_mutex_lock(&host->queue_lock);
    idle = !host->head;
    pthread_mutex_unlock(&host->queue_lock);
    if (!idle)
        return host_submit(host, nothing, NULL, 0, NULL, ret_event, false);
    EP_TRY(event_new(comm, &event));
    event->done = true;
    *ret_event = &event->base;
    return EP_OK;
}

ep_status host_event_signal(ep_event *base)
{
    struct host_event *event = (struct host_event *)base;
    bool fresh;

    pthread_mutex_lock(&event->lock);
    fresh = event->user && !event->done;
    if (fresh)
        complete_locked(event, EP_OK);
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
        struct timespec slice = to_timespec(now + SLICE_NS < limit ? now + SLICE_NS : limit);

        EP_TRY(host_check(host_of(event->base.comm)));
        pthread_cond_timedwait(&event->changed, &event->lock, &slice);
    }
    return event->done ? EP_OK : ep_fail(EP_E_TIMEOUT, "ep_event_wait: not signalled after %d ms", limit_ms);
}

/* An event of an operation, which has deadlines of its own. */
static ep_status wait_for_work(struct host_event *event, int timeout_ms)
{
    uint64_t limit = ep_deadline_ns(timeout_ms);
    struct timespec until = to_timespec(limit);

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
