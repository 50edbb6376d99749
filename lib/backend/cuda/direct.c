/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/direct.h"

#include "backend/cuda/device.h"

#include <unistd.h>

/* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */
#define HANDLE_DMA_BUF 1

/* cuMemGetHandleForAddressRange() of the driver, returns 0 or an error code. */
typedef int get_handle_fn(void *ret_handle, unsigned long long address, size_t bytes, int type,
                          unsigned long long flags);

/*
 * The proxy reads the completion of a put in host memory, and the kernels then read the data in GPU memory. Without a
 * flush this is right only if the GPU's own reads see the writes of other devices in their order (CUDA Driver API,
 * CUgpuDirectRDMAWritesOrdering): from Hopper on. On boards with a coherent link to the CPU (C2C) it is not:
 * completions take that link, and data may take PCIe. There the GPU uses the page tables of the host.
 */
ep_status cuda_direct_check(int device)
{
    int supported = 0, ordering = 0, coherent = 0;

    CUDA_TRY(cudaDeviceGetAttribute(&supported, cudaDevAttrGPUDirectRDMASupported, device));
    CUDA_TRY(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device));
    CUDA_TRY(cudaDeviceGetAttribute(&coherent, cudaDevAttrPageableMemoryAccessUsesHostPageTables, device));
    if (!supported)
        return ep_fail(EP_E_UNSUPPORTED, "GPU %d does not support GPUDirect RDMA", device);
    if (ordering < cudaGPUDirectRDMAWritesOrderingOwner || coherent)
        return ep_fail(EP_E_UNSUPPORTED, "GPU %d sees writes of NICs in no defined order (GPUDirect RDMA)", device);
    return EP_OK;
}

/* -1: the driver exports none. */
static int export_dmabuf(void *memory, size_t bytes)
{
    get_handle_fn *get_handle;
    int fd = -1;

    if (cuda_find_driver("cuMemGetHandleForAddressRange", (void **)&get_handle) != EP_OK ||
        get_handle(&fd, (uintptr_t)memory, bytes, HANDLE_DMA_BUF, 0) != 0)
        return -1;
    return fd;
}

ep_status cuda_direct_alloc(struct cuda_kept *memory, size_t bytes, struct ep_net_buffer *ret_buffer)
{
    struct ep_net_buffer buffer = EP_NET_BUFFER_INIT;

    buffer.bytes = bytes;
    buffer.device = true;
    EP_TRY(cuda_keep_device(memory, bytes, &buffer.memory));
    buffer.dmabuf_fd = export_dmabuf(buffer.memory, bytes);
    *ret_buffer = buffer;
    return EP_OK;
}

void cuda_direct_close(struct ep_net_buffer *buffer)
{
    if (buffer->dmabuf_fd >= 0)
        close(buffer->dmabuf_fd);
    buffer->dmabuf_fd = -1;
}
