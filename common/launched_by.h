/* SPDX-License-Identifier: Apache-2.0 */
/* launched_by.h - what the environment variables of launchers say of this process. */
#ifndef EP_COMMON_LAUNCHED_BY_H
#define EP_COMMON_LAUNCHED_BY_H

#include <stdbool.h>
#include <stddef.h>

/* Whether variables of an MPI launcher say that this process is one of several ranks. */
bool ranks_env_is_launched(void);

/* ranks_env_is_mpirun() does not count variables of batch systems alone: if it is true, MPI_Init() works. */
bool ranks_env_is_mpirun(void);

/* Whether the variables of any launcher say that it is not rank 0. */
bool ranks_env_is_follower(void);

/* Prints these variables: "PMI_RANK=0, PMI_SIZE=4". */
void ranks_env_print(char *ret_text, size_t bytes);

struct ranks_env {
    int rank, size;
    /* If all ranks run on this host and EPKIT_ADDRESS is not set, else "": */
    char address[32]; /* where they meet */
    char job[128];    /* the same on all of them, and another one in other jobs */
};

/* Reads them. If a value is invalid, or two launchers contradict each other, ret_why names the variables. */
bool ranks_env_read(struct ranks_env *ret_env, char *ret_why, size_t bytes);

/*
 * Whether the variables of torchrun and `epkit launch` (RANK, WORLD_SIZE, MASTER_ADDR) say that this process is one of
 * several ranks. `requested`: the command line asks for them; otherwise they count only if torchrun has started this
 * process, because pods and launchers of one process per node set them for other programs, too. `alone`: also accept a
 * single rank.
 */
bool ranks_env_is_tcp(bool requested, bool alone);

/* Why ranks_env_is_tcp(true, true) is false: "MASTER_ADDR is not set"; NULL: it is true. */
const char *ranks_env_missing(void);

#endif
