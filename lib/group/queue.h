/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h - queues of work: worker thread, events. */
#ifndef EP_GROUP_QUEUE_H
#define EP_GROUP_QUEUE_H

#include "group/group.h"

typedef ep_status (*ep_group_job_fn)(void *arguments);
/*
 * Queues a job in `stream`; copies `bytes` of `arguments`. In a _sync call it runs on the caller's thread, and its
 * status is returned.
 */
ep_status ep_group_submit(struct ep_group *group, ep_stream stream, ep_group_job_fn run, const void *arguments,
                          size_t bytes);
/* Runs a job on the caller's thread, after all that is queued. */
ep_status ep_group_run(struct ep_group *group, ep_group_job_fn run, void *arguments);
bool ep_group_is_idle(struct ep_group *group);
/* Waits until all queues are empty. */
ep_status ep_group_drain(struct ep_group *group);
/* Waits until the queue is empty, whether or not its jobs succeeded. */
ep_status ep_group_stream_ready(ep_comm *comm, ep_stream stream);
ep_status ep_group_stream_sync(ep_comm *comm, ep_stream stream);
ep_status ep_group_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status ep_group_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);
/*
 * A status of the 1xx or 2xx kind of a job that the caller does not wait for: the caller cannot correct and repeat the
 * call, so it fails the communicator. `alone`: on this rank only; its peers time out or mask it.
 */
ep_status ep_group_fail_queued(struct ep_group *group, ep_status status, enum ep_group_phase phase, bool alone);
ep_status ep_group_queue_new(ep_comm *comm, ep_queue **ret_queue);
void ep_group_queue_free(ep_queue *queue);
void ep_group_queue_close(struct ep_group *group);
ep_status ep_group_event_new(ep_comm *comm, ep_event **ret_event);
ep_status ep_group_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);
ep_status ep_group_event_signal(ep_event *event);
ep_status ep_group_event_wait(ep_event *event, int timeout_ms);
ep_status ep_group_event_query(const ep_event *event, int *ret_done);
void ep_group_event_free(ep_event *event);

#endif
