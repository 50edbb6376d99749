/* SPDX-License-Identifier: Apache-2.0 */
/* choose.c - finds the recipe of a command line, and the values of its variables. */
#include "common/memory.h"
#include "common/output.h"
#include "dir_below.h"
#include "install_output.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

static bool is_path(const char *name)
{
    size_t n = strlen(name);

    return strchr(name, '/') || (n > 5 && strcmp(name + n - 5, ".yaml") == 0) ||
           (n > 4 && strcmp(name + n - 4, ".yml") == 0);
}

/* The states of all recipes: their folder, or -1, and its name. */
struct saved {
    char path[PATH_MAX];
    int fd;
};

static struct saved open_saved(const struct install_cmd_options *options)
{
    struct saved saved = {.fd = -1};
    const char *root = options->install.root;

    /* What is wrong with the folder, install_open() says. */
    saved.fd = dir_open_below(root ? root : "/", options->install.state, false, saved.path);
    return saved;
}

/* A file of the state of a recipe. */
static FILE *open_file(const struct saved *saved, const char *name, const char *file, char ret_path[PATH_MAX])
{
    char within[400];

    snprintf(within, sizeof(within), "%.255s/%s", name, file);
    snprintf(ret_path, PATH_MAX, "%.3600s/%s", saved->path, within);
    return file_open_within(saved->fd, within);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* How many recipes have a state, and their names, at most `max`. */
static int list_saved(const struct saved *saved, int max, char ret_names[][64])
{
    DIR *dir = dir_list(saved->fd, ".");
    struct dirent *entry;
    int n = 0;

    while ((entry = dir_next(&dir))) {
        char file[PATH_MAX];

        snprintf(file, sizeof(file), "%s/recipe.yaml", entry->d_name);
        if (entry->d_name[0] == '.' || strlen(entry->d_name) > 40 || !dir_has(saved->fd, file))
            continue;
        if (n < max)
            snprintf(ret_names[n], 64, "%.40s", entry->d_name);
        n++;
    }
    qsort(ret_names, (size_t)(n < max ? n : max), sizeof(ret_names[0]), compare_names);
    return n;
}

int recipe_saved(const struct install_cmd_options *options, int max, char ret_names[][64])
{
    struct saved saved = open_saved(options);
    int n = list_saved(&saved, max, ret_names);

    dir_close(saved.fd);
    return n < max ? n : max;
}

/* Splits "NAME=VALUE,NAME=VALUE"; a comma that is not followed by NAME= belongs to the value. */
static int split_settings(const struct cmd *cmd, struct chosen_recipe *chosen, const char *text)
{
    char *at;

    if (!text)
        return CMD_FINE;
    chosen->settings_text = memory_printf("%s", text);
    for (at = chosen->settings_text; at && *at;) {
        struct recipe_setting *setting = &chosen->settings[chosen->n_settings];
        char *equals = strchr(at, '='), *comma;

        if (!equals || equals == at || chosen->n_settings == SETTINGS_MAX)
            return cmd_usage(cmd, "--set: '%.100s' is not NAME=VALUE", at);
        *equals = '\0';
        setting->name = at;
        setting->value = equals + 1;
        chosen->n_settings++;
        for (comma = strchr(equals + 1, ','); comma; comma = strchr(comma + 1, ',')) {
            size_t n = strspn(comma + 1, "abcdefghijklmnopqrstuvwxyz0123456789_");

            if (n > 0 && comma[1 + n] == '=')
                break;
        }
        if (comma)
            *comma = '\0';
        at = comma ? comma + 1 : NULL;
    }
    return CMD_FINE;
}

/*
 * Settings of an earlier apply come before those of the command line. Unreadable settings are an error: the recipe
 * would be applied with other values.
 */
static int add_saved_settings(const struct saved *saved, const char *name, struct chosen_recipe *chosen)
{
    char path[PATH_MAX], *text;
    size_t bytes = 0;

    text = journal_read_file(open_file(saved, name, "settings.json", path), RECIPE_BYTES_MAX, &bytes);
    if (!text && errno == ENOENT)
        return CMD_FINE;
    chosen->saved = text ? json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL) : NULL;
    free(text);
    if (!json_is_object(chosen->saved)) {
        out_error("%s cannot be read: it contains the values that the recipe was applied with", path);
        out_hint("'epkit install apply' with these values by --set writes it again");
        return CMD_FAILED;
    }
    FOR_MEMBERS (key, value, chosen->saved) {
        if (chosen->n_settings == SETTINGS_MAX || !json_is_string(value))
            continue;
        chosen->settings[chosen->n_settings].name = key;
        chosen->settings[chosen->n_settings].value = json_string_value(value);
        chosen->n_settings++;
    }
    return CMD_FINE;
}

static const char *environment(const char *name)
{
    return getenv(name);
}

static int parse(const struct install_cmd_options *options, const char *file, const char *text, size_t bytes,
                 bool is_saved, struct chosen_recipe *chosen)
{
    static char kernel[128];
    static struct utsname machine;
    bool is_value_refused = false;
    struct recipe_input input = {.settings = chosen->settings,
                                 .n_settings = chosen->n_settings,
                                 .kernel = kernel,
                                 .machine = machine.machine,
                                 .env = is_saved ? NULL : environment,
                                 .is_value_refused = &is_value_refused};

    install_kernel(options->install.root, kernel);
    uname(&machine);
    if (recipe_parse(file, text, bytes, &input, &chosen->recipe) == EP_OK &&
        preflight_check_target(chosen->recipe) == EP_OK)
        return CMD_FINE;
    if (is_value_refused) {
        out_error("a value is refused: %s", ep_last_error());
        out_hint("nothing was changed; 'epkit install show' prints a recipe with its variables");
        return CMD_USAGE;
    }
    out_error("the recipe is refused: %s", ep_last_error());
    out_hint("nothing was changed; HACKING.md, 'Add a recipe', explains the format");
    return CMD_USAGE;
}

static int unknown(const struct cmd *cmd, const char *name)
{
    const char *near = options_nearest(name, builtin_recipes);

    if (near)
        return cmd_usage(cmd, "there is no recipe '%.64s'; did you mean '%s'?", name, near);
    return cmd_usage(cmd, "there is no recipe '%.64s'; 'epkit install list' names them, and a file needs a / or .yaml",
                     name);
}

static int choose_builtin(const struct cmd *cmd, const struct install_cmd_options *options, const char *name,
                          struct chosen_recipe *chosen)
{
    for (size_t i = 0; builtin_recipes[i].name; i++) {
        char file[128];

        if (strcmp(builtin_recipes[i].name, name) != 0)
            continue;
        snprintf(file, sizeof(file), "recipes/%s.yaml", name);
        return parse(options, file, builtin_recipes[i].text, builtin_recipes[i].bytes, false, chosen);
    }
    return unknown(cmd, name);
}

/* Consumes the file; NULL: errno. */
static int choose_file(const struct install_cmd_options *options, FILE *file, const char *path, bool is_saved,
                       struct chosen_recipe *chosen)
{
    size_t bytes = 0;

    chosen->text = journal_read_file(file, RECIPE_BYTES_MAX, &bytes);
    if (!chosen->text) {
        out_error("recipe %s: %s", path,
                  errno == EINVAL ? "not a regular file"
                  : is_saved      ? install_state_error(errno)
                                  : strerror(errno));
        if (!is_saved)
            out_hint("name a file in YAML, or a recipe of 'epkit install list'");
        return CMD_USAGE;
    }
    return parse(options, path, chosen->text, bytes, is_saved, chosen);
}

/* The recipe as it was applied, with the values; consumes its file. */
static int choose_saved(const struct cmd *cmd, const struct install_cmd_options *options, const struct saved *saved,
                        const char *name, FILE *file, const char *path, struct chosen_recipe *chosen)
{
    int number = errno, code = add_saved_settings(saved, name, chosen);

    code = code == CMD_FINE ? split_settings(cmd, chosen, options->set) : code;
    errno = number;
    if (code == CMD_FINE)
        return choose_file(options, file, path, true, chosen);
    if (file)
        fclose(file);
    return code;
}

static int choose(const struct cmd *cmd, const struct install_cmd_options *options, const char *name,
                  const struct saved *saved, struct chosen_recipe *ret_chosen)
{
    bool prefer_saved = saved != NULL;
    char path[PATH_MAX], names[SAVED_MAX][64], list[400] = "";
    int n_saved = !name && prefer_saved ? list_saved(saved, SAVED_MAX, names) : 0;
    FILE *file;

    if (n_saved == 1)
        name = names[0];
    /* Not a usage error: the same command line is right on another machine. */
    if (!name && prefer_saved && n_saved == 0)
        return cmd_refuse(cmd, NULL,
                          "which recipe? None was applied here; 'epkit install list' names those that are built in");
    if (!name && prefer_saved) {
        for (int i = 0; i < n_saved && i < SAVED_MAX; i++)
            text_append(list, sizeof(list), "%s%s", i ? ", " : "", names[i]);
        return cmd_refuse(cmd, NULL, "which recipe? %d were applied here: %s", n_saved, list);
    }
    if (!name)
        return cmd_usage(cmd, "which recipe? 'epkit install list' names them");
    if (prefer_saved && !is_path(name)) {
        file = open_file(saved, name, "recipe.yaml", path);
        if (file || errno != ENOENT)
            return choose_saved(cmd, options, saved, name, file, path, ret_chosen);
    }
    CMD_TRY(split_settings(cmd, ret_chosen, options->set));
    return is_path(name) ? choose_file(options, file_open_regular(name), name, false, ret_chosen)
                         : choose_builtin(cmd, options, name, ret_chosen);
}

int recipe_choose(const struct cmd *cmd, const struct install_cmd_options *options, const char *name, bool prefer_saved,
                  struct chosen_recipe *ret_chosen)
{
    struct saved saved;
    int code;

    memset(ret_chosen, 0, sizeof(*ret_chosen));
    if (prefer_saved)
        saved = open_saved(options);
    code = choose(cmd, options, name, prefer_saved ? &saved : NULL, ret_chosen);
    if (prefer_saved && saved.fd >= 0)
        close(saved.fd);
    if (code != CMD_FINE)
        recipe_release(ret_chosen);
    return code;
}

void recipe_release(struct chosen_recipe *chosen)
{
    recipe_free(chosen->recipe);
    free(chosen->text);
    free(chosen->settings_text);
    json_decref(chosen->saved);
    memset(chosen, 0, sizeof(*chosen));
}

/* --- list and show --- */

int recipe_list(const struct cmd *cmd, bool json)
{
    static const struct out_column columns[] = {
        {"RECIPE", "name", 0, 0}, {"STEPS", "steps", 0, 0}, {"TITLE", "title", 0, OUT_TRUNC}};
    struct install_cmd_options options = {0};
    json_t *rows = json_array(), *document;
    int code;

    for (size_t i = 0; builtin_recipes[i].name; i++) {
        struct chosen_recipe chosen = {0};

        code = choose_builtin(cmd, &options, builtin_recipes[i].name, &chosen);
        if (code != CMD_FINE) {
            json_decref(rows);
            return CMD_FAILED;
        }
        json_array_append_new(rows, json_pack("{s:s,s:I,s:s}", "name", chosen.recipe->name, "steps",
                                              (json_int_t)chosen.recipe->n_steps, "title", chosen.recipe->title));
        recipe_release(&chosen);
    }
    if (json) {
        document = out_document(cmd->name);
        json_object_set_new(document, "action", json_string("list"));
        json_object_set_new(document, "recipes", rows);
        return out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
    }
    code = out_table(stdout, columns, 3, rows, OUT_TABLE);
    json_decref(rows);
    return code == 0 ? out_finish() : CMD_FAILED;
}

int recipe_show(const struct cmd *cmd, const char *name)
{
    for (size_t i = 0; name && builtin_recipes[i].name; i++) {
        if (strcmp(builtin_recipes[i].name, name) != 0)
            continue;
        fwrite(builtin_recipes[i].text, 1, builtin_recipes[i].bytes, stdout);
        return out_finish();
    }
    return name ? unknown(cmd, name) : cmd_usage(cmd, "which recipe? 'epkit install list' names them");
}
