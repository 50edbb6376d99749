/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - the group layer: what all backends share to make ranks a group. It has no data path.
 *
 *   control.h   the control block of each rank;  control.c  attaching to those of the peers
 *   peers.h     doorbells, liveness
 *   failure.h   the failure of the group, and its text on each rank
 *   wait.h      all waits: doorbell, deadline, liveness, failed rank
 *   link.c      the control link to each rail peer: it replaces control blocks between hosts
 *   queue.h     queues of work: worker thread, events
 *   memory.h    symmetric memory of the host: allocations of this rank, mappings of the peers' allocations
 *   exchange.h  all-gather of small rows over control blocks (and rails between nodes)
 *   plan.h      counts of a plan, the final row of each token and the routes to them, computed with the peers
 *   regroup.c   other members
 *   collective.h  barrier, all-gather, agreement of all ranks
 *
 * A file includes the headers of those above it in this list only.
 *
 * Each rank has one control block in shared memory that only this rank writes (exceptions are marked); peers poll it. A
 * sleeping rank waits on its own doorbell, a futex word, which every publishing rank rings. Operations are numbered:
 * op_begun is the number of the last operation whose buffers this rank has published, op_ended that of the last
 * operation in which it has moved all its data. A rank returns from an operation when all ranks of its node have ended
 * it, so two op descriptors suffice and none is overwritten while it is read.
 *
 * Data written by a peer is not trusted: it may be invalid, and may change while it is read. Counts, indices and
 * offsets are copied out of shared memory once (ep_group_read_shared) and checked before use; a value that no rank
 * writes is ep_group_fail_damaged(). Rows and scales are payload and may hold any value.
 */
#ifndef EP_GROUP_GROUP_H
#define EP_GROUP_GROUP_H

#include "base/clock.h"
#include "base/shm.h"
#include "core/core.h"
#include "group/control.h"
#include "net/messages.h"

#include <pthread.h>
#include <string.h>

/* A peer's allocation, mapped here. */
struct ep_group_mapping {
    uint32_t generation;
    struct ep_shm shm;
};

struct ep_group_peer {
    struct ep_group_control *control; /* NULL: on another host */
    struct ep_shm shm;
    bool same_process;
    uint64_t key;              /* of its process, as in the names of its segments */
    struct ep_process process; /* its process as seen from here; unset for the same process or another host */
    uint32_t frees_seen;
    struct ep_group_mapping *mappings; /* [EP_GROUP_SLOTS], made on first use; peers of this node only */
};

/* Origin of an allocation: staging of the library, ep_alloc(), ep_alloc_local(). */
enum ep_group_memory { EP_GROUP_MEMORY_INTERNAL, EP_GROUP_MEMORY_SYMMETRIC, EP_GROUP_MEMORY_LOCAL };

struct ep_group_allocation {
    struct ep_shm shm;
    uint32_t generation;
    enum ep_group_memory kind;
};

/*
 * State of a rank of another host, from the control link of its node. Written by the thread of the links.
 *
 * `lost` is also written by low latency, whose endpoint has a connection to each rank. When one is cut its rank is lost
 * for the whole communicator, as on the endpoint of the streams: no connection is made twice, and a rank that only some
 * calls reach could agree on nothing. It is never reset; state.left takes precedence.
 */
struct ep_group_remote {
    struct ep_group_state state;
    _Atomic uint64_t heard_ns; /* of a rail peer: when its last heartbeat arrived */
    _Atomic uint32_t lost;     /* it has died, or a connection to it has ended before it said that it leaves */
    /* A connection to it ended, but its process did not close it: the control link of a rail peer, or one of low
     * latency. Written before `lost`. */
    _Atomic uint32_t cut;
};

/*
 * A rank of this node that was a member once, and may still write to memory of this rank: until it is known not to, or
 * the memory has moved. Its control block tells whether it has left.
 */
struct ep_group_former {
    struct ep_group_former *next;
    int rank;
    uint64_t id; /* of its communicator */
    bool same_process;
    struct ep_process process;
    struct ep_shm shm;
};

struct ep_group_link; /* link.c */
struct ep_group_job;  /* queue.c */

/* An ep_queue. While it has jobs only the worker touches status and text, otherwise only the caller's thread. */
struct ep_group_queue {
    struct ep_queue base;
    struct ep_group_queue *next; /* next queue of the communicator; used by the caller's thread only */
    int jobs;                    /* queued or running; under queue_lock */
    ep_status status;            /* the first failure since the last ep_stream_sync() */
    char text[EP_ERROR_TEXT_BYTES];
};

struct ep_group;

/* What a backend supplies to its groups. */
struct ep_group_backend {
    size_t comm_bytes; /* size of a communicator; it begins with struct ep_group */
    bool fixed_memory; /* peers map memory that cannot move to other pages at its addresses */
    /* NULL, or the PCI address of the GPU that this rank will use, as far as it is known before it is chosen. */
    const char *(*find_gpu)(struct ep_group *group);
    /* NULL, or ends the threads of objects that were not freed, before the communicator is freed. */
    void (*stop)(struct ep_group *group);
};

struct ep_group {
    ep_comm *comm;
    const struct ep_group_backend *backend;
    struct ep_shm shm; /* the own control block */
    struct ep_group_control *control;
    struct ep_group_former *former;
    int unknown_former;          /* 1 + a rank for whose entry there was no memory; 0: none */
    struct ep_group_peer *peers; /* [R]; the own entry has only control and same_process set */
    int arbiter;       /* lowest rank on this host, whose control block holds the failure of all; at first this rank */
    int first;         /* first rank of this node */
    int nlocal, local; /* ranks on this node, own index among them */
    bool one_host;
    bool spin; /* there are no more ranks on this host than processors */
    size_t exchange_row_bytes;
    struct ep_group_descriptor *descriptors; /* [nlocal] op descriptors of the last operation, copied when it began */
    uint64_t operation;                      /* number of the last dispatch or combine */
    uint64_t exchange;                       /* number of the last exchange started */
    int plans;                               /* number of the last plan */
    struct ep_plan *pending[EP_GROUP_EXCHANGES]; /* plans whose exchange is not complete, oldest first */
    int n_pending;
    struct ep_streams *streams; /* NULL on one node */
    struct ep_net_provider provider;
    const char *gpu;                /* PCI address: that of find_gpu(), later of the chosen one; NULL: none */
    struct ep_group_remote *remote; /* [R]; NULL unless the network has control links */
    struct ep_group_link *link;
    int link_event;                     /* eventfd that wakes the link thread; -1: none */
    _Atomic uint32_t link_owes_failure; /* futex word. 1: the link thread has yet to send the failure of the group */

    _Atomic int64_t object_bytes; /* of low-latency objects, in addition to their allocations */
    pthread_mutex_t memory_lock;  /* protects allocations: used by the caller's thread and the worker */
    struct ep_group_allocation allocations[EP_GROUP_SLOTS];
    uint32_t next_generation;
    void *stage[EP_GROUP_AT_COUNT]; /* staging for outputs and inputs outside symmetric memory */
    size_t stage_bytes[EP_GROUP_AT_COUNT];

    pthread_mutex_t queue_lock;
    pthread_cond_t queue_changed;
    pthread_t worker;
    bool worker_started, worker_stop;
    bool on_worker;                   /* a job runs on the worker; accessed by the thread that runs jobs only */
    struct ep_group_job *head, *tail; /* queued and running jobs of all queues */
    struct ep_group_queue queue;      /* the stream NULL, and the first of all queues */
};

/* Copies from memory that a peer may change meanwhile: the compiler must not read it again. */
static inline void ep_group_read_shared(void *ret, const void *from, size_t bytes)
{
    memcpy(ret, from, bytes);
    __asm__ volatile("" ::: "memory");
}

static inline struct ep_group *ep_group_of(const ep_comm *comm)
{
    return comm->impl;
}

/* Zero where nothing is known of a rank: on another host, if the network has no control links. */
static inline const struct ep_group_state *ep_group_state_of(const struct ep_group *group, int rank)
{
    static const struct ep_group_state unknown;

    if (group->peers[rank].control)
        return &group->peers[rank].control->state;
    return group->remote ? &group->remote[rank].state : &unknown;
}

static inline struct ep_group_control *ep_group_arbiter(const struct ep_group *group)
{
    return group->peers[group->arbiter].control;
}

/* control.c */
/* Sets comm->impl to zeroed memory of backend->comm_bytes; ep_group_close() frees it. */
ep_status ep_group_open(ep_comm *comm, const ep_boot *boot, const struct ep_group_backend *backend);
void ep_group_close(ep_comm *comm);
/*
 * For another endpoint on the network of a communicator between nodes: the provider, and the parameters that do not
 * depend on the purpose of the endpoint. Both are valid as long as the communicator.
 */
void ep_group_net_describe(struct ep_group *group, struct ep_net_provider *ret_provider,
                           struct ep_net_params *ret_params);
/* For low latency the endpoint has one channel, and every rank is a node. `boot` must live as long as ret_params. */
void ep_group_net_describe_ranks(struct ep_group *group, const ep_boot *boot, struct ep_net_provider *ret_provider,
                                 struct ep_net_params *ret_params);
/* Marks a rank as lost if its connection on such an endpoint was cut. */
void ep_group_net_note_lost(struct ep_group *group, struct ep_net *net, int rank);
/* control.c, for regroup.c */
size_t ep_group_control_bytes(const struct ep_group *group);
/* Of a group that is attached to no peer. */
void ep_group_set_alone(struct ep_group *group);
/* All steps with the peers. `mine`: of the steps before; a failure is reported to them. */
ep_status ep_group_join(struct ep_group *group, const ep_boot *boot, ep_status mine);
/* Ends all communication with the peers, who learn that this rank leaves. */
void ep_group_disconnect(struct ep_group *group);
/* Closes their processes and control blocks, which ep_group_disconnect() keeps. */
void ep_group_forget_peers(struct ep_group *group);
void ep_group_forget_former(struct ep_group_former **at);

/* regroup.c: as in ep_backend_ops. */
ep_status ep_group_regroup_drain(ep_comm *comm);
ep_status ep_group_regroup_leave(ep_comm *comm, const ep_comm *next);
ep_status ep_group_regroup_join(ep_comm *comm, const ep_boot *boot, ep_status mine);

/* Publishes that this rank leaves the group. Part of ep_group_close(); called earlier where the rest takes time. */
void ep_group_leave(struct ep_group *group);
size_t ep_group_bytes(const ep_comm *comm);

static inline int ep_group_rail(const struct ep_group *group, int node)
{
    return ep_net_rail_rank(group->comm->rank, group->comm->ranks_per_node, node);
}

/* Does that node have members? */
static inline bool ep_group_has_node(const struct ep_group *group, int node)
{
    /* Those of all nodes have the same places, of which one is that of this rank. */
    return ep_comm_has(group->comm, ep_group_rail(group, node));
}

/* link.c: a thread that serves the control links to the rail peers. It takes the sockets of the network. */
ep_status ep_group_link_open(struct ep_group *group);
/* Sends the state a last time: the peers learn whether this rank has left the group. */
void ep_group_link_close(struct ep_group *group);

#endif
