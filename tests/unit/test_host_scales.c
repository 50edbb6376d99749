/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metadata of rows on the host backend: scales of all formats and opaque words, read and written with any strides, in
 * both layouts of a plan, on one node and between nodes, and in low-latency calls. Ranks are threads. Word w of token t
 * of rank r is a number that encodes all three.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <stdalign.h>

#define RANKS 3
#define TOKENS 9
#define TOPK 2
#define EXPERTS 6
#define HIDDEN 512
#define MOST_ROWS 64
#define MOST_WORDS 20
#define UNTOUCHED 0x77777777u

struct format {
    int dtype, row_bytes, scale_type, words, scale_words;
};

static const struct format formats[] = {
    {EP_F8E4M3, 512, EP_F32, 4, 0},
    {EP_F8E4M3, 512, EP_UE8M0, 1, 0},
    {EP_F8E4M3, 512, EP_UE8M0_32, 4, 0},
    {EP_F8E4M3, 512, EP_I32, 16, 16},
    {EP_F4E2M1, 256, EP_F8E4M3, 8, 0},
    {EP_F4E2M1, 256, EP_I32, 3, 3},
    {EP_BF16, 1024, EP_I32, 1, 1},
    {EP_BF16, 1024, EP_I32, 7, 7},
    {EP_BF16, 1024, EP_I32, MOST_WORDS, MOST_WORDS},
};

/*
 * Strides of an array of `rows`: contiguous, with a gap, blocks outermost with room for more rows, as required by TMA.
 */
static void strides_of(int way, int rows, int words, int64_t *ret_token, int64_t *ret_block)
{
    *ret_token = way == 0 ? 0 : way < 3 ? words + (way - 1) * 3 : 1;
    *ret_block = way == 0 ? 0 : way < 3 ? 1 : (rows + 4) / 4 * 4;
}

static uint32_t word_of(int rank, int token, int word)
{
    return 0x3f000000u + (uint32_t)(rank * 65536 + token * 256 + word);
}

struct scenario {
    int ranks_per_node;
    bool expanded;
};

struct member {
    int rank;
    ep_comm *comm;
    ep_plan *plan;
    ep_plan_info info;
    int32_t source_rank[MOST_ROWS], source_token[MOST_ROWS];
    alignas(16) uint8_t x[TOKENS * HIDDEN * 2], recv_x[MOST_ROWS * HIDDEN * 2];
    alignas(16) uint32_t scales[TOKENS * 4 * (MOST_WORDS + 4)], recv_scales[MOST_ROWS * 2 * (MOST_WORDS + 4)];
};

static int make_plan(struct member *m, bool expanded)
{
    ep_plan_args args;
    int32_t index[TOKENS * TOPK];

    for (int t = 0; t < TOKENS; t++) {
        index[t * TOPK] = (t + m->rank) % EXPERTS;
        index[t * TOPK + 1] = t % 4 ? (t * 5 + m->rank + 1) % EXPERTS : -1;
        if (index[t * TOPK + 1] == index[t * TOPK])
            index[t * TOPK + 1] = -1;
    }
    args = args_plan(index, EP_I32, TOKENS, TOPK, EXPERTS);
    args.flags = expanded ? EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING : 0;
    args.expert_alignment = 4;
    m->info = (ep_plan_info)EP_PLAN_INFO_INIT;
    SURE(ep_plan_new(m->comm, &args, &m->plan) == EP_OK);
    SURE(ep_plan_get_info(m->plan, &m->info) == EP_OK);
    SURE(m->info.n_recv <= MOST_ROWS);
    SURE(ep_plan_get_sources(m->plan, m->source_rank, m->source_token) == EP_OK);
    return 0;
}

/* Byte b of the row of token t of a rank. */
static uint8_t byte_of(int rank, int t, int b)
{
    return (uint8_t)(rank * 31 + t * 7 + b);
}

static int compare_rows(const struct member *m, int row_bytes)
{
    for (int row = 0; row < m->info.n_recv; row++)
        for (int b = 0; b < row_bytes; b++)
            SURE(m->recv_x[row * row_bytes + b] ==
                 (m->source_rank[row] < 0 ? 0 : byte_of(m->source_rank[row], m->source_token[row], b)));
    return 0;
}

/* One element of an array with strides; without them rows follow each other. */
static uint32_t *at(uint32_t *array, int64_t token, int64_t block, int words, int64_t row, int word)
{
    return token ? &array[row * token + word * block] : &array[row * words + word];
}

static int dispatch(struct member *m, const struct format *format, int way_in, int way_out)
{
    ep_dispatch_args args;
    int words = format->words, rows = (int)m->info.n_recv, written = 0, all = 0;
    int64_t in_token, in_block, token, block;

    strides_of(way_in, TOKENS, words, &in_token, &in_block);
    strides_of(way_out, rows, words, &token, &block);
    for (int t = 0; t < TOKENS; t++)
        for (int word = 0; word < words; word++)
            *at(m->scales, in_token, in_block, words, t, word) = word_of(m->rank, t, word);
    for (int i = 0; i < TOKENS * format->row_bytes; i++)
        m->x[i] = byte_of(m->rank, i / format->row_bytes, i % format->row_bytes);
    memset(m->recv_scales, UNTOUCHED & 0xff, sizeof(m->recv_scales));
    args = args_dispatch(format->dtype, HIDDEN, m->x, m->recv_x, rows);
    args.scales = m->scales;
    args.scale_type = format->scale_type;
    args.scale_words = format->scale_words;
    args.scale_stride_token = in_token;
    args.scale_stride_block = in_block;
    args.recv_scales = m->recv_scales;
    args.recv_scale_stride_token = token;
    args.recv_scale_stride_block = block;
    SURE(ep_dispatch_sync(m->plan, &args) == EP_OK);
    SURE(!compare_rows(m, format->row_bytes));
    for (int row = 0; row < rows; row++)
        for (int word = 0; word < words; word++) {
            uint32_t got = *at(m->recv_scales, token, block, words, row, word);

            if (m->source_rank[row] < 0)
                SURE(got == 0);
            else
                SURE(got == word_of(m->source_rank[row], m->source_token[row], word));
            written++;
        }
    /* Memory outside of the rows is unchanged. */
    for (size_t i = 0; i < sizeof(m->recv_scales) / 4; i++)
        all += m->recv_scales[i] != UNTOUCHED;
    SURE(all == written);
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    static struct member members[RANKS];
    struct member *m = &members[boot->rank];
    struct scenario *scenario = argument;
    int code = 0;

    m->rank = boot->rank;
    SURE(unit_comm_new(boot, NULL, scenario->ranks_per_node, 0, &m->comm) == EP_OK);
    SURE(!make_plan(m, scenario->expanded));
    for (size_t f = 0; !code && f < sizeof(formats) / sizeof(formats[0]); f++)
        for (int way = 0; !code && way < 4; way++) {
            code = dispatch(m, &formats[f], (way + 1) % 4, way);
            if (code)
                fprintf(stderr, "%d ranks a node, expanded %d, format %zu, way %d\n", scenario->ranks_per_node,
                        scenario->expanded, f, way);
        }
    ep_plan_free(m->plan);
    ep_comm_free(m->comm);
    return code;
}

static void run(ep_rank_fn program, struct scenario scenario)
{
    unit_run_threads(RANKS, program, &scenario);
}

TEST(scales_have_any_strides)
{
    for (int expanded = 0; expanded < 2; expanded++) {
        run(run_rank, (struct scenario){.ranks_per_node = RANKS, .expanded = expanded});
        run(run_rank, (struct scenario){.ranks_per_node = 1, .expanded = expanded});
    }
}

/* --- low latency ------------------------------------------------------------------------------------------------- */

#define LL_LOCAL (EXPERTS / RANKS)
#define LL_ROWS (RANKS * TOKENS)

struct ll_out {
    alignas(16) uint8_t x[LL_LOCAL * LL_ROWS * HIDDEN];
    alignas(16) uint32_t scales[LL_LOCAL * LL_ROWS * HIDDEN / 128];
    int32_t count[LL_LOCAL];
};

/* As in DeepEP: [L, R*M, H/128] with strides (H/128 * R*M, 1, R*M), the same elements as contiguous ones. */
static int transpose(const ep_boot *boot, void *argument)
{
    static struct ll_out outs[RANKS][2];
    static alignas(16) uint16_t inputs[RANKS][TOKENS * HIDDEN];
    struct ll_out *out = outs[boot->rank];
    uint16_t *x = inputs[boot->rank];
    ep_ll_config ll_config;
    ep_ll_dispatch_args args = EP_LL_DISPATCH_ARGS_INIT;
    int32_t index[TOKENS * TOPK];
    ep_comm *comm;
    ep_ll *ll;

    (void)argument;
    SURE(unit_comm_new(boot, NULL, 0, 0, &comm) == EP_OK);
    ll_config = args_ll(TOKENS, HIDDEN, EXPERTS, TOPK);
    SURE(ep_ll_new(comm, &ll_config, &ll) == EP_OK);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        int block = i / 128;

        x[i] = ep_bf16_from_f32((float)(1 + block + boot->rank * 100));
    }
    for (int i = 0; i < TOKENS * TOPK; i++)
        index[i] = (i + boot->rank) % EXPERTS;
    for (int packed = 0; packed < 2; packed++) {
        int words = packed ? HIDDEN / 512 : HIDDEN / 128;

        for (int i = 0; i < 2; i++) {
            memset(&out[i], 0x77, sizeof(out[i]));
            args.x = x;
            args.topk_idx = index;
            args.idx_type = EP_I32;
            args.n_tokens = TOKENS;
            args.out_dtype = EP_F8E4M3;
            args.scale_type = packed ? EP_UE8M0 : EP_F32;
            args.recv_x = out[i].x;
            args.recv_scales = out[i].scales;
            args.recv_count = out[i].count;
            args.recv_scale_stride_token = i ? 1 : 0;
            args.recv_scale_stride_block = i ? LL_ROWS : 0;
            SURE(ep_ll_dispatch_sync(ll, &args) == EP_OK);
        }
        SURE(memcmp(out[0].x, out[1].x, sizeof(out[0].x)) == 0);
        for (int expert = 0; expert < LL_LOCAL; expert++)
            for (int row = 0; row < LL_ROWS; row++)
                for (int word = 0; word < words; word++) {
                    uint32_t *from = &out[0].scales[expert * LL_ROWS * words],
                             *to = &out[1].scales[expert * LL_ROWS * words];

                    SURE(from[row * words + word] == to[word * LL_ROWS + row]);
                    SURE((to[word * LL_ROWS + row] == UNTOUCHED) == (row >= out[0].count[expert]));
                }
    }
    ep_ll_free(ll);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(low_latency_scales_are_transposed, run(transpose, (struct scenario){.ranks_per_node = RANKS}))
