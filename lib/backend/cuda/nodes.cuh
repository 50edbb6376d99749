/* SPDX-License-Identifier: Apache-2.0 */
/* nodes.cuh - what kernels between nodes share: which operation runs, and its chunks. */
#ifndef EP_CUDA_NODES_CUH
#define EP_CUDA_NODES_CUH

#include "backend/cuda/nodes.h"
#include "backend/cuda/sync.cuh"

#define MIN_BACKOFF_NS 200u
#define MAX_BACKOFF_NS 1000u
#define MOVED_BATCH 16 /* words of host memory that the thread that watches them reads at each look */

/* Past all caches: the network, or a peer, has written it while kernels ran. */
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

/* Past all caches, as load_vector(). */
template <typename T> __device__ __forceinline__ T load_word(const T *from)
{
    return *(const volatile T *)from;
}

/* --- chunks ------------------------------------------------------------------------------------------------------ */

struct chunk {
    int node, first, n; /* its tokens in the list */
    int slot;
};

/* Number c of the chunks of all nodes, which take turns, beginning behind this one; n 0: there is none. */
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

/* The operation between nodes that runs. Its number is counted when it is complete, so all kernels of it read the same.
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

/* Hands it to the proxy. By one thread. */
__device__ __forceinline__ void post_operation(const cuda_net_op_args &op, const net_run &run)
{
    cuda_op_post *post = &op.posts[run.number % CUDA_OP_POSTS];

    *(volatile uint64_t *)&post->op = op.op;
    store_release(&post->number, run.number);
}

/* By one thread, behind everything that its kernels do. */
__device__ __forceinline__ void complete_net(const cuda_waits &waits, const net_run &run)
{
    waits.mine->net_operation = run.number;
}

/*
 * Has a word of the proxy, in host memory, that number? Of all threads of the grid that wait one watches the proxy's
 * count of events in host memory, and tells the others in device memory, who look for themselves when it has changed:
 * where every warp reads host memory, the driver is held up that works for another process on this GPU
 * (bench/NOTES.md).
 */
struct proxy_word_has {
    const uint64_t *word, *events;
    uint64_t number;
    cuda_signals *mine;
    uint64_t seen_events; /* events that were told when this thread last looked */
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

    /* Before its thread waits no more: another one watches. */
    __device__ __forceinline__ void stop_watching()
    {
        if (watches)
            atomicExch(&mine->net_watched, 0u);
        watches = false;
    }
};

struct proxy_word_ref {
    proxy_word_has *of;

    __device__ __forceinline__ bool operator()() const
    {
        return (*of)();
    }
};

/* The rank of that node that this one talks to, as set_failure() counts them. */
__device__ __forceinline__ int rail_peer_of(const cuda_waits &waits, int node)
{
    return node * waits.nranks + waits.rank - waits.first;
}

/*
 * Has that word of cuda_net_op_args.moved changed since the last question? One thread reads them in host memory, some
 * at each look, for all that wait.
 */
struct count_chunks_moved {
    cuda_signals *mine;
    const uint64_t *moved;
    int which, n; /* of so many words */
    int next;     /* of those that this thread reads */
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
 * Waits until a word of the proxy has that number. The deadline begins anew when chunks move, of that node, or, nnodes,
 * out of here: those that are waited for together may take longer than one.
 */
__device__ inline wait_end wait_while_moving(const cuda_waits &waits, const cuda_net_op_args &op, const uint64_t *word,
                                             uint64_t number, int which, int nnodes)
{
    proxy_word_has met = {word, &op.words->events, number, waits.mine, ~0ull, MIN_BACKOFF_NS, false};
    count_chunks_moved moves = {waits.mine, op.moved, which, nnodes + 1, which, 0, 0};
    wait_end end = wait_for(waits, proxy_word_ref{&met}, nullptr, 0, 1, moves);

    met.stop_watching();
    return end;
}

/* Where the chunk has landed; NULL: leave. By one thread. What it then reads is what the network has put there. */
__device__ inline const unsigned char *await_chunk(const cuda_waits &waits, const cuda_net_op_args &op,
                                                   const net_run &run, const cuda_chunks &c, int node, int slot)
{
    const cuda_landed *landed = run.buffers->landed + slot;
    wait_end end = wait_while_moving(waits, op, &landed->number, run.number, node, c.nnodes);

    if (end != WAIT_OK) {
        set_failure(waits, end == WAIT_TIMEOUT ? CUDA_FAILED_LATE : 0, rail_peer_of(waits, node), c.phase);
        return nullptr;
    }
    return reinterpret_cast<const unsigned char *>(*(const volatile uint64_t *)&landed->address);
}

/* By one thread, behind all reads of the chunk. */
__device__ __forceinline__ void release_chunk(const net_run &run, int slot)
{
    __threadfence_system();
    *(volatile uint64_t *)&run.buffers->consumed[slot] = run.number;
}

/* By all threads of the block, behind all that it has packed. */
__device__ __forceinline__ void send_chunk(const net_run &run, int slot)
{
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0)
        store_release(&run.buffers->ready[slot], run.number);
}

/*
 * May the arena be written, in which the chunks of the operation before the last were packed? Then this one is posted.
 * By all threads of each block; false: leave.
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

#endif
