/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.h - random sequences of calls on two communicators of the host backend, the same on all ranks.
 *
 * On the communicator TESTED the calls are queued, in several queues; on the communicator BASE the same calls are made
 * one by one, over a network without faults. All buffers exist twice and must hold the same bytes. Samples are also
 * compared with the reference of cmd/test/check, so that an error of both is found.
 *
 *   sequence_buffer.c  memory of all kinds, with guards
 *   sequence_slot.c    a plan with the buffers of all calls on it
 *   sequence_call.c    the calls on a plan
 *   sequence_ll.c      an ep_ll with two dispatches
 *   sequence_refused.c calls that are refused
 *   sequence_check.c   comparison with the reference, over memory of its own
 *   order.c            the sums of a combine by choice order
 *   sequence_pair.c    a pair of communicators with everything on it
 *   sequence_step.c    the steps
 *   sequence_group.c   groups of survivors
 *   sequence_noise.c   a second thread
 *   sequence_host.c    options, ranks
 */
#ifndef EP_TESTS_SEQUENCE_H
#define EP_TESTS_SEQUENCE_H

#include "cmd/test/check/random.h"
#include "net/emulation.h"
#include "tests/args.h"
#include "tests/regroup.h"

#include <epkit/epkit.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum {
    MAX_RANKS = 6,
    MAX_HIDDEN = 7168,
    SLOTS = 3,
    LLS = 2,
    EXCHANGES = 2,
    ROUTINGS = 3,
    QUEUES = 4,
    HOLDS = 8,
    PAIRS = 2,
    STRAYS = 6
};
enum { TESTED, BASE, BOTH };

/* All ranks run the same sequence. */
struct sequence {
    uint64_t seed;
    int nranks, nnodes, steps;
    bool threads, tcp;
    ep_comm_config config;
    ep_net_emulation emulation;
    ep_boot_shm *base_boot;
    struct regroup *regroup;         /* memory of all ranks */
    struct publication *publication; /* memory of all ranks */
};

static inline bool sequence_is_distinct(const struct sequence *sequence)
{
    return sequence->config.flags & EP_COMM_CHECK_DISTINCT;
}

/* Random numbers: the same on all ranks; of this rank. */
struct dice {
    struct random shared, own;
};

static inline int draw(struct dice *dice, int below)
{
    return (int)random_below(&dice->shared, (uint32_t)below);
}

static inline int draw_own(struct dice *dice, int below)
{
    return (int)random_below(&dice->own, (uint32_t)below);
}

/* What all parts of a sequence share, one for each rank. */
struct rank_state {
    const struct sequence *sequence;
    struct dice dice;
    int rank, nranks; /* now; some ranks may have left */
    int first_rank;   /* at the start */
    int step;
    bool wrong;
    bool broken;                      /* the tested communicator was aborted */
    ep_comm *comms[PAIRS * BOTH * 2]; /* to be aborted after an error */
    struct copy *copies;
};

/* Reports an error, once a rank, and aborts all communicators. Returns false. */
bool fail(struct rank_state *state, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool passed(struct rank_state *state, ep_status status, const char *what);
void track(struct rank_state *state, ep_comm *comm, bool add);

#define CALL(state, call)                                                                                              \
    do {                                                                                                               \
        if (!passed(state, call, #call))                                                                               \
            return false;                                                                                              \
    } while (0)
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if (!(call))                                                                                                   \
            return false;                                                                                              \
    } while (0)

/* --- sequence_buffer.c --- */
enum memory { ORDINARY, SYMMETRIC, LOCAL, POOL, MEMORIES };
enum { UNTOUCHED = 0x6e, GUARD = 0xc5 };

struct block {
    enum memory kind;
    unsigned char *base, *beside, *at; /* beside: ordinary memory that is used instead of symmetric memory */
    size_t total;
};

/* A buffer of both communicators. */
struct mirror {
    const char *name;
    size_t bytes, row_bytes;
    struct block block[BOTH];
};

/* Collective if the kind is SYMMETRIC. */
bool mirror_new(struct rank_state *state, ep_comm *const comms[BOTH], const char *name, size_t rows, size_t row_bytes,
                enum memory kind, struct mirror *ret_mirror);
bool mirror_free(struct rank_state *state, ep_comm *const comms[BOTH], struct mirror *mirror);
/* The first block to the second. */
void mirror_copy(struct mirror *mirror);
void mirror_poison(struct mirror *mirror);
bool mirror_compare(struct rank_state *state, const struct mirror *mirror, const char *what);
/* Copies the first block of `from` to that of `to` in stream order, and the second blocks now. */
bool mirror_queue_copy(struct rank_state *state, ep_comm *comm, const struct mirror *to, const struct mirror *from,
                       ep_stream stream);
/* Frees what mirror_queue_copy() keeps: a function queued on a communicator that fails is never called. */
void copies_free(struct rank_state *state);

/* --- sequence_slot.c --- */
enum buffer {
    X,
    SCALES,
    WEIGHTS,
    BIAS,
    IDX,                      /* [ROUTINGS] choices, or masks */
    EXPERTS = IDX + ROUTINGS, /* [ROUTINGS] of masks */
    RECV_X = EXPERTS + ROUTINGS,
    RECV_SCALES,
    RECV_IDX,
    RECV_WEIGHTS,
    ANSWER,
    ANSWER_WEIGHTS,
    OUT,
    OUT_WEIGHTS,
    SNAPSHOT, /* of OUT, by ep_stream_call() */
    SOURCE,   /* metadata */
    PLACE,
    N_TOKENS,
    PSUM_RANK,
    PSUM_EXPERT,
    COUNT,
    PREFIX,
    BUFFERS
};

struct slot {
    bool used, fixed, expanded, mask, weights, updated, dispatched, quantized;
    const float *global_scale;
    int way, recv_way; /* strides of scales */
    int dtype, scale_type, scale_words, idx_type, hidden, topk, n_experts, max_tokens, alignment, n_bias;
    uint32_t flags, combine_flags;
    int n_tokens[ROUTINGS]; /* of this rank */
    int32_t *choices[ROUTINGS];
    int choices_topk;
    int routing; /* of the last update */
    int64_t out_rows, spare_rows;
    ep_plan *plan[BOTH];
    struct mirror b[BUFFERS];
};

/* Own numbers whose sums are finite and reveal their order. */
void fill_bf16(struct dice *dice, void *memory, size_t bytes);
bool slot_new(struct rank_state *state, ep_comm *const comms[BOTH], int nnodes, struct slot *ret_slot);
/* New data and poisoned outputs. No work may be queued. */
void slot_load(struct rank_state *state, struct slot *slot);
/* Strides of the scales of `rows` rows, as TMA needs them where the rows are innermost. 0: of contiguous ones. */
struct strides {
    int64_t token, block;
} slot_strides(const struct slot *slot, bool received);
bool slot_free(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot);
bool slot_compare(struct rank_state *state, const struct slot *slot, const char *what);
bool slot_make_plan(struct rank_state *state, ep_comm *comm, const struct slot *slot, int which, int routing,
                    int64_t max_rows, ep_stream stream, ep_plan **ret_plan);

/* --- sequence_call.c --- */
ep_dispatch_args slot_dispatch_args(const struct slot *slot, int which);
ep_combine_args slot_combine_args(const struct slot *slot, int which);
bool slot_dispatch(struct rank_state *state, struct slot *slot, ep_stream stream);
bool slot_combine(struct rank_state *state, struct slot *slot, ep_stream stream);
bool slot_update(struct rank_state *state, struct slot *slot, int routing, ep_stream stream);
bool slot_metadata(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, ep_stream stream);
/* A plan of its own with that routing, used for a dispatch and a combine with the slot's buffers, and freed. */
bool slot_once(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, int routing, ep_stream stream);
/* Copies in stream order: received rows to the inputs of a combine; results. */
bool slot_echo(struct rank_state *state, ep_comm *comm, struct slot *slot, ep_stream stream);
bool slot_snapshot(struct rank_state *state, ep_comm *comm, struct slot *slot, ep_stream stream);
bool slot_compare_sources(struct rank_state *state, const struct slot *slot);
bool slot_compare_info(struct rank_state *state, const struct slot *slot);

/* --- sequence_ll.c --- */
enum ll_buffer {
    LL_X,
    LL_IDX,
    LL_WEIGHTS,
    LL_RECV,
    LL_SCALES,
    LL_COUNT,
    LL_SOURCE,
    LL_RANGE,
    LL_STATS,
    LL_ANSWER,
    LL_OUT,
    LL_BUFFERS
};

struct exchange {
    int n_tokens, topk, max_tokens, idx_type, out_dtype, scale_type;
    uint32_t dispatch_flags, combine_flags;
    uint64_t call;
    bool dispatched;
    struct mirror b[LL_BUFFERS];
};

struct ll {
    ep_ll *ll[BOTH];
    ep_ll_config config;
    struct exchange exchange[EXCHANGES];
    uint64_t n_dispatches, n_combines;
    int n_open;
    struct open_call {
        int exchange;
        bool combine;
        uint64_t number;
    } open[2];
};

bool ll_new(struct rank_state *state, ep_comm *const comms[BOTH], struct ll *ret_ll);
void ll_load(struct rank_state *state, struct ll *ll);
bool ll_free(struct rank_state *state, ep_comm *const comms[BOTH], struct ll *ll);
bool ll_compare(struct rank_state *state, const struct ll *ll, const char *what);
bool ll_finish_all(struct rank_state *state, struct ll *ll, ep_stream stream);
/* One call of those that are valid now. */
bool ll_step(struct rank_state *state, ep_comm *comm, struct ll *ll, ep_stream stream);
bool ll_dispatch(struct rank_state *state, struct ll *ll, bool hook, ep_stream stream);
bool ll_combine(struct rank_state *state, struct ll *ll, int number, bool hook, ep_stream stream);

/* --- sequence_refused.c --- */
bool refused_call(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, struct ll *ll);
/* A dispatch that some ranks first call with a NaN. */
bool values_call(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, ep_stream stream);
/* A plan whose capacity some ranks exceed. */
bool capacity_call(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, ep_stream stream);

/* --- sequence_check.c --- */
struct publication *publication_new(void);
void publication_free(struct publication *publication);
/*
 * The outputs of a dispatch, a combine and the metadata, with the data that the slot or exchange holds now. No work may
 * be queued.
 */
bool check_slot(struct rank_state *state, int nnodes, const struct slot *slot);
bool check_exchange(struct rank_state *state, const struct ll *ll, int number);
/* --- order.c --- */
struct reference_group;
struct reference_combine;
struct reference_scratch;
/*
 * The expected row with EP_COMBINE_BY_CHOICE; `flags` as in ep_combine_args. Arguments as for reference_combine_row().
 */
void combine_by_choice(const struct reference_group *group, const struct reference_combine *combine, uint32_t flags,
                       bool mask, int rank, int token, const uint16_t *const bias[2], struct reference_scratch *scratch,
                       uint16_t *ret_row);

/* Of the ranks, without the library. */
bool publication_barrier(struct rank_state *state);
void publication_abort(struct publication *publication);

/* --- sequence_pair.c --- */
struct hold {
    pthread_t thread;
    ep_event *event;
    unsigned us;
};

/* Memory that a queued call writes. */
struct written {
    unsigned char *at;
    size_t bytes;
};

struct pair {
    bool open;
    ep_comm *comms[BOTH];
    int nnodes;
    ep_queue *queues[QUEUES]; /* of the first communicator; the first is NULL */
    struct slot slots[SLOTS];
    struct ll lls[LLS];
    struct mirror strays[STRAYS];
    struct written written[STRAYS]; /* while they are freed */
    bool has_stray[STRAYS];
    struct hold holds[HOLDS];
    int n_holds;
    struct noise *noise;
};

/* All of a rank. */
struct rank {
    struct rank_state state;
    const ep_boot *boots[BOTH];
    struct regroup_boot regrouped; /* the bootstrap of both after ranks have left */
    unsigned members;              /* mask of first ranks */
    int n_left;
    struct pair pairs[PAIRS];
    bool left;
};

bool open_pair(struct rank *rank, struct pair *pair);
bool open_comms(struct rank *rank, ep_comm *ret_comms[BOTH]);
/* Everything on the communicators, which become those of the pair. */
bool open_objects(struct rank_state *state, struct pair *pair, ep_comm *const comms[BOTH]);
bool close_objects(struct rank_state *state, struct pair *pair);
bool close_pair(struct rank_state *state, struct pair *pair);
bool sync_queues(struct rank_state *state, struct pair *pair);
void join_holds(struct pair *pair);

/* --- sequence_step.c --- */
ep_stream any_queue(struct rank_state *state, struct pair *pair);
/* Waits for everything and compares all buffers. */
bool compare(struct rank_state *state, struct pair *pair);
/* check() compares all buffers as compare() does, and loads new data. */
bool check(struct rank_state *state, struct pair *pair);
bool hold_queue(struct rank_state *state, struct pair *pair);
bool call(struct rank_state *state, struct pair *pair);
int run_sequence(const ep_boot *boot, void *argument);

/* --- sequence_group.c --- */
bool change_group(struct rank *rank);

/* --- sequence_noise.c --- */
/* A thread that makes the calls which any thread may make at any time. NULL: no thread. */
struct noise *noise_start(ep_comm *comm, uint64_t seed);
/* Returns whether its calls were right. NULL is allowed. */
bool noise_stop(struct rank_state *state, struct noise *noise);

#endif
