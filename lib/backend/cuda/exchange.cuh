/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exchange.cuh - how the ranks of a node exchange the counts of a plan, and what each computes from them: by the block
 * that has finished counting last, so that a new plan of the rank layout is one kernel.
 */
#ifndef EP_CUDA_EXCHANGE_CUH
#define EP_CUDA_EXCHANGE_CUH

#include "backend/cuda/update.cuh"

/*
 * Is this the block that comes here last? It sees what the others have written before. By all threads; one of them
 * releases and acquires for the block.
 */
__device__ inline bool is_last_block(uint32_t *blocks_done)
{
    __shared__ bool last;

    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t before, most = gridDim.x - 1; /* 0 again afterwards */

        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(blocks_done), "r"(most)
                     : "memory");
        last = before == most;
    }
    __syncthreads();
    return last;
}

/* Hands on what the count has found, and forgets it. By a thread for each word. */
__device__ inline void move_found(const cuda_count &c)
{
    if (threadIdx.x >= CUDA_FOUND_WORDS)
        return;
    c.ret_found[threadIdx.x] = __ldcg(c.found + threadIdx.x);
    c.found[threadIdx.x] = 0;
}

/* Publishes this rank's counts to every rank. */
__device__ inline void publish_counts(const cuda_update &u, uint64_t number)
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
    HOLD(u.waits, CUDA_POINT_ROW);
}

struct exchange {
    int32_t total[CUDA_MAX_EXPERTS], before[CUDA_MAX_EXPERTS]; /* tokens for each expert: all, and of lower ranks */
    int32_t of[CUDA_MAX_RANKS][CUDA_MAX_RANKS + 1];            /* [source][rank] tokens, then its capacity */
    int64_t base[CUDA_MAX_RANKS], rows_on[CUDA_MAX_RANKS];
    int refused; /* the first rank whose rows exceed its capacity; R: none */
};

__device__ inline bool receive_counts(const cuda_update &u, uint64_t number, exchange &x)
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

/*
 * Computes where the rows of each of a rank's experts begin, and their number. By a warp. Not inlined: the kernel of
 * the rank layout has no registers for it.
 */
__device__ __noinline__ inline void assign_expert_rows(const cuda_update &u, exchange &x, int rank)
{
    int n_local = u.count.n_experts / u.count.nranks, lane = (int)threadIdx.x % WARP;
    bool mine = rank == u.waits.rank;
    int64_t start = 0; /* of this pass's first expert */

    for (int first = 0; first < n_local; first += WARP) {
        int local = first + lane, expert = rank * n_local + local;
        int64_t exact = local < n_local ? x.total[expert] : 0;
        int64_t rows = (exact + u.alignment - 1) / u.alignment * u.alignment, end = start + sum_lanes(rows);

        if (local < n_local)
            u.expert_base[expert] = (int32_t)(end - rows) + x.before[expert];
        if (local < n_local && mine) {
            u.expert_start[local] = (int32_t)(end - rows);
            u.expert_exact[local] = (int32_t)exact;
        }
        start = __shfl_sync(ALL_LANES, end, WARP - 1);
    }
    if (lane == 0 && mine)
        u.expert_start[n_local] = (int32_t)start;
    if (lane == 0)
        x.rows_on[rank] = start;
}

/* Computes what each rank receives. By a thread for each. */
__device__ inline void assign_rank_rows(const cuda_update &u, exchange &x)
{
    int n = u.count.nranks, rank = (int)threadIdx.x, n_local = u.count.n_experts / n;
    int64_t total = 0, base = 0;

    if (rank == 0)
        x.refused = n;
    for (int local = rank; local < n_local && !u.expanded; local += (int)blockDim.x)
        u.expert_exact[local] = x.total[u.waits.rank * n_local + local];
    for (int i = rank / WARP; i < n && u.expanded; i += (int)blockDim.x / WARP)
        assign_expert_rows(u, x, i);
    __syncthreads();
    if (rank < n) {
        for (int source = 0; source < n; source++) {
            base += source < u.waits.rank ? x.of[source][rank] : 0;
            total += x.of[source][rank];
            u.prefix[source * n + rank] = (int32_t)total;
        }
        x.base[rank] = u.expanded ? 0 : base;
        if (!u.expanded)
            x.rows_on[rank] = total;
        if (x.rows_on[rank] > x.of[rank][CUDA_MAX_RANKS])
            atomicMin(&x.refused, rank);
    }
    __syncthreads();
}

/* Writes the counts of the plan. If the rows of a rank exceed its capacity, nothing moves; all ranks see the same. */
__device__ inline void write_counts(const cuda_update &u, const exchange &x)
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
__device__ inline void count_sent(const cuda_update &u, unsigned long long *sent, unsigned long long *wire)
{
    int n = u.count.nranks, n_local = u.count.n_experts / n;
    const int32_t *counts = u.count.totals + (u.expanded ? n : 0);

    unsigned long long all = 0, others = 0;

    for (int i = (int)threadIdx.x; i < (u.expanded ? u.count.n_experts : n); i += (int)blockDim.x) {
        all += (unsigned long long)counts[i];
        others += (u.expanded ? i / n_local : i) != u.waits.rank ? (unsigned long long)counts[i] : 0;
    }
    all = sum_lanes(all);
    others = sum_lanes(others);
    if (threadIdx.x % WARP == WARP - 1) {
        atomicAdd(sent, all);
        atomicAdd(wire, others);
    }
}

/* Makes what was written to `info` known to the host. By all threads. */
__device__ inline void publish_info(const cuda_update &u)
{
    __syncthreads();
    if (threadIdx.x)
        return;
    __threadfence_system(); /* for all that the barrier has made visible */
    *(volatile uint64_t *)&u.info->number = u.number;
}

__device__ inline void write_info(const cuda_update &u, const exchange &x)
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
__device__ inline void clear_counts(const cuda_update &u)
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
__device__ inline void refuse_update(const cuda_update &u)
{
    if (!u.exact) {
        refuse_routing(u.waits);
        return;
    }
    if (threadIdx.x == 0)
        *(volatile uint32_t *)&u.info->bad = 1;
    publish_info(u);
}

/* The exchange, an operation of its own. By all threads of one block, after the totals and what the count has found. */
__device__ inline void exchange_counts(const cuda_update &u, exchange &x)
{
    __shared__ targets targets;
    uint64_t number;
    bool ok;

    if (u.desc.words[CUDA_DESC_PLAN] && threadIdx.x == 0) {
        u.counts->number = u.desc.words[CUDA_DESC_PLAN];
        u.counts->generation = u.waits.mine->generation;
    }
    __syncthreads();
    if (u.count.ret_found[CUDA_FOUND_BAD]) {
        clear_counts(u);
        refuse_update(u);
        return;
    }
    number = operation_publish(u.waits, u.desc, u.counts, 0);
    publish_counts(u, number);
    ok = operation_begin(u.waits, u.desc, u.counts, nullptr, number, targets, 0) && receive_counts(u, number, x);
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

#endif
