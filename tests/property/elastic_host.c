/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The controller of a sequence: decides in each turn who is a member, as the controller of an engine does, from what
 * the processes do and from what it wants. It waits for no rank longer than its deadlines allow.
 */
#include "elastic.h"

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

enum { TURNS = 8, STOP_TIMEOUT_MS = 1000, TIMEOUT_MS = 30000, HANG_S = 120 };

struct controller {
    struct table *table;
    struct random random;
    pid_t pids[SLOTS];
    unsigned living;  /* processes that run, or are stopped */
    unsigned stopped; /* of them */
    unsigned failed;  /* members of the last group that are not to be in the next one */
    int changes, joins;
    bool verbose, wrong;
};

static unsigned below(struct controller *c, unsigned n)
{
    return random_below(&c->random, n);
}

static bool has(unsigned set, int slot)
{
    return set >> slot & 1;
}

static void start(struct controller *c, int slot, int group)
{
    pid_t parent = getpid();

    atomic_fetch_and(&c->table->regroup.ended, ~(1u << slot));
    c->table->ranks[slot].group = 0;
    c->pids[slot] = fork();
    if (c->pids[slot] == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
            _exit(99);
        _exit(elastic_rank(c->table, slot, group));
    }
    c->living |= 1u << slot;
}

/* Notes which processes have ended, been stopped or resumed. */
static void watch(struct controller *c)
{
    for (int slot = 0; slot < c->table->slots; slot++) {
        int how;

        if (!has(c->living, slot) || waitpid(c->pids[slot], &how, WNOHANG | WUNTRACED) <= 0)
            continue;
        if (WIFSTOPPED(how)) {
            c->stopped |= 1u << slot;
            continue;
        }
        atomic_fetch_or(&c->table->regroup.ended, 1u << slot);
        c->living &= ~(1u << slot);
        c->stopped &= ~(1u << slot);
        if ((WIFEXITED(how) && WEXITSTATUS(how)) || (WIFSIGNALED(how) && WTERMSIG(how) != SIGKILL)) {
            printf("     rank %d ended with %s %d\n", slot, WIFEXITED(how) ? "code" : "signal",
                   WIFEXITED(how) ? WEXITSTATUS(how) : WTERMSIG(how));
            c->wrong = true;
        }
    }
}

/* All members that run have reported this group. */
static bool is_over(const struct controller *c, int group, unsigned members)
{
    for (int slot = 0; slot < c->table->slots; slot++)
        if (has(members & c->living & ~c->stopped, slot) && atomic_load(&c->table->ranks[slot].group) != group + 1)
            return false;
    return true;
}

static void end_all(struct controller *c)
{
    for (int slot = 0; slot < c->table->slots; slot++)
        if (has(c->living, slot)) {
            kill(c->pids[slot], SIGKILL);
            kill(c->pids[slot], SIGCONT);
        }
}

/* False: some rank hangs. */
static bool await(struct controller *c, int group, unsigned members)
{
    time_t begin = time(NULL);

    do {
        watch(c);
        if (is_over(c, group, members))
            return true;
        usleep(500);
    } while (time(NULL) - begin < HANG_S);
    for (int slot = 0; slot < c->table->slots; slot++)
        if (has(members & c->living, slot) && atomic_load(&c->table->ranks[slot].group) != group + 1)
            printf("     rank %d hangs in group %d of %#x\n", slot, group, members);
    c->wrong = true;
    end_all(c);
    return false;
}

/*
 * A rank that was stopped may go on when the next group works: then it learns that it is absent. Waits until it has
 * ended, as all do that are in no group.
 */
static void resume(struct controller *c, unsigned absent)
{
    time_t begin = time(NULL);

    for (int slot = 0; slot < c->table->slots; slot++)
        if (has(c->living & absent, slot))
            kill(c->pids[slot], SIGCONT);
    c->stopped &= ~absent;
    while (c->living & absent && time(NULL) - begin < HANG_S) {
        watch(c);
        usleep(5000);
    }
    if (c->living & absent) {
        printf("     the ranks %#x, which are absent, do not end\n", c->living & absent);
        c->wrong = true;
        end_all(c);
    }
}

/* Between nodes the members of all nodes have the same places. */
static unsigned fit_nodes(const struct table *table, unsigned members)
{
    unsigned places = (1u << table->ranks_per_node) - 1, nodes = 0;
    int per_node = table->ranks_per_node;

    if (per_node == 1 || per_node == table->slots)
        return members;
    for (int first = 0; first < table->slots; first += per_node)
        if (members >> first & ((1u << per_node) - 1))
            places &= members >> first;
    for (int first = 0; places && first < table->slots; first += per_node)
        nodes |= members >> first & places ? (places & (members >> first)) << first : 0;
    return nodes ? nodes : members & -members;
}

static unsigned choose_members(struct controller *c)
{
    unsigned all = (1u << c->table->slots) - 1, members = c->living & ~c->stopped & ~c->failed;

    for (int slot = 0; slot < c->table->slots; slot++) {
        if (has(members, slot) && below(c, 8) == 0 && (members & (members - 1)))
            members &= ~(1u << slot); /* left out without a fault */
        else if (!has(c->living, slot) && below(c, 3))
            members |= 1u << slot; /* a new process */
    }
    if (!members)
        members = 1u << below(c, (unsigned)c->table->slots);
    return fit_nodes(c->table, members & all);
}

static void plan_turn(struct controller *c, int group)
{
    struct turn *turn = &c->table->turns[group];
    bool last = group == TURNS - 1;

    turn->members = choose_members(c);
    turn->rounds = 1 + (int)below(c, 3);
    for (int slot = 0; slot < c->table->slots; slot++) {
        turn->fault[slot] = !last && below(c, 4) == 0 ? (enum fault)(1 + below(c, FAULTS - 1)) : FAULT_NONE;
        /* Only a short deadline ends the wait for a rank that is stopped. */
        if (turn->fault[slot] == FAULT_STOP && c->table->timeout_ms != STOP_TIMEOUT_MS)
            turn->fault[slot] = FAULT_DIE;
        turn->at_us[slot] = (int)(below(c, 3) ? below(c, 3000) : below(c, 40000));
    }
    atomic_store(&c->table->regroup.groups[group].members, turn->members);
}

static void note_results(struct controller *c, int group)
{
    const struct turn *turn = &c->table->turns[group];
    bool clean = true;

    for (int slot = 0; slot < c->table->slots; slot++)
        clean &= turn->fault[slot] == FAULT_NONE || !has(turn->members, slot);
    for (int slot = 0; slot < c->table->slots; slot++) {
        struct rank_report *rank = &c->table->ranks[slot];

        if (rank->wrong[0]) {
            printf("     %s\n", rank->wrong);
            rank->wrong[0] = '\0';
            c->wrong = true;
        }
        if (!has(turn->members, slot) || !has(c->living, slot) || atomic_load(&rank->group) != group + 1)
            continue;
        if (c->verbose)
            printf("     group %d of %#x: rank %d: %s\n", group, turn->members, slot, rank->text);
        /* On a busy machine a rank may be late for a short deadline. */
        if (clean && rank->progress != PROGRESS_DONE && c->table->timeout_ms != STOP_TIMEOUT_MS) {
            printf("     group %d of %#x has no fault, but rank %d got %s\n", group, turn->members, slot, rank->text);
            c->wrong = true;
        }
    }
}

static void take_turn(struct controller *c, int group)
{
    unsigned before, absent;

    plan_turn(c, group);
    before = c->living;
    for (int slot = 0; slot < c->table->slots; slot++)
        if (has(c->table->turns[group].members & ~c->living, slot)) {
            start(c, slot, group);
            c->joins++;
        }
    atomic_store(&c->table->number, group);
    c->changes++;
    /* It may go on while the others make the next group, and work in it. */
    for (int slot = 0; slot < c->table->slots && below(c, 2); slot++)
        if (has(c->stopped & ~c->table->turns[group].members, slot)) {
            kill(c->pids[slot], SIGCONT);
            c->stopped &= ~(1u << slot);
        }
    if (!await(c, group, c->table->turns[group].members))
        return;
    absent = before & ~c->table->turns[group].members;
    resume(c, absent);
    note_results(c, group);
    c->failed = 0;
    for (int slot = 0; slot < c->table->slots; slot++)
        if (c->table->turns[group].fault[slot] == FAULT_LEAVE && has(c->table->turns[group].members, slot))
            c->failed |= 1u << slot;
}

static void choose_shape(struct controller *c)
{
    static const int shapes[][3] = {{4, 4, 0}, {6, 6, 0}, {2, 2, 0}, {4, 1, 0},
                                    {4, 1, 1}, {3, 1, 1}, {4, 2, 0}, {6, 2, 1}};
    const int *shape = shapes[below(c, sizeof(shapes) / sizeof(shapes[0]))];

    c->table->slots = shape[0];
    c->table->ranks_per_node = shape[1];
    c->table->tcp = shape[2];
}

/* True: all results were right. */
static bool run_sequence(uint64_t seed, bool verbose, int *changes, int *joins)
{
    struct controller c = {.random.key = seed, .verbose = verbose};

    c.table = mmap(NULL, sizeof(*c.table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c.table == MAP_FAILED)
        return false;
    choose_shape(&c);
    c.table->seed = seed;
    c.table->timeout_ms = below(&c, 4) ? TIMEOUT_MS : STOP_TIMEOUT_MS;
    for (int group = 0; group < TURNS && !c.wrong; group++)
        take_turn(&c, group);
    atomic_store(&c.table->number, -1);
    resume(&c, ~0u);
    if (c.wrong)
        printf("FAIL --seed %llu: %d slots, %d on a node%s, deadline %d ms\n", (unsigned long long)seed, c.table->slots,
               c.table->ranks_per_node, c.table->tcp ? ", tcp" : "", c.table->timeout_ms);
    fflush(stdout);
    munmap(c.table, sizeof(*c.table));
    *changes += c.changes;
    *joins += c.joins;
    return !c.wrong;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"seed", required_argument, NULL, 's'},
                                            {"cases", required_argument, NULL, 'c'},
                                            {"verbose", no_argument, NULL, 'v'},
                                            {NULL, 0, NULL, 0}};
    uint64_t seed = 1;
    int option, cases = 20, passed = 0, changes = 0, joins = 0;
    bool verbose = false;

    setvbuf(stdout, NULL, _IOLBF, 0);
    while ((option = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (option == 's')
            seed = strtoull(optarg, NULL, 0);
        else if (option == 'c')
            cases = atoi(optarg);
        else if (option == 'v')
            verbose = true;
        else
            return 2;
    }
    for (int i = 0; i < cases; i++)
        passed += run_sequence(seed + (uint64_t)i, verbose, &changes, &joins);
    printf("%d changes of the members, %d new processes\n%d passed, %d failed\n", changes, joins, passed,
           cases - passed);
    return passed != cases;
}
