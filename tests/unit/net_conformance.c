/* SPDX-License-Identifier: Apache-2.0 */
#include "net_conformance_case.h"

#include <stdlib.h>
#include <sys/mman.h>

static size_t block_bytes(int i)
{
    return i % 3 == 0 ? (size_t)i * 3700 + 1 : (size_t)i * 50 + 1;
}

static unsigned char block_value(int node, int channel, int i)
{
    return (unsigned char)(node * 90 + channel * 45 + i + 1);
}

/* Blocks from and to memory that put() and the test may see at different addresses. */
struct exchange {
    struct ep_net *net;
    const unsigned char *read; /* what arrives */
    unsigned char *write[CHANNELS], *put[CHANNELS];
};

static void check_block(const struct conformance *c, const struct exchange *x, int peer, int channel, int i)
{
    const unsigned char *block = x->read + ((size_t)channel * BLOCKS + (size_t)i) * MOST;

    for (size_t k = 0; k < block_bytes(i); k++)
        CHECK(block[k] == block_value(peer, channel, i));
}

/* Region and signals fill whole pages of their own, for registration with a GPU, whatever their size. */
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
            /* All of it can be written and is not shared with another endpoint. */
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
 * Two nodes, thus one rail peer: blocks of many sizes, each followed by a signal. After the signal the block is
 * complete; the source is overwritten as soon as flush_test() returns true. Frees the endpoint.
 */
static void exchange_blocks(const struct conformance *c, const struct exchange *x)
{
    struct ep_net *net = x->net;
    int peer = 1 - net->node, step[CHANNELS] = {0}, seen[CHANNELS] = {0}, open = 1;
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);

    while (open) {
        CHECK(ep_now_ns() < deadline);
        advance(c, net);
        open = 0;
        for (int ch = 0; ch < CHANNELS; ch++) {
            int i = step[ch] / 3;
            uint64_t offset = net->payload_base + ((uint64_t)ch * BLOCKS + (uint64_t)i) * MOST;

            if (i < BLOCKS && step[ch] % 3 == 0) {
                memset(x->write[ch], block_value(net->node, ch, i), block_bytes(i));
                step[ch] += net->ops->put(net, peer, ch, offset, x->put[ch], block_bytes(i));
            } else if (i < BLOCKS && step[ch] % 3 == 1) {
                step[ch] += net->ops->signal(net, peer, ch, (uint32_t)ch, 1);
            } else if (i < BLOCKS && net->ops->flush_test(net, peer, ch)) {
                memset(x->write[ch], 0, MOST);
                step[ch]++;
            }
            for (; (uint64_t)seen[ch] < net->signals[ch]; seen[ch]++)
                check_block(c, x, peer, ch, seen[ch]);
            open |= i < BLOCKS || seen[ch] < BLOCKS;
        }
    }
    CHECK(net->signals[0] == BLOCKS && net->signals[1] == BLOCKS && net->signals[2] == 0);
    net->ops->free(net);
}

/* In ordinary memory. */
static void exchange_copied(const struct conformance *c, struct ep_net *net)
{
    static _Thread_local unsigned char sources[CHANNELS][MOST];
    struct exchange x = {.net = net, .read = net->payload};

    for (int ch = 0; ch < CHANNELS; ch++)
        x.write[ch] = x.put[ch] = sources[ch];
    exchange_blocks(c, &x);
}

static void test_order(const struct conformance *c)
{
    exchange_copied(c, open_net(c, 2, REGION));
}

/* Pages that are mapped twice: as the test reads and writes them, and as "GPU memory", which only the NIC accesses. */
struct double_mapping {
    size_t bytes;
    unsigned char *memory, *device;
};

static void map_twice(const struct conformance *c, size_t bytes, struct double_mapping *ret_mapping)
{
    int fd = memfd_create("memory of a device", MFD_CLOEXEC);
    unsigned char *at[2];

    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    for (int i = 0; i < 2; i++) {
        at[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK((void *)at[i] != MAP_FAILED);
    }
    close(fd);
    *ret_mapping = (struct double_mapping){bytes, at[0], at[1]};
}

static void unmap_twice(const struct double_mapping *mapping)
{
    munmap(mapping->memory, mapping->bytes);
    munmap(mapping->device, mapping->bytes);
}

/*
 * Sources and payload regions are registered, where the engine supports it: those of channel 0 as GPU memory that can
 * be registered by its address, as with a peer-memory module, those of channel 1 as host memory. A CPU that accesses
 * the former gets SIGSEGV. Ranks of node 0 have none: what each rank has concerns its own side only.
 */
static void test_registered(const struct conformance *c)
{
    struct ep_net_buffer payload = EP_NET_BUFFER_INIT, source = EP_NET_BUFFER_INIT;
    struct double_mapping region, sources;
    bool has = c->boot->rank / 2 == 1;
    struct exchange x = {.read = NULL};

    map_twice(c, ep_net_whole_pages(REGION), &region);
    map_twice(c, CHANNELS * ep_net_whole_pages(MOST), &sources);
    payload.memory = region.device;
    payload.bytes = REGION;
    payload.device = true;
    x.net = open_with_payload(c, 2, REGION, has ? &payload : NULL);
    CHECK(x.net->payload == (has && x.net->payload_base ? region.device : x.net->region));
    CHECK(!x.net->ops->attach == !x.net->payload_base);
    x.read = has && x.net->payload_base ? region.memory : x.net->region;
    for (int ch = 0; ch < CHANNELS; ch++) {
        size_t at = (size_t)ch * ep_net_whole_pages(MOST);

        x.write[ch] = sources.memory + at;
        x.put[ch] = has && x.net->ops->attach ? sources.device + at : sources.memory + at;
        source.memory = x.put[ch];
        source.bytes = MOST;
        source.device = ch == 0;
        if (has && x.net->ops->attach)
            CHECK(x.net->ops->attach(x.net, &source) == EP_OK);
    }
    /* Host memory that is short is read by the CPU. */
    if (has && x.net->ops->attach)
        CHECK(mprotect(sources.device, ep_net_whole_pages(MOST), PROT_NONE) == 0);
    CHECK(mprotect(region.device, region.bytes, PROT_NONE) == 0);
    exchange_blocks(c, &x);
    unmap_twice(&region);
    unmap_twice(&sources);
}

/* GPU memory that the NIC cannot access: payload is received in the region, and the reason names both ways. */
static void test_unreachable(const struct conformance *c)
{
    void *memory = mmap(NULL, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ep_net_buffer buffer = {
        .memory = memory, .bytes = REGION, .device = true, .dmabuf_fd = memfd_create("not a dma-buf", MFD_CLOEXEC)};
    struct ep_net *net;

    CHECK(memory != MAP_FAILED && buffer.dmabuf_fd >= 0);
    net = open_with_payload(c, 2, REGION, &buffer);
    CHECK(net->payload == net->region);
    if (net->ops->attach) {
        CHECK(net->ops->attach(net, &buffer) == EP_E_UNSUPPORTED);
        CHECK(strstr(ep_last_error(), "by dma-buf: ") && strstr(ep_last_error(), "nvidia_peermem"));
    }
    exchange_copied(c, net);
    close(buffer.dmabuf_fd);
    munmap(memory, REGION);
}

/* More buffers than can be registered: those that are left over are refused, and copied like any other memory. */
static void test_many_sources(const struct conformance *c)
{
    enum { TRIES = 1000 };
    struct net_pages {
        unsigned char bytes[4096];
    } *pages = aligned_alloc(sizeof(*pages), TRIES * sizeof(*pages));
    struct ep_net *net = open_net(c, 2, REGION);
    ep_status status = EP_OK;
    int n = 0;

    CHECK(pages);
    for (; net->ops->attach && status == EP_OK && n < TRIES; n++) {
        struct ep_net_buffer buffer = {.memory = &pages[n], .bytes = sizeof(pages[n]), .dmabuf_fd = -1};

        status = net->ops->attach(net, &buffer);
    }
    CHECK(!net->ops->attach || (status == EP_E_UNSUPPORTED && n > 8 && strstr(ep_last_error(), "registered already")));
    exchange_copied(c, net);
    free(pages);
}

/* Overlapping puts take effect in the order of the calls, whether an engine sends them in one message or in several. */
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
        /* So that the peer's next round does not overwrite the region before this check. */
        while (!net->ops->signal(net, peer, 0, 1, 1))
            advance(c, net);
        while (net->signals[1] < round && ep_now_ns() < deadline)
            advance(c, net);
        CHECK(net->signals[1] >= round);
    }
    net->ops->free(net);
}

/* Unread messages of a freed endpoint are not received by the next endpoint, nor by another open one. */
static void test_separate_endpoints(const struct conformance *c)
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
    nets[0]->ops->free(nets[0]); /* without progress() */
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

/* Puts beyond the region and invalid signals: a sticky error that names the rank. */
static void test_out_of_range(const struct conformance *c)
{
    static unsigned char data[10000];
    static const struct {
        uint64_t offset;
        size_t bytes;
        bool to_payload;
    } bad[] = {{1000, 25, false}, {1500, 25, false}, {UINT64_MAX, 2, false},
               {0, 10000, false}, {1000, 25, true},  {0, 0, false}};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct ep_net *net = open_net(c, 2, 1024);
        ep_status status = EP_OK;
        uint64_t deadline = ep_deadline_ns(PATIENT_MS);
        char mine = 0, all[NRANKS], name[32];
        bool moved;

        snprintf(name, sizeof(name), "rank %d", net->node == 1 ? c->boot->rank - 2 : c->boot->rank + 2);
        /* A NIC cannot report the rank: with verbs the sender rejects the put. */
        if (net->node == 0 && bad[i].bytes)
            mine = !net->ops->put(net, 1, 1, (bad[i].to_payload ? net->payload_base : 0) + bad[i].offset, data,
                                  bad[i].bytes);
        else if (net->node == 0)
            CHECK(net->ops->signal(net, 1, 1, N_SIGNALS, 1));
        /* May never be flushed, as the peer rejects it. */
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
    /* One rank has no memory for its region: all ranks fail without waiting for it. */
    params.channels = 1;
    params.region_bytes = c->boot->rank == 1 ? (size_t)1 << 61 : 64;
    CHECK(provider->open(provider, &params, &net) == EP_E_MEMORY && !net);
    CHECK(c->boot->rank == 1 || strstr(ep_last_error(), "rank 1"));
#endif
}

void net_conformance_run(const struct ep_net_provider *provider, const ep_boot *boot, net_conformance_fail_fn fail)
{
    static const struct {
        const char *name;
        void (*run)(const struct conformance *c);
    } tests[] = {
        {"pages", test_pages},
        {"order", test_order},
        {"registered memory", test_registered},
        {"memory that cannot be registered", test_unreachable},
        {"many sources", test_many_sources},
        {"overwriting", test_overwriting},
        {"separate endpoints", test_separate_endpoints},
        {"out of range", test_out_of_range},
        {"disagreement", test_disagreement},
        {"a rank that leaves", net_conformance_rank_that_leaves},
        {"a rank that abandons its endpoint", net_conformance_rank_that_abandons},
        {"a communicator left by a rank", net_conformance_communicator_left_by_rank},
        {"revoke", net_conformance_revoke},
    };

    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        struct conformance c = {.provider = provider, .boot = boot, .fail = fail, .running = tests[i].name};

        tests[i].run(&c);
    }
}
