/* SPDX-License-Identifier: Apache-2.0 */
/*
 * triangulate.h - finds the node that makes a run slow.
 *
 * A group is as slow as its slowest node, so measuring groups identifies slow nodes: by pairs for few nodes, because
 * all pairs can be measured concurrently, and by halves of the suspects for many. docs/model.md, "Finding a slow node",
 * has the numbers of runs. The caller measures; this module decides what to measure next:
 *
 *     while (triangulate_next(t, &round))
 *         for (each group of round)
 *             triangulate_result(t, i, ratio);
 *
 * The groups of one round share no node and may be measured at the same time.
 */
#ifndef EP_TRIANGULATE_TRIANGULATE_H
#define EP_TRIANGULATE_TRIANGULATE_H

#include <stdbool.h>

enum triangulate_strategy { TRIANGULATE_AUTO, TRIANGULATE_PAIRS, TRIANGULATE_HALVES };

struct triangulate_options {
    enum triangulate_strategy strategy;
    int max_runs;  /* groups measured at most */
    double cut;    /* a group below this share of its expected figure is slow; 0: halfway between `full` and 1 */
    double full;   /* the share that all nodes together reached; 0: not known */
    double margin; /* a result this close to the cut is measured again */
};

struct triangulate_round {
    int n_groups;
    int *const *groups; /* numbers of nodes, from 0 */
    const int *sizes;
    const char *why;
};

enum triangulate_end {
    TRIANGULATE_OPEN,   /* not finished */
    TRIANGULATE_FOUND,  /* the nodes in `slow` */
    TRIANGULATE_EITHER, /* one of the nodes in `slow`; no other node could be paired with them */
    TRIANGULATE_SPREAD, /* no single node: only groups such as `slow` as a whole are slow */
    TRIANGULATE_NONE,   /* nothing is slow */
    TRIANGULATE_BUDGET  /* max_runs was not enough; `slow` has the suspects */
};

struct triangulate;

/* NULL: fewer than two nodes, or out of memory. triangulate_free() accepts NULL. */
struct triangulate *triangulate_new(int n_nodes, const struct triangulate_options *options);
void triangulate_free(struct triangulate *triangulate);

/* What to measure next; valid until the next call. false: finished. */
bool triangulate_next(struct triangulate *triangulate, struct triangulate_round *ret_round);

/* The share of its expected figure that group `group` of the round reached; NAN: it failed, which counts as slow. */
void triangulate_result(struct triangulate *triangulate, int group, double ratio);

enum triangulate_end triangulate_end(const struct triangulate *triangulate, const int **ret_slow, int *ret_n);

/* Groups measured so far. */
int triangulate_runs(const struct triangulate *triangulate);

/* The maximum number of runs for one slow node among n, and the minimum of any method: log2(n), rounded up. */
int triangulate_worst_case(int n_nodes, enum triangulate_strategy strategy);
int triangulate_least(int n_nodes);

/* The strategy that TRIANGULATE_AUTO selects. */
enum triangulate_strategy triangulate_choose(int n_nodes, const struct triangulate_options *options);

/*
 * Evaluates groups that have been measured already: finds nodes of slow groups that are in no fast group. is_slow[i] is
 * for group groups[i] of sizes[i] nodes. Returns the number of nodes written to ret_suspects (room for n_nodes).
 * *ret_is_proof: each slow group contains exactly one of them, so nothing else explains the result.
 */
int triangulate_deduce(int n_nodes, int n_groups, int *const *groups, const int *sizes, const bool *is_slow,
                       int *ret_suspects, bool *ret_is_proof);

#endif
