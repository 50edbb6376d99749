/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.h - shared by the files of low latency, each of which calls only those above it:
 *
 *   lowlatency_net.c      sends what is written for ranks of other nodes, and receives what they send
 *   lowlatency_wait.c     words that ranks publish, waits for them, masks
 *   lowlatency_combine.c  combine
 *   lowlatency_open.c     opening and closing
 *   lowlatency.c          dispatch, and the calls
 *
 * Each rank has a segment, in which every rank has words and slots of its own (net/ll_wire.h). Those of its node write
 * to them directly. For each rank of another node there is an outgoing segment, whose contents the network sends into
 * the segment of that rank.
 */
#ifndef EP_HOST_LOWLATENCY_H
#define EP_HOST_LOWLATENCY_H

#include "backend/host/host.h"
#include "group/collective.h"
#include "group/failure.h"
#include "group/memory.h"
#include "group/peers.h"
#include "group/queue.h"
#include "group/wait.h"
#include "net/ll_wire.h"

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
 * In the shared segment of a rank after the words and slots, for ranks of its node to read. Then: ranges [2][L*R] of
 * dispatch n at n % 2, and combine buffers [2], whose pages are reserved when rows need them.
 */
struct ll_shared {
    struct ll_combine_desc combine_desc[2]; /* of combine n at n % 2 */
};

/* In a slot, K times: an expert of the group or -1, and the index of the row among those of its source for it. */
struct ll_choice {
    int32_t expert, index;
};

/*
 * A dispatch until its rows are packed, a combine until its rows are read. serial: its number among dispatches and
 * combines together, as in the words of segments.
 */
struct ll_dispatch {
    uint64_t number, serial;
    ep_ll_dispatch_args args;
};

struct ll_combine {
    uint64_t number, call, serial;
    int32_t max_tokens;
    bool in_place;  /* reads the caller's memory, which is returned only when all of its node have read it */
    int32_t *index; /* [N,K] routing passed to the combine, -1: none or excluded; room for [M,K] of ep_ll_new() */
    ep_ll_combine_args args;
};

struct ll_net; /* lowlatency_net.c */

/* What one rank writes in a segment: the words and slots of `source`. */
struct ll_view {
    unsigned char *segment;
    const struct ll_wire *layout;
    int source;
};

/* A call whose second half has not run. There is one set of slots: it runs before the next call, on all ranks. */
struct ll_open {
    bool dispatch;   /* or a combine */
    uint64_t number; /* 0: none is open */
};

struct host_ll {
    struct ep_group *group;
    struct host_ll *next;             /* next of the communicator, with a network */
    struct ll_net *net;               /* NULL on one node */
    struct ll_wire layout;            /* of the segments, whose sources are all ranks */
    unsigned char **peer;             /* [R] segments; NULL: of another node */
    struct ep_group_address *address; /* [R] of the segments */
    struct ep_shm *shm;               /* [R] mappings of the segments of peers, kept when they free them */
    void *segment;
    void *combine_buffer[2]; /* [L, R*M, H] bf16, in the segment */
    int32_t *reserved[2];    /* [L] rows of each expert whose pages are reserved ... */
    int32_t reserved_for[2]; /* ... for this many tokens of a rank per expert */
    uint64_t serial;         /* of the last dispatch or combine that has begun */
    struct ll_open open;
    uint64_t barriers;
    void *arrays[24]; /* all that add_array() has returned: some of the fields here */
    int n_arrays;
    bool counts_only, no_memory;
    int64_t bytes; /* of the arrays and the network */
    /* In slots, and in the segment. */
    size_t scales_at, row_at;
    size_t shared_at, ranges_at, buffers_at, segment_bytes;
    int32_t *masked;             /* [R] */
    bool unmasked[EP_MAX_RANKS]; /* ranks that this one has unmasked, and that may still mask it */
    int32_t *index[2];           /* [N,K] of dispatch n at n % 2, K of its call; room for [M,K] of ep_ll_new() */
    int32_t *next_index; /* the same while it is checked: the dispatch before the last one may still be combined */
    struct ll_choice *choices[2]; /* [R][M,K] received in dispatch n at n % 2; local experts, -1: none here */
    struct ll_range *ranges[2];   /* [L*R] of dispatch n at n % 2: a copy of those in the segment for the peers */
    int32_t *seen;                /* [E] rows of a rank so far, per expert */
    uint8_t *row;                 /* one quantised row */
    uint16_t *sums;               /* [K,H] sums of the rows of a token on each rank of this node */
    float *scales;
    struct ll_dispatch dispatch[2]; /* number n at n % 2 */
    struct ll_combine combine[2];
};

static inline struct ll_shared *ll_shared_of(const struct host_ll *inner, int rank)
{
    return (struct ll_shared *)(void *)(inner->peer[rank] + inner->shared_at);
}

static inline struct ll_range *ll_ranges_of(const ep_ll *ll, int rank, uint64_t number)
{
    const struct host_ll *inner = ll->impl;
    size_t n = (size_t)ll->n_local * (size_t)ll->comm->nranks;

    return (struct ll_range *)(void *)(inner->peer[rank] + inner->ranges_at) + (number & 1) * n;
}

static inline struct ll_choice *ll_choices_of(const ep_ll *ll, uint64_t number, int source, int token)
{
    const struct host_ll *inner = ll->impl;
    size_t slot = (size_t)source * (size_t)ll->config.max_tokens + (size_t)token;

    return inner->choices[number & 1] + slot * (size_t)ll->config.topk;
}

static inline bool ll_is_remote(const ep_ll *ll, int rank)
{
    return rank / ll->comm->ranks_per_node != ll->comm->node;
}

/* Rows of a combine in which each rank has up to max_tokens tokens. */
static inline size_t ll_combine_bytes(const ep_ll *ll, int max_tokens)
{
    return (size_t)ll->config.n_experts * (size_t)max_tokens * (size_t)ll->config.hidden * 2;
}

/* Slots differ in size between formats: only the row is at their end. */
static inline size_t ll_slot_bytes(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    const struct host_ll *inner = ll->impl;
    int64_t behind = args->out_dtype == EP_F4E2M1 ? ep_ll_scale_words(ll, args) * 4 : 0;

    return inner->row_at + ((size_t)(ep_ll_row_bytes(ll, args) + behind) + 15) / 16 * 16;
}

/*
 * lowlatency_net.c: the endpoint between nodes. Functions without a rank do nothing on one node. prepare needs no peer;
 * open is collective, and returns the status of this rank.
 */
/* Bytes of the segments and of the endpoint; of ll->impl only the layout is used. */
int64_t ll_net_bytes(const ep_ll *ll);
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
/*
 * What this rank writes for `rank`. The network reads it outside of jobs and in ll_net_send() and ll_net_progress().
 */
struct ll_view ll_net_to(const ep_ll *ll, int rank);
/* Sends what has changed in the outgoing segment for `rank`. */
void ll_net_send(ep_ll *ll, int rank);
/* The last call that is complete here: later data of it is dropped. */
void ll_net_set_finished(ep_ll *ll, uint64_t serial);
/* After the mask of `rank` has changed: how long data is sent for it alone. */
void ll_net_note_mask(ep_ll *ll, int rank, bool on);
/* Waits until the masks have left, for one deadline at most. */
ep_status ll_net_flush_masks(ep_ll *ll);

/* What `rank` writes for this rank. */
static inline struct ll_view ll_from(const ep_ll *ll, int rank)
{
    const struct host_ll *inner = ll->impl;

    return (struct ll_view){inner->segment, &inner->layout, rank};
}

/* What this rank writes for `rank`. */
static inline struct ll_view ll_to(const ep_ll *ll, int rank)
{
    const struct host_ll *inner = ll->impl;

    if (ll_is_remote(ll, rank))
        return ll_net_to(ll, rank);
    return (struct ll_view){inner->peer[rank], &inner->layout, ll->comm->rank};
}

static inline struct ll_wire_segment *ll_words_of(const struct ll_view *view)
{
    return (struct ll_wire_segment *)(void *)view->segment;
}

/* lowlatency_wait.c. A word of struct ll_wire_segment. */
#define LL_WORD(name) offsetof(struct ll_wire_segment, name)
uint64_t ll_load(const ep_ll *ll, int rank, size_t word);
/* Sets the word of this rank for another one, or for all others, and sends or announces it. */
void ll_publish_to(ep_ll *ll, int rank, size_t word, uint64_t value);
void ll_publish(ep_ll *ll, size_t word, uint64_t value);
/* The call is complete here. */
void ll_publish_completed(ep_ll *ll, uint64_t serial);
/* A masked rank is not waited for any more, and learns that from the published mask. */
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
/* A wait until a word of the other ranks has reached a value. */
struct ll_wait {
    size_t word;
    uint64_t value;
    enum ep_group_phase phase;
    enum { LL_ALL, LL_THIS_NODE, LL_OTHER_NODES } ranks;
    int64_t *add; /* [R] NULL, or the nanoseconds until each rank arrived are added to it */
    /* NULL, or work that other ranks wait for, done meanwhile. Its failure ends the wait. */
    ep_status (*work)(void *context);
    void *context;
};
/* Waits for those that are not masked. Late ones may be masked. */
ep_status ll_wait(ep_ll *ll, const struct ll_wait *wanted);
/* One step of a wait for `rank`: progresses the network, then ep_group_wait() if nothing has moved. */
ep_status ll_wait_step(ep_ll *ll, struct ep_group_wait *wait, uint32_t seen, int rank);

/* lowlatency_combine.c */
/* max_rows: of one expert; 0: any number. */
ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int topk, int max_rows,
                        int32_t *ret_index);
ep_status ll_start_combine(ep_ll *ll, const struct ll_combine *wanted);
ep_status ll_pull(ep_ll *ll, const struct ll_combine *combine);
ep_status ll_reserve_rows(ep_ll *ll, uint64_t number, int max_tokens, int expert, int32_t n_rows);

#endif
