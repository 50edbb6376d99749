/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/stream.h - streams: the order of operations. Events: their completion.
 *
 * Every data call (ops.h, lowlatency.h, ep_plan_update) takes a stream. It checks its arguments, queues its work in the
 * stream and returns. ep_stream_sync() on that stream returns the status of work that fails later; if the failure is
 * one of the communicator, every later call and ep_comm_async_error() return it, too. The forms that end in _sync queue
 * in the stream NULL and then wait as ep_stream_sync() does: they also report work that was queued there earlier and
 * failed.
 *
 * CUDA backend: a stream is a cudaStream_t of the communicator's device; NULL is the CUDA default stream. Work is
 * ordered with everything else in the stream; CUDA events (cudaEventRecord) work as well as those below.
 *
 * Host backend: a stream is an ep_queue; NULL is the communicator's own queue. One library thread runs the work of all
 * queues of a communicator in the order of the calls; a queue only selects the work to wait for. The thread starts with
 * the first queued call, sleeps while there is no work, and receives no signals.
 *
 * On both backends the operations of a communicator run in the order of their calls, whatever their streams: an
 * operation that follows ep_stream_wait() delays those that are called after it.
 *
 * Buffers must stay valid, and inputs unchanged, until the operation is complete.
 */
#ifndef EPKIT_STREAM_H
#define EPKIT_STREAM_H

#include <epkit/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Host backend: a queue of the communicator. EP_E_UNSUPPORTED on other backends, whose streams are those of the device.
 */
typedef struct ep_queue ep_queue;

EP_API ep_status ep_queue_new(ep_comm *comm, ep_queue **ret_queue);

/* Waits for the work that is queued in it. Call it before ep_comm_free(). NULL is allowed. */
EP_API void ep_queue_free(ep_queue *queue);

/*
 * Waits on the host until all work that was called on this communicator in `stream`, or launched there with a graph, is
 * complete. Returns the status of the first of it that failed since the last ep_stream_sync() on this stream, or the
 * status of a failed communicator. The thread sleeps. If a rank is late, the operation that waits for it fails at its
 * deadline and names it.
 */
EP_API ep_status ep_stream_sync(ep_comm *comm, ep_stream stream);

/*
 * Runs function(context) in the order of the stream, on a library thread. Its writes are visible to the work that
 * follows it in the stream. On this communicator it may call only ep_event_signal(), ep_event_query(), ep_comm_abort()
 * and ep_comm_async_error(). On the host backend, calls that would queue work or wait for it return EP_E_STATE, and
 * calls that free an object do nothing. A function whose turn comes after the communicator has failed is not called
 * there, so the caller must be able to free its context.
 */
typedef void (*ep_stream_fn)(void *context);
EP_API ep_status ep_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);

/* A barrier of all ranks in stream order: work queued after it starts when all ranks have reached the barrier. */
EP_API ep_status ep_barrier_on(ep_comm *comm, ep_stream stream);

/*
 * Completion of work. Any thread may call ep_event_signal, _wait and _query on any event. Its owner frees an event
 * once; this cancels no work, and work that waits for the event keeps it allocated.
 */
typedef struct ep_event ep_event;

/* An event that the caller completes with ep_event_signal(), for example when its own thread has written an input. */
EP_API ep_status ep_event_new(ep_comm *comm, ep_event **ret_event);

/* Completes an event of ep_event_new() with EP_OK. EP_E_STATE for any other event or a second call. */
EP_API ep_status ep_event_signal(ep_event *event);

/* An event that completes when all work called so far in the stream is complete. */
EP_API ep_status ep_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);

/*
 * Work that is called in the stream afterwards starts when the event is complete, also if the event's work has failed;
 * on the host backend ep_stream_sync() on this stream then returns its status, too. The event must be one of this
 * communicator (EP_E_ARG). If an event of ep_event_new() is not signalled within the deadline, the communicator fails
 * (EP_E_TIMEOUT).
 */
EP_API ep_status ep_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);

/*
 * Waits on the host. Returns the status of the event's work, or EP_E_TIMEOUT after timeout_ms. timeout_ms < 0: waits
 * until the event is complete. Queued work has deadlines of its own, and its status names a late rank; the wait for an
 * event of ep_event_new() ends at the communicator's deadline.
 */
EP_API ep_status ep_event_wait(ep_event *event, int timeout_ms);

/*
 * Never blocks. *ret_done: 1 if the work is complete, also if it has failed; the returned status is then that of the
 * work. Otherwise 0.
 */
EP_API ep_status ep_event_query(const ep_event *event, int *ret_done);

/* NULL is allowed. */
EP_API void ep_event_free(ep_event *event);

#ifdef __cplusplus
}
#endif

#endif
