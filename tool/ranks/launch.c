/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c - starts the processes of a job, listens to their ranks, and leaves none behind.
 *
 * One pipe a rank carries its events, so that long lines of different ranks cannot mix. Signals are taken through a
 * descriptor: the loop is the only place where anything happens. Children die with the launcher (PR_SET_PDEATHSIG).
 */
#include "cmd.h"
#include "output.h"
#include "process/inherited.h"
#include "progress.h"
#include "ranks_internal.h"

#include "base/clock.h"
#include "testing/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TICK_MS 150
#define LOST_GRACE_MS 5000  /* beyond the communicator's deadline, for the other ranks when one has ended */
#define TERM_GRACE_MS 3000  /* mpirun, to end its ranks and remove its session folder */
#define KILL_GRACE_MS 10000 /* a process that SIGKILL does not end within this is stuck in the kernel */

struct child {
    pid_t pid;
    int first, n; /* its ranks */
    bool running;
    bool lost;  /* it has ended, or was given up, and how it ended is not known */
    int status; /* of waitpid() */
};

struct listener {
    int fds[2]; /* -1 when closed */
    char *text;
    size_t used, room;
    bool finished; /* the rank has said {"event":"exit"} */
    int code;
};

struct launch {
    const struct ranks_spec *spec;
    const char *job;
    const json_t *parameters;
    ranks_event_fn on_event;
    void *context;
    struct listener *listeners; /* [nranks + 1]: the last one hears what mpirun says on standard error */
    struct child *children;
    int n_children, n_running;
    struct pollfd *polls;
    json_t *problems;
    int signal_fd;
    sigset_t old_mask;
    int interrupted;                         /* the signal that did, or 0 */
    bool late;                               /* the deadline of the job has passed */
    bool ending;                             /* the children have been told to end */
    uint64_t deadline_ns, kill_ns, leave_ns; /* 0: none */
    struct ranks_mpirun mpirun;
};

/* --- events --- */

/*
 * A rank has ended, well or not: the others, who work together with it, end soon as well, or within their deadline
 * notice that it is gone. One that is stopped, or wedged, does neither and is ended.
 */
static void hurry(struct launch *launch)
{
    uint64_t deadline_ns = ep_deadline_ns(launch->spec->timeout_ms + LOST_GRACE_MS);

    if (!launch->deadline_ns || deadline_ns < launch->deadline_ns)
        launch->deadline_ns = deadline_ns;
}

static bool is_within(const json_t *value, json_int_t most)
{
    return json_is_integer(value) && json_integer_value(value) >= 0 && json_integer_value(value) <= most;
}

/* Has it what the launcher itself needs? An end without an exit code must not pass for a good one. */
static bool is_event(const struct launch *launch, const json_t *event)
{
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (!kind)
        return false;
    if (strcmp(kind, "exit") == 0)
        return is_within(json_object_get(event, "code"), 255);
    return strcmp(kind, "error") != 0 || is_within(json_object_get(event, "rank"), launch->spec->nranks - 1);
}

static void refuse_line(struct launch *launch, int rank, const char *line)
{
    char shown[81];
    json_t *problem;
    size_t n;

    /* Half a character, or what is none, would not go into JSON. */
    for (n = 0; line[n] && n + 1 < sizeof(shown); n++)
        shown[n] = line[n] < 0x20 || line[n] > 0x7e ? '?' : line[n];
    shown[n] = '\0';
    problem = ranks_problem_new(rank, "hearing a rank", "", "malformed event: %s", shown);
    ranks_problem_add(launch->problems, problem);
    json_decref(problem);
}

static void take_event(struct launch *launch, int rank, const char *line)
{
    json_t *event = json_loads(line, 0, NULL);
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (!is_event(launch, event)) {
        refuse_line(launch, rank, line);
    } else if (strcmp(kind, "exit") == 0) {
        launch->listeners[rank].finished = true;
        launch->listeners[rank].code = (int)json_integer_value(json_object_get(event, "code"));
        hurry(launch);
    } else {
        if (strcmp(kind, "error") == 0)
            ranks_problem_add(launch->problems, event);
        launch->on_event(launch->context, event);
    }
    json_decref(event);
}

static void take_lines(struct launch *launch, int index)
{
    struct listener *listener = &launch->listeners[index];
    char *line = listener->text, *end;

    while ((end = memchr(line, '\n', listener->used - (size_t)(line - listener->text)))) {
        *end = '\0';
        if (index < launch->spec->nranks)
            take_event(launch, index, line);
        else
            ranks_mpirun_line(&launch->mpirun, line, launch->ending);
        line = end + 1;
    }
    listener->used -= (size_t)(line - listener->text);
    memmove(listener->text, line, listener->used);
}

/* Reads what is there. */
static void hear(struct launch *launch, int index)
{
    struct listener *listener = &launch->listeners[index];

    while (listener->fds[0] >= 0) {
        ssize_t n;

        if (listener->room - listener->used < 4096) {
            char *text = realloc(listener->text, listener->room * 2 + 8192);

            if (!text)
                return;
            listener->text = text;
            listener->room = listener->room * 2 + 8192;
        }
        n = read(listener->fds[0], listener->text + listener->used, listener->room - listener->used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            close(listener->fds[0]);
            listener->fds[0] = -1;
            return;
        }
        listener->used += (size_t)n;
        take_lines(launch, index);
    }
}

/* --- processes --- */

static void allow_descriptors(int n)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < (rlim_t)n) {
        limit.rlim_cur = limit.rlim_max < (rlim_t)n ? limit.rlim_max : (rlim_t)n;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* The first things a child does: end with the launcher, forget its signal handling, keep standard output clean. */
static void settle_child(const struct launch *launch, pid_t launcher, int end_signal)
{
    prctl(PR_SET_PDEATHSIG, end_signal);
    if (getppid() != launcher)
        _exit(CMD_FAILED);
    /* A Ctrl-C reaches the whole group; the launcher decides what it means. */
    signal(SIGINT, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_SETMASK, &launch->old_mask, NULL);
    dup2(STDERR_FILENO, STDOUT_FILENO);
}

struct thread_argument {
    const struct launch *launch;
    const char *parameters;
};

/* A rank in fork and thread mode. Parameters are parsed anew, because threads must not share them. */
static int run_rank(const ep_boot *boot, void *argument)
{
    const struct thread_argument *thread = argument;
    const struct launch *launch = thread->launch;
    struct ranks_seat seat = {.ctx.spec = launch->spec, .ctx.emit_fd = launch->listeners[boot->rank].fds[1]};
    json_t *parameters = json_loads(thread->parameters, 0, NULL);
    int code = ranks_serve(&seat, boot, launch->job, parameters);

    json_decref(parameters);
    return code;
}

static void run_forked(struct launch *launch, ep_boot_shm *place, int rank, const char *parameters)
{
    struct thread_argument argument = {launch, parameters};
    ep_boot boot = {.size = sizeof(boot)};

    if (ep_boot_shm_join(place, rank, &boot) != EP_OK) {
        out_error("rank %d: %s", rank, ep_last_error());
        _exit(CMD_FAILED);
    }
    _exit(run_rank(&boot, &argument));
}

static void run_threads(struct launch *launch, const char *parameters)
{
    struct thread_argument argument = {launch, parameters};
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit *exits = calloc((size_t)launch->spec->nranks, sizeof(*exits));

    args.mode = EP_LAUNCH_THREADS;
    args.nranks = launch->spec->nranks;
    args.run = run_rank;
    args.argument = &argument;
    if (!exits || ep_launch(&args, exits) != EP_OK) {
        out_error("starting threads: %s", exits ? ep_last_error() : "out of memory");
        _exit(CMD_FAILED);
    }
    _exit(CMD_FINE);
}

static void run_mpirun(struct launch *launch, pid_t launcher)
{
    int nranks = launch->spec->nranks;
    int *fds = calloc((size_t)nranks, sizeof(*fds));

    if (!fds)
        _exit(CMD_FAILED);
    /* The launcher's end, not this copy's, is what the ranks open. */
    for (int rank = 0; rank < nranks; rank++)
        fds[rank] = launch->listeners[rank].fds[1];
    dup2(launch->listeners[nranks].fds[1], STDERR_FILENO);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    setpgid(0, 0);
    _exit(ranks_exec_mpirun(launch->spec, launch->job, launch->parameters, fds, launcher));
}

static int start_child(struct launch *launch, int first, int n, ep_boot_shm *place, const char *parameters)
{
    struct child *child = &launch->children[launch->n_children];
    pid_t launcher = getpid();

    child->pid = fork();
    if (child->pid < 0) {
        out_error("starting rank %d: %s", first, strerror(errno));
        return CMD_FAILED;
    }
    if (child->pid == 0) {
        bool mpi = launch->spec->boot == RANKS_MPI;

        /* mpirun ends its own ranks when it is told to; SIGKILL would leave its session folder behind. */
        settle_child(launch, launcher, mpi ? SIGTERM : SIGKILL);
        if (mpi)
            run_mpirun(launch, launcher);
        if (launch->spec->boot == RANKS_THREADS)
            run_threads(launch, parameters);
        run_forked(launch, place, first, parameters);
    }
    child->first = first;
    child->n = n;
    child->running = true;
    launch->n_children++;
    launch->n_running++;
    return CMD_FINE;
}

static int start_all(struct launch *launch, ep_boot_shm *place, const char *parameters)
{
    int nranks = launch->spec->nranks;
    int result = CMD_FINE;

    fflush(stdout);
    fflush(stderr);
    if (launch->spec->boot != RANKS_FORK)
        return start_child(launch, 0, nranks, NULL, parameters);
    for (int rank = 0; rank < nranks && result == CMD_FINE; rank++) {
        result = start_child(launch, rank, 1, place, parameters);
        close(launch->listeners[rank].fds[1]);
        launch->listeners[rank].fds[1] = -1;
    }
    return result;
}

static void tell_children(struct launch *launch, int signal_number)
{
    for (int i = 0; i < launch->n_children; i++) {
        struct child *child = &launch->children[i];

        if (!child->running)
            continue;
        kill(child->pid, signal_number);
        if (signal_number == SIGKILL && launch->spec->boot == RANKS_MPI)
            kill(-child->pid, SIGKILL);
    }
}

/* Ranks hold nothing that outlives them, so they are killed; mpirun is asked first. */
static void end_children(struct launch *launch)
{
    if (launch->ending)
        return;
    launch->ending = true;
    tell_children(launch, launch->spec->boot == RANKS_MPI ? SIGTERM : SIGKILL);
    launch->kill_ns = ep_deadline_ns(TERM_GRACE_MS);
}

static void reap(struct launch *launch)
{
    for (int i = 0; i < launch->n_children; i++) {
        struct child *child = &launch->children[i];

        pid_t ended = child->running ? waitpid(child->pid, &child->status, WNOHANG) : 0;

        if (ended == 0 || (ended < 0 && errno != ECHILD))
            continue;
        /* Another part of the process, a preloaded library, has waited for it. */
        child->lost = ended < 0;
        child->running = false;
        launch->n_running--;
        hear(launch, child->first);
        if (!launch->listeners[child->first].finished)
            hurry(launch);
    }
}

/* Nobody is waited for without end: init gets a process that is stuck. */
static void give_up(struct launch *launch)
{
    for (int i = 0; i < launch->n_children; i++) {
        struct child *child = &launch->children[i];

        if (!child->running)
            continue;
        out_error("process %d of rank %d is still there %d s after SIGKILL, and is left", (int)child->pid, child->first,
                  KILL_GRACE_MS / 1000);
        child->running = false;
        child->lost = true;
        launch->n_running--;
    }
}

/* --- the loop --- */

static void take_signals(struct launch *launch)
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
        launch->late = true;
        end_children(launch);
    }
    if (launch->kill_ns && now >= launch->kill_ns) {
        tell_children(launch, SIGKILL);
        launch->kill_ns = 0;
        launch->leave_ns = ep_deadline_ns(KILL_GRACE_MS);
    }
    if (launch->leave_ns && now >= launch->leave_ns)
        give_up(launch);
}

/* What is there to be heard. poll() refuses more descriptors than RLIMIT_NOFILE, which may be lowered at any time. */
static void wait_for_news(struct launch *launch, int n)
{
    struct timespec tick = {.tv_nsec = TICK_MS * 1000000};
    int ready;

    for (int i = 0; i < n; i++)
        launch->polls[i] = (struct pollfd){launch->listeners[i].fds[0], POLLIN, 0};
    launch->polls[n] = (struct pollfd){launch->signal_fd, POLLIN, 0};
    ready = poll(launch->polls, (nfds_t)n + 1, TICK_MS);
    if (ready < 0 && errno != EINTR)
        nanosleep(&tick, NULL);
    for (int i = 0; i < n; i++)
        if (ready < 0 || launch->polls[i].revents)
            hear(launch, i);
    if (ready < 0 || launch->polls[n].revents)
        take_signals(launch);
}

static void listen_all(struct launch *launch)
{
    int n = launch->spec->nranks + 1;

    while (launch->n_running > 0) {
        wait_for_news(launch, n);
        /* A thread of a preloaded library may take SIGCHLD: then only looking tells that a child ended. */
        reap(launch);
        check_deadlines(launch);
        progress_tick();
    }
    for (int i = 0; i < n; i++)
        hear(launch, i);
}

/* --- how it ended --- */

static void add_problem(struct launch *launch, json_t *problem)
{
    ranks_problem_add(launch->problems, problem);
    launch->on_event(launch->context, problem);
    json_decref(problem);
}

static void judge_rank(struct launch *launch, const struct child *child, int rank)
{
    bool mpi = launch->spec->boot == RANKS_MPI;

    if (child->lost)
        add_problem(launch, ranks_problem_new(rank, "a rank ended early", "", "how it ended is not known"));
    else if (launch->late && WIFSIGNALED(child->status))
        add_problem(launch,
                    ranks_problem_new(rank, "a rank did not come to an end", "", "its deadline passed; it was killed"));
    else if (mpi && launch->mpirun.rank >= 0 && launch->mpirun.rank != rank)
        return; /* mpirun ended it because of the other one */
    else if (mpi && launch->mpirun.rank == rank && launch->mpirun.signal > 0)
        add_problem(launch, ranks_problem_signal(rank, launch->mpirun.signal));
    else if (WIFSIGNALED(child->status))
        add_problem(launch, ranks_problem_signal(rank, WTERMSIG(child->status)));
    else
        add_problem(launch,
                    ranks_problem_new(rank, mpi ? "mpirun ended before the rank did" : "a rank ended early",
                                      "what it wrote above may say why", "exit code %d", WEXITSTATUS(child->status)));
}

static int judge(struct launch *launch)
{
    int code = CMD_FINE;

    if (launch->interrupted)
        return 128 + launch->interrupted;
    for (int i = 0; i < launch->n_children; i++) {
        const struct child *child = &launch->children[i];

        for (int rank = child->first; rank < child->first + child->n; rank++) {
            const struct listener *listener = &launch->listeners[rank];

            if (!listener->finished)
                judge_rank(launch, child, rank);
            code = ranks_worse(code, listener->finished ? listener->code : CMD_FAILED);
        }
    }
    return code;
}

/* --- set-up --- */

static int open_listeners(struct launch *launch)
{
    int n = launch->spec->nranks + 1;

    launch->listeners = calloc((size_t)n, sizeof(*launch->listeners));
    launch->children = calloc((size_t)launch->spec->nranks, sizeof(*launch->children));
    launch->polls = calloc((size_t)n + 1, sizeof(*launch->polls));
    launch->problems = json_array();
    if (!launch->listeners || !launch->children || !launch->polls || !launch->problems) {
        out_error("out of memory");
        return CMD_FAILED;
    }
    for (int i = 0; i < n; i++)
        launch->listeners[i].fds[0] = launch->listeners[i].fds[1] = -1;
    allow_descriptors(2 * n + 64);
    for (int i = 0; i < n; i++) {
        if (i == n - 1 && launch->spec->boot != RANKS_MPI)
            break;
        if (pipe2(launch->listeners[i].fds, O_CLOEXEC) != 0) {
            int reason = errno;

            out_error("creating a pipe for rank %d: %s", i, strerror(reason));
            if (reason == EMFILE)
                out_hint("raise the limit of open files: ulimit -n");
            return CMD_FAILED;
        }
        fcntl(launch->listeners[i].fds[0], F_SETFL, O_NONBLOCK);
    }
    return CMD_FINE;
}

static int open_signals(struct launch *launch)
{
    sigset_t mask;

    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGTERM);
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
    for (int i = 0; launch->listeners && i <= launch->spec->nranks; i++) {
        for (int end = 0; end < 2; end++)
            if (launch->listeners[i].fds[end] >= 0)
                close(launch->listeners[i].fds[end]);
        free(launch->listeners[i].text);
    }
    if (launch->signal_fd >= 0)
        close(launch->signal_fd);
    free(launch->listeners);
    free(launch->children);
    free(launch->polls);
    json_decref(launch->problems);
    sigprocmask(SIG_SETMASK, &launch->old_mask, NULL);
}

int ranks_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
              void *context)
{
    struct launch launch = {.spec = spec,
                            .job = job,
                            .parameters = parameters,
                            .on_event = on_event,
                            .context = context,
                            .signal_fd = -1,
                            .mpirun.rank = -1};
    ep_boot_shm *place = NULL;
    const char *why;
    char *text = NULL;
    int result;

    if (ranks_world_rank() == 0)
        return ranks_world_run(spec, job, parameters, on_event, context);
    if (spec->boot == RANKS_MPI && !ranks_mpi_available(&why)) {
        out_error("starting ranks with mpirun: %s", why);
        return CMD_UNSUPPORTED;
    }
    result = open_signals(&launch);
    if (result == CMD_FINE)
        result = open_listeners(&launch);
    if (result != CMD_FINE)
        goto close;
    result = CMD_FAILED;
    text = json_dumps(parameters, JSON_COMPACT);
    if (!text || (spec->boot == RANKS_FORK && ep_boot_shm_new(spec->nranks, &place) != EP_OK)) {
        out_error("preparing the ranks: %s", text ? ep_last_error() : "out of memory");
        goto close;
    }
    if (spec->job_timeout_ms > 0)
        launch.deadline_ns = ep_deadline_ns(spec->job_timeout_ms);
    result = start_all(&launch, place, text);
    if (result != CMD_FINE)
        end_children(&launch);
    listen_all(&launch);
    if (result == CMD_FINE)
        result = judge(&launch);
    if (!launch.interrupted)
        ranks_problem_print(launch.problems);
close:
    ep_boot_shm_free(place);
    free(text);
    close_all(&launch);
    return result;
}
