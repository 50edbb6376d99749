/* SPDX-License-Identifier: Apache-2.0 */
/* The model matches the published tables, and the reference data is consistent. */
#include "unit.h"

#include "cmd/parse/figures.h"

#include <math.h>

#define WITHIN 0.15

static struct reference *reference;

static int set_up(void **state)
{
    (void)state;
    reference = reference_new();
    return reference ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    reference_free(reference);
    return 0;
}

/* A copy of the tables, so that a change of the data file cannot change the expected values. */
struct published {
    int nodes;
    const char *op;
    bool is_fp8;
    double rdma, nvl;
};

static const struct published tables[] = {
    {1, "dispatch", true, 0, 316.85}, {1, "dispatch", false, 0, 446.09}, {1, "combine", false, 0, 355.45},
    {2, "dispatch", true, 70.5, 233}, {2, "dispatch", false, 81, 268},   {2, "combine", false, 75, 249},
    {4, "dispatch", true, 54, 109.5}, {4, "dispatch", false, 57.5, 116}, {4, "combine", false, 56.5, 114.5},
};

static void assert_close(double got, double wanted)
{
    if (fabs(got / wanted - 1) > WITHIN)
        fail_msg("%g is not within 15%% of %g", got, wanted);
}

static struct model_case case_of(int nodes, bool is_fp8, bool is_combine)
{
    return (struct model_case){.nodes = nodes,
                               .tokens = 2048,
                               .hidden = 7168,
                               .topk = 8,
                               .experts = 256,
                               .topk_groups = nodes < 4 ? nodes : 4,
                               .is_fp8 = is_fp8,
                               .is_combine = is_combine};
}

TEST(test_tables)
{
    const struct model_hardware *b200 = reference_find_hardware(reference, "b200");

    assert_non_null(b200);
    for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
        struct model_case what = case_of(tables[i].nodes, tables[i].is_fp8, strcmp(tables[i].op, "combine") == 0);
        struct model_result result;

        assert_true(model_predict(b200, &what, &result));
        assert_close(result.nvl_logical, tables[i].nvl);
        if (tables[i].rdma > 0) {
            assert_close(result.rdma_logical, tables[i].rdma);
            assert_close(result.rdma_wire, tables[i].rdma * (tables[i].nodes - 1) / tables[i].nodes);
        }
    }
}

/* Published figures of other machines, by the same formula. */
TEST(test_figures)
{
    int n = 0;

    for (size_t i = 0; i < reference->n_figures; i++) {
        const struct reference_figure *figure = &reference->figures[i];
        struct model_case what =
            case_of(figure->nodes, strcmp(figure->type, "fp8") == 0, strcmp(figure->op, "combine") == 0);
        struct model_result result;

        if (strcmp(figure->dialect, "deepep-internode") != 0 && strcmp(figure->dialect, "deepep-intranode") != 0)
            continue;
        what.tokens = figure->tokens;
        assert_true(model_predict(reference_find_hardware(reference, figure->hardware), &what, &result));
        if (figure->rdma.low > 0)
            assert_close(result.rdma_logical, (figure->rdma.low + figure->rdma.high) / 2);
        if (figure->nvl.low > 0)
            assert_close(result.nvl_logical, (figure->nvl.low + figure->nvl.high) / 2);
        n++;
    }
    assert_true(n >= 18);
}

/* The wire rate does not fall with the number of nodes; the logical one approaches it. */
TEST(test_many_nodes)
{
    static const struct {
        int nodes, time_us;
    } rows[] = {{2, 1395}, {4, 3632}, {4096, 10524}};
    const struct model_hardware *b200 = reference_find_hardware(reference, "b200");
    double before = 0;

    for (int nodes = 2; nodes <= 4096; nodes *= 2) {
        struct model_case what = case_of(nodes, false, false);
        struct model_result result;

        what.tokens = 4096;
        what.experts = fmax(256, nodes * 8.0);
        what.topk_groups = 0;
        assert_true(model_predict(b200, &what, &result));
        assert_true(result.is_rdma_bound && result.distinct_nodes <= 8 && result.distinct_nodes >= before);
        assert_true(result.rdma_wire > 39 && result.rdma_wire <= 45 && result.rdma_wire < result.rdma_logical);
        before = result.distinct_nodes;
        /* The table of docs/model.md. */
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
            if (nodes == rows[i].nodes)
                assert_int_equal(lround(result.time_us), rows[i].time_us);
    }
    assert_true(before > 7.98);
}

TEST(test_distinct)
{
    assert_true(fabs(model_distinct(1, 256, 8) - 1) < 1e-12);
    assert_true(fabs(model_distinct(2, 1, 2) - 2) < 1e-12);
    assert_true(fabs(model_distinct(4, 1, 1) - 1) < 1e-12);
    /* Two draws of four items in two bins of two: the second one hits the other bin with 2/3. */
    assert_true(fabs(model_distinct(2, 2, 2) - (1 + 2.0 / 3)) < 1e-12);
}

TEST(test_refusals)
{
    const struct model_hardware *b200 = reference_find_hardware(reference, "b200");
    struct model_case what = case_of(2, false, false);
    struct model_result result = {.time_us = 7};

    what.experts = 8;
    assert_false(model_predict(b200, &what, &result));
    what = case_of(0, false, false);
    assert_false(model_predict(b200, &what, &result));
    what = case_of(2, false, false);
    what.topk = 300;
    assert_false(model_predict(b200, &what, &result));
    assert_true(result.time_us == 7);
}

TEST(test_shared_nics)
{
    const struct model_hardware *b200 = reference_find_hardware(reference, "b200");
    struct model_case what = case_of(2, false, false);
    struct model_result result;

    what.nics_in_use = 4;
    assert_true(model_predict(b200, &what, &result));
    assert_close(result.rdma_logical, 43); /* two GPUs on each NIC */
}

TEST(test_guess)
{
    const struct model_hardware *b200 = reference_find_hardware(reference, "b200");
    struct model_case what = case_of(2, false, false);

    what.topk_groups = 0;
    assert_int_equal(model_guess_nodes(b200, &what, 81, 268), 2);
    assert_int_equal(model_guess_nodes(b200, &what, 6.5, 21.4), 2);
    assert_int_equal(model_guess_nodes(b200, &what, 57.5, 116), 0); /* four nodes, or more */
    assert_int_equal(model_guess_nodes(b200, &what, 56.5, 114.5), 0);
    assert_int_equal(model_guess_nodes(b200, &what, 100, 50), 0);
    assert_int_equal(model_guess_nodes(b200, &what, NAN, 50), 0);
}

TEST(test_names)
{
    const struct reference_figure *figure;

    assert_string_equal(reference_find_hardware(reference, "NVIDIA H100 80GB HBM3")->name, "h100");
    assert_string_equal(reference_find_hardware(reference, "B200")->name, "b200");
    assert_null(reference_find_hardware(reference, "NVIDIA GB200"));
    assert_null(reference_find_hardware(reference, "host"));
    figure = reference_find(reference, "b200", "deepep-internode", "dispatch", "bf16", 2, 0, 2048);
    assert_non_null(figure);
    assert_true(figure->rdma.low == 81 && strlen(figure->source) > 0);
    assert_null(reference_find(reference, "b200", "deepep-internode", "dispatch", "bf16", 3, 0, 2048));
}

TEST_GROUP(set_up, tear_down)
