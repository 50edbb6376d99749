/* SPDX-License-Identifier: Apache-2.0 */
/* star_internal.h - what star.c (all-gathers), star_conn.c (connections) and star_open.c (rendezvous) share. */
#ifndef EP_TCP_STAR_INTERNAL_H
#define EP_TCP_STAR_INTERNAL_H

#include "tcp/star.h"

#define STAR_MAGIC 0x31465045u /* "EPF1" */
#define TEXT_BYTES 256
#define LIST_BYTES 160
#define POLL_MOST_MS 20 /* a deadline is never missed by more */
#define FAREWELL_MS 200 /* for a failure or a farewell to leave */

enum frame_kind { FRAME_BLOCK = 1, FRAME_RESULT, FRAME_FAILURE, FRAME_MISSING, FRAME_BYE };

struct frame {
    uint32_t magic, kind;
    uint64_t number; /* of the all-gather */
    uint64_t bytes;  /* that follow */
};

struct failure {
    int32_t status, rank;
    char text[TEXT_BYTES];
};

struct failure_message {
    struct frame frame;
    struct failure failure;
};

struct missing {
    int32_t n, first;
    char list[LIST_BYTES];
};

/* One connection: of rank 0 to another rank, or of that one to rank 0. */
struct conn {
    int fd; /* -1: none */
    struct tcp_address far;
    struct frame frame; /* that is being read */
    size_t frame_used;
    union {
        struct failure failure;
        struct missing missing;
    } small;             /* its payload, unless it is a block or a result */
    unsigned char *into; /* where the payload goes */
    size_t used;
    bool came; /* rank 0: the block of this all-gather is there */
    unsigned char out[sizeof(struct frame) + sizeof(struct failure)];
    size_t out_used, out_at;
    const unsigned char *big; /* behind that */
    size_t big_bytes;
    unsigned char last[sizeof(struct frame) + sizeof(struct failure)]; /* behind that: why this rank gives up */
    size_t last_used, last_at;
};

struct tcp_star {
    const char *name;
    int rank, nranks;
    struct conn *conns; /* [nranks] on rank 0, else [1] */
    struct tcp_acceptor *acceptor;
    struct pollfd *polls;
    uint64_t number;
    uint64_t told_ns;
    struct missing missing; /* as rank 0 said last */
    uint64_t heard_ns;      /* when it did */
    bool delivering;        /* rank 0: all blocks have come, the results leave */
    uint64_t dropped;
    char last_drop[TCP_WHY_BYTES + TCP_ADDRESS_TEXT + 4];
    char gave_up[TEXT_BYTES]; /* rank 0, while it waits for all to come: the last that came and gave up, and its reason
                               */
    char disagrees[TCP_REASON_BYTES]; /* rank 0, while it waits: how it and one that came contradict each other */
    int disagrees_with;               /* that one, or -1 where it is none of this job's */
    bool lacks;                       /* rank 0 has not enough descriptors, and waits for nobody */
    int n_told;                       /* ranks that know */
    int said_nranks;                  /* by that one */
    bool told;                        /* the others: rank 0 has said why it failed */
    tcp_star_poll_fn poll;
    void *poll_context;
    ep_status failed;
    int culprit;
    char text[TEXT_BYTES];
};

/* A star without connections. */
ep_status tcp_star_new(const char *name, int rank, int nranks, struct tcp_star **ret_star);

/* --- star_conn.c --- */

/* Of rank 0 one for each rank, of the others one. */
int tcp_star_n_conns(const struct tcp_star *star);
int tcp_star_rank_of(const struct tcp_star *star, const struct conn *conn);
void tcp_star_print_conn(const struct tcp_star *star, const struct conn *conn, char *ret_text, size_t bytes);

void tcp_star_queue_frame(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const void *small,
                          size_t small_bytes, const void *big, size_t big_bytes);
/* Behind what is under way, which stays whole: the far end would take this for a part of it. */
void tcp_star_queue_last(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const void *small,
                         size_t small_bytes);
/* Nothing is queued. */
bool tcp_star_is_idle(const struct conn *conn);
/*
 * Sends what is small, for a moment; then the connection closes anyway. What comes meanwhile is thrown away: a socket
 * that is closed with something unread is reset, and what it has sent may be lost.
 */
void tcp_star_drain(struct tcp_star *star);
ep_status tcp_star_fail_lost(struct tcp_star *star, struct conn *conn, int error);
ep_status tcp_star_fail_damaged(struct tcp_star *star, struct conn *conn, const char *what);
/* What rank 0, or a rank that gave up, says. */
ep_status tcp_star_take_failure(struct tcp_star *star, struct conn *conn);

/* Sends what is queued on a connection, as far as it takes it. */
ep_status tcp_star_push(struct conn *conn);
void tcp_star_close_conn(struct conn *conn);
/* The failure with which the far end has ended what is unread, which is thrown away. false: there is none. */
bool tcp_star_read_last_failure(struct tcp_star *star, struct conn *conn, struct failure *ret_failure);

/* Who has not come: `rendezvous` to the star, otherwise to the all-gather. tell: the others hear of it now and then. */
void tcp_star_list_missing(const struct tcp_star *star, bool rendezvous, struct missing *ret_missing);
/* After ep_fail(): the star is void, and the others are told why. */
ep_status tcp_star_fail(struct tcp_star *star, ep_status status, int culprit);
ep_status tcp_star_fail_late(struct tcp_star *star, const struct missing *missing, int timeout_ms);
void tcp_star_tell_missing(struct tcp_star *star, bool rendezvous);

#endif
