/* SPDX-License-Identifier: Apache-2.0 */
/* advice_internal.h - what the files that make the advice share. */
#ifndef EP_STACK_ADVICE_INTERNAL_H
#define EP_STACK_ADVICE_INTERNAL_H

#include "software/advice.h"

#define ADVICE_MAX 96

struct advice_work {
    struct root *root;
    const struct topo *topo;
    const struct stack *stack;
    const struct map *map;
    struct advice *advice;
};

/* A new row with this name and reason; beyond ADVICE_MAX the last one is overwritten. */
struct advice_row *advice_add(struct advice_work *work, const char *name, const char *reason);

/* Library paths, what to preload, and Python's path (advice_paths.c). */
ep_status advice_paths(struct advice_work *work);

/*
 * The copy of libnvshmem_host.so.3 that belongs into the program: the one that DeepEP is linked with, else the one that
 * is installed apart from PyTorch's. "" if there is none.
 */
ep_status advice_nvshmem_host(struct root *root, const struct stack *stack, const char **ret_path);

#endif
