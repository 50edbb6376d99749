/* SPDX-License-Identifier: Apache-2.0 */
#include "data.h"

#include "number_formats.h"
#include "random.h"
#include "reference.h"

/* Streams below the data's seed. */
enum { STREAM_ROW = 1, STREAM_SCALES, STREAM_BIAS, STREAM_REPLY, STREAM_REPLY_WEIGHT };

/* Exponent fields of bf16: values of 2^-4 to 2^4, and a 64th of that. */
#define BF16_BASE UINT64_C(0x3d80)
#define BF16_BASE_BIAS (BF16_BASE - (6 << 7))

bool data_is_fp8(const struct data *data)
{
    return data->kind == DATA_FP8_RANDOM || data->kind == DATA_FP8_CONSTANT;
}

static bool is_constant(const struct data *data)
{
    return data->kind == DATA_BF16_CONSTANT || data->kind == DATA_FP8_CONSTANT;
}

size_t data_row_bytes(const struct data *data)
{
    return (size_t)data->hidden * (data_is_fp8(data) ? 1 : 2);
}

int data_scale_items(const struct data *data)
{
    if (!data_is_fp8(data))
        return 0;
    return data->hidden / (data->scale_type == EP_UE8M0 ? 4 * EP_SCALE_BLOCK : EP_SCALE_BLOCK);
}

size_t data_scale_bytes(const struct data *data)
{
    return (size_t)data_scale_items(data) * 4;
}

const char *data_kind_name(enum data_kind kind)
{
    static const char *const names[] = {"bf16 random", "bf16 constant", "fp8 random", "fp8 constant"};

    return names[kind];
}

/* Four elements from each number: sign, three bits of exponent on top of the base, mantissa. Never zero. */
static void random_bf16(uint64_t key, uint64_t base, int n, uint16_t *ret_row)
{
    base *= UINT64_C(0x0001000100010001);
    for (int i = 0; i < n / 4; i++) {
        uint64_t bits = random_at(key, (uint64_t)i);

        bits = (bits & UINT64_C(0x8000800080008000)) | ((bits & UINT64_C(0x03ff03ff03ff03ff)) + base);
        for (int j = 0; j < 4; j++)
            ret_row[4 * i + j] = (uint16_t)(bits >> 16 * j);
    }
}

/* Eight elements from each number; NaN becomes the code below it. */
static void random_e4m3(uint64_t key, int n, uint8_t *ret_row)
{
    for (int i = 0; i < n / 8; i++) {
        uint64_t bits = random_at(key, (uint64_t)i);
        uint64_t nan = ((bits & UINT64_C(0x7f7f7f7f7f7f7f7f)) + UINT64_C(0x0101010101010101)) >> 7;

        bits ^= nan & UINT64_C(0x0101010101010101);
        for (int j = 0; j < 8; j++)
            ret_row[8 * i + j] = (uint8_t)(bits >> 8 * j);
    }
}

void data_row(const struct data *data, int rank, int token, void *ret_row)
{
    uint64_t key = random_key(data->seed, STREAM_ROW, (uint64_t)rank, (uint64_t)token);
    uint16_t constant = format_to_bf16((float)(rank + 1));
    uint16_t *row = ret_row;

    switch (data->kind) {
    case DATA_BF16_RANDOM:
        random_bf16(key, BF16_BASE, data->hidden, row);
        break;
    case DATA_BF16_CONSTANT:
        for (int i = 0; i < data->hidden; i++)
            row[i] = constant;
        break;
    case DATA_FP8_RANDOM:
        random_e4m3(key, data->hidden, ret_row);
        break;
    case DATA_FP8_CONSTANT:
        memset(ret_row, 0x48 + rank % 48, data_row_bytes(data)); /* 4 to 240 */
        break;
    }
}

/*
 * 2^-6 to 2^2 with all mantissas. Constant rows have powers of two >= 1, so that sums of few such rows are exact and
 * not lost in the biases.
 */
static float scale_of_block(const struct data *data, uint64_t bits, int rank)
{
    if (is_constant(data))
        return ldexpf(1.0f, rank % 4);
    return ldexpf(1.0f + (float)(bits >> 41) / 8388608.0f, (int)(bits >> 32 & 7) - 6);
}

/* exponent_of_block() returns a power of two as an exponent byte: 2^-6 to 2^1, in constant rows 2^0 to 2^3. */
static uint8_t exponent_of_block(const struct data *data, uint64_t bits, int rank)
{
    return (uint8_t)(127 + (is_constant(data) ? rank % 4 : (int)(bits >> 32 & 7) - 6));
}

void data_scales(const struct data *data, int rank, int token, void *ret_scales)
{
    uint64_t key = random_key(data->seed, STREAM_SCALES, (uint64_t)rank, (uint64_t)token);
    bool is_packed = data->scale_type == EP_UE8M0;
    int n = data_scale_items(data);

    for (int i = 0; i < n; i++) {
        float scale = scale_of_block(data, random_at(key, (uint64_t)i), rank);
        uint32_t packed = 0;

        for (int j = 0; j < 4 && is_packed; j++)
            packed |= (uint32_t)exponent_of_block(data, random_at(key, 4 * (uint64_t)i + (uint64_t)j), rank) << 8 * j;
        memcpy((unsigned char *)ret_scales + 4 * i, is_packed ? (void *)&packed : (void *)&scale, 4);
    }
}

/* The scales of a row as factors, one per block. */
static void data_factors(const struct data *data, int rank, int token, float *ret_factors)
{
    uint32_t packed[EP_MAX_HIDDEN / EP_SCALE_BLOCK / 4] = {0};

    if (data->scale_type != EP_UE8M0) {
        data_scales(data, rank, token, ret_factors);
        return;
    }
    data_scales(data, rank, token, packed);
    for (int block = 0; block < data->hidden / EP_SCALE_BLOCK; block++)
        ret_factors[block] = format_from_ue8m0((uint8_t)(packed[block / 4] >> 8 * (block % 4)));
}

void data_bf16_row(const struct data *data, int rank, int token, uint16_t *ret_row)
{
    float factors[EP_MAX_HIDDEN / EP_SCALE_BLOCK];
    uint8_t row[EP_MAX_HIDDEN];

    if (!data_is_fp8(data)) {
        data_row(data, rank, token, ret_row);
        return;
    }
    data_row(data, rank, token, row);
    data_factors(data, rank, token, factors);
    reference_dequantize(row, factors, data->hidden, ret_row);
}

void data_bias(const struct data *data, int which, int rank, int token, uint16_t *ret_row)
{
    random_bf16(random_key(data->seed, STREAM_BIAS + (uint64_t)which * 256, (uint64_t)rank, (uint64_t)token),
                BF16_BASE_BIAS, data->hidden, ret_row);
}

void data_reply(const struct data *data, int replier, int source, int token, uint16_t *ret_row)
{
    random_bf16(random_key(data->seed, STREAM_REPLY + (uint64_t)replier * 256, (uint64_t)source, (uint64_t)token),
                BF16_BASE, data->hidden, ret_row);
}

float data_reply_weight(const struct data *data, int source, int token, int k)
{
    uint64_t key = random_key(data->seed, STREAM_REPLY_WEIGHT, (uint64_t)source, (uint64_t)token);

    return (float)((random_at(key, (uint64_t)k) >> 40) + 1) / 16777216.0f;
}
