/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files.c - the types that write one file: file, modprobe (options of a kernel module) and module (a module that is
 * loaded, in a version).
 */
#include "base/error.h"
#include "common/memory.h"
#include "types.h"

#include <stdlib.h>
#include <string.h>

/* The state of the step's file: STEP_TODO, STEP_WRONG or STEP_DONE. */
static void check_file(const struct check_context *context, const struct recipe_step *step,
                       struct step_state *ret_state)
{
    const char *mode = *arg_text(step, "mode") ? arg_text(step, "mode") : "0644";
    const char *path = step->path;
    char *content = step->type->content(step);
    struct source_text text = source_read(context->source, "%s", path);

    if (text.state == SOURCE_ABSENT)
        state_set(ret_state, STEP_TODO, "%s is not there", path);
    else if (text.state != SOURCE_OK)
        state_set(ret_state, STEP_WRONG, "%s: %s", path, text.why);
    else if (text.bytes != strlen(content) || memcmp(text.text, content, text.bytes) != 0)
        state_set(ret_state, STEP_WRONG, "%s has other content", path);
    else if (source_stat(context->source, "%s", path).may_execute != (strpbrk(mode, "1357") != NULL))
        state_set(ret_state, STEP_WRONG, "%s has another mode than %s", path, mode);
    else
        state_set(ret_state, STEP_DONE, "%s is as expected", path);
    free(content);
}

/* --- file --- */

static const struct step_arg file_args[] = {
    {"path", VALUE_PATH, true},
    {"content", VALUE_TEXT, true},
    {"mode", VALUE_MODE, false},
    {NULL, 0, false},
};

/* The content, or the name of the module, with a newline at its end. */
static char *line_content(const struct recipe_step *step)
{
    const char *content = arg_text(step, step->type == &type_module ? "module" : "content");
    size_t bytes = strlen(content);

    return memory_printf("%s%s", content, bytes && content[bytes - 1] == '\n' ? "" : "\n");
}

const struct step_type type_file = {
    .name = "file", .args = file_args, .path_key = "path", .content = line_content, .check = check_file};

/* --- modprobe --- */

static const struct step_arg modprobe_args[] = {
    {"module", VALUE_WORD, true},
    {"options", VALUE_OPTIONS, true},
    {"effect_file", VALUE_PATH, false}, /* where the running module shows its options */
    {"effect_any", VALUE_TEXTS, false}, /* the file contains one of these texts when the options are live */
    {NULL, 0, false},
};

static ep_status modprobe_validate(const struct recipe *recipe, const struct recipe_step *step)
{
    if (*arg_text(step, "effect_file") && !json_object_get(step->args, "effect_any"))
        return recipe_refuse(recipe, step->line, "step '%s': 'effect_file' needs 'effect_any'", step->id);
    FOR_MEMBERS (key, value, json_object_get(step->args, "options"))
        if (strpbrk(json_string_value(value), "\"\\"))
            return recipe_refuse(recipe, step->line, "step '%s': option %s must not hold quotes or backslashes",
                                 step->id, key);
    return EP_OK;
}

static char *modprobe_content(const struct recipe_step *step)
{
    char *text;
    size_t bytes;
    FILE *out = memory_stream(&text, &bytes);

    fputs("# Written by epkit install.\n", out);
    FOR_MEMBERS (key, value, json_object_get(step->args, "options"))
        fprintf(out, "options %s %s=\"%s\"\n", arg_text(step, "module"), key, json_string_value(value));
    memory_close(out);
    return text;
}

static bool is_effective(const char *text, const json_t *any)
{
    FOR_JSON (value, any)
        if (strstr(text, json_string_value(value)))
            return true;
    return false;
}

static void modprobe_check(const struct check_context *context, const struct recipe_step *step,
                           struct step_state *ret_state)
{
    const char *effect = arg_text(step, "effect_file");
    struct source_text live = {.state = SOURCE_ABSENT, .text = ""};

    check_file(context, step, ret_state);
    if (ret_state->now != STEP_DONE)
        return;
    if (*effect)
        live = source_read(context->source, "%s", effect);
    if (live.state == SOURCE_ABSENT)
        state_set(ret_state, STEP_DONE, "configured; it takes effect when %s is loaded", arg_text(step, "module"));
    else if (is_effective(live.text, json_object_get(step->args, "effect_any")))
        state_set(ret_state, STEP_DONE, "live: %s says so", effect);
    else
        state_set(ret_state, STEP_REBOOT, "configured, but %s does not show it: takes effect after a reboot", effect);
}

const struct step_type type_modprobe = {
    .name = "modprobe",
    .args = modprobe_args,
    .validate = modprobe_validate,
    .path_key = "module",
    /* modprobe reads its folders in the order of file names, and the last value of an option counts. */
    .path_prefix = "/etc/modprobe.d/zz-epkit-",
    .content = modprobe_content,
    .check = modprobe_check,
};

/* --- module --- */

static const struct step_arg module_args[] = {
    {"module", VALUE_WORD, true},
    {"version", VALUE_VERSION, false},
    {"dkms", VALUE_BOOL, false}, /* built by DKMS: it must exist for the running kernel */
    {NULL, 0, false},
};

/* A name with one character for each '-' and '_', which are equal in names of modules. */
static void module_name(const struct recipe_step *step, char separator, char ret_name[128])
{
    snprintf(ret_name, 128, "%.120s", arg_text(step, "module"));
    for (char *at = ret_name; *at; at++)
        if (*at == '-' || *at == '_')
            *at = separator;
}

/* Compares whole words: nvidia is not loaded because nvidia_drm is. */
static bool is_loaded(struct source *source, const char *name)
{
    struct source_text text = source_read(source, "/proc/modules");
    size_t n = strlen(name);

    for (const char *line = text.text; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, n) == 0 && line[n] == ' ')
            return true;
    }
    return false;
}

/* Does the file of the module exist for the running kernel? */
static bool has_dkms_file(const struct check_context *context, const struct recipe_step *step)
{
    static const char *const endings[] = {"", ".zst", ".xz", ".gz"};
    char name[128];

    for (size_t i = 0; i < 8; i++) {
        module_name(step, i % 2 ? '-' : '_', name);
        if (source_stat(context->source, "/lib/modules/%s/updates/dkms/%s.ko%s", context->kernel, name, endings[i / 2])
                .state == SOURCE_OK)
            return true;
    }
    return false;
}

static void module_check(const struct check_context *context, const struct recipe_step *step,
                         struct step_state *ret_state)
{
    const char *pin = arg_text(step, "version");
    bool is_dkms = arg_flag(step, "dkms", false);
    struct source_text version;
    char name[128];

    module_name(step, '_', name);
    version = source_line(context->source, "/sys/module/%s/version", name);
    check_file(context, step, ret_state);
    if (is_dkms && !*context->kernel)
        state_set(ret_state, STEP_UNKNOWN, "the kernel release is unknown");
    else if (is_dkms && !has_dkms_file(context, step))
        state_set(ret_state, STEP_TODO, "%s is not built for kernel %s", name, context->kernel);
    else if (!is_loaded(context->source, name))
        state_set(ret_state, STEP_TODO, "%s is not loaded", name);
    else if (*pin && version.state == SOURCE_OK && strcmp(version.text, pin) != 0)
        state_set(ret_state, STEP_REBOOT, "%s %s is loaded, expected %s: takes effect after a reboot", name,
                  version.text, pin);
    else if (ret_state->now != STEP_DONE)
        state_set(ret_state, STEP_PARTIAL, "%s is loaded, but will not be after a reboot", name);
    else
        state_set(ret_state, STEP_DONE, "%s%s%s is loaded", name, *pin ? " " : "", pin);
}

const struct step_type type_module = {
    .name = "module",
    .args = module_args,
    .path_key = "module",
    .path_prefix = "/etc/modules-load.d/epkit-",
    .content = line_content,
    .check = module_check,
    .needs_live = true,
};
