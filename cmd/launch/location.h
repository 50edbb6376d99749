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
 * location.sh has the methods; auto uses the first available one.
 *
 * True with the location, a word without spaces. False with the reason in ret_why; "" if there was no source.
 */
bool location_find(const json_t *how, char ret_location[LOCATION_BYTES], char *ret_why, size_t bytes);

/* Is the text a valid location: one word of printable ASCII, without characters of markup? */
bool location_is_valid(const char *text);

#endif
