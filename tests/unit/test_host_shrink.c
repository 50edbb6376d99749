/* SPDX-License-Identifier: Apache-2.0 */
/* How the survivors of a group agree: what they want of the new one, and who is left out. */
#include <epkit/epkit.h>
#include <epkit/launch.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define NRANKS 4
#define TIMEOUT_MS 1500

struct verdicts {
    ep_status first[NRANKS], second[NRANKS], barrier[NRANKS];
    char text[NRANKS][256];
};

static int shrink_without_first(const ep_boot *boot, void *argument)
{
    struct verdicts *all = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm, *next = NULL;
    int rank = boot->rank;

    config.timeout_ms = 20000;
    if (ep_comm_new(boot, &config, &comm) != EP_OK)
        return 1;
    config.channels = rank == 2 ? 3 : 5;
    if (rank > 0) {
        all->first[rank] = ep_comm_shrink(comm, &config, &next);
        snprintf(all->text[rank], sizeof(all->text[rank]), "%s", ep_comm_last_error(comm));
    }
    ep_comm_free(comm);
    return 0;
}

/* Rank 1 would be rank 0 of the new group, which does not come into being: the caller knows it as rank 1. */
static void ranks_have_the_numbers_that_the_caller_knows(void **state)
{
    static struct verdicts all;
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[NRANKS];

    (void)state;
    launch.mode = EP_LAUNCH_THREADS;
    launch.nranks = NRANKS;
    launch.run = shrink_without_first;
    launch.argument = &all;
    assert_int_equal(ep_launch(&launch, exits), EP_OK);
    for (int rank = 1; rank < NRANKS; rank++) {
        assert_int_equal(exits[rank].code, 0);
        assert_int_equal(all.first[rank], EP_E_MISMATCH);
        assert_non_null(strstr(all.text[rank], "channels is 5 on rank 1 and 3 on rank 2"));
    }
}

static int shrink_twice(const ep_boot *boot, void *argument)
{
    struct verdicts *all = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm, *next = NULL;
    int rank = boot->rank;

    config.timeout_ms = 20000;
    if (ep_comm_new(boot, &config, &comm) != EP_OK)
        return 1;
    config.ranks_per_node = NRANKS / 2;
    config.channels = rank == 2 ? 3 : 5;
    all->first[rank] = ep_comm_shrink(comm, &config, &next);
    snprintf(all->text[rank], sizeof(all->text[rank]), "%s", ep_comm_last_error(comm));
    config.channels = 5;
    all->second[rank] = ep_comm_shrink(comm, &config, &next);
    all->barrier[rank] = all->second[rank] == EP_OK ? ep_comm_barrier(next) : EP_E_STATE;
    if (all->second[rank] == EP_OK)
        ep_comm_free(next);
    ep_comm_free(comm);
    return 0;
}

/* Disagreement is found before anything of the new group is opened, names the field, and can be mended. */
static void unequal_configurations_are_named_and_can_be_mended(void **state)
{
    static struct verdicts all;
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[NRANKS];

    (void)state;
    launch.mode = EP_LAUNCH_THREADS;
    launch.nranks = NRANKS;
    launch.run = shrink_twice;
    launch.argument = &all;
    assert_int_equal(ep_launch(&launch, exits), EP_OK);
    for (int rank = 0; rank < NRANKS; rank++) {
        assert_int_equal(exits[rank].code, 0);
        assert_int_equal(all.first[rank], EP_E_MISMATCH);
        assert_non_null(strstr(all.text[rank], "channels is 5 on rank 0 and 3 on rank 2"));
        assert_int_equal(all.second[rank], EP_OK);
        assert_int_equal(all.barrier[rank], EP_OK);
    }
}

/* --- a rank that stops in the middle of it --- */

struct survivors {
    _Atomic int in_shrink; /* rank 2 has called it */
    ep_status status[NRANKS];
    int nranks[NRANKS];
};

/* Rank 3 never comes; rank 2 comes and is stopped while the others wait for rank 3: it has another view than they. */
static void shrink_as_rank(ep_boot_shm *place, int rank, struct survivors *all)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm_info info = {.size = sizeof(info)};
    ep_comm *comm, *next;
    ep_boot boot;

    config.timeout_ms = TIMEOUT_MS;
    if (ep_boot_shm_join(place, rank, &boot) != EP_OK || ep_comm_new(&boot, &config, &comm) != EP_OK)
        _exit(1);
    if (rank == 3)
        pause();
    if (rank == 2)
        atomic_store(&all->in_shrink, 1);
    all->status[rank] = ep_comm_shrink(comm, NULL, &next);
    if (all->status[rank] == EP_OK && ep_comm_barrier(next) == EP_OK && ep_comm_get_info(next, &info) == EP_OK)
        all->nranks[rank] = info.nranks;
    _exit(0);
}

static void sleep_ms(long ms)
{
    struct timespec nap = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    nanosleep(&nap, NULL);
}

/* Waits for a child, at most so long. */
static bool has_ended(pid_t child, int limit_ms)
{
    for (int ms = 0; ms < limit_ms; ms += 10) {
        if (waitpid(child, NULL, WNOHANG) == child)
            return true;
        sleep_ms(10);
    }
    return false;
}

static void who_stops_while_others_agree_is_left_out(void **state)
{
    struct survivors *all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bool ended[2];
    ep_boot_shm *place;
    pid_t children[NRANKS];

    (void)state;
    assert_true(all != MAP_FAILED);
    assert_int_equal(ep_boot_shm_new(NRANKS, &place), EP_OK);
    for (int rank = 0; rank < NRANKS; rank++) {
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0)
            shrink_as_rank(place, rank, all);
    }
    for (int ms = 0; !atomic_load(&all->in_shrink) && ms < 20000; ms += 10)
        sleep_ms(10);
    sleep_ms(TIMEOUT_MS / 3);
    kill(children[2], SIGSTOP);
    ended[0] = has_ended(children[0], 20 * TIMEOUT_MS);
    ended[1] = has_ended(children[1], 20 * TIMEOUT_MS);
    for (int rank = 0; rank < NRANKS; rank++)
        if (rank >= 2 || !ended[rank]) {
            kill(children[rank], SIGKILL);
            waitpid(children[rank], NULL, 0);
        }
    assert_true(ended[0] && ended[1]);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(all->status[rank], EP_OK);
        assert_int_equal(all->nranks[rank], 2);
    }
    ep_boot_shm_free(place);
    munmap(all, sizeof(*all));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_have_the_numbers_that_the_caller_knows),
        cmocka_unit_test(unequal_configurations_are_named_and_can_be_mended),
        cmocka_unit_test(who_stops_while_others_agree_is_left_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
