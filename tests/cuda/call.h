/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.h - checks: a function whose check fails prints a message and returns FAILED.
 *
 * Each thread sets its context by test_set_context(): "rank 2, round 17 (seed 3)". It precedes all messages of the
 * thread.
 */
#ifndef EP_TESTS_CUDA_CALL_H
#define EP_TESTS_CUDA_CALL_H

#include <cuda_runtime_api.h>
#include <epkit/status.h>

/*
 * Return values of these tests' functions. After a difference the ranks are still in step and may go on; after a failed
 * call they are not. They are bits, so the results of two checks can be or-ed.
 */
enum { PASSED = 0, DIFFERS = 1, FAILED = 2 };

/* Of the calling thread. printf-like. */
void test_set_context(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints one line on stderr, after the context. printf-like. */
void test_report(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints the message of EXPECT(). */
void test_report_failure(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#define CALL(call)                                                                                                     \
    do {                                                                                                               \
        ep_status status_ = (call);                                                                                    \
        if (status_ != EP_OK) {                                                                                        \
            test_report("%s:%d: %s: %s: %s", __FILE__, __LINE__, #call, ep_status_name(status_), ep_last_error());     \
            return FAILED;                                                                                             \
        }                                                                                                              \
    } while (0)

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) {                                                                                   \
            test_report("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(error_));                       \
            return FAILED;                                                                                             \
        }                                                                                                              \
    } while (0)

/* EXPECT(condition, format, ...): the message says what was found instead. */
#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            test_report_failure(__FILE__, __LINE__, #condition, __VA_ARGS__);                                          \
            return FAILED;                                                                                             \
        }                                                                                                              \
    } while (0)

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int code_ = (call);                                                                                            \
        if (code_)                                                                                                     \
            return code_;                                                                                              \
    } while (0)

#endif
