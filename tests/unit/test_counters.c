/* SPDX-License-Identifier: Apache-2.0 */
/* Increments of counters: wrap-around, resets, words and bytes; and their files. */
#include "cmd/nics/counter_sample.h"

#include "temp.h"

#include <sys/stat.h>
#include <unistd.h>

static const struct counter_device port = {.name = "mlx5_0:2", .rdma = true, .nic = "mlx5_0", .port = 2};
static const struct counter_device interface = {.name = "eth0", .nic = "eth0"};

static size_t row_of(bool rdma, const char *file)
{
    struct counter_rows rows = counter_rows(rdma);

    for (size_t i = 0; i < rows.n; i++)
        if (strcmp(rows.at[i].file, file) == 0)
            return i;
    fail_msg("no counter %s", file);
    return 0;
}

TEST(rows_are_sound)
{
    for (int rdma = 0; rdma < 2; rdma++) {
        struct counter_rows rows = counter_rows(rdma);
        int kinds[COUNTER_CONGESTION + 1] = {0};

        for (size_t i = 0; i < rows.n; i++) {
            bool is_data = rows.at[i].kind == COUNTER_SENT || rows.at[i].kind == COUNTER_RECEIVED;

            kinds[rows.at[i].kind]++;
            assert_int_equal(rows.at[i].scale, rdma && is_data ? 4 : 1);
            assert_true(*rows.at[i].text);
            for (size_t k = 0; k < i; k++)
                assert_string_not_equal(rows.at[i].file, rows.at[k].file);
        }
        for (int kind = COUNTER_SENT; kind <= COUNTER_RECEIVED_PACKETS; kind++)
            assert_int_equal(kinds[kind], 1);
        assert_true(kinds[COUNTER_ERROR] > 0 && kinds[COUNTER_CONGESTION] > 0);
    }
}

TEST(amounts)
{
    static const struct {
        uint64_t before, after, moved;
        bool reset;
    } cases[] = {
        {0, 0, 0, false},
        {5, 12, 7, false},
        {0, UINT64_MAX, UINT64_MAX, false},
        {0xffffffff, 0x100000000, 1, false}, /* above 2^32: it has more bits */
        {0xffffffff, 0, 1, false},
        {0xfffffff0, 0x10, 0x20, false},
        {0x80000001, 0, 0x7fffffff, false}, /* the wrap is shorter by one */
        {0x80000000, 0, 0, true},           /* equally long: nothing indicates a wrap */
        {0x7fffffff, 0, 0, true},
        {1000, 999, 999, true},
        {0xffffffff, 0xfffffffe, 0xfffffffe, true},
        {UINT64_MAX, 0, 1, false},
        {UINT64_MAX - 9, 10, 20, false},
        {UINT64_MAX, UINT32_MAX, 0x100000000, false},
        {0x100000000, 0, 0, true},
        {0x100000000, 0xffffffff, 0xffffffff, true},
        {UINT64_C(1) << 63, 0, 0, true},
        {(UINT64_C(1) << 63) + 1, 0, (UINT64_C(1) << 63) - 1, false},
        {(UINT64_C(1) << 63) + 1, 5, 5, true},
    };
    size_t packets = row_of(true, "port_xmit_packets");

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct counter_sample before = {0}, after = {0};
        uint64_t amount = 99;
        bool reset = !cases[i].reset;

        before.values[packets] = cases[i].before;
        after.values[packets] = cases[i].after;
        assert_false(counter_moved(&port, packets, &before, &after, &amount, &reset));
        before.known[packets] = true;
        assert_false(counter_moved(&port, packets, &before, &after, &amount, &reset));
        assert_int_equal(amount, 99);
        after.known[packets] = true;
        assert_true(counter_moved(&port, packets, &before, &after, &amount, &reset));
        if (amount != cases[i].moved || reset != cases[i].reset)
            fail_msg("%#jx to %#jx: %#jx, reset %d", (uintmax_t)cases[i].before, (uintmax_t)cases[i].after,
                     (uintmax_t)amount, reset);
    }
    assert_false(counter_moved(&port, COUNTER_ROWS_MAX, &(struct counter_sample){0}, &(struct counter_sample){0},
                               &(uint64_t){0}, &(bool){0}));
}

static uint64_t bytes_of(const struct counter_device *device, const char *file, uint64_t before, uint64_t after)
{
    size_t row = row_of(device->rdma, file);
    struct counter_sample a = {0}, b = {0};
    uint64_t amount = 0;
    bool reset;

    a.known[row] = b.known[row] = true;
    a.values[row] = before;
    b.values[row] = after;
    assert_true(counter_moved(device, row, &a, &b, &amount, &reset));
    return amount;
}

TEST(words_and_bytes)
{
    assert_int_equal(bytes_of(&port, "port_xmit_data", 100, 110), 40);
    assert_int_equal(bytes_of(&port, "port_rcv_data", 0xfffffffe, 3), 20);
    assert_int_equal(bytes_of(&interface, "tx_bytes", 100, 110), 10);
    assert_int_equal(bytes_of(&port, "port_rcv_data", 0, UINT64_MAX / 2), UINT64_MAX);
}

TEST(may_wrap)
{
    struct counter_sample sample = {0};

    assert_false(counter_may_wrap(&port, &sample));
    sample.known[row_of(true, "port_xmit_packets")] = true;
    assert_false(counter_may_wrap(&port, &sample));
    sample.known[row_of(true, "port_xmit_data")] = sample.known[row_of(true, "port_rcv_data")] = true;
    assert_true(counter_may_wrap(&port, &sample));
    sample.values[row_of(true, "port_rcv_data")] = UINT64_C(1) << 32;
    assert_false(counter_may_wrap(&port, &sample));
}

/* --- files --- */

static char folder[PATH_MAX];

static void __attribute__((format(printf, 2, 3))) put(const char *text, const char *format, ...)
{
    char path[PATH_MAX];
    va_list args;
    size_t n = (size_t)snprintf(path, sizeof(path), "%s", folder);
    FILE *file;

    va_start(args, format);
    vsnprintf(path + n, sizeof(path) - n, format, args);
    va_end(args);
    for (char *at = path + n + 1; (at = strchr(at, '/')); at++) {
        *at = '\0';
        mkdir(path, 0777);
        *at = '/';
    }
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

TEST(read_files)
{
    struct counter_sample sample;
    struct source *source;
    char command[PATH_MAX + 16];

    temp_template("counters", folder);
    assert_non_null(mkdtemp(folder));
    put("18446744073709551615\n", "/sys/class/infiniband/mlx5_0/ports/2/counters/port_xmit_data");
    put("no number\n", "/sys/class/infiniband/mlx5_0/ports/2/counters/port_rcv_data");
    put("7\n", "/sys/class/infiniband/mlx5_0/ports/2/hw_counters/np_cnp_sent");
    put("12\n", "/sys/class/net/eth0/statistics/rx_bytes");
    assert_int_equal(source_open(folder, &source), EP_OK);
    counter_read(source, &port, COUNTER_CONGESTION, &sample);
    assert_true(sample.at_ns > 0);
    assert_true(sample.known[row_of(true, "port_xmit_data")]);
    assert_int_equal(sample.values[row_of(true, "port_xmit_data")], UINT64_MAX);
    assert_false(sample.known[row_of(true, "port_rcv_data")]);
    assert_int_equal(sample.states[row_of(true, "port_rcv_data")], SOURCE_FAILED);
    assert_int_equal(sample.states[row_of(true, "symbol_error")], SOURCE_ABSENT);
    assert_int_equal(sample.values[row_of(true, "hw_counters/np_cnp_sent")], 7);
    counter_read(source, &port, COUNTER_RECEIVED_PACKETS, &sample);
    assert_true(sample.known[row_of(true, "port_xmit_data")]);
    assert_int_equal(sample.states[row_of(true, "hw_counters/np_cnp_sent")], SOURCE_NOT_RECORDED);
    /* It is read again each time. */
    put("13\n", "/sys/class/net/eth0/statistics/rx_bytes");
    counter_read(source, &interface, COUNTER_CONGESTION, &sample);
    assert_int_equal(sample.values[row_of(false, "rx_bytes")], 13);
    put("14\n", "/sys/class/net/eth0/statistics/rx_bytes");
    counter_read(source, &interface, COUNTER_CONGESTION, &sample);
    assert_int_equal(sample.values[row_of(false, "rx_bytes")], 14);
    source_free(source);
    snprintf(command, sizeof(command), "rm -r '%s'", folder);
    assert_int_equal(system(command), 0); /* NOLINT(cert-env33-c) */
}

/* The loopback interface of this machine, a missing interface, and an invalid name. */
TEST(drivers_are_asked)
{
    static const char *const names[] = {"lo", "epkit-none", "an-interface-with-a-name-too-long"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        json_t *answer = ethtool_query((void *)names[i]);

        assert_true(!answer || i == 0);
        FOR_MEMBERS (key, value, answer)
            assert_true(json_is_integer(value));
        json_decref(answer);
    }
}

TEST(paths_of_an_interface)
{
    struct counter_device roce = {.rdma = true, .nic = "mlx5_0", .port = 1, .netdev = "ens1np0"};
    char path[COUNTER_PATH_BYTES];

    assert_string_equal(counter_path(&roce, "net/carrier_down_count", path),
                        "/sys/class/net/ens1np0/carrier_down_count");
    assert_string_equal(counter_path(&roce, "ethtool/rx_prio3_pause", path), "");
    assert_string_equal(counter_path(&roce, "symbol_error", path),
                        "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error");
    assert_string_equal(counter_path(&port, "net/carrier_down_count", path), "");
}
