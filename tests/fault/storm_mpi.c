/* SPDX-License-Identifier: Apache-2.0 */
/* storm_mpi TABLE - a rank of a storm that mpirun starts. */
#include "storm.h"

#include <epkit/mpi.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct storm_table *table;
    ep_boot_mpi *boot;
    int provided, fd = argc == 2 ? open(argv[1], O_RDWR | O_CLOEXEC) : -1, rank;

    if (fd < 0) {
        fputs("Usage: storm_mpi TABLE (started by storm)\n", stderr);
        return 2;
    }
    table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (table == MAP_FAILED || MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS ||
        ep_boot_mpi_new(MPI_COMM_WORLD, &boot) != EP_OK)
        return 1;
    rank = ep_boot_mpi_get(boot)->rank;
    storm_rank(ep_boot_mpi_get(boot), table);
    atomic_store(&table->seat[rank].call, CALL_FINALIZE);
    ep_boot_mpi_free(boot);
    MPI_Finalize();
    atomic_store(&table->seat[rank].call, CALL_NONE);
    return 0;
}
