/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h - monotonic time and deadlines. */
#ifndef EP_BASE_CLOCK_H
#define EP_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds of CLOCK_MONOTONIC: the same clock in all processes of a host. */
static inline uint64_t ep_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A time or a duration. */
static inline struct timespec ep_timespec(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

/* The time `timeout_ms` from now. */
static inline uint64_t ep_deadline_ns(int timeout_ms)
{
    return ep_now_ns() + (uint64_t)timeout_ms * 1000000u;
}

#endif
