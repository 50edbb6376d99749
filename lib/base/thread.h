/* SPDX-License-Identifier: Apache-2.0 */
/* thread.h - threads of the library in a program that is not ours. */
#ifndef EP_BASE_THREAD_H
#define EP_BASE_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <time.h>

/*
 * pthread_create() of a thread whose signals are the application's, but for those that its own instructions cause:
 * these would kill the process past the application's handler if they were blocked. Returns the error number.
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

/* A condition whose timed waits go by the clock of ep_now_ns(). */
static inline void ep_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

#endif
