/* SPDX-License-Identifier: Apache-2.0 */
/* pair_tests.c - measures groups of nodes with the user's command. */
#include "tool_triangulate.h"

#include "common/capture.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_BY_SIDE 64 /* groups of one round that run concurrently */

/* A list as for epkit launch, or a hostfile. Valid host names are safe in a shell command. */
static int read_fleet(const char *text, struct hosts *fleet)
{
    ep_status status =
        *text == '@' ? hosts_add_file(text + 1, HOSTS_OPEN_MPI, fleet) : hosts_add_list("--hosts", text, fleet);

    if (status != EP_OK)
        out_error("triangulate: %s", ep_last_error());
    else if (fleet->n < 2)
        out_error("triangulate: --hosts: %d node%s: it takes two to compare", fleet->n, fleet->n == 1 ? "" : "s");
    return status == EP_OK && fleet->n >= 2 ? CMD_FINE : CMD_USAGE;
}

/* `pattern` with the nodes for {hosts} and their number for {n}. */
static char *fill_in(const char *pattern, const struct hosts *fleet, const struct triangulate_group *group)
{
    char *text;
    size_t bytes;
    FILE *stream = memory_stream(&text, &bytes);

    for (const char *at = pattern; *at;) {
        if (strncmp(at, "{hosts}", 7) == 0) {
            for (int i = 0; i < group->n; i++)
                fprintf(stream, "%s%s", i ? "," : "", fleet->list[group->nodes[i]].word);
            at += 7;
        } else if (strncmp(at, "{n}", 3) == 0) {
            fprintf(stream, "%d", group->n);
            at += 3;
        } else {
            fputc(*at++, stream);
        }
    }
    memory_close(stream);
    return text;
}

/* The verdict on the output of a group's command. */
static json_t *judge(const struct triangulate_call *call, const struct capture *capture, int n_nodes)
{
    struct verdict_options options = call->wanted;
    struct parser *parser = parser_new();
    enum verdict_result verdict;
    json_t *document;

    if (options.nodes == 0)
        options.nodes = n_nodes;
    parser_begin(parser, "output");
    parser_feed(parser, capture->output.text, capture->output.bytes);
    parser_feed(parser, "\n", 1);
    parser_feed(parser, capture->error.text, capture->error.bytes);
    parser_end(parser);
    document = verdict_make(parser, call->reference, &options, &verdict);
    parser_free(parser);
    return document;
}

static void store_run(struct triangulate_call *call, struct triangulate_group *group, const struct capture *capture,
                      const char *why)
{
    const char *failure = capture->start_error ? strerror(capture->start_error)
                          : capture->late      ? "it was terminated at its deadline"
                                               : NULL;
    json_t *hosts = json_array(), *verdict = failure ? NULL : judge(call, capture, group->n);
    char *names = fill_in("{hosts}", &call->fleet, group);
    const json_t *run, *ratio;

    for (int i = 0; i < group->n; i++)
        json_array_append_new(hosts, json_string(call->fleet.list[group->nodes[i]].word));
    run = triangulate_run(call, hosts, verdict, capture->status, failure, why);
    ratio = json_object_get(run, "ratio");
    group->is_slow = triangulate_is_slow(call, run);
    if (!call->json) {
        if (json_is_number(ratio))
            out_line("%s: %.0f%% of what is expected", names, 100 * json_number_value(ratio));
        else if (group->is_slow)
            out_line("%s: failed: %s", names, json_text(run, "failed"));
        else
            out_line("%s: passed; there is nothing to compare its figures with", names);
    }
    free(names);
    json_decref(verdict);
}

static void measure_round(struct triangulate_call *call, size_t first)
{
    const struct triangulate *t = &call->groups;
    size_t n = t->n_groups - first;
    struct capture *captures = memory_new(n, sizeof(*captures));
    char **commands = memory_new(4 * n, sizeof(*commands)); /* arguments of each */
    static char shell[] = "/bin/sh", option[] = "-c";

    for (size_t i = 0; i < n; i++) {
        char **command = commands + 4 * i;

        command[0] = shell;
        command[1] = option;
        command[2] = fill_in(call->run, &call->fleet, &t->groups[first + i]);
        captures[i].argv = command;
    }
    progress_update(first, t->n_groups, "%s", t->why);
    capture_run(captures, (int)n, SIDE_BY_SIDE, call->timeout * 1000, NULL, NULL);
    for (size_t i = 0; i < n; i++) {
        store_run(call, &t->groups[first + i], &captures[i], t->why);
        capture_done(&captures[i]);
        free(commands[4 * i + 2]);
    }
    free(captures);
    free(commands);
}

static void print_plan(const struct triangulate_call *call, int n)
{
    if (call->json)
        return;
    out_line("Plan: %d nodes: %d pair%s concurrently, then the nodes of a slow pair, each with one of a fast pair.", n,
             n / 2, n / 2 == 1 ? "" : "s");
    out_line("One slow node takes at most %d runs, of %d s at most.", triangulate_runs(n), (int)call->timeout);
    if (call->run)
        out_line("Each run: %s", call->run);
    fflush(stdout);
}

int triangulate_measure(struct triangulate_call *call)
{
    struct triangulate *t = &call->groups;
    size_t first = 0;
    int n;

    CMD_TRY(read_fleet(call->hosts, &call->fleet));
    n = t->n_nodes = call->fleet.n;
    call->plan = json_pack("{s:i, s:i, s:i, s:s?}", "nodes", n, "worst_case_runs", triangulate_runs(n), "timeout_s",
                           (int)call->timeout, "command", call->run);
    print_plan(call, n);
    while (!call->plan_only && triangulate_next(t)) {
        measure_round(call, first);
        first = t->n_groups;
    }
    return CMD_FINE;
}
