/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group.h"

#include "base/backoff.h"
#include "base/futex.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* How often a sleeping rank looks for dead peers; also how late a lost wake-up could be noticed. */
#define LOOK_NS 20000000u
/* Looks at the condition before sleeping: a peer on another processor usually answers within a few microseconds. */
#define SPINS_ALONE 2000
#define SPINS_SHARED 4
/* Of the deadline, for which a rank that has just ended a wait is not blamed. */
#define GRACE_PART 4

static const char *const phase_names[] = {
#define PHASE_NAME(name, text) [name] = text,
    HOST_PHASES(PHASE_NAME)
#undef PHASE_NAME
};

const char *host_phase_name(enum host_phase phase)
{
    if ((size_t)phase >= sizeof(phase_names) / sizeof(phase_names[0]))
        return "?";
    return phase_names[phase];
}

/* A failure in one word, so that it can be published and taken over in one store. */
static uint64_t pack_failure(ep_status status, int failed_rank, enum host_phase phase, int reporter)
{
    return (uint64_t)status << 48 | (uint64_t)(uint16_t)failed_rank << 32 | (uint64_t)(uint16_t)phase << 16 |
           (uint64_t)(uint16_t)reporter;
}

/*
 * A word that says of a failure: 0, or one that pack_failure() makes of a rank of this group. Another one means that
 * the memory of `rank`, where it was read, is damaged.
 */
static uint64_t failure_of(const struct host_comm *host, uint64_t word, int rank)
{
    int nranks = host->comm->nranks;

    if (!word ||
        (ep_status_is_failure((int64_t)(word >> 48)) && (uint16_t)(word >> 32) < nranks && (uint16_t)word < nranks))
        return word;
    return pack_failure(EP_E_MISMATCH, rank, HOST_IDLE, host->comm->rank);
}

/* What this rank has found or taken over. */
static uint64_t own_failure(const struct host_comm *host)
{
    return failure_of(host, atomic_load_explicit(&host->control->failure, memory_order_acquire), host->comm->rank);
}

void host_read_reason(char ret[HOST_REASON_BYTES], const char from[HOST_REASON_BYTES])
{
    host_read_shared(ret, from, HOST_REASON_BYTES);
    ret[HOST_REASON_BYTES - 1] = '\0';
    for (char *at = ret; *at; at++)
        if ((unsigned char)*at < ' ' || *at == 0x7f)
            *at = '?';
}

/* Why the rank that raised the failure did so, as far as it said. */
static void read_reason(const struct host_comm *host, uint64_t failure, char text[HOST_REASON_BYTES + 2])
{
    const struct host_control *control = host->peers[(uint16_t)failure].control;

    text[0] = '\0';
    if (!control && host->remote) {
        const struct host_remote *remote = &host->remote[(uint16_t)failure];

        if (atomic_load_explicit(&remote->reason_for, memory_order_acquire) != failure)
            return;
        memcpy(text, ": ", 2);
        host_read_reason(text + 2, remote->reason);
        return;
    }
    if (!control || atomic_load_explicit(&control->reason_for, memory_order_acquire) != failure)
        return;
    memcpy(text, ": ", 2);
    host_read_reason(text + 2, control->reason);
}

const char *host_blindness(const struct host_comm *host, int rank)
{
    const struct host_peer *peer = &host->peers[rank];

    if (peer->same_process || !peer->control || rank == host->comm->rank ||
        ep_process_look(&peer->process) != EP_PROCESS_UNKNOWN)
        return "";
    return "; whether it lives cannot be told here (no pidfd, and /proc does not show it)";
}

static ep_status fail_with(struct host_comm *host, uint64_t failure)
{
    ep_status status = (ep_status)(failure >> 48);
    int failed_rank = (uint16_t)(failure >> 32), reporter = (uint16_t)failure;
    const char *phase = host_phase_name((enum host_phase)(uint16_t)(failure >> 16));
    char seen_by[48] = "", reason[HOST_REASON_BYTES + 2];
    int none = EP_OK;

    atomic_compare_exchange_strong(&host->comm->failed, &none, (int)status);
    read_reason(host, failure, reason);
    if (reporter != host->comm->rank && reporter != failed_rank)
        snprintf(seen_by, sizeof(seen_by), " (seen by rank %d)", reporter);
    switch (status) {
    case EP_E_TIMEOUT:
        return ep_fail(status, "rank %d did not answer within %d ms in \"%s\"%s%s", failed_rank,
                       host->comm->config.timeout_ms, phase, seen_by, host_blindness(host, failed_rank));
    case EP_E_PEER_DEAD:
        return ep_fail(status, "rank %d died%s while others were in \"%s\"%s%s", failed_rank,
                       host->remote && !host->peers[failed_rank].control ? " or was cut off" : "", phase, seen_by,
                       reason);
    case EP_E_PEER_LEFT:
        return ep_fail(status, "rank %d left the group while others waited for it in \"%s\"%s%s", failed_rank, phase,
                       seen_by, reason);
    case EP_E_ABORTED:
        return ep_fail(status, "rank %d called ep_comm_abort while it was in \"%s\"", failed_rank, phase);
    default:
        return ep_fail(status, "rank %d failed with %s in \"%s\"%s%s", failed_rank, ep_status_name(status), phase,
                       seen_by, reason);
    }
}

/*
 * One failure for the whole group: the first that is written at the arbiter. Two ranks that find a reason at the same
 * time would otherwise tell different stories. Kept in the own block as well, for the time when the arbiter's is gone.
 * Async-signal-safe.
 */
static uint64_t decide(struct host_comm *host, uint64_t failure)
{
    uint64_t own = own_failure(host), none = 0;

    if (own)
        return own;
    if (!atomic_compare_exchange_strong(&host_arbiter(host)->group_failure, &none, failure))
        failure = failure_of(host, none, host->arbiter);
    none = 0;
    return atomic_compare_exchange_strong(&host->control->failure, &none, failure) ? failure : own_failure(host);
}

static void ring(struct host_control *control)
{
    atomic_fetch_add(&control->doorbell, 1);
    /* Sequentially consistent on both sides: who reads 0 here has rung before the sleeper's futex call compares. */
    if (atomic_load(&control->sleeping))
        ep_futex_wake(&control->doorbell);
}

void host_ring_rank(struct host_comm *host, int rank)
{
    if (host->peers[rank].control)
        ring(host->peers[rank].control);
}

void host_ring_node(struct host_comm *host)
{
    for (int i = 1; i < host->nlocal; i++)
        ring(host->peers[host->first + (host->local + i) % host->nlocal].control);
}

void host_ring_all(struct host_comm *host)
{
    for (int rank = 0; rank < host->comm->nranks; rank++)
        host_ring_rank(host, rank);
}

void host_link_wake(struct host_comm *host)
{
    uint64_t one = 1;

    if (host->link_event >= 0)
        (void)!write(host->link_event, &one, sizeof(one));
}

ep_status host_raise(struct host_comm *host, ep_status status, int failed_rank, enum host_phase phase)
{
    uint64_t failure = decide(host, pack_failure(status, failed_rank, phase, host->comm->rank));

    host_ring_all(host);
    host_link_wake(host);
    return fail_with(host, failure);
}

void host_take_failure(struct host_comm *host, uint64_t word, int from)
{
    decide(host, failure_of(host, word, from));
    host_ring_all(host);
}

uint64_t host_own_report(const struct host_comm *host)
{
    uint64_t failure = own_failure(host);

    return (uint16_t)failure == host->comm->rank ? failure : 0;
}

/* For the peers. The first reason of this rank only: one that a peer may be reading must not change. */
static void publish_reason(struct host_comm *host, uint64_t failure, const char *text)
{
    struct host_control *control = host->control;

    if (atomic_exchange(&control->reason_taken, 1))
        return;
    snprintf(control->reason, sizeof(control->reason), "%.*s", HOST_REASON_BYTES - 1, text);
    atomic_store_explicit(&control->reason_for, failure, memory_order_release);
}

ep_status host_raise_own(struct host_comm *host, ep_status status, int failed_rank, enum host_phase phase)
{
    char text[EP_ERROR_TEXT_BYTES];
    int owner = host_take_failed_owner();
    ep_status raised;
    uint64_t mine;

    /* Raised before by the function that found it: its text says more than the failure's word. */
    mine = own_failure(host);
    if (mine && (ep_status)(mine >> 48) == status && (uint16_t)mine == host->comm->rank)
        return status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    /* What we have met may be the consequence of a failure that a peer has seen already. */
    EP_TRY(host_check(host));
    if (!ep_status_is_fatal(status) && owner != failed_rank)
        failed_rank = host->comm->rank;
    publish_reason(host, pack_failure(status, failed_rank, phase, host->comm->rank), text);
    raised = host_raise(host, status, failed_rank, phase);
    if (raised != status)
        return raised;
    if (failed_rank != host->comm->rank)
        return ep_fail(status, "%s (in \"%s\")", text, host_phase_name(phase));
    return ep_fail(status, "rank %d failed: %s (in \"%s\")", failed_rank, text, host_phase_name(phase));
}

ep_status host_raise_damage(struct host_comm *host, int rank, enum host_phase phase, const char *what, int64_t value)
{
    return host_raise_own(
        host, ep_fail(EP_E_MISMATCH, "what rank %d has published is damaged: %s is %lld", rank, what, (long long)value),
        rank, phase);
}

ep_status host_check(struct host_comm *host)
{
    uint64_t failure = own_failure(host);

    if (failure)
        return fail_with(host, failure);
    failure =
        failure_of(host, atomic_load_explicit(&host_arbiter(host)->group_failure, memory_order_acquire), host->arbiter);
    if (!failure)
        return EP_OK;
    /* Taken over, so that every later call gives the same answer. */
    return fail_with(host, decide(host, failure));
}

ep_status host_check_abort(struct host_comm *host)
{
    static const _Atomic uint32_t none;

    for (int rank = 0; rank < host->comm->nranks; rank++) {
        const struct host_control *control = host->peers[rank].control;

        /* Behind another failure an abort ends the wait all the same, with that failure. */
        if (atomic_load(control ? &control->aborts : host->remote ? &host->remote[rank].aborts : &none))
            return host_check(host);
    }
    /* One of another host comes as a failure. */
    if (host->remote && host_aborted_by(host) >= 0)
        return host_check(host);
    return EP_OK;
}

int host_aborted_by(const struct host_comm *host)
{
    uint64_t failure = own_failure(host);

    return (ep_status)(failure >> 48) == EP_E_ABORTED ? (uint16_t)(failure >> 32) : -1;
}

ep_status host_poll(ep_comm *comm)
{
    return host_check(host_of(comm));
}

void host_abort(ep_comm *comm)
{
    struct host_comm *host = host_of(comm);
    uint32_t waiting = atomic_load(&host->control->waiting);
    int clean = EP_OK, saved_errno = errno; /* a signal handler may have interrupted anything */
    uint64_t failure =
        decide(host, pack_failure(EP_E_ABORTED, comm->rank, (enum host_phase)(waiting & 0xff), comm->rank));

    atomic_compare_exchange_strong(&comm->failed, &clean, (int)(failure >> 48));
    /* After the failure: who sees the count finds it. */
    atomic_fetch_add(&host->control->aborts, 1);
    host_ring_all(host);
    host_link_wake(host);
    errno = saved_errno;
}

bool host_peer_dead(const struct host_comm *host, int rank)
{
    const struct host_peer *peer = &host->peers[rank];

    if (!peer->control && host->remote)
        return atomic_load(&host->remote[rank].lost) && !atomic_load(&host->remote[rank].left);
    return !peer->same_process && ep_process_look(&peer->process) == EP_PROCESS_DEAD;
}

/*
 * Which ranks may be dead: one system call for all that have a pidfd. `fds` [R]; false when it cannot be told so, as
 * poll() takes no more descriptors than RLIMIT_NOFILE allows now.
 */
static bool poll_all(const struct host_comm *host, struct pollfd *fds)
{
    for (int rank = 0; rank < host->comm->nranks; rank++)
        fds[rank] = (struct pollfd){.fd = host->peers[rank].process.pidfd, .events = POLLIN};
    return poll(fds, (nfds_t)host->comm->nranks, 0) >= 0;
}

/* The first dead rank, or -1. */
static int find_dead(struct host_comm *host, int only)
{
    struct pollfd fds[EP_MAX_RANKS];
    bool polled;

    if (only >= 0)
        return host_peer_dead(host, only) ? only : -1;
    polled = poll_all(host, fds);
    for (int rank = 0; rank < host->comm->nranks; rank++) {
        const struct host_peer *peer = &host->peers[rank];

        if (!peer->control && host->remote && host_peer_dead(host, rank))
            return rank;
        if (!peer->control || rank == host->comm->rank || (polled && peer->process.pidfd >= 0 && !fds[rank].revents))
            continue;
        if (!atomic_load(&peer->control->left) && host_peer_dead(host, rank))
            return rank;
    }
    return -1;
}

struct wait_of {
    uint32_t waiting; /* as host_control has it */
    uint64_t beat_ns;
};

/* What a rank says of its wait; false where nothing is known of it. */
static bool read_wait(const struct host_comm *host, int rank, struct wait_of *ret_wait)
{
    const struct host_control *control = host->peers[rank].control;

    if (!control && !host->remote)
        return false;
    ret_wait->waiting = atomic_load(control ? &control->waiting : &host->remote[rank].waiting);
    ret_wait->beat_ns = atomic_load(control ? &control->beat_ns : &host->remote[rank].beat_ns);
    return true;
}

/* The rank that one waits for which waits; -1: none. One that has not looked around for half the deadline is stopped.
 */
static int waits_for(const struct host_comm *host, const struct wait_of *wait, uint64_t now)
{
    uint64_t stale_ns = (uint64_t)host->comm->config.timeout_ms * 500000u;
    int next = (int)(wait->waiting >> 8) - 1;

    if (stale_ns < 2 * LOOK_NS)
        stale_ns = 2 * LOOK_NS;
    /* Its last look may be later than our clock. */
    if (!wait->waiting || wait->beat_ns + stale_ns < now || next >= host->comm->nranks)
        return -1;
    return next;
}

/* Who is to blame when `rank` did not come: it may itself be waiting for somebody. */
static int find_failed_rank(struct host_comm *host, int rank)
{
    uint64_t now = ep_now_ns();

    for (int step = 0; step < host->comm->nranks; step++) {
        struct wait_of wait;
        int next;

        if (host_peer_dead(host, rank) || !read_wait(host, rank, &wait))
            return rank;
        next = waits_for(host, &wait, now);
        /* One that waits for us was merely slow, but late it is. */
        if (next < 0 || next == host->comm->rank)
            return rank;
        rank = next;
    }
    return rank;
}

void host_pause_begin(struct host_pause *pause, struct host_comm *host, enum host_phase phase)
{
    *pause = (struct host_pause){.host = host, .phase = phase};
    host_pause_reset(pause);
}

void host_pause_reset(struct host_pause *pause)
{
    pause->deadline_ns = ep_deadline_ns(pause->host->comm->config.timeout_ms);
    pause->blame_ns = 0;
    pause->its_wait = 0;
    pause->its_waits = 0;
    pause->spins = 0;
}

static bool has_left(const struct host_comm *host, int rank)
{
    struct host_control *control = host->peers[rank].control;

    if (!control && host->remote)
        return atomic_load(&host->remote[rank].left);
    return control && atomic_load(&control->left);
}

/* May the network still hold back the last that a rank sent before it left? */
static bool is_held_back(const struct host_pause *pause, int rank)
{
    const struct host_comm *host = pause->host;

    if (pause->held != HOST_HELD_UNKNOWN)
        return pause->held == HOST_HELD;
    if (!pause->polls || !host->remote)
        return pause->polls;
    return !host->peers[rank].control && rank % host->nlocal == host->local &&
           !ep_streams_ended(host->streams, rank / host->nlocal);
}

/*
 * The rank to blame, if it waited for others until lately, is between two waits: what it does next says whether it is
 * late by itself or because of a rank that it waits for next. What is known of a rank of another host is a heartbeat
 * old, besides. So it is given a part of the deadline, of several heartbeats, once in a wait.
 */
static bool is_between_waits(struct host_pause *pause, int rank, uint64_t now)
{
    const struct host_comm *host = pause->host;
    uint64_t part_ns = (uint64_t)host->comm->config.timeout_ms * 1000000u / GRACE_PART;
    struct wait_of wait;

    if (host_peer_dead(host, rank) || has_left(host, rank) || !read_wait(host, rank, &wait) || wait.waiting)
        return false;
    if (!pause->blame_ns)
        pause->blame_ns = now + part_ns;
    return now < pause->blame_ns && wait.beat_ns + part_ns > now;
}

/*
 * A rank that is late because it waits for others is not masked: it masks them at its own deadline, and comes. It has a
 * deadline for each of these waits, as many as there are ranks, and the time between two of them.
 */
static bool is_held_up(struct host_pause *pause, int rank, uint64_t now)
{
    const struct host_comm *host = pause->host;
    struct wait_of wait;
    int next;

    if (host_peer_dead(host, rank) || has_left(host, rank) || !read_wait(host, rank, &wait))
        return false;
    next = waits_for(host, &wait, now);
    if (next < 0 && pause->its_waits < host->comm->nranks)
        return is_between_waits(pause, rank, now);
    if (next < 0 || next == host->comm->rank)
        return false;
    if (wait.waiting != pause->its_wait) {
        pause->its_wait = wait.waiting;
        pause->its_deadline_ns = now + (uint64_t)host->comm->config.timeout_ms * 1000000u;
        pause->its_waits++;
        pause->blame_ns = 0;
    }
    return pause->its_waits <= host->comm->nranks && now < pause->its_deadline_ns;
}

static ep_status look_around(struct host_pause *pause, int rank, uint64_t now)
{
    struct host_comm *host = pause->host;
    int dead = find_dead(host, pause->tolerant ? rank : -1), failed_rank;
    /* While the network holds back something, that may be the last that the rank sent before it left. */
    bool left = has_left(host, rank) && (!is_held_back(pause, rank) || now >= pause->deadline_ns);
    ep_status status;

    pause->next_look_ns = now + LOOK_NS;
    if (dead < 0 && !left && now < pause->deadline_ns)
        return EP_OK;
    failed_rank = dead >= 0 ? dead : left || pause->tolerant ? rank : find_failed_rank(host, rank);
    if (dead < 0 && !left &&
        (pause->tolerant ? is_held_up(pause, failed_rank, now) : is_between_waits(pause, failed_rank, now)))
        return EP_OK;
    /* It may have done what we wait for after we looked and before it ended: the caller looks once more. */
    if ((dead >= 0 || left) && pause->gone != failed_rank + 1) {
        pause->gone = failed_rank + 1;
        pause->next_look_ns = now;
        return EP_OK;
    }
    status = has_left(host, failed_rank) ? EP_E_PEER_LEFT : dead >= 0 ? EP_E_PEER_DEAD : EP_E_TIMEOUT;
    /* A rank that the blamed one waited for may have died since the last look. */
    if (status == EP_E_TIMEOUT && host_peer_dead(host, failed_rank))
        status = EP_E_PEER_DEAD;
    if (pause->tolerant)
        return ep_fail(status, "rank %d in \"%s\"", failed_rank, host_phase_name(pause->phase));
    return host_raise(host, status, failed_rank, pause->phase);
}

static void sleep_on_doorbell(struct host_pause *pause, uint32_t seen, uint64_t now)
{
    struct host_control *control = pause->host->control;
    bool passed = now >= pause->deadline_ns;
    uint64_t until = passed || pause->next_look_ns < pause->deadline_ns ? pause->next_look_ns : pause->deadline_ns;

    if (pause->polls) {
        ep_backoff_sleep();
        return;
    }
    atomic_store(&control->sleeping, 1);
    ep_futex_wait(&control->doorbell, seen, until > now ? until - now : 1);
    atomic_store(&control->sleeping, 0);
}

void host_wait_doorbell(struct host_comm *host, uint32_t seen)
{
    uint64_t now = ep_now_ns();
    struct host_pause pause = {.host = host, .deadline_ns = now + LOOK_NS, .next_look_ns = now + LOOK_NS};

    sleep_on_doorbell(&pause, seen, now);
}

uint64_t host_note_wait(struct host_comm *host, int rank, enum host_phase phase)
{
    uint64_t now = ep_now_ns();

    atomic_store(&host->control->beat_ns, now);
    atomic_store(&host->control->waiting, (uint32_t)(rank + 1) << 8 | (uint32_t)phase);
    return now;
}

void host_note_wait_end(struct host_comm *host)
{
    atomic_store(&host->control->waiting, 0);
}

/* *ret_now: when this rank looked. */
static ep_status check_pause(struct host_pause *pause, int rank, uint64_t *ret_now)
{
    struct host_comm *host = pause->host;
    ep_status status = pause->tolerant ? host_check_abort(host) : host_check(host);

    if (status == EP_OK) {
        *ret_now = host_note_wait(host, rank, pause->phase);
        if (*ret_now >= pause->next_look_ns || *ret_now >= pause->deadline_ns)
            status = look_around(pause, rank, *ret_now);
    }
    if (status != EP_OK)
        host_pause_end(pause);
    return status;
}

ep_status host_pause_check(struct host_pause *pause, int rank)
{
    uint64_t now;

    return check_pause(pause, rank, &now);
}

ep_status host_pause(struct host_pause *pause, uint32_t seen, int rank)
{
    struct host_comm *host = pause->host;
    uint64_t now;

    if (pause->spins++ < (host->spin ? SPINS_ALONE : SPINS_SHARED)) {
        if (host->spin)
            ep_cpu_relax();
        else if (ep_backoff_yield())
            pause->spins = SPINS_SHARED;
        return EP_OK;
    }
    EP_TRY(check_pause(pause, rank, &now));
    sleep_on_doorbell(pause, seen, now);
    return EP_OK;
}

void host_pause_end(struct host_pause *pause)
{
    host_note_wait_end(pause->host);
}

ep_status host_wait_node(struct host_comm *host, size_t word, uint64_t value, enum host_phase phase)
{
    /* What MPI calls sent may still lie in its queues: it moves only while its sender calls it, so no sleep here. */
    bool driven = host->streams && !ep_streams_sleeps(host->streams);
    struct host_pause pause;

    host_pause_begin(&pause, host, phase);
    pause.polls = driven;
    for (int i = 1; i < host->nlocal; i++) {
        int rank = host->first + (host->local + i) % host->nlocal;
        _Atomic uint64_t *counter = (_Atomic uint64_t *)((char *)host->peers[rank].control + word);
        uint64_t at;

        for (;;) {
            uint32_t seen = host_doorbell(host);
            bool moved;

            if (driven)
                EP_TRY(host_net_progress(host, phase, &moved));
            at = atomic_load_explicit(counter, memory_order_acquire);
            if (at >= value)
                break;
            EP_TRY(host_pause(&pause, seen, rank));
        }
        /* Nobody is further ahead than there are exchanges in flight. */
        if (at - value > 2 * HOST_BOARDS) {
            host_pause_end(&pause);
            return host_raise_damage(host, rank, phase, "a counter of its operations", (int64_t)at);
        }
    }
    host_pause_end(&pause);
    return EP_OK;
}

/* --- between nodes --- */

ep_status host_net_progress(struct host_comm *host, enum host_phase phase, bool *ret_moved)
{
    ep_status status = ep_streams_progress(host->streams, ret_moved);
    int node;

    /* The peers wait for what this rank can no longer do: they are to hear why. */
    if (status == EP_OK)
        return EP_OK;
    node = ep_streams_broken_peer(host->streams);
    return host_raise_own(host, status, node < 0 ? host->comm->rank : host_rail(host, node), phase);
}

ep_status host_net_step(struct host_comm *host, struct host_pause *pause, uint32_t seen, bool moved, int node)
{
    if (moved) {
        host_pause_reset(pause);
        return host_check(host);
    }
    pause->polls = !ep_streams_sleeps(host->streams);
    if (node < 0)
        node = ep_streams_unflushed_peer(host->streams);
    if (node < 0)
        return EP_OK;
    return host_pause(pause, seen, host_rail(host, node));
}
