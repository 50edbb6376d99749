/* SPDX-License-Identifier: Apache-2.0 */
#include "routings.h"

#include "common/memory.h"
#include "random.h"

#include <epkit/types.h>
#include <stdlib.h>
#include <string.h>

#define GROUPS 8       /* of experts, in DeepSeek-V3 */
#define GROUPS_TAKEN 4 /* ... of which a token uses at most this many */

/* Streams below the routing's seed. */
enum { STREAM_EXPERTS = 1, STREAM_WEIGHTS, STREAM_EXPERT_ORDER, STREAM_RANK_ORDER };

struct routing {
    struct routing_spec spec;
    uint32_t popularity[EP_MAX_EXPERTS];  /* zipf: of the p-th most popular expert */
    uint32_t total;                       /* zipf: their sum */
    int32_t expert_order[EP_MAX_EXPERTS]; /* zipf: the p-th most popular expert */
    int32_t position[EP_MAX_RANKS];       /* one, empty: index of a rank in a random order */
    int32_t receivers[EP_MAX_RANKS];      /* empty: ranks that receive something, ascending */
    int n_receivers;
    struct routing_file file;
};

const struct routing_name routing_names[] = {
    {"uniform", ROUTING_UNIFORM}, {"zipf", ROUTING_ZIPF},   {"grouped", ROUTING_GROUPED},   {"one", ROUTING_ONE},
    {"dropped", ROUTING_DROPPED}, {"empty", ROUTING_EMPTY}, {"repeated", ROUTING_REPEATED}, {NULL, ROUTING_FILE},
};

const struct routing_name *routing_find(const char *name)
{
    for (const struct routing_name *row = routing_names; row->name; row++)
        if (!strcmp(row->name, name))
            return row;
    return NULL;
}

static void shuffle(struct random *random, int32_t *items, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int j = (int)random_below(random, (uint32_t)i + 1);
        int32_t item = items[i];

        items[i] = items[j];
        items[j] = item;
    }
}

/* k distinct numbers below n in random order, by Floyd's algorithm: k draws for any n. */
static void draw_distinct(struct random *random, int n, int k, int32_t *ret_numbers)
{
    int have = 0;

    for (int last = n - k; last < n; last++) {
        int32_t number = (int32_t)random_below(random, (uint32_t)last + 1);

        for (int i = 0; i < have; i++)
            if (ret_numbers[i] == number) {
                number = last;
                break;
            }
        ret_numbers[have++] = number;
    }
    shuffle(random, ret_numbers, k);
}

static void draw_zipf(const struct routing *routing, struct random *random, int32_t *ret_experts)
{
    int32_t taken[EP_MAX_TOPK];
    uint32_t total = routing->total;

    for (int k = 0; k < routing->spec.topk; k++) {
        uint32_t left = random_below(random, total);
        int p;

        /* Iterates over the experts that this token has not selected yet, the most popular first. */
        for (p = 0;; p++) {
            bool is_taken = false;

            for (int i = 0; i < k; i++)
                is_taken |= taken[i] == p;
            if (is_taken)
                continue;
            if (left < routing->popularity[p])
                break;
            left -= routing->popularity[p];
        }
        taken[k] = p;
        total -= routing->popularity[p];
        ret_experts[k] = routing->expert_order[p];
    }
}

/* Index of the largest of n scores, the first of equal ones. */
static int best_score(const uint64_t *scores, int n)
{
    int best = 0;

    for (int i = 1; i < n; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}

static void draw_grouped(const struct routing *routing, struct random *random, int32_t *ret_experts)
{
    int group_size = routing->spec.n_experts / GROUPS;
    uint64_t score[EP_MAX_EXPERTS], group_score[GROUPS];
    bool group_taken[GROUPS] = {false};

    /* Scores are positive; zero marks excluded experts and groups. */
    for (int group = 0; group < GROUPS; group++) {
        uint64_t first = 0, second = 0;

        for (int i = 0; i < group_size; i++) {
            uint64_t value = (random_next(random) >> 32) + 1;

            score[group * group_size + i] = value;
            if (value > first) {
                second = first;
                first = value;
            } else if (value > second) {
                second = value;
            }
        }
        group_score[group] = first + second;
    }
    for (int i = 0; i < GROUPS_TAKEN; i++) {
        int group = best_score(group_score, GROUPS);

        group_taken[group] = true;
        group_score[group] = 0;
    }
    for (int group = 0; group < GROUPS; group++)
        if (!group_taken[group])
            memset(&score[group * group_size], 0, (size_t)group_size * sizeof(score[0]));
    for (int k = 0; k < routing->spec.topk; k++) {
        int expert = best_score(score, GROUPS * group_size);

        ret_experts[k] = expert;
        score[expert] = 0;
    }
}

/* Selects experts of one rank after the other until the token has K. */
static void draw_one(const struct routing *routing, struct random *random, int32_t *ret_experts)
{
    const struct routing_spec *spec = &routing->spec;
    int n_local = spec->n_experts / spec->n_ranks;
    int rank = routing->position[0];

    for (int k = 0; k < spec->topk;) {
        int n = spec->topk - k < n_local ? spec->topk - k : n_local;

        draw_distinct(random, n_local, n, &ret_experts[k]);
        for (int i = 0; i < n; i++)
            ret_experts[k + i] += rank * n_local;
        k += n;
        rank = (rank + 1) % spec->n_ranks;
    }
}

static void draw_dropped(const struct routing *routing, struct random *random, int32_t *ret_experts)
{
    bool drop_token = random_below(random, 8) == 0;

    draw_distinct(random, routing->spec.n_experts, routing->spec.topk, ret_experts);
    for (int k = 0; k < routing->spec.topk; k++)
        if (random_below(random, 4) == 0 || drop_token)
            ret_experts[k] = -1;
}

/* Experts of receiving ranks; if there are fewer than K, the other selections are dropped. */
static void draw_empty(const struct routing *routing, struct random *random, int32_t *ret_experts)
{
    int n_local = routing->spec.n_experts / routing->spec.n_ranks;
    int n = routing->n_receivers * n_local;
    int k = n < routing->spec.topk ? n : routing->spec.topk;

    draw_distinct(random, n, k, ret_experts);
    for (int i = 0; i < k; i++)
        ret_experts[i] = routing->receivers[ret_experts[i] / n_local] * n_local + ret_experts[i] % n_local;
    for (int i = k; i < routing->spec.topk; i++)
        ret_experts[i] = -1;
}

/* The experts of a token in the file. */
static const int32_t *file_token(const struct routing *routing, int rank, int token)
{
    const struct routing_file *file = &routing->file;
    int64_t first = file->n_tables > 1 ? (int64_t)rank * file->n_tokens : 0;

    return &file->experts[(first + token) * file->topk];
}

static void draw_weights(struct random *random, int topk, float *ret_weights)
{
    float sum = 0;

    /* 24 bits are exact, and the division is correctly rounded: the same on every platform. */
    for (int k = 0; k < topk; k++) {
        ret_weights[k] = (float)((random_next(random) >> 40) + 1) / 16777216.0f;
        sum += ret_weights[k];
    }
    for (int k = 0; k < topk; k++)
        ret_weights[k] /= sum;
}

void routing_token(const struct routing *routing, int rank, int token, int32_t *ret_experts, float *ret_weights)
{
    const struct routing_spec *spec = &routing->spec;
    struct random random = {random_key(spec->seed, STREAM_EXPERTS, (uint64_t)rank, (uint64_t)token), 0};
    struct random weights = {random_key(spec->seed, STREAM_WEIGHTS, (uint64_t)rank, (uint64_t)token), 0};

    if (ret_weights)
        draw_weights(&weights, spec->topk, ret_weights);
    if (!ret_experts)
        return;
    switch (spec->kind) {
    case ROUTING_UNIFORM:
        draw_distinct(&random, spec->n_experts, spec->topk, ret_experts);
        break;
    case ROUTING_ZIPF:
        draw_zipf(routing, &random, ret_experts);
        break;
    case ROUTING_GROUPED:
        draw_grouped(routing, &random, ret_experts);
        break;
    case ROUTING_ONE:
        draw_one(routing, &random, ret_experts);
        break;
    case ROUTING_DROPPED:
        draw_dropped(routing, &random, ret_experts);
        break;
    case ROUTING_EMPTY:
        draw_empty(routing, &random, ret_experts);
        break;
    case ROUTING_REPEATED:
        for (int k = 0; k < spec->topk; k++)
            ret_experts[k] = (int32_t)random_below(&random, (uint32_t)spec->n_experts);
        break;
    case ROUTING_FILE:
        memcpy(ret_experts, file_token(routing, rank, token), (size_t)spec->topk * sizeof(*ret_experts));
        break;
    }
}

void routing_fill(const struct routing *routing, int rank, int32_t *ret_experts, float *ret_weights)
{
    int n_tokens = routing_tokens(routing, rank);
    size_t topk = (size_t)routing->spec.topk;

    for (int token = 0; token < n_tokens; token++)
        routing_token(routing, rank, token, ret_experts ? ret_experts + (size_t)token * topk : NULL,
                      ret_weights ? ret_weights + (size_t)token * topk : NULL);
}

int routing_tokens(const struct routing *routing, int rank)
{
    /* By position modulo 4: 0 sends and receives, 1 only receives, 2 only sends, 3 does neither. */
    if (routing->spec.kind == ROUTING_EMPTY && routing->position[rank] % 4 % 2 == 1)
        return 0;
    return routing->spec.n_tokens;
}

const struct routing_spec *routing_get_spec(const struct routing *routing)
{
    return &routing->spec;
}

/* x^(1/5) by Newton's method: uses correctly rounded operations only, so it is the same everywhere, unlike pow(). */
static double fifth_root(double x)
{
    double y = x;

    for (int i = 0; i < 64; i++)
        y -= (y - x / (y * y * y * y)) / 5;
    return y;
}

static void make_zipf(struct routing *routing)
{
    int n = routing->spec.n_experts;
    struct random random = {random_key(routing->spec.seed, STREAM_EXPERT_ORDER, 0, 0), 0};

    /* In units of 2^-26: 3000 for the last of 4096, and the sum stays below 2^29. */
    for (int p = 0; p < n; p++) {
        double x = p + 1;

        routing->popularity[p] = (uint32_t)(67108864.0 / (x * fifth_root(x)));
        routing->total += routing->popularity[p];
        routing->expert_order[p] = p;
    }
    shuffle(&random, routing->expert_order, n);
}

static void make_rank_order(struct routing *routing)
{
    int n = routing->spec.n_ranks;
    struct random random = {random_key(routing->spec.seed, STREAM_RANK_ORDER, 0, 0), 0};

    for (int rank = 0; rank < n; rank++)
        routing->position[rank] = rank;
    shuffle(&random, routing->position, n);
    for (int rank = 0; rank < n; rank++)
        if (routing->position[rank] % 4 < 2)
            routing->receivers[routing->n_receivers++] = rank;
}

static bool check_file_token(const struct routing *routing, int rank, int token, struct check_error *error)
{
    const int32_t *experts = file_token(routing, rank, token);

    for (int k = 0; k < routing->spec.topk; k++) {
        int32_t expert = experts[k];

        if (expert < -1 || expert >= routing->spec.n_experts)
            return check_fail(error, "%s: rank %d token %d selection %d: expert %d is not within -1 .. %d",
                              routing->spec.path, rank, token, k, expert, routing->spec.n_experts - 1);
    }
    return true;
}

static bool make_file(struct routing *routing, struct check_error *error)
{
    struct routing_spec *spec = &routing->spec;
    const struct routing_file *file = &routing->file;

    if (!routing_file_load(spec->path, &routing->file, error))
        return false;
    if (file->n_tables > 1 && file->n_tables != spec->n_ranks)
        return check_fail(error, "%s: contains the routing of %d ranks, but there are %d", spec->path, file->n_tables,
                          spec->n_ranks);
    if (spec->topk && spec->topk != file->topk)
        return check_fail(error, "%s: contains %d selections per token; another number was requested", spec->path,
                          file->topk);
    if (spec->n_tokens > file->n_tokens)
        return check_fail(error, "%s: contains %d tokens per rank; %d were requested", spec->path, file->n_tokens,
                          spec->n_tokens);
    spec->topk = file->topk;
    if (!spec->n_tokens)
        spec->n_tokens = file->n_tokens;
    for (int rank = 0; rank < file->n_tables; rank++)
        for (int token = 0; token < spec->n_tokens; token++)
            if (!check_file_token(routing, rank, token, error))
                return false;
    return true;
}

static bool check_spec(const struct routing_spec *spec, struct check_error *error)
{
    if (spec->n_ranks < 1 || spec->n_ranks > EP_MAX_RANKS)
        return check_fail(error, "%d ranks; 1 to %d are possible", spec->n_ranks, EP_MAX_RANKS);
    if (spec->n_experts < 1 || spec->n_experts > EP_MAX_EXPERTS)
        return check_fail(error, "%d experts; 1 to %d are possible", spec->n_experts, EP_MAX_EXPERTS);
    if (spec->n_experts % spec->n_ranks)
        return check_fail(error, "%d experts do not divide among %d ranks", spec->n_experts, spec->n_ranks);
    if (spec->n_tokens < 0)
        return check_fail(error, "%d tokens", spec->n_tokens);
    if (spec->kind == ROUTING_FILE)
        return spec->topk >= 0 ? true : check_fail(error, "top-%d", spec->topk);
    if (spec->topk < 1 || spec->topk > EP_MAX_TOPK)
        return check_fail(error, "top-%d; 1 to %d are possible", spec->topk, EP_MAX_TOPK);
    if (spec->kind != ROUTING_REPEATED && spec->topk > spec->n_experts)
        return check_fail(error, "top-%d of %d experts", spec->topk, spec->n_experts);
    if (spec->kind == ROUTING_GROUPED && spec->n_experts % GROUPS)
        return check_fail(error, "grouped routing: %d experts do not divide into %d groups", spec->n_experts, GROUPS);
    if (spec->kind == ROUTING_GROUPED && spec->topk > spec->n_experts / GROUPS * GROUPS_TAKEN)
        return check_fail(error, "grouped routing: top-%d of the %d experts in %d groups", spec->topk,
                          spec->n_experts / GROUPS * GROUPS_TAKEN, GROUPS_TAKEN);
    return true;
}

bool routing_new(const struct routing_spec *spec, struct routing **ret_routing, struct check_error *error)
{
    struct routing *routing;

    if (!check_spec(spec, error))
        return false;
    routing = memory_new(1, sizeof(*routing));
    routing->spec = *spec;
    if (spec->kind == ROUTING_ZIPF)
        make_zipf(routing);
    if (spec->kind == ROUTING_ONE || spec->kind == ROUTING_EMPTY)
        make_rank_order(routing);
    if (spec->kind == ROUTING_FILE && !make_file(routing, error)) {
        routing_free(routing);
        return false;
    }
    *ret_routing = routing;
    return true;
}

void routing_free(struct routing *routing)
{
    if (!routing)
        return;
    routing_file_done(&routing->file);
    free(routing);
}
