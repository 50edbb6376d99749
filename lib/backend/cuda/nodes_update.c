/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Updates of plans between nodes. A plan of fixed capacity is made on the host, as all are there; its first update
 * gives it lists that the devices write, and from then on the host knows no counts of it. One that is made in a capture
 * has them from the beginning. What the proxy has to know, how much goes to each node, the devices write into pinned
 * memory.
 */
#include "backend/cuda/nodes_update.h"

#include "backend/cuda/lists.h"
#include "backend/cuda/proxy.h"

#include <stdlib.h>

/*
 * Pinned memory of a plan, for the next one when it goes. Kernels write it behind an exchange with all other nodes,
 * which the proxy takes part in behind every operation that was called before: so it never reads what is of a later
 * plan. As device memory (struct cuda_block), that of plans made in captures is for such plans alone.
 */
struct cuda_net_facts {
    struct cuda_net_facts *next;
    char *memory, *device;
    size_t bytes;
    bool used, captured;
};

struct cuda_net_update {
    struct cuda_nodes_update u;
    struct cuda_net_facts *facts;
    struct cuda_rail *words; /* [nnodes] a chunk for each other node */
    int32_t net_room, net_most;
};

static ep_status fail_memory(void)
{
    return ep_fail(EP_E_MEMORY, "plan: no memory for routes between nodes that devices write");
}

/* `fresh`: not what another plan has had. */
static ep_status take_facts(struct cuda_comm *cuda, size_t bytes, bool captured, bool fresh,
                            struct cuda_net_facts **ret_facts)
{
    struct cuda_net_facts *facts = fresh ? NULL : cuda->net_facts;

    while (facts && (facts->used || facts->captured != captured || facts->bytes < bytes))
        facts = facts->next;
    if (!facts) {
        facts = calloc(1, sizeof(*facts));
        if (!facts)
            return fail_memory();
        facts->next = cuda->net_facts;
        cuda->net_facts = facts;
        facts->used = true; /* until it has memory */
        facts->captured = captured;
        CUDA_TRY(cudaHostAlloc((void **)&facts->memory, bytes, cudaHostAllocMapped));
        CUDA_TRY(cudaHostGetDevicePointer((void **)&facts->device, facts->memory, 0));
        facts->bytes = bytes;
    }
    facts->used = true;
    *ret_facts = facts;
    return EP_OK;
}

void cuda_net_facts_close(struct cuda_comm *cuda)
{
    while (cuda->net_facts) {
        struct cuda_net_facts *next = cuda->net_facts->next;

        cudaFreeHost(cuda->net_facts->memory);
        free(cuda->net_facts);
        cuda->net_facts = next;
    }
}

void cuda_net_update_free(struct cuda_net_update *update)
{
    if (!update)
        return;
    if (update->facts)
        update->facts->used = false;
    free(update->words);
    free(update);
}

void cuda_net_update_tell(const struct cuda_net_update *update, struct cuda_metadata *m)
{
    m->first = update->u.first;
    m->exact = update->u.expert_exact;
    m->start = update->u.start;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static int most_tokens(const ep_plan *plan)
{
    return plan->args.max_tokens > plan->info.n_tokens ? plan->args.max_tokens : plan->info.n_tokens;
}

static int targets_of(const ep_plan *plan)
{
    int nlocal = plan->comm->ranks_per_node;

    return plan->args.flags & EP_PLAN_EXPANDED ? nlocal * plan->info.n_local_experts : nlocal;
}

static size_t slice_words(const ep_plan *plan)
{
    return 1 + (size_t)plan->comm->ranks_per_node * (1 + (size_t)plan->info.n_local_experts);
}

static size_t verdict_words(const ep_plan *plan)
{
    return CUDA_VERDICT_STARTS + (size_t)plan->comm->ranks_per_node;
}

/* Tokens for which there is room in the lists. */
static ep_status size_lists(const ep_plan *plan, struct cuda_net_update *update)
{
    const struct ep_group *group = ep_group_of(plan->comm);
    const int32_t *most = ep_group_plan_of(plan)->max_tokens;
    int64_t net = (int64_t)most_tokens(plan) * cuda_far_width(plan), rails = 0;
    int32_t rail_most = 0;

    for (int node = 0; node < plan->comm->nnodes; node++) {
        int rank = ep_group_rail(group, node);

        if (node == plan->comm->node)
            continue;
        rails += most[rank];
        rail_most = most[rank] > rail_most ? most[rank] : rail_most;
    }
    if (net >= INT32_MAX / 2 || rails * cuda_plan_of(plan)->route.width >= INT32_MAX / 2)
        return ep_fail(EP_E_UNSUPPORTED,
                       "plan: max_tokens of %d here, and of %lld on the rail peers, are too many between %d nodes for "
                       "routing that devices exchange",
                       most_tokens(plan), (long long)rails, plan->comm->nnodes);
    /* Where there can be none, lists that change have room for one all the same. */
    update->net_room = net ? (int32_t)net : 1;
    update->net_most = most_tokens(plan) ? most_tokens(plan) : 1;
    update->u.rail_room = rails ? (int32_t)rails : 1;
    update->u.rail_most = rail_most ? rail_most : 1;
    return EP_OK;
}

static void *carve(char *memory, size_t *at, size_t n, size_t bytes)
{
    return memory + cuda_carve(at, n * bytes);
}

/* Where everything is in device memory; returns the bytes. */
static size_t lay_out(const ep_plan *plan, char *memory, const struct cuda_net_update *update,
                      struct cuda_nodes_update *u)
{
    size_t nnodes = (size_t)plan->comm->nnodes, nranks = (size_t)plan->comm->nranks, n = (size_t)most_tokens(plan);
    size_t topk = (size_t)plan->args.topk, width = (size_t)cuda_plan_of(plan)->route.width, word = sizeof(int32_t);
    size_t n_local = (size_t)plan->info.n_local_experts, rails = (size_t)update->u.rail_room, at = 0;
    size_t net = (size_t)update->net_room;

    u->totals = carve(memory, &at, cuda_update_totals((int)nnodes, (int)nranks, plan->args.n_experts), word);
    u->slice = carve(memory, &at, nnodes * slice_words(plan), word);
    u->verdict = carve(memory, &at, nnodes * verdict_words(plan), word);
    u->base = carve(memory, &at, nnodes * (size_t)targets_of(plan), word);
    u->first = carve(memory, &at, nranks + 1, sizeof(*u->first));
    u->start = carve(memory, &at, nranks, word);
    u->rail_start = carve(memory, &at, nranks, word);
    u->prefix = carve(memory, &at, nranks * (size_t)plan->comm->ranks_per_node, word);
    u->counts = carve(memory, &at, 1, sizeof(*u->counts));
    u->expert_start = carve(memory, &at, n_local + 1, word);
    u->expert_exact = carve(memory, &at, n_local, word);
    u->index = carve(memory, &at, n * topk, word);
    u->count = carve(memory, &at, n, word);
    u->entry = carve(memory, &at, n * width, sizeof(*u->entry));
    u->net = carve(memory, &at, nnodes, sizeof(*u->net));
    u->token = carve(memory, &at, net, word);
    u->net_units = carve(memory, &at, net + nnodes, word);
    u->far_count = carve(memory, &at, n, word);
    u->far = carve(memory, &at, n * (size_t)cuda_far_width(plan), sizeof(*u->far));
    u->rail = carve(memory, &at, nnodes, sizeof(*u->rail));
    u->rail_index = carve(memory, &at, rails * topk, word);
    u->rail_count = carve(memory, &at, rails, word);
    u->rail_units = carve(memory, &at, rails + nnodes, word);
    u->rail_entry = carve(memory, &at, rails * width, sizeof(*u->rail_entry));
    return at;
}

/* The pinned copies. */
static size_t lay_out_facts(const ep_plan *plan, char *memory, const struct cuda_net_update *update,
                            struct cuda_nodes_update *u)
{
    size_t nnodes = (size_t)plan->comm->nnodes, at = 0;

    u->net_pinned = carve(memory, &at, nnodes, sizeof(*u->net_pinned));
    u->rail_pinned = carve(memory, &at, nnodes, sizeof(*u->rail_pinned));
    u->net_units_pinned = carve(memory, &at, (size_t)update->net_room + nnodes, sizeof(int32_t));
    u->rail_units_pinned = carve(memory, &at, (size_t)update->u.rail_room + nnodes, sizeof(int32_t));
    return at;
}

/* What no update changes. */
static void describe(const ep_plan *plan, struct cuda_nodes_update *u)
{
    const struct cuda_route *route = &cuda_plan_of(plan)->route;
    const ep_comm *comm = plan->comm;

    u->words = (struct cuda_chunks){
        .nnodes = comm->nnodes, .node = comm->node, .most = 1, .tokens = 1, .phase = EP_GROUP_PLAN_COUNTS};
    u->idx64 = route->wide;
    u->expanded = route->expanded;
    u->bf16_sums = comm->config.partial_type == EP_BF16;
    u->topk = plan->args.topk;
    u->n_experts = plan->args.n_experts;
    u->n_local_experts = plan->info.n_local_experts;
    u->width = route->width;
    u->far_width = cuda_far_width(plan);
    u->alignment = plan->args.expert_alignment;
    u->capacity = (int32_t)(plan->args.max_recv_tokens < INT32_MAX ? plan->args.max_recv_tokens : INT32_MAX);
    u->terms = (struct cuda_terms){.kind = CUDA_DISPATCH};
    u->terms.tell[CUDA_TELL_PHASE] = EP_GROUP_PLAN_COUNTS;
    u->terms.tell[CUDA_TELL_PLAN] = (uint32_t)ep_group_plan_of(plan)->number;
}

static ep_status open_memory(struct cuda_comm *cuda, const ep_plan *plan, bool keeps, struct cuda_lists *lists)
{
    struct cuda_net_update *update = lists->update;
    struct cuda_nodes_update *u = &update->u, group;
    const struct cuda_plan *device = cuda_plan_of(plan);
    int nnodes = plan->comm->nnodes;

    EP_TRY(size_lists(plan, update));
    update->words = calloc((size_t)nnodes, sizeof(*update->words));
    if (!update->words)
        return fail_memory();
    for (int node = 0; node < nnodes; node++)
        update->words[node] = (struct cuda_rail){.first = node, .n = node != plan->comm->node};
    EP_TRY(take_facts(cuda, lay_out_facts(plan, NULL, update, u), device->captured, keeps, &update->facts));
    EP_TRY(cuda_take_for(cuda, device, lay_out(plan, NULL, update, u), &lists->block));
    lay_out(plan, lists->block.memory, update, u);
    lay_out_facts(plan, update->facts->device, update, u);
    lay_out_facts(plan, update->facts->memory, update, &group);
    describe(plan, u);
    lists->net = (struct cuda_list_side){.rail = group.net_pinned,
                                         .rail_device = u->net,
                                         .units = group.net_units_pinned,
                                         .units_device = u->net_units,
                                         .room = update->net_room,
                                         .most = update->net_most};
    lists->rails = (struct cuda_list_side){.rail = group.rail_pinned,
                                           .rail_device = u->rail,
                                           .units = group.rail_units_pinned,
                                           .units_device = u->rail_units,
                                           .room = u->rail_room,
                                           .most = u->rail_most};
    lists->token = u->token;
    lists->route = (struct cuda_rail_route){
        .entry = u->rail_entry, .count = u->rail_count, .index = u->rail_index, .width = u->width};
    lists->far_count = u->far_count;
    lists->far = u->far;
    lists->far_width = u->far_width;
    return EP_OK;
}

/* The plan's own part: routes that the devices write, and nothing that depends on former counts. */
static void hand_over(struct cuda_comm *cuda, ep_plan *plan, struct cuda_lists *lists)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    const struct cuda_nodes_update *u = &lists->update->u;
    struct cuda_block *stale[] = {&device->ordered, &device->facts_block, &device->sources};

    cuda_lists_free(cuda, plan);
    for (size_t i = 0; i < sizeof(stale) / sizeof(stale[0]); i++) {
        cuda_give(cuda, stale[i]);
        *stale[i] = (struct cuda_block){.memory = NULL};
    }
    device->exact_facts = NULL;
    device->lists = lists;
    device->fixed = device->placed = true;
    device->plan = plan;
    device->max_tokens = most_tokens(plan);
    device->expert_start = u->expert_start;
    device->expert_exact = u->expert_exact;
    device->route.entry = u->entry;
    device->route.count = u->count;
    device->route.index = u->index;
    device->route.counts = u->counts;
}

/* Gives the plan lists that the devices write. `keeps`: with the routing that it has. */
static ep_status make_lists(struct cuda_comm *cuda, ep_plan *plan, bool keeps)
{
    struct cuda_lists *lists = calloc(1, sizeof(*lists));
    ep_status status;

    if (!lists)
        return fail_memory();
    lists->update = calloc(1, sizeof(*lists->update));
    status = lists->update ? open_memory(cuda, plan, keeps, lists) : fail_memory();
    if (status == EP_OK && keeps)
        status = cuda_net_copy_plan(cuda, plan, lists, &lists->update->u);
    if (status == EP_OK) {
        hand_over(cuda, plan, lists);
        return EP_OK;
    }
    cuda_give(cuda, &lists->block);
    cuda_net_update_free(lists->update);
    free(lists);
    return status;
}

/* Before the first update. */
static ep_status change_lists(const struct cuda_call *call, ep_plan *plan)
{
    ep_status status = ep_group_plan_complete(&call->cuda->group, plan);

    /* A plan that all ranks refuse is to become of use. */
    return status == EP_OK || ep_group_plan_is_refused(plan) ? make_lists(call->cuda, plan, false) : status;
}

ep_status cuda_nodes_plan_follow(struct cuda_comm *cuda, ep_plan *plan)
{
    return make_lists(cuda, plan, true);
}

/* --- an update ---------------------------------------------------------------------------------------------------- */

/* Its three operations: slices, verdicts, and the experts of tokens. */
struct hops {
    struct cuda_hop *hop[3];
    int n;
};

static ep_status prepare_words(const struct cuda_call *call, const struct cuda_net_update *update, size_t bytes,
                               const uint32_t *tell, struct cuda_net_op *ret_op, struct cuda_hop **ret_hop)
{
    struct cuda_hop_args args = {.call = "plan",
                                 .phase = EP_GROUP_PLAN_COUNTS,
                                 .captured = call->capture != 0,
                                 .tell = tell,
                                 .slot_bytes = (bytes + 15) / 16 * 16,
                                 .out = {.rail = update->words, .tokens = 1, .token_bytes = (bytes + 15) / 16 * 16}};
    struct cuda_chunks out, in;

    args.in = args.out;
    return cuda_hop_prepare(call->cuda, &args, ret_op, &out, &in, ret_hop);
}

static ep_status prepare_lists(const struct cuda_call *call, const ep_plan *plan, struct cuda_pack *pack,
                               struct hops *hops)
{
    const struct cuda_lists *lists = cuda_plan_of(plan)->lists;
    struct cuda_nodes_update *u = &lists->update->u;
    size_t token_bytes = (size_t)plan->args.topk * sizeof(int32_t);
    struct cuda_hop_args args = {.call = "plan",
                                 .phase = EP_GROUP_PLAN_ROUTES,
                                 .captured = call->capture != 0,
                                 .tell = u->terms.tell,
                                 .slot_bytes = (CUDA_CHUNK_TOKENS * token_bytes + 63) / 64 * 64,
                                 .out = cuda_hop_side_of(&lists->net),
                                 .in = cuda_hop_side_of(&lists->rails)};

    args.out.tokens = args.in.tokens = CUDA_CHUNK_TOKENS;
    args.out.token_bytes = args.in.token_bytes = token_bytes;
    *pack = (struct cuda_pack){.waits = u->waits,
                               .token = u->token,
                               .scales = (const uint32_t *)u->index,
                               .scale_stride_token = plan->args.topk,
                               .scale_stride_block = 1,
                               .beside = {.scale_words = plan->args.topk},
                               .blocks = call->cuda->sms};
    EP_TRY(cuda_hop_prepare(call->cuda, &args, &u->lists, &pack->out, &u->in, &hops->hop[hops->n]));
    pack->op = u->lists;
    hops->n++;
    return EP_OK;
}

static ep_status check_pointers(struct cuda_comm *cuda, const char *name, const ep_plan_update_args *args)
{
    EP_TRY(cuda_check_pointer(cuda, name, "topk_idx", args->n_tokens ? args->topk_idx : NULL));
    EP_TRY(cuda_check_pointer(cuda, name, "token_in_rank", args->n_tokens ? args->token_in_rank : NULL));
    return cuda_check_pointer(cuda, name, "tokens_per_expert", args->tokens_per_expert);
}

static ep_status prepare_all(const struct cuda_call *call, const ep_plan *plan, struct cuda_pack *pack,
                             struct hops *hops)
{
    struct cuda_net_update *update = cuda_plan_of(plan)->lists->update;
    struct cuda_nodes_update *u = &update->u;

    EP_TRY(prepare_words(call, update, slice_words(plan) * sizeof(int32_t), u->terms.tell, &u->slices,
                         &hops->hop[hops->n]));
    hops->n++;
    EP_TRY(prepare_words(call, update, verdict_words(plan) * sizeof(int32_t), u->terms.tell, &u->verdicts,
                         &hops->hop[hops->n]));
    hops->n++;
    return prepare_lists(call, plan, pack, hops);
}

/* Of a plan with lists that the devices write, and of arrays that they reach. */
static ep_status queue(const struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *args, bool *ret_queued)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    struct hops hops = {.n = 0};
    struct cuda_nodes_update *u = &device->lists->update->u;
    struct cuda_pack pack;
    ep_status status;

    device->lists->rows_self = device->lists->rows_node = device->lists->rows_forward = 0; /* no host knows them */
    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &u->waits);
    u->topk_idx = plan->from_mask ? NULL : args->topk_idx;
    u->mask = args->token_in_rank;
    u->mask_experts = args->tokens_per_expert;
    u->n_tokens = device->route.n_tokens = args->n_tokens;
    status = prepare_all(call, plan, &pack, &hops);
    if (status != EP_OK) {
        for (int i = 0; i < hops.n; i++)
            cuda_hop_discard(call->cuda, hops.hop[i]);
        return status;
    }
    /* The peers must be notified of a failure between the launches. */
    *ret_queued = true;
    EP_TRY(cuda_status(cuda_launch_slices(u, call->stream), "update kernels"));
    return cuda_status(cuda_launch_lists(u, &pack, call->stream), "update kernels");
}

static ep_status update(const struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *args, bool *ret_queued)
{
    EP_TRY(check_pointers(call->cuda, "ep_plan_update", args));
    if (!cuda_plan_of(plan)->fixed)
        EP_TRY(change_lists(call, plan));
    return queue(call, plan, args, ret_queued);
}

ep_status cuda_nodes_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream)
{
    struct cuda_call call;
    bool queued = false;
    ep_status status;

    EP_TRY(cuda_call_begin(cuda_of(plan->comm), stream, true, &call));
    status = update(&call, plan, args, &queued);
    return cuda_call_end(&call, status, queued);
}

/* --- metadata ------------------------------------------------------------------------------------------------------
 */

ep_status cuda_nodes_plan_prefix(const struct cuda_call *call, const ep_plan *plan, int32_t *prefix, bool *ret_queued)
{
    const struct cuda_net_update *update = cuda_plan_of(plan)->lists->update;
    size_t words = (size_t)plan->comm->nranks * (size_t)plan->comm->ranks_per_node;
    struct cuda_nodes_update u = update->u;
    struct cuda_hop *hop;
    ep_status status;

    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &u.waits);
    u.all_prefix = prefix;
    /* No update: who is in one has another word. */
    u.terms.tell[CUDA_TELL_OUTPUTS] = EP_GROUP_RANK_PREFIX;
    EP_TRY(prepare_words(call, update, words * sizeof(int32_t), u.terms.tell, &u.prefixes, &hop));
    status = cuda_status(cuda_launch_prefix(&u, call->stream), "metadata kernel");
    if (status == EP_OK)
        *ret_queued = true;
    else
        cuda_hop_discard(call->cuda, hop);
    return status;
}

/* --- plans that are made in a capture ------------------------------------------------------------------------------
 */

static ep_status new_captured(struct cuda_comm *cuda, ep_plan *plan)
{
    struct cuda_plan *device = calloc(1, sizeof(*device));

    if (!device)
        return fail_memory();
    ep_group_plan_of(plan)->device = device;
    device->captured = true;
    device->route = cuda_route_shape(plan);
    return make_lists(cuda, plan, false);
}

ep_status cuda_nodes_plan_capture(const struct cuda_call *call, ep_plan *plan, const ep_plan_args *args,
                                  bool *ret_queued)
{
    const ep_plan_update_args routing = {.size = sizeof(routing),
                                         .topk_idx = args->topk_idx,
                                         .token_in_rank = args->token_in_rank,
                                         .tokens_per_expert = args->tokens_per_expert,
                                         .n_tokens = args->n_tokens};
    ep_status status;

    EP_TRY(check_pointers(call->cuda, "ep_plan_new", &routing));
    /* By these each host knows how much room the lists need. */
    EP_TRY(ep_group_plan_exchange_sizes(plan));
    status = new_captured(call->cuda, plan);
    if (status == EP_OK)
        status = queue(call, plan, &routing, ret_queued);
    if (status == EP_OK)
        return EP_OK;
    cuda_plan_free_device(call->cuda, plan);
    ep_group_plan_close(plan);
    return status;
}
