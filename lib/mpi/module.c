/* SPDX-License-Identifier: Apache-2.0 */
#include "mpi/module.h"

#include "base/backoff.h"
#include "base/clock.h"
#include "mpi/boot.h"

#include <limits.h>
#include <string.h>

static ep_status start(ep_boot_mpi **ret_boot)
{
    int initialised = 0, level;
    ep_status status;

    EP_TRY(EP_MPI(MPI_Initialized, (&initialised)));
    if (!initialised)
        EP_TRY(EP_MPI(MPI_Init_thread, (NULL, NULL, MPI_THREAD_MULTIPLE, &level)));
    status = ep_boot_mpi_new(MPI_COMM_WORLD, ret_boot);
    if (status == EP_OK)
        (*ret_boot)->finalises = !initialised;
    else if (!initialised && ep_mpi_is_up())
        (void)EP_MPI(MPI_Finalize, ());
    return status;
}

static void stop(ep_boot_mpi *boot)
{
    bool finalises = boot && boot->finalises;

    ep_boot_mpi_free(boot);
    if (finalises && ep_mpi_is_up())
        (void)EP_MPI(MPI_Finalize, ());
}

static ep_status set_unit(ep_boot_mpi *boot, size_t unit_bytes)
{
    if (boot->unit != MPI_DATATYPE_NULL && boot->unit_bytes == unit_bytes)
        return EP_OK;
    if (unit_bytes == 0 || unit_bytes > INT_MAX)
        return ep_fail(EP_E_ARG, "alltoallv: units of %zu bytes", unit_bytes);
    if (boot->unit != MPI_DATATYPE_NULL)
        EP_TRY(EP_MPI(MPI_Type_free, (&boot->unit)));
    EP_TRY(EP_MPI(MPI_Type_contiguous, ((int)unit_bytes, MPI_BYTE, &boot->unit)));
    EP_TRY(EP_MPI(MPI_Type_commit, (&boot->unit)));
    boot->unit_bytes = unit_bytes;
    return EP_OK;
}

/* Waits for what all ranks take part in. `pauses`: between two polls. */
static ep_status await(const ep_boot_mpi *boot, MPI_Request request, int timeout_ms, bool pauses, const char *what,
                       const char *did)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    unsigned tries = 0;

    for (;;) {
        int done = 0;

        EP_TRY(EP_MPI(MPI_Test, (&request, &done, MPI_STATUS_IGNORE)));
        if (done)
            return EP_OK;
        if (ep_now_ns() >= deadline_ns)
            return ep_fail(EP_E_TIMEOUT, "%s: not all of %d ranks %s within %d ms", what, boot->boot.nranks, did,
                           timeout_ms);
        if (pauses)
            ep_backoff(&tries);
    }
}

/*
 * Not MPI_Alltoallv(), which waits without a deadline for a rank that has failed. It polls without a pause, as a
 * blocking call does: it is measured.
 */
static ep_status alltoallv(ep_boot_mpi *boot, const void *send, const int *send_counts, const int *send_offsets,
                           void *recv, const int *recv_counts, const int *recv_offsets, size_t unit_bytes,
                           int timeout_ms)
{
    MPI_Request request;

    EP_TRY(set_unit(boot, unit_bytes));
    EP_TRY(EP_MPI(MPI_Ialltoallv, (send, send_counts, send_offsets, boot->unit, recv, recv_counts, recv_offsets,
                                   boot->unit, boot->comm, &request)));
    return await(boot, request, timeout_ms, false, "MPI_Ialltoallv", "exchanged their rows");
}

static ep_status barrier(ep_boot_mpi *boot)
{
    MPI_Request request;

    EP_TRY(EP_MPI(MPI_Ibarrier, (boot->comm, &request)));
    return await(boot, request, EP_MPI_BARRIER_MS, true, "mpi barrier", "arrived");
}

/* "Open MPI v4.1.4" of "Open MPI v4.1.4, package: ..."; MPICH's is several lines. */
static const char *library_version(void)
{
    static char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;

    if (!text[0]) {
        if (EP_MPI(MPI_Get_library_version, (text, &length)) != EP_OK)
            return "MPI";
        text[strcspn(text, ",\n")] = '\0';
    }
    return text;
}

extern EP_PRIVATE_API const struct ep_mpi_module ep_mpi_module;

const struct ep_mpi_module ep_mpi_module = {
    .abi = EP_MPI_MODULE_ABI,
    .start = start,
    .stop = stop,
    .get = ep_boot_mpi_get,
    .alltoallv = alltoallv,
    .barrier = barrier,
    .library_version = library_version,
};
