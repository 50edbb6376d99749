/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage.cuh - shared by the kernels of dispatch and combine: the rings of their warps, their end and their launch, and
 * copies between ordinary and staging memory while rows move. Blocks of the same kernel make these copies: a kernel in
 * a second stream would have to be started, joined and waited for, at some microseconds each. The ranks publish part by
 * part, in progress words, which rows may be copied or read.
 */
#ifndef EP_CUDA_STAGE_CUH
#define EP_CUDA_STAGE_CUH

#include "backend/cuda/sync.cuh"

/*
 * Blocks get their roles in the order in which they begin, not by block index. So the blocks that others wait for have
 * begun before any block that waits, even if other work leaves few multiprocessors.
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
 * Ends a role of the kernel; by one thread. All blocks that move rows are one role, each block that copies is another.
 * The end of the last role completes the operation.
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

/* The end of a block that moves rows; by all threads. */
__device__ __forceinline__ void move_block_end(const cuda_waits &waits, const cuda_stage &s, uint64_t number,
                                               const op_buffers &buffers, bool ok)
{
    if (!operation_sync(waits, number, ok, (uint32_t)s.move_blocks, 1, buffers))
        return;
    if (s.copy_blocks)
        role_end(waits, s, number);
    else
        operation_complete(waits, number);
}

/* The end of a block that copies. `ok`: of this warp; if false for any, the operation stays incomplete. */
__device__ inline void copy_block_end(const cuda_waits &waits, const cuda_stage &s, uint64_t number, bool ok)
{
    if (__syncthreads_and(ok) && threadIdx.x == 0)
        role_end(waits, s, number);
}

/*
 * Counts this warp as finished with a part: the stores of its lanes for it are complete. True in the last of `warps`,
 * which may then publish progress. All warps finish the parts in order, so the published progress never decreases.
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

/* The rows that a progress word reports for operation `number`; all, if the word is of a later operation. */
__device__ __forceinline__ uint32_t rows_of_progress(uint64_t word, uint64_t number)
{
    uint64_t of = word >> CUDA_ROWS_BITS;

    return of == number ? (uint32_t)word & CUDA_ALL_ROWS : of > number ? CUDA_ALL_ROWS : 0;
}

/* The rows of a rank's tokens on this rank that are to be copied; lane i holds those of rank i. */
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

/* A warp's slots in the block's shared memory, each with a barrier that is complete when the slot is full. */
struct ring {
    unsigned char *slots;
    uint64_t *full;
    int stages, slot_bytes;

    /* `shared`: shared memory of the block: all barriers, then all slots. */
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

/* A warp's ring of pieces of rows. Lane i holds the destination of the piece in slot i. */
struct copy_ring : ring {
    int head, loaded; /* slot of the oldest piece, number of pieces */
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

/* One slot stays free, so that a load need not wait for the newest store. */
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

/* Copies the words of rows [begin, end), two at a time to overlap the loads. Loads bypass L1, since peers write there.
 */
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

/* Adds a piece of a source's rows, its bytes [at, end), and copies the metadata of the rows that begin in it. */
__device__ inline void copy_ring_add(copy_ring &c, const cuda_stage &s, int64_t first, int64_t at, int64_t end,
                                     int lane)
{
    int64_t row = s.x.row_bytes, from = first * row + at;

    copy_ring_load(c, s.x.from + from, s.x.to + from, (uint32_t)(end - at), lane);
    for (int i = 0; i < CUDA_BUFFERS - 1; i++)
        if (s.metadata[i].row_bytes)
            copy_words(s.metadata[i], first + (at + row - 1) / row, first + (end + row - 1) / row, lane);
}

template <typename OPERATION>
cudaError_t launch_operation(void (*kernel)(OPERATION, int), const OPERATION &operation, const cuda_shape &shape,
                             cudaStream_t stream)
{
    unsigned blocks = (unsigned)(shape.blocks + (operation.waits.no_sync ? 0 : operation.stage.copy_blocks));

    return launch(kernel, blocks, (unsigned)shape.warps * WARP, shape.shared_bytes, stream, operation, shape.stages);
}

#endif
