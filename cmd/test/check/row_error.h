/* SPDX-License-Identifier: Apache-2.0 */
/*
 * row_error.h - error text of the checks, one line.
 *
 * The function that detects an error writes the text; its callers only return false.
 */
#ifndef EP_TEST_CHECK_ROW_ERROR_H
#define EP_TEST_CHECK_ROW_ERROR_H

#include <stdbool.h>

struct check_error {
    char text[240];
};

/* Writes the text (printf-like, truncated if too long) and returns false. `error` may be NULL. */
bool check_fail(struct check_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
