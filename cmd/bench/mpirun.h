/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpirun.h - ranks under MPI: the baseline MPI_Alltoallv is measured where mpirun has started epkit.
 */
#ifndef EP_BENCH_MPIRUN_H
#define EP_BENCH_MPIRUN_H

#include "bench.h"
#include "cmd/bench/mpi/module.h"

/*
 * On a rank. *ret_mpi: MPI, initialised; NULL if MPI_Alltoallv is not to be measured, or one of the ranks cannot. The
 * same on all ranks.
 */
ep_status bench_mpi_start(struct ranks_ctx *ctx, const struct bench_request *request,
                          const struct bench_mpi_module **ret_mpi);

#endif
