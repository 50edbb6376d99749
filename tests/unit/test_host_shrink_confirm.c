/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank dies, or the leader stops, while the leader of a shrink between hosts confirms the new group: all others have
 * the same outcome, and form one group in the next shrink. Also if rank 0 has died before, so that the ranks have other
 * numbers in the new group. Ranks are processes. The linker redirects calls of the library to the wrappers below.
 */
#include "ranks.h"

#include "group/shrink_linked.h"
#include "tcp/star_internal.h"

#include <signal.h>
#include <unistd.h>

enum {
    NRANKS = 6,
    VICTIM_LEAF = 3,
    ABORTS = 2,
    LACKS_MEMORY = 2,
    TIMEOUT_MS = 60000 /* a death is detected at once */
};

/* Shared with the ranks. */
struct scenario {
    int results; /* sent by the leader before it dies; -1: it stays alive, and a leaf dies before it receives one */
    int ranks_per_node;
    int leader;           /* 0, or 1: rank 0 dies before the shrink */
    bool stops;           /* the leader, before the confirmation, until the others have given up; nobody dies */
    bool leaf_stops;      /* when it has sent its block of the confirmation; then rank ABORTS aborts */
    bool lacks_memory;    /* rank LACKS_MEMORY, so the confirmation says that the group has failed */
    _Atomic int ready;    /* ranks that have left the first barrier: a death in it would fail it */
    _Atomic int returned; /* from the first shrink */
    _Atomic pid_t pids[NRANKS];
    _Atomic int formed;
    ep_status first[NRANKS], barrier[NRANKS], again[NRANKS];
    int members[NRANKS], deadlines[NRANKS];
    char text[NRANKS][256];
};

static struct scenario *confirms_in; /* on the leader, from the confirmation on */
static int n_results;

ep_status __real_shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal);
ep_status __wrap_shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal);
ep_status __real_tcp_star_push(struct conn *conn);
ep_status __wrap_tcp_star_push(struct conn *conn);
bool __real_shrink_confirm_query(struct linked *l, ep_comm *next);
bool __wrap_shrink_confirm_query(struct linked *l, ep_comm *next);

static struct scenario *shared;
/* This rank: */
static bool is_first; /* it is in the first shrink ... */
static bool leads;    /* ... and leads it */
static bool stops;    /* it stops when it has sent its next block */

ep_status __wrap_shrink_refuse_prepare(const struct linked *l, struct ep_group_refusal **ret_refusal)
{
    if (leads && !n_results && !shared->stops)
        confirms_in = shared;
    if (leads && shared->stops && !atomic_load(&shared->returned))
        raise(SIGSTOP);
    stops = l->me == VICTIM_LEAF && shared->leaf_stops;
    if (l->me == LACKS_MEMORY && shared->lacks_memory && is_first)
        return ep_fail(EP_E_MEMORY, "no memory for a test");
    return __real_shrink_refuse_prepare(l, ret_refusal);
}

/* With unread data, so that its connections are reset and the leader cannot send to it. */
static void kill_leaf(const struct conn *conn)
{
    pid_t pid = atomic_load(&shared->pids[VICTIM_LEAF]);
    const struct conn *to = conn + VICTIM_LEAF - shared->leader - 1; /* conn is the connection to the second rank */
    struct pollfd end = {.fd = to->fd};

    kill(pid, SIGSTOP);
    (void)!send(to->fd, "", 1, MSG_NOSIGNAL);
    kill(pid, SIGKILL);
    /* It may have read that before it stopped: data for a closed socket resets the connection, too. */
    while (poll(&end, 1, 100) <= 0)
        (void)!send(to->fd, "", 1, MSG_NOSIGNAL);
}

/* The leader has died. */
bool __wrap_shrink_confirm_query(struct linked *l, ep_comm *next)
{
    if (shared->leaf_stops)
        l->timeout_ms = 1000;
    if (l->me == ABORTS && shared->leaf_stops)
        ep_comm_abort(l->group->comm);
    return __real_shrink_confirm_query(l, next);
}

ep_status __wrap_tcp_star_push(struct conn *conn)
{
    if (stops && conn->out[OUT_BIG].iov_len) {
        ep_status status = __real_tcp_star_push(conn);

        raise(SIGSTOP);
        return status;
    }
    if (!confirms_in || !conn->out[OUT_BIG].iov_len)
        return __real_tcp_star_push(conn);
    if (confirms_in->results < 0 && n_results == 0)
        kill_leaf(conn);
    if (n_results++ == confirms_in->results)
        raise(SIGKILL);
    if (n_results == NRANKS - 1 - confirms_in->leader)
        confirms_in = NULL;
    return __real_tcp_star_push(conn);
}

static void shrink_again(struct scenario *scenario, int rank, ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;
    ep_comm *next = NULL;

    scenario->again[rank] = ep_comm_shrink(comm, NULL, &next);
    if (scenario->again[rank] != EP_OK)
        snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_comm_last_error(comm));
    else if (ep_comm_get_info(next, &info) == EP_OK && ep_comm_barrier(next) == EP_OK)
        scenario->members[rank] = info.nranks;
    /* A rank that leaves earlier would count as departed in the shrinks of the others. */
    unit_count(&scenario->formed, NRANKS - scenario->leader - scenario->leaf_stops - !scenario->stops);
    ep_comm_free(next);
}

/* When all others have returned, rank 1 continues the leader or ends the leaf that has stopped. */
static void end_stop(struct scenario *scenario, int rank)
{
    atomic_fetch_add(&scenario->returned, 1);
    while (rank == 1 && atomic_load(&scenario->returned) < NRANKS - 1 - scenario->leaf_stops)
        unit_sleep_ms(1);
    if (rank == 1)
        kill(atomic_load(&scenario->pids[scenario->stops ? 0 : VICTIM_LEAF]), scenario->stops ? SIGCONT : SIGKILL);
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int rank = boot->rank;
    ep_comm *comm = NULL, *next = NULL;

    shared = scenario;
    atomic_store(&scenario->pids[rank], getpid());
    if (unit_comm_new(boot, "tcp", scenario->ranks_per_node, TIMEOUT_MS, &comm) != EP_OK ||
        ep_comm_barrier(comm) != EP_OK)
        return 1;
    unit_count(&scenario->ready, NRANKS);
    if (rank < scenario->leader)
        raise(SIGKILL);
    if (scenario->leader)
        (void)ep_comm_barrier(comm); /* fails */
    if (scenario->stops)
        comm->config.timeout_ms = 1000; /* what the others wait for the leader, twice */
    is_first = true;
    leads = rank == scenario->leader;
    scenario->first[rank] = ep_comm_shrink(comm, NULL, &next);
    is_first = leads = false;
    if (scenario->stops || scenario->leaf_stops)
        end_stop(scenario, rank);
    comm->config.timeout_ms = TIMEOUT_MS;
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_comm_last_error(comm));
    if (scenario->first[rank] == EP_OK) {
        scenario->barrier[rank] = ep_comm_barrier(next);
        snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_comm_last_error(next));
    }
    scenario->deadlines[rank] = ep_group_of(comm)->shrink_deadlines;
    shrink_again(scenario, rank, scenario->first[rank] == EP_OK ? next : comm);
    ep_comm_free(next);
    ep_comm_free(comm);
    return 0;
}

/* What the ranks of a scenario have seen; munmap() frees it. `expected`: of unit_fork_ranks(). */
static struct scenario *run_ranks(const struct scenario *wanted, ep_status expected, ep_rank_exit *ret_exits)
{
    struct scenario *scenario = unit_share(wanted, sizeof(*wanted));

    assert_int_equal(unit_fork_ranks(NRANKS, live, scenario, RANKS_PATIENT_MS, ret_exits), expected);
    return scenario;
}

/* `leader`: the lowest rank that does not die before the shrink. */
static void run_scenario(int leader, int ranks_per_node, int results, ep_status first)
{
    const struct scenario wanted = {.ranks_per_node = ranks_per_node, .results = results, .leader = leader};
    ep_rank_exit exits[NRANKS];
    struct scenario *scenario = run_ranks(&wanted, EP_E_PEER_DEAD, exits);
    int victim = results < 0 ? VICTIM_LEAF : leader;
    char expected[32];

    /* In the new group its number is lower by that of the ranks that died before. */
    snprintf(expected, sizeof(expected), "rank %d ", first == EP_OK ? victim - leader : victim);
    for (int rank = leader; rank < NRANKS; rank++) {
        if (rank == victim)
            continue;
        if (scenario->first[rank] != first || scenario->again[rank] != EP_OK)
            print_error("leader %d, %d results: rank %d: %s, %s: %s\n", leader, results, rank,
                        ep_status_name(scenario->first[rank]), ep_status_name(scenario->again[rank]),
                        scenario->text[rank]);
        assert_int_equal(exits[rank].code, 0);
        assert_int_equal(scenario->first[rank], first);
        assert_int_equal(scenario->barrier[rank], first == EP_OK ? EP_E_PEER_DEAD : EP_OK);
        assert_non_null(strstr(scenario->text[rank], expected));
        assert_int_equal(scenario->deadlines[rank], 0);
        assert_int_equal(scenario->again[rank], EP_OK);
        assert_int_equal(scenario->members[rank], NRANKS - 1 - leader);
    }
    munmap(scenario, sizeof(*scenario));
}

TEST(a_leader_that_confirms_to_none_fails_all)
{
    for (int leader = 0; leader < 2; leader++) {
        run_scenario(leader, 1, 0, EP_E_PEER_DEAD);
        run_scenario(leader, 2, 0, EP_E_PEER_DEAD);
    }
}

TEST(a_leader_that_confirms_to_some_confirms_to_all)
{
    for (int leader = 0; leader < 2; leader++)
        for (int results = 1; results < NRANKS - 1 - leader; results++) {
            run_scenario(leader, 1, results, EP_OK);
            run_scenario(leader, 2, results, EP_OK);
        }
}

TEST(a_rank_that_dies_during_the_confirmation_is_found_by_the_next_call)
{
    for (int leader = 0; leader < 2; leader++) {
        run_scenario(leader, 1, -1, EP_OK);
        run_scenario(leader, 2, -1, EP_OK);
    }
}

/* The others have given up, and their failures are behind their blocks of the confirmation when the leader reads these.
 */
TEST(a_leader_that_stops_does_not_have_the_group_alone)
{
    const struct scenario wanted = {.ranks_per_node = 1, .stops = true};
    ep_rank_exit exits[NRANKS];
    struct scenario *scenario = run_ranks(&wanted, EP_OK, exits);

    for (int rank = 0; rank < NRANKS; rank++) {
        if (scenario->first[rank] == EP_OK || scenario->again[rank] != EP_OK)
            print_error("rank %d: %s, %s: %s\n", rank, ep_status_name(scenario->first[rank]),
                        ep_status_name(scenario->again[rank]), scenario->text[rank]);
        assert_int_not_equal(scenario->first[rank], EP_OK);
        assert_int_equal(scenario->again[rank], EP_OK);
        assert_int_equal(scenario->members[rank], NRANKS);
    }
    munmap(scenario, sizeof(*scenario));
}

static void expect_rank(const struct scenario *scenario, int rank, ep_status first, const char *text, int most,
                        int members)
{
    if (scenario->first[rank] != first || scenario->again[rank] != EP_OK)
        print_error("rank %d: %s, %s: %s\n", rank, ep_status_name(scenario->first[rank]),
                    ep_status_name(scenario->again[rank]), scenario->text[rank]);
    assert_int_equal(scenario->first[rank], first);
    assert_non_null(strstr(scenario->text[rank], text));
    assert_in_range(scenario->deadlines[rank], 0, most);
    assert_int_equal(scenario->again[rank], EP_OK);
    assert_int_equal(scenario->members[rank], members);
}

/*
 * The leader has confirmed to none and has died; a leaf has stopped. Giving up alone, a rank could lose the group. The
 * first rank that gives up at its deadline ends the query of the others.
 */
TEST(an_abort_does_not_end_the_query)
{
    const struct scenario wanted = {.ranks_per_node = 1, .leaf_stops = true};
    ep_rank_exit exits[NRANKS];
    struct scenario *scenario = run_ranks(&wanted, EP_E_PEER_DEAD, exits);

    for (int rank = 1; rank < NRANKS; rank++)
        if (rank != VICTIM_LEAF)
            expect_rank(scenario, rank, EP_E_PEER_DEAD, "rank 0 ", 1, NRANKS - 2);
    munmap(scenario, sizeof(*scenario));
}

/* It dies when ranks 1 and 2 know that rank 2 has failed. The others know only that the group does not exist. */
TEST(a_leader_that_dies_while_it_reports_a_failure_is_named_by_the_others)
{
    const struct scenario wanted = {.ranks_per_node = 1, .results = 2, .lacks_memory = true};
    ep_rank_exit exits[NRANKS];
    struct scenario *scenario = run_ranks(&wanted, EP_E_PEER_DEAD, exits);

    expect_rank(scenario, 1, EP_E_MEMORY, "rank 2 failed: no memory for a test", 0, NRANKS - 1);
    expect_rank(scenario, LACKS_MEMORY, EP_E_MEMORY, "no memory for a test", 0, NRANKS - 1);
    for (int rank = 3; rank < NRANKS; rank++)
        expect_rank(scenario, rank, EP_E_PEER_DEAD, "rank 0 ", 0, NRANKS - 1);
    munmap(scenario, sizeof(*scenario));
}
