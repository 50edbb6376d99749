/* SPDX-License-Identifier: Apache-2.0 */
#include "moe_model.h"

#include <epkit/numeric.h>
#include <math.h>
#include <string.h>

/* splitmix64: a counter through a mixing function, so that every rank can make any part of the input. */
static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Element i of a stream of numbers uniform in (-1, 1). */
static float uniform(uint64_t stream, int64_t i)
{
    return (float)(mix(mix(stream) + (uint64_t)i) >> 40) * 0x1p-23f - 1.0f;
}

static void fill_f32(float *out, int64_t n, uint64_t stream, float scale)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = scale * uniform(stream, i);
}

static void fill_bf16(uint16_t *out, int64_t n, uint64_t stream)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = ep_bf16_from_f32(uniform(stream, i));
}

void batch_init(struct batch *batch, int rank)
{
    fill_bf16(batch->x[0], TOKENS * HIDDEN, 1000 + (uint64_t)rank);
    fill_bf16(batch->grad_out[0], TOKENS * HIDDEN, 2000 + (uint64_t)rank);
}

void gate_init(struct gate *gate)
{
    fill_f32(gate->w[0], EXPERTS * HIDDEN, 1, 0.3f);
}

void expert_init(struct expert *expert, int number)
{
    fill_f32(expert->up[0], FFN * HIDDEN, 100 + (uint64_t)number, 0.2f);
    fill_f32(expert->down[0], HIDDEN * FFN, 200 + (uint64_t)number, 0.2f);
}

void to_f32(float *ret_out, const uint16_t *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ret_out[i] = ep_bf16_to_f32(in[i]);
}

void to_bf16(uint16_t *ret_out, const float *in, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ret_out[i] = ep_bf16_from_f32(in[i]);
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static float silu(float x)
{
    return x * sigmoid(x);
}

static float silu_derivative(float x)
{
    float s = sigmoid(x);

    return s * (1.0f + x * (1.0f - s));
}

void gate_forward(const struct gate *gate, const struct batch *batch, struct routing *ret_routing)
{
    for (int t = 0; t < TOKENS; t++) {
        float logits[EXPERTS] = {0}, sum = 0.0f, largest;

        for (int e = 0; e < EXPERTS; e++)
            for (int h = 0; h < HIDDEN; h++)
                logits[e] += gate->w[e][h] * ep_bf16_to_f32(batch->x[t][h]);

        for (int k = 0; k < TOPK; k++) {
            int best = 0;

            for (int e = 1; e < EXPERTS; e++)
                if (logits[e] > logits[best])
                    best = e;
            ret_routing->idx[t][k] = best;
            ret_routing->weights[t][k] = logits[best];
            logits[best] = -INFINITY;
        }

        largest = ret_routing->weights[t][0];
        for (int k = 0; k < TOPK; k++)
            sum += ret_routing->weights[t][k] = expf(ret_routing->weights[t][k] - largest);
        for (int k = 0; k < TOPK; k++)
            ret_routing->weights[t][k] /= sum;
    }
}

void gate_backward(const struct gate *gate, const struct batch *batch, const struct routing *routing,
                   const float (*grad_weights)[TOPK], float (*grad_x)[HIDDEN], struct gate *ret_grad)
{
    memset(ret_grad, 0, sizeof(*ret_grad));
    for (int t = 0; t < TOKENS; t++) {
        float mean = 0.0f;

        for (int k = 0; k < TOPK; k++)
            mean += routing->weights[t][k] * grad_weights[t][k];
        for (int k = 0; k < TOPK; k++) {
            int e = routing->idx[t][k];
            float grad_logit = routing->weights[t][k] * (grad_weights[t][k] - mean);

            for (int h = 0; h < HIDDEN; h++) {
                ret_grad->w[e][h] += grad_logit * ep_bf16_to_f32(batch->x[t][h]);
                grad_x[t][h] += grad_logit * gate->w[e][h];
            }
        }
    }
}

/* out [m,n] = a [m,k] * b [n,k] transposed */
static void matmul_nt(float *out, const float *a, const float *b, int m, int n, int k)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0.0f;

            for (int l = 0; l < k; l++)
                sum += a[i * k + l] * b[j * k + l];
            out[i * n + j] = sum;
        }
}

/* out [m,n] = a [m,k] * b [k,n] */
static void matmul_nn(float *out, const float *a, const float *b, int m, int n, int k)
{
    memset(out, 0, sizeof(*out) * (size_t)m * (size_t)n);
    for (int i = 0; i < m; i++)
        for (int l = 0; l < k; l++)
            for (int j = 0; j < n; j++)
                out[i * n + j] += a[i * k + l] * b[l * n + j];
}

/* out [m,n] += a [k,m] transposed * b [k,n] */
static void matmul_tn_add(float *out, const float *a, const float *b, int m, int n, int k)
{
    for (int l = 0; l < k; l++)
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++)
                out[i * n + j] += a[l * m + i] * b[l * n + j];
}

void expert_forward(const struct expert *expert, int n, const float *x, float *before, float *act, float *y)
{
    matmul_nt(before, x, expert->up[0], n, FFN, HIDDEN);
    for (int i = 0; i < n * FFN; i++)
        act[i] = silu(before[i]);
    matmul_nt(y, act, expert->down[0], n, HIDDEN, FFN);
}

void expert_backward(const struct expert *expert, int n, const float *x, const float *before, const float *act,
                     const float *grad_y, float *scratch, float *grad_x, struct expert *grad)
{
    matmul_tn_add(grad->down[0], grad_y, act, HIDDEN, FFN, n);
    matmul_nn(scratch, grad_y, expert->down[0], n, FFN, HIDDEN);
    for (int i = 0; i < n * FFN; i++)
        scratch[i] *= silu_derivative(before[i]);
    matmul_tn_add(grad->up[0], scratch, x, FFN, HIDDEN, n);
    matmul_nn(grad_x, scratch, expert->up[0], n, HIDDEN, FFN);
}
