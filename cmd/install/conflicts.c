/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conflicts.c - steps of one recipe that exclude each other. Two steps that write the same file, or want different
 * versions of a package, would undo each other in every run; a step that owns a folder deletes the files of other steps
 * in it.
 */
#include "base/error.h"
#include "types.h"

#include <string.h>

/* Folders of the system: a step that owned one of them would replace it. */
static const char *const system_folders[] = {"/bin",
                                             "/boot",
                                             "/dev",
                                             "/etc",
                                             "/etc/systemd",
                                             "/home",
                                             "/lib",
                                             "/lib/modules",
                                             "/lib32",
                                             "/lib64",
                                             "/libx32",
                                             "/lost+found",
                                             "/media",
                                             "/mnt",
                                             "/opt",
                                             "/proc",
                                             "/root",
                                             "/run",
                                             "/sbin",
                                             "/snap",
                                             "/srv",
                                             "/sys",
                                             "/tmp",
                                             "/usr",
                                             "/usr/bin",
                                             "/usr/include",
                                             "/usr/lib",
                                             "/usr/lib32",
                                             "/usr/lib64",
                                             "/usr/lib/modules",
                                             "/usr/libexec",
                                             "/usr/local",
                                             "/usr/libx32",
                                             "/usr/local/bin",
                                             "/usr/local/include",
                                             "/usr/local/lib",
                                             "/usr/local/sbin",
                                             "/usr/local/share",
                                             "/usr/sbin",
                                             "/usr/share",
                                             "/usr/src",
                                             "/var",
                                             "/var/cache",
                                             "/var/lib",
                                             "/var/log",
                                             "/var/run",
                                             "/var/tmp",
                                             NULL};

static bool is_system_folder(const char *path)
{
    for (size_t i = 0; system_folders[i]; i++)
        if (strcmp(path, system_folders[i]) == 0)
            return true;
    return false;
}

/* Is `path` the folder, or inside it? */
static bool is_within(const char *path, const char *folder)
{
    size_t n = strlen(folder);

    return strncmp(path, folder, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

/* --- the same thing twice --- */

static ep_status check_written(const struct recipe *recipe, const struct recipe_step *one,
                               const struct recipe_step *two)
{
    static const struct {
        const char *type, *key;
    } targets[] = {{"file", "path"}, {"modprobe", "module"}};

    for (size_t i = 0; i < sizeof(targets) / sizeof(targets[0]); i++)
        if (strcmp(one->type->name, targets[i].type) == 0 && strcmp(two->type->name, targets[i].type) == 0 &&
            strcmp(arg_text(one, targets[i].key), arg_text(two, targets[i].key)) == 0)
            return recipe_refuse(recipe, two->line, "steps '%s' and '%s' both write %s", one->id, two->id,
                                 arg_text(two, targets[i].key));
    return EP_OK;
}

/* The version that a step requires of a package or module, or NULL. */
static const char *pin_of(const struct recipe_step *step, const char *name)
{
    const char *pin = NULL;

    if (strcmp(step->type->name, "apt") == 0 || strcmp(step->type->name, "pip") == 0)
        pin = json_string_value(json_object_get(json_object_get(step->args, "packages"), name));
    else if ((strcmp(step->type->name, "deb") == 0 && strcmp(arg_text(step, "package"), name) == 0) ||
             (strcmp(step->type->name, "module") == 0 && strcmp(arg_text(step, "module"), name) == 0))
        pin = arg_text(step, "version");
    return pin && *pin && strcmp(pin, "*") != 0 ? pin : NULL;
}

/* Do both steps have packages (or modules, or Python packages in one folder) from one namespace? */
static bool is_one_set(const struct recipe_step *one, const struct recipe_step *two)
{
    static const char *const dpkg = "apt deb";

    if (strstr(dpkg, one->type->name) && strstr(dpkg, two->type->name))
        return true;
    return one->type == two->type && strcmp(arg_text(one, "target"), arg_text(two, "target")) == 0;
}

static ep_status check_pin(const struct recipe *recipe, const struct recipe_step *one, const struct recipe_step *two,
                           const char *name)
{
    const char *first = pin_of(one, name), *second = pin_of(two, name);

    if (!first || !second || strcmp(first, second) == 0)
        return EP_OK;
    return recipe_refuse(recipe, two->line, "step '%s' requires %s %.60s, but step '%s' requires %.60s", one->id, name,
                         first, two->id, second);
}

static ep_status check_pins(const struct recipe *recipe, const struct recipe_step *one, const struct recipe_step *two)
{
    const char *name, *const alone[] = {"package", "module"};
    json_t *value;

    if (!is_one_set(one, two))
        return EP_OK;
    json_object_foreach(json_object_get(two->args, "packages"), name, value) EP_TRY(check_pin(recipe, one, two, name));
    for (size_t i = 0; i < 2; i++)
        EP_TRY(check_pin(recipe, one, two, arg_text(two, alone[i])));
    return EP_OK;
}

/* --- what a build owns --- */

/* A path inside `folder` that the step writes or owns, or NULL. */
static const char *path_within(const struct recipe_step *step, const char *folder)
{
    static const struct {
        const char *type, *key;
    } places[] = {{"file", "path"}, {"pip", "target"}, {"copyset", "to"}};
    json_t *value;
    size_t i;

    for (i = 0; i < sizeof(places) / sizeof(places[0]); i++)
        if (strcmp(step->type->name, places[i].type) == 0 && is_within(arg_text(step, places[i].key), folder))
            return arg_text(step, places[i].key);
    json_array_foreach(json_object_get(step->args, "owns"), i,
                       value) if (is_within(json_string_value(value), folder)) return json_string_value(value);
    return NULL;
}

static ep_status check_owned(const struct recipe *recipe, const struct recipe_step *owner,
                             const struct recipe_step *other)
{
    json_t *value;
    size_t i;

    json_array_foreach(json_object_get(owner->args, "owns"), i, value)
    {
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
    json_t *value;
    size_t i;

    json_array_foreach(json_object_get(step->args, "owns"), i, value) if (
        is_system_folder(json_string_value(
            value))) return recipe_refuse(recipe, step->line,
                                          "step '%s' would own %s, a folder of the system, and replace it: give it a folder of "
                                          "its own",
                                          step->id, json_string_value(value));
    return EP_OK;
}

ep_status conflicts_check(const struct recipe *recipe)
{
    for (size_t i = 0; i < recipe->n_steps; i++) {
        const struct recipe_step *two = &recipe->steps[i];

        if (two->skipped)
            continue;
        EP_TRY(check_system(recipe, two));
        for (size_t k = 0; k < i; k++) {
            const struct recipe_step *one = &recipe->steps[k];

            if (one->skipped)
                continue;
            EP_TRY(check_written(recipe, one, two));
            EP_TRY(check_pins(recipe, one, two));
            EP_TRY(check_owned(recipe, one, two));
            EP_TRY(check_owned(recipe, two, one));
        }
    }
    return EP_OK;
}
