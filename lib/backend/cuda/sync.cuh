/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sync.cuh - how the ranks of an operation synchronise: each publishes its op descriptor to the peers, compares theirs
 * with its own, and resolves the addresses of their buffers. Only kernels wait, no host.
 */
#ifndef EP_CUDA_SYNC_CUH
#define EP_CUDA_SYNC_CUH

#include "backend/cuda/device.cuh"

/* In shared memory of a block that moves rows. */
struct targets {
    cuda_target of[CUDA_MAX_RANKS]; /* [rank] where this rank's rows begin in its buffers */
    uint32_t copying;               /* other ranks whose kernels copy, a bit for each */
};

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
 */
__device__ inline uint64_t operation_publish(const cuda_waits &waits, const cuda_op_desc &desc)
{
    const int pairs = CUDA_DESC_WORDS / 2;
    uint64_t number = waits.no_sync ? 0 : *(const volatile uint64_t *)&waits.mine->operation + 1;

    if (waits.no_sync || blockIdx.x || (int)threadIdx.x >= waits.nranks * pairs)
        return number;
    /* Orders the words after the writes of earlier kernels. This thread has no stores of its own in flight yet. */
    __threadfence_system();
    for (int i = (int)threadIdx.x; i < waits.nranks * pairs; i += (int)blockDim.x) {
        int word = i % pairs * 2;

        store_pair(&waits.peer[i / pairs]->desc[waits.rank][word], number << 32 | desc.words[word],
                   number << 32 | desc.words[word + 1]);
    }
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

/* Resolves a buffer of `bytes` in a peer's descriptor to an address; NULL: the operation must end. */
__device__ inline unsigned char *resolve_address(const cuda_waits &waits, const uint32_t *words, int rank,
                                                 int64_t bytes)
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

/* Waits for a rank's descriptor, and finds where this rank's rows begin there. By one thread; false: end the kernel. */
__device__ __noinline__ static bool receive_desc(const cuda_waits &waits, const cuda_op_desc &desc,
                                                 const cuda_counts *counts, uint64_t number, int rank,
                                                 cuda_target &ret_target, bool &ret_copies)
{
    uint32_t words[CUDA_DESC_WORDS];

    if (!wait_or_fail(waits, has_published{waits.mine->desc[rank], (uint32_t)number, words}, rank, waits.ready_phase))
        return false;
#pragma unroll
    for (int word = 0; word < CUDA_DESC_COMPARED; word++)
        if (words[word] != desc.words[word])
            return disagree(waits, word, rank, desc.words[word], words[word]);
    ret_copies = words[CUDA_DESC_COPIES] && rank != waits.rank;
#pragma unroll
    for (int i = 0; i < CUDA_BUFFERS; i++) {
        int64_t row = desc.row_bytes[i], bytes = row ? row * counts->rows_on[rank] : 0;
        unsigned char *at = nullptr;

        if (bytes) {
            at = rank == waits.rank ? desc.own.at[i]
                                    : resolve_address(waits, words + CUDA_DESC_BUFFERS + 2 * i, rank, bytes);
            if (!at)
                return false;
            at += counts->base[rank] * row;
        }
        ret_target.at[i] = at;
    }
    return true;
}

/*
 * Has the plan the tokens that the operation was called for? Not if a graph contains only one of an update and the
 * operation, and the other was called with another number. The peers are notified, because they wait for this rank's
 * rows. By one thread; false: end the kernel.
 */
__device__ __noinline__ static bool has_tokens(const cuda_waits &waits, const cuda_counts *counts, int n_tokens)
{
    volatile uint32_t *detail = waits.report->detail;
    uint32_t failure = CUDA_FAILURE(CUDA_FAILED_TOKENS, waits.first + waits.rank, waits.ready_phase);

    if (counts->n_tokens == n_tokens)
        return true;
    detail[CUDA_DETAIL_MINE] = (uint32_t)n_tokens;
    detail[CUDA_DETAIL_THEIRS] = (uint32_t)counts->n_tokens;
    __threadfence_system();
    set_failure(waits, CUDA_FAILED_TOKENS, waits.rank, waits.ready_phase);
    for (int i = 0; i < waits.nranks; i++)
        if (i != waits.rank)
            *(volatile uint32_t *)&waits.peer[i]->failure = failure;
    return false;
}

/*
 * Waits for the descriptors of all ranks, and resolves the addresses of their buffers. `route` NULL: the operation
 * moves no rows. By all threads of every block; false: end the kernel at once.
 */
__device__ inline bool operation_begin(const cuda_waits &waits, const cuda_op_desc &desc, const cuda_route *route,
                                       uint64_t number, targets &ret_targets)
{
    const cuda_counts *counts = route ? route->counts : nullptr;
    int i = (int)threadIdx.x, n = waits.nranks;
    bool ok = true, copies = false;

    if (i < n) {
        cuda_target &target = ret_targets.of[i], &last = waits.mine->last[desc.kind][i];

        if (waits.no_sync) {
            target = last;
        } else {
            ok = receive_desc(waits, desc, counts, number, i, target, copies);
            if (ok && blockIdx.x == 0)
                last = target;
        }
    } else if (i == n && !waits.no_sync) {
        /* By a thread that waits for no rank, so that the checks cost no extra time. */
        ok = may_begin(waits, waits.ready_phase) && (!route || has_tokens(waits, counts, route->n_tokens));
    }
    if (i < WARP) {
        uint32_t votes;

        __syncwarp();
        votes = __ballot_sync(ALL_LANES, copies);
        if (i == 0)
            ret_targets.copying = votes;
    }
    return __syncthreads_and(ok);
}

/*
 * Would some rank receive more rows than its capacity? Then no rank moves any, and each reports it to its host. By all
 * threads of every block that moves rows.
 */
__device__ inline bool is_refused(const cuda_waits &waits, const cuda_counts *counts)
{
    if (!counts->refused[0])
        return false;
    if (!waits.no_sync && threadIdx.x == 0) {
        volatile int64_t *refused = waits.report->refused;

        refused[1] = counts->refused[1];
        refused[2] = counts->refused[2];
        __threadfence_system();
        refused[0] = counts->refused[0];
    }
    return true;
}

#endif
