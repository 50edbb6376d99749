/* SPDX-License-Identifier: Apache-2.0 */
/* launch_job.c - a rank: its environment, its folder, and becoming the program. */
#include "launch_job.h"

#include "base/error.h"
#include "common/capture.h"
#include "common/memory.h"
#include "common/text.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SCRIPT_TAIL 300 /* bytes of the output of a script that a message shows: its end */

extern char **environ;

const char *job_text(const json_t *spec, const char *key, const char *other)
{
    const char *text = json_string_value(json_object_get(spec, key));

    return text ? text : other;
}

int job_number(const json_t *spec, const char *key, int other)
{
    const json_t *value = json_object_get(spec, key);

    return json_is_integer(value) ? (int)json_integer_value(value) : other;
}

/* --- scripts --- */

/*
 * The first argument is this executable, whose `env` is the script JOB_ENV, and which other scripts find in PATH.
 *
 * The shell sources the scripts and prints the resulting environment, separated by NUL. LD_PRELOAD is passed on under
 * another name, because env(1) is not the program either.
 */
static const char source_program[] =
    "self=$1; shift; PATH=$PATH:${self%/*}; trap 'echo \"epkit: $script ended the shell with status $?; if it calls "
    "exit, use return\" >&2' EXIT; for script in \"$@\"; do case $script in"
    " '" JOB_ENV "') old=${LD_PRELOAD-${EPKIT_PRELOAD-}}; unset LD_PRELOAD EPKIT_PRELOAD; eval \"$(\"$self\" env)\";"
    " case :${EPKIT_PRELOAD-}: in *:\"${old:-${EPKIT_PRELOAD-}}\":*) ;; *) EPKIT_PRELOAD=${EPKIT_PRELOAD:+$EPKIT_PRELOAD:}$old;; esac; continue;;"
    " \\?*) script=${script#?}; [ -r \"$script\" ] || continue;; esac;"
    " . \"$script\" >&2 || { echo \"epkit: $script ended with status $?\" >&2; trap - EXIT; exit 1; }; done; trap - EXIT;"
    " EPKIT_PRELOAD=${LD_PRELOAD-${EPKIT_PRELOAD-}}; unset LD_PRELOAD; export EPKIT_PRELOAD; PATH=${PATH%:\"${self%/*}\"}; exec env -0";

/* Takes the environment that the shell printed over into `rank`. */
static ep_status take_environment(struct capture *capture, struct job_rank *rank)
{
    const char *tail = capture->error.text ? capture->error.text : "";
    char line[2 * SCRIPT_TAIL] = "", clean[sizeof(line)];
    struct text text = text_in(line, sizeof(line));

    if (capture->start_error)
        return ep_fail_errno(EP_E_SYSTEM, capture->start_error, "bash, which sources the scripts, cannot be run");
    if (capture->late)
        return ep_fail(EP_E_TIMEOUT, "the scripts to be sourced did not end within %d s", SOURCE_SECONDS);
    if (capture->status == 0 && capture->output.text) {
        rank->sourced = capture->output.text;
        rank->sourced_bytes = capture->output.bytes;
        capture->output.text = NULL;
        return EP_OK;
    }
    if (strlen(tail) > SCRIPT_TAIL)
        tail += strlen(tail) - SCRIPT_TAIL;
    /* A message is one line. */
    FOR_PIECES (piece, tail, "\n")
        text_add(&text, "%s%.*s", text.n ? "; " : "", (int)piece.n, piece.text);
    text_clean(line, clean, sizeof(clean));
    return ep_fail(EP_E_SYSTEM, "sourcing scripts failed: %s", clean);
}

static void set(const char *name, const char *value)
{
    if (setenv(name, value, 1) == 0)
        return;
    fprintf(stderr, "epkit: %s: %s\n", name, strerror(errno));
    _exit(126);
}

static void set_inherited(const json_t *spec)
{
    FOR_MEMBERS (name, value, json_object_get(spec, "inherited"))
        set(name, json_string_value(value));
}

struct source_run {
    const json_t *spec;
    const char *const *argv;
};

/* The variables are no words of a command line, which everybody can read: some are secrets. */
static void execute_source(const void *context)
{
    const struct source_run *run = context;

    set("LC_ALL", "C"); /* what the shell prints is parsed */
    set_inherited(run->spec);
    execvp(run->argv[0], (char *const *)run->argv);
}

static ep_status source_scripts(struct job_rank *rank)
{
    json_t *scripts = json_object_get(rank->spec, "source"), *script;
    const char **argv = memory_new(5 + json_array_size(scripts) + 1, sizeof(*argv));
    char self[4096] = "epkit";
    struct source_run run = {rank->spec, argv};
    struct capture capture = {.execute = execute_source, .context = &run};
    ep_status status;

    if (json_array_size(scripts) == 0) {
        free(argv);
        return EP_OK;
    }
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
        snprintf(self, sizeof(self), "epkit");
    memcpy(argv, TEXTS("bash", "-c", source_program, "bash", self), 5 * sizeof(*argv));
    for (size_t i = 0; (script = json_array_get(scripts, i)); i++)
        argv[5 + i] = json_string_value(script);
    capture_run(&capture, 1, 1, SOURCE_SECONDS * 1000, NULL, NULL);
    status = take_environment(&capture, rank);
    capture_done(&capture);
    free(argv);
    return status;
}

/* --- a rank --- */

/*
 * The name of the first node that this node can resolve: that of launch_master(), else another one, as from ssh's
 * configuration on the launcher. A name server is queried only if these differ, because a query may take as long as the
 * server's timeout.
 */
static const char *find_master(const json_t *spec)
{
    const char *given = job_text(spec, "master", "localhost"), *other = job_text(spec, "master_host", NULL);
    struct addrinfo *found = NULL;

    if (!other || getaddrinfo(given, NULL, NULL, &found) == 0) {
        if (found)
            freeaddrinfo(found);
        return given;
    }
    return other;
}

static void set_number(const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    set(name, text);
}

static void set_ranks(const struct job_rank *rank)
{
    const json_t *spec = rank->spec;
    int nodes = job_number(spec, "nodes", 1), per_node = job_number(spec, "per_node", 1);
    bool by_rank = strcmp(job_text(spec, "world", "nodes"), "ranks") == 0;

    set_number("RANK", by_rank ? rank->node * per_node + rank->local : rank->node);
    set_number("WORLD_SIZE", by_rank ? nodes * per_node : nodes);
    set_number("NODE_RANK", rank->node);
    set_number("NNODES", nodes);
    set_number("LOCAL_RANK", rank->local);
    set_number("LOCAL_WORLD_SIZE", per_node);
    set_number("GPUS_PER_NODE", job_number(spec, "gpus", 8));
    set("MASTER_ADDR", find_master(spec));
    set_number("MASTER_PORT", job_number(spec, "port", 29500));
    set(JOB_MARK, job_text(spec, "launch", "none"));
}

static bool is_job(const json_t *spec)
{
    return json_is_true(json_object_get(spec, "is_job"));
}

/* What the caller, or a script, gives; a value of the caller takes precedence. */
static void set_given(const json_t *spec)
{
    const char *variable = is_job(spec) ? "EPKIT_PRELOAD" : "LD_PRELOAD";
    const char *preload = getenv("EPKIT_PRELOAD");

    if (preload && *preload)
        set(variable, preload);
    FOR_MEMBERS (key, value, json_object_get(spec, "env"))
        set(key, json_string_value(value));
    if (job_text(spec, "preload", NULL))
        set(variable, job_text(spec, "preload", NULL));
    unsetenv(JOB_SPEC);
}

/*
 * Is "NAME=VALUE" a variable that mpirun or a scheduler set for one of its ranks? Settings of the user (OMPI_MCA_btl,
 * PMIX_MCA_...) are not such variables.
 */
static bool is_of_rank(const char *entry)
{
    return !text_begins(entry, "PMIX_MCA_") &&
           text_begins_any(entry, TEXTS("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE=", "OMPI_COMMAND=", "OMPI_ARGV=",
                                        "OMPI_NUM_APP_CTX=", "OMPI_FIRST_RANKS=", "OMPI_APP_CTX_NUM_PROCS=",
                                        "OMPI_FILE_LOCATION=", "OMPI_MCA_ess",
                                        "OMPI_MCA_pmix=", "OMPI_MCA_initial_wdir=", "OMPI_MCA_orte_local_daemon_uri=",
                                        "OMPI_MCA_orte_hnp_uri=", "OMPI_MCA_orte_app_num=", "OMPI_MCA_orte_num_nodes=",
                                        "OMPI_MCA_orte_launch=", "OMPI_MCA_orte_bound_at_launch=", "OMPI_MCA_orte_ess_",
                                        "OMPI_MCA_orte_top_session_dir=", "OMPI_MCA_orte_jobfam_session_dir=",
                                        "OMPI_MCA_orte_precondition_transports=", "PMIX_", "PMI_",
                                        "MPI_LOCALRANKID=", "MPI_LOCALNRANKS=", "MV2_COMM_WORLD_"));
}

void job_leave_rank(void)
{
    char name[256];

    for (char **entry = environ; *entry;) {
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(*entry, "="), *entry);
        /* The next entry takes the place of one that is removed. */
        if (!is_of_rank(*entry) || unsetenv(name) != 0)
            entry++;
    }
}

/* What the scripts leave becomes the environment of this process; without scripts what they would begin with. */
static void set_sourced(const struct job_rank *rank)
{
    if (rank->sourced)
        clearenv();
    else
        set_inherited(rank->spec);
    for (size_t at = 0; rank->sourced && at < rank->sourced_bytes; at += strlen(rank->sourced + at) + 1)
        putenv(rank->sourced + at);
}

/* Makes the environment of this process that of the rank. */
static void set_environment(const struct job_rank *rank)
{
    const char *own = getenv("LC_ALL"), *locale;

    set_sourced(rank);
    if (!json_is_true(json_object_get(rank->spec, "mpi")))
        job_leave_rank();
    /*
     * Programs whose output epkit parses run with LC_ALL=C: ssh, which passes it on, and the shell that sources
     * scripts. The user did not set it.
     */
    locale = getenv("LC_ALL");
    if (locale && strcmp(locale, "C") == 0 && own && strcmp(own, "C") != 0)
        set("LC_ALL", own);
    else if (locale && strcmp(locale, "C") == 0)
        unsetenv("LC_ALL");
    set_ranks(rank);
    set_given(rank->spec);
}

ep_status job_environment_make(const json_t *spec, struct job_rank *ret_rank)
{
    *ret_rank = (struct job_rank){.spec = spec};
    return source_scripts(ret_rank);
}

void job_doctor_execute(const void *context)
{
    const struct job_rank *rank = context;
    const char *preload;

    set_sourced(rank);
    job_leave_rank();
    set_given(rank->spec);
    /* Named, not loaded: the doctor is not the program. */
    preload = getenv("LD_PRELOAD");
    if (preload && *preload)
        set("EPKIT_PRELOAD", preload);
    else
        unsetenv("EPKIT_PRELOAD");
    unsetenv("LD_PRELOAD");
    set("LC_ALL", "C");
    execl("/proc/self/exe", "epkit", "doctor", "--json", (char *)NULL);
    _exit(127);
}

ep_status job_rank_make(const json_t *spec, int node, int local, struct job_rank *ret_rank)
{
    *ret_rank = (struct job_rank){.spec = spec, .node = node, .local = local};
    return source_scripts(ret_rank);
}

void job_rank_execute(const void *context)
{
    const struct job_rank *rank = context;
    json_t *words = json_object_get(rank->spec, "argv"), *word;
    char **argv = memory_new(json_array_size(words) + 1, sizeof(*argv));
    const char *file;
    bool is_epkit;
    int number;

    for (size_t i = 0; (word = json_array_get(words, i)); i++)
        argv[i] = (char *)json_string_value(word);
    if (!argv[0])
        _exit(126);
    set_environment(rank);
    is_epkit = json_is_true(json_object_get(rank->spec, "is_epkit")) || is_job(rank->spec);
    file = is_epkit ? "/proc/self/exe" : argv[0];
    execvp(file, argv);
    number = errno;
    if (number == ENOENT && strchr(file, '/') && access(file, F_OK) == 0)
        fprintf(stderr, "epkit: %s: the interpreter in its first line does not exist\n", argv[0]);
    else
        fprintf(stderr, "epkit: %s: %s\n", argv[0], strerror(number));
    _exit(number == ENOENT ? 127 : 126);
}
