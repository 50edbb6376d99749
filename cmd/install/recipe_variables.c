/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe_variables.c - versions and variables of a recipe: where their values come from, and the characters that values
 * may contain: none of them can become code in a script.
 */
#include "base/error.h"
#include "common/memory.h"
#include "recipe.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* --- values --- */

#define VALUE_BYTES_MAX 1024

/* Each byte of `value` is a letter, a digit or one of `others`. */
static bool has_only(const char *value, const char *others)
{
    for (; *value; value++)
        if (!(isascii(*value) && isalnum((unsigned char)*value)) && !strchr(others, *value))
            return false;
    return true;
}

static bool is_hex(const char *value, size_t min, size_t max)
{
    size_t n = strlen(value);

    return n >= min && n <= max && strspn(value, "0123456789abcdef") == n;
}

/* `globs`: characters that the last part may contain as well. */
static const char *path_fault(const char *value, const char *globs)
{
    const char *last = strrchr(value, '/');

    if (value[0] != '/')
        return "a path must begin with /";
    if (strlen(value) < 2)
        return "the root folder cannot be an installation folder";
    if (strcspn(value, "*?") < (size_t)(last - value) && *globs)
        return "only the last part of a path may contain * and ?";
    if (!has_only(value, *globs ? "/._+:-*?" : "/._+:-"))
        return "a path may only contain letters, digits and /._+:-";
    if (strstr(value, "/../") || strstr(value, "//") || strstr(value, "/./"))
        return "a path must not contain '..', '.' or '//'";
    /* Neighbours and parents of a path are found by cutting off the last name. */
    if (!*++last)
        return "a path must not end with /";
    return strcmp(last, ".") == 0 || strcmp(last, "..") == 0 ? "a path must not contain '..', '.' or '//'" : NULL;
}

static const char *text_fault(const char *value)
{
    for (; *value; value++)
        if ((unsigned char)*value < 0x20 && *value != '\n' && *value != '\t')
            return "it contains a control character";
    return NULL;
}

bool recipe_is_line(const char *value)
{
    return !strchr(value, '\n') && !text_fault(value);
}

const char *package_fault(const char *name)
{
    return isalnum((unsigned char)name[0]) && has_only(name, "._+-") ? NULL : "it is not a package name";
}

static const char *url_fault(const char *value)
{
    if (strncmp(value, "https://", 8) != 0 && strncmp(value, "http://", 7) != 0 && strncmp(value, "file:///", 8) != 0)
        return "a URL must begin with https://, http:// or file:///";
    return has_only(value, "._+:/=?&%~@-") ? NULL : "a URL may only contain letters, digits and ._+:/=?&%~@-";
}

const char *value_fault(enum value_shape shape, const char *value)
{
    bool is_text = shape == VALUE_TEXT || shape == VALUE_TEXTS || shape == VALUE_OPTIONS || shape == VALUE_SHELL;

    if (!is_text && !*value)
        return "it is empty";
    if (!is_text && strlen(value) > VALUE_BYTES_MAX)
        return "it is longer than 1024 characters";
    switch (shape) {
    case VALUE_WORD:
        if (value[0] == '-')
            return "a word must not begin with '-'";
        return has_only(value, "._+:,=@%/~-") ? NULL : "a word may only contain letters, digits and ._+:,=@%/~-";
    case VALUE_VERSION:
    case VALUE_PACKAGES:
        if (value[0] == '-')
            return "a version must not begin with '-'";
        return has_only(value, ".+:~*-") ? NULL : "a version may only contain letters, digits and .+:~-*";
    case VALUE_PATH:
    case VALUE_PATHS:
        return path_fault(value, "");
    case VALUE_GLOBS:
        return path_fault(value, "*?");
    case VALUE_FLAG:
        return strcmp(value, "0") == 0 || strcmp(value, "1") == 0 ? NULL : "it must be 0 or 1";
    case VALUE_URL:
        return url_fault(value);
    case VALUE_SHA256:
        return is_hex(value, 64, 64) ? NULL : "it must be 64 hexadecimal digits";
    case VALUE_FINGERPRINT:
        return strlen(value) == 40 && strspn(value, "0123456789ABCDEF") == 40
                   ? NULL
                   : "it must be 40 hexadecimal digits, without spaces, in upper case";
    case VALUE_COMMIT:
        return is_hex(value, 7, 40) ? NULL : "a commit is 7 to 40 hexadecimal digits";
    case VALUE_MODE:
        return strlen(value) == 4 && value[0] == '0' && strspn(value, "01234567") == 4
                   ? NULL
                   : "a mode is four octal digits that begin with 0: \"0644\"";
    case VALUE_BOOL:
        return strcmp(value, "true") == 0 || strcmp(value, "false") == 0 ? NULL : "it must be true or false";
    case VALUE_OPTIONS:
        return strchr(value, '\n') ? "it must be one line" : text_fault(value);
    case VALUE_SHELL:
        return strstr(value, "@{") ? "@{...} is not replaced in text for a shell: write \"$NAME\"" : text_fault(value);
    case VALUE_TEXT:
    case VALUE_TEXTS:
        break;
    }
    return text_fault(value);
}

/* --- variables --- */

#define NAME_BYTES_MAX 48

static const char *const kind_names[] = {"word", "path", "flag", "url", "sha256", "version", "fingerprint", NULL};

const char *variable_source_name(enum variable_source source)
{
    static const char *const names[] = {"recipe", "default", "environment", "command line", "machine", "not set"};

    return names[source];
}

bool recipe_variable_is_missing(const struct recipe_variable *variable)
{
    return !variable->value && variable->line && (variable->is_used || !variable->is_skipped);
}

const struct recipe_variable *recipe_variable_find(const struct recipe *recipe, const char *name)
{
    for (size_t i = 0; i < recipe->n_variables; i++)
        if (strcmp(recipe->variables[i].name, name) == 0)
            return &recipe->variables[i];
    return NULL;
}

/* `line` 0: of the machine, whose names the recipe cannot have. */
static ep_status add(struct recipe *recipe, const char *name, int line, struct recipe_variable **ret_variable)
{
    if (line && (!islower((unsigned char)name[0]) || strlen(name) > NAME_BYTES_MAX ||
                 strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != strlen(name)))
        return recipe_refuse(recipe, line,
                             "'%.64s' is not a name: use only lower-case letters, digits and _, at most %d", name,
                             NAME_BYTES_MAX);
    if (line && text_is_any(name, TEXTS("kernel", "machine", "arch", "root", "step", "state", "before")))
        return recipe_refuse(recipe, line, "'%s' is a name that epkit sets", name);
    if (recipe->n_variables == RECIPE_VARIABLES_MAX)
        return recipe_refuse(recipe, line, "more than %d versions and variables", RECIPE_VARIABLES_MAX);
    if (recipe_variable_find(recipe, name))
        return recipe_refuse(recipe, line, "'%.64s' is a duplicate among versions and variables", name);
    *ret_variable = &recipe->variables[recipe->n_variables++];
    **ret_variable =
        (struct recipe_variable){.name = name, .env = "", .help = "", .line = line, .source = FROM_NOWHERE};
    return EP_OK;
}

static void set(struct recipe_variable *variable, const char *value, enum variable_source source)
{
    variable->value = value;
    variable->source = source;
}

static ep_status read_kind(struct recipe *recipe, const struct yaml_node *map, enum value_shape *ret_kind)
{
    const char *text;
    int line;

    EP_TRY(recipe_scalar(recipe, map, "kind", true, &text, &line));
    for (int i = 0; kind_names[i]; i++) {
        if (strcmp(kind_names[i], text) == 0) {
            *ret_kind = (enum value_shape)i;
            return EP_OK;
        }
    }
    return recipe_refuse(
        recipe, line, "unknown kind '%.64s'; it is one of word, path, flag, url, sha256, version, fingerprint", text);
}

/* A value of the user is wrong, and not the recipe. */
static ep_status __attribute__((format(printf, 2, 3)))
refuse_value(const struct recipe_input *input, const char *format, ...)
{
    char text[400];

    if (input->is_value_refused)
        *input->is_value_refused = true;
    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    return ep_fail(EP_E_ARG, "%s", text);
}

/* From the default, the environment and the command line; the last one counts. */
static ep_status choose_value(const struct recipe *recipe, struct recipe_variable *variable, const char *value,
                              int line, const struct recipe_input *input)
{
    const char *env = input->env && *variable->env ? input->env(variable->env) : NULL, *fault;
    const struct yaml_node *of_variant = recipe_entry(recipe, "values", variable->name);

    if (of_variant) {
        value = *of_variant->text ? of_variant->text : NULL;
        line = of_variant->line;
    }
    fault = value ? value_fault(variable->kind, value) : NULL;
    if (fault)
        return recipe_refuse(recipe, line, "%s '%s' is refused: %s",
                             variable->kind == VALUE_VERSION ? "version" : "the default of", variable->name, fault);
    if (value)
        set(variable, value, FROM_DEFAULT);
    fault = env && *env ? value_fault(variable->kind, env) : NULL;
    if (fault)
        return refuse_value(input, "environment variable %s (variable '%s', %s:%d): %s", variable->env, variable->name,
                            recipe->file, variable->line, fault);
    if (env && *env)
        set(variable, env, FROM_ENVIRONMENT);
    for (size_t i = 0; i < input->n_settings; i++) {
        if (strcmp(input->settings[i].name, variable->name) != 0)
            continue;
        fault = value_fault(variable->kind, input->settings[i].value);
        if (fault)
            return refuse_value(input, "--set %s (%s:%d): %s", variable->name, recipe->file, variable->line, fault);
        set(variable, input->settings[i].value, FROM_COMMAND_LINE);
    }
    return EP_OK;
}

static ep_status read_versions(struct recipe *recipe, const struct recipe_input *input)
{
    const struct yaml_node *map = tree_get(recipe->tree, "versions");

    if (!map)
        return EP_OK;
    if (map->kind != YAML_MAP)
        return recipe_refuse(recipe, map->line, "'versions' must be a map of names to versions");
    for (size_t i = 0; i < map->n; i++) {
        struct recipe_variable *variable;

        if (map->items[i].kind != YAML_SCALAR)
            return recipe_refuse(recipe, map->items[i].line, "version '%.64s' must be a text", map->keys[i]);
        EP_TRY(add(recipe, map->keys[i], map->key_lines[i], &variable));
        variable->kind = VALUE_VERSION;
        variable->help = "its version";
        EP_TRY(choose_value(recipe, variable, map->items[i].text, map->items[i].line, input));
        if (variable->source == FROM_DEFAULT)
            variable->source = FROM_VERSIONS;
    }
    return EP_OK;
}

static ep_status read_variable(struct recipe *recipe, const char *name, int name_line, const struct yaml_node *map,
                               const struct recipe_input *input)
{
    static const struct recipe_text texts[] = {{"env", offsetof(struct recipe_variable, env), TEXT_OPTIONAL},
                                               {"help", offsetof(struct recipe_variable, help), TEXT_OPTIONAL},
                                               {0}};
    struct recipe_variable *variable;
    const char *value;
    int line;

    if (map->kind != YAML_MAP)
        return recipe_refuse(recipe, map->line, "variable '%.64s' must be a map with kind, default, env, help", name);
    EP_TRY(recipe_check_keys(recipe, map, "a variable", TEXTS("kind", "default", "env", "help")));
    EP_TRY(add(recipe, name, name_line, &variable));
    EP_TRY(read_kind(recipe, map, &variable->kind));
    EP_TRY(recipe_texts(recipe, map, texts, variable));
    if (strspn(variable->env, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != strlen(variable->env) ||
        isdigit((unsigned char)*variable->env))
        return recipe_refuse(recipe, name_line, "'%.64s' is not a name of an environment variable", variable->env);
    EP_TRY(recipe_scalar(recipe, map, "default", false, &value, &line));
    return choose_value(recipe, variable, value, line, input);
}

/*
 * Reads values of the machine: its kernel release, so that packages of headers can be named by it, and its
 * architecture.
 */
static ep_status read_machine(struct recipe *recipe, const struct recipe_input *input)
{
    const char *names[] = {"kernel", "machine"}, *values[] = {input->kernel, input->machine};

    for (size_t i = 0; i < 2; i++) {
        struct recipe_variable *variable;

        EP_TRY(add(recipe, names[i], 0, &variable));
        variable->kind = VALUE_VERSION;
        if (values[i] && *values[i] && !value_fault(VALUE_WORD, values[i]) && !strpbrk(values[i], ":,=@%/"))
            set(variable, values[i], FROM_MACHINE);
    }
    return EP_OK;
}

ep_status variables_read(struct recipe *recipe, const struct recipe_input *input)
{
    const struct yaml_node *map = tree_get(recipe->tree, "variables");

    recipe->variables = memory_new(RECIPE_VARIABLES_MAX, sizeof(*recipe->variables));
    EP_TRY(read_machine(recipe, input));
    EP_TRY(read_versions(recipe, input));
    if (map && map->kind != YAML_MAP)
        return recipe_refuse(recipe, map->line, "'variables' must be a map");
    for (size_t i = 0; map && i < map->n; i++)
        EP_TRY(read_variable(recipe, map->keys[i], map->key_lines[i], &map->items[i], input));
    map = recipe->variant ? tree_get(recipe->variant, "values") : NULL;
    for (size_t i = 0; map && i < map->n; i++)
        if (!recipe_variable_find(recipe, map->keys[i]))
            return recipe_refuse(recipe, map->key_lines[i], "there is no version or variable '%.64s'", map->keys[i]);
    for (size_t i = 0; i < input->n_settings; i++) {
        const struct recipe_variable *variable = recipe_variable_find(recipe, input->settings[i].name);

        if (!variable || variable->source == FROM_MACHINE)
            return refuse_value(
                input, "--set %.64s: recipe '%s' has no such version or variable; 'epkit install show' lists them",
                input->settings[i].name, recipe->name);
    }
    return EP_OK;
}

/* Writes a value literally; in an extended regular expression it is escaped. */
static void put_value(FILE *out, const char *value, bool is_pattern)
{
    for (; *value; value++) {
        if (is_pattern && strchr(".[\\()*+?{|^$", *value))
            fputc('\\', out);
        fputc(*value, out);
    }
}

ep_status variables_replace(const struct recipe *recipe, const char *text, int line, bool is_pattern,
                            const char **ret_text)
{
    size_t bytes = 0;
    char *result;
    FILE *out = memory_stream(&result, &bytes);
    ep_status status = EP_OK;

    while (status == EP_OK && *text) {
        const char *at = strstr(text, "@{"), *end = at ? strchr(at, '}') : NULL;
        struct recipe_variable *variable;
        char name[NAME_BYTES_MAX + 2];

        fwrite(text, 1, at ? (size_t)(at - text) : strlen(text), out);
        if (!at)
            break;
        snprintf(name, sizeof(name), "%.*s", end ? (int)(end - at - 2) : 16, at + 2);
        variable = end ? (struct recipe_variable *)recipe_variable_find(recipe, name) : NULL;
        if (variable)
            *(recipe->is_marking ? &variable->is_used : &variable->is_skipped) = true;
        /* A missing value stays visible in a plan; apply refuses it. */
        if (!variable)
            status = recipe_refuse(recipe, line, "there is no version or variable '%s' for @{%s}", name, name);
        else if (variable->value)
            put_value(out, variable->value, is_pattern);
        else
            fprintf(out, "<%s>", variable->name);
        text = variable ? end + 1 : text;
    }
    memory_close(out);
    if (status == EP_OK)
        *ret_text = recipe_keep(recipe, result);
    free(result);
    return status;
}
