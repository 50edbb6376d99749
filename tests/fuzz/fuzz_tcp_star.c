/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as what a stranger or a rank sends to the bootstrap over TCP: the handshake of either side refuses them,
 * the all-gather of either side writes nothing beside its result, and all of them end.
 *
 * The input: which of the four (1 byte), then the bytes.
 */
#include "base/clock.h"
#include "tcp/star_internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, BLOCK = 8, GUARD = 32 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* A connection on which the bytes have come, and then its end. */
static int connect_to_bytes(const uint8_t *data, size_t size, int *ret_other)
{
    int fds[2];

    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    if (size)
        (void)!write(fds[1], data, size);
    shutdown(fds[1], SHUT_WR);
    *ret_other = fds[1];
    return fds[0];
}

/* With nonces that are known, so that there are bytes in the corpus that prove something. */
static void shake_hands(const uint8_t *data, size_t size, bool listens)
{
    struct tcp_key key = {.bytes = {1, 2, 3}};
    struct tcp_hello hello = {.kind = TCP_BOOTSTRAP, .rank = 1, .detail = RANKS};
    struct tcp_address nobody = {0};
    struct tcp_handshake hs;
    enum tcp_handshake_result result;
    int other, fd = connect_to_bytes(data, size, &other);

    if (listens)
        tcp_handshake_accept(&hs, fd, &key, &nobody, ep_deadline_ns(10000));
    else
        tcp_handshake_connect(&hs, fd, &key, &hello, &nobody, ep_deadline_ns(10000));
    memset(listens ? hs.nonce : hs.hello.nonce, 0, TCP_NONCE_BYTES);
    for (int steps = 0; steps < 8; steps++) {
        result = tcp_handshake_step(&hs);
        check(result != TCP_HANDSHAKE_PENDING);
        if (result != TCP_HANDSHAKE_AUTHENTICATED)
            break;
        check(listens);
        tcp_handshake_reply(&hs, data[size - 1] % 2 ? EP_OK : EP_E_MISMATCH, "a reason");
    }
    if (result == TCP_HANDSHAKE_DONE)
        close(hs.fd);
    else
        check(hs.fd == -1 && hs.status != EP_OK && memchr(hs.why, '\0', sizeof(hs.why)));
    close(other);
}

static void gather(const uint8_t *data, size_t size, int rank)
{
    unsigned char memory[GUARD + RANKS * BLOCK + GUARD], guard[GUARD], mine[BLOCK] = {0};
    int other;
    struct tcp_star *star;

    memset(memory, 0xa5, sizeof(memory));
    memset(guard, 0xa5, sizeof(guard));
    check(tcp_star_new("fuzz", rank, RANKS, &star) == EP_OK);
    star->conns[rank == 0].fd = connect_to_bytes(data, size, &other);
    for (int i = 0; i < 3; i++) {
        (void)tcp_star_allgather(star, mine, BLOCK, 10000, memory + GUARD);
        check(star->failure.rank < RANKS);
    }
    check(memcmp(memory, guard, GUARD) == 0 && memcmp(memory + GUARD + RANKS * BLOCK, guard, GUARD) == 0);
    tcp_star_free(star);
    close(other);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > 4096)
        return 0;
    if (data[0] % 4 < 2)
        shake_hands(data + 1, size - 1, data[0] % 4 == 0);
    else
        gather(data + 1, size - 1, data[0] % 4 - 2);
    return 0;
}
