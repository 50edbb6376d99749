/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks.h - the list of checks: by group, in the order in which they run and are shown.
 *
 * A check is `const struct doctor_check check_<id>`, with '_' for '-', in checks_<group>.c; a row here makes it known.
 * A fault is one check's own. Where two could see it, the one that is nearer to the cause reports it, and the other
 * one holds its tongue.
 */
#ifndef EP_DOCTOR_CHECKS_H
#define EP_DOCTOR_CHECKS_H

#include "doctor/doctor.h"

/* clang-format off */
#define DOCTOR_CHECKS(X) \
    /* driver */ \
    X(peermem) X(driver_option) X(doca_kernel) X(driver_skew) X(iommu_gb200) X(gpu_errors) X(nvlink) \
    /* nic */ \
    X(slow_link) X(gid) X(port_down) X(link_layer) X(nic_access) \
    /* verbs */ \
    /* nvshmem */ \
    /* nccl */ \
    /* deepep */ \
    /* limits */ \
    X(memlock) X(shm) \
    /* topology */ \
    X(imex) X(visible_devices) X(acs) X(iommu) X(affinity)
/* clang-format on */

#define DOCTOR_DECLARE(name) extern const struct doctor_check check_##name;
DOCTOR_CHECKS(DOCTOR_DECLARE)
#undef DOCTOR_DECLARE

#endif
