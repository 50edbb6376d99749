/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - the communicator of the CUDA backend, and its calls. plan.h has those on plans, proxy.h those between nodes.
 *
 *   backend.c      the module's table, the calls of epkit/cuda.h
 *   device.c       the wrapper of the CUDA runtime, the current device
 *   comm.c         opening and closing: signals, report, mapping of the peers
 *   regroup.c      other members
 *   nvml.c         the speed of the links
 *   memory.c       symmetric memory of this rank, and what it allocates or registers alone; staging
 *   peer_map.c          mappings of the peers' memory
 *   reclaim.c      the deferred free list
 *   pool.c         device memory of freed plans, pinned host memory
 *   plan.c         counting on the device, routes in device memory
 *   update.c       plans of fixed capacity
 *   metadata.c     metadata of plans; the layout of a routing without a plan
 *   stream.c       calls in their streams, host waits for them, events
 *   report.c       failures that kernels report; the monitor, for what they cannot see
 *   dispatch.c     dispatch
 *   combine.c      combine
 *   stage.c        copies between ordinary and staging memory while rows move
 *   lowlatency.c   low latency: beginning, calls and end
 *   ll_net.c       low latency: ranks of other nodes
 *   ll_wire.c      low latency: messages between nodes
 *   nodes.c        operations between nodes
 *   nodes_update.c updates of plans between nodes
 *   net_op.c       descriptors of operations between nodes
 *   proxy.c        the thread that sends and receives
 *   op_ring.c      the order of its operations
 *   arenas.c       arenas for rows that go to other nodes; GPU memory that NICs access, and a test that they do
 *   module.c       device memory, clocks and baselines for the command
 *   *.cu           kernels and their launch functions
 *
 * The group layer, compiled into this module, is the control plane: control blocks, exchanges, blame. In an
 * operation the kernels of the ranks synchronise, and their hosts do not: each call launches in its stream and returns.
 * The kernels enforce the deadlines. A monitor thread, which mostly sleeps, reports to them what they cannot see.
 */
#ifndef EP_CUDA_CUDA_H
#define EP_CUDA_CUDA_H

#include "backend/cuda/kernels.h"
#include "backend/cuda/module.h"
#include "group/group.h"

#define CUDA_POOL 64 /* cached blocks of freed plans: cudaFree() would wait for running kernels */
#define CUDA_CHECKED_POINTERS 64
#define CUDA_LL_SEGMENTS 128
#define CUDA_MIN_MAJOR 9 /* compute capability: bulk copies */
/* Shared memory that a block needs for its rings of rows: sm_90 and sm_100 have 227 KiB. */
#define CUDA_MIN_SHARED (226 << 10)

/*
 * Memory that kernels use until the communicator closes. Host memory comes from mmap() and is registered with CUDA, so
 * that it remains valid if CUDA shuts down before the threads of the communicator, its monitor and its proxy, end:
 * memory of cudaHostAlloc() is freed with the context, at exit(), while they read it.
 */
struct cuda_pinned {
    void *memory, *device; /* zeroed; its device address */
    size_t bytes;          /* whole pages */
};

/* Memory that is kept until all of it is freed. Zeroed: empty. */
struct cuda_kept {
    struct kept_allocation *first;
    size_t pinned_bytes, device_bytes;
};

/* EP_E_MEMORY, or the error of CUDA. Earlier allocations are not affected. */
ep_status cuda_keep_pinned(struct cuda_kept *memory, size_t bytes, struct cuda_pinned *ret_pinned);
/* On the current device; not zeroed. */
ep_status cuda_keep_device(struct cuda_kept *memory, size_t bytes, void **ret_memory);
/* The last allocation stays unused: what follows passes over it. */
void cuda_kept_retire(struct cuda_kept *memory);
/* The next allocation after *at, which is NULL at first; false: there is none. Of device memory .memory is NULL. */
bool cuda_kept_next(const struct cuda_kept *memory, const struct kept_allocation **at, struct cuda_pinned *ret_next);
/* Zeroes all of it, which nothing may use meanwhile. */
ep_status cuda_kept_clear(const struct cuda_kept *memory, cudaStream_t stream);
/* The kernels and the threads that use it must have ended. */
void cuda_kept_free(struct cuda_kept *memory);

/* An allocation that a rank publishes to its peers. The generation is written last. */
struct cuda_slot {
    _Atomic uint32_t generation; /* 0: empty */
    void *base;                  /* in the owner's process */
    uint64_t bytes;
    cudaIpcMemHandle_t handle;
};

/* The control page of a rank, in host memory that the peers map: its first internal allocation. */
#define CUDA_CTRL_SLOT 0
struct cuda_ctrl {
    char bus_id[20];
    _Atomic uint32_t mapped_by; /* bit mask of the node's ranks that have memory of this one mapped: reclaim.c */
    _Atomic uint32_t frees, allocations;     /* counts */
    _Atomic uint32_t mapped[CUDA_MAX_RANKS]; /* how many allocations of each rank of the node this one has mapped */
    /* Dispatches and combines whose staging is allocated; those in captures. A new member captures alone. */
    _Atomic uint64_t called[2];
    _Atomic uint64_t stage_bytes[EP_GROUP_AT_COUNT]; /* published once peers can map the staging memory */
    struct cuda_slot slot[CUDA_SLOTS];
};
#define CUDA_SIGNALS_SLOT 0 /* of the rank's struct cuda_signals: its first allocation */

enum cuda_memory {
    CUDA_MEMORY_INTERNAL,
    CUDA_MEMORY_SYMMETRIC,  /* of ep_alloc() */
    CUDA_MEMORY_LOCAL,      /* of ep_alloc_local() */
    CUDA_MEMORY_REGISTERED, /* the caller's */
    CUDA_MEMORY_CACHED,     /* freed by ep_free_local(), still mapped by peers: reused by the next allocation */
    CUDA_MEMORY_RETIRED,    /* unregistered: its slot is reused once no peer has it mapped */
    CUDA_MEMORY_FREEING     /* in ep_free() */
};

struct cuda_allocation {
    void *base;
    size_t bytes;
    uint32_t generation;
    enum cuda_memory kind;
    bool foreign;        /* the caller frees it; base and bytes describe the allocation that contains the window */
    void *window;        /* the registered range */
    size_t window_bytes; /* 0: cuda_find() finds nothing in it */
    uint64_t number;     /* the driver's buffer id of a foreign allocation: unique in a process */
    uint32_t published;  /* value of cuda_ctrl.allocations that published it */
    _Atomic bool mapped; /* by all peers */
};

struct cuda_mapping {
    void *base;
    uint64_t bytes; /* as its owner has published */
    uint32_t generation;
};

struct cuda_peer {
    struct cuda_ctrl *ctrl;
    char bus_id[20]; /* a copy that is always terminated */
    bool same_process;
    bool marked; /* this communicator has set its bit in mapped_by there: a new rank in its slot sets the same one */
    uint32_t frees_seen, allocations_seen;
    uint64_t stage_bytes[EP_GROUP_AT_COUNT]; /* bytes of its staging known to be mapped here or not needed */
    struct cuda_mapping mappings[CUDA_SLOTS];
};

struct cuda_block {
    void *memory;
    size_t bytes;
    uint64_t free_after; /* in the pool: free once this many operations are complete */
    bool captured;       /* graphs refer to it: reused in captures alone, and freed with the communicator */
};

/*
 * Pinned host memory that kernels read or write as long as the communicator exists. As with struct cuda_block, memory
 * of plans made in captures (CUDA_HOST_NET_COUNTS) is reused for such plans only. Kernels of a freed plan may still
 * write its memory, so it is reused for the same words only: a host that polls the number of an update must find no
 * other words there.
 */
enum cuda_host_words {
    CUDA_HOST_EVENTS,     /* the caller's events: stream.c */
    CUDA_HOST_COUNTS,     /* of a plan: update.c */
    CUDA_HOST_NET_COUNTS, /* the same between nodes: nodes_update.c */
    CUDA_HOST_LL,         /* of an ep_ll: lowlatency.c */
    CUDA_HOST_WORDS,      /* their number */
};

struct cuda_host_block {
    struct cuda_host_block *next;
    struct cuda_pinned pinned;
    bool used, captured;
};

struct cuda_call;   /* below */
struct cuda_pooled; /* pool.c */
struct cuda_proxy;  /* proxy.c */
struct cuda_ll_net; /* ll_net.c */
struct cuda_lists;  /* plan.h */
struct ep_routing_shape;

struct cuda_comm {
    struct ep_group group; /* first: comm->impl is both */
    char likely_gpu[20];   /* its PCI address, before the device is chosen */
    int device_order;      /* position of this rank among the ranks that see the same GPUs; chooses the device */
    int device, sms, all_sms;
    int default_sms;              /* 0: not determined yet */
    bool sms_given;               /* sms was set by ep_cuda_set_sms() */
    size_t shared_limit;          /* shared memory of a block */
    cudaStream_t internal_stream; /* for work of the library that needs no order with the caller's and never waits */
    /*
     * The stream that NULL stands for: CUDA's default stream. Where ranks that are threads share the device it is a
     * stream of the communicator: kernels of the ranks wait for each other and must not be in one stream.
     */
    cudaStream_t default_stream;
    int sharing; /* ranks of any node that are threads of this process on this device, including this rank */
    struct cuda_ctrl *ctrl;
    struct cuda_peer *peers; /* [R]; those of this node are used */
    struct cuda_signals *signals;
    struct cuda_kept memory;                                           /* of what follows, and of the host blocks */
    struct cuda_map_entry *map_entries;                                /* device: [ranks of the node, CUDA_SLOTS] */
    struct cuda_map_entry *host_map_entries, *host_map_entries_device; /* the same in host memory; its device address */
    struct cuda_report *report, *report_device;
    int32_t *scratch; /* device memory of counting kernels: CUDA_SCRATCH_... */
    struct {
        void *memory;
        size_t bytes;
    } quantized[2]; /* device memory for the rows of EP_DISPATCH_QUANTIZE, of calls and of graphs; grows */

    /* Operations run in the order of their calls. */
    cudaEvent_t order, captured_order; /* recorded after the last one, outside captures and in one */
    cudaStream_t stream, captured_stream;
    unsigned long long stream_id; /* of `stream`: the caller may destroy it, and CUDA uses its handle again */
    unsigned long long capture;   /* id of the last capture; 0: there was none */
    uint64_t operations;          /* called outside captures */
    bool copied;        /* the present call has queued a copy: counts as an operation, even if the call fails */
    uint64_t complete;  /* of them, known to be complete */
    uint64_t called[2]; /* as in struct cuda_ctrl */
    int captured_plans; /* made in the last capture */
    cudaEvent_t end;    /* for host waits */
    int event_words;    /* used ones of the newest block for events */

    uint64_t updates;                /* of plans that the devices make */
    pthread_mutex_t pending_lock;    /* any thread may wait for an event */
    struct cuda_plan *pending_plans; /* plans whose counts the host does not have yet */
    /* Newest first. */
    struct cuda_host_block *host_blocks[CUDA_HOST_WORDS];

    struct cuda_proxy *proxy;     /* between nodes; NULL on one */
    struct cuda_ll_net *ll_nets;  /* of each ep_ll, between nodes */
    atomic_size_t ll_net_bytes;   /* of host memory that these hold; read by any thread */
    uint64_t net_rows, net_bytes; /* sent to other nodes by the last operation */

    pthread_t monitor;
    bool monitored;
    int stop;            /* eventfd: ends the monitor */
    _Atomic int masking; /* number of open ep_ll with EP_LL_MASK_DEAD */

    pthread_mutex_t memory_lock; /* allocations */
    struct cuda_allocation allocations[CUDA_SLOTS];
    int slots_used; /* slots from this one on were never used */
    uint32_t next_generation;
    pthread_mutex_t map_lock; /* mappings of the peers: the caller's thread and the monitor */
    _Atomic bool let_go;      /* there are none any more; written under map_lock */
    void *stage[EP_GROUP_AT_COUNT];
    size_t stage_bytes[EP_GROUP_AT_COUNT];
    struct cuda_pooled *pool;

    struct cuda_dispatch last_dispatch; /* for repeat_bare() of the module */
    struct cuda_combine last_combine;
    struct cuda_shape last_shape[2];

    const void *checked_pointers[CUDA_CHECKED_POINTERS];
    struct cuda_ll_cached_segment {
        void *memory;
        size_t bytes;
        bool used;
    } ll_segments[CUDA_LL_SEGMENTS]; /* reused by the next ep_ll, because peers have them mapped */

    cudaEvent_t clock[2], between; /* module.c; made on first use */
    cudaStream_t copy_stream[EP_CUDA_COPY_STREAMS];
    void *flush;
};

/* A token that names an expert twice is invalid routing. */
static inline bool cuda_checks_distinct(const ep_comm *comm)
{
    return comm->config.flags & EP_COMM_CHECK_DISTINCT;
}

static inline bool cuda_drops_absent(const ep_comm *comm)
{
    return comm->config.flags & EP_COMM_DROP_ABSENT;
}

static inline struct cuda_comm *cuda_of(const ep_comm *comm)
{
    return comm->impl;
}

/* Another member of this node? */
static inline bool cuda_is_peer(const struct cuda_comm *cuda, int rank)
{
    return rank != cuda->group.comm->rank && cuda->peers[rank].ctrl;
}

/* One past the last rank of this node. */
static inline int cuda_end_of_node(const struct cuda_comm *cuda)
{
    return cuda->group.first + cuda->group.nlocal;
}

static inline cudaStream_t cuda_stream_of(const struct cuda_comm *cuda, ep_stream stream)
{
    return stream ? stream : cuda->default_stream;
}

/* Reserves n * bytes of a block at *at, which advances; returns their address, NULL if `memory` is NULL. */
static inline void *cuda_carve(void *memory, size_t *at, size_t n, size_t bytes)
{
    size_t begin = *at;

    *at += (n * bytes + 15) / 16 * 16;
    return memory ? (char *)memory + begin : NULL;
}

static inline bool cuda_crosses_nodes(const struct cuda_comm *cuda)
{
    return cuda->group.comm->nnodes > 1;
}

/* comm.c */
ep_status cuda_comm_open(ep_comm *comm, const ep_boot *boot);
void cuda_comm_close(ep_comm *comm);
/* The steps with the peers, in the group, of a creation or regroup. `mine`: of the steps before. */
ep_status cuda_comm_join(struct cuda_comm *cuda, const ep_boot *boot, ep_status mine);
/* Zeroes what kernels read or write as long as the communicator exists, except the control page. */
ep_status cuda_comm_clear(struct cuda_comm *cuda);

/* regroup.c: as in ep_backend_ops. */
ep_status cuda_regroup_drain(ep_comm *comm);
ep_status cuda_regroup_leave(ep_comm *comm, const ep_comm *next);
ep_status cuda_regroup_join(ep_comm *comm, const ep_boot *boot, ep_status mine);
/* Of a rank that `by` has left out: once it has left, which the others wait for, no kernel of it can write to them. */
void cuda_let_go(struct cuda_comm *cuda, int by);

size_t cuda_comm_bytes(const ep_comm *comm);
void cuda_abort(ep_comm *comm);

/* module.c */
void cuda_module_close(struct cuda_comm *cuda);

/* --- device.c: the wrapper of the CUDA runtime, and the device of a communicator ---------------------------------- */

/* Converts the result of a CUDA runtime call. */
ep_status cuda_status(cudaError_t error, const char *call);
/*
 * Checks that the kernels of this rank can use the memory: EP_E_ARG for host memory and for memory of another GPU. NULL
 * is accepted. Pointers to device and managed memory are remembered.
 */
ep_status cuda_check_pointer(struct cuda_comm *cuda, const char *call, const char *name, const void *pointer);
/* Can kernels read it at full speed: is it device or managed memory? */
ep_status cuda_is_device_memory(struct cuda_comm *cuda, const void *memory, bool *ret_is);
/*
 * Counts the GPUs that ranks get by default: the visible ones from the first on that the kernels support.
 * EP_E_UNSUPPORTED if there are none.
 */
ep_status cuda_count_usable(int *ret_gpus);
#define CUDA_TRY(call) EP_TRY(cuda_status((call), #call))

/* Copies between host and device in any direction, and waits for it. */
ep_status cuda_transfer(struct cuda_comm *cuda, void *to, const void *from, size_t bytes);

/* Makes the communicator's device the current one of the calling thread until cuda_scope_end(). */
struct cuda_scope {
    int previous; /* -1: it was the communicator's */
    bool uncaptured;
    enum cudaStreamCaptureMode mode; /* uncaptured: the previous one */
};
ep_status cuda_scope_begin(const struct cuda_comm *cuda, struct cuda_scope *ret_scope);
/* Makes `device` the current one again, unless it is -1 or this process has no context on it. */
void cuda_restore_device(int device);
/* Looks up a driver function through the runtime: the module does not link the driver. */
ep_status cuda_find_driver(const char *name, void **ret_function);
void cuda_scope_end(struct cuda_scope *scope);
/* cuda_scope_begin_uncaptured() also keeps allocations and mappings in the scope out of a stream capture. */
ep_status cuda_scope_begin_uncaptured(const struct cuda_comm *cuda, struct cuda_scope *ret_scope);
/* A function that returns `call`, made with the communicator's device as the current one. */
#define CUDA_ON_DEVICE(comm, call)                                                                                     \
    do {                                                                                                               \
        struct cuda_scope scope_;                                                                                      \
        ep_status status_ = cuda_scope_begin(cuda_of(comm), &scope_);                                                  \
        if (status_ == EP_OK) {                                                                                        \
            status_ = (call);                                                                                          \
            cuda_scope_end(&scope_);                                                                                   \
        }                                                                                                              \
        return status_;                                                                                                \
    } while (0)

/* Backoff of a host that polls a word or an event: spins for some microseconds, then sleeps for growing times. */
struct cuda_backoff {
    uint64_t begin_ns;
    long ns;
    uint64_t spin_ns; /* 0: some microseconds */
};
void cuda_backoff(struct cuda_backoff *backoff);

/* --- stream.c: calls in their streams, host waits for them, events ------------------------------------------------ */

/* A call that queues in a stream. */
struct cuda_call {
    struct cuda_comm *cuda;
    cudaStream_t stream;
    unsigned long long capture; /* not 0: id of the capture that the stream is in */
    unsigned long long id;      /* of the stream, outside of captures */
    bool queued;                /* set by what queues work of the call in the stream */
    struct cuda_scope scope;
};

/*
 * Begins a call: checks that the communicator has not failed, and makes its device the current one. operation: orders
 * what is queued in the stream from now on after the operations that were called before. cuda_call_end(): `status` is
 * that of the call.
 */
ep_status cuda_call_begin(struct cuda_comm *cuda, ep_stream stream, bool operation, struct cuda_call *ret_call);
ep_status cuda_call_end(struct cuda_call *call, ep_status status);
/* Is the stream being captured, or is its capture invalid? */
bool cuda_is_capturing(ep_comm *comm, ep_stream stream);
/* Sleeps until the event is complete, or until the communicator has failed and its kernels have had time to end. */
ep_status cuda_wait_event(struct cuda_comm *cuda, cudaEvent_t event, enum ep_group_phase phase);
/* Waits until a kernel has written that number to a word of host memory. */
ep_status cuda_wait_number(struct cuda_comm *cuda, const uint64_t *word, uint64_t number, enum ep_group_phase phase);
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
ep_status cuda_barrier_on(ep_comm *comm, ep_stream stream);

/* --- memory.c: symmetric memory of this rank, and mappings of that of the peers ----------------------------------- */

ep_status cuda_alloc(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status cuda_free(ep_comm *comm, void *memory);
bool cuda_find(struct cuda_comm *cuda, const void *memory, size_t bytes, struct ep_group_address *ret_address);
/*
 * The two descriptor words of a buffer, CUDA_DESC_SLOT() and the offset, for `bytes` at `memory`; false if they are not
 * in symmetric memory.
 */
bool cuda_desc_buffer(struct cuda_comm *cuda, const void *memory, size_t bytes, uint32_t ret_words[2]);
/* For the library or the caller; not collective, and never waits for a peer. */
ep_status cuda_alloc_kind(struct cuda_comm *cuda, size_t bytes, enum cuda_memory kind, void **ret_memory);
ep_status cuda_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory);
ep_status cuda_free_local(ep_comm *comm, void *memory);
ep_status cuda_register(ep_comm *comm, void *memory, size_t bytes);
ep_status cuda_unregister(ep_comm *comm, void *memory);

/*
 * peer_map.c. Maps a remote address that holds `bytes`, as ep_group_map(). The size of a peer's allocation is the one
 * that the peer has published: a CUDA IPC handle carries no size.
 */
ep_status cuda_map(struct cuda_comm *cuda, int rank, const struct ep_group_address *address, size_t bytes,
                   void **ret_address);
/* Maps what the peers have allocated since the last call, for the kernels. Any thread; cheap if there is nothing. */
ep_status cuda_map_new(struct cuda_comm *cuda);
/* ep_comm_barrier(), after which all is mapped that a rank had allocated before it. */
ep_status cuda_barrier(ep_comm *comm);
/*
 * Called before a dispatch or combine is launched, once this rank's own staging is allocated. No kernel may be launched
 * that waits for a mapping which its own process has still to make: any driver call may wait for that kernel, and so
 * delay the mapping (docs/decisions.md).
 *
 * If a peer's rows (of row_bytes[]; 0: not in staging) may need more staging than is mapped here, waits until the peer
 * has it or has reached the same call, and maps what it has allocated. This is the only place where hosts wait for each
 * other, and only when staging grows. Assumes that the peers use staging for the same buffers as this rank.
 */
ep_status cuda_sync_stages(const struct cuda_call *call, const ep_plan *plan, const size_t row_bytes[EP_GROUP_AT_COUNT],
                           enum ep_group_phase phase);
/*
 * Have all peers mapped the caller's memory that the words of cuda_desc_buffer() describe? Waits for new memory: the
 * monitors of the peers map it within some milliseconds. false: they are delayed, and the rows must go through staging.
 */
ep_status cuda_await_mapped(struct cuda_comm *cuda, const uint32_t words[2], bool *ret_mapped);
/* Unmaps what the peers have freed. Waits for running kernels. */
ep_status cuda_unmap_freed(struct cuda_comm *cuda);
void cuda_unmap_all(struct cuda_comm *cuda);
/* Returns staging buffer `which` with at least `bytes`. */
ep_status cuda_stage(struct cuda_comm *cuda, int which, size_t bytes, void **ret_memory);
/*
 * Allocates staging for a plan whose hosts wait for the counts, before these are exchanged: all ranks have published it
 * when the plan is complete, and its first operation does not synchronise the hosts. For other plans each operation
 * allocates exactly what it needs, as cuda_sync_stages() assumes.
 */
void cuda_reserve_stages(struct cuda_comm *cuda, const ep_plan_args *args);
/* Frees this rank's memory once none of its kernels runs. Frees what peers still have mapped later. */
void cuda_memory_close(struct cuda_comm *cuda);
/* Size of an allocation of symmetric memory for `bytes`. */
static inline size_t cuda_whole_bytes(size_t bytes)
{
    return (bytes + CUDA_GRANULE) / CUDA_GRANULE * CUDA_GRANULE;
}

/* reclaim.c */
/* Publishes to `rank` whether this rank has memory of it mapped. */
void cuda_set_mapped_by(struct cuda_comm *cuda, int rank, bool mapped);
/* Symmetric memory of a communicator that closes: freed once no peer has them mapped. */
void cuda_defer_free(struct cuda_comm *cuda);
/*
 * Frees deferred memory of closed communicators that no peer has mapped: on device `own`, and on devices without an
 * open communicator; CUDA_ALL_DEVICES: on all. Any thread.
 */
#define CUDA_ALL_DEVICES (-1)
void cuda_reclaim(int own);
/* Counts the open communicators of a device: `change` is 1 or -1. */
void cuda_count_open(const struct cuda_comm *cuda, int change);

/* --- pool.c: device memory of freed plans, host memory of kernels ------------------------------------------------- */

/*
 * What uses a block. One of operations, which run in the order of their calls, may be one that queued operations still
 * use, as may one of graphs, which run one after the other, and their nodes in the order of the calls.
 */
enum cuda_block_use { CUDA_BLOCK_ANY, CUDA_BLOCK_OF_OPERATIONS, CUDA_BLOCK_OF_GRAPHS };
/* Allocates device memory that is not symmetric: a block of the pool if an unused one fits. */
ep_status cuda_pool_alloc(struct cuda_comm *cuda, size_t bytes, enum cuda_block_use use, struct cuda_block *ret_block);
/* Size of a new block for `bytes`. */
static inline size_t cuda_block_bytes(size_t bytes)
{
    return bytes + bytes / 4 + 4096;
}
/* Returns a block to the pool. Calls no cudaFree(), so it is allowed during an operation and in a capture. */
void cuda_pool_free(struct cuda_comm *cuda, const struct cuda_block *block);
/* An unused host block of at least `bytes`, or a new one; `fresh`: always a new one. The caller's thread only. */
ep_status cuda_host_block_acquire(struct cuda_comm *cuda, const char *call, enum cuda_host_words words, size_t bytes,
                                  bool captured, bool fresh, struct cuda_host_block **ret_block);
/* Under memory_lock. */
size_t cuda_pool_bytes(struct cuda_comm *cuda);
/* Frees the unused blocks beyond the size of the pool, except those that graphs refer to. May wait for the device. */
void cuda_pool_trim(struct cuda_comm *cuda);
/* Frees the pool and the host blocks of a communicator that has no running kernels. */
void cuda_pool_close(struct cuda_comm *cuda);

/* --- stage.c: buffers that peers access, copies between ordinary and staging memory while rows move --------------- */

/*
 * Finds where the peers access a buffer of `bytes`, and describes it: `memory` itself if it is symmetric and
 * all have it mapped; otherwise, and if it is NULL, staging of `stage_bytes`.
 */
ep_status cuda_place_buffer(struct cuda_comm *cuda, struct cuda_op_desc *desc, int which, void *memory, size_t bytes,
                            size_t stage_bytes, void **ret_placed);
/* Multiprocessors for work of one rank before or after the rows move. */
int cuda_side_sms(const struct cuda_comm *cuda);
/*
 * Is the ordinary memory of this rank, in rows of `row_bytes`, copied while the rows move? Otherwise it is copied
 * before or after the kernel. `least`: bytes of other ranks' rows.
 */
bool cuda_overlaps_copies(const struct cuda_comm *cuda, const ep_plan *plan, size_t row_bytes, size_t least);
/* What blocks of the kernel do for staging memory while the others move rows: sums are struct cuda_reduce. */
enum cuda_writes { CUDA_WRITES_NOTHING, CUDA_WRITES_COPIES, CUDA_WRITES_SUMS };
/*
 * Fills the kernel's arguments, except the memory, and the number of blocks that move rows. Blocks that copy have rings
 * of at least `slot` bytes within the shape of the others.
 */
void cuda_fill_stage(const struct cuda_comm *cuda, int n_tokens, enum cuda_writes writes, size_t slot,
                     struct cuda_stage *ret_stage, struct cuda_shape *shape);
/* Rows of other ranks' tokens on this rank; an estimate where only the devices know them. */
int64_t cuda_rows_of_others(const struct cuda_comm *cuda, const ep_plan *plan);

/* --- report.c: what kernels report to their host, and what it tells them ------------------------------------------ */

ep_status cuda_monitor_start(struct cuda_comm *cuda);
void cuda_monitor_stop(struct cuda_comm *cuda);
/* Makes running and queued kernels end without a result. */
void cuda_stop_kernels(struct cuda_comm *cuda);

/* Fails the group: two ranks have published different descriptor words (CUDA_DESC_...). */
ep_status cuda_fail_disagree(const struct cuda_comm *cuda, enum ep_group_phase phase, uint32_t word, int rank,
                             uint32_t mine, uint32_t theirs);
/* The failure that a kernel has reported, or EP_OK. Any thread may call it. */
ep_status cuda_check_reported(struct cuda_comm *cuda);
void cuda_fill_waits(struct cuda_comm *cuda, enum ep_group_phase ready, enum ep_group_phase done,
                     struct cuda_waits *ret_waits);

/* EP_OK, or the failure that a kernel, this rank or a peer has reported. */
ep_status cuda_check(struct cuda_comm *cuda);

/* --- the calls on plans and on objects of low latency ------------------------------------------------------------- */

ep_status cuda_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
ep_status cuda_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream);

/* Or renews one that is open. */
ep_status cuda_ll_open(ep_ll *ll);
/* Until they are renewed, calls on the open ep_ll, which graphs may contain, reach no rank and fail. `running`: kernels
 * of it may run, and find their own segment in place of those of the peers. */
ep_status cuda_ll_void_all(struct cuda_comm *cuda, bool running);
void cuda_ll_close(ep_ll *ll);
int64_t cuda_ll_bytes(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes);
/* Multiprocessors of a low-latency call: all, divided among the ranks that are threads on the same device. */
int cuda_ll_sms(const struct cuda_comm *cuda);
ep_status cuda_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream);
ep_status cuda_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
ep_status cuda_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream);
ep_status cuda_ll_control(ep_ll *ll, const struct ep_ll_control *control, ep_stream stream);
ep_status cuda_ll_combine_buffer(ep_ll *ll, void **ret_buffer);
ep_status cuda_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

#endif
