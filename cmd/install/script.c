/* SPDX-License-Identifier: Apache-2.0 */
/* script.c - the shell text of steps: their keys as variables, and calls of the functions in prelude.sh. */
#include "types.h"

#include "common/shell.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void set(FILE *script, const char *name, const char *value)
{
    fprintf(script, "%s=", name);
    shell_write(script, value);
    fputc('\n', script);
}

void script_prelude(FILE *script)
{
    fputs("set -eu\numask 022\nexport LC_ALL=C DEBIAN_FRONTEND=noninteractive EPKIT_ROOT=\"${1-}\"\n", script);
    fwrite(builtin_shell[0].text, 1, builtin_shell[0].bytes, script);
}

void script_begin(FILE *script, const struct recipe *recipe, const struct recipe_step *step, const char *state)
{
    fputs("export EPKIT_STATE=\"$EPKIT_ROOT\"", script);
    shell_write(script, state);
    fputs("\nexport ", script);
    set(script, "EPKIT_STEP", step->id);
    fputs("export EPKIT_BEFORE=\"$EPKIT_STATE/before/$EPKIT_STEP\"\n", script);
    for (size_t i = 0; i < recipe->n_variables; i++) {
        if (!recipe->variables[i].value)
            continue;
        fputs("export ", script);
        set(script, recipe->variables[i].name, recipe->variables[i].value);
    }
}

void script_shell(FILE *script, const char *text)
{
    size_t bytes = strlen(text);

    fprintf(script, "(\n%s%s)\n", text, bytes && text[bytes - 1] == '\n' ? "" : "\n");
}

/* A text as it is; of a list or a map each entry on a line, as VALUE or NAME=VALUE. */
static void set_arg(FILE *script, const char *key, const json_t *arg)
{
    const char *name, *between = "";
    json_t *value;
    size_t i;

    fprintf(script, "arg_%s=", key);
    if (json_is_string(arg))
        shell_write(script, json_string_value(arg));
    json_array_foreach (arg, i, value) {
        fputs(between, script);
        shell_write(script, json_string_value(value));
        between = "'\n'";
    }
    json_object_foreach ((json_t *)arg, name, value) {
        fputs(between, script);
        shell_write(script, name);
        fputc('=', script);
        shell_write(script, json_string_value(value));
        between = "'\n'";
    }
    fputc('\n', script);
}

static void set_file(FILE *script, const struct recipe_step *step)
{
    char *content = step->type->content(step);

    set(script, "file_path", step->path);
    set(script, "file_mode", *arg_text(step, "mode") ? arg_text(step, "mode") : "0644");
    set(script, "file_content", content ? content : "");
    free(content);
}

/* Writes what the step is, for the functions in prelude.sh. */
static void set_step(FILE *script, const struct recipe_step *step)
{
    fprintf(script, "EPKIT_DIGEST=%016" PRIx64 " EPKIT_MAY_REBOOT=%d\n", step_digest(step),
            step->reboot != REBOOT_NEVER);
    for (const struct step_arg *arg = step->type->args; arg->key; arg++)
        if (arg->shape != VALUE_SHELL && arg->shape != VALUE_TEXT)
            set_arg(script, arg->key, json_object_get(step->args, arg->key));
    if (step->type->content)
        set_file(script, step);
    fputs("epkit_inside \"$EPKIT_BEFORE\"\nmkdir -p \"$EPKIT_BEFORE\"\n", script);
}

void script_fetch(FILE *script, const struct recipe_step *step)
{
    set_step(script, step);
    fprintf(script, "epkit_fetch_%s\n", step->type->name);
}

void script_apply(FILE *script, const struct recipe_step *step)
{
    const char *text = *arg_text(step, "script") ? arg_text(step, "script") : arg_text(step, "run");

    set_step(script, step);
    if (*text) {
        fputs("epkit_script() ", script);
        script_shell(script, text);
    }
    fprintf(script, "epkit_apply_%s\n", step->type->name);
}

void script_undo(FILE *script, const struct recipe_step *step)
{
    if (*arg_text(step, "undo"))
        script_shell(script, arg_text(step, "undo"));
    fputs("epkit_undo\n", script);
}

void stamp_check(const struct check_context *context, const struct recipe_step *step, bool with_kernel,
                 struct step_state *ret_state)
{
    struct source_text text = source_read(context->source, "%s/stamp/%s", context->state, step->id);
    char expected[24];
    const char *line;

    snprintf(expected, sizeof(expected), "%016" PRIx64 "\n", step_digest(step));
    if (text.state != SOURCE_OK) {
        state_set(ret_state, STEP_TODO, "not made by this recipe");
        return;
    }
    if (strncmp(text.text, expected, strlen(expected)) != 0) {
        state_set(ret_state, STEP_WRONG, "made from another version of this step");
        return;
    }
    line = text.text + strlen(expected);
    if (with_kernel && (strncmp(line, context->kernel, strlen(context->kernel)) != 0 ||
                        line[strlen(context->kernel)] != '\n' || !*context->kernel)) {
        state_set(ret_state, STEP_WRONG, "made for kernel %.*s, and %s runs", (int)strcspn(line, "\n"), line,
                  context->kernel);
        return;
    }
    state_set(ret_state, STEP_DONE, "complete");
}
