/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_launch.c - epkit launch: a job on many nodes. */

#include "cmd_launch.h"
#include "base/error.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/redact.h"
#include "common/text.h"
#include "hosts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DAY_S 86400
#define FOLDER_HINT "--out names another folder for the logs, and --no-logs leaves none"
#define WORKLOAD_MAX (1 << 20)
#define POD_WAIT_S 600 /* pods of one job may start minutes apart: images are pulled */

struct launch_args {
    const char *hosts, *hostfile, *ssh, *remote_epkit, *location_cmd, *preload, *workload, *out;
    struct opt_strings env, keep, source;
    int64_t port, connect_timeout, wait, per_node, gpus, master_port, timeout, silent, grace;
    int connect, location, with, world, checks, hostfiles;
    bool debug, no_logs, json;
};

static const char *const connects[] = {"ssh", "srun", NULL};
static const char *const locations[] = {"auto", "metadata", "slurm", "kubernetes", "none", NULL};
static const char *const starters[] = {"auto", "ssh", "mpirun", NULL};
static const char *const worlds[] = {"auto", "nodes", "ranks", NULL};
static const char *const checks[] = {"auto", "report", "require", "skip", NULL};
static const char *const hostfile_choices[] = {"auto", "yes", "no", NULL};

enum { CHECKS_AUTO, CHECKS_REPORT, CHECKS_REQUIRE, CHECKS_SKIP };
enum { STARTER_AUTO, STARTER_SSH, STARTER_MPIRUN };
enum { WORLD_AUTO, WORLD_NODES, WORLD_RANKS };
enum { HOSTFILES_AUTO, HOSTFILES_YES, HOSTFILES_NO };

/* clang-format off */
static const struct opt launch_table[] = {
    {"hosts", 0, "LIST", OPT_STRING, offsetof(struct launch_args, hosts), .heading = "Nodes",
     .help = "nodes, separated by commas: [USER@]HOST[:PORT], with ranges as Slurm writes them: gpu[01-04]"},
    {"hostfile", 'f', "FILE", OPT_FILE, offsetof(struct launch_args, hostfile),
     .help = "nodes, one per line: [USER@]HOST[:PORT], optionally followed by slots=8 as for Open MPI; HOST:8, as for "
             "MPICH and Horovod, is no port but slots (below 22)"},
    {"location", 0, "HOW", OPT_CHOICE, offsetof(struct launch_args, location), .choices = locations, .value = "auto",
     .help = "source of the nodes' physical location, by which they are sorted; auto: the first available"},
    {"location-cmd", 0, "COMMAND", OPT_STRING, offsetof(struct launch_args, location_cmd),
     .help = "each node runs this; it prints the location, one word"},
    {"hostfiles", 0, "WHEN", OPT_CHOICE, offsetof(struct launch_args, hostfiles), .choices = hostfile_choices,
     .value = "auto", .help = "write the sorted nodes to " HOSTS_FILE " (8 slots each) and " HOSTS_FILE_1_SLOT
     " (1 slot each); auto: in pods"},
    {"connect", 0, "HOW", OPT_CHOICE, offsetof(struct launch_args, connect), .choices = connects, .value = "ssh",
     .help = "program that reaches the nodes; srun inside a Slurm job", .heading = "Connections"},
    {"ssh", 0, "COMMAND", OPT_STRING, offsetof(struct launch_args, ssh),
     .help = "ssh with its options; default: EPKIT_SSH, else ssh"},
    {"port", 'p', "N", OPT_INT, offsetof(struct launch_args, port), .min = 0, .max = 65535, .value = "222",
     .help = "port of sshd for nodes without one; 0: that of ssh's configuration; EPKIT_SSH_PORT changes the default"},
    {"connect-timeout", 0, "S", OPT_INT, offsetof(struct launch_args, connect_timeout), .min = 1, .max = 3600, .value = "10",
     .help = "deadline of each layer: name, TCP, banner, login, the answer of epkit"},
    {"wait", 0, "S", OPT_INT, offsetof(struct launch_args, wait), .min = 0, .max = DAY_S,
     .help = "retry nodes that are not up yet for this long; in pods 600, else 0"},
    {"remote-epkit", 0, "FILE", OPT_STRING, offsetof(struct launch_args, remote_epkit),
     .help = "epkit on the nodes; default: the same path as here if it exists, else epkit in PATH"},
    {"with", 'w', "HOW", OPT_CHOICE, offsetof(struct launch_args, with), .choices = starters, .value = "auto",
     .help = "what starts the ranks: epkit over ssh, or Open MPI's mpirun; auto: mpirun for MPI jobs", .heading = "Job"},
    {"workload", 0, "FILE", OPT_FILE, offsetof(struct launch_args, workload),
     .help = "run this launcher script; it is copied to the nodes"},
    {"per-node", 'n', "N", OPT_INT, offsetof(struct launch_args, per_node), .min = 1, .max = 1024,
     .help = "ranks on each node; default 1, with --world ranks one for each GPU"},
    {"world", 0, "WHAT", OPT_CHOICE, offsetof(struct launch_args, world), .choices = worlds, .value = "auto",
     .help = "what RANK and WORLD_SIZE count; auto: nodes with one rank each, else ranks"},
    {"gpus-per-node", 0, "N", OPT_INT, offsetof(struct launch_args, gpus), .min = 1, .max = 1024,
     .help = "GPUS_PER_NODE, and slots in hostfiles; default: the number on the nodes, 8 where they have none"},
    {"master-port", 0, "N", OPT_INT, offsetof(struct launch_args, master_port), .min = 1, .max = 65535, .value = "29500",
     .help = "MASTER_PORT; MASTER_ADDR is the first node"},
    {"env", 'x', "NAME[=VALUE]", OPT_STRINGS, offsetof(struct launch_args, env),
     .help = "pass this variable to the ranks, by default with its value here; may be repeated",
     .heading = "Environment of the ranks"},
    {"keep-value", 0, "NAME", OPT_STRINGS, offsetof(struct launch_args, keep),
     .help = "write the value of this variable to run.json though it looks like a secret; may be repeated"},
    {"source", 0, "FILE", OPT_STRINGS, offsetof(struct launch_args, source),
     .help = "bash sources this script of the node first; '?' in front: if it exists; may be repeated"},
    {"preload", 0, "LIBRARY", OPT_STRING, offsetof(struct launch_args, preload),
     .help = "LD_PRELOAD of the program alone"},
    {"debug", 0, NULL, OPT_FLAG, offsetof(struct launch_args, debug),
     .help = "set the variables for debugging output of NVSHMEM and NCCL"},
    {"timeout", 't', "S", OPT_INT, offsetof(struct launch_args, timeout), .min = 0, .max = 30 * DAY_S,
     .help = "deadline of everything; 0: none. Named jobs have their own, programs none", .heading = "Watching"},
    {"silent", 0, "S", OPT_INT, offsetof(struct launch_args, silent), .min = 0, .max = DAY_S, .value = "60",
     .help = "report a node that has written nothing for this long; 0: never"},
    {"grace", 0, "S", OPT_INT, offsetof(struct launch_args, grace), .min = 0, .max = 15, .value = "5",
     .help = "time between SIGTERM and SIGKILL when ranks are ended"},
    {"checks", 0, "WHAT", OPT_CHOICE, offsetof(struct launch_args, checks), .choices = checks, .value = "auto",
     .help = "'epkit doctor' on all nodes first: report its findings, or require that none is serious; auto: report, "
             "and skip for programs"},
    {"out", 'o', "DIR", OPT_DIR, offsetof(struct launch_args, out),
     .help = "folder for the logs of the run; default: epkit-run-TIME-JOB-XXXXXX, a new one that only you can read"},
    {"no-logs", 0, NULL, OPT_FLAG, offsetof(struct launch_args, no_logs), .help = "leave no folder"},
    OPT_JSON_ROW(struct launch_args, json),
    {0},
};
/* clang-format on */

/* --- the job --- */

/* NULL after reporting that it cannot be read. */
static json_t *read_workload(const struct cmd *cmd, const char *file)
{
    FILE *stream = file_open_regular(file);
    struct stat info;
    char *text = NULL;
    const char *line_end = NULL;
    json_t *files = NULL;
    int code = CMD_FINE, number = errno;
    size_t n = 0;

    if (stream && fstat(fileno(stream), &info) == 0 && info.st_size <= WORKLOAD_MAX) {
        text = memory_new(WORKLOAD_MAX, 1);
        n = fread(text, 1, WORKLOAD_MAX, stream);
    }
    if (n > 0) {
        files = json_pack("{s:o}", "workload", json_stringn(text, n));
        line_end = memchr(text, '\n', n);
    }
    /*
     * Behind a byte order mark the kernel would not see '#!', and the shell that ran the script instead would not find
     * its first command. With CR LF the kernel would look for an interpreter whose name ends in a carriage return, and
     * report that the script does not exist; without '#!' the shell would look for such commands.
     */
    if (!files)
        code = cmd_refuse(cmd, NULL, "--workload %s: %s", file,
                          stream || number == EINVAL ? "not a script: a regular file with text of at most 1 MiB"
                                                     : strerror(number));
    else if (n > 2 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        code = cmd_refuse(cmd, NULL,
                          "--workload %s: a byte order mark precedes its first line: sed -i '1s/^\\xEF\\xBB\\xBF//' %s",
                          file, file);
    else if (line_end && line_end > text && line_end[-1] == '\r')
        code = cmd_refuse(cmd, NULL, "--workload %s: its lines end in CR LF: sed -i 's/\\r$//' %s", file, file);
    if (code != CMD_FINE) {
        json_decref(files);
        files = NULL;
    }
    if (stream)
        fclose(stream);
    free(text);
    return files;
}

static json_t *make_program(int n_args, char **args)
{
    json_t *argv = json_array();

    for (int i = 0; i < n_args; i++)
        json_array_append_new(argv, json_string(args[i]));
    return json_pack("{s:o}", "argv", argv);
}

static int check_matrix(const struct cmd *cmd, const char *name)
{
    static const char *const names[] = {"intranode", "internode", "lowlatency", NULL};
    const char *nearest = options_nearest(name, names);

    if (text_is_any(name, names))
        return CMD_FINE;
    return cmd_usage(cmd, "epkit-test: '%.40s' is not one of intranode, internode, lowlatency%s%s%s", name,
                     nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

/* epkit-test: intranode runs on each node separately; the other matrices are one group over all nodes. */
static int adjust_epkit_test(const struct cmd *cmd, const struct cmd_call *call, int n_nodes, struct launch_job *job)
{
    const struct launch_args *args = call->options;
    json_t *argv = json_object_get(job->spec, "argv");
    char count[16];

    CMD_TRY(check_matrix(cmd, call->args[1]));
    if (n_nodes < 2 && strcmp(call->args[1], "internode") == 0)
        return cmd_refuse(cmd, NULL, "epkit-test internode needs two nodes or more");
    if (n_nodes > 1 && strcmp(call->args[1], "intranode") != 0) {
        snprintf(count, sizeof(count), "%d", n_nodes);
        json_array_append_new(argv, json_string("--nodes"));
        json_array_append_new(argv, json_string(count));
        if (args->with == STARTER_MPIRUN)
            return CMD_FINE;
        /* Configured by the variables that every rank gets. */
        json_array_append_new(argv, json_string("--network"));
        json_array_append_new(argv, json_string("tcp"));
        return CMD_FINE;
    }
    job->starter = LAUNCH_SSH;
    job->per_node = 1;
    job->by_rank = false;
    return CMD_FINE;
}

static int make_job(const struct cmd *cmd, const struct cmd_call *call, const struct canned_job *canned, int n_nodes,
                    struct launch_job *job)
{
    const struct launch_args *args = call->options;

    if (args->workload) {
        job->name = "workload";
        job->files = read_workload(cmd, args->workload);
        job->spec = make_program(call->n_args, call->args);
        if (!job->files)
            return CMD_USAGE;
        json_array_insert_new(json_object_get(job->spec, "argv"), 0, json_string("workload"));
    } else if (canned) {
        job->name = canned->name;
        job->spec = canned->make(canned, call->n_args - 1, call->args + 1);
        job->takes_names = canned->takes_names;
        if (!job->spec)
            return cmd_usage(cmd, "%s", ep_last_error());
    } else {
        job->name = "program";
        job->spec = make_program(call->n_args, call->args);
    }
    job->starter = canned ? canned->starter : LAUNCH_SSH;
    job->per_node = canned ? canned->per_node : args->world == WORLD_RANKS ? 0 : 1;
    job->by_rank = canned && canned->by_rank;
    if (canned && canned->by_rank)
        job->per_node_without_gpus = 2;
    if (canned && strcmp(canned->name, "epkit-test") == 0)
        CMD_TRY(adjust_epkit_test(cmd, call, n_nodes, job));
    if (args->per_node)
        job->per_node = (int)args->per_node;
    if (args->world)
        job->by_rank = args->world == WORLD_RANKS;
    else if (!canned)
        job->by_rank = job->per_node != 1;
    if (args->with)
        job->starter = args->with == STARTER_MPIRUN ? LAUNCH_MPIRUN : LAUNCH_SSH;
    return CMD_FINE;
}

/* --- where --- */

static int find_hosts(const struct cmd *cmd, const struct launch_args *args, struct hosts *hosts,
                      struct hosts_source *source)
{
    ep_status status;

    *source = (struct hosts_source){.index = -1};
    if (args->hosts) {
        status = hosts_add_list("--hosts", args->hosts, hosts);
        snprintf(source->text, sizeof(source->text), "--hosts");
    } else if (args->hostfile) {
        status = hosts_add_file(args->hostfile, HOSTS_OPEN_MPI, hosts);
        snprintf(source->text, sizeof(source->text), "%.150s", args->hostfile);
    } else {
        status = hosts_discover(hosts, source);
        if (status == EP_E_STATE)
            return cmd_refuse(cmd, NULL, "%s; give --hosts or --hostfile", ep_last_error());
    }
    return status == EP_OK ? CMD_FINE : cmd_refuse(cmd, NULL, "%s", ep_last_error());
}

static void make_location(const struct launch_args *args, struct launch_options *options)
{
    const char *server = getenv("GCE_METADATA_HOST");

    options->location = json_pack("{s:s}", "method", args->location_cmd ? "command" : locations[args->location]);
    if (args->location_cmd)
        json_object_set_new(options->location, "command", json_string(args->location_cmd));
    if (server && *server)
        json_object_set_new(options->location, "metadata", json_string(server));
}

/* Arguments travel as JSON. */
static bool is_utf8(const char *text)
{
    json_t *string = json_string(text);

    json_decref(string);
    return string != NULL;
}

static int check_usage(const struct cmd *cmd, const struct cmd_call *call, const struct canned_job *canned)
{
    const struct launch_args *args = call->options;

    for (int i = 0; i < call->n_args; i++)
        if (!is_utf8(call->args[i]))
            return cmd_usage(cmd, "argument %d is not UTF-8: put it into a script (--workload)", i + 1);
    if (args->hosts && args->hostfile)
        return cmd_usage(cmd, "--hosts and --hostfile exclude each other");
    if (args->location_cmd && cmd_given(cmd, call, "location"))
        return cmd_usage(cmd, "--location-cmd and --location exclude each other");
    if (call->n_args == 0 && !args->workload)
        return cmd_usage(cmd, "missing argument: a job or a program; 'epkit launch hostname' tries the nodes");
    if (call->n_args && !*call->args[0] && !args->workload)
        return cmd_usage(cmd, "the name of the program is empty");
    if (canned && canned->argument && call->n_args < 2)
        return cmd_usage(cmd, "%s needs an argument: %s", canned->name, canned->argument);
    if (canned && canned->starter == LAUNCH_MPIRUN && args->with == STARTER_SSH)
        return cmd_usage(cmd, "nccl: its ranks need MPI: give --with mpirun");
    if (canned && canned->takes_names && (args->with == STARTER_MPIRUN || args->per_node))
        return cmd_usage(cmd, "%s sets --with and --per-node itself", canned->name);
    if (strcmp(connects[args->connect], "srun") == 0 && !getenv("SLURM_JOB_ID") && !getenv("SLURM_JOBID"))
        return cmd_refuse(cmd, "--connect srun",
                          "this is no Slurm job (SLURM_JOB_ID is not set): start it by salloc or "
                          "sbatch, or leave the option out to use ssh");
    if (args->no_logs && args->out)
        return cmd_usage(cmd, "--out and --no-logs exclude each other");
    if (args->remote_epkit && strpbrk(args->remote_epkit, "'\"\\$`;&|<>()\n"))
        return cmd_usage(cmd, "--remote-epkit: the path must not contain special characters of the shell");
    return CMD_FINE;
}

/* A hostfile cannot hold ports of single nodes. */
static int check_hosts(const struct cmd *cmd, const struct canned_job *canned, const struct launch_options *options)
{
    if (canned && canned->is_internode && options->hosts.n < 2)
        return cmd_refuse(cmd, NULL, "%s needs two nodes or more, and there is %s alone", canned->name,
                          host_name(&options->hosts.list[0]));
    /*
     * Open MPI accepts names of letters, digits, dots and hyphens, and IPv4 addresses. With others it would wait for
     * ever.
     */
    for (int i = 0; options->job.starter == LAUNCH_MPIRUN && i < options->hosts.n; i++) {
        const struct host *host = &options->hosts.list[i];

        if (strchr(host_name(host), ':'))
            return cmd_refuse(cmd, NULL, "%s: mpirun does not accept IPv6 addresses: give the node a name (/etc/hosts)",
                              host->word);
        if (*host->port)
            return cmd_refuse(
                cmd, NULL,
                "%s: mpirun does not accept ports of single nodes: write it into ssh's configuration, and --port 0",
                host->word);
    }
    return CMD_FINE;
}

/* A new folder for the logs here, for free(); NULL after reporting why there is none. */
static char *make_folder(const struct cmd *cmd, const char *job)
{
    time_t now = time(NULL);
    char stamp[32], *folder;
    struct tm utc;
    int number;

    gmtime_r(&now, &utc);
    strftime(stamp, sizeof(stamp), "%Y%m%dT%H%M%SZ", &utc);
    folder = memory_printf("epkit-run-%s-%.60s-XXXXXX", stamp, job);
    dir_random(folder);
    number = dir_make(folder, 0700);
    if (!number)
        return folder;
    out_error("%s: making the folder %s for the logs: %s", cmd->name, folder, write_reason(number));
    out_hint(FOLDER_HINT);
    free(folder);
    return NULL;
}

/* The words of the command line without secrets: "args", "env", "location", each an array. */
static json_t *show_words(const struct launch_args *args, const struct cmd_call *call)
{
    json_t *words = json_array(), *env = json_array(), *keep = json_array(), *document, *shown;

    for (int i = 0; i < call->n_args; i++)
        json_array_append_new(words, json_string_nocheck(call->args[i]));
    /* No word of these belongs to the one before. */
    for (size_t i = 0; i < args->env.n; i++)
        json_array_append_new(env, json_pack("[o]", json_string_nocheck(args->env.values[i])));
    for (size_t i = 0; i < args->keep.n; i++)
        json_array_append_new(keep, json_string_nocheck(args->keep.values[i]));
    document = json_pack("{s:o,s:o,s:o,s:[o]}", "args", words, "env", env, "kept_values", keep, "location",
                         json_string_nocheck(args->location_cmd ? args->location_cmd : ""));
    shown = redact_document(document);
    json_decref(document);
    return shown;
}

static const char *word_of(const json_t *array, size_t i)
{
    const char *text = json_string_value(json_array_get(array, i));

    return text ? text : REDACTED;
}

/* The command line without secrets. */
static void print_command(const struct cmd *cmd, const struct cmd_call *call, char *ret_text, size_t bytes)
{
    struct launch_args args = *(const struct launch_args *)call->options;
    char **words = memory_new((size_t)call->n_args, sizeof(*words));
    struct cmd_call masked = *call;
    json_t *shown = show_words(&args, call);
    char raw[4096], names[OPT_STRINGS_MAX][128];

    masked.options = &args;
    masked.args = words;
    for (int i = 0; i < call->n_args; i++)
        words[i] = (char *)word_of(json_object_get(shown, "args"), (size_t)i);
    for (size_t i = 0; i < args.env.n; i++) {
        const char *word = args.env.values[i];

        snprintf(names[i], sizeof(names[i]), "%.*s", (int)strcspn(word, "="), word);
        /* Its value is that of here when the command is repeated. */
        if (strcmp(word_of(json_array_get(json_object_get(shown, "env"), i), 0), word) != 0)
            args.env.values[i] = names[i];
    }
    if (args.location_cmd)
        args.location_cmd = word_of(json_object_get(shown, "location"), 0);
    options_print(cmd, &masked, (const char *const[]){NULL}, raw, sizeof(raw));
    text_clean(raw, ret_text, bytes);
    json_decref(shown);
    free(words);
}

static int check_ports(const struct cmd *cmd, const struct cmd_call *call, bool is_pods)
{
    int code = cmd_given(cmd, call, "port") ? CMD_FINE : port_check_env(cmd, PORT_OF_SSH, 0);

    if (code == CMD_FINE && is_pods && !cmd_given(cmd, call, "master-port"))
        code = port_check_env(cmd, "MASTER_PORT", 1);
    return code;
}

static void fill(const struct cmd *cmd, const struct cmd_call *call, const struct canned_job *canned, bool is_pods,
                 struct launch_options *options)
{
    const struct launch_args *args = call->options;
    static char command[4096], port[8];
    const char *ssh = args->ssh ? args->ssh : getenv("EPKIT_SSH");
    bool has_files = args->hostfiles == HOSTFILES_YES || (args->hostfiles == HOSTFILES_AUTO && is_pods);

    print_command(cmd, call, command, sizeof(command));
    snprintf(port, sizeof(port), "%d",
             cmd_given(cmd, call, "port") ? (int)args->port : port_from_env(PORT_OF_SSH, PORT_OF_SSH_DEFAULT));
    options->command = command;
    options->kept = json_array();
    for (size_t i = 0; i < args->keep.n; i++)
        json_array_append_new(options->kept, json_string(args->keep.values[i]));
    options->ssh = ssh && *ssh ? ssh : "ssh";
    options->port = strcmp(port, "0") != 0 ? port : NULL;
    options->remote_epkit = args->remote_epkit;
    options->by_srun = strcmp(connects[args->connect], "srun") == 0;
    options->connect_s = args->connect_timeout;
    options->has_followers = is_pods;
    options->silent_s = args->silent;
    options->grace_s = args->grace;
    options->gpus_per_node = (int)args->gpus;
    options->master_port =
        is_pods && !cmd_given(cmd, call, "master-port") ? port_from_env("MASTER_PORT", 29500) : (int)args->master_port;
    options->has_checks = args->checks == CHECKS_AUTO ? canned != NULL : args->checks != CHECKS_SKIP;
    options->require_checks = args->checks == CHECKS_REQUIRE;
    options->hostfile_8 = has_files ? HOSTS_FILE : NULL;
    options->hostfile_1 = has_files ? HOSTS_FILE_1_SLOT : NULL;
    options->output_fd = args->json ? STDERR_FILENO : STDOUT_FILENO;
}

/* --- running it --- */

static int run(const struct cmd *cmd, const struct cmd_call *call, const struct canned_job *canned,
               struct launch_options *options, bool *ret_interrupted)
{
    const struct launch_args *args = call->options;
    struct parser *parser = canned && canned->is_measured ? parser_new() : NULL;
    struct launch_result result;
    int code = CMD_FAILED;

    if (parser && !options->folder) {
        parser_begin(parser, "output of the nodes");
        options->on_line = launch_feed;
        options->line_context = parser;
    }
    progress_start("launch");
    if (launch_run(options, &result) != EP_OK) {
        progress_stop();
        out_error("%s: %s", cmd->name, ep_last_error());
        if (options->folder && access(options->folder, W_OK) != 0)
            out_hint(FOLDER_HINT);
    } else {
        progress_stop();
        code = show_result(cmd, options, &result, parser, args->json);
    }
    *ret_interrupted = result.interrupted != 0;
    launch_result_done(&result);
    parser_free(parser);
    return code;
}

/* No program has that name: perhaps a job was meant. */
static void hint_job(const char *program)
{
    const char *nearest = options_nearest(program, canned_jobs);

    if (nearest)
        out_hint("did you mean the job '%s'?", nearest);
}

/* A code above 128 is a signal that interrupted epkit, which main() handles; that of a program is its own. */
static int exit_code_of(int code, bool is_interrupted)
{
    if (code <= 128 || is_interrupted)
        return code;
    ending_write(code, NULL);
    exit(out_finish() == CMD_FINE ? code : CMD_FAILED);
}

/* Everything before the run but its folder. */
static int prepare(const struct cmd *cmd, const struct cmd_call *call, const struct canned_job *canned, bool is_pods,
                   struct launch_options *options)
{
    const struct launch_args *args = call->options;
    const struct launch_environment environment = {
        .env = &args->env, .source = &args->source, .preload = args->preload, .debug = args->debug};

    make_location(args, options);
    CMD_TRY(make_job(cmd, call, canned, options->hosts.n, &options->job));
    CMD_TRY(launch_environment(cmd, &environment, is_pods, options->job.spec));
    if (canned && canned->by_rank && options->job.by_rank && options->job.starter == LAUNCH_SSH)
        CMD_TRY(launch_add_secret(cmd, json_object_get(options->job.spec, "env")));
    CMD_TRY(check_hosts(cmd, canned, options));
    CMD_TRY(check_ports(cmd, call, is_pods));
    fill(cmd, call, canned, is_pods, options);
    return CMD_FINE;
}

static int cmd_launch(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct launch_args *args = call->options;
    const struct canned_job *canned = call->n_args && !args->workload ? canned_job_find(call->args[0]) : NULL;
    struct launch_options options = {.grace_s = 5};
    struct hosts_source source;
    bool is_interrupted = false;
    char *folder = NULL;
    int code = check_usage(cmd, call, canned);

    if (code == CMD_FINE)
        code = find_hosts(cmd, args, &options.hosts, &source);
    if (code == CMD_FINE) {
        options.wait_s = cmd_given(cmd, call, "wait") ? args->wait : source.is_pods ? POD_WAIT_S : 0;
        options.deadline_s = cmd_given(cmd, call, "timeout") ? args->timeout : canned ? canned->deadline_s : 0;
        if (source.index > 0) {
            code = follow_leader(&source, options.hosts.list[0].word, options.wait_s, options.deadline_s);
            hosts_done(&options.hosts);
            return exit_code_of(code, false);
        }
        code = prepare(cmd, call, canned, source.is_pods, &options);
    }
    if (code == CMD_FINE && !args->no_logs && !args->out && !(folder = make_folder(cmd, options.job.name)))
        code = CMD_FAILED;
    if (code == CMD_FINE) {
        options.folder = args->no_logs ? NULL : args->out ? args->out : folder;
        code = run(cmd, call, canned, &options, &is_interrupted);
        if (code == 127 && !canned && !args->workload)
            hint_job(call->args[0]);
        if (folder)
            (void)rmdir(folder); /* nothing was written */
    }
    free(folder);
    json_decref(options.job.spec);
    json_decref(options.job.files);
    json_decref(options.location);
    json_decref(options.kept);
    hosts_done(&options.hosts);
    return exit_code_of(code, is_interrupted);
}

const struct cmd command_launch = {
    .name = "launch",
    .args = "JOB|PROGRAM [ARG...]",
    .max_args = 1 << 20,
    .summary = "run a job on many nodes, and report which node failed",
    .description =
        "Runs a program on many nodes at once, with its output here and in a log for each node, and says which node "
        "failed and why. Nothing waits for ever, and nothing is left running: not when a node is lost, not when epkit "
        "is interrupted or killed.\n"
        "\n"
        "Jobs: hostname; epkit-test MATRIX; deepep-intranode, deepep-internode, deepep-lowlatency, deepep-v2 (DeepEP's own tests "
        "where they are installed, 2048 tokens, hidden 7168, 256 experts, top-8; 128 tokens for lowlatency); nccl "
        "TEST (nccl-tests, -b 2M -e 16G -f 2 -n 1 -g 1 -w 10); nccl-init; ib-write-bw [DEVICE...] (-F, on RoCE -x 3, neighbours "
        "in pairs: the NICs that carry data, by 'epkit topo', or those named). "
        "Anything else is a program. They begin with 'epkit doctor' on all nodes. To give options "
        "to the program, put -- in front of it.\n"
        "\n"
        "Without --hosts and --hostfile the nodes come from the environment: JobSet (JOBSET_NAME, NNODES, "
        "JOB_COMPLETION_INDEX; REPLICATED_JOB_NAME and JOB_INDEX if not workload and 0), LeaderWorkerSet, pods of a "
        "chart (HOSTNAME_PREFIX, DOMAIN_NAME), an Indexed Job with a headless service, Slurm, a hostfile of MPI or "
        "PBS, or /etc/job-worker-services.txt. In pods and in tasks of srun every instance runs the command; the "
        "first one does the work, the others wait for its exit code (pods) or end at once (tasks).\n"
        "\n"
        "All nodes are contacted at once by ssh with your configuration, without passwords. A node that does not answer "
        "is reported with the layer that failed: DNS, TCP, banner, authentication, command, epkit, version, disk. Then "
        "they are sorted by physical location; nodes without one come last. The first one is rank 0 and MASTER_ADDR, and "
        "the first in the hostfiles.\n"
        "\n"
        "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, NNODES, GPUS_PER_NODE, "
        "MASTER_ADDR, MASTER_PORT, the variables of -x and of the scripts of --source, and otherwise the environment of a "
        "login by ssh. In pods NCCL_*, NVSHMEM_*, DEEP_EP_*, UCX_*, LD_LIBRARY_PATH, PYTHONPATH, PATH, "
        "VIRTUAL_ENV, CUDA_HOME and HF_TOKEN are passed on as well. A library that is preloaded here is preloaded into the program alone.\n"
        "\n"
        "When a rank fails, all others are ended, and epkit returns its exit status. The folder of the run contains "
        "testbed-logs/run.json, coordinator.log and a worker-HOST.log for each node. Without --out it is new and only its "
        "owner's. Links of other users in the path of --out are refused, and so is a testbed-logs that is a link or in which "
        "every user may write.",
    .options = launch_table,
    .options_bytes = sizeof(struct launch_args),
    .examples =
        {
            {"epkit launch --hosts 'gpu[01-04]' hostname", "Do all nodes answer?"},
            {"epkit launch --hostfile hosts epkit-test internode --per-node 8", "epkit's own test over Open MPI."},
            {"sbatch --nodes 2 --wrap 'epkit launch deepep-internode'", "DeepEP's test on the nodes of a Slurm job."},
            {"epkit launch nccl all_reduce -- -b 1M -e 1M", "Arguments of the test come after --."},
            {"epkit launch --workload train.sh -x HF_TOKEN --world ranks", "A launcher script on all nodes."},
            {"epkit launch --hosts a,b --json hostname | jq .verdict", "As JSON."},
        },
    .exits =
        {
            {CMD_FINE, "every rank on every node ended with status 0"},
            {CMD_FAILED, "a node did not answer or was lost, or a log could not be written; or the program's own"},
            {CMD_USAGE, "wrong usage; nothing was started"},
            {CMD_FINDINGS, "--checks require, and the doctor has a serious finding; or the output of a test says so"},
            {CMD_UNSUPPORTED, "what the job needs is not installed on a node"},
            {124, "the deadline passed"},
            {127,
             "otherwise the status of the first rank that failed; 128 and the number of the signal that killed it"},
        },
    .run = cmd_launch,
    .flags = CMD_TAKES_PROGRAM,
};
