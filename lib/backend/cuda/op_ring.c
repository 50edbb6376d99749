/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/net_op.h"
#include "base/clock.h"
#include "base/thread.h"

#include <stdlib.h>
#include <string.h>

#define MIN_CAPACITY 64
/*
 * Nothing announces the launch of a graph, so the ring is polled if there are graphs: at short intervals while steps
 * follow each other, and at growing ones while nothing is posted.
 */
#define MIN_BACKOFF_NS 50000
#define MAX_BACKOFF_NS 1000000

void cuda_op_ring_init(struct cuda_op_ring *ring)
{
    *ring = (struct cuda_op_ring){.backoff_ns = MIN_BACKOFF_NS};
    pthread_mutex_init(&ring->lock, NULL);
    ep_cond_init(&ring->changed);
}

ep_status cuda_op_ring_open(struct cuda_op_ring *ring, struct cuda_kept *memory)
{
    struct cuda_pinned posts;

    EP_TRY(cuda_keep_pinned(memory, CUDA_OP_POSTS * sizeof(*ring->posts), &posts));
    ring->posts = posts.memory;
    ring->posts_device = posts.device;
    return EP_OK;
}

void cuda_op_ring_reset(struct cuda_op_ring *ring)
{
    for (size_t i = 0; i < ring->capacity; i++)
        if (ring->ops[i] && !ring->ops[i]->captured)
            cuda_op_ring_remove(ring, ring->ops[i]);
    ring->number = 0;
    ring->stop = false;
}

void cuda_op_ring_close(struct cuda_op_ring *ring)
{
    for (size_t i = 0; i < ring->capacity; i++)
        free(ring->ops[i]);
    free(ring->ops);
    pthread_cond_destroy(&ring->changed);
    pthread_mutex_destroy(&ring->lock);
}

/* --- by the caller's thread --------------------------------------------------------------------------------------- */

/* Under the lock. */
static ep_status find_free_slot(struct cuda_op_ring *ring)
{
    size_t capacity = ring->capacity ? 2 * ring->capacity : MIN_CAPACITY;
    struct cuda_ring_op **ops;

    if (ring->called + ring->captured < ring->capacity) {
        while (ring->ops[ring->next])
            ring->next = (ring->next + 1) % ring->capacity;
        return EP_OK;
    }
    ops = realloc(ring->ops, capacity * sizeof(*ops));
    if (!ops)
        return ep_fail(EP_E_MEMORY, "no memory for %zu operations between nodes", capacity);
    memset(ops + ring->capacity, 0, (capacity - ring->capacity) * sizeof(*ops));
    ring->ops = ops;
    ring->next = ring->capacity;
    ring->capacity = capacity;
    return EP_OK;
}

static size_t *count_of(struct cuda_op_ring *ring, const struct cuda_ring_op *op)
{
    return op->captured ? &ring->captured : &ring->called;
}

ep_status cuda_op_ring_add(struct cuda_op_ring *ring, struct cuda_ring_op *op)
{
    ep_status status;

    pthread_mutex_lock(&ring->lock);
    status = find_free_slot(ring);
    if (status == EP_OK) {
        op->id = ring->next;
        ring->ops[op->id] = op;
        ++*count_of(ring, op);
        pthread_cond_signal(&ring->changed);
    }
    pthread_mutex_unlock(&ring->lock);
    return status;
}

void cuda_op_ring_remove(struct cuda_op_ring *ring, struct cuda_ring_op *op)
{
    pthread_mutex_lock(&ring->lock);
    ring->ops[op->id] = NULL;
    --*count_of(ring, op);
    pthread_mutex_unlock(&ring->lock);
    free(op);
}

void cuda_op_ring_stop(struct cuda_op_ring *ring)
{
    pthread_mutex_lock(&ring->lock);
    ring->stop = true;
    pthread_cond_signal(&ring->changed);
    pthread_mutex_unlock(&ring->lock);
}

/* --- by the proxy ------------------------------------------------------------------------------------------------- */

ep_status cuda_op_ring_pop(struct cuda_op_ring *ring, struct cuda_ring_op **ret_op)
{
    uint64_t number = ring->number + 1, id;
    const struct cuda_op_post *post = &ring->posts[number % CUDA_OP_POSTS];
    struct cuda_ring_op *op;

    *ret_op = NULL;
    if (__atomic_load_n(&post->number, __ATOMIC_ACQUIRE) != number)
        return EP_OK;
    id = __atomic_load_n(&post->op, __ATOMIC_RELAXED);
    pthread_mutex_lock(&ring->lock);
    op = id < ring->capacity ? ring->ops[id] : NULL;
    pthread_mutex_unlock(&ring->lock);
    if (!op)
        return ep_fail(EP_E_DEVICE, "operation %llu between nodes: a kernel posted the id %llu, which no operation has",
                       (unsigned long long)number, (unsigned long long)id);
    ring->number = number;
    ring->backoff_ns = MIN_BACKOFF_NS;
    *ret_op = op;
    return EP_OK;
}

enum cuda_ring_state cuda_op_ring_state(struct cuda_op_ring *ring)
{
    enum cuda_ring_state state;

    pthread_mutex_lock(&ring->lock);
    state = ring->stop ? CUDA_RING_STOPPED : ring->called ? CUDA_RING_PENDING : CUDA_RING_IDLE;
    pthread_mutex_unlock(&ring->lock);
    return state;
}

void cuda_op_ring_sleep(struct cuda_op_ring *ring)
{
    struct timespec until = ep_timespec(ep_now_ns() + (uint64_t)ring->backoff_ns);

    pthread_mutex_lock(&ring->lock);
    while (!ring->stop && !ring->called && !ring->captured)
        pthread_cond_wait(&ring->changed, &ring->lock);
    if (!ring->stop && !ring->called)
        pthread_cond_timedwait(&ring->changed, &ring->lock, &until);
    pthread_mutex_unlock(&ring->lock);
    ring->backoff_ns = ring->backoff_ns * 2 < MAX_BACKOFF_NS ? ring->backoff_ns * 2 : MAX_BACKOFF_NS;
}

void cuda_op_ring_await_stop(struct cuda_op_ring *ring)
{
    pthread_mutex_lock(&ring->lock);
    while (!ring->stop)
        pthread_cond_wait(&ring->changed, &ring->lock);
    pthread_mutex_unlock(&ring->lock);
}
