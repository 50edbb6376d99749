/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The callback is one pointer, so that a call without a callback costs one load. Former listeners are never freed (a
 * few bytes each), because another thread may be about to read one. There is no lock that a forked child could inherit
 * in the locked state.
 */
#include "base/log.h"

#include "base/process.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct listener {
    ep_log_fn function;
    void *context;
    uint64_t process; /* ep_process_generation(): in a forked child, calls of the parent's other threads never end */
    _Atomic int calls;
    struct listener *former;
};

static _Atomic(struct listener *) current;

void ep_log(ep_log_level level, const char *format, ...)
{
    struct listener *listener = atomic_load(&current);
    char line[EP_ERROR_TEXT_BYTES + 128];
    va_list args;

    if (!listener || !listener->function)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    atomic_fetch_add(&listener->calls, 1);
    if (atomic_load(&current) == listener)
        listener->function(listener->context, level, line);
    atomic_fetch_sub(&listener->calls, 1);
}

void ep_set_log(ep_log_fn function, void *context)
{
    struct listener *former, *listener = malloc(sizeof(*listener));

    /* If malloc fails, there is no callback: the former one must not be called any more. */
    if (listener)
        *listener = (struct listener){.function = function, .context = context, .process = ep_process_generation()};
    former = atomic_exchange(&current, listener);
    if (listener)
        listener->former = former;
    while (former && former->process == ep_process_generation() && atomic_load(&former->calls))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}
