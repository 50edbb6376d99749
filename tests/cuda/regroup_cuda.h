/* SPDX-License-Identifier: Apache-2.0 */
/* regroup_cuda.h - what the scenarios of regroup_cuda share. Those in which ranks die at chosen places are in kill.c.
 */
#ifndef EP_TESTS_CUDA_REGROUP_CUDA_H
#define EP_TESTS_CUDA_REGROUP_CUDA_H

#include "ll_model.h"
#include "plan_step.h"
#include "tests/regroup.h"

#include <stdatomic.h>

enum {
    TIMEOUT_MS = 4000,
    SLACK_MS = 1500, /* allowed after a deadline, on a busy machine */
    STEP_MS = 60000, /* limit of waits for other ranks of the test: a process starts CUDA */
    TOKENS = 24,
    HIDDEN = 512,
    WAIT_MS = 5 /* the others wait in their kernels by then */
};

struct state;

struct scenario {
    const char *name;
    uint32_t comm_flags, ll_flags;
    int losses, rounds;
    bool lowest; /* the victim is rank 0, not one of the others in turn */
    bool plans;
    bool steps;     /* a graph of operations on plans, too, and victims die in it */
    int timeout_ms; /* 0: TIMEOUT_MS */
    bool one_node;
    bool replaces;                           /* run() is called again in a new process */
    int (*run)(struct state *s, int number); /* NULL: losses and new processes. `number`: its first group */
};

/* Shared by all processes. */
struct page {
    struct regroup cuda, host;
    _Atomic int ready[MAX_RANKS]; /* the group for which the new process of a rank is ready */
    _Atomic int died[MAX_RANKS];  /* 1 + the group in which a rank has ended on purpose */
    _Atomic int step, stopped;    /* stopped: the process of a rank */
    /* kill.c */
    _Atomic int open;               /* the newest group that a new process may join */
    _Atomic int leaving, resumed;   /* ranks that leave the stopped one out; it goes on */
    _Atomic int gathers, new_calls; /* of a creation: all-gathers of its bootstrap, calls of the CUDA runtime */
};

struct state {
    const struct scenario *scenario;
    struct page *page;
    struct group group;
    struct model model;
    cudaGraphExec_t graph;
    struct plan_step step;
    void *rows; /* the experts' copy */
    int round;
    unsigned members;      /* of the group of now */
    uint64_t every, first; /* kill.c: of the cells, every that many from this one on */
    double down_ms, up_ms; /* the longest times until a failure was reported, and until a group was made */
};

static inline unsigned all_ranks(const struct state *s)
{
    return (1u << s->group.nranks) - 1;
}

/* Makes or changes the communicator of a backend. */
ep_status make(const struct state *s, bool cuda, int number, unsigned members, ep_comm **comm);
/* The numbers of rendezvous are used again: nobody is in those of eight groups ago. */
void reset(struct regroup *shared, int number);
/* Creates the context of the process. */
int warm_up(const struct state *s);
/* Of a new process: all that the others do not wait for comes before the group. */
int join(struct state *s, int number, unsigned members);
int change(struct state *s, int number, unsigned members);
int launch(struct state *s, ep_status *ret_status);
/* Rounds with exactly these ranks. */
int replay(struct state *s, int rounds, unsigned members);
_Noreturn void die(struct state *s, int number);
/* Of a new process: captures the graphs. */
int open_graphs(struct state *s);
/* Both, with all ranks. */
int begin(struct state *s, int number);
/* Launches the graphs of a rank that is left out. */
int reach_nobody(struct state *s, ep_status expected);

/* --- kill.c --- */

/* The process of a rank has ended: bootstraps do not wait for it. */
void note_end(struct page *page, int rank);
/* Makes the all-gathers of a bootstrap points, too. */
void kill_at_gathers(ep_boot *boot);
/* Has the module points? */
bool has_points(void);
/* Ranks are killed or stopped at each point. */
int run_points(struct state *s, int number);
/* A graph with operations on a plan that was not renewed. */
int run_unrenewed(struct state *s, int number);
#endif
