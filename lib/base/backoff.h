/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backoff.h - the backoff of all waits that poll: yield the processor for a while, then sleep.
 *
 * A yield lets every other runnable task run first. On an overloaded machine this takes milliseconds, and tasks that
 * yield wait for each other, while a task that sleeps briefly runs soon after it wakes. So after one slow yield a wait
 * only sleeps.
 */
#ifndef EP_BASE_BACKOFF_H
#define EP_BASE_BACKOFF_H

#include "base/clock.h"

#include <sched.h>
#include <stdbool.h>

#define EP_BACKOFF_YIELDS 200
#define EP_BACKOFF_SLEEP_NS 50000u
#define EP_BACKOFF_SLOW_NS 200000u

/* true: the yield was slow. */
static inline bool ep_backoff_yield(void)
{
    uint64_t begin_ns = ep_now_ns();

    sched_yield();
    return ep_now_ns() - begin_ns > EP_BACKOFF_SLOW_NS;
}

/* The sleep after `n` others of one wait: each is a few hundredths of what has been waited, and at most 1 ms. */
static inline void ep_backoff_sleep_again(unsigned n)
{
    struct timespec moment = {.tv_nsec = EP_BACKOFF_SLEEP_NS * (1 + (n < 608 ? n : 608) / 32)};

    nanosleep(&moment, NULL);
}

static inline void ep_backoff_sleep(void)
{
    ep_backoff_sleep_again(0);
}

/* Between two polls of a condition: the first returns at once, later ones yield, and finally sleep. *tries is 0 before
 * the first. */
static inline void ep_backoff(unsigned *tries)
{
    if (*tries == 0)
        *tries = 1;
    else if (*tries < EP_BACKOFF_YIELDS)
        *tries = ep_backoff_yield() ? EP_BACKOFF_YIELDS : *tries + 1;
    else
        ep_backoff_sleep();
}

#endif
