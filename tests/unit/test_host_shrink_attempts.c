/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shrink of ranks that are in different attempts: rank 2 was late in attempt 1, and the others banned it there. Its
 * actions in attempt 2 before they arrived hold for all. Each case writes the words of that history into the control
 * blocks, as the ranks would have, and the survivors continue from there.
 */
#include "ranks.h"

#include "group/shrink.h"

enum { NRANKS = 3, LATE = 2 };

struct history {
    uint32_t late_vote;    /* of rank 2 in attempt 2 */
    uint32_t late_attempt; /* that rank 2 is in */
    uint32_t late_opened;  /* its vote in attempt 2 on whether the new group was created; OPEN: it has cast none */
    bool late_joins;       /* it calls ep_comm_shrink() concurrently with the others, else when they have returned */
    bool again;            /* all call it a second time */
    bool others_leave;     /* they free the old group before rank 2 calls */
    _Atomic int returned;  /* calls */
    ep_status first[NRANKS], second[NRANKS];
    int members[NRANKS]; /* members of the group that the last call returned, 0: none */
    char text[NRANKS][256];
};

static void write_history(const struct history *history, struct ep_group_shrink *mine, int rank)
{
    atomic_store(&mine->attempt, rank == LATE ? history->late_attempt : 1);
    atomic_store(&mine->vote[0], rank == LATE ? shrink_pack_vote(EP_GROUP_VOTE_BANNED, EP_E_TIMEOUT, LATE)
                                              : shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, rank));
    if (rank == LATE)
        atomic_store(&mine->vote[1], history->late_vote);
    if (rank == LATE && history->late_opened) {
        /* No rank waited for it. */
        atomic_store(&mine->vote[0], shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, LATE));
        atomic_store(&mine->opened[1], history->late_opened);
    }
}

static ep_status shrink_once(ep_comm *comm, struct history *history, int rank)
{
    ep_comm_info info = EP_COMM_INFO_INIT;
    ep_comm *next = NULL;
    ep_status status = ep_comm_shrink(comm, NULL, &next);

    snprintf(history->text[rank], sizeof(history->text[rank]), "%s", ep_comm_last_error(comm));
    if (status == EP_OK && ep_comm_get_info(next, &info) == EP_OK)
        history->members[rank] = info.nranks;
    ep_comm_free(next);
    return status;
}

/* Waits until the others are in attempt 2, where their history takes them. */
static void wait_for_others(const struct ep_group *group)
{
    for (int rank = 0; rank < LATE; rank++)
        while (atomic_load(&group->peers[rank].control->shrink.attempt) < 2)
            unit_sleep_ms(1);
}

static int live(const ep_boot *boot, void *argument)
{
    struct history *history = argument;
    int rank = boot->rank;
    ep_comm *comm;

    if (unit_comm_new(boot, NULL, 0, 20000, &comm) != EP_OK)
        return 1;
    write_history(history, &ep_group_of(comm)->control->shrink, rank);
    if (ep_comm_barrier(comm) != EP_OK)
        return 1;
    if (rank == LATE && history->late_joins)
        wait_for_others(ep_group_of(comm));
    else if (rank == LATE)
        unit_await(&history->returned, LATE);
    /* A rank that has given up or failed has returned already. */
    if (rank != LATE || (shrink_kind(history->late_vote) != EP_GROUP_VOTE_GIVEN_UP && !history->late_opened))
        history->first[rank] = shrink_once(comm, history, rank);
    if (rank != LATE && history->others_leave) {
        ep_comm_free(comm);
        comm = NULL;
    }
    unit_count(&history->returned, NRANKS);
    if (history->again && comm)
        history->second[rank] = shrink_once(comm, history, rank);
    /* A rank that leaves counts as departed for the others. */
    unit_count(&history->returned, 2 * NRANKS);
    ep_comm_free(comm);
    return 0;
}

static void continue_from(struct history *history)
{
    unit_run_threads(NRANKS, live, history);
}

/* It has returned EP_E_TIMEOUT: the others do not continue without it, and the next call has all ranks. */
TEST(a_rank_that_gave_up_before_the_others_arrived_fails_them_too)
{
    struct history history = {
        .late_vote = shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, EP_E_TIMEOUT, 0), .late_attempt = 2, .again = true};

    continue_from(&history);
    for (int rank = 0; rank < LATE; rank++) {
        assert_int_equal(history.first[rank], EP_E_TIMEOUT);
        assert_string_equal(history.text[rank], history.text[0]);
    }
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(history.second[rank], EP_OK);
        assert_int_equal(history.members[rank], NRANKS);
    }
}

/* It has seen attempt 2 fail, or will, and begins the third, in which they synchronise. */
TEST(a_rank_that_voted_before_the_others_arrived_is_waited_for)
{
    const uint32_t votes[] = {EP_GROUP_VOTE_LOCKED, shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, LATE),
                              shrink_pack_vote(EP_GROUP_VOTE_BANNED, EP_E_TIMEOUT, LATE)};

    for (size_t i = 0; i < sizeof(votes) / sizeof(votes[0]); i++) {
        struct history history = {.late_vote = votes[i], .late_attempt = 2, .late_joins = true};
        /* Banned again: the others need not wait for it in the third attempt, but it must learn that. */
        bool banned = shrink_kind(votes[i]) == EP_GROUP_VOTE_BANNED;

        continue_from(&history);
        for (int rank = 0; rank < NRANKS; rank++) {
            assert_int_equal(history.first[rank], banned && rank == LATE ? EP_E_EXCLUDED : EP_OK);
            assert_int_equal(history.members[rank], banned ? rank == LATE ? 0 : LATE : NRANKS);
        }
    }
}

/* It has neither voted nor given up: the others need not wait for it again, and it is excluded when it arrives. */
TEST(a_rank_that_arrives_after_the_others_is_excluded)
{
    struct history history = {.late_vote = EP_GROUP_VOTE_OPEN, .late_attempt = 1};

    continue_from(&history);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(history.first[rank], rank == LATE ? EP_E_EXCLUDED : EP_OK);
        assert_int_equal(history.members[rank], rank == LATE ? 0 : LATE);
    }
}

/* It sees none of them in its old group any more, but must not form a second group. */
TEST(an_excluded_rank_stays_excluded_when_the_others_have_left)
{
    struct history history = {.late_vote = EP_GROUP_VOTE_OPEN, .late_attempt = 1, .others_leave = true, .again = true};

    continue_from(&history);
    for (int rank = 0; rank < LATE; rank++)
        assert_int_equal(history.members[rank], LATE);
    assert_int_equal(history.first[LATE], EP_E_EXCLUDED);
    assert_int_equal(history.second[LATE], EP_E_EXCLUDED);
    assert_string_equal(history.text[LATE], "ep_comm_shrink: the other ranks continued without rank 2");
}

/*
 * It has locked the view, and failed before it reached an all-gather of the new group: no rank waits a deadline for it.
 */
TEST(a_rank_that_failed_before_an_all_gather_is_not_waited_for)
{
    struct history history = {.late_vote = EP_GROUP_VOTE_LOCKED,
                              .late_attempt = 2,
                              .late_opened = shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_MEMORY, LATE)};

    continue_from(&history);
    for (int rank = 0; rank < LATE; rank++) {
        assert_int_equal(history.first[rank], EP_E_MEMORY);
        assert_non_null(strstr(history.text[rank], "rank 2 failed with EP_E_MEMORY"));
    }
}

static int shrink_once_more_than_there_are(const ep_boot *boot, void *argument)
{
    struct history *history = argument;
    ep_comm *comm;

    if (unit_comm_new(boot, NULL, 0, 20000, &comm) != EP_OK)
        return 1;
    atomic_store(&ep_group_of(comm)->control->shrink.attempt, EP_GROUP_ATTEMPTS);
    if (ep_comm_barrier(comm) != EP_OK)
        return 1;
    history->first[boot->rank] = shrink_once(comm, history, boot->rank);
    history->second[boot->rank] = shrink_once(comm, history, boot->rank);
    ep_comm_free(comm);
    return 0;
}

/* No later call can succeed: the text says what to do, and there is no wait. */
TEST(a_rank_without_attempts_gets_a_hint)
{
    struct history history = {.again = true};

    unit_run_threads(NRANKS, shrink_once_more_than_there_are, &history);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(history.first[rank], EP_E_TIMEOUT);
        assert_int_equal(history.second[rank], EP_E_TIMEOUT);
        assert_string_equal(history.text[rank],
                            "ep_comm_shrink: no agreement after 32 attempts, the limit of a communicator: free it, "
                            "end the ranks that do not answer, and create a new one of the others by ep_comm_new");
    }
}
