/* SPDX-License-Identifier: Apache-2.0 */
#include "mpirun.h"

#include "base/module.h"
#include "bench_case.h"
#include "common/child.h"
#include "common/cmd.h"
#include "common/file.h"
#include "common/json.h"
#include "common/launcher_env.h"
#include "common/output.h"
#include "common/ranks/ranks_internal.h"
#include "machine/source/source.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MODULE_FILE "libepkit-bench-mpi.so"
#define LOAD_MS 30000 /* from a busy file server */

/* --- whether this machine has an MPI that the baseline can be measured with --- */

/* RTLD_GLOBAL: plugins of MPI need its symbols. */
static ep_status load_mpi(const struct bench_mpi_module **ret_module)
{
    const void *table = NULL;

    EP_TRY(ep_module_load(MODULE_FILE, RTLD_GLOBAL, BENCH_MPI_SYMBOL, BENCH_MPI_ABI, &table));
    *ret_module = table;
    return EP_OK;
}

/* Runs in a child process, because an MPI library starts threads and installs memory hooks. */
static json_t *query_version(void *unused)
{
    const struct bench_mpi_module *module = NULL;

    (void)unused;
    if (load_mpi(&module) != EP_OK)
        return json_pack("{s:s}", "why", ep_last_error());
    return json_pack("{s:s}", "version", module->library_version());
}

static struct {
    bool queried, available;
    char text[512]; /* the version, or why it is not available */
} found;

static void query_mpi(void)
{
    struct source *source = NULL;
    struct source_answer answer;
    const char *why;

    if (!file_in_path("mpirun")) {
        snprintf(found.text, sizeof(found.text), "mpirun is not in PATH");
    } else if (source_open(NULL, &source) != EP_OK) {
        snprintf(found.text, sizeof(found.text), "%s", ep_last_error());
    } else {
        answer = source_query(source, "mpi", query_version, NULL, LOAD_MS);
        found.available = json_is_string(json_object_get(answer.value, "version"));
        why = json_string_value(json_object_get(answer.value, "why"));
        if (found.available)
            snprintf(found.text, sizeof(found.text), "%s", json_text(answer.value, "version"));
        else
            snprintf(found.text, sizeof(found.text), "cannot load %s: %s", MODULE_FILE, why ? why : answer.why);
        source_free(source);
    }
}

const char *bench_mpi_version(const char **ret_why)
{
    if (!found.queried)
        query_mpi();
    found.queried = true;
    *ret_why = found.text;
    return found.available ? found.text : NULL;
}

/* --- on a rank --- */

static ep_status all_succeeded(struct ranks_ctx *ctx, ep_status own, bool *ret_all)
{
    int64_t n = own == EP_OK;

    if (own != EP_OK && ctx->rank == 0)
        out_warning("MPI_Alltoallv is not measured: %s", ep_last_error());
    EP_TRY(bench_sum(ctx, &n, sizeof(n)));
    *ret_all = n == ctx->nranks;
    return EP_OK;
}

ep_status bench_mpi_start(struct ranks_ctx *ctx, const struct bench_request *request,
                          const struct bench_mpi_module **ret_mpi)
{
    const struct bench_mpi_module *mpi = NULL;
    bool all;

    *ret_mpi = NULL;
    if (!request->baselines || ctx->memory || ranks_world_rank() < 0 || !ranks_env_is_mpirun())
        return EP_OK;
    /* MPI_Init() waits for all ranks. */
    EP_TRY(all_succeeded(ctx, load_mpi(&mpi), &all));
    if (all)
        EP_TRY(all_succeeded(ctx, mpi->start(ctx->rank, ctx->nranks), &all));
    *ret_mpi = all ? mpi : NULL;
    return EP_OK;
}

static void print_event(void *unused, const json_t *event)
{
    (void)unused;
    json_dumpf(event, stdout, JSON_COMPACT);
    putchar('\n');
    fflush(stdout);
}

/*
 * The exit code does not depend on the job, because mpirun treats any code but 0 as a crash. That of the job is an
 * event.
 */
int bench_mpirun_main(int argc, char **argv)
{
    static const struct cmd cmd = {.name = "bench"};
    json_t *message = argc == 2 ? json_loads(argv[1], 0, NULL) : NULL, *end;
    struct ranks_request request;
    int code, rank, first;

    if (ranks_request_parse(message, &request) != 0) {
        fprintf(stderr, "epkit: %s is for internal use\n", BENCH_MPIRUN_COMMAND);
        json_decref(message);
        return CMD_USAGE;
    }
    code = ranks_world_join(&cmd, NULL);
    rank = ranks_world_rank();
    if (code == CMD_FINE && ranks_world_size() != request.spec.nranks) {
        out_error("mpirun should start %d ranks, but its variables do not say so", request.spec.nranks);
        code = CMD_FAILED;
    } else if (code == CMD_FINE && rank == 0) {
        code = ranks_world_run(&request.spec, request.job, request.parameters, print_event, NULL);
    } else if (code == CMD_FINE) {
        code = ranks_follow();
    }
    code = ranks_world_done(code, &first);
    if (rank == 0) {
        end = json_pack("{s:s, s:i}", "event", "exit", "code", code);
        print_event(NULL, end);
        json_decref(end);
    }
    json_decref(message);
    return rank < 0 ? code : CMD_FINE;
}

/* --- the command --- */

struct program {
    const char *const *argv;
    int error_fd; /* standard error of the command */
};

/* Open MPI refuses root, as in containers, unless both variables are set. */
static void execute(const void *context)
{
    const struct program *program = context;

    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    dup2(program->error_fd, STDERR_FILENO);
    execvp(program->argv[0], (char *const *)program->argv);
}

/* Reads events until all ranks have ended. The exit code of the job; -1: rank 0 has not sent it. */
static int read_events(int fd, ranks_event_fn on_event, void *context)
{
    FILE *stream = fdopen(fd, "r");
    char *line = NULL;
    size_t room = 0;
    int code = -1;

    while (stream && getline(&line, &room, stream) >= 0) {
        json_t *event = json_loads(line, 0, NULL);
        const char *kind = json_string_value(json_object_get(event, "event"));

        if (kind && strcmp(kind, "exit") == 0)
            code = (int)json_integer_value(json_object_get(event, "code"));
        else if (kind)
            on_event(context, event);
        else
            fputs(line, stderr);
        json_decref(event);
    }
    free(line);
    if (stream)
        fclose(stream);
    return code;
}

int bench_mpirun(const struct ranks_spec *spec, const json_t *parameters, ranks_event_fn on_event, void *context)
{
    char exe[4096], count[16], *request = ranks_request_print(spec, BENCH_JOB, parameters);
    ssize_t length = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    const char *why;
    const bool open_mpi = strncmp(bench_mpi_version(&why), "Open MPI", 8) == 0;
    const char *const argv[] = {"mpirun", "-n", count, exe, BENCH_MPIRUN_COMMAND, request, NULL};
    const char *const open_mpi_argv[] = {"mpirun", "--oversubscribe",    "--bind-to", "none", "-n", count,
                                         exe,      BENCH_MPIRUN_COMMAND, request,     NULL};
    const struct program program = {open_mpi ? open_mpi_argv : argv, fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)};
    struct process process;
    int code = -1, status = 0, problem;

    exe[length > 0 ? length : 0] = '\0';
    snprintf(count, sizeof(count), "%d", spec->nranks);
    problem = process_fork(execute, &program, false, &process);
    close(program.error_fd);
    free(request);
    if (problem != 0) {
        out_error("starting mpirun: %s", strerror(problem));
        return CMD_FAILED;
    }
    fcntl(process.out, F_SETFL, 0);
    code = read_events(process.out, on_event, context);
    process.out = -1;
    process_wait(process.pid, 0, &status);
    process_close(&process);
    if (code < 0)
        out_error("mpirun ended before the benchmark did, with exit code %d", WEXITSTATUS(status));
    return code < 0 ? CMD_FAILED : code;
}
