/* SPDX-License-Identifier: Apache-2.0 */
/*
 * undo.c - removes what the recipe has added. Each step that was applied has a folder, before/STEP, with the script
 * that undoes it (undo.sh) and what that needs: also a step that was applied with other values, or from an earlier
 * version of the recipe. The folder is removed when the step is undone, so that a run that is killed can be repeated.
 */
#include "base/error.h"
#include "common/text.h"
#include "dir_below.h"
#include "install.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DROPPED_DEADLINE_S 3600
#define REMOVE_SECONDS 600

/* A missing path is no error: another run may be removing it as well. */
static enum install_result remove_tree(struct install *install, int dir, const char *name)
{
    char path[400];
    const char *const argv[] = {"rm", "-rf", "--one-file-system", "--", path, NULL};

    /* The folder that was opened, for another process. */
    snprintf(path, sizeof(path), "/proc/%d/fd/%d/%.255s", (int)getpid(), dir, name);
    if (run_quietly(argv, REMOVE_SECONDS) == 0)
        return INSTALL_FINE;
    return install_fail(install, "%.400s%.300s: '%.64s' in it cannot be removed", install->root, install->state, name);
}

/* Collects what the script of the step has not removed. */
static void read_left(struct install *install, const struct recipe_step *step)
{
    char path[64], line[1024], clean[1024];
    FILE *file;

    snprintf(path, sizeof(path), "before/%.40s/left", step->id);
    file = file_open_within(install->state_fd, path);
    if (!file)
        return;
    while (fgets(line, sizeof(line), file)) {
        line[strcspn(line, "\n")] = '\0';
        text_clean(line, clean, sizeof(clean));
        json_array_append_new(install->left, json_string(clean));
    }
    fclose(file);
}

static enum install_result undo_step(struct install *install, const struct recipe_step *step)
{
    char log[1024];
    enum install_result result;
    enum run_result run;
    bool waited;
    int status, before;

    run_log_path(install, step, log);
    if (!run_wait_for_orphans(install, step, &waited))
        return install_fail(install, "step '%s' of an earlier run does not end", step->id);
    journal_add(&install->journal, "undo", step->id, NULL);
    run = run_script(install, step, PHASE_UNDO, &status);
    if (run == RUN_INTERRUPTED)
        return INSTALL_INTERRUPTED;
    if (run != RUN_FINE) {
        install_fail(install, "step '%s' could not be undone (exit status %d)", step->id, status);
        snprintf(install->hint, sizeof(install->hint), "its log is %.200s", log);
        return INSTALL_FAILED;
    }
    read_left(install, step);
    before = dir_open_within(install->state_fd, "before", O_PATH | O_DIRECTORY);
    result = before < 0 ? INSTALL_FINE : remove_tree(install, before, step->id);
    dir_close(before);
    if (result != INSTALL_FINE)
        return result;
    journal_add(&install->journal, "undone", step->id, NULL);
    return INSTALL_FINE;
}

static bool was_applied(const struct install *install, const char *id)
{
    char path[64];

    snprintf(path, sizeof(path), "before/%.40s/undo.sh", id);
    return dir_has(install->state_fd, path);
}

static bool is_in_recipe(const struct recipe *recipe, const char *id)
{
    return ANY_OF(i, recipe->n_steps, strcmp(recipe->steps[i].id, id) == 0);
}

/* Undoes steps that the recipe does not have any more. */
static enum install_result undo_dropped(struct install *install)
{
    DIR *dir = dir_list(install->state_fd, "before");
    enum install_result result = INSTALL_FINE;
    struct dirent *entry;

    while (result == INSTALL_FINE && (entry = dir_next(&dir))) {
        struct recipe_step dropped = {
            .id = entry->d_name, .title = entry->d_name, .deadline_s = DROPPED_DEADLINE_S, .budget_s = 60};

        if (entry->d_name[0] != '.' && strlen(entry->d_name) <= 40 && !is_in_recipe(install->recipe, entry->d_name) &&
            was_applied(install, entry->d_name))
            result = undo_step(install, &dropped);
    }
    if (dir)
        closedir(dir);
    return result;
}

/*
 * Removes the state, by which an uninstall that is killed here is recognised, from the inside: the recipe last, and
 * then the lock that this run holds.
 */
static enum install_result remove_state(struct install *install)
{
    static const char *const last[] = {"recipe.yaml", "lock", NULL};
    DIR *dir = dir_list(install->state_fd, ".");
    char folder[1024], path[1024];
    struct dirent *entry;

    while ((entry = dir_next(&dir))) {
        if (!text_is_any(entry->d_name, last) &&
            remove_tree(install, install->state_fd, entry->d_name) != INSTALL_FINE) {
            closedir(dir);
            return INSTALL_FAILED;
        }
    }
    for (size_t i = 0; last[i]; i++) {
        install_path(install, last[i], NULL, path);
        if (unlinkat(install->state_fd, last[i], 0) != 0 && errno != ENOENT)
            return install_fail_errno(install, errno, path);
    }
    install_path(install, NULL, NULL, folder);
    /* The folder and its parents, if they are empty: another run may have begun. */
    for (int i = 0; i < 3 && rmdir(folder) == 0; i++)
        *strrchr(folder, '/') = '\0';
    return INSTALL_FINE;
}

/*
 * Packages that were installed later may need what the steps have installed. This is found out for all steps together
 * before the first one is undone; each undo checks it again. apt writes no caches here.
 */
static enum install_result check_packages(struct install *install)
{
    static const char text[] =
        "added=$(cat \"$EPKIT_STATE\"/before/*/added 2>/dev/null | sort -u)\n"
        "[ -n \"$added\" ] || exit 0\n"
        "there=$(dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package}\\n' $added 2>/dev/null |\n"
        "    sed -n \"s/:$(dpkg --print-architecture)\\$//; s/^.i. *//p\")\n"
        "[ -n \"$there\" ] || exit 0\n"
        "gone=$(apt-get remove -qy -s -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= $there 2>/dev/null) || exit 0\n"
        "printf '%s\\n' \"$added\" >\"$EPKIT_STATE/added\"\n"
        "printf '%s\\n' \"$gone\" | sed -n 's/^Remv \\([^ ]*\\).*/\\1/p' | sort | comm -23 - \"$EPKIT_STATE/added\" | xargs\n"
        "rm -f \"$EPKIT_STATE/added\"\n";
    char others[400];

    if (!install->is_live ||
        run_probe(install, &install->recipe->steps[0], text, REMOVE_SECONDS, others, sizeof(others)) != 0)
        return observe_is_interrupted() ? INSTALL_INTERRUPTED : INSTALL_FINE;
    others[strcspn(others, "\n")] = '\0';
    if (!*others)
        return INSTALL_FINE;
    text_clean(others, others, sizeof(others));
    snprintf(install->hint, sizeof(install->hint), "remove it first: apt-get remove %.200s", others);
    return install_fail(install, "nothing was undone: %.300s was installed later and needs what this recipe installed",
                        others);
}

enum install_result install_undo(struct install *install)
{
    CMD_TRY(check_packages(install));
    unit_remove(install);
    CMD_TRY(undo_dropped(install));
    for (size_t i = install->recipe->n_steps; i-- > 0;) {
        const struct recipe_step *step = &install->recipe->steps[install->recipe->order[i]];

        /* Includes a step that the current values skip: it was applied with other values. */
        if (was_applied(install, step->id))
            CMD_TRY(undo_step(install, step));
    }
    journal_add(&install->journal, "uninstalled", NULL, NULL);
    return remove_state(install);
}
