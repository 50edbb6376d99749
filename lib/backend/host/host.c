/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/host/host.h"
#include "core/routing.h"
#include "group/collective.h"
#include "group/failure.h"
#include "group/memory.h"
#include "group/plan.h"
#include "group/queue.h"

#include <stdlib.h>

/* The host backend needs no device. But an unknown variant of the loops would silently test another one. */
static ep_status host_probe(void)
{
    const char *isa = getenv("EPKIT_HOST_ISA");

    if (isa && isa[0] && !ep_rows_find(isa))
        return ep_fail(EP_E_ARG,
                       "EPKIT_HOST_ISA is \"%s\": use portable, or avx2 or avx512 if the processor supports it", isa);
    return EP_OK;
}

ep_status host_comm_open(ep_comm *comm, const ep_boot *boot)
{
    static const struct ep_group_backend backend = {.comm_bytes = sizeof(struct host_comm),
                                                    .stop = host_ll_stop_threads};

    return ep_group_open(comm, boot, &backend);
}

const struct ep_backend_ops ep_backend_host = {
    .abi = EP_BACKEND_ABI,
    .name = "host",
    .probe = host_probe,
    .comm_open = host_comm_open,
    .comm_close = ep_group_close,
    .comm_bytes = ep_group_bytes,
    .barrier = ep_group_barrier,
    .barrier_on = ep_group_barrier_on,
    .allgather = ep_group_allgather,
    .abort = ep_group_abort,
    .poll = ep_group_poll,
    .get_failed = ep_group_get_failed,
    .regroup_drain = ep_group_regroup_drain,
    .regroup_leave = ep_group_regroup_leave,
    .regroup_join = ep_group_regroup_join,
    .alloc = ep_group_alloc,
    .free = ep_group_free,
    .alloc_local = ep_group_alloc_local,
    .free_local = ep_group_free_local,
    .plan_open = ep_group_plan_open,
    .plan_close = ep_group_plan_close,
    .plan_update = ep_group_plan_update,
    .plan_metadata = host_plan_metadata,
    .plan_sources = host_plan_sources,
    .plan_layout = ep_routing_layout,
    .dispatch = host_dispatch,
    .combine = host_combine,
    .queue_new = ep_group_queue_new,
    .queue_free = ep_group_queue_free,
    .stream_sync = ep_group_stream_sync,
    .stream_wait = ep_group_stream_wait,
    .stream_call = ep_group_stream_call,
    .event_new = ep_group_event_new,
    .event_record = ep_group_event_record,
    .event_signal = ep_group_event_signal,
    .event_wait = ep_group_event_wait,
    .event_query = ep_group_event_query,
    .event_free = ep_group_event_free,
    .ll_open = host_ll_open,
    .ll_close = host_ll_close,
    .ll_renew = host_ll_renew,
    .ll_dispatch = host_ll_dispatch,
    .ll_combine = host_ll_combine,
    .ll_finish = host_ll_finish,
    .ll_combine_buffer = host_ll_combine_buffer,
    .ll_get_mask = host_ll_get_mask,
    .ll_control = host_ll_control,
    .ll_bytes = host_ll_bytes,
};
