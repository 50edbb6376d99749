/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage.cuh - what the kernels of dispatch and combine share: the rings of their warps, their end and their launch, and
 * copies between ordinary and staging memory while rows move. These are made by blocks of the moving kernel: a kernel
 * of its own in a second stream would have to be started, joined and waited for, at some microseconds each. Which rows
 * may be copied or read, the ranks tell each other by progress words, part by part.
 */
#ifndef EP_CUDA_STAGE_CUH
#define EP_CUDA_STAGE_CUH

#include "backend/cuda/sync.cuh"

/*
 * Blocks take their roles in the order in which they begin, whatever their numbers are: so those that others wait for
 * have begun before any that waits, even where other work leaves few multiprocessors.
 */
__device__ inline uint32_t take_role(const cuda_waits &waits)
{
    __shared__ uint32_t role;

    if (threadIdx.x == 0)
        role = atomicAdd(&waits.mine->roles, 1u);
    __syncthreads();
    return role;
}

/*
 * By one thread: one of the kernel's shares is at its end, which are the movers together and each block that copies.
 * With the last the operation is complete.
 */
__device__ inline void role_end(const cuda_waits &waits, const cuda_stage &s, uint64_t number)
{
    uint32_t before;

    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(&waits.mine->ended_roles)
                 : "memory");
    if (before != (uint32_t)s.copy_blocks)
        return;
    waits.mine->ended_roles = waits.mine->roles = 0;
    operation_complete(waits, number);
}

/* Blocks of this kernel that copy. */
__device__ __forceinline__ uint32_t n_copy_blocks(const cuda_waits &waits, const cuda_stage &s)
{
    return waits.no_sync ? 0 : (uint32_t)s.copy_blocks;
}

/* At the end of each of the blocks that move rows; by all threads. */
__device__ __forceinline__ void move_block_end(const cuda_waits &waits, const cuda_stage &s, uint64_t number,
                                               bool sound)
{
    if (!operation_sync(waits, number, sound, (uint32_t)s.move_blocks))
        return;
    if (s.copy_blocks)
        role_end(waits, s, number);
    else
        operation_complete(waits, number);
}

/* At the end of a block that copies; `sound`: of this warp. Otherwise the operation stays incomplete. */
__device__ inline void copy_block_end(const cuda_waits &waits, const cuda_stage &s, uint64_t number, bool sound)
{
    if (__syncthreads_and(sound) && threadIdx.x == 0)
        role_end(waits, s, number);
}

/*
 * Counts this warp as through with a part: what its lanes have stored for it is complete. True in the last of `warps`,
 * which then may tell others. All come to the parts in order, so what is told is never less than before.
 */
__device__ inline bool count_part(const cuda_waits &waits, int part, uint32_t warps, int lane)
{
    uint32_t before = 0;

    __syncwarp();
    if (lane == 0) {
        asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(&waits.mine->part[part])
                     : "memory");
        if (before == warps - 1) {
            __threadfence();
            waits.mine->part[part] = 0;
        }
    }
    before = __shfl_sync(ALL_LANES, before, 0);
    __syncwarp();
    return before == warps - 1;
}

/* Rows that a word says are there. A rank that is in a later operation has done all of this one. */
__device__ __forceinline__ uint32_t rows_of_progress(uint64_t word, uint64_t number)
{
    uint64_t of = word >> CUDA_ROWS_BITS;

    return of == number ? (uint32_t)word & CUDA_ALL_ROWS : of > number ? CUDA_ALL_ROWS : 0;
}

/* Rows of each rank's tokens on this rank that are copied; lane i knows those of rank i. */
struct sources {
    int64_t first, rows;
};

__device__ inline sources sources_of(const cuda_waits &waits, const cuda_counts *counts, int lane)
{
    sources s = {0, 0};

    if (lane >= waits.nranks || lane == waits.rank)
        return s;
    s.first = counts->first[lane];
    s.rows = counts->first[lane + 1] - s.first;
    return s;
}

/* A warp's slots in the block's shared memory, and the barriers that tell when they are full. */
struct ring {
    unsigned char *slots;
    uint64_t *full;
    int stages, slot_bytes;

    /* `shared`: the block's, barriers before the slots. */
    __device__ __forceinline__ ring(unsigned char *shared, int n, int32_t bytes) : stages(n), slot_bytes(bytes)
    {
        int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;

        slots = shared + CUDA_BARRIERS_BYTES(warps, n) + (size_t)warp * n * bytes;
        full = reinterpret_cast<uint64_t *>(shared) + warp * n;
    }
};

/* By one lane. */
__device__ __forceinline__ void ring_init(const ring &r)
{
    for (int i = 0; i < r.stages; i++)
        barrier_init(r.full + i);
    barriers_publish();
}

/* A warp's ring of pieces of rows. Lane i knows where to the piece in slot i goes. */
struct copy_ring : ring {
    int head, loaded; /* the oldest piece, and how many there are */
    uint32_t parity;
    unsigned long long to;
    uint32_t bytes;
};

__device__ inline copy_ring copy_ring_begin(unsigned char *shared, const cuda_stage &s, int stages)
{
    copy_ring c = {{shared, stages, s.slot_bytes}, 0, 0, 0, 0, 0};

    if (threadIdx.x % WARP == 0)
        ring_init(c);
    __syncwarp();
    return c;
}

/* One slot stays free, so that the store before the newest is all that a load has to wait for. */
__device__ __forceinline__ bool copy_ring_has_room(const copy_ring &c)
{
    return c.loaded < c.stages - 1;
}

__device__ inline void copy_ring_load(copy_ring &c, const unsigned char *from, unsigned char *to, uint32_t bytes,
                                      int lane)
{
    int slot = (c.head + c.loaded) % c.stages;

    if (lane == 0) {
        bulk_wait_read();
        barrier_expect(c.full + slot, bytes);
        bulk_load(c.slots + (size_t)slot * c.slot_bytes, from, bytes, c.full + slot);
    }
    if (lane == slot) {
        c.to = (unsigned long long)to;
        c.bytes = bytes;
    }
    c.loaded++;
}

/* Stores the oldest piece. */
__device__ inline void copy_ring_store(copy_ring &c, int lane)
{
    unsigned long long to = __shfl_sync(ALL_LANES, c.to, c.head);
    uint32_t bytes = __shfl_sync(ALL_LANES, c.bytes, c.head);

    barrier_wait(c.full + c.head, c.parity);
    if (lane == 0) {
        bulk_store((void *)to, c.slots + (size_t)c.head * c.slot_bytes, bytes);
        bulk_commit();
    }
    c.loaded--;
    if (++c.head == c.stages) {
        c.head = 0;
        c.parity ^= 1;
    }
}

/* Words of rows [begin, end). Two at once, because a load takes longer than all the rest. Past L1: peers write them. */
__device__ inline void copy_words(const cuda_copy &copy, int64_t begin, int64_t end, int lane)
{
    const uint32_t *from = reinterpret_cast<const uint32_t *>(copy.from + begin * copy.row_bytes);
    uint32_t *to = reinterpret_cast<uint32_t *>(copy.to + begin * copy.row_bytes);
    int64_t n = (end - begin) * copy.row_bytes / 4;

    for (int64_t i = lane; i < n; i += 2 * WARP) {
        bool two = i + WARP < n;
        uint32_t first = __ldcg(from + i), second = two ? __ldcg(from + i + WARP) : 0;

        to[i] = first;
        if (two)
            to[i + WARP] = second;
    }
}

/* A piece of a source's rows, bytes [at, end) of them, and what belongs to the rows that begin in it. */
__device__ inline void copy_ring_add(copy_ring &c, const cuda_stage &s, int64_t first, int64_t at, int64_t end,
                                     int lane)
{
    int64_t row = s.x.row_bytes, from = first * row + at;

    copy_ring_load(c, s.x.from + from, s.x.to + from, (uint32_t)(end - at), lane);
    for (int i = 0; i < 3; i++)
        if (s.metadata[i].row_bytes)
            copy_words(s.metadata[i], first + (at + row - 1) / row, first + (end + row - 1) / row, lane);
}

template <typename OPERATION>
cudaError_t launch_operation(void (*kernel)(OPERATION, int), const OPERATION &operation, const cuda_shape &shape,
                             cudaStream_t stream)
{
    unsigned blocks = (unsigned)(shape.blocks + (operation.waits.no_sync ? 0 : operation.stage.copy_blocks));

    kernel<<<blocks, (unsigned)shape.warps * WARP, shape.shared_bytes, stream>>>(operation, shape.stages);
    return cudaGetLastError();
}

#endif
