/* SPDX-License-Identifier: Apache-2.0 */
#include "property.h"

const char *op_name(enum op_kind kind)
{
    static const char *const names[] = {"plan", "update",  "dispatch", "combine", "sources",     "metadata",
                                        "free", "barrier", "gather",   "arena",   "low latency", "capacity"};

    return names[kind];
}

static int between(struct random *random, int least, int most)
{
    return least + (int)random_below(random, (uint32_t)(most - least + 1));
}

static bool one_in(struct random *random, uint32_t n)
{
    return random_below(random, n) == 0;
}

static int draw_nodes(struct random *random, int nranks)
{
    int nodes[MAX_RANKS], n = 0;

    for (int i = 1; i <= nranks; i++)
        if (nranks % i == 0)
            nodes[n++] = i;
    return nodes[random_below(random, (uint32_t)n)];
}

static void draw_network(struct random *random, struct shape *shape)
{
    static const uint32_t rings[] = {0, 0, 0, 256, 320, 1024, 4096}, splits[] = {0, 0, 16, 48, 100, 1000};
    ep_net_emulation *net = &shape->emulation;

    if (one_in(random, 6))
        shape->config.network = "tcp";
    shape->config.channels = one_in(random, 3) ? 0 : between(random, 1, 16);
    shape->config.partial_type = between(random, 0, 2) == 0 ? EP_BF16 : EP_F32;
    net->seed = random_next(random);
    net->delay_us = one_in(random, 2) ? 0 : (uint32_t)between(random, 1, 300);
    net->ring_bytes = rings[random_below(random, 7)];
    net->split_bytes = splits[random_below(random, 6)];
    net->reorder = random_below(random, 2);
    if (one_in(random, 8)) {
        net->stall_rank = random_below(random, (uint32_t)shape->nranks);
        net->stall_ms = (uint32_t)between(random, 1, 15);
    }
}

static void draw_plan(struct random *random, const struct shape *shape, struct plan_shape *ret_plan)
{
    static const int alignments[] = {0, 0, 1, 2, 3, 8, 16, 128};
    /* Few tokens in most plans: errors at 200 also occur at 20, and hundreds of cases are to run. */
    int most = one_in(random, 4) ? MAX_TOKENS : one_in(random, 2) ? 40 : 6;

    ret_plan->idx_type = one_in(random, 2) ? EP_I32 : EP_I64;
    ret_plan->flags = one_in(random, 2) ? EP_PLAN_EXPANDED : 0;
    if (ret_plan->flags && one_in(random, 2))
        ret_plan->flags |= EP_PLAN_ZERO_PADDING;
    ret_plan->alignment = alignments[random_below(random, 8)];
    ret_plan->fixed_capacity = shape->burst || one_in(random, 2);
    ret_plan->mask = !ret_plan->flags && one_in(random, 3);
    /* A tiny ring needs hundreds of rounds for a large row. */
    if (shape->nnodes > 1 && shape->emulation.ring_bytes)
        most = most > 40 ? 40 : most;
    for (int v = 0; v < MAX_VERSIONS; v++) {
        struct version_shape *version = &ret_plan->versions[v];

        version->style = between(random, 0, 6);
        for (int rank = 0; rank < shape->nranks; rank++)
            version->n_tokens[rank] = one_in(random, 6) ? 0 : between(random, 0, most);
    }
    ret_plan->n_versions = 1;
}

static void draw_format(struct random *random, struct op *op)
{
    op->index = one_in(random, 2);
    op->weights = one_in(random, 2);
    op->n_bias = between(random, 0, 2);
    if (op->kind == OP_DISPATCH && !op->echo && one_in(random, 2)) {
        op->dtype = EP_F8E4M3;
        op->scale_type = between(random, 0, 2) == 0 ? 0 : one_in(random, 2) ? EP_F32 : EP_UE8M0;
        op->hidden = op->scale_type == EP_UE8M0 ? 512 * between(random, 1, 2) : 128 * between(random, 1, 6);
    } else {
        op->dtype = EP_BF16;
        op->scale_type = 0;
        op->hidden = 8 * (one_in(random, 3) ? between(random, 1, 80) : between(random, 1, 8));
    }
}

static enum op_kind draw_kind(struct random *random, const struct shape *shape, int plans_made, int plans_live)
{
    uint32_t lot = random_below(random, 100);

    if (plans_live == 0 || (lot < 25 && plans_made < shape->n_plans))
        return plans_made < shape->n_plans ? OP_PLAN : OP_BARRIER;
    if (lot < 35)
        return OP_UPDATE;
    if (lot < 57)
        return OP_DISPATCH;
    if (lot < 79)
        return OP_COMBINE;
    if (lot < 82)
        return OP_SOURCES;
    if (lot < 85)
        return OP_METADATA;
    if (lot < 88)
        return OP_FREE;
    if (lot < 91)
        return OP_BARRIER;
    if (lot < 93)
        return OP_GATHER;
    if (lot < 96)
        return OP_CAPACITY;
    return lot < 98 ? OP_ARENA : OP_LOWLATENCY;
}

/* A plan without updates, or without further ones, is dispatched. */
static void draw_update(struct plan_shape *plan, struct op *op)
{
    if (op->kind == OP_UPDATE && (!plan->fixed_capacity || plan->n_versions == MAX_VERSIONS))
        op->kind = OP_DISPATCH;
    if (op->kind == OP_UPDATE)
        op->version = plan->n_versions++;
}

static void draw_ops(struct random *random, struct shape *shape)
{
    int live[MAX_PLANS], n_live = 0, made = 0;

    for (int i = 0; i < shape->n_ops; i++) {
        struct op *op = &shape->ops[i];
        uint32_t which;

        op->kind = shape->burst && made < shape->n_plans ? OP_PLAN : draw_kind(random, shape, made, n_live);
        which = n_live ? random_below(random, (uint32_t)n_live) : 0;
        op->plan = op->kind == OP_PLAN ? made : n_live ? live[which] : 0;
        op->rounds = between(random, 1, 4);
        draw_update(&shape->plans[op->plan], op);
        draw_format(random, op);
        if (shape->plans[op->plan].mask)
            op->index = op->weights = false;
        if (op->kind == OP_PLAN)
            live[n_live++] = made++;
        if (op->kind == OP_FREE)
            live[which] = live[--n_live];
        if (op->kind == OP_DISPATCH && op->dtype == EP_BF16 && i + 1 < shape->n_ops && one_in(random, 3)) {
            shape->ops[i + 1] = *op;
            shape->ops[++i].kind = OP_COMBINE;
            shape->ops[i].echo = true;
        }
    }
}

void shape_draw(uint64_t seed, unsigned modes, struct shape *ret_shape)
{
    struct shape shape = {.seed = seed, .config = EP_COMM_CONFIG_INIT};
    struct random random = stream_of(&shape, STREAM_SHAPE, 0, 0);
    int most_local;

    shape.threads = one_in(&random, 2) ? (modes & 2) != 0 : (modes & 1) == 0;
    shape.nranks = between(&random, 1, MAX_RANKS);
    shape.nnodes = draw_nodes(&random, shape.nranks);
    shape.topk = between(&random, 1, one_in(&random, 3) ? MAX_TOPK : 4);
    most_local = one_in(&random, 3) ? 24 : 4;
    shape.n_experts = shape.nranks * between(&random, 1, most_local);
    shape.n_plans = between(&random, 1, MAX_PLANS);
    shape.n_ops = between(&random, 3, MAX_OPS);
    shape.burst = one_in(&random, 5);
    if (shape.burst) {
        shape.n_plans = MAX_PLANS;
        shape.n_ops = MAX_OPS;
    }
    shape.config.backend = "host";
    shape.config.ranks_per_node = shape.nranks / shape.nnodes;
    shape.config.timeout_ms = 30000;
    shape.config.flags = one_in(&random, 3) ? EP_COMM_CHECK_VALUES : 0;
    if (shape.nnodes > 1)
        draw_network(&random, &shape);
    for (int i = 0; i < shape.n_plans; i++)
        draw_plan(&random, &shape, &shape.plans[i]);
    draw_ops(&random, &shape);
    *ret_shape = shape;
}
