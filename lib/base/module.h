/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.h - libraries of epkit that are loaded on demand: backends, and the MPI baseline of the benchmark.
 *
 * A module exports a constant table that begins with `uint32_t abi`. Module, libepkit and command must be of one build,
 * so the number must match exactly.
 */
#ifndef EP_BASE_MODULE_H
#define EP_BASE_MODULE_H

#include "base/error.h"

#include <stdint.h>

/*
 * Loads `file` (a name without a directory, with or without the version after ".so") and returns its table `symbol`.
 * Searched in this order: a library that the program has already loaded, by its soname; the file next to libepkit,
 * which is of the same build: if it exists and does not load, the call fails, because a fallback would hide the reason;
 * the search path of the loader. `scope`: RTLD_LOCAL or RTLD_GLOBAL.
 *
 * EP_E_UNSUPPORTED with the reason on failure. A loaded module stays loaded until the process ends, because its table
 * and its threads may be in use at any time.
 */
EP_PRIVATE_API ep_status ep_module_load(const char *file, int scope, const char *symbol, uint32_t abi,
                                        const void **ret_table);

#endif
