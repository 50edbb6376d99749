/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control links: one connection to each rail peer of another host, all served by one thread of this rank that
 * sleeps in poll().
 *
 * Heartbeats carry the state that peers on the same host read in control blocks: the rank that each rank of the node
 * waits for, and when it last probed its peers. So a rank whose deadline expires follows the chain of waits across
 * hosts. Each rank that learns of a failure sends it to all its rail peers, which publish it there: those of the rank
 * that set it may have died, and then another node is the only way to theirs. The death of a process is detected by the
 * end of its connections, a host that is cut off by the age of its heartbeats. Each rank also watches the processes of
 * its node and reports their deaths to ranks that have no connection to them.
 *
 * At most one message of a link is in flight: a peer that does not read costs no memory.
 */
#include "group/link_wire.h"

#include "base/fd.h"
#include "base/futex.h"
#include "base/thread.h"
#include "net/tcp.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

/* Heartbeats in a deadline: a waiting peer is late when half a deadline has passed without one. */
#define HEARTBEATS 10
#define HEARTBEAT_MIN_MS 10
#define HEARTBEAT_MAX_MS 1000
/* Time for the last state to be sent. */
#define LEAVE_MS 200
/* The same for a failure. A peer that does not read has no room for it only if its buffers are full. */
#define FAILURE_MS 100
/*
 * A host is silent if it has acknowledged nothing for this many heartbeats, with a margin for delayed acknowledgements.
 * The others exclude a live rank after a deadline at the earliest: by then its own heartbeats show the silence.
 */
#define SILENT_HEARTBEATS 3
#define ACKNOWLEDGE_MS 50

struct conn {
    int fd; /* -1: ended */
    int rank;
    uint64_t heartbeat_ns; /* when the next heartbeat is due */
    uint64_t sent_ns;      /* when the last periodic one was sent */
    int unacknowledged;    /* consecutive ones without an acknowledgement */
    bool sent_last;
    uint32_t sent_events;     /* count_events() */
    struct link_message *out; /* the last message */
    size_t out_used, out_at;
    struct link_reader reader;
    struct ep_group_link *link;
};

struct ep_group_link {
    struct ep_group *group;
    struct pollfd polls[EP_MAX_RANKS + 1]; /* of the connections, of link_event, of the processes of this node */
    uint64_t heartbeat_ns;                 /* interval */
    bool dead[EP_MAX_RANKS];               /* by index on this node: its process was seen to end */
    bool watch_processes;                  /* poll() watches processes, so that a death is reported at once */
    pthread_t thread;
    bool started;
    _Atomic bool stops;
    _Atomic uint32_t failure_sent; /* on all links; also if that took too long */
    unsigned char *memory;         /* buffers of all connections */
    int n;
    struct conn conns[];
};

/* --- receiving --- */

bool link_reader_feed(struct link_reader *reader, const unsigned char *bytes, size_t n, link_message_fn on_message,
                      void *context)
{
    struct link_message *message = reader->message;
    size_t all = link_message_bytes(reader->nlocal);

    while (n) {
        size_t room = all - reader->used, taken = room < n ? room : n;

        memcpy((unsigned char *)message + reader->used, bytes, taken);
        reader->used += taken;
        bytes += taken;
        n -= taken;
        if (reader->used >= offsetof(struct link_message, failure) &&
            (message->magic != LINK_MAGIC || message->nlocal != reader->nlocal))
            return false;
        if (reader->used < all)
            continue;
        reader->used = 0;
        on_message(context, message);
    }
    return true;
}

/* The reason is stored before the failure that it belongs to. Only the first failure that a rank reports counts. */
static void receive_failure(struct conn *conn, const struct link_message *message)
{
    struct ep_group *group = conn->link->group;
    int reporter = (uint16_t)message->failure;
    bool remote = reporter < group->comm->nranks && !group->peers[reporter].control;
    struct ep_group_state *from = remote ? &group->remote[reporter].state : NULL;

    if (from && message->reason[0] && !atomic_load(&from->reason_for)) {
        memcpy(from->reason, message->reason, sizeof(from->reason));
        atomic_store_explicit(&from->reason_for, message->failure, memory_order_release);
    }
    ep_group_receive_failure(group, message->failure, conn->rank);
}

static void receive_message(void *context, const struct link_message *message)
{
    struct conn *conn = context;
    struct ep_group *group = conn->link->group;
    uint64_t now = ep_now_ns();

    if (message->failure)
        receive_failure(conn, message);
    atomic_store(&group->remote[conn->rank].heard_ns, now);
    for (int i = 0; i < group->nlocal; i++) {
        const struct link_entry *entry = &message->entries[i];
        struct ep_group_remote *remote = &group->remote[conn->rank - group->local + i];
        uint64_t age_ns = (uint64_t)entry->age_ms * 1000000u;

        atomic_store(&remote->state.probed_ns, age_ns < now ? now - age_ns : 0);
        atomic_store(&remote->state.waiting, entry->waiting);
        /* Before the aborts: the reader must not take that for an abort without a shrink. */
        atomic_store(&remote->state.aborts_before, entry->flags & LINK_RANK_SHRINKS ? entry->aborts + 1 : 0);
        atomic_store(&remote->state.aborts, entry->aborts);
        atomic_store(&remote->state.confirmation, entry->flags >> LINK_RANK_CONFIRMATION & 3);
        if (entry->flags & LINK_RANK_EXCLUDES)
            atomic_store(&remote->excludes, 1);
        if (entry->flags & LINK_RANK_LEFT)
            atomic_store(&remote->state.left, 1);
        if (entry->flags & LINK_RANK_DEAD)
            atomic_store(&remote->lost, 1);
    }
}

/* 0: the peer process closed it, as it does when it exits. */
static void close_conn(struct conn *conn, int error)
{
    struct ep_group *group = conn->link->group;

    close(conn->fd);
    conn->fd = -1;
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN)
        atomic_store(&group->remote[conn->rank].silent, 1);
    if (error)
        atomic_store(&group->remote[conn->rank].cut, 1);
    atomic_store(&group->remote[conn->rank].lost, 1);
    ep_group_ring_all(group); /* ranks that wait for it probe at once */
}

/*
 * send_error: of the send() before, to which the kernel has reported the reset of the connection. recv() then sees an
 * end, as if the peer process had closed it.
 */
static void receive(struct conn *conn, int send_error)
{
    unsigned char bytes[4096];

    while (conn->fd >= 0) {
        ssize_t n = recv(conn->fd, bytes, sizeof(bytes), MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        /* An invalid message ends the connection. */
        if (n <= 0 || !link_reader_feed(&conn->reader, bytes, (size_t)n, receive_message, conn))
            close_conn(conn, n < 0 ? errno : n > 0 ? EBADMSG : send_error);
    }
}

/* --- sending --- */

/* Number of changes that are sent at once, of all ranks of the node. */
static uint32_t count_events(const struct ep_group_link *link)
{
    const struct ep_group *group = link->group;
    uint32_t n = ep_group_get_failure(group) != 0;

    for (int i = 0; i < group->nlocal; i++) {
        const struct ep_group_control *control = group->peers[group->first + i].control;

        n += atomic_load(&control->state.aborts) + atomic_load(&control->state.aborts_before) +
             atomic_load(&control->state.confirmation) + atomic_load(&control->shrink.passed) + link->dead[i];
    }
    return n;
}

/*
 * Checks whether the host of the peer acknowledges. Counted in heartbeats of this rank, which sends none while it is
 * stopped or not scheduled.
 */
static void note_acknowledged(struct conn *conn, uint64_t now)
{
    struct tcp_info info = {0};
    socklen_t bytes = sizeof(info);
    uint64_t acknowledged_ns;

    if (now < conn->heartbeat_ns || getsockopt(conn->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0)
        return;
    acknowledged_ns = now - (uint64_t)info.tcpi_last_ack_recv * 1000000u;
    conn->unacknowledged =
        acknowledged_ns + ACKNOWLEDGE_MS * UINT64_C(1000000) < conn->sent_ns ? conn->unacknowledged + 1 : 0;
    conn->sent_ns = now;
    atomic_store(&conn->link->group->remote[conn->rank].silent, conn->unacknowledged >= SILENT_HEARTBEATS);
}

static struct link_entry describe_rank(const struct conn *conn, int local, uint64_t now)
{
    const struct ep_group *group = conn->link->group;
    const struct ep_group_control *control = group->peers[group->first + local].control;
    const struct ep_group_state *state = &control->state;
    uint64_t probed_ns = atomic_load(&state->probed_ns), age_ms = now > probed_ns ? (now - probed_ns) / 1000000u : 0;
    struct link_entry entry = {.waiting = atomic_load(&state->waiting),
                               .age_ms = age_ms < UINT32_MAX ? (uint32_t)age_ms : UINT32_MAX,
                               .aborts = atomic_load(&state->aborts)};

    /* Probed here, too: the caller may have seen a death that poll() has not reported yet, and leave because of it. */
    if (conn->link->dead[local] || ep_group_peer_dead(group, group->first + local))
        entry.flags |= LINK_RANK_DEAD;
    /* After that probe: a process that has ended has published before whether it left. */
    if (atomic_load(&state->left))
        entry.flags |= LINK_RANK_LEFT;
    if (atomic_load(&state->aborts_before) == entry.aborts + 1)
        entry.flags |= LINK_RANK_SHRINKS;
    if (atomic_load(&control->shrink.passed) &&
        atomic_load(&control->shrink.passed_out[conn->rank / 64]) >> (conn->rank % 64) & 1)
        entry.flags |= LINK_RANK_EXCLUDES;
    /* After `left`: a rank that leaves without the confirmation has given up. */
    entry.flags |= (atomic_load(&state->confirmation) & 3) << LINK_RANK_CONFIRMATION;
    return entry;
}

/* Queues the next message; false: nothing to send now. */
static bool queue_next(struct conn *conn, uint64_t now)
{
    const struct ep_group_link *link = conn->link;
    const struct ep_group *group = link->group;
    struct link_message *out = conn->out;
    const struct ep_group_state *state;
    bool stops = atomic_load(&link->stops);

    if (conn->sent_last || (!stops && now < conn->heartbeat_ns && conn->sent_events == count_events(link)))
        return false;
    conn->sent_last = stops;
    conn->sent_events = count_events(link);
    memset(out, 0, sizeof(*out));
    out->magic = LINK_MAGIC;
    out->nlocal = group->nlocal;
    for (int i = 0; i < group->nlocal; i++)
        out->entries[i] = describe_rank(conn, i, now);
    /* After the number of aborts: a rank that sees that finds the failure. */
    out->failure = ep_group_get_failure(group);
    state = ep_group_state_of(group, (uint16_t)out->failure);
    if (out->failure && atomic_load_explicit(&state->reason_for, memory_order_acquire) == out->failure)
        memcpy(out->reason, state->reason, sizeof(out->reason));
    conn->out_used = link_message_bytes(group->nlocal);
    conn->out_at = 0;
    note_acknowledged(conn, now);
    conn->heartbeat_ns = now + link->heartbeat_ns;
    return true;
}

static void send_all(struct conn *conn, uint64_t now)
{
    while (conn->fd >= 0 && (conn->out_at < conn->out_used || queue_next(conn, now))) {
        ssize_t n = send(conn->fd, (unsigned char *)conn->out + conn->out_at, conn->out_used - conn->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) {
            int error = errno;

            /* Data that arrived before the end counts. EPIPE: the peer process had closed the connection before. */
            receive(conn, error == EPIPE ? 0 : error);
            if (conn->fd >= 0)
                close_conn(conn, error);
            return;
        }
        conn->out_at += (size_t)n;
    }
}

/* --- the thread --- */

static int wait_ms(const struct ep_group_link *link, uint64_t now)
{
    uint64_t next = now + link->heartbeat_ns;

    for (int i = 0; i < link->n; i++) {
        const struct conn *conn = &link->conns[i];

        if (conn->fd >= 0 && conn->out_at == conn->out_used && conn->heartbeat_ns < next)
            next = conn->heartbeat_ns;
    }
    return next > now ? (int)((next - now) / 1000000u) + 1 : 0;
}

/* The processes of this node that have not ended; -1 is ignored by poll(). */
static void list_processes(const struct ep_group_link *link, struct pollfd *polls)
{
    const struct ep_group *group = link->group;

    for (int i = 0; i < group->nlocal; i++) {
        bool wanted = link->watch_processes && !link->dead[i];

        polls[i] = (struct pollfd){.fd = wanted ? group->peers[group->first + i].process.pidfd : -1, .events = POLLIN};
    }
}

static void note_failure_sent(struct ep_group_link *link)
{
    if (atomic_load(&link->failure_sent) || !ep_group_get_failure(link->group))
        return;
    for (int i = 0; i < link->n; i++) {
        const struct conn *conn = &link->conns[i];

        if (conn->fd >= 0 && !conn->sent_last && (!conn->out->failure || conn->out_at < conn->out_used))
            return;
    }
    atomic_store(&link->failure_sent, 1);
    ep_futex_wake(&link->failure_sent);
}

static void run_once(struct ep_group_link *link)
{
    uint64_t now = ep_now_ns(), events;
    nfds_t n_processes = link->watch_processes ? (nfds_t)link->group->nlocal : 0;
    int n = 0, ready;

    for (int i = 0; i < link->n; i++)
        send_all(&link->conns[i], now);
    note_failure_sent(link);
    for (int i = 0; i < link->n; i++) {
        const struct conn *conn = &link->conns[i];

        link->polls[n++] =
            (struct pollfd){.fd = conn->fd, .events = (short)(POLLIN | (conn->out_at < conn->out_used ? POLLOUT : 0))};
    }
    link->polls[n++] = (struct pollfd){.fd = link->group->link_event, .events = POLLIN};
    list_processes(link, link->polls + n);
    ready = poll(link->polls, (nfds_t)n + n_processes, wait_ms(link, now));
    /* More descriptors than RLIMIT_NOFILE allows now: deaths are sent with the next heartbeat. */
    if (ready < 0 && errno == EINVAL)
        link->watch_processes = false;
    if (ready <= 0)
        return;
    for (int i = 0; i < link->group->nlocal; i++)
        link->dead[i] |= link->polls[n + i].revents != 0;
    for (int i = 0; i < link->n; i++)
        if (link->conns[i].fd >= 0 && link->polls[i].revents)
            receive(&link->conns[i], 0);
    if (link->polls[link->n].revents)
        (void)!read(link->group->link_event, &events, sizeof(events));
}

static bool all_sent(const struct ep_group_link *link)
{
    for (int i = 0; i < link->n; i++) {
        const struct conn *conn = &link->conns[i];

        if (conn->fd >= 0 && (!conn->sent_last || conn->out_at < conn->out_used))
            return false;
    }
    return true;
}

static void *run(void *context)
{
    struct ep_group_link *link = context;
    uint64_t deadline_ns = 0;

    for (;;) {
        bool stops = atomic_load(&link->stops);

        if (stops && !deadline_ns)
            deadline_ns = ep_deadline_ns(LEAVE_MS);
        if (stops && (all_sent(link) || ep_now_ns() >= deadline_ns))
            return NULL;
        run_once(link);
    }
}

void ep_group_link_send_failure(struct ep_group *group)
{
    struct ep_group_link *link = group->link;
    uint64_t now = ep_now_ns(), deadline_ns = ep_deadline_ns(FAILURE_MS);

    if (!link || !link->started || atomic_load(&link->failure_sent) || atomic_load(&link->stops))
        return;
    ep_group_link_wake(group);
    for (; !atomic_load(&link->failure_sent) && now < deadline_ns; now = ep_now_ns())
        ep_futex_wait(&link->failure_sent, 0, deadline_ns - now);
    atomic_store(&link->failure_sent, 1);
}

/* --- opening and closing --- */

static ep_status open_conns(struct ep_group_link *link)
{
    struct ep_group *group = link->group;
    size_t each = link_message_bytes(group->nlocal);

    link->memory = calloc((size_t)link->n, 2 * each);
    if (!link->memory)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d control links", link->n);
    for (int i = 0; i < link->n; i++) {
        int node = ep_net_peer(group->comm->node, i);
        unsigned char *messages = link->memory + (size_t)i * 2 * each;

        link->conns[i] = (struct conn){.fd = ep_net_tcp_detach_link(ep_streams_get_net(group->streams)->tcp, node),
                                       .rank = ep_group_rail(group, node),
                                       .link = link,
                                       .out = (void *)messages,
                                       .reader = {group->nlocal, 0, (void *)(messages + each)}};
        atomic_store(&group->remote[link->conns[i].rank].heard_ns, ep_now_ns());
    }
    return EP_OK;
}

ep_status ep_group_link_open(struct ep_group *group)
{
    int timeout_ms = group->comm->config.timeout_ms, heartbeat_ms = timeout_ms / HEARTBEATS;
    size_t n = (size_t)group->comm->nnodes - 1;
    struct ep_group_link *link = calloc(1, sizeof(*link) + n * sizeof(link->conns[0]));

    group->link = link;
    group->remote = calloc((size_t)group->comm->nranks, sizeof(*group->remote));
    if (!link || !group->remote)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %zu control links", n);
    if (heartbeat_ms < HEARTBEAT_MIN_MS)
        heartbeat_ms = HEARTBEAT_MIN_MS;
    if (heartbeat_ms > HEARTBEAT_MAX_MS)
        heartbeat_ms = HEARTBEAT_MAX_MS;
    link->group = group;
    link->heartbeat_ns = (uint64_t)heartbeat_ms * 1000000u;
    link->watch_processes = true;
    link->n = (int)n;
    EP_TRY(open_conns(link));
    group->link_event = ep_fd_above_stdio(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (group->link_event < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "ep_comm_new: eventfd");
    return ep_thread_begin(&link->thread, &link->started, run, link, "ep_comm_new: the thread of the control links");
}

void ep_group_link_close(struct ep_group *group)
{
    struct ep_group_link *link = group->link;

    if (!link)
        return;
    if (link->started) {
        atomic_store(&link->stops, true);
        ep_group_link_wake(group);
        pthread_join(link->thread, NULL);
    }
    for (int i = 0; link->memory && i < link->n; i++)
        if (link->conns[i].fd >= 0)
            close(link->conns[i].fd);
    if (group->link_event >= 0)
        close(group->link_event);
    group->link_event = -1;
    free(link->memory);
    free(link);
    group->link = NULL;
}
