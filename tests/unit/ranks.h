/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h - ranks on this host, as threads of a test or as its child processes, and what they share with it. */
#ifndef EP_TESTS_UNIT_RANKS_H
#define EP_TESTS_UNIT_RANKS_H

#include "unit.h"

#include "tests/args.h"
#include "tests/local_ranks.h"

#include <epkit/comm.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#define RANKS_PATIENT_MS 250000 /* of a run: only ends ranks that hang */

/* In the program of a rank: ends it with code 1, and prints why, if the condition is false. */
#define SURE(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, ep_last_error());                      \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

/* A copy of `bytes` at `from` that the test shares with its child processes; munmap() frees it. */
static inline void *unit_share(const void *from, size_t bytes)
{
    void *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(shared != MAP_FAILED);
    memcpy(shared, from, bytes);
    return shared;
}

/* As ep_launch() with processes, which ends ranks that still run after timeout_ms (0: never). */
static inline ep_status unit_fork_ranks(int nranks, ep_rank_fn run, void *argument, int timeout_ms,
                                        ep_rank_exit *ret_exits)
{
    ep_launch_args args = {.nranks = nranks, .run = run, .argument = argument, .timeout_ms = timeout_ms};

    return ep_launch(&args, ret_exits);
}

/* The program of each rank must return 0. */
static inline void unit_run_ranks(int mode, int nranks, ep_rank_fn run, void *argument)
{
    ep_rank_exit exits[EP_MAX_RANKS];
    ep_launch_args args = {.mode = mode, .nranks = nranks, .run = run, .argument = argument};
    int n_failed = 0;

    assert_int_equal(ep_launch(&args, exits), EP_OK);
    for (int rank = 0; rank < nranks; rank++)
        if (exits[rank].code) {
            print_error("rank %d ended with %d\n", rank, exits[rank].code);
            n_failed++;
        }
    assert_int_equal(n_failed, 0);
}

static inline void unit_run_threads(int nranks, ep_rank_fn run, void *argument)
{
    unit_run_ranks(EP_LAUNCH_THREADS, nranks, run, argument);
}

/* Waits until a shared number has reached `n`. */
static inline void unit_await(_Atomic int *number, int n)
{
    while (atomic_load(number) < n)
        unit_sleep_ms(1);
}

/* Called by a rank: adds 1 to a shared number, and waits until it has reached `n`. */
static inline void unit_count(_Atomic int *number, int n)
{
    atomic_fetch_add(number, 1);
    unit_await(number, n);
}

/* The all-gather of a group of one rank. */
static inline ep_status unit_gather_alone(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)context;
    (void)timeout_ms;
    memcpy(ret_all, mine, bytes);
    return EP_OK;
}

/* Called by a rank. `network` NULL: that of the bootstrap; ranks_per_node 0: as the ranks share hosts. */
static inline ep_status unit_comm_new(const ep_boot *boot, const char *network, int ranks_per_node, int timeout_ms,
                                      ep_comm **ret_comm)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    config.backend = "host";
    config.network = network;
    config.ranks_per_node = ranks_per_node;
    config.timeout_ms = timeout_ms;
    return ep_comm_new(boot, &config, ret_comm);
}

#endif
