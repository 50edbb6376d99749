/* SPDX-License-Identifier: Apache-2.0 */
/* advice_internal.h - shared by the files that create the advice. */
#ifndef EP_SOFTWARE_ADVICE_INTERNAL_H
#define EP_SOFTWARE_ADVICE_INTERNAL_H

#include "advice.h"

#define ADVICE_MAX 96

struct advice_work {
    struct source *source;
    const struct topo *topo;
    const struct software *software;
    const struct map *map;
    const struct map *ibgda; /* for NVSHMEM and DeepEP */
    struct advice *advice;
};

/* Adds a row with this name and reason. Beyond ADVICE_MAX the last row is overwritten. */
struct advice_row *advice_add(struct advice_work *work, const char *name, const char *reason);

/* The copy of deep_ep to import: the one that Python imports, otherwise the first installed one. -1: none. */
int advice_deepep_copy(const struct software_deepep *deepep);

/* LD_LIBRARY_PATH, LD_PRELOAD and PYTHONPATH (advice_paths.c). */
ep_status advice_paths(struct advice_work *work);

#endif
