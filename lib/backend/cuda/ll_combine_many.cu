/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency combine of more than CUDA_LL_FEW_RANKS ranks. See lowlatency.cuh. */
#define LL_MANY true
#include "backend/cuda/ll_combine.cu"
