/* SPDX-License-Identifier: Apache-2.0 */
/* Quantises the rows of a dispatch with EP_DISPATCH_QUANTIZE, a row for each warp. */
#include "backend/cuda/quantize.cuh"
#include "backend/cuda/sync.cuh"

#define THREADS 512
#define BLOCKS_PER_SM 4

namespace ep
{

__global__ void __launch_bounds__(THREADS) quantize_rows(const __grid_constant__ cuda_quantize c)
{
    await_stream();
    int lane = (int)threadIdx.x % WARP, units = c.hidden / 16;
    int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
    quantizer q = {c.block, c.packed != 0, c.packed != 0, c.global_scale ? __ldg(c.global_scale) : 1.0f};

    for (int64_t row = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; row < c.n_tokens; row += warps) {
        const uint4 *x = reinterpret_cast<const uint4 *>(c.x) + row * (c.hidden / 8);

        for (int first = 0; first < units; first += WARP) {
            int unit = first + lane;
            sixteen v = {};

            if (unit < units)
                v = {__ldcs(x + 2 * unit), __ldcs(x + 2 * unit + 1)};
            quantise_unit(q, v, unit, unit < units, c.rows + row * c.row_bytes, c.scales + row * c.scale_bytes);
        }
    }
}

} /* namespace ep */

cudaError_t cuda_launch_quantize(const struct cuda_quantize *quantize, int sms, cudaStream_t stream)
{
    return launch(ep::quantize_rows, (unsigned)(sms * BLOCKS_PER_SM), THREADS, 0, stream, *quantize);
}

cudaError_t cuda_quantize_load(int)
{
    return load_kernels(ep::quantize_rows);
}
