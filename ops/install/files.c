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

/* The content ends with the end of a line, in the script and here. */
static bool is_content(const char *content, struct root_text text)
{
    size_t bytes = strlen(content);
    size_t whole = bytes && content[bytes - 1] == '\n' ? bytes : bytes + 1;

    return text.bytes == whole && memcmp(text.text, content, bytes) == 0 && text.text[whole - 1] == '\n';
}

static void file_check(const struct check_context *context, const struct recipe_step *step,
                       struct step_state *ret_state)
{
    const char *path = arg_text(step, "path");
    struct root_text text = root_read(context->root, "%s", path);

    if (text.state == ROOT_ABSENT)
        state_set(ret_state, STEP_TODO, "%s is not there", path);
    else if (text.state != ROOT_OK)
        state_set(ret_state, STEP_WRONG, "%s: %s", path, text.why);
    else if (!is_content(arg_text(step, "content"), text))
        state_set(ret_state, STEP_WRONG, "%s has other content", path);
    else if (root_stat(context->root, "%s", path).may_execute != (strpbrk(file_mode(step), "1357") != NULL))
        state_set(ret_state, STEP_WRONG, "%s has another mode than %s", path, file_mode(step));
    else
        state_set(ret_state, STEP_DONE, "%s is as it shall be", path);
}

static void file_apply(FILE *script, const struct recipe_step *step)
{
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

/* Calls `each` for all files that a pattern names; false as soon as that returns false, or when it names none. */
static bool for_each_match(struct root *root, const char *pattern,
                           bool (*each)(struct root *root, const char *path, const char *name, void *context),
                           void *context)
{
    const char *last = strrchr(pattern, '/') + 1;
    char folder[1100];
    struct root_names names;
    bool found = false;

    snprintf(folder, sizeof(folder), "%.*s", (int)(last - pattern), pattern);
    names = root_list(root, "%s", folder);
    for (size_t i = 0; i < names.n; i++) {
        char path[1400];

        if (fnmatch(last, names.names[i], FNM_PERIOD) != 0)
            continue;
        snprintf(path, sizeof(path), "%s%s", folder, names.names[i]);
        if (!each(root, path, names.names[i], context))
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

/* Small files by content, large ones by size alone: that of a driver's library changes with its version. */
static bool is_same(struct root *root, const char *path, const char *copy)
{
    struct root_stat from = root_stat(root, "%s", path), to = root_stat(root, "%s", copy);

    if (from.kind == ROOT_FOLDER || to.kind == ROOT_FOLDER)
        return from.kind == to.kind;
    if (from.bytes != to.bytes)
        return false;
    return from.bytes > (1 << 20) || root_hash(root, path) == root_hash(root, copy);
}

static bool compare_one(struct root *root, const char *path, const char *name, void *context)
{
    struct comparison *comparison = context;
    char copy[1400];
    struct root_stat stat;

    snprintf(copy, sizeof(copy), "%s/%s", comparison->to, name);
    stat = root_stat(root, "%s", copy);
    comparison->n++;
    if (stat.state != ROOT_OK) {
        if (!comparison->text[0])
            snprintf(comparison->text, sizeof(comparison->text), "%.90s is not in %.90s", name, comparison->to);
        return true;
    }
    comparison->n_there++;
    if (stat.kind == ROOT_FOLDER && root_stat(root, "%s/%s", copy, name).state == ROOT_OK)
        comparison->nested = true;
    if (!is_same(root, path, copy)) {
        comparison->differs = true;
        snprintf(comparison->text, sizeof(comparison->text), "%.120s is another file than its source", copy);
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
        if (!for_each_match(context->root, json_string_value(value), compare_one, &comparison)) {
            state_set(ret_state, STEP_TODO, "%s is not there to be copied", json_string_value(value));
            return;
        }
    }
    if (comparison.nested)
        state_set(ret_state, STEP_WRONG, "a folder in %s holds itself again: it was copied twice", comparison.to);
    else if (comparison.differs)
        state_set(ret_state, STEP_WRONG, "%s", comparison.text);
    else if (comparison.n_there < comparison.n)
        state_set(ret_state, comparison.n_there ? STEP_PARTIAL : STEP_TODO, "%s", comparison.text);
    else
        stamp_check(context, step, false, ret_state);
}

/*
 * The whole set is copied beside its place first; only when every part is there, and synced, is it moved in, name by
 * name. A name that was there is replaced, never copied into. What an earlier set had and this one has not is removed.
 */
static void copyset_apply(FILE *script, const struct recipe_step *step)
{
    json_t *value;
    size_t i;

    fputs("to=\"$EPKIT_ROOT\"", script);
    script_word(script, arg_text(step, "to"));
    fputs("\nnew=\"$to/.epkit-$EPKIT_STEP\"\n"
          "list=\"$EPKIT_STATE/copies/$EPKIT_STEP\"\n"
          "kept=\"$EPKIT_BEFORE/kept\"\n"
          "if [ ! -e \"$EPKIT_BEFORE/known\" ]; then\n"
          "    mkdir -p \"$kept\"\n"
          "    folder=$to\n"
          "    : >\"$EPKIT_BEFORE/folders\"\n"
          "    while [ -n \"$folder\" ] && [ ! -d \"$folder\" ]; do\n"
          "        printf '%s\\n' \"$folder\" >>\"$EPKIT_BEFORE/folders\"\n"
          "        folder=${folder%/*}\n"
          "    done\n"
          "    : >\"$EPKIT_BEFORE/known\"\n"
          "fi\n"
          "mkdir -p \"$to\" \"$EPKIT_STATE/copies\"\n"
          "rm -rf \"$new\"\n"
          "mkdir \"$new\"\n"
          ": >\"$list.new\"\n"
          "copy() {\n"
          "    if [ ! -e \"$1\" ] && [ ! -L \"$1\" ]; then\n"
          "        echo \"$1 is not there: nothing of the set is copied\" >&2\n"
          "        exit 1\n"
          "    fi\n"
          "    for file in \"$@\"; do\n"
          "        name=${file##*/}\n"
          "        cp -a \"$file\" \"$new/$name\"\n"
          "        printf '%s\\n' \"$name\" >>\"$list.new\"\n"
          "    done\n"
          "}\n",
          script);
    json_array_foreach(json_object_get(step->args, "files"), i, value)
    {
        const char *pattern = json_string_value(value), *last = strrchr(pattern, '/') + 1;
        char folder[1100];

        snprintf(folder, sizeof(folder), "%.*s", (int)(last - pattern), pattern);
        fputs("copy \"$EPKIT_ROOT\"", script);
        script_word(script, folder);
        /* Unquoted: the shell expands it. It consists of the characters of a path, * and ? alone. */
        fprintf(script, "%s\n", last);
    }
    fputs("sync\n"
          "sort -u \"$list.new\" -o \"$list.new\"\n"
          "while read -r name; do\n"
          "    if [ -e \"$to/$name\" ] || [ -L \"$to/$name\" ]; then\n"
          "        if { [ ! -e \"$list\" ] || ! grep -qxF \"$name\" \"$list\"; } && [ ! -e \"$kept/$name\" ] &&\n"
          "            ! cmp -s \"$to/$name\" \"$new/$name\"; then\n"
          "            cp -a \"$to/$name\" \"$kept/.new\"\n"
          "            mv -fT \"$kept/.new\" \"$kept/$name\"\n"
          "        fi\n"
          "        if [ -d \"$to/$name\" ] && [ ! -L \"$to/$name\" ]; then rm -rf \"${to:?}/$name\"; fi\n"
          "    fi\n"
          "    mv -fT \"$new/$name\" \"$to/$name\"\n"
          "done <\"$list.new\"\n"
          "rmdir \"$new\"\n"
          "if [ -e \"$list\" ]; then\n"
          "    comm -23 \"$list\" \"$list.new\" | while read -r name; do rm -rf \"${to:?}/$name\"; done\n"
          "fi\n"
          "mv -f \"$list.new\" \"$list\"\n",
          script);
    script_stamp(script, step, false);
}

static void copyset_undo(FILE *script, const struct recipe_step *step)
{
    fputs("to=\"$EPKIT_ROOT\"", script);
    script_word(script, arg_text(step, "to"));
    fputs("\nrm -rf \"$to/.epkit-$EPKIT_STEP\"\n"
          "for list in \"$EPKIT_STATE/copies/$EPKIT_STEP\" \"$EPKIT_STATE/copies/$EPKIT_STEP.new\"; do\n"
          "    if [ ! -e \"$list\" ]; then continue; fi\n"
          "    while read -r name; do rm -rf \"${to:?}/$name\"; done <\"$list\"\n"
          "done\n"
          "if [ -d \"$EPKIT_BEFORE/kept\" ]; then\n"
          "    rm -rf \"$EPKIT_BEFORE/kept/.new\"\n"
          "    find \"$EPKIT_BEFORE/kept\" -mindepth 1 -maxdepth 1 -exec cp -a -t \"$to\" {} +\n"
          "fi\n"
          "if [ -e \"$EPKIT_BEFORE/folders\" ]; then\n"
          "    while read -r folder; do rmdir \"$folder\" 2>/dev/null || true; done <\"$EPKIT_BEFORE/folders\"\n"
          "fi\n"
          "rm -f \"$EPKIT_STATE/copies/$EPKIT_STEP\" \"$EPKIT_STATE/copies/$EPKIT_STEP.new\" "
          "\"$EPKIT_STATE/stamp/$EPKIT_STEP\"\n",
          script);
}

const struct step_type type_copyset = {
    .name = "copyset", .args = copyset_args, .check = copyset_check, .apply = copyset_apply, .undo = copyset_undo};
