/* SPDX-License-Identifier: Apache-2.0 */
#include "show.h"

#include "cmd/parse/log_input.h"
#include "cmd/triangulate/tool_triangulate.h"
#include "common/output.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RUNS 40
#define TOLERANCE 15       /* percent, as of epkit parse */
#define GROUP_SECONDS 3600 /* deadline of a group, if the job has none */
#define END_SECONDS 60     /* a launch needs this long to end everything after its deadline */

bool launch_is_slow(const struct launch_result *result, int parsed_code)
{
    const char *reason = json_string_value(json_object_get(result->document, "reason"));
    static const char *const of_groups[] = {"program", "mpirun", "deadline"};

    if (!result->is_connected || result->interrupted)
        return false;
    for (size_t i = 0; reason && i < sizeof(of_groups) / sizeof(of_groups[0]); i++)
        if (strcmp(reason, of_groups[i]) == 0)
            return true;
    return !reason && (parsed_code == CMD_FINDINGS || parsed_code == CMD_FAILED);
}

/*
 * The command line that measures a group: this command again, for other nodes, without what belongs to the whole run.
 */
static json_t *make_words(const struct cmd *cmd, const struct cmd_call *call)
{
    static const char *const not_again[] = {"hosts",     "hostfile", "json", "out",         "no-logs", "checks",
                                            "hostfiles", "wait",     "full", "triangulate", NULL};
    json_t *words = json_pack("[ssssssss]", "/proc/self/exe", cmd->name, "--hosts", "{hosts}", "--no-logs",
                              "--checks=skip", "--hostfiles=no", "--silent=0"),
           *options = options_words(cmd, call, not_again);

    json_array_extend(words, options);
    json_decref(options);
    json_array_append_new(words, json_string("--"));
    for (int i = 0; i < call->n_args; i++)
        json_array_append_new(words, json_string(call->args[i]));
    return words;
}

static char *join_hosts(const struct hosts *hosts)
{
    char *text = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);

    for (int i = 0; stream && i < hosts->n; i++)
        fprintf(stream, "%s%s", i ? "," : "", hosts->list[i].word);
    if (stream && fclose(stream) == 0)
        return text;
    free(text);
    return NULL;
}

/* Written next to run.json. */
static void save(const struct launch_options *options, const json_t *document)
{
    char path[4096];

    snprintf(path, sizeof(path), "%s/testbed-logs/triangulate.json", options->folder ? options->folder : "");
    if (options->folder && json_dump_file(document, path, JSON_INDENT(2)) != 0)
        out_warning("launch: writing %s: %s", path, strerror(errno));
}

static json_t *measure(const struct cmd *cmd, const struct triangulate_call *wanted)
{
    struct reference *reference = NULL;
    struct verdict_options options;
    json_t *document = NULL;
    struct triangulate_call own = *wanted;
    sigset_t signals;

    own.ret_document = &document;
    /* The launch handled these signals; from here on they end epkit, and with it the runs. */
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    sigprocmask(SIG_UNBLOCK, &signals, NULL);
    if (input_reference(cmd, &own.input, &reference, &options) == CMD_FINE)
        triangulate_live(cmd, &own, reference, &options);
    reference_free(reference);
    return document;
}

json_t *launch_find_slow(const struct cmd *cmd, const struct cmd_call *call, const struct launch_options *options,
                         const json_t *parsed, bool is_quiet)
{
    double reached = triangulate_ratio(parsed);
    struct triangulate_call wanted = {
        .run = options->command,
        .max_runs = MAX_RUNS,
        .timeout = (options->deadline_s ? options->deadline_s : GROUP_SECONDS) + END_SECONDS,
        .full = reached > 0.01 && reached < 1 ? (int64_t)lround(100 * reached) : 0,
        .json = is_quiet,
        .input = {.tolerance = TOLERANCE},
    };
    json_t *words = make_words(cmd, call), *document = NULL, *word;
    const char **argv = calloc(json_array_size(words) + 1, sizeof(*argv));
    char *hosts = join_hosts(&options->hosts);
    size_t i;

    if (argv && hosts) {
        json_array_foreach (words, i, word) {
            argv[i] = json_string_value(word);
        }
        wanted.argv = argv;
        wanted.hosts = hosts;
        document = measure(cmd, &wanted);
    } else {
        out_error("%s: no memory to measure groups of nodes", cmd->name);
    }
    if (document)
        save(options, document);
    free(hosts);
    free(argv);
    json_decref(words);
    return document;
}
