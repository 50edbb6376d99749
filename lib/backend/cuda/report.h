/* SPDX-License-Identifier: Apache-2.0 */
/* report.h - what kernels report to their host, and what it tells them: report.c, monitor.c. */
#ifndef EP_CUDA_REPORT_H
#define EP_CUDA_REPORT_H

#include "backend/cuda/cuda.h"

/* monitor.c */
ep_status cuda_monitor_start(struct cuda_comm *cuda);
void cuda_monitor_stop(struct cuda_comm *cuda);
/* Makes running and queued kernels end without a result. */
void cuda_stop_kernels(struct cuda_comm *cuda);

/* report.c. Fails the group: two ranks have published different descriptor words (CUDA_DESC_...). */
ep_status cuda_fail_disagree(const struct cuda_comm *cuda, uint32_t word, int rank, uint32_t mine, uint32_t theirs);
/* The failure that a kernel has reported, or EP_OK. Any thread may call it. */
ep_status cuda_check_reported(struct cuda_comm *cuda);
/* Waits until the kernel in `stream` has counted routing number cuda->counted. */
ep_status cuda_wait_counted(struct cuda_comm *cuda, cudaStream_t stream);
void cuda_fill_waits(struct cuda_comm *cuda, enum ep_group_phase ready, enum ep_group_phase done,
                     struct cuda_waits *ret_waits);

/* EP_OK, or the failure that a kernel, this rank or a peer has reported. */
ep_status cuda_check(struct cuda_comm *cuda);

#endif
