/* SPDX-License-Identifier: Apache-2.0 */
/* machine.h - what this machine is, as far as a reader of results must know. */
#ifndef EP_TOOL_MACHINE_H
#define EP_TOOL_MACHINE_H

#include <jansson.h>

/*
 * {"cpu": model, "cores": usable by this process, "numa_nodes", "memory_bytes", "kernel", "os", "arch",
 *  "gpus": [{"name", "pci"}], "gpu_driver": version or null, "mpi": version or null, "mpi_missing": why or null}.
 * Nothing in it identifies the machine or its owner. A new reference; what cannot be read is null.
 */
json_t *machine_describe(void);

/* "AMD EPYC, 2 cores, 23.5 GiB, no GPU": one line for people. */
void machine_sentence(const json_t *machine, char *ret_text, size_t bytes);

#endif
