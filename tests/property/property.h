/* SPDX-License-Identifier: Apache-2.0 */
/*
 * property.h - random groups that run random operations, compared with the reference of cmd/test/check.
 *
 * A case is drawn from its seed only: the group, the network, the plans and the sequence of operations are the same on
 * all ranks; the position of buffers, which calls are asynchronous and which event each waits for are each rank's own
 * choice.
 *
 *   shape.c       draws the case
 *   data.c        rows and routings that every rank can compute, buffers with guards
 *   use.c         a dispatch or a combine from its arguments to the check of its outputs
 *   ll_use.c      the same for the low-latency layout
 *   plan_use.c    plans: made, updated, queried
 *   capacity.c    plans whose routing may exceed their capacity
 *   order.c       the sums of a combine by choice order
 *   run.c         the program of a rank
 *   property_host.c  options, ranks
 */
#ifndef EP_TESTS_PROPERTY_H
#define EP_TESTS_PROPERTY_H

#include "net/emulation.h"

#include "cmd/test/check/random.h"
#include "cmd/test/check/reference.h"
#include "tests/args.h"

#include <epkit/epkit.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAX_RANKS = 9,
    MAX_TOKENS = 200,
    MAX_TOPK = 16,
    MAX_HIDDEN = 1024,
    MAX_PLANS = 8,
    MAX_VERSIONS = 6,
    MAX_OPS = 16,
    MAX_USES = 6
};

/* --- shape.c --- */
struct plan_shape {
    int idx_type;
    uint32_t flags;
    int alignment;
    bool fixed_capacity;
    bool mask; /* made from a mask, not from choices */
    int n_versions;
    /* The initial routing of the plan, and those of its updates. */
    struct version_shape {
        int n_tokens[MAX_RANKS];
        int style;
    } versions[MAX_VERSIONS];
};

enum op_kind {
    OP_PLAN = 0, /* creates the next plan */
    OP_UPDATE,
    OP_DISPATCH,
    OP_COMBINE,
    OP_SOURCES,
    OP_METADATA,
    OP_FREE,
    OP_BARRIER,
    OP_GATHER,
    OP_ARENA, /* frees a piece of symmetric memory and allocates another one */
    OP_LOWLATENCY,
    OP_CAPACITY /* makes a plan of its own, with the routings of another one */
};

struct op {
    enum op_kind kind;
    int plan;
    int dtype, scale_type, hidden;
    bool index, weights; /* which outputs are wanted */
    bool echo;           /* a combine of the rows that the dispatch before it has received */
    int n_bias;
    int rounds;  /* low latency */
    int version; /* of an update */
};

struct shape {
    uint64_t seed;
    bool threads;
    int nranks, nnodes, topk, n_experts;
    int n_plans, n_ops;
    bool burst; /* all plans first, with fixed capacity: more of them than exchanges in flight */
    struct plan_shape plans[MAX_PLANS];
    struct op ops[MAX_OPS];
    ep_comm_config config;
    ep_net_emulation emulation;
};

/* `modes`: bit 0 fork, bit 1 threads. */
void shape_draw(uint64_t seed, unsigned modes, struct shape *ret_shape);
const char *op_name(enum op_kind kind);

/* --- data.c --- */
/* Streams of random numbers below the seed of the case. */
enum stream {
    STREAM_SHAPE = 1,
    STREAM_LOCAL,
    STREAM_ROUTING,
    STREAM_WEIGHTS,
    STREAM_ROW,
    STREAM_REPLY,
    STREAM_BIAS,
    STREAM_CAPACITY
};

struct random stream_of(const struct shape *shape, enum stream stream, uint64_t a, uint64_t b);

/* A version of a plan's routing on all ranks; weights in 1/1024. Freed by reference_group_done(). */
bool draw_routing(const struct shape *shape, int plan, int version, struct reference_group *ret_group);

/* Any bits; with `finite` only bf16 numbers whose sums stay finite, zeros of both signs and denormals among them. */
void fill_row(const struct shape *shape, enum stream stream, uint64_t use, uint64_t key, bool finite, void *ret_row,
              size_t bytes);

static inline uint64_t row_key(int rank, int token)
{
    return (uint64_t)rank << 32 | (uint32_t)token;
}

/* A small integer: a weight that adds up exactly in any order. */
float reply_weight(const struct shape *shape, uint64_t use, uint64_t key, int rank, int k);

struct buffer {
    unsigned char *begin, *at;
    size_t bytes;
    bool symmetric;
};

enum { N_ARENAS = 3, N_QUEUES = 3 };
enum { UNTOUCHED = 0xee, GUARD = 0xc5 };

struct arena {
    unsigned char *memory;
    size_t bytes, used;
};

/* --- plan_use.c --- */
/* A version of a plan's routing, and the arrays that the plan reads it from. */
struct version {
    struct reference_group group;
    struct reference_layout layout;
    void *index;
    uint8_t *mask;
    int32_t *per_expert;
};

struct plan_state {
    ep_plan *plan;
    struct version versions[MAX_VERSIONS];
    int version; /* of the operations that are called now; 0: never updated */
    int64_t max_recv_tokens;
    int max_tokens; /* of any rank, in any version */
    bool used;
};

/* --- run.c --- */
enum slot {
    SLOT_X = 0,
    SLOT_SCALES,
    SLOT_WEIGHTS,
    SLOT_RECV,
    SLOT_RECV_SCALES,
    SLOT_RECV_INDEX,
    SLOT_RECV_WEIGHTS,
    SLOT_BIAS,
    SLOT_BIAS2,
    SLOTS
};

struct run;

/* A pending operation. */
struct use {
    struct run *run;
    const struct op *op;
    int number; /* of the operation */
    struct plan_state *state;
    const struct version *version;
    struct buffer buffer[SLOTS];
    int64_t out_rows;
    int64_t stride_token, stride_block;
    const struct use *echo; /* the dispatch whose rows are combined */
    uint32_t flags;         /* of a combine; this rank's own choice */
    ep_event *event;        /* NULL: it was synchronous */
    ep_event *signal;       /* the stream waits for it: the filler signals it */
    ep_stream stream;
    pthread_t filler;
    bool filling;
};

struct run {
    const struct shape *shape;
    int rank, node;
    ep_comm *comm;
    struct random local;
    ep_queue *queues[N_QUEUES]; /* the first is NULL */
    struct arena arena[N_ARENAS];
    struct plan_state plans[MAX_PLANS];
    struct use uses[MAX_USES];
    int n_uses;
    int op; /* index of the current operation */
    bool wrong;
};

/* Ranks of one case run this; the argument is a struct shape. Result 0 or 1. */
int run_rank(const ep_boot *boot, void *argument);

/* Finishes all pending operations; then nothing uses the arenas. */
void drain(struct run *run);

/* Reports an error, once a rank. */
void fail_check(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Reports any status but EP_OK, and aborts the group. Returns whether it was EP_OK. */
bool passed(struct run *run, ep_status status, const char *what);

/* `bytes` in symmetric or in ordinary memory, 16-byte aligned, filled with UNTOUCHED. False: no memory. */
bool buffer_new(struct run *run, size_t bytes, struct buffer *ret_buffer);
/* Frees it and returns whether its guards are intact. */
bool buffer_free(struct buffer *buffer);
bool all_bytes(const unsigned char *memory, size_t bytes, unsigned char value);

/* A version and its arrays, which are written by write_version(). False: no memory. */
bool draw_version(const struct run *run, int plan, int number, struct version *ret_version);
void write_version(struct run *run, const struct plan_shape *shape, struct version *version);
void make_plan(struct run *run, const struct op *op);
void update_plan(struct run *run, const struct op *op);
void check_sources(struct run *run, const struct op *op);
void check_metadata(struct run *run, const struct op *op);
void plan_done(struct plan_state *state);

/* --- capacity.c --- */
void check_capacity(struct run *run, const struct op *op);

/* --- order.c --- */
/*
 * The expected row with EP_COMBINE_BY_CHOICE; `flags` as in ep_combine_args. Arguments as for reference_combine_row().
 */
void combine_by_choice(const struct reference_group *group, const struct reference_combine *combine, uint32_t flags,
                       bool mask, int rank, int token, const uint16_t *const bias[2], struct reference_scratch *scratch,
                       uint16_t *ret_row);

/* --- use.c --- */
bool use_dispatch(struct run *run, const struct op *op, struct use *use);
bool use_combine(struct run *run, const struct op *op, struct use *use);
/* Waits for it and checks its outputs. */
void use_finish(struct use *use);
/* Frees its events and buffers, when all operations that may use them are finished. */
void use_free(struct use *use);

/* --- ll_use.c --- */
void use_lowlatency(struct run *run, const struct op *op);

#endif
