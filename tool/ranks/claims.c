/* SPDX-License-Identifier: Apache-2.0 */
/*
 * claims.c - what environment variables of launchers say about this process.
 *
 * They are inherited by everything that is started below a rank, and anybody may set them. So they only tell that MPI
 * has to be asked, and where they contradict its answer, which ones have to go.
 */
#include "ranks_internal.h"

#include "source/root.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct family {
    const char *rank, *size; /* size NULL: the launcher tells none */
    /*
     * The variables of a batch system: an mpirun below it starts one process of its own per node as a task, whose
     * variables the ranks inherit. They count where no other ones are there, and rank 0 alone says nothing: a batch
     * script has it as well.
     */
    bool is_batch;
};

static const struct family families[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", false}, /* Open MPI's mpirun */
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", false},   /* MVAPICH2 */
    {"PMI_RANK", "PMI_SIZE", false},                         /* MPICH, Intel MPI, srun --mpi=pmi2 */
    {"PMIX_RANK", NULL, false},                              /* srun --mpi=pmix, prun */
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", true},          /* srun */
};

#define N_FAMILIES (sizeof(families) / sizeof(families[0]))

enum { ABSENT = -1, WRONG = -2 };

struct claim {
    int number;
    char text[32]; /* the variable's value, safe to print */
};

/* As they were at first: MPI sets some of them when it starts. */
static struct {
    bool are_read;
    struct claim ranks[N_FAMILIES], sizes[N_FAMILIES];
} claims;

static struct claim read_claim(const char *name)
{
    const char *text = name ? getenv(name) : NULL;
    struct claim claim = {.number = ABSENT};
    char *end;
    long value;

    if (!text)
        return claim;
    root_clean(text, claim.text, sizeof(claim.text));
    errno = 0;
    value = strtol(text, &end, 10);
    claim.number = *text < '0' || *text > '9' || *end || errno || value > INT_MAX ? WRONG : (int)value;
    return claim;
}

static void read_claims(void)
{
    for (size_t i = 0; i < N_FAMILIES && !claims.are_read; i++) {
        claims.ranks[i] = read_claim(families[i].rank);
        claims.sizes[i] = read_claim(families[i].size);
    }
    claims.are_read = true;
}

/* A world of one is none: interactive shells of batch systems look like it. */
static bool is_claim(size_t family)
{
    int rank = claims.ranks[family].number, size = claims.sizes[family].number;

    if (families[family].is_batch)
        return rank > 0 || (rank == 0 && size > 1);
    if (size == ABSENT)
        return rank != ABSENT;
    return size != 1 || rank > 0 || rank == WRONG;
}

static bool counts(size_t family)
{
    if (families[family].is_batch)
        for (size_t i = 0; i < N_FAMILIES; i++)
            if (!families[i].is_batch && is_claim(i))
                return false;
    return is_claim(family);
}

bool ranks_claims_any(void)
{
    read_claims();
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (counts(i))
            return true;
    return false;
}

bool ranks_claims_follower(void)
{
    struct claim rank = read_claim("RANK");

    read_claims();
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (counts(i))
            return claims.ranks[i].number > 0;
    return rank.number > 0 && getenv("WORLD_SIZE");
}

/* An empty variable is none, as the library reads them. */
static const char *find_value(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

const char *ranks_claims_lack(void)
{
    if (!find_value("WORLD_SIZE"))
        return "WORLD_SIZE is not set";
    if (!find_value("RANK"))
        return "RANK is not set";
    return find_value("EPKIT_ADDRESS") || find_value("MASTER_ADDR") ? NULL : "MASTER_ADDR is not set";
}

bool ranks_claims_tcp(bool asked, bool alone)
{
    if (ranks_claims_lack() || (strcmp(find_value("WORLD_SIZE"), "1") == 0 && !alone))
        return false;
    return asked || find_value("TORCHELASTIC_RUN_ID");
}

void ranks_claims_print(char *ret_text, size_t bytes)
{
    size_t used = 0;

    *ret_text = '\0';
    for (size_t i = 0; i < N_FAMILIES; i++) {
        const struct claim *const values[] = {&claims.ranks[i], &claims.sizes[i]};
        const char *const names[] = {families[i].rank, families[i].size};

        for (size_t k = 0; k < 2 && counts(i); k++)
            if (values[k]->number != ABSENT && used < bytes)
                used += (size_t)snprintf(ret_text + used, bytes - used, "%s%s=%s", used ? ", " : "", names[k],
                                         values[k]->text);
    }
}

static bool is_other(const char *name, const struct claim *claim, int truth, const char *what, char *ret_why,
                     size_t bytes)
{
    if (claim->number == ABSENT || claim->number == truth)
        return false;
    snprintf(ret_why, bytes, "%s is '%s', but by MPI's answer %s %d", name, claim->text, what, truth);
    return true;
}

bool ranks_claims_hold(int rank, int size, char *ret_why, size_t bytes)
{
    read_claims();
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (counts(i) &&
            (is_other(families[i].size, &claims.sizes[i], size, "the number of ranks is", ret_why, bytes) ||
             is_other(families[i].rank, &claims.ranks[i], rank, "this process is rank", ret_why, bytes)))
            return false;
    return true;
}
