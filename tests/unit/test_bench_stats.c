/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of the benchmark: statistics, accounting of bytes, the offsets of a routing. */
#include "unit.h"

#include "cmd/bench/bench_case.h"
#include "common/ranks/ranks_internal.h"

#include <epkit/numeric.h>

const struct ranks_job ranks_jobs[] = {{0}};

static void assert_near(double value, double expected)
{
    double difference = value > expected ? value - expected : expected - value;

    if (difference > 1e-9 * (expected > 1 ? expected : 1))
        fail_msg("%.12g instead of %.12g", value, expected);
}

TEST(quantiles_are_those_of_numpy)
{
    const double sorted[] = {1, 2, 4, 8, 16};

    assert_near(bench_quantile(sorted, 5, 0.5), 4);
    assert_near(bench_quantile(sorted, 5, 0.1), 1.4);
    assert_near(bench_quantile(sorted, 5, 0.9), 12.8);
    assert_near(bench_quantile(sorted, 5, 0), 1);
    assert_near(bench_quantile(sorted, 5, 1), 16);
    assert_near(bench_quantile(sorted, 4, 0.5), 3);
    assert_near(bench_quantile(sorted, 1, 0.9), 1);
}

TEST(summary_sorts)
{
    double values[] = {5, 1, 3, 2, 4};
    struct bench_summary summary;

    bench_summarise(values, 5, &summary);
    assert_int_equal(summary.n, 5);
    assert_near(summary.median, 3);
    assert_near(summary.p10, 1.4);
    assert_near(summary.p90, 4.6);
    assert_near(summary.min, 1);
    assert_near(summary.max, 5);
    bench_summarise(values, 0, &summary);
    assert_int_equal(summary.n, 0);
    assert_near(summary.median, 0);
}

TEST(window_spans_the_group)
{
    /* Two ranks, one after the other on one processor: neither takes more than 3 us, the group takes 6. */
    const struct bench_span spans[] = {{1000, 4000}, {4000, 7000}};

    assert_near(bench_window(spans, 2, 1), 6e-6);
    assert_near(bench_window(spans, 2, 0), 3e-6);
    assert_near(bench_window(spans, 1, 1), 3e-6);
}

TEST(rounds_fill_the_time)
{
    assert_int_equal(bench_rounds_for(0.01, 0.3, 5, 1000), 30);
    assert_int_equal(bench_rounds_for(0.011, 0.3, 5, 1000), 28);
    assert_int_equal(bench_rounds_for(1, 0.3, 5, 1000), 5);
    assert_int_equal(bench_rounds_for(1e-6, 0.3, 5, 1000), 1000);
    assert_int_equal(bench_rounds_for(0, 0.3, 5, 1000), 1000);
}

/* A published figure: 2048 tokens, hidden 7168 on 8 B200; 10953 rows in 352 us are 446.09 GB/s. */
TEST(rates_are_counted_as_deepep_counts)
{
    const struct bench_counts rank = {.recv = 10953};
    struct bench_counts sum = {0};
    struct bench_rates rates;

    assert_int_equal(bench_row_bytes(0, 7168), 14336);
    assert_int_equal(bench_row_bytes(1, 7168), 7392);
    for (int r = 0; r < 8; r++)
        bench_counts_add(&sum, &rank);
    rates = bench_rates_of(&sum, 8, 14336, 352e-6);
    assert_true(rates.logical > 446.0 && rates.logical < 446.2);
    assert_near(rates.wire, 0);
    rates = bench_rates_of(&sum, 8, 14336, 0);
    assert_near(rates.logical, 0);
}

/* 81 GB/s printed on 2 nodes are 40.5 on the wire. */
TEST(network_rates_of_two_nodes)
{
    const struct bench_counts rank = {.net = 1000, .own_node = 1000, .net_bytes = 1000 * 14336};
    struct bench_rates rates = bench_rates_of(&rank, 1, 14336, 2.0 * 1000 * 14336 / 81e9);

    assert_near(rates.printed, 81);
    assert_near(rates.net, 40.5);
}

static void fill_routes(struct bench_route *routes, int n_ranks, int n_nodes, enum routing_kind kind)
{
    const struct routing_spec spec = {
        .kind = kind, .seed = 7, .n_ranks = n_ranks, .n_tokens = 37, .topk = 4, .n_experts = 4 * n_ranks};
    struct routing *routing;
    struct check_error error;

    if (!routing_new(&spec, &routing, &error))
        fail_msg("%s", error.text);
    for (int r = 0; r < n_ranks; r++)
        bench_route_init(&routes[r], routing, r, n_nodes, false);
    routing_free(routing);
}

static void check_sent_is_received(const struct bench_route *from, const struct bench_route *to)
{
    const int64_t *start = to->received.recv_from_rank + from->rank;
    int64_t row = start[0];

    assert_int_equal(from->sent.tokens_per_rank[to->rank], start[1] - start[0]);
    for (int token = 0; token < from->n_tokens; token++)
        if (from->sent.token_in_rank[token * from->group.n_ranks + to->rank]) {
            assert_int_equal(to->received.rows[row].rank, from->rank);
            assert_int_equal(to->received.rows[row++].token, token);
        }
    assert_int_equal(row, start[1]);
}

TEST(routes_agree)
{
    static const enum routing_kind kinds[] = {ROUTING_UNIFORM, ROUTING_DROPPED, ROUTING_EMPTY, ROUTING_ONE};
    struct bench_route routes[8];

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        int64_t sent = 0, received = 0;

        fill_routes(routes, 8, 2, kinds[i]);
        for (int r = 0; r < 8; r++) {
            const struct bench_route *route = &routes[r];

            for (int to = 0; to < 8; to++)
                check_sent_is_received(route, &routes[to]);
            assert_int_equal(route->counts.recv, route->received.n_rows);
            assert_int_equal(route->counts.wire, route->received.n_send - route->sent.tokens_per_rank[r]);
            assert_true(route->counts.net + route->counts.own_node <= 2 * route->n_tokens);
            sent += route->received.n_send;
            received += route->counts.recv;
        }
        assert_int_equal(sent, received);
        assert_true(sent > 0);
        for (int r = 0; r < 8; r++)
            bench_route_done(&routes[r]);
    }
}

/* In both layouts of the received rows, one row for each token and rank crosses the wire. */
TEST(expanded_route_has_the_same_counts)
{
    const struct routing_spec spec = {.seed = 7, .n_ranks = 4, .n_tokens = 37, .topk = 4, .n_experts = 16};
    struct bench_route route, expanded;
    struct routing *routing;

    assert_true(routing_new(&spec, &routing, NULL));
    bench_route_init(&route, routing, 1, 2, false);
    bench_route_init(&expanded, routing, 1, 2, true);
    assert_int_equal(expanded.counts.wire, route.counts.wire);
    assert_int_equal(expanded.counts.net, route.counts.net);
    assert_true(expanded.counts.recv > route.counts.recv);
    bench_route_done(&route);
    bench_route_done(&expanded);
    routing_free(routing);
}

TEST(meta_is_local)
{
    int32_t experts[] = {5, -1, 9, 4}, *of_ranks[] = {experts};
    float weights[] = {0.1f, 0.2f, 0.3f, 0.4f}, *weights_of_ranks[] = {weights};
    const struct reference_group group = {.topk = 4, .n_local = 4, .experts = of_ranks, .weights = weights_of_ranks};
    const int32_t expected[] = {1, -1, -1, 0};
    const float expected_weights[] = {0.1f, 0, 0, 0.4f};
    int32_t local[4];
    float local_weights[4];

    reference_row_selections(&group, 1, &(struct reference_row){0}, local, local_weights);
    assert_memory_equal(local, expected, sizeof(local));
    assert_memory_equal(local_weights, expected_weights, sizeof(local_weights));
}

/* The hand-written sum rounds as the library's conversion does, in every tail length. */
TEST(reduce_is_exact)
{
    static const int counts[] = {8, 16, 40, 64, 104, 7168};
    uint16_t *memory = calloc(6 * 7168, sizeof(*memory));
    const uint16_t *rows[5];

    assert_non_null(memory);
    for (int r = 0; r < 5; r++) {
        rows[r] = memory + (size_t)r * 7168;
        data_row(&(struct data){.kind = DATA_BF16_RANDOM, .hidden = 7168}, r, 0, memory + (size_t)r * 7168);
    }
    for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
        for (int n_rows = 0; n_rows <= 5; n_rows++) {
            uint16_t *out = memory + (size_t)5 * 7168;

            memset(out, VERIFY_POISON, 2 * 7168);
            naive_sum(out, rows, n_rows, counts[c]);
            for (int i = 0; i < counts[c]; i++) {
                float sum = n_rows ? ep_bf16_to_f32(rows[0][i]) : 0;

                for (int r = 1; r < n_rows; r++)
                    sum += ep_bf16_to_f32(rows[r][i]);
                assert_int_equal(out[i], ep_bf16_from_f32(sum));
            }
            if (counts[c] < 7168)
                assert_int_equal(out[counts[c]], 0xffff);
        }
    }
    free(memory);
}

TEST(requests_survive_the_way)
{
    struct bench_request request = BENCH_REQUEST_INIT, back;
    json_t *json;

    request.ops = BENCH_COMBINE | BENCH_LL;
    request.types = BENCH_FP8;
    request.routing = ROUTING_ZIPF;
    request.seed = UINT64_C(1) << 40;
    request.n_token_counts = 2;
    request.tokens[1] = 77;
    request.iters = 50;
    request.baselines = false;
    request.no_partial_reduce = true;
    json = bench_request_to_json(&request);
    assert_int_equal(bench_request_from_json(json, &back), 0);
    assert_int_equal(back.ops, request.ops);
    assert_int_equal(back.types, request.types);
    assert_int_equal(back.routing, request.routing);
    assert_int_equal(back.seed, request.seed);
    assert_int_equal(back.n_token_counts, 2);
    assert_int_equal(back.tokens[0], 512);
    assert_int_equal(back.tokens[1], 77);
    assert_int_equal(back.ll_tokens, request.ll_tokens);
    assert_int_equal(back.hidden, request.hidden);
    assert_int_equal(back.topk, request.topk);
    assert_int_equal(back.experts, request.experts);
    assert_int_equal(back.iters, 50);
    assert_false(back.baselines);
    assert_true(back.no_partial_reduce);
    json_object_set_new(json, "bits", json_string("nonsense"));
    assert_int_equal(bench_request_from_json(json, &back), -1);
    json_decref(json);
}

TEST(impossible_requests_are_named)
{
    struct bench_request request = BENCH_REQUEST_INIT;
    char buffer[256];

    assert_null(bench_check(&request, 8, buffer, sizeof(buffer)));
    assert_non_null(strstr(bench_check(&request, 7, buffer, sizeof(buffer)), "256 experts"));
    request.topk = 64;
    request.experts = 8;
    assert_non_null(strstr(bench_check(&request, 8, buffer, sizeof(buffer)), "64 of 8"));
    request = (struct bench_request)BENCH_REQUEST_INIT;
    request.hidden = 72;
    assert_non_null(strstr(bench_check(&request, 8, buffer, sizeof(buffer)), "low latency"));
    request.ops = BENCH_DISPATCH;
    assert_null(bench_check(&request, 8, buffer, sizeof(buffer)));
    request.types = BENCH_FP8;
    assert_non_null(strstr(bench_check(&request, 8, buffer, sizeof(buffer)), "fp8"));
}

/* On GPUs the ratio is of queued operations, and so is the rate that stands beside it. */
TEST(a_ratio_is_that_of_the_figures_beside_it)
{
    json_t *rows = json_pack("[{s:s, s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:{s:f, s:f}, s:{s:f, s:f}, s:f}]", "op",
                             "dispatch", "type", "bf16", "ranks", 2, "tokens", 4096, "row_bytes", 14336, "sms", 16,
                             "time_us", 193.0, "logical_gbps", 622.6, "queued", "time_us", 178.6, "gbps", 656.1,
                             "engine_all", "time_us", 170.0, "gbps", 689.1, "vs_engine_all", 0.952);
    const json_t *row = json_array_get(rows, 0);
    char text[256];

    assert_non_null(rows);
    assert_near(bench_rate_of(row) / 689.1, 656.1 / 689.1);
    assert_near(bench_time_of(row), 178.6);
    bench_verdict(rows, text, sizeof(text));
    assert_string_equal(text, "2 ranks: dispatch moves 656 GB/s queued, 0.95 of the copy engine");
    json_decref(rows);

    rows = json_pack("[{s:s, s:s, s:i, s:i, s:f, s:f, s:{s:f, s:f}, s:f}]", "op", "combine", "type", "bf16", "ranks", 2,
                     "tokens", 512, "time_us", 100.0, "logical_gbps", 5.6, "memcpy", "time_us", 132.0, "gbps", 4.24,
                     "vs_memcpy", 1.32);
    assert_near(bench_rate_of(json_array_get(rows, 0)), 5.6);
    assert_near(bench_time_of(json_array_get(rows, 0)), 100.0);
    bench_verdict(rows, text, sizeof(text));
    assert_string_equal(text, "2 ranks: combine runs at 1.32 of memcpy");
    json_decref(rows);
}
