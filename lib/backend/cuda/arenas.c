/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/arenas.h"

#include "base/error.h"
#include "net/stream.h"

/* The new size of an arena, in whole pages. */
static size_t grown_size(size_t now, size_t bytes)
{
    size_t more = bytes + bytes / 8, step = now + now / 2;

    return ep_net_whole_pages(more > step ? more : step);
}

/* The bytes to be allocated so that both have at least `bytes`. */
static size_t count_new(const struct cuda_arenas *arenas, size_t bytes, bool ahead)
{
    size_t all = 0;

    for (int i = 0; i < 2; i++)
        if (arenas->of[i].bytes < bytes)
            all += ahead ? grown_size(arenas->of[i].bytes, bytes) : ep_net_whole_pages(bytes);
    return all;
}

static bool exceeds(const struct cuda_arenas *arenas, size_t more)
{
    return more && arenas->limit && (arenas->held > arenas->limit || more > arenas->limit - arenas->held);
}

static ep_status grow(struct cuda_arenas *arenas, const char *call, size_t bytes, bool ahead)
{
    /* Near the limit, without headroom. */
    bool reserve_ahead = ahead && !exceeds(arenas, count_new(arenas, bytes, true));
    size_t more = count_new(arenas, bytes, reserve_ahead);

    if (exceeds(arenas, more))
        return ep_fail(EP_E_MEMORY,
                       "%s: rows for other nodes need %zu bytes of pinned memory, %zu more than the %zu allocated, and "
                       "the limit is %zu: raise it, or reserve enough at the beginning (ep_cuda_set_net_memory)",
                       call, 2 * bytes, more, arenas->held, arenas->limit);
    for (int i = 0; i < 2; i++) {
        struct cuda_pinned made;

        if (arenas->of[i].bytes >= bytes)
            continue;
        EP_TRY(cuda_net_alloc_pinned(arenas->memory, reserve_ahead ? grown_size(arenas->of[i].bytes, bytes) : bytes,
                                     &made));
        arenas->of[i] = made;
        arenas->held += made.bytes;
    }
    return EP_OK;
}

ep_status cuda_arenas_grow(struct cuda_arenas *arenas, const char *call, size_t bytes)
{
    if (arenas->needed < 2 * bytes)
        arenas->needed = 2 * bytes;
    return grow(arenas, call, bytes, true);
}

ep_status cuda_arenas_reserve(struct cuda_arenas *arenas, const char *call, size_t bytes)
{
    return grow(arenas, call, bytes, false);
}
