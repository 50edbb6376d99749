/* SPDX-License-Identifier: Apache-2.0 */
/* fault_matrix - every fault at every point, then random ones. See fault.h. */
#include "fault.h"

#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANDOM_ROUNDS = 24, LONG_ROUNDS = 400, MOST_JOBS = 16, MOST_CELLS = 64 };
enum { AGAIN_PERCENT = 5, AGAIN_FREE = 3 /* of few cells, one is a large percentage */ };

static int n_passed, n_failed;

/* This process runs every part.n-th cell, so that several run the matrix concurrently: most of the time is waiting. */
static struct {
    int i, n;
} part = {0, 1};

static void count(bool passed)
{
    ++*(passed ? &n_passed : &n_failed);
}

static void list(void)
{
    struct cell cell;
    char name[64];

    for (int i = part.i; cell_at(i, &cell); i += part.n) {
        cell_name(&cell, name, sizeof(name));
        puts(name);
    }
}

/* All cells whose name begins with `prefix`; NULL: all. */
static void run_matrix(const char *prefix)
{
    size_t n = prefix ? strlen(prefix) : 0;
    struct cell cell;
    char name[64];

    for (int i = part.i; cell_at(i, &cell); i += part.n) {
        cell_name(&cell, name, sizeof(name));
        if (!n || strncmp(name, prefix, n) == 0)
            count(run_cell(&cell));
    }
}

static void run_random(uint64_t seed, int rounds)
{
    for (int i = part.i; i < rounds; i += part.n) {
        struct cell cell = cell_random(seed + (uint64_t)i);
        bool passed = run_cell(&cell);

        count(passed);
        if (!passed)
            printf("     again: --rounds 1 --seed %llu (victim %d, %d rounds before, from %d %%)\n",
                   (unsigned long long)(seed + (uint64_t)i), cell.victim, cell.warm, cell.percent);
    }
}

/* A private /dev/shm, if allowed: entries of other programs must not be counted. */
static void isolate(void)
{
    int flags = geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER;

    /* Private, otherwise mounts here would propagate. */
    shm_is_ours = unshare(flags) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                  mount("fault", "/dev/shm", "tmpfs", 0, NULL) == 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/* The whole matrix, unless only random cells are requested, then the random ones. */
static void run_all(int rounds, uint64_t seed)
{
    if (rounds < 0) {
        run_matrix(NULL);
        rounds = getenv("EPKIT_TEST_LONG") ? LONG_ROUNDS : RANDOM_ROUNDS;
    }
    if (rounds > 0)
        run_random(seed, rounds);
}

/* Runs the parts concurrently, each in a process of its own, with its own children, descriptors and /dev/shm. */
static void run_jobs(int jobs, int rounds, uint64_t seed)
{
    int(*counts)[4] =
        mmap(NULL, sizeof(*counts) * (size_t)jobs, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[MOST_JOBS];

    if (counts == MAP_FAILED) {
        count(false);
        return;
    }
    fflush(NULL);
    for (int job = 0; job < jobs; job++) {
        pids[job] = fork();
        if (pids[job] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            isolate();
            part.i += job * part.n;
            part.n *= jobs;
            run_all(rounds, seed);
            counts[job][0] = n_passed;
            counts[job][1] = n_failed;
            counts[job][2] = n_again;
            counts[job][3] = n_again_unloaded;
            exit(0);
        }
    }
    for (int job = 0; job < jobs; job++) {
        int how = 0;

        n_passed += waitpid(pids[job], &how, 0) == pids[job] ? counts[job][0] : 0;
        n_failed += counts[job][1];
        n_again += counts[job][2];
        n_again_unloaded += counts[job][3];
        if (pids[job] < 0 || how != 0) {
            printf("FAIL job %d of %d ended with %#x\n", job, jobs, (unsigned)how);
            count(false);
        }
    }
}

/* Rare errors would be hidden by cells that are repeated. */
static bool too_many_again(void)
{
    int cells = n_passed + n_failed;

    if (n_again)
        printf("%d of %d cells were run again with longer deadlines, %d of them at a load of no more than %d\n",
               n_again, cells, n_again_unloaded, MAX_LOAD);
    if (n_again_unloaded <= AGAIN_FREE || n_again_unloaded * 100 <= cells * AGAIN_PERCENT)
        return false;
    printf("FAIL that is more than %d %% of the cells: the machine alone does not explain it\n", AGAIN_PERCENT);
    return true;
}

static int usage(void)
{
    fputs(
        "Usage: fault_matrix [--list] [--cell PREFIX]... [--rounds N] [--seed N] [--part I/N | --sample I/N] [--jobs N]\n"
        "           [--network NAME] [--slow N]\n"
        "Without --cell and --rounds: the whole matrix once, then random cells. --part: every Nth of them; --sample: also,\n"
        "but with EPKIT_TEST_LONG all.\n"
        "--jobs: so many at the same time; most of a cell is waiting. --network: between hosts in the cells that have\n"
        "\"tcp.\" in their names; verbs instead of tcp. --slow: all times by N.\n",
        stderr);
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"list", no_argument, NULL, 'l'},         {"cell", required_argument, NULL, 'c'},
        {"rounds", required_argument, NULL, 'r'}, {"seed", required_argument, NULL, 's'},
        {"part", required_argument, NULL, 'p'},   {"sample", required_argument, NULL, 'a'},
        {"jobs", required_argument, NULL, 'j'},   {"network", required_argument, NULL, 'n'},
        {"slow", required_argument, NULL, 'f'},   {NULL, 0, NULL, 0}};
    uint64_t seed = (uint64_t)(getenv("EPKIT_TEST_LONG") ? time(NULL) : 7001);
    const char *cells[MOST_CELLS];
    int rounds = -1, jobs = 1, n_cells = 0, option;
    bool is_list = false, is_sample = false;

    isolate();
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'l':
            is_list = true;
            break;
        case 'c':
            if (n_cells == MOST_CELLS)
                return usage();
            cells[n_cells++] = optarg;
            break;
        case 'r':
            rounds = atoi(optarg);
            break;
        case 's':
            seed = strtoull(optarg, NULL, 0);
            break;
        case 'f':
            slow_factor = atoi(optarg);
            if (slow_factor < 1)
                return usage();
            break;
        case 'n':
            linked_network = optarg;
            if (strcmp(optarg, "tcp") != 0 && strcmp(optarg, "verbs") != 0)
                return usage();
            break;
        case 'p':
        case 'a':
            is_sample = option == 'a';
            if (sscanf(optarg, "%d/%d", &part.i, &part.n) != 2 || part.n < 1 || part.i < 1 || part.i-- > part.n)
                return usage();
            break;
        case 'j':
            jobs = atoi(optarg);
            if (jobs < 1 || jobs > MOST_JOBS)
                return usage();
            break;
        default:
            return usage();
        }
    }
    if (optind < argc)
        return usage();
    if (is_sample && getenv("EPKIT_TEST_LONG")) {
        part.i = 0;
        part.n = 1;
    }
    if (is_list) {
        list();
        return 0;
    }
    for (int i = 0; i < n_cells; i++)
        run_matrix(cells[i]);
    if (!n_cells || rounds > 0) {
        printf("random cells: --seed %llu\n", (unsigned long long)seed);
        run_jobs(jobs, rounds, seed);
    }
    if (too_many_again())
        n_failed++;
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed > 0 || n_passed == 0;
}
