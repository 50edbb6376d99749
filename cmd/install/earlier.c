/* SPDX-License-Identifier: Apache-2.0 */
/*
 * earlier.c - steps that were applied before with other values, or that the recipe does not have any more.
 *
 * Before a step changes anything, the script that undoes it is saved as before/STEP/undo-DIGEST.sh. The digest is that
 * of what the step undoes, so that a step with another target has another script. A step whose target has changed is
 * undone at its old target before it is applied at the new one.
 */
#include "base/error.h"
#include "common/text.h"
#include "install.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DROPPED_DEADLINE_S 3600

/*
 * Steps of packages have one script name, whatever the packages: what they replaced is recorded for all of them
 * together.
 */
static bool is_of_packages(const struct recipe_step *step)
{
    return step->type == &type_apt || step->type == &type_deb;
}

static void folder_of(const struct install *install, const char *id, char ret_path[1024])
{
    snprintf(ret_path, 1024, "%.400s%.300s/before%s%.64s", install->root, install->state, *id ? "/" : "", id);
}

/* "undo-DIGEST.sh" of what the step undoes; without the variables, which may change and have no effect here. */
static ep_status name_of(const struct recipe_step *step, char ret_name[40])
{
    uint64_t hash;
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    if (!out)
        return ep_fail(EP_E_MEMORY, "no memory");
    if (!is_of_packages(step))
        step->type->undo(out, step);
    if (fclose(out) != 0 || !text) {
        free(text);
        return ep_fail(EP_E_MEMORY, "no memory");
    }
    hash = text_hash(text, strlen(text));
    free(text);
    snprintf(ret_name, 40, "undo-%016" PRIx64 ".sh", hash);
    return EP_OK;
}

ep_status earlier_keep(const struct install *install, const struct recipe_step *step)
{
    char folder[1024], name[40], path[1100], fresh[1110];

    EP_TRY(name_of(step, name));
    folder_of(install, step->id, folder);
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    snprintf(fresh, sizeof(fresh), "%s.new", path);
    EP_TRY(run_write_script(install, step, PHASE_UNDO, fresh));
    return rename(fresh, path) == 0 ? EP_OK : ep_fail_errno(EP_E_SYSTEM, errno, "%s", path);
}

/* A script of the folder other than `own`; false if there is none. */
static bool find_script(const char *folder, const char *own, char ret_path[1400])
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    bool found = false;

    while (dir && !found && (entry = readdir(dir))) {
        size_t n = strlen(entry->d_name);

        found = n == strlen("undo-0123456789abcdef.sh") && strncmp(entry->d_name, "undo-", 5) == 0 &&
                strcmp(entry->d_name + n - 3, ".sh") == 0 && strcmp(entry->d_name, own) != 0;
        if (found)
            snprintf(ret_path, 1400, "%s/%s", folder, entry->d_name);
    }
    if (dir)
        closedir(dir);
    return found;
}

bool earlier_script(const struct install *install, const struct recipe_step *step, char ret_path[1400])
{
    char folder[1024], name[40];

    if (name_of(step, name) != EP_OK)
        return false;
    folder_of(install, step->id, folder);
    snprintf(ret_path, 1400, "%s/%s", folder, name);
    return access(ret_path, R_OK) == 0;
}

static enum install_result run_undo(struct install *install, const struct recipe_step *step, size_t index,
                                    const char *folder, const char *script)
{
    enum run_result run;
    int status;

    journal_add(&install->journal, "undo", step->id, NULL);
    run = run_file(install, step, index, PHASE_UNDO, script, step->deadline_s, &status);
    if (run == RUN_INTERRUPTED)
        return INSTALL_INTERRUPTED;
    if (run != RUN_FINE) {
        snprintf(install->failure, sizeof(install->failure),
                 "step '%s', as it was applied before, could not be undone (exit status %d)", step->id, status);
        snprintf(install->hint, sizeof(install->hint), "its log is %.90s%.100s/%.40s.log", install->root, install->logs,
                 step->id);
        return INSTALL_FAILED;
    }
    if (remove_tree(folder) != 0) {
        snprintf(install->failure, sizeof(install->failure), "%.400s: %s", folder, strerror(errno));
        return INSTALL_FAILED;
    }
    journal_add(&install->journal, "undone", step->id, NULL);
    return INSTALL_FINE;
}

enum install_result earlier_undo(struct install *install, const struct recipe_step *step, size_t index,
                                 bool *ret_undone)
{
    char folder[1024], own[40], script[1400];

    *ret_undone = false;
    if (name_of(step, own) != EP_OK) {
        snprintf(install->failure, sizeof(install->failure), "%.500s", ep_last_error());
        return INSTALL_FAILED;
    }
    folder_of(install, step->id, folder);
    if (!find_script(folder, own, script))
        return INSTALL_FINE;
    *ret_undone = true;
    return run_undo(install, step, index, folder, script);
}

static bool is_in_recipe(const struct recipe *recipe, const char *id)
{
    for (size_t i = 0; i < recipe->n_steps; i++)
        if (strcmp(recipe->steps[i].id, id) == 0)
            return true;
    return false;
}

enum install_result earlier_undo_dropped(struct install *install)
{
    enum install_result result = INSTALL_FINE;
    char folder[1024], script[1400], parent[1024];
    struct dirent *entry;
    DIR *dir;

    folder_of(install, "", parent);
    dir = opendir(parent);
    while (dir && result == INSTALL_FINE && (entry = readdir(dir))) {
        struct recipe_step dropped = {
            .id = entry->d_name, .title = entry->d_name, .deadline_s = DROPPED_DEADLINE_S, .budget_s = 60};

        if (entry->d_name[0] == '.' || strlen(entry->d_name) > 40 || is_in_recipe(install->recipe, entry->d_name))
            continue;
        folder_of(install, entry->d_name, folder);
        if (find_script(folder, "", script))
            result = run_undo(install, &dropped, 0, folder, script);
    }
    if (dir)
        closedir(dir);
    return result;
}
