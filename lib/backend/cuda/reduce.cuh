/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of a rank's own rows of the expanded layout, made during a combine: so one row for each (token, rank) crosses
 * the links, not one for each choice.
 */
#ifndef EP_CUDA_REDUCE_CUH
#define EP_CUDA_REDUCE_CUH

#include "backend/cuda/device.cuh"
#include "backend/cuda/sums.cuh"

#define REDUCE_AT_ONCE 4 /* rows whose loads overlap */

/* Moves the rows of a token that are here to the first lanes, in the order of the choices; returns their number. */
__device__ inline int gather_rows(int32_t &row, int lane)
{
    uint32_t here = __ballot_sync(ALL_LANES, row >= 0), rest = here;

    for (int i = 0; i < lane; i++)
        rest &= rest - 1;
    row = __shfl_sync(ALL_LANES, row, rest ? __ffs((int)rest) - 1 : 0);
    return __popc(here);
}

/* Adds up bytes [at, end) of the rows of a received token. By a warp, with a choice in each lane. */
__device__ inline void reduce_piece(const cuda_reduce &r, int topk, int64_t token, int64_t row_bytes, int64_t at,
                                    int64_t end, int lane)
{
    int32_t row = lane < topk ? r.slots[token * topk + lane] : -1;
    int n = gather_rows(row, lane);
    unsigned char *to = r.to + (int64_t)__shfl_sync(ALL_LANES, row, n ? n - 1 : 0) * row_bytes;

    for (; at < end && n; at += WARP * VECTOR) {
        int64_t offset = at + lane * VECTOR;
        bool within = offset < end;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};

        for (int i = 0; i < n; i += REDUCE_AT_ONCE) {
            uint4 v[REDUCE_AT_ONCE];

#pragma unroll
            for (int j = 0; j < REDUCE_AT_ONCE; j++) {
                int64_t from = (int64_t)__shfl_sync(ALL_LANES, row, i + j < n ? i + j : 0) * row_bytes + offset;

                if (i + j < n && within)
                    v[j] = __ldcs(reinterpret_cast<const uint4 *>(r.from + from));
            }
#pragma unroll
            for (int j = 0; j < REDUCE_AT_ONCE; j++)
                if (i + j < n && within)
                    add_vector<false>(sum, v[j]);
        }
        if (within)
            *reinterpret_cast<uint4 *>(to + offset) = round_vector(sum);
    }
}

#endif
