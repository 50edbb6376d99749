/* SPDX-License-Identifier: Apache-2.0 */
/*
 * npy.h - reader for routings saved by numpy.save(): format versions 1, 2 and 3, int32 or int64, little endian, C
 * order, two or three dimensions ([N,K] or [R,N,K]).
 *
 * Everything else is rejected with an error text. Input is not trusted: any bytes are safe to parse.
 */
#ifndef EP_TEST_CHECK_NPY_H
#define EP_TEST_CHECK_NPY_H

#include "row_error.h"

#include <stddef.h>
#include <stdint.h>

#define NPY_MAX_DIMS 3
#define NPY_MAX_HEADER_BYTES 65536
#define NPY_MAX_FILE_BYTES (INT64_C(1) << 32)

struct npy_array {
    int n_dims;                  /* 2 or 3 */
    int64_t shape[NPY_MAX_DIMS]; /* unused ones are 1 */
    int64_t n_items;             /* their product */
    int item_bytes;              /* 4 or 8 */
    const unsigned char *items;  /* little endian, any alignment: use npy_item() */
    unsigned char *owned;        /* the whole file if npy_load() read it, else NULL */
};

/* Parses the `size` bytes at `data`, which the array borrows. *ret_array is set only on success. */
bool npy_parse(const void *data, size_t size, struct npy_array *ret_array, struct check_error *error);

/* Reads and parses a file. The text of an error begins with the path. npy_done() frees the array. */
bool npy_load(const char *path, struct npy_array *ret_array, struct check_error *error);

/* Accepts a zeroed array, and one of npy_parse(). */
void npy_done(struct npy_array *array);

/* Item number i in C order, 0 <= i < n_items. */
int64_t npy_item(const struct npy_array *array, int64_t i);

#endif
