/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing the low-latency layout: see lowlatency.c. */
#include "backend/host/lowlatency.h"

#include <stdlib.h>

static size_t align16(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

static void lay_out(const ep_ll *ll, struct host_ll *inner)
{
    size_t hidden = (size_t)ll->config.hidden, n_ranges = (size_t)ll->n_local * (size_t)ll->comm->nranks;

    inner->scales_at = align16((size_t)ll->config.topk * sizeof(struct ll_choice));
    inner->row_at = align16(inner->scales_at + hidden / EP_SCALE_BLOCK * sizeof(float));
    inner->layout = (struct ll_wire){.nranks = ll->comm->nranks,
                                     .segment_tokens = ll->config.max_tokens,
                                     .hidden = ll->config.hidden,
                                     .topk = ll->config.topk,
                                     .n_counts = 2, /* format, max_tokens */
                                     .slot_bytes = (int64_t)(inner->row_at + align16(2 * hidden))};
    inner->shared_at = ll_wire_lay_out(&inner->layout, sizeof(struct ll_wire_segment), 1);
    /* Rows arrive from other nodes only. */
    if (ll->comm->nnodes == 1)
        inner->shared_at = (size_t)inner->layout.rows_at;
    inner->ranges_at = inner->shared_at + align16(sizeof(struct ll_shared));
    /* At the begin of a page: what precedes them is reserved at once. */
    inner->buffers_at = ep_shm_mapped_bytes(inner->ranges_at + 2 * n_ranges * sizeof(struct ll_range));
    inner->segment_bytes = inner->buffers_at + 2 * ll_combine_bytes(ll, ll->config.max_tokens);
}

static ep_status alloc_segment(const ep_ll *ll, struct host_ll *inner)
{
    EP_TRY(ep_group_alloc_sparse(inner->group, inner->segment_bytes, &inner->segment));
    inner->layout.landing = inner->segment;
    for (size_t i = 0; i < 2; i++)
        inner->combine_buffer[i] =
            (char *)inner->segment + inner->buffers_at + i * ll_combine_bytes(ll, ll->config.max_tokens);
    return ep_group_reserve(inner->group, inner->segment, 0, inner->buffers_at);
}

static ep_status attach_segment(ep_ll *ll, struct host_ll *inner, int rank)
{
    if (ll_is_remote(ll, rank) || !ep_comm_has(ll->comm, rank))
        return EP_OK;
    if (rank == ll->comm->rank) {
        inner->peer[rank] = inner->segment;
        return EP_OK;
    }
    EP_TRY(ep_group_attach_slot(inner->group, rank, &inner->address[rank], inner->segment_bytes, &inner->shm[rank]));
    inner->peer[rank] = inner->shm[rank].base;
    return EP_OK;
}

/* `inner` NULL: this rank has failed already, and takes part to report it. */
static ep_status exchange_segments(ep_ll *ll, struct host_ll *inner, ep_status mine)
{
    struct ep_group_address address = {.slot = EP_GROUP_UNMAPPED}, all[EP_MAX_RANKS] = {{.slot = EP_GROUP_UNMAPPED}};
    ep_status status;

    if (inner && mine == EP_OK)
        ep_group_find(inner->group, inner->segment, 1, &address);
    status = ep_group_ll_exchange(ll, mine, &address, all);
    for (int rank = 0; inner && status == EP_OK && rank < ll->comm->nranks; rank++) {
        inner->address[rank] = all[rank];
        inner->masked[rank] = !ep_comm_has(ll->comm, rank);
        status = attach_segment(ll, inner, rank);
        /* Names the rank that has exited as the cause, not this one. */
        if (ep_status_is_fatal(status))
            status = ep_group_set_own_failure(inner->group, status, rank, EP_GROUP_GATHER);
    }
    /* No rank frees its segment before all have mapped it, and creation fails on all ranks or on none. */
    return ep_group_agree_within(ll->comm, ep_ll_open_call(ll), status);
}

/* Zeroed, and freed by free_inner(). Sets inner->no_memory on failure. */
static void *add_array(struct host_ll *inner, size_t n, size_t each)
{
    void *array = inner->counts_only ? NULL : calloc(n, each);

    inner->bytes += (int64_t)(n * each);
    inner->no_memory |= !array;
    inner->arrays[inner->n_arrays++] = array;
    return array;
}

static void add_arrays(const ep_ll *ll, struct host_ll *inner)
{
    size_t nranks = (size_t)ll->comm->nranks, local = (size_t)ll->n_local, max_tokens = (size_t)ll->config.max_tokens;
    size_t topk = (size_t)ll->config.topk, hidden = (size_t)ll->config.hidden, blocks = hidden / EP_SCALE_BLOCK;

    inner->peer = add_array(inner, nranks, sizeof(*inner->peer));
    inner->shm = add_array(inner, nranks, sizeof(*inner->shm));
    inner->address = add_array(inner, nranks, sizeof(*inner->address));
    inner->masked = add_array(inner, nranks, sizeof(*inner->masked));
    for (int i = 0; i < 2; i++) {
        inner->index[i] = add_array(inner, max_tokens * topk, sizeof(*inner->index[i]));
        inner->combine[i].index = add_array(inner, max_tokens * topk, sizeof(*inner->combine[i].index));
        inner->reserved[i] = add_array(inner, local, sizeof(*inner->reserved[i]));
        inner->ranges[i] = add_array(inner, local * nranks, sizeof(*inner->ranges[i]));
        inner->choices[i] = add_array(inner, nranks * max_tokens * topk, sizeof(*inner->choices[i]));
    }
    inner->next_index = add_array(inner, max_tokens * topk, sizeof(*inner->next_index));
    inner->seen = add_array(inner, local * nranks, sizeof(*inner->seen));
    inner->row = add_array(inner, hidden, sizeof(*inner->row));
    inner->sums = add_array(inner, topk * hidden, sizeof(*inner->sums));
    inner->scales = add_array(inner, 2 * blocks, sizeof(*inner->scales)); /* nvfp4 has a byte for 16 elements */
}

static void free_inner(struct host_ll *inner, int nranks)
{
    for (int rank = 0; inner->shm && rank < nranks; rank++)
        ep_shm_done(&inner->shm[rank]);
    ep_group_free_internal(inner->group, inner->segment);
    for (int i = 0; i < inner->n_arrays; i++)
        free(inner->arrays[i]);
    free(inner);
}

ep_status host_ll_open(ep_ll *ll)
{
    struct host_ll *inner = calloc(1, sizeof(*inner));
    ep_status status = EP_OK;

    if (!inner)
        return exchange_segments(ll, NULL, ep_fail(EP_E_MEMORY, "%s: no memory", ep_ll_open_call(ll)));
    inner->group = ep_group_of(ll->comm);
    ll->impl = inner;
    lay_out(ll, inner);
    add_arrays(ll, inner);
    if (inner->no_memory)
        status = ep_fail(EP_E_MEMORY, "%s: no memory for %lld bytes", ep_ll_open_call(ll), (long long)inner->bytes);
    if (status == EP_OK)
        status = alloc_segment(ll, inner);
    if (status == EP_OK && ll->comm->nnodes > 1)
        status = ll_net_prepare(ll);
    status = exchange_segments(ll, inner, status);
    if (status == EP_OK && inner->net)
        status = ep_group_agree_within(ll->comm, ep_ll_open_call(ll), ll_net_open(ll));
    if (status != EP_OK) {
        ll_net_close(ll);
        free_inner(inner, ll->comm->nranks);
        ll->impl = NULL;
        return status;
    }
    inner->bytes += ll->comm->nnodes > 1 ? ll_net_bytes(ll) : 0;
    inner->group->object_bytes += inner->bytes;
    return EP_OK;
}

/* No graph refers to it: a new one takes its place. */
ep_status host_ll_renew(ep_ll *ll)
{
    host_ll_close(ll);
    return host_ll_open(ll);
}

int64_t host_ll_bytes(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes)
{
    ep_ll ll = {.comm = (ep_comm *)comm, .config = *config, .n_local = config->n_experts / comm->nranks};
    struct host_ll inner = {0};

    lay_out(&ll, &inner);
    inner.counts_only = true;
    add_arrays(&ll, &inner);
    ll.impl = &inner;
    *ret_combine_bytes = (int64_t)(inner.segment_bytes - inner.buffers_at);
    return (int64_t)inner.buffers_at + inner.bytes + (comm->nnodes > 1 ? ll_net_bytes(&ll) : 0);
}

/* Waits until a peer of this node has read the input of the last combines, or exits. Returns a failure of the group. */
static ep_status wait_for_reader(ep_ll *ll, int rank)
{
    const struct host_ll *inner = ll->impl;
    uint64_t last = inner->combine[ll->combines & 1].serial;
    struct ep_group_wait wait;
    ep_status status = EP_OK;

    ep_group_wait_begin(&wait, inner->group, EP_GROUP_LL_DONE);
    wait.tolerant = true; /* an absent peer is not a failure of this rank, which is leaving */
    while (!inner->masked[rank] && status == EP_OK) {
        uint32_t seen = ep_group_doorbell(inner->group);

        if (ll_load(ll, rank, LL_WORD(completed)) >= last || ll_wait_step(ll, &wait, seen, rank) != EP_OK)
            break;
        status = ep_comm_record(ll->comm, ep_group_check(inner->group));
    }
    ep_group_wait_end(&wait);
    return status;
}

void host_ll_close(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    struct ep_group *group;
    ep_status status;

    if (!inner)
        return;
    group = inner->group;
    status = ep_group_drain(group);
    /* Those who read and wrote these segments have left. */
    if (ll->generation != ll->comm->generation)
        goto free;
    /* This rank will read no more rows: peers that leave, too, need not wait for it. */
    for (int rank = group->first; rank < group->first + group->nlocal; rank++)
        ll_publish_to(ll, rank, LL_WORD(completed), inner->serial);
    /* Ranks of other nodes were sent their rows. */
    for (int rank = group->first; status == EP_OK && rank < group->first + group->nlocal; rank++)
        status = rank == ll->comm->rank ? EP_OK : wait_for_reader(ll, rank);
free:
    group->object_bytes -= inner->bytes;
    ll_net_close(ll);
    free_inner(inner, ll->comm->nranks);
    ll->impl = NULL;
}
