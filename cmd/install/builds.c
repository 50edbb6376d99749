/* SPDX-License-Identifier: Apache-2.0 */
/*
 * builds.c - the types apt and deb (packages in given versions), build (from source), pip (Python packages in a
 * folder), copyset (copies that belong together) and command (anything else).
 */
#include "base/error.h"
#include "machine/software/read_software.h"
#include "types.h"

#include <ctype.h>
#include <fnmatch.h>
#include <string.h>

/* --- apt --- */

struct dpkg_package {
    char version[128];
    bool is_installed, is_broken; /* broken: half-installed, unpacked or half-configured */
    bool is_held;                 /* held by the administrator in its version */
};

/* Of several architectures the installed one counts. */
static struct dpkg_package find_package(const char *status, const char *name)
{
    struct dpkg_package found = {.version = ""};
    struct parse_package package;

    while (!found.is_installed && parse_package_next(&status, &package)) {
        char words[64];

        snprintf(words, sizeof(words), "%.*s", (int)package.status.n, package.status.text);
        if (!piece_is(package.name, name) || !*words || strstr(words, "not-installed") || strstr(words, "config-files"))
            continue;
        found.is_installed = package.installed;
        found.is_held = package.installed && strncmp(words, "hold ", 5) == 0;
        found.is_broken = !package.installed;
        snprintf(found.version, sizeof(found.version), "%.*s", (int)package.version.n, package.version.text);
    }
    return found;
}

void dpkg_check(const struct check_context *context, const json_t *packages, struct step_state *ret_state)
{
    int n_missing = 0, n_fine = 0;
    const char *status = source_read(context->source, "/var/lib/dpkg/status").text;
    char missing[128] = "";

    FOR_MEMBERS (name, value, packages) {
        const char *pin = json_string_value(value);
        struct dpkg_package package = find_package(status, name);

        if (package.is_broken) {
            state_set(ret_state, STEP_PARTIAL, "%s %s is half installed", name, package.version);
            return;
        }
        if (package.is_installed && fnmatch(pin, package.version, 0) != 0) {
            state_set(ret_state, STEP_WRONG, "%s %s is installed%s, expected %s", name, package.version,
                      package.is_held ? " and held" : "", pin);
            return;
        }
        n_fine += package.is_installed;
        if (!package.is_installed && n_missing++ == 0)
            snprintf(missing, sizeof(missing), "%s", name);
    }
    if (n_missing == 0)
        state_set(ret_state, STEP_DONE, "%d package%s installed", n_fine, n_fine == 1 ? "" : "s");
    else if (n_missing == 1)
        state_set(ret_state, n_fine ? STEP_PARTIAL : STEP_TODO, "%s is not installed", missing);
    else
        state_set(ret_state, n_fine ? STEP_PARTIAL : STEP_TODO, "%s and %d other packages are not installed", missing,
                  n_missing - 1);
}

static void apt_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    dpkg_check(context, json_object_get(step->args, "packages"), ret_state);
}

static const struct step_arg apt_args[] = {{"packages", VALUE_PACKAGES, true}, {NULL, 0, false}};

const struct step_type type_apt = {
    .name = "apt", .args = apt_args, .check = apt_check, .has_fetch = true, .needs_live = true};

/* --- deb: one package file from an address --- */

static const struct step_arg deb_args[] = {
    {"package", VALUE_WORD, true},
    {"version", VALUE_VERSION, true},
    {"url", VALUE_URL, true},
    {"sha256", VALUE_SHA256, true},
    {NULL, 0, false},
};

static void deb_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    json_t *packages = json_pack("{s:s}", arg_text(step, "package"), arg_text(step, "version"));

    dpkg_check(context, packages, ret_state);
    json_decref(packages);
}

const struct step_type type_deb = {
    .name = "deb", .args = deb_args, .check = deb_check, .has_fetch = true, .needs_live = true};

/* --- build --- */

static const struct step_arg build_args[] = {
    {"git", VALUE_URL, false},       {"ref", VALUE_WORD, false},
    {"commit", VALUE_COMMIT, false}, {"url", VALUE_URL, false},
    {"sha256", VALUE_SHA256, false}, {"script", VALUE_SHELL, true},
    {"provides", VALUE_PATHS, true}, {"owns", VALUE_PATHS, true},
    {"kernel", VALUE_BOOL, false},   {NULL, 0, false},
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
    size_t n_there = 0;

    FOR_JSON (value, json_object_get(step->args, "provides")) {
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

const struct step_type type_build = {
    .name = "build",
    .args = build_args,
    .validate = build_validate,
    .check = build_check,
    .has_fetch = true,
    .needs_live = true,
};

/* --- pip --- */

static const struct step_arg pip_args[] = {
    {"target", VALUE_PATH, true},
    {"packages", VALUE_PACKAGES, true},
    {"index", VALUE_URL, false},
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
    char wanted[160];

    ret_version[0] = '\0';
    normalize_name(name, strlen(name), wanted);
    FOR_NAMES (entry, source_list(source, "%s", target)) {
        const char *end = strstr(entry, ".dist-info"), *dash = strchr(entry, '-');
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
    const char *target = arg_text(step, "target");
    int n_missing = 0, n_there = 0;

    FOR_MEMBERS (name, value, json_object_get(step->args, "packages")) {
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

const struct step_type type_pip = {
    .name = "pip",
    .args = pip_args,
    .path_key = "target",
    .check = pip_check,
    .has_fetch = true,
    .needs_live = true,
};

/* --- copyset --- */

static const struct step_arg copyset_args[] = {
    {"to", VALUE_PATH, true},
    {"files", VALUE_GLOBS, true},
    {NULL, 0, false},
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

struct comparison {
    int n, n_there;
    char missing[200],
        different[200]; /* the first copy that is missing, and the last one that differs from its source */
};

/* Compares the files that match a pattern with their copies in the folder `to`. False: none match. */
static bool compare_matches(struct source *source, const char *pattern, const char *to, struct comparison *comparison)
{
    const char *last = strrchr(pattern, '/') + 1;
    char folder[1100], path[1400], copy[1400];
    bool found = false;

    snprintf(folder, sizeof(folder), "%.*s", (int)(last - pattern), pattern);
    FOR_NAMES (name, source_list(source, "%s", folder)) {
        if (fnmatch(last, name, FNM_PERIOD) != 0)
            continue;
        snprintf(path, sizeof(path), "%s%s", folder, name);
        snprintf(copy, sizeof(copy), "%s/%s", to, name);
        found = true;
        comparison->n++;
        if (source_stat(source, "%s", copy).state != SOURCE_OK) {
            if (!*comparison->missing)
                snprintf(comparison->missing, sizeof(comparison->missing), "%.90s is not in %.90s", name, to);
            continue;
        }
        comparison->n_there++;
        if (!is_same(source, path, copy))
            snprintf(comparison->different, sizeof(comparison->different), "%.120s differs from its source", copy);
    }
    return found;
}

static void copyset_check(const struct check_context *context, const struct recipe_step *step,
                          struct step_state *ret_state)
{
    struct comparison comparison = {0};

    FOR_JSON (value, json_object_get(step->args, "files")) {
        if (!compare_matches(context->source, json_string_value(value), arg_text(step, "to"), &comparison)) {
            state_set(ret_state, STEP_TODO, "%s, which is to be copied, does not exist", json_string_value(value));
            return;
        }
    }
    if (*comparison.different)
        state_set(ret_state, STEP_WRONG, "%s", comparison.different);
    else if (comparison.n_there < comparison.n)
        state_set(ret_state, comparison.n_there ? STEP_PARTIAL : STEP_TODO, "%s", comparison.missing);
    else
        stamp_check(context, step, false, ret_state);
}

const struct step_type type_copyset = {
    .name = "copyset", .args = copyset_args, .path_key = "to", .check = copyset_check};

/* --- command --- */

static const struct step_arg command_args[] = {
    {"run", VALUE_SHELL, true},      /* applies the step; run again after a kill */
    {"check", VALUE_SHELL, false},   /* succeeds when the step is done; changes nothing */
    {"creates", VALUE_PATHS, false}, /* paths that exist when the step is done */
    {"undo", VALUE_SHELL, true},     /* "true" if there is nothing to undo */
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

    FOR_JSON (value, json_object_get(step->args, "creates")) {
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
        int status = context->probe(context->probe_context, step, check);

        if (status == 0)
            state_set(ret_state, STEP_DONE, "its check succeeds");
        else
            state_set(ret_state, STEP_TODO, status < 0 ? "its check could not be run" : "its check fails");
    }
}

const struct step_type type_command = {
    .name = "command",
    .args = command_args,
    .validate = command_validate,
    .check = command_check,
    .needs_live = true,
};
