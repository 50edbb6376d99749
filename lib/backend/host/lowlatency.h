/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.h - shared by the files of low latency: the segments that ranks write into, and waits.
 *
 * Within a node a rank writes to the segments of its peers. Between nodes each ep_ll has an endpoint of the network, on
 * which every rank is a peer of every rank of another node (lowlatency_net.c). The state of such a rank is a local copy
 * of its struct ll_shared, which the signals of that rank update; so all waits are the same.
 */
#ifndef EP_HOST_LOWLATENCY_H
#define EP_HOST_LOWLATENCY_H

#include "backend/host/host.h"

/* What each rank publishes in its struct ll_shared, and between nodes by a signal with the same number. */
enum ll_counter {
    LL_SENT,                   /* dispatches whose rows this rank has sent */
    LL_REQUESTED,              /* between nodes: combines for which this rank has sent its weights */
    LL_INPUT_READY,            /* combines whose input it has published; between nodes: whose rows it has sent */
    LL_PACKED,                 /* last dispatch n, at LL_PACKED + n % 2, that it has packed ... */
    LL_PULLED = LL_PACKED + 2, /* ... and combine that it has read; halves may finish out of order */
    LL_BARRIERS = LL_PULLED + 2,
    LL_COUNTERS,
    LL_MASKED = LL_COUNTERS, /* only a signal; odd: the sender has masked this rank */
    LL_SIGNALS
};

/* Position of the rows of one source in the packed rows of one expert. */
struct ll_range {
    int32_t begin, count;
};

/* The op descriptor of a combine: its input, and the arguments that must be equal on all ranks. */
struct ll_combine_desc {
    struct ep_group_address address;
    uint64_t call;
    uint32_t no_partial_reduce, unused;
};

/*
 * Head of a rank's shared segment. Then: ranges [2][L*R], blocks [2][R], and combine buffers [2], whose pages are
 * reserved when rows need them.
 */
struct ll_shared {
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint64_t counters[LL_COUNTERS]; /* enum ll_counter */
    struct ll_combine_desc combine_desc[2];
    alignas(EP_GROUP_CACHE_LINE) _Atomic uint8_t masked[EP_MAX_RANKS]; /* ranks that this rank has masked */
};

/*
 * Slots of one source in the segment of a receiver: count, then max_tokens slots, with the stride of the format. The
 * receiver owns the memory: a sender only writes to it, a receiver copies the headers before it checks them.
 */
struct ll_block {
    int32_t count;
    int32_t format; /* ep_ll_format() of the sender's arguments */
    int32_t max_tokens;
    int32_t unused;
    uint64_t number; /* of the dispatch: a rank that had masked the receiver has not written for this one */
    uint64_t unused_too[5];
};

struct ll_slot {
    int32_t token;
    int32_t n_experts;
    int32_t expert[]; /* local numbers, topk of them at most; then scales, then the row, each aligned to 16 */
};

/*
 * Between nodes a combine begins with the weights: the owner of the tokens sends each rank a request, with the choices
 * of its dispatch there, by token and k. The reply is one row for each (token, rank), or one for each choice with
 * EP_LL_NO_PARTIAL_REDUCE; excluded choices have none. Each rank has a region of its own for its rows at the owner:
 * late data of a masked rank overwrites nothing in use.
 */
struct ll_choice {
    int32_t token;
    int32_t expert; /* local number; ~number: excluded from this combine */
    float weight;
    uint32_t unused;
};

struct ll_request {
    struct ll_combine_desc desc; /* must be equal on both: the rank that replies checks it */
    int32_t n_choices, n_rows;
    uint64_t unused[3];
    struct ll_choice choices[];
};

_Static_assert(sizeof(struct ll_request) % 16 == 0, "choices must be aligned to 16");

/* A dispatch until its rows are packed, a combine until its rows are read. */
struct ll_dispatch {
    uint64_t number;
    ep_ll_dispatch_args args;
};

struct ll_combine {
    uint64_t number, call;
    int32_t max_tokens;
    bool in_place;  /* reads the caller's memory, which is returned only when all of its node have read it */
    int32_t *index; /* [N,K] routing passed to the combine, -1: none or excluded; room for [M,K] of ep_ll_new() */
    ep_ll_combine_args args;
};

struct ll_net; /* lowlatency_net.c */

struct host_ll {
    struct ep_group *group;
    struct host_ll *next;             /* next of the communicator, with a network */
    struct ll_net *net;               /* NULL on one node */
    unsigned char **peer;             /* [R] segments; for a rank of another node only a copy of its struct ll_shared */
    struct ep_group_address *address; /* [R] of the segments */
    struct ep_shm *shm;               /* [R] mappings of the segments of peers, kept when they free them */
    void *segment;
    void *combine_buffer[2]; /* [L, R*M, H] bf16, in the segment */
    int32_t *reserved[2];    /* [L] rows of each expert whose pages are reserved ... */
    int32_t reserved_for[2]; /* ... for this many tokens of a rank per expert */
    uint64_t barriers;
    void *arrays[24]; /* all that add_array() has returned: some of the fields here */
    int n_arrays;
    bool counts_only, no_memory;
    int64_t bytes; /* of the arrays and the network */
    /* Layout of segments. */
    size_t scales_at, row_at, slot_bytes, block_bytes; /* slot_bytes: of the largest format */
    size_t ranges_at, blocks_at, buffers_at, segment_bytes;
    int32_t *masked;             /* [R] */
    bool unmasked[EP_MAX_RANKS]; /* ranks that this one has unmasked, and that may still mask it */
    int32_t *index[2];           /* [N,K] of dispatch n at n % 2, K of its call; room for [M,K] of ep_ll_new() */
    int32_t *next_index;     /* the same while it is checked: the dispatch before the last one may still be combined */
    struct ll_block **block; /* [R] blocks that the current dispatch writes */
    int32_t *n_slots;        /* [R] written for each rank, or received from each */
    int32_t *heads;          /* [R*M] copies of the headers of received slots: struct ll_slot and K experts each */
    struct ll_range *ranges[2]; /* [L*R] of dispatch n at n % 2: a copy of those in the segment for the peers */
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

/* Is entry k the first of a token on the rank of its expert? `index` [K]: the token's experts, -1: none. */
static inline bool ll_is_first(const ep_ll *ll, const int32_t *index, size_t k)
{
    size_t before = 0;

    while (before < k && (index[before] < 0 || index[before] / ll->n_local != index[k] / ll->n_local))
        before++;
    return index[k] >= 0 && before == k;
}

static inline bool ll_is_remote(const ep_ll *ll, int rank)
{
    return rank / ll->comm->ranks_per_node != ll->comm->node;
}

/* In the segment of `receiver`; both ranks are of this node. */
static inline struct ll_block *ll_local_block(const ep_ll *ll, int receiver, uint64_t number, int source)
{
    const struct host_ll *inner = ll->impl;
    int nlocal = inner->group->nlocal;
    size_t block = (size_t)(number & 1) * (size_t)nlocal + (size_t)(source % nlocal);

    return (struct ll_block *)(void *)(inner->peer[receiver] + inner->blocks_at + block * inner->block_bytes);
}

static inline uint64_t ll_load_counter(const ep_ll *ll, int rank, int counter)
{
    return atomic_load_explicit(&ll_shared_of(ll->impl, rank)->counters[counter], memory_order_acquire);
}

/* Without waking anyone: see ll_publish(). */
static inline void ll_set_counter(ep_ll *ll, int counter, uint64_t value)
{
    atomic_store_explicit(&ll_shared_of(ll->impl, ll->comm->rank)->counters[counter], value, memory_order_release);
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

/* Slots differ in size between formats: only the row is at their end. */
static inline size_t ll_slot_bytes(const ep_ll *ll, int out_dtype)
{
    const struct host_ll *inner = ll->impl;

    return inner->row_at + ((size_t)ll->config.hidden * (out_dtype == EP_BF16 ? 2 : 1) + 15) / 16 * 16;
}

static inline struct ll_slot *ll_slot_of(struct ll_block *block, size_t slot_bytes, int i)
{
    return (struct ll_slot *)(void *)((unsigned char *)(block + 1) + (size_t)i * slot_bytes);
}

/* lowlatency_wait.c. A masked rank is not waited for any more, and learns that from the published mask. */
void ll_set_mask(ep_ll *ll, int rank, bool on);
/* Call it after data of other ranks was read: fails if one of them has masked this rank meanwhile. */
ep_status ll_check_masks(ep_ll *ll, enum ep_group_phase phase);
/* A value that no rank writes: fails the group, unless its owner has masked this rank. */
ep_status ll_fail_damaged(ep_ll *ll, int rank, enum ep_group_phase phase, const char *what, int64_t value);
/* An argument differs between this rank and `rank`: fails the group. */
ep_status ll_fail_disagree(ep_ll *ll, enum ep_group_phase phase, const char *field, int64_t mine, int64_t theirs,
                           int rank);
/* Fails unless the rank is in the same call with equal arguments. */
ep_status ll_check_combine_desc(ep_ll *ll, const struct ll_combine *combine, int rank,
                                const struct ll_combine_desc *theirs);
/* Fails because `rank` has only `count` rows of `owner` for an expert, and a token needs row i (from 0). */
ep_status ll_fail_row_count(ep_ll *ll, int owner, int rank, int32_t count, int expert, int token, int32_t i);
/* A wait for a counter of the other ranks. */
struct ll_wait {
    int counter; /* enum ll_counter */
    uint64_t value;
    enum ep_group_phase phase;
    enum { LL_ALL, LL_THIS_NODE, LL_OTHER_NODES } ranks;
    int64_t *add; /* [R] NULL, or the nanoseconds until each rank arrived are added to it */
    /* NULL, or work that other ranks wait for, done meanwhile. Its failure ends the wait. */
    ep_status (*work)(void *context);
    void *context;
};
/* Waits until the counter of those that are not masked has reached the value. Late ones may be masked. */
ep_status ll_wait(ep_ll *ll, const struct ll_wait *wanted);
/* One step of a wait for `rank`: progresses the network, then ep_group_wait() if nothing has moved. */
ep_status ll_wait_step(ep_ll *ll, struct ep_group_wait *wait, uint32_t seen, int rank);
void ll_publish(ep_ll *ll, int counter, uint64_t value);
ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int topk,
                        int32_t *ret_index);

/*
 * lowlatency_net.c: the endpoint between nodes. Functions without a rank do nothing on one node. prepare needs no peer;
 * open is collective, and returns the status of this rank.
 */
/* Bytes of the region and of the states of the ranks; of ll->impl only the layout is used. */
int64_t ll_net_bytes(const ep_ll *ll);
/* The copy of the state of a rank of another node. */
struct ll_shared *ll_net_copy_of(const ep_ll *ll, int rank);
ep_status ll_net_prepare(ep_ll *ll);
ep_status ll_net_open(ep_ll *ll);
/* Flushes sent data, for one deadline at most, then frees the endpoint. */
void ll_net_close(ep_ll *ll);
/* Around each job: outside of jobs a thread sends the remaining data. */
void ll_net_set_busy(ep_ll *ll, bool busy);
/*
 * Progresses both directions. A broken network fails the group. `wait`: NULL, or learns whether it must poll, and
 * whether data of `rank` may still be in flight.
 */
ep_status ll_net_progress(ep_ll *ll, enum ep_group_phase phase, int rank, struct ep_group_wait *wait, bool *ret_moved);
/* A counter of this rank has become `value`: signals the ranks of other nodes. */
void ll_net_publish(ep_ll *ll, int counter, uint64_t value);
void ll_net_publish_mask(ep_ll *ll, int rank, bool on);
/* Time for an unmask signal to arrive, after a synchronisation of the ranks by other means. */
#define LL_UNMASK_WAIT_NS UINT64_C(100000000)
/* Waits until the mask signals have left, for one deadline at most. */
ep_status ll_net_flush_masks(ep_ll *ll);
/* Signals one rank, after the data sent to it. */
void ll_net_signal(ep_ll *ll, int rank, int counter, uint64_t value);
/*
 * A send buffer for `rank` in call `number`, NULL: no memory; ll_net_send() then sends `bytes` of it to the region that
 * `rank` has for it.
 */
enum ll_payload {
    LL_PAYLOAD_BLOCK,   /* struct ll_block of a dispatch */
    LL_PAYLOAD_REQUEST, /* struct ll_request of a combine */
    LL_PAYLOAD_ROWS,    /* the reply */
    LL_PAYLOADS
};
void *ll_net_get_send_buffer(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes);
void ll_net_send(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes);
/* The data received from `rank`. */
void *ll_net_get_received(const ep_ll *ll, int rank, uint64_t number, enum ll_payload what);

/*
 * lowlatency_reply.c: combines between nodes. ll_send_requests() sends the weights, ll_send_replies() waits for those
 * of the others and sends them their rows.
 */
ep_status ll_send_requests(ep_ll *ll, const struct ll_combine *combine);
ep_status ll_send_replies(ep_ll *ll, const struct ll_combine *combine);
/* The most rows in one reply. */
static inline int64_t ll_max_reply_rows(const ep_ll *ll, int max_tokens)
{
    return (int64_t)max_tokens * (ll->config.topk < ll->n_local ? ll->config.topk : ll->n_local);
}

/* lowlatency_combine.c */
ep_status ll_start_combine(ep_ll *ll, const struct ll_combine *wanted);
ep_status ll_pull(ep_ll *ll, const struct ll_combine *combine);
/* Waits until the previous combine that uses the buffers of combine `number` was read. */
ep_status ll_wait_unused(ep_ll *ll, uint64_t number);
ep_status ll_reserve_rows(ep_ll *ll, uint64_t number, int max_tokens, int expert, int32_t n_rows);

#endif
