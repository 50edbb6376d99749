/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: combines. Within a node the owner of a token reads its rows directly. From another node
 * each rank sends one row for each token, the sum of its rows of that token, grouped and rounded as the contract says;
 * this needs the weights of the owner, so a combine lasts until all ranks that are not masked have begun theirs.
 */
#include "backend/host/lowlatency.h"

#include <string.h>

/* Replaces the weight of a choice that is excluded from a combine. */
#define WEIGHT_EXCLUDED UINT32_MAX

static bool is_sent_to(const ep_ll *ll, int rank)
{
    return ll_is_remote(ll, rank) && !((const struct host_ll *)ll->impl)->masked[rank];
}

/* --- the owner of the tokens -------------------------------------------------------------------------------------- */

/* The arguments that must be equal on all ranks. */
static uint32_t detail_of(uint64_t call, bool no_partial_reduce)
{
    return (uint32_t)call << 1 | no_partial_reduce;
}

static bool reduces(const struct ll_combine *combine)
{
    return !(combine->args.flags & EP_LL_NO_PARTIAL_REDUCE);
}

void ll_send_weights(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    size_t topk = (size_t)combine->args.topk;
    const int32_t *index = inner->index[combine->call & 1];

    for (size_t i = 0; inner->net && i < (size_t)combine->args.n_tokens * topk; i++) {
        int rank = index[i] < 0 ? -1 : index[i] / ll->n_local;
        int64_t entry = (int64_t)(i / topk) * ll->config.topk + (int64_t)(i % topk);
        struct ll_view to;
        uint32_t bits;

        if (rank < 0 || !is_sent_to(ll, rank))
            continue;
        to = ll_to(ll, rank);
        memcpy(&bits, &combine->args.topk_weights[i], sizeof(bits));
        /* One NaN is reserved. */
        bits = combine->index[i] < 0 ? WEIGHT_EXCLUDED : bits == WEIGHT_EXCLUDED ? bits >> 1 : bits;
        ll_wire_store(to.segment, ll_wire_weight_at(to.layout, to.source, entry), combine->serial << 32 | bits);
    }
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_view to;

        if (!is_sent_to(ll, rank))
            continue;
        to = ll_to(ll, rank);
        ll_words_of(&to)->desc[LL_WIRE_DESC_WEIGHTS] =
            (struct ll_wire_desc){.number = combine->serial,
                                  .combine = 1,
                                  .max_tokens = combine->max_tokens,
                                  .parts = 1,
                                  .detail = detail_of(combine->call, !reduces(combine))};
        ll_publish_to(ll, rank, LL_WORD(weights_ready), combine->serial);
    }
}

ep_status ll_find_sent_row(ep_ll *ll, const struct ll_combine *combine, int rank, int t, size_t k, bool sent,
                           const uint16_t **ret_row)
{
    const struct ll_view from = ll_from(ll, rank);
    int64_t entry = (int64_t)t * ll->config.topk + (int64_t)k;
    uint64_t number = ll_wire_load(from.segment, ll_wire_row_flag_at(from.layout, entry, 1));

    *ret_row = (const uint16_t *)(const void *)(from.segment + ll_wire_row_at(from.layout, entry));
    if (!sent || number == combine->serial)
        return EP_OK;
    return ll_fail_damaged(ll, rank, EP_GROUP_LL_COMBINE, "the number of a row", (int64_t)number);
}

/* --- the rank that has the rows ---------------------------------------------------------------------------------- */

/* Sends the sum of `n` rows, which is the row itself if there is only one, as the row of an entry. */
static void send_row(ep_ll *ll, const struct ll_combine *combine, int rank, int64_t entry, const uint16_t *const *rows,
                     const float *weights, int n)
{
    const struct ll_view to = ll_to(ll, rank);
    unsigned char *row = to.segment + ll_wire_row_at(to.layout, entry);

    if (n == 1)
        memcpy(row, rows[0], (size_t)ll->config.hidden * 2);
    else
        ep_rows_get()->weighted_sum_bf16((uint16_t *)(void *)row, rows, weights, n, ll->config.hidden);
    ll_wire_store(to.segment, ll_wire_row_flag_at(to.layout, entry, 1), combine->serial);
}

/* Sends the rows of one token of `rank`, in the entries of their first choices. */
static ep_status send_token(ep_ll *ll, const struct ll_combine *combine, int rank, int t)
{
    const struct host_ll *inner = ll->impl;
    const struct ll_choice *choices = ll_choices_of(ll, combine->call, rank, t);
    size_t nranks = (size_t)ll->comm->nranks, rows_of_expert = nranks * (size_t)combine->max_tokens;
    const struct ll_range *ranges = inner->ranges[combine->call & 1] + rank;
    const struct ll_view from = ll_from(ll, rank);
    const uint16_t *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    int64_t first = 0;
    int n = 0;

    for (int k = 0; k < ll->config.topk; k++) {
        int64_t entry = (int64_t)t * ll->config.topk + k;
        size_t expert = (size_t)choices[k].expert;
        uint64_t word;
        uint32_t bits;

        if (choices[k].expert < 0)
            continue;
        word = ll_wire_load(from.segment, ll_wire_weight_at(from.layout, rank, entry));
        bits = (uint32_t)word;
        if (word >> 32 != (uint32_t)combine->serial)
            return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of a weight", (int64_t)(word >> 32));
        if (bits == WEIGHT_EXCLUDED)
            continue;
        first = n ? first : entry;
        memcpy(&weights[n], &bits, sizeof(bits));
        rows[n++] = (const uint16_t *)combine->args.x +
                    (expert * rows_of_expert + (size_t)(ranges[expert * nranks].begin + choices[k].index)) *
                        (size_t)ll->config.hidden;
        if (!reduces(combine)) {
            send_row(ll, combine, rank, first, rows, weights, n);
            n = 0;
        }
    }
    if (n)
        send_row(ll, combine, rank, first, rows, weights, n);
    return EP_OK;
}

static ep_status send_rows_to(ep_ll *ll, const struct ll_combine *combine, int rank)
{
    const struct ll_view from = ll_from(ll, rank), to = ll_to(ll, rank);
    uint32_t theirs = __atomic_load_n(&ll_words_of(&from)->detail[rank], __ATOMIC_RELAXED);
    /* The low bits of the numbers of calls are sent. */
    int32_t ahead = (int32_t)((theirs >> 1) - (detail_of(combine->call, false) >> 1));
    struct ll_combine_desc peer = {.call = combine->call + (uint64_t)ahead, .no_partial_reduce = theirs & 1};
    const struct ll_wire_desc desc = {
        .number = combine->serial, .combine = 1, .max_tokens = combine->max_tokens, .parts = 1};

    EP_TRY(ll_check_combine_desc(ll, combine, rank, &peer));
    for (int t = 0; t < combine->max_tokens; t++)
        EP_TRY(send_token(ll, combine, rank, t));
    ll_words_of(&to)->desc[combine->serial & 1] = desc;
    ll_publish_to(ll, rank, LL_WORD(rows_ready), combine->serial);
    return EP_OK;
}

/* Ranks to which rows were sent. */
struct sent {
    ep_ll *ll;
    const struct ll_combine *combine;
    bool rank[EP_MAX_RANKS];
};

/*
 * Sends to all ranks whose weights have arrived. A rank must not wait until others have sent theirs: it would consider
 * this rank late.
 */
static ep_status send_to_ready(void *context)
{
    struct sent *sent = context;
    ep_ll *ll = sent->ll;

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!is_sent_to(ll, rank) || sent->rank[rank] ||
            ll_load(ll, rank, LL_WORD(weights_ready)) < sent->combine->serial)
            continue;
        EP_TRY(send_rows_to(ll, sent->combine, rank));
        sent->rank[rank] = true;
    }
    return EP_OK;
}

ep_status ll_send_rows(ep_ll *ll, const struct ll_combine *combine)
{
    struct sent sent = {.ll = ll, .combine = combine};
    const struct ll_wait weights = {LL_WORD(weights_ready),  combine->serial,       EP_GROUP_LL_WEIGHTS,
                                    .ranks = LL_OTHER_NODES, .work = send_to_ready, .context = &sent};

    EP_TRY(ll_wait(ll, &weights));
    return send_to_ready(&sent);
}
