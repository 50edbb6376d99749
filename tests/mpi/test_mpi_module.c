/* SPDX-License-Identifier: Apache-2.0 */
/* libepkit-mpi as the command uses it: loaded on demand, found by one symbol. */
#include "mpi/module.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 16, UNIT = 24, PATIENT_MS = 60000 };

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s (last error: %s)\n", __LINE__, #condition, ep_last_error());                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Rank r sends r + 1 units to each rank, each byte telling both. */
static void exchange(const struct ep_mpi_module *module, struct ep_boot_mpi *boot, size_t unit)
{
    const ep_boot *base = module->get(boot);
    int n = base->nranks, total = 0;
    int send_counts[MOST_RANKS], send_offsets[MOST_RANKS], recv_counts[MOST_RANKS], recv_offsets[MOST_RANKS];
    unsigned char send[MOST_RANKS * MOST_RANKS * UNIT], recv[MOST_RANKS * MOST_RANKS * UNIT];

    for (int r = 0; r < n; r++) {
        send_counts[r] = base->rank + 1;
        send_offsets[r] = r * (base->rank + 1);
        memset(send + (size_t)send_offsets[r] * unit, base->rank * 16 + r, (size_t)send_counts[r] * unit);
        recv_counts[r] = r + 1;
        recv_offsets[r] = total;
        total += r + 1;
    }
    memset(recv, 0xff, sizeof(recv));
    CHECK(module->alltoallv(boot, send, send_counts, send_offsets, recv, recv_counts, recv_offsets, unit, PATIENT_MS) ==
          EP_OK);
    for (int r = 0; r < n; r++)
        for (size_t i = 0; i < (size_t)recv_counts[r] * unit; i++)
            CHECK(recv[(size_t)recv_offsets[r] * unit + i] == r * 16 + base->rank);
    CHECK(recv[(size_t)total * unit] == 0xff);
}

/* Rank 0 begins the exchange when those of the others have failed. */
static void wait_for_a_late_rank(const struct ep_mpi_module *module, struct ep_boot_mpi *boot)
{
    static unsigned char send[MOST_RANKS], recv[MOST_RANKS];
    static int counts[MOST_RANKS], offsets[MOST_RANKS];
    const ep_boot *base = module->get(boot);
    int all[MOST_RANKS];

    for (int r = 0; r < base->nranks; r++) {
        counts[r] = 1;
        offsets[r] = r;
    }
    if (base->rank != 0) {
        CHECK(module->alltoallv(boot, send, counts, offsets, recv, counts, offsets, 1, 200) == EP_E_TIMEOUT);
        CHECK(strstr(ep_last_error(), "within 200 ms"));
    }
    CHECK(base->allgather(base->context, &base->rank, sizeof(int), PATIENT_MS, all) == EP_OK);
    if (base->rank == 0)
        (void)module->alltoallv(boot, send, counts, offsets, recv, counts, offsets, 1, 200);
}

int main(int argc, char **argv)
{
    void *handle = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : NULL;
    const struct ep_mpi_module *module = handle ? dlsym(handle, EP_MPI_MODULE_SYMBOL) : NULL;
    struct ep_boot_mpi *boot = NULL;
    const ep_boot *base;
    int all[MOST_RANKS];

    if (!module) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "give the module");
        return 1;
    }
    CHECK(module->abi == EP_MPI_MODULE_ABI);
    CHECK(strlen(module->library_version()) > 3 && !strchr(module->library_version(), '\n'));
    CHECK(module->start(&boot) == EP_OK);
    base = module->get(boot);
    CHECK(base->nranks > 1 && base->nranks <= MOST_RANKS);
    CHECK(base->allgather(base->context, &base->rank, sizeof(int), 10000, all) == EP_OK);
    for (int r = 0; r < base->nranks; r++)
        CHECK(all[r] == r);
    exchange(module, boot, UNIT);
    exchange(module, boot, UNIT);
    exchange(module, boot, 1); /* units of another size */
    CHECK(module->alltoallv(boot, NULL, NULL, NULL, NULL, NULL, NULL, 0, PATIENT_MS) == EP_E_ARG);
    wait_for_a_late_rank(module, boot);
    CHECK(module->barrier(boot) == EP_OK);
    if (base->rank == 0)
        printf("%s, %d ranks\n", module->library_version(), base->nranks);
    module->stop(boot);
    module->stop(NULL);
    return 0;
}
