/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dispatch: each warp streams (token, chunk of its row) units through a ring in shared memory, one bulk load and a bulk
 * store for each destination, straight into the final rows. The lanes place what travels with a row meanwhile.
 * For destinations in ordinary memory the final rows are in staging, and the warps say how far they are with them.
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

__device__ void load_unit(const cuda_dispatch &d, const ring &r, uint32_t number, int slot)
{
    int64_t token = number / (uint32_t)d.n_chunks;
    int chunk = (int)(number % (uint32_t)d.n_chunks);
    uint32_t bytes = chunk_length(d.row_bytes, d.chunk_bytes, chunk);

    barrier_expect(r.full + slot, bytes);
    bulk_load(r.slots + (size_t)slot * r.slot_bytes, d.x + token * d.row_bytes + (int64_t)chunk * d.chunk_bytes, bytes,
              r.full + slot);
}

/* What a lane needs of a unit, fetched one unit ahead: a load from device memory takes as long as a row on its way. */
struct unit {
    int64_t token;
    int chunk, n;
    cuda_entry entry;  /* lane i: the i-th */
    uint32_t scale[2]; /* words lane and lane + 32 */
    int expert;        /* lane k: the k-th */
    float weight;
};

__device__ unit fetch_unit(const cuda_dispatch &d, uint32_t number, int lane)
{
    const cuda_route &route = d.route;
    unit u = {};

    u.token = number / (uint32_t)d.n_chunks;
    u.chunk = (int)(number % (uint32_t)d.n_chunks);
    u.n = __ldg(route.count + u.token);
    if (lane < route.width)
        u.entry = route.entry[u.token * route.width + lane];
    if (!d.has_metadata || u.chunk)
        return u;
    for (int i = 0; i < 2; i++)
        if (lane + i * WARP < d.scale_words)
            u.scale[i] = __ldg(d.scales + u.token * d.scale_stride_token + (lane + i * WARP) * d.scale_stride_block);
    if (lane < route.topk) {
        u.expert = __ldg(route.index + u.token * route.topk + lane);
        u.weight = d.weights ? __ldg(d.weights + u.token * route.topk + lane) : 0.0f;
    }
    return u;
}

/* Indices of the buffers of a target: as EP_GROUP_AT_X ... */
enum { AT_X, AT_SCALES, AT_INDEX, AT_WEIGHTS };

template <typename T> __device__ __forceinline__ T *buffer_of(const cuda_target &to, int buffer)
{
    return reinterpret_cast<T *>(to.at[buffer]);
}

/* One of the K choices of a token, as rank `local` sees it. */
__device__ void place_choice(const cuda_dispatch &d, const cuda_target &to, int local, int64_t at, int expert,
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

/* Scales, indices and weights of a token on one destination. By all lanes. */
__device__ void place_extras(const cuda_dispatch &d, const targets &targets, const unit &u, cuda_entry entry, int lane)
{
    const cuda_route &route = d.route;
    const cuda_target &to = targets.of[entry.local];
    int local = entry.local, topk = route.topk;
    int64_t row = entry.row;
    uint32_t *scales = buffer_of<uint32_t>(to, AT_SCALES) + row * d.scale_words;

    for (int i = 0; i < 2; i++)
        if (lane + i * WARP < d.scale_words)
            scales[lane + i * WARP] = u.scale[i];
    for (int w = lane + 2 * WARP; w < d.scale_words; w += WARP)
        scales[w] = __ldg(d.scales + u.token * d.scale_stride_token + w * d.scale_stride_block);
    if (route.expanded) {
        if (to.at[AT_WEIGHTS] && lane == 0)
            buffer_of<float>(to, AT_WEIGHTS)[row] = __ldg(d.weights + u.token * topk + entry.k);
        return;
    }
    if (!to.at[AT_INDEX] && !to.at[AT_WEIGHTS])
        return;
    if (lane < topk)
        place_choice(d, to, local, row * topk + lane, u.expert, u.weight);
    for (int k = lane + WARP; k < topk; k += WARP)
        place_choice(d, to, local, row * topk + k, __ldg(route.index + u.token * topk + k),
                     d.weights ? __ldg(d.weights + u.token * topk + k) : 0.0f);
}

__device__ cuda_entry entry_of_lane(cuda_entry entry, int lane)
{
    entry.row = __shfl_sync(ALL_LANES, entry.row, lane);
    entry.local = (uint16_t)__shfl_sync(ALL_LANES, entry.local, lane);
    entry.k = (uint16_t)__shfl_sync(ALL_LANES, entry.k, lane);
    return entry;
}

__device__ void place_unit(const cuda_dispatch &d, const targets &targets, const ring &r, const unit &u, int slot,
                           int lane)
{
    const cuda_route &route = d.route;
    uint32_t bytes = chunk_length(d.row_bytes, d.chunk_bytes, u.chunk);
    const cuda_entry *entries = route.entry + u.token * route.width;
    const unsigned char *from = r.slots + (size_t)slot * r.slot_bytes;

    for (int i = lane; i < u.n; i += WARP) {
        cuda_entry entry = i < WARP ? u.entry : entries[i];
        unsigned char *to = targets.of[entry.local].at[AT_X] + entry.row * d.row_bytes;

        bulk_store(to + (int64_t)u.chunk * d.chunk_bytes, from, bytes);
    }
    bulk_commit();
    for (int i = 0; d.has_metadata && u.chunk == 0 && i < u.n; i++) {
        cuda_entry entry;

        if (i >= WARP) {
            place_extras(d, targets, u, entries[i], lane);
            continue;
        }
        entry = entry_of_lane(u.entry, i);
        place_extras(d, targets, u, entry, lane);
    }
}

/*
 * Which units a warp moves. Those that it begins with are its by its place; the others it takes as it comes to them, so
 * that the warps end together however many rows their tokens have. Asked for ahead, because the answer takes as long as
 * a load: the k-th by lane k % 32, which keeps it until it is wanted.
 */
struct turns {
    uint32_t number; /* of the lane's */
    uint32_t me, all;
    int given; /* turns that are the warp's by its place */
};

__device__ void ask_turn(const cuda_dispatch &d, turns &t, int k, int lane)
{
    if (lane != k % WARP)
        return;
    if (k < t.given)
        t.number = (uint32_t)k * t.all + t.me;
    else
        t.number = (uint32_t)t.given * t.all + claim_tile(d.waits);
}

__device__ uint32_t unit_of_turn(const turns &t, int k)
{
    return __shfl_sync(ALL_LANES, t.number, k % WARP);
}

/*
 * Parts of the tokens all of whose units come before `unit`. The units of a warp ascend: once it has moved those that
 * it had before, it is through with these parts.
 */
__device__ __forceinline__ int parts_before(const cuda_dispatch &d, uint32_t unit, uint32_t units)
{
    return unit >= units ? d.stage.parts : (int)(unit / ((uint32_t)d.stage.part_tokens * (uint32_t)d.n_chunks));
}

/*
 * This warp is through with the parts before `upto`. Who is the last tells each rank that copies how many of the rows
 * there are complete: as many as the counting kernel has found in the tokens so far.
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
        store_release(&w.peer[lane]->progress[w.rank], CUDA_PROGRESS(number, rows));
    }
}

/* Where a copying warp is; lane i looks after the rows of rank i. */
struct arrival {
    int64_t next, known, total; /* bytes: the warp's next piece, what is complete, all */
};

__device__ bool has_piece(const arrival &a, const cuda_stage &s)
{
    return a.next < a.total && min(a.next + s.slot_bytes, a.total) <= a.known;
}

/*
 * Waits until some source is further. By all lanes. The deadline is twice that of others: the warps that move wait for
 * the peers to begin, then for them to end, and say who is late; this is for words that do not come in spite of that.
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
            /* What it had to send is here. */
            __threadfence_system();
            lost = rows_of_progress(load_acquire(&w.mine->progress[lane]), number) != CUDA_ALL_ROWS;
        }
        late = open && now - begin > 2 * w.deadline_ns;
        if (stopped || lost || late)
            set_failure(w, stopped ? 0 : lost ? CUDA_FAILED_LOST : CUDA_FAILED_LATE, lane, w.done_phase);
        if (__any_sync(ALL_LANES, stopped || lost || late))
            return false;
    }
    /* What the peers wrote before may be read by the copy engine now. */
    __syncwarp();
    bulk_fence_global();
    return true;
}

/* Copies what the peers have placed in staging, in the order in which it comes. By a warp, number `me` of `all`. */
__device__ bool copy_out(const cuda_dispatch &d, copy_ring &c, uint64_t number, int64_t me, int64_t all, int lane)
{
    const cuda_stage &s = d.stage;
    sources from = sources_of(d.waits, d.route.counts, lane);
    arrival a = {me * s.slot_bytes, 0, from.rows * s.x.row_bytes};
    bool sound = true;

    while (sound) {
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
            sound = await_rows(d, a, number, lane);
        }
    }
    bulk_wait_all();
    return sound;
}

__device__ void copy_block(const cuda_dispatch &d, unsigned char *shared, int stages, uint32_t block, uint64_t number)
{
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
    copy_ring c = copy_ring_begin(shared, d.stage, stages);

    copy_block_end(d.waits, d.stage, number,
                   copy_out(d, c, number, (int64_t)warp * d.stage.copy_blocks + block,
                            (int64_t)warps * d.stage.copy_blocks, (int)threadIdx.x % WARP));
}

/* All that the block, number `block` of the movers, moves over the links. */
__device__ __forceinline__ bool move_units(const cuda_dispatch &d, targets &targets, unsigned char *shared, int stages,
                                           uint32_t block, uint64_t number)
{
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    ring r(shared, stages, d.chunk_bytes);
    uint32_t units = (uint32_t)d.route.n_tokens * (uint32_t)d.n_chunks, blocks = (uint32_t)d.stage.move_blocks;
    turns t = {0, (uint32_t)warp * blocks + block, blocks * (uint32_t)warps, stages + 1};
    int slot = 0, next_slot = stages - 1, ended = 0, passed = 0;
    uint32_t parity = 0, copying;
    unit u = {}, next = {};
    bool sound, moves;

    for (int k = 0; k < t.given; k++)
        ask_turn(d, t, k, lane);
    if (lane == 0) {
        ring_init(r);
        /* Inputs are this rank's own: they may be loaded before the peers are ready. */
        for (int k = 0; k < stages - 1 && (uint32_t)k * t.all + t.me < units; k++)
            load_unit(d, r, (uint32_t)k * t.all + t.me, k);
    }
    if (t.me < units)
        next = fetch_unit(d, t.me, lane);
    __syncwarp();
    sound = operation_begin(d.waits, d.desc, d.route.counts, number, targets);
    copying = targets.copying;
    moves = sound && !is_refused(d.waits, d.route.counts);
    if (copying)
        passed = parts_before(d, t.me, units);
    for (int k = 0; unit_of_turn(t, k) < units; k++) {
        uint32_t following = unit_of_turn(t, k + 1), loading;

        u = next;
        if (following < units)
            next = fetch_unit(d, following, lane);
        ask_turn(d, t, k + t.given, lane);
        barrier_wait(r.full + slot, parity);
        if (moves)
            place_unit(d, targets, r, u, slot, lane);
        else if (k == stages - 2 || following >= units)
            break; /* nothing more is on its way into shared memory */
        loading = unit_of_turn(t, k + stages - 1);
        if (moves && loading < units) {
            /* The stores of the unit before have read the slot that is loaded next. */
            bulk_wait_read();
            __syncwarp();
            if (lane == 0)
                load_unit(d, r, loading, next_slot);
            next_slot = next_slot + 1 == stages ? 0 : next_slot + 1;
        }
        if (moves && ended < passed) {
            /* Behind the next load, because what has been read need not be written yet. */
            bulk_wait_older();
            end_parts(d, copying, number, ended, passed, lane);
        }
        if (copying)
            passed = parts_before(d, following, units);
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    bulk_wait_all();
    if (copying && sound)
        end_parts(d, copying, number, ended, d.stage.parts, lane);
    return sound;
}

} /* namespace */

/* Profilers show the name. */
namespace ep
{

__global__ void __launch_bounds__(512, 1) dispatch_rows(const __grid_constant__ cuda_dispatch d, int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ targets targets;
    uint32_t block = blockIdx.x;
    uint64_t number = operation_publish(d.waits, d.desc);
    bool sound;

    if (n_copy_blocks(d.waits, d.stage)) {
        /* The blocks that move rows first: copy blocks wait for those of the peers. */
        block = take_role(d.waits);
        if (block >= (uint32_t)d.stage.move_blocks) {
            copy_block(d, shared, stages, block - (uint32_t)d.stage.move_blocks, number);
            return;
        }
    }
    sound = move_units(d, targets, shared, stages, block, number);
    move_block_end(d.waits, d.stage, number, sound);
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
