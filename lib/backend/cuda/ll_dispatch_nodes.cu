/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency dispatch between nodes. See lowlatency.cuh. */
#define LL_NODES true
#include "backend/cuda/ll_dispatch.cu"
