/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the backend, and the calls of epkit/cuda.h. */
#include "backend/cuda/nvml.h"
#include "backend/cuda/plan.h"
#include "group/collective.h"
#include "group/failure.h"

#include <epkit/cuda.h>

#define MBPS_OF_SM 30000

static ep_status cuda_poll(ep_comm *comm)
{
    EP_TRY(cuda_check_reported(cuda_of(comm)));
    EP_TRY(ep_group_poll(comm));
    return cuda_find_refused(cuda_of(comm));
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
    .barrier = cuda_barrier,
    .barrier_on = cuda_barrier_on,
    .allgather = ep_group_allgather,
    .abort = cuda_abort,
    .poll = cuda_poll,
    .get_failed = ep_group_get_failed,
    .regroup_drain = cuda_regroup_drain,
    .regroup_leave = cuda_regroup_leave,
    .regroup_join = cuda_regroup_join,
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
    .plan_wait = cuda_plan_wait,
    .is_capturing = cuda_is_capturing,
    .rows_carry_sources = true,
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
    .ll_renew = cuda_ll_open,
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
 * used, and 16 fill the links, nominally 478 GB/s (docs/decisions.md).
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
