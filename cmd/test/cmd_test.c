/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_test.c - epkit test MATRIX: the case matrices on a group of ranks. */
#include "cmd/test/check/cases.h"
#include "cmd/test/check/routings.h"
#include "common/output.h"
#include "common/ranks/group_options.h"
#include "common/ranks/ranks_internal.h"
#include "suite.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TOPK 8
#define EXPERTS_PER_RANK 8
#define DEFAULT_TOKENS 128

struct test_options {
    struct group_options group;
    int64_t tokens, hidden, topk, experts, seed, only, repeat;
    int dtype;
    const char *routing;
    bool no_partial_reduce, json;
};

static const char *const dtypes[] = {"all", "bf16", "fp8", NULL};

/* clang-format off */
static const struct opt test_table[] = {
    {"tokens", 't', "N", OPT_INT, offsetof(struct test_options, tokens), .min = 1, .max = 1 << 20,
     .help = "tokens of each rank; default: 128, or the number in a routing file", .heading = "Cases"},
    {"hidden", 'H', "N", OPT_INT, offsetof(struct test_options, hidden), .min = 8, .max = EP_MAX_HIDDEN,
     .value = "2048", .help = "elements of a row"},
    {"topk", 'k', "N", OPT_INT, offsetof(struct test_options, topk), .min = 1, .max = EP_MAX_TOPK,
     .help = "experts that a token selects; default: 8, or the number in a routing file"},
    {"experts", 'e', "N", OPT_INT, offsetof(struct test_options, experts), .min = 1, .max = EP_MAX_EXPERTS,
     .help = "experts of the whole group; default: 8 for each rank"},
    {"dtype", 'd', "TYPE", OPT_CHOICE, offsetof(struct test_options, dtype), .choices = dtypes, .value = "all",
     .help = "run only the cases of this element type"},
    {"routing", 0, "NAME|FILE", OPT_FILE, offsetof(struct test_options, routing), .value = "uniform",
     .help = "which experts the tokens select: uniform, zipf, grouped, one, dropped, empty, or a text file with the "
             "top-k indices of each token in a line, as numpy.savetxt(FILE, indices, fmt=\"%d\") writes them; with one "
             "such table for each rank, a blank line is between them"},
    {"no-partial-reduce", 0, NULL, OPT_FLAG, offsetof(struct test_options, no_partial_reduce),
     .help = "lowlatency: send each expert's row to the token's rank, which sums them (EP_LL_NO_PARTIAL_REDUCE)"},
    {"seed", 's', "N", OPT_INT, offsetof(struct test_options, seed), .min = 0, .max = SUITE_MAX_SEED,
     .help = "seed of all random choices; default: a random one, which is printed"},
    {"only", 'o', "N", OPT_INT, offsetof(struct test_options, only), .min = 1, .max = 1000,
     .help = "run only the case with this number"},
    {"repeat", 0, "N", OPT_INT, offsetof(struct test_options, repeat), .min = 1, .max = 1000000, .value = "1",
     .help = "run the matrix this many times, each time with the next seed"},
    OPT_JSON_ROW(struct test_options, json),
    GROUP_OPTIONS(struct test_options, group),
    {0},
};
/* clang-format on */

/* The default group of a matrix. */
struct test_default {
    const char *matrix;
    int64_t ranks, nodes;
    bool over_nodes; /* uses the nodes of the joined world */
};

static const struct test_default test_defaults[] = {
    {"intranode", 8, 1, false},
    {"internode", 8, 2, true},
    {"lowlatency", 4, 1, true},
};

static void fill_defaults(const struct test_options *given, const char *matrix, struct test_options *ret_options)
{
    *ret_options = *given;
    FOR_EACH (row, test_defaults, COUNT(test_defaults)) {
        if (strcmp(row->matrix, matrix) != 0)
            continue;
        if (!ret_options->group.nodes && row->over_nodes && ranks_world_nodes() > 1)
            ret_options->group.nodes = ranks_world_nodes();
        if (!ret_options->group.nodes)
            ret_options->group.nodes = row->nodes;
        if (!ret_options->group.ranks)
            ret_options->group.ranks = group_gpu_ranks(&ret_options->group);
        if (!ret_options->group.ranks)
            ret_options->group.ranks = row->ranks;
    }
}

static int check_matrix_nodes(const struct cmd *cmd, const char *matrix, int nnodes)
{
    if (strcmp(matrix, "internode") == 0 && nnodes < 2)
        return cmd_usage(cmd, "internode needs --nodes 2 or more");
    if (strcmp(matrix, "intranode") == 0 && nnodes > 1)
        return cmd_usage(cmd, "%s runs on one node only", matrix);
    return CMD_FINE;
}

static int make_request(const struct cmd *cmd, const struct cmd_call *call, const struct test_options *options,
                        const struct ranks_spec *spec, struct suite_request *ret_request)
{
    bool named = routing_find(options->routing) != NULL;
    struct suite_request request = {
        .matrix = call->args[0],
        .tokens = options->tokens || !named ? options->tokens : DEFAULT_TOKENS,
        .hidden = options->hidden,
        .topk = options->topk || !named ? options->topk : DEFAULT_TOPK,
        .experts = options->experts ? options->experts : (int64_t)EXPERTS_PER_RANK * spec->nranks,
        .dtype = dtypes[options->dtype],
        .seed = (uint64_t)options->seed,
        .routing = options->routing,
        .only = options->only,
        .no_partial_reduce = options->no_partial_reduce,
    };

    CMD_TRY(suite_check(cmd, &request, spec->nranks));
    if (request.no_partial_reduce && strcmp(request.matrix, "lowlatency") != 0)
        return cmd_usage(cmd, "--no-partial-reduce is for lowlatency, and %s has no low-latency combine",
                         request.matrix);
    *ret_request = request;
    return CMD_FINE;
}

/* The command that repeats one case of this run, or the whole run if `index` is 0. */
static void print_command(const struct cmd *cmd, const struct cmd_call *call, const struct suite_request *request,
                          int index, char *ret_text, size_t bytes)
{
    static const char *const replaced[] = {"seed", "only", "repeat", "json", NULL};
    const char *backend = getenv("EPKIT_BACKEND"), *network = getenv("EPKIT_NETWORK");
    struct text text = text_in(ret_text, bytes);

    /* The names accepted by group_check_environment() need no quotes. */
    if (backend && *backend && !cmd_given(cmd, call, "backend"))
        text_add(&text, "EPKIT_BACKEND=%s ", backend);
    if (network && *network && !cmd_given(cmd, call, "network"))
        text_add(&text, "EPKIT_NETWORK=%s ", network);
    if (ranks_world_rank() == 0 && ranks_world_is_mpirun())
        text_add(&text, "mpirun -n %d ", ranks_world_size());
    options_print(cmd, call, replaced, ret_text + text.n, bytes - text.n);
    text_append(ret_text, bytes, " --seed %" PRIu64, request->seed);
    if (!index)
        index = (int)request->only;
    if (index)
        text_append(ret_text, bytes, " --only %d", index);
}

/* Of all repetitions. */
struct totals {
    struct suite_result sum;
    json_t *commands;
};

static void add_result(const struct cmd *cmd, const struct cmd_call *call, const struct suite_request *request,
                       const struct suite_result *result, struct totals *totals)
{
    char command[2048];

    totals->sum.passed += result->passed;
    totals->sum.failed += result->failed;
    totals->sum.total += result->total;
    totals->sum.seconds += result->seconds;
    totals->sum.code = ranks_worse(totals->sum.code, result->code);
    FOR_JSON (row, result->cases) {
        json_object_set_new(row, "seed", json_integer((json_int_t)request->seed));
        if (json_is_true(json_object_get(row, "passed")))
            continue;
        print_command(cmd, call, request, (int)json_integer_value(json_object_get(row, "index")), command,
                      sizeof(command));
        json_array_append_new(totals->commands, out_text(command));
    }
    /* Repeating is of no use if the library does not support this machine. */
    if (json_array_size(result->errors) > 0 && result->code != CMD_UNSUPPORTED) {
        /* The whole run: the case in which the ranks failed is the one after the last reported one. */
        print_command(cmd, call, request, 0, command, sizeof(command));
        json_array_append_new(totals->commands, out_text(command));
    }
    json_array_extend(totals->sum.cases, result->cases);
    json_array_extend(totals->sum.errors, result->errors);
}

static int run_all(const struct cmd *cmd, const struct cmd_call *call, const struct test_options *options,
                   const struct ranks_spec *spec, struct suite_request *request, struct totals *totals)
{
    int all = suite_count(request) * (int)options->repeat;
    int interrupted = 0;

    for (int64_t i = 0; i < options->repeat && !interrupted; i++) {
        struct ranks_spec round = *spec;
        struct suite_result result;

        round.emulation.seed = request->seed;
        suite_run(&round, request, options->json ? 0 : SUITE_LINES, totals->sum.passed + totals->sum.failed, all,
                  &result);
        if (result.code > 128)
            interrupted = result.code;
        else
            add_result(cmd, call, request, &result, totals);
        suite_done(&result);
        if (totals->sum.code != CMD_FINE && totals->sum.code != CMD_FAILED)
            break;
        request->seed++;
    }
    return interrupted;
}

static void render_text(const struct ranks_spec *spec, const struct suite_request *request, uint64_t seed,
                        const struct totals *totals)
{
    char sentence[128], nodes[32] = "";

    suite_summary(&totals->sum, sentence, sizeof(sentence));
    if (spec->nnodes > 1)
        snprintf(nodes, sizeof(nodes), " on %d nodes", spec->nnodes);
    out_verdict(totals->sum.code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s: %s (%d rank%s%s, seed %" PRIu64 ", %.1f s)",
                request->matrix, sentence, spec->nranks, spec->nranks == 1 ? "" : "s", nodes, seed,
                totals->sum.seconds);
    if (json_array_size(totals->commands) == 0)
        return;
    out_line("To repeat what failed:");
    FOR_JSON (command, totals->commands)
        out_line("    %s", json_string_value(command));
}

static int render_json(const struct cmd *cmd, const struct ranks_spec *spec, const struct suite_request *request,
                       const struct totals *totals)
{
    json_t *document = out_document(cmd->name);

    json_object_update_new(document, suite_json(spec, request, &totals->sum));
    json_object_set(document, "repeat_commands", totals->commands);
    return out_json(document);
}

static int cmd_test(const struct cmd *cmd, const struct cmd_call *call)
{
    struct totals totals = {0};
    struct test_options options;
    struct suite_request request;
    struct ranks_spec spec;
    uint64_t seed;
    int result;

    fill_defaults(call->options, call->args[0], &options);
    if (!cmd_given(cmd, call, "seed"))
        options.seed = (int64_t)group_draw_seed();
    CMD_TRY(check_matrix_nodes(cmd, call->args[0], (int)options.group.nodes));
    CMD_TRY(group_spec(cmd, call, &options.group, (uint64_t)options.seed, &spec));
    CMD_TRY(make_request(cmd, call, &options, &spec, &request));
    if (group_choose_backend(&options.group, &spec, 1))
        group_warn_host(&spec);
    seed = request.seed;
    totals.sum.cases = json_array();
    totals.sum.errors = json_array();
    totals.commands = json_array();
    if (options.json || !out_is_terminal(stdout))
        progress_start("test");
    result = run_all(cmd, call, &options, &spec, &request, &totals);
    progress_stop();
    request.seed = seed;
    if (!result) {
        result = totals.sum.code;
        if (!options.json)
            render_text(&spec, &request, seed, &totals);
        else if (render_json(cmd, &spec, &request, &totals) != 0)
            result = CMD_FAILED;
    }
    suite_done(&totals.sum);
    json_decref(totals.commands);
    return result;
}

const struct cmd command_test = {
    .name = "test",
    .args = "intranode|internode|lowlatency",
    .min_args = 1,
    .max_args = 1,
    .arg_choices = check_matrices,
    .summary = "check dispatch and combine bit by bit, on a group of ranks",
    .description =
        "Starts a group of ranks on this machine, runs a matrix of cases on them and compares every received row with "
        "a reference that is computed without the library.\n\n"
        "intranode: 24 cases on one node (default: 8 ranks). internode: 32 cases over several nodes (default: 8 ranks "
        "on 2 nodes), by default over an emulated network, which can inject faults. lowlatency: 32 cases of the "
        "fixed-shape operations for decoding (default: 4 ranks), on one or several nodes.\n\n" GROUP_BACKEND_TEXT
        "On GPUs, data is generated on the host and copied to the GPU, and outputs are copied back and verified on the "
        "host. internode uses the host backend unless --backend cuda is given.\n\n"
        "All random choices depend on one seed, which is printed. If a case fails, the command that repeats it is "
        "printed.\n\n"
        "Under mpirun, the ranks are those of mpirun.",
    .options = test_table,
    .options_bytes = sizeof(struct test_options),
    .examples =
        {
            {"epkit test intranode", "All cases on 8 ranks of one node."},
            {"epkit test internode --ranks 16 --nodes 4 --net-delay-us 200 --net-reorder",
             "Four nodes over a network with delays and reordering."},
            {"epkit test intranode --routing routing.txt --experts 256",
             "The routing of a real model, saved by numpy.savetxt()."},
            {"epkit test lowlatency --seed 7 --only 3", "Case 3 again, with the same random choices."},
            {"mpirun -n 8 epkit test internode --nodes 2", "On the ranks of an MPI job."},
        },
    .exits =
        {
            {CMD_FINE, "all cases passed"},
            {CMD_FAILED, "a case or a rank failed"},
            {CMD_USAGE, "usage error; no rank was started"},
            {CMD_UNSUPPORTED, "the library does not support this on this machine"},
        },
    .run = cmd_test,
    .flags = CMD_RANKS,
};
