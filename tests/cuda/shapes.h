/* SPDX-License-Identifier: Apache-2.0 */
/* shapes.h - the shapes that test_cuda runs: edge cases, then random ones. The same on all ranks unless stated. */
#ifndef EP_TESTS_CUDA_SHAPES_H
#define EP_TESTS_CUDA_SHAPES_H

#include "case.h"
#include "ll_case.h"

/* The calling rank, and limits of size. */
struct shape_of {
    int rank, nranks;
    bool small; /* for tools that are a hundred times slower */
    uint64_t seed;
};

/*
 * Edge cases, numbered from 0. `index` counts all cases, for the seeds of data. `small`: as in struct shape_of; there
 * are fewer cases then.
 */
int shapes_edges(bool small);
void shape_edge(const struct shape_of *of, int index, struct shape *ret_shape);
int ll_shapes_edges(bool small);
void ll_shape_edge(const struct shape_of *of, int index, struct ll_shape *ret_shape);

/* As in the table of edges.c, for any number of ranks. */
#define EDGE_LONE 65536 /* tokens of one rank; the others have a few */
#define EDGE_KEPT 600   /* tokens of the shape that `small` does not reduce */
const struct shape *shape_edge_of_all(int index);

/* Random shapes: each call draws from *random, which must be the same on all ranks. */
void shape_random(const struct shape_of *of, int index, uint64_t *random, struct shape *ret_shape);
void ll_shape_random(const struct shape_of *of, int index, uint64_t *random, struct ll_shape *ret_shape);

/* Describes a shape in words. */
void shape_print(const struct shape *shape, char *ret_text, size_t bytes);
void ll_shape_print(const struct ll_shape *shape, char *ret_text, size_t bytes);

#endif
