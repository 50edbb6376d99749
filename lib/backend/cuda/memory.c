/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Symmetric memory of the CUDA backend: this rank's own. As on the host, an allocation is published in the owner's slot
 * table, where the peers find it (peer_map.c). Only the functions that free memory wait for kernels.
 */
#include "backend/cuda/cuda.h"
#include "base/array.h"
#include "group/collective.h"

/* Counts the allocation as published: peers that read the count find its slot. */
static void count_published(struct cuda_comm *cuda, struct cuda_allocation *allocation)
{
    allocation->published = atomic_fetch_add_explicit(&cuda->ctrl->allocations, 1, memory_order_release) + 1;
    atomic_store(&allocation->mapped, false);
}

/* Stores the allocation in a slot with a new generation and publishes it. Under memory_lock. EP_E_MEMORY: no free slot.
 */
static ep_status add_allocation(struct cuda_comm *cuda, const struct cuda_allocation *allocation,
                                const cudaIpcMemHandle_t *handle)
{
    struct cuda_slot *published;
    int slot;

    for (slot = 0; slot < CUDA_SLOTS; slot++)
        if (!cuda->allocations[slot].base)
            break;
    if (slot == CUDA_SLOTS)
        return ep_fail(EP_E_MEMORY,
                       "this rank already has %d allocations and windows (a collective ep_free() releases "
                       "the slots of those that are freed and unregistered)",
                       CUDA_SLOTS);
    /* The bits that descriptors carry are never all 0. */
    while (!(++cuda->next_generation & CUDA_GENERATION_MASK))
        ;
    published = &cuda->ctrl->slot[slot];
    cuda->allocations[slot] = *allocation;
    cuda->allocations[slot].generation = cuda->next_generation;
    if (slot >= cuda->slots_used)
        cuda->slots_used = slot + 1;
    published->base = allocation->base;
    published->bytes = allocation->bytes;
    published->handle = *handle;
    atomic_store_explicit(&published->generation, cuda->next_generation, memory_order_release);
    count_published(cuda, &cuda->allocations[slot]);
    return EP_OK;
}

ep_status cuda_alloc_kind(struct cuda_comm *cuda, size_t bytes, enum cuda_memory kind, void **ret_memory)
{
    const char *call = kind == CUDA_MEMORY_LOCAL      ? "ep_alloc_local"
                       : kind == CUDA_MEMORY_INTERNAL ? "memory of the library"
                                                      : "ep_alloc";
    size_t whole = cuda_whole_bytes(bytes);
    struct cuda_allocation allocation = {.bytes = whole, .kind = kind, .window_bytes = whole};
    cudaIpcMemHandle_t handle;
    void *base = NULL;
    cudaError_t error;
    ep_status status;

    /*
     * cudaFree() waits for kernels on the device and on those with peer access to it. So ep_alloc_local(), which may be
     * called at any time, reclaims nothing here, nor does an operation, since kernels of peers may wait for this rank.
     */
    if (kind == CUDA_MEMORY_SYMMETRIC)
        cuda_reclaim(cuda->device);
    error = cudaMalloc(&base, whole);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        if (kind == CUDA_MEMORY_SYMMETRIC)
            cuda_pool_trim(cuda);
        cuda_reclaim(CUDA_ALL_DEVICES);
        error = cudaMalloc(&base, whole);
    }
    status = cuda_status(error, "cudaMalloc");
    if (status != EP_OK)
        return ep_fail_prefix(status, "%s: %zu bytes: ", call, whole);
    status = cuda_status(cudaIpcGetMemHandle(&handle, base), "cudaIpcGetMemHandle");
    if (status == EP_OK) {
        allocation.base = allocation.window = base;
        pthread_mutex_lock(&cuda->memory_lock);
        status = add_allocation(cuda, &allocation, &handle);
        pthread_mutex_unlock(&cuda->memory_lock);
    }
    if (status != EP_OK) {
        cudaFree(base);
        return ep_fail_prefix(status, "%s: ", call);
    }
    *ret_memory = base;
    return EP_OK;
}

/*
 * An estimate of what the operations of a plan need: rows of 7168 bf16 with a scale for each 128, as many tokens on
 * every rank as here, and RESERVE_MAX at most.
 */
enum { RESERVE_ROW = 7168 * 2, RESERVE_SCALES = 7168 / 128 * 4, RESERVE_TOKENS = 512 };
#define RESERVE_MAX ((size_t)512 << 20)

/* Does the caller have symmetric memory? Buffers in it need no staging. */
static bool has_symmetric_memory(struct cuda_comm *cuda)
{
    bool found = false;

    pthread_mutex_lock(&cuda->memory_lock);
    for (int slot = 0; slot < cuda->slots_used && !found; slot++)
        found = cuda->allocations[slot].base && cuda->allocations[slot].kind != CUDA_MEMORY_INTERNAL;
    pthread_mutex_unlock(&cuda->memory_lock);
    return found;
}

void cuda_reserve_stages(struct cuda_comm *cuda, const ep_plan_args *args)
{
    size_t tokens = args->n_tokens > RESERVE_TOKENS ? (size_t)args->n_tokens : RESERVE_TOKENS;
    size_t copies = args->flags & EP_PLAN_EXPANDED ? (size_t)args->topk : (size_t)cuda->group.comm->nranks;
    size_t rows = args->max_recv_tokens > 0 ? (size_t)args->max_recv_tokens : tokens * copies;
    const size_t row[EP_GROUP_AT_COUNT] = {[EP_GROUP_AT_X] = RESERVE_ROW,
                                           [EP_GROUP_AT_SCALES] = RESERVE_SCALES,
                                           [EP_GROUP_AT_INDEX] = (size_t)args->topk * sizeof(int64_t),
                                           [EP_GROUP_AT_WEIGHTS] = (size_t)args->topk * sizeof(float),
                                           [EP_GROUP_AT_SOURCE] = sizeof(int32_t)};
    void *memory;

    if (has_symmetric_memory(cuda))
        return;
    if (rows > RESERVE_MAX / RESERVE_ROW)
        rows = RESERVE_MAX / RESERVE_ROW;
    /* Where this is missing or too small, operations allocate themselves. */
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++)
        (void)cuda_stage(cuda, i, rows * row[i], &memory);
}

ep_status cuda_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    CUDA_ON_DEVICE(comm, cuda_alloc_kind(cuda_of(comm), bytes, CUDA_MEMORY_SYMMETRIC, ret_memory));
}

/* The allocation of that kind whose memory or window begins at `memory`; NULL: none. Under memory_lock. */
static struct cuda_allocation *find_published(struct cuda_comm *cuda, const void *memory, enum cuda_memory kind)
{
    FOR_EACH (at, cuda->allocations, cuda->slots_used)
        if (at->base && at->kind == kind && at->window == memory)
            return at;
    return NULL;
}

/*
 * Unpublishes the caller's ep_alloc() memory at `memory`, and what was freed or unregistered by this rank alone.
 * Returns false, and does nothing, if there is no such memory.
 */
static bool unpublish(struct cuda_comm *cuda, const void *memory)
{
    struct cuda_allocation *found;

    pthread_mutex_lock(&cuda->memory_lock);
    found = find_published(cuda, memory, CUDA_MEMORY_SYMMETRIC);
    if (found)
        found->kind = CUDA_MEMORY_CACHED;
    for (int slot = 0; slot < CUDA_SLOTS && found; slot++) {
        struct cuda_allocation *allocation = &cuda->allocations[slot];

        if (!allocation->base || (allocation->kind != CUDA_MEMORY_CACHED && allocation->kind != CUDA_MEMORY_RETIRED))
            continue;
        atomic_store_explicit(&cuda->ctrl->slot[slot].generation, 0, memory_order_release);
        allocation->kind = CUDA_MEMORY_FREEING;
        allocation->window_bytes = 0;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    if (found)
        atomic_fetch_add(&cuda->ctrl->frees, 1);
    return found != NULL;
}

/* Frees what was unpublished, now that no peer has it mapped. cudaFree() may wait, so not under the lock. */
static ep_status free_unpublished(struct cuda_comm *cuda)
{
    ep_status status = EP_OK;

    for (int slot = 0; slot < CUDA_SLOTS && status == EP_OK; slot++) {
        struct cuda_allocation out = {.base = NULL};

        pthread_mutex_lock(&cuda->memory_lock);
        if (cuda->allocations[slot].base && cuda->allocations[slot].kind == CUDA_MEMORY_FREEING) {
            out = cuda->allocations[slot];
            cuda->allocations[slot] = (struct cuda_allocation){.base = NULL};
        }
        pthread_mutex_unlock(&cuda->memory_lock);
        if (out.base && !out.foreign)
            status = cuda_status(cudaFree(out.base), "cudaFree");
    }
    return status;
}

static ep_status free_memory(struct cuda_comm *cuda, void *memory)
{
    ep_status status, barrier, unmapped;

    /* Operations that were called before may use it. */
    EP_TRY(cuda_drain(cuda));
    if (!unpublish(cuda, memory))
        return ep_fail(EP_E_ARG, "ep_free: memory %p is not from ep_alloc of this communicator", memory);
    /* An exported allocation may only be freed when no peer has it mapped. */
    EP_TRY(ep_group_barrier(cuda->group.comm));
    unmapped = cuda_unmap_freed(cuda);
    EP_TRY(ep_group_barrier(cuda->group.comm));
    cuda_pool_trim(cuda);
    status = free_unpublished(cuda);
    if (status == EP_OK)
        status = unmapped;
    /* Keeps peers from launching kernels that wait for this rank while it is in cudaFree(), which may wait for them. */
    barrier = ep_group_barrier(cuda->group.comm);
    return status == EP_OK ? barrier : status;
}

ep_status cuda_free(ep_comm *comm, void *memory)
{
    CUDA_ON_DEVICE(comm, free_memory(cuda_of(comm), memory));
}

bool cuda_find(struct cuda_comm *cuda, const void *memory, size_t bytes, struct ep_group_address *ret_address)
{
    uintptr_t at = (uintptr_t)memory;
    bool found = false;

    pthread_mutex_lock(&cuda->memory_lock);
    for (int slot = 0; slot < cuda->slots_used && !found; slot++) {
        const struct cuda_allocation *allocation = &cuda->allocations[slot];
        uintptr_t window = (uintptr_t)allocation->window;

        if (!allocation->base || !allocation->window_bytes || at < window || at - window > allocation->window_bytes ||
            allocation->window_bytes - (at - window) < bytes)
            continue;
        *ret_address = (struct ep_group_address){
            .slot = (uint32_t)slot, .generation = allocation->generation, .offset = at - (uintptr_t)allocation->base};
        found = true;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    return found;
}

bool cuda_desc_buffer(struct cuda_comm *cuda, const void *memory, size_t bytes, uint32_t ret_words[2])
{
    struct ep_group_address address;

    if ((uintptr_t)memory % CUDA_DESC_GRAIN || !cuda_find(cuda, memory, bytes, &address) ||
        address.offset / CUDA_DESC_GRAIN > UINT32_MAX)
        return false;
    ret_words[0] = CUDA_DESC_SLOT(address.slot, address.generation & CUDA_GENERATION_MASK);
    ret_words[1] = (uint32_t)(address.offset / CUDA_DESC_GRAIN);
    return true;
}

/*
 * The former buffer stays until the communicator closes: queued operations and graphs use it. Each buffer is at least
 * twice as large as the one before, so all former ones together are smaller than the last one.
 */
ep_status cuda_stage(struct cuda_comm *cuda, int which, size_t bytes, void **ret_memory)
{
    size_t larger = 2 * cuda->stage_bytes[which];

    if (cuda->stage_bytes[which] < bytes) {
        if (larger < bytes)
            larger = bytes;
        EP_TRY(cuda_alloc_kind(cuda, larger, CUDA_MEMORY_INTERNAL, &cuda->stage[which]));
        cuda->stage_bytes[which] = larger;
        atomic_store_explicit(&cuda->ctrl->stage_bytes[which], larger, memory_order_release);
    }
    *ret_memory = cuda->stage[which];
    return EP_OK;
}

void cuda_memory_close(struct cuda_comm *cuda)
{
    cuda_unmap_all(cuda);
    cuda_pool_close(cuda);
    cuda_defer_free(cuda);
}

/* --- memory that this rank allocates or registers alone ----------------------------------------------------------- */

/*
 * Symmetric memory that this rank allocates or registers alone, on any thread. Peers map it as they map all memory
 * (peer_map.c), but they cannot be made to unmap it here: closing an IPC handle waits for kernels on their devices,
 * possibly for one that waits for this rank. So freed memory is cached for the next allocation, and the slot of
 * unregistered memory is reserved for the same memory, until the collective ep_free() or the end of the communicator.
 */

/* Reuses the smallest cached block of at least `bytes` and at most `max` bytes. */
static void *reuse_cached(struct cuda_comm *cuda, size_t bytes, size_t max)
{
    struct cuda_allocation *best = NULL;
    void *memory = NULL;

    pthread_mutex_lock(&cuda->memory_lock);
    FOR_EACH (at, cuda->allocations, cuda->slots_used)
        if (at->base && at->kind == CUDA_MEMORY_CACHED && at->bytes >= bytes && at->bytes <= max &&
            (!best || at->bytes < best->bytes))
            best = at;
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
    found = find_published(cuda, memory, from);
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

/* Driver functions. They return 0 or an error code. */
typedef int address_range_fn(unsigned long long *ret_base, size_t *ret_bytes, unsigned long long address);
typedef int pointer_attribute_fn(void *ret_value, int attribute, unsigned long long address);
enum { ATTRIBUTE_BUFFER_ID = 7 }; /* CU_POINTER_ATTRIBUTE_BUFFER_ID of cuda.h */

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

    FOR_EACH (other, cuda->allocations, cuda->slots_used) {
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
        count_published(cuda, at);
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
        status = add_allocation(cuda, &allocation, &handle);
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
