/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans of fixed capacity whose routing may exceed it: the first operation fails alike on every rank, writes nothing,
 * and an update with rows that fit makes the plan usable again.
 */
#include "property.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUTINGS = 3, HIDDEN = 8 };

/* All ranks have equal values, except in `state`: its versions hold the layouts of this rank. */
struct capacity {
    const struct plan_shape *shape;
    struct plan_state state;
    int64_t rows[ROUTINGS][MAX_RANKS]; /* that each rank receives */
    int64_t most[MAX_RANKS];           /* max_recv_tokens of each rank */
};

static bool count_rows(const struct run *run, struct capacity *c, int number)
{
    for (int rank = 0; rank < run->shape->nranks; rank++) {
        struct reference_layout layout;

        if (!reference_layout_init(&c->state.versions[number].group, rank, c->shape->flags & EP_PLAN_EXPANDED,
                                   c->shape->alignment ? c->shape->alignment : 1, &layout, NULL))
            return false;
        c->rows[number][rank] = layout.n_rows;
        reference_layout_done(&layout);
    }
    return true;
}

/* Each rank has room for the rows of one of the routings, plus or minus a row. */
static bool draw(struct run *run, const struct op *op, struct capacity *c)
{
    struct random random = stream_of(run->shape, STREAM_CAPACITY, (uint64_t)run->op, 0);

    for (int v = 0; v < ROUTINGS; v++) {
        if (!draw_version(run, op->plan, v, &c->state.versions[v]) || !count_rows(run, c, v))
            return false;
        write_version(run, c->shape, &c->state.versions[v]);
        for (int rank = 0; rank < run->shape->nranks; rank++)
            if (c->shape->versions[v].n_tokens[rank] > c->state.max_tokens)
                c->state.max_tokens = c->shape->versions[v].n_tokens[rank];
    }
    for (int rank = 0; rank < run->shape->nranks; rank++) {
        int64_t most = c->rows[random_below(&random, ROUTINGS)][rank] + (int64_t)random_below(&random, 4) - 1;

        c->most[rank] = most > 0 ? most : 1;
    }
    c->state.max_recv_tokens = c->most[run->rank];
    return true;
}

static ep_status make(struct run *run, struct capacity *c)
{
    const struct version *version = &c->state.versions[0];
    int n = version->group.n_tokens[run->rank];
    ep_plan_args args =
        args_plan(n ? version->index : NULL, c->shape->idx_type, n, run->shape->topk, run->shape->n_experts);

    args.flags = c->shape->flags;
    args.expert_alignment = c->shape->alignment;
    args.max_tokens = c->state.max_tokens;
    args.max_recv_tokens = c->state.max_recv_tokens;
    return ep_plan_new(run->comm, &args, &c->state.plan);
}

static ep_status update(struct run *run, struct capacity *c, int number)
{
    const struct version *version = &c->state.versions[number];
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    args.n_tokens = version->group.n_tokens[run->rank];
    args.topk_idx = args.n_tokens ? version->index : NULL;
    return ep_plan_update(c->state.plan, &args, NULL);
}

/* Checks the status and the text of an operation against the counts of all ranks. Returns whether it ran. */
static bool is_as_expected(struct run *run, const struct capacity *c, int number, ep_status status, const char *what)
{
    char text[128] = "";
    int over = 0;

    while (over < run->shape->nranks && c->rows[number][over] <= c->most[over])
        over++;
    if (over == run->shape->nranks)
        return passed(run, status, what);
    snprintf(text, sizeof(text), "rank %d receives %lld rows but its max_recv_tokens is %lld", over,
             (long long)c->rows[number][over], (long long)c->most[over]);
    if (status != EP_E_CAPACITY || !strstr(ep_last_error(), text))
        fail_check(run, "%s: %s (%s), should be EP_E_CAPACITY: %s", what, ep_status_name(status), ep_last_error(),
                   text);
    return false;
}

static ep_status dispatch(struct run *run, const struct capacity *c, const uint16_t *x, void *recv_x)
{
    ep_stream stream = run->queues[random_below(&run->local, N_QUEUES)];
    ep_dispatch_args args = args_dispatch(EP_BF16, HIDDEN, x, recv_x, c->state.max_recv_tokens);
    ep_status status;

    if (random_below(&run->local, 2))
        return ep_dispatch_sync(c->state.plan, &args);
    /* Updates are queued in the stream NULL, so later calls run after them. */
    status = ep_dispatch(c->state.plan, &args, stream);
    return status == EP_OK ? ep_stream_sync(run->comm, stream) : status;
}

static void check_rows(struct run *run, const struct reference_layout *layout, const unsigned char *got, int number)
{
    for (int64_t i = 0; i < layout->n_rows; i++) {
        const struct reference_row *row = &layout->rows[i];
        uint16_t expected[HIDDEN];

        if (row->rank < 0)
            continue;
        fill_row(run->shape, STREAM_ROW, (uint64_t)number, row_key(row->rank, row->token), true, expected,
                 sizeof(expected));
        if (memcmp(got + (size_t)i * sizeof(expected), expected, sizeof(expected)) != 0)
            fail_check(run, "routing %d: received row %lld is not token %d of rank %d", number, (long long)i,
                       row->token, row->rank);
    }
}

static void check_dispatch(struct run *run, const struct capacity *c, int number)
{
    const struct version *version = &c->state.versions[number];
    size_t row_bytes = HIDDEN * sizeof(uint16_t), n = (size_t)version->group.n_tokens[run->rank];
    int64_t n_received = 0;
    struct buffer x = {0}, received = {0};

    if (!buffer_new(run, n * row_bytes, &x) ||
        !buffer_new(run, (size_t)c->state.max_recv_tokens * row_bytes, &received)) {
        fail_check(run, "no memory");
        goto free_buffers;
    }
    for (size_t t = 0; t < n; t++)
        fill_row(run->shape, STREAM_ROW, (uint64_t)number, row_key(run->rank, (int)t), true, x.at + t * row_bytes,
                 row_bytes);
    if (is_as_expected(run, c, number, dispatch(run, c, (const uint16_t *)(const void *)x.at, received.at),
                       "dispatch")) {
        n_received = version->layout.n_rows;
        check_rows(run, &version->layout, received.at, number);
    }
    if (!all_bytes(received.at + (size_t)n_received * row_bytes, received.bytes - (size_t)n_received * row_bytes,
                   UNTOUCHED))
        fail_check(run, "routing %d: rows behind the %lld received ones were written", number, (long long)n_received);
free_buffers:
    if (!buffer_free(&received) || !buffer_free(&x))
        fail_check(run, "routing %d: a guard was written", number);
}

void check_capacity(struct run *run, const struct op *op)
{
    struct plan_shape shape = run->shape->plans[op->plan];
    struct capacity c = {.shape = &shape};

    shape.mask = false;
    if (!draw(run, op, &c))
        fail_check(run, "no memory");
    for (int v = 0; v < ROUTINGS && !run->wrong; v++) {
        if (!passed(run, v ? update(run, &c, v) : make(run, &c), v ? "ep_plan_update" : "ep_plan_new"))
            break;
        check_dispatch(run, &c, v);
        /* Refused operations stay refused, and successful ones succeed again. */
        if (!run->wrong)
            check_dispatch(run, &c, v);
    }
    plan_done(&c.state);
}
