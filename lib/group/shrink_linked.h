/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shrink_linked.h - shared by the files of a shrink across hosts: shrink_linked.c creates the group, shrink_lead.c
 * gathers the survivors, shrink_follow.c joins a leader, shrink_confirm.c finds the outcome if the leader is lost in
 * the last step, shrink_refuse.c answers ranks that arrive too late.
 */
#ifndef EP_GROUP_SHRINK_LINKED_H
#define EP_GROUP_SHRINK_LINKED_H

#include "group/shrink.h"
#include "net/tcp.h"
#include "tcp/acceptor.h"

#define SHRINK_WORDS (EP_MAX_RANKS / 64)
#define SHRINK_POLL_MS 20

/* Message of a survivor to the leader. */
struct join {
    uint64_t dead[SHRINK_WORDS], cut[SHRINK_WORDS];
    uint64_t unreported_aborts; /* as in ep_group */
};

/* Message of the leader to all ranks that have joined. */
struct decision {
    int32_t pending; /* 1: heartbeat, no decision yet; nothing else is set */
    int32_t status, failed_rank;
    uint64_t survivors[SHRINK_WORDS];
    char text[EP_GROUP_REASON_BYTES];
};

struct linked {
    struct ep_group *group;
    const struct ep_net_tcp_rendezvous *rendezvous;
    int nranks, me, timeout_ms;
    uint64_t deadline_ns;
    uint64_t heartbeat_ns;          /* leader: when it last sent a heartbeat */
    uint64_t dead[SHRINK_WORDS];    /* known to this rank, and on the leader to any rank */
    uint64_t cut[SHRINK_WORDS];     /* known in the same way: only a new connection can tell whether they are alive */
    uint64_t skipped[SHRINK_WORDS]; /* leaders that did not answer */
    bool ended_others;              /* an abort that this rank reported has ended the call of the others */
    struct shrink_aborts aborts;
    int aborted_by;  /* leader: a rank that has joined, and aborted; -1: none */
    int failed_rank; /* of a failure */
    struct decision decision;
    struct tcp_star *star;         /* of the survivors */
    struct shrink_group next;      /* that is created over it */
    struct tcp_acceptor *acceptor; /* leader */
    struct member {
        int fd;      /* the connection to it, -1: none; of a leader to all that join, of the others to their leader */
        size_t used; /* bytes received of the message below, or of the decision of the leader */
        struct join join;
    } members[]; /* [R] */
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

/* Adds to `dead` and `cut` what this rank knows. */
void shrink_update_dead(struct linked *l);
/* EP_OK, or the reason why this call ends now, and the failed rank. */
ep_status shrink_check(struct linked *l);
/* Begins a handshake with a rank; false: that is not possible, with errno. */
bool shrink_connect(const struct linked *l, struct tcp_handshake *hs, enum tcp_kind kind, int rank,
                    const struct tcp_address *to, uint64_t deadline_ns);
/* Closes the connection to a rank, if there is one. */
void shrink_drop(struct linked *l, int rank);
/* No process listens at any address of a rank: it is dead, if its host is not silent. */
void shrink_note_refused(struct linked *l, int rank);
/* Sends to an empty socket, whose buffer is larger than any message. */
bool shrink_send(int fd, const void *message, size_t bytes);

/* --- shrink_lead.c, shrink_follow.c --- */

/* Waits for the others, and sends the decision to those that have joined. */
ep_status shrink_lead(struct linked *l);
/* EP_OK with a connection: this rank has a decision of its leader. Without one: the leader is skipped. */
ep_status shrink_follow(struct linked *l, int leader);

/* --- shrink_confirm.c --- */

/* Publishes that this rank has received the confirmation of the group. */
void shrink_confirm_set(ep_comm *next);
/* On the leader: true if a rank has left the group without the confirmation, as all do that have given up. */
bool shrink_confirm_is_refused(const ep_comm *next);
/* This rank has lost the leader: true if another rank has received the confirmation. Keeps ep_last_error(). */
bool shrink_confirm_query(struct linked *l, ep_comm *next);

/* --- shrink_refuse.c --- */

/* Before the group is confirmed, so that missing resources fail the group. NULL: no rank is left out. */
ep_status shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal);
/* Starts to answer for the new group. Takes the refusal; the new group shares those of the old one. */
void shrink_refuse_begin(struct ep_group_refusal *refusal, struct ep_group *old, struct ep_group *next);

#endif
