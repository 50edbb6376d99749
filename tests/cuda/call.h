/* SPDX-License-Identifier: Apache-2.0 */
/* call.h - calls that must succeed: the function that makes one says what failed and returns 1 otherwise. */
#ifndef EP_TESTS_CUDA_CALL_H
#define EP_TESTS_CUDA_CALL_H

#include <cuda_runtime_api.h>
#include <epkit/status.h>
#include <stdio.h>

#define CALL(call)                                                                                                     \
    do {                                                                                                               \
        ep_status status_ = (call);                                                                                    \
        if (status_ != EP_OK) {                                                                                        \
            fprintf(stderr, "%s: %s: %s\n", #call, ep_status_name(status_), ep_last_error());                          \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_));                                            \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif
