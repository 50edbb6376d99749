/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_step.h"

#include "case.h"

enum {
    TOKENS = 300,
    MORE_TOKENS = 40,
    HIDDEN = 512,
    TOPK = 4,
    LOCAL = 4
}; /* each rank has more tokens than the last */

enum { X, IDX, WEIGHTS, RECV_X, RECV_IDX, RECV_WEIGHTS, OUT };

static bool is_expanded(int layer)
{
    return layer == 0;
}

static int64_t capacity(const struct plan_step *step, int layer)
{
    int n = step->group->nranks;

    return (int64_t)n * (TOKENS + (n - 1) * MORE_TOKENS) * (is_expanded(layer) ? TOPK : 1);
}

static ep_plan_args plan_of(const struct plan_step *step, int layer, bool device)
{
    const struct mirror *index = &step->layer[layer].b[IDX];
    ep_plan_args args = args_plan(mirror_at(index, device), EP_I32, step->n_tokens, TOPK, LOCAL * step->group->nranks);

    args.flags = is_expanded(layer) ? EP_PLAN_EXPANDED : 0;
    args.max_recv_tokens = capacity(step, layer);
    args.stream = group_stream(step->group, device);
    return args;
}

static int new_buffers(struct plan_step *step, int layer)
{
    static const char *const names[] = {
        "x", "topk_idx", "topk_weights", "recv_x", "recv_topk_idx", "recv_topk_weights", "out"};
    size_t n = (size_t)step->n_tokens, rows = (size_t)capacity(step, layer), k = TOPK * sizeof(float);
    const size_t bytes[STEP_BUFFERS] = {n * HIDDEN * 2,
                                        n * k,
                                        n * k,
                                        rows * HIDDEN * 2,
                                        is_expanded(layer) ? 0 : rows * k,
                                        rows * (is_expanded(layer) ? sizeof(float) : k),
                                        n * HIDDEN * 2};

    for (int i = 0; i < STEP_BUFFERS; i++)
        TRY(mirror_new(step->group, names[i], bytes[i],
                       i >= RECV_X && i < OUT && !is_expanded(layer) ? ALLOCATED_LOCAL : ORDINARY,
                       &step->layer[layer].b[i]));
    return 0;
}

int step_load(struct plan_step *step, uint64_t seed)
{
    struct routing routing = {.n_tokens = step->n_tokens,
                              .topk = TOPK,
                              .n_experts = LOCAL * step->group->nranks,
                              .nranks = step->group->nranks,
                              .idx_type = EP_I32,
                              .holes = seed % 2};
    uint64_t random = seed * 1000003 + (uint64_t)step->group->rank;

    for (int layer = 0; layer < step->n_layers; layer++) {
        struct mirror *b = step->layer[layer].b;

        fill_bf16((uint16_t *)(void *)b[X].host, b[X].bytes / 2, &random);
        fill_routing(&routing, &random, b[IDX].host);
        for (size_t i = 0; i < b[WEIGHTS].bytes / 4; i++)
            ((float *)(void *)b[WEIGHTS].host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
        for (int i = X; i < RECV_X; i++)
            TRY(mirror_push(step->group, &b[i]));
        for (int i = RECV_X; i < STEP_BUFFERS; i++)
            TRY(mirror_poison(step->group, &b[i]));
    }
    return 0;
}

/* The operations of a layer; `plan` has its routing. */
static int operate(const struct plan_step *step, int layer, ep_plan *plan, bool device)
{
    const struct mirror *b = step->layer[layer].b;
    ep_stream stream = group_stream(step->group, device);
    ep_dispatch_args dispatch =
        args_dispatch(EP_BF16, HIDDEN, mirror_at(&b[X], device), mirror_at(&b[RECV_X], device), capacity(step, layer));
    ep_combine_args combine = args_combine(HIDDEN, mirror_at(&b[RECV_X], device), mirror_at(&b[OUT], device));

    dispatch.topk_weights = (const float *)(const void *)mirror_at(&b[WEIGHTS], device);
    dispatch.recv_topk_idx = is_expanded(layer) ? NULL : mirror_at(&b[RECV_IDX], device);
    dispatch.recv_topk_weights = (float *)(void *)mirror_at(&b[RECV_WEIGHTS], device);
    combine.flags = is_expanded(layer) ? EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL : 0;
    CALL(ep_dispatch(plan, &dispatch, stream));
    CALL(ep_combine(plan, &combine, stream));
    return 0;
}

static int update(const struct plan_step *step, int layer, bool device)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    args.topk_idx = mirror_at(&step->layer[layer].b[IDX], device);
    args.n_tokens = step->n_tokens;
    CALL(ep_plan_update(step->layer[layer].plan[device], &args, group_stream(step->group, device)));
    return 0;
}

static int run_layer(struct plan_step *step, int layer, bool device)
{
    ep_plan *plan = step->layer[layer].plan[device];
    ep_plan_args args = plan_of(step, layer, device);

    if (plan) {
        TRY(update(step, layer, device));
        return operate(step, layer, plan, device);
    }
    CALL(ep_plan_new(group_comm(step->group, device), &args, &plan));
    TRY(operate(step, layer, plan, device));
    ep_plan_free(plan);
    return 0;
}

static int capture(struct plan_step *step)
{
    TRY(capture_begin(step->group));
    for (int layer = 0; layer < step->n_layers; layer++)
        TRY(run_layer(step, layer, true));
    return capture_end(step->group, &step->graph);
}

/* Plans for the other members to renew theirs: host, host, CUDA. */
int step_open(const struct group *group, struct plan_step *ret_step)
{
    struct plan_step *step = ret_step;

    *step = (struct plan_step){.group = group,
                               .n_tokens = TOKENS + group->rank * MORE_TOKENS,
                               .n_layers = group_division.nodes > 1 ? 1 : STEP_LAYERS};
    for (int layer = 0; layer < step->n_layers; layer++)
        TRY(new_buffers(step, layer));
    TRY(step_load(step, 0));
    for (int i = 0; i <= step->n_layers; i++) {
        ep_plan_args args = plan_of(step, i % step->n_layers, i == step->n_layers);

        CALL(ep_plan_new(group_comm(group, i == step->n_layers), &args,
                         &step->layer[i % step->n_layers].plan[i == step->n_layers]));
    }
    TRY(capture(step));
    CALL(ep_comm_barrier(group->cuda));
    return 0;
}

int step_renew(struct plan_step *step)
{
    TRY(step_load(step, 0));
    for (int i = 0; i <= step->n_layers; i++)
        TRY(update(step, i % step->n_layers, i == step->n_layers));
    CALL(ep_comm_barrier(step->group->cuda));
    return 0;
}

int step_launch(struct plan_step *step, ep_status *ret_status)
{
    CUDA(cudaGraphLaunch(step->graph, step->group->stream));
    *ret_status = ep_stream_sync(step->group->cuda, step->group->stream);
    return 0;
}

int step_run(struct plan_step *step, uint64_t seed)
{
    ep_status status;
    int code = 0;

    TRY(step_load(step, seed));
    TRY(step_launch(step, &status));
    CALL(status);
    for (int layer = 0; layer < step->n_layers; layer++)
        TRY(run_layer(step, layer, false));
    CALL(ep_stream_sync(step->group->host, NULL));
    for (int layer = 0; layer < step->n_layers; layer++)
        for (int i = RECV_X; i < STEP_BUFFERS; i++)
            code |= mirror_compare(step->group, &step->layer[layer].b[i], layer ? "plan of a capture" : "updated plan");
    return code;
}

void step_close(struct plan_step *step)
{
    if (step->graph)
        cudaGraphExecDestroy(step->graph);
    for (int layer = 0; step->group && layer < step->n_layers; layer++) {
        for (int device = 0; device < 2; device++)
            ep_plan_free(step->layer[layer].plan[device]);
        for (int i = 0; i < STEP_BUFFERS; i++)
            (void)mirror_free(step->group, true, &step->layer[layer].b[i]);
    }
}
