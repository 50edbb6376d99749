/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_stacks.c - epkit doctor --stacks: which libraries for expert parallelism run here, and what the others lack.
 */
#include "diagnosis.h"

#include "common/clean.h"
#include "common/output.h"
#include "common/text.h"
#include "machine/doctor/stacks.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

/* What is said of one stack; `installed` is NULL if it is not. */
struct line {
    const struct stack *stack;
    const struct stack_installed *installed;
    struct stack_result result;
};

static struct line line_of(const struct doctor_machine *machine, const struct stack *stack)
{
    const struct stacks_installed *all = &machine->software->stacks;
    struct line line = {.stack = stack};

    for (int i = 0; i < all->n; i++)
        if (all->stacks[i].stack == stack) {
            line.installed = &all->stacks[i];
            line.result = *stack_evaluate(machine, i);
            return line;
        }
    line.result = stack_would_need(machine, stack);
    return line;
}

static const char *state_of(const struct line *line)
{
    if (!line->stack->source || line->result.result.outcome == DOCTOR_UNKNOWN)
        return "not-known";
    if (line->result.need >= 0)
        return "missing";
    return line->installed ? "runs" : "not-installed";
}

static json_t *row_of(const struct doctor_machine *machine, const struct line *line)
{
    const char *version = line->installed ? line->installed->version : "", *state = state_of(line);
    const struct doctor_result *result = &line->result.result;
    const char *text = result->text, *fix = result->fix;

    if (strcmp(state, "runs") == 0)
        text = "runs here";
    else if (!line->stack->source)
        text = "what it needs is not known";
    else if (strcmp(state, "not-installed") == 0) {
        text = "not installed; what it needs is here";
        fix = stack_install(machine, line->stack);
    }
    return json_pack("{s:s, s:s, s:s, s:o, s:o, s:s, s:o, s:o, s:o}", "name", line->stack->name, "title",
                     line->stack->title, "package", line->stack->package, "version", out_text_or_null(version),
                     "folder", out_text_or_null(line->installed ? line->installed->folder : ""), "state", state, "text",
                     out_text(text), "fix", *fix ? json_string(fix) : json_null(), "advice",
                     out_text_or_null(result->advice));
}

/* --- selection --- */

/* The installed ones; with `names`, those; with "all" every one that is known. NULL after reporting an unknown name. */
static json_t *select_rows(const struct doctor_machine *machine, char *const *names, int n)
{
    const struct stacks_installed *found = &machine->software->stacks;
    bool all = n == 1 && strcmp(names[0], "all") == 0;
    json_t *rows = json_array();
    struct line line;

    for (int i = 0; i < n && !all; i++) {
        const struct stack *stack = stack_find(names[i]);

        /* Of the rows with this package the one that is installed. */
        for (int k = 0; stack && k < found->n; k++)
            if (strcasecmp(stack->name, names[i]) != 0 && strcmp(found->stacks[k].stack->package, stack->package) == 0)
                stack = found->stacks[k].stack;
        if (!stack || !stack->source) {
            char clean[128];

            text_clean(names[i], clean, sizeof(clean));
            out_error("--stacks: not known: %s", clean);
            out_hint("epkit doctor --stacks all lists the libraries whose needs are known.");
            json_decref(rows);
            return NULL;
        }
        line = line_of(machine, stack);
        json_array_append_new(rows, row_of(machine, &line));
    }
    for (const struct stack *stack = stacks; stack->name && (all || n == 0); stack++) {
        line = line_of(machine, stack);
        if (all ? stack->source != NULL : line.installed != NULL)
            json_array_append_new(rows, row_of(machine, &line));
    }
    return rows;
}

json_t *diagnosis_stacks(const struct doctor_machine *machine)
{
    return select_rows(machine, NULL, 0);
}

/* --- output --- */

static bool has_state(const json_t *row, const char *state)
{
    return strcmp(json_string_value(json_object_get(row, "state")), state) == 0;
}

static int count_state(const json_t *rows, const char *state)
{
    int n = 0;

    for (size_t i = 0; i < json_array_size(rows); i++)
        n += has_state(json_array_get(rows, i), state);
    return n;
}

/* "DeepEP 2 2.0.0" */
static void add_name(const json_t *row, char *text, size_t bytes)
{
    const char *version = json_string_value(json_object_get(row, "version"));

    text_append(text, bytes, "%s%s%s", json_string_value(json_object_get(row, "title")), version ? " " : "",
                version ? version : "");
}

void diagnosis_add_running(const struct doctor_machine *machine, char *text, size_t bytes)
{
    json_t *rows = diagnosis_stacks(machine), *row;
    const char *before = "; runs here: ";
    size_t i;

    json_array_foreach (rows, i, row)
        if (has_state(row, "runs")) {
            text_append(text, bytes, "%s", before);
            add_name(row, text, bytes);
            before = ", ";
        }
    json_decref(rows);
}

static void make_verdict(const struct doctor_machine *machine, const json_t *rows, char *text, size_t bytes)
{
    int n = (int)json_array_size(rows), n_run = count_state(rows, "runs");
    const json_t *row;

    *text = '\0';
    if (n == 0)
        text_append(text, bytes, "No known library for expert parallelism is on Python's path");
    else if (n == 1) {
        row = json_array_get(rows, 0);
        add_name(row, text, bytes);
        text_append(text, bytes, "%s%s", n_run ? " " : ": ", json_string_value(json_object_get(row, "text")));
    } else {
        text_append(text, bytes, "%d of %d libraries for expert parallelism run%s here", n_run, n,
                    n_run == 1 ? "s" : "");
    }
    if (*machine->software->stacks.unknown)
        text_append(text, bytes, "; not known: %s", machine->software->stacks.unknown);
    text_append(text, bytes, ".");
}

static void print_rows(json_t *rows)
{
    static const struct out_column columns[] = {{"STACK", "name", 0, 0},
                                                {"VERSION", "version", 0, OUT_NONZERO},
                                                {"STATE", "state", 0, 0},
                                                {"WHAT", "text", 0, OUT_TRUNC}};
    json_t *row;
    size_t i;

    out_line("%s", "");
    OUT_PRINT(columns, json_incref(rows));
    json_array_foreach (rows, i, row) {
        const char *fix = json_string_value(json_object_get(row, "fix")),
                   *advice = json_string_value(json_object_get(row, "advice"));

        if (has_state(row, "runs"))
            continue;
        out_line("\n%s", json_string_value(json_object_get(row, "name")));
        diagnosis_print_block("what", json_string_value(json_object_get(row, "text")));
        diagnosis_print_command("run", fix ? fix : "");
        if (advice)
            diagnosis_print_block("do", advice);
    }
}

int diagnosis_run_stacks(const struct cmd *cmd, const struct inspect_options *inspect, bool json, char *const *names,
                         int n)
{
    struct doctor_machine *machine = NULL;
    int code = diagnosis_read(cmd, inspect, NULL, &machine);
    json_t *rows, *document;
    char verdict[4096];

    if (code != CMD_FINE)
        return code;
    rows = select_rows(machine, names, n);
    inspect_reading_done();
    if (!rows) {
        doctor_machine_free(machine);
        if (!json)
            return CMD_UNSUPPORTED;
        document = out_document(cmd->name);
        json_object_update_new(document, json_pack("{s:s, s:[]}", "verdict", "Not known.", "stacks"));
        return out_json(document) == 0 ? CMD_UNSUPPORTED : CMD_FAILED;
    }
    make_verdict(machine, rows, verdict, sizeof(verdict));
    if (count_state(rows, "missing") || (n && strcmp(names[0], "all") != 0 && count_state(rows, "not-installed")))
        code = CMD_FINDINGS;
    else if (count_state(rows, "not-known"))
        code = CMD_NOT_KNOWN;
    if (n == 1 && strcmp(names[0], "all") == 0) {
        json_t *installed = diagnosis_stacks(machine);

        code = count_state(installed, "missing") ? CMD_FINDINGS : CMD_FINE;
        json_decref(installed);
    }
    doctor_machine_free(machine);
    if (json) {
        document = out_document(cmd->name);
        json_object_update_new(document, json_pack("{s:o, s:o}", "verdict", out_text(verdict), "stacks", rows));
        return out_json(document) == 0 ? code : CMD_FAILED;
    }
    out_verdict(code == CMD_FINE ? OUT_GOOD : OUT_WARN, "%s", verdict);
    if (json_array_size(rows))
        print_rows(rows);
    json_decref(rows);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}
