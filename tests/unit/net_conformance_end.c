/* SPDX-License-Identifier: Apache-2.0 */
/* The conformance tests of ranks that leave and of peers that are revoked. */
#include "net_conformance_case.h"

#include "core/core.h"

#include <epkit/epkit.h>

enum { LEAVER = NRANKS - 1, LAST_BYTES = 70000 }; /* several messages of any engine */

static unsigned char last_value(size_t k)
{
    return (unsigned char)(k * 7 + 3);
}

/* Sends to all ranks of the other block, and frees its endpoint when everything is flushed. */
static void send_and_leave(const struct conformance *c, struct ep_net *net)
{
    static unsigned char data[LAST_BYTES];
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    int step[NRANKS] = {0}, left = 1;

    for (size_t k = 0; k < LAST_BYTES; k++)
        data[k] = last_value(k);
    while (left) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        left = 0;
        for (int rank = 0; rank < LEAVER / 2 * 2; rank++) {
            if (step[rank] == 0)
                step[rank] += net->ops->put(net, rank, 0, (uint64_t)LEAVER * LAST_BYTES, data, LAST_BYTES);
            if (step[rank] == 1)
                step[rank] += net->ops->signal(net, rank, 0, LEAVER, 1);
            left += step[rank] < 2 || !net->ops->flush_test(net, rank, 0);
        }
    }
    net->ops->free(net);
}

/*
 * Checks that the data of the leaving rank is complete when its signal is visible, that its signal (if it `sends`) is
 * visible before ended() is true, that ended() is true for no other rank, and lost() for none. true: it has ended.
 */
static bool has_left(const struct conformance *c, struct ep_net *net, bool sends)
{
    bool ended = net->ops->ended && net->ops->ended(net, LEAVER);

    CHECK(net->signals[LEAVER] <= sends);
    CHECK(!ended || net->signals[LEAVER] == sends);
    for (int rank = 0; rank < NRANKS; rank++) {
        bool wanted = rank / 2 != c->boot->rank / 2;

        CHECK(!wanted || rank == LEAVER || !net->ops->ended || !net->ops->ended(net, rank));
        CHECK(!wanted || !net->ops->lost || !net->ops->lost(net, rank));
    }
    if (net->signals[LEAVER] < sends)
        return false;
    for (size_t k = 0; sends && k < LAST_BYTES; k++)
        CHECK(net->region[(size_t)LEAVER * LAST_BYTES + k] == last_value(k));
    return ended || !net->ops->ended;
}

enum awaited { NOTHING, END, DATA_AND_END }; /* of the leaving rank */

/* Sends one byte to each remaining rank of the other block, and receives one from each. */
static void exchange_among_rest(const struct conformance *c, struct ep_net *net, unsigned char round,
                                enum awaited awaited)
{
    static const unsigned char marks[NRANKS] = {11, 22, 33, 44};
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    unsigned char mine = (unsigned char)(marks[c->boot->rank] + round);
    int me = c->boot->rank, left = 1;
    bool sent[NRANKS] = {false};

    while (left) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        left = awaited && !has_left(c, net, awaited == DATA_AND_END);
        for (int rank = 0; rank < NRANKS; rank++) {
            size_t at = (size_t)rank * LAST_BYTES + round;

            if (rank / 2 == me / 2 || rank == LEAVER)
                continue;
            if (!sent[rank])
                sent[rank] = net->ops->put(net, rank, 0, (uint64_t)me * LAST_BYTES + round, &mine, 1);
            left += !sent[rank] || net->region[at] != marks[rank] + round || !net->ops->flush_test(net, rank, 0);
        }
    }
}

/* Puts to a rank that has left are discarded: no call waits for room, and nothing breaks. */
static void send_to_leaver(const struct conformance *c, struct ep_net *net)
{
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    static const unsigned char data[1000];
    int n = 0;

    while (n < 100 || !net->ops->flush_test(net, LEAVER, 0)) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        while (n < 100 && net->ops->put(net, LEAVER, 0, 0, data, sizeof(data)))
            n++;
    }
}

/*
 * Every rank exchanges data with every rank of the other block. One leaves: its data arrives, ended() is true for that
 * rank only, if the engine supports it, and the others continue.
 */
static void let_one_leave(const struct conformance *c, bool sends)
{
    struct ep_net_params params = {.rank = c->boot->rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = 1,
                                   .channels = 1,
                                   .block_ranks = 2,
                                   .tolerant = true,
                                   .region_bytes = (size_t)NRANKS * LAST_BYTES,
                                   .n_signals = NRANKS,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = c->boot};
    enum awaited awaited = c->boot->rank / 2 == LEAVER / 2 ? NOTHING : sends ? DATA_AND_END : END;
    char mine = 0, all[NRANKS];
    struct ep_net *net = NULL;

    CHECK(c->provider->open(c->provider, &params, &net) == EP_OK);
    if (c->boot->rank == LEAVER) {
        net->abandoned = !sends;
        if (sends)
            send_and_leave(c, net);
        else
            net->ops->free(net);
        CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
        return;
    }
    exchange_among_rest(c, net, 0, awaited);
    if (awaited && net->ops->ended)
        send_to_leaver(c, net);
    exchange_among_rest(c, net, 1, awaited);
    CHECK(net->broken_by == 0);
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    net->ops->free(net);
}

void net_conformance_rank_that_leaves(const struct conformance *c)
{
    let_one_leave(c, true);
}

/* As after a failure of its group, without having sent anything. */
void net_conformance_rank_that_abandons(const struct conformance *c)
{
    let_one_leave(c, false);
}

/*
 * A rank leaves a communicator: its last all-gather completes on all others, and their next operation fails and names
 * it. With an engine without ended() it fails at the deadline.
 */
void net_conformance_communicator_left_by_rank(const struct conformance *c)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    int32_t mine = 100 + c->boot->rank, ranks[NRANKS];
    char arrived = 0, all[NRANKS];
    ep_comm *comm = NULL;

    config.backend = "host";
    config.network = c->provider->name;
    config.ranks_per_node = 1;
    config.timeout_ms = PATIENT_MS;
    CHECK(ep_comm_new(c->boot, &config, &comm) == EP_OK);
    CHECK(ep_comm_allgather(comm, &mine, sizeof(mine), ranks) == EP_OK);
    if (c->boot->rank == LEAVER)
        ep_comm_free(comm);
    for (int rank = 0; rank < NRANKS; rank++)
        CHECK(ranks[rank] == 100 + rank);
    CHECK(gather(c, &arrived, 1, PATIENT_MS, all) == EP_OK);
    if (c->boot->rank != LEAVER) {
        comm->config.timeout_ms = LEFT_MS;
        CHECK(ep_comm_barrier(comm) == EP_E_PEER_LEFT);
        CHECK(strstr(ep_comm_last_error(comm), "rank 3 left the group"));
    }
    /* A rank that leaves now would be reported by slower ranks. */
    CHECK(gather(c, &arrived, 1, PATIENT_MS, all) == EP_OK);
    if (c->boot->rank != LEAVER)
        ep_comm_free(comm);
}

/* Sends to a rank that may not call progress(): does not wait until everything is flushed. */
static void send_unread(const struct conformance *c, struct ep_net *net, int rank, const unsigned char *block,
                        size_t bytes)
{
    int me = c->boot->rank;
    bool moved;

    for (int channel = 0; channel < CHANNELS; channel++) {
        net->ops->put(net, rank, channel, (uint64_t)me * bytes, block, bytes);
        net->ops->signal(net, rank, channel, (uint32_t)me, 1);
    }
    for (int tries = 0; tries < 100 && !net->ops->flush_test(net, rank, 0); tries++)
        (void)net->ops->progress(net, &moved);
}

/* Exchanges signals between all ranks except ranks 0 and 1; the number of missing ones. Signals: N_SIGNALS / 2 + rank.
 */
static int signal_others(const struct conformance *c, struct ep_net *net, bool *sent)
{
    int me = c->boot->rank, left = 0;

    for (int rank = 0; rank < NRANKS; rank++) {
        if (rank == me)
            continue;
        sent[rank] = sent[rank] || net->ops->signal(net, rank, 1, (uint32_t)(N_SIGNALS / 2 + me), 1);
        left += (rank < 2 && me < 2) ? 0 : !sent[rank] || !net->signals[N_SIGNALS / 2 + rank];
    }
    return left;
}

/*
 * Rank 0 revokes rank 1, whose blocks are in flight, after `polls` calls of progress(), while rank 1 continues to send.
 * After that its data changes neither region nor signals, and the other ranks communicate as before. `registered`: the
 * network reads the blocks in place, if it can.
 */
static void revoke_one(const struct conformance *c, int polls, bool registered)
{
    enum { BLOCK = 600000 };
    static _Thread_local unsigned char block[BLOCK];
    struct ep_net_params params = {.rank = c->boot->rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = 1,
                                   .channels = CHANNELS,
                                   .tolerant = true,
                                   .region_bytes = NRANKS * BLOCK,
                                   .n_signals = N_SIGNALS,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = c->boot};
    struct ep_net_buffer buffer = {.memory = block, .bytes = BLOCK, .dmabuf_fd = -1};
    uint64_t deadline = ep_deadline_ns(PATIENT_MS), signals = 0;
    struct ep_net *net = NULL;
    char mine = 0, all[NRANKS];
    bool sent[NRANKS] = {false};
    int me = c->boot->rank;

    memset(block, me + 1, sizeof(block));
    CHECK(c->provider->open(c->provider, &params, &net) == EP_OK);
    if (registered && net->ops->attach)
        CHECK(net->ops->attach(net, &buffer) == EP_OK);
    if (me == 1)
        send_unread(c, net, 0, block, BLOCK);
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    for (int i = 0; me == 0 && i < polls; i++)
        advance(c, net);
    if (me == 0) {
        CHECK(net->ops->revoke(net, 1) == EP_OK && net->ops->revoke(net, 1) == EP_OK);
        signals = net->signals[1];
        memset(net->region, 0xee, net->region_bytes);
        CHECK(net->ops->put(net, 1, 0, 0, block, BLOCK) && net->ops->signal(net, 1, 0, 0, 1));
        CHECK(net->ops->flush_test(net, 1, 0));
    }
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    if (me == 1)
        send_unread(c, net, 0, block, BLOCK);
    while (signal_others(c, net, sent) > 0) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
    }
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    for (int i = 0; i < 100; i++)
        advance(c, net);
    for (size_t i = 0; me == 0 && i < net->region_bytes; i++)
        CHECK(net->region[i] == 0xee);
    CHECK(me != 0 || (net->signals[1] == signals && !net->signals[N_SIGNALS / 2 + 1]));
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    net->ops->free(net);
}

void net_conformance_revoke(const struct conformance *c)
{
    revoke_one(c, 0, false);
    revoke_one(c, 0, true);
    revoke_one(c, 1, true);
    revoke_one(c, 3, false);
}
