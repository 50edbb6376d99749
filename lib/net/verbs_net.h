/* SPDX-License-Identifier: Apache-2.0 */
/* verbs_net.h - an endpoint of the verbs network; for verbs*.c only. */
#ifndef EP_NET_VERBS_NET_H
#define EP_NET_VERBS_NET_H

#include "base/error.h"
#include "net/net.h"
#include "net/verbs_device.h"

/* Operations of a queue pair that may be under way. */
#define VERBS_SENDS 64
/* Signals that may lie in a queue pair before the receiver looks; beyond that the sender's NIC tries again. */
#define VERBS_RECEIVES 128
#define VERBS_INLINE_BYTES 64

enum verbs_kind { VERBS_SIGNAL = 0x7669676e, VERBS_BYE = 0x76627965, VERBS_HELLO = 0x7668656c };

/* A message, in the byte order of both: their processors are of one kind. */
struct verbs_record {
    uint32_t kind, index;
    uint64_t add;
};

/* A queue pair: a channel to a rail peer, both ways. */
struct verbs_line {
    struct ibv_qp *qp; /* NULL: this rank does not talk to that one here (ep_net_params.apart) */
    int index;
    uint32_t inline_bytes;
    /* Where the peer is. */
    uint64_t far_region;
    uint32_t far_key;
    /* The ring of copies: byte counts since the beginning, in use from `head` to `tail`. */
    unsigned char *ring;
    uint64_t head, tail;
    uint64_t ends[VERBS_SENDS]; /* of the operations under way: `tail` behind each */
    unsigned first, count;
    struct verbs_record *arrivals; /* [VERBS_RECEIVES] */
    bool met;                      /* the peer's first message has come */
    bool bye;                      /* the peer has said farewell: nothing comes any more */
    bool said;                     /* this rank has said its own */
    bool discards;                 /* the peer takes nothing any more: what is put is thrown away */
    uint64_t gone_ns;              /* when the connection beside it has ended, 0: it has not */
    uint64_t failed_ns;            /* when the queue pair failed, 0: it has not */
    enum ibv_wc_status why;
};

struct verbs_net {
    struct ep_net net;
    struct ep_net *tcp; /* beside it */
    struct verbs_device device;
    int rank, ranks_per_node, timeout_ms, n; /* n: lines */
    bool tolerant;
    struct verbs_line *lines;
    size_t ring_bytes;     /* of a line: any put fits */
    unsigned char *copies; /* the rings and the arrivals of all lines */
    size_t copies_bytes;
    struct ibv_pd *pd;
    struct ibv_mr *region_mr, *copies_mr;
    struct ibv_cq *sends, *receives;
    uint32_t looks; /* at the endpoint beside it: not each time */
    ep_status broken;
    char reason[EP_ERROR_TEXT_BYTES];
};

extern const struct ep_net_ops verbs_ops;

/* Posts the receive of a slot of line->arrivals. 0 or errno. */
int verbs_post_receive(struct verbs_net *v, struct verbs_line *line, unsigned slot);

/*
 * Sends a first message on every line and takes the peers': connecting a queue pair involves no peer, so two NICs that
 * do not reach each other would show in the first operation only. *ret_absent: a line that has not carried both, or
 * NULL.
 */
ep_status verbs_meet(struct verbs_net *v, uint64_t deadline_ns, const struct verbs_line **ret_absent);

/* Also of one that is half made. */
void verbs_release(struct verbs_net *v);

#endif
