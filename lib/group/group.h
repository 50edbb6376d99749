/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - the layer that makes a group of ranks: what every backend shares, and no backend's data path.
 *
 *   control.h   the control block of each rank;  control.c  attaching to those of the peers
 *   agree.c     agreement of all ranks
 *   failure.c   the failure of the group, and what it says on each rank
 *   wait.c      every wait: doorbell, deadline, liveness and who is to blame
 *   link.c      the control link to each rail peer of another host: what control blocks are within one
 *   exchange.c  all-gather of small rows over control blocks (and rails between nodes)
 *   collective.c  barrier and all-gather of the caller
 *   memory.c    symmetric memory of the host: this rank's allocations, mappings of the peers'
 *   queue.c     queues of work: worker thread, events
 *   plan*.c     counts of a plan and the final row of each token, made with the peers;  route.c  where its rows go
 *   shrink*.c   agreement of the survivors, and the new group of them
 *
 * How ranks talk. Each rank has one control block in shared memory that only it writes (exceptions are marked); peers
 * poll it. A rank that sleeps waits on its own doorbell, a futex word, which every publishing rank rings. Operations
 * are counted: `entered` says "my buffers for operation n are published", `finished` says "I have moved all that I move
 * in operation n". A rank leaves an operation when all ranks of its node have finished it, so two descriptors
 * are enough, and no rank reads one that is being overwritten.
 *
 * What a peer has written is not believed: it may be rubbish, and change while it is read. Counts, indices and offsets
 * are copied out of shared memory once (ep_group_read_shared) and checked before anything follows from them; a value
 * that no rank writes is ep_group_fail_damaged(). Rows and scales are payload and may hold anything.
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
    struct ep_process process;     /* what can be known of it here; nothing of the same process or another host */
    struct ep_shm_address address; /* where it hands out its segments; all zero: /proc or pidfd_getfd() will do */
    uint32_t frees_seen;
    struct ep_group_mapping *mappings; /* [EP_GROUP_SLOTS], made on first use; peers of this node only */
};

/* Whose an allocation is: staging of the library, of ep_alloc(), of ep_alloc_local(), of ep_register(). */
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
 * What is known of a rank of another host, by the control link of its node. Written by the thread of the links.
 *
 * `lost` is also written by low latency, whose endpoint has a connection to each rank: one that was cut takes its rank
 * with it for the whole communicator, as on the endpoint of the streams, because no connection is made twice and a rank
 * that one call reaches and another does not could agree on nothing. It is never taken back; `left` weighs more. Who is
 * there after all finds that out in the shrink.
 */
struct ep_group_remote {
    _Atomic uint32_t waiting;   /* as in its control block */
    _Atomic uint64_t probed_ns; /* when it last probed its peers, by this host's clock */
    _Atomic uint32_t left;
    _Atomic uint32_t lost;       /* it has died, or a connection to it has ended without a farewell */
    _Atomic uint32_t silent;     /* a rail peer: its host answers no more, or did not when its control link ended */
    _Atomic uint32_t cut;        /* a rail peer: its control link has ended otherwise than by its process closing it */
    _Atomic uint64_t reason_for; /* as in its control block */
    char reason[EP_GROUP_REASON_BYTES];
    _Atomic uint32_t aborts;   /* as in its control block: also those behind a failure, which come as none */
    _Atomic uint32_t shrinks;  /* it has begun a shrink since the last of these; written before them */
    _Atomic uint32_t excludes; /* a shrink has passed there without this rank */
    _Atomic uint32_t made;     /* as in its control block */
};

struct ep_group_link; /* link.c */
struct ep_group_job;  /* queue.c */

/* An ep_queue. With jobs only the worker touches what has become of them, without any the caller's thread. */
struct ep_group_queue {
    struct ep_queue base;
    struct ep_group_queue *next; /* of the communicator's; only the caller's thread looks */
    int jobs;                    /* queued or running; under queue_lock */
    ep_status status;            /* the first failure since the last ep_stream_sync() */
    char text[EP_ERROR_TEXT_BYTES];
};

struct ep_group;

/* What a backend supplies to its groups. */
struct ep_group_backend {
    size_t comm_bytes; /* of a communicator, of which struct ep_group is the beginning */
    /* Opens one: ep_backend_ops.comm_open, for the group that a shrink forms. */
    ep_status (*open)(ep_comm *comm, const ep_boot *boot);
    /* NULL, or ends the threads of objects that were not freed: nothing else ends what uses the communicator. */
    void (*stop)(struct ep_group *group);
};

struct ep_group {
    ep_comm *comm;
    const struct ep_group_backend *backend;
    struct ep_shm shm; /* of the own control block */
    struct ep_group_control *control;
    struct ep_group_peer *peers; /* [R]; the own entry has control set */
    int arbiter;                 /* lowest rank on this host: its control block holds the failure of all */
    bool serves;                 /* a thread of this process hands out its segments */
    int first;                   /* first rank of this node */
    int nlocal, local;           /* ranks on this node, own index among them */
    bool one_host;
    bool spin; /* ranks of this host do not outnumber the processors */
    size_t board_row_bytes;
    struct ep_group_descriptor *descriptors;     /* [nlocal] of the last operation, as they were when it began */
    uint64_t operation;                          /* number of the last dispatch or combine */
    uint64_t exchange;                           /* number of the last exchange started */
    int plans;                                   /* number of the last plan */
    struct ep_plan *pending[EP_GROUP_EXCHANGES]; /* plans whose exchange is not complete, oldest first */
    int n_pending;
    struct ep_streams *streams; /* NULL on one node */
    struct ep_net_provider provider;
    struct ep_group_remote *remote; /* [R]; NULL unless nodes are hosts of their own that are linked */
    struct ep_group_link *link;
    struct ep_group_refusal *refusal; /* answers who a shrink has left out that led to this group; NULL: nobody */
    bool excluded;                    /* by a shrink, for good */
    uint32_t untold_aborts; /* calls of ep_comm_abort, of which the last ended a shrink and its leader does not know */
    int link_event;         /* wakes its thread; -1: there is none */
    int shrink_deadlines;   /* that this rank has waited out in its calls of ep_comm_shrink; of all-gathers none */

    _Atomic int64_t object_bytes; /* of low-latency objects, beyond their allocations */
    pthread_mutex_t memory_lock;  /* allocations: the caller's thread and the worker */
    struct ep_group_allocation allocations[EP_GROUP_SLOTS];
    uint32_t next_generation;
    void *stage[EP_GROUP_AT_COUNT]; /* staging for outputs and inputs outside symmetric memory */
    size_t stage_bytes[EP_GROUP_AT_COUNT];

    pthread_mutex_t queue_lock;
    pthread_cond_t queue_changed;
    pthread_t worker;
    bool worker_started, worker_stop;
    bool on_worker;                   /* a job runs on the worker: only who runs jobs looks */
    struct ep_group_job *head, *tail; /* queued and running jobs of all queues */
    struct ep_group_queue queue;      /* the stream NULL, and the first of all queues */
};

/* Copies from memory that a peer may change meanwhile: what follows works on the copy, the compiler reads no more. */
static inline void ep_group_read_shared(void *ret, const void *from, size_t bytes)
{
    memcpy(ret, from, bytes);
    __asm__ volatile("" ::: "memory");
}

static inline struct ep_group *ep_group_of(const ep_comm *comm)
{
    return comm->impl;
}

static inline struct ep_group_control *ep_group_control_of(const struct ep_group *group, int rank)
{
    return group->peers[rank].control;
}

/* Until the peers are known this rank's failures are its own. */
static inline struct ep_group_control *ep_group_arbiter(const struct ep_group *group)
{
    return group->arbiter == group->comm->rank ? group->control : group->peers[group->arbiter].control;
}

/* control.c */
/* comm->impl becomes zeroed memory of the size that the backend names; ep_group_close() frees it. */
ep_status ep_group_open(ep_comm *comm, const ep_boot *boot, const struct ep_group_backend *backend);
void ep_group_close(ep_comm *comm);
/*
 * For another endpoint on the network of a communicator between nodes: the provider, and the parameters that do not
 * depend on what it is for. Both are good as long as the communicator.
 */
void ep_group_net_describe(struct ep_group *group, struct ep_net_provider *ret_provider,
                           struct ep_net_params *ret_params);
/* The same for low latency: one channel, and every rank is a node of its own. `boot`: as long as ret_params. */
void ep_group_net_describe_ranks(struct ep_group *group, const ep_boot *boot, struct ep_net_provider *ret_provider,
                                 struct ep_net_params *ret_params);
/* A connection of such an endpoint that was cut takes its rank with it. */
void ep_group_net_note_lost(struct ep_group *group, struct ep_net *net, int rank);
/* Tells the peers that no more comes from this rank. Part of ep_group_close(); earlier where the rest takes time. */
void ep_group_leave(struct ep_group *group);
size_t ep_group_bytes(const ep_comm *comm);

/* agree.c: a step of creation that succeeds on all ranks or on none. */
struct ep_group_verdict {
    int32_t status;
    int32_t rank; /* that failed: the one that says so, or a peer that it has found dead */
    int32_t asks; /* see ep_group_agree_about() */
    char reason[EP_GROUP_REASON_BYTES];
};

/* To be called when `status` of the public call has just been decided: takes its text. */
void ep_group_verdict_make(struct ep_group_verdict *verdict, const char *call, ep_status status, int rank);
/* EP_OK, or what the rank that failed first says; `mine` is this rank's own. `all` has a verdict every `stride` bytes.
 */
ep_status ep_group_verdict_judge(const char *call, const struct ep_group_verdict *mine, int nranks, const void *all,
                                 size_t stride);
/* All ranks learn whether all have succeeded; `mine` is this rank's own status. */
ep_status ep_group_agree(const ep_boot *boot, int timeout_ms, ep_status mine);
/* The same for a status that is about `rank`. *asks: this rank wants something; afterwards: some rank does. */
ep_status ep_group_agree_about(const ep_boot *boot, int timeout_ms, ep_status mine, int rank, bool *asks);
/* As ep_group_agree() among the ranks of a communicator that is there. */
ep_status ep_group_agree_within(ep_comm *comm, const char *call, ep_status mine);

/*
 * ep_ll_new: sends all ranks this one's status so far and its segment, and compares configurations; ret_all [R] has the
 * segments. Then creation succeeds on all ranks or on none: ep_group_agree_within().
 */
ep_status ep_group_ll_exchange(ep_ll *ll, ep_status mine, const struct ep_group_address *where,
                               struct ep_group_address *ret_all);

/* wait.c, failure.c */
/* Copies a reason that a peer may be overwriting: it ends within its bytes and holds no control characters. */
void ep_group_read_reason(char ret[EP_GROUP_REASON_BYTES], const char from[EP_GROUP_REASON_BYTES]);

struct ep_group_wait {
    struct ep_group *group;
    enum ep_group_phase phase;
    uint64_t deadline_ns, next_probe_ns;
    uint64_t blame_ns; /* 0, or until when a rank that is between two waits is not blamed, behind the deadline */
    /* Of a tolerant wait: that of the rank waited for, until when it is given time to end it, how many it had. */
    uint32_t its_wait;
    uint64_t its_deadline_ns;
    int its_waits;
    int spins;
    int gone;      /* 1 + the rank that the last look found dead or gone */
    bool tolerant; /* report the rank waited for, but do not fail the group: low latency with masking */
    bool polls;    /* the network needs polling: no long sleeps */
    int held;      /* EP_GROUP_HELD_*: whether something of the rank waited for may still be on its way */
};

enum {
    EP_GROUP_HELD_UNKNOWN = 0, /* as the streams of the communicator say */
    EP_GROUP_HELD,
    EP_GROUP_NOT_HELD
};

/* Starts a wait. The deadline is the communicator's. */
void ep_group_wait_begin(struct ep_group_wait *pause, struct ep_group *group, enum ep_group_phase phase);

/* Something moved: the deadline starts anew. */
void ep_group_wait_reset(struct ep_group_wait *pause);

/*
 * To be called when the condition does not hold yet. `seen` is the doorbell as read before the condition was checked;
 * `rank` is waited for. Sleeps until the doorbell rings or a while passes; otherwise the failure.
 */
ep_status ep_group_wait(struct ep_group_wait *pause, uint32_t seen, int rank);
/* The same without the sleep, for who sleeps elsewhere: at least every 20 ms. */
ep_status ep_group_wait_check(struct ep_group_wait *pause, int rank);
void ep_group_wait_end(struct ep_group_wait *pause);

/* Sleeps until the doorbell rings or a while passes, whatever has become of the group. */
void ep_group_wait_doorbell(struct ep_group *group, uint32_t seen);

/* Says for whom this rank waits, and that it probes its peers; returns the time. For waits without an ep_group_wait,
 * too.
 */
uint64_t ep_group_note_wait(struct ep_group *group, int rank, enum ep_group_phase phase);
void ep_group_note_wait_end(struct ep_group *group);

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

/* Publishes a failure and wakes everybody; returns `status` with text. */
ep_status ep_group_set_failure(struct ep_group *group, ep_status status, int failed_rank, enum ep_group_phase phase);
/*
 * The same for a status whose text is the thread's last error: keeps that text, which the peers get as well, unless
 * another failure was first. A status of the 1xx or 2xx kind is this rank's own failure, whoever `failed_rank` is,
 * unless that is a peer that could not hand out its segment. The text names the rank that failed before any other.
 */
ep_status ep_group_set_own_failure(struct ep_group *group, ep_status status, int failed_rank,
                                   enum ep_group_phase phase);

/* An int32_t in a struct that ranks send each other, which has to be the same in those of two ranks. */
struct ep_group_field {
    const char *name;
    size_t at;
};
/* EP_E_MISMATCH with the first of the fields that differs in `mine`, of rank `me`, and `theirs`. call: "ep_...: ", or
 * "". */
ep_status ep_group_compare(const char *call, const struct ep_group_field *fields, size_t n, const void *mine, int me,
                           const void *theirs, int rank);
/* EP_E_MISMATCH and its text alone. */
ep_status ep_group_fail_disagree(const char *call, const char *field, int64_t mine, int me, int64_t theirs, int rank);
ep_status ep_group_fail_calls(uint32_t mine, int me, uint32_t theirs, int rank);
/* `mine` and `theirs`: EP_GROUP_RECV_INDEX ... */
ep_status ep_group_fail_outputs(uint32_t mine, int me, uint32_t theirs, int rank);

/* EP_E_MISMATCH: a value in the memory of `rank` is one that no rank writes. */
ep_status ep_group_fail_damaged(struct ep_group *group, int rank, enum ep_group_phase phase, const char *what,
                                int64_t value);

/* The rank whose ep_comm_abort() is the failure that this rank knows of; -1: there is none, or it is another one. */
int ep_group_aborted_by(const struct ep_group *group);

/* EP_OK, or the failure that this rank or a peer has raised. Cheap. */
ep_status ep_group_check(struct ep_group *group);
/* The same, but only ep_comm_abort counts: for calls that outlive dead peers. */
ep_status ep_group_check_abort(struct ep_group *group);
void ep_group_abort(ep_comm *comm);
ep_status ep_group_poll(ep_comm *comm);
const char *ep_group_phase_name(enum ep_group_phase phase);
/* For a text at a deadline: a rank that cannot be watched may as well be dead. "" for others. */
const char *ep_group_describe_unwatched(const struct ep_group *group, int rank);
/* Certainly. A process of which nothing can be known has not died. */
bool ep_group_peer_dead(const struct ep_group *group, int rank);
/* It has freed its communicator, on whatever host, as far as this rank has heard. */
bool ep_group_has_left(const struct ep_group *group, int rank);
/* Dead, or left: no rank waits for it any more. */
bool ep_group_is_gone(const struct ep_group *group, int rank);

/* What a rank of another host has raised, as its control link says: `word` may be rubbish of rank `from`. */
void ep_group_receive_failure(struct ep_group *group, uint64_t word, int from);
/* Has the thread of the control links look at this rank's state. Async-signal-safe. */
void ep_group_link_wake(struct ep_group *group);
/* What this rank has found itself; 0: nothing, or another rank has. */
uint64_t ep_group_own_report(const struct ep_group *group);

/*
 * link.c: a thread that keeps the control links to the rail peers: heartbeats with the state of all ranks of the node,
 * failures, farewells. open takes the sockets of the network.
 */
ep_status ep_group_link_open(struct ep_group *group);
/* Says farewell, if this rank has left the group. */
void ep_group_link_close(struct ep_group *group);
/* Of a group that is freed; NULL is fine. */
void ep_group_refusal_free(struct ep_group_refusal *refusal);

/* Messages between nodes begin with this. */
struct ep_group_message {
    uint32_t kind;   /* EP_GROUP_MESSAGE_* */
    uint32_t detail; /* board: bytes; route: tokens in this message; row and partial: check of the shape */
    uint64_t number; /* of the exchange or operation; to detect ranks in different calls */
    uint64_t index;  /* of the first token, in the order of the route */
    uint64_t unused; /* keeps what follows aligned to 16 bytes */
};

enum {
    EP_GROUP_MESSAGE_EXCHANGE = 1,
    EP_GROUP_MESSAGE_ROUTE,
    EP_GROUP_MESSAGE_ROW,
    EP_GROUP_MESSAGE_PARTIAL_BF16,
    EP_GROUP_MESSAGE_PARTIAL_F32
};

/* wait.c, between nodes. ep_streams_progress; a broken network fails the group. */
ep_status ep_group_net_progress(struct ep_group *group, enum ep_group_phase phase, bool *ret_moved);

/*
 * Waits for something to move between nodes, or fails. `moved` is what progress said; `node` is waited for, -1: whoever
 * has not taken yet what was sent.
 */
ep_status ep_group_net_step(struct ep_group *group, struct ep_group_wait *pause, uint32_t seen, bool moved, int node);

static inline int ep_group_rail(const struct ep_group *group, int node)
{
    return ep_net_rail_rank(group->comm->rank, group->comm->ranks_per_node, node);
}

/*
 * exchange.c: all-gather of rows of at most board_row_bytes - 16 bytes. start publishes without waiting for peers
 * unless they are EP_GROUP_EXCHANGES exchanges behind; complete makes all rows readable; release gives them up. In
 * order. Rows of other bytes than this rank's are a mismatch of the field that `extent` names, NULL: of the bytes.
 */
struct ep_group_extent {
    const char *field; /* a row has `fixed` bytes, and `each` for each of it */
    size_t fixed, each;
};
ep_status ep_group_exchange_start(struct ep_group *group, enum ep_group_phase phase, const void *row, size_t bytes,
                                  uint64_t *ret_number);
ep_status ep_group_exchange_complete(struct ep_group *group, uint64_t number, enum ep_group_phase phase,
                                     const struct ep_group_extent *extent);
/* Copies `bytes` of the row of `rank` in an exchange between complete and release. */
void ep_group_exchange_read(const struct ep_group *group, uint64_t number, int rank, void *ret_row, size_t bytes);
void ep_group_exchange_release(struct ep_group *group, uint64_t number);

/* collective.c */
ep_status ep_group_barrier(ep_comm *comm);
ep_status ep_group_barrier_on(ep_comm *comm, ep_stream stream);
ep_status ep_group_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);
/* The same as a bootstrap, for what is opened behind the creation. */
ep_boot ep_group_boot(ep_comm *comm);

/* memory.c */
ep_status ep_group_alloc(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status ep_group_free(ep_comm *comm, void *memory);
ep_status ep_group_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status ep_group_free_local(ep_comm *comm, void *memory);
ep_status ep_group_register(ep_comm *comm, void *memory, size_t bytes);
ep_status ep_group_unregister(ep_comm *comm, void *memory);
ep_status ep_group_alloc_internal(struct ep_group *group, size_t bytes, void **ret_memory);
/* Without pages: ep_group_reserve() has to be called for each part of it before anybody touches it. */
ep_status ep_group_alloc_sparse(struct ep_group *group, size_t bytes, void **ret_memory);
ep_status ep_group_reserve(struct ep_group *group, const void *memory, size_t offset, size_t bytes);
void ep_group_free_internal(struct ep_group *group, void *memory);
/* Finds `bytes` at `memory` in this rank's symmetric memory; false if they are not in it. */
bool ep_group_find(struct ep_group *group, const void *memory, size_t bytes, struct ep_group_address *ret_where);
/*
 * The address here of a place in a peer's memory that holds `bytes`, aligned to 16. EP_E_MISMATCH if it does not: then
 * nothing of it may be used. 0 bytes: NULL, whatever the place is.
 */
ep_status ep_group_map(struct ep_group *group, int rank, const struct ep_group_address *where, size_t bytes,
                       void **ret_address);
/* Attaches the segment in a peer's slot, if it is one of that peer's and has at least `bytes`. */
ep_status ep_group_attach_slot(struct ep_group *group, int rank, const struct ep_group_address *where, size_t bytes,
                               struct ep_shm *ret_shm);
/*
 * Maps a segment of a peer, by whatever way the machine allows. EP_E_PEER_DEAD when it has died, EP_E_PEER_LEFT when it
 * lives and has left the group or released the segment, EP_E_MISMATCH when the name is not of a segment of its process.
 * `name` is a copy that no peer changes. timeout_ms: for an owner that has to answer, EP_E_TIMEOUT.
 */
ep_status ep_group_attach(struct ep_group *group, int rank, const struct ep_shm_name *name, int timeout_ms,
                          struct ep_shm *ret_shm);
/*
 * The peer that could not hand out a segment when this thread asked last; -1: none. Forgets it, so that a later failure
 * is not blamed on it: who reports a failure calls it, and who begins a step of creation. Jobs of a queue ask beside
 * the caller's thread.
 */
int ep_group_get_failed_owner(void);
/* What became of a rank whose segment cannot be had: EP_OK if nothing shows. Waits a moment for one that is ending. */
ep_status ep_group_find_outcome(const struct ep_group *group, int rank);
/* Unmaps what the peers have freed. */
void ep_group_unmap_stale(struct ep_group *group);
void ep_group_memory_close(struct ep_group *group);
/* Staging buffer number `which` of at least `bytes`. */
ep_status ep_group_stage(struct ep_group *group, int which, size_t bytes, void **ret_memory);

/* queue.c */
typedef ep_status (*ep_group_job_fn)(void *arguments);
/*
 * Queues a job in `stream`; `arguments` (bytes of them) are copied. In a _sync call it runs on the caller's thread, and
 * its status is that of this function.
 */
ep_status ep_group_submit(struct ep_group *group, ep_stream stream, ep_group_job_fn run, const void *arguments,
                          size_t bytes);
/* Runs a job on the caller's thread, behind all that is queued. */
ep_status ep_group_run(struct ep_group *group, ep_group_job_fn run, void *arguments);
bool ep_group_is_idle(struct ep_group *group);
/* Waits until all queues are empty. */
ep_status ep_group_drain(struct ep_group *group);
/* Waits until the queue is empty, whatever has become of its jobs. */
ep_status ep_group_stream_ready(ep_comm *comm, ep_stream stream);
ep_status ep_group_stream_sync(ep_comm *comm, ep_stream stream);
ep_status ep_group_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status ep_group_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);
/*
 * A status of the 1xx or 2xx kind of a job that the caller does not wait for: the caller cannot correct the call and
 * repeat it, so it fails the communicator. `alone`: of this rank only, its peers find it missing.
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

/* route.c: the rows that one source's tokens become on the ranks of one node. */
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
 * `index` and `row` are [n_tokens,K]; index becomes the route's (freed by ep_group_route_done), row stays the caller's.
 * `home` [E] is the rank of each expert.
 */
ep_status ep_group_route_init(struct ep_group_route *route, int n_tokens, int topk, const int32_t *home, int first_rank,
                              int nlocal, bool expanded, int32_t *index, const int32_t *row);
void ep_group_route_done(struct ep_group_route *route);

/* plan.c */
struct ep_group_plan {
    int number;
    int n_tokens;   /* of the routing that operations run with: the caller may have called an update meanwhile */
    int64_t n_send; /* rows that its tokens become */
    uint64_t exchange;
    int32_t *index;             /* [N,K] as int32, until the route takes it over */
    int32_t *tokens_per_rank;   /* [R] */
    int32_t *tokens_per_node;   /* [nnodes] */
    int32_t *tokens_per_expert; /* [E] */
    bool complete;
    bool orphaned;     /* its user has freed it before its exchange was complete */
    ep_status verdict; /* of the completion, repeated to every later user */
    char verdict_text[256];
    struct ep_group_route own;   /* this rank's tokens on this node */
    struct ep_group_route *rail; /* [nnodes] tokens of the rail peers on this node; own node empty */
    int32_t **net_tokens;        /* [nnodes] this rank's tokens with a row on that node, ascending */
    int32_t *n_net_tokens;       /* [nnodes] */
    int32_t *recv_per_expert;
    int64_t *recv_from_rank;
    int64_t *expert_start;
    int32_t *recv_exact; /* [L] not rounded up */
    void *device;        /* a device backend's part, which it frees itself */
    int64_t *rows_on;    /* [R] rows that each rank receives */
    int64_t *first_row;  /* [R] rank layout: where this rank's rows begin on each rank */
    int32_t *prefix;     /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t *max_tokens; /* [R] that each rank may have after an update */
};

static inline struct ep_group_plan *ep_group_plan_of(const ep_plan *plan)
{
    return plan->impl;
}

ep_status ep_group_plan_open(ep_plan *plan, const ep_plan_args *args);
/*
 * The same in two steps for a backend that counts by itself: prepare makes plan->impl, whose tokens_per_rank and
 * tokens_per_expert the caller fills; publish does the rest. With inner->index freed and NULL no routes are made: the
 * caller keeps them, and first_row says where its rows begin. One node only, or no rows. Both undo everything when they
 * fail; discard does it for a plan that is not published.
 */
ep_status ep_group_plan_prepare(ep_plan *plan);
ep_status ep_group_plan_publish(ep_plan *plan);
void ep_group_plan_discard(ep_plan *plan);
/*
 * A plan of fixed capacity whose counts the hosts never know, because a device reads its routing later: the ranks
 * exchange sizes alone, and wait for each other. On failure nothing of it is left.
 */
ep_status ep_group_plan_exchange_sizes(ep_plan *plan);
void ep_group_plan_close(ep_plan *plan);
ep_status ep_group_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/* Completes the plans up to and including `plan` (NULL: all): exchanges counts and routes. */
ep_status ep_group_plan_complete(struct ep_group *group, ep_plan *plan);
/* Frees the plans that only waited for their exchange. */
void ep_group_plan_drop_pending(struct ep_group *group);
/* Does every rank refuse it? Then an operation on it concerns no other rank. */
static inline bool ep_group_plan_is_refused(const ep_plan *plan)
{
    ep_status verdict = ((const struct ep_group_plan *)plan->impl)->verdict;

    return verdict != EP_OK && verdict / 100 != EP_E_MEMORY / 100;
}

/* shrink.c */
ep_status ep_group_shrink(ep_comm *comm, ep_comm *next);

#endif
