/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of module.h. Copies use the internal stream, because the operations' streams may be waiting. */
#include "backend/cuda/module.h"
#include "backend/cuda/cuda.h"

#include <assert.h>
#include <ctype.h>
#include <epkit/cuda.h>
#include <stdio.h>
#include <string.h>

#define FLUSH_BYTES ((size_t)256 << 20) /* several times the cache */

static_assert(sizeof(struct ep_group_address) <= sizeof(struct ep_cuda_address),
              "an address holds a struct ep_group_address");

/* --- which GPUs there are ---------------------------------------------------------------------------------------- */

static ep_status find_addresses(struct ep_cuda_gpus *gpus)
{
    for (int i = 0; i < gpus->visible; i++) {
        CUDA_TRY(cudaDeviceGetPCIBusId(gpus->address[i], sizeof(gpus->address[i]), i));
        for (char *at = gpus->address[i]; *at; at++)
            *at = (char)tolower((unsigned char)*at);
    }
    return EP_OK;
}

/* As ep_comm_new() requires: P2P in both directions. */
static bool have_p2p(int a, int b)
{
    int forward = 0, backward = 0;
    bool known = cudaDeviceCanAccessPeer(&forward, a, b) == cudaSuccess &&
                 cudaDeviceCanAccessPeer(&backward, b, a) == cudaSuccess;

    if (!known)
        cudaGetLastError();
    return known && forward && backward;
}

static int count_connected(const struct ep_cuda_gpus *gpus, char *ret_why, size_t bytes)
{
    for (int n = 1; n < gpus->usable; n++) {
        for (int i = 0; i < n; i++) {
            if (have_p2p(i, n))
                continue;
            snprintf(ret_why, bytes, "no P2P between GPU %s and GPU %s", gpus->address[i], gpus->address[n]);
            return n;
        }
    }
    return gpus->usable;
}

static ep_status query_gpus(struct ep_cuda_gpus *ret_gpus)
{
    struct ep_cuda_gpus gpus = {.visible = 0};
    int visible = 0, usable = 0;
    ep_status status = cuda_count_usable(&usable);

    if (cudaGetDeviceCount(&visible) != cudaSuccess)
        cudaGetLastError();
    if (visible <= 0)
        return status;
    if (status != EP_OK)
        snprintf(gpus.why, sizeof(gpus.why), "%s", ep_last_error());
    gpus.visible = visible < EP_CUDA_GPUS ? visible : EP_CUDA_GPUS;
    gpus.usable = usable < gpus.visible ? usable : gpus.visible;
    EP_TRY(find_addresses(&gpus));
    if (status == EP_OK && gpus.usable < gpus.visible)
        snprintf(gpus.why, sizeof(gpus.why), "GPU %s is not of compute capability %d.0 or later",
                 gpus.address[gpus.usable], CUDA_MIN_MAJOR);
    gpus.connected = count_connected(&gpus, gpus.why, sizeof(gpus.why));
    *ret_gpus = gpus;
    return EP_OK;
}

/* --- device memory ----------------------------------------------------------------------------------------------- */

static ep_status device_name(ep_comm *comm, char *ret_name, size_t bytes)
{
    struct cudaDeviceProp properties;

    CUDA_TRY(cudaGetDeviceProperties(&properties, cuda_of(comm)->device));
    snprintf(ret_name, bytes, "%s", properties.name);
    return EP_OK;
}

static ep_status alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    CUDA_ON_DEVICE(comm, cuda_status(cudaMalloc(ret_memory, bytes + 1), "cudaMalloc"));
}

static void release(ep_comm *comm, void *memory)
{
    struct cuda_scope scope;

    if (!memory || cuda_scope_begin(cuda_of(comm), &scope) != EP_OK)
        return;
    cudaFree(memory);
    cudaGetLastError();
    cuda_scope_end(&scope);
}

/* Not in the default stream: an operation may have made it wait for something that the caller does after this call. */
static ep_status copy(ep_comm *comm, void *to, const void *from, size_t bytes)
{
    CUDA_ON_DEVICE(comm, cuda_transfer(cuda_of(comm), to, from, bytes));
}

/* In the default stream, after queued work that may still read the memory. */
static ep_status fill_now(const struct cuda_comm *cuda, void *to, int byte, size_t bytes)
{
    CUDA_TRY(cudaMemsetAsync(to, byte, bytes, cuda->default_stream));
    CUDA_TRY(cudaStreamSynchronize(cuda->default_stream));
    return EP_OK;
}

static ep_status fill(ep_comm *comm, void *to, int byte, size_t bytes)
{
    if (!bytes)
        return EP_OK;
    CUDA_ON_DEVICE(comm, fill_now(cuda_of(comm), to, byte, bytes));
}

/* --- a clock in the stream --------------------------------------------------------------------------------------- */

static ep_status mark(struct cuda_comm *cuda, int which)
{
    if (!cuda->clock[which])
        CUDA_TRY(cudaEventCreate(&cuda->clock[which]));
    CUDA_TRY(cudaEventRecord(cuda->clock[which], cuda->default_stream));
    return EP_OK;
}

static ep_status start_clock(struct cuda_comm *cuda, bool queued)
{
    if (queued && !cuda->flush)
        CUDA_TRY(cudaMalloc(&cuda->flush, FLUSH_BYTES));
    if (queued)
        CUDA_TRY(cudaMemsetAsync(cuda->flush, 1, FLUSH_BYTES, cuda->default_stream));
    return mark(cuda, 0);
}

static ep_status clock_start(ep_comm *comm, int queued)
{
    CUDA_ON_DEVICE(comm, start_clock(cuda_of(comm), queued));
}

static ep_status clock_stop(ep_comm *comm)
{
    CUDA_ON_DEVICE(comm, mark(cuda_of(comm), 1));
}

static ep_status read_clock(const struct cuda_comm *cuda, uint64_t *ret_ns)
{
    float ms;

    if (!cuda->clock[0] || !cuda->clock[1])
        return ep_fail(EP_E_STATE, "clock_read: the clock was not started and stopped");
    CUDA_TRY(cudaEventSynchronize(cuda->clock[1]));
    CUDA_TRY(cudaEventElapsedTime(&ms, cuda->clock[0], cuda->clock[1]));
    *ret_ns = (uint64_t)((double)ms * 1e6);
    return EP_OK;
}

static ep_status clock_read(ep_comm *comm, uint64_t *ret_ns)
{
    CUDA_ON_DEVICE(comm, read_clock(cuda_of(comm), ret_ns));
}

/* --- baselines -------------------------------------------------------------------------------------------------- */

static ep_status get_sms(ep_comm *comm, int low_latency, int *ret_sms)
{
    if (low_latency) {
        *ret_sms = cuda_ll_sms(cuda_of(comm));
        return EP_OK;
    }
    return ep_cuda_get_device(comm, NULL, ret_sms);
}

static ep_status repeat_bare(ep_comm *comm, int combine)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    if (!cuda->last_shape[combine].blocks)
        return ep_fail(EP_E_STATE, "there was no %s yet", combine ? "combine" : "dispatch");
    EP_TRY(cuda_scope_begin(cuda, &scope));
    cuda->last_dispatch.waits.no_sync = cuda->last_combine.waits.no_sync = 1;
    status = cuda_status(combine ? cuda_launch_combine(&cuda->last_combine, &cuda->last_shape[1], cuda->stream)
                                 : cuda_launch_dispatch(&cuda->last_dispatch, &cuda->last_shape[0], cuda->stream),
                         "kernel launch");
    cuda_scope_end(&scope);
    return status;
}

static ep_status get_address(ep_comm *comm, const void *memory, size_t bytes, struct ep_cuda_address *ret_address)
{
    struct ep_group_address group_address;

    if (!cuda_find(cuda_of(comm), memory, bytes, &group_address))
        return ep_fail(EP_E_ARG, "get_address: %zu bytes at %p are not in symmetric memory", bytes, memory);
    memcpy(ret_address->bytes, &group_address, sizeof(group_address));
    return EP_OK;
}

static ep_status map_address(ep_comm *comm, int rank, const struct ep_cuda_address *address, void **ret_memory)
{
    struct ep_group_address group_address;

    memcpy(&group_address, address->bytes, sizeof(group_address));
    CUDA_ON_DEVICE(comm, cuda_map(cuda_of(comm), rank, &group_address, 1, ret_memory));
}

static ep_status queue_copy(struct cuda_comm *cuda, int i, void *to, const void *from, size_t bytes)
{
    if (!cuda->between)
        CUDA_TRY(cudaEventCreateWithFlags(&cuda->between, cudaEventDisableTiming));
    if (!cuda->copy_stream[i])
        CUDA_TRY(cudaStreamCreateWithFlags(&cuda->copy_stream[i], cudaStreamNonBlocking));
    CUDA_TRY(cudaEventRecord(cuda->between, cuda->default_stream));
    CUDA_TRY(cudaStreamWaitEvent(cuda->copy_stream[i], cuda->between, 0));
    CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda->copy_stream[i]));
    return EP_OK;
}

static ep_status engine_copy(ep_comm *comm, int i, void *to, const void *from, size_t bytes)
{
    if (i < 0 || i >= EP_CUDA_COPY_STREAMS)
        return ep_fail(EP_E_ARG, "engine_copy: copy_stream is %d, not in 0..%d", i, EP_CUDA_COPY_STREAMS - 1);
    if (!bytes)
        return EP_OK;
    CUDA_ON_DEVICE(comm, queue_copy(cuda_of(comm), i, to, from, bytes));
}

static ep_status join_copy_streams(struct cuda_comm *cuda)
{
    for (int i = 0; i < EP_CUDA_COPY_STREAMS; i++) {
        if (!cuda->copy_stream[i])
            continue;
        CUDA_TRY(cudaEventRecord(cuda->between, cuda->copy_stream[i]));
        CUDA_TRY(cudaStreamWaitEvent(cuda->default_stream, cuda->between, 0));
    }
    return EP_OK;
}

static ep_status engine_join(ep_comm *comm)
{
    CUDA_ON_DEVICE(comm, join_copy_streams(cuda_of(comm)));
}

void cuda_module_close(struct cuda_comm *cuda)
{
    for (int i = 0; i < 2; i++)
        if (cuda->clock[i])
            cudaEventDestroy(cuda->clock[i]);
    cudaFree(cuda->flush);
    for (int i = 0; i < EP_CUDA_COPY_STREAMS; i++)
        if (cuda->copy_stream[i])
            cudaStreamDestroy(cuda->copy_stream[i]);
    if (cuda->between)
        cudaEventDestroy(cuda->between);
}

EP_PRIVATE_API extern const struct ep_cuda_module ep_cuda_module;

const struct ep_cuda_module ep_cuda_module = {
    .abi = EP_CUDA_MODULE_ABI,
    .query_gpus = query_gpus,
    .device_name = device_name,
    .alloc = alloc,
    .free = release,
    .copy = copy,
    .fill = fill,
    .clock_start = clock_start,
    .clock_stop = clock_stop,
    .clock_read = clock_read,
    .set_sms = ep_cuda_set_sms,
    .get_sms = get_sms,
    .repeat_bare = repeat_bare,
    .get_address = get_address,
    .map_address = map_address,
    .engine_copy = engine_copy,
    .engine_join = engine_join,
};
