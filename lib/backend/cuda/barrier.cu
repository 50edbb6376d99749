/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that only wait: for all ranks of the node, or for a host word. */
#include "backend/cuda/sync.cuh"

namespace
{

__global__ void __launch_bounds__(2 * WARP)
    barrier_kernel(const __grid_constant__ cuda_waits waits, const __grid_constant__ cuda_op_desc desc)
{
    await_stream();
    __shared__ targets targets;
    uint64_t number = operation_publish(waits, desc, nullptr);
    bool ok = operation_begin(waits, desc, nullptr, nullptr, number, targets, blockIdx.x);

    if (operation_sync(waits, number, ok, 1))
        operation_complete(waits, number);
}

/* The event is this rank's own, so this rank is blamed if the event is not signalled. */
__global__ void wait_kernel(const __grid_constant__ cuda_waits waits, const uint32_t *word)
{
    await_stream();
    if (may_begin(waits, waits.ready_phase))
        wait_or_fail(
            waits,
            [=] {
                __nanosleep(200);
                return *(const volatile uint32_t *)word != 0;
            },
            waits.rank, waits.ready_phase);
    __threadfence_system();
}

} /* namespace */

cudaError_t cuda_launch_barrier(const struct cuda_waits *waits, const struct cuda_op_desc *desc, cudaStream_t stream)
{
    return launch(barrier_kernel, 1, 2 * WARP, 0, stream, *waits, *desc);
}

cudaError_t cuda_launch_wait(const struct cuda_waits *waits, const uint32_t *word, cudaStream_t stream)
{
    return launch(wait_kernel, 1, 1, 0, stream, *waits, word);
}

cudaError_t cuda_barrier_load(int)
{
    return load_kernels(barrier_kernel, wait_kernel);
}
