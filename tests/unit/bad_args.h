/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bad_args.h - tables of bad arguments. A case is a good set of arguments with one to three fields changed.
 */
#ifndef EP_TEST_BAD_ARGS_H
#define EP_TEST_BAD_ARGS_H

#include "mock_backend.h"
#include "tests/args.h"
#include "unit.h"

#define RANKS 4

/* A pointer that is never dereferenced: the mock accesses no buffer. */
#define AT(address) ((uintptr_t)(address))

struct set {
    size_t offset, bytes; /* 0 bytes: no change */
    uint64_t value;
};

struct bad {
    struct set sets[4];
    ep_status status;
    const char *text; /* in the error text, after the name of the call */
};

#define SET(type, field, new_value)                                                                                    \
    {                                                                                                                  \
        .offset = offsetof(type, field), .bytes = sizeof(((type *)0)->field), .value = (uint64_t)(new_value)           \
    }

/* Rank 1 of RANKS with the mock, and objects of a case that close_comm() frees. */
extern ep_comm *comm;
extern ep_plan *plan;
extern ep_ll *ll;

int open_comm(void **state);
int close_comm(void **state);

/* Replaces `plan` by one of good arguments, with these flags, tokens and counts. */
void open_plan(uint32_t flags, int n_tokens, int64_t n_recv, int64_t out_rows);

/* Runs the good arguments, then each case: it must return its status and name the field, without a call of the backend.
 */
void run_cases(const char *call, ep_status (*run)(const void *args), const void *good, size_t bytes,
               const struct bad *cases, size_t n);

#define RUN_CASES(call, run, good, cases)                                                                              \
    run_cases(call, run, good, sizeof(*(good)), cases, sizeof(cases) / sizeof((cases)[0]))

/* N = 10, K = 8, E = 256 */
ep_plan_args good_plan(void);

/* fp8, 10 tokens of 1024 become 20: x is 0x2800 bytes at 0x100000, recv_x 0x5000 at 0x400000 */
ep_dispatch_args good_dispatch(void);

/* 20 rows of 1024 become 10: x is 0xa000 bytes at 0x100000, out 0x5000 at 0x400000 */
ep_combine_args good_combine(void);

/* Results are [4, 512, 640]: 0x280000 bytes of bf16, 0x140000 of fp8. */
ep_ll_config good_ll(void);

/* fp8, 100 tokens at 0x1000000, result at 0x3000000 */
ep_ll_dispatch_args good_ll_dispatch(void);

/* Result at 0x1000000, 100 tokens at 0x4000000 */
ep_ll_combine_args good_ll_combine(void);

#endif
