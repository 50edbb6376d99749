/* SPDX-License-Identifier: Apache-2.0 */
/* The bootstrap over TCP, with ranks that are threads of this process or forked children, and with other programs. */
#include "unit.h"

#include "base/clock.h"
#include "tcp/star.h"

#include <epkit/epkit.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_RANKS 8
#define PATIENT_MS 60000 /* where all ranks arrive */
#define SHORT_MS 500     /* where a rank is missing; initial value, see with_deadline() */

struct rank {
    pthread_t thread;
    ep_boot_tcp_args args;
    void (*run)(struct rank *rank, ep_boot_tcp *boot); /* NULL: nothing after ep_boot_tcp_new() */
    ep_status status;
    uint64_t dropped;
    int ranks_per_node;
    char text[EP_ERROR_TEXT_BYTES];
};

/* Instead of those of this machine, if it is not NULL. */
static struct ifaddrs *fake_interfaces;

int __real_getifaddrs(struct ifaddrs **ret_list);
int __wrap_getifaddrs(struct ifaddrs **ret_list);
void __real_freeifaddrs(struct ifaddrs *list);
void __wrap_freeifaddrs(struct ifaddrs *list);

int __wrap_getifaddrs(struct ifaddrs **ret_list)
{
    if (!fake_interfaces)
        return __real_getifaddrs(ret_list);
    *ret_list = fake_interfaces;
    return 0;
}

void __wrap_freeifaddrs(struct ifaddrs *list)
{
    if (list != fake_interfaces)
        __real_freeifaddrs(list);
}

/* A port that was free just now. */
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

/* At a port of this host. */
static void prepare_at(struct rank *ranks, int n, uint16_t port, int timeout_ms)
{
    static char address[64];

    snprintf(address, sizeof(address), "127.0.0.1:%u", port);
    prepare(ranks, n, address, timeout_ms);
}

static void prepare_here(struct rank *ranks, int n, int timeout_ms)
{
    prepare_at(ranks, n, free_port(), timeout_ms);
}

static void start(struct rank *rank)
{
    assert_int_equal(pthread_create(&rank->thread, NULL, rank_main, rank), 0);
}

static void join_well(struct rank *ranks, int n)
{
    for (int i = 0; i < n; i++) {
        pthread_join(ranks[i].thread, NULL);
        if (ranks[i].status != EP_OK)
            print_error("rank %d: %s\n", i, ranks[i].text);
        assert_int_equal(ranks[i].status, EP_OK);
    }
}

static void run_all(struct rank *ranks, int n)
{
    for (int i = n - 1; i >= 0; i--) /* rank 0 last: the others must retry */
        start(&ranks[i]);
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
}

/*
 * If a rank is missing, a deadline passes, and within it all other ranks must reach the state that the test needs. How
 * long this takes depends on the machine: if the results also name started ranks as late, the attempt is repeated with
 * twice the time. Any other unexpected result fails at once.
 */
enum answer { FITS, LATE, WRONG };

static void with_deadline(enum answer (*attempt)(int timeout_ms))
{
    int timeout_ms = SHORT_MS;
    enum answer answer;

    while ((answer = attempt(timeout_ms)) == LATE) {
        timeout_ms *= 2;
        assert_true(timeout_ms <= PATIENT_MS);
    }
    assert_int_equal(answer, FITS);
}

#define RANK(n) (1u << (n))

/* The ranks that a text names, as in "ranks 1 (10.0.0.2:7), 3" or "rank 0 at ...", as a mask. */
static unsigned ranks_named(const char *text)
{
    unsigned named = 0;

    for (const char *at = strstr(text, "rank"); at; at = strstr(at, "rank")) {
        at += at[4] == 's' ? 5 : 4;
        while (*at == ' ' && at[1] >= '0' && at[1] <= '9') {
            char *end;
            unsigned long rank = strtoul(at + 1, &end, 10);

            named |= rank < MOST_RANKS ? RANK(rank) : 0;
            if (strncmp(end, " (", 2) == 0)
                end += strcspn(end, ")") + (strchr(end, ')') != NULL);
            at = *end == ',' ? end + 1 : end;
            if (*end != ',')
                break;
        }
    }
    return named;
}

/* The text may name `missing`, and the rank itself. `started`: the started ranks. */
static enum answer answer_of(const struct rank *rank, ep_status status, const char *text, unsigned missing,
                             unsigned started)
{
    unsigned others = ranks_named(rank->text) & ~RANK(rank->args.rank);

    if (rank->status == status && strstr(rank->text, text) && !(others & ~missing))
        return FITS;
    print_message("    rank %d: %s: %s\n", rank->args.rank, ep_status_name(rank->status), rank->text);
    return rank->status == EP_E_TIMEOUT && others & started ? LATE : WRONG;
}

/* If rank 0 was late itself, the results of the others follow from that. */
static enum answer worst(enum answer root, enum answer others)
{
    return root == LATE || root > others ? root : others;
}

static void fail_rank(struct rank *rank, ep_status status)
{
    rank->status = status;
    snprintf(rank->text, sizeof(rank->text), "%s", ep_last_error());
}

/* --- addresses --- */

TEST(test_endpoints)
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
        {"[::ffff:10.0.0.1]:2", "::ffff:10.0.0.1", 2},
        {":::::", NULL, 0},
        {"host:1:2", NULL, 0},
        {"2001:db8::1:29500:x", NULL, 0},
        {"[fe80::1%]:1", NULL, 0},
        {"[host:1]:2", NULL, 0},
        {"a-host-name-that-is-too-long-for-the-room:1", NULL, 0},
    };

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

/* The requested value must be equal on all ranks; LOCAL_WORLD_SIZE may differ, and then the hosts decide. */
TEST(test_ranks_per_node)
{
    struct rank ranks[4];

    prepare_here(ranks, 4, PATIENT_MS);
    for (int i = 0; i < 4; i++)
        ranks[i].args.ranks_per_node = 2;
    run_all(ranks, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(ranks[i].status, EP_OK);
        assert_int_equal(ranks[i].ranks_per_node, 2);
    }
    ranks[3].args.ranks_per_node = 0;
    run_all(ranks, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(ranks[i].status, EP_E_MISMATCH);
        assert_string_equal(ranks[i].text,
                            "ep_boot_tcp_new: ranks disagree: ranks_per_node is 2 on rank 0 and 0 on rank 3");
    }
}

TEST(test_gather)
{
    struct tcp_address v6 = {.family = AF_INET6, .bytes[15] = 1};
    uint16_t port;
    int fd;

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

/* --- missing ranks --- */

static enum answer miss_two_ranks(int timeout_ms)
{
    struct rank ranks[5];
    enum answer answers[5] = {FITS};

    prepare_here(ranks, 5, timeout_ms);
    for (int i = 0; i < 5; i += 2)
        start(&ranks[i]);
    for (int i = 0; i < 5; i += 2) {
        pthread_join(ranks[i].thread, NULL);
        answers[i] =
            answer_of(&ranks[i], EP_E_TIMEOUT, "did not arrive within", RANK(1) | RANK(3), RANK(0) | RANK(2) | RANK(4));
        if (answers[i] == FITS && !strstr(ranks[i].text, ": ranks 1, 3"))
            answers[i] = WRONG;
    }
    return worst(answers[0], answers[2] > answers[4] ? answers[2] : answers[4]);
}

TEST_CALL(test_missing_ranks_are_named_on_all, with_deadline(miss_two_ranks))

TEST(test_no_rank_0)
{
    struct rank ranks[2];

    prepare_here(ranks, 2, 300);
    start(&ranks[1]);
    pthread_join(ranks[1].thread, NULL);
    assert_int_equal(ranks[1].status, EP_E_TIMEOUT);
    assert_non_null(strstr(ranks[1].text, ranks[1].args.address));
    assert_non_null(strstr(ranks[1].text, "could not reach rank 0"));
}

static enum answer connect_with_another_secret(int timeout_ms)
{
    struct rank ranks[2];

    prepare_here(ranks, 2, timeout_ms);
    ranks[1].args.secret = "another one";
    run_all(ranks, 2);
    return worst(answer_of(&ranks[0], EP_E_TIMEOUT, "another secret", RANK(1), RANK(1)),
                 answer_of(&ranks[1], EP_E_TIMEOUT, "another secret", RANK(0), RANK(0)));
}

TEST_CALL(test_other_secret, with_deadline(connect_with_another_secret))

/* All ranks get the failure at once, long before the deadline. */
static void expect_disagreement(struct rank *ranks, int n, const char *text)
{
    for (int i = 0; i < n; i++) {
        if (ranks[i].status != EP_E_MISMATCH || !strstr(ranks[i].text, text))
            print_error("rank %d: %s: %s\n", ranks[i].args.rank, ep_status_name(ranks[i].status), ranks[i].text);
        assert_int_equal(ranks[i].status, EP_E_MISMATCH);
        assert_non_null(strstr(ranks[i].text, text));
    }
}

/* Only rank `other` has another number of ranks; all ranks of the smaller job arrive. */
static void count_other_ranks(int other, int nranks, const char *text)
{
    struct rank ranks[3];

    prepare_here(ranks, 3, PATIENT_MS);
    ranks[other].args.nranks = nranks;
    run_all(ranks, 3);
    expect_disagreement(ranks, 3, text);
}

TEST(test_other_number_of_ranks)
{
    count_other_ranks(2, 4, "ranks disagree: nranks is 3 on rank 0 and 4 on rank 2 (127.0.0.1:");
    count_other_ranks(1, 2, "ranks disagree: nranks is 3 on rank 0 and 2 on rank 1 (127.0.0.1:");
    count_other_ranks(0, 8, "ranks disagree: nranks is 8 on rank 0 and 3 on rank ");
}

TEST(test_rank_given_twice)
{
    struct rank ranks[3];

    prepare_here(ranks, 3, PATIENT_MS);
    ranks[2].args.rank = 1;
    run_all(ranks, 3);
    expect_disagreement(ranks, 3, "two processes are rank 1: 127.0.0.1:");
}

TEST(test_second_rank_0)
{
    struct rank ranks[3];

    prepare_here(ranks, 3, PATIENT_MS);
    ranks[2].args.rank = 0;
    run_all(ranks, 3);
    /* Either of the two may get the port. */
    for (int i = 0; i < 3; i++) {
        assert_true(ranks[i].status == EP_E_MISMATCH || (i != 1 && ranks[i].status == EP_E_STATE));
        if (!strstr(ranks[i].text, "two processes are rank 0: this one and one at 127.0.0.1:"))
            fail_msg("rank %d: %s", i, ranks[i].text);
    }
    assert_true(ranks[0].status != ranks[2].status);
}

/* --- other programs --- */

/* Connects to rank 0 and sends `bytes` of invalid data, or of a valid beginning; stays open. */
static int connect_other_program(const struct tcp_address *to, size_t bytes, int seed)
{
    unsigned char rubbish[512];
    int fd;

    for (size_t i = 0; i < sizeof(rubbish); i++)
        rubbish[i] = (unsigned char)((i * 131 + (size_t)seed * 7919) >> 3);
    if (seed % 2)
        memcpy(rubbish, (const unsigned char[]){'E', 'P', 'T', '1', 1, 0, 1, 0},
               8); /* the magic number, and a hello without a valid proof */
    assert_int_equal(tcp_connect(to, NULL, &fd), EP_OK);
    (void)poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, 10000);
    if (bytes)
        (void)!send(fd, rubbish, bytes, MSG_NOSIGNAL);
    return fd;
}

TEST(test_other_programs_change_nothing)
{
    enum { STRANGERS = 300 };
    static const size_t sizes[] = {0, 1, 63, 64, 96, 512};
    struct tcp_address to = {.family = AF_INET, .bytes = {127, 0, 0, 1}};
    struct timespec interval = {.tv_nsec = 1000000};
    struct rank ranks[3];
    int fds[STRANGERS], probe = -1;

    to.port = free_port();
    prepare_at(ranks, 3, to.port, PATIENT_MS);
    start(&ranks[0]);
    for (int tries = 0; tries < 30000 && probe < 0; tries++) { /* until it listens */
        struct pollfd look = {.events = POLLOUT};

        if (tcp_connect(&to, NULL, &look.fd) == EP_OK && poll(&look, 1, 1000) == 1 && tcp_connect_error(look.fd) == 0)
            probe = look.fd;
        else if (look.fd > 0)
            close(look.fd);
        nanosleep(&interval, NULL);
    }
    assert_true(probe >= 0);
    for (int i = 0; i < STRANGERS; i++)
        fds[i] = connect_other_program(&to, sizes[(size_t)i % (sizeof(sizes) / sizeof(sizes[0]))], i);
    /* After more silent connections than the table has room for. */
    ranks[1].run = ranks[2].run = ranks[0].run = gather_blocks;
    start(&ranks[1]);
    start(&ranks[2]);
    join_well(ranks, 3);
    print_message("    %llu of %d other connections were dropped\n", (unsigned long long)ranks[0].dropped,
                  STRANGERS + 1);
    assert_true(ranks[0].dropped >= STRANGERS + 1); /* also those that waited until all ranks had connected */
    close(probe);
    for (int i = 0; i < STRANGERS; i++)
        close(fds[i]);
}

/* --- ranks that exit --- */

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
    /* The failure persists. */
    if (rank->status != EP_OK)
        fail_rank(rank, given->allgather(given->context, &mine, sizeof(mine), PATIENT_MS, all));
}

static void run_with_last(void (*run)(struct rank *, ep_boot_tcp *), ep_status wanted, const char *text)
{
    struct rank ranks[4];

    prepare_here(ranks, 4, PATIENT_MS);
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

TEST_CALL(test_rank_that_leaves, run_with_last(NULL, EP_E_PEER_LEFT, "rank 3 (127.0.0.1:"))

TEST(test_other_size)
{
    run_with_last(gather_another_size, EP_E_MISMATCH, "rank 0 gathers 4 bytes and rank 3 gathers 8");
}

/* The other ranks are threads of the parent, started after the fork. */
TEST(test_rank_that_dies)
{
    struct rank ranks[3];
    int code;
    pid_t child;

    prepare_here(ranks, 3, PATIENT_MS);
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

/* --- impostors and wrong listeners --- */

/* An authenticated connection of `rank` that sends nothing else. */
static int authenticate(uint16_t port, int rank, int nranks)
{
    const struct tcp_address to = {.family = AF_INET, .port = port, .bytes = {127, 0, 0, 1}};
    const struct tcp_hello hello = {.kind = TCP_BOOTSTRAP, .rank = rank, .detail = (uint32_t)nranks};
    uint64_t deadline_ns = ep_deadline_ns(PATIENT_MS);
    struct tcp_key key;

    tcp_key_make("a secret of this test", "bootstrap", NULL, 0, &key);
    while (ep_now_ns() < deadline_ns) { /* until rank 0 listens */
        enum tcp_handshake_result result = TCP_HANDSHAKE_PENDING;
        struct tcp_handshake hs;
        int fd;

        assert_int_equal(tcp_connect(&to, NULL, &fd), EP_OK);
        tcp_handshake_connect(&hs, fd, &key, &hello, &to, deadline_ns);
        while (result == TCP_HANDSHAKE_PENDING) {
            (void)poll(&(struct pollfd){.fd = hs.fd, .events = tcp_handshake_events(&hs)}, 1, 20);
            result = tcp_handshake_step(&hs);
        }
        if (result == TCP_HANDSHAKE_DONE)
            return hs.fd;
        unit_sleep_ms(10);
    }
    fail_msg("rank 0 did not listen");
    return -1;
}

/* Data that it sent before its death is still unread by rank 0. */
TEST(test_rank_that_died_is_started_again)
{
    struct rank ranks[3];
    uint16_t port = free_port();
    int fd;

    prepare_at(ranks, 3, port, PATIENT_MS);
    start(&ranks[0]);
    fd = authenticate(port, 1, 3);
    assert_int_equal(send(fd, "its block", 9, MSG_NOSIGNAL), 9);
    close(fd);
    start(&ranks[1]);
    start(&ranks[2]);
    join_well(ranks, 3);
}

/* As an old address of rank 0's host name, or a proxy before its pod is ready: it accepts connections and sends
 * nothing. */
TEST(test_silent_program_at_the_port_of_rank_0)
{
    struct tcp_address any = {.family = AF_INET, .bytes = {127, 0, 0, 1}}, from;
    struct rank ranks[2];
    uint16_t port;
    int listener, fd;

    assert_int_equal(tcp_listen(&any, 0, &listener, &port), EP_OK);
    prepare_at(ranks, 2, port, PATIENT_MS);
    start(&ranks[1]);
    assert_int_equal(poll(&(struct pollfd){.fd = listener, .events = POLLIN}, 1, PATIENT_MS), 1);
    fd = tcp_accept(listener, &from);
    assert_true(fd >= 0);
    close(listener);
    start(&ranks[0]);
    join_well(ranks, 2);
    close(fd);
}

/* It answers each connection in another protocol, until the rank gives up. */
TEST(test_other_program_at_the_port_of_rank_0)
{
    struct tcp_address any = {.family = AF_INET, .bytes = {127, 0, 0, 1}}, from;
    static const char greeting[] = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    struct rank ranks[2];
    char text[EP_ERROR_TEXT_BYTES];
    uint16_t port;
    int listener, fds[10];

    assert_int_equal(tcp_listen(&any, 0, &listener, &port), EP_OK);
    prepare_at(ranks, 2, port, PATIENT_MS);
    rank_main(&ranks[0]);
    assert_int_equal(ranks[0].status, EP_E_STATE);
    assert_non_null(strstr(ranks[0].text, "Address already in use"));
    assert_int_equal(poll(&(struct pollfd){.fd = listener, .events = POLLIN}, 1, PATIENT_MS), 1);
    close(tcp_accept(listener, &from)); /* rank 0 reports itself to the listener */
    start(&ranks[1]);
    for (size_t i = 0; i < 10; i++) {
        assert_int_equal(poll(&(struct pollfd){.fd = listener, .events = POLLIN}, 1, PATIENT_MS), 1);
        fds[i] = tcp_accept(listener, &from);
        assert_true(fds[i] >= 0);
        assert_int_equal(send(fds[i], greeting, sizeof(greeting), MSG_NOSIGNAL), sizeof(greeting));
    }
    pthread_join(ranks[1].thread, NULL);
    print_message("    rank 0: %s\n    rank 1: %s\n", ranks[0].text, ranks[1].text);
    assert_int_equal(ranks[1].status, EP_E_MISMATCH);
    snprintf(text, sizeof(text), "rank 0 at 127.0.0.1:%u 10 times: what listens there does not speak epkit's protocol",
             port);
    assert_non_null(strstr(ranks[1].text, text));
    for (size_t i = 0; i < 10; i++)
        close(fds[i]);
    close(listener);
}

/* In a child, limits the descriptors to `room` more than are open. */
static void limit_descriptors(int room, bool hard)
{
    int next = dup(STDERR_FILENO);
    struct rlimit limit;

    close(next);
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        _exit(3);
    limit.rlim_cur = (rlim_t)(next + room);
    if (hard)
        limit.rlim_max = limit.rlim_cur;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        _exit(3);
}

static pid_t fork_rank_0(struct rank *rank, int room, bool hard)
{
    pid_t child;

    fflush(stdout);
    child = fork();
    assert_true(child >= 0);
    if (child)
        return child;
    limit_descriptors(room, hard);
    alarm(120);
    rank_main(rank);
    if (rank->status != EP_OK)
        print_message("    rank 0: %s: %s\n", ep_status_name(rank->status), rank->text);
    fflush(stdout);
    if (hard && !strstr(rank->text, "bootstrap tcp: rank 0 of 4 needs 5 open files"))
        _exit(1);
    _exit(rank->status == (hard ? EP_E_SYSTEM : EP_OK) ? 0 : 2);
}

/* Long before the deadline: rank 0 cannot accept all connections, and notifies the ranks that connect. */
TEST(test_rank_0_without_descriptors)
{
    struct rank ranks[4];
    pid_t child;
    int code;

    for (int room = 1; room <= 4; room++) { /* only the listener, ..., one too few */
        prepare_here(ranks, 4, room == 1 ? SHORT_MS : PATIENT_MS);
        child = fork_rank_0(&ranks[0], room, true);
        for (int i = 3; i > 0; i--) {
            rank_main(&ranks[i]);
            print_message("    rank %d: %s\n", i, ranks[i].text);
            /* Without a descriptor for accept(), only rank 0 can report it. */
            assert_int_equal(ranks[i].status, room == 1 ? EP_E_TIMEOUT : EP_E_SYSTEM);
            assert_true(room == 1 || strstr(ranks[i].text, "rank 0 of 4 needs 5 open files"));
        }
        assert_int_equal(waitpid(child, &code, 0), child);
        assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
    }
}

/* A soft limit is raised as far as needed. */
TEST(test_rank_0_raises_its_limit)
{
    struct rank ranks[4];
    pid_t child;
    int code;

    prepare_here(ranks, 4, PATIENT_MS);
    child = fork_rank_0(&ranks[0], 2, false);
    for (int i = 1; i < 4; i++)
        start(&ranks[i]);
    for (int i = 1; i < 4; i++) {
        pthread_join(ranks[i].thread, NULL);
        assert_int_equal(ranks[i].status, EP_OK);
    }
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
}

/* --- the environment --- */

struct setting {
    const char *name, *value;
};

static void set_environment(const struct setting *settings)
{
    static const char *const names[] = {"RANK",          "WORLD_SIZE",         "MASTER_ADDR",
                                        "MASTER_PORT",   "LOCAL_WORLD_SIZE",   "TORCHELASTIC_USE_AGENT_STORE",
                                        "EPKIT_ADDRESS", "EPKIT_SECRET",       "EPKIT_TIMEOUT_MS",
                                        "EPKIT_JOB_ID",  "TORCHELASTIC_RUN_ID"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        unsetenv(names[i]);
    for (; settings->name; settings++)
        setenv(settings->name, settings->value, 1);
}

TEST(test_bad_environment)
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
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "65536"}},
         "MASTER_PORT is \"65536\", not a number in 1..65535"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", " 1"}}, "MASTER_PORT is \" 1\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", ""}}, "MASTER_PORT is empty"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", ""}, {"MASTER_PORT", "1"}}, "MASTER_ADDR is empty"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "[::1"}}, "EPKIT_ADDRESS: address \"[::1\": "},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "h"}}, "names no port"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", ":::::"}}, "not an IPv6 address"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h:1:2"}, {"MASTER_PORT", "1"}}, "not an IPv6 address"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "h:1"}, {"EPKIT_TIMEOUT_MS", "x"}},
         "EPKIT_TIMEOUT_MS is \"x\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h "}, {"MASTER_PORT", "1"}}, "must not contain blanks"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "[::1"}, {"MASTER_PORT", "1"}}, "ends with \"]\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", "h:2"}, {"MASTER_PORT", "1"}}, "different ports"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "h:1"}, {"LOCAL_WORLD_SIZE", "x"}},
         "LOCAL_WORLD_SIZE is \"x\""},
        {{{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"EPKIT_ADDRESS", "h:1"}, {"LOCAL_WORLD_SIZE", "3"}},
         "LOCAL_WORLD_SIZE is \"3\", not a number in 1..2"},
        {{{"WORLD_SIZE", "2"},
          {"RANK", "0"},
          {"MASTER_ADDR", "h"},
          {"MASTER_PORT", "65535"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}},
         "MASTER_PORT is \"65535\""},
    };
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    ep_boot_tcp *boot = NULL;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        set_environment(rows[i].settings);
        assert_fails(ep_boot_tcp_new(&args, &boot), EP_E_ARG, rows[i].text);
    }
    /* The last port, and an address in brackets. */
    set_environment((const struct setting[]){
        {"WORLD_SIZE", "1"}, {"RANK", "0"}, {"MASTER_ADDR", "[::1]"}, {"MASTER_PORT", "65535"}, {0}});
    assert_int_equal(ep_boot_tcp_new(&args, &boot), EP_OK);
    ep_boot_tcp_free(boot);
    set_environment((const struct setting[]){{0}});
}

/* A rank of an earlier job, with its secret and another number of ranks, is rejected. */
TEST(test_rank_of_another_job)
{
    struct rank ranks[2];
    ep_boot_tcp *boot;
    pid_t child;
    int code;

    prepare_here(ranks, 2, PATIENT_MS);
    set_environment((const struct setting[]){{"EPKIT_JOB_ID", "new"}, {0}});
    start(&ranks[0]);
    fflush(stdout);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setenv("EPKIT_JOB_ID", "old", 1);
        ranks[1].args.nranks = 3;
        ranks[1].args.timeout_ms = SHORT_MS;
        _exit(ep_boot_tcp_new(&ranks[1].args, &boot) == EP_E_TIMEOUT ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
    start(&ranks[1]);
    join_well(ranks, 2);
    set_environment((const struct setting[]){{0}});
}

TEST(test_port_in_master_addr)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    struct setting settings[] = {{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_ADDR", NULL}, {0}};
    char address[64];
    ep_boot_tcp *boot;

    snprintf(address, sizeof(address), "127.0.0.1:%u", free_port());
    settings[2].value = address;
    set_environment(settings);
    args.timeout_ms = 200;
    assert_fails(ep_boot_tcp_new(&args, &boot), EP_E_TIMEOUT, address);
    assert_non_null(strstr(ep_last_error(), "was started as a job of one rank (WORLD_SIZE)"));
    set_environment((const struct setting[]){{0}});
}

/* Rank 0 waits on a host that the others do not try to reach. */
TEST(test_rank_0_on_another_host)
{
    static const char *const hosts[] = {"203.0.113.77", "127.0.0.1"};
    ep_boot_tcp_args args = {.size = sizeof(args), .timeout_ms = 200};
    struct setting settings[] = {{"WORLD_SIZE", "2"}, {"RANK", "0"}, {"MASTER_ADDR", NULL}, {"MASTER_PORT", NULL}, {0}};
    char port[16];
    ep_boot_tcp *boot;

    for (int i = 0; i < 2; i++) {
        snprintf(port, sizeof(port), "%u", free_port());
        settings[2].value = hosts[i];
        settings[3].value = port;
        set_environment(settings);
        assert_int_equal(ep_boot_tcp_new(&args, &boot), EP_E_TIMEOUT);
        assert_int_equal(strstr(ep_last_error(), "is not an address of this host: check MASTER_ADDR") == NULL, i);
    }
    set_environment((const struct setting[]){{0}});
}

/* A name with an empty label is never sent to a name server. */
static enum answer resolve_bad_name(int timeout_ms)
{
    static const struct {
        struct setting settings[5];
        const char *hint;
    } rows[] = {
        {{{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_ADDR", "no..host"}, {"MASTER_PORT", "29500"}},
         "; MASTER_ADDR must be a name of the host of rank 0"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"EPKIT_ADDRESS", "no..host:29500"}},
         "; EPKIT_ADDRESS must be a name of the host of rank 0"},
    };
    ep_boot_tcp_args args = {.size = sizeof(args), .timeout_ms = timeout_ms};
    ep_boot_tcp *boot = NULL;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        set_environment(rows[i].settings);
        assert_int_equal(ep_boot_tcp_new(&args, &boot), EP_E_TIMEOUT);
        if (strstr(ep_last_error(), "no answer from the name server in time"))
            return LATE;
        print_message("%s\n", ep_last_error());
        if (!strstr(ep_last_error(), "host name \"no..host\" cannot be resolved: ") ||
            !strstr(ep_last_error(), rows[i].hint))
            return WRONG;
    }
    return FITS;
}

/* The reason is that of the resolver, and the text names the variable to change. */
TEST(test_unknown_host_name)
{
    with_deadline(resolve_bad_name);
    set_environment((const struct setting[]){{0}});
}

/* Ranks as processes, as torchrun starts them; torchrun itself listens on MASTER_PORT. */
/* A listener, as torchrun's store, with a free port after its own: a connection may use that one, also in TIME_WAIT. */
static int listen_before_free_port(uint16_t *ret_port)
{
    struct tcp_address loopback = {.family = AF_INET, .bytes = {127, 0, 0, 1}}, any = {.family = AF_INET};

    for (;;) {
        uint16_t next;
        int fd, probe;

        assert_int_equal(tcp_listen(&loopback, 0, &fd, ret_port), EP_OK);
        if (*ret_port < UINT16_MAX && tcp_listen(&any, (uint16_t)(*ret_port + 1), &probe, &next) == EP_OK) {
            close(probe);
            return fd;
        }
        close(fd);
    }
}

/* The variable `name` holds the host of rank 0. */
static void run_under_torchrun(const char *name)
{
    pid_t children[4];
    uint16_t store;
    char text[16], number[16];
    int code, fd = listen_before_free_port(&store);

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
                                                     {name, "127.0.0.1"},
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

TEST(test_environment_of_torchrun)
{
    run_under_torchrun("MASTER_ADDR");
    run_under_torchrun("EPKIT_ADDRESS");
}

/* All interfaces but some: as without a choice, loopback is not first. */
TEST(test_all_but_some_interfaces)
{
    struct tcp_address plain[TCP_ADDRESSES], all_but[TCP_ADDRESSES];
    int n_plain, n_all_but;

    if (tcp_find_interfaces(NULL, NULL, plain, &n_plain) != EP_OK)
        skip();
    assert_int_equal(tcp_find_interfaces("^no-such-interface", NULL, all_but, &n_all_but), EP_OK);
    assert_int_equal(n_all_but, n_plain);
    for (int i = 0; i < n_plain; i++)
        assert_memory_equal(&all_but[i], &plain[i], sizeof(plain[i]));
}

/* The text says where the name is from, and which names there are. */
TEST(test_interface_that_is_not_there)
{
    struct tcp_address found[TCP_ADDRESSES];
    int n;

    if (tcp_find_interfaces(NULL, NULL, found, &n) != EP_OK)
        skip();
    assert_fails(tcp_find_interfaces("no-such-interface", NULL, found, &n), EP_E_ARG, "named by \"no-such-interface\"");
    assert_non_null(strstr(ep_last_error(), "EPKIT_TCP_INTERFACE): this host has "));
    assert_null(strstr(ep_last_error(), "has none"));
}

/* Those of a machine whose first name is part of another one, each once although it has several addresses. */
TEST(test_names_of_interfaces)
{
    static struct sockaddr_in four = {.sin_family = AF_INET};
    static struct sockaddr packet = {.sa_family = AF_PACKET};
    static char names[][8] = {"eth10", "eth1", "eth2", "eth3"};
    struct ifaddrs list[] = {
        {.ifa_name = names[0], .ifa_flags = IFF_UP, .ifa_addr = &packet},
        {.ifa_name = names[1], .ifa_flags = IFF_UP, .ifa_addr = &packet},
        {.ifa_name = names[2], .ifa_flags = IFF_UP, .ifa_addr = &packet}, /* has no address */
        {.ifa_name = names[3], .ifa_addr = (struct sockaddr *)&four},     /* is down */
        {.ifa_name = names[0], .ifa_flags = IFF_UP, .ifa_addr = (struct sockaddr *)&four},
        {.ifa_name = names[1], .ifa_flags = IFF_UP, .ifa_addr = (struct sockaddr *)&four},
        {.ifa_name = names[0], .ifa_flags = IFF_UP, .ifa_addr = (struct sockaddr *)&four},
        {.ifa_name = names[1], .ifa_flags = IFF_UP, .ifa_addr = (struct sockaddr *)&four},
    };
    struct tcp_address found[TCP_ADDRESSES];
    const char *have;
    int n;

    for (size_t i = 0; i + 1 < sizeof(list) / sizeof(list[0]); i++)
        list[i].ifa_next = &list[i + 1];
    fake_interfaces = list;
    assert_int_equal(tcp_find_interfaces("ib0", NULL, found, &n), EP_E_ARG);
    fake_interfaces = NULL;
    have = strstr(ep_last_error(), "this host has ");
    assert_non_null(have);
    assert_string_equal(have, "this host has eth10, eth1");
}

/* Rejected by the rank itself, before it contacts another one. 203.0.113.0/24 is reserved for documentation (RFC 5737).
 */
TEST(test_address_of_another_host)
{
    static const char *const addresses[] = {"203.0.113.77", "0.0.0.0",         "::",     "224.0.0.1",
                                            "ff02::1",      "255.255.255.255", "fe80::1"};
    struct rank rank;

    for (size_t i = 0; i < sizeof(addresses) / sizeof(addresses[0]); i++) {
        prepare(&rank, 1, "127.0.0.1:1", PATIENT_MS);
        rank.args.interface = addresses[i];
        run_all(&rank, 1);
        if (rank.status != EP_E_ARG)
            print_error("%s: %s\n", addresses[i], rank.text);
        assert_int_equal(rank.status, EP_E_ARG);
        assert_non_null(strstr(rank.text, addresses[i]));
        assert_non_null(strstr(rank.text, "is not one of this host"));
    }
}

/* What is left after an ep_boot_tcp_new() that has failed. */
TEST(test_no_bootstrap)
{
    ep_comm *comm = NULL;

    assert_null(ep_boot_tcp_get(NULL));
    assert_int_equal(ep_boot_tcp_get_dropped(NULL), 0);
    ep_boot_tcp_free(NULL);
    assert_fails(ep_comm_new(ep_boot_tcp_get(NULL), NULL, &comm), EP_E_ARG, "boot is NULL");
}
