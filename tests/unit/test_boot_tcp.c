/* SPDX-License-Identifier: Apache-2.0 */
/* The bootstrap over TCP, with ranks that are threads of this process, forked children, and strangers. */
#include "base/clock.h"
#include "tcp/star.h"

#include <epkit/epkit.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define MOST_RANKS 8
#define PATIENT_MS 60000 /* where everybody comes */
#define SHORT_MS 4000    /* where somebody does not: a machine with much other work has to start the others in it */

struct rank {
    pthread_t thread;
    ep_boot_tcp_args args;
    void (*run)(struct rank *rank, ep_boot_tcp *boot); /* NULL: nothing behind ep_boot_tcp_new() */
    ep_status status;
    uint64_t dropped;
    int ranks_per_node;
    char text[EP_ERROR_TEXT_BYTES];
};

/* A port that was free a moment ago. */
static uint16_t free_port(void)
{
    uint16_t port;
    int fd;

    assert_int_equal(tcp_listen(NULL, 0, &fd, &port), EP_OK);
    close(fd);
    return port;
}

static void *rank_main(void *argument)
{
    struct rank *rank = argument;
    ep_boot_tcp *boot = NULL;

    rank->status = ep_boot_tcp_new(&rank->args, &boot);
    snprintf(rank->text, sizeof(rank->text), "%s", ep_last_error());
    if (rank->status == EP_OK) {
        rank->dropped = ep_boot_tcp_get_dropped(boot);
        rank->ranks_per_node = ep_boot_tcp_get(boot)->ranks_per_node;
        if (rank->run)
            rank->run(rank, boot);
    }
    ep_boot_tcp_free(boot);
    return NULL;
}

/* ranks [n]; `address` must outlive them. */
static void prepare(struct rank *ranks, int n, const char *address, int timeout_ms)
{
    for (int i = 0; i < n; i++) {
        ranks[i] = (struct rank){.args = EP_BOOT_TCP_ARGS_INIT};
        ranks[i].args.rank = i;
        ranks[i].args.nranks = n;
        ranks[i].args.address = address;
        ranks[i].args.secret = "a secret of this test";
        ranks[i].args.timeout_ms = timeout_ms;
    }
}

static void start(struct rank *rank)
{
    assert_int_equal(pthread_create(&rank->thread, NULL, rank_main, rank), 0);
}

static void run_all(struct rank *ranks, int n)
{
    for (int i = n - 1; i >= 0; i--) /* rank 0 last: the others have to try again */
        start(&ranks[i]);
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
}

static void fail_rank(struct rank *rank, ep_status status)
{
    rank->status = status;
    snprintf(rank->text, sizeof(rank->text), "%s", ep_last_error());
}

/* --- addresses --- */

static void test_endpoints(void **state)
{
    static const struct {
        const char *text, *host;
        uint16_t port;
    } rows[] = {
        {"host", "host", 7},
        {"host:29500", "host", 29500},
        {"10.0.0.1:1", "10.0.0.1", 1},
        {"[::1]:65535", "::1", 65535},
        {"[fe80::1%eth0]", "fe80::1%eth0", 7},
        {"2001:db8::1", "2001:db8::1", 7},
        {"", NULL, 0},
        {":1", NULL, 0},
        {"host:", NULL, 0},
        {"host:0", NULL, 0},
        {"host:65536", NULL, 0},
        {"host:1x", NULL, 0},
        {"host:-1", NULL, 0},
        {"[::1", NULL, 0},
        {"[::1]x", NULL, 0},
        {"[]:1", NULL, 0},
        {"a-host-name-that-is-too-long-for-the-room:1", NULL, 0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char host[32] = "";
        uint16_t port = 7;
        ep_status status = tcp_parse_endpoint(rows[i].text, host, sizeof(host), &port);

        assert_int_equal(status, rows[i].host ? EP_OK : EP_E_ARG);
        if (rows[i].host) {
            assert_string_equal(host, rows[i].host);
            assert_int_equal(port, rows[i].port);
        }
    }
}

/* --- all-gathers --- */

static void gather_blocks(struct rank *rank, ep_boot_tcp *boot)
{
    static const size_t sizes[] = {8, 0, 1, 4097, 300000, 16};
    const ep_boot *given = ep_boot_tcp_get(boot);
    unsigned char *mine = malloc(300000), *all = malloc((size_t)given->nranks * 300000);

    for (size_t i = 0; mine && all && rank->status == EP_OK && i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        memset(mine, given->rank + (int)i * 16, sizes[i]);
        memset(all, 0xff, (size_t)given->nranks * sizes[i]);
        fail_rank(rank, given->allgather(given->context, mine, sizes[i], PATIENT_MS, all));
        for (size_t at = 0; rank->status == EP_OK && at < (size_t)given->nranks * sizes[i]; at++)
            if (all[at] != (unsigned char)(at / sizes[i] + i * 16))
                rank->status = EP_E_VALUE;
    }
    free(mine);
    free(all);
}

static void check_gather(const char *host, int n)
{
    struct rank ranks[MOST_RANKS];
    char address[64];

    snprintf(address, sizeof(address), "%s:%u", host, free_port());
    prepare(ranks, n, address, PATIENT_MS);
    for (int i = 0; i < n; i++)
        ranks[i].run = gather_blocks;
    run_all(ranks, n);
    for (int i = 0; i < n; i++) {
        if (ranks[i].status != EP_OK)
            print_error("rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, EP_OK);
        assert_int_equal(ranks[i].ranks_per_node, n); /* they share this host */
    }
}

static void test_gather(void **state)
{
    struct tcp_address v6 = {.family = AF_INET6, .bytes[15] = 1};
    uint16_t port;
    int fd;

    (void)state;
    check_gather("127.0.0.1", 4);
    check_gather("localhost", 8);
    check_gather("127.0.0.1", 1);
    if (tcp_listen(&v6, 0, &fd, &port) != EP_OK) {
        print_message("    no IPv6 here: %s\n", ep_last_error());
        return;
    }
    close(fd);
    check_gather("[::1]", 3);
}

/* --- who is missing --- */

static void test_missing_ranks_are_named_on_all(void **state)
{
    struct rank ranks[5];
    char address[64];

    (void)state;
    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    prepare(ranks, 5, address, SHORT_MS);
    for (int i = 0; i < 5; i += 2)
        start(&ranks[i]);
    for (int i = 0; i < 5; i += 2) {
        pthread_join(ranks[i].thread, NULL);
        print_message("    rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, EP_E_TIMEOUT);
        assert_non_null(strstr(ranks[i].text, "did not come"));
        assert_non_null(strstr(ranks[i].text, "1, 3"));
    }
}

static void test_no_rank_0(void **state)
{
    struct rank ranks[2];
    char address[64];

    (void)state;
    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    prepare(ranks, 2, address, 300);
    start(&ranks[1]);
    pthread_join(ranks[1].thread, NULL);
    assert_int_equal(ranks[1].status, EP_E_TIMEOUT);
    assert_non_null(strstr(ranks[1].text, address));
    assert_non_null(strstr(ranks[1].text, "could not reach rank 0"));
}

static void test_other_secret(void **state)
{
    struct rank ranks[2];
    char address[64];

    (void)state;
    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    prepare(ranks, 2, address, SHORT_MS);
    ranks[1].args.secret = "another one";
    run_all(ranks, 2);
    for (int i = 0; i < 2; i++) {
        print_message("    rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, EP_E_TIMEOUT);
        assert_non_null(strstr(ranks[i].text, "another secret"));
    }
}

static void test_other_number_of_ranks(void **state)
{
    struct rank ranks[3];
    char address[64];

    (void)state;
    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    prepare(ranks, 3, address, SHORT_MS);
    ranks[2].args.nranks = 4;
    run_all(ranks, 3);
    assert_int_equal(ranks[2].status, EP_E_MISMATCH);
    assert_non_null(strstr(ranks[2].text, "this job has 3 ranks, and that is rank 2 of 4"));
    assert_int_equal(ranks[0].status, EP_E_TIMEOUT);
    assert_non_null(strstr(ranks[0].text, "rank 2"));
    assert_int_equal(ranks[1].status, EP_E_TIMEOUT);
}

/* --- strangers --- */

/* One that connects to rank 0 and sends `bytes` of rubbish, or of a good beginning; kept open. */
static int connect_stranger(const struct tcp_address *to, size_t bytes, int seed)
{
    unsigned char rubbish[512];
    int fd;

    for (size_t i = 0; i < sizeof(rubbish); i++)
        rubbish[i] = (unsigned char)((i * 131 + (size_t)seed * 7919) >> 3);
    if (seed % 2)
        memcpy(rubbish, (const unsigned char[]){'E', 'P', 'T', '1', 1, 0, 1, 0},
               8); /* the magic number, and a hello that nobody can prove */
    assert_int_equal(tcp_connect(to, NULL, &fd), EP_OK);
    (void)poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, 10000);
    if (bytes)
        (void)!send(fd, rubbish, bytes, MSG_NOSIGNAL);
    return fd;
}

static void test_strangers_change_nothing(void **state)
{
    enum { STRANGERS = 300 };
    static const size_t sizes[] = {0, 1, 63, 64, 96, 512};
    struct tcp_address to = {.family = AF_INET, .bytes = {127, 0, 0, 1}};
    struct timespec nap = {.tv_nsec = 1000000};
    struct rank ranks[3];
    int fds[STRANGERS], probe = -1;
    char address[64];

    (void)state;
    to.port = free_port();
    snprintf(address, sizeof(address), "127.0.0.1:%u", to.port);
    prepare(ranks, 3, address, PATIENT_MS);
    start(&ranks[0]);
    for (int tries = 0; tries < 30000 && probe < 0; tries++) { /* until it listens */
        struct pollfd look = {.events = POLLOUT};

        if (tcp_connect(&to, NULL, &look.fd) == EP_OK && poll(&look, 1, 1000) == 1 && tcp_connect_error(look.fd) == 0)
            probe = look.fd;
        else if (look.fd > 0)
            close(look.fd);
        nanosleep(&nap, NULL);
    }
    assert_true(probe >= 0);
    for (int i = 0; i < STRANGERS; i++)
        fds[i] = connect_stranger(&to, sizes[(size_t)i % (sizeof(sizes) / sizeof(sizes[0]))], i);
    /* Behind more silent ones than there is room for. */
    ranks[1].run = ranks[2].run = ranks[0].run = gather_blocks;
    start(&ranks[1]);
    start(&ranks[2]);
    for (int i = 0; i < 3; i++) {
        pthread_join(ranks[i].thread, NULL);
        if (ranks[i].status != EP_OK)
            print_error("rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, EP_OK);
    }
    print_message("    %llu of %d strangers were dropped before all ranks were there\n",
                  (unsigned long long)ranks[0].dropped, STRANGERS + 1);
    assert_true(ranks[0].dropped >= 100);
    close(probe);
    for (int i = 0; i < STRANGERS; i++)
        close(fds[i]);
}

/* --- ranks that end --- */

static void gather_one(struct rank *rank, ep_boot_tcp *boot)
{
    const ep_boot *given = ep_boot_tcp_get(boot);
    int32_t mine = given->rank, all[MOST_RANKS];

    fail_rank(rank, given->allgather(given->context, &mine, sizeof(mine), PATIENT_MS, all));
}

static void gather_another_size(struct rank *rank, ep_boot_tcp *boot)
{
    const ep_boot *given = ep_boot_tcp_get(boot);
    int64_t mine = given->rank, all[MOST_RANKS];

    fail_rank(rank, given->allgather(given->context, &mine, sizeof(mine), PATIENT_MS, all));
    /* It stays so. */
    if (rank->status != EP_OK)
        fail_rank(rank, given->allgather(given->context, &mine, sizeof(mine), PATIENT_MS, all));
}

static void run_with_last(void (*run)(struct rank *, ep_boot_tcp *), ep_status wanted, const char *text)
{
    struct rank ranks[4];
    char address[64];

    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    prepare(ranks, 4, address, PATIENT_MS);
    for (int i = 0; i < 3; i++)
        ranks[i].run = gather_one;
    ranks[3].run = run;
    run_all(ranks, 4);
    for (int i = 0; i < 3; i++) {
        print_message("    rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, wanted);
        assert_non_null(strstr(ranks[i].text, text));
    }
}

static void test_rank_that_leaves(void **state)
{
    (void)state;
    run_with_last(NULL, EP_E_PEER_LEFT, "rank 3 (127.0.0.1:");
}

static void test_other_size(void **state)
{
    (void)state;
    run_with_last(gather_another_size, EP_E_MISMATCH, "rank 0 gathers 4 bytes and rank 3 gathers 8");
}

/* The other ranks are threads of the parent, started behind the fork. */
static void test_rank_that_dies(void **state)
{
    struct rank ranks[3];
    char address[64];
    int code;
    pid_t child;

    (void)state;
    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    prepare(ranks, 3, address, PATIENT_MS);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        ep_boot_tcp *boot;

        alarm(120);
        _exit(ep_boot_tcp_new(&ranks[2].args, &boot) != EP_OK);
    }
    for (int i = 0; i < 2; i++) {
        ranks[i].run = gather_one;
        start(&ranks[i]);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(ranks[i].thread, NULL);
        print_message("    rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, EP_E_PEER_DEAD);
        assert_non_null(strstr(ranks[i].text, "rank 2 (127.0.0.1:"));
    }
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
}

/* --- the environment --- */

struct setting {
    const char *name, *value;
};

static void set_environment(const struct setting *settings)
{
    static const char *const names[] = {"RANK",          "WORLD_SIZE",       "MASTER_ADDR",
                                        "MASTER_PORT",   "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE",
                                        "EPKIT_ADDRESS", "EPKIT_SECRET",     "EPKIT_TIMEOUT_MS"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        unsetenv(names[i]);
    for (; settings->name; settings++)
        setenv(settings->name, settings->value, 1);
}

static void test_bad_environment(void **state)
{
    static const struct {
        struct setting settings[6];
        const char *text;
    } rows[] = {
        {{{0}}, "WORLD_SIZE is not set"},
        {{{"WORLD_SIZE", "2"}}, "RANK is not set"},
        {{{"WORLD_SIZE", "two"}}, "WORLD_SIZE is \"two\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "2"}}, "RANK is \"2\", not a number in 0..1"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "-1"}}, "RANK is \"-1\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}}, "MASTER_ADDR is not set"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h"}}, "MASTER_PORT is not set"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "0"}}, "MASTER_PORT is \"0\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "[::1"}}, "ends with \"]\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "h"}}, "names no port"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "h:1"}, {"EPKIT_TIMEOUT_MS", "x"}},
         "EPKIT_TIMEOUT_MS is \"x\""},
    };
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    ep_boot_tcp *boot = NULL;

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        set_environment(rows[i].settings);
        assert_int_equal(ep_boot_tcp_new(&args, &boot), EP_E_ARG);
        if (!strstr(ep_last_error(), rows[i].text))
            print_error("%s\n", ep_last_error());
        assert_non_null(strstr(ep_last_error(), rows[i].text));
    }
    set_environment((const struct setting[]){{0}});
}

/* Ranks as processes, as torchrun starts them; the port that it names is its own. */
static void test_environment_of_torchrun(void **state)
{
    pid_t children[4];
    struct tcp_address any = {.family = AF_INET, .bytes = {127, 0, 0, 1}};
    uint16_t store;
    char text[16], number[16];
    int code, fd;

    (void)state;
    assert_int_equal(tcp_listen(&any, 0, &fd, &store), EP_OK); /* stays open: torchrun's store */
    snprintf(text, sizeof(text), "%u", store);
    for (int rank = 0; rank < 4; rank++) {
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0) {
            ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
            ep_boot_tcp *boot;

            alarm(120);
            snprintf(number, sizeof(number), "%d", rank);
            set_environment((const struct setting[]){{"RANK", number},
                                                     {"WORLD_SIZE", "4"},
                                                     {"MASTER_ADDR", "127.0.0.1"},
                                                     {"MASTER_PORT", text},
                                                     {"LOCAL_WORLD_SIZE", "2"},
                                                     {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                     {"EPKIT_SECRET", "s"},
                                                     {"EPKIT_TIMEOUT_MS", "60000"},
                                                     {0}});
            if (ep_boot_tcp_new(&args, &boot) != EP_OK) {
                fprintf(stderr, "rank %d: %s\n", rank, ep_last_error());
                _exit(1);
            }
            _exit(ep_boot_tcp_get(boot)->ranks_per_node == 2 && ep_boot_tcp_get(boot)->rank == rank ? 0 : 2);
        }
    }
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(waitpid(children[rank], &code, 0), children[rank]);
        assert_int_equal(code, 0);
    }
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_environment_of_torchrun), /* these fork, so before any thread */
        cmocka_unit_test(test_rank_that_dies),
        cmocka_unit_test(test_bad_environment),
        cmocka_unit_test(test_endpoints),
        cmocka_unit_test(test_gather),
        cmocka_unit_test(test_missing_ranks_are_named_on_all),
        cmocka_unit_test(test_no_rank_0),
        cmocka_unit_test(test_other_secret),
        cmocka_unit_test(test_other_number_of_ranks),
        cmocka_unit_test(test_strangers_change_nothing),
        cmocka_unit_test(test_rank_that_leaves),
        cmocka_unit_test(test_other_size),
    };

    return cmocka_run_group_tests_name("boot_tcp", tests, NULL, NULL);
}
