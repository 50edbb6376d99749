/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments.h - registry of the shared memory segments that this process owns, for the ranks of its other threads, which
 * use the same mapping. Any thread.
 */
#ifndef EP_BASE_SEGMENTS_H
#define EP_BASE_SEGMENTS_H

#include "base/shm.h"

ep_status ep_segments_add(void *base, size_t mapped, uint64_t *ret_serial);

/*
 * Takes a reference to the mapping, if it has at least `bytes`; ep_segments_release() drops it. Returns the size of the
 * mapping; 0: the owner has released it.
 */
size_t ep_segments_borrow(uint64_t serial, uint64_t bytes, struct ep_shm *ret_shm);

/* The last release unmaps the segment. */
void ep_segments_release(uint64_t serial);

#endif
