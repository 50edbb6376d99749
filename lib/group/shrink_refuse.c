/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers for those that a shrink across hosts has left out.
 *
 * Who is left out hears of it from its node and its rail peers, if these live and its control links have not ended. One
 * that has neither asks at the listeners of the old group: a thread of each member of the new group answers there, also
 * when the old group has been freed. Otherwise it could not tell members of that group from ranks that died, and would
 * wait in vain, or form a group beside theirs. The thread sleeps in poll() until somebody connects.
 */
#include "group/shrink_linked.h"

#include "base/fd.h"
#include "base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Answers on their way: a connection that is closed with unread bytes would take the answer with it. */
#define ANSWERS 16
/* Handshakes have deadlines, and a listener may lack descriptors. */
#define LOOK_MS 500

enum { WAITS, ANSWERS_NOW, ENDS };

struct ep_group_refusal {
    _Atomic int refs;
    struct ep_group_refusal *older; /* of the shrinks before */
    struct tcp_acceptor acceptor;
    uint64_t session, out[SHRINK_WORDS];
    int me, nranks;
    int answers[ANSWERS], n_answers; /* n: of all until now */
    _Atomic int state;
    int event; /* state has changed */
    pthread_t thread;
};

static ep_status check_asker(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    const struct ep_group_refusal *refusal = context;
    const struct tcp_hello *hello = &hs->hello;

    snprintf(ret_reason, bytes, "rank %d expects no such connection of rank %d", refusal->me, hello->rank);
    return (hello->kind == TCP_SHRINK || hello->kind == TCP_SHRINK_QUERY) && hello->session == refusal->session &&
                   hello->to == refusal->me && hello->rank >= 0 && hello->rank < refusal->nranks &&
                   shrink_has(refusal->out, hello->rank)
               ? EP_OK
               : EP_E_MISMATCH;
}

static void answer(void *context, const struct tcp_handshake *hs, int fd)
{
    struct ep_group_refusal *refusal = context;
    struct decision decision = {.status = EP_E_EXCLUDED, .failed_rank = hs->hello.rank};
    int *kept = &refusal->answers[refusal->n_answers++ % ANSWERS];

    snprintf(decision.text, sizeof(decision.text), "ep_comm_shrink: the other ranks went on without rank %d",
             hs->hello.rank);
    (void)shrink_send(fd, &decision, sizeof(decision)); /* who has gone meanwhile asks again */
    if (*kept >= 0)
        close(*kept);
    *kept = fd;
}

/* The far end closes when it has read the answer. */
static void drop_read(struct ep_group_refusal *refusal)
{
    unsigned char bytes[256];

    for (int i = 0; i < ANSWERS; i++) {
        ssize_t n = 1;

        while (refusal->answers[i] >= 0 && n > 0)
            n = recv(refusal->answers[i], bytes, sizeof(bytes), MSG_DONTWAIT);
        if (refusal->answers[i] < 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)))
            continue;
        close(refusal->answers[i]);
        refusal->answers[i] = -1;
    }
}

static void *run(void *context)
{
    struct ep_group_refusal *refusal = context;
    struct pollfd polls[1 + TCP_ACCEPTOR_POLLS + ANSWERS];
    uint64_t events;

    for (;;) {
        int state = atomic_load(&refusal->state), n = 0;
        bool busy = refusal->acceptor.n > 0 || refusal->acceptor.error;

        if (state == ENDS)
            return NULL;
        polls[n++] = (struct pollfd){.fd = refusal->event, .events = POLLIN};
        if (state == ANSWERS_NOW)
            n += tcp_acceptor_get_polls(&refusal->acceptor, polls + n);
        for (int i = 0; i < ANSWERS; i++)
            polls[n++] = (struct pollfd){.fd = refusal->answers[i], .events = POLLIN};
        (void)poll(polls, (nfds_t)n, busy ? LOOK_MS : -1);
        (void)!read(refusal->event, &events, sizeof(events));
        if (state == ANSWERS_NOW)
            tcp_acceptor_step(&refusal->acceptor, check_asker, answer, refusal);
        drop_read(refusal);
    }
}

static void set_state(struct ep_group_refusal *refusal, int state)
{
    uint64_t one = 1;

    atomic_store(&refusal->state, state);
    (void)!write(refusal->event, &one, sizeof(one));
}

/* Not of those that are known to have died: nobody answers a process that has ended. */
static bool leaves_out(const struct linked *l, uint64_t *ret_out)
{
    bool any = false;

    for (int rank = 0; rank < l->nranks; rank++) {
        if (shrink_has(l->decision.survivors, rank))
            continue;
        shrink_add(ret_out, rank);
        any |= !shrink_has(l->dead, rank);
    }
    return any;
}

ep_status shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal)
{
    uint64_t out[SHRINK_WORDS] = {0};
    struct ep_group_refusal *refusal;
    int fd, error;

    *ret_refusal = NULL;
    if (!leaves_out(l, out))
        return EP_OK;
    refusal = calloc(1, sizeof(*refusal));
    if (!refusal)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory to answer ranks that are left out");
    *refusal = (struct ep_group_refusal){
        .refs = 1, .session = l->rendezvous->session, .me = l->me, .nranks = l->nranks, .state = WAITS};
    memcpy(refusal->out, out, sizeof(out));
    for (int i = 0; i < ANSWERS; i++)
        refusal->answers[i] = -1;
    fd = fcntl(l->rendezvous->listener, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    error = errno;
    refusal->event = fd < 0 ? -1 : ep_fd_above_stdio(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    error = fd < 0 ? error : refusal->event < 0 ? errno : 0;
    if (!error) {
        tcp_acceptor_open(&refusal->acceptor, fd, &l->rendezvous->key);
        error = ep_thread_start(&refusal->thread, NULL, run, refusal);
    }
    if (!error) {
        *ret_refusal = refusal;
        return EP_OK;
    }
    if (refusal->event >= 0)
        close(refusal->event);
    if (fd >= 0)
        close(fd);
    free(refusal);
    return ep_fail_errno(EP_E_SYSTEM, error, "ep_comm_shrink: what answers ranks that are left out");
}

static struct ep_group_refusal *acquire(struct ep_group_refusal *refusal)
{
    if (refusal)
        atomic_fetch_add(&refusal->refs, 1);
    return refusal;
}

void shrink_refuse_begin(struct ep_group_refusal *refusal, struct ep_group *old, struct ep_group *next)
{
    next->refusal = refusal ? refusal : acquire(old->refusal);
    if (!refusal)
        return;
    refusal->older = acquire(old->refusal);
    set_state(refusal, ANSWERS_NOW);
}

void ep_group_refusal_free(struct ep_group_refusal *refusal)
{
    while (refusal && atomic_fetch_sub(&refusal->refs, 1) == 1) {
        struct ep_group_refusal *older = refusal->older;

        set_state(refusal, ENDS);
        pthread_join(refusal->thread, NULL);
        tcp_acceptor_close(&refusal->acceptor);
        for (int i = 0; i < ANSWERS; i++)
            if (refusal->answers[i] >= 0)
                close(refusal->answers[i]);
        close(refusal->event);
        explicit_bzero(&refusal->acceptor.key, sizeof(refusal->acceptor.key));
        free(refusal);
        refusal = older;
    }
}
