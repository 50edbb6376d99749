/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as what a peer has put into the ring of a stream: whatever the receiver is shown lies within the ring and
 * within what was announced, and what it refuses it refuses for good.
 *
 * The input: how far the ring had been read already (2 bytes, in steps of 16), how much is announced (4 bytes), then
 * the bytes of the ring from that place on.
 */
#include "net/messages.c"

enum { RING = 4096, PREFIX = 6 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* --- a network on which nothing happens --- */

static bool take_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    (void)net, (void)peer, (void)channel, (void)offset, (void)src, (void)bytes;
    return true;
}

/* What the receiver gives back is what it has read. */
static bool take_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    (void)net, (void)peer, (void)channel;
    check(index == SIGNAL_CREDIT && add > 0 && add <= RING);
    return true;
}

static bool flush_test(struct ep_net *net, int peer, int channel)
{
    (void)net, (void)peer, (void)channel;
    return true;
}

static ep_status make_progress(struct ep_net *net, bool *ret_moved)
{
    *ret_moved = false;
    return ep_net_check(net);
}

static void free_net(struct ep_net *net)
{
    (void)net;
}

static const struct ep_net_ops ops = {.name = "fuzz",
                                      .put = take_put,
                                      .signal = take_signal,
                                      .flush_test = flush_test,
                                      .progress = make_progress,
                                      .free = free_net};

static ep_status open_net(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net)
{
    struct ep_net *net = provider->context;

    check(params->region_bytes == RING && params->n_signals == SIGNALS);
    *ret_net = net;
    return EP_OK;
}

/* --- the receiver --- */

/* Reads until there is nothing more, or nothing more to trust. */
static void read_all(struct ep_streams *streams, const struct ep_net *net)
{
    struct receiver *receiver = &streams->receivers[0];
    const unsigned char *message;
    size_t bytes, sum = 0;

    for (int n = 0; (message = ep_stream_peek(streams, 1, 0, &bytes)); n++) {
        check(n <= RING / (int)sizeof(struct message_header));
        check(bytes <= ep_streams_max_message(streams) && message >= net->region + sizeof(struct message_header) &&
              message + bytes <= net->region + RING && (uintptr_t)message % 16 == 0);
        check(receiver->peeked <= net->signals[SIGNAL_TAIL] - receiver->head);
        for (size_t i = 0; i < bytes; i++)
            sum += message[i];
        ep_stream_pop(streams, 1, 0);
    }
    (void)sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t signals[SIGNALS] = {0}, place;
    struct ep_net net = {
        .ops = &ops, .nnodes = 2, .channels = 1, .region_bytes = RING, .signals = signals, .n_signals = SIGNALS};
    struct ep_net_provider provider = {.abi = EP_NET_ABI, .name = "fuzz", .open = open_net, .context = &net};
    struct ep_net_params params = {.nranks = 2, .ranks_per_node = 1, .channels = 1};
    struct ep_streams *streams = NULL;
    uint32_t announced;
    bool moved, all_read;

    if (size < PREFIX || size - PREFIX > RING)
        return 0;
    /* A segment of its own, so that a sanitizer sees a read beside it. */
    net.region = aligned_alloc(64, RING);
    check(net.region && ep_streams_open(&provider, &params, RING, &streams) == EP_OK);
    memset(net.region, 0, RING);
    place = (data[0] | (uint64_t)data[1] << 8) * 16;
    announced = data[2] | (uint32_t)data[3] << 8 | (uint32_t)data[4] << 16 | (uint32_t)data[5] << 24;
    for (size_t i = PREFIX; i < size; i++)
        net.region[(place + i - PREFIX) % RING] = data[i];
    streams->receivers[0].head = streams->receivers[0].returned = place;
    signals[SIGNAL_TAIL] = place + announced;
    read_all(streams, &net);
    /* Either everything that was announced has been read, or the stream is broken and says so each time. */
    all_read = streams->receivers[0].head == signals[SIGNAL_TAIL];
    for (int i = 0; i < 2; i++) {
        check((ep_streams_progress(streams, &moved) == EP_OK) == all_read);
        check(all_read || strstr(ep_last_error(), "streams: node 1, channel 0, byte "));
    }
    ep_streams_free(streams);
    free(net.region);
    return 0;
}
