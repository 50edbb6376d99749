/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/stream.h - streams: the order of operations. Events: their completion.
 *
 * Every data call (ops.h, lowlatency.h, ep_plan_update) names a stream, queues its work there and returns; arguments
 * are checked before. What fails later is the status of ep_stream_sync() on that stream; a failure of the communicator
 * is that of every later call and of ep_comm_async_error(), too. The forms that end in _sync queue in the stream NULL
 * and end as ep_stream_sync() does: work that was queued there before and failed is reported by them, too.
 *
 * CUDA backend: a stream is a cudaStream_t of the communicator's device, NULL is CUDA's default stream. Work is ordered
 * with everything else in the stream, and events of CUDA (cudaEventRecord) serve as well as those below.
 *
 * Host backend: a stream is an ep_queue, NULL is the communicator's own. One thread of the library runs the work of all
 * queues of a communicator, in the order of the calls; a queue says what to wait for. The thread starts with the first
 * call that is queued, sleeps while there is nothing to do, and takes no signals.
 *
 * On both backends the operations of a communicator run in the order of their calls, whatever their streams: an
 * operation behind ep_stream_wait() holds up those that are called after it.
 *
 * Buffers must stay valid, and inputs unchanged, until the operation is complete.
 */
#ifndef EPKIT_STREAM_H
#define EPKIT_STREAM_H

#include <epkit/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Host backend: a queue of the communicator. EP_E_UNSUPPORTED on others: streams are the device's there. */
typedef struct ep_queue ep_queue;

EP_API ep_status ep_queue_new(ep_comm *comm, ep_queue **ret_queue);

/* Waits for the work that is queued in it. Before ep_comm_free(). NULL is fine. */
EP_API void ep_queue_free(ep_queue *queue);

/*
 * Waits on the host until everything that was called on this communicator in `stream` is complete. The status of the
 * first of it that failed since the last call on this stream, or of the communicator. Sleeps. A rank that does not come
 * is named by the deadline of the operation that waits for it.
 */
EP_API ep_status ep_stream_sync(ep_comm *comm, ep_stream stream);

/*
 * Runs function(context) in the order of the stream, on a thread of the library. What it writes is seen by the work
 * behind it. It may call nothing on this communicator but ep_event_signal(), ep_event_query(), ep_comm_abort() and
 * ep_comm_async_error(): on the host backend what would queue work or wait for it is EP_E_STATE, and frees nothing.
 */
typedef void (*ep_stream_fn)(void *context);
EP_API ep_status ep_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);

/* A barrier of all ranks in the order of the stream: what is queued behind it starts when all ranks have come to it. */
EP_API ep_status ep_barrier_on(ep_comm *comm, ep_stream stream);

/*
 * Any thread may call ep_event_signal, _wait and _query on any event. An event is freed by its owner once; that cancels
 * no work, and work that waits for it keeps it. Others than those of ep_event_new() complete with the work before them.
 */
typedef struct ep_event ep_event;

/* An event that the caller completes by ep_event_signal(), for instance when a thread of its own has written an input.
 */
EP_API ep_status ep_event_new(ep_comm *comm, ep_event **ret_event);

/* Completes an event of ep_event_new() with EP_OK. Once; EP_E_STATE otherwise. */
EP_API ep_status ep_event_signal(ep_event *event);

/* An event that completes when what was called so far in the stream is complete. */
EP_API ep_status ep_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);

/*
 * What is called in the stream afterwards starts when the event is complete: one of this communicator (EP_E_ARG). An
 * event of ep_event_new() that is not signalled within the deadline fails the communicator (EP_E_TIMEOUT).
 */
EP_API ep_status ep_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);

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
