/* SPDX-License-Identifier: Apache-2.0 */
#include "cases.h"

#include "check_run.h"
#include "common/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Exit codes of a job, as of a command. */
enum { JOB_FINE = 0, JOB_FAILED = 1, JOB_USAGE = 2, JOB_UNSUPPORTED = 4 };

static const struct check_matrix *const matrices[] = {&check_matrix_intranode, &check_matrix_internode,
                                                      &check_matrix_lowlatency};

const char *const check_matrices[] = {"intranode", "internode", "lowlatency", NULL};

/* All ranks find the same error in the parameters: rank 0 reports it. */
static int reject_parameters(struct check_run *run, const char *text)
{
    if (run->ctx->rank == 0)
        ranks_emit(run->ctx, json_pack("{s:s, s:i, s:s, s:s, s:s, s:s}", "event", "error", "rank", 0, "status",
                                       ep_status_name(EP_E_ARG), "what", "reading the parameters of the test", "text",
                                       text, "hint", ""));
    return JOB_USAGE;
}

const struct check_matrix *check_matrix_find(const char *name)
{
    for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]); i++)
        if (!strcmp(matrices[i]->name, name))
            return matrices[i];
    return NULL;
}

/* Finds the matrix and checks the parameters that depend on it. */
static bool choose_matrix(struct check_run *run, const char *matrix_name, struct check_error *error)
{
    const struct check_matrix *matrix = check_matrix_find(matrix_name);
    int only = run->parameters.only;

    if (!matrix)
        return check_fail(error, "there is no matrix '%s'", matrix_name);
    run->parameters.matrix = matrix;
    if (matrix->validate(run))
        return check_fail(error, "%s", matrix->validate(run));
    if (only < 0 || only > matrix->count)
        return check_fail(error, "case %d: the matrix %s has cases 1 to %d", only, matrix->name, matrix->count);
    return true;
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
                       "no_partial_reduce", &no_partial_reduce, "symmetric", &symmetric) != 0)
        return check_fail(error, "%s", reason.text);
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
    return choose_matrix(run, matrix, error);
}

static bool make_group(struct check_run *run, const struct routing_spec *spec, struct check_error *error)
{
    struct routing *routing;
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

/* Reports a failed call of the library and aborts the group, so that no rank waits for this one. */
static int fail_call(struct check_run *run, ep_status status)
{
    char what[256];

    snprintf(what, sizeof(what), "%s test%s%s: %s: %s", run->parameters.matrix->name, *run->name ? ", " : "", run->name,
             run->phase, run->call);
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

static void emit_case(struct check_run *run, int index, bool passed, const char *detail, double ms)
{
    json_t *event = json_pack("{s:s, s:i, s:s, s:b, s:f}", "event", "case", "index", index + 1, "name", run->name,
                              "passed", passed, "ms", ms);

    if (!passed)
        json_object_set_new(event, "detail", json_string(detail));
    ranks_emit(run->ctx, event);
}

/* Runs one case on this rank, then gathers the results of all ranks. */
static ep_status run_case(struct check_run *run, void *state, int index, struct check_verdict *verdicts)
{
    char detail[384] = "";
    double begin = now_ms();
    bool passed;

    memset(&run->verdict, 0, sizeof(run->verdict));
    run->phase = "beginning";
    CHECK_TRY(run->parameters.matrix->run(run, state, index));
    run->phase = "gathering results";
    CHECK_CALL(run, ep_comm_allgather, run->ctx->comm, &run->verdict, sizeof(run->verdict), verdicts);
    passed = summarise_verdicts(run, verdicts, detail, sizeof(detail));
    run->n_failed += !passed;
    if (run->ctx->rank == 0)
        emit_case(run, index, passed, detail, now_ms() - begin);
    return EP_OK;
}

static ep_status run_cases(struct check_run *run, void **ret_state)
{
    const struct check_matrix *matrix = run->parameters.matrix;
    struct check_verdict *verdicts = memory_new((size_t)run->ctx->nranks, sizeof(*verdicts));
    int only = run->parameters.only;
    ep_status status;

    run->phase = "preparation";
    status = matrix->begin(run, ret_state);
    for (int index = 0; index < matrix->count && status == EP_OK; index++)
        if (matrix->describe(run, index, run->name) && (!only || only == index + 1))
            status = run_case(run, *ret_state, index, verdicts);
    free(verdicts);
    return status;
}

static int run_matrix(struct check_run *run)
{
    void *state = NULL;
    ep_status status = run_cases(run, &state), end_status;
    int code = status == EP_OK ? JOB_FINE : fail_call(run, status);

    run->phase = "end";
    *run->name = '\0';
    run->call = "ep_free";
    if (state)
        run->parameters.matrix->end(state);
    end_status = mirrors_free(&run->mirrors);
    if (status != EP_OK)
        return code;
    if (end_status != EP_OK)
        return fail_call(run, end_status);
    return run->n_failed ? JOB_FAILED : JOB_FINE;
}

int check_job(struct ranks_ctx *ctx, const json_t *parameters)
{
    struct check_run run = {.ctx = ctx, .mirrors = {.ctx = ctx, .poison = CHECK_POISON}};
    struct check_error error = {""};
    struct routing_spec spec;
    int code;

    if (read_parameters(&run, parameters, &spec, &error) && make_group(&run, &spec, &error))
        code = run_matrix(&run);
    else
        code = reject_parameters(&run, error.text);
    reference_group_done(&run.group);
    return code;
}
