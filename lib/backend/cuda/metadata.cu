/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes metadata of a plan to the caller's memory. The sources of rows are dispatched as rows: one block writes the
 * source of each of this rank's tokens and numbers the tokens for each rank that receives them, so that receivers need
 * not sort.
 */
#include "backend/cuda/sync.cuh"

#define COUNTS_THREADS 1024
#define COUNTS_WARPS (COUNTS_THREADS / WARP)
#define FILL_BLOCKS 32
#define SOURCES_THREADS 256
#define SOURCES_BLOCKS 64

namespace
{

enum { WORD_RANK, WORD_TOKEN, WORD_NUMBERS = 4 };

__device__ __forceinline__ int64_t rows_here(const cuda_metadata &m)
{
    return min(m.route.counts->rows_on[m.waits.rank], m.max_rows);
}

/* --- counts ------------------------------------------------------------------------------------------------------ */

/* Writes counts and prefix sums of the experts. By one warp. */
__device__ void write_expert_counts(const cuda_metadata &m)
{
    int lane = (int)threadIdx.x % WARP;
    int32_t start = 0; /* of this pass's first expert */

    for (int first = 0; first < m.route.n_local_experts; first += WARP) {
        int local = first + lane;
        int32_t exact = local < m.route.n_local_experts ? m.exact[local] : 0;
        int32_t rows = (exact + m.alignment - 1) / m.alignment * m.alignment, end = sum_lanes(rows);

        if (local < m.route.n_local_experts && m.psum_expert)
            m.psum_expert[local] = start + (m.route.expanded ? end - rows + exact : end);
        if (local < m.route.n_local_experts && m.count_exact)
            m.count_exact[local] = exact;
        start += __shfl_sync(ALL_LANES, end, WARP - 1);
    }
}

__device__ void write_counts(const cuda_metadata &m)
{
    int n = m.nranks, i = (int)threadIdx.x;

    if (i == 0 && m.n_recv_tokens)
        *m.n_recv_tokens = (int32_t)m.first[n];
    if (i < n && m.psum_rank)
        m.psum_rank[i] = (int32_t)m.first[i + 1];
    if (i / WARP == COUNTS_WARPS - 1 && (m.psum_expert || m.count_exact))
        write_expert_counts(m);
    for (; i < n * n && m.rank_prefix; i += (int)blockDim.x)
        m.rank_prefix[i] = m.prefix[i];
}

/* --- sources of rows --------------------------------------------------------------------------------------------- */

/* The bit mask of a token's ranks among the WARP ranks from `base` on. */
__device__ uint32_t ranks_of(const cuda_metadata &m, int token, int base)
{
    const int32_t *index = m.route.index + (size_t)token * m.route.topk;
    uint32_t ranks = 0;

    for (int k = 0; k < m.route.topk; k++) {
        uint32_t bit = (uint32_t)(index[k] / m.route.n_local_experts - base);

        if (index[k] >= 0 && bit < WARP)
            ranks |= 1u << bit;
    }
    return ranks;
}

/* Numbers this pass's tokens of the block for each of `n` ranks; `next` [n]: the first number. By all threads. */
__device__ void number_tokens(int32_t *numbers, uint32_t ranks, int32_t *next, int n)
{
    __shared__ int32_t tokens[COUNTS_WARPS][WARP];
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;

    for (int rank = 0; rank < n; rank++) {
        uint32_t votes = __ballot_sync(ALL_LANES, ranks >> rank & 1);

        if (lane == 0)
            tokens[warp][rank] = __popc(votes);
    }
    __syncthreads();
    for (int rank = 0; rank < n; rank++) {
        uint32_t votes = __ballot_sync(ALL_LANES, ranks >> rank & 1);
        int number = next[rank] + __popc(votes & ((1u << lane) - 1));

        for (int w = 0; w < warp; w++)
            number += tokens[w][rank];
        if (numbers)
            numbers[rank] = ranks >> rank & 1 ? number : -1;
    }
    __syncthreads();
    for (int w = 0; w < COUNTS_WARPS && (int)threadIdx.x < n; w++)
        next[threadIdx.x] += tokens[w][threadIdx.x];
    __syncthreads();
}

/* Writes the tokens' numbers for up to WARP ranks from `base` on. */
__device__ void number_for(const cuda_metadata &m, int base)
{
    __shared__ int32_t next[WARP];
    int i = (int)threadIdx.x, n = min(m.nranks - base, WARP);

    if (i < n)
        next[i] = m.start ? m.start[base + i] : 0;
    __syncthreads();
    for (int first = 0; first < m.route.n_tokens; first += COUNTS_THREADS) {
        int token = first + i;
        bool active = token < m.route.n_tokens;
        int32_t *row = active ? m.rows + (size_t)token * m.row_words : nullptr;

        number_tokens(active ? row + WORD_NUMBERS + base : nullptr, active ? ranks_of(m, token, base) : 0, next, n);
    }
    __syncthreads();
}

__device__ void describe_tokens(const cuda_metadata &m)
{
    int i = (int)threadIdx.x, me = m.rank;

    for (int first = 0; first < m.route.n_tokens; first += COUNTS_THREADS) {
        int token = first + i;
        bool active = token < m.route.n_tokens;
        int32_t *row = active ? m.rows + (size_t)token * m.row_words : nullptr;

        if (active) {
            row[WORD_RANK] = me + 1;
            row[WORD_TOKEN] = token + 1;
        }
        for (int k = 0; k < m.route.topk && active && m.choices; k++)
            m.choices[(size_t)token * m.route.topk + k] = (float)k;
    }
    for (int base = 0; base < m.nranks && m.route.expanded; base += WARP)
        number_for(m, base);
}

/* Zeros for an operation that does not take place: whoever reads these as sizes must find none. By all blocks. */
__device__ void clear_all(const cuda_metadata &m)
{
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    int64_t n_local = m.route.n_local_experts;
    struct {
        int32_t *at;
        int64_t n;
    } outputs[] = {{m.recv_source, m.max_rows},
                   {m.recv_slot, m.max_rows * m.route.topk},
                   {m.n_recv_tokens, 1},
                   {m.psum_rank, m.nranks},
                   {m.psum_expert, n_local},
                   {m.count_exact, n_local},
                   {m.rank_prefix, (int64_t)m.nranks * m.nranks},
                   {m.later_prefix, (int64_t)m.nranks * m.nranks},
                   {m.own_source, m.max_rows},
                   {m.own_slot, m.max_rows * m.route.topk}};

    for (auto &output : outputs)
        for (int64_t i = thread; i < output.n && output.at; i += threads)
            output.at[i] = 0;
}

/*
 * Marks all rows as missing, and all choices as without a row; zeros behind the sources. By all blocks but the first.
 */
__device__ void clear_outputs(const cuda_metadata &m)
{
    int64_t thread = (int64_t)(blockIdx.x - 1) * blockDim.x + threadIdx.x, threads = (gridDim.x - 1) * blockDim.x;
    int64_t rows = rows_here(m), slots = m.first[m.nranks] * m.route.topk;

    for (int64_t i = thread; i < rows && m.rows; i += threads)
        m.recv_rows[i * m.row_words + WORD_RANK] = 0;
    for (int64_t i = thread; i < slots && m.recv_slot; i += threads)
        m.recv_slot[i] = -1;
    for (int64_t i = thread; i < slots && m.own_slot; i += threads)
        m.own_slot[i] = -1;
    for (int64_t i = m.first[m.nranks] + thread; i < m.out_rows && m.recv_source; i += threads)
        m.recv_source[i] = 0;
    for (int64_t i = slots + thread; i < m.out_rows * m.route.topk && m.recv_slot; i += threads)
        m.recv_slot[i] = 0;
}

__global__ void __launch_bounds__(COUNTS_THREADS) metadata_counts_kernel(const __grid_constant__ cuda_metadata m)
{
    await_stream();
    if (is_stopped(m.waits) || is_refused(m.waits, m.route.counts)) {
        clear_all(m);
        return;
    }
    if (blockIdx.x) {
        clear_outputs(m);
        return;
    }
    write_counts(m);
    if (m.rows)
        describe_tokens(m);
}

/* Writes the source of a row. False: the row is damaged. */
__device__ bool write_source(const cuda_metadata &m, int64_t at)
{
    const int32_t *row = m.recv_rows + at * m.row_words;
    int rank = row[WORD_RANK] - 1, token = row[WORD_TOKEN] - 1, n = m.nranks;
    int64_t number = m.route.expanded ? row[WORD_NUMBERS + m.rank] : at;
    float choice = m.recv_choices ? m.recv_choices[at] : 0.0f;

    if (rank < 0 || rank >= n || token < 0 || number < 0 || number >= m.first[n] ||
        !(choice >= 0.0f && choice < (float)m.route.topk)) {
        set_failure(m.waits, CUDA_FAILED_DAMAGE, (rank >= 0 && rank < n ? rank : m.rank) - m.waits.first,
                    m.waits.done_phase);
        return false;
    }
    if (token >= m.stride) {
        set_failure(m.waits, CUDA_FAILED_STRIDE, rank - m.waits.first, m.waits.done_phase);
        return false;
    }
    if (m.recv_source)
        m.recv_source[number] = rank * m.stride + token;
    if (m.recv_slot)
        m.recv_slot[number * m.route.topk + (int)choice] = (int32_t)at;
    if (!m.own_slot)
        return true;
    m.own_source[number] = rank * CUDA_SOURCE_STRIDE(n) + token;
    m.own_slot[number * m.route.topk + (int)choice] = (int32_t)at;
    return true;
}

__global__ void __launch_bounds__(SOURCES_THREADS) sources_kernel(const __grid_constant__ cuda_metadata m)
{
    await_stream();
    int64_t rows = rows_here(m), threads = (int64_t)gridDim.x * blockDim.x;

    /* The kernel before this one has reported the refusal. */
    if (is_stopped(m.waits) || m.route.counts->refused[0])
        return;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < rows; at += threads)
        if (m.recv_rows[at * m.row_words + WORD_RANK] && !write_source(m, at))
            break;
}

} /* namespace */

cudaError_t cuda_launch_metadata_counts(const struct cuda_metadata *metadata, cudaStream_t stream)
{
    return launch(metadata_counts_kernel, metadata->rows ? 1 + FILL_BLOCKS : 1, COUNTS_THREADS, 0, stream, *metadata);
}

cudaError_t cuda_launch_sources(const struct cuda_metadata *metadata, cudaStream_t stream)
{
    return launch(sources_kernel, SOURCES_BLOCKS, SOURCES_THREADS, 0, stream, *metadata);
}

cudaError_t cuda_metadata_load(int)
{
    return load_kernels(metadata_counts_kernel, sources_kernel);
}
