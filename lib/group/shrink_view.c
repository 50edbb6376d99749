/* SPDX-License-Identifier: Apache-2.0 */
/* Views: a bitmap of the ranks to leave out in each control block; during a shrink bits are only added. */
#include "group/shrink.h"

/* A word of the view of `rank`, without bits of ranks that do not exist. */
static uint64_t view_word(const struct shrink *s, int rank, int word)
{
    int bits = s->group->comm->nranks - word * 64;
    uint64_t mask = bits >= 64 ? UINT64_MAX : bits > 0 ? (UINT64_C(1) << bits) - 1 : 0;

    return atomic_load(&shrink_state_of(s, rank)->out[s->attempt - 1][word]) & mask;
}

bool shrink_leaves_out(const struct shrink *s, int of, int rank)
{
    return view_word(s, of, rank / 64) >> (rank % 64) & 1;
}

bool shrink_is_out(const struct shrink *s, int rank)
{
    return shrink_leaves_out(s, s->group->comm->rank, rank);
}

void shrink_leave_out(const struct shrink *s, int rank)
{
    atomic_fetch_or(&s->mine->out[s->attempt - 1][rank / 64], UINT64_C(1) << (rank % 64));
}

void shrink_merge_view(const struct shrink *s, int rank)
{
    for (int word = 0; word * 64 < s->group->comm->nranks; word++)
        atomic_fetch_or(&s->mine->out[s->attempt - 1][word], view_word(s, rank, word));
}

bool shrink_same_view(const struct shrink *s, int a, int b)
{
    for (int word = 0; word * 64 < s->group->comm->nranks; word++)
        if (view_word(s, a, word) != view_word(s, b, word))
            return false;
    return true;
}
