/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency_net.h - what lowlatency_net.c (data) and lowlatency_net_open.c (opening, closing) share of low latency
 * between nodes.
 */
#ifndef EP_HOST_LOWLATENCY_NET_H
#define EP_HOST_LOWLATENCY_NET_H

#include "backend/host/lowlatency.h"

/* Two calls of each kind are under way at most; a rank that is no longer masked may find some more. */
#define PUTS 16
#define BACKOFF_MIN_NS 20000u

struct put {
    uint64_t offset;
    const unsigned char *src;
    size_t bytes;
};

/* Memory for what goes to one rank. */
struct send_buffer {
    unsigned char *memory;
    size_t bytes;
    uint64_t sent; /* struct peer: sent, when it was last queued */
};

/* Memory that was still on its way when it was wanted again. */
struct retired {
    struct retired *next;
    void *memory;
};

/* A rank of another node. */
struct peer {
    struct put puts[PUTS]; /* a ring: the first `first`, `n` of them */
    int first, n;
    uint64_t sent, left; /* puts queued so far, and when everything had left */
    uint64_t due[LL_SIGNALS], signalled[LL_SIGNALS];
    struct send_buffer buffers[2][LL_PAYLOADS];
    struct retired *retired;
    bool ended;
    uint64_t given_up_ns; /* masked: from then on nobody goes on sending for it alone; 0: not masked */
};

struct ll_net {
    struct ep_net *net;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stops;
    int busy;           /* jobs that move things themselves */
    struct peer *peers; /* [R]; those of this node are not used */
    int nlocal, first, nremote;
    size_t at[LL_PAYLOADS], bytes[LL_PAYLOADS]; /* in the region: where, and of one of them */
};

static inline bool ll_net_is_remote(const struct ll_net *n, int rank)
{
    return rank < n->first || rank >= n->first + n->nlocal;
}

/* --- lowlatency_net.c, all under the lock but the thread --- */

/* One turn of everything. */
ep_status ll_net_step(const ep_ll *ll, struct ll_net *n, bool *ret_moved);
/* Everything for `rank` has left, or nobody takes it. */
bool ll_net_flushed(struct ll_net *n, int me, int rank);
void ll_net_free_retired(struct peer *peer);
/* The thread: sends what has not left when a call returns. What is wrong then, the next call finds. */
void *ll_net_run(void *ll);

#endif
