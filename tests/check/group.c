/* SPDX-License-Identifier: Apache-2.0 */
#include "group.h"

#include "cmd/test/check/cases.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define MAX_RANKS 64

/* In shared memory, so that forked ranks can write it. */
struct board {
    pthread_mutex_t lock;
    struct group_report report;
};

struct rank_argument {
    const struct group_spec *spec;
    struct board *board;
};

/* The context comes first: ranks_emit() finds the board from it. */
struct rank_context {
    struct ranks_ctx ctx;
    struct board *board;
};

void ranks_emit(struct ranks_ctx *ctx, json_t *event)
{
    struct board *board = ((struct rank_context *)ctx)->board;
    struct group_report *report = &board->report;
    const char *kind = json_string_value(json_object_get(event, "event"));

    pthread_mutex_lock(&board->lock);
    if (!strcmp(kind, "case")) {
        report->cases++;
        if (!json_is_true(json_object_get(event, "passed")) && report->failed++ == 0)
            snprintf(report->detail, sizeof(report->detail), "%s: %s",
                     json_string_value(json_object_get(event, "name")),
                     json_string_value(json_object_get(event, "detail")));
    } else if (!strcmp(kind, "error") && report->errors++ == 0) {
        snprintf(report->error, sizeof(report->error), "rank %d: %s: %s", ctx->rank,
                 json_string_value(json_object_get(event, "what")), json_string_value(json_object_get(event, "text")));
    }
    pthread_mutex_unlock(&board->lock);
    if (getenv("EPKIT_TEST_VERBOSE"))
        json_dumpfd(event, STDERR_FILENO, JSON_COMPACT);
    json_decref(event);
}

int ranks_emit_error(struct ranks_ctx *ctx, ep_status status, const char *what)
{
    ranks_emit(ctx, json_pack("{s:s, s:s, s:s, s:s}", "event", "error", "status", ep_status_name(status), "what", what,
                              "text", ep_last_error()));
    return 1;
}

/* Stands in for device memory. */
static ep_status alloc_mirror(struct ranks_ctx *ctx, size_t bytes, void **ret_memory)
{
    (void)ctx;
    *ret_memory = malloc(bytes);
    return *ret_memory ? EP_OK : EP_E_MEMORY;
}

static void free_mirror(struct ranks_ctx *ctx, void *memory)
{
    (void)ctx;
    free(memory);
}

static ep_status copy_mirror(struct ranks_ctx *ctx, void *to, const void *from, size_t bytes)
{
    (void)ctx;
    memcpy(to, from, bytes);
    return EP_OK;
}

static ep_status fill_mirror(struct ranks_ctx *ctx, void *to, int byte, size_t bytes)
{
    (void)ctx;
    memset(to, byte, bytes);
    return EP_OK;
}

static const struct ranks_memory mirror_memory = {
    .alloc = alloc_mirror, .free = free_mirror, .copy = copy_mirror, .fill = fill_mirror};

static int run_rank(const ep_boot *boot, void *opaque)
{
    const struct rank_argument *argument = opaque;
    const struct group_spec *spec = argument->spec;
    struct ranks_spec ranks = {.nranks = spec->n_ranks, .nnodes = spec->n_nodes, .partial_type = spec->partial_type};
    struct rank_context context = {.ctx = {.rank = boot->rank,
                                           .nranks = boot->nranks,
                                           .nnodes = spec->n_nodes,
                                           .spec = &ranks,
                                           .memory = spec->mirrors ? &mirror_memory : NULL},
                                   .board = argument->board};
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    json_t *parameters = json_loads(spec->parameters, 0, NULL);
    ep_status status;
    int code = 1;

    config.backend = "host";
    config.ranks_per_node = spec->n_nodes > 1 ? spec->n_ranks / spec->n_nodes : 0;
    config.partial_type = spec->partial_type;
    config.timeout_ms = 60000;
    ep_net_emulate(&spec->emulation);
    status = ep_comm_new(boot, &config, &context.ctx.comm);
    if (status == EP_OK && parameters)
        code = check_job(&context.ctx, parameters);
    else
        ranks_emit_error(&context.ctx, status, "ep_comm_new");
    json_decref(parameters);
    ep_comm_free(context.ctx.comm);
    return code;
}

void group_run(const struct group_spec *spec, struct group_report *ret_report)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];
    pthread_mutexattr_t attributes;
    struct board *board;
    struct rank_argument argument = {.spec = spec};

    assert_in_range(spec->n_ranks, 1, MAX_RANKS);
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(board != MAP_FAILED);
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&board->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    argument.board = board;
    launch.mode = spec->mode;
    launch.nranks = spec->n_ranks;
    launch.run = run_rank;
    launch.argument = &argument;
    launch.timeout_ms = spec->mode == EP_LAUNCH_FORK ? 120000 : 0;
    if (ep_launch(&launch, exits) != EP_OK)
        fail_msg("ep_launch: %s; %s", ep_last_error(), board->report.error);
    *ret_report = board->report;
    for (int rank = 0; rank < spec->n_ranks; rank++) {
        if (exits[rank].code < 0)
            fail_msg("rank %d: signal %d, late %d", rank, exits[rank].signal, exits[rank].late);
        ret_report->code = exits[rank].code > ret_report->code ? exits[rank].code : ret_report->code;
    }
    munmap(board, sizeof(*board));
}

void group_expect_pass(const struct group_spec *spec, int n_cases)
{
    struct group_report report;

    group_run(spec, &report);
    if (report.errors)
        fail_msg("%d ranks, %d nodes, %s: %s", spec->n_ranks, spec->n_nodes, spec->parameters, report.error);
    if (report.failed)
        fail_msg("%d ranks, %d nodes, %s: %d cases failed: %s", spec->n_ranks, spec->n_nodes, spec->parameters,
                 report.failed, report.detail);
    assert_int_equal(report.code, 0);
    assert_int_equal(report.cases, n_cases);
}
