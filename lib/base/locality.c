/* SPDX-License-Identifier: Apache-2.0 */
#include "base/locality.h"

#include "base/process.h"

#include <stdio.h>

void ep_locality_get_self(struct ep_locality *ret_locality)
{
    struct ep_process_id self;

    memset(ret_locality, 0, sizeof(*ret_locality));
    ep_process_get_self(&self);
    memcpy(ret_locality->host, self.host, sizeof(ret_locality->host));
    ret_locality->pid_namespace = self.pid_namespace;
}

bool ep_locality_is_shared(const struct ep_locality *a, const struct ep_locality *b)
{
    return ep_locality_is_known(a) && memcmp(a->host, b->host, sizeof(a->host)) == 0 &&
           a->pid_namespace == b->pid_namespace;
}

static const struct ep_locality *get(const void *all, size_t stride, int rank)
{
    return (const void *)((const char *)all + (size_t)rank * stride);
}

/* Consecutive ranks that share a host. */
struct range {
    int first, n;
};

static bool is_of_host(const void *all, size_t stride, const struct range *range, int rank)
{
    return ep_locality_is_shared(get(all, stride, range->first), get(all, stride, rank));
}

static struct range find_range(const void *all, size_t stride, int nranks, int first)
{
    struct range range = {.first = first, .n = 1};

    while (first + range.n < nranks && is_of_host(all, stride, &range, first + range.n))
        range.n++;
    return range;
}

static int print_range(char *text, size_t bytes, const struct range *range)
{
    if (range->n == 1)
        return snprintf(text, bytes, "rank %d", range->first);
    return snprintf(text, bytes, "ranks %d to %d", range->first, range->first + range->n - 1);
}

static void explain_sizes(const struct range *a, const struct range *b, char *why)
{
    char first[40], other[40];

    print_range(first, sizeof(first), a);
    print_range(other, sizeof(other), b);
    snprintf(why, EP_ERROR_TEXT_BYTES, "%s %s a host and %s another one", first, a->n == 1 ? "has" : "share", other);
}

/* Has a later range a rank of the same host? */
static bool is_split(const void *all, size_t stride, int nranks, const struct range *range, char *why)
{
    for (int rank = range->first + range->n; rank < nranks; rank++) {
        if (!is_of_host(all, stride, range, rank))
            continue;
        if (why)
            snprintf(why, EP_ERROR_TEXT_BYTES,
                     "ranks %d and %d share a host and rank %d between them is on another one", range->first, rank,
                     range->first + range->n);
        return true;
    }
    return false;
}

int ep_locality_find_nodes(const void *all, size_t stride, int nranks, char ret_why[EP_ERROR_TEXT_BYTES])
{
    struct range first = find_range(all, stride, nranks, 0), range = first;

    for (int rank = 0; rank < nranks; rank++) {
        if (ep_locality_is_known(get(all, stride, rank)))
            continue;
        if (ret_why)
            snprintf(ret_why, EP_ERROR_TEXT_BYTES, "rank %d cannot identify its host", rank);
        return 0;
    }
    for (;;) {
        if (is_split(all, stride, nranks, &range, ret_why))
            return 0;
        if (range.n != first.n && ret_why)
            explain_sizes(&first, &range, ret_why);
        if (range.n != first.n)
            return 0;
        if (range.first + range.n == nranks)
            return first.n;
        range = find_range(all, stride, nranks, range.first + range.n);
    }
}
