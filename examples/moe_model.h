/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_model.h - the mathematics of the example, without any communication.
 *
 *   gate     logits = gate * x; the K experts with the largest logits; weights = softmax over those K
 *   expert   y = down * silu(up * x)
 *   layer    out = sum over the K experts of weight * y
 */
#ifndef MOE_MODEL_H
#define MOE_MODEL_H

#include <stdalign.h>
#include <stdint.h>

enum {
    RANKS = 4,
    TOKENS = 24, /* per rank */
    HIDDEN = 128,
    FFN = 64,
    EXPERTS = 8,
    LOCAL_EXPERTS = EXPERTS / RANKS,
    TOPK = 2
};

struct expert {
    float up[FFN][HIDDEN];
    float down[HIDDEN][FFN];
};

struct gate {
    float w[EXPERTS][HIDDEN];
};

/* What one rank owns of the input: its tokens, and the gradient of the loss with respect to its outputs. */
struct batch {
    alignas(16) uint16_t x[TOKENS][HIDDEN]; /* bf16 */
    alignas(16) uint16_t grad_out[TOKENS][HIDDEN];
};

/* The gate's answer for one rank. */
struct routing {
    alignas(16) int32_t idx[TOKENS][TOPK];
    alignas(16) float weights[TOKENS][TOPK];
};

/* The same numbers on every rank that asks. */
void batch_init(struct batch *batch, int rank);
void gate_init(struct gate *gate);
void expert_init(struct expert *expert, int number);

/* Converts `n` bf16 elements. */
void to_f32(float *ret_out, const uint16_t *in, int64_t n);
void to_bf16(uint16_t *ret_out, const float *in, int64_t n);

void gate_forward(const struct gate *gate, const struct batch *batch, struct routing *ret_routing);

/*
 * From the gradient with respect to the weights: adds the gate's part to grad_x and stores the gradient of the gate
 * itself. The choice of experts is piecewise constant, so only the softmax has a gradient.
 */
void gate_backward(const struct gate *gate, const struct batch *batch, const struct routing *routing,
                   const float (*grad_weights)[TOPK], float (*grad_x)[HIDDEN], struct gate *ret_grad);

/* y [n,H] = expert(x [n,H]). Memory for `before` and `act`, [n,F] each, is the caller's; backward needs them. */
void expert_forward(const struct expert *expert, int n, const float *x, float *before, float *act, float *y);

/* From grad_y [n,H]: grad_x [n,H], and adds to *grad. `scratch` [n,F]. */
void expert_backward(const struct expert *expert, int n, const float *x, const float *before, const float *act,
                     const float *grad_y, float *scratch, float *grad_x, struct expert *grad);

#endif
