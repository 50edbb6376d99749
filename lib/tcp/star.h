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

/*
 * For a rank that cannot take part, because args->rank is not in 0..nranks-1: reports it to rank 0, which fails the job
 * for all. Does nothing if rank 0 is not reached within a short time.
 */
void tcp_star_report(const struct tcp_star_args *args);

/* As ep_allgather_fn. */
ep_status tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms, void *ret_all);

/*
 * Called at least every 20 ms while an all-gather waits, and by tcp_star_check(). EP_OK, or after ep_fail() a status
 * that the star fails with, and in *ret_failed_rank the rank that caused it. NULL: none is called.
 */
typedef ep_status (*tcp_star_poll_fn)(void *context, int *ret_failed_rank);
void tcp_star_set_poll(struct tcp_star *star, tcp_star_poll_fn poll, void *context);

/* The rank that caused the failure of the star; -1: it has not failed. */
int tcp_star_failed_rank(const struct tcp_star *star);

/*
 * Between two all-gathers, for waits in which the ranks do something else: EP_OK, EP_E_PEER_DEAD if a connection has
 * ended, so that the next one fails, or the failure of the star, also if tcp_star_poll_fn fails it now.
 */
ep_status tcp_star_check(void *star);

/* After a failed all-gather, on rank 0: true if all blocks had arrived, so that other ranks may have the result. */
bool tcp_star_was_complete(const struct tcp_star *star);
/* After a failed all-gather, on the others: true if rank 0 has reported the failure, so that no rank has the result. */
bool tcp_star_was_notified(const struct tcp_star *star);

/* The local address of the connection to rank 0; on rank 0, that of the first connection. Family 0: unknown. */
struct tcp_address tcp_star_local_address(const struct tcp_star *star);

/* Number of connections that rank 0 did not accept. */
uint64_t tcp_star_dropped(const struct tcp_star *star);

/* Sends FRAME_BYE to the others. NULL is allowed. */
void tcp_star_free(struct tcp_star *star);

/*
 * On a connection that is not in a star yet, while the remote end may be creating one. send: reports why this rank
 * gives up; false if the socket buffer has no room. peek: the status of a failure that is first in the received data;
 * EP_OK: none.
 */
bool tcp_star_send_failure(int fd, ep_status status, const char *text);
ep_status tcp_star_peek_failure(int fd);

/*
 * A star over existing connections: fds[1..nranks-1] on rank 0, fds[0] on the others. Takes ownership of them.
 * `numbers` [nranks], or NULL: what error texts call the ranks; must live as long as the star.
 */
ep_status tcp_star_adopt(const char *name, int rank, int nranks, const int *fds, const int *numbers,
                         struct tcp_star **ret_star);

#endif
