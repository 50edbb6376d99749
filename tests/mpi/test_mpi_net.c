/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The boot and the network over MPI, on four ranks. An argument "serialized" asks MPI for no more than
 * MPI_THREAD_SERIALIZED, so that the calls have to be locked.
 */
#include "net_conformance.h"
#include "stream_traffic.h"

#include "base/clock.h"
#include "mpi/boot.h"
#include "mpi/call.h"

#include <epkit/mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NRANKS = 4 };

/* Only ends what hangs: between two steps of a rank may be seconds where much else runs. */
#define PATIENT_MS 300000

static int rank;
static const char *running = "start";

/* A failed rank ends the others too: they would wait for it. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d: %s: line %d: %s (last error: %s)\n", rank, running, __LINE__, #condition,        \
                    ep_last_error());                                                                                  \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static ep_status gather(const ep_boot *boot, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    return boot->allgather(boot->context, mine, bytes, timeout_ms, ret_all);
}

/* --- boot --- */

static void test_gather(const ep_boot *boot)
{
    static unsigned char mine[200000], all[NRANKS * 200000]; /* the largest is beyond the eager limit */

    CHECK(boot->size == sizeof(*boot) && boot->rank == rank && boot->nranks == NRANKS && boot->network);
    for (size_t bytes = 0; bytes <= sizeof(mine); bytes = bytes * 10 + 2) {
        memset(mine, rank + 1, bytes);
        memset(all, 0xee, sizeof(all));
        CHECK(gather(boot, mine, bytes, PATIENT_MS, all) == EP_OK);
        for (int r = 0; r < NRANKS; r++)
            for (size_t i = 0; i < bytes; i++)
                CHECK(all[(size_t)r * bytes + i] == r + 1);
        CHECK(all[NRANKS * bytes < sizeof(all) ? NRANKS * bytes : 0] == (NRANKS * bytes < sizeof(all) ? 0xee : 1));
    }
    CHECK(gather(boot, NULL, 1, 10, all) == EP_E_ARG);
}

/*
 * A gather for which rank 2 is late. Whether it timed out on all of the others, naming rank 2 alone: where much else
 * runs, another rank may be late as well, or all of them later than rank 2.
 */
static bool gather_without_rank_2(const ep_boot *boot, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    int as_expected = 1, answers[NRANKS];
    uint64_t begin = ep_now_ns();
    ep_status status;

    if (rank == 2)
        sleep_ms(3 * timeout_ms + 100);
    status = gather(boot, mine, bytes, rank == 2 ? timeout_ms / 2 : timeout_ms, ret_all);
    CHECK(status == EP_OK || status == EP_E_TIMEOUT);
    if (rank != 2 && status == EP_E_TIMEOUT)
        CHECK(ep_now_ns() - begin >= (uint64_t)timeout_ms * 1000000u - 1000000u);
    if (rank != 2)
        as_expected =
            status == EP_E_TIMEOUT && strstr(ep_last_error(), "1 of 4 ranks") && strstr(ep_last_error(), "rank 2");
    CHECK(gather(boot, &as_expected, sizeof(as_expected), PATIENT_MS, answers) == EP_OK);
    return answers[0] && answers[1] && answers[3];
}

/* Who does not come is named; and afterwards the ranks are in step again. Blocks small and beyond the eager limit. */
static void test_late_rank(const ep_boot *boot)
{
    static unsigned char mine[100000], all[NRANKS * 100000];

    for (size_t bytes = 8; bytes <= sizeof(mine); bytes = bytes * 12500) {
        int timeout_ms = 200;

        memset(mine, 0xee, bytes);
        while (!gather_without_rank_2(boot, mine, bytes, timeout_ms, all)) {
            timeout_ms *= 3;
            CHECK(timeout_ms < PATIENT_MS / 10);
        }
        memset(mine, rank + 1, bytes);
        CHECK(gather(boot, mine, bytes, PATIENT_MS, all) == EP_OK);
        for (int r = 0; r < NRANKS; r++)
            CHECK(all[(size_t)r * bytes] == r + 1 && all[(size_t)(r + 1) * bytes - 1] == r + 1);
    }
}

/* Sends the block of this rank, and receives those of the others only when they have ended their all-gather. */
static void gather_late(const ep_boot *boot, const void *mine, int bytes, void *ret_all)
{
    ep_boot_mpi *own = boot->context;
    int tag = (int)(own->gathers++ % (uint32_t)own->first_tag);
    MPI_Request sends[NRANKS];

    for (int r = 0; r < NRANKS; r++)
        sends[r] = MPI_REQUEST_NULL;
    for (int r = 0; r < NRANKS; r++)
        if (r != rank)
            CHECK(MPI_Isend(mine, bytes, MPI_BYTE, r, tag, own->comm, &sends[r]) == MPI_SUCCESS);
    CHECK(MPI_Waitall(NRANKS, sends, MPI_STATUSES_IGNORE) == MPI_SUCCESS);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int r = 0; r < NRANKS; r++)
        if (r != rank)
            CHECK(MPI_Recv((char *)ret_all + (size_t)r * (size_t)bytes, bytes, MPI_BYTE, r, tag, own->comm,
                           MPI_STATUS_IGNORE) == MPI_SUCCESS);
}

/*
 * A rank that is stopped after it has sent its block has arrived: the others have all blocks, and all of them must
 * succeed, although MPI cannot deliver theirs. Beyond the eager limit it never can.
 */
static void test_rank_stopped_after_arrival(const ep_boot *boot)
{
    static unsigned char mine[100000], all[NRANKS * 100000];

    memset(mine, rank + 1, sizeof(mine));
    for (int timeout_ms = 500, answers[NRANKS] = {0}; !answers[0] || !answers[1] || !answers[3]; timeout_ms *= 3) {
        int good = 1;

        CHECK(timeout_ms < PATIENT_MS / 10);
        memset(all, 0xee, sizeof(all));
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 2) {
            gather_late(boot, mine, sizeof(mine), all);
        } else {
            good = gather(boot, mine, sizeof(mine), timeout_ms, all) == EP_OK;
            MPI_Barrier(MPI_COMM_WORLD);
        }
        for (size_t i = 0; rank != 2 && good && i < sizeof(all); i++)
            CHECK(rank == (int)(i / sizeof(mine)) || all[i] == i / sizeof(mine) + 1);
        CHECK(gather(boot, &good, sizeof(good), PATIENT_MS, answers) == EP_OK);
    }
}

/* A rank that has no time left still takes the blocks that have been waiting for it. */
static void test_gather_without_time(const ep_boot *boot)
{
    for (int wait_ms = 100, answers[NRANKS] = {0}; !answers[0]; wait_ms *= 3) {
        int good = 1, all[NRANKS];

        CHECK(wait_ms < PATIENT_MS / 10);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0)
            sleep_ms(wait_ms);
        good = gather(boot, &rank, sizeof(rank), rank == 0 ? 0 : PATIENT_MS, all) == EP_OK;
        CHECK(good || rank == 0);
        CHECK(gather(boot, &good, sizeof(good), PATIENT_MS, answers) == EP_OK);
    }
}

static void test_gather_of_different_sizes(const ep_boot *boot)
{
    char mine[16] = "", all[NRANKS * 16];
    ep_status status = gather(boot, mine, rank == 1 ? 8 : 16, PATIENT_MS, all);

    CHECK(status == EP_E_MISMATCH);
    CHECK(gather(boot, mine, 16, PATIENT_MS, all) == EP_OK);
}

/* --- streams --- */

static void run_traffic(const ep_boot *boot, struct traffic_spec spec)
{
    struct traffic_result result;
    int nnodes = NRANKS / spec.ranks_per_node, done = traffic_run(boot, &spec, &result);

    if (done != 0)
        fprintf(stderr, "%s\n", result.why);
    CHECK(done == 0);
    CHECK(result.messages == (uint64_t)((nnodes - 1) * spec.channels * spec.messages));
    if (rank == 0)
        printf("    %llu messages, %llu bytes, %llu laps, %llu sends refused\n", (unsigned long long)result.messages,
               (unsigned long long)result.bytes, (unsigned long long)result.laps, (unsigned long long)result.refused);
}

static struct traffic_spec base_spec(void)
{
    return (struct traffic_spec){.ranks_per_node = 1,
                                 .channels = 3,
                                 .ring_bytes = 65536, /* messages on both sides of the eager limit */
                                 .messages = 120,
                                 .seed = 7,
                                 .slow_rank = -1,
                                 .idle_s = PATIENT_MS / 1000};
}

static void test_streams(const ep_boot *boot)
{
    run_traffic(boot, base_spec());
}

static void test_streams_two_ranks_per_node(const ep_boot *boot)
{
    struct traffic_spec spec = base_spec();

    spec.ranks_per_node = 2;
    spec.channels = EP_NET_MAX_CHANNELS;
    spec.ring_bytes = 1 << 20;
    spec.messages = 12;
    run_traffic(boot, spec);
}

static void test_small_rings(const ep_boot *boot)
{
    struct traffic_spec spec = base_spec();

    spec.channels = 1;
    spec.ring_bytes = 4096;
    spec.messages = 1000;
    run_traffic(boot, spec);
}

static void test_slow_reader(const ep_boot *boot)
{
    struct traffic_spec spec = base_spec();

    spec.slow_rank = 1;
    spec.messages = 60;
    run_traffic(boot, spec);
}

/* --- the seam --- */

enum { CHANNELS = 2, N_SIGNALS = 8, MOST = 150000 };

static void fail_conformance(int who, const char *test, int line, const char *condition)
{
    fprintf(stderr, "rank %d: conformance: %s: line %d: %s (last error: %s)\n", who, test, line, condition,
            ep_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void test_conformance(const ep_boot *boot)
{
    net_conformance_run(boot->network, boot, fail_conformance);
}

static struct ep_net *open_net(const ep_boot *boot, int ranks_per_node, size_t region_bytes)
{
    const struct ep_net_provider *provider = boot->network;
    struct ep_net_params params = {.rank = rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = ranks_per_node,
                                   .channels = CHANNELS,
                                   .region_bytes = region_bytes,
                                   .n_signals = N_SIGNALS,
                                   .timeout_ms = PATIENT_MS,
                                   .boot = boot};
    struct ep_net *net = NULL;

    CHECK(provider->abi == EP_NET_ABI && strcmp(provider->name, "mpi") == 0);
    CHECK(provider->open(provider, &params, &net) == EP_OK);
    CHECK(!net->can_sleep && net->wire_bytes > 0 && strcmp(net->ops->name, "mpi") == 0);
    return net;
}

/* With a moment's sleep where nothing moves: the ranks outnumber the processors. */
static void advance(struct ep_net *net)
{
    bool moved = false;

    CHECK(net->ops->progress(net, &moved) == EP_OK);
    if (!moved)
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

/* No more than a bounded number of operations is on the way; then it says "again". */
static void test_back_pressure(const ep_boot *boot)
{
    static unsigned char large[MOST];
    struct ep_net *net = open_net(boot, 2, MOST);
    int peer = 1 - net->node, sent = 0;
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    char mine = 0, all[NRANKS];

    if (net->node == 0) {
        while (net->ops->put(net, peer, 1, 0, large, sizeof(large)))
            CHECK(++sent < 1000);
        CHECK(!net->ops->signal(net, peer, 1, 0, 1) && !net->ops->flush_test(net, peer, 1));
        CHECK(net->ops->signal(net, peer, 0, 1, 1)); /* another channel */
    }
    CHECK(gather(boot, &mine, 1, PATIENT_MS, all) == EP_OK); /* until here node 1 took nothing */
    if (net->node == 0)
        while (!net->ops->flush_test(net, peer, 1) || !net->ops->signal(net, peer, 1, 0, 1)) {
            CHECK(ep_now_ns() < deadline);
            advance(net);
        }
    while (net->node == 1 && (net->signals[0] == 0 || net->signals[1] == 0)) {
        CHECK(ep_now_ns() < deadline);
        advance(net);
    }
    net->ops->free(net);
}

/* A peer that is gone does not keep anybody from leaving, even with a large put under way; nor MPI_Finalize later. */
static void test_gone_peer(const ep_boot *boot)
{
    static unsigned char large[8 << 20];
    struct ep_net *net = open_net(boot, 2, sizeof(large));
    char mine = 0, all[NRANKS];
    int node = net->node;
    uint64_t begin;

    if (node == 1)
        net->ops->free(net); /* without a look at the network */
    CHECK(gather(boot, &mine, 1, PATIENT_MS, all) == EP_OK);
    if (node == 0) {
        CHECK(net->ops->put(net, 1, 0, 0, large, sizeof(large)));
        CHECK(net->ops->signal(net, 1, 0, 0, 1));
        begin = ep_now_ns();
        net->ops->free(net);
        CHECK(ep_now_ns() - begin < PATIENT_MS * UINT64_C(1000000));
    }
    CHECK(gather(boot, &mine, 1, PATIENT_MS, all) == EP_OK);
}

/* --- threads --- */

struct worker {
    pthread_t thread;
    struct ep_net *net;
    const ep_boot *boot;
    ep_status status;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    uint64_t deadline = ep_deadline_ns(PATIENT_MS);
    uint64_t sent = 0;
    bool moved = false;

    while ((sent < 2000 || worker->net->signals[0] < 2000) && worker->status == EP_OK) {
        sent += worker->net->ops->signal(worker->net, 1 - worker->net->node, 0, 0, 1);
        worker->status = worker->net->ops->progress(worker->net, &moved);
        if (ep_now_ns() > deadline)
            worker->status = EP_E_TIMEOUT;
        if (!moved)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return NULL;
}

/* A thread moves the network while another one gathers, as with operations that are queued. */
static void test_two_threads(const ep_boot *boot)
{
    struct worker worker = {.net = open_net(boot, 2, 64)};

    CHECK(pthread_create(&worker.thread, NULL, work, &worker) == 0);
    for (int i = 0; i < 50; i++) {
        int all[NRANKS] = {-1};

        CHECK(gather(boot, &i, sizeof(i), PATIENT_MS, all) == EP_OK);
        for (int r = 0; r < NRANKS; r++)
            CHECK(all[r] == i);
    }
    pthread_join(worker.thread, NULL);
    CHECK(worker.status == EP_OK);
    worker.net->ops->free(worker.net);
}

static void run_tests(const ep_boot *boot)
{
    static const struct {
        const char *name;
        void (*run)(const ep_boot *boot);
    } tests[] = {
        {"gather", test_gather},
        {"late rank", test_late_rank},
        {"rank stopped after arrival", test_rank_stopped_after_arrival},
        {"gather without time", test_gather_without_time},
        {"gather of different sizes", test_gather_of_different_sizes},
        {"streams", test_streams},
        {"streams, two ranks per node", test_streams_two_ranks_per_node},
        {"small rings", test_small_rings},
        {"slow reader", test_slow_reader},
        {"conformance", test_conformance},
        {"back-pressure", test_back_pressure},
        {"two threads", test_two_threads},
        {"gone peer", test_gone_peer},
    };

    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        uint64_t begin = ep_now_ns();

        running = tests[i].name;
        MPI_Barrier(MPI_COMM_WORLD);
        tests[i].run(boot);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0)
            printf("%s: %.2f s\n", running, (double)(ep_now_ns() - begin) * 1e-9);
    }
}

int main(int argc, char **argv)
{
    int level, wanted = argc > 1 && strcmp(argv[1], "serialized") == 0 ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE;
    ep_boot_mpi *boot = NULL;
    int nranks;

    CHECK(ep_boot_mpi_new(MPI_COMM_WORLD, &boot) == EP_E_STATE); /* before MPI_Init */
    ep_boot_mpi_free(NULL);
    MPI_Init_thread(&argc, &argv, wanted, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    CHECK(nranks == NRANKS);
    CHECK(level == wanted);
    CHECK(ep_boot_mpi_new(MPI_COMM_NULL, &boot) == EP_E_ARG);
    CHECK(ep_boot_mpi_new(MPI_COMM_WORLD, NULL) == EP_E_ARG);
    CHECK(ep_boot_mpi_new(MPI_COMM_WORLD, &boot) == EP_OK);
    run_tests(ep_boot_mpi_get(boot));
    running = "end";
    ep_boot_mpi_free(boot);
    MPI_Finalize();
    return 0;
}
