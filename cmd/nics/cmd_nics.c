/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_nics.c - epkit nics: the traffic of the NICs, and whether all of them carry it. */
#include "cmd/inspect.h"
#include "common/dir.h"
#include "common/inherited.h"
#include "common/memory.h"
#include "common/output.h"
#include "nics.h"

#include "common/temporary.h"

#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_SECONDS 3600

struct nics_options {
    struct inspect_options inspect;
    const char *devices, *output;
    int64_t interval;
    bool json, prometheus;
};

/* clang-format off */
static const struct opt nics_table[] = {
    {"devices", 'd', "LIST", OPT_STRING, offsetof(struct nics_options, devices),
     .help = "these devices, comma-separated: RDMA devices (mlx5_0), their ports (mlx5_0:1), network interfaces (eth0); "
             "without it all active RDMA ports that carry data"},
    {"interval", 'i', "S", OPT_INT, offsetof(struct nics_options, interval), .min = 1, .max = MAX_SECONDS, .value = "1",
     .help = "seconds between two looks at the counters"},
    {"output", 'o', "FILE", OPT_FILE, offsetof(struct nics_options, output),
     .help = "write the report to FILE instead of standard output"},
    OPT_JSON_ROW(struct nics_options, json),
    {"prometheus", 0, NULL, OPT_FLAG, offsetof(struct nics_options, prometheus),
     .help = "write the counters since boot in the text format of Prometheus"},
    INSPECT_OPTIONS(struct nics_options, inspect),
    {0},
};
/* clang-format on */

/* --- output --- */

/* Where the report goes: to standard output, or to a file by way of memory. */
struct output {
    const char *file; /* NULL: standard output */
    FILE *stream;
    char *text;
    size_t bytes;
    int fd; /* of a file that cannot be replaced as a whole, such as a FIFO; -1: it is replaced */
};

/*
 * Can the file be replaced as a whole? Then whoever reads it meanwhile, such as Prometheus' collector, sees the report
 * before or this one, and a run that fails or is killed leaves the one before.
 */
static bool may_replace(const char *file)
{
    char *copy = memory_printf("%s", file);
    struct stat info;
    bool is_there = lstat(file, &info) == 0, is_new = !is_there && errno == ENOENT && *text_base(file);
    bool result = (is_new || (is_there && S_ISREG(info.st_mode) && access(file, W_OK) == 0)) &&
                  access(dirname(copy), W_OK | X_OK) == 0;

    free(copy);
    return result;
}

/* Opened first, so that an invalid name does not waste a run. Reports why it fails. */
static int open_output(const struct nics_options *options, struct output *ret_output)
{
    struct output *output = ret_output;
    bool is_whole;
    int reason;

    *output = (struct output){.file = options->output, .stream = stdout, .fd = -1};
    if (!output->file)
        return CMD_FINE;
    output->stream = NULL;
    is_whole = may_replace(output->file);
    reason = errno;
    if (is_whole || (output->fd = dir_overwrite(output->file)) >= 0)
        output->stream = memory_stream(&output->text, &output->bytes);
    if (output->stream)
        return CMD_FINE;
    /* Of a new file the folder says why. */
    out_error("nics: %s: %s", output->file, write_reason(errno == ENOENT ? reason : errno));
    return CMD_FAILED;
}

/* Without a text there is no report: the run failed before it. */
static int close_output(struct output *output, bool is_whole)
{
    struct stat info;
    int reason = 0;

    if (output->stream == stdout)
        return out_finish();
    memory_close(output->stream);
    if (output->fd >= 0)
        reason = write_all(output->fd, output->text, output->bytes);
    else if (is_whole && output->bytes > 0)
        reason = temporary_save(output->file, output->text, output->bytes,
                                stat(output->file, &info) == 0 ? info.st_mode & 0755 : dir_usual_mode());
    if (output->fd >= 0 && close(output->fd) != 0 && reason == 0)
        reason = errno;
    free(output->text);
    if (reason == 0)
        return CMD_FINE;
    out_error("nics: writing %s: %s", output->file, write_reason(reason));
    return CMD_FAILED;
}

static int report(FILE *stream, const struct nics_options *options, const struct nics *nics,
                  const struct nics_command *command, bool *ret_is_finding)
{
    struct nics_verdict verdict;
    json_t *document;
    int failed = 0;

    nics_evaluate(nics, command, &verdict);
    document = nics_document(nics, command, &verdict);
    *ret_is_finding = nics_is_finding(&verdict);
    if (options->prometheus) {
        nics_print_prometheus(stream, nics);
    } else if (options->json) {
        ending_dismiss();
        failed = stream_json(stream, document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    } else {
        failed = nics_print(stream, nics, document, &verdict);
    }
    json_decref(document);
    if (fflush(stream) != 0 || ferror(stream))
        failed = -1;
    return failed ? CMD_FAILED : CMD_FINE;
}

/* --- the two modes --- */

static bool is_snapshot(const struct nics_options *options)
{
    struct stat stat_of;

    return options->inspect.from && stat(options->inspect.from, &stat_of) == 0 && !S_ISDIR(stat_of.st_mode);
}

static int show_totals(FILE *stream, const struct nics_options *options, struct nics *nics)
{
    bool is_finding;
    int result;

    /* Prometheus computes rates itself. */
    if (!is_snapshot(options) && !options->prometheus) {
        const sigset_t signals = SIGNALS(SIGINT, SIGTERM);
        siginfo_t info;
        int signal;

        sigprocmask(SIG_BLOCK, &signals, NULL);
        signal = nics_wait(nics, nics->begin_ns + options->interval * 1000000000, &signals, &info);
        if (signal)
            return 128 + signal;
        nics_sample(nics);
    }
    result = report(stream, options, nics, NULL, &is_finding);
    if (result != CMD_FINE || options->prometheus)
        return result;
    return is_finding ? CMD_FINDINGS : CMD_FINE;
}

/* The exit code of a failed command has precedence over findings. */
static int run_command(FILE *stream, const struct nics_options *options, struct nics *nics, char **args,
                       bool *ret_is_whole)
{
    struct nics_command command = {.args = args};
    bool is_finding;
    int result;

    nics_run_command(nics, &command);
    if (!command.has_started)
        return command.code;
    result = report(stream, options, nics, &command, &is_finding);
    *ret_is_whole = result != CMD_FAILED;
    return command.code ? command.code : result;
}

/*
 * A result above 128 is the signal that interrupted epkit, for main(). With a command it is a signal that epkit would
 * have forwarded, or the command's own exit code: epkit exits with the same code.
 */
static int leave(int code, bool has_run)
{
    bool is_interrupt = code == 128 + SIGINT || code == 128 + SIGTERM || code == 128 + SIGHUP || code == 128 + SIGQUIT;

    if (has_run && code != CMD_FINE && !is_interrupt) {
        progress_stop();
        ending_write(code, NULL);
        (void)out_finish();
        exit(code);
    }
    return code;
}

/* --- the command --- */

static int check_usage(const struct cmd *cmd, const struct cmd_call *call, const struct nics_options *options)
{
    bool is_command = call->n_args > 0;

    if (is_command && cmd_given(cmd, call, "interval"))
        return cmd_usage(cmd, "--interval has no meaning with a command: the interval is as long as it runs");
    if (options->prometheus && (is_command || options->json))
        return cmd_usage(cmd, "--prometheus shows the counters since boot: without --json and a command");
    return CMD_FINE;
}

/* Called after the source was opened: its deadline counts here too. */
static int check_rates(const struct cmd *cmd, const struct cmd_call *call, const struct nics_options *options)
{
    if ((call->n_args > 0 || cmd_given(cmd, call, "interval")) && is_snapshot(options))
        return cmd_usage(cmd, "--from %s: a snapshot holds the counters of one moment, so there are no rates in it",
                         options->inspect.from);
    return CMD_FINE;
}

/* Without devices: prints one line instead of the report. */
static int print_no_devices(const struct topo *topo, const struct nics_options *options)
{
    struct output output;
    char line[512];
    FILE *stream;
    int failed = 0;

    if (open_output(options, &output) != CMD_FINE)
        return CMD_FAILED;
    stream = output.stream;
    if (inspect_is_empty(topo))
        snprintf(line, sizeof(line), "%s", topo->why_empty);
    else if (topo->n_nics > 0)
        snprintf(line, sizeof(line), "No RDMA port carries data: 'epkit topo' shows the %s of %d NIC%s, and why.",
                 topo->n_nics == 1 ? "role" : "roles", topo->n_nics, topo->n_nics == 1 ? "" : "s");
    else
        snprintf(line, sizeof(line), "No RDMA NIC: the machine has %d GPU%s and no RDMA device.", topo->n_gpus,
                 topo->n_gpus == 1 ? "" : "s");
    if (options->json) {
        json_t *document = out_document("nics");

        json_object_set_new(document, "verdict", out_text(line));
        ending_dismiss();
        failed = stream_json(stream, document, JSON_INDENT(2));
        json_decref(document);
    } else {
        /* Prometheus' text format allows text only in comments. */
        fprintf(stream, "%s%s\n", options->prometheus && stream != stdout ? "# " : "", line);
    }
    return close_output(&output, !failed) == CMD_FINE && !failed ? CMD_UNSUPPORTED : CMD_FAILED;
}

static int show(const struct cmd_call *call, const struct nics_options *options, struct nics *nics)
{
    struct output output;
    bool is_whole = true;
    int result, closed;

    if (open_output(options, &output) != CMD_FINE)
        return CMD_FAILED;
    if (call->n_args > 0)
        result = run_command(output.stream, options, nics, call->args, &is_whole);
    else
        result = show_totals(output.stream, options, nics);
    closed = close_output(&output, is_whole && (call->n_args > 0 || result != CMD_FAILED));
    /* A failure to write the report has precedence over findings, but not over the exit code of the command. */
    if (result == CMD_FINE || (result == CMD_FINDINGS && call->n_args == 0 && closed != CMD_FINE))
        result = closed;
    return result;
}

static int cmd_nics(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct nics_options *options = call->options;
    struct nics nics = {0};
    struct source *source;
    const struct topo *topo;
    bool has_run;
    int result;

    CMD_TRY(check_usage(cmd, call, options));
    CMD_TRY(inspect_open(cmd, &options->inspect, &source));
    result = check_rates(cmd, call, options);
    topo = topo_read(source);
    if (result == CMD_FINE)
        result = nics_choose(cmd, topo, options->devices, &nics);
    if (result == CMD_FINE && nics.n > 0)
        nics_begin(&nics);
    inspect_reading_done();
    if (result == CMD_FINE)
        result = nics.n > 0 ? show(call, options, &nics) : print_no_devices(topo, options);
    has_run = call->n_args > 0 && nics.n > 0;
    nics_done(&nics);
    source_free(source);
    return leave(result, has_run);
}

const struct cmd command_nics = {
    .name = "nics",
    .args = "[-- CMD [ARGS...]]",
    .max_args = INT_MAX,
    .summary = "what the NICs carry, and whether all of them do",
    .description =
        "Shows the counters of all RDMA ports that carry data: bytes and packets since boot, rates over one interval, "
        "errors and congestion, and in one sentence whether all NICs take part. With CMD it shows the traffic while "
        "CMD ran, and ends with CMD's exit code.\n\n"
        "Traffic is called uneven when there are at least 1 MB of it and a device has less than a tenth of the average "
        "or the busiest one more than 1.5 times the average. NICs that no GPU uses by the assignment of 'epkit topo' "
        "do not count, unless --devices names them. Without CMD uneven traffic is a finding: of the interval, or since "
        "boot if nothing moves meanwhile.\n\n"
        "A port whose link went down, damaged symbols or recovered from errors is a finding: while CMD ran, else since "
        "boot if it has far more than the other ports. So are lost RoCE packets from one in 100000 on. Other errors "
        "are shown without a verdict: adaptive routing, for example, reorders packets.\n\n"
        "CMD has epkit's standard input, output and error to itself, and signals are passed on to it. The report comes "
        "after it on standard output; --output FILE keeps the two apart. Data counters of RDMA ports count words of 4 "
        "bytes and are shown in bytes. Counters may wrap around. To give options to CMD, put -- in front of it.",
    .options = nics_table,
    .options_bytes = sizeof(struct nics_options),
    .examples =
        {
            {"epkit nics", "totals since boot, and what moves within a second"},
            {"epkit nics --output nics.txt -- torchrun test_internode.py", "what a command sends, and over which NICs"},
            {"watch epkit nics", "again and again, until interrupted"},
            {"epkit nics --devices lo -- curl -s http://127.0.0.1:8000/", "also network interfaces"},
            {"epkit nics --prometheus", "for the textfile collector of the node exporter"},
        },
    .exits =
        {
            {CMD_FINE, "the traffic was even, or there was too little of it to judge, and the links are well"},
            {CMD_FAILED, "the report could not be written"},
            {CMD_USAGE, "wrong usage; no such machine or device"},
            {CMD_FINDINGS, "the traffic was uneven, a link went down or damaged data, or packets were lost"},
            {CMD_UNSUPPORTED, "there is no RDMA port that carries data, and --devices names no other; CMD was not run"},
            {126, "with CMD the exit code is that of CMD; here: it could not be executed"},
            {127, "CMD was not found"},
        },
    .run = cmd_nics,
    .flags = CMD_TAKES_PROGRAM,
};
