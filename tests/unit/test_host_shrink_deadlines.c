/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many deadlines expire in ep_comm_shrink with stopped ranks: counted, because their duration depends on the
 * machine. Ranks are processes; the last of the others ends a stopped one.
 */
#include "ranks.h"

#include "group/group.h"
#include "tcp/acceptor.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum { NRANKS = 5, TIMEOUT_MS = 5000, BEFORE_MS = 120000 /* no rank is late before the shrink */ };

/* Shared with the ranks. */
struct scenario {
    const char *network; /* NULL: all on one host */
    int n_stopped;       /* the lowest ranks, before they call */
    bool leader_stops;   /* rank 0, when two others have joined it, and before rank 4 calls */
    int aborts;          /* rank that aborts when two others have joined rank 0; rank 4 does not call */
    bool comes;          /* it does not wait, and shrinks as soon as it has aborted; rank 4, too */
    bool amid_handshake; /* it aborts while it connects to rank 0, which all others have joined */
    bool answers_late;   /* rank 0 continues that handshake only after the rank that aborts has returned */
    _Atomic pid_t pids[NRANKS];
    _Atomic int stopped, returned;
    ep_status first[NRANKS], status[NRANKS];
    int deadlines[NRANKS], members[NRANKS];
    char text[NRANKS][256];
};

/* Of this process. */
static struct scenario *leads_in;
static _Thread_local tcp_acceptor_accept_fn real_take;
static _Atomic bool counts; /* not while a communicator is created */
static _Atomic int taken;   /* connections that leaders have accepted */
static _Atomic bool holds;  /* a leader that all others have joined stops accepting */

void __real_tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn take,
                              void *context);
void __wrap_tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn take,
                              void *context);

static void count_taken(void *context, const struct tcp_handshake *hs, int fd)
{
    taken += atomic_load(&counts);
    real_take(context, hs, fd);
}

/* A leader that stops while it waits: the others have connected. */
void __wrap_tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn take,
                              void *context)
{
    real_take = take;
    if (leads_in && taken >= 2) {
        atomic_store(&leads_in->stopped, 1);
        raise(SIGSTOP);
    }
    if (!atomic_load(&holds) || taken < NRANKS - 2)
        __real_tcp_acceptor_step(acceptor, check, count_taken, context);
}

static _Thread_local ep_comm *aborts_amid_handshake;

void __real_tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                  const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns);
void __wrap_tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                  const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns);

void __wrap_tcp_handshake_connect(struct tcp_handshake *hs, int fd, const struct tcp_key *key,
                                  const struct tcp_hello *hello, const struct tcp_address *to, uint64_t deadline_ns)
{
    ep_comm *comm = aborts_amid_handshake;

    if (comm)
        unit_await(&taken, NRANKS - 2);
    __real_tcp_handshake_connect(hs, fd, key, hello, to, deadline_ns);
    aborts_amid_handshake = NULL;
    if (comm)
        ep_comm_abort(comm);
}

static void shrink(struct scenario *scenario, ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;
    int rank = comm->rank;
    ep_comm *next = NULL;

    scenario->status[rank] = ep_comm_shrink(comm, NULL, &next);
    snprintf(scenario->text[rank], sizeof(scenario->text[rank]), "%s", ep_comm_last_error(comm));
    scenario->deadlines[rank] = ep_group_of(comm)->shrink_deadlines;
    if (scenario->status[rank] == EP_OK && ep_comm_get_info(next, &info) == EP_OK)
        scenario->members[rank] = info.nranks;
    ep_comm_free(next);
}

/* All ranks call it, and nothing has happened since. */
static void shrink_again(struct scenario *scenario, ep_comm *comm)
{
    ep_comm_info info = EP_COMM_INFO_INIT;
    ep_comm *next = NULL;

    if (ep_comm_shrink(comm, NULL, &next) != EP_OK)
        fprintf(stderr, "rank %d, again: %s\n", comm->rank, ep_last_error());
    else if (ep_comm_get_info(next, &info) == EP_OK)
        scenario->members[comm->rank] = info.nranks;
    unit_count(&scenario->returned, 2 * NRANKS);
    ep_comm_free(next);
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int rank = boot->rank, n_stopped = scenario->n_stopped + scenario->leader_stops;
    ep_comm *comm = NULL;

    if (unit_comm_new(boot, scenario->network, scenario->network ? 1 : 0, BEFORE_MS, &comm) != EP_OK ||
        ep_comm_barrier(comm) != EP_OK)
        return 1;
    comm->config.timeout_ms = TIMEOUT_MS;
    atomic_store(&scenario->pids[rank], getpid());
    if (rank < scenario->n_stopped) {
        atomic_fetch_add(&scenario->stopped, 1);
        raise(SIGSTOP);
    }
    if (scenario->leader_stops && rank == 0) {
        leads_in = scenario;
        atomic_store(&counts, true);
    }
    if (!scenario->leader_stops || rank == NRANKS - 1)
        unit_await(&scenario->stopped, n_stopped);
    if (scenario->aborts && rank == scenario->aborts) {
        /* For those that begin later the abort would be the reason to shrink. */
        for (int i = n_stopped; i < rank; i++)
            while (!atomic_load(&ep_group_of(comm)->remote[i].state.aborts_before))
                unit_sleep_ms(1);
        atomic_store(&taken, NRANKS - 2); /* of this process: it waits for no other rank */
        aborts_amid_handshake = comm;
    }
    shrink(scenario, comm);
    scenario->first[rank] = scenario->status[rank];
    if (scenario->aborts && scenario->first[rank] == EP_E_ABORTED)
        shrink(scenario, comm);
    /* A rank that leaves counts as departed for the others. */
    unit_count(&scenario->returned, NRANKS - n_stopped);
    for (int i = 0; rank == NRANKS - 1 && i < n_stopped; i++)
        kill(atomic_load(&scenario->pids[i]), SIGKILL);
    ep_comm_free(comm);
    return 0;
}

static struct scenario *run_scenario(const struct scenario *wanted)
{
    struct scenario *scenario = unit_share(wanted, sizeof(*wanted));
    ep_rank_exit exits[NRANKS];
    int n_stopped = wanted->n_stopped + wanted->leader_stops;

    assert_int_equal(unit_fork_ranks(NRANKS, live, scenario, RANKS_PATIENT_MS, exits),
                     n_stopped ? EP_E_PEER_DEAD : EP_OK);
    for (int rank = n_stopped; rank < NRANKS; rank++)
        assert_int_equal(exits[rank].code, 0);
    return scenario;
}

/* `first`: of the call before the one that has formed a group of so many members. */
static void expect_rank(const struct scenario *scenario, int rank, ep_status first, int members, int most_deadlines)
{
    if (scenario->first[rank] != first || scenario->status[rank] != EP_OK || scenario->deadlines[rank] > most_deadlines)
        print_error("rank %d: %s, %d deadlines: %s\n", rank, ep_status_name(scenario->first[rank]),
                    scenario->deadlines[rank], scenario->text[rank]);
    assert_int_equal(scenario->first[rank], first);
    assert_int_equal(scenario->status[rank], EP_OK);
    assert_int_equal(scenario->members[rank], members);
    assert_in_range(scenario->deadlines[rank], 0, most_deadlines);
}

/* All ranks that are not stopped are in the new group, after at most so many deadlines each. */
static void expect_group(const struct scenario *wanted, int most)
{
    struct scenario *scenario = run_scenario(wanted);
    int n_stopped = wanted->n_stopped + wanted->leader_stops;

    for (int rank = n_stopped; rank < NRANKS; rank++)
        expect_rank(scenario, rank, EP_OK, NRANKS - n_stopped, most);
    munmap(scenario, sizeof(*scenario));
}

TEST(all_that_answer_wait_for_none)
{
    expect_group(&(struct scenario){.network = NULL}, 0);
    expect_group(&(struct scenario){.network = "tcp"}, 0);
}

TEST_CALL(a_stopped_rank_costs_one_deadline_on_a_host, expect_group(&(struct scenario){.n_stopped = 2}, 1))

/* One until it is skipped, and one in which its successor waits for it. */
TEST(a_stopped_leader_costs_two_between_hosts)
{
    expect_group(&(struct scenario){.network = "tcp", .n_stopped = 1}, 2);
}

TEST_CALL(each_further_one_costs_one_more, expect_group(&(struct scenario){.network = "tcp", .n_stopped = 2}, 3))

/* Ranks that have joined it receive no more heartbeats: they need not wait as long as for a running leader. */
TEST(a_leader_that_stops_while_it_waits_costs_no_more)
{
    expect_group(&(struct scenario){.network = "tcp", .leader_stops = true}, 2);
}

/* --- aborts ------------------------------------------------------------------------------------------------------- */

static void *abort_when_they_wait(void *comm)
{
    unit_await(&taken, 2);
    ep_comm_abort(comm);
    return NULL;
}

static int live_during_an_abort(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    int rank = boot->rank;
    ep_comm *comm = NULL;
    pthread_t thread = 0;

    if (unit_comm_new(boot, "tcp", 1, BEFORE_MS, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK)
        return 1;
    if (rank == scenario->aborts && scenario->amid_handshake)
        aborts_amid_handshake = comm;
    else if (rank == scenario->aborts && pthread_create(&thread, NULL, abort_when_they_wait, comm) != 0)
        return 2;
    if (rank == 0)
        atomic_store(&counts, true);
    if (rank == scenario->aborts && scenario->comes)
        pthread_join(thread, NULL);
    if (rank < 3 || scenario->comes || scenario->amid_handshake)
        shrink(scenario, comm);
    if (rank == scenario->aborts && !scenario->comes && !scenario->amid_handshake)
        pthread_join(thread, NULL);
    if (scenario->amid_handshake) {
        scenario->first[rank] = scenario->status[rank];
        if (rank == scenario->aborts)
            atomic_store(&holds, false);
        /* At once: a rank that has not learned of the abort would take it for the reason of this call. */
        if (scenario->first[rank] == EP_E_ABORTED)
            shrink(scenario, comm);
    }
    unit_count(&scenario->returned, NRANKS);
    if (!scenario->comes && !scenario->amid_handshake) /* its count may not have reached some ranks */
        shrink_again(scenario, comm);
    ep_comm_free(comm);
    return 0;
}

static void run_during_an_abort(struct scenario *scenario)
{
    atomic_store(&counts, false);
    atomic_store(&taken, 0);
    atomic_store(&holds, scenario->answers_late);
    unit_run_threads(NRANKS, live_during_an_abort, scenario);
}

/* Abort by any rank, on any host, whether it takes part in the shrink or not. It does not affect the next call. */
TEST(an_abort_wakes_all_between_hosts)
{
    for (int aborts = 0; aborts < NRANKS; aborts++) {
        struct scenario scenario = {.aborts = aborts};
        char expected[64];

        run_during_an_abort(&scenario);
        snprintf(expected, sizeof(expected), "ep_comm_shrink: rank %d called ep_comm_abort", aborts);
        for (int rank = 0; rank < 3; rank++) {
            assert_int_equal(scenario.status[rank], EP_E_ABORTED);
            assert_string_equal(scenario.text[rank], expected);
            assert_int_equal(scenario.deadlines[rank], 0);
        }
        for (int rank = 0; rank < NRANKS; rank++)
            assert_int_equal(scenario.members[rank], NRANKS);
    }
}

/*
 * The others have joined their leader, which has only accepted the connection of the rank that aborts. The leader
 * continues the handshake at once, or only after that rank has ended its call and begun the next one.
 */
TEST(an_abort_amid_a_handshake_ends_the_call_of_all)
{
    for (int late = 0; late < 2; late++) {
        struct scenario scenario = {.aborts = 2, .amid_handshake = true, .answers_late = late};

        run_during_an_abort(&scenario);
        for (int rank = 0; rank < NRANKS; rank++)
            expect_rank(&scenario, rank, EP_E_ABORTED, NRANKS, 0);
    }
}

/*
 * The rank that aborts joins the next leader before the others begin their next call, in which they wait for the
 * stopped leader again. It does not skip the next leader meanwhile.
 */
TEST(an_abort_amid_a_handshake_with_a_stopped_leader_excludes_none)
{
    struct scenario *scenario =
        run_scenario(&(struct scenario){.network = "tcp", .n_stopped = 1, .aborts = NRANKS - 1});

    for (int rank = 1; rank < NRANKS; rank++)
        expect_rank(scenario, rank, EP_E_ABORTED, NRANKS - 1, INT_MAX);
    munmap(scenario, sizeof(*scenario));
}

/*
 * It was the reason to shrink, and ranks that had begun before learn of it late, as by a delayed heartbeat: the two
 * cases cannot be distinguished.
 */
TEST(an_abort_of_a_rank_that_joins_ends_nothing_between_hosts)
{
    struct scenario scenario = {.aborts = 3, .comes = true};

    run_during_an_abort(&scenario);
    for (int rank = 0; rank < NRANKS; rank++)
        expect_rank(&scenario, rank, EP_OK, NRANKS, 0);
}
