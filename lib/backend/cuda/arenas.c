/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/arenas.h"
#include "base/error.h"
#include "base/log.h"

#include <stdio.h>

static size_t round_up(const struct cuda_arenas *arenas, size_t bytes)
{
    return arenas->direct ? cuda_direct_round_up(bytes) : ep_net_whole_pages(bytes);
}

/* The new size of an arena. */
static size_t grown_size(const struct cuda_arenas *arenas, size_t now, size_t bytes)
{
    size_t more = bytes + bytes / 8, step = now + now / 2;

    return round_up(arenas, more > step ? more : step);
}

/* Sizes of new arenas so that both have at least `bytes`, 0: it has; returns their sum. */
static size_t size_new(const struct cuda_arenas *arenas, size_t bytes, bool ahead, size_t ret_sizes[2])
{
    for (int i = 0; i < 2; i++)
        ret_sizes[i] = arenas->of[i].bytes >= bytes ? 0
                       : ahead                      ? grown_size(arenas, arenas->of[i].bytes, bytes)
                                                    : round_up(arenas, bytes);
    return ret_sizes[0] + ret_sizes[1];
}

static bool exceeds(const struct cuda_arenas *arenas, size_t more)
{
    return more && arenas->limit && (arenas->held > arenas->limit || more > arenas->limit - arenas->held);
}

static ep_status fail_limit(const struct cuda_arenas *arenas, const char *call, size_t more)
{
    return ep_fail(
        EP_E_MEMORY,
        "%s: rows for other nodes need %zu bytes of memory more than the %zu allocated, and the limit is %zu: "
        "raise it, or reserve enough at the beginning (ep_cuda_set_net_memory)",
        call, more, arenas->held, arenas->limit);
}

/* After a failure the memory, if there is any, stays unused until the communicator closes. */
static ep_status alloc_direct(struct cuda_arenas *arenas, size_t bytes, struct cuda_pinned *ret_made)
{
    struct ep_net_buffer buffer;
    ep_status status;

    EP_TRY(cuda_direct_alloc(arenas->memory, bytes, &buffer));
    status = arenas->net->ops->attach(arenas->net, &buffer);
    cuda_direct_close(&buffer);
    if (status != EP_OK) {
        arenas->held += bytes;
        return status;
    }
    *ret_made = (struct cuda_pinned){.memory = buffer.memory, .device = buffer.memory, .bytes = bytes};
    return EP_OK;
}

static ep_status alloc_arena(struct cuda_arenas *arenas, const char *call, size_t bytes, struct cuda_pinned *ret_made)
{
    struct ep_net_buffer buffer = EP_NET_BUFFER_INIT;
    char before[EP_ERROR_TEXT_BYTES];

    snprintf(before, sizeof(before), "%s", ep_last_error());
    if (arenas->direct) {
        ep_status status = alloc_direct(arenas, bytes, ret_made);

        if (status == EP_OK)
            return EP_OK;
        /* GPU memory may be free again later. */
        arenas->direct = status == EP_E_MEMORY;
        ep_log(EP_LOG_WARNING, "%s; chunks are sent from host memory", ep_last_error());
        if (exceeds(arenas, bytes))
            return fail_limit(arenas, call, bytes);
    }
    EP_TRY(cuda_keep_pinned(arenas->memory, bytes, ret_made));
    buffer.memory = ret_made->memory;
    buffer.bytes = ret_made->bytes;
    /* If this fails, the network copies. */
    if (arenas->net && arenas->net->ops->attach && arenas->net->ops->attach(arenas->net, &buffer) != EP_OK)
        ep_log(EP_LOG_INFO, "%s; chunks are copied before they are sent", ep_last_error());
    ep_set_last_error(before);
    return EP_OK;
}

static ep_status grow(struct cuda_arenas *arenas, const char *call, size_t bytes, bool ahead)
{
    size_t sizes[2], more = size_new(arenas, bytes, ahead, sizes);

    /* Near the limit, without headroom. */
    if (exceeds(arenas, more))
        more = size_new(arenas, bytes, false, sizes);
    if (exceeds(arenas, more))
        return fail_limit(arenas, call, more);
    for (int i = 0; i < 2; i++) {
        struct cuda_pinned made;

        if (!sizes[i])
            continue;
        EP_TRY(alloc_arena(arenas, call, sizes[i], &made));
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
