/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - the group layer: what all backends share to make ranks a group. It has no data path.
 *
 *   control.h   the control block of each rank;  control.c  attaching to those of the peers
 *   agree.c     agreement of all ranks
 *   failure.c   the failure of the group, and its text on each rank
 *   wait.c      all waits: doorbell, deadline, liveness, failed rank
 *   link.c      the control link to each rail peer: it replaces control blocks between hosts
 *   exchange.c  all-gather of small rows over control blocks (and rails between nodes); barrier
 *   memory.c    symmetric memory of the host: allocations of this rank, mappings of the peers' allocations
 *   queue.c     queues of work: worker thread, events
 *   plan*.c     counts of a plan and the final row of each token, computed with the peers
 *   route.c     destinations of rows
 *   shrink*.c   agreement of the survivors, and their new group
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
#include "net/stream.h"

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
    uint64_t key;                  /* of its process, as in the names of its segments */
    struct ep_process process;     /* its process as seen from here; unset for the same process or another host */
    struct ep_shm_address address; /* socket that serves its segments, if group->serves */
    uint32_t frees_seen;
    struct ep_group_mapping *mappings; /* [EP_GROUP_SLOTS], made on first use; peers of this node only */
};

/* Origin of an allocation: staging of the library, ep_alloc(), ep_alloc_local(), ep_register(). */
enum ep_group_memory {
    EP_GROUP_MEMORY_INTERNAL,
    EP_GROUP_MEMORY_SYMMETRIC,
    EP_GROUP_MEMORY_LOCAL,
    EP_GROUP_MEMORY_REGISTERED
};

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
 * calls reach could agree on nothing. It is never reset; state.left takes precedence. A shrink finds out which ranks
 * are alive.
 */
struct ep_group_remote {
    struct ep_group_state state;
    _Atomic uint64_t heard_ns; /* of a rail peer: when its last heartbeat arrived */
    _Atomic uint32_t lost;     /* it has died, or a connection to it has ended before it said that it leaves */
    _Atomic uint32_t silent;   /* a rail peer: its host does not answer, or did not when its control link ended */
    /* A connection to it ended, but its process did not close it: the control link of a rail peer, or one of low
     * latency. Written before `lost`. */
    _Atomic uint32_t cut;
    _Atomic uint32_t excludes; /* a shrink has succeeded there without this rank */
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
    /* Opens a communicator (ep_backend_ops.comm_open) for the group that a shrink forms. */
    ep_status (*open)(ep_comm *comm, const ep_boot *boot);
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
    struct ep_group_peer *peers; /* [R]; the own entry has only control and same_process set */
    int arbiter;       /* lowest rank on this host, whose control block holds the failure of all; at first this rank */
    bool serves;       /* a thread of each process serves its segments: /proc and pidfd_getfd() do not suffice */
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
    struct ep_group_refusal *refusal; /* answers ranks that the shrinks before this group have excluded; NULL: none */
    bool excluded;                    /* by a shrink; permanent */
    uint32_t unreported_aborts; /* calls of ep_comm_abort, if the last ended a shrink unknown to the leader; else 0 */
    int link_event;             /* eventfd that wakes the link thread; -1: none */
    int shrink_deadlines; /* deadlines that expired in calls of ep_comm_shrink, those of all-gathers not included */

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
/*
 * The same for low latency: one channel, and every rank is a node of its own. `boot` must live as long as ret_params.
 */
void ep_group_net_describe_ranks(struct ep_group *group, const ep_boot *boot, struct ep_net_provider *ret_provider,
                                 struct ep_net_params *ret_params);
/* Marks a rank as lost if its connection on such an endpoint was cut. */
void ep_group_net_note_lost(struct ep_group *group, struct ep_net *net, int rank);
/* Publishes that this rank leaves the group. Part of ep_group_close(); called earlier where the rest takes time. */
void ep_group_leave(struct ep_group *group);
size_t ep_group_bytes(const ep_comm *comm);

/* agree.c: steps of creation that succeed on all ranks or on none. The result of a step on one rank. */
struct ep_group_result {
    int32_t status;
    int32_t rank; /* that failed: the rank that reports it, or a peer that it found dead */
    int32_t flag; /* see ep_group_agree_about() */
    char reason[EP_GROUP_REASON_BYTES];
};

/* Call it directly after `status` of the public call was set: copies its text. */
void ep_group_result_init(struct ep_group_result *result, const char *call, ep_status status, int rank);
/*
 * EP_OK, or the failure that explains the others; `mine` is this rank's own result. `all` holds a result every `stride`
 * bytes.
 */
ep_status ep_group_result_reduce(const char *call, const struct ep_group_result *mine, int nranks, const void *all,
                                 size_t stride);
/* Collective: EP_OK if all ranks have succeeded. `mine` is this rank's own status. */
ep_status ep_group_agree(const ep_boot *boot, int timeout_ms, ep_status mine);
/* The same for a failure of `rank`. *flag: in, the flag of this rank; out, true if it was set on any rank. */
ep_status ep_group_agree_about(const ep_boot *boot, int timeout_ms, ep_status mine, int rank, bool *flag);
/* As ep_group_agree(), among the ranks of an existing communicator. */
ep_status ep_group_agree_within(ep_comm *comm, const char *call, ep_status mine);

/*
 * ep_ll_new: all-gathers the status so far and the address of the segment, and compares configurations. ret_all [R]
 * receives the segments. Then creation succeeds on all ranks or on none: ep_group_agree_within().
 */
ep_status ep_group_ll_exchange(ep_ll *ll, ep_status mine, const struct ep_group_address *address,
                               struct ep_group_address *ret_all);

/* wait.c, failure.c */
/* Copies a reason that a peer may be overwriting; terminates it and replaces control characters. */
void ep_group_read_reason(char ret[EP_GROUP_REASON_BYTES], const char from[EP_GROUP_REASON_BYTES]);

struct ep_group_wait {
    struct ep_group *group;
    enum ep_group_phase phase;
    uint64_t deadline_ns, next_probe_ns;
    uint64_t grace_ns; /* 0, or the end of the grace period of a rank that is between two waits, after the deadline */
    /*
     * Of a tolerant wait, about the rank waited for: the wait it is in, the deadline it gets for that wait, and the
     * number of its waits so far.
     */
    uint32_t peer_wait;
    uint64_t peer_deadline_ns;
    int peer_waits;
    int spins;
    int suspect;   /* 1 + the rank that the last probe found dead or departed */
    bool tolerant; /* report the rank waited for, but do not fail the group: low latency with masking */
    bool polls;    /* the network needs polling: no long sleeps */
    int in_flight; /* EP_GROUP_IN_FLIGHT_*: whether data of the rank waited for may still be in flight */
};

enum {
    EP_GROUP_IN_FLIGHT_UNKNOWN = 0, /* ask the streams of the communicator */
    EP_GROUP_IN_FLIGHT,
    EP_GROUP_NOT_IN_FLIGHT
};

/* Starts a wait with the deadline of the communicator. */
void ep_group_wait_begin(struct ep_group_wait *wait, struct ep_group *group, enum ep_group_phase phase);

/* Progress was made: restarts the deadline. */
void ep_group_wait_reset(struct ep_group_wait *wait);

/*
 * Call it while the condition does not hold. `seen` is the doorbell as read before the condition was checked; `rank` is
 * the rank waited for. Sleeps until the doorbell rings or an interval passes, or returns the failure.
 */
ep_status ep_group_wait(struct ep_group_wait *wait, uint32_t seen, int rank);
/* The same without the sleep, for callers that sleep elsewhere: call it at least every 20 ms. */
ep_status ep_group_wait_check(struct ep_group_wait *wait, int rank);
void ep_group_wait_end(struct ep_group_wait *wait);

/* Sleeps until the doorbell rings or an interval passes, even if the group has failed. */
void ep_group_wait_doorbell(struct ep_group *group, uint32_t seen);

/*
 * Publishes the rank that this rank waits for and the time of this probe, which it returns. Also for waits without an
 * ep_group_wait.
 */
uint64_t ep_group_publish_wait(struct ep_group *group, int rank, enum ep_group_phase phase);
void ep_group_publish_wait_end(struct ep_group *group);

static inline uint32_t ep_group_doorbell(const struct ep_group *group)
{
    return atomic_load_explicit(&group->control->doorbell, memory_order_acquire);
}

/* Rings the doorbells of the ranks of this node, or of one rank. */
void ep_group_ring_node(struct ep_group *group);
void ep_group_ring_rank(struct ep_group *group, int rank);
void ep_group_ring_all(struct ep_group *group);

/* Waits until `word` (offset in the control block) of all ranks of this node has reached `value`. */
ep_status ep_group_wait_node(struct ep_group *group, size_t word, uint64_t value, enum ep_group_phase phase);

/* Publishes a failure and wakes all ranks; returns the failure of the group, with text. */
ep_status ep_group_set_failure(struct ep_group *group, ep_status status, int failed_rank, enum ep_group_phase phase);
/* The same for a rank that did not answer. reason: what is known of it, or "". */
ep_status ep_group_set_late(struct ep_group *group, int late, enum ep_group_phase phase, const char *reason);
/*
 * The same for a status whose text is the last error of the thread: keeps that text and publishes it to the peers,
 * unless another failure was first. A status of the 1xx or 2xx kind is a failure of this rank, whatever `failed_rank`
 * is, unless that is a peer that could not serve its segment. The text must name the failed rank before any other rank.
 */
ep_status ep_group_set_own_failure(struct ep_group *group, ep_status status, int failed_rank,
                                   enum ep_group_phase phase);

/* An int32_t in a struct that ranks exchange, which must be equal on all ranks. */
struct ep_group_field {
    const char *name;
    size_t at;
};
/*
 * EP_E_MISMATCH with the first field that differs between `mine`, of rank `me`, and `theirs`. call: "ep_...: ", or "".
 */
ep_status ep_group_compare(const char *call, const struct ep_group_field *fields, size_t n, const void *mine, int me,
                           const void *theirs, int rank);
/* EP_E_MISMATCH and its text only. */
ep_status ep_group_fail_disagree(const char *call, const char *field, int64_t mine, int me, int64_t theirs, int rank);
ep_status ep_group_fail_calls(uint32_t mine, int me, uint32_t theirs, int rank);
/* `mine` and `theirs`: EP_GROUP_RECV_INDEX ... */
ep_status ep_group_fail_outputs(uint32_t mine, int me, uint32_t theirs, int rank);

/* EP_E_MISMATCH: a value in the memory of `rank` is one that no rank writes. */
ep_status ep_group_fail_damaged(struct ep_group *group, int rank, enum ep_group_phase phase, const char *what,
                                int64_t value);

/* The rank whose ep_comm_abort() is the failure known to this rank; -1: none, or another failure. */
int ep_group_aborted_by(const struct ep_group *group);

/* EP_OK, or the failure set by this rank or a peer. Cheap. */
ep_status ep_group_check(struct ep_group *group);
/* The same, but only ep_comm_abort counts: for calls that tolerate dead peers. */
ep_status ep_group_check_abort(struct ep_group *group);
void ep_group_abort(ep_comm *comm);
ep_status ep_group_poll(ep_comm *comm);
const char *ep_group_phase_name(enum ep_group_phase phase);
/* For the text of a timeout: a rank whose process state is unreadable may be dead. "" for others. */
const char *ep_group_describe_unreadable(const struct ep_group *group, int rank);
/* True only if it is certain; a process with unreadable state is not dead. */
bool ep_group_peer_dead(const struct ep_group *group, int rank);
/* It has freed its communicator, on any host, as far as this rank knows. */
bool ep_group_has_left(const struct ep_group *group, int rank);
/* Dead, or left: no rank waits for it any more. */
bool ep_group_dead_or_left(const struct ep_group *group, int rank);

/* Takes over a failure received over the control link of rank `from`. `word` may be invalid. */
void ep_group_receive_failure(struct ep_group *group, uint64_t word, int from);
/* Makes the thread of the control links check the state of this rank. Async-signal-safe. */
void ep_group_link_wake(struct ep_group *group);
/*
 * Waits, once and briefly, until the thread of the control links has sent the failure of the group: the caller's
 * process may exit as soon as its call returns, and its peers would report that it died instead of the reason.
 */
void ep_group_link_send_failure(struct ep_group *group);
/* The failure of the group in one word, if a rank of this node knows one; 0: none. */
uint64_t ep_group_get_failure(const struct ep_group *group);

/*
 * link.c: a thread that serves the control links to the rail peers: heartbeats with the state of all ranks of the node,
 * and failures. open takes the sockets of the network.
 */
ep_status ep_group_link_open(struct ep_group *group);
/* Sends the state a last time: the peers learn whether this rank has left the group. */
void ep_group_link_close(struct ep_group *group);
/* For a group that is freed; NULL is allowed. */
void ep_group_refusal_free(struct ep_group_refusal *refusal);

/* Header of the messages between nodes. */
struct ep_group_message {
    uint32_t kind;   /* EP_GROUP_MESSAGE_* */
    uint32_t detail; /* exchange: bytes; route: tokens in this message; row and partial: check of the shape */
    uint64_t number; /* of the exchange or operation; to detect ranks in different calls */
    uint64_t index;  /* of the first token, in the order of the route */
    uint64_t plan;   /* row and partial: number of the plan; otherwise 0 */
};

_Static_assert(sizeof(struct ep_group_message) % 16 == 0, "rows follow, which are aligned to 16 bytes");

enum {
    EP_GROUP_MESSAGE_EXCHANGE = 1,
    EP_GROUP_MESSAGE_ROUTE,
    EP_GROUP_MESSAGE_ROW,
    EP_GROUP_MESSAGE_PARTIAL_BF16,
    EP_GROUP_MESSAGE_PARTIAL_F32
};

/*
 * One pass over all work between nodes, which waits for nothing. Sets *ret_moved if it has made progress, and *ret_busy
 * if work is left; *ret_node then is the node waited for, -1: any that has not accepted all data yet.
 */
typedef ep_status (*ep_group_pass_fn)(void *context, bool *ret_moved, bool *ret_busy, int *ret_node);
/*
 * wait.c. Lets the network make progress and calls `pass`, until no work is left and all data is sent. In between it
 * waits until data moves. A broken network fails the group.
 */
ep_status ep_group_net_run(struct ep_group *group, enum ep_group_phase phase, ep_group_pass_fn pass, void *context);

static inline int ep_group_rail(const struct ep_group *group, int node)
{
    return ep_net_rail_rank(group->comm->rank, group->comm->ranks_per_node, node);
}

/*
 * exchange.c: all-gather of rows of at most exchange_row_bytes - 16 bytes. start publishes without waiting for peers,
 * unless they are EP_GROUP_EXCHANGES exchanges behind; complete makes all rows readable; release frees them. To be
 * called in order. A row of another size is a mismatch of the field named by `extent`, NULL: of "bytes".
 */
struct ep_group_extent {
    const char *field; /* a row has `fixed` bytes and `each` bytes per unit of the field */
    size_t fixed, each;
};
ep_status ep_group_exchange_start(struct ep_group *group, enum ep_group_phase phase, const void *row, size_t bytes,
                                  uint64_t *ret_number);
ep_status ep_group_exchange_complete(struct ep_group *group, uint64_t number, enum ep_group_phase phase,
                                     const struct ep_group_extent *extent);
/* Copies `bytes` of the row of `rank` in an exchange between complete and release. */
void ep_group_exchange_read(const struct ep_group *group, uint64_t number, int rank, void *ret_row, size_t bytes);
void ep_group_exchange_release(struct ep_group *group, uint64_t number);

ep_status ep_group_barrier(ep_comm *comm);
ep_status ep_group_barrier_on(ep_comm *comm, ep_stream stream);
ep_status ep_group_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);
/* The same as a bootstrap, for objects that are opened after creation. */
ep_boot ep_group_boot(ep_comm *comm);

/* memory.c */
ep_status ep_group_alloc(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status ep_group_free(ep_comm *comm, void *memory);
ep_status ep_group_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status ep_group_free_local(ep_comm *comm, void *memory);
ep_status ep_group_register(ep_comm *comm, void *memory, size_t bytes);
ep_status ep_group_unregister(ep_comm *comm, void *memory);
ep_status ep_group_alloc_internal(struct ep_group *group, size_t bytes, void **ret_memory);
/* Without pages: call ep_group_reserve() for each part before it is touched. */
ep_status ep_group_alloc_sparse(struct ep_group *group, size_t bytes, void **ret_memory);
ep_status ep_group_reserve(struct ep_group *group, const void *memory, size_t offset, size_t bytes);
void ep_group_free_internal(struct ep_group *group, void *memory);
/* Finds `bytes` at `memory` in the symmetric memory of this rank; false if they are not in it. */
bool ep_group_find(struct ep_group *group, const void *memory, size_t bytes, struct ep_group_address *ret_address);
/*
 * Maps `bytes` at an address in the memory of a peer, aligned to 16. EP_E_MISMATCH if they are not inside the
 * allocation: then nothing of it may be used. 0 bytes: NULL, whatever the address is.
 */
ep_status ep_group_map(struct ep_group *group, int rank, const struct ep_group_address *address, size_t bytes,
                       void **ret_address);
/* EP_E_MISMATCH: `what` is wrong with the address of `bytes` that `rank` has published. */
ep_status ep_group_fail_address(int rank, const struct ep_group_address *address, size_t bytes, const char *what);
/* Attaches the segment in a slot of a peer, if it belongs to that peer and has at least `bytes`. */
ep_status ep_group_attach_slot(struct ep_group *group, int rank, const struct ep_group_address *address, size_t bytes,
                               struct ep_shm *ret_shm);
/*
 * Maps a segment of a peer, by any way that the machine allows. EP_E_PEER_DEAD when it has died, EP_E_PEER_LEFT when it
 * lives and has left the group or released the segment, EP_E_MISMATCH when the name is not of a segment of its process.
 * `name` is a private copy. timeout_ms: for an owner that has to answer, else EP_E_TIMEOUT; `check`, NULL or called
 * with the group at intervals of this wait, may end it with a status of its own.
 */
ep_status ep_group_attach(struct ep_group *group, int rank, const struct ep_shm_name *name, int timeout_ms,
                          ep_status (*check)(void *group), struct ep_shm *ret_shm);
/*
 * The peer that could not serve a segment in the last request of this thread; -1: none. Resets it, so that it is not
 * named in a later failure: call it when a failure is reported, and at the start of a step of creation. Jobs of a queue
 * request segments concurrently with the caller's thread.
 */
int ep_group_get_failed_owner(void);
/* Unmaps allocations that the peers have freed. */
void ep_group_unmap_stale(struct ep_group *group);
void ep_group_memory_close(struct ep_group *group);
/* Staging buffer number `which` of at least `bytes`. */
ep_status ep_group_stage(struct ep_group *group, int which, size_t bytes, void **ret_memory);

/* queue.c */
typedef ep_status (*ep_group_job_fn)(void *arguments);
/*
 * Queues a job in `stream`; copies `bytes` of `arguments`. In a _sync call it runs on the caller's thread, and its
 * status is returned.
 */
ep_status ep_group_submit(struct ep_group *group, ep_stream stream, ep_group_job_fn run, const void *arguments,
                          size_t bytes);
/* Runs a job on the caller's thread, after all that is queued. */
ep_status ep_group_run(struct ep_group *group, ep_group_job_fn run, void *arguments);
bool ep_group_is_idle(struct ep_group *group);
/* Waits until all queues are empty. */
ep_status ep_group_drain(struct ep_group *group);
/* Waits until the queue is empty, whether or not its jobs succeeded. */
ep_status ep_group_stream_ready(ep_comm *comm, ep_stream stream);
ep_status ep_group_stream_sync(ep_comm *comm, ep_stream stream);
ep_status ep_group_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status ep_group_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);
/*
 * A status of the 1xx or 2xx kind of a job that the caller does not wait for: the caller cannot correct and repeat the
 * call, so it fails the communicator. `alone`: on this rank only; its peers time out or mask it.
 */
ep_status ep_group_fail_queued(struct ep_group *group, ep_status status, enum ep_group_phase phase, bool alone);
ep_status ep_group_queue_new(ep_comm *comm, ep_queue **ret_queue);
void ep_group_queue_free(ep_queue *queue);
void ep_group_queue_close(struct ep_group *group);
ep_status ep_group_event_new(ep_comm *comm, ep_event **ret_event);
ep_status ep_group_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);
ep_status ep_group_event_signal(ep_event *event);
ep_status ep_group_event_wait(ep_event *event, int timeout_ms);
ep_status ep_group_event_query(const ep_event *event, int *ret_done);
void ep_group_event_free(ep_event *event);

/* route.c: the rows of the tokens of one source on the ranks of one node. */
struct ep_group_entry {
    int32_t row;
    uint16_t local; /* destination: index among the ranks of the node */
    uint16_t k;     /* expanded layout: which of the token's experts */
};

struct ep_group_route {
    int n_tokens;
    int32_t *index;               /* [n_tokens,K] expert or -1 */
    int32_t *start;               /* [n_tokens+1] */
    struct ep_group_entry *entry; /* of token t: start[t]..start[t+1], in the order of the sum */
    int64_t n_entries;
};

/*
 * Builds the route of tokens onto the ranks [first_rank, first_rank + nlocal) from experts and rows per (token, k).
 * `index` and `row` are [n_tokens,K]; the route takes index (freed by ep_group_route_done), row stays the caller's.
 * `expert_rank` [E] is the rank of each expert.
 */
ep_status ep_group_route_init(struct ep_group_route *route, int n_tokens, int topk, const int32_t *expert_rank,
                              int first_rank, int nlocal, bool expanded, int32_t *index, const int32_t *row);
void ep_group_route_done(struct ep_group_route *route);

/* plan.c */
struct plan_row;

struct ep_group_plan {
    int number;
    int n_tokens;   /* of the routing that operations use: the caller may have called an update meanwhile */
    int64_t n_send; /* rows that its tokens become */
    uint64_t exchange;
    int32_t *index;             /* [N,K] as int32, until the route takes it over */
    struct plan_row *row;       /* what this rank publishes, with these counts: */
    int32_t *tokens_per_rank;   /* [R] */
    int32_t *tokens_per_node;   /* [nnodes] */
    int32_t *tokens_per_expert; /* [E] */
    bool complete;
    bool orphaned;    /* freed by the user before its exchange was complete */
    ep_status status; /* of the completion, returned to every later user */
    char status_text[256];
    struct ep_group_route own;   /* this rank's tokens on this node */
    struct ep_group_route *rail; /* [nnodes] tokens of the rail peers on this node; own node empty */
    int32_t **net_tokens;        /* [nnodes] this rank's tokens with a row on that node, ascending */
    int32_t *n_net_tokens;       /* [nnodes] */
    int32_t *recv_per_expert;
    int64_t *recv_from_rank;
    int64_t *expert_start;
    int32_t *recv_exact; /* [L] not rounded up */
    void *device;        /* state of a device backend, which frees it */
    int64_t *rows_on;    /* [R] rows that each rank receives */
    int64_t *first_row;  /* [R] rank layout: where this rank's rows begin on each rank */
    int32_t *prefix;     /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t *max_tokens; /* [R] that each rank may have after an update */
    void *owned[16];     /* memory of these arrays */
    int n_owned;
};

static inline struct ep_group_plan *ep_group_plan_of(const ep_plan *plan)
{
    return plan->impl;
}

ep_status ep_group_plan_open(ep_plan *plan, const ep_plan_args *args);
/*
 * The same in two steps for a backend that counts tokens itself: prepare makes plan->impl, whose tokens_per_rank and
 * tokens_per_expert the caller fills; publish does the rest. Without `routes` the caller keeps them: index is NULL, and
 * first_row has the first row on each rank. For one node only, or without rows. Both undo everything on failure;
 * discard does it for a plan that is not published.
 */
ep_status ep_group_plan_prepare(ep_plan *plan, bool routes);
ep_status ep_group_plan_publish(ep_plan *plan);
void ep_group_plan_discard(ep_plan *plan);
/*
 * A plan of fixed capacity whose counts the hosts never know, because a device reads its routing later: the ranks
 * exchange sizes only, and wait for each other. Nothing remains on failure.
 */
ep_status ep_group_plan_exchange_sizes(ep_plan *plan);
void ep_group_plan_close(ep_plan *plan);
ep_status ep_group_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/* Completes the plans up to and including `plan` (NULL: all): exchanges counts and routes. */
ep_status ep_group_plan_complete(struct ep_group *group, ep_plan *plan);
/* Frees orphaned plans whose exchange is pending. */
void ep_group_plan_drop_pending(struct ep_group *group);
/* True if every rank refuses the plan. Then an operation on it concerns no other rank. */
static inline bool ep_group_plan_is_refused(const ep_plan *plan)
{
    ep_status status = ((const struct ep_group_plan *)plan->impl)->status;

    return status != EP_OK && status / 100 != EP_E_MEMORY / 100;
}

/* shrink.c */
ep_status ep_group_shrink(ep_comm *comm, ep_comm *next);

#endif
