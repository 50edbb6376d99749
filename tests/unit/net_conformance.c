/* SPDX-License-Identifier: Apache-2.0 */
#include "net_conformance.h"

#include "base/clock.h"
#include "core/core.h"

#include <epkit/epkit.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            c->fail(c->boot->rank, c->running, __LINE__, #condition);                                                  \
    } while (0)

/* Only ends what hangs. */
#define PATIENT_MS 300000
#define LEFT_MS 10000

enum {
    NRANKS = NET_CONFORMANCE_RANKS,
    CHANNELS = 2,
    N_SIGNALS = 8,
    BLOCKS = 40,
    MOST = 150000,
    REGION = CHANNELS * BLOCKS * MOST
};

struct conformance {
    const struct ep_net_provider *provider;
    const ep_boot *boot;
    net_conformance_fail_fn fail;
    const char *running;
};

static ep_status gather(const struct conformance *c, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    return c->boot->allgather(c->boot->context, mine, bytes, timeout_ms, ret_all);
}

static struct ep_net *open_net(const struct conformance *c, int ranks_per_node, size_t region_bytes)
{
    struct ep_net_params params = {.rank = c->boot->rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = ranks_per_node,
                                   .channels = CHANNELS,
                                   .region_bytes = region_bytes,
                                   .n_signals = N_SIGNALS,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = c->boot};
    struct ep_net *net = NULL;

    CHECK(c->provider->abi == EP_NET_ABI);
    CHECK(c->provider->open(c->provider, &params, &net) == EP_OK);
    CHECK(net->wire_bytes > 0 && strcmp(net->ops->name, c->provider->name) == 0);
    return net;
}

/* With a moment's sleep where nothing moves: the ranks may outnumber the processors. */
static void advance(const struct conformance *c, struct ep_net *net)
{
    bool moved = false;

    CHECK(net->ops->progress(net, &moved) == EP_OK);
    if (!moved)
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

static size_t block_bytes(int i)
{
    return i % 3 == 0 ? (size_t)i * 3700 + 1 : (size_t)i * 50 + 1;
}

static unsigned char block_value(int node, int channel, int i)
{
    return (unsigned char)(node * 90 + channel * 45 + i + 1);
}

static void check_block(const struct conformance *c, const struct ep_net *net, int peer, int channel, int i)
{
    const unsigned char *block = net->region + ((size_t)channel * BLOCKS + (size_t)i) * MOST;

    for (size_t k = 0; k < block_bytes(i); k++)
        CHECK(block[k] == block_value(peer, channel, i));
}

/* What a GPU registers: whole pages, of both, that belong to nothing else, however little was asked for. */
static void test_pages(const struct conformance *c)
{
    static const size_t sizes[] = {1, 64, 4095, 4096, 4097, 300000};
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct ep_net *nets[sizeof(sizes) / sizeof(sizes[0])];
    unsigned char *ends[2 * (sizeof(sizes) / sizeof(sizes[0]))], *begins[2 * (sizeof(sizes) / sizeof(sizes[0]))];
    size_t n = 0;

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        nets[i] = open_net(c, 2, sizes[i]);
        CHECK(nets[i]->region_bytes == sizes[i]);
        begins[n] = nets[i]->region;
        ends[n] = begins[n] + ep_net_whole_pages(sizes[i]);
        begins[n + 1] = (unsigned char *)nets[i]->signals;
        ends[n + 1] = begins[n + 1] + ep_net_whole_pages(N_SIGNALS * sizeof(*nets[i]->signals));
        for (size_t last = n + 2; n < last; n++) {
            CHECK((uintptr_t)begins[n] % page == 0 && (uintptr_t)ends[n] % page == 0);
            /* All of it can be written, and is no page of another endpoint. */
            for (unsigned char *at = begins[n]; at < ends[n]; at++)
                CHECK(*at == 0);
            memset(begins[n], (int)n + 1, (size_t)(ends[n] - begins[n]));
        }
    }
    for (size_t i = 0; i < n; i++)
        for (unsigned char *at = begins[i]; at < ends[i]; at++)
            CHECK(*at == i + 1);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        nets[i]->ops->free(nets[i]);
}

/*
 * Two nodes, so one rail peer: blocks of all sizes, each followed by a signal. Behind a signal the block is complete;
 * the source is overwritten as soon as flush_test says that it has left.
 */
static void test_order(const struct conformance *c)
{
    static _Thread_local unsigned char sources[CHANNELS][MOST];
    struct ep_net *net = open_net(c, 2, REGION);
    int peer = 1 - net->node, step[CHANNELS] = {0}, seen[CHANNELS] = {0}, open = 1;
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);

    while (open) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        open = 0;
        for (int ch = 0; ch < CHANNELS; ch++) {
            int i = step[ch] / 3;
            uint64_t offset = ((uint64_t)ch * BLOCKS + (uint64_t)i) * MOST;

            if (i < BLOCKS && step[ch] % 3 == 0) {
                memset(sources[ch], block_value(net->node, ch, i), block_bytes(i));
                step[ch] += net->ops->put(net, peer, ch, offset, sources[ch], block_bytes(i));
            } else if (i < BLOCKS && step[ch] % 3 == 1) {
                step[ch] += net->ops->signal(net, peer, ch, (uint32_t)ch, 1);
            } else if (i < BLOCKS && net->ops->flush_test(net, peer, ch)) {
                memset(sources[ch], 0, MOST);
                step[ch]++;
            }
            for (; (uint64_t)seen[ch] < net->signals[ch]; seen[ch]++)
                check_block(c, net, peer, ch, seen[ch]);
            open |= i < BLOCKS || seen[ch] < BLOCKS;
        }
    }
    CHECK(net->signals[0] == BLOCKS && net->signals[1] == BLOCKS && net->signals[2] == 0);
    net->ops->free(net);
}

/* Two puts to one place take effect in the order of the calls, whichever of them travels in a message of its own. */
static void test_overwriting(const struct conformance *c)
{
    static _Thread_local unsigned char large[MOST], small[100];
    struct ep_net *net = open_net(c, 2, MOST);
    int peer = 1 - net->node;

    memset(large, 1, sizeof(large));
    memset(small, 2, sizeof(small));
    for (uint64_t round = 1; round <= 50; round++) {
        uint64_t deadline = ep_deadline_ns(PATIENT_MS);
        int step = 0;

        while (step < 4 || net->signals[0] < round || !net->ops->flush_test(net, peer, 0)) {
            CHECK(ep_now_ns() < deadline);
            advance(c, net);
            if (step < 3)
                step += step == 1 ? net->ops->put(net, peer, 0, 50, small, sizeof(small))
                                  : net->ops->put(net, peer, 0, 0, large, step == 0 ? MOST : 80);
            else if (step == 3)
                step += net->ops->signal(net, peer, 0, 0, 1);
        }
        CHECK(net->region[79] == 1 && net->region[80] == 2 && net->region[149] == 2 && net->region[150] == 1);
        /* So that the peer's next round does not run into the look at this one. */
        while (!net->ops->signal(net, peer, 0, 1, 1))
            advance(c, net);
        while (net->signals[1] < round && ep_now_ns() < deadline)
            advance(c, net);
        CHECK(net->signals[1] >= round);
    }
    net->ops->free(net);
}

/* What a freed endpoint has left unread does not reach the next one, nor one that lives beside it. */
static void test_endpoints_apart(const struct conformance *c)
{
    struct ep_net *nets[3];
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    char mine = 0, all[NRANKS];
    bool moved;

    nets[0] = open_net(c, 2, 64);
    nets[1] = open_net(c, 2, 64);
    for (uint32_t i = 0; i < 5; i++)
        CHECK(nets[0]->ops->signal(nets[0], 1 - nets[0]->node, 0, i, 1000));
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    nets[0]->ops->free(nets[0]); /* it never looked */
    nets[2] = open_net(c, 2, 64);
    for (int n = 1; n < 3; n++)
        CHECK(nets[n]->ops->signal(nets[n], 1 - nets[n]->node, 0, 7, (uint64_t)n));
    while (nets[1]->signals[7] == 0 || nets[2]->signals[7] == 0) {
        CHECK(ep_now_ns() < deadline);
        for (int n = 1; n < 3; n++)
            CHECK(nets[n]->ops->progress(nets[n], &moved) == EP_OK);
    }
    for (uint32_t i = 0; i < 7; i++)
        CHECK(nets[1]->signals[i] == 0 && nets[2]->signals[i] == 0);
    CHECK(nets[1]->signals[7] == 1 && nets[2]->signals[7] == 2);
    nets[1]->ops->free(nets[1]);
    nets[2]->ops->free(nets[2]);
}

/* Beyond the region or the signals: a status that names the rank, and it stays. */
static void test_out_of_range(const struct conformance *c)
{
    static unsigned char data[10000];
    static const struct {
        uint64_t offset;
        size_t bytes;
    } bad[] = {{1000, 25}, {UINT64_MAX, 2}, {0, 10000}, {0, 0}};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct ep_net *net = open_net(c, 2, 1024);
        ep_status status = EP_OK;
        uint64_t deadline = ep_deadline_ns(PATIENT_MS);
        char mine = 0, all[NRANKS], name[32];
        bool moved;

        snprintf(name, sizeof(name), "rank %d", net->node == 1 ? c->boot->rank - 2 : c->boot->rank + 2);
        /* A NIC checks nothing that could name the rank: there the sender refuses it. */
        if (net->node == 0 && bad[i].bytes)
            mine = !net->ops->put(net, 1, 1, bad[i].offset, data, bad[i].bytes);
        else if (net->node == 0)
            CHECK(net->ops->signal(net, 1, 1, N_SIGNALS, 1));
        /* What is refused over there may never leave. */
        for (int tries = 0; net->node == 0 && tries < 100 && !net->ops->flush_test(net, 1, 1); tries++)
            advance(c, net);
        if (mine)
            CHECK(net->ops->progress(net, &moved) == EP_E_OVERFLOW && strstr(ep_last_error(), name));
        CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
        while (net->node == 1 && !all[c->boot->rank - 2] && status == EP_OK && ep_now_ns() < deadline)
            status = net->ops->progress(net, &moved);
        if (net->node == 1 && !all[c->boot->rank - 2]) {
            CHECK(status == EP_E_MISMATCH && strstr(ep_last_error(), name) && strstr(ep_last_error(), "channel 1"));
            CHECK(net->ops->progress(net, &moved) == EP_E_MISMATCH && strstr(ep_last_error(), name) &&
                  strstr(ep_last_error(), "channel 1"));
        }
        CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
        net->ops->free(net);
    }
}

static void test_disagreement(const struct conformance *c)
{
    const struct ep_net_provider *provider = c->provider;
    struct ep_net_params params = {.rank = c->boot->rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = 1,
                                   .channels = c->boot->rank == 3 ? 2 : 1,
                                   .region_bytes = 64,
                                   .n_signals = 1,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = c->boot};
    struct ep_net *net = NULL;

    CHECK(provider->open(provider, &params, &net) == EP_E_MISMATCH && !net);
    CHECK(strstr(ep_last_error(), "channels") && strstr(ep_last_error(), "rank 3"));
    params.channels = EP_NET_MAX_CHANNELS + 1;
    CHECK(provider->open(provider, &params, &net) == EP_E_ARG && !net);

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which end the program instead */
    /* One rank has no memory for its region: it says so, and the others do not wait for it. */
    params.channels = 1;
    params.region_bytes = c->boot->rank == 1 ? (size_t)1 << 61 : 64;
    CHECK(provider->open(provider, &params, &net) == EP_E_MEMORY && !net);
    CHECK(c->boot->rank == 1 || strstr(ep_last_error(), "rank 1"));
#endif
}

/* --- a rank that goes --- */

enum { GOES = NRANKS - 1, GONE_BYTES = 70000 }; /* several messages of any engine */

static unsigned char gone_value(size_t k)
{
    return (unsigned char)(k * 7 + 3);
}

/* Sends to all ranks of the other block, and goes when that has left. */
static void send_and_go(const struct conformance *c, struct ep_net *net)
{
    static unsigned char data[GONE_BYTES];
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    int step[NRANKS] = {0}, left = 1;

    for (size_t k = 0; k < GONE_BYTES; k++)
        data[k] = gone_value(k);
    while (left) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        left = 0;
        for (int rank = 0; rank < GOES / 2 * 2; rank++) {
            if (step[rank] == 0)
                step[rank] += net->ops->put(net, rank, 0, (uint64_t)GOES * GONE_BYTES, data, GONE_BYTES);
            if (step[rank] == 1)
                step[rank] += net->ops->signal(net, rank, 0, GOES, 1);
            left += step[rank] < 2 || !net->ops->flush_test(net, rank, 0);
        }
    }
    net->ops->free(net);
}

/*
 * What the rank that goes has sent is there when its signal is, and its signal (`sends`: there is one) before it is
 * said to have ended. It is the only one of which that is said, and it has not died. true: no more is to come.
 */
static bool has_gone(const struct conformance *c, struct ep_net *net, bool sends)
{
    bool ended = net->ops->ended && net->ops->ended(net, GOES);

    CHECK(net->signals[GOES] <= sends);
    CHECK(!ended || net->signals[GOES] == sends);
    for (int rank = 0; rank < NRANKS; rank++) {
        bool wanted = rank / 2 != c->boot->rank / 2;

        CHECK(!wanted || rank == GOES || !net->ops->ended || !net->ops->ended(net, rank));
        CHECK(!wanted || !net->ops->lost || !net->ops->lost(net, rank));
    }
    if (net->signals[GOES] < sends)
        return false;
    for (size_t k = 0; sends && k < GONE_BYTES; k++)
        CHECK(net->region[(size_t)GOES * GONE_BYTES + k] == gone_value(k));
    return ended || !net->ops->ended;
}

enum awaited { NOTHING, ITS_END, ALL_THAT_IT_SENT }; /* of the rank that goes */

/* One byte to each rank of the other block that stays, and one of it. */
static void talk_beside(const struct conformance *c, struct ep_net *net, unsigned char round, enum awaited awaited)
{
    static const unsigned char marks[NRANKS] = {11, 22, 33, 44};
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    unsigned char mine = (unsigned char)(marks[c->boot->rank] + round);
    int me = c->boot->rank, left = 1;
    bool sent[NRANKS] = {false};

    while (left) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        left = awaited && !has_gone(c, net, awaited == ALL_THAT_IT_SENT);
        for (int rank = 0; rank < NRANKS; rank++) {
            size_t place = (size_t)rank * GONE_BYTES + round;

            if (rank / 2 == me / 2 || rank == GOES)
                continue;
            if (!sent[rank])
                sent[rank] = net->ops->put(net, rank, 0, (uint64_t)me * GONE_BYTES + round, &mine, 1);
            left += !sent[rank] || net->region[place] != marks[rank] + round || !net->ops->flush_test(net, rank, 0);
        }
    }
}

/* What is sent to who has gone is thrown away: nobody waits for room, and nothing breaks. */
static void send_after_it(const struct conformance *c, struct ep_net *net)
{
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    static const unsigned char data[1000];
    int n = 0;

    while (n < 100 || !net->ops->flush_test(net, GOES, 0)) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        while (n < 100 && net->ops->put(net, GOES, 0, 0, data, sizeof(data)))
            n++;
    }
}

/*
 * Every rank talks to every one of the other block of ranks. One goes: what it has sent arrives, where the engine can
 * tell it names that rank and no other, and the others go on.
 */
static void let_one_go(const struct conformance *c, bool sends)
{
    struct ep_net_params params = {.rank = c->boot->rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = 1,
                                   .channels = 1,
                                   .apart = 2,
                                   .tolerant = true,
                                   .region_bytes = (size_t)NRANKS * GONE_BYTES,
                                   .n_signals = NRANKS,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = c->boot};
    enum awaited awaited = c->boot->rank / 2 == GOES / 2 ? NOTHING : sends ? ALL_THAT_IT_SENT : ITS_END;
    char mine = 0, all[NRANKS];
    struct ep_net *net = NULL;

    CHECK(c->provider->open(c->provider, &params, &net) == EP_OK);
    if (c->boot->rank == GOES) {
        net->hurries = !sends;
        if (sends)
            send_and_go(c, net);
        else
            net->ops->free(net);
        CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
        return;
    }
    talk_beside(c, net, 0, awaited);
    if (awaited && net->ops->ended)
        send_after_it(c, net);
    talk_beside(c, net, 1, awaited);
    CHECK(net->broken_by == 0);
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    net->ops->free(net);
}

static void test_rank_that_goes(const struct conformance *c)
{
    let_one_go(c, true);
}

/* As when its group has failed, and before it has sent anything. */
static void test_rank_that_goes_in_a_hurry(const struct conformance *c)
{
    let_one_go(c, false);
}

/*
 * The same of a communicator on that network: the last all-gather of the rank that goes is whole on all others, and
 * what they wait for next fails with its number. An engine that cannot tell what is still on its way waits a deadline
 * for it.
 */
static void test_group_that_is_left(const struct conformance *c)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    int32_t mine = 100 + c->boot->rank, ranks[NRANKS];
    char came = 0, all[NRANKS];
    ep_comm *comm = NULL;

    config.backend = "host";
    config.network = c->provider->name;
    config.ranks_per_node = 1;
    config.timeout_ms = PATIENT_MS;
    CHECK(ep_comm_new(c->boot, &config, &comm) == EP_OK);
    CHECK(ep_comm_allgather(comm, &mine, sizeof(mine), ranks) == EP_OK);
    if (c->boot->rank == GOES)
        ep_comm_free(comm);
    for (int rank = 0; rank < NRANKS; rank++)
        CHECK(ranks[rank] == 100 + rank);
    CHECK(gather(c, &came, 1, PATIENT_MS, all) == EP_OK);
    if (c->boot->rank != GOES) {
        comm->config.timeout_ms = LEFT_MS;
        CHECK(ep_comm_barrier(comm) == EP_E_PEER_LEFT);
        CHECK(strstr(ep_comm_last_error(comm), "rank 3 left the group"));
    }
    /* Who leaves now would be named by who is slower. */
    CHECK(gather(c, &came, 1, PATIENT_MS, all) == EP_OK);
    if (c->boot->rank != GOES)
        ep_comm_free(comm);
}

/* Not until the end where the peer takes nothing: what a rank sends to one that does not look. */
static void send_blind(const struct conformance *c, struct ep_net *net, int rank, const unsigned char *block,
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

/* All but ranks 0 and 1 hear of each other: *sent and the signals N_SIGNALS / 2 + rank say how far that is. */
static int mark_others(const struct conformance *c, struct ep_net *net, bool *sent)
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
 * Rank 0 revokes rank 1, whose blocks are on their way, half taken (`looks`) or not looked at, and which goes on
 * sending: from then on nothing of it lands or raises a signal, and the others are heard as before.
 */
static void revoke_one(const struct conformance *c, int looks)
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
    uint64_t deadline = ep_deadline_ns(PATIENT_MS), signals = 0;
    struct ep_net *net = NULL;
    char mine = 0, all[NRANKS];
    bool sent[NRANKS] = {false};
    int me = c->boot->rank;

    memset(block, me + 1, sizeof(block));
    CHECK(c->provider->open(c->provider, &params, &net) == EP_OK);
    if (me == 1)
        send_blind(c, net, 0, block, BLOCK);
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    for (int i = 0; me == 0 && i < looks; i++)
        advance(c, net);
    if (me == 0) {
        CHECK(net->ops->revoke(net, 1) == EP_OK && net->ops->revoke(net, 1) == EP_OK);
        signals = net->signals[1];
        memset(net->region, 0xee, net->region_bytes);
        CHECK(net->ops->put(net, 1, 0, 0, block, BLOCK) && net->ops->signal(net, 1, 0, 0, 1));
        CHECK(net->ops->flush_test(net, 1, 0) || net->ops->keeps_sources);
    }
    CHECK(gather(c, &mine, 1, PATIENT_MS, all) == EP_OK);
    if (me == 1)
        send_blind(c, net, 0, block, BLOCK);
    while (mark_others(c, net, sent) > 0) {
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

static void test_revoke(const struct conformance *c)
{
    revoke_one(c, 0);
    revoke_one(c, 1);
    revoke_one(c, 3);
}

void net_conformance_run(const struct ep_net_provider *provider, const ep_boot *boot, net_conformance_fail_fn fail)
{
    static const struct {
        const char *name;
        void (*run)(const struct conformance *c);
    } tests[] = {
        {"pages", test_pages},
        {"order", test_order},
        {"overwriting", test_overwriting},
        {"endpoints apart", test_endpoints_apart},
        {"out of range", test_out_of_range},
        {"disagreement", test_disagreement},
        {"a rank that goes", test_rank_that_goes},
        {"a rank that goes in a hurry", test_rank_that_goes_in_a_hurry},
        {"a group that is left", test_group_that_is_left},
        {"revoke", test_revoke},
    };

    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        struct conformance c = {.provider = provider, .boot = boot, .fail = fail, .running = tests[i].name};

        tests[i].run(&c);
    }
}
