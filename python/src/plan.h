/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - what plan.c (where tokens go) and plan_rows.c (dispatch and combine of a plan) share. */
#ifndef EPKIT_PYTHON_PLAN_H
#define EPKIT_PYTHON_PLAN_H

#include "bind.h"

struct plan_object {
    struct member member;
    ep_plan *plan;    /* NULL: freed */
    int32_t n_tokens; /* of the current call */
    int topk, n_experts, n_local;
    enum tensor_type idx_type;
    int64_t out_rows;
    int64_t n_recv;    /* -1: not known */
    int64_t most_recv; /* of the rank that receives most; -1: not known */
    bool expanded;
    bool fixed;   /* capacity: rows of inputs may be more than those received */
    bool updated; /* the number of tokens depends on the stream */
};

/* Sets *ret to the pointer of a tensor argument. */
#define GET(object, want_, tensor)                                                                                     \
    do {                                                                                                               \
        const struct want wanted_ = want_;                                                                             \
        if (!tensor_get(object, &wanted_, place_of(comm), tensor))                                                     \
            return NULL;                                                                                               \
    } while (0)
#define WANT(...) ((struct want){__VA_ARGS__})

/* An argument of the library's 32 bits; out of range it becomes one that the library refuses and names. */
int32_t narrow(int64_t value);

/* Sets n_tokens for a call in that stream. */
bool find_tokens(struct plan_object *plan, void *stream);

/* plan_rows.c: methods of the type Plan. */
PyObject *plan_dispatch(PyObject *self, PyObject *const *args);
PyObject *plan_combine(PyObject *self, PyObject *const *args);
PyObject *know_rows(PyObject *module, PyObject *type);
/* The first n of Rows; None of None. */
PyObject *received_rows(PyObject *rows, int64_t n);

#endif
