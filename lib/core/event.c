/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

/*
 * What an event reports is the business of who asks: the work behind it has already told the communicator when it
 * failed, and a wait that the caller cut short is no failure of the group. So waits and queries record nothing.
 */

typedef ep_status (*make_event_fn)(ep_comm *comm, ep_event **ret_event);

static ep_status make_event(ep_comm *comm, make_event_fn make, const char *call, ep_event **ret_event)
{
    ep_status status = EP_CHECK_PTR(call, ret_event);

    if (status == EP_OK)
        status = make ? make(comm, ret_event)
                      : ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", call, comm->ops->name);
    if (status == EP_OK)
        comm->live++;
    return ep_comm_record(comm, status);
}

/* A wait that only its caller's limit ended says nothing about the group. */
static ep_status settle(const ep_event *event, ep_status status)
{
    return status == EP_E_TIMEOUT ? status : ep_comm_settle(event->comm, status);
}

ep_status ep_event_new(ep_comm *comm, ep_event **ret_event)
{
    EP_CHECK_COMM(comm, comm);
    return make_event(comm, comm->ops->event_new, __func__, ret_event);
}

ep_status ep_event_record(ep_comm *comm, ep_event **ret_event)
{
    EP_CHECK_COMM(comm, comm);
    return make_event(comm, comm->ops->event_record, __func__, ret_event);
}

ep_status ep_event_signal(ep_event *event)
{
    EP_CHECK_COMM(event, event->comm);
    return EP_BACKEND_CALL(event->comm, event_signal, event);
}

ep_status ep_event_wait(ep_event *event, int timeout_ms)
{
    EP_CHECK_COMM(event, event->comm);
    return settle(event, EP_BACKEND_CALL(event->comm, event_wait, event, timeout_ms));
}

ep_status ep_event_query(const ep_event *event, int *ret_done)
{
    EP_CHECK_COMM(event, event->comm);
    EP_CHECK_HANDLE(ret_done);
    return settle(event, EP_BACKEND_CALL(event->comm, event_query, event, ret_done));
}

void ep_event_free(ep_event *event)
{
    ep_comm *comm;

    if (!event || !ep_comm_is_own(event->comm))
        return;
    comm = event->comm;
    if (comm->ops->event_free)
        comm->ops->event_free(event);
    comm->live--;
}
