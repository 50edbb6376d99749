/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.h - wrapper of all MPI calls: takes the lock if MPI requires it, and converts errors to ep_status.
 */
#ifndef EP_MPI_CALL_H
#define EP_MPI_CALL_H

#include "base/error.h"

#include <mpi.h>

/* EP_MPI(MPI_Test, (&request, &done, MPI_STATUS_IGNORE)): an ep_status; EP_E_SYSTEM with MPI's error text. */
#define EP_MPI(function, arguments) (ep_mpi_call_begin(), ep_mpi_call_end(function arguments, #function))

/*
 * Below MPI_THREAD_MULTIPLE only one thread at a time may call MPI, and epkit has two: the caller's and the worker. One
 * lock for the process, because MPI is initialised once per process.
 */
void ep_mpi_call_begin(void);
ep_status ep_mpi_call_end(int code, const char *function);

/* Is MPI initialised and not finalised, with at least MPI_THREAD_SERIALIZED? EP_E_STATE also in a forked child. */
ep_status ep_mpi_check(const char *caller);

/* MPI may be called: between MPI_Init and MPI_Finalize. */
int ep_mpi_is_up(void);

#endif
