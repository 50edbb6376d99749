/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.c - epkit started on each rank: "mpirun -n 8 epkit test intranode", or with torchrun's variables. The ranks
 * meet over tcp.
 *
 * Rank 0 runs the command and prints its results. The other ranks are followers: they receive and run jobs until rank 0
 * is done. So a command may run several jobs, and random seeds are chosen once, on rank 0.
 */
#include "common/cmd.h"
#include "common/memory.h"
#include "common/output.h"
#include "ranks_internal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Waits of ranks for each other, in addition to the deadline of their jobs (--timeout): */
#define IDLE_GRACE_MS 60000  /* followers, between two jobs: rank 0 prints results */
#define FINE_GRACE_MS 30000  /* at the end of a job, a rank that succeeded: others may have more to check */
#define FAILED_GRACE_MS 2000 /* at the end of a job, a rank that failed: the others reach their deadline as well */
#define TIMEOUT_MS 30000     /* of a command without --timeout */
#define MPIRUN_MS 120000     /* for all ranks of mpirun to join: it may start them on many hosts */

static struct {
    ep_boot_tcp *tcp;
    const ep_boot *boot; /* of tcp; NULL: there is no world */
    bool is_mpirun;
    bool is_broken; /* an all-gather has failed: ranks no longer wait for each other */
    int timeout_ms; /* --timeout of this rank, then that of the last job */
} world = {.timeout_ms = TIMEOUT_MS};

/*
 * Deadline for all ranks to join: EPKIT_TIMEOUT_MS (0: the bootstrap reads it), else --timeout, else a default. mpirun
 * takes seconds to start on a loaded host, so a shorter --timeout does not apply to it.
 */
static int find_start_ms(const struct cmd *cmd, const struct cmd_call *call, bool mpirun)
{
    const char *text = getenv("EPKIT_TIMEOUT_MS");
    int timeout_ms = call && cmd_given(cmd, call, "timeout") ? world.timeout_ms : 0;

    if (text && *text)
        return 0;
    return mpirun && timeout_ms < MPIRUN_MS ? MPIRUN_MS : timeout_ms;
}

/* Hints for variables that were not set by the launcher of this process. */
static void hint_env(void)
{
    char text[512];

    ranks_env_print(text, sizeof(text));
    out_hint("these variables say that this process is a rank: %s", text);
    out_hint("start it with mpirun, or unset these variables");
}

static int join(const ep_boot_tcp_args *args, const char *what)
{
    const char *hint;
    ep_status status = ep_boot_tcp_new(args, &world.tcp);

    if (status == EP_OK) {
        world.boot = ep_boot_tcp_get(world.tcp);
        return CMD_FINE;
    }
    world.tcp = NULL;
    if (world.is_mpirun && args->address)
        hint = "if another program uses that port, set EPKIT_ADDRESS to 127.0.0.1:PORT with a free one for all ranks";
    else if (status == EP_E_TIMEOUT)
        hint = "check that all ranks were started with the same MASTER_ADDR, MASTER_PORT, WORLD_SIZE and EPKIT_SECRET, "
               "and that their hosts can reach that port";
    else if (status == EP_E_STATE)
        hint = "another program listens on that port of this host: choose another MASTER_PORT on all ranks";
    else
        hint = ep_status_hint(status);
    out_problem(what, NULL, ep_last_error(), hint);
    return status == EP_E_ARG ? CMD_USAGE : CMD_FAILED;
}

/* Is it the first rank of its node? Rank 0 may have variables that mpirun does not pass on to other hosts. */
static bool is_first_of_node(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"};

    for (size_t i = 0; i < COUNT(names); i++) {
        const char *number = getenv(names[i]);

        if (number)
            return strcmp(number, "0") == 0;
    }
    return true;
}

/* Of mpirun, srun and others: they number the ranks, but name a place to meet on one host only. */
static int join_mpirun(const struct cmd *cmd, int timeout_ms)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    struct ranks_env env;
    char why[256];
    int result;

    if (!ranks_env_read(&env, why, sizeof(why))) {
        out_error("%s: %s", cmd->name, why);
        hint_env();
        return CMD_USAGE;
    }
    /* A world of one rank counts as none. */
    if (env.size == 1)
        return CMD_FINE;
    if (!*env.address && !getenv("EPKIT_ADDRESS") && !getenv("MASTER_ADDR")) {
        if (is_first_of_node()) {
            out_error("%s: the ranks may be on several hosts: set MASTER_ADDR to the host of rank 0, and MASTER_PORT; "
                      "rank %d lacks it",
                      cmd->name, env.rank);
            out_hint("as in mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, or use epkit launch");
            hint_env();
        }
        return CMD_USAGE;
    }
    args.rank = env.rank;
    args.nranks = env.size;
    args.timeout_ms = timeout_ms;
    if (*env.address) {
        args.address = env.address;
        setenv("EPKIT_JOB_ID", env.job, 0);
    }
    world.is_mpirun = true;
    result = join(&args, "joining the ranks of mpirun");
    if (result != CMD_FINE)
        hint_env();
    return result;
}

/* `timeout_ms`: for all ranks to join; 0: $EPKIT_TIMEOUT_MS, or the default. */
static int join_tcp(int timeout_ms)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;

    args.timeout_ms = timeout_ms;
    return join(&args, "joining the ranks given by RANK, WORLD_SIZE and MASTER_ADDR");
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
    bool requested = strcmp(boot, "tcp") == 0, is_tcp;

    world.timeout_ms = find_timeout_ms(cmd, call);
    is_tcp = ranks_env_is_tcp(requested || strcmp(network, "tcp") == 0 || strcmp(network, "verbs") == 0, requested);
    /* If variables of both are set, those of MPI launchers take precedence: mpirun was started last. */
    if (ranks_env_is_launched() && !(requested && is_tcp))
        return join_mpirun(cmd, find_start_ms(cmd, call, true));
    return is_tcp && (!*boot || requested) ? join_tcp(find_start_ms(cmd, call, false)) : CMD_FINE;
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

bool ranks_world_is_mpirun(void)
{
    return world.boot && world.is_mpirun;
}

const char *ranks_world_launcher(void)
{
    return world.is_mpirun ? "mpirun" : "RANK and WORLD_SIZE";
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

/* Broadcasts the text of rank 0: its length, then the text. The caller frees ret_text. */
static ep_status broadcast(const char *text, char **ret_text)
{
    size_t nranks = (size_t)ranks_world_size(), bytes;
    uint64_t length = text ? strlen(text) + 1 : 0, *lengths = memory_new(nranks, sizeof(length));
    ep_status status = gather(&length, sizeof(length), IDLE_GRACE_MS, lengths);
    char *mine, *all;

    bytes = status == EP_OK ? (size_t)lengths[0] : 1;
    mine = memory_new(1, bytes);
    all = memory_new(nranks, bytes);
    if (status == EP_OK) {
        memcpy(mine, text ? text : "", text ? bytes : 0);
        status = gather(mine, bytes, IDLE_GRACE_MS, all);
        memcpy(mine, all, bytes);
    }
    if (status == EP_OK)
        *ret_text = mine;
    else
        free(mine);
    free(all);
    free(lengths);
    return status;
}

/*
 * The worst exit code of all ranks, on all ranks; *ret_first: that of rank 0. Ranks that failed have done so by their
 * deadline, so that a stopped rank does not delay the others further.
 */
static int agree(int code, const char *what, int *ret_first)
{
    int nranks = ranks_world_size(), worst = code;
    int *codes = memory_new((size_t)nranks, sizeof(*codes));

    if (gather(&code, sizeof(code), code == CMD_FINE ? FINE_GRACE_MS : FAILED_GRACE_MS, codes) != EP_OK) {
        out_problem(what, NULL, ep_last_error(), NULL);
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
    struct ranks_rank_context self = {.ctx.spec = spec, .ctx.emit_fd = -1, .on_event = handle_event, .context = sink};
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
    char *text = ranks_request_print(spec, job, parameters), *copy = NULL;
    ep_status status = broadcast(text, &copy);
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
    ep_boot_tcp_free(world.tcp);
    world.tcp = NULL;
    world.boot = NULL;
    return worst;
}
