/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

_Thread_local const ep_comm *ep_comm_calling;

const ep_comm *ep_comm_note_calling(const ep_comm *comm)
{
    const ep_comm *before = ep_comm_calling;

    ep_comm_calling = comm;
    return before;
}

/*
 * Waits for and queries of events record nothing: a failure of their work was recorded when it occurred, and a wait
 * that ends at the caller's timeout is not a failure of the group.
 */

/* Counts an event or queue, if the backend has created it. */
static ep_status count_event(ep_comm *comm, ep_status status)
{
    if (status == EP_OK)
        comm->live++;
    return ep_comm_record(comm, status);
}

/* A timeout of the caller's wait says nothing about the group. */
static ep_status resolve(const ep_event *event, ep_status status)
{
    return status == EP_E_TIMEOUT ? status : ep_comm_resolve_status(event->comm, status);
}

ep_status ep_event_new(ep_comm *comm, ep_event **ret_event)
{
    EP_CHECK_COMM(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, ret_event));
    return count_event(comm, EP_BACKEND_CALL(comm, event_new, comm, ret_event));
}

ep_status ep_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    EP_CHECK_COMM(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, ret_event));
    return count_event(comm, EP_BACKEND_CALL(comm, event_record, comm, stream, ret_event));
}

ep_status ep_event_signal(ep_event *event)
{
    EP_CHECK_OWN(event, event->comm);
    return EP_BACKEND_CALL(event->comm, event_signal, event);
}

ep_status ep_event_wait(ep_event *event, int timeout_ms)
{
    EP_CHECK_COMM(event, event->comm);
    return resolve(event, EP_BACKEND_CALL(event->comm, event_wait, event, timeout_ms));
}

ep_status ep_event_query(const ep_event *event, int *ret_done)
{
    EP_CHECK_OWN(event, event->comm);
    EP_CHECK_HANDLE(ret_done);
    return resolve(event, EP_BACKEND_CALL(event->comm, event_query, event, ret_done));
}

void ep_event_free(ep_event *event)
{
    ep_comm *comm;

    if (!event || !ep_comm_may_free(event->comm))
        return;
    comm = event->comm;
    if (comm->ops->event_free)
        comm->ops->event_free(event);
    comm->live--;
}

ep_status ep_queue_new(ep_comm *comm, ep_queue **ret_queue)
{
    EP_CHECK_COMM(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, ret_queue));
    return count_event(comm, EP_BACKEND_CALL(comm, queue_new, comm, ret_queue));
}

void ep_queue_free(ep_queue *queue)
{
    ep_comm *comm;

    if (!queue || !ep_comm_may_free(queue->comm))
        return;
    comm = queue->comm;
    comm->ops->queue_free(queue);
    comm->live--;
}

ep_status ep_stream_sync(ep_comm *comm, ep_stream stream)
{
    EP_CHECK_COMM(comm, comm);
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, stream_sync, comm, stream));
}

ep_status ep_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event)
{
    EP_CHECK_USABLE(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, event));
    if (event->comm != comm)
        return ep_comm_record(comm, ep_fail(EP_E_ARG, "%s: event is of another communicator", __func__));
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, stream_wait, comm, stream, event));
}

ep_status ep_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context)
{
    EP_CHECK_USABLE(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, function));
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, stream_call, comm, stream, function, context));
}

ep_status ep_barrier_on(ep_comm *comm, ep_stream stream)
{
    EP_CHECK_USABLE(comm, comm);
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, barrier_on, comm, stream));
}
