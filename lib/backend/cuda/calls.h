/* SPDX-License-Identifier: Apache-2.0 */
/* calls.h - the calls on plans and on objects of low latency. */
#ifndef EP_CUDA_CALLS_H
#define EP_CUDA_CALLS_H

#include "backend/cuda/cuda.h"

/* dispatch.c, combine.c */
ep_status cuda_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
ep_status cuda_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream);

/* ll_open.c */
ep_status cuda_ll_open(ep_ll *ll);
void cuda_ll_close(ep_ll *ll);
int64_t cuda_ll_bytes(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes);
/* Multiprocessors of a low-latency call: all, divided among the ranks that are threads on the same device. */
int cuda_ll_sms(const struct cuda_comm *cuda);

/* lowlatency.c */
ep_status cuda_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream);
ep_status cuda_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
ep_status cuda_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream);
ep_status cuda_ll_control(ep_ll *ll, const struct ep_ll_control *control, ep_stream stream);
ep_status cuda_ll_combine_buffer(ep_ll *ll, void **ret_buffer);
ep_status cuda_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

#endif
