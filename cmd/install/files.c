/* SPDX-License-Identifier: Apache-2.0 */
/* files.c - the types file and copyset: files with given content, and sets of copies that belong together. */
#include "base/error.h"
#include "types.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

/* --- file --- */

static const struct step_arg file_args[] = {
    {"path", ARG_PATH, true},
    {"content", ARG_TEXT, true},
    {"mode", ARG_MODE, false},
    {NULL, 0, false},
};

static const char *file_mode(const struct recipe_step *step)
{
    const char *mode = arg_text(step, "mode");

    return *mode ? mode : "0644";
}

/* The content ends with a newline, in the script and here. */
static bool is_content(const char *content, struct source_text text)
{
    size_t bytes = strlen(content);
    size_t whole = bytes && content[bytes - 1] == '\n' ? bytes : bytes + 1;

    return text.bytes == whole && memcmp(text.text, content, bytes) == 0 && text.text[whole - 1] == '\n';
}

static void file_check(const struct check_context *context, const struct recipe_step *step,
                       struct step_state *ret_state)
{
    const char *path = arg_text(step, "path");
    struct source_text text = source_read(context->source, "%s", path);

    if (text.state == SOURCE_ABSENT)
        state_set(ret_state, STEP_TODO, "%s is not there", path);
    else if (text.state != SOURCE_OK)
        state_set(ret_state, STEP_WRONG, "%s: %s", path, text.why);
    else if (!is_content(arg_text(step, "content"), text))
        state_set(ret_state, STEP_WRONG, "%s has other content", path);
    else if (source_stat(context->source, "%s", path).may_execute != (strpbrk(file_mode(step), "1357") != NULL))
        state_set(ret_state, STEP_WRONG, "%s has another mode than %s", path, file_mode(step));
    else
        state_set(ret_state, STEP_DONE, "%s is as expected", path);
}

static void file_apply(FILE *script, const struct recipe_step *step)
{
    fputs("epkit_no_folder ", script);
    script_word(script, arg_text(step, "path"));
    fputc('\n', script);
    script_keep(script, arg_text(step, "path"));
    script_write(script, arg_text(step, "path"), arg_text(step, "content"), file_mode(step));
}

static void file_undo(FILE *script, const struct recipe_step *step)
{
    script_restore(script, arg_text(step, "path"));
}

const struct step_type type_file = {
    .name = "file", .args = file_args, .check = file_check, .apply = file_apply, .undo = file_undo};

/* --- copyset --- */

static const struct step_arg copyset_args[] = {
    {"to", ARG_PATH, true},
    {"files", ARG_GLOBS, true},
    {NULL, 0, false},
};

/* Calls `each` for all files that match a pattern; false as soon as `each` returns false, or when none match. */
static bool for_each_match(struct source *source, const char *pattern,
                           bool (*each)(struct source *source, const char *path, const char *name, void *context),
                           void *context)
{
    const char *last = strrchr(pattern, '/') + 1;
    char folder[1100];
    struct source_names names;
    bool found = false;

    snprintf(folder, sizeof(folder), "%.*s", (int)(last - pattern), pattern);
    names = source_list(source, "%s", folder);
    for (size_t i = 0; i < names.n; i++) {
        char path[1400];

        if (fnmatch(last, names.names[i], FNM_PERIOD) != 0)
            continue;
        snprintf(path, sizeof(path), "%s%s", folder, names.names[i]);
        if (!each(source, path, names.names[i], context))
            return false;
        found = true;
    }
    return found;
}

struct comparison {
    const char *to;
    int n, n_there;
    char text[200]; /* the first difference */
    bool differs, nested;
};

/* Compares small files by content, large ones by size: the size of a driver's library changes with its version. */
static bool is_same(struct source *source, const char *path, const char *copy)
{
    struct source_stat from = source_stat(source, "%s", path), to = source_stat(source, "%s", copy);
    struct source_text text, text_to;

    if (from.kind == SOURCE_FOLDER || to.kind == SOURCE_FOLDER)
        return from.kind == to.kind;
    if (from.bytes != to.bytes)
        return false;
    if (from.bytes > (1 << 20))
        return true;
    text = source_read(source, "%s", path);
    text_to = source_read(source, "%s", copy);
    return text.bytes == text_to.bytes && memcmp(text.text, text_to.text, text.bytes) == 0;
}

static bool compare_one(struct source *source, const char *path, const char *name, void *context)
{
    struct comparison *comparison = context;
    char copy[1400];
    struct source_stat stat;

    snprintf(copy, sizeof(copy), "%s/%s", comparison->to, name);
    stat = source_stat(source, "%s", copy);
    comparison->n++;
    if (stat.state != SOURCE_OK) {
        if (!comparison->text[0])
            snprintf(comparison->text, sizeof(comparison->text), "%.90s is not in %.90s", name, comparison->to);
        return true;
    }
    comparison->n_there++;
    if (stat.kind == SOURCE_FOLDER && source_stat(source, "%s/%s", copy, name).state == SOURCE_OK)
        comparison->nested = true;
    if (!is_same(source, path, copy)) {
        comparison->differs = true;
        snprintf(comparison->text, sizeof(comparison->text), "%.120s differs from its source", copy);
    }
    return true;
}

static void copyset_check(const struct check_context *context, const struct recipe_step *step,
                          struct step_state *ret_state)
{
    struct comparison comparison = {.to = arg_text(step, "to")};
    json_t *value;
    size_t i;

    json_array_foreach(json_object_get(step->args, "files"), i, value)
    {
        if (!for_each_match(context->source, json_string_value(value), compare_one, &comparison)) {
            state_set(ret_state, STEP_TODO, "%s, which is to be copied, does not exist", json_string_value(value));
            return;
        }
    }
    if (comparison.nested)
        state_set(ret_state, STEP_WRONG, "a folder in %s contains itself: it was copied twice", comparison.to);
    else if (comparison.differs)
        state_set(ret_state, STEP_WRONG, "%s", comparison.text);
    else if (comparison.n_there < comparison.n)
        state_set(ret_state, comparison.n_there ? STEP_PARTIAL : STEP_TODO, "%s", comparison.text);
    else
        stamp_check(context, step, false, ret_state);
}

static void copyset_apply(FILE *script, const struct recipe_step *step)
{
    json_t *value;
    size_t i;

    fputs("epkit_copies_begin ", script);
    script_word(script, arg_text(step, "to"));
    fputc('\n', script);
    json_array_foreach(json_object_get(step->args, "files"), i, value)
    {
        const char *pattern = json_string_value(value), *last = strrchr(pattern, '/') + 1;
        char folder[1100];

        snprintf(folder, sizeof(folder), "%.*s", (int)(last - pattern), pattern);
        fputs("epkit_copy \"$EPKIT_ROOT\"", script);
        script_word(script, folder);
        /* Only what the shell has to expand is outside of the quotes: the rest consists of the characters of a path. */
        while (*last) {
            size_t plain = strcspn(last, "*?");

            if (plain)
                fprintf(script, "'%.*s'", (int)plain, last);
            for (last += plain; *last == '*' || *last == '?'; last++)
                fputc(*last, script);
        }
        fputc('\n', script);
    }
    fputs("epkit_copies_end\n", script);
    script_stamp(script, step, false);
}

static void copyset_undo(FILE *script, const struct recipe_step *step)
{
    fputs("epkit_copies_undo ", script);
    script_word(script, arg_text(step, "to"));
    fputc('\n', script);
}

const struct step_type type_copyset = {
    .name = "copyset", .args = copyset_args, .check = copyset_check, .apply = copyset_apply, .undo = copyset_undo};
