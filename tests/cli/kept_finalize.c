/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into the ranks of mpirun: rank 1 never calls MPI_Finalize, so that the others wait in it. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int MPI_Finalize(void);

int MPI_Finalize(void)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    void *module = dlopen("libepkit-mpi.so.0", RTLD_LAZY | RTLD_NOLOAD), *real = NULL;
    int (*finalize)(void);

    if (module)
        real = dlsym(module, "PMPI_Finalize");
    if (!real || (rank && strcmp(rank, "1") == 0))
        for (;;)
            pause();
    memcpy(&finalize, &real, sizeof(finalize));
    return finalize();
}
