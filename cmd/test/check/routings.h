/* SPDX-License-Identifier: Apache-2.0 */
/*
 * routings.h - synthetic routings: the experts selected by the tokens of all ranks.
 *
 * A routing covers the whole group and depends only on its specification. Any rank can compute any token of any rank,
 * with the same result on every platform.
 */
#ifndef EP_TEST_CHECK_ROUTINGS_H
#define EP_TEST_CHECK_ROUTINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/*
 * --- routing_file.c: routings saved as text: a line of expert numbers for each token, as numpy.savetxt(file, indices,
 * fmt="%d") writes them. A blank line begins the table of the next rank ---
 *
 * Input is not trusted: any bytes are safe to read.
 */

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

/* --- routings.c --- */

enum routing_kind {
    ROUTING_UNIFORM = 0, /* K distinct experts at random */
    ROUTING_ZIPF,        /* popularity of the p-th expert ~ p^-1.2, in random order of the experts */
    ROUTING_GROUPED,     /* DeepSeek-V3's gate: the best 4 of 8 groups, then the best K experts in them */
    ROUTING_ONE,         /* all tokens of all ranks to one rank; K > L: the rest to the next ranks */
    ROUTING_DROPPED,     /* uniform with holes (-1), and tokens that select no expert */
    ROUTING_EMPTY,       /* some ranks have no tokens, some receive none */
    ROUTING_REPEATED,    /* K experts at random, the same one any number of times */
    ROUTING_FILE         /* from a file: [N,K], the same for every rank, or [R,N,K] */
};

struct routing_name {
    const char *name;
    enum routing_kind kind;
};

/* The kinds that have a name: all but ROUTING_FILE. Ends with a NULL name. */
extern const struct routing_name routing_names[];

/* The row of that name, or NULL. */
const struct routing_name *routing_find(const char *name);

struct routing_spec {
    enum routing_kind kind;
    uint64_t seed;
    int n_ranks;
    int n_tokens;     /* N of every rank (ROUTING_EMPTY: of those with tokens); file: 0 for all in the file */
    int topk;         /* K; file: 0 for that of the file */
    int n_experts;    /* E, a multiple of n_ranks */
    const char *path; /* ROUTING_FILE */
};

struct routing;

/* Validates the specification, and the range of all entries of a file. */
bool routing_new(const struct routing_spec *spec, struct routing **ret_routing, struct check_error *error);
void routing_free(struct routing *routing);

/* The specification with N and K filled in from the file. Borrowed. */
const struct routing_spec *routing_get_spec(const struct routing *routing);

/* Number of tokens of `rank`. */
int routing_tokens(const struct routing *routing, int rank);

/*
 * Experts and weights of one token. Weights are positive with a sum of about 1 over all K. Dropped selections have a
 * weight, too, so that its use is detected. Either output may be NULL. [K]
 */
void routing_token(const struct routing *routing, int rank, int token, int32_t *ret_experts, float *ret_weights);

/* All tokens of one rank. [N,K] each, either may be NULL. */
void routing_fill(const struct routing *routing, int rank, int32_t *ret_experts, float *ret_weights);

#endif
