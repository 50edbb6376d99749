/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: combines. Within a node the owner of a token reads its rows where they lie. From another
 * node each rank sends one row for each token, the sum of the rows that it has of it, as the contract groups and rounds
 * them; for that it takes the owner's weights, so a combine lasts until all ranks that are not masked have begun
 * theirs.
 */
#include "backend/host/lowlatency.h"

#include <string.h>

/* Choices and rows of this rank's tokens on each rank. */
struct counts {
    int32_t choices[EP_MAX_RANKS], rows[EP_MAX_RANKS];
};

static bool is_left_out(const struct ll_combine *combine, size_t entry)
{
    return combine->index[entry] < 0;
}

/* A row of its own for each choice, or one for all that a rank has of a token. */
static void count(const ep_ll *ll, const struct ll_combine *combine, struct counts *ret_counts)
{
    const struct host_ll *inner = ll->impl;
    const int32_t *index = inner->index[combine->call & 1];
    size_t topk = (size_t)ll->config.topk;
    bool once = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;

    memset(ret_counts, 0, sizeof(*ret_counts));
    for (size_t t = 0; t < (size_t)combine->args.n_tokens; t++)
        for (size_t k = 0; k < topk; k++) {
            size_t entry = t * topk + k, before = once ? entry : t * topk;
            int rank = index[entry] < 0 ? -1 : index[entry] / ll->n_local;

            if (rank < 0)
                continue;
            ret_counts->choices[rank]++;
            if (is_left_out(combine, entry))
                continue;
            while (before < entry &&
                   (index[before] < 0 || index[before] / ll->n_local != rank || is_left_out(combine, before)))
                before++;
            ret_counts->rows[rank] += before == entry;
        }
}

static struct ll_combine_desc make_desc(const struct ll_combine *combine)
{
    return (struct ll_combine_desc){.call = combine->call,
                                    .no_partial_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0};
}

/* --- the owner of the tokens --- */

static ep_status prepare_requests(ep_ll *ll, const struct ll_combine *combine, const struct counts *counts,
                                  struct ll_request **ret_requests)
{
    const struct host_ll *inner = ll->impl;

    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        size_t bytes = sizeof(struct ll_request) + (size_t)counts->choices[rank] * sizeof(struct ll_choice);
        void *memory;

        ret_requests[rank] = NULL;
        if (!ll_is_remote(ll, rank))
            continue;
        if (!inner->masked[rank]) {
            EP_TRY(ll_net_get_send_buffer(ll, rank, combine->number, LL_PAYLOAD_REQUEST, bytes, &memory));
            ret_requests[rank] = memory;
            *ret_requests[rank] = (struct ll_request){.desc = make_desc(combine), .n_rows = counts->rows[rank]};
        }
    }
    return EP_OK;
}

ep_status ll_send_requests(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    const int32_t *index = inner->index[combine->call & 1];
    size_t topk = (size_t)ll->config.topk;
    struct ll_request *requests[EP_MAX_RANKS] = {NULL};
    struct counts counts;

    if (!inner->net)
        return EP_OK;
    count(ll, combine, &counts);
    EP_TRY(prepare_requests(ll, combine, &counts, requests));
    for (size_t entry = 0; entry < (size_t)combine->args.n_tokens * topk; entry++) {
        int rank = index[entry] < 0 ? -1 : index[entry] / ll->n_local;
        int32_t expert = rank < 0 ? 0 : index[entry] % ll->n_local;

        if (rank < 0 || !requests[rank])
            continue;
        requests[rank]->choices[requests[rank]->n_choices++] =
            (struct ll_choice){.token = (int32_t)(entry / topk),
                               .expert = is_left_out(combine, entry) ? ~expert : expert,
                               .weight = combine->args.topk_weights[entry]};
    }
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        if (!requests[rank])
            continue;
        EP_TRY(ll_send(ll, rank, combine->number, LL_PAYLOAD_REQUEST,
                       sizeof(struct ll_request) + (size_t)counts.choices[rank] * sizeof(struct ll_choice)));
        ll_net_signal(ll, rank, LL_SIGNAL_REQUESTED, combine->number);
    }
    return EP_OK;
}

void ll_find_replies(const ep_ll *ll, const struct ll_combine *combine, struct ll_replies *ret_answers)
{
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        if (ll_is_remote(ll, rank))
            ret_answers->next[rank] = ll_net_get_received(ll, rank, combine->number, LL_PAYLOAD_ROWS);
}

/* --- the rank that has the rows --- */

/* An answer while it is made. */
struct answer {
    ep_ll *ll;
    const struct ll_combine *combine;
    int rank; /* that asks */
    const struct ll_choice *choices;
    int32_t n_choices, n_rows;
    int32_t *seen; /* [L] rows of each expert so far */
    unsigned char *out;
    int32_t made;
};

/* The row of a choice, which counts whether it is left out or not. NULL and EP_OK: left out. */
static ep_status find_row(struct answer *a, const struct ll_choice *choice, const uint16_t **ret_row)
{
    ep_ll *ll = a->ll;
    const struct host_ll *inner = ll->impl;
    int32_t expert = choice->expert < 0 ? ~choice->expert : choice->expert, i;
    size_t nranks = (size_t)ll->comm->nranks, rows = nranks * (size_t)a->combine->max_tokens;
    const struct ll_range *range;

    *ret_row = NULL;
    if (expert >= ll->n_local)
        return ll_fail_damaged(ll, a->rank, EP_GROUP_LL_WEIGHTS, "an expert of a token", expert);
    range = &inner->ranges[a->combine->call & 1][(size_t)expert * nranks + (size_t)a->rank];
    i = a->seen[expert]++;
    if (choice->expert < 0)
        return EP_OK;
    if (i >= range->count)
        return ll_fail_row_count(ll, a->rank, ll->comm->rank, range->count, expert + ll->comm->rank * ll->n_local,
                                 choice->token, i);
    *ret_row = (const uint16_t *)(const void *)((const char *)a->combine->args.x +
                                                ((size_t)expert * rows + (size_t)(range->begin + i)) *
                                                    (size_t)ll->config.hidden * 2);
    return EP_OK;
}

/* One row of the answer. */
static ep_status add_row(struct answer *a, const uint16_t *const *rows, const float *weights, int n)
{
    size_t row_bytes = (size_t)a->ll->config.hidden * 2;

    if (a->made == a->n_rows)
        return ll_fail_damaged(a->ll, a->rank, EP_GROUP_LL_WEIGHTS, "the number of rows that it requests", a->n_rows);
    if (n == 1)
        memcpy(a->out, rows[0], row_bytes);
    else
        ep_rows_get()->weighted_sum_bf16((uint16_t *)(void *)a->out, rows, weights, n, a->ll->config.hidden);
    a->out += row_bytes;
    a->made++;
    return EP_OK;
}

/* The choices of one token, from a->choices[begin]; *ret_end: of the next one. */
static ep_status answer_token(struct answer *a, int32_t begin, int32_t *ret_end)
{
    const uint16_t *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    bool once = a->combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;
    int32_t token = a->choices[begin].token, end = begin;
    int n = 0;

    for (; end < a->n_choices && a->choices[end].token == token; end++) {
        if (end - begin == a->ll->config.topk)
            return ll_fail_damaged(a->ll, a->rank, EP_GROUP_LL_WEIGHTS, "the number of experts of a token",
                                   end - begin + 1);
        EP_TRY(find_row(a, &a->choices[end], &rows[n]));
        if (!rows[n])
            continue;
        weights[n++] = a->choices[end].weight;
        if (once) {
            EP_TRY(add_row(a, rows, weights, n));
            n = 0;
        }
    }
    *ret_end = end;
    return n ? add_row(a, rows, weights, n) : EP_OK;
}

static ep_status answer_rank(ep_ll *ll, const struct ll_combine *combine, int rank)
{
    struct host_ll *inner = ll->impl;
    const struct ll_request *request = ll_net_get_received(ll, rank, combine->number, LL_PAYLOAD_REQUEST);
    int64_t entries = (int64_t)combine->max_tokens * ll->config.topk;
    size_t row_bytes = (size_t)ll->config.hidden * 2;
    struct answer a = {.ll = ll, .combine = combine, .rank = rank, .seen = inner->seen};
    struct ll_request head;
    void *memory;

    ep_group_read_shared(&head, request, sizeof(head));
    EP_TRY(ll_check_combine_desc(ll, combine, rank, &head.desc));
    if (head.n_choices < 0 || head.n_choices > entries)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of its choices", head.n_choices);
    if (head.n_rows < 0 || head.n_rows > ll_max_reply_rows(ll, combine->max_tokens))
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of rows that it requests", head.n_rows);
    a.choices = request->choices;
    a.n_choices = head.n_choices;
    a.n_rows = head.n_rows;
    memset(a.seen, 0, (size_t)ll->n_local * sizeof(*a.seen));
    EP_TRY(
        ll_net_get_send_buffer(ll, rank, combine->number, LL_PAYLOAD_ROWS, (size_t)a.n_rows * row_bytes + 1, &memory));
    a.out = memory;
    for (int32_t i = 0; i < a.n_choices;)
        EP_TRY(answer_token(&a, i, &i));
    if (a.made != a.n_rows)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of rows that it requests", a.n_rows);
    EP_TRY(ll_send(ll, rank, combine->number, LL_PAYLOAD_ROWS, (size_t)a.n_rows * row_bytes));
    EP_TRY(ll_net_get_send_buffer(ll, rank, combine->number, LL_PAYLOAD_DESC, sizeof(struct ll_combine_desc), &memory));
    *(struct ll_combine_desc *)memory = make_desc(combine);
    EP_TRY(ll_send(ll, rank, combine->number, LL_PAYLOAD_DESC, sizeof(struct ll_combine_desc)));
    ll_net_signal(ll, rank, LL_SIGNAL_INPUT_READY, combine->number);
    return EP_OK;
}

/* Ranks that have their answers. */
struct answered {
    ep_ll *ll;
    const struct ll_combine *combine;
    bool rank[EP_MAX_RANKS];
};

/* Who has asked does not wait for who has not: it would take this rank for late. */
static ep_status answer_all(void *context)
{
    struct answered *answered = context;
    ep_ll *ll = answered->ll;
    const struct host_ll *inner = ll->impl;

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;
        uint64_t asked;

        if (!ll_is_remote(ll, rank) || inner->masked[rank] || answered->rank[rank])
            continue;
        asked = atomic_load_explicit(&ll_shared_of(inner, rank)->requested, memory_order_acquire);
        if (asked < answered->combine->number)
            continue;
        EP_TRY(answer_rank(ll, answered->combine, rank));
        answered->rank[rank] = true;
    }
    return EP_OK;
}

ep_status ll_send_replies(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    struct answered answered = {.ll = ll, .combine = combine};
    const struct ll_wait_work work = {answer_all, &answered};
    int nranks = ll->comm->nranks;

    for (int i = 1; inner->net && i < nranks; i++) {
        int rank = (ll->comm->rank + i) % nranks;

        if (ll_is_remote(ll, rank) && !inner->masked[rank])
            EP_TRY(ll_wait_rank(ll, rank, offsetof(struct ll_shared, requested), combine->number, EP_GROUP_LL_WEIGHTS,
                                &work));
    }
    return inner->net ? answer_all(&answered) : EP_OK;
}
