/* SPDX-License-Identifier: Apache-2.0 */
/* script.c - the shell text of steps: words, and calls of the functions in prelude.sh. */
#include "types.h"

#include "builtin.h"

#include <inttypes.h>
#include <string.h>

/* Values that an exported script takes from the machine that it runs on. */
static const struct {
    const char *value, *variable;
} asked[] = {{EXPORT_KERNEL, "$EPKIT_KERNEL"}, {EXPORT_MACHINE, "$EPKIT_MACHINE"}};

static const char *asked_at(const char *text, size_t *ret_bytes)
{
    for (size_t i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
        *ret_bytes = strlen(asked[i].value);
        if (strncmp(text, asked[i].value, *ret_bytes) == 0)
            return asked[i].variable;
    }
    return NULL;
}

void script_word(FILE *script, const char *text)
{
    size_t bytes;

    fputc('\'', script);
    for (; *text; text++) {
        const char *variable = asked_at(text, &bytes);

        if (variable) {
            fprintf(script, "'\"%s\"'", variable);
            text += bytes - 1;
        } else if (*text == '\'')
            fputs("'\\''", script);
        else
            fputc(*text, script);
    }
    fputc('\'', script);
}

static void set(FILE *script, const char *name, const char *value)
{
    fprintf(script, "export %s=", name);
    script_word(script, value);
    fputc('\n', script);
}

void script_begin(FILE *script, const struct recipe *recipe, const struct recipe_step *step, const char *root,
                  const char *state)
{
    set(script, "EPKIT_ROOT", root);
    fputs("export EPKIT_STATE=\"$EPKIT_ROOT\"", script);
    script_word(script, state);
    fputc('\n', script);
    set(script, "EPKIT_STEP", step ? step->id : "");
    fputs("export EPKIT_BEFORE=\"$EPKIT_STATE/before/$EPKIT_STEP\"\n", script);
    for (size_t i = 0; i < recipe->n_variables; i++)
        if (recipe->variables[i].value)
            set(script, recipe->variables[i].name, recipe->variables[i].value);
}

void script_shell(FILE *script, const char *text)
{
    size_t bytes = strlen(text);

    fprintf(script, "(\n%s%s)\n", text, bytes && text[bytes - 1] == '\n' ? "" : "\n");
}

/* A delimiter that does not occur as a line of the content. */
static void delimiter(const char *content, char ret_text[32])
{
    for (unsigned n = 0;; n++) {
        snprintf(ret_text, 32, "EPKIT_END_%u", n);
        if (!strstr(content, ret_text))
            return;
    }
}

/* A name for the saved copy of `path`, unique in a step. */
static uint32_t name_of(const char *path)
{
    uint32_t hash = 2166136261u;

    for (; *path; path++)
        hash = (hash ^ (unsigned char)*path) * 16777619u;
    return hash;
}

void script_write(FILE *script, const char *path, const char *content, const char *mode)
{
    size_t bytes = strlen(content);
    char end[32];

    delimiter(content, end);
    if (strstr(content, EXPORT_KERNEL) || strstr(content, EXPORT_MACHINE))
        fprintf(script, "sed -e \"s/%s/$EPKIT_KERNEL/g; s/%s/$EPKIT_MACHINE/g\" <<'%s' | ", EXPORT_KERNEL,
                EXPORT_MACHINE, end);
    fprintf(script, "epkit_write %08" PRIx32 " %s ", name_of(path), mode);
    script_word(script, path);
    if (strstr(content, EXPORT_KERNEL) || strstr(content, EXPORT_MACHINE))
        fputc('\n', script);
    else
        fprintf(script, " <<'%s'\n", end);
    fprintf(script, "%s%s%s\n", content, bytes && content[bytes - 1] == '\n' ? "" : "\n", end);
}

void script_keep(FILE *script, const char *path)
{
    fprintf(script, "epkit_keep %08" PRIx32 " ", name_of(path));
    script_word(script, path);
    fputc('\n', script);
}

void script_restore(FILE *script, const char *path)
{
    fprintf(script, "epkit_restore %08" PRIx32 " ", name_of(path));
    script_word(script, path);
    fputc('\n', script);
}

void script_stamp(FILE *script, const struct recipe_step *step, bool with_kernel)
{
    fprintf(script, "epkit_stamp %016" PRIx64 "%s\n", step_digest(step), with_kernel ? " \"$kernel\"" : "");
}

void script_prelude(FILE *script)
{
    fputs("set -eu\nexport LC_ALL=C DEBIAN_FRONTEND=noninteractive\n", script);
    fwrite(builtin_prelude, 1, builtin_prelude_bytes, script);
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
