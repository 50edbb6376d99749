/* SPDX-License-Identifier: Apache-2.0 */
/*
 * numeric.c - bf16, e4m3, ue8m0, and the element types by name.
 *
 * The conversions are branch-free bit operations, and the loops over a block have a constant length, so that compilers
 * vectorise them at -O2.
 */
#include "core/bf16.h"
#include "core/quantize.h"

#include <epkit/numeric.h>

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

#define E4M3_MAX 448.0f
#define E4M3_NAN 0x7f
#define E4M3_REBIAS ((127 - 7) << 3) /* between the exponents of fp32 and e4m3, above three bits of mantissa */
#define UE8M0_NAN 255u
#define UE8M0_MAX 254u /* 2^127 */

/* Rows of zeros or of denormals get this scale instead of one that overflows when it is inverted. */
#define AMAX_LEAST 1e-4f

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    [EP_BF16] = {"bf16", 2}, [EP_F8E4M3] = {"fp8", 1},  [EP_F32] = {"f32", 4},    [EP_I32] = {"i32", 4},
    [EP_I64] = {"i64", 8},   [EP_UE8M0] = {"ue8m0", 1}, [EP_F4E2M1] = {"fp4", 1}, [EP_UE8M0_32] = {"ue8m0 of 32", 1},
};

static int dtype_known(ep_dtype type)
{
    return (unsigned)type < sizeof(dtypes) / sizeof(dtypes[0]) && dtypes[type].name;
}

const char *ep_version(void)
{
    return VERSION_TEXT(EP_VERSION_MAJOR, EP_VERSION_MINOR, EP_VERSION_PATCH);
}

int ep_version_number(void)
{
    return EP_VERSION_MAJOR * 10000 + EP_VERSION_MINOR * 100 + EP_VERSION_PATCH;
}

size_t ep_dtype_bytes(ep_dtype type)
{
    return dtype_known(type) ? dtypes[type].bytes : 0;
}

const char *ep_dtype_name(ep_dtype type)
{
    return dtype_known(type) ? dtypes[type].name : "?";
}

uint16_t ep_bf16_from_f32(float value)
{
    return ep_bf16_round(value);
}

float ep_bf16_to_f32(uint16_t bits)
{
    return ep_bf16_widen(bits);
}

/*
 * Signed integers, because SSE2 compares only these. Masks instead of ?:, because gcc turns ?: into a branch to skip
 * the floating-point addition, and then does not vectorise.
 */
static inline __attribute__((always_inline)) uint8_t e4m3_round(float value)
{
    const int32_t max_bits = 0x43e00000;      /* 448 */
    const int32_t least_normal = 0x3c800000;  /* 2^-6 */
    const int32_t shift_in_bits = 0x46800000; /* 2^14: one unit in the last place is 2^-9, the least e4m3 */
    uint32_t bits = ep_bits_of_f32(value);
    int32_t sign = (int32_t)((bits >> 24) & 0x80u);
    int32_t magnitude = (int32_t)(bits & 0x7fffffffu);
    int32_t is_over = -(int32_t)(magnitude > max_bits);
    int32_t clamped = (max_bits & is_over) | (magnitude & ~is_over);
    int32_t normal = ((clamped + 0x7ffff + ((clamped >> 20) & 1)) >> 20) - E4M3_REBIAS;
    /* The addition itself rounds to multiples of 2^-9; a sum that reaches 2^-6 is the least normal number's code. */
    float shifted = ep_f32_of_bits((uint32_t)clamped) + ep_f32_of_bits((uint32_t)shift_in_bits);
    int32_t small = (int32_t)ep_bits_of_f32(shifted) - shift_in_bits;
    int32_t is_small = -(int32_t)(clamped < least_normal);
    int32_t is_nan = -(int32_t)(magnitude > (int32_t)EP_F32_INF_BITS);
    int32_t code = sign | (small & is_small) | (normal & ~is_small);

    return (uint8_t)((code & ~is_nan) | (E4M3_NAN & is_nan));
}

uint8_t ep_e4m3_from_f32(float value)
{
    return e4m3_round(value);
}

float ep_e4m3_to_f32(uint8_t bits)
{
    uint32_t magnitude = bits & 0x7fu;
    uint32_t sign = (uint32_t)(bits & 0x80u) << 24;
    uint32_t value;

    if (magnitude == E4M3_NAN)
        return ep_f32_of_bits(EP_F32_NAN_BITS);
    if (magnitude < 8)
        value = ep_bits_of_f32((float)magnitude * 0x1p-9f);
    else
        value = (magnitude + (uint32_t)E4M3_REBIAS) << 20;
    return ep_f32_of_bits(sign | value);
}

uint8_t ep_ue8m0_from_f32(float value)
{
    uint32_t bits = ep_bits_of_f32(value);
    uint32_t up = (bits + 0x7fffffu) >> 23;

    if (bits == EP_F32_INF_BITS || (bits & 0x7fffffffu) > EP_F32_INF_BITS)
        return UE8M0_NAN;
    /* 2^-127, code 0, is a denormal float (0x400000); smaller values are clamped to it. */
    if (bits >> 31 || bits <= 0x400000u)
        return 0;
    return (uint8_t)(up < UE8M0_MAX ? up : UE8M0_MAX);
}

float ep_ue8m0_to_f32(uint8_t bits)
{
    if (bits == UE8M0_NAN)
        return ep_f32_of_bits(EP_F32_NAN_BITS);
    return ep_f32_of_bits(bits ? (uint32_t)bits << 23 : 0x400000u);
}

/* Largest magnitude of a block, ignoring NaN. bf16 magnitudes are ordered like their bits. */
static inline __attribute__((always_inline)) float block_amax(const uint16_t *x)
{
    uint16_t most = 0;

    for (int i = 0; i < EP_SCALE_BLOCK; i++) {
        uint16_t magnitude = x[i] & 0x7fffu;

        magnitude = (uint16_t)(magnitude & (0u - (unsigned)(magnitude <= 0x7f80u)));
        most = magnitude > most ? magnitude : most;
    }
    return ep_bf16_widen(most);
}

static inline __attribute__((always_inline)) void quantize_row(const uint16_t *x, int hidden, int round_scale,
                                                               uint8_t *ret_x, float *ret_scales)
{
    for (int block = 0; block < hidden / EP_SCALE_BLOCK; block++) {
        const uint16_t *in = x + (size_t)block * EP_SCALE_BLOCK;
        uint8_t codes[EP_SCALE_BLOCK]; /* cannot overlap the input, which the compiler would have to check */
        float amax = block_amax(in);
        float factor = (amax > AMAX_LEAST ? amax : AMAX_LEAST) / E4M3_MAX;
        int i;

        if (round_scale)
            factor = ep_ue8m0_to_f32(ep_ue8m0_from_f32(factor));
        for (i = 0; i < EP_SCALE_BLOCK; i++)
            codes[i] = e4m3_round(ep_bf16_widen(in[i]) / factor);
        memcpy(ret_x + (size_t)block * EP_SCALE_BLOCK, codes, sizeof(codes));
        ret_scales[block] = factor;
    }
}

static void quantize_portable(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales)
{
    quantize_row(x, hidden, round_scale, ret_x, ret_scales);
}

/*
 * Wider vectors give the same bits by the same operations; a row of 7168 takes 7.3, 4.0 and 1.9 us (gcc 12, Zen 5). Not
 * target_clones: its resolvers run before the sanitizers are ready.
 */
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void quantize_avx2(const uint16_t *x, int hidden, int round_scale,
                                                          uint8_t *ret_x, float *ret_scales)
{
    quantize_row(x, hidden, round_scale, ret_x, ret_scales);
}

__attribute__((target("avx512f,avx512bw"))) static void quantize_avx512(const uint16_t *x, int hidden, int round_scale,
                                                                        uint8_t *ret_x, float *ret_scales)
{
    quantize_row(x, hidden, round_scale, ret_x, ret_scales);
}
#endif

ep_quantize_fn ep_quantize_find(const char *isa)
{
#if defined(__x86_64__)
    if (!strcmp(isa, "avx2"))
        return __builtin_cpu_supports("avx2") ? quantize_avx2 : NULL;
    if (!strcmp(isa, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? quantize_avx512 : NULL;
#endif
    return strcmp(isa, "portable") ? NULL : quantize_portable;
}

void ep_quantize_row(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales)
{
    static const char *const best_first[] = {"avx512", "avx2", "portable"};
    ep_quantize_fn quantize = NULL;

    for (int i = 0; !quantize; i++)
        quantize = ep_quantize_find(best_first[i]);
    quantize(x, hidden, round_scale, ret_x, ret_scales);
}

static float largest_of(const uint16_t *x, int n)
{
    uint16_t most = 0;

    for (int i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7fffu;

        most = magnitude <= 0x7f80u && magnitude > most ? magnitude : most;
    }
    return ep_bf16_widen(most);
}

/* Formats of ep_ll_dispatch(). [hidden] and [hidden / 32] bytes: */
static void quantize_mxfp8(const uint16_t *x, int hidden, uint8_t *ret_x, uint8_t *ret_scales)
{
    for (int block = 0; block < hidden / 32; block++, x += 32, ret_x += 32) {
        uint8_t scale = ep_ue8m0_from_f32(largest_of(x, 32) / E4M3_MAX);
        float factor = ep_ue8m0_to_f32(scale);

        for (int i = 0; i < 32; i++)
            ret_x[i] = e4m3_round(ep_bf16_widen(x[i]) / factor);
        ret_scales[block] = scale;
    }
}

/* Ties go to codes with an even mantissa; NaN fails every comparison. */
static uint8_t e2m1_round(float magnitude)
{
    return (uint8_t)(!(magnitude <= 0.25f) + !(magnitude < 0.75f) + !(magnitude <= 1.25f) + !(magnitude < 1.75f) +
                     !(magnitude <= 2.5f) + !(magnitude < 3.5f) + !(magnitude <= 5.0f));
}

/* [hidden / 2] and [hidden / 16] bytes: */
static void quantize_nvfp4(const uint16_t *x, int hidden, float global_scale, uint8_t *ret_x, uint8_t *ret_scales)
{
    for (int block = 0; block < hidden / 16; block++, x += 16, ret_x += 8) {
        uint8_t scale = e4m3_round(global_scale * (largest_of(x, 16) / 6.0f)), codes[16];
        float q = scale ? global_scale / ep_e4m3_to_f32(scale) : 0;

        for (int i = 0; i < 16; i++)
            codes[i] = (uint8_t)(e2m1_round(ep_bf16_widen(x[i] & 0x7fffu) * q) | x[i] >> 15 << 3);
        for (int i = 0; i < 8; i++)
            ret_x[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        ret_scales[block] = scale;
    }
}

void ep_pack_ue8m0(const float *scales, int n, int32_t *ret_packed)
{
    for (int i = 0; i < n / 4; i++) {
        const float *four = scales + 4 * (size_t)i;
        uint32_t packed = (uint32_t)ep_ue8m0_from_f32(four[0]) | (uint32_t)ep_ue8m0_from_f32(four[1]) << 8 |
                          (uint32_t)ep_ue8m0_from_f32(four[2]) << 16 | (uint32_t)ep_ue8m0_from_f32(four[3]) << 24;

        ret_packed[i] = (int32_t)packed;
    }
}

void ep_quantize(const uint16_t *x, int hidden, const ep_ll_dispatch_args *format, void *ret_x, void *ret_scales)
{
    float factors[EP_MAX_HIDDEN / EP_SCALE_BLOCK] = {0};

    if (format->out_dtype == EP_F4E2M1) {
        quantize_nvfp4(x, hidden, format->global_scale ? *format->global_scale : 1, ret_x, ret_scales);
    } else if (format->scale_type == EP_UE8M0_32) {
        quantize_mxfp8(x, hidden, ret_x, ret_scales);
    } else if (format->scale_type == EP_F32) {
        ep_quantize_row(x, hidden, (format->flags & EP_LL_ROUND_SCALE) != 0, ret_x, ret_scales);
    } else {
        ep_quantize_row(x, hidden, 1, ret_x, factors);
        ep_pack_ue8m0(factors, hidden / EP_SCALE_BLOCK, ret_scales);
    }
}
