/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which ranks may form a group: survivors that are late, stopped, killed or aborted while they agree. In all cases they
 * get one group of more than half of the live ranks, or the same failure.
 *
 * Ranks are processes. None exits before all have a result: the others would take it for dead. No test depends on
 * timing: deadlines of the communicators are short, and load only changes which of the allowed results occurs.
 */
#include "unit.h"

#include "backend/host/host.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pthread.h>

#define RANKS_MOST 7
#define CALLS_MOST 2
#define HANG_MS 120000
#if defined(__SANITIZE_THREAD__)
#define STORMS 25 /* the order of events is the same there, at many times the cost */
#else
#define STORMS 100
#endif

/* Input of a rank from the parent, and its results. */
struct rank_state {
    int delay_ms[CALLS_MOST]; /* before each call; -1: not called */
    int abort_ms;             /* after which another thread calls ep_comm_abort(); 0: never */
    _Atomic int ready, returned;
    ep_status status[CALLS_MOST];
    char text[CALLS_MOST][256];
    int nranks, new_rank;
    /* Used by the parent. */
    pid_t pid;
    bool killed, stopped;
};

struct run {
    int nranks, timeout_ms;
    _Atomic int go, over;
    struct rank_state rank[RANKS_MOST];
};

static void wait_for(_Atomic int *word, int least)
{
    while (atomic_load(word) < least)
        unit_sleep_ms(1);
}

struct aborter {
    ep_comm *comm;
    int after_ms;
};

static void *abort_later(void *argument)
{
    const struct aborter *aborter = argument;

    unit_sleep_ms(aborter->after_ms);
    ep_comm_abort(aborter->comm);
    return NULL;
}

static void live(ep_boot_shm *place, struct run *run, int rank)
{
    struct rank_state *mine = &run->rank[rank];
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm_info info = {.size = sizeof(info)};
    ep_comm *comm, *next = NULL;
    struct aborter aborter;
    pthread_t thread;
    ep_boot boot;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    config.backend = "host";
    config.timeout_ms = HANG_MS;
    if (ep_boot_shm_join(place, rank, &boot) != EP_OK || ep_comm_new(&boot, &config, &comm) != EP_OK)
        _exit(1);
    /* Short for the shrink only: under load a group could not be created within it. */
    comm->config.timeout_ms = run->timeout_ms;
    atomic_store(&mine->ready, 1);
    wait_for(&run->go, 1);
    if (mine->abort_ms) {
        aborter = (struct aborter){comm, mine->abort_ms};
        if (pthread_create(&thread, NULL, abort_later, &aborter) != 0)
            _exit(1);
    }
    for (int call = 0; call < CALLS_MOST; call++) {
        if (mine->delay_ms[call] < 0)
            continue;
        wait_for(&run->go, call + 1);
        unit_sleep_ms(mine->delay_ms[call]);
        mine->status[call] = ep_comm_shrink(comm, NULL, &next);
        snprintf(mine->text[call], sizeof(mine->text[call]), "%s", ep_comm_last_error(comm));
        if (mine->status[call] == EP_OK && ep_comm_get_info(next, &info) == EP_OK) {
            mine->nranks = info.nranks;
            mine->new_rank = info.rank;
        }
        atomic_store(&mine->returned, call + 1);
        if (mine->status[call] == EP_OK)
            break;
    }
    atomic_store(&mine->returned, CALLS_MOST);
    wait_for(&run->over, 1);
    _exit(0);
}

/* --- the parent ------------------------------------------------------------------------------------------------- */

static struct run *new_run(int nranks, int timeout_ms)
{
    struct run *run = mmap(NULL, sizeof(*run), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(run != MAP_FAILED);
    run->nranks = nranks;
    run->timeout_ms = timeout_ms;
    for (int rank = 0; rank < nranks; rank++)
        run->rank[rank].delay_ms[1] = -1;
    return run;
}

/* All ranks have their communicator, and wait for go. */
static void start(struct run *run)
{
    ep_boot_shm *place;

    assert_int_equal(ep_boot_shm_new(run->nranks, &place), EP_OK);
    for (int rank = 0; rank < run->nranks; rank++) {
        pid_t child = fork();

        assert_true(child >= 0);
        if (child == 0)
            live(place, run, rank);
        run->rank[rank].pid = child; /* by the parent only: the ranks share it */
    }
    for (int rank = 0; rank < run->nranks; rank++) {
        while (!atomic_load(&run->rank[rank].ready) && waitpid(run->rank[rank].pid, NULL, WNOHANG) == 0)
            unit_sleep_ms(1);
        assert_true(atomic_load(&run->rank[rank].ready));
    }
    ep_boot_shm_free(place);
}

static void send_signal(struct run *run, int rank, int number)
{
    if (run->rank[rank].killed)
        return;
    kill(run->rank[rank].pid, number);
    if (number == SIGKILL) {
        waitpid(run->rank[rank].pid, NULL, 0);
        run->rank[rank].killed = true;
    }
    run->rank[rank].stopped = number == SIGSTOP;
}

static bool counts(const struct run *run, int rank)
{
    return !run->rank[rank].killed && !run->rank[rank].stopped;
}

static bool all_returned(struct run *run, int call)
{
    for (int rank = 0; rank < run->nranks; rank++)
        if (counts(run, rank) && atomic_load(&run->rank[rank].returned) < call)
            return false;
    return true;
}

static void wait_all(struct run *run, int call)
{
    for (int ms = 0; !all_returned(run, call); ms++) {
        if (ms > HANG_MS)
            fail_msg("a call of ep_comm_shrink does not return");
        unit_sleep_ms(1);
    }
}

static void finish(struct run *run)
{
    atomic_store(&run->over, 1);
    for (int rank = 0; rank < run->nranks; rank++)
        if (!run->rank[rank].killed) {
            if (run->rank[rank].stopped)
                kill(run->rank[rank].pid, SIGKILL);
            waitpid(run->rank[rank].pid, NULL, 0);
        }
    munmap(run, sizeof(*run));
}

static const char *describe(const struct run *run, int call)
{
    static char text[2048];
    size_t used = 0;

    text[0] = '\0';
    for (int rank = 0; rank < run->nranks && used < sizeof(text); rank++) {
        const struct rank_state *r = &run->rank[rank];

        used += (size_t)snprintf(text + used, sizeof(text) - used, "\n  rank %d%s%s: %s, %d of %d: %s", rank,
                                 r->killed ? " (killed)" : "", r->stopped ? " (stopped)" : "",
                                 ep_status_name(r->status[call]), r->new_rank, r->nranks, r->text[call]);
    }
    return text;
}

/*
 * One group of more than half of the live ranks, or one failure for all. A rank that was killed or is stopped may be a
 * member. Returns the members of the group, 0 if there is none.
 */
static int check_outcome(struct run *run, int call, const char *name)
{
    int nranks = 0, formed = 0, unknown = 0, n_killed = 0, last = -1;
    ep_status failure = EP_OK;

    for (int rank = 0; rank < run->nranks; rank++) {
        const struct rank_state *r = &run->rank[rank];

        n_killed += r->killed;
        unknown += !counts(run, rank);
        if (!counts(run, rank) || r->status[call] != EP_OK)
            continue;
        if (nranks && r->nranks != nranks)
            fail_msg("%s: groups of %d and %d:%s", name, nranks, r->nranks, describe(run, call));
        if (r->new_rank <= last)
            fail_msg("%s: two groups:%s", name, describe(run, call));
        last = r->new_rank;
        nranks = r->nranks;
        formed++;
    }
    if (nranks && (nranks < formed || nranks > formed + unknown || last >= nranks))
        fail_msg("%s: %d are in a group of %d:%s", name, formed, nranks, describe(run, call));
    if (nranks && 2 * nranks <= run->nranks - n_killed)
        fail_msg("%s: a group of %d where %d live:%s", name, nranks, run->nranks - n_killed, describe(run, call));
    for (int rank = 0; rank < run->nranks; rank++) {
        ep_status status = run->rank[rank].status[call];

        if (!counts(run, rank) || status == EP_OK)
            continue;
        if (nranks && status != EP_E_EXCLUDED)
            fail_msg("%s: neither in the group nor excluded:%s", name, describe(run, call));
        if (!nranks && failure != EP_OK && status != failure)
            fail_msg("%s: two failures:%s", name, describe(run, call));
        failure = status;
    }
    return nranks;
}

/* --- one at a time ---------------------------------------------------------------------------------------------- */

/* Like a loaded machine: rank 0 has waited for a whole deadline before the other survivors arrive. */
TEST(late_survivors_are_waited_for)
{
    struct run *run = new_run(4, 400);
    int members;

    run->rank[1].delay_ms[0] = run->rank[2].delay_ms[0] = 600;
    start(run);
    send_signal(run, 3, SIGKILL);
    atomic_store(&run->go, 1);
    wait_all(run, 1);
    members = check_outcome(run, 0, "late survivors");
    /* Two or none only if the machine was slower than another deadline. */
    assert_true(members == 3 || members == 2 || members == 0);
    finish(run);
}

/* Three of five live ranks may continue without two stopped ones, one of them stopped during the shrink. */
TEST(a_majority_continues_without_the_stopped)
{
    struct run *run = new_run(5, 2000);

    start(run);
    send_signal(run, 4, SIGSTOP);
    atomic_store(&run->go, 1);
    unit_sleep_ms(300);
    send_signal(run, 3, SIGSTOP);
    wait_all(run, 1);
    assert_int_equal(check_outcome(run, 0, "majority"), 3);
    send_signal(run, 3, SIGCONT);
    send_signal(run, 4, SIGCONT);
    wait_all(run, 1);
    assert_int_equal(check_outcome(run, 0, "majority"), 3);
    assert_int_equal(run->rank[3].status[0], EP_E_EXCLUDED);
    assert_int_equal(run->rank[4].status[0], EP_E_EXCLUDED);
    finish(run);
}

/* Two of four are not enough: they fail alike, and so do the others when they are resumed; a second call succeeds. */
TEST(half_is_not_enough)
{
    struct run *run = new_run(4, 1000);

    for (int rank = 0; rank < 4; rank++)
        run->rank[rank].delay_ms[1] = 0;
    start(run);
    send_signal(run, 2, SIGSTOP);
    send_signal(run, 3, SIGSTOP);
    atomic_store(&run->go, 1);
    wait_all(run, 1);
    assert_int_equal(run->rank[0].status[0], EP_E_TIMEOUT);
    assert_int_equal(run->rank[1].status[0], EP_E_TIMEOUT);
    assert_non_null(strstr(run->rank[0].text[0], "did not answer within 1000 ms"));
    send_signal(run, 2, SIGCONT);
    send_signal(run, 3, SIGCONT);
    wait_all(run, 1);
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(run->rank[rank].status[0], EP_E_TIMEOUT);
        assert_string_equal(run->rank[rank].text[0], run->rank[0].text[0]);
    }
    atomic_store(&run->go, 2);
    wait_all(run, 2);
    if (run->rank[0].status[1] == EP_OK)
        assert_true(check_outcome(run, 1, "second call") >= 3);
    finish(run);
}

/* The rank that aborts is in no call; the others would wait for it for hours. */
TEST(an_abort_wakes_a_shrink)
{
    struct run *run = new_run(3, 3600000);

    run->rank[2].delay_ms[0] = -1;
    run->rank[2].abort_ms = 50;
    start(run);
    atomic_store(&run->go, 1);
    wait_all(run, 1);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(run->rank[rank].status[0], EP_E_ABORTED);
        assert_string_equal(run->rank[rank].text[0], "ep_comm_shrink: rank 2 called ep_comm_abort");
    }
    finish(run);
}

/* An abort from before a rank began does not concern it. */
TEST(a_shrink_after_an_abort_works)
{
    struct run *run = new_run(3, 20000);

    run->rank[1].abort_ms = 1;
    for (int rank = 0; rank < 3; rank++)
        run->rank[rank].delay_ms[0] = 400;
    for (int rank = 0; rank < 3; rank++)
        run->rank[rank].delay_ms[1] = 0;
    start(run);
    atomic_store(&run->go, 1);
    wait_all(run, 1);
    /* Under load the abort may happen during the call. */
    if (run->rank[0].status[0] == EP_E_ABORTED) {
        assert_int_equal(check_outcome(run, 0, "aborted"), 0);
        atomic_store(&run->go, 2);
        wait_all(run, 2);
        assert_int_equal(check_outcome(run, 1, "after the abort"), 3);
    } else {
        assert_int_equal(check_outcome(run, 0, "after the abort"), 3);
    }
    finish(run);
}

/* --- storms ----------------------------------------------------------------------------------------------------- */

static uint64_t random_state;

static int draw(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

/* Delays, stops that end and stops that do not, kills, aborts, at any time within two deadlines. */
static void one_storm(int number)
{
    char name[64];
    int nranks = 3 + draw(RANKS_MOST - 2), timeout_ms = 40 + draw(80), steps = 4 + draw(12);
    struct run *run = new_run(nranks, timeout_ms);
    bool jitter = draw(2), kills = draw(2), stops = draw(3) == 0;

    snprintf(name, sizeof(name), "storm %d (%d ranks, deadline %d ms)", number, nranks, timeout_ms);
    for (int rank = 0; rank < nranks; rank++)
        run->rank[rank].delay_ms[0] = draw(2) ? 0 : draw(3 * timeout_ms);
    if (draw(5) == 0)
        run->rank[draw(nranks)].abort_ms = 1 + draw(2 * timeout_ms);
    start(run);
    atomic_store(&run->go, 1);
    for (int step = 0; step < steps; step++) {
        int rank = draw(nranks);

        unit_sleep_ms(draw(2 * timeout_ms) / steps);
        if (jitter && !run->rank[rank].stopped) {
            send_signal(run, rank, SIGSTOP);
            unit_sleep_ms(draw(draw(4) ? 5 : 2 * timeout_ms));
            send_signal(run, rank, SIGCONT);
        } else if (kills && draw(4) == 0) {
            send_signal(run, rank, SIGKILL);
        } else if (stops && draw(4) == 0) {
            send_signal(run, rank, SIGSTOP);
        }
    }
    wait_all(run, 1);
    for (int rank = 0; rank < nranks; rank++)
        if (run->rank[rank].stopped && draw(2))
            send_signal(run, rank, SIGCONT);
    wait_all(run, 1);
    check_outcome(run, 0, name);
    finish(run);
}

TEST(storms)
{
    const char *is_long = getenv("EPKIT_TEST_LONG"), *seed = getenv("EPKIT_TEST_SEED");
    int n = is_long && *is_long == '1' ? 3000 : STORMS;

    for (int i = 0; i < n; i++) {
        random_state = (seed ? strtoull(seed, NULL, 0) : 1) * 1000003u + (uint64_t)i;
        draw(2);
        one_storm(i);
    }
}
