/* SPDX-License-Identifier: Apache-2.0 */
/* The failure of a group: one word, published by the first rank that finds a failure, and its text on each rank. */
#include "group/failure.h"

#include "base/futex.h"
#include "group/peers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* For the failure to be sent. A peer that does not read has no room for it only if its buffers are full. */
#define SEND_MS 100

static const char *const phase_names[] = {
#define PHASE_NAME(name, text) [name] = text,
    EP_GROUP_PHASES(PHASE_NAME)
#undef PHASE_NAME
};

const char *ep_group_phase_name(enum ep_group_phase phase)
{
    if ((size_t)phase >= sizeof(phase_names) / sizeof(phase_names[0]))
        return "?";
    return phase_names[phase];
}

/* A failure in one word, so that one store publishes it. */
static uint64_t pack_failure(ep_status status, int failed_rank, enum ep_group_phase phase, int reporter)
{
    return (uint64_t)status << 48 | (uint64_t)(uint16_t)failed_rank << 32 | (uint64_t)(uint16_t)phase << 16 |
           (uint64_t)(uint16_t)reporter;
}

/*
 * Validates a failure word: 0, or one that pack_failure() makes of a rank of this group. Any other value means that the
 * memory of `rank`, where it was read, is damaged.
 */
static uint64_t failure_of(const struct ep_group *group, uint64_t word, int rank)
{
    int nranks = group->comm->nranks;

    if (!word ||
        (ep_status_is_failure((int64_t)(word >> 48)) && (uint16_t)(word >> 32) < nranks && (uint16_t)word < nranks))
        return word;
    return pack_failure(EP_E_MISMATCH, rank, EP_GROUP_IDLE, group->comm->rank);
}

/* The failure that this rank has found or taken over. */
static uint64_t own_failure(const struct ep_group *group)
{
    return failure_of(group, atomic_load_explicit(&group->control->failure, memory_order_acquire), group->comm->rank);
}

/* Where a rank has left: have the others left this rank out? Not before, as all that it needs of them may be here. */
static uint64_t exclusion(const struct ep_group *group, uint64_t failure)
{
    uint32_t by = atomic_load(&group->control->left_out);

    if (!by || (ep_status)(failure >> 48) != EP_E_PEER_LEFT)
        return 0;
    return failure_of(group, pack_failure(EP_E_EXCLUDED, group->comm->rank, EP_GROUP_IDLE, (int)by - 1),
                      group->comm->rank);
}

/* The reason published by the rank that set the failure, if any. */
static void read_reason(const struct ep_group *group, uint64_t failure, char text[EP_GROUP_REASON_BYTES + 2])
{
    const struct ep_group_state *state = ep_group_state_of(group, (uint16_t)failure);

    text[0] = '\0';
    if (atomic_load_explicit(&state->reason_for, memory_order_acquire) != failure)
        return;
    memcpy(text, ": ", 2);
    ep_group_read_reason(text + 2, state->reason);
}

/* False if the reporter may have seen only the end of a connection, as after a partition of the network. */
static bool is_known_dead(const struct ep_group *group, int rank, int reporter)
{
    bool far = group->remote && !group->peers[rank].control;

    if (rank == group->comm->rank)
        return false;
    return rank / group->nlocal == reporter / group->nlocal ||
           (ep_group_peer_dead(group, rank) && !(far && atomic_load(&group->remote[rank].cut)));
}

static ep_status fail_with(struct ep_group *group, uint64_t failure)
{
    ep_status status = (ep_status)(failure >> 48);
    int failed_rank = (uint16_t)(failure >> 32), reporter = (uint16_t)failure;
    const char *phase = ep_group_phase_name((enum ep_group_phase)(uint16_t)(failure >> 16));
    char seen_by[48] = "", where[128], reason[EP_GROUP_REASON_BYTES + 2];
    int none = EP_OK;

    atomic_compare_exchange_strong(&group->comm->failed, &none, (int)status);
    read_reason(group, failure, reason);
    if (reporter != group->comm->rank && reporter != failed_rank)
        snprintf(seen_by, sizeof(seen_by), " (seen by rank %d)", reporter);
    snprintf(where, sizeof(where), "in \"%s\"%s", phase, seen_by);
    switch (status) {
    case EP_E_TIMEOUT:
        return ep_fail(status, "rank %d did not answer within %d ms %s%s", failed_rank, group->comm->config.timeout_ms,
                       where, reason);
    case EP_E_PEER_DEAD:
        return ep_fail(status, "rank %d %s %s%s", failed_rank,
                       is_known_dead(group, failed_rank, reporter) ? "died while others were"
                                                                   : "cannot be reached by others",
                       where, reason);
    case EP_E_PEER_LEFT:
        return ep_fail(status, "rank %d left the group while others waited for it %s%s", failed_rank, where, reason);
    case EP_E_ABORTED:
        return ep_fail(status, "rank %d called ep_comm_abort while it was in \"%s\"", failed_rank, phase);
    case EP_E_EXCLUDED:
        return ep_fail(status, "rank %d goes on with other members, without this one, rank %d", reporter, failed_rank);
    default:
        return ep_fail(status, "rank %d failed with %s %s%s", failed_rank, ep_status_name(status), where, reason);
    }
}

/*
 * One failure for the whole group: the first that is written at the arbiter. Two ranks that find different failures at
 * the same time would otherwise report different ones. Kept in the own block as well, for when the memory of the
 * arbiter is unmapped. Async-signal-safe.
 */
static uint64_t set_first(struct ep_group *group, uint64_t failure)
{
    uint64_t own = own_failure(group), excluded = exclusion(group, failure), none = 0;

    if (own)
        return own;
    if (excluded)
        failure = excluded;
    else if (!atomic_compare_exchange_strong(&ep_group_arbiter(group)->group_failure, &none, failure))
        failure = failure_of(group, none, group->arbiter);
    none = 0;
    return atomic_compare_exchange_strong(&group->control->failure, &none, failure) ? failure : own_failure(group);
}

/*
 * Waits, once and briefly, until the thread of the control links has sent the failure of the group: the caller's
 * process may exit as soon as its call returns, and its peers would report that it died instead of the reason.
 */
static void await_sent(struct ep_group *group)
{
    uint64_t now = ep_now_ns(), deadline_ns = ep_deadline_ns(SEND_MS);

    if (!atomic_load(&group->link_owes_failure))
        return;
    ep_group_link_wake(group);
    for (; atomic_load(&group->link_owes_failure) && now < deadline_ns; now = ep_now_ns())
        ep_futex_wait(&group->link_owes_failure, 1, deadline_ns - now);
    atomic_store(&group->link_owes_failure, 0);
}

ep_status ep_group_set_failure(struct ep_group *group, ep_status status, int failed_rank, enum ep_group_phase phase)
{
    uint64_t failure = set_first(group, pack_failure(status, failed_rank, phase, group->comm->rank));

    ep_group_ring_all(group);
    await_sent(group);
    return fail_with(group, failure);
}

void ep_group_receive_failure(struct ep_group *group, uint64_t word, int from)
{
    if (own_failure(group))
        return;
    set_first(group, failure_of(group, word, from));
    ep_group_ring_all(group);
}

uint64_t ep_group_get_failure(const struct ep_group *group)
{
    uint64_t failure = own_failure(group);

    /* That of the node is the first that a rank has published. */
    return failure
               ? failure
               : failure_of(group, atomic_load_explicit(&ep_group_arbiter(group)->group_failure, memory_order_acquire),
                            group->arbiter);
}

void ep_group_get_failed(const ep_comm *comm, int32_t *ret_failed)
{
    const struct ep_group *group = ep_group_of(comm);
    uint64_t failure = ep_group_get_failure(group);

    for (int rank = 0; rank < comm->nranks; rank++)
        ret_failed[rank] = ep_group_has_left(group, rank)    ? EP_E_PEER_LEFT
                           : ep_group_peer_dead(group, rank) ? EP_E_PEER_DEAD
                                                             : EP_OK;
    if (failure && ret_failed[(uint16_t)(failure >> 32)] == EP_OK)
        ret_failed[(uint16_t)(failure >> 32)] = (int32_t)(failure >> 48);
}

/* Publishes the reason to the peers. Only the first one of this rank: a peer may be reading it. */
static void publish_reason(struct ep_group *group, uint64_t failure, const char *text)
{
    struct ep_group_state *state = &group->control->state;

    if (atomic_exchange(&group->control->reason_set, 1))
        return;
    snprintf(state->reason, sizeof(state->reason), "%.*s", EP_GROUP_REASON_BYTES - 1, text);
    atomic_store_explicit(&state->reason_for, failure, memory_order_release);
}

ep_status ep_group_set_late(struct ep_group *group, int late, enum ep_group_phase phase, const char *reason)
{
    if (*reason)
        publish_reason(group, pack_failure(EP_E_TIMEOUT, late, phase, group->comm->rank), reason);
    return ep_group_set_failure(group, EP_E_TIMEOUT, late, phase);
}

ep_status ep_group_set_own_failure(struct ep_group *group, ep_status status, int failed_rank, enum ep_group_phase phase)
{
    char text[EP_ERROR_TEXT_BYTES];
    ep_status published;
    uint64_t mine;

    /* Set before by the function that found it: its text says more than the failure word. */
    mine = own_failure(group);
    if (mine && (ep_status)(mine >> 48) == status && (uint16_t)mine == group->comm->rank)
        return status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    /* This failure may be the consequence of one that a peer has set already. */
    EP_TRY(ep_group_check(group));
    if (!ep_status_is_fatal(status))
        failed_rank = group->comm->rank;
    publish_reason(group, pack_failure(status, failed_rank, phase, group->comm->rank), text);
    published = ep_group_set_failure(group, status, failed_rank, phase);
    if (published != status)
        return published;
    if (failed_rank != group->comm->rank)
        return ep_fail(status, "%s (in \"%s\")", text, ep_group_phase_name(phase));
    return ep_fail(status, "rank %d failed: %s (in \"%s\")", failed_rank, text, ep_group_phase_name(phase));
}

ep_status ep_group_fail_damaged(struct ep_group *group, int rank, enum ep_group_phase phase, const char *what,
                                int64_t value)
{
    return ep_group_set_own_failure(
        group,
        ep_fail(EP_E_MISMATCH, "what rank %d has published is damaged: %s is %lld", rank, what, (long long)value), rank,
        phase);
}

enum { VALUE_TEXT = 64 };

static void describe_flags(int64_t value, char ret_text[VALUE_TEXT])
{
    /* Flags of plans and of low-latency objects have different numbers. */
    static const struct {
        const char *name;
        int64_t flag;
    } flags[] = {{"EP_PLAN_EXPANDED", EP_PLAN_EXPANDED},
                 {"EP_PLAN_ZERO_PADDING", EP_PLAN_ZERO_PADDING},
                 {"EP_LL_MASK_DEAD", EP_LL_MASK_DEAD}};
    int64_t unnamed = value;
    size_t used = 0;

    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        if (value & flags[i].flag)
            used += (size_t)snprintf(ret_text + used, VALUE_TEXT - used, "%s%s", used ? " | " : "", flags[i].name);
        unnamed &= ~flags[i].flag;
    }
    if (!used || unnamed)
        snprintf(ret_text, VALUE_TEXT, "%lld", (long long)value);
}

/* A value of a field as texts show it: element types and flags by name. */
static void describe(const char *field, int64_t value, char ret_text[VALUE_TEXT])
{
    static const char type[] = "type";
    size_t length = strlen(field);

    if (strcmp(field, "flags") == 0)
        describe_flags(value, ret_text);
    else if (value && length >= sizeof(type) - 1 && strcmp(field + length - (sizeof(type) - 1), type) == 0)
        snprintf(ret_text, VALUE_TEXT, "%lld (%s)", (long long)value, ep_dtype_name((ep_dtype)value));
    else
        snprintf(ret_text, VALUE_TEXT, "%lld", (long long)value);
}

ep_status ep_group_fail_disagree(const char *call, const char *field, int64_t mine, int me, int64_t theirs, int rank)
{
    char here[VALUE_TEXT], there[VALUE_TEXT];

    describe(field, mine, here);
    describe(field, theirs, there);
    return ep_fail(EP_E_MISMATCH, "%s%sranks disagree: %s is %s on rank %d and %s on rank %d", call, *call ? ": " : "",
                   field, here, me, there, rank);
}

ep_status ep_group_fail_calls(uint32_t mine, int me, uint32_t theirs, int rank)
{
    return ep_fail(EP_E_MISMATCH, "ranks are in different calls: rank %d in \"%s\", rank %d in \"%s\"", me,
                   ep_group_phase_name((enum ep_group_phase)mine), rank,
                   ep_group_phase_name((enum ep_group_phase)theirs));
}

ep_status ep_group_fail_outputs(uint32_t mine, int me, uint32_t theirs, int rank)
{
    uint32_t differ = mine ^ theirs;
    const char *name = differ & EP_GROUP_RECV_INDEX     ? "recv_topk_idx"
                       : differ & EP_GROUP_RECV_WEIGHTS ? "recv_topk_weights"
                       : differ & EP_GROUP_RECV_SOURCE  ? "recv_source"
                       : differ & EP_GROUP_OUT_WEIGHTS  ? "out_topk_weights"
                       : differ & EP_GROUP_RANK_PREFIX  ? "rank_prefix of the metadata"
                                                        : "an output";
    bool have = mine & differ & -differ;

    if (differ == EP_GROUP_ROUND_PARTIAL)
        return ep_fail(EP_E_MISMATCH, "ranks disagree: EP_COMBINE_ROUND_PARTIAL is set on rank %d and not on rank %d",
                       mine & EP_GROUP_ROUND_PARTIAL ? me : rank, mine & EP_GROUP_ROUND_PARTIAL ? rank : me);
    return ep_fail(EP_E_MISMATCH, "ranks disagree: %s is given on rank %d and NULL on rank %d", name, have ? me : rank,
                   have ? rank : me);
}

ep_status ep_group_compare(const char *call, const struct ep_group_field *fields, size_t n, const void *mine, int me,
                           const void *theirs, int rank)
{
    for (size_t i = 0; i < n; i++) {
        int32_t here = *(const int32_t *)((const char *)mine + fields[i].at);
        int32_t there = *(const int32_t *)((const char *)theirs + fields[i].at);

        if (here != there)
            return ep_group_fail_disagree(call, fields[i].name, here, me, there, rank);
    }
    return EP_OK;
}

/* The failure of the group, 0: none. Stored, so that every later call gives the same answer. */
static uint64_t find_failure(struct ep_group *group)
{
    uint64_t failure = ep_group_get_failure(group);

    return failure ? set_first(group, failure) : 0;
}

ep_status ep_group_check(struct ep_group *group)
{
    uint64_t failure = find_failure(group);

    if (!failure)
        return EP_OK;
    await_sent(group);
    return fail_with(group, failure);
}

ep_status ep_group_check_abort(struct ep_group *group)
{
    ep_status own = (ep_status)(own_failure(group) >> 48);

    /* An abort after another failure ends the wait as well, with that failure. */
    for (int rank = 0; rank < group->comm->nranks; rank++)
        if (atomic_load(&ep_group_state_of(group, rank)->aborts))
            return ep_group_check(group);
    /* An abort on another host arrives as a failure. */
    return own == EP_E_EXCLUDED || (group->remote && own == EP_E_ABORTED) ? ep_group_check(group) : EP_OK;
}

ep_status ep_group_poll(ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    uint64_t failure = find_failure(group);

    if (!failure)
        return EP_OK;
    ep_group_link_wake(group);
    return fail_with(group, failure);
}

void ep_group_abort(ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);
    uint32_t waiting = atomic_load(&group->control->state.waiting);
    int clean = EP_OK, saved_errno = errno; /* a signal handler may have interrupted any call */
    uint64_t failure =
        set_first(group, pack_failure(EP_E_ABORTED, comm->rank, (enum ep_group_phase)(waiting & 0xff), comm->rank));

    atomic_compare_exchange_strong(&comm->failed, &clean, (int)(failure >> 48));
    /* After the failure: a rank that sees the count finds the failure. */
    atomic_fetch_add(&group->control->state.aborts, 1);
    ep_group_ring_all(group);
    ep_group_link_wake(group);
    errno = saved_errno;
}
