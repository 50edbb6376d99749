/* SPDX-License-Identifier: Apache-2.0 */
/*
 * routing_file.h - reader for routings saved as text: a line of expert numbers for each token, as
 * numpy.savetxt(file, indices, fmt="%d") writes them. A blank line begins the table of the next rank.
 *
 * Input is not trusted: any bytes are safe to read.
 */
#ifndef EP_TEST_CHECK_ROUTING_FILE_H
#define EP_TEST_CHECK_ROUTING_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* One line. The function that detects an error writes the text; its callers only return false. */
struct check_error {
    char text[240];
};

/* Writes the text (printf-like, truncated if too long) and returns false. `error` may be NULL. */
bool check_fail(struct check_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct routing_file {
    int n_tables; /* 1: for every rank, else one for each */
    int n_tokens; /* of each table */
    int topk;
    int32_t *experts; /* [n_tables, n_tokens, topk] */
};

/* Reads `stream` to its end. *ret_file is set only on success, to be freed by routing_file_done(). */
bool routing_file_read(FILE *stream, struct routing_file *ret_file, struct check_error *error);

/* Reads the regular file `path`, with which the text of an error begins. */
bool routing_file_load(const char *path, struct routing_file *ret_file, struct check_error *error);

/* Accepts a zeroed one. */
void routing_file_done(struct routing_file *file);

#endif
