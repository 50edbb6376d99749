/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_layer.c - a mixture-of-experts layer with its backward pass on four ranks, two experts on each.
 *
 *   forward    gate -> dispatch x -> experts -> combine their weighted outputs
 *   backward   dispatch the gradient of the output -> experts backward -> combine the gradients of x and of the weights
 *
 * Both directions use one plan: what combine did to the rows, dispatch undoes for their gradients, and the other way
 * round. The plan has the expanded layout (rows grouped by expert), so each expert is two plain matrix products.
 *
 * Each rank then compares what it owns with a dense computation of the whole group (moe_dense.c), and a few gradients
 * with finite differences of its loss. Returns 0 if everything agrees.
 */
#include "moe_dense.h"
#include "moe_model.h"
#include "ranks.h"

#include <epkit/epkit.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * Bounds of the relative error of a whole array in the 2-norm. bf16 keeps 8 significant bits: one rounding is off by
 * 0.16 % in the root mean square. A row is rounded when an expert returns it and again after the sum, so outputs and
 * gradients of inputs get the first bound. The gradients of parameters come from rows that travelled unchanged and are
 * summed in fp32.
 */
#define ROUNDED 5e-3
#define EXACT 1e-5

/* A single element may be off by this many times more, in units of the root mean square of its array. */
#define ELEMENT 10.0

/* Returns the status if it is an error: for functions that own nothing. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        ep_status status_ = (call);                                                                                    \
        if (status_ != EP_OK)                                                                                          \
            return status_;                                                                                            \
    } while (0)

/* One rank's part of the layer. */
struct layer {
    ep_comm *comm;
    ep_plan *plan;
    int rows;                                   /* that this rank receives: one for each (token, local expert) */
    int first[LOCAL_EXPERTS + 1];               /* rows of local expert e: first[e] .. first[e + 1] */
    uint16_t *recv_x, *recv_grad, *back;        /* [rows,H] bf16 in symmetric memory */
    float *weights, *grad_weights;              /* [rows] */
    float *x, *y, *grad, *before, *act, *spare; /* the experts' working memory, see layer_alloc() */

    struct gate gate;
    struct expert experts[LOCAL_EXPERTS];
};

/* What one rank computes: outputs of its tokens, gradients of its tokens, of its experts, and its part of the gate's.
 */
struct results {
    alignas(16) uint16_t out[TOKENS][HIDDEN];
    alignas(16) uint16_t grad_x_rows[TOKENS][HIDDEN]; /* the experts' part of grad_x, as combined */
    alignas(16) float grad_weights[TOKENS][TOPK];
    float grad_x[TOKENS][HIDDEN];
    struct gate grad_gate;
    struct expert grad_experts[LOCAL_EXPERTS];
};

/* Memory for as many rows as the plan brings here. Collective, because symmetric memory is. */
static ep_status layer_alloc(struct layer *layer)
{
    size_t rows = (size_t)layer->rows, row_bytes = HIDDEN * sizeof(uint16_t);

    TRY(ep_alloc(layer->comm, rows * row_bytes, (void **)&layer->recv_x));
    TRY(ep_alloc(layer->comm, rows * row_bytes, (void **)&layer->recv_grad));
    TRY(ep_alloc(layer->comm, rows * row_bytes, (void **)&layer->back));

    /* One spare element each: rows may be 0, and malloc(0) may be NULL. */
    layer->weights = malloc((rows + 1) * sizeof(float));
    layer->grad_weights = malloc((rows + 1) * sizeof(float));
    layer->x = malloc((rows * HIDDEN + 1) * sizeof(float));
    layer->y = malloc((rows * HIDDEN + 1) * sizeof(float));
    layer->grad = malloc((rows * HIDDEN + 1) * sizeof(float));
    layer->before = malloc((rows * FFN + 1) * sizeof(float));
    layer->act = malloc((rows * FFN + 1) * sizeof(float));
    layer->spare = malloc((rows * FFN + 1) * sizeof(float));
    if (!layer->weights || !layer->grad_weights || !layer->x || !layer->y || !layer->grad || !layer->before ||
        !layer->act || !layer->spare)
        return EP_E_MEMORY;
    return EP_OK;
}

static ep_status layer_open(struct layer *layer, const ep_boot *boot, const struct routing *routing)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    ep_plan_info info = {.size = sizeof(info)};

    for (int e = 0; e < LOCAL_EXPERTS; e++)
        expert_init(&layer->experts[e], boot->rank * LOCAL_EXPERTS + e);

    TRY(ep_comm_new(boot, NULL, &layer->comm));

    args.topk_idx = routing->idx;
    args.idx_type = EP_I32;
    args.n_tokens = TOKENS;
    args.topk = TOPK;
    args.n_experts = EXPERTS;
    args.flags = EP_PLAN_EXPANDED;
    TRY(ep_plan_new(layer->comm, &args, &layer->plan));

    TRY(ep_plan_get_info(layer->plan, &info));
    layer->rows = (int)info.out_rows;
    for (int e = 0; e <= LOCAL_EXPERTS; e++)
        layer->first[e] = (int)info.expert_start[e];
    return layer_alloc(layer);
}

static void layer_close(struct layer *layer)
{
    free(layer->weights);
    free(layer->grad_weights);
    free(layer->x);
    free(layer->y);
    free(layer->grad);
    free(layer->before);
    free(layer->act);
    free(layer->spare);
    ep_plan_free(layer->plan);
    ep_comm_free(layer->comm); /* and with it the symmetric memory */
}

static ep_status layer_forward(struct layer *layer, const struct batch *batch, const struct routing *routing,
                               struct results *results)
{
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;

    dispatch.x = batch->x;
    dispatch.dtype = EP_BF16;
    dispatch.hidden = HIDDEN;
    dispatch.topk_weights = routing->weights[0];
    dispatch.recv_x = layer->recv_x;
    dispatch.recv_topk_weights = layer->weights;
    dispatch.out_rows = layer->rows;
    TRY(ep_dispatch_sync(layer->plan, &dispatch));

    to_f32(layer->x, layer->recv_x, (int64_t)layer->rows * HIDDEN);
    for (int e = 0; e < LOCAL_EXPERTS; e++) {
        int row = layer->first[e];

        expert_forward(&layer->experts[e], layer->first[e + 1] - row, &layer->x[row * HIDDEN],
                       &layer->before[row * FFN], &layer->act[row * FFN], &layer->y[row * HIDDEN]);
    }

    /* Combine adds rows as they are, so the weights are applied here, before the only rounding of the row. */
    for (int i = 0; i < layer->rows; i++)
        for (int h = 0; h < HIDDEN; h++)
            layer->back[i * HIDDEN + h] = ep_bf16_from_f32(layer->weights[i] * layer->y[i * HIDDEN + h]);

    combine.x = layer->back;
    combine.dtype = EP_BF16;
    combine.hidden = HIDDEN;
    combine.out = results->out;
    return ep_combine_sync(layer->plan, &combine);
}

/* The backward pass of the last forward. */
static ep_status layer_backward(struct layer *layer, const struct batch *batch, const struct routing *routing,
                                struct results *results)
{
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;

    /* Every row of the output was a sum, so each of its terms gets the whole gradient: a dispatch. */
    dispatch.x = batch->grad_out;
    dispatch.dtype = EP_BF16;
    dispatch.hidden = HIDDEN;
    dispatch.recv_x = layer->recv_grad;
    dispatch.out_rows = layer->rows;
    TRY(ep_dispatch_sync(layer->plan, &dispatch));

    to_f32(layer->grad, layer->recv_grad, (int64_t)layer->rows * HIDDEN);
    for (int i = 0; i < layer->rows; i++) {
        layer->grad_weights[i] = 0.0f;
        for (int h = 0; h < HIDDEN; h++) {
            layer->grad_weights[i] += layer->grad[i * HIDDEN + h] * layer->y[i * HIDDEN + h];
            layer->grad[i * HIDDEN + h] *= layer->weights[i];
        }
    }

    memset(results->grad_experts, 0, sizeof(results->grad_experts));
    for (int e = 0; e < LOCAL_EXPERTS; e++) {
        int row = layer->first[e];

        /* y has served its purpose: it takes the gradient of x. */
        expert_backward(&layer->experts[e], layer->first[e + 1] - row, &layer->x[row * HIDDEN],
                        &layer->before[row * FFN], &layer->act[row * FFN], &layer->grad[row * HIDDEN],
                        &layer->spare[row * FFN], &layer->y[row * HIDDEN], &results->grad_experts[e]);
    }
    to_bf16(layer->back, layer->y, (int64_t)layer->rows * HIDDEN);

    /* Every token was copied to its experts, so its gradient is the sum over the copies: a combine. */
    combine.x = layer->back;
    combine.dtype = EP_BF16;
    combine.hidden = HIDDEN;
    combine.topk_weights = layer->grad_weights;
    combine.out = results->grad_x_rows;
    combine.out_topk_weights = results->grad_weights[0];
    TRY(ep_combine_sync(layer->plan, &combine));

    to_f32(results->grad_x[0], results->grad_x_rows[0], TOKENS * HIDDEN);
    gate_backward(&layer->gate, batch, routing, results->grad_weights, results->grad_x, &results->grad_gate);
    return EP_OK;
}

/* Adds up the gate's gradient over the ranks: every rank holds a copy of the gate. */
static ep_status sum_gate(ep_comm *comm, struct gate *gate)
{
    for (int e = 0; e < EXPERTS; e++) {
        float parts[RANKS][HIDDEN];

        TRY(ep_comm_allgather(comm, gate->w[e], sizeof(gate->w[e]), parts));
        for (int h = 0; h < HIDDEN; h++) {
            gate->w[e][h] = parts[0][h];
            for (int r = 1; r < RANKS; r++)
                gate->w[e][h] += parts[r][h];
        }
    }
    return EP_OK;
}

/* |got - expected| / |expected| in the 2-norm. */
static double relative_error(const double *expected, const float *got, int n)
{
    double difference = 0.0, norm = 0.0;

    for (int i = 0; i < n; i++) {
        difference += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    return sqrt(difference / norm);
}

/*
 * Compares a few of the n gradients got[] with the slope of the loss as the value itself is moved. values[] are those
 * inside dense. Returns the largest difference in units of the root mean square of expected[].
 */
static double slope_error(struct dense *dense, double (*out)[HIDDEN], double *values, const double *expected,
                          const float *got, int n)
{
    const double step = 1e-4;
    double worst = 0.0, square = 0.0;

    for (int i = 0; i < n; i++)
        square += expected[i] * expected[i];

    for (int i = n / 7; i < n; i += n / 3) {
        double value = values[i], above, below;

        values[i] = value + step;
        above = dense_forward(dense, out);
        values[i] = value - step;
        below = dense_forward(dense, out);
        values[i] = value;
        worst = fmax(worst, fabs((above - below) / (2.0 * step) - got[i]));
    }
    return worst / sqrt(square / n);
}

/* Something that a rank computed, and what it should be. */
struct comparison {
    const char *name;
    double bound;
    double *values; /* inside dense: what the gradient is taken with respect to; NULL: not a gradient */
    const double *expected;
    const float *got;
    int n;
};

/* Prints how far this rank is from the dense computation; returns 0 if it is near enough. */
static int compare(int rank, const struct results *results, struct dense *dense, struct dense_values *grad,
                   double (*out)[HIDDEN])
{
    struct dense_values *values = &dense->values;
    int token = rank * TOKENS, e = rank * LOCAL_EXPERTS, failed = 0;
    float out_f32[TOKENS * HIDDEN];
    double worst_slope = 0.0;
    char line[512];
    size_t at;

    const struct comparison rows[] = {
        {"output", ROUNDED, NULL, out[token], out_f32, TOKENS * HIDDEN},
        {"gradients of x", ROUNDED, values->x[token], grad->x[token], results->grad_x[0], TOKENS * HIDDEN},
        {"gate", EXACT, values->gate[0], grad->gate[0], results->grad_gate.w[0], EXPERTS * HIDDEN},
        {"up", EXACT, values->up[e][0], grad->up[e][0], results->grad_experts[0].up[0], FFN * HIDDEN},
        {"down", EXACT, values->down[e][0], grad->down[e][0], results->grad_experts[0].down[0], HIDDEN * FFN},
        {"up", EXACT, values->up[e + 1][0], grad->up[e + 1][0], results->grad_experts[1].up[0], FFN * HIDDEN},
        {"down", EXACT, values->down[e + 1][0], grad->down[e + 1][0], results->grad_experts[1].down[0], HIDDEN * FFN},
    };

    dense_forward(dense, out);
    dense_backward(dense, grad);
    to_f32(out_f32, results->out[0], TOKENS * HIDDEN);

    at = (size_t)snprintf(line, sizeof(line), "rank %d: relative errors:", rank);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct comparison *row = &rows[i];
        double error = relative_error(row->expected, row->got, row->n);

        failed |= !(error <= row->bound);
        at += (size_t)snprintf(line + at, sizeof(line) - at, "%s %s %.1e", i > 0 ? "," : "", row->name, error);
    }
    for (size_t i = 1; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct comparison *row = &rows[i];
        double slope = slope_error(dense, out, row->values, row->expected, row->got, row->n);

        failed |= !(slope <= ELEMENT * row->bound);
        worst_slope = fmax(worst_slope, slope / row->bound);
    }
    printf("%s; finite differences at %.1f of %.1f\n", line, worst_slope, ELEMENT);
    return failed;
}

/* A rank's program. */
static int run_rank(const ep_boot *boot)
{
    struct layer layer = {0};
    struct batch batch;
    struct routing routing;
    struct results *results = calloc(1, sizeof(*results));
    struct dense *dense = calloc(1, sizeof(*dense));
    struct dense_values *grad = calloc(1, sizeof(*grad));
    double(*out)[HIDDEN] = calloc(RANKS * TOKENS, sizeof(*out));
    ep_status status = EP_E_MEMORY;
    int result = EXIT_FAILURE;

    if (!results || !dense || !grad || !out)
        goto out;

    batch_init(&batch, boot->rank);
    gate_init(&layer.gate);
    gate_forward(&layer.gate, &batch, &routing);

    status = layer_open(&layer, boot, &routing);
    if (status == EP_OK)
        status = layer_forward(&layer, &batch, &routing, results);
    if (status == EP_OK)
        status = layer_backward(&layer, &batch, &routing, results);
    if (status == EP_OK)
        status = sum_gate(layer.comm, &results->grad_gate);
    if (status != EP_OK)
        goto out;

    dense_init(dense);
    result = compare(boot->rank, results, dense, grad, out) ? EXIT_FAILURE : EXIT_SUCCESS;
out:
    if (status != EP_OK)
        fprintf(stderr, "rank %d: %s: %s\n", boot->rank, ep_status_text(status), ep_last_error());
    layer_close(&layer);
    free(results);
    free(dense);
    free(grad);
    free(out);
    return result;
}

int main(void)
{
    return run_ranks(RANKS, run_rank);
}
