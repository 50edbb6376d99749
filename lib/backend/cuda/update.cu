/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing of a plan within a node, new or updated. The rank layout is counted in count.cu. In the expanded layout a
 * token has a row for each of its choices, in ascending order of the experts; the rows of an expert are numbered within
 * a block by bit masks in shared memory, a bit for each token; the few tokens that name it again are added. Then the
 * ranks exchange their counts, in an operation of its own, and each computes where its rows begin.
 */
#include "backend/cuda/exchange.cuh"

#define MASK_WORDS CUDA_MASK_WORDS
#define ROWS_THREADS 512
#define LOADS 4 /* of a thread of the kernel that copies rows */

namespace
{

/* --- counting, expanded ------------------------------------------------------------------------------------------ */

/*
 * Sets the token's bit in the mask of each of its experts, and in `repeats` if it names one twice; copies its choices.
 * Returns the bit mask of its ranks.
 */
__device__ uint32_t mark_token(const cuda_count &c, int token, uint32_t *masks, uint32_t *repeats)
{
    size_t start = (size_t)token * c.topk;
    uint32_t bit = 1u << threadIdx.x % WARP, ranks = 0, bad = 0, twice = 0, dropped = 0, missing = __ldg(c.absent);
    int n_local = c.n_experts / c.nranks;

    for_choices(c, start, [&](int k, int64_t expert) {
        bool valid = expert >= 0 && expert < c.n_experts, absent = valid && is_absent(missing, (int)expert / n_local);

        bad |= (!valid && expert != -1) || (absent && !c.drops);
        dropped += absent;
        c.index[start + k] = valid && !absent ? (int32_t)expert : -1;
        if (!valid || absent)
            return;
        twice |= atomicOr(&masks[expert * MASK_WORDS + threadIdx.x / WARP], bit) & bit;
        ranks |= 1u << ((int)expert / n_local);
    });
    if (twice)
        atomicOr(&repeats[threadIdx.x / WARP], bit);
    note_found(c, bad || (twice && c.distinct), dropped);
    return ranks;
}

/* The choices of the block's first token. */
__device__ const int32_t *index_of_block(const cuda_count &c)
{
    return c.index + (size_t)blockIdx.x * CUDA_COUNT_TOKENS * c.topk;
}

/* Lists the rows of this thread's token in the order of their experts and choices, numbered within the block. */
__device__ void list_rows(const cuda_count &c, int token, const uint32_t *masks, const uint32_t *repeats)
{
    size_t start = (size_t)token * c.topk;
    int n = 0, last = -1, n_local = c.n_experts / c.nranks;
    int32_t row = 0;

    for (;;) {
        int next = INT32_MAX; /* expert and choice */

        for (int k = 0; k < c.topk; k++) {
            int key = c.index[start + k] * EP_MAX_TOPK + k;

            if (c.index[start + k] >= 0 && key > last && key < next)
                next = key;
        }
        if (next == INT32_MAX)
            break;
        int expert = next / EP_MAX_TOPK;

        row = last >= 0 && last / EP_MAX_TOPK == expert
                  ? row + 1
                  : rows_before(masks + (size_t)expert * MASK_WORDS) +
                        repeats_before(index_of_block(c), c.topk, repeats, expert, (int)threadIdx.x);
        c.entry[(size_t)token * c.width + n++] = {row, (uint16_t)(expert / n_local), (uint16_t)(next % EP_MAX_TOPK)};
        last = next;
    }
    c.count[token] = n;
}

/* Computes where the rows of each block begin, and the totals. By all threads of the last block. */
__device__ void sum_blocks(const cuda_update &u)
{
    const cuda_count &c = u.count;

    for (int expert = (int)threadIdx.x; expert < c.n_experts; expert += (int)blockDim.x) {
        int total = 0;

#pragma unroll 4
        for (int block = 0; block < u.blocks; block++) {
            int32_t *rows = &u.block_experts[(size_t)block * c.n_experts + expert];
            int n = __ldcg(rows);

            *rows = total;
            total += n;
        }
        c.totals[c.nranks + expert] = total;
    }
    if ((int)threadIdx.x < c.nranks) {
        c.totals[threadIdx.x] = __ldcg(&c.per_expert[threadIdx.x]);
        c.per_expert[threadIdx.x] = 0;
    }
    move_found(c);
}

__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) count_experts_kernel(const __grid_constant__ cuda_update u)
{
    await_stream();
    extern __shared__ uint32_t masks[]; /* [E, MASK_WORDS] */
    __shared__ int32_t per_rank[CUDA_MAX_RANKS];
    __shared__ uint32_t repeats[MASK_WORDS];
    __shared__ exchange x;
    const cuda_count &c = u.count;
    int token = (int)(blockIdx.x * CUDA_COUNT_TOKENS + threadIdx.x);
    uint32_t ranks = 0;

    for (int i = (int)threadIdx.x; i < c.n_experts * MASK_WORDS; i += CUDA_COUNT_TOKENS)
        masks[i] = 0;
    if (threadIdx.x < CUDA_MAX_RANKS)
        per_rank[threadIdx.x] = 0;
    if (threadIdx.x < MASK_WORDS)
        repeats[threadIdx.x] = 0;
    __syncthreads();
    if (token < c.n_tokens)
        ranks = mark_token(c, token, masks, repeats);
    for (; ranks; ranks &= ranks - 1)
        atomicAdd(&per_rank[__ffs((int)ranks) - 1], 1);
    __syncthreads();
    if (token < c.n_tokens)
        list_rows(c, token, masks, repeats);
    for (int expert = (int)threadIdx.x; expert < c.n_experts; expert += CUDA_COUNT_TOKENS) {
        int n = repeats_before(index_of_block(c), c.topk, repeats, expert, CUDA_COUNT_TOKENS);

        for (int i = 0; i < MASK_WORDS; i++)
            n += __popc(masks[expert * MASK_WORDS + i]);
        u.block_experts[(size_t)blockIdx.x * c.n_experts + expert] = n;
    }
    if ((int)threadIdx.x < c.nranks && per_rank[threadIdx.x])
        atomicAdd(&c.per_expert[threadIdx.x], per_rank[threadIdx.x]);
    if (!is_last_block(c.blocks_done))
        return;
    sum_blocks(u);
    exchange_counts(u, x);
}

/* Adds to each row the rows of earlier blocks, and on its expert those of lower ranks. */
__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) add_experts_kernel(const __grid_constant__ cuda_update u)
{
    await_stream();
    const cuda_count &c = u.count;
    int token = (int)(blockIdx.x * CUDA_COUNT_TOKENS + threadIdx.x);

    for (int i = 0; token < c.n_tokens && i < c.count[token]; i++) {
        cuda_entry *entry = &c.entry[(size_t)token * c.width + i];
        int expert = c.index[(size_t)token * c.topk + entry->k];

        entry->row += u.expert_base[expert] + u.block_experts[(size_t)blockIdx.x * c.n_experts + expert];
    }
}

/* --- rows of this rank ------------------------------------------------------------------------------------------- */

/* The threads of some blocks that share work: index of this thread, and number of threads. */
struct share {
    int64_t thread, threads;
};

/* Copies elements of type T. `from` NULL: fills with the value. */
template <typename T>
__device__ void copy_as(unsigned char *to, const unsigned char *from, int64_t bytes, T value, const share &by)
{
    int64_t n = bytes / (int64_t)sizeof(T), i = by.thread;

    /* Several loads are in flight at a time: one takes as long as the copy of some MB by all threads. */
    for (; from && i + (LOADS - 1) * by.threads < n; i += LOADS * by.threads) {
        T loaded[LOADS];

#pragma unroll
        for (int j = 0; j < LOADS; j++)
            loaded[j] = __ldcg(reinterpret_cast<const T *>(from) + i + j * by.threads);
#pragma unroll
        for (int j = 0; j < LOADS; j++)
            reinterpret_cast<T *>(to)[i + j * by.threads] = loaded[j];
    }
    for (; i < n; i += by.threads)
        reinterpret_cast<T *>(to)[i] = from ? __ldcg(reinterpret_cast<const T *>(from) + i) : value;
}

__device__ void copy_bytes(unsigned char *to, const unsigned char *from, int64_t bytes, uint32_t word, const share &by)
{
    if (((uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes) % sizeof(uint4))
        copy_as(to, from, bytes, word, by);
    else
        copy_as(to, from, bytes, make_uint4(word, word, word, word), by);
}

__device__ void copy_rows(const cuda_rows &r, int64_t begin, int64_t end, const share &by)
{
    for (int i = 0; i < CUDA_BUFFERS; i++) {
        const cuda_copy &copy = r.copy[i];

        if (copy.from)
            copy_bytes(copy.to + begin * copy.row_bytes, copy.from + begin * copy.row_bytes,
                       (end - begin) * copy.row_bytes, 0, by);
    }
}

/* Scatters words by strides; `zero`: writes 0. Neighbouring threads write neighbouring words. */
__device__ void scatter_rows(const cuda_scatter &s, int64_t begin, int64_t end, bool zero, const share &by)
{
    int64_t rows = end - begin;

    for (int64_t i = by.thread; s.from && i < rows * s.words; i += by.threads) {
        bool by_row = s.stride_row < s.stride_word;
        int64_t row = begin + (by_row ? i % rows : i / s.words), word = by_row ? i / rows : i % s.words;

        s.to[row * s.stride_row + word * s.stride_word] = zero ? 0 : __ldcg(s.from + row * s.words + word);
    }
}

/* Distributes the experts over the blocks; with fewer experts than blocks, several blocks share one. */
__device__ void copy_experts(const cuda_rows &r)
{
    int groups = min(r.n_local, (int)gridDim.x), group = (int)blockIdx.x % groups, member = (int)blockIdx.x / groups;
    int members = ((int)gridDim.x - group + groups - 1) / groups;
    share by = {(int64_t)member * blockDim.x + threadIdx.x, (int64_t)members * blockDim.x};

    for (int local = group; local < r.n_local; local += groups) {
        int64_t begin = r.expert_start[local], end = begin + r.expert_exact[local];

        copy_rows(r, begin, end, by);
        scatter_rows(r.scatter, begin, end, false, by);
        if (r.zero)
            scatter_rows(r.scatter, end, r.expert_start[local + 1], true, by);
        for (int i = 0; r.zero && i < CUDA_BUFFERS; i++)
            if (r.copy[i].to)
                copy_bytes(r.copy[i].to + end * r.copy[i].row_bytes, nullptr,
                           (r.expert_start[local + 1] - end) * r.copy[i].row_bytes, 0, by);
    }
}

__global__ void __launch_bounds__(ROWS_THREADS) rows_kernel(const __grid_constant__ cuda_rows r)
{
    await_stream();
    int64_t rows = r.counts->rows_on[r.rank];
    share all = {(int64_t)blockIdx.x * blockDim.x + threadIdx.x, (int64_t)gridDim.x * blockDim.x};

    if (r.expert_start && rows)
        copy_experts(r);
    if (!r.expert_start) {
        const int64_t *own = &r.counts->first[r.rank];

        copy_rows(r, 0, r.skips_own && rows ? own[0] : rows, all);
        copy_rows(r, r.skips_own && rows ? own[1] : rows, rows, all);
        scatter_rows(r.scatter, 0, rows, false, all);
    }
    fill_rows(r.fill, rows);
}

} /* namespace */

cudaError_t cuda_launch_update(const struct cuda_update *update, cudaStream_t stream)
{
    unsigned blocks = (unsigned)update->blocks;
    size_t masks = (size_t)update->count.n_experts * MASK_WORDS * sizeof(uint32_t);
    cudaError_t error;

    if (!update->expanded)
        return cuda_launch_count(update, stream);
    error = launch(count_experts_kernel, blocks, CUDA_COUNT_TOKENS, masks, stream, *update);
    return error == cudaSuccess ? launch(add_experts_kernel, blocks, CUDA_COUNT_TOKENS, 0, stream, *update) : error;
}

cudaError_t cuda_launch_rows(const struct cuda_rows *rows, int sms, cudaStream_t stream)
{
    return launch(rows_kernel, (unsigned)sms, ROWS_THREADS, 0, stream, *rows);
}

cudaError_t cuda_update_load(int)
{
    cudaError_t error = cudaFuncSetAttribute(count_experts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             CUDA_MAX_EXPERTS * MASK_WORDS * (int)sizeof(uint32_t));

    return error == cudaSuccess ? load_kernels(add_experts_kernel, rows_kernel) : error;
}
