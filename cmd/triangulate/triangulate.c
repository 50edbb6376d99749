/* SPDX-License-Identifier: Apache-2.0 */
/*
 * triangulate.c - finds slow nodes by pairs, then by halves.
 *
 * Pairs: measures all pairs at once, then each member of a slow pair again with a node of a fast pair. If no pair is
 * slow, the fault depends on the number of nodes, and halves search for the smallest slow group.
 *
 * Halves: splits the slow half of the suspects again. A half of one node gets a partner from outside. Then all other
 * nodes run together, which shows whether there is another slow node. A node found only by elimination is confirmed
 * with a partner that is known to be fast.
 */
#include "triangulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AUTO_PAIRS 16 /* nodes up to which pairs are measured first */
#define DEFAULT_CUT 0.85

enum phase { PHASE_PAIRS, PHASE_CROSS, PHASE_SPREAD, PHASE_HALVES, PHASE_VERIFY, PHASE_CONFIRM, PHASE_END };

enum mark { MARK_UNKNOWN, MARK_FAST, MARK_SLOW, MARK_SLOW_UNSURE };

struct triangulate {
    struct triangulate_options options;
    int n;
    enum phase phase;
    enum triangulate_end end;
    unsigned char *marks; /* enum mark of each node */
    int *suspects, n_suspects;
    int **groups, *sizes, n_groups; /* of the round */
    int *members;                   /* of all groups, n + 1 */
    double *ratios;                 /* of the round; -1: not measured */
    unsigned char *repeated;
    int half;         /* how many of the group's members are suspects */
    bool second_half; /* spread: the first half was fast */
    int *slow, n_slow;
    int runs;
    double cut;
};

int triangulate_least(int n_nodes)
{
    int least = 0;

    while ((1 << least) < n_nodes)
        least++;
    return least;
}

enum triangulate_strategy triangulate_choose(int n_nodes, const struct triangulate_options *options)
{
    if (options->strategy != TRIANGULATE_AUTO)
        return options->strategy;
    return n_nodes <= AUTO_PAIRS && n_nodes / 2 + 3 <= options->max_runs ? TRIANGULATE_PAIRS : TRIANGULATE_HALVES;
}

/* Pairs: each pair, then two runs with a partner. Halves: one run per halving, all other nodes, a confirmation. */
int triangulate_worst_case(int n_nodes, enum triangulate_strategy strategy)
{
    return strategy == TRIANGULATE_PAIRS ? n_nodes / 2 + 2 : triangulate_least(n_nodes) + 2;
}

struct triangulate *triangulate_new(int n_nodes, const struct triangulate_options *options)
{
    struct triangulate *t = n_nodes >= 2 ? calloc(1, sizeof(*t)) : NULL;
    size_t n = n_nodes >= 2 ? (size_t)n_nodes : 0;

    if (!t)
        return NULL;
    t->options = *options;
    t->n = n_nodes;
    t->marks = calloc(n, 1);
    t->suspects = calloc(n, sizeof(int));
    t->slow = calloc(n, sizeof(int));
    t->groups = calloc(n, sizeof(int *));
    t->sizes = calloc(n, sizeof(int));
    t->members = calloc(n + 1, sizeof(int));
    t->ratios = calloc(n, sizeof(double));
    t->repeated = calloc(n, 1);
    if (!t->marks || !t->suspects || !t->slow || !t->groups || !t->sizes || !t->members || !t->ratios || !t->repeated) {
        triangulate_free(t);
        return NULL;
    }
    t->cut = options->cut > 0                         ? options->cut
             : options->full > 0 && options->full < 1 ? (1 + options->full) / 2
                                                      : DEFAULT_CUT;
    t->phase = triangulate_choose(n_nodes, options) == TRIANGULATE_PAIRS ? PHASE_PAIRS : PHASE_HALVES;
    for (int i = 0; i < n_nodes; i++)
        t->suspects[i] = i;
    t->n_suspects = n_nodes;
    return t;
}

void triangulate_free(struct triangulate *t)
{
    if (!t)
        return;
    free(t->marks);
    free(t->suspects);
    free(t->slow);
    free(t->groups);
    free(t->sizes);
    free(t->members);
    free(t->ratios);
    free(t->repeated);
    free(t);
}

/* --- the next round --- */

static void add_group(struct triangulate *t, const int *nodes, int n)
{
    int *at = t->n_groups ? t->groups[t->n_groups - 1] + t->sizes[t->n_groups - 1] : t->members;

    memcpy(at, nodes, (size_t)n * sizeof(int));
    t->groups[t->n_groups] = at;
    t->sizes[t->n_groups] = n;
    t->ratios[t->n_groups] = -1;
    t->repeated[t->n_groups++] = 0;
}

static void finish(struct triangulate *t, enum triangulate_end end)
{
    t->phase = PHASE_END;
    t->end = end;
    if (end == TRIANGULATE_FOUND)
        return;
    t->n_slow = 0;
    if (end != TRIANGULATE_NONE)
        for (int i = 0; i < t->n_suspects; i++)
            t->slow[t->n_slow++] = t->suspects[i];
}

static bool is_suspect(const struct triangulate *t, int node)
{
    for (int i = 0; i < t->n_suspects; i++)
        if (t->suspects[i] == node)
            return true;
    return false;
}

/* A node outside of the suspects: one known to be fast, else an untested one; -1: none. */
static int find_partner(const struct triangulate *t)
{
    int unknown = -1;

    for (int i = 0; i < t->n; i++) {
        if (is_suspect(t, i))
            continue;
        if (t->marks[i] == MARK_FAST)
            return i;
        if (t->marks[i] == MARK_UNKNOWN)
            unknown = i;
    }
    return unknown;
}

static const char *round_pairs(struct triangulate *t)
{
    int nodes[3];

    for (int i = 0; i + 1 < t->n; i += 2) {
        int size = t->n - i == 3 ? 3 : 2;

        for (int j = 0; j < size; j++)
            nodes[j] = i + j;
        add_group(t, nodes, size);
        if (size == 3)
            break;
    }
    return "all pairs";
}

static const char *round_one(struct triangulate *t, int node, const char *why)
{
    int partner = find_partner(t), nodes[2] = {node, partner};

    if (partner < 0) {
        finish(t, t->n_suspects <= 2 ? TRIANGULATE_EITHER : TRIANGULATE_SPREAD);
        return NULL;
    }
    add_group(t, nodes, 2);
    t->half = 1;
    return why;
}

static const char *round_cross(struct triangulate *t)
{
    return round_one(t, t->suspects[0], "a node of a slow pair, with a node of a fast one");
}

static const char *round_halves(struct triangulate *t)
{
    t->half = (t->n_suspects + 1) / 2;
    if (t->n_suspects == 1) { /* by elimination */
        t->marks[t->suspects[0]] = MARK_SLOW_UNSURE;
        t->slow[t->n_slow++] = t->suspects[0];
        t->phase = PHASE_VERIFY;
        return NULL;
    }
    if (t->half == 1)
        return round_one(t, t->suspects[0], "one of two suspects, with a partner");
    add_group(t, t->suspects, t->half);
    return "half of the suspects";
}

static const char *round_spread(struct triangulate *t)
{
    int half = (t->n_suspects + 1) / 2;

    if (t->n_suspects <= 3) {
        finish(t, TRIANGULATE_SPREAD);
        return NULL;
    }
    if (t->second_half)
        add_group(t, t->suspects + half, t->n_suspects - half);
    else
        add_group(t, t->suspects, half);
    return "half of a group that is slow although none of its pairs is";
}

/* All nodes except those that were found. */
static const char *round_verify(struct triangulate *t)
{
    int *rest = calloc((size_t)t->n, sizeof(int)), n = 0;

    for (int i = 0; rest && i < t->n; i++)
        if (t->marks[i] == MARK_UNKNOWN || t->marks[i] == MARK_FAST)
            rest[n++] = i;
    if (n >= 2)
        add_group(t, rest, n);
    free(rest);
    if (n < 2) {
        t->phase = PHASE_CONFIRM;
        return NULL;
    }
    return "all nodes but those that were found";
}

static const char *round_confirm(struct triangulate *t)
{
    for (int i = 0; i < t->n_slow; i++) {
        if (t->marks[t->slow[i]] != MARK_SLOW_UNSURE)
            continue;
        t->suspects[0] = t->slow[i];
        t->n_suspects = 1;
        if (find_partner(t) < 0 || t->marks[find_partner(t)] != MARK_FAST)
            break;
        return round_one(t, t->slow[i], "a node found by elimination, with a fast partner");
    }
    finish(t, TRIANGULATE_FOUND);
    return NULL;
}

/* --- evaluation of results --- */

static bool is_slow(const struct triangulate *t, int group)
{
    return isnan(t->ratios[group]) || t->ratios[group] < t->cut;
}

static void mark_fast(struct triangulate *t, int group)
{
    for (int i = 0; i < t->sizes[group]; i++)
        if (t->marks[t->groups[group][i]] == MARK_UNKNOWN)
            t->marks[t->groups[group][i]] = MARK_FAST;
}

static void remove_first(struct triangulate *t, int n)
{
    memmove(t->suspects, t->suspects + n, (size_t)(t->n_suspects - n) * sizeof(int));
    t->n_suspects -= n;
}

static void accuse(struct triangulate *t, int node, bool is_sure)
{
    t->marks[node] = is_sure ? MARK_SLOW : MARK_SLOW_UNSURE;
    t->slow[t->n_slow++] = node;
}

static void after_pairs(struct triangulate *t)
{
    t->n_suspects = 0;
    for (int i = 0; i < t->n_groups; i++) {
        if (!is_slow(t, i)) {
            mark_fast(t, i);
            continue;
        }
        for (int j = 0; j < t->sizes[i]; j++)
            t->suspects[t->n_suspects++] = t->groups[i][j];
    }
    if (t->n_suspects == t->n) { /* there is no fast node as a partner */
        t->phase = PHASE_HALVES;
        if (t->n > 3)
            finish(t, TRIANGULATE_SPREAD);
        return;
    }
    if (t->n_suspects > 0) {
        t->phase = PHASE_CROSS;
        return;
    }
    for (int i = 0; i < t->n; i++)
        t->suspects[i] = i;
    t->n_suspects = t->n;
    t->phase = t->options.full > 0 && t->options.full < t->cut ? PHASE_SPREAD : PHASE_VERIFY;
}

static void after_cross(struct triangulate *t)
{
    int node = t->suspects[0];

    if (is_slow(t, 0))
        accuse(t, node, t->marks[t->groups[0][1]] == MARK_FAST);
    else
        mark_fast(t, 0);
    remove_first(t, 1);
    if (t->n_suspects == 0)
        t->phase = PHASE_CONFIRM;
}

static void after_spread(struct triangulate *t)
{
    int half = (t->n_suspects + 1) / 2;

    if (is_slow(t, 0)) {
        if (t->second_half)
            remove_first(t, half);
        else
            t->n_suspects = half;
        t->second_half = false;
    } else if (!t->second_half) {
        t->second_half = true;
    } else {
        finish(t, TRIANGULATE_SPREAD); /* neither half alone: this is the smallest */
    }
}

static void after_halves(struct triangulate *t)
{
    bool has_partner = t->sizes[0] > t->half;

    if (!is_slow(t, 0)) {
        mark_fast(t, 0);
        remove_first(t, t->half);
    } else if (t->half == 1) {
        accuse(t, t->suspects[0], has_partner && t->marks[t->groups[0][1]] == MARK_FAST);
        t->phase = PHASE_VERIFY;
    } else {
        t->n_suspects = t->half;
    }
}

static void after_verify(struct triangulate *t)
{
    if (!is_slow(t, 0)) {
        mark_fast(t, 0);
        if (t->n_slow == 0)
            finish(t, TRIANGULATE_NONE);
        else
            t->phase = PHASE_CONFIRM;
        return;
    }
    /* There is another slow node, among those that were in no fast group yet. */
    t->n_suspects = 0;
    for (int i = 0; i < t->n; i++)
        if (t->marks[i] == MARK_UNKNOWN)
            t->suspects[t->n_suspects++] = i;
    if (t->n_suspects == 0) { /* each was in a fast group: only large groups are slow */
        for (int i = 0; i < t->sizes[0]; i++)
            t->suspects[t->n_suspects++] = t->groups[0][i];
        if (t->n_slow > 0)
            finish(t, TRIANGULATE_FOUND);
        else
            t->phase = PHASE_SPREAD;
        return;
    }
    t->phase = PHASE_HALVES;
}

static void after_confirm(struct triangulate *t)
{
    int node = t->groups[0][0];

    if (is_slow(t, 0)) {
        t->marks[node] = MARK_SLOW;
        return;
    }
    t->marks[node] = MARK_FAST;
    for (int i = 0; i < t->n_slow; i++)
        if (t->slow[i] == node)
            memmove(&t->slow[i], &t->slow[i + 1], (size_t)(--t->n_slow - i) * sizeof(int));
    if (t->n_slow == 0) { /* it is fast with another partner: no single node */
        for (int i = 0; i < t->n; i++)
            t->suspects[i] = i;
        t->n_suspects = t->n;
        finish(t, TRIANGULATE_SPREAD);
    }
}

static const struct {
    const char *(*make)(struct triangulate *t); /* why the groups are measured; NULL: another phase has begun */
    void (*after)(struct triangulate *t);
} phases[] = {
    [PHASE_PAIRS] = {round_pairs, after_pairs},    [PHASE_CROSS] = {round_cross, after_cross},
    [PHASE_SPREAD] = {round_spread, after_spread}, [PHASE_HALVES] = {round_halves, after_halves},
    [PHASE_VERIFY] = {round_verify, after_verify}, [PHASE_CONFIRM] = {round_confirm, after_confirm},
};

/* A result near the cut is measured twice. */
static bool needs_repeat(struct triangulate *t)
{
    if (t->n_groups != 1 || t->repeated[0] || isnan(t->ratios[0]) || t->options.margin <= 0)
        return false;
    return fabs(t->ratios[0] - t->cut) < t->options.margin;
}

bool triangulate_next(struct triangulate *t, struct triangulate_round *ret_round)
{
    const char *why = NULL;

    if (t->phase == PHASE_END)
        return false;
    if (t->n_groups > 0 && needs_repeat(t)) {
        t->repeated[0] = 1;
        why = "the same group again: the result was near the limit";
    } else if (t->n_groups > 0) {
        phases[t->phase].after(t);
        t->n_groups = 0;
    }
    while (!why && t->phase != PHASE_END)
        why = phases[t->phase].make(t);
    if (!why)
        return false;
    if (t->runs + t->n_groups > t->options.max_runs) {
        if (t->n_slow > 0) { /* keep the nodes found so far */
            finish(t, TRIANGULATE_FOUND);
            return false;
        }
        finish(t, TRIANGULATE_BUDGET);
        return false;
    }
    t->runs += t->n_groups;
    *ret_round = (struct triangulate_round){t->n_groups, t->groups, t->sizes, why};
    return true;
}

void triangulate_result(struct triangulate *t, int group, double ratio)
{
    if (group < 0 || group >= t->n_groups)
        return;
    /* The second of two measurements: their mean. */
    if (t->repeated[group] && t->ratios[group] >= 0 && !isnan(ratio))
        ratio = (ratio + t->ratios[group]) / 2;
    t->ratios[group] = ratio;
}

enum triangulate_end triangulate_end(const struct triangulate *t, const int **ret_slow, int *ret_n)
{
    *ret_slow = t->slow;
    *ret_n = t->n_slow;
    return t->end;
}

int triangulate_runs(const struct triangulate *t)
{
    return t->runs;
}

/* --- existing runs --- */

static int count_in(const unsigned char *is_suspect, const int *group, int size)
{
    int n = 0;

    for (int i = 0; i < size; i++)
        n += is_suspect[group[i]];
    return n;
}

int triangulate_deduce(int n_nodes, int n_groups, int *const *groups, const int *sizes, const bool *is_slow,
                       int *ret_suspects, bool *ret_is_proof)
{
    unsigned char *is_suspect = calloc((size_t)n_nodes, 1);
    int n = 0;

    *ret_is_proof = false;
    if (!is_suspect)
        return 0;
    for (int i = 0; i < n_groups; i++)
        for (int j = 0; is_slow[i] && j < sizes[i]; j++)
            is_suspect[groups[i][j]] = 1;
    for (int i = 0; i < n_groups; i++)
        for (int j = 0; !is_slow[i] && j < sizes[i]; j++)
            is_suspect[groups[i][j]] = 0;
    *ret_is_proof = true;
    for (int i = 0; i < n_groups; i++)
        if (is_slow[i] && count_in(is_suspect, groups[i], sizes[i]) != 1)
            *ret_is_proof = false;
    for (int i = 0; i < n_nodes; i++)
        if (is_suspect[i])
            ret_suspects[n++] = i;
    *ret_is_proof = *ret_is_proof && n > 0;
    free(is_suspect);
    return n;
}
