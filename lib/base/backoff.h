/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backoff.h - the one rule for waits that poll: yield the processor a while, then sleep.
 *
 * A yield lets every other task that can run have its turn. Where processors are short that takes milliseconds, and
 * tasks that yield wait for each other, while one that sleeps a moment runs soon after it wakes. So a yield that was
 * slow is the last one of a wait.
 */
#ifndef EP_BASE_BACKOFF_H
#define EP_BASE_BACKOFF_H

#include "base/clock.h"

#include <sched.h>
#include <stdbool.h>

#define EP_BACKOFF_YIELDS 200
#define EP_BACKOFF_SLEEP_NS 50000u
#define EP_BACKOFF_SLOW_NS 200000u

/* true: it was slow. */
static inline bool ep_backoff_yield(void)
{
    uint64_t begin_ns = ep_now_ns();

    sched_yield();
    return ep_now_ns() - begin_ns > EP_BACKOFF_SLOW_NS;
}

static inline void ep_backoff_sleep(void)
{
    struct timespec moment = {.tv_nsec = EP_BACKOFF_SLEEP_NS};

    nanosleep(&moment, NULL);
}

/* Between two looks at a condition that nothing announces: first at once, then after a yield, in the end after a sleep.
 * *tries: 0 at the first. */
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
