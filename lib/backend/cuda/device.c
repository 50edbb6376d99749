/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/cuda.h"

#include <epkit/cuda.h>
#include <string.h>

#define MBPS_OF_SM 30000

ep_status cuda_status(cudaError_t error, const char *call)
{
    int length = (int)strcspn(call, "(");

    if (error == cudaSuccess)
        return EP_OK;
    cudaGetLastError(); /* forgotten, or the next launch would be blamed for it */
    return ep_fail(error == cudaErrorMemoryAllocation ? EP_E_MEMORY : EP_E_DEVICE, "%.*s: %s (%s)", length, call,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

ep_status cuda_enter(const struct cuda_comm *cuda, struct cuda_scope *ret_scope)
{
    CUDA_TRY(cudaGetDevice(&ret_scope->previous));
    if (ret_scope->previous != cuda->device)
        CUDA_TRY(cudaSetDevice(cuda->device));
    return EP_OK;
}

void cuda_leave(const struct cuda_scope *scope)
{
    cudaSetDevice(scope->previous);
}

ep_status cuda_check_pointer(struct cuda_comm *cuda, const char *call, const char *name, const void *pointer)
{
    const void **remembered =
        &cuda->good_pointers[((uintptr_t)pointer >> 9 ^ (uintptr_t)pointer >> 21) % CUDA_GOOD_POINTERS];
    struct cudaPointerAttributes attributes;
    int rank = cuda->host.comm->rank;

    if (!pointer || *remembered == pointer)
        return EP_OK;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, pointer));
    if (attributes.type == cudaMemoryTypeUnregistered)
        return ep_fail(EP_E_ARG,
                       "%s: %s (%p) is host memory; the CUDA backend needs memory of GPU %d, where rank %d works", call,
                       name, pointer, cuda->device, rank);
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != cuda->device)
        return ep_fail(EP_E_ARG, "%s: %s (%p) is memory of GPU %d, but rank %d works on GPU %d", call, name, pointer,
                       attributes.device, rank, cuda->device);
    *remembered = pointer;
    return EP_OK;
}

static bool is_captured(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

    if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess)
        cudaGetLastError();
    return capture == cudaStreamCaptureStatusActive;
}

bool cuda_is_capturing(const struct cuda_comm *cuda)
{
    return cuda->stream != cuda->own && is_captured(cuda->stream);
}

ep_status cuda_use_stream(struct cuda_comm *cuda, ep_stream given)
{
    cudaStream_t stream = given ? given : cuda->own;
    struct cuda_scope scope;
    ep_status status = EP_OK;
    bool captured;

    if (stream == cuda->stream)
        return EP_OK;
    EP_TRY(host_drain(&cuda->host));
    EP_TRY(cuda_enter(cuda, &scope));
    captured = is_captured(stream) || is_captured(cuda->stream);
    /* Streams of one capture are ordered by who captures them. */
    if (!captured)
        status = cuda_status(cudaEventRecord(cuda->order, cuda->stream), "cudaEventRecord");
    if (status == EP_OK && !captured)
        status = cuda_status(cudaStreamWaitEvent(stream, cuda->order, 0), "cudaStreamWaitEvent");
    if (status == EP_OK)
        cuda->stream = stream;
    cuda_leave(&scope);
    return status;
}

static ep_status cuda_stream_sync(ep_comm *comm, ep_stream stream)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(cuda_use_stream(cuda, stream));
    EP_TRY(host_stream_sync(comm, NULL));
    EP_TRY(cuda_enter(cuda, &scope));
    /* Kernels have deadlines of their own. */
    status = cuda_status(cudaStreamSynchronize(cuda->stream), "cudaStreamSynchronize");
    cuda_leave(&scope);
    return status == EP_OK ? cuda_check_reported(cuda) : status;
}

static ep_status cuda_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    EP_TRY(cuda_use_stream(cuda_of(comm), stream));
    return host_event_record(comm, NULL, ret_event);
}

/* A kernel that nobody waits for may have met its deadline. */
static ep_status cuda_poll(ep_comm *comm)
{
    EP_TRY(cuda_check_reported(cuda_of(comm)));
    return host_poll(comm);
}

ep_status cuda_count_usable(int *ret_gpus)
{
    int all = 0, n = 0, major = 0;
    cudaError_t error = cudaGetDeviceCount(&all);

    if (error == cudaErrorNoDevice)
        error = cudaSuccess;
    while (error == cudaSuccess && n < all) {
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, n);
        if (error == cudaSuccess && major < CUDA_LEAST_MAJOR)
            break;
        n += error == cudaSuccess;
    }
    cudaGetLastError();
    if (error != cudaSuccess)
        return ep_fail(EP_E_UNSUPPORTED, "no usable GPU: %s", cudaGetErrorString(error));
    if (!n && all)
        return ep_fail(EP_E_UNSUPPORTED, "no usable GPU: GPU 0 is of compute capability %d; %d.0 or later is needed",
                       major, CUDA_LEAST_MAJOR);
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

static ep_status check_comm(const ep_comm *comm, const char *call);

EP_PRIVATE_API extern const struct ep_backend_ops ep_backend_module;

const struct ep_backend_ops ep_backend_module = {
    .abi = EP_BACKEND_ABI,
    .name = "cuda",
    .probe = cuda_probe,
    .comm_open = cuda_comm_open,
    .comm_close = cuda_comm_close,
    .comm_bytes = cuda_comm_bytes,
    .barrier = host_barrier,
    .allgather = host_allgather,
    .abort = cuda_abort,
    .poll = cuda_poll,
    .shrink = cuda_shrink,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .plan_open = cuda_plan_open,
    .plan_close = cuda_plan_close,
    .plan_sources = cuda_plan_sources,
    .plan_layout = cuda_plan_layout,
    .dispatch = cuda_dispatch,
    .combine = cuda_combine,
    .event_new = host_event_new,
    .stream_sync = cuda_stream_sync,
    .event_record = cuda_event_record,
    .event_signal = host_event_signal,
    .event_wait = host_event_wait,
    .event_query = host_event_query,
    .event_free = host_event_free,
    .ll_open = cuda_ll_open,
    .ll_close = cuda_ll_close,
    .ll_dispatch = cuda_ll_dispatch,
    .ll_combine = cuda_ll_combine,
    .ll_finish = cuda_ll_finish,
    .ll_combine_buffer = cuda_ll_combine_buffer,
    .ll_get_mask = cuda_ll_get_mask,
};

/* --- epkit/cuda.h ----------------------------------------------------------------------------------------------- */

static ep_status check_comm(const ep_comm *comm, const char *call)
{
    if (!comm || comm->ops != &ep_backend_module)
        return ep_fail(EP_E_ARG, "%s: comm is %s", call, comm ? "not of the backend cuda" : "NULL");
    return EP_OK;
}

/*
 * What fills the links. On H200 one multiprocessor moves 37 GB/s to peers while they are few, and with 16 the links,
 * 478 GB/s by their own account, are full (bench/NOTES.md): so one for each 30 GB/s.
 */
static int find_default_sms(const struct cuda_comm *cuda)
{
    uint64_t mbps = cuda_link_mbps(cuda->board->bus_id);
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
    EP_TRY(host_drain(&cuda->host));
    if (!cuda->default_sms)
        cuda->default_sms = find_default_sms(cuda);
    cuda->sms = sms ? sms : cuda->default_sms;
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

ep_status ep_cuda_repeat_bare(ep_comm *comm, int combine, int repeat)
{
    struct cuda_comm *cuda;
    struct cuda_scope scope;
    ep_status status = EP_OK;

    EP_TRY(check_comm(comm, __func__));
    cuda = cuda_of(comm);
    if (!cuda->last_shape[combine != 0].blocks)
        return ep_fail(EP_E_STATE, "%s: there was no %s yet", __func__, combine ? "combine" : "dispatch");
    EP_TRY(cuda_enter(cuda, &scope));
    cuda->last_dispatch.waits.bare = cuda->last_combine.waits.bare = 1;
    for (int i = 0; i < repeat && status == EP_OK; i++)
        status = cuda_status(combine ? cuda_launch_combine(&cuda->last_combine, &cuda->last_shape[1], cuda->stream)
                                     : cuda_launch_dispatch(&cuda->last_dispatch, &cuda->last_shape[0], cuda->stream),
                             "kernel launch");
    cuda_leave(&scope);
    return status;
}
