/* SPDX-License-Identifier: Apache-2.0 */
/* star_internal.h - shared by star.c (all-gathers), star_conn.c (connections) and star_open.c (rendezvous). */
#ifndef EP_TCP_STAR_INTERNAL_H
#define EP_TCP_STAR_INTERNAL_H

#include "tcp/star.h"

#define STAR_MAGIC 0x31465045u /* "EPF1" */
#define TEXT_BYTES 256
#define LIST_BYTES 160
#define POLL_MOST_MS 20 /* poll interval: the most by which a deadline is exceeded */
#define DRAIN_MS 200    /* to send a failure or FRAME_BYE */

enum frame_kind { FRAME_BLOCK = 1, FRAME_RESULT, FRAME_FAILURE, FRAME_MISSING, FRAME_BYE };

struct frame {
    uint32_t magic, kind;
    uint64_t number; /* of the all-gather */
    uint64_t bytes;  /* of the payload */
};

struct failure {
    int32_t status, rank;
    char text[TEXT_BYTES];
};

struct missing {
    int32_t n, first;
    char list[LIST_BYTES];
};

/* A frame, with its payload unless that is a block or a result. */
struct message {
    struct frame frame;
    union {
        struct failure failure;
        struct missing missing;
    } payload;
};

_Static_assert(sizeof(struct message) == sizeof(struct frame) + sizeof(struct failure), "a failure is the largest");

/* What a connection has to send, in this order: a message, a block or result, and last why this rank gives up. */
enum { OUT_MESSAGE, OUT_BIG, OUT_LAST, OUTS };

/* One connection: of rank 0 to another rank, or of that one to rank 0. */
struct conn {
    int fd; /* -1: none */
    struct tcp_address remote;
    struct message in; /* being read */
    size_t frame_used;
    unsigned char *dest; /* where the payload goes */
    size_t used;
    bool arrived;           /* the rank at the rendezvous, then the block (rank 0) or the result of this all-gather */
    struct iovec out[OUTS]; /* the rest of it */
    struct message message, last;
};

struct tcp_star {
    const char *name;
    int rank, nranks;
    struct conn *conns;           /* [nranks] on rank 0, else [1] */
    struct tcp_acceptor acceptor; /* rank 0: open while it waits for all ranks to connect */
    struct pollfd *polls;
    uint64_t number;
    uint64_t published_ns;  /* rank 0: when the last list of missing ranks was sent */
    struct missing missing; /* last list from rank 0 */
    uint64_t received_ns;   /* when it arrived */
    bool delivering;        /* rank 0: all blocks have arrived, the results are being sent */
    /* Rank 0, while it waits for all ranks to connect: */
    char last_failure[TEXT_BYTES];   /* the last connected rank that gave up, with its reason */
    char mismatch[TCP_REASON_BYTES]; /* why this rank and a connected process disagree; "": they do not */
    int mismatch_rank;               /* the rank of that process; -1: it has none of this job */
    int peer_nranks;                 /* nranks of that process */
    bool lacks_fds;                  /* not enough descriptors: fail without waiting */
    int n_notified;                  /* ranks that know the failure */
    struct failure failure; /* status EP_OK: none */
};

/* A star without connections. */
ep_status tcp_star_new(const char *name, int rank, int nranks, struct tcp_star **ret_star);

/* --- star_conn.c --- */

/* nranks on rank 0, 1 on the others. */
int tcp_star_n_conns(const struct tcp_star *star);
int tcp_star_rank_of(const struct tcp_star *star, const struct conn *conn);
/* Time for poll(): until the deadline, but at most POLL_MOST_MS. */
int tcp_star_poll_ms(uint64_t deadline_ns);
bool tcp_star_all_arrived(const struct tcp_star *star);
#define CONN_TEXT (TCP_ADDRESS_TEXT + 24)
/* Returns `text`: "rank 3 (10.0.0.1:4242)". */
const char *tcp_star_print_conn(const struct tcp_star *star, const struct conn *conn, char text[CONN_TEXT]);

/* A frame with a block or result. */
void tcp_star_queue_big(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const void *big, size_t bytes);
/* After the frame in progress, which is completed first: otherwise the remote end would read this as a part of it. */
void tcp_star_queue_last(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const struct failure *failure);
/* Nothing is queued. */
bool tcp_star_is_idle(const struct conn *conn);
/*
 * Sends queued frames for at most DRAIN_MS; the connections are closed afterwards. Received data is discarded: closing
 * a socket with unread data resets it, and data that it has sent may be lost.
 */
void tcp_star_drain(struct tcp_star *star);
ep_status tcp_star_fail_lost(struct tcp_star *star, struct conn *conn, int error);
ep_status tcp_star_fail_damaged(struct tcp_star *star, struct conn *conn, const char *what);
/* Fails with the failure that rank 0, or a rank that gave up, has sent. */
ep_status tcp_star_handle_failure(struct tcp_star *star, struct conn *conn);

/* Sends queued data until the socket buffer is full. */
ep_status tcp_star_push(struct conn *conn);
void tcp_star_close_conn(struct conn *conn);
/* Discards the unread data. true: it ended with a failure from the remote end. */
bool tcp_star_read_last_failure(struct tcp_star *star, struct conn *conn, struct failure *ret_failure);

/* The ranks that have not connected to the star, at the rendezvous, or else have not arrived at the all-gather. */
void tcp_star_list_missing(const struct tcp_star *star, struct missing *ret_missing);
/* After ep_fail(), which returns the status: makes the star unusable, and sends the reason to the others. */
ep_status tcp_star_fail(struct tcp_star *star, ep_status status, int failed_rank);
/* The failure of the star. */
ep_status tcp_star_fail_again(const struct tcp_star *star);
ep_status tcp_star_fail_late(struct tcp_star *star, const struct missing *missing, int timeout_ms);
/* From rank 0 to the ranks that wait, every 200 ms. */
void tcp_star_publish_missing(struct tcp_star *star);

#endif
