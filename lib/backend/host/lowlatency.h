/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.h - what the files of low latency share: the segments that ranks write into, and how ranks wait.
 *
 * Within a node a rank writes to the segments of its peers. Between nodes there is an endpoint of the network for each
 * ep_ll, on which every rank is a peer of every rank of another node (lowlatency_net.c). What this rank knows of such a
 * rank is a copy of its struct ll_shared here, which the signals of that rank change; so all waits are the same.
 */
#ifndef EP_HOST_LOWLATENCY_H
#define EP_HOST_LOWLATENCY_H

#include "backend/host/host.h"

/* Signals between nodes. Each counts up to the value of the word of struct ll_shared that it stands for. */
enum ll_signal {
    LL_SIGNAL_MASKED, /* odd: the sender has masked this rank. First, so that it is seen before what follows it */
    LL_SIGNAL_SENT,
    LL_SIGNAL_ASKED,
    LL_SIGNAL_OFFERED, /* the rows of the combine are here */
    LL_SIGNAL_TAKEN_0,
    LL_SIGNAL_TAKEN_1,
    LL_SIGNAL_PULLED_0,
    LL_SIGNAL_PULLED_1,
    LL_SIGNAL_BARRIERS,
    LL_SIGNALS
};

/* Where the rows of one source lie in the packed rows of one expert. */
struct ll_range {
    int32_t begin, count;
};

/* The input of a combine, and what all ranks must say alike of it. */
struct ll_offer {
    struct ep_group_address where;
    uint64_t call;
    uint32_t no_partial_reduce, unused;
};

/* A combine buffer of a peer. */
struct ll_buffer {
    struct ep_group_address where;
    struct ep_shm shm;
};

/* Head of a rank's shared segment. Then: ranges [2][L*R], then blocks [2][R]. */
struct ll_shared {
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint64_t sent; /* dispatches whose rows this rank has sent */
    _Atomic uint64_t offered;                           /* combines whose input this rank has offered */
    _Atomic uint64_t taken[2];                          /* last dispatch n at n % 2 that this rank has packed ... */
    _Atomic uint64_t pulled[2]; /* ... and combine that it has read from all: halves of calls may be
                                   finished out of order */
    _Atomic uint64_t barriers;
    _Atomic uint64_t asked; /* between nodes: combines for which this rank has sent its weights */
    struct ll_offer offer[2];
    struct ep_group_address buffer[2]; /* combine buffers, for peers of this node to map before the first combine */
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint64_t masks[EP_MAX_RANKS / 64]; /* ranks that this rank has masked */
};

/* Slots of one source in a receiver's segment: count, then max_tokens slots, as far apart as the format needs. The
 * receiver owns the memory: a sender only writes to it, a receiver copies the heads before it looks at them. */
struct ll_block {
    int32_t count;
    int32_t format; /* format_of() the sender's arguments */
    int32_t max_tokens;
    int32_t unused;
    uint64_t number; /* of the dispatch: a rank that had masked the receiver has written nothing for this one */
    uint64_t unused_too[5];
};

struct ll_slot {
    int32_t token;
    int32_t n_experts;
    int32_t expert[]; /* local numbers, topk of them at most; then scales, then the row, each aligned to 16 */
};

/*
 * Between nodes a combine begins with the weights: the owner of the tokens sends to each rank a request, whose choices
 * are those of its dispatch there, by token and k. The answer is one row for each (token, rank), or one for each choice
 * with EP_LL_NO_PARTIAL_REDUCE; choices that are left out have none. Each rank has a place of its own for its rows at
 * the owner: what one that was masked sends late overwrites nothing that is used.
 */
struct ll_choice {
    int32_t token;
    int32_t expert; /* local number; ~number: left out of this combine */
    float weight;
    uint32_t unused;
};

struct ll_request {
    struct ll_offer offer; /* what both must say alike */
    int32_t n_choices, n_rows;
    uint64_t unused[3];
    struct ll_choice choices[];
};

_Static_assert(sizeof(struct ll_request) % 16 == 0, "what follows is aligned");

/* A dispatch until its rows are packed, a combine until its rows are read. */
struct ll_dispatch {
    uint64_t number;
    ep_ll_dispatch_args args;
};

struct ll_combine {
    uint64_t number, call;
    int32_t max_tokens;
    bool in_place;  /* reads the caller's memory, which it gets back only when all of its node have read it */
    int32_t *given; /* [M,K] that it comes with */
    ep_ll_combine_args args;
};

struct ll_net; /* lowlatency_net.c */

struct host_ll {
    struct ep_group *group;
    struct host_ll *next;      /* of the communicator, with a network */
    struct ll_net *net;        /* NULL on one node */
    unsigned char **peer;      /* [R] segments; of a rank of another node a copy of its struct ll_shared, and no more */
    struct ll_shared *copies;  /* [R] of the ranks of other nodes */
    struct ep_shm *shm;        /* [R] our mappings of the peers': as long as we are there, whenever they free theirs */
    struct ll_buffer *buffers; /* [2*R] the same of the peers' combine buffers: those of rank r from 2 * r */
    void *segment;
    void *combine_buffer[2]; /* [L, R*M, H] bf16; its pages when rows come that need them */
    int32_t *reserved[2];    /* [L] rows of each expert that have their pages ... */
    int32_t reserved_for[2]; /* ... where each has room for this many tokens of a rank */
    uint64_t handed_out;     /* combine that ep_ll_get_combine_buffer has last given a buffer for */
    uint64_t barriers;
    size_t scales_at, row_at, slot_bytes, block_bytes, ranges_at, blocks_at; /* slot_bytes: of the largest format */
    int32_t *masked;                                                         /* [R] */
    bool rejoins[EP_MAX_RANKS]; /* this rank waits for it again, and has not seen yet that it does so, too */
    int32_t *index[2];          /* [M,K] of dispatch n at n % 2 */
    int32_t *next_index;        /* [M,K] while it is checked: the dispatch before the last one may still be combined */
    struct ll_block **block;    /* [R] into which the dispatch that is being sent writes */
    int32_t *n_slots;           /* [R] written for each rank, or received from each */
    int32_t *heads;             /* [R*M] copies of the heads of the slots received: struct ll_slot and K experts each */
    struct ll_range *ranges[2]; /* [L*R] of dispatch n at n % 2: what the segment holds for the peers */
    int32_t *seen;              /* [E] tokens of this rank so far, per expert */
    uint8_t *row;               /* one quantised row */
    float *scales;
    int32_t *packed_scales;
    struct ll_dispatch dispatch[2]; /* number n at n % 2 */
    struct ll_combine combine[2];
};

static inline struct ll_shared *ll_shared_of(const struct host_ll *inner, int rank)
{
    return (struct ll_shared *)(void *)inner->peer[rank];
}

static inline struct ll_range *ll_ranges_of(const ep_ll *ll, int rank, uint64_t number)
{
    const struct host_ll *inner = ll->impl;
    size_t n = (size_t)ll->n_local * (size_t)ll->comm->nranks;

    return (struct ll_range *)(void *)(inner->peer[rank] + inner->ranges_at) + (number & 1) * n;
}

static inline bool ll_is_remote(const ep_ll *ll, int rank)
{
    return rank / ll->comm->ranks_per_node != ll->comm->node;
}

/* In the segment of `receiver`, which is of this node as `source` is. */
static inline struct ll_block *ll_local_block(const ep_ll *ll, int receiver, uint64_t number, int source)
{
    const struct host_ll *inner = ll->impl;
    int nlocal = inner->group->nlocal;
    size_t block = (size_t)(number & 1) * (size_t)nlocal + (size_t)(source % nlocal);

    return (struct ll_block *)(void *)(inner->peer[receiver] + inner->blocks_at + block * inner->block_bytes);
}

static inline _Atomic uint64_t *ll_counter_of(const ep_ll *ll, int rank, size_t word)
{
    return (_Atomic uint64_t *)(void *)((char *)ll_shared_of(ll->impl, rank) + word);
}

/* Slots are numbered from the first of each source. */
static inline struct ll_slot *ll_head_of(const ep_ll *ll, int source, int i)
{
    const struct host_ll *inner = ll->impl;
    size_t words = sizeof(struct ll_slot) / sizeof(int32_t) + (size_t)ll->config.topk;

    return (struct ll_slot *)(void *)(inner->heads +
                                      ((size_t)source * (size_t)ll->config.max_tokens + (size_t)i) * words);
}

/* Rows of a combine in which each rank has up to max_tokens tokens. */
static inline size_t ll_combine_bytes(const ep_ll *ll, int max_tokens)
{
    return (size_t)ll->config.n_experts * (size_t)max_tokens * (size_t)ll->config.hidden * 2;
}

/* The formats have slots of different sizes: only the row is at their end. */
static inline size_t ll_slot_bytes(const ep_ll *ll, int out_dtype)
{
    const struct host_ll *inner = ll->impl;

    return inner->row_at + ((size_t)ll->config.hidden * (out_dtype == EP_BF16 ? 2 : 1) + 15) / 16 * 16;
}

static inline struct ll_slot *ll_slot_of(struct ll_block *block, size_t slot_bytes, int i)
{
    return (struct ll_slot *)(void *)((unsigned char *)(block + 1) + (size_t)i * slot_bytes);
}

/* lowlatency_wait.c. A masked rank is waited for no more, and finds out from what this one has published. */
void ll_mask_rank(ep_ll *ll, int rank);
/* Whether that is a reason to mask the rank that was waited for; a failure of this rank's own is none. */
bool ll_may_mask(const ep_ll *ll, ep_status status);
/* To be called when what other ranks have has been read: has one of them masked this rank meanwhile? */
ep_status ll_check_masks(ep_ll *ll, enum ep_group_phase phase);
/* A value that no rank writes: failure of the group, unless its owner has masked this rank. */
ep_status ll_damaged(ep_ll *ll, int rank, enum ep_group_phase phase, const char *what, int64_t value);
/* Ranks must be in the same call, and what must be alike is. */
ep_status ll_check_offer(ep_ll *ll, const struct ll_combine *combine, int rank, const struct ll_offer *theirs);
/* `rank` has `count` rows of `owner` for an expert, and a token needs the one after number i. */
ep_status ll_fail_rows(ep_ll *ll, int owner, int rank, int32_t count, int expert, int token, int32_t i);
/* Words of the calls of a parity. */
size_t ll_taken_word(uint64_t number);
size_t ll_pulled_word(uint64_t number);
/*
 * Waits until the counter at `word` of all ranks that are not masked has reached `value`. `add` [R]: NULL, or
 * nanoseconds until each of them came are added to it.
 */
ep_status ll_wait_timed(ep_ll *ll, size_t word, uint64_t value, enum ep_group_phase phase, int64_t *add);
ep_status ll_wait_all(ep_ll *ll, size_t word, uint64_t value, enum ep_group_phase phase);
/* What others wait for while this rank waits. Its failure ends the wait. */
struct ll_meanwhile {
    ep_status (*run)(void *context);
    void *context;
};
/* The same for one rank, which may be masked afterwards. */
ep_status ll_wait_rank(ep_ll *ll, int rank, size_t word, uint64_t value, enum ep_group_phase phase,
                       const struct ll_meanwhile *meanwhile);
/* One step of a wait for `rank`: lets the network move, then as ep_group_wait() where nothing has. */
ep_status ll_pause(ep_ll *ll, struct ep_group_wait *pause, uint32_t seen, int rank);
void ll_publish(ep_ll *ll, _Atomic uint64_t *counter, uint64_t value);
ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int32_t *ret_index);

/*
 * lowlatency_net.c: the endpoint between nodes. What has no rank does nothing on one node. prepare needs no peer; open
 * is collective, and says on each rank what became of it there.
 */
/* Of the region that ranks of other nodes write into; ll->impl: laid out, no more. */
int64_t ll_net_bytes(const ep_ll *ll);
ep_status ll_net_prepare(ep_ll *ll);
ep_status ll_net_open(ep_ll *ll);
/* Until what was sent has left, but no longer than the deadline; then frees it. */
void ll_net_close(ep_ll *ll);
/* Around each job: outside of them a thread sends what has not left yet. */
void ll_net_begin(ep_ll *ll);
void ll_net_end(ep_ll *ll);
/* Moves what can be moved, both ways. A broken network fails the group. */
ep_status ll_net_progress(ep_ll *ll, enum ep_group_phase phase, bool *ret_moved);
/* Something of `rank` may still be on its way. */
bool ll_net_holds_back(const ep_ll *ll, int rank);
/* Nothing wakes a rank that waits for it. */
bool ll_net_polls(const ep_ll *ll);
/* The word at `word` of this rank's struct ll_shared has become `value`: for the ranks of other nodes. */
void ll_net_publish(ep_ll *ll, size_t word, uint64_t value);
void ll_net_publish_mask(ep_ll *ll, int rank, bool on);
/* For a mask that was taken back to come, behind a meeting of the ranks that came another way. */
#define LL_MASK_TOLD_NS UINT64_C(100000000)
/* Waits until that has left, for one deadline at most. */
ep_status ll_net_tell_masks(ep_ll *ll);
/* The same for one rank, behind what was sent to it. */
void ll_net_signal(ep_ll *ll, int rank, enum ll_signal which, uint64_t value);
/*
 * Memory for what goes to `rank` in call number `number`, which it keeps until call number + 2 asks for it again; then
 * sends `bytes` of it to the place that `rank` has for it.
 */
enum ll_parcel {
    LL_PARCEL_BLOCK,   /* struct ll_block of a dispatch */
    LL_PARCEL_REQUEST, /* struct ll_request of a combine */
    LL_PARCEL_ANSWER,  /* struct ll_offer: what both must say alike */
    LL_PARCEL_ROWS,
    LL_PARCELS
};
ep_status ll_net_get_parcel(ep_ll *ll, int rank, uint64_t number, enum ll_parcel what, size_t bytes, void **ret_memory);
/* false: not yet; lowlatency_wait.c has the call that waits. */
bool ll_net_try_send(ep_ll *ll, int rank, uint64_t number, enum ll_parcel what, size_t bytes);
ep_status ll_send(ep_ll *ll, int rank, uint64_t number, enum ll_parcel what, size_t bytes);
/* What has come from `rank`. */
void *ll_net_get_received(const ep_ll *ll, int rank, uint64_t number, enum ll_parcel what);

/* lowlatency_answer.c: combines between nodes. ask sends the weights, answer waits for those of the others and sends
 * them their rows. */
ep_status ll_ask(ep_ll *ll, const struct ll_combine *combine);
ep_status ll_answer(ep_ll *ll, const struct ll_combine *combine);
/* The most rows that one rank answers. */
static inline int64_t ll_most_rows(const ep_ll *ll, int max_tokens)
{
    return (int64_t)max_tokens * (ll->config.topk < ll->n_local ? ll->config.topk : ll->n_local);
}

/* For the owner of the tokens: rows of each rank of another node in the order in which they are used. */
struct ll_answers {
    const unsigned char *next[EP_MAX_RANKS];
};
void ll_find_answers(const ep_ll *ll, const struct ll_combine *combine, struct ll_answers *ret_answers);

/* lowlatency_combine.c */
ep_status ll_start_combine(ep_ll *ll, const struct ll_combine *wanted);
ep_status ll_pull(ep_ll *ll, const struct ll_combine *combine);
/* Until what combine number n uses is no longer read by the one before it there. */
ep_status ll_wait_unused(ep_ll *ll, uint64_t number);
ep_status ll_reserve_rows(ep_ll *ll, uint64_t number, int max_tokens, int expert, int32_t n_rows);

#endif
