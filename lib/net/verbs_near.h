/* SPDX-License-Identifier: Apache-2.0 */
/* verbs_near.h - how near a GPU and an RDMA device are, from the paths of their PCI devices in sysfs. */
#ifndef EP_NET_VERBS_NEAR_H
#define EP_NET_VERBS_NEAR_H

/*
 * The larger, the nearer: the number of PCI bridges that both are below, plus 2 if they have the same host bridge; 1:
 * the same NUMA node only; 0: neither, or not known. `sys` is "/sys" or a copy; `pci` as CUDA writes it,
 * "0000:1B:00.0".
 */
#define VERBS_NEAR_BRIDGE 3 /* from here on, data between both need not pass the host bridge */
int verbs_nearness(const char *sys, const char *rdma_device, const char *pci);

/*
 * For devices that are equally near to the GPU: its position, by PCI address, among the GPUs that are as near to one of
 * them, and not nearer to another. GPUs that share NICs then take different ones, however the ranks are numbered and
 * whichever GPUs they see. -1: not known.
 */
int verbs_gpu_index(const char *sys, const char *const *rdma_devices, int n, const char *pci);

#endif
