/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/shake.h"

#include "base/clock.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define MAGIC 0x31545045u /* "EPT1", also the byte order */
#define VERSION 1u

enum state {
    CONNECTING,
    SAYS_HELLO, /* and awaits the challenge */
    AWAITS_WELCOME,
    AWAITS_HELLO,
    AWAITS_PROOF,
    PROVEN,
    WELCOMES,
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

_Static_assert(sizeof(struct challenge) == 24 && sizeof(struct welcome) == 160, "they are formats");

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

static enum tcp_shake_result fail(struct tcp_shake *shake, ep_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static enum tcp_shake_result fail(struct tcp_shake *shake, ep_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(shake->why, sizeof(shake->why), format, arguments);
    va_end(arguments);
    shake->status = status;
    tcp_shake_drop(shake);
    return TCP_SHAKE_FAILED;
}

static enum tcp_shake_result fail_system(struct tcp_shake *shake, int error)
{
    shake->error = error;
    return fail(shake, EP_E_SYSTEM, "%s", strerror(error));
}

/* `side` keeps a proof of one side from being one of the other. */
static void prove(const struct tcp_shake *shake, const char *side, const void *more, size_t bytes,
                  unsigned char ret_mac[EP_SHA256_BYTES])
{
    const struct ep_sha256_piece pieces[] = {
        {side, strlen(side) + 1},
        {&shake->hello, sizeof(shake->hello)},
        {shake->nonce, sizeof(shake->nonce)},
        {more, bytes},
    };

    ep_hmac_sha256(shake->key.bytes, sizeof(shake->key.bytes), pieces, bytes ? 4 : 3, ret_mac);
}

static void say(struct tcp_shake *shake, const void *bytes, size_t n)
{
    memcpy(shake->out, bytes, n);
    shake->out_used = n;
    shake->out_at = 0;
}

static void await(struct tcp_shake *shake, enum state state, size_t bytes)
{
    shake->state = state;
    shake->in_used = 0;
    shake->in_need = bytes;
}

ep_status tcp_shake_ask(struct tcp_shake *shake, int fd, const struct tcp_key *key, const struct tcp_hello *hello,
                        const struct tcp_address *to, uint64_t deadline_ns)
{
    *shake = (struct tcp_shake){.fd = fd,
                                .state = CONNECTING,
                                .from = *to,
                                .key = *key,
                                .hello = *hello,
                                .begin_ns = ep_now_ns(),
                                .deadline_ns = deadline_ns};
    shake->hello.magic = MAGIC;
    shake->hello.version = VERSION;
    return tcp_random(shake->hello.nonce, sizeof(shake->hello.nonce));
}

ep_status tcp_shake_serve(struct tcp_shake *shake, int fd, const struct tcp_key *key, const struct tcp_address *from,
                          uint64_t deadline_ns)
{
    *shake = (struct tcp_shake){
        .fd = fd, .from = *from, .key = *key, .begin_ns = ep_now_ns(), .deadline_ns = deadline_ns};
    await(shake, AWAITS_HELLO, sizeof(shake->hello));
    return tcp_random(shake->nonce, sizeof(shake->nonce));
}

/* --- what has come --- */

static enum tcp_shake_result take_hello(struct tcp_shake *shake)
{
    struct challenge challenge = {.magic = MAGIC};

    memcpy(&shake->hello, shake->in, sizeof(shake->hello));
    if (shake->hello.magic != MAGIC)
        return fail(shake, EP_E_MISMATCH, "does not speak epkit's protocol");
    if (shake->hello.version != VERSION)
        return fail(shake, EP_E_MISMATCH, "speaks version %u of the protocol, this library %u", shake->hello.version,
                    VERSION);
    memcpy(challenge.nonce, shake->nonce, sizeof(challenge.nonce));
    say(shake, &challenge, sizeof(challenge));
    await(shake, AWAITS_PROOF, EP_SHA256_BYTES);
    return TCP_SHAKE_PENDING;
}

static enum tcp_shake_result take_challenge(struct tcp_shake *shake)
{
    unsigned char mac[EP_SHA256_BYTES];
    struct challenge challenge;

    memcpy(&challenge, shake->in, sizeof(challenge));
    if (challenge.magic != MAGIC)
        return fail(shake, EP_E_MISMATCH, "what listens there does not speak epkit's protocol");
    memcpy(shake->nonce, challenge.nonce, sizeof(shake->nonce));
    prove(shake, "asks", NULL, 0, mac);
    say(shake, mac, sizeof(mac));
    await(shake, AWAITS_WELCOME, sizeof(struct welcome));
    return TCP_SHAKE_PENDING;
}

static enum tcp_shake_result take_proof(struct tcp_shake *shake)
{
    unsigned char mac[EP_SHA256_BYTES];

    prove(shake, "asks", NULL, 0, mac);
    if (!ep_digest_equal(mac, shake->in)) {
        /* For a rank whose secret is another one: it sees a proof that is none, and says so. */
        static const struct welcome refusal = {.magic = MAGIC, .status = EP_E_MISMATCH};

        (void)!send(shake->fd, &refusal, sizeof(refusal), MSG_NOSIGNAL | MSG_DONTWAIT);
        return fail(shake, EP_E_MISMATCH, "has another secret");
    }
    shake->state = PROVEN;
    return TCP_SHAKE_PROVEN;
}

static enum tcp_shake_result take_welcome(struct tcp_shake *shake)
{
    unsigned char mac[EP_SHA256_BYTES];
    struct welcome welcome;

    memcpy(&welcome, shake->in, sizeof(welcome));
    prove(shake, "answers", &welcome, offsetof(struct welcome, mac), mac);
    if (welcome.magic != MAGIC || !ep_digest_equal(mac, welcome.mac))
        return fail(shake, EP_E_MISMATCH, "it has another secret than this rank (EPKIT_SECRET), or is of another job");
    if (welcome.status == EP_OK) {
        shake->state = CLOSED;
        return TCP_SHAKE_DONE;
    }
    welcome.reason[sizeof(welcome.reason) - 1] = '\0';
    for (char *at = welcome.reason; *at; at++)
        *at = *at < ' ' || *at > '~' ? '?' : *at;
    shake->refused = true;
    return fail(shake, ep_status_is_failure(welcome.status) ? (ep_status)welcome.status : EP_E_MISMATCH, "%s",
                welcome.reason);
}

void tcp_shake_welcome(struct tcp_shake *shake, ep_status status, const char *reason)
{
    struct welcome welcome = {.magic = MAGIC, .status = (int32_t)status};

    snprintf(welcome.reason, sizeof(welcome.reason), "%.*s", TCP_REASON_BYTES - 1, reason);
    prove(shake, "answers", &welcome, offsetof(struct welcome, mac), welcome.mac);
    say(shake, &welcome, sizeof(welcome));
    shake->answer = (int32_t)status;
    if (status != EP_OK)
        snprintf(shake->why, sizeof(shake->why), "%s", reason);
    shake->state = WELCOMES;
}

/* --- steps --- */

/* 1: all of it has left, 0: not yet, -1: failed. */
static int push(struct tcp_shake *shake)
{
    while (shake->out_at < shake->out_used) {
        ssize_t n = send(shake->fd, shake->out + shake->out_at, shake->out_used - shake->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0) {
            fail_system(shake, errno);
            return -1;
        }
        shake->out_at += (size_t)n;
    }
    return 1;
}

/* 1: what is awaited is there, 0: not yet, -1: failed. Never more than that: what follows is the next reader's. */
static int pull(struct tcp_shake *shake)
{
    while (shake->in_used < shake->in_need) {
        ssize_t n = recv(shake->fd, shake->in + shake->in_used, shake->in_need - shake->in_used, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0) {
            fail_system(shake, errno);
            return -1;
        }
        if (n == 0) {
            fail(shake, EP_E_PEER_LEFT, "the connection was closed before both sides were known");
            return -1;
        }
        shake->in_used += (size_t)n;
    }
    return 1;
}

static enum tcp_shake_result finish_connecting(struct tcp_shake *shake)
{
    struct pollfd look = {.fd = shake->fd, .events = POLLOUT};
    int error;

    if (poll(&look, 1, 0) <= 0)
        return TCP_SHAKE_PENDING;
    error = tcp_connect_error(shake->fd);
    if (error)
        return fail_system(shake, error);
    say(shake, &shake->hello, sizeof(shake->hello));
    await(shake, SAYS_HELLO, sizeof(struct challenge));
    return TCP_SHAKE_DONE;
}

static enum tcp_shake_result take(struct tcp_shake *shake)
{
    switch (shake->state) {
    case AWAITS_HELLO:
        return take_hello(shake);
    case SAYS_HELLO:
        return take_challenge(shake);
    case AWAITS_PROOF:
        return take_proof(shake);
    default:
        return take_welcome(shake);
    }
}

enum tcp_shake_result tcp_shake_step(struct tcp_shake *shake)
{
    if (shake->state == CLOSED)
        return TCP_SHAKE_FAILED;
    if (ep_now_ns() >= shake->deadline_ns)
        return fail(shake, EP_E_TIMEOUT, "%s in time",
                    shake->state == CONNECTING ? "no connection came about" : "the other side did not prove itself");
    if (shake->state == CONNECTING && finish_connecting(shake) != TCP_SHAKE_DONE)
        return shake->state == CLOSED ? TCP_SHAKE_FAILED : TCP_SHAKE_PENDING;
    for (;;) {
        enum tcp_shake_result result;
        int ready = push(shake);

        if (ready > 0 && shake->state == WELCOMES) {
            if (shake->answer != EP_OK)
                return fail(shake, (ep_status)shake->answer, "%s", shake->why);
            shake->state = CLOSED;
            return TCP_SHAKE_DONE;
        }
        if (ready > 0 && shake->state == PROVEN)
            return TCP_SHAKE_PROVEN;
        if (ready > 0)
            ready = pull(shake);
        if (ready <= 0)
            return ready < 0 ? TCP_SHAKE_FAILED : TCP_SHAKE_PENDING;
        result = take(shake);
        if (result != TCP_SHAKE_PENDING)
            return result;
    }
}

short tcp_shake_events(const struct tcp_shake *shake)
{
    return shake->state == CONNECTING || shake->out_at < shake->out_used ? POLLOUT : POLLIN;
}

void tcp_shake_drop(struct tcp_shake *shake)
{
    if (shake->fd >= 0)
        close(shake->fd);
    shake->fd = -1;
    shake->state = CLOSED;
}
