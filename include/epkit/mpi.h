/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/mpi.h - ranks that mpirun started. Needs libepkit-mpi and an MPI; the only header with MPI types.
 *
 * Ranks of one node share memory; between nodes, rows are sent as MPI point-to-point messages on a duplicate of the
 * communicator. MPI must be initialised with at least MPI_THREAD_SERIALIZED, and with MPI_THREAD_MULTIPLE if queued
 * operations run while the application itself calls MPI.
 */
#ifndef EPKIT_MPI_H
#define EPKIT_MPI_H

#include <epkit/boot.h>

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_boot_mpi ep_boot_mpi;

/* Collective over `parent`, which it duplicates. Nodes are detected from the hosts, see ep_comm_new(). */
EP_API ep_status ep_boot_mpi_new(MPI_Comm parent, ep_boot_mpi **ret_boot);

/*
 * The bootstrap to pass to ep_comm_new(), borrowed: it stays valid as long as `boot`. Its all-gather is EP_E_STATE in a
 * forked child. NULL for NULL, which ep_comm_new() refuses.
 *
 * If a rank of the same host dies while a communicator is created, the others get EP_E_PEER_DEAD at once, provided that
 * its process is visible here (comm.h). If a rank of another host dies, the others get EP_E_TIMEOUT at their deadline,
 * unless MPI detects the death and ends all ranks, as mpirun does by default. If a rank stops answering while it sends
 * its part of the last exchange, some ranks may get the communicator and others EP_E_TIMEOUT; the former then get
 * EP_E_PEER_LEFT or EP_E_TIMEOUT from their first call that waits for the others.
 */
EP_API const ep_boot *ep_boot_mpi_get(const ep_boot_mpi *boot);

/* Call it after every communicator created from it is freed, and before MPI_Finalize(). NULL is allowed. */
EP_API void ep_boot_mpi_free(ep_boot_mpi *boot);

#ifdef __cplusplus
}
#endif

#endif
