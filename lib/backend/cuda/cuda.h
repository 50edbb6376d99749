/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - inside of the CUDA backend.
 *
 *   device.c    the module's table; choice of the device, the wrapper of the CUDA runtime
 *   comm.c      opening and closing: signals, report, reaching the peers;  links.c   how fast the links are
 *   memory.c    symmetric memory: this rank's allocations, staging;  local.c  what it allocates or registers alone;
 *   map.c       mappings of the peers';  leave.c  its end
 *   plan.c      counting on the device, routes in device memory;  update.c  plans of fixed capacity;
 *               metadata.c  their facts for the caller;  layout.c  that of a routing without a plan
 *   stream.c    calls in their streams, waits of the host for them, events
 *   monitor.c   what kernels cannot see: dead processes, failures of peers;  report.c  what kernels report
 *   dispatch.c, combine.c   one operation each;  stage.c  copies of ordinary memory while rows move
 *   lowlatency.c, ll_open.c  low latency: its calls, its beginning and end;  ll_nodes.c  what goes to other nodes
 *   nodes.c     operations between nodes;  nodes_update.c  updates of plans there, nodes_copy.c  what is there before;
 *               hop.c  what each sends
 *   proxy.c     the thread that sends and receives;  op_ring.c  which is next;  arenas.c, pinned.c  memory for it
 *   module.c    device memory, clocks and baselines for the command
 *   *.cu        kernels and what launches them
 *
 * Control is the group layer's, compiled into this module: control blocks, exchanges, blame, shrink. In an operation
 * the kernels of the ranks synchronise, and their hosts do not: each call launches in its stream and returns. The
 * kernels have the deadlines, and a thread that mostly sleeps, the monitor, tells them what they cannot see.
 */
#ifndef EP_CUDA_CUDA_H
#define EP_CUDA_CUDA_H

#include "backend/cuda/kernels.h"
#include "backend/cuda/module.h"
#include "group/group.h"

#define CUDA_POOL 64 /* blocks of freed plans that are kept: cudaFree() would wait for what runs */
#define CUDA_GOOD_POINTERS 64
#define CUDA_LL_PLACES 16
#define CUDA_LEAST_MAJOR 9 /* compute capability: bulk copies */
/* Shared memory of a block, for rows on their way: sm_90 and sm_100 have 227 KiB. */
#define CUDA_LEAST_SHARED (226 << 10)

/* An allocation of a rank, for its peers. Written before its generation. */
struct cuda_slot {
    _Atomic uint32_t generation; /* 0: empty */
    void *base;                  /* in the owner's process */
    uint64_t bytes;
    cudaIpcMemHandle_t handle;
};

/* In host memory that the peers map: the first internal allocation of each rank. */
#define CUDA_BOARD_SLOT 0
struct cuda_board {
    int32_t device;
    char bus_id[20];
    _Atomic uint32_t reached_by; /* ranks of the node that have memory of this one mapped, a bit for each: leave.c */
    _Atomic uint32_t frees, allocations;             /* so many there were */
    _Atomic uint32_t mapped[CUDA_MAX_RANKS];         /* allocations of each rank of the node that this one has mapped */
    _Atomic uint64_t called;                         /* dispatches and combines: what they need is allocated */
    _Atomic uint64_t stage_bytes[EP_GROUP_AT_COUNT]; /* of staging, once peers can map it */
    struct cuda_slot signals;
    struct cuda_slot slot[CUDA_SLOTS];
};

enum cuda_memory {
    CUDA_MEMORY_INTERNAL,
    CUDA_MEMORY_SYMMETRIC,  /* of ep_alloc() */
    CUDA_MEMORY_LOCAL,      /* of ep_alloc_local() */
    CUDA_MEMORY_REGISTERED, /* the caller's */
    CUDA_MEMORY_KEPT,       /* freed by ep_free_local(): for the next one, since peers have it mapped */
    CUDA_MEMORY_RETIRED,    /* unregistered: its slot waits until no peer has it mapped */
    CUDA_MEMORY_WITHDRAWN   /* in ep_free() */
};

struct cuda_allocation {
    void *base;
    size_t bytes;
    uint32_t generation;
    enum cuda_memory kind;
    bool foreign;        /* the caller frees it: base and bytes are of the allocation that the window is in, */
    void *window;        /* ... which begins here and has so many bytes */
    size_t window_bytes; /* 0: nothing is found in it */
    uint64_t number;     /* of the driver, of a foreign one: never used twice in a process */
    uint32_t announced;  /* the count on the board when the peers were told */
    _Atomic bool mapped; /* all peers have */
};

struct cuda_mapping {
    void *base;
    uint64_t bytes; /* as its owner says */
    uint32_t generation;
};

struct cuda_peer {
    struct cuda_board *board;
    char bus_id[20]; /* a copy: a string whatever the board holds */
    bool same_process;
    uint32_t frees_seen, allocations_seen;
    uint64_t
        stage_bytes[EP_GROUP_AT_COUNT]; /* staging of its that need not be asked for any more: mapped, or not needed */
    struct cuda_mapping signals;
    struct cuda_mapping mappings[CUDA_SLOTS];
};

struct cuda_block {
    void *memory;
    size_t bytes;
    uint64_t behind; /* in the pool: free when so many operations are complete */
    bool captured;   /* graphs name it: it is for what is captured alone, and is not freed before the communicator */
};

struct cuda_call;   /* below: stream.c */
struct cuda_spare;  /* pool.c */
struct cuda_proxy;  /* proxy.c */
struct cuda_ll_net; /* ll_nodes.c */
struct cuda_lists;  /* lists.h */

struct cuda_comm {
    struct ep_group group; /* first: comm->impl is both */
    int place;             /* of this rank among those of its machine */
    int device, sms, all_sms;
    int default_sms;     /* 0: not asked for yet */
    bool sms_given;      /* ep_cuda_set_sms() has said how many */
    size_t shared_limit; /* shared memory of a block */
    cudaStream_t own;    /* for work of the library that no stream of the caller orders, and that waits for nothing */
    /*
     * What NULL is: CUDA's default stream; but where ranks that are threads share the device a stream of the
     * communicator's, because the default one would be the same for all of them, and their kernels wait for each other.
     */
    cudaStream_t standard;
    int sharing; /* ranks of all nodes that are threads of this process on this device, this one included */
    struct cuda_board *board;
    struct cuda_peer *peers; /* [R]; those of this node are used */
    struct cuda_signals *signals;
    struct cuda_place *places;                           /* device: [ranks of the node, CUDA_SLOTS] */
    struct cuda_place *host_places, *host_places_device; /* the same in host memory, and its address on the device */
    struct cuda_report *report, *report_device;
    int32_t *totals, *totals_device;
    void *scratch; /* of the counting kernel: per expert, then two words */
    uint64_t counted;

    /* Operations run in the order of their calls. */
    cudaEvent_t order, captured_order; /* behind the last one, outside of captures and in one */
    cudaStream_t stream, captured_stream;
    unsigned long long capture; /* number of the last capture; 0: there was none */
    uint64_t operations;        /* called, outside of captures ... */
    uint64_t complete;          /* ... and so many are known to be complete */
    uint64_t called;            /* dispatches and combines, in captures as well */
    cudaEvent_t end;            /* for waits of the host */
    struct cuda_words *words;   /* of the caller's events: stream.c */

    uint64_t updates;                 /* of plans of fixed capacity */
    pthread_mutex_t unsettled_lock;   /* events may be waited for on any thread */
    struct cuda_plan *unsettled;      /* of which the host does not know the counts yet */
    struct cuda_facts_place *facts;   /* all that there are: update.c */
    struct cuda_net_facts *net_facts; /* the same between nodes: nodes_update.c */

    struct cuda_proxy *proxy;     /* between nodes; NULL on one */
    struct cuda_ll_net *ll_nets;  /* of each ep_ll, between nodes */
    atomic_size_t ll_net_bytes;   /* of host memory that these hold; asked by any thread */
    uint64_t net_rows, net_bytes; /* that the last operation sends to other nodes */

    pthread_t monitor;
    bool monitored;
    int stop;            /* eventfd: ends the monitor */
    _Atomic int masking; /* ep_ll with EP_LL_MASK_DEAD that are open */

    pthread_mutex_t memory_lock; /* allocations */
    struct cuda_allocation allocations[CUDA_SLOTS];
    int slots_used; /* slots from here on were never used */
    uint32_t next_generation;
    pthread_mutex_t map_lock; /* mappings of the peers: the caller's thread and the monitor */
    void *stage[EP_GROUP_AT_COUNT];
    size_t stage_bytes[EP_GROUP_AT_COUNT];
    struct cuda_block pool[CUDA_POOL];
    struct cuda_spare *spares; /* blocks that the pool has no place for */

    struct cuda_dispatch last_dispatch; /* for ep_cuda_repeat_bare() */
    struct cuda_combine last_combine;
    struct cuda_shape last_shape[2];

    const void *good_pointers[CUDA_GOOD_POINTERS];
    struct cuda_ll_place {
        void *memory;
        size_t bytes;
        bool used;
    } ll_places[CUDA_LL_PLACES]; /* segments; kept for the next ep_ll when one goes, because peers have them mapped */

    cudaEvent_t clock[2], between; /* module.c; made on first use */
    cudaStream_t lane[EP_CUDA_LANES];
    void *flush;
};

static inline struct cuda_comm *cuda_of(const ep_comm *comm)
{
    return comm->impl;
}

/* Behind the last rank of this node. */
static inline int cuda_end_of_node(const struct cuda_comm *cuda)
{
    return cuda->group.first + cuda->group.nlocal;
}

static inline cudaStream_t cuda_stream_of(const struct cuda_comm *cuda, ep_stream stream)
{
    return stream ? stream : cuda->standard;
}

/* The offset of `bytes` in a block that is divided up; *at moves behind them. */
static inline size_t cuda_carve(size_t *at, size_t bytes)
{
    size_t begin = *at;

    *at += (bytes + 15) / 16 * 16;
    return begin;
}

/* device.c. The status of a call of the CUDA runtime. */
ep_status cuda_status(cudaError_t error, const char *call);
/*
 * Can the kernels of this rank use the memory? EP_E_ARG for the host's, and for that of another GPU. NULL is fine.
 * Pointers that have been found good are remembered.
 */
ep_status cuda_check_pointer(struct cuda_comm *cuda, const char *call, const char *name, const void *pointer);
/*
 * GPUs that ranks get by themselves: those from the first visible one on that the kernels are made for.
 * EP_E_UNSUPPORTED when there are none.
 */
ep_status cuda_count_usable(int *ret_gpus);
#define CUDA_TRY(call) EP_TRY(cuda_status((call), #call))

static inline bool cuda_crosses_nodes(const struct cuda_comm *cuda)
{
    return cuda->group.comm->nnodes > 1;
}

/* The calling thread's current device becomes that of the communicator until cuda_leave(). */
struct cuda_scope {
    int previous; /* -1: it was the communicator's */
    enum cudaStreamCaptureMode mode;
};
ep_status cuda_enter(const struct cuda_comm *cuda, struct cuda_scope *ret_scope);
/* Makes `device` the current one again; not where this process has no context on it (nor for -1). */
void cuda_return_to(int device);
/* A function of the driver, by the runtime: the module does not link it. */
ep_status cuda_find_driver(const char *name, void **ret_function);
void cuda_leave(const struct cuda_scope *scope);
/* The same; memory that is allocated or mapped in between is no part of a capture. */
ep_status cuda_enter_uncaptured(const struct cuda_comm *cuda, struct cuda_scope *ret_scope);
void cuda_leave_uncaptured(struct cuda_scope *scope);

/* links.c. MB/s of all links of a GPU together, in one direction; 0: none, or it cannot be told. */
uint64_t cuda_link_mbps(const char *bus_id);

/* comm.c */
ep_status cuda_comm_open(ep_comm *comm, const ep_boot *boot);
void cuda_comm_close(ep_comm *comm);
size_t cuda_comm_bytes(const ep_comm *comm);
void cuda_abort(ep_comm *comm);
ep_status cuda_shrink(ep_comm *comm, ep_comm *next);

/* memory.c */
ep_status cuda_alloc(ep_comm *comm, size_t bytes, void **ret_memory);
/* The same for the library itself; not collective. */
ep_status cuda_alloc_internal(struct cuda_comm *cuda, size_t bytes, void **ret_memory);
ep_status cuda_free(ep_comm *comm, void *memory);
bool cuda_find(struct cuda_comm *cuda, const void *memory, size_t bytes, struct ep_group_address *ret_where);
/* What the words CUDA_TELL_SLOT() and the next one say of `bytes` at `memory`; false if they are not symmetric. */
bool cuda_tell_place(struct cuda_comm *cuda, const void *memory, size_t bytes, uint32_t ret_words[2]);
void cuda_publish_slot(struct cuda_slot *slot, const struct cuda_mapping *allocation, const cudaIpcMemHandle_t *handle);
/* For the library or the caller, by this rank alone: nothing here waits for a peer. */
ep_status cuda_alloc_kind(struct cuda_comm *cuda, size_t bytes, enum cuda_memory kind, void **ret_memory);
/* Puts it into a slot, with a generation of its own, and tells the peers. Under the lock. EP_E_MEMORY: none is left. */
ep_status cuda_add_allocation(struct cuda_comm *cuda, const struct cuda_allocation *allocation,
                              const cudaIpcMemHandle_t *handle);
/* The last part of it: peers that see the count find the slot. */
void cuda_tell_allocation(struct cuda_comm *cuda, struct cuda_allocation *allocation);
/* The one of that kind that begins at `memory`, as the caller knows it; NULL: none. Under the lock. */
struct cuda_allocation *cuda_find_allocation(struct cuda_comm *cuda, const void *memory, enum cuda_memory kind);

/* local.c */
ep_status cuda_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status cuda_free_local(ep_comm *comm, void *memory);
ep_status cuda_register(ep_comm *comm, void *memory, size_t bytes);
ep_status cuda_unregister(ep_comm *comm, void *memory);

/*
 * map.c. The address here of a place in a peer's memory that holds `bytes`: as ep_group_map(). The size of a peer's
 * allocation is what the peer has published: CUDA tells no size with an IPC handle.
 */
ep_status cuda_map(struct cuda_comm *cuda, int rank, const struct ep_group_address *where, size_t bytes,
                   void **ret_address);
ep_status cuda_map_signals(struct cuda_comm *cuda, int rank);
/* Maps what the peers have allocated since the last call, for the kernels. Any thread; quick where there is nothing. */
ep_status cuda_map_new(struct cuda_comm *cuda);
/*
 * No kernel is launched that waits for a mapping which its own process has still to make: any call of the driver may
 * wait for that kernel and hold the mapping up (bench/NOTES.md).
 *
 * cuda_sync_stages: before a dispatch or combine is launched, whose own staging is allocated. A peer whose rows (of
 * row_bytes[]; 0: not in staging) may need more staging than is mapped here is waited for until it has come to the same
 * call, and what it has allocated is mapped. Hosts wait for each other here alone, and only where staging grows; that
 * the peers have staging for what this rank has in staging is presumed.
 */
ep_status cuda_sync_stages(struct cuda_comm *cuda, const ep_plan *plan, const size_t row_bytes[EP_GROUP_AT_COUNT],
                           enum ep_group_phase phase);
/*
 * Have all peers mapped the memory of the caller that the words of cuda_tell_place() tell of? New memory is waited for,
 * which their monitors take some milliseconds for; false: they are held up, so it has to go through staging.
 */
ep_status cuda_await_mapped(struct cuda_comm *cuda, const uint32_t words[2], bool *ret_mapped);
/* Unmaps what the peers have freed. Waits for what runs on the device. */
void cuda_unmap_freed(struct cuda_comm *cuda);
void cuda_unmap_all(struct cuda_comm *cuda);
/* Staging buffer number `which` of at least `bytes`. */
ep_status cuda_stage(struct cuda_comm *cuda, int which, size_t bytes, void **ret_memory);
/*
 * Allocates staging for a plan whose counts the hosts exchange, before they do: so all have it mapped when the plan is
 * complete, and need not meet in its first operation. For other plans operations allocate, what they need and no more:
 * cuda_sync_stages() takes a peer's staging for what it was when that was enough.
 */
void cuda_reserve_stages(struct cuda_comm *cuda, const ep_plan_args *args);
/* Everything of this rank's; nothing of it runs any more. What peers still reach is freed later. */
void cuda_memory_close(struct cuda_comm *cuda);

/* pool.c */
/* Device memory that is not symmetric, from the pool of freed blocks when one fits that nothing uses any more. */
ep_status cuda_take(struct cuda_comm *cuda, size_t bytes, struct cuda_block *ret_block);
/*
 * The same for a plan that is made in a capture. What another one has given back may be taken at once: graphs run one
 * after the other, and what is in them in the order of the calls.
 */
ep_status cuda_take_captured(struct cuda_comm *cuda, size_t bytes, struct cuda_block *ret_block);
/* What a new one has for `bytes`. */
static inline size_t cuda_block_bytes(size_t bytes)
{
    return bytes + bytes / 4 + 4096;
}
/* What an allocation of symmetric memory has for `bytes`. */
static inline size_t cuda_whole_bytes(size_t bytes)
{
    return (bytes + CUDA_GRANULE) / CUDA_GRANULE * CUDA_GRANULE;
}
/* Frees nothing: it may come in an operation, and in a capture. */
void cuda_give(struct cuda_comm *cuda, const struct cuda_block *block);
/* Under memory_lock. */
size_t cuda_pool_bytes(struct cuda_comm *cuda);
/* Frees what the pool had no place for and nothing uses any more, but for what graphs name. May wait for the device. */
void cuda_pool_trim(struct cuda_comm *cuda);
/* Of a communicator of which nothing runs any more. */
void cuda_pool_close(struct cuda_comm *cuda);

/* leave.c */
/* Tells `rank` that this rank reaches, or no longer reaches, memory of its. */
void cuda_note_reach(struct cuda_comm *cuda, int rank, bool reaches);
/* Symmetric memory and signals of a communicator that closes: freed as soon as no peer reaches them. */
void cuda_leave_memory(struct cuda_comm *cuda);
/*
 * Frees what communicators that are closed have left, as far as no peer reaches it: on device `own`, and on those where
 * no communicator is open; CUDA_ALL_DEVICES: on all. Any thread.
 */
#define CUDA_ALL_DEVICES (-1)
void cuda_settle(int own);
/* A communicator is open on its device, or no longer. */
void cuda_count_open(const struct cuda_comm *cuda, int change);

struct cuda_plan {
    struct cuda_block block;       /* entries, counts, indices */
    struct cuda_block ordered;     /* entries in the order of EP_COMBINE_BY_CHOICE; made on first use */
    struct cuda_block facts_block; /* between nodes: counts for metadata of a plan of exact counts; made on first use */
    struct cuda_block sources;     /* rows of metadata on their way; made on first use */
    const int64_t *exact_facts;    /* those counts: in `block`, or in `facts_block`; NULL: not uploaded */
    struct cuda_route route;
    bool placed;              /* the route is complete */
    struct cuda_lists *lists; /* between nodes; NULL on one */
    /* Device memory. Expanded: [L+1] first rows of this rank's experts; [L] how many there are, without padding. */
    int32_t *expert_start, *expert_exact;

    bool fixed; /* of fixed capacity: update.c. The device alone knows its counts */
    int max_tokens;
    bool captured;       /* made in a capture: its memory is the graph's, and the host learns no counts */
    bool copies_routing; /* that of the new plan is in the host's memory */
    void *routing;
    struct cuda_update update;
    void *scratch;
    size_t scratch_bytes;
    ep_plan *plan;
    struct cuda_facts_place *facts;
    uint64_t expected; /* number of the facts that the host waits for */
    struct cuda_plan *next_unsettled;
};

static inline struct cuda_plan *cuda_plan_of(const ep_plan *plan)
{
    return ((struct ep_group_plan *)plan->impl)->device;
}

/* Rows that buffers of this rank have: those that it receives, or may receive. */
static inline int64_t cuda_plan_rows(const ep_plan *plan)
{
    return cuda_plan_of(plan)->fixed ? plan->args.max_recv_tokens : plan->full.n_recv;
}

/* More memory of a plan, in which it stays. */
static inline ep_status cuda_take_for(struct cuda_comm *cuda, const struct cuda_plan *plan, size_t bytes,
                                      struct cuda_block *ret_block)
{
    return plan->captured ? cuda_take_captured(cuda, bytes, ret_block) : cuda_take(cuda, bytes, ret_block);
}

/* update.c */
ep_status cuda_plan_open_fixed(const struct cuda_call *call, ep_plan *plan, const ep_plan_args *args, bool *ret_queued);
/* What the device has of any plan; nothing where there is none. */
void cuda_plan_free_device(struct cuda_comm *cuda, ep_plan *plan);
ep_status cuda_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/* After a wait: plans whose counts are known by now say so. */
void cuda_plans_settle(struct cuda_comm *cuda);
/* EP_E_CAPACITY once, where an operation could not be done because a rank would have received too much. */
ep_status cuda_check_refused(struct cuda_comm *cuda);
void cuda_facts_close(struct cuda_comm *cuda);

/* metadata.c */
/* Bytes of the counts of a plan that metadata reads, and these counts in host memory. */
size_t cuda_plan_facts_bytes(const ep_plan *plan);
void cuda_plan_write_facts(const ep_plan *plan, int64_t *ret_facts);
ep_status cuda_plan_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);

/* layout.c */
ep_status cuda_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

/* plan.c */
ep_status cuda_plan_open(ep_plan *plan, const ep_plan_args *args);
/* What a route is by the plan's arguments, without its memory. */
struct cuda_route cuda_route_shape(const ep_plan *plan);
/* A copy of `bytes` of routing in host memory, in the order of `stream`; the caller frees it. */
ep_status cuda_fetch_routing(const void *topk_idx, size_t bytes, cudaStream_t stream, void **ret_copy);
void cuda_plan_close(ep_plan *plan);
ep_status cuda_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);
/* Completes the plan with its peers, if that has not been done, and its route. */
ep_status cuda_plan_ready(struct cuda_comm *cuda, ep_plan *plan, bool capturing, const struct cuda_route **ret_route);
/* Rows of this rank's tokens in its own memory and in that of the others: the statistics of an operation. */
void cuda_plan_count(const ep_plan *plan, uint64_t row_bytes);

/*
 * stage.c. Is the ordinary memory of this rank, in rows of `row_bytes`, copied while the rows move? Else before or
 * behind the kernel.
 */
bool cuda_copies_along(const struct cuda_comm *cuda, const ep_plan *plan, size_t row_bytes);
/* What the kernel is told, but for the memory. `copies`: blocks of it copy. */
void cuda_fill_stage(const struct cuda_comm *cuda, const ep_plan *plan, bool copies, struct cuda_stage *ret_stage);
/* Multiprocessors that move rows, and those that copy, of an operation. */
void cuda_share_sms(const struct cuda_comm *cuda, bool copies, int *ret_movers, int *ret_copiers);
/* Rings of the copying warps, in the shape that the movers have, with slots as theirs or larger. */
void cuda_fit_copiers(const struct cuda_comm *cuda, size_t slot, struct cuda_stage *stage, struct cuda_shape *shape);
/* Parts of a copy of `bytes` that is ahead of the movers, once its rings are known. */
int32_t cuda_parts_ahead(const struct cuda_stage *stage, const struct cuda_shape *shape, int64_t bytes);
/* Rows of other ranks' tokens on this rank. */
int64_t cuda_rows_of_others(const struct cuda_comm *cuda, const ep_plan *plan);

/* stream.c */
/* A call that queues in a stream. */
struct cuda_call {
    struct cuda_comm *cuda;
    cudaStream_t stream;
    unsigned long long capture; /* not 0: the stream is being captured; what is queued runs when the graph does */
    struct cuda_scope scope;
};

/*
 * Begins a call: the communicator is sound, and its device is the current one. operation: what is queued in the stream
 * from now on comes behind the operations that were called before. end: `status` is that of the call; queued: something
 * is.
 */
ep_status cuda_call_begin(struct cuda_comm *cuda, ep_stream stream, bool operation, struct cuda_call *ret_call);
ep_status cuda_call_end(struct cuda_call *call, ep_status status, bool queued);
/* EP_OK, or the failure that a kernel, this rank or a peer has found. */
ep_status cuda_check(struct cuda_comm *cuda);
/* Until the event is complete, or the communicator has failed and what runs has had time to end. Sleeps. */
ep_status cuda_wait_event(struct cuda_comm *cuda, cudaEvent_t event, enum ep_group_phase phase);
/* Waits for all operations that were called. */
ep_status cuda_drain(struct cuda_comm *cuda);
ep_status cuda_stream_sync(ep_comm *comm, ep_stream stream);
ep_status cuda_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status cuda_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);
ep_status cuda_event_new(ep_comm *comm, ep_event **ret_event);
ep_status cuda_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);
ep_status cuda_event_signal(ep_event *event);
ep_status cuda_event_wait(ep_event *event, int timeout_ms);
ep_status cuda_event_query(const ep_event *event, int *ret_done);
void cuda_event_free(ep_event *event);
void cuda_words_close(struct cuda_comm *cuda);
ep_status cuda_barrier_on(ep_comm *comm, ep_stream stream);

/* A host's wait for a word or an event: some microseconds awake, then sleeps that grow. */
struct cuda_backoff {
    uint64_t begin_ns;
    long ns;
};
void cuda_backoff(struct cuda_backoff *backoff);

/* monitor.c */
ep_status cuda_monitor_start(struct cuda_comm *cuda);
void cuda_monitor_stop(struct cuda_comm *cuda);
/* Ends the kernels that run and those that are queued. */
void cuda_stop_kernels(struct cuda_comm *cuda);

/* report.c. Two ranks have told different words: CUDA_TELL_.... */
ep_status cuda_fail_disagree(const struct cuda_comm *cuda, uint32_t word, int rank, uint32_t mine, uint32_t theirs);
/* The failure that a kernel has reported, or EP_OK. Any thread. */
ep_status cuda_check_reported(struct cuda_comm *cuda);
/* Waits until the routing number cuda->counted is counted, in `stream`. */
ep_status cuda_wait_counted(struct cuda_comm *cuda, cudaStream_t stream);
void cuda_fill_waits(struct cuda_comm *cuda, enum ep_group_phase ready, enum ep_group_phase done,
                     struct cuda_waits *ret_waits);

/* ll_open.c */
ep_status cuda_ll_open(ep_ll *ll);
void cuda_ll_close(ep_ll *ll);
int64_t cuda_ll_bytes(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes);
/* Multiprocessors that a low-latency call takes: all, shared with the ranks that are threads on the same device. */
int cuda_ll_sms(const struct cuda_comm *cuda);

/* lowlatency.c */
ep_status cuda_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream);
ep_status cuda_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
ep_status cuda_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream);
ep_status cuda_ll_set_mask(ep_ll *ll, int rank, bool on, ep_stream stream);
ep_status cuda_ll_query_mask(ep_ll *ll, int32_t *out, ep_stream stream);
ep_status cuda_ll_barrier(ep_ll *ll, ep_stream stream);
ep_status cuda_ll_combine_buffer(ep_ll *ll, void **ret_buffer);
ep_status cuda_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

/* module.c */
void cuda_module_close(struct cuda_comm *cuda);

/* dispatch.c, combine.c */
ep_status cuda_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
ep_status cuda_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream);

#endif
