/* SPDX-License-Identifier: Apache-2.0 */
/* The made-up routings: each has the property that it is named after, and all are the same on every platform. */
#include "cmd/test/check/random.h"
#include "cmd/test/check/routings.h"
#include "temp.h"
#include "unit.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_TOPK 64

static struct routing *make(enum routing_kind kind, int n_ranks, int n_tokens, int topk, int n_experts)
{
    struct routing_spec spec = {
        .kind = kind, .seed = 1, .n_ranks = n_ranks, .n_tokens = n_tokens, .topk = topk, .n_experts = n_experts};
    struct routing *routing = NULL;
    struct check_error error = {""};

    if (!routing_new(&spec, &routing, &error))
        fail_msg("%s", error.text);
    return routing;
}

/* What holds for every routing: distinct experts in range; weights positive, of sum 1. */
static void assert_sane(const struct routing *routing)
{
    const struct routing_spec *spec = routing_get_spec(routing);
    int32_t experts[MAX_TOPK];
    float weights[MAX_TOPK];

    for (int rank = 0; rank < spec->n_ranks; rank++)
        for (int token = 0; token < routing_tokens(routing, rank); token++) {
            double sum = 0;

            routing_token(routing, rank, token, experts, weights);
            for (int k = 0; k < spec->topk; k++) {
                assert_in_range(experts[k] + 1, 0, spec->n_experts);
                for (int i = 0; i < k; i++)
                    assert_true(experts[i] != experts[k] || experts[k] == -1 || spec->kind == ROUTING_REPEATED);
                assert_true(weights[k] > 0);
                sum += weights[k];
            }
            assert_true(fabs(sum - 1) < 1e-5);
        }
}

TEST(test_sane)
{
    static const struct {
        int n_ranks, n_tokens, topk, n_experts;
    } shapes[] = {{1, 5, 1, 8}, {1, 3, 4, 8}, {2, 40, 8, 16}, {3, 20, 2, 24}, {8, 32, 8, 64}, {4, 3, 64, 128}};

    for (const struct routing_name *row = routing_names; row->name; row++)
        for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
            struct routing *routing =
                make(row->kind, shapes[i].n_ranks, shapes[i].n_tokens, shapes[i].topk, shapes[i].n_experts);

            assert_sane(routing);
            routing_free(routing);
        }
}

/* All experts at once: nothing is left to draw, which a sampler that only tries again would not survive. */
TEST(test_all_experts)
{
    static const enum routing_kind kinds[] = {ROUTING_UNIFORM, ROUTING_ZIPF, ROUTING_ONE};

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        struct routing *routing = make(kinds[i], 4, 10, 64, 64);

        assert_sane(routing);
        routing_free(routing);
    }
}

/*
 * Fixed values, computed by a second implementation (Python, zipf in 50-digit decimals): a change of the generators, or
 * a platform on which they differ, shows here. The first ones of splitmix64 with seed 0 are published with it.
 */
TEST(test_golden)
{
    static const struct {
        enum routing_kind kind;
        int32_t experts[4];
    } golden[] = {
        {ROUTING_UNIFORM, {21, 10, 39, 19}}, {ROUTING_ZIPF, {57, 20, 39, 13}},    {ROUTING_GROUPED, {60, 5, 62, 23}},
        {ROUTING_ONE, {4, 2, 9, 15}},        {ROUTING_DROPPED, {38, 19, 21, -1}}, {ROUTING_EMPTY, {10, 4, 51, 9}},
    };
    int32_t experts[4];

    assert_true(random_at(0, 0) == UINT64_C(0xe220a8397b1dcdaf));
    assert_true(random_at(0, 1) == UINT64_C(0x6e789e6aa1b965f4));
    assert_true(random_at(0, 2) == UINT64_C(0x06c45d188009454f));
    for (size_t i = 0; i < sizeof(golden) / sizeof(golden[0]); i++) {
        struct routing *routing = make(golden[i].kind, 4, 100, 4, 64);
        int rank = 0;

        while (routing_tokens(routing, rank) == 0)
            rank++;
        routing_token(routing, rank, 17, experts, NULL);
        assert_memory_equal(experts, golden[i].experts, sizeof(experts));
        routing_free(routing);
    }
}

static void count_experts(const struct routing *routing, int *ret_counts)
{
    const struct routing_spec *spec = routing_get_spec(routing);
    int32_t experts[MAX_TOPK];

    memset(ret_counts, 0, (size_t)spec->n_experts * sizeof(*ret_counts));
    for (int rank = 0; rank < spec->n_ranks; rank++)
        for (int token = 0; token < routing_tokens(routing, rank); token++) {
            routing_token(routing, rank, token, experts, NULL);
            for (int k = 0; k < spec->topk; k++)
                if (experts[k] >= 0)
                    ret_counts[experts[k]]++;
        }
}

static int descending(const void *a, const void *b)
{
    return *(const int *)b - *(const int *)a;
}

/* 4 ranks x 4000 tokens x 4 of 64 experts: 1000 each on average, standard deviation 31. */
TEST(test_uniform_is_even)
{
    struct routing *routing = make(ROUTING_UNIFORM, 4, 4000, 4, 64);
    int counts[64];

    count_experts(routing, counts);
    for (int i = 0; i < 64; i++)
        assert_in_range(counts[i], 840, 1160);
    routing_free(routing);
}

/* With one draw a token the counts themselves follow p^-1.2. */
TEST(test_zipf_is_skewed)
{
    struct routing *routing = make(ROUTING_ZIPF, 4, 10000, 1, 64);
    struct routing *other;
    struct routing_spec spec = *routing_get_spec(routing);
    int counts[64], others[64];
    double total = 0;

    count_experts(routing, counts);
    for (int p = 1; p <= 64; p++)
        total += pow(p, -1.2);
    for (int p = 1; p <= 64; p *= 2) {
        int sorted[64];
        double expected = 40000 * pow(p, -1.2) / total;

        memcpy(sorted, counts, sizeof(sorted));
        qsort(sorted, 64, sizeof(sorted[0]), descending);
        assert_true(fabs(sorted[p - 1] - expected) < 0.15 * expected + 40);
    }
    /* Another seed makes other experts popular. */
    spec.seed = 2;
    assert_true(routing_new(&spec, &other, NULL));
    count_experts(other, others);
    assert_true(memcmp(counts, others, sizeof(counts)) != 0);
    routing_free(other);
    routing_free(routing);
}

TEST(test_grouped_uses_four_groups)
{
    struct routing *routing = make(ROUTING_GROUPED, 2, 500, 8, 64);
    int32_t experts[8];
    int most = 0, in_group[8] = {0};

    for (int token = 0; token < 500; token++) {
        bool used[8] = {false};
        int n = 0;

        routing_token(routing, 1, token, experts, NULL);
        for (int k = 0; k < 8; k++)
            used[experts[k] / 8] = true;
        for (int group = 0; group < 8; group++) {
            n += used[group];
            in_group[group] += used[group];
        }
        assert_true(n <= 4);
        most = n > most ? n : most;
    }
    assert_int_equal(most, 4);
    for (int group = 0; group < 8; group++)
        assert_true(in_group[group] > 150);
    routing_free(routing);
}

TEST(test_one_fills_one_rank)
{
    struct routing *routing = make(ROUTING_ONE, 4, 50, 8, 32), *wide = make(ROUTING_ONE, 4, 50, 12, 32);
    int counts[32], ranks = 0;

    count_experts(routing, counts);
    for (int rank = 0; rank < 4; rank++)
        for (int i = 0; i < 8; i++)
            if (counts[rank * 8 + i]) {
                assert_int_equal(counts[rank * 8 + i], 200);
                ranks |= 1 << rank;
            }
    assert_int_equal(__builtin_popcount((unsigned)ranks), 1);
    /* Four selections more than the rank has experts: they go to the next rank. */
    count_experts(wide, counts);
    for (int rank = 0; rank < 4; rank++) {
        int before = (rank + 3) % 4, n = 0;

        for (int i = 0; i < 8; i++)
            n += counts[rank * 8 + i];
        assert_int_equal(n, ranks == 1 << rank ? 1600 : ranks == 1 << before ? 800 : 0);
    }
    routing_free(routing);
    routing_free(wide);
}

TEST(test_dropped_has_holes)
{
    struct routing *routing = make(ROUTING_DROPPED, 2, 2000, 4, 16);
    int32_t experts[4];
    int holes = 0, nobody = 0;

    for (int token = 0; token < 2000; token++) {
        int n = 0;

        routing_token(routing, 0, token, experts, NULL);
        for (int k = 0; k < 4; k++)
            n += experts[k] < 0;
        holes += n;
        nobody += n == 4;
    }
    assert_in_range(holes, 2500, 3000); /* 1/8 + 7/8 * 1/4 of 8000 */
    assert_in_range(nobody, 200, 320);  /* 1/8 + 7/8 * 1/256 of 2000 */
    routing_free(routing);
}

TEST(test_empty_ranks)
{
    struct routing *routing = make(ROUTING_EMPTY, 8, 30, 4, 32);
    int counts[32], kinds[4] = {0};

    count_experts(routing, counts);
    for (int rank = 0; rank < 8; rank++) {
        int received = 0;

        for (int i = 0; i < 4; i++)
            received += counts[rank * 4 + i];
        kinds[(routing_tokens(routing, rank) > 0) * 2 + (received > 0)]++;
    }
    for (int i = 0; i < 4; i++)
        assert_int_equal(kinds[i], 2); /* sends, receives, both, neither: two ranks each */
    routing_free(routing);
}

/* Any token can be asked for alone, and fill agrees with it. */
TEST(test_fill)
{
    struct routing *routing = make(ROUTING_ZIPF, 3, 10, 4, 12);
    int32_t all[40], experts[4];
    float all_weights[40], weights[4];

    routing_fill(routing, 2, all, all_weights);
    for (int token = 9; token >= 0; token--) {
        routing_token(routing, 2, token, experts, weights);
        assert_memory_equal(experts, all + token * 4, sizeof(experts));
        assert_memory_equal(weights, all_weights + token * 4, sizeof(weights));
    }
    routing_free(routing);
}

TEST(test_refuses)
{
    static const struct {
        struct routing_spec spec;
        const char *text;
    } cases[] = {
        {{.n_ranks = 0, .n_tokens = 1, .topk = 1, .n_experts = 1}, "0 ranks"},
        {{.n_ranks = 1025, .n_tokens = 1, .topk = 1, .n_experts = 1025}, "1025 ranks"},
        {{.n_ranks = 1, .n_tokens = 1, .topk = 1, .n_experts = 0}, "0 experts"},
        {{.n_ranks = 1, .n_tokens = 1, .topk = 1, .n_experts = 4097}, "4097 experts"},
        {{.n_ranks = 3, .n_tokens = 1, .topk = 1, .n_experts = 8}, "8 experts do not divide among 3 ranks"},
        {{.n_ranks = 1, .n_tokens = -1, .topk = 1, .n_experts = 8}, "-1 tokens"},
        {{.n_ranks = 1, .n_tokens = 1, .topk = 0, .n_experts = 8}, "top-0"},
        {{.n_ranks = 1, .n_tokens = 1, .topk = 65, .n_experts = 128}, "top-65"},
        {{.n_ranks = 1, .n_tokens = 1, .topk = 9, .n_experts = 8}, "top-9 of 8 experts"},
        {{.kind = ROUTING_GROUPED, .n_ranks = 1, .n_tokens = 1, .topk = 1, .n_experts = 12}, "8 groups"},
        {{.kind = ROUTING_GROUPED, .n_ranks = 1, .n_tokens = 1, .topk = 9, .n_experts = 16}, "8 experts in 4 groups"},
        {{.kind = ROUTING_FILE, .n_ranks = 1, .n_experts = 16, .path = "/nonexistent"}, "/nonexistent: No such file"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct routing *routing = NULL;
        struct check_error error = {""};

        assert_false(routing_new(&cases[i].spec, &routing, &error));
        if (!strstr(error.text, cases[i].text))
            fail_msg("expected \"%s\", got \"%s\"", cases[i].text, error.text);
        assert_null(routing);
    }
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void new_file(char ret_path[PATH_MAX])
{
    int fd;

    temp_template("routing", ret_path);
    fd = mkstemp(ret_path);
    assert_true(fd >= 0);
    close(fd);
}

static void assert_file_refused(const struct routing_spec *spec, const char *text)
{
    struct routing *routing = NULL;
    struct check_error error = {""};

    assert_false(routing_new(spec, &routing, &error));
    assert_true(strncmp(error.text, spec->path, strlen(spec->path)) == 0);
    if (!strstr(error.text, text))
        fail_msg("expected \"%s\", got \"%s\"", text, error.text);
}

TEST(test_file)
{
    char path[PATH_MAX];
    struct routing_spec spec = {.kind = ROUTING_FILE, .n_ranks = 2, .n_experts = 8, .path = path};
    struct routing *routing;
    struct check_error error = {""};
    int32_t experts[2];

    new_file(path);
    /* [R,N,K]: each rank has its own. */
    write_file(path, "0 1\n2 3\n-1 5\n\n6 7\n4 0\n-1 -1\n");
    if (!routing_new(&spec, &routing, &error))
        fail_msg("%s", error.text);
    assert_int_equal(routing_get_spec(routing)->n_tokens, 3);
    assert_int_equal(routing_get_spec(routing)->topk, 2);
    assert_int_equal(routing_tokens(routing, 1), 3);
    routing_token(routing, 0, 2, experts, NULL);
    assert_int_equal(experts[0], -1);
    assert_int_equal(experts[1], 5);
    routing_token(routing, 1, 1, experts, NULL);
    assert_int_equal(experts[0], 4);
    assert_int_equal(experts[1], 0);
    routing_free(routing);
    spec.n_ranks = 4;
    assert_file_refused(&spec, "contains the routing of 2 ranks, but there are 4");
    spec.n_ranks = 2;
    spec.n_experts = 6;
    assert_file_refused(&spec, "rank 1 token 0 selection 0: expert 6 is not within -1 .. 5");
    spec.n_experts = 8;
    /* [N,K]: the same for all; fewer tokens may be asked for. Spaces, tabs and the line ends of other systems. */
    write_file(path, "0 1\n2 3 \n-1\t5\r\n 6  7\n4 0\n-1 -1");
    spec.n_tokens = 5;
    assert_true(routing_new(&spec, &routing, &error));
    assert_int_equal(routing_tokens(routing, 1), 5);
    routing_token(routing, 1, 4, experts, NULL);
    assert_int_equal(experts[0], 4);
    routing_free(routing);
    spec.n_tokens = 7;
    assert_file_refused(&spec, "contains 6 tokens per rank; 7 were requested");
    spec.n_tokens = 0;
    spec.topk = 3;
    assert_file_refused(&spec, "contains 2 selections per token; another number was requested");
    unlink(path);
}

TEST(test_file_refuses)
{
    static const struct {
        const char *content, *text;
    } cases[] = {
        {"", "contains no selections"},
        {"\n \n", "contains no selections"},
        {"0 1\n2\n", "line 2: 1 selections, but the lines before have 2"},
        {"0 1\n2 3\n\n4 5\n", "line 4: 1 tokens of rank 1 end here, but rank 0 has 2"},
        {"0.000e+00 1\n",
         "line 1: '0.000e+00' is not the number of an expert; numpy.savetxt(file, indices, fmt=\"%d\")"},
        {"0 1\nx 2\n", "line 2: 'x' is not the number"},
        {"\x93NUMPY", "line 1: '\x93NUMPY' is not the number"},
        {"99999999999 1\n", "line 1: '99999999999' is not the number"},
        {"99999999999999999999 1\n", "line 1: '99999999999999999999' is not the number"},
        {"0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 "
         "0 0 0 0 0 0 0 0 0",
         "line 1: more than 64 selections"},
    };
    char path[PATH_MAX];
    struct routing_spec spec = {.kind = ROUTING_FILE, .n_ranks = 2, .n_experts = 8, .path = path};
    struct check_error error = {""};
    struct routing_file file = {0};
    char zero_byte[] = "0\0001\n";
    FILE *stream = fmemopen(zero_byte, sizeof(zero_byte) - 1, "r");

    new_file(path);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_file(path, cases[i].content);
        assert_file_refused(&spec, cases[i].text);
    }
    unlink(path);
    assert_false(routing_file_read(stream, &file, &error));
    assert_string_equal(error.text, "line 1: contains a zero byte; not a text");
    assert_null(file.experts);
    fclose(stream);
    spec.path = "/nonexistent/routing";
    assert_file_refused(&spec, "/nonexistent/routing: No such file or directory");
    spec.path = "/dev/null";
    assert_file_refused(&spec, "/dev/null: not a regular file");
}

/* Opening a pipe without a writer would block. */
TEST(test_file_refuses_a_pipe_at_once)
{
    char path[PATH_MAX];
    struct routing_spec spec = {.kind = ROUTING_FILE, .n_ranks = 2, .n_experts = 8, .path = path};

    new_file(path);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(10); /* ends this program if the next line hangs */
    assert_file_refused(&spec, "not a regular file");
    alarm(0);
    unlink(path);
}

/* What numpy itself writes, where it is installed. */
TEST(test_reads_numpy)
{
    char path[PATH_MAX], command[PATH_MAX + 512];
    struct routing_file file = {0};
    struct check_error error;
    bool written;

    new_file(path);
    /* The python3 of the system is the one that has the packaged numpy, if another comes first in the path. */
    snprintf(command, sizeof(command),
             "for python in python3 /usr/bin/python3; do $python -c \"import numpy; "
             "numpy.savetxt('%s', numpy.arange(24).reshape(6, 4), fmt='%%d')\" 2>/dev/null && exit 0; done; exit 1",
             path);
    written = system(command) == 0;
    if (written && !routing_file_load(path, &file, &error))
        fail_msg("%s", error.text);
    unlink(path);
    if (!written)
        skip();
    assert_int_equal(file.n_tables, 1);
    assert_int_equal(file.n_tokens, 6);
    assert_int_equal(file.topk, 4);
    for (int i = 0; i < 24; i++)
        assert_int_equal(file.experts[i], i);
    routing_file_done(&file);
}

TEST(test_names)
{
    for (const struct routing_name *row = routing_names; row->name; row++)
        assert_ptr_equal(routing_find(row->name), row);
    assert_null(routing_find("file"));
    assert_null(routing_find(""));
}
