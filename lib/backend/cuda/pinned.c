/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/pinned.h"

#include "backend/cuda/cuda.h"
#include "backend/cuda/device.h"
#include "base/reserve.h"
#include "net/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

struct kept_allocation {
    struct kept_allocation *next;
    struct cuda_pinned of; /* memory NULL: device memory */
};

static ep_status register_memory(struct cuda_pinned *pinned)
{
    CUDA_TRY(cudaHostRegister(pinned->memory, pinned->bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    CUDA_TRY(cudaHostGetDevicePointer(&pinned->device, pinned->memory, 0));
    return EP_OK;
}

static void unpin(struct cuda_pinned *pinned)
{
    cudaHostUnregister(pinned->memory);
    munmap(pinned->memory, pinned->bytes);
}

static ep_status pin(size_t bytes, struct cuda_pinned *ret_pinned)
{
    struct cuda_pinned pinned = {.bytes = ep_net_whole_pages(bytes)};
    ep_status status;

    *ret_pinned = (struct cuda_pinned){.bytes = 0};
    EP_TRY(ep_reserve_check(pinned.bytes));
    /*
     * Not inherited by children: after a fork, a write here would copy the shared page, and the GPU would keep using
     * the old one.
     */
    pinned.memory = mmap(NULL, pinned.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pinned.memory == MAP_FAILED)
        return ep_fail_errno(EP_E_MEMORY, errno, "mmap of %zu bytes that kernels use", pinned.bytes);
    madvise(pinned.memory, pinned.bytes, MADV_DONTFORK);
    status = register_memory(&pinned);
    if (status == EP_OK)
        *ret_pinned = pinned;
    else
        unpin(&pinned);
    return status;
}

static ep_status new_allocation(struct cuda_kept *memory, struct kept_allocation **ret_new)
{
    struct kept_allocation *made = calloc(1, sizeof(*made));

    if (!made)
        return ep_fail(EP_E_MEMORY, "no memory for %zu bytes", sizeof(*made));
    made->next = memory->first;
    memory->first = *ret_new = made;
    return EP_OK;
}

ep_status cuda_keep_pinned(struct cuda_kept *memory, size_t bytes, struct cuda_pinned *ret_pinned)
{
    struct kept_allocation *made = NULL;

    EP_TRY(new_allocation(memory, &made));
    EP_TRY(pin(bytes, &made->of));
    memory->pinned_bytes += made->of.bytes;
    *ret_pinned = made->of;
    return EP_OK;
}

ep_status cuda_keep_device(struct cuda_kept *memory, size_t bytes, void **ret_memory)
{
    struct kept_allocation *made = NULL;

    EP_TRY(new_allocation(memory, &made));
    CUDA_TRY(cudaMalloc(&made->of.device, bytes));
    memory->device_bytes += bytes;
    *ret_memory = made->of.device;
    return EP_OK;
}

void cuda_kept_free(struct cuda_kept *memory)
{
    while (memory->first) {
        struct kept_allocation *next = memory->first->next;

        if (memory->first->of.memory)
            unpin(&memory->first->of);
        else
            cudaFree(memory->first->of.device);
        free(memory->first);
        memory->first = next;
    }
    memory->pinned_bytes = memory->device_bytes = 0;
}
