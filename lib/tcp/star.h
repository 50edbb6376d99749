/* SPDX-License-Identifier: Apache-2.0 */
/*
 * star.h - all-gathers of small blocks over one connection from each rank to rank 0.
 *
 * Each rank sends its block to rank 0, which sends all blocks back when it has the last one. While rank 0 waits, it
 * sends the list of missing ranks to those that have arrived, so that each rank can name them at its own deadline. A
 * failure of one rank is sent to all, and makes the star unusable.
 *
 * Data from a socket is read only into memory whose size the reader has fixed before.
 */
#ifndef EP_TCP_STAR_H
#define EP_TCP_STAR_H

#include "tcp/acceptor.h"

struct tcp_star;

struct tcp_star_args {
    const char *name; /* prefix of error texts: "bootstrap tcp" */
    int rank, nranks;
    struct tcp_key key;
    const char *host;      /* of rank 0 */
    const char *host_from; /* the variable or argument that names it, for error texts: "MASTER_ADDR" */
    uint16_t port;
    const char *interface; /* to connect from, for tcp_find_interfaces(); NULL: any */
    int timeout_ms;        /* for all ranks to connect */
};

/*
 * Rank 0 returns when all ranks have connected, the others when they are connected to it. Fails by the deadline and
 * names the missing ranks. If no rank has connected to rank 0, up to a second later: it then looks up args->host, which
 * may name another host.
 */
ep_status tcp_star_open(const struct tcp_star_args *args, struct tcp_star **ret_star);

/* As ep_allgather_fn. */
ep_status tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms, void *ret_all);

/*
 * Between two all-gathers, for waits in which the ranks do something else: EP_OK, EP_E_PEER_DEAD if a connection has
 * ended, so that the next one fails, or the failure of the star.
 */
ep_status tcp_star_check(void *star);

/* The local address of the connection to rank 0; on rank 0, that of the first connection. Family 0: unknown. */
struct tcp_address tcp_star_local_address(const struct tcp_star *star);

/* Number of connections that rank 0 did not accept. */
uint64_t tcp_star_dropped(const struct tcp_star *star);

/* Sends FRAME_BYE to the others. NULL is allowed. */
void tcp_star_free(struct tcp_star *star);

#endif
