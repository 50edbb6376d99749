/* SPDX-License-Identifier: Apache-2.0 */
/* deduce.c - finds slow nodes from existing runs. */
#include "triangulate.h"

#include <stdlib.h>

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
