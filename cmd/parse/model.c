/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>

#define MAX_GUESS 4 /* node-limited routing uses four nodes of any larger number */

double model_distinct(double bins, double per_bin, double k)
{
    double items = bins * per_bin, missed = 1;

    /* The probability that none of k draws hits a given bin. */
    for (int i = 0; i < k; i++)
        missed *= items - i > per_bin ? (items - per_bin - i) / (items - i) : 0;
    return bins * (1 - fmax(missed, 0));
}

/* fp8 rows carry a float scale for every 128 elements. */
static double row_bytes(const struct model_case *what)
{
    return what->is_fp8 && !what->is_combine ? what->hidden + 4 * what->hidden / 128 : 2 * what->hidden;
}

static bool is_sensible(const struct model_hardware *hardware, const struct model_case *what)
{
    double ranks = (double)what->nodes * hardware->gpus_per_node;

    return what->nodes >= 1 && what->tokens >= 1 && what->hidden >= 1 && what->topk >= 1 && what->topk <= 4096 &&
           what->experts >= ranks && what->topk <= what->experts && hardware->gpus_per_node >= 1 &&
           hardware->nvlink_gbps > 0 && (what->nodes == 1 || (hardware->nics_per_node >= 1 && hardware->nic_gbps > 0));
}

static void count_bytes(const struct model_hardware *hardware, const struct model_case *what,
                        struct model_result *result)
{
    double nodes = what->nodes, gpus = hardware->gpus_per_node;
    double groups = what->topk_groups > 0 && what->topk_groups < what->nodes ? what->topk_groups : nodes;
    double per_rank = what->experts / (nodes * gpus), bytes;

    result->row_bytes = row_bytes(what);
    bytes = what->tokens * result->row_bytes;
    result->distinct_nodes = model_distinct(groups, per_rank * gpus, what->topk);
    result->distinct_ranks = model_distinct(groups * gpus, per_rank, what->topk);
    result->nvl_logical_bytes = bytes * result->distinct_ranks;
    result->nvl_wire_bytes = result->nvl_logical_bytes * (gpus - 1) / gpus;
    if (what->nodes > 1) {
        result->rdma_logical_bytes = bytes * result->distinct_nodes;
        result->rdma_wire_bytes = result->rdma_logical_bytes * (nodes - 1) / nodes;
    }
}

bool model_predict(const struct model_hardware *hardware, const struct model_case *what,
                   struct model_result *ret_result)
{
    struct model_result result = {0};
    int nics = what->nics_in_use > 0 ? what->nics_in_use : hardware->nics_per_node;
    double nic_rate, nvl_rate, rdma_us = 0, nvl_us;

    if (!is_sensible(hardware, what))
        return false;
    count_bytes(hardware, what, &result);
    nic_rate = hardware->nic_gbps * hardware->nic_efficiency * nics / hardware->gpus_per_node;
    nvl_rate = hardware->nvlink_gbps *
               (what->is_combine ? hardware->nvlink_combine_efficiency : hardware->nvlink_dispatch_efficiency);
    nvl_us = result.nvl_wire_bytes / nvl_rate / 1e3;
    if (what->nodes > 1)
        rdma_us = result.rdma_wire_bytes / nic_rate / 1e3;
    result.is_rdma_bound = rdma_us > nvl_us;
    /* The two hops of a token are pipelined: the slower link determines the rate. */
    result.time_us =
        fmax(rdma_us, nvl_us) + (what->nodes > 1 ? hardware->overhead_internode_us : hardware->overhead_intranode_us);
    result.rdma_logical = result.rdma_logical_bytes / result.time_us / 1e3;
    result.rdma_wire = result.rdma_wire_bytes / result.time_us / 1e3;
    result.nvl_logical = result.nvl_logical_bytes / result.time_us / 1e3;
    result.nvl_wire = result.nvl_wire_bytes / result.time_us / 1e3;
    *ret_result = result;
    return true;
}

int model_guess_nodes(const struct model_hardware *hardware, const struct model_case *what, double rdma_gbps,
                      double nvl_gbps)
{
    double best = 0.06;
    int guess = 0;

    if (!(rdma_gbps > 0) || !(nvl_gbps > 0))
        return 0;
    for (int nodes = 2; nodes <= MAX_GUESS; nodes++) {
        struct model_case trial = *what;
        struct model_result result;
        double off;

        trial.nodes = nodes;
        /* The default of the test, if the log does not name it. */
        if (trial.topk_groups <= 0)
            trial.topk_groups = nodes < 4 ? nodes : 4;
        if (!model_predict(hardware, &trial, &result))
            continue;
        off = fabs(nvl_gbps / rdma_gbps / (result.distinct_ranks / result.distinct_nodes) - 1);
        /* Prefer the smaller number unless the fit is clearly better. */
        if (guess == 0 ? off < best : off < best - 0.02) {
            best = off;
            guess = nodes;
        }
    }
    return guess < MAX_GUESS ? guess : 0;
}
