/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpi_bootstrap.c - a bootstrap of your own: ranks of mpirun, and an all-gather over MPI.
 *
 *   mpirun -n 4 ./mpi_bootstrap
 *
 * ep_comm_new() uses it while the communicator is created. Afterwards epkit does not call MPI any more: ranks of one
 * host share memory, and those of several hosts connect to each other.
 */
#include <epkit/epkit.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

/*
 * MPI_Allgather() has no deadline, so poll. A collective call that is not complete keeps its buffers, so a late rank
 * ends the job.
 */
static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    double deadline = MPI_Wtime() + timeout_ms / 1000.0;
    MPI_Comm comm = *(MPI_Comm *)context;
    MPI_Request request;
    int done = 0;

    if (MPI_Iallgather(mine, (int)bytes, MPI_BYTE, ret_all, (int)bytes, MPI_BYTE, comm, &request) != MPI_SUCCESS)
        return EP_E_SYSTEM;
    while (!done) {
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return EP_E_SYSTEM;
        if (!done && MPI_Wtime() > deadline) {
            fprintf(stderr, "not all ranks came within %d ms\n", timeout_ms);
            MPI_Abort(comm, EXIT_FAILURE);
        }
    }
    return EP_OK;
}

int main(int argc, char **argv)
{
    ep_boot boot = EP_BOOT_INIT;
    ep_comm_info info = EP_COMM_INFO_INIT;
    ep_comm *comm = NULL;
    MPI_Comm world;
    ep_status status;

    MPI_Init(&argc, &argv);
    MPI_Comm_dup(MPI_COMM_WORLD, &world);
    MPI_Comm_rank(world, &boot.rank);
    MPI_Comm_size(world, &boot.nranks);
    boot.allgather = allgather;
    boot.context = &world;
    status = ep_comm_new(&boot, NULL, &comm);
    if (status == EP_OK)
        status = ep_comm_barrier(comm);
    if (status == EP_OK)
        status = ep_comm_get_info(comm, &info);
    if (status == EP_OK)
        printf("rank %d of %d, %d on each node\n", info.rank, info.nranks, info.ranks_per_node);
    else
        fprintf(stderr, "rank %d: %s: %s\n", boot.rank, ep_status_text(status), ep_last_error());
    ep_comm_free(comm);
    MPI_Comm_free(&world);
    MPI_Finalize();
    return status == EP_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
