/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The boot and the network over MPI, on four ranks. An argument "serialized" asks MPI for no more than
 * MPI_THREAD_SERIALIZED, so that the calls have to be locked.
 */
#include "stream_traffic.h"

#include "base/clock.h"
#include "mpi/call.h"

#include <epkit/mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NRANKS = 4 };

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

static void nap_ms(int ms)
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
        CHECK(gather(boot, mine, bytes, 10000, all) == EP_OK);
        for (int r = 0; r < NRANKS; r++)
            for (size_t i = 0; i < bytes; i++)
                CHECK(all[(size_t)r * bytes + i] == r + 1);
        CHECK(all[NRANKS * bytes < sizeof(all) ? NRANKS * bytes : 0] == (NRANKS * bytes < sizeof(all) ? 0xee : 1));
    }
    CHECK(gather(boot, NULL, 1, 10, all) == EP_E_ARG);
}

/* Who does not come is named; and afterwards the ranks are in step again. Blocks small and beyond the eager limit. */
static void test_late_rank(const ep_boot *boot)
{
    static unsigned char mine[100000], all[NRANKS * 100000];

    for (size_t bytes = 8; bytes <= sizeof(mine); bytes = bytes * 12500) {
        uint64_t begin = ep_now_ns();
        ep_status status;

        if (rank == 2)
            nap_ms(700);
        status = gather(boot, mine, bytes, rank == 2 ? 100 : 200, all);
        if (rank != 2) {
            CHECK(status == EP_E_TIMEOUT);
            CHECK(strstr(ep_last_error(), "1 of 4 ranks") && strstr(ep_last_error(), "rank 2"));
            CHECK(ep_now_ns() - begin >= 199000000 && ep_now_ns() - begin < 5000000000u);
        }
        memset(mine, rank + 1, bytes);
        CHECK(gather(boot, mine, bytes, 20000, all) == EP_OK);
        for (int r = 0; r < NRANKS; r++)
            CHECK(all[(size_t)r * bytes] == r + 1 && all[(size_t)(r + 1) * bytes - 1] == r + 1);
    }
}

static void test_gather_of_different_sizes(const ep_boot *boot)
{
    char mine[16] = "", all[NRANKS * 16];
    ep_status status = gather(boot, mine, rank == 1 ? 8 : 16, 5000, all);

    CHECK(status == EP_E_MISMATCH);
    CHECK(gather(boot, mine, 16, 20000, all) == EP_OK);
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
                                 .timeout_s = 60};
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
    spec.messages = 3000;
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

enum { CHANNELS = 2, N_SIGNALS = 8, BLOCKS = 40, MOST = 150000, REGION = CHANNELS * BLOCKS * MOST };

static struct ep_net *open_net(const ep_boot *boot, int ranks_per_node, size_t region_bytes)
{
    const struct ep_net_provider *provider = boot->network;
    struct ep_net_params params = {.rank = rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = ranks_per_node,
                                   .channels = CHANNELS,
                                   .region_bytes = region_bytes,
                                   .n_signals = N_SIGNALS,
                                   .timeout_ms = 20000,
                                   .boot = boot};
    struct ep_net *net = NULL;

    CHECK(provider->abi == EP_NET_ABI && strcmp(provider->name, "mpi") == 0);
    CHECK(provider->open(provider, &params, &net) == EP_OK);
    CHECK(!net->sleeps && net->wire_bytes > 0 && strcmp(net->ops->name, "mpi") == 0);
    return net;
}

static size_t block_bytes(int i)
{
    return i % 3 == 0 ? (size_t)i * 3700 + 1 : (size_t)i * 50 + 1;
}

static unsigned char block_value(int node, int channel, int i)
{
    return (unsigned char)(node * 90 + channel * 45 + i + 1);
}

static void check_block(const struct ep_net *net, int peer, int channel, int i)
{
    const unsigned char *block = net->region + ((size_t)channel * BLOCKS + (size_t)i) * MOST;

    for (size_t k = 0; k < block_bytes(i); k++)
        CHECK(block[k] == block_value(peer, channel, i));
}

/*
 * Two nodes, so one rail peer: blocks of all sizes, each followed by a signal. Behind a signal the block is complete;
 * the source is overwritten as soon as flush_test says that it has left.
 */
static void test_order(const ep_boot *boot)
{
    static unsigned char sources[CHANNELS][MOST];
    struct ep_net *net = open_net(boot, 2, REGION);
    int peer = 1 - net->node, step[CHANNELS] = {0}, seen[CHANNELS] = {0}, open = 1, refused = 0;
    uint64_t deadline = ep_deadline_ns(60000);
    bool moved;

    while (open) {
        CHECK(ep_now_ns() < deadline);
        CHECK(net->ops->progress(net, &moved) == EP_OK);
        open = 0;
        for (int c = 0; c < CHANNELS; c++) {
            int i = step[c] / 3;
            uint64_t offset = ((uint64_t)c * BLOCKS + (uint64_t)i) * MOST;

            if (i < BLOCKS && step[c] % 3 == 0) {
                memset(sources[c], block_value(net->node, c, i), block_bytes(i));
                step[c] += net->ops->put(net, peer, c, offset, sources[c], block_bytes(i));
            } else if (i < BLOCKS && step[c] % 3 == 1) {
                step[c] += net->ops->signal(net, peer, c, (uint32_t)c, 1);
            } else if (i < BLOCKS && net->ops->flush_test(net, peer, c)) {
                memset(sources[c], 0, MOST);
                step[c]++;
            } else {
                refused++;
            }
            for (; (uint64_t)seen[c] < net->signals[c]; seen[c]++)
                check_block(net, peer, c, seen[c]);
            open |= i < BLOCKS || seen[c] < BLOCKS;
        }
    }
    CHECK(net->signals[0] == BLOCKS && net->signals[1] == BLOCKS && net->signals[2] == 0);
    CHECK(refused > 0);
    net->ops->free(net);
}

/* Two puts to one place take effect in the order of the calls, whichever of them travels in a message of its own. */
static void test_overwriting(const ep_boot *boot)
{
    static unsigned char large[MOST], small[100];
    struct ep_net *net = open_net(boot, 2, MOST);
    int peer = 1 - net->node;
    bool moved;

    memset(large, 1, sizeof(large));
    memset(small, 2, sizeof(small));
    for (uint64_t round = 1; round <= 50; round++) {
        uint64_t deadline = ep_deadline_ns(20000);
        int step = 0;

        while (step < 4 || net->signals[0] < round || !net->ops->flush_test(net, peer, 0)) {
            CHECK(ep_now_ns() < deadline);
            CHECK(net->ops->progress(net, &moved) == EP_OK);
            if (step < 3)
                step += step == 1 ? net->ops->put(net, peer, 0, 50, small, sizeof(small))
                                  : net->ops->put(net, peer, 0, 0, large, step == 0 ? MOST : 80);
            else if (step == 3)
                step += net->ops->signal(net, peer, 0, 0, 1);
        }
        CHECK(net->region[79] == 1 && net->region[80] == 2 && net->region[149] == 2 && net->region[150] == 1);
        /* So that the peer's next round does not run into the look at this one. */
        while (!net->ops->signal(net, peer, 0, 1, 1))
            CHECK(net->ops->progress(net, &moved) == EP_OK);
        while (net->signals[1] < round && ep_now_ns() < deadline)
            CHECK(net->ops->progress(net, &moved) == EP_OK);
        CHECK(net->signals[1] >= round);
    }
    net->ops->free(net);
}

/* No more than a bounded number of operations is on the way; then it says "again". */
static void test_back_pressure(const ep_boot *boot)
{
    static unsigned char large[MOST];
    struct ep_net *net = open_net(boot, 2, MOST);
    int peer = 1 - net->node, sent = 0;
    uint64_t deadline = ep_deadline_ns(30000);
    char mine = 0, all[NRANKS];
    bool moved;

    if (net->node == 0) {
        while (net->ops->put(net, peer, 1, 0, large, sizeof(large)))
            CHECK(++sent < 1000);
        CHECK(!net->ops->signal(net, peer, 1, 0, 1) && !net->ops->flush_test(net, peer, 1));
        CHECK(net->ops->signal(net, peer, 0, 1, 1)); /* another channel */
    }
    CHECK(gather(boot, &mine, 1, 20000, all) == EP_OK); /* until here node 1 took nothing */
    if (net->node == 0)
        while (!net->ops->flush_test(net, peer, 1) || !net->ops->signal(net, peer, 1, 0, 1)) {
            CHECK(ep_now_ns() < deadline);
            CHECK(net->ops->progress(net, &moved) == EP_OK);
        }
    while (net->node == 1 && (net->signals[0] == 0 || net->signals[1] == 0)) {
        CHECK(ep_now_ns() < deadline);
        CHECK(net->ops->progress(net, &moved) == EP_OK);
    }
    net->ops->free(net);
}

/* What a freed endpoint has left unread does not reach the next one, nor one that lives beside it. */
static void test_endpoints_apart(const ep_boot *boot)
{
    struct ep_net *nets[3];
    uint64_t deadline = ep_deadline_ns(30000);
    char mine = 0, all[NRANKS];
    bool moved;

    nets[0] = open_net(boot, 2, 64);
    nets[1] = open_net(boot, 2, 64);
    for (uint32_t i = 0; i < 5; i++)
        CHECK(nets[0]->ops->signal(nets[0], 1 - nets[0]->node, 0, i, 1000));
    CHECK(gather(boot, &mine, 1, 20000, all) == EP_OK);
    nets[0]->ops->free(nets[0]); /* it never looked */
    nets[2] = open_net(boot, 2, 64);
    for (int n = 1; n < 3; n++)
        CHECK(nets[n]->ops->signal(nets[n], 1 - nets[n]->node, 0, 7, (uint64_t)n));
    while (nets[1]->signals[7] == 0 || nets[2]->signals[7] == 0) {
        CHECK(ep_now_ns() < deadline);
        for (int n = 1; n < 3; n++)
            CHECK(nets[n]->ops->progress(nets[n], &moved) == EP_OK);
    }
    for (uint32_t i = 0; i < 7; i++)
        CHECK(nets[1]->signals[i] == 0 && nets[2]->signals[i] == 0);
    CHECK(nets[1]->signals[7] == 1 && nets[2]->signals[7] == 2);
    nets[1]->ops->free(nets[1]);
    nets[2]->ops->free(nets[2]);
}

/* Beyond the region or the signals: a status that names the rank, and it stays. */
static void test_out_of_range(const ep_boot *boot)
{
    static unsigned char data[10000];
    static const struct {
        uint64_t offset;
        size_t bytes;
    } bad[] = {{1000, 25}, {UINT64_MAX, 2}, {0, 10000}, {0, 0}};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct ep_net *net = open_net(boot, 2, 1024);
        ep_status status = EP_OK;
        uint64_t deadline = ep_deadline_ns(20000);
        char mine = 0, all[NRANKS], name[32];
        bool moved;

        if (net->node == 0 && bad[i].bytes)
            CHECK(net->ops->put(net, 1, 1, bad[i].offset, data, bad[i].bytes));
        else if (net->node == 0)
            CHECK(net->ops->signal(net, 1, 1, N_SIGNALS, 1));
        while (net->node == 1 && status == EP_OK && ep_now_ns() < deadline)
            status = net->ops->progress(net, &moved);
        if (net->node == 1) {
            snprintf(name, sizeof(name), "rank %d, channel 1", rank - 2);
            CHECK(status == EP_E_MISMATCH && strstr(ep_last_error(), name));
            CHECK(!net->ops->signal(net, 0, 0, 0, 1));
            CHECK(net->ops->progress(net, &moved) == EP_E_MISMATCH && strstr(ep_last_error(), name));
        }
        CHECK(gather(boot, &mine, 1, 20000, all) == EP_OK);
        net->ops->free(net);
    }
}

static void test_disagreement(const ep_boot *boot)
{
    const struct ep_net_provider *provider = boot->network;
    struct ep_net_params params = {.rank = rank,
                                   .nranks = NRANKS,
                                   .ranks_per_node = 1,
                                   .channels = rank == 3 ? 2 : 1,
                                   .region_bytes = 64,
                                   .n_signals = 1,
                                   .timeout_ms = 20000,
                                   .boot = boot};
    struct ep_net *net = NULL;

    CHECK(provider->open(provider, &params, &net) == EP_E_MISMATCH && !net);
    CHECK(strstr(ep_last_error(), "channels") && strstr(ep_last_error(), "rank 3"));
    params.channels = EP_NET_MAX_CHANNELS + 1;
    CHECK(provider->open(provider, &params, &net) == EP_E_ARG && !net);

    /* One rank has no memory for its region: it says so, and the others do not wait for it. */
    params.channels = 1;
    params.region_bytes = rank == 1 ? (size_t)1 << 61 : 64;
    CHECK(provider->open(provider, &params, &net) == EP_E_MEMORY && !net);
    CHECK(rank == 1 || strstr(ep_last_error(), "rank 1"));
}

/* A peer that is gone does not keep anybody from leaving, even with a large put under way; nor MPI_Finalize later. */
static void test_gone_peer(const ep_boot *boot)
{
    static unsigned char large[8 << 20];
    struct ep_net *net = open_net(boot, 2, sizeof(large));
    char mine = 0, all[NRANKS];
    uint64_t begin;

    if (net->node == 1)
        net->ops->free(net); /* without a look at the network */
    CHECK(gather(boot, &mine, 1, 20000, all) == EP_OK);
    if (net->node == 0) {
        CHECK(net->ops->put(net, 1, 0, 0, large, sizeof(large)));
        CHECK(net->ops->signal(net, 1, 0, 0, 1));
        begin = ep_now_ns();
        net->ops->free(net);
        CHECK(ep_now_ns() - begin < 8000000000u);
    }
    CHECK(gather(boot, &mine, 1, 20000, all) == EP_OK);
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
    uint64_t deadline = ep_deadline_ns(30000);
    uint64_t sent = 0;
    bool moved;

    while ((sent < 2000 || worker->net->signals[0] < 2000) && worker->status == EP_OK) {
        sent += worker->net->ops->signal(worker->net, 1 - worker->net->node, 0, 0, 1);
        worker->status = worker->net->ops->progress(worker->net, &moved);
        if (ep_now_ns() > deadline)
            worker->status = EP_E_TIMEOUT;
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

        CHECK(gather(boot, &i, sizeof(i), 20000, all) == EP_OK);
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
        {"gather of different sizes", test_gather_of_different_sizes},
        {"streams", test_streams},
        {"streams, two ranks per node", test_streams_two_ranks_per_node},
        {"small rings", test_small_rings},
        {"slow reader", test_slow_reader},
        {"order", test_order},
        {"overwriting", test_overwriting},
        {"back-pressure", test_back_pressure},
        {"endpoints apart", test_endpoints_apart},
        {"out of range", test_out_of_range},
        {"disagreement", test_disagreement},
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
