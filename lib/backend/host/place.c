/* SPDX-License-Identifier: Apache-2.0 */
/* Places rows with their metadata into the outputs of the ranks of this node: own tokens and those of rail peers. */
#include "backend/host/host.h"

#include "group/plan.h"

#include <string.h>

/* Writes the experts of a token in the numbering of the rank that owns [first, first + n), and their weights. */
static void place_choice(const struct host_move *move, const int32_t *index, const float *weights, int local,
                         int64_t row)
{
    int topk = move->plan->args.topk, n = move->plan->info.n_local_experts;
    int first = (move->group->first + local) * n;
    size_t at = (size_t)row * (size_t)topk;
    unsigned char *out_index = move->out[local][EP_GROUP_AT_INDEX];
    float *out_weights = (float *)(void *)move->out[local][EP_GROUP_AT_WEIGHTS];

    for (int k = 0; k < topk; k++) {
        bool mine = index[k] >= first && index[k] < first + n;

        if (out_index && move->plan->args.idx_type == EP_I64)
            ((int64_t *)(void *)out_index)[at + (size_t)k] = mine ? index[k] - first : -1;
        else if (out_index)
            ((int32_t *)(void *)out_index)[at + (size_t)k] = mine ? index[k] - first : -1;
        if (out_weights)
            out_weights[at + (size_t)k] = mine ? weights[k] : 0.0f;
    }
}

int host_place(const struct host_move *move, const struct ep_group_route *route, int t, const void *row,
               const void *scales, const float *weights)
{
    const struct ep_group_entry *entry = route->entry + route->start[t];
    const int32_t *index = route->index + (size_t)t * (size_t)move->plan->args.topk;
    int n = route->start[t + 1] - route->start[t];
    void *dst[EP_MAX_TOPK];

    if (n <= 0)
        return 0;
    for (int i = 0; i < n; i++)
        dst[i] = move->out[entry[i].local][EP_GROUP_AT_X] + (size_t)entry[i].row * move->row_bytes;
    move->copy(dst, n, row, move->row_bytes);
    for (int i = 0; i < n; i++) {
        unsigned char **out = move->out[entry[i].local];

        if (scales && move->scale_bytes)
            memcpy(out[EP_GROUP_AT_SCALES] + (size_t)entry[i].row * move->scale_bytes, scales, move->scale_bytes);
        if (!(move->plan->args.flags & EP_PLAN_EXPANDED))
            place_choice(move, index, weights, entry[i].local, entry[i].row);
        else if (out[EP_GROUP_AT_WEIGHTS])
            ((float *)(void *)out[EP_GROUP_AT_WEIGHTS])[entry[i].row] = weights[entry[i].k];
    }
    return n;
}

void host_place_own(const struct host_move *move, int begin, int end)
{
    const struct ep_group_route *route = &((struct ep_group_plan *)move->plan->impl)->own;
    const float *weights = move->args->topk_weights;
    size_t topk = (size_t)move->plan->args.topk;

    for (int t = begin; t < end; t++) {
        const unsigned char *row = (const unsigned char *)move->args->x + (size_t)t * move->row_bytes;
        const unsigned char *scales = move->scale_bytes ? move->scales + (size_t)t * move->scale_bytes : NULL;

        host_place(move, route, t, row, scales, weights ? weights + (size_t)t * topk : NULL);
    }
}
