/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency masks and barrier between nodes. See lowlatency.cuh. */
#define LL_NODES true
#include "backend/cuda/ll_mask.cu"
