/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct_net.h - networks of the tests that put from and to GPU memory, as a NIC with GPUDirect RDMA does: the copy
 * engine of a GPU stands for the NIC. They show that the kernels and the proxy work with chunks in GPU memory, not that
 * a NIC reaches it. All ranks are on one host.
 *
 *   direct          each rank receives payload in GPU memory
 *   direct-mixed    ranks of even nodes do, the others in host memory
 *   direct-lossy    what is put to GPU memory gets lost, as behind a PCI bridge that blocks it
 *   direct-limited  only one buffer of GPU memory can be attached
 */
#ifndef EP_TESTS_CUDA_DIRECT_NET_H
#define EP_TESTS_CUDA_DIRECT_NET_H

#include "net/net.h"

/*
 * For ep_boot.network; NULL: there is none of that name. The backend must use GPU memory, attach what it puts, and not
 * reuse it before flush_test(); otherwise operations fail. EP_E_UNSUPPORTED if the GPU has no GPUDirect RDMA.
 */
const struct ep_net_provider *direct_net_find(const char *name);

#endif
