/* SPDX-License-Identifier: Apache-2.0 */
/* location.h - the physical location of a node, as the node itself can find it. */
#ifndef EP_LAUNCH_LOCATION_H
#define EP_LAUNCH_LOCATION_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#define LOCATION_BYTES 256
#define LOCATION_SECONDS 10 /* for a command or the metadata server */

/*
 * The location of this machine. `how` is an object:
 *   "method"    "auto", "metadata", "slurm", "kubernetes", "command" or "none"
 *   "command"   shell command of the method "command"; prints the location on one line
 *   "metadata"  HOST[:PORT] of the metadata server; absent: that of Google Compute Engine
 * auto uses the first available method, in the order slurm, kubernetes, metadata; the latter only on Google Compute
 * Engine.
 *
 * True with the location, a word without spaces. False with the reason in ret_why; "" if there was no source.
 */
bool location_find(const json_t *how, char ret_location[LOCATION_BYTES], char *ret_why, size_t bytes);

/* Is the text a valid location: one word of printable ASCII, without characters of markup? */
bool location_is_valid(const char *text);

/*
 * Locations of nodes by name, from a file: lines "HOST LOCATION", or Slurm's topology.conf ("SwitchName=s1
 * Nodes=h[1-4]", "SwitchName=top Switches=s[1-2]"). {"host": "location"}, or NULL after ep_fail().
 */
json_t *location_read_file(const char *file);

#endif
