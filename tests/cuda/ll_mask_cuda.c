/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_mask_cuda [--ranks N] [--rounds N] [--seed N] [--only SCENARIO]: low latency against the host backend, where a
 * combine omits rows of its dispatch, also with a K of the calls below that of the ep_ll, where the caller masks and
 * unmasks ranks in the order of the stream, with strided scales and received rows that are added up; barriers; masks of
 * two ep_ll; and the reported time of waits for a late rank.
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HIDDEN = 1024,
    TOPK = 6,
    M = 48,
    LOCAL = 4,
    TIMEOUT_MS = 10000,
    SHORT_MS = 2000,
    LATE_MS = 30,
    MIN_NS = 1000000
};

enum { X, INDEX, GIVEN, WEIGHTS, ANSWER, RECV, SCALES, COUNT, SOURCE, RANGE, STATS, OUT, MASK, COST, N_BUFFERS };

struct scenario;
struct state;

struct scenario {
    const char *name;
    int (*run)(struct state *s);
    uint32_t ll_flags, flags; /* of the ep_ll; of the combine */
    bool hook, packed;
    int timeout_ms;
    int topk; /* of the calls; 0: TOPK, that of the ep_ll */
};

struct page {
    _Atomic int called;             /* ranks that have queued their call */
    _Atomic int entered[MAX_RANKS]; /* barriers that each rank has entered */
    _Atomic int wrong;              /* ranks that passed a barrier before another one had entered it */
};

struct state {
    struct group group;
    const struct scenario *scenario;
    struct page *page;
    uint64_t seed;
    int rounds, n_tokens, round;
    ep_ll *ll[2]; /* on the host, on the device */
    struct mirror b[N_BUFFERS];
    uint64_t call[2];
};

static size_t rows_of(const struct state *s)
{
    return (size_t)LOCAL * (size_t)s->group.nranks * M;
}

static int words_of_scales(const struct state *s)
{
    return HIDDEN / (s->scenario->packed ? 512 : 128);
}

static int make_buffers(struct state *s)
{
    size_t rows = rows_of(s), ranks = (size_t)s->group.nranks;
    const struct {
        const char *name;
        size_t bytes;
    } of[N_BUFFERS] = {[X] = {"x", M * HIDDEN * 2},
                       [INDEX] = {"topk_idx", M * TOPK * 4},
                       [GIVEN] = {"topk_idx of the combine", M * TOPK * 4},
                       [WEIGHTS] = {"topk_weights", M * TOPK * 4},
                       [ANSWER] = {"answers", rows * HIDDEN * 2},
                       [RECV] = {"recv_x", rows * HIDDEN},
                       [SCALES] = {"recv_scales", rows * (size_t)words_of_scales(s) * 4},
                       [COUNT] = {"recv_count", LOCAL * 4},
                       [SOURCE] = {"recv_source", rows * 4},
                       [RANGE] = {"recv_range", LOCAL * ranks * 8},
                       [STATS] = {"recv_stats_add", LOCAL * 4},
                       [OUT] = {"out", M * HIDDEN * 2},
                       [MASK] = {"mask", ranks * 4},
                       [COST] = {"wait_cost_add", ranks * 8}};

    for (int i = 0; i < N_BUFFERS; i++)
        TRY(mirror_new(&s->group, of[i].name, of[i].bytes, ORDINARY, &s->b[i]));
    for (int i = STATS; i <= COST; i += COST - STATS) {
        memset(s->b[i].host, 0, s->b[i].bytes);
        TRY(mirror_push(&s->group, &s->b[i]));
    }
    return 0;
}

static int32_t *words(const struct state *s, int buffer, int device)
{
    return (int32_t *)(void *)mirror_at(&s->b[buffer], device);
}

static int topk_of(const struct state *s)
{
    return s->scenario->topk ? s->scenario->topk : TOPK;
}

/* Omits a third of the choices; of every eighth token all, of some tokens all but one. */
static void exclude(struct state *s, uint64_t *random)
{
    int topk = topk_of(s);

    for (int i = 0; i < M * topk; i++) {
        int kind = (i / topk + s->round) % 8;
        bool out = kind == 0 || (kind == 1 ? i % topk != 2 : kind < 6 && next_random(random) % 3 == 0);

        words(s, GIVEN, 0)[i] = out ? -1 : words(s, INDEX, 0)[i];
    }
}

static int load(struct state *s, int round)
{
    uint64_t random = (s->seed * 4096 + (uint64_t)round) * 64 + (uint64_t)s->group.rank;
    struct routing routing = {.n_tokens = M,
                              .topk = topk_of(s),
                              .n_experts = LOCAL * s->group.nranks,
                              .nranks = s->group.nranks,
                              .idx_type = EP_I32,
                              .holes = round % 3 == 1};

    s->round = round;
    s->n_tokens = round % 2 ? (int)(next_random(&random) % (M + 1)) : M;
    fill_routing(&routing, &random, s->b[INDEX].host);
    exclude(s, &random);
    fill_bf16((uint16_t *)(void *)s->b[X].host, (size_t)M * HIDDEN, &random);
    fill_bf16((uint16_t *)(void *)s->b[ANSWER].host, rows_of(s) * HIDDEN, &random);
    for (int i = 0; i < M * TOPK; i++)
        ((float *)(void *)s->b[WEIGHTS].host)[i] = (float)(next_random(&random) % 2000) / 999.0f - 1.0f;
    for (int i = X; i <= ANSWER; i++)
        TRY(mirror_push(&s->group, &s->b[i]));
    for (int i = RECV; i < COST; i++)
        if (i != STATS)
            TRY(mirror_poison(&s->group, &s->b[i]));
    return group_barrier(&s->group);
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

static int finish(struct state *s, int device)
{
    if (s->scenario->hook)
        CALL(ep_ll_finish(s->ll[device], 0, group_stream(&s->group, device)));
    return 0;
}

static int call_dispatch(struct state *s, int device, bool timed)
{
    int64_t rows = (int64_t)s->group.nranks * M, words = words_of_scales(s);
    ep_ll_dispatch_args args =
        args_ll_dispatch(mirror_at(&s->b[X], device), mirror_at(&s->b[INDEX], device), EP_I32, s->n_tokens);

    args.topk = topk_of(s);
    args.out_dtype = EP_F8E4M3;
    args.scale_type = s->scenario->packed ? EP_UE8M0 : EP_F32;
    args.recv_x = mirror_at(&s->b[RECV], device);
    args.recv_scales = mirror_at(&s->b[SCALES], device);
    args.recv_count = (int32_t *)(void *)mirror_at(&s->b[COUNT], device);
    args.recv_source = (int32_t *)(void *)mirror_at(&s->b[SOURCE], device);
    args.recv_range = (int64_t *)(void *)mirror_at(&s->b[RANGE], device);
    args.recv_stats_add = (int32_t *)(void *)mirror_at(&s->b[STATS], device);
    args.wait_cost_add = timed ? (int64_t *)(void *)mirror_at(&s->b[COST], device) : NULL;
    args.flags = s->scenario->hook ? EP_LL_RECV_HOOK : 0;
    args.ret_call = &s->call[device];
    /* By columns, and in the other rounds by rows. */
    if (s->round % 3) {
        args.recv_scale_stride_token = s->round % 3 == 1 ? 1 : words;
        args.recv_scale_stride_block = s->round % 3 == 1 ? rows : 1;
    }
    CALL(ep_ll_dispatch(s->ll[device], &args, group_stream(&s->group, device)));
    return finish(s, device);
}

static int call_combine(struct state *s, int device, bool all, bool timed)
{
    ep_ll_combine_args args =
        args_ll_combine(mirror_at(&s->b[ANSWER], device), mirror_at(&s->b[all ? INDEX : GIVEN], device), EP_I32,
                        s->n_tokens, mirror_at(&s->b[WEIGHTS], device), mirror_at(&s->b[OUT], device));

    args.topk = topk_of(s);
    args.flags = s->scenario->flags | (s->scenario->hook ? EP_LL_RECV_HOOK : 0);
    args.call = s->call[device];
    args.wait_cost_add = timed ? (int64_t *)(void *)mirror_at(&s->b[COST], device) : NULL;
    CALL(ep_ll_combine(s->ll[device], &args, group_stream(&s->group, device)));
    return finish(s, device);
}

static int compare(struct state *s, const char *what)
{
    int code = PASSED;
    char phase[80];

    snprintf(phase, sizeof(phase), "%s, round %d, %d tokens", what, s->round, s->n_tokens);
    for (int i = RECV; i < COST; i++)
        code |= mirror_compare(&s->group, &s->b[i], phase);
    TRY(group_merge_codes(&s->group, code, &code));
    return code;
}

/* --- scenarios ------------------------------------------------------------------------------------------------------
 */

/* Two combines answer each dispatch; one of them omits rows, alternately the first and the second. */
static int run_omitted(struct state *s)
{
    for (int round = 0; round < s->rounds; round++) {
        for (int pass = 0; pass < 2; pass++) {
            bool all = (round + pass) % 2;

            TRY(load(s, round));
            for (int device = 0; device < 2; device++) {
                if (!pass)
                    TRY(call_dispatch(s, device, false));
                TRY(call_combine(s, device, all, false));
                CALL(ep_ll_query_mask(s->ll[device], words(s, MASK, device), group_stream(&s->group, device)));
                TRY(group_sync(&s->group, device));
            }
            if (!pass)
                TRY(compare(s, all ? "all" : "left out"));
            else
                TRY(mirror_compare(&s->group, &s->b[OUT], "second combine"));
        }
    }
    return 0;
}

/* The last rank and the others mask, or unmask, each other, all at the same point of their streams. */
static int set_masks(struct state *s, bool on)
{
    int last = s->group.nranks - 1;

    for (int device = 0; device < 2; device++) {
        for (int rank = 0; rank < s->group.nranks; rank++) {
            if (rank == s->group.rank || (rank == last) == (s->group.rank == last))
                continue;
            if (on || s->round % 2)
                CALL(ep_ll_set_mask(s->ll[device], rank, on, group_stream(&s->group, device)));
        }
        if (!on && !(s->round % 2))
            CALL(ep_ll_clear_mask(s->ll[device], group_stream(&s->group, device)));
        TRY(group_sync(&s->group, device));
    }
    return group_barrier(&s->group);
}

static int use_masks(struct state *s)
{
    for (int round = 0; round < s->rounds; round++) {
        TRY(load(s, round));
        if (round % 3)
            TRY(set_masks(s, round % 3 == 1));
        for (int device = 0; device < 2; device++) {
            TRY(call_dispatch(s, device, false));
            TRY(call_combine(s, device, round % 2, false));
            CALL(ep_ll_query_mask(s->ll[device], words(s, MASK, device), group_stream(&s->group, device)));
            if (round % 4 == 3)
                CALL(ep_ll_barrier(s->ll[device], group_stream(&s->group, device)));
            TRY(group_sync(&s->group, device));
        }
        TRY(compare(s, "masks"));
    }
    return 0;
}

static void count_entered(void *argument)
{
    struct state *s = argument;

    s->page->entered[s->group.rank]++;
}

static void check_entered(void *argument)
{
    struct state *s = argument;
    int mine = s->page->entered[s->group.rank];

    for (int rank = 0; rank < s->group.nranks; rank++)
        if (s->page->entered[rank] < mine)
            s->page->wrong = 1 + rank;
}

/* No rank may pass a barrier before all have entered it. */
static int use_barriers(struct state *s)
{
    for (int round = 0; round < 2 * s->rounds; round++) {
        if ((round + s->group.rank) % s->group.nranks == 0)
            sleep_ms(2);
        CALL(ep_stream_call(s->group.cuda, s->group.stream, count_entered, s));
        CALL(ep_ll_barrier(s->ll[1], s->group.stream));
        CALL(ep_stream_call(s->group.cuda, s->group.stream, check_entered, s));
    }
    TRY(group_sync(&s->group, 1));
    EXPECT(!s->page->wrong, "passed a barrier before rank %d had entered it", s->page->wrong - 1);
    return group_barrier(&s->group);
}

/* The last rank does not enter a barrier: the others mask it, and it is notified. */
static int stay_absent(struct state *s)
{
    int last = s->group.nranks - 1;
    int32_t masked[MAX_RANKS];

    TRY(group_barrier(&s->group));
    if (s->group.rank == last) {
        TRY(await(&s->page->called, last, TIMEOUT_MS * 3, "the others to pass the barrier"));
        CALL(ep_ll_barrier(s->ll[1], s->group.stream));
        TRY(last ? expect_status("ep_stream_sync", ep_stream_sync(s->group.cuda, s->group.stream), EP_E_EXCLUDED,
                                 "has masked this rank")
                 : 0);
        return 0;
    }
    CALL(ep_ll_barrier(s->ll[1], s->group.stream));
    CALL(ep_ll_query_mask(s->ll[1], words(s, MASK, 1), s->group.stream));
    TRY(group_sync(&s->group, 1));
    CUDA(cudaMemcpy(masked, s->b[MASK].device, (size_t)s->group.nranks * 4, cudaMemcpyDefault));
    for (int rank = 0; rank < s->group.nranks; rank++)
        EXPECT(masked[rank] == (rank == last), "rank %d: masked is %d", rank, masked[rank]);
    s->page->called++;
    return 0;
}

static ep_ll_config config_of(const struct state *s)
{
    ep_ll_config config = args_ll(M, HIDDEN, LOCAL * s->group.nranks, TOPK);

    config.flags = s->scenario->ll_flags;
    return config;
}

/* Two ep_ll used as one: the last rank, masked in one of them, is in the other, and knows it before its deadline. */
static int use_two(struct state *s)
{
    int last = s->group.nranks - 1;
    ep_ll_config config = config_of(s);
    int32_t masked[MAX_RANKS];
    double begin;
    ep_ll *other;

    CALL(ep_ll_new(s->group.cuda, &config, &other));
    CALL(ep_ll_clear_mask(s->ll[1], s->group.stream));
    CALL(ep_ll_clear_mask(other, s->group.stream));
    CALL(ep_ll_barrier(s->ll[1], s->group.stream));
    TRY(group_sync(&s->group, 1));
    TRY(group_barrier(&s->group));
    if (s->group.rank != last)
        CALL(ep_ll_set_mask(s->ll[1], last, 1, s->group.stream));
    CALL(ep_ll_merge_mask(other, s->ll[1], s->group.stream));
    CALL(ep_ll_query_mask(other, words(s, MASK, 1), s->group.stream));
    TRY(group_sync(&s->group, 1));
    CUDA(cudaMemcpy(masked, s->b[MASK].device, (size_t)s->group.nranks * 4, cudaMemcpyDefault));
    for (int rank = 0; rank < s->group.nranks; rank++)
        EXPECT(masked[rank] == (rank == last && s->group.rank != last), "rank %d: masked is %d", rank, masked[rank]);
    TRY(group_barrier(&s->group));
    begin = now_ms();
    CALL(ep_ll_barrier(other, s->group.stream));
    if (s->group.rank == last && last)
        TRY(expect_status("ep_stream_sync", ep_stream_sync(s->group.cuda, s->group.stream), EP_E_EXCLUDED,
                          "has masked this rank"));
    else
        TRY(group_sync(&s->group, 1));
    EXPECT(now_ms() - begin < TIMEOUT_MS / 2.0, "the barrier has waited for a mask to be cleared");
    ep_ll_free(other);
    return 0;
}

/* The last rank is late: each rank gets the time that it waited for the others, and none for itself. */
static int run_late(struct state *s)
{
    int last = s->group.nranks - 1;
    int64_t cost[2][MAX_RANKS] = {{0}};
    int code = PASSED;

    TRY(load(s, 0));
    TRY(call_dispatch(s, 0, false));
    TRY(call_combine(s, 0, false, false));
    TRY(group_sync(&s->group, 0));
    for (int combine = 0; combine < 2; combine++) {
        TRY(group_barrier(&s->group));
        if (s->group.rank == last) {
            TRY(await(&s->page->called, (combine + 1) * last, TIMEOUT_MS, "the others to call"));
            sleep_ms(LATE_MS);
        }
        TRY(combine ? call_combine(s, 1, false, true) : call_dispatch(s, 1, true));
        s->page->called += s->group.rank != last;
        TRY(group_sync(&s->group, 1));
        CUDA(cudaMemcpy(cost[combine], s->b[COST].device, (size_t)s->group.nranks * 8, cudaMemcpyDefault));
        for (int rank = 0; rank < s->group.nranks && combine; rank++)
            cost[1][rank] -= cost[0][rank];
        for (int rank = 0; rank < s->group.nranks; rank++) {
            int64_t least = rank == last && s->group.rank != last ? MIN_NS : 0;

            if (cost[combine][rank] < least || (rank == s->group.rank && cost[combine][rank])) {
                test_report("%s: waited %lld ns for rank %d", combine ? "combine" : "dispatch",
                            (long long)cost[combine][rank], rank);
                code = DIFFERS;
            }
        }
    }
    CALL(ep_ll_query_mask(s->ll[0], words(s, MASK, 0), NULL));
    CALL(ep_ll_query_mask(s->ll[1], words(s, MASK, 1), s->group.stream));
    TRY(group_sync(&s->group, 0));
    code |= compare(s, "late");
    TRY(group_merge_codes(&s->group, code, &code));
    return code;
}

#define MASKING EP_LL_MASK_DEAD
#define ALONE EP_LL_NO_PARTIAL_REDUCE

static const struct scenario scenarios[] = {
    {"left-out", run_omitted, 0, 0, false, false, TIMEOUT_MS, 0},
    {"left-out-alone", run_omitted, 0, ALONE, false, true, TIMEOUT_MS, 0},
    {"left-out-hook", run_omitted, 0, 0, true, true, TIMEOUT_MS, 0},
    {"left-out-alone-hook", run_omitted, 0, ALONE, true, false, TIMEOUT_MS, 0},
    {"left-out-masking", run_omitted, MASKING, 0, false, false, TIMEOUT_MS, 0},
    {"left-out-topk", run_omitted, 0, 0, true, false, TIMEOUT_MS, TOPK - 2},
    {"left-out-topk-alone", run_omitted, MASKING, ALONE, false, true, TIMEOUT_MS, TOPK - 3},
    {"masks-topk", use_masks, MASKING, 0, true, false, TIMEOUT_MS, TOPK - 1},
    {"masks", use_masks, MASKING, 0, false, false, TIMEOUT_MS, 0},
    {"masks-alone", use_masks, MASKING, ALONE, false, false, TIMEOUT_MS, 0},
    {"barriers", use_barriers, 0, 0, false, false, TIMEOUT_MS, 0},
    {"barriers-masking", use_barriers, MASKING, 0, false, false, TIMEOUT_MS, 0},
    {"late", run_late, 0, 0, false, false, TIMEOUT_MS, 0},
    {"late-topk", run_late, 0, 0, false, false, TIMEOUT_MS, TOPK - 2},
    {"late-topk-alone", run_late, 0, ALONE, false, false, TIMEOUT_MS, TOPK - 2},
    {"late-masking", run_late, MASKING, 0, false, false, TIMEOUT_MS, 0},
    {"absent", stay_absent, MASKING, 0, false, false, SHORT_MS, 0},
    {"two", use_two, MASKING, 0, false, false, TIMEOUT_MS, 0},
};

static int run_all(struct state *s)
{
    ep_ll_config config = config_of(s);
    int code;

    CALL(ep_ll_new(s->group.host, &config, &s->ll[0]));
    CALL(ep_ll_new(s->group.cuda, &config, &s->ll[1]));
    TRY(make_buffers(s));
    TRY(group_barrier(&s->group));
    code = s->scenario->run(s);
    for (int i = 0; i < N_BUFFERS; i++)
        code |= mirror_free(&s->group, true, &s->b[i]);
    ep_ll_free(s->ll[1]);
    ep_ll_free(s->ll[0]);
    return code;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {
        .group = *group, .scenario = scenario, .page = run->shared, .seed = run->seed, .rounds = run->rounds};

    return run_all(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .rounds = 12, .seed = 1};
    int code = SKIPPED;

    if (!options_read(argc, argv, 2, &options)) /* one rank has fewer experts than a token selects */
        return 2;
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++)
        code =
            merge_codes(code, run_group_scenario(&options, (struct scenario_run){.program = "ll_mask_cuda",
                                                                                 .name = scenarios[i].name,
                                                                                 .timeout_ms = scenarios[i].timeout_ms,
                                                                                 .seconds = 120,
                                                                                 .shared_bytes = sizeof(struct page),
                                                                                 .run = run_rank,
                                                                                 .scenario = &scenarios[i]}));
    return options_code(&options, code);
}
