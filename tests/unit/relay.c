/* SPDX-License-Identifier: Apache-2.0 */
#include "relay.h"

#include "base/clock.h"
#include "tcp/socket.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PAIRS = 256, BUFFER = 16384, SPLIT_BYTES = 61, DELAY_US = 700 };

/* One direction of a connection. */
struct direction {
    unsigned char data[BUFFER];
    size_t used;
    uint64_t due_ns;
    bool ended;
};

struct pair {
    int fds[2]; /* of the connecting rank, of the target */
    int rank;   /* target */
    struct direction directions[2];
};

struct relay {
    int n, n_pairs;
    int listeners[RELAY_MAX_RANKS];
    uint16_t ports[RELAY_MAX_RANKS];
    _Atomic int targets[RELAY_MAX_RANKS];
    _Atomic int mode, mode_rank, stops;
    _Atomic uint64_t bytes;
    pthread_t thread;
    uint64_t random;
    struct pair *pairs[MAX_PAIRS];
};

static enum relay_mode mode_of(struct relay *relay, int rank)
{
    int only = atomic_load(&relay->mode_rank);

    return only < 0 || only == rank ? (enum relay_mode)atomic_load(&relay->mode) : RELAY_PASS;
}

static uint64_t draw(struct relay *relay, uint64_t below)
{
    relay->random = relay->random * 6364136223846793005u + 1442695040888963407u;
    return (relay->random >> 33) % below;
}

static void end_pair(struct relay *relay, int i)
{
    struct linger reset = {.l_onoff = 1};

    for (int side = 0; side < 2; side++) {
        setsockopt(relay->pairs[i]->fds[side], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
        close(relay->pairs[i]->fds[side]);
    }
    free(relay->pairs[i]);
    relay->pairs[i] = relay->pairs[--relay->n_pairs];
}

static void accept_connection(struct relay *relay, int rank)
{
    struct tcp_address from, to = {.family = AF_INET, .bytes = {127, 0, 0, 1}};
    struct pair *pair;
    int fd = tcp_accept(relay->listeners[rank], &from), other = -1;

    if (fd < 0)
        return;
    to.port = (uint16_t)atomic_load(&relay->targets[rank]);
    pair = calloc(1, sizeof(*pair));
    if (!pair || relay->n_pairs == MAX_PAIRS || mode_of(relay, rank) == RELAY_CUT ||
        tcp_connect(&to, NULL, &other) != EP_OK) {
        close(fd);
        free(pair);
        return;
    }
    tcp_set_options(fd, 0);
    tcp_set_options(other, 0);
    *pair = (struct pair){.fds = {fd, other}, .rank = rank};
    relay->pairs[relay->n_pairs++] = pair;
}

static bool is_over(const struct pair *pair)
{
    return pair->directions[0].ended && pair->directions[1].ended && !pair->directions[0].used &&
           !pair->directions[1].used;
}

static bool has_failed(ssize_t n)
{
    return n < 0 && errno != EAGAIN && errno != EINTR && errno != ENOTCONN;
}

/* Forwards data of one side, including data that it sent before a reset. */
static void forward(struct relay *relay, struct pair *pair, int side, enum relay_mode mode)
{
    struct direction *direction = &pair->directions[side];
    size_t most = mode == RELAY_SPLIT ? 1 + (size_t)draw(relay, SPLIT_BYTES) : BUFFER;
    ssize_t n;

    if (!direction->ended && direction->used < BUFFER) {
        n = recv(pair->fds[side], direction->data + direction->used, BUFFER - direction->used, MSG_DONTWAIT);
        if (n > 0 && !direction->used)
            direction->due_ns = mode == RELAY_DELAY ? ep_now_ns() + draw(relay, DELAY_US) * 1000u : 0;
        direction->ended = n == 0 || has_failed(n);
        direction->used += n > 0 ? (size_t)n : 0;
    }
    if (direction->used && ep_now_ns() >= direction->due_ns) {
        n = send(pair->fds[!side], direction->data, direction->used < most ? direction->used : most,
                 MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            memmove(direction->data, direction->data + n, direction->used - (size_t)n);
            direction->used -= (size_t)n;
            atomic_fetch_add(&relay->bytes, (uint64_t)n);
        } else if (has_failed(n)) {
            direction->used = 0;
            direction->ended = true;
        }
    }
    if (direction->ended && !direction->used)
        shutdown(pair->fds[!side], SHUT_WR);
}

static void step(struct relay *relay)
{
    for (int rank = 0; rank < relay->n; rank++)
        accept_connection(relay, rank);
    for (int i = 0; i < relay->n_pairs;) {
        struct pair *pair = relay->pairs[i];
        enum relay_mode mode = mode_of(relay, pair->rank);

        for (int side = 0; mode != RELAY_STALL && mode != RELAY_CUT && side < 2; side++)
            forward(relay, pair, side, mode);
        if (mode == RELAY_CUT || is_over(pair))
            end_pair(relay, i);
        else
            i++;
    }
}

static void *run(void *argument)
{
    struct relay *relay = argument;
    struct pollfd polls[2 * MAX_PAIRS + RELAY_MAX_RANKS];

    while (!atomic_load(&relay->stops)) {
        int n = 0;

        for (int rank = 0; rank < relay->n; rank++)
            polls[n++] = (struct pollfd){.fd = relay->listeners[rank], .events = POLLIN};
        for (int i = 0; i < relay->n_pairs; i++)
            for (int side = 0; side < 2; side++)
                if (!relay->pairs[i]->directions[side].ended && mode_of(relay, relay->pairs[i]->rank) != RELAY_STALL)
                    polls[n++] = (struct pollfd){.fd = relay->pairs[i]->fds[side], .events = POLLIN};
        (void)poll(polls, (nfds_t)n, 1);
        step(relay);
    }
    while (relay->n_pairs)
        end_pair(relay, 0);
    return NULL;
}

struct relay *relay_new(int n)
{
    struct tcp_address here = {.family = AF_INET, .bytes = {127, 0, 0, 1}};
    struct relay *relay = calloc(1, sizeof(*relay));

    if (!relay)
        return NULL;
    atomic_store(&relay->mode_rank, -1);
    for (relay->n = 0; relay->n < n; relay->n++)
        if (tcp_listen(&here, 0, &relay->listeners[relay->n], &relay->ports[relay->n]) != EP_OK)
            break;
    if (relay->n == n && pthread_create(&relay->thread, NULL, run, relay) == 0)
        return relay;
    for (int rank = 0; rank < relay->n; rank++)
        close(relay->listeners[rank]);
    free(relay);
    return NULL;
}

uint16_t relay_port(const struct relay *relay, int rank)
{
    return relay->ports[rank];
}

void relay_set_target(struct relay *relay, int rank, uint16_t port)
{
    atomic_store(&relay->targets[rank], port);
}

void relay_set_mode(struct relay *relay, enum relay_mode mode, int rank)
{
    atomic_store(&relay->mode_rank, rank);
    atomic_store(&relay->mode, (int)mode);
}

uint64_t relay_bytes(const struct relay *relay)
{
    return atomic_load(&relay->bytes);
}

void relay_free(struct relay *relay)
{
    if (!relay)
        return;
    atomic_store(&relay->stops, 1);
    pthread_join(relay->thread, NULL);
    for (int rank = 0; rank < relay->n; rank++)
        close(relay->listeners[rank]);
    free(relay);
}
