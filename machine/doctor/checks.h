/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks.h - the list of checks, by group, in the order in which they run and are shown.
 *
 * A check is a row here, X(name, group, what it needs), with a function run_<name>() in the checks_*.c of its subject;
 * S() is one that stacks_run() makes. Its texts are those of its row in docs/failure-modes.md, whose last cell is the
 * name with '-' for '_'. Each fault is reported by exactly one check. If two checks could detect it, the one closer to
 * the cause reports it, and the other one does not.
 */
#ifndef EP_DOCTOR_CHECKS_H
#define EP_DOCTOR_CHECKS_H

#include "common/json.h"
#include "common/text.h"
#include "doctor.h"
#include "fixes.h"
#include "machine/software/libs.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* clang-format off */
#define DOCTOR_CHECKS(X, S) \
    X(peermem, driver, NEEDS_DRIVER | NEEDS_DATA_NICS) \
    X(driver_option, driver, NEEDS_DRIVER) \
    X(doca_kernel, driver, 0) \
    X(driver_skew, driver, NEEDS_GPUS) \
    X(iommu_gb200, driver, NEEDS_GPUS) \
    X(gpu_errors, driver, NEEDS_DRIVER) \
    X(nvlink, driver, NEEDS_NVML) \
    X(gpu_access, driver, 0) \
    X(open_driver, driver, 0) \
    X(libcuda, driver, NEEDS_DRIVER | NEEDS_ENVIRONMENT) \
    X(inventory, driver, 0) \
    X(mig, driver, NEEDS_NVML) \
    X(clocks, driver, NEEDS_NVML) \
    X(confidential, driver, NEEDS_DRIVER) \
    X(uvm, driver, NEEDS_DRIVER) \
    X(fabric_manager, driver, NEEDS_NVML) \
    X(sxid, driver, NEEDS_DRIVER) \
    X(slow_link, nic, 0) \
    X(gid, nic, NEEDS_DATA_NICS) \
    X(port_down, nic, NEEDS_GPUS) \
    X(link_layer, nic, NEEDS_GPUS | NEEDS_DATA_NICS) \
    X(nic_access, nic, NEEDS_DATA_NICS) \
    X(rdma_device, nic, NEEDS_GPUS) \
    X(pci_uplink, nic, NEEDS_GPUS) \
    X(link_errors, nic, NEEDS_DATA_NICS) \
    X(roce_loss, nic, NEEDS_DATA_NICS) \
    X(rails_subnet, nic, NEEDS_GPUS) \
    X(mtu, nic, NEEDS_DATA_NICS) \
    X(firmware, nic, NEEDS_DATA_NICS) \
    X(bond, nic, 0) \
    X(provider_missing, verbs, 0) \
    X(verbs_abi, verbs, NEEDS_DATA_NICS) \
    X(verbs_mixed, verbs, 0) \
    X(rdmav_drivers, verbs, 0) \
    X(verbs_from_gib, verbs, 0) \
    X(one_nic, nvshmem, 0) \
    X(shared_nic, nvshmem, 0) \
    X(nic_handler, nvshmem, 0) \
    X(two_nvshmem, nvshmem, 0) \
    X(ibgda_transport, nvshmem, 0) \
    X(gdrcopy, nvshmem, 0) \
    X(home, nvshmem, 0) \
    X(hca_prefix, nvshmem, 0) \
    X(void_variables, nvshmem, 0) \
    X(ibgda_nic, nvshmem, NEEDS_GPUS | NEEDS_DATA_NICS | NEEDS_ENVIRONMENT) \
    X(hca_lists, nvshmem, NEEDS_DATA_NICS | NEEDS_ENVIRONMENT) \
    X(dmabuf_off, nvshmem, NEEDS_DRIVER | NEEDS_DATA_NICS | NEEDS_ENVIRONMENT) \
    X(heap_size, nvshmem, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(net_plugin, nccl, 0) \
    X(efa_version, nccl, NEEDS_GPUS) \
    X(gib_settings, nccl, 0) \
    X(two_nccl, nccl, 0) \
    X(nccl_hca, nccl, NEEDS_GPUS | NEEDS_DATA_NICS | NEEDS_ENVIRONMENT) \
    X(socket_interface, nccl, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(fastrak_interfaces, nccl, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(topology_file, nccl, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(nccl_disabled, nccl, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(nccl_gdr, nccl, NEEDS_GPUS | NEEDS_DATA_NICS | NEEDS_ENVIRONMENT) \
    X(traffic_class, nccl, NEEDS_DATA_NICS | NEEDS_ENVIRONMENT) \
    X(mapping_inactive, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(stale_copy, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(other_nvshmem, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(deepep_too_old, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(gpu_arch, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(build_files, deepep, NEEDS_GPUS | NEEDS_DATA_NICS) \
    S(stack_needs, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    S(stack_owners, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    S(import_libraries, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    S(import_python, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    S(import_symbols, deepep, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(cuda_major, deepep, NEEDS_DRIVER | NEEDS_ENVIRONMENT) \
    X(memlock, limits, NEEDS_GPUS | NEEDS_DATA_NICS) \
    X(shm, limits, NEEDS_GPUS) \
    X(nofile, limits, NEEDS_GPUS) \
    X(processes, limits, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(processors, limits, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(ptrace, limits, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(imex, topology, NEEDS_DRIVER) \
    X(visible_devices, topology, NEEDS_GPUS) \
    X(acs, topology, NEEDS_GPUS) \
    X(iommu, topology, NEEDS_GPUS) \
    X(numa_balancing, topology, NEEDS_GPUS) \
    X(numa_memory, topology, NEEDS_GPUS) \
    X(affinity, topology, NEEDS_GPUS) \
    X(rendezvous, job, NEEDS_ENVIRONMENT) \
    X(host_name, job, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(firewall, job, NEEDS_GPUS | NEEDS_ENVIRONMENT) \
    X(single_ranks, job, NEEDS_ENVIRONMENT) \
    X(environ_sourced, job, NEEDS_GPUS) \
    X(install_stuck, job, 0)
/* clang-format on */

#define DOCTOR_DECLARE(name, group, needs)                                                                             \
    extern const struct doctor_check check_##name;                                                                     \
    void run_##name(const struct doctor_machine *machine, struct doctor_result *result);
#define DOCTOR_DECLARE_STACK(name, group, needs) extern const struct doctor_check check_##name;
DOCTOR_CHECKS(DOCTOR_DECLARE, DOCTOR_DECLARE_STACK)
#undef DOCTOR_DECLARE
#undef DOCTOR_DECLARE_STACK

#endif
