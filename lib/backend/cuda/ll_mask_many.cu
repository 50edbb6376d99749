/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency masks and barrier for more than CUDA_LL_FEW_RANKS ranks. See lowlatency.cuh. */
#define LL_MANY true
#include "backend/cuda/ll_mask.cu"
