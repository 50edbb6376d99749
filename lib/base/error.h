/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.h - reporting of errors.
 *
 * The function that detects an error records the reason with ep_fail() and returns its result. Callers return the
 * status and record nothing. A caller that knows more ("rank 3: ") may add a prefix with ep_fail_prefix().
 */
#ifndef EP_BASE_ERROR_H
#define EP_BASE_ERROR_H

#include <epkit/status.h>
#include <stdbool.h>
#include <string.h>

/* Size of the text per thread; longer reasons are truncated. */
#define EP_ERROR_TEXT_BYTES 512

/* Functions that modules (libepkit-cuda) and the command use, exported under the private version node. */
#define EP_PRIVATE_API __attribute__((visibility("default")))

/* Records the reason for the calling thread and returns `status`. printf-like. */
EP_PRIVATE_API ep_status ep_fail(ep_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* As ep_fail, and appends ": <text of error_number> (errno N)". */
EP_PRIVATE_API ep_status ep_fail_errno(ep_status status, int error_number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Adds a prefix to the reason recorded last; returns `status`. */
EP_PRIVATE_API ep_status ep_fail_prefix(ep_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Is it the number of a failure status? For statuses that a peer has published. */
static inline bool ep_status_is_failure(int64_t status)
{
    return status > EP_OK && status <= INT32_MAX &&
           strcmp(ep_status_name((ep_status)status), ep_status_name((ep_status)-1)) != 0;
}

#ifdef __clang_analyzer__
/* The analyzer sees one file at a time: this tells it that these functions return their argument. */
static inline ep_status ep_given_(ep_status given, ep_status returned)
{
    (void)returned;
    return given;
}

#define ep_fail(status, ...) ep_given_((status), ep_fail((status), __VA_ARGS__))
#define ep_fail_errno(status, ...) ep_given_((status), ep_fail_errno((status), __VA_ARGS__))
#define ep_fail_prefix(status, ...) ep_given_((status), ep_fail_prefix((status), __VA_ARGS__))
#endif

#define EP_TRY(call)                                                                                                   \
    do {                                                                                                               \
        ep_status try_status_ = (call);                                                                                \
        if (try_status_ != EP_OK)                                                                                      \
            return try_status_;                                                                                        \
    } while (0)

#endif
