/* SPDX-License-Identifier: Apache-2.0 */
/* install_output.c - the output of `epkit install`: verdict, table, details; and the same as JSON. */
#include "install_output.h"
#include "common/output.h"

#include <inttypes.h>
#include <string.h>

#define REBOOT_S 120 /* what a reboot of a node takes */

/* --- rows --- */

static json_t *step_row(const struct install *install, size_t index)
{
    const struct recipe_step *step = &install->recipe->steps[index];
    const struct step_state *state = &install->states[index];
    const json_t *end = journal_last(&install->journal, "end", step->id);
    json_t *row = json_pack("{s:s,s:s,s:s,s:s,s:s,s:s,s:i,s:i,s:s,s:i}", "id", step->id, "type", step->type->name,
                            "title", step->title, "why", step->why, "state", install_state_name(state->now), "text",
                            state->text, "budget_s", step->budget_s, "deadline_s", step->deadline_s, "reboot",
                            step_reboots[step->reboot], "attempts", journal_attempts(&install->journal, step->id));
    json_t *needs = json_array();
    char digest[24];

    for (size_t i = 0; i < step->n_needs; i++)
        json_array_append_new(needs, json_string(install->recipe->steps[step->needs[i]].id));
    json_object_set_new(row, "needs", needs);
    snprintf(digest, sizeof(digest), "%016" PRIx64, step_digest(step));
    json_object_set_new(row, "digest", json_string(digest));
    json_object_set(row, "args", step->args);
    json_object_set_new(row, "completed", end ? json_copy(json_object_get(end, "time")) : json_null());
    return row;
}

static json_t *step_rows(const struct install *install)
{
    json_t *rows = json_array();

    for (size_t i = 0; i < install->recipe->n_steps; i++)
        json_array_append_new(rows, step_row(install, install->recipe->order[i]));
    return rows;
}

/* --- text --- */

static const char *const preflight_names[] = {"ok", "refused", "unknown"};

static void print_preflight(const struct install *install, bool verbose)
{
    FOR_EACH (row, install->preflight, install->n_preflight)
        if (verbose || row->result == PREFLIGHT_REFUSE)
            out_line("  %-8s %s: %s", preflight_names[row->result], row->name, row->text);
}

static void print_missing(const struct install *install)
{
    FOR_EACH (variable, install->recipe->variables, install->recipe->n_variables) {
        if (recipe_variable_is_missing(variable))
            out_line("  missing  variable %s: %s (--set %s=VALUE)", variable->name, variable->help, variable->name);
        else if (variable->source == FROM_ENVIRONMENT || variable->source == FROM_COMMAND_LINE)
            out_line("  set      %s=%s (%s)", variable->name, variable->value, variable_source_name(variable->source));
    }
}

/* Why the recipe is refused: the first reason. */
static const char *first_refusal(const struct install *install)
{
    size_t i = 0;

    while (install->preflight[i].result != PREFLIGHT_REFUSE)
        i++;
    return install->preflight[i].text;
}

/* "; to be given first: doca_key, torch", or "". */
static void list_missing(const struct install *install, char *ret_text, size_t bytes)
{
    struct text text = text_in(ret_text, bytes);

    *ret_text = '\0';
    for (size_t i = 0; i < install->recipe->n_variables; i++)
        if (recipe_variable_is_missing(&install->recipe->variables[i]))
            text_add(&text, "%s%s", text.n ? ", " : "; to be given first: ", install->recipe->variables[i].name);
}

void report_plan(const struct install *install, const char *action, bool verbose)
{
    static const struct out_column columns[] = {
        {"STEP", "id", 0, 0},          {"TYPE", "type", 0, 0},         {"STATE", "state", 0, 0},
        {"SECONDS", "budget_s", 0, 0}, {"SEEN", "text", 0, OUT_TRUNC},
    };
    size_t n = install_changes(install);
    json_t *rows = step_rows(install);
    char missing[256];
    int seconds = 0;
    bool reboots = false;

    for (size_t i = 0; i < install->recipe->n_steps; i++) {
        if (install->states[i].now == STEP_DONE || install->states[i].now == STEP_SKIPPED)
            continue;
        seconds += install->recipe->steps[i].budget_s;
        reboots = reboots || install->recipe->steps[i].reboot != REBOOT_NEVER;
    }
    seconds += reboots ? REBOOT_S : 0;
    list_missing(install, missing, sizeof(missing));
    if (preflight_refuses(install) && n > 0)
        out_verdict(OUT_BAD, "Recipe %s is not for this machine, and nothing will be changed: %s.",
                    install->recipe->name, first_refusal(install));
    else if (n == 0)
        out_verdict(OUT_GOOD, "Nothing to do: all steps of recipe %s are done.", install->recipe->name);
    else
        out_verdict(OUT_WARN, "%zu of %zu steps of recipe %s %s, about %d min%s%s.", n, install->recipe->n_steps,
                    install->recipe->name, strcmp(action, "apply") == 0 ? "will be applied" : "are to be applied",
                    (seconds + 59) / 60, reboots ? " with a reboot" : "", missing);
    OUT_PRINT(columns, rows);
    print_preflight(install, verbose);
    print_missing(install);
    fflush(stdout);
}

void report_status(const struct install *install)
{
    static const struct out_column columns[] = {
        {"STEP", "id", 0, 0},           {"STATE", "state", 0, 0},
        {"ATTEMPTS", "attempts", 0, 0}, {"COMPLETED", "completed", 0, 0},
        {"SEEN", "text", 0, OUT_TRUNC},
    };
    size_t n = install_changes(install);
    const json_t *stopped = journal_last(&install->journal, "stopped", NULL);
    const json_t *failed = journal_last(&install->journal, "failed", NULL);
    json_t *rows = step_rows(install);

    if (n == 0)
        out_verdict(OUT_GOOD, "Recipe %s is installed.", install->recipe->name);
    else
        out_verdict(OUT_WARN, "Recipe %s is not complete: %zu of %zu steps are left.", install->recipe->name, n,
                    install->recipe->n_steps);
    OUT_PRINT(columns, rows);
    out_line("  reboots so far: %d", journal_count(&install->journal, "reboot", NULL));
    if (n > 0 && failed && journal_count(&install->journal, "failed", NULL) > 0)
        out_line("  last failure: step %s, %s", json_string_value(json_object_get(failed, "step")),
                 json_string_value(json_object_get(failed, "said")));
    if (n > 0 && stopped && journal_count(&install->journal, "stopped", NULL) > 0)
        out_line("  stopped: too many reboots; 'epkit install apply %s --again' starts over", install->recipe->name);
    if (install->journal.is_rebuilt)
        out_line("  the journal could not be read: attempts and reboots made before are not known");
}

void report_verify(const struct verify_result *results, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        out_line("  %s %s: %s%s%s", results[i].passed ? "ok    " : "FAILED", results[i].step->id,
                 results[i].verify->name, *results[i].text ? ": " : "", results[i].text);
        if (!results[i].passed && *results[i].verify->hint)
            out_line("         %s", results[i].verify->hint);
    }
}

/* --- JSON --- */

json_t *report_json(const struct cmd *cmd, const struct install *install, const char *action, const char *result,
                    const struct verify_result *results, size_t n_results)
{
    json_t *document = out_document(cmd->name), *list = json_array();

    json_object_update_new(document,
                           json_pack("{s:s,s:s,s:s,s:s,s:s,s:I,s:i,s:s,s:s}", "action", action, "result", result,
                                     "recipe", install->recipe->name, "title", install->recipe->title, "kernel",
                                     install->kernel, "changes", (json_int_t)install_changes(install), "reboots",
                                     journal_count(&install->journal, "reboot", NULL), "failure", install->failure,
                                     "hint", install->hint));
    json_object_set_new(document, "steps", step_rows(install));
    for (size_t i = 0; i < install->n_preflight; i++)
        json_array_append_new(list, json_pack("{s:s,s:s,s:s}", "check", install->preflight[i].name, "result",
                                              preflight_names[install->preflight[i].result], "text",
                                              install->preflight[i].text));
    json_object_set_new(document, "preflight", list);
    list = json_array();
    FOR_EACH (variable, install->recipe->variables, install->recipe->n_variables)
        json_array_append_new(list, json_pack("{s:s,s:s?,s:s}", "name", variable->name, "value", variable->value,
                                              "from", variable_source_name(variable->source)));
    json_object_set_new(document, "variables", list);
    if (strcmp(action, "uninstall") == 0)
        json_object_set(document, "left", install->left);
    if (results) {
        list = json_array();
        for (size_t i = 0; i < n_results; i++)
            json_array_append_new(list, json_pack("{s:s,s:s,s:b,s:s}", "step", results[i].step->id, "name",
                                                  results[i].verify->name, "passed", results[i].passed, "text",
                                                  results[i].text));
        json_object_set_new(document, "verify", list);
    }
    return document;
}
