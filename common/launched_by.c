/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launched_by.c - environment variables of launchers.
 *
 * All descendants of a rank inherit them, and users may set them. So variables of several launchers must agree, and
 * errors name the variables, which the user may have to unset.
 */
#include "launched_by.h"

#include "text.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct launcher {
    const char *rank, *size;
    const char *local_size; /* number of ranks on this host; NULL: the launcher sets none */
    /* Rank 0 without a size does not count: PMIX_RANK often has none, and a batch script has SLURM_PROCID, too. */
    bool is_alone_without_size;
    /*
     * The variables of a batch system. An mpirun in a job starts one daemon per node as a task, and the ranks inherit
     * the variables of that task. So they count only without variables of another launcher.
     */
    bool is_batch;
};

static const struct launcher launchers[] = {
    /* Open MPI's mpirun; MVAPICH2; MPICH, Intel MPI and srun --mpi=pmi2; srun --mpi=pmix and prun; srun. */
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", false, false},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", false, false},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", false, false},
    {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", NULL, true, false},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NULL, true, true},
};

#define N_LAUNCHERS (sizeof(launchers) / sizeof(launchers[0]))

/* Ports of ranks that share a host, below those that Linux gives to outgoing connections (32768 and up). */
#define FIRST_PORT 16384
#define N_PORTS 16384

enum { ABSENT = -1, INVALID = -2 };

struct variable {
    int number;
    char text[32]; /* the value, safe to print */
};

/* As at the start of the process: MPI_Init() sets some of them. */
static struct {
    bool is_read;
    struct variable ranks[N_LAUNCHERS], sizes[N_LAUNCHERS], local_sizes[N_LAUNCHERS];
} cache;

static struct variable read_variable(const char *name)
{
    const char *text = name ? getenv(name) : NULL;
    struct variable variable = {.number = ABSENT};
    char *end;
    long value;

    if (!text)
        return variable;
    text_clean(text, variable.text, sizeof(variable.text));
    errno = 0;
    value = strtol(text, &end, 10);
    variable.number = *text < '0' || *text > '9' || *end || errno || value > INT_MAX ? INVALID : (int)value;
    return variable;
}

static void read_variables(void)
{
    for (size_t i = 0; i < N_LAUNCHERS && !cache.is_read; i++) {
        cache.ranks[i] = read_variable(launchers[i].rank);
        cache.sizes[i] = read_variable(launchers[i].size);
        cache.local_sizes[i] = read_variable(launchers[i].local_size);
    }
    cache.is_read = true;
}

/* A single rank does not count: interactive shells of batch systems have such variables. */
static bool is_launched_by(size_t launcher)
{
    int rank = cache.ranks[launcher].number, size = cache.sizes[launcher].number;

    if (launchers[launcher].is_alone_without_size)
        return rank > 0 || (rank == 0 && size > 1);
    if (size == ABSENT)
        return rank != ABSENT;
    return size != 1 || rank > 0 || rank == INVALID;
}

static bool counts(size_t launcher)
{
    read_variables();
    return is_launched_by(launcher) &&
           !(launchers[launcher].is_batch && ANY_OF(i, N_LAUNCHERS, !launchers[i].is_batch && is_launched_by(i)));
}

bool ranks_env_is_launched(void)
{
    return ANY_OF(i, N_LAUNCHERS, counts(i));
}

bool ranks_env_is_mpirun(void)
{
    return ANY_OF(i, N_LAUNCHERS, !launchers[i].is_batch && counts(i));
}

bool ranks_env_is_follower(void)
{
    struct variable rank = read_variable("RANK");

    for (size_t i = 0; i < N_LAUNCHERS; i++)
        if (counts(i))
            return cache.ranks[i].number > 0;
    return rank.number > 0 && getenv("WORLD_SIZE");
}

/* Treats an empty variable as not set, like the library. */
static const char *find_value(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

const char *ranks_env_missing(void)
{
    if (!find_value("WORLD_SIZE"))
        return "WORLD_SIZE is not set";
    if (!find_value("RANK"))
        return "RANK is not set";
    return find_value("EPKIT_ADDRESS") || find_value("MASTER_ADDR") ? NULL : "MASTER_ADDR is not set";
}

bool ranks_env_is_tcp(bool requested, bool alone)
{
    if (ranks_env_missing() || (strcmp(find_value("WORLD_SIZE"), "1") == 0 && !alone))
        return false;
    return requested || find_value("TORCHELASTIC_RUN_ID");
}

void ranks_env_print(char *ret_text, size_t bytes)
{
    *ret_text = '\0';
    for (size_t i = 0; i < N_LAUNCHERS; i++) {
        const struct variable *const values[] = {&cache.ranks[i], &cache.sizes[i]};
        const char *const names[] = {launchers[i].rank, launchers[i].size};

        for (size_t k = 0; k < 2 && counts(i); k++)
            if (values[k]->number != ABSENT)
                text_append(ret_text, bytes, "%s%s=%s", *ret_text ? ", " : "", names[k], values[k]->text);
    }
}

/* Takes a number that launchers must agree on. `name`: its variable, *first: the one that gave it. */
static bool take_number(const char *name, const struct variable *variable, const char **first, int *number,
                        char *ret_why, size_t bytes)
{
    if (variable->number == INVALID)
        snprintf(ret_why, bytes, "%s is '%s', not a number", name, variable->text);
    else if (*first && variable->number != ABSENT && variable->number != *number)
        snprintf(ret_why, bytes, "%s is '%s', but %s is '%d'", name, variable->text, *first, *number);
    else if (*first || variable->number == ABSENT)
        return true;
    else {
        *first = name;
        *number = variable->number;
        return true;
    }
    return false;
}

/* Do all ranks run on this host? By the launcher's own number of local ranks, else by Slurm's number of nodes. */
static bool is_one_host(int size)
{
    const struct variable nodes = read_variable("SLURM_STEP_NUM_NODES");

    for (size_t i = 0; i < N_LAUNCHERS; i++)
        if (counts(i) && cache.local_sizes[i].number != ABSENT)
            return cache.local_sizes[i].number == size;
    return nodes.number == 1;
}

/* What the ranks of one mpirun on this host have in common, and those of others have not. */
static void find_job(char *ret_job, size_t bytes)
{
    const char *name = getenv("PMIX_NAMESPACE"), *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");

    if (name)
        snprintf(ret_job, bytes, "mpirun %s", name);
    else if (job && step)
        snprintf(ret_job, bytes, "srun %s.%s", job, step);
    else
        snprintf(ret_job, bytes, "process %d", (int)getppid());
}

bool ranks_env_read(struct ranks_env *ret_env, char *ret_why, size_t bytes)
{
    const char *rank_from = NULL, *size_from = NULL;
    struct ranks_env env = {0};

    for (size_t i = 0; i < N_LAUNCHERS; i++)
        if (counts(i) && !(take_number(launchers[i].size, &cache.sizes[i], &size_from, &env.size, ret_why, bytes) &&
                           take_number(launchers[i].rank, &cache.ranks[i], &rank_from, &env.rank, ret_why, bytes)))
            return false;
    if (!size_from || !rank_from) {
        snprintf(ret_why, bytes, "no variable gives the number of %s", size_from ? "this rank" : "ranks");
        return false;
    }
    if (env.size < 1 || env.rank >= env.size) {
        snprintf(ret_why, bytes, "%s is '%d', and %s is '%d'", rank_from, env.rank, size_from, env.size);
        return false;
    }
    if (is_one_host(env.size) && !find_value("EPKIT_ADDRESS")) {
        find_job(env.job, sizeof(env.job));
        snprintf(env.address, sizeof(env.address), "127.0.0.1:%" PRIu64,
                 FIRST_PORT + text_hash(env.job, strlen(env.job)) % N_PORTS);
    }
    *ret_env = env;
    return true;
}
