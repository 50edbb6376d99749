/* SPDX-License-Identifier: Apache-2.0 */
/* builds.c - the types build (from source), pip (Python packages in a folder) and command (anything else). */
#include "base/error.h"
#include "types.h"

#include <ctype.h>
#include <fnmatch.h>
#include <string.h>

/* --- build --- */

static const struct step_arg build_args[] = {
    {"git", ARG_URL, false},       {"ref", ARG_WORD, false},
    {"commit", ARG_COMMIT, false}, {"url", ARG_URL, false},
    {"sha256", ARG_SHA256, false}, {"script", ARG_SHELL, true},
    {"provides", ARG_PATHS, true}, {"owns", ARG_PATHS, true},
    {"kernel", ARG_BOOL, false},   {NULL, 0, false},
};

static ep_status build_validate(const struct recipe *recipe, const struct recipe_step *step)
{
    bool git = *arg_text(step, "git"), url = *arg_text(step, "url");

    if (git == url)
        return recipe_refuse(recipe, step->line,
                             "step '%s' needs 'git' with 'ref' and 'commit', or 'url' with 'sha256'", step->id);
    if (git && (!*arg_text(step, "ref") || !*arg_text(step, "commit")))
        return recipe_refuse(recipe, step->line,
                             "step '%s': 'git' needs 'ref' and 'commit': the content of a branch may change", step->id);
    if (url && !*arg_text(step, "sha256"))
        return recipe_refuse(recipe, step->line, "step '%s': 'url' needs 'sha256'", step->id);
    return EP_OK;
}

static void build_check(const struct check_context *context, const struct recipe_step *step,
                        struct step_state *ret_state)
{
    const char *missing = NULL;
    size_t i, n_there = 0;
    json_t *value;

    json_array_foreach(json_object_get(step->args, "provides"), i, value)
    {
        bool is_there = source_stat(context->source, "%s", json_string_value(value)).state == SOURCE_OK;

        n_there += is_there;
        missing = is_there || missing ? missing : json_string_value(value);
    }
    stamp_check(context, step, arg_flag(step, "kernel", false), ret_state);
    if (ret_state->now == STEP_TODO && n_there > 0 && missing)
        state_set(ret_state, STEP_PARTIAL, "%s is not there: an installation was interrupted", missing);
    else if (ret_state->now == STEP_TODO && n_there > 0)
        state_set(ret_state, STEP_WRONG, "it exists, but was not made by this recipe: its version is unknown");
    else if (missing)
        state_set(ret_state, ret_state->now == STEP_DONE ? STEP_PARTIAL : ret_state->now, "%s is not there", missing);
}

static void build_fetch(FILE *script, const struct recipe_step *step)
{
    if (*arg_text(step, "url")) {
        fputs("epkit_download ", script);
        script_word(script, arg_text(step, "url"));
        fprintf(script, " \"$EPKIT_STATE/fetch/$EPKIT_STEP.tar\" '%s'\n", arg_text(step, "sha256"));
        return;
    }
    fputs("epkit_git_fetch ", script);
    script_word(script, arg_text(step, "git"));
    fputc(' ', script);
    script_word(script, arg_text(step, "ref"));
    fprintf(script, " '%s'\n", arg_text(step, "commit"));
}

static void build_apply(FILE *script, const struct recipe_step *step)
{
    bool is_archive = *arg_text(step, "url");
    json_t *value;
    size_t i;

    fputs("source=\"$EPKIT_STATE/fetch/$EPKIT_STEP\"\nbuild=\"$EPKIT_STATE/build/$EPKIT_STEP\"\n"
          "rm -rf \"$build\"\nmkdir -p \"$build\"\n",
          script);
    if (is_archive)
        fprintf(script,
                "epkit_checksum \"$source.tar\" '%s'\n"
                "tar -xf \"$source.tar\" -C \"$build\" --strip-components=1 --no-same-owner\n",
                arg_text(step, "sha256"));
    else
        fputs("cp -a \"$source/.\" \"$build\"\n", script);
    /* Existing files belong to somebody else, or to an interrupted build: they are saved the first time. */
    json_array_foreach(json_object_get(step->args, "owns"), i, value)
    {
        script_keep(script, json_string_value(value));
        fputs("rm -rf \"$EPKIT_ROOT\"", script);
        script_word(script, json_string_value(value));
        fputc('\n', script);
    }
    fputs("cd \"$build\"\n", script);
    script_shell(script, arg_text(step, "script"));
    json_array_foreach(json_object_get(step->args, "provides"), i, value)
    {
        fputs("if [ ! -e \"$EPKIT_ROOT\"", script);
        script_word(script, json_string_value(value));
        fprintf(script, " ]; then echo 'the build did not make %s' >&2; exit 1; fi\n", json_string_value(value));
    }
    script_stamp(script, step, arg_flag(step, "kernel", false));
    fputs("cd /\nrm -rf \"$build\"\n", script);
}

static void build_undo(FILE *script, const struct recipe_step *step)
{
    json_t *value;
    size_t i;

    json_array_foreach(json_object_get(step->args, "owns"), i, value) script_restore(script, json_string_value(value));
    fputs("rm -rf \"$EPKIT_STATE/stamp/$EPKIT_STEP\" \"$EPKIT_STATE/build/$EPKIT_STEP\" "
          "\"$EPKIT_STATE/fetch/$EPKIT_STEP\"\n",
          script);
}

const struct step_type type_build = {
    .name = "build",
    .args = build_args,
    .validate = build_validate,
    .check = build_check,
    .fetch = build_fetch,
    .apply = build_apply,
    .undo = build_undo,
    .needs_live = true,
};

/* --- pip --- */

static const struct step_arg pip_args[] = {
    {"target", ARG_PATH, true},
    {"packages", ARG_PACKAGES, true},
    {"index", ARG_URL, false},
    {NULL, 0, false},
};

/* Normalises a name: "nvidia_nvshmem_cu12" and "NVIDIA-nvshmem.cu12" are the same package. */
static void normalize_name(const char *name, size_t n, char ret_name[160])
{
    size_t at = 0;

    for (size_t i = 0; i < n && at < 159; i++) {
        bool divides = strchr("-_.", name[i]) != NULL;

        if (divides && at && ret_name[at - 1] == '_')
            continue;
        ret_name[at++] = divides ? '_' : (char)tolower((unsigned char)name[i]);
    }
    ret_name[at] = '\0';
}

/* The version of a package below a target folder; "" if it is not installed. */
static void pip_version(struct source *source, const char *target, const char *name, char ret_version[160])
{
    struct source_names names = source_list(source, "%s", target);
    char wanted[160];

    ret_version[0] = '\0';
    normalize_name(name, strlen(name), wanted);
    for (size_t i = 0; i < names.n; i++) {
        const char *entry = names.names[i], *end = strstr(entry, ".dist-info"), *dash = strchr(entry, '-');
        char found[160];

        if (!end || end[10] || !dash || dash > end)
            continue;
        normalize_name(entry, (size_t)(dash - entry), found);
        if (strcmp(found, wanted) == 0)
            snprintf(ret_version, 160, "%.*s", (int)(end - dash - 1), dash + 1);
    }
}

static void pip_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    const char *name, *target = arg_text(step, "target");
    int n_missing = 0, n_there = 0;
    json_t *value;

    json_object_foreach(json_object_get(step->args, "packages"), name, value)
    {
        char version[160];

        pip_version(context->source, target, name, version);
        if (*version && fnmatch(json_string_value(value), version, 0) != 0) {
            state_set(ret_state, STEP_WRONG, "%s %s is in %s, expected %s", name, version, target,
                      json_string_value(value));
            return;
        }
        n_there += *version != '\0';
        n_missing += *version == '\0';
    }
    stamp_check(context, step, false, ret_state);
    if (ret_state->now == STEP_TODO && n_there)
        state_set(ret_state, STEP_PARTIAL,
                  "%d of %d packages are in %s: an installation was interrupted, or was made by somebody else", n_there,
                  n_there + n_missing, target);
    else if (n_missing)
        state_set(ret_state, n_there ? STEP_PARTIAL : STEP_TODO, "%d packages are not in %s", n_missing, target);
}

static void pip_words(FILE *script, const struct recipe_step *step)
{
    const char *name;
    json_t *value;

    json_object_foreach(json_object_get(step->args, "packages"), name, value)
    {
        const char *pin = json_string_value(value);
        char word[320];

        snprintf(word, sizeof(word), "%s%s%s", name,
                 strcmp(pin, "*") == 0 ? "" : "==", strcmp(pin, "*") == 0 ? "" : pin);
        fputc(' ', script);
        script_word(script, word);
    }
}

/* pip verifies the checksum that the index gives for each file. */
static void pip_fetch(FILE *script, const struct recipe_step *step)
{
    fputs(
        "mkdir -p \"$EPKIT_STATE/fetch/$EPKIT_STEP\"\necho \"downloading Python packages\"\nepkit_pip download -q -d \"$EPKIT_STATE/fetch/$EPKIT_STEP\"",
        script);
    if (*arg_text(step, "index")) {
        fputs(" --index-url ", script);
        script_word(script, arg_text(step, "index"));
    }
    pip_words(script, step);
    fputc('\n', script);
}

static void pip_apply(FILE *script, const struct recipe_step *step)
{
    fputs("epkit_pip_apply ", script);
    script_word(script, arg_text(step, "target"));
    pip_words(script, step);
    fputc('\n', script);
    script_stamp(script, step, false);
}

static void pip_undo(FILE *script, const struct recipe_step *step)
{
    fputs("epkit_copies_undo ", script);
    script_word(script, arg_text(step, "target"));
    fputc('\n', script);
}

const struct step_type type_pip = {
    .name = "pip",
    .args = pip_args,
    .check = pip_check,
    .fetch = pip_fetch,
    .apply = pip_apply,
    .undo = pip_undo,
    .needs_live = true,
};

/* --- command --- */

static const struct step_arg command_args[] = {
    {"run", ARG_SHELL, true},      /* applies the step; run again after a kill */
    {"check", ARG_SHELL, false},   /* succeeds when the step is done; changes nothing */
    {"creates", ARG_PATHS, false}, /* paths that exist when the step is done */
    {"undo", ARG_SHELL, true},     /* "true" if there is nothing to undo */
    {NULL, 0, false},
};

static ep_status command_validate(const struct recipe *recipe, const struct recipe_step *step)
{
    if (!*arg_text(step, "check") && !json_object_get(step->args, "creates"))
        return recipe_refuse(recipe, step->line, "step '%s' of type command needs 'check' or 'creates'", step->id);
    return EP_OK;
}

static void command_check(const struct check_context *context, const struct recipe_step *step,
                          struct step_state *ret_state)
{
    const char *check = arg_text(step, "check");
    json_t *value;
    size_t i;

    json_array_foreach(json_object_get(step->args, "creates"), i, value)
    {
        if (source_stat(context->source, "%s", json_string_value(value)).state != SOURCE_OK) {
            state_set(ret_state, STEP_TODO, "%s is not there", json_string_value(value));
            return;
        }
    }
    if (!*check) {
        state_set(ret_state, STEP_DONE, "its files exist");
    } else if (!context->probe) {
        state_set(ret_state, STEP_UNKNOWN, "its check can only be run on the machine itself");
    } else {
        int status = context->probe(context->probe_recipe, step, check, context->probe_context);

        if (status == 0)
            state_set(ret_state, STEP_DONE, "its check succeeds");
        else
            state_set(ret_state, STEP_TODO, status < 0 ? "its check could not be run" : "its check fails");
    }
}

static void command_apply(FILE *script, const struct recipe_step *step)
{
    script_shell(script, arg_text(step, "run"));
}

static void command_undo(FILE *script, const struct recipe_step *step)
{
    script_shell(script, arg_text(step, "undo"));
}

const struct step_type type_command = {
    .name = "command",
    .args = command_args,
    .validate = command_validate,
    .check = command_check,
    .apply = command_apply,
    .undo = command_undo,
    .needs_live = true,
};
