/* SPDX-License-Identifier: Apache-2.0 */
#include "stream_traffic.h"

#include "base/clock.h"
#include "base/futex.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Size of the pool of unflushed messages of each stream, in largest messages. */
#define POOL_MESSAGES 3
#define SLEEP_NS 500000000u

struct flow {
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
    struct flow *flows;
    int n_flows, rank, node;
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

/* Message `number` of a stream is a function of its ranks and channel, so that the receiver can generate and compare
 * it. */
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

static int fail(struct traffic *t, const struct flow *flow, const char *what)
{
    snprintf(t->result->why, sizeof(t->result->why), "rank %d, peer node %d, channel %d, sent %d, received %d: %s",
             t->rank, flow->peer, flow->channel, flow->sent, flow->received, what);
    return -1;
}

/* Splits the message at random into a head and up to eight pieces, some of them empty. */
static bool try_send(struct traffic *t, struct flow *flow)
{
    const struct traffic_spec *spec = t->spec;
    int to = ep_net_rail_rank(t->rank, spec->ranks_per_node, flow->peer), n_pieces;
    uint64_t key = message_key(spec->seed, t->rank, to, flow->channel, flow->sent);
    size_t bytes = message_bytes(key, t->most), head, done;
    unsigned char *data = flow->pool + flow->pool_used;
    struct ep_piece pieces[EP_STREAM_PIECES];

    if (flow->pool_used + bytes > t->pool_bytes) {
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
    if (!ep_stream_send(t->streams, flow->peer, flow->channel, data, head, pieces, n_pieces)) {
        t->result->refused++;
        return false;
    }
    memset(data, 0xee, head); /* the head was copied */
    flow->pool_used += bytes;
    flow->sent++;
    return true;
}

/* 1: popped a message, 0: nothing to pop, -1: a wrong message. */
static int try_receive(struct traffic *t, struct flow *flow)
{
    const struct traffic_spec *spec = t->spec;
    int from = ep_net_rail_rank(t->rank, spec->ranks_per_node, flow->peer);
    uint64_t key = message_key(spec->seed, from, t->rank, flow->channel, flow->received);
    size_t bytes, wanted = message_bytes(key, t->most);
    const void *message = ep_stream_peek(t->streams, flow->peer, flow->channel, &bytes);

    if (!message)
        return flow->verified ? fail(t, flow, "a message vanished before it was popped") : 0;
    if (flow->received == spec->messages)
        return fail(t, flow, "a message more than was sent");
    if ((uintptr_t)message % 16)
        return fail(t, flow, "a message that is not aligned to 16 bytes");
    if (bytes != wanted)
        return fail(t, flow, "a message of the wrong size");
    fill_message(key, flow->expected, wanted);
    if (memcmp(message, flow->expected, wanted) != 0)
        return fail(t, flow, flow->verified ? "a message that changed before it was popped" : "wrong contents");
    flow->verified = true;
    if (draw(&t->random, t->rank == spec->slow_rank ? 40 : 3) != 0)
        return 0; /* peek again later: it must not change until it is popped */
    flow->verified = false;
    flow->received++;
    flow->received_bytes += 16 + ((bytes + 15) & ~(size_t)15);
    t->result->messages++;
    t->result->bytes += bytes;
    ep_stream_pop(t->streams, flow->peer, flow->channel);
    return 1;
}

static void wake(void *context, int rank)
{
    struct traffic_doorbells *doorbells = context;

    atomic_fetch_add(&doorbells->rank[rank].word, 1);
    ep_futex_wake(&doorbells->rank[rank].word);
}

/* Nothing moved: sleeps if the network allows it, and checks that no wake-up was lost. */
static ep_status wait_for_work(struct traffic *t, uint32_t seen, bool undecided)
{
    _Atomic uint32_t *doorbell = t->spec->doorbells ? &t->spec->doorbells->rank[t->rank].word : NULL;
    struct timespec moment = {.tv_nsec = 20000};
    uint64_t begin = ep_now_ns();
    bool moved = false;

    /* No peer wakes this rank for a message to be peeked again, or a pool to be flushed. */
    if (undecided || !doorbell || !ep_streams_get_net(t->streams)->can_sleep) {
        nanosleep(&moment, NULL);
        return EP_OK;
    }
    ep_futex_wait(doorbell, seen, SLEEP_NS);
    t->result->sleeps++;
    if (atomic_load(doorbell) != seen || ep_now_ns() - begin < SLEEP_NS)
        return EP_OK;
    EP_TRY(ep_streams_progress(t->streams, &moved));
    /* Work may have arrived just now, before its doorbell is rung. */
    moment.tv_nsec = 200000000;
    if (moved && nanosleep(&moment, NULL) == 0 && atomic_load(doorbell) == seen)
        t->result->lost_wakeups++;
    return EP_OK;
}

static void reuse_pools(struct traffic *t)
{
    for (int i = 0; i < t->n_flows; i++) {
        memset(t->flows[i].pool, 0xdd, t->flows[i].pool_used);
        t->flows[i].pool_used = 0;
    }
    t->wants_flush = false;
    t->result->flushes++;
}

/* One round over all flows. 1: all done, 0: not yet, -1: failed. */
static int step(struct traffic *t)
{
    uint32_t seen = t->spec->doorbells ? atomic_load(&t->spec->doorbells->rank[t->rank].word) : 0;
    bool moved, undecided = false, open = false;

    if (ep_streams_progress(t->streams, &moved) != EP_OK)
        return fail(t, &t->flows[0], ep_last_error());
    for (int i = 0; i < t->n_flows; i++) {
        struct flow *flow = &t->flows[i];
        int received = try_receive(t, flow);

        if (received < 0)
            return -1;
        moved |= received > 0;
        if (flow->sent < t->spec->messages && !t->wants_flush)
            moved |= try_send(t, flow);
        undecided |= flow->verified;
        open |= flow->sent < t->spec->messages || flow->received < t->spec->messages;
    }
    if ((t->wants_flush || !open) && ep_streams_flushed(t->streams)) {
        reuse_pools(t);
        moved = true;
        if (!open)
            return 1;
    }
    if (!moved && wait_for_work(t, seen, undecided) != EP_OK)
        return fail(t, &t->flows[0], ep_last_error());
    return 0;
}

static int make_flows(struct traffic *t)
{
    int nnodes = t->n_flows / t->spec->channels + 1;

    t->flows = calloc((size_t)t->n_flows, sizeof(*t->flows));
    if (!t->flows)
        return -1;
    for (int i = 0; i < t->n_flows; i++) {
        struct flow *flow = &t->flows[i];

        flow->peer = ep_net_peer(t->node, i % (nnodes - 1));
        flow->channel = i / (nnodes - 1);
        flow->pool = malloc(t->pool_bytes);
        flow->expected = malloc(t->most + 8);
        if (!flow->pool || !flow->expected)
            return -1;
    }
    return 0;
}

/* Increases with every step of this rank. */
static uint64_t count_steps(const struct traffic *t)
{
    uint64_t steps = t->result->flushes;

    for (int i = 0; i < t->n_flows; i++)
        steps += (uint64_t)t->flows[i].sent + (uint64_t)t->flows[i].received;
    return steps;
}

static int fail_idle(struct traffic *t)
{
    for (int i = 0; i < t->n_flows; i++)
        if (t->flows[i].sent < t->spec->messages || t->flows[i].received < t->spec->messages)
            return fail(t, &t->flows[i], "nothing sent or received for too long");
    return fail(t, &t->flows[0], "not flushed for too long");
}

static int exchange(struct traffic *t)
{
    uint64_t idle_ns = (uint64_t)t->spec->idle_s * 1000000000u, steps = 0, deadline = ep_now_ns() + idle_ns;
    int done = 0;

    t->most = ep_streams_max_message(t->streams);
    t->pool_bytes = POOL_MESSAGES * t->most;
    if (make_flows(t) != 0) {
        snprintf(t->result->why, sizeof(t->result->why), "no memory");
        return -1;
    }
    while (done == 0) {
        done = step(t);
        if (count_steps(t) != steps) {
            steps = count_steps(t);
            deadline = ep_now_ns() + idle_ns;
        } else if (done == 0 && ep_now_ns() > deadline) {
            done = fail_idle(t);
        }
    }
    for (int i = 0; i < t->n_flows; i++)
        if (t->flows[i].received_bytes / t->spec->ring_bytes > t->result->laps)
            t->result->laps = t->flows[i].received_bytes / t->spec->ring_bytes;
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
                                   .wake = spec->doorbells ? wake : NULL,
                                   .wake_context = spec->doorbells};
    struct traffic t = {.spec = spec,
                        .result = result,
                        .rank = boot->rank,
                        .node = boot->rank / spec->ranks_per_node,
                        .n_flows = (boot->nranks / spec->ranks_per_node - 1) * spec->channels,
                        .random = mix(spec->seed + (uint64_t)boot->rank)};
    const struct ep_net_provider *provider = spec->provider ? spec->provider : boot->network;
    int done = -1;

    *result = (struct traffic_result){.why = ""};
    if (ep_streams_open(provider, &params, spec->ring_bytes, &t.streams) != EP_OK)
        snprintf(result->why, sizeof(result->why), "rank %d: open: %s", boot->rank, ep_last_error());
    else
        done = exchange(&t);
    for (int i = 0; t.flows && i < t.n_flows; i++) {
        free(t.flows[i].pool);
        free(t.flows[i].expected);
    }
    free(t.flows);
    ep_streams_free(t.streams);
    return done;
}
