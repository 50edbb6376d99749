/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing of a plan within a node, new or updated. The rank layout is counted in count.cu. In the expanded layout a
 * token has a row for each of its choices, in ascending order of the experts; the rows of an expert are numbered within
 * a block by bit masks in shared memory, a bit for each token; the few tokens that name it again are added. Then the
 * ranks exchange their counts, in an operation of its own, and each computes where its rows begin.
 */
#include "backend/cuda/update.cuh"

#define EXCHANGE_THREADS 1024
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
    uint32_t bit = 1u << threadIdx.x % WARP, ranks = 0, bad = 0, twice = 0, dropped = 0;
    int n_local = c.n_experts / c.nranks;

    for_choices(c, start, [&](int k, int64_t expert) {
        bool valid = expert >= 0 && expert < c.n_experts, absent = valid && is_absent(c.absent, (int)expert / n_local);

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

__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) count_experts_kernel(const __grid_constant__ cuda_update u)
{
    await_stream();
    extern __shared__ uint32_t masks[]; /* [E, MASK_WORDS] */
    __shared__ int32_t per_rank[CUDA_MAX_RANKS];
    __shared__ uint32_t repeats[MASK_WORDS];
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
}

/* --- exchange ---------------------------------------------------------------------------------------------------- */

/* Computes where the rows of each block begin, and the totals. Expanded layout. By all threads. */
__device__ void sum_blocks(const cuda_update &u)
{
    const cuda_count &c = u.count;

    for (int expert = (int)threadIdx.x; expert < c.n_experts; expert += (int)blockDim.x) {
        int total = 0;

#pragma unroll 4
        for (int block = 0; block < u.blocks; block++) {
            int32_t *rows = &u.block_experts[(size_t)block * c.n_experts + expert];
            int n = *rows;

            *rows = total;
            total += n;
        }
        c.totals[c.nranks + expert] = total;
    }
    if ((int)threadIdx.x < c.nranks) {
        c.totals[threadIdx.x] = c.per_expert[threadIdx.x];
        c.per_expert[threadIdx.x] = 0;
    }
    if (threadIdx.x < CUDA_FOUND_WORDS) {
        c.ret_found[threadIdx.x] = c.found[threadIdx.x];
        c.found[threadIdx.x] = 0;
    }
    __syncthreads();
}

/* Publishes this rank's counts to every rank. */
__device__ void publish_counts(const cuda_update &u, uint64_t number)
{
    const cuda_count &c = u.count;
    int n = c.nranks, words = n + 1 + c.n_experts;

    for (int i = (int)threadIdx.x; i < n * words; i += (int)blockDim.x) {
        int word = i % words;
        uint32_t value = word < n    ? (uint32_t)c.totals[word]
                         : word == n ? (uint32_t)u.capacity
                                     : (uint32_t)c.totals[word - 1];
        int at = word < n ? CUDA_COUNT_RANKS + word : CUDA_COUNT_CAPACITY + word - n;

        if (signals_of(u.waits, i / words))
            *(volatile uint64_t *)&signals_of(u.waits, i / words)->counts[u.waits.rank][at] = number << 32 | value;
    }
}

struct exchange {
    int32_t total[CUDA_MAX_EXPERTS], before[CUDA_MAX_EXPERTS]; /* tokens for each expert: all, and of lower ranks */
    int32_t of[CUDA_MAX_RANKS][CUDA_MAX_RANKS + 1];            /* [source][rank] tokens, then its capacity */
    int64_t base[CUDA_MAX_RANKS], rows_on[CUDA_MAX_RANKS];
    int refused; /* the first rank whose rows exceed its capacity; R: none */
};

__device__ bool receive_counts(const cuda_update &u, uint64_t number, exchange &x)
{
    int n = u.count.nranks, me = u.waits.rank;
    bool ok = true;

    for (int i = (int)threadIdx.x; i < n * (n + 1) && ok; i += (int)blockDim.x) {
        int source = i / (n + 1), rank = i % (n + 1);

        ok = receive_count(u.waits, number, source, rank < n ? CUDA_COUNT_RANKS + rank : CUDA_COUNT_CAPACITY,
                           x.of[source][rank < n ? rank : CUDA_MAX_RANKS]);
    }
    for (int expert = (int)threadIdx.x; expert < u.count.n_experts && ok; expert += (int)blockDim.x) {
        int total = 0, before = 0, count = 0;

        for (int source = 0; source < n && ok; source++) {
            ok = receive_count(u.waits, number, source, CUDA_COUNT_EXPERTS + expert, count);
            before += source < me ? count : 0;
            total += count;
        }
        x.total[expert] = total;
        x.before[expert] = before;
    }
    return __syncthreads_and(ok);
}

/* Computes where the rows of each of a rank's experts begin. By one thread; returns the number of rows. */
__device__ int64_t assign_expert_rows(const cuda_update &u, const exchange &x, int rank)
{
    int n_local = u.count.n_experts / u.count.nranks;
    bool mine = rank == u.waits.rank;
    int64_t start = 0;

    for (int local = 0; local < n_local; local++) {
        int expert = rank * n_local + local;

        if (mine) {
            u.expert_start[local] = (int32_t)start;
            u.expert_exact[local] = x.total[expert];
        }
        u.expert_base[expert] = (int32_t)start + x.before[expert];
        start = (start + x.total[expert] + u.alignment - 1) / u.alignment * u.alignment;
    }
    if (mine)
        u.expert_start[n_local] = (int32_t)start;
    return start;
}

/* Computes what each rank receives. By a thread for each. */
__device__ void assign_rank_rows(const cuda_update &u, exchange &x)
{
    int n = u.count.nranks, rank = (int)threadIdx.x, n_local = u.count.n_experts / n;
    int64_t total = 0, base = 0;

    if (rank == 0)
        x.refused = n;
    for (int local = rank; local < n_local && !u.expanded; local += (int)blockDim.x)
        u.expert_exact[local] = x.total[u.waits.rank * n_local + local];
    __syncthreads();
    if (rank < n) {
        for (int source = 0; source < n; source++) {
            base += source < u.waits.rank ? x.of[source][rank] : 0;
            total += x.of[source][rank];
            u.prefix[source * n + rank] = (int32_t)total;
        }
        if (u.expanded) {
            total = assign_expert_rows(u, x, rank);
            base = 0;
        }
        x.base[rank] = base;
        x.rows_on[rank] = total;
        if (total > x.of[rank][CUDA_MAX_RANKS])
            atomicMin(&x.refused, rank);
    }
    __syncthreads();
}

/* Writes the counts of the plan. If the rows of a rank exceed its capacity, nothing moves; all ranks see the same. */
__device__ void write_counts(const cuda_update &u, const exchange &x)
{
    int n = u.count.nranks, i = (int)threadIdx.x, refused = x.refused;
    cuda_counts *counts = u.counts;

    if (i < n) {
        counts->base[i] = x.base[i];
        counts->rows_on[i] = refused < n ? 0 : x.rows_on[i];
    }
    if (i == 0) {
        int64_t first = 0;

        counts->n_tokens = u.count.n_tokens;
        for (int source = 0; source < n; source++) {
            counts->first[source] = first;
            first += refused < n ? 0 : x.of[source][u.waits.rank];
        }
        counts->first[n] = first;
        counts->refused[0] = refused < n ? refused + 1 : 0;
        counts->refused[1] = refused < n ? x.rows_on[refused] : 0;
        counts->refused[2] = refused < n ? x.of[refused][CUDA_MAX_RANKS] : 0;
    }
    if (refused < n && u.expanded)
        for (int local = i; local < u.count.n_experts / n; local += (int)blockDim.x)
            u.expert_exact[local] = 0;
    __syncthreads();
}

/* Adds up what this rank sends: rows to all ranks, and to the others. By all threads. */
__device__ void count_sent(const cuda_update &u, unsigned long long *sent, unsigned long long *wire)
{
    int n = u.count.nranks, n_local = u.count.n_experts / n;
    const int32_t *counts = u.count.totals + (u.expanded ? n : 0);

    for (int i = (int)threadIdx.x; i < (u.expanded ? u.count.n_experts : n); i += (int)blockDim.x) {
        atomicAdd(sent, (unsigned long long)counts[i]);
        if ((u.expanded ? i / n_local : i) != u.waits.rank)
            atomicAdd(wire, (unsigned long long)counts[i]);
    }
}

/* Makes what was written to `info` known to the host. By all threads. */
__device__ void publish_info(const cuda_update &u)
{
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0)
        *(volatile uint64_t *)&u.info->number = u.number;
}

__device__ void write_info(const cuda_update &u, const exchange &x)
{
    __shared__ unsigned long long sent, wire;
    int n = u.count.nranks, n_local = u.count.n_experts / n, i = (int)threadIdx.x;
    volatile cuda_plan_info *info = u.info;

    if (!info)
        return;
    if (i == 0)
        sent = wire = 0;
    __syncthreads();
    count_sent(u, &sent, &wire);
    for (int local = i; local < n_local; local += (int)blockDim.x)
        info->exact[local] = u.expert_exact[local];
    if (i < n) {
        info->rows_on[i] = x.rows_on[i];
        info->sent[i] = u.count.totals[i];
    }
    if (i <= n)
        info->first[i] = u.counts->first[i];
    if (i < 3)
        info->refused[i] = u.counts->refused[i];
    __syncthreads();
    if (i == 0) {
        info->bad = 0;
        info->n_dropped = u.count.ret_found[CUDA_FOUND_DROPPED];
        info->n_send = (int64_t)sent;
        info->n_wire = (int64_t)wire;
    }
    publish_info(u);
}

/* No rows: a dispatch may be queued already, and fills its outputs from the last row on. By all threads. */
__device__ void clear_counts(const cuda_update &u)
{
    int n = u.count.nranks, i = (int)threadIdx.x;

    if (i < n)
        u.counts->rows_on[i] = u.counts->base[i] = 0;
    if (i <= n)
        u.counts->first[i] = 0;
    if (i == 0)
        u.counts->refused[0] = 0;
    for (int local = i; u.expanded && local < u.count.n_experts / n; local += (int)blockDim.x)
        u.expert_exact[local] = 0;
}

/* Routing that is not valid. A plan of exact counts does not begin: its host makes it again or ends. By all threads. */
__device__ void refuse_update(const cuda_update &u)
{
    if (!u.exact) {
        refuse_routing(u.waits);
        return;
    }
    if (threadIdx.x == 0)
        *(volatile uint32_t *)&u.info->bad = 1;
    publish_info(u);
}

__global__ void __launch_bounds__(EXCHANGE_THREADS, 1) exchange_kernel(const __grid_constant__ cuda_update u)
{
    await_stream();
    __shared__ exchange x;
    __shared__ targets targets;
    uint64_t number;
    bool ok;

    if (u.expanded)
        sum_blocks(u);
    if (u.count.ret_found[CUDA_FOUND_BAD]) {
        clear_counts(u);
        refuse_update(u);
        return;
    }
    number = operation_publish(u.waits, u.desc);
    publish_counts(u, number);
    ok = operation_begin(u.waits, u.desc, nullptr, number, targets, blockIdx.x) && receive_counts(u, number, x);
    if (ok) {
        assign_rank_rows(u, x);
        write_counts(u, x);
        write_info(u, x);
    } else {
        clear_counts(u);
    }
    if (operation_sync(u.waits, number, ok, 1))
        operation_complete(u.waits, number);
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
    cudaError_t error = update->expanded
                            ? launch(count_experts_kernel, blocks, CUDA_COUNT_TOKENS, masks, stream, *update)
                            : cuda_launch_count(&update->count, stream);

    if (error == cudaSuccess)
        error = launch(exchange_kernel, 1, EXCHANGE_THREADS, 0, stream, *update);
    if (error == cudaSuccess && update->expanded)
        error = launch(add_experts_kernel, blocks, CUDA_COUNT_TOKENS, 0, stream, *update);
    return error;
}

cudaError_t cuda_launch_rows(const struct cuda_rows *rows, int sms, cudaStream_t stream)
{
    return launch(rows_kernel, (unsigned)sms, ROWS_THREADS, 0, stream, *rows);
}

cudaError_t cuda_update_load(int)
{
    cudaError_t error = cudaFuncSetAttribute(count_experts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             CUDA_MAX_EXPERTS * MASK_WORDS * (int)sizeof(uint32_t));

    return error == cudaSuccess ? load_kernels(exchange_kernel, add_experts_kernel, rows_kernel) : error;
}
