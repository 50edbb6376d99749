/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interrupt.c - Ctrl-C ends a wait.
 *
 * Python handles a signal when a call returns to it, and a call that waits for a peer returns at its deadline. So where
 * SIGINT raises KeyboardInterrupt, its handler also starts a timer. If the main thread is still in the same call of the
 * library when it expires, the communicator is aborted: the call returns, its exception is KeyboardInterrupt
 * (raise_status()), and peers learn at once that this rank has aborted. A program that installs a handler of its own
 * replaces this one.
 */
#include "bind.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#define GRACE_NS 500000000L /* a call that ends by itself leaves the communicator usable */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ep_comm *waiting;           /* of the call that the main thread is in, or NULL; under the lock */
static atomic_uint calls;          /* of the main thread, begun or ended: odd within one */
static atomic_uint interrupted_at; /* `calls` at the last signal */
static unsigned long main_thread;
static bool watching; /* there is a timer; a fork does not copy it */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static timer_t timer;
static struct sigaction before;

static void expired(union sigval Py_UNUSED(unused))
{
    pthread_mutex_lock(&lock);
    if (waiting && atomic_load(&calls) == atomic_load(&interrupted_at))
        ep_comm_abort(waiting);
    pthread_mutex_unlock(&lock);
}

static void handle(int number, siginfo_t *info, void *context)
{
    static const struct itimerspec grace = {.it_value.tv_nsec = GRACE_NS};
    unsigned now = atomic_load(&calls);

    /* Only the first signal of a call: those that follow would put the end off. */
    if (now & 1 && watching && atomic_exchange(&interrupted_at, now) != now)
        timer_settime(timer, 0, &grace, NULL);
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_IGN && before.sa_handler != SIG_DFL)
        before.sa_handler(number);
}

static void fork_child(void)
{
    watching = false;
}

static void once_init(void)
{
    pthread_atfork(NULL, NULL, fork_child);
}

/* By the main thread, when SIGINT raises KeyboardInterrupt. */
PyObject *watch_interrupt(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = expired};
    struct sigaction action;

    if (sigaction(SIGINT, NULL, &action) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    pthread_once(&once, once_init);
    if (!watching) {
        pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

        lock = fresh; /* in a forked child another thread may have held it */
        waiting = NULL;
        atomic_store(&calls, 0);
        if (timer_create(CLOCK_MONOTONIC, &event, &timer) < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
        main_thread = PyThread_get_thread_ident();
        watching = true;
    }
    if (!(action.sa_flags & SA_SIGINFO) || action.sa_sigaction != handle) {
        before = action;
        action.sa_sigaction = handle;
        action.sa_flags |= SA_SIGINFO;
        if (sigaction(SIGINT, &action, NULL) < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

void interrupt_begin(const struct comm_object *comm)
{
    if (!watching || PyThread_get_thread_ident() != main_thread || atomic_load(&calls) & 1)
        return;
    pthread_mutex_lock(&lock);
    waiting = comm->box->comm;
    atomic_fetch_add(&calls, 1);
    pthread_mutex_unlock(&lock);
}

void interrupt_end(const struct comm_object *comm)
{
    if (!watching || PyThread_get_thread_ident() != main_thread || !(atomic_load(&calls) & 1))
        return;
    pthread_mutex_lock(&lock);
    if (comm->box && waiting == comm->box->comm) {
        waiting = NULL;
        atomic_fetch_add(&calls, 1);
    }
    pthread_mutex_unlock(&lock);
}
