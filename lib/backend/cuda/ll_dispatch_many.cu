/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency dispatch of more than CUDA_LL_NARROW ranks. See lowlatency.cuh. */
#define LL_MANY true
#include "backend/cuda/ll_dispatch.cu"
