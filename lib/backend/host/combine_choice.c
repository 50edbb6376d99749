/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of the sums with EP_COMBINE_BY_CHOICE: see ep_combine(). The rows of a token are few, so they are sorted by
 * insertion.
 */
#include "backend/host/host.h"

#include "group/route.h"

struct term {
    int local; /* rank of the node that has the row */
    int32_t row;
    int k; /* choice that it is sorted by */
};

static void insert(struct term *terms, int n, struct term term)
{
    int at = n;

    for (; at > 0 && terms[at - 1].k > term.k; at--)
        terms[at] = terms[at - 1];
    terms[at] = term;
}

static struct ep_row_term row_of(const struct host_sum *sum, const struct term *term)
{
    return (struct ep_row_term){.row = sum->in[term->local][EP_GROUP_AT_X] + (size_t)term->row * sum->row_bytes};
}

/* The last choice of a token that is on a rank of the node. */
static int last_choice(const struct host_sum *sum, const struct ep_group_route *route, int t, int local)
{
    const int32_t *index = route->index + (size_t)t * (size_t)sum->plan->args.topk;
    int n_local = sum->plan->info.n_local_experts, rank = sum->group->first + local;
    int k = sum->plan->args.topk - 1;

    while (k > 0 && (index[k] < 0 || index[k] / n_local != rank))
        k--;
    return k;
}

static int sort_terms(const struct host_sum *sum, const struct ep_group_route *route, int t, struct term *ret_terms)
{
    bool expanded = sum->plan->args.flags & EP_PLAN_EXPANDED;
    int n = 0;

    for (int32_t i = route->start[t]; i < route->start[t + 1]; i++) {
        const struct ep_group_entry *entry = &route->entry[i];
        struct term term = {.local = entry->local, .row = entry->row};

        term.k = expanded ? entry->k : last_choice(sum, route, t, entry->local);
        insert(ret_terms, n++, term);
    }
    return n;
}

/*
 * Adds up rows sorted by choice for each rank: the position of a rank is that of its last row. Returns the number of
 * sums.
 */
static int add_by_rank(const struct host_sum *sum, const struct term *terms, int n, struct ep_row_term *ret_terms)
{
    int hidden = sum->args->hidden, n_sums = 0;

    for (int last = 0; last < n; last++) {
        uint16_t *partial = sum->scratch + (size_t)(n_sums + 1) * (size_t)hidden;
        struct ep_row_term rows[EP_MAX_TOPK + 1] = {{.row = sum->scratch}};
        bool is_last = true;
        int n_rows = 1;

        for (int i = last + 1; i < n; i++)
            is_last &= terms[i].local != terms[last].local;
        if (!is_last)
            continue;
        for (int i = 0; i <= last; i++)
            if (terms[i].local == terms[last].local)
                rows[n_rows++] = row_of(sum, &terms[i]);
        ep_rows_get()->sum_bf16(partial, rows, n_rows, hidden);
        ret_terms[n_sums++] = (struct ep_row_term){.row = partial};
    }
    return n_sums;
}

int host_choice_terms(const struct host_sum *sum, const struct ep_group_route *route, int t,
                      struct ep_row_term *ret_terms)
{
    struct term terms[EP_MAX_TOPK];
    int n = sort_terms(sum, route, t, terms);

    if ((sum->args->flags & EP_COMBINE_ROUND_PARTIAL) && (sum->plan->args.flags & EP_PLAN_EXPANDED))
        return add_by_rank(sum, terms, n, ret_terms);
    for (int i = 0; i < n; i++)
        ret_terms[i] = row_of(sum, &terms[i]);
    return n;
}
