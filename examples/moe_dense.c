/* SPDX-License-Identifier: Apache-2.0 */
#include "moe_dense.h"

#include <epkit/numeric.h>
#include <math.h>
#include <string.h>

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static void widen(double *out, const float *in, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = in[i];
}

static void init_tokens(struct dense *dense, int rank, const struct gate *gate)
{
    struct batch batch;
    struct routing routing;

    batch_init(&batch, rank);
    gate_forward(gate, &batch, &routing);
    memcpy(dense->idx[rank * TOKENS], routing.idx, sizeof(routing.idx));
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++) {
            dense->values.x[rank * TOKENS + t][h] = ep_bf16_to_f32(batch.x[t][h]);
            dense->grad_out[rank * TOKENS + t][h] = ep_bf16_to_f32(batch.grad_out[t][h]);
        }
}

void dense_init(struct dense *dense)
{
    struct gate gate;

    gate_init(&gate);
    widen(dense->values.gate[0], gate.w[0], EXPERTS * HIDDEN);
    for (int e = 0; e < EXPERTS; e++) {
        struct expert expert;

        expert_init(&expert, e);
        widen(dense->values.up[e][0], expert.up[0], FFN * HIDDEN);
        widen(dense->values.down[e][0], expert.down[0], HIDDEN * FFN);
    }
    for (int r = 0; r < RANKS; r++)
        init_tokens(dense, r, &gate);
}

/* Weights of the chosen experts of one token. */
static void softmax(const struct dense *dense, int token, double weights[TOPK])
{
    double sum = 0.0;

    for (int k = 0; k < TOPK; k++) {
        double logit = 0.0;

        for (int h = 0; h < HIDDEN; h++)
            logit += dense->values.gate[dense->idx[token][k]][h] * dense->values.x[token][h];
        sum += weights[k] = exp(logit);
    }
    for (int k = 0; k < TOPK; k++)
        weights[k] /= sum;
}

/* y = expert(x) for one token; before[] are the inputs of SiLU. */
static void expert_one(const struct dense_values *values, int e, const double *x, double before[FFN], double y[HIDDEN])
{
    memset(y, 0, sizeof(*y) * HIDDEN);
    for (int f = 0; f < FFN; f++) {
        before[f] = 0.0;
        for (int h = 0; h < HIDDEN; h++)
            before[f] += values->up[e][f][h] * x[h];
        for (int h = 0; h < HIDDEN; h++)
            y[h] += values->down[e][h][f] * before[f] * sigmoid(before[f]);
    }
}

double dense_forward(const struct dense *dense, double (*out)[HIDDEN])
{
    double loss = 0.0;

    for (int t = 0; t < RANKS * TOKENS; t++) {
        double weights[TOPK];

        softmax(dense, t, weights);
        memset(out[t], 0, sizeof(out[t]));
        for (int k = 0; k < TOPK; k++) {
            double before[FFN], y[HIDDEN];

            expert_one(&dense->values, dense->idx[t][k], dense->values.x[t], before, y);
            for (int h = 0; h < HIDDEN; h++)
                out[t][h] += weights[k] * y[h];
        }
        for (int h = 0; h < HIDDEN; h++)
            loss += out[t][h] * dense->grad_out[t][h];
    }
    return loss;
}

/* Adds the gradients through one expert of one token; returns the gradient with respect to its weight. */
static double backward_one(const struct dense *dense, int token, int e, double weight, struct dense_values *grad)
{
    const struct dense_values *values = &dense->values;
    const double *x = values->x[token], *grad_out = dense->grad_out[token];
    double before[FFN], y[HIDDEN], grad_weight = 0.0;

    expert_one(values, e, x, before, y);
    for (int h = 0; h < HIDDEN; h++)
        grad_weight += grad_out[h] * y[h];

    for (int f = 0; f < FFN; f++) {
        double s = sigmoid(before[f]), act = before[f] * s, grad_act = 0.0, grad_before;

        for (int h = 0; h < HIDDEN; h++) {
            grad_act += weight * grad_out[h] * values->down[e][h][f];
            grad->down[e][h][f] += weight * grad_out[h] * act;
        }
        grad_before = grad_act * s * (1.0 + before[f] * (1.0 - s));
        for (int h = 0; h < HIDDEN; h++) {
            grad->up[e][f][h] += grad_before * x[h];
            grad->x[token][h] += grad_before * values->up[e][f][h];
        }
    }
    return grad_weight;
}

void dense_backward(const struct dense *dense, struct dense_values *ret_grad)
{
    memset(ret_grad, 0, sizeof(*ret_grad));
    for (int t = 0; t < RANKS * TOKENS; t++) {
        double weights[TOPK], grad_weights[TOPK], mean = 0.0;

        softmax(dense, t, weights);
        for (int k = 0; k < TOPK; k++) {
            grad_weights[k] = backward_one(dense, t, dense->idx[t][k], weights[k], ret_grad);
            mean += weights[k] * grad_weights[k];
        }
        for (int k = 0; k < TOPK; k++) {
            double grad_logit = weights[k] * (grad_weights[k] - mean);
            int e = dense->idx[t][k];

            for (int h = 0; h < HIDDEN; h++) {
                ret_grad->gate[e][h] += grad_logit * dense->values.x[t][h];
                ret_grad->x[t][h] += grad_logit * dense->values.gate[e][h];
            }
        }
    }
}
