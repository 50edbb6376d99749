/* SPDX-License-Identifier: Apache-2.0 */
#include "check/cases.h"

#include "check/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Exit codes of a job, as of a command. */
enum { JOB_FINE = 0, JOB_FAILED = 1, JOB_USAGE = 2, JOB_UNSUPPORTED = 4 };

static const struct check_matrix *const matrices[] = {&check_matrix_intranode, &check_matrix_internode,
                                                      &check_matrix_lowlatency};

const char *const check_matrices[] = {"intranode", "internode", "lowlatency", NULL};

struct tally {
    int passed, failed;
};

/* All ranks find the same error in the parameters: rank 0 reports it. */
static int reject_parameters(struct check_run *run, const char *text)
{
    if (run->ctx->rank == 0)
        ranks_emit(run->ctx, json_pack("{s:s, s:i, s:s, s:s, s:s, s:s}", "event", "error", "rank", 0, "status",
                                       ep_status_name(EP_E_ARG), "what", "reading the parameters of the test", "text",
                                       text, "hint", ""));
    return JOB_USAGE;
}

static const struct check_matrix *find_matrix(const char *name)
{
    for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]); i++)
        if (!strcmp(matrices[i]->name, name))
            return matrices[i];
    return NULL;
}

/* Reads the parameters into run and spec. */
static bool read_parameters(struct check_run *run, const json_t *json, struct routing_spec *ret_spec,
                            struct check_error *error)
{
    struct check_parameters *parameters = &run->parameters;
    const char *matrix = NULL, *dtype = "all", *routing = "uniform";
    struct routing_spec spec = {.n_ranks = run->ctx->nranks, .n_tokens = -1, .topk = -1};
    const json_t *symmetric = NULL;
    json_int_t seed = 1;
    int no_partial_reduce = 0;
    json_error_t reason;

    parameters->hidden = 2048;
    spec.n_experts = 8 * spec.n_ranks;
    if (json_unpack_ex((json_t *)json, &reason, 0, "{s:s, s?i, s?i, s?i, s?i, s?s, s?I, s?s, s?i, s?b, s?o}", "matrix",
                       &matrix, "tokens", &spec.n_tokens, "hidden", &parameters->hidden, "topk", &spec.topk, "experts",
                       &spec.n_experts, "dtype", &dtype, "seed", &seed, "routing", &routing, "only", &parameters->only,
                       "sum_once", &no_partial_reduce, "symmetric", &symmetric) != 0)
        return check_fail(error, "%s", reason.text);
    parameters->matrix = matrix;
    parameters->no_partial_reduce = no_partial_reduce != 0;
    parameters->seed = spec.seed = (uint64_t)seed;
    parameters->bf16 = !strcmp(dtype, "all") || !strcmp(dtype, "bf16");
    parameters->fp8 = !strcmp(dtype, "all") || !strcmp(dtype, "fp8");
    parameters->memory = json_is_true(symmetric)    ? CHECK_SYMMETRIC
                         : json_is_false(symmetric) ? CHECK_ORDINARY
                                                    : CHECK_ALTERNATE;
    if (!parameters->bf16 && !parameters->fp8)
        return check_fail(error, "dtype '%s' is none of all, bf16, fp8", dtype);
    if (parameters->hidden < 1 || parameters->hidden > EP_MAX_HIDDEN)
        return check_fail(error, "hidden %d is not within 1 .. %d", parameters->hidden, EP_MAX_HIDDEN);
    if (routing_find(routing)) {
        spec.kind = routing_find(routing)->kind;
    } else {
        spec.kind = ROUTING_FILE;
        spec.path = routing;
    }
    if (spec.n_tokens < 0)
        spec.n_tokens = spec.kind == ROUTING_FILE ? 0 : 128;
    if (spec.topk < 0)
        spec.topk = spec.kind == ROUTING_FILE ? 0 : 8;
    *ret_spec = spec;
    return true;
}

static bool make_group(struct check_run *run, const struct routing_spec *spec, struct check_error *error)
{
    struct routing *routing = NULL;
    bool ok;

    if (!routing_new(spec, &routing, error))
        return false;
    ok = reference_group_init(routing, run->ctx->nnodes > 1 ? run->ctx->nnodes : 1, &run->group, error);
    routing_free(routing);
    for (int rank = 0; ok && rank < run->group.n_ranks; rank++)
        if (run->group.n_tokens[rank] > run->n_tokens)
            run->n_tokens = run->group.n_tokens[rank];
    return ok;
}

static bool is_wanted(const struct check_run *run, const struct check_matrix *matrix, int index)
{
    char name[CHECK_NAME_BYTES];

    return matrix->describe(run, index, name) && (!run->parameters.only || run->parameters.only == index + 1);
}

/* Reports a failed call of the library and aborts the group, so that no rank waits for this one. `name`: of the case,
 * or
 * "". */
static int fail_call(struct check_run *run, const char *name, ep_status status)
{
    char what[256];

    snprintf(what, sizeof(what), "%s test%s%s: %s: %s", run->parameters.matrix, *name ? ", " : "", name, run->phase,
             run->call);
    ranks_emit_error(run->ctx, status, what);
    ep_comm_abort(run->ctx->comm);
    return status == EP_E_UNSUPPORTED ? JOB_UNSUPPORTED : JOB_FAILED;
}

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* The result of the group: the mismatch of the lowest rank that has one, and the number of others. */
static bool summarise_verdicts(const struct check_run *run, const struct check_verdict *verdicts, char *ret_detail,
                               size_t bytes)
{
    int n_failed = 0, n;

    for (int rank = run->ctx->nranks - 1; rank >= 0; rank--) {
        if (!verdicts[rank].failed)
            continue;
        n_failed++;
        n = snprintf(ret_detail, bytes, "rank %d: %.*s", rank, (int)sizeof(verdicts[rank].text), verdicts[rank].text);
        if (n_failed > 1 && n > 0 && (size_t)n < bytes)
            snprintf(ret_detail + n, bytes - (size_t)n, " (and on %d more)", n_failed - 1);
    }
    return n_failed == 0;
}

static void emit_case(struct check_run *run, const struct check_matrix *matrix, int index, const char *name,
                      bool passed, const char *detail, double ms)
{
    json_t *event = json_pack("{s:s, s:s, s:i, s:i, s:s, s:b, s:f}", "event", "case", "matrix", matrix->name, "index",
                              index + 1, "count", matrix->count, "name", name, "passed", passed, "ms", ms);

    if (!passed)
        json_object_set_new(event, "detail", json_string(detail));
    ranks_emit(run->ctx, event);
}

/* Runs one case on this rank, then gathers the results of all ranks. */
static ep_status run_case(struct check_run *run, const struct check_matrix *matrix, void *state, int index,
                          struct check_verdict *verdicts, struct tally *tally)
{
    char name[CHECK_NAME_BYTES], detail[384] = "";
    double begin = now_ms();
    ep_status status;
    bool passed;

    matrix->describe(run, index, name);
    memset(&run->verdict, 0, sizeof(run->verdict));
    run->phase = "beginning";
    status = matrix->run(run, state, index);
    if (status != EP_OK)
        return status;
    run->phase = "gathering results";
    CHECK_CALL(run, ep_comm_allgather, run->ctx->comm, &run->verdict, sizeof(run->verdict), verdicts);
    passed = summarise_verdicts(run, verdicts, detail, sizeof(detail));
    *(passed ? &tally->passed : &tally->failed) += 1;
    if (run->ctx->rank == 0)
        emit_case(run, matrix, index, name, passed, detail, now_ms() - begin);
    return EP_OK;
}

static int run_matrix(struct check_run *run, const struct check_matrix *matrix)
{
    struct check_verdict *verdicts = calloc((size_t)run->ctx->nranks, sizeof(*verdicts));
    char name[CHECK_NAME_BYTES] = ""; /* of the current case */
    struct tally tally = {0};
    void *state = NULL;
    ep_status status = EP_E_MEMORY, end_status;

    run->phase = "preparation";
    run->call = "calloc";
    if (verdicts)
        status = matrix->begin(run, &state);
    for (int index = 0; index < matrix->count && status == EP_OK; index++) {
        if (!is_wanted(run, matrix, index))
            continue;
        matrix->describe(run, index, name);
        status = run_case(run, matrix, state, index, verdicts, &tally);
    }
    free(verdicts);
    if (status != EP_OK) {
        int code = fail_call(run, name, status);

        if (state)
            matrix->end(run, state, false);
        return code;
    }
    run->phase = "end";
    end_status = matrix->end(run, state, true);
    if (end_status != EP_OK)
        return fail_call(run, "", end_status);
    if (run->ctx->rank == 0)
        ranks_emit(run->ctx, json_pack("{s:s, s:s, s:i, s:i, s:i, s:I}", "event", "matrix", "matrix", matrix->name,
                                       "passed", tally.passed, "failed", tally.failed, "total",
                                       tally.passed + tally.failed, "seed", (json_int_t)run->parameters.seed));
    return tally.failed ? JOB_FAILED : JOB_FINE;
}

int check_job(struct ranks_ctx *ctx, const json_t *parameters)
{
    struct check_run run = {.ctx = ctx};
    const struct check_matrix *matrix;
    struct check_error error = {""};
    struct routing_spec spec;
    int code;

    if (!read_parameters(&run, parameters, &spec, &error))
        return reject_parameters(&run, error.text);
    matrix = find_matrix(run.parameters.matrix);
    if (!matrix) {
        check_fail(&error, "there is no matrix '%s'", run.parameters.matrix);
        return reject_parameters(&run, error.text);
    }
    if (matrix->validate(&run))
        return reject_parameters(&run, matrix->validate(&run));
    if (run.parameters.only < 0 || run.parameters.only > matrix->count) {
        check_fail(&error, "case %d: the matrix %s has cases 1 to %d", run.parameters.only, matrix->name,
                   matrix->count);
        return reject_parameters(&run, error.text);
    }
    if (!make_group(&run, &spec, &error))
        code = reject_parameters(&run, error.text);
    else
        code = run_matrix(&run, matrix);
    reference_group_done(&run.group);
    return code;
}
