/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpirun.h - ranks under MPI: the baseline MPI_Alltoallv needs them. If mpirun has not started epkit, the command
 * starts `mpirun -n N epkit __bench REQUEST`; its ranks meet as any ranks of mpirun do, and rank 0 prints the events.
 */
#ifndef EP_BENCH_MPIRUN_H
#define EP_BENCH_MPIRUN_H

#include "bench.h"
#include "cmd/bench/mpi/module.h"

#define BENCH_MPIRUN_COMMAND "__bench"

/* "Open MPI v4.1.4 ..."; NULL: mpirun is not found, or libepkit-bench-mpi does not load, for the reason *ret_why. */
const char *bench_mpi_version(const char **ret_why);

/* The hidden command. */
int bench_mpirun_main(int argc, char **argv);

/* As ranks_run() with BENCH_JOB, on ranks that mpirun starts. */
int bench_mpirun(const struct ranks_spec *spec, const json_t *parameters, ranks_event_fn on_event, void *context);

/*
 * On a rank. *ret_mpi: MPI, initialised; NULL if MPI_Alltoallv is not to be measured, or one of the ranks cannot. The
 * same on all ranks.
 */
ep_status bench_mpi_start(struct ranks_ctx *ctx, const struct bench_request *request,
                          const struct bench_mpi_module **ret_mpi);

#endif
