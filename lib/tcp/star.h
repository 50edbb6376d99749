/* SPDX-License-Identifier: Apache-2.0 */
/*
 * star.h - all-gathers of small blocks over one connection from each rank to rank 0.
 *
 * A rank sends its block to rank 0, which sends all of them back when it has the last one. While rank 0 waits it tells
 * those that have come who is missing, so that each rank can name them at its own deadline. A failure of one rank is
 * told to all, and the star is void then.
 *
 * What comes from a socket is read into memory of a size that the reader has fixed before.
 */
#ifndef EP_TCP_STAR_H
#define EP_TCP_STAR_H

#include "tcp/acceptor.h"

struct tcp_star;

struct tcp_star_args {
    const char *name; /* in front of error texts: "boot tcp" */
    int rank, nranks;
    struct tcp_key key;
    const char *host;      /* of rank 0 */
    const char *host_from; /* who names it, for error texts: "MASTER_ADDR" */
    uint16_t port;
    const struct tcp_address *from; /* local address to connect from, and of rank 0 to listen at; NULL: any */
    int timeout_ms;                 /* for all ranks to come */
};

/* Rank 0 returns when all have come, the others when they are connected to it. Fails by the deadline, naming who is
 * missing. */
ep_status tcp_star_open(const struct tcp_star_args *args, struct tcp_star **ret_star);

/*
 * Of a rank that cannot take part, because args->rank is not in 0..nranks-1: tells rank 0, which fails the job for all.
 * Where no rank 0 is found in a moment, nobody is told.
 */
void tcp_star_report(const struct tcp_star_args *args);

/* As ep_allgather_fn. */
ep_status tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms, void *ret_all);

/*
 * Asked at least every 20 ms while an all-gather waits: EP_OK, or after ep_fail() a status that it fails with, laid to
 * *ret_culprit. NULL: nobody is asked.
 */
typedef ep_status (*tcp_star_poll_fn)(void *context, int *ret_culprit);
void tcp_star_set_poll(struct tcp_star *star, tcp_star_poll_fn poll, void *context);

/* The rank that the failure of the star is laid to, -1: none has failed. */
int tcp_star_culprit(const struct tcp_star *star);

/* Between two all-gathers: EP_OK, or EP_E_PEER_DEAD where a connection has ended, so that the next one fails. */
ep_status tcp_star_check(void *star);

/* After an all-gather that failed. Rank 0: all blocks had come, so that others may have the result. */
bool tcp_star_had_all(const struct tcp_star *star);
/* The others: rank 0 has said that it failed, so that nobody has the result. */
bool tcp_star_was_told(const struct tcp_star *star);

/* The local address of the connection to rank 0; of rank 0, that of the first connection. Family 0: none is known. */
struct tcp_address tcp_star_local_address(const struct tcp_star *star);

/* Connections that were not taken, on rank 0. *ret_last: the last one with its reason, NULL: not wanted. */
uint64_t tcp_star_dropped(const struct tcp_star *star, const char **ret_last);

/* Says farewell to the others. NULL is fine. */
void tcp_star_free(struct tcp_star *star);

/*
 * Over a connection that is not in a star yet, and of which the far end may be making one: why this rank gives up, as
 * far as the connection takes it; and what stands first among what has come. EP_OK: no such failure.
 */
bool tcp_star_send_failure(int fd, ep_status status, const char *text);
ep_status tcp_star_peek_failure(int fd);

/* A star over connections that are there already: [0] of the others, [nranks] of rank 0. Takes them. */
ep_status tcp_star_adopt(const char *name, int rank, int nranks, const int *fds, struct tcp_star **ret_star);

#endif
