/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replaces CUDA calls in programs whose linker wraps them: those that register host memory, with a record of what is
 * registered, and those that make events, which are not recorded here.
 */
#include "no_device.h"

#include <stdint.h>

#define RANGES 4096

size_t no_device_registered;
static struct {
    uintptr_t begin, end;
} ranges[RANGES];
static int n_ranges;

cudaError_t __wrap_cudaHostRegister(void *memory, size_t bytes, unsigned flags);
cudaError_t __wrap_cudaHostUnregister(void *memory);
cudaError_t __wrap_cudaHostGetDevicePointer(void **ret_device, void *memory, unsigned flags);
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t *ret_event, unsigned flags);
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t event);

cudaError_t __wrap_cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    int at = 0;

    (void)flags;
    no_device_registered += bytes;
    while (at < n_ranges && ranges[at].end)
        at++;
    if (at < RANGES) {
        ranges[at].begin = (uintptr_t)memory;
        ranges[at].end = (uintptr_t)memory + bytes;
        n_ranges = at < n_ranges ? n_ranges : at + 1;
    }
    return memory && bytes ? cudaSuccess : cudaErrorInvalidValue;
}

bool no_device_has(const void *memory, size_t bytes)
{
    uintptr_t begin = (uintptr_t)memory, end = begin + bytes;

    for (int i = 0; i < n_ranges; i++)
        if (begin >= ranges[i].begin && end <= ranges[i].end)
            return true;
    return false;
}

cudaError_t __wrap_cudaHostUnregister(void *memory)
{
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].begin == (uintptr_t)memory)
            ranges[i].begin = ranges[i].end = 0;
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t __wrap_cudaHostGetDevicePointer(void **ret_device, void *memory, unsigned flags)
{
    (void)flags;
    *ret_device = memory;
    return cudaSuccess;
}

cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t *ret_event, unsigned flags)
{
    (void)flags;
    *ret_event = NULL;
    return cudaSuccess;
}

cudaError_t __wrap_cudaEventDestroy(cudaEvent_t event)
{
    return event ? cudaErrorInvalidValue : cudaSuccess;
}
