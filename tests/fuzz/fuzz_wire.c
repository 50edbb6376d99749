/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as records that a peer has put on the wire of the emulated network: the owner of the endpoint applies them
 * to its region and signals only, or refuses the wire for good.
 *
 * The input: where on the wire (2 bytes, in steps of 16), how much is announced (4 bytes), largest piece of a put that
 * is applied at a time (2 bytes), then the bytes of the wire from that place on.
 */
#include "net/emulated.c"

enum { WIRE = 1024, REGION = 256, N_SIGNALS = 4, PREFIX = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* Of a group of two ranks, on two nodes, of which there is only one: it is its own peer. */
static ep_status gather_twice(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)context, (void)timeout_ms;
    memcpy(ret_all, mine, bytes);
    memcpy((char *)ret_all + bytes, mine, bytes);
    return EP_OK;
}

static struct emulated *open_endpoint(void)
{
    ep_boot boot = {.size = sizeof(boot), .nranks = 2, .allgather = gather_twice};
    struct ep_net_params params = {.nranks = 2,
                                   .ranks_per_node = 1,
                                   .channels = 1,
                                   .region_bytes = REGION,
                                   .n_signals = N_SIGNALS,
                                   .emulation.ring_bytes = WIRE,
                                   .boot = &boot};
    struct ep_net *net;

    check(ep_net_emulated.open(&ep_net_emulated, &params, &net) == EP_OK);
    return emulated_of(net);
}

/* As after `head` bytes of traffic. */
static void reset(struct emulated *e, uint64_t head)
{
    struct incoming *in = &e->incoming[0];

    memset(e->net.region, 0, REGION);
    memset(e->net.signals, 0, N_SIGNALS * sizeof(e->net.signals[0]));
    memset(in->wire->ring, 0, WIRE);
    in->head = head;
    in->applied = 0;
    atomic_store(&in->wire->head, head);
    e->net.broken = EP_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct emulated *e; /* kept: a segment an input would be slow */
    struct incoming *in;
    uint64_t head, tail;
    ep_status status;
    bool moved = true;
    int n = 0;

    if (!e)
        e = open_endpoint();
    if (size < PREFIX || size - PREFIX > WIRE)
        return 0;
    in = &e->incoming[0];
    head = (data[0] | (uint64_t)data[1] << 8) * 16;
    tail = head + (data[2] | (uint32_t)data[3] << 8 | (uint32_t)data[4] << 16 | (uint64_t)data[5] << 24);
    reset(e, head);
    e->emulation.split_bytes = data[6] | (uint32_t)data[7] << 8;
    wire_write(in->wire, WIRE, head, data + PREFIX, size - PREFIX);
    atomic_store(&in->wire->tail, tail);
    do {
        status = e->net.ops->progress(&e->net, &moved);
        check(++n <= WIRE + REGION); /* each call applies a byte at least, or nothing moves */
    } while (status == EP_OK && moved);
    check(in->head - head <= tail - head && in->applied <= REGION);
    if (status != EP_OK) {
        check(status == EP_E_MISMATCH && strstr(ep_last_error(), "network emulated: rank 1, channel 0, byte "));
        check(e->net.ops->progress(&e->net, &moved) == status);
        return 0;
    }
    /* What has not been applied is not due yet. */
    check(in->head == tail || !e->net.can_sleep);
    return 0;
}
