/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sync.cuh - how the ranks of an operation synchronise: each publishes to its peers what it does and where its buffers
 * are, and reads from what they publish whether they do the same and where its rows go. Only kernels wait, no host.
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
 * Tells the peers that this rank's buffers are ready: the kernels before this one have ended. First thing in a kernel.
 * The number of the operation: it is counted when all blocks have come to its end, so all read the same.
 */
__device__ inline uint64_t operation_publish(const cuda_waits &waits, const cuda_op_desc &desc)
{
    const int pairs = CUDA_DESC_WORDS / 2;
    uint64_t number = waits.no_sync ? 0 : *(const volatile uint64_t *)&waits.mine->operation + 1;

    if (waits.no_sync || blockIdx.x || (int)threadIdx.x >= waits.nranks * pairs)
        return number;
    /* With the words comes what the kernels before this one have written. Nothing of this thread is under way yet. */
    __threadfence_system();
    for (int i = (int)threadIdx.x; i < waits.nranks * pairs; i += (int)blockDim.x) {
        int word = i % pairs * 2;

        store_pair(&waits.peer[i / pairs]->desc[waits.rank][word], number << 32 | desc.words[word],
                   number << 32 | desc.words[word + 1]);
    }
    return number;
}

/* Has a rank told all words of this operation? */
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
        /* Last, so that it takes no time of its own: what this rank reads next is what was written before the words. */
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
    const cuda_map_entry *place, *host_place;
    uint32_t generation;
    cuda_map_entry *ret_place;

    __device__ __forceinline__ bool is_in(const cuda_map_entry *table) const
    {
        uint64_t base, rest;

        load_pair(table, base, rest);
        *ret_place = {reinterpret_cast<unsigned char *>(base), (uint32_t)rest, (uint32_t)(rest >> 32)};
        return base && (ret_place->generation & CUDA_GENERATION_MASK) == generation;
    }

    /* The copy into device memory may be behind this kernel: after a lazily loaded module nothing starts beside it. */
    __device__ __forceinline__ bool operator()() const
    {
        return is_in(place) || is_in(host_place);
    }
};

/* Ends the operation: the rank has told another word than this one. */
__device__ inline bool disagree(const cuda_waits &waits, int word, int rank, uint32_t mine, uint32_t theirs)
{
    volatile uint32_t *detail = waits.report->detail;

    detail[CUDA_DETAIL_WORD] = (uint32_t)word;
    detail[CUDA_DETAIL_RANK] = (uint32_t)(waits.first + rank);
    detail[CUDA_DETAIL_MINE] = mine;
    detail[CUDA_DETAIL_THEIRS] = theirs;
    __threadfence_system();
    set_failure(waits, CUDA_FAILED_DISAGREE, rank, waits.ready_phase);
    return false;
}

/* The address of `bytes` in memory of a peer, by what it has told of them; NULL: the operation is to end. */
__device__ inline unsigned char *resolve_address(const cuda_waits &waits, const uint32_t *told, int rank, int64_t bytes)
{
    uint32_t slot = told[0] >> CUDA_GENERATION_BITS, generation = told[0] & CUDA_GENERATION_MASK;
    uint64_t offset = (uint64_t)told[1] * CUDA_DESC_GRAIN, size;
    cuda_map_entry place = {};
    size_t at;
    wait_end end;

    if (!generation) {
        set_failure(waits, CUDA_FAILED_DAMAGE, rank, waits.ready_phase);
        return nullptr;
    }
    at = (size_t)rank * CUDA_SLOTS + slot;
    end = wait_for(waits, is_mapped{waits.map_entries + at, waits.host_map_entries + at, generation, &place},
                   &waits.mine->lost, rank);
    size = (uint64_t)place.granules * CUDA_GRANULE;
    if (end == WAIT_OK && offset <= size && (uint64_t)bytes <= size - offset)
        return place.base + offset;
    set_failure(waits,
                end == WAIT_OK        ? CUDA_FAILED_DAMAGE
                : end == WAIT_TIMEOUT ? CUDA_FAILED_UNMAPPED
                : end == WAIT_LOST    ? CUDA_FAILED_LOST
                                      : 0,
                rank, waits.ready_phase);
    return nullptr;
}

/* Waits for what a rank tells, and finds where this rank's rows begin there. By one thread; false: leave. */
__device__ __noinline__ static bool receive_desc(const cuda_waits &waits, const cuda_op_desc &desc,
                                                 const cuda_counts *counts, uint64_t number, int rank,
                                                 cuda_target &ret_target, bool &ret_copies)
{
    uint32_t told[CUDA_DESC_WORDS];

    if (!wait_or_fail(waits, has_published{waits.mine->desc[rank], (uint32_t)number, told}, rank, waits.ready_phase))
        return false;
#pragma unroll
    for (int word = 0; word < CUDA_DESC_COMPARED; word++)
        if (told[word] != desc.words[word])
            return disagree(waits, word, rank, desc.words[word], told[word]);
    ret_copies = told[CUDA_DESC_COPIES] && rank != waits.rank;
#pragma unroll
    for (int i = 0; i < CUDA_BUFFERS; i++) {
        int64_t row = desc.row_bytes[i], bytes = row ? row * counts->rows_on[rank] : 0;
        unsigned char *at = nullptr;

        if (bytes) {
            at = rank == waits.rank ? desc.own.at[i]
                                    : resolve_address(waits, told + CUDA_DESC_BUFFERS + 2 * i, rank, bytes);
            if (!at)
                return false;
            at += counts->base[rank] * row;
        }
        ret_target.at[i] = at;
    }
    return true;
}

/*
 * Waits until all ranks are ready, and finds the places of their buffers. By all threads of every block; false: do
 * nothing and leave.
 */
__device__ inline bool operation_begin(const cuda_waits &waits, const cuda_op_desc &desc, const cuda_counts *counts,
                                       uint64_t number, targets &ret_targets)
{
    int i = (int)threadIdx.x, n = waits.nranks;
    bool sound = true, copies = false;

    if (i < n) {
        cuda_target &target = ret_targets.of[i], &last = waits.mine->last[desc.kind][i];

        if (waits.no_sync) {
            target = last;
        } else {
            sound = receive_desc(waits, desc, counts, number, i, target, copies);
            if (sound && blockIdx.x == 0)
                last = target;
        }
    } else if (i == n && !waits.no_sync) {
        /* The look at failure by a thread that waits for nobody takes no time of its own. */
        sound = may_begin(waits, waits.ready_phase);
    }
    if (i < WARP) {
        uint32_t votes;

        __syncwarp();
        votes = __ballot_sync(ALL_LANES, copies);
        if (i == 0)
            ret_targets.copying = votes;
    }
    return __syncthreads_and(sound);
}

/*
 * Would some rank receive more rows than it can? Then no rank moves any, and each tells its host. By all threads of
 * every block that moves.
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
