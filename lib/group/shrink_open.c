/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the communicator of the new group, within a host and across hosts. */
#include "group/shrink.h"

#include "core/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int common_divisor(int a, int b)
{
    while (b) {
        int rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/*
 * Ranks per node of the new group: kept if every remaining node has the same number of survivors. Over control links a
 * node never spans hosts: then it is the greatest common divisor of all nodes.
 */
static int nodes_of_survivors(const struct shrink_group *g, int old_per_node, bool linked)
{
    int first = 0, per_node = 0;

    while (first < g->n) {
        int n = 0;

        while (first + n < g->n && g->ranks[first + n] / old_per_node == g->ranks[first] / old_per_node)
            n++;
        if (!linked && per_node && n != per_node)
            return g->n;
        per_node = common_divisor(n, per_node);
        first += n;
    }
    return per_node;
}

/* The number after "rank " at `at`, and its end; -1: none. */
static long rank_at(const char *at, const char **ret_end)
{
    static const char word[] = "rank ";
    char *end;
    long rank;

    if (strncmp(at, word, sizeof(word) - 1) != 0 || at[sizeof(word) - 1] < '0' || at[sizeof(word) - 1] > '9')
        return -1;
    rank = strtol(at + sizeof(word) - 1, &end, 10);
    *ret_end = end;
    return rank;
}

/*
 * Failures of the creation name ranks by their new numbers; the caller knows the old ones. Texts of a failed all-gather
 * or a lost connection have the old numbers already.
 */
static ep_status name_by_old_ranks(const struct shrink_group *g, ep_status status)
{
    static const char old[] = " of the old group";
    char text[EP_ERROR_TEXT_BYTES], renamed[EP_ERROR_TEXT_BYTES];
    size_t used = 0;

    snprintf(text, sizeof(text), "%s", ep_last_error());
    if (status == EP_OK || (*g->text && strstr(text, g->text)) || (*g->lost && strstr(text, g->lost)))
        return status;
    for (const char *at = text; *at && used + 1 < sizeof(renamed);) {
        const char *end = NULL;
        long rank = rank_at(at, &end);

        if (rank >= 0 && rank < g->n && strncmp(end, old, sizeof(old) - 1) != 0) {
            used += (size_t)snprintf(renamed + used, sizeof(renamed) - used, "rank %d", g->ranks[rank]);
            at = end;
        } else {
            renamed[used++] = *at++;
        }
    }
    renamed[used < sizeof(renamed) ? used : sizeof(renamed) - 1] = '\0';
    return ep_fail(status, "%s", renamed);
}

ep_status shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next)
{
    ep_boot boot = {.size = sizeof(boot),
                    .rank = -1,
                    .nranks = g->n,
                    .allgather = g->allgather,
                    .context = g->context,
                    .network = g->network};
    bool linked = ep_group_of(comm)->remote;
    int32_t *per_node = &next->config.ranks_per_node;
    ep_status status = EP_OK;

    for (int i = 0; i < g->n; i++)
        if (g->ranks[i] == comm->rank)
            boot.rank = i;
    /* Without control links all survivors share this host. */
    if (*per_node == 0 && !linked)
        *per_node = g->n;
    else if (*per_node == 0 || *per_node == comm->ranks_per_node)
        *per_node = nodes_of_survivors(g, comm->ranks_per_node, linked);
    if (g->n % *per_node != 0)
        status =
            ep_fail(EP_E_ARG, "ep_comm_shrink: ranks_per_node %d does not divide the %d survivors", *per_node, g->n);
    status = ep_config_agree(&boot, next, status, "ep_comm_shrink");
    if (status == EP_OK)
        status = ep_group_of(comm)->backend->open(next, &boot);
    return name_by_old_ranks(g, status);
}

int shrink_find_failed_rank(const struct shrink_group *g, const ep_comm *comm)
{
    if (g->text[0] && strstr(ep_last_error(), g->text) && g->failed_rank >= 0)
        return g->failed_rank;
    for (const char *at = ep_last_error(), *end; *at; at++) {
        long rank = rank_at(at, &end);

        if (rank >= 0 && rank < comm->nranks)
            return (int)rank;
    }
    return comm->rank;
}
