/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.h - how fast a dispatch or a combine should be, from link rates and the routing alone.
 *
 * docs/model.md derives the formula and compares it with measurements. Rates are in GB/s (1e9 bytes) of one rank;
 * logical and wire rates are defined there. Thread-safe; nothing here allocates.
 */
#ifndef EP_PARSE_MODEL_H
#define EP_PARSE_MODEL_H

#include <stdbool.h>

#define MODEL_NAME 48

/* Machines of one kind. Rates are those of the data sheet, efficiencies are fitted (docs/model.md). */
struct model_hardware {
    char name[MODEL_NAME]; /* "b200" */
    char title[96];        /* "8x B200, 8x 400 Gb/s RoCE" */
    int gpus_per_node, nics_per_node;
    double nic_gbps;       /* of one NIC, one direction */
    double nvlink_gbps;    /* of one GPU, one direction */
    double nic_efficiency; /* share of nic_gbps that large RDMA writes reach */
    double nvlink_dispatch_efficiency, nvlink_combine_efficiency;
    double overhead_intranode_us, overhead_internode_us; /* launch, notification, barriers */
};

struct model_case {
    int nodes;
    double tokens, hidden, topk, experts; /* tokens of one rank */
    int topk_groups;                      /* at most this many nodes for a token; 0: any number */
    bool is_fp8, is_combine;
    int nics_in_use; /* of each node; 0: all */
};

struct model_result {
    double distinct_nodes, distinct_ranks; /* expected per token */
    double row_bytes;
    double rdma_logical_bytes, rdma_wire_bytes; /* of one rank; 0 on one node */
    double nvl_logical_bytes, nvl_wire_bytes;
    double time_us;
    double rdma_logical, rdma_wire, nvl_logical, nvl_wire; /* GB/s; RDMA is 0 on one node */
    bool is_rdma_bound;
};

/* false: the case is invalid (top-k above the number of eligible experts, no tokens, ...). */
bool model_predict(const struct model_hardware *hardware, const struct model_case *what,
                   struct model_result *ret_result);

/* Expected number of distinct bins that k draws without replacement from bins * per_bin items hit. */
double model_distinct(double bins, double per_bin, double k);

/*
 * The number of nodes of a run, from its printed rates of RDMA and NVLink, whose quotient depends only on routing. 0:
 * neither two nor three nodes fit within 6%. Four or more cannot be distinguished, since routing is node-limited.
 */
int model_guess_nodes(const struct model_hardware *hardware, const struct model_case *what, double rdma_gbps,
                      double nvl_gbps);

#endif
