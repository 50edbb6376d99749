/* SPDX-License-Identifier: Apache-2.0 */
/* device.cuh - what the kernels share: bulk copies, waits with a deadline, the start and the end of an operation. */
#ifndef EP_CUDA_DEVICE_CUH
#define EP_CUDA_DEVICE_CUH

#include "backend/cuda/kernels.h"

/* Polls of a flag between two reads of the clock and of the host's words. */
#define SPINS 512
/*
 * A lease lasts LEASE_UNITS units of 2^LEASE_BITS ns; the thread that polls the host renews it with each poll. SPINS
 * polls of a flag take up to 1.5 ms, and time slices of other processes may come in between.
 */
#define LEASE_BITS 20
#define LEASE_UNITS 20u

#define WARP 32
#define ALL_LANES 0xffffffffu
#define VECTOR 16 /* bytes that a lane moves at once */

/* For the functions that cuda_kernels_load() calls. */
template <typename... Kernels> cudaError_t load_kernels(Kernels... kernels)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;

    ((error = error == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : error), ...);
    return error;
}

/*
 * Programmatic dependent launch: while the previous kernel of the stream ends, the blocks of the next one already
 * start, which takes 1.2 us off each launch (docs/decisions.md). Captures have it since CUDA 12.3.
 */
inline bool may_start_early()
{
    static const bool can = [] {
        int driver = 0;

        return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
    }();

    return can;
}

/* Launches a kernel that begins with await_stream(). */
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), unsigned blocks, unsigned threads, size_t shared_bytes,
                   cudaStream_t stream, const Params &...params)
{
    void *addresses[] = {const_cast<void *>(static_cast<const void *>(&params))...};
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};

    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = may_start_early();
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void *>(kernel), addresses);
}

/*
 * The first statement of every kernel: waits for everything that was queued in the stream before it. Without it the
 * kernel would read what the previous one has not written yet.
 */
__device__ __forceinline__ void await_stream()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* The sum of n over this lane and those before it. By all lanes. */
template <typename T> __device__ T sum_lanes(T n)
{
    for (unsigned i = 1; i < WARP; i *= 2) {
        T other = __shfl_up_sync(ALL_LANES, n, i);

        n += threadIdx.x % WARP >= i ? other : 0;
    }
    return n;
}

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

/* Makes initialised barriers visible to the copy engine, which completes them. */
__device__ __forceinline__ void barriers_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* The copy engine may now read what this thread may read in global memory. */
__device__ __forceinline__ void bulk_fence_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* The copy engine may now read what was written to shared memory, and write where it was read. */
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

/* Waits until all but the newest group have read their shared memory. */
__device__ __forceinline__ void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

/* Waits until all groups of this thread have read their shared memory. */
__device__ __forceinline__ void bulk_wait_all_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Waits until all but the newest group of this thread are written. */
__device__ __forceinline__ void bulk_wait_older()
{
    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
}

/* Waits until all groups of this thread are written. */
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
 * Claims the next tile. The order of the claims decides which warp moves a row, never where it goes. The last block of
 * a kernel resets the counter.
 */
__device__ __forceinline__ uint32_t claim_tile(const cuda_waits &waits)
{
    return atomicAdd(&waits.mine->next_tile, 1u);
}

/*
 * Shall this thread read the host's words? If every waiting warp reads them, however rarely, the driver is slowed down
 * when it works for another process on this GPU (docs/decisions.md). So one thread of this rank reads them, and
 * publishes them to the others in device memory. It holds a lease, which it renews with each poll: it need not release
 * it, and when it no longer waits another thread acquires it. `lease`: of this thread, 0 at first.
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

/* Copies the host's words to device memory, if this thread holds or acquires the lease: true. */
__device__ __forceinline__ bool poll_host(const cuda_waits &waits, uint32_t &lease, uint64_t now)
{
    uint32_t lost;

    if (!acquire_lease(&waits.mine->watched_until, lease, now))
        return false;
    lost = *(const volatile uint32_t *)&waits.report->lost;
    if (*(const volatile uint32_t *)&waits.report->abort)
        atomicCAS(&waits.mine->failure, 0u, CUDA_STOPPED);
    if (!(lost & ~*(const volatile uint32_t *)&waits.mine->lost))
        return true;
    /* All that these ranks have sent is here: a thread that sees the word must see that, too. */
    __threadfence_system();
    atomicOr(&waits.mine->lost, lost);
    return true;
}

/*
 * Has the host, or an earlier kernel, stopped the work of this communicator? Reads the copy in device memory, which
 * waiting threads keep up to date.
 */
__device__ __forceinline__ bool is_stopped(const cuda_waits &waits)
{
    return *(const volatile uint32_t *)&waits.mine->failure;
}

#ifdef EPKIT_POINTS
__device__ __noinline__ static void hold_at(const cuda_waits &waits, int point)
{
    uint32_t word = CUDA_POINT(point, waits.ready_phase), held = word | CUDA_POINT_REACHED;
    uint32_t *at = &waits.report->point;

    if (*(volatile uint32_t *)at != word || atomicCAS(at, word, held) != word)
        return;
    while (*(volatile uint32_t *)at == held)
        __nanosleep(5000);
}
#define HOLD(waits, point) hold_at(waits, point)
#else
#define HOLD(waits, point) ((void)0)
#endif

enum wait_end { WAIT_OK, WAIT_TIMEOUT, WAIT_LOST, WAIT_STOPPED };

struct has_reached {
    const uint64_t *word;
    uint64_t value;

    __device__ __forceinline__ bool operator()() const
    {
        return load_acquire(word) >= value;
    }
};

/* Progress since the last call, which restarts the deadline of a wait. The first call may return true. */
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
        bool advanced = now != before;

        before = now;
        return advanced;
    }
};

/*
 * Waits for `rank` until `met()` is true. Ends after `deadlines` deadlines without progress, and for a rank that the
 * host has found lost (`lost`: a bit mask of ranks; NULL: unknown). What a lost rank has sent counts: `met()` is
 * evaluated once more after its bit is seen. A stop by the host or the failure of an earlier kernel ends the wait, too:
 * in a graph of many operations only the first waits for a rank that has died. From a quarter of the deadline on, the
 * host is told which rank of this node is waited for: what others wait for may be late because of that one.
 */
template <typename Met, typename Progress = no_progress>
__device__ inline wait_end wait_for(const cuda_waits &waits, Met met, const uint32_t *lost, int rank, int deadlines = 1,
                                    Progress progress = Progress{})
{
    uint64_t begin = 0;
    uint32_t lease = 0;

    for (uint32_t spins = 1; !met(); spins++) {
        uint64_t now;

        if (spins % SPINS)
            continue;
        now = global_ns();
        if (!begin || progress())
            begin = now;
        if (poll_host(waits, lease, now) && lost == &waits.mine->lost && now - begin > waits.deadline_ns / 4)
            *(volatile uint32_t *)&waits.report->waits_for = (uint32_t)(rank + 1) << 8 | (uint32_t)waits.ready_phase;
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
 * Reports to the host why the kernel ends without a result; kind 0: the host or a peer has stopped it. The first report
 * stays. `rank` is counted from the first rank of this node: a rank of another node is below 0 or above the last one.
 */
__device__ inline void set_failure(const cuda_waits &waits, uint32_t kind, int rank, int phase)
{
    uint32_t before = atomicCAS(&waits.mine->failure, 0u, CUDA_STOPPED);
    uint32_t failure = kind ? CUDA_FAILURE(kind, waits.first + rank, phase) : before;

    if (failure > CUDA_STOPPED && !*(volatile uint32_t *)&waits.report->failure)
        *(volatile uint32_t *)&waits.report->failure = failure;
    __threadfence_system();
}

__device__ inline void fill_words(unsigned char *to, int64_t bytes, uint32_t word)
{
    int64_t n = bytes / (int64_t)sizeof(word);

    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        reinterpret_cast<uint32_t *>(to)[i] = word;
}

/* Fills what a dispatch of `rows` rows leaves of its outputs. By all threads of the kernel. */
__device__ inline void fill_rows(const cuda_fill &f, int64_t rows)
{
    int64_t n = f.capacity - rows, source_bytes = sizeof(int32_t);

    if (f.index)
        fill_words(f.index + rows * f.index_bytes, n * f.index_bytes, UINT32_MAX);
    if (f.weights)
        fill_words(f.weights + rows * f.weight_bytes, n * f.weight_bytes, 0);
    if (f.source)
        fill_words(f.source + rows * source_bytes, n * source_bytes, 0);
}

/* A choice of the routing in the arguments of a kernel. */
template <typename Arguments> __device__ inline int64_t expert_at(const Arguments &a, size_t at)
{
    return a.idx64 ? static_cast<const int64_t *>(a.topk_idx)[at] : static_cast<const int32_t *>(a.topk_idx)[at];
}

/* Reports a wait for `rank` that has not ended well; false. */
__device__ inline bool end_wait(const cuda_waits &waits, wait_end end, int rank, int phase)
{
    if (end != WAIT_OK)
        set_failure(waits,
                    end == WAIT_TIMEOUT ? CUDA_FAILED_LATE
                    : end == WAIT_LOST  ? CUDA_FAILED_LOST
                                        : 0,
                    rank, phase);
    return end == WAIT_OK;
}

/* Waits for `rank` until `met()` is true; false after the deadline, with `rank` reported as failed, or when aborted. */
template <typename Met, typename Progress = no_progress>
__device__ inline bool wait_or_fail(const cuda_waits &waits, Met met, int rank, int phase, int deadlines = 1,
                                    Progress progress = Progress{})
{
    return end_wait(waits, wait_for(waits, met, &waits.mine->lost, rank, deadlines, progress), rank, phase);
}

/* The signals of a rank of this node; NULL: it is absent. */
__device__ __forceinline__ cuda_signals *signals_of(const cuda_waits &waits, int rank)
{
    return reinterpret_cast<cuda_signals *>(
        __ldg(reinterpret_cast<const unsigned long long *>(waits.mine->peer + rank)));
}

/* Tells the `local`th rank of this node that this one has failed. */
__device__ __forceinline__ void fail_peer(const cuda_waits &waits, int local, uint32_t kind, int phase)
{
    cuda_signals *peer = signals_of(waits, local);

    if (peer)
        *(volatile uint32_t *)&peer->failure = CUDA_FAILURE(kind, waits.first + waits.rank, phase);
}

/* Waits for a word of `rank`; false as above. */
__device__ inline bool wait_until(const cuda_waits &waits, const uint64_t *word, uint64_t value, int rank, int phase,
                                  int deadlines = 1)
{
    return wait_or_fail(waits, has_reached{word, value}, rank, phase, deadlines);
}

/*
 * Has no earlier kernel failed? A kernel queued after a failed one has the same operation number, and must not complete
 * that operation when all that it waits for has arrived meanwhile.
 */
__device__ inline bool may_begin(const cuda_waits &waits, int phase)
{
    if (!*(volatile uint32_t *)&waits.mine->failure)
        return true;
    set_failure(waits, 0, waits.rank, phase);
    return false;
}

/* Of an operation of that kind: the ranks for which operation_begin() has found other buffers, a bit for each. */
struct op_buffers {
    int32_t kind;
    uint32_t changed;
};

/*
 * The end of an operation, once every thread's accesses are complete. The last of `blocks` signals the peers and waits
 * for their signals, for `deadlines` deadlines after a peer's last claim of a tile. True for one thread, when all ranks
 * are done. One thread's fence covers what the block barrier has made visible to it; fences of all threads cost 20 us.
 */
__device__ inline bool operation_sync(const cuda_waits &waits, uint64_t number, bool ok, uint32_t blocks,
                                      int deadlines = 1, const op_buffers &buffers = {0, 0})
{
    __shared__ bool last, failed;
    int i = (int)threadIdx.x;
    cuda_signals *peer = i < waits.nranks ? signals_of(waits, i) : nullptr;

    HOLD(waits, CUDA_POINT_MOVED);
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
        /* The last block's release to the peers includes what it acquires here from the other blocks. */
        uint32_t before;

        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(&waits.mine->blocks)
                     : "memory");
        last = before == blocks - 1;
        /* Not the report in host memory: a read across PCIe takes 2 us. */
        failed = *(volatile uint32_t *)&waits.mine->failure;
        /* The fences above order this after the claims of all blocks. */
        if (last)
            waits.mine->blocks = waits.mine->next_tile = 0;
    }
    __syncthreads();
    if (!last)
        return false;
    /* If a block has failed, some rows are missing. A peer's failure has no report yet if it came after the begin. */
    if (failed && i == 0)
        set_failure(waits, 0, waits.rank, waits.done_phase);
    ok = ok && !failed;
    if (ok && peer) {
        store_release(&peer->done[waits.rank], number);
        HOLD(waits, CUDA_POINT_SIGNALLED);
        if (buffers.changed >> i & 1)
            waits.mine->found[buffers.kind][i] = waits.mine->next[i];
        ok = wait_or_fail(waits, has_reached{&waits.mine->done[i], number}, i, waits.done_phase, deadlines,
                          counter_progress<uint32_t>{&peer->next_tile, 0});
    }
    ok = __syncthreads_and(ok);
    return ok && i == 0;
}

/* By one thread, after everything else that the kernel does. */
__device__ inline void operation_complete(const cuda_waits &waits, uint64_t number)
{
    HOLD(waits, CUDA_POINT_COMPLETE);
    waits.mine->operation = number;
}

#endif
