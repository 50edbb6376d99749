/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mock_backend.h - a backend that only counts its calls. A test that links mock_backend.c gets it as "host": the real
 * one is then not linked at all.
 */
#ifndef EP_TEST_MOCK_BACKEND_H
#define EP_TEST_MOCK_BACKEND_H

#include "core/core.h"

struct mock {
    _Atomic int calls;  /* of any operation that could touch a peer or a buffer */
    _Atomic int opened; /* communicators */
    _Atomic int closed;
    ep_status answer;      /* of every operation */
    const char *text;      /* its reason */
    ep_status open_answer; /* of comm_open */
    ep_plan_info info;     /* of every plan */
    ep_plan_args plan;     /* the last one opened, as the core resolved it */
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    ep_ll_dispatch_args ll_dispatch;
    uint64_t ll_number; /* of the last dispatch; the call that the last combine or finish named */
    int32_t ll_topk;    /* of the last dispatch or combine */
    ep_stream stream;   /* of the last call that had one */
    bool was_blocking;  /* so was the last dispatch or combine */
    int event_timeout_ms;
};

extern struct mock mock;

/* A bootstrap of one rank with `nranks - 1` simulated peers that are identical to it. */
ep_boot mock_boot(int rank, int nranks);

/* A backend without any operation. */
extern const struct ep_backend_ops mock_backend_empty;

#endif
