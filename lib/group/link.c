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
#include "base/array.h"
#include "base/fd.h"
#include "base/futex.h"
#include "base/thread.h"
#include "group/failure.h"
#include "group/peers.h"
#include "net/tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

/* Heartbeats in a deadline: a waiting peer is late when half a deadline has passed without one. */
#define HEARTBEATS 10
#define HEARTBEAT_MIN_MS 10
#define HEARTBEAT_MAX_MS 1000
/* Time for the last state to be sent. */
#define LEAVE_MS 200

/*
 * The message on a control link, of one kind: the state of the sender's node, and the failure that it knows. A rank
 * sends it when something has changed, and as a heartbeat.
 */
#define LINK_MAGIC 0x324c5045u /* "EPL2" */

enum { LINK_RANK_LEFT = 1u << 0, LINK_RANK_DEAD = 1u << 1 };

struct link_entry {
    uint32_t waiting; /* ep_group_state.waiting */
    uint32_t age_ms;  /* since the rank last probed its peers; UINT32_MAX: longer */
    uint32_t flags;
    uint32_t aborts; /* ep_group_state.aborts */
};

struct link_message {
    uint32_t magic;
    int32_t nlocal;                     /* ranks of a node */
    uint64_t failure;                   /* ep_group_control.failure, 0: none */
    char reason[EP_GROUP_REASON_BYTES]; /* of the failure; "": unknown */
    struct link_entry entries[];        /* [nlocal] */
};

static inline size_t link_message_bytes(int nlocal)
{
    return sizeof(struct link_message) + (size_t)nlocal * sizeof(struct link_entry);
}

struct conn {
    int fd; /* -1: ended */
    int rank;
    uint64_t heartbeat_ns; /* when the next heartbeat is due */
    bool sent_last;
    uint32_t sent_events;     /* count_events() */
    struct link_message *out; /* the last message, */
    struct iovec rest;        /* and what is left to send of it */
    struct link_message *in;
    size_t in_used;
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
    unsigned char *memory; /* buffers of all connections */
    int n;
    struct conn conns[];
};

/* --- receiving --- */

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

static void handle_message(struct conn *conn)
{
    const struct link_message *message = conn->in;
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
        atomic_store(&remote->state.aborts, entry->aborts);
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

    ep_fd_close(conn->fd);
    conn->fd = -1;
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
    int nlocal = conn->link->group->nlocal, got;

    if (!ep_fd_is_ours(conn->fd)) {
        close_conn(conn, EBADF);
        return;
    }
    while ((got = tcp_receive(conn->fd, conn->in, link_message_bytes(nlocal), &conn->in_used)) > 0) {
        conn->in_used = 0;
        if (conn->in->magic != LINK_MAGIC || conn->in->nlocal != nlocal) {
            close_conn(conn, EBADMSG);
            return;
        }
        handle_message(conn);
    }
    if (got < 0)
        close_conn(conn, errno ? errno : send_error);
}

/* --- sending --- */

/* Number of changes that are sent at once, of all ranks of the node. */
static uint32_t count_events(const struct ep_group_link *link)
{
    const struct ep_group *group = link->group;
    uint32_t n = ep_group_get_failure(group) != 0;

    for (int i = 0; i < group->nlocal; i++) {
        const struct ep_group_control *control = group->peers[group->first + i].control;

        if (control)
            n += atomic_load(&control->state.aborts) + link->dead[i];
    }
    return n;
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
        if (group->peers[group->first + i].control)
            out->entries[i] = describe_rank(conn, i, now);
    /* After the number of aborts: a rank that sees that finds the failure. */
    out->failure = ep_group_get_failure(group);
    state = ep_group_state_of(group, (uint16_t)out->failure);
    if (out->failure && atomic_load_explicit(&state->reason_for, memory_order_acquire) == out->failure)
        memcpy(out->reason, state->reason, sizeof(out->reason));
    conn->rest = (struct iovec){out, link_message_bytes(group->nlocal)};
    conn->heartbeat_ns = now + link->heartbeat_ns;
    return true;
}

static void send_all(struct conn *conn, uint64_t now)
{
    while (conn->fd >= 0 && (conn->rest.iov_len || queue_next(conn, now))) {
        int sent = ep_fd_is_ours(conn->fd) ? tcp_send(conn->fd, &conn->rest, 1) : -1, error = errno;

        if (sent == 0)
            return;
        /* Data that arrived before the end counts. EPIPE: the peer process had closed the connection before. */
        if (sent < 0)
            receive(conn, error == EPIPE ? 0 : error);
        if (sent < 0 && conn->fd >= 0)
            close_conn(conn, error);
    }
}

/* --- the thread --- */

static int wait_ms(const struct ep_group_link *link, uint64_t now)
{
    uint64_t next = now + link->heartbeat_ns;

    FOR_EACH (conn, link->conns, link->n)
        if (conn->fd >= 0 && conn->rest.iov_len == 0 && conn->heartbeat_ns < next)
            next = conn->heartbeat_ns;
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
    if (!atomic_load(&link->group->link_owes_failure) || !ep_group_get_failure(link->group))
        return;
    FOR_EACH (conn, link->conns, link->n)
        if (conn->fd >= 0 && !conn->sent_last && (!conn->out->failure || conn->rest.iov_len))
            return;
    atomic_store(&link->group->link_owes_failure, 0);
    ep_futex_wake(&link->group->link_owes_failure);
}

static void run_once(struct ep_group_link *link)
{
    uint64_t now = ep_now_ns(), events;
    nfds_t n_processes = link->watch_processes ? (nfds_t)link->group->nlocal : 0;
    int n = 0, ready;

    for (int i = 0; i < link->n; i++)
        send_all(&link->conns[i], now);
    note_failure_sent(link);
    FOR_EACH (conn, link->conns, link->n)
        link->polls[n++] =
            (struct pollfd){.fd = conn->fd, .events = (short)(POLLIN | (conn->rest.iov_len ? POLLOUT : 0))};
    link->polls[n++] =
        (struct pollfd){.fd = ep_fd_is_ours(link->group->link_event) ? link->group->link_event : -1, .events = POLLIN};
    list_processes(link, link->polls + n);
    ready = poll(link->polls, (nfds_t)n + n_processes, wait_ms(link, now));
    /* More descriptors than RLIMIT_NOFILE allows now: deaths are sent with the next heartbeat. */
    if (ready < 0 && errno == EINVAL)
        link->watch_processes = false;
    if (ready <= 0)
        return;
    for (int i = 0; i < link->group->nlocal; i++)
        link->dead[i] |= link->polls[n + i].revents && ep_group_peer_dead(link->group, link->group->first + i);
    for (int i = 0; i < link->n; i++)
        if (link->conns[i].fd >= 0 && link->polls[i].revents)
            receive(&link->conns[i], 0);
    if (link->polls[link->n].revents && ep_fd_is_ours(link->group->link_event))
        (void)!read(link->group->link_event, &events, sizeof(events));
}

static bool all_sent(const struct ep_group_link *link)
{
    FOR_EACH (conn, link->conns, link->n)
        if (conn->fd >= 0 && (!conn->sent_last || conn->rest.iov_len))
            return false;
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
                                       .in = (void *)(messages + each)};
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
    EP_TRY(ep_thread_begin(&link->thread, &link->started, run, link, "ep_comm_new: the thread of the control links"));
    atomic_store(&group->link_owes_failure, 1);
    return EP_OK;
}

void ep_group_link_close(struct ep_group *group)
{
    struct ep_group_link *link = group->link;

    if (!link)
        return;
    if (link->started) {
        atomic_store(&group->link_owes_failure, 0);
        atomic_store(&link->stops, true);
        ep_group_link_wake(group);
        pthread_join(link->thread, NULL);
    }
    for (int i = 0; link->memory && i < link->n; i++)
        if (link->conns[i].fd >= 0)
            ep_fd_close(link->conns[i].fd);
    if (group->link_event >= 0)
        ep_fd_close(group->link_event);
    group->link_event = -1;
    free(link->memory);
    free(link);
    group->link = NULL;
}
