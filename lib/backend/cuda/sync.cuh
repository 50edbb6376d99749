/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sync.cuh - how the ranks of an operation synchronise: each publishes its op descriptor to the peers, compares theirs
 * with its own, and resolves the addresses of their buffers. Only kernels wait, no host.
 */
#ifndef EP_CUDA_SYNC_CUH
#define EP_CUDA_SYNC_CUH

#include "backend/cuda/device.cuh"

/* Indices of the buffers of a target: as EP_GROUP_AT_X ... */
enum { AT_X, AT_SCALES, AT_INDEX, AT_WEIGHTS, AT_SOURCE };

/* In shared memory of a block that moves rows. */
struct targets {
    cuda_target of[CUDA_MAX_RANKS]; /* [rank] where this rank's rows begin in its buffers */
    uint32_t copying;               /* other ranks whose kernels copy, a bit for each */
    uint32_t changed;               /* ranks that name other buffers than in the last operation, likewise */
    bool refused;                   /* as is_refused() */
};

/* What a thread reads of the plan for the rank that it waits for: before it waits, so that it takes no time after. */
struct rank_rows {
    int64_t base, total; /* this rank's first row on that rank, and all rows there */
    uint32_t plan;       /* its number */
};

/* Is the rank of the group absent? */
__device__ __forceinline__ bool is_absent(const cuda_waits &waits, int rank)
{
    return __ldg(waits.mine->absent + rank / 32) >> rank % 32 & 1;
}

/* The number of the plan that an operation publishes. `counts` may be NULL. */
__device__ __forceinline__ uint32_t plan_number(const cuda_op_desc &desc, const cuda_counts *counts)
{
    return counts && !desc.words[CUDA_DESC_PLAN] ? counts->number : desc.words[CUDA_DESC_PLAN];
}

__device__ __forceinline__ void load_pair(const void *from, uint64_t &first, uint64_t &second)
{
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

__device__ __forceinline__ void store_pair(void *to, uint64_t first, uint64_t second)
{
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}

/*
 * Publishes the op descriptor, at the beginning of a kernel: this rank's buffers are ready, since earlier kernels have
 * ended. Returns the number of the operation; it is counted at the end of the last block, so all blocks read the same.
 * `counts`: of its plan; NULL: it has none, or its number is in `desc`. `block`: of those that call this; the first one
 * publishes.
 */
__device__ inline uint64_t operation_publish(const cuda_waits &waits, const cuda_op_desc &desc,
                                             const cuda_counts *counts, uint32_t block = blockIdx.x)
{
    const int pairs = CUDA_DESC_WORDS / 2;
    uint64_t number = waits.no_sync ? 0 : *(const volatile uint64_t *)&waits.mine->operation + 1;
    cuda_signals *first; /* loaded before the fence, together with the number, as the next one */
    uint32_t plan;

    if (waits.no_sync || block || (int)threadIdx.x >= waits.nranks * pairs)
        return number;
    first = signals_of(waits, (int)threadIdx.x / pairs);
    plan = plan_number(desc, counts);
    /* Orders the words after the writes of earlier kernels. */
    __threadfence_system();
    for (int i = (int)threadIdx.x; i < waits.nranks * pairs; i += (int)blockDim.x) {
        cuda_signals *peer = i == (int)threadIdx.x ? first : signals_of(waits, i / pairs);
        int word = i % pairs * 2;

        if (peer)
            store_pair(&peer->desc[waits.rank][word], number << 32 | desc.words[word],
                       number << 32 | (word + 1 == CUDA_DESC_PLAN ? plan : desc.words[word + 1]));
    }
    HOLD(waits, CUDA_POINT_PUBLISHED);
    return number;
}

/* Has a rank published all words of this operation? */
struct has_published {
    const uint64_t *words;
    uint32_t number;
    uint32_t *ret_words;

    __device__ __forceinline__ bool operator()() const
    {
        uint64_t word[CUDA_DESC_WORDS];
        bool all = true;

#pragma unroll
        for (int i = CUDA_DESC_WORDS - 2; i > 0; i -= 2)
            load_pair(words + i, word[i], word[i + 1]);
        word[1] = *(const volatile uint64_t *)(words + 1);
        /* The acquire comes last, so that it costs no extra time: later reads see what was written before the words. */
        word[0] = load_acquire(words);
#pragma unroll
        for (int i = 0; i < CUDA_DESC_WORDS; i++) {
            all &= (uint32_t)(word[i] >> 32) == number;
            ret_words[i] = (uint32_t)word[i];
        }
        return all;
    }
};

/* Is the allocation of that generation mapped here? */
struct is_mapped {
    const cuda_map_entry *entry, *host_entry;
    uint32_t generation;
    cuda_map_entry *ret_entry;

    __device__ __forceinline__ bool is_in(const cuda_map_entry *table) const
    {
        uint64_t base, rest;

        load_pair(table, base, rest);
        *ret_entry = {reinterpret_cast<unsigned char *>(base), (uint32_t)rest, (uint32_t)(rest >> 32)};
        return base && (ret_entry->generation & CUDA_GENERATION_MASK) == generation;
    }

    /* The copy to device memory may be waiting for this kernel: after a lazy module load nothing starts while it runs.
     */
    __device__ __forceinline__ bool operator()() const
    {
        return is_in(entry) || is_in(host_entry);
    }
};

/* Ends the operation: the rank has published a different word. */
__device__ inline bool disagree(const cuda_waits &waits, int word, int rank, uint32_t mine, uint32_t theirs)
{
    volatile uint32_t *detail = waits.report->detail;

    /* After a failed kernel, whose report this one must not change, the next one finds ranks in other calls. */
    if (!may_begin(waits, waits.ready_phase))
        return false;
    detail[CUDA_DETAIL_WORD] = (uint32_t)word;
    detail[CUDA_DETAIL_RANK] = (uint32_t)(waits.first + rank);
    detail[CUDA_DETAIL_MINE] = mine;
    detail[CUDA_DETAIL_THEIRS] = theirs;
    __threadfence_system();
    set_failure(waits, CUDA_FAILED_DISAGREE, rank, waits.ready_phase);
    return false;
}

/*
 * Resolves a buffer of `bytes` in a peer's descriptor to an address, and the bytes from there to the end of the
 * allocation; NULL: the operation must end.
 */
__device__ inline unsigned char *resolve_address(const cuda_waits &waits, const uint32_t *words, int rank,
                                                 int64_t bytes, int64_t &ret_bytes)
{
    uint32_t slot = words[0] >> CUDA_GENERATION_BITS, generation = words[0] & CUDA_GENERATION_MASK;
    uint64_t offset = (uint64_t)words[1] * CUDA_DESC_GRAIN, size;
    cuda_map_entry entry = {};
    size_t at;
    wait_end end;

    if (!generation) {
        set_failure(waits, CUDA_FAILED_DAMAGE, rank, waits.ready_phase);
        return nullptr;
    }
    at = (size_t)rank * CUDA_SLOTS + slot;
    end = wait_for(waits, is_mapped{waits.map_entries + at, waits.host_map_entries + at, generation, &entry},
                   &waits.mine->lost, rank);
    size = (uint64_t)entry.granules * CUDA_GRANULE;
    ret_bytes = (int64_t)(size - offset);
    if (end == WAIT_OK && offset <= size && (uint64_t)bytes <= size - offset)
        return entry.base + offset;
    set_failure(waits,
                end == WAIT_OK        ? CUDA_FAILED_DAMAGE
                : end == WAIT_TIMEOUT ? CUDA_FAILED_UNMAPPED
                : end == WAIT_LOST    ? CUDA_FAILED_LOST
                                      : 0,
                rank, waits.ready_phase);
    return nullptr;
}

__device__ __noinline__ static bool wait_for_desc(const cuda_waits &waits, uint64_t number, int rank)
{
    uint32_t words[CUDA_DESC_WORDS];

    return wait_or_fail(waits, has_published{waits.mine->desc[rank], (uint32_t)number, words}, rank, waits.ready_phase);
}

/*
 * Compares a rank's descriptor, which has arrived, with this rank's, and finds its buffers. `first`: in the first block
 * that moves rows. By one thread; false: end the kernel.
 */
__device__ __noinline__ static bool find_buffers(const cuda_waits &waits, const cuda_op_desc &desc,
                                                 const rank_rows &rows, int rank, bool first, cuda_target &ret_target)
{
    const volatile uint64_t *theirs = waits.mine->desc[rank];
    cuda_found found = {};
    uint32_t words[CUDA_DESC_WORDS];

    for (int word = 0; word < CUDA_DESC_WORDS; word++) {
        uint32_t mine = word == CUDA_DESC_PLAN ? rows.plan : desc.words[word];

        words[word] = (uint32_t)theirs[word];
        if (word < CUDA_DESC_COMPARED && words[word] != mine)
            return disagree(waits, word, rank, mine, words[word]);
    }
    for (int i = 0; i < CUDA_BUFFERS; i++) {
        int64_t row = desc.row_bytes[i], bytes = row * rows.total;
        const uint32_t *buffer = words + CUDA_DESC_BUFFERS + 2 * i;

        if (!bytes || rank == waits.rank)
            continue;
        found.at[i] = resolve_address(waits, buffer, rank, bytes, found.bytes[i]);
        if (!found.at[i])
            return false;
        found.words[2 * i] = buffer[0];
        found.words[2 * i + 1] = buffer[1];
        ret_target.at[i] = found.at[i] + rows.base * row;
    }
    if (first)
        waits.mine->next[rank] = found;
    return true;
}

/*
 * Finds where this rank's rows begin in the buffers of a rank, as if these were those of the last operation. Returns
 * whether they are large enough.
 */
__device__ __forceinline__ bool assume_buffers(const cuda_waits &waits, const cuda_op_desc &desc, const rank_rows &rows,
                                               int rank, cuda_target &ret_target)
{
    const cuda_found &found = waits.mine->found[desc.kind][rank];
    bool own = rank == waits.rank, fits = true;

#pragma unroll
    for (int i = 0; i < CUDA_BUFFERS; i++) {
        int64_t row = desc.row_bytes[i], bytes = row * rows.total;

        fits &= own || bytes <= found.bytes[i];
        ret_target.at[i] = bytes ? (own ? desc.own.at[i] : found.at[i]) + rows.base * row : nullptr;
    }
    return fits;
}

/*
 * Waits for a rank's descriptor, and finds where this rank's rows begin there. In a loop of layers ranks name the same
 * buffers again and again, so everything that depends on these is read before the descriptor arrives: reading the table
 * of mappings afterwards takes 2 to 3 us, mostly to fetch instructions (docs/decisions.md). By one thread; false: end
 * the kernel.
 */
__device__ __forceinline__ bool receive_desc(const cuda_waits &waits, const cuda_op_desc &desc, const rank_rows &rows,
                                             uint64_t number, int rank, bool first, cuda_target &ret_target,
                                             bool &ret_copies, bool &ret_changed)
{
    bool same = assume_buffers(waits, desc, rows, rank, ret_target), own = rank == waits.rank;
    uint32_t words[CUDA_DESC_WORDS], known[2 * CUDA_BUFFERS];
    has_published published = {waits.mine->desc[rank], (uint32_t)number, words};
    int polls = 0;

#pragma unroll
    for (int i = 0; i < 2 * CUDA_BUFFERS; i++)
        known[i] = waits.mine->found[desc.kind][rank].words[i];
    while (!published())
        if (++polls == SPINS && !wait_for_desc(waits, number, rank))
            return false;
#pragma unroll
    for (int word = 0; word < CUDA_DESC_COMPARED; word++)
        same &= words[word] == (word == CUDA_DESC_PLAN ? rows.plan : desc.words[word]);
#pragma unroll
    for (int i = 0; i < 2 * CUDA_BUFFERS; i++)
        same &= own || !desc.row_bytes[i / 2] || words[CUDA_DESC_BUFFERS + i] == known[i];
    ret_copies = words[CUDA_DESC_COPIES] && !own;
    ret_changed = !same;
    return same || find_buffers(waits, desc, rows, rank, first, ret_target);
}

__device__ __forceinline__ cuda_entry entry_of_lane(cuda_entry entry, int lane)
{
    entry.row = __shfl_sync(ALL_LANES, entry.row, lane);
    entry.local = (uint16_t)__shfl_sync(ALL_LANES, entry.local, lane);
    entry.k = (uint16_t)__shfl_sync(ALL_LANES, entry.k, lane);
    return entry;
}

/*
 * Has the plan the tokens that the operation was called for? Not if a graph contains only one of an update and the
 * operation, and the other was called with another number. The peers are notified, because they wait for this rank's
 * rows. By one thread; false: end the kernel.
 */
__device__ __noinline__ static bool has_tokens(const cuda_waits &waits, const cuda_counts *counts, int n_tokens)
{
    volatile uint32_t *detail = waits.report->detail;

    if (counts->n_tokens == n_tokens)
        return true;
    detail[CUDA_DETAIL_MINE] = (uint32_t)n_tokens;
    detail[CUDA_DETAIL_THEIRS] = (uint32_t)counts->n_tokens;
    __threadfence_system();
    set_failure(waits, CUDA_FAILED_TOKENS, waits.rank, waits.ready_phase);
    for (int i = 0; i < waits.nranks; i++)
        if (i != waits.rank)
            fail_peer(waits, i, CUDA_FAILED_TOKENS, waits.ready_phase);
    return false;
}

/* Is the plan of the members of now? Not if a graph has operations on one that was not renewed. As has_tokens(). */
__device__ __forceinline__ bool is_current(const cuda_waits &waits, const cuda_counts *counts)
{
    if (counts->generation == waits.mine->generation)
        return true;
    set_failure(waits, CUDA_FAILED_FORMER, waits.rank, waits.ready_phase);
    return false;
}

/*
 * Waits for the descriptors of all ranks, and resolves the addresses of their buffers. `counts`: as in
 * operation_publish(). `route` NULL: the operation moves no rows. `block`: its number among those that call this. By
 * all threads; false: end the kernel at once.
 */
__device__ inline bool operation_begin(const cuda_waits &waits, const cuda_op_desc &desc, const cuda_counts *counts,
                                       const cuda_route *route, uint64_t number, targets &ret_targets, uint32_t block)
{
    int i = (int)threadIdx.x, n = waits.nranks;
    rank_rows rows = {0, 0, 0};
    bool ok = true, copies = false, changed = false;

    if (i < n)
        rows = {route ? counts->base[i] : 0, route ? counts->rows_on[i] : 0, plan_number(desc, counts)};
    else if (i == n)
        ret_targets.refused = route && counts->refused[0];
    if (i < n) {
        if (waits.no_sync)
            ok = assume_buffers(waits, desc, rows, i, ret_targets.of[i]);
        else if (signals_of(waits, i))
            ok = receive_desc(waits, desc, rows, number, i, block == 0, ret_targets.of[i], copies, changed);
        else
            ok = !rows.total; /* absent */
        HOLD(waits, CUDA_POINT_BEGUN);
    } else if (i == n && !waits.no_sync) {
        /* By a thread that waits for no rank, so that the checks cost no extra time. */
        ok = may_begin(waits, waits.ready_phase) &&
             (!counts || desc.words[CUDA_DESC_PLAN] || is_current(waits, counts)) &&
             (!route || has_tokens(waits, counts, route->n_tokens));
    }
    if (i < WARP) {
        uint32_t copying, differ;

        __syncwarp();
        copying = __ballot_sync(ALL_LANES, copies);
        differ = __ballot_sync(ALL_LANES, changed);
        if (i == 0) {
            ret_targets.copying = copying;
            ret_targets.changed = differ;
        }
    }
    return __syncthreads_and(ok);
}

/*
 * Would some rank receive more rows than its capacity? Then no rank moves any, and each reports it to its host. By all
 * threads of every block that moves rows, after operation_begin() only if targets.refused, which has read the word.
 */
__device__ inline bool is_refused(const cuda_waits &waits, const cuda_counts *counts)
{
    if (!counts->refused[0])
        return false;
    /* Of several the first is reported. */
    if (!waits.no_sync && threadIdx.x == 0 && !((volatile int64_t *)waits.report->refused)[0]) {
        volatile int64_t *refused = waits.report->refused;

        refused[1] = counts->refused[1];
        refused[2] = counts->refused[2];
        __threadfence_system();
        refused[0] = counts->refused[0];
    }
    return true;
}

#endif
