/* SPDX-License-Identifier: Apache-2.0 */
/* The conductor of a storm: a process of its own, the subreaper of everything that the storm starts. */
#include "storm.h"
#include "testing/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    LOOK_MS = 3,           /* between two looks at the ranks */
    MOST_TICK_MS = 50,     /* of the time between two looks: more means that this process was not let run either */
    HANG_MS = 40000,       /* beyond all deadlines that a call may wait for */
    SETTLE_CALLS = 12,     /* that the ranks make after the last fault */
    STALL_CALLS = 60,      /* no shrink has come: those who were to be struck in it are struck now */
    CALLS_BEFORE_SEEN = 2, /* ep_comm_new() and its first all-gather have begun */
    CODE_NO_LIMITS = 76,   /* of a launcher that cannot limit itself */
};

struct strike_state {
    bool due_known, struck, void_;
    uint64_t due_ns, pause_end_ns;
};

struct conductor {
    const struct storm *storm;
    const struct storm_programs *programs;
    struct storm_table *table;
    char file[64]; /* of the table */
    char said[64]; /* what mpirun writes to its standard error */
    char folder[32];
    int launcher; /* 0: it has ended */
    int launcher_how;
    bool limits_failed;
    struct strike_state strikes[STORM_FAULTS];
    bool stopped[MOST_RANKS];
    int stopped_generation[MOST_RANKS];
    bool dead[MOST_RANKS]; /* by a signal of ours */
    uint64_t last_look_ns, own_delay_ns;
    int in_call_ms[MOST_RANKS];
    uint32_t calls_seen[MOST_RANKS];
    uint32_t calls_at_last_strike[MOST_RANKS];
    int ending_ms; /* since the ranks should have ended */
    struct storm_watch watch;
    struct storm_verdict *verdict;
};

void storm_complain(struct storm_verdict *verdict, enum storm_kind kind, const char *format, ...)
{
    static const char *const kinds[] = {"hang", "leftover", "wrong name", "changed status", "wrong result", "other"};
    int *counts[] = {&verdict->hangs,   &verdict->leftovers, &verdict->names,
                     &verdict->changes, &verdict->wrong,     &verdict->others};
    size_t used = strlen(verdict->text);
    va_list args;

    ++*counts[kind];
    if (used + 64 >= sizeof(verdict->text))
        return;
    used += (size_t)snprintf(verdict->text + used, sizeof(verdict->text) - used, "\n     %s: ", kinds[kind]);
    va_start(args, format);
    vsnprintf(verdict->text + used, sizeof(verdict->text) - used, format, args);
    va_end(args);
}

/* --- the group ---------------------------------------------------------------------------------------------------- */

static int launch(struct storm_table *table)
{
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MOST_RANKS];
    struct storm_belongings before;
    ep_status status;

    if (!storm_limit(table->storm.limits))
        return CODE_NO_LIMITS;
    before = storm_belongings();
    args.mode = table->storm.mode == MODE_THREADS ? EP_LAUNCH_THREADS : EP_LAUNCH_FORK;
    args.nranks = table->storm.nranks;
    args.run = storm_rank;
    args.argument = table;
    memset(exits, 0, sizeof(exits));
    status = ep_launch(&args, exits);
    for (int rank = 0; rank < args.nranks; rank++) {
        table->exit_code[rank] = exits[rank].code;
        table->exit_signal[rank] = exits[rank].signal;
    }
    snprintf(table->launch_text, sizeof(table->launch_text), "%s", status == EP_OK ? "" : ep_last_error());
    storm_check_belongings(&before, table->launcher_left_behind, sizeof(table->launcher_left_behind));
    atomic_store(&table->launched, 1 + (int)status);
    return 0;
}

static void run_mpirun(const struct conductor *c)
{
    char *arguments[64], line[1024], ranks[16];
    int n = 0, quiet = open("/dev/null", O_WRONLY), said = open(c->said, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

    if (!storm_limit(c->storm->limits))
        _exit(CODE_NO_LIMITS);
    if (!c->programs->verbose)
        dup2(said, 2);
    dup2(quiet, 1);
    setenv("TMPDIR", c->folder, 1);
    snprintf(line, sizeof(line), "%s", c->programs->mpirun);
    for (char *word = strtok(line, " "); word && n < 56; word = strtok(NULL, " "))
        arguments[n++] = word;
    snprintf(ranks, sizeof(ranks), "%d", c->storm->nranks);
    arguments[n++] = (char[]){"-n"};
    arguments[n++] = ranks;
    arguments[n++] = (char *)(uintptr_t)c->programs->mpi_rank;
    arguments[n++] = (char *)(uintptr_t)c->file;
    arguments[n] = NULL;
    execvp(arguments[0], arguments);
    dprintf(STDERR_FILENO, "%s cannot be run: %s\n", arguments[0], strerror(errno));
    _exit(127);
}

/* mpirun's ranks find the table in a file; the folder is for what mpirun leaves, too. */
static bool make_table(struct conductor *c)
{
    int fd = -1, flags = MAP_SHARED | MAP_ANONYMOUS;

    if (c->storm->mode == MODE_MPI) {
        snprintf(c->folder, sizeof(c->folder), "/tmp/storm.XXXXXX");
        if (!mkdtemp(c->folder))
            return false;
        snprintf(c->file, sizeof(c->file), "%s/table", c->folder);
        snprintf(c->said, sizeof(c->said), "%s/said", c->folder);
        fd = open(c->file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(*c->table)) != 0)
            return false;
        flags = MAP_SHARED;
    }
    c->table = mmap(NULL, sizeof(*c->table), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0)
        close(fd);
    return c->table != MAP_FAILED;
}

static bool start(struct conductor *c)
{
    if (!make_table(c))
        return false;
    c->table->storm = *c->storm;
    fflush(NULL);
    c->launcher = fork();
    if (c->launcher == 0) {
        /* A storm that is ended from outside leaves no ranks behind. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (c->storm->mode == MODE_MPI)
            run_mpirun(c);
        _exit(launch(c->table));
    }
    return c->launcher > 0;
}

/* --- strikes ------------------------------------------------------------------------------------------------------ */

static bool ended(const struct storm_seat *seat)
{
    return atomic_load(&seat->state) > STORM_RUNS;
}

static void lower(int pid, int which, rlim_t soft)
{
    struct rlimit limit;

    if (prlimit(pid, (__rlimit_resource_t)which, NULL, &limit) != 0)
        return;
    limit.rlim_cur = soft < limit.rlim_max ? soft : limit.rlim_max;
    prlimit(pid, (__rlimit_resource_t)which, &limit, NULL);
}

static rlim_t address_space(int pid)
{
    char path[64];
    unsigned long pages = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/statm", pid);
    file = fopen(path, "r");
    if (file && fscanf(file, "%lu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

static rlim_t open_descriptors(int pid)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    return (rlim_t)count_entries(path);
}

/* What hits a process hits all ranks that are its threads. */
static void mark(struct conductor *c, int rank, enum strike strike)
{
    bool all = strike == STRIKE_LAUNCHER ||
               (c->storm->mode == MODE_THREADS && strike != STRIKE_ABORT && strike != STRIKE_LEAVE);

    for (int r = 0; r < c->storm->nranks; r++) {
        struct storm_seat *seat = &c->table->seat[r];
        uint64_t none = 0;

        if (r != rank && !all)
            continue;
        atomic_compare_exchange_strong(&seat->struck_ns[strike], &none, now_ns());
        if (atomic_load(&seat->calls) <= CALLS_BEFORE_SEEN)
            atomic_store(&seat->unseen, 1);
    }
}

static void strike(struct conductor *c, int i)
{
    const struct strike_plan *plan = &c->storm->faults[i];
    struct storm_seat *seat = &c->table->seat[plan->rank];
    int pid = atomic_load(&seat->pid);

    mark(c, plan->rank, plan->strike);
    switch (plan->strike) {
    case STRIKE_KILL:
    case STRIKE_CRASH:
        kill(pid, plan->strike == STRIKE_KILL ? SIGKILL : plan->detail);
        /* It does not act on the signal before it goes on. */
        if (c->stopped[plan->rank])
            kill(pid, SIGCONT);
        c->dead[plan->rank] = true;
        break;
    case STRIKE_STOP:
        c->stopped_generation[plan->rank] = atomic_load(&seat->generation);
        c->stopped[plan->rank] = true;
        kill(pid, SIGSTOP);
        break;
    case STRIKE_PAUSE:
        if (c->stopped[plan->rank])
            break;
        kill(pid, SIGSTOP);
        c->stopped[plan->rank] = true;
        c->strikes[i].pause_end_ns = now_ns() + (uint64_t)plan->detail * 1000000u;
        break;
    case STRIKE_ABORT:
        syscall(SYS_tgkill, pid, atomic_load(&seat->tid), SIGUSR1);
        break;
    case STRIKE_LEAVE:
        atomic_store(&seat->leave, 1);
        break;
    case STRIKE_DESCRIPTORS:
        lower(pid, RLIMIT_NOFILE, open_descriptors(pid) + (rlim_t)plan->detail);
        break;
    case STRIKE_MEMORY:
        lower(pid, RLIMIT_AS, address_space(pid) + (rlim_t)plan->detail);
        break;
    case STRIKE_FILE_SIZE:
        lower(pid, RLIMIT_FSIZE, (rlim_t)plan->detail);
        break;
    default:
        c->watch.launcher_killed = true;
        kill(c->launcher, SIGKILL);
        /* Who is stopped would not notice. */
        for (int rank = 0; c->storm->mode == MODE_MPI && rank < c->storm->nranks; rank++)
            if (c->stopped[rank])
                kill(atomic_load(&c->table->seat[rank].pid), SIGCONT);
        break;
    }
}

static bool is_due(struct conductor *c, int i)
{
    const struct strike_plan *plan = &c->storm->faults[i];
    struct strike_state *state = &c->strikes[i];
    struct storm_seat *seat = &c->table->seat[plan->rank];
    uint32_t calls = atomic_load(&seat->calls), from = (uint32_t)plan->calls;

    if (state->due_known)
        return now_ns() >= state->due_ns;
    if (!atomic_load(&seat->pid))
        return false;
    if (plan->when == WHEN_WITH) {
        state->due_known = c->strikes[i - 1].due_known || c->strikes[i - 1].void_;
    } else if (plan->when == WHEN_SHRINK) {
        state->due_known = atomic_load(&seat->shrinks) > 0 || calls >= STALL_CALLS;
    } else {
        atomic_store(&seat->wake, from);
        state->due_known = calls >= from;
    }
    state->due_ns = now_ns() + (uint64_t)plan->delay_us * 1000u;
    return false;
}

/* ret: when the next one is due, at most in LOOK_MS. */
static uint64_t strike_what_is_due(struct conductor *c)
{
    uint64_t next_ns = now_ns() + LOOK_MS * 1000000u;

    for (int i = 0; i < c->storm->n_faults; i++) {
        const struct strike_plan *plan = &c->storm->faults[i];
        struct strike_state *state = &c->strikes[i];

        if (state->struck || state->void_)
            continue;
        if (!c->launcher || ended(&c->table->seat[plan->rank]) || c->dead[plan->rank]) {
            state->void_ = true;
            c->verdict->void_faults++;
            continue;
        }
        if (is_due(c, i)) {
            strike(c, i);
            state->struck = true;
            c->verdict->faults++;
            for (int rank = 0; rank < c->storm->nranks; rank++)
                c->calls_at_last_strike[rank] = atomic_load(&c->table->seat[rank].calls);
        } else if (state->due_known && state->due_ns < next_ns) {
            next_ns = state->due_ns;
        }
    }
    return next_ns;
}

/* The others have gone on without the stopped rank, or cannot. */
static bool others_went_on(const struct conductor *c, int stopped)
{
    for (int rank = 0; rank < c->storm->nranks; rank++) {
        const struct storm_seat *seat = &c->table->seat[rank];

        if (rank == stopped || c->stopped[rank] || c->dead[rank] || ended(seat))
            continue;
        if (atomic_load(&seat->generation) <= c->stopped_generation[stopped])
            return false;
    }
    return true;
}

static void resume(struct conductor *c)
{
    for (int i = 0; i < c->storm->n_faults; i++) {
        const struct strike_plan *plan = &c->storm->faults[i];
        struct strike_state *state = &c->strikes[i];
        bool over = plan->strike == STRIKE_PAUSE ? now_ns() >= state->pause_end_ns : others_went_on(c, plan->rank);

        if (!state->struck || !c->stopped[plan->rank] || !over)
            continue;
        if (plan->strike == STRIKE_STOP || (plan->strike == STRIKE_PAUSE && state->pause_end_ns)) {
            /* A pause that ends must not end a stop that came in between. */
            bool held = plan->strike == STRIKE_PAUSE && atomic_load(&c->table->seat[plan->rank].struck_ns[STRIKE_STOP]);

            state->pause_end_ns = UINT64_MAX;
            if (held)
                continue;
            c->stopped[plan->rank] = false;
            kill(atomic_load(&c->table->seat[plan->rank].pid), SIGCONT);
        }
    }
}

/* Nobody is struck any more, and whoever goes on has made some calls since. */
static void end_if_over(struct conductor *c)
{
    if (atomic_load(&c->table->end))
        return;
    for (int i = 0; i < c->storm->n_faults; i++)
        if (!c->strikes[i].struck && !c->strikes[i].void_)
            return;
    for (int rank = 0; rank < c->storm->nranks; rank++) {
        const struct storm_seat *seat = &c->table->seat[rank];

        if (!ended(seat) && !c->dead[rank] && !c->stopped[rank] &&
            atomic_load(&seat->calls) < c->calls_at_last_strike[rank] + SETTLE_CALLS)
            return;
    }
    atomic_store(&c->table->end, 1);
}

/* --- watching ----------------------------------------------------------------------------------------------------- */

static void note_delay(struct storm_delays *delays, uint64_t delay_ns)
{
    int last = delays->n - 1;

    /* An instant in the middle of a span without any says nothing new. */
    if (last > 0 && delays->sample[last].delay_ns == delay_ns && delays->sample[last - 1].delay_ns == delay_ns)
        delays->n--;
    if (delays->n == STORM_DELAYS)
        delays->n--;
    delays->sample[delays->n].at_ns = now_ns();
    delays->sample[delays->n++].delay_ns = delay_ns;
}

static void read_run_delay(struct conductor *c, int rank)
{
    char path[64];
    unsigned long long ran, delayed;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/task/%d/schedstat", atomic_load(&c->table->seat[rank].pid),
             atomic_load(&c->table->seat[rank].tid));
    file = fopen(path, "r");
    if (!file)
        return;
    if (fscanf(file, "%llu %llu", &ran, &delayed) == 2)
        note_delay(&c->watch.delays[rank], delayed);
    fclose(file);
}

static void kill_everything(struct conductor *c)
{
    if (c->launcher)
        kill(c->launcher, SIGKILL);
    for (int rank = 0; rank < c->storm->nranks; rank++)
        if (atomic_load(&c->table->seat[rank].pid))
            kill(atomic_load(&c->table->seat[rank].pid), SIGKILL);
}

static void give_up(struct conductor *c, int rank, const char *what)
{
    char who[32];

    snprintf(who, sizeof(who), "storm %d rank %d", c->storm->number, rank);
    show_process(atomic_load(&c->table->seat[rank].pid), who);
    storm_complain(c->verdict, WRONG_HANG, "rank %d %s %s in group %d", rank, what,
                   call_name((enum call)atomic_load(&c->table->seat[rank].call)),
                   atomic_load(&c->table->seat[rank].generation));
    c->watch.hung = true;
}

/* Time counts only where it passes for this process, too, and while the rank is not stopped. */
static void look_for_hangs(struct conductor *c)
{
    uint64_t now = now_ns(), passed_ms = (now - c->last_look_ns) / 1000000u;
    int tick_ms = passed_ms > MOST_TICK_MS ? MOST_TICK_MS : (int)passed_ms;
    int limit_ms = HANG_MS + 2 * c->storm->nranks * (c->storm->timeout_ms < 5000 ? c->storm->timeout_ms : 5000);
    bool hangs = false;

    if (passed_ms == 0)
        return;
    c->last_look_ns = now;
    if (passed_ms > MOST_TICK_MS)
        c->own_delay_ns += (passed_ms - MOST_TICK_MS) * 1000000u;
    note_delay(&c->watch.own_delays, c->own_delay_ns);
    for (int rank = 0; rank < c->storm->nranks && !c->watch.hung; rank++) {
        struct storm_seat *seat = &c->table->seat[rank];
        uint32_t calls = atomic_load(&seat->calls);
        bool idle = !atomic_load(&seat->call) || c->stopped[rank] || c->dead[rank] || c->watch.launcher_killed;

        if (idle || calls != c->calls_seen[rank])
            c->in_call_ms[rank] = 0;
        else
            c->in_call_ms[rank] += tick_ms;
        c->calls_seen[rank] = calls;
        if (c->in_call_ms[rank] > limit_ms) {
            give_up(c, rank, "does not return from");
            hangs = true;
        }
    }
    if (c->watch.launcher_killed || !c->launcher)
        c->ending_ms += tick_ms;
    if (c->ending_ms > HANG_MS && !c->watch.hung) {
        storm_complain(c->verdict, WRONG_LEFTOVER, "processes are left after the launcher's end");
        c->watch.hung = hangs = true;
    }
    if (hangs)
        kill_everything(c);
}

/* Also where its parent has not waited for it yet. */
static bool has_ended(int pid)
{
    char path[64], line[256], state = 'X';
    FILE *file;
    char *behind;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    file = fopen(path, "r");
    if (file && fgets(line, sizeof(line), file)) {
        behind = strrchr(line, ')');
        state = behind && behind[1] ? behind[2] : 'X';
    }
    if (file)
        fclose(file);
    return state == 'Z' || state == 'X';
}

/* Who has died of something else than our signals is not waited for. */
static void look_for_deaths(struct conductor *c)
{
    for (int rank = 0; rank < c->storm->nranks; rank++) {
        int pid = atomic_load(&c->table->seat[rank].pid);

        if (pid && !ended(&c->table->seat[rank]) && !c->dead[rank] && has_ended(pid))
            c->dead[rank] = true;
    }
}

/* true: nothing of the storm runs any more. */
static bool reap(struct conductor *c)
{
    int how, pid;

    while ((pid = waitpid(-1, &how, WNOHANG)) > 0) {
        if (pid == c->launcher) {
            c->launcher = 0;
            c->launcher_how = how;
        }
        for (int rank = 0; rank < c->storm->nranks; rank++)
            if (pid == atomic_load(&c->table->seat[rank].pid))
                c->watch.how[rank] = how;
    }
    return pid < 0 && errno == ECHILD;
}

static void wait_for_progress(struct conductor *c, uint64_t until_ns)
{
    uint32_t seen = atomic_load(&c->table->wake);
    uint64_t now = now_ns();
    struct timespec span = {.tv_nsec = now < until_ns ? (long)(until_ns - now) : 1000};

    syscall(SYS_futex, &c->table->wake, FUTEX_WAIT, seen, &span, NULL, 0);
}

static void watch(struct conductor *c)
{
    c->last_look_ns = now_ns();
    for (int i = 0; !reap(c); i++) {
        uint64_t next_ns = strike_what_is_due(c);

        resume(c);
        if (i % 8 == 0)
            look_for_deaths(c);
        end_if_over(c);
        look_for_hangs(c);
        for (int rank = 0; i % 16 == 0 && rank < c->storm->nranks; rank++)
            read_run_delay(c, rank);
        wait_for_progress(c, next_ns);
    }
}

/* mpirun's own files, which it does not remove when it is killed. */
static void remove_folder(const struct conductor *c)
{
    char command[128];

    if (!c->folder[0])
        return;
    unlink(c->file);
    unlink(c->said);
    if (rmdir(c->folder) == 0)
        return;
    snprintf(command, sizeof(command), "rm -rf '%s'", c->folder);
    if (system(command) != 0)
        storm_complain(c->verdict, WRONG_OTHER, "%s cannot be removed", c->folder);
}

/* The lines that say something, of the first that mpirun wrote: it frames them by others. */
static void read_said(const struct conductor *c, char *ret_text, size_t bytes)
{
    FILE *file = fopen(c->said, "r");
    char line[256];
    size_t used = 0;

    ret_text[0] = '\0';
    while (file && used + 1 < bytes && fgets(line, sizeof(line), file)) {
        line[strcspn(line, "\n")] = '\0';
        if (strspn(line, "-= ") < strlen(line))
            used += (size_t)snprintf(ret_text + used, bytes - used, "%s%s", used ? " " : "", line);
    }
    if (file)
        fclose(file);
}

/* mpirun has ended by itself, and no rank has begun: what it said is the reason, and no fault of the ranks. */
static bool has_no_ranks(const struct conductor *c)
{
    char said[600];

    if (c->storm->mode != MODE_MPI || c->watch.launcher_killed || c->watch.hung ||
        (WIFEXITED(c->launcher_how) && WEXITSTATUS(c->launcher_how) == CODE_NO_LIMITS))
        return false;
    for (int rank = 0; rank < c->storm->nranks; rank++)
        if (atomic_load(&c->table->seat[rank].pid))
            return false;
    read_said(c, said, sizeof(said));
    if (WIFSIGNALED(c->launcher_how))
        storm_complain(c->verdict, WRONG_OTHER, "mpirun died of signal %d before any rank began: %s",
                       WTERMSIG(c->launcher_how), said);
    else
        storm_complain(c->verdict, WRONG_OTHER, "mpirun ended with code %d before any rank began: %s",
                       WEXITSTATUS(c->launcher_how), *said ? said : "it said nothing");
    return true;
}

static bool is_loaded(void)
{
    FILE *file = fopen("/proc/loadavg", "r");
    double average = 0;
    int runnable = 0;

    if (file && fscanf(file, "%lf %*f %*f %d", &average, &runnable) != 2)
        runnable = 0;
    if (file)
        fclose(file);
    return average > MOST_LOAD || runnable > MOST_LOAD;
}

void storm_conduct(const struct storm *storm, const struct storm_programs *programs, struct storm_verdict *ret_verdict)
{
    static struct conductor c; /* too large for a stack; one storm a process */
    bool own_shm = storm_isolate();
    struct rusage usage;
    int files;

    c = (struct conductor){.storm = storm, .programs = programs, .verdict = ret_verdict};
    ret_verdict->loaded = is_loaded();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    files = count_entries("/dev/shm");
    if (!start(&c)) {
        storm_complain(ret_verdict, WRONG_OTHER, "the group cannot be started: %s", strerror(errno));
        return;
    }
    watch(&c);
    if (WIFEXITED(c.launcher_how) && WEXITSTATUS(c.launcher_how) == CODE_NO_LIMITS)
        storm_complain(ret_verdict, WRONG_OTHER, "the limits of this storm are not possible here");
    /* Segments of Open MPI stay when its ranks are killed. */
    if (own_shm && storm->mode != MODE_MPI && count_entries("/dev/shm") != files)
        storm_complain(ret_verdict, WRONG_LEFTOVER, "%d entries in /dev/shm, %d before", count_entries("/dev/shm"),
                       files);
    /* mpirun is not ours: Open MPI's at times crashes when two of its ranks are killed at once. */
    if (WIFSIGNALED(c.launcher_how) && !c.watch.launcher_killed && !c.watch.hung && storm->mode == MODE_MPI)
        ret_verdict->mpirun_crashes++;
    else if (WIFSIGNALED(c.launcher_how) && !c.watch.launcher_killed && !c.watch.hung)
        storm_complain(ret_verdict, WRONG_OTHER, "the launcher died of signal %d", WTERMSIG(c.launcher_how));
    ret_verdict->no_ranks = has_no_ranks(&c);
    ret_verdict->orphans = atomic_load(&c.table->orphans);
    if (!c.watch.hung && !ret_verdict->no_ranks)
        storm_judge(c.table, &c.watch, ret_verdict);
    storm_list_outcomes(c.table, &c.watch, ret_verdict->history, sizeof(ret_verdict->history));
    getrusage(RUSAGE_CHILDREN, &usage);
    ret_verdict->cpu_ms = (int)((usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
                                (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000);
    munmap(c.table, sizeof(*c.table));
    remove_folder(&c);
}
