/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshake.h - two ranks that connect prove to each other that they belong to one job.
 *
 *   connecting side                         listening side
 *   HELLO: rank, purpose, a nonce,      ->
 *     HMAC(key, all of this)
 *                                       <-  CHALLENGE: a nonce
 *   PROOF: HMAC(key, all of the above)  ->
 *                                       <-  WELCOME: a status with its reason, HMAC(key, all of the above)
 *
 * The key is derived from the shared secret. The listening side sends nothing that depends on it before the other side
 * is authenticated. The HMAC of HELLO may be a repeated one, so it authenticates nobody: it only keeps its sender from
 * being dropped as a stranger while many strangers connect (tcp/acceptor.h). Later data is neither encrypted nor
 * authenticated: the handshake rejects other programs and ranks of other jobs; it does not protect against modified
 * packets.
 *
 * A handshake never blocks: call tcp_handshake_step() when poll() reports the events of tcp_handshake_events().
 */
#ifndef EP_TCP_HANDSHAKE_H
#define EP_TCP_HANDSHAKE_H

#include "base/sha256.h"
#include "tcp/socket.h"

#define TCP_NONCE_BYTES 16
#define TCP_HELLO_PROOF_BYTES 16
#define TCP_REASON_BYTES 120
#define TCP_WHY_BYTES 192

struct tcp_key {
    unsigned char bytes[EP_SHA256_BYTES];
};

/* Purpose of a connection. */
enum tcp_kind { TCP_BOOTSTRAP = 1, TCP_STREAM, TCP_LINK };

/* Wire format, in host byte order: a rank of another byte order fails at the magic number. */
struct tcp_hello {
    uint32_t magic;
    uint16_t version, kind; /* enum tcp_kind */
    int32_t rank;
    uint32_t detail;  /* bootstrap: number of ranks; stream: channel */
    uint64_t session; /* distinguishes the connections of different endpoints */
    unsigned char nonce[TCP_NONCE_BYTES];
    int32_t to; /* destination rank: the same port of another host may be that of another rank */
    unsigned char proof[TCP_HELLO_PROOF_BYTES]; /* the first bytes of the HMAC, computed with zeros here */
    unsigned char unused[4];
};

_Static_assert(sizeof(struct tcp_hello) == 64, "wire format");

enum tcp_handshake_result {
    TCP_HANDSHAKE_PENDING,       /* poll() for tcp_handshake_events() */
    TCP_HANDSHAKE_AUTHENTICATED, /* listening side: call tcp_handshake_reply() */
    TCP_HANDSHAKE_DONE,          /* the descriptor is the caller's */
    TCP_HANDSHAKE_FAILED         /* closed; see status and why */
};

struct tcp_handshake {
    int fd;
    int state;
    struct tcp_address from; /* the remote end */
    struct tcp_key key;
    struct tcp_hello hello;
    unsigned char nonce[TCP_NONCE_BYTES]; /* of the listening side */
    uint64_t begin_ns, deadline_ns;
    unsigned char in[192], out[192];
    size_t in_used, in_need, out_used, out_at;
    int32_t answer;   /* status in WELCOME */
    ep_status status; /* of a failure; EP_E_SYSTEM: error holds errno */
    int error;
    bool announced;      /* listening side: the proof in HELLO is valid */
    bool wrong_protocol; /* the remote end does not speak this protocol */
    bool refused;        /* by an authenticated side: a retry is useless */
    char why[TCP_WHY_BYTES];
};

/* HMAC of the secret and the purpose of the key. An empty `secret` protects against accidental connections only. */
void tcp_key_make(const char *secret, const char *purpose, const void *more, size_t more_bytes,
                  struct tcp_key *ret_key);

/* Bytes that cannot be guessed. */
ep_status tcp_random(void *ret_bytes, size_t bytes);

/*
 * Takes ownership of the descriptor, from tcp_connect(). Fills in magic, version, nonce and proof of `hello`. If this
 * or the next fails, the first step does.
 */
void tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key, const struct tcp_hello *hello,
                           const struct tcp_address *to, uint64_t deadline_ns);
/* Takes ownership of the descriptor, from tcp_accept(). */
void tcp_handshake_accept(struct tcp_handshake *hs, int fd, const struct tcp_key *key, const struct tcp_address *from,
                          uint64_t deadline_ns);
enum tcp_handshake_result tcp_handshake_step(struct tcp_handshake *hs);
/* Listening side, after TCP_HANDSHAKE_AUTHENTICATED: EP_OK accepts the rank; otherwise `reason` says why not. */
void tcp_handshake_reply(struct tcp_handshake *hs, ep_status status, const char *reason);
/* For poll(). */
short tcp_handshake_events(const struct tcp_handshake *hs);
/* Connecting side: the other side speaks this protocol, and PROOF has been sent or queued. */
bool tcp_handshake_is_answered(const struct tcp_handshake *hs);
/* Closes a handshake that is not done. */
void tcp_handshake_drop(struct tcp_handshake *hs);

#endif
