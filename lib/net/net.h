/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net.h - the internode seam: what the library asks of a network, and nothing more.
 *
 * A rank talks to the ranks with its own local index on the other nodes ("rail peers"), numbered by node. Each endpoint
 * has a region of memory into which its peers write, and an array of signals that they add to:
 *
 *   put(peer, channel, offset, src, bytes)   writes into the peer's region
 *   signal(peer, channel, index, add)        adds to one of the peer's signals
 *   flush_test(peer, channel)                has everything so far left? Then the sources of the puts are reusable,
 *                                            and the peer gets it all without a further progress() here
 *
 * Order: operations on one (peer, channel) take effect at the peer in the order of the calls: who sees a signal sees
 * every put before it. Nothing holds between different peers or channels, and a put may become visible piece by piece.
 *
 * Nothing blocks: put and signal say "again" when the executor has no room; the caller goes on with something else and
 * calls progress(). Puts without a signal behind them may stay here until progress() or flush_test() is called. All
 * calls on one endpoint come from one thread at a time. This is the subset that queue pairs of a NIC, NVSHMEM and a CPU
 * proxy can all provide; the engines here are "emulated" (emulated.c), "tcp" (tcp.c), "verbs" (verbs.c) and "mpi"
 * (lib/mpi).
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
/* Bytes of one put, at most. */
#define EP_NET_MAX_PUT (1u << 20)

/* Capacity of the emulated wire per (peer, channel): ep_net_emulation.ring_bytes, rounded up to a multiple of 64. */
#define EP_NET_WIRE_BYTES (256u << 10)
#define EP_NET_WIRE_MIN_BYTES 256u

struct ep_net; /* one rank's endpoint; executors put a struct ep_net first in their own struct */

struct ep_net_ops {
    const char *name;
    /* false: no room now, try again after progress(). `src` stays untouched until flush_test says so. */
    bool (*put)(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes);
    bool (*signal)(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add);
    bool (*flush_test)(struct ep_net *net, int peer, int channel);
    /* Moves what can be moved. EP_OK, or the error of a broken network; *ret_moved: something changed. */
    ep_status (*progress)(struct ep_net *net, bool *ret_moved);
    void (*free)(struct ep_net *net);
    /* NULL: the network does not report it. All that `peer` has put is here, and it will put nothing more. */
    bool (*ended)(struct ep_net *net, int peer);
    /* NULL: none. The connected socket of the control link to `peer`, which is the caller's from now on; -1: taken. */
    int (*take_link)(struct ep_net *net, int peer);
    /* NULL: not known here. With ep_net_params.tolerant: the connection to `peer` has ended without a farewell. */
    bool (*lost)(struct ep_net *net, int peer);
    /*
     * From its return on nothing of `peer` changes region or signals here, neither what it sends from now on nor what
     * has come and progress() has not taken: the region may be used anew. What is put to it is thrown away and counts
     * as flushed (but see keeps_sources). The control link stays; `peer` hears as of a connection that was cut, or
     * nothing. There is no way back. Any other status than EP_OK: what is under way may still land.
     */
    ep_status (*revoke)(struct ep_net *net, int peer);
    /* What has not left when the endpoint is freed may be read afterwards: its sources are never to be freed. */
    bool keeps_sources;
};

struct ep_net {
    const struct ep_net_ops *ops;
    int node, nnodes, channels;
    /*
     * Region and signals each begin at a page and fill whole pages (ep_net_whole_pages()), in which nothing else lies:
     * a GPU can register them (cudaHostRegister) without its neighbours. They stay where they are until free(); what
     * was registered is unregistered before that. Zeros at first.
     */
    unsigned char *region; /* of this rank; peers write here */
    size_t region_bytes;   /* as asked for: no put goes beyond */
    uint64_t *signals;     /* of this rank; plain loads, change only inside progress() */
    uint32_t n_signals;
    size_t wire_bytes; /* memory the executor holds besides region and signals */
    uint64_t n_puts;   /* counted by who makes them */
    int broken_by;     /* 1 + the node whose damage broke the network, 0: none */
    bool sleeps;  /* the wake callback of the peers announces new work: waiting for it without polling is allowed */
    bool gathers; /* set by the user: signals behind puts may wait for progress() or flush_test(), to leave with others
                   */
    bool hurries; /* set by the user before free: the group has failed, and what is still in flight is not needed */
};

struct ep_net_params {
    int rank, nranks; /* in the group */
    int ranks_per_node;
    int channels;
    size_t region_bytes; /* the same on all ranks */
    uint32_t n_signals;  /* the same on all ranks */
    int timeout_ms;      /* of the exchanges during creation */
    int apart; /* 0, or: ranks in blocks of so many do not talk to each other here. No links then; an engine may open
                  what nobody uses */
    bool tolerant; /* a peer that is lost does not break the network for the others */
    ep_net_emulation emulation;
    const ep_boot *boot; /* for all-gathers during creation; collective over all ranks of the group */
    /*
     * Called after work was put on the wire to `rank`, or room was made on its wire to here, so that it can stop
     * sleeping. NULL: no thread sleeps.
     */
    void (*wake)(void *context, int rank);
    void *wake_context;
    /* Maps a segment of a rank of this host. NULL: ep_shm_attach() as it is. */
    ep_status (*attach)(void *wake_context, int rank, const struct ep_shm_name *name, struct ep_shm *ret_shm);
    /* Asked while the creation waits for peers outside of the all-gathers: EP_OK, or why it fails. NULL: nobody is. */
    ep_status (*check)(void *wake_context);
};

/* Where an executor comes from. ep_boot.network points to one of these when the boot brings a network. */
struct ep_net_provider {
    uint32_t abi; /* EP_NET_ABI */
    const char *name;
    ep_status (*open)(const struct ep_net_provider *provider, const struct ep_net_params *params,
                      struct ep_net **ret_net);
    void *context;
};

#define EP_NET_ABI 5u /* of these tables, and of what engines send */

extern const struct ep_net_provider ep_net_emulated;
extern const struct ep_net_provider ep_net_tcp;   /* tcp.h */
extern const struct ep_net_provider ep_net_verbs; /* verbs.h */

/* What the ranks send each other when an endpoint is opened; what an engine adds lies behind it. */
struct ep_net_introduction {
    uint64_t status, abi, ranks_per_node, channels, region_bytes, n_signals;
    char reason[256]; /* of the status */
};

/*
 * For engines: one all-gather of introductions of `bytes`, which each begin with one of these; it is filled in here.
 * Every rank takes part whatever its own `status`, so that no rank waits for one that has failed. EP_OK: all ranks
 * have said so, with the same parameters. Its own status comes first, then that of the lowest rank, with its reason.
 * `ret_all` [R] is zero where nothing has come.
 */
EP_PRIVATE_API ep_status ep_net_introduce(const char *name, const struct ep_net_params *params, ep_status status,
                                          void *mine, size_t bytes, void *ret_all);

/* For engines: what every endpoint with these parameters begins as. */
static inline struct ep_net ep_net_init(const struct ep_net_ops *ops, const struct ep_net_params *params)
{
    return (struct ep_net){.ops = ops,
                           .node = params->rank / params->ranks_per_node,
                           .nnodes = params->nranks / params->ranks_per_node,
                           .channels = params->channels,
                           .region_bytes = params->region_bytes,
                           .n_signals = params->n_signals};
}

/* What no engine takes: EP_E_ARG. */
EP_PRIVATE_API ep_status ep_net_check_params(const char *name, const struct ep_net_params *params);

/* Rounded up to whole pages of this machine; SIZE_MAX: there is no such size. */
EP_PRIVATE_API size_t ep_net_whole_pages(size_t bytes);

/* For engines: region and signals of `net`, of the sizes that stand in it. EP_E_MEMORY: `net` has neither. */
EP_PRIVATE_API ep_status ep_net_memory_new(struct ep_net *net);
/* Of an endpoint with or without them. */
EP_PRIVATE_API void ep_net_memory_free(struct ep_net *net);

/* The one of these with that name; NULL: there is none. */
const struct ep_net_provider *ep_net_find(const char *name);

/* Whether nodes are hosts of their own on that network, with a control link between them, and share no memory. */
bool ep_net_is_linked(const char *name);

/* Of an endpoint of such a network: itself, or the endpoint of tcp beside it, borrowed. */
struct ep_net *ep_net_get_tcp(struct ep_net *net);

/* Whether this rank talks to `rank` on that endpoint: see `apart`. */
static inline bool ep_net_is_wanted(const struct ep_net_params *params, int rank)
{
    return !params->apart || rank / params->apart != params->rank / params->apart;
}

/* node -> rank of the rail peer, given any rank of the rail. */
static inline int ep_net_rail_rank(int rank, int ranks_per_node, int node)
{
    return node * ranks_per_node + rank % ranks_per_node;
}

/* Place of node `peer` among the rail peers of `node`: 0 .. nnodes - 2. */
static inline int ep_net_slot(int node, int peer)
{
    return peer < node ? peer : peer - 1;
}

/* The node at place `slot` among the rail peers of `node`. */
static inline int ep_net_peer(int node, int slot)
{
    return slot < node ? slot : slot + 1;
}

#endif
