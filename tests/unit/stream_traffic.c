/* SPDX-License-Identifier: Apache-2.0 */
#include "stream_traffic.h"

#include "base/clock.h"
#include "base/futex.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pieces of messages that have been sent but not flushed lie in a pool of this many largest messages per stream. */
#define POOL_MESSAGES 3
#define NAP_NS 500000000u

struct lane {
    int peer, channel; /* node */
    int sent, received;
    unsigned char *pool, *expected;
    size_t pool_used;
    bool verified; /* the message at the head of the stream, before it is popped */
    uint64_t received_bytes;
};

struct traffic {
    const struct traffic_spec *spec;
    struct traffic_result *result;
    struct ep_streams *streams;
    struct lane *lanes;
    int n_lanes, rank, node;
    size_t most, pool_bytes;
    uint64_t random;
    bool wants_flush; /* a pool is used up */
};

static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

static uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return mix(*state) % below;
}

/* Message `number` of a stream is a function of who sends it to whom: the receiver makes it again and compares. */
static uint64_t message_key(uint64_t seed, int from, int to, int channel, int number)
{
    return mix(seed ^ mix((uint64_t)from << 48 | (uint64_t)to << 36 | (uint64_t)channel << 32 | (uint64_t)number));
}

static size_t message_bytes(uint64_t key, size_t most)
{
    switch (key % 8) {
    case 0:
        return 0;
    case 1:
        return most;
    case 2:
        return most - (key >> 8) % 32;
    case 3:
    case 4:
        return (size_t)((key >> 8) % (most + 1));
    default:
        return (size_t)((key >> 8) % 300);
    }
}

static void fill_message(uint64_t key, unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = mix(key + i);

        memcpy(data + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
}

static int complain(struct traffic *t, const struct lane *lane, const char *what)
{
    snprintf(t->result->why, sizeof(t->result->why), "rank %d, peer node %d, channel %d, sent %d, received %d: %s",
             t->rank, lane->peer, lane->channel, lane->sent, lane->received, what);
    return -1;
}

/* Cuts the message at random places: a head and up to eight pieces, some of them empty. */
static bool try_send(struct traffic *t, struct lane *lane)
{
    const struct traffic_spec *spec = t->spec;
    int to = ep_net_rail_rank(t->rank, spec->ranks_per_node, lane->peer), n_pieces;
    uint64_t key = message_key(spec->seed, t->rank, to, lane->channel, lane->sent);
    size_t bytes = message_bytes(key, t->most), head, done;
    unsigned char *data = lane->pool + lane->pool_used;
    struct ep_piece pieces[EP_STREAM_PIECES];

    if (lane->pool_used + bytes > t->pool_bytes) {
        t->wants_flush = true;
        return false;
    }
    fill_message(key, data, bytes);
    head = (size_t)draw(&t->random, (bytes < EP_STREAM_HEAD_BYTES ? bytes : EP_STREAM_HEAD_BYTES) + 1);
    n_pieces = (int)draw(&t->random, EP_STREAM_PIECES) + 1;
    done = head;
    for (int i = 0; i < n_pieces; i++) {
        size_t piece = i == n_pieces - 1 ? bytes - done : (size_t)draw(&t->random, bytes - done + 1);

        pieces[i] = (struct ep_piece){.data = data + done, .bytes = piece};
        done += piece;
    }
    if (bytes == head && draw(&t->random, 2))
        n_pieces = 0;
    if (!ep_stream_send(t->streams, lane->peer, lane->channel, data, head, pieces, n_pieces)) {
        t->result->refused++;
        return false;
    }
    memset(data, 0xee, head); /* the head was copied */
    lane->pool_used += bytes;
    lane->sent++;
    return true;
}

/* 1: popped a message, 0: none to pop now, -1: a wrong one. */
static int try_receive(struct traffic *t, struct lane *lane)
{
    const struct traffic_spec *spec = t->spec;
    int from = ep_net_rail_rank(t->rank, spec->ranks_per_node, lane->peer);
    uint64_t key = message_key(spec->seed, from, t->rank, lane->channel, lane->received);
    size_t bytes, wanted = message_bytes(key, t->most);
    const void *message = ep_stream_peek(t->streams, lane->peer, lane->channel, &bytes);

    if (!message)
        return lane->verified ? complain(t, lane, "a message vanished before it was popped") : 0;
    if (lane->received == spec->messages)
        return complain(t, lane, "a message more than was sent");
    if ((uintptr_t)message % 16)
        return complain(t, lane, "a message that is not aligned to 16 bytes");
    if (bytes != wanted)
        return complain(t, lane, "a message of the wrong size");
    fill_message(key, lane->expected, wanted);
    if (memcmp(message, lane->expected, wanted) != 0)
        return complain(t, lane, lane->verified ? "a message that changed before it was popped" : "wrong contents");
    lane->verified = true;
    if (draw(&t->random, t->rank == spec->slow_rank ? 40 : 3) != 0)
        return 0; /* look at it once more later: it must stay as it is until it is popped */
    lane->verified = false;
    lane->received++;
    lane->received_bytes += 16 + ((bytes + 15) & ~(size_t)15);
    t->result->messages++;
    t->result->bytes += bytes;
    ep_stream_pop(t->streams, lane->peer, lane->channel);
    return 1;
}

static void wake(void *context, int rank)
{
    struct traffic_bells *bells = context;

    atomic_fetch_add(&bells->rank[rank].word, 1);
    ep_futex_wake(&bells->rank[rank].word);
}

/* Nothing moved: sleep if the network allows it, and find out whether the sleep ended for the right reason. */
static ep_status rest(struct traffic *t, uint32_t seen, bool undecided)
{
    _Atomic uint32_t *bell = t->spec->bells ? &t->spec->bells->rank[t->rank].word : NULL;
    struct timespec moment = {.tv_nsec = 20000};
    uint64_t begin = ep_now_ns();
    bool moved = false;

    /* A message that is looked at once more, or a pool to be flushed, is our own business: nobody wakes us for it. */
    if (undecided || !bell || !ep_streams_sleeps(t->streams)) {
        nanosleep(&moment, NULL);
        return EP_OK;
    }
    ep_futex_wait(bell, seen, NAP_NS);
    t->result->naps++;
    if (atomic_load(bell) != seen || ep_now_ns() - begin < NAP_NS)
        return EP_OK;
    EP_TRY(ep_streams_progress(t->streams, &moved));
    /* Work may have come in this very moment, with its bell still to be rung. */
    moment.tv_nsec = 200000000;
    if (moved && nanosleep(&moment, NULL) == 0 && atomic_load(bell) == seen)
        t->result->lost_wakes++;
    return EP_OK;
}

static void reuse_pools(struct traffic *t)
{
    for (int i = 0; i < t->n_lanes; i++) {
        memset(t->lanes[i].pool, 0xdd, t->lanes[i].pool_used);
        t->lanes[i].pool_used = 0;
    }
    t->wants_flush = false;
    t->result->flushes++;
}

/* One round over all lanes. 1: all done, 0: not yet, -1: failed. */
static int step(struct traffic *t)
{
    uint32_t seen = t->spec->bells ? atomic_load(&t->spec->bells->rank[t->rank].word) : 0;
    bool moved, undecided = false, open = false;

    if (ep_streams_progress(t->streams, &moved) != EP_OK)
        return complain(t, &t->lanes[0], ep_last_error());
    for (int i = 0; i < t->n_lanes; i++) {
        struct lane *lane = &t->lanes[i];
        int received = try_receive(t, lane);

        if (received < 0)
            return -1;
        moved |= received > 0;
        if (lane->sent < t->spec->messages && !t->wants_flush)
            moved |= try_send(t, lane);
        undecided |= lane->verified;
        open |= lane->sent < t->spec->messages || lane->received < t->spec->messages;
    }
    if ((t->wants_flush || !open) && ep_streams_flushed(t->streams)) {
        reuse_pools(t);
        moved = true;
        if (!open)
            return 1;
    }
    if (!moved && rest(t, seen, undecided) != EP_OK)
        return complain(t, &t->lanes[0], ep_last_error());
    return 0;
}

static int make_lanes(struct traffic *t)
{
    int nnodes = t->n_lanes / t->spec->channels + 1;

    t->lanes = calloc((size_t)t->n_lanes, sizeof(*t->lanes));
    if (!t->lanes)
        return -1;
    for (int i = 0; i < t->n_lanes; i++) {
        struct lane *lane = &t->lanes[i];

        lane->peer = ep_net_peer(t->node, i % (nnodes - 1));
        lane->channel = i / (nnodes - 1);
        lane->pool = malloc(t->pool_bytes);
        lane->expected = malloc(t->most + 8);
        if (!lane->pool || !lane->expected)
            return -1;
    }
    return 0;
}

/* Grows with every step of this rank. */
static uint64_t count_steps(const struct traffic *t)
{
    uint64_t steps = t->result->flushes;

    for (int i = 0; i < t->n_lanes; i++)
        steps += (uint64_t)t->lanes[i].sent + (uint64_t)t->lanes[i].received;
    return steps;
}

static int complain_of_standstill(struct traffic *t)
{
    for (int i = 0; i < t->n_lanes; i++)
        if (t->lanes[i].sent < t->spec->messages || t->lanes[i].received < t->spec->messages)
            return complain(t, &t->lanes[i], "nothing sent or received for too long");
    return complain(t, &t->lanes[0], "not flushed for too long");
}

static int exchange(struct traffic *t)
{
    uint64_t idle_ns = (uint64_t)t->spec->idle_s * 1000000000u, steps = 0, deadline = ep_now_ns() + idle_ns;
    int done = 0;

    t->most = ep_streams_max_message(t->streams);
    t->pool_bytes = POOL_MESSAGES * t->most;
    if (make_lanes(t) != 0) {
        snprintf(t->result->why, sizeof(t->result->why), "no memory");
        return -1;
    }
    while (done == 0) {
        done = step(t);
        if (count_steps(t) != steps) {
            steps = count_steps(t);
            deadline = ep_now_ns() + idle_ns;
        } else if (done == 0 && ep_now_ns() > deadline) {
            done = complain_of_standstill(t);
        }
    }
    for (int i = 0; i < t->n_lanes; i++)
        if (t->lanes[i].received_bytes / t->spec->ring_bytes > t->result->laps)
            t->result->laps = t->lanes[i].received_bytes / t->spec->ring_bytes;
    return done < 0 ? -1 : 0;
}

int traffic_run(const ep_boot *boot, const struct traffic_spec *spec, struct traffic_result *result)
{
    struct ep_net_params params = {.rank = boot->rank,
                                   .nranks = boot->nranks,
                                   .ranks_per_node = spec->ranks_per_node,
                                   .channels = spec->channels,
                                   .timeout_ms = spec->idle_s * 1000,
                                   .emulation = spec->emulation,
                                   .boot = boot,
                                   .wake = spec->bells ? wake : NULL,
                                   .wake_context = spec->bells};
    struct traffic t = {.spec = spec,
                        .result = result,
                        .rank = boot->rank,
                        .node = boot->rank / spec->ranks_per_node,
                        .n_lanes = (boot->nranks / spec->ranks_per_node - 1) * spec->channels,
                        .random = mix(spec->seed + (uint64_t)boot->rank)};
    const struct ep_net_provider *provider = spec->provider ? spec->provider : boot->network;
    int done = -1;

    *result = (struct traffic_result){.why = ""};
    if (ep_streams_open(provider, &params, spec->ring_bytes, &t.streams) != EP_OK)
        snprintf(result->why, sizeof(result->why), "rank %d: open: %s", boot->rank, ep_last_error());
    else
        done = exchange(&t);
    for (int i = 0; t.lanes && i < t.n_lanes; i++) {
        free(t.lanes[i].pool);
        free(t.lanes[i].expected);
    }
    free(t.lanes);
    ep_streams_free(t.streams);
    return done;
}
