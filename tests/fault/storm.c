/* SPDX-License-Identifier: Apache-2.0 */
/* storm - random faults at random instants. See storm.h. */
#include "storm.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    NORMAL_FAULTS = 300,
    LONG_FAULTS = 10000,
    SIDE_BY_SIDE = 5, /* concurrent storms: most of their time they wait */
    MOST_STORMS = 100000,
    LINKED_PERCENT = 30, /* share of the storms */
    EXCUSED_PERCENT = 5,
    EXCUSED_FREE = 3, /* of few, one is a large percentage */
};

/* Indexed by the bits of LIMIT_*. */
static const char *const limit_names[] = {"no pidfd", "no openat2"};
#define N_LIMITS (sizeof(limit_names) / sizeof(limit_names[0]))

struct sums {
    int storms, passed, faults, starved, unseen;
    int faults_of[MODES], storms_of[MODES];
    int faults_linked, storms_linked;
    int faults_under[N_LIMITS];
    int exclusions, excused; /* excused: while the load of the machine does not explain late ranks */
    int excused_loaded;
    int hangs, leftovers, names, changes, wrong, others;
};

static void add_up(struct sums *sums, const struct storm *storm, const struct storm_result *result)
{
    bool passed = !result->text[0];

    sums->storms++;
    sums->storms_of[storm->mode]++;
    sums->faults_of[storm->mode] += result->faults;
    sums->faults_linked += storm->linked ? result->faults : 0;
    sums->storms_linked += storm->linked;
    for (size_t i = 0; i < N_LIMITS; i++)
        sums->faults_under[i] += storm->limits >> i & 1 ? result->faults : 0;
    sums->passed += passed;
    sums->faults += result->faults;
    sums->starved += result->starved;
    sums->exclusions += result->exclusions;
    *(result->loaded ? &sums->excused_loaded : &sums->excused) += result->excused;
    sums->unseen += result->unseen;
    sums->hangs += result->hangs;
    sums->leftovers += result->leftovers;
    sums->names += result->names;
    sums->changes += result->changes;
    sums->wrong += result->wrong;
    sums->others += result->others;
}

struct run {
    uint64_t seed;
    struct storm_choice choice;
    bool verbose;
    struct storm_result *results; /* [side_by_side], shared with the controllers */
    int *pids;
    int side_by_side;
    struct sums sums;
};

static void start_storm(struct run *run, int place, int number)
{
    struct storm_result *result = &run->results[place];

    memset(result, 0, sizeof(*result));
    result->number = number;
    fflush(NULL);
    run->pids[place] = fork();
    if (run->pids[place] == 0) {
        struct storm storm = storm_plan(run->seed, number, &run->choice);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        storm_run(&storm, result);
        atomic_store(&result->done, 1);
        exit(0);
    }
    if (run->pids[place] < 0) {
        struct storm storm = storm_plan(run->seed, number, &run->choice);

        storm_complain(result, WRONG_OTHER, "fork: %s", strerror(errno));
        run->pids[place] = 0;
        add_up(&run->sums, &storm, result);
    }
}

static void finish_storm(struct run *run, int place)
{
    struct storm_result *result = &run->results[place];
    char text[1024];
    struct storm storm = storm_plan(run->seed, result->number, &run->choice);

    if (!atomic_load(&result->done))
        storm_complain(result, WRONG_OTHER, "the controller did not finish");
    add_up(&run->sums, &storm, result);
    if (result->text[0] || run->verbose) {
        storm_describe(&storm, text, sizeof(text));
        printf("%-4s storm %d (%d ms of processor time): %s%s\n", result->text[0] ? "FAIL" : "ok", result->number,
               result->cpu_ms, text, result->text);
        fputs(result->history, stdout);
        if (result->text[0])
            printf("     again: --seed %llu --storm %d\n", (unsigned long long)run->seed, result->number);
        fflush(stdout);
    }
}

/* Runs storms from number `first` on, until so many faults were injected, or up to `last`. */
static void run_storms(struct run *run, int first, int last, int faults)
{
    int number = first, running = 0;

    for (;;) {
        for (int place = 0; place < run->side_by_side; place++)
            if (!run->pids[place] && number <= last && run->sums.faults < faults) {
                start_storm(run, place, number++);
                running += run->pids[place] != 0;
            }
        if (!running)
            return;
        int how, pid = waitpid(-1, &how, 0);

        for (int place = 0; place < run->side_by_side; place++)
            if (pid > 0 && run->pids[place] == pid) {
                run->pids[place] = 0;
                running--;
                finish_storm(run, place);
            }
    }
}

static int usage(void)
{
    fputs("Usage: storm [--seed N] [--storm K] [--faults N] [--mode fork|threads] [--jobs N] [--plan] [--verbose]\n"
          "             [--linked-percent N]\n"
          "Random faults at random instants: 300 of them, 10000 with EPKIT_TEST_LONG. --storm repeats one.\n"
          "Without --mode both are mixed. N of 100 storms have several hosts (30).\n",
          stderr);
    return 2;
}

static int mode_of(const char *name)
{
    return strcmp(name, "fork") == 0 ? MODE_FORK : strcmp(name, "threads") == 0 ? MODE_THREADS : -2;
}

/* Excused results, each with a reason, must stay rare: otherwise they hide a defect. */
static bool is_too_much(const struct sums *s)
{
    bool excused = s->excused > EXCUSED_FREE && s->excused * 100 > s->exclusions * EXCUSED_PERCENT;

    if (excused)
        printf("FAIL more than %d %% of those that were left out were healthy\n", EXCUSED_PERCENT);
    return excused;
}

static int report(const struct run *run)
{
    const struct sums *s = &run->sums;

    printf("%d faults in %d storms: %d hangs, %d leftovers, %d wrong names, %d changed statuses, %d wrong results, "
           "%d others\n",
           s->faults, s->storms, s->hangs, s->leftovers, s->names, s->changes, s->wrong, s->others);
    printf("faults on forked ranks %d, threads %d (in %d and %d storms)", s->faults_of[MODE_FORK],
           s->faults_of[MODE_THREADS], s->storms_of[MODE_FORK], s->storms_of[MODE_THREADS]);
    for (size_t i = 0; i < N_LIMITS; i++)
        printf("%s %s %d", i ? "," : "; with", limit_names[i], s->faults_under[i]);
    printf("\n%d faults in %d storms of several hosts\n", s->faults_linked, s->storms_linked);
    if (s->unseen)
        printf("%d times a rank had died before the others had heard of it, and they waited for their deadline\n",
               s->unseen);
    if (s->starved)
        printf("%d times a rank was late because the machine did not let it run\n", s->starved);
    if (s->excused + s->excused_loaded)
        printf("%d of %d times a rank that was left out had been late because the machine did not let ranks run, %d of "
               "them at a load of no more than %d\n",
               s->excused + s->excused_loaded, s->exclusions, s->excused, MAX_LOAD);
    printf("%d passed, %d failed\n", s->passed, s->storms - s->passed);
    return s->passed != s->storms || s->storms == 0 || is_too_much(s);
}

/* A container may forbid filters: its storms run without these limits. */
static void say_impossible(unsigned possible)
{
    for (unsigned i = 0; i < N_LIMITS; i++)
        if (!(possible & 1u << i))
            printf("no storm here with: %s\n", limit_names[i]);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"seed", required_argument, NULL, 's'},
                                            {"storm", required_argument, NULL, 'k'},
                                            {"faults", required_argument, NULL, 'f'},
                                            {"mode", required_argument, NULL, 'm'},
                                            {"jobs", required_argument, NULL, 'j'},
                                            {"plan", no_argument, NULL, 'p'},
                                            {"verbose", no_argument, NULL, 'v'},
                                            {"linked-percent", required_argument, NULL, 'L'},
                                            {NULL, 0, NULL, 0}};
    struct run run = {.seed = (uint64_t)(getenv("EPKIT_TEST_LONG") ? time(NULL) : 7001),
                      .choice = {.mode = -1, .linked_percent = LINKED_PERCENT, .limits = storm_possible_limits()},
                      .side_by_side = SIDE_BY_SIDE};
    int option, only = -1, faults = getenv("EPKIT_TEST_LONG") ? LONG_FAULTS : NORMAL_FAULTS;
    bool plan_only = false;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            run.seed = strtoull(optarg, NULL, 0);
            break;
        case 'k':
            only = atoi(optarg);
            break;
        case 'f':
            faults = atoi(optarg);
            break;
        case 'm':
            run.choice.mode = mode_of(optarg);
            if (run.choice.mode < -1)
                return usage();
            break;
        case 'j':
            run.side_by_side = atoi(optarg);
            break;
        case 'p':
            plan_only = true;
            break;
        case 'L':
            run.choice.linked_percent = atoi(optarg);
            break;
        case 'v':
            run.verbose = true;
            break;
        default:
            return usage();
        }
    }
    if (optind < argc || run.side_by_side < 1 || run.choice.linked_percent < 0 || run.choice.linked_percent > 100)
        return usage();
    if (plan_only && only >= 0) {
        struct storm storm = storm_plan(run.seed, only, &run.choice);
        char text[1024];

        storm_describe(&storm, text, sizeof(text));
        puts(text);
        return 0;
    }
    run.pids = calloc((size_t)run.side_by_side, sizeof(*run.pids));
    run.results = mmap(NULL, (size_t)run.side_by_side * sizeof(*run.results), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!run.pids || run.results == MAP_FAILED) {
        free(run.pids);
        return 1;
    }
    printf("storms, --seed %llu\n", (unsigned long long)run.seed);
    say_impossible(run.choice.limits);
    fflush(stdout);
    run_storms(&run, only >= 0 ? only : 0, only >= 0 ? only : MOST_STORMS, only >= 0 ? 1 : faults);
    free(run.pids);
    return report(&run);
}
