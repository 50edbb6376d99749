/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_env.c - epkit env: writes the right environment for a machine, or checks an environment. */
#include "cmd/inspect.h"
#include "common/cmd.h"
#include "common/inherited.h"
#include "common/json.h"
#include "common/output.h"
#include "common/shell.h"
#include "env.h"
#include "machine/doctor/queries.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- a command with the advised environment --- */

#define EXIT_CANNOT_EXECUTE 126
#define EXIT_NO_COMMAND 127

static const char *own_env(void *unused, const char *name)
{
    (void)unused;
    return getenv(name);
}

/* Launchers: a library preloaded into one is loaded by everything that it starts. */
static bool is_launcher(char **command)
{
    if (text_is_any(text_base(command[0]),
                    TEXTS("mpirun", "mpiexec", "orterun", "prterun", "srun", "sbatch", "salloc", "ssh", "pdsh", "flux",
                          "jsrun", "torchrun", "deepspeed", "docker", "podman", "kubectl")))
        return true;
    /* python3 -m torch.distributed.run is torchrun */
    for (; command[0] && command[1]; command++)
        if (strcmp(command[0], "-m") == 0 &&
            text_is_any(command[1], TEXTS("torch.distributed.run", "torch.distributed.launch")))
            return true;
    return false;
}

/* The library has to exist on the machine that runs the command, or ld.so complains in each process. */
static bool preload_is_wanted(const struct advice_row *row, char **command)
{
    if (is_launcher(command)) {
        out_warning("%s is left out: %s would load the library too, and whatever it starts", row->name,
                    text_base(command[0]));
        out_hint("put 'epkit env --' in front of the program: %s ... epkit env -- PROGRAM", text_base(command[0]));
        return false;
    }
    if (access(row->value, R_OK) != 0) {
        out_warning("%s is left out: %s is not on this machine", row->name, row->value);
        return false;
    }
    return true;
}

static bool prepend(const struct doctor_machine *machine, const struct advice_row *row)
{
    const char *current = getenv(row->name);

    return setenv(row->name, advice_prepend(machine->source, row->value, current ? current : ""), 1) == 0;
}

static bool apply(const struct doctor_machine *machine, const struct advice_row *row, int gpu, char **command)
{
    if (row->unset)
        return unsetenv(row->name) == 0;
    if (row->scope == ADVICE_RANK)
        return gpu < 0 || gpu >= row->n_values || setenv(row->name, row->values[gpu], 1) == 0;
    if (row->scope == ADVICE_PROGRAM && !preload_is_wanted(row, command))
        return true;
    return row->prepend ? prepend(machine, row) : setenv(row->name, row->value, 1) == 0;
}

/*
 * Sets the advised variables in this process and executes the command. Returns an exit code only on failure, as shells
 * do: 127 if there is no such command, 126 if it cannot be executed.
 */
static int env_execute(const struct doctor_machine *machine, char **command)
{
    int gpu = advice_gpu_of(machine->topo, own_env, NULL);
    int error;

    FOR_EACH (row, machine->advice->rows, machine->advice->n)
        if (!apply(machine, row, gpu, command)) {
            out_error("%s could not be set: %s", row->name, strerror(errno));
            return CMD_FAILED;
        }
    fflush(stdout);
    inherited_restore();
    execvp(command[0], command);
    error = errno;
    out_error("%s cannot be executed: %s", command[0], strerror(error));
    return error == ENOENT ? EXIT_NO_COMMAND : EXIT_CANNOT_EXECUTE;
}

/* --- what the doctor's checks find --- */

/* Checks that compare variables with the machine; the audit has no rows for what they find. */
static const char *const checks[] = {"gid",           "shared-nic", "nccl-hca",      "socket-interface",
                                     "nccl-disabled", "nccl-gdr",   "traffic-class", "visible-devices",
                                     "net-plugin",    "rendezvous", "hca-lists",     "topology-file",
                                     "dmabuf-off",    "host-name",  "rdmav-drivers", "hca-prefix"};

static bool is_set(const struct doctor_machine *machine, const char *name)
{
    return source_env(machine->source, name) || *machine_nccl_value(machine, name, NULL);
}

/* The variable that a finding is about, if it is set: the one to unset, one that the text names, or the first. */
static const char *variable_of(const struct doctor_machine *machine, const struct doctor_result *result)
{
    const char *name = NULL;

    if (strncmp(result->fix, "unset ", 6) == 0)
        name = source_printf(machine->source, "%.*s", (int)strcspn(result->fix + 6, " \n"), result->fix + 6);
    for (int named = 1; named >= 0; named--)
        for (int i = 0; i < result->n_evidence && !(name && is_set(machine, name)); i++)
            if (!named || strstr(result->text, result->evidence[i].where))
                name = result->evidence[i].where;
    return name && is_set(machine, name) ? name : NULL;
}

static const struct {
    const char *key, *text;
} kinds[] = {
    [AUDIT_VOID] = {"void", "does nothing"},         [AUDIT_VALUE] = {"value", "wrong value"},
    [AUDIT_HARMFUL] = {"harmful", "harmful"},        [AUDIT_MISSING] = {"missing", "missing"},
    [AUDIT_DIFFERS] = {"differs", "not as advised"}, [AUDIT_PATH] = {"path", "not there"},
    [AUDIT_UNKNOWN] = {"unknown", "unknown"},
};

/* What the finding says of this variable: its evidence is "VALUE: WHY" where it has a reason of its own. */
static const char *text_of(const struct doctor_machine *machine, const struct doctor_result *result, const char *name)
{
    const char *value = machine_nccl_value(machine, name, NULL);
    size_t n = strlen(value);

    for (int i = 0; i < result->n_evidence && !strstr(result->text, name); i++)
        if (strcmp(result->evidence[i].where, name) == 0 && strncmp(result->evidence[i].what, value, n) == 0 &&
            strncmp(result->evidence[i].what + n, ": it ", 5) == 0)
            return source_printf(machine->source, "%s %s", name, result->evidence[i].what + n + 5);
    return result->text;
}

/* What a variable is, and what is wrong with it; `value` NULL: it is not set. */
static json_t *make_row(const char *name, const char *value, enum audit_kind kind, const char *advised,
                        const char *text)
{
    return json_pack("{s:s, s:o, s:s, s:s, s:o, s:o}", "name", name, "value", value ? out_text(value) : json_null(),
                     "kind", kinds[kind].key, "verdict", kinds[kind].text, "advised", out_text_or_null(advised), "text",
                     out_text(text));
}

static json_t *row_of(const struct doctor_machine *machine, const struct doctor_result *result, const char *name)
{
    const struct advice_row *advice = advice_find(machine->advice, name);
    const char *advised = advice && !advice->unset && advice->scope == ADVICE_NODE ? advice->value : "";
    char text[4096] = "";

    text_append(text, sizeof(text), "%s.%s%s", text_of(machine, result, name), *result->advice ? " " : "",
                result->advice);
    if (*advised)
        text_append(text, sizeof(text), " Set it to %s.", advised);
    else if (text_begins(result->fix, "unset ") && !strstr(result->advice, "unset"))
        text_append(text, sizeof(text), " Unset it.");
    return make_row(name, machine_nccl_value(machine, name, NULL),
                    result->severity == DOCTOR_ERROR ? AUDIT_HARMFUL : AUDIT_DIFFERS, advised, text);
}

/* Does a command of the finding set or unset the variable? */
static bool is_mended(const struct doctor_result *result, const char *name)
{
    size_t n = strlen(name);

    for (const char *at = result->fix; (at = strstr(at, name)); at += n)
        if (at > result->fix && at[-1] == ' ' && strchr(" \n=", at[n]))
            return true;
    return false;
}

/* What checks find about variables that are set, as rows of --check: "kind" is "harmful" or "differs". */
static json_t *env_findings(const struct doctor_machine *machine)
{
    json_t *rows = json_array();

    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        struct doctor_result result;
        const char *name;

        doctor_run(machine, doctor_find(checks[i]), &result);
        name = result.outcome == DOCTOR_FOUND ? variable_of(machine, &result) : NULL;
        if (name)
            json_array_append_new(rows, row_of(machine, &result, name));
        /* One fault in several variables. */
        for (int k = 0; name && k < result.n_evidence; k++) {
            const char *other = result.evidence[k].where;

            if (strcmp(other, name) != 0 && is_set(machine, other) && is_mended(&result, other))
                json_array_append_new(rows, row_of(machine, &result, other));
        }
    }
    return rows;
}

struct env_options {
    struct inspect_options inspect;
    int format;
    bool check, json;
};

static const struct opt env_table[] = {
    {"format", 'f', "FORMAT", OPT_CHOICE, offsetof(struct env_options, format), .choices = env_format_names,
     .value = "sh",
     .help = "what to write: a script for sh, bash and zsh; a file for docker's --env-file; a list for "
             "'env:' of Kubernetes; a task prolog for Slurm"},
    {"check", 0, NULL, OPT_FLAG, offsetof(struct env_options, check),
     .help = "check the current environment instead, and exit with 3 if it has a fault"},
    OPT_JSON_ROW(struct env_options, json),
    INSPECT_OPTIONS(struct env_options, inspect),
    INSPECT_PID_OPTION(struct env_options, inspect),
    {0},
};

/* --- checking --- */

/* Would GPUs share NICs by NVSHMEM's default choice, or have none, although there are as many NICs as GPUs? */
static bool lacks_nics(const struct doctor_machine *machine)
{
    const struct map *best = machine->ibgda;
    struct map *map = machine_nvshmem_map(machine);
    bool lacks =
        map->n_shared > best->n_shared || ANY_OF(i, map->n, map->choices[i].nic < 0 && best->choices[i].nic >= 0);

    map_free(map);
    return lacks;
}

/*
 * Missing or suboptimal variables are advice: an environment works without them, or serves another purpose. It is a
 * fault only if the stack is used and GPUs get the wrong NICs because no variable selects them.
 */
static bool is_advice(const struct doctor_machine *machine, const struct audit_row *row)
{
    const char *const *of_nics = TEXTS("DEEP_EP_DEVICE_TO_HCA_MAPPING", "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PREFIX");

    return row->kind == AUDIT_DIFFERS ||
           (row->kind == AUDIT_MISSING &&
            !(text_is_any(row->name, of_nics) && machine->audit->uses_software && lacks_nics(machine)));
}

/* The rows of one kind: faults, or advice. */
static json_t *audit_json(const struct doctor_machine *machine, bool advice)
{
    json_t *rows = json_array();

    FOR_EACH (row, machine->audit->rows, machine->audit->n)
        if (is_advice(machine, row) == advice)
            json_array_append_new(rows, make_row(row->name, row->kind == AUDIT_MISSING ? NULL : row->value, row->kind,
                                                 row->advised, row->text));
    return rows;
}

/* Index of the row of a variable; -1: there is none. */
static int find_row(const json_t *rows, const char *name)
{
    return FIRST_OF(i, json_array_size(rows), strcmp(json_text(json_array_get(rows, (size_t)i), "name"), name) == 0);
}

/* Adds what the doctor finds. A variable has one row, that of its most severe problem. */
static void add_findings(json_t *findings, json_t *faults, json_t *advice)
{
    FOR_JSON (row, findings) {
        bool is_fault = strcmp(json_text(row, "kind"), "harmful") == 0;
        int advised = find_row(advice, json_text(row, "name"));

        if (find_row(faults, json_text(row, "name")) >= 0 || (!is_fault && advised >= 0))
            continue;
        if (advised >= 0)
            json_array_remove(advice, (size_t)advised);
        json_array_append(is_fault ? faults : advice, row);
    }
}

static void audit_verdict(const struct doctor_machine *machine, const json_t *faults, const json_t *advice, char *text,
                          size_t bytes)
{
    const json_t *first = json_array_get(faults, 0);
    size_t n = json_array_size(faults), n_advice = json_array_size(advice);

    *text = '\0';
    if (n == 0 && n_advice > 0 && !machine->audit->uses_software) {
        text_append(text, bytes, "The environment sets nothing of NVSHMEM, DeepEP or NCCL; %zu variable%s advised.",
                    n_advice, n_advice == 1 ? " is" : "s are");
        return;
    }
    if (n == 1)
        text_append(text, bytes, "The environment has one fault: ");
    else if (n > 0)
        text_append(text, bytes, "The environment has %zu faults; the first is ", n);
    if (n > 0)
        text_append(text, bytes, "%s (%s).", json_text(first, "name"), json_text(first, "verdict"));
    else
        text_append(text, bytes, n_advice ? "The environment has no fault." : "The environment is right for %s.",
                    machine->topo->n_gpus + machine->topo->n_nics ? "this machine" : "a machine without GPUs and NICs");
    if (n_advice > 0)
        text_append(text, bytes, " %zu variable%s could be better.", n_advice, n_advice == 1 ? "" : "s");
}

static void print_rows(const char *title, const json_t *rows)
{
    static const struct out_column columns[] = {
        {"VARIABLE", "name", 0, 0},
        {"VALUE", "value", 0, OUT_TRUNC},
        {"VERDICT", "verdict", 0, 0},
        {"WHY, AND WHAT TO DO", "text", 0, OUT_TRUNC},
    };

    if (json_array_size(rows) == 0)
        return;
    out_line("\n%s", title);
    out_table(stdout, columns, COUNT(columns), rows, OUT_TABLE);
}

static int print_audit(const struct cmd *cmd, const struct env_options *options, const struct doctor_machine *machine,
                       json_t *faults, json_t *advice)
{
    int code = json_array_size(faults) > 0 ? CMD_FINDINGS : CMD_FINE;
    json_t *document = options->json ? out_document(cmd->name) : NULL;
    char verdict[512];

    /* Without hardware, only variables that no machine reads can be checked. */
    if (inspect_is_empty(machine->topo) && code == CMD_FINE)
        return inspect_report_empty(machine->topo, document);
    audit_verdict(machine, faults, advice, verdict, sizeof(verdict));
    if (document) {
        json_object_update_new(document, json_pack("{s:o, s:i, s:O, s:O}", "verdict", out_text(verdict), "findings",
                                                   (int)json_array_size(faults), "audit", faults, "advice", advice));
        return out_json(document) == 0 ? code : CMD_FAILED;
    }
    out_verdict(code == CMD_FINDINGS ? OUT_BAD : OUT_GOOD, "%s", verdict);
    print_rows("Faults:", faults);
    print_rows("Advice:", advice);
    if (json_array_size(faults) + json_array_size(advice) > 0)
        out_line("\n'epkit env' writes the environment that is right for it.");
    return code;
}

static int check(const struct cmd *cmd, const struct env_options *options, const struct doctor_machine *machine,
                 json_t *findings)
{
    struct source_environment environment = source_environment(machine->source);
    json_t *faults, *advice;
    int code;

    if (environment.state == SOURCE_OK) {
        faults = audit_json(machine, false);
        advice = audit_json(machine, true);
        add_findings(findings, faults, advice);
        code = print_audit(cmd, options, machine, faults, advice);
        json_decref(faults);
        json_decref(advice);
        return code;
    }
    if (inspect_is_empty(machine->topo))
        return inspect_report_empty(machine->topo, options->json ? out_document(cmd->name) : NULL);
    out_error("the environment of %s cannot be read: %s", source_name(machine->source),
              environment.state == SOURCE_ABSENT         ? "there is no /proc/self/environ"
              : environment.state == SOURCE_NOT_RECORDED ? "it is not in the snapshot"
                                                         : environment.why);
    out_hint("--check is for the shell that it is called in; without it, the advice needs no environment");
    return CMD_FAILED;
}

/* --- writing --- */

static int write_script(const struct cmd *cmd, const struct env_options *options, const struct doctor_machine *machine)
{
    json_t *document, *rows;

    if (!options->json) {
        env_write(stdout, machine, (enum env_format)options->format);
        return out_finish();
    }
    rows = env_json(machine);
    document = out_document(cmd->name);
    json_object_update_new(document, json_pack("{s:o, s:o}", "verdict",
                                               json_sprintf("%zu variable%s advised.", json_array_size(rows),
                                                            json_array_size(rows) == 1 ? " is" : "s are"),
                                               "variables", rows));
    return out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
}

/* --- the command --- */

static int check_usage(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct env_options *options = call->options;
    char word[4096];

    if (call->n_args > 0 && strcmp(call->args[-1], "--") != 0)
        return cmd_usage(cmd, "put '--' in front of the command: epkit env -- %s ...",
                         shell_quote(call->args[0], word, sizeof(word)));
    if (call->n_args > 0 && (options->check || options->json || cmd_given(cmd, call, "format")))
        return cmd_usage(cmd, "--check, --format and --json do not go with a command");
    if (options->check && cmd_given(cmd, call, "format"))
        return cmd_usage(cmd, "--check writes a table, or JSON with --json: it does not go with --format");
    if (options->json && cmd_given(cmd, call, "format"))
        return cmd_usage(cmd, "--json does not go with --format %s", env_format_names[options->format]);
    if (options->inspect.pid && !options->check)
        return cmd_usage(cmd, "--pid goes with --check");
    return CMD_FINE;
}

static int cmd_env(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct env_options *options = call->options;
    struct doctor_machine *machine;
    struct source *source;
    json_t *findings;
    int result = check_usage(cmd, call);

    if (result == CMD_FINE)
        result = inspect_open(cmd, &options->inspect, &source);
    if (result != CMD_FINE)
        return result;
    machine = doctor_machine_read(source);
    findings = options->check ? env_findings(machine) : NULL;
    inspect_reading_done();
    if (options->check)
        result = check(cmd, options, machine, findings);
    else if (inspect_is_empty(machine->topo) && (options->json || call->n_args > 0))
        result = inspect_report_empty(machine->topo, options->json ? out_document(cmd->name) : NULL);
    else if (inspect_is_empty(machine->topo)) {
        /* A comment instead of a script: a shell that sources or evaluates it must not execute the sentence. */
        out_line("# %s", machine->topo->why_empty);
        result = CMD_UNSUPPORTED;
    } else
        result = call->n_args > 0 ? env_execute(machine, call->args) : write_script(cmd, options, machine);
    json_decref(findings);
    doctor_machine_free(machine);
    return result;
}

const struct cmd command_env = {
    .name = "env",
    .args = "[-- COMMAND...]",
    .max_args = 1 << 20,
    .summary = "write the environment that is right for a machine, or run a command under it",
    .description =
        "Writes the variables of NVSHMEM, DeepEP, NCCL and libepkit that have an effect on this machine, each with its reason, and "
        "the folders of libraries that exist and are needed. What differs from rank to rank (NVSHMEM_HCA_LIST) is chosen "
        "by the rank's number on its node, which launchers give in LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, "
        "MPI_LOCALRANKID, PMI_LOCAL_RANK or SLURM_LOCALID. It is not set where a launcher starts a single process on a "
        "node: that process may start the ranks itself, and all of them would inherit one NIC.\n\n"
        "With a command it is executed under this environment: its exit status, its signals and its process number are "
        "those of the command. LD_PRELOAD is set for the command, and its children inherit it. Launchers (mpirun, srun, "
        "torchrun, ssh, ...) are started without it, with a warning: put 'epkit env --' between the launcher and the "
        "program.\n\n"
        "--check judges the environment that is set, or that of a process: what does nothing, what is no value, what "
        "causes a fault on this machine, and which paths are not there: these are faults, and so is a missing choice of "
        "NICs where GPUs would share them. What else is missing or could be better is listed apart, as advice.",
    .options = env_table,
    .options_bytes = sizeof(struct env_options),
    .examples =
        {
            {"eval \"$(epkit env)\"", "Set it in this shell."},
            {"mpirun -n 16 epkit env -- python3 train.py", "Each rank with its own NIC and the right NVSHMEM."},
            {"epkit env --format k8s >env.yaml", "For the container of a pod."},
            {"epkit env --check --pid 4711", "What is wrong with the environment of a process that runs."},
        },
    .exits =
        {
            {CMD_FINE, "written, or the environment is right; with a command its own exit status"},
            {CMD_FAILED, "the machine or the environment could not be read"},
            {CMD_USAGE, "wrong usage"},
            {CMD_FINDINGS, "--check found faults"},
            {CMD_UNSUPPORTED, "there is neither a GPU nor a NIC"},
            {126, "the command cannot be executed"},
            {127, "there is no such command"},
        },
    .run = cmd_env,
    .flags = CMD_TAKES_PROGRAM,
};
