/* SPDX-License-Identifier: Apache-2.0 */
/* loopback.h - names and addresses of the loopback. */
#ifndef EP_COMMON_LOOPBACK_H
#define EP_COMMON_LOOPBACK_H

#include <stdbool.h>

/* Does `name` lead each host to itself? Only names and addresses that say so: "localhost", "127.0.0.1", "::1". */
bool address_is_loopback(const char *name);

#endif
