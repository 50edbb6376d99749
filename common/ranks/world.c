/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.c - epkit started on each rank: "mpirun -n 8 epkit test intranode", or with torchrun's variables.
 *
 * Rank 0 runs the command and prints its results. The other ranks are followers: they receive and run jobs until rank 0
 * is done. So a command may run several jobs, and random seeds are chosen once, on rank 0.
 */
#include "common/cmd.h"
#include "common/ending.h"
#include "common/output.h"
#include "ranks_internal.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHUNK_BYTES 4096
#define AGREE_MS 60000
/* Waits of ranks for each other, in addition to the deadline of their jobs (--timeout): */
#define IDLE_GRACE_MS 60000  /* followers, between two jobs: rank 0 prints results */
#define FINE_GRACE_MS 30000  /* at the end of a job, a rank that succeeded: others may have more to check */
#define FAILED_GRACE_MS 2000 /* at the end of a job, a rank that failed: the others reach their deadline as well */
#define STOP_GRACE_MS 10000  /* in MPI_Finalize, which all ranks call at about the same time */
#define TIMEOUT_MS 30000     /* of a command without --timeout */

static struct {
    const ep_boot *boot; /* NULL: there is no world */
    const struct ep_mpi_module *module;
    struct ep_boot_mpi *mpi; /* exactly one of mpi and tcp is set */
    ep_boot_tcp *tcp;
    bool is_starting;
    bool is_broken; /* an all-gather has failed: ranks no longer wait for each other */
    int timeout_ms; /* --timeout of this rank, then that of the last job */
} world = {.timeout_ms = TIMEOUT_MS};

/*
 * Deadline for all ranks to join: EPKIT_TIMEOUT_MS, else --timeout, else 0: the bootstrap's default. A short --timeout
 * does not apply to MPI, which takes seconds to start on a loaded host.
 */
static int find_start_ms(const struct cmd *cmd, const struct cmd_call *call, bool mpi)
{
    const char *text = getenv("EPKIT_TIMEOUT_MS");

    if (!text || !*text)
        return call && cmd_given(cmd, call, "timeout") && (!mpi || world.timeout_ms > RANKS_MPI_START_MS)
                   ? world.timeout_ms
                   : 0;
    return ranks_start_ms();
}

static ep_status start_mpi(int timeout_ms)
{
    ep_status status;

    world.is_starting = true;
    status = ranks_mpi_start(world.module, timeout_ms, &world.mpi);
    world.is_starting = false;
    if (status == EP_OK)
        world.boot = world.module->get(world.mpi);
    return status;
}

/* Hints for variables that were not set by the launcher of this process. */
static void hint_env(void)
{
    char text[512];

    ranks_env_print(text, sizeof(text));
    out_hint("these variables say that this process is a rank: %s", text);
    out_hint("start it with the mpirun of the MPI that epkit was built with, or unset these variables");
}

/* atexit() handler: some errors in MPI_Init() call exit(). */
static void explain_exit(void)
{
    if (!world.is_starting)
        return;
    out_error("MPI_Init failed and ended the process");
    hint_env();
    fflush(stderr);
    _exit(CMD_USAGE);
}

struct mismatch {
    int found;
    char why[252];
};

/* The same result on all ranks: the mismatch of the lowest rank that has one. */
static int check_env(const struct cmd *cmd)
{
    const ep_boot *boot = world.boot;
    struct mismatch mine = {0}, *all = calloc((size_t)boot->nranks, sizeof(*all)), *first = NULL;
    int result = CMD_FAILED;

    mine.found = !ranks_env_matches(boot->rank, boot->nranks, mine.why, sizeof(mine.why));
    if (!all || boot->allgather(boot->context, &mine, sizeof(mine), AGREE_MS, all) != EP_OK) {
        out_problem("comparing the variables of the launcher on all ranks", NULL,
                    all ? ep_last_error() : "out of memory", NULL);
        free(all);
        return result;
    }
    for (int rank = boot->nranks - 1; rank >= 0; rank--)
        if (all[rank].found)
            first = &all[rank];
    result = first ? CMD_USAGE : CMD_FINE;
    if (first && boot->rank == 0) {
        if (boot->nranks > 1)
            out_error("%s: rank %d: %s", cmd->name, (int)(first - all), first->why);
        else
            out_error("%s: %s", cmd->name, first->why);
        hint_env();
    }
    free(all);
    return result;
}

/* For on_finalize_timeout(): exit code and message. */
static struct {
    int code;
    char text[256];
} finalize_timeout;

static void on_finalize_timeout(union sigval unused)
{
    (void)unused;
    (void)!write(STDERR_FILENO, finalize_timeout.text, strlen(finalize_timeout.text));
    _exit(finalize_timeout.code);
}

/*
 * MPI_Finalize() waits for mpirun and all ranks without a deadline; if one of them has died it may never return. All
 * output is written before the call.
 */
static void stop_mpi(int code)
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = on_finalize_timeout};
    int wait_ms = world.timeout_ms < INT_MAX - STOP_GRACE_MS ? world.timeout_ms + STOP_GRACE_MS : INT_MAX;
    struct itimerspec time = {.it_value = {.tv_sec = wait_ms / 1000, .tv_nsec = wait_ms % 1000 * 1000000L}};
    timer_t timer;
    bool has_timer;

    finalize_timeout.code = code == CMD_FINE ? CMD_FAILED : code;
    snprintf(
        finalize_timeout.text, sizeof(finalize_timeout.text),
        "epkit: error: rank %d: MPI_Finalize did not return within %d ms (--timeout plus %d s): mpirun or other ranks "
        "may have been killed; this rank ends without it\n",
        world.boot->rank, wait_ms, STOP_GRACE_MS / 1000);
    /* The document of a command that failed, which would otherwise be written after MPI_Finalize(). */
    if (code != CMD_FINE && world.boot->rank == 0)
        ending_write(code, NULL);
    fflush(NULL);
    has_timer = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &time, NULL) == 0;
    world.module->stop(world.mpi);
    if (has_timer)
        timer_delete(timer);
}

static void leave_world(int code)
{
    if (world.mpi)
        stop_mpi(code);
    ep_boot_tcp_free(world.tcp);
    world.mpi = NULL;
    world.tcp = NULL;
    world.boot = NULL;
}

static int join_mpi(const struct cmd *cmd, int timeout_ms)
{
    int result;

    atexit(explain_exit);
    if (ranks_mpi_load(&world.module) != EP_OK || start_mpi(timeout_ms ? timeout_ms : RANKS_MPI_START_MS) != EP_OK) {
        world.mpi = NULL;
        world.boot = NULL;
        out_problem("joining the ranks of mpirun", NULL, ep_last_error(), NULL);
        hint_env();
        return CMD_UNSUPPORTED;
    }
    result = check_env(cmd);
    /* A world of one rank counts as none. */
    if (result != CMD_FINE || world.boot->nranks == 1)
        leave_world(result);
    return result;
}

/* `timeout_ms`: for all ranks to join; 0: $EPKIT_TIMEOUT_MS, or the default. */
static int join_tcp(int timeout_ms)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    const char *hint;
    ep_status status;

    args.timeout_ms = timeout_ms;
    status = ep_boot_tcp_new(&args, &world.tcp);
    if (status == EP_OK) {
        world.boot = ep_boot_tcp_get(world.tcp);
        return CMD_FINE;
    }
    world.tcp = NULL;
    if (status == EP_E_TIMEOUT)
        hint = "check that all ranks were started with the same MASTER_ADDR, MASTER_PORT, WORLD_SIZE and EPKIT_SECRET, "
               "and that their hosts can reach that port";
    else if (status == EP_E_STATE)
        hint = "another program listens on that port of this host: choose another MASTER_PORT on all ranks";
    else
        hint = ep_status_hint(status);
    out_problem("joining the ranks given by RANK, WORLD_SIZE and MASTER_ADDR", NULL, ep_last_error(), hint);
    return status == EP_E_ARG ? CMD_USAGE : CMD_FAILED;
}

/* The value of an OPT_CHOICE option, if it was given; "" otherwise. */
static const char *find_choice(const struct cmd *cmd, const struct cmd_call *call, const char *name)
{
    if (!call || !cmd_given(cmd, call, name))
        return "";
    for (const struct opt *opt = cmd->options; opt->name; opt++)
        if (strcmp(opt->name, name) == 0 && opt->type == OPT_CHOICE)
            return opt->choices[*(const int *)(const void *)((const char *)call->options + opt->offset)];
    return "";
}

static int find_timeout_ms(const struct cmd *cmd, const struct cmd_call *call)
{
    for (const struct opt *opt = cmd->options; call && opt->name; opt++)
        if (strcmp(opt->name, "timeout") == 0 && opt->type == OPT_INT)
            return (int)(*(const int64_t *)(const void *)((const char *)call->options + opt->offset) * 1000);
    return TIMEOUT_MS;
}

int ranks_world_join(const struct cmd *cmd, const struct cmd_call *call)
{
    const char *boot = find_choice(cmd, call, "boot"), *network = find_choice(cmd, call, "network");
    bool requested = strcmp(boot, "tcp") == 0;

    world.timeout_ms = find_timeout_ms(cmd, call);
    if (*boot && !requested && strcmp(boot, "mpi") != 0)
        return ranks_env_is_launched() ? join_mpi(cmd, find_start_ms(cmd, call, true)) : CMD_FINE;
    /* If variables of both are set, those of MPI launchers take precedence: mpirun was started last. */
    if (!requested && ranks_env_is_launched())
        return join_mpi(cmd, find_start_ms(cmd, call, true));
    if (ranks_env_is_tcp(requested || strcmp(network, "tcp") == 0 || strcmp(network, "verbs") == 0, requested))
        return join_tcp(find_start_ms(cmd, call, false));
    return CMD_FINE;
}

int ranks_world_rank(void)
{
    return world.boot ? world.boot->rank : -1;
}

int ranks_world_size(void)
{
    return world.boot ? world.boot->nranks : 0;
}

int ranks_world_nodes(void)
{
    if (!world.boot)
        return 1;
    /* If hosts have different numbers of ranks, each rank is a node. */
    return world.boot->nranks / (world.boot->ranks_per_node ? world.boot->ranks_per_node : 1);
}

enum ranks_boot ranks_world_boot(void)
{
    return world.tcp ? RANKS_TCP : RANKS_MPI;
}

const char *ranks_world_launcher(void)
{
    return world.tcp ? "RANK and WORLD_SIZE" : "mpirun";
}

/* All-gather with the deadline of a job plus `grace_ms`. */
static ep_status gather(const void *mine, size_t bytes, int grace_ms, void *ret_all)
{
    int wait_ms = world.timeout_ms < INT_MAX - grace_ms ? world.timeout_ms + grace_ms : INT_MAX;
    ep_status status = EP_E_STATE;

    if (!world.is_broken)
        status = world.boot->allgather(world.boot->context, mine, bytes, wait_ms, ret_all);
    world.is_broken = status != EP_OK;
    return status;
}

/* Broadcasts the text of rank 0: its length, then its pieces. The caller frees ret_text. */
static ep_status broadcast(const char *text, char **ret_text)
{
    int nranks = ranks_world_size();
    unsigned char *all = calloc((size_t)nranks, CHUNK_BYTES);
    uint64_t length = text ? strlen(text) : 0, *lengths = calloc((size_t)nranks, sizeof(*lengths));
    char chunk[CHUNK_BYTES] = "", *result = NULL;
    ep_status status = all && lengths ? gather(&length, sizeof(length), IDLE_GRACE_MS, lengths) : EP_E_MEMORY;

    if (status == EP_OK) {
        result = calloc(1, lengths[0] + 1);
        status = result ? EP_OK : EP_E_MEMORY;
    }
    for (uint64_t at = 0; status == EP_OK && at < lengths[0]; at += CHUNK_BYTES) {
        size_t n = lengths[0] - at < CHUNK_BYTES ? (size_t)(lengths[0] - at) : CHUNK_BYTES;

        if (text)
            memcpy(chunk, text + at, n);
        status = gather(chunk, CHUNK_BYTES, IDLE_GRACE_MS, all);
        if (status == EP_OK)
            memcpy(result + at, all, n);
    }
    if (status == EP_OK) {
        *ret_text = result;
        result = NULL;
    }
    free(result);
    free(lengths);
    free(all);
    return status;
}

/*
 * The worst exit code of all ranks, on all ranks; *ret_first: that of rank 0. Ranks that failed have done so by their
 * deadline, so that a stopped rank does not delay the others further.
 */
static int agree(int code, const char *what, int *ret_first)
{
    int nranks = ranks_world_size(), worst = code;
    int *codes = calloc((size_t)nranks, sizeof(*codes));

    if (!codes || gather(&code, sizeof(code), code == CMD_FINE ? FINE_GRACE_MS : FAILED_GRACE_MS, codes) != EP_OK) {
        out_problem(what, NULL, codes ? ep_last_error() : "out of memory", NULL);
        free(codes);
        return CMD_FAILED;
    }
    for (int rank = 0; rank < nranks; rank++)
        worst = ranks_worse(worst, codes[rank]);
    *ret_first = codes[0];
    free(codes);
    return worst;
}

struct event_sink {
    ranks_event_fn on_event; /* NULL on followers: errors are printed, other events dropped */
    void *context;
    json_t *problems;
};

static void handle_event(void *context, const json_t *event)
{
    struct event_sink *sink = context;
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (kind && strcmp(kind, "exit") == 0)
        return;
    if (kind && strcmp(kind, "error") == 0)
        ranks_problem_add(sink->problems, event);
    if (sink->on_event)
        sink->on_event(sink->context, event);
}

static int run_job(const struct ranks_spec *spec, const char *job, const json_t *parameters, struct event_sink *sink)
{
    struct ranks_rank_context self = {.ctx.spec = spec,
                                      .ctx.mpi = world.module,
                                      .ctx.mpi_boot = world.mpi,
                                      .ctx.emit_fd = -1,
                                      .on_event = handle_event,
                                      .context = sink};
    int code, first;

    world.timeout_ms = spec->timeout_ms;
    sink->problems = json_array();
    code = ranks_run_rank(&self, world.boot, job, parameters);
    /* Before agree(), which fails if a rank is dead. */
    ranks_problem_print(sink->problems);
    json_decref(sink->problems);
    return agree(code, "gathering the exit codes of the job on all ranks", &first);
}

int ranks_world_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
                    void *context)
{
    struct event_sink sink = {on_event, context, NULL};
    bool was_broken = world.is_broken;
    char *text = ranks_request_print(spec, job, parameters, NULL), *copy = NULL;
    ep_status status = text ? broadcast(text, &copy) : EP_E_MEMORY;
    int result;

    if (status == EP_OK) {
        result = run_job(spec, job, parameters, &sink);
    } else {
        /* Otherwise the error was reported at the end of the previous job. */
        if (!was_broken)
            out_problem("sending the job to the ranks", NULL, ep_last_error(), ep_status_hint(status));
        result = CMD_FAILED;
    }
    free(copy);
    free(text);
    return result;
}

int ranks_follow(void)
{
    for (;;) {
        struct event_sink sink = {0};
        struct ranks_request request;
        bool was_broken = world.is_broken;
        char *text = NULL;
        json_t *message;

        if (broadcast(NULL, &text) != EP_OK) {
            /* Otherwise the error was reported at the end of the previous job. */
            if (!was_broken)
                out_problem("waiting for the next job of rank 0", NULL, ep_last_error(), NULL);
            return CMD_FAILED;
        }
        message = json_loads(text, 0, NULL);
        free(text);
        if (ranks_request_parse(message, &request) != 0) {
            /* An empty message: rank 0 is done. */
            json_decref(message);
            break;
        }
        run_job(&request.spec, request.job, request.parameters, &sink);
        json_decref(message);
    }
    return CMD_FINE;
}

int ranks_world_done(int code, int *ret_first)
{
    char *text = NULL;
    int worst = code;

    *ret_first = code;
    if (!world.boot)
        return code;
    if (ranks_world_rank() == 0)
        broadcast("{}", &text);
    free(text);
    if (world.is_broken)
        worst = ranks_worse(code, CMD_FAILED);
    else
        worst = agree(code, "gathering the exit codes of the command on all ranks", ret_first);
    /* A rank that was interrupted by a signal returns its own code. */
    worst = code > 128 ? code : worst;
    leave_world(worst);
    return worst;
}
