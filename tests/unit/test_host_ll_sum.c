/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sum of a low-latency combine on the host backend where terms are no numbers or a rank is masked, with expected
 * values written out, grouped and with EP_LL_NO_PARTIAL_REDUCE. Sums of numbers: test_reference.c, with which
 * tests/property/sequence_host compares. Each case is a token, the same on every rank; ranks are threads.
 */
#include "ranks.h"

#include "core/core.h"

#include <epkit/epkit.h>
#include <math.h>

#define RANKS 3
#define LOCAL 4 /* experts of a rank: those of rank 0 are 0 to 3 */
#define TOPK 4
#define HIDDEN 384
#define MOST_TOKENS 24
#define LOST 2 /* the rank that is masked, if any */
#define PATIENT_MS 60000
#define LATE_MS 1500 /* deadline of the round in which LOST is late */

/* bf16: 1, 1 + 2^-7, 2, 2^-8, 2^24 (to which adding 1 changes nothing), its largest and its infinity. */
#define ONE 0x3f80
#define NEXT 0x3f81
#define TWO 0x4000
#define HALFWAY 0x3b80
#define BIG 0x4b80
#define MOST 0x7f7f
#define INF 0x7f80
#define QUIET 0x7fc0
#define MINUS 0x8000

struct token {
    int32_t experts[TOPK];
    uint16_t values[TOPK]; /* values that the experts return, in all elements */
    float weights[TOPK];
    uint16_t grouped, once; /* expected sum, by default and with EP_LL_NO_PARTIAL_REDUCE */
};

struct scenario {
    const struct token *tokens;
    int n_tokens, topk;
    uint32_t flags;
    bool loses; /* LOST takes part in a first round, and not in the second */
    _Atomic int through;
    int32_t mask[RANKS];
    char text[RANKS][256]; /* the error; "": none */
};

/* --- one rank --------------------------------------------------------------------------------------------------- */

struct member {
    struct scenario *scenario;
    ep_comm *comm;
    ep_ll *ll;
    int rank, n_slots; /* rows of an expert */
    int32_t index[MOST_TOKENS * TOPK], count[LOCAL];
    float weights[MOST_TOKENS * TOPK];
    int32_t source[LOCAL * RANKS * MOST_TOKENS];
    uint16_t *x, *recv, *out;
};

static uint16_t *rows_new(int n)
{
    return aligned_alloc(64, (size_t)n * HIDDEN * sizeof(uint16_t));
}

static ep_status member_init(struct member *m, const ep_boot *boot, struct scenario *scenario)
{
    ep_ll_config ll_config;
    ep_status status;

    *m = (struct member){.scenario = scenario, .rank = boot->rank, .n_slots = RANKS * MOST_TOKENS};
    m->x = rows_new(MOST_TOKENS);
    m->out = rows_new(MOST_TOKENS);
    m->recv = rows_new(LOCAL * m->n_slots);
    if (!m->x || !m->out || !m->recv)
        return EP_E_MEMORY;
    memset(m->x, 0, MOST_TOKENS * HIDDEN * sizeof(*m->x));
    for (int i = 0; i < scenario->n_tokens * scenario->topk; i++) {
        m->index[i] = scenario->tokens[i / scenario->topk].experts[i % scenario->topk];
        m->weights[i] = scenario->tokens[i / scenario->topk].weights[i % scenario->topk];
    }
    status = unit_comm_new(boot, NULL, 0, PATIENT_MS, &m->comm);
    if (status != EP_OK)
        return status;
    ll_config = args_ll(MOST_TOKENS, HIDDEN, RANKS * LOCAL, scenario->topk);
    ll_config.flags = scenario->flags & EP_LL_MASK_DEAD;
    return ep_ll_new(m->comm, &ll_config, &m->ll);
}

static void member_done(struct member *m)
{
    ep_ll_free(m->ll);
    ep_comm_free(m->comm);
    free(m->x);
    free(m->recv);
    free(m->out);
}

/* The value that an expert returns for a token; NaN if the token has not chosen it. */
static uint16_t value_of(const struct scenario *scenario, int expert, int token)
{
    for (int k = 0; k < scenario->topk; k++)
        if (scenario->tokens[token].experts[k] == expert)
            return scenario->tokens[token].values[k];
    return QUIET;
}

static ep_status member_round(struct member *m)
{
    const struct scenario *scenario = m->scenario;
    ep_ll_dispatch_args dispatch = args_ll_dispatch(m->x, m->index, EP_I32, scenario->n_tokens);
    ep_ll_combine_args combine;
    ep_status status;

    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = m->recv;
    dispatch.recv_count = m->count;
    dispatch.recv_source = m->source;
    status = ep_ll_dispatch_sync(m->ll, &dispatch);
    if (status != EP_OK)
        return status;
    for (int local = 0; local < LOCAL; local++)
        for (int row = 0; row < m->count[local]; row++) {
            int at = local * m->n_slots + row;

            for (int i = 0; i < HIDDEN; i++)
                m->recv[at * HIDDEN + i] = value_of(scenario, m->rank * LOCAL + local, m->source[at]);
        }
    memset(m->out, 0xee, MOST_TOKENS * HIDDEN * sizeof(*m->out));
    combine = args_ll_combine(m->recv, m->index, EP_I32, scenario->n_tokens, m->weights, m->out);
    combine.flags = scenario->flags & EP_LL_NO_PARTIAL_REDUCE;
    return ep_ll_combine_sync(m->ll, &combine);
}

static void look(const struct member *m, char *ret_text, size_t bytes)
{
    const struct scenario *scenario = m->scenario;

    for (int t = scenario->n_tokens - 1; t >= 0; t--) {
        const struct token *token = &scenario->tokens[t];
        uint16_t expected = scenario->flags & EP_LL_NO_PARTIAL_REDUCE ? token->once : token->grouped;

        for (int i = 0; i < HIDDEN; i++)
            if (m->out[t * HIDDEN + i] != expected)
                snprintf(ret_text, bytes, "token %d, element %d: 0x%04x, not 0x%04x", t, i, m->out[t * HIDDEN + i],
                         expected);
    }
}

/* LOST stays until the others have finished, so that it is late, not dead. */
static void wait_for_others(struct scenario *scenario)
{
    for (int i = 0; i < PATIENT_MS && atomic_load(&scenario->through) < RANKS - 1; i++)
        unit_sleep_ms(1);
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int rank = boot->rank;
    struct member member;
    ep_status status = member_init(&member, boot, scenario);

    if (status == EP_OK)
        status = member_round(&member);
    if (status == EP_OK && scenario->loses && rank != LOST) {
        member.comm->config.timeout_ms = LATE_MS;
        status = member_round(&member);
    }
    if (status != EP_OK)
        snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_last_error());
    else if (!scenario->loses || rank != LOST)
        look(&member, scenario->text[rank], sizeof(scenario->text[rank]));
    if (status == EP_OK && rank == 0)
        ep_ll_get_mask(member.ll, scenario->mask);
    if (scenario->loses && rank != LOST)
        atomic_fetch_add(&scenario->through, 1);
    else if (scenario->loses)
        wait_for_others(scenario);
    member_done(&member);
    return 0;
}

static void run_scenario(ep_rank_fn run, void *argument)
{
    unit_run_threads(RANKS, run, argument);
}

/* In both modes. */
static void expect_sums(const struct token *tokens, int n_tokens, int topk, bool loses)
{
    static const uint32_t modes[] = {0, EP_LL_NO_PARTIAL_REDUCE};

    assert_true(n_tokens <= MOST_TOKENS);
    for (int i = 0; i < 2; i++) {
        struct scenario scenario = {.tokens = tokens,
                                    .n_tokens = n_tokens,
                                    .topk = topk,
                                    .flags = modes[i] | (loses ? EP_LL_MASK_DEAD : 0),
                                    .loses = loses};

        run_scenario(run_rank, &scenario);
        for (int rank = 0; rank < RANKS; rank++)
            if (scenario.text[rank][0])
                fail_msg("flags %u, rank %d: %s", scenario.flags, rank, scenario.text[rank]);
        assert_int_equal(scenario.mask[LOST], loses ? 1 : 0);
    }
}

#define EXPECT_SUMS(tokens, topk, loses) expect_sums(tokens, (int)(sizeof(tokens) / sizeof((tokens)[0])), topk, loses)

/* --- sums ------------------------------------------------------------------------------------------------------- */

TEST(what_is_not_a_number_stays_so)
{
    static const struct token tokens[] = {
        {{0, 1, 4, -1}, {0xffc1, ONE, ONE}, {1, 1, 1}, QUIET, QUIET},
        {{0, 4, -1, -1}, {0x7f81, ONE}, {1, 1}, QUIET, QUIET},
        {{0, 1, 4, -1}, {ONE, ONE, ONE}, {1, NAN, 1}, QUIET, QUIET},
        /* 0 * infinity, infinity - infinity. */
        {{0, 1, -1, -1}, {ONE, INF}, {1, 0}, QUIET, QUIET},
        {{0, 1, 4, 5}, {INF, ONE, INF | MINUS, ONE}, {1, 1, 1, 1}, QUIET, QUIET},
        {{0, 1, 4, -1}, {INF, ONE, ONE}, {1, 1, 1}, INF, INF},
        /* A partial sum that overflows bf16 is infinite, and stays so. */
        {{0, 1, 4, -1}, {MOST, 0x7b00, MOST | MINUS}, {1, 1, 1}, INF, 0x7b00},
    };

    EXPECT_SUMS(tokens, TOPK, false);
}

/* Nothing of rank 2, which is masked, is added; the rows of the others form the same groups as without it. */
TEST(rank_that_is_masked_is_in_no_group)
{
    static const struct token tokens[] = {
        {{0, 8, 1, 4}, {ONE, TWO, HALFWAY, HALFWAY}, {1, 1, 1, 1}, ONE, NEXT},
        {{8, 9, 0, 4}, {BIG, BIG, TWO, ONE}, {1, 1, 1, 1}, 0x4040, 0x4040},
        {{8, 9, 10, 11}, {ONE, ONE, ONE, ONE}, {1, 1, 1, 1}, 0, 0},
        {{9, 4, 8, 5}, {QUIET, ONE, QUIET, TWO}, {1, 1, NAN, 1}, 0x4040, 0x4040},
        {{4, 0, 11, 1}, {BIG | MINUS, BIG, BIG, ONE}, {1, 1, 1, 1}, 0, ONE},
    };

    EXPECT_SUMS(tokens, TOPK, true);
}
