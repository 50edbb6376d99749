/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conflicts.c - steps of one recipe that exclude each other: two steps that write the same path would undo each other
 * in every run, and a step that owns a folder deletes what other steps put into it.
 */
#include "base/error.h"
#include "types.h"

#include <string.h>

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
    json_t *value;
    size_t i;

    if (is_within(step->path, folder))
        return step->path;
    json_array_foreach (json_object_get(step->args, "owns"), i, value) {
        if (is_within(json_string_value(value), folder))
            return json_string_value(value);
    }
    return NULL;
}

static ep_status check_owned(const struct recipe *recipe, const struct recipe_step *owner,
                             const struct recipe_step *other)
{
    json_t *value;
    size_t i;

    json_array_foreach (json_object_get(owner->args, "owns"), i, value) {
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
    json_t *value;
    size_t i;

    json_array_foreach (json_object_get(step->args, "owns"), i, value) {
        snprintf(word, sizeof(word), " %s ", json_string_value(value));
        if (strstr(system_folders, word))
            return recipe_refuse(recipe, step->line,
                                 "step '%s' would own %s, a folder of the system, and replace it: give it a folder of "
                                 "its own",
                                 step->id, json_string_value(value));
    }
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
            if (one->type->content && two->type->content && strcmp(one->path, two->path) == 0)
                return recipe_refuse(recipe, two->line, "steps '%s' and '%s' both write %s", one->id, two->id,
                                     two->path);
            EP_TRY(check_owned(recipe, one, two));
            EP_TRY(check_owned(recipe, two, one));
        }
    }
    return EP_OK;
}
