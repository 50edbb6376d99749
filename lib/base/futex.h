/* SPDX-License-Identifier: Apache-2.0 */
/*
 * futex.h - sleep until a word in memory shared between processes changes. The only wrapper of the futex call.
 */
#ifndef EP_BASE_FUTEX_H
#define EP_BASE_FUTEX_H

#include "base/clock.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Sleeps at most `ns` while *word == seen. Spurious wakeups are possible: callers check their condition again. */
static inline void ep_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t ns)
{
    struct timespec slice = ep_timespec(ns);

    syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
}

/* Wakes all sleepers on the word. Async-signal-safe. */
static inline void ep_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* In a loop that polls a word: lets the other hardware thread run and leaves the loop without a pipeline flush. */
static inline void ep_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
