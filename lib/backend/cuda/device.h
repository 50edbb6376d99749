/* SPDX-License-Identifier: Apache-2.0 */
/* device.h - the wrapper of the CUDA runtime, and the device of a communicator. */
#ifndef EP_CUDA_DEVICE_H
#define EP_CUDA_DEVICE_H

#include "backend/cuda/cuda.h"

/* Converts the result of a CUDA runtime call. */
ep_status cuda_status(cudaError_t error, const char *call);
/*
 * Checks that the kernels of this rank can use the memory: EP_E_ARG for host memory and for memory of another GPU. NULL
 * is accepted. Pointers that have passed are remembered.
 */
ep_status cuda_check_pointer(struct cuda_comm *cuda, const char *call, const char *name, const void *pointer);
/* Can kernels read it at full speed: is it device or managed memory? */
ep_status cuda_is_device_memory(const void *memory, bool *ret_is);
/*
 * Counts the GPUs that ranks get by default: the visible ones from the first on that the kernels support.
 * EP_E_UNSUPPORTED if there are none.
 */
ep_status cuda_count_usable(int *ret_gpus);
#define CUDA_TRY(call) EP_TRY(cuda_status((call), #call))

/* Copies between host and device in any direction, and waits for it. */
ep_status cuda_transfer(struct cuda_comm *cuda, void *to, const void *from, size_t bytes);

/* Makes the communicator's device the current one of the calling thread until cuda_scope_end(). */
struct cuda_scope {
    int previous; /* -1: it was the communicator's */
    bool uncaptured;
    enum cudaStreamCaptureMode mode; /* uncaptured: the previous one */
};
ep_status cuda_scope_begin(const struct cuda_comm *cuda, struct cuda_scope *ret_scope);
/* Makes `device` the current one again, unless it is -1 or this process has no context on it. */
void cuda_restore_device(int device);
/* Looks up a driver function through the runtime: the module does not link the driver. */
ep_status cuda_find_driver(const char *name, void **ret_function);
void cuda_scope_end(struct cuda_scope *scope);
/* The same; allocations and mappings in between are not part of a stream capture. */
ep_status cuda_scope_begin_uncaptured(const struct cuda_comm *cuda, struct cuda_scope *ret_scope);
/* A function that returns `call`, made with the communicator's device as the current one. */
#define CUDA_ON_DEVICE(comm, call)                                                                                     \
    do {                                                                                                               \
        struct cuda_scope scope_;                                                                                      \
        ep_status status_ = cuda_scope_begin(cuda_of(comm), &scope_);                                                  \
        if (status_ == EP_OK) {                                                                                        \
            status_ = (call);                                                                                          \
            cuda_scope_end(&scope_);                                                                                   \
        }                                                                                                              \
        return status_;                                                                                                \
    } while (0)

/* Backoff of a host that polls a word or an event: spins for some microseconds, then sleeps for growing times. */
struct cuda_backoff {
    uint64_t begin_ns;
    long ns;
};
void cuda_backoff(struct cuda_backoff *backoff);

#endif
