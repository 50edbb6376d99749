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

/*
 * pthread_create() of a thread that blocks all signals, so that the application's threads get them, except those that
 * its own instructions cause: if these were blocked, they would kill the process without calling the application's
 * handler. Returns the error number.
 */
static inline int ep_thread_start(pthread_t *ret_thread, const pthread_attr_t *attributes, void *(*run)(void *),
                                  void *argument)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t all, old;
    int error;

    sigfillset(&all);
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    error = pthread_create(ret_thread, attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

/* ep_thread_begin() uses default attributes. It sets *ret_started, or fails with a text that begins with `what`. */
static inline ep_status ep_thread_begin(pthread_t *ret_thread, bool *ret_started, void *(*run)(void *), void *argument,
                                        const char *what)
{
    int error = ep_thread_start(ret_thread, NULL, run, argument);

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
