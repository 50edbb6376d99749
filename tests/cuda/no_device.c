/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In place of the calls of CUDA that make memory of the host known to a device, for programs whose linker wraps them:
 * what is registered, and how much.
 */
#include "no_device.h"

size_t no_device_registered;

cudaError_t __wrap_cudaHostRegister(void *memory, size_t bytes, unsigned flags);
cudaError_t __wrap_cudaHostUnregister(void *memory);
cudaError_t __wrap_cudaHostGetDevicePointer(void **ret_device, void *memory, unsigned flags);

cudaError_t __wrap_cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    (void)flags;
    no_device_registered += bytes;
    return memory && bytes ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t __wrap_cudaHostUnregister(void *memory)
{
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t __wrap_cudaHostGetDevicePointer(void **ret_device, void *memory, unsigned flags)
{
    (void)flags;
    *ret_device = memory;
    return cudaSuccess;
}
