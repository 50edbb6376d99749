/* SPDX-License-Identifier: Apache-2.0 */
/* net_conformance_case.h - what the cases of the conformance tests share. */
#ifndef EP_TESTS_UNIT_NET_CONFORMANCE_CASE_H
#define EP_TESTS_UNIT_NET_CONFORMANCE_CASE_H

#include "net_conformance.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            c->fail(c->boot->rank, c->running, __LINE__, #condition);                                                  \
    } while (0)

/* Only to end a test that hangs. */
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

static inline ep_status gather(const struct conformance *c, const void *mine, size_t bytes, int timeout_ms,
                               void *ret_all)
{
    return c->boot->allgather(c->boot->context, mine, bytes, timeout_ms, ret_all);
}

static inline struct ep_net *open_with_payload(const struct conformance *c, int ranks_per_node, size_t region_bytes,
                                               const struct ep_net_buffer *payload)
{
    struct ep_net_params params = {.rank = c->boot->rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = ranks_per_node,
                                   .channels = CHANNELS,
                                   .region_bytes = region_bytes,
                                   .n_signals = N_SIGNALS,
                                   .timeout_ms = PATIENT_MS,
                                   .payload = payload,
                                   .boot = c->boot};
    struct ep_net *net = NULL;

    CHECK(c->provider->abi == EP_NET_ABI);
    CHECK(c->provider->open(c->provider, &params, &net) == EP_OK);
    CHECK(net->wire_bytes > 0 && strcmp(net->ops->name, c->provider->name) == 0);
    return net;
}

static inline struct ep_net *open_net(const struct conformance *c, int ranks_per_node, size_t region_bytes)
{
    struct ep_net *net = open_with_payload(c, ranks_per_node, region_bytes, NULL);

    CHECK(net->payload == net->region && (!net->payload_base || net->payload_base > region_bytes));
    return net;
}

/* Sleeps if nothing moved: there may be more ranks than CPUs. */
static inline void advance(const struct conformance *c, struct ep_net *net)
{
    bool moved = false;

    CHECK(net->ops->progress(net, &moved) == EP_OK);
    if (!moved)
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

/* net_conformance_end.c: ranks that leave, endpoints that are abandoned, peers that are revoked. */
void net_conformance_rank_that_leaves(const struct conformance *c);
void net_conformance_rank_that_abandons(const struct conformance *c);
void net_conformance_communicator_left_by_rank(const struct conformance *c);
void net_conformance_revoke(const struct conformance *c);

#endif
