/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.h - the communicator of the CUDA backend. Each of these files has a header of its own, or shares one:
 *
 *   backend.c      the module's table, the calls of epkit/cuda.h
 *   device.c       the wrapper of the CUDA runtime, the current device
 *   comm.c         opening and closing: signals, report, mapping of the peers
 *   nvml.c         the speed of the links
 *   memory.c       symmetric memory of this rank, staging
 *   local.c        memory that this rank allocates or registers alone
 *   map.c          mappings of the peers' memory
 *   reclaim.c      the deferred free list
 *   pool.c         device memory of freed plans, host memory of kernels
 *   plan.c         counting on the device, routes in device memory
 *   update.c       plans of fixed capacity
 *   metadata.c     metadata of plans
 *   layout.c       the layout of a routing without a plan
 *   stream.c       calls in their streams, host waits for them, events
 *   monitor.c      what kernels cannot see: dead processes, failures of peers
 *   report.c       failures that kernels report
 *   dispatch.c     dispatch
 *   combine.c      combine
 *   stage.c        copies between ordinary and staging memory while rows move
 *   lowlatency.c   low latency: calls
 *   ll_open.c      low latency: beginning and end
 *   ll_net.c       low latency: ranks of other nodes
 *   ll_wire.c      low latency: messages between nodes
 *   nodes.c        operations between nodes
 *   nodes_update.c updates of plans between nodes
 *   net_op.c       descriptors of operations between nodes
 *   proxy.c        the thread that sends and receives
 *   op_ring.c      the order of its operations
 *   arenas.c       arenas for rows that go to other nodes
 *   pinned.c       pinned host memory
 *   direct.c       GPU memory that NICs read and write, and a test that they do
 *   module.c       device memory, clocks and baselines for the command
 *   *.cu           kernels and their launch functions
 *
 * The group layer, compiled into this module, is the control plane: control blocks, exchanges, blame, shrink. In an
 * operation the kernels of the ranks synchronise, and their hosts do not: each call launches in its stream and returns.
 * The kernels enforce the deadlines. A monitor thread, which mostly sleeps, reports to them what they cannot see.
 */
#ifndef EP_CUDA_CUDA_H
#define EP_CUDA_CUDA_H

#include "backend/cuda/kernels.h"
#include "backend/cuda/module.h"
#include "backend/cuda/pinned.h"
#include "group/group.h"

#define CUDA_POOL 64 /* cached blocks of freed plans: cudaFree() would wait for running kernels */
#define CUDA_CHECKED_POINTERS 64
#define CUDA_LL_SEGMENTS 128
#define CUDA_MIN_MAJOR 9 /* compute capability: bulk copies */
/* Shared memory that a block needs for its rings of rows: sm_90 and sm_100 have 227 KiB. */
#define CUDA_MIN_SHARED (226 << 10)

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
    _Atomic uint64_t called;                 /* dispatches and combines whose staging is allocated */
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
    uint32_t frees_seen, allocations_seen;
    uint64_t stage_bytes[EP_GROUP_AT_COUNT]; /* bytes of its staging known to be mapped here or not needed */
    struct cuda_signals *signals;            /* as mapped here */
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
    CUDA_HOST_LL,         /* of an ep_ll: ll_open.c */
    CUDA_HOST_WORDS,      /* their number */
};

struct cuda_host_block {
    struct cuda_host_block *next;
    struct cuda_pinned pinned;
    bool used, captured;
};

struct cuda_call;   /* stream.h */
struct cuda_pooled; /* pool.c */
struct cuda_proxy;  /* proxy.c */
struct cuda_ll_net; /* ll_net.c */
struct cuda_lists;  /* lists.h */
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
    int32_t *totals, *totals_device;
    void *scratch; /* of the counting kernel: per expert, then two words */
    uint64_t counted;

    /* Operations run in the order of their calls. */
    cudaEvent_t order, captured_order; /* recorded after the last one, outside captures and in one */
    cudaStream_t stream, captured_stream;
    unsigned long long stream_id; /* of `stream`: the caller may destroy it, and CUDA uses its handle again */
    unsigned long long capture;   /* id of the last capture; 0: there was none */
    uint64_t operations;          /* called outside captures */
    bool copied;       /* the present call has queued a copy: counts as an operation, even if the call fails */
    uint64_t complete; /* of them, known to be complete */
    uint64_t called;   /* dispatches and combines, including those in captures */
    cudaEvent_t end;   /* for host waits */
    int event_words;   /* used ones of the newest block for events */

    uint64_t updates;                /* of plans of fixed capacity */
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
    void *stage[EP_GROUP_AT_COUNT];
    size_t stage_bytes[EP_GROUP_AT_COUNT];
    struct cuda_pooled *pool;

    struct cuda_dispatch last_dispatch; /* for ep_cuda_repeat_bare() */
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

static inline struct cuda_comm *cuda_of(const ep_comm *comm)
{
    return comm->impl;
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
size_t cuda_comm_bytes(const ep_comm *comm);
void cuda_abort(ep_comm *comm);
ep_status cuda_shrink(ep_comm *comm, ep_comm *next);

/* module.c */
void cuda_module_close(struct cuda_comm *cuda);

#endif
