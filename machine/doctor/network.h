/* SPDX-License-Identifier: Apache-2.0 */
/*
 * network.h - which network epkit uses between nodes on this machine, and whether a faster one can be used.
 *
 * The library decides this when a group is created: between hosts it uses "tcp" unless the caller names another
 * network, and "verbs" fails with a reason if it cannot be used. The functions here predict that from the facts of the
 * machine, before anything runs. The rules are those of lib/net: verbs_device.c (libibverbs, devices, ports, addresses,
 * the variables EPKIT_VERBS_*) and verbs_open.c (registered memory). Keep them in step.
 */
#ifndef EP_DOCTOR_NETWORK_H
#define EP_DOCTOR_NETWORK_H

#include "doctor.h"

#define NETWORK_PORTS_MAX (TOPO_MAX_NICS * TOPO_MAX_PORTS)

enum network_usable { NETWORK_USABLE, NETWORK_NOT_USABLE, NETWORK_NOT_KNOWN };

/* Strings belong to the source of the machine. */
struct network {
    const char *used; /* "tcp", or what EPKIT_NETWORK says; NULL: that cannot be used */
    enum network_usable verbs;
    const char *why; /* why verbs cannot be used, or why that is not known; otherwise "" */
    int n_ports;     /* ports that verbs uses, in its order; the ranks of the node take them in turn */
    const char *ports[NETWORK_PORTS_MAX]; /* "mlx5_0:1" */
    const char *text;                     /* summary in a sentence, without a period */
};

void network_read(const struct doctor_machine *machine, struct network *ret_network);

#endif
