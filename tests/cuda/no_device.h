/* SPDX-License-Identifier: Apache-2.0 */
/* no_device.h - pinned memory without a GPU. */
#ifndef NO_DEVICE_H
#define NO_DEVICE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

/* Bytes that were registered since the program began. */
extern size_t no_device_registered;

/* Is all of it registered now? Ranges are known up to some thousands. */
bool no_device_has(const void *memory, size_t bytes);

#endif
