/* SPDX-License-Identifier: Apache-2.0 */
/* boot/shm.c: all-gathers of ranks that are threads or forked children: success, mismatch, late and missing ranks. */
#include "unit.h"

#include "base/error.h"

#include <epkit/boot.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_THREADS 8
#define TIMEOUT_MS 60000

/* Longer than one block, to test several rounds and the reuse of both blocks. */
static const size_t sizes[] = {8, 0, 1, 4095, 4096, 4097, 8192, 30000, 0, 3};

static unsigned char pattern(int rank, size_t call, size_t at)
{
    return (unsigned char)((size_t)rank * 37 + call * 11 + at * 7 + at / 256);
}

/* Number of wrong bytes, or a large number for a wrong status. */
static int gather_once(const ep_boot *boot, size_t call, size_t bytes)
{
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)boot->nranks + 1);
    int wrong = 0;

    for (size_t i = 0; i < bytes; i++)
        mine[i] = pattern(boot->rank, call, i);
    if (boot->allgather(boot->context, mine, bytes, TIMEOUT_MS, all) != EP_OK)
        wrong = 1000000;
    for (int rank = 0; wrong < 1000000 && rank < boot->nranks; rank++)
        for (size_t i = 0; i < bytes; i++)
            wrong += all[(size_t)rank * bytes + i] != pattern(rank, call, i);
    free(mine);
    free(all);
    return wrong;
}

/* Rank 0 sleeps at times: the others are then at most one call ahead of it. */
static int gather_many(const ep_boot *boot, int rounds)
{
    int wrong = 0;

    for (int round = 0; round < rounds; round++)
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            if ((boot->rank + round) % 4 == 0 && i % 3 == 0)
                unit_sleep_ms(1);
            wrong += gather_once(boot, (size_t)round * 16 + i, sizes[i]);
        }
    return wrong;
}

/* --- threads --- */

struct rank {
    pthread_t id;
    ep_boot_shm *place;
    int rank;
    int wrong;
    int timeout_ms;
    size_t bytes;
    ep_status status;
    char text[EP_ERROR_TEXT_BYTES];
};

static void *gather_thread(void *context)
{
    struct rank *mine = context;
    ep_boot boot;

    mine->status = ep_boot_shm_join(mine->place, mine->rank, &boot);
    if (mine->status == EP_OK)
        mine->wrong = gather_many(&boot, 6);
    return NULL;
}

/* One all-gather, whose status is recorded. */
static void *status_thread(void *context)
{
    struct rank *mine = context;
    unsigned char block[64] = {0}, all[64 * MOST_THREADS];
    ep_boot boot;

    mine->status = ep_boot_shm_join(mine->place, mine->rank, &boot);
    if (mine->status == EP_OK)
        mine->status = boot.allgather(boot.context, block, mine->bytes, mine->timeout_ms, all);
    snprintf(mine->text, sizeof(mine->text), "%s", ep_last_error());
    return NULL;
}

static void start_rank(struct rank *ranks, ep_boot_shm *place, int rank, void *(*run)(void *))
{
    ranks[rank].place = place;
    ranks[rank].rank = rank;
    assert_int_equal(pthread_create(&ranks[rank].id, NULL, run, &ranks[rank]), 0);
}

TEST(threads_gather_blocks_of_any_size)
{
    static const int counts[] = {1, 2, 3, MOST_THREADS};

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct rank ranks[MOST_THREADS] = {0};
        ep_boot_shm *place;

        assert_int_equal(ep_boot_shm_new(counts[i], &place), EP_OK);
        for (int rank = 0; rank < counts[i]; rank++)
            start_rank(ranks, place, rank, gather_thread);
        for (int rank = 0; rank < counts[i]; rank++) {
            pthread_join(ranks[rank].id, NULL);
            assert_int_equal(ranks[rank].status, EP_OK);
            assert_int_equal(ranks[rank].wrong, 0);
        }
        ep_boot_shm_free(place);
    }
}

/* Two of four ranks arrive. Both name the two others; a rank that arrives later fails at once. */
static bool name_missing_ranks(int timeout_ms)
{
    struct rank ranks[MOST_THREADS] = {0};
    char expected[80];
    ep_boot_shm *place;
    int gave_up = 0;

    snprintf(expected, sizeof(expected), "bootstrap: 2 of 4 ranks did not arrive within %d ms: ranks 1, 3", timeout_ms);
    assert_int_equal(ep_boot_shm_new(4, &place), EP_OK);
    for (int rank = 0; rank < 4; rank += 2) {
        ranks[rank].timeout_ms = timeout_ms;
        ranks[rank].bytes = 8;
        start_rank(ranks, place, rank, status_thread);
    }
    for (int rank = 0; rank < 4; rank += 2) {
        pthread_join(ranks[rank].id, NULL);
        assert_int_equal(ranks[rank].status, EP_E_TIMEOUT);
        gave_up += strcmp(ranks[rank].text, expected) == 0;
    }
    ranks[3].timeout_ms = TIMEOUT_MS;
    ranks[3].bytes = 8;
    start_rank(ranks, place, 3, status_thread);
    pthread_join(ranks[3].id, NULL);
    assert_int_equal(ranks[3].status, EP_E_TIMEOUT);
    assert_non_null(strstr(ranks[3].text, "gave up"));
    ep_boot_shm_free(place);
    /* The second one may have got the failure from the first one instead. */
    return gave_up >= 1;
}

/* On a loaded machine the second one may arrive after the first one has given up: then retry with more time. */
TEST(missing_ranks_are_named)
{
    int timeout_ms = 300;

    while (!name_missing_ranks(timeout_ms)) {
        timeout_ms *= 2;
        assert_true(timeout_ms < TIMEOUT_MS);
    }
}

/* false: the patient rank had not arrived yet. */
static bool give_up_before_waiting_rank(int timeout_ms)
{
    struct rank ranks[MOST_THREADS] = {0};
    char expected[80];
    ep_boot_shm *place;

    snprintf(expected, sizeof(expected), "bootstrap: 1 of 3 ranks did not arrive within %d ms: rank 2", timeout_ms);
    assert_int_equal(ep_boot_shm_new(3, &place), EP_OK);
    for (int rank = 0; rank < 2; rank++) {
        ranks[rank].timeout_ms = rank == 0 ? TIMEOUT_MS : timeout_ms;
        ranks[rank].bytes = 8;
        start_rank(ranks, place, rank, status_thread);
    }
    for (int rank = 0; rank < 2; rank++)
        pthread_join(ranks[rank].id, NULL);
    assert_int_equal(ranks[1].status, EP_E_TIMEOUT);
    assert_int_equal(ranks[0].status, EP_E_TIMEOUT);
    assert_non_null(strstr(ranks[0].text, "rank 1 gave up"));
    ep_boot_shm_free(place);
    return strcmp(ranks[1].text, expected) == 0;
}

/* A waiting rank fails as well, long before its own deadline. */
TEST(giving_up_wakes_waiting_ranks)
{
    int timeout_ms = 200;

    while (!give_up_before_waiting_rank(timeout_ms)) {
        timeout_ms *= 2;
        assert_true(timeout_ms < TIMEOUT_MS);
    }
}

TEST(different_sizes_are_a_mismatch)
{
    struct rank ranks[MOST_THREADS] = {0};
    ep_boot_shm *place;
    int with_sizes = 0;

    assert_int_equal(ep_boot_shm_new(3, &place), EP_OK);
    for (int rank = 0; rank < 3; rank++) {
        ranks[rank].timeout_ms = TIMEOUT_MS;
        ranks[rank].bytes = rank == 1 ? 16 : 24;
        start_rank(ranks, place, rank, status_thread);
    }
    for (int rank = 0; rank < 3; rank++) {
        pthread_join(ranks[rank].id, NULL);
        assert_int_equal(ranks[rank].status, EP_E_MISMATCH);
        with_sizes += strstr(ranks[rank].text, "24") && strstr(ranks[rank].text, "16");
    }
    assert_true(with_sizes >= 1);
    ep_boot_shm_free(place);
}

static void *join_thread(void *context)
{
    struct rank *mine = context;
    ep_boot boot;

    mine->status = ep_boot_shm_join(mine->place, 1, &boot);
    return NULL;
}

/* Of many threads that join as rank 1 at the same time, one succeeds. */
TEST(a_rank_joins_once)
{
    struct rank ranks[MOST_THREADS] = {0};
    ep_boot_shm *place;
    ep_boot boot;
    int joined = 0;

    assert_int_equal(ep_boot_shm_new(2, &place), EP_OK);
    for (int i = 0; i < MOST_THREADS; i++)
        start_rank(ranks, place, i, join_thread);
    for (int i = 0; i < MOST_THREADS; i++) {
        pthread_join(ranks[i].id, NULL);
        joined += ranks[i].status == EP_OK;
        assert_true(ranks[i].status == EP_OK || ranks[i].status == EP_E_STATE);
    }
    assert_int_equal(joined, 1);
    assert_int_equal(ep_boot_shm_join(place, 1, &boot), EP_E_STATE);
    assert_string_equal(ep_last_error(), "ep_boot_shm_join: rank 1 joined twice");
    assert_int_equal(ep_boot_shm_join(place, 0, &boot), EP_OK);
    ep_boot_shm_free(place);
}

/* --- processes --- */

TEST(children_gather_blocks_of_any_size)
{
    enum { RANKS = 5 };
    ep_boot_shm *place;
    pid_t children[RANKS];

    assert_int_equal(ep_boot_shm_new(RANKS, &place), EP_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0) {
            ep_boot boot;
            int wrong = ep_boot_shm_join(place, rank, &boot) != EP_OK || gather_many(&boot, 4);

            ep_boot_shm_free(place);
            _exit(wrong != 0);
        }
    }
    for (int rank = 0; rank < RANKS; rank++) {
        int how;

        assert_int_equal(waitpid(children[rank], &how, 0), children[rank]);
        assert_true(WIFEXITED(how));
        assert_int_equal(WEXITSTATUS(how), 0);
    }
    /* ep_boot_shm_free() in the children has not unmapped it here. */
    assert_int_equal(ep_boot_shm_join(place, 0, &(ep_boot){0}), EP_E_STATE);
    ep_boot_shm_free(place);
}

/* --- one rank --- */

TEST(long_lists_of_missing_ranks_are_truncated)
{
    unsigned char *all = malloc(EP_MAX_RANKS);
    ep_boot_shm *place;
    ep_boot boot;

    assert_int_equal(ep_boot_shm_new(EP_MAX_RANKS, &place), EP_OK);
    assert_int_equal(ep_boot_shm_join(place, 2, &boot), EP_OK);
    assert_fails(boot.allgather(boot.context, "x", 1, 0, all), EP_E_TIMEOUT,
                 "1023 of 1024 ranks did not arrive within 0 ms: ranks 0, 1, 3, 4, 5");
    assert_non_null(strstr(ep_last_error(), " more"));
    assert_fails(boot.allgather(boot.context, "x", 1, 0, all), EP_E_TIMEOUT, "earlier all-gather");
    ep_boot_shm_free(place);
    free(all);
}

TEST(bad_arguments_are_refused)
{
    ep_boot_shm *place = NULL;
    ep_boot boot;
    char byte = 0;

    assert_int_equal(ep_boot_shm_new(1, NULL), EP_E_ARG);
    assert_int_equal(ep_boot_shm_new(0, &place), EP_E_ARG);
    assert_int_equal(ep_boot_shm_new(-1, &place), EP_E_ARG);
    assert_fails(ep_boot_shm_new(EP_MAX_RANKS + 1, &place), EP_E_ARG, "1025");
    assert_null(place);
    assert_int_equal(ep_boot_shm_new(2, &place), EP_OK);
    assert_int_equal(ep_boot_shm_join(NULL, 0, &boot), EP_E_ARG);
    assert_int_equal(ep_boot_shm_join(place, 0, NULL), EP_E_ARG);
    assert_int_equal(ep_boot_shm_join(place, -1, &boot), EP_E_ARG);
    assert_int_equal(ep_boot_shm_join(place, 2, &boot), EP_E_ARG);
    assert_int_equal(ep_boot_shm_join(place, 1, &boot), EP_OK);
    assert_int_equal(boot.size, sizeof(boot));
    assert_int_equal(boot.rank, 1);
    assert_int_equal(boot.nranks, 2);
    assert_null(boot.network);
    assert_int_equal(boot.allgather(boot.context, NULL, 1, 100, &byte), EP_E_ARG);
    assert_int_equal(boot.allgather(boot.context, &byte, 1, 100, NULL), EP_E_ARG);
    assert_int_equal(boot.allgather(boot.context, &byte, 1, -1, &byte), EP_E_ARG);
    ep_boot_shm_free(place);
    ep_boot_shm_free(NULL);
}
