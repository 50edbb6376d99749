/* SPDX-License-Identifier: Apache-2.0 */
/* Barrier and all-gather of a communicator: an exchange after those of the pending plans. */
#include "group/group.h"

static ep_status exchange_now(struct ep_group *group, enum ep_group_phase phase, const void *row, size_t bytes,
                              uint64_t *ret_number)
{
    EP_TRY(ep_group_plan_complete(group, NULL));
    EP_TRY(ep_group_exchange_start(group, phase, row, bytes, ret_number));
    return ep_group_exchange_complete(group, *ret_number, phase, NULL);
}

static ep_status run_barrier(void *arguments)
{
    struct ep_group *group = *(struct ep_group **)arguments;
    uint64_t number;

    EP_TRY(exchange_now(group, EP_GROUP_BARRIER, NULL, 0, &number));
    ep_group_exchange_release(group, number);
    return EP_OK;
}

ep_status ep_group_barrier(ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);

    return ep_group_run(group, run_barrier, &group);
}

ep_status ep_group_barrier_on(ep_comm *comm, ep_stream stream)
{
    struct ep_group *group = ep_group_of(comm);

    return ep_group_submit(group, stream, run_barrier, &group, sizeof(group));
}

ep_status ep_group_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all)
{
    struct ep_group *group = ep_group_of(comm);
    uint64_t number;

    EP_TRY(ep_group_drain(group));
    EP_TRY(exchange_now(group, EP_GROUP_GATHER, mine, bytes, &number));
    for (int rank = 0; bytes && rank < comm->nranks; rank++)
        ep_group_exchange_read(group, number, rank, (char *)ret_all + (size_t)rank * bytes, bytes);
    ep_group_exchange_release(group, number);
    return EP_OK;
}

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)timeout_ms;
    return ep_group_allgather(context, mine, bytes, ret_all);
}

ep_boot ep_group_boot(ep_comm *comm)
{
    return (ep_boot){
        .size = sizeof(ep_boot), .rank = comm->rank, .nranks = comm->nranks, .allgather = allgather, .context = comm};
}
