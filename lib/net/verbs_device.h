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

#include "net/verbs_library.h"

#include <stdbool.h>
#include <stdint.h>

#define VERBS_NAME_BYTES 80

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
