/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: combines. Within a node the owner of a token reads its rows directly. From another node
 * each rank sends one row for each token, the sum of its rows of that token, grouped and rounded as the contract says;
 * this needs the weights of the owner, so a combine lasts until all ranks that are not masked have begun theirs.
 */
#include "backend/host/lowlatency.h"

#include <string.h>

/* Choices and rows of this rank's tokens on each rank. */
struct counts {
    int32_t choices[EP_MAX_RANKS], rows[EP_MAX_RANKS];
};

/* Counts one row for each choice that is not excluded, or one for all rows that a rank has of a token. */
static void count(const ep_ll *ll, const struct ll_combine *combine, struct counts *ret_counts)
{
    const struct host_ll *inner = ll->impl;
    const int32_t *index = inner->index[combine->call & 1], *wanted = combine->index;
    size_t topk = (size_t)combine->args.topk;
    bool no_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;

    memset(ret_counts, 0, sizeof(*ret_counts));
    for (int t = 0; t < combine->args.n_tokens; t++, index += topk, wanted += topk)
        for (size_t k = 0; k < topk; k++) {
            if (index[k] >= 0)
                ret_counts->choices[index[k] / ll->n_local]++;
            if (no_reduce ? wanted[k] >= 0 : ll_is_first(ll, wanted, k))
                ret_counts->rows[wanted[k] / ll->n_local]++;
        }
}

static size_t request_bytes(int32_t n_choices)
{
    return sizeof(struct ll_request) + (size_t)n_choices * sizeof(struct ll_choice);
}

/* --- the owner of the tokens --- */

ep_status ll_send_requests(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    const int32_t *index = inner->index[combine->call & 1];
    size_t topk = (size_t)combine->args.topk;
    struct ll_request *requests[EP_MAX_RANKS] = {NULL};
    struct counts counts;

    if (!inner->net)
        return EP_OK;
    count(ll, combine, &counts);
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        if (!ll_is_remote(ll, rank) || inner->masked[rank])
            continue;
        requests[rank] =
            ll_net_get_send_buffer(ll, rank, combine->number, LL_PAYLOAD_REQUEST, request_bytes(counts.choices[rank]));
        if (!requests[rank])
            return EP_E_MEMORY;
        *requests[rank] = (struct ll_request){
            .desc = {.call = combine->call, .no_partial_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0},
            .n_rows = counts.rows[rank]};
    }
    for (size_t entry = 0; entry < (size_t)combine->args.n_tokens * topk; entry++) {
        int rank = index[entry] < 0 ? -1 : index[entry] / ll->n_local;
        int32_t expert = rank < 0 ? 0 : index[entry] % ll->n_local;

        if (rank < 0 || !requests[rank])
            continue;
        requests[rank]->choices[requests[rank]->n_choices++] =
            (struct ll_choice){.token = (int32_t)(entry / topk),
                               .expert = combine->index[entry] < 0 ? ~expert : expert,
                               .weight = combine->args.topk_weights[entry]};
    }
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        if (!requests[rank])
            continue;
        ll_net_send(ll, rank, combine->number, LL_PAYLOAD_REQUEST, request_bytes(counts.choices[rank]));
        ll_net_signal(ll, rank, LL_REQUESTED, combine->number);
    }
    return EP_OK;
}

/* --- the rank that has the rows --- */

/* A reply under construction. */
struct reply {
    ep_ll *ll;
    const struct ll_combine *combine;
    int rank;                        /* that requests */
    const struct ll_choice *choices; /* the peer may be overwriting them */
    int32_t n_choices, n_rows;
    int32_t *seen; /* [L] rows of each expert so far */
    unsigned char *out;
    int32_t made;
};

/* The row of a choice; excluded choices count as rows of the dispatch, too. NULL and EP_OK: excluded. */
static ep_status find_row(struct reply *reply, const struct ll_choice *choice, const uint16_t **ret_row)
{
    ep_ll *ll = reply->ll;
    const struct host_ll *inner = ll->impl;
    int32_t expert = choice->expert < 0 ? ~choice->expert : choice->expert, i;
    size_t nranks = (size_t)ll->comm->nranks, rows = nranks * (size_t)reply->combine->max_tokens;
    const struct ll_range *range;

    *ret_row = NULL;
    if (expert >= ll->n_local)
        return ll_fail_damaged(ll, reply->rank, EP_GROUP_LL_WEIGHTS, "an expert of a token", expert);
    range = &inner->ranges[reply->combine->call & 1][(size_t)expert * nranks + (size_t)reply->rank];
    i = reply->seen[expert]++;
    if (choice->expert < 0)
        return EP_OK;
    if (i >= range->count)
        return ll_fail_row_count(ll, reply->rank, ll->comm->rank, range->count, expert + ll->comm->rank * ll->n_local,
                                 choice->token, i);
    *ret_row = (const uint16_t *)(const void *)((const char *)reply->combine->args.x +
                                                ((size_t)expert * rows + (size_t)(range->begin + i)) *
                                                    (size_t)ll->config.hidden * 2);
    return EP_OK;
}

/* Adds one row to the reply. */
static ep_status add_row(struct reply *reply, const uint16_t *const *rows, const float *weights, int n)
{
    size_t row_bytes = (size_t)reply->ll->config.hidden * 2;

    if (reply->made == reply->n_rows)
        return ll_fail_damaged(reply->ll, reply->rank, EP_GROUP_LL_WEIGHTS, "the number of rows that it requests",
                               reply->n_rows);
    if (n == 1)
        memcpy(reply->out, rows[0], row_bytes);
    else
        ep_rows_get()->weighted_sum_bf16((uint16_t *)(void *)reply->out, rows, weights, n, reply->ll->config.hidden);
    reply->out += row_bytes;
    reply->made++;
    return EP_OK;
}

/* Replies to the choices of one token, from reply->choices[begin]; *ret_end: of the next token. */
static ep_status reply_token(struct reply *reply, int32_t begin, int32_t *ret_end)
{
    const uint16_t *rows[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];
    bool no_reduce = reply->combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;
    struct ll_choice choice;
    int32_t token = 0, end = begin;
    int n = 0;

    for (; end < reply->n_choices; end++) {
        ep_group_read_shared(&choice, &reply->choices[end], sizeof(choice));
        if (end == begin)
            token = choice.token;
        if (choice.token != token)
            break;
        if (end - begin == reply->ll->config.topk)
            return ll_fail_damaged(reply->ll, reply->rank, EP_GROUP_LL_WEIGHTS, "the number of experts of a token",
                                   end - begin + 1);
        EP_TRY(find_row(reply, &choice, &rows[n]));
        if (!rows[n])
            continue;
        weights[n++] = choice.weight;
        if (no_reduce) {
            EP_TRY(add_row(reply, rows, weights, n));
            n = 0;
        }
    }
    *ret_end = end;
    return n ? add_row(reply, rows, weights, n) : EP_OK;
}

static ep_status reply_to_rank(ep_ll *ll, const struct ll_combine *combine, int rank)
{
    struct host_ll *inner = ll->impl;
    const struct ll_request *request = ll_net_get_received(ll, rank, combine->number, LL_PAYLOAD_REQUEST);
    int64_t entries = (int64_t)combine->max_tokens * ll->config.topk;
    struct reply reply = {.ll = ll, .combine = combine, .rank = rank, .seen = inner->seen};
    struct ll_request head;
    size_t bytes;

    ep_group_read_shared(&head, request, sizeof(head));
    EP_TRY(ll_check_combine_desc(ll, combine, rank, &head.desc));
    if (head.n_choices < 0 || head.n_choices > entries)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of its choices", head.n_choices);
    if (head.n_rows < 0 || head.n_rows > ll_max_reply_rows(ll, combine->max_tokens))
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of rows that it requests", head.n_rows);
    reply.choices = request->choices;
    reply.n_choices = head.n_choices;
    reply.n_rows = head.n_rows;
    bytes = (size_t)head.n_rows * (size_t)ll->config.hidden * 2;
    memset(reply.seen, 0, (size_t)ll->n_local * sizeof(*reply.seen));
    reply.out = ll_net_get_send_buffer(ll, rank, combine->number, LL_PAYLOAD_ROWS, bytes);
    if (!reply.out)
        return EP_E_MEMORY;
    for (int32_t i = 0; i < reply.n_choices;)
        EP_TRY(reply_token(&reply, i, &i));
    if (reply.made != reply.n_rows)
        return ll_fail_damaged(ll, rank, EP_GROUP_LL_WEIGHTS, "the number of rows that it requests", reply.n_rows);
    ll_net_send(ll, rank, combine->number, LL_PAYLOAD_ROWS, bytes);
    ll_net_signal(ll, rank, LL_INPUT_READY, combine->number);
    return EP_OK;
}

/* Ranks whose replies were sent. */
struct reply_state {
    ep_ll *ll;
    const struct ll_combine *combine;
    bool rank[EP_MAX_RANKS];
};

/*
 * Replies to all ranks whose requests have arrived. A rank must not wait until others have sent their requests: it
 * would consider this rank late.
 */
static ep_status reply_to_ready(void *context)
{
    struct reply_state *state = context;
    ep_ll *ll = state->ll;
    const struct host_ll *inner = ll->impl;

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!ll_is_remote(ll, rank) || inner->masked[rank] || state->rank[rank] ||
            ll_load_counter(ll, rank, LL_REQUESTED) < state->combine->number)
            continue;
        EP_TRY(reply_to_rank(ll, state->combine, rank));
        state->rank[rank] = true;
    }
    return EP_OK;
}

ep_status ll_send_replies(ep_ll *ll, const struct ll_combine *combine)
{
    const struct host_ll *inner = ll->impl;
    struct reply_state state = {.ll = ll, .combine = combine};
    const struct ll_wait requests = {LL_REQUESTED,           combine->number,
                                     EP_GROUP_LL_WEIGHTS,    .ranks = LL_OTHER_NODES,
                                     .work = reply_to_ready, .context = &state};

    if (!inner->net)
        return EP_OK;
    EP_TRY(ll_wait(ll, &requests));
    return reply_to_ready(&state);
}
