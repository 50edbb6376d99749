/* SPDX-License-Identifier: Apache-2.0 */
/* launch_job.c - a rank: its environment, its folder, and becoming the program. */
#include "launch_job.h"

#include "base/error.h"
#include "common/capture.h"
#include "common/child.h"
#include "common/clean.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SOURCE_SECONDS 60
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

/* --- an environment as an array of strings that are all owned --- */

struct variables {
    size_t n, capacity;
    char **list;
    bool has_failed;
};

static size_t find_variable(const struct variables *variables, const char *name, size_t length)
{
    for (size_t i = 0; i < variables->n; i++)
        if (strncmp(variables->list[i], name, length) == 0 && variables->list[i][length] == '=')
            return i;
    return variables->n;
}

static void unset(struct variables *variables, const char *name)
{
    size_t at = find_variable(variables, name, strlen(name));

    if (at == variables->n || !variables->list)
        return;
    free(variables->list[at]);
    variables->list[at] = variables->list[--variables->n];
    variables->list[variables->n] = NULL;
}

/* Sets "NAME=VALUE", and takes ownership of the string. */
static void put(struct variables *variables, char *entry)
{
    size_t at = entry ? find_variable(variables, entry, strcspn(entry, "=")) : 0;

    if (!entry) {
        variables->has_failed = true;
        return;
    }
    if (at < variables->n) {
        free(variables->list[at]);
        variables->list[at] = entry;
        return;
    }
    if (variables->n + 2 > variables->capacity) {
        size_t capacity = 2 * variables->capacity + 64;
        char **grown = realloc(variables->list, capacity * sizeof(*grown));

        if (!grown) {
            free(entry);
            variables->has_failed = true;
            return;
        }
        variables->list = grown;
        variables->capacity = capacity;
    }
    variables->list[variables->n++] = entry;
    variables->list[variables->n] = NULL;
}

static void set(struct variables *variables, const char *name, const char *value)
{
    char *entry = NULL;

    if (asprintf(&entry, "%s=%s", name, value) < 0)
        entry = NULL;
    put(variables, entry);
}

static void set_number(struct variables *variables, const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    set(variables, name, text);
}

static void free_variables(char **list)
{
    for (size_t i = 0; list && list[i]; i++)
        free(list[i]);
    free(list);
}

/* --- scripts --- */

/*
 * The shell sources the scripts and prints the resulting environment, separated by NUL. LD_PRELOAD is passed on under
 * another name, because env(1) is not the program either.
 */
static const char source_program[] =
    "trap 'echo \"epkit: $script ended the shell with status $?; if it calls exit, use return\" >&2' EXIT;"
    " for script in \"$@\"; do case $script in"
    " \\?*) script=${script#?}; [ -r \"$script\" ] || continue;; esac;"
    " . \"$script\" >&2 || { echo \"epkit: $script ended with status $?\" >&2; trap - EXIT; exit 1; }; done; trap - EXIT;"
    " EPKIT_PRELOAD=${LD_PRELOAD-${EPKIT_PRELOAD-}}; unset LD_PRELOAD; export EPKIT_PRELOAD; exec env -0";

static ep_status parse_environment(const struct capture *capture, struct variables *variables)
{
    struct variables fresh = {0};
    char clean[SCRIPT_TAIL + 100];

    if (capture->start_error)
        return ep_fail_errno(EP_E_SYSTEM, capture->start_error, "bash, which sources the scripts, cannot be run");
    if (capture->late)
        return ep_fail(EP_E_TIMEOUT, "the scripts to be sourced did not end within %d s", SOURCE_SECONDS);
    if (!WIFEXITED(capture->status) || WEXITSTATUS(capture->status) != 0 || !capture->output.text) {
        const char *text = capture->error.text ? capture->error.text : "";
        size_t length = strlen(text), n = 0;
        char line[2 * SCRIPT_TAIL + 1];

        while (length > 0 && text[length - 1] == '\n')
            length--;
        /* A message is one line. */
        for (size_t i = length > SCRIPT_TAIL ? length - SCRIPT_TAIL : 0; i < length; i++) {
            line[n++] = text[i] == '\n' ? ';' : text[i];
            if (text[i] == '\n')
                line[n++] = ' ';
        }
        line[n] = '\0';
        text_clean(line, clean, sizeof(clean));
        return ep_fail(EP_E_SYSTEM, "sourcing scripts failed: %s", clean);
    }
    for (size_t at = 0; at < capture->output.bytes; at += strlen(capture->output.text + at) + 1)
        put(&fresh, strdup(capture->output.text + at));
    free_variables(variables->list);
    *variables = fresh;
    return EP_OK;
}

static ep_status source_scripts(const json_t *scripts, struct variables *variables)
{
    size_t n = json_array_size(scripts), i;
    const char **argv = calloc(n + 5, sizeof(*argv));
    struct capture capture = {0};
    json_t *script;
    ep_status status;

    if (!argv)
        return ep_fail(EP_E_MEMORY, "no memory for a list of scripts");
    argv[0] = "bash";
    argv[1] = "-c";
    argv[2] = source_program;
    argv[3] = "bash";
    json_array_foreach(scripts, i, script)
    {
        argv[4 + i] = json_string_value(script);
    }
    capture.argv = (char *const *)argv;
    if (capture_run(&capture, 1, 1, SOURCE_SECONDS * 1000, NULL, NULL) != 0)
        status = ep_fail(EP_E_MEMORY, "no memory for the environment that scripts leave");
    else
        status = parse_environment(&capture, variables);
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

static void set_ranks(const json_t *spec, int node, int local, struct variables *variables)
{
    int nodes = job_number(spec, "nodes", 1), per_node = job_number(spec, "per_node", 1);
    bool by_rank = strcmp(job_text(spec, "world", "nodes"), "ranks") == 0;

    set_number(variables, "RANK", by_rank ? node * per_node + local : node);
    set_number(variables, "WORLD_SIZE", by_rank ? nodes * per_node : nodes);
    set_number(variables, "NODE_RANK", node);
    set_number(variables, "NNODES", nodes);
    set_number(variables, "LOCAL_RANK", local);
    set_number(variables, "LOCAL_WORLD_SIZE", per_node);
    set_number(variables, "GPUS_PER_NODE", job_number(spec, "gpus", 8));
    set(variables, "MASTER_ADDR", find_master(spec));
    set_number(variables, "MASTER_PORT", job_number(spec, "port", 29500));
    set(variables, JOB_MARK, job_text(spec, "launch", "none"));
}

/*
 * Programs whose output epkit parses run with LC_ALL=C: ssh, which passes it on, and the shell that sources scripts.
 * The user did not set it.
 */
static void restore_locale(struct variables *variables)
{
    size_t at = find_variable(variables, "LC_ALL", strlen("LC_ALL"));
    const char *own = getenv("LC_ALL");

    if (at == variables->n || strcmp(variables->list[at], "LC_ALL=C") != 0)
        return;
    if (own && strcmp(own, "C") != 0)
        set(variables, "LC_ALL", own);
    else
        unset(variables, "LC_ALL");
}

static void set_given(const json_t *spec, struct variables *variables)
{
    size_t preload = find_variable(variables, "EPKIT_PRELOAD", strlen("EPKIT_PRELOAD"));
    json_t *value, *env = json_object_get(spec, "env");
    const char *key;

    /* Set by a script; a value of the caller takes precedence. */
    if (preload < variables->n && variables->list[preload][strlen("EPKIT_PRELOAD=")])
        set(variables, "LD_PRELOAD", variables->list[preload] + strlen("EPKIT_PRELOAD="));
    json_object_foreach(env, key, value)
    {
        if (json_is_string(value))
            set(variables, key, json_string_value(value));
        else
            unset(variables, key);
    }
    if (job_text(spec, "preload", NULL))
        set(variables, "LD_PRELOAD", job_text(spec, "preload", NULL));
    unset(variables, JOB_SPEC);
}

/* Finds the folder of "dirs" that holds "needs". */
static ep_status find_dir(const json_t *spec, const char **ret_dir)
{
    const char *needs = job_text(spec, "needs", NULL);
    json_t *dirs = json_object_get(spec, "dirs"), *dir;
    char path[4096], searched[256] = "";
    size_t i;

    *ret_dir = NULL;
    json_array_foreach(dirs, i, dir)
    {
        size_t used = strlen(searched);

        if (!needs || (snprintf(path, sizeof(path), "%s/%s", json_string_value(dir), needs) < (int)sizeof(path) &&
                       access(path, R_OK) == 0)) {
            *ret_dir = json_string_value(dir);
            return EP_OK;
        }
        snprintf(searched + used, sizeof(searched) - used, "%s%s", i ? ", " : "", json_string_value(dir));
    }
    if (!needs || !json_is_array(dirs))
        return EP_OK;
    return ep_fail(EP_E_UNSUPPORTED, "%s is not installed: there is no %s below %s", job_text(spec, "product", "it"),
                   needs, searched);
}

ep_status job_check(const json_t *spec)
{
    const char *dir;

    return find_dir(spec, &dir);
}

bool job_is_of_rank(const char *entry)
{
    static const char *const begins[] = {"OMPI_COMM_WORLD_",
                                         "OMPI_UNIVERSE_SIZE=",
                                         "OMPI_COMMAND=",
                                         "OMPI_ARGV=",
                                         "OMPI_NUM_APP_CTX=",
                                         "OMPI_FIRST_RANKS=",
                                         "OMPI_APP_CTX_NUM_PROCS=",
                                         "OMPI_FILE_LOCATION=",
                                         "OMPI_MCA_ess",
                                         "OMPI_MCA_pmix=",
                                         "OMPI_MCA_initial_wdir=",
                                         "OMPI_MCA_orte_local_daemon_uri=",
                                         "OMPI_MCA_orte_hnp_uri=",
                                         "OMPI_MCA_orte_app_num=",
                                         "OMPI_MCA_orte_num_nodes=",
                                         "OMPI_MCA_orte_launch=",
                                         "OMPI_MCA_orte_bound_at_launch=",
                                         "OMPI_MCA_orte_ess_",
                                         "OMPI_MCA_orte_top_session_dir=",
                                         "OMPI_MCA_orte_jobfam_session_dir=",
                                         "OMPI_MCA_orte_precondition_transports=",
                                         "PMIX_",
                                         "PMI_",
                                         "MPI_LOCALRANKID=",
                                         "MPI_LOCALNRANKS=",
                                         "MV2_COMM_WORLD_"};

    if (strncmp(entry, "PMIX_MCA_", strlen("PMIX_MCA_")) == 0)
        return false;
    for (size_t i = 0; i < sizeof(begins) / sizeof(begins[0]); i++)
        if (strncmp(entry, begins[i], strlen(begins[i])) == 0)
            return true;
    return false;
}

ep_status job_rank_make(const json_t *spec, int node, int local, struct job_rank *ret_rank)
{
    json_t *argv = json_object_get(spec, "argv"), *word;
    struct job_rank rank = {.local = local};
    struct variables variables = {0};
    bool is_mpi = json_is_true(json_object_get(spec, "mpi"));
    ep_status status = EP_OK;
    size_t i;

    EP_TRY(find_dir(spec, &rank.dir));
    rank.argv = calloc(json_array_size(argv) + 1, sizeof(*rank.argv));
    if (!rank.argv || json_array_size(argv) == 0) {
        free(rank.argv);
        return ep_fail(EP_E_ARG, "there is no program to run");
    }
    json_array_foreach(argv, i, word)
    {
        rank.argv[i] = (char *)json_string_value(word);
    }
    rank.file = json_is_true(json_object_get(spec, "is_epkit")) ? "/proc/self/exe" : rank.argv[0];
    for (char **entry = environ; *entry; entry++)
        if (is_mpi || !job_is_of_rank(*entry))
            put(&variables, strdup(*entry));
    if (json_array_size(json_object_get(spec, "source")))
        status = source_scripts(json_object_get(spec, "source"), &variables);
    restore_locale(&variables);
    set_ranks(spec, node, local, &variables);
    set_given(spec, &variables);
    if (status == EP_OK && variables.has_failed)
        status = ep_fail(EP_E_MEMORY, "no memory for an environment");
    rank.environment = variables.list;
    if (status != EP_OK) {
        job_rank_done(&rank);
        return status;
    }
    *ret_rank = rank;
    return EP_OK;
}

void job_rank_done(struct job_rank *rank)
{
    free(rank->argv);
    free_variables(rank->environment);
    *rank = (struct job_rank){0};
}

void job_rank_execute(const struct job_rank *rank)
{
    const char *path = NULL;
    int number;

    if (rank->dir && chdir(rank->dir) != 0) {
        fprintf(stderr, "epkit: %s: %s\n", rank->dir, strerror(errno));
        _exit(126);
    }
    /* execvpe() searches the PATH of this process, so it must be set to that of the rank. */
    for (char **entry = rank->environment; *entry; entry++)
        if (strncmp(*entry, "PATH=", 5) == 0)
            path = *entry + 5;
    if (path)
        setenv("PATH", path, 1);
    execvpe(rank->file, rank->argv, rank->environment);
    number = errno;
    if (number == ENOENT && strchr(rank->file, '/') && access(rank->file, F_OK) == 0)
        fprintf(stderr, "epkit: %s: the interpreter in its first line does not exist\n", rank->argv[0]);
    else
        fprintf(stderr, "epkit: %s: %s\n", rank->argv[0], strerror(number));
    _exit(number == ENOENT ? 127 : 126);
}
