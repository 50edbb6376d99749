/* SPDX-License-Identifier: Apache-2.0 */
#include "machine_job.h"

#include "machine/software/advice.h"
#include "queries.h"

#include <stdlib.h>

long machine_job_number(const struct doctor_machine *machine, const char *name, long without)
{
    const char *value = source_env(machine->source, name);
    char *end;
    long number;

    if (!value || !*value)
        return without;
    number = strtol(value, &end, 10);
    return *end || number < 0 ? without : number;
}

int machine_job_gpus(const struct doctor_machine *machine)
{
    struct machine_visible entries[MACHINE_VISIBLE_MAX];
    int n = machine_visible(machine, entries);

    if (advice_gpu_of(machine->topo, advice_source_env, machine->source) >= 0)
        return 1;
    return n < 0 || n > machine->topo->n_gpus ? machine->topo->n_gpus : n;
}

long machine_job_nodes(const struct doctor_machine *machine)
{
    /* Slurm, scripts around torchrun, torchrun itself. */
    static const char *const names[] = {"SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "GROUP_WORLD_SIZE"};
    long nodes = -1;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        long value = machine_job_number(machine, names[i], -1);

        nodes = value > nodes ? value : nodes;
    }
    return nodes;
}
