/* SPDX-License-Identifier: Apache-2.0 */
#include "host.h"
#include "mpirun.h"

#include "common/output.h"
#include "common/ranks/ranks_internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

json_t *machine_describe(void)
{
    json_t *machine = json_pack("{s:n, s:i, s:n, s:I, s:n, s:n, s:n, s:[], s:n, s:n, s:n}", "cpu", "cores",
                                machine_cores(), "numa_nodes", "memory_bytes", (json_int_t)machine_memory_bytes(),
                                "kernel", "os", "arch", "gpus", "gpu_driver", "mpi", "mpi_missing");
    const char *mpi = bench_mpi_version(), *why = NULL;
    struct utsname name;
    struct source *source;

    if (uname(&name) == 0) {
        json_object_set_new(machine, "kernel", out_text(name.release));
        json_object_set_new(machine, "arch", out_text(name.machine));
    }
    if (mpi)
        json_object_set_new(machine, "mpi", out_text(mpi));
    else if (!bench_mpi_available(&why))
        json_object_set_new(machine, "mpi_missing", out_text(why));
    if (source_open(NULL, &source) == EP_OK) {
        machine_read(source, machine);
        source_free(source);
    }
    return machine;
}

void machine_print_bytes(double bytes, char ret_text[MACHINE_BYTES_TEXT])
{
    if (bytes < (1 << 30))
        snprintf(ret_text, MACHINE_BYTES_TEXT, "%.0f MiB", bytes / (1 << 20));
    else
        snprintf(ret_text, MACHINE_BYTES_TEXT, "%.1f GiB", bytes / (1 << 30));
}

void machine_summary(const json_t *machine, char *ret_text, size_t bytes)
{
    const char *cpu = json_string_value(json_object_get(machine, "cpu"));
    size_t n_gpus = json_array_size(json_object_get(machine, "gpus"));
    const json_t *gpu = json_array_get(json_object_get(machine, "gpus"), 0);
    const char *name = json_string_value(json_object_get(gpu, "name"));
    int cores = (int)json_integer_value(json_object_get(machine, "cores"));
    double memory = (double)json_integer_value(json_object_get(machine, "memory_bytes"));
    char gpus[128] = "no NVIDIA GPU";

    if (n_gpus)
        snprintf(gpus, sizeof(gpus), "%zu x %s", n_gpus, name ? name : "NVIDIA GPU");
    snprintf(ret_text, bytes, "%s, %d core%s, %.1f GiB, %s", cpu ? cpu : "unknown CPU", cores, cores == 1 ? "" : "s",
             memory / (1u << 30), gpus);
}
