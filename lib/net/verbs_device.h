/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_device.h - the NIC of a rank: which device, port and address (GID), opened.
 *
 * Candidates are the active ports. An Ethernet port has to have an address for RoCE v2: one of IPv4 is taken before one
 * of IPv6, and a link-local one last. InfiniBand ports are addressed by their LID. The candidates, in the order of
 * their names or as $EPKIT_VERBS_DEVICE lists them ("mlx5_0", "mlx5_0:1,mlx5_3"), are dealt to the ranks of a node in
 * turn.
 *
 *   EPKIT_VERBS_DEVICE          which ports, by local rank
 *   EPKIT_VERBS_GID_INDEX       the address, by its index in the port's table; -1: as above
 *   EPKIT_VERBS_TRAFFIC_CLASS   0..255 of RoCE packets (DSCP * 4); 0 unless set
 *   EPKIT_VERBS_SERVICE_LEVEL   0..15 of InfiniBand; 0 unless set
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
    uint8_t gid_index, traffic_class, service_level;
    enum ibv_mtu mtu;
    uint32_t max_message; /* bytes of one operation */
};

/* EP_E_UNSUPPORTED: no library, no device, no port that can be used; says which were seen and why not. */
ep_status verbs_device_open(int local_rank, struct verbs_device *ret_device);
void verbs_device_close(struct verbs_device *device);

#endif
