/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/event.h - completion of asynchronous work.
 *
 * Each communicator has one communication stream. Operations run on it in the order of their calls; EP_ASYNC ones
 * return at once with an event, the others return when they are complete. An operation may name an event to wait for
 * before it starts: one of an earlier operation, or one that the caller completes with ep_event_signal().
 *
 * Any thread may call these on any event. An event is freed by its owner once; freeing does not cancel the work.
 */
#ifndef EPKIT_EVENT_H
#define EPKIT_EVENT_H

#include <epkit/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_event ep_event;

/* An event that the caller completes by ep_event_signal(), for instance when its compute thread has written an input.
 */
EP_API ep_status ep_event_new(ep_comm *comm, ep_event **ret_event);

/* Completes an event of ep_event_new() with EP_OK. Once; EP_E_STATE otherwise. */
EP_API ep_status ep_event_signal(ep_event *event);

/* An event that completes when all work called so far on the communication stream is complete. */
EP_API ep_status ep_event_record(ep_comm *comm, ep_event **ret_event);

/*
 * Waits on the host. The status of the work behind it, or EP_E_TIMEOUT after timeout_ms. timeout_ms < 0: until it
 * completes - work has deadlines of its own, whose status says who was late; an event of ep_event_new() is waited for
 * as long as the communicator's deadline.
 */
EP_API ep_status ep_event_wait(ep_event *event, int timeout_ms);

/* *ret_done: 1 once the work is complete; the returned status is then that of the work. Never blocks. */
EP_API ep_status ep_event_query(const ep_event *event, int *ret_done);

/* NULL is fine. */
EP_API void ep_event_free(ep_event *event);

#ifdef __cplusplus
}
#endif

#endif
