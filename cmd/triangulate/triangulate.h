/* SPDX-License-Identifier: Apache-2.0 */
/*
 * triangulate.h - finds the nodes that make a run slow, from groups of nodes that are slow or are not.
 *
 * A group is as slow as its slowest node, so a node of a slow group that is in no other slow one and in no fast one is
 * suspect. docs/model.md, "Finding a slow node", has the numbers of runs. The caller measures; this module decides what
 * to measure next:
 *
 *     for (size_t i = 0; triangulate_next(&t);)
 *         for (; i < t.n_groups; i++)
 *             t.groups[i].is_slow = ...;
 *
 * The groups of one round share no node and may be measured at the same time.
 */
#ifndef EP_TRIANGULATE_TRIANGULATE_H
#define EP_TRIANGULATE_TRIANGULATE_H

#include <stdbool.h>
#include <stddef.h>

struct triangulate_group {
    int *nodes, n; /* numbers of nodes, from 0 */
    bool is_slow;
};

struct triangulate {
    int n_nodes;
    size_t n_groups;
    struct triangulate_group *groups;
    const char *why; /* why the groups of this round are measured */
};

enum triangulate_end {
    TRIANGULATE_NONE,   /* nothing is slow */
    TRIANGULATE_FOUND,  /* the suspects: nothing else explains the slow groups */
    TRIANGULATE_EITHER, /* at least one of the suspects */
    TRIANGULATE_SPREAD  /* no single node: each node of a slow group is in a fast one as well */
};

/* Adds a group. */
void triangulate_add(struct triangulate *t, const int *nodes, int n, bool is_slow);

/*
 * Adds the groups to measure next: first all pairs; then the nodes of slow pairs, each with one of a fast pair; or all
 * nodes together, if no pair is slow. false: finished.
 */
bool triangulate_next(struct triangulate *t);

/* What the groups tell. is_suspect has room for n_nodes. */
enum triangulate_end triangulate_judge(const struct triangulate *t, bool *ret_is_suspect);

/* The number of runs for one slow node among `n`. */
int triangulate_runs(int n_nodes);

void triangulate_done(struct triangulate *t);

#endif
