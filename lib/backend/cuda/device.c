/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/cuda.h"
#include "base/futex.h"

#include <string.h>
#include <time.h>

#define SPIN_NS 20000u       /* before the first sleep */
#define MIN_BACKOFF_NS 10000 /* a sleep takes some 50 us more */
#define MAX_BACKOFF_NS 400000

ep_status cuda_status(cudaError_t error, const char *call)
{
    int length = (int)strcspn(call, "(");

    if (error == cudaSuccess)
        return EP_OK;
    cudaGetLastError(); /* clears the error, which the next launch would report otherwise */
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_E_MEMORY : EP_E_DEVICE, "%.*s: %s (%s)", length, call,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

ep_status cuda_transfer(struct cuda_comm *cuda, void *to, const void *from, size_t bytes)
{
    if (bytes)
        CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(cuda->internal_stream));
    return EP_OK;
}

ep_status cuda_find_driver(const char *name, void **ret_function)
{
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;

#if CUDART_VERSION >= 12050
    CUDA_TRY(cudaGetDriverEntryPointByVersion(name, ret_function, 12000, cudaEnableDefault, &result));
#else
    CUDA_TRY(cudaGetDriverEntryPoint(name, ret_function, cudaEnableDefault, &result));
#endif
    return result == cudaDriverEntryPointSuccess ? EP_OK
                                                 : ep_fail(EP_E_UNSUPPORTED, "the CUDA driver has no %s()", name);
}

/* cuDevicePrimaryCtxGetState() of the driver returns 0 or an error code. */
typedef int context_state_fn(int device, unsigned *ret_flags, int *ret_active);

void cuda_restore_device(int device)
{
    static context_state_fn *known;
    context_state_fn *get_state = __atomic_load_n(&known, __ATOMIC_RELAXED);
    unsigned flags;
    int active = 0;

    /* From CUDA 12 on cudaSetDevice() creates a missing context: half a GB on a GPU that is not used here. */
    if (device >= 0 && !get_state && cuda_find_driver("cuDevicePrimaryCtxGetState", (void **)&get_state) == EP_OK)
        __atomic_store_n(&known, get_state, __ATOMIC_RELAXED);
    if (device >= 0 && get_state && get_state(device, &flags, &active) == 0 && active)
        if (cudaSetDevice(device) != cudaSuccess)
            cudaGetLastError(); /* only after a failure: an older error is the caller's */
}

ep_status cuda_scope_begin(const struct cuda_comm *cuda, struct cuda_scope *ret_scope)
{
    ret_scope->uncaptured = false;
    CUDA_TRY(cudaGetDevice(&ret_scope->previous));
    if (ret_scope->previous == cuda->device)
        ret_scope->previous = -1;
    else
        CUDA_TRY(cudaSetDevice(cuda->device));
    return EP_OK;
}

void cuda_scope_end(struct cuda_scope *scope)
{
    if (scope->uncaptured)
        cudaThreadExchangeStreamCaptureMode(&scope->mode);
    cuda_restore_device(scope->previous);
}

ep_status cuda_scope_begin_uncaptured(const struct cuda_comm *cuda, struct cuda_scope *ret_scope)
{
    EP_TRY(cuda_scope_begin(cuda, ret_scope));
    ret_scope->mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&ret_scope->mode);
    ret_scope->uncaptured = true;
    return EP_OK;
}

static const void **remembered_at(struct cuda_comm *cuda, const void *pointer)
{
    return &cuda->checked_pointers[((uintptr_t)pointer >> 9 ^ (uintptr_t)pointer >> 21) % CUDA_CHECKED_POINTERS];
}

ep_status cuda_check_pointer(struct cuda_comm *cuda, const char *call, const char *name, const void *pointer)
{
    const void **remembered = remembered_at(cuda, pointer);
    struct cudaPointerAttributes attributes;
    int rank = cuda->group.comm->rank;

    if (!pointer || *remembered == pointer)
        return EP_OK;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, pointer));
    if (attributes.type == cudaMemoryTypeUnregistered)
        return ep_fail(EP_E_ARG,
                       "%s: %s (%p) is host memory; the CUDA backend needs memory of GPU %d, which rank %d uses", call,
                       name, pointer, cuda->device, rank);
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != cuda->device)
        return ep_fail(EP_E_ARG, "%s: %s (%p) is memory of GPU %d, but rank %d uses GPU %d", call, name, pointer,
                       attributes.device, rank, cuda->device);
    if (attributes.type != cudaMemoryTypeHost)
        *remembered = pointer;
    return EP_OK;
}

ep_status cuda_is_device_memory(struct cuda_comm *cuda, const void *memory, bool *ret_is)
{
    struct cudaPointerAttributes attributes;

    *ret_is = memory && *remembered_at(cuda, memory) == memory;
    if (*ret_is)
        return EP_OK;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, memory));
    *ret_is = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    return EP_OK;
}

ep_status cuda_count_usable(int *ret_gpus)
{
    int all = 0, n = 0, major = 0;
    cudaError_t error = cudaGetDeviceCount(&all);

    if (error == cudaErrorNoDevice)
        error = cudaSuccess;
    while (error == cudaSuccess && n < all) {
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, n);
        if (error == cudaSuccess && major < CUDA_MIN_MAJOR)
            break;
        n += error == cudaSuccess;
    }
    cudaGetLastError();
    if (error != cudaSuccess)
        return ep_fail(EP_E_UNSUPPORTED, "no usable GPU: %s", cudaGetErrorString(error));
    if (!n && all)
        return ep_fail(EP_E_UNSUPPORTED, "no usable GPU: GPU 0 is of compute capability %d; %d.0 or later is needed",
                       major, CUDA_MIN_MAJOR);
    if (!n)
        return ep_fail(EP_E_UNSUPPORTED, "no usable GPU: none is visible");
    *ret_gpus = n;
    return EP_OK;
}

void cuda_backoff(struct cuda_backoff *backoff)
{
    struct timespec span = {.tv_nsec = backoff->ns};

    if (!backoff->begin_ns)
        backoff->begin_ns = ep_now_ns();
    if (!backoff->ns && ep_now_ns() - backoff->begin_ns < (backoff->spin_ns ? backoff->spin_ns : SPIN_NS)) {
        ep_cpu_relax();
        return;
    }
    backoff->ns = !backoff->ns ? MIN_BACKOFF_NS : backoff->ns < MAX_BACKOFF_NS ? backoff->ns * 5 / 4 : MAX_BACKOFF_NS;
    nanosleep(&span, NULL);
}
