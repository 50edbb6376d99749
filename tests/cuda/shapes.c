/* SPDX-License-Identifier: Apache-2.0 */
#include "shapes.h"

#include <stdio.h>

/* Limits of the elements of a rank's rows, received ones included: in most cases, and in one of ten. */
#define USUAL ((int64_t)1 << 20)
#define LARGE ((int64_t)12 << 20)
#define SMALL ((int64_t)1 << 16)

static uint64_t draw(uint64_t *random, uint64_t below)
{
    return (next_random(random) >> 32) * below >> 32;
}

static bool one_of(uint64_t *random, uint64_t n)
{
    return draw(random, n) == 0;
}

static int min_of(int64_t a, int64_t b)
{
    return (int)(a < b ? a : b);
}

static uint64_t seed_of(const struct shape_of *of, int index)
{
    return of->seed * 1000003u + (uint64_t)index * 4096 + (uint64_t)of->rank * 64 + 1;
}

void shape_edge(const struct shape_of *of, int index, struct shape *ret_shape)
{
    struct shape shape = *shape_edge_of_all(index);

    shape.n_experts += (of->nranks - shape.n_experts % of->nranks) % of->nranks;
    if (shape.n_tokens == EDGE_LONE && of->rank != of->nranks - 1)
        shape.n_tokens = of->rank % 3;
    if (of->small && shape.n_tokens != EDGE_KEPT) {
        shape.hidden = min_of(shape.hidden, 2048);
        shape.n_tokens = min_of(shape.n_tokens, 64);
    }
    shape.seed = seed_of(of, index);
    *ret_shape = shape;
}

/* Tokens differ between ranks; sometimes a rank has none, or no rank has any. */
static int draw_tokens(const struct shape_of *of, int max, uint64_t *random)
{
    int none = (int)draw(random, 4 * (uint64_t)of->nranks), mine = 0;
    bool no_tokens = one_of(random, 40);

    for (int rank = 0; rank < of->nranks; rank++) {
        int n = max - (int)draw(random, (uint64_t)max / 2 + 1);

        if (rank == of->rank && rank != none && !no_tokens)
            mine = n;
    }
    return mine;
}

/* In most cases all received buffers use one kind of memory. */
static void draw_memory(uint64_t *random, struct shape *shape)
{
    bool mixed = one_of(random, 4), some_ordinary = one_of(random, 4);
    uint64_t some = draw(random, AT_ALL + 1), ranks = 1 + draw(random, N_ORDINARY_ON - 1);

    shape->symmetric = mixed ? (unsigned)some : one_of(random, 2) ? AT_ALL : 0;
    shape->ordinary_on = some_ordinary ? (enum ordinary_on)ranks : NO_RANK;
}

void shape_random(const struct shape_of *of, int index, uint64_t *random, struct shape *ret_shape)
{
    struct shape shape = {.dtype = one_of(random, 3) ? EP_F8E4M3 : EP_BF16,
                          .idx_type = one_of(random, 2) ? EP_I32 : EP_I64};
    int64_t budget = one_of(random, 10) ? LARGE : USUAL, copies;
    int max_local = 2048 / of->nranks, local, most;

    shape.topk = one_of(random, 3) ? 1 + (int)draw(random, 32) : 1 + (int)draw(random, 9);
    local = 1 + (int)draw(random, one_of(random, 4) ? (uint64_t)max_local : 40);
    shape.n_experts = of->nranks * local;
    while (shape.n_experts < shape.topk)
        shape.n_experts += of->nranks;
    shape.hidden = 8 * (1 + (int)draw(random, one_of(random, 3) ? 2048 : 256));
    if (shape.dtype == EP_F8E4M3) {
        shape.hidden = min_of((shape.hidden + 511) / 512 * 512, 16384);
        shape.scale_type = one_of(random, 3) ? EP_UE8M0 : one_of(random, 4) ? 0 : EP_F32;
        shape.strided = one_of(random, 2);
        shape.quantized = one_of(random, 2);
        shape.scale_type = shape.quantized && !shape.scale_type ? EP_UE8M0_32 : shape.scale_type;
        if (shape.quantized && one_of(random, 3)) {
            shape.dtype = EP_F4E2M1;
            shape.scale_type = EP_F8E4M3;
        }
    }
    shape.alignment = 1 << draw(random, 6);
    shape.spare_rows = (int)draw(random, 20);
    shape.n_bias = (int)draw(random, 3);
    shape.expanded = one_of(random, 4);
    shape.zero_padding = shape.expanded && one_of(random, 2);
    draw_memory(random, &shape);
    shape.fixed_capacity = one_of(random, 4);
    shape.choice = !one_of(random, 4);
    shape.async = one_of(random, 3);
    shape.after = shape.async && one_of(random, 2);
    shape.skewed = one_of(random, 6);
    shape.repeated = one_of(random, 4);
    shape.holes = one_of(random, 3);
    shape.own_stream = one_of(random, 2);
    copies = shape.expanded ? shape.topk : min_of(shape.topk, of->nranks);
    budget = of->small ? SMALL : budget;
    most = min_of(budget / shape.hidden / copies, of->small ? 60 : 700);
    shape.n_tokens = draw_tokens(of, most ? most : 1, random);
    if (of->small)
        shape.hidden = min_of(shape.hidden, 2048);
    shape.seed = seed_of(of, index);
    *ret_shape = shape;
}

void shape_print(const struct shape *s, char *ret_text, size_t bytes)
{
    static const char *const ordinary_on[N_ORDINARY_ON] = {"", " but on the first rank", " but on the last rank",
                                                           " on one rank"};
    unsigned at = s->symmetric;
    char memory[100];

    snprintf(memory, sizeof(memory), "ordinary");
    if (at)
        snprintf(memory, sizeof(memory), "symmetric:%s%s%s%s%s", at & AT_X ? " x" : "", at & AT_SCALES ? " scales" : "",
                 at & AT_INDEX ? " indices" : "", at & AT_WEIGHTS ? " weights" : "", ordinary_on[s->ordinary_on]);
    snprintf(
        ret_text, bytes,
        "%d tokens here, hidden %d, top-%d of %d experts, %s%s, scales %s%s, indices %s, alignment %d, %d biases%s%s%s"
        "%s%s%s%s%s%s%s, memory %s, seed of the data %llu",
        s->n_tokens, s->hidden, s->topk, s->n_experts, ep_dtype_name((ep_dtype)s->dtype),
        s->quantized ? " quantised by the call" : "", s->scale_type ? ep_dtype_name((ep_dtype)s->scale_type) : "none",
        s->strided ? " strided" : "", ep_dtype_name((ep_dtype)s->idx_type), s->alignment, s->n_bias,
        s->expanded ? ", expanded" : "", s->zero_padding ? ", padding zeroed" : "",
        s->fixed_capacity ? ", fixed capacity" : "", s->choice ? ", with weights" : "",
        s->async ? ", asynchronous" : "", s->after ? " after an event" : "", s->skewed ? ", skewed" : "",
        s->repeated ? ", repeated" : "", s->holes ? ", holes" : "", s->own_stream ? ", own stream" : "", memory,
        (unsigned long long)s->seed);
}

/* --- low latency ------------------------------------------------------------------------------------------------ */

#define HOOK EP_LL_RECV_HOOK
#define ASYNC TEST_ASYNC
#define ZERO EP_LL_ZERO_COPY

/* Bytes of all rows of all experts of a rank, as bf16. */
#define LL_USUAL ((int64_t)4 << 20)
#define LL_LARGE ((int64_t)64 << 20)
#define LL_SMALL ((int64_t)256 << 10)

/* ONE: the last rank has the tokens. TO_FIRST: all experts of a token are on the first rank. */
enum spread { ALL_RANKS, ONE_RANK, TO_FIRST, ONE_TO_FIRST };

struct ll_edge {
    int max_tokens, n_tokens, hidden, topk;
    int n_experts; /* rounded up to a multiple of the ranks; TO_FIRST: of each rank */
    enum ll_format format;
    enum spread spread;
    uint32_t dispatch_flags, combine_flags;
};

/*
 * The division of a combine's work: more tokens than the GPU has warps (2112 of an H200), rows that a warp sums in
 * several pieces or in one, widths that do not divide evenly, many slots for few tokens. Smaller ones would test
 * nothing. The largest comes first: later ones then reuse its segments.
 */
static const struct ll_edge ll_large_edges[] = {
    {1100, 1100, 1024, 8, 8, LL_F32, TO_FIRST, 0, 0},
    {24, 24, 16384, 8, 8, LL_BF16, TO_FIRST, ASYNC, ASYNC},
    {128, 111, 1920, 8, 16, LL_ROUNDED, ALL_RANKS, HOOK, HOOK},
    {1500, 1490, 384, 6, 8, LL_F32, ALL_RANKS, 0, ZERO},
    {2000, 9, 256, 4, 16, LL_F32, ALL_RANKS, 0, HOOK},
    {96, 96, 2176, 4, 16, LL_BF16, ALL_RANKS, 0, ZERO},
    {300, 280, 896, 8, 8, LL_BF16, ONE_TO_FIRST, HOOK | ASYNC, HOOK | ASYNC},
    {32, 30, 1152, 32, 32, LL_F32, TO_FIRST, 0, 0},
    {1500, 700, 128, 5, 6, LL_BF16, ONE_RANK, 0, 0},
    {100, 97, 640, 1, 12, LL_BF16, ALL_RANKS, 0, 0},
};

/* Others, in the same format. */
static const struct ll_edge ll_edges[] = {
    {128, 128, 7168, 8, 64, LL_F32, ALL_RANKS, 0, ZERO},
    {16, 16, 16384, 32, 64, LL_UE8M0, ALL_RANKS, HOOK, HOOK},
    {4, 4, 65536, 4, 16, LL_BF16, ALL_RANKS, 0, 0},
    {4, 3, 65536, 2, 8, LL_ROUNDED, ALL_RANKS, ASYNC, ASYNC},
    {2, 2, 128, 8, 4096, LL_BF16, ALL_RANKS, 0, ZERO},
    {64, 64, 512, 32, 32, LL_UE8M0, ALL_RANKS, 0, 0}, /* every token selects all experts, or nearly */
    {4096, 4096, 128, 2, 8, LL_F32, ALL_RANKS, HOOK | ASYNC, HOOK | ASYNC},
    {512, 500, 512, 8, 144, LL_BF16, ONE_RANK, 0, HOOK},
    {1, 1, 128, 1, 1, LL_BF16, ALL_RANKS, 0, 0},
    {8, 0, 256, 3, 24, LL_F32, ALL_RANKS, 0, 0},
    {8, 0, 512, 3, 24, LL_UE8M0, ALL_RANKS, HOOK, HOOK | ZERO},
    {128, 128, 2048, 8, 32, LL_BF16, ONE_RANK, 0, ZERO},
};

#define N_LL_EDGES ((int)(sizeof(ll_edges) / sizeof(ll_edges[0])))
#define N_LL_LARGE ((int)(sizeof(ll_large_edges) / sizeof(ll_large_edges[0])))

/* Each with both kinds of sums. */
int ll_shapes_edges(bool small)
{
    return 2 * (small ? N_LL_EDGES : N_LL_EDGES + N_LL_LARGE);
}

static int experts_of(const struct shape_of *of, int wished)
{
    int experts = (wished + of->nranks - 1) / of->nranks * of->nranks;

    return experts > EP_MAX_EXPERTS ? EP_MAX_EXPERTS / of->nranks * of->nranks : experts;
}

void ll_shape_edge(const struct shape_of *of, int index, struct ll_shape *ret_shape)
{
    int number = index / 2;
    const struct ll_edge *edge = number < N_LL_EDGES ? &ll_edges[number] : &ll_large_edges[number - N_LL_EDGES];
    struct ll_shape shape = {.config = EP_LL_CONFIG_INIT, .n_rounds = 2, .overlap = true};
    bool lone = edge->spread == ONE_RANK || edge->spread == ONE_TO_FIRST;
    bool skewed = edge->spread == TO_FIRST || edge->spread == ONE_TO_FIRST;
    int n_tokens = lone && of->rank != of->nranks - 1 ? 0 : edge->n_tokens;
    int n_experts = skewed ? edge->n_experts * of->nranks : edge->n_experts;

    shape.config.max_tokens = of->small ? min_of(edge->max_tokens, 32) : edge->max_tokens;
    shape.config.hidden = of->small ? min_of(edge->hidden, 1024) : edge->hidden;
    shape.config.n_experts = experts_of(of, of->small ? min_of(n_experts, 64) : n_experts);
    shape.config.topk = edge->topk;
    shape.config.flags = index % 2 ? EP_LL_NO_PARTIAL_REDUCE : 0;
    for (int i = 0; i < shape.n_rounds; i++)
        shape.round[i] = (struct ll_round){.n_tokens = min_of(n_tokens, shape.config.max_tokens),
                                           .format = edge->format,
                                           .idx_type = (number + i) % 2 ? EP_I32 : EP_I64,
                                           .sources = i == 0,
                                           .symmetric = number % 2,
                                           .skewed = skewed,
                                           .dispatch_flags = edge->dispatch_flags,
                                           .combine_flags = edge->combine_flags,
                                           .seed = seed_of(of, index) + (uint64_t)i};
    *ret_shape = shape;
}

static struct ll_round draw_round(const struct shape_of *of, const ep_ll_config *config, uint64_t *random)
{
    struct ll_round round = {.idx_type = one_of(random, 2) ? EP_I32 : EP_I64};
    uint32_t async = one_of(random, 2) ? ASYNC : 0;

    round.format = (enum ll_format)draw(random, LL_FORMATS);
    if (round.format == LL_UE8M0 && config->hidden % (4 * EP_SCALE_BLOCK))
        round.format = LL_ROUNDED;
    round.sources = !one_of(random, 3);
    round.symmetric = one_of(random, 3);
    round.echo = round.format == LL_BF16 && one_of(random, 2);
    round.skewed = one_of(random, 6);
    round.holes = one_of(random, 3);
    round.dispatch_flags = async | (one_of(random, 3) ? HOOK : 0);
    round.combine_flags = async | (one_of(random, 3) ? HOOK : 0) | (one_of(random, 3) ? ZERO : 0);
    round.n_tokens = draw_tokens(of, 1 + (int)draw(random, (uint64_t)config->max_tokens), random);
    if (one_of(random, 3)) /* all ranks draw the same, and have another one each */
        round.topk = 1 + ((int)draw(random, (uint64_t)config->topk) + of->rank) % config->topk;
    return round;
}

void ll_shape_random(const struct shape_of *of, int index, uint64_t *random, struct ll_shape *ret_shape)
{
    struct ll_shape shape = {.config = EP_LL_CONFIG_INIT};
    int64_t budget = one_of(random, 10) ? LL_LARGE : LL_USUAL;
    uint64_t max_local = 2048 / (uint64_t)of->nranks;
    int wide = one_of(random, 4) ? 128 : 16; /* blocks of a row */

    budget = of->small ? LL_SMALL : budget;
    shape.config.topk = one_of(random, 3) ? 1 + (int)draw(random, 32) : 1 + (int)draw(random, 9);
    shape.config.n_experts = experts_of(of, shape.config.topk);
    shape.config.n_experts += of->nranks * (int)draw(random, one_of(random, 5) ? max_local : 16);
    shape.config.n_experts = experts_of(of, min_of(shape.config.n_experts, of->small ? 64 : 2048));
    shape.config.hidden = EP_SCALE_BLOCK * (1 + (int)draw(random, (uint64_t)(of->small ? 8 : wide)));
    if (one_of(random, 2))
        shape.config.hidden = (shape.config.hidden + 511) / 512 * 512;
    shape.config.max_tokens =
        min_of(budget / ((int64_t)shape.config.n_experts * shape.config.hidden * 2), 1 + (int)draw(random, 256));
    if (!shape.config.max_tokens)
        shape.config.max_tokens = 1;
    shape.n_rounds = 1 + (int)draw(random, LL_MAX_ROUNDS);
    shape.overlap = one_of(random, 2);
    shape.config.flags = one_of(random, 2) ? EP_LL_NO_PARTIAL_REDUCE : 0;
    for (int i = 0; i < shape.n_rounds; i++) {
        shape.round[i] = draw_round(of, &shape.config, random);
        shape.round[i].seed = seed_of(of, index) + (uint64_t)i;
    }
    *ret_shape = shape;
}

static void print_round(const struct ll_round *round, char *ret_text, size_t bytes)
{
    static const char *const formats[LL_FORMATS] = {"bf16", "fp8 f32", "fp8 rounded f32", "fp8 ue8m0"};

    snprintf(ret_text, bytes,
             "; %d tokens here, top-%d (0: as all), %s, indices %s%s%s%s%s%s, dispatch%s%s, combine%s%s%s, seed %llu",
             round->n_tokens, round->topk, formats[round->format], ep_dtype_name((ep_dtype)round->idx_type),
             round->sources ? ", sources" : "", round->symmetric ? ", symmetric" : "", round->echo ? ", echo" : "",
             round->skewed ? ", skewed" : "", round->holes ? ", holes" : "",
             round->dispatch_flags & HOOK ? " hook" : "", round->dispatch_flags & ASYNC ? " asynchronous" : "",
             round->combine_flags & HOOK ? " hook" : "", round->combine_flags & ZERO ? " zero copy" : "",
             round->combine_flags & ASYNC ? " asynchronous" : "", (unsigned long long)round->seed);
}

void ll_shape_print(const struct ll_shape *shape, char *ret_text, size_t bytes)
{
    int at = snprintf(ret_text, bytes, "low latency, max_tokens %d, hidden %d, top-%d of %d experts, %s, %d rounds%s",
                      shape->config.max_tokens, shape->config.hidden, shape->config.topk, shape->config.n_experts,
                      shape->config.flags & EP_LL_NO_PARTIAL_REDUCE ? "summed once" : "summed by rank", shape->n_rounds,
                      shape->overlap ? " that overlap" : "");

    for (int i = 0; i < shape->n_rounds && at >= 0 && (size_t)at < bytes; i++) {
        print_round(&shape->round[i], ret_text + at, bytes - (size_t)at);
        while (ret_text[at])
            at++;
    }
}
