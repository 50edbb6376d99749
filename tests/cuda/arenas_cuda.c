/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pinned memory for rows that go to other nodes: how it grows, its largest total, and what a limit refuses. Needs no
 * GPU (no_device.h).
 */
#include "backend/cuda/arenas.h"
#include "call.h"
#include "no_device.h"

#include <stdio.h>
#include <string.h>

enum { PAGE = 4096, STEPS = 400 };

static int check(const struct cuda_arenas *arenas, size_t bytes)
{
    EXPECT(arenas->held == no_device_registered, "%zu bytes are held, and %zu were registered", arenas->held,
           no_device_registered);
    for (int i = 0; i < 2; i++) {
        EXPECT(arenas->of[i].bytes >= bytes, "arena %d has %zu bytes of %zu", i, arenas->of[i].bytes, bytes);
        memset(arenas->of[i].memory, i, bytes);
    }
    EXPECT(!bytes || arenas->of[0].memory != arenas->of[1].memory, "both are one");
    return 0;
}

/* Requests that grow by a page, the worst case: it grows few times, and to no more than documented. */
static int grow_slowly(struct cuda_arenas *arenas)
{
    int times = 0;

    for (size_t pages = 0; pages < STEPS; pages++) {
        size_t before = arenas->held, bytes = pages * PAGE + 1;

        CALL(cuda_arenas_grow(arenas, "a call", bytes));
        TRY(check(arenas, bytes));
        times += arenas->held != before;
        EXPECT(arenas->needed == 2 * bytes, "%zu bytes are needed", arenas->needed);
        EXPECT(pages < 8 || arenas->held <= 5 * arenas->needed, "%zu bytes are held and %zu needed", arenas->held,
               arenas->needed);
    }
    EXPECT(times < 25, "they grew %d times", times);
    CALL(cuda_arenas_grow(arenas, "a call", PAGE));
    EXPECT(arenas->needed > 2 * PAGE, "a smaller operation has lowered the need");
    return 0;
}

/* Grows up to the limit, without spare room where that would exceed it, and no further. */
static int grow_to_limit(struct cuda_arenas *arenas)
{
    size_t held = arenas->held, bytes = arenas->of[0].bytes + 10 * PAGE, more = 2 * bytes;

    arenas->limit = held + more - 1;
    EXPECT(cuda_arenas_grow(arenas, "a call", bytes) == EP_E_MEMORY, "the limit has been passed");
    EXPECT(strstr(ep_last_error(), "a call: ") && strstr(ep_last_error(), "ep_cuda_set_net_memory"),
           "neither the call nor what to do is named: %s", ep_last_error());
    EXPECT(arenas->held == held && arenas->needed == 2 * bytes, "%zu bytes are held and %zu needed", arenas->held,
           arenas->needed);
    TRY(check(arenas, bytes - 10 * PAGE));
    arenas->limit++;
    CALL(cuda_arenas_grow(arenas, "a call", bytes));
    TRY(check(arenas, bytes));
    EXPECT(arenas->held == arenas->limit, "%zu bytes are held, and %zu allowed", arenas->held, arenas->limit);
    arenas->limit = 1;
    CALL(cuda_arenas_grow(arenas, "a call", bytes)); /* needs nothing new */
    EXPECT(cuda_arenas_reserve(arenas, "a call", bytes + 1) == EP_E_MEMORY, "more than the limit was reserved");
    arenas->limit = 0;
    return 0;
}

/* Reserves what was asked for: operations that need no more do not grow it. */
static int reserve(struct cuda_arenas *arenas)
{
    size_t needed = arenas->needed, bytes = (2 * arenas->of[0].bytes / PAGE + 5) * PAGE, held = arenas->held;

    CALL(cuda_arenas_reserve(arenas, "a call", bytes));
    EXPECT(arenas->held == held + 2 * bytes, "%zu bytes for %zu", arenas->held - held, 2 * bytes);
    EXPECT(arenas->needed == needed, "what was reserved counts as needed");
    CALL(cuda_arenas_grow(arenas, "a call", bytes));
    EXPECT(arenas->held == held + 2 * bytes, "what was reserved was not enough");
    return check(arenas, bytes);
}

static int run(struct cuda_arenas *arenas)
{
    TRY(grow_slowly(arenas));
    TRY(grow_to_limit(arenas));
    return reserve(arenas);
}

int main(void)
{
    struct cuda_kept memory = {.first = NULL};
    struct cuda_arenas arenas = {.memory = &memory};
    int code = run(&arenas);

    cuda_kept_free(&memory);
    printf("arenas_cuda: %s\n", code ? "FAILED" : "passed");
    return code;
}
