/* SPDX-License-Identifier: Apache-2.0 */
/* thread.h - threads of the library in the application's process. */
#ifndef EP_BASE_THREAD_H
#define EP_BASE_THREAD_H

#include "base/error.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

/* The stack that calls need, with a margin (include/epkit/comm.h), and that of the library's threads. */
#define EP_STACK_LEAST ((size_t)128 << 10)
#define EP_STACK_OWN ((size_t)1 << 20)

/*
 * pthread_create() of a thread that blocks all signals, so that the application's threads get them, except those that
 * its own instructions cause: if these were blocked, they would kill the process without calling the application's
 * handler. Its stack may be larger than the program's default. Returns the error number.
 */
static inline int ep_thread_start(pthread_t *ret_thread, void *(*run)(void *), void *argument)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    pthread_attr_t attributes;
    sigset_t all, old;
    size_t bytes = 0;
    int error = pthread_attr_init(&attributes);

    if (error)
        return error;
    if (pthread_attr_getstacksize(&attributes, &bytes) == 0 && bytes < EP_STACK_OWN)
        pthread_attr_setstacksize(&attributes, EP_STACK_OWN);
    sigfillset(&all);
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    error = pthread_create(ret_thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* ep_thread_begin() sets *ret_started, or fails with a text that begins with `what`. */
static inline ep_status ep_thread_begin(pthread_t *ret_thread, bool *ret_started, void *(*run)(void *), void *argument,
                                        const char *what)
{
    int error = ep_thread_start(ret_thread, run, argument);

    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "%s", what);
    *ret_started = true;
    return EP_OK;
}

/* A condition variable whose timed waits use the clock of ep_now_ns(). */
static inline void ep_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

#endif
