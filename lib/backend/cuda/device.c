/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/nvml.h"
#include "backend/cuda/proxy.h"

#include <epkit/cuda.h>
#include <string.h>

#define MBPS_OF_SM 30000

ep_status cuda_status(cudaError_t error, const char *call)
{
    int length = (int)strcspn(call, "(");

    if (error == cudaSuccess)
        return EP_OK;
    cudaGetLastError(); /* clears the error, which the next launch would report otherwise */
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_E_MEMORY : EP_E_DEVICE, "%.*s: %s (%s)", length, call,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

ep_status cuda_transfer(struct cuda_comm *cuda, const struct cuda_transfer *parts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (parts[i].bytes)
            CUDA_TRY(
                cudaMemcpyAsync(parts[i].to, parts[i].from, parts[i].bytes, cudaMemcpyDefault, cuda->internal_stream));
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

ep_status cuda_check_pointer(struct cuda_comm *cuda, const char *call, const char *name, const void *pointer)
{
    const void **remembered =
        &cuda->checked_pointers[((uintptr_t)pointer >> 9 ^ (uintptr_t)pointer >> 21) % CUDA_CHECKED_POINTERS];
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
    *remembered = pointer;
    return EP_OK;
}

ep_status cuda_is_device_memory(const void *memory, bool *ret_is)
{
    struct cudaPointerAttributes attributes;

    CUDA_TRY(cudaPointerGetAttributes(&attributes, memory));
    *ret_is = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    return EP_OK;
}

static ep_status cuda_poll(ep_comm *comm)
{
    EP_TRY(cuda_check_reported(cuda_of(comm)));
    EP_TRY(ep_group_poll(comm));
    return cuda_find_refused(cuda_of(comm));
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

static ep_status cuda_probe(void)
{
    int unused;

    return cuda_count_usable(&unused);
}

EP_PRIVATE_API extern const struct ep_backend_ops ep_backend_module;

const struct ep_backend_ops ep_backend_module = {
    .abi = EP_BACKEND_ABI,
    .name = "cuda",
    .probe = cuda_probe,
    .comm_open = cuda_comm_open,
    .comm_close = cuda_comm_close,
    .comm_bytes = cuda_comm_bytes,
    .barrier = ep_group_barrier,
    .barrier_on = cuda_barrier_on,
    .allgather = ep_group_allgather,
    .abort = cuda_abort,
    .poll = cuda_poll,
    .shrink = cuda_shrink,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .alloc_local = cuda_alloc_local,
    .free_local = cuda_free_local,
    .register_memory = cuda_register,
    .unregister_memory = cuda_unregister,
    .plan_open = cuda_plan_open,
    .plan_close = cuda_plan_close,
    .plan_sources = cuda_plan_sources,
    .plan_layout = cuda_plan_layout,
    .plan_update = cuda_plan_update,
    .plan_metadata = cuda_plan_metadata,
    .is_capturing = cuda_is_capturing,
    .dispatch = cuda_dispatch,
    .combine = cuda_combine,
    .stream_sync = cuda_stream_sync,
    .stream_wait = cuda_stream_wait,
    .stream_call = cuda_stream_call,
    .event_new = cuda_event_new,
    .event_record = cuda_event_record,
    .event_signal = cuda_event_signal,
    .event_wait = cuda_event_wait,
    .event_query = cuda_event_query,
    .event_free = cuda_event_free,
    .ll_open = cuda_ll_open,
    .ll_close = cuda_ll_close,
    .ll_dispatch = cuda_ll_dispatch,
    .ll_combine = cuda_ll_combine,
    .ll_finish = cuda_ll_finish,
    .ll_control = cuda_ll_control,
    .ll_combine_buffer = cuda_ll_combine_buffer,
    .ll_get_mask = cuda_ll_get_mask,
    .ll_bytes = cuda_ll_bytes,
};

/* --- epkit/cuda.h ----------------------------------------------------------------------------------------------- */

static ep_status check_comm(const ep_comm *comm, const char *call)
{
    if (!comm || comm->ops != &ep_backend_module)
        return ep_fail(EP_E_ARG, "%s: comm is %s", call, comm ? "not of the backend cuda" : "NULL");
    return EP_OK;
}

/*
 * As many as fill the links: one for each 30 GB/s. On H200 a multiprocessor moves 37 GB/s to peers while only a few are
 * used, and 16 fill the links, nominally 478 GB/s (bench/README.md).
 */
static int find_default_sms(const struct cuda_comm *cuda)
{
    uint64_t mbps = cuda_link_mbps(cuda->ctrl->bus_id);
    int major = 0, sms = (int)((mbps + MBPS_OF_SM - 1) / MBPS_OF_SM);

    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device) != cudaSuccess)
        major = 9;
    if (!sms)
        sms = major >= 10 ? 32 : 16;
    return sms < cuda->all_sms ? sms : cuda->all_sms;
}

ep_status ep_cuda_set_sms(ep_comm *comm, int sms)
{
    struct cuda_comm *cuda;

    EP_TRY(check_comm(comm, __func__));
    cuda = cuda_of(comm);
    if (sms < 0 || sms > cuda->all_sms)
        return ep_fail(EP_E_ARG, "%s: sms is %d, not in 0..%d", __func__, sms, cuda->all_sms);
    if (!cuda->default_sms)
        cuda->default_sms = find_default_sms(cuda);
    cuda->sms = sms ? sms : cuda->default_sms;
    cuda->sms_given = sms != 0;
    return EP_OK;
}

ep_status ep_cuda_get_device(ep_comm *comm, int *ret_device, int *ret_sms)
{
    EP_TRY(check_comm(comm, __func__));
    if (ret_device)
        *ret_device = cuda_of(comm)->device;
    if (ret_sms)
        *ret_sms = cuda_of(comm)->sms;
    return EP_OK;
}

ep_status ep_cuda_set_net_memory(ep_comm *comm, size_t reserve, size_t limit)
{
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(check_comm(comm, __func__));
    if (limit && reserve > limit)
        return ep_fail(EP_E_ARG, "%s: reserve is %zu, more than the limit of %zu", __func__, reserve, limit);
    EP_TRY(cuda_scope_begin_uncaptured(cuda_of(comm), &scope));
    status = cuda_proxy_set_memory(cuda_of(comm), reserve, limit);
    cuda_scope_end(&scope);
    return status;
}

ep_status ep_cuda_get_net_memory(ep_comm *comm, size_t *ret_held, size_t *ret_needed)
{
    EP_TRY(check_comm(comm, __func__));
    cuda_proxy_get_memory(cuda_of(comm), ret_held, ret_needed);
    return EP_OK;
}

ep_status ep_cuda_repeat_bare(ep_comm *comm, int combine, int repeat)
{
    struct cuda_comm *cuda;
    struct cuda_scope scope;
    ep_status status = EP_OK;

    EP_TRY(check_comm(comm, __func__));
    cuda = cuda_of(comm);
    if (!cuda->last_shape[combine != 0].blocks)
        return ep_fail(EP_E_STATE, "%s: there was no %s yet", __func__, combine ? "combine" : "dispatch");
    EP_TRY(cuda_scope_begin(cuda, &scope));
    cuda->last_dispatch.waits.no_sync = cuda->last_combine.waits.no_sync = 1;
    for (int i = 0; i < repeat && status == EP_OK; i++)
        status = cuda_status(combine ? cuda_launch_combine(&cuda->last_combine, &cuda->last_shape[1], cuda->stream)
                                     : cuda_launch_dispatch(&cuda->last_dispatch, &cuda->last_shape[0], cuda->stream),
                             "kernel launch");
    cuda_scope_end(&scope);
    return status;
}
