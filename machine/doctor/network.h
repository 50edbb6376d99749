/* SPDX-License-Identifier: Apache-2.0 */
/*
 * network.h - which network epkit uses between nodes on this machine, and whether a faster one can be used.
 *
 * The library decides when a group is created: "tcp" between hosts unless the caller names another network, and "verbs"
 * fails there with a reason where it cannot be used. Here is the same from the facts of the machine, before anything
 * runs. The rules are those of lib/net: verbs_library.c (libibverbs), verbs_device.c (devices, ports, addresses, the
 * variables EPKIT_VERBS_*) and verbs_open.c (registered memory). A rule that changes there changes here.
 */
#ifndef EP_DOCTOR_NETWORK_H
#define EP_DOCTOR_NETWORK_H

#include "doctor/doctor.h"

#define NETWORK_PORTS_MAX (TOPO_MAX_NICS * TOPO_MAX_PORTS)

enum network_usable { NETWORK_USABLE, NETWORK_NOT_USABLE, NETWORK_NOT_KNOWN };

/* Strings belong to the root of the machine. */
struct network {
    bool has_tcp;    /* an interface besides the loopback is up, or that is not known */
    const char *tcp; /* where not: why */
    enum network_usable verbs;
    const char *why;                      /* verbs cannot be used, or that is not known: why; else "" */
    int n_ports;                          /* that verbs uses, in its order: dealt to the ranks of the node in turn */
    const char *ports[NETWORK_PORTS_MAX]; /* "mlx5_0:1" */
    const char *text;                     /* all of it in a sentence, without a period */
};

void network_read(const struct doctor_machine *machine, struct network *ret_network);

#endif
