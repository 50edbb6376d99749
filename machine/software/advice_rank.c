/* SPDX-License-Identifier: Apache-2.0 */
/* advice_rank.c - the local rank of a process, from the variables of its launcher. */
#include "advice.h"

#include <stdio.h>
#include <string.h>

/*
 * torchrun; Open MPI; Intel MPI; MPICH and others with PMI; Slurm. Sources: the manuals of torchrun, Open MPI
 * ("Environment variables"), Intel MPI, and srun(1). Ranks that torchrun starts below mpirun or srun inherit the
 * variables of these, so it comes first.
 */
const struct advice_launcher advice_launchers[] = {
    {"LOCAL_RANK", "LOCAL_WORLD_SIZE", false},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", false},
    {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", false},
    {"PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", false},
    {"SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", true},
    {NULL, NULL, false},
};

#define RANKS_MAX 4096

const char *advice_source_env(void *source, const char *name)
{
    return source_env(source, name);
}

/* An unsigned number at the start of a text, and where it ends; -1 if there is none or it exceeds RANKS_MAX. */
static int rank_number(const char *text, const char **ret_end)
{
    int value = 0;

    *ret_end = text;
    while (**ret_end >= '0' && **ret_end <= '9' && value <= RANKS_MAX)
        value = value * 10 + (*(*ret_end)++ - '0');
    return *ret_end == text || value > RANKS_MAX ? -1 : value;
}

static int whole_number(const char *text)
{
    const char *end;
    int value = rank_number(text, &end);

    return *end ? -1 : value;
}

/* The largest number of Slurm's list, "8(x2),4"; other launchers set a plain number. -1: not such a list. */
static int largest_count(const char *text)
{
    int largest = -1;

    while (*text) {
        int value = rank_number(text, &text);

        if (value < 0)
            return -1;
        largest = value > largest ? value : largest;
        if (strncmp(text, "(x", 2) == 0)
            text += strcspn(text, ")") + (strchr(text, ')') != NULL);
        if (*text && *text++ != ',')
            return -1;
    }
    return largest;
}

/* The local rank, -1 if the process is not a rank or is the only one. */
static int local_rank(advice_getenv *get, void *context)
{
    for (const struct advice_launcher *launcher = advice_launchers; launcher->rank; launcher++) {
        const char *rank = get(context, launcher->rank), *size = get(context, launcher->size);

        if (!rank || (launcher->size_is_required && !size))
            continue;
        if (size && largest_count(size) == 1)
            return -1;
        return whole_number(rank);
    }
    return -1;
}

/*
 * The GPU of an entry of CUDA_VISIBLE_DEVICES: a number counts only the GPUs that the process may use; a UUID names one
 * GPU; "MIG-GPU-<UUID>/1/0" names the GPU of the instance, "MIG-<UUID>" does not.
 */
static int gpu_of_entry(const struct topo *topo, const char *text)
{
    char uuid[96];
    int gpu;

    if (strncmp(text, "MIG-GPU-", 8) == 0) {
        snprintf(uuid, sizeof(uuid), "%.*s", (int)strcspn(text + 4, "/"), text + 4);
        return topo_find_gpu_uuid(topo, uuid);
    }
    gpu = whole_number(text);
    if (gpu < 0)
        gpu = topo_find_gpu_uuid(topo, text);
    /* If the process may use only one GPU, the instance is on it. */
    if (gpu < 0 && strncmp(text, "MIG-", 4) == 0 && topo_usable_gpus(topo) == 1)
        gpu = 0;
    return gpu < topo_usable_gpus(topo) ? gpu : -1;
}

int advice_gpu_of(const struct topo *topo, advice_getenv *get, void *context)
{
    int rank = local_rank(get, context), n = 1, entry;
    const char *visible = get(context, "CUDA_VISIBLE_DEVICES");
    char text[96];
    size_t length;

    if (rank < 0)
        return -1;
    /* A task that was given one GPU of several uses that GPU, whatever its number on the node. */
    if (!visible || !*visible)
        return topo_usable_gpus(topo) == 1 && topo->n_hidden_gpus > 0 ? 0 : rank < topo_usable_gpus(topo) ? rank : -1;
    for (const char *p = visible; *p; p++)
        n += *p == ',';
    /* With a single entry the launcher has already given each rank its own GPU. */
    entry = n == 1 ? 0 : rank;
    if (entry >= n)
        return -1;
    for (; entry > 0; entry--)
        visible += strcspn(visible, ",") + 1;
    length = strcspn(visible, ",");
    if (length == 0 || length >= sizeof(text))
        return -1;
    memcpy(text, visible, length);
    text[length] = '\0';
    return gpu_of_entry(topo, text);
}
