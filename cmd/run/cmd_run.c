/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_run.c - epkit run: checks and measures everything on this machine, and writes a report. */
#include "cmd/bench/bench.h"
#include "cmd/bench/bench_host.h"
#include "cmd/report/report.h"
#include "cmd/test/suite.h"
#include "common/launched_by.h"
#include "common/ranks/gpu.h"
#include "common/ranks/group_options.h"
#include "common/ranks/ranks_internal.h"

#include "base/clock.h"

#include "common/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_MS 30000
#define TOKENS 128
#define HIDDEN 2048
#define QUICK_TOKENS 32
#define QUICK_HIDDEN 512
#define QUICK_ROUNDS 5
#define TOPK 8
#define EXPERTS_PER_RANK 8
#define MAX_BENCH_RANKS 8

struct run_options {
    const char *output;
    int64_t seed;
    bool quick, json;
    int network; /* index into group_networks */
};

/* clang-format off */
static const struct opt run_table[] = {
    {"output", 'o', "DIR", OPT_DIR, offsetof(struct run_options, output), .value = "report",
     .help = "folder of the report; it is created when the report is complete"},
    {"seed", 's', "N", OPT_INT, offsetof(struct run_options, seed), .min = 0, .max = SUITE_MAX_SEED,
     .help = "seed of all random choices; default: a random one, which is printed"},
    {"quick", 'q', NULL, OPT_FLAG, offsetof(struct run_options, quick),
     .help = "small rows and few rounds, to check that it works"},
    {"network", 0, "NAME", OPT_CHOICE, offsetof(struct run_options, network), .choices = group_networks,
     .value = "auto", .help = GROUP_NETWORK_HELP},
    OPT_JSON_ROW(struct run_options, json),
    {0},
};
/* clang-format on */

struct part {
    const char *matrix;
    int ranks, nodes;
};

static const struct part parts[] = {
    {"intranode", 8, 1},
    {"internode", 8, 2},
    {"lowlatency", 4, 1},
};

#define N_PARTS (int)(sizeof(parts) / sizeof(parts[0]))

struct run {
    uint64_t seed;
    bool quick;
    int network; /* index into group_networks */
    struct ranks_spec specs[N_PARTS];
    struct suite_result results[N_PARTS];
    bool passed_over; /* GPUs of this machine */
    json_t *suites;   /* for the report */
    json_t *bench;    /* NULL: not measured */
    const char *bench_missing;
    int code;
};

/* --- correctness --- */

/*
 * All parts on one node use the backend of the first one, which has the most ranks, so that one sentence of the report
 * covers them.
 */
static void part_spec(struct run *run, const struct part *part, struct ranks_spec *ret_spec)
{
    const struct group_options group = {.nodes = part->nodes};
    int gpus = part->nodes > 1 ? 0 : group_gpu_ranks(&group);

    *ret_spec = (struct ranks_spec){
        .boot = RANKS_FORK,
        .nranks = gpus ? gpus : part->ranks,
        .nnodes = part->nodes,
        .network = part->nodes > 1 && run->network ? group_networks[run->network] : NULL,
        .timeout_ms = TIMEOUT_MS,
        .emulation = {.seed = run->seed},
    };
    if (part->nodes > 1) {
        gpu_choose_backend(ret_spec); /* ignores EPKIT_BACKEND: several nodes need the host backend */
    } else if (part == &parts[0]) {
        run->passed_over = group_choose_backend(&group, ret_spec, 1);
    } else {
        ret_spec->backend = run->specs[0].backend;
        memcpy(ret_spec->backend_why, run->specs[0].backend_why, sizeof(ret_spec->backend_why));
    }
}

static void append_suite(struct run *run, const struct ranks_spec *spec, const struct suite_request *request,
                         const struct suite_result *result)
{
    FOR_JSON (case_row, result->cases)
        json_object_set_new(case_row, "seed", json_integer((json_int_t)run->seed));
    json_array_append_new(run->suites, suite_json(spec, request, result));
}

static struct suite_request part_request(const struct run *run, int part)
{
    return (struct suite_request){
        .matrix = parts[part].matrix,
        .tokens = run->quick ? QUICK_TOKENS : TOKENS,
        .hidden = run->quick ? QUICK_HIDDEN : HIDDEN,
        .topk = TOPK,
        .experts = (int64_t)EXPERTS_PER_RANK * run->specs[part].nranks,
        .dtype = "all",
        .seed = run->seed,
        .routing = "uniform",
    };
}

/* Runs the matrices. 0, or above 128 if interrupted. */
static int run_suites(struct run *run)
{
    struct suite_request request;
    int all = 0, done = 0;

    for (int i = 0; i < N_PARTS; i++) {
        part_spec(run, &parts[i], &run->specs[i]);
        request = part_request(run, i);
        all += suite_count(&request);
    }
    if (run->passed_over)
        group_warn_host(&run->specs[0]);
    for (int i = 0; i < N_PARTS; i++) {
        const struct ranks_spec *spec = &run->specs[i];
        struct suite_result *result = &run->results[i];

        request = part_request(run, i);
        suite_run(spec, &request, 0, done, all, result);
        if (result->code > 128)
            return result->code;
        append_suite(run, spec, &request, result);
        run->code = ranks_worse(run->code, result->code);
        done += suite_count(&request);
    }
    return CMD_FINE;
}

/* --- speed --- */

static uint64_t available_bytes(void)
{
    uint64_t bytes = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t most = machine_memory_bytes();

    return bytes < most ? bytes : most;
}

/* 0, or above 128 if interrupted. */
static int run_bench(struct run *run, int cores)
{
    struct bench_request request = BENCH_REQUEST_INIT;
    struct part part = {"bench", cores < 2 ? 2 : cores > MAX_BENCH_RANKS ? MAX_BENCH_RANKS : cores, 1};
    struct ranks_spec spec;
    char wrong[256];
    int code;

    part_spec(run, &part, &spec);
    request.ops = BENCH_DISPATCH | BENCH_COMBINE;
    request.types = BENCH_BF16 | BENCH_FP8;
    request.seed = run->seed;
    request.experts = 256 / spec.nranks * spec.nranks;
    if (run->quick) {
        request.n_token_counts = 2;
        request.tokens[0] = QUICK_TOKENS;
        request.tokens[1] = TOKENS;
        request.hidden = HIDDEN;
        request.iters = QUICK_ROUNDS;
    } else {
        request.n_token_counts = 3;
        request.tokens[0] = TOKENS;
        request.tokens[1] = gpu_is_backend(spec.backend) ? 1024 : 512;
        request.tokens[2] = gpu_is_backend(spec.backend) ? 4096 : 2048;
    }
    while (request.n_token_counts > 1 && bench_bytes(&request, spec.nranks, false) > available_bytes() / 2)
        request.n_token_counts--;
    if (bench_check(&request, spec.nranks, wrong, sizeof(wrong))) {
        run->bench_missing = "the measurements do not support this number of ranks";
        return CMD_FINE;
    }
    progress_update(0, 0, "measuring");
    code = bench_collect(&spec, &request, &run->bench);
    if (code > 128)
        return code;
    if (code != CMD_FINE)
        run->bench_missing = "the measurements failed; the reason is on standard error";
    run->code = ranks_worse(run->code, code);
    return CMD_FINE;
}

/* --- the report --- */

static void count_passed(const struct run *run, char *ret_text, size_t bytes)
{
    struct text text = text_in(ret_text, bytes);

    for (int i = 0; i < N_PARTS; i++)
        text_add(&text, "%s%d/%d",
                 i == 0            ? ""
                 : i + 1 < N_PARTS ? ", "
                                   : " and ",
                 run->results[i].passed, run->results[i].total);
}

/* What the library does not support on this machine, as narrow as it is known. */
static void name_unsupported(const struct run *run, const char *passed, char *ret_text, size_t bytes)
{
    char names[64] = "";
    bool any_passed = false, only_network = run->network != 0;

    for (int i = 0; i < N_PARTS; i++) {
        any_passed |= run->results[i].code == CMD_FINE;
        if (run->results[i].code != CMD_UNSUPPORTED)
            continue;
        only_network &= parts[i].nodes > 1;
        text_append(names, sizeof(names), "%s%s", *names ? " and " : "", parts[i].matrix);
    }
    if (!any_passed)
        snprintf(ret_text, bytes, "epkit cannot run here: the library does not support this machine.");
    else if (!*names)
        snprintf(ret_text, bytes,
                 "epkit cannot measure here: the library does not support it on this machine; %s cases passed.",
                 passed);
    else if (only_network)
        snprintf(ret_text, bytes, "epkit cannot use the network %s here: %s cases passed.",
                 group_networks[run->network], passed);
    else
        snprintf(ret_text, bytes,
                 "epkit cannot run %s here: the library does not support it on this machine; %s cases passed.", names,
                 passed);
}

/* "656.1 GB/s queued, 0.95 of the copy engine" */
static void describe_rate(const json_t *row, char *ret_text, size_t bytes)
{
    struct bench_baseline baseline = bench_baseline_of(row);

    snprintf(ret_text, bytes, "%.1f GB/s%s, %.2f of %s", bench_rate_of(row), baseline.kind,
             json_number_value(bench_ratio_of(row)), baseline.name);
}

static void make_verdict(const struct run *run, char *ret_text, size_t bytes)
{
    const json_t *row = bench_largest(json_object_get(run->bench, "rows"), "dispatch");
    const char *device = json_string_value(json_object_get(run->bench, "device"));
    struct text text = text_in(ret_text, bytes);
    char passed[128], rate[128];

    describe_rate(row, rate, sizeof(rate));
    count_passed(run, passed, sizeof(passed));
    if (run->code == CMD_UNSUPPORTED) {
        name_unsupported(run, passed, ret_text, bytes);
        return;
    }
    text_add(&text, "epkit %s here: %s cases passed", run->code ? "does not work" : "works", passed);
    if (row)
        text_add(&text, "; %s dispatch moves %s.", device ? device : "host", rate);
    else
        text_add(&text, "; nothing was measured.");
}

/* A new reference. */
static json_t *gpu_note(const struct run *run, const json_t *machine)
{
    if (gpu_is_backend(run->specs[0].backend) && run->results[0].code == CMD_UNSUPPORTED)
        return json_sprintf(
            "Cases on one node used the CUDA backend (%s), which failed on this machine; see the errors. Nodes are "
            "emulated, on the host backend.",
            run->specs[0].backend_why);
    if (gpu_is_backend(run->specs[0].backend))
        return json_string("Cases on one node and measurements used the CUDA backend, on the GPUs of this machine; "
                           "nodes are emulated, on the host backend.");
    if (run->passed_over || json_array_size(json_object_get(machine, "gpus")) > 0)
        return json_sprintf("This machine has GPUs, but cases and measurements used the host backend, on the CPU: %s.",
                            run->specs[0].backend_why);
    return json_string("No NVIDIA GPU was found, so everything ran on the host backend, on the CPU. On GPUs the CUDA "
                       "backend (cmake --preset cuda) moves rows over NVLink, and this command runs the same cases "
                       "and measurements there.");
}

static json_t *make_document(const struct cmd *cmd, const struct run *run, json_t *machine, const char *verdict,
                             double seconds)
{
    json_t *document = out_document(cmd->name);
    json_t *again = json_sprintf("epkit run %s--seed %" PRIu64, run->quick ? "--quick " : "", run->seed);
    const char *result = run->code == CMD_FINE ? "works" : run->code == CMD_UNSUPPORTED ? "unsupported" : "failed";

    json_object_update_new(document,
                           json_pack("{s:o, s:s, s:o, s:I, s:o, s:f, s:O, s:o, s:O, s:O?, s:o?}", "date",
                                     out_time(time(NULL)), "result", result, "verdict", out_text(verdict), "seed",
                                     (json_int_t)run->seed, "command", again, "seconds", seconds, "machine", machine,
                                     "gpu_note", gpu_note(run, machine), "suites", run->suites, "bench", run->bench,
                                     "bench_missing", run->bench ? NULL : out_text(run->bench_missing)));
    return document;
}

/* With as many digits as files have, so that the page that 'epkit report' makes of them is the same. Consumes it. */
static json_t *as_written(json_t *document)
{
    char *text = json_dumps(document, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_t *written = json_loads(text, 0, NULL);

    free(text);
    json_decref(document);
    return written;
}

/* The text table: the matrices, then the measurements with the most tokens. */
static void print_table(const struct run *run)
{
    static const struct out_column columns[] = {
        {"WHAT", "what", 0, 0},
        {"RANKS", "ranks", 0, 0},
        {"RESULT", "result", 0, 0},
    };
    json_t *rows = json_array();
    const json_t *last = bench_largest(json_object_get(run->bench, "rows"), "dispatch");
    char text[128];

    for (int part = 0; part < N_PARTS; part++) {
        char where[32] = "";

        if (parts[part].nodes > 1)
            snprintf(where, sizeof(where), " on %d nodes", parts[part].nodes);
        suite_summary(&run->results[part], text, sizeof(text));
        json_array_append_new(rows,
                              json_pack("{s:o, s:i, s:s}", "what", json_sprintf("%s%s", parts[part].matrix, where),
                                        "ranks", run->specs[part].nranks, "result", text));
    }
    FOR_JSON (item, json_object_get(run->bench, "rows")) {
        if (!json_equal(json_object_get(item, "tokens"), json_object_get(last, "tokens")))
            continue;
        describe_rate(item, text, sizeof(text));
        json_array_append_new(rows,
                              json_pack("{s:o, s:O, s:s}", "what",
                                        json_sprintf("%s %s, %d tokens", json_string_value(json_object_get(item, "op")),
                                                     json_string_value(json_object_get(item, "type")),
                                                     (int)json_integer_value(json_object_get(item, "tokens"))),
                                        "ranks", json_object_get(item, "ranks"), "result", text));
    }
    OUT_PRINT(columns, rows);
}

static int conclude(const struct cmd *cmd, const struct run_options *options, const struct run *run, json_t *machine,
                    double seconds)
{
    char verdict[512], sentence[256];
    json_t *document;
    bool written;

    make_verdict(run, verdict, sizeof(verdict));
    document = as_written(make_document(cmd, run, machine, verdict, seconds));
    progress_update(0, 0, "writing the report");
    written = report_write_results(options->output, document, run->code, seconds);
    progress_stop();
    if (options->json) {
        if (out_json(document) != 0)
            return CMD_FAILED;
        return written ? run->code : ranks_worse(run->code, CMD_FAILED);
    }
    out_verdict(run->code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", verdict);
    out_line("%s", "");
    print_table(run);
    machine_summary(machine, sentence, sizeof(sentence));
    out_line("\n%s; seed %" PRIu64 ", %.0f s.", sentence, run->seed, seconds);
    out_line("%s", json_string_value(json_object_get(document, "gpu_note")));
    json_decref(document);
    if (written) {
        char folder[4096];

        text_clean(options->output, folder, sizeof(folder));
        out_line("Report: %s/report.html (and report.json)", folder);
    }
    return written ? run->code : ranks_worse(run->code, CMD_FAILED);
}

/* Otherwise each rank of a launcher would run everything, and write the same report. */
static int check_alone(const struct cmd *cmd)
{
    char text[512];

    if (!ranks_env_is_launched() && !ranks_env_is_tcp(false, false))
        return CMD_FINE;
    ranks_env_print(text, sizeof(text));
    return cmd_usage(
        cmd,
        "it starts ranks itself, and %s say that this is one of several: use epkit test or epkit bench, or unset them",
        *text ? text : "RANK and WORLD_SIZE");
}

static int cmd_run(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct run_options *options = call->options;
    struct run run = {.seed = (uint64_t)options->seed, .quick = options->quick, .network = options->network};
    uint64_t start_ns = ep_now_ns();
    json_t *machine;
    int result;

    CMD_TRY(check_alone(cmd));
    CMD_TRY(group_check_environment(cmd, true, options->network == 0));
    if (!report_check(options->output))
        return CMD_USAGE;
    if (!cmd_given(cmd, call, "seed"))
        run.seed = group_draw_seed();
    run.suites = json_array();
    progress_start("run");
    progress_update(0, 0, "reading the machine");
    machine = machine_describe();
    result = run_suites(&run);
    if (result == CMD_FINE && run.code == CMD_FINE)
        result = run_bench(&run, (int)json_integer_value(json_object_get(machine, "cores")));
    else if (result == CMD_FINE)
        run.bench_missing = "not measured, because a test failed";
    progress_update(0, 0, "writing the report");
    if (result == CMD_FINE)
        result = conclude(cmd, options, &run, machine, (double)(ep_now_ns() - start_ns) / 1e9);
    for (int i = 0; i < N_PARTS; i++)
        suite_done(&run.results[i]);
    json_decref(run.suites);
    json_decref(run.bench);
    json_decref(machine);
    return result;
}

const struct cmd command_run = {
    .name = "run",
    .args = "",
    .summary = "check and measure everything here, and write a report",
    .description =
        "Reports in one sentence whether epkit works on this machine and how fast it is. Reads the machine, runs the "
        "three matrices of 'epkit test' (24 cases on one node, 32 on two emulated nodes, 32 of the low-latency "
        "operations), measures dispatch and combine with memcpy of the same bytes as baseline, and writes a report.\n\n"
        "On a machine with GPUs everything on one node runs on them, with one rank per GPU, if the CUDA backend can "
        "use all of them together ('epkit test --help'); if not, a warning and the report say why. EPKIT_BACKEND "
        "selects the backend. The ranks are forked, so MPI_Alltoallv is not measured; 'mpirun -n 8 epkit bench' "
        "measures it.\n\n"
        "The report is a run folder, which 'epkit report' reads: run.json with the results, report.html, which needs no "
        "other file, and report.json with the same data. Each file is written completely or not at all.\n\n"
        "Takes less than two minutes on two cores.",
    .options = run_table,
    .options_bytes = sizeof(struct run_options),
    .examples =
        {
            {"epkit run", "Check this machine. The report is in the folder report."},
            {"epkit run --quick", "A check that takes seconds, on small rows."},
            {"epkit run --output /tmp/node17 --json | jq -r .verdict", "Only the verdict, and a report elsewhere."},
        },
    .exits =
        {
            {CMD_FINE, "everything passed, and the report was written"},
            {CMD_FAILED, "a case, a measurement or the report failed"},
            {CMD_USAGE, "usage error, or the folder of the report cannot be written; no rank was started"},
            {CMD_UNSUPPORTED, "the library does not support this on this machine"},
        },
    .run = cmd_run,
};
