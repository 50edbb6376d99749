/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of a rank's own rows of the expanded layout before a combine: so one row for each (token, rank) crosses the
 * links, not one for each choice. A warp adds up a token. All multiprocessors take part, because nothing waits for
 * peers here and device memory is the limit.
 */
#include "backend/cuda/sums.cuh"
#include "backend/cuda/sync.cuh"

#define THREADS 256
#define BLOCKS_OF_SM 4
#define AT_ONCE 4 /* rows whose loads overlap */

namespace
{

/* Moves the rows of a token that are here to the first lanes, in the order of the choices; returns their number. */
__device__ int gather_rows(int32_t &row, int lane)
{
    uint32_t here = __ballot_sync(ALL_LANES, row >= 0), rest = here;

    for (int i = 0; i < lane; i++)
        rest &= rest - 1;
    row = __shfl_sync(ALL_LANES, row, rest ? __ffs((int)rest) - 1 : 0);
    return __popc(here);
}

__device__ void add_token(const cuda_reduce &r, int32_t row, int n, int lane)
{
    unsigned char *to = r.to + (int64_t)__shfl_sync(ALL_LANES, row, n - 1) * r.row_bytes;

    for (int32_t first = 0; first < r.row_bytes; first += WARP * VECTOR) {
        int32_t offset = first + lane * VECTOR;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};

        for (int i = 0; i < n; i += AT_ONCE) {
            uint4 v[AT_ONCE];

#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                int64_t at = (int64_t)__shfl_sync(ALL_LANES, row, i + j < n ? i + j : 0) * r.row_bytes + offset;

                if (i + j < n && offset < r.row_bytes)
                    v[j] = __ldcs(reinterpret_cast<const uint4 *>(r.from + at));
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (i + j < n && offset < r.row_bytes)
                    add_vector<false>(sum, v[j]);
        }
        if (offset < r.row_bytes)
            *reinterpret_cast<uint4 *>(to + offset) = round_vector(sum);
    }
}

} /* namespace */

namespace ep
{

__global__ void __launch_bounds__(THREADS) reduce_rows(const __grid_constant__ cuda_reduce r)
{
    await_stream();
    int lane = (int)threadIdx.x % WARP;
    int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP, warps = (int64_t)gridDim.x * THREADS / WARP;

    if (is_stopped(r.waits) || r.counts->refused[0])
        return;
    for (int64_t token = warp; token < *r.n; token += warps) {
        int32_t row = lane < r.topk ? r.slots[token * r.topk + lane] : -1;
        int n = gather_rows(row, lane);

        if (n)
            add_token(r, row, n, lane);
    }
}

} /* namespace ep */

cudaError_t cuda_launch_reduce(const struct cuda_reduce *reduce, int sms, cudaStream_t stream)
{
    return launch(ep::reduce_rows, (unsigned)(sms * BLOCKS_OF_SM), THREADS, 0, stream, *reduce);
}

cudaError_t cuda_reduce_load(int)
{
    return load_kernels(ep::reduce_rows);
}
