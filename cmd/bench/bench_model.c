/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_model.h"

#include "cmd/parse/figures.h"
#include "common/output.h"

#include <stdio.h>

static const struct out_column columns[] = {
    {"NODES", "nodes", 0, 0},
    {"GPUS", "gpus", 0, 0},
    {"OP", "op", 0, 0},
    {"TYPE", "type", 0, 0},
    {"TOKENS", "tokens", 0, 0},
    {"EXPERTS", "experts", 0, OUT_DATA},
    {"NODES OF A TOKEN", "distinct_nodes", 2, 0},
    {"TIME us", "time_us", 0, 0},
    {"NET GB/s AS DeepEP PRINTS IT", "net_printed_gbps", 1, 0},
    {"NET GB/s ON THE WIRE", "net_gbps", 1, 0},
    {"% OF LINK", "percent_of_link", 0, 0},
    {"MEASURED, PRINTED GB/s", "measured_gbps", 1, OUT_IF_PRESENT},
    {"WITH TOKENS", "measured_tokens", 0, OUT_IF_PRESENT},
};

/* Shape of the published results, DeepSeek-V3: they apply to this shape only. */
#define PUBLISHED_HIDDEN 7168
#define PUBLISHED_TOPK 8

struct model_job {
    const struct bench_request *request;
    const struct model_hardware *hardware;
    const struct reference *reference;
    json_t *rows;
};

/* Experts: those of the request, but at least one on each GPU. */
static void add_row(const struct model_job *job, int nodes, double tokens, bool is_combine, bool is_fp8)
{
    const char *op = is_combine ? "combine" : "dispatch", *type = is_fp8 ? "fp8" : "bf16";
    double gpus = (double)nodes * job->hardware->gpus_per_node, experts = (double)job->request->experts;
    struct model_case what = {.nodes = nodes,
                              .tokens = tokens,
                              .hidden = job->request->hidden,
                              .topk = job->request->topk,
                              .experts = experts < gpus ? gpus : experts,
                              .is_fp8 = is_fp8,
                              .is_combine = is_combine};
    const struct reference_figure *measured =
        reference_find(job->reference, job->hardware->name, "deepep-internode", op, type, nodes, (int)gpus, tokens);
    struct model_result result;
    json_t *row;

    if (!model_predict(job->hardware, &what, &result))
        return;
    row = json_pack("{s:i, s:f, s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "nodes", nodes, "gpus", gpus, "op", op,
                    "type", type, "tokens", tokens, "experts", what.experts, "distinct_nodes", result.distinct_nodes,
                    "time_us", result.time_us, "net_printed_gbps", result.rdma_logical, "net_gbps", result.rdma_wire,
                    "percent_of_link", result.percent_of_link);
    if (measured && measured->rdma.high > 0 && what.hidden == PUBLISHED_HIDDEN && what.topk == PUBLISHED_TOPK) {
        json_object_set_new(row, "measured_gbps", json_real(measured->rdma.high));
        if (measured->tokens > 0)
            json_object_set_new(row, "measured_tokens", json_real(measured->tokens));
    }
    json_array_append_new(job->rows, row);
}

static void list_known(const struct reference *reference, char *ret_known, size_t bytes)
{
    size_t n = 0;

    *ret_known = '\0';
    for (size_t i = 0; i < reference_n_hardware(reference) && n < bytes; i++)
        n += (size_t)snprintf(ret_known + n, bytes - n, "%s%s", i ? ", " : "", reference_hardware(reference, i)->name);
}

json_t *bench_model(const struct bench_request *request, const struct opt_list *nodes, const char *hardware,
                    char *ret_title, size_t title_bytes, char *ret_known, size_t known_bytes)
{
    struct reference *reference = reference_new();
    struct model_job job = {.request = request, .reference = reference};

    *ret_title = *ret_known = '\0';
    if (!reference)
        return NULL;
    list_known(reference, ret_known, known_bytes);
    job.hardware = reference_find_hardware(reference, hardware);
    if (job.hardware) {
        snprintf(ret_title, title_bytes, "%s", job.hardware->title);
        job.rows = json_array();
        for (size_t i = 0; i < nodes->n; i++)
            for (int t = 0; t < request->n_token_counts; t++) {
                int n = (int)nodes->values[i], tokens = request->tokens[t];

                if ((request->ops & BENCH_DISPATCH) && (request->types & BENCH_BF16))
                    add_row(&job, n, tokens, false, false);
                if ((request->ops & BENCH_DISPATCH) && (request->types & BENCH_FP8))
                    add_row(&job, n, tokens, false, true);
                if (request->ops & BENCH_COMBINE)
                    add_row(&job, n, tokens, true, false);
            }
    }
    reference_free(reference);
    return job.rows;
}

int bench_model_print(json_t *rows, bool csv)
{
    return out_table(stdout, columns, sizeof(columns) / sizeof(columns[0]), rows, csv ? OUT_CSV : OUT_TABLE);
}
