/* SPDX-License-Identifier: Apache-2.0 */
/* All cases on groups of several sizes, with every routing; and what the job says of wrong parameters. */
#include "group.h"
#include "unit.h"

#include "cmd/test/check/routings.h"

/* ThreadSanitizer sees no more of a group of processes than of one of them: two sizes, and ranks as threads. */
#if defined(__SANITIZE_THREAD__)
static const int sizes[] = {2, 4};
enum { EVERY = 3, MODE = EP_LAUNCH_THREADS };
#else
static const int sizes[] = {1, 2, 3, 4, 8};
enum { EVERY = 1, MODE = EP_LAUNCH_FORK };
#endif

static void run_sizes(const char *parameters, int n_cases)
{
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        group_expect_pass(
            &(struct group_spec){.mode = MODE, .n_ranks = sizes[i], .n_nodes = 1, .parameters = parameters}, n_cases);
}

TEST_CALL(test_intranode, run_sizes("{\"matrix\": \"intranode\", \"tokens\": 20, \"hidden\": 512, \"topk\": 4}", 24))

TEST(test_internode)
{
    static const struct {
        int n_ranks, n_nodes;
    } groups[] = {{2, 2}, {4, 2}, {6, 3}, {8, 2}, {8, 4}, {8, 8}};

    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i += EVERY)
        for (int partial = 0; partial < 2; partial++)
            group_expect_pass(
                &(struct group_spec){.mode = MODE,
                                     .n_ranks = groups[i].n_ranks,
                                     .n_nodes = groups[i].n_nodes,
                                     .partial_type = partial ? EP_BF16 : EP_F32,
                                     .parameters =
                                         "{\"matrix\": \"internode\", \"tokens\": 20, \"hidden\": 512, \"topk\": 4}"},
                32);
}

/* A network that is late, small, broken into pieces and out of order. */
TEST(test_internode_bad_network)
{
    group_expect_pass(
        &(struct group_spec){
            .mode = MODE,
            .n_ranks = 4,
            .n_nodes = 2,
            .parameters = "{\"matrix\": \"internode\", \"tokens\": 10, \"hidden\": 512, \"topk\": 4}",
            .emulation = {.seed = 7, .delay_us = 20, .ring_bytes = 4096, .split_bytes = 100, .reorder = 1}},
        32);
}

TEST_CALL(test_lowlatency, run_sizes("{\"matrix\": \"lowlatency\", \"tokens\": 20, \"hidden\": 512, \"topk\": 4}", 32))

/* The ranks are threads of one process. */
TEST(test_threads)
{
    static const char *const matrices[] = {"intranode", "internode", "lowlatency"};
    static const int n_cases[] = {24, 32, 32};
    char parameters[128];

    for (int i = 0; i < 3; i++) {
        snprintf(parameters, sizeof(parameters), "{\"matrix\": \"%s\", \"tokens\": 10, \"hidden\": 512, \"topk\": 4}",
                 matrices[i]);
        group_expect_pass(
            &(struct group_spec){
                .mode = EP_LAUNCH_THREADS, .n_ranks = 4, .n_nodes = i == 1 ? 2 : 1, .parameters = parameters},
            n_cases[i]);
    }
}

/* The library reads and writes mirrors of the buffers, as with device memory. */
TEST(test_mirrors)
{
    static const char *const parameters[] = {
        "{\"matrix\": \"intranode\", \"tokens\": 10, \"hidden\": 512, \"topk\": 4}",
        "{\"matrix\": \"internode\", \"tokens\": 10, \"hidden\": 512, \"topk\": 4, \"routing\": \"empty\"}",
        "{\"matrix\": \"lowlatency\", \"tokens\": 10, \"hidden\": 512, \"topk\": 4}",
    };
    static const int n_cases[] = {24, 32, 32};

    for (int i = 0; i < 3; i++)
        group_expect_pass(
            &(struct group_spec){
                .mode = MODE, .n_ranks = 4, .n_nodes = i == 1 ? 2 : 1, .mirrors = true, .parameters = parameters[i]},
            n_cases[i]);
}

TEST(test_routings)
{
    char parameters[256];

    for (const struct routing_name *row = routing_names; row->name; row++) {
        if ((row - routing_names) % EVERY)
            continue;
        snprintf(parameters, sizeof(parameters),
                 "{\"matrix\": \"intranode\", \"tokens\": 17, \"hidden\": 512, \"topk\": 4, \"routing\": \"%s\"}",
                 row->name);
        group_expect_pass(&(struct group_spec){.mode = MODE, .n_ranks = 4, .n_nodes = 1, .parameters = parameters}, 24);
        snprintf(parameters, sizeof(parameters),
                 "{\"matrix\": \"internode\", \"tokens\": 17, \"hidden\": 512, \"topk\": 4, \"routing\": \"%s\"}",
                 row->name);
        group_expect_pass(&(struct group_spec){.mode = MODE, .n_ranks = 4, .n_nodes = 2, .parameters = parameters}, 32);
        snprintf(parameters, sizeof(parameters),
                 "{\"matrix\": \"lowlatency\", \"tokens\": 17, \"hidden\": 512, \"topk\": 4, \"routing\": \"%s\"}",
                 row->name);
        group_expect_pass(&(struct group_spec){.mode = MODE, .n_ranks = 4, .n_nodes = 1, .parameters = parameters}, 32);
    }
}

/* Odd sizes: one element more than a cache line, one selection, more selections than experts of a rank, no tokens. */
TEST(test_shapes)
{
    static const struct {
        const char *parameters;
        int n_ranks, n_cases;
    } shapes[] = {
        {"{\"matrix\": \"intranode\", \"tokens\": 33, \"hidden\": 8, \"topk\": 1, \"dtype\": \"bf16\"}", 3, 16},
        {"{\"matrix\": \"intranode\", \"tokens\": 5, \"hidden\": 1000, \"topk\": 6, \"experts\": 6, \"dtype\": \"bf16\"}",
         3, 16},
        {"{\"matrix\": \"intranode\", \"tokens\": 9, \"hidden\": 384, \"topk\": 8, \"dtype\": \"fp8\"}", 2, 8},
        {"{\"matrix\": \"intranode\", \"tokens\": 0, \"hidden\": 512, \"topk\": 2}", 2, 24},
        /* Few elements, whose rounding errors are far from their mean. */
        {"{\"matrix\": \"intranode\", \"tokens\": 1, \"hidden\": 8, \"topk\": 8, \"dtype\": \"bf16\", \"seed\": 4}", 8,
         16},
        {"{\"matrix\": \"intranode\", \"tokens\": 1, \"hidden\": 8, \"topk\": 8, \"dtype\": \"bf16\", \"seed\": 5}", 8,
         16},
        {"{\"matrix\": \"lowlatency\", \"tokens\": 7, \"hidden\": 128, \"topk\": 3, \"dtype\": \"bf16\"}", 3, 8},
        {"{\"matrix\": \"lowlatency\", \"tokens\": 0, \"hidden\": 512, \"topk\": 3}", 2, 32},
        {"{\"matrix\": \"intranode\", \"tokens\": 9, \"hidden\": 512, \"symmetric\": true}", 2, 24},
        {"{\"matrix\": \"intranode\", \"tokens\": 9, \"hidden\": 512, \"symmetric\": false}", 2, 24},
        {"{\"matrix\": \"lowlatency\", \"tokens\": 9, \"hidden\": 512, \"symmetric\": true}", 2, 32},
        {"{\"matrix\": \"lowlatency\", \"tokens\": 9, \"hidden\": 512, \"symmetric\": false, \"only\": 32}", 2, 1},
    };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        group_expect_pass(
            &(struct group_spec){
                .mode = MODE, .n_ranks = shapes[i].n_ranks, .n_nodes = 1, .parameters = shapes[i].parameters},
            shapes[i].n_cases);
}

TEST(test_refuses_parameters)
{
    static const struct {
        const char *parameters, *text;
    } cases[] = {
        {"{}", "matrix"},
        {"{\"matrix\": 3}", "Expected string, got integer"},
        {"{\"matrix\": \"both\"}", "there is no matrix 'both'"},
        {"{\"matrix\": \"intranode\", \"dtype\": \"fp16\"}", "dtype 'fp16' is none of all, bf16, fp8"},
        {"{\"matrix\": \"intranode\", \"hidden\": 65544}", "hidden 65544 is not within 1 .. 65536"},
        {"{\"matrix\": \"intranode\", \"hidden\": 12, \"dtype\": \"bf16\"}", "multiple of 8"},
        {"{\"matrix\": \"intranode\", \"hidden\": 200}", "multiple of 128"},
        {"{\"matrix\": \"lowlatency\", \"hidden\": 200, \"dtype\": \"bf16\"}", "multiple of 128"},
        {"{\"matrix\": \"lowlatency\", \"hidden\": 640}", "multiple of 512"},
        {"{\"matrix\": \"intranode\", \"only\": 25}", "the matrix intranode has cases 1 to 24"},
        {"{\"matrix\": \"intranode\", \"experts\": 7}", "7 experts do not divide among 2 ranks"},
        {"{\"matrix\": \"intranode\", \"topk\": 65}", "top-65"},
        {"{\"matrix\": \"intranode\", \"routing\": \"/nonexistent.txt\"}", "/nonexistent.txt: No such file"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct group_report report;

        group_run(&(struct group_spec){.n_ranks = 2, .n_nodes = 1, .parameters = cases[i].parameters}, &report);
        assert_int_equal(report.code, 2);
        assert_int_equal(report.errors, 1);
        assert_int_equal(report.cases, 0);
        if (!strstr(report.error, cases[i].text))
            fail_msg("%s: expected \"%s\", got \"%s\"", cases[i].parameters, cases[i].text, report.error);
    }
}
