/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Symmetric memory that this rank allocates or registers alone, on any thread. Peers map it as they map all memory
 * (map.c), but they cannot be made to unmap it here: closing an IPC handle waits for kernels on their devices, possibly
 * for one that waits for this rank. So freed memory is cached for the next allocation, and the slot of unregistered
 * memory is reserved for the same memory, until the collective ep_free() or the end of the communicator.
 */
#include "backend/cuda/cuda.h"

#include "backend/cuda/device.h"
#include "backend/cuda/memory.h"

/* Driver functions. They return 0 or an error code. */
typedef int address_range_fn(unsigned long long *ret_base, size_t *ret_bytes, unsigned long long address);
typedef int pointer_attribute_fn(void *ret_value, int attribute, unsigned long long address);
enum { ATTRIBUTE_BUFFER_ID = 7 }; /* CU_POINTER_ATTRIBUTE_BUFFER_ID of cuda.h */

/* --- memory of this rank ------------------------------------------------------------------------------------------ */

/* Reuses the smallest cached block of at least `bytes` and at most `max` bytes. */
static void *reuse_cached(struct cuda_comm *cuda, size_t bytes, size_t max)
{
    struct cuda_allocation *best = NULL;
    void *memory = NULL;

    pthread_mutex_lock(&cuda->memory_lock);
    for (int slot = 0; slot < cuda->slots_used; slot++) {
        struct cuda_allocation *at = &cuda->allocations[slot];

        if (at->base && at->kind == CUDA_MEMORY_CACHED && at->bytes >= bytes && at->bytes <= max &&
            (!best || at->bytes < best->bytes))
            best = at;
    }
    if (best) {
        best->kind = CUDA_MEMORY_LOCAL;
        best->window_bytes = best->bytes;
        memory = best->base;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    return memory;
}

ep_status cuda_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory)
{
    struct cuda_comm *cuda = cuda_of(comm);
    size_t whole = cuda_whole_bytes(bytes);
    void *memory = reuse_cached(cuda, whole, 2 * whole);
    ep_status status = EP_OK;
    struct cuda_scope scope;

    if (!memory) {
        EP_TRY(cuda_scope_begin_uncaptured(cuda, &scope));
        status = cuda_alloc_kind(cuda, bytes, CUDA_MEMORY_LOCAL, &memory);
        cuda_scope_end(&scope);
    }
    /* A block that is too large is better than none. */
    if (status == EP_E_MEMORY) {
        memory = reuse_cached(cuda, whole, SIZE_MAX);
        status = memory ? EP_OK : status;
    }
    if (status == EP_OK)
        *ret_memory = memory;
    return status;
}

/* Takes memory of kind `from` out of use. false: there is none at `memory`. */
static bool retire(struct cuda_comm *cuda, const void *memory, enum cuda_memory from, enum cuda_memory to)
{
    struct cuda_allocation *found;

    pthread_mutex_lock(&cuda->memory_lock);
    found = cuda_find_allocation(cuda, memory, from);
    if (found) {
        found->kind = to;
        found->window_bytes = 0;
        /* Peers that have not mapped the caller's memory yet must not do so: the caller may free it. */
        if (found->foreign)
            atomic_store_explicit(&cuda->ctrl->slot[found - cuda->allocations].generation, 0, memory_order_release);
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    return found;
}

ep_status cuda_free_local(ep_comm *comm, void *memory)
{
    if (retire(cuda_of(comm), memory, CUDA_MEMORY_LOCAL, CUDA_MEMORY_CACHED))
        return EP_OK;
    return ep_fail(EP_E_ARG, "ep_free_local: memory %p is not from ep_alloc_local of this communicator", memory);
}

/* --- memory of the caller ---------------------------------------------------------------------------------------- */

static ep_status check_kind(const struct cuda_comm *cuda, const void *memory)
{
    struct cudaPointerAttributes is = {.type = cudaMemoryTypeUnregistered};

    CUDA_TRY(cudaPointerGetAttributes(&is, memory));
    if (is.type != cudaMemoryTypeDevice)
        return ep_fail(EP_E_UNSUPPORTED, "it is %s: peers can only map GPU memory from cudaMalloc()",
                       is.type == cudaMemoryTypeManaged ? "managed memory" : "host memory");
    if (is.device != cuda->device)
        return ep_fail(EP_E_ARG, "it is on GPU %d, and this communicator on GPU %d", is.device, cuda->device);
    return EP_OK;
}

/* Finds the allocation that contains the window: IPC exports whole allocations. */
static ep_status find_allocation(const void *memory, size_t bytes, struct cuda_allocation *ret_allocation)
{
    unsigned long long base = 0, number = 0, at = (uintptr_t)memory;
    pointer_attribute_fn *get_attribute;
    address_range_fn *get_range;
    size_t whole = 0;

    EP_TRY(cuda_find_driver("cuMemGetAddressRange", (void **)&get_range));
    EP_TRY(cuda_find_driver("cuPointerGetAttribute", (void **)&get_attribute));
    if (get_range(&base, &whole, at) != 0 || get_attribute(&number, ATTRIBUTE_BUFFER_ID, at) != 0)
        return ep_fail(EP_E_UNSUPPORTED, "the driver does not report which allocation it is in");
    if (bytes > whole - (at - base))
        return ep_fail(EP_E_ARG, "%zu bytes reach beyond its allocation, which has %llu from there on", bytes,
                       (unsigned long long)(whole - (at - base)));
    *ret_allocation = (struct cuda_allocation){.base = (void *)(uintptr_t)base,
                                               .bytes = whole,
                                               .kind = CUDA_MEMORY_REGISTERED,
                                               .foreign = true,
                                               .window = (void *)(uintptr_t)at,
                                               .window_bytes = bytes,
                                               .number = number};
    return EP_OK;
}

static ep_status export(const struct cuda_allocation *allocation, cudaIpcMemHandle_t *ret_handle)
{
    cudaError_t error = cudaIpcGetMemHandle(ret_handle, allocation->base);

    if (error == cudaSuccess)
        return EP_OK;
    cudaGetLastError();
    return ep_fail(EP_E_UNSUPPORTED,
                   "cudaIpcGetMemHandle: %s: peers can only map memory from cudaMalloc(), not from a pool of "
                   "cudaMallocAsync() or from cuMemCreate() (expandable_segments of torch); operations can use it "
                   "unregistered, at the cost of a copy",
                   cudaGetErrorString(error));
}

/* Under the lock. */
static ep_status check_overlap(const struct cuda_comm *cuda, const void *memory, size_t bytes)
{
    uintptr_t at = (uintptr_t)memory;

    for (int slot = 0; slot < cuda->slots_used; slot++) {
        const struct cuda_allocation *other = &cuda->allocations[slot];
        uintptr_t begin = (uintptr_t)(other->foreign ? other->window : other->base);
        size_t size = other->foreign ? other->window_bytes : other->bytes;

        if (other->base && size && (at < begin ? begin - at < bytes : at - begin < size))
            return ep_fail(EP_E_ARG, "part of it is registered or allocated already");
    }
    return EP_OK;
}

/* If the same memory was registered before, restores its slot and generation, so that peers need not map it again. */
static bool restore_retired(struct cuda_comm *cuda, const struct cuda_allocation *allocation)
{
    for (int slot = 0; slot < cuda->slots_used; slot++) {
        struct cuda_allocation *at = &cuda->allocations[slot];

        if (at->kind != CUDA_MEMORY_RETIRED || at->base != allocation->base || at->bytes != allocation->bytes ||
            at->number != allocation->number)
            continue;
        at->kind = CUDA_MEMORY_REGISTERED;
        at->window = allocation->window;
        at->window_bytes = allocation->window_bytes;
        atomic_store_explicit(&cuda->ctrl->slot[slot].generation, at->generation, memory_order_release);
        cuda_publish_allocation(cuda, at);
        return true;
    }
    return false;
}

static ep_status add_window(struct cuda_comm *cuda, const void *memory, size_t bytes)
{
    struct cuda_allocation allocation;
    cudaIpcMemHandle_t handle;
    ep_status status;

    EP_TRY(check_kind(cuda, memory));
    EP_TRY(find_allocation(memory, bytes, &allocation));
    EP_TRY(export(&allocation, &handle));
    pthread_mutex_lock(&cuda->memory_lock);
    status = check_overlap(cuda, memory, bytes);
    if (status == EP_OK && !restore_retired(cuda, &allocation))
        status = cuda_add_allocation(cuda, &allocation, &handle);
    pthread_mutex_unlock(&cuda->memory_lock);
    return status;
}

ep_status cuda_register(ep_comm *comm, void *memory, size_t bytes)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(cuda_scope_begin_uncaptured(cuda, &scope));
    status = add_window(cuda, memory, bytes);
    cuda_scope_end(&scope);
    return status == EP_OK ? EP_OK : ep_fail_prefix(status, "ep_register: memory %p: ", memory);
}

ep_status cuda_unregister(ep_comm *comm, void *memory)
{
    if (!retire(cuda_of(comm), memory, CUDA_MEMORY_REGISTERED, CUDA_MEMORY_RETIRED))
        return ep_fail(EP_E_ARG, "ep_unregister: memory %p is not from ep_register of this communicator", memory);
    atomic_fetch_add(&cuda_of(comm)->ctrl->frees, 1);
    return EP_OK;
}
