/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.h - the interface of libepkit-mpi.so for the command, which loads it on demand so that it runs without MPI.
 * Engines use epkit/mpi.h instead.
 */
#ifndef EP_MPI_MODULE_H
#define EP_MPI_MODULE_H

#include <epkit/boot.h>

struct ep_boot_mpi;

struct ep_mpi_module {
    uint32_t abi; /* EP_MPI_MODULE_ABI */
    /* start: MPI_Init_thread, and a bootstrap over MPI_COMM_WORLD. stop: frees it and finalises MPI. */
    ep_status (*start)(struct ep_boot_mpi **ret_boot);
    void (*stop)(struct ep_boot_mpi *boot);
    const ep_boot *(*get)(const struct ep_boot_mpi *boot);
    /*
     * All-to-all in units of unit_bytes, for the benchmark's baseline. Counts and offsets in units. EP_E_TIMEOUT after
     * timeout_ms: MPI cannot cancel it, and may access the buffers until stop() has returned.
     */
    ep_status (*alltoallv)(struct ep_boot_mpi *boot, const void *send, const int *send_counts, const int *send_offsets,
                           void *recv, const int *recv_counts, const int *recv_offsets, size_t unit_bytes,
                           int timeout_ms);
    /* EP_E_TIMEOUT after EP_MPI_BARRIER_MS; the bootstrap is then unusable. */
    ep_status (*barrier)(struct ep_boot_mpi *boot);
    const char *(*library_version)(void); /* "Open MPI v4.1.4" */
};

#define EP_MPI_MODULE_ABI 2u
#define EP_MPI_BARRIER_MS 60000
#define EP_MPI_MODULE_SYMBOL "ep_mpi_module" /* const struct ep_mpi_module */

#endif
