/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency.h - what lowlatency.c (the object and its masks) and lowlatency_rows.c (its calls) share. */
#ifndef EPKIT_PYTHON_LOWLATENCY_H
#define EPKIT_PYTHON_LOWLATENCY_H

#include "bind.h"

/* The second half of a call with EP_LL_RECV_HOOK, until it has been received. */
struct half {
    PyObject
        *tensors;  /* tuple of what the call was given, which the library still reads and writes; NULL: none is open */
    uint64_t id;   /* argument of finish() */
    uint64_t call; /* the dispatch, or the one that the combine answers */
    uint64_t combine; /* number of the combine, 0: a dispatch */
    void *stream;
};

struct ll_object {
    struct member member;
    ep_ll *ll;     /* NULL: freed */
    bool exported; /* a tensor showed its buffer: the communicator frees it */
    int max_tokens, hidden, n_experts, n_local, topk;
    uint64_t last_call; /* of a dispatch */
    unsigned regroups;  /* of the communicator, when this was made or renewed */
    struct {
        uint64_t call;
        int64_t max_tokens;
    } dispatched[2]; /* those that a combine may still answer, by call % 2 */
    uint64_t combines, halves;
    struct half open[2]; /* by call % 2, as the library has them */
    char refusal[512];   /* of a receive for the call under way; "": none */
};

/* One tensor of a call: reads it as `want` says. */
static inline bool get(struct ll_object *ll, PyObject *object, const struct want want, struct tensor *ret_tensor)
{
    return tensor_get(object, &want, place_of(ll->member.comm), ret_tensor);
}

/* lowlatency_rows.c: methods of the type LowLatency. */
PyObject *ll_dispatch(PyObject *self, PyObject *const *args);
PyObject *ll_combine(PyObject *self, PyObject *const *args);
PyObject *ll_finish(PyObject *self, PyObject *const *args);

#endif
