/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

static ep_status check_bytes(const char *call, size_t bytes)
{
    return bytes > (size_t)INT64_MAX ? ep_fail(EP_E_OVERFLOW, "%s: bytes is %zu", call, bytes) : EP_OK;
}

ep_status ep_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    EP_CHECK_USABLE(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, ret_memory));
    EP_TRY_ON(comm, check_bytes(__func__, bytes));
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, alloc, comm, bytes, ret_memory));
}

ep_status ep_free(ep_comm *comm, void *memory)
{
    EP_CHECK_COMM(comm, comm);
    if (!memory)
        return EP_OK;
    EP_TRY_ON(comm, ep_comm_usable(comm, __func__));
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, free, comm, memory));
}

/*
 * --- not collective: other ranks are not involved, so a failure is not recorded in the communicator ---
 */

ep_status ep_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory)
{
    EP_CHECK_OWN(comm, comm);
    EP_TRY(ep_comm_usable(comm, __func__));
    EP_TRY(EP_CHECK_PTR(__func__, ret_memory));
    EP_TRY(check_bytes(__func__, bytes));
    return EP_BACKEND_CALL(comm, alloc_local, comm, bytes, ret_memory);
}

ep_status ep_free_local(ep_comm *comm, void *memory)
{
    EP_CHECK_OWN(comm, comm);
    return memory ? EP_BACKEND_CALL(comm, free_local, comm, memory) : EP_OK;
}

ep_status ep_register(ep_comm *comm, void *memory, size_t bytes)
{
    EP_CHECK_OWN(comm, comm);
    EP_TRY(ep_comm_usable(comm, __func__));
    EP_TRY(EP_CHECK_PTR(__func__, memory));
    EP_TRY(check_bytes(__func__, bytes));
    if (!bytes)
        return ep_fail(EP_E_ARG, "%s: bytes is 0", __func__);
    return EP_BACKEND_CALL(comm, register_memory, comm, memory, bytes);
}

ep_status ep_unregister(ep_comm *comm, void *memory)
{
    EP_CHECK_OWN(comm, comm);
    return memory ? EP_BACKEND_CALL(comm, unregister_memory, comm, memory) : EP_OK;
}

/*
 * --- allocator callbacks ---
 */

/* A block that the allocator has not freed yet. */
struct pool_block {
    struct pool_block *next;
    void *memory;
    ep_comm *owner; /* NULL: it was freed, with the memory */
};

/* A forked child cannot use the parent's communicators. */
struct pools {
    struct ep_process_own own;
    pthread_cond_t idle;             /* pool_calls of some communicator are 0 */
    ep_comm *attached[EP_MAX_POOLS]; /* the communicator of each device */
    struct pool_block *first;
};

static _Atomic(struct ep_process_own *) current;

/* NULL: this process has none. */
static struct pools *find_pools(void)
{
    struct ep_process_own *own = atomic_load(&current);

    return own && own->generation == ep_process_generation() ? (struct pools *)own : NULL;
}

static void init_pools(void *pools)
{
    pthread_cond_init(&((struct pools *)pools)->idle, NULL);
}

ep_status ep_pool_attach(ep_comm *comm, int device)
{
    struct pools *pools;

    EP_CHECK_OWN(comm, comm);
    EP_TRY(ep_check_range(__func__, "device", device, 0, EP_MAX_POOLS - 1));
    if (!comm->ops->alloc_local)
        return ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", __func__, comm->ops->name);
    pools = ep_process_get_own(&current, sizeof(*pools), init_pools);
    if (!pools)
        return ep_fail(EP_E_MEMORY, "%s: no memory", __func__);
    pthread_mutex_lock(&pools->own.lock);
    pools->attached[device] = comm;
    pthread_mutex_unlock(&pools->own.lock);
    return EP_OK;
}

void ep_pool_detach(ep_comm *comm)
{
    struct pools *pools = find_pools();

    if (!pools)
        return;
    pthread_mutex_lock(&pools->own.lock);
    for (int device = 0; device < EP_MAX_POOLS; device++)
        if (pools->attached[device] == comm)
            pools->attached[device] = NULL;
    /* Each callback allocates or frees once, and waits for no peer. */
    while (comm->pool_calls)
        pthread_cond_wait(&pools->idle, &pools->own.lock);
    for (struct pool_block *block = pools->first; block; block = block->next)
        if (block->owner == comm)
            block->owner = NULL;
    pthread_mutex_unlock(&pools->own.lock);
}

/* Ends a callback that is counted in comm->pool_calls. Under the lock. */
static void end_call(struct pools *pools, ep_comm *comm)
{
    if (--comm->pool_calls == 0)
        pthread_cond_broadcast(&pools->idle);
}

void *ep_pool_alloc(ptrdiff_t bytes, int device, ep_stream stream)
{
    struct pools *pools = device >= 0 && device < EP_MAX_POOLS ? find_pools() : NULL;
    struct pool_block *block = NULL;
    ep_comm *comm = NULL;
    void *memory = NULL;

    (void)stream;
    if (pools && bytes >= 0) {
        block = calloc(1, sizeof(*block));
        if (!block) {
            ep_fail(EP_E_MEMORY, "ep_pool_alloc: no memory for the table of blocks");
            return NULL;
        }
        pthread_mutex_lock(&pools->own.lock);
        comm = pools->attached[device];
        if (comm)
            comm->pool_calls++;
        pthread_mutex_unlock(&pools->own.lock);
    }
    if (!comm) {
        free(block);
        ep_fail(EP_E_ARG, "ep_pool_alloc: %lld bytes on device %d, %s", (long long)bytes, device,
                bytes < 0 ? "a negative size" : "to which no communicator is attached: see ep_pool_attach()");
        return NULL;
    }
    (void)ep_alloc_local(comm, (size_t)bytes, &memory);
    pthread_mutex_lock(&pools->own.lock);
    if (memory) {
        *block = (struct pool_block){.next = pools->first, .memory = memory, .owner = comm};
        pools->first = block;
        block = NULL;
    }
    end_call(pools, comm);
    pthread_mutex_unlock(&pools->own.lock);
    free(block);
    return memory;
}

void ep_pool_free(void *memory, ptrdiff_t bytes, int device, ep_stream stream)
{
    struct pools *pools = find_pools();
    struct pool_block **at, *block;

    (void)bytes;
    (void)device; /* another communicator may be attached to it now */
    (void)stream;
    if (!pools || !memory)
        return;
    pthread_mutex_lock(&pools->own.lock);
    at = &pools->first;
    while (*at && (*at)->memory != memory)
        at = &(*at)->next;
    block = *at;
    if (block)
        *at = block->next;
    if (block && block->owner)
        block->owner->pool_calls++;
    pthread_mutex_unlock(&pools->own.lock);
    if (!block)
        return;
    if (block->owner) {
        ep_free_local(block->owner, memory);
        pthread_mutex_lock(&pools->own.lock);
        end_call(pools, block->owner);
        pthread_mutex_unlock(&pools->own.lock);
    }
    free(block);
}
