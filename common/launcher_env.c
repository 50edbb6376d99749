/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launcher_env.c - environment variables of launchers.
 *
 * All descendants of a rank inherit them, and users may set them. So they only tell that MPI must be initialised, and,
 * if they contradict it, which ones the user has to unset.
 */
#include "launcher_env.h"

#include "clean.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct launcher {
    const char *rank, *size; /* size NULL: the launcher sets none */
    /*
     * The variables of a batch system. An mpirun in a job starts one daemon per node as a task, and the ranks inherit
     * the variables of that task. So they count only without variables of another launcher; and rank 0 without a size
     * does not count, because a batch script has it, too.
     */
    bool is_batch;
};

static const struct launcher launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", false}, /* Open MPI's mpirun */
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", false},   /* MVAPICH2 */
    {"PMI_RANK", "PMI_SIZE", false},                         /* MPICH, Intel MPI, srun --mpi=pmi2 */
    {"PMIX_RANK", NULL, false},                              /* srun --mpi=pmix, prun */
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", true},          /* srun */
};

#define N_LAUNCHERS (sizeof(launchers) / sizeof(launchers[0]))

enum { ABSENT = -1, INVALID = -2 };

struct variable {
    int number;
    char text[32]; /* the value, safe to print */
};

/* As at the start of the process: MPI_Init() sets some of them. */
static struct {
    bool is_read;
    struct variable ranks[N_LAUNCHERS], sizes[N_LAUNCHERS];
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
    }
    cache.is_read = true;
}

/* A single rank does not count: interactive shells of batch systems have such variables. */
static bool is_launched_by(size_t launcher)
{
    int rank = cache.ranks[launcher].number, size = cache.sizes[launcher].number;

    if (launchers[launcher].is_batch)
        return rank > 0 || (rank == 0 && size > 1);
    if (size == ABSENT)
        return rank != ABSENT;
    return size != 1 || rank > 0 || rank == INVALID;
}

static bool counts(size_t launcher)
{
    if (launchers[launcher].is_batch)
        for (size_t i = 0; i < N_LAUNCHERS; i++)
            if (!launchers[i].is_batch && is_launched_by(i))
                return false;
    return is_launched_by(launcher);
}

bool ranks_env_is_launched(void)
{
    read_variables();
    for (size_t i = 0; i < N_LAUNCHERS; i++)
        if (counts(i))
            return true;
    return false;
}

bool ranks_env_is_follower(void)
{
    struct variable rank = read_variable("RANK");

    read_variables();
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
    size_t used = 0;

    *ret_text = '\0';
    for (size_t i = 0; i < N_LAUNCHERS; i++) {
        const struct variable *const values[] = {&cache.ranks[i], &cache.sizes[i]};
        const char *const names[] = {launchers[i].rank, launchers[i].size};

        for (size_t k = 0; k < 2 && counts(i); k++)
            if (values[k]->number != ABSENT && used < bytes)
                used += (size_t)snprintf(ret_text + used, bytes - used, "%s%s=%s", used ? ", " : "", names[k],
                                         values[k]->text);
    }
}

static bool is_other(const char *name, const struct variable *variable, int truth, const char *what, char *ret_why,
                     size_t bytes)
{
    if (variable->number == ABSENT || variable->number == truth)
        return false;
    snprintf(ret_why, bytes, "%s is '%s', but by MPI %s %d", name, variable->text, what, truth);
    return true;
}

bool ranks_env_matches(int rank, int size, char *ret_why, size_t bytes)
{
    read_variables();
    for (size_t i = 0; i < N_LAUNCHERS; i++)
        if (counts(i) &&
            (is_other(launchers[i].size, &cache.sizes[i], size, "the number of ranks is", ret_why, bytes) ||
             is_other(launchers[i].rank, &cache.ranks[i], rank, "this process is rank", ret_why, bytes)))
            return false;
    return true;
}
