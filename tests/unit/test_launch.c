/* SPDX-License-Identifier: Apache-2.0 */
/*
 * boot/launch.c. Linked with --wrap for fork, getppid and pthread_create, so that they can fail on demand.
 */
#include "base/clock.h"
#include "common/ranks/local_ranks.h"
#include "temp.h"
#include "unit.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_RANKS 16
#define PATIENT_MS 60000 /* to end tests that hang */

/* Written by the ranks for the test; shared with children. */
static struct shared_state {
    _Atomic int pids[MOST_RANKS];
    _Atomic int runs;   /* ranks whose program has started */
    _Atomic int alarms; /* signals that the launcher has handled */
} * shared_state;

static int forks_left = -1, threads_left = -1; /* -1: no limit */
static pid_t fake_parent;

pid_t __real_fork(void);
pid_t __wrap_fork(void);
pid_t __real_getppid(void);
pid_t __wrap_getppid(void);
int __real_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

pid_t __wrap_fork(void)
{
    if (forks_left == 0) {
        errno = EAGAIN;
        return -1;
    }
    if (forks_left > 0)
        forks_left--;
    return __real_fork();
}

pid_t __wrap_getppid(void)
{
    return fake_parent ? fake_parent : __real_getppid();
}

int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
    if (threads_left == 0)
        return EAGAIN;
    if (threads_left > 0)
        threads_left--;
    return __real_pthread_create(id, attributes, run, argument);
}

static int reset(void **state)
{
    (void)state;
    forks_left = threads_left = -1;
    fake_parent = 0;
    memset((void *)shared_state, 0, sizeof(*shared_state));
    return 0;
}

static void sleep_for_ever(void)
{
    for (;;)
        pause();
}

static void announce(const ep_boot *boot)
{
    shared_state->pids[boot->rank] = (int)getpid();
    shared_state->runs++;
}

static ep_status launch(int mode, int nranks, ep_rank_fn run, void *argument, int timeout_ms, ep_rank_exit *exits)
{
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;

    args.mode = mode;
    args.nranks = nranks;
    args.run = run;
    args.argument = argument;
    args.timeout_ms = timeout_ms;
    return ep_launch(&args, exits);
}

static void expect_no_children(void)
{
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

/* --- successful runs --- */

static int gather_and_sum(const ep_boot *boot, void *argument)
{
    int32_t mine = boot->rank + *(const int *)argument, all[MOST_RANKS], sum = 0;

    announce(boot);
    if (boot->allgather(boot->context, &mine, sizeof(mine), PATIENT_MS, all) != EP_OK)
        return 99;
    for (int rank = 0; rank < boot->nranks; rank++)
        sum += all[rank];
    return sum + boot->rank;
}

TEST_WITH(ranks_gather_and_return_codes, reset, NULL)
{
    for (int mode = EP_LAUNCH_FORK; mode <= EP_LAUNCH_THREADS; mode++) {
        ep_rank_exit exits[4];
        int ten = 10;

        shared_state->runs = 0;
        assert_int_equal(launch(mode, 4, gather_and_sum, &ten, 0, exits), EP_OK);
        assert_int_equal(shared_state->runs, 4);
        for (int rank = 0; rank < 4; rank++) {
            assert_int_equal(exits[rank].code, 46 + rank);
            assert_int_equal(exits[rank].signal, 0);
            assert_int_equal(exits[rank].late, 0);
        }
    }
    expect_no_children();
}

static int return_odd_codes(const ep_boot *boot, void *argument)
{
    static const int codes[] = {0, 255, 256, -1};

    (void)argument;
    return codes[boot->rank];
}

/* A result that does not fit an exit code must not look like success. */
TEST_WITH(codes_out_of_range_count_as_255, reset, NULL)
{
    ep_rank_exit exits[4];

    assert_int_equal(launch(EP_LAUNCH_FORK, 4, return_odd_codes, NULL, PATIENT_MS, exits), EP_OK);
    assert_int_equal(exits[0].code, 0);
    assert_int_equal(exits[1].code, 255);
    assert_int_equal(exits[2].code, 255);
    assert_int_equal(exits[3].code, 255);
    assert_int_equal(launch(EP_LAUNCH_THREADS, 4, return_odd_codes, NULL, 0, exits), EP_OK);
    assert_int_equal(exits[2].code, 256);
    assert_int_equal(exits[3].code, -1);
}

static int write_line(const ep_boot *boot, void *argument)
{
    fprintf(argument, "rank %d\n", boot->rank);
    return 0;
}

/* Data buffered before the fork is written once, and data in the buffers of a rank is written, too. */
TEST_WITH(stdio_is_flushed_on_both_sides, reset, NULL)
{
    char path[PATH_MAX], line[64];
    int fd, heads = 0, lines = 0;
    ep_rank_exit exits[3];
    FILE *file;

    temp_template("launch", path);
    fd = mkstemp(path);
    assert_true(fd >= 0);
    file = fdopen(fd, "a+");
    assert_non_null(file);
    fputs("head\n", file);
    assert_int_equal(launch(EP_LAUNCH_FORK, 3, write_line, file, PATIENT_MS, exits), EP_OK);
    rewind(file);
    while (fgets(line, sizeof(line), file)) {
        heads += strcmp(line, "head\n") == 0;
        lines += strncmp(line, "rank ", 5) == 0;
    }
    fclose(file);
    unlink(path);
    assert_int_equal(heads, 1);
    assert_int_equal(lines, 3);
}

/* --- failed runs --- */

static int middle_kills_itself(const ep_boot *boot, void *argument)
{
    (void)argument;
    if (boot->rank == 1)
        raise(SIGKILL);
    return 7;
}

TEST_WITH(a_killed_rank_is_named, reset, NULL)
{
    for (int timeout_ms = 0; timeout_ms <= PATIENT_MS; timeout_ms += PATIENT_MS) {
        ep_rank_exit exits[3];

        assert_int_equal(launch(EP_LAUNCH_FORK, 3, middle_kills_itself, NULL, timeout_ms, exits), EP_E_PEER_DEAD);
        assert_non_null(strstr(ep_last_error(), "rank 1 was killed by signal 9"));
        assert_int_equal(exits[0].code, 7);
        assert_int_equal(exits[1].code, -1);
        assert_int_equal(exits[1].signal, SIGKILL);
        assert_int_equal(exits[1].late, 0);
        assert_int_equal(exits[2].code, 7);
    }
}

/* Ranks 0 and 3 return, 1 sleeps, 2 is stopped, 4 has killed itself. */
static int some_never_end(const ep_boot *boot, void *argument)
{
    announce(boot);
    if (boot->rank == 1)
        sleep_for_ever();
    if (boot->rank == 2)
        raise(SIGSTOP);
    if (boot->rank == 4 && argument)
        raise(SIGKILL);
    return 20 + boot->rank;
}

/*
 * With a deadline that is long enough for the ranks that end; how long depends on the machine. Returns the deadline;
 * *ret_status is that of ep_launch().
 */
static int launch_some_that_never_end(void *argument, ep_rank_exit *exits, ep_status *ret_status)
{
    for (int timeout_ms = 300; timeout_ms < PATIENT_MS; timeout_ms *= 2) {
        *ret_status = launch(EP_LAUNCH_FORK, 5, some_never_end, argument, timeout_ms, exits);
        if (!exits[0].late && !exits[3].late && !exits[4].late)
            return timeout_ms;
    }
    fail_msg("ranks that return are late");
    return 0;
}

TEST_WITH(late_ranks_are_killed, reset, NULL)
{
    uint64_t start = ep_now_ns();
    ep_rank_exit exits[5];
    char expected[128];
    ep_status status;
    int timeout_ms;

    timeout_ms = launch_some_that_never_end(NULL, exits, &status);
    assert_int_equal(status, EP_E_TIMEOUT);
    snprintf(expected, sizeof(expected), "ep_launch: 2 of 5 ranks still ran after %d ms and were killed, rank 1 first",
             timeout_ms);
    assert_string_equal(ep_last_error(), expected);
    assert_true(ep_now_ns() - start >= (uint64_t)timeout_ms * 1000000u);
    assert_int_equal(exits[0].code, 20);
    for (int rank = 1; rank <= 2; rank++) {
        assert_int_equal(exits[rank].code, -1);
        assert_int_equal(exits[rank].signal, SIGKILL);
        assert_int_equal(exits[rank].late, 1);
    }
    assert_int_equal(exits[3].code, 23);
    assert_int_equal(exits[4].code, 24);
    expect_no_children();
}

/* A rank that died by itself is not late, although it is checked after the deadline; it is named first. */
TEST_WITH(a_death_comes_before_lateness, reset, NULL)
{
    ep_rank_exit exits[5];
    ep_status status;

    launch_some_that_never_end(shared_state, exits, &status);
    assert_int_equal(status, EP_E_PEER_DEAD);
    assert_non_null(strstr(ep_last_error(), "rank 4 was killed by signal 9"));
    assert_int_equal(exits[1].late, 1);
    assert_int_equal(exits[4].late, 0);
}

static int one_thread_leaves(const ep_boot *boot, void *argument)
{
    (void)argument;
    if (boot->rank == 1)
        pthread_exit(NULL);
    return 5;
}

TEST_WITH(a_thread_that_does_not_return_is_named, reset, NULL)
{
    ep_rank_exit exits[2];

    assert_int_equal(launch(EP_LAUNCH_THREADS, 2, one_thread_leaves, NULL, 0, exits), EP_E_PEER_DEAD);
    assert_string_equal(ep_last_error(), "ep_launch: rank 1 did not return");
    assert_int_equal(exits[0].code, 5);
    assert_int_equal(exits[1].code, -1);
}

/* --- the start fails for some ranks --- */

static int announce_and_sleep(const ep_boot *boot, void *argument)
{
    (void)argument;
    announce(boot);
    sleep_for_ever();
    return 0;
}

TEST_WITH(a_failing_fork_leaves_no_rank, reset, NULL)
{
    ep_rank_exit exits[8];

    memset(exits, 0x5a, sizeof(exits));
    forks_left = 5;
    assert_int_equal(launch(EP_LAUNCH_FORK, 8, announce_and_sleep, NULL, 0, exits), EP_E_SYSTEM);
    assert_non_null(strstr(ep_last_error(), "fork of rank 5"));
    assert_non_null(strstr(ep_last_error(), "errno 11"));
    expect_no_children();
    assert_int_equal(exits[0].code, 0x5a5a5a5a);
}

static int count_run(const ep_boot *boot, void *argument)
{
    (void)argument;
    announce(boot);
    return 0;
}

TEST_WITH(a_failing_thread_starts_no_rank, reset, NULL)
{
    ep_rank_exit exits[8];

    threads_left = 5;
    assert_int_equal(launch(EP_LAUNCH_THREADS, 8, count_run, NULL, 0, exits), EP_E_SYSTEM);
    assert_non_null(strstr(ep_last_error(), "pthread_create of rank 5"));
    assert_int_equal(shared_state->runs, 0);
}

/* The launcher died before the child called PR_SET_PDEATHSIG: the child has another parent. */
TEST_WITH(an_orphan_does_not_run, reset, NULL)
{
    ep_rank_exit exits[2];

    fake_parent = 1;
    assert_int_equal(launch(EP_LAUNCH_FORK, 2, count_run, NULL, PATIENT_MS, exits), EP_OK);
    assert_int_equal(shared_state->runs, 0);
    assert_int_equal(exits[0].code, 255);
    assert_int_equal(exits[1].code, 255);
}

/* --- other children and threads of the process --- */

static int sleep_and_return(const ep_boot *boot, void *argument)
{
    (void)argument;
    usleep(100000);
    return boot->rank;
}

TEST_WITH(other_children_are_left_alone, reset, NULL)
{
    ep_rank_exit exits[3];
    pid_t early, child;
    int how;

    child = __real_fork();
    if (child == 0)
        _exit(33);
    for (int timeout_ms = 0; timeout_ms <= PATIENT_MS; timeout_ms += PATIENT_MS)
        assert_int_equal(launch(EP_LAUNCH_FORK, 3, sleep_and_return, NULL, timeout_ms, exits), EP_OK);
    early = waitpid(child, &how, 0);
    assert_int_equal(early, child);
    assert_int_equal(WEXITSTATUS(how), 33);
}

static void count_alarm(int number)
{
    (void)number;
    shared_state->alarms++;
}

static int wait_for_alarms(const ep_boot *boot, void *argument)
{
    uint64_t deadline_ns = ep_deadline_ns(PATIENT_MS / 2);

    (void)argument;
    while (shared_state->alarms <= 5 && ep_now_ns() < deadline_ns)
        usleep(1000);
    return boot->rank;
}

/* Signals of the caller interrupt the waits; its handlers are not changed. */
TEST_WITH(signals_do_not_affect_launches, reset, NULL)
{
    struct sigaction action = {.sa_handler = count_alarm}, before, after;
    struct itimerval often = {.it_interval = {.tv_usec = 2000}, .it_value = {.tv_usec = 2000}}, off = {0};
    ep_rank_exit exits[3];

    assert_int_equal(sigaction(SIGALRM, &action, NULL), 0);
    for (int timeout_ms = 0; timeout_ms <= PATIENT_MS; timeout_ms += PATIENT_MS) {
        shared_state->alarms = 0;
        setitimer(ITIMER_REAL, &often, NULL);
        assert_int_equal(launch(EP_LAUNCH_FORK, 3, wait_for_alarms, NULL, timeout_ms, exits), EP_OK);
        setitimer(ITIMER_REAL, &off, NULL);
        assert_true(shared_state->alarms > 5);
        assert_int_equal(exits[2].code, 2);
    }
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = SIG_DFL}, &before);
    assert_true(before.sa_handler == count_alarm);
    sigaction(SIGCHLD, NULL, &after);
    assert_true(after.sa_handler == SIG_DFL);
}

TEST_WITH(ignored_sigchld_is_refused, reset, NULL)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    struct sigaction no_wait = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
    struct sigaction normal = {.sa_handler = SIG_DFL};
    ep_rank_exit exits[2];

    sigaction(SIGCHLD, &ignore, NULL);
    assert_int_equal(launch(EP_LAUNCH_FORK, 2, count_run, NULL, PATIENT_MS, exits), EP_E_STATE);
    sigaction(SIGCHLD, &no_wait, NULL);
    assert_int_equal(launch(EP_LAUNCH_FORK, 2, count_run, NULL, PATIENT_MS, exits), EP_E_STATE);
    sigaction(SIGCHLD, &normal, NULL);
    assert_int_equal(shared_state->runs, 0);
    assert_int_equal(launch(EP_LAUNCH_FORK, 2, count_run, NULL, PATIENT_MS, exits), EP_OK);
}

/* No descriptor left for a pidfd: slower polls, same result. */
TEST_WITH(waits_without_descriptors, reset, NULL)
{
    struct rlimit before, none;
    ep_rank_exit exits[3];
    ep_status status;
    int next = dup(0);

    assert_true(next >= 0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = (rlim_t)next;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    assert_int_equal(dup(0), -1);
    status = launch(EP_LAUNCH_FORK, 3, sleep_and_return, NULL, PATIENT_MS, exits);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(status, EP_OK);
    assert_int_equal(exits[2].code, 2);
}

/* --- the launcher itself is killed --- */

static void wait_for_runs(int runs)
{
    uint64_t deadline_ns = ep_deadline_ns(PATIENT_MS);

    while (shared_state->runs < runs && ep_now_ns() < deadline_ns)
        usleep(1000);
    assert_int_equal(shared_state->runs, runs);
}

static int wait_for_death(pid_t pid)
{
    uint64_t deadline_ns = ep_deadline_ns(PATIENT_MS);
    int how;

    while (ep_now_ns() < deadline_ns) {
        if (waitpid(pid, &how, WNOHANG) == pid)
            return WIFSIGNALED(how) ? WTERMSIG(how) : -1;
        usleep(1000);
    }
    return 0;
}

TEST_WITH(ranks_die_with_the_launcher, reset, NULL)
{
    enum { RANKS = 4 };
    pid_t launcher;

    /* Orphans become children of this process, which can then wait for them. */
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    launcher = __real_fork();
    assert_true(launcher >= 0);
    if (launcher == 0) {
        ep_rank_exit exits[RANKS];

        launch(EP_LAUNCH_FORK, RANKS, announce_and_sleep, NULL, 0, exits);
        _exit(1);
    }
    wait_for_runs(RANKS);
    kill(launcher, SIGKILL);
    assert_int_equal(wait_for_death(launcher), SIGKILL);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(wait_for_death((pid_t)shared_state->pids[rank]), SIGKILL);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
}

/* --- arguments --- */

TEST_WITH(bad_arguments_are_refused, reset, NULL)
{
    static const struct {
        ep_launch_args args;
        ep_status status;
        const char *text;
    } cases[] = {
        {{.size = 8, .nranks = 1, .run = count_run}, EP_E_ABI, "args.size is 8"},
        {{.size = sizeof(ep_launch_args), .mode = 2, .nranks = 1, .run = count_run}, EP_E_ARG, "mode is 2"},
        {{.size = sizeof(ep_launch_args), .nranks = 0, .run = count_run}, EP_E_ARG, "nranks is 0"},
        {{.size = sizeof(ep_launch_args), .nranks = -1, .run = count_run}, EP_E_ARG, "nranks is -1"},
        {{.size = sizeof(ep_launch_args), .nranks = EP_MAX_RANKS + 1, .run = count_run}, EP_E_ARG, "1025"},
        {{.size = sizeof(ep_launch_args), .nranks = 1}, EP_E_ARG, "run is NULL"},
        {{.size = sizeof(ep_launch_args), .nranks = 1, .run = count_run, .timeout_ms = -1}, EP_E_ARG, "timeout_ms"},
        {{.size = sizeof(ep_launch_args), .nranks = 1, .run = count_run, .reserved = 1}, EP_E_ARG, "reserved"},
        {{.size = sizeof(ep_launch_args), .mode = EP_LAUNCH_THREADS, .nranks = 1, .run = count_run, .timeout_ms = 5},
         EP_E_ARG,
         "timeout_ms needs EP_LAUNCH_FORK"},
    };
    ep_rank_exit exits[1];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(ep_launch(&cases[i].args, exits), cases[i].status);
        assert_non_null(strstr(ep_last_error(), cases[i].text));
    }
    assert_int_equal(ep_launch(NULL, exits), EP_E_ARG);
    assert_string_equal(ep_last_error(), "ep_launch: args is NULL");
    assert_int_equal(launch(EP_LAUNCH_FORK, 1, count_run, NULL, 0, NULL), EP_E_ARG);
    assert_int_equal(shared_state->runs, 0);
}

static int share_state(void **state)
{
    (void)state;
    shared_state = mmap(NULL, sizeof(*shared_state), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return shared_state == MAP_FAILED;
}

TEST_GROUP(share_state, NULL)
