/* SPDX-License-Identifier: Apache-2.0 */
/* The star of connections, frame by frame: failures that a rank sends before it closes, in all states of the other
 * side.
 */
#include "unit.h"

#include "base/clock.h"
#include "tcp/star_internal.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <unistd.h>

#define MOST_RANKS 8
#define PATIENT_MS 60000 /* where all ranks arrive */
#define SHORT_MS 250     /* where a rank is missing; an attempt that was too slow gets twice the time */

static struct tcp_star *adopt(int rank, int nranks, int *ret_far)
{
    struct tcp_star *star;
    int pair[2];

    assert_int_equal(tcp_star_new("star", rank, nranks, &star), EP_OK);
    for (int i = rank == 0 ? 1 : 0; i < (rank == 0 ? nranks : 1); i++) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        star->conns[i].fd = pair[0];
        ret_far[i] = pair[1];
    }
    return star;
}

/* Rank 0 reports once that rank 2 is missing, and then stops: the failed rank is rank 0. */
static void name_rank_0(int timeout_ms)
{
    struct {
        struct frame frame;
        struct {
            int32_t n, first;
            char list[160];
        } missing;
    } word = {{STAR_MAGIC, 4, 1, sizeof(word.missing)}, {1, 2, "2 (192.0.2.9:77)"}};
    int far, mine = 1, all[3];
    struct tcp_star *star = adopt(1, 3, &far);

    assert_int_equal(send(far, &word, sizeof(word), 0), sizeof(word));
    assert_int_equal(tcp_star_allgather(star, &mine, sizeof(mine), timeout_ms, all), EP_E_TIMEOUT);
    print_message("    %s\n", ep_last_error());
    assert_int_equal(star->failure.rank, 0);
    assert_non_null(strstr(ep_last_error(), "rank 0 (an unknown address) has sent nothing"));
    assert_non_null(strstr(ep_last_error(), "waited for rank 2 (192.0.2.9:77)"));
    tcp_star_free(star);
    close(far);
}

TEST(test_rank_0_that_stops_is_named)
{
    /* Longer than the silence that is reported, which begins when this rank reads the data from rank 0. */
    name_rank_0(4000);
    name_rank_0(1500);
}

/* A rank that receives nothing from a running rank 0 is named itself: packets pass in one direction only. */
TEST(test_rank_that_receives_nothing_is_named)
{
    struct {
        struct frame frame;
        struct {
            int32_t status, rank;
            char text[256];
        } failure;
    } word = {{STAR_MAGIC, 3, 1, sizeof(word.failure)}, {EP_E_TIMEOUT, 0, "star: rank 0 is silent"}};
    int far[MOST_RANKS], mine = 0, all[3];
    struct tcp_star *star = adopt(0, 3, far);

    assert_int_equal(send(far[2], &word, sizeof(word), 0), sizeof(word));
    assert_int_equal(tcp_star_allgather(star, &mine, sizeof(mine), PATIENT_MS, all), EP_E_TIMEOUT);
    print_message("    %s\n", ep_last_error());
    assert_int_equal(star->failure.rank, 2);
    assert_non_null(strstr(ep_last_error(), "rank 2 (an unknown address) receives nothing from rank 0"));
    tcp_star_free(star);
    close(far[1]);
    close(far[2]);
}

struct leaves {
    int far[MOST_RANKS];
    size_t bytes;
    bool ok;
};

static bool read_result(int fd, size_t bytes)
{
    unsigned char buffer[65536];
    size_t left = sizeof(struct frame) + bytes;

    while (left) {
        ssize_t n = recv(fd, buffer, left < sizeof(buffer) ? left : sizeof(buffer), 0);

        if (n <= 0)
            return false;
        left -= (size_t)n;
    }
    return true;
}

/* Rank 1 receives its result and sends BYE; rank 2 begins to read its own result after that. */
static void *run_leaves(void *context)
{
    struct leaves *leaves = context;
    struct frame bye = {STAR_MAGIC, 5, 1, 0}, block = {STAR_MAGIC, 1, 1, leaves->bytes};
    unsigned char *mine = calloc(1, leaves->bytes);

    for (int rank = 1; mine && rank < 3; rank++) {
        leaves->ok = send(leaves->far[rank], &block, sizeof(block), MSG_NOSIGNAL) == sizeof(block) &&
                     send(leaves->far[rank], mine, leaves->bytes, MSG_NOSIGNAL) == (ssize_t)leaves->bytes;
        if (!leaves->ok)
            break;
    }
    free(mine);
    if (leaves->ok)
        leaves->ok = read_result(leaves->far[1], 3 * leaves->bytes) &&
                     send(leaves->far[1], &bye, sizeof(bye), MSG_NOSIGNAL) == sizeof(bye);
    close(leaves->far[1]);
    unit_sleep_ms(100); /* time for a poll of rank 0 */
    leaves->ok = leaves->ok && read_result(leaves->far[2], 3 * leaves->bytes);
    close(leaves->far[2]);
    return NULL;
}

TEST(test_bye_before_others_have_the_result)
{
    struct leaves leaves = {.bytes = 1u << 20};
    unsigned char *mine = calloc(1, leaves.bytes), *all = calloc(3, leaves.bytes);
    struct tcp_star *star = adopt(0, 3, leaves.far);
    pthread_t thread;

    assert_non_null(mine);
    assert_non_null(all);
    assert_int_equal(pthread_create(&thread, NULL, run_leaves, &leaves), 0);
    if (tcp_star_allgather(star, mine, leaves.bytes, PATIENT_MS, all) != EP_OK)
        fail_msg("%s", ep_last_error());
    pthread_join(thread, NULL);
    assert_true(leaves.ok);
    tcp_star_free(star);
    free(mine);
    free(all);
}

/* --- a rank that gives up sends the reason --- */

/* Reads frames until the connection ends. The number of the last kind of frame, 0: none, -1: it ended within one. */
static int read_to_end(int fd, struct failure *ret_failure)
{
    int kind = 0;

    assert_int_equal(fcntl(fd, F_SETFL, 0), 0); /* waits */
    for (;;) {
        struct frame frame;
        ssize_t n = recv(fd, &frame, sizeof(frame), MSG_WAITALL);

        if (n <= 0)
            return kind;
        if (n != sizeof(frame) || frame.magic != STAR_MAGIC)
            return -1;
        kind = (int)frame.kind;
        if (kind == FRAME_FAILURE) {
            if (recv(fd, ret_failure, sizeof(*ret_failure), MSG_WAITALL) != sizeof(*ret_failure))
                return -1;
            continue;
        }
        for (uint64_t left = frame.bytes; left; left -= (uint64_t)n) {
            unsigned char bytes[4096];

            n = recv(fd, bytes, left < sizeof(bytes) ? left : sizeof(bytes), 0);
            if (n <= 0)
                return -1;
        }
    }
}

/* After the list of missing ranks is due. */
static void *send_noise_late(void *context)
{
    static const char noise[sizeof(struct frame)];

    unit_sleep_ms(300);
    assert_int_equal(send(*(int *)context, noise, sizeof(noise), MSG_NOSIGNAL), sizeof(noise));
    return NULL;
}

TEST(test_reason_after_a_list_of_missing_ranks)
{
    int far[MOST_RANKS], mine = 0, all[3];
    struct tcp_star *star = adopt(0, 3, far);
    struct {
        struct frame frame;
        int block;
    } message = {{STAR_MAGIC, FRAME_BLOCK, 1, sizeof(int)}, 1};
    struct failure failure;
    pthread_t thread;

    /* Rank 1 has arrived and waits: it gets the list of missing ranks. */
    assert_int_equal(send(far[1], &message, sizeof(message.frame) + sizeof(message.block), 0),
                     sizeof(message.frame) + sizeof(message.block));
    assert_int_equal(pthread_create(&thread, NULL, send_noise_late, &far[2]), 0);
    assert_int_equal(tcp_star_allgather(star, &mine, sizeof(mine), PATIENT_MS, all), EP_E_MISMATCH);
    pthread_join(thread, NULL);
    for (int rank = 1; rank < 3; rank++) {
        assert_int_equal(read_to_end(far[rank], &failure), FRAME_FAILURE);
        assert_int_equal(failure.status, EP_E_MISMATCH);
        assert_int_equal(failure.rank, 2);
        assert_non_null(strstr(failure.text, "is damaged: a frame with a wrong magic number"));
        close(far[rank]);
    }
    tcp_star_free(star);
}

struct reader {
    int fd, last;
    struct failure failure;
};

static void *run_reader(void *context)
{
    struct reader *reader = context;

    reader->last = read_to_end(reader->fd, &reader->failure);
    return NULL;
}

/* It fails when a part of the block was sent. The other side needs some time for the rest; how much depends on the
 * machine, so there are many attempts. */
TEST(test_reason_after_a_block)
{
    enum { BYTES = 2 << 20, ATTEMPTS = 50 };
    unsigned char *mine = calloc(1, BYTES), *all = calloc(2, BYTES);
    bool notified = false;

    assert_non_null(mine);
    assert_non_null(all);
    for (int i = 0; i < ATTEMPTS && !notified; i++) {
        struct reader reader = {0};
        struct tcp_star *star = adopt(1, 2, &reader.fd);
        pthread_t thread;

        assert_int_equal(send(reader.fd, mine, sizeof(struct frame), 0), sizeof(struct frame)); /* no frame */
        assert_int_equal(pthread_create(&thread, NULL, run_reader, &reader), 0);
        assert_int_equal(tcp_star_allgather(star, mine, BYTES, PATIENT_MS, all), EP_E_MISMATCH);
        pthread_join(thread, NULL);
        notified = reader.last == FRAME_FAILURE;
        if (notified)
            assert_non_null(strstr(reader.failure.text, "is damaged: a frame with a wrong magic number"));
        close(reader.fd);
        tcp_star_free(star);
    }
    assert_true(notified);
    free(mine);
    free(all);
}

/* --- rank 0 gives up while ranks connect --- */

struct root {
    struct tcp_star_args args;
    ep_status status;
    char text[EP_ERROR_TEXT_BYTES];
    pthread_t thread;
};

static void *run_root(void *context)
{
    struct root *root = context;
    struct tcp_star *star = NULL;

    root->status = tcp_star_open(&root->args, &star);
    snprintf(root->text, sizeof(root->text), "%s", ep_last_error());
    tcp_star_free(star);
    return NULL;
}

static void start_root(struct root *root, int timeout_ms)
{
    uint16_t port;
    int fd;

    assert_int_equal(tcp_listen(NULL, 0, &fd, &port), EP_OK);
    close(fd);
    *root = (struct root){.args = {.name = "star", .nranks = 4, .port = port, .timeout_ms = timeout_ms}};
    tcp_key_make("a secret of this test", "bootstrap", NULL, 0, &root->args.key);
    assert_int_equal(pthread_create(&root->thread, NULL, run_root, root), 0);
}

/* Connects as `rank` to the listener, and sends nothing yet. false: nothing listens any more. */
static bool connect_to_root(const struct root *root, int rank, struct tcp_handshake *ret_hs)
{
    const struct tcp_address to = {.family = AF_INET, .port = root->args.port, .bytes = {127, 0, 0, 1}};
    const struct tcp_hello hello = {.kind = TCP_BOOTSTRAP, .rank = rank, .detail = (uint32_t)root->args.nranks};
    uint64_t deadline_ns = ep_deadline_ns(root->args.timeout_ms);

    while (ep_now_ns() < deadline_ns) {
        struct pollfd look = {.events = POLLOUT};

        assert_int_equal(tcp_connect(&to, NULL, &look.fd), EP_OK);
        if (poll(&look, 1, 1000) == 1 && tcp_connect_error(look.fd) == 0) {
            tcp_handshake_connect(ret_hs, look.fd, &root->args.key, &hello, &to, ep_deadline_ns(PATIENT_MS));
            return true;
        }
        close(look.fd);
        unit_sleep_ms(1);
    }
    return false;
}

static enum tcp_handshake_result authenticate(struct tcp_handshake *hs)
{
    enum tcp_handshake_result result = TCP_HANDSHAKE_PENDING;

    while (result == TCP_HANDSHAKE_PENDING) {
        (void)poll(&(struct pollfd){.fd = hs->fd, .events = tcp_handshake_events(hs)}, 1, 20);
        result = tcp_handshake_step(hs);
    }
    return result;
}

/*
 * Rank 1 has connected, rank 2 is in its handshake when rank 0 gives up, rank 3 is missing: ranks 1 and 2 get the
 * reason. true: this process was in time.
 */
static bool connect_while_rank_0_gives_up(int timeout_ms)
{
    struct tcp_handshake first = {.fd = -1}, late = {.fd = -1};
    struct failure failure = {0};
    struct root root;
    bool notified = false;

    start_root(&root, timeout_ms);
    if (connect_to_root(&root, 1, &first) && authenticate(&first) == TCP_HANDSHAKE_DONE &&
        connect_to_root(&root, 2, &late)) {
        assert_int_equal(read_to_end(first.fd, &failure), FRAME_FAILURE); /* after any other frames in flight */
        assert_int_equal(failure.status, EP_E_TIMEOUT);
        assert_int_equal(failure.rank, 2);
        assert_non_null(strstr(failure.text, "did not arrive within"));
        assert_int_not_equal(authenticate(&late), TCP_HANDSHAKE_DONE);
        notified = late.refused;
        if (notified) {
            assert_int_equal(late.status, EP_E_TIMEOUT);
            assert_non_null(strstr(late.why, "did not arrive within"));
        }
        close(first.fd);
    } else if (first.fd >= 0) {
        close(first.fd);
    }
    tcp_handshake_drop(&late);
    pthread_join(root.thread, NULL);
    assert_int_equal(root.status, EP_E_TIMEOUT);
    return notified;
}

/* Rank 1 connects, gives up for its own reason and closes: rank 0 names the reason. */
static bool give_up_before_rank_0(int timeout_ms)
{
    struct {
        struct frame block_frame;
        int64_t block;
        struct frame frame;
        struct failure failure;
    } message = {{STAR_MAGIC, FRAME_BLOCK, 1, sizeof(int64_t)},
                 1,
                 {STAR_MAGIC, FRAME_FAILURE, 1, sizeof(struct failure)},
                 {EP_E_TIMEOUT, 3, "a reason of its\x1bown"}};
    struct tcp_handshake hs = {.fd = -1};
    struct root root;
    bool came;

    start_root(&root, timeout_ms);
    came = connect_to_root(&root, 1, &hs) && authenticate(&hs) == TCP_HANDSHAKE_DONE &&
           send(hs.fd, &message, sizeof(message), MSG_NOSIGNAL) == sizeof(message);
    if (hs.fd >= 0)
        close(hs.fd);
    pthread_join(root.thread, NULL);
    assert_int_equal(root.status, EP_E_TIMEOUT);
    print_message("    %s\n", root.text);
    return came && strstr(root.text, ") gave up: a reason of its?own");
}

static void read_until_notified(bool (*attempt)(int timeout_ms))
{
    for (int timeout_ms = SHORT_MS; !attempt(timeout_ms); timeout_ms *= 2)
        assert_true(timeout_ms <= PATIENT_MS);
}

TEST_CALL(test_rank_0_gives_up_while_ranks_connect, read_until_notified(connect_while_rank_0_gives_up))
TEST_CALL(test_rank_that_gave_up_before_rank_0, read_until_notified(give_up_before_rank_0))

/* Connections that are opened together do not send their probes together, and each sends several before it is ended.
 */
TEST(test_probes_of_connections_are_spread)
{
    enum { CONNECTIONS = 256, IDLE = 64, INTERVAL = 16 };
    int seen[IDLE][INTERVAL] = {{0}}, most = 0;

    for (int i = 0; i < CONNECTIONS; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), idle_s = 0, interval_s = 0, probes = 0;
        socklen_t bytes = sizeof(int);

        assert_true(fd >= 0);
        tcp_set_options(fd, 1000);
        assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, &bytes), 0);
        assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, &bytes), 0);
        assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, &bytes), 0);
        close(fd);
        assert_in_range(idle_s, 1, IDLE - 1);
        assert_in_range(interval_s, 1, INTERVAL - 1);
        assert_in_range(probes, 4, 10);
        assert_in_range(idle_s + interval_s * probes, 20, 60);
        seen[idle_s][interval_s]++;
        most = seen[idle_s][interval_s] > most ? seen[idle_s][interval_s] : most;
    }
    /* 8 of each pair if they were spread perfectly. */
    assert_in_range(most, 1, CONNECTIONS / 4);
}
