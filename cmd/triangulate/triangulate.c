/* SPDX-License-Identifier: Apache-2.0 */
#include "triangulate.h"
#include "base/array.h"

#include "common/memory.h"

#include <stdlib.h>
#include <string.h>

void triangulate_add(struct triangulate *t, const int *nodes, int n, bool is_slow)
{
    int *copy = memory_new((size_t)n, sizeof(int));

    memcpy(copy, nodes, (size_t)n * sizeof(int));
    t->groups = memory_grow(t->groups, (t->n_groups + 1) * sizeof(*t->groups));
    t->groups[t->n_groups++] = (struct triangulate_group){copy, n, is_slow};
}

void triangulate_done(struct triangulate *t)
{
    for (size_t i = 0; i < t->n_groups; i++)
        free(t->groups[i].nodes);
    free(t->groups);
}

/* Pairs, two runs with a partner, and one more if three nodes are together. */
int triangulate_runs(int n_nodes)
{
    return n_nodes / 2 + 2 + n_nodes % 2;
}

static void mark(const struct triangulate *t, bool is_slow, bool *marks, bool value)
{
    for (size_t i = 0; i < t->n_groups; i++)
        for (int j = 0; t->groups[i].is_slow == is_slow && j < t->groups[i].n; j++)
            marks[t->groups[i].nodes[j]] = value;
}

static int count_in(const struct triangulate_group *group, const bool *marks)
{
    return COUNT_OF(i, group->n, marks[group->nodes[i]]);
}

/* Is the node the only suspect of a slow group? */
static bool is_proven(const struct triangulate *t, int node, const bool *is_suspect)
{
    FOR_EACH (group, t->groups, t->n_groups)
        for (int j = 0; group->is_slow && j < group->n; j++)
            if (group->nodes[j] == node && count_in(group, is_suspect) == 1)
                return true;
    return false;
}

enum triangulate_end triangulate_judge(const struct triangulate *t, bool *ret_is_suspect)
{
    bool is_any_slow = false, is_proof = true;
    int n = 0;

    memset(ret_is_suspect, 0, (size_t)t->n_nodes * sizeof(bool));
    mark(t, true, ret_is_suspect, true);
    mark(t, false, ret_is_suspect, false);
    for (size_t i = 0; i < t->n_groups; i++) {
        is_any_slow |= t->groups[i].is_slow;
        is_proof &= !t->groups[i].is_slow || count_in(&t->groups[i], ret_is_suspect) > 0;
    }
    for (int i = 0; i < t->n_nodes; i++) {
        n += ret_is_suspect[i];
        is_proof &= !ret_is_suspect[i] || is_proven(t, i, ret_is_suspect);
    }
    return !is_any_slow ? TRIANGULATE_NONE
           : n == 0     ? TRIANGULATE_SPREAD
           : is_proof   ? TRIANGULATE_FOUND
                        : TRIANGULATE_EITHER;
}

/* Three nodes at the end, if their number is odd. */
static void add_pairs(struct triangulate *t)
{
    for (int i = 0, size; i + 1 < t->n_nodes; i += size) {
        size = t->n_nodes - i == 3 ? 3 : 2;
        triangulate_add(t, (int[]){i, i + 1, i + 2}, size, false);
    }
    t->why = "all pairs";
}

static void add_all(struct triangulate *t)
{
    int *all = memory_new((size_t)t->n_nodes, sizeof(int));

    for (int i = 0; i < t->n_nodes; i++)
        all[i] = i;
    triangulate_add(t, all, t->n_nodes, false);
    t->why = "all nodes together, as no pair is slow";
    free(all);
}

/* As many suspects as there are fast nodes get one each. */
static void add_partners(struct triangulate *t, const bool *is_suspect)
{
    bool *is_fast = memory_new((size_t)t->n_nodes, sizeof(bool));
    int node = 0;

    mark(t, false, is_fast, true);
    for (int fast = 0; fast < t->n_nodes; fast++) {
        while (is_fast[fast] && node < t->n_nodes && (!is_suspect[node] || is_proven(t, node, is_suspect)))
            node++;
        if (is_fast[fast] && node < t->n_nodes)
            triangulate_add(t, (int[]){node++, fast}, 2, true);
    }
    t->why = "nodes of slow pairs, each with a node of a fast one";
    free(is_fast);
}

bool triangulate_next(struct triangulate *t)
{
    static const int of_three[3][2] = {{0, 1}, {0, 2}, {1, 2}};
    bool *is_suspect = memory_new((size_t)t->n_nodes, sizeof(bool));
    size_t before = t->n_groups;
    enum triangulate_end end = triangulate_judge(t, is_suspect);

    if (before == 0)
        add_pairs(t);
    else if (end == TRIANGULATE_NONE && t->groups[before - 1].n < t->n_nodes)
        add_all(t);
    else if (end == TRIANGULATE_EITHER)
        add_partners(t, is_suspect);
    /* There is no fast node yet. Two slow nodes can be in both of two pairs. */
    if (end == TRIANGULATE_EITHER && t->n_groups == before && t->n_nodes == 3 && before <= 3) {
        triangulate_add(t, of_three[before - 1], 2, true);
        t->why = "a pair of the three";
    } else if (end == TRIANGULATE_EITHER && t->n_groups == before && before == 2) {
        triangulate_add(t, (int[]){0, 2}, 2, true);
        triangulate_add(t, (int[]){1, 3}, 2, true);
        t->why = "other pairs, as all were slow";
    }
    free(is_suspect);
    return t->n_groups > before;
}
