/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net.h - the internode network interface.
 *
 * A rank communicates with the ranks that have the same local index on the other nodes ("rail peers"), numbered by
 * node. Each endpoint has a region of memory that its peers write to, and an array of signals that they add to:
 *
 *   put(peer, channel, offset, src, bytes)   writes to the peer's region, or to its payload region (payload_base)
 *   signal(peer, channel, index, add)        adds to one of the peer's signals
 *   flush_test(peer, channel)                true: all earlier operations have left. The sources of the puts may be
 *                                            reused, and delivery needs no further progress() on this side
 *
 * Order: operations on one (peer, channel) take effect at the peer in the order of the calls: a signal becomes visible
 * after every earlier put. There is no order between peers or channels, and a put may become visible in parts.
 *
 * No call blocks: put and signal return false when the engine has no room; the caller calls progress() and tries again.
 * Puts without a later signal may stay queued until progress() or flush_test() is called. Calls on one endpoint must be
 * serialised by the caller. Queue pairs of a NIC, NVSHMEM and a CPU proxy can all provide this interface. The engines
 * are "emulated" (emulated.c), "tcp" (tcp.c) and "verbs" (verbs.c).
 */
#ifndef EP_NET_NET_H
#define EP_NET_NET_H

#include "base/error.h"
#include "base/shm.h"

#include "net/emulation.h"

#include <epkit/comm.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EP_NET_MAX_CHANNELS 16
/* Most bytes of one put. */
#define EP_NET_MAX_PUT (1u << 20)

/* Capacity of the emulated wire per (peer, channel): ep_net_emulation.ring_bytes, rounded up to a multiple of 64. */
#define EP_NET_WIRE_BYTES (256u << 10)
#define EP_NET_WIRE_MIN_BYTES 256u

struct ep_net; /* one rank's endpoint; the first member of each engine's own struct */

/* Memory of the caller for puts without a copy. */
struct ep_net_buffer {
    void *memory;
    size_t bytes;
    bool device; /* memory of a GPU, by its device address: only a NIC reads and writes it */
    /* Of device memory: a dma-buf that begins at `memory`, borrowed. -1: none, so only a peer-memory module can help.
     */
    int dmabuf_fd;
};

#define EP_NET_BUFFER_INIT                                                                                             \
    {                                                                                                                  \
        .dmabuf_fd = -1                                                                                                \
    }

struct ep_net_ops {
    const char *name;
    /* false: no room, try again after progress(). `src` must not change until flush_test() returns true. */
    bool (*put)(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes);
    bool (*signal)(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add);
    bool (*flush_test)(struct ep_net *net, int peer, int channel);
    /* Sends and receives what it can. EP_OK, or the error that broke the network. *ret_moved: something changed. */
    ep_status (*progress)(struct ep_net *net, bool *ret_moved);
    void (*free)(struct ep_net *net);
    /* Optional. True: everything that `peer` has put has arrived, and `peer` will put nothing more. */
    bool (*ended)(struct ep_net *net, int peer);
    /* Optional, with ep_net_params.tolerant. True: the connection to `peer` has ended without a BYE record. */
    bool (*lost)(struct ep_net *net, int peer);
    /*
     * After EP_OK, `peer` changes neither region nor signals: data that it sends later, or that has arrived but was not
     * processed, is dropped, and the region may be reused. Puts to it are discarded and count as flushed. The control
     * link stays open. `peer` sees a lost connection, or nothing. This cannot be undone. After any other status, data
     * in flight may still arrive.
     */
    ep_status (*revoke)(struct ep_net *net, int peer);
    /*
     * Optional. Registers memory that puts are going to read: they are not copied, so flush_test() is true only after
     * the NIC has read them. EP_OK, or EP_E_UNSUPPORTED: puts may read host memory all the same, but not device memory.
     * Another thread than that of the other calls may call it, one at a time. The memory must outlive the endpoint.
     */
    ep_status (*attach)(struct ep_net *net, const struct ep_net_buffer *buffer);
};

struct ep_net {
    const struct ep_net_ops *ops;
    /* Of a network between hosts: the tcp endpoint, which has the control links. It may be this one. */
    struct ep_net *tcp;
    int node, nnodes, channels;
    int rank, ranks_per_node, timeout_ms; /* as in ep_net_params */
    bool tolerant;
    /*
     * Region and signals are page-aligned and fill whole pages (ep_net_whole_pages()) that hold nothing else, so that
     * cudaHostRegister() on them covers no other memory. They do not move until free(); unregister them before that.
     * Initially zero.
     */
    unsigned char *region; /* of this rank; peers write here */
    size_t region_bytes;   /* as requested: the limit of puts */
    /*
     * What peers put to payload_base + offset arrives at payload[offset], offset < region_bytes. Without a region of
     * its own (ep_net_params.payload) this is `region`. payload_base is 0 where the engine has no such regions.
     */
    unsigned char *payload;
    uint64_t payload_base;
    uint64_t *signals; /* of this rank; plain loads, change only inside progress() */
    uint32_t n_signals;
    size_t wire_bytes; /* memory of the engine in addition to region and signals */
    ep_status broken;  /* ep_net_break() */
    int broken_by;     /* 1 + the node that broke the network, 0: none */
    bool copies;       /* put() has read sources outside of attach() when it returns true */
    bool can_sleep;    /* peers announce new work by the wake callback: a waiting thread need not poll */
    /*
     * Set by the user: signals may be held until progress() or flush_test(), to be sent in one batch; later puts may
     * take effect before them.
     */
    bool batch_signals;
    /* Set by the user before free(): the group has failed, and data in flight is not needed. */
    bool abandoned;
    char reason[EP_ERROR_TEXT_BYTES]; /* of `broken` */
};

struct ep_net_params {
    int rank, nranks;        /* in the group */
    const uint64_t *members; /* a bit for each rank that is present; NULL: all. Used while the endpoint is opened */
    int ranks_per_node;
    int channels;
    size_t region_bytes; /* the same on all ranks */
    uint32_t n_signals;  /* the same on all ranks */
    int timeout_ms;      /* of the all-gathers during creation, and of free() while a peer reads late */
    /*
     * Not 0: ranks in the same block of this many ranks do not communicate on this endpoint, and there are no control
     * links. An engine may connect them all the same.
     */
    int block_ranks;
    bool tolerant; /* a lost peer does not break the network for the others */
    /*
     * Memory for the payload region, of region_bytes or more; NULL: none. ep_net.payload tells whether the engine uses
     * it. Ranks may differ in this. It must outlive the endpoint.
     */
    const struct ep_net_buffer *payload;
    const char *gpu; /* PCI address of this rank's GPU: NICs near it are preferred. NULL: none, or not known yet */
    ep_net_emulation emulation;
    const ep_boot *boot; /* for all-gathers during creation; collective over all ranks of the group */
    /*
     * Wakes `rank`. Called after a record was written to `rank`, or a record of `rank` was read and its wire has room
     * again. NULL: no thread sleeps.
     */
    void (*wake)(void *context, int rank);
    void *wake_context;
    /* Maps a segment of a rank of this host. NULL: ep_shm_attach(). */
    ep_status (*attach)(void *wake_context, int rank, const struct ep_shm_name *name, struct ep_shm *ret_shm);
    /* Called while the creation waits for peers outside the all-gathers: EP_OK, or the reason to fail. NULL: no check.
     */
    ep_status (*check)(void *wake_context);
};

/* An engine. ep_boot.network points to one of these when the boot brings its own network. */
struct ep_net_provider {
    uint32_t abi; /* EP_NET_ABI */
    const char *name;
    ep_status (*open)(const struct ep_net_provider *provider, const struct ep_net_params *params,
                      struct ep_net **ret_net);
    void *context;
    /* Whether its endpoints may put from and to GPU memory: attach() and ep_net_params.payload. NULL: no. */
    bool (*uses_device_memory)(void);
};

#define EP_NET_ABI 8u /* of these tables, and of the engines' wire formats */

extern const struct ep_net_provider ep_net_emulated;
extern const struct ep_net_provider ep_net_tcp;   /* tcp.h */
extern const struct ep_net_provider ep_net_verbs; /* verbs_net.h */

/* What the ranks exchange when an endpoint is opened; an engine's own data follows it. */
struct ep_net_hello {
    uint64_t status, abi, ranks_per_node, channels, region_bytes, n_signals;
    char reason[256]; /* of the status */
};

/*
 * For engines: an all-gather of hellos of `bytes` each, which begin with struct ep_net_hello; this
 * function fills it in. Every rank takes part, whatever its own `status`, so that no rank waits for one that has
 * failed. EP_OK: all ranks had EP_OK and the same parameters. Otherwise the caller's own status, or that of the lowest
 * rank that failed, with its reason. EP_E_TIMEOUT counts last: it may be the consequence of any other. Entries of
 * `ret_all` [R] that were not received are zero.
 */
ep_status ep_net_exchange_hello(const char *name, const struct ep_net_params *params, ep_status status, void *mine,
                                size_t bytes, void *ret_all);

/*
 * For engines: a zeroed endpoint of `bytes`, whose initial state is that of the parameters; without region and signals.
 * EP_E_ARG: parameters that no engine accepts.
 */
EP_PRIVATE_API ep_status ep_net_new(const struct ep_net_ops *ops, size_t bytes, const struct ep_net_params *params,
                                    struct ep_net **ret_net);
/* For engines: the end of opening; returns `status`. After a failure the endpoint, abandoned, is freed by its ops. */
EP_PRIVATE_API ep_status ep_net_opened(ep_status status, struct ep_net **ret_net);

/*
 * For engines: the endpoint is unusable, by `status` and the last error; `node` has broken it, -1: none. Only the first
 * call counts. It and ep_net_check() return its status, with the text.
 */
ep_status ep_net_break(struct ep_net *net, ep_status status, int node);

static inline ep_status ep_net_check(const struct ep_net *net)
{
    return net->broken == EP_OK ? EP_OK : ep_fail(net->broken, "%s", net->reason);
}

/* Rounded up to whole pages of this machine; SIZE_MAX on overflow. */
EP_PRIVATE_API size_t ep_net_whole_pages(size_t bytes);

/* For engines: allocates region and signals of `net`, by its sizes. */
ep_status ep_net_memory_new(struct ep_net *net);
/* For engines: frees region, signals and `net` itself. */
void ep_net_free(struct ep_net *net);

/* The built-in engine with that name, or NULL. */
const struct ep_net_provider *ep_net_find(const char *name);

/* Whether nodes on that network are separate hosts: connected by control links, without shared memory. */
bool ep_net_is_linked(const char *name);

static inline bool ep_net_is_present(const struct ep_net_params *params, int rank)
{
    return !params->members || params->members[rank / 64] >> (rank % 64) & 1;
}

/* Whether this rank communicates with `rank` on that endpoint: see block_ranks. */
static inline bool ep_net_is_connected(const struct ep_net_params *params, int rank)
{
    return ep_net_is_present(params, rank) &&
           (!params->block_ranks || rank / params->block_ranks != params->rank / params->block_ranks);
}

/* node -> rank of the rail peer, given any rank of the rail. */
static inline int ep_net_rail_rank(int rank, int ranks_per_node, int node)
{
    return node * ranks_per_node + rank % ranks_per_node;
}

static inline int ep_net_rail(const struct ep_net *net, int node)
{
    return ep_net_rail_rank(net->rank, net->ranks_per_node, node);
}

/* Index of node `peer` among the rail peers of `node`: 0 .. nnodes - 2. */
static inline int ep_net_peer_index(int node, int peer)
{
    return peer < node ? peer : peer - 1;
}

/* The node with that index among the rail peers of `node`. */
static inline int ep_net_peer(int node, int index)
{
    return index < node ? index : index + 1;
}

/* Index of a channel to a rail peer among those to all of them, and the peer of such an index. */
static inline int ep_net_index(const struct ep_net *net, int peer, int channel)
{
    return ep_net_peer_index(net->node, peer) * net->channels + channel;
}

static inline int ep_net_index_peer(const struct ep_net *net, int index)
{
    return ep_net_peer(net->node, index / net->channels);
}

#endif
