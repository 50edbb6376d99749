/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers ranks that a shrink across hosts has left out.
 *
 * A rank that is left out learns it from its node and its rail peers, if these are alive and its control links have not
 * ended. Otherwise it asks at the listeners of the old group: a thread of each member of the new group answers there,
 * also when the old group has been freed. Without that it could not distinguish members of that group from dead ranks,
 * and would wait in vain, or form a second group. The thread sleeps in poll() until a rank connects.
 */
#include "group/shrink_linked.h"

#include "base/fd.h"
#include "base/thread.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Replies in flight: closing a connection with unread bytes would discard the reply. */
#define MAX_REPLIES 16
/* Interval while handshakes have deadlines or the listener lacks descriptors. */
#define POLL_MS 500

enum { IDLE, REPLYING, STOPPING };

struct ep_group_refusal {
    _Atomic int refs;
    struct ep_group_refusal *older; /* of the previous shrinks */
    struct tcp_acceptor acceptor;
    uint64_t session, members[SHRINK_WORDS];
    int me, nranks;
    int replies[MAX_REPLIES], n_replies; /* n: total number */
    _Atomic int state;
    int event; /* signals a change of state */
    pthread_t thread;
};

static ep_status check_peer(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    const struct ep_group_refusal *refusal = context;
    const struct tcp_hello *hello = &hs->hello;

    snprintf(ret_reason, bytes, "rank %d does not expect this connection from rank %d", refusal->me, hello->rank);
    return (hello->kind == TCP_SHRINK || hello->kind == TCP_SHRINK_QUERY) && hello->session == refusal->session &&
                   hello->to == refusal->me && hello->rank >= 0 && hello->rank < refusal->nranks &&
                   !shrink_has(refusal->members, hello->rank)
               ? EP_OK
               : EP_E_MISMATCH;
}

static void reply(void *context, const struct tcp_handshake *hs, int fd)
{
    struct ep_group_refusal *refusal = context;
    struct decision decision = {.status = EP_E_EXCLUDED, .failed_rank = hs->hello.rank};
    int *slot = &refusal->replies[refusal->n_replies++ % MAX_REPLIES];

    snprintf(decision.text, sizeof(decision.text), "ep_comm_shrink: the other ranks continued without rank %d",
             hs->hello.rank);
    (void)shrink_send(fd, &decision, sizeof(decision)); /* a rank that has disconnected asks again */
    if (*slot >= 0)
        ep_fd_close(*slot);
    *slot = fd;
}

/* The peer closes the connection when it has read the reply. */
static void close_read(struct ep_group_refusal *refusal)
{
    unsigned char bytes[256];

    for (int i = 0; i < MAX_REPLIES; i++) {
        ssize_t n = 1;

        while (refusal->replies[i] >= 0 && n > 0)
            n = recv(refusal->replies[i], bytes, sizeof(bytes), MSG_DONTWAIT);
        if (refusal->replies[i] < 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)))
            continue;
        ep_fd_close(refusal->replies[i]);
        refusal->replies[i] = -1;
    }
}

static void *run(void *context)
{
    struct ep_group_refusal *refusal = context;
    struct pollfd polls[1 + TCP_ACCEPTOR_POLLS + MAX_REPLIES];
    uint64_t events;

    for (;;) {
        int state = atomic_load(&refusal->state), n = 0;
        /* Until then the acceptor is being set. */
        bool busy = state == REPLYING && (refusal->acceptor.n > 0 || refusal->acceptor.error);

        if (state == STOPPING)
            return NULL;
        if (!ep_fd_is_ours(refusal->event))
            return NULL;
        polls[n++] = (struct pollfd){.fd = refusal->event, .events = POLLIN};
        if (state == REPLYING)
            n += tcp_acceptor_get_polls(&refusal->acceptor, polls + n);
        for (int i = 0; i < MAX_REPLIES; i++)
            polls[n++] = (struct pollfd){.fd = refusal->replies[i], .events = POLLIN};
        (void)poll(polls, (nfds_t)n, busy ? POLL_MS : -1);
        (void)!read(refusal->event, &events, sizeof(events));
        if (state == REPLYING)
            tcp_acceptor_step(&refusal->acceptor, check_peer, reply, refusal);
        close_read(refusal);
    }
}

static void set_state(struct ep_group_refusal *refusal, int state)
{
    uint64_t one = 1;

    atomic_store(&refusal->state, state);
    if (ep_fd_is_ours(refusal->event))
        (void)!write(refusal->event, &one, sizeof(one));
}

ep_status shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal)
{
    struct ep_group_refusal *refusal;
    bool needed = false;
    int error;

    /* A rank that is left out and dead needs no answer. */
    for (int rank = 0; rank < l->nranks; rank++)
        needed |= !shrink_has(l->decision.survivors, rank) && !shrink_has(l->dead, rank);
    *ret_refusal = NULL;
    if (!needed)
        return EP_OK;
    refusal = calloc(1, sizeof(*refusal));
    if (!refusal)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for the thread that answers excluded ranks");
    *refusal = (struct ep_group_refusal){
        .refs = 1, .session = l->rendezvous->session, .me = l->me, .nranks = l->nranks, .acceptor.fd = -1};
    memcpy(refusal->members, l->decision.survivors, sizeof(refusal->members));
    for (int i = 0; i < MAX_REPLIES; i++)
        refusal->replies[i] = -1;
    refusal->event = ep_fd_above_stdio(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    error = refusal->event < 0 ? errno : ep_thread_start(&refusal->thread, run, refusal);
    if (!error) {
        *ret_refusal = refusal;
        return EP_OK;
    }
    if (refusal->event >= 0)
        ep_fd_close(refusal->event);
    free(refusal);
    return ep_fail_errno(EP_E_SYSTEM, error, "ep_comm_shrink: cannot start the thread that answers excluded ranks");
}

void shrink_refuse_begin(struct ep_group_refusal *refusal, struct ep_group *old, struct ep_group *next)
{
    struct ep_group_refusal *older = old->refusal;
    struct tcp_acceptor *acceptor;
    struct ep_net *tcp;

    if (older)
        atomic_fetch_add(&older->refs, 1);
    next->refusal = refusal ? refusal : older;
    if (!refusal)
        return;
    refusal->older = older;
    tcp = ep_streams_get_net(old->streams)->tcp;
    acceptor = ep_net_tcp_take_acceptor(tcp, true);
    refusal->acceptor = *acceptor;
    acceptor->fd = -1;
    (void)ep_net_tcp_take_acceptor(tcp, false);
    set_state(refusal, REPLYING);
}

void ep_group_refusal_free(struct ep_group_refusal *refusal)
{
    while (refusal && atomic_fetch_sub(&refusal->refs, 1) == 1) {
        struct ep_group_refusal *older = refusal->older;

        set_state(refusal, STOPPING);
        pthread_join(refusal->thread, NULL);
        tcp_acceptor_close(&refusal->acceptor);
        for (int i = 0; i < MAX_REPLIES; i++)
            if (refusal->replies[i] >= 0)
                ep_fd_close(refusal->replies[i]);
        ep_fd_close(refusal->event);
        explicit_bzero(&refusal->acceptor.key, sizeof(refusal->acceptor.key));
        free(refusal);
        refusal = older;
    }
}
