/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storm.h - random faults at random instants on running groups, and a check of all statuses that the ranks returned.
 *
 * A storm is a group of ranks (forked, or threads) that repeats plans, dispatches, combines, low latency,
 * all-gathers and allocations. After each failure the ranks agree in shared memory who is in the next group, create it
 * and continue. Between two calls a rank may only poll ep_comm_async_error() for a while. A controller outside of the
 * group injects signals and resource limits. There are no hooks in the library and no check depends on timing: an
 * instant is a number of calls that the victim has begun and some microseconds, and a hang is a call that does not
 * return within a limit far above all deadlines, counted while the rank is not stopped.
 *
 *   storm.c          options, concurrent storms, the sums
 *   storm_plan.c     a storm from its number; its description
 *   storm_rank.c     the program of a rank
 *   storm_run.c      starts a group, injects, watches, checks for leftovers
 *   storm_limits.c   limits of the group: no /proc, other users, no pidfd, no openat2
 *   storm_check.c    checks the statuses of the ranks
 */
#ifndef EP_TESTS_STORM_H
#define EP_TESTS_STORM_H

#include "fault.h"

enum {
    STORM_FAULTS = 5,
    STORM_OUTCOMES = 24,
    STORM_GENERATIONS = REGROUP_GROUPS,
    STORM_TEXT = 320,
    STORM_COMPLAINTS = 2500,
    STORM_HISTORY = 24000
};

enum injection {
    INJECT_KILL = 0,    /* SIGKILL */
    INJECT_CRASH,       /* SIGSEGV, SIGBUS, SIGABRT or SIGFPE */
    INJECT_STOP,        /* SIGSTOP for longer than the deadline */
    INJECT_PAUSE,       /* SIGSTOP for a small part of the deadline: nothing may fail */
    INJECT_ABORT,       /* ep_comm_abort() in a signal handler */
    INJECT_LEAVE,       /* the rank frees its communicator, or ends before it has one */
    INJECT_DESCRIPTORS, /* RLIMIT_NOFILE is lowered */
    INJECT_MEMORY,      /* RLIMIT_AS is lowered */
    INJECT_FILE_SIZE,   /* RLIMIT_FSIZE is lowered */
    INJECT_LAUNCHER,    /* SIGKILL of the launcher */
    INJECTIONS
};

enum mode { MODE_FORK = 0, MODE_THREADS, MODES };

enum {
    LIMIT_PIDFD = 1u << 0,   /* pidfd_open and pidfd_send_signal: ENOSYS */
    LIMIT_OPENAT2 = 1u << 1, /* openat2: ENOSYS */
};

enum when {
    WHEN_CALL = 0, /* its victim has begun so many calls (all-gathers of the creation among them) */
    WHEN_NEXT,     /* its victim is in the creation of a further group, or has begun so many calls */
    WHEN_WITH,     /* together with the fault before it */
};

struct injection_plan {
    enum injection injection;
    int rank;
    enum when when;
    int calls;
    int delay_us;
    int detail; /* the signal of a crash, the duration of a pause in ms, how far below a limit */
};

struct storm {
    uint64_t seed;
    int number;
    enum mode mode;
    unsigned limits;
    int nranks, nnodes;
    bool linked; /* each node is a host of its own: network "tcp" instead of "emulated" */
    int timeout_ms;
    bool free_early; /* the old communicator is freed before the new one is used */
    int n_faults;
    struct injection_plan faults[STORM_FAULTS];
};

enum call {
    CALL_NONE = 0,
    CALL_NEW,
    CALL_GATHER_OF_NEW,
    CALL_ALLOC,
    CALL_PLAN,
    CALL_DISPATCH,
    CALL_COMBINE,
    CALL_LL_NEW,
    CALL_LL,
    CALL_BARRIER,
    CALL_GATHER,
    CALL_AGREE,
    CALL_POLL,
    CALL_FREE,
    CALLS
};

/* A call that failed. */
struct outcome {
    enum call call;
    int generation;
    ep_status status, async; /* async: result of ep_comm_async_error() at that time */
    int named;               /* the first rank in the text, by its number in the first group; -1: none, -2: not known */
    int host;                /* of this rank in this group */
    uint64_t begin_ns, end_ns;
    char text[STORM_TEXT];
};

enum storm_state { STORM_BEFORE = 0, STORM_RUNS, STORM_DONE, STORM_GAVE_UP, STORM_NO_GROUP };

struct storm_rank_context {
    _Atomic int pid, tid;
    _Atomic int state;                           /* enum storm_state */
    _Atomic uint32_t calls;                      /* begun */
    _Atomic uint32_t wake;                       /* number of calls at which to wake the controller */
    _Atomic int call;                            /* enum call, the current one */
    _Atomic int failed[STORM_GENERATIONS];       /* it has learnt that this group failed */
    _Atomic int generation;                      /* agreed on */
    _Atomic uint32_t aborts;                     /* times that the handler called ep_comm_abort() */
    _Atomic uint64_t left_ns[STORM_GENERATIONS]; /* when it began to leave that group, or its creation failed */
    _Atomic int leave;                           /* requested */
    _Atomic uint64_t injected_ns[INJECTIONS];
    _Atomic int unseen;                     /* dead before its first all-gather: no rank knew of it */
    _Atomic int created[STORM_GENERATIONS]; /* 1 + status of ep_comm_new() */
    _Atomic uint32_t gathers;               /* of its ep_comm_new(), begun */
    int n_outcomes;
    struct outcome outcomes[STORM_OUTCOMES];
    char changed[256], wrong[256], left_behind[256], other[256];
};

/* Shared by the controller and the ranks of a storm. */
struct storm_table {
    struct storm storm;
    _Atomic uint32_t wake; /* futex word of the controller */
    _Atomic int end;       /* no more injections: leave together */
    _Atomic int launched;  /* 1 + status of ep_launch() */
    char launch_text[STORM_TEXT], launcher_left_behind[256];
    int exit_code[MAX_RANKS], exit_signal[MAX_RANKS]; /* as returned by ep_launch() */
    struct regroup regroup;
    struct storm_rank_context ranks[MAX_RANKS];
};

/* The result of a storm: complaints, and their number of each kind. */
struct storm_result {
    _Atomic int done;
    int number, faults, void_faults, starved, unseen, cpu_ms;
    int exclusions, excused; /* ranks that were excluded; those of them without an injected fault that were late */
    bool loaded;             /* the load explains late ranks: more than MAX_LOAD */
    int hangs, leftovers, names, changes, wrong, others;
    char text[STORM_COMPLAINTS];
    char history[STORM_HISTORY]; /* statuses of each rank with times: to explain the complaints */
};

enum storm_kind { WRONG_HANG, WRONG_LEFTOVER, WRONG_NAME, WRONG_CHANGE, WRONG_RESULT, WRONG_OTHER };

/* Counts a complaint and keeps its text. */
void storm_complain(struct storm_result *result, enum storm_kind kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* --- storm_plan.c --- */
struct storm_choice {
    int linked_percent;
    unsigned limits; /* possible limits */
    int mode;        /* -1: any */
};
struct storm storm_plan(uint64_t seed, int number, const struct storm_choice *choice);
const char *injection_name(enum injection injection);
const char *call_name(enum call call);
void storm_describe(const struct storm *storm, char *ret_text, size_t bytes);
/* splitmix64 */

/* --- storm_rank.c --- */
int storm_rank(const ep_boot *boot, void *table);

/* Resources of a process that must not leak. */
struct storm_resources {
    int descriptors, threads, segments;
};
struct storm_resources storm_resources(void);
/* Lifts the limits of the process. Describes the increase since `before`, "" if none. */
void storm_check_resources(const struct storm_resources *before, char *ret_text, size_t bytes);

/* --- storm_run.c --- */
/* Runs a storm in this process, which must have no other children. */
void storm_run(const struct storm *storm, struct storm_result *ret_result);

/* --- storm_limits.c --- */
/* Limits this process and its children from now on. False: not possible here. */
bool storm_limit(unsigned limits);
/* Limits that are possible on this machine; tried in children. */
unsigned storm_possible_limits(void);
/* A mount namespace of its own with an empty /dev/shm. */
bool storm_isolate(void);

/* --- storm_check.c --- */
enum { STORM_DELAYS = 1500 };
/* How long a thread was runnable but not scheduled since it began, at successive instants. */
struct storm_delays {
    int n;
    struct {
        uint64_t at_ns, delay_ns;
    } sample[STORM_DELAYS];
};
struct storm_watch {
    bool launcher_killed;
    bool hung;
    int how[MAX_RANKS]; /* as waitpid() reported for orphans of the launcher */
    struct storm_delays delays[MAX_RANKS];
    struct storm_delays own_delays; /* delays of the controller, for any reason */
};
void storm_check(const struct storm_table *table, const struct storm_watch *watch, struct storm_result *result);
/* Lists the injections and statuses of each rank, with the time since the first. */
void storm_list_outcomes(const struct storm_table *table, const struct storm_watch *watch, char *ret_text,
                         size_t bytes);

#endif
