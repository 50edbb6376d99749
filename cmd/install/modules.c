/* SPDX-License-Identifier: Apache-2.0 */
/* modules.c - the types modprobe (options of a kernel module) and module (a module that is loaded, in a version). */
#include "base/error.h"
#include "types.h"

#include <stdlib.h>
#include <string.h>

/* --- modprobe --- */

static const struct step_arg modprobe_args[] = {
    {"module", ARG_WORD, true},
    {"options", ARG_OPTIONS, true},
    {"effect_file", ARG_PATH, false}, /* where the running module shows its options */
    {"effect_any", ARG_TEXTS, false}, /* the file contains one of these texts when the options are live */
    {NULL, 0, false},
};

static ep_status modprobe_validate(const struct recipe *recipe, const struct recipe_step *step)
{
    const char *key;
    json_t *value;

    if (*arg_text(step, "effect_file") && !json_object_get(step->args, "effect_any"))
        return recipe_refuse(recipe, step->line, "step '%s': 'effect_file' needs 'effect_any'", step->id);
    json_object_foreach(json_object_get(step->args, "options"), key, value)
    {
        if (strpbrk(json_string_value(value), "\"\\"))
            return recipe_refuse(recipe, step->line, "step '%s': option %s must not hold quotes or backslashes",
                                 step->id, key);
    }
    return EP_OK;
}

/* modprobe reads its folders in the order of file names, and the last value of an option counts. */
static void modprobe_path(const struct recipe_step *step, char ret_path[256])
{
    snprintf(ret_path, 256, "/etc/modprobe.d/zz-epkit-%.128s.conf", arg_text(step, "module"));
}

static char *modprobe_content(const struct recipe_step *step)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    const char *key;
    json_t *value;

    if (!out)
        return NULL;
    fputs("# Written by epkit install.\n", out);
    json_object_foreach(json_object_get(step->args, "options"), key, value)
        fprintf(out, "options %s %s=\"%s\"\n", arg_text(step, "module"), key, json_string_value(value));
    fclose(out);
    return text;
}

/* In names of modules and options '-' and '_' are equal. */
static bool is_same_name(const char *a, const char *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((a[i] == '-' ? '_' : a[i]) != (b[i] == '-' ? '_' : b[i]) || !a[i])
            return false;
    return true;
}

/* How a list of words sets an option. */
enum setting { SETS_NOTHING, SETS_THE_SAME, SETS_ANOTHER };

/* The length of a word: quoted text may contain spaces. */
static size_t word_length(const char *text)
{
    bool is_quoted = false;
    size_t n = 0;

    for (; text[n] && (is_quoted || !strchr(" \t\n", text[n])); n++)
        is_quoted ^= text[n] == '"';
    return n;
}

/* Quotes around the value, or around the whole word, do not belong to it. */
static bool is_value(const char *text, size_t bytes, const char *value)
{
    for (size_t i = 0; i < bytes; i++)
        if (text[i] != '"' && *value++ != text[i])
            return false;
    return *value == '\0';
}

/* Words are NAME=VALUE; the last value of a name counts. `prefix`: text before each name, or "". */
static enum setting find_setting(const char *words, const char *prefix, const char *key, const char *value)
{
    size_t skip = strlen(prefix);
    enum setting result = SETS_NOTHING;

    for (words += strspn(words, " \t\n"); *words; words += strspn(words, " \t\n")) {
        size_t n = word_length(words), quote = *words == '"', name = strcspn(words, "= \t\n");
        const char *at = words + quote;

        if (words[name] == '=' && name == quote + skip + strlen(key) && is_same_name(at, prefix, skip) &&
            is_same_name(at + skip, key, strlen(key)))
            result = is_value(words + name + 1, n - name - 1, value) ? SETS_THE_SAME : SETS_ANOTHER;
        words += n;
    }
    return result;
}

/* The same for a configuration file. A backslash at the end continues a line. */
static enum setting find_in_file(const char *text, const char *module, const char *key, const char *value)
{
    enum setting result = SETS_NOTHING, here;

    while (text && *text) {
        char line[2048], word[256];
        size_t n = 0;
        int at = 0;

        for (; *text && *text != '\n'; text++) {
            if (text[0] == '\\' && text[1] == '\n')
                text++;
            if (n < sizeof(line) - 1)
                line[n++] = *text == '\n' ? ' ' : *text;
        }
        line[n] = '\0';
        if (sscanf(line, " options %255s %n", word, &at) == 1 && at > 0 && strlen(word) == strlen(module) &&
            is_same_name(word, module, strlen(module))) {
            here = find_setting(line + at, "", key, value);
            result = here == SETS_NOTHING ? result : here;
        }
        text += *text == '\n';
    }
    return result;
}

/*
 * modprobe's folders: a file of an earlier folder replaces those of the same name, and all are read in the order of
 * their names.
 */
static const char *const modprobe_folders[] = {"/etc/modprobe.d",     "/run/modprobe.d", "/usr/local/lib/modprobe.d",
                                               "/usr/lib/modprobe.d", "/lib/modprobe.d", NULL};

static bool is_shadowed(struct source *source, size_t folder, const char *name)
{
    for (size_t i = 0; i < folder; i++)
        if (source_stat(source, "%s/%s", modprobe_folders[i], name).state == SOURCE_OK)
            return true;
    return false;
}

/* The file after ours that decides the option: the last one by name. false: no file sets it to another value. */
static bool find_overriding_file(const struct check_context *context, const char *module, const char *own_name,
                                 const char *key, const char *value, char ret_path[256])
{
    enum setting result = SETS_NOTHING;
    char last[256] = "";

    for (size_t folder = 0; modprobe_folders[folder]; folder++) {
        struct source_names names = source_list(context->source, "%s", modprobe_folders[folder]);

        for (size_t i = 0; i < names.n; i++) {
            const char *name = names.names[i];
            size_t n = strlen(name);
            enum setting here;
            char path[256];

            if (n < 6 || n >= sizeof(last) || strcmp(name + n - 5, ".conf") != 0 || strcmp(name, own_name) <= 0 ||
                strcmp(name, last) <= 0 || is_shadowed(context->source, folder, name))
                continue;
            snprintf(path, sizeof(path), "%s/%.200s", modprobe_folders[folder], name);
            here = find_in_file(source_read(context->source, "%s", path).text, module, key, value);
            if (here == SETS_NOTHING)
                continue;
            result = here;
            snprintf(last, sizeof(last), "%s", name);
            memcpy(ret_path, path, sizeof(path));
        }
    }
    return result == SETS_ANOTHER;
}

/* What overrides our file: another file, or the kernel command line, which counts last. */
static bool find_overriding(const struct check_context *context, const struct recipe_step *step, const char *own,
                            char ret_path[256])
{
    const char *module = arg_text(step, "module"), *key;
    char prefix[160];
    json_t *value;

    snprintf(prefix, sizeof(prefix), "%.150s.", module);
    json_object_foreach(json_object_get(step->args, "options"), key, value)
    {
        const char *wanted = json_string_value(value);

        switch (find_setting(source_read(context->source, "/proc/cmdline").text, prefix, key, wanted)) {
        case SETS_ANOTHER:
            snprintf(ret_path, 256, "/proc/cmdline");
            return true;
        case SETS_NOTHING:
            if (find_overriding_file(context, module, strrchr(own, '/') + 1, key, wanted, ret_path))
                return true;
            break;
        case SETS_THE_SAME:
            break;
        }
    }
    return false;
}

static bool is_effective(const char *text, const json_t *any)
{
    json_t *value;
    size_t i;

    json_array_foreach(any, i, value) if (strstr(text, json_string_value(value))) return true;
    return false;
}

static void modprobe_check(const struct check_context *context, const struct recipe_step *step,
                           struct step_state *ret_state)
{
    const char *effect = arg_text(step, "effect_file");
    char path[256], later[256], *content = modprobe_content(step);
    struct source_text text, live;
    bool is_overridden;

    modprobe_path(step, path);
    text = source_read(context->source, "%s", path);
    is_overridden = find_overriding(context, step, path, later);
    live =
        *effect ? source_read(context->source, "%s", effect) : (struct source_text){.state = SOURCE_ABSENT, .text = ""};
    if (!content)
        state_set(ret_state, STEP_UNKNOWN, "no memory");
    else if (text.state == SOURCE_ABSENT)
        state_set(ret_state, STEP_TODO, "%s is not there", path);
    else if (text.state != SOURCE_OK || strcmp(text.text, content) != 0)
        state_set(ret_state, STEP_WRONG, "%s has other content", path);
    else if (is_overridden)
        state_set(ret_state, STEP_WRONG, "%.180s sets the same option later, and the last one counts", later);
    else if (!*effect || live.state == SOURCE_ABSENT)
        state_set(ret_state, STEP_DONE, "configured; it takes effect when %s is loaded", arg_text(step, "module"));
    else if (is_effective(live.text, json_object_get(step->args, "effect_any")))
        state_set(ret_state, STEP_DONE, "live: %s says so", effect);
    else
        state_set(ret_state, STEP_REBOOT, "configured, but %s does not show it: takes effect after a reboot", effect);
    free(content);
}

static void modprobe_apply(FILE *script, const struct recipe_step *step)
{
    char path[256], *content = modprobe_content(step);

    modprobe_path(step, path);
    script_keep(script, path);
    if (content)
        script_write(script, path, content, "0644");
    fputs("epkit_initramfs\n", script);
    free(content);
}

static void modprobe_undo(FILE *script, const struct recipe_step *step)
{
    char path[256];

    modprobe_path(step, path);
    script_restore(script, path);
    fputs("epkit_initramfs\n", script);
}

const struct step_type type_modprobe = {
    .name = "modprobe",
    .args = modprobe_args,
    .validate = modprobe_validate,
    .check = modprobe_check,
    .apply = modprobe_apply,
    .undo = modprobe_undo,
};

/* --- module --- */

static const struct step_arg module_args[] = {
    {"module", ARG_WORD, true},
    {"version", ARG_VERSION, false},
    {"dkms", ARG_BOOL, false}, /* built by DKMS: it must exist for the running kernel */
    {NULL, 0, false},
};

static void module_path(const struct recipe_step *step, char ret_path[256])
{
    snprintf(ret_path, 256, "/etc/modules-load.d/epkit-%.128s.conf", arg_text(step, "module"));
}

/* /proc/modules and /sys/module have '_' for each '-' in names of modules. */
static void module_name(const struct recipe_step *step, char ret_name[128])
{
    snprintf(ret_name, 128, "%.120s", arg_text(step, "module"));
    for (char *at = ret_name; *at; at++)
        if (*at == '-')
            *at = '_';
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
static bool has_file(const struct check_context *context, const char *name)
{
    static const char *const endings[] = {"", ".zst", ".xz", ".gz"};
    char dashed[128];

    snprintf(dashed, sizeof(dashed), "%s", name);
    for (char *at = dashed; *at; at++)
        if (*at == '_')
            *at = '-';
    for (size_t i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++)
            if (source_stat(context->source, "/lib/modules/%s/updates/dkms/%s.ko%s", context->kernel, k ? dashed : name,
                            endings[i])
                    .state == SOURCE_OK)
                return true;
    return false;
}

static void module_check(const struct check_context *context, const struct recipe_step *step,
                         struct step_state *ret_state)
{
    const char *pin = arg_text(step, "version");
    char name[128], path[256];
    struct source_text version;

    module_name(step, name);
    module_path(step, path);
    version = source_line(context->source, "/sys/module/%s/version", name);
    if (arg_flag(step, "dkms", false) && !*context->kernel)
        state_set(ret_state, STEP_UNKNOWN, "the kernel release is unknown");
    else if (arg_flag(step, "dkms", false) && !has_file(context, name))
        state_set(ret_state, STEP_TODO, "%s is not built for kernel %s", name, context->kernel);
    else if (!is_loaded(context->source, name))
        state_set(ret_state, STEP_TODO, "%s is not loaded", name);
    else if (*pin && version.state == SOURCE_OK && strcmp(version.text, pin) != 0)
        state_set(ret_state, STEP_REBOOT, "%s %s is loaded, expected %s: takes effect after a reboot", name,
                  version.text, pin);
    else if (source_stat(context->source, "%s", path).state != SOURCE_OK)
        state_set(ret_state, STEP_PARTIAL, "%s is loaded, but will not be after a reboot", name);
    else
        state_set(ret_state, STEP_DONE, "%s%s%s is loaded", name, *pin ? " " : "", pin);
}

/* A module that cannot be loaded now (another version is in use) may be loaded after a reboot: the check decides. */
static void module_apply(FILE *script, const struct recipe_step *step)
{
    const char *module = arg_text(step, "module");
    char path[256], line[256];

    module_path(step, path);
    snprintf(line, sizeof(line), "%.128s\n", module);
    script_keep(script, path);
    script_write(script, path, line, "0644");
    if (arg_flag(step, "dkms", false))
        fputs("if ! find \"$EPKIT_ROOT/lib/modules/$kernel/updates/dkms\" -name '*.ko*' 2>/dev/null | grep -q .; then\n"
              "    echo \"nothing is built by DKMS for kernel $kernel yet\"\n"
              "fi\n"
              "dkms autoinstall -k \"$kernel\"\n"
              "depmod -a \"$kernel\"\n",
              script);
    fputs("modprobe ", script);
    script_word(script, module);
    fputs(step->reboot == REBOOT_NEVER ? "\n" : " || echo 'it may be loaded after a reboot'\n", script);
}

static void module_undo(FILE *script, const struct recipe_step *step)
{
    char path[256];

    module_path(step, path);
    script_restore(script, path);
    fputs("echo 'the module stays loaded until the next reboot'\n", script);
}

const struct step_type type_module = {
    .name = "module",
    .args = module_args,
    .check = module_check,
    .apply = module_apply,
    .undo = module_undo,
    .needs_live = true,
};
