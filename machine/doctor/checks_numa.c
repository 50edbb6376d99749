/* SPDX-License-Identifier: Apache-2.0 */
/* checks_numa.c - NUMA nodes: memory near the GPUs, and who moves it. */
#include "checks.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>

/* --- numa-balancing --- */

#define NUMA_BALANCING "/proc/sys/kernel/numa_balancing"

void run_numa_balancing(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text state = source_line(machine->source, NUMA_BALANCING);
    int n = 0;

    for (int i = 0; i < machine->topo->n_numa; i++)
        n += *machine->topo->numa[i].cpus != '\0';
    if (doctor_not_applicable_if(result, n < 2, "there is a single NUMA node with processors") ||
        doctor_not_applicable_if(result, state.state != SOURCE_OK, "the kernel has no " NUMA_BALANCING) ||
        doctor_not_applicable_if(result, !machine_has_ranks(machine), "one GPU, and nothing needs several ranks") ||
        (strtol(state.text, NULL, 10) & 1) == 0)
        return;
    doctor_found(result, DOCTOR_WARNING, "the kernel moves memory between NUMA nodes by itself");
    doctor_evidence(result, NUMA_BALANCING, "%s", state.text);
    if (!machine->software->os.in_container)
        doctor_fix(result, false, "sudo sysctl -w kernel.numa_balancing=0");
    doctor_advise(result, "%s",
                  machine->software->os.in_container
                      ? "On the node, not in this container: sudo sysctl -w kernel.numa_balancing=0, and "
                        "a file in /etc/sysctl.d so that it stays."
                      : "Write it to a file in /etc/sysctl.d as well, so that it stays.");
}

/* --- numa-memory --- */

/* A GPU whose NUMA node has no memory, or no processors. A GPU's memory may be a node without processors. */
void run_numa_memory(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *lacks = "";
    int n = 0, node = -1;

    for (int g = 0; g < topo->n_gpus; g++) {
        for (int i = 0; i < topo->n_numa; i++) {
            const struct topo_numa *numa = &topo->numa[i];

            if (topo->gpus[g].pci < 0 || numa->number != topo->pci[topo->gpus[g].pci].numa_node ||
                (numa->memory_bytes != 0 && *numa->cpus))
                continue;
            if (n++ == 0) {
                node = numa->number;
                lacks = numa->memory_bytes == 0 ? "memory" : "processors";
            }
            doctor_evidence(result, machine_gpu_name(machine, g), "on NUMA node %d, which has no %s", numa->number,
                            numa->memory_bytes == 0 ? "memory" : "processors");
        }
    }
    if (doctor_not_applicable_if(result, topo->n_numa == 0, "the kernel shows no NUMA nodes") || n == 0)
        return;
    doctor_found(result, DOCTOR_WARNING, "NUMA node %d, next to %d of %d GPUs, has no %s", node, n, topo->n_gpus,
                 lacks);
    doctor_advise(
        result,
        "numactl fails for it, and buffers near these GPUs are on another node. Populate its memory channels, or choose fewer nodes for a socket in the BIOS (NPS1, SNC off); in a virtual machine, give each node memory and processors.");
}
