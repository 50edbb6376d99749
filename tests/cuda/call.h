/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.h - what must be so: the function that finds otherwise says what, and where it was, and returns FAILED.
 *
 * Each rank says where it is by test_where(): "rank 2, round 17 (seed 3)". It stands before everything that it says.
 */
#ifndef EP_TESTS_CUDA_CALL_H
#define EP_TESTS_CUDA_CALL_H

#include <cuda_runtime_api.h>
#include <epkit/status.h>

/*
 * What functions of these tests return. After a difference the ranks are still in step and may go on; after a failed
 * call they are not. They are bits: what two checks return is or-ed.
 */
enum { PASSED = 0, DIFFERS = 1, FAILED = 2 };

/* Of the calling thread. printf-like. */
void test_where(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* One line on stderr, behind where the thread is. printf-like. */
void test_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What EXPECT() says. */
void test_say_not(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#define CALL(call)                                                                                                     \
    do {                                                                                                               \
        ep_status status_ = (call);                                                                                    \
        if (status_ != EP_OK) {                                                                                        \
            test_say("%s:%d: %s: %s: %s", __FILE__, __LINE__, #call, ep_status_name(status_), ep_last_error());        \
            return FAILED;                                                                                             \
        }                                                                                                              \
    } while (0)

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) {                                                                                   \
            test_say("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(error_));                          \
            return FAILED;                                                                                             \
        }                                                                                                              \
    } while (0)

/* EXPECT(condition, format, ...): what there is instead. */
#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            test_say_not(__FILE__, __LINE__, #condition, __VA_ARGS__);                                                 \
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
