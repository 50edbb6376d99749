/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_dense.h - the layer of the whole group computed on one process, token by token in double precision, with code of
 * its own: what the distributed layer is compared with.
 */
#ifndef MOE_DENSE_H
#define MOE_DENSE_H

#include "moe_model.h"

/* Everything that the loss depends on; the gradients have the same shape. */
struct dense_values {
    double x[RANKS * TOKENS][HIDDEN];
    double gate[EXPERTS][HIDDEN];
    double up[EXPERTS][FFN][HIDDEN];
    double down[EXPERTS][HIDDEN][FFN];
};

struct dense {
    struct dense_values values;
    double grad_out[RANKS * TOKENS][HIDDEN];
    int32_t idx[RANKS * TOKENS][TOPK]; /* chosen once, so that a small change of a value does not change the choice */
};

void dense_init(struct dense *dense);

/* out [RANKS * TOKENS][HIDDEN]; returns the loss: the sum over all elements of out * grad_out. */
double dense_forward(const struct dense *dense, double (*out)[HIDDEN]);

/* The gradients of that loss. */
void dense_backward(const struct dense *dense, struct dense_values *ret_grad);

#endif
