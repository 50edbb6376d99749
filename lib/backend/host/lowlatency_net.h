/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency_net.h - shared by lowlatency_net.c (data) and lowlatency_net_open.c (opening, closing): low latency
 * between nodes.
 */
#ifndef EP_HOST_LOWLATENCY_NET_H
#define EP_HOST_LOWLATENCY_NET_H

#include "backend/host/lowlatency.h"

/* At most two calls of each kind are in flight; a rank that is no longer masked may add some more. */
#define PUTS 16
#define BACKOFF_MIN_NS 20000u

struct put {
    uint64_t offset;
    const unsigned char *src;
    size_t bytes;
};

/* A send buffer for one rank. */
struct send_buffer {
    unsigned char *memory;
    size_t bytes;
    uint64_t sent; /* value of peer->sent when it was last queued */
};

/* Deferred free list: buffers that were still in flight when they were requested again. */
struct retired {
    struct retired *next;
    void *memory;
};

/* A rank of another node. */
struct peer {
    struct put puts[PUTS]; /* a ring of n entries from `first` */
    int first, n;
    uint64_t sent, left; /* puts queued so far, and the value of it at the last flush */
    uint64_t due[LL_SIGNALS], signalled[LL_SIGNALS];
    struct send_buffer buffers[2][LL_PAYLOADS];
    struct retired *retired;
    bool ended;
    uint64_t given_up_ns; /* masked: from then on no data is sent for it alone; 0: not masked */
};

struct ll_net {
    struct ep_net *net;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stops;
    int busy;           /* running jobs, which progress the network themselves */
    struct peer *peers; /* [R]; those of this node are unused */
    int nlocal, first, nremote;
    size_t at[LL_PAYLOADS], bytes[LL_PAYLOADS]; /* offset and size in the region */
};

static inline bool ll_net_is_remote(const struct ll_net *n, int rank)
{
    return rank < n->first || rank >= n->first + n->nlocal;
}

/* --- lowlatency_net.c, all under the lock except the thread --- */

/* One pass over all peers. */
ep_status ll_net_step(const ep_ll *ll, struct ll_net *n, bool *ret_moved);
/* True if all data for `rank` has left, or its connection has ended. */
bool ll_net_flushed(struct ll_net *n, int me, int rank);
void ll_net_free_retired(struct peer *peer);
/* The thread: sends what has not left when a call returns. Its failures are found by the next call. */
void *ll_net_run(void *ll);

#endif
