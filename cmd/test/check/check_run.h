/* SPDX-License-Identifier: Apache-2.0 */
/* check_run.h - shared by the matrices: parameters, verdicts, guarded buffers. */
#ifndef EP_TEST_CHECK_CHECK_RUN_H
#define EP_TEST_CHECK_CHECK_RUN_H

#include "common/ranks/ranks.h"
#include "data.h"
#include "mirrors.h"
#include "reference.h"

enum check_memory { CHECK_ALTERNATE = -1, CHECK_ORDINARY = 0, CHECK_SYMMETRIC = 1 };

#define CHECK_NAME_BYTES 80

struct check_parameters {
    const struct check_matrix *matrix;
    int hidden;
    uint64_t seed;
    bool bf16, fp8;         /* element types to run */
    int only;               /* case number from 1; 0: all */
    bool no_partial_reduce; /* low latency: EP_LL_NO_PARTIAL_REDUCE */
    enum check_memory memory;
};

/* The result of one rank in one case, exchanged by ep_comm_allgather(). */
struct check_verdict {
    int32_t failed;
    char text[236];
};

struct check_run {
    struct ranks_ctx *ctx;
    struct check_parameters parameters;
    struct reference_group group;
    struct mirrors mirrors;
    int n_tokens; /* most tokens of a rank */
    int n_failed; /* cases */
    /* Of the current case: */
    char name[CHECK_NAME_BYTES]; /* "": no case has begun, or all have ended */
    const char *phase;           /* "dispatch", "worst-case dispatch", ...: for the texts of mismatches and errors */
    const char *call;            /* the current call */
    struct check_verdict verdict;
};

#define CHECK_TRY(call)                                                                                                \
    do {                                                                                                               \
        ep_status try_ = (call);                                                                                       \
        if (try_ != EP_OK)                                                                                             \
            return try_;                                                                                               \
    } while (0)

/*
 * Calls a function of the library unless a buffer has failed, records its name, and returns the status of either on
 * failure.
 */
#define CHECK_CALL(run, function, ...)                                                                                 \
    do {                                                                                                               \
        CHECK_TRY(check_buffers(run));                                                                                 \
        (run)->call = #function;                                                                                       \
        CHECK_TRY(function(__VA_ARGS__));                                                                              \
    } while (0)

/* Records a mismatch in the current phase; only the first one is kept. printf-like. */
void check_mismatch(struct check_run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * Compares `bytes` of one row and records the first element of `item_bytes` that differs. `row`: its index, `source`:
 * its origin, for the text (NULL: omitted).
 */
void check_row(struct check_run *run, const char *what, int64_t row, const struct reference_row *source,
               size_t item_bytes, size_t bytes, const void *expected, const void *got);

void check_equal(struct check_run *run, const char *what, int64_t expected, int64_t got);

/* Arrays of n int32_t or int64_t, by `item_bytes`. `got` NULL is a mismatch. */
void check_equal_array(struct check_run *run, const char *what, int64_t n, size_t item_bytes, const void *expected,
                       const void *got);

/* --- guarded buffers: mirrors with a guard behind the part that may be used --- */

#define CHECK_POISON 0xa5
#define CHECK_GUARD_BYTES 16384

/* A buffer of n_items * item_bytes and a guard; NULL after an error. Collective if symmetric. */
void *check_alloc(struct check_run *run, int64_t n_items, size_t item_bytes, bool symmetric);

/* The address of a buffer for the library. */
static inline void *check_address(const struct check_run *run, const void *buffer)
{
    return mirrors_address(&run->mirrors, buffer);
}

/* The first error of the buffers, with its call in run->call. */
ep_status check_buffers(struct check_run *run);

/* Fills the first `used` bytes and the guard behind them, or pulls them from the mirror. */
void check_poison(struct check_run *run, void *buffer, size_t used);
void check_pull(struct check_run *run, void *buffer, size_t used);

/* Writes the choices of this rank's tokens as `idx_type`, including the mirror. */
void check_load_choices(struct check_run *run, int idx_type, void *buffer);

/* Checks the guard behind the first `used` bytes. */
void check_guard(struct check_run *run, const char *what, const void *buffer, size_t used);

/* Checks that bytes `from` .. `to` still hold the pattern. */
void check_untouched(struct check_run *run, const char *what, const void *buffer, size_t from, size_t to);

/* --- a matrix --- */

struct check_matrix {
    const char *name;
    int count;
    /* Whether the case, numbered from 0, has a requested element type. Sets its name. */
    bool (*describe)(const struct check_run *run, int index, char ret_name[CHECK_NAME_BYTES]);
    /* NULL if the parameters are valid for the matrix, else the error. */
    const char *(*validate)(const struct check_run *run);
    /* Creates the state of the matrix for a job. */
    ep_status (*begin)(struct check_run *run, void **ret_state);
    /* Runs one case. Mismatches are recorded in run->verdict; returns the status of a failed call. */
    ep_status (*run)(struct check_run *run, void *state, int index);
    /* Frees the state. */
    void (*end)(void *state);
};

extern const struct check_matrix check_matrix_intranode, check_matrix_internode, check_matrix_lowlatency;

/* The matrix of that name, or NULL. */
const struct check_matrix *check_matrix_find(const char *name);

/* Whether the outputs of a case are in symmetric memory. */
bool check_is_symmetric(const struct check_run *run, int index);

#endif
