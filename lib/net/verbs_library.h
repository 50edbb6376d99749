/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_library.h - libibverbs, loaded with dlopen() on first use: libepkit must run where it is not installed.
 *
 * What the headers of libibverbs define inline (posting, polling) goes through the context and needs no symbol.
 */
#ifndef EP_NET_VERBS_LIBRARY_H
#define EP_NET_VERBS_LIBRARY_H

#include <epkit/status.h>
#include <infiniband/verbs.h>
#include <sys/types.h>

/* Each is the function of that name with the prefix ibv_. */
struct verbs_library {
    int (*fork_init)(void);
    struct ibv_device **(*get_device_list)(int *ret_n);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
    int (*query_device)(struct ibv_context *context, struct ibv_device_attr *ret_attributes);
    int (*query_port)(struct ibv_context *context, uint8_t port, struct ibv_port_attr *ret_attributes);
    ssize_t (*query_gid_table)(struct ibv_context *context, struct ibv_gid_entry *ret_entries, size_t n, uint32_t flags,
                               size_t entry_bytes);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *memory, size_t bytes, int access);
    /* NULL before rdma-core 34. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t address, int fd,
                                    int access);
    int (*dereg_mr)(struct ibv_mr *mr);
    struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *own, struct ibv_comp_channel *channel,
                                int vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask);
    int (*destroy_qp)(struct ibv_qp *qp);
    const char *(*wc_status_str)(enum ibv_wc_status status);
};

/* Stays loaded until the process ends. EP_E_UNSUPPORTED with the reason. */
ep_status verbs_library_load(const struct verbs_library **ret_library);

#endif
