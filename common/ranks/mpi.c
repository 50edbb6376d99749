/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpi.c - starts ranks with mpirun.
 *
 * A rank opens the pipe for its events as a descriptor of the launcher, /proc/<pid>/fd/<fd>: no named file has to be
 * removed afterwards, and events do not pass through mpirun, which splits lines of several ranks.
 */
#include "common/cmd.h"
#include "common/output.h"
#include "common/progress.h"
#include "ranks_internal.h"

#include "base/module.h"
#include "machine/source/source.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)
/* With the ABI version: the name without it belongs to development packages. */
#define MODULE_FILE "libepkit-mpi.so." TEXT(EP_VERSION_MAJOR)
#define MAX_ARGS 32
#define LOAD_MS 30000 /* from a busy file server */

/* RTLD_GLOBAL: plugins of MPI need its symbols. */
ep_status ranks_mpi_load(const struct ep_mpi_module **ret_module)
{
    const void *table = NULL;

    EP_TRY(ep_module_load(MODULE_FILE, RTLD_GLOBAL, EP_MPI_MODULE_SYMBOL, EP_MPI_MODULE_ABI, &table));
    *ret_module = table;
    return EP_OK;
}

static char start_timeout_text[160];

static void on_start_timeout(union sigval unused)
{
    (void)unused;
    (void)!write(STDERR_FILENO, start_timeout_text, strlen(start_timeout_text));
    _exit(CMD_FAILED);
}

int ranks_start_ms(void)
{
    const char *text = getenv("EPKIT_TIMEOUT_MS");
    char *end;
    long ms = text ? strtol(text, &end, 10) : 0;

    return text && *text >= '0' && *text <= '9' && !*end && ms > 0 && ms <= INT_MAX ? (int)ms : 0;
}

ep_status ranks_mpi_start(const struct ep_mpi_module *module, int timeout_ms, struct ep_boot_mpi **ret_mpi)
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = on_start_timeout};
    struct itimerspec time = {.it_value = {.tv_sec = timeout_ms / 1000, .tv_nsec = timeout_ms % 1000 * 1000000L}};
    ep_status status;
    bool has_timer;
    timer_t timer;

    snprintf(start_timeout_text, sizeof(start_timeout_text),
             "epkit: error: MPI_Init did not return within %d ms: check that the launcher has started all ranks\n",
             timeout_ms);
    has_timer = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &time, NULL) == 0;
    status = module->start(ret_mpi);
    if (has_timer)
        timer_delete(timer);
    return status;
}

static bool find_program(const char *name)
{
    const char *path = getenv("PATH");
    char file[4096];

    for (const char *at = path ? path : "/usr/bin:/bin"; *at;) {
        size_t n = strcspn(at, ":");

        snprintf(file, sizeof(file), "%.*s/%s", (int)n, at, name);
        if (n && access(file, X_OK) == 0)
            return true;
        at += n + (at[n] == ':');
    }
    return false;
}

/* Runs in a child process, because an MPI library starts threads and installs memory hooks. */
static json_t *query_version(void *unused)
{
    const struct ep_mpi_module *module = NULL;

    (void)unused;
    if (ranks_mpi_load(&module) != EP_OK)
        return json_pack("{s:s}", "why", ep_last_error());
    return json_pack("{s:s}", "version", module->library_version());
}

static struct {
    bool queried, available;
    char text[512]; /* the version, or why it is not available */
} mpi;

static void probe_module(void)
{
    const char *version = NULL, *why = NULL;
    struct source *source = NULL;
    struct source_answer answer;

    if (source_open(NULL, &source) != EP_OK) {
        snprintf(mpi.text, sizeof(mpi.text), "%s", ep_last_error());
        return;
    }
    answer = source_query(source, "mpi", query_version, NULL, LOAD_MS);
    version = json_string_value(json_object_get(answer.value, "version"));
    why = json_string_value(json_object_get(answer.value, "why"));
    mpi.available = version;
    if (version)
        snprintf(mpi.text, sizeof(mpi.text), "%.*s", (int)strcspn(version, ",\n"), version);
    else
        snprintf(mpi.text, sizeof(mpi.text), "cannot load %s: %s", MODULE_FILE, why ? why : answer.why);
    source_free(source);
}

static void query_mpi(void)
{
    if (mpi.queried)
        return;
    mpi.queried = true;
    if (find_program("mpirun"))
        probe_module();
    else
        snprintf(mpi.text, sizeof(mpi.text), "mpirun is not in PATH");
}

int ranks_mpi_available(const char **ret_why)
{
    query_mpi();
    if (!mpi.available)
        *ret_why = mpi.text;
    return mpi.available;
}

const char *ranks_mpi_version(void)
{
    query_mpi();
    return mpi.available ? mpi.text : NULL;
}

/* The event pipes, as descriptors of the launcher. */
static json_t *list_events(const int *event_fds, int nranks, pid_t launcher)
{
    json_t *fds = json_array();

    for (int rank = 0; rank < nranks; rank++)
        json_array_append_new(fds, json_integer(event_fds[rank]));
    return json_pack("{s:i, s:o}", "pid", (int)launcher, "fds", fds);
}

/* No standard input; and Open MPI refuses to run as root, as in containers, unless both variables are set. */
static void prepare_mpirun(void)
{
    int null_fd = open("/dev/null", O_RDONLY);

    if (null_fd >= 0)
        dup2(null_fd, STDIN_FILENO);
    if (geteuid() == 0) {
        setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    }
}

int ranks_exec_mpirun(const struct ranks_spec *spec, const char *job, const json_t *parameters, const int *event_fds,
                      pid_t launcher)
{
    char exe[4096], count[16];
    const char *args[MAX_ARGS] = {"mpirun", "-n", count};
    const char *request = ranks_request_print(spec, job, parameters, list_events(event_fds, spec->nranks, launcher));
    ssize_t length = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    int n = 3;

    if (length < 0 || !request) {
        fprintf(stderr, "epkit: preparing mpirun: %s\n", length < 0 ? strerror(errno) : "out of memory");
        return CMD_FAILED;
    }
    exe[length] = '\0';
    snprintf(count, sizeof(count), "%d", spec->nranks);
    prepare_mpirun();
    if (strncmp(ranks_mpi_version(), "Open MPI", 8) == 0) {
        args[n++] = "--oversubscribe";
        args[n++] = "--bind-to";
        args[n++] = "none";
    }
    args[n++] = exe;
    args[n++] = RANKS_COMMAND;
    args[n++] = request;
    execvp(args[0], (char **)args);
    fprintf(stderr, "epkit: starting mpirun: %s\n", strerror(errno));
    return CMD_FAILED;
}

static void read_death(struct ranks_mpirun *mpirun)
{
    const char *found = strstr(mpirun->banner, "noticed that process rank ");
    const char *by = strstr(mpirun->banner, "exited on signal ");

    if (found && by && mpirun->rank < 0) {
        mpirun->rank = atoi(found + strlen("noticed that process rank "));
        mpirun->signal = atoi(by + strlen("exited on signal "));
    }
}

/* Open MPI prints its own messages between lines of dashes. Those about the end of a rank are reported by the launcher.
 */
static bool is_noise(const char *banner)
{
    return strstr(banner, "noticed that process rank ") || strstr(banner, "Primary job ") ||
           strstr(banner, "exited with non-zero status");
}

void ranks_mpirun_line(struct ranks_mpirun *mpirun, const char *line, bool quiet)
{
    bool dashes = strlen(line) > 20 && strspn(line, "-") == strlen(line);

    if (dashes && mpirun->in_banner) {
        read_death(mpirun);
        if (!quiet && !is_noise(mpirun->banner)) {
            progress_hide();
            fputs(mpirun->banner, stderr);
        }
        mpirun->in_banner = false;
    } else if (dashes) {
        mpirun->in_banner = true;
        mpirun->used = 0;
        mpirun->banner[0] = '\0';
    } else if (mpirun->in_banner && mpirun->used < sizeof(mpirun->banner)) {
        mpirun->used +=
            (size_t)snprintf(mpirun->banner + mpirun->used, sizeof(mpirun->banner) - mpirun->used, "%s\n", line);
    } else if (!quiet) {
        progress_hide();
        fprintf(stderr, "%s\n", line);
    }
}

static int open_events(const json_t *events, int rank)
{
    const json_t *fd = json_array_get(json_object_get(events, "fds"), (size_t)rank);
    char path[64];

    if (!json_is_integer(fd)) {
        errno = EINVAL;
        return -1;
    }
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)json_integer_value(json_object_get(events, "pid")),
             (int)json_integer_value(fd));
    return open(path, O_WRONLY | O_CLOEXEC);
}

/*
 * The exit code does not depend on the job: mpirun treats any code but 0 as a crash and ends the other ranks. The exit
 * code of the job is sent to the launcher as an event.
 */
static int run_under_mpi(const struct ranks_request *request, const json_t *events, const struct ep_mpi_module *module)
{
    const struct ranks_spec *spec = &request->spec;
    struct ranks_rank_context self = {.ctx.spec = spec, .ctx.mpi = module};
    int start_ms = spec->timeout_ms > RANKS_MPI_START_MS ? spec->timeout_ms : RANKS_MPI_START_MS;
    const ep_boot *boot;

    if (ranks_mpi_start(module, ranks_start_ms() ? ranks_start_ms() : start_ms, &self.ctx.mpi_boot) != EP_OK) {
        fprintf(stderr, "epkit: starting MPI: %s\n", ep_last_error());
        return CMD_FAILED;
    }
    boot = module->get(self.ctx.mpi_boot);
    /* With the mpirun of another MPI, each process is rank 0 of 1. */
    if (boot->nranks != spec->nranks) {
        fprintf(stderr,
                "epkit: mpirun should start %d ranks, but MPI reports %d: mpirun belongs to another MPI than %s\n",
                spec->nranks, boot->nranks, MODULE_FILE);
        return CMD_FAILED;
    }
    self.ctx.emit_fd = open_events(events, boot->rank);
    if (self.ctx.emit_fd < 0) {
        fprintf(stderr, "epkit: rank %d: opening the event pipe of the launcher: %s\n", boot->rank, strerror(errno));
        return CMD_FAILED;
    }
    ranks_run_rank(&self, boot, request->job, request->parameters);
    module->stop(self.ctx.mpi_boot);
    close(self.ctx.emit_fd);
    return CMD_FINE;
}

int ranks_main(int argc, char **argv)
{
    json_t *message = argc == 2 ? json_loads(argv[1], 0, NULL) : NULL;
    const struct ep_mpi_module *module = NULL;
    struct ranks_request request;
    int result = CMD_USAGE;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    if (ranks_request_parse(message, &request) != 0) {
        fprintf(stderr, "epkit: %s is for internal use\n", RANKS_COMMAND);
    } else if (ranks_mpi_load(&module) == EP_OK) {
        result = run_under_mpi(&request, json_object_get(message, "events"), module);
    } else {
        fprintf(stderr, "epkit: loading %s: %s\n", MODULE_FILE, ep_last_error());
        result = CMD_UNSUPPORTED;
    }
    json_decref(message);
    return result;
}
