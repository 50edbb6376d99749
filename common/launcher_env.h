/* SPDX-License-Identifier: Apache-2.0 */
/* launcher_env.h - what the environment variables of launchers say of this process. */
#ifndef EP_COMMON_LAUNCHER_ENV_H
#define EP_COMMON_LAUNCHER_ENV_H

#include <stdbool.h>
#include <stddef.h>

/* Whether variables of an MPI launcher say that this process is one of several ranks. */
bool ranks_env_is_launched(void);

/* Whether the variables of any launcher say that it is not rank 0. Does not need MPI to be initialised. */
bool ranks_env_is_follower(void);

/* Prints these variables: "PMI_RANK=0, PMI_SIZE=4". */
void ranks_env_print(char *ret_text, size_t bytes);

/* Whether they agree with rank and size of MPI. If not, ret_why names the variable that does not. */
bool ranks_env_matches(int rank, int size, char *ret_why, size_t bytes);

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
