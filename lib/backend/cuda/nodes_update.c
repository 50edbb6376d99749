/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Updates of plans between nodes. A plan of fixed capacity is first made on the host, like every plan between nodes.
 * Its first update gives it lists that the devices write, and from then on the host does not know its counts. A plan
 * made in a capture has such lists from the beginning. The devices write what the proxy needs, the size of the lists
 * for each node, into pinned memory.
 */
#include "backend/cuda/plan.h"
#include "group/failure.h"

#include <stdlib.h>
#include <string.h>

static ep_status fail_memory(void)
{
    return ep_fail(EP_E_MEMORY, "plan: no memory for routes between nodes that the device writes");
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static size_t slice_words(const ep_plan *plan)
{
    return 1 + (size_t)plan->comm->ranks_per_node * (1 + (size_t)plan->info.n_local_experts);
}

static size_t summary_words(const ep_plan *plan)
{
    return CUDA_SUMMARY_STARTS + (size_t)plan->comm->ranks_per_node;
}

/* Capacity of the lists in tokens. A capacity of 0 would mean lists that do not change, so it is at least 1. */
static ep_status size_lists(const ep_plan *plan, struct cuda_lists *lists)
{
    const struct ep_group *group = ep_group_of(plan->comm);
    int64_t net = (int64_t)ep_plan_most_tokens(plan) * cuda_remote_width(plan), rails = 0;
    int32_t rail_node_capacity = 1;

    for (int node = 0; node < plan->comm->nnodes; node++) {
        int rank = ep_group_rail(group, node);
        /* A rank that is absent may come, with as many: programs use one number for all. */
        int32_t most =
            ep_comm_has(plan->comm, rank) ? ep_group_plan_of(plan)->max_tokens[rank] : ep_plan_most_tokens(plan);

        if (node == plan->comm->node)
            continue;
        rails += most;
        rail_node_capacity = most > rail_node_capacity ? most : rail_node_capacity;
    }
    if (net >= INT32_MAX / 2 || rails * cuda_plan_of(plan)->route.width >= INT32_MAX / 2)
        return ep_fail(
            EP_E_UNSUPPORTED,
            "plan: max_tokens of %d here, and of %lld on the rail peers, is too large for updates on the device "
            "between %d nodes: reduce max_tokens",
            ep_plan_most_tokens(plan), (long long)rails, plan->comm->nnodes);
    lists->net.capacity = net ? (int32_t)net : 1;
    lists->net.node_capacity = ep_plan_most_tokens(plan) ? ep_plan_most_tokens(plan) : 1;
    lists->rails.capacity = rails ? (int32_t)rails : 1;
    lists->rails.node_capacity = rail_node_capacity;
    return EP_OK;
}

/* Lays out the device memory; returns its size in bytes. */
static size_t lay_out(const ep_plan *plan, char *memory, const struct cuda_lists *lists, struct cuda_nodes_update *u)
{
    size_t nnodes = (size_t)plan->comm->nnodes, nranks = (size_t)plan->comm->nranks,
           n = (size_t)ep_plan_most_tokens(plan);
    size_t topk = (size_t)plan->args.topk, width = (size_t)cuda_plan_of(plan)->route.width, word = sizeof(int32_t);
    size_t n_local = (size_t)plan->info.n_local_experts, nlocal = (size_t)plan->comm->ranks_per_node, at = 0;

    u->totals = cuda_carve(memory, &at, cuda_update_totals((int)nnodes, (int)nranks, plan->args.n_experts), word);
    u->slice = cuda_carve(memory, &at, nnodes * slice_words(plan), word);
    u->summary = cuda_carve(memory, &at, nnodes * summary_words(plan), word);
    u->base = cuda_carve(memory, &at, nnodes * nlocal * (plan->args.flags & EP_PLAN_EXPANDED ? n_local : 1), word);
    u->first = cuda_carve(memory, &at, nranks + 1, sizeof(*u->first));
    u->start = cuda_carve(memory, &at, nranks, word);
    u->rail_start = cuda_carve(memory, &at, nranks, word);
    u->prefix = cuda_carve(memory, &at, nranks * nlocal, word);
    u->counts = cuda_carve(memory, &at, 1, sizeof(*u->counts));
    u->expert_start = cuda_carve(memory, &at, n_local + 1, word);
    u->expert_exact = cuda_carve(memory, &at, n_local, word);
    u->index = cuda_carve(memory, &at, n * topk, word);
    u->count = cuda_carve(memory, &at, n, word);
    u->entry = cuda_carve(memory, &at, n * width, sizeof(*u->entry));
    cuda_lists_lay_out(plan, (size_t)lists->net.capacity, (size_t)lists->rails.capacity, n, memory, &at, &u->list);
    return at;
}

/* Lays out the pinned copies. */
static size_t lay_out_pinned(const ep_plan *plan, char *memory, const struct cuda_lists *lists,
                             struct cuda_list_memory *l)
{
    size_t nnodes = (size_t)plan->comm->nnodes, at = 0;

    l->net = cuda_carve(memory, &at, nnodes, sizeof(*l->net));
    l->rail = cuda_carve(memory, &at, nnodes, sizeof(*l->rail));
    l->net_units = cuda_carve(memory, &at, (size_t)lists->net.capacity + nnodes, sizeof(int32_t));
    l->rail_units = cuda_carve(memory, &at, (size_t)lists->rails.capacity + nnodes, sizeof(int32_t));
    return at;
}

/* Sets what no update changes. */
static void describe(const ep_plan *plan, const struct cuda_lists *lists, struct cuda_nodes_update *u)
{
    const struct cuda_route *route = &cuda_plan_of(plan)->route;
    const ep_comm *comm = plan->comm;

    u->words = (struct cuda_chunks){
        .nnodes = comm->nnodes, .node = comm->node, .max_per_node = 1, .tokens = 1, .phase = EP_GROUP_PLAN_COUNTS};
    u->idx64 = route->idx64;
    u->expanded = route->expanded;
    u->bf16_sums = comm->config.partial_type == EP_BF16;
    u->distinct = cuda_checks_distinct(comm);
    u->drops = cuda_drops_absent(comm);
    u->topk = plan->args.topk;
    u->n_experts = plan->args.n_experts;
    u->n_local_experts = plan->info.n_local_experts;
    u->width = route->width;
    u->remote_width = cuda_remote_width(plan);
    u->rail_capacity = lists->rails.capacity;
    u->rail_node_capacity = lists->rails.node_capacity;
    u->alignment = plan->args.expert_alignment;
    u->capacity = (int32_t)(plan->args.max_recv_tokens < INT32_MAX ? plan->args.max_recv_tokens : INT32_MAX);
    u->desc = cuda_update_desc(plan, (int)cuda_plan_word(plan));
}

/* What operations read of the plan's memory that is not in the lists. */
static void point_to(const struct cuda_nodes_update *u, struct cuda_plan *device)
{
    device->expert_start = u->expert_start;
    device->expert_exact = u->expert_exact;
    device->route.entry = u->entry;
    device->route.count = u->count;
    device->route.index = u->index;
    device->route.counts = u->counts;
}

/*
 * Writes what the host has computed: for operations in a graph, which must follow later updates. The copy to pinned
 * memory is immediate and not in stream order, so the proxy must not still read it for operations of another plan.
 */
static ep_status fill_from_host(struct cuda_comm *cuda, const ep_plan *plan, struct cuda_lists *lists,
                                const struct cuda_list_memory *pinned)
{
    const struct ep_group_plan *inner = ep_group_plan_of(plan);
    size_t nranks = (size_t)plan->comm->nranks, nlocal = (size_t)plan->comm->ranks_per_node, word = sizeof(int32_t);
    size_t nnodes = (size_t)plan->comm->nnodes, first = (size_t)cuda->group.first, me = (size_t)plan->comm->rank;
    struct cuda_plan image = *cuda_plan_of(plan);
    struct cuda_nodes_update u;
    size_t bytes = lay_out(plan, NULL, lists, &u);
    char *memory = calloc(1, bytes);
    ep_status status;

    if (!memory)
        return fail_memory();
    lay_out(plan, memory, lists, &u);
    point_to(&u, &image);
    cuda_plan_fill(cuda, plan, &image);
    lists->rows_self = lists->rows_node = lists->rows_forward = 0;
    cuda_lists_fill(plan, &u.list, lists);
    for (size_t i = 0; i < nranks * nlocal; i++)
        u.prefix[i] = inner->prefix[i / nlocal * nranks + first + i % nlocal];
    memcpy(u.first, inner->recv_from_rank, (nranks + 1) * sizeof(*u.first));
    if (me)
        memcpy(u.start, inner->prefix + (me - 1) * nranks, nranks * word);
    memcpy(pinned->net, u.list.net, nnodes * sizeof(*u.list.net));
    memcpy(pinned->rail, u.list.rail, nnodes * sizeof(*u.list.rail));
    memcpy(pinned->net_units, u.list.net_units, ((size_t)lists->net.capacity + nnodes) * word);
    memcpy(pinned->rail_units, u.list.rail_units, ((size_t)lists->rails.capacity + nnodes) * word);
    status = cuda_transfer(cuda, lists->block.memory, memory, bytes);
    free(memory);
    return status;
}

/* Makes the plan one of the members of now for kernels. */
static ep_status write_identity(struct cuda_comm *cuda, const ep_plan *plan, const struct cuda_nodes_update *u)
{
    const uint32_t identity[] = {(uint32_t)ep_group_plan_of(plan)->number, plan->comm->generation};

    return cuda_transfer(cuda, &u->counts->number, identity, sizeof(identity));
}

/* `keep_routing`: filled with the plan's present routing. */
static ep_status open_memory(struct cuda_comm *cuda, const ep_plan *plan, bool keep_routing, struct cuda_lists *lists)
{
    struct cuda_nodes_update *u = lists->update;
    const struct cuda_plan *device = cuda_plan_of(plan);
    struct cuda_list_memory host;

    EP_TRY(size_lists(plan, lists));
    /* A plan whose routing is kept gets no memory of another one. */
    EP_TRY(cuda_host_block_acquire(cuda, "ep_plan_update", CUDA_HOST_NET_COUNTS,
                                   lay_out_pinned(plan, NULL, lists, &host), device->captured, keep_routing,
                                   &lists->info));
    EP_TRY(cuda_pool_alloc(cuda, lay_out(plan, NULL, lists, u),
                           device->captured ? CUDA_BLOCK_OF_GRAPHS : CUDA_BLOCK_ANY, &lists->block));
    lay_out(plan, lists->block.memory, lists, u);
    lay_out_pinned(plan, lists->info->pinned.device, lists, &u->pinned);
    lay_out_pinned(plan, lists->info->pinned.memory, lists, &host);
    describe(plan, lists, u);
    cuda_lists_point_to(plan, &host, &u->list, lists);
    return keep_routing ? fill_from_host(cuda, plan, lists, &host) : write_identity(cuda, plan, u);
}

/* Installs the lists, which the devices write, and frees everything that depends on former counts. */
static void install_lists(struct cuda_comm *cuda, ep_plan *plan, struct cuda_lists *lists)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    struct cuda_block *stale[] = {&device->ordered, &device->metadata_counts, &device->sources};

    cuda_lists_free(cuda, device->lists);
    for (size_t i = 0; i < sizeof(stale) / sizeof(stale[0]); i++) {
        cuda_pool_free(cuda, stale[i]);
        *stale[i] = (struct cuda_block){.memory = NULL};
    }
    device->exact_counts = NULL;
    device->lists = lists;
    device->on_device = device->uploaded = true;
    device->max_tokens = ep_plan_most_tokens(plan);
    point_to(lists->update, device);
}

ep_status cuda_nodes_plan_make_lists(struct cuda_comm *cuda, ep_plan *plan, bool keep_routing)
{
    struct cuda_lists *lists = calloc(1, sizeof(*lists));
    ep_status status;

    if (!lists)
        return fail_memory();
    lists->update = calloc(1, sizeof(*lists->update));
    status = lists->update ? open_memory(cuda, plan, keep_routing, lists) : fail_memory();
    if (status == EP_OK)
        install_lists(cuda, plan, lists);
    else
        cuda_lists_free(cuda, lists);
    return status;
}

/* Before the first update. */
static ep_status make_first_lists(const struct cuda_call *call, ep_plan *plan)
{
    ep_status status = ep_group_plan_complete(&call->cuda->group, plan);
    struct cuda_route unused;

    /* Calls outside of the graph still use the present routing, and need one. */
    if (call->capture)
        return status == EP_OK ? cuda_plan_ready(call, plan, &unused) : status;
    /* An update may repair a plan that all ranks have refused. */
    return status == EP_OK || ep_group_plan_is_refused(plan) ? cuda_nodes_plan_make_lists(call->cuda, plan, false)
                                                             : status;
}

/* --- an update ---------------------------------------------------------------------------------------------------- */

static ep_status prepare_words(const struct cuda_call *call, const ep_plan *plan, size_t words, const uint32_t *desc,
                               struct cuda_net_op_args *ret_args, struct cuda_net_op **ret_op)
{
    const struct cuda_net_op_params params = {.name = "plan",
                                              .phase = EP_GROUP_PLAN_COUNTS,
                                              .desc = desc,
                                              .plan = ep_group_plan_of(plan)->number,
                                              .tokens = 1,
                                              .token_bytes = (words * sizeof(int32_t) + 15) / 16 * 16};
    struct cuda_chunks unused[2];

    return cuda_net_op_prepare(call, &params, ret_args, &unused[0], &unused[1], ret_op);
}

static ep_status prepare_lists(const struct cuda_call *call, const ep_plan *plan, struct cuda_pack *pack,
                               struct cuda_net_op **ret_op)
{
    const struct cuda_lists *lists = cuda_plan_of(plan)->lists;
    struct cuda_nodes_update *u = lists->update;
    const struct cuda_net_op_params params = {.name = "plan",
                                              .phase = EP_GROUP_PLAN_ROUTES,
                                              .desc = u->desc.words,
                                              .plan = ep_group_plan_of(plan)->number,
                                              .out = &lists->net,
                                              .in = &lists->rails,
                                              .tokens = CUDA_CHUNK_TOKENS,
                                              .token_bytes = (size_t)plan->args.topk * sizeof(int32_t)};

    *pack = (struct cuda_pack){.waits = u->waits,
                               .token = u->list.token,
                               .scales = (const uint32_t *)u->index,
                               .scale_stride_token = plan->args.topk,
                               .scale_stride_block = 1,
                               .meta = {.scale_words = plan->args.topk},
                               .blocks = call->cuda->sms};
    EP_TRY(cuda_net_op_prepare(call, &params, &u->lists, &pack->out, &u->in, ret_op));
    pack->op = u->lists;
    return EP_OK;
}

/* Prepares the three operations of an update: slices, summaries, and experts of tokens. */
static ep_status prepare_all(const struct cuda_call *call, const ep_plan *plan, struct cuda_pack *pack)
{
    struct cuda_nodes_update *u = cuda_plan_of(plan)->lists->update;
    struct cuda_net_op *op[3];
    ep_status status;
    int n = 0;

    status = prepare_words(call, plan, slice_words(plan), u->desc.words, &u->slices, &op[n]);
    if (status == EP_OK)
        status = prepare_words(call, plan, summary_words(plan), u->desc.words, &u->summaries, &op[++n]);
    if (status == EP_OK)
        status = prepare_lists(call, plan, pack, &op[++n]);
    while (status != EP_OK && n > 0)
        cuda_net_op_discard(call->cuda, op[--n]);
    return status;
}

/* Queues an update of a plan whose lists the devices write. The arrays must be accessible to the device. */
static ep_status enqueue(struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *args)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    struct cuda_nodes_update *u = device->lists->update;
    struct cuda_pack pack;

    device->lists->rows_self = device->lists->rows_node = device->lists->rows_forward = 0; /* unknown to the host */
    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &u->waits);
    u->topk_idx = args->topk_idx;
    u->mask = args->token_in_rank;
    u->mask_experts = args->tokens_per_expert;
    u->n_tokens = args->n_tokens;
    EP_TRY(prepare_all(call, plan, &pack));
    /* The peers must be notified of a failure between the launches. */
    call->queued = true;
    EP_TRY(cuda_status(cuda_launch_slices(u, call->stream), "update kernels"));
    return cuda_status(cuda_launch_lists(u, &pack, call->stream), "update kernels");
}

/* A new peer may have more tokens than graphs on the plan have room for. */
static ep_status check_room(const ep_plan *plan, const struct cuda_lists *lists)
{
    struct ep_group *group = ep_group_of(plan->comm);
    const int32_t *most = ep_group_plan_of(plan)->max_tokens; /* absent ranks: 0 */
    int64_t rails = 0;

    for (int node = 0; node < plan->comm->nnodes; node++) {
        int rank = ep_group_rail(group, node);

        rails += node == plan->comm->node ? 0 : most[rank];
        if (rails > lists->rails.capacity || (rank != plan->comm->rank && most[rank] > lists->rails.node_capacity))
            return ep_group_set_own_failure(
                group, ep_fail(EP_E_CAPACITY, "ep_plan_update: max_tokens of rank %d is larger than before", rank),
                plan->comm->rank, EP_GROUP_PLAN_COUNTS);
    }
    return EP_OK;
}

/*
 * A plan of former members becomes one of those of now, in the memory that graphs refer to: the hosts make it, in place
 * of the ep_plan_new() of new members.
 */
static ep_status renew(const struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *args)
{
    struct cuda_lists *lists = cuda_plan_of(plan)->lists;
    ep_status status = cuda_plan_make_on_host(call, plan, args, true);
    struct cuda_list_memory host;

    /* The next update repairs it, on devices: as that of new members, to which it is like any that was refused. */
    if (status != EP_OK && status == ep_group_plan_of(plan)->status)
        plan->generation = plan->comm->generation;
    EP_TRY(status);
    if (!lists || !lists->update)
        return cuda_nodes_plan_make_lists(call->cuda, plan, true);
    EP_TRY(check_room(plan, lists));
    cuda_plan_of(plan)->has_slots = false;
    describe(plan, lists, lists->update);
    lay_out_pinned(plan, lists->info->pinned.memory, lists, &host);
    return fill_from_host(call->cuda, plan, lists, &host);
}

static ep_status update(struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *args)
{
    if (plan->generation != plan->comm->generation)
        return renew(call, plan, args);
    EP_TRY(cuda_check_routing(call->cuda, "ep_plan_update", args));
    if (!cuda_plan_of(plan)->on_device)
        EP_TRY(make_first_lists(call, plan));
    else if (ep_group_plan_is_refused(plan))
        EP_TRY(call->capture ? ep_group_plan_complete(&call->cuda->group, plan)
                             : write_identity(call->cuda, plan, cuda_plan_of(plan)->lists->update));
    EP_TRY(enqueue(call, plan, args));
    ep_group_plan_of(plan)->status = EP_OK;
    return EP_OK;
}

ep_status cuda_nodes_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream)
{
    struct cuda_call call;

    EP_TRY(cuda_call_begin(cuda_of(plan->comm), stream, true, &call));
    return cuda_call_end(&call, update(&call, plan, args));
}

/* --- metadata ---------------------------------------------------------------------------------------------------- */

ep_status cuda_nodes_plan_prefix(const struct cuda_call *call, const ep_plan *plan, int32_t *prefix)
{
    size_t words = (size_t)plan->comm->nranks * (size_t)plan->comm->ranks_per_node;
    struct cuda_nodes_update u = *cuda_plan_of(plan)->lists->update;
    struct cuda_net_op *op;

    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &u.waits);
    u.all_prefix = prefix;
    /* Distinguishes this operation from an update. */
    u.desc.words[CUDA_DESC_OUTPUTS] = EP_GROUP_RANK_PREFIX;
    EP_TRY(prepare_words(call, plan, words, u.desc.words, &u.prefixes, &op));
    return cuda_net_op_end_launch(call->cuda, op, cuda_status(cuda_launch_prefix(&u, call->stream), "metadata kernel"));
}

/* --- plans that are made in a capture ---------------------------------------------------------------------------- */

static ep_status new_captured(struct cuda_comm *cuda, ep_plan *plan)
{
    struct cuda_plan *device;

    EP_TRY(cuda_plan_new_device(plan));
    device = cuda_plan_of(plan);
    device->captured = true;
    device->route = cuda_route_shape(plan);
    return cuda_nodes_plan_make_lists(cuda, plan, false);
}

ep_status cuda_nodes_plan_capture(struct cuda_call *call, ep_plan *plan, const ep_plan_args *args)
{
    const ep_plan_update_args routing = cuda_routing_of(args);
    ep_status status;

    EP_TRY(cuda_check_routing(call->cuda, "ep_plan_new", &routing));
    /* The exchange tells each host the capacity that the lists need. */
    EP_TRY(ep_group_plan_exchange_sizes(plan));
    status = new_captured(call->cuda, plan);
    if (status == EP_OK)
        status = enqueue(call, plan, &routing);
    if (status == EP_OK)
        return EP_OK;
    cuda_plan_free_device(call->cuda, cuda_plan_of(plan));
    ep_group_plan_close(plan);
    return status;
}
