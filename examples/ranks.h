/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks.h - the ranks of an example are forked processes of this host. An engine has processes of its own, and fills an
 * ep_boot with whatever all-gather it has (epkit/boot.h; mpi_bootstrap.c).
 */
#ifndef EXAMPLE_RANKS_H
#define EXAMPLE_RANKS_H

#include <epkit/boot.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* Runs nranks ranks. EXIT_SUCCESS if all of them return that. */
static inline int run_ranks(int nranks, int (*run)(const ep_boot *boot))
{
    int result = EXIT_SUCCESS, code;
    ep_boot_shm *place;

    if (ep_boot_shm_new(nranks, &place) != EP_OK) {
        fprintf(stderr, "%s\n", ep_last_error());
        return EXIT_FAILURE;
    }
    for (int rank = 0; rank < nranks; rank++) {
        pid_t pid = fork();

        if (pid == 0) {
            ep_boot boot = EP_BOOT_INIT;

            code = ep_boot_shm_join(place, rank, &boot) == EP_OK ? run(&boot) : EXIT_FAILURE;
            fflush(NULL);
            _exit(code);
        }
        if (pid < 0)
            result = EXIT_FAILURE;
    }
    while (wait(&code) > 0)
        if (!WIFEXITED(code) || WEXITSTATUS(code) != EXIT_SUCCESS)
            result = EXIT_FAILURE;
    ep_boot_shm_free(place);
    return result;
}

#endif
