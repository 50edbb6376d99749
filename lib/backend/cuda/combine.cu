/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Combine: each warp pulls pieces of a token's rows from the ranks that hold them into a ring in shared memory, adds
 * them in fp32 in the order of the route, rounds once and writes the result. Rows in ordinary memory are copied to
 * staging at the same time, and a warp waits for the rows that it pulls.
 */
#include "backend/cuda/device.cuh"
#include "backend/cuda/reduce.cuh"
#include "backend/cuda/stage.cuh"
#include "backend/cuda/sums.cuh"

/* Pieces begin at memory lines, if the rows do: one that begins within a line costs another request. */
#define GRAIN 128

namespace
{

/* A tile: a token or a part of it, bytes [at, end) of its output row, and its `n` rows. */
struct tile {
    int64_t token;
    uint32_t at, end;
    int n;
    cuda_entry entry; /* lane i: of the i-th row */
};

/*
 * State of a warp's loads. A piece is as large as a slot allows for all rows of the token, so that the same number of
 * bytes is in flight for any number of rows. The next tile is fetched while the pieces of this one move, and its number
 * is claimed a tile before that.
 */
struct feed {
    tile next; /* .token -1: none */
    int64_t token;
    uint32_t at, end, piece;
    int n;
    const unsigned char *row; /* lane i: one of the rows */
    uint32_t claimed;         /* lane 0: number of the tile after the next */
    cuda_entry entry;         /* STAGED, lane i: of the i-th row */
    bool ready;               /* STAGED: all rows may be read */
};

/* Content of a slot; held by lane `slot`. */
struct slot_content {
    int64_t token;
    uint32_t at, bytes;
    int n;
};

__device__ void fetch_tile(const cuda_combine &c, tile &t, uint32_t number, int lane)
{
    uint32_t part;

    t.token = -1;
    if (number >= c.tiles)
        return;
    t.token = number;
    t.at = 0;
    t.end = (uint32_t)c.row_bytes;
    if (number >= (uint32_t)c.whole_tokens) {
        number -= (uint32_t)c.whole_tokens;
        part = number % (uint32_t)c.parts;
        t.token = c.whole_tokens + number / (uint32_t)c.parts;
        t.at = part * (uint32_t)c.part_bytes;
        t.end = min(t.end, t.at + (uint32_t)c.part_bytes);
    }
    t.n = __ldg(c.route.count + t.token);
    if (lane < c.route.width)
        t.entry = c.route.entry[t.token * c.route.width + lane];
}

__device__ const unsigned char *row_of(const cuda_combine &c, const targets &from, cuda_entry entry)
{
    return from.of[entry.local].at[AT_X] + entry.row * c.row_bytes;
}

/* Size of a piece: divides a tile into as few pieces of equal size as possible. */
__device__ uint32_t piece_of(const cuda_combine &c, uint32_t bytes, int n)
{
    uint32_t max_bytes = (uint32_t)c.slot_bytes / (uint32_t)(n ? n : 1), grain = max_bytes < GRAIN ? VECTOR : GRAIN,
             pieces;

    max_bytes = max_bytes / grain * grain;
    pieces = (bytes + max_bytes - 1) / max_bytes;
    return ((bytes + pieces - 1) / pieces + grain - 1) / grain * grain;
}

/* The entries of a token, one of each rank, in the order of their choices. By all lanes. */
__device__ cuda_entry order_by_choice(cuda_entry entry, int n, int lane)
{
    int place = 0, from = lane;

    for (int i = 0; i < n; i++)
        place += __shfl_sync(ALL_LANES, entry.k, i) < entry.k;
    for (int i = 0; i < n; i++)
        from = __shfl_sync(ALL_LANES, place, i) == lane ? i : from;
    return entry_of_lane(entry, from);
}

/* Begins the next tile, and fetches the one after it. By all lanes. */
__device__ void begin_tile(const cuda_combine &c, const targets &from, feed &f, int lane)
{
    uint32_t all = (uint32_t)c.stage.move_blocks * (blockDim.x / WARP), number = __shfl_sync(ALL_LANES, f.claimed, 0);

    f.token = f.next.token;
    f.at = f.next.at;
    f.end = f.next.end;
    f.n = f.next.n;
    f.entry = f.next.entry;
    f.ready = false;
    if (f.token >= 0) {
        f.piece = piece_of(c, f.end - f.at, f.n);
        if (c.by_choice && !c.route.expanded)
            f.entry = order_by_choice(f.entry, f.n, lane);
        f.row = lane < f.n ? row_of(c, from, f.entry) : nullptr;
    }
    fetch_tile(c, f.next, number, lane);
    if (lane == 0 && number < c.tiles)
        f.claimed = 2 * all + claim_tile(c.waits);
}

/*
 * May the rows of the tile be read? By all lanes. `known` of lane i: the rows that rank i has copied, or the tokens
 * that it has added up, by its last progress word. `wait`: waits for missing rows; `ok` becomes false if the wait
 * fails.
 */
__device__ bool check_rows(const cuda_combine &c, uint32_t copying, uint64_t number, feed &f, uint32_t &known,
                           bool wait, bool &ok, int lane)
{
    uint32_t needed = min((c.reduces ? (uint32_t)f.token : (uint32_t)f.entry.row) + 1, CUDA_ALL_ROWS);
    uint32_t reported = __shfl_sync(ALL_LANES, known, f.entry.local);
    const cuda_signals *mine = c.waits.mine;

    f.ready = f.ready || __all_sync(ALL_LANES, lane >= f.n || reported >= needed);
    if (f.ready)
        return true;
    if (wait && lane < f.n && reported < needed)
        ok = wait_until(c.waits, &mine->progress[f.entry.local], CUDA_PROGRESS(number, needed), f.entry.local,
                        c.waits.ready_phase);
    ok = __all_sync(ALL_LANES, ok);
    __syncwarp();
    if (copying >> lane & 1)
        known = rows_of_progress(load_acquire(&mine->progress[lane]), number);
    /* The copy engine may now read what the peers have written. */
    __syncwarp();
    bulk_fence_global();
    reported = __shfl_sync(ALL_LANES, known, f.entry.local);
    f.ready = __all_sync(ALL_LANES, lane >= f.n || reported >= needed);
    return f.ready;
}

/* By all lanes. */
__device__ void load_piece(const cuda_combine &c, const targets &from, const ring &r, feed &f, slot_content &h,
                           int slot, int lane)
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
        begin_tile(c, from, f, lane);
}

__device__ slot_content content_of(const slot_content &h, int slot)
{
    slot_content here;

    here.token = __shfl_sync(ALL_LANES, h.token, slot);
    here.at = __shfl_sync(ALL_LANES, h.at, slot);
    here.bytes = __shfl_sync(ALL_LANES, h.bytes, slot);
    here.n = __shfl_sync(ALL_LANES, h.n, slot);
    return here;
}

/* Adds N terms at once: their loads from shared memory overlap. */
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

/* Adds up and rounds the rows of each rank first. Bit i of `ends`: row i is the last one of its rank. */
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

/* Bit mask of a token's rows that are the last one of their rank. By all lanes. */
__device__ uint64_t find_ends(const cuda_combine &c, const slot_content &h, int lane)
{
    const cuda_entry *entries = c.route.entry + h.token * c.route.width;
    uint64_t ends = 0;

    for (int i = lane; i - lane < h.n; i += WARP) {
        bool end = i < h.n && (i == h.n - 1 || entries[i].local != entries[i + 1].local);

        ends |= (uint64_t)__ballot_sync(ALL_LANES, end) << (i - lane);
    }
    return ends;
}

/* Adds any number of terms to the biases. */
__device__ void sum_with_bias(const cuda_combine &c, const slot_content &h, const unsigned char *terms, int64_t at,
                              int lane)
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
        /* With EP_COMBINE_BY_CHOICE the first term is added to 0. */
        if (ends)
            add_partials(sum, terms + offset, (int)h.bytes, h.n, ends);
        else
            add_all(sum, terms + offset, (int)h.bytes, h.n, first && !c.by_choice);
        *reinterpret_cast<uint4 *>(c.out + at + offset) = round_vector(sum);
    }
}

/*
 * Adds N terms and nothing else; ZERO: to 0, as with EP_COMBINE_BY_CHOICE. There is no branch in the loop, so loads of
 * the next vector overlap with this one's.
 */
template <int N, bool ZERO>
__device__ void sum_rows(unsigned char *out, const unsigned char *terms, uint32_t bytes, int lane)
{
#pragma unroll 2
    for (uint32_t offset = (uint32_t)lane * VECTOR; offset < bytes; offset += WARP * VECTOR) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};

        add_terms<N, !ZERO>(sum, terms + offset, (int)bytes);
        *reinterpret_cast<uint4 *>(out + offset) = round_vector(sum);
    }
}

/* False for another number of terms. */
template <bool ZERO>
__device__ bool sum_few(unsigned char *out, const unsigned char *terms, uint32_t bytes, int n, int lane)
{
    switch (n) {
    case 1:
        return sum_rows<1, ZERO>(out, terms, bytes, lane), true;
    case 2:
        return sum_rows<2, ZERO>(out, terms, bytes, lane), true;
    case 3:
        return sum_rows<3, ZERO>(out, terms, bytes, lane), true;
    case 4:
        return sum_rows<4, ZERO>(out, terms, bytes, lane), true;
    case 5:
        return sum_rows<5, ZERO>(out, terms, bytes, lane), true;
    case 6:
        return sum_rows<6, ZERO>(out, terms, bytes, lane), true;
    case 7:
        return sum_rows<7, ZERO>(out, terms, bytes, lane), true;
    case 8:
        return sum_rows<8, ZERO>(out, terms, bytes, lane), true;
    default:
        return false;
    }
}

__device__ void sum_piece(const cuda_combine &c, const slot_content &h, const unsigned char *terms, int lane)
{
    int64_t at = h.token * c.row_bytes + h.at;
    bool plain = !c.bias[0] && !c.bias[1] && !c.rounds_partial;

    if (plain && (c.by_choice ? sum_few<true>(c.out + at, terms, h.bytes, h.n, lane)
                              : sum_few<false>(c.out + at, terms, h.bytes, h.n, lane)))
        return;
    sum_with_bias(c, h, terms, at, lane);
}

/* Volatile, because the peers may still write the weights after this kernel has begun. */
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

/* Adds up all tiles of the warp. STAGED: the ranks `copying` write rows to staging meanwhile, a bit for each. */
template <bool STAGED>
__device__ __forceinline__ bool sum_tiles(const cuda_combine &c, const targets &from, uint32_t copying, const ring &r,
                                          feed &f, bool ok, uint64_t number)
{
    int lane = (int)threadIdx.x % WARP, stages = r.stages, slot = 0, next = 0, loaded = 0;
    uint32_t parity = 0;
    uint32_t known = STAGED && copying >> lane & 1 ? 0 : UINT32_MAX;
    slot_content h = {};

    for (;;) {
        while (loaded < stages && f.token >= 0) {
            if (STAGED && !check_rows(c, copying, number, f, known, loaded == 0, ok, lane))
                break;
            load_piece(c, from, r, f, h, next, lane);
            next = next + 1 == stages ? 0 : next + 1;
            loaded++;
        }
        if (STAGED && !ok)
            f.token = -1;
        if (STAGED && !loaded && f.token >= 0)
            continue;
        if (!loaded)
            break;
        slot_content here = content_of(h, slot);

        barrier_wait(r.full + slot, parity);
        sum_piece(c, here, r.slots + (size_t)slot * c.slot_bytes, lane);
        HOLD(c.waits, CUDA_POINT_ROW);
        if (c.out_weights && here.at == 0)
            sum_weights(c, from, here.token, lane);
        /* All lanes must have read the slot before it is loaded again. */
        bulk_fence_shared();
        __syncwarp();
        loaded--;
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    return ok;
}

/* The first two tiles of a warp are fixed by its index; it claims the others. */
__device__ __forceinline__ bool sum_block(const cuda_combine &c, targets &from, unsigned char *shared, int stages,
                                          uint32_t block, uint64_t number)
{
    uint32_t warps = blockDim.x / WARP, blocks = (uint32_t)c.stage.move_blocks;
    uint32_t me = threadIdx.x / WARP * blocks + block;
    int lane = (int)threadIdx.x % WARP;
    ring r(shared, stages, c.slot_bytes);
    uint32_t copying;
    feed f = {};
    bool ok;

    if (lane == 0)
        ring_init(r);
    __syncwarp();
    f.claimed = me + blocks * warps;
    fetch_tile(c, f.next, me, lane);
    ok = operation_begin(c.waits, c.desc, c.route.counts, &c.route, number, from, block);
    if (ok && !(from.refused && is_refused(c.waits, c.route.counts)))
        begin_tile(c, from, f, lane);
    else
        f.token = -1;
    /* The copy engine may now read what the peers have written. */
    bulk_fence_global();
    /* Sums of this rank's own rows have to be made, too. */
    copying = from.copying | (c.reduce.from ? 1u << c.waits.rank : 0);
    return copying ? sum_tiles<true>(c, from, copying, r, f, ok, number)
                   : sum_tiles<false>(c, from, 0, r, f, ok, number);
}

/* Rows of a source in the parts before `part`. */
__device__ __forceinline__ int64_t rows_before(const cuda_stage &s, int64_t rows, int part)
{
    return rows * part / s.parts;
}

/* Ends a part, of which the warp has written its rows. The last of `all` warps publishes progress to the readers. */
__device__ void end_part(const cuda_combine &c, const sources &to, uint64_t number, int part, int64_t all, int lane)
{
    const cuda_stage &s = c.stage;
    uint32_t rows = CUDA_ALL_ROWS;

    if (!count_part(c.waits, part, (uint32_t)all, lane))
        return;
    if (!to.rows)
        return;
    if (part + 1 < s.parts) {
        rows = (uint32_t)rows_before(s, to.rows, part + 1);
        if (c.reduces)
            rows = (uint32_t)(c.reduce.source[to.first + rows] % c.reduce.stride);
        rows = min(rows, CUDA_ALL_ROWS - 1);
    }
    /* Of a graph of before, whose rank is absent now: the blocks that move rows say so. */
    if (cuda_signals *peer = signals_of(c.waits, lane))
        store_release(&peer->progress[c.waits.rank], CUDA_PROGRESS(number, rows));
}

/* Copies this rank's rows to staging, all sources at the same pace. By a warp, number `me` of `all`. */
__device__ void copy_in(const cuda_combine &c, copy_ring &r, uint64_t number, int64_t me, int64_t all, int lane)
{
    const cuda_stage &s = c.stage;
    sources to = sources_of(c.waits, c.route.counts, lane);
    int64_t piece = me; /* the warp's next piece, counted from the first one of the source */

    for (int part = 0; part < s.parts; part++) {
        for (int source = 0; source < c.waits.nranks; source++) {
            int64_t first = __shfl_sync(ALL_LANES, to.first, source), rows = __shfl_sync(ALL_LANES, to.rows, source);
            int64_t begin = rows_before(s, rows, part) * s.x.row_bytes;
            int64_t end = rows_before(s, rows, part + 1) * s.x.row_bytes;
            int64_t pieces = (end - begin + s.slot_bytes - 1) / s.slot_bytes;

            for (; piece < pieces; piece += all) {
                int64_t at = begin + piece * s.slot_bytes;

                if (!copy_ring_has_room(r))
                    copy_ring_store(r, lane);
                copy_ring_add(r, s, first, at, min(at + s.slot_bytes, end), lane);
            }
            piece -= pieces;
        }
        while (r.loaded)
            copy_ring_store(r, lane);
        bulk_wait_all();
        end_part(c, to, number, part, all, lane);
        __syncwarp();
    }
}

/* Adds up this rank's rows into staging, otherwise as copy_in(). */
__device__ void reduce_in(const cuda_combine &c, uint64_t number, int64_t me, int64_t all, int lane)
{
    const cuda_stage &s = c.stage;
    int64_t pieces = (c.row_bytes + s.slot_bytes - 1) / s.slot_bytes, piece = me;
    sources to = {0, 0};

    if (lane < c.waits.nranks && !c.route.counts->refused[0])
        to = {c.reduce.first[lane], c.reduce.first[lane + 1] - c.reduce.first[lane]};
    for (int part = 0; part < s.parts; part++) {
        for (int source = 0; source < c.waits.nranks; source++) {
            int64_t first = __shfl_sync(ALL_LANES, to.first, source), rows = __shfl_sync(ALL_LANES, to.rows, source);
            int64_t begin = rows_before(s, rows, part), n = (rows_before(s, rows, part + 1) - begin) * pieces;

            for (; piece < n; piece += all) {
                int64_t token = first + begin + piece / pieces, at = piece % pieces * s.slot_bytes;

                reduce_piece(c.reduce, c.route.topk, token, c.row_bytes, at, min(at + s.slot_bytes, c.row_bytes), lane);
            }
            piece -= n;
        }
        end_part(c, to, number, part, all, lane);
        __syncwarp();
    }
}

__device__ void copy_block(const cuda_combine &c, unsigned char *shared, int stages, uint32_t block, uint64_t number)
{
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int64_t me = (int64_t)warp * c.stage.copy_blocks + block, all = (int64_t)warps * c.stage.copy_blocks;

    /* After a failed kernel a slow peer may still read from staging. */
    if (!__syncthreads_and(threadIdx.x || may_begin(c.waits, c.waits.ready_phase)))
        return;
    if (c.reduces) {
        reduce_in(c, number, me, all, lane);
    } else {
        copy_ring r = copy_ring_begin(shared, c.stage, stages);

        copy_in(c, r, number, me, all, lane);
    }
    copy_block_end(c.waits, c.stage, number, true);
}

} /* namespace */

/* Profilers show the kernel's name. */
namespace ep
{

__global__ void __launch_bounds__(768, 1) combine_rows(const __grid_constant__ cuda_combine c, int stages)
{
    await_stream();
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ targets from;
    uint32_t block = blockIdx.x, copy_blocks = n_copy_blocks(c.waits, c.stage);
    uint64_t number = operation_publish(c.waits, c.desc, c.route.counts);
    bool ok;

    if (copy_blocks) {
        /* Copy blocks get the first roles: blocks that add up wait for those of the peers, which wait for none. */
        block = take_role(c.waits);
        if (block < copy_blocks) {
            copy_block(c, shared, stages, block, number);
            return;
        }
        block -= copy_blocks;
    }
    ok = sum_block(c, from, shared, stages, block, number);
    move_block_end(c.waits, c.stage, number, {c.desc.kind, from.changed}, ok);
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
