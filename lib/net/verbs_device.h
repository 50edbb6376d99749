/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_device.h - selects and opens the NIC of a rank: device, port and GID.
 *
 * Candidates are the active ports. An Ethernet port needs a RoCE v2 GID: IPv4 is preferred to IPv6, and link-local
 * addresses come last. InfiniBand ports are addressed by their LID. The candidates, in the order of their names or of
 * $EPKIT_VERBS_DEVICE ("mlx5_0", "mlx5_0:1,mlx5_3"), are assigned to the ranks of a node round-robin. Without that
 * list, a rank with a GPU takes only the ports nearest to it (verbs_near.h).
 *
 *   EPKIT_VERBS_DEVICE          list of ports, by local rank
 *   EPKIT_VERBS_GID_INDEX       index in the port's GID table; -1: chosen as above
 *   EPKIT_VERBS_TRAFFIC_CLASS   0..255 of RoCE packets (DSCP * 4); 0 unless set
 *   EPKIT_VERBS_SERVICE_LEVEL   0..15 of InfiniBand; 0 unless set
 *   EPKIT_VERBS_GPU_MEMORY      0, 1: register GPU memory never, always; by default only near it (verbs_near.h)
 */
#ifndef EP_NET_VERBS_DEVICE_H
#define EP_NET_VERBS_DEVICE_H

#include "base/error.h"

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define VERBS_NAME_BYTES 80

/*
 * libibverbs, loaded with dlopen() on first use: libepkit must run where it is not installed. Each is the function of
 * that name with the prefix ibv_. What its headers define inline (posting, polling) goes through the context.
 */
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

struct verbs_device {
    const struct verbs_library *library;
    struct ibv_context *context; /* NULL: not open */
    struct ibv_device_attr limits;
    char name[VERBS_NAME_BYTES]; /* "mlx5_0:1" */
    uint8_t port;
    bool is_ethernet;
    uint16_t lid; /* of InfiniBand */
    union ibv_gid gid;
    uint8_t gid_index;
    int traffic_class, service_level;
    enum ibv_mtu mtu;
    uint32_t max_message; /* bytes of one operation */
    int gpu_memory;       /* EPKIT_VERBS_GPU_MEMORY; -1: by nearness */
    int nearness;         /* to the rank's GPU; -1: no GPU was named */
};

/* `gpu`: as in struct ep_net_params. EP_E_UNSUPPORTED: no library, no device or no usable port; the error text lists
 * the ports found and the reasons. */
ep_status verbs_device_open(int local_rank, const char *gpu, struct verbs_device *ret_device);
/* Whether the environment allows it; a value that is none is an error of verbs_device_open(). */
bool verbs_uses_gpu_memory(void);
/* The port is known not to be active. */
bool verbs_device_is_down(const struct verbs_device *device);
void verbs_device_close(struct verbs_device *device);

#endif
