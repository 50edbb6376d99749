/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/handshake.h"

#include "base/clock.h"
#include "base/fd.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define MAGIC 0x31545045u /* "EPT1", also the byte order */
#define VERSION 2u

enum state {
    CONNECTING,
    WAIT_CHALLENGE, /* HELLO is queued or sent */
    WAIT_WELCOME,
    WAIT_HELLO,
    WAIT_PROOF,
    AUTHENTICATED,
    SEND_WELCOME,
    CLOSED
};

struct challenge {
    uint32_t magic, unused;
    unsigned char nonce[TCP_NONCE_BYTES];
};

struct welcome {
    uint32_t magic;
    int32_t status;
    char reason[TCP_REASON_BYTES];
    unsigned char mac[EP_SHA256_BYTES];
};

_Static_assert(sizeof(struct challenge) == 24 && sizeof(struct welcome) == 160, "wire formats");

void tcp_key_make(const char *secret, const char *purpose, const void *more, size_t more_bytes, struct tcp_key *ret_key)
{
    const struct ep_sha256_piece pieces[] = {{"epkit ", 6}, {purpose, strlen(purpose) + 1}, {more, more_bytes}};

    ep_hmac_sha256(secret, strlen(secret), pieces, more_bytes ? 3 : 2, ret_key->bytes);
}

ep_status tcp_random(void *ret_bytes, size_t bytes)
{
    unsigned char *at = ret_bytes;

    while (bytes) {
        ssize_t n = getrandom(at, bytes, 0);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return ep_fail_errno(EP_E_SYSTEM, errno, "random bytes from the kernel");
        at += n;
        bytes -= (size_t)n;
    }
    return EP_OK;
}

static enum tcp_handshake_result fail(struct tcp_handshake *hs, ep_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static enum tcp_handshake_result fail(struct tcp_handshake *hs, ep_status status, const char *format, ...)
{
    char why[sizeof(hs->why)]; /* an argument may be hs->why itself */
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(why, sizeof(why), format, arguments);
    va_end(arguments);
    memcpy(hs->why, why, sizeof(why));
    hs->status = status;
    tcp_handshake_drop(hs);
    return TCP_HANDSHAKE_FAILED;
}

static enum tcp_handshake_result fail_system(struct tcp_handshake *hs, int error)
{
    hs->error = error;
    return fail(hs, EP_E_SYSTEM, "%s", strerror(error));
}

/* `side` prevents that a proof of one side is accepted as one of the other. */
static void compute_proof(const struct tcp_handshake *hs, const char *side, const void *more, size_t bytes,
                          unsigned char ret_mac[EP_SHA256_BYTES])
{
    const struct ep_sha256_piece pieces[] = {
        {side, strlen(side) + 1},
        {&hs->hello, sizeof(hs->hello)},
        {hs->nonce, sizeof(hs->nonce)},
        {more, bytes},
    };

    ep_hmac_sha256(hs->key.bytes, sizeof(hs->key.bytes), pieces, bytes ? 4 : 3, ret_mac);
}

static void compute_hello_mac(const struct tcp_handshake *hs, unsigned char ret_mac[EP_SHA256_BYTES])
{
    struct tcp_handshake blank = {.key = hs->key, .hello = hs->hello};

    memset(blank.hello.proof, 0, sizeof(blank.hello.proof));
    compute_proof(&blank, "hello", NULL, 0, ret_mac);
}

static void queue_message(struct tcp_handshake *hs, const void *bytes, size_t n)
{
    memcpy(hs->out, bytes, n);
    hs->out_used = n;
    hs->out_at = 0;
}

static void expect_message(struct tcp_handshake *hs, enum state state, size_t bytes)
{
    hs->state = state;
    hs->in_used = 0;
    hs->in_need = bytes;
}

static void draw_nonce(struct tcp_handshake *hs, unsigned char nonce[TCP_NONCE_BYTES])
{
    if (tcp_random(nonce, TCP_NONCE_BYTES) != EP_OK)
        fail(hs, EP_E_SYSTEM, "%s", ep_last_error());
}

void tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key, const struct tcp_hello *hello,
                           const struct tcp_address *to, uint64_t deadline_ns)
{
    unsigned char mac[EP_SHA256_BYTES];

    *hs = (struct tcp_handshake){.fd = fd,
                                 .state = CONNECTING,
                                 .from = *to,
                                 .key = *key,
                                 .hello = *hello,
                                 .begin_ns = ep_now_ns(),
                                 .deadline_ns = deadline_ns};
    hs->hello.magic = MAGIC;
    hs->hello.version = VERSION;
    draw_nonce(hs, hs->hello.nonce);
    compute_hello_mac(hs, mac);
    memcpy(hs->hello.proof, mac, sizeof(hs->hello.proof));
}

void tcp_handshake_accept(struct tcp_handshake *hs, int fd, const struct tcp_key *key, const struct tcp_address *from,
                          uint64_t deadline_ns)
{
    *hs = (struct tcp_handshake){
        .fd = fd, .from = *from, .key = *key, .begin_ns = ep_now_ns(), .deadline_ns = deadline_ns};
    expect_message(hs, WAIT_HELLO, sizeof(hs->hello));
    draw_nonce(hs, hs->nonce);
}

/* --- received messages --- */

static enum tcp_handshake_result handle_hello(struct tcp_handshake *hs)
{
    struct challenge challenge = {.magic = MAGIC};
    unsigned char mac[EP_SHA256_BYTES], theirs[EP_SHA256_BYTES];

    memcpy(&hs->hello, hs->in, sizeof(hs->hello));
    if (hs->hello.magic != MAGIC)
        return fail(hs, EP_E_MISMATCH, "does not speak epkit's protocol");
    if (hs->hello.version != VERSION)
        return fail(hs, EP_E_MISMATCH, "speaks version %u of the protocol, this library %u", hs->hello.version,
                    VERSION);
    compute_hello_mac(hs, mac);
    memcpy(theirs, mac, sizeof(theirs));
    memcpy(theirs, hs->hello.proof, sizeof(hs->hello.proof));
    /* A rank with another secret continues, and learns the reason from the last message. */
    hs->announced = ep_digest_equal(mac, theirs);
    memcpy(challenge.nonce, hs->nonce, sizeof(challenge.nonce));
    queue_message(hs, &challenge, sizeof(challenge));
    expect_message(hs, WAIT_PROOF, EP_SHA256_BYTES);
    return TCP_HANDSHAKE_PENDING;
}

static enum tcp_handshake_result handle_challenge(struct tcp_handshake *hs)
{
    unsigned char mac[EP_SHA256_BYTES];
    struct challenge challenge;

    memcpy(&challenge, hs->in, sizeof(challenge));
    if (challenge.magic != MAGIC) {
        hs->wrong_protocol = true;
        return fail(hs, EP_E_MISMATCH, "what listens there does not speak epkit's protocol");
    }
    memcpy(hs->nonce, challenge.nonce, sizeof(hs->nonce));
    compute_proof(hs, "asks", NULL, 0, mac);
    queue_message(hs, mac, sizeof(mac));
    expect_message(hs, WAIT_WELCOME, sizeof(struct welcome));
    return TCP_HANDSHAKE_PENDING;
}

static enum tcp_handshake_result handle_proof(struct tcp_handshake *hs)
{
    unsigned char mac[EP_SHA256_BYTES];

    compute_proof(hs, "asks", NULL, 0, mac);
    if (!ep_digest_equal(mac, hs->in)) {
        /* A rank with another secret sees an invalid MAC, and reports that. */
        static const struct welcome refusal = {.magic = MAGIC, .status = EP_E_MISMATCH};

        (void)!send(hs->fd, &refusal, sizeof(refusal), MSG_NOSIGNAL | MSG_DONTWAIT);
        return fail(hs, EP_E_MISMATCH, "has another secret, or belongs to another job");
    }
    hs->state = AUTHENTICATED;
    return TCP_HANDSHAKE_AUTHENTICATED;
}

static enum tcp_handshake_result handle_welcome(struct tcp_handshake *hs)
{
    unsigned char mac[EP_SHA256_BYTES];
    struct welcome welcome;

    memcpy(&welcome, hs->in, sizeof(welcome));
    compute_proof(hs, "answers", &welcome, offsetof(struct welcome, mac), mac);
    if (welcome.magic != MAGIC || !ep_digest_equal(mac, welcome.mac))
        return fail(hs, EP_E_MISMATCH,
                    "it has another secret than this rank (EPKIT_SECRET), or belongs to another job (EPKIT_JOB_ID)");
    if (welcome.status == EP_OK) {
        hs->state = CLOSED;
        return TCP_HANDSHAKE_DONE;
    }
    tcp_make_printable(welcome.reason, sizeof(welcome.reason));
    hs->refused = true;
    return fail(hs, ep_status_is_failure(welcome.status) ? (ep_status)welcome.status : EP_E_MISMATCH, "%s",
                welcome.reason);
}

void tcp_handshake_reply(struct tcp_handshake *hs, ep_status status, const char *reason)
{
    struct welcome welcome = {.magic = MAGIC, .status = (int32_t)status};

    snprintf(welcome.reason, sizeof(welcome.reason), "%.*s", TCP_REASON_BYTES - 1, reason);
    compute_proof(hs, "answers", &welcome, offsetof(struct welcome, mac), welcome.mac);
    queue_message(hs, &welcome, sizeof(welcome));
    hs->answer = (int32_t)status;
    if (status != EP_OK)
        snprintf(hs->why, sizeof(hs->why), "%s", reason);
    hs->state = SEND_WELCOME;
}

/* --- steps --- */

/* 1: everything is sent, 0: not yet, -1: failed. */
static int push(struct tcp_handshake *hs)
{
    struct iovec rest = {hs->out + hs->out_at, hs->out_used - hs->out_at};
    int sent = tcp_send(hs->fd, &rest, 1);

    hs->out_at = hs->out_used - rest.iov_len;
    if (sent < 0)
        fail_system(hs, errno);
    return sent;
}

/* 1: the expected bytes have arrived, 0: not yet, -1: failed. */
static int pull(struct tcp_handshake *hs)
{
    int got = tcp_receive(hs->fd, hs->in, hs->in_need, &hs->in_used);

    if (got < 0 && errno)
        fail_system(hs, errno);
    else if (got < 0)
        fail(hs, EP_E_PEER_LEFT, "the connection was closed during the handshake");
    return got;
}

static enum tcp_handshake_result finish_connecting(struct tcp_handshake *hs)
{
    struct pollfd ready = {.fd = hs->fd, .events = POLLOUT};
    int error;

    if (poll(&ready, 1, 0) <= 0)
        return TCP_HANDSHAKE_PENDING;
    error = tcp_connect_error(hs->fd);
    if (error)
        return fail_system(hs, error);
    queue_message(hs, &hs->hello, sizeof(hs->hello));
    expect_message(hs, WAIT_CHALLENGE, sizeof(struct challenge));
    return TCP_HANDSHAKE_DONE;
}

static enum tcp_handshake_result handle_message(struct tcp_handshake *hs)
{
    switch (hs->state) {
    case WAIT_HELLO:
        return handle_hello(hs);
    case WAIT_CHALLENGE:
        return handle_challenge(hs);
    case WAIT_PROOF:
        return handle_proof(hs);
    default:
        return handle_welcome(hs);
    }
}

enum tcp_handshake_result tcp_handshake_step(struct tcp_handshake *hs)
{
    if (hs->state == CLOSED)
        return TCP_HANDSHAKE_FAILED;
    if (ep_now_ns() >= hs->deadline_ns)
        return fail(hs, EP_E_TIMEOUT, "%s in time",
                    hs->state == CONNECTING ? "no connection could be made"
                                            : "the other side did not authenticate itself");
    if (hs->state == CONNECTING && finish_connecting(hs) != TCP_HANDSHAKE_DONE)
        return hs->state == CLOSED ? TCP_HANDSHAKE_FAILED : TCP_HANDSHAKE_PENDING;
    for (;;) {
        enum tcp_handshake_result result;
        int ready = push(hs);

        if (ready > 0 && hs->state == SEND_WELCOME) {
            if (hs->answer != EP_OK)
                return fail(hs, (ep_status)hs->answer, "%s", hs->why);
            hs->state = CLOSED;
            return TCP_HANDSHAKE_DONE;
        }
        if (ready > 0 && hs->state == AUTHENTICATED)
            return TCP_HANDSHAKE_AUTHENTICATED;
        if (ready > 0)
            ready = pull(hs);
        if (ready <= 0)
            return ready < 0 ? TCP_HANDSHAKE_FAILED : TCP_HANDSHAKE_PENDING;
        result = handle_message(hs);
        if (result != TCP_HANDSHAKE_PENDING)
            return result;
    }
}

short tcp_handshake_events(const struct tcp_handshake *hs)
{
    return hs->state == CONNECTING || hs->out_at < hs->out_used ? POLLOUT : POLLIN;
}

bool tcp_handshake_is_answered(const struct tcp_handshake *hs)
{
    return hs->state == WAIT_WELCOME;
}

void tcp_handshake_drop(struct tcp_handshake *hs)
{
    if (hs->fd >= 0)
        ep_fd_close(hs->fd);
    hs->fd = -1;
    hs->state = CLOSED;
}
