/* SPDX-License-Identifier: Apache-2.0 */
/* Barrier and all-gather of a communicator: an exchange behind those of the plans that are under way. */
#include "group/group.h"

static ep_status exchange_now(struct host_comm *host, enum host_phase phase, const void *row, size_t bytes,
                              uint64_t *ret_number)
{
    EP_TRY(host_plan_complete(host, NULL));
    EP_TRY(host_exchange_start(host, phase, row, bytes, ret_number));
    return host_exchange_complete(host, *ret_number, phase);
}

static ep_status run_barrier(void *arguments)
{
    struct host_comm *host = *(struct host_comm **)arguments;
    uint64_t number;

    EP_TRY(exchange_now(host, HOST_BARRIER, NULL, 0, &number));
    host_exchange_release(host, number);
    return EP_OK;
}

ep_status host_barrier(ep_comm *comm)
{
    struct host_comm *host = host_of(comm);

    return host_run(host, run_barrier, &host);
}

ep_status host_barrier_on(ep_comm *comm, ep_stream stream)
{
    struct host_comm *host = host_of(comm);

    return host_submit(host, stream, run_barrier, &host, sizeof(host));
}

ep_status host_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all)
{
    struct host_comm *host = host_of(comm);
    uint64_t number;

    EP_TRY(host_drain(host));
    EP_TRY(exchange_now(host, HOST_GATHER, mine, bytes, &number));
    for (int rank = 0; bytes && rank < comm->nranks; rank++)
        host_exchange_read(host, number, rank, (char *)ret_all + (size_t)rank * bytes, bytes);
    host_exchange_release(host, number);
    return EP_OK;
}

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)timeout_ms;
    return host_allgather(context, mine, bytes, ret_all);
}

ep_boot host_boot(ep_comm *comm)
{
    return (ep_boot){
        .size = sizeof(ep_boot), .rank = comm->rank, .nranks = comm->nranks, .allgather = allgather, .context = comm};
}
