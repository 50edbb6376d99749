/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.h - the one way MPI is called here: locked where MPI wants it, errors turned into ours.
 */
#ifndef EP_MPI_CALL_H
#define EP_MPI_CALL_H

#include "base/error.h"

#include <mpi.h>

/* EP_MPI(MPI_Test, (&request, &done, MPI_STATUS_IGNORE)): an ep_status; EP_E_SYSTEM with the words of MPI. */
#define EP_MPI(function, arguments) (ep_mpi_call_begin(), ep_mpi_call_end(function arguments, #function))

/*
 * Below MPI_THREAD_MULTIPLE one thread at a time may be inside MPI, and epkit has two: the caller's and the worker's.
 * One lock for the process, because MPI is one.
 */
void ep_mpi_call_begin(void);
ep_status ep_mpi_call_end(int code, const char *function);

/* Initialised, not finalised, and a thread level that allows for more than one thread. */
ep_status ep_mpi_check(const char *caller);

/* MPI may be called: between MPI_Init and MPI_Finalize. */
int ep_mpi_is_up(void);

#endif
