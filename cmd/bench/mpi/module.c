/* SPDX-License-Identifier: Apache-2.0 */
#include "module.h"

#include "base/backoff.h"
#include "base/clock.h"
#include "base/error.h"

#include <limits.h>
#include <mpi.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* MPI(MPI_Test, (...)): an ep_status. */
#define MPI(function, arguments) check(function arguments, #function)

static bool is_broken; /* a call has failed: MPI_Finalize() might wait for ever */
static MPI_Datatype unit = MPI_DATATYPE_NULL;
static size_t bytes_of_unit;

static ep_status check(int code, const char *function)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;

    if (code == MPI_SUCCESS)
        return EP_OK;
    is_broken = true;
    MPI_Error_string(code, text, &length);
    return ep_fail(EP_E_SYSTEM, "%s: %s (error %d)", function, text, code);
}

static void finalize(void)
{
    if (!is_broken)
        MPI_Finalize();
}

static ep_status start(int rank, int nranks)
{
    int initialised = 0, level, mine, size;

    EP_TRY(MPI(MPI_Initialized, (&initialised)));
    if (!initialised) {
        EP_TRY(MPI(MPI_Init_thread, (NULL, NULL, MPI_THREAD_FUNNELED, &level)));
        EP_TRY(MPI(MPI_Comm_set_errhandler, (MPI_COMM_WORLD, MPI_ERRORS_RETURN)));
        atexit(finalize);
    }
    EP_TRY(MPI(MPI_Comm_rank, (MPI_COMM_WORLD, &mine)));
    EP_TRY(MPI(MPI_Comm_size, (MPI_COMM_WORLD, &size)));
    if (mine != rank || size != nranks)
        return ep_fail(EP_E_MISMATCH, "MPI has rank %d of %d, and mpirun rank %d of %d: they are of different MPIs",
                       mine, size, rank, nranks);
    return EP_OK;
}

static ep_status set_unit(size_t unit_bytes)
{
    if (unit != MPI_DATATYPE_NULL && bytes_of_unit == unit_bytes)
        return EP_OK;
    if (unit_bytes == 0 || unit_bytes > INT_MAX)
        return ep_fail(EP_E_ARG, "alltoallv: units of %zu bytes", unit_bytes);
    if (unit != MPI_DATATYPE_NULL)
        EP_TRY(MPI(MPI_Type_free, (&unit)));
    EP_TRY(MPI(MPI_Type_contiguous, ((int)unit_bytes, MPI_BYTE, &unit)));
    bytes_of_unit = unit_bytes;
    return MPI(MPI_Type_commit, (&unit));
}

/* Waits for what all ranks take part in. `pauses`: between two polls. */
static ep_status await(MPI_Request request, int timeout_ms, bool pauses, const char *what)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    unsigned tries = 0;

    for (;;) {
        int done = 0;

        EP_TRY(MPI(MPI_Test, (&request, &done, MPI_STATUS_IGNORE)));
        if (done)
            return EP_OK;
        if (ep_now_ns() >= deadline_ns) {
            is_broken = true;
            return ep_fail(EP_E_TIMEOUT, "%s: not all ranks arrived within %d ms", what, timeout_ms);
        }
        if (pauses)
            ep_backoff(&tries);
    }
}

/*
 * Not MPI_Alltoallv(), which waits without a deadline for a rank that has failed. It polls without a pause, as a
 * blocking call does: it is measured.
 */
static ep_status alltoallv(const void *send, const int *send_counts, const int *send_offsets, void *recv,
                           const int *recv_counts, const int *recv_offsets, size_t unit_bytes, int timeout_ms)
{
    MPI_Request request;

    EP_TRY(set_unit(unit_bytes));
    EP_TRY(MPI(MPI_Ialltoallv, (send, send_counts, send_offsets, unit, recv, recv_counts, recv_offsets, unit,
                                MPI_COMM_WORLD, &request)));
    return await(request, timeout_ms, false, "MPI_Ialltoallv");
}

static ep_status barrier(int timeout_ms)
{
    MPI_Request request;

    EP_TRY(MPI(MPI_Ibarrier, (MPI_COMM_WORLD, &request)));
    return await(request, timeout_ms, true, "MPI_Ibarrier");
}

/* "Open MPI v4.1.4" of "Open MPI v4.1.4, package: ..."; MPICH's is several lines. */
static const char *library_version(void)
{
    static char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;

    if (MPI_Get_library_version(text, &length) != MPI_SUCCESS)
        return "MPI";
    text[strcspn(text, ",\n")] = '\0';
    return text;
}

extern EP_PRIVATE_API const struct bench_mpi_module bench_mpi_module;

const struct bench_mpi_module bench_mpi_module = {
    .abi = BENCH_MPI_ABI,
    .start = start,
    .alltoallv = alltoallv,
    .barrier = barrier,
    .library_version = library_version,
};
