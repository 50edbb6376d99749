/* SPDX-License-Identifier: Apache-2.0 */
/* The controller of a storm: a process of its own, the subreaper of all processes that the storm starts. */
#include "storm.h"
#include "tests/local_ranks.h"

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
    POLL_MS = 3,           /* between two polls of the ranks */
    MOST_TICK_MS = 50,     /* fraction of the time between two polls: more means that this process was not scheduled */
    HANG_MS = 40000,       /* above all deadlines that a call may wait for */
    SETTLE_CALLS = 12,     /* calls of the ranks after the last fault */
    STALL_CALLS = 60,      /* no group has failed: inject now what was to happen in the creation of the next */
    CALLS_BEFORE_SEEN = 2, /* ep_comm_new() and its first all-gather have begun */
    CODE_NO_LIMITS = 76,   /* of a launcher that cannot limit itself */
};

struct injection_state {
    bool due_known, injected, void_;
    uint64_t due_ns, pause_end_ns;
};

struct controller {
    const struct storm *storm;
    struct storm_table *table;
    int launcher; /* 0: it has ended */
    int launcher_how;
    bool limits_failed;
    struct injection_state injections[STORM_FAULTS];
    bool stopped[MAX_RANKS];
    int stopped_generation[MAX_RANKS];
    bool dead[MAX_RANKS]; /* by a signal of ours */
    uint64_t last_look_ns, own_delay_ns;
    int in_call_ms[MAX_RANKS];
    uint32_t calls_seen[MAX_RANKS];
    uint32_t calls_at_last_injection[MAX_RANKS];
    int ending_ms; /* since the ranks should have ended */
    struct storm_watch watch;
    struct storm_result *result;
};

void storm_complain(struct storm_result *result, enum storm_kind kind, const char *format, ...)
{
    static const char *const kinds[] = {"hang", "leftover", "wrong name", "changed status", "wrong result", "other"};
    int *counts[] = {&result->hangs,   &result->leftovers, &result->names,
                     &result->changes, &result->wrong,     &result->others};
    size_t used = strlen(result->text);
    va_list args;

    ++*counts[kind];
    if (used + 64 >= sizeof(result->text))
        return;
    used += (size_t)snprintf(result->text + used, sizeof(result->text) - used, "\n     %s: ", kinds[kind]);
    va_start(args, format);
    vsnprintf(result->text + used, sizeof(result->text) - used, format, args);
    va_end(args);
}

/* --- the group ---------------------------------------------------------------------------------------------------- */

static int launch(struct storm_table *table)
{
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];
    struct storm_resources before;
    ep_status status;

    if (!storm_limit(table->storm.limits))
        return CODE_NO_LIMITS;
    before = storm_resources();
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
    storm_check_resources(&before, table->launcher_left_behind, sizeof(table->launcher_left_behind));
    atomic_store(&table->launched, 1 + (int)status);
    return 0;
}

static bool start(struct controller *c)
{
    c->table = mmap(NULL, sizeof(*c->table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c->table == MAP_FAILED)
        return false;
    c->table->storm = *c->storm;
    fflush(NULL);
    c->launcher = fork();
    if (c->launcher == 0) {
        /* A storm that is terminated from outside leaves no ranks behind. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(launch(c->table));
    }
    return c->launcher > 0;
}

/*
 * --- injection -----------------------------------------------------------------------------------------------------
 */

static bool ended(const struct storm_rank_context *context)
{
    return atomic_load(&context->state) > STORM_RUNS;
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

/* A fault of a process affects all ranks that are its threads. */
static void mark(struct controller *c, int rank, enum injection injection)
{
    bool all = injection == INJECT_LAUNCHER ||
               (c->storm->mode == MODE_THREADS && injection != INJECT_ABORT && injection != INJECT_LEAVE);

    for (int r = 0; r < c->storm->nranks; r++) {
        struct storm_rank_context *context = &c->table->ranks[r];
        uint64_t none = 0;

        if (r != rank && !all)
            continue;
        atomic_compare_exchange_strong(&context->injected_ns[injection], &none, now_ns());
        if (atomic_load(&context->calls) <= CALLS_BEFORE_SEEN)
            atomic_store(&context->unseen, 1);
    }
}

static void inject(struct controller *c, int i)
{
    const struct injection_plan *plan = &c->storm->faults[i];
    struct storm_rank_context *context = &c->table->ranks[plan->rank];
    int pid = atomic_load(&context->pid);

    mark(c, plan->rank, plan->injection);
    switch (plan->injection) {
    case INJECT_KILL:
    case INJECT_CRASH:
        kill(pid, plan->injection == INJECT_KILL ? SIGKILL : plan->detail);
        /* It does not handle the signal before it is resumed. */
        if (c->stopped[plan->rank])
            kill(pid, SIGCONT);
        c->dead[plan->rank] = true;
        break;
    case INJECT_STOP:
        c->stopped_generation[plan->rank] = atomic_load(&context->generation);
        c->stopped[plan->rank] = true;
        kill(pid, SIGSTOP);
        break;
    case INJECT_PAUSE:
        if (c->stopped[plan->rank])
            break;
        kill(pid, SIGSTOP);
        c->stopped[plan->rank] = true;
        c->injections[i].pause_end_ns = now_ns() + (uint64_t)plan->detail * 1000000u;
        break;
    case INJECT_ABORT:
        syscall(SYS_tgkill, pid, atomic_load(&context->tid), SIGUSR1);
        break;
    case INJECT_LEAVE:
        atomic_store(&context->leave, 1);
        break;
    case INJECT_DESCRIPTORS:
        lower(pid, RLIMIT_NOFILE, open_descriptors(pid) + (rlim_t)plan->detail);
        break;
    case INJECT_MEMORY:
        lower(pid, RLIMIT_AS, address_space(pid) + (rlim_t)plan->detail);
        break;
    case INJECT_FILE_SIZE:
        lower(pid, RLIMIT_FSIZE, (rlim_t)plan->detail);
        break;
    default:
        c->watch.launcher_killed = true;
        kill(c->launcher, SIGKILL);
        break;
    }
}

static bool is_due(struct controller *c, int i)
{
    const struct injection_plan *plan = &c->storm->faults[i];
    struct injection_state *state = &c->injections[i];
    struct storm_rank_context *context = &c->table->ranks[plan->rank];
    uint32_t calls = atomic_load(&context->calls), from = (uint32_t)plan->calls;

    if (state->due_known)
        return now_ns() >= state->due_ns;
    if (!atomic_load(&context->pid))
        return false;
    if (plan->when == WHEN_WITH) {
        state->due_known = c->injections[i - 1].due_known || c->injections[i - 1].void_;
    } else if (plan->when == WHEN_NEXT) {
        state->due_known = atomic_load(&context->generation) > 0 || calls >= STALL_CALLS;
    } else {
        atomic_store(&context->wake, from);
        state->due_known = calls >= from;
    }
    state->due_ns = now_ns() + (uint64_t)plan->delay_us * 1000u;
    return false;
}

/* Returns when the next one is due, at most in POLL_MS. */
static uint64_t inject_due(struct controller *c)
{
    uint64_t next_ns = now_ns() + POLL_MS * 1000000u;

    for (int i = 0; i < c->storm->n_faults; i++) {
        const struct injection_plan *plan = &c->storm->faults[i];
        struct injection_state *state = &c->injections[i];

        if (state->injected || state->void_)
            continue;
        if (!c->launcher || ended(&c->table->ranks[plan->rank]) || c->dead[plan->rank]) {
            state->void_ = true;
            c->result->void_faults++;
            continue;
        }
        if (is_due(c, i)) {
            inject(c, i);
            state->injected = true;
            c->result->faults++;
            for (int rank = 0; rank < c->storm->nranks; rank++)
                c->calls_at_last_injection[rank] = atomic_load(&c->table->ranks[rank].calls);
        } else if (state->due_known && state->due_ns < next_ns) {
            next_ns = state->due_ns;
        }
    }
    return next_ns;
}

/* True if the others have continued without the stopped rank, or cannot. */
static bool others_went_on(const struct controller *c, int stopped)
{
    for (int rank = 0; rank < c->storm->nranks; rank++) {
        const struct storm_rank_context *context = &c->table->ranks[rank];

        if (rank == stopped || c->stopped[rank] || c->dead[rank] || ended(context))
            continue;
        if (atomic_load(&context->generation) <= c->stopped_generation[stopped])
            return false;
    }
    return true;
}

static void resume(struct controller *c)
{
    for (int i = 0; i < c->storm->n_faults; i++) {
        const struct injection_plan *plan = &c->storm->faults[i];
        struct injection_state *state = &c->injections[i];
        bool over = plan->injection == INJECT_PAUSE ? now_ns() >= state->pause_end_ns : others_went_on(c, plan->rank);

        if (!state->injected || !c->stopped[plan->rank] || !over)
            continue;
        if (plan->injection == INJECT_STOP || (plan->injection == INJECT_PAUSE && state->pause_end_ns)) {
            /* The end of a pause must not end a stop that was injected meanwhile. */
            bool held =
                plan->injection == INJECT_PAUSE && atomic_load(&c->table->ranks[plan->rank].injected_ns[INJECT_STOP]);

            state->pause_end_ns = UINT64_MAX;
            if (held)
                continue;
            c->stopped[plan->rank] = false;
            kill(atomic_load(&c->table->ranks[plan->rank].pid), SIGCONT);
        }
    }
}

/* True if no injections are left, and all running ranks have made some calls since. */
static void end_if_over(struct controller *c)
{
    if (atomic_load(&c->table->end))
        return;
    for (int i = 0; i < c->storm->n_faults; i++)
        if (!c->injections[i].injected && !c->injections[i].void_)
            return;
    for (int rank = 0; rank < c->storm->nranks; rank++) {
        const struct storm_rank_context *context = &c->table->ranks[rank];

        if (!ended(context) && !c->dead[rank] && !c->stopped[rank] &&
            atomic_load(&context->calls) < c->calls_at_last_injection[rank] + SETTLE_CALLS)
            return;
    }
    atomic_store(&c->table->end, 1);
}

/* --- watching ----------------------------------------------------------------------------------------------------- */

static void note_delay(struct storm_delays *delays, uint64_t delay_ns)
{
    int last = delays->n - 1;

    /* A sample inside a span without delays adds no information. */
    if (last > 0 && delays->sample[last].delay_ns == delay_ns && delays->sample[last - 1].delay_ns == delay_ns)
        delays->n--;
    if (delays->n == STORM_DELAYS)
        delays->n--;
    delays->sample[delays->n].at_ns = now_ns();
    delays->sample[delays->n++].delay_ns = delay_ns;
}

static void read_run_delay(struct controller *c, int rank)
{
    char path[64];
    unsigned long long ran, delayed;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/task/%d/schedstat", atomic_load(&c->table->ranks[rank].pid),
             atomic_load(&c->table->ranks[rank].tid));
    file = fopen(path, "r");
    if (!file)
        return;
    if (fscanf(file, "%llu %llu", &ran, &delayed) == 2)
        note_delay(&c->watch.delays[rank], delayed);
    fclose(file);
}

static void kill_everything(struct controller *c)
{
    if (c->launcher)
        kill(c->launcher, SIGKILL);
    for (int rank = 0; rank < c->storm->nranks; rank++)
        if (atomic_load(&c->table->ranks[rank].pid))
            kill(atomic_load(&c->table->ranks[rank].pid), SIGKILL);
}

static void give_up(struct controller *c, int rank, const char *what)
{
    char who[32];

    snprintf(who, sizeof(who), "storm %d rank %d", c->storm->number, rank);
    show_process(atomic_load(&c->table->ranks[rank].pid), who);
    storm_complain(c->result, WRONG_HANG, "rank %d %s %s in group %d", rank, what,
                   call_name((enum call)atomic_load(&c->table->ranks[rank].call)),
                   atomic_load(&c->table->ranks[rank].generation));
    c->watch.hung = true;
}

/* Time counts only while this process is scheduled, too, and while the rank is not stopped. */
static void look_for_hangs(struct controller *c)
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
        struct storm_rank_context *context = &c->table->ranks[rank];
        uint32_t calls = atomic_load(&context->calls);
        bool idle = !atomic_load(&context->call) || c->stopped[rank] || c->dead[rank] || c->watch.launcher_killed;

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
        storm_complain(c->result, WRONG_LEFTOVER, "processes are left after the launcher's end");
        c->watch.hung = hangs = true;
    }
    if (hangs)
        kill_everything(c);
}

/* Also if its parent has not waited for it yet. */
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

/* The others learn of each end; and a rank that died of something else than our signals is not waited for. */
static void look_for_deaths(struct controller *c)
{
    for (int rank = 0; rank < c->storm->nranks; rank++) {
        int pid = atomic_load(&c->table->ranks[rank].pid);

        if (!pid || !has_ended(pid))
            continue;
        c->dead[rank] = c->dead[rank] || !ended(&c->table->ranks[rank]);
        atomic_fetch_or(&c->table->regroup.ended, 1u << rank);
    }
}

/* true: no process of the storm runs any more. */
static bool reap(struct controller *c)
{
    int how, pid;

    while ((pid = waitpid(-1, &how, WNOHANG)) > 0) {
        if (pid == c->launcher) {
            c->launcher = 0;
            c->launcher_how = how;
        }
        for (int rank = 0; rank < c->storm->nranks; rank++)
            if (pid == atomic_load(&c->table->ranks[rank].pid))
                c->watch.how[rank] = how;
    }
    return pid < 0 && errno == ECHILD;
}

static void wait_for_progress(struct controller *c, uint64_t until_ns)
{
    uint32_t seen = atomic_load(&c->table->wake);
    uint64_t now = now_ns();
    struct timespec span = {.tv_nsec = now < until_ns ? (long)(until_ns - now) : 1000};

    syscall(SYS_futex, &c->table->wake, FUTEX_WAIT, seen, &span, NULL, 0);
}

static void watch(struct controller *c)
{
    c->last_look_ns = now_ns();
    for (int i = 0; !reap(c); i++) {
        uint64_t next_ns = inject_due(c);

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

static bool is_loaded(void)
{
    FILE *file = fopen("/proc/loadavg", "r");
    double average = 0;
    int runnable = 0;

    if (file && fscanf(file, "%lf %*f %*f %d", &average, &runnable) != 2)
        runnable = 0;
    if (file)
        fclose(file);
    return average > MAX_LOAD || runnable > MAX_LOAD;
}

void storm_run(const struct storm *storm, struct storm_result *ret_result)
{
    static struct controller c; /* too large for a stack; one storm a process */
    bool own_shm = storm_isolate();
    struct rusage usage;
    int files;

    c = (struct controller){.storm = storm, .result = ret_result};
    ret_result->loaded = is_loaded();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    files = count_entries("/dev/shm");
    if (!start(&c)) {
        storm_complain(ret_result, WRONG_OTHER, "the group cannot be started: %s", strerror(errno));
        return;
    }
    watch(&c);
    if (WIFEXITED(c.launcher_how) && WEXITSTATUS(c.launcher_how) == CODE_NO_LIMITS)
        storm_complain(ret_result, WRONG_OTHER, "the limits of this storm are not possible here");
    if (own_shm && count_entries("/dev/shm") != files)
        storm_complain(ret_result, WRONG_LEFTOVER, "%d entries in /dev/shm, %d before", count_entries("/dev/shm"),
                       files);
    if (WIFSIGNALED(c.launcher_how) && !c.watch.launcher_killed && !c.watch.hung)
        storm_complain(ret_result, WRONG_OTHER, "the launcher died of signal %d", WTERMSIG(c.launcher_how));
    if (!c.watch.hung)
        storm_check(c.table, &c.watch, ret_result);
    storm_list_outcomes(c.table, &c.watch, ret_result->history, sizeof(ret_result->history));
    getrusage(RUSAGE_CHILDREN, &usage);
    ret_result->cpu_ms = (int)((usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
                               (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000);
    munmap(c.table, sizeof(*c.table));
}
