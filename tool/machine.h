/* SPDX-License-Identifier: Apache-2.0 */
/* machine.h - what this machine is, as far as a reader of results must know. */
#ifndef EP_TOOL_MACHINE_H
#define EP_TOOL_MACHINE_H

#include "source/root.h"

#include <jansson.h>
#include <stdint.h>

/*
 * {"cpu": model, "cores": usable by this process, "numa_nodes", "memory_bytes", "kernel", "os", "arch",
 *  "gpus": [{"name", "pci"}], "gpu_driver": version or null, "mpi": version or null, "mpi_missing": why or null}.
 * Nothing in it identifies the machine or its owner. A new reference; what cannot be read is null.
 */
json_t *machine_describe(void);

/* --- machine_read.c --- */

/* What of it is read from files and the driver, of any machine: "cpu", "numa_nodes", "os", "gpus", "gpu_driver". */
void machine_read(struct root *root, json_t *machine);

/* --- machine_limits.c --- */

/*
 * What the control groups of this process allow, the tightest of its own and those above, version 1 or 2.
 */
struct machine_limits {
    uint64_t memory_bytes; /* UINT64_MAX: no limit */
    double cpus;           /* of time; 0: no limit */
};

void machine_limits(struct root *root, struct machine_limits *ret_limits);

/* Memory and cores that this process may use: of the machine, of its affinity, of its control groups. */
uint64_t machine_memory_bytes(void);
/* "1.5 GiB", "96 MiB". */
#define MACHINE_BYTES_TEXT 32
void machine_print_bytes(double bytes, char ret_text[MACHINE_BYTES_TEXT]);
int machine_cores(void);

/* "AMD EPYC, 2 cores, 23.5 GiB, no GPU": one line for people. */
void machine_sentence(const json_t *machine, char *ret_text, size_t bytes);

#endif
