/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.h - why a function of the checks failed, as one line of text for a person.
 *
 * The function that finds the fault writes it; its callers pass `false` on.
 */
#ifndef EP_CHECK_ERROR_H
#define EP_CHECK_ERROR_H

#include <stdbool.h>

struct check_error {
    char text[240];
};

/* Writes the text (printf-like; longer ones are cut) and returns false. `error` may be NULL. */
bool check_fail(struct check_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
