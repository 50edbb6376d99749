/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_rows.c - every form of the inner loops against a reference that decodes with ldexp(), adds one element at a
 * time and rounds with nearbyint(): bit for bit, over lengths with every kind of remainder, alignments, special values
 * and ties, with canaries around each output.
 */
#include "numbers.h"
#include "unit.h"

#include "backend/host/rows.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>

#define MOST_ROWS 70
#define MOST_COUNT 7176
#define CANARY 0xa5
#define ROUNDS 4 /* with other data and other alignments */
#define GUARD 64 /* bytes of canaries on either side of an output */

static const char *const form_names[] = {"portable", "avx2", "avx512"};

#define N_FORMS ((int)(sizeof(form_names) / sizeof(form_names[0])))

static const struct ep_rows_ops *forms[N_FORMS];

/* --- reference --- */

static float reference_decode(uint16_t code)
{
    int exponent = (code >> 7) & 0xff, mantissa = code & 0x7f;
    double value;

    if (exponent == 0xff)
        value = mantissa ? NAN : INFINITY;
    else if (exponent)
        value = ldexp(128 + mantissa, exponent - 127 - 7);
    else
        value = ldexp(mantissa, -126 - 7);
    return (float)copysign(value, code & 0x8000u ? -1.0 : 1.0);
}

/* nearbyint() rounds to even; 7 bits of fraction, or the spacing of the denormals. */
static uint16_t reference_round(float value)
{
    int exponent;
    double rounded;

    if (isnan(value))
        return 0x7fc0;
    if (isinf(value) || value == 0)
        return (uint16_t)(bits_of(value) >> 16);
    exponent = ilogbf(value) < -126 ? -126 : ilogbf(value);
    rounded = ldexp(nearbyint(ldexp(value, 7 - exponent)), exponent - 7);
    return (uint16_t)(bits_of(fabs(rounded) > FLT_MAX ? copysignf(INFINITY, value) : (float)rounded) >> 16);
}

/* Where a row of fp32 has an element: those with even numbers come first. */
static int place_of(int at, int count)
{
    return at % 2 * (count / 2) + at / 2;
}

static float reference_term(const struct ep_row_term *term, int at, int count)
{
    if (term->is_f32)
        return ((const float *)term->row)[place_of(at, count)];
    return reference_decode(((const uint16_t *)term->row)[at]);
}

static float reference_sum(const struct ep_row_term *terms, int n, int at, int count)
{
    volatile float sum = reference_term(&terms[0], at, count);
    int i;

    for (i = 1; i < n; i++)
        sum = sum + reference_term(&terms[i], at, count);
    return sum;
}

static float reference_weighted(const struct ep_row_term *terms, const float *weights, int n, int at)
{
    float sum = 0;
    int i;

    for (i = 0; i < n; i++)
        sum = fmaf(weights[i], reference_term(&terms[i], at, 0), sum);
    return sum;
}

/* --- data --- */

enum data {
    NORMAL,
    ANY_BITS, /* all sizes, infinities, NaN of both kinds */
    DENORMAL,
    SPECIAL,
    TIES, /* sums that lie in the middle between two bf16, or next to it */
    N_DATA
};

static uint16_t random_bf16(enum data data)
{
    static const uint16_t special[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0xff81, 0x7fff,
                                       0xffff, 0x7f7f, 0xff7f, 0x0001, 0x8001, 0x007f, 0x0080, 0x3f80, 0xbf80};
    /* 1, 1 + 2^-7, 2^-8, -2^-8, 3 * 2^-9, 2^-9, 2^-24: around 1, half a unit in the last place is 2^-8 */
    static const uint16_t ties[] = {0x3f80, 0x3f81, 0x3b80, 0xbb80, 0x3bc0, 0x3b00, 0x3380};
    uint64_t random = random_next();

    switch (data) {
    case NORMAL:
        return (uint16_t)((random & 0x807f) | (120 + (random >> 16) % 8) << 7);
    case ANY_BITS:
        return (uint16_t)random;
    case DENORMAL:
        return (uint16_t)(random & 0x80ff);
    case SPECIAL:
        return special[(random >> 16) % (sizeof(special) / sizeof(special[0]))];
    default:
        return ties[(random >> 16) % (sizeof(ties) / sizeof(ties[0]))];
    }
}

static float random_f32(enum data data)
{
    static const uint32_t special[] = {0x7f7fffff, 0xff7fffff, 0x7f7f8000, 0x7f7f7fff, 0x7f800001, 0xff800001,
                                       0x7fffffff, 0x00000001, 0x80000001, 0x00008000, 0x00007fff, 0x00018000};
    uint64_t random = random_next();

    switch (data) {
    case ANY_BITS:
        return float_of((uint32_t)random);
    case DENORMAL:
        return float_of((uint32_t)random & 0x80ffffffu);
    case SPECIAL:
        return float_of(special[(random >> 16) % (sizeof(special) / sizeof(special[0]))]);
    case TIES:
        return float_of(0x3f800000u | ((uint32_t)random & 0x00030000u) | 0x8000u | ((uint32_t)(random >> 40) % 3));
    default:
        return float_of((uint32_t)((random & 0x807fffff) | (120 + (random >> 32) % 8) << 23));
    }
}

/* Rows one after the other with gaps, so that their alignments to lines differ; odd ones are kept as fp32, too. */
struct operands {
    struct ep_row_term bf16[MOST_ROWS];
    struct ep_row_term mixed[MOST_ROWS];
    const uint16_t *rows[MOST_ROWS];
    float weights[MOST_ROWS];
    unsigned char *memory;
};

static void operands_fill(struct operands *operands, enum data data, int n, int count)
{
    unsigned char *next = operands->memory;
    int i, j;

    for (i = 0; i < n; i++) {
        uint16_t *row = (uint16_t *)(void *)next;
        float *wide = (float *)(void *)(next + 2 * (size_t)count + 16);

        for (j = 0; j < count; j++)
            row[j] = random_bf16(data);
        operands->rows[i] = row;
        operands->bf16[i] = (struct ep_row_term){.row = row};
        operands->mixed[i] = (struct ep_row_term){.row = row};
        next += 2 * (size_t)count + 16;
        if (random_next() >> 32 & 1) {
            for (j = 0; j < count; j++)
                wide[j] = random_f32(data);
            operands->mixed[i] = (struct ep_row_term){.row = wide, .is_f32 = 1};
            next += 4 * (size_t)count + 32;
        }
        operands->weights[i] = data == NORMAL ? (float)(random_next() % 1000) / 999.0f : random_f32(data);
    }
}

/* --- outputs --- */

struct output {
    unsigned char *memory; /* aligned to 64 */
    size_t offset, bytes;
};

static void *output_start(struct output *output, size_t offset, size_t bytes)
{
    output->offset = GUARD + offset;
    output->bytes = bytes;
    memset(output->memory, CANARY, output->offset + bytes + GUARD);
    return output->memory + output->offset;
}

static void output_check(const struct output *output, const void *expected, const char *what)
{
    size_t i;

    for (i = 0; i < output->offset; i++)
        assert_int_equal(output->memory[i], CANARY);
    for (i = output->offset + output->bytes; i < output->offset + output->bytes + GUARD; i++)
        assert_int_equal(output->memory[i], CANARY);
    if (memcmp(output->memory + output->offset, expected, output->bytes)) {
        print_message("%s\n", what);
        assert_memory_equal(output->memory + output->offset, expected, output->bytes);
    }
}

/* Aligned memory; a fixed size, so that each test can use what it needs of it. */
static void *aligned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);

    assert_non_null(memory);
    return memory;
}

struct bench {
    struct operands operands;
    struct output output;
    uint16_t plain[MOST_COUNT], mixed[MOST_COUNT], weighted[MOST_COUNT];
    float wide[MOST_COUNT];
};

static struct bench *bench_new(void)
{
    struct bench *bench = calloc(1, sizeof(*bench));

    assert_non_null(bench);
    bench->operands.memory = aligned((size_t)MOST_ROWS * (6 * MOST_COUNT + 64));
    bench->output.memory = aligned(2 * GUARD + 64 + 4 * MOST_COUNT);
    return bench;
}

static void bench_free(struct bench *bench)
{
    free(bench->operands.memory);
    free(bench->output.memory);
    free(bench);
}

static void bench_expect(struct bench *bench, int n, int count)
{
    const struct operands *in = &bench->operands;
    int at;

    for (at = 0; at < count; at++) {
        float sum = n ? reference_sum(bench->operands.bf16, n, at, count) : 0;

        bench->plain[at] = reference_round(sum);
        bench->wide[place_of(at, count)] = isnan(sum) ? float_of(0x7fc00000u) : sum;
        bench->mixed[at] = reference_round(n ? reference_sum(bench->operands.mixed, n, at, count) : 0);
        bench->weighted[at] = reference_round(reference_weighted(in->bf16, in->weights, n, at));
    }
}

static void bench_check_form(struct bench *bench, const struct ep_rows_ops *form, int n, int count, size_t offset)
{
    struct operands *in = &bench->operands;
    char what[128];
    void *out;

    snprintf(what, sizeof(what), "%s, n %d, count %d, output at %zu", form->name, n, count, offset);
    out = output_start(&bench->output, offset, 2 * (size_t)count);
    form->weighted_sum_bf16(out, in->rows, in->weights, n, count);
    output_check(&bench->output, bench->weighted, what);
    if (n == 0)
        return;
    out = output_start(&bench->output, offset, 2 * (size_t)count);
    form->sum_bf16(out, in->bf16, n, count);
    output_check(&bench->output, bench->plain, what);

    out = output_start(&bench->output, offset, 2 * (size_t)count);
    form->sum_bf16_stream(out, in->bf16, n, count);
    ep_rows_stream_end();
    output_check(&bench->output, bench->plain, what);

    out = output_start(&bench->output, offset, 2 * (size_t)count);
    form->sum_bf16(out, in->mixed, n, count);
    output_check(&bench->output, bench->mixed, what);

    out = output_start(&bench->output, offset, 2 * (size_t)count);
    form->sum_bf16_stream(out, in->mixed, n, count);
    ep_rows_stream_end();
    output_check(&bench->output, bench->mixed, what);

    out = output_start(&bench->output, offset, 4 * (size_t)count);
    form->sum_f32(out, in->bf16, n, count);
    output_check(&bench->output, bench->wide, what);
}

static void bench_check(struct bench *bench, enum data data, int n, int count)
{
    size_t offset = random_next() >> 32 & 0x30;
    int form;

    operands_fill(&bench->operands, data, n, count);
    bench_expect(bench, n, count);
    for (form = 0; form < N_FORMS; form++) {
        if (forms[form])
            bench_check_form(bench, forms[form], n, count, offset);
    }
}

TEST(test_sums)
{
    static const int counts[] = {8,   16,  24,  32,  40,  48,  56,  64,  72,   88,   104,
                                 120, 128, 136, 184, 248, 256, 264, 520, 1000, 1032, 2184};
    struct bench *bench = bench_new();
    size_t c;
    int round, data, n;

    for (round = 0; round < ROUNDS; round++) {
        for (data = 0; data < N_DATA; data++) {
            for (n = 0; n <= 9; n++) {
                for (c = 0; c < sizeof(counts) / sizeof(counts[0]); c++)
                    bench_check(bench, data, n, counts[c]);
            }
        }
    }
    bench_free(bench);
}

TEST(test_sums_long)
{
    static const int counts[] = {7168, MOST_COUNT};
    static const int rows[] = {1, 2, 3, 8, 9};
    struct bench *bench = bench_new();
    size_t c, r;

    for (c = 0; c < 2; c++) {
        for (r = 0; r < sizeof(rows) / sizeof(rows[0]); r++)
            bench_check(bench, (c + r) % N_DATA, rows[r], counts[c]);
    }
    bench_check(bench, NORMAL, 64, 4104);
    bench_check(bench, NORMAL, MOST_ROWS, 264);
    bench_free(bench);
}

/* What must come out, said by hand: signs of zeros, ties, overflow, order, one rounding only. */
TEST(test_sums_by_hand)
{
    static const struct {
        uint16_t in[3];
        int n;
        uint16_t sum;
        uint32_t wide;
    } cases[] = {
        {{0x8000}, 1, 0x8000, 0x80000000},         /* -0 alone stays: nothing was added to zero */
        {{0x8000, 0x8000}, 2, 0x8000, 0x80000000}, /* -0 - 0 */
        {{0x8000, 0x0000}, 2, 0x0000, 0x00000000},
        {{0x3f80, 0x3b80}, 2, 0x3f80, 0x3f808000},         /* 1 + half a unit: down to even */
        {{0x3f81, 0x3b80}, 2, 0x3f82, 0x3f818000},         /* ... and up to even */
        {{0x3f80, 0x3b80, 0x3380}, 3, 0x3f80, 0x3f808000}, /* 2^-24 is lost in fp32, to even, before the rounding */
        {{0x3380, 0x3380, 0x3f80}, 3, 0x3f80, 0x3f800001}, /* ... but not when it comes first */
        {{0x7f7f, 0x7f7f}, 2, 0x7f80, 0x7f800000},         /* overflow of fp32 */
        {{0x7f7f, 0x7b00}, 2, 0x7f80, 0x7f7f8000},         /* not of fp32: the tie above the largest bf16 */
        {{0x7f80, 0xff80}, 2, 0x7fc0, 0x7fc00000},         /* infinity - infinity */
        {{0xffff}, 1, 0x7fc0, 0x7fc00000},                 /* any NaN */
        {{0xff81, 0x3f80}, 2, 0x7fc0, 0x7fc00000},
        {{0x0001}, 1, 0x0001, 0x00010000},         /* least denormal */
        {{0x0040, 0x0040}, 2, 0x0080, 0x00800000}, /* denormals that add up to a normal number */
        {{0x0080, 0x8001}, 2, 0x007f, 0x007f0000},
    };
    uint16_t rows[3][8], out[8];
    const struct ep_row_term terms[3] = {{.row = rows[0]}, {.row = rows[1]}, {.row = rows[2]}};
    float wide[8];
    size_t c;
    int form, i;

    for (c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        for (i = 0; i < 24; i++)
            rows[i / 8][i % 8] = cases[c].in[i / 8];
        for (form = 0; form < N_FORMS; form++) {
            if (!forms[form])
                continue;
            forms[form]->sum_bf16(out, terms, cases[c].n, 8);
            forms[form]->sum_f32(wide, terms, cases[c].n, 8);
            for (i = 0; i < 8; i++) {
                assert_int_equal(out[i], cases[c].sum);
                assert_int_equal(bits_of(wide[i]), cases[c].wide);
            }
        }
    }
}

/*
 * (1 + 2^-7) * (1 + 2^-23) = 1 + 2^-7 + 2^-23 + 2^-30, of which a rounded product loses the last term. With the others
 * taken away before, 2^-30 is what is left, or nothing.
 */
TEST(test_weighted_is_fused)
{
    const float weights[2] = {-(1.0f + 0x1p-7f + 0x1p-23f), 1.0f + 0x1p-23f};
    uint16_t ones[8], others[8], out[8];
    const uint16_t *rows[2] = {ones, others};
    int form, i;

    for (i = 0; i < 8; i++) {
        ones[i] = 0x3f80;
        others[i] = 0x3f81;
    }
    for (form = 0; form < N_FORMS; form++) {
        if (!forms[form])
            continue;
        forms[form]->weighted_sum_bf16(out, rows, weights, 2, 8);
        for (i = 0; i < 8; i++)
            assert_int_equal(out[i], (127 - 30) << 7);
    }
}

/* Unlike the plain sums they start from +0. */
TEST(test_weighted_starts_from_zero)
{
    const float one = 1.0f;
    uint16_t row[8], out[8];
    const uint16_t *rows[1] = {row};
    int form, i;

    for (i = 0; i < 8; i++)
        row[i] = 0x8000;
    for (form = 0; form < N_FORMS; form++) {
        if (!forms[form])
            continue;
        memset(out, CANARY, sizeof(out));
        forms[form]->weighted_sum_bf16(out, rows, &one, 1, 8);
        for (i = 0; i < 8; i++)
            assert_int_equal(out[i], 0x0000);
    }
}

/* --- copies --- */

#define COPY_MOST 20000

/* `form`: with its streamed stores; NULL: with those of the best one, or with plain ones. */
static void check_copy(const struct ep_rows_ops *form, bool stream, int n, size_t bytes, const unsigned char *from,
                       struct output *outputs)
{
    void *dst[MOST_ROWS];
    char what[128];
    int i;

    snprintf(what, sizeof(what), "%s, stream %d, n %d, %zu bytes", form ? form->name : "all", stream, n, bytes);
    for (i = 0; i < n; i++)
        dst[i] = output_start(&outputs[i], (size_t)(i % 4) * 16, bytes);
    if (!form)
        (stream ? ep_rows_copy_stream : ep_rows_copy)(dst, n, from, bytes);
    for (i = 0; form && i < n; i++)
        form->stream_range(dst[i], from, bytes);
    ep_rows_stream_end();
    for (i = 0; i < n; i++)
        output_check(&outputs[i], from, what);
}

TEST(test_copies)
{
    static const size_t sizes[] = {0,    16,   32,   48,   64,   80,   112,  128,  224,  1008,  4032,  4048,
                                   4064, 4080, 4096, 4112, 4144, 4160, 8176, 8192, 8240, 14336, 14352, COPY_MOST};
    static const int numbers[] = {0, 1, 2, 3, 4, 8, 9, MOST_ROWS};
    struct output outputs[MOST_ROWS] = {{0}};
    unsigned char *source = aligned(COPY_MOST + 64);
    size_t s, k, i;
    int form, stream;

    for (i = 0; i < MOST_ROWS; i++)
        outputs[i].memory = aligned(2 * GUARD + 64 + COPY_MOST);
    for (i = 0; i < COPY_MOST + 64; i++)
        source[i] = (unsigned char)(random_next() >> 32);
    for (s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (k = 0; k < sizeof(numbers) / sizeof(numbers[0]); k++) {
            for (stream = 0; stream < 2; stream++)
                check_copy(NULL, stream, numbers[k], sizes[s], source + (s + k) % 4 * 16, outputs);
            for (form = 0; form < N_FORMS; form++)
                if (forms[form])
                    check_copy(forms[form], true, numbers[k], sizes[s], source + (s + k) % 4 * 16, outputs);
        }
    }
    for (i = 0; i < MOST_ROWS; i++)
        free(outputs[i].memory);
    free(source);
}

static int find_forms(void **state)
{
    int form;

    (void)state;
    for (form = 0; form < N_FORMS; form++) {
        forms[form] = ep_rows_find(form_names[form]);
        if (!forms[form])
            print_message("no %s on this machine\n", form_names[form]);
    }
    return 0;
}

TEST_GROUP(find_forms, NULL)
