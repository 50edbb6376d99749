/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_watch.c - epkit watch: follows the log of a run, says where it stands, and judges it at its end. */
#include "cmd/parse/log_input.h"
#include "common/inherited.h"
#include "common/json.h"
#include "common/memory.h"
#include "watch.h"

#include "base/clock.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES (256 << 10)
#define POLL_MS 200
#define S UINT64_C(1000000000)
#define CHANGE_NS S           /* between two plain lines, if something changed */
#define HEARTBEAT_NS (30 * S) /* if nothing did */
#define COMPLETE_NS (5 * S)   /* without a byte after a run that is complete: another one may follow */
#define UNSURE_NS (30 * S)    /* after one that may have had only its first case */
#define ABSENT_NS (60 * S)    /* for a file that does not appear, without --idle and --timeout */
#define FAILED_NS (30 * S)    /* after a failure: the other ranks may report the cause */

struct watch_options {
    struct input_options input;
    int64_t timeout, idle;
    bool until_end, quiet, json;
};

/* Why the watch ended. */
enum ending { GOING_ON, INPUT_ENDED, RUN_COMPLETE, RUN_FAILED, IDLE, TIMEOUT, SIGNAL, BROKEN, N_ENDINGS };

static const char *const endings[N_ENDINGS] = {
    [INPUT_ENDED] = "end of input", [RUN_COMPLETE] = "complete", [RUN_FAILED] = "failed", [IDLE] = "idle",
    [TIMEOUT] = "timeout",          [SIGNAL] = "interrupted",
};

struct watch {
    const struct cmd *cmd;
    const struct watch_options *options;
    const char *path;
    struct tail tail;
    struct parser *parser;
    struct standing standing;
    char *block;
    uint64_t begin_ns, written_ns; /* of the last byte */
    uint64_t shown, shown_ns;      /* hash of what was said last */
    bool is_terminal;
};

static volatile sig_atomic_t caught;

static void on_signal(int number)
{
    caught = number;
}

static void catch_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};

    /* Signals that nohup ignores stay ignored. */
    for (size_t i = 0; i < COUNT(numbers); i++)
        if (numbers[i] != SIGHUP || !inherited_is_ignored(SIGHUP))
            sigaction(numbers[i], &(struct sigaction){.sa_handler = on_signal}, NULL);
}

static unsigned long long seconds(uint64_t from_ns, uint64_t to_ns)
{
    return (to_ns - from_ns) / S;
}

/* --- what it says while it runs --- */

/* On a terminal the line of the progress; elsewhere one for each change, also when something becomes late. */
static void say(struct watch *watch, uint64_t now)
{
    const struct standing *standing = &watch->standing;
    bool is_silent = watch->tail.fd >= 0 && now - watch->written_ns >= LATE_S * S;
    const char *where = *standing->where                   ? standing->where
                        : watch->tail.fd < 0               ? "no such file yet: waiting for it"
                        : *parser_last_line(watch->parser) ? "nothing recognised yet"
                                                           : "nothing written yet";
    uint64_t state = text_hash(where, strlen(where)) + is_silent + 2 * (*standing->late != '\0');
    char text[512];
    struct text line = text_in(text, sizeof(text));

    if (watch->options->quiet)
        return;
    text_add(&line, "%s%s%s", watch->tail.fd < 0 ? watch->path : "", watch->tail.fd < 0 ? ": " : "", where);
    if (is_silent)
        text_add(&line, "; nothing written for %llu s", seconds(watch->written_ns, now));
    else if (*standing->late)
        text_add(&line, "; %s", standing->late);
    if (watch->is_terminal) {
        progress_update(0, 0, "%s", text);
    } else if (now - watch->shown_ns >= (state != watch->shown ? CHANGE_NS : HEARTBEAT_NS)) {
        if (is_silent && *parser_last_line(watch->parser))
            text_add(&line, ", last: %s", parser_last_line(watch->parser));
        out_note("watch, %llu s: %s", seconds(watch->begin_ns, now), text);
        watch->shown = state;
        watch->shown_ns = now;
    }
}

/* --- following --- */

static enum ending read_some(struct watch *watch)
{
    size_t n = 0;
    enum tail_event event = tail_read(&watch->tail, watch->block, BLOCK_BYTES, POLL_MS, &n);

    if (event == TAIL_BYTES) {
        parser_feed(watch->parser, watch->block, n);
        watch->written_ns = ep_now_ns();
    } else if (event == TAIL_REPLACED || event == TAIL_TRUNCATED) {
        out_note("watch: %s %s; it goes on from the start of the file", watch->path,
                 event == TAIL_REPLACED ? "was replaced" : "was truncated");
    } else if (event == TAIL_ERROR) {
        cmd_refuse(watch->cmd, watch->path, "%s", errno == EINVAL ? "it is a device, not a log" : strerror(errno));
        return BROKEN;
    }
    return event == TAIL_END ? INPUT_ENDED : GOING_ON;
}

static enum ending check(const struct watch *watch, uint64_t now)
{
    const struct watch_options *options = watch->options;
    uint64_t silent_ns = now - watch->written_ns;
    bool may_end = !watch->tail.is_pipe && !options->until_end;

    if (caught)
        return SIGNAL;
    if (may_end && ((watch->standing.is_over && silent_ns >= COMPLETE_NS) ||
                    (watch->standing.may_be_over && silent_ns >= UNSURE_NS)))
        return RUN_COMPLETE;
    if (may_end && watch->standing.has_failed && silent_ns >= FAILED_NS)
        return RUN_FAILED;
    if (watch->tail.fd < 0 && options->idle == 0 && options->timeout == 0 && silent_ns >= ABSENT_NS)
        return TIMEOUT;
    if (options->idle > 0 && silent_ns >= (uint64_t)options->idle * S)
        return IDLE;
    if (options->timeout > 0 && now - watch->begin_ns >= (uint64_t)options->timeout * S)
        return TIMEOUT;
    return GOING_ON;
}

static enum ending follow(struct watch *watch)
{
    enum ending ending = GOING_ON;
    uint64_t updated_ns = 0;

    while (ending == GOING_ON) {
        uint64_t now;

        ending = read_some(watch);
        if (ending == BROKEN)
            return BROKEN;
        now = ep_now_ns();
        /* While a long log is read, not for each block of it. */
        if (now - updated_ns >= POLL_MS * S / 1000) {
            updated_ns = now;
            standing_update(&watch->standing, watch->parser, now);
            say(watch, now);
        }
        if (ending == GOING_ON)
            ending = check(watch, now);
    }
    return ending;
}

/* --- the end --- */

/* The result of a run that is not over is its own: the log has no end yet. */
static const char *judge(const struct watch *watch, enum ending ending, const json_t *parsed, uint64_t now,
                         char *ret_lead, size_t bytes)
{
    bool is_going_on = !watch->standing.may_be_over && !watch->standing.has_failed;

    *ret_lead = '\0';
    if (!is_going_on || ending < IDLE || parser_count(watch->parser) == 0)
        return json_text(parsed, "result");
    if (ending == IDLE)
        snprintf(ret_lead, bytes, "Hung: nothing was written for %llu s%s%s. ", seconds(watch->written_ns, now),
                 *watch->standing.late ? ", and " : "", watch->standing.late);
    else if (ending == TIMEOUT)
        snprintf(ret_lead, bytes, "Not over after %llu s. So far: ", seconds(watch->begin_ns, now));
    else
        snprintf(ret_lead, bytes, "Interrupted after %llu s. So far: ", seconds(watch->begin_ns, now));
    return ending == IDLE ? "hung" : "unfinished";
}

static int conclude(struct watch *watch, enum ending ending, const struct reference *reference,
                    const struct verdict_options *wanted)
{
    uint64_t now = ep_now_ns();
    enum verdict_result verdict;
    char lead[400];
    const char *result;
    json_t *parsed, *document, *shown;
    int code;

    parser_end(watch->parser);
    parsed = verdict_make(watch->parser, reference, wanted, &verdict);
    result = judge(watch, ending, parsed, now, lead, sizeof(lead));
    code = ending == SIGNAL                    ? 128 + caught
           : strcmp(result, "hung") == 0       ? CMD_FAILED
           : strcmp(result, "unfinished") == 0 ? CMD_NOT_KNOWN
                                               : input_exit_code(verdict);
    progress_stop();
    shown = out_text(lead); /* with the name of a stream, as long as there is room for it */
    document = out_document("watch");
    json_object_update_new(
        document, json_pack("{s:o, s:s, s:s, s:f, s:f, s:o, s:o}", "verdict",
                            json_sprintf("%s%s", json_string_value(shown), json_text(parsed, "verdict")), "result",
                            result, "ended_by", endings[ending], "seconds", (double)(now - watch->begin_ns) / (double)S,
                            "silent_seconds", (double)(now - watch->written_ns) / (double)S, "last_line",
                            out_text_or_null(parser_last_line(watch->parser)), "parsed", parsed));
    json_decref(shown);
    if (watch->options->json)
        return out_json(document) == 0 ? code : CMD_FAILED;
    out_verdict(code == CMD_FINE       ? OUT_GOOD
                : code == CMD_FINDINGS ? OUT_WARN
                                       : OUT_BAD,
                "%s", json_string_value(json_object_get(document, "verdict")));
    if (verdict_print(parsed) != 0)
        code = CMD_FAILED;
    if (*lead && *parser_last_line(watch->parser))
        out_line("last line: %s", parser_last_line(watch->parser));
    json_decref(document);
    return code;
}

static int watch_log(struct watch *watch, const struct reference *reference, const struct verdict_options *wanted)
{
    enum ending ending;

    watch->parser = parser_new();
    watch->block = memory_grow(NULL, BLOCK_BYTES);
    watch->is_terminal = out_is_terminal(stderr);
    watch->begin_ns = watch->written_ns = ep_now_ns();
    tail_open(&watch->tail, watch->path);
    parser_begin(watch->parser, strcmp(watch->path, "-") == 0 ? "standard input" : watch->path);
    catch_signals();
    progress_start("watch");
    ending = follow(watch);
    progress_stop();
    if (ending == BROKEN)
        return CMD_USAGE;
    if (ending != SIGNAL && watch->tail.fd < 0)
        return cmd_refuse(watch->cmd, watch->path,
                          "no such file after %llu s; --idle and --timeout say how long it is waited for",
                          seconds(watch->begin_ns, ep_now_ns()));
    return conclude(watch, ending, reference, wanted);
}

static int cmd_watch(const struct cmd *cmd, const struct cmd_call *call)
{
    struct watch watch = {.cmd = cmd, .options = call->options, .path = call->args[0]};
    struct reference *reference = NULL;
    struct verdict_options wanted;
    int result = input_reference(cmd, &watch.options->input, &reference, &wanted);

    if (result == CMD_FINE)
        result = watch_log(&watch, reference, &wanted);
    tail_close(&watch.tail);
    parser_free(watch.parser);
    free(watch.block);
    reference_free(reference);
    return result;
}

/* clang-format off */
static const struct opt watch_table[] = {
    {"idle", 'i', "SECONDS", OPT_INT, offsetof(struct watch_options, idle), .min = 1, .max = 10000000,
     .help = "end when nothing was written for so long: a run that is not complete then hangs", .heading = "End"},
    {"timeout", 0, "SECONDS", OPT_INT, offsetof(struct watch_options, timeout), .min = 1, .max = 10000000,
     .help = "end after so long, even if the run goes on"},
    {"until-end", 0, NULL, OPT_FLAG, offsetof(struct watch_options, until_end),
     .help = "of a file: go on after a run that is complete or has failed; for several runs, with --idle"},
    INPUT_OPTIONS(struct watch_options, input),
    {"quiet", 'q', NULL, OPT_FLAG, offsetof(struct watch_options, quiet),
     .help = "only the verdict, not where the run stands", .heading = "Output"},
    OPT_JSON_ROW(struct watch_options, json),
    {0},
};
/* clang-format on */

const struct cmd command_watch = {
    .name = "watch",
    .args = "FILE|-",
    .min_args = 1,
    .max_args = 1,
    .summary = "follow the log of a running test: where it stands, what is late, and the verdict at its end",
    .description =
        "Reads a log while it is written, as 'epkit parse' reads one that is complete. Standard error says where the "
        "run stands: which case of how many, the tuning, the size that is measured; which node has been silent while "
        "others went on; a failure as soon as it is printed; for how long nothing was written. On a terminal this is "
        "one line that is rewritten. Elsewhere it is a line for each change, and one every 30 s. Standard output is "
        "the verdict of 'epkit parse', whose exit status is that of the watch.\n\n"
        "Standard input and a FIFO end with their last writer. A file ends 5 s after the last line of a run that is "
        "complete, or 30 s after that of a run that has failed. A file that is missing is waited for, 60 s unless "
        "--idle or --timeout say how long. It may be rotated or truncated: what was read before counts as well, as "
        "'tail -F' keeps it on the screen. A rerun that overwrites its log needs a watch of its own. Without --idle "
        "and --timeout a run that hangs is watched for ever. An interrupt prints the verdict so far.",
    .options = watch_table,
    .options_bytes = sizeof(struct watch_options),
    .examples =
        {
            {"epkit watch --idle 600 run.log", "until the run is complete, or has written nothing for ten minutes"},
            {"epkit launch --hosts a,b deepep-internode | epkit watch --idle 600 -", "the same while it is launched"},
            {"kubectl logs -f --prefix -l app=deepep | epkit watch --json --timeout 3600 -",
             "for CI, with all figures"},
        },
    .exits =
        {
            {CMD_FINE, "all runs passed and none is slower than expected"},
            {CMD_FAILED, "a test failed, was cut off, or hung (--idle)"},
            {CMD_USAGE, "wrong usage; no such file within 60 s, or until --idle or --timeout; it cannot be read"},
            {CMD_FINDINGS, "all tests passed, but something is slower than expected"},
            {CMD_UNSUPPORTED, "nothing was recognised"},
            {CMD_NOT_KNOWN, "the run was not over at its --timeout, and has not failed until then"},
        },
    .run = cmd_watch,
};
