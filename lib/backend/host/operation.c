/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a node begin and end an operation together. */
#include "backend/host/host.h"

#include <stddef.h>

/* The record of a rank as it was published, and whether its buffers hold what this rank's plan will do with them. */
static ep_status check_record(struct host_comm *host, const ep_plan *plan, int rank, const struct host_record *mine)
{
    const struct host_plan *inner = plan->impl;
    struct host_record *record = &host->records[rank - host->first];

    if (rank == host->comm->rank) {
        *record = *mine;
        return EP_OK;
    }
    host_read_shared(record, &host->peers[rank].control->record[host->operation & 1], sizeof(*record));
    if (record->phase == mine->phase && record->plan_number == mine->plan_number &&
        record->rows != inner->rows_on[rank])
        return host_raise_damage(host, rank, (enum host_phase)mine->phase, "the number of rows that it receives",
                                 record->rows);
    return EP_OK;
}

ep_status host_enter(struct host_comm *host, const ep_plan *plan, const struct host_record *record)
{
    static const struct {
        const char *name;
        size_t at;
    } fields[] = {
        {"the plan (in order of creation)", offsetof(struct host_record, plan_number)},
        {"dtype", offsetof(struct host_record, dtype)},
        {"hidden", offsetof(struct host_record, hidden)},
        {"scale_type", offsetof(struct host_record, scale_type)},
        {"scale_words", offsetof(struct host_record, scale_words)},
        {"the set of outputs", offsetof(struct host_record, outputs)},
    };
    enum host_phase phase = (enum host_phase)record->phase;
    uint64_t operation = ++host->operation;

    host->control->record[operation & 1] = *record;
    atomic_store_explicit(&host->control->entered, operation, memory_order_release);
    host_ring_node(host);
    EP_TRY(host_wait_node(host, offsetof(struct host_control, entered), operation, phase));
    for (int rank = host->first; rank < host->first + host->nlocal; rank++) {
        const struct host_record *other = &host->records[rank - host->first];

        EP_TRY(check_record(host, plan, rank, record));
        if (other->phase != record->phase)
            return host_raise_own(
                host,
                ep_fail(EP_E_MISMATCH, "ranks are in different calls: rank %d in \"%s\", rank %d in \"%s\"",
                        host->comm->rank, host_phase_name(phase), rank, host_phase_name((enum host_phase)other->phase)),
                rank, phase);
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            int32_t mine = *(const int32_t *)((const char *)record + fields[i].at);
            int32_t theirs = *(const int32_t *)((const char *)other + fields[i].at);

            if (mine != theirs)
                return host_raise_own(host,
                                      ep_fail(EP_E_MISMATCH, "ranks disagree: %s is %d on rank %d and %d on rank %d",
                                              fields[i].name, mine, host->comm->rank, theirs, rank),
                                      rank, phase);
        }
    }
    return EP_OK;
}

ep_status host_leave(struct host_comm *host, enum host_phase phase)
{
    ep_rows_stream_end();
    atomic_store_explicit(&host->control->finished, host->operation, memory_order_release);
    host_ring_node(host);
    return host_wait_node(host, offsetof(struct host_control, finished), host->operation, phase);
}
