/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_numeric.c - the small formats against definitions by value: the value of a code is computed with ldexp(), and
 * the rounding of a float by a search over all codes. No bit operations of the library are used.
 */
#include "numbers.h"
#include "unit.h"

#include "core/quantize.h"

#include <epkit/numeric.h>
#include <float.h>
#include <math.h>

/* Value of a code of sign, `exponent_bits` and `mantissa_bits`, infinities and NaN not considered. */
static double decode(unsigned code, int exponent_bits, int mantissa_bits)
{
    unsigned exponent = (code >> mantissa_bits) & ((1u << exponent_bits) - 1);
    unsigned mantissa = code & ((1u << mantissa_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double value;

    if (exponent)
        value = ldexp(1.0 + ldexp(mantissa, -mantissa_bits), (int)exponent - bias);
    else
        value = ldexp(mantissa, 1 - bias - mantissa_bits);
    return code >> (exponent_bits + mantissa_bits) ? -value : value;
}

TEST(test_types)
{
    static const struct {
        int type;
        size_t bytes;
        const char *name;
    } expected[] = {
        {EP_BF16, 2, "bf16"},  {EP_F8E4M3, 1, "fp8"},
        {EP_F32, 4, "f32"},    {EP_I32, 4, "i32"},
        {EP_I64, 8, "i64"},    {EP_UE8M0, 1, "ue8m0"},
        {EP_F4E2M1, 1, "fp4"}, {EP_UE8M0_32, 1, "ue8m0 of 32"},
        {0, 0, "?"},           {9, 0, "?"},
        {-1, 0, "?"},
    };
    char version[32];
    size_t i;

    for (i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        assert_int_equal(ep_dtype_bytes((ep_dtype)expected[i].type), expected[i].bytes);
        assert_string_equal(ep_dtype_name((ep_dtype)expected[i].type), expected[i].name);
    }
    snprintf(version, sizeof(version), "%d.%d.%d", EP_VERSION_MAJOR, EP_VERSION_MINOR, EP_VERSION_PATCH);
    assert_string_equal(ep_version(), version);
}

TEST(test_bf16_every_code)
{
    unsigned code;

    for (code = 0; code < 65536; code++) {
        float value = ep_bf16_to_f32((uint16_t)code);
        unsigned magnitude = code & 0x7fffu;

        if (magnitude > 0x7f80u) {
            assert_true(isnan(value));
            assert_int_equal(ep_bf16_from_f32(value), 0x7fc0);
            continue;
        }
        if (magnitude == 0x7f80u)
            assert_true(isinf(value) && !signbit(value) == !(code >> 15));
        else
            assert_true(value == decode(code, 8, 7));
        assert_int_equal(ep_bf16_from_f32(value), code);
    }
}

/* Around the middle between each code and the next, which for the largest finite one is infinity. */
TEST(test_bf16_ties)
{
    unsigned code;

    for (code = 0; code < 0x7f80u; code++) {
        uint32_t middle = code << 16 | 0x8000u;
        unsigned even = code & 1u ? code + 1 : code;
        unsigned sign;

        for (sign = 0; sign <= 0x8000u; sign += 0x8000u) {
            assert_int_equal(ep_bf16_from_f32(float_of(sign << 16 | middle)), sign | even);
            assert_int_equal(ep_bf16_from_f32(float_of(sign << 16 | (middle - 1))), sign | code);
            assert_int_equal(ep_bf16_from_f32(float_of(sign << 16 | (middle + 1))), sign | (code + 1));
        }
    }
    assert_int_equal(ep_bf16_from_f32(float_of(0x7f800001u)), 0x7fc0); /* signalling, payload in the lower half alone */
    assert_int_equal(ep_bf16_from_f32(float_of(0xffffffffu)), 0x7fc0);
    assert_int_equal(ep_bf16_from_f32(FLT_MAX), 0x7f80);
}

/* Nearest e4m3 by a search over all codes; of two equally near ones, the even code. */
static uint8_t nearest_e4m3(float value)
{
    double magnitude = fabs((double)value), best_distance = INFINITY;
    unsigned code, best = 0;

    if (isnan(value))
        return 0x7f;
    for (code = 0; code < 0x7f; code++) {
        double distance = fabs(decode(code, 4, 3) - magnitude);

        if (isinf(magnitude))
            distance = -(double)code;
        if (distance < best_distance || (distance == best_distance && !(code & 1u))) {
            best_distance = distance;
            best = code;
        }
    }
    return (uint8_t)(best | (signbit(value) ? 0x80u : 0u));
}

TEST(test_e4m3_every_code)
{
    unsigned code;

    for (code = 0; code < 256; code++) {
        float value = ep_e4m3_to_f32((uint8_t)code);

        if ((code & 0x7fu) == 0x7fu) {
            assert_true(isnan(value));
            assert_int_equal(ep_e4m3_from_f32(value), 0x7f);
            continue;
        }
        assert_true(value == decode(code, 4, 3));
        assert_int_equal(signbit(value) != 0, code >> 7);
        assert_int_equal(ep_e4m3_from_f32(value), code);
    }
    assert_true(ep_e4m3_to_f32(0x7e) == 448.0f);
}

static void check_e4m3(float value)
{
    assert_int_equal(ep_e4m3_from_f32(value), nearest_e4m3(value));
    assert_int_equal(ep_e4m3_from_f32(-value), nearest_e4m3(-value));
}

TEST(test_e4m3_rounding)
{
    static const float special[] = {448.0f,   463.9f,    464.0f,    465.0f,   480.0f,          1e30f,
                                    FLT_MAX,  INFINITY,  0x1p-9f,   0x1p-10f, 0x1.000002p-10f, 0x0.fffffep-10f,
                                    0x1p-11f, 0x1p-126f, 0x1p-149f, 0.0f};
    unsigned code;
    size_t i;

    for (code = 0; code < 0x7e; code++) {
        float middle = (float)((decode(code, 4, 3) + decode(code + 1, 4, 3)) / 2);

        assert_int_equal(ep_e4m3_from_f32(middle), code & 1u ? code + 1 : code);
        check_e4m3(middle);
        check_e4m3(nextafterf(middle, 0.0f));
        check_e4m3(nextafterf(middle, INFINITY));
    }
    for (i = 0; i < sizeof(special) / sizeof(special[0]); i++)
        check_e4m3(special[i]);
    assert_int_equal(ep_e4m3_from_f32(INFINITY), 0x7e);
    assert_int_equal(ep_e4m3_from_f32(-1e9f), 0xfe);
    assert_int_equal(ep_e4m3_from_f32(-NAN), 0x7f);
    assert_int_equal(ep_e4m3_from_f32(float_of(0x7f800001u)), 0x7f);
    /* All sizes from 2^-14 to 2^11, and any bits at all. */
    for (i = 0; i < 100000; i++) {
        check_e4m3(float_of((uint32_t)((113 + random_next() % 25) << 23 | (random_next() & 0x7fffffu))));
        check_e4m3(float_of((uint32_t)random_next()));
    }
}

TEST(test_ue8m0)
{
    unsigned code;

    for (code = 0; code < 255; code++) {
        float value = ep_ue8m0_to_f32((uint8_t)code);

        assert_true(value == ldexp(1.0, (int)code - 127));
        assert_int_equal(ep_ue8m0_from_f32(value), code);
        assert_int_equal(ep_ue8m0_from_f32(nextafterf(value, 0.0f)), code);
        assert_int_equal(ep_ue8m0_from_f32(nextafterf(value, INFINITY)), code < 254 ? code + 1 : 254);
        if (code < 254)
            assert_int_equal(ep_ue8m0_from_f32(value * 1.5f), code + 1);
    }
    assert_true(isnan(ep_ue8m0_to_f32(255)));
    assert_int_equal(ep_ue8m0_from_f32(NAN), 255);
    assert_int_equal(ep_ue8m0_from_f32(INFINITY), 255);
    assert_int_equal(ep_ue8m0_from_f32(FLT_MAX), 254);
    assert_int_equal(ep_ue8m0_from_f32(0x1p-149f), 0);
}

TEST(test_pack)
{
    const float scales[] = {1.0f, 2.0f, 0.5f, 0x1p-127f, 0x1p127f, 0.25f, 4.0f, 8.0f};
    int32_t packed[3] = {-7, -7, -7};
    const unsigned char bytes[] = {127, 128, 126, 0, 254, 125, 129, 130};
    int i;

    ep_pack_ue8m0(scales, 8, packed);
    for (i = 0; i < 8; i++)
        assert_int_equal((uint32_t)packed[i / 4] >> (8 * (i % 4)) & 0xffu, bytes[i]);
    assert_int_equal(packed[2], -7);
}

/* --- ep_quantize_row --- */

#define BLOCKS 7
#define HIDDEN (BLOCKS * EP_SCALE_BLOCK)
#define CANARY 0xa5

struct quantized {
    uint8_t x[HIDDEN + 16];
    float scales[BLOCKS + 1];
};

static const char *const forms[] = {"portable", "avx2", "avx512"};

#define N_FORMS (sizeof(forms) / sizeof(forms[0]))

static void quantize(ep_quantize_fn run, const uint16_t *x, int round_scale, struct quantized *ret_result)
{
    size_t i;

    memset(ret_result, CANARY, sizeof(*ret_result));
    run(x, HIDDEN, round_scale, ret_result->x, ret_result->scales);
    for (i = HIDDEN; i < sizeof(ret_result->x); i++)
        assert_int_equal(ret_result->x[i], CANARY);
    assert_int_equal(bits_of(ret_result->scales[BLOCKS]), 0xa5a5a5a5u);
}

/* The rule, read from lowlatency.h; amax in double, the rounding of the factor with frexp(). */
static float expected_factor(const uint16_t *x, int round_scale)
{
    double amax = 1e-4f;
    float factor;
    int i, exponent;

    for (i = 0; i < EP_SCALE_BLOCK; i++) {
        if ((x[i] & 0x7fffu) <= 0x7f80u)
            amax = fmax(amax, fabs(decode(x[i], 8, 7)));
    }
    factor = (float)amax / 448.0f;
    if (!round_scale)
        return factor;
    return frexp(factor, &exponent) == 0.5 ? factor : (float)ldexp(1.0, exponent);
}

static void check_quantized(const uint16_t *x, int round_scale, const struct quantized *result)
{
    int i;

    for (i = 0; i < HIDDEN; i++) {
        const uint16_t *block = x + i / EP_SCALE_BLOCK * EP_SCALE_BLOCK;
        float factor = expected_factor(block, round_scale);
        double value = decode(x[i], 8, 7);
        double back = (double)ep_e4m3_to_f32(result->x[i]) * factor;

        assert_int_equal(bits_of(result->scales[i / EP_SCALE_BLOCK]), bits_of(factor));
        if ((x[i] & 0x7fffu) > 0x7f80u) {
            assert_int_equal(result->x[i], 0x7f);
            continue;
        }
        assert_int_equal(result->x[i], nearest_e4m3((float)value / factor));
        /* Half a unit of three mantissa bits, or of the least e4m3; a little more for the rounded quotient. */
        assert_true(fabs(back - value) <= 1.0001 * fmax(fabs(value) / 16, factor * 0x1p-10));
    }
}

/* Blocks of very different sizes: 2^-30 .. 2^30, zeros, and denormals alone. */
static void random_row(uint16_t *ret_x)
{
    int i, size = 0;

    for (i = 0; i < HIDDEN; i++) {
        if (i % EP_SCALE_BLOCK == 0)
            size = (int)(random_next() % 61) - 30;
        ret_x[i] = (uint16_t)((random_next() & 0x807fu) | (unsigned)(127 + size - (int)(random_next() % 12)) << 7);
        if (i / EP_SCALE_BLOCK == 1)
            ret_x[i] = (uint16_t)(random_next() & 0x8000u);
        if (i / EP_SCALE_BLOCK == 2)
            ret_x[i] = (uint16_t)(random_next() & 0x807fu);
    }
}

TEST(test_quantize)
{
    struct quantized result;
    uint16_t x[HIDDEN];
    size_t form;
    int round, round_scale;

    for (form = 0; form < N_FORMS; form++) {
        ep_quantize_fn run = ep_quantize_find(forms[form]);

        if (!run) {
            print_message("no %s on this machine\n", forms[form]);
            continue;
        }
        for (round = 0; round < 20; round++) {
            random_row(x);
            x[5 * EP_SCALE_BLOCK + round] = 0x7fc1; /* a NaN, and one with the sign set that is signalling */
            x[5 * EP_SCALE_BLOCK + round + 40] = 0xff81;
            for (round_scale = 0; round_scale < 2; round_scale++) {
                quantize(run, x, round_scale, &result);
                check_quantized(x, round_scale, &result);
            }
        }
    }
    quantize(ep_quantize_row, x, 0, &result);
    check_quantized(x, 0, &result);
}

/* amax of 448 * 2^k needs no rounding of the factor, the next bf16 above it doubles it. */
TEST(test_quantize_power_of_two)
{
    uint16_t x[HIDDEN] = {0};
    struct quantized result;
    int k;

    for (k = -20; k <= 20; k++) {
        x[77] = ep_bf16_from_f32((float)ldexp(448.0, k));
        quantize(ep_quantize_row, x, 1, &result);
        assert_true(result.scales[0] == ldexp(1.0, k));
        assert_int_equal(result.x[77], 0x7e);
        x[77]++;
        quantize(ep_quantize_row, x, 1, &result);
        assert_true(result.scales[0] == ldexp(1.0, k + 1));
    }
}

TEST(test_quantize_infinity)
{
    uint16_t x[HIDDEN];
    struct quantized result;
    int i, round_scale;

    for (round_scale = 0; round_scale < 2; round_scale++) {
        random_row(x);
        x[9] = 0xff80;
        quantize(ep_quantize_row, x, round_scale, &result);
        for (i = 0; i < EP_SCALE_BLOCK; i++)
            assert_true(isnan(ep_e4m3_to_f32(result.x[i]) * result.scales[0]));
        for (; i < HIDDEN; i++)
            assert_false(isnan(ep_e4m3_to_f32(result.x[i]) * result.scales[i / EP_SCALE_BLOCK]));
    }
}

/* Random bits: all variants agree with the portable one. */
TEST(test_quantize_forms_agree)
{
    ep_quantize_fn portable = ep_quantize_find("portable");
    struct quantized expected, result;
    uint16_t x[HIDDEN];
    size_t form;
    int round, i;

    assert_non_null(portable);
    assert_null(ep_quantize_find("mmx"));
    for (round = 0; round < 500; round++) {
        for (i = 0; i < HIDDEN; i++)
            x[i] = (uint16_t)random_next() & (i < HIDDEN / 2 ? 0xffffu : 0xbfffu);
        quantize(portable, x, round & 1, &expected);
        for (form = 1; form < N_FORMS; form++) {
            if (!ep_quantize_find(forms[form]))
                continue;
            quantize(ep_quantize_find(forms[form]), x, round & 1, &result);
            assert_memory_equal(&result, &expected, sizeof(result));
        }
    }
}
