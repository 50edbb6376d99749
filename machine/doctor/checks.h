/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks.h - the list of checks, by group, in the order in which they run and are shown.
 *
 * A check is `const struct doctor_check check_<id>`, with '_' for '-', in the checks_*.c of its subject; a row here
 * registers it. Each fault is reported by exactly one check. If two checks could detect it, the one closer to the
 * cause reports it, and the other one does not.
 */
#ifndef EP_DOCTOR_CHECKS_H
#define EP_DOCTOR_CHECKS_H

#include "common/text.h"
#include "doctor.h"

/* clang-format off */
#define DOCTOR_CHECKS(X) \
    /* driver */ \
    X(peermem) X(driver_option) X(doca_kernel) X(driver_skew) X(iommu_gb200) X(gpu_errors) X(nvlink) \
    X(gpu_access) X(open_driver) X(libcuda) \
    X(inventory) X(mig) X(clocks) X(confidential) X(uvm) X(fabric_manager) X(sxid) \
    /* nic */ \
    X(slow_link) X(gid) X(port_down) X(link_layer) X(nic_access) \
    X(rdma_device) \
    X(pci_uplink) X(link_errors) X(roce_loss) X(rails_subnet) X(mtu) X(firmware) X(bond) \
    /* verbs */ \
    X(provider_missing) X(verbs_abi) X(verbs_mixed) X(rdmav_drivers) X(verbs_from_gib) \
    /* nvshmem */ \
    X(one_nic) X(shared_nic) X(nic_handler) X(two_nvshmem) X(ibgda_transport) X(gdrcopy) X(home) X(hca_prefix) \
    X(void_variables) \
    X(ibgda_nic) \
    X(hca_lists) X(dmabuf_off) X(heap_size) \
    /* nccl */ \
    X(net_plugin) X(efa_version) X(gib_settings) X(two_nccl) \
    X(nccl_hca) X(socket_interface) X(fastrak_interfaces) X(topology_file) X(nccl_disabled) X(nccl_gdr) X(traffic_class) \
    /* deepep */ \
    X(mapping_inactive) X(stale_copy) X(other_nvshmem) X(deepep_too_old) X(gpu_arch) X(build_files) \
    X(stack_needs) X(stack_owners) X(import_libraries) X(import_python) X(import_symbols) X(cuda_major) \
    /* limits */ \
    X(memlock) X(shm) \
    X(nofile) X(processes) X(processors) X(ptrace) \
    /* topology */ \
    X(imex) X(visible_devices) X(acs) X(iommu) X(numa_balancing) X(numa_memory) X(affinity) \
    /* job */ \
    X(rendezvous) X(host_name) X(firewall) X(single_ranks) X(environ_sourced) X(install_stuck)
/* clang-format on */

#define DOCTOR_DECLARE(name) extern const struct doctor_check check_##name;
DOCTOR_CHECKS(DOCTOR_DECLARE)
#undef DOCTOR_DECLARE

#endif
