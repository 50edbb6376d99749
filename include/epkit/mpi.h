/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/mpi.h - ranks that mpirun started. Needs libepkit-mpi and an MPI; the only header with MPI types.
 *
 * Ranks of one node share memory; between nodes rows travel over MPI point-to-point messages on a duplicate of the
 * communicator. MPI must have been initialised with MPI_THREAD_SERIALIZED at least, and with MPI_THREAD_MULTIPLE if
 * operations that are only queued run while the application itself calls MPI.
 */
#ifndef EPKIT_MPI_H
#define EPKIT_MPI_H

#include <epkit/boot.h>

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_boot_mpi ep_boot_mpi;

/* Collective over `parent`, which it duplicates. Nodes are found from the hosts, see ep_comm_new(). */
EP_API ep_status ep_boot_mpi_new(MPI_Comm parent, ep_boot_mpi **ret_boot);

/*
 * The boot to hand to ep_comm_new(). While a communicator is created, a rank of the same host that has died is noticed
 * at once (EP_E_PEER_DEAD), if its process is visible here (comm.h); one of another host costs the others their
 * deadline (EP_E_TIMEOUT), unless MPI itself notices and ends them all, as mpirun does unless told otherwise. Not in a
 * forked child: EP_E_STATE.
 *
 * Borrowed: it lives as long as `boot`.
 */
EP_API const ep_boot *ep_boot_mpi_get(const ep_boot_mpi *boot);

/* After every communicator made from it is freed, before MPI_Finalize(). NULL is fine. */
EP_API void ep_boot_mpi_free(ep_boot_mpi *boot);

#ifdef __cplusplus
}
#endif

#endif
