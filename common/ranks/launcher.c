/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launcher.c - starts the processes of a job, reads the events of their ranks (events.c), and ends all of them.
 *
 * Signals are read from a signalfd, so that everything is handled in one loop. Children die with the launcher
 * (PR_SET_PDEATHSIG).
 */
#include "common/child.h"
#include "common/cmd.h"
#include "common/inherited.h"
#include "common/memory.h"
#include "common/output.h"
#include "ranks_internal.h"

#include "base/clock.h"
#include "boot/rank_ends.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define TICK_MS 150
#define LOST_GRACE_MS 5000  /* after one rank has ended: for the others, in addition to the communicator's deadline */
#define KILL_GRACE_MS 10000 /* a process that survives SIGKILL for longer is stuck in the kernel */

struct child {
    pid_t pid;
    int first, n; /* its ranks */
    bool running;
    int status; /* of waitpid() */
};

struct launch {
    const struct ranks_spec *spec;
    const char *job;
    char *parameters; /* a text: each rank parses its own copy, because threads must not share them */
    struct rank_reader reader;
    struct child *children;
    int n_children, n_running;
    struct pollfd *polls;
    int signal_fd;
    sigset_t old_mask;
    int interrupted;                /* the signal that did, or 0 */
    bool timed_out;                 /* the deadline has passed */
    bool ending;                    /* end_children() was called */
    uint64_t deadline_ns, leave_ns; /* 0: none */
};

/*
 * Called when a rank has ended: the others end soon as well, or their waits fail by the communicator's deadline. Ranks
 * that are stopped or hang do neither, and are ended at this deadline.
 */
static void shorten_deadline(struct launch *launch)
{
    uint64_t deadline_ns = ep_deadline_ns(launch->spec->timeout_ms + LOST_GRACE_MS);

    if (!launch->deadline_ns || deadline_ns < launch->deadline_ns)
        launch->deadline_ns = deadline_ns;
}

static void read_rank(struct launch *launch, int rank)
{
    if (rank_reader_read(&launch->reader, rank))
        shorten_deadline(launch);
}

/* --- processes --- */

/* Makes a child end with the launcher, resets its signal handling, and redirects standard output to standard error. */
static void init_child(const struct launch *launch, pid_t launcher)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher)
        _exit(CMD_FAILED);
    /* Ctrl-C is sent to the whole process group; the launcher handles it. */
    signal(SIGINT, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_SETMASK, &launch->old_mask, NULL);
    dup2(STDERR_FILENO, STDOUT_FILENO);
}

/* A rank in fork and thread mode. */
static int run_rank(const struct launch *launch, const ep_boot *boot)
{
    struct ranks_rank_context self = {.ctx.spec = launch->spec, .ctx.emit_fd = launch->reader.pipes[boot->rank].fds[1]};
    json_t *parameters = json_loads(launch->parameters, 0, NULL);
    int code = ranks_run_rank(&self, boot, launch->job, parameters);

    json_decref(parameters);
    return code;
}

static void run_forked(const struct launch *launch, ep_boot_shm *boot_shm, int rank)
{
    ep_boot boot = {.size = sizeof(boot)};

    if (ep_boot_shm_join(boot_shm, rank, &boot) != EP_OK) {
        out_error("rank %d: %s", rank, ep_last_error());
        _exit(CMD_FAILED);
    }
    _exit(run_rank(launch, &boot));
}

struct rank_thread {
    pthread_t id;
    ep_boot boot;
    const struct launch *launch;
    ep_boot_shm *boot_shm;
};

static void *run_thread(void *context)
{
    struct rank_thread *thread = context;

    (void)run_rank(thread->launch, &thread->boot);
    ep_boot_shm_note_return(thread->boot_shm, thread->boot.rank);
    return NULL;
}

/* All ranks are threads of this process, which ends with them. */
static void run_threads(const struct launch *launch)
{
    int n = launch->spec->nranks;
    struct rank_thread *threads = memory_new((size_t)n, sizeof(*threads));
    ep_boot_shm *boot_shm = NULL;
    ep_status status = ep_boot_shm_new(n, &boot_shm);

    for (int rank = 0; rank < n && status == EP_OK; rank++) {
        struct rank_thread *thread = &threads[rank];
        int reason;

        *thread = (struct rank_thread){.boot.size = sizeof(ep_boot), .launch = launch, .boot_shm = boot_shm};
        status = ep_boot_shm_join(boot_shm, rank, &thread->boot);
        reason = status == EP_OK ? pthread_create(&thread->id, NULL, run_thread, thread) : 0;
        if (reason)
            status = ep_fail_errno(EP_E_SYSTEM, reason, "pthread_create of rank %d", rank);
    }
    if (status != EP_OK) {
        out_error("starting threads: %s", ep_last_error());
        _exit(CMD_FAILED);
    }
    for (int rank = 0; rank < n; rank++)
        pthread_join(threads[rank].id, NULL);
    _exit(CMD_FINE);
}

static int start_child(struct launch *launch, int first, int n, ep_boot_shm *boot_shm)
{
    struct child *child = &launch->children[launch->n_children];
    pid_t launcher = getpid();

    child->pid = fork();
    if (child->pid < 0) {
        out_error("starting rank %d: %s", first, strerror(errno));
        return CMD_FAILED;
    }
    if (child->pid == 0) {
        init_child(launch, launcher);
        if (launch->spec->boot == RANKS_THREADS)
            run_threads(launch);
        run_forked(launch, boot_shm, first);
    }
    child->first = first;
    child->n = n;
    child->running = true;
    launch->n_children++;
    launch->n_running++;
    return CMD_FINE;
}

static int start_all(struct launch *launch, ep_boot_shm *boot_shm)
{
    int nranks = launch->spec->nranks;
    int result = CMD_FINE;

    fflush(stdout);
    fflush(stderr);
    if (launch->spec->boot != RANKS_FORK)
        return start_child(launch, 0, nranks, NULL);
    for (int rank = 0; rank < nranks && result == CMD_FINE; rank++) {
        result = start_child(launch, rank, 1, boot_shm);
        process_close_fd(&launch->reader.pipes[rank].fds[1]);
    }
    return result;
}

/* Ranks own nothing that outlives them. */
static void end_children(struct launch *launch)
{
    if (launch->ending)
        return;
    launch->ending = true;
    for (int i = 0; i < launch->n_children; i++)
        if (launch->children[i].running)
            kill(launch->children[i].pid, SIGKILL);
    launch->leave_ns = ep_deadline_ns(KILL_GRACE_MS);
}

static void reap(struct launch *launch)
{
    FOR_EACH (child, launch->children, launch->n_children) {
        if (!child->running || process_wait(child->pid, WNOHANG, &child->status) == 0)
            continue;
        child->running = false;
        launch->n_running--;
        read_rank(launch, child->first);
        if (!launch->reader.pipes[child->first].finished)
            shorten_deadline(launch);
    }
}

/* Stops waiting for processes that are stuck in the kernel; init will reap them. */
static void abandon_children(struct launch *launch)
{
    FOR_EACH (child, launch->children, launch->n_children) {
        if (!child->running)
            continue;
        out_error("process %d of rank %d did not end within %d s after SIGKILL, and is left running", (int)child->pid,
                  child->first, KILL_GRACE_MS / 1000);
        child->running = false;
        child->status = PROCESS_UNKNOWN << 8;
        launch->n_running--;
    }
}

/* --- the loop --- */

static void read_signals(struct launch *launch)
{
    struct signalfd_siginfo info;

    while (read(launch->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD || launch->interrupted)
            continue;
        launch->interrupted = (int)info.ssi_signo;
        end_children(launch);
    }
}

static void check_deadlines(struct launch *launch)
{
    uint64_t now = ep_now_ns();

    if (launch->deadline_ns && now >= launch->deadline_ns && !launch->ending) {
        launch->timed_out = true;
        end_children(launch);
    }
    if (launch->leave_ns && now >= launch->leave_ns)
        abandon_children(launch);
}

/* Waits for events and signals, and handles them. */
static void wait_for_events(struct launch *launch, int n)
{
    for (int i = 0; i < n; i++)
        launch->polls[i] = (struct pollfd){launch->reader.pipes[i].fds[0], POLLIN, 0};
    launch->polls[n] = (struct pollfd){launch->signal_fd, POLLIN, 0};
    if (poll(launch->polls, (nfds_t)n + 1, TICK_MS) <= 0)
        return;
    for (int i = 0; i < n; i++)
        if (launch->polls[i].revents)
            read_rank(launch, i);
    read_signals(launch);
}

static void run_loop(struct launch *launch)
{
    int n = launch->spec->nranks;

    while (launch->n_running > 0) {
        wait_for_events(launch, n);
        /* In each iteration, because a thread of a preloaded library may receive SIGCHLD. */
        reap(launch);
        check_deadlines(launch);
        progress_tick();
    }
    for (int i = 0; i < n; i++)
        read_rank(launch, i);
}

/* --- results --- */

static void report_unfinished(struct launch *launch, const struct child *child, int rank)
{
    if (launch->timed_out && WIFSIGNALED(child->status))
        rank_reader_add_problem(&launch->reader, ranks_problem_new(rank, "a rank did not finish", "",
                                                                   "its deadline passed; it was killed"));
    else if (WIFSIGNALED(child->status))
        rank_reader_add_problem(&launch->reader, ranks_problem_signal(rank, WTERMSIG(child->status)));
    else
        rank_reader_add_problem(&launch->reader,
                                ranks_problem_new(rank, "a rank ended early", "its output above may show the reason",
                                                  "exit code %d", WEXITSTATUS(child->status)));
}

static int collect_results(struct launch *launch)
{
    int code = CMD_FINE;

    if (launch->interrupted)
        return 128 + launch->interrupted;
    FOR_EACH (child, launch->children, launch->n_children) {
        for (int rank = child->first; rank < child->first + child->n; rank++) {
            const struct rank_pipe *pipe = &launch->reader.pipes[rank];

            if (!pipe->finished)
                report_unfinished(launch, child, rank);
            code = ranks_worse(code, pipe->finished ? pipe->code : CMD_FAILED);
        }
    }
    return code;
}

/* --- set-up --- */

static int open_signals(struct launch *launch)
{
    sigset_t mask = SIGNALS(SIGCHLD, SIGINT, SIGTERM);

    if (!inherited_is_ignored(SIGHUP)) /* nohup */
        sigaddset(&mask, SIGHUP);
    sigprocmask(SIG_BLOCK, &mask, &launch->old_mask);
    launch->signal_fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (launch->signal_fd < 0) {
        out_error("watching for signals: %s", strerror(errno));
        return CMD_FAILED;
    }
    return CMD_FINE;
}

static void close_all(struct launch *launch)
{
    rank_reader_done(&launch->reader);
    process_close_fd(&launch->signal_fd);
    free(launch->parameters);
    free(launch->children);
    free(launch->polls);
    sigprocmask(SIG_SETMASK, &launch->old_mask, NULL);
}

int ranks_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
              void *context)
{
    struct launch launch = {.spec = spec, .job = job, .signal_fd = -1};
    ep_boot_shm *boot_shm = NULL;
    int result;

    if (ranks_world_rank() == 0)
        return ranks_world_run(spec, job, parameters, on_event, context);
    result = open_signals(&launch);
    if (result == CMD_FINE)
        result = rank_reader_init(spec, on_event, context, &launch.reader);
    if (result != CMD_FINE)
        goto close;
    result = CMD_FAILED;
    launch.parameters = json_dumps(parameters, JSON_COMPACT);
    launch.children = memory_new((size_t)spec->nranks, sizeof(*launch.children));
    launch.polls = memory_new((size_t)spec->nranks + 1, sizeof(*launch.polls));
    if (spec->boot == RANKS_FORK && ep_boot_shm_new(spec->nranks, &boot_shm) != EP_OK) {
        out_error("preparing the ranks: %s", ep_last_error());
        goto close;
    }
    result = start_all(&launch, boot_shm);
    if (result != CMD_FINE)
        end_children(&launch);
    run_loop(&launch);
    if (result == CMD_FINE)
        result = collect_results(&launch);
    if (!launch.interrupted)
        ranks_problem_print(launch.reader.problems);
close:
    ep_boot_shm_free(boot_shm);
    close_all(&launch);
    return result;
}
