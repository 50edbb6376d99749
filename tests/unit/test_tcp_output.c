/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the network tcp writes to a socket: random puts and signals over a connection that accepts little at a time. The
 * decoder of the receiver reads it, record by record: every signal comes after the puts that were called before it, and
 * contiguous puts are one record.
 */
/* A copy of its own, for its functions. */
#include "unit.h"

#include "net/tcp.c"

#include <sys/socket.h>

enum { REGION = 1 << 16, SIGNALS = 7, CALLS = 2000, SEEDS = 40, LARGEST = 3000 };

struct call {
    bool is_signal;
    uint64_t target, amount;
};

struct fixture {
    struct tcp_net t;
    struct tcp_conn conn;
    int reader;
    unsigned char source[LARGEST * 8], sent[REGION], region[REGION];
    uint64_t signals[SIGNALS];
    struct call calls[CALLS];
    int n_calls;
    /* of the reader: */
    unsigned char stream[1 << 22];
    size_t n_stream, at;
    int put_records, signal_records;
    uint32_t number;
};

static uint64_t draw(uint64_t *random, uint64_t below)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (*random >> 33) % below;
}

static void open_pair(struct fixture *f, bool batch)
{
    int fds[2], bytes = 4096;

    memset(f, 0, sizeof(*f));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    assert_int_equal(setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)), 0);
    f->t.net = (struct ep_net){.ops = &ep_net_tcp_ops, .nnodes = 2, .channels = 1, .batch_signals = batch};
    f->t.conns = &f->conn;
    f->t.n = 1;
    f->conn.fd = fds[0];
    f->conn.writable = true;
    f->reader = fds[1];
}

static void close_pair(struct fixture *f)
{
    close(f->conn.fd);
    close(f->reader);
}

/* Makes room for more. */
static void read_all(struct fixture *f)
{
    ssize_t n;

    while ((n = read(f->reader, f->stream + f->n_stream, sizeof(f->stream) - f->n_stream)) > 0)
        f->n_stream += (size_t)n;
    f->conn.writable = true;
}

static void push_all(struct fixture *f)
{
    while (!f->t.net.ops->flush_test(&f->t.net, 1, 0))
        read_all(f);
    read_all(f);
}

static void put(struct fixture *f, uint64_t *random, uint64_t offset, uint64_t bytes)
{
    const unsigned char *source = f->source + draw(random, sizeof(f->source) - LARGEST);

    while (!f->t.net.ops->put(&f->t.net, 1, 0, offset, source, bytes))
        read_all(f);
    memcpy(f->sent + offset, source, bytes);
    f->calls[f->n_calls++] = (struct call){false, offset, bytes};
}

static void signal_once(struct fixture *f, uint32_t index, uint64_t add)
{
    while (!f->t.net.ops->signal(&f->t.net, 1, 0, index, add))
        read_all(f);
    f->signals[index] += add;
    f->calls[f->n_calls++] = (struct call){true, index, add};
}

/* All records: in order, with the effects of all calls, and each signal after the puts before it. */
static void decode(struct fixture *f)
{
    uint64_t got[SIGNALS] = {0}, puts = 0, called = 0, n_signals = 0;
    int next = 0;

    while (f->at < f->n_stream) {
        struct tcp_wire_record head;

        memcpy(&head, f->stream + f->at, sizeof(head));
        f->at += sizeof(head);
        assert_int_equal(head.number, f->number++);
        if (head.kind == TCP_WIRE_PUT) {
            f->put_records++;
            assert_true(head.target + head.amount <= REGION && f->at + head.amount <= f->n_stream);
            memcpy(f->region + head.target, f->stream + f->at, head.amount);
            f->at += head.amount;
            puts += head.amount;
            continue;
        }
        assert_int_equal(head.kind, TCP_WIRE_SIGNAL);
        assert_true(head.target < SIGNALS);
        f->signal_records++;
        got[head.target] += head.amount;
        /* The calls that this record stands for: signals in their order, the last of which came after `called` bytes.
         */
        for (n_signals = head.amount; n_signals; next++) {
            assert_true(next < f->n_calls);
            if (!f->calls[next].is_signal) {
                called += f->calls[next].amount;
                continue;
            }
            assert_int_equal(f->calls[next].target, head.target);
            assert_true(f->calls[next].amount <= n_signals);
            n_signals -= f->calls[next].amount;
        }
        assert_true(puts >= called);
    }
    assert_memory_equal(got, f->signals, sizeof(got));
    assert_memory_equal(f->region, f->sent, REGION);
}

static void run_random(struct fixture *f, uint64_t seed)
{
    uint64_t random = seed * 977, offset = 0;

    open_pair(f, seed % 3 != 0);
    for (size_t i = 0; i < sizeof(f->source); i++)
        f->source[i] = (unsigned char)draw(&random, 256);
    while (f->n_calls < CALLS) {
        uint64_t bytes = 1 + draw(&random, draw(&random, 4) ? 100 : LARGEST);

        switch (draw(&random, 8)) {
        case 0:
            signal_once(f, (uint32_t)draw(&random, SIGNALS), 1 + draw(&random, 5));
            break;
        case 1:
            signal_once(f, 0, 1 + draw(&random, 5));
            break;
        case 2:
            read_all(f);
            break;
        case 3:
            (void)f->t.net.ops->flush_test(&f->t.net, 1, 0);
            break;
        case 4:
            offset = draw(&random, REGION - LARGEST);
            break;
        default:
            if (offset + bytes > REGION)
                offset = 0;
            put(f, &random, offset, bytes);
            offset += bytes;
        }
    }
    push_all(f);
    decode(f);
    close_pair(f);
}

TEST(test_random_calls)
{
    struct fixture *f = malloc(sizeof(*f));

    assert_non_null(f);
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        run_random(f, seed);
    free(f);
}

/* Messages as streams send them: a head, a row, a signal. */
TEST(test_messages_are_joined)
{
    struct fixture *f = malloc(sizeof(*f));
    uint64_t random = 5, offset = 0;

    assert_non_null(f);
    open_pair(f, true);
    put(f, &random, 40000, 8);
    for (int i = 0; i < 10; i++) {
        put(f, &random, offset, 80);
        put(f, &random, offset + 80, 1024);
        signal_once(f, 2, 1104);
        offset += 1104;
    }
    signal_once(f, 3, 1);
    push_all(f);
    decode(f);
    assert_int_equal(f->put_records, 2);
    assert_int_equal(f->signal_records, 2);
    close_pair(f);
    free(f);
}
