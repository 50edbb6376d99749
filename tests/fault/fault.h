/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.h - what a group does when one of its ranks fails, at every place of every call.
 *
 * A cell is a point (a step of a track of calls, and where in it) and a fault. Its ranks are forked processes that run
 * the track; the victim suffers the fault at the point. The others must all get the status that belongs to the fault,
 * in time, naming the victim, again and again; must shrink to a group that works; and must leave nothing behind.
 *
 *   cells.c     the points, and which faults happen at them
 *   traffic.c   the steps: calls with data that is checked; traffic_ll.c those of the low-latency layout
 *   strike.c    how the victim is struck
 *   rank.c      the program of a rank; masked.c that of a rank in a group that masks who fails
 *   conduct.c   the parent: starts the ranks of a cell, watches them, looks for what they left
 *   launcher.c  the launcher itself is killed
 *   delay.c     how long threads were not let run
 *   watch.c     time, and what can be seen of processes
 *
 * There are no hooks in the library. To strike in the middle of moving rows, a buffer of the victim is made
 * inaccessible from some page on, and the handler of the fault that follows strikes.
 */
#ifndef EP_TESTS_FAULT_H
#define EP_TESTS_FAULT_H

#include <epkit/epkit.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANKS = 4, MOST_RANKS = 8 }; /* of the matrix; of any group that uses traffic.c */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SLOWNESS = 5, SANITIZED = 1 };
#else
enum { SLOWNESS = 1, SANITIZED = 0 };
#endif

/*
 * What a cell may take depends on what else runs: 1 on an idle machine, and one more for each two runnable threads
 * of a processor when the cell begins. Deadlines and limits grow alike, so that their order, which is what is tested,
 * stays. What comes in between is found in the kernel's account: a cell whose complaints are about time alone, while
 * one of its threads was not let run for a part of the deadline, is run again with twice the deadlines, some times. A
 * few cells of a hundred may need that (conduct.c).
 */
extern int load_factor;
extern int slow_factor; /* how much slower this machine is than one of its kind: an emulated one */

#define TIMEOUT_MS (600 * load_factor)            /* of the communicators */
#define NOTICE_MS (300 * SLOWNESS * load_factor)  /* to notice what needs no deadline: well below TIMEOUT_MS */
#define MARGIN_MS (500 * SLOWNESS * load_factor)  /* beyond a deadline */
#define AT_ONCE_MS (150 * SLOWNESS * load_factor) /* for a call on a communicator that has failed */
#define LATE_MS (150 * load_factor)               /* how late a survivor is where the victim is to be found waiting */
#define STRIKE_MS (60 * load_factor)              /* when the victim is struck then */
#define CELL_MS (110000 + 10000 * SLOWNESS * load_factor) /* ends what hangs */

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
    STEP_SHRINK,
    STEPS
};

/* A row of calls, repeated until one fails. */
struct track {
    const char *name;
    int nnodes;
    bool linked;  /* over a network between hosts, which --network names; else the emulated one */
    bool masking; /* low latency that goes on without who dies */
    enum step steps[8];
    int n_steps;
};

enum where {
    WHERE_BEFORE = 0, /* the victim has not made the call */
    WHERE_MIDDLE,     /* it touches the second part of a buffer */
    WHERE_WAITING,    /* it waits in the call for a rank that comes late */
    WHERE_END,        /* it has done its part and waits for a rank that is slow in the middle */
    WHERE_ANY         /* at some time during the call */
};

enum buffer { BUFFER_X = 0, BUFFER_TOPK, BUFFER_OUT, BUFFER_RECV, BUFFER_LL_RECV, BUFFERS };

struct point {
    const char *name;
    const struct track *track;
    enum step step;
    enum where where;
    enum buffer buffer; /* WHERE_MIDDLE, WHERE_END: which becomes inaccessible, of the victim or of the late rank */
    int percent;        /* from where on */
    unsigned faults;    /* 1 << FAULT_* */
};

struct cell {
    const struct point *point;
    enum fault fault;
    int victim;
    int warm;        /* times that the track is run in peace before */
    int percent;     /* as in the point, or drawn anew */
    int delay_us;    /* WHERE_ANY */
    bool free_early; /* survivors free the old communicator before they use the new one */
};

/* --- cells.c --- */
extern const char *linked_network; /* of tracks that are linked */
extern const struct point points[];
extern const int n_points;

const char *fault_name(enum fault fault);
void cell_name(const struct cell *cell, char *ret_name, size_t bytes);
/* The cells of the matrix in order: number i, false behind the last. */
bool cell_at(int i, struct cell *ret_cell);
/* One of them with its parameters drawn from a seed. */
struct cell cell_random(uint64_t seed);

/* The rank that comes late where somebody must; the one that dies first where the victim dies during the shrink. */
static inline int late_rank(const struct cell *cell)
{
    return (cell->victim + 2) % RANKS;
}

static inline int first_rank(const struct cell *cell)
{
    return cell->point->step == STEP_SHRINK ? (cell->victim + 1) % RANKS : -1;
}

/* --- conduct.c: what parent and ranks share --- */
enum seat_state { SEAT_RUNNING = 0, SEAT_SHRUNK, SEAT_DONE };

/* What a complaint is about, for the choice between a failure and another run. */
enum flaw {
    FLAW_WRONG = 1 << 0,    /* fails at once */
    FLAW_SLOW = 1 << 1,     /* something took too long */
    FLAW_FOLLOWS = 1 << 2,  /* may follow from FLAW_DEADLINE; wrong without */
    FLAW_DEADLINE = 1 << 3, /* a rank that nobody had struck was late for a whole deadline */
};

struct seat {
    _Atomic int state; /* enum seat_state */
    _Atomic unsigned flaws;
    char complaint[1024];
};

struct table {
    struct cell cell;
    _Atomic uint64_t struck_ns; /* when the victim was struck, 0: not yet */
    _Atomic int resumed;        /* the stopped victim runs again */
    struct seat seat[RANKS];
};

/* Adds to what is wrong on this rank. */
void complain(struct seat *seat, enum flaw flaw, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Sets load_factor to what the machine is like now. */
void measure_load(void);

/* Cells that were run again, and those of them on a machine that has no reason to be late: by the number of runnable
 * threads and the load average. */
enum { MOST_LOAD = 30 };
extern int n_again, n_again_unloaded;

/* Runs a cell and prints its line. */
bool conduct(const struct cell *cell);

/* --- launcher.c --- */
extern const int n_launcher_cells;
const char *launcher_cell_name(int i);
bool conduct_launcher(int i);

/* --- watching processes: watch.c --- */
uint64_t now_ns(void);
void sleep_us(int us);
int count_entries(const char *directory);
/* Tells on stderr what each thread of a process waits for. */
void show_process(int pid, const char *what);
/* --- delay.c --- */
enum { DELAY_THREADS = 32, DELAY_SAMPLES = 16 /* of a window */ };

/* How long threads of one process could have run and were not let, by the kernel's account. */
struct delay {
    struct {
        int tid;
        uint64_t delayed_ns;
    } thread[DELAY_THREADS];
    uint64_t sum_ns[DELAY_SAMPLES + 1]; /* at the last looks, a ring */
    unsigned looks;
    uint64_t most_ns; /* within DELAY_SAMPLES looks */
};
/* To be called about DELAY_SAMPLES times within the span of time that matters. */
void delay_look(struct delay *delay, int pid);

/* --- conduct.c --- */
/* No child is left, /dev/shm is as before, as are descriptors and threads of this process. */
struct surroundings {
    int fds, threads, shm;
};
extern bool shm_is_ours; /* /dev/shm is this program's alone; else what others do there is not counted */
struct surroundings look_around(void);
bool same_surroundings(const struct surroundings *before, char *ret_why, size_t bytes);
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
    bool masking;    /* the low-latency objects mask who dies */
    int gone;        /* who has died under masking, or dies in this round; -1: nobody */
    bool going;      /* in this round: its rows may still be there */
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

enum { TRIES = 6 };

struct life {
    struct table *table;
    const struct cell *cell;
    struct seat *seat;
    int rank;
    bool victim, late, first;
    ep_comm *comm;
    struct traffic traffic;
    ep_comm *newer[TRIES]; /* of the shrinks, oldest first */
    int n_newer;
};

/* One call of the track, with the strike where it belongs. *ret_leave: the victim leaves instead. */
ep_status run_step(struct life *life, enum step step, int round, bool *ret_leave);
/* Shrinks until the group has the members that it should have, and uses it. */
void go_on_without(struct life *life);

/* --- masked.c --- */
/* The track of a group that masks: nobody's call fails. */
void live_masked(struct life *life);

/* --- strike.c --- */
/* Whom a strike hits: set once per process. */
void strike_init(struct table *table, enum fault fault);
void strike_set_comm(ep_comm *comm);
/* At once, on this thread; an abort from another one. FAULT_EXIT is the caller's. Returns after SIGCONT or abort. */
void strike_now(void);
/* From a second thread in a while; to be joined by strike_join(). */
void strike_later(int us);
void strike_join(void);
/* When the memory from `percent` on is touched. FAULT_DELAY: wait LATE_MS then. */
void strike_trap(void *memory, size_t bytes, int percent, enum fault fault);
void strike_disarm(void);

#endif
