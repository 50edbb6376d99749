/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shrink_linked.h - what the files of a shrink across hosts share: shrink_linked.c makes the group, shrink_lead.c
 * gathers the survivors, shrink_follow.c joins a leader, shrink_refuse.c answers who comes when it is too late.
 */
#ifndef EP_GROUP_SHRINK_LINKED_H
#define EP_GROUP_SHRINK_LINKED_H

#include "group/shrink.h"
#include "net/tcp.h"
#include "tcp/acceptor.h"

#define SHRINK_WORDS (EP_MAX_RANKS / 64)
#define SHRINK_POLL_MS 20

/* What a survivor says to the leader. */
struct join {
    uint64_t dead[SHRINK_WORDS], cut[SHRINK_WORDS];
    uint64_t untold_aborts; /* as in ep_group */
};

/* What the leader says to all that have come. */
struct decision {
    int32_t waits; /* 1: it has not decided yet, and nothing else is set */
    int32_t status, failed_rank;
    uint64_t survivors[SHRINK_WORDS];
    char text[EP_GROUP_REASON_BYTES];
};

struct linked {
    struct ep_group *group;
    const struct ep_net_tcp_rendezvous *rendezvous;
    struct tcp_acceptor *acceptor;
    int nranks, me, timeout_ms;
    uint64_t deadline_ns;
    uint64_t beat_ns;                   /* leader: when it last said that it waits */
    uint64_t dead[SHRINK_WORDS];        /* as far as this rank knows, and on the leader as far as any does */
    uint64_t cut[SHRINK_WORDS];         /* in the same way: whether they live is to be asked by a new connection */
    uint64_t passed_over[SHRINK_WORDS]; /* leaders that did not answer */
    int *fds;                           /* [R] leader: connections of those that have come */
    size_t *used;                       /* [R] bytes of the join that are there */
    struct join *joins;                 /* [R] */
    struct shrink_aborts aborts;
    int aborted_by; /* leader: who has come, and aborted; -1: nobody */
    struct decision decision;
};

static inline bool shrink_has(const uint64_t *bits, int rank)
{
    return bits[rank / 64] >> (rank % 64) & 1;
}

static inline void shrink_add(uint64_t *bits, int rank)
{
    bits[rank / 64] |= UINT64_C(1) << (rank % 64);
}

/* --- shrink_linked.c --- */

/* A host that acknowledges nothing: its ranks live as far as anybody knows. */
bool shrink_is_silent(const struct ep_group *group, int rank);
/* Adds to `dead` and `cut` what this rank knows. */
void shrink_look_for_dead(struct linked *l);
/* EP_OK, or why this call ends now. */
ep_status shrink_check(struct linked *l, int *ret_failed_rank);
/* Of a message over a connection that does not block. 1: all of it, 0: not yet, -1: the connection has ended. */
int shrink_receive(int fd, void *message, size_t bytes, size_t *used);
/* Into an empty socket, whose buffer is larger than any of them. */
bool shrink_send(int fd, const void *message, size_t bytes);

/* --- shrink_lead.c, shrink_follow.c --- */

/* Waits for the others, and tells those that have come what is decided. */
ep_status shrink_lead(struct linked *l);
/* EP_OK with *ret_fd: this rank has a decision of its leader. *ret_fd -1: that one is passed over. */
ep_status shrink_follow(struct linked *l, int leader, int *ret_fd);
/* --- shrink_confirm.c --- */

/* This rank knows that the group is made, and says so to the others. */
void shrink_confirm_set(ep_comm *next);
/* It has lost the leader instead: does another rank know? ep_last_error() is kept. */
bool shrink_confirm_ask(struct linked *l, ep_comm *next);

/* --- shrink_refuse.c --- */

/* Before the group is confirmed, so that what is missing for it fails the group. NULL: nobody is left out. */
ep_status shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal);
/* The group is there, and answers from now on. Takes the refusal; those of the old group are the new one's, too. */
void shrink_refuse_begin(struct ep_group_refusal *refusal, struct ep_group *old, struct ep_group *next);

#endif
