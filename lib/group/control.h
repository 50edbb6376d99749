/* SPDX-License-Identifier: Apache-2.0 */
/*
 * control.h - the control block of a rank: what it publishes to the ranks of its host in shared memory. Parts of it are
 * sent over the control links between hosts.
 */
#ifndef EP_GROUP_CONTROL_H
#define EP_GROUP_CONTROL_H

#include "base/shm.h"

#include <epkit/types.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

#define EP_GROUP_CACHE_LINE 64
#define EP_GROUP_SLOTS 512   /* symmetric allocations of one rank, staging included */
#define EP_GROUP_EXCHANGES 4 /* exchanges in flight: plans whose counts were not requested yet */
#define EP_GROUP_GATHER_BYTES 4096
#define EP_GROUP_REASON_BYTES 256      /* of a failure, as published to peers; longer ones are truncated */
#define EP_GROUP_RING_BYTES (1u << 20) /* stream between nodes: several of the largest rows (EP_MAX_HIDDEN) */

/* What a rank is waiting for or doing; error texts show the names. */
#define EP_GROUP_PHASES(X)                                                                                             \
    X(EP_GROUP_IDLE, "no call")                                                                                        \
    X(EP_GROUP_OPEN, "creation: rendezvous")                                                                           \
    X(EP_GROUP_BARRIER, "barrier")                                                                                     \
    X(EP_GROUP_GATHER, "all-gather")                                                                                   \
    X(EP_GROUP_PLAN_SLOT, "plan: earlier counts read")                                                                 \
    X(EP_GROUP_PLAN_COUNTS, "plan: exchange of counts")                                                                \
    X(EP_GROUP_PLAN_ROUTES, "plan: exchange of routes between nodes")                                                  \
    X(EP_GROUP_DISPATCH_READY, "dispatch: outputs ready")                                                              \
    X(EP_GROUP_DISPATCH_MOVE, "dispatch: rows between nodes")                                                          \
    X(EP_GROUP_DISPATCH_DONE, "dispatch: rows placed")                                                                 \
    X(EP_GROUP_COMBINE_READY, "combine: inputs ready")                                                                 \
    X(EP_GROUP_COMBINE_MOVE, "combine: partial sums between nodes")                                                    \
    X(EP_GROUP_COMBINE_DONE, "combine: inputs read")                                                                   \
    X(EP_GROUP_LL_SEND, "low-latency dispatch: buffer free")                                                           \
    X(EP_GROUP_LL_RECV, "low-latency dispatch: rows")                                                                  \
    X(EP_GROUP_LL_COMBINE_BUFFER, "low-latency combine: buffer free")                                                  \
    X(EP_GROUP_LL_WEIGHTS, "low-latency combine: weights of other nodes")                                              \
    X(EP_GROUP_LL_SIGNALS, "low-latency combine: signals of the experts' outputs")                                     \
    X(EP_GROUP_LL_COMBINE, "low-latency combine: inputs ready")                                                        \
    X(EP_GROUP_LL_DONE, "low-latency combine: inputs read")                                                            \
    X(EP_GROUP_LL_BARRIER, "low-latency barrier")                                                                      \
    X(EP_GROUP_STREAM_WAIT, "waiting for the event of ep_stream_wait")

enum ep_group_phase {
#define EP_GROUP_PHASE_ENUM(name, text) name,
    EP_GROUP_PHASES(EP_GROUP_PHASE_ENUM)
#undef EP_GROUP_PHASE_ENUM
};

/* An address in the symmetric memory of a rank. */
struct ep_group_address {
    uint32_t slot; /* EP_GROUP_UNMAPPED: none */
    uint32_t generation;
    uint64_t offset;
};

#define EP_GROUP_UNMAPPED UINT32_MAX

/* Optional outputs that a call passes, one bit each: the same on all ranks. */
enum {
    EP_GROUP_RECV_INDEX = 1,
    EP_GROUP_RECV_WEIGHTS = 2,
    EP_GROUP_OUT_WEIGHTS = 4,
    EP_GROUP_RANK_PREFIX = 8,
    EP_GROUP_ROUND_PARTIAL = 16, /* of a combine in which each rank adds up its own rows: a flag, no output */
    EP_GROUP_RECV_SOURCE = 32,
    EP_GROUP_OUTPUT_BITS = 6
};

enum {
    EP_GROUP_AT_X,
    EP_GROUP_AT_SCALES,
    EP_GROUP_AT_INDEX,
    EP_GROUP_AT_WEIGHTS,
    EP_GROUP_AT_SOURCE,
    EP_GROUP_AT_COUNT
};

/* The op descriptor: what a rank publishes at the beginning of a dispatch or combine. */
struct ep_group_descriptor {
    int32_t phase; /* EP_GROUP_DISPATCH_READY or EP_GROUP_COMBINE_READY: to detect two ranks in different calls */
    int32_t plan_number;
    int32_t dtype, hidden, scale_type, scale_words, outputs;
    int64_t rows;   /* rows of the buffers below: all ranks compute the same number from the plan */
    int32_t copies; /* CUDA: its kernel copies rows between ordinary memory and `at`; ranks may differ */
    struct ep_group_address at[EP_GROUP_AT_COUNT];
};

struct ep_group_slot {
    _Atomic uint32_t generation; /* 0: empty */
    struct ep_shm_name name;
};

/* What a rank publishes about itself to all ranks. On other hosts the control link of its node updates a copy. */
struct ep_group_state {
    _Atomic uint32_t waiting;    /* (rank waited for + 1) << 8 | phase; 0: not waiting */
    _Atomic uint64_t probed_ns;  /* when it last probed its peers while waiting; by the clock of the host of a copy */
    _Atomic uint32_t left;       /* ep_comm_free was called */
    _Atomic uint32_t aborts;     /* calls of ep_comm_abort, also after a failure */
    _Atomic uint64_t reason_for; /* the failure that it has set with this reason; 0: none */
    char reason[EP_GROUP_REASON_BYTES];
};

struct ep_group_control {
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint32_t doorbell; /* any rank adds 1 */
    _Atomic uint32_t sleeping;                              /* the owner is in the futex call, or about to enter it */
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint64_t op_begun;
    _Atomic uint64_t op_ended;
    _Atomic uint64_t exchange_ready; /* exchanges whose rows (own and rail peers') are in the exchange slot */
    _Atomic uint64_t exchange_read;  /* exchanges that this rank has read from all exchange slots */
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint64_t failure; /* pack_failure(); 0: none. First writer wins */
    _Atomic uint32_t left_out; /* 1 + a rank that goes on without the owner, and writes this; 0: none */
    _Atomic uint32_t let_go;   /* the owner has failed to join, and has no memory of the others mapped */
    struct ep_group_state state;
    struct ep_group_descriptor descriptor[2];
    _Atomic uint64_t group_failure; /* of the lowest rank on this host only: what all ranks report. All ranks write
                                       here, first writer wins */
    _Atomic uint32_t reason_set;    /* by the owner: state.reason does not change any more */
    _Atomic uint32_t frees;         /* number of frees in slot[], so that peers drop stale mappings */
    struct ep_group_slot slot[EP_GROUP_SLOTS];
    /* Followed by EP_GROUP_EXCHANGES exchange slots of nnodes rows of exchange_row_bytes. */
};

#endif
