/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_bench.c - epkit bench: measures dispatch and combine, with the baselines memcpy and MPI_Alltoallv. */
#include "bench.h"

#include "bench_host.h"
#include "common/ranks/group_options.h"
#include "common/ranks/ranks_internal.h"

#include <stdio.h>
#include <stdlib.h>

struct bench_options {
    struct group_options group; /* its ranks: the current entry of the list */
    struct opt_list ranks, tokens, only;
    int64_t hidden, topk, experts, ll_tokens, iters, seed, sms;
    int dtype;
    const char *routing;
    bool engine_calls, no_partial_reduce, no_baselines, quick, json;
};

static const char *const dtypes[] = {"all", "bf16", "fp8", NULL};
static const unsigned dtype_masks[] = {BENCH_BF16 | BENCH_FP8, BENCH_BF16, BENCH_FP8};
static const char *const ops[] = {"dispatch", "combine", "plan", "ll", NULL}; /* bits of BENCH_ALL */

/* clang-format off */
static const struct opt bench_table[] = {
    {"only", 'o', "LIST", OPT_LIST, offsetof(struct bench_options, only), .choices = ops,
     .help = "measure only these: dispatch, combine, plan (its creation, and a new routing's first dispatch), ll (low "
             "latency)", .heading = "Measurements"},
    {"engine-calls", 0, NULL, OPT_FLAG, offsetof(struct bench_options, engine_calls),
     .help = "measure instead how engines call: ordinary memory beside symmetric, expanded layout beside that by rank, and "
             "the routing of an earlier call (cached), a new one whose counts stay on the device (update), or that the host "
             "waits for (plan); single calls, and layers of dispatch and combine queued one behind another"},
    {"tokens", 't', "LIST", OPT_LIST, offsetof(struct bench_options, tokens), .min = 1, .max = 1 << 20,
     .value = "512", .help = "tokens of each rank; each number is measured"},
    {"hidden", 'H', "N", OPT_INT, offsetof(struct bench_options, hidden), .min = 8, .max = EP_MAX_HIDDEN,
     .value = "7168", .help = "elements of a row"},
    {"topk", 'k', "N", OPT_INT, offsetof(struct bench_options, topk), .min = 1, .max = EP_MAX_TOPK, .value = "8",
     .help = "experts that a token selects"},
    {"experts", 'e', "N", OPT_INT, offsetof(struct bench_options, experts), .min = 1, .max = EP_MAX_EXPERTS,
     .value = "256", .help = "experts of the whole group"},
    {"ll-tokens", 0, "N", OPT_INT, offsetof(struct bench_options, ll_tokens), .min = 1, .max = 4096, .value = "128",
     .help = "tokens of each rank, low latency"},
    {"no-partial-reduce", 0, NULL, OPT_FLAG, offsetof(struct bench_options, no_partial_reduce),
     .help = "low-latency combine: send each expert's row to the token's rank, which sums them "
             "(EP_LL_NO_PARTIAL_REDUCE), instead of one partial sum for each token and rank"},
    {"dtype", 'd', "TYPE", OPT_CHOICE, offsetof(struct bench_options, dtype), .choices = dtypes, .value = "all",
     .help = "element type of the dispatched rows"},
    {"routing", 0, "NAME", OPT_STRING, offsetof(struct bench_options, routing), .value = "uniform",
     .help = "which experts the tokens select: uniform, zipf, grouped, one, dropped, empty"},
    {"seed", 's', "N", OPT_INT, offsetof(struct bench_options, seed), .min = 0, .max = INT64_MAX - BENCH_MAX_ITERS,
     .value = "1", .help = "of routing and contents"},
    {"iters", 'i', "N", OPT_INT, offsetof(struct bench_options, iters), .min = 1, .max = BENCH_MAX_ITERS,
     .help = "rounds of each measurement; default: as many as take 0.3 s, at least 5"},
    {"sms", 0, "N", OPT_INT, offsetof(struct bench_options, sms), .min = 0, .max = 1024, .value = "0",
     .help = "multiprocessors of an operation on GPUs; 0: default of the library"},
    {"no-baselines", 0, NULL, OPT_FLAG, offsetof(struct bench_options, no_baselines),
     .help = "do not measure baselines (memcpy, MPI_Alltoallv, copy engine, raw rows); needs less memory"},
    {"quick", 'q', NULL, OPT_FLAG, offsetof(struct bench_options, quick),
     .help = "a small shape and few rounds, to check that it works"},
    OPT_JSON_ROW(struct bench_options, json),
    {"ranks", 'r', "LIST", OPT_LIST, offsetof(struct bench_options, ranks), .min = 1, .max = EP_MAX_RANKS,
     .value = "8", .help = "numbers of ranks; each is measured", .heading = "Group"},
    {"nodes", 'n', "N", OPT_INT, offsetof(struct bench_options, group.nodes), .min = 1, .max = EP_MAX_RANKS,
     .help = "nodes that the ranks are spread over; must divide the ranks. Default: one, or the hosts of ranks that a "
             "launcher started"},
    {"boot", 'b', "HOW", OPT_CHOICE, offsetof(struct bench_options, group.boot), .choices = group_boots,
     .help = "how ranks are started: " GROUP_BOOT_HELP},
    GROUP_RANK_OPTIONS(struct bench_options, group, "120"),
    {0},
};
/* clang-format on */

static void default_int(const struct cmd *cmd, const struct cmd_call *call, const char *name, int64_t value,
                        int64_t *option)
{
    if (!cmd_given(cmd, call, name))
        *option = value;
}

static void default_list(const struct cmd *cmd, const struct cmd_call *call, const char *name, int64_t value,
                         struct opt_list *option)
{
    if (!cmd_given(cmd, call, name))
        *option = (struct opt_list){.n = 1, .values = {value}};
}

/* Defaults of --quick, and those that depend on this machine, for options that were not given. */
static void fill_defaults(const struct cmd *cmd, const struct cmd_call *call, struct bench_options *options)
{
    int gpu_ranks;

    if (options->quick) {
        default_list(cmd, call, "ranks", 4, &options->ranks);
        default_list(cmd, call, "tokens", 64, &options->tokens);
        default_int(cmd, call, "hidden", 1024, &options->hidden);
        default_int(cmd, call, "experts", 64, &options->experts);
        default_int(cmd, call, "ll-tokens", 16, &options->ll_tokens);
        default_int(cmd, call, "iters", 5, &options->iters);
    }
    gpu_ranks = ranks_world_rank() >= 0 ? ranks_world_size() : group_gpu_ranks(&options->group);
    if (gpu_ranks)
        default_list(cmd, call, "ranks", gpu_ranks, &options->ranks);
}

static int make_request(const struct cmd *cmd, const struct bench_options *options, struct bench_request *ret_request)
{
    const struct routing_name *routing = routing_find(options->routing);
    struct bench_request request = {
        .types = dtype_masks[options->dtype],
        .seed = (uint64_t)options->seed,
        .n_token_counts = (int)options->tokens.n,
        .ll_tokens = (int)options->ll_tokens,
        .hidden = (int)options->hidden,
        .topk = (int)options->topk,
        .experts = (int)options->experts,
        .iters = (int)options->iters,
        .baselines = !options->no_baselines,
        .sms = (int)options->sms,
        .no_partial_reduce = options->no_partial_reduce,
    };

    if (!routing)
        return cmd_usage(cmd, "--routing %s: there is no routing of that name", options->routing);
    request.routing = routing->kind;
    for (size_t i = 0; i < options->tokens.n; i++)
        request.tokens[i] = (int)options->tokens.values[i];
    for (size_t i = 0; i < options->only.n; i++)
        request.ops |= 1u << options->only.values[i];
    if (options->only.n == 0)
        request.ops = options->engine_calls ? BENCH_ENGINE : BENCH_ALL;
    else if (options->engine_calls)
        return cmd_usage(cmd, "--engine-calls has measurements of its own: give it without --only");
    *ret_request = request;
    return CMD_FINE;
}

/* The specs of all groups, before the first is started, so that usage errors are reported at once. */
static int make_specs(const struct cmd *cmd, const struct cmd_call *call, const struct bench_options *options,
                      const struct bench_request *request, struct ranks_spec *ret_specs)
{
    for (size_t i = 0; i < options->ranks.n; i++) {
        struct group_options group = options->group;
        char buffer[256];
        const char *wrong;

        group.ranks = options->ranks.values[i];
        if (!group.nodes)
            group.nodes = ranks_world_nodes();
        CMD_TRY(group_spec(cmd, call, &group, request->seed, &ret_specs[i]));
        wrong = bench_check(request, ret_specs[i].nranks, buffer, sizeof(buffer));
        if (wrong)
            return cmd_usage(cmd, "%s", wrong);
    }
    if (group_choose_backend(&options->group, ret_specs, options->ranks.n))
        group_warn_host(&ret_specs[0]);
    return CMD_FINE;
}

static void print_text(const struct bench_options *options, const json_t *results, const json_t *machine)
{
    const json_t *rows = json_object_get(results, "rows");
    const char *device = json_string_value(json_object_get(results, "device"));
    const char *mpi = json_string_value(json_object_get(results, "mpi"));
    bool gpus = json_object_get(json_array_get(rows, 0), "sms");
    char sentence[512], where[256];

    bench_verdict(rows, sentence, sizeof(sentence));
    machine_summary(machine, where, sizeof(where));
    out_verdict(OUT_PLAIN, "%s, %s.", device, sentence);
    bench_print_rows(stdout, rows, device, OUT_TABLE);
    bench_print_notes(rows, json_object_get(results, "memory"));
    out_line("All results verified. GB/s are of one rank. Machine: %s.", where);
    if (options->no_baselines || options->engine_calls)
        return;
    if (gpus) {
        out_line("%s", "Time: between two events in the stream, slowest rank. Queued: after other work, which flushes "
                       "the cache and hides the launch. Copy engine: the same bytes from all to all.");
        return;
    }
    if (mpi)
        out_line("MPI_Alltoallv of %s: a naive baseline that packs and sums rows itself.", mpi);
    else
        out_line("No column for MPI_Alltoallv: mpirun has not started the ranks, as in mpirun -n 8 epkit bench.");
}

static int print_json(const struct cmd *cmd, const struct bench_options *options, const struct bench_request *request,
                      const struct ranks_spec *specs, const json_t *results, json_t *machine, json_t *load)
{
    json_t *document = out_document(cmd->name);
    json_t *parameters = bench_request_to_json(request);
    json_t *ranks = json_array();
    char sentence[512];

    for (size_t i = 0; i < options->ranks.n; i++)
        json_array_append_new(ranks, json_integer(specs[i].nranks));
    json_object_del(parameters, "bits");
    json_object_update_new(parameters, json_pack("{s:o, s:i, s:s, s:s, s:s, s:i, s:s}", "ranks", ranks, "nodes",
                                                 specs[0].nnodes, "boot", group_boots[specs[0].boot], "backend",
                                                 specs[0].backend, "backend_why", specs[0].backend_why, "channels",
                                                 specs[0].channels, "partial", group_partials[options->group.partial]));
    bench_verdict(json_object_get(results, "rows"), sentence, sizeof(sentence));
    json_object_update_new(
        document, json_pack("{s:s, s:O, s:O, s:O, s:O, s:O, s:o, s:o, s:O, s:O}", "verdict", sentence, "device",
                            json_object_get(results, "device"), "network", json_object_get(results, "network"), "mpi",
                            json_object_get(results, "mpi"), "machine", machine, "load_before", load, "build",
                            bench_provenance(), "parameters", parameters, "rows", json_object_get(results, "rows"),
                            "memory", json_object_get(results, "memory")));
    return out_json(document);
}

static int print(const struct cmd *cmd, const struct bench_options *options, const struct bench_request *request,
                 const struct ranks_spec *specs, const json_t *results, json_t *load)
{
    json_t *machine = machine_describe();
    int result = 0;

    if (options->json)
        result = print_json(cmd, options, request, specs, results, machine, load);
    else
        print_text(options, results, machine);
    json_decref(machine);
    return result == 0 ? CMD_FINE : CMD_FAILED;
}

/* --- the command --- */

/* Measures each group after the other. Takes the load of the machine first, before its own ranks add to it. */
static int measure(const struct cmd *cmd, const struct bench_options *options, const struct bench_request *request,
                   const struct ranks_spec *specs)
{
    double average;
    json_t *load = getloadavg(&average, 1) == 1 ? json_real(average) : json_null();
    json_t *results = NULL;
    int result = CMD_FINE;

    progress_start("bench");
    for (size_t i = 0; i < options->ranks.n && result == CMD_FINE; i++)
        result = bench_collect(&specs[i], request, &results);
    progress_stop();
    if (result == CMD_FINE)
        result = print(cmd, options, request, specs, results, load);
    json_decref(load);
    json_decref(results);
    return result;
}

static int cmd_bench(const struct cmd *cmd, const struct cmd_call *call)
{
    struct bench_options options = *(const struct bench_options *)call->options;
    struct ranks_spec specs[OPT_LIST_MAX] = {{0}};
    struct bench_request request = BENCH_REQUEST_INIT;

    fill_defaults(cmd, call, &options);
    CMD_TRY(make_request(cmd, &options, &request));
    CMD_TRY(make_specs(cmd, call, &options, &request, specs));
    return measure(cmd, &options, &request, specs);
}

const struct cmd command_bench = {
    .name = "bench",
    .args = "",
    .summary = "measure dispatch and combine, with memcpy and MPI_Alltoallv as baselines",
    .description =
        "Starts a group of ranks on this machine and measures dispatch, combine, the creation of plans and the "
        "low-latency operations on synthetic routings, after verifying their results.\n\n" GROUP_BACKEND_TEXT
        "All groups of one run use the same backend: that of the largest of --ranks.\n\n"
        "On GPUs the data is in device memory, and the baselines are: raw rows, which the same kernels move "
        "without plan and waits, and the copy engine. The time of a single operation includes its launch and the skew "
        "between the ranks; ll-pair is the time of one low-latency dispatch and combine in a sequence of such pairs, "
        "in which the ranks stay synchronised as in a decoder.\n\n"
        "On the host backend the baselines, measured alternately on the same ranks, are: memcpy of the bytes that a "
        "rank receives, and, if mpirun starts it, a naive dispatch and combine with MPI_Alltoallv. On a shared "
        "machine, or with fewer CPUs than ranks, quote the ratios to these baselines, not GB/s.\n\n"
        "The time of an operation is from the first rank's start to the last rank's end, the median over rounds; P10 "
        "and P90 are percentiles. Logical GB/s count all rows that a rank receives, as DeepEP does; wire GB/s count "
        "only rows sent to other ranks: one for each token and rank, or one for each token and expert in a low-"
        "latency combine with --no-partial-reduce; of low latency between nodes the network GB/s count rows alone. Rates may "
        "exceed that of memcpy: a row for several ranks is read once and written to each of them, while memcpy reads "
        "it each time.",
    .options = bench_table,
    .options_bytes = sizeof(struct bench_options),
    .examples =
        {
            {"epkit bench", "8 ranks with the shape of DeepSeek-V3."},
            {"epkit bench --tokens 64,256,1024,4096 --only dispatch,combine", "Scaling with the number of tokens."},
            {"epkit bench --ranks 2,4,8,16,32,64 --tokens 64", "Scaling with the number of ranks."},
            {"epkit bench --engine-calls --tokens 512,4096", "Layers as an engine queues them, with new routing."},
            {"epkit bench --nodes 2", "Two nodes."},
            {"epkit bench --iters 50 --json >record.json", "A record as JSON."},
        },
    .exits =
        {
            {CMD_FINE, "measured, and all results were correct"},
            {CMD_FAILED, "a rank failed, or a result was wrong"},
            {CMD_USAGE, "wrong usage; no rank was started"},
            {CMD_UNSUPPORTED, "the library cannot do this on this machine"},
        },
    .run = cmd_bench,
    .flags = CMD_RANKS,
};
