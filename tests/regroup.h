/* SPDX-License-Identifier: Apache-2.0 */
/*
 * regroup.h - the ranks of a group that failed agree through memory that they share who is in the next one, and create
 * it. Groups are numbered, 0 is the first; ranks are those of group 0, and sets of ranks are masks.
 */
#ifndef EP_TESTS_REGROUP_H
#define EP_TESTS_REGROUP_H

#include <epkit/comm.h>
#include <stdatomic.h>

enum { REGROUP_RANKS = 16, REGROUP_GROUPS = 16, REGROUP_BYTES = 2048 };

/* Shared by all ranks, and zero at first. */
struct regroup {
    _Atomic unsigned ended; /* ranks that have ended or are about to: set by who knows */
    struct regroup_group {
        _Atomic unsigned members; /* 0: not decided */
        _Atomic uint64_t failure; /* of its all-gathers, the first: the status, and the rank that it names */
        _Atomic unsigned rounds[REGROUP_RANKS]; /* all-gathers that a rank has begun */
        unsigned char blocks[2][REGROUP_RANKS][REGROUP_BYTES];
    } groups[REGROUP_GROUPS];
};

/* The bootstrap of one member of a group. */
struct regroup_boot {
    ep_boot boot;
    struct regroup *shared;
    struct regroup_group *group;
    unsigned members, rounds;
    int rank;
};

/* Ranks that cannot take part any more, as far as this communicator knows. */
unsigned regroup_failed(const ep_comm *comm, unsigned members);

/* The members of the next group: `wanted` less those that have ended, unless another rank has decided before. */
unsigned regroup_agree(struct regroup *shared, int number, unsigned wanted);

/* `boot` must stay where it is until ep_comm_new() has returned. `per_node`: of group 0. */
void regroup_boot(struct regroup *shared, int number, int rank, int per_node, struct regroup_boot *boot);

#endif
