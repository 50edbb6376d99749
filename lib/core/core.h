/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core.h - interface between the core and the backends.
 *
 * The core checks arguments, records failures and passes each call to the backend's table of operations. It accesses a
 * backend only through this table; that of CUDA is in a module that is loaded on demand (core/registry.c). Handles are
 * core structs with a backend part in `impl`.
 */
#ifndef EP_CORE_CORE_H
#define EP_CORE_CORE_H

#include "base/args.h"
#include "base/error.h"
#include "net/emulation.h"

#include <epkit/epkit.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

struct ep_backend_ops;

struct ep_comm {
    const struct ep_backend_ops *ops;
    void *impl;
    uint64_t process; /* ep_process_generation() of its creator: a forked child must not use it */
    int rank, nranks; /* nranks: slots, of which the members are present */
    int n_members;
    uint64_t members[EP_MAX_RANKS / 64];
    int16_t slot_of[EP_MAX_RANKS];    /* of each rank of the bootstrap that made the group */
    uint64_t id_of[EP_MAX_RANKS];     /* `id` of each member */
    uint64_t id;                      /* distinguishes communicators, also of one process in one slot */
    bool is_next;                     /* what another communicator becomes by ep_comm_regroup() */
    uint32_t generation;              /* of the members; plans and low-latency objects of an earlier one are refused */
    int node, nnodes, ranks_per_node; /* ranks_per_node resolved: never 0 once the ranks have agreed */
    bool boot_has_nodes;              /* config.ranks_per_node is that of the bootstrap */
    ep_comm_config config;            /* resolved: defaults filled in */
    ep_net_emulation emulation;       /* of the emulated network between nodes */
    _Atomic int visitors;             /* calls in progress that any thread may make */
    _Atomic int changes;              /* the members are changing: no visitor is let in */
    _Atomic int regroups;             /* a call of ep_comm_regroup() is in progress, at the end of which ... */
    _Atomic int abort_due;            /* ... ep_comm_abort() is repeated */
    _Atomic int failed;               /* ep_status of the first failure; a backend may set one of any kind */
    char error[EP_ERROR_TEXT_BYTES];  /* of the last failure */
    ep_stats stats;
    bool logged;                      /* its failure was logged; under error_lock */
    _Atomic int live;                 /* plans, events and low-latency objects not yet freed */
    char reason[EP_ERROR_TEXT_BYTES]; /* of the failure in `failed` */
    bool blocking; /* the call in progress is a _sync one: it may run at once instead of being queued */
    char shown[EP_ERROR_TEXT_BYTES]; /* returned by ep_comm_last_error(): a copy, as workers may change `error` */
    pthread_mutex_t error_lock;      /* protects error, reason and stats */
    int pool_calls;                  /* allocator callbacks in progress; under the lock of the pools in memory.c */
};

static inline bool ep_comm_has(const ep_comm *comm, int rank)
{
    return comm->members[rank / 64] >> (rank % 64) & 1;
}

/* The lowest member. */
static inline int ep_comm_first(const ep_comm *comm)
{
    int rank = 0;

    while (!ep_comm_has(comm, rank))
        rank++;
    return rank;
}

struct ep_plan {
    ep_comm *comm;
    void *impl;
    uint32_t generation; /* of the members, when it was opened */
    ep_plan_args args;   /* resolved; topk_idx is not kept here. n_tokens: of the last update outside of captures */
    ep_plan_info info;   /* the part that is known without the peers */
    ep_plan_info full;   /* with the peers' counts; valid once `counted` is set, possibly by a worker */
    _Atomic bool counted;
    bool from_mask;          /* created from token_in_rank: args.topk is then the number of ranks */
    bool updated;            /* the counts in info are no longer valid */
    bool settled;            /* no longer of fixed capacity */
    bool captured;           /* the last update was called in a capture, */
    int32_t captured_tokens; /* with this n_tokens */
};

/* The tokens of an operation that is called now, in a capture or not. */
static inline int32_t ep_plan_tokens(const ep_plan *plan, bool capturing)
{
    return capturing && plan->captured ? plan->captured_tokens : plan->args.n_tokens;
}

/* Bytes of a row, */
static inline int64_t ep_row_bytes(int dtype, int64_t hidden)
{
    return hidden * (int64_t)ep_dtype_bytes((ep_dtype)dtype) / (dtype == EP_F4E2M1 ? 2 : 1);
}

/* elements that share a scale, */
static inline int ep_scale_block(int dtype, int scale_type)
{
    return dtype == EP_F4E2M1 ? 16 : scale_type == EP_UE8M0_32 ? 32 : EP_SCALE_BLOCK;
}

/* and words of 4 bytes of a row's scales. */
static inline int64_t ep_words_of_scales(int dtype, int scale_type, int64_t hidden)
{
    int64_t scales = scale_type ? hidden / ep_scale_block(dtype, scale_type) : 0;

    return scale_type == EP_F32 ? scales : scales / 4;
}

static inline int64_t ep_scale_words(const ep_dispatch_args *args)
{
    return args->scale_type == EP_I32 ? args->scale_words
                                      : ep_words_of_scales(args->dtype, args->scale_type, args->hidden);
}

/* Most tokens of a routing of the plan. */
static inline int32_t ep_plan_most_tokens(const ep_plan *plan)
{
    return plan->args.max_tokens > plan->info.n_tokens ? plan->args.max_tokens : plan->info.n_tokens;
}

/*
 * Checks a source_stride, which must give every token of every rank a different number; 0 becomes the plan's
 * max_tokens.
 */
ep_status ep_plan_check_stride(const char *call, const ep_plan *plan, int n_tokens, int32_t *stride);

/* What is known of the plan now. All accesses to a plan's info use this. */
static inline const ep_plan_info *ep_plan_info_now(const ep_plan *plan)
{
    return !plan->updated && atomic_load_explicit(&plan->counted, memory_order_acquire) ? &plan->full : &plan->info;
}

/* A dispatch that combines may name. Written by the caller's thread. */
enum ep_ll_open { EP_LL_CLOSED, EP_LL_OPEN_DISPATCH, EP_LL_OPEN_COMBINE };

struct ep_ll_call {
    uint64_t number;      /* 0: none */
    int32_t n_tokens;     /* N of the dispatch */
    int32_t max_tokens;   /* M of the dispatch */
    int32_t topk;         /* K of the dispatch */
    enum ep_ll_open open; /* which half awaits ep_ll_finish() */
    uint64_t combine;     /* number of its last combine, counted from 1 */
};

struct ep_ll {
    ep_comm *comm;
    void *impl;
    uint32_t generation; /* of the members, when it was opened; 0: it is being renewed */
    ep_ll_config config;
    int n_local; /* experts on this rank */
    uint64_t dispatches, combines;
    uint64_t last_open;        /* number of the dispatch of the last call with EP_LL_RECV_HOOK */
    struct ep_ll_call call[2]; /* dispatch n at n % 2 */
    void *buffer;              /* last returned by ep_ll_get_combine_buffer(), */
    uint64_t buffer_for;       /* for this combine */
};

static inline bool ep_ll_rounds_scales(const ep_ll_dispatch_args *args)
{
    return args->scale_type == EP_UE8M0 || args->scale_type == EP_UE8M0_32 || (args->flags & EP_LL_ROUND_SCALE);
}

/* Arguments that must be equal on all ranks, in one word that is sent with the rows. */
static inline int32_t ep_ll_format(const ep_ll_dispatch_args *args)
{
    return args->out_dtype | args->scale_type << 8 | (int32_t)ep_ll_rounds_scales(args) << 16;
}

static inline int64_t ep_ll_row_bytes(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    return ep_row_bytes(args->out_dtype, ll->config.hidden);
}

static inline int64_t ep_ll_scale_words(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    return ep_words_of_scales(args->out_dtype, args->scale_type, ll->config.hidden);
}

/* Rows of an expert for which recv_scales has room: tiles are whole. */
static inline int64_t ep_ll_scale_rows(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    int64_t rows = (int64_t)ll->comm->nranks * args->max_tokens;

    return args->flags & EP_LL_SWIZZLED_SCALES ? (rows + 127) / 128 * 128 : rows;
}

/* Counters of a combine for the rows of one expert. */
static inline int64_t ep_ll_signal_blocks(const ep_ll *ll, const ep_ll_combine_args *args, int max_tokens)
{
    return ((int64_t)ll->comm->nranks * max_tokens + args->signal_rows - 1) / args->signal_rows;
}

static inline ep_status ep_ll_fail_signal(const ep_comm *comm, int expert, int64_t block, uint32_t value,
                                          uint32_t wanted)
{
    return ep_fail(EP_E_TIMEOUT,
                   "ep_ll_combine: the counter in `signals` of local expert %d, block %lld is %u after %d ms, and "
                   "signal_value %u: the kernel that writes these rows has not run, or counts otherwise",
                   expert, (long long)block, value, comm->config.timeout_ms, wanted);
}

/* What a call about the masks of an ep_ll does, in stream order. */
enum ep_ll_control_kind {
    EP_LL_CONTROL_MASK,
    EP_LL_CONTROL_UNMASK,
    EP_LL_CONTROL_MERGE,
    EP_LL_CONTROL_QUERY,
    EP_LL_CONTROL_BARRIER /* of the ranks that are not masked */
};

struct ep_ll_control {
    enum ep_ll_control_kind kind;
    int rank;          /* MASK, UNMASK; -1: all ranks, as in MERGE */
    const ep_ll *from; /* MERGE */
    int32_t *out;      /* QUERY: [R] */
};

/*
 * A backend. The core has checked every scalar argument before a call; the backend checks data that may be in device
 * memory (the routing, NaN). Entries that a backend does not provide are NULL: the core returns EP_E_UNSUPPORTED with
 * the name of the call.
 */
struct ep_backend_ops {
    uint32_t abi; /* EP_BACKEND_ABI: must match exactly, because module and library are of one build */
    const char *name;

    /* EP_OK if the backend can work on this machine; otherwise the reason is recorded. */
    ep_status (*probe)(void);

    /* All fields of comm but impl are set. Collective over boot. */
    ep_status (*comm_open)(ep_comm *comm, const ep_boot *boot);
    void (*comm_close)(ep_comm *comm);
    size_t (*comm_bytes)(const ep_comm *comm);
    ep_status (*barrier)(ep_comm *comm); /* returns when all ranks have called it */
    ep_status (*barrier_on)(ep_comm *comm, ep_stream stream);
    ep_status (*allgather)(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);
    void (*abort)(ep_comm *comm);
    /*
     * Has a peer failed or aborted? Never blocks, any thread. EP_OK or the failure, with `failed` of comm set; or
     * EP_E_CAPACITY, without a failure, if a queued operation was refused and no wait has reported it.
     */
    ep_status (*poll)(ep_comm *comm);
    void (*get_failed)(const ep_comm *comm, int32_t *ret_failed); /* as ep_comm_get_failed() */
    /*
     * The members of `comm` are about to change to those of `next`. drain waits for queued work, and refuses what the
     * backend cannot do. leave: ends all
     * communication with those of now, and fences off the processes that are no members any more. join: as comm_open,
     * into what has remained: memory, queues, events. `mine`: of leave; all members fail if it is a failure.
     */
    ep_status (*regroup_drain)(ep_comm *comm);
    ep_status (*regroup_leave)(ep_comm *comm, const ep_comm *next);
    ep_status (*regroup_join)(ep_comm *comm, const ep_boot *boot, ep_status mine);

    ep_status (*alloc)(ep_comm *comm, size_t bytes, void **ret_memory);
    ep_status (*free)(ep_comm *comm, void *memory);
    /* Not collective, on any thread, also when the communicator has failed (except alloc_local). */
    ep_status (*alloc_local)(ep_comm *comm, size_t bytes, void **ret_memory);
    ep_status (*free_local)(ep_comm *comm, void *memory);
    ep_status (*register_memory)(ep_comm *comm, void *memory, size_t bytes);
    ep_status (*unregister_memory)(ep_comm *comm, void *memory);

    /*
     * plan->args and plan->comm are set; the backend sets impl and info. The arrays are those of `args` (device memory
     * on a device backend): topk_idx, or the mask and counts if plan->from_mask.
     */
    ep_status (*plan_open)(ep_plan *plan, const ep_plan_args *args);
    void (*plan_close)(ep_plan *plan);
    /* The core then sets what ep_plan_tokens() returns for the caller's next calls; queued work has its own copy. */
    ep_status (*plan_update)(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
    ep_status (*plan_metadata)(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);
    /* Optional. Waits for the counts of a plan that are not known yet; EP_E_STATE if only an operation brings them. */
    ep_status (*plan_wait)(ep_plan *plan);
    ep_status (*plan_sources)(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);
    ep_status (*plan_layout)(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

    /* Optional. Is the stream being captured? Calls in it do not run. */
    bool (*is_capturing)(ep_comm *comm, ep_stream stream);

    bool rows_carry_sources; /* within a node dispatch writes recv_source; otherwise it gets none */
    /* Queue in the stream and return. */
    ep_status (*dispatch)(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
    ep_status (*combine)(ep_plan *plan, const ep_combine_args *args, ep_stream stream);

    ep_status (*queue_new)(ep_comm *comm, ep_queue **ret_queue);
    void (*queue_free)(ep_queue *queue);
    ep_status (*stream_sync)(ep_comm *comm, ep_stream stream);
    ep_status (*stream_wait)(ep_comm *comm, ep_stream stream, ep_event *event);
    ep_status (*stream_call)(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context);

    ep_status (*event_new)(ep_comm *comm, ep_event **ret_event);
    ep_status (*event_record)(ep_comm *comm, ep_stream stream, ep_event **ret_event);
    ep_status (*event_signal)(ep_event *event);
    /* timeout_ms < 0: until the deadlines of the work itself. */
    ep_status (*event_wait)(ep_event *event, int timeout_ms);
    ep_status (*event_query)(const ep_event *event, int *ret_done);
    void (*event_free)(ep_event *event);

    ep_status (*ll_open)(ep_ll *ll);
    void (*ll_close)(ep_ll *ll);
    ep_status (*ll_renew)(ep_ll *ll); /* as ll_open, of one that is open: what graphs refer to stays where it is */
    /*
     * Queue in the stream and return. `number` is that of this dispatch; the core sets ll->dispatches to it when the
     * call has succeeded. args->max_tokens, args->call and `call` are resolved, never 0; ll->call[call % 2] describes
     * that dispatch. The number of the combine is ll->combines + 1; with EP_LL_ZERO_COPY, x is what ll_combine_buffer
     * has returned for it.
     */
    ep_status (*ll_dispatch)(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream);
    ep_status (*ll_combine)(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
    ep_status (*ll_finish)(ep_ll *ll, uint64_t call, ep_stream stream);
    ep_status (*ll_combine_buffer)(ep_ll *ll, void **ret_buffer);
    ep_status (*ll_get_mask)(const ep_ll *ll, int32_t *ret_masked);
    ep_status (*ll_control)(ep_ll *ll, const struct ep_ll_control *control, ep_stream stream);
    /* Memory that ll_open would allocate for this rank; *ret_combine_bytes: maximum of the combine buffers. */
    int64_t (*ll_bytes)(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes);
};

#define EP_BACKEND_ABI 9u

static inline bool ep_is_capturing(ep_comm *comm, ep_stream stream)
{
    return comm->ops->is_capturing && comm->ops->is_capturing(comm, stream);
}

/* The tokens of an operation that is called in the stream now. */
static inline int32_t ep_plan_tokens_in(const ep_plan *plan, ep_stream stream)
{
    return ep_plan_tokens(plan, plan->captured && ep_is_capturing(plan->comm, stream));
}

/*
 * The communicator whose function of ep_stream_call() this thread runs. A backend sets it around that function; the
 * call returns the previous one, because a function may make a call that waits on another communicator.
 */
extern _Thread_local const ep_comm *ep_comm_calling;
EP_PRIVATE_API const ep_comm *ep_comm_note_calling(const ep_comm *comm);

/* The call that opens it: a new member makes what the others renew. */
static inline const char *ep_ll_open_call(const ep_ll *ll)
{
    return ll->generation ? "ep_ll_new" : "ep_ll_renew";
}

/* The first members of the backends' events and queues. */
struct ep_event {
    ep_comm *comm;
};

struct ep_queue {
    ep_comm *comm;
};

/*
 * Copies the thread's last error into the communicator, and marks the communicator as failed if the status is of the
 * 3xx or 4xx group. The status of a failed communicator never changes: from the first such failure on, it returns that
 * status instead of any other of these groups. Otherwise returns `status`; EP_OK does nothing. Any thread; not
 * async-signal-safe.
 */
EP_PRIVATE_API ep_status ep_comm_record(ep_comm *comm, ep_status status);

/*
 * comm.c: around what any thread may do with the group of a communicator. false: another thread changes the members.
 * Async-signal-safe.
 */
EP_PRIVATE_API bool ep_comm_enter(ep_comm *comm);
EP_PRIVATE_API void ep_comm_exit(ep_comm *comm);
/* As ops->poll(); EP_OK while the members change. */
ep_status ep_comm_poll(ep_comm *comm);

/* Sets the statistics of the last operation. Any thread. */
EP_PRIVATE_API void ep_comm_set_stats(ep_comm *comm, const ep_stats *stats);

/* Returns the same status as ep_comm_record(), but does not change the communicator. */
ep_status ep_comm_resolve_status(ep_comm *comm, ep_status status);

/*
 * memory.c: detaches the communicator from the allocator callbacks, and waits for those in progress. The address ranges
 * of memory that they have allocated stay reserved until the allocator frees them.
 */
void ep_pool_detach(ep_comm *comm);

static inline bool ep_status_is_fatal(ep_status status)
{
    return (int)status >= 300;
}

/* registry.c: the backend named in the configuration, or the best one. */
ep_status ep_backend_find(const char *name, const struct ep_backend_ops **ret_ops);

extern const struct ep_backend_ops ep_backend_host;

/* a * b; false if it does not fit int64. */
static inline bool ep_mul(int64_t a, int64_t b, int64_t *ret_product)
{
    return !__builtin_mul_overflow(a, b, ret_product);
}

#endif
