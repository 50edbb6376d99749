/* SPDX-License-Identifier: Apache-2.0 */
/* bench_host.h - description of this machine, for reports. */
#ifndef EP_BENCH_BENCH_HOST_H
#define EP_BENCH_BENCH_HOST_H

#include "machine/source/source.h"

#include <jansson.h>
#include <stdint.h>

/*
 * {"cpu": model, "cores": usable by this process, "numa_nodes", "memory_bytes", "kernel", "os", "arch",
 *  "gpus": [{"name", "pci"}], "gpu_driver": version or null}.
 * It does not identify the machine or its owner. A new reference; values that cannot be read are null.
 */
json_t *machine_describe(void);

/* Sets the values that come from files and the driver: "cpu", "numa_nodes", "os", "gpus", "gpu_driver". */
void machine_read(struct source *source, json_t *machine);

/* Limits of the control groups (version 2) of this process: the minimum of its own and all ancestors. */
struct machine_limits {
    uint64_t memory_bytes; /* UINT64_MAX: no limit */
    double cpus;           /* of time; 0: no limit */
};

void machine_limits(struct source *source, struct machine_limits *ret_limits);

/* Memory that this process may use: of the machine, limited by its control groups. */
uint64_t machine_memory_bytes(void);
/* "1.5 GiB", "96 MiB". */
#define MACHINE_BYTES_TEXT 32
void machine_print_bytes(double bytes, char ret_text[MACHINE_BYTES_TEXT]);
/* Cores that this process may use: of its affinity, limited by its control groups. */
int machine_cores(void);

/* "AMD EPYC, 2 cores, 23.5 GiB, no GPU": a one-line summary. */
void machine_summary(const json_t *machine, char *ret_text, size_t bytes);

#endif
