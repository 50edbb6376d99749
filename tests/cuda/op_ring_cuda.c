/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The descriptor ring between kernels and the proxy: the order of the operations. The test writes the posts in place of
 * kernels. Needs no GPU (no_device.h).
 */
#include "backend/cuda/net_op.h"
#include "call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MANY = 300, SECONDS = 60 };

/* Posts as a kernel does. */
static void post(const struct cuda_op_ring *ring, uint64_t id, uint64_t number)
{
    struct cuda_op_post *at = &ring->posts_device[number % CUDA_OP_POSTS];

    at->op = id;
    __atomic_store_n(&at->number, number, __ATOMIC_RELEASE);
}

static int add(struct cuda_op_ring *ring, bool captured, struct cuda_ring_op **ret_op)
{
    struct cuda_ring_op *op = calloc(1, sizeof(*op));
    ep_status status;

    EXPECT(op, "no memory");
    op->captured = captured;
    status = cuda_op_ring_add(ring, op);
    if (status != EP_OK)
        free(op);
    CALL(status);
    *ret_op = op;
    return 0;
}

static int expect_next(struct cuda_op_ring *ring, const struct cuda_ring_op *expected)
{
    struct cuda_ring_op *op;

    CALL(cuda_op_ring_pop(ring, &op));
    EXPECT(op == expected, "%p, not %p", (void *)op, (const void *)expected);
    return 0;
}

/* Posts in another order than the calls; an operation of a graph is posted repeatedly. */
static int pop_in_order(struct cuda_op_ring *ring)
{
    struct cuda_ring_op *called[2], *captured;

    EXPECT(cuda_op_ring_state(ring) == CUDA_RING_IDLE, "an empty ring is not idle");
    TRY(add(ring, false, &called[0]));
    TRY(add(ring, true, &captured));
    TRY(add(ring, false, &called[1]));
    EXPECT(cuda_op_ring_state(ring) == CUDA_RING_PENDING, "calls are not seen");
    TRY(expect_next(ring, NULL));
    post(ring, captured->id, 1);
    post(ring, called[0]->id, 2);
    post(ring, captured->id, 3);
    TRY(expect_next(ring, captured));
    TRY(expect_next(ring, called[0]));
    cuda_op_ring_remove(ring, called[0]);
    TRY(expect_next(ring, captured));
    TRY(expect_next(ring, NULL));
    post(ring, called[1]->id, 4);
    TRY(expect_next(ring, called[1]));
    cuda_op_ring_remove(ring, called[1]);
    EXPECT(cuda_op_ring_state(ring) == CUDA_RING_IDLE, "calls that are done are still there");
    return 0;
}

/* More operations than there is room for at first; only ids of freed operations are reused. */
static int grow(struct cuda_op_ring *ring)
{
    struct cuda_ring_op *ops[MANY], *more;
    uint64_t most = 0, number = ring->number;

    for (int i = 0; i < MANY; i++) {
        TRY(add(ring, i % 3 == 0, &ops[i]));
        most = ops[i]->id > most ? ops[i]->id : most;
    }
    for (int i = 0; i < MANY; i++) {
        post(ring, ops[i]->id, ++number);
        TRY(expect_next(ring, ops[i]));
        if (!ops[i]->captured)
            cuda_op_ring_remove(ring, ops[i]);
    }
    for (int i = 0; i < MANY / 2; i++) {
        TRY(add(ring, false, &more));
        EXPECT(more->id <= ring->capacity - 1, "id %llu of %zu", (unsigned long long)more->id, ring->capacity);
        for (int j = 0; j < MANY; j += 3)
            EXPECT(more->id != ops[j]->id, "id %llu is that of one in a graph", (unsigned long long)more->id);
        cuda_op_ring_remove(ring, more);
    }
    EXPECT(ring->capacity <= 4 * (most + 1), "room for %zu", ring->capacity);
    return 0;
}

/* Other members: graphs stay, calls that were not posted are gone, and numbers begin again. */
static int reset(struct cuda_op_ring *ring)
{
    struct cuda_ring_op *called, *captured;

    TRY(add(ring, false, &called));
    TRY(add(ring, true, &captured));
    post(ring, captured->id, ring->number + 1);
    TRY(expect_next(ring, captured));
    cuda_op_ring_stop(ring);
    cuda_op_ring_reset(ring);
    memset(ring->posts, 0, CUDA_OP_POSTS * sizeof(*ring->posts));
    EXPECT(cuda_op_ring_state(ring) == CUDA_RING_IDLE, "a call is still there, or the ring is stopped");
    TRY(expect_next(ring, NULL));
    post(ring, captured->id, 1);
    return expect_next(ring, captured);
}

static int check_invalid_posts(struct cuda_op_ring *ring)
{
    uint64_t number = ring->number + 1, ids[] = {UINT64_MAX, ring->capacity, ring->capacity - 1};
    struct cuda_ring_op *op, *last = NULL;

    /* The last slot is empty, or an operation is added and removed there. */
    if (ring->ops[ring->capacity - 1])
        ids[2] = UINT64_MAX - 1;
    for (int i = 0; i < 3; i++) {
        post(ring, ids[i], number);
        EXPECT(cuda_op_ring_pop(ring, &op) == EP_E_DEVICE && !op, "id %llu was taken", (unsigned long long)ids[i]);
    }
    TRY(add(ring, false, &last));
    post(ring, last->id, number);
    TRY(expect_next(ring, last));
    cuda_op_ring_remove(ring, last);
    return 0;
}

static void *sleep_until_called(void *ring)
{
    while (cuda_op_ring_state(ring) == CUDA_RING_IDLE)
        cuda_op_ring_sleep(ring);
    return NULL;
}

static void *sleep_until_stopped(void *ring)
{
    cuda_op_ring_await_stop(ring);
    return NULL;
}

/* Nothing else wakes them: the alarm ends a hang. */
static int wake(struct cuda_op_ring *ring)
{
    struct cuda_ring_op *op;
    pthread_t thread;

    EXPECT(pthread_create(&thread, NULL, sleep_until_called, ring) == 0, "no thread");
    TRY(add(ring, false, &op));
    pthread_join(thread, NULL);
    cuda_op_ring_remove(ring, op);
    EXPECT(pthread_create(&thread, NULL, sleep_until_stopped, ring) == 0, "no thread");
    cuda_op_ring_stop(ring);
    pthread_join(thread, NULL);
    EXPECT(cuda_op_ring_state(ring) == CUDA_RING_STOPPED, "not stopped");
    cuda_op_ring_sleep(ring);
    return 0;
}

static int run(struct cuda_op_ring *ring, struct cuda_kept *memory)
{
    CALL(cuda_op_ring_open(ring, memory));
    TRY(pop_in_order(ring));
    TRY(grow(ring));
    TRY(reset(ring));
    TRY(check_invalid_posts(ring));
    return wake(ring);
}

int main(void)
{
    struct cuda_op_ring rings[2];
    struct cuda_kept memory = {.first = NULL};
    int code;

    alarm(SECONDS);
    cuda_op_ring_init(&rings[0]);
    cuda_op_ring_init(&rings[1]);
    code = run(&rings[0], &memory);
    /* No captured operation makes the proxy poll. */
    if (!code)
        code = cuda_op_ring_open(&rings[1], &memory) == EP_OK ? wake(&rings[1]) : FAILED;
    cuda_op_ring_close(&rings[0]);
    cuda_op_ring_close(&rings[1]);
    cuda_kept_free(&memory);
    printf("op_ring_cuda: %s\n", code ? "FAILED" : "passed");
    return code;
}
