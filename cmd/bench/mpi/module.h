/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.h - libepkit-bench-mpi.so: MPI_Alltoallv for the benchmark's baseline. The command loads it on demand, so that
 * it runs without MPI.
 */
#ifndef EP_BENCH_MPI_MODULE_H
#define EP_BENCH_MPI_MODULE_H

#include <epkit/status.h>
#include <stddef.h>
#include <stdint.h>

struct bench_mpi_module {
    uint32_t abi; /* BENCH_MPI_ABI */
    /*
     * Initialises MPI, which finalises itself at exit. Collective over all ranks of the job; later calls do nothing.
     * EP_E_MISMATCH if MPI has other numbers for the ranks: it is not that of the mpirun that started them.
     */
    ep_status (*start)(int rank, int nranks);
    /*
     * All-to-all in units of unit_bytes. Counts and offsets in units. EP_E_TIMEOUT after timeout_ms: MPI cannot cancel
     * it, and may access the buffers until the process ends.
     */
    ep_status (*alltoallv)(const void *send, const int *send_counts, const int *send_offsets, void *recv,
                           const int *recv_counts, const int *recv_offsets, size_t unit_bytes, int timeout_ms);
    ep_status (*barrier)(int timeout_ms);
    const char *(*library_version)(void); /* "Open MPI v4.1.4" */
};

#define BENCH_MPI_ABI 1u
#define BENCH_MPI_SYMBOL "bench_mpi_module" /* const struct bench_mpi_module */

#endif
