/* SPDX-License-Identifier: Apache-2.0 */
/*
 * data.h - generates the rows of tokens, the biases and the replies of experts from a seed.
 *
 * Every rank can generate every row of every rank, so that received rows are verified without further communication.
 * With the random kinds, rows of different tokens differ, so that a misplaced row is always found. bf16 values are
 * between 2^-4 and 2^4 with random signs and all mantissas; fp8 rows use all codes but NaN.
 */
#ifndef EP_TEST_CHECK_DATA_H
#define EP_TEST_CHECK_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum data_kind { DATA_BF16_RANDOM = 0, DATA_BF16_CONSTANT, DATA_FP8_RANDOM, DATA_FP8_CONSTANT };

struct data {
    enum data_kind kind; /* constant kinds: all elements of all tokens of a rank are the same */
    uint64_t seed;
    int hidden;     /* multiple of 8; fp8: of 128 */
    int scale_type; /* fp8: EP_F32, or EP_UE8M0 (hidden a multiple of 512); 0 for bf16 */
};

bool data_is_fp8(const struct data *data);
size_t data_row_bytes(const struct data *data);
size_t data_scale_bytes(const struct data *data); /* of one row; 0 for bf16 */
int data_scale_items(const struct data *data);    /* of one row: floats or int32 */

/* "bf16 random", "bf16 constant", ... */
const char *data_kind_name(enum data_kind kind);

/* The row of one token, data_row_bytes(). */
void data_row(const struct data *data, int rank, int token, void *ret_row);

/* Its scales, data_scale_bytes(). Nothing for bf16. */
void data_scales(const struct data *data, int rank, int token, void *ret_scales);

/* Its row in bf16, as seen by an expert: fp8 rows are multiplied by their scales and rounded once. */
void data_bf16_row(const struct data *data, int rank, int token, uint16_t *ret_row);

/* Row of bias number `which` (0, 1): random bf16, a 64th of the size of the data. */
void data_bias(const struct data *data, int which, int rank, int token, uint16_t *ret_row);

/*
 * The reply for a token of an expert that does not return its input: random bf16. `replier`: a rank, or an expert if
 * each expert replies separately; different repliers have different rows.
 */
void data_reply(const struct data *data, int replier, int source, int token, uint16_t *ret_row);

/* The weight of such a reply, for selection k of the token. */
float data_reply_weight(const struct data *data, int source, int token, int k);

#endif
