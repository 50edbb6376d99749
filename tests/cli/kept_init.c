/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into the ranks of mpirun: MPI_Init_thread never returns. */
#include <unistd.h>

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided);

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided)
{
    (void)argc;
    (void)argv;
    (void)required;
    (void)provided;
    for (;;)
        pause();
}
