/* SPDX-License-Identifier: Apache-2.0 */
/* The launcher of ranks: events, exit codes, deaths and deadlines, with processes and with threads. */
#include "common/cmd.h"
#include "common/json.h"
#include "common/ranks/ranks_internal.h"

#include "base/error.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define NRANKS 4
#define BIG_EVENTS 50
#define BIG_BYTES 20000

/* --- jobs --- */

static int job_hello(struct ranks_ctx *ctx, const json_t *parameters)
{
    ranks_emit(ctx, json_pack("{s:s, s:i, s:O}", "event", "hello", "rank", ctx->rank, "echo",
                              json_object_get(parameters, "echo")));
    return CMD_FINE;
}

static int job_big(struct ranks_ctx *ctx, const json_t *parameters)
{
    char *text = malloc(BIG_BYTES + 1);

    (void)parameters;
    memset(text, 'a' + ctx->rank, BIG_BYTES);
    text[BIG_BYTES] = '\0';
    for (int i = 0; i < BIG_EVENTS; i++)
        ranks_emit(ctx, json_pack("{s:s, s:i, s:i, s:s}", "event", "big", "rank", ctx->rank, "i", i, "text", text));
    free(text);
    return CMD_FINE;
}

static int job_codes(struct ranks_ctx *ctx, const json_t *parameters)
{
    return (int)json_integer_value(json_array_get(json_object_get(parameters, "codes"), (size_t)ctx->rank));
}

static int job_errors(struct ranks_ctx *ctx, const json_t *parameters)
{
    (void)parameters;
    return ranks_emit_error(ctx, ep_fail(EP_E_VALUE, "test: row 3 holds a NaN"), "checking rows");
}

static int job_die(struct ranks_ctx *ctx, const json_t *parameters)
{
    if (ctx->rank == json_integer_value(json_object_get(parameters, "rank")))
        raise((int)json_integer_value(json_object_get(parameters, "signal")));
    return CMD_FINE;
}

static int job_leave(struct ranks_ctx *ctx, const json_t *parameters)
{
    (void)parameters;
    if (ctx->rank == 2)
        _exit(7);
    return CMD_FINE;
}

static int job_hang(struct ranks_ctx *ctx, const json_t *parameters)
{
    (void)parameters;
    while (ctx->rank == 1)
        pause();
    return CMD_FINE;
}

static int job_print(struct ranks_ctx *ctx, const json_t *parameters)
{
    (void)parameters;
    if (ctx->rank == 0) {
        printf("stray output\n");
        fflush(stdout);
    }
    return CMD_FINE;
}

const struct ranks_job ranks_jobs[] = {
    {"hello", job_hello}, {"big", job_big},   {"codes", job_codes}, {"errors", job_errors}, {"die", job_die},
    {"leave", job_leave}, {"hang", job_hang}, {"print", job_print}, {NULL, NULL},
};

/* --- order of the steps of a rank on a GPU --- */

static _Thread_local int bound_rank = -1;

void __wrap_gpu_bind(int rank);
ep_status __wrap_ep_comm_new(const ep_boot *boot, const ep_comm_config *config, ep_comm **ret_comm);
ep_status __real_ep_comm_new(const ep_boot *boot, const ep_comm_config *config, ep_comm **ret_comm);

void __wrap_gpu_bind(int rank)
{
    bound_rank = rank;
}

ep_status __wrap_ep_comm_new(const ep_boot *boot, const ep_comm_config *config, ep_comm **ret_comm)
{
    if (config->backend && strcmp(config->backend, "cuda") == 0)
        return ep_fail(EP_E_UNSUPPORTED, "rank %d was bound as %d", boot->rank, bound_rank);
    return __real_ep_comm_new(boot, config, ret_comm);
}

/* --- launcher --- */

struct received {
    json_t *events;
};

static void on_event(void *context, const json_t *event)
{
    struct received *received = context;

    json_array_append_new(received->events, json_deep_copy(event));
}

/* Runs a job; the caller frees ret_received, the events. Checks that no child is left. */
static int run(enum ranks_boot boot, const char *job, json_t *parameters, int timeout_ms, json_t **ret_received)
{
    struct ranks_spec spec = {
        .boot = boot, .nranks = NRANKS, .nnodes = 1, .timeout_ms = timeout_ms ? timeout_ms : 5000};
    struct received received = {json_array()};
    int code = ranks_run(&spec, job, parameters, on_event, &received);

    json_decref(parameters);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    *ret_received = received.events;
    return code;
}

/* The memory of a communicator is allocated on the NUMA node of the thread that creates it. */
static void test_bound_before_there_is_memory(void **state)
{
    struct ranks_spec spec = {
        .boot = *(const enum ranks_boot *)*state, .nranks = NRANKS, .nnodes = 1, .timeout_ms = 5000, .backend = "cuda"};
    json_t *parameters = json_object();
    struct received received = {json_array()};
    char text[64];

    assert_int_equal(ranks_run(&spec, "hello", parameters, on_event, &received), CMD_UNSUPPORTED);
    assert_int_equal(json_array_size(received.events), NRANKS);
    FOR_JSON (event, received.events) {
        int rank = (int)json_integer_value(json_object_get(event, "rank"));

        snprintf(text, sizeof(text), "rank %d was bound as %d", rank, rank);
        assert_string_equal(json_string_value(json_object_get(event, "text")), text);
    }
    json_decref(received.events);
    json_decref(parameters);
}

static int count_events(const json_t *received, const char *kind)
{
    int n = 0;

    FOR_JSON (event, received) {
        n += strcmp(json_string_value(json_object_get(event, "event")), kind) == 0;
    }
    return n;
}

/* The only error event. */
static const json_t *the_error(const json_t *received)
{
    assert_int_equal(count_events(received, "error"), 1);
    FOR_JSON (event, received) {
        if (strcmp(json_string_value(json_object_get(event, "event")), "error") == 0)
            return event;
    }
    return NULL;
}

static enum ranks_boot boot_of(void **state)
{
    return *(const enum ranks_boot *)*state;
}

static void test_events_and_parameters(void **state)
{
    bool seen[NRANKS] = {false};
    json_t *received;

    assert_int_equal(run(boot_of(state), "hello", json_pack("{s:s}", "echo", "a \"quoted\" line\n"), 0, &received),
                     CMD_FINE);
    assert_int_equal(json_array_size(received), NRANKS);
    FOR_JSON (event, received) {
        assert_string_equal(json_string_value(json_object_get(event, "echo")), "a \"quoted\" line\n");
        seen[json_integer_value(json_object_get(event, "rank"))] = true;
    }
    for (int rank = 0; rank < NRANKS; rank++)
        assert_true(seen[rank]);
    json_decref(received);
}

/* Concurrent long lines of all ranks arrive complete, and those of each rank in order. */
static void test_long_lines(void **state)
{
    int next[NRANKS] = {0};
    json_t *received;

    assert_int_equal(run(boot_of(state), "big", json_object(), 0, &received), CMD_FINE);
    assert_int_equal(json_array_size(received), NRANKS * BIG_EVENTS);
    FOR_JSON (event, received) {
        int rank = (int)json_integer_value(json_object_get(event, "rank"));
        const char *text = json_string_value(json_object_get(event, "text"));
        const char same[] = {(char)('a' + rank), '\0'};

        assert_int_equal(json_integer_value(json_object_get(event, "i")), next[rank]++);
        assert_int_equal(strlen(text), BIG_BYTES);
        assert_int_equal(strspn(text, same), BIG_BYTES);
    }
    json_decref(received);
}

static void test_worst_code(void **state)
{
    static const struct {
        int codes[NRANKS], worst;
    } rows[] = {
        {{0, 0, 0, 0}, CMD_FINE},  {{0, 3, 0, 0}, CMD_FINDINGS}, {{4, 3, 4, 4}, CMD_UNSUPPORTED},
        {{4, 4, 2, 0}, CMD_USAGE}, {{2, 4, 1, 3}, CMD_FAILED},   {{0, 0, 0, 99}, CMD_FAILED},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const int *codes = rows[i].codes;
        json_t *received;

        assert_int_equal(run(boot_of(state), "codes",
                             json_pack("{s:[i,i,i,i]}", "codes", codes[0], codes[1], codes[2], codes[3]), 0, &received),
                         rows[i].worst);
        assert_int_equal(json_array_size(received), 0);
        json_decref(received);
    }
}

static void test_errors_of_calls(void **state)
{
    json_t *received;

    assert_int_equal(run(boot_of(state), "errors", json_object(), 0, &received), CMD_FAILED);
    assert_int_equal(json_array_size(received), NRANKS);
    FOR_JSON (event, received) {
        assert_string_equal(json_string_value(json_object_get(event, "status")), "EP_E_VALUE");
        assert_string_equal(json_string_value(json_object_get(event, "what")), "checking rows");
        assert_string_equal(json_string_value(json_object_get(event, "text")), "test: row 3 holds a NaN");
        assert_true(strlen(json_string_value(json_object_get(event, "hint"))) > 0);
    }
    json_decref(received);
}

static void test_death_names_rank_and_signal(void **state)
{
    static const int signals[] = {SIGKILL, SIGTERM};
    const json_t *error;
    json_t *received;

    (void)state;
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        char expected[64];

        snprintf(expected, sizeof(expected), "killed by SIG%s (%s)", sigabbrev_np(signals[i]), strsignal(signals[i]));
        assert_int_equal(run(RANKS_FORK, "die", json_pack("{s:i, s:i}", "rank", 2, "signal", signals[i]), 0, &received),
                         CMD_FAILED);
        error = the_error(received);
        assert_int_equal(json_integer_value(json_object_get(error, "rank")), 2);
        assert_string_equal(json_string_value(json_object_get(error, "text")), expected);
        json_decref(received);
    }
}

static void test_early_exit(void **state)
{
    json_t *received;

    (void)state;
    assert_int_equal(run(RANKS_FORK, "leave", json_object(), 0, &received), CMD_FAILED);
    assert_int_equal(json_integer_value(json_object_get(the_error(received), "rank")), 2);
    assert_string_equal(json_string_value(json_object_get(the_error(received), "text")), "exit code 7");
    json_decref(received);
}

static void test_deadline(void **state)
{
    json_t *received;

    /* The launcher waits some seconds longer for the others once a rank has ended. */
    assert_int_equal(run(boot_of(state), "hang", json_object(), 3000, &received), CMD_FAILED);
    assert_int_equal(json_integer_value(json_object_get(the_error(received), "rank")), 1);
    assert_string_equal(json_string_value(json_object_get(the_error(received), "what")), "a rank did not finish");
    json_decref(received);
}

static void test_unknown_job(void **state)
{
    json_t *received;

    assert_int_equal(run(boot_of(state), "nonsense", json_object(), 0, &received), CMD_FAILED);
    assert_int_equal(count_events(received, "error"), NRANKS);
    json_decref(received);
}

/* Standard output is reserved for the data of the launcher. */
static void test_stray_output(void **state)
{
    char buffer[64] = "";
    json_t *received;
    int fds[2], saved = dup(STDOUT_FILENO);

    fflush(stdout);
    assert_int_equal(pipe(fds), 0);
    dup2(fds[1], STDOUT_FILENO);
    close(fds[1]);
    run(boot_of(state), "print", json_object(), 0, &received);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    assert_int_equal(read(fds[0], buffer, sizeof(buffer)), 0);
    close(fds[0]);
    json_decref(received);
}

static void test_spec_survives_json(void **state)
{
    static const struct ranks_spec spec = {
        .boot = RANKS_TCP,
        .nranks = 12,
        .nnodes = 3,
        .timeout_ms = 1234,
        .backend = "host",
        .emulation = {.seed = INT64_MAX, .delay_us = 2, .ring_bytes = 3, .split_bytes = 4, .reorder = 1, .flip_put = 5},
        .channels = 7,
        .partial_type = EP_BF16,
    };
    json_t *json = ranks_spec_to_json(&spec);
    struct ranks_spec copy;

    (void)state;
    assert_int_equal(ranks_spec_from_json(json, &copy), 0);
    assert_string_equal(copy.backend, "host");
    copy.backend = spec.backend;
    assert_memory_equal(&copy, &spec, sizeof(spec));
    json_object_del(json, "backend");
    assert_int_equal(ranks_spec_from_json(json, &copy), 0);
    assert_null(copy.backend);
    json_object_del(json, "nranks");
    assert_int_equal(ranks_spec_from_json(json, &copy), -1);
    json_decref(json);
}

static void test_equal_problems_are_one(void **state)
{
    json_t *problems = json_array();
    const json_t *ranks;

    (void)state;
    for (int rank = 0; rank < 6; rank++) {
        json_t *problem = ranks_problem_new(rank, "w", "h", "%s", rank == 4 ? "other" : "same");

        ranks_problem_add(problems, problem);
        json_decref(problem);
    }
    assert_int_equal(json_array_size(problems), 2);
    ranks = json_object_get(json_array_get(problems, 0), "ranks");
    assert_int_equal(json_array_size(ranks), 5);
    assert_int_equal(json_integer_value(json_array_get(ranks, 4)), 5);
    json_decref(problems);
}

int main(void)
{
    static enum ranks_boot forked = RANKS_FORK, threads = RANKS_THREADS;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_events_and_parameters, &forked),
        cmocka_unit_test_prestate(test_long_lines, &forked),
        cmocka_unit_test_prestate(test_worst_code, &forked),
        cmocka_unit_test_prestate(test_errors_of_calls, &forked),
        cmocka_unit_test_prestate(test_deadline, &forked),
        cmocka_unit_test_prestate(test_unknown_job, &forked),
        cmocka_unit_test_prestate(test_stray_output, &forked),
        cmocka_unit_test_prestate(test_bound_before_there_is_memory, &forked),
        cmocka_unit_test_prestate(test_bound_before_there_is_memory, &threads),
        cmocka_unit_test_prestate(test_events_and_parameters, &threads),
        cmocka_unit_test_prestate(test_long_lines, &threads),
        cmocka_unit_test_prestate(test_worst_code, &threads),
        cmocka_unit_test_prestate(test_errors_of_calls, &threads),
        cmocka_unit_test_prestate(test_deadline, &threads),
        cmocka_unit_test_prestate(test_unknown_job, &threads),
        cmocka_unit_test_prestate(test_stray_output, &threads),
        cmocka_unit_test(test_death_names_rank_and_signal),
        cmocka_unit_test(test_early_exit),
        cmocka_unit_test(test_spec_survives_json),
        cmocka_unit_test(test_equal_problems_are_one),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
