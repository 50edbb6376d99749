/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshake.h - how two ranks that connect prove to each other that they belong to one job.
 *
 *   the one that connects               the one that listens
 *   HELLO: who, what for, a nonce   ->
 *                                   <-  CHALLENGE: a nonce
 *   PROOF: HMAC(key, all of that)   ->
 *                                   <-  WELCOME: a status with its reason, HMAC(key, all of that)
 *
 * The key is made of the shared secret. Who listens says nothing that depends on it before the other side has proved
 * itself. What follows is neither encrypted nor authenticated: this keeps out strangers and ranks of other jobs, not
 * somebody who can change packets on the way.
 *
 * A shake never blocks: tcp_handshake_step() is called when poll() says that it may go on.
 */
#ifndef EP_TCP_HANDSHAKE_H
#define EP_TCP_HANDSHAKE_H

#include "base/sha256.h"
#include "tcp/socket.h"

#define TCP_NONCE_BYTES 16
#define TCP_REASON_BYTES 120
#define TCP_WHY_BYTES 192

struct tcp_key {
    unsigned char bytes[EP_SHA256_BYTES];
};

/* What a connection is for. */
enum tcp_kind {
    TCP_BOOTSTRAP = 1,
    TCP_STREAM,
    TCP_LINK,
    TCP_SHRINK,      /* to take part in a shrink */
    TCP_SHRINK_QUERY /* to ask whether one has left out this rank */
};

/* On the wire as it is: a rank of another byte order fails at the magic number. */
struct tcp_hello {
    uint32_t magic;
    uint16_t version, kind; /* enum tcp_kind */
    int32_t rank;
    uint32_t detail;  /* bootstrap: number of ranks; stream: channel */
    uint64_t session; /* tells the connections of one endpoint from those of another */
    unsigned char nonce[TCP_NONCE_BYTES];
    int32_t to; /* the rank that is meant: the same port of another host may be that of another rank */
    unsigned char unused[20];
};

_Static_assert(sizeof(struct tcp_hello) == 64, "it is a format");

enum tcp_handshake_result {
    TCP_HANDSHAKE_PENDING,       /* poll() for tcp_handshake_events() */
    TCP_HANDSHAKE_AUTHENTICATED, /* listening side: call tcp_handshake_reply() */
    TCP_HANDSHAKE_DONE,          /* the descriptor is the caller's */
    TCP_HANDSHAKE_FAILED         /* closed; see status and why */
};

struct tcp_handshake {
    int fd;
    int state;
    struct tcp_address from; /* the far end */
    struct tcp_key key;
    struct tcp_hello hello;
    unsigned char nonce[TCP_NONCE_BYTES]; /* of the side that listens */
    uint64_t begin_ns, deadline_ns;
    unsigned char in[192], out[192];
    size_t in_used, in_need, out_used, out_at;
    int32_t answer;   /* that WELCOME gives */
    ep_status status; /* of a failure; EP_E_SYSTEM: error holds errno */
    int error;
    bool wrong_protocol; /* the far end is a program of another protocol */
    bool refused;        /* by a side that has proved itself: trying again is of no use */
    char why[TCP_WHY_BYTES];
};

/* HMAC of the secret and what the key is for. `secret` may be empty: then only accidents are kept out. */
void tcp_key_make(const char *secret, const char *purpose, const void *more, size_t more_bytes,
                  struct tcp_key *ret_key);

/* Bytes that cannot be guessed. */
ep_status tcp_random(void *ret_bytes, size_t bytes);

/* Takes the descriptor, which tcp_connect() has made. magic, version and nonce of `hello` are filled in. */
ep_status tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns);
/* Takes the descriptor, which tcp_accept() has made. */
ep_status tcp_handshake_accept(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                               const struct tcp_address *from, uint64_t deadline_ns);
enum tcp_handshake_result tcp_handshake_step(struct tcp_handshake *hs);
/* Listening side, once it is proven: EP_OK, or why the rank is not taken. */
void tcp_handshake_reply(struct tcp_handshake *hs, ep_status status, const char *reason);
/* For poll(). */
short tcp_handshake_events(const struct tcp_handshake *hs);
/* Connecting side: the other one speaks this protocol, and has the proof or will have it soon. */
bool tcp_handshake_is_answered(const struct tcp_handshake *hs);
/* Closes one that is not done. */
void tcp_handshake_drop(struct tcp_handshake *hs);

#endif
