/* SPDX-License-Identifier: Apache-2.0 */
#include "property.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ARENA_BYTES = 8 << 20 };

void fail_check(struct run *run, const char *format, ...)
{
    char text[400];
    va_list args;

    if (run->wrong)
        return;
    run->wrong = true;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "seed %llu, rank %d of %d, operation %d (%s): %s\n", (unsigned long long)run->shape->seed,
            run->rank, run->shape->nranks, run->op,
            run->op < run->shape->n_ops ? op_name(run->shape->ops[run->op].kind) : "end", text);
}

bool passed(struct run *run, ep_status status, const char *what)
{
    if (status == EP_OK)
        return true;
    fail_check(run, "%s: %s: %s", what, ep_status_name(status), ep_last_error());
    ep_comm_abort(run->comm);
    return false;
}

/* Finishes all that is under way; then nothing uses the arenas. */
static void drain(struct run *run)
{
    int op = run->op;

    for (int i = 0; i < run->n_uses; i++)
        use_finish(&run->uses[i]);
    for (int i = 0; i < run->n_uses; i++)
        use_free(&run->uses[i]);
    run->n_uses = 0;
    for (int i = 0; i < N_ARENAS; i++)
        run->arena[i].used = 0;
    run->op = op;
}

/* --- plans ------------------------------------------------------------------------------------------------------ */

static bool same_numbers(const int32_t *a, const int32_t *b, int n)
{
    return memcmp(a, b, (size_t)n * sizeof(*a)) == 0;
}

static void check_layout_call(struct run *run, const ep_plan_args *args, const struct plan_state *state)
{
    int32_t ranks[MOST_RANKS], nodes[MOST_RANKS], *experts = calloc((size_t)run->shape->n_experts, sizeof(*experts));
    struct reference_counts counts;
    ep_layout layout = EP_LAYOUT_INIT;

    if (!experts || !reference_counts_init(&state->group, run->rank, &counts, NULL)) {
        fail_check(run, "no memory");
        goto free_experts;
    }
    layout.tokens_per_rank = ranks;
    layout.tokens_per_node = nodes;
    layout.tokens_per_expert = experts;
    if (passed(run, ep_plan_layout(run->comm, args, &layout), "ep_plan_layout") &&
        !(same_numbers(ranks, counts.tokens_per_rank, run->shape->nranks) &&
          same_numbers(nodes, counts.tokens_per_node, run->shape->nnodes) &&
          same_numbers(experts, counts.tokens_per_expert, run->shape->n_experts)))
        fail_check(run, "ep_plan_layout: wrong counts");
    reference_counts_done(&counts);
free_experts:
    free(experts);
}

static void check_info(struct run *run, const struct plan_state *state, bool known)
{
    const struct reference_layout *layout = &state->layout;
    int n_local = run->shape->n_experts / run->shape->nranks;
    ep_plan_info info = {.size = sizeof(info)};

    if (!passed(run, ep_plan_get_info(state->plan, &info), "ep_plan_get_info"))
        return;
    if (info.n_send != layout->n_send || info.n_wire != layout->n_wire || info.n_net != layout->n_net)
        fail_check(run, "n_send %lld, n_wire %lld, n_net %lld, should be %lld, %lld, %lld", (long long)info.n_send,
                   (long long)info.n_wire, (long long)info.n_net, (long long)layout->n_send, (long long)layout->n_wire,
                   (long long)layout->n_net);
    if (info.out_rows != (state->max_recv_tokens ? state->max_recv_tokens : layout->n_rows))
        fail_check(run, "out_rows is %lld", (long long)info.out_rows);
    if (!known) {
        if (info.n_recv != -1 || info.recv_per_expert || info.recv_from_rank || info.expert_start)
            fail_check(run, "counts are known before the first dispatch");
        return;
    }
    if (info.n_recv != layout->n_rows || !same_numbers(info.recv_per_expert, layout->recv_per_expert, n_local))
        fail_check(run, "n_recv is %lld, should be %lld, or recv_per_expert is wrong", (long long)info.n_recv,
                   (long long)layout->n_rows);
    else if (layout->expanded && memcmp(info.expert_start, layout->expert_start, ((size_t)n_local + 1) * 8) != 0)
        fail_check(run, "expert_start is wrong");
    else if (!layout->expanded &&
             memcmp(info.recv_from_rank, layout->recv_from_rank, ((size_t)run->shape->nranks + 1) * 8) != 0)
        fail_check(run, "recv_from_rank is wrong");
}

static void make_plan(struct run *run, const struct op *op)
{
    const struct plan_shape *shape = &run->shape->plans[op->plan];
    struct plan_state *state = &run->plans[op->plan];
    int alignment = shape->alignment ? shape->alignment : 1;
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    size_t n;
    void *index;

    if (!draw_routing(run->shape, op->plan, &state->group) ||
        !reference_layout_init(&state->group, run->rank, shape->flags & EP_PLAN_EXPANDED, alignment, &state->layout,
                               NULL)) {
        fail_check(run, "no memory");
        return;
    }
    n = (size_t)shape->n_tokens[run->rank] * (size_t)run->shape->topk;
    index = malloc(n * 8 + 8);
    for (size_t i = 0; index && i < n; i++) {
        if (shape->idx_type == EP_I64)
            ((int64_t *)index)[i] = state->group.experts[run->rank][i];
        else
            ((int32_t *)index)[i] = state->group.experts[run->rank][i];
    }
    if (shape->worst)
        state->max_recv_tokens = state->layout.n_rows + 1 + random_below(&run->local, 5);
    args.topk_idx = n ? index : NULL;
    args.idx_type = shape->idx_type;
    args.n_tokens = shape->n_tokens[run->rank];
    args.topk = run->shape->topk;
    args.n_experts = run->shape->n_experts;
    args.flags = shape->flags;
    args.expert_alignment = shape->alignment;
    args.max_recv_tokens = state->max_recv_tokens;
    if (random_below(&run->local, 3) == 0)
        check_layout_call(run, &args, state);
    if (passed(run, ep_plan_new(run->comm, &args, &state->plan), "ep_plan_new"))
        check_info(run, state, !shape->worst);
    free(index);
}

/* Counts of a worst-case plan may be known before its first operation, but not on some ranks alone. */
static void check_sources(struct run *run, const struct op *op)
{
    struct plan_state *state = &run->plans[op->plan];
    const struct reference_layout *layout = &state->layout;
    int32_t *rank = calloc((size_t)layout->n_rows + 1, sizeof(*rank));
    int32_t *token = calloc((size_t)layout->n_rows + 1, sizeof(*token));
    ep_plan_info info = {.size = sizeof(info)};
    bool known = !state->max_recv_tokens || state->used;
    ep_status status;

    drain(run);
    if (passed(run, ep_plan_get_info(state->plan, &info), "ep_plan_get_info"))
        known |= info.n_recv >= 0;
    status = ep_plan_get_sources(state->plan, rank, token);
    if (!known && status != EP_E_STATE)
        fail_check(run, "ep_plan_get_sources before the counts are known: %s", ep_status_name(status));
    if (known && passed(run, status, "ep_plan_get_sources")) {
        check_info(run, state, true);
        for (int64_t i = 0; i < layout->n_rows; i++)
            if (rank[i] != layout->rows[i].rank || token[i] != layout->rows[i].token)
                fail_check(run, "source of row %lld is token %d of rank %d, should be %d of %d", (long long)i, token[i],
                           rank[i], layout->rows[i].token, layout->rows[i].rank);
    }
    free(rank);
    free(token);
}

/* --- the rest --------------------------------------------------------------------------------------------------- */

static void check_gather(struct run *run)
{
    uint64_t mine[64], all[MOST_RANKS * 64];
    size_t n = (size_t)(run->shape->seed + (uint64_t)run->op) % 65;

    for (size_t i = 0; i < n; i++)
        mine[i] = random_at(run->shape->seed + (uint64_t)run->rank, i);
    if (!passed(run, ep_comm_allgather(run->comm, mine, n * 8, all), "ep_comm_allgather"))
        return;
    for (size_t i = 0; i < n * (size_t)run->shape->nranks; i++)
        if (all[i] != random_at(run->shape->seed + (uint64_t)(i / n), i % n))
            fail_check(run, "all-gather of %zu words: word %zu of rank %zu", n, i % n, i / n);
}

static bool new_arena(struct run *run, int which, size_t bytes)
{
    void *memory;

    if (!passed(run, ep_alloc(run->comm, bytes, &memory), "ep_alloc"))
        return false;
    run->arena[which] = (struct arena){.memory = memory, .bytes = bytes};
    return true;
}

static void change_arena(struct run *run)
{
    int which = run->op % N_ARENAS;

    drain(run);
    if (passed(run, ep_free(run->comm, run->arena[which].memory), "ep_free"))
        new_arena(run, which, random_below(&run->local, 4) ? ARENA_BYTES : 0);
}

static void start_use(struct run *run, const struct op *op)
{
    struct use *use = &run->uses[run->n_uses];
    bool started = op->kind == OP_DISPATCH ? use_dispatch(run, op, use) : use_combine(run, op, use);

    run->n_uses++;
    (void)started; /* what has failed is reported, and freed with the others */
}

/* Not between a dispatch and the combine of its rows, which needs them. */
static bool may_drain(const struct run *run)
{
    return run->op >= run->shape->n_ops || !run->shape->ops[run->op].echo;
}

static void do_op(struct run *run, const struct op *op)
{
    struct plan_state *state = &run->plans[op->plan];

    /* Ranks that go in step meet nobody who is still at the operation before. */
    if (random_below(&run->local, 12) == 0)
        usleep(random_below(&run->local, 3000));
    if (may_drain(run) && (run->n_uses > MOST_USES - 2 || random_below(&run->local, 4) == 0))
        drain(run);
    switch (op->kind) {
    case OP_PLAN:
        make_plan(run, op);
        break;
    case OP_DISPATCH:
    case OP_COMBINE:
        start_use(run, op);
        break;
    case OP_SOURCES:
        check_sources(run, op);
        break;
    case OP_FREE:
        ep_plan_free(state->plan);
        state->plan = NULL;
        break;
    case OP_BARRIER:
        passed(run, ep_comm_barrier(run->comm), "ep_comm_barrier");
        break;
    case OP_GATHER:
        check_gather(run);
        break;
    case OP_ARENA:
        change_arena(run);
        break;
    case OP_LOWLATENCY:
        use_lowlatency(run, op);
        break;
    }
}

int run_rank(const ep_boot *boot, void *argument)
{
    const struct shape *shape = argument;
    struct run run = {.shape = shape, .rank = boot->rank};
    bool ready;

    run.local = stream_of(shape, STREAM_LOCAL, (uint64_t)boot->rank, 0);
    ep_net_emulate(&shape->emulation);
    if (!passed(&run, ep_comm_new(boot, &shape->config, &run.comm), "ep_comm_new"))
        return 1;
    for (int i = 1; i < N_QUEUES; i++)
        if (!passed(&run, ep_queue_new(run.comm, &run.queues[i]), "ep_queue_new"))
            return 1;
    ready = new_arena(&run, 0, ARENA_BYTES) && new_arena(&run, 1, ARENA_BYTES) && new_arena(&run, 2, ARENA_BYTES);
    for (run.op = 0; ready && !run.wrong && run.op < shape->n_ops; run.op++)
        do_op(&run, &shape->ops[run.op]);
    /* The others wait for this rank in a call that it will not make. */
    if (run.wrong)
        ep_comm_abort(run.comm);
    drain(&run);
    for (int i = 0; i < shape->n_plans; i++) {
        ep_plan_free(run.plans[i].plan);
        reference_layout_done(&run.plans[i].layout);
        reference_group_done(&run.plans[i].group);
    }
    for (int i = 1; i < N_QUEUES; i++)
        ep_queue_free(run.queues[i]);
    ep_comm_free(run.comm);
    return run.wrong;
}
