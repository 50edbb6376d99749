/* SPDX-License-Identifier: Apache-2.0 */
/*
 * points.h - where a test can stop a rank of the CUDA backend: at points of its kernels, and after each call of the
 * CUDA runtime that the library makes.
 *
 * Kernels have points only in a module that is built with EPKIT_POINTS: tests/cuda/points/libepkit-cuda.so, which a
 * program loads in place of the usual one if LD_LIBRARY_PATH names that folder first. In another module these functions
 * are NULL.
 */
#ifndef EP_TESTS_CUDA_POINTS_H
#define EP_TESTS_CUDA_POINTS_H

#include <epkit/comm.h>
#include <stdbool.h>

struct kernel_point {
    const char *name;
    uint32_t word;
    bool plans; /* of an operation on a plan; otherwise of low latency or a barrier */
};

/* The i-th point; NULL: there are no more. */
EP_API const struct kernel_point *ep_cuda_point_at(int i) __attribute__((weak));

/* From now on a thread of this rank's kernels stops at that point. */
EP_API void ep_cuda_point_set(ep_comm *comm, const struct kernel_point *point) __attribute__((weak));
/* Has it come there? It goes on after ep_cuda_point_release(). */
EP_API bool ep_cuda_point_is_reached(ep_comm *comm) __attribute__((weak));
EP_API void ep_cuda_point_release(ep_comm *comm) __attribute__((weak));

/*
 * Counts the calls of the CUDA runtime that the library makes in this thread, from 0 on; after number `at` (0: none)
 * it calls the function. Returns how many there were since the last call of this function.
 */
EP_API int ep_cuda_point_count_calls(int at, void (*reached)(void)) __attribute__((weak));

#endif
