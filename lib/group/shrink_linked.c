/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shrink across hosts, over the networks "tcp" and "verbs".
 *
 * The lowest rank that is not known to be dead is the leader. The other survivors connect to the listener that its
 * endpoint has kept. Each sends the ranks that it knows to be dead or departed. The leader waits for all others until
 * its deadline, and then continues without the absent ones if the ranks that have joined are more than half of the live
 * ranks; otherwise it waits for one more deadline, and then fails the call for all that have joined. It sends the list
 * of survivors over the same connections, which then carry the all-gathers that create the new group. The last
 * all-gather confirms it; ranks that lose the leader in it query the others (shrink_confirm.c).
 *
 * A leader sends heartbeats to the ranks that have joined. A leader that is silent for a deadline is skipped, before
 * and after the handshake, so that a stopped one delays no rank for longer. Two groups do not form, since each needs
 * more than half of the live ranks; the one exception is in epkit/comm.h. A process counts as dead when it has closed
 * its control link, or a rank of its own host reports its death, or its host refuses a connection to its listener; a
 * silent one counts as alive. So does one whose link was cut (reset), or to which a connection of low latency was cut,
 * because a network partition resets connections on both sides: a new connection shows whether its process exists. So
 * does one whose host was silent before: behind a network that failed and recovered the others may have formed their
 * group and have freed the old one, which looks from here as if they had died.
 *
 * A rank that is left out learns it from the ranks of its own node, by their control blocks, and from its rail peers.
 * If these have died, or its control links have ended, it asks at the listeners of the others (shrink_refuse.c): a
 * joining rank does that by joining, and a leader while it waits.
 *
 * A rank that aborts during the shrink sends the abort to its leader, which ends the shrink for all; other aborts are
 * handled in shrink_aborts.c.
 */
#include "group/shrink_linked.h"

#include "base/fd.h"
#include "group/collective.h"
#include "group/peers.h"
#include "tcp/star.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- state known to this rank --- */

/* True if the host acknowledges nothing: its ranks count as alive. */
static bool is_silent(const struct ep_group *group, int rank)
{
    return !group->peers[rank].control && atomic_load(&group->remote[rank].silent);
}

void shrink_update_dead(struct linked *l)
{
    for (int rank = 0; rank < l->nranks; rank++) {
        bool cut = !l->group->peers[rank].control && atomic_load(&l->group->remote[rank].cut);

        if (rank == l->me)
            continue;
        if (cut)
            shrink_add(l->cut, rank);
        if ((ep_group_peer_dead(l->group, rank) && !cut && !is_silent(l->group, rank)) ||
            ep_group_has_left(l->group, rank))
            shrink_add(l->dead, rank);
    }
}

void shrink_note_refused(struct linked *l, int rank)
{
    if (!is_silent(l->group, ep_group_rail(l->group, rank / l->group->comm->ranks_per_node)))
        shrink_add(l->dead, rank);
}

/* True if others have continued without this rank. */
static bool is_excluded(const struct linked *l)
{
    const struct ep_group *group = l->group;

    for (int rank = 0; rank < l->nranks; rank++) {
        const struct ep_group_control *control = group->peers[rank].control;

        if (rank == l->me)
            continue;
        if (!control && atomic_load(&group->remote[rank].excludes))
            return true;
        if (control && atomic_load(&control->shrink.passed) &&
            atomic_load(&control->shrink.passed_out[l->me / 64]) >> (l->me % 64) & 1)
            return true;
    }
    return false;
}

ep_status shrink_check(struct linked *l)
{
    int abort = l->aborted_by >= 0 ? l->aborted_by : shrink_aborts_find(&l->aborts);

    l->failed_rank = l->me;
    if (is_excluded(l))
        return shrink_fail_excluded(l->me);
    if (abort < 0)
        return EP_OK;
    l->failed_rank = abort;
    return ep_fail(EP_E_ABORTED, "ep_comm_shrink: rank %d called ep_comm_abort", abort);
}

/* --- connections, which never block, and messages --- */

bool shrink_connect(const struct linked *l, struct tcp_handshake *hs, enum tcp_kind kind, int rank,
                    const struct tcp_address *to, uint64_t deadline_ns)
{
    const struct tcp_hello hello = {.kind = kind, .rank = l->me, .to = rank, .session = l->rendezvous->session};
    int fd;

    if (tcp_connect(to, &l->rendezvous->from, &fd) != EP_OK)
        return false;
    tcp_set_options(fd, l->timeout_ms);
    tcp_handshake_connect(hs, fd, &l->rendezvous->key, &hello, to, deadline_ns);
    return true;
}

void shrink_drop(struct linked *l, int rank)
{
    struct member *member = &l->members[rank];

    if (member->fd >= 0)
        ep_fd_close(member->fd);
    member->fd = -1;
    member->used = 0;
}

bool shrink_send(int fd, const void *message, size_t bytes)
{
    return send(fd, message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

/* --- both --- */

static ep_status check_decision(const struct linked *l, int leader)
{
    const struct decision *decision = &l->decision;
    char text[EP_GROUP_REASON_BYTES];
    bool valid;

    if (decision->status != EP_OK && ep_status_is_failure(decision->status)) {
        ep_group_read_reason(text, decision->text);
        return ep_fail((ep_status)decision->status, "%s", text);
    }
    valid =
        decision->status == EP_OK && shrink_has(decision->survivors, l->me) && shrink_has(decision->survivors, leader);
    for (int rank = l->nranks; rank < EP_MAX_RANKS; rank++)
        valid &= !shrink_has(decision->survivors, rank);
    return valid ? EP_OK : ep_fail(EP_E_MISMATCH, "ep_comm_shrink: what rank %d has decided is damaged", leader);
}

/* Finds the leader, and its decision. */
static ep_status find_group(struct linked *l, int *ret_leader)
{
    for (;;) {
        int leader = 0;

        shrink_update_dead(l);
        while (leader < l->me && (shrink_has(l->dead, leader) || shrink_has(l->skipped, leader)))
            leader++;
        *ret_leader = leader;
        if (leader == l->me)
            return shrink_lead(l);
        l->deadline_ns = ep_deadline_ns(l->timeout_ms);
        EP_TRY(shrink_follow(l, leader));
        if (l->members[leader].fd >= 0)
            return check_decision(l, leader);
        l->deadline_ns = ep_deadline_ns(l->timeout_ms);
    }
}

/*
 * Makes the star of the survivors' connections, which it takes over: the leader is its rank 0, being the lowest. Its
 * texts have the old rank numbers.
 */
static ep_status make_star(struct linked *l, int leader)
{
    struct shrink_group *g = &l->next;
    int fds[EP_MAX_RANKS], mine = 0;

    for (int rank = 0; rank < l->nranks; rank++) {
        if (!shrink_has(l->decision.survivors, rank))
            continue;
        if (rank == l->me)
            mine = g->n;
        fds[g->n] = l->members[rank].fd;
        g->ranks[g->n++] = rank;
    }
    if (g->ranks[0] != leader)
        return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: the leader is not the lowest rank");
    EP_TRY(tcp_star_adopt("ep_comm_shrink", mine, g->n, fds, g->ranks, &l->star));
    for (int i = 0; i < g->n; i++)
        l->members[g->ranks[i]].fd = -1; /* owned by the star */
    return EP_OK;
}

static ep_status gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct linked *l = context;
    ep_status status = tcp_star_allgather(l->star, mine, bytes, timeout_ms, ret_all);

    if (status != EP_OK)
        snprintf(l->next.text, sizeof(l->next.text), "%s", ep_last_error());
    return status;
}

static ep_status check_star(void *context)
{
    struct linked *l = context;
    ep_status status = tcp_star_check(l->star);

    if (status != EP_OK)
        snprintf(l->next.lost, sizeof(l->next.lost), "%s", ep_last_error());
    return status;
}

static ep_status poll_call(void *context, int *ret_failed_rank)
{
    *ret_failed_rank = -1; /* l->failed_rank is a number of the old group, which the text names */
    return shrink_check(context);
}

/* The new group exists for all or for none: each rank learns that all have it. */
static ep_status confirm(struct linked *l, ep_comm *next, ep_status opened)
{
    int n = l->next.n;
    struct ep_group_result mine, *all = calloc((size_t)n, sizeof(*all));
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", n);
    ep_group_result_init(&mine, "ep_comm_shrink", opened, l->me);
    status = tcp_star_allgather(l->star, &mine, sizeof(mine), l->timeout_ms, all);
    /*
     * The next call finds a rank that dies while the leader sends the confirmation, as if the rank had died after it.
     */
    if (opened == EP_OK && status != EP_OK && status != EP_E_EXCLUDED &&
        ((tcp_star_was_complete(l->star) && !shrink_confirm_is_refused(next)) ||
         (next->rank != 0 && !tcp_star_was_notified(l->star) && shrink_confirm_query(l, next))))
        status = EP_OK;
    if (opened != EP_OK)
        status = ep_fail(opened, "ep_comm_shrink: %s", mine.reason);
    for (int i = 0; status == EP_OK && i < n; i++) {
        char reason[EP_GROUP_REASON_BYTES];

        if (all[i].status == EP_OK)
            continue;
        ep_group_read_reason(reason, all[i].reason);
        status = ep_fail(ep_status_is_failure(all[i].status) ? (ep_status)all[i].status : EP_E_MISMATCH,
                         "ep_comm_shrink: rank %d failed: %s", all[i].rank, reason);
    }
    free(all);
    if (status == EP_OK)
        shrink_confirm_set(next);
    return status;
}

/* Publishes the ranks that are left out. */
static void publish(struct linked *l)
{
    struct ep_group_shrink *state = &l->group->control->shrink;

    for (int rank = 0; rank < l->nranks; rank++)
        if (!shrink_has(l->decision.survivors, rank))
            atomic_fetch_or(&state->passed_out[rank / 64], UINT64_C(1) << (rank % 64));
    atomic_store(&state->passed, 1);
    ep_group_ring_all(l->group);
    ep_group_link_wake(l->group);
}

/* Creates the group over the star, and confirms it. */
static ep_status open_group(struct linked *l, ep_comm *next, struct ep_group_refusal **ret_refusal)
{
    ep_status status = shrink_open_next(&l->next, l->group->comm, next);
    bool is_open = status == EP_OK;
    char text[EP_ERROR_TEXT_BYTES];

    if (is_open)
        status = shrink_refuse_prepare(l, ret_refusal);
    status = confirm(l, next, status);
    if (status == EP_OK || !is_open)
        return status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    next->ops->comm_close(next);
    return ep_fail(status, "%s", text);
}

static ep_status form_group(struct linked *l, ep_comm *next)
{
    struct ep_net_tcp_context context = l->rendezvous->context;
    struct ep_net_provider provider = *ep_net_find(l->group->comm->config.network);
    struct ep_group_refusal *refusal = NULL;
    int leader;
    ep_status status;

    EP_TRY(find_group(l, &leader));
    EP_TRY(make_star(l, leader));
    provider.context = &context;
    context.check = check_star;
    context.check_context = l;
    l->next.allgather = gather;
    l->next.context = l;
    l->next.network = &provider;
    tcp_star_set_poll(l->star, poll_call, l);
    status = open_group(l, next, &refusal);
    if (status == EP_OK) {
        publish(l);
        shrink_refuse_begin(refusal, l->group, ep_group_of(next));
    } else {
        ep_group_refusal_free(refusal);
    }
    tcp_star_free(l->star);
    return status;
}

ep_status shrink_linked(struct ep_group *group, ep_comm *next)
{
    struct ep_net *net = ep_streams_get_net(group->streams);
    int nranks = group->comm->nranks;
    struct linked *l = calloc(1, sizeof(*l) + (size_t)nranks * sizeof(l->members[0]));
    ep_status status;

    if (!l)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", nranks);
    l->group = group;
    l->rendezvous = ep_net_tcp_get_rendezvous(net->tcp);
    l->nranks = nranks;
    l->me = group->comm->rank;
    l->timeout_ms = group->comm->config.timeout_ms;
    l->deadline_ns = ep_deadline_ns(l->timeout_ms);
    l->aborted_by = -1;
    for (int rank = 0; rank < nranks; rank++)
        l->members[rank].fd = -1;
    status = shrink_aborts_init(&l->aborts, group);
    if (status == EP_OK)
        status = form_group(l, next);
    for (int rank = 0; rank < nranks; rank++)
        shrink_drop(l, rank);
    free(l->aborts.ranks);
    free(l);
    return status;
}
