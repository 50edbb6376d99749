/* SPDX-License-Identifier: Apache-2.0 */
/* The terms of a sum on this node: of own tokens and those of rail peers. */
#include "backend/host/host.h"

int host_sum_rows(const struct host_sum *sum, const struct ep_group_route *route, int t, const uint16_t **ret_rows)
{
    const struct ep_group_entry *entry = route->entry + route->start[t];
    int n = route->start[t + 1] - route->start[t];

    for (int i = 0; i < n; i++)
        ret_rows[i] = (const uint16_t *)(const void *)(sum->x[entry[i].local] + (size_t)entry[i].row * sum->row_bytes);
    return n;
}

void host_sum_weights(const struct host_sum *sum, const struct ep_group_route *route, int t, float *ret_sum)
{
    size_t topk = (size_t)sum->plan->args.topk;

    for (int32_t i = route->start[t]; i < route->start[t + 1]; i++) {
        const struct ep_group_entry *entry = &route->entry[i];
        const float *weights = sum->weights[entry->local];

        if (sum->plan->args.flags & EP_PLAN_EXPANDED) {
            ret_sum[entry->k] += weights[entry->row];
            continue;
        }
        for (size_t k = 0; k < topk; k++)
            ret_sum[k] += weights[(size_t)entry->row * topk + k];
    }
}
