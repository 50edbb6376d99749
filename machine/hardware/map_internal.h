/* SPDX-License-Identifier: Apache-2.0 */
/* map_internal.h - shared by the files map*.c. */
#ifndef EP_TOPO_MAP_INTERNAL_H
#define EP_TOPO_MAP_INTERNAL_H

#include "map.h"

/* Active ports of NICs with role DATA, in the order of (NIC, port). The result is their number. */
int map_data_ports(const struct topo *topo, struct map_port ret_ports[TOPO_MAX_NICS * TOPO_MAX_PORTS]);

/* An assignment in which no GPU has a NIC. */
ep_status map_new(const struct topo *topo, struct map **ret_map);

/* Computes paths, sharers, idle NICs and sums from the NICs and ports of the choices. */
void map_finish(const struct topo *topo, struct map *map);

/* Sets the reason of a choice. printf-like. */
void map_explain(struct map_choice *choice, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Sets the reasons of map_best(); after map_finish(). */
void map_explain_best(const struct topo *topo, struct map *map, const struct map_port *ports, int n_ports);

#endif
