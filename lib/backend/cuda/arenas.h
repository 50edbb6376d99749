/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arenas.h - pinned memory in which the chunks of an operation between nodes lie until they have left: two, which
 * operations use in turn. Kernels and graphs keep the addresses that they were given, so what is outgrown stays until
 * the communicator ends. The caller's thread alone.
 */
#ifndef EP_CUDA_ARENAS_H
#define EP_CUDA_ARENAS_H

#include "backend/cuda/pinned.h"

/* Zeroed, with `kept`: empty, and without a limit. */
struct cuda_arenas {
    struct cuda_net_memory *memory;
    struct cuda_pinned of[2]; /* for even and odd numbers of operations */
    size_t held;              /* bytes of all that there are, those that were outgrown among them */
    size_t needed;            /* the most that an operation has asked for */
    size_t limit;             /* of `held`; 0: none */
};

/*
 * Each arena has `bytes`, with room for operations that grow little by little: so all together are no more than five
 * times the largest need. EP_E_MEMORY beyond the limit: nothing has changed. On another failure one of the two may be
 * larger than before.
 */
ep_status cuda_arenas_grow(struct cuda_arenas *arenas, const char *call, size_t bytes);
/* The same without more room than that. */
ep_status cuda_arenas_reserve(struct cuda_arenas *arenas, const char *call, size_t bytes);

#endif
