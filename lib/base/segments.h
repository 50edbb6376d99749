/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments.h - the segments of shared memory that this process has mapped as their owner: for the ranks of its other
 * threads, which use the same mapping, and for the thread that hands out their descriptors. Any thread.
 */
#ifndef EP_BASE_SEGMENTS_H
#define EP_BASE_SEGMENTS_H

#include "base/shm.h"

#include <stdbool.h>

/* The key of this process in the names of its segments; 0: no memory. */
uint64_t ep_segments_process(void);

/* `adopted`: the mapping is the program's, and stays. */
ep_status ep_segments_add(void *base, size_t mapped, int fd, bool adopted, uint64_t *ret_serial);

/*
 * One more user of the mapping, if it has as many bytes; ep_segments_release() ends it. Returns the bytes that it has;
 * 0: the owner has released it.
 */
size_t ep_segments_borrow(uint64_t serial, uint64_t bytes, struct ep_shm *ret_shm);

/* Of the owner with its descriptor, of others with -1. The last one unmaps. */
void ep_segments_release(uint64_t serial, int fd);

/* A copy of the descriptor; -1: there is none. */
int ep_segments_dup(uint64_t serial);

/*
 * Keeps the addresses of an own segment when it is released: nothing else comes to lie there until
 * ep_segments_free_range(). `base` is where it begins. A forked child keeps the addresses of what its parent held.
 */
void ep_segments_reserve_range(const void *base);
void ep_segments_free_range(const void *base);

#endif
