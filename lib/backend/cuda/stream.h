/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h - calls in their streams, host waits for them, events. */
#ifndef EP_CUDA_STREAM_H
#define EP_CUDA_STREAM_H

#include "backend/cuda/device.h"

/* A call that queues in a stream. */
struct cuda_call {
    struct cuda_comm *cuda;
    cudaStream_t stream;
    unsigned long long capture; /* not 0: id of the capture that the stream is in */
    unsigned long long id;      /* of the stream, outside of captures */
    bool queued;                /* set by what queues work of the call in the stream */
    struct cuda_scope scope;
};

/*
 * Begins a call: checks that the communicator has not failed, and makes its device the current one. operation: orders
 * what is queued in the stream from now on after the operations that were called before. cuda_call_end(): `status` is
 * that of the call.
 */
ep_status cuda_call_begin(struct cuda_comm *cuda, ep_stream stream, bool operation, struct cuda_call *ret_call);
ep_status cuda_call_end(struct cuda_call *call, ep_status status);
/* Is the stream being captured, or is its capture invalid? */
bool cuda_is_capturing(ep_comm *comm, ep_stream stream);
/* Sleeps until the event is complete, or until the communicator has failed and its kernels have had time to end. */
ep_status cuda_wait_event(struct cuda_comm *cuda, cudaEvent_t event, enum ep_group_phase phase);
/* Waits for all operations that were called. */
ep_status cuda_drain(struct cuda_comm *cuda);
ep_status cuda_stream_sync(ep_comm *comm, ep_stream stream);
ep_status cuda_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status cuda_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);
ep_status cuda_event_new(ep_comm *comm, ep_event **ret_event);
ep_status cuda_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);
ep_status cuda_event_signal(ep_event *event);
ep_status cuda_event_wait(ep_event *event, int timeout_ms);
ep_status cuda_event_query(const ep_event *event, int *ret_done);
void cuda_event_free(ep_event *event);
ep_status cuda_barrier_on(ep_comm *comm, ep_stream stream);

#endif
