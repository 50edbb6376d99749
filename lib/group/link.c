/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control links: one connection to each rail peer of another host, all kept by one thread of this rank that sleeps
 * in poll().
 *
 * Heartbeats carry what a rank's peers on its own host read in control blocks: for whom each rank of the node waits and
 * when it last probed peers. So a rank whose deadline passes follows the chain of who waits for whom across hosts. A
 * failure goes from the rank that raises it to its rail peers, one on each host, which publish it there; a process that
 * dies is known by the end of its connections, a host that is cut off by the age of its heartbeats. To ranks that have
 * no connection to that process a rank of its node tells it, which watches the processes of its node.
 *
 * At most one message of a link is on its way at a time: a peer that does not read costs no memory.
 */
#include "group/link_wire.h"

#include "base/fd.h"
#include "base/thread.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

/* Heartbeats in a deadline: a peer that waits is late when half a deadline has passed without one. */
#define HEARTBEATS 10
#define HEARTBEAT_LEAST_MS 10
#define HEARTBEAT_MOST_MS 1000
/* For a farewell to leave. */
#define FAREWELL_MS 200
/*
 * A host is silent that has acknowledged nothing for so many heartbeats, of a kernel that delays acknowledgements. The
 * others leave a living rank out after a deadline at the earliest: by then its own heartbeats tell it so.
 */
#define SILENT_HEARTBEATS 3
#define ACKNOWLEDGE_MS 50

struct line {
    int fd; /* -1: ended */
    int rank;
    uint64_t heartbeat_ns; /* when the next one is due */
    uint64_t sent_ns;      /* the last one that was due */
    int unanswered;        /* of these, in a row */
    bool said_failure, said_left, said_shrunk;
    uint32_t said_events; /* count_events() */
    unsigned char *out;
    size_t out_used, out_at;
    struct link_reader reader;
    struct ep_group_link *link;
};

struct ep_group_link {
    struct ep_group *group;
    int n;
    struct line *lines;
    struct pollfd *polls;  /* of the lines, of link_event, of the processes of this node */
    uint64_t heartbeat_ns; /* between two */
    bool *dead;            /* [nlocal] its process was seen to end */
    uint32_t n_dead;
    bool watches; /* processes, so that a death is told at once */
    pthread_t thread;
    bool started;
    _Atomic bool stops;
    unsigned char *memory; /* of the buffers of all lines */
};

/* --- what a peer says --- */

static void take_heartbeat(struct line *line, const struct link_entry *entries)
{
    struct ep_group *group = line->link->group;
    int first = line->rank - group->local;
    uint64_t now = ep_now_ns();

    for (int i = 0; i < group->nlocal; i++) {
        struct ep_group_remote *remote = &group->remote[first + i];
        uint64_t age_ns = (uint64_t)entries[i].age_ms * 1000000u;

        atomic_store(&remote->probed_ns, age_ns < now ? now - age_ns : 0);
        atomic_store(&remote->waiting, entries[i].waiting);
        atomic_store(&remote->shrinks, (entries[i].flags & LINK_RANK_SHRINKS) != 0);
        atomic_store(&remote->aborts, entries[i].aborts);
        atomic_store(&remote->made, entries[i].flags & LINK_RANK_MADE     ? EP_GROUP_MADE_YES
                                    : entries[i].flags & LINK_RANK_DOUBTS ? EP_GROUP_MADE_DOUBT
                                                                          : EP_GROUP_MADE_OPEN);
        if (entries[i].flags & LINK_RANK_LEFT)
            atomic_store(&remote->left, 1);
        if (entries[i].flags & LINK_RANK_DEAD)
            atomic_store(&remote->lost, 1);
    }
}

/* The reason stands before the failure that it belongs to. Of one rank there is one failure that counts. */
static void take_failure(struct line *line, const struct link_failure *failure)
{
    struct ep_group *group = line->link->group;
    struct ep_group_remote *remote = &group->remote[line->rank];

    if (failure->reason[0] && !atomic_load(&remote->reason_for)) {
        memcpy(remote->reason, failure->reason, sizeof(remote->reason));
        atomic_store_explicit(&remote->reason_for, failure->word, memory_order_release);
    }
    ep_group_receive_failure(group, failure->word, line->rank);
}

static void take_shrunk(struct line *line, const struct link_shrunk *shrunk)
{
    struct ep_group *group = line->link->group;
    int me = group->comm->rank;

    if (shrunk->out[me / 64] >> (me % 64) & 1)
        atomic_store(&group->remote[line->rank].excludes, 1);
}

static void take_message(void *context, enum link_kind kind, const void *payload)
{
    struct line *line = context;
    struct ep_group *group = line->link->group;

    if (kind == LINK_HEARTBEAT)
        take_heartbeat(line, payload);
    else if (kind == LINK_FAILURE)
        take_failure(line, payload);
    else if (kind == LINK_SHRUNK)
        take_shrunk(line, payload);
    else
        atomic_store(&group->remote[line->rank].left, 1);
}

/* 0: the process over there closed it, as it does when it ends. */
static void end_line(struct line *line, int error)
{
    struct ep_group *group = line->link->group;

    close(line->fd);
    line->fd = -1;
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN)
        atomic_store(&group->remote[line->rank].silent, 1);
    if (error)
        atomic_store(&group->remote[line->rank].cut, 1);
    atomic_store(&group->remote[line->rank].lost, 1);
    ep_group_ring_all(group); /* who waits for it looks at once */
}

static void receive(struct line *line)
{
    unsigned char bytes[4096];

    while (line->fd >= 0) {
        ssize_t n = recv(line->fd, bytes, sizeof(bytes), MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        /* What is damaged says no more than what has ended. */
        if (n <= 0 || link_reader_take(&line->reader, bytes, (size_t)n, take_message, line))
            end_line(line, n < 0 ? errno : n > 0 ? EBADMSG : 0);
    }
}

/* --- what this rank says --- */

static void queue(struct line *line, enum link_kind kind, const void *payload, size_t bytes)
{
    struct link_head head = {.magic = LINK_MAGIC, .kind = kind, .bytes = bytes};

    memcpy(line->out, &head, sizeof(head));
    if (bytes && payload)
        memcpy(line->out + sizeof(head), payload, bytes);
    line->out_used = sizeof(head) + bytes;
    line->out_at = 0;
}

/* Of all ranks of the node, aborts, begun and confirmed shrinks, deaths: changes with each of them, which leaves at
 * once. */
static uint32_t count_events(const struct ep_group_link *link)
{
    const struct ep_group *group = link->group;
    uint32_t n = link->n_dead;

    for (int i = 0; i < group->nlocal; i++) {
        const struct ep_group_control *control = group->peers[group->first + i].control;

        n += atomic_load(&control->aborts) + atomic_load(&control->shrink.aborts_before) +
             atomic_load(&control->shrink.made);
    }
    return n;
}

static bool shrinks(const struct ep_group_control *control, uint32_t aborts)
{
    return atomic_load(&control->shrink.aborts_before) == aborts + 1;
}

/*
 * Whether the peer's host acknowledges. Counted in heartbeats of this rank, which sends none while it is stopped or not
 * run itself.
 */
static void note_answers(struct line *line, uint64_t now)
{
    struct tcp_info info = {0};
    socklen_t bytes = sizeof(info);
    uint64_t acknowledged_ns;

    if (now < line->heartbeat_ns || getsockopt(line->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0)
        return;
    acknowledged_ns = now - (uint64_t)info.tcpi_last_ack_recv * 1000000u;
    line->unanswered = acknowledged_ns + ACKNOWLEDGE_MS * UINT64_C(1000000) < line->sent_ns ? line->unanswered + 1 : 0;
    line->sent_ns = now;
    atomic_store(&line->link->group->remote[line->rank].silent, line->unanswered >= SILENT_HEARTBEATS);
}

static void queue_heartbeat(struct line *line, uint64_t now)
{
    struct ep_group *group = line->link->group;

    line->said_events = count_events(line->link);
    for (int i = 0; i < group->nlocal; i++) {
        const struct ep_group_control *control = group->peers[group->first + i].control;
        uint64_t probed_ns = atomic_load(&control->probed_ns),
                 age_ms = now > probed_ns ? (now - probed_ns) / 1000000u : 0;
        struct link_entry entry = {.waiting = atomic_load(&control->waiting),
                                   .age_ms = age_ms < UINT32_MAX ? (uint32_t)age_ms : UINT32_MAX,
                                   .aborts = atomic_load(&control->aborts)};
        uint32_t made;

        if (line->link->dead[i] || (i != group->local && ep_group_peer_dead(group, group->first + i)))
            entry.flags |= LINK_RANK_DEAD;
        /* Behind that look: who has ended said before whether it left. */
        if (atomic_load(&control->left))
            entry.flags |= LINK_RANK_LEFT;
        if (shrinks(control, entry.aborts))
            entry.flags |= LINK_RANK_SHRINKS;
        /* Behind that: who leaves without it has given up. */
        made = atomic_load(&control->shrink.made);
        if (made == EP_GROUP_MADE_YES)
            entry.flags |= LINK_RANK_MADE;
        if (made == EP_GROUP_MADE_DOUBT)
            entry.flags |= LINK_RANK_DOUBTS;
        memcpy(line->out + sizeof(struct link_head) + (size_t)i * sizeof(entry), &entry, sizeof(entry));
    }
    queue(line, LINK_HEARTBEAT, NULL, (size_t)group->nlocal * sizeof(struct link_entry));
    note_answers(line, now);
    line->heartbeat_ns = now + line->link->heartbeat_ns;
}

static void queue_failure(struct line *line, uint64_t word)
{
    const struct ep_group_control *control = line->link->group->control;
    struct link_failure failure = {.word = word};

    if (atomic_load_explicit(&control->reason_for, memory_order_acquire) == word)
        memcpy(failure.reason, control->reason, sizeof(failure.reason));
    queue(line, LINK_FAILURE, &failure, sizeof(failure));
    line->said_failure = true;
}

static void queue_shrunk(struct line *line)
{
    const struct ep_group_shrink *state = &line->link->group->control->shrink;
    struct link_shrunk shrunk;

    for (int word = 0; word < EP_MAX_RANKS / 64; word++)
        shrunk.out[word] = atomic_load(&state->passed_out[word]);
    queue(line, LINK_SHRUNK, &shrunk, sizeof(shrunk));
    line->said_shrunk = true;
}

/* The next message, if there is one; false: nothing to say now. */
static bool choose(struct line *line, uint64_t now)
{
    struct ep_group_link *link = line->link;
    uint64_t word = line->said_failure ? 0 : ep_group_own_report(link->group);

    if (line->said_left)
        return false;
    if (word) {
        queue_failure(line, word);
    } else if (!line->said_shrunk && atomic_load(&link->group->control->shrink.passed)) {
        queue_shrunk(line);
    } else if (now >= line->heartbeat_ns || line->said_events != count_events(link)) {
        queue_heartbeat(line, now);
    } else if (atomic_load(&link->stops)) {
        if (atomic_load(&link->group->control->left))
            queue(line, LINK_LEFT, NULL, 0);
        line->said_left = true;
    } else {
        return false;
    }
    return true;
}

static void send_all(struct line *line, uint64_t now)
{
    while (line->fd >= 0 && (line->out_at < line->out_used || choose(line, now))) {
        ssize_t n =
            send(line->fd, line->out + line->out_at, line->out_used - line->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) {
            int error = errno;

            receive(line); /* what came before the end counts */
            if (line->fd >= 0)
                end_line(line, error);
            return;
        }
        line->out_at += (size_t)n;
    }
}

/* --- the thread --- */

static int wait_ms(const struct ep_group_link *link, uint64_t now)
{
    uint64_t next = now + link->heartbeat_ns;

    for (int i = 0; i < link->n; i++) {
        const struct line *line = &link->lines[i];

        if (line->fd >= 0 && line->out_at == line->out_used && line->heartbeat_ns < next)
            next = line->heartbeat_ns;
    }
    return next > now ? (int)((next - now) / 1000000u) + 1 : 0;
}

/* Of the processes of this node that have not ended; -1: of no interest to poll(). */
static void list_processes(const struct ep_group_link *link, struct pollfd *polls)
{
    const struct ep_group *group = link->group;

    for (int i = 0; i < group->nlocal; i++) {
        bool wanted = link->watches && i != group->local && !link->dead[i];

        polls[i] = (struct pollfd){.fd = wanted ? group->peers[group->first + i].process.pidfd : -1, .events = POLLIN};
    }
}

static void note_ended(struct ep_group_link *link, const struct pollfd *polls)
{
    for (int i = 0; i < link->group->nlocal; i++) {
        if (!polls[i].revents)
            continue;
        link->dead[i] = true;
        link->n_dead++;
    }
}

/* Before this rank says that it leaves: its caller may have seen deaths that poll() has not told here. */
static void note_dead(struct ep_group_link *link)
{
    const struct ep_group *group = link->group;

    for (int i = 0; i < group->nlocal; i++) {
        if (link->dead[i] || i == group->local || !ep_group_peer_dead(group, group->first + i))
            continue;
        link->dead[i] = true;
        link->n_dead++;
    }
}

static void serve(struct ep_group_link *link)
{
    uint64_t now = ep_now_ns(), events;
    nfds_t n_processes = link->watches ? (nfds_t)link->group->nlocal : 0;
    int n = 0, ready;

    for (int i = 0; i < link->n; i++)
        send_all(&link->lines[i], now);
    for (int i = 0; i < link->n; i++) {
        const struct line *line = &link->lines[i];

        link->polls[n++] =
            (struct pollfd){.fd = line->fd, .events = (short)(POLLIN | (line->out_at < line->out_used ? POLLOUT : 0))};
    }
    link->polls[n++] = (struct pollfd){.fd = link->group->link_event, .events = POLLIN};
    list_processes(link, link->polls + n);
    ready = poll(link->polls, (nfds_t)n + n_processes, wait_ms(link, now));
    /* More than RLIMIT_NOFILE allows by now: deaths go with the next heartbeat. */
    if (ready < 0 && errno == EINVAL)
        link->watches = false;
    if (ready <= 0)
        return;
    note_ended(link, link->polls + n);
    for (int i = 0; i < link->n; i++)
        if (link->lines[i].fd >= 0 && link->polls[i].revents)
            receive(&link->lines[i]);
    if (link->polls[link->n].revents)
        (void)!read(link->group->link_event, &events, sizeof(events));
}

static bool all_said(const struct ep_group_link *link)
{
    for (int i = 0; i < link->n; i++) {
        const struct line *line = &link->lines[i];

        if (line->fd >= 0 && (!line->said_left || line->out_at < line->out_used))
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

        if (stops && !deadline_ns) {
            deadline_ns = ep_deadline_ns(FAREWELL_MS);
            note_dead(link);
        }
        if (stops && (all_said(link) || ep_now_ns() >= deadline_ns))
            return NULL;
        serve(link);
    }
}

/* --- opening and closing --- */

static ep_status start_thread(struct ep_group_link *link)
{
    int error = ep_thread_start(&link->thread, NULL, run, link);

    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "ep_comm_new: the thread of the control links");
    link->started = true;
    return EP_OK;
}

static ep_status take_lines(struct ep_group_link *link)
{
    struct ep_group *group = link->group;
    size_t payload = link_payload_bytes(group->nlocal), each = 2 * payload + sizeof(struct link_head);

    link->memory = malloc((size_t)link->n * each);
    if (!link->memory)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d control links", link->n);
    for (int i = 0; i < link->n; i++) {
        int node = ep_net_peer(group->comm->node, i);

        link->lines[i] = (struct line){.fd = ep_streams_take_link(group->streams, node),
                                       .rank = ep_group_rail(group, node),
                                       .link = link,
                                       .out = link->memory + (size_t)i * each,
                                       .reader = {.nlocal = group->nlocal}};
        link->lines[i].reader.payload = link->lines[i].out + payload + sizeof(struct link_head);
    }
    return EP_OK;
}

ep_status ep_group_link_open(struct ep_group *group)
{
    struct ep_group_link *link = calloc(1, sizeof(*link));
    int timeout_ms = group->comm->config.timeout_ms, heartbeat_ms = timeout_ms / HEARTBEATS;
    size_t n = (size_t)group->comm->nnodes - 1;

    if (link) {
        link->lines = calloc(n, sizeof(*link->lines));
        link->polls = calloc(n + 1 + (size_t)group->nlocal, sizeof(*link->polls));
        link->dead = calloc((size_t)group->nlocal, sizeof(*link->dead));
        link->watches = true;
    }
    group->link = link;
    group->remote = calloc((size_t)group->comm->nranks, sizeof(*group->remote));
    if (!link || !link->lines || !link->polls || !link->dead || !group->remote)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %zu control links", n);
    if (heartbeat_ms < HEARTBEAT_LEAST_MS)
        heartbeat_ms = HEARTBEAT_LEAST_MS;
    if (heartbeat_ms > HEARTBEAT_MOST_MS)
        heartbeat_ms = HEARTBEAT_MOST_MS;
    link->group = group;
    link->heartbeat_ns = (uint64_t)heartbeat_ms * 1000000u;
    link->n = (int)n;
    EP_TRY(take_lines(link));
    group->link_event = ep_fd_keep(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (group->link_event < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "ep_comm_new: eventfd");
    return start_thread(link);
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
    for (int i = 0; link->lines && link->memory && i < link->n; i++)
        if (link->lines[i].fd >= 0)
            close(link->lines[i].fd);
    if (group->link_event >= 0)
        close(group->link_event);
    group->link_event = -1;
    free(link->memory);
    free(link->lines);
    free(link->polls);
    free(link->dead);
    free(link);
    group->link = NULL;
}
