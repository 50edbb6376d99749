/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core.h - what the core shares with the backends.
 *
 * The core checks arguments, remembers failures and hands each call to the backend's table of operations. It knows
 * nothing else of a backend: CUDA comes in through the same table, from a module that is loaded on demand
 * (core/registry.c). Handles are core structs with a backend part behind `impl`.
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
    uint64_t process; /* ep_process_generation() of the one that made it: a forked child must not use it */
    int rank, nranks;
    int node, nnodes, ranks_per_node; /* ranks_per_node resolved: never 0 once the ranks have agreed */
    bool boot_has_nodes;              /* config.ranks_per_node is what the boot says */
    ep_comm_config config;            /* resolved: defaults filled in */
    ep_net_emulation emulation;       /* of the emulated network between nodes */
    _Atomic int failed;               /* ep_status of the first failure; a backend may set one of any kind */
    char error[EP_ERROR_TEXT_BYTES];  /* of the last failure */
    ep_stats stats;
    bool shrunk;                      /* a newer group has replaced this one */
    bool excluded;                    /* the others have formed a newer group without this rank */
    bool logged;                      /* its failure is in the log; under error_lock */
    int inherited_device;             /* 1 + the device of the group that this one continues; 0: it may choose */
    _Atomic int live;                 /* plans, events and low-latency objects not yet freed */
    char reason[EP_ERROR_TEXT_BYTES]; /* of the failure in `failed` */
    bool blocking; /* the call under way is a _sync one: nothing need be queued if it can run at once */
    char shown[EP_ERROR_TEXT_BYTES]; /* what ep_comm_last_error() handed out: workers may change `error` meanwhile */
    pthread_mutex_t error_lock;      /* guards error, reason and stats */
    int pool_calls;                  /* allocator callbacks that use it now; under the lock of the pools in memory.c */
};

struct ep_plan {
    ep_comm *comm;
    void *impl;
    ep_plan_args args; /* resolved; topk_idx is not kept here */
    ep_plan_info info; /* as far as it is known without the peers */
    ep_plan_info full; /* with their counts, once `counted` is set: maybe by a worker while the caller looks on */
    _Atomic bool counted;
    bool from_mask; /* made from token_in_rank: args.topk is then the number of ranks */
    bool updated;   /* info has no counts any more */
};

/* What is known of the plan now. Read all of a plan's info through this. */
static inline const ep_plan_info *ep_plan_info_now(const ep_plan *plan)
{
    return !plan->updated && atomic_load_explicit(&plan->counted, memory_order_acquire) ? &plan->full : &plan->info;
}

/* A dispatch that combines may name, as the caller's thread has called it. */
enum ep_ll_open { EP_LL_CLOSED, EP_LL_OPEN_DISPATCH, EP_LL_OPEN_COMBINE };

struct ep_ll_call {
    uint64_t number;      /* 0: none */
    int32_t n_tokens;     /* N of the dispatch */
    int32_t max_tokens;   /* M of the dispatch */
    enum ep_ll_open open; /* which half awaits ep_ll_finish() */
    uint64_t combine;     /* number of the combine that is open, counted from 1 */
};

struct ep_ll {
    ep_comm *comm;
    void *impl;
    ep_ll_config config;
    int n_local; /* experts on this rank */
    uint64_t dispatches, combines;
    uint64_t last_open;        /* dispatch that the last call with EP_LL_RECV_HOOK was of */
    struct ep_ll_call call[2]; /* dispatch n at n % 2 */
};

/*
 * A backend. Core has checked every scalar argument before it calls; what needs a look at memory of the device (the
 * routing itself, NaN) is the backend's. Entries that a backend cannot provide are NULL: the core answers
 * EP_E_UNSUPPORTED with the name of the call.
 */
struct ep_backend_ops {
    uint32_t abi; /* EP_BACKEND_ABI: must match exactly, module and library come from one build */
    const char *name;

    /* EP_OK if the backend can work on this machine; otherwise the reason is recorded. */
    ep_status (*probe)(void);

    /* comm is filled but for impl. Collective over boot. */
    ep_status (*comm_open)(ep_comm *comm, const ep_boot *boot);
    void (*comm_close)(ep_comm *comm);
    size_t (*comm_bytes)(const ep_comm *comm);
    ep_status (*barrier)(ep_comm *comm); /* returns when all have come */
    ep_status (*barrier_on)(ep_comm *comm, ep_stream stream);
    ep_status (*allgather)(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);
    void (*abort)(ep_comm *comm);
    /* Has a peer failed or aborted? Never blocks, any thread. EP_OK or the failure, with `failed` of comm set. */
    ep_status (*poll)(ep_comm *comm);
    /*
     * `next` is filled but for rank, nranks, node and impl, which the survivors agree on; they also compare their
     * configurations (ep_config_agree) before anything of the new group is opened.
     */
    ep_status (*shrink)(ep_comm *comm, ep_comm *next);

    ep_status (*alloc)(ep_comm *comm, size_t bytes, void **ret_memory);
    ep_status (*free)(ep_comm *comm, void *memory);
    /* By this rank alone, on any thread, also when the communicator has failed (but for alloc_local). */
    ep_status (*alloc_local)(ep_comm *comm, size_t bytes, void **ret_memory);
    ep_status (*free_local)(ep_comm *comm, void *memory);
    ep_status (*register_memory)(ep_comm *comm, void *memory, size_t bytes);
    ep_status (*unregister_memory)(ep_comm *comm, void *memory);

    /*
     * plan->args and plan->comm are set, impl and info are the backend's. The arrays are those of `args` (device memory
     * on a device backend): topk_idx, or the mask and counts when plan->from_mask.
     */
    ep_status (*plan_open)(ep_plan *plan, const ep_plan_args *args);
    void (*plan_close)(ep_plan *plan);
    /* plan->args.n_tokens is that of the update, for the caller's next calls: work that is queued has its own. */
    ep_status (*plan_update)(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
    ep_status (*plan_metadata)(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);
    ep_status (*plan_sources)(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);
    ep_status (*plan_layout)(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

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
    /* timeout_ms < 0: as long as the work's own deadlines last. */
    ep_status (*event_wait)(ep_event *event, int timeout_ms);
    ep_status (*event_query)(const ep_event *event, int *ret_done);
    void (*event_free)(ep_event *event);

    ep_status (*ll_open)(ep_ll *ll);
    void (*ll_close)(ep_ll *ll);
    /*
     * Queue in the stream and return. `number` is that of this dispatch; ll->dispatches becomes it when the call has
     * succeeded. args->max_tokens, args->call and `call` are resolved, never 0; ll->call[call % 2] has what the core
     * knows of that dispatch. The combine is number ll->combines + 1.
     */
    ep_status (*ll_dispatch)(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream);
    ep_status (*ll_combine)(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
    ep_status (*ll_finish)(ep_ll *ll, uint64_t call, ep_stream stream);
    ep_status (*ll_combine_buffer)(ep_ll *ll, void **ret_buffer);
    ep_status (*ll_get_mask)(const ep_ll *ll, int32_t *ret_masked);
    /* rank -1: all of them. */
    ep_status (*ll_set_mask)(ep_ll *ll, int rank, bool on, ep_stream stream);
    ep_status (*ll_query_mask)(ep_ll *ll, int32_t *out, ep_stream stream);
    ep_status (*ll_barrier)(ep_ll *ll, ep_stream stream);
    /* What ll_open would take for this rank, and with it combine buffers in ret_combine_bytes. */
    int64_t (*ll_bytes)(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes);
};

#define EP_BACKEND_ABI 3u

/*
 * The communicator whose function of ep_stream_call() this thread runs; a backend says so around that function, and
 * gets the one before: a function may make a call that waits on another communicator.
 */
extern _Thread_local const ep_comm *ep_comm_calling;
EP_PRIVATE_API const ep_comm *ep_comm_note_calling(const ep_comm *comm);

/* Backends put these first in their event and queue. */
struct ep_event {
    ep_comm *comm;
};

struct ep_queue {
    ep_comm *comm;
};

/*
 * Copies the thread's last error into the communicator and marks it failed when the status is of the 3xx or 4xx kind;
 * the first such failure wins, and is what it returns from then on instead of any other of them: the status of a failed
 * communicator never changes. Else returns `status`; EP_OK does nothing. Any thread; not async-signal-safe.
 */
EP_PRIVATE_API ep_status ep_comm_record(ep_comm *comm, ep_status status);

/* What the last operation moved: maybe from a worker. */
EP_PRIVATE_API void ep_comm_set_stats(ep_comm *comm, const ep_stats *stats);

/* As ep_comm_record() for a status that the communicator has nothing to do with by itself: remembers nothing. */
ep_status ep_comm_resolve_status(ep_comm *comm, ep_status status);

/*
 * memory.c: no allocator callback uses it any more; waits for those that are at it. The addresses of what they have
 * taken of it stay reserved until the allocator frees them.
 */
void ep_pool_detach(ep_comm *comm);

static inline bool ep_status_is_fatal(ep_status status)
{
    return (int)status >= 300;
}

/* registry.c: the backend named in the configuration, or the best one. */
ep_status ep_backend_find(const char *name, const struct ep_backend_ops **ret_ops);

extern const struct ep_backend_ops ep_backend_host;

/* a * b and a * b * c in bytes; false if it does not fit int64. */
static inline bool ep_mul(int64_t a, int64_t b, int64_t *ret_product)
{
    return !__builtin_mul_overflow(a, b, ret_product);
}

#endif
