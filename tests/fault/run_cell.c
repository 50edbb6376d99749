/* SPDX-License-Identifier: Apache-2.0 */
#include "fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

void complain(struct rank_context *context, enum flaw flaw, const char *format, ...)
{
    size_t used = strlen(context->complaint);
    va_list args;

    atomic_fetch_or(&context->flaws, (unsigned)flaw);
    if (used + 4 >= sizeof(context->complaint))
        return;
    if (used)
        used += (size_t)snprintf(context->complaint + used, sizeof(context->complaint) - used, "; ");
    va_start(args, format);
    vsnprintf(context->complaint + used, sizeof(context->complaint) - used, format, args);
    va_end(args);
}

/* --- what is left ----------------------------------------------------------------------------------------------- */

bool shm_is_ours;

struct resources count_resources(void)
{
    return (struct resources){.fds = count_entries("/proc/self/fd"),
                              .threads = count_entries("/proc/self/task"),
                              .shm = shm_is_ours ? count_entries("/dev/shm") : 0};
}

bool check_resources(const struct resources *before, char *ret_why, size_t bytes)
{
    struct resources now = {0};

    /* The kernel removes a joined thread from /proc some time after the join: seconds under load. */
    for (int i = 0; i < 5000; i++) {
        now = count_resources();
        if (memcmp(&now, before, sizeof(now)) == 0)
            return true;
        sleep_us(2000);
    }
    snprintf(ret_why, bytes, "descriptors %d before and %d now, threads %d and %d, entries in /dev/shm %d and %d",
             before->fds, now.fds, before->threads, now.threads, before->shm, now.shm);
    return false;
}

/* --- how busy the machine is ------------------------------------------------------------------------------------ */

enum { MAX_LOAD_FACTOR = 6 }; /* limit, because waiting would take minutes: cells that need more are repeated */

int load_factor = 1;
int slow_factor = 1;
int n_again, n_again_unloaded;
static bool loaded; /* more than MAX_LOAD */

void measure_load(void)
{
    int most = 1, processors = (int)sysconf(_SC_NPROCESSORS_ONLN);
    double average;

    /* The number of runnable threads, including this one, is a snapshot: the maximum of several. */
    for (int i = 0; i < 5; i++) {
        FILE *file = fopen("/proc/loadavg", "r");
        int runnable = 0;

        if (file && fscanf(file, "%*f %*f %*f %d", &runnable) == 1 && runnable > most)
            most = runnable;
        if (file)
            fclose(file);
        sleep_us(1000);
    }
    load_factor = 1 + (most - 1) / (processors > 0 ? 2 * processors : 2);
    if (load_factor > MAX_LOAD_FACTOR)
        load_factor = MAX_LOAD_FACTOR;
    load_factor *= slow_factor;
    loaded = most > MAX_LOAD || (getloadavg(&average, 1) == 1 && average > MAX_LOAD);
}

/* --- a cell ----------------------------------------------------------------------------------------------------- */

struct cell_run {
    const struct cell *cell;
    struct table *table;
    int pid[RANKS]; /* 0: ended */
    int how[RANKS]; /* as waitpid() said */
    bool hung;
    struct delay delay[RANKS];
};

static void report(struct cell_run *c, int rank, enum flaw flaw, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void report(struct cell_run *c, int rank, enum flaw flaw, const char *format, ...)
{
    char text[256];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    complain(&c->table->ranks[rank], flaw, "%s", text);
}

static void start(struct cell_run *c, ep_boot_shm *place)
{
    fflush(NULL);
    for (int rank = 0; rank < RANKS; rank++) {
        c->pid[rank] = fork();
        if (c->pid[rank] < 0) {
            c->pid[rank] = 0;
            report(c, rank, FLAW_WRONG, "fork: %s", strerror(errno));
        }
        if (c->pid[rank] == 0) {
            ep_boot boot;
            int code = 1;

            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (ep_boot_shm_join(place, rank, &boot) == EP_OK)
                code = rank_main(c->table, &boot);
            ep_boot_shm_free(place);
            munmap(c->table, sizeof(*c->table));
            exit(code);
        }
    }
}

/* Resumes the victim when the others have continued without it. */
static void resume_victim(struct cell_run *c)
{
    if (c->cell->fault != FAULT_STOP || atomic_load(&c->table->resumed) || !atomic_load(&c->table->injected_ns))
        return;
    for (int rank = 0; rank < RANKS; rank++)
        if (rank != c->cell->victim && c->pid[rank] && atomic_load(&c->table->ranks[rank].state) == RANK_RUNNING)
            return;
    atomic_store(&c->table->resumed, 1);
    kill(c->pid[c->cell->victim], SIGCONT);
}

static void give_up(struct cell_run *c)
{
    char name[64];

    cell_name(c->cell, name, sizeof(name));
    fprintf(stderr, "%s hangs:\n", name);
    for (int rank = 0; rank < RANKS; rank++) {
        char who[24];

        snprintf(who, sizeof(who), "rank %d", rank);
        if (c->pid[rank]) {
            show_process(c->pid[rank], who);
            report(c, rank, FLAW_WRONG, "hangs");
            kill(c->pid[rank], SIGKILL);
        }
    }
    c->hung = true;
}

static bool has_ended(int pid)
{
    siginfo_t info = {0};

    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

static void watch(struct cell_run *c)
{
    uint64_t end_ns = now_ns() + (uint64_t)CELL_MS * 1000000u, look_ns = 0;
    int running = RANKS;

    while (running > 0) {
        bool look = now_ns() >= look_ns;

        running = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            bool ended = c->pid[rank] && has_ended(c->pid[rank]);

            if (c->pid[rank] && (look || ended))
                delay_sample(&c->delay[rank], c->pid[rank]);
            if (ended && waitpid(c->pid[rank], &c->how[rank], WNOHANG) == c->pid[rank]) {
                c->pid[rank] = 0;
                atomic_fetch_or(&c->table->regroup.ended, 1u << rank);
            }
            running += c->pid[rank] != 0;
        }
        if (look)
            look_ns = now_ns() + (uint64_t)TIMEOUT_MS * 1000000u / DELAY_SAMPLES;
        resume_victim(c);
        if (running && now_ns() > end_ns && !c->hung)
            give_up(c);
        if (running)
            sleep_us(1000);
    }
}

/* Checks the exit of each rank: killed as injected, the others regularly. */
static void check_ends(struct cell_run *c)
{
    for (int rank = 0; rank < RANKS; rank++) {
        bool victim = rank == c->cell->victim;
        int how = c->how[rank];

        if (victim && c->cell->fault == FAULT_KILL) {
            if (!WIFSIGNALED(how) || WTERMSIG(how) != SIGKILL)
                report(c, rank, FLAW_FOLLOWS, "was not killed: the fault did not happen");
        } else if (victim && c->cell->fault == FAULT_CRASH) {
            /* A sanitizer turns the signal into an exit. */
            if (!(WIFSIGNALED(how) && WTERMSIG(how) == SIGSEGV) && !(SANITIZED && WIFEXITED(how) && WEXITSTATUS(how)))
                report(c, rank, FLAW_FOLLOWS, "did not crash: the fault did not happen");
        } else if (WIFSIGNALED(how) && !c->hung) {
            report(c, rank, FLAW_WRONG, "died of signal %d", WTERMSIG(how));
        } else if (!WIFSIGNALED(how) && WEXITSTATUS(how) && !c->table->ranks[rank].complaint[0]) {
            report(c, rank, FLAW_WRONG, "ended with code %d", WEXITSTATUS(how));
        }
    }
    if (!atomic_load(&c->table->injected_ns))
        report(c, c->cell->victim, FLAW_FOLLOWS, "no fault was injected");
}

/* This process is a subreaper: remaining processes would now be its children. */
static void check_children(struct cell_run *c)
{
    int how, pid;

    while ((pid = waitpid(-1, &how, WNOHANG)) >= 0) {
        report(c, 0, FLAW_WRONG, pid ? "process %d was left" : "a process was left running", pid);
        if (pid == 0)
            break;
    }
}

void print_result(bool passed, const char *name, uint64_t begin_ns, const char *why)
{
    printf("%-4s %-32s %5d ms%s%s\n", passed ? "ok" : "FAIL", name, (int)((now_ns() - begin_ns) / 1000000u),
           *why ? "  " : "", why);
    fflush(stdout);
}

/*
 * Fraction of the deadline for which a thread must have been kept from running before a cell is repeated: for a time
 * limit, and for consequences of a missed deadline.
 */
enum { SLOW_PART = 8, MISSED_PART = 4, ATTEMPTS = 5 };

static uint64_t most_delay_ns(const struct cell_run *c)
{
    uint64_t most_ns = 0;

    for (int rank = 0; rank < RANKS; rank++)
        if (c->delay[rank].most_ns > most_ns)
            most_ns = c->delay[rank].most_ns;
    return most_ns;
}

/* True if all complaints are about time, and the scheduler statistics explain them. */
static bool was_starved(const struct cell_run *c)
{
    uint64_t delay_ns = most_delay_ns(c), timeout_ns = (uint64_t)TIMEOUT_MS * 1000000u;
    unsigned flaws = 0;

    for (int rank = 0; rank < RANKS; rank++)
        flaws |= atomic_load(&c->table->ranks[rank].flaws);
    if (c->hung || flaws & FLAW_WRONG)
        return false;
    if (flaws & FLAW_FOLLOWS)
        return flaws & FLAW_DEADLINE && delay_ns > timeout_ns / MISSED_PART;
    return delay_ns > timeout_ns / SLOW_PART;
}

/* *ret_again: repeat it with longer deadlines. */
static bool run_cell_once(const struct cell *cell, bool last, bool *ret_again)
{
    struct resources before = count_resources();
    struct cell_run c = {.cell = cell};
    ep_boot_shm *place;
    char why[RANKS * 1100] = "", left[128], name[64];
    uint64_t begin_ns = now_ns();
    size_t used = 0;

    *ret_again = false;
    c.table = mmap(NULL, sizeof(*c.table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cell_name(cell, name, sizeof(name));
    if (c.table == MAP_FAILED || ep_boot_shm_new(RANKS, &place) != EP_OK) {
        print_result(false, name, begin_ns, "no memory");
        return false;
    }
    c.table->cell = *cell;
    start(&c, place);
    watch(&c);
    check_ends(&c);
    check_children(&c);
    ep_boot_shm_free(place);
    if (!check_resources(&before, left, sizeof(left)))
        report(&c, 0, FLAW_WRONG, "parent: left behind: %s", left);
    for (int rank = 0; rank < RANKS; rank++)
        if (c.table->ranks[rank].complaint[0])
            used += (size_t)snprintf(why + used, sizeof(why) - used, "\n     rank %d: %s", rank,
                                     c.table->ranks[rank].complaint);
    *ret_again = used && !last && was_starved(&c);
    if (*ret_again)
        printf("     %s again with longer deadlines: a thread was not let run for %d of %d ms%s\n", name,
               (int)(most_delay_ns(&c) / 1000000u), TIMEOUT_MS, why);
    else
        print_result(used == 0, name, begin_ns, why);
    munmap(c.table, sizeof(*c.table));
    return used == 0;
}

bool run_cell(const struct cell *cell)
{
    bool passed = false, again = true;

    measure_load();
    for (int i = 1; again; i++) {
        passed = run_cell_once(cell, i == ATTEMPTS, &again);
        if (i == 1 && again) {
            n_again++;
            n_again_unloaded += !loaded;
        }
        load_factor *= 2;
    }
    return passed;
}
