/* SPDX-License-Identifier: Apache-2.0 */
#include "mock_backend.h"

#include <stdlib.h>
#include <string.h>

struct mock mock;

static ep_status count_call(void)
{
    mock.calls++;
    return mock.answer == EP_OK ? EP_OK : ep_fail(mock.answer, "%s", mock.text ? mock.text : "mock");
}

static ep_status mock_comm_open(ep_comm *comm, const ep_boot *boot)
{
    (void)boot;
    if (mock.open_answer != EP_OK)
        return ep_fail(mock.open_answer, "mock: comm_open");
    comm->impl = &mock;
    mock.opened++;
    return EP_OK;
}

static void mock_comm_close(ep_comm *comm)
{
    (void)comm;
    mock.closed++;
}

static size_t mock_comm_bytes(const ep_comm *comm)
{
    (void)comm;
    return 12345;
}

static ep_status mock_barrier(ep_comm *comm)
{
    (void)comm;
    return count_call();
}

/* All ranks have the data of this rank; in a digest of the core the second field, the rank, is corrected. */
static void gather_from_alike(const void *mine, size_t bytes, int nranks, void *ret_all)
{
    for (int32_t rank = 0; rank < nranks; rank++) {
        char *block = (char *)ret_all + (size_t)rank * bytes;

        if (bytes)
            memcpy(block, mine, bytes);
        if (bytes == 512)
            memcpy(block + sizeof(uint32_t), &rank, sizeof(rank));
    }
}

static ep_status mock_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all)
{
    EP_TRY(count_call());
    gather_from_alike(mine, bytes, comm->nranks, ret_all);
    return EP_OK;
}

static ep_status boot_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)timeout_ms;
    gather_from_alike(mine, bytes, *(const int *)context, ret_all);
    return EP_OK;
}

ep_boot mock_boot(int rank, int nranks)
{
    static int size; /* the context must live as long as the bootstrap; tests have one at a time */

    size = nranks;
    return (ep_boot){
        .size = sizeof(ep_boot), .rank = rank, .nranks = nranks, .allgather = boot_allgather, .context = &size};
}

static void mock_abort(ep_comm *comm)
{
    atomic_store(&comm->failed, (int)EP_E_ABORTED);
}

static ep_status mock_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    (void)comm;
    (void)bytes;
    EP_TRY(count_call());
    *ret_memory = &mock;
    return EP_OK;
}

static ep_status mock_free(ep_comm *comm, void *memory)
{
    (void)comm;
    (void)memory;
    return count_call();
}

static ep_status mock_plan_open(ep_plan *plan, const ep_plan_args *args)
{
    (void)args;
    EP_TRY(count_call());
    mock.plan = plan->args;
    plan->info = mock.info;
    return EP_OK;
}

static void mock_plan_close(ep_plan *plan)
{
    (void)plan;
}

static ep_status mock_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    (void)plan;
    (void)ret_rank;
    (void)ret_token;
    return count_call();
}

static ep_status mock_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    (void)comm;
    (void)args;
    (void)layout;
    return count_call();
}

static ep_status make_event(ep_comm *comm, ep_event **ret_event)
{
    ep_event *event = malloc(sizeof(*event));

    event->comm = comm;
    *ret_event = event;
    return EP_OK;
}

static ep_status mock_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream)
{
    EP_TRY(count_call());
    mock.dispatch = *args;
    mock.stream = stream;
    mock.was_blocking = plan->comm->blocking;
    return EP_OK;
}

static ep_status mock_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream)
{
    EP_TRY(count_call());
    mock.combine = *args;
    mock.stream = stream;
    mock.was_blocking = plan->comm->blocking;
    return EP_OK;
}

static ep_status mock_event_new(ep_comm *comm, ep_event **ret_event)
{
    EP_TRY(count_call());
    return make_event(comm, ret_event);
}

static ep_status mock_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    mock.stream = stream;
    return mock_event_new(comm, ret_event);
}

static ep_status mock_stream_sync(ep_comm *comm, ep_stream stream)
{
    (void)comm;
    mock.stream = stream;
    return count_call();
}

static ep_status mock_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event)
{
    (void)event;
    return mock_stream_sync(comm, stream);
}

static ep_status mock_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context)
{
    function(context);
    return mock_stream_sync(comm, stream);
}

static ep_status mock_event_signal(ep_event *event)
{
    (void)event;
    return count_call();
}

static ep_status mock_event_wait(ep_event *event, int timeout_ms)
{
    (void)event;
    mock.event_timeout_ms = timeout_ms;
    return count_call();
}

static ep_status mock_event_query(const ep_event *event, int *ret_done)
{
    (void)event;
    *ret_done = 1;
    return count_call();
}

static void mock_event_free(ep_event *event)
{
    free(event);
}

static ep_status mock_ll_open(ep_ll *ll)
{
    (void)ll;
    return count_call();
}

static void mock_ll_close(ep_ll *ll)
{
    (void)ll;
}

static ep_status mock_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream)
{
    (void)ll;
    mock.stream = stream;
    mock.ll_number = number;
    mock.ll_topk = args->topk;
    mock.ll_dispatch = *args;
    return count_call();
}

static ep_status mock_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream)
{
    (void)ll;
    mock.stream = stream;
    mock.ll_number = args->call;
    mock.ll_topk = args->topk;
    return count_call();
}

static ep_status mock_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream)
{
    (void)ll;
    mock.stream = stream;
    mock.ll_number = call;
    return count_call();
}

static ep_status mock_ll_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    (void)ll;
    EP_TRY(count_call());
    *ret_buffer = &mock;
    return EP_OK;
}

static ep_status mock_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    (void)ll;
    (void)ret_masked;
    return count_call();
}

const struct ep_backend_ops mock_backend_empty = {.abi = EP_BACKEND_ABI, .name = "empty"};

const struct ep_backend_ops ep_backend_host = {
    .abi = EP_BACKEND_ABI,
    .name = "host",
    .comm_open = mock_comm_open,
    .comm_close = mock_comm_close,
    .comm_bytes = mock_comm_bytes,
    .barrier = mock_barrier,
    .allgather = mock_allgather,
    .abort = mock_abort,
    .alloc = mock_alloc,
    .free = mock_free,
    .plan_open = mock_plan_open,
    .plan_close = mock_plan_close,
    .plan_sources = mock_plan_sources,
    .plan_layout = mock_plan_layout,
    .dispatch = mock_dispatch,
    .combine = mock_combine,
    .event_new = mock_event_new,
    .stream_sync = mock_stream_sync,
    .stream_wait = mock_stream_wait,
    .stream_call = mock_stream_call,
    .event_record = mock_event_record,
    .event_signal = mock_event_signal,
    .event_wait = mock_event_wait,
    .event_query = mock_event_query,
    .event_free = mock_event_free,
    .ll_open = mock_ll_open,
    .ll_close = mock_ll_close,
    .ll_dispatch = mock_ll_dispatch,
    .ll_combine = mock_ll_combine,
    .ll_finish = mock_ll_finish,
    .ll_combine_buffer = mock_ll_combine_buffer,
    .ll_get_mask = mock_ll_get_mask,
};
