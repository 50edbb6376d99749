/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elastic.h - random changes of the members of a communicator: ranks die, stop, leave, are left out and replaced, at
 * any instant, and the others go on in the same communicator. The results of every operation are compared with a
 * reference that knows the members at that time.
 *
 *   elastic_host.c   the controller: decides who is a member of each group, starts new processes, injects faults
 *   elastic_rank.c   the program of a rank
 *   elastic_work.c   operations and the reference
 */
#ifndef EP_TESTS_ELASTIC_H
#define EP_TESTS_ELASTIC_H

#include "cmd/test/check/random.h"
#include "tests/args.h"
#include "tests/regroup.h"

#include <stdbool.h>
#include <stdint.h>

enum { SLOTS = 6, TOKENS = 12, HIDDEN = 128, TOPK = 3, LOCAL_EXPERTS = 2, TEXT_BYTES = 400 };

enum fault { FAULT_NONE, FAULT_DIE, FAULT_STOP, FAULT_LEAVE, FAULT_ABORT, FAULTS };
enum progress { PROGRESS_NONE, PROGRESS_DONE, PROGRESS_FAILED, PROGRESS_ENDED };

/* What the controller decides for one group. */
struct turn {
    unsigned members;
    enum fault fault[SLOTS];
    int at_us[SLOTS]; /* of the fault, after the call that makes the group has begun */
    int rounds;
};

/* Shared by the controller and all ranks. */
struct table {
    uint64_t seed;
    int slots, ranks_per_node, timeout_ms;
    bool tcp;
    _Atomic int number; /* of the group that is to be made now; -1: the end */
    struct turn turns[REGROUP_GROUPS];
    struct rank_report {
        _Atomic int group;      /* the last group that it has reported, + 1 */
        _Atomic int progress;   /* enum progress, of that group */
        _Atomic int rounds;     /* completed rounds of all groups */
        char text[TEXT_BYTES];  /* the failure */
        char wrong[TEXT_BYTES]; /* the first wrong result; "": none */
    } ranks[SLOTS];
    struct regroup regroup;
};

/* What a rank has on its communicator. */
struct work {
    const struct table *table;
    struct rank_report *report;
    ep_comm *comm;
    ep_plan *plan; /* of fixed capacity */
    ep_ll *ll;
    uint16_t *x, *recv, *out, *ll_recv; /* symmetric memory, kept over all changes */
    int rank, group, round;
    unsigned members;
};

/* All of them are collective over the members. `fresh`: this rank is new. */
ep_status work_open(struct work *work, bool fresh);
ep_status work_round(struct work *work);
void work_close(struct work *work);

/* The program of the process in a slot, from that group on. */
int elastic_rank(struct table *table, int slot, int group);

#endif
