/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Combine: each warp pulls pieces of a token's rows from where they lie into a ring in shared memory, adds them up
 * in fp32 in the order of the route, rounds once and writes the result. Rows of ordinary memory are copied into staging
 * meanwhile, and a warp waits for those that it is to pull.
 */
#include "backend/cuda/device.cuh"
#include "backend/cuda/stage.cuh"
#include "backend/cuda/sums.cuh"

/* Pieces begin where lines of the memory begin, if the rows do: one that begins within a line costs another request. */
#define GRAIN 128

namespace
{

/* A token, or a part of it: bytes [at, end) of its row in the output, and what is added up for them. */
struct unit {
    int64_t token;
    uint32_t at, end;
    int n;
    cuda_entry entry; /* lane i: of the i-th row */
};

/*
 * Where a warp's loads are. A piece is as large as a slot can hold of all the token's rows, so that the same number of
 * bytes is on its way whatever number of rows a token has. What is known of the next unit is fetched while this one's
 * pieces move, and its number a unit before that.
 */
struct feed {
    unit next; /* .token -1: none */
    int64_t token;
    uint32_t at, end, piece;
    int n;
    const unsigned char *row; /* lane i: one of the rows */
    uint32_t asked;           /* lane 0: the number of the unit after the next */
    cuda_entry entry;         /* STAGED, lane i: of the i-th row */
    bool here;                /* STAGED: the rows may be read */
};

/* Of what lies in a slot, lane `slot` knows what it is. */
struct held {
    int64_t token;
    uint32_t at, bytes;
    int n;
};

__device__ void fetch_unit(const cuda_combine &c, unit &u, uint32_t number, int lane)
{
    uint32_t part;

    u.token = -1;
    if (number >= c.tiles)
        return;
    u.token = number;
    u.at = 0;
    u.end = (uint32_t)c.row_bytes;
    if (number >= (uint32_t)c.whole_tokens) {
        number -= (uint32_t)c.whole_tokens;
        part = number % (uint32_t)c.parts;
        u.token = c.whole_tokens + number / (uint32_t)c.parts;
        u.at = part * (uint32_t)c.part_bytes;
        u.end = min(u.end, u.at + (uint32_t)c.part_bytes);
    }
    u.n = __ldg(c.route.count + u.token);
    if (lane < c.route.width)
        u.entry = c.route.entry[u.token * c.route.width + lane];
}

/* Indices of the buffers of a target: as EP_GROUP_AT_X ... */
enum { AT_X, AT_WEIGHTS = 3 };

__device__ const unsigned char *row_of(const cuda_combine &c, const targets &from, cuda_entry entry)
{
    return from.of[entry.local].at[AT_X] + entry.row * c.row_bytes;
}

/* Equal pieces of a unit, as few as possible. */
__device__ uint32_t piece_of(const cuda_combine &c, uint32_t bytes, int n)
{
    uint32_t most = (uint32_t)c.slot_bytes / (uint32_t)(n ? n : 1), grain = most < GRAIN ? VECTOR : GRAIN, pieces;

    most = most / grain * grain;
    pieces = (bytes + most - 1) / most;
    return ((bytes + pieces - 1) / pieces + grain - 1) / grain * grain;
}

/* The next unit becomes that whose pieces are loaded. By all lanes. */
__device__ void enter_unit(const cuda_combine &c, const targets &from, feed &f, int lane)
{
    uint32_t all = (uint32_t)c.stage.move_blocks * (blockDim.x / WARP), number = __shfl_sync(ALL_LANES, f.asked, 0);

    f.token = f.next.token;
    f.at = f.next.at;
    f.end = f.next.end;
    f.n = f.next.n;
    f.entry = f.next.entry;
    f.here = false;
    if (f.token >= 0) {
        f.piece = piece_of(c, f.end - f.at, f.n);
        f.row = lane < f.n ? row_of(c, from, f.next.entry) : nullptr;
    }
    fetch_unit(c, f.next, number, lane);
    if (lane == 0 && number < c.tiles)
        f.asked = 2 * all + claim_tile(c.waits);
}

/*
 * May the rows of the unit be read? By all lanes. `known`: lane i's, how many rows rank i has copied by its last word.
 * With `wait` it waits for those that are missing; after a wait in vain `sound` is false.
 */
__device__ bool look_for_rows(const cuda_combine &c, uint32_t copying, uint64_t number, feed &f, uint32_t &known,
                              bool wait, bool &sound, int lane)
{
    uint32_t row = (uint32_t)f.entry.row, said = __shfl_sync(ALL_LANES, known, f.entry.local);
    const cuda_signals *mine = c.waits.mine;

    f.here = f.here || __all_sync(ALL_LANES, lane >= f.n || said > row);
    if (f.here)
        return true;
    if (wait && lane < f.n && said <= row)
        sound = wait_until(c.waits, &mine->progress[f.entry.local], CUDA_PROGRESS(number, row + 1), f.entry.local,
                           c.waits.ready_phase);
    sound = __all_sync(ALL_LANES, sound);
    __syncwarp();
    if (copying >> lane & 1)
        known = rows_of_progress(load_acquire(&mine->progress[lane]), number);
    /* What the peers wrote before may be read by the copy engine now. */
    __syncwarp();
    bulk_fence_global();
    said = __shfl_sync(ALL_LANES, known, f.entry.local);
    f.here = __all_sync(ALL_LANES, lane >= f.n || said > row);
    return f.here;
}

/* By all lanes. */
__device__ void load_piece(const cuda_combine &c, const targets &from, const ring &r, feed &f, held &h, int slot,
                           int lane)
{
    uint32_t bytes = min(f.piece, f.end - f.at);
    unsigned char *to = r.slots + (size_t)slot * c.slot_bytes;

    if (lane == 0)
        barrier_expect(r.full + slot, (uint32_t)f.n * bytes);
    __syncwarp();
    for (int i = lane; i < f.n; i += WARP) {
        const unsigned char *row = i < WARP ? f.row : row_of(c, from, c.route.entry[f.token * c.route.width + i]);

        bulk_load(to + (size_t)i * bytes, row + f.at, bytes, r.full + slot);
    }
    if (lane == slot)
        h = {f.token, f.at, bytes, f.n};
    f.at += bytes;
    if (f.at == f.end)
        enter_unit(c, from, f, lane);
}

__device__ held held_in(const held &h, int slot)
{
    held here;

    here.token = __shfl_sync(ALL_LANES, h.token, slot);
    here.at = __shfl_sync(ALL_LANES, h.at, slot);
    here.bytes = __shfl_sync(ALL_LANES, h.bytes, slot);
    here.n = __shfl_sync(ALL_LANES, h.n, slot);
    return here;
}

/* N terms at once, because loads from shared memory that follow each other wait less. */
template <int N, bool FIRST> __device__ void add_terms(float (&sum)[8], const unsigned char *terms, int stride)
{
    uint4 v[N];

#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] = *reinterpret_cast<const uint4 *>(terms + (size_t)i * stride);
    add_vector<FIRST>(sum, v[0]);
#pragma unroll
    for (int i = 1; i < N; i++)
        add_vector<false>(sum, v[i]);
}

/* 1 to 4 terms. */
template <bool FIRST> __device__ void add_few(float (&sum)[8], const unsigned char *terms, int stride, int n)
{
    if (n == 4)
        add_terms<4, FIRST>(sum, terms, stride);
    else if (n == 3)
        add_terms<3, FIRST>(sum, terms, stride);
    else if (n == 2)
        add_terms<2, FIRST>(sum, terms, stride);
    else
        add_terms<1, FIRST>(sum, terms, stride);
}

__device__ void add_all(float (&sum)[8], const unsigned char *terms, int stride, int n, bool first)
{
    if (first && n) {
        add_few<true>(sum, terms, stride, min(n, 4));
        terms += 4 * stride;
        n -= 4;
    }
    for (; n > 0; n -= 4, terms += 4 * stride)
        add_few<false>(sum, terms, stride, min(n, 4));
}

/* The rows of each rank are added up and rounded first; bit i of `ends`: the i-th is the last one of its rank. */
__device__ void add_partials(float (&sum)[8], const unsigned char *terms, int stride, int n, uint64_t ends)
{
    float part[8] = {};

    for (int i = 0; i < n; i++) {
        add_vector<false>(part, *reinterpret_cast<const uint4 *>(terms + (size_t)i * stride));
        if (!(ends >> i & 1))
            continue;
        add_vector<false>(sum, round_vector(part));
#pragma unroll
        for (int j = 0; j < 8; j++)
            part[j] = 0.0f;
    }
}

/* Which rows of a token are the last one of their rank. By all lanes. */
__device__ uint64_t find_ends(const cuda_combine &c, const held &h, int lane)
{
    const cuda_entry *entries = c.route.entry + h.token * c.route.width;
    uint64_t ends = 0;

    for (int i = lane; i - lane < h.n; i += WARP) {
        bool end = i < h.n && (i == h.n - 1 || entries[i].local != entries[i + 1].local);

        ends |= (uint64_t)__ballot_sync(ALL_LANES, end) << (i - lane);
    }
    return ends;
}

/* Any number of terms, behind the biases. */
__device__ void sum_behind_bias(const cuda_combine &c, const held &h, const unsigned char *terms, int64_t at, int lane)
{
    uint64_t ends = c.rounds_partial ? find_ends(c, h, lane) : 0;

    for (uint32_t offset = (uint32_t)lane * VECTOR; offset < h.bytes; offset += WARP * VECTOR) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        bool first = true;

        for (int b = 0; b < 2; b++) {
            if (!c.bias[b])
                continue;
            if (first)
                add_vector<true>(sum, *reinterpret_cast<const uint4 *>(c.bias[b] + at + offset));
            else
                add_vector<false>(sum, *reinterpret_cast<const uint4 *>(c.bias[b] + at + offset));
            first = false;
        }
        /* By choice the first term is added to 0. */
        if (ends)
            add_partials(sum, terms + offset, (int)h.bytes, h.n, ends);
        else
            add_all(sum, terms + offset, (int)h.bytes, h.n, first && !c.by_choice);
        *reinterpret_cast<uint4 *>(c.out + at + offset) = round_vector(sum);
    }
}

/* N terms and nothing else. Without a branch inside, so that the next vector's loads begin before this one's end. */
template <int N> __device__ void sum_rows(unsigned char *out, const unsigned char *terms, uint32_t bytes, int lane)
{
#pragma unroll 2
    for (uint32_t offset = (uint32_t)lane * VECTOR; offset < bytes; offset += WARP * VECTOR) {
        float sum[8];

        add_terms<N, true>(sum, terms + offset, (int)bytes);
        *reinterpret_cast<uint4 *>(out + offset) = round_vector(sum);
    }
}

__device__ void sum_piece(const cuda_combine &c, const held &h, const unsigned char *terms, int lane)
{
    int64_t at = h.token * c.row_bytes + h.at;
    unsigned char *out = c.out + at;

    switch (c.bias[0] || c.bias[1] || c.by_choice ? 0 : h.n) {
    case 1:
        return sum_rows<1>(out, terms, h.bytes, lane);
    case 2:
        return sum_rows<2>(out, terms, h.bytes, lane);
    case 3:
        return sum_rows<3>(out, terms, h.bytes, lane);
    case 4:
        return sum_rows<4>(out, terms, h.bytes, lane);
    case 5:
        return sum_rows<5>(out, terms, h.bytes, lane);
    case 6:
        return sum_rows<6>(out, terms, h.bytes, lane);
    case 7:
        return sum_rows<7>(out, terms, h.bytes, lane);
    case 8:
        return sum_rows<8>(out, terms, h.bytes, lane);
    default:
        return sum_behind_bias(c, h, terms, at, lane);
    }
}

/* Volatile, because the peers write the weights before this kernel learns that they are ready. */
__device__ void sum_weights(const cuda_combine &c, const targets &from, int64_t token, int lane)
{
    const cuda_route &route = c.route;
    int n = __ldg(route.count + token), topk = route.topk;

    for (int k = lane; k < topk; k += WARP) {
        float sum = 0.0f;

        for (int i = 0; i < n; i++) {
            cuda_entry entry = c.by_rank[token * route.width + i];
            int64_t row = entry.row;
            const volatile float *weights = reinterpret_cast<const float *>(from.of[entry.local].at[AT_WEIGHTS]);

            if (!route.expanded)
                sum = __fadd_rn(sum, weights[row * topk + k]);
            else if (entry.k == k)
                sum = __fadd_rn(sum, weights[row]);
        }
        c.out_weights[token * topk + k] = sum;
    }
}

/* All that the warp adds up, from its first unit on. STAGED: some rank of the group copies. */
template <bool STAGED>
__device__ __forceinline__ bool sum_units(const cuda_combine &c, const targets &from, const ring &r, feed &f,
                                          bool sound, uint64_t number)
{
    int lane = (int)threadIdx.x % WARP, stages = r.stages, slot = 0, next = 0, loaded = 0;
    uint32_t parity = 0, copying = STAGED ? from.copying : 0;
    uint32_t known = STAGED && copying >> lane & 1 ? 0 : UINT32_MAX;
    held h = {};

    for (;;) {
        while (loaded < stages && f.token >= 0) {
            if (STAGED && !look_for_rows(c, copying, number, f, known, loaded == 0, sound, lane))
                break;
            load_piece(c, from, r, f, h, next, lane);
            next = next + 1 == stages ? 0 : next + 1;
            loaded++;
        }
        if (STAGED && !sound)
            f.token = -1;
        if (STAGED && !loaded && f.token >= 0)
            continue;
        if (!loaded)
            break;
        held here = held_in(h, slot);

        barrier_wait(r.full + slot, parity);
        sum_piece(c, here, r.slots + (size_t)slot * c.slot_bytes, lane);
        if (c.out_weights && here.at == 0)
            sum_weights(c, from, here.token, lane);
        /* All lanes have read the slot before it is loaded again. */
        bulk_fence_shared();
        __syncwarp();
        loaded--;
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    return sound;
}

/* The first unit is a warp's by its place, and so is the second; the others it takes as it comes to them. */
__device__ __forceinline__ bool sum_block(const cuda_combine &c, targets &from, unsigned char *shared, int stages,
                                          uint32_t block, uint64_t number)
{
    uint32_t warps = blockDim.x / WARP, blocks = (uint32_t)c.stage.move_blocks;
    uint32_t me = threadIdx.x / WARP * blocks + block;
    int lane = (int)threadIdx.x % WARP;
    ring r(shared, stages, c.slot_bytes);
    feed f = {};
    bool sound;

    if (lane == 0)
        ring_init(r);
    __syncwarp();
    f.asked = me + blocks * warps;
    fetch_unit(c, f.next, me, lane);
    sound = operation_begin(c.waits, c.desc, c.route.counts, number, from);
    if (sound && !is_refused(c.waits, c.route.counts))
        enter_unit(c, from, f, lane);
    else
        f.token = -1;
    /* What the peers wrote before may be read by the copy engine now. */
    bulk_fence_global();
    return from.copying ? sum_units<true>(c, from, r, f, sound, number)
                        : sum_units<false>(c, from, r, f, sound, number);
}

/* Rows of a source that the parts before `part` have. */
__device__ __forceinline__ int64_t rows_before(const cuda_stage &s, int64_t rows, int part)
{
    return rows * part / s.parts;
}

/* What has been copied so far is in staging; who is the last of `all` warps tells those who read it. */
__device__ void end_part(const cuda_combine &c, copy_ring &r, const sources &to, uint64_t number, int part, int64_t all,
                         int lane)
{
    const cuda_stage &s = c.stage;
    uint32_t rows;

    while (r.loaded)
        copy_ring_store(r, lane);
    bulk_wait_all();
    if (!count_part(c.waits, part, (uint32_t)all, lane))
        return;
    if (!to.rows)
        return;
    rows = part + 1 == s.parts ? CUDA_ALL_ROWS : (uint32_t)rows_before(s, to.rows, part + 1);
    store_release(&c.waits.peer[lane]->progress[c.waits.rank], CUDA_PROGRESS(number, rows));
}

/* Copies this rank's rows into staging, those of all sources at the same pace. By a warp, number `me` of `all`. */
__device__ void copy_in(const cuda_combine &c, copy_ring &r, uint64_t number, int64_t me, int64_t all, int lane)
{
    const cuda_stage &s = c.stage;
    sources to = sources_of(c.waits, c.route.counts, lane);
    int64_t turn = me; /* of the pieces to come, the warp's next */

    for (int part = 0; part < s.parts; part++) {
        for (int source = 0; source < c.waits.nranks; source++) {
            int64_t first = __shfl_sync(ALL_LANES, to.first, source), rows = __shfl_sync(ALL_LANES, to.rows, source);
            int64_t begin = rows_before(s, rows, part) * s.x.row_bytes;
            int64_t end = rows_before(s, rows, part + 1) * s.x.row_bytes;
            int64_t pieces = (end - begin + s.slot_bytes - 1) / s.slot_bytes;

            for (; turn < pieces; turn += all) {
                int64_t at = begin + turn * s.slot_bytes;

                if (!copy_ring_has_room(r))
                    copy_ring_store(r, lane);
                copy_ring_add(r, s, first, at, min(at + s.slot_bytes, end), lane);
            }
            turn -= pieces;
        }
        end_part(c, r, to, number, part, all, lane);
        __syncwarp();
    }
}

__device__ void copy_block(const cuda_combine &c, unsigned char *shared, int stages, uint32_t block, uint64_t number)
{
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
    copy_ring r = copy_ring_begin(shared, c.stage, stages);

    /* A slow peer may still read what a kernel that gave up has left in staging. */
    if (!__syncthreads_and(threadIdx.x || may_begin(c.waits, c.waits.ready_phase)))
        return;
    copy_in(c, r, number, (int64_t)warp * c.stage.copy_blocks + block, (int64_t)warps * c.stage.copy_blocks,
            (int)threadIdx.x % WARP);
    copy_block_end(c.waits, c.stage, number, true);
}

} /* namespace */

/* Profilers show the name. */
namespace ep
{

__global__ void __launch_bounds__(768, 1) combine_rows(const __grid_constant__ cuda_combine c, int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ targets from;
    uint32_t block = blockIdx.x, copy_blocks = n_copy_blocks(c.waits, c.stage);
    uint64_t number = operation_publish(c.waits, c.desc);
    bool sound;

    if (copy_blocks) {
        /* The copy blocks first: the blocks that add up wait for the copy blocks of the peers, which wait for nothing.
         */
        block = take_role(c.waits);
        if (block < copy_blocks) {
            copy_block(c, shared, stages, block, number);
            return;
        }
        block -= copy_blocks;
    }
    sound = sum_block(c, from, shared, stages, block, number);
    move_block_end(c.waits, c.stage, number, sound);
}

} /* namespace ep */

cudaError_t cuda_launch_combine(const struct cuda_combine *combine, const struct cuda_shape *shape, cudaStream_t stream)
{
    return launch_operation(ep::combine_rows, *combine, *shape, stream);
}

cudaError_t cuda_combine_load(int shared_bytes)
{
    return cudaFuncSetAttribute(ep::combine_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}
