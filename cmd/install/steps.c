/* SPDX-License-Identifier: Apache-2.0 */
/* steps.c - the steps of a recipe: common keys, and the keys of each type. */
#include "base/error.h"
#include "common/memory.h"
#include "common/text.h"
#include "types.h"

#include <ctype.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

/*
 * --- steps of one recipe that exclude each other ---
 *
 * Two steps that write the same path would undo each other in every run, and a step that owns a folder deletes what
 * other steps put into it.
 */

/* Folders of the system: a step that owned one of them would replace it. */
static const char system_folders[] =
    " /bin /boot /dev /etc /etc/systemd /home /lib /lib/modules /lib32 /lib64 /libx32 /lost+found /media /mnt /opt /proc "
    "/root /run /sbin /snap /srv /sys /tmp /usr /usr/bin /usr/include /usr/lib /usr/lib32 /usr/lib64 /usr/lib/modules "
    "/usr/libexec /usr/local /usr/libx32 /usr/local/bin /usr/local/include /usr/local/lib /usr/local/sbin "
    "/usr/local/share /usr/sbin /usr/share /usr/src /var /var/cache /var/lib /var/log /var/run /var/tmp ";

/* Is `path` the folder, or inside it? */
static bool is_within(const char *path, const char *folder)
{
    size_t n = strlen(folder);

    return strncmp(path, folder, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

/* A path inside `folder` that the step writes or owns, or NULL. */
static const char *path_within(const struct recipe_step *step, const char *folder)
{
    if (is_within(step->path, folder))
        return step->path;
    FOR_JSON (value, json_object_get(step->args, "owns"))
        if (is_within(json_string_value(value), folder))
            return json_string_value(value);
    return NULL;
}

static ep_status check_owned(const struct recipe *recipe, const struct recipe_step *owner,
                             const struct recipe_step *other)
{
    FOR_JSON (value, json_object_get(owner->args, "owns")) {
        const char *path = path_within(other, json_string_value(value));

        if (path)
            return recipe_refuse(recipe, owner->line,
                                 "step '%s' owns %.120s and would delete %.120s, which belongs to step '%s'", owner->id,
                                 json_string_value(value), path, other->id);
    }
    return EP_OK;
}

static ep_status check_system(const struct recipe *recipe, const struct recipe_step *step)
{
    char word[1100];

    FOR_JSON (value, json_object_get(step->args, "owns")) {
        snprintf(word, sizeof(word), " %s ", json_string_value(value));
        if (strstr(system_folders, word))
            return recipe_refuse(recipe, step->line,
                                 "step '%s' would own %s, a folder of the system, and replace it: give it a folder of "
                                 "its own",
                                 step->id, json_string_value(value));
    }
    return EP_OK;
}

static ep_status conflicts_check(const struct recipe *recipe)
{
    for (size_t i = 0; i < recipe->n_steps; i++) {
        const struct recipe_step *two = &recipe->steps[i];

        if (two->skipped)
            continue;
        EP_TRY(check_system(recipe, two));
        FOR_EACH (one, recipe->steps, i) {
            if (one->skipped)
                continue;
            if (one->type->content && two->type->content && strcmp(one->path, two->path) == 0)
                return recipe_refuse(recipe, two->line, "steps '%s' and '%s' both write %s", one->id, two->id,
                                     two->path);
            EP_TRY(check_owned(recipe, one, two));
            EP_TRY(check_owned(recipe, two, one));
        }
    }
    return EP_OK;
}

#define BUDGET_MAX_S (6 * 3600)
#define DEADLINE_BUDGETS 4
#define DEADLINE_MIN_S 60

const struct step_type *const step_types[] = {&type_apt, &type_deb,   &type_file,    &type_modprobe, &type_module,
                                              &type_pip, &type_build, &type_copyset, &type_command,  NULL};

/* --- arguments --- */

/* One value: variables replaced, checked. */
static ep_status read_value(const struct recipe *recipe, const char *key, enum value_shape shape,
                            const struct yaml_node *node, const char **ret_text)
{
    bool is_missing;
    const char *fault;

    if (node->kind != YAML_SCALAR)
        return recipe_refuse(recipe, node->line, "'%.64s' must be a text", key);
    *ret_text = node->text;
    if (shape != VALUE_SHELL)
        EP_TRY(variables_replace(recipe, node->text, node->line, false, ret_text));
    /* A missing value shows as <name>, and is checked when it is given. */
    is_missing = shape != VALUE_SHELL && strstr(node->text, "@{") && strchr(*ret_text, '<');
    fault = is_missing ? NULL : value_fault(shape, *ret_text);
    return fault ? recipe_refuse(recipe, node->line, "'%.64s': %s", key, fault) : EP_OK;
}

/* Name `i` of a map. */
static ep_status read_name(const struct recipe *recipe, const struct yaml_node *map, size_t i, const char **ret_name)
{
    const char *fault;

    EP_TRY(variables_replace(recipe, map->keys[i], map->key_lines[i], false, ret_name));
    fault = strchr(*ret_name, '<') ? NULL : package_fault(*ret_name);
    return fault ? recipe_refuse(recipe, map->key_lines[i], "'%.64s': %s", *ret_name, fault) : EP_OK;
}

static ep_status read_arg(const struct recipe *recipe, const struct step_arg *arg, const struct yaml_node *node,
                          json_t *ret_args)
{
    bool is_list = arg->shape == VALUE_PATHS || arg->shape == VALUE_GLOBS || arg->shape == VALUE_TEXTS;
    bool is_map = arg->shape == VALUE_PACKAGES || arg->shape == VALUE_OPTIONS;
    const char *name = arg->key, *text;
    json_t *all;

    if (!is_list && !is_map) {
        EP_TRY(read_value(recipe, arg->key, arg->shape, node, &text));
        json_object_set_new(ret_args, arg->key, json_string(text));
        return EP_OK;
    }
    if (is_list && (node->kind != YAML_LIST || node->n == 0))
        return recipe_refuse(recipe, node->line, "'%s' must be a list of at least one text", arg->key);
    if (is_map && (node->kind != YAML_MAP || node->n == 0))
        return recipe_refuse(recipe, node->line, "'%s' must be a map of at least one name%s", arg->key,
                             arg->shape == VALUE_PACKAGES ? " to its version" : "");
    all = is_list ? json_array() : json_object();
    json_object_set_new(ret_args, arg->key, all);
    for (size_t i = 0; i < node->n; i++) {
        if (is_map)
            EP_TRY(read_name(recipe, node, i, &name));
        EP_TRY(read_value(recipe, name, arg->shape, &node->items[i], &text));
        if (is_map)
            json_object_set_new(all, name, json_string(text));
        else
            json_array_append_new(all, json_string(text));
    }
    return EP_OK;
}

/* Does a text for a shell use a variable: $NAME or ${NAME...? */
static bool uses_variable(const char *text, const char *name)
{
    size_t n = strlen(name);

    for (const char *at = strchr(text, '$'); at; at = strchr(at + 1, '$')) {
        const char *word = at + 1 + (at[1] == '{');

        if (strncmp(word, name, n) == 0 && !isalnum((unsigned char)word[n]) && word[n] != '_')
            return true;
    }
    return false;
}

/*
 * The result of a build depends on the values that its script uses: with another value it is another step. Values of
 * the machine are excluded: a kernel that has to be the same is recorded next to the digest (epkit_stamp()).
 */
static void note_values(const struct recipe *recipe, struct recipe_step *step)
{
    const char *script = arg_text(step, "script");
    json_t *values = json_object();

    FOR_EACH (variable, recipe->variables, recipe->n_variables) {
        if (uses_variable(script, variable->name) || uses_variable(arg_text(step, "run"), variable->name))
            *(step->skipped ? &variable->is_skipped : &variable->is_used) = true;
        if (variable->value && variable->source != FROM_MACHINE && uses_variable(script, variable->name))
            json_object_set_new(values, variable->name, json_string(variable->value));
    }
    if (json_object_size(values) > 0)
        json_object_set(step->args, "values", values);
    json_decref(values);
}

static void read_path(const struct recipe *recipe, struct recipe_step *step)
{
    const struct step_type *type = step->type;
    char path[1100] = "";

    if (type->path_key)
        snprintf(path, sizeof(path), "%s%s%s", type->path_prefix ? type->path_prefix : "",
                 arg_text(step, type->path_key), type->path_prefix ? ".conf" : "");
    step->path = recipe_keep(recipe, path);
}

static ep_status read_args(const struct recipe *recipe, const struct yaml_node *map, struct recipe_step *step)
{
    for (const struct step_arg *arg = step->type->args; arg->key; arg++) {
        const struct yaml_node *node = tree_get(map, arg->key);

        if (!node && arg->is_required)
            return recipe_refuse(recipe, step->line, "step '%s' of type %s lacks '%s'", step->id, step->type->name,
                                 arg->key);
        if (node)
            EP_TRY(read_arg(recipe, arg, node, step->args));
    }
    note_values(recipe, step);
    read_path(recipe, step);
    return EP_OK;
}

/* --- common keys --- */

/* "90s", "5m", "1h". */
static ep_status read_duration(const struct recipe *recipe, const struct yaml_node *map, const char *key,
                               bool is_required, int *ret_seconds)
{
    const char *text;
    char *end;
    long number;
    int line, unit;

    EP_TRY(recipe_scalar(recipe, map, key, is_required, &text, &line));
    if (!text)
        return EP_OK;
    number = isdigit((unsigned char)*text) ? strtol(text, &end, 10) : 0;
    unit = number <= 0 || number > BUDGET_MAX_S || end[0] == '\0' || end[1] != '\0' ? 0
           : *end == 's'                                                            ? 1
           : *end == 'm'                                                            ? 60
           : *end == 'h'                                                            ? 3600
                                                                                    : 0;
    if (!unit || number * unit > BUDGET_MAX_S)
        return recipe_refuse(recipe, line, "'%s' must be a time of at most 6h: 90s, 5m, 1h", key);
    *ret_seconds = (int)(number * unit);
    return EP_OK;
}

static ep_status read_type(const struct recipe *recipe, const struct yaml_node *map, struct recipe_step *step)
{
    /* Of every type, and then those of this one. */
    const char *allowed[64] = {"id",     "type",   "title", "why",  "budget",    "deadline",   "needs",
                               "verify", "reboot", "when",  "says", "says_when", "keep_driver"};
    const char *text;
    size_t n = 0;
    int line;

    EP_TRY(recipe_scalar(recipe, map, "type", true, &text, &line));
    for (size_t i = 0; step_types[i]; i++)
        if (strcmp(step_types[i]->name, text) == 0)
            step->type = step_types[i];
    if (!step->type)
        return recipe_refuse(recipe, line,
                             "unknown type '%.64s'; there are apt, deb, file, modprobe, module, pip, build, copyset, "
                             "command",
                             text);
    while (allowed[n])
        n++;
    for (const struct step_arg *arg = step->type->args; arg->key; arg++)
        allowed[n++] = arg->key;
    return recipe_check_keys(recipe, map, "a step of this type", allowed);
}

const char *const step_reboots[] = {
    [REBOOT_NEVER] = "never", [REBOOT_IF_NEEDED] = "if-needed", [REBOOT_AFTER] = "after", NULL};

static ep_status read_reboot(const struct recipe *recipe, const struct yaml_node *map, struct recipe_step *step)
{
    const char *text;
    int line;
    size_t i = 0;

    EP_TRY(recipe_scalar(recipe, map, "reboot", false, &text, &line));
    while (text && step_reboots[i] && strcmp(step_reboots[i], text) != 0)
        i++;
    if (!step_reboots[i])
        return recipe_refuse(recipe, line, "'reboot' must be never, if-needed or after");
    step->reboot = (enum step_reboot)i;
    if (step->reboot != REBOOT_NEVER && recipe->max_reboots == 0)
        return recipe_refuse(recipe, line, "step '%s' may reboot, but 'reboots' of the recipe is 0", step->id);
    return EP_OK;
}

/*
 * A key whose value is names of flags, or "!name", separated by spaces: all must hold. *ret_text: the first that does
 * not, NULL if all do.
 */
static ep_status read_flags(const struct recipe *recipe, const struct yaml_node *map, const char *key,
                            const char **ret_text)
{
    const char *text, *word;
    int line;

    *ret_text = NULL;
    EP_TRY(recipe_scalar(recipe, map, key, false, &text, &line));
    while (text && *text && !*ret_text) {
        struct piece piece = text_take(&text, " ");
        const struct recipe_variable *variable;
        char name[64];

        snprintf(name, sizeof(name), "%.*s", (int)piece.n, piece.text);
        word = recipe_keep(recipe, name);
        variable = recipe_variable_find(recipe, word + (*word == '!'));
        if (!variable || variable->kind != VALUE_FLAG || !variable->value)
            return recipe_refuse(recipe, line,
                                 "'%s' must be variables of kind flag with a default, or '!' and such a variable", key);
        if ((strcmp(variable->value, "1") == 0) == (*word == '!'))
            *ret_text = word;
    }
    return EP_OK;
}

static ep_status read_verify_item(const struct recipe *recipe, const struct yaml_node *map, struct step_verify *verify)
{
    static const struct recipe_text texts[] = {{"name", offsetof(struct step_verify, name), TEXT_REQUIRED},
                                               {"run", offsetof(struct step_verify, run), TEXT_SHELL},
                                               {"hint", offsetof(struct step_verify, hint), TEXT_OPTIONAL},
                                               {"expect", offsetof(struct step_verify, expect), TEXT_OPTIONAL},
                                               {0}};
    regex_t regex;
    int line;

    if (map->kind != YAML_MAP)
        return recipe_refuse(recipe, map->line, "an entry of 'verify' must be a map with name, run, expect, hint");
    EP_TRY(recipe_check_keys(recipe, map, "an entry of 'verify'", TEXTS("name", "run", "expect", "hint")));
    EP_TRY(recipe_texts(recipe, map, texts, verify));
    line = *verify->expect ? tree_get(map, "expect")->line : 0;
    EP_TRY(variables_replace(recipe, verify->expect, line, true, &verify->expect));
    if (regcomp(&regex, verify->expect, REG_EXTENDED | REG_NOSUB | REG_NEWLINE) != 0)
        return recipe_refuse(recipe, line, "'expect' is not an extended regular expression");
    regfree(&regex);
    return EP_OK;
}

static ep_status read_verify(const struct recipe *recipe, const struct yaml_node *map, struct recipe_step *step)
{
    const struct yaml_node *list = tree_get(map, "verify");

    if (!list)
        return EP_OK;
    if (list->kind != YAML_LIST)
        return recipe_refuse(recipe, list->line, "'verify' must be a list");
    step->verify = memory_new(list->n, sizeof(*step->verify));
    for (size_t i = 0; i < list->n; i++)
        EP_TRY(read_verify_item(recipe, &list->items[i], &step->verify[i]));
    step->n_verify = list->n;
    return EP_OK;
}

static ep_status read_step(struct recipe *recipe, const struct yaml_node *map)
{
    static const struct recipe_text texts[] = {{"id", offsetof(struct recipe_step, id), TEXT_ID},
                                               {"title", offsetof(struct recipe_step, title), TEXT_LINE},
                                               {"why", offsetof(struct recipe_step, why), TEXT_REQUIRED},
                                               {"says", offsetof(struct recipe_step, says), TEXT_OPTIONAL},
                                               {0}};
    struct recipe_step *step = &recipe->steps[recipe->n_steps];
    const char *fails;
    int line;

    if (map->kind != YAML_MAP)
        return recipe_refuse(recipe, map->line, "a step must be a map");
    step->line = map->line;
    step->args = json_object();
    EP_TRY(recipe_texts(recipe, map, texts, step));
    for (size_t i = 0; i < recipe->n_steps; i++)
        if (strcmp(recipe->steps[i].id, step->id) == 0)
            return recipe_refuse(recipe, tree_get(map, "id")->line,
                                 "id '%s' is a duplicate; the first one is in line %d", step->id,
                                 recipe->steps[i].line);
    recipe->n_steps++;
    if (!recipe_is_line(step->says))
        return recipe_refuse(recipe, tree_get(map, "says")->line, "'says' must be one line of printable text");
    EP_TRY(read_type(recipe, map, step));
    EP_TRY(read_duration(recipe, map, "budget", true, &step->budget_s));
    step->deadline_s = step->budget_s * DEADLINE_BUDGETS;
    if (step->deadline_s < DEADLINE_MIN_S)
        step->deadline_s = DEADLINE_MIN_S;
    EP_TRY(read_duration(recipe, map, "deadline", false, &step->deadline_s));
    if (step->deadline_s < step->budget_s)
        return recipe_refuse(recipe, tree_get(map, "deadline")->line,
                             "'deadline' is shorter than 'budget', the time that the step is expected to take");
    EP_TRY(read_reboot(recipe, map, step));
    EP_TRY(read_flags(recipe, map, "when", &step->when));
    step->skipped = step->when != NULL;
    recipe->is_marking = !step->skipped;
    EP_TRY(read_flags(recipe, map, "says_when", &fails));
    step->says = fails ? "" : step->says;
    EP_TRY(recipe_scalar(recipe, map, "keep_driver", false, &step->keep_driver, &line));
    step->keep_driver = step->keep_driver ? step->keep_driver : "";
    EP_TRY(variables_replace(recipe, step->keep_driver, line, false, &step->keep_driver));
    EP_TRY(read_args(recipe, map, step));
    EP_TRY(read_verify(recipe, map, step));
    return step->type->validate ? step->type->validate(recipe, step) : EP_OK;
}

/* --- needs --- */

static ep_status read_needs(struct recipe *recipe, const struct yaml_node *map, struct recipe_step *step)
{
    const struct yaml_node *list = tree_get(map, "needs");

    if (!list)
        return EP_OK;
    if (list->kind != YAML_LIST)
        return recipe_refuse(recipe, list->line, "'needs' must be a list of ids");
    FOR_EACH (item, list->items, list->n) {
        size_t k = 0;

        if (item->kind != YAML_SCALAR)
            return recipe_refuse(recipe, item->line, "'needs' must be a list of ids");
        while (k < recipe->n_steps && strcmp(recipe->steps[k].id, item->text) != 0)
            k++;
        if (k == recipe->n_steps)
            return recipe_refuse(recipe, item->line, "step '%s' needs '%.64s', which is not a step of this recipe",
                                 step->id, item->text);
        for (size_t other = 0; other < step->n_needs; other++)
            if (step->needs[other] == k)
                return recipe_refuse(recipe, item->line, "step '%s' lists '%s' twice", step->id, item->text);
        step->needs[step->n_needs++] = k;
    }
    return EP_OK;
}

/*
 * Sorts the steps so that each comes after those that it needs; among those that could come next, the first of the
 * file.
 */
static ep_status sort_steps(struct recipe *recipe)
{
    bool is_placed[RECIPE_STEPS_MAX] = {false};

    for (size_t n = 0; n < recipe->n_steps; n++) {
        size_t next = recipe->n_steps, first_left = recipe->n_steps;

        for (size_t i = 0; i < recipe->n_steps && next == recipe->n_steps; i++) {
            bool is_ready = !is_placed[i];

            if (is_ready && first_left == recipe->n_steps)
                first_left = i;
            for (size_t k = 0; k < recipe->steps[i].n_needs; k++)
                is_ready = is_ready && is_placed[recipe->steps[i].needs[k]];
            if (is_ready)
                next = i;
        }
        if (next == recipe->n_steps)
            return recipe_refuse(recipe, recipe->steps[first_left].line,
                                 "the needs of step '%s' form a cycle, or lead to one", recipe->steps[first_left].id);
        is_placed[next] = true;
        recipe->order[n] = next;
    }
    return EP_OK;
}

ep_status steps_read(struct recipe *recipe)
{
    const struct yaml_node *list = tree_get(recipe->tree, "steps");

    if (!list)
        return recipe_refuse(recipe, recipe->tree->line, "'steps' is missing");
    if (list->kind != YAML_LIST || list->n == 0)
        return recipe_refuse(recipe, list->line, "'steps' must be a list of at least one step");
    if (list->n > RECIPE_STEPS_MAX)
        return recipe_refuse(recipe, list->line, "more than %d steps", RECIPE_STEPS_MAX);
    recipe->steps = memory_new(list->n, sizeof(*recipe->steps));
    for (size_t i = 0; i < list->n; i++)
        EP_TRY(read_step(recipe, &list->items[i]));
    for (size_t i = 0; i < list->n; i++)
        EP_TRY(read_needs(recipe, &list->items[i], &recipe->steps[i]));
    EP_TRY(sort_steps(recipe));
    return conflicts_check(recipe);
}

/* --- for the types --- */

const char *arg_text(const struct recipe_step *step, const char *key)
{
    const char *text = json_string_value(json_object_get(step->args, key));

    return text ? text : "";
}

bool arg_flag(const struct recipe_step *step, const char *key, bool otherwise)
{
    const char *text = arg_text(step, key);

    return *text ? strcmp(text, "true") == 0 : otherwise;
}

uint64_t step_digest(const struct recipe_step *step)
{
    json_t *args = json_copy(step->args);
    uint64_t hash;
    char *text;

    /* Which paths it owns does not change what it makes. */
    json_object_del(args, "owns");
    text = json_dumps(args, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(args);
    hash = text_hash(text, strlen(text));
    free(text);
    return hash;
}
