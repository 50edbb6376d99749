/* SPDX-License-Identifier: Apache-2.0 */
/* nodes.cuh - what the kernels between nodes share: the number of the operation, and its chunks. */
#ifndef EP_CUDA_NODES_CUH
#define EP_CUDA_NODES_CUH

#include "backend/cuda/nodes.h"
#include "backend/cuda/sync.cuh"

#define NODES_THREADS (CUDA_NODES_WARPS * WARP) /* of a block */
/* A rank that waits for another node reports the rank there before the ranks of its own node report this one. */
#define SYNC_DEADLINES 2
#define MIN_BACKOFF_NS 200u
#define MAX_BACKOFF_NS 1000u
#define MOVED_BATCH 16 /* words of host memory read in one poll */

/* Bypasses the caches: the network, or a peer, has written it while the kernels ran. */
__device__ __forceinline__ uint4 load_vector(const unsigned char *from)
{
    uint4 v;

    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_vector(unsigned char *to, uint4 v)
{
    *reinterpret_cast<uint4 *>(to) = v;
}

/* Bypasses the caches, as load_vector(). */
template <typename T> __device__ __forceinline__ T load_word(const T *from)
{
    return *(const volatile T *)from;
}

/* --- chunks ------------------------------------------------------------------------------------------------------ */

struct chunk {
    int node, first, n; /* its tokens in the list */
    int slot;
};

/* Chunk `number` of all nodes, in round-robin order from the next node on; n is 0 if there is none. */
__device__ inline chunk find_chunk(const cuda_chunks &c, uint32_t number)
{
    int node = (int)((number + (uint32_t)c.node + 1) % (uint32_t)c.nnodes), i = (int)(number / (uint32_t)c.nnodes);
    cuda_node_range rail = c.rail[node];
    chunk found = {node, rail.first + i * c.tokens, min(c.tokens, rail.n - i * c.tokens), 0};

    found.n = max(found.n, 0);
    found.slot = CUDA_CHUNK_SLOT(rail.first, c.tokens, node, i);
    return found;
}

__device__ __forceinline__ uint32_t count_chunks(const cuda_chunks &c)
{
    return (uint32_t)c.max_per_node * (uint32_t)c.nnodes;
}

/*
 * The current operation between nodes. The counter is advanced at its end, so all of its kernels read the same number.
 */
struct net_run {
    uint64_t number;
    const cuda_net_buffers *buffers;
};

__device__ __forceinline__ net_run run_of(const cuda_waits &waits, const cuda_net_op_args &op)
{
    uint64_t number = *(const volatile uint64_t *)&waits.mine->net_operation + 1;

    return {number, &op.buffers[number % 2]};
}

/* Posts it to the proxy. Called by one thread. */
__device__ __forceinline__ void post_operation(const cuda_net_op_args &op, const net_run &run)
{
    cuda_op_post *post = &op.posts[run.number % CUDA_OP_POSTS];

    *(volatile uint64_t *)&post->op = op.op;
    store_release(&post->number, run.number);
}

/* Advances the counter. Called by one thread, after everything else that the kernels do. */
__device__ __forceinline__ void complete_net(const cuda_waits &waits, const net_run &run)
{
    waits.mine->net_operation = run.number;
}

/*
 * Has a word of the proxy, in host memory, reached that number? One of all waiting threads of the grid polls the
 * proxy's event count in host memory and copies it to device memory. The others poll that copy, and read their word
 * when it has changed. If every warp read host memory, the driver would be slowed down for other processes on the same
 * GPU (docs/decisions.md).
 */
struct proxy_word_reached {
    const uint64_t *word, *events;
    uint64_t number;
    cuda_signals *mine;
    uint64_t seen_events; /* value of the event count when the word was last read */
    uint32_t backoff_ns;
    bool watches;

    __device__ __forceinline__ bool operator()()
    {
        uint64_t published = load_acquire(&mine->net_events);

        if (published != seen_events) {
            seen_events = published;
            backoff_ns = MIN_BACKOFF_NS;
            if (load_acquire(word) >= number) {
                stop_watching();
                return true;
            }
        }
        if (!watches)
            watches = !*(volatile uint32_t *)&mine->net_watched && !atomicCAS(&mine->net_watched, 0u, 1u);
        if (watches) {
            uint64_t now = load_acquire(events);

            if (now != published) {
                store_release(&mine->net_events, now);
                return false;
            }
        }
        __nanosleep(backoff_ns);
        if (!watches)
            backoff_ns = min(2 * backoff_ns, MAX_BACKOFF_NS);
        return false;
    }

    /* When this thread stops waiting: lets another one poll. */
    __device__ __forceinline__ void stop_watching()
    {
        if (watches)
            atomicExch(&mine->net_watched, 0u);
        watches = false;
    }
};

/* The rail peer on that node, as a rank relative to this node. */
__device__ __forceinline__ int rail_peer_of(const cuda_waits &waits, int node)
{
    return node * waits.nranks + waits.rank - waits.first;
}

/* Is it another node, of which a rank is present? Those of all nodes have the same places. */
__device__ __forceinline__ bool is_other_node(const cuda_waits &waits, const cuda_chunks &c, int node)
{
    return node != c.node && !is_absent(waits, waits.first + rail_peer_of(waits, node));
}

/*
 * Has word `which` of cuda_net_op_args.moved changed since the last call? One thread reads the words in host memory,
 * some at each poll, for all that wait.
 */
struct chunk_progress {
    cuda_signals *mine;
    const uint64_t *moved;
    int which, n; /* number of words */
    int next;     /* of the words that this thread reads */
    uint64_t before;
    uint32_t lease;

    __device__ __forceinline__ bool operator()()
    {
        uint64_t now;

        if (acquire_lease(&mine->moves_until, lease, global_ns()))
            for (int i = 0; i < min(n, MOVED_BATCH); i++) {
                next = next + 1 < n ? next + 1 : 0;
                *(volatile uint64_t *)&mine->net_moved[next] = load_word(moved + next);
            }
        now = load_word(&mine->net_moved[which]);
        if (now == before)
            return false;
        before = now;
        return true;
    }
};

/*
 * Waits until a word of the proxy has reached that number. The deadline restarts when chunks arrive from node `which`,
 * or for nnodes when chunks are sent: all of them together may take longer than one deadline.
 */
__device__ inline wait_end wait_while_moving(const cuda_waits &waits, const cuda_net_op_args &op, const uint64_t *word,
                                             uint64_t number, int which, int nnodes)
{
    proxy_word_reached reached = {word, &op.words->events, number, waits.mine, ~0ull, MIN_BACKOFF_NS, false};
    chunk_progress moves = {waits.mine, op.moved, which, nnodes + 1, which, 0, 0};
    wait_end end = wait_for(
        waits, [&reached] { return reached(); }, nullptr, 0, 1, moves);

    reached.stop_watching();
    return end;
}

/*
 * Waits for a chunk and returns its address; NULL: the kernel must exit. Called by one thread. The payload is complete.
 */
__device__ inline const unsigned char *await_chunk(const cuda_waits &waits, const cuda_net_op_args &op,
                                                   const net_run &run, const cuda_chunks &c, int node, int slot)
{
    const cuda_landed *arrived = run.buffers->arrived + slot;
    wait_end end = wait_while_moving(waits, op, &arrived->number, run.number, node, c.nnodes);

    if (end != WAIT_OK) {
        set_failure(waits, end == WAIT_TIMEOUT ? CUDA_FAILED_LATE : 0, rail_peer_of(waits, node), c.phase);
        return nullptr;
    }
    return reinterpret_cast<const unsigned char *>(*(const volatile uint64_t *)&arrived->address);
}

/* Returns a chunk to the network. Called by one thread, after all reads of the chunk. */
__device__ __forceinline__ void release_chunk(const net_run &run, int slot)
{
    __threadfence_system();
    *(volatile uint64_t *)&run.buffers->consumed[slot] = run.number;
}

/* Hands a chunk to the proxy. Called by all threads of the block, after all writes of the chunk. */
__device__ __forceinline__ void send_chunk(const net_run &run, int slot)
{
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0)
        store_release(&run.buffers->ready[slot], run.number);
}

/*
 * Waits until the arena may be overwritten, which held the chunks of the operation before the previous one; then posts
 * this operation. Called by all threads of each block. Returns false if the kernel must exit.
 */
__device__ inline bool await_arena(const cuda_waits &waits, const cuda_net_op_args &op, const net_run &run,
                                   const cuda_chunks &c)
{
    bool ok = true;

    if (threadIdx.x == 0 && run.number > 2) {
        wait_end end = wait_while_moving(waits, op, &op.words->sent, run.number - 2, c.nnodes, c.nnodes);
        int blocked = *(const volatile int32_t *)&op.words->blocked;

        ok = end == WAIT_OK;
        if (!ok)
            set_failure(waits, end == WAIT_TIMEOUT ? CUDA_FAILED_LATE : 0,
                        blocked < 0 ? waits.rank : blocked - waits.first, c.phase);
    }
    if (threadIdx.x == 0 && blockIdx.x == 0 && ok)
        post_operation(op, run);
    return __syncthreads_and(ok);
}

/*
 * Claims the next tile for the whole block. Running blocks claim tiles in ascending order. So the block with the lowest
 * open tile waits for the network only, and the chunks of all lower tiles, which must be released before the network
 * can make progress, have been read.
 */
__device__ inline uint32_t claim_block_tile(const cuda_waits &waits)
{
    __shared__ uint32_t tile;

    __syncthreads();
    if (threadIdx.x == 0)
        tile = claim_tile(waits);
    __syncthreads();
    return tile;
}

#endif
