/* SPDX-License-Identifier: Apache-2.0 */
/*
 * args.h - loads argument structs from the caller and stores info structs to it. They begin with their size and grow at
 * the end, so the caller's may be shorter or longer than ours.
 */
#ifndef EP_BASE_ARGS_H
#define EP_BASE_ARGS_H

#include "base/error.h"

#include <stddef.h>

/*
 * Copies the caller's struct into a zeroed struct of this library's size. A larger struct is accepted if the unknown
 * tail is zero. EP_E_ABI otherwise, or if the struct is shorter than in the first release. `what` is the prefix of the
 * error text.
 */
EP_PRIVATE_API ep_status ep_args_load(void *ret_args, size_t our_bytes, size_t first_bytes, const void *args,
                                      const char *what);

/* The reverse: fills the caller's struct as far as it has room, and zeroes its unknown tail. Its .size does not change.
 */
ep_status ep_args_store(void *ret_args, const void *ours, size_t our_bytes, size_t first_bytes, const char *what);

/* The last field of each struct in the first release: callers built against it have at least these bytes. */
#define EP_ARGS_FIRST_BYTES(type) (EP_ARGS_END(type, EP_ARGS_LAST_##type))
#define EP_ARGS_END(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))
#define EP_ARGS_LAST_ep_boot reserved
#define EP_ARGS_LAST_ep_boot_tcp_args ranks_per_node
#define EP_ARGS_LAST_ep_comm_config slot
#define EP_ARGS_LAST_ep_comm_info reserved
#define EP_ARGS_LAST_ep_stats ns_total
#define EP_ARGS_LAST_ep_plan_args stream
#define EP_ARGS_LAST_ep_plan_info n_dropped
#define EP_ARGS_LAST_ep_layout token_in_rank
#define EP_ARGS_LAST_ep_dispatch_args global_scale
#define EP_ARGS_LAST_ep_combine_args reserved
#define EP_ARGS_LAST_ep_ll_config reserved
#define EP_ARGS_LAST_ep_ll_sizes combine_bytes
#define EP_ARGS_LAST_ep_ll_dispatch_args global_scale
#define EP_ARGS_LAST_ep_ll_combine_args reserved
#define EP_ARGS_LAST_ep_plan_update_args reserved
#define EP_ARGS_LAST_ep_plan_metadata reserved

#endif
