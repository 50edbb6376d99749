/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process without the secret connects to the listener of rank 0 as often as it can, and sends nothing, a part of a
 * handshake, or rubbish. The ranks still connect, and what it leaves open is little. They are processes.
 */
#include "tcp/acceptor.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "free_port.h"
#include "ranks.h"

enum {
    NRANKS = 3,
    PATIENT_MS = 60000,
    EARLY_MS = 3000,      /* less than a listener gives to a stranger */
    SILENT = 1000,        /* connections that the stranger leaves open, */
    ROLLING = 64,         /* and those that it replaces all the time */
    SENT = 65536,         /* bytes that it sends over each */
    FEW_DESCRIPTORS = 48, /* of rank 0 */
};

/* Shared by the ranks and the stranger. */
struct scenario {
    _Atomic int port;            /* 0: not known yet */
    _Atomic int most_open;       /* of its silent connections, after that */
    _Atomic bool flooded, stops; /* the stranger has made its connections; it is to end */
    _Atomic bool was_late;
    int open_then; /* of the silent connections, when the late rank went on */
};

/* --- the stranger --- */

static int connect_to(int port)
{
    const struct tcp_address to = {.family = AF_INET, .port = (uint16_t)port, .bytes = {127, 0, 0, 1}};
    int fd;

    return tcp_connect(&to, NULL, &fd) == EP_OK ? fd : -1;
}

/* Waits until the connection is in the queue of the kernel, or for 100 ms if that is full. -1: nothing listens. */
static int connect_and_wait(int port)
{
    int fd = connect_to(port);
    struct pollfd ready = {.fd = fd, .events = POLLOUT};

    if (fd < 0 || poll(&ready, 1, 100) <= 0 || tcp_connect_error(fd) == 0)
        return fd;
    close(fd);
    return -1;
}

/* Kind 0 is silent, 1 sends half of a HELLO, 2 one without a valid proof, 3 as much rubbish as the kernel takes. */
static void send_kind(int fd, int kind)
{
    static const unsigned char rubbish[SENT];
    struct tcp_hello hello = {.magic = 0x31545045u, .version = 2, .kind = TCP_LINK};
    size_t bytes[] = {0, sizeof(hello) / 2, sizeof(hello)};

    if (kind == 3)
        (void)!send(fd, rubbish, sizeof(rubbish), MSG_NOSIGNAL | MSG_DONTWAIT);
    else if (kind)
        (void)!send(fd, &hello, bytes[kind], MSG_NOSIGNAL | MSG_DONTWAIT);
}

static int count_open(const int *fds, int n)
{
    int open = 0;

    for (int i = 0; i < n; i++) {
        struct pollfd end = {.fd = fds[i], .events = POLLRDHUP};

        open += fds[i] >= 0 && poll(&end, 1, 0) == 0;
    }
    return open;
}

static void flood(struct scenario *scenario, const int *silent)
{
    int rolling[ROLLING];

    memset(rolling, -1, sizeof(rolling));
    for (unsigned i = 0; !atomic_load(&scenario->stops); i++) {
        int *fd = &rolling[i % ROLLING];

        if (*fd >= 0)
            close(*fd);
        *fd = connect_to(atomic_load(&scenario->port));
        if (*fd >= 0)
            send_kind(*fd, (int)(i % 4));
        if (i % 64 == 0)
            atomic_store(&scenario->most_open, count_open(silent, SILENT));
        atomic_store(&scenario->flooded, true);
    }
}

/* Ends by _exit(). */
static void be_a_stranger(struct scenario *scenario)
{
    static int silent[SILENT];
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    while (!atomic_load(&scenario->port) && !atomic_load(&scenario->stops))
        unit_sleep_ms(1);
    for (int i = 0; i < SILENT; i++)
        while ((silent[i] = connect_and_wait(atomic_load(&scenario->port))) < 0 && !atomic_load(&scenario->stops))
            unit_sleep_ms(1);
    flood(scenario, silent);
    _exit(0);
}

/* Runs the ranks while the stranger connects. */
static void run_among_strangers(struct scenario *scenario, ep_rank_fn live)
{
    const rlim_t need = SILENT + ROLLING + 64;
    ep_rank_exit exits[NRANKS];
    struct rlimit files;
    pid_t stranger;
    int status;

    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_max < need) {
        print_message("SKIP: the stranger needs %llu descriptors, RLIMIT_NOFILE is %llu\n", (unsigned long long)need,
                      (unsigned long long)files.rlim_max);
        skip();
    }
    stranger = fork();
    assert_true(stranger >= 0);
    if (stranger == 0)
        be_a_stranger(scenario);
    (void)unit_fork_ranks(NRANKS, live, scenario, RANKS_PATIENT_MS, exits);
    atomic_store(&scenario->stops, true);
    assert_int_equal(waitpid(stranger, &status, 0), stranger);
    for (int rank = 0; rank < NRANKS; rank++)
        assert_int_equal(exits[rank].code, 0);
}

/* --- the bootstrap --- */

static int connect_among_strangers(const ep_boot *boot, void *argument)
{
    static const struct rlimit few = {FEW_DESCRIPTORS, FEW_DESCRIPTORS};
    struct scenario *scenario = argument;
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    ep_boot_tcp *tcp = NULL;
    ep_comm *comm = NULL;
    char address[32];

    snprintf(address, sizeof(address), "127.0.0.1:%d", atomic_load(&scenario->port));
    args.rank = boot->rank;
    args.nranks = boot->nranks;
    args.address = address;
    args.secret = "a secret of this test";
    args.timeout_ms = PATIENT_MS;
    if (boot->rank == 0)
        SURE(setrlimit(RLIMIT_NOFILE, &few) == 0);
    while (boot->rank && !atomic_load(&scenario->flooded)) /* so that the queue of rank 0 is full of strangers */
        unit_sleep_ms(1);
    SURE(ep_boot_tcp_new(&args, &tcp) == EP_OK);
    SURE(unit_comm_new(ep_boot_tcp_get(tcp), "tcp", 1, PATIENT_MS, &comm) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    ep_boot_tcp_free(tcp);
    return 0;
}

TEST(ranks_connect_among_strangers_to_a_rank_0_with_few_descriptors)
{
    struct scenario *scenario = unit_share(&(struct scenario){.port = find_port()}, sizeof(*scenario));

    run_among_strangers(scenario, connect_among_strangers);
    munmap(scenario, sizeof(*scenario));
}

/* --- a network --- */

/* The bootstrap of a rank of which the last one is late: it has the addresses, and connects to no rank yet. */
struct late {
    const ep_boot *boot;
    struct scenario *scenario;
};

/* The port of this process's listener, 0: none. */
static int own_listener(void)
{
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_storage at = {.ss_family = AF_UNSPEC};
        socklen_t bytes = sizeof(at), int_bytes = sizeof(int);
        int listens = 0;

        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &int_bytes) == 0 && listens &&
            getsockname(fd, (struct sockaddr *)&at, &bytes) == 0 &&
            (at.ss_family == AF_INET || at.ss_family == AF_INET6))
            return ntohs(at.ss_family == AF_INET ? ((struct sockaddr_in *)(void *)&at)->sin_port
                                                 : ((struct sockaddr_in6 *)(void *)&at)->sin6_port);
    }
    return 0;
}

static ep_status gather_late(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    const struct late *late = context;
    struct scenario *scenario = late->scenario;

    if (late->boot->rank == 0 && !atomic_load(&scenario->port))
        atomic_store(&scenario->port, own_listener());
    EP_TRY(late->boot->allgather(late->boot->context, mine, bytes, timeout_ms, ret_all));
    if (late->boot->rank != NRANKS - 1 || !atomic_load(&scenario->port) || atomic_exchange(&scenario->was_late, true))
        return EP_OK;
    /* Rank 0 waits for this rank, and drops strangers before they are late. */
    for (int ms = 0; ms < PATIENT_MS / 4 && !atomic_load(&scenario->flooded); ms++)
        unit_sleep_ms(1);
    for (int ms = 0; ms < EARLY_MS && atomic_load(&scenario->most_open) > 2 * TCP_ACCEPTOR_STRANGERS; ms++)
        unit_sleep_ms(1);
    scenario->open_then = atomic_load(&scenario->flooded) ? atomic_load(&scenario->most_open) : SILENT;
    return EP_OK;
}

static int make_network_among_strangers(const ep_boot *boot, void *argument)
{
    struct late late = {boot, argument};
    ep_boot mine = *boot;
    ep_comm *comm = NULL;

    mine.allgather = gather_late;
    mine.context = &late;
    SURE(unit_comm_new(&mine, "tcp", 1, PATIENT_MS, &comm) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

TEST(ranks_make_a_network_among_strangers_while_one_is_late)
{
    struct scenario *scenario = unit_share(&(struct scenario){.port = 0}, sizeof(*scenario));

    run_among_strangers(scenario, make_network_among_strangers);
    assert_true(scenario->was_late);
    assert_in_range(scenario->open_then, 0, 2 * TCP_ACCEPTOR_STRANGERS);
    munmap(scenario, sizeof(*scenario));
}
