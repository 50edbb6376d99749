/* SPDX-License-Identifier: Apache-2.0 */
/* device.cuh - what the kernels share: bulk copies, waits with a deadline, the start and the end of an operation. */
#ifndef EP_CUDA_DEVICE_CUH
#define EP_CUDA_DEVICE_CUH

#include "backend/cuda/kernels.h"

/* Looks at a flag between two looks at the clock and at what the host says. */
#define SPINS 512
/*
 * So many units of 2^LEASE_BITS ns, within which a thread that watches the host looks anew: SPINS looks at a flag take
 * up to 1.5 ms, and some time slices of other processes may come between two of its looks.
 */
#define LEASE_BITS 20
#define LEASE_UNITS 20u

#define WARP 32
#define ALL_LANES 0xffffffffu
#define VECTOR 16 /* bytes that a lane moves at once */

__device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t *barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;

    do {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}

/* Barriers that the copy engine completes must be visible to it. */
__device__ __forceinline__ void barriers_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* What this thread may read in global memory now, the copy engine may read, too. */
__device__ __forceinline__ void bulk_fence_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* The same for shared memory: the copy engine may read what has been written, and write where it has been read. */
__device__ __forceinline__ void bulk_fence_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* All but the newest group have read their shared memory. */
__device__ __forceinline__ void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

/* All groups of this thread have read their shared memory. */
__device__ __forceinline__ void bulk_wait_all_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* All but the newest group of this thread are written. */
__device__ __forceinline__ void bulk_wait_older()
{
    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
}

/* All groups of this thread are written. */
__device__ __forceinline__ void bulk_wait_all()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t *word)
{
    uint64_t value;

    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(uint64_t *word, uint64_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t global_ns()
{
    uint64_t now;

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/*
 * Number of the next unit that no warp has taken. The order in which warps come decides who moves what, never where it
 * goes. The last block of a kernel puts the counter back.
 */
__device__ __forceinline__ uint32_t claim_tile(const cuda_waits &waits)
{
    return atomicAdd(&waits.mine->next_tile, 1u);
}

/*
 * Is this thread to read words of the host? Where every warp that waits does, however rarely, the driver is held up
 * that works for another process on this GPU (bench/NOTES.md). So one of this rank's threads does, and tells the others
 * in device memory. It has a lease, which it renews with each look: nothing is to be given back, and where it waits no
 * more another one is next. `lease`: of this thread, 0 at first.
 */
__device__ __forceinline__ bool acquire_lease(uint32_t *until, uint32_t &lease, uint64_t now)
{
    uint32_t held = *(const volatile uint32_t *)until, next = (uint32_t)(now >> LEASE_BITS) + LEASE_UNITS;

    if (held != lease && next - held < LEASE_UNITS)
        return false;
    if (atomicCAS(until, held, next) != held)
        return false;
    lease = next;
    return true;
}

/* Passes on what the host says, if this thread is to. */
__device__ __forceinline__ void poll_host(const cuda_waits &waits, uint32_t &lease, uint64_t now)
{
    uint32_t lost;

    if (!acquire_lease(&waits.mine->watched_until, lease, now))
        return;
    lost = *(const volatile uint32_t *)&waits.report->lost;
    if (*(const volatile uint32_t *)&waits.report->abort)
        atomicCAS(&waits.mine->failure, 0u, CUDA_STOPPED);
    if (!(lost & ~*(const volatile uint32_t *)&waits.mine->lost))
        return;
    /* What these ranks have sent is here: whoever sees the word sees that, too. */
    __threadfence_system();
    atomicOr(&waits.mine->lost, lost);
}

/*
 * Has the host, or a kernel on this stream before this one, ended the work of this communicator? As far as a thread has
 * heard: whoever waits watches.
 */
__device__ __forceinline__ bool is_stopped(const cuda_waits &waits)
{
    return *(const volatile uint32_t *)&waits.mine->failure;
}

enum wait_end { WAIT_OK, WAIT_TIMEOUT, WAIT_LOST, WAIT_STOPPED };

struct has_reached {
    const uint64_t *word;
    uint64_t value;

    __device__ __forceinline__ bool operator()() const
    {
        return load_acquire(word) >= value;
    }
};

/* Has what is waited for moved on since the last question? The first one may be answered with yes. */
struct no_progress {
    __device__ __forceinline__ bool operator()() const
    {
        return false;
    }
};

template <typename T> struct counter_progress {
    const T *count;
    T before;

    __device__ __forceinline__ bool operator()()
    {
        T now = *(const volatile T *)count;
        bool moved = now != before;

        before = now;
        return moved;
    }
};

/*
 * Waits until `met()`, of what `rank` does: no longer than so many deadlines since it last moved, and not for a rank
 * that the host has found lost (`lost`: a word with a bit for each rank, NULL: nobody says so). What such a rank has
 * sent counts: `met()` is asked once more after the bit. A stop by the host ends it, too, and so does a kernel before
 * it that gave up: of a graph of many operations only the first waits for a rank that has died.
 */
template <typename Met, typename Moves = no_progress>
__device__ inline wait_end wait_for(const cuda_waits &waits, Met met, const uint32_t *lost, int rank, int deadlines = 1,
                                    Moves moves = Moves{})
{
    uint64_t begin = 0;
    uint32_t lease = 0;

    for (uint32_t spins = 1; !met(); spins++) {
        uint64_t now;

        if (spins % SPINS)
            continue;
        now = global_ns();
        if (!begin || moves())
            begin = now;
        poll_host(waits, lease, now);
        if (is_stopped(waits))
            return WAIT_STOPPED;
        if (lost && *(const volatile uint32_t *)lost >> rank & 1) {
            __threadfence_system();
            return met() ? WAIT_OK : WAIT_LOST;
        }
        if (now - begin > deadlines * waits.deadline_ns)
            return WAIT_TIMEOUT;
    }
    return WAIT_OK;
}

/*
 * Tells the host why the kernel ends without a result; kind 0: it was stopped, by the host or by what a peer has told.
 * Of several the first word stays. `rank` is counted from the first rank of this node: one of another node is below 0
 * or above the last one.
 */
__device__ inline void set_failure(const cuda_waits &waits, uint32_t kind, int rank, int phase)
{
    uint32_t told = atomicCAS(&waits.mine->failure, 0u, CUDA_STOPPED);
    uint32_t failure = kind ? CUDA_FAILURE(kind, waits.first + rank, phase) : told;

    if (failure > CUDA_STOPPED && !*(volatile uint32_t *)&waits.report->failure)
        *(volatile uint32_t *)&waits.report->failure = failure;
    __threadfence_system();
}

/* Waits for what `rank` does; false after the deadline, with the culprit reported, or when aborted. */
template <typename Met, typename Moves = no_progress>
__device__ inline bool wait_or_fail(const cuda_waits &waits, Met met, int rank, int phase, int deadlines = 1,
                                    Moves moves = Moves{})
{
    wait_end end = wait_for(waits, met, &waits.mine->lost, rank, deadlines, moves);

    if (end != WAIT_OK)
        set_failure(waits,
                    end == WAIT_TIMEOUT ? CUDA_FAILED_LATE
                    : end == WAIT_LOST  ? CUDA_FAILED_LOST
                                        : 0,
                    rank, phase);
    return end == WAIT_OK;
}

/* Waits for a word of `rank`; false after the deadline, with the culprit reported, or when aborted. */
__device__ inline bool wait_until(const cuda_waits &waits, const uint64_t *word, uint64_t value, int rank, int phase,
                                  int deadlines = 1)
{
    return wait_or_fail(waits, has_reached{word, value}, rank, phase, deadlines);
}

/*
 * Has no kernel before this one given up? One that was queued behind it has its number, and must not pass for it where
 * all that it waits for has come by now.
 */
__device__ inline bool may_begin(const cuda_waits &waits, int phase)
{
    if (!*(volatile uint32_t *)&waits.mine->failure)
        return true;
    set_failure(waits, 0, waits.rank, phase);
    return false;
}

/*
 * Every thread's accesses are complete. The last of `blocks` tells the peers and waits for theirs, which have so many
 * deadlines since they took their last unit of work; true for one thread, when all ranks have done their part. One
 * thread's fence covers what the barrier has shown it of the others; a fence of each thread takes 20 us more.
 */
__device__ inline bool operation_sync(const cuda_waits &waits, uint64_t number, bool sound, uint32_t blocks,
                                      int deadlines = 1)
{
    __shared__ bool last, failure;
    int i = (int)threadIdx.x;

    __syncthreads();
    if (waits.no_sync) {
        if (i)
            return false;
        __threadfence();
        if (atomicInc(&waits.mine->blocks, blocks - 1) != blocks - 1)
            return false;
        __threadfence();
        waits.mine->next_tile = 0;
        return false;
    }
    if (i == 0) {
        /* The last block's release to the peers passes on what it has acquired here of the others. */
        uint32_t before;

        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(&waits.mine->blocks)
                     : "memory");
        last = before == blocks - 1;
        /* Not the report: a look across PCIe takes 2 us. */
        failure = *(volatile uint32_t *)&waits.mine->failure;
        /* The fences above put this behind what the warps of all blocks have taken. */
        if (last)
            waits.mine->blocks = waits.mine->next_tile = 0;
    }
    __syncthreads();
    if (!last)
        return false;
    /* Where a block gave up the rows are not all there. */
    sound = sound && !failure;
    if (sound && i < waits.nranks) {
        store_release(&waits.peer[i]->done[waits.rank], number);
        sound = wait_or_fail(waits, has_reached{&waits.mine->done[i], number}, i, waits.done_phase, deadlines,
                             counter_progress<uint32_t>{&waits.peer[i]->next_tile, 0});
    }
    sound = __syncthreads_and(sound);
    return sound && i == 0;
}

/* By one thread, behind everything that the kernel does. */
__device__ inline void operation_complete(const cuda_waits &waits, uint64_t number)
{
    waits.mine->operation = number;
}

#endif
