/* SPDX-License-Identifier: Apache-2.0 */
/* nodes_update.cuh - accessors shared by the kernels of an update between nodes. */
#ifndef EP_CUDA_NODES_UPDATE_CUH
#define EP_CUDA_NODES_UPDATE_CUH

#include "backend/cuda/nodes.cuh"
#include "backend/cuda/nodes_update.h"
#include "backend/cuda/update.cuh"

__device__ __forceinline__ int nodes_of(const cuda_nodes_update &u)
{
    return u.words.nnodes;
}

__device__ __forceinline__ int node_of(const cuda_nodes_update &u)
{
    return u.words.node;
}

__device__ __forceinline__ int experts_of_node(const cuda_nodes_update &u)
{
    return u.n_local_experts * u.waits.nranks;
}

#endif
