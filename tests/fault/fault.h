/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.h - the behaviour of a group when one of its ranks fails, at every point of every call.
 *
 * A cell is a point (a step of a track of calls, and a position in it) and a fault. Its ranks are forked processes that
 * run the track; the victim suffers the fault at the point. The others must all get the status that belongs to the
 * fault, in time, naming the victim, in every call and in ep_comm_get_failed(); must agree who goes on, and create a
 * group that works; and must leave nothing behind.
 *
 *   cells.c     the points, and which faults happen at them
 *   traffic.c   the steps: calls with data that is checked; traffic_ll.c those of the low-latency layout
 *   inject.c    injection of the fault into the victim
 *   rank.c      the program of a rank; masked.c that of a rank in a group with masking
 *   run_cell.c  the parent: starts the ranks of a cell, watches them, checks for leftovers
 *   delay.c     how long threads were runnable but not scheduled
 *   watch.c     time, and the observable state of processes
 *
 * There are no hooks in the library. To inject a fault while rows are moved, a buffer of the victim is made
 * inaccessible from some page on, and the handler of the resulting page fault injects it.
 */
#ifndef EP_TESTS_FAULT_H
#define EP_TESTS_FAULT_H

#include "tests/regroup.h"

#include <epkit/epkit.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANKS = 4, MAX_RANKS = 16 }; /* of the matrix; of any group that uses traffic.c */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SLOWNESS = 5, SANITIZED = 1 };
#else
enum { SLOWNESS = 1, SANITIZED = 0 };
#endif

/*
 * The time limits of a cell depend on the load: factor 1 on an idle machine, and one more for each two runnable threads
 * per processor when the cell begins. Deadlines and limits scale alike, so that their order, which is what is tested,
 * is kept. Later delays are found in the scheduler statistics of the kernel: a cell whose complaints are about time
 * only, while one of its threads was not scheduled for a part of the deadline, is repeated with twice the deadlines, a
 * few times. A few cells of a hundred may need that (run_cell.c).
 */
extern int load_factor;
extern int slow_factor; /* how much slower this machine is than usual: an emulated one */

#define TIMEOUT_MS (600 * load_factor) /* of the communicators */
#define NOTICE_MS                                                                                                      \
    (300 * SLOWNESS * load_factor)                /* to detect a failure that needs no deadline: well below TIMEOUT_MS \
                                                   */
#define MARGIN_MS (500 * SLOWNESS * load_factor)  /* beyond a deadline */
#define AT_ONCE_MS (150 * SLOWNESS * load_factor) /* for a call on a communicator that has failed */
#define LATE_MS (150 * load_factor)               /* how late a survivor is when the victim is to be waiting */
#define INJECT_MS (60 * load_factor)              /* when the fault is injected then */
#define CELL_MS (110000 + 10000 * SLOWNESS * load_factor) /* ends a cell that hangs */

enum fault { FAULT_KILL = 0, FAULT_STOP, FAULT_CRASH, FAULT_ABORT, FAULT_EXIT, FAULTS, FAULT_DELAY };

enum step {
    STEP_NEW = 0,
    STEP_BARRIER,
    STEP_GATHER,
    STEP_PLAN,
    STEP_DISPATCH,
    STEP_COMBINE,
    STEP_ASYNC_DISPATCH,
    STEP_ASYNC_COMBINE,
    STEP_LL_NEW,
    STEP_LL_SEND,
    STEP_LL_FINISH,
    STEP_LL_COMBINE,
    STEPS
};

/* A sequence of calls, repeated until one fails. */
struct track {
    const char *name;
    int nnodes;
    bool linked;  /* over a network between hosts, which --network names; else the emulated one */
    bool masking; /* low latency that masks dead ranks */
    enum step steps[8];
    int n_steps;
};

enum where {
    WHERE_BEFORE = 0, /* the victim has not made the call */
    WHERE_MIDDLE,     /* it accesses the second part of a buffer */
    WHERE_WAITING,    /* it waits in the call for a late rank */
    WHERE_END         /* it has done its part and waits for a slow rank */
};

enum buffer { BUFFER_X = 0, BUFFER_TOPK, BUFFER_OUT, BUFFER_RECV, BUFFER_LL_RECV, BUFFERS };

struct point {
    const char *name;
    const struct track *track;
    enum step step;
    enum where where;
    enum buffer
        buffer;  /* WHERE_MIDDLE, WHERE_END: the buffer that becomes inaccessible, of the victim or of the late rank */
    int percent; /* from where on */
    unsigned faults; /* 1 << FAULT_* */
};

struct cell {
    const struct point *point;
    enum fault fault;
    int victim;
    int warm;        /* runs of the track before the fault */
    int percent;     /* as in the point, or drawn anew */
    bool free_early; /* survivors free the old communicator before they use the new one */
};

/* --- cells.c --- */
extern const char *linked_network; /* of tracks that are linked */
extern const struct point points[];
extern const int n_points;

const char *fault_name(enum fault fault);
void cell_name(const struct cell *cell, char *ret_name, size_t bytes);
/* The cells of the matrix in order: number i, false after the last. */
bool cell_at(int i, struct cell *ret_cell);
/* splitmix64: Steele, Lea, Flood, 2014. */
static inline uint64_t fault_draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* One of them with its parameters drawn from a seed. */
struct cell cell_random(uint64_t seed);

/* The late rank, if one is needed. */
static inline int late_rank(const struct cell *cell)
{
    return (cell->victim + 2) % RANKS;
}

/* --- run_cell.c: what parent and ranks share --- */
enum rank_state { RANK_RUNNING = 0, RANK_AGREED, RANK_DONE };

/* The kind of a complaint, which decides between a failure and a repetition. */
enum flaw {
    FLAW_WRONG = 1 << 0,    /* fails at once */
    FLAW_SLOW = 1 << 1,     /* something took too long */
    FLAW_FOLLOWS = 1 << 2,  /* may be a consequence of FLAW_DEADLINE; wrong without */
    FLAW_DEADLINE = 1 << 3, /* a rank without an injected fault was late for a whole deadline */
};

struct rank_context {
    _Atomic int state; /* enum rank_state */
    _Atomic unsigned flaws;
    char complaint[1024];
};

struct table {
    struct cell cell;
    _Atomic uint64_t injected_ns; /* when the fault was injected, 0: not yet */
    _Atomic int resumed;          /* the stopped victim runs again */
    struct regroup regroup;
    struct rank_context ranks[RANKS];
};

/* Adds a complaint of this rank. */
void complain(struct rank_context *context, enum flaw flaw, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Sets load_factor from the current load. */
void measure_load(void);

/*
 * Cells that were repeated, and those of them while neither the number of runnable threads nor the load average
 * explains delays.
 */
enum { MAX_LOAD = 30 };
extern int n_again, n_again_unloaded;

/* Runs a cell and prints its line. */
bool run_cell(const struct cell *cell);

/* Returns a status that is a failure. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        ep_status try_status = (call);                                                                                 \
                                                                                                                       \
        if (try_status != EP_OK)                                                                                       \
            return try_status;                                                                                         \
    } while (0)

/* --- watching processes: watch.c --- */
uint64_t now_ns(void);
void sleep_us(int us);
int count_entries(const char *directory);
/* Prints to stderr what each thread of a process waits for. */
void show_process(int pid, const char *what);
/* --- delay.c --- */
enum { DELAY_THREADS = 32, DELAY_SAMPLES = 16 /* of a window */ };

/* How long threads of one process were runnable but not scheduled, by the kernel's accounting. */
struct delay {
    struct {
        int tid;
        uint64_t delayed_ns;
    } thread[DELAY_THREADS];
    uint64_t sum_ns[DELAY_SAMPLES + 1]; /* at the last samples, a ring */
    unsigned samples;
    uint64_t most_ns; /* within DELAY_SAMPLES samples */
};
/* Call it about DELAY_SAMPLES times within the relevant time span. */
void delay_sample(struct delay *delay, int pid);

/* --- run_cell.c --- */
/* No child is left, and /dev/shm, descriptors and threads of this process are as before. */
struct resources {
    int fds, threads, shm;
};
extern bool shm_is_ours; /* /dev/shm belongs to this program only; otherwise its entries are not counted */
struct resources count_resources(void);
bool check_resources(const struct resources *before, char *ret_why, size_t bytes);
void print_result(bool passed, const char *name, uint64_t begin_ns, const char *why);

/* --- traffic.c --- */
#ifdef EP_TRAFFIC_SMALL
enum { TOKENS = 48, LL_TOKENS = 16, HIDDEN = 128 };
#else
enum { TOKENS = 256, LL_TOKENS = 64, HIDDEN = 128 };
#endif
enum { TOPK = 4, EXPERTS_PER_RANK = 2 };

/* One rank's buffers and objects on one communicator. */
struct traffic {
    ep_comm *comm;
    int rank, nranks, node, nnodes;
    struct {
        void *memory;
        size_t bytes;
    } buffer[BUFFERS];
    ep_plan *plan;
    ep_ll *ll;
    int32_t ll_count[EXPERTS_PER_RANK];
    bool masking;    /* the low-latency objects mask dead ranks */
    int dead_rank;   /* the rank that has died under masking, or dies in this round; -1: none */
    bool dying;      /* it dies in this round: its rows may have arrived */
    uint32_t round;  /* changes the data */
    char wrong[256]; /* the first wrong result */
};

/* Collective: allocates symmetric memory. */
ep_status traffic_init(struct traffic *traffic, ep_comm *comm);
/* Frees plan and buffers, not the communicator. */
void traffic_done(struct traffic *traffic);
/* New data for the next round. */
void traffic_fill(struct traffic *traffic);
ep_status traffic_step(struct traffic *traffic, enum step step);
/* Plan, dispatch, combine, with a check of the data. */
ep_status traffic_round_trip(struct traffic *traffic);

/* --- rank.c --- */
int rank_main(struct table *table, const ep_boot *boot);

struct rank_run {
    struct table *table;
    const struct cell *cell;
    struct rank_context *context;
    int rank;
    bool victim, late;
    ep_comm *comm, *next;
    struct traffic traffic;
};

/* One call of the track, with the fault at its point. *ret_leave: the victim leaves instead. */
ep_status run_step(struct rank_run *run, enum step step, int round, bool *ret_leave);
/* Agrees with the others who goes on, without `gone`, a mask; creates that group and uses it. */
void continue_without(struct rank_run *run, unsigned gone);

/* --- masked.c --- */
/* The track of a group with masking: no call fails. */
void run_masked(struct rank_run *run);

/* --- inject.c --- */
/* The target of the injection: set once per process. */
void inject_init(struct table *table, enum fault fault);
void inject_set_comm(ep_comm *comm);
/*
 * Injects at once, on this thread; an abort from another one. FAULT_EXIT is up to the caller. Returns after SIGCONT or
 * abort.
 */
void inject_now(void);
/* Injects from a second thread after a delay; join it with inject_join(). */
void inject_later(int us);
void inject_join(void);
/* Injects when the memory from `percent` on is accessed. FAULT_DELAY: waits LATE_MS then. */
void inject_trap(void *memory, size_t bytes, int percent, enum fault fault);
void inject_disarm(void);

#endif
