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

void complain(struct seat *seat, const char *format, ...)
{
    size_t used = strlen(seat->complaint);
    va_list args;

    if (used + 4 >= sizeof(seat->complaint))
        return;
    if (used)
        used += (size_t)snprintf(seat->complaint + used, sizeof(seat->complaint) - used, "; ");
    va_start(args, format);
    vsnprintf(seat->complaint + used, sizeof(seat->complaint) - used, format, args);
    va_end(args);
}

/* --- what is left ----------------------------------------------------------------------------------------------- */

bool shm_is_ours;

struct surroundings look_around(void)
{
    return (struct surroundings){.fds = count_entries("/proc/self/fd"),
                                 .threads = count_entries("/proc/self/task"),
                                 .shm = shm_is_ours ? count_entries("/dev/shm") : 0};
}

bool same_surroundings(const struct surroundings *before, char *ret_why, size_t bytes)
{
    struct surroundings now = {0};

    /* The kernel takes a joined thread out of /proc a moment after the join: seconds where much else runs. */
    for (int i = 0; i < 5000; i++) {
        now = look_around();
        if (memcmp(&now, before, sizeof(now)) == 0)
            return true;
        sleep_us(2000);
    }
    snprintf(ret_why, bytes, "descriptors %d before and %d now, threads %d and %d, entries in /dev/shm %d and %d",
             before->fds, now.fds, before->threads, now.threads, before->shm, now.shm);
    return false;
}

/* --- how busy the machine is ------------------------------------------------------------------------------------ */

enum { MOST_LOAD_FACTOR = 6 }; /* beyond which waiting takes minutes: cells that need more are run again */

int load_factor = 1;
int slow_factor = 1;

void measure_load(void)
{
    int most = 1, processors = (int)sysconf(_SC_NPROCESSORS_ONLN);

    /* The number of runnable threads, this one included, is of one moment: the largest of several. */
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
    if (load_factor > MOST_LOAD_FACTOR)
        load_factor = MOST_LOAD_FACTOR;
    load_factor *= slow_factor;
}

/* How long the first thread of a process could have run and was not let, by the kernel's account; 0: not known. */
static uint64_t run_delay_ns(int pid)
{
    unsigned long long ran, delayed = 0;
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/schedstat", pid);
    file = fopen(path, "r");
    if (!file)
        return 0;
    if (fscanf(file, "%llu %llu", &ran, &delayed) != 2)
        delayed = 0;
    fclose(file);
    return delayed;
}

/* --- a cell ----------------------------------------------------------------------------------------------------- */

struct conduct {
    const struct cell *cell;
    struct table *table;
    int pid[RANKS]; /* 0: ended */
    int how[RANKS]; /* as waitpid() said */
    bool hung;
    uint64_t delay_ns; /* the most that one of these processes was not let run */
};

static void report(struct conduct *c, int rank, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void report(struct conduct *c, int rank, const char *format, ...)
{
    char text[256];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    complain(&c->table->seat[rank], "%s", text);
}

static void start(struct conduct *c, ep_boot_shm *place)
{
    fflush(NULL);
    for (int rank = 0; rank < RANKS; rank++) {
        c->pid[rank] = fork();
        if (c->pid[rank] < 0) {
            c->pid[rank] = 0;
            report(c, rank, "fork: %s", strerror(errno));
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

/* The victim runs on once the others have gone on without it. */
static void resume_victim(struct conduct *c)
{
    if (c->cell->fault != FAULT_STOP || atomic_load(&c->table->resumed) || !atomic_load(&c->table->struck_ns))
        return;
    for (int rank = 0; rank < RANKS; rank++)
        if (rank != c->cell->victim && rank != first_rank(c->cell) && c->pid[rank] &&
            atomic_load(&c->table->seat[rank].state) == SEAT_RUNNING)
            return;
    atomic_store(&c->table->resumed, 1);
    kill(c->pid[c->cell->victim], SIGCONT);
}

static void give_up(struct conduct *c)
{
    char name[64];

    cell_name(c->cell, name, sizeof(name));
    fprintf(stderr, "%s hangs:\n", name);
    for (int rank = 0; rank < RANKS; rank++) {
        char who[16];

        snprintf(who, sizeof(who), "rank %d", rank);
        if (c->pid[rank]) {
            show_process(c->pid[rank], who);
            report(c, rank, "hangs");
            kill(c->pid[rank], SIGKILL);
        }
    }
    c->hung = true;
}

static void note_delay(struct conduct *c, uint64_t delay_ns)
{
    if (delay_ns > c->delay_ns)
        c->delay_ns = delay_ns;
}

static void watch(struct conduct *c)
{
    uint64_t end_ns = now_ns() + (uint64_t)CELL_MS * 1000000u, own_ns = run_delay_ns(getpid());
    int running = RANKS;

    for (int look = 0; running > 0; look++) {
        running = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            if (c->pid[rank] && look % 16 == 15)
                note_delay(c, run_delay_ns(c->pid[rank]));
            if (c->pid[rank] && waitpid(c->pid[rank], &c->how[rank], WNOHANG) == c->pid[rank])
                c->pid[rank] = 0;
            running += c->pid[rank] != 0;
        }
        resume_victim(c);
        if (running && now_ns() > end_ns && !c->hung)
            give_up(c);
        if (running)
            sleep_us(1000);
    }
    /* As often as this process wakes up it wants to run, beside the ranks. */
    note_delay(c, run_delay_ns(getpid()) - own_ns);
}

/* How each rank has ended: the dead as they were killed, the others of their own will. */
static void check_ends(struct conduct *c)
{
    for (int rank = 0; rank < RANKS; rank++) {
        bool victim = rank == c->cell->victim, first = rank == first_rank(c->cell);
        int how = c->how[rank];

        if (first || (victim && c->cell->fault == FAULT_KILL)) {
            if (!WIFSIGNALED(how) || WTERMSIG(how) != SIGKILL)
                report(c, rank, "was not killed: the fault did not happen");
        } else if (victim && c->cell->fault == FAULT_CRASH) {
            /* A sanitizer turns the signal into an exit. */
            if (!(WIFSIGNALED(how) && WTERMSIG(how) == SIGSEGV) && !(SANITIZED && WIFEXITED(how) && WEXITSTATUS(how)))
                report(c, rank, "did not crash: the fault did not happen");
        } else if (WIFSIGNALED(how) && !c->hung) {
            report(c, rank, "died of signal %d", WTERMSIG(how));
        } else if (!WIFSIGNALED(how) && WEXITSTATUS(how) && !c->table->seat[rank].complaint[0]) {
            report(c, rank, "ended with code %d", WEXITSTATUS(how));
        }
    }
    if (!atomic_load(&c->table->struck_ns))
        report(c, c->cell->victim, "was never struck");
}

/* This process is a subreaper: whoever was left would now be its child. */
static void check_children(struct conduct *c)
{
    int how, pid;

    while ((pid = waitpid(-1, &how, WNOHANG)) >= 0) {
        report(c, 0, pid ? "process %d was left" : "a process was left running", pid);
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

/* One that failed where the machine kept a process from running for that part of a deadline says nothing yet. */
enum { STARVED_PART = 8, ATTEMPTS = 5 };

/* *ret_again: run it again with longer deadlines. */
static bool conduct_once(const struct cell *cell, bool last, bool *ret_again)
{
    struct surroundings before = look_around();
    struct conduct c = {.cell = cell};
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
    if (!same_surroundings(&before, left, sizeof(left)))
        report(&c, 0, "parent: left behind: %s", left);
    for (int rank = 0; rank < RANKS; rank++)
        if (c.table->seat[rank].complaint[0])
            used += (size_t)snprintf(why + used, sizeof(why) - used, "\n     rank %d: %s", rank,
                                     c.table->seat[rank].complaint);
    *ret_again = used && !last && !c.hung && c.delay_ns > (uint64_t)TIMEOUT_MS * 1000000u / STARVED_PART;
    if (*ret_again)
        printf("     %s again with longer deadlines: a process was not let run for %d ms%s\n", name,
               (int)(c.delay_ns / 1000000u), why);
    else
        print_result(used == 0, name, begin_ns, why);
    munmap(c.table, sizeof(*c.table));
    return used == 0;
}

bool conduct(const struct cell *cell)
{
    bool passed = false, again = true;

    measure_load();
    for (int i = 1; again; i++) {
        passed = conduct_once(cell, i == ATTEMPTS, &again);
        load_factor *= 2;
    }
    return passed;
}
