/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_cohort.c - the quota of a ClusterQueue in the tree of Cohorts from which it borrows. As of Kueue 0.15.
 *
 * Each node of the tree has its own quota and what its children lend. The part that a node does not lend, by its
 * lendingLimit, is used first. A Cohort without an object, only named by queues or Cohorts, has no quota and no limits.
 */
#include "deploy_check.h"

#include <limits.h>

#define DEPTH_MAX 32 /* Kueue stops the queues of a cycle; here the recursion only has to end */

struct tree {
    const json_t *queues, *cohorts;
    const char *flavor, *resource;
};

static const char *parent_of(const json_t *object)
{
    static const char *const paths[] = {"spec/cohortName", "spec/cohort", "spec/parentName", "spec/parent"};

    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
        if (*get_text(object, paths[i]))
            return get_text(object, paths[i]);
    return "";
}

const json_t *check_group_for(const json_t *object, const char *resource)
{
    const json_t *group, *covered;
    size_t i, r;

    json_array_foreach(get(object, "spec/resourceGroups"), i, group) json_array_foreach(
        get_key(group, "coveredResources"), r,
        covered) if (json_is_string(covered) && strcmp(json_string_value(covered), resource) == 0) return group;
    return NULL;
}

static const json_t *quota_of(const struct tree *tree, const json_t *object)
{
    return get_named(
        get_key(get_named(get_key(check_group_for(object, tree->resource), "flavors"), tree->flavor), "resources"),
        tree->resource);
}

static long long nominal_of(const struct tree *tree, const json_t *object)
{
    long long nominal = get_quantity(get_key(quota_of(tree, object), "nominalQuota"));

    return nominal > 0 ? nominal : 0;
}

/* -1: no limit. */
static long long limit_of(const struct tree *tree, const json_t *object, const char *name)
{
    return get_quantity(get_key(quota_of(tree, object), name));
}

static long long reserved_of(const struct tree *tree, const json_t *queue)
{
    const json_t *used = get_named(get(queue, "status/flavorsReservation"), tree->flavor);
    long long total = get_quantity(get_key(get_named(get_key(used, "resources"), tree->resource), "total"));

    return total > 0 ? total : 0;
}

static long long add(long long a, long long b)
{
    long long sum;

    return __builtin_add_overflow(a, b, &sum) ? LLONG_MAX : sum;
}

static long long positive(long long number)
{
    return number > 0 ? number : 0;
}

/* The part of the subtree quota that a node does not lend. */
static long long local_of(const struct tree *tree, const json_t *object, long long quota)
{
    long long lends = limit_of(tree, object, "lendingLimit");

    return lends >= 0 ? positive(quota - lends) : 0;
}

static void add_child(const struct tree *tree, const json_t *object, long long quota, long long used,
                      long long *ret_quota, long long *ret_used)
{
    long long local = local_of(tree, object, quota);

    *ret_quota = add(*ret_quota, quota - local);
    *ret_used = add(*ret_used, positive(used - local));
}

/* The quota of a Cohort including what its children lend, and the part of it in use. */
static void sum_cohort(const struct tree *tree, const char *name, int depth, long long *ret_quota, long long *ret_used)
{
    const json_t *child, *own = NULL;
    size_t i;

    json_array_foreach(tree->cohorts, i, child) if (strcmp(get_name(child), name) == 0) own = child;
    *ret_quota = nominal_of(tree, own);
    *ret_used = 0;
    json_array_foreach(tree->cohorts, i, child)
    {
        long long quota, used;

        if (depth == DEPTH_MAX || strcmp(parent_of(child), name) != 0)
            continue;
        sum_cohort(tree, get_name(child), depth + 1, &quota, &used);
        add_child(tree, child, quota, used, ret_quota, ret_used);
    }
    json_array_foreach(tree->queues, i, child) if (strcmp(parent_of(child), name) == 0)
        add_child(tree, child, nominal_of(tree, child), reserved_of(tree, child), ret_quota, ret_used);
}

/* The maximum and the free quota of a node: its own share plus that of its parent, within its borrowingLimit. */
static void room_of(const struct tree *tree, const json_t *object, const char *parent, int depth, long long quota,
                    long long used, struct check_quota *ret_room)
{
    long long local = local_of(tree, object, quota), borrows = limit_of(tree, object, "borrowingLimit");
    const json_t *cohort = NULL, *entry;
    long long parent_quota, parent_used;
    struct check_quota above;
    size_t i;

    if (!*parent || depth == DEPTH_MAX) {
        *ret_room = (struct check_quota){.most = quota, .free = quota - used};
        return;
    }
    json_array_foreach(tree->cohorts, i, entry) if (strcmp(get_name(entry), parent) == 0) cohort = entry;
    sum_cohort(tree, parent, depth, &parent_quota, &parent_used);
    room_of(tree, cohort, parent_of(cohort), depth + 1, parent_quota, parent_used, &above);
    ret_room->most = add(local, above.most);
    ret_room->free = above.free;
    if (borrows >= 0) {
        long long within = add(quota - local - positive(used - local), borrows);

        if (ret_room->most > add(quota, borrows))
            ret_room->most = add(quota, borrows);
        if (ret_room->free > within)
            ret_room->free = within;
    }
    ret_room->free = add(ret_room->free, positive(local - used));
}

void check_quota_room(const struct check *check, const json_t *queue, const char *flavor, const char *resource,
                      struct check_quota *ret_room)
{
    struct tree tree = {.queues = get_items(check->snapshot, "clusterqueues"),
                        .cohorts = get_items(check->snapshot, "cohorts"),
                        .flavor = flavor,
                        .resource = resource};

    room_of(&tree, queue, parent_of(queue), 0, nominal_of(&tree, queue), reserved_of(&tree, queue), ret_room);
    ret_room->free = positive(ret_room->free);
}
