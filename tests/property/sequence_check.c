/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Comparison with the reference of cmd/test/check. The ranks exchange their inputs over memory of the test, so that the
 * library takes no part in what it is compared with.
 */
#include "sequence.h"

#include "cmd/test/check/reference.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE_BYTES = 6 << 20, BARRIER_SECONDS = 360, MAX_ITEMS = 8 };
enum item { CHOICES, CHOICE_WEIGHTS, ROWS, ROW_SCALES, ANSWERS };

struct publication {
    atomic_int arrived, generation, aborted;
    struct page {
        bool fits;
        int n_tokens;
        size_t used, begin[MAX_ITEMS];
        _Alignas(16) unsigned char bytes[PAGE_BYTES];
    } pages[MAX_RANKS];
};

struct publication *publication_new(void)
{
    void *memory = mmap(NULL, sizeof(struct publication), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

void publication_free(struct publication *publication)
{
    if (publication)
        munmap(publication, sizeof(*publication));
}

void publication_abort(struct publication *publication)
{
    atomic_store(&publication->aborted, 1);
}

bool publication_barrier(struct rank_state *state)
{
    struct publication *all = state->sequence->publication;
    int generation = atomic_load(&all->generation);
    time_t begin = time(NULL);

    if (atomic_fetch_add(&all->arrived, 1) + 1 == state->nranks) {
        atomic_store(&all->arrived, 0);
        atomic_fetch_add(&all->generation, 1);
        return true;
    }
    while (atomic_load(&all->generation) == generation) {
        if (atomic_load(&all->aborted))
            return fail(state, "another rank has failed");
        if (time(NULL) - begin > BARRIER_SECONDS)
            return fail(state, "a rank is late for the barrier of the test");
        usleep(50);
    }
    return true;
}

static struct page *page_of(const struct rank_state *state, int rank)
{
    return &state->sequence->publication->pages[rank];
}

static void *item_of(struct page *page, enum item item)
{
    return page->bytes + page->begin[item];
}

static void page_start(struct page *page, int n_tokens)
{
    page->fits = true;
    page->n_tokens = n_tokens;
    page->used = 0;
}

static void *add(struct page *page, enum item item, const void *from, size_t bytes)
{
    size_t begin = (page->used + 15) / 16 * 16;

    page->begin[item] = 0;
    if (!page->fits || begin + bytes > PAGE_BYTES) {
        page->fits = false;
        return NULL;
    }
    page->begin[item] = begin;
    page->used = begin + bytes;
    if (from)
        memcpy(page->bytes + begin, from, bytes);
    return page->bytes + begin;
}

/* --- the group --------------------------------------------------------------------------------------------------- */

struct check {
    struct rank_state *state;
    struct reference_group group;
    int n_tokens[MAX_RANKS];
    int32_t *experts[MAX_RANKS];
    float *weights[MAX_RANKS];
    struct reference_layout layouts[MAX_RANKS];
    size_t answer_bytes; /* of a row */
    size_t expert_rows;  /* low latency: rows of each expert in the outputs; 0: consecutive */
};

static void make_group(struct check *check, int nnodes, int topk, int n_experts, bool expanded, int alignment)
{
    struct rank_state *state = check->state;

    check->group = (struct reference_group){.n_ranks = state->nranks,
                                            .n_nodes = nnodes,
                                            .ranks_per_node = state->nranks / nnodes,
                                            .topk = topk,
                                            .n_experts = n_experts,
                                            .n_local = n_experts / state->nranks,
                                            .n_tokens = check->n_tokens,
                                            .experts = check->experts,
                                            .weights = check->weights};
    for (int i = 0; i < state->nranks; i++) {
        struct page *page = page_of(state, i);

        check->n_tokens[i] = page->n_tokens;
        check->experts[i] = item_of(page, CHOICES);
        check->weights[i] = item_of(page, CHOICE_WEIGHTS);
    }
    for (int i = 0; i < state->nranks; i++)
        reference_layout_init(&check->group, i, expanded, alignment ? alignment : 1, &check->layouts[i]);
}

static bool all_fit(const struct rank_state *state)
{
    for (int i = 0; i < state->nranks; i++)
        if (!page_of(state, i)->fits)
            return false;
    return true;
}

/* Position in the outputs of row i of a layout. */
static size_t position(const struct check *check, const struct reference_layout *layout, int64_t i)
{
    int local = 0;

    if (!check->expert_rows)
        return (size_t)i;
    while (layout->expert_start[local + 1] <= i)
        local++;
    return (size_t)local * check->expert_rows + (size_t)(i - layout->expert_start[local]);
}

static void reply(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct check *check = context;
    const struct reference_layout *layout = &check->layouts[rank];
    int64_t i = 0;
    const unsigned char *answers = item_of(page_of(check->state, rank), ANSWERS);

    while (i < layout->n_rows &&
           (layout->rows[i].rank != source || layout->rows[i].token != token || layout->rows[i].k != k))
        i++;
    memset(ret_row, 0, check->answer_bytes);
    if (i < layout->n_rows)
        memcpy(ret_row, answers + position(check, layout, i) * check->answer_bytes, check->answer_bytes);
}

/* `slot` NULL: low latency; `bias`: of the first token. */
static bool check_sums(struct check *check, struct reference_combine *combine, const struct slot *slot,
                       const uint16_t *bias[2], const unsigned char *out)
{
    struct rank_state *state = check->state;
    static _Thread_local struct reference_scratch scratch;
    static _Thread_local uint16_t expected[EP_MAX_HIDDEN];
    bool ok = true;

    combine->reply = reply;
    combine->context = check;
    for (int t = 0; ok && t < check->n_tokens[state->rank]; t++) {
        const uint16_t *row_bias[2];

        for (int i = 0; i < 2; i++)
            row_bias[i] = bias[i] ? bias[i] + (size_t)t * (size_t)combine->hidden : NULL;
        if (!slot)
            reference_ll_combine_row(&check->group, combine, state->rank, t, &scratch, expected);
        else if (slot->combine_flags)
            combine_by_choice(&check->group, combine, slot->combine_flags, slot->mask, state->rank, t, row_bias,
                              &scratch, expected);
        else
            reference_combine_row(&check->group, combine, state->rank, t, row_bias, &scratch, expected);
        if (memcmp(expected, out + (size_t)t * check->answer_bytes, check->answer_bytes) != 0)
            ok = fail(state, "%s: token %d is not that of the reference", slot ? "ep_combine" : "ep_ll_combine", t);
    }
    return ok;
}

static bool done(struct check *check, bool ok)
{
    for (int i = 0; i < check->state->nranks; i++)
        reference_layout_done(&check->layouts[i]);
    /* The pages are written again after this. */
    return ok && publication_barrier(check->state);
}

/* --- plans ------------------------------------------------------------------------------------------------------- */

static bool check_choices(struct check *check, const struct slot *slot, const struct reference_row *row, size_t i)
{
    int32_t experts[16];
    float weights[16];
    size_t topk = (size_t)slot->topk;
    const void *index = slot->b[RECV_IDX].block[BASE].at;
    const float *weight = (const float *)(const void *)slot->b[RECV_WEIGHTS].block[BASE].at;
    struct rank_state *state = check->state;

    if (slot->expanded)
        return !slot->weights || row->rank < 0 || weight[i] == reference_row_weight(&check->group, row) ||
               fail(state, "received weight %zu", i);
    if (slot->mask)
        return true;
    reference_row_selections(&check->group, state->rank, row, experts, weights);
    for (size_t k = 0; k < topk; k++) {
        int64_t got =
            slot->idx_type == EP_I32 ? ((const int32_t *)index)[i * topk + k] : ((const int64_t *)index)[i * topk + k];

        if (got != experts[k] || (slot->weights && weight[i * topk + k] != weights[k]))
            return fail(state, "choice %zu of received row %zu", k, i);
    }
    return true;
}

static bool is_all(const unsigned char *memory, size_t bytes, unsigned char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (memory[i] != value)
            return false;
    return true;
}

/* The rows from `begin` to `end` of an output. */
static bool rows_are(const struct slot *slot, enum buffer buffer, int64_t begin, int64_t end, unsigned char value)
{
    const struct mirror *mirror = &slot->b[buffer];

    return is_all(mirror->block[BASE].at + (size_t)begin * mirror->row_bytes, (size_t)(end - begin) * mirror->row_bytes,
                  value);
}

/* Padding is zero if that was asked for; behind the last row are marks up to the capacity, and then nothing. */
static bool check_unused(struct check *check, const struct slot *slot)
{
    const struct reference_layout *layout = &check->layouts[check->state->rank];
    int64_t n = layout->n_rows, marked = slot->out_rows;
    bool index = !slot->mask && !slot->expanded;

    for (int64_t i = 0; slot->flags & EP_PLAN_ZERO_PADDING && i < n; i++)
        if (layout->rows[i].rank < 0 &&
            !(rows_are(slot, RECV_X, i, i + 1, 0) && (!slot->weights || rows_are(slot, RECV_WEIGHTS, i, i + 1, 0))))
            return fail(check->state, "padding row %lld is not zero", (long long)i);
    if (!rows_are(slot, RECV_X, n, marked + slot->spare_rows, UNTOUCHED))
        return fail(check->state, "rows behind the last one were written");
    if ((index && !rows_are(slot, RECV_IDX, n, marked, 0xff)) ||
        (slot->weights && !rows_are(slot, RECV_WEIGHTS, n, marked, 0)))
        return fail(check->state, "rows behind the last one are not marked");
    if (index && !rows_are(slot, RECV_IDX, marked, marked + slot->spare_rows, UNTOUCHED))
        return fail(check->state, "recv_topk_idx was written behind the capacity");
    return true;
}

static uint32_t *scale_of(const struct slot *slot, bool received, int64_t row, int word)
{
    struct strides strides = slot_strides(slot, received);

    return (uint32_t *)(void *)slot->b[received ? RECV_SCALES : SCALES].block[BASE].at + row * strides.token +
           word * strides.block;
}

static bool are_scales(const struct slot *slot, const uint32_t *expected, int64_t row)
{
    for (int word = 0; word < slot->scale_words; word++)
        if (*scale_of(slot, true, row, word) != expected[word])
            return false;
    return true;
}

static bool check_received(struct check *check, const struct slot *slot)
{
    const struct reference_layout *layout = &check->layouts[check->state->rank];
    size_t bytes = slot->b[RECV_X].row_bytes;

    for (int64_t i = 0; i < layout->n_rows; i++) {
        const struct reference_row *row = &layout->rows[i];
        struct page *page = page_of(check->state, row->rank < 0 ? 0 : row->rank);
        size_t from = (size_t)row->token;

        if (row->rank >= 0 && memcmp((unsigned char *)item_of(page, ROWS) + from * bytes,
                                     slot->b[RECV_X].block[BASE].at + (size_t)i * bytes, bytes) != 0)
            return fail(check->state, "received row %lld is not that of the reference", (long long)i);
        if (row->rank >= 0 &&
            !are_scales(slot, (const uint32_t *)item_of(page, ROW_SCALES) + from * (size_t)slot->scale_words, i))
            return fail(check->state, "scales of received row %lld are not those of the reference", (long long)i);
        TRY(check_choices(check, slot, row, (size_t)i));
    }
    return check_unused(check, slot);
}

/* --- what a plan knows ------------------------------------------------------------------------------------------- */

static bool check_info(struct check *check, const struct slot *slot)
{
    struct rank_state *state = check->state;
    const struct reference_layout *layout = &check->layouts[state->rank];
    size_t ranks = (size_t)state->nranks, local = (size_t)check->group.n_local;
    ep_plan_info info = EP_PLAN_INFO_INIT;

    CALL(state, ep_plan_get_info(slot->plan[BASE], &info));
    if (info.n_tokens != check->n_tokens[state->rank] || info.out_rows != slot->out_rows ||
        (!slot->fixed && info.out_rows != layout->n_rows))
        return fail(state, "ep_plan_get_info: %d tokens, %lld rows", info.n_tokens, (long long)info.out_rows);
    if (slot->updated)
        return (info.n_recv == -1 && info.n_send == -1 && info.n_wire == -1 && info.n_net == -1 &&
                !info.recv_per_expert && !info.recv_from_rank && !info.expert_start) ||
               fail(state, "ep_plan_get_info has counts after an update");
    if (info.n_recv != layout->n_rows || info.n_send != layout->n_send || info.n_wire != layout->n_wire ||
        info.n_net != layout->n_net || memcmp(info.recv_per_expert, layout->recv_per_expert, local * 4) != 0 ||
        (slot->expanded ? memcmp(info.expert_start, layout->expert_start, (local + 1) * 8)
                        : memcmp(info.recv_from_rank, layout->recv_from_rank, (ranks + 1) * 8)) != 0)
        return fail(state, "the counts of ep_plan_get_info are not those of the reference");
    return true;
}

static bool check_sources(struct check *check, const struct slot *slot)
{
    struct rank_state *state = check->state;
    const struct reference_layout *layout = &check->layouts[state->rank];
    size_t n = (size_t)layout->n_rows;
    int32_t *rank;
    bool ok = true;

    if (slot->updated)
        return true;
    rank = calloc(2 * n + 1, sizeof(*rank));
    if (!rank)
        return fail(state, "no memory");
    CALL(state, ep_plan_get_sources(slot->plan[BASE], rank, rank + n));
    for (size_t i = 0; ok && i < n; i++)
        if (rank[i] != layout->rows[i].rank || rank[n + i] != layout->rows[i].token)
            ok = fail(state, "source of row %zu is token %d of rank %d", i, rank[n + i], rank[i]);
    free(rank);
    return ok;
}

static bool goes_to(const struct reference_group *group, int source, int token, int rank)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;

    for (int k = 0; k < group->topk; k++)
        if (experts[k] >= 0 && experts[k] / group->n_local == rank)
            return true;
    return false;
}

static const int32_t *metadata_of(const struct slot *slot, enum buffer buffer)
{
    return (const int32_t *)(const void *)slot->b[buffer].block[BASE].at;
}

/* Row i of the received tokens; expanded: where its choices are. */
static bool check_token(struct check *check, const struct slot *slot, int i, int source, int token)
{
    const struct reference_layout *layout = &check->layouts[check->state->rank];
    int topk = check->group.topk;

    if (metadata_of(slot, SOURCE)[i] != source * (slot->max_tokens + 1) + token)
        return fail(check->state, "recv_source of token %d", i);
    for (int k = 0; slot->expanded && k < topk; k++) {
        int64_t row = layout->n_rows - 1;

        while (row >= 0 &&
               (layout->rows[row].rank != source || layout->rows[row].token != token || layout->rows[row].k != k))
            row--;
        if (metadata_of(slot, PLACE)[i * topk + k] != row)
            return fail(check->state, "recv_slot of token %d, choice %d", i, k);
    }
    return true;
}

static bool check_tokens(struct check *check, const struct slot *slot)
{
    struct rank_state *state = check->state;
    int sums[MAX_RANKS] = {0}, n = 0;

    for (int source = 0; source < state->nranks; source++) {
        for (int t = 0; t < check->n_tokens[source]; t++) {
            for (int to = 0; to < state->nranks; to++)
                sums[to] += goes_to(&check->group, source, t, to);
            if (goes_to(&check->group, source, t, state->rank))
                TRY(check_token(check, slot, n++, source, t));
        }
        if (metadata_of(slot, PSUM_RANK)[source] != n ||
            memcmp(metadata_of(slot, PREFIX) + source * state->nranks, sums, (size_t)state->nranks * 4) != 0)
            return fail(state, "psum_rank or rank_prefix of rank %d", source);
    }
    return metadata_of(slot, N_TOKENS)[0] == n || fail(state, "n_recv_tokens is not %d", n);
}

static bool check_metadata(struct check *check, const struct slot *slot)
{
    const struct reference_group *group = &check->group;
    int start = 0, alignment = slot->alignment ? slot->alignment : 1;

    for (int local = 0; local < group->n_local; local++) {
        int n = 0, sum;

        for (int source = 0; source < group->n_ranks; source++)
            for (int i = 0; i < group->n_tokens[source] * group->topk; i++)
                n += group->experts[source][i] == check->state->rank * group->n_local + local;
        sum = start + n;
        start += (n + alignment - 1) / alignment * alignment;
        if (metadata_of(slot, COUNT)[local] != n ||
            metadata_of(slot, PSUM_EXPERT)[local] != (slot->expanded ? sum : start))
            return fail(check->state, "count_exact or psum_expert of expert %d", local);
    }
    return check_tokens(check, slot);
}

/* A row that the dispatch quantises, and its scales. */
static void quantize_row(const struct slot *slot, const uint16_t *row, uint8_t *ret_row, uint32_t *ret_scales)
{
    float factors[MAX_HIDDEN / EP_SCALE_BLOCK], global = slot->global_scale ? *slot->global_scale : 1;
    bool ue8m0 = slot->scale_type == EP_UE8M0;

    if (slot->dtype == EP_F4E2M1 || slot->scale_type == EP_UE8M0_32) {
        reference_quantize_blocks(row, slot->hidden, slot->dtype == EP_F4E2M1 ? 16 : 32, global, ret_row,
                                  (uint8_t *)ret_scales);
        return;
    }
    reference_quantize(row, slot->hidden, ue8m0, ret_row, factors);
    if (ue8m0)
        reference_pack_ue8m0(factors, slot->hidden / EP_SCALE_BLOCK, (int32_t *)ret_scales);
    else
        memcpy(ret_scales, factors, (size_t)slot->scale_words * 4);
}

/* The rows that this rank sends, and their scales. */
static void publish_rows(struct page *page, const struct slot *slot, int n)
{
    const struct mirror *x = &slot->b[X];
    size_t bytes = slot->b[RECV_X].row_bytes;
    uint8_t *rows = add(page, ROWS, slot->quantized ? NULL : x->block[BASE].at, (size_t)slot->max_tokens * bytes);
    uint32_t *scales = add(page, ROW_SCALES, NULL, (size_t)(n * slot->scale_words) * 4);

    for (int t = 0; rows && scales && t < n; t++) {
        uint32_t *own = scales + t * slot->scale_words;

        if (slot->quantized)
            quantize_row(slot, (const uint16_t *)(const void *)(x->block[BASE].at + (size_t)t * x->row_bytes),
                         rows + (size_t)t * bytes, own);
        for (int word = 0; word < slot->scale_words && !slot->quantized; word++)
            own[word] = *scale_of(slot, false, t, word);
    }
}

bool check_slot(struct rank_state *state, int nnodes, const struct slot *slot)
{
    struct check check = {.state = state, .answer_bytes = (size_t)slot->hidden * 2};
    struct page *page = page_of(state, state->rank);
    int topk = slot->choices_topk, n = slot->n_tokens[slot->routing];
    struct reference_combine combine = {.hidden = slot->hidden,
                                        .expanded = slot->expanded,
                                        .bf16_partials = state->sequence->config.partial_type == EP_BF16};
    const uint16_t *bias[2] = {NULL, NULL};
    bool ok;

    page_start(page, n);
    add(page, CHOICES, slot->choices[slot->routing], (size_t)(n * topk) * 4);
    add(page, CHOICE_WEIGHTS, slot->mask ? NULL : slot->b[WEIGHTS].block[BASE].at, (size_t)(n * topk) * 4);
    publish_rows(page, slot, n);
    add(page, ANSWERS, slot->b[ANSWER].block[BASE].at, slot->b[ANSWER].bytes);
    TRY(publication_barrier(state));
    if (!all_fit(state))
        return publication_barrier(state);
    make_group(&check, nnodes, topk, slot->n_experts, slot->expanded, slot->alignment);
    for (int i = 0; i < slot->n_bias; i++)
        bias[i] = (const uint16_t *)(const void *)(slot->b[BIAS].block[BASE].at + (size_t)i * slot->b[BIAS].bytes / 2);
    ok = check_received(&check, slot) && check_sums(&check, &combine, slot, bias, slot->b[OUT].block[BASE].at) &&
         check_info(&check, slot) && check_sources(&check, slot) && check_metadata(&check, slot);
    return done(&check, ok);
}

/* --- low latency ------------------------------------------------------------------------------------------------- */

static bool publish_exchange(struct rank_state *state, const struct ll *ll, const struct exchange *exchange)
{
    struct page *page = page_of(state, state->rank);
    int most = ll->config.topk, n = exchange->n_tokens;
    const void *index = exchange->b[LL_IDX].block[BASE].at;
    const float *weight = (const float *)(const void *)exchange->b[LL_WEIGHTS].block[BASE].at;
    int32_t *experts;
    float *weights;

    page_start(page, n);
    experts = add(page, CHOICES, NULL, (size_t)(n * most) * 4);
    weights = add(page, CHOICE_WEIGHTS, NULL, (size_t)(n * most) * 4);
    for (int i = 0; i < n * most; i++) {
        int k = i % most, from = i / most * exchange->topk + k;

        experts[i] = k >= exchange->topk            ? -1
                     : exchange->idx_type == EP_I32 ? ((const int32_t *)index)[from]
                                                    : (int32_t)((const int64_t *)index)[from];
        weights[i] = k >= exchange->topk ? 0 : weight[from];
    }
    add(page, ROWS, exchange->b[LL_X].block[BASE].at, exchange->b[LL_X].bytes);
    add(page, ANSWERS, exchange->b[LL_ANSWER].block[BASE].at, exchange->b[LL_ANSWER].bytes);
    return publication_barrier(state);
}

static bool check_ll_row(struct check *check, const struct ll *ll, const struct exchange *exchange, int64_t i)
{
    const struct reference_row *row = &check->layouts[check->state->rank].rows[i];
    size_t at = position(check, &check->layouts[check->state->rank], i), bytes = exchange->b[LL_RECV].row_bytes;
    const uint16_t *x =
        (uint16_t *)item_of(page_of(check->state, row->rank), ROWS) + (size_t)row->token * (size_t)ll->config.hidden;
    uint8_t narrow[1024];
    float factors[8];
    int32_t packed[2];
    bool ue8m0 = exchange->scale_type == EP_UE8M0;

    if (exchange->out_dtype == EP_F8E4M3)
        reference_quantize(x, ll->config.hidden, ue8m0 || exchange->dispatch_flags & EP_LL_ROUND_SCALE, narrow,
                           factors);
    if (ue8m0)
        reference_pack_ue8m0(factors, ll->config.hidden / 128, packed);
    if (memcmp(exchange->b[LL_RECV].block[BASE].at + at * bytes,
               exchange->out_dtype == EP_BF16 ? (const void *)x : narrow, bytes) != 0)
        return fail(check->state, "ep_ll_dispatch: row %zu is not that of the reference", at);
    bytes = exchange->b[LL_SCALES].row_bytes;
    if (memcmp(exchange->b[LL_SCALES].block[BASE].at + at * bytes, ue8m0 ? (const void *)packed : factors, bytes) != 0)
        return fail(check->state, "ep_ll_dispatch: scales of row %zu are not those of the reference", at);
    return true;
}

bool check_exchange(struct rank_state *state, const struct ll *ll, int number)
{
    const struct exchange *exchange = &ll->exchange[number];
    struct check check = {.state = state,
                          .answer_bytes = (size_t)ll->config.hidden * 2,
                          .expert_rows = (size_t)(state->nranks * exchange->max_tokens)};
    struct reference_combine combine = {.hidden = ll->config.hidden,
                                        .expanded = true,
                                        .no_partial_reduce = exchange->combine_flags & EP_LL_NO_PARTIAL_REDUCE};
    const int32_t *count = (const int32_t *)(const void *)exchange->b[LL_COUNT].block[BASE].at;
    const uint16_t *bias[2] = {NULL, NULL};
    const struct reference_layout *layout = &check.layouts[state->rank];
    bool ok = true;

    TRY(publish_exchange(state, ll, exchange));
    if (!all_fit(state))
        return publication_barrier(state);
    make_group(&check, 1, ll->config.topk, ll->config.n_experts, true, 1);
    for (int i = 0; ok && i < check.group.n_local; i++)
        if (count[i] != layout->expert_start[i + 1] - layout->expert_start[i])
            ok = fail(state, "ep_ll_dispatch: %d rows of expert %d", count[i], i);
    for (int64_t i = 0; ok && i < layout->n_rows; i++)
        ok = check_ll_row(&check, ll, exchange, i);
    ok = ok && check_sums(&check, &combine, NULL, bias, exchange->b[LL_OUT].block[BASE].at);
    return done(&check, ok);
}
