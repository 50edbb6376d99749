/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_doctor.c - epkit doctor: what is wrong with a machine, and what to do about it. */
#include "common/capture.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/text.h"
#include "diagnosis.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define REMOTE_COMMAND "epkit doctor --json"

struct doctor_options {
    struct inspect_options inspect;
    const char *only, *explain, *hosts, *ssh, *remote_command;
    int64_t port;
    bool list, json, fix, yes, verbose, stacks;
};

/* clang-format off */
static const struct opt doctor_table[] = {
    {"only", 0, "LIST", OPT_STRING, offsetof(struct doctor_options, only),
     .help = "run only these checks: ids or groups, separated by commas", .heading = "Checks"},
    {"list", 0, NULL, OPT_FLAG, offsetof(struct doctor_options, list), .help = "list the checks and run none"},
    {"explain", 0, "ID", OPT_STRING, offsetof(struct doctor_options, explain),
     .help = "print symptom, cause and remedy of a failure mode"},
    {"stacks", 0, NULL, OPT_FLAG, offsetof(struct doctor_options, stacks),
     .help = "say of each installed library for expert parallelism whether it runs here, or the first thing missing; with "
             "names only of these, with 'all' of every known one"},
    {"verbose", 'v', NULL, OPT_FLAG, offsetof(struct doctor_options, verbose),
     .help = "list every check with its outcome, and why some are unknown"},
    OPT_JSON_ROW(struct doctor_options, json),
    INSPECT_OPTIONS(struct doctor_options, inspect),
    INSPECT_PID_OPTION(struct doctor_options, inspect),
    {"fix", 0, NULL, OPT_FLAG, offsetof(struct doctor_options, fix),
     .help = "show the safe commands, ask, run them, and check again", .heading = "Repair"},
    {"yes", 'y', NULL, OPT_FLAG, offsetof(struct doctor_options, yes), .help = "with --fix: do not ask"},
    {"hosts", 0, "FILE", OPT_FILE, offsetof(struct doctor_options, hosts),
     .help = "run it on these nodes over ssh and compare them: one per line, [USER@]HOST[:PORT], as in Open "
             "MPI's hostfiles; or a list as in 'epkit launch': a,b or gpu[01-04], or USER@HOST or HOST:PORT",
     .heading = "Several nodes"},
    {"ssh", 0, "COMMAND", OPT_STRING, offsetof(struct doctor_options, ssh),
     .help = "program for --hosts, with its options; default: EPKIT_SSH, else ssh"},
    {"port", 'p', "N", OPT_INT, offsetof(struct doctor_options, port), .min = 0, .max = 65535,
     .value = PORT_OF_SSH_TEXT,
     .help = "port of sshd for nodes without one; 0: that of ssh's configuration; " PORT_OF_SSH " changes the default"},
    {"remote-command", 0, "COMMAND", OPT_STRING, offsetof(struct doctor_options, remote_command),
     .help = "what --hosts runs on each node; default: epkit doctor, for JSON, with the same --only"},
    {0},
};
/* clang-format on */

/* --- which checks --- */

static void suggest(const struct cmd *cmd, const char *option, const char *word)
{
    const char *names[2 * DOCTOR_CHECKS_MAX + 1], *near;
    char text[256];
    size_t n = 0;

    for (size_t i = 0; doctor_checks[i] && i < DOCTOR_CHECKS_MAX; i++) {
        names[n++] = doctor_checks[i]->id;
        names[n++] = doctor_checks[i]->group;
    }
    names[n] = NULL;
    text_clean(word, text, sizeof(text));
    near = options_nearest(word, names);
    if (near)
        cmd_usage(cmd, "--%s: there is no check '%s'; did you mean '%s'?", option, text, near);
    else
        cmd_usage(cmd, "--%s: there is no check '%s'; --list names them", option, text);
}

/* The checks that --only names, or all checks, as a list that ends with NULL. */
static int choose(const struct cmd *cmd, const char *only, const struct doctor_check **ret_checks)
{
    bool wanted[DOCTOR_CHECKS_MAX] = {false};
    size_t n = 0;

    for (const char *at = only; at;) {
        size_t length = strcspn(at, ",");
        bool found = false;
        char word[64];

        snprintf(word, sizeof(word), "%.*s", (int)(length < sizeof(word) ? length : sizeof(word) - 1), at);
        for (size_t i = 0; doctor_checks[i]; i++)
            if (strcmp(doctor_checks[i]->id, word) == 0 || strcmp(doctor_checks[i]->group, word) == 0)
                found = wanted[i] = true;
        if (!found) {
            suggest(cmd, "only", word);
            return CMD_USAGE;
        }
        at = at[length] ? at + length + 1 : NULL;
    }
    for (size_t i = 0; doctor_checks[i] && i < DOCTOR_CHECKS_MAX; i++)
        if (!only || wanted[i])
            ret_checks[n++] = doctor_checks[i];
    ret_checks[n] = NULL;
    return CMD_FINE;
}

/* --- a diagnosis --- */

int diagnosis_exit(const struct diagnosis *diagnosis)
{
    if (diagnosis->n_found)
        return CMD_FINDINGS;
    return diagnosis->n_open > 0 || (diagnosis->n_fine == 0 && diagnosis->n_unknown > 0) ? CMD_NOT_KNOWN : CMD_FINE;
}

int diagnosis_read(const struct cmd *cmd, const struct inspect_options *inspect, struct doctor_machine **ret_machine)
{
    struct source *source;
    int code = inspect_open(cmd, inspect, &source);

    if (code == CMD_FINE)
        *ret_machine = doctor_machine_read(source);
    return code;
}

/* --- --fix: shows a plan, asks for confirmation, runs the safe commands, and checks again --- */

/* Safe commands load a module or change a limit until the next reboot; everything else is listed for the user. */

#define FIX_TIMEOUT_MS 60000 /* of a command */
#define OUTPUT_SHOWN 4096    /* bytes of the output of a failed command */

static void show_output(const struct capture_text *text)
{
    const char *at = text->text;

    while (at && *at && at - text->text < OUTPUT_SHOWN) {
        struct piece line = text_take(&at, "\n");
        char shown[512];

        snprintf(shown, sizeof(shown), "%.*s", (int)(line.n < sizeof(shown) ? line.n : sizeof(shown) - 1), line.text);
        text_clean(shown, shown, sizeof(shown));
        out_line("     | %s", shown);
    }
}

/* Why a command failed, "" if it did not. */
static void describe_failure(const struct capture *capture, char *ret_text, size_t bytes)
{
    *ret_text = '\0';
    if (capture->start_error)
        snprintf(ret_text, bytes, "could not be started: %s", strerror(capture->start_error));
    else if (capture->late)
        snprintf(ret_text, bytes, "did not end within its time and was killed");
    else if (WIFSIGNALED(capture->status))
        snprintf(ret_text, bytes, "was killed by signal %d", WTERMSIG(capture->status));
    else if (WEXITSTATUS(capture->status) != 0)
        snprintf(ret_text, bytes, "ended with exit status %d", WEXITSTATUS(capture->status));
}

static bool run_line(const char *line)
{
    char command[1152], failure[256], shell[] = "/bin/sh", option[] = "-c";
    char *argv[] = {shell, option, command, NULL};
    struct capture capture = {.argv = argv};
    bool needs_root = text_begins(line, "sudo "), is_fine;

    /* Root needs no sudo, which may not be installed; others need one that asks for no password. */
    snprintf(command, sizeof(command), "%s%s", needs_root && geteuid() != 0 ? "sudo -n " : "",
             line + (needs_root ? strlen("sudo ") : 0));
    capture_run(&capture, 1, 1, FIX_TIMEOUT_MS, NULL, NULL);
    describe_failure(&capture, failure, sizeof(failure));
    is_fine = *failure == '\0';
    out_line("   %s: %s", command, is_fine ? "done" : failure);
    if (!is_fine) {
        show_output(&capture.output);
        show_output(&capture.error);
    }
    capture_done(&capture);
    return is_fine;
}

/* A command may have several lines; execution stops at the first that fails. */
static bool run_fix(const char *fix)
{
    FOR_PIECES (part, fix, "\n") {
        char line[1024];

        snprintf(line, sizeof(line), "%.*s", (int)part.n, part.text);
        if (part.n >= sizeof(line) || !run_line(line))
            return false;
    }
    return true;
}

static bool is_planned(const struct doctor_result *result)
{
    return result->outcome == DOCTOR_FOUND && result->fix_is_safe && *result->fix;
}

/* Prints the plan and the commands that are left to the user; returns the number of commands in the plan. */
static int print_plan(const struct diagnosis *diagnosis)
{
    int n = 0, n_left = 0;

    FOR_EACH (result, diagnosis->results, diagnosis->n) {
        if (!is_planned(result))
            continue;
        if (n++ == 0)
            out_line("\nPlan:");
        out_line("%2d. %s", n, result->fix);
        out_line("    fixes %s: %s", result->check->id, result->text);
    }
    FOR_EACH (result, diagnosis->results, diagnosis->n) {
        if (result->outcome != DOCTOR_FOUND || is_planned(result))
            continue;
        if (n_left++ == 0)
            out_line("\nTo run manually, because a reboot does not revert it:");
        diagnosis_print_block(result->check->id, *result->fix ? result->fix : result->advice);
    }
    return n;
}

/* Returns true only if the answer begins with y. */
static bool ask(int n)
{
    char answer[64];

    printf("\nRun %s? [y/N] ", n == 1 ? "it" : "them");
    fflush(stdout);
    return fgets(answer, sizeof(answer), stdin) && tolower((unsigned char)answer[0]) == 'y';
}

/* Runs the checks of the plan again, on the machine as it is now. Returns an exit code. */
static int check_again(const struct cmd *cmd, const struct diagnosis *diagnosis, const struct inspect_options *inspect)
{
    struct doctor_machine *machine = NULL;
    int n_left = 0, code = diagnosis_read(cmd, inspect, &machine);

    if (code != CMD_FINE)
        return code;
    out_line("\nChecking again:");
    for (int i = 0; i < diagnosis->n; i++) {
        const struct doctor_check *check = diagnosis->results[i].check;
        struct doctor_result result;

        if (!is_planned(&diagnosis->results[i]))
            continue;
        doctor_run(machine, check, &result);
        n_left += result.outcome == DOCTOR_FOUND;
        if (result.outcome == DOCTOR_FOUND)
            out_line("   %s: still there: %s", check->id, result.text);
        else
            out_line("   %s: fixed%s%s", check->id, *result.text ? ": " : "", result.text);
    }
    inspect_reading_done();
    doctor_machine_free(machine);
    return n_left ? CMD_FINDINGS : CMD_FINE;
}

/* Asks for confirmation unless `yes`, and reads the machine again to check what was fixed. */
static int fix_run(const struct cmd *cmd, const struct diagnosis *diagnosis, const struct inspect_options *inspect,
                   bool yes)
{
    int n = print_plan(diagnosis), n_failed = 0, step = 0, code;

    if (n == 0) {
        if (diagnosis->n_found)
            out_line("\n--fix cannot fix any of this.");
        return diagnosis_exit(diagnosis);
    }
    if (!yes) {
        if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
            return cmd_usage(cmd, "--fix asks before it runs the plan, and there is no terminal to ask on: use --yes");
        if (!ask(n)) {
            out_line("Nothing was run.");
            return CMD_FINDINGS;
        }
    }
    out_line("%s", "");
    for (int i = 0; i < diagnosis->n; i++)
        if (is_planned(&diagnosis->results[i])) {
            out_line("%2d. %s", ++step, diagnosis->results[i].check->id);
            n_failed += !run_fix(diagnosis->results[i].fix);
        }
    code = check_again(cmd, diagnosis, inspect);
    if (code != CMD_FINE && code != CMD_FINDINGS)
        return code;
    if (n_failed) {
        out_error("%d of %d commands failed", n_failed, n);
        if (geteuid() != 0)
            out_hint("they need root: run this command with sudo");
        return CMD_FAILED;
    }
    return code == CMD_FINDINGS || n < diagnosis->n_found ? CMD_FINDINGS : CMD_FINE;
}

/* --- the command --- */

static int report(const struct cmd *cmd, const struct doctor_options *options, const struct diagnosis *diagnosis)
{
    int code = diagnosis_exit(diagnosis);

    if (options->json)
        return out_json(diagnosis_json(cmd->name, diagnosis)) == 0 ? code : CMD_FAILED;
    diagnosis_print(diagnosis, options->verbose);
    if (options->fix)
        code = fix_run(cmd, diagnosis, &options->inspect, options->yes);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

static int diagnose(const struct cmd *cmd, const struct doctor_options *options,
                    const struct doctor_check *const *checks)
{
    struct doctor_machine *machine = NULL;
    struct diagnosis diagnosis = {.n = 0};
    int code = diagnosis_read(cmd, &options->inspect, &machine);

    if (code != CMD_FINE)
        return code;
    /* Hidden GPUs are checked even if the machine is otherwise empty. */
    if (inspect_is_empty(machine->topo) && machine->topo->n_hidden_gpus == 0) {
        json_t *document = options->json ? out_document(cmd->name) : NULL;

        inspect_reading_done();
        /* For a comparison of nodes. */
        if (document)
            json_object_set_new(document, "facts", diagnosis_facts(machine));
        code = inspect_report_empty(machine->topo, document);
        doctor_machine_free(machine);
        return code;
    }
    diagnosis.machine = machine;
    while (checks[diagnosis.n])
        diagnosis.n++;
    diagnosis.results = memory_new((size_t)diagnosis.n + 1, sizeof(*diagnosis.results));
    for (int i = 0; i < diagnosis.n; i++) {
        struct doctor_result *result = &diagnosis.results[i];

        doctor_run(machine, checks[i], result);
        diagnosis.n_fine += result->outcome == DOCTOR_FINE;
        diagnosis.n_found += result->outcome == DOCTOR_FOUND;
        diagnosis.n_errors += result->outcome == DOCTOR_FOUND && result->severity == DOCTOR_ERROR;
        diagnosis.n_not_applicable += result->outcome == DOCTOR_NOT_APPLICABLE;
        diagnosis.n_unknown += result->outcome == DOCTOR_UNKNOWN;
        diagnosis.n_open += doctor_is_inconclusive(result);
        diagnosis.n_denied += result->outcome == DOCTOR_UNKNOWN && result->missing == DOCTOR_MISSING_ROOT;
    }
    inspect_reading_done();
    code = report(cmd, options, &diagnosis);
    free(diagnosis.results);
    doctor_machine_free(machine);
    return code;
}

/* Reports the first given one of the options that do not go together with this one. */
static bool are_apart(const struct cmd *cmd, const struct cmd_call *call, const char *option, const char *const *others)
{
    while (*others && !cmd_given(cmd, call, *others))
        others++;
    if (*others)
        cmd_usage(cmd, "--%s and --%s do not go together", option, *others);
    return *others;
}

/* Reports incompatible options. */
static int check_options(const struct cmd *cmd, const struct cmd_call *call, const struct doctor_options *options)
{
    const char *const *not_with_stacks = TEXTS("only", "list", "explain", "fix", "verbose", "hosts");
    const char *const *not_with_hosts = TEXTS("from", "pid", "fix", "yes", "list", "explain", "verbose");

    if (options->stacks && are_apart(cmd, call, "stacks", not_with_stacks))
        return CMD_USAGE;
    if (call->n_args && !options->stacks)
        return cmd_usage(cmd, "unexpected argument '%s'; names of libraries need --stacks", call->args[0]);
    if (options->hosts && are_apart(cmd, call, "hosts", not_with_hosts))
        return CMD_USAGE;
    if (!options->hosts && (options->ssh || cmd_given(cmd, call, "port") || cmd_given(cmd, call, "remote-command")))
        return cmd_usage(cmd, "--ssh, --port and --remote-command need --hosts");
    if (options->hosts && options->only && cmd_given(cmd, call, "remote-command"))
        return cmd_usage(cmd, "--only is passed on in the default of --remote-command: write it into yours");
    if (options->fix && options->inspect.from)
        return cmd_usage(cmd, "--fix runs commands on this machine, and --from is another one");
    if (options->fix && are_apart(cmd, call, "fix", TEXTS("json")))
        return CMD_USAGE;
    if (options->yes && !options->fix)
        return cmd_usage(cmd, "--yes needs --fix");
    return options->list && are_apart(cmd, call, "list", TEXTS("explain")) ? CMD_USAGE : CMD_FINE;
}

static int compare_hosts(const struct cmd *cmd, const struct cmd_call *call, const struct doctor_options *options)
{
    const char *ssh = options->ssh ? options->ssh : getenv("EPKIT_SSH");
    struct hosts_options hosts = {.file = options->hosts,
                                  .ssh = ssh && *ssh ? ssh : "ssh",
                                  .remote_command = options->remote_command ? options->remote_command : REMOTE_COMMAND,
                                  .timeout_s = options->inspect.timeout,
                                  .json = options->json};
    char command[4096];

    if (cmd_given(cmd, call, "port"))
        hosts.port = (int)options->port;
    else if (port_check_env(cmd, PORT_OF_SSH, 0) == CMD_FINE)
        hosts.port = port_from_env(PORT_OF_SSH, PORT_OF_SSH_DEFAULT);
    else
        return CMD_USAGE;
    if (options->only) {
        if (strlen(options->only) > 2048)
            return cmd_usage(cmd, "--only: longer than 2048 characters");
        snprintf(command, sizeof(command), REMOTE_COMMAND " --only %s", options->only);
        hosts.remote_command = command;
    }
    return hosts_run(cmd, &hosts);
}

static int cmd_doctor(const struct cmd *cmd, const struct cmd_call *call)
{
    static const struct out_column columns[] = {
        {"ID", "id", 0, 0}, {"GROUP", "group", 0, 0}, {"MODE", "mode", 0, 0}, {"CHECKS THAT", "title", 0, OUT_TRUNC}};
    const struct doctor_options *options = call->options;
    const struct doctor_check *checks[DOCTOR_CHECKS_MAX + 1];
    json_t *document;
    int code = check_options(cmd, call, options);

    if (code == CMD_FINE)
        code = choose(cmd, options->only, checks);
    if (code != CMD_FINE)
        return code;
    if (options->stacks)
        return diagnosis_run_stacks(cmd, &options->inspect, options->json, call->args, call->n_args);
    if (options->hosts)
        return compare_hosts(cmd, call, options);
    if (options->explain) {
        checks[0] = doctor_find(options->explain);
        checks[1] = NULL;
        if (!checks[0]) {
            suggest(cmd, "explain", options->explain);
            return CMD_USAGE;
        }
        if (!options->json) {
            diagnosis_explain(checks[0]);
            return out_finish();
        }
    }
    if (!options->list && !options->explain)
        return diagnose(cmd, options, checks);
    if (!options->json)
        return OUT_PRINT(columns, diagnosis_list(checks)) == 0 ? CMD_FINE : CMD_FAILED;
    document = out_document(cmd->name);
    json_object_set_new(document, "list", diagnosis_list(checks));
    return out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
}

const struct cmd command_doctor = {
    .name = "doctor",
    .args = "[STACK...]",
    .max_args = 16,
    .summary = "find what is wrong with a machine, and say what to do",
    .description =
        "Looks for the known failure modes of expert-parallel communication: in the driver, the NICs, the verbs "
        "libraries, NVSHMEM, NCCL, DeepEP, the limits, the topology and the environment of a job. It reads files, the "
        "environment and the driver's answers; it needs no root, changes nothing, and loads no suspicious library into "
        "itself. For a healthy machine it prints one line, which says what was checked. A finding says what was seen, "
        "why it matters, and what to run.\n\n"
        "With --from it checks a snapshot that 'epkit topo --save' wrote on another machine. With --pid it checks the "
        "environment, the limits and the libraries of a running process instead of its own.\n\n"
        "If a check cannot be completed, the machine does not count as healthy: the verdict is \"Not known\", with its "
        "own exit code, and each such check says what to do about it. What only root can see, or only the node outside "
        "of a container, is listed and does not change the verdict.\n\n"
        "Each command has a class: safe, restart (of programs, services or the machine), or cuts-off (may disconnect a "
        "network or a device). The last is given only if the finding is certain.\n\n"
        "--stacks compares what each library for expert parallelism needs (DeepEP, sgl-deep-ep, NCCL EP, NIXL EP and "
        "others) with PyTorch, NCCL, CUDA, the compiler and the NICs of the machine, in the order in which the library "
        "itself would fail, and gives the command for the first thing missing. Nothing is imported or loaded. A "
        "library that is installed, and whose needs nobody has written down, is named in the verdict.\n\n"
        "--fix runs the commands that a reboot reverts (loading a module, remounting /dev/shm), after showing them. "
        "Everything else is left to you.\n\n"
        "--hosts runs it on many nodes concurrently and prints first how they differ: a single node with another "
        "driver can make a job hang. ssh must work without a password, and epkit must be installed there. A node has "
        "--timeout seconds to answer; one that does not is named with what failed: DNS, TCP, authentication, epkit.",
    .options = doctor_table,
    .options_bytes = sizeof(struct doctor_options),
    .examples =
        {
            {"epkit doctor", "Check this machine."},
            {"epkit doctor --only nic,driver --verbose", "Run two groups of checks and list each."},
            {"epkit doctor --explain one-nic", "Explain a failure mode."},
            {"epkit doctor --from snapshot.json --json", "Check a machine from a saved snapshot, as JSON."},
            {"epkit doctor --stacks", "Say which libraries for expert parallelism run here, and what the others lack."},
            {"epkit doctor --fix", "Fix what can be fixed safely."},
            {"epkit doctor --hosts hostfile", "Compare the nodes of a job."},
        },
    .exits =
        {
            {CMD_FINE, "nothing was found"},
            {CMD_FAILED, "the machine could not be read, a fix failed, or a node did not answer"},
            {CMD_USAGE, "wrong usage"},
            {CMD_FINDINGS, "something was found, something is missing for a library, or nodes differ"},
            {CMD_UNSUPPORTED, "there is neither a GPU nor a NIC to check, or --stacks does not know the library"},
            {CMD_NOT_KNOWN, "nothing was found, but a check that could not be completed leaves the verdict open"},
        },
    .run = cmd_doctor,
};
