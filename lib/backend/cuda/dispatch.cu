/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dispatch: each warp streams tiles (a token, a chunk of its row) through a ring in shared memory, with one bulk load
 * and a bulk store for each destination, straight into the final rows. The lanes store the row's metadata meanwhile.
 * For destinations in ordinary memory the final rows are in staging, and the warps publish their progress.
 */
#include "backend/cuda/device.cuh"
#include "backend/cuda/stage.cuh"

namespace
{

__device__ uint32_t chunk_length(int64_t row_bytes, int chunk_bytes, int chunk)
{
    int64_t left = row_bytes - (int64_t)chunk * chunk_bytes;

    return (uint32_t)(left < chunk_bytes ? left : chunk_bytes);
}

__device__ void load_tile(const cuda_dispatch &d, const ring &r, uint32_t number, int slot)
{
    int64_t token = number / (uint32_t)d.n_chunks;
    int chunk = (int)(number % (uint32_t)d.n_chunks);
    uint32_t bytes = chunk_length(d.row_bytes, d.chunk_bytes, chunk);

    barrier_expect(r.full + slot, bytes);
    bulk_load(r.slots + (size_t)slot * r.slot_bytes, d.x + token * d.row_bytes + (int64_t)chunk * d.chunk_bytes, bytes,
              r.full + slot);
}

/* A lane's data of a tile, fetched one tile ahead: a load from device memory takes as long as the transfer of a row. */
struct tile {
    int64_t token;
    int chunk, n;
    cuda_entry entry;  /* lane i: the i-th */
    uint32_t scale[2]; /* words lane and lane + 32 */
    int expert;        /* lane k: the k-th */
    float weight;
};

__device__ tile fetch_tile(const cuda_dispatch &d, uint32_t number, int lane)
{
    const cuda_route &route = d.route;
    tile t = {};

    t.token = number / (uint32_t)d.n_chunks;
    t.chunk = (int)(number % (uint32_t)d.n_chunks);
    t.n = __ldg(route.count + t.token);
    if (lane < route.width)
        t.entry = route.entry[t.token * route.width + lane];
    if (!d.has_metadata || t.chunk)
        return t;
    for (int i = 0; i < 2; i++)
        if (lane + i * WARP < d.scale_words)
            t.scale[i] = __ldg(d.scales + t.token * d.scale_stride_token + (lane + i * WARP) * d.scale_stride_block);
    if (lane < route.topk) {
        t.expert = __ldg(route.index + t.token * route.topk + lane);
        t.weight = d.weights ? __ldg(d.weights + t.token * route.topk + lane) : 0.0f;
    }
    return t;
}

template <typename T> __device__ __forceinline__ T *buffer_of(const cuda_target &to, int buffer)
{
    return reinterpret_cast<T *>(to.at[buffer]);
}

/* Stores one of a token's K choices, as index and weight for rank `local`. */
__device__ void store_choice(const cuda_dispatch &d, const cuda_target &to, int local, int64_t at, int expert,
                             float weight)
{
    int own = expert - local * d.route.n_local_experts;
    bool mine = expert >= 0 && own >= 0 && own < d.route.n_local_experts;

    if (to.at[AT_INDEX] && d.route.idx64)
        buffer_of<int64_t>(to, AT_INDEX)[at] = mine ? own : -1;
    else if (to.at[AT_INDEX])
        buffer_of<int32_t>(to, AT_INDEX)[at] = mine ? own : -1;
    if (to.at[AT_WEIGHTS])
        buffer_of<float>(to, AT_WEIGHTS)[at] = mine ? weight : 0.0f;
}

/* Stores scales, indices, weights and source of a token on one destination. By all lanes. */
__device__ void store_metadata(const cuda_dispatch &d, const targets &targets, const tile &t, cuda_entry entry,
                               int lane)
{
    const cuda_route &route = d.route;
    const cuda_target &to = targets.of[entry.local];
    int local = entry.local, topk = route.topk;
    int64_t row = entry.row;
    uint32_t *scales = buffer_of<uint32_t>(to, AT_SCALES) + row * d.scale_words;

    for (int i = 0; i < 2; i++)
        if (lane + i * WARP < d.scale_words)
            scales[lane + i * WARP] = t.scale[i];
    for (int w = lane + 2 * WARP; w < d.scale_words; w += WARP)
        scales[w] = __ldg(d.scales + t.token * d.scale_stride_token + w * d.scale_stride_block);
    if (route.expanded) {
        if (to.at[AT_WEIGHTS] && lane == 0)
            buffer_of<float>(to, AT_WEIGHTS)[row] = __ldg(d.weights + t.token * topk + entry.k);
        return;
    }
    if (to.at[AT_SOURCE] && lane == 0)
        buffer_of<int32_t>(to, AT_SOURCE)[row] = d.first_source + (int32_t)t.token;
    if (!to.at[AT_INDEX] && !to.at[AT_WEIGHTS])
        return;
    if (lane < topk)
        store_choice(d, to, local, row * topk + lane, t.expert, t.weight);
    for (int k = lane + WARP; k < topk; k += WARP)
        store_choice(d, to, local, row * topk + k, __ldg(route.index + t.token * topk + k),
                     d.weights ? __ldg(d.weights + t.token * topk + k) : 0.0f);
}

__device__ void store_tile(const cuda_dispatch &d, const targets &targets, const ring &r, const tile &t, int slot,
                           int lane)
{
    const cuda_route &route = d.route;
    uint32_t bytes = chunk_length(d.row_bytes, d.chunk_bytes, t.chunk);
    const cuda_entry *entries = route.entry + t.token * route.width;
    const unsigned char *from = r.slots + (size_t)slot * r.slot_bytes;

    for (int i = lane; i < t.n; i += WARP) {
        cuda_entry entry = i < WARP ? t.entry : entries[i];
        unsigned char *to = targets.of[entry.local].at[AT_X] + entry.row * d.row_bytes;

        bulk_store(to + (int64_t)t.chunk * d.chunk_bytes, from, bytes);
    }
    bulk_commit();
    for (int i = 0; d.has_metadata && t.chunk == 0 && i < t.n; i++) {
        cuda_entry entry;

        if (i >= WARP) {
            store_metadata(d, targets, t, entries[i], lane);
            continue;
        }
        entry = entry_of_lane(t.entry, i);
        store_metadata(d, targets, t, entry, lane);
    }
}

/*
 * The tiles of a warp. The first ones are fixed by its index; it claims the others, so that all warps end together,
 * however many rows their tokens have. Claims are made ahead, because the result takes as long as a load: lane k % 32
 * makes the k-th claim and holds it.
 */
struct claims {
    uint32_t number; /* of this lane's claim */
    uint32_t me, all;
    int fixed; /* number of tiles fixed by the warp's index */
};

__device__ void claim_ahead(const cuda_dispatch &d, claims &c, int k, int lane)
{
    if (lane != k % WARP)
        return;
    if (k < c.fixed)
        c.number = (uint32_t)k * c.all + c.me;
    else
        c.number = (uint32_t)c.fixed * c.all + claim_tile(d.waits);
}

__device__ uint32_t tile_of_claim(const claims &c, int k)
{
    return __shfl_sync(ALL_LANES, c.number, k % WARP);
}

/*
 * The number of parts whose tiles all come before `tile`. The tiles of a warp ascend: when it has moved the tiles
 * before this one, it has finished these parts.
 */
__device__ __forceinline__ int parts_before(const cuda_dispatch &d, uint32_t tile, uint32_t tiles)
{
    return tile >= tiles ? d.stage.parts : (int)(tile / ((uint32_t)d.stage.part_tokens * (uint32_t)d.n_chunks));
}

/*
 * Ends the parts before `upto` for this warp. The last warp publishes to each rank that copies how many rows there are
 * complete: as many as the counting kernel has found in the tokens so far.
 */
__device__ void end_parts(const cuda_dispatch &d, uint32_t copying, uint64_t number, int &ended, int upto, int lane)
{
    const cuda_stage &s = d.stage;
    const cuda_waits &w = d.waits;
    int blocks = s.part_tokens / CUDA_COUNT_TOKENS;

    for (; ended < upto; ended++) {
        uint32_t rows = CUDA_ALL_ROWS;

        if (!count_part(w, ended, (uint32_t)s.move_blocks * (blockDim.x / WARP), lane))
            continue;
        if (lane >= w.nranks || !(copying >> lane & 1))
            continue;
        if (ended + 1 < s.parts)
            rows = (uint32_t)__ldg(d.route.block_rows + (int64_t)(ended + 1) * blocks * w.nranks + lane);
        store_release(&signals_of(w, lane)->progress[w.rank], CUDA_PROGRESS(number, rows));
    }
}

/* Progress of a copying warp; lane i tracks the rows of rank i. */
struct arrival {
    int64_t next, known, total; /* bytes: the warp's next piece, what is complete, all */
};

__device__ bool has_piece(const arrival &a, const cuda_stage &s)
{
    return a.next < a.total && min(a.next + s.slot_bytes, a.total) <= a.known;
}

/*
 * Waits until another piece of some source is complete. By all lanes. The deadline is twice the usual one: the warps
 * that move rows wait for the peers to begin, then to end, and report a late rank; this covers words that are missing
 * all the same.
 */
__device__ bool await_rows(const cuda_dispatch &d, arrival &a, uint64_t number, int lane)
{
    const cuda_waits &w = d.waits;
    bool open = a.next < a.total;
    uint64_t begin = 0;
    uint32_t lease = 0;

    for (uint32_t spins = 1;; spins++) {
        bool stopped, lost, late;
        uint64_t now;

        if (open)
            a.known = min(a.total, (int64_t)rows_of_progress(load_acquire(&w.mine->progress[lane]), number) *
                                       d.stage.x.row_bytes);
        if (__any_sync(ALL_LANES, has_piece(a, d.stage)))
            break;
        if (spins % SPINS)
            continue;
        now = global_ns();
        if (!begin)
            begin = now;
        poll_host(w, lease, now);
        stopped = is_stopped(w);
        lost = open && *(volatile uint32_t *)&w.mine->lost >> lane & 1;
        if (lost) {
            /* All that the rank has sent is here. */
            __threadfence_system();
            lost = rows_of_progress(load_acquire(&w.mine->progress[lane]), number) != CUDA_ALL_ROWS;
        }
        late = open && now - begin > 2 * w.deadline_ns;
        if (stopped || lost || late)
            set_failure(w, stopped ? 0 : lost ? CUDA_FAILED_LOST : CUDA_FAILED_LATE, lane, w.done_phase);
        if (__any_sync(ALL_LANES, stopped || lost || late))
            return false;
    }
    /* The copy engine may now read what the peers have written. */
    __syncwarp();
    bulk_fence_global();
    return true;
}

/* Copies what the peers have stored in staging, in the order of arrival. By a warp, number `me` of `all`. */
__device__ bool copy_out(const cuda_dispatch &d, copy_ring &c, uint64_t number, int64_t me, int64_t all, int lane)
{
    const cuda_stage &s = d.stage;
    sources from = sources_of(d.waits, d.route.counts, lane);
    arrival a = {me * s.slot_bytes, 0, from.rows * s.x.row_bytes};
    bool ok = true;

    while (ok) {
        uint32_t ready = __ballot_sync(ALL_LANES, has_piece(a, s));

        if (ready && copy_ring_has_room(c)) {
            int source = __ffs((int)ready) - 1;
            int64_t at = __shfl_sync(ALL_LANES, a.next, source), total = __shfl_sync(ALL_LANES, a.total, source);

            copy_ring_add(c, s, __shfl_sync(ALL_LANES, from.first, source), at, min(at + s.slot_bytes, total), lane);
            if (lane == source)
                a.next += all * s.slot_bytes;
        } else if (c.loaded) {
            copy_ring_store(c, lane);
        } else if (!__any_sync(ALL_LANES, a.next < a.total)) {
            break;
        } else {
            ok = await_rows(d, a, number, lane);
        }
    }
    bulk_wait_all();
    return ok;
}

__device__ void copy_block(const cuda_dispatch &d, unsigned char *shared, int stages, uint32_t block, uint64_t number)
{
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
    copy_ring c = copy_ring_begin(shared, d.stage, stages);

    copy_block_end(d.waits, d.stage, number,
                   copy_out(d, c, number, (int64_t)warp * d.stage.copy_blocks + block,
                            (int64_t)warps * d.stage.copy_blocks, (int)threadIdx.x % WARP));
}

/* Moves the tiles of a block, number `block` of those that move rows. */
__device__ __forceinline__ bool move_tiles(const cuda_dispatch &d, targets &targets, unsigned char *shared, int stages,
                                           uint32_t block, uint64_t number)
{
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    ring r(shared, stages, d.chunk_bytes);
    uint32_t tiles = (uint32_t)d.route.n_tokens * (uint32_t)d.n_chunks, blocks = (uint32_t)d.stage.move_blocks;
    claims c = {0, (uint32_t)warp * blocks + block, blocks * (uint32_t)warps, stages + 1};
    int slot = 0, next_slot = stages - 1, ended = 0, passed = 0;
    uint32_t parity = 0, copying;
    tile t = {}, next = {};
    bool ok, moves;

    for (int k = 0; k < c.fixed; k++)
        claim_ahead(d, c, k, lane);
    if (lane == 0) {
        ring_init(r);
        /* The inputs are this rank's own: they may be loaded before the peers are ready. */
        for (int k = 0; k < stages - 1 && (uint32_t)k * c.all + c.me < tiles; k++)
            load_tile(d, r, (uint32_t)k * c.all + c.me, k);
    }
    if (c.me < tiles)
        next = fetch_tile(d, c.me, lane);
    __syncwarp();
    ok = operation_begin(d.waits, d.desc, d.route.counts, &d.route, number, targets, block);
    copying = targets.copying;
    moves = ok && !(targets.refused && is_refused(d.waits, d.route.counts));
    if (copying)
        passed = parts_before(d, c.me, tiles);
    for (int k = 0; tile_of_claim(c, k) < tiles; k++) {
        uint32_t following = tile_of_claim(c, k + 1), loading;

        t = next;
        if (following < tiles)
            next = fetch_tile(d, following, lane);
        claim_ahead(d, c, k + c.fixed, lane);
        barrier_wait(r.full + slot, parity);
        if (moves)
            store_tile(d, targets, r, t, slot, lane);
        else if (k == stages - 2 || following >= tiles)
            break; /* no load into shared memory is in flight any more */
        HOLD(d.waits, CUDA_POINT_ROW);
        loading = tile_of_claim(c, k + stages - 1);
        if (moves && loading < tiles) {
            /* The stores of the previous tile must have read the slot that is loaded next. */
            bulk_wait_read();
            __syncwarp();
            if (lane == 0)
                load_tile(d, r, loading, next_slot);
            next_slot = next_slot + 1 == stages ? 0 : next_slot + 1;
        }
        if (moves && ended < passed) {
            /* After the next load, because the stores need more time until they are written. */
            bulk_wait_older();
            end_parts(d, copying, number, ended, passed, lane);
        }
        if (copying)
            passed = parts_before(d, following, tiles);
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    bulk_wait_all();
    if (copying && ok)
        end_parts(d, copying, number, ended, d.stage.parts, lane);
    return ok;
}

} /* namespace */

/* Profilers show the kernel's name. */
namespace ep
{

__global__ void __launch_bounds__(512, 1) dispatch_rows(const __grid_constant__ cuda_dispatch d, int stages)
{
    await_stream();
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ targets targets;
    uint32_t block = blockIdx.x;
    uint64_t number = operation_publish(d.waits, d.desc, d.route.counts);
    bool ok;

    /* While the peers begin: nothing of theirs is written there. */
    fill_rows(d.fill, d.route.counts->rows_on[d.waits.rank]);
    if (n_copy_blocks(d.waits, d.stage)) {
        /* Blocks that move rows get the first roles: copy blocks wait for those of the peers. */
        block = take_role(d.waits);
        if (block >= (uint32_t)d.stage.move_blocks) {
            copy_block(d, shared, stages, block - (uint32_t)d.stage.move_blocks, number);
            return;
        }
    }
    ok = move_tiles(d, targets, shared, stages, block, number);
    move_block_end(d.waits, d.stage, number, {d.desc.kind, targets.changed}, ok);
}

} /* namespace ep */

cudaError_t cuda_launch_dispatch(const struct cuda_dispatch *dispatch, const struct cuda_shape *shape,
                                 cudaStream_t stream)
{
    return launch_operation(ep::dispatch_rows, *dispatch, *shape, stream);
}

cudaError_t cuda_dispatch_load(int shared_bytes)
{
    return cudaFuncSetAttribute(ep::dispatch_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}
