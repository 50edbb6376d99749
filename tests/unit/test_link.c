/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events that the control links send without waiting for the next heartbeat: two nodes of two processes, whose
 * heartbeats are an hour apart, and which are in no call. And how the end of a link is classified.
 */
#include "ranks.h"

#include "base/thread.h"
#include "group/failure.h"
#include "group/group.h"
#include "group/peers.h"
#include "group/wait.h"

#include <poll.h>
#include <pthread.h>

static ep_status start_patient(pthread_t *thread, bool *started, void *(*loop)(void *), void *link, const char *what);
static int poll_late(struct pollfd *fds, nfds_t n, int timeout_ms);

#define ep_thread_begin start_patient
#define poll poll_late
#include "group/link.c"
#undef poll
#undef ep_thread_begin

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 6, PER_NODE = 2, HOUR_S = 3600, PATIENCE_S = 60 };

struct scenario {
    int nranks;
    unsigned victims;  /* die together */
    int caller;        /* finds the death in a call, while the others are in none; -1: none */
    _Atomic int heard; /* ranks that have received the first heartbeat of all others, and receive no periodic one */
};

static ep_status start_patient(pthread_t *thread, bool *started, void *(*loop)(void *), void *context, const char *what)
{
    struct ep_group_link *link = context;

    link->heartbeat_ns = (uint64_t)HOUR_S * 1000000000u;
    return ep_thread_begin(thread, started, loop, context, what);
}

static _Atomic bool is_late;

/* The thread of the links is scheduled late. */
static int poll_late(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    int ready = poll(fds, n, timeout_ms);

    if (atomic_load(&is_late))
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    return ready;
}

static bool await_deaths(const struct ep_group *group, unsigned victims)
{
    uint64_t limit_ns = ep_now_ns() + (uint64_t)PATIENCE_S * 1000000000u;
    unsigned dead = 0;

    while (dead != victims && ep_now_ns() < limit_ns) {
        for (int rank = 0; rank < group->comm->nranks; rank++)
            dead |= (unsigned)ep_group_peer_dead(group, rank) << rank;
        unit_sleep_ms(1);
    }
    return dead == victims;
}

static bool await_failure(ep_comm *comm, int caller)
{
    uint64_t limit_ns = ep_now_ns() + (uint64_t)PATIENCE_S * 1000000000u;
    ep_status status = comm->rank == caller ? ep_comm_barrier(comm) : EP_OK;

    while (status == EP_OK && ep_now_ns() < limit_ns) {
        status = ep_comm_async_error(comm);
        unit_sleep_ms(1);
    }
    /* "died", or "cannot be reached": the links of a process that is killed with unread data are reset. */
    return status == EP_E_PEER_DEAD &&
           (strstr(ep_comm_last_error(comm), "rank 3 ") || strstr(ep_comm_last_error(comm), "rank 4 "));
}

static bool has_heard(const struct ep_group *group)
{
    for (int rank = 0; rank < group->comm->nranks; rank++)
        if (!group->peers[rank].control && !atomic_load(&group->remote[rank].state.probed_ns))
            return false;
    return true;
}

static int live(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;
    struct ep_group *group;
    bool seen;

    if (unit_comm_new(boot, "tcp", PER_NODE, 0, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK)
        return 1;
    group = ep_group_of(comm);
    while (!has_heard(group))
        unit_sleep_ms(1);
    unit_count(&scenario->heard, scenario->nranks);
    if (scenario->victims >> boot->rank & 1)
        raise(SIGKILL);
    seen = scenario->caller >= 0 ? await_failure(comm, scenario->caller) : await_deaths(group, scenario->victims);
    /* The others may need it to learn what they wait for. */
    unit_count(&scenario->heard, 2 * scenario->nranks - __builtin_popcount(scenario->victims));
    ep_comm_free(comm);
    return seen ? 0 : 2;
}

static void run_scenario(struct scenario wanted)
{
    struct scenario *scenario = unit_share(&wanted, sizeof(wanted));
    ep_rank_exit exits[MOST_RANKS];

    assert_int_equal(unit_fork_ranks(scenario->nranks, live, scenario, 0, exits), EP_E_PEER_DEAD);
    for (int rank = 0; rank < scenario->nranks; rank++) {
        bool victim = scenario->victims >> rank & 1;

        assert_int_equal(exits[rank].signal, victim ? SIGKILL : 0);
        if (!victim)
            assert_int_equal(exits[rank].code, 0);
    }
    munmap(scenario, sizeof(*scenario));
}

/* Rank 0 has no connection to it: a rank of its node reports it. */
TEST_CALL(a_death_is_reported_at_once, run_scenario((struct scenario){.nranks = 4, .victims = 1u << 3, .caller = -1}))

/* The rail peer of the victim finds the death; its node has no other connection to the other node of that rank. */
TEST(a_failure_reaches_a_node_whose_rail_peer_has_died)
{
    run_scenario((struct scenario){.nranks = 4, .victims = 1u << 3, .caller = 1});
}

/* Rank 5 has connections to ranks 1 and 3, and rank 2 to ranks 0 and 4: only the node of ranks 0 and 1 is between. */
TEST(a_failure_reaches_a_node_by_another_one)
{
    run_scenario((struct scenario){.nranks = 6, .victims = 1u << 3 | 1u << 4, .caller = 5});
}

static int fail_and_exit(const ep_boot *boot, void *argument)
{
    ep_comm *comm = NULL;
    ep_status status;
    bool arrived;

    (void)argument;
    if (unit_comm_new(boot, "tcp", 1, 0, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK)
        return 1;
    if (boot->rank == 1) {
        atomic_store(&is_late, true);
        (void)ep_group_set_own_failure(ep_group_of(comm), ep_fail(EP_E_ROUTING, "its reason"), 1, EP_GROUP_IDLE);
        _exit(0);
    }
    status = ep_comm_barrier(comm);
    arrived = status == EP_E_ROUTING && strstr(ep_comm_last_error(comm), "its reason");
    if (!arrived)
        print_error("%s: %s\n", ep_status_name(status), ep_comm_last_error(comm));
    ep_comm_free(comm);
    return arrived ? 0 : 2;
}

/* As a program does that prints the error of a call and ends. */
TEST(the_reason_of_a_rank_that_exits_at_once_arrives)
{
    unit_run_ranks(EP_LAUNCH_FORK, 2, fail_and_exit, NULL);
}

static void await_hangup(int fd)
{
    struct pollfd hangup = {.fd = fd};

    assert_int_equal(poll(&hangup, 1, PATIENCE_S * 1000), 1);
    assert_true(hangup.revents & POLLHUP);
}

/* Connected sockets; `ends` are ours and the peer's. */
static void connect_pair(int ends[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(listener >= 0 && ends[0] >= 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &bytes), 0);
    assert_int_equal(connect(ends[0], (struct sockaddr *)&address, sizeof(address)), 0);
    ends[1] = accept(listener, NULL, NULL);
    assert_true(ends[1] >= 0);
    close(listener);
}

/* A rank whose process closed the link is dead; one whose link was reset may be beyond a network that is cut. */
TEST(an_end_is_classified_where_a_send_fails)
{
    static const struct linger at_once = {.l_onoff = 1};

    for (int reset = 0; reset < 2; reset++) {
        struct ep_group_remote remote[2] = {0};
        struct ep_group_peer peers[2] = {0};
        ep_comm comm = {.nranks = 2};
        struct ep_group group = {.comm = &comm, .peers = peers, .remote = remote};
        struct ep_group_link link = {.group = &group};
        struct link_message out = {0}, in;
        struct conn conn = {.rank = 1, .link = &link, .out = &out, .rest = {&out, sizeof(out)}, .in = &in};
        int ends[2];

        connect_pair(ends);
        conn.fd = ends[0];
        if (reset)
            assert_int_equal(setsockopt(ends[1], SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
        close(ends[1]);
        if (!reset) /* its host answers the first data after the end with a reset */
            assert_int_equal(send(conn.fd, &out, 1, MSG_NOSIGNAL), 1);
        await_hangup(conn.fd);
        send_all(&conn, 0);
        assert_int_equal(conn.fd, -1);
        assert_int_equal(remote[1].lost, 1);
        assert_int_equal(remote[1].cut, reset);
    }
}

/* --- a rank of another node whose rail peer here has stopped --- */

enum { DEADLINE_MS = 400, ONE_NODE = 2, ITS_RAIL = 2, WAITED_FOR = 3, MADE_RANKS = 4 };

struct made_group {
    struct ep_group_remote remote[MADE_RANKS];
    struct ep_group_peer peers[MADE_RANKS];
    ep_comm comm;
    struct ep_group group;
};

/* Rank 0 of two nodes of two ranks. Of the other node it knows only what rank 2 sent: nothing for `silent_ms`. */
static struct made_group *make_group(int silent_ms)
{
    struct made_group *made = calloc(1, sizeof(*made));
    struct ep_group_control *controls = calloc(ONE_NODE, sizeof(*controls));

    assert_true(made && controls);
    for (int rank = 0; rank < MADE_RANKS; rank++) {
        made->peers[rank].process.pidfd = -1;
        made->peers[rank].same_process = rank < ONE_NODE;
        made->peers[rank].control = rank < ONE_NODE ? &controls[rank] : NULL;
    }
    made->comm = (ep_comm){.nranks = MADE_RANKS, .nnodes = 2, .ranks_per_node = ONE_NODE};
    made->comm.members[0] = (1u << MADE_RANKS) - 1;
    made->comm.config.timeout_ms = DEADLINE_MS;
    made->group = (struct ep_group){.comm = &made->comm,
                                    .peers = made->peers,
                                    .remote = made->remote,
                                    .control = &controls[0],
                                    .nlocal = ONE_NODE,
                                    .link_event = -1};
    atomic_store(&made->remote[ITS_RAIL].heard_ns, ep_now_ns() - (uint64_t)silent_ms * 1000000u);
    return made;
}

static void free_group(struct made_group *made)
{
    free(made->group.control);
    free(made);
}

/* Waits until the wait for rank 3 fails. Returns for how long. */
static int wait_for_3(struct made_group *made, bool tolerant)
{
    uint64_t begin_ns = ep_now_ns();
    ep_status status = EP_OK;
    struct ep_group_wait wait;

    ep_group_wait_begin(&wait, &made->group, EP_GROUP_LL_RECV);
    wait.tolerant = tolerant;
    while (status == EP_OK) {
        status = ep_group_wait_check(&wait, WAITED_FOR);
        unit_sleep_ms(1);
    }
    assert_int_equal(status, EP_E_TIMEOUT);
    return (int)((ep_now_ns() - begin_ns) / 1000000u);
}

TEST(a_stopped_rail_peer_is_named_instead_of_a_rank_that_may_wait_for_it)
{
    struct made_group *made = make_group(DEADLINE_MS);

    (void)wait_for_3(made, false);
    assert_non_null(strstr(ep_last_error(), "rank 2 did not answer"));
    free_group(made);
    made = make_group(-3600000); /* it runs: its heartbeats would tell what rank 3 waits for */
    (void)wait_for_3(made, false);
    assert_non_null(strstr(ep_last_error(), "rank 3 did not answer"));
    free_group(made);
}

/* What rank 0 says of a rank whose connection to `reporter` has ended. */
static void expect_lost(int rank, int reporter, bool lost, bool cut, const char *text)
{
    struct made_group *made = make_group(0);
    uint64_t word = (uint64_t)EP_E_PEER_DEAD << 48 | (uint64_t)rank << 32 | (uint64_t)EP_GROUP_LL_RECV << 16;

    atomic_store(&made->remote[rank].lost, lost);
    atomic_store(&made->remote[rank].cut, cut);
    ep_group_receive_failure(&made->group, word | (uint64_t)reporter, reporter);
    assert_int_equal(ep_group_check(&made->group), EP_E_PEER_DEAD);
    if (!strstr(ep_last_error(), text))
        fail_msg("%s", ep_last_error());
    free_group(made);
}

TEST(only_a_rank_that_is_known_to_be_dead_died)
{
    expect_lost(3, 0, true, false, "rank 3 died while others were");
    expect_lost(3, 0, true, true, "rank 3 cannot be reached by others");
    expect_lost(3, 2, false, false, "rank 3 died while others were");      /* seen on its host */
    expect_lost(1, 2, false, false, "rank 1 cannot be reached by others"); /* lives here */
    expect_lost(0, 2, false, false, "rank 0 cannot be reached by others"); /* this rank */
}

/* All ranks are stopped for three deadlines, and continue. */
struct stop {
    _Atomic pid_t pids[MADE_RANKS];
    _Atomic bool over;
};

static int call_until_it_is_over(const ep_boot *boot, void *argument)
{
    struct stop *stop = argument;
    ep_status status = EP_OK;
    ep_comm *comm = NULL;
    bool late;

    if (unit_comm_new(boot, "tcp", PER_NODE, 0, &comm) != EP_OK || ep_comm_barrier(comm) != EP_OK) {
        atomic_store(&stop->over, true);
        return 1;
    }
    comm->config.timeout_ms = DEADLINE_MS;
    atomic_store(&stop->pids[boot->rank], getpid());
    while (status == EP_OK && !atomic_load(&stop->over))
        status = ep_comm_barrier(comm);
    /* Another rank may be late, or have left when it was over; none has died. */
    late = status == EP_OK || (!strstr(ep_comm_last_error(comm), " died") &&
                               (status == EP_E_PEER_LEFT || strstr(ep_comm_last_error(comm), "did not answer")));
    if (!late)
        print_error("%s: %s\n", ep_status_name(status), ep_comm_last_error(comm));
    ep_comm_free(comm);
    return late ? 0 : 2;
}

static void stop_all(struct stop *stop)
{
    for (int rank = 0; rank < MADE_RANKS; rank++)
        while (!atomic_load(&stop->pids[rank]) && !atomic_load(&stop->over))
            unit_sleep_ms(1);
    if (atomic_load(&stop->over))
        _exit(1);
    for (int rank = 0; rank < MADE_RANKS; rank++)
        kill(atomic_load(&stop->pids[rank]), SIGSTOP);
    nanosleep(&(struct timespec){.tv_sec = 3 * DEADLINE_MS / 1000, .tv_nsec = 3 * DEADLINE_MS % 1000 * 1000000L}, NULL);
    for (int rank = 0; rank < MADE_RANKS; rank++)
        kill(atomic_load(&stop->pids[rank]), SIGCONT);
    atomic_store(&stop->over, true);
    _exit(0);
}

TEST(ranks_that_were_stopped_together_are_late_at_most)
{
    struct stop *stop = unit_share(&(struct stop){.over = false}, sizeof(*stop));

    for (int round = 0; round < 3; round++) {
        pid_t stopper;

        *stop = (struct stop){.over = false};
        stopper = fork();
        assert_true(stopper >= 0);
        if (stopper == 0)
            stop_all(stop);
        unit_run_ranks(EP_LAUNCH_FORK, MADE_RANKS, call_until_it_is_over, stop);
        assert_int_equal(waitpid(stopper, NULL, 0), stopper);
    }
    munmap(stop, sizeof(*stop));
}

/* It may wait for the other one for two deadlines after that has stopped, and then needs time to arrive. */
TEST(a_rank_that_may_wait_for_a_stopped_rail_peer_is_masked_later)
{
    struct made_group *made = make_group(DEADLINE_MS);

    assert_true(wait_for_3(made, true) >= DEADLINE_MS * 5 / 4);
    free_group(made);
    made = make_group(DEADLINE_MS / 2);
    assert_true(wait_for_3(made, true) >= DEADLINE_MS * 7 / 4 - 1);
    free_group(made);
}
