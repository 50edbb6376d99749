/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_words.h - the head of a low-latency segment: what the ranks of a call publish to each other. For kernels, too:
 * includes no header of the library.
 */
#ifndef EP_NET_LL_WORDS_H
#define EP_NET_LL_WORDS_H

#include <epkit/types.h>
#include <stdint.h>

#define LL_WIRE_MAX_PARTS 8 /* of a row, each with a flag of its own */

/* Describes a call to the sender, in the outgoing segment of a remote rank. */
struct ll_wire_desc {
    uint64_t number; /* of the call; written before rows_ready or weights_ready */
    int32_t combine; /* 1: combine, 0: dispatch */
    int32_t max_tokens, parts;
    int32_t image_bytes; /* bytes of a slot that rows of this format use */
    int32_t parity;      /* of the dispatch */
    uint32_t detail;     /* arguments of the sender that the receiver compares with its own */
};

enum { LL_WIRE_DESC_WEIGHTS = 2, LL_WIRE_DESCS = 3 }; /* 0 and 1: rows of a call, by the parity of its number */

#define LL_WIRE_EVENT_LOST 1u /* bit of `events`: a remote rank is lost */
#define LL_WIRE_EVENT 2u      /* added to `events` after each change */

/* Head of a segment. [source]: written by that rank. */
struct ll_wire_segment {
    uint64_t completed[EP_MAX_RANKS];     /* [source] the last call that it has completed */
    uint64_t weights_ready[EP_MAX_RANKS]; /* [source] the last call for which all of its weights are here; with
                                                  masking, or between nodes */
    uint64_t rows_ready[EP_MAX_RANKS];    /* [source] the last call for which all of its rows are here; as above */
    uint32_t masked_by[EP_MAX_RANKS];     /* [source] it has masked this rank */
    uint64_t barriers[EP_MAX_RANKS];      /* [source] the last barrier that it has reached */
    uint64_t received[EP_MAX_RANKS];      /* [source] messages received from it; only in the landing segment */
    uint32_t detail[EP_MAX_RANKS];        /* [source] of its last weights; only in the landing segment */
    uint32_t events; /* In the landing segment: LL_WIRE_EVENT for each message received, | LL_WIRE_EVENT_LOST. In the
                        own segment of a GPU: its value as last seen by a kernel */
    uint32_t unused;
    struct ll_wire_desc desc[LL_WIRE_DESCS]; /* only in outgoing segments */
};

#endif
