/* SPDX-License-Identifier: Apache-2.0 */
/* figures.h - figures to compare with: cmd/parse/reference.json, which is compiled in, and files that extend it. */
#ifndef EP_PARSE_FIGURES_H
#define EP_PARSE_FIGURES_H

#include "model.h"

#include <stddef.h>
#include <stdio.h>

/* Lower and upper bound of a published figure; both 0: not published. */
struct reference_range {
    double low, high;
};

struct reference_figure {
    char hardware[MODEL_NAME], dialect[32], op[40], type[16];
    int nodes;
    int ranks;     /* 0: any */
    double tokens; /* 0: any */
    double bytes;  /* of nccl-tests: the figure is for tables with messages of at least this size */
    struct reference_range rdma, nvl, busbw, time_us;
    char source[160];
};

struct reference_hardware {
    struct model_hardware public;
    char match[8][MODEL_NAME]; /* words of product names of its GPUs */
    size_t n_match;
};

struct reference {
    struct reference_hardware *hardware;
    size_t n_hardware;
    struct reference_figure *figures;
    size_t n_figures;
};

/* The built-in figures. reference_free() accepts NULL. */
struct reference *reference_new(void);
void reference_free(struct reference *reference);

/*
 * Adds a file. A hardware entry with a known name, or a figure with the same hardware, dialect, nodes, ranks, tokens,
 * operation and type, replaces the existing one. false: ret_error has the reason and the location in the file; what
 * precedes it may have been added.
 */
bool reference_add(struct reference *reference, FILE *stream, char *ret_error, size_t bytes);

/* By name, or by the product name of a GPU ("NVIDIA B200"). NULL: not known. */
const struct model_hardware *reference_find_hardware(const struct reference *reference, const char *name);

/*
 * The best match for a run: hardware, dialect, operation, type and number of nodes must match, and ranks if the figure
 * has them. Of several matches, the one with the nearest number of tokens. NULL: none. tokens <= 0: not known.
 */
const struct reference_figure *reference_find(const struct reference *reference, const char *hardware,
                                              const char *dialect, const char *op, const char *type, int nodes,
                                              int ranks, double tokens);

#endif
