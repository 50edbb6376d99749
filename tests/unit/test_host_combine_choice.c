/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EP_COMBINE_BY_CHOICE against a simulation that shares no code with the library: own rounding, own routing, sums from
 * the choices only. Rows are random numbers of very different magnitudes, so that almost every order gives other bits.
 * A rank returns a row that depends only on the source, the token, and the rank or the expert.
 *
 * 10^5 tokens; with EPKIT_TEST_LONG=1 10^6.
 */
#include "numbers.h"
#include "ranks.h"

#include <epkit/epkit.h>

#define RANKS 4
#define LOCAL 8
#define EXPERTS (RANKS * LOCAL)
#define TOPK 8
#define HIDDEN 8

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/*
 * A bf16 between 2^-6 and 2^5 of either sign, or, once in three, +-2^27: when two of those cancel out, the values added
 * between them have lost their last bits, which reveals the order.
 */
static uint16_t number(uint64_t what, int i)
{
    uint64_t draw = mix(what * 64 + (uint64_t)i), sign = draw & 0x8000;

    if (draw / 0x10000 % 3 == 0)
        return (uint16_t)(sign | 154 << 7);
    return (uint16_t)(sign | (121 + draw / 0x100000 % 11) << 7 | (draw & 0x7f));
}

static uint64_t name_of(int source, int token, int who)
{
    return ((uint64_t)source << 40 | (uint64_t)token) * 1024 + (uint64_t)who;
}

/* Distinct choices, some of them none. */
static void choose(int source, int token, int32_t *ret_experts)
{
    uint64_t draw = mix(name_of(source, token, 999));
    uint32_t step = 1 + 2 * (uint32_t)(draw >> 8 & 15); /* odd: all of 32 */

    for (uint32_t k = 0; k < TOPK; k++)
        ret_experts[k] = (draw >> (16 + k) & 7) == 0 ? -1 : (int32_t)(((uint32_t)draw + k * step) % EXPERTS);
}

static float widen(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

/* To nearest, ties to even; no infinities here. */
static uint16_t narrow(float value)
{
    uint32_t bits = bits_of(value), rest = bits & 0xffff;

    bits >>= 16;
    return (uint16_t)(bits + (rest > 0x8000 || (rest == 0x8000 && (bits & 1))));
}

struct mode {
    bool expanded;
    uint32_t flags;
    int n_bias;
};

static uint16_t simulate(const struct mode *mode, int source, int token, int i)
{
    int32_t experts[TOPK];
    volatile float sum = 0; /* every addition is rounded to single precision */

    choose(source, token, experts);
    if (mode->n_bias)
        sum = widen(number(name_of(source, token, 1001), i));
    if (mode->n_bias == 2)
        sum += widen(number(name_of(source, token, 1002), i));
    for (int k = 0; k < TOPK; k++) {
        int rank = experts[k] < 0 ? -1 : experts[k] / LOCAL;
        bool again = false;

        if (rank < 0)
            continue;
        for (int later = k + 1; later < TOPK; later++)
            again |= experts[later] >= 0 && experts[later] / LOCAL == rank;
        if (mode->expanded && !(mode->flags & EP_COMBINE_ROUND_PARTIAL)) {
            sum += widen(number(name_of(source, token, experts[k]), i));
        } else if (!again && !mode->expanded) {
            sum += widen(number(name_of(source, token, 500 + rank), i));
        } else if (!again) {
            volatile float partial = 0;

            for (int j = 0; j <= k; j++)
                if (experts[j] >= 0 && experts[j] / LOCAL == rank)
                    partial += widen(number(name_of(source, token, experts[j]), i));
            sum += widen(narrow(partial));
        }
    }
    return narrow(sum);
}

struct scenario {
    struct mode mode;
    int n_tokens; /* of each rank */
    long long wrong[RANKS], other[RANKS];
};

struct buffers {
    int64_t *index;
    int32_t *rank, *token;
    uint16_t *rows, *bias[2], *out, *plain;
};

/* The row that this rank returns for each row. In the expanded layout the position of a row determines its expert. */
static void answer(const struct scenario *scenario, int me, const ep_plan_info *info, struct buffers *b)
{
    int local = 0;

    for (int64_t row = 0; row < info->n_recv; row++) {
        int who = 500 + me;

        while (scenario->mode.expanded && info->expert_start[local + 1] <= row)
            local++;
        if (scenario->mode.expanded)
            who = me * LOCAL + local;
        for (int i = 0; i < HIDDEN; i++)
            b->rows[row * HIDDEN + i] =
                b->rank[row] < 0 ? 0x7fc0 : number(name_of(b->rank[row], b->token[row], who), i);
    }
}

static ep_status combine(ep_plan *plan, const struct scenario *scenario, struct buffers *b)
{
    ep_combine_args args = {.size = sizeof(args), .x = b->rows, .dtype = EP_BF16, .hidden = HIDDEN};

    for (int i = 0; i < scenario->mode.n_bias; i++)
        args.bias[i] = b->bias[i];
    args.out = b->plain;
    if (ep_combine(plan, &args, NULL) != EP_OK)
        return EP_E_STATE;
    args.out = b->out;
    args.flags = scenario->mode.flags;
    return ep_combine_sync(plan, &args);
}

static void compare(struct scenario *scenario, int me, const struct buffers *b)
{
    for (int t = 0; t < scenario->n_tokens; t++)
        for (int i = 0; i < HIDDEN; i++) {
            uint16_t expected = simulate(&scenario->mode, me, t, i);

            scenario->wrong[me] += b->out[t * HIDDEN + i] != expected;
            scenario->other[me] += b->plain[t * HIDDEN + i] != expected;
        }
}

static void *take(size_t n, size_t bytes)
{
    return aligned_alloc(64, (n * bytes + 127) / 64 * 64);
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    size_t n = (size_t)scenario->n_tokens;
    ep_plan_args args;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    struct buffers b = {.index = take(n * TOPK, 8), .out = take(n * HIDDEN, 2), .plain = take(n * HIDDEN, 2)};
    ep_comm *comm;
    ep_plan *plan;
    int me = boot->rank, code = 1;

    if (unit_comm_new(boot, NULL, 0, 0, &comm) != EP_OK)
        return 1;
    for (int i = 0; i < 2; i++)
        b.bias[i] = take(n * HIDDEN, 2);
    for (int t = 0; t < scenario->n_tokens; t++) {
        int32_t experts[TOPK];

        choose(me, t, experts);
        for (int k = 0; k < TOPK; k++)
            b.index[t * TOPK + k] = experts[k];
        for (int i = 0; i < HIDDEN; i++)
            for (int which = 0; which < 2; which++)
                b.bias[which][t * HIDDEN + i] = number(name_of(me, t, 1001 + which), i);
    }
    args = args_plan(b.index, EP_I64, scenario->n_tokens, TOPK, EXPERTS);
    args.flags = scenario->mode.expanded ? EP_PLAN_EXPANDED : 0;
    args.expert_alignment = 16;
    if (ep_plan_new(comm, &args, &plan) == EP_OK && ep_plan_get_info(plan, &info) == EP_OK) {
        b.rows = take((size_t)info.n_recv * HIDDEN, 2);
        b.rank = take((size_t)info.n_recv, 4);
        b.token = take((size_t)info.n_recv, 4);
        if (ep_plan_get_sources(plan, b.rank, b.token) == EP_OK) {
            answer(scenario, me, &info, &b);
            code = combine(plan, scenario, &b) != EP_OK;
        }
        if (!code)
            compare(scenario, me, &b);
        ep_plan_free(plan);
    }
    ep_comm_free(comm);
    free(b.index);
    free(b.rank);
    free(b.token);
    free(b.rows);
    free(b.bias[0]);
    free(b.bias[1]);
    free(b.out);
    free(b.plain);
    return code;
}

TEST(sums_are_those_of_the_simulation)
{
    static const struct mode modes[] = {
        {false, EP_COMBINE_BY_CHOICE, 0},
        {false, EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL, 2},
        {true, EP_COMBINE_BY_CHOICE, 1},
        {true, EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL, 0},
        {true, EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL, 2},
    };
    const char *length = getenv("EPKIT_TEST_LONG");
    int n = length && strcmp(length, "1") == 0 ? 1000000 : 100000;

    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        struct scenario scenario = {.mode = modes[i], .n_tokens = n / RANKS};

        unit_run_threads(RANKS, run_rank, &scenario);
        for (int rank = 0; rank < RANKS; rank++) {
            if (scenario.wrong[rank])
                fail_msg("mode %zu: %lld elements of rank %d differ", i, scenario.wrong[rank], rank);
            /* The order of the ranks or experts gives other bits, so the comparison distinguishes the orders. */
            assert_true(scenario.other[rank] > scenario.n_tokens / 1000);
        }
    }
}
