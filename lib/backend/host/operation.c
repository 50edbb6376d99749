/* SPDX-License-Identifier: Apache-2.0 */
/* Collective begin and end of an operation on a node. */
#include "backend/host/host.h"

#include "group/failure.h"
#include "group/memory.h"
#include "group/peers.h"
#include "group/plan.h"
#include "group/wait.h"

#include <stddef.h>

ep_status host_publish(struct ep_group *group, const char *call, int which, bool in_place, size_t bytes, void **buffer,
                       struct ep_group_address *ret_address)
{
    ret_address->slot = EP_GROUP_UNMAPPED;
    if (!*buffer || !bytes || (in_place && ep_group_find(group, *buffer, bytes, ret_address)))
        return EP_OK;
    EP_TRY(ep_group_stage(group, which, bytes, buffer));
    if (!ep_group_find(group, *buffer, bytes, ret_address))
        return ep_fail(EP_E_STATE, "%s: internal error: the staging buffer of %zu bytes is not in symmetric memory",
                       call, bytes);
    return EP_OK;
}

/*
 * Copies the op descriptor of a rank, and checks that its buffers hold the rows that this rank's plan will place there.
 */
static ep_status check_descriptor(struct ep_group *group, const ep_plan *plan, int rank,
                                  const struct ep_group_descriptor *mine)
{
    const struct ep_group_plan *inner = plan->impl;
    struct ep_group_descriptor *descriptor = &group->descriptors[rank - group->first];

    if (rank == group->comm->rank) {
        *descriptor = *mine;
        return EP_OK;
    }
    ep_group_read_shared(descriptor, &group->peers[rank].control->descriptor[group->operation & 1],
                         sizeof(*descriptor));
    if (descriptor->phase == mine->phase && descriptor->plan_number == mine->plan_number &&
        descriptor->rows != inner->rows_on[rank])
        return ep_group_fail_damaged(group, rank, (enum ep_group_phase)mine->phase,
                                     "the number of rows that it receives", descriptor->rows);
    return EP_OK;
}

ep_status host_op_begin(struct ep_group *group, const ep_plan *plan, const struct ep_group_descriptor *descriptor)
{
    static const struct ep_group_field fields[] = {
        {"the plan (in order of creation)", offsetof(struct ep_group_descriptor, plan_number)},
        {"dtype", offsetof(struct ep_group_descriptor, dtype)},
        {"hidden", offsetof(struct ep_group_descriptor, hidden)},
        {"scale_type", offsetof(struct ep_group_descriptor, scale_type)},
        {"scale_words", offsetof(struct ep_group_descriptor, scale_words)},
    };
    enum ep_group_phase phase = (enum ep_group_phase)descriptor->phase;
    uint64_t operation = ++group->operation;

    ep_group_unmap_stale(group);
    group->control->descriptor[operation & 1] = *descriptor;
    atomic_store_explicit(&group->control->op_begun, operation, memory_order_release);
    ep_group_ring_node(group);
    EP_TRY(ep_group_wait_node(group, offsetof(struct ep_group_control, op_begun), operation, phase));
    for (int rank = group->first; rank < group->first + group->nlocal; rank++) {
        const struct ep_group_descriptor *other = &group->descriptors[rank - group->first];
        int me = group->comm->rank;
        ep_status status;

        if (!ep_comm_has(group->comm, rank))
            continue;
        EP_TRY(check_descriptor(group, plan, rank, descriptor));
        if (other->phase != descriptor->phase)
            status = ep_group_fail_calls((uint32_t)phase, me, (uint32_t)other->phase, rank);
        else
            status = ep_group_compare("", fields, sizeof(fields) / sizeof(fields[0]), descriptor, me, other, rank);
        if (status == EP_OK && other->outputs != descriptor->outputs)
            status = ep_group_fail_outputs((uint32_t)descriptor->outputs, me, (uint32_t)other->outputs, rank);
        if (status != EP_OK)
            return ep_group_set_own_failure(group, status, rank, phase);
    }
    return EP_OK;
}

ep_status host_op_map(struct ep_group *group, enum ep_group_phase phase, const size_t row_bytes[EP_GROUP_AT_COUNT],
                      unsigned char *(*ret_at)[EP_GROUP_AT_COUNT])
{
    for (int local = 0; local < group->nlocal; local++) {
        const struct ep_group_descriptor *descriptor = &group->descriptors[local];
        int rank = group->first + local;

        for (int i = 0; ep_comm_has(group->comm, rank) && i < EP_GROUP_AT_COUNT; i++) {
            void *address;
            ep_status status =
                ep_group_map(group, rank, &descriptor->at[i], (size_t)descriptor->rows * row_bytes[i], &address);

            if (status != EP_OK)
                return ep_group_set_own_failure(group, status, rank, phase);
            ret_at[local][i] = address;
        }
    }
    return EP_OK;
}

ep_status host_op_end(struct ep_group *group, enum ep_group_phase phase)
{
    ep_rows_stream_end();
    atomic_store_explicit(&group->control->op_ended, group->operation, memory_order_release);
    ep_group_ring_node(group);
    return ep_group_wait_node(group, offsetof(struct ep_group_control, op_ended), group->operation, phase);
}

void host_op_set_stats(const ep_plan *plan, uint64_t row_bytes, ep_stats *stats)
{
    const struct ep_group_route *own = &ep_group_plan_of(plan)->own;
    int local = ep_group_of(plan->comm)->local;

    for (int64_t i = 0; i < own->n_entries; i++)
        (*(own->entry[i].local == local ? &stats->rows_self : &stats->rows_node))++;
    stats->bytes_self = stats->rows_self * row_bytes;
    stats->bytes_node = stats->rows_node * row_bytes;
    ep_comm_set_stats(plan->comm, stats);
}
