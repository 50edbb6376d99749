/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_step.h - one captured graph with operations on plans of fixed capacity, launched with new routing and data; the
 * results are those of the host backend, bit for bit. Of its two layers, one gives a plan that was made before the
 * capture new routing (expanded layout, rows in staging, each rank adds up its own rows), the other makes its plan in
 * the capture (rank layout, rows go straight to the peers). Between nodes there is the first one alone: graphs with the
 * other do not go on with other members.
 */
#ifndef EP_TESTS_CUDA_PLAN_STEP_H
#define EP_TESTS_CUDA_PLAN_STEP_H

#include "mirror.h"

enum { STEP_LAYERS = 2, STEP_BUFFERS = 7 };

struct plan_step {
    const struct group *group;
    int n_tokens, n_layers;
    struct step_layer {
        ep_plan *plan[2]; /* of the host backend, of CUDA (NULL: made in the capture) */
        struct mirror b[STEP_BUFFERS];
    } layer[STEP_LAYERS];
    cudaGraphExec_t graph;
};

/* The plans, then the graph. Collective with step_renew() of the ranks that have them. To be closed in any case. */
int step_open(const struct group *group, struct plan_step *ret_step);
/* After the members have changed. */
int step_renew(struct plan_step *step);
void step_close(struct plan_step *step);

/* Loads new data; launches the graph, without a check; the same with data of `seed`, compared. */
int step_load(struct plan_step *step, uint64_t seed);
int step_launch(struct plan_step *step, ep_status *ret_status);
int step_run(struct plan_step *step, uint64_t seed);

#endif
