/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.h - our own libraries that are loaded on demand: backends, MPI.
 *
 * A module exports a constant table that begins with `uint32_t abi`. Module, libepkit and command come from one build,
 * so the number must match exactly.
 */
#ifndef EP_BASE_MODULE_H
#define EP_BASE_MODULE_H

#include "base/error.h"

#include <stdint.h>

/*
 * Loads `file` (a name without folder, with or without the number behind ".so") and gives its table `symbol`. If the
 * program has it already, by its soname, then that one. A file next to libepkit is the one of our build, so if it is
 * there it is that or none: falling back to another would hide why ours does not load. Else the loader looks where it
 * always does. `scope`: RTLD_LOCAL or RTLD_GLOBAL.
 *
 * EP_E_UNSUPPORTED with the reason. A module that is good stays loaded until the process ends: its table and its
 * threads may be in use at any time.
 */
EP_PRIVATE_API ep_status ep_module_load(const char *file, int scope, const char *symbol, uint32_t abi,
                                        const void **ret_table);

#endif
